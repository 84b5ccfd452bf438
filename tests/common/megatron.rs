//! Plans as in the Megatron papers (arXiv:1909.08053, arXiv:2205.05198), made from names of dims: tensor-parallel axes split heads, hidden units of
//! the feed-forward part (or experts' units) and the vocabulary; between those parts the sequence is split.

use dplan_ir::entity::DimId;
use dplan_ir::extent::node_rule;
use dplan_ir::graph::{Graph, Layout, Node};
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::nest::Nest;
use dplan_ir::optimizer::Optimizer;
use dplan_ir::plan::{Clip, Gathered, LayerPlan, Offload, Placement, Plan, Recompute, Schedule, StagePlan, Wire, Zero};
use dplan_ir::rule::{Assignment, Split};
use dplan_ir::sync::Sync;
use dplan_planner::padding::paddable;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    pub dp: u64,
    pub tp: u64,
    pub pp: u64,
    pub zero: u8,
    /// Sequences of a micro-batch on one data-parallel rank.
    pub micro: u64,
    pub recompute: Recompute,
    pub sequence: bool,
}

impl Shape {
    pub const ONE: Shape = Shape { dp: 1, tp: 1, pp: 1, zero: 0, micro: 8, recompute: Recompute::None, sequence: false };
}

/// The plan of a global batch of `batch` sequences. The graph's batch dim must be `dp · micro`.
pub fn plan(graph: &Graph, shape: Shape, batch: u64) -> Plan {
    let mesh = Mesh::new(shape.dp, shape.tp);
    let layers = graph.layer_count();
    let option = |layer| LayerPlan {
        offload: Offload::None,
        activations: None,
        zero: Zero(shape.zero),
        recompute: shape.recompute,
        gathered: Gathered::Keep,
        strategy: graph.forward_nodes().filter(|(_, n)| n.layer == layer).map(|(_, n)| assignment(graph, n, &mesh, shape.sequence)).collect(),
    };
    let cut = |i: u64| (u64::from(layers) * i / shape.pp) as u32;
    Plan {
        dp: shape.dp,
        ep: 1,
        cp: 1,
        tp: shape.tp,
        micro_batch: shape.micro,
        micro_batches: batch / (shape.dp * shape.micro),
        schedule: Schedule::OneFOneB,
        virtual_stages: 1,
        boundary: (shape.sequence && shape.tp > 1).then_some(1),
        placement: Placement::default(),
        stages: (0..shape.pp).map(|i| StagePlan { first: cut(i), last: cut(i + 1) - 1 }).collect(),
        options: (0..layers).map(option).collect(),
        layers: (0..layers).collect(),
        compute: graph.params.values().next().map_or(dplan_ir::dtype::DType::F32, |p| graph.values[p.value].ty.dtype),
        optimizer: Optimizer::AdamW,
        clip: Clip::GlobalNorm,
        wire: Wire::Full,
        sync: Sync::Flat,
        nest: Nest::default(),
        keys: Default::default(),
    }
}

/// Each axis splits the first dim of this list that the node has, and that it divides.
fn assignment(graph: &Graph, node: &Node, mesh: &Mesh, sequence: bool) -> Assignment {
    // Rows of experts stay where they are: which tokens they belong to is not theirs to split.
    let routed = node.inputs.iter().chain(&node.outputs).any(|&v| graph.values[v].ty.layout != Layout::Dense);
    let names: &[&str] = if sequence && !routed { &["g", "r", "f", "v", "s"] } else { &["g", "r", "f", "v"] };
    let rule = node_rule(graph, node);
    let pad = paddable(graph);
    let mut assignment = Assignment::default();
    let sides = || rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l)).zip(node.inputs.iter().chain(&node.outputs));
    let dim_of = |label: char| sides().find_map(|(l, &v)| l.iter().position(|&x| x == label).map(|at| graph.values[v].ty.dims[at]));
    for axis in mesh.tp().iter() {
        let axes = AxisSet::one(axis);
        let labels = || names.iter().flat_map(|name| rule.factors.iter().filter(move |f| f.split != Split::Whole).map(move |f| (name, f.label)));
        let named = |label: char, name: &str| dim_of(label).filter(|&d| graph.dims[d].name == name);
        let ways = |label: char| mesh.size(assignment.axes(label).union(axes));
        let divides = |label: char, d: DimId| graph.size(d).is_multiple_of(ways(label));
        let found = labels().find(|(name, l)| named(*l, name).is_some_and(|d| divides(*l, d)));
        let found = found.or_else(|| labels().find(|(name, l)| named(*l, name).is_some_and(|d| pad[d])));
        if let Some((_, label)) = found {
            assignment.assign(label, axes);
        }
    }
    assignment
}
