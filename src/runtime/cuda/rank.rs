//! One rank on one device: what it holds from step to step, and the calls of a step.
//!
//! A step is queued whole: first the step's scalars are copied in and every stream is made to wait for that; then the schedule's instructions, in issue order, each on its
//! own stream; last the compute stream waits for all others and copies the results out. So a step needs one `synchronise`, and the calls between are the same every step:
//! they are made twice, once to be done, once to be captured; later steps replay the graph ([`Launch`]).
//!
//! **Memory.** The arena is the program's. Besides it: the scalars, and for each stream as much working memory as its kernels need at once. Inputs lie in pinned memory,
//! a place for each time the step loads one, so that nothing that is queued is overwritten.

use std::collections::HashMap;

use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{DecayGroups, StepScalars};
use dplan_ir::program::{Program, Scalar, Stream};
use dplan_kernels::cuda::library::Matmul;
use dplan_kernels::cuda::{self, Arg, Routine, SCALAR_BYTES};

use super::driver::{Access, Address, Captured, Communicator, Driver, DriverError, Event, Exchange, Kernel, Pinned, Queue, Rows, Value};
use super::load::{Action, Code, Collective, Transfer, load};
use crate::runtime::block::Block;
use crate::runtime::view::Place;
use crate::runtime::{self, Batch, RuntimeError};
use crate::safetensors::{decode, encode};

const STREAMS: usize = Stream::ALL.len();
/// Where in pinned memory results are: loss, then the square of the gradients' norm.
const RESULTS: u64 = SCALAR_BYTES.next_multiple_of(16);
const INPUTS: u64 = (RESULTS + 16).next_multiple_of(64);

/// What was taken from the driver, in order.
#[derive(Clone, Copy, Debug)]
enum Taken {
    Memory(Address),
    Pinned(Pinned),
    Stream(Queue),
    Event(Event),
    Kernel(Kernel),
    Communicator(Communicator),
    Graph(Captured),
}

/// How the calls of a step reach the device, from the second step on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Launch {
    /// All at once, as one graph.
    #[default]
    Graph,
    /// One by one, in every step: for a driver or a NCCL that cannot capture, or a tool that should see each call.
    Each,
}

/// A rank that runs steps.
pub struct Rank<D: Driver> {
    driver: D,
    code: Code,
    held: Held,
    taken: Vec<Taken>,
    /// Whether a call failed, here or at a peer: nothing more is asked of the device.
    failed: bool,
    launch: Launch,
    calling: Calling,
}

/// Where everything is that calls name.
#[derive(Default)]
struct Held {
    arena: Option<Address>,
    scalars: Option<Address>,
    working: [Option<Address>; STREAMS],
    streams: Vec<Queue>,
    events: Vec<Event>,
    /// One that begins a step, then one that ends each stream's.
    edges: Vec<Event>,
    /// Of each action of each segment, launch by launch.
    kernels: Vec<Vec<Vec<Kernel>>>,
    /// Of each family of the program; none where this rank is in no group of it.
    communicators: Vec<Option<Communicator>>,
    pinned: Option<Pinned>,
}

/// How the calls of the next step are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Calling {
    /// One by one: the first step's at least, since libraries make themselves ready meanwhile.
    Each,
    /// One by one, to be captured, then all at once.
    Capture,
    Replay(Captured),
}

/// What a rank reports of a step; `None` where its stage does not have it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Results {
    pub loss: Option<f64>,
    pub norm_squared: Option<f64>,
}

impl<D: Driver> Rank<D> {
    /// Makes a rank ready: memory, streams, events, kernels, communicators. Every rank of the program makes its own, at the same time where they are processes.
    ///
    /// # Errors
    /// What in the program no kernel does, and what the device refuses.
    pub fn new(mut driver: D, graph: &Graph, program: &Program, rank: u64, decay: DecayGroups) -> Result<Rank<D>, RuntimeError> {
        let ranks = program.mesh.ranks();
        let code = load(graph, program, (rank / ranks) as usize, rank % ranks, decay, driver.target())?;
        let mut taken = Vec::new();
        let made = prepare(&mut driver, program, rank, &code, &mut taken);
        let mut this = Rank { driver, code, held: Held::default(), taken, failed: made.is_err(), launch: Launch::default(), calling: Calling::Each };
        match made {
            Ok(held) => {
                this.held = held;
                Ok(this)
            }
            Err(source) => {
                this.release();
                Err(RuntimeError::Device { rank: rank as usize, source })
            }
        }
    }

