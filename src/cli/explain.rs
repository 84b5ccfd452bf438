//! `dplan explain`: what was chosen, why, and what the alternatives cost. Costs are recomputed from the plan.

use super::output::{self, gib, seconds};
use super::{Outcome, Result, report};
use crate::planfile::PlanFile;
use dplan_ir::layers;
use dplan_ir::plan::{Plan, Recompute, Zero};
use dplan_planner::pins::Pins;
use dplan_planner::predict::{Prediction, predict};
use dplan_planner::request::{Planner, Refusal, Request};
use serde_json::json;
use std::path::PathBuf;

/// Say what was chosen for each layer and what the alternatives would cost, in time and bytes.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  dplan explain plan.json\n  dplan explain plan.json --why-not tp=4,zero=3")]
pub struct Args {
    plan: PathBuf,
    /// The best plan under these pins, and the difference by component.
    #[arg(long, value_name = "k=v,…")]
    why_not: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<Outcome> {
    let file = PlanFile::read(&args.plan)?;
    let pins = args.why_not.as_deref().map(Pins::parse).transpose()?;
    let classes = layers::classes(&file.graph);
    let costs = |plan: &Plan| predict(&file.graph, &classes, &file.cluster, plan);
    let chosen = costs(&file.plan).map_err(|e| anyhow::anyhow!("{}: {e}", args.plan.display()))?;
    if let Some(pins) = pins {
        return why_not(&file, &classes, &chosen, pins, &args);
    }
    let alternatives = alternatives(&file.plan, &classes, &costs);
    if args.json {
        let rows: Vec<_> = alternatives
            .iter()
            .map(|a| json!({ "layers": a.layers, "change": a.change, "step_seconds": a.step, "largest_total_bytes": a.bytes }))
            .collect();
        output::say!("{}", json!({ "step_seconds": chosen.step.seconds(), "largest_total_bytes": largest(&chosen), "alternatives": rows }));
        return Ok(Outcome::Done);
    }
    output::put!("{}", report::choice(&file));
    output::say!("step        {} predicted, {} a device at most", seconds(chosen.step.seconds()), gib(largest(&chosen)));
    output::say!("\nif one kind of layer were run otherwise:");
    let limit = file.cluster.device.memory.0;
    for a in &alternatives {
        let step = a.step - chosen.step.seconds();
        let bytes = i128::from(a.bytes) - i128::from(largest(&chosen));
        let fits = if a.bytes > limit { "  does not fit" } else { "" };
        let sign = if bytes < 0 { "-" } else { "+" };
        output::say!(
            "  layers {:<12} {:<28} step {:>+9.3} ms   memory {sign}{}{fits}",
            a.layers,
            a.change,
            step * 1e3,
            gib(bytes.unsigned_abs() as u64)
        );
    }
    Ok(Outcome::Done)
}

/// One change to all layers that run alike.
struct Alternative {
    layers: String,
    change: String,
    step: f64,
    bytes: u64,
}

/// Every other ZeRO stage and recomputation of every kind of layer, the cheapest first.
fn alternatives<E>(plan: &Plan, classes: &[u32], costs: &dyn Fn(&Plan) -> std::result::Result<Prediction, E>) -> Vec<Alternative> {
    let mut kinds: Vec<(u32, u32)> = classes.iter().copied().zip(plan.layers.iter().copied()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let mut all = Vec::new();
    for (class, option) in kinds {
        let members: Vec<usize> = (0..plan.layers.len()).filter(|&l| classes[l] == class && plan.layers[l] == option).collect();
        let was = &plan.options[option as usize];
        let zeros = (0..=3)
            .filter(|z| plan.dp * plan.cp > 1 && Zero(*z) != was.zero)
            .map(|z| (Zero(z), was.recompute, format!("zero {} -> {z}", was.zero.0)));
        let recomputes = Recompute::ALL.into_iter().filter(|r| *r != was.recompute);
        let recomputes = recomputes.map(|r| (was.zero, r, format!("recompute {} -> {}", was.recompute.name(), r.name())));
        for (zero, recompute, change) in zeros.chain(recomputes) {
            let mut other = plan.clone();
            let mut layer = was.clone();
            (layer.zero, layer.recompute) = (zero, recompute);
            other.options.push(layer);
            for &m in &members {
                other.layers[m] = other.options.len() as u32 - 1;
            }
            if let Ok(p) = costs(&other) {
                all.push(Alternative { layers: span(&members), change, step: p.step.seconds(), bytes: largest(&p) });
            }
        }
    }
    all.sort_by(|a, b| a.step.total_cmp(&b.step));
    all
}

fn why_not(file: &PlanFile, classes: &[u32], chosen: &Prediction, pins: Pins, args: &Args) -> Result<Outcome> {
    let request = Request {
        graph: &file.graph,
        classes,
        machine: &file.cluster,
        batch: file.plan.batch(),
        compute: file.plan.compute,
        optimizer: file.plan.optimizer,
        clip: file.plan.clip,
        pins,
        memory_limit: None,
        deadline: None,
    };
    let answer = match Planner::new(request).and_then(|mut p| p.search()) {
        Ok(answer) => answer,
        Err(Refusal::Infeasible(why)) => {
            output::say!("{why}");
            return Ok(Outcome::No);
        }
        Err(other) => return Err(anyhow::anyhow!("{other}").into()),
    };
    let other = predict(&file.graph, classes, &file.cluster, &answer.plan)?;
    let rows = [
        ("step", chosen.step, other.step),
        ("compute", chosen.parts.compute, other.parts.compute),
        ("exposed communication", chosen.parts.exposed_comm, other.parts.exposed_comm),
        ("bubble", chosen.parts.bubble, other.parts.bubble),
        ("optimizer", chosen.parts.optimizer, other.parts.optimizer),
    ];
    if args.json {
        let rows: serde_json::Map<_, _> = rows.iter().map(|(n, a, b)| (n.replace(' ', "_"), json!([a.seconds(), b.seconds()]))).collect();
        output::say!("{}", json!({ "seconds": rows, "largest_total_bytes": [largest(chosen), largest(&other)] }));
        return Ok(Outcome::Done);
    }
    let pinned = PlanFile { plan: answer.plan, ..file.clone() };
    output::say!("the best plan under these pins:");
    output::put!("{}", report::choice(&pinned));
    output::say!("{:<24} {:>12} {:>12}", "", "chosen", "pinned");
    for (name, a, b) in rows {
        output::say!("{name:<24} {:>12} {:>12}", seconds(a.seconds()), seconds(b.seconds()));
    }
    output::say!("{:<24} {:>12} {:>12}", "memory at most", gib(largest(chosen)), gib(largest(&other)));
    Ok(Outcome::Done)
}

fn largest(p: &Prediction) -> u64 {
    p.memory.iter().map(|m| m.total_bytes()).max().unwrap_or(0)
}

/// `0, 3-5`.
fn span(members: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &m in members {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == m => *last = m,
            _ => runs.push((m, m)),
        }
    }
    runs.iter().map(|&(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect::<Vec<_>>().join(", ")
}
