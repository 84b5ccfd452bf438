//! The n-th operation of a communicator between stages is the same for all its members.
//!
//! A channel (from, to, direction) is first-in first-out, so its n-th send must carry what its n-th receive claims: the same value, in the same sharding, of the same
//! micro-batch. The n-th operation over (axes, stages) must be the same reduction of the same gradients or scalar on each of the stages.
//! Operations of a communicator are numbered in issue order, whatever their streams; the ranks of one stage issue the same.

use std::collections::{BTreeMap, BTreeSet};

use super::{Class, Place, Report};
use crate::entity::{BufferId, SegmentId};
use crate::mesh::AxisSet;
use crate::program::{Channel, Content, Instr, Program, StageProgram};

/// One operation of a communicator on one stage.
#[derive(Clone, Copy)]
struct Operation {
    segment: SegmentId,
    instr: usize,
    micro_batch: u64,
}

/// A communicator.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Communicator {
    Channel {
        from: u32,
        to: u32,
        channel: Channel,
    },
    Stages {
        axes: AxisSet,
        stages: Vec<u32>,
    },
    /// Within a stage.
    Stage {
        axes: AxisSet,
        stage: u32,
    },
}

impl Communicator {
    /// The communicator that an instruction of `stage` uses, if it does.
    pub fn of(stage: u32, instr: &Instr) -> Option<Communicator> {
        match instr {
            &Instr::Send { to, channel, .. } => Some(Communicator::Channel { from: stage, to, channel }),
            &Instr::Recv { from, channel, .. } => Some(Communicator::Channel { from, to: stage, channel }),
            Instr::Collective { axes, stages, .. } if !stages.is_empty() => Some(Communicator::Stages { axes: *axes, stages: stages.clone() }),
            Instr::Collective { axes, .. } => Some(Communicator::Stage { axes: *axes, stage }),
            Instr::Run { .. }
            | Instr::Input { .. }
            | Instr::Slice { .. }
            | Instr::Zero { .. }
            | Instr::Copy { .. }
            | Instr::AddInto { .. }
            | Instr::Join { .. }
            | Instr::Cast { .. }
            | Instr::Compress { .. }
            | Instr::SumShares { .. }
            | Instr::SquareSum { .. }
            | Instr::ClipScale { .. }
            | Instr::TrustSums { .. }
            | Instr::Update { .. }
            | Instr::Record(_)
            | Instr::Wait(_) => None,
        }
    }
    /// The stages that must take part.
    pub fn members(&self) -> Vec<u32> {
        match self {
            Communicator::Channel { from, to, .. } => vec![*from, *to],
            Communicator::Stages { stages, .. } => stages.clone(),
            Communicator::Stage { stage, .. } => vec![*stage],
        }
    }
    pub fn describe(&self) -> String {
        match self {
            Communicator::Channel { from, to, channel: Channel::Forward } => format!("the forward channel {from} → {to}"),
            Communicator::Channel { from, to, channel: Channel::Backward } => format!("the backward channel {from} → {to}"),
            Communicator::Stages { stages, .. } => format!("the communicator across stages {stages:?}"),
            Communicator::Stage { axes, stage } => format!("the communicator of stage {stage} over axes {axes:?}"),
        }
    }
}

pub(super) fn check(program: &Program, report: &mut Report) {
    let mut sequences: BTreeMap<Communicator, BTreeMap<u32, Vec<Operation>>> = BTreeMap::new();
    for (index, stage) in program.stages.iter().enumerate() {
        let index = index as u32;
        for (communicator, operations) in operations(index, stage) {
            sequences.entry(communicator).or_default().insert(index, operations);
        }
    }
    for (communicator, by_stage) in &sequences {
        let members = communicator.members();
        let absent = members.iter().find(|m| !by_stage.contains_key(m));
        let Some((&first, ours)) = by_stage.iter().next() else { continue };
        if let Some(absent) = absent {
            let op = ours[0];
            let place = Place::stage(first as usize).instr(op.segment, op.instr);
            report.push(Class::Mismatch, place, format!("stage {absent} never takes part in {}", communicator.describe()));
            continue;
        }
        for (&other, theirs) in by_stage.iter().skip(1) {
            compare(program, communicator, (first, ours), (other, theirs), report);
        }
    }
}

