//! The plan against textbook systems: `cargo bench --bench textbook` compiles every model of the shared folder that imports for 8, 64 and 1024 devices of two kinds, and
//! prints the step, how much longer the best synchronous baseline that fits takes, how far the simulation is from the objective, and how long all that took. A search ends after
//! [`LIMIT`]; its plan then has a gap.

#[path = "../tests/common/mod.rs"]
mod common;

use dplan::compile::{CompileError, Options, compile};
use dplan::import::{self, ImportOptions};
use dplan_ir::dtype::DType;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Of one search.
const LIMIT: Duration = Duration::from_secs(30);

fn main() {
    let bench = std::env::args().any(|a| a == "--bench");
    let own = || Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/models");
    let folder = common::shared().map_or_else(own, |shared| shared.join("models"));
    let mut files: Vec<_> = std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
    files.sort();
    println!(
        "{:<28} {:<16} {:>6} {:>10}  {:<24} {:>7} {:>10} {:>7}  proved",
        "model", "cluster", "batch", "step s", "best baseline", "times", "simulated", "wall s"
    );
    let (mut rows, mut worse, mut lost, mut far, mut proved) = (0, 0, 0, 0, 0);
    let import = ImportOptions { seq: None, compute: DType::Bf16, family: None };
    let models = files.iter().filter_map(|file| import::model(file, &import).ok());
    for model in models.take(if bench { files.len() } else { 1 }) {
        for device in ["a100-80g", "h100"] {
            for (nodes, batch) in [(1, 128), (8, 512), (128, 2048)] {
                let cluster = format!("{device}:8x{nodes}");
                let begin = Instant::now();
                let late = || begin.elapsed() > LIMIT;
                let options = Options { deadline: Some(&late), ..common::options(&cluster, batch, DType::Bf16, "") };
                let head = format!("{:<28} {cluster:<16} {batch:>6}", model.name);
                match compile(&model.graph, &options) {
                    Ok(compiled) => {
                        let (step, simulated) = (compiled.prediction.step.0, compiled.prediction.simulated.0);
                        let fitting = compiled.baselines.iter().filter(|b| !b.asynchronous).filter_map(|b| Some((b.step?.0, b.name)));
                        let best = fitting.min();
                        let times = best.map_or("-".into(), |b| format!("{:.3}", b.0 as f64 / step as f64));
                        let off = (simulated as f64 / step as f64 - 1.0) * 100.0;
                        println!(
                            "{head} {:>10.4}  {:<24} {times:>7} {off:>+9.2}% {:>7.2}  {}",
                            step as f64 * 1e-9,
                            best.map_or("none fits", |b| b.1),
                            begin.elapsed().as_secs_f64(),
                            if compiled.statistics.proved {
                                "yes".to_string()
                            } else {
                                format!("no, gap {:.3} %", (step as f64 / compiled.statistics.lower_bound as f64 - 1.0) * 100.0)
                            }
                        );
                        proved += u32::from(compiled.statistics.proved);
                        worse += u32::from(best.is_some_and(|b| b.0 < step));
                        far += u32::from(off.abs() > 3.0);
                    }
                    Err(CompileError::Refused(refusal)) => {
                        println!("{head} {:>10}  {}", "none", refusal.to_string().chars().take(80).collect::<String>());
                        lost += u32::from(baselines_fit(&model.graph, &options));
                    }
                    Err(error) => println!("{head} {:>10}  {error}", "fault"),
                }
                rows += 1;
                let _ = std::io::stdout().flush();
            }
        }
    }
    println!(
        "{rows} rows, {proved} of them proved: a baseline is quicker in {worse}, fits alone in {lost}; the simulation is more than 3 % from the objective in {far}"
    );
}

/// Whether any textbook system fits where no plan was found.
fn baselines_fit(forward: &dplan_ir::graph::Graph, options: &Options<'_>) -> bool {
    dplan::compile::textbook(forward, options).is_ok_and(|rows| rows.iter().any(|b| b.fits && !b.asynchronous))
}
