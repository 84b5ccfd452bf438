//! One layer, sharded: what it does in both passes of a micro-batch, and where its forms live.
//!
//! Every form of a fragment is made at most once. What is computed or gathered again in the backward pass is a form of its own, so each form has one
//! maker and one place:
//!
//! ```text
//! Param        the parameter's bucket
//! Frame        kept from the forward pass of a micro-batch to its backward pass
//! Held         kept from the input half of a backward pass to its weight half
//! Workspace    gone when the layer's pass is over
//! Output       the next layer's input: in its frame, or in a send buffer
//! CotangentIn  cotangent of the output, made by the next layer
//! CotangentOut cotangent of the input, for the layer before
//! Gradient     added to the parameter's gradient as it is made
//! Loss         added to the loss of the step as it is made
//! ```

use super::ring::working_bytes;
use crate::memory::{BucketSize, LayerBytes};
use dplan_ir::entity::{FormId, ParamId, Table};
use dplan_ir::extent::node_rule;
use dplan_ir::graph::Graph;
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::pipeline::Pipeline;
use dplan_ir::program::align;
use dplan_ir::sharded::{Form, Stmt};
use dplan_ir::sharding::{LocalType, Padded, Sharding, local_type};

/// Where the bytes of a form are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Storage {
    Param(ParamId),
    Frame,
    Held,
    Workspace,
    Output,
    CotangentIn,
    CotangentOut,
    Gradient(ParamId),
    Loss,
}

/// Whether backward passes run in one piece, or in halves: what the layer before waits for, and the rest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum BackwardPass {
    #[default]
    Whole,
    Parted,
}

impl BackwardPass {
    pub fn of(pipeline: &Pipeline) -> BackwardPass {
        if pipeline.parts_backward() { BackwardPass::Parted } else { BackwardPass::Whole }
    }
}

/// A parameter that the layer uses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BucketMember {
    pub param: ParamId,
    pub sharding: Sharding,
}

/// Parameters that are synchronised together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FragmentBucket {
    pub members: Vec<BucketMember>,
    /// Axes that the members are sharded over, all of them the same.
    pub axes: AxisSet,
    /// Tensor-parallel axes over which the accumulated gradients still have to be summed.
    pub partial: AxisSet,
    /// Used by other layers too: such a parameter is alone in its bucket.
    pub tied: bool,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct Fragment {
    pub layer: u32,
    pub forms: Table<FormId, Form>,
    pub storage: Table<FormId, Storage>,
    pub forward: Vec<Stmt>,
    pub backward: Vec<Stmt>,
    pub backward_pass: BackwardPass,
    /// Statements of the backward pass in its input half, which come first; all of them where it runs in one piece.
    pub input_half: usize,
    /// The value that the layer before hands over, in the boundary sharding; none for the first layer.
    pub input: Option<FormId>,
    /// None for the last layer.
    pub output: Option<FormId>,
    /// Absent as well where nothing before the boundary is trained.
    pub cotangent_in: Option<FormId>,
    pub cotangent_out: Option<FormId>,
    pub buckets: Vec<FragmentBucket>,
    /// Gradient contributions, in the order of the backward pass. Those whose storage is not [`Storage::Gradient`] are added to the gradient when they
    /// have been made.
    pub accumulate: Vec<(ParamId, FormId)>,
    /// The loss of the micro-batch, where the layer makes it.
    pub loss: Option<FormId>,
}

impl Fragment {
    /// One rank's block of a form.
    pub fn local(&self, form: FormId, graph: &Graph, mesh: &Mesh, padded: &Padded) -> LocalType {
        let form = &self.forms[form];
        local_type(&graph.values[form.value].ty, &form.sharding, padded, mesh)
    }

    /// Forms of one kind of storage, in table order: the order in which they are laid out.
    pub fn stored(&self, storage: Storage) -> impl Iterator<Item = FormId> {
        self.storage.iter().filter(move |&(_, s)| *s == storage).map(|(f, _)| f)
    }

    /// Scratch of one statement, bytes.
    pub fn scratch(&self, stmt: &Stmt, graph: &Graph, mesh: &Mesh, padded: &Padded) -> u64 {
        match stmt {
            Stmt::Run { node, ins, outs, assignment } => {
                let types = |forms: &[FormId]| forms.iter().map(|&f| self.local(f, graph, mesh, padded)).collect::<Vec<_>>();
                let (ins, outs, node) = (types(ins), types(outs), &graph.nodes[*node]);
                let (ins, outs) = (ins.iter().collect::<Vec<_>>(), outs.iter().collect::<Vec<_>>());
                working_bytes(&node.op, &node_rule(graph, node), assignment, mesh, &ins, &outs)
            }
            Stmt::Reshard { .. } => 0,
        }
    }

    /// What the layer needs on one rank ([`crate::memory`] says what the parts mean).
    pub fn bytes(&self, graph: &Graph, mesh: &Mesh, padded: &Padded) -> LayerBytes {
        let sum = |storage| self.stored(storage).map(|f| align(self.local(f, graph, mesh, padded).bytes())).sum::<u64>();
        let scratch: u64 = self.forward.iter().chain(&self.backward).map(|s| align(self.scratch(s, graph, mesh, padded))).sum();
        LayerBytes {
            buckets: self.buckets.iter().map(|b| b.size(graph, mesh, padded)).collect(),
            reads_back: graph.reads_parameters_back(self.layer),
            frame: sum(Storage::Frame),
            // A cotangent that is handed over waits where the weight half finds it.
            held: sum(Storage::Held) + if self.backward_pass == BackwardPass::Parted { sum(Storage::CotangentIn) } else { 0 },
            workspace: sum(Storage::Workspace) + scratch,
        }
    }
}

impl FragmentBucket {
    pub fn size(&self, graph: &Graph, mesh: &Mesh, padded: &Padded) -> BucketSize {
        let elems = self.members.iter().map(|m| m.elems(graph, mesh, padded)).sum();
        BucketSize { elems, partial: self.partial, axes: self.axes, members: self.members.len() as u64, tied: self.tied }
    }
}

impl BucketMember {
    /// Elements on one rank.
    pub fn elems(&self, graph: &Graph, mesh: &Mesh, padded: &Padded) -> u64 {
        local_type(&graph.values[graph.params[self.param].value].ty, &self.sharding, padded, mesh).elems()
    }
}

/// The forms a statement reads.
pub(crate) fn reads(stmt: &Stmt) -> &[FormId] {
    match stmt {
        Stmt::Run { ins, .. } => ins,
        Stmt::Reshard { from, .. } => std::slice::from_ref(from),
    }
}

/// The forms a statement makes.
pub(crate) fn makes(stmt: &Stmt) -> &[FormId] {
    match stmt {
        Stmt::Run { outs, .. } => outs,
        Stmt::Reshard { to, .. } => std::slice::from_ref(to),
    }
}
