//! The type rule of each op.
//!
//! Two halves. [`check`] says whether given result types are right: dims with the same letter of the factor rule must be the same graph dim, and element types
//! and layouts must be as the op defines. [`results`] gives the result types of a forward op from its operands; for derivatives the results are the
//! types of the values they are gradients of, so the caller knows them.

use crate::dtype::DType;
use crate::entity::DimId;
use crate::graph::{Layout, Type};
use crate::op::{Correction, Op};
use crate::rule::rule;

/// No op has more operands, or more results.
pub const MOST_OPERANDS: usize = 7;
pub const MOST_RESULTS: usize = 3;

/// Number of operands and results.
pub fn arity(op: &Op) -> (usize, usize) {
    match op {
        Op::MeanGrad => (0, 1),
        Op::SumLeading { .. } | Op::Neg | Op::Dropout { .. } | Op::Act(_) | Op::Rope(_) | Op::AddPositionGrad | Op::Mean => (1, 1),
        Op::AppendGradHead | Op::AppendGradTail | Op::CorrectionGrad | Op::Capacity { .. } => (1, 1),
        Op::TopKGate(router) => match router.correction {
            Correction::No => (1, 1),
            Correction::Added => (2, 1),
        },
        Op::CeStats => (2, 2),
        Op::LayerNormGradWeight { .. } => (2, 2),
        Op::Einsum(_)
        | Op::AddBias
        | Op::Add
        | Op::Sub
        | Op::ActGrad(_)
        | Op::Gated(_)
        | Op::RmsNorm { .. }
        | Op::RmsNormGradWeight { .. }
        | Op::Embed
        | Op::EmbedGrad
        | Op::AddPosition
        | Op::Dispatch
        | Op::Undispatch
        | Op::Combine
        | Op::CombineGradRows
        | Op::Append
        | Op::ExpertBiasGrad => (2, 1),
        Op::GatedGrad(_) => (3, 2),
        Op::Attention(a) => (a.mask.operands(3), 2),
        Op::RmsNormGradInput { .. }
        | Op::LayerNorm { .. }
        | Op::LayerNormGradInput { .. }
        | Op::TopKGateGrad(_)
        | Op::ExpertEinsum(_)
        | Op::AddExpertBias
        | Op::CombineGradGate => (3, 1),
        Op::SinkGrad => (4, 1),
        Op::AttentionSink(a) => (a.mask.operands(4), 2),
        Op::CeStatsGrad => (5, 1),
        Op::AttentionGrad(a) => (a.mask.operands(6), 3),
    }
}

