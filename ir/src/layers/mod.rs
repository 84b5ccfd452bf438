//! Layers: finding them in a graph that does not name them, telling which are alike, and an order of the graph that depends on its structure alone.
//!
//! All three walk forward nodes from results to operands. Operands are ordered and a layer has one result, so that walk numbers nodes, parameters and dims
//! the same way whatever they are called and in whatever order they stand: equal numberings are isomorphisms. No hashing, no guessing.

mod canonical;
mod detect;
mod form;
mod rebuild;
#[cfg(test)]
mod tests;

pub use canonical::{canonical_names, canonicalize};
pub use detect::detect;
pub(crate) use rebuild::rebuild;

use crate::entity::{NodeId, Table, ValueId};
use crate::graph::{Graph, Phase};
use form::{Detail, Facts, Part};

/// For each layer, the number of its class: layers that are the same up to names share one. Classes are numbered in order of their first layer.
///
/// The same are layers with the same ops and attributes, wired in the same way to operands of the same types, the value of the layer before, graph inputs and
/// parameters alike. Dims and parameters that are used in one layer only may differ between two layers of a class; those that several layers use
/// may not. Pieces in files and initial values do not count.
pub fn classes(graph: &Graph) -> Vec<u32> {
    let layers = graph.layer_count();
    let part_of = graph.nodes.map(|id, n| is_forward(graph, id).then_some(n.layer));
    let parts = parts(graph, &part_of, layers);
    number(&Facts::new(graph, &part_of).forms(&parts, Detail::All))
}

/// Numbers equal things alike, from 0, in order of first occurrence.
fn number<T: PartialEq>(things: &[T]) -> Vec<u32> {
    let mut firsts: Vec<&T> = Vec::new();
    things
        .iter()
        .map(|thing| {
            let at = firsts.iter().position(|first| *first == thing).unwrap_or_else(|| {
                firsts.push(thing);
                firsts.len() - 1
            });
            at as u32
        })
        .collect()
}

/// The nodes of each part and the values that leave it (of the last, also the loss).
fn parts(graph: &Graph, part_of: &Table<NodeId, Option<u32>>, count: u32) -> Vec<Part> {
    let mut parts = vec![Part::default(); count as usize];
    let mut leaves: Table<ValueId, bool> = Table::filled(graph.values.len(), false);
    for (id, node) in graph.nodes.iter() {
        let Some(part) = part_of[id] else { continue };
        parts[part as usize].nodes.push(id);
        for &value in &node.inputs {
            if graph.producer(value).is_some_and(|p| part_of[p] != Some(part)) {
                leaves[value] = true;
            }
        }
    }
    if let Some(loss) = graph.loss {
        leaves[loss] = true;
    }
    for (value, _) in leaves.iter().filter(|(_, leaves)| **leaves) {
        if let Some(part) = graph.producer(value).and_then(|p| part_of[p]) {
            parts[part as usize].results.push(value);
        }
    }
    parts
}

fn is_forward(graph: &Graph, id: NodeId) -> bool {
    graph.nodes[id].phase == Phase::Forward
}

/// Nodes that `roots` depend on, operands first, in order of the walk; `seen` are left out, and what is found becomes seen.
fn post_order(graph: &Graph, roots: &[ValueId], seen: &mut Table<NodeId, bool>, within: impl Fn(NodeId) -> bool) -> Vec<NodeId> {
    let mut order = Vec::new();
    // A node, and how many of its operands have been walked.
    let mut stack: Vec<(NodeId, usize)> = Vec::new();
    let mut enter = |value: ValueId, stack: &mut Vec<(NodeId, usize)>| {
        if let Some(node) = graph.producer(value).filter(|&n| within(n) && !seen[n]) {
            seen[node] = true;
            stack.push((node, 0));
        }
    };
    for &root in roots {
        enter(root, &mut stack);
        while let Some((node, walked)) = stack.pop() {
            match graph.nodes[node].inputs.get(walked) {
                Some(&operand) => {
                    stack.push((node, walked + 1));
                    enter(operand, &mut stack);
                }
                None => order.push(node),
            }
        }
    }
    order
}
