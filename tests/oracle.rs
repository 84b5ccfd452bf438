//! Imported models, run by the reference interpreter on one device, agree with PyTorch: import, weights, data, ops, derivatives and optimizer at once.

mod common;

use std::path::Path;

use dplan::data::TokenSource;
use dplan::import::weights::Weights;
use dplan::import::{self, ImportOptions};
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::Graph;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, train_step};
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};

#[test]
fn gpt2_agrees_with_pytorch() {
    check("gpt2");
}

#[test]
fn llama_agrees_with_pytorch() {
    check("llama");
}

#[test]
fn llama_with_tied_head_and_scaled_rotation_agrees_with_pytorch() {
    check("llama-tied");
}

#[test]
fn mixtral_agrees_with_pytorch() {
    check("mixtral");
}

fn check(name: &str) {
    let Some(shared) = common::shared() else { return };
    let dir = shared.join("oracle").join(name);
    let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let number = |path: &str| expected.pointer(path).and_then(serde_json::Value::as_f64).unwrap_or_else(|| panic!("{path}"));
    let (batch, seq) = (number("/batch") as u64, number("/seq") as u64);
    let mut model = import::model(&dir, &ImportOptions { seq: Some(seq), ..ImportOptions::default() }).unwrap_or_else(|e| panic!("{e}"));
    model.graph.set_batch(batch);
    let graph = differentiate(&model.graph).unwrap();
    let vocab = import::vocabulary(&graph).unwrap();
    let source = TokenSource::open(&dir.join("tokens.json"), vocab, seq, batch).unwrap_or_else(|e| panic!("{e}"));
    let mut state = TrainState::new(read(&graph, &dir.join("weights.safetensors")), Optimizer::AdamW);
    let hyper = Hyper {
        lr: number("/optimizer/lr"),
        beta1: number("/optimizer/betas/0"),
        beta2: number("/optimizer/betas/1"),
        eps: number("/optimizer/eps"),
        weight_decay: number("/optimizer/weight_decay"),
        momentum: 0.0,
        clip: number("/optimizer/clip_grad_norm"),
    };
    for step in 0..number("/steps") as u64 {
        let scalars = StepScalars::new(hyper, step + 1, 1.0 / (batch * seq) as f64);
        let report = train_step(&graph, &mut state, &[inputs(&source, step, batch, seq)], &scalars, Optimizer::AdamW);
        let loss = number(&format!("/loss_per_step/{step}"));
        let norm = number(&format!("/grad_norm_before_clip_per_step/{step}"));
        assert!((report.loss - loss).abs() < 1e-5, "{name} step {step}: loss {} against {loss}", report.loss);
        assert!((report.grad_norm / norm - 1.0).abs() < 5e-5, "{name} step {step}: gradient norm {} against {norm}", report.grad_norm);
        if step == 0 {
            compare(&graph, &report.grads, &read(&graph, &dir.join("grads_step0.safetensors")), 1e-5);
        }
    }
    compare(&graph, &state.params, &read(&graph, &dir.join("final.safetensors")), 3e-4);
}

fn read(graph: &Graph, path: &Path) -> Table<ParamId, Tensor> {
    let weights = Weights::open(path).unwrap();
    weights.check(graph).unwrap_or_else(|e| panic!("{e}"));
    graph.params.iter().map(|(p, param)| Tensor::dense(&graph.shape(param.value), weights.param::<f64>(graph, p).unwrap())).collect()
}

/// Tokens and targets of one step.
fn inputs(source: &TokenSource, step: u64, batch: u64, seq: u64) -> Vec<Tensor> {
    let n = seq as usize;
    let (mut tokens, mut targets) = (vec![0; n * batch as usize], vec![0; n * batch as usize]);
    for (row, (t, u)) in tokens.chunks_mut(n).zip(targets.chunks_mut(n)).enumerate() {
        source.fill(step, row as u64, t, u).unwrap();
    }
    [tokens, targets].into_iter().map(|ids| Tensor::dense(&[batch, seq], ids.into_iter().map(f64::from).collect())).collect()
}

/// ‖x − y‖ ≤ tolerance · max(‖y‖, 1e-6·‖all y‖), for each tensor.
fn compare(graph: &Graph, found: &Table<ParamId, Tensor>, expected: &Table<ParamId, Tensor>, tolerance: f64) {
    let norm = |data: &mut dyn Iterator<Item = f64>| data.map(|x| x * x).sum::<f64>().sqrt();
    let all = norm(&mut expected.values().flat_map(|t| t.data.iter().copied()));
    for (p, y) in expected.iter() {
        let difference = norm(&mut found[p].data.iter().zip(&y.data).map(|(a, b)| a - b));
        let error = difference / norm(&mut y.data.iter().copied()).max(1e-6 * all);
        assert!(error < tolerance, "{}: error {error:e}", graph.values[graph.params[p].value].name);
    }
}