    /// How later steps are launched; the first one decides.
    pub fn launch(&mut self, launch: Launch) {
        self.launch = launch;
    }

    /// Queues a whole step.
    ///
    /// # Errors
    /// What the device refuses; after that the rank is done for.
    pub fn issue(&mut self, program: &Program, scalars: &StepScalars, batch: &Batch) -> Result<(), RuntimeError> {
        let queued = self.queue(program, scalars, batch);
        self.noted(queued)
    }
    /// Waits for the step's end.
    ///
    /// # Errors
    /// As [`Rank::issue`].
    pub fn finish(&mut self, program: &Program) -> Result<Results, RuntimeError> {
        let done = self.driver.synchronise();
        self.noted(done)?;
        let Some(pinned) = self.held.pinned else { return Ok(Results::default()) };
        let bytes = self.driver.pinned(pinned);
        let read = |which: usize| {
            let place = result(program, &self.code, which)?;
            Some(decode(place.dtype, &bytes[RESULTS as usize + which * 8..], 0))
        };
        Ok(Results { loss: read(0), norm_squared: read(1) })
    }

    /// Writes bytes of the arena.
    ///
    /// # Errors
    /// As [`Rank::issue`].
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), RuntimeError> {
        let wrote = self.copy(offset, bytes.len() as u64, &mut |memory, at| memory.copy_from_slice(&bytes[at..][..memory.len()]), Access::Write);
        self.noted(wrote)
    }
    /// Reads bytes of the arena.
    ///
    /// # Errors
    /// As [`Rank::issue`].
    pub fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        let read = self.copy(offset, bytes.len() as u64, &mut |memory, at| bytes[at..][..memory.len()].copy_from_slice(memory), Access::Read);
        self.noted(read)
    }

    /// Asks nothing more of the device, and leaves no communicator in order: a peer failed.
    pub fn give_up(&mut self) {
        self.failed = true;
    }

    pub fn stage(&self) -> usize {
        self.code.stage
    }
    pub fn local_rank(&self) -> u64 {
        self.code.local_rank
    }
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// Queues a step, as its turn is.
    fn queue(&mut self, program: &Program, scalars: &StepScalars, batch: &Batch) -> Result<(), DriverError> {
        let (Some(pinned), Some(&compute)) = (self.held.pinned, self.held.streams.get(Stream::Compute as usize)) else { return Ok(()) };
        // Inputs are written before anything that reads pinned memory is queued.
        provide(self.driver.pinned(pinned), &self.code, program, scalars, batch);
        let (driver, held, code) = (&mut self.driver, &self.held, &self.code);
        self.calling = match self.calling {
            Calling::Each => {
                queue(driver, held, code, program)?;
                match self.launch {
                    Launch::Graph => Calling::Capture,
                    Launch::Each => Calling::Each,
                }
            }
            Calling::Capture => {
                driver.begin_capture(compute)?;
                let queued = queue(driver, held, code, program);
                // Whatever became of the calls: an open capture holds what it has captured.
                let ended = driver.end_capture(compute);
                self.taken.extend(ended.as_ref().ok().map(|graph| Taken::Graph(*graph)));
                queued?;
                let graph = ended?;
                driver.replay(graph, compute)?;
                Calling::Replay(graph)
            }
            Calling::Replay(graph) => {
                driver.replay(graph, compute)?;
                Calling::Replay(graph)
            }
        };
        Ok(())
    }

    /// Goes through a range of the arena by way of pinned memory, a stretch at a time.
    fn copy(&mut self, offset: u64, bytes: u64, touch: &mut dyn FnMut(&mut [u8], usize), access: Access) -> Result<(), DriverError> {
        const STRETCH: u64 = 16 << 20;
        let (Some(arena), Some(&stream)) = (self.held.arena, self.held.streams.first()) else { return Ok(()) };
        if bytes == 0 {
            return Ok(());
        }
        let pinned = self.driver.pin(bytes.min(STRETCH))?;
        self.taken.push(Taken::Pinned(pinned));
        let mut at = 0;
        while at < bytes {
            let n = (bytes - at).min(STRETCH);
            let place = arena.plus(offset + at);
            if access == Access::Write {
                touch(&mut self.driver.pinned(pinned)[..n as usize], at as usize);
                self.driver.copy_in(place, pinned, 0, n, stream)?;
                self.driver.synchronise()?;
            } else {
                self.driver.copy_out(pinned, 0, place, n, stream)?;
                self.driver.synchronise()?;
                touch(&mut self.driver.pinned(pinned)[..n as usize], at as usize);
            }
            at += n;
        }
        self.taken.pop();
        self.driver.unpin(pinned)
    }

    fn noted<T>(&mut self, result: Result<T, DriverError>) -> Result<T, RuntimeError> {
        self.failed |= result.is_err();
        let rank = self.code.rank as usize;
        result.map_err(|source| RuntimeError::Device { rank, source })
    }

    /// Gives everything back, last first. Communicators of a rank that failed are aborted before anything else but graphs: their peers may be inside, and NCCL ends no
    /// communicator before the graphs that captured its calls.
    fn release(&mut self) {
        if self.failed {
            for taken in &self.taken {
                if let Taken::Graph(g) = taken {
                    let _ = self.driver.discard(*g);
                }
            }
            for taken in &self.taken {
                if let Taken::Communicator(c) = taken {
                    let _ = self.driver.abort(*c);
                }
            }
            self.taken.retain(|t| !matches!(t, Taken::Communicator(_) | Taken::Graph(_)));
        }
        for taken in self.taken.drain(..).rev() {
            // There is nobody left to tell of an error; the process's end gives back the rest.
            let _ = match taken {
                Taken::Memory(at) => self.driver.free(at),
                Taken::Pinned(p) => self.driver.unpin(p),
                Taken::Stream(s) => self.driver.destroy_stream(s),
                Taken::Event(e) => self.driver.destroy_event(e),
                Taken::Kernel(k) => self.driver.unload(k),
                Taken::Communicator(c) => self.driver.leave(c),
                Taken::Graph(g) => self.driver.discard(g),
            };
        }
    }
}

