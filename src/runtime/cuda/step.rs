//! The calls of a step.
//!
//! First the step's scalars are copied in and every stream is made to wait for that; then the schedule's instructions, in issue order, each on its own stream; last the compute
//! stream waits for all others and copies the results out.

use dplan_ir::dtype::DType;
use dplan_ir::optimizer::StepScalars;
use dplan_ir::program::{Program, Scalar, Stream};
use dplan_kernels::cuda::{self, Arg, Routine, SCALAR_BYTES};

use super::disk::Disk;
use super::driver::{Access, Address, Communicator, Driver, DriverError, Exchange, Kernel, Pinned, Rows, Value};
use super::flight::{Flight, family};
use super::load::{Action, Away, Code, Collective, Transfer};
use super::rank::{Held, STREAMS};
use super::timing::Timing;
use crate::runtime::block::Block;
use crate::runtime::scratch::Way;
use crate::runtime::view::Place;
use crate::runtime::{self, Batch};
use crate::safetensors::encode;

/// Where in pinned memory results are: loss, then the square of the gradients' norm.
pub const RESULTS: u64 = SCALAR_BYTES.next_multiple_of(16);
pub const INPUTS: u64 = (RESULTS + 16).next_multiple_of(64);

/// Pinned bytes that the inputs of a step need.
pub fn input_bytes(code: &Code, program: &Program) -> u64 {
    let of = |action: &Action| match action {
        Action::Input { dst, .. } => dst.bytes,
        _ => 0,
    };
    let segment = |at: usize| code.segments[at].iter().map(|(_, a)| of(a)).sum::<u64>();
    program.stages[code.stage].schedule.iter().map(|call| segment(call.segment.0 as usize)).sum()
}

/// The buffer of a result.
pub fn result(program: &Program, code: &Code, which: usize) -> Option<Place> {
    let scalar = [Scalar::Loss, Scalar::NormSquared][which];
    let stage = &program.stages[code.stage];
    let buffer = &stage.buffers[stage.accumulates(scalar)?];
    let offset = buffer.offset_at(0, &program.mesh, code.local_rank);
    Some(Place { offset, stride: buffer.slot_stride, slots: 1, bytes: buffer.bytes, dtype: buffer.dtype })
}

/// What only some ranks have.
#[derive(Default)]
pub struct Beside<'a> {
    pub disk: Option<&'a mut Disk>,
    pub timing: Option<&'a mut Timing>,
    pub flight: Option<&'a mut Flight>,
    /// Nanoseconds since the session began.
    pub now: u64,
}

/// What the calls of a step share.
struct Calls<'a, D: Driver> {
    driver: &'a mut D,
    held: &'a Held,
    disk: Option<&'a mut Disk>,
    timing: Option<&'a mut Timing>,
    flight: Option<&'a mut Flight>,
    arena: Address,
    pinned: Pinned,
    scalars: Address,
    /// Pinned bytes that inputs took so far.
    input: u64,
    /// Which events were recorded so far.
    recorded: Vec<bool>,
}

/// Writes what a step takes from the host.
pub fn provide(memory: &mut [u8], code: &Code, program: &Program, scalars: &StepScalars, batch: &Batch) {
    let bytes = cuda::scalars(scalars).map(f64::to_le_bytes);
    memory[..SCALAR_BYTES as usize].copy_from_slice(bytes.as_flattened());
    let mut at = INPUTS as usize;
    for call in &program.stages[code.stage].schedule {
        for (_, action) in &code.segments[call.segment.0 as usize] {
            if let Action::Input { dst, input, block, step } = action {
                let to = &mut memory[at..][..dst.bytes as usize];
                fill(&batch.inputs[*input], block, (call.micro_batch * step) as usize, dst.dtype, to);
                at += dst.bytes as usize;
            }
        }
    }
}

