//! All ranks reach the end of the step.
//!
//! The streams of every stage are run together: a record is done when its stream reaches it; a wait when its record is done; a message when both ends have
//! reached it; an operation across stages when all have. Operations of one communicator take place in issue order, also where different streams issue them, as
//! communication libraries have it. Everything else never waits; the ranks of a stage move in step, so an operation within a stage waits for nothing else.
//! No choice is ever made (a finished step enables others and disables none), so if this order gets stuck every order does.

use std::collections::{BTreeMap, BTreeSet};

use super::matching::Communicator;
use super::{Class, Place, Report};
use crate::entity::{Id, SegmentId};
use crate::program::{Instr, Program, StageProgram, Stream};

/// What may hold a stream.
#[derive(Clone, Copy)]
enum Action {
    /// A record, or an operation within the stage that others have to follow.
    Pass,
    /// Wait for an action of another stream, by its position there.
    Wait {
        stream: u8,
        position: u32,
    },
    Meet {
        communicator: u32,
    },
}

#[derive(Clone, Copy)]
struct Item {
    action: Action,
    /// Position in the schedule, and in the segment's body.
    call: u32,
    instr: u32,
}

struct Ranks {
    streams: Vec<Vec<Item>>,
    done: Vec<usize>,
}

pub(super) fn check(program: &Program, report: &mut Report) {
    let mut communicators: BTreeMap<Communicator, u32> = BTreeMap::new();
    let mut stages: Vec<Ranks> = Vec::new();
    for (index, stage) in program.stages.iter().enumerate() {
        stages.push(queue(index as u32, stage, &mut communicators));
    }
    let members: BTreeMap<u32, (Communicator, Vec<u32>)> = communicators.into_iter().map(|(c, id)| (id, (c.clone(), c.members()))).collect();
    let sizes: Vec<usize> = members.values().map(|(_, m)| m.len()).collect();
    // Which streams stand at each communicator's next operation.
    let mut arrived: Vec<Vec<(usize, usize)>> = vec![Vec::new(); sizes.len()];
    let mut ready: Vec<usize> = (0..stages.len()).collect();
    while let Some(stage) = ready.pop() {
        while advance(stage, &mut stages, &mut arrived, &sizes, &mut ready) {}
    }
    let stuck = |ranks: &Ranks| ranks.streams.iter().zip(&ranks.done).any(|(s, &d)| d < s.len());
    if stages.iter().any(stuck) {
        explain(program, &stages, &members, report);
    }
}

/// The actions of a stage's streams, in issue order.
fn queue(index: u32, stage: &StageProgram, communicators: &mut BTreeMap<Communicator, u32>) -> Ranks {
    enum Static {
        Record(usize),
        Wait(usize),
        Meet(u32),
    }
    // Only communicators between stages, and those that several streams use, can hold anything.
    let mut streams_of: BTreeMap<Communicator, BTreeSet<Stream>> = BTreeMap::new();
    for issue in stage.segments.values().flat_map(|s| &s.body) {
        if let Some(communicator) = Communicator::of(index, &issue.instr) {
            streams_of.entry(communicator).or_default().insert(issue.stream);
        }
    }
    let bodies = stage.segments.map(|_, segment| {
        let mut body = Vec::new();
        for (at, issue) in segment.body.iter().enumerate() {
            let action = match issue.instr {
                Instr::Record(event) => Static::Record(event.index()),
                Instr::Wait(event) => Static::Wait(event.index()),
                _ => match Communicator::of(index, &issue.instr) {
                    Some(c) if c.members().len() > 1 || streams_of[&c].len() > 1 => {
                        let next = communicators.len() as u32;
                        Static::Meet(*communicators.entry(c).or_insert(next))
                    }
                    Some(_) | None => continue,
                },
            };
            body.push((action, issue.stream as usize, at as u32));
        }
        body
    });
    let local: BTreeSet<u32> = communicators.iter().filter(|(c, _)| c.members().len() == 1).map(|(_, &id)| id).collect();
    let mut streams: Vec<Vec<Item>> = vec![Vec::new(); Stream::ALL.len()];
    let mut latest: Vec<Option<(usize, u32)>> = vec![None; stage.events as usize];
    let mut previous: Vec<Option<(usize, u32)>> = vec![None; communicators.len()];
    for (call_at, call) in stage.schedule.iter().enumerate() {
        for &(ref action, stream, instr) in &bodies[call.segment] {
            let mut push = |action| {
                streams[stream].push(Item { action, call: call_at as u32, instr });
                (stream, streams[stream].len() as u32 - 1)
            };
            // What is behind in the same stream needs no waiting for.
            let wait =
                |after: Option<(usize, u32)>| after.filter(|&(of, _)| of != stream).map(|(of, position)| Action::Wait { stream: of as u8, position });
            match *action {
                Static::Record(event) => latest[event] = Some(push(Action::Pass)),
                Static::Wait(event) => {
                    wait(latest[event]).map(&mut push);
                }
                Static::Meet(communicator) => {
                    wait(previous[communicator as usize]).map(&mut push);
                    let action = if local.contains(&communicator) { Action::Pass } else { Action::Meet { communicator } };
                    previous[communicator as usize] = Some(push(action));
                }
            }
        }
    }
    let done = vec![0; streams.len()];
    Ranks { streams, done }
}

