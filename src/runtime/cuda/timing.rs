//! When a rank's device ran what.
//!
//! Each instruction of the schedule that does something has two events that take the time, one before its calls and one behind them, on its own stream; waits stand before the
//! first. What a product's kernel does besides the product has the product's name. A step is timed from the event that begins it. Graphs have no such events: a rank that records is launched call by call.

use dplan_ir::program::{Program, Stream};

use super::driver::{Driver, DriverError, Event, Queue};
use super::flight::family;
use super::load::{Action, Code};
use crate::runtime::Span;

/// The events of a step's instructions, and whose they are, in issue order.
pub struct Timing {
    begin: Event,
    places: Vec<(Span, [Event; 2])>,
    /// Instructions of this step so far.
    next: usize,
    /// When the step was queued, nanoseconds since the session began.
    queued: u64,
    /// What was run since it was last taken.
    spans: Vec<Span>,
}

impl Timing {
    /// Makes the events, by `event`.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn new(program: &Program, code: &Code, mut event: impl FnMut() -> Result<Event, DriverError>) -> Result<Timing, DriverError> {
        let (begin, mut places) = (event()?, Vec::new());
        let named: Vec<Vec<usize>> = code.segments.iter().map(|actions| named(actions)).collect();
        for call in &program.stages[code.stage].schedule {
            for (at, (stream, action)) in code.segments[call.segment.0 as usize].iter().enumerate() {
                if is_timed(action) {
                    let communicator = family(action).map(|f| f as u32);
                    let micro_batch = call.micro_batch as u32;
                    let at = named[call.segment.0 as usize][at] as u32;
                    let span = Span { segment: call.segment, at, micro_batch, stream: *stream, communicator, start: 0, end: 0 };
                    places.push((span, [event()?, event()?]));
                }
            }
        }
        Ok(Timing { begin, places, next: 0, queued: 0, spans: Vec::new() })
    }
    /// Begins a step on the stream on which all others wait.
    ///
    /// # Errors
    /// As [`Timing::new`].
    pub fn begin<D: Driver>(&mut self, driver: &mut D, stream: Queue, now: u64) -> Result<(), DriverError> {
        (self.next, self.queued) = (0, now);
        driver.record(self.begin, stream)
    }
    /// Before the calls of an instruction.
    ///
    /// # Errors
    /// As [`Timing::new`].
    pub fn before<D: Driver>(&mut self, driver: &mut D, action: &Action, stream: Queue) -> Result<(), DriverError> {
        if is_timed(action) { driver.record(self.places[self.next].1[0], stream) } else { Ok(()) }
    }
    /// Behind them.
    ///
    /// # Errors
    /// As [`Timing::new`].
    pub fn after<D: Driver>(&mut self, driver: &mut D, action: &Action, stream: Queue) -> Result<(), DriverError> {
        if !is_timed(action) {
            return Ok(());
        }
        self.next += 1;
        driver.record(self.places[self.next - 1].1[1], stream)
    }
    /// Reads the times of a step that has ended.
    ///
    /// # Errors
    /// As [`Timing::new`].
    pub fn end<D: Driver>(&mut self, driver: &mut D) -> Result<(), DriverError> {
        for (span, events) in &self.places[..self.next] {
            let [start, end] = events.map(|event| driver.elapsed(self.begin, event));
            self.spans.push(Span { start: self.queued + start?, end: self.queued + end?, ..*span });
        }
        Ok(())
    }
    pub fn take(&mut self) -> Vec<Span> {
        std::mem::take(&mut self.spans)
    }
}

/// The instruction by whose name each is told: what a kernel does besides is that of the first of them.
fn named(actions: &[(Stream, Action)]) -> Vec<usize> {
    let mut named: Vec<usize> = (0..actions.len()).collect();
    for (at, (_, action)) in actions.iter().enumerate() {
        if let Action::Within(to) = action {
            named[*to] = named[*to].min(at);
        }
    }
    named
}

/// Events take no time.
fn is_timed(action: &Action) -> bool {
    match action {
        Action::Record(_) | Action::Wait(_) | Action::Within(_) | Action::Nothing => false,
        Action::Run { .. }
        | Action::Input { .. }
        | Action::Slice { .. }
        | Action::Copy { .. }
        | Action::Collective(_)
        | Action::Send(_)
        | Action::Recv(_)
        | Action::Zero { .. } => true,
    }
}
