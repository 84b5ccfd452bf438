//! What saving checkpoints costs the steps of the bundled Llama, every step and every tenth (`--every 10`): `cargo bench --bench checkpoints`.
//!
//! Steps with and without saving take turns in one process, in rounds, and medians over the rounds are compared, so that what else the machine does falls on all alike.

#[path = "../tests/common/megatron.rs"]
mod megatron;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use dplan::checkpoint::store::About;
use dplan::checkpoint::writer::Mode;
use dplan::checkpoint::{Position, Store, Writer};
use dplan::feed::Feed;
use dplan::import::{self, ImportOptions};
use dplan::runtime::{Options, Session};
use dplan_ir::grad::differentiate;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_planner::lower;
use megatron::Shape;

const BATCH: u64 = 16;
const ROUNDS: usize = 9;
/// Of one way in a round.
const STEPS: u64 = 10;

/// How steps and checkpoints go together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    None,
    /// Written meanwhile, once in a round.
    Tenth,
    /// Written meanwhile, after every step.
    Every,
    /// After every step, which waits for it.
    Waiting,
}

const WAYS: [(Way, &str); 4] = [
    (Way::None, "no checkpoints"),
    (Way::Tenth, "every 10th step, written meanwhile"),
    (Way::Every, "every step, written meanwhile"),
    (Way::Waiting, "every step, waited for"),
];

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shape = Shape { dp: 2, micro: 8, zero: 1, ..Shape::ONE };
    let mut model = import::model(&root.join("examples/llama-1m"), &ImportOptions::default()).expect("the bundled model");
    model.graph.set_batch(shape.dp * shape.micro);
    let graph = differentiate(&model.graph).expect("differentiable");
    let program = lower::lower(&graph, &megatron::plan(&graph, shape, BATCH)).expect("lowered");
    let feed = Feed::new(&graph, None, BATCH, 1).expect("random tokens");
    let mut session = Session::new(graph, program, &Options::default()).expect("a session");
    session.initialise(1).expect("initial values");
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench-checkpoints");
    let _ = std::fs::remove_dir_all(&dir);
    let store = Arc::new(Store::open(&dir, 2).expect("a folder"));
    let about = About { model: "llama-1m".into(), optimizer: "adamw".into(), plan: 0, ranks: 2, data: None };
    let start = |session: &Session, mode| Writer::start(session, Arc::clone(&store), about.clone(), mode, Box::new(|_| {})).expect("a thread");
    let (mut behind, mut waiting) = (start(&session, Mode::Background), start(&session, Mode::Waiting));
    let mut position = Position::default();
    let mut times = WAYS.map(|_| Vec::new());
    let mut taking = Vec::new();
    for round in 0..=ROUNDS {
        for (&(way, _), times) in WAYS.iter().zip(&mut times) {
            let begin = Instant::now();
            for step in 0..STEPS {
                let hyper = Hyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.0, clip: 1.0 };
                let scalars = StepScalars::new(hyper, position.updates + 1, 1.0 / feed.targets() as f64);
                session.step(&scalars, &Arc::new(feed.at(position.sequences))).expect("a step");
                position = Position { step: position.step + 1, updates: position.updates + 1, sequences: position.sequences + BATCH, ..position };
                let taken = Instant::now();
                match way {
                    Way::Tenth if step == 0 => drop(behind.save(&mut session, position).expect("saved")),
                    Way::Every => drop(behind.save(&mut session, position).expect("saved")),
                    Way::Waiting => drop(waiting.save(&mut session, position).expect("saved")),
                    Way::None | Way::Tenth => {}
                }
                if way == Way::Tenth && step == 0 && round > 0 {
                    taking.push(taken.elapsed().as_secs_f64());
                }
            }
            // The last save ends inside the time that is measured.
            behind.wait().expect("saved");
            if round > 0 {
                times.push(begin.elapsed().as_secs_f64() / STEPS as f64);
            }
        }
    }
    // Of each round, so that what else the machine does in it falls on both.
    let added: Vec<f64> = times.iter().map(|of| median(of.iter().zip(&times[0]).map(|(x, y)| x / y - 1.0).collect())).collect();
    let bytes: u64 = std::fs::read_dir(&dir)
        .and_then(|d| {
            let last = d.filter_map(Result::ok).map(|e| e.path()).filter(|p| p.is_dir()).max();
            std::fs::read_dir(last.unwrap_or(dir.clone()))
        })
        .map(|d| d.filter_map(Result::ok).filter_map(|e| e.metadata().ok()).map(|m| m.len()).sum())
        .unwrap_or(0);
    println!(
        "a checkpoint of {:.2} MB, {ROUNDS} rounds of {STEPS} steps each way, medians of ms a step and of what a round adds",
        bytes as f64 / 1e6
    );
    for (((_, name), times), added) in WAYS.iter().zip(times).zip(added) {
        println!("{name:>36} {:9.2} {:+8.2} %", median(times) * 1e3, added * 100.0);
    }
    println!("{:>36} {:9.2} (the one part that no step runs beside)", "copying a checkpoint", median(taking) * 1e3);
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
