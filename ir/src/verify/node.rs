//! What a node's op says beyond its type rule: its numbers against the sizes of its operands, and the layouts of routed values.

use std::collections::BTreeSet;

use crate::capacity;
use crate::dropout;
use crate::entity::ValueId;
use crate::graph::{Graph, Layout, Node};
use crate::op::{Documents, Op, Router};

/// Numbers in the op, against the sizes of its operands.
pub fn attributes(graph: &Graph, node: &Node) -> Option<String> {
    let size = |value: ValueId, dim: usize| graph.shape(value).get(dim).copied().unwrap_or(0);
    match &node.op {
        Op::RmsNorm { eps }
        | Op::RmsNormGradInput { eps }
        | Op::RmsNormGradWeight { eps }
        | Op::LayerNorm { eps }
        | Op::LayerNormGradInput { eps }
        | Op::LayerNormGradWeight { eps } => (!(eps.is_finite() && *eps >= 0.0)).then(|| format!("eps {eps} should be finite and not negative")),
        Op::Rope(rope) => {
            let last = graph.shape(node.inputs[0]).last().copied().unwrap_or(0);
            if rope.end() > last || rope.inv_freq.is_empty() {
                Some(format!("turns the elements {} to {} of {last}", rope.start, rope.end()))
            } else {
                let finite = rope.scale.is_finite() && rope.inv_freq.iter().all(|a| a.is_finite());
                (!finite).then(|| "angles and their scale should be finite".to_string())
            }
        }
        Op::Attention(a) | Op::AttentionGrad(a) | Op::AttentionSink(a) => {
            if !a.scale.is_finite() {
                Some(format!("scale {} should be finite", a.scale))
            } else if a.mask.documents == Documents::Apart && !a.mask.looks_back() {
                Some("keeps documents apart by their first positions, but sees what comes after them: it should be causal".to_string())
            } else {
                (a.mask.window == Some(0)).then(|| "a window of 0 hides everything".to_string())
            }
        }
        Op::Capacity { tokens: 0 } => Some("a capacity of 0 tokens drops everything".into()),
        Op::Capacity { .. } => capacity(graph, node),
        Op::TopKGate(r) | Op::TopKGateGrad(r) => router(r, size(node.inputs[0], 2)),
        Op::Append => {
            let (head, tail, whole) = (size(node.inputs[0], 3), size(node.inputs[1], 2), size(node.outputs[0], 3));
            (head.checked_add(tail) != Some(whole)).then(|| format!("{head} and {tail} elements do not make {whole}"))
        }
        Op::AppendGradHead | Op::AppendGradTail => {
            let (part, whole) = (graph.shape(node.outputs[0]).last().copied().unwrap_or(0), size(node.inputs[0], 3));
            (part > whole).then(|| format!("{part} elements are no part of {whole}"))
        }
        Op::AddPosition => {
            let (positions, rows) = (size(node.inputs[0], 1), size(node.inputs[1], 0));
            (positions > rows).then(|| format!("{positions} positions, but the table has {rows} rows"))
        }
        Op::Dropout { rate } => dropout(graph, node, *rate),
        Op::Einsum(_)
        | Op::ExpertEinsum(_)
        | Op::AddBias
        | Op::SumLeading { .. }
        | Op::Add
        | Op::Sub
        | Op::Neg
        | Op::Act(_)
        | Op::ActGrad(_)
        | Op::Gated(_)
        | Op::GatedGrad(_)
        | Op::Embed
        | Op::EmbedGrad
        | Op::AddPositionGrad
        | Op::SinkGrad
        | Op::CorrectionGrad
        | Op::AddExpertBias
        | Op::ExpertBiasGrad
        | Op::CeStats
        | Op::CeStatsGrad
        | Op::Mean
        | Op::MeanGrad
        | Op::Dispatch
        | Op::Undispatch
        | Op::Combine
        | Op::CombineGradRows
        | Op::CombineGradGate => None,
    }
}

/// What is drawn follows from the node that a node derives from and from the places of elements.
fn dropout(graph: &Graph, node: &Node, rate: f64) -> Option<String> {
    if !(0.0..1.0).contains(&rate) {
        return Some(format!("rate {rate} should be from 0 to less than 1"));
    }
    if !dropout::has_places(graph, node.inputs[0]) {
        return Some("the first two dims should be the batch and the sequence, of a dense value".into());
    }
    None
}

/// The router's numbers, against how many experts there are.
fn router(r: &Router, experts: u64) -> Option<String> {
    let from = match r.groups {
        None => experts,
        Some(g) if g.count == 0 || g.kept > g.count || !experts.is_multiple_of(g.count) => {
            return Some(format!("keeps {} of {} groups of {experts} experts", g.kept, g.count));
        }
        Some(g) => experts / g.count * g.kept,
    };
    if r.k == 0 || r.k > from {
        return Some(format!("k = {} of {from} experts", r.k));
    }
    (!(r.scale.is_finite() && r.scale > 0.0)).then(|| format!("scale {} should be above 0", r.scale))
}

/// What is limited is what a router chose, of whole sequences.
fn capacity(graph: &Graph, node: &Node) -> Option<String> {
    let gate = node.inputs[0];
    if !graph.producer(gate).is_some_and(|p| matches!(graph.nodes[p].op, Op::TopKGate(_))) {
        return Some("limits what no router chose".into());
    }
    (!dropout::has_places(graph, gate)).then(|| "the first two dims should be the batch and the sequence".into())
}

/// Routed values of one node have the `k` and the capacity of their gate; what is computed from routed rows is routed, but for sums over experts or rows.
pub fn routing(graph: &Graph, node: &Node) -> Option<String> {
    let layout = |&v: &ValueId| graph.values[v].ty.layout;
    let (ins, outs): (Vec<Layout>, Vec<Layout>) = (node.inputs.iter().map(layout).collect(), node.outputs.iter().map(layout).collect());
    let routed = |&layout: &Layout| match layout {
        Layout::Dense => None,
        Layout::TopK { k, capacity } => Some((k, capacity)),
    };
    let chosen = node.inputs.last().and_then(|&v| capacity::layout_of(graph, v)).and_then(|layout| routed(&layout));
    let (expects, gated) = match &node.op {
        Op::Dispatch | Op::CombineGradRows => (true, true),
        Op::ExpertEinsum(spec) => (spec.out.starts_with("bse"), true),
        Op::AddExpertBias => (true, true),
        Op::Undispatch | Op::Combine | Op::CombineGradGate | Op::ExpertBiasGrad => (false, true),
        _ => (ins.iter().find_map(routed).is_some(), false),
    };
    if outs.iter().any(|out| routed(out).is_some() != expects) {
        return Some(format!("the result should be in {} layout", if expects { "top-k" } else { "dense" }));
    }
    let all: BTreeSet<(u64, Option<u64>)> = ins.iter().chain(&outs).filter_map(routed).chain(chosen.filter(|_| gated)).collect();
    if all.iter().any(|&(k, capacity)| k == 0 || capacity == Some(0)) {
        return Some("a top-k layout with k = 0, or of no tokens, stores nothing".into());
    }
    let ks: BTreeSet<u64> = all.iter().map(|&(k, _)| k).collect();
    if ks.len() > 1 {
        return Some(format!("routed values with different k: {ks:?}"));
    }
    let capacities: Vec<String> = all.iter().map(|(_, capacity)| capacity.map_or("without".into(), |tokens| format!("of {tokens} tokens"))).collect();
    (all.len() > 1).then(|| format!("routed values with different capacities: {}", capacities.join(", ")))
}
