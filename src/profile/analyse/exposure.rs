//! Where a rank's time went: its window taken apart without overlap or remainder.
//!
//! What is doing something useful comes first. With C the time in computation, T in transfer, A in waiting for other members of a collective, B in
//! waiting for a message, M in copies, D in preparing input:
//!
//! ```text
//! window = C  +  T∖C  +  A∖(C∪T)  +  B∖…  +  M∖…  +  (rest ∩ D)  +  (rest: the host was late)  +  (rest: idle)
//! ```
//!
//! T∖C is *exposed* transfer; T∩C is *hidden*. The rest is gaps in which nothing runs: the host was late if it launched what ends the gap only after the
//! gap began. On a CPU run a gap between ops is the host's own, unless a receive is pending and the gap is longer than one between ops.

use super::matching::Instance;
use super::spans::Spans;
use super::steps::Steps;
use crate::profile::{CommOp, Kind, Ns, Profile, Rank, classify};

/// A gap of a CPU run that is longer than this while a receive is pending is waiting for the message.
const BETWEEN_OPS: Ns = 100_000;

/// Parts of a window; they add up to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Parts {
    pub compute: Ns,
    /// Exposed transfer of communication.
    pub transfer: Ns,
    /// Exposed waiting for other members of a collective: imbalance.
    pub waiting: Ns,
    /// Exposed waiting for a message of another stage.
    pub bubble: Ns,
    /// Exposed copies.
    pub copies: Ns,
    /// Nothing runs while the host prepares input.
    pub input: Ns,
    /// Nothing runs because the host launches too late.
    pub launch: Ns,
    /// Nothing runs, for no recorded reason.
    pub idle: Ns,
}

impl Parts {
    pub fn window(&self) -> Ns {
        self.compute + self.transfer + self.waiting + self.bubble + self.copies + self.input + self.launch + self.idle
    }

    pub fn add(&mut self, other: &Parts) {
        let parts = [
            (&mut self.compute, other.compute),
            (&mut self.transfer, other.transfer),
            (&mut self.waiting, other.waiting),
            (&mut self.bubble, other.bubble),
            (&mut self.copies, other.copies),
            (&mut self.input, other.input),
            (&mut self.launch, other.launch),
            (&mut self.idle, other.idle),
        ];
        for (sum, part) in parts {
            *sum = sum.saturating_add(part);
        }
    }
}

/// What computation hid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Hidden {
    pub transfer: Ns,
    pub waiting: Ns,
    pub copies: Ns,
}

/// One rank's time.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Exposure {
    pub parts: Parts,
    pub hidden: Hidden,
    /// Time in which any communication was going on.
    pub communication: Ns,
    /// Device time by class of kernel, as [`crate::profile::KernelClass::ALL`]; overlapping kernels count each.
    pub classes: [Ns; 4],
    pub kernels: usize,
    /// Gaps that a late launch ended.
    pub late_launches: usize,
}

/// Takes the window of the rank at position `rank` apart.
pub fn of_rank(profile: &Profile, rank: usize, steps: &Steps, instances: &[Instance]) -> Exposure {
    let record = &profile.ranks[rank];
    let (start, end) = steps.window(record);
    let window = Spans::union_of([(start, end)]);
    let clip = |spans: Spans| spans.and(&window);
    let compute = clip(if record.has_device() { device_compute(record) } else { host_compute(record) });
    let comm = Communication::of(profile, rank, instances);
    let (transfer, waiting, messages) = (clip(comm.transfer), clip(comm.waiting), clip(comm.messages));
    let copies = clip(Spans::union_of(record.events.iter().filter(|e| matches!(e.kind, Kind::Copy(_))).map(|e| (e.start, e.end()))));
    let mut left = window.minus(&compute);
    let mut parts = Parts {
        compute: compute.length(),
        transfer: take(&mut left, &transfer),
        waiting: take(&mut left, &waiting),
        bubble: take(&mut left, &messages),
        copies: take(&mut left, &copies),
        ..Parts::default()
    };
    let input = clip(Spans::union_of(record.ranges().filter(|(_, name)| classify::is_input(name)).map(|(e, _)| (e.start, e.end()))));
    let posted = clip(comm.posted);
    let mut late_launches = 0;
    if record.has_device() {
        parts.input = take(&mut left, &input);
        for gap in gaps(record, &left) {
            if gap.late {
                late_launches += 1;
                parts.launch += gap.length;
            } else {
                parts.idle += gap.length;
            }
        }
    } else {
        let long = Spans::union_of(left.intervals().iter().copied().filter(|(a, b)| b - a > BETWEEN_OPS));
        let pending = posted.and(&long);
        parts.bubble += take(&mut left, &pending);
        parts.input = take(&mut left, &input);
        parts.launch = left.length();
    }
    let all = transfer.or(&waiting).or(&messages);
    let mut classes = [0; 4];
    let mut kernels = 0;
    for event in record.events.iter().filter(|e| e.start >= start && e.start < end) {
        if let Kind::Kernel(class) = event.kind {
            classes[class as usize] = Ns::saturating_add(classes[class as usize], event.duration);
            kernels += 1;
        }
    }
    Exposure {
        hidden: Hidden {
            transfer: transfer.and(&compute).length(),
            waiting: waiting.or(&messages).and(&compute).minus(&transfer).length(),
            copies: copies.and(&compute).length(),
        },
        communication: all.length(),
        parts,
        classes,
        kernels,
        late_launches,
    }
}