fn operations(index: u32, stage: &StageProgram) -> BTreeMap<Communicator, Vec<Operation>> {
    let in_segment = stage.segments.map(|_, segment| {
        let body = segment.body.iter().enumerate().map(|(at, issue)| (Communicator::of(index, &issue.instr), at));
        body.filter_map(|(c, at)| c.filter(|c| c.members().len() > 1).map(|c| (c, at))).collect::<Vec<_>>()
    });
    let names: BTreeSet<&Communicator> = in_segment.values().flatten().map(|(c, _)| c).collect();
    let names: Vec<&Communicator> = names.into_iter().collect();
    let number = in_segment.map(|_, list| list.iter().map(|(c, at)| (names.binary_search(&c).unwrap_or(0), *at)).collect::<Vec<_>>());
    let mut sequences = vec![Vec::new(); names.len()];
    for call in &stage.schedule {
        for &(communicator, instr) in &number[call.segment] {
            sequences[communicator].push(Operation { segment: call.segment, instr, micro_batch: call.micro_batch });
        }
    }
    names.into_iter().cloned().zip(sequences).filter(|(_, s)| !s.is_empty()).collect()
}

fn compare(program: &Program, communicator: &Communicator, ours: (u32, &[Operation]), theirs: (u32, &[Operation]), report: &mut Report) {
    let place = |(stage, _): (u32, &[Operation]), op: Operation| Place::stage(stage as usize).instr(op.segment, op.instr);
    for (n, (&a, &b)) in ours.1.iter().zip(theirs.1).enumerate() {
        if let Err(why) = agree(program, (ours.0, a), (theirs.0, b)) {
            let message = format!("operation {n} of {} does not match that of stage {}: {why}", communicator.describe(), ours.0);
            report.push(Class::Mismatch, place(theirs, b), message);
            return;
        }
    }
    let (more, fewer) = if ours.1.len() > theirs.1.len() { (ours, theirs) } else { (theirs, ours) };
    if let Some(&op) = more.1.get(fewer.1.len()) {
        let message = format!("{} operations of {}, but {} on stage {}", more.1.len(), communicator.describe(), fewer.1.len(), fewer.0);
        report.push(Class::Mismatch, place(more, op), message);
    }
}

fn agree(program: &Program, (stage_a, a): (u32, Operation), (stage_b, b): (u32, Operation)) -> Result<(), String> {
    let stage = |index: u32| &program.stages[index as usize];
    let instr = |index: u32, op: Operation| &stage(index).segments[op.segment].body[op.instr].instr;
    let content = |index: u32, buffer: BufferId| &stage(index).buffers[buffer].content;
    let same = |what: &str, equal: bool| if equal { Ok(()) } else { Err(format!("another {what}")) };
    match (instr(stage_a, a), instr(stage_b, b)) {
        (Instr::Send { src, .. }, Instr::Recv { dst, .. }) | (Instr::Recv { dst: src, .. }, Instr::Send { src: dst, .. }) => {
            if a.micro_batch != b.micro_batch {
                return Err(format!("micro-batch {} there, {} here", a.micro_batch, b.micro_batch));
            }
            same("value or sharding", content(stage_a, *src) == content(stage_b, *dst))
        }
        (
            Instr::Collective { pattern, dim, monoid, src, dst, .. },
            Instr::Collective { pattern: pattern_b, dim: dim_b, monoid: monoid_b, src: src_b, dst: dst_b, .. },
        ) => {
            same("reduction", (pattern, dim, monoid) == (pattern_b, dim_b, monoid_b))?;
            for (&x, &y) in [(src, src_b), (dst, dst_b)] {
                let (of_a, of_b) = (&stage(stage_a).buffers[x], &stage(stage_b).buffers[y]);
                same("element type", of_a.dtype == of_b.dtype)?;
                same("buffer", same_meaning((stage(stage_a), &of_a.content), (stage(stage_b), &of_b.content)))?;
            }
            Ok(())
        }
        _ => Err("another kind of operation".into()),
    }
}

/// Whether flat contents of two stages are the same elements.
fn same_meaning((stage_a, a): (&StageProgram, &Content), (stage_b, b): (&StageProgram, &Content)) -> bool {
    match (a, b) {
        (Content::Flat { bucket, role, pieces }, Content::Flat { bucket: bucket_b, role: role_b, pieces: pieces_b }) => {
            let (x, y) = (&stage_a.buckets[*bucket], &stage_b.buckets[*bucket_b]);
            (role, pieces, &x.members, x.elems) == (role_b, pieces_b, &y.members, y.elems)
        }
        (Content::Member { role, param, .. }, Content::Member { role: role_b, param: param_b, .. }) => (role, param) == (role_b, param_b),
        (a, b) => a == b,
    }
}
