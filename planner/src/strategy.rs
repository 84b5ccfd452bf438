//! The strategies of an op: which tensor-parallel axes split which of its factors.
//!
//! For mesh axes `A = a₀ a₁ …` a strategy is one of
//! - all of `A` on one factor;
//! - where the factor's size only divides by a leading part `a₀ … aᵢ` of `A` (two key/value heads over four ranks): that part on the factor, and the rest on
//!   the factor of the next dim of an operand (the queries of each head) if that divides, or on none;
//! - nothing: every rank computes the same.
//!
//! What data axes split needs no choice ([`dplan_ir::data`]); of the batch they leave nothing to split, of a sequence or of experts a block.
//!
//! Ops that multiply matrices, look up tables or send rows to experts are decided on. All others *follow* their first operand where another op of the
//! layer made it or the layer before handed it over: what splits a dim of it splits the factor. They cost little beside the reshard that anything
//! else would need, and the choices left are few enough to be searched exactly.
//!
//! A factor that the rule calls `Whole` is never split, and sizes are the padded ones, which only grow where padding is harmless: so every strategy is
//! legal. The order is that of the rule's factors, nothing first, and no strategy comes twice.

use crate::padding::prefixes;
use dplan_ir::data::data_split;
use dplan_ir::entity::DimId;
use dplan_ir::extent::node_rule;
use dplan_ir::graph::{Graph, Node};
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::op::Op;
use dplan_ir::rule::{Assignment, Label, Rule, Split};
use dplan_ir::sharding::Padded;

/// Every strategy of a forward node.
pub fn strategies(graph: &Graph, node: &Node, mesh: &Mesh, padded: &Padded) -> Vec<Assignment> {
    let rule = node_rule(graph, node);
    let prefixes = prefixes(mesh);
    let mut all = vec![Assignment::default()];
    let Some(&every) = prefixes.last() else {
        return all;
    };
    let data = data_split(graph, node, &rule, mesh);
    let factors: Vec<(Label, u64)> = rule
        .factors
        .iter()
        .filter(|f| f.split != Split::Whole)
        .filter_map(|f| Some((f.label, dim_of(graph, node, &rule, f.label)?)))
        .filter(|&(_, dim)| graph.batch != Some(dim))
        .map(|(label, dim)| (label, padded.size(dim) / mesh.size(data.axes(label))))
        .collect();
    let divides = |size: u64, axes: AxisSet| size.is_multiple_of(mesh.size(axes));
    for &(label, size) in &factors {
        let Some(&most) = prefixes.iter().rev().find(|&&p| divides(size, p)) else {
            continue;
        };
        let mut one = Assignment::default();
        one.assign(label, most);
        all.push(one.clone());
        let rest = every.minus(most);
        let behind = |other: Label| rule.ins.iter().any(|labels| labels.windows(2).any(|pair| pair == [label, other]));
        for &(other, _) in factors.iter().filter(|&&(l, s)| !rest.is_empty() && behind(l) && divides(s, rest)) {
            let mut two = one.clone();
            two.assign(other, rest);
            all.push(two);
        }
    }
    all
}

/// Whether an op follows its first operand.
pub fn is_follower(op: &Op) -> bool {
    match op {
        Op::Einsum(_) | Op::ExpertEinsum(_) | Op::Embed | Op::Dispatch => false,
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
        | Op::Attention(_)
        | Op::AttentionGrad(_)
        | Op::AttentionSink(_)
        | Op::SinkGrad
        | Op::Append
        | Op::AppendGradHead
        | Op::AppendGradTail
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
        | Op::AddExpertBias
        | Op::ExpertBiasGrad
        | Op::Undispatch
        | Op::Combine
        | Op::CombineGradRows
        | Op::CombineGradGate => true,
    }
}

/// The strategy that follows a first operand made with these axes on its dims; `choosable` are the axes that strategies may use.
pub fn follow(rule: &Rule, made: &[AxisSet], choosable: AxisSet) -> Assignment {
    let mut assignment = Assignment::default();
    for (&label, &axes) in rule.ins.first().into_iter().flatten().zip(made) {
        if rule.factor(label).is_some_and(|f| f.split != Split::Whole) {
            assignment.assign(label, axes.and(choosable));
        }
    }
    assignment
}

/// The dim that a letter stands for in a node.
fn dim_of(graph: &Graph, node: &Node, rule: &Rule, label: Label) -> Option<DimId> {
    let letters = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l));
    letters
        .zip(node.inputs.iter().chain(&node.outputs))
        .find_map(|(labels, &value)| labels.iter().position(|&l| l == label).map(|at| graph.values[value].ty.dims[at]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dplan_ir::build::Builder;
    use dplan_ir::dtype::DType;
    use dplan_ir::entity::NodeId;
    use dplan_ir::graph::Init;
    use dplan_ir::op::Spec;

    /// Strategies of a query projection with the given key/value heads and queries per head, spelled `g:01 r:2`.
    fn spelled(heads: u64, queries: u64, tp: u64) -> Vec<String> {
        let mut b = Builder::new("t");
        let [batch, seq, h, g, r, d] = [("b", 1), ("s", 3), ("h", 5), ("g", heads), ("r", queries), ("d", 7)].map(|(n, s)| b.dim(n, s));
        let x = b.input("x", DType::F32, &[batch, seq, h]);
        let w = b.param("w", DType::F32, &[g, r, d, h], Init::Zeros, vec![]);
        let spec = Spec { left: "bsh".into(), right: "grdh".into(), out: "bsgrd".into() };
        b.op("q", Op::Einsum(spec), &[x, w]).unwrap();
        let sizes = Padded(b.graph.dims.map(|_, d| d.size));
        let spell = |a: &Assignment| {
            let part = |&(l, axes): &(Label, AxisSet)| format!("{l}:{}", axes.iter().map(|a| (a.0 - 1).to_string()).collect::<String>());
            a.0.iter().map(part).collect::<Vec<_>>().join(" ")
        };
        strategies(&b.graph, &b.graph.nodes[NodeId(0)], &Mesh::new(1, tp), &sizes).iter().map(spell).collect()
    }

    #[test]
    fn one_factor_takes_all_axes_or_its_divisor_leaves_the_rest_to_another() {
        assert_eq!(spelled(8, 4, 1), [""]);
        assert_eq!(spelled(8, 4, 4), ["", "g:01", "r:01"]);
        assert_eq!(spelled(2, 4, 4), ["", "g:0", "g:0 r:1", "r:01"]);
        assert_eq!(spelled(2, 2, 4), ["", "g:0", "g:0 r:1", "r:0"]);
        assert_eq!(spelled(3, 1, 2), [""]);
    }
}