impl<D: Driver> Drop for Rank<D> {
    fn drop(&mut self) {
        self.release();
    }
}

/// Takes from the driver what a rank needs; `taken` has it also when a call fails.
fn prepare<D: Driver>(driver: &mut D, program: &Program, rank: u64, code: &Code, taken: &mut Vec<Taken>) -> Result<Held, DriverError> {
    let mut held = Held::default();
    let mut memory = |driver: &mut D, bytes: u64| -> Result<Option<Address>, DriverError> {
        if bytes == 0 {
            return Ok(None);
        }
        let at = driver.allocate(bytes)?;
        taken.push(Taken::Memory(at));
        Ok(Some(at))
    };
    held.arena = memory(driver, program.stages[code.stage].arena_bytes)?;
    held.scalars = memory(driver, SCALAR_BYTES)?;
    for (at, bytes) in held.working.iter_mut().zip(code.working) {
        *at = memory(driver, bytes)?;
    }
    let pinned = driver.pin(INPUTS + input_bytes(code, program))?;
    taken.push(Taken::Pinned(pinned));
    held.pinned = Some(pinned);
    for _ in 0..STREAMS {
        let stream = driver.create_stream()?;
        taken.push(Taken::Stream(stream));
        held.streams.push(stream);
    }
    for at in 0..program.stages[code.stage].events as usize + STREAMS {
        let event = driver.create_event()?;
        taken.push(Taken::Event(event));
        if at < STREAMS { held.edges.push(event) } else { held.events.push(event) }
    }
    // Launches of one text that need different amounts of shared memory are loaded apart, since a kernel is told how much it may take; so are products of different sizes that a
    // library may compute.
    let mut loaded: HashMap<(&str, &str, u32, Option<Matmul>), Kernel> = HashMap::new();
    for segment in &code.segments {
        let mut of_segment = Vec::with_capacity(segment.len());
        for (_, action) in segment {
            let mut of_action = Vec::new();
            for launch in action.routines().flat_map(|r| &r.launches) {
                let key = (&launch.text[..], launch.entry, launch.shared, launch.instead);
                let kernel = match loaded.get(&key) {
                    Some(kernel) => *kernel,
                    None => {
                        let kernel = driver.load(launch)?;
                        taken.push(Taken::Kernel(kernel));
                        loaded.insert(key, kernel);
                        kernel
                    }
                };
                of_action.push(kernel);
            }
            of_segment.push(of_action);
        }
        held.kernels.push(of_segment);
    }
    for (number, family) in code.families.iter().enumerate() {
        let communicator = driver.split(number as u64, family.members(program, rank).as_deref())?;
        taken.extend(communicator.map(Taken::Communicator));
        held.communicators.push(communicator);
    }
    // All memory is zero before the first step: padding stays so.
    if let (Some(arena), Some(&stream)) = (held.arena, held.streams.first()) {
        driver.zero(arena, program.stages[code.stage].arena_bytes, stream)?;
        driver.synchronise()?;
    }
    Ok(held)
}

