//! `dplan verify`: the static proof of a plan's programs.

use super::output;
use super::{Outcome, Result};
use crate::planfile::PlanFile;
use dplan_ir::{text, verify};
use serde_json::json;
use std::path::PathBuf;

/// Prove a plan's programs: no deadlock, no race, no wrong gradient. Violations are printed inside the program.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dplan verify plan.json")]
pub struct Args {
    plan: PathBuf,
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
    let ok = violations.is_empty();
    if args.json {
        let listed: Vec<String> = violations.iter().map(ToString::to_string).collect();
        output::say!("{}", json!({ "ok": ok, "programs": programs, "instructions": instructions, "violations": listed }));
    } else if ok {
        let ranks = file.program.ranks();
        output::say!(
            "{}: proved: {programs} programs of {instructions} instructions for {ranks} ranks, {} issued in a step",
            args.plan.display(),
            facts.issued
        );
        output::say!("  every collective met in one order, every message received, all ranks reach the end");
        output::say!("  every read after the write it needs, no live bytes overlap, peak memory is the arena");
        output::say!("  every gradient reduced once over the axes it is partial on, the loss divided once");
    } else {
        output::put!("{}", verify::report::annotate(&text::program_printed(&file.program, &file.graph), &violations));
        eprintln!("{}: {} violations", args.plan.display(), violations.len());
    }
    Ok(if ok { Outcome::Done } else { Outcome::No })
}
