//! What a step trains on: rows of a token source, or random ones, as the inputs of a graph.
//!
//! Row `r` of a step that begins at position `p` is sequence `p + r` of the source, whatever the plan: ranks and micro-batches take their rows from the
//! step's batch ([`crate::runtime::batch`]). A model that keeps documents apart has a third input, where the document of each token begins: it follows from the tokens
//! and the one that ends a document ([`dplan_ir::documents`]). [`Batches`] reads ahead on a thread of its own.

use crate::checkpoint::DataMark;
use crate::data::{DataError, SequenceOrder, TokenSource};
use crate::runtime::{Batch, Rows};
use dplan_ir::documents;
use dplan_ir::dtype::DType;
use dplan_ir::entity::ValueId;
use dplan_ir::graph::Graph;
use dplan_ir::init::{self, name_hash};
use dplan_ir::op::Op;
use dplan_ir::order::Order;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use thiserror::Error;

/// Batches that are read before they are asked for.
const AHEAD: usize = 2;

/// Tokens of a document among random tokens, in the mean.
const RANDOM_DOCUMENT: u64 = 8;

#[derive(Debug, Error)]
pub enum FeedError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(
        "the model has inputs {inputs}; a data file gives `tokens` and `targets` of shape [batch, sequence] only: leave --data out to train on random values"
    )]
    Inputs { inputs: String },
    #[error("the model keeps documents apart: --document-end says which token ends one in {file}")]
    NoEnd { file: String },
    #[error("no attention of the model keeps documents apart: `compile --documents apart` makes one that does; or leave --document-end out")]
    NotApart,
    #[error("no token {end} ends a document: ids go from 0 to {}", vocab.saturating_sub(1))]
    End { end: u64, vocab: u64 },
}

