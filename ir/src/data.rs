//! How data axes split an op, which no plan has to say.
//!
//! Data axes ([`Mesh::data`]) split what a step is fed with, the same way for every op:
//! - `dp` and `ep` split the batch dim;
//! - `cp` splits the sequence dim, wherever the op lets it: the keys of an attention are another factor than its queries and stay whole, or, along an axis `ring`, go round
//!   ([`crate::ring`]);
//! - of an op on the rows of experts ([`experts`]), `ep` splits the experts instead: its tokens are gathered over `ep`, each rank routes those that its own
//!   experts get, and their contributions are summed and scattered back. Packed rows never travel.
//!
//! Results of an op that lacks a factor so split wait for a sum, like any other: that is what makes gradients sums over data axes.

use crate::entity::{DimId, ValueId};
use crate::extent::node_rule;
use crate::graph::{Graph, Layout, Node};
use crate::mesh::{AxisSet, Mesh};
use crate::rule::{Assignment, Blockwise, Label, Rule, Split};

/// The factors of `node` that the mesh's data axes split.
pub fn data_split(graph: &Graph, node: &Node, rule: &Rule, mesh: &Mesh) -> Assignment {
    let mut split = Assignment::default();
    let free = |label: &Label| rule.factor(*label).is_some_and(|f| f.split != Split::Whole);
    let shared_out = experts(graph, &graph.nodes[node.origin]).filter(|_| !mesh.ep().is_empty());
    if let Some(label) = shared_out.filter(free) {
        split.assign(label, mesh.ep());
    }
    let batch = if shared_out.is_some() { mesh.dp().minus(mesh.ep()) } else { mesh.dp() };
    for (dim, axes) in [(graph.batch, batch), (graph.sequence, mesh.cp())] {
        if let Some(label) = dim.and_then(|dim| labels(graph, node, rule, dim).find(free)) {
            split.assign(label, axes);
        }
    }
    if let (Some(dim), Some(Blockwise { queries, keys })) = (graph.sequence, rule.blockwise)
        && split.axes(queries).includes(mesh.ring())
        && labels(graph, node, rule, dim).any(|label| label == keys)
    {
        split.assign(keys, mesh.ring());
    }
    split
}

/// How data axes split the dims of a value that crosses from one layer to another.
pub fn data_dims(graph: &Graph, value: ValueId, mesh: &Mesh) -> Vec<AxisSet> {
    let axes = |dim: DimId| match Some(dim) {
        d if d == graph.batch => mesh.dp(),
        d if d == graph.sequence => mesh.cp(),
        _ => AxisSet::EMPTY,
    };
    graph.values[value].ty.dims.iter().map(|&dim| axes(dim)).collect()
}

/// The expert factor of a forward node that has rows of experts among its operands or results.
pub fn experts(graph: &Graph, node: &Node) -> Option<Label> {
    let routed = |&&value: &&ValueId| graph.values[value].ty.layout != Layout::Dense;
    let dim = graph.values[*node.inputs.iter().chain(&node.outputs).find(routed)?].ty.dims[2];
    let rule = node_rule(graph, node);
    labels(graph, node, &rule, dim).find(|&label| rule.factor(label).is_some_and(|f| f.split != Split::Whole))
}

/// The letters that stand for a dim in a node.
fn labels(graph: &Graph, node: &Node, rule: &Rule, dim: DimId) -> impl Iterator<Item = Label> {
    let letters = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l));
    let pairs = letters.zip(node.inputs.iter().chain(&node.outputs)).flat_map(|(labels, &value)| labels.iter().zip(&graph.values[value].ty.dims));
    pairs.filter(move |(_, d)| **d == dim).map(|(&label, _)| label)
}
