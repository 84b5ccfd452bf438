//! Padding of dims that mesh axes do not divide.
//!
//! Padding belongs to a dim, not to a value: every value that has the dim has the same padded size. A dim may be padded if in every op it takes part in
//! its factor is [`Split::Free`]. The padded size follows from a plan ([`padded`]): the least multiple of the size that every sharding in the plan
//! divides. The planner turns this around ([`candidates`]): it fixes the padded sizes first and then chooses among the strategies they allow, so
//! that layers which share a dim can be priced one by one. Sizes that a plan turns out not to need only made it dearer than it is.

use dplan_ir::entity::{DimId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::rule::{Split, rule};
use dplan_ir::sharding::Padded;

/// For each dim, whether zero elements behind its end are harmless everywhere.
pub fn paddable(graph: &Graph) -> Table<DimId, bool> {
    let mut free = graph.dims.map(|dim, _| graph.batch != Some(dim));
    for node in graph.nodes.values() {
        let ranks = |values: &[_]| values.iter().map(|&v| graph.values[v].ty.dims.len()).collect::<Vec<_>>();
        let rule = rule(&node.op, &ranks(&node.inputs), &ranks(&node.outputs));
        let letters = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l));
        for (labels, &value) in letters.zip(node.inputs.iter().chain(&node.outputs)) {
            for (&label, &dim) in labels.iter().zip(&graph.values[value].ty.dims) {
                free[dim] &= rule.factor(label).is_some_and(|f| f.split == Split::Free);
            }
        }
    }
    free
}

/// Padded sizes under which each of `uses` (a dim and axes that shard it in some value) divides. Only paddable dims are padded.
pub fn padded(graph: &Graph, mesh: &Mesh, uses: impl IntoIterator<Item = (DimId, AxisSet)>) -> Padded {
    let free = paddable(graph);
    let mut multiple = Table::filled(graph.dims.len(), 1);
    for (dim, axes) in uses {
        if free[dim] {
            multiple[dim] = lcm(multiple[dim], mesh.size(axes));
        }
    }
    Padded(graph.dims.map(|d, dim| dim.size.next_multiple_of(multiple[d])))
}

/// Padded sizes worth planning under, the logical sizes first. A paddable dim that the tensor-parallel ranks do not divide is either not padded, or padded for
/// the most of the leading tensor-parallel axes that leave every rank an element.
pub fn candidates(graph: &Graph, mesh: &Mesh) -> Vec<Padded> {
    let free = paddable(graph);
    let mut all = vec![Padded(graph.dims.map(|_, d| d.size))];
    for (dim, info) in graph.dims.iter().filter(|&(d, _)| free[d]) {
        let ways = prefixes(mesh).into_iter().map(|p| mesh.size(p)).filter(|&ways| ways <= info.size).max().unwrap_or(1);
        let size = info.size.next_multiple_of(ways);
        if size != info.size {
            let grown: Vec<Padded> = all
                .iter()
                .map(|p| {
                    let mut p = p.clone();
                    p.0[dim] = size;
                    p
                })
                .collect();
            all.extend(grown);
        }
    }
    all
}

/// The leading tensor-parallel axes: one, two, … all of them.
pub fn prefixes(mesh: &Mesh) -> Vec<AxisSet> {
    let mut set = AxisSet::EMPTY;
    let grow = |axis| {
        set = set.union(AxisSet::one(axis));
        set
    };
    mesh.tp().iter().map(grow).collect()
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x.max(1) * b
}

#[cfg(test)]
mod tests {
    use super::*;
    use dplan_ir::build::Builder;
    use dplan_ir::dtype::DType;
    use dplan_ir::graph::Init;
    use dplan_ir::op::{Op, Spec};

    #[test]
    fn vocabulary_and_heads_pad_but_what_is_normalised_does_not() {
        let mut b = Builder::new("t");
        let [batch, seq, h, v] = [("b", 2), ("s", 4), ("h", 6), ("v", 259)].map(|(n, s)| b.dim(n, s));
        let x = b.input("x", DType::F32, &[batch, seq, h]);
        let w = b.param("w", DType::F32, &[h], Init::Ones, vec![]);
        let y = b.op("norm", Op::RmsNorm { eps: 1e-5 }, &[x, w]).unwrap();
        let head = b.param("head", DType::F32, &[v, h], Init::Zeros, vec![]);
        let spec = Spec { left: "bsh".into(), right: "vh".into(), out: "bsv".into() };
        b.op("logits", Op::Einsum(spec), &[y, head]).unwrap();
        let graph = b.graph;
        let mesh = Mesh::new(1, 4);
        assert_eq!(paddable(&graph).values().copied().collect::<Vec<_>>(), [true, true, false, true]);
        let sizes = |p: &Padded| graph.dims.ids().map(|d| p.size(d)).collect::<Vec<_>>();
        assert_eq!(sizes(&padded(&graph, &mesh, [(v, mesh.tp()), (h, mesh.tp())])), [2, 4, 6, 260]);
        assert_eq!(candidates(&graph, &mesh).iter().map(sizes).collect::<Vec<_>>(), [[2, 4, 6, 259], [2, 4, 6, 260]]);
    }
}
