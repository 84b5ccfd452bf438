//! The divisor of the loss, and the factor on it: in the loss and in every gradient exactly once.
//!
//! Both are brought by one node: [`Op::Mean`] divides the loss, its derivative [`Op::MeanGrad`] is what the backward pass starts from. All other backward nodes
//! are linear in the backward values that they take, so what they give has the divisor as often as those. It follows that every backward value has it once, if
//! 1. `mean` makes the loss and nothing else, and nothing is computed from the loss;
//! 2. of the backward nodes one is `mean_grad`: it derives from that `mean`, and gives the cotangent of what was averaged;
//! 3. every other backward node takes backward values as those operands that its op is linear in, and only as those.

use crate::entity::{NodeId, ValueId};
use crate::graph::{Graph, Node, Phase};
use crate::op::Op;

/// What is wrong with the divisor, and at which node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SeedFault {
    #[error("is no `mean`, so the loss is not divided by the step's tokens")]
    Undivided,
    #[error("divides by the step's tokens what is not the loss")]
    DividesOther,
    #[error("is computed from the loss, which has been divided")]
    FromLoss,
    #[error("is where a backward pass starts, but not that of the loss's mean")]
    OtherSeed,
    #[error("should take backward values as its {0}, and as nothing else")]
    NotLinear(&'static str),
}

/// All faults of a differentiated graph's divisor.
pub fn check(graph: &Graph) -> Vec<(NodeId, SeedFault)> {
    let loss = graph.loss.and_then(|v| graph.producer(v));
    let mut faults = Vec::new();
    for (id, node) in graph.nodes.iter() {
        let fault = match node.phase {
            Phase::Forward if Some(id) == loss => (node.op != Op::Mean).then_some(SeedFault::Undivided),
            Phase::Forward if node.op == Op::Mean => Some(SeedFault::DividesOther),
            _ if node.inputs.iter().any(|&v| graph.loss == Some(v)) => Some(SeedFault::FromLoss),
            Phase::Forward => None,
            Phase::InputGrad | Phase::WeightGrad if node.op == Op::MeanGrad => {
                let averaged = loss.and_then(|l| graph.nodes[l].inputs.first());
                let cotangent = averaged.and_then(|&v| graph.cotangents.get(v).copied().flatten());
                (Some(node.origin) != loss || node.outputs.first().copied() != cotangent).then_some(SeedFault::OtherSeed)
            }
            Phase::InputGrad | Phase::WeightGrad => linear(graph, node),
        };
        faults.extend(fault.map(|fault| (id, fault)));
    }
    faults
}

fn linear(graph: &Graph, node: &Node) -> Option<SeedFault> {
    let backward = |v: &ValueId| graph.producer(*v).is_some_and(|p| graph.nodes[p].phase != Phase::Forward);
    let taken: Vec<bool> = node.inputs.iter().map(backward).collect();
    let only = |at: usize, name: &'static str| (taken.iter().enumerate().any(|(i, &b)| b != (i == at)), name);
    let (wrong, name) = match &node.op {
        Op::Add | Op::Sub => (taken.contains(&false), "operands"),
        Op::Einsum(_) | Op::ExpertEinsum(_) => (taken.first() == taken.get(1) || taken.get(2) == Some(&true), "left or its right operand"),
        Op::CeStatsGrad => (taken != [false, false, false, true, true], "operands 3 and 4"),
        Op::SumLeading { .. }
        | Op::Neg
        | Op::Dropout { .. }
        | Op::Rope(_)
        | Op::AppendGradHead
        | Op::AppendGradTail
        | Op::AddPositionGrad
        | Op::CorrectionGrad
        | Op::Dispatch
        | Op::Undispatch
        | Op::ExpertBiasGrad
        | Op::CombineGradRows
        | Op::CombineGradGate => only(0, "operand 0"),
        Op::ActGrad(_) | Op::RmsNormGradWeight { .. } | Op::LayerNormGradWeight { .. } | Op::EmbedGrad => only(1, "operand 1"),
        Op::GatedGrad(_) | Op::RmsNormGradInput { .. } | Op::LayerNormGradInput { .. } | Op::TopKGateGrad(_) => only(2, "operand 2"),
        Op::SinkGrad => only(3, "operand 3"),
        Op::AttentionGrad(_) => only(5, "operand 5"),
        Op::AddBias
        | Op::Act(_)
        | Op::Gated(_)
        | Op::RmsNorm { .. }
        | Op::LayerNorm { .. }
        | Op::Attention(_)
        | Op::AttentionSink(_)
        | Op::Append
        | Op::Embed
        | Op::AddPosition
        | Op::CeStats
        | Op::Mean
        | Op::MeanGrad
        | Op::TopKGate(_)
        | Op::Capacity { .. }
        | Op::AddExpertBias
        | Op::Combine => (true, "operands: it is no derivative"),
    };
    wrong.then_some(SeedFault::NotLinear(name))
}
