//! Finding layers.
//!
//! A *cut* is a value through which everything that it depends on reaches the loss: the graph falls apart there into a before and an after that share
//! only it (and inputs and parameters). Cuts are found in linear time: with `d(x)` the nearest node that all paths from `x` to the loss go through (`d` makes a tree with the loss as its root),
//! the subtree of `v` is all that reaches the loss through `v` only; `v` is a cut if no node of it takes an operand from outside it.
//!
//! Between the cuts lie *sections*. A run of sections that repeats is a block of the network: an attention half and a feed-forward half, say, which together
//! occur many times. Each occurrence is a layer; inside it, repetitions are sought again. What is left before, between and behind is a layer each:
//! the embedding first, the head last. Where nothing repeats, or what repeats or is left is long ([`MOST_PRODUCTS`]), every section with a product is a layer. What is less
//! ([`Weight`]) never stands alone: a norm goes with what follows it, all else with what precedes it.

use std::ops::Range;

use crate::entity::{NodeId, Table, ValueId};
use crate::graph::Graph;
use crate::layers::form::{Detail, Facts};
use crate::layers::rebuild::rebuild;
use crate::layers::{is_forward, number, parts, post_order};
use crate::op::Op;

/// A forward graph with layers found from its structure, whatever layers it has. Nodes that the loss does not depend on are left out.
/// A graph without a loss, or with a backward pass, is returned as it is.
pub fn detect(graph: &Graph) -> Graph {
    let Some(loss) = graph.loss.filter(|_| graph.nodes.ids().all(|n| is_forward(graph, n))) else {
        return graph.clone();
    };
    let order = post_order(graph, &[loss], &mut Table::filled(graph.nodes.len(), false), |_| true);
    let mut graph = rebuild(graph, &order);
    let Some(loss) = graph.loss else { return graph };
    let sections = sections(&graph, loss);
    let count = sections.values().map(|s| s + 1).max().unwrap_or(0);
    let layer_of = {
        let part_of = sections.map(|_, s| Some(*s));
        let parts = parts(&graph, &part_of, count);
        let shapes = number(&Facts::new(&graph, &part_of).forms(&parts, Detail::Shape));
        let weights: Vec<Weight> = parts.iter().map(|p| weight(&graph, &p.nodes)).collect();
        layers(&shapes, &weights)
    };
    for (id, node) in graph.nodes.iter_mut() {
        node.layer = layer_of[sections[id] as usize];
    }
    let mut order: Vec<NodeId> = graph.nodes.ids().collect();
    order.sort_by_key(|&n| graph.nodes[n].layer);
    rebuild(&graph, &order)
}

/// The section of each node of a graph in which every node reaches the loss.
fn sections(graph: &Graph, loss: ValueId) -> Table<NodeId, u32> {
    let Some(root) = graph.producer(loss) else { return Table::new() };
    let edges = || graph.nodes.iter().flat_map(|(user, n)| n.inputs.iter().filter_map(move |&v| graph.producer(v).map(|p| (p, user))));
    let mut users: Table<NodeId, Vec<NodeId>> = Table::filled(graph.nodes.len(), Vec::new());
    edges().for_each(|(producer, user)| users[producer].push(user));

    // The nearest node that all paths to the loss go through, and how far the loss is from there in that tree.
    let mut through: Table<NodeId, NodeId> = Table::filled(graph.nodes.len(), root);
    let mut depth: Table<NodeId, u32> = Table::filled(graph.nodes.len(), 0);
    for id in graph.nodes.ids().rev().filter(|&id| id != root) {
        let meet = |mut a: NodeId, mut b: NodeId| {
            while a != b {
                if depth[a] < depth[b] { b = through[b] } else { a = through[a] }
            }
            a
        };
        through[id] = users[id].iter().copied().reduce(meet).unwrap_or(root);
        depth[id] = depth[through[id]] + 1;
    }

    // An edge from w to u leaves every subtree that holds u but not w: those from u up to, and without, through[w].
    let mut leaks: Table<NodeId, i64> = Table::filled(graph.nodes.len(), 0);
    for (producer, user) in edges() {
        leaks[user] += 1;
        leaks[through[producer]] -= 1;
    }
    for id in graph.nodes.ids().filter(|&id| id != root) {
        let below = leaks[id];
        leaks[through[id]] += below;
    }
    let used_results =
        |id: NodeId| graph.nodes[id].outputs.iter().filter(|&&v| users[id].iter().any(|&u| graph.nodes[u].inputs.contains(&v))).count();
    let is_cut = |id: NodeId| id == root || (leaks[id] == 0 && used_results(id) == 1);

    // The longest chain of cuts, each before the next; among equals the one whose first node stands first in the walk from the loss.
    let mut chain: Table<NodeId, u32> = graph.nodes.map(|id, _| u32::from(is_cut(id)));
    let mut best: Table<NodeId, Option<NodeId>> = Table::filled(graph.nodes.len(), None);
    for id in graph.nodes.ids().filter(|&id| id != root) {
        let up = through[id];
        if best[up].is_none_or(|b| chain[id] > chain[b]) {
            best[up] = Some(id);
        }
        let longest = best[up].map_or(0, |b| chain[b]);
        chain[up] = u32::from(is_cut(up)) + longest;
    }
    let mut section: Table<NodeId, Option<u32>> = Table::filled(graph.nodes.len(), None);
    let mut at = Some(root);
    let mut last = chain[root];
    while let Some(id) = at {
        if is_cut(id) {
            last -= 1;
            section[id] = Some(last);
        }
        at = best[id];
    }
    for id in graph.nodes.ids().rev() {
        if section[id].is_none() {
            section[id] = section[through[id]];
        }
    }
    section.map(|_, s| s.unwrap_or(0))
}

