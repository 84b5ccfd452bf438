//! From a program to what each rank does: every buffer an address, every op a kernel, every collective a numbered meeting.
//!
//! A rank's *actions* are the instructions of its segments, made ready. Its *queues* are the whole step, one list per stream, in issue order: an item names an
//! action, its micro-batch, and a number: which meeting of its communicator it is, which `record` of the step, or which `record` it waits for.

use std::collections::BTreeMap;
use std::ops::Range;

use dplan_ir::dtype::DType;
use dplan_ir::entity::{BufferId, NodeId, ParamId, SegmentId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::mesh::AxisSet;
use dplan_ir::optimizer::{DecayGroups, Optimizer, decays};
use dplan_ir::program::{Channel, Content, Instr, Pattern, Program, Space, Stream, Updates, Write};
use dplan_ir::sharding::Monoid;
use dplan_kernels::cpu::Kernel;

use super::arena::Slot;
use super::collective::Work;
use super::meeting::Communicator;
use crate::runtime::RuntimeError;
use crate::runtime::block::Block;
use crate::runtime::scratch::Way;
use crate::runtime::view::View;

/// An instruction made ready for one rank.
#[derive(Debug)]
pub enum Action {
    Run {
        kernel: Box<Kernel>,
        ins: Vec<Slot>,
        outs: Vec<Slot>,
        scratch: Option<Slot>,
        write: Write,
    },
    /// Load the block of a graph input; micro-batches are `step` elements apart.
    Input {
        dst: Slot,
        input: usize,
        block: Block,
        step: usize,
    },
    /// `dst[outer, len] = src[outer, start..start + len]` of rows of `row` bytes.
    Slice {
        src: Slot,
        dst: Slot,
        row: usize,
        start: usize,
        len: usize,
    },
    Meet {
        communicator: usize,
        member: usize,
        work: Work,
        src: Option<Slot>,
        dst: Option<Slot>,
    },
    Zero {
        dst: Slot,
    },
    Copy {
        src: Slot,
        dst: Slot,
    },
    /// Between memory and the rank's file.
    Transfer {
        way: Way,
        memory: Slot,
        file: Slot,
    },
    AddInto {
        src: Slot,
        dst: Slot,
    },
    Cast {
        src: Slot,
        dst: Slot,
    },
    /// Parts of several values, joined.
    JoinSums {
        left: Vec<Slot>,
        right: Vec<Slot>,
        dst: Vec<Slot>,
    },
    /// Parts (o, lse) of an attention, joined.
    JoinAttention {
        left: [Slot; 2],
        right: [Slot; 2],
        dst: [Slot; 2],
    },
    SumShares {
        src: Slot,
        dst: Slot,
    },
    Compress {
        grads: Slot,
        residual: Slot,
        pairs: Slot,
    },
    /// So many pairs of each member, of which those from a place on are meant.
    SumPairs {
        src: Slot,
        kept: usize,
        start: usize,
        dst: Slot,
    },
    SquareSum {
        src: Slot,
        dst: Slot,
    },
    ClipScale {
        src: Slot,
        dst: Slot,
    },
    Update {
        optimizer: Optimizer,
        state: Slot,
        grad: Slot,
        moments: Vec<Slot>,
        /// Receives the result, rounded.
        param: Option<Slot>,
        scale: Option<Slot>,
        /// All elements, and whether weight decay pulls them; by parameter, if there are trust ratios.
        stretches: Vec<(Range<usize>, bool)>,
        trust: Option<Trust>,
    },
    TrustSums {
        state: Slot,
        grad: Slot,
        moments: [Slot; 2],
        scale: Option<Slot>,
        stretches: Vec<(Range<usize>, bool)>,
        trust: Trust,
    },
    Record,
    Wait,
    /// Another rank's business.
    Nothing,
}

/// Where the sums of trust ratios are, and which of them each stretch has: numbers of members.
#[derive(Debug)]
pub struct Trust {
    pub sums: Slot,
    pub members: Vec<usize>,
}

/// One issue of an action.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Item {
    pub action: u32,
    pub micro_batch: u32,
    /// Number of the meeting in this step, of the record in this step, or of the record waited for plus one (0: none).
    pub number: u32,
}

