//! The graph: one logical training step of one micro-batch on one device.
//!
//! Values have named dims; nodes are in execution order, so a graph is a straight-line program. A graph as imported holds the forward pass; after
//! [`crate::grad::differentiate`] it also holds the backward pass, in which input gradients and weight gradients are separate nodes.
//! The optimizer is not in the graph: it is the same elementwise rule for every parameter ([`crate::optimizer`]).
//!
//! Invariants (checked by [`crate::verify::graph`]):
//! - every operand is defined by an input, a parameter or an earlier node; types are what the op's type rule gives;
//! - `loss` is a scalar, defined in the last layer; forward nodes come before backward nodes;
//! - `layer` is non-decreasing over forward nodes and non-increasing over backward nodes; exactly one value (the *boundary*) crosses from a layer to the
//!   next, and it is not used further on; graph inputs and parameters may be used by any layer.
//!
//! Words: a *layer* is a repeated block and the unit of every planning choice (the embedding is the first layer, the head with the loss the last);
//! the *boundary* of a layer is the one value it hands to the next; the *cotangent* of a value is the gradient of the loss with respect to it.

use crate::dtype::DType;
use crate::entity::{DimId, NodeId, ParamId, Table, ValueId};
use crate::op::Op;
use crate::order::Order;
use std::collections::BTreeSet;

/// A named logical dimension.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dim {
    pub name: String,
    pub size: u64,
}

/// How the elements of a value are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Layout {
    /// Row-major.
    Dense,
    /// Logically `[batch, seq, expert, …]`, zero but for at most `k` experts of each token. Only the rows that are not zero are stored, sorted by (expert,
    /// batch, seq), in a buffer that has room for whatever a router chooses: `tokens × min(k, experts)` rows, or fewer where experts take no more than a
    /// `capacity` of tokens of each sequence ([`crate::capacity`]). Which rows are not zero is read from the gate value that every op on such a value takes
    /// as its last operand; rows past the last used one are zero.
    TopK { k: u64, capacity: Option<u64> },
}

/// Element type, dims and layout of a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Type {
    pub dtype: DType,
    pub dims: Vec<DimId>,
    pub layout: Layout,
}

impl Type {
    pub fn dense(dtype: DType, dims: Vec<DimId>) -> Type {
        Type { dtype, dims, layout: Layout::Dense }
    }
}

/// Where a value comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Def {
    Input,
    Param(ParamId),
    /// The node and which of its outputs.
    Node(NodeId, u32),
}

#[derive(Clone, PartialEq, Debug)]
pub struct Value {
    /// Unique; what the text form and messages call it.
    pub name: String,
    pub ty: Type,
    pub def: Def,
}

/// Which part of a step a node belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Phase {
    Forward,
    /// Gradients of activations: on the critical path to the previous stage.
    InputGrad,
    /// Gradients of parameters: free to be done later.
    WeightGrad,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Node {
    pub op: Op,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<ValueId>,
    pub layer: u32,
    pub phase: Phase,
    /// The forward node whose derivative this is (a forward node: itself). Both have the same factors, so one choice of strategy serves both.
    /// For an `Add` that sums cotangents of a value: the node that defines that value (for the boundary of the previous layer: the first user).
    pub origin: NodeId,
}

/// How a parameter begins when no weights are given.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    Normal { std: f64 },
    Zeros,
    Ones,
}

/// A part of a tensor in a weights file, and the part of the parameter it holds.
///
/// The file's tensor, of shape `shape`, is viewed as `view` (same elements), narrowed to `[start, start + len)` on dim `dim` of that view, and then holds,
/// in row-major order, either the whole parameter (`at: None`) or its slice `at: Some(i)` of the parameter's first dim.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    pub tensor: String,
    pub shape: Vec<u64>,
    pub view: Vec<u64>,
    pub narrow: Option<Narrow>,
    pub at: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Narrow {
    pub dim: u32,
    pub start: u64,
    pub len: u64,
}

