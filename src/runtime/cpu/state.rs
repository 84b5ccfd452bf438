//! Logical tensors in and out of the ranks' flat buckets.
//!
//! A parameter's block on a rank is its member's range of the bucket; a flat buffer holds the whole bucket or the rank's piece of it. So an element of a
//! rank's buffer is one of the logical tensor exactly where the block's range and the piece's range meet; what is in neither is padding.
//!
//! [`holdings`] lists the same the other way round: what each rank has of each logical tensor, so that ranks can write their own parts.

use dplan_ir::dtype::DType;
use dplan_ir::entity::{BufferId, ParamId};
use dplan_ir::extent::Seat;
use dplan_ir::graph::Graph;
use dplan_ir::program::{Bucket, Content, Instr, Issue, Member, Program, Role, Space, StageProgram};

use super::arena::{Arena, Slot};
use crate::fingerprint::{Digest, digest};
use crate::runtime::block::Block;
use crate::safetensors;
use std::io;

/// Writes a logical tensor into every rank's buffers of `role` that hold parts of it.
///
/// # Safety
/// No rank runs meanwhile.
///
/// # Errors
/// If it is in a file that cannot be written.
pub unsafe fn scatter(graph: &Graph, program: &Program, arenas: &[Arena], role: Role, param: ParamId, values: &[f64]) -> io::Result<()> {
    let mut outcome = Ok(());
    let mut bytes = Vec::new();
    each_home(program, param, |stage, bucket, member| {
        let Some(buffer) = program.stages[stage].home(bucket, role) else { return };
        each_rank(graph, program, stage, (param, member), buffer, |rank, slot, local, logical, len| {
            encode(slot.dtype, &values[logical..logical + len], &mut bytes);
            // SAFETY: no rank runs, by the caller's promise.
            let stored = unsafe { arenas[rank].store(&slot.part(local, len), &bytes) };
            outcome = std::mem::replace(&mut outcome, Ok(())).and(stored);
        });
    });
    outcome
}

/// Reads a logical tensor out of the ranks' buffers of `role`, as the optimizer sees them: parameters that are up to date, gradients that are
/// reduced and not clipped.
///
/// # Safety
/// No rank runs meanwhile.
///
/// # Errors
/// If it is in a file that cannot be read.
pub unsafe fn gather(graph: &Graph, program: &Program, arenas: &[Arena], role: Role, param: ParamId) -> io::Result<Vec<f64>> {
    let mut outcome = Ok(());
    let mut bytes = Vec::new();
    let mut values = vec![0.0; graph.shape(graph.params[param].value).iter().product::<u64>() as usize];
    each_home(program, param, |stage, bucket, member| {
        let Some(buffer) = updated(&program.stages[stage], bucket, role) else { return };
        each_rank(graph, program, stage, (param, member), buffer, |rank, slot, local, logical, len| {
            let part = slot.part(local, len);
            bytes.resize(part.bytes, 0);
            // SAFETY: no rank runs, by the caller's promise.
            let loaded = unsafe { arenas[rank].load(&part, &mut bytes) };
            decode(slot.dtype, &bytes, &mut values[logical..logical + len]);
            outcome = std::mem::replace(&mut outcome, Ok(())).and(loaded);
        });
    });
    outcome.map(|()| values)
}

/// Elements as a rank's memory has them, which is as files of weights do.
fn encode(dtype: DType, values: &[f64], bytes: &mut Vec<u8>) {
    bytes.clear();
    bytes.resize(values.len() * dtype.size() as usize, 0);
    values.iter().enumerate().for_each(|(at, &value)| safetensors::encode(dtype, value, bytes, at));
}

/// The inverse of [`encode`].
fn decode(dtype: DType, bytes: &[u8], values: &mut [f64]) {
    values.iter_mut().enumerate().for_each(|(at, value)| *value = safetensors::decode(dtype, bytes, at));
}

/// What one rank has of one logical tensor: elements `from .. from + count` of a block of it, padding left out, in row-major order.
#[derive(Clone, Debug)]
pub struct Holding {
    pub rank: usize,
    pub param: ParamId,
    pub role: Role,
    pub dtype: DType,
    /// First index and size of the block in each dim of the logical tensor.
    pub block: Vec<(u64, u64)>,
    pub from: u64,
    pub count: u64,
    pub runs: Vec<Run>,
    slot: Slot,
}

impl Holding {
    pub fn bytes(&self) -> usize {
        (self.count * self.dtype.size()) as usize
    }
    /// What its elements, one run after the other, give to the fingerprint of their tensor.
    pub fn digest(&self, bytes: &[u8]) -> Digest {
        let size = self.dtype.size() as usize;
        let mut at = 0;
        let add = |sum: Digest, run: &Run| {
            let elems = &bytes[at..at + run.len * size];
            at += elems.len();
            sum.and(digest(self.dtype, run.logical as u64, elems))
        };
        self.runs.iter().fold(Digest::default(), add)
    }
}

/// Elements that stand together both in a rank's buffer and in the logical tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    local: usize,
    pub logical: usize,
    pub len: usize,
}

/// Which of the flat buffers of a role is meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    /// The one that the optimizer updates: the master copy, a rank's piece.
    Updated,
    /// The one that the next step reads first.
    Home,
}

