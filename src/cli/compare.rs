//! `dplan compare`: predicted against measured.

use super::{Outcome, Result, output, progress};
use crate::compare::{self, Comparison, Line};
use crate::planfile::PlanFile;
use crate::profile::{CommKernels, analyse, read};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Lay a recorded run over its plan: predicted against measured, and which differences make up the whole.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dplan run plan.json --steps 5 --profile out.json\n  dplan compare plan.json out.json")]
pub struct Args {
    plan: PathBuf,
    /// Profiles of one run of the plan, or folders of them.
    #[arg(required = true, value_name = "PROFILE")]
    profiles: Vec<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<Outcome> {
    let plan = PlanFile::read(&args.plan)?;
    let spinner = progress::spinner("reading profiles");
    let profile = read(&args.profiles, &CommKernels::default())?;
    let analysis = analyse::analyse(&profile);
    spinner.finish_and_clear();
    let comparison = compare::compare(&plan, &profile, &analysis)?;
    if args.json {
        output::say!("{}", to_json(&comparison));
    } else {
        text(&comparison);
    }
    Ok(Outcome::Done)
}

fn line_json(line: &Line) -> Value {
    json!({ "name": line.name, "predicted_seconds": line.predicted, "measured_seconds": line.measured })
}

fn to_json(c: &Comparison) -> Value {
    let lines = |lines: &[Line]| lines.iter().map(line_json).collect::<Vec<_>>();
    json!({
        "step": line_json(&c.step),
        "step_median_seconds": c.step_median,
        "parts": lines(&c.parts),
        "classes": lines(&c.classes),
        "collectives": lines(&c.collectives),
        "memory": { "predicted_bytes": c.memory.0, "measured_bytes": c.memory.1 },
        "causes": lines(&c.causes),
        "notes": c.notes,
    })
}

fn text(c: &Comparison) {
    output::say!("{:42} {:>12} {:>12} {:>10}", "", "predicted", "measured", "");
    let line = |l: &Line| {
        let error = l.error().map_or_else(|| "-".into(), |e| format!("{:+.1} %", e * 100.0));
        output::say!("{:42} {:>12} {:>12} {error:>10}", l.name, output::seconds(l.predicted), output::seconds(l.measured));
    };
    line(&c.step);
    if let Some(median) = c.step_median {
        line(&Line { name: "step, the median".into(), predicted: c.step.predicted, measured: median });
    }
    c.parts.iter().for_each(line);
    if !c.classes.is_empty() {
        output::say!("\nby class of op, a step of a mean rank");
        c.classes.iter().for_each(line);
    }
    if !c.collectives.is_empty() {
        output::say!("\none call of each collective, without waiting");
        c.collectives.iter().for_each(line);
    }
    let measured = c.memory.1.map_or_else(|| "not in the profile".into(), output::gib);
    output::say!("\nmemory: {} predicted, {measured} measured", output::gib(c.memory.0));
    output::say!("\nlargest differences");
    for cause in c.causes.iter().take(5) {
        let sign = if cause.difference() < 0.0 { "less" } else { "more" };
        output::say!("  {}: {} {sign} than predicted", cause.name, output::seconds(cause.difference().abs()));
    }
    for note in &c.notes {
        output::say!("note: {note}");
    }
}
