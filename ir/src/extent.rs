//! Where a rank's blocks lie inside an op's dims.
//!
//! Most ops compute the same whichever block they are given. A few do not: rotary embedding and causal masks depend on the position of a token, lookups
//! on which rows of the table a rank holds, the softmax of the loss on which columns are padding. What they need is the same everywhere: for each factor
//! (letter of the op's rule) the [`Extent`] of this rank's block. Interpreters, CPU and CUDA kernels all get it from here.
//!
//! With a dim of padded size `P` cut by axes of `n` ranks, the rank at position `i` along them holds `[i·P/n, (i+1)·P/n)`; elements from the dim's logical size on
//! are padding.

use crate::dropout::Draws;
use crate::entity::{NodeId, ValueId};
use crate::graph::{Graph, Node};
use crate::mesh::Mesh;
use crate::order::Order;
use crate::rule::{Label, Rule, rule};
use crate::sharding::{Padded, Sharding};

/// One rank's block of a dim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// First element of the block in the padded dim.
    pub start: u64,
    /// Elements in the block.
    pub len: u64,
    /// Size of the dim without padding.
    pub logical: u64,
}

impl Extent {
    /// The whole of a dim that has no padding.
    pub fn whole(size: u64) -> Extent {
        Extent { start: 0, len: size, logical: size }
    }
    /// Elements of the block that are not padding; they come first.
    pub fn valid(&self) -> u64 {
        self.logical.saturating_sub(self.start).min(self.len)
    }
    /// Where in the block the element `global` of the dim is, if the block has it.
    pub fn local(&self, global: u64) -> Option<u64> {
        global.checked_sub(self.start).filter(|&at| at < self.len)
    }
}

/// What an op needs to know besides its operands.
#[derive(Clone, PartialEq, Debug)]
pub struct OpContext {
    /// The extent of each factor, in the order of the rule's factors.
    pub extents: Vec<(Label, Extent)>,
    /// [`crate::op::StepScalar::InvTokens`].
    pub inv_tokens: f64,
    /// [`crate::op::StepScalar::LossScale`].
    pub loss_scale: f64,
    /// The forward node whose op, or whose derivative, this is.
    pub node: NodeId,
    /// What dropout draws with; its sequence is the micro-batch's first.
    pub draws: Draws,
    /// How positions lie along the sequence.
    pub order: Order,
    /// The turn of the ring that its keys are in, 0 if they are in none: what counts once for all of them, as sinks do, counts in the first.
    pub turn: u64,
}

impl OpContext {
    /// The same with a scaled loss.
    pub fn scaled(self, loss_scale: f64) -> OpContext {
        OpContext { loss_scale, ..self }
    }
    /// The same with dropout.
    pub fn drawing(self, draws: Draws) -> OpContext {
        OpContext { draws, ..self }
    }
    /// The position in the sequence of element `at` of a rank's block, where the factor `label` counts positions.
    pub fn position(&self, label: Label, at: u64) -> u64 {
        let extent = self.extent(label);
        self.order.position(extent.start + at, extent.logical)
    }
    /// The extent of a factor; empty for a letter that the op does not have.
    pub fn extent(&self, label: Label) -> Extent {
        self.extents.iter().find(|(l, _)| *l == label).map_or(Extent::whole(0), |&(_, e)| e)
    }
}

/// A rank, and the mesh and padding it lives with.
#[derive(Clone, Copy, Debug)]
pub struct Seat<'a> {
    pub mesh: &'a Mesh,
    pub padded: &'a Padded,
    pub local_rank: u64,
}

/// The context of `node` on one rank, whose operands and results have these shardings.
///
/// # Panics
/// If the number of shardings or of their dims is not that of the node's operands and results.
pub fn context(graph: &Graph, node: &Node, ins: &[&Sharding], outs: &[&Sharding], seat: Seat<'_>, inv_tokens: f64) -> OpContext {
    let rule = node_rule(graph, node);
    let sides = rule.ins.iter().zip(&node.inputs).zip(ins).chain(rule.outs.iter().map(|(l, _)| l).zip(&node.outputs).zip(outs));
    // Operands agree on the axes of a factor: the first that has it speaks for all.
    let mut extents: Vec<(Label, Extent)> = Vec::new();
    for ((labels, &value), sharding) in sides {
        for (at, (&label, &dim)) in labels.iter().zip(&graph.values[value].ty.dims).enumerate() {
            if extents.iter().all(|(l, _)| *l != label) {
                let axes = sharding.dims[at];
                let len = seat.padded.size(dim) / seat.mesh.size(axes);
                // In a ring, the block of another rank.
                let whose = sharding.ring.map_or(seat.local_rank, |ring| seat.mesh.before(seat.local_rank, ring.axes, ring.turn));
                extents.push((label, Extent { start: seat.mesh.position(whose, axes) * len, len, logical: graph.size(dim) }));
            }
        }
    }
    let turn = ins.iter().filter_map(|s| s.ring).map(|ring| ring.turn).max().unwrap_or(0);
    OpContext { extents, inv_tokens, loss_scale: 1.0, node: node.origin, draws: Draws::default(), order: graph.order, turn }
}

/// The context of `node` on one device that holds everything.
pub fn whole_context(graph: &Graph, node: &Node, inv_tokens: f64) -> OpContext {
    let padded = Padded(graph.dims.map(|_, d| d.size));
    let replicated = |ids: &[ValueId]| ids.iter().map(|&v| Sharding::replicated(graph.values[v].ty.dims.len())).collect::<Vec<_>>();
    let (ins, outs) = (replicated(&node.inputs), replicated(&node.outputs));
    let seat = Seat { mesh: &Mesh::default(), padded: &padded, local_rank: 0 };
    context(graph, node, &ins.iter().collect::<Vec<_>>(), &outs.iter().collect::<Vec<_>>(), seat, inv_tokens)
}

/// The factor rule of a node.
pub fn node_rule(graph: &Graph, node: &Node) -> Rule {
    let ranks = |ids: &[ValueId]| ids.iter().map(|&v| graph.values[v].ty.dims.len()).collect::<Vec<_>>();
    rule(&node.op, &ranks(&node.inputs), &ranks(&node.outputs))
}