/// Everything one rank does in a step.
#[derive(Debug)]
pub struct Code {
    pub stage: u32,
    pub actions: Vec<Action>,
    /// The instruction of each action.
    pub origins: Vec<(SegmentId, usize)>,
    /// In the order of [`Stream::ALL`].
    pub queues: [Vec<Item>; Stream::ALL.len()],
    pub records: usize,
}

impl Code {
    /// Copies to and from the rank's file in one step.
    pub fn transfers(&self) -> usize {
        let is = |item: &&Item| matches!(self.actions[item.action as usize], Action::Transfer { .. });
        self.queues.iter().flatten().filter(is).count()
    }
    /// Elements of staging that the rank's kernels need at most.
    pub fn staging_elems(&self) -> usize {
        let needs = self.actions.iter().map(|a| if let Action::Run { kernel, .. } = a { kernel.staging_elems() } else { 0 });
        needs.max().unwrap_or(0)
    }
}

/// The codes of all ranks, and where they meet.
#[derive(Debug, Default)]
pub struct Loaded {
    pub codes: Vec<Code>,
    pub communicators: Vec<Communicator>,
    /// Meetings of each communicator in one step.
    pub meetings: Vec<u64>,
    /// Of a micro-batch, over all ranks.
    pub sequences: u64,
    pub updates: Updates,
    /// Of a step.
    pub micro_batches: u64,
}

/// What tells communicators apart.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Key {
    Group { axes: AxisSet, stages: Vec<u32>, members: Vec<usize> },
    Message { channel: Channel, from: usize, to: usize },
}

/// Makes a program ready.
///
/// # Errors
/// What in the program a CPU rank cannot run. A verified f32 or f64 program has none of it.
pub fn load(graph: &Graph, program: &Program, groups: DecayGroups) -> Result<Loaded, RuntimeError> {
    let decays = decays(graph, groups);
    let mut communicators: BTreeMap<Key, usize> = BTreeMap::new();
    let Program { updates, micro_batches, .. } = *program;
    let mut loaded = Loaded { sequences: graph.batch.map_or(0, |d| graph.size(d)), updates, micro_batches, ..Loaded::default() };
    // How many meetings of each communicator each of its members issues.
    let mut counts: Vec<BTreeMap<usize, u64>> = Vec::new();
    for stage in 0..program.stages.len() {
        for local_rank in 0..program.mesh.ranks() {
            let view = View { graph, program, stage, local_rank };
            let mut loader = Loader { view, decays: &decays, communicators: &mut communicators, loaded: &mut loaded };
            let code = loader.code()?;
            let rank = loader.rank(stage, local_rank);
            for item in code.queues.iter().flatten() {
                if let Action::Meet { communicator, .. } = code.actions[item.action as usize] {
                    counts.resize(counts.len().max(communicator + 1), BTreeMap::new());
                    *counts[communicator].entry(rank).or_default() += 1;
                }
            }
            loaded.codes.push(code);
        }
    }
    for (communicator, counts) in loaded.communicators.iter().zip(&counts) {
        let count = |rank: &usize| counts.get(rank).copied().unwrap_or(0);
        let expected = communicator.members.iter().map(count).max().unwrap_or(0);
        if let Some(&rank) = communicator.members.iter().find(|&r| count(r) != expected) {
            let why = format!("rank {rank} comes to {} of the {expected} meetings of ranks {:?}", count(&rank), communicator.members);
            return Err(RuntimeError::Program { stage: loaded.codes[rank].stage, at: "schedule".into(), why });
        }
        loaded.meetings.push(expected);
    }
    Ok(loaded)
}

/// Loads one rank.
struct Loader<'a> {
    view: View<'a>,
    decays: &'a Table<ParamId, bool>,
    communicators: &'a mut BTreeMap<Key, usize>,
    loaded: &'a mut Loaded,
}