/// Queues a step, for which everything was provided.
pub fn queue<D: Driver>(driver: &mut D, held: &Held, beside: Beside<'_>, code: &Code, program: &Program) -> Result<(), DriverError> {
    let Beside { mut disk, timing, flight, now } = beside;
    disk.iter_mut().for_each(|disk| disk.begin());
    let (Some(arena), Some(pinned), Some(at)) = (held.arena, held.pinned, held.scalars) else { return Ok(()) };
    let mut calls = Calls { driver, held, disk, timing, flight, arena, pinned, scalars: at, input: INPUTS, recorded: vec![false; held.events.len()] };
    let schedule = &program.stages[code.stage].schedule;
    let compute = held.streams[Stream::Compute as usize];
    calls.driver.copy_in(at, pinned, 0, SCALAR_BYTES, compute)?;
    if let Some(timing) = &mut calls.timing {
        timing.begin(calls.driver, compute, now)?;
    }
    calls.driver.record(held.edges[Stream::Compute as usize], compute)?;
    for other in 1..STREAMS {
        calls.driver.wait(held.streams[other], held.edges[Stream::Compute as usize])?;
    }
    for call in schedule {
        let segment = call.segment.0 as usize;
        for ((stream, action), kernels) in code.segments[segment].iter().zip(&held.kernels[segment]) {
            if let Some(timing) = &mut calls.timing {
                timing.before(calls.driver, action, held.streams[*stream as usize])?;
            }
            calls.act(*stream as usize, action, kernels, call.micro_batch)?;
            if let Some(timing) = &mut calls.timing {
                timing.after(calls.driver, action, held.streams[*stream as usize])?;
            }
            if let (Some(flight), Some(_)) = (&mut calls.flight, family(action)) {
                flight.mark(calls.driver, (*stream, held.streams[*stream as usize]))?;
            }
        }
    }
    for other in 1..STREAMS {
        calls.driver.record(held.edges[other], held.streams[other])?;
        calls.driver.wait(compute, held.edges[other])?;
    }
    for which in 0..2 {
        if let Some(place) = result(program, code, which) {
            calls.driver.copy_out(pinned, RESULTS + which as u64 * 8, arena.plus(place.offset), place.bytes, compute)?;
        }
    }
    Ok(())
}

impl<D: Driver> Calls<'_, D> {
    fn act(&mut self, on: usize, action: &Action, kernels: &[Kernel], micro: u64) -> Result<(), DriverError> {
        let stream = self.held.streams[on];
        let at = |p: &Place| self.arena.plus(p.at(micro));
        let memory = |p: &Place, access: Access| Value::Memory { at: at(p), bytes: p.bytes, access };
        match action {
            Action::Run { routine, ins, outs } => {
                let ins: Vec<Value> = ins.iter().map(|p| memory(p, Access::Read)).collect();
                let outs: Vec<Value> = outs.iter().map(|p| memory(p, Access::Write)).collect();
                self.run((on, micro), (routine, kernels), 0, &ins, &outs)
            }
            Action::Input { dst, .. } => {
                let from = self.input;
                self.input += dst.bytes;
                self.driver.copy_in(at(dst), self.pinned, from, dst.bytes, stream)
            }
            Action::Slice { src, dst, row, start, len } => {
                let (from, to) = (at(src).plus(*start), at(dst));
                let rows = Rows { from, from_pitch: *row, to, to_pitch: *len, width: *len, rows: dst.bytes / (*len).max(1) };
                self.driver.copy_rows(rows, stream)
            }
            Action::Copy { way, device, away: Away::Host(place) } => {
                let host = self.held.host.ok_or_else(|| unknown("cuMemHostAlloc", "memory of the host"))?;
                match way {
                    Way::In => self.driver.copy_in(at(device), host, place.at(micro), place.bytes, stream),
                    Way::Out => self.driver.copy_out(host, place.at(micro), at(device), place.bytes, stream),
                }
            }
            Action::Copy { way, device, away: Away::File(place) } => {
                let (to, disk) = (at(device), self.disk.as_mut().ok_or_else(|| unknown("cuStreamCreate", "a file"))?);
                disk.carry(self.driver, *way, to, place.at(micro), place.bytes, stream)
            }
            Action::Collective(c) => self.collective(on, c, kernels, micro),
            Action::Send(Transfer { family, peer, place }) => self.driver.send(self.communicator(*family)?, *peer, at(place), place.bytes, stream),
            Action::Recv(Transfer { family, peer, place }) => self.driver.receive(self.communicator(*family)?, *peer, at(place), place.bytes, stream),
            Action::Zero { dst } => self.driver.zero(at(dst), dst.bytes, stream),
            Action::Record(event) => {
                self.recorded[event.0 as usize] = true;
                self.driver.record(self.held.events[event.0 as usize], stream)
            }
            // Before its first record of this step an event stands for one of the step before, which has ended.
            Action::Wait(event) if !self.recorded[event.0 as usize] => Ok(()),
            Action::Wait(event) => self.driver.wait(stream, self.held.events[event.0 as usize]),
            Action::Within(_) | Action::Nothing => Ok(()),
        }
    }

    fn collective(&mut self, on: usize, c: &Collective, kernels: &[Kernel], micro: u64) -> Result<(), DriverError> {
        let [src, dst] = [&c.src, &c.dst].map(|p| self.arena.plus(p.at(micro)));
        let (before, after) = kernels.split_at(c.before.as_ref().map_or(0, |r| r.launches.len()));
        let (mut from, mut to) = (src, dst);
        if let Some(routine) = &c.before {
            from = self.working(on)?;
            let whole = Value::Memory { at: src, bytes: c.src.bytes, access: Access::Read };
            self.run((on, micro), (routine, before), c.staging, &[whole], &[Value::Memory { at: from, bytes: c.staging, access: Access::Write }])?;
        }
        if c.after.is_some() {
            to = self.working(on)?;
        }
        let exchange = Exchange { primitive: c.primitive, elems: c.elems, dtype: c.src.dtype, from, to };
        self.driver.exchange(self.communicator(c.family)?, exchange, self.held.streams[on])?;
        match &c.after {
            None => Ok(()),
            Some(routine) => {
                let parts = Value::Memory { at: to, bytes: c.staging, access: Access::Read };
                self.run((on, micro), (routine, after), c.staging, &[parts], &[Value::Memory { at: dst, bytes: c.dst.bytes, access: Access::Write }])
            }
        }
    }

    /// Launches the kernels of a routine on a stream, for a micro-batch; its working memory begins `skip` bytes into the stream's.
    fn run(
        &mut self,
        (on, micro): (usize, u64),
        (routine, kernels): (&Routine, &[Kernel]),
        skip: u64,
        ins: &[Value],
        outs: &[Value],
    ) -> Result<(), DriverError> {
        for (launch, kernel) in routine.launches.iter().zip(kernels) {
            let working = if routine.aux > 0 { self.working(on)?.plus(skip.next_multiple_of(256)) } else { self.scalars };
            let places = Operands { ins, outs, working: (working, routine.aux), scalars: self.scalars, micro };
            let args: Vec<Value> = launch.args.iter().map(|arg| places.value(arg)).collect();
            self.driver.launch(*kernel, launch, &args, self.held.streams[on])?;
        }
        Ok(())
    }

    fn communicator(&self, family: usize) -> Result<Communicator, DriverError> {
        self.held.communicators[family].ok_or_else(|| unknown("ncclCommSplit", "a group that this rank is not in"))
    }
    fn working(&self, on: usize) -> Result<Address, DriverError> {
        self.held.working[on].ok_or_else(|| unknown("cuMemAlloc", "working memory"))
    }
}

