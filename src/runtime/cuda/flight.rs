//! A flight recorder: how far each stream of a rank has come with what it does together with others.
//!
//! Behind each collective and message of the schedule its stream copies that one's number to pinned memory, where the host can read it while the device hangs, or after it failed.
//! That is four bytes by the copy engine, captured in graphs like all else. If a step does not end, the first that is not behind a stream is what it waits at.

use dplan_ir::program::{Program, Stream};

use super::driver::{Address, Driver, DriverError, Pinned, Queue};
use super::load::{Action, Code};

/// Bytes of a number.
const NUMBER: u64 = 4;

/// What is done together with others, in issue order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    pub stream: Stream,
    pub segment: usize,
    pub at: usize,
    pub micro_batch: u64,
    pub family: usize,
}

pub struct Flight {
    marks: Vec<Mark>,
    /// On the device: the numbers of marks, from 1 on.
    numbers: Address,
    /// Of each stream, its last.
    reached: Pinned,
    /// Marks of this step so far.
    next: usize,
}

/// Which family an action meets in, if it meets anybody.
pub fn family(action: &Action) -> Option<usize> {
    match action {
        Action::Collective(c) => Some(c.family),
        Action::Send(t) | Action::Recv(t) => Some(t.family),
        Action::Run { .. }
        | Action::Input { .. }
        | Action::Slice { .. }
        | Action::Copy { .. }
        | Action::Zero { .. }
        | Action::Record(_)
        | Action::Wait(_)
        | Action::Within(_)
        | Action::Nothing => None,
    }
}

/// The marks of a step.
pub fn marks(program: &Program, code: &Code) -> Vec<Mark> {
    let mut marks = Vec::new();
    for call in &program.stages[code.stage].schedule {
        let segment = call.segment.0 as usize;
        for (at, (stream, action)) in code.segments[segment].iter().enumerate() {
            marks.extend(family(action).map(|family| Mark { stream: *stream, segment, at, micro_batch: call.micro_batch, family }));
        }
    }
    marks
}

impl Flight {
    pub const REACHED_BYTES: u64 = NUMBER * Stream::ALL.len() as u64;
    /// What `numbers` must hold.
    pub fn numbers(marks: &[Mark]) -> Vec<u8> {
        (1..=marks.len() as u32).flat_map(u32::to_le_bytes).collect()
    }
    pub fn new(marks: Vec<Mark>, numbers: Address, reached: Pinned) -> Flight {
        Flight { marks, numbers, reached, next: 0 }
    }
    /// Begins a step: nothing of the one before is under way.
    pub fn begin<D: Driver>(&mut self, driver: &mut D) {
        self.next = 0;
        driver.pinned(self.reached).fill(0);
    }
    /// Behind the calls of an action that meets others.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn mark<D: Driver>(&mut self, driver: &mut D, stream: (Stream, Queue)) -> Result<(), DriverError> {
        let from = self.numbers.plus(NUMBER * self.next as u64);
        self.next += 1;
        driver.copy_out(self.reached, NUMBER * stream.0 as u64, from, NUMBER, stream.1)
    }
    /// Of each stream the first mark that it is not behind.
    pub fn ahead<D: Driver>(&self, driver: &mut D) -> Vec<Mark> {
        let reached = driver.pinned(self.reached);
        let of = |stream: Stream| {
            let bytes = &reached[(NUMBER * stream as u64) as usize..][..NUMBER as usize];
            let number = u32::from_le_bytes(bytes.try_into().unwrap_or_default()) as usize;
            self.marks.iter().skip(number).find(|mark| mark.stream == stream).copied()
        };
        Stream::ALL.into_iter().filter_map(of).collect()
    }
}