impl Loader<'_> {
    fn code(&mut self) -> Result<Code, RuntimeError> {
        let (stage, of_stage) = (self.view.stage as u32, self.view.of_stage());
        let mut code = Code { stage, actions: Vec::new(), origins: Vec::new(), queues: Default::default(), records: 0 };
        let mut first = Vec::new();
        for (id, segment) in of_stage.segments.iter() {
            first.push(code.actions.len());
            for (at, issue) in segment.body.iter().enumerate() {
                let action = self.action(&issue.instr).map_err(|why| RuntimeError::Program {
                    stage,
                    at: format!("{} {id}, instruction {at}", segment.kind.name()),
                    why,
                })?;
                code.actions.push(action);
                code.origins.push((id, at));
            }
        }
        let mut latest = vec![0u32; of_stage.events as usize];
        let mut meetings: BTreeMap<usize, u32> = BTreeMap::new();
        for call in &of_stage.schedule {
            let segment = of_stage.segments.get(call.segment).ok_or_else(|| RuntimeError::Program {
                stage,
                at: "schedule".into(),
                why: format!("{} does not exist", call.segment),
            })?;
            for (at, issue) in segment.body.iter().enumerate() {
                let action = first[call.segment.0 as usize] + at;
                let number = match (&issue.instr, &code.actions[action]) {
                    (Instr::Record(event), _) => {
                        code.records += 1;
                        latest[event.0 as usize] = code.records as u32;
                        code.records as u32 - 1
                    }
                    (Instr::Wait(event), _) => latest[event.0 as usize],
                    (_, Action::Meet { communicator, .. }) => {
                        let next = meetings.entry(*communicator).or_default();
                        *next += 1;
                        *next - 1
                    }
                    _ => 0,
                };
                let item = Item { action: action as u32, micro_batch: call.micro_batch as u32, number };
                code.queues[issue.stream as usize].push(item);
            }
        }
        Ok(code)
    }

    fn action(&mut self, instr: &Instr) -> Result<Action, String> {
        let View { program, local_rank, .. } = self.view;
        let mesh = &program.mesh;
        Ok(match instr {
            Instr::Run { node, ins, outs, scratch, write } => self.run(*node, ins, outs, *scratch, *write)?,
            Instr::Input { dst } => self.input(*dst)?,
            Instr::Slice { src, dst, axes, dim } => {
                let [_, elems] = self.view.shape(*src, *dim)?;
                let (src, dst) = (self.slot(*src)?, self.slot(*dst)?);
                let (row, ways) = ((elems * src.dtype.size()) as usize, mesh.size(*axes) as usize);
                if row % ways != 0 || dst.bytes * ways != src.bytes {
                    return Err(format!("a dim of {elems} elements in {ways} blocks"));
                }
                let len = row / ways;
                Action::Slice { src, dst, row, start: mesh.position(local_rank, *axes) as usize * len, len }
            }
            Instr::Collective { pattern, axes, stages, dim, monoid, src, dst } => {
                let (from, to) = (self.slot(*src)?, self.slot(*dst)?);
                let members: Vec<usize> = self.view.group(*axes, stages).into_iter().map(|r| r as usize).collect();
                let (ways, dtype) = (members.len(), from.dtype);
                let sized = |whole: Slot, part: Slot| {
                    if part.bytes * ways == whole.bytes { Ok(()) } else { Err(format!("{} of {} bytes in {ways} blocks", whole.bytes, part.bytes)) }
                };
                let work = match pattern {
                    Pattern::AllReduce if from.bytes != to.bytes => return Err(format!("{} bytes reduced to {}", from.bytes, to.bytes)),
                    Pattern::AllReduce => Work::AllReduce { elems: from.elems(), monoid: *monoid, dtype },
                    Pattern::ReduceScatter => {
                        sized(from, to)?;
                        let [outer, row] = self.view.shape(*src, *dim)?.map(|n| n as usize);
                        Work::ReduceScatter { outer, block: row / ways, monoid: *monoid, dtype }
                    }
                    Pattern::AllGather => {
                        sized(to, from)?;
                        let [outer, row] = self.view.shape(*dst, *dim)?.map(|n| n as usize);
                        Work::AllGather { outer, block: row / ways, dtype }
                    }
                    Pattern::AllToAll if from.bytes != to.bytes || from.elems() % ways != 0 || from.overlaps(&to) => {
                        return Err(format!("{} bytes exchanged for {} between {ways}", from.bytes, to.bytes));
                    }
                    Pattern::Shift if from.bytes != to.bytes || from.overlaps(&to) => {
                        return Err(format!("{} bytes handed on to {}", from.bytes, to.bytes));
                    }
                    Pattern::Shift => Work::Shift { bytes: from.bytes },
                    Pattern::AllToAll => Work::AllToAll { block: from.elems() / ways, dtype },
                };
                if pattern.reduces() && dtype == DType::I32 {
                    return Err(format!("no reduction in {dtype} on CPU ranks"));
                }
                let key = Key::Group { axes: *axes, stages: stages.clone(), members: members.clone() };
                self.meet(key, members, work, Some(from), Some(to))
            }
            Instr::Send { to, channel, src } => {
                let slot = self.slot(*src)?;
                self.message(*channel, self.view.stage, *to as usize, Some(slot), None)?
            }
            Instr::Recv { from, channel, dst } => {
                let slot = self.slot(*dst)?;
                self.message(*channel, *from as usize, self.view.stage, None, Some(slot))?
            }
            Instr::Zero { dst } => Action::Zero { dst: self.slot(*dst)? },
            Instr::Copy { src, dst } => {
                let (from, to) = (self.slot_before(*src, self.view.of_stage().end())?, self.slot_before(*dst, self.view.of_stage().end())?);
                self.same(&[from, to])?;
                let is_filed = |buffer: BufferId| self.view.of_stage().space(buffer) == Space::File;
                match (is_filed(*src), is_filed(*dst)) {
                    (false, false) if from.overlaps(&to) => return Err("a copy onto a part of itself".into()),
                    (false, false) => Action::Copy { src: from, dst: to },
                    (true, false) => Action::Transfer { way: Way::In, memory: to, file: from },
                    (false, true) => Action::Transfer { way: Way::Out, memory: from, file: to },
                    (true, true) => return Err("a copy from file to file".into()),
                }
            }
            Instr::AddInto { src, dst } => {
                let (src, dst) = (self.float(*src)?, self.float(*dst)?);
                self.same(&[src, dst])?;
                Action::AddInto { src, dst }
            }
            Instr::Join { monoid, left, right, dst } => self.join(*monoid, left, right, dst)?,
            Instr::Cast { src, dst } => {
                let (src, dst) = (self.float(*src)?, self.slot(*dst)?);
                if dst.dtype != DType::Bf16 || src.elems() != dst.elems() {
                    return Err(format!("{} elements of {} cast to {} of {}", src.elems(), src.dtype, dst.elems(), dst.dtype));
                }
                Action::Cast { src, dst }
            }
            Instr::Compress { src, residual, dst } => {
                let (grads, residual, pairs) = (self.float(*src)?, self.float(*residual)?, self.float(*dst)?);
                self.same(&[grads, residual])?;
                if pairs.dtype != grads.dtype || !(2..=2 * grads.elems()).contains(&pairs.elems()) || grads.elems() as u64 > 1 << 32 {
                    return Err(format!("{} elements of {} compressed to {} of {}", grads.elems(), grads.dtype, pairs.elems(), pairs.dtype));
                }
                Action::Compress { grads, residual, pairs }
            }
            Instr::SumShares { src: from, dst: to } if let Content::Wire { kept: Some(kept), .. } = self.view.buffer(*from)?.content => {
                let (src, dst, kept) = (self.float(*from)?, self.float(*to)?, kept as usize);
                let Content::Flat { pieces, .. } = self.view.buffer(*to)?.content else { return Err(format!("{to} is no bucket")) };
                if src.dtype != dst.dtype || kept == 0 || src.elems() % (2 * kept) != 0 {
                    return Err(format!("{} elements of {} as {kept} pairs each added up to {}", src.elems(), src.dtype, dst.dtype));
                }
                Action::SumPairs { src, kept, start: mesh.position(local_rank, pieces) as usize * dst.elems(), dst }
            }
            Instr::SumShares { src, dst } => {
                let (src, dst) = (self.slot(*src)?, self.float(*dst)?);
                if src.dtype != DType::Bf16 && src.dtype != dst.dtype || src.elems() % dst.elems().max(1) != 0 {
                    return Err(format!("{} elements of {} added up to {} of {}", src.elems(), src.dtype, dst.elems(), dst.dtype));
                }
                Action::SumShares { src, dst }
            }
            Instr::SquareSum { src, dst, once } => {
                if mesh.position(local_rank, *once) == 0 {
                    Action::SquareSum { src: self.float(*src)?, dst: self.float(*dst)? }
                } else {
                    Action::Nothing
                }
            }
            Instr::ClipScale { src, dst } => Action::ClipScale { src: self.float(*src)?, dst: self.float(*dst)? },
            Instr::TrustSums { state: at, grad, moments, scale, dst } => {
                let (state, grad) = (self.float(*at)?, self.float(*grad)?);
                let [m, v] = moments[..] else { return Err(format!("{} moments, not 2", moments.len())) };
                let moments = [self.float(m)?, self.float(v)?];
                self.same(&[&[state, grad], &moments[..]].concat())?;
                let (members, stretches) = self.view.parts(*at, |p| self.decays[p])?;
                let trust = self.trust(*dst, members, state)?;
                Action::TrustSums { state, grad, moments, scale: scale.map(|s| self.float(s)).transpose()?, stretches, trust }
            }
            Instr::Update { state: at, grad, moments, param, scale, trust } => {
                let optimizer = program.optimizer.ok_or("the program has no optimizer")?;
                let (state, grad) = (self.float(*at)?, self.float(*grad)?);
                let moments = moments.iter().map(|&m| self.float(m)).collect::<Result<Vec<_>, _>>()?;
                if moments.len() != optimizer.moments() {
                    return Err(format!("{} moments of the {} that {} has", moments.len(), optimizer.moments(), optimizer.name()));
                }
                self.same(&[&[state, grad], &moments[..]].concat())?;
                let param = param.map(|p| self.slot(p)).transpose()?;
                if let Some(param) = param.filter(|p| p.elems() != state.elems()) {
                    return Err(format!("{} parameters of {} states", param.elems(), state.elems()));
                }
                if optimizer.trusts() != trust.is_some() {
                    return Err(format!("{} with sums of trust ratios, or one that has them without", optimizer.name()));
                }
                let (trust, stretches) = match trust {
                    None => (None, self.view.stretches(*at, |p| self.decays[p])?),
                    Some(sums) => {
                        let (members, stretches) = self.view.parts(*at, |p| self.decays[p])?;
                        (Some(self.trust(*sums, members, state)?), stretches)
                    }
                };
                Action::Update { optimizer, state, grad, moments, param, scale: scale.map(|s| self.float(s)).transpose()?, stretches, trust }
            }
            Instr::Record(event) | Instr::Wait(event) if event.0 >= self.view.of_stage().events => return Err(format!("{event} does not exist")),
            Instr::Record(_) => Action::Record,
            Instr::Wait(_) => Action::Wait,
        })
    }

    fn run(&mut self, node: NodeId, ins: &[BufferId], outs: &[BufferId], scratch: Option<BufferId>, write: Write) -> Result<Action, String> {
        let local = self.view.local(node, ins, outs)?;
        let kernel = Kernel::prepare(&local.node.op, &local.context, &local.ins, &local.outs).map_err(|e| e.to_string())?;
        let slots = |ids: &[BufferId]| ids.iter().map(|&b| self.slot(b)).collect::<Result<Vec<_>, _>>();
        let (ins, outs, scratch) = (slots(ins)?, slots(outs)?, scratch.map(|s| self.slot(s)).transpose()?);
        let dtype = kernel.dtype();
        if scratch.map_or(0, |s| s.bytes) < kernel.scratch_elems() * dtype.size() as usize {
            return Err(format!("needs {} elements of scratch", kernel.scratch_elems()));
        }
        // Kernels read their operands while they write.
        for (at, out) in outs.iter().enumerate() {
            let others = ins.iter().chain(&scratch).chain(&outs[..at]);
            if let Some(other) = others.into_iter().find(|other| out.overlaps(other)) {
                return Err(format!("result {at} overlaps {other:?}"));
            }
        }
        let scratch = scratch.map(|s| s.typed(dtype));
        Ok(Action::Run { kernel: Box::new(kernel), ins, outs, scratch, write })
    }

    fn input(&self, dst: BufferId) -> Result<Action, String> {
        let (input, block, step) = self.view.input(dst)?;
        Ok(Action::Input { dst: self.slot(dst)?, input, block, step: step as usize })
    }

    fn message(&mut self, channel: Channel, from: usize, to: usize, src: Option<Slot>, dst: Option<Slot>) -> Result<Action, String> {
        let View { program, local_rank, .. } = self.view;
        if from.max(to) >= program.stages.len() || from == to {
            return Err(format!("a message from stage {from} to stage {to}"));
        }
        let (from, to) = (self.rank(from, local_rank), self.rank(to, local_rank));
        let bytes = src.or(dst).map_or(0, |s| s.bytes);
        Ok(self.meet(Key::Message { channel, from, to }, vec![from, to], Work::Message { bytes }, src, dst))
    }

    fn meet(&mut self, key: Key, members: Vec<usize>, work: Work, src: Option<Slot>, dst: Option<Slot>) -> Action {
        let me = self.rank(self.view.stage, self.view.local_rank);
        let member = members.iter().position(|&m| m == me).unwrap_or(0);
        let communicator = *self.communicators.entry(key).or_insert_with(|| {
            self.loaded.communicators.push(Communicator::new(members));
            self.loaded.communicators.len() - 1
        });
        Action::Meet { communicator, member, work, src, dst }
    }

    fn join(&self, monoid: Monoid, left: &[BufferId], right: &[BufferId], dst: &[BufferId]) -> Result<Action, String> {
        let slots = |of: &[BufferId]| of.iter().map(|&b| self.slot(b)).collect::<Result<Vec<_>, _>>();
        let (left, right, dst) = (slots(left)?, slots(right)?, slots(dst)?);
        for ((&one, &other), &to) in left.iter().zip(&right).zip(&dst) {
            self.same(&[one, other, to])?;
            // What is joined in place is exactly there.
            if to.overlaps(&other) || to.overlaps(&one) && to != one || to.dtype == DType::I32 {
                return Err("a part overlaps what it is joined to".into());
            }
        }
        let pair = |of: &[Slot]| <[Slot; 2]>::try_from(of).map_err(|_| format!("{} parts are no pair (o, lse)", of.len()));
        match monoid {
            Monoid::Sum => Ok(Action::JoinSums { left, right, dst }),
            Monoid::LogSumExp => Ok(Action::JoinAttention { left: pair(&left)?, right: pair(&right)?, dst: pair(&dst)? }),
            Monoid::Max => Err("no parts are joined by their maxima".into()),
        }
    }
    fn trust(&self, sums: BufferId, members: Vec<usize>, state: Slot) -> Result<Trust, String> {
        let sums = self.float(sums)?;
        if sums.dtype != state.dtype {
            return Err(format!("sums of trust ratios in {}, of states in {}", sums.dtype, state.dtype));
        }
        match members.iter().find(|&&at| 2 * at as u64 + 2 > sums.elems() as u64) {
            Some(at) => Err(format!("no sums of trust ratios for member {at}")),
            None => Ok(Trust { sums, members }),
        }
    }
    fn rank(&self, stage: usize, local_rank: u64) -> usize {
        stage * self.view.program.mesh.ranks() as usize + local_rank as usize
    }
    /// The slot of a buffer in memory.
    fn slot(&self, id: BufferId) -> Result<Slot, String> {
        self.slot_before(id, self.view.of_stage().range(Space::Host).end)
    }
    fn slot_before(&self, id: BufferId, end: u64) -> Result<Slot, String> {
        let View { program, local_rank, .. } = self.view;
        Slot::new(self.view.buffer(id)?, end, &program.mesh, local_rank).map_err(|why| format!("{id}: {why}"))
    }
    /// The slot of a buffer that is computed with.
    fn float(&self, id: BufferId) -> Result<Slot, String> {
        match self.slot(id)? {
            slot if matches!(slot.dtype, DType::F32 | DType::F64) => Ok(slot),
            slot => Err(format!("{id}: CPU ranks compute in f32 and f64, not in {}", slot.dtype)),
        }
    }
    fn same(&self, slots: &[Slot]) -> Result<(), String> {
        match slots.iter().find(|s| (s.bytes, s.dtype) != (slots[0].bytes, slots[0].dtype)) {
            None => Ok(()),
            Some(other) => Err(format!("{} bytes of {} beside {} bytes of {}", slots[0].bytes, slots[0].dtype, other.bytes, other.dtype)),
        }
    }
}