/// Moves what is in `spans` out of `left`, and gives its length.
fn take(left: &mut Spans, spans: &Spans) -> Ns {
    let taken = left.and(spans).length();
    *left = left.minus(spans);
    taken
}

fn device_compute(rank: &Rank) -> Spans {
    Spans::union_of(rank.events.iter().filter(|e| matches!(e.kind, Kind::Kernel(_))).map(|e| (e.start, e.end())))
}

/// Ops on every thread, without the communication on the same thread: an autograd op that issues a collective computes only around it.
fn host_compute(rank: &Rank) -> Spans {
    let mut ops: Vec<Vec<(Ns, Ns)>> = vec![Vec::new(); rank.lanes.len()];
    let mut communicates = ops.clone();
    for event in &rank.events {
        match event.kind {
            Kind::Op => ops[event.lane.0 as usize].push((event.start, event.end())),
            Kind::CommCall => communicates[event.lane.0 as usize].push((event.start, event.end())),
            Kind::Kernel(_) | Kind::Comm | Kind::Copy(_) | Kind::Call | Kind::Range => {}
        }
    }
    for comm in rank.comms.iter().filter(|c| !c.posted) {
        communicates[comm.lane.0 as usize].push((comm.start, comm.end()));
    }
    let computes = ops.into_iter().zip(communicates).map(|(ops, comms)| Spans::union_of(ops).minus(&Spans::union_of(comms)));
    Spans::union_of(computes.flat_map(|s| s.intervals().to_vec()))
}

/// The communication of one rank by what it does at each time.
struct Communication {
    transfer: Spans,
    /// In a collective, for the others.
    waiting: Spans,
    /// In a message that runs, for the other side.
    messages: Spans,
    /// A receive is posted and not yet arriving.
    posted: Spans,
}

impl Communication {
    fn of(profile: &Profile, rank: usize, instances: &[Instance]) -> Communication {
        let (mut transfer, mut waiting, mut messages, mut posted) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for instance in instances {
            for member in instance.members.iter().filter(|m| m.rank == rank) {
                let comm = member.of(profile);
                // The transfer is the last part: before it, somebody was still missing.
                let begins = comm.end() - instance.transfer.min(comm.duration);
                if comm.posted {
                    // Of a message the receiver knows when it arrived; a send that was posted is over when somebody asks.
                    if comm.op == CommOp::Recv {
                        transfer.push((begins, comm.end()));
                        posted.push((comm.start, begins));
                    }
                    continue;
                }
                transfer.push((begins, comm.end()));
                let before = if instance.op.point_to_point() { &mut messages } else { &mut waiting };
                before.push((comm.start, begins));
            }
        }
        Communication {
            transfer: Spans::union_of(transfer),
            waiting: Spans::union_of(waiting),
            messages: Spans::union_of(messages),
            posted: Spans::union_of(posted),
        }
    }
}

struct Gap {
    length: Ns,
    late: bool,
}

/// Gaps on a device, each with whether what ended it was launched only after the gap began.
fn gaps<'a>(rank: &'a Rank, left: &'a Spans) -> impl Iterator<Item = Gap> + 'a {
    let device: Vec<(Ns, Option<Ns>)> =
        rank.events.iter().filter(|e| e.kind.on_device() || e.kind == Kind::Comm).map(|e| (e.start, e.launched)).collect();
    left.intervals().iter().map(move |&(start, end)| {
        let next = device.get(device.partition_point(|(s, _)| *s < end));
        let late = next.and_then(|(_, launched)| *launched).is_some_and(|launched| launched > start);
        Gap { length: end - start, late }
    })
}
