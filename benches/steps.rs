//! Time of a training step of the bundled Llama on CPU ranks: `cargo bench --bench steps`.

#[path = "../tests/common/megatron.rs"]
mod megatron;

use std::path::Path;
use std::sync::Arc;

use dplan::import::{self, ImportOptions};
use dplan::runtime::{Batch, Options, Rows, Session};
use dplan_ir::grad::differentiate;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_planner::lower;
use megatron::Shape;

const BATCH: u64 = 16;
const STEPS: u64 = 10;

fn main() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/llama-1m");
    let one = Shape { micro: BATCH, ..Shape::ONE };
    let shapes = [
        ("1 rank", one),
        ("dp2", Shape { dp: 2, micro: 8, ..one }),
        ("dp4", Shape { dp: 4, micro: 4, ..one }),
        ("dp4 zero3", Shape { dp: 4, micro: 4, zero: 3, ..one }),
        ("tp2", Shape { tp: 2, ..one }),
        ("tp4 sequence", Shape { tp: 4, sequence: true, ..one }),
        ("pp4, 4 micro-batches", Shape { pp: 4, micro: 4, ..one }),
    ];
    println!("{:>22} {:>10} {:>12} {:>14}", "", "ms/step", "tokens/s", "arena bytes");
    for (name, shape) in shapes {
        let mut model = import::model(&dir, &ImportOptions::default()).expect("the bundled model");
        model.graph.set_batch(shape.dp * shape.micro);
        let graph = differentiate(&model.graph).expect("differentiable");
        let program = lower::lower(&graph, &megatron::plan(&graph, shape, BATCH)).expect("lowered");
        let mut session = Session::new(graph, program, &Options::default()).expect("a session");
        session.initialise(1).expect("initial values");
        let inputs: Vec<usize> = session.input_elems().collect();
        let batch = Arc::new(Batch { inputs: inputs.iter().map(|&n| Rows::Tokens((0..n).map(|i| (i * i % 257) as i32).collect())).collect() });
        let hyper = Hyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.0, clip: 1.0 };
        let inv_tokens = 1.0 / inputs[0] as f64;
        let mut best = f64::INFINITY;
        for step in 1..=STEPS {
            best = best.min(session.step(&StepScalars::new(hyper, step, inv_tokens), &batch).expect("a step").seconds);
        }
        let arena = session.memory().iter().map(|m| m.arena_bytes).max().unwrap_or(0);
        println!("{name:>22} {:10.1} {:12.0} {arena:14}", best * 1e3, inputs[0] as f64 / best);
    }
}
