//! What one run of an op costs on one rank: arithmetic, memory traffic, working memory. No hardware here.

use crate::graph::Layout;
use crate::op::{Mask, Op};
use crate::sharding::LocalType;

/// Which unit of a device an op keeps busy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Unit {
    /// Matrix units: `m × n × k` of one product (batched products: of one of the batch).
    Matrix { m: u64, n: u64, k: u64 },
    /// Everything else: bound by memory traffic on all current devices.
    Vector,
}

/// Cost of one run on one rank; what is too much for 64 bits is the largest number there is.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OpCost {
    /// Multiplications and additions.
    pub flops: u64,
    /// Bytes read and written, each operand once.
    pub bytes: u64,
    pub unit: Unit,
}

/// Rows of a score matrix that an attention kernel may hold at once.
pub const ATTENTION_ROWS: u64 = 64;

/// Cost of one run of `op` on blocks of the given types.
pub fn op_cost(op: &Op, ins: &[&LocalType], outs: &[&LocalType]) -> OpCost {
    let bytes = ins.iter().chain(outs).map(|t| t.used_elems().saturating_mul(t.dtype.size())).fold(0, u64::saturating_add);
    let vector = |per_element: u64| {
        let elems = ins.iter().chain(outs).map(|t| t.used_elems()).max().unwrap_or(0);
        OpCost { flops: elems.saturating_mul(per_element), bytes, unit: Unit::Vector }
    };
    match op {
        Op::Einsum(spec) | Op::ExpertEinsum(spec) => {
            let size = |label: char| {
                let at = |s: &str, t: &LocalType| s.chars().position(|l| l == label).map(|i| t.dims[i]);
                at(&spec.left, ins[0]).or_else(|| at(&spec.right, ins[1])).unwrap_or(1)
            };
            let role = |l: bool, r: bool, o: bool| {
                let mut labels: Vec<char> = spec
                    .left
                    .chars()
                    .chain(spec.right.chars())
                    .filter(|&c| (spec.left.contains(c), spec.right.contains(c), spec.out.contains(c)) == (l, r, o))
                    .collect();
                labels.sort_unstable();
                labels.dedup();
                labels.into_iter().map(size).fold(1, u64::saturating_mul)
            };
            let (m, n, k, batch) = (role(true, false, true), role(false, true, true), role(true, true, false), role(true, true, true));
            // Routed products touch k of all experts for each token, so each expert sees that share of the tokens.
            let (m, k) = match routed(ins, outs) {
                Some((chosen, experts, most)) => {
                    let share = |tokens: u64| tokens.saturating_mul(chosen.min(experts)).div_ceil(experts.max(1)).min(most);
                    if spec.out.contains('b') { (share(m), k) } else { (m, share(k)) }
                }
                None => (m, k),
            };
            let flops = [m, n, k, batch].into_iter().fold(2, u64::saturating_mul);
            OpCost { flops, bytes, unit: Unit::Matrix { m, n, k } }
        }
        Op::Attention(a) | Op::AttentionSink(a) => attention(a.mask, ins, 4, bytes),
        Op::AttentionGrad(a) => attention(a.mask, ins, 10, bytes),
        Op::AddBias | Op::SumLeading { .. } | Op::Add | Op::Sub | Op::Neg | Op::AddPosition | Op::AddPositionGrad | Op::Mean | Op::MeanGrad => {
            vector(1)
        }
        Op::Act(_) | Op::Gated(_) => vector(8),
        // Ten rounds of two products for every four elements.
        Op::Dropout { .. } => vector(16),
        Op::ActGrad(_) | Op::GatedGrad(_) => vector(12),
        Op::RmsNorm { .. } | Op::LayerNorm { .. } => vector(6),
        Op::RmsNormGradInput { .. } | Op::LayerNormGradInput { .. } | Op::RmsNormGradWeight { .. } | Op::LayerNormGradWeight { .. } => vector(8),
        Op::Rope(_) => vector(3),
        Op::Embed => {
            // Only the looked-up rows are read.
            let rows = outs[0].bytes();
            OpCost { flops: 0, bytes: rows.saturating_mul(2).saturating_add(ins[1].bytes()), unit: Unit::Vector }
        }
        Op::EmbedGrad => {
            let bytes = [ins[1].bytes(), ins[1].bytes(), ins[0].bytes(), outs[0].bytes()].into_iter().fold(0, u64::saturating_add);
            OpCost { flops: ins[1].elems(), bytes, unit: Unit::Vector }
        }
        Op::CeStats | Op::CeStatsGrad => vector(5),
        Op::SinkGrad => vector(3),
        Op::Append | Op::AppendGradHead | Op::AppendGradTail | Op::CorrectionGrad => vector(1),
        Op::TopKGate(_) | Op::TopKGateGrad(_) => vector(10),
        Op::Capacity { .. } => vector(1),
        Op::AddExpertBias | Op::ExpertBiasGrad => vector(1),
        Op::Dispatch | Op::Undispatch | Op::Combine | Op::CombineGradRows | Op::CombineGradGate => vector(2),
    }
}

