//! How near bf16 and f16 keep to f32: the same 200 steps of the bundled Llama on the bundled text in each, `cargo bench --bench precision`.
//!
//! f16 has dynamic loss scaling as `dplan run` has it. Losses are compared step by step, each on the same data.

#[path = "../tests/common/megatron.rs"]
mod megatron;

use std::path::Path;
use std::sync::Arc;

use dplan::feed::Feed;
use dplan::import::{self, ImportOptions};
use dplan::runtime::loss_scale::{LossScale, Outcome};
use dplan::runtime::{Options, Session};
use dplan_ir::dtype::DType;
use dplan_ir::grad::differentiate;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_planner::lower;
use megatron::Shape;

const BATCH: u64 = 4;
/// Steps of `cargo bench`; without `--bench`, only whether it runs is of interest.
const STEPS: u64 = 200;
const TRIED: u64 = 20;
const WARMUP: u64 = 10;
/// Clean steps that double the loss scale.
const WINDOW: u64 = 50;

/// Losses of all steps, steps skipped, and the last loss scale.
fn train(compute: DType, steps: u64) -> (Vec<f64>, u64, f64) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/llama-1m");
    let mut model = import::model(&dir, &ImportOptions { compute, ..ImportOptions::default() }).expect("the bundled model");
    let shape = Shape { dp: 2, micro: BATCH / 2, zero: 1, ..Shape::ONE };
    model.graph.set_batch(shape.dp * shape.micro);
    let graph = differentiate(&model.graph).expect("differentiable");
    let program = lower::lower(&graph, &megatron::plan(&graph, shape, BATCH)).expect("lowered");
    let feed = Feed::new(&graph, Some(&dir.join("almanac.txt")), BATCH, 1).expect("the bundled text");
    let mut session = Session::new(graph, program, &Options::default()).expect("a session");
    session.initialise(1).expect("initial values");
    let (mut scale, mut updates, mut losses) = (LossScale::default(), 0, Vec::new());
    for step in 0..steps {
        let lr = 2e-3 * ((step + 1) as f64 / WARMUP as f64).min(1.0);
        let hyper = Hyper { lr, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.0, clip: 1.0 };
        let loss_scale = if compute.scales_loss() { scale.value() } else { 1.0 };
        let scalars = StepScalars { loss_scale, ..StepScalars::new(hyper, updates + 1, 1.0 / feed.targets() as f64) };
        let result = session.step(&scalars, &Arc::new(feed.at(step * BATCH))).expect("a step");
        let outcome = if result.grad_norm.is_some_and(f64::is_finite) { Outcome::Finite } else { Outcome::Overflow };
        updates += u64::from(outcome == Outcome::Finite);
        scale = scale.after(outcome, WINDOW);
        losses.push(result.loss);
    }
    (losses, steps - updates, scale.value())
}

fn main() {
    let steps = if std::env::args().any(|a| a == "--bench") { STEPS } else { TRIED };
    let exact = train(DType::F32, steps).0;
    let tail = |losses: &[f64]| losses[losses.len() - 20..].iter().sum::<f64>() / 20.0;
    println!(
        "llama-1m, {steps} steps of {BATCH} sequences, 2 ranks, ZeRO 1: against f32, from {:.4} to {:.4} (mean of the last 20)",
        exact[0],
        tail(&exact)
    );
    println!("{:>6} {:>14} {:>12} {:>10} {:>9} {:>12}", "", "worst step", "last 20", "last loss", "skipped", "loss scale");
    for compute in [DType::Bf16, DType::F16] {
        let (losses, skipped, scale) = train(compute, steps);
        let worst = losses.iter().zip(&exact).map(|(x, y)| (x / y - 1.0).abs()).fold(0.0, f64::max);
        let (ours, f32s) = (tail(&losses), tail(&exact));
        println!("{compute:>6} {:12.3} % {:10.3} % {ours:10.4} {skipped:9} {scale:12}", worst * 100.0, (ours / f32s - 1.0) * 100.0);
    }
}
