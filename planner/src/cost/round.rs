//! Time of a run of an op on one rank, which may take as many turns as ranks ([`dplan_ir::ring`]).
//!
//! With `c` the time of a turn's run, `k` that of a shift of keys, `g` of their gradients and `j` of joining what a turn made to what was there:
//!
//! ```text
//! Σ over turns t of max(c, [t + 1 < n]·k + [t > 0]·g) + [t > 0]·j,  then g
//! ```
//! A turn has the `n`-th part of the arithmetic of all keys together, since positions are laid out so that every block of the queries sees as much of every block of the keys
//! ([`dplan_ir::order`]), and its operands go through memory in each turn.

use super::comm::{group, group_time};
use super::compute::op_time;
use crate::machine::Machine;
use crate::units::Nanos;
use dplan_ir::cost::{OpCost, Unit, op_cost};
use dplan_ir::dtype::DType;
use dplan_ir::mesh::Mesh;
use dplan_ir::op::Op;
use dplan_ir::program::Pattern;
use dplan_ir::rule::{Assignment, Label, Rule};
use dplan_ir::sharding::LocalType;

/// What a run takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spent {
    pub time: Nanos,
    /// Of it, what exchanges take that no arithmetic hides.
    pub exposed: Nanos,
    pub flops: u64,
}

/// A run of an op, its operands and results split as `assignment` says.
pub fn spent(machine: &Machine, mesh: &Mesh, op: &Op, (rule, assignment): (&Rule, &Assignment), ins: &[&LocalType], outs: &[&LocalType]) -> Spent {
    let dtype = ins.first().or(outs.first()).map_or(DType::F32, |t| t.dtype);
    let axes = rule.goes_round(assignment);
    let cost = op_cost(op, ins, outs);
    let (true, Some(of)) = (!axes.is_empty(), rule.blockwise) else {
        return Spent { time: op_time(&machine.device, dtype, &cost), exposed: Nanos::ZERO, flops: cost.flops };
    };
    let ranks = mesh.size(axes);
    let has_keys = |labels: &[Label]| labels.contains(&of.keys);
    let whole: Vec<LocalType> = rule
        .ins
        .iter()
        .zip(ins)
        .map(|(labels, ty)| {
            let dims = labels.iter().zip(&ty.dims).map(|(&l, n)| if l == of.keys { n * ranks } else { *n }).collect();
            LocalType { dims, ..(*ty).clone() }
        })
        .collect();
    let flops = op_cost(op, &whole.iter().collect::<Vec<_>>(), outs).flops;
    let turn = op_time(&machine.device, dtype, &OpCost { flops: flops.div_ceil(ranks), ..cost });
    let shift = |bytes: u64| group_time(machine, group(machine, mesh, axes), Pattern::Shift, bytes);
    let keys: Nanos = rule.ins.iter().zip(ins).filter(|(labels, _)| has_keys(labels)).map(|(_, ty)| shift(ty.bytes())).sum();
    let grads: Nanos = rule.outs.iter().zip(outs).filter(|((labels, _), _)| has_keys(labels)).map(|(_, ty)| shift(ty.bytes())).sum();
    let (elems, bytes) = outs.iter().fold((0, 0), |(elems, bytes), ty| (elems + ty.elems(), bytes + 3 * ty.bytes()));
    let join = op_time(&machine.device, dtype, &OpCost { flops: elems, bytes, unit: Unit::Vector });
    let mut spent = Spent { time: grads, exposed: grads, flops };
    for t in 0..ranks {
        let moved = if t + 1 < ranks { keys } else { Nanos::ZERO } + if t > 0 { grads } else { Nanos::ZERO };
        spent.time += turn.max(moved) + if t > 0 { join } else { Nanos::ZERO };
        spent.exposed += Nanos(moved.0.saturating_sub(turn.0));
    }
    spent
}
