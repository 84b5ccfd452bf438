//! Imported models, run by the reference interpreter on one device, agree with PyTorch: import, weights, data, ops, derivatives and optimizer at once.

mod common;
#[path = "common/oracle.rs"]
mod oracle;

use common::distance;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, train_step};
use dplan_ir::optimizer::Optimizer;
use oracle::Oracle;

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
    let Some(oracle) = Oracle::open(name) else { return };
    let graph = oracle.graph(DType::F32, oracle.batch);
    let initial = oracle.tensors(&graph, "weights.safetensors");
    let dense = |(p, data): (ParamId, &Vec<f64>)| Tensor::dense(&graph.shape(graph.params[p].value), data.clone());
    let mut state = TrainState::new(initial.iter().map(dense).collect(), Optimizer::AdamW);
    for step in 0..oracle.number("/steps") as u64 {
        let ids = |ids: Vec<i32>| Tensor::dense(&[oracle.batch, oracle.seq], ids.into_iter().map(f64::from).collect());
        let inputs = oracle.tokens(&graph, step).map(ids);
        let report = train_step(&graph, &mut state, &[inputs.to_vec()], &oracle.scalars(step), Optimizer::AdamW);
        let (loss, norm) = oracle.step(step);
        assert!((report.loss - loss).abs() < 1e-5, "{name} step {step}: loss {} against {loss}", report.loss);
        assert!((report.grad_norm / norm - 1.0).abs() < 5e-5, "{name} step {step}: gradient norm {} against {norm}", report.grad_norm);
        if step == 0 {
            compare(&oracle, &graph, &report.grads, "grads_step0.safetensors", 1e-5);
        }
    }
    compare(&oracle, &graph, &state.params, "final.safetensors", 3e-4);
}

fn compare(oracle: &Oracle, graph: &Graph, found: &Table<ParamId, Tensor>, file: &str, tolerance: f64) {
    let found = found.map(|_, tensor| tensor.data.clone());
    let (error, tensor) = distance(graph, &found, &oracle.tensors(graph, file));
    assert!(error < tolerance, "{tensor} is {error:e} from {file}");
}
