//! A most of tokens that an expert takes.
//!
//! Where routers are left alone, no token is dropped, and rows of experts have room for the worst case. With a capacity factor `f`, each of `E` experts, of which a
//! token chooses `k`, takes of each sequence of `s` tokens at most
//!
//! ```text
//! c = ⌈f · s · k / E⌉     the first c, by position, that chose it
//! ```
//! (GShard, arXiv:2006.16668, with one sequence as its group). What a token loses so is that expert's term: its other experts' weights stay as they are, and what
//! goes by beside the experts passes through.
//!
//! The group is a sequence, so that what is dropped is a property of the model: no other sequence, and so no size of micro-batch and no number of ranks, has a
//! say in it, as they would if the tokens of a rank were counted together. It is the first tokens that stay, so that no token depends on later ones. The buffers
//! of rows shrink to `c` for each sequence and expert ([`crate::sharding::rows`]).

use std::collections::{BTreeMap, BTreeSet};

use crate::dropout::has_places;
use crate::entity::{Id, NodeId, ValueId};
use crate::graph::{Def, Graph, Layout, Node, Phase, Value};
use crate::layers::rebuild;
use crate::op::Op;

/// Why the experts of a graph cannot have a capacity.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum CapacityError {
    #[error("no router chooses experts")]
    NoRouter,
    #[error("the experts that `{0}` chooses have a capacity already")]
    Already(String),
    #[error("`{0}` chooses experts, but its first two dims are not the batch and the sequence")]
    Places(String),
    #[error("a capacity factor of {0} should be above 0")]
    Factor(f64),
}

/// The most tokens of a sequence of `sequence` that one of `experts` takes, of which each token chooses `chosen`.
pub fn tokens(factor: f64, sequence: u64, chosen: u64, experts: u64) -> u64 {
    let share = factor * sequence as f64 * chosen as f64 / experts.max(1) as f64;
    // So that 1.1 · 100 is 110.
    ((share * (1.0 - 4.0 * f64::EPSILON)).ceil() as u64).max(1)
}

/// The forward graph in which no expert takes more than its capacity; where that is a whole sequence, nothing changes.
///
/// # Errors
/// If there is nothing to limit, or it cannot be.
///
/// # Panics
/// If the graph has backward nodes.
pub fn limit(graph: &Graph, factor: f64) -> Result<Graph, CapacityError> {
    if !(factor > 0.0 && factor.is_finite()) {
        return Err(CapacityError::Factor(factor));
    }
    let mut limited = graph.clone();
    let mut names: BTreeSet<String> = graph.values.values().map(|v| v.name.clone()).collect();
    let mut kept: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let (mut order, mut routers) = (Vec::new(), 0);
    for (id, node) in graph.nodes.iter() {
        assert_eq!(node.phase, Phase::Forward, "experts get their capacity before the graph is differentiated");
        order.push(id);
        let name = || graph.values[node.outputs[0]].name.clone();
        let chosen = match node.op {
            Op::TopKGate(router) => router.k,
            Op::Capacity { .. } => return Err(CapacityError::Already(name())),
            _ => continue,
        };
        routers += 1;
        let gate = node.outputs[0];
        if !has_places(graph, gate) {
            return Err(CapacityError::Places(name()));
        }
        let shape = graph.shape(gate);
        let tokens = tokens(factor, shape[1], chosen, shape[2]);
        if tokens >= shape[1] {
            continue;
        }
        let mut name = format!("{}.kept", name());
        while !names.insert(name.clone()) {
            name.push('_');
        }
        let new = NodeId::from_index(limited.nodes.len());
        let value = limited.values.push(Value { name, ty: graph.values[gate].ty.clone(), def: Def::Node(new, 0) });
        let op = Op::Capacity { tokens };
        limited.nodes.push(Node { op, inputs: vec![gate], outputs: vec![value], layer: node.layer, phase: Phase::Forward, origin: new });
        kept.insert(gate, value);
        order.push(new);
    }
    if routers == 0 {
        return Err(CapacityError::NoRouter);
    }
    for id in graph.nodes.ids() {
        let inputs: Vec<ValueId> = graph.nodes[id].inputs.iter().map(|v| kept.get(v).copied().unwrap_or(*v)).collect();
        // Rows are those of their operand, or of the gate that begins them.
        let of_operand = inputs.iter().map(|&v| limited.values[v].ty.layout).find(|l| *l != Layout::Dense);
        let layout = of_operand.or_else(|| layout_of(&limited, *inputs.last()?));
        limited.nodes[id].inputs = inputs;
        for &output in &graph.nodes[id].outputs {
            let own = &mut limited.values[output].ty.layout;
            *own = layout.filter(|_| *own != Layout::Dense).unwrap_or(*own);
        }
    }
    Ok(rebuild(&limited, &order))
}

/// The layout of rows that a gate chooses, if the value is one.
pub fn layout_of(graph: &Graph, gate: ValueId) -> Option<Layout> {
    let chosen_by = |value: ValueId| graph.producer(value).map(|p| &graph.nodes[p]);
    let node = chosen_by(gate)?;
    // A graph that is yet to be verified may be a circle, so nothing is followed further than this.
    let (router, capacity) = match node.op {
        Op::Capacity { tokens } => (chosen_by(*node.inputs.first()?)?, Some(tokens)),
        _ => (node, None),
    };
    match router.op {
        Op::TopKGate(router) => Some(Layout::TopK { k: router.k, capacity }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::tokens;

    #[test]
    fn a_capacity_is_a_share_rounded_up() {
        assert_eq!(tokens(1.0, 128, 2, 8), 32);
        assert_eq!(tokens(1.25, 128, 2, 8), 40);
        assert_eq!(tokens(1.1, 100, 1, 1), 110);
        assert_eq!(tokens(1.0, 10, 1, 4), 3);
        assert_eq!(tokens(1e-9, 10, 1, 4), 1);
    }
}
