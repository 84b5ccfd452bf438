//! `dplan replay`: published runs priced and compared with what was measured.

use super::{Outcome, Result, output, progress};
use crate::replay::{self, Priced, Refit, Score, Scores};
use anyhow::Context;
use dplan_planner::executor::{Constant, Constants};
use serde_json::{Value, json};
use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

/// Price published runs and compare with their measurements: time, memory, order of layouts.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dplan replay throughput.csv\n  dplan replay throughput.csv --json > replay.jsonl\n  dplan replay throughput.csv --refit        # fit the executors' constants again, and leave each source out in turn"
)]
pub struct Args {
    /// One published run a row.
    rows: PathBuf,
    /// Print one object a row, then the summary.
    #[arg(long)]
    json: bool,
    /// Fit the constants to these rows, and say how well each source is predicted by a fit without it.
    #[arg(long)]
    refit: bool,
}

pub fn run(args: Args) -> Result<Outcome> {
    let shown = args.rows.display().to_string();
    let file = File::open(&args.rows).with_context(|| shown.clone())?;
    let rows = replay::read(&shown, BufReader::new(file))?;
    let refit = args.refit.then(|| {
        let spinner = progress::spinner("fitting, once without each source");
        let refit = replay::refit(&rows);
        spinner.finish_and_clear();
        refit
    });
    let constants = refit.as_ref().map_or(Constants::FITTED, |r| r.constants);
    let priced = replay::price_all(&rows, &constants);
    let scores = replay::score(&priced);
    if args.json {
        priced.iter().for_each(|p| output::say!("{}", row_json(p)));
        output::say!("{}", json!({ "summary": summary_json(&scores, &constants, refit.as_ref()) }));
    } else {
        text(&priced, &scores, &constants, refit.as_ref());
    }
    Ok(Outcome::Done)
}

fn row_json(p: &Priced<'_>) -> Value {
    json!({
        "row_id": p.row.id,
        "source_id": p.row.source,
        "predicted_seconds": p.seconds,
        "measured_seconds": p.row.measured.seconds,
        "predicted_memory_bytes": p.counted(),
        "measured_memory_bytes": p.row.measured.memory.map(|m| m.0),
        "predicted_fits": p.fits,
        "reason": p.row.run.as_ref().err(),
    })
}

fn score_json(s: &Score) -> Value {
    json!({
        "rows": s.rows, "priced": s.priced, "compared": s.compared, "mape": s.mean, "median": s.median, "largest": s.largest, "bias": s.bias,
        "memory_rows": s.memory_rows, "memory_mape": s.memory_mean,
    })
}

fn summary_json(scores: &Scores, constants: &Constants, refit: Option<&Refit>) -> Value {
    let sources: serde_json::Map<String, Value> = scores.sources.iter().map(|(name, s)| (name.clone(), score_json(s))).collect();
    let named: serde_json::Map<String, Value> = Constant::ALL.iter().map(|(c, name)| (name.to_string(), json!(constants.get(*c)))).collect();
    json!({
        "all": score_json(&scores.all),
        "sources": sources,
        "pairs": {
            "different": scores.pairs.different, "right_order": scores.pairs.right, "repeated": scores.pairs.repeated,
            "doubted": scores.pairs.doubted, "doubted_right_order": scores.pairs.doubted_right,
        },
        "fits": { "right": scores.fits_right, "wrong": scores.fits_wrong, "borderline": scores.fits_borderline },
        "constants": named,
        "left_out_mape": refit.map(|r| &r.left_out),
    })
}

fn text(priced: &[Priced<'_>], scores: &Scores, constants: &Constants, refit: Option<&Refit>) {
    let percent = |x: Option<f64>| x.map_or_else(|| "-".into(), |x| format!("{:+.1} %", x * 100.0));
    let seconds = |x: Option<f64>| x.map_or_else(|| "-".into(), output::seconds);
    for p in priced {
        let memory = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), output::gib);
        let fate = match (p.row.measured.out_of_memory, p.fits) {
            (true, Some(false)) => "out of memory, as predicted",
            (true, Some(true)) => "out of memory, predicted to fit",
            (true, None) => "out of memory",
            (false, Some(false)) => "ran, predicted not to fit",
            (false, _) => "",
        };
        match &p.row.run {
            Ok(run) => output::say!(
                "{:7} {:22} {:14} predicted {:>9} measured {:>9} {:>8}   memory {:>10} {:>10} {:>8}  {fate}",
                p.row.id,
                p.row.source,
                run.executor.name(),
                seconds(p.seconds),
                seconds(p.row.measured.seconds),
                percent(p.error()),
                memory(p.counted()),
                memory(p.row.measured.memory.map(|m| m.0)),
                percent(p.memory_error())
            ),
            Err(reason) => output::say!("{:7} {:22} not priced: {reason}", p.row.id, p.row.source),
        }
    }
    output::say!(
        "\n{:24} {:>5} {:>7} {:>8} {:>9} {:>9} {:>9} {:>9}  {:>14}  {:>12}",
        "source",
        "rows",
        "priced",
        "compared",
        "mean |e|",
        "median",
        "largest",
        "bias",
        "memory mean",
        "left out"
    );
    let plain = |x: Option<f64>| x.map_or_else(|| "-".into(), |x| format!("{:.1} %", x * 100.0));
    let line = |name: &str, s: &Score, left_out: Option<f64>| {
        let memory = s.memory_mean.map_or_else(|| "-".into(), |m| format!("{:.1} % of {}", m * 100.0, s.memory_rows));
        output::say!(
            "{name:24} {:5} {:7} {:8} {:>9} {:>9} {:>9} {:>9}  {memory:>14}  {:>12}",
            s.rows,
            s.priced,
            s.compared,
            plain(s.mean),
            plain(s.median),
            plain(s.largest),
            percent(s.bias),
            plain(left_out)
        );
    };
    for (name, s) in &scores.sources {
        line(name, s, refit.and_then(|r| r.left_out.get(name)).copied());
    }
    line("all", &scores.all, None);
    let share = |n: usize, of: usize| if of == 0 { 0.0 } else { n as f64 / of as f64 * 100.0 };
    output::say!(
        "pairs of layouts more than {:.0} % apart: {} of {} in the right order ({:.1} %), and {} of {} with a time that its own source doubts; \
         {} pairs as far apart are one layout measured twice",
        replay::DIFFERENT * 100.0,
        scores.pairs.right,
        scores.pairs.different,
        share(scores.pairs.right, scores.pairs.different),
        scores.pairs.doubted_right,
        scores.pairs.doubted,
        scores.pairs.repeated
    );
    output::say!(
        "whether it fits: {} right, {} wrong, {} within {:.0} % of the capacity",
        scores.fits_right,
        scores.fits_wrong,
        scores.fits_borderline,
        replay::BORDERLINE * 100.0
    );
    let named: Vec<String> = Constant::ALL.iter().map(|(c, name)| format!("{name} {:.4}", constants.get(*c))).collect();
    output::say!("constants   {}", named.join(", "));
}
