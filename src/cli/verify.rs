//! `dplan verify`: the static proof of a plan's programs, and with `--certificate` the proof that no plan is better.

use super::output;
use super::{Outcome, Result};
use crate::certfile::Certificate;
use crate::planfile::PlanFile;
use dplan_ir::program::Updates;
use dplan_ir::{layers, text, verify};
use dplan_planner::certificate::{Checked, check};
use dplan_planner::predict::predict;
use dplan_planner::problem::device_limit;
use dplan_planner::request::{Planner, Request};
use serde_json::json;
use std::path::PathBuf;

/// Prove a plan's programs: no deadlock, no race, no wrong gradient. Violations are printed inside the program.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  dplan verify plan.json\n  dplan verify plan.json --certificate")]
pub struct Args {
    plan: PathBuf,
    /// Also check the certificate that no plan is better, with other code than the search: bounds are found again, and layouts that were solved exactly are
    /// solved again by integer programs [default file: plan.certificate.json beside plan.json].
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    certificate: Option<Option<PathBuf>>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<Outcome> {
    let file = PlanFile::read(&args.plan)?;
    let instructions: usize = file.program.stages.iter().flat_map(|s| s.segments.values()).map(|s| s.body.len()).sum();
    let programs = file.program.stages.len();
    let (facts, violations) = match verify::verify_program(&file.graph, &file.program) {
        Ok(facts) => (facts, Vec::new()),
        Err(violations) => (Default::default(), violations),
    };
    let certified =
        args.certificate.as_ref().map(|path| certify(&file, path.clone().unwrap_or_else(|| Certificate::beside(&args.plan)))).transpose()?;
    let ok = violations.is_empty();
    if args.json {
        let listed: Vec<String> = violations.iter().map(ToString::to_string).collect();
        let sound = certified.as_ref().is_none_or(|c| c.faults.is_empty());
        let mut object = json!({ "ok": ok && sound, "programs": programs, "instructions": instructions, "violations": listed });
        if let Some(c) = &certified {
            object["certificate"] = json!({
                "recomputed": c.checked.recomputed, "resolved": c.checked.resolved, "gap": c.gap, "proved": c.gap == 0.0, "faults": c.faults,
                "space": c.space, "pins": c.about.pins.to_string(), "offloading": c.about.pins.offload.is_pinned(),
                "memory_limit_bytes": c.about.memory_limit.map(|b| b.0),
            });
        }
        output::say!("{object}");
        return Ok(if ok && sound { Outcome::Done } else { Outcome::No });
    }
    if ok {
        let ranks = file.program.ranks();
        output::say!(
            "{}: proved: {programs} programs of {instructions} instructions for {ranks} ranks, {} issued in a step",
            args.plan.display(),
            facts.issued
        );
        output::say!("  every collective met in one order, every message received, all ranks reach the end");
        output::say!("  every read after the write it needs, no live bytes overlap, peak memory is the arena");
        output::say!("  the backward pass is the derivative of the forward pass, each term of a gradient in it once");
        output::say!("  every gradient reduced once over the axes it is partial on, the loss divided once");
        match file.program.updates {
            Updates::Step => {}
            Updates::MicroBatch => output::say!(
                "  every micro-batch's gradient applied once, by itself; both passes of a micro-batch work with one version of parameters, as old as the schedule says"
            ),
        }
    } else {
        output::put!("{}", verify::report::annotate(&text::program_printed(&file.program, &file.graph), &violations));
        eprintln!("{}: {} violations", args.plan.display(), violations.len());
    }
    let sound = certified.is_none_or(|c| said(&c));
    Ok(if ok && sound { Outcome::Done } else { Outcome::No })
}

/// What became of a certificate.
struct Certified {
    path: PathBuf,
    checked: Checked,
    /// How far the plan may be from the best, as a part of its step.
    gap: f64,
    /// The question, and in words the space that the plan is the best of.
    about: Certificate,
    space: String,
    faults: Vec<String>,
}

/// Checks a certificate: that it is about this plan, and that it holds.
fn certify(file: &PlanFile, path: PathBuf) -> Result<Certified> {
    let certificate = Certificate::read(&path)?;
    let Certificate { batch, memory_limit, objective, lower_bound, .. } = certificate;
    let space = certificate.space();
    let classes = layers::classes(&file.graph);
    let (plan, cluster) = (&file.plan, &file.cluster);
    let mut faults = Vec::new();
    let prediction = predict(&file.graph, &classes, cluster, plan).map_err(|e| anyhow::anyhow!("the plan cannot be priced: {e}"))?;
    if prediction.step.0 != objective {
        faults.push(format!("the plan takes {} ns a step, the certificate is about one of {objective}", prediction.step.0));
    }
    if plan.batch() != batch || plan.devices() != cluster.devices() {
        faults.push(format!("the plan is for {} sequences on {} devices, not {batch} on {}", plan.batch(), plan.devices(), cluster.devices()));
    }
    if plan.wire != certificate.pins.wire.unwrap_or_default() {
        faults.push(format!("the plan exchanges gradients in another way ({}) than the certificate is about", plan.wire.name()));
    }
    let request = Request {
        graph: &file.graph,
        classes: &classes,
        cluster,
        batch,
        compute: plan.compute,
        optimizer: plan.optimizer,
        clip: plan.clip,
        pins: certificate.pins.clone(),
        memory_limit,
        deadline: None,
    };
    let mut checked = Checked::default();
    match Planner::new(request) {
        Ok(mut planner) => {
            for (stage, memory) in prediction.memory.iter().enumerate() {
                let limit = device_limit(&planner.prices, cluster.seat(plan, stage as u64).site, memory_limit.map(|b| b.0));
                if memory.total_bytes() > limit {
                    faults.push(format!("stage {stage} takes {} bytes of a device, {limit} are allowed", memory.total_bytes()));
                }
                // Whoever pins layers into the memory of hosts answers for it.
                let host = cluster.site(cluster.seat(plan, stage as u64).site).host_memory.filter(|_| !certificate.asked.offload.is_pinned());
                if let Some(host) = host.filter(|host| memory.arena.host > host.0) {
                    faults.push(format!("stage {stage} takes {} bytes of the host for each device, {} are there", memory.arena.host, host.0));
                }
            }
            match check(&planner.problem, &mut planner.prices, objective, lower_bound, &certificate.closed) {
                Ok(found) => checked = found,
                Err(found) => faults.extend(found.iter().map(ToString::to_string)),
            }
        }
        Err(refusal) => faults.push(refusal.to_string()),
    }
    let gap = objective.saturating_sub(lower_bound) as f64 / objective.max(1) as f64;
    Ok(Certified { path, checked, gap, about: certificate, space, faults })
}

/// Prints what became of a certificate; whether it holds.
fn said(c: &Certified) -> bool {
    if c.faults.is_empty() {
        let Checked { recomputed, resolved } = c.checked;
        let space = format!(" ({})", c.space);
        let claim =
            if c.gap == 0.0 { format!("no plan is better{space}") } else { format!("no plan is more than {:.2} % better{space}", c.gap * 100.0) };
        output::say!("{}: {claim}: {recomputed} layouts bounded again by other code, {resolved} solved again by integer programs", c.path.display());
    } else {
        for fault in c.faults.iter().take(MOST_FAULTS) {
            eprintln!("{}: {fault}", c.path.display());
        }
        eprintln!("{}: {} faults", c.path.display(), c.faults.len());
    }
    c.faults.is_empty()
}

/// Most faults that are printed.
const MOST_FAULTS: usize = 20;