/// A supplier of batches.
pub struct Feed {
    source: Option<TokenSource>,
    inputs: Vec<Input>,
    batch: u64,
    targets: u64,
    seed: u64,
    /// Ends a document.
    end: Option<i32>,
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
    holds: Holds,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// Tokens, targets, or whatever a model of our own JSON takes.
    Data,
    /// Where the document of each token begins.
    Documents,
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
        let documents = documents::input(graph);
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
                    holds: if documents == Some(v) { Holds::Documents } else { Holds::Data },
                }
            })
            .collect();
        let source = match data {
            None => None,
            Some(path) => {
                let of_data = inputs.iter().filter(|i| i.holds == Holds::Data).count();
                if of_data != 2 || inputs.iter().any(|i| i.dtype != DType::I32 || i.row != inputs[0].row) {
                    let shapes: Vec<String> = graph
                        .inputs
                        .iter()
                        .map(|&v| format!("`{}` {}{:?}", graph.values[v].name, graph.values[v].ty.dtype, graph.shape(v)))
                        .collect();
                    return Err(FeedError::Inputs { inputs: shapes.join(", ") });
                }
                Some(TokenSource::open(path, vocabulary(&inputs), inputs[0].row, batch)?)
            }
        };
        Ok(Feed { source, inputs, batch, targets: target_count(graph, batch), seed, end: None })
    }

    /// The same data, in which a token ends each document. Without, a sequence is one document; random tokens have random documents.
    ///
    /// # Errors
    /// If the model keeps documents apart and nothing says where they end, or the other way round; or if there is no such token.
    pub fn with_documents(self, end: Option<u64>) -> Result<Feed, FeedError> {
        let apart = self.inputs.iter().any(|i| i.holds == Holds::Documents);
        match (end, &self.source) {
            (None, Some(source)) if apart => Err(FeedError::NoEnd { file: source.mark().file }),
            (None, _) => Ok(self),
            (Some(_), _) if !apart => Err(FeedError::NotApart),
            (Some(end), _) => {
                let vocab = vocabulary(&self.inputs);
                let known = i32::try_from(end).ok().filter(|_| end < vocab).ok_or(FeedError::End { end, vocab })?;
                Ok(Feed { end: Some(known), ..self })
            }
        }
    }

    /// The same data in another order than the file's.
    pub fn in_order(self, order: SequenceOrder) -> Feed {
        Feed { source: self.source.map(|s| s.in_order(order)), ..self }
    }

    /// Target tokens of a step: what its loss is the mean over.
    pub fn targets(&self) -> u64 {
        self.targets
    }

    /// Sequences of a step.
    pub fn sequences(&self) -> u64 {
        self.batch
    }
    /// What the data is; `None` if it is random.
    pub fn mark(&self) -> Option<DataMark> {
        self.source.as_ref().map(|source| DataMark { document_end: self.end, ..source.mark() })
    }

    /// The inputs of a step, of a run whose steps all have this batch.
    ///
    /// # Errors
    /// If there is no such step.
    pub fn batch(&self, step: u64) -> Result<Batch, DataError> {
        step.checked_mul(self.batch).map(|position| self.at(position)).ok_or(DataError::Ended)
    }

    /// The inputs of the step that begins at a position, in sequences.
    pub fn at(&self, position: u64) -> Batch {
        let Some(source) = &self.source else {
            return Batch { inputs: self.inputs.iter().map(|i| self.random(i, position)).collect() };
        };
        let row = self.inputs[0].row as usize;
        let (mut tokens, mut targets) = (vec![0; row * self.batch as usize], vec![0; row * self.batch as usize]);
        for (r, (tokens, targets)) in tokens.chunks_exact_mut(row).zip(targets.chunks_exact_mut(row)).enumerate() {
            source.sequence(position + r as u64, tokens, targets);
        }
        let first = self.end.map(|end| tokens.chunks_exact(row).flat_map(|row| documents::first_positions(row, end)).collect());
        let first = first.unwrap_or_else(|| vec![0; tokens.len()]);
        let mut data = [tokens, targets].into_iter();
        let rows = |input: &Input| {
            let values = match input.holds {
                Holds::Documents => first.clone(),
                Holds::Data => data.next().expect("tokens and targets: checked when the file was opened"),
            };
            Rows::Tokens(input.arrange(values))
        };
        Batch { inputs: self.inputs.iter().map(rows).collect() }
    }

    fn random(&self, input: &Input, position: u64) -> Rows {
        let elems = input.row * self.batch;
        let normal = dplan_ir::graph::Init::Normal { std: 1.0 };
        let draw = |i: u64| init::element(normal, self.seed, name_hash(&input.name), position * input.row + i);
        if input.dtype == DType::I32 {
            // The normal distribution function would be exact; the low bits of a normal number are uniform enough for a smoke test.
            let below = |limit: u64| (0..elems).map(|i| ((draw(i).to_bits() >> 8) % limit) as i32).collect::<Vec<_>>();
            Rows::Tokens(input.arrange(match input.holds {
                Holds::Data => below(input.limit.max(1)),
                Holds::Documents => {
                    let ends = below(RANDOM_DOCUMENT);
                    ends.chunks(input.row.max(1) as usize).flat_map(|row| documents::first_positions(row, 0)).collect()
                }
            }))
        } else {
            Rows::Values(input.arrange((0..elems).map(draw).collect()))
        }
    }
}

/// The batches from a position on, read ahead.
pub struct Batches {
    position: u64,
    step: u64,
    from: Receiver<Batch>,
}

impl Batches {
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(feed: &Arc<Feed>, position: u64) -> Result<Batches, DataError> {
        let (to, from) = sync_channel(AHEAD);
        let (step, feed) = (feed.sequences(), Arc::clone(feed));
        let read = move || {
            let mut at = position;
            // The send fails when nobody wants batches any more.
            while to.send(feed.at(at)).is_ok() {
                at += step;
            }
        };
        let started = std::thread::Builder::new().name("batches".into()).spawn(read);
        started.map_err(|source| DataError::Read { file: "the thread that reads ahead".into(), source })?;
        Ok(Batches { position, step, from })
    }

    /// The next batch, and the position it begins at.
    ///
    /// # Errors
    /// If the thread has ended.
    pub fn take(&mut self) -> Result<(u64, Arc<Batch>), DataError> {
        let batch = Arc::new(self.from.recv().map_err(|_| DataError::Ended)?);
        let begins = self.position;
        self.position += self.step;
        Ok((begins, batch))
    }
}

/// Token ids that every input of data accepts.
fn vocabulary(inputs: &[Input]) -> u64 {
    inputs.iter().filter(|i| i.holds == Holds::Data).map(|i| i.limit).min().unwrap_or(0)
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
