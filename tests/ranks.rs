//! CPU ranks under Megatron-like plans: they agree with PyTorch in f32, and with one rank, sharply, in f64.

mod common;
#[path = "common/megatron.rs"]
mod megatron;

use std::sync::Arc;

use dplan::data::TokenSource;
use dplan::import::weights::Weights;
use dplan::import::{self, ImportOptions};
use dplan::runtime::{Batch, Options, Rows, Session};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::plan::Recompute;
use dplan_ir::program::Role;
use dplan_planner::lower;
use megatron::Shape;

type Tensors = Table<ParamId, Vec<f64>>;

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

/// One oracle: a model, its initial weights and its data.
struct Oracle {
    dir: std::path::PathBuf,
    expected: serde_json::Value,
}

impl Oracle {
    fn open(name: &str) -> Option<Oracle> {
        let dir = common::shared()?.join("oracle").join(name);
        let expected = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
        Some(Oracle { dir, expected })
    }
    fn number(&self, path: &str) -> f64 {
        self.expected.pointer(path).and_then(serde_json::Value::as_f64).unwrap_or_else(|| panic!("{path}"))
    }
    fn graph(&self, compute: DType, batch: u64) -> Graph {
        let options = ImportOptions { seq: Some(self.number("/seq") as u64), compute, ..ImportOptions::default() };
        let mut model = import::model(&self.dir, &options).unwrap_or_else(|e| panic!("{e}"));
        model.graph.set_batch(batch);
        differentiate(&model.graph).unwrap()
    }
    fn tensors(&self, graph: &Graph, file: &str) -> Tensors {
        let weights = Weights::open(&self.dir.join(file)).unwrap();
        graph.params.ids().map(|p| weights.param::<f64>(graph, p).unwrap()).collect()
    }

    fn train(&self, shape: Shape, compute: DType, steps: u64) -> (Graph, Trained) {
        let (batch, seq) = (self.number("/batch") as u64, self.number("/seq") as u64);
        let graph = self.graph(compute, shape.dp * shape.micro);
        let plan = megatron::plan(&graph, shape, batch);
        let program = lower::lower(&graph, &plan).unwrap_or_else(|e| panic!("{shape:?}: {e}"));
        let mut session = Session::new(graph.clone(), program, &Options::default()).unwrap_or_else(|e| panic!("{shape:?}: {e}"));
        let initial = self.tensors(&graph, "weights.safetensors");
        session.load(Role::Param, |p| initial[p].clone()).unwrap();
        let vocab = graph.dims.values().find(|d| d.name == "v").unwrap().size;
        let source = TokenSource::open(&self.dir.join("tokens.json"), vocab, seq, batch).unwrap_or_else(|e| panic!("{e}"));
        let hyper = Hyper {
            lr: self.number("/optimizer/lr"),
            beta1: self.number("/optimizer/betas/0"),
            beta2: self.number("/optimizer/betas/1"),
            eps: self.number("/optimizer/eps"),
            weight_decay: self.number("/optimizer/weight_decay"),
            momentum: 0.0,
            clip: self.number("/optimizer/clip_grad_norm"),
        };
        let (mut losses, mut norms, mut first_grads) = (Vec::new(), Vec::new(), Table::new());
        for step in 0..steps {
            let scalars = StepScalars::new(hyper, step + 1, 1.0 / (batch * seq) as f64);
            let n = seq as usize;
            let (mut tokens, mut targets) = (vec![0; n * batch as usize], vec![0; n * batch as usize]);
            for (row, (t, u)) in tokens.chunks_mut(n).zip(targets.chunks_mut(n)).enumerate() {
                source.fill(step, row as u64, t, u).unwrap();
            }
            let batch = Arc::new(Batch { inputs: vec![Rows::Tokens(tokens), Rows::Tokens(targets)] });
            let result = session.step(&scalars, &batch).unwrap_or_else(|e| panic!("{shape:?}: {e}"));
            losses.push(result.loss);
            norms.push(result.grad_norm.unwrap());
            if step == 0 {
                first_grads = session.grads().unwrap();
            }
        }
        let params = session.params().unwrap();
        (graph, Trained { losses, norms, first_grads, params })
    }
}

/// Largest ‖x − y‖ / max(‖y‖, 1e-6·‖all y‖) of all tensors, and whose it is.
fn distance(graph: &Graph, found: &Tensors, expected: &Tensors) -> (f64, String) {
    let norm = |data: &mut dyn Iterator<Item = f64>| data.map(|x| x * x).sum::<f64>().sqrt();
    let all = norm(&mut expected.values().flatten().copied());
    let one = |(p, y): (ParamId, &Vec<f64>)| {
        let error = norm(&mut found[p].iter().zip(y).map(|(a, b)| a - b)) / norm(&mut y.iter().copied()).max(1e-6 * all);
        (error, graph.values[graph.params[p].value].name.clone())
    };
    expected.iter().map(one).fold((0.0, String::new()), |worst, at| if at.0 > worst.0 || at.0.is_nan() { at } else { worst })
}

fn agrees_with_pytorch(name: &str) {
    let Some(oracle) = Oracle::open(name) else { return };
    let steps = oracle.number("/steps") as u64;
    for shape in SHAPES {
        let (graph, trained) = oracle.train(shape, DType::F32, steps);
        for step in 0..steps as usize {
            let (loss, norm) = (oracle.number(&format!("/loss_per_step/{step}")), oracle.number(&format!("/grad_norm_before_clip_per_step/{step}")));
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
    let (graph, one) = oracle.train(Shape::ONE, DType::F64, 20);
    for &shape in &SHAPES[1..] {
        let (_, many) = oracle.train(shape, DType::F64, 20);
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
