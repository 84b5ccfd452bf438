//! `dplan trace`: the predicted timeline, for Perfetto or chrome://tracing.
//!
//! One process a stage, one thread a stream. Passes are named as PyTorch's pipeline schedules name them (`PP:0F3`: virtual stage 0, forward, micro-batch 3), so
//! that a predicted and a measured timeline can be laid over each other.

use super::{Outcome, Result, output, report};
use crate::export;
use crate::planfile::PlanFile;
use anyhow::Context;
use dplan_ir::layers;
use dplan_planner::predict::predict;
use dplan_planner::simulate::spans;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Write the predicted timeline as Chrome trace JSON.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dplan trace plan.json -o trace.json   # then open it in https://ui.perfetto.dev")]
pub struct Args {
    plan: PathBuf,
    /// Write here; to standard output if absent.
    #[arg(short, long, value_name = "trace.json")]
    output: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<Outcome> {
    let file = PlanFile::read(&args.plan)?;
    if let Some(path) = &args.output {
        export::check_writable(path).with_context(|| format!("{}: cannot write", path.display()))?;
    }
    let classes = layers::classes(&file.graph);
    let prediction = predict(&file.graph, &classes, &file.cluster, &file.plan).map_err(|e| anyhow::anyhow!("{}: {e}", args.plan.display()))?;
    let mut events: Vec<Value> = Vec::new();
    let pipeline = file.plan.pipeline();
    let stages = spans(&prediction.works, &pipeline);
    for (stage, passes) in stages.iter().enumerate() {
        let layers = |c: u64| format!("{}-{}", file.plan.stages[c as usize].first, file.plan.stages[c as usize].last);
        let layers: Vec<String> = pipeline.virtual_stages_of(stage as u64).map(layers).collect();
        let on = report::devices(&file, stage as u64).map_or(String::new(), |on| format!(" on {on}"));
        let name = format!("stage {stage}{on}: layers {}", layers.join(", "));
        events.push(json!({ "ph": "M", "pid": stage, "name": "process_name", "args": { "name": name } }));
        events.push(json!({ "ph": "M", "pid": stage, "tid": 0, "name": "thread_name", "args": { "name": "compute" } }));
        for span in passes {
            let name = format!("PP:{}{}{}", span.virtual_stage, span.turn.pass.letter(), span.turn.micro_batch);
            events.push(complete(stage, &name, span.start, span.end - span.start));
        }
        let end = prediction.stages[stage].end;
        if let Some(last) = passes.iter().map(|s| s.end).max()
            && end > 0
        {
            events.push(complete(stage, "gradient synchronisation and optimizer", last, end));
        }
    }
    let text = json!({ "displayTimeUnit": "ms", "traceEvents": events }).to_string() + "\n";
    match &args.output {
        Some(path) => output::write(path, text.as_bytes())?,
        None => output::put!("{text}"),
    }
    Ok(Outcome::Done)
}

/// A span, from nanoseconds.
fn complete(stage: usize, name: &str, start: u64, duration: u64) -> Value {
    json!({ "ph": "X", "pid": stage, "tid": 0, "cat": "predicted", "name": name, "ts": start as f64 * 1e-3, "dur": duration as f64 * 1e-3 })
}
