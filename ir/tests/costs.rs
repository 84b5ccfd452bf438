//! What ops cost, on every op of the small cases.

mod cases;

use dplan_ir::cost::{Unit, is_cheap, op_cost};
use dplan_ir::entity::ValueId;
use dplan_ir::grad::differentiate;
use dplan_ir::mesh::Mesh;
use dplan_ir::sharding::{LocalType, Padded, Sharding, local_type};

/// Selective recomputation keeps what matrix units made, whichever op it was, and makes everything else again.
#[test]
fn cheap_ops_are_those_that_only_stream() {
    let (mut cheap, mut dear) = (0, 0);
    for case in cases::all() {
        let graph = differentiate(&case.graph).unwrap();
        let sizes = Padded(graph.dims.map(|_, d| d.size));
        let whole = |&v: &ValueId| {
            let ty = &graph.values[v].ty;
            local_type(ty, &Sharding::replicated(ty.dims.len()), &sizes, &Mesh::new(1, 1))
        };
        for node in graph.nodes.values() {
            let (ins, outs): (Vec<LocalType>, Vec<LocalType>) = (node.inputs.iter().map(whole).collect(), node.outputs.iter().map(whole).collect());
            let streams = op_cost(&node.op, &ins.iter().collect::<Vec<_>>(), &outs.iter().collect::<Vec<_>>()).unit == Unit::Vector;
            assert_eq!(is_cheap(&node.op), streams, "{:?}", node.op);
            (cheap, dear) = (cheap + usize::from(streams), dear + usize::from(!streams));
        }
    }
    assert!(cheap > 100 && dear > 50, "{cheap} cheap, {dear} dear");
}
