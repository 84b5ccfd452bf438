//! Speed of CPU ranks against what this machine's cores can do: `cargo bench --bench speed`.
//!
//! A Llama of 6 layers, 384 wide (ffn 1024, vocabulary 259, sequences of 256, batch 8, f32) is trained on 2 ranks of one thread each. Rounds alternate with one in which two
//! threads multiply square matrices with the same `gemm` crate; both best rounds and medians are printed, and their ratio. Work is counted as is usual: 6 operations for
//! each parameter that is multiplied with and token, and 12 · layers · width · sequence for attention, whether or not half of it is masked.
//!

#[path = "../tests/common/mod.rs"]
mod common;

use std::sync::Arc;
use std::time::Instant;

use dplan::compile::compile;
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::runtime::{Options, Session};
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::program::Write;
use dplan_kernels::cpu::Threads;
use dplan_kernels::cpu::product::{Matrix, MatrixMut, multiply};

const CONFIG: &str = r#"{"model_type":"llama","vocab_size":259,"hidden_size":384,"intermediate_size":1024,"num_hidden_layers":6,
    "num_attention_heads":6,"num_key_value_heads":6,"max_position_embeddings":256,"tie_word_embeddings":false}"#;
const BATCH: u64 = 8;
const SEQ: u64 = 256;
const PLANS: [&str; 4] = ["dp=2,zero=0", "dp=2,zero=1", "tp=2", "pp=2,micro=2"];
const HYPER: Hyper = Hyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.0, clip: 1.0 };

/// Operations per second of two threads that multiply square matrices.
fn peak(side: usize, repeats: usize) -> f64 {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let (a, b, mut c) = (vec![1.0f32; side * side], vec![0.5f32; side * side], vec![0.0f32; side * side]);
                for _ in 0..repeats {
                    let square = |data| Matrix { data, row: side, col: 1 };
                    let out = MatrixMut { data: &mut c[..], row: side, col: 1 };
                    multiply([side; 3], 1.0, square(&a[..]), square(&b[..]), out, Write::Set, Threads::Caller);
                }
                std::hint::black_box(&c);
            });
        }
    });
    (2 * repeats * 2 * side.pow(3)) as f64 / begin.elapsed().as_secs_f64()
}

fn main() {
    let rounds = if std::env::args().any(|a| a == "--bench") { 7 } else { 1 };
    let model = model_from_bytes("config.json", CONFIG.as_bytes(), &ImportOptions { seq: Some(SEQ), compute: DType::F32, family: None });
    let graph = model.expect("the model").graph;
    let (layers, width) = (6u64, 384u64);
    let multiplied = layers * (4 * width * width + 3 * width * 1024) + 259 * width;
    let per_token = (6 * multiplied + 12 * layers * width * SEQ) as f64;
    let mut sessions: Vec<(Session, Arc<dplan::runtime::Batch>)> = PLANS
        .iter()
        .map(|pins| {
            let file = compile(&graph, &common::options("cpu:2", BATCH, DType::F32, pins)).expect("a plan").file;
            let feed = Feed::new(&file.graph, None, BATCH, 1).expect("data");
            let mut session = Session::new(file.graph, file.program, &Options::default()).expect("a session");
            session.initialise(1).expect("initial values");
            (session, Arc::new(feed.batch(0).expect("a batch")))
        })
        .collect();
    let tokens = (BATCH * SEQ) as f64;
    let mut peaks = Vec::new();
    let mut seconds = vec![Vec::new(); PLANS.len()];
    for round in 0..rounds {
        peaks.push(peak(1024, 8));
        for ((session, batch), seconds) in sessions.iter_mut().zip(&mut seconds) {
            let scalars = |step| StepScalars::new(HYPER, step, 1.0 / tokens);
            seconds.extend((1..=3).map(|i| session.step(&scalars(3 * round + i), batch).expect("a step").seconds));
        }
    }
    let median = |of: &mut Vec<f64>| {
        of.sort_by(f64::total_cmp);
        of[of.len() / 2]
    };
    let (middle, best) = (median(&mut peaks), *peaks.last().expect("a round"));
    println!("two threads of `gemm`, 1024 x 1024 x 1024 in f32: {:.1} GFLOP/s, best round {:.1}", middle * 1e-9, best * 1e-9);
    println!("{:.1} MFLOP a token", per_token * 1e-6);
    println!("{:<16} {:>10} {:>10} {:>10} {:>10} {:>12}", "2 ranks", "ms/step", "tokens/s", "GFLOP/s", "of gemm", "best of best");
    for (pins, seconds) in PLANS.iter().zip(&mut seconds) {
        let step = median(seconds);
        let rate = per_token * tokens / step;
        println!(
            "{pins:<16} {:>10.1} {:>10.0} {:>10.1} {:>9.1}% {:>11.1}%",
            step * 1e3,
            tokens / step,
            rate * 1e-9,
            100.0 * rate / middle,
            100.0 * per_token * tokens / seconds[0] / best
        );
    }
}