/// Longest run of sections that may be one layer.
const MAX_PERIOD: usize = 512;

/// Most sections with products in one layer of several: ways of running a layer multiply with its sections, and stages are cut between layers only.
const MOST_PRODUCTS: usize = 4;

/// What a section has parameters for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    /// Nothing, or adding them: the cotangent of what it is given would pass through unchanged.
    None,
    /// Scaling, as norms do.
    Scale,
    /// Products and tables.
    Product,
}

fn weight(graph: &Graph, nodes: &[NodeId]) -> Weight {
    if only_adds(graph, nodes) {
        return Weight::None;
    }
    let of = |id: &NodeId| {
        let node = &graph.nodes[*id];
        match node.op {
            _ if node.inputs.iter().all(|&v| graph.param_of(v).is_none()) => Weight::None,
            Op::Add | Op::Sub | Op::AddBias | Op::AddPosition => Weight::None,
            Op::Einsum(_) | Op::ExpertEinsum(_) | Op::Embed | Op::Attention(_) => Weight::Product,
            _ => Weight::Scale,
        }
    };
    nodes.iter().map(of).max().unwrap_or(Weight::None)
}

/// Whether a section, whatever it computes, does no more than add to the value it is given: that value has one use, in a sum, and so has the sum, up to the section's result.
fn only_adds(graph: &Graph, section: &[NodeId]) -> bool {
    let uses = |of: &dyn Fn(ValueId) -> bool| -> Vec<(NodeId, usize)> {
        let operands = |&n: &NodeId| graph.nodes[n].inputs.iter().enumerate().map(move |(at, &v)| (n, at, v)).collect::<Vec<_>>();
        section.iter().flat_map(operands).filter(|&(_, _, v)| of(v)).map(|(n, at, _)| (n, at)).collect()
    };
    let mut found = uses(&|v| graph.producer(v).is_some_and(|p| !section.contains(&p)));
    while let [(node, operand)] = found[..] {
        let adds = match graph.nodes[node].op {
            Op::Add => true,
            Op::Sub | Op::AddBias | Op::AddPosition => operand == 0,
            _ => false,
        };
        if !adds {
            return false;
        }
        let sum = graph.nodes[node].outputs[0];
        found = uses(&|v| v == sum);
        if found.is_empty() {
            return true;
        }
    }
    false
}

/// The layer of each section, from what the sections look like and what they weigh.
fn layers(shapes: &[u32], weights: &[Weight]) -> Vec<u32> {
    let mut runs = Vec::new();
    fold(shapes, weights, 0..shapes.len(), &mut runs);
    let long = |run: &Range<usize>| weights[run.clone()].iter().filter(|&&w| w == Weight::Product).count() > MOST_PRODUCTS;
    let nothing_repeats = runs == [0..shapes.len()];
    let single = |run: Range<usize>| run.map(|s| s..s + 1).collect();
    let runs = runs.into_iter().flat_map(|run| -> Vec<Range<usize>> {
        if nothing_repeats || long(&run) { single(run) } else { vec![run] }
    });
    let mut layer_of: Vec<u32> = Vec::with_capacity(shapes.len());
    // Weight of the layer in hand.
    let (mut layer, mut heaviest) = (0, Weight::None);
    for run in runs {
        let weight = weights[run.clone()].iter().copied().max().unwrap_or(Weight::None);
        if heaviest == Weight::Product && weight > Weight::None {
            (layer, heaviest) = (layer + 1, weight);
        }
        heaviest = heaviest.max(weight);
        layer_of.extend(run.map(|_| layer));
    }
    if heaviest < Weight::Product && layer > 0 {
        layer_of.iter_mut().for_each(|l| *l = (*l).min(layer - 1));
    }
    layer_of
}

/// Cuts a range of sections into layers: around and inside its best repetition, if it has one.
fn fold(shapes: &[u32], weights: &[Weight], range: Range<usize>, out: &mut Vec<Range<usize>>) {
    if range.is_empty() {
        return;
    }
    let Some((start, period, times)) = repetition(&shapes[range.clone()], &weights[range.clone()]) else {
        return out.push(range);
    };
    let start = range.start + start;
    fold(shapes, weights, range.start..start, out);
    for time in 0..times {
        fold(shapes, weights, start + time * period..start + (time + 1) * period, out);
    }
    fold(shapes, weights, start + times * period..range.end, out);
}

/// Start, period and count of the repetition, of sections with a product among them, that covers most; of those, the one with the shortest period; of those, the first.
fn repetition(shapes: &[u32], weights: &[Weight]) -> Option<(usize, usize, usize)> {
    let mut best: Option<(usize, usize, usize)> = None;
    for period in 1..=(shapes.len() / 2).min(MAX_PERIOD) {
        let mut run = 0;
        for at in period..=shapes.len() {
            if at < shapes.len() && shapes[at] == shapes[at - period] {
                run += 1;
                continue;
            }
            let (start, times) = (at - period - run, run / period + 1);
            if times > 1 && weights[start..start + period].contains(&Weight::Product) && best.is_none_or(|(_, p, t)| times * period > p * t) {
                best = Some((start, period, times));
            }
            run = 0;
        }
    }
    best
}
