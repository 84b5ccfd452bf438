//! Strategies, and the plan of a case.

use super::{Case, Dice, Split};
use dplan_ir::data::data_split;
use dplan_ir::entity::DimId;
use dplan_ir::extent::node_rule;
use dplan_ir::graph::{Graph, Layout, Node};
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::plan::{LayerPlan, Placement, Plan, StagePlan};
use dplan_ir::rule::{self, Assignment, Label, Rule};

/// The table of the embedding, which the head may share.
const TABLE: &str = "table";

impl Case {
    /// The plan for the case's graph.
    pub fn plan(&self, graph: &Graph) -> Plan {
        let mesh = Mesh::of(self.degrees());
        let layers = graph.layer_count();
        let strategy = |layer: u32| match self.split {
            Split::None => graph.forward_nodes().filter(|(_, n)| n.layer == layer).map(|_| Assignment::default()).collect(),
            Split::Textbook => textbook(graph, &mesh, layer),
            Split::Drawn(seed) => shuffled(graph, &mesh, layer, &mut Dice::of(seed, u64::from(layer))),
        };
        let mut options: Vec<LayerPlan> = (0..layers)
            .zip(&self.ways)
            .map(|(layer, way)| LayerPlan {
                zero: way.zero,
                offload: way.offload,
                activations: way.activations,
                recompute: way.recompute,
                gathered: way.gathered,
                strategy: strategy(layer),
            })
            .collect();
        // The embedding and the head may share their table, so they share its sharding.
        if let [first, .., last] = options.as_mut_slice() {
            let head = graph.forward_nodes().filter(|(_, n)| n.layer + 1 == layers);
            for (at, _) in head.enumerate().filter(|(_, (_, n))| n.inputs.iter().any(|&v| graph.values[v].name == TABLE)) {
                last.strategy[at] = first.strategy[0].clone();
            }
        }
        let starts: Vec<u32> = std::iter::once(0).chain(self.cuts.iter().copied()).chain([layers]).collect();
        Plan {
            dp: self.dp,
            ep: self.ep,
            cp: self.cp,
            tp: self.tp,
            micro_batch: self.micro_batch,
            micro_batches: self.micro_batches,
            schedule: self.schedule,
            virtual_stages: self.virtual_stages,
            boundary: self.boundary.dim(),
            placement: Placement::default(),
            stages: starts.windows(2).map(|w| StagePlan { first: w[0], last: w[1] - 1 }).collect(),
            options,
            layers: (0..layers).collect(),
            compute: self.compute,
            optimizer: self.optimizer,
            clip: self.clip,
            wire: self.wire,
            keys: self.keys,
            sync: self.sync,
            nest: self.nest,
        }
    }
}

/// A strategy for one layer: each tensor-parallel axis splits any factor of each node, or none.
pub fn shuffled(graph: &Graph, mesh: &Mesh, layer: u32, dice: &mut Dice) -> Vec<Assignment> {
    // Parameters that layers share, and the packed rows of experts, need one choice.
    let (rows, table) = (dice.pick(&["e", "f", ""]), dice.pick(&["v", ""]));
    let free = crate::padding::paddable(graph);
    let mut all = Vec::new();
    for (_, node) in graph.forward_nodes().filter(|(_, n)| n.layer == layer) {
        let rule = node_rule(graph, node);
        let data = data_split(graph, node, &rule, mesh);
        let letters = splittable(graph, node, &rule);
        let routed = node.inputs.iter().chain(&node.outputs).any(|&v| graph.values[v].ty.layout != Layout::Dense);
        let shared = node.inputs.iter().any(|&v| graph.values[v].name == TABLE);
        let named = |name: &str| letters.iter().find(|&&(_, d)| graph.dims[d].name == name).map(|l| l.0);
        let mut assignment = Assignment::default();
        for axis in mesh.tp().iter() {
            let label = match (routed, shared) {
                (true, _) => named(rows),
                (false, true) => named(table),
                (false, false) if dice.one_in(4) || letters.is_empty() => None,
                (false, false) => Some(dice.pick(&letters).0),
            };
            let Some(label) = label else { continue };
            let mut with = assignment.clone();
            with.assign(label, AxisSet::one(axis));
            let ways = mesh.size(data.axes(label)) * mesh.size(with.axes(label));
            if sides(graph, node, &rule).filter(|&(l, _)| l == label).all(|(_, d)| free[d] || graph.size(d).is_multiple_of(ways)) {
                assignment = with;
            }
        }
        all.push(assignment);
    }
    all
}

/// The textbook strategy (arXiv:1909.08053, arXiv:2205.05198): heads, feed-forward and vocabulary over all tensor-parallel axes, the sequence elsewhere.
pub fn textbook(graph: &Graph, mesh: &Mesh, layer: u32) -> Vec<Assignment> {
    let nodes = graph.forward_nodes().filter(|(_, n)| n.layer == layer);
    let strategy = nodes.map(|(_, node)| {
        let letters = splittable(graph, node, &node_rule(graph, node));
        let mut assignment = Assignment::default();
        let named = |name: &&str| letters.iter().find(|&&(_, d)| graph.dims[d].name == *name);
        if let Some(&(label, _)) = ["e", "g", "f", "v", "s"].iter().find_map(named) {
            assignment.assign(label, mesh.tp());
        }
        assignment
    });
    strategy.collect()
}

/// Letters of a node and the dims they stand for, once for each operand and result that has them.
fn sides<'a>(graph: &'a Graph, node: &'a Node, rule: &'a Rule) -> impl Iterator<Item = (Label, DimId)> + 'a {
    let letters = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l));
    letters.zip(node.inputs.iter().chain(&node.outputs)).flat_map(|(labels, &v)| labels.iter().copied().zip(graph.values[v].ty.dims.iter().copied()))
}

/// The letters that may be split, each once, in the order of operands.
fn splittable(graph: &Graph, node: &Node, rule: &Rule) -> Vec<(Label, DimId)> {
    let mut letters: Vec<(Label, DimId)> = Vec::new();
    for (label, dim) in sides(graph, node, rule) {
        let may = rule.factor(label).is_some_and(|f| f.split != rule::Split::Whole);
        if may && letters.iter().all(|l| l.0 != label) {
            letters.push((label, dim));
        }
    }
    letters
}
