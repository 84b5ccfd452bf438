//! What the passes rest on, each alone.

use super::clock::{Clocks, Point};
use super::progress;
use super::sums::{Pending, Spans, Sum, Term};
use super::{Class, Report};
use crate::entity::{BufferId, EventId, SegmentId, ValueId};
use crate::mesh::{AxisSet, Mesh};
use crate::program::{Call, Channel, Instr, Issue, Program, Segment, SegmentKind, StageProgram, Stream};

#[test]
fn a_wait_covers_what_the_record_covered_and_no_more() {
    let mut clocks = Clocks::new(1);
    let before = clocks.issue(Stream::Comm);
    clocks.issue(Stream::Comm);
    clocks.record(Stream::Comm, 0);
    let after = clocks.issue(Stream::Comm);
    clocks.issue(Stream::Compute);
    assert!(!clocks.streams[Stream::Compute as usize].covers(before));
    clocks.wait(Stream::Compute, 0);
    let clock = clocks.streams[Stream::Compute as usize];
    assert!(clock.covers(before) && !clock.covers(after) && clock.covers(Point::default()));
}

#[test]
fn micro_batches_add_up_once_each() {
    let all = [3, 0, 2, 1].iter().try_fold(Spans::default(), |sum, &m| sum.union(&Spans::one(m)));
    assert!(all.as_ref().is_ok_and(|s| *s == Spans::all_below(4)));
    assert_eq!(all.and_then(|s| s.union(&Spans::one(2))), Err(2));
}

#[test]
fn a_running_sum_and_a_sum_of_one_micro_batch_both_shift() {
    let sum = |ms: std::ops::Range<u64>| ms.fold(Spans::default(), |s, m| s.union(&Spans::one(m)).unwrap_or_default());
    assert!(sum(0..7).is_shift_of(&sum(0..5), 2));
    assert!(sum(5..6).is_shift_of(&sum(3..4), 2));
    assert!(!sum(0..6).is_shift_of(&sum(0..5), 2));
    assert!(!sum(5..7).is_shift_of(&sum(3..4), 2));
}

#[test]
fn sums_that_wait_for_different_ranks_do_not_add() {
    let one = |axes| Sum::one(Term::Value(ValueId(0)), 0, Pending { axes: AxisSet(axes), stages: false });
    let two = Sum::one(Term::All, 1, Pending { axes: AxisSet(1), stages: false });
    assert!(one(1).plus(&one(2)).is_err());
    assert!(one(1).plus(&one(1)).is_err());
    assert!(one(1).plus(&two).is_ok_and(|sum| sum.micro_batches(ValueId(0)) == Spans::all_below(2)));
}

fn program(bodies: Vec<Vec<(Stream, Instr)>>) -> Program {
    let stage = |body: Vec<(Stream, Instr)>| {
        let body = body.into_iter().map(|(stream, instr)| Issue { stream, instr }).collect();
        let segments = [Segment { kind: SegmentKind::Forward, body }].into_iter().collect();
        StageProgram { segments, schedule: vec![Call { segment: SegmentId(0), micro_batch: 0 }], events: 2, ..StageProgram::default() }
    };
    Program { mesh: Mesh::new(1, 1), micro_batches: 1, stages: bodies.into_iter().map(stage).collect(), ..Program::default() }
}

fn send(to: u32, channel: Channel) -> Instr {
    Instr::Send { to, channel, src: BufferId(0) }
}
fn recv(from: u32, channel: Channel) -> Instr {
    Instr::Recv { from, channel, dst: BufferId(0) }
}

fn stuck(program: &Program) -> Option<String> {
    let mut report = Report::default();
    progress::check(program, &mut report);
    report.violations.pop().map(|v| {
        assert_eq!(v.class, Class::Deadlock);
        v.message
    })
}

#[test]
fn two_stages_that_both_send_first_wait_for_each_other() {
    use Channel::{Backward, Forward};
    let bodies = |stream| {
        vec![
            vec![(stream, send(1, Forward)), (stream, recv(1, Backward))],
            vec![(Stream::Compute, send(0, Backward)), (Stream::Compute, recv(0, Forward))],
        ]
    };
    let why = stuck(&program(bodies(Stream::Compute))).unwrap_or_default();
    for part in ["stage 0 compute", "the forward channel 0 → 1", "stage 1 compute", "the backward channel 1 → 0", "a cycle"] {
        assert!(why.contains(part), "`{part}` is not in: {why}");
    }
    // On a stream of its own the receive does not wait for the send.
    let mut apart = bodies(Stream::Compute);
    apart[0][1].0 = Stream::RecvBackward;
    assert_eq!(stuck(&program(apart.clone())), None);
    // Unless an event orders it after the send.
    apart[0].splice(1..1, [(Stream::Compute, Instr::Record(EventId(0))), (Stream::RecvBackward, Instr::Wait(EventId(0)))]);
    assert!(stuck(&program(apart)).is_some());
}

#[test]
fn a_stage_that_never_comes_is_named() {
    let why = stuck(&program(vec![vec![(Stream::Compute, send(1, Channel::Forward))], vec![]])).unwrap_or_default();
    assert!(why.contains("which never comes"), "{why}");
}