/// What every rank of every stage has of a role of a parameter, replicas included. Where nothing of a tensor is on a rank, the rank is left out.
pub fn holdings(graph: &Graph, program: &Program, role: Role, param: ParamId, which: Which) -> Vec<Holding> {
    let mut all: Vec<Holding> = Vec::new();
    each_home(program, param, |stage, bucket, member| {
        let of_stage = &program.stages[stage];
        let buffer = match which {
            Which::Updated => updated(of_stage, bucket, role),
            Which::Home => of_stage.home(bucket, role),
        };
        let Some(buffer) = buffer else { return };
        let dims = &graph.values[graph.params[param].value].ty.dims;
        each_rank(graph, program, stage, (param, member), buffer, |rank, slot, local, logical, len| {
            match all.last_mut().filter(|h| h.rank == rank) {
                Some(holding) => {
                    holding.count += len as u64;
                    holding.runs.push(Run { local, logical, len });
                }
                None => {
                    let local_rank = rank as u64 % program.mesh.ranks();
                    let seat = Seat { mesh: &program.mesh, padded: &program.padded, local_rank };
                    let block = Block::new(graph, dims, &member.sharding, seat, None);
                    let from = before(&block, logical);
                    let runs = vec![Run { local, logical, len }];
                    all.push(Holding { rank, param, role, dtype: slot.dtype, block: block.valid(), from, count: len as u64, runs, slot: *slot });
                }
            }
        });
    });
    all
}

/// Elements of a block, padding left out, before the one that is `logical` in the tensor.
fn before(block: &Block, logical: usize) -> u64 {
    let mut passed = 0;
    let mut found = 0;
    block.each(|s| {
        if (s.logical..s.logical + s.len).contains(&logical) {
            found = passed + logical - s.logical;
        }
        passed += s.len;
    });
    found as u64
}

/// Copies a holding's elements, little-endian, one run after the other.
///
/// # Safety
/// No rank runs meanwhile.
///
/// # Errors
/// If they are in a file that cannot be read.
///
/// # Panics
/// If `bytes` is not as long as the holding.
pub unsafe fn copy_out(arenas: &[Arena], holding: &Holding, bytes: &mut [u8]) -> io::Result<()> {
    assert_eq!(bytes.len(), holding.bytes(), "as long as the holding");
    let mut rest = bytes;
    for run in &holding.runs {
        let part = holding.slot.part(run.local, run.len);
        let (of_run, behind) = rest.split_at_mut(part.bytes);
        // SAFETY: no rank writes, by the caller's promise.
        unsafe { arenas[holding.rank].load(&part, of_run)? };
        rest = behind;
    }
    Ok(())
}

/// The inverse of [`copy_out`].
///
/// # Safety
/// No rank runs meanwhile.
///
/// # Errors
/// If they are in a file that cannot be written.
///
/// # Panics
/// If `bytes` is not as long as the holding.
pub unsafe fn copy_in(arenas: &[Arena], holding: &Holding, bytes: &[u8]) -> io::Result<()> {
    assert_eq!(bytes.len(), holding.bytes(), "as long as the holding");
    let mut rest = bytes;
    for run in &holding.runs {
        let part = holding.slot.part(run.local, run.len);
        let (of_run, behind) = rest.split_at(part.bytes);
        // SAFETY: no rank runs, by the caller's promise.
        unsafe { arenas[holding.rank].store(&part, of_run)? };
        rest = behind;
    }
    Ok(())
}

/// The buffer in which a role is as the bucket's update leaves or finds it: of parameters the master, or else the rank's piece; gradients as they are read;
/// of all else, and where nothing is updated, the home.
fn updated(stage: &StageProgram, bucket: dplan_ir::entity::BucketId, role: Role) -> Option<BufferId> {
    let of_bucket = |id: BufferId| matches!(stage.buffers[id].content, Content::Flat { bucket: b, .. } if b == bucket);
    let update = || {
        stage.segments.values().flat_map(|s| &s.body).find_map(|issue| match issue.instr {
            Instr::Update { state, grad, .. } if of_bucket(state) => Some((state, grad)),
            _ => None,
        })
    };
    let found = match role {
        Role::Param => stage.home(bucket, Role::Master).or_else(|| update().map(|(state, _)| state)),
        Role::Grad => update().map(|(_, grad)| grad),
        Role::Master | Role::Moment1 | Role::Moment2 | Role::Residual => None,
    };
    found.map(|buffer| kept(stage, buffer)).or_else(|| stage.home(bucket, role))
}

/// Where a buffer of the update is between steps, if it is in another memory then.
fn kept(stage: &StageProgram, buffer: BufferId) -> BufferId {
    let is_away = |id: BufferId| stage.space(id) != Space::Device;
    // Copies within the device's memory put earlier versions by.
    let other = |issue: &Issue| match issue.instr {
        Instr::Copy { src, dst } if dst == buffer && is_away(src) => Some(src),
        Instr::Copy { src, dst } if src == buffer && is_away(dst) => Some(dst),
        _ => None,
    };
    if is_away(buffer) {
        return buffer;
    }
    stage.segments.values().flat_map(|s| &s.body).find_map(other).unwrap_or(buffer)
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
        let Ok(slot) = Slot::new(&of_stage.buffers[buffer], of_stage.end(), &program.mesh, local_rank) else { continue };
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