/// Pinned bytes that the inputs of a step need.
fn input_bytes(code: &Code, program: &Program) -> u64 {
    let of = |action: &Action| match action {
        Action::Input { dst, .. } => dst.bytes,
        _ => 0,
    };
    let segment = |at: usize| code.segments[at].iter().map(|(_, a)| of(a)).sum::<u64>();
    program.stages[code.stage].schedule.iter().map(|call| segment(call.segment.0 as usize)).sum()
}

/// The buffer of a result.
fn result(program: &Program, code: &Code, which: usize) -> Option<Place> {
    let scalar = [Scalar::Loss, Scalar::NormSquared][which];
    let stage = &program.stages[code.stage];
    let buffer = &stage.buffers[stage.accumulates(scalar)?];
    let offset = buffer.offset_at(0, &program.mesh, code.local_rank);
    Some(Place { offset, stride: buffer.slot_stride, slots: 1, bytes: buffer.bytes, dtype: buffer.dtype })
}

/// What the calls of a step share.
struct Calls<'a, D: Driver> {
    driver: &'a mut D,
    held: &'a Held,
    arena: Address,
    pinned: Pinned,
    scalars: Address,
    /// Pinned bytes that inputs took so far.
    input: u64,
    /// Which events were recorded so far.
    recorded: Vec<bool>,
}

/// Writes what a step takes from the host.
fn provide(memory: &mut [u8], code: &Code, program: &Program, scalars: &StepScalars, batch: &Batch) {
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
fn queue<D: Driver>(driver: &mut D, held: &Held, code: &Code, program: &Program) -> Result<(), DriverError> {
    let (Some(arena), Some(pinned), Some(at)) = (held.arena, held.pinned, held.scalars) else { return Ok(()) };
    let mut calls = Calls { driver, held, arena, pinned, scalars: at, input: INPUTS, recorded: vec![false; held.events.len()] };
    let schedule = &program.stages[code.stage].schedule;
    let compute = held.streams[Stream::Compute as usize];
    calls.driver.copy_in(at, pinned, 0, SCALAR_BYTES, compute)?;
    calls.driver.record(held.edges[Stream::Compute as usize], compute)?;
    for other in 1..STREAMS {
        calls.driver.wait(held.streams[other], held.edges[Stream::Compute as usize])?;
    }
    for call in schedule {
        let segment = call.segment.0 as usize;
        for ((stream, action), kernels) in code.segments[segment].iter().zip(&held.kernels[segment]) {
            calls.act(*stream as usize, action, kernels, call.micro_batch)?;
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
            Action::Nothing => Ok(()),
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
            let value = |arg: &Arg| -> Result<Value, DriverError> {
                Ok(match *arg {
                    Arg::In(i) => ins[i],
                    Arg::Out(i) => outs[i],
                    Arg::Tensor(i, map) => match ins[i] {
                        Value::Memory { at, bytes, .. } => Value::Tensor { at, bytes, map },
                        other @ (Value::Tensor { .. } | Value::Int(_)) => other,
                    },
                    Arg::Aux(at) => {
                        let place = self.working(on)?.plus(skip.next_multiple_of(256) + at);
                        Value::Memory { at: place, bytes: routine.aux - at, access: Access::Write }
                    }
                    Arg::Scalars => Value::Memory { at: self.scalars, bytes: SCALAR_BYTES, access: Access::Read },
                    Arg::Int(i) => Value::Int(i),
                    Arg::MicroBatch(i) => Value::Int(i * micro as i64),
                })
            };
            let args = launch.args.iter().map(value).collect::<Result<Vec<_>, _>>()?;
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
