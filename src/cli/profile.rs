//! `dplan profile`: measure this machine.

use super::{Failure, Outcome, Result, output, progress};
use crate::{cluster, export, measure};
use anyhow::{Context, ensure};
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
    let machine = if args.cluster == "local" { cluster::unmeasured() } else { cluster::parse(&args.cluster)? };
    let check = || -> anyhow::Result<()> {
        ensure!(machine.device.name == "cpu" && machine.nodes == 1, "{}: only this machine can be measured: local, or cpu:N", args.cluster);
        export::check_writable(&args.output).with_context(|| format!("{}: cannot write", args.output.display()))
    };
    check()?;
    let spinner = progress::spinner("measuring");
    let measured = measure::measure(&machine, &|what| spinner.set_message(format!("running {what}"))).map_err(Failure::fault)?;
    spinner.finish_and_clear();
    for (layout, seconds) in &measured.runs {
        output::say!("{layout:48} {:>10} a step", output::seconds(*seconds));
    }
    let m = &measured.machine;
    let product = m.device.matrix_efficiency.of(m.device.peak.f32).0 as f64 * 1e-9;
    output::say!("products    {product:.1} GFLOP/s a rank, grains {} and {}", m.device.matrix_grain, m.device.matrix_depth_grain);
    output::say!("memory      {:.1} GB/s a rank, {} ns a kernel", m.device.bandwidth.0 as f64 * 1e-9, m.device.launch.0);
    output::say!("collectives α {:.1} µs, β {:.2} GB/s", m.intra.latency.0 as f64 * 1e-3, m.intra.bandwidth.0 as f64 * 1e-9);
    output::say!(
        "errors      of single instructions, weighted by time: {:.0} % before, {:.0} % after",
        measured.before * 100.0,
        measured.after * 100.0
    );
    let json = serde_json::to_string_pretty(&cluster::to_json(m))? + "\n";
    output::write(&args.output, json.as_bytes())?;
    output::say!("written     {}", args.output.display());
    Ok(Outcome::Done)
}