/// A trainable parameter. Its elements count once, however often it is used (tied weights).
#[derive(Clone, PartialEq, Debug)]
pub struct Param {
    pub value: ValueId,
    pub init: Init,
    /// Where its elements are in a weights file; empty for a model that has none: then the tensor is called like the value.
    pub pieces: Vec<Piece>,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct Graph {
    pub name: String,
    pub dims: Table<DimId, Dim>,
    pub values: Table<ValueId, Value>,
    pub nodes: Table<NodeId, Node>,
    pub params: Table<ParamId, Param>,
    /// Token ids (and targets) of the micro-batch, in the order the data loader fills them: `tokens`, then `targets`; dense models of our own JSON
    /// may have others.
    pub inputs: Vec<ValueId>,
    /// The dim that counts sequences (data parallelism splits it). Its size is the sequences of one micro-batch over all data-parallel ranks.
    pub batch: Option<DimId>,
    /// The dim that counts the positions of a sequence (context parallelism splits it).
    pub sequence: Option<DimId>,
    /// How positions lie along that dim.
    pub order: Order,
    /// Mean loss: its local value is the sum over the micro-batch times [`crate::op::StepScalar::InvTokens`].
    pub loss: Option<ValueId>,
    /// After differentiation: the values whose sum over micro-batches is the gradient of each parameter (one per use).
    pub grads: Table<ParamId, Vec<ValueId>>,
    /// After differentiation: the cotangent of each value that has one, fully summed over its uses.
    pub cotangents: Table<ValueId, Option<ValueId>>,
}

impl Graph {
    pub fn size(&self, dim: DimId) -> u64 {
        self.dims[dim].size
    }
    /// Positions of one sequence: the tokens of the first input; where that has vectors in their place, as patches of an image, the vectors.
    pub fn positions(&self) -> u64 {
        let Some(&first) = self.inputs.first() else { return 1 };
        let Type { dims, dtype, .. } = &self.values[first].ty;
        let of_sequence: Vec<u64> = dims.iter().filter(|&&d| Some(d) != self.batch).map(|&d| self.size(d)).collect();
        let vector = usize::from(*dtype != DType::I32).min(of_sequence.len());
        of_sequence[..of_sequence.len() - vector].iter().product()
    }
    /// Logical shape of a value.
    pub fn shape(&self, value: ValueId) -> Vec<u64> {
        self.values[value].ty.dims.iter().map(|&d| self.size(d)).collect()
    }
    /// Trainable elements, each counted once.
    pub fn param_count(&self) -> u64 {
        let fixed = self.fixed_params();
        self.params.iter().filter(|(p, _)| !fixed.contains(p)).map(|(_, p)| self.shape(p.value).iter().product::<u64>()).sum()
    }
    /// Parameters that only correct which experts are chosen: stored and loaded like others, but their gradient is always zero, nothing else may change them,
    /// and they do not count as parameters of the model.
    pub fn fixed_params(&self) -> BTreeSet<ParamId> {
        let corrections = self.forward_nodes().filter(|(_, n)| matches!(n.op, Op::TopKGate(_))).filter_map(|(_, n)| n.inputs.get(1));
        corrections.filter_map(|&v| self.param_of(v)).collect()
    }
    /// Number of layers (embedding and head included).
    pub fn layer_count(&self) -> u32 {
        self.nodes.values().map(|n| n.layer + 1).max().unwrap_or(0)
    }
    /// The graph as it was before differentiation: backward nodes and their values stand behind the forward ones.
    pub fn strip_backward(&mut self) {
        let nodes = self.forward_nodes().count();
        let first_backward = self.nodes.values().nth(nodes).and_then(|n| n.outputs.first().copied());
        self.nodes.truncate(nodes);
        if let Some(value) = first_backward {
            self.values.truncate(value.0 as usize);
        }
        self.grads = Table::new();
        self.cotangents = Table::new();
    }
    pub fn is_differentiated(&self) -> bool {
        !self.grads.is_empty() || self.params.is_empty()
    }
    /// The node that defines a value, if a node does.
    pub fn producer(&self, value: ValueId) -> Option<NodeId> {
        match self.values[value].def {
            Def::Node(node, _) => Some(node),
            Def::Input | Def::Param(_) => None,
        }
    }
    pub fn param_of(&self, value: ValueId) -> Option<ParamId> {
        match self.values[value].def {
            Def::Param(p) => Some(p),
            Def::Input | Def::Node(..) => None,
        }
    }
    /// Whether the backward pass of a layer may read a parameter, be it to make again what the forward pass made. An embedding's table has a gradient, but nothing
    /// reads it for that.
    pub fn reads_parameters_back(&self, layer: u32) -> bool {
        let mut read: Vec<ValueId> =
            self.nodes.values().filter(|n| n.layer == layer && n.phase != Phase::Forward).flat_map(|n| n.inputs.clone()).collect();
        let mut seen = BTreeSet::new();
        while let Some(value) = read.pop() {
            match self.values[value].def {
                Def::Param(_) => return true,
                Def::Node(node, _) if seen.insert(node) && self.nodes[node].layer == layer => read.extend(&self.nodes[node].inputs),
                Def::Node(..) | Def::Input => {}
            }
        }
        false
    }
    pub fn forward_nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter().filter(|(_, n)| n.phase == Phase::Forward)
    }
    /// For each layer but the last, the value it hands to the next.
    pub fn boundaries(&self) -> Vec<ValueId> {
        let layers = self.layer_count() as usize;
        let mut boundary = vec![None; layers];
        for node in self.nodes.values().filter(|n| n.phase == Phase::Forward) {
            for &input in &node.inputs {
                if let Some(from) = self.producer(input).map(|p| self.nodes[p].layer)
                    && from < node.layer
                {
                    boundary[from as usize] = Some(input);
                }
            }
        }
        boundary.into_iter().take(layers.saturating_sub(1)).flatten().collect()
    }
    /// Sets the number of sequences in a micro-batch.
    pub fn set_batch(&mut self, sequences: u64) {
        if let Some(batch) = self.batch {
            self.dims[batch].size = sequences;
        }
    }
}
