//! Gradients of which the largest elements alone travel: what is left over makes up for it, and without it a run is worse.

mod common;

use common::options;
use dplan::compile::compile;
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::runtime::{Options as RunOptions, Session};
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};
use dplan_ir::program::{Instr, Issue, Program};
use dplan_ir::verify::verify_program;
use std::path::Path;
use std::sync::Arc;

const STEPS: u64 = 120;

/// The program without error feedback: what is left over is cleared before every exchange. The verifier must not have it.
fn forgetful(program: &Program) -> Program {
    let mut program = program.clone();
    for stage in &mut program.stages {
        for (_, segment) in stage.segments.iter_mut() {
            let clear = |issue: &Issue| match issue.instr {
                Instr::Compress { residual, .. } => Some(Issue { stream: issue.stream, instr: Instr::Zero { dst: residual } }),
                _ => None,
            };
            segment.body = segment.body.iter().flat_map(|issue| clear(issue).into_iter().chain([issue.clone()])).collect();
        }
    }
    program
}

/// Mean loss of the last twenty of 120 steps of the bundled model on its text, on two ranks, by plain gradient descent: neither momentum nor norms make up for what is
/// forgotten, nor hide it.
fn train(pins: &str, damage: fn(&Program) -> Program) -> f64 {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/llama-1m");
    let config = std::fs::read(root.join("config.json")).unwrap();
    let model = model_from_bytes("config.json", &config, &ImportOptions { seq: Some(32), compute: DType::F32, family: None }).unwrap();
    let options = dplan::compile::Options { optimizer: Optimizer::Sgd, ..options("cpu:2", 8, DType::F32, pins) };
    let file = compile(&model.graph, &options).unwrap_or_else(|e| panic!("{pins}: {e}")).file;
    let feed = Feed::new(&file.graph, Some(&root.join("almanac.txt")), file.plan.batch(), 1).unwrap();
    let program = damage(&file.program);
    assert_eq!(verify_program(&file.graph, &program).is_ok(), program == file.program, "{pins}");
    let mut session = Session::new(file.graph.clone(), program, &RunOptions::default()).unwrap();
    session.initialise(1).unwrap();
    let hyper = Hyper { lr: 0.5, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, momentum: 0.0, clip: f64::INFINITY };
    let mut last = Vec::new();
    for step in 0..STEPS {
        let batch = Arc::new(feed.batch(step * file.plan.batch()).unwrap());
        let result = session.step(&StepScalars::new(hyper, step + 1, 1.0 / feed.targets() as f64), &batch).unwrap();
        last.extend((step + 20 >= STEPS).then_some(result.loss));
    }
    last.iter().sum::<f64>() / last.len() as f64
}

#[test]
fn a_tenth_of_the_gradients_trains_like_all_and_worse_where_the_rest_is_forgotten() {
    let plain = train("dp=2,tp=1,zero=1", Program::clone);
    let off = |loss: f64| (loss / plain - 1.0) * 100.0;
    let compressed = |share: &str, damage| off(train(&format!("dp=2,tp=1,zero=1,wire=topk:{share}"), damage));
    let (tenth, twentieth) = (compressed("0.1", Program::clone), compressed("0.05", Program::clone));
    let without = compressed("0.05", forgetful);
    println!("loss of all {plain:.4}; of a tenth {tenth:+.2} %, of a twentieth {twentieth:+.2} %, without the rest {without:+.2} %");
    assert!(tenth.abs() < 3.0 && twentieth.abs() < 3.0, "{tenth} % and {twentieth} %");
    assert!(without > twentieth + 4.0, "{without} % without the rest, {twentieth} % with it");
}
