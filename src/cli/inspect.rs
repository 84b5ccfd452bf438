//! `dplan inspect`: what a run spent its time on, and which bottleneck to attack. Needs profiles only, no plan.

use super::{Outcome, Result, output, progress};
use crate::profile::{CommKernels, analyse, read, report};
use std::path::PathBuf;

/// Say where the time of a recorded run went, and what limits it.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dplan inspect rank*.json.gz            # PyTorch profiler, one file a rank\n  dplan inspect traces/                  # all profiles of a folder\n  dplan inspect report.sqlite --json     # nsys export --type sqlite"
)]
pub struct Args {
    /// Profiles of one run, or folders of them: Kineto or Chrome traces (.json, .json.gz), Nsight Systems (.sqlite, or the CSV of cuda_gpu_trace).
    #[arg(required = true, value_name = "PROFILE")]
    profiles: Vec<PathBuf>,
    /// Kernels whose name holds PART communicate: `my_ring=all_reduce`. May be given several times.
    #[arg(long, value_name = "PART=OP")]
    comm_kernel: Vec<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<Outcome> {
    let mut rules = CommKernels::default();
    for rule in &args.comm_kernel {
        rules.add(rule)?;
    }
    let spinner = progress::spinner("reading profiles");
    let profile = read(&args.profiles, &rules)?;
    spinner.set_message("analysing");
    let analysis = analyse::analyse(&profile);
    spinner.finish_and_clear();
    if args.json {
        output::say!("{}", report::json(&profile, &analysis));
    } else {
        output::put!("{}", report::text(&profile, &analysis));
    }
    Ok(Outcome::Done)
}