/// Where a routine's launches find what they name.
pub struct Operands<'a> {
    pub ins: &'a [Value],
    pub outs: &'a [Value],
    /// Working memory, and its bytes.
    pub working: (Address, u64),
    pub scalars: Address,
    pub micro: u64,
}

impl Operands<'_> {
    pub fn value(&self, arg: &Arg) -> Value {
        match *arg {
            Arg::In(i) => self.ins[i],
            Arg::Out(i) => self.outs[i],
            Arg::Tensor(i, map) => match self.ins[i] {
                Value::Memory { at, bytes, .. } => Value::Tensor { at, bytes, map },
                other @ (Value::Tensor { .. } | Value::Int(_)) => other,
            },
            Arg::Aux(at) => Value::Memory { at: self.working.0.plus(at), bytes: self.working.1 - at, access: Access::Write },
            Arg::Scalars => Value::Memory { at: self.scalars, bytes: SCALAR_BYTES, access: Access::Read },
            Arg::Int(i) => Value::Int(i),
            Arg::MicroBatch(i) => Value::Int(i * self.micro as i64),
        }
    }
}

fn unknown(call: &'static str, what: &str) -> DriverError {
    DriverError { call, why: format!("{what} was not made ready") }
}

/// Writes the block of an input of the step that begins at element `first`; padding is zero.
fn fill(rows: &runtime::Rows, block: &Block, first: usize, dtype: DType, to: &mut [u8]) {
    to.fill(0);
    block.each(|s| {
        for i in 0..s.len {
            let from = first + s.logical + i;
            let v = match rows {
                runtime::Rows::Tokens(rows) => f64::from(rows[from]),
                runtime::Rows::Values(rows) => rows[from],
            };
            encode(dtype, v, to, s.local + i);
        }
    });
}
