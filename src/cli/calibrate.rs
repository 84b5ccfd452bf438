//! `dplan calibrate`: measured tables into the machine description; or a recorded run into that of the machine it ran on.

use super::{Outcome, Result, output, progress, report};
use crate::calibrate::again::{Again, Asked, again};
use crate::calibrate::{self, Fitted};
use crate::certfile::Certificate;
use crate::cluster;
use crate::planfile::PlanFile;
use crate::profile::{self, CommKernels, analyse};
use anyhow::Context;
use dplan_ir::layers;
use dplan_ir::plan::Plan;
use dplan_planner::predict::{Prediction, predict};
use std::path::{Path, PathBuf};

/// Fit the machine description to what was measured, and say how far it is from that: tables, or with `--plan` a recorded run.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dplan calibrate comm_and_gemm.csv perf_tables/ -o planner/src/machine/fitted/data.rs\n  dplan calibrate out.json --plan plan.json -o machine.json"
)]
pub struct Args {
    /// Tables of matrix products and collectives (.csv, .csv.gz), or profiles of a run of the plan; or folders of them.
    #[arg(required = true, value_name = "TABLE|PROFILE")]
    measured: Vec<PathBuf>,
    /// The profiles are of a run of this plan: fit its cluster to them, and plan again.
    #[arg(long, value_name = "plan.json")]
    plan: Option<PathBuf>,
    /// Write the fits here: of tables, as the data the built-in devices are compiled with; of a run, as a cluster file.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<Outcome> {
    match &args.plan {
        Some(plan) => from_run(&args, plan),
        None => from_tables(&args),
    }
}

fn from_run(args: &Args, plan: &Path) -> Result<Outcome> {
    let file = PlanFile::read(plan)?;
    let spinner = progress::spinner("reading profiles");
    let profile = profile::read(&args.measured, &CommKernels::default())?;
    let analysis = analyse::analyse(&profile);
    spinner.set_message("fitting and planning");
    let asked = asked(plan, &file)?;
    let found = again(&file, &asked, &profile, &analysis)?;
    spinner.finish_and_clear();
    report_run(&file, &asked, &found);
    if let Some(path) = &args.output {
        output::write(path, (serde_json::to_string_pretty(&cluster::machine_json(&found.machine))? + "\n").as_bytes())?;
        output::say!("written     {}: compile for it with --cluster {}", path.display(), path.display());
    }
    Ok(Outcome::Done)
}

/// The pins and limits of a plan, if its certificate is beside it; one of another plan says nothing of this.
fn asked(plan: &Path, file: &PlanFile) -> Result<Asked> {
    let classes = layers::classes(&file.graph);
    let chosen = predict(&file.graph, &classes, &file.cluster, &file.plan).with_context(|| plan.display().to_string())?;
    let certificate = Certificate::of_plan(plan, chosen.step)?;
    Ok(certificate.map_or_else(Asked::default, |Certificate { asked: pins, memory_limit, .. }| Asked { pins, memory_limit }))
}

fn report_run(file: &PlanFile, asked: &Asked, found: &Again) {
    let Again { machine, errors, step, measured, best, free } = found;
    let seconds = |p: &Prediction| output::seconds(p.step.seconds());
    output::put!("{}", report::fitted(machine, file.plan.compute, *errors));
    let measured = measured.map_or_else(|| "not marked in the profile".into(), output::seconds);
    output::say!("step        {} predicted before, {} after, measured {measured}", seconds(&step.0), seconds(&step.1));
    let quicker = |found: &Option<(Plan, Prediction)>, under: &str| match found {
        Some((plan, prediction)) if *plan != file.plan && prediction.step < step.1.step => {
            let times = step.1.step.seconds() / prediction.step.seconds();
            output::say!("plan        another is {times:.2} times as fast here{under}: {}, {} a step", report::degrees(plan), seconds(prediction));
        }
        Some(_) => output::say!("plan        still the best{under}"),
        None => output::say!("plan        none fits here{under}"),
    };
    let pinned = !asked.pins.leave_all_choices();
    quicker(best, &if pinned { format!(" under its pins {}", asked.pins) } else { String::new() });
    if pinned {
        quicker(free, " without pins");
    }
}

fn from_tables(args: &Args) -> Result<Outcome> {
    let spinner = progress::spinner("reading tables");
    let tables = calibrate::read(&args.measured)?;
    spinner.set_message("fitting");
    let fitted = calibrate::fit(&tables);
    spinner.finish_and_clear();
    report(&fitted);
    output::say!("{} rows of other devices or conditions passed over", tables.passed_over);
    if let Some(path) = &args.output {
        output::write(path, calibrate::rust(&fitted).as_bytes())?;
        output::say!("written     {}", path.display());
    }
    Ok(Outcome::Done)
}

fn report(fitted: &Fitted) {
    output::say!("matrix products (errors of sizes from 1024 on)");
    output::say!(
        "  {:10} {:5} {:>6} {:>8} {:>9} {:>11} {:>7}  {:>6}  {:>6}",
        "device",
        "type",
        "rate %",
        "grain",
        "depth",
        "launch ns",
        "rows",
        "median",
        "9 in 10"
    );
    for g in &fitted.gemm {
        let (rate, median, tenth) = (g.efficiency as f64 / 1e4, g.median * 100.0, g.worst_tenth * 100.0);
        let (device, dtype, grain, depth, launch, rows) = (&g.device, &g.dtype, g.grain, g.depth_grain, g.launch, g.rows);
        output::say!("  {device:10} {dtype:5} {rate:6.1} {grain:8} {depth:9} {launch:11} {rows:7}  {median:4.1} %  {tenth:4.1} %");
    }
    output::say!("collectives in a node (median errors below 1 MiB, and from there on)");
    for c in &fitted.collectives {
        output::say!(
            "  {:10} {:15} {} ranks {:6} rows  {:4.1} %  {:4.1} %",
            c.device,
            c.op.name(),
            c.ranks,
            c.rows,
            c.small * 100.0,
            c.large * 100.0
        );
    }
    output::say!("networks");
    for n in &fitted.networks {
        let (alpha, beta) = (n.latency as f64 / 1e3, n.bandwidth as f64 / 1e9);
        output::say!(
            "  {:15} α {alpha:6.1} µs  β {beta:5.1} GB/s a device  {:4} rows  {:4.1} %  {:4.1} %",
            n.name,
            n.rows,
            n.small * 100.0,
            n.large * 100.0
        );
    }
}
