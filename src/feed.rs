//! What a step trains on: rows of a token source, or random ones, as the inputs of a graph.
//!
//! Row `r` of step `t` is sequence `t · batch + r` of the source, whatever the plan: ranks and micro-batches take their rows from the step's batch
//! ([`crate::runtime::batch`]).

use crate::data::{DataError, TokenSource};
use crate::runtime::{Batch, Rows};
use dplan_ir::dtype::DType;
use dplan_ir::entity::ValueId;
use dplan_ir::graph::Graph;
use dplan_ir::init::{self, name_hash};
use dplan_ir::op::Op;
use dplan_ir::order::Order;
use std::path::Path;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum FeedError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(
        "the model has inputs {inputs}; a data file gives `tokens` and `targets` of shape [batch, sequence] only: leave --data out to train on random values"
    )]
    Inputs { inputs: String },
}

/// A supplier of batches.
pub struct Feed {
    source: Option<TokenSource>,
    inputs: Vec<Input>,
    batch: u64,
    targets: u64,
    seed: u64,
}

struct Input {
    name: String,
    dtype: DType,
    /// Elements of one sequence.
    row: u64,
    /// Largest token, exclusive.
    limit: u64,
    /// How its positions lie, and their number, if it has positions.
    order: (Order, u64),
}

impl Input {
    /// Puts the positions of each sequence where the graph has them.
    fn arrange<T: Copy>(&self, rows: Vec<T>) -> Vec<T> {
        let (order, len) = self.order;
        if order == Order::Straight || len == 0 {
            return rows;
        }
        let inner = self.row / len;
        let from = |i: usize| {
            let (sequence, at, rest) = (i as u64 / self.row, i as u64 % self.row / inner, i as u64 % inner);
            sequence * self.row + order.position(at, len) * inner + rest
        };
        (0..rows.len()).map(|i| rows[from(i) as usize]).collect()
    }
}

impl Feed {
    /// `batch` is in sequences of a step.
    ///
    /// # Errors
    /// If the file cannot be read, does not fit the model, or the model does not take tokens.
    pub fn new(graph: &Graph, data: Option<&Path>, batch: u64, seed: u64) -> Result<Feed, FeedError> {
        let inputs: Vec<Input> = graph
            .inputs
            .iter()
            .map(|&v| {
                let sizes = graph.values[v].ty.dims.iter().filter(|&&d| Some(d) != graph.batch).map(|&d| graph.size(d));
                let positions = graph.values[v].ty.dims.get(1).filter(|&&d| Some(d) == graph.sequence);
                Input {
                    name: graph.values[v].name.clone(),
                    dtype: graph.values[v].ty.dtype,
                    row: sizes.product(),
                    limit: token_limit(graph, v),
                    order: (graph.order, positions.map_or(0, |&d| graph.size(d))),
                }
            })
            .collect();
        let source = match data {
            None => None,
            Some(path) => {
                let sequences = inputs.len() == 2 && inputs.iter().all(|i| i.dtype == DType::I32 && i.row == inputs[0].row);
                if !sequences {
                    let shapes: Vec<String> = graph
                        .inputs
                        .iter()
                        .map(|&v| format!("`{}` {}{:?}", graph.values[v].name, graph.values[v].ty.dtype, graph.shape(v)))
                        .collect();
                    return Err(FeedError::Inputs { inputs: shapes.join(", ") });
                }
                let vocab = inputs.iter().map(|i| i.limit).min().unwrap_or(0);
                Some(TokenSource::open(path, vocab, inputs[0].row, batch)?)
            }
        };
        Ok(Feed { source, inputs, batch, targets: target_count(graph, batch), seed })
    }

    /// Target tokens of a step: what its loss is the mean over.
    pub fn targets(&self) -> u64 {
        self.targets
    }

    /// The inputs of a step.
    ///
    /// # Errors
    /// If the source cannot be read any more.
    pub fn batch(&self, step: u64) -> Result<Batch, DataError> {
        let Some(source) = &self.source else {
            return Ok(Batch { inputs: self.inputs.iter().map(|i| self.random(i, step)).collect() });
        };
        let row = self.inputs[0].row as usize;
        let (mut tokens, mut targets) = (vec![0; row * self.batch as usize], vec![0; row * self.batch as usize]);
        for (r, (tokens, targets)) in tokens.chunks_exact_mut(row).zip(targets.chunks_exact_mut(row)).enumerate() {
            source.fill(step, r as u64, tokens, targets)?;
        }
        Ok(Batch { inputs: vec![Rows::Tokens(self.inputs[0].arrange(tokens)), Rows::Tokens(self.inputs[1].arrange(targets))] })
    }

    fn random(&self, input: &Input, step: u64) -> Rows {
        let elems = input.row * self.batch;
        let normal = dplan_ir::graph::Init::Normal { std: 1.0 };
        let draw = |i: u64| init::element(normal, self.seed, name_hash(&input.name), step * elems + i);
        if input.dtype == DType::I32 {
            // The normal distribution function would be exact; the low bits of a normal number are uniform enough for a smoke test.
            Rows::Tokens(input.arrange((0..elems).map(|i| ((draw(i).to_bits() >> 8) % input.limit.max(1)) as i32).collect()))
        } else {
            Rows::Values(input.arrange((0..elems).map(draw).collect()))
        }
    }
}

/// Elements that the loss is the mean over, in a step of `batch` sequences.
fn target_count(graph: &Graph, batch: u64) -> u64 {
    let mean = graph.forward_nodes().find(|(_, n)| n.op == Op::Mean && n.outputs.first().copied() == graph.loss);
    let dims = mean.map(|(_, n)| graph.values[n.inputs[0]].ty.dims.clone()).unwrap_or_default();
    dims.iter().map(|&d| if graph.batch == Some(d) { batch } else { graph.size(d) }).product()
}

/// One more than the largest token id that every use of an input accepts.
fn token_limit(graph: &Graph, input: ValueId) -> u64 {
    let uses = graph.forward_nodes().filter_map(|(_, n)| match n.op {
        Op::Embed if n.inputs[1] == input => graph.values[n.inputs[0]].ty.dims.first().copied(),
        Op::CeStats if n.inputs[1] == input => graph.values[n.inputs[0]].ty.dims.last().copied(),
        _ => None,
    });
    uses.map(|d| graph.size(d)).min().unwrap_or(1)
}