/// Whether an op only streams its operands through memory, so that its results are quicker made again than a product's.
pub fn is_cheap(op: &Op) -> bool {
    match op {
        Op::Einsum(_) | Op::ExpertEinsum(_) | Op::Attention(_) | Op::AttentionSink(_) | Op::AttentionGrad(_) => false,
        Op::AddBias
        | Op::SumLeading { .. }
        | Op::Add
        | Op::Sub
        | Op::Neg
        | Op::Dropout { .. }
        | Op::Act(_)
        | Op::ActGrad(_)
        | Op::Gated(_)
        | Op::GatedGrad(_)
        | Op::RmsNorm { .. }
        | Op::RmsNormGradInput { .. }
        | Op::RmsNormGradWeight { .. }
        | Op::LayerNorm { .. }
        | Op::LayerNormGradInput { .. }
        | Op::LayerNormGradWeight { .. }
        | Op::Rope(_)
        | Op::SinkGrad
        | Op::Append
        | Op::AppendGradHead
        | Op::AppendGradTail
        | Op::Embed
        | Op::EmbedGrad
        | Op::AddPosition
        | Op::AddPositionGrad
        | Op::CeStats
        | Op::CeStatsGrad
        | Op::Mean
        | Op::MeanGrad
        | Op::TopKGate(_)
        | Op::TopKGateGrad(_)
        | Op::Capacity { .. }
        | Op::CorrectionGrad
        | Op::Dispatch
        | Op::Undispatch
        | Op::AddExpertBias
        | Op::ExpertBiasGrad
        | Op::Combine
        | Op::CombineGradRows
        | Op::CombineGradGate => true,
    }
}

/// Working memory an op may use on one rank, bytes: a bound that every kernel keeps.
pub fn workspace_bytes(op: &Op, ins: &[&LocalType]) -> u64 {
    match op {
        Op::Attention(_) | Op::AttentionGrad(_) | Op::AttentionSink(_) => {
            let keys = ins[1].dims[1];
            2 * ATTENTION_ROWS.min(ins[0].dims[1]) * keys * ins[0].dtype.accumulator().size()
        }
        _ => 0,
    }
}

/// `(k, experts of all ranks, most rows of one expert)` if any block is in top-k layout.
fn routed(ins: &[&LocalType], outs: &[&LocalType]) -> Option<(u64, u64, u64)> {
    ins.iter().chain(outs).find_map(|t| match t.layout {
        Layout::TopK { k, capacity } => Some((k, t.experts, t.rows_of_one(capacity))),
        Layout::Dense => None,
    })
}

/// `per_pair` multiply-adds-and-adds for each visible (query, key) pair and head element.
fn attention(mask: Mask, ins: &[&LocalType], per_pair: u64, bytes: u64) -> OpCost {
    let (q, k, v) = (ins[0], ins[1], ins[2]);
    let (queries, keys) = (q.dims[1], k.dims[1]);
    let width = (q.dims[4] + v.dims[3]).div_ceil(2);
    // Blocks of the queries are balanced by their order (`crate::order`) where they are even; else the last block sees most.
    let mut pairs = queries.saturating_mul(keys);
    if mask.causal {
        let hidden = queries.saturating_mul(queries.min(keys).saturating_sub(1)) / 2;
        pairs = if queries.is_multiple_of(2) { pairs.div_ceil(2) } else { pairs.saturating_sub(hidden) };
    }
    if let Some(window) = mask.window {
        pairs = pairs.min(queries.saturating_mul(window));
    }
    let flops = [q.dims[0], q.dims[2], q.dims[3], pairs, width].into_iter().fold(per_pair, u64::saturating_mul);
    OpCost { flops, bytes, unit: Unit::Matrix { m: queries, n: keys, k: width } }
}
