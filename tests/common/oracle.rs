//! Reference runs by PyTorch: a model, its initial weights, its data, and what came out.
#![allow(dead_code)]

use std::path::PathBuf;
use std::sync::Arc;

use dplan::data::TokenSource;
use dplan::import::weights::Weights;
use dplan::import::{self, ImportOptions};
use dplan::runtime::{Batch, Rows};
use dplan_ir::dtype::DType;
use dplan_ir::grad::differentiate;
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{Hyper, StepScalars};

use super::common::{self, Tensors};

pub struct Oracle {
    dir: PathBuf,
    expected: serde_json::Value,
    pub batch: u64,
    pub seq: u64,
}

impl Oracle {
    /// `None`, said aloud, without the reference data.
    pub fn open(name: &str) -> Option<Oracle> {
        let dir = common::shared()?.join("oracle").join(name);
        let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
        let mut oracle = Oracle { dir, expected, batch: 0, seq: 0 };
        (oracle.batch, oracle.seq) = (oracle.number("/batch") as u64, oracle.number("/seq") as u64);
        Some(oracle)
    }
    pub fn number(&self, path: &str) -> f64 {
        self.expected.pointer(path).and_then(serde_json::Value::as_f64).unwrap_or_else(|| panic!("{path}"))
    }
    /// Loss, and norm of the gradients before clipping.
    pub fn step(&self, step: u64) -> (f64, f64) {
        (self.number(&format!("/loss_per_step/{step}")), self.number(&format!("/grad_norm_before_clip_per_step/{step}")))
    }
    /// The model with its derivatives, for so many sequences at once.
    pub fn graph(&self, compute: DType, sequences: u64) -> Graph {
        let options = ImportOptions { seq: Some(self.seq), compute, ..ImportOptions::default() };
        let mut model = import::model(&self.dir, &options).unwrap_or_else(|e| panic!("{e}"));
        model.graph.set_batch(sequences);
        differentiate(&model.graph).unwrap()
    }
    /// The tensors of one of its files.
    pub fn tensors(&self, graph: &Graph, file: &str) -> Tensors {
        let weights = Weights::open(&self.dir.join(file)).unwrap();
        weights.check(graph).unwrap_or_else(|e| panic!("{e}"));
        graph.params.ids().map(|p| weights.param::<f64>(graph, p).unwrap()).collect()
    }
    /// Tokens and targets of a step.
    pub fn tokens(&self, graph: &Graph, step: u64) -> [Vec<i32>; 2] {
        let vocab = import::vocabulary(graph).unwrap();
        let source = TokenSource::open(&self.dir.join("tokens.json"), vocab, self.seq, self.batch).unwrap_or_else(|e| panic!("{e}"));
        let n = self.seq as usize;
        let (mut tokens, mut targets) = (vec![0; n * self.batch as usize], vec![0; n * self.batch as usize]);
        for (row, (t, u)) in tokens.chunks_mut(n).zip(targets.chunks_mut(n)).enumerate() {
            source.fill(step, row as u64, t, u).unwrap();
        }
        [tokens, targets]
    }
    pub fn inputs(&self, graph: &Graph, step: u64) -> Arc<Batch> {
        Arc::new(Batch { inputs: self.tokens(graph, step).map(Rows::Tokens).to_vec() })
    }
    pub fn scalars(&self, step: u64) -> StepScalars {
        let hyper = Hyper {
            lr: self.number("/optimizer/lr"),
            beta1: self.number("/optimizer/betas/0"),
            beta2: self.number("/optimizer/betas/1"),
            eps: self.number("/optimizer/eps"),
            weight_decay: self.number("/optimizer/weight_decay"),
            momentum: 0.0,
            clip: self.number("/optimizer/clip_grad_norm"),
        };
        StepScalars::new(hyper, step + 1, 1.0 / (self.batch * self.seq) as f64)
    }
}