/// Moves every stream of a stage as far as it goes; whether any moved.
fn advance(at: usize, stages: &mut [Ranks], arrived: &mut [Vec<(usize, usize)>], sizes: &[usize], ready: &mut Vec<usize>) -> bool {
    let mut moved = false;
    for stream in 0..stages[at].streams.len() {
        while let Some(item) = stages[at].streams[stream].get(stages[at].done[stream]) {
            match item.action {
                Action::Pass => {}
                Action::Wait { stream: of, position } => {
                    if stages[at].done[of as usize] <= position as usize {
                        break;
                    }
                }
                Action::Meet { communicator } => {
                    let here = &mut arrived[communicator as usize];
                    if !here.contains(&(at, stream)) {
                        if here.iter().any(|&(stage, _)| stage == at) {
                            break;
                        }
                        here.push((at, stream));
                    }
                    if here.len() < sizes[communicator as usize] {
                        break;
                    }
                    for (other, its) in std::mem::take(here) {
                        if other != at {
                            stages[other].done[its] += 1;
                            ready.push(other);
                        }
                    }
                }
            }
            stages[at].done[stream] += 1;
            moved = true;
        }
    }
    moved
}

/// Follows who waits for whom from some stuck stream until a stream comes up again, and reports that cycle; or the end of the line, where a stage is done
/// and will never come.
fn explain(program: &Program, stages: &[Ranks], members: &BTreeMap<u32, (Communicator, Vec<u32>)>, report: &mut Report) {
    let head = |(stage, stream): (usize, usize)| stages[stage].streams[stream].get(stages[stage].done[stream]).copied();
    let place = |stage: usize, item: Item| {
        let segment = program.stages[stage].schedule[item.call as usize].segment;
        Place::stage(stage).instr(segment, item.instr as usize)
    };
    let waits_for = |at: (usize, usize), item: Item| -> Option<(usize, usize)> {
        match item.action {
            Action::Pass => None,
            Action::Wait { stream, .. } => Some((at.0, stream as usize)),
            Action::Meet { communicator } => {
                let (_, stages_of) = &members[&communicator];
                stages_of.iter().map(|&s| s as usize).filter(|&s| s != at.0).find_map(|other| {
                    let next = |stream: usize| {
                        let left = &stages[other].streams[stream][stages[other].done[stream]..];
                        left.iter().position(|i| matches!(i.action, Action::Meet { communicator: c } if c == communicator))
                    };
                    // A stage that stands at the operation too waits for yet another.
                    let streams = (0..stages[other].streams.len()).filter_map(|s| next(s).map(|distance| (distance, s)));
                    streams.min().filter(|&(distance, _)| distance > 0).map(|(_, stream)| (other, stream))
                })
            }
        }
    };
    let all = stages.iter().enumerate().flat_map(|(s, r)| (0..r.streams.len()).map(move |stream| (s, stream)));
    let Some(start) = all.into_iter().find(|&at| head(at).is_some()) else { return };
    let (mut path, mut at): (Vec<((usize, usize), Item)>, _) = (Vec::new(), start);
    let cycle = loop {
        if let Some(first) = path.iter().position(|(seen, _)| *seen == at) {
            break Some(first);
        }
        let Some(item) = head(at) else { break None };
        path.push((at, item));
        match waits_for(at, item) {
            Some(next) => at = next,
            None => break None,
        }
    };
    let line = |&(at, item): &((usize, usize), Item)| {
        let call = program.stages[at.0].schedule[item.call as usize];
        let what = match item.action {
            Action::Pass => "nothing".to_string(),
            Action::Wait { stream, .. } => Stream::ALL[stream as usize].name().to_string(),
            Action::Meet { communicator } => members[&communicator].0.describe(),
        };
        let segment: SegmentId = call.segment;
        format!("stage {} {} at {segment}[{}] of micro-batch {} waits for {what}", at.0, Stream::ALL[at.1].name(), item.instr, call.micro_batch)
    };
    let shown = &path[cycle.unwrap_or(0)..];
    let lines: Vec<String> = shown.iter().map(line).collect();
    let end = if cycle.is_some() { "; and so round: a cycle" } else { ", which never comes" };
    let (at, item) = shown[0];
    report.push(Class::Deadlock, place(at.0, item), format!("{}{end}", lines.join("; ")));
}