/// Result types of a forward op.
///
/// # Errors
/// What is wrong with the operands, in words. For an op whose results do not follow from its operands (a derivative with respect to a
/// table, `MeanGrad`) the error says so.
pub fn results(op: &Op, ins: &[&Type]) -> Result<Vec<Type>, String> {
    if ins.len() != arity(op).0 {
        return Err(format!("takes {} operands, not {}", arity(op).0, ins.len()));
    }
    ranks(op, ins)?;
    let like = |i: usize| ins[i].clone();
    let acc = |dims: &[DimId]| Type::dense(ins[0].dtype.accumulator(), dims.to_vec());
    let outs = match op {
        Op::Einsum(spec) => vec![Type::dense(ins[0].dtype, spell(&spec.out, &[(&spec.left, ins[0]), (&spec.right, ins[1])])?)],
        Op::ExpertEinsum(spec) => {
            let dims = spell(&spec.out, &[(&spec.left, ins[0]), (&spec.right, ins[1])])?;
            let layout = if spec.out.starts_with("bse") { top_k(ins)? } else { Layout::Dense };
            vec![Type { dtype: ins[0].dtype, dims, layout }]
        }
        Op::AddBias
        | Op::Add
        | Op::Sub
        | Op::Neg
        | Op::Dropout { .. }
        | Op::Act(_)
        | Op::ActGrad(_)
        | Op::Gated(_)
        | Op::RmsNorm { .. }
        | Op::RmsNormGradInput { .. }
        | Op::LayerNorm { .. }
        | Op::LayerNormGradInput { .. }
        | Op::Rope(_)
        | Op::AddPosition
        | Op::TopKGate(_)
        | Op::TopKGateGrad(_)
        | Op::Capacity { .. }
        | Op::AddExpertBias
        | Op::CeStatsGrad => vec![like(0)],
        Op::GatedGrad(_) | Op::AttentionGrad(_) => (0..arity(op).1).map(like).collect(),
        Op::SumLeading { keep } => vec![acc(&ins[0].dims[ins[0].dims.len() - *keep as usize..])],
        Op::RmsNormGradWeight { .. } | Op::LayerNormGradWeight { .. } => vec![acc(&ins[0].dims[ins[0].dims.len() - 1..]); arity(op).1],
        Op::Attention(_) | Op::AttentionSink(_) => {
            let (q, v) = (ins[0], ins[2]);
            let o: Vec<DimId> = q.dims[..4].iter().copied().chain([v.dims[3]]).collect();
            vec![Type::dense(q.dtype, o), acc(&q.dims[..4])]
        }
        Op::Embed => vec![Type::dense(ins[0].dtype, ins[1].dims.iter().copied().chain([ins[0].dims[1]]).collect())],
        Op::CeStats => vec![acc(&ins[0].dims[..ins[0].dims.len() - 1]); 2],
        Op::Mean => vec![acc(&[])],
        Op::Dispatch | Op::CombineGradRows => {
            let dims = ins[1].dims.iter().copied().chain([ins[0].dims[2]]).collect();
            vec![Type { dtype: ins[0].dtype, dims, layout: top_k(ins)? }]
        }
        Op::Undispatch | Op::Combine => vec![Type::dense(ins[0].dtype, vec![ins[0].dims[0], ins[0].dims[1], ins[0].dims[3]])],
        Op::CombineGradGate => vec![like(2)],
        Op::SinkGrad => vec![acc(&ins[0].dims)],
        Op::CorrectionGrad => vec![acc(&ins[0].dims[2..])],
        Op::ExpertBiasGrad => vec![acc(&ins[0].dims[2..])],
        Op::EmbedGrad | Op::AddPositionGrad | Op::MeanGrad | Op::Append | Op::AppendGradHead | Op::AppendGradTail => {
            return Err("its result type does not follow from its operands".into());
        }
    };
    let refs: Vec<&Type> = outs.iter().collect();
    check(op, ins, &refs).map(|()| outs)
}

/// Whether `op` may take operands of types `ins` and give results of types `outs`.
///
/// # Errors
/// What is wrong, in words: the first mismatch of count, number of dims, dim, layout or element type.
pub fn check(op: &Op, ins: &[&Type], outs: &[&Type]) -> Result<(), String> {
    if (ins.len(), outs.len()) != arity(op) {
        let (i, o) = arity(op);
        return Err(format!("takes {i} operands and gives {o} results, not {} and {}", ins.len(), outs.len()));
    }
    ranks(op, ins)?;
    let rule = rule(op, &ins.iter().map(|t| t.dims.len()).collect::<Vec<_>>(), &outs.iter().map(|t| t.dims.len()).collect::<Vec<_>>());
    let mut dim_of: Vec<(char, DimId)> = Vec::new();
    let operands = rule.ins.iter().zip(ins).enumerate().map(|(at, (l, t))| (at, l, t, "operand"));
    let results = rule.outs.iter().zip(outs).enumerate().map(|(at, ((l, _), t))| (at, l, t, "result"));
    for (at, labels, ty, side) in operands.chain(results) {
        if labels.len() != ty.dims.len() {
            return Err(format!("{side} {at} has {} dims, expected {}", ty.dims.len(), labels.len()));
        }
        for (position, (&label, &dim)) in labels.iter().zip(&ty.dims).enumerate() {
            match dim_of.iter().find(|(l, _)| *l == label) {
                Some(&(_, d)) if d != dim => return Err(format!("{side} {at}: its dim {position} is not the `{label}` of those before")),
                Some(_) => {}
                None => dim_of.push((label, dim)),
            }
        }
        let integer = ty.dtype == DType::I32;
        if integer != (side == "operand" && is_index(op, at)) {
            return Err(format!("{side} {at} is {}", ty.dtype));
        }
        if let Layout::TopK { .. } = ty.layout
            && (ty.dims.len() < 4 || !is_routed(op))
        {
            return Err(format!("{side} {at} is in top-k layout, which this op does not take"));
        }
    }
    Ok(())
}

