//! CPU ranks under Megatron-like plans: they agree with PyTorch in f32, and with one rank, sharply, in f64.

mod common;
#[path = "common/megatron.rs"]
mod megatron;
#[path = "common/oracle.rs"]
mod oracle;

use common::{Tensors, distance};
use dplan::runtime::{Options, Session};
use dplan_ir::dtype::DType;
use dplan_ir::entity::Table;
use dplan_ir::graph::Graph;
use dplan_ir::plan::Recompute;
use dplan_ir::program::Role;
use dplan_planner::lower;
use megatron::Shape;
use oracle::Oracle;

/// The layouts every oracle model must agree under.
const SHAPES: [Shape; 12] = [
    Shape::ONE,
    Shape { dp: 2, micro: 4, ..Shape::ONE },
    Shape { dp: 4, zero: 1, micro: 2, ..Shape::ONE },
    Shape { dp: 4, zero: 2, micro: 1, ..Shape::ONE },
    Shape { dp: 4, zero: 3, micro: 2, ..Shape::ONE },
    Shape { tp: 2, sequence: true, ..Shape::ONE },
    Shape { tp: 4, ..Shape::ONE },
    Shape { pp: 2, micro: 2, ..Shape::ONE },
    Shape { dp: 2, tp: 2, pp: 2, zero: 1, micro: 2, sequence: true, ..Shape::ONE },
    Shape { tp: 2, pp: 2, micro: 1, recompute: Recompute::Full, ..Shape::ONE },
    Shape { dp: 2, pp: 2, zero: 3, micro: 2, ..Shape::ONE },
    Shape { pp: 4, micro: 4, ..Shape::ONE },
];

struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    first_grads: Tensors,
    params: Tensors,
}

fn train(oracle: &Oracle, shape: Shape, compute: DType, steps: u64) -> (Graph, Trained) {
    let graph = oracle.graph(compute, shape.dp * shape.micro);
    let plan = megatron::plan(&graph, shape, oracle.batch);
    let program = lower::lower(&graph, &plan).unwrap_or_else(|e| panic!("{shape:?}: {e}"));
    let mut session = Session::new(graph.clone(), program, &Options::default()).unwrap_or_else(|e| panic!("{shape:?}: {e}"));
    let initial = oracle.tensors(&graph, "weights.safetensors");
    session.load(Role::Param, |p| initial[p].clone()).unwrap();
    let (mut losses, mut norms, mut first_grads) = (Vec::new(), Vec::new(), Table::new());
    for step in 0..steps {
        let result = session.step(&oracle.scalars(step), &oracle.inputs(&graph, step)).unwrap_or_else(|e| panic!("{shape:?}: {e}"));
        losses.push(result.loss);
        norms.push(result.grad_norm.unwrap());
        if step == 0 {
            first_grads = session.grads().unwrap();
        }
    }
    let params = session.params().unwrap();
    (graph, Trained { losses, norms, first_grads, params })
}

fn agrees_with_pytorch(name: &str) {
    let Some(oracle) = Oracle::open(name) else { return };
    let steps = oracle.number("/steps") as u64;
    for shape in SHAPES {
        let (graph, trained) = train(&oracle, shape, DType::F32, steps);
        for step in 0..steps as usize {
            let (loss, norm) = oracle.step(step as u64);
            assert!((trained.losses[step] - loss).abs() < 1e-5, "{name} {shape:?} step {step}: loss {} against {loss}", trained.losses[step]);
            assert!((trained.norms[step] / norm - 1.0).abs() < 5e-5, "{name} {shape:?} step {step}: norm {} against {norm}", trained.norms[step]);
        }
        for (file, found, tolerance) in [("grads_step0.safetensors", &trained.first_grads, 1e-5), ("final.safetensors", &trained.params, 3e-4)] {
            let (error, tensor) = distance(&graph, found, &oracle.tensors(&graph, file));
            assert!(error < tolerance, "{name} {shape:?}: {tensor} is {error:e} from {file}");
        }
    }
}

fn agrees_with_one_rank(name: &str) {
    let Some(oracle) = Oracle::open(name) else { return };
    let (graph, one) = train(&oracle, Shape::ONE, DType::F64, 20);
    for &shape in &SHAPES[1..] {
        let (_, many) = train(&oracle, shape, DType::F64, 20);
        for (step, (x, y)) in many.losses.iter().zip(&one.losses).enumerate() {
            assert!((x / y - 1.0).abs() < 1e-12, "{name} {shape:?} step {step}: loss {x} against {y}");
        }
        let (error, tensor) = distance(&graph, &many.params, &one.params);
        assert!(error < 1e-10, "{name} {shape:?}: {tensor} is {error:e} from that of one rank");
    }
}

#[test]
fn gpt2_agrees_with_pytorch() {
    agrees_with_pytorch("gpt2");
}

#[test]
fn llama_agrees_with_pytorch() {
    agrees_with_pytorch("llama");
}

#[test]
fn llama_with_tied_head_agrees_with_pytorch() {
    agrees_with_pytorch("llama-tied");
}

#[test]
fn mixtral_agrees_with_pytorch() {
    agrees_with_pytorch("mixtral");
}

#[test]
fn gpt2_agrees_with_one_rank() {
    agrees_with_one_rank("gpt2");
}

#[test]
fn llama_with_tied_head_agrees_with_one_rank() {
    agrees_with_one_rank("llama-tied");
}

#[test]
fn mixtral_agrees_with_one_rank() {
    agrees_with_one_rank("mixtral");
}
