//! `dplan explain`: what was chosen, why, and what the alternatives cost. Costs are recomputed from the plan.

use super::output::{self, gib, seconds};
use super::{Outcome, Result, args, report};
use crate::certfile::Certificate;
use crate::planfile::{PlanFile, assignment_text};
use anyhow::Context;
use dplan_ir::layers;
use dplan_ir::plan::{Away, Gathered, LayerPlan, Plan, Schedule, Store};
use dplan_ir::rule::Assignment;
use dplan_planner::explain::{Alternative, Note, explain};
use dplan_planner::pins::{Allowed, Pins};
use dplan_planner::predict::{Prediction, predict};
use dplan_planner::request::{Planner, Refusal, Request};
use dplan_planner::units::{Bytes, Nanos};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::PathBuf;

/// Say what was chosen for each layer and what the alternatives would cost, in time and bytes.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  dplan explain plan.json\n  dplan explain plan.json --why-not tp=4,zero=3")]
pub struct Args {
    plan: PathBuf,
    /// The best plan under these pins, and those of the question for what they leave open; and the difference by component.
    #[arg(long, value_name = "k=v,…")]
    why_not: Option<String>,
    /// Memory that arena and context may take on one device [default: as the certificate beside the plan says, if there is one].
    #[arg(long, value_name = "BYTES", value_parser = args::bytes)]
    memory_limit: Option<u64>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<Outcome> {
    let file = PlanFile::read(&args.plan)?;
    let pins = args.why_not.as_deref().map(Pins::parse).transpose()?;
    let classes = layers::classes(&file.graph);
    let chosen = predict(&file.graph, &classes, &file.cluster, &file.plan).map_err(|e| anyhow::anyhow!("{}: {e}", args.plan.display()))?;
    let asked = Asked::of(&args, chosen.step)?;
    if let Some(pins) = pins {
        return why_not(&file, &classes, &chosen, pins, &asked, &args);
    }
    let space = asked.space.clone().map_or_else(|| space_of(&file.plan), Ok)?;
    let mut planner = Planner::new(request(&file, &classes, space, &asked)).map_err(|why| anyhow::anyhow!("{}: {why}", args.plan.display()))?;
    let notes = explain(&planner.problem, &mut planner.prices, &file.plan)
        .with_context(|| format!("{}: the plan is not one that this dplan would make; compile it again", args.plan.display()))?;
    let orders = orders(&file, &classes, &asked)?;
    if args.json {
        let layers: Vec<Value> = notes.iter().map(|note| object(&file, note, &chosen)).collect();
        let orders: Vec<Value> = orders.iter().map(|(schedule, found)| order_object(*schedule, found.as_ref())).collect();
        output::say!(
            "{}",
            json!({ "step_seconds": chosen.step.seconds(), "largest_total_bytes": largest(&chosen), "layers": layers, "schedules": orders })
        );
        return Ok(Outcome::Done);
    }
    output::put!("{}", report::choice(&file));
    output::say!("step        {} predicted, {} a device at most\n", seconds(chosen.step.seconds()), gib(largest(&chosen)));
    for note in &notes {
        output::put!("{}", text(&file, note, &chosen));
    }
    if !orders.is_empty() {
        output::say!(
            "\nother orders of the passes, with the same ranks (simulated; {} is {})",
            file.plan.schedule.name(),
            seconds(chosen.simulated.seconds())
        );
    }
    for (schedule, found) in &orders {
        output::say!("{}", order_text(*schedule, found.as_ref(), &chosen));
    }
    Ok(Outcome::Done)
}

/// The question that a plan answered, as far as it is known.
#[derive(Default)]
struct Asked {
    /// What the plan is the best of.
    space: Option<Pins>,
    pins: Pins,
    memory_limit: Option<Bytes>,
}

impl Asked {
    /// As the certificate beside the plan says, if it is about a plan with such a step; a limit that is given counts before.
    fn of(args: &Args, step: Nanos) -> Result<Asked> {
        let given = args.memory_limit.map(Bytes);
        Ok(match Certificate::of_plan(&args.plan, step)? {
            Some(Certificate { pins, asked, memory_limit, .. }) => Asked { space: Some(pins), pins: asked, memory_limit: given.or(memory_limit) },
            None => Asked { memory_limit: given, ..Asked::default() },
        })
    }
}

/// The space of a plan of which nothing else is known: offloading is in it where the plan has it.
fn space_of(plan: &Plan) -> Result<Pins> {
    let stores: Vec<Store> = plan.options.iter().flat_map(|o| o.away().stores()).collect();
    let has_stored = plan.options.iter().any(|o| o.activations.is_some());
    let is_in_space = |a: &Away| a.stores().all(|store| stores.contains(&store)) && (has_stored || a.activations.is_none());
    let ways: Vec<String> = Away::all().filter(is_in_space).map(Away::name).collect();
    Ok(Pins::parse(&if stores.is_empty() { String::new() } else { format!("offload={}", ways.join("+")) })?)
}

/// The best plan of every other schedule that has the same ranks, nothing where there is none; of a pipeline.
fn orders(file: &PlanFile, classes: &[u32], asked: &Asked) -> Result<Vec<(Schedule, Option<(Plan, Prediction)>)>> {
    let plan = &file.plan;
    // `gpipe` costs what `1f1b` does and keeps more.
    // Another time of updates is another training run.
    let alike = |s: Schedule| s.updates() == plan.schedule.updates();
    let others = Schedule::ALL.into_iter().filter(|&s| plan.pp() > 1 && s != plan.schedule && s != Schedule::GPipe && alike(s));
    let best = |schedule: Schedule| -> Result<_> {
        let (dp, ep, cp, tp, pp) = (plan.dp, plan.ep, plan.cp, plan.tp, plan.pp());
        let keys = plan.keys.name();
        let pins = Pins::parse(&format!("dp={dp},ep={ep},cp={cp},keys={keys},tp={tp},pp={pp},schedule={}", schedule.name()))?;
        // Another order has another number of virtual stages.
        let pins = pins.over(&Pins { virtual_stages: Allowed::ANY, ..asked.pins.clone() });
        match Planner::new(request(file, classes, pins, asked)).and_then(|mut p| p.search()) {
            Ok(answer) => {
                let prediction = predict(&file.graph, classes, &file.cluster, &answer.plan)?;
                Ok((schedule, Some((answer.plan, prediction))))
            }
            Err(Refusal::Solver(fault)) => Err(fault.into()),
            Err(_) => Ok((schedule, None)),
        }
    };
    others.map(best).collect()
}

fn order_text(schedule: Schedule, found: Option<&(Plan, Prediction)>, chosen: &Prediction) -> String {
    let name = schedule.name();
    let Some((plan, other)) = found else { return format!("  {name:<12} nothing fits") };
    let parts = if plan.virtual_stages > 1 { format!(", {} virtual stages each", plan.virtual_stages) } else { String::new() };
    let (step, memory) = (seconds(other.simulated.seconds()), gib(largest(other)));
    let percent = (other.simulated.seconds() / chosen.simulated.seconds() - 1.0) * 100.0;
    format!("  {name:<12} {step} ({percent:+.1} %) with micro-batches of {}{parts}, {memory} at most: --pin schedule={name}", plan.micro_batch)
}

fn order_object(schedule: Schedule, found: Option<&(Plan, Prediction)>) -> Value {
    let of = |(plan, other): &(Plan, Prediction)| {
        json!({
            "virtual": plan.virtual_stages, "micro_batch": plan.micro_batch, "step_seconds": other.step.seconds(),
            "simulated_seconds": other.simulated.seconds(), "largest_total_bytes": largest(other),
        })
    };
    json!({ "schedule": schedule.name(), "best": found.map(of) })
}

/// A question about the same model and cluster; gradients are exchanged as in the plan, unless pins say how.
fn request<'a>(file: &'a PlanFile, classes: &'a [u32], pins: Pins, asked: &Asked) -> Request<'a> {
    let pins = pins.like(&file.plan);
    Request {
        graph: &file.graph,
        classes,
        cluster: &file.cluster,
        batch: file.plan.batch(),
        compute: file.plan.compute,
        optimizer: file.plan.optimizer,
        clip: file.plan.asked_clip(),
        pins,
        memory_limit: asked.memory_limit,
        deadline: None,
    }
}

/// A note for people: what was chosen and costs, the next best, and what memory forbids.
fn text(file: &PlanFile, note: &Note, chosen: &Prediction) -> String {
    let span = if note.first == note.last { format!("layer {}", note.first) } else { format!("layers {}-{}", note.first, note.last) };
    let (LayerPlan { zero, recompute, .. }, away) = (&note.plan, note.plan.away());
    let offloaded = if away == Away::default() { String::new() } else { format!(" offload {}", away.name()) };
    let devices = report::devices(file, note.stage as u64).map_or(String::new(), |on| format!(" ({on})"));
    let mut out = format!("{span} on stage {}{devices}: zero {}{offloaded} recompute {}", note.stage, zero.0, recompute.name());
    let each = if note.first == note.last { "" } else { " each" };
    let (time, end) = (seconds(note.time.seconds()), seconds(note.end.seconds()));
    let _ = writeln!(out, "; {time} a micro-batch and {end} at the end of the step{each}");
    let _ =
        writeln!(out, "  keeps      {} of states, {} for each micro-batch in flight{}{each}", gib(note.states.0), gib(note.frame.0), versions(note));
    let other = |a: &Alternative| {
        let step = (a.step.seconds() - chosen.step.seconds()) * 1e3;
        format!("{} for one of them: step {step:+.3} ms, memory {}", change(file, note, &a.plan), difference(note.arena.0, a.arena.0))
    };
    let _ = match &note.next {
        Some(next) => writeln!(out, "  next best  {}", other(next)),
        None => writeln!(out, "  next best  nothing else fits"),
    };
    if let Some(denied) = &note.denied {
        let _ = writeln!(out, "  denied     {}, short of {}", other(denied), gib(denied.short.0));
    }
    out
}

/// Parameters that are put by, if any are.
fn versions(note: &Note) -> String {
    match note.versions {
        (0, _) | (_, Bytes(0)) => String::new(),
        (count, each) => format!(", {} for each of {count} versions put by", gib(each.0)),
    }
}

/// A note as JSON.
fn object(file: &PlanFile, note: &Note, chosen: &Prediction) -> Value {
    let other = |a: &Alternative| {
        json!({
            "change": change(file, note, &a.plan), "step_seconds": a.step.seconds(), "step_difference_seconds": a.step.seconds() - chosen.step.seconds(),
            "arena_bytes": a.arena.0, "arena_difference_bytes": a.arena.0 as i128 - i128::from(note.arena.0), "short_bytes": a.short.0,
        })
    };
    let mut object = json!({
        "layers": [note.first, note.last], "stage": note.stage,
        "zero": note.plan.zero.0, "offload": note.plan.away().name(), "recompute": note.plan.recompute.name(),
        "micro_batch_seconds": note.time.seconds(), "end_seconds": note.end.seconds(),
        "states_bytes": note.states.0, "frame_bytes": note.frame.0, "arena_bytes": note.arena.0,
        "next": note.next.as_ref().map(other), "denied": note.denied.as_ref().map(other),
    });
    if note.versions.0 > 0 {
        object["versions"] = note.versions.0.into();
        object["version_bytes"] = note.versions.1.0.into();
    }
    if let Some(on) = report::devices(file, note.stage as u64) {
        object["on"] = on.into();
    }
    object
}

/// Ops whose split is named; of more, how many.
const MOST_OPS: usize = 2;

/// What another way of running a layer does otherwise: `zero 1 -> 2, q_proj f=tp0 -> whole`.
fn change(file: &PlanFile, note: &Note, other: &LayerPlan) -> String {
    let was = &note.plan;
    let mut parts = Vec::new();
    if was.zero != other.zero {
        parts.push(format!("zero {} -> {}", was.zero.0, other.zero.0));
    }
    if was.away() != other.away() {
        parts.push(format!("offload {} -> {}", was.away().name(), other.away().name()));
    }
    if was.recompute != other.recompute {
        parts.push(format!("recompute {} -> {}", was.recompute.name(), other.recompute.name()));
    }
    if was.gathered != other.gathered {
        parts.push(match other.gathered {
            Gathered::Keep => "gathered values kept".into(),
            Gathered::Again => "gathered values gathered again".into(),
        });
    }
    let mesh = file.plan.mesh();
    let split = |a: &Assignment| match assignment_text(a, &mesh) {
        text if text.is_empty() => "whole".to_string(),
        text => text,
    };
    let nodes = file.graph.forward_nodes().filter(|(_, n)| n.layer as usize == note.first);
    let ops: Vec<String> = nodes
        .zip(was.strategy.iter().zip(&other.strategy))
        .filter(|(_, (a, b))| a != b)
        .map(|((_, node), (a, b))| {
            let name = node.outputs.first().map_or("", |&v| file.graph.values[v].name.as_str());
            format!("{name} {} -> {}", split(a), split(b))
        })
        .collect();
    parts.extend(ops.iter().take(MOST_OPS).cloned());
    if ops.len() > MOST_OPS {
        parts.push(format!("{} more ops split otherwise", ops.len() - MOST_OPS));
    }
    parts.join(", ")
}

/// `+1.50 GiB`.
fn difference(from: u64, to: u64) -> String {
    format!("{}{}", if to < from { "-" } else { "+" }, gib(to.abs_diff(from)))
}

/// The best plan under the pins and those of the question that they say nothing of, and what is different, part by part.
fn why_not(file: &PlanFile, classes: &[u32], chosen: &Prediction, pins: Pins, asked: &Asked, args: &Args) -> Result<Outcome> {
    let pins = pins.over(&asked.pins);
    let within = asked.memory_limit.map_or(String::new(), |limit| format!(", in {limit} of each device"));
    let heading = format!("the best plan under the pins {pins}{within}:");
    let answer = match Planner::new(request(file, classes, pins, asked)).and_then(|mut p| p.search()) {
        Ok(answer) => answer,
        Err(Refusal::Infeasible(why)) => {
            if args.json {
                output::say!("{}", json!({ "infeasible": why.to_string() }));
            } else {
                output::say!("{why}");
            }
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
        ("offload", chosen.parts.offload, other.parts.offload),
    ];
    let pinned = PlanFile { plan: answer.plan, ..file.clone() };
    if args.json {
        let rows: Map<_, _> = rows.iter().map(|(n, a, b)| (n.replace(' ', "_"), json!([a.seconds(), b.seconds()]))).collect();
        output::say!(
            "{}",
            json!({ "seconds": rows, "largest_total_bytes": [largest(chosen), largest(&other)], "chosen": report::chosen(file), "pinned": report::chosen(&pinned) })
        );
        return Ok(Outcome::Done);
    }
    output::say!("{heading}");
    output::put!("{}", report::choice(&pinned));
    output::say!("\n{:<24} {:>12} {:>12} {:>14}", "", "chosen", "pinned", "difference");
    for (name, a, b) in rows {
        let more = if b < a { "-" } else { "+" };
        let difference = format!("{more}{}", seconds((b.seconds() - a.seconds()).abs()));
        output::say!("{name:<24} {:>12} {:>12} {difference:>14}", seconds(a.seconds()), seconds(b.seconds()));
    }
    let (a, b) = (largest(chosen), largest(&other));
    output::say!("{:<24} {:>12} {:>12} {:>14}", "memory at most", gib(a), gib(b), difference(a, b));
    Ok(Outcome::Done)
}

fn largest(p: &Prediction) -> u64 {
    p.memory.iter().map(|m| m.total_bytes()).max().unwrap_or(0)
}