/// Whether operand `at` is of whole numbers: token ids or positions.
pub fn is_index(op: &Op, at: usize) -> bool {
    match op {
        Op::Embed | Op::CeStats | Op::CeStatsGrad => at == 1,
        Op::EmbedGrad => at == 0,
        Op::Attention(_) => at == 3,
        Op::AttentionSink(_) => at == 4,
        Op::AttentionGrad(_) => at == 6,
        _ => false,
    }
}

/// Ops that may touch values in top-k layout.
fn is_routed(op: &Op) -> bool {
    matches!(
        op,
        Op::Dispatch
            | Op::Undispatch
            | Op::ExpertEinsum(_)
            | Op::AddExpertBias
            | Op::ExpertBiasGrad
            | Op::Combine
            | Op::CombineGradRows
            | Op::CombineGradGate
            | Op::Add
            | Op::Act(_)
            | Op::ActGrad(_)
            | Op::Gated(_)
            | Op::GatedGrad(_)
    )
}

/// Least numbers of dims, so that rules can be written without looking.
fn ranks(op: &Op, ins: &[&Type]) -> Result<(), String> {
    let need: &[(usize, std::ops::RangeInclusive<usize>)] = match op {
        Op::Einsum(s) | Op::ExpertEinsum(s) => &[(0, s.left.len()..=s.left.len()), (1, s.right.len()..=s.right.len())],
        Op::AddBias => &[(0, 1..=26), (1, 0..=ins[0].dims.len())],
        Op::SumLeading { keep } => &[(0, *keep as usize..=26)],
        Op::Rope(_) => &[(0, 3..=26)],
        Op::Attention(_) | Op::AttentionGrad(_) | Op::AttentionSink(_) => &[(0, 5..=5), (1, 4..=4), (2, 4..=4)],
        Op::SinkGrad => &[(0, 2..=2), (1, 5..=5)],
        Op::Append => &[(0, 4..=4), (1, 3..=3)],
        Op::AppendGradHead | Op::AppendGradTail => &[(0, 4..=4)],
        Op::AddExpertBias | Op::ExpertBiasGrad => &[(0, 4..=4)],
        Op::RmsNorm { .. } | Op::RmsNormGradInput { .. } => &[(0, 1..=26), (1, 1..=ins[0].dims.len())],
        Op::Embed => &[(0, 2..=2), (1, 2..=2)],
        Op::EmbedGrad => &[(0, 2..=2), (1, 3..=3)],
        Op::AddPosition => &[(0, 3..=3), (1, 2..=2)],
        Op::AddPositionGrad => &[(0, 3..=3)],
        Op::TopKGate(_) | Op::TopKGateGrad(_) | Op::CorrectionGrad | Op::Capacity { .. } => &[(0, 3..=3)],
        Op::Dispatch | Op::CombineGradRows | Op::CombineGradGate => &[(0, 3..=3)],
        Op::Undispatch | Op::Combine => &[(0, 4..=4), (1, 3..=3)],
        Op::RmsNormGradWeight { .. }
        | Op::LayerNorm { .. }
        | Op::LayerNormGradInput { .. }
        | Op::LayerNormGradWeight { .. }
        | Op::CeStats
        | Op::CeStatsGrad => &[(0, 1..=26)],
        Op::Dropout { .. } => &[(0, 2..=26)],
        Op::Add | Op::Sub | Op::Neg | Op::Act(_) | Op::ActGrad(_) | Op::Gated(_) | Op::GatedGrad(_) | Op::Mean | Op::MeanGrad => &[],
    };
    for (operand, range) in need {
        let n = ins[*operand].dims.len();
        if !range.contains(&n) {
            return Err(format!("operand {operand} has {n} dims, expected {} to {}", range.start(), range.end()));
        }
    }
    Ok(())
}

fn spell(out: &str, operands: &[(&String, &Type)]) -> Result<Vec<DimId>, String> {
    let find = |label| operands.iter().find_map(|(s, t)| s.chars().position(|l| l == label).map(|at| t.dims[at]));
    out.chars().map(|l| find(l).ok_or_else(|| format!("`{l}` is in no operand"))).collect()
}

/// The top-k layout of routed operands; for `Dispatch` (whose operands are dense) what the gate keeps is not in its type, so the builder sets it.
fn top_k(ins: &[&Type]) -> Result<Layout, String> {
    Ok(ins.iter().map(|t| t.layout).find(|l| *l != Layout::Dense).unwrap_or(Layout::TopK { k: 1, capacity: None }))
}
