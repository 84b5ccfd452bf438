//! Logical tensors in and out of the ranks' flat buckets.
//!
//! A parameter's block on a rank is its member's range of the bucket; a flat buffer holds the whole bucket or the rank's piece of it. So an element of a
//! rank's buffer is one of the logical tensor exactly where the block's range and the piece's range meet; what is in neither is padding.

use dplan_ir::entity::{BufferId, ParamId};
use dplan_ir::extent::Seat;
use dplan_ir::graph::Graph;
use dplan_ir::program::{Bucket, Content, Instr, Member, Program, Role, StageProgram};

use super::arena::{Arena, Slot};
use crate::runtime::block::Block;
use dplan_kernels::cpu::block::{Block as Data, BlockMut as DataMut};
use half::{bf16, f16};

/// Writes a logical tensor into every rank's buffers of `role` that hold parts of it.
///
/// # Safety
/// No rank runs meanwhile.
pub unsafe fn scatter(graph: &Graph, program: &Program, arenas: &[Arena], role: Role, param: ParamId, values: &[f64]) {
    each_home(program, param, |stage, bucket, member| {
        let Some(buffer) = program.stages[stage].home(bucket, role) else { return };
        each_rank(graph, program, stage, (param, member), buffer, |rank, slot, local, logical, len| {
            // SAFETY: no rank runs, by the caller's promise.
            match unsafe { arenas[rank].write(slot, 0) } {
                DataMut::F32(x) => x[local..local + len].iter_mut().zip(&values[logical..]).for_each(|(x, v)| *x = *v as f32),
                DataMut::F64(x) => x[local..local + len].copy_from_slice(&values[logical..logical + len]),
                DataMut::Bf16(x) => x[local..local + len].iter_mut().zip(&values[logical..]).for_each(|(x, v)| *x = bf16::from_f64(*v)),
                DataMut::F16(x) => x[local..local + len].iter_mut().zip(&values[logical..]).for_each(|(x, v)| *x = f16::from_f64(*v)),
                DataMut::I32(_) => {}
            }
        });
    });
}

/// Reads a logical tensor out of the ranks' buffers of `role`, as the optimizer sees them: parameters that are up to date, gradients that are
/// reduced and not clipped.
///
/// # Safety
/// No rank runs meanwhile.
pub unsafe fn gather(graph: &Graph, program: &Program, arenas: &[Arena], role: Role, param: ParamId) -> Vec<f64> {
    let mut values = vec![0.0; graph.shape(graph.params[param].value).iter().product::<u64>() as usize];
    each_home(program, param, |stage, bucket, member| {
        let Some(buffer) = updated(&program.stages[stage], bucket, role) else { return };
        each_rank(graph, program, stage, (param, member), buffer, |rank, slot, local, logical, len| {
            // SAFETY: no rank runs, by the caller's promise.
            match unsafe { arenas[rank].read(slot, 0) } {
                Data::F32(x) => values[logical..logical + len].iter_mut().zip(&x[local..]).for_each(|(v, x)| *v = f64::from(*x)),
                Data::F64(x) => values[logical..logical + len].copy_from_slice(&x[local..local + len]),
                Data::Bf16(x) => values[logical..logical + len].iter_mut().zip(&x[local..]).for_each(|(v, x)| *v = x.to_f64()),
                Data::F16(x) => values[logical..logical + len].iter_mut().zip(&x[local..]).for_each(|(v, x)| *v = x.to_f64()),
                Data::I32(_) => {}
            }
        });
    });
    values
}

/// The buffer of a role that the bucket's update reads or writes; where nothing is updated, the role's home.
fn updated(stage: &StageProgram, bucket: dplan_ir::entity::BucketId, role: Role) -> Option<BufferId> {
    let of_bucket = |id: BufferId| matches!(stage.buffers[id].content, Content::Flat { bucket: b, .. } if b == bucket);
    let instrs = stage.segments.values().flat_map(|s| &s.body);
    let found = instrs.filter_map(|issue| match &issue.instr {
        Instr::Update { state, grad, moments, .. } if of_bucket(*state) => match role {
            Role::Param | Role::Master => Some(*state),
            Role::Grad => Some(*grad),
            Role::Moment1 => moments.first().copied(),
            Role::Moment2 => moments.get(1).copied(),
        },
        _ => None,
    });
    found.into_iter().next().or_else(|| stage.home(bucket, role))
}

/// Every stage that has the parameter (a tied one may have several), with its bucket and its place in it.
fn each_home(program: &Program, param: ParamId, mut visit: impl FnMut(usize, dplan_ir::entity::BucketId, &Member)) {
    for (stage, of_stage) in program.stages.iter().enumerate() {
        for (id, bucket) in of_stage.buckets.iter() {
            if let Some(member) = bucket.members.iter().find(|m| m.param == param) {
                visit(stage, id, member);
            }
        }
    }
}

/// For each rank of a stage, the stretches of the parameter that its buffer has: `visit(rank, slot, index in the slot, index in the tensor, elements)`.
fn each_rank(
    graph: &Graph,
    program: &Program,
    stage: usize,
    (param, member): (ParamId, &Member),
    buffer: BufferId,
    mut visit: impl FnMut(usize, &Slot, usize, usize, usize),
) {
    let of_stage = &program.stages[stage];
    let Some(first) = flat_start(of_stage, buffer, program) else { return };
    for local_rank in 0..program.mesh.ranks() {
        let seat = Seat { mesh: &program.mesh, padded: &program.padded, local_rank };
        let dims = &graph.values[graph.params[param].value].ty.dims;
        let block = Block::new(graph, dims, &member.sharding, seat, None);
        let Ok(slot) = Slot::new(&of_stage.buffers[buffer], of_stage.arena_bytes, &program.mesh, local_rank) else { continue };
        let start = first(local_rank);
        let held = start..start + slot.elems();
        block.each(|s| {
            let at = member.offset as usize + s.local;
            let (from, to) = (at.max(held.start), (at + s.len).min(held.end));
            if from < to {
                let rank = stage * program.mesh.ranks() as usize + local_rank as usize;
                visit(rank, &slot, from - held.start, s.logical + from - at, to - from);
            }
        });
    }
}

/// Where in the bucket a flat buffer begins, for each local rank.
fn flat_start<'a>(stage: &'a StageProgram, buffer: BufferId, program: &'a Program) -> Option<impl Fn(u64) -> usize + 'a> {
    let Content::Flat { bucket, pieces, .. } = stage.buffers[buffer].content else { return None };
    let Bucket { elems, .. } = stage.buckets[bucket];
    let piece = elems / program.mesh.size(pieces);
    Some(move |local_rank: u64| (program.mesh.position(local_rank, pieces) * piece) as usize)
}
