//! `dplan profile`: measure this machine.

use super::{Failure, Outcome, Result, output, progress, report};
use crate::{cluster, export, measure};
use anyhow::Context;
use dplan_ir::dtype::DType;
use dplan_planner::machine::Machine;
use std::path::PathBuf;

/// Measure this machine as its ranks will use it, for `compile --cluster machine.json`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dplan profile --cluster cpu:4 -o machine.json\n  dplan compile config.json --cluster machine.json -o plan.json\n  DPLAN_LOCAL=machine.json dplan compile config.json --cluster local -o plan.json"
)]
pub struct Args {
    /// local, or cpu:N for N ranks of this machine.
    #[arg(long, default_value = "local", value_name = "C")]
    cluster: String,
    /// Write the cluster file here.
    #[arg(short, long, value_name = "machine.json")]
    output: PathBuf,
}

pub fn run(args: Args) -> Result<Outcome> {
    let cluster = if args.cluster == "local" { cluster::unmeasured().into() } else { cluster::parse(&args.cluster)? };
    let check = || -> anyhow::Result<&Machine> {
        let machine = cluster.only().filter(|m| m.device.name == "cpu" && m.nodes == 1);
        let machine = machine.with_context(|| format!("{}: only this machine can be measured: local, or cpu:N", args.cluster))?;
        export::check_writable(&args.output).with_context(|| format!("{}: cannot write", args.output.display()))?;
        Ok(machine)
    };
    let machine = check()?;
    let spinner = progress::spinner("measuring");
    let measured = measure::measure(machine, &|what| spinner.set_message(format!("running {what}"))).map_err(Failure::fault)?;
    spinner.finish_and_clear();
    for (layout, seconds) in &measured.runs {
        output::say!("{layout:48} {:>10} a step", output::seconds(*seconds));
    }
    output::put!("{}", report::fitted(&measured.machine, DType::F32, (measured.before, measured.after)));
    let json = serde_json::to_string_pretty(&cluster::machine_json(&measured.machine))? + "\n";
    output::write(&args.output, json.as_bytes())?;
    output::say!("written     {}", args.output.display());
    Ok(Outcome::Done)
}
