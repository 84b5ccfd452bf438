//! `dplan calibrate`: measured tables into the machine description.

use super::{Outcome, Result, output, progress};
use crate::calibrate::{self, Fitted};
use std::path::PathBuf;

/// Fit the machine description to measured tables, and say how far it is from them.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dplan calibrate comm_and_gemm.csv perf_tables/ -o planner/src/machine/fitted/data.rs")]
pub struct Args {
    /// Tables of matrix products and collectives (.csv, .csv.gz), or folders of them.
    #[arg(required = true, value_name = "TABLE")]
    tables: Vec<PathBuf>,
    /// Write the fits here, as the data the built-in devices are compiled with.
    #[arg(short, long, value_name = "data.rs")]
    output: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<Outcome> {
    let spinner = progress::spinner("reading tables");
    let tables = calibrate::read(&args.tables)?;
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
