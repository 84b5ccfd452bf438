//! One rank on one device: what it holds from step to step, and the calls of a step.
//!
//! A step is queued whole ([`super::step`]), so it needs one `synchronise`, and its calls are the same every step: they are made twice, once to be done, once to be captured;
//! later steps replay the graph ([`Launch`]). A step that touches a file is never captured ([`super::disk`]).
//!
//! **Memory.** The arena is the program's, and so are the memory of the host, one pinned allocation, and the file. Besides these: the scalars, and for each stream as much working
//! memory as its kernels need at once. Inputs lie in pinned memory, a place for each time the step loads one, so that nothing that is queued is overwritten.

use std::collections::HashMap;
use std::time::Instant;

use dplan_ir::entity::SegmentId;
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::StepScalars;
use dplan_ir::program::{Program, Space, Stream};
use dplan_kernels::cuda::SCALAR_BYTES;
use dplan_kernels::cuda::library::Matmul;

use super::disk::{Disk, Parts, piece_bytes};
use super::driver::{Access, Address, Captured, Communicator, Driver, DriverError, Event, Kernel, Pinned, Queue};
use super::flight::{Flight, Mark, marks};
use super::load::{Action, Away, Code, load};
use super::step::{Beside, INPUTS, RESULTS, input_bytes, provide, queue, result};
use super::timing::Timing;
use crate::runtime::scratch::Scratch;
use crate::runtime::{Batch, Options, Recording, RuntimeError, Span, Stall, shown};
use crate::safetensors::decode;

/// Of a program.
pub const STREAMS: usize = Stream::ALL.len();

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
    disk: Option<Disk>,
    timing: Option<Timing>,
    flight: Option<Flight>,
    began: Instant,
    taken: Vec<Taken>,
    /// Whether a call failed, here or at a peer: nothing more is asked of the device.
    failed: bool,
    launch: Launch,
    calling: Calling,
}

/// Where everything is that calls name.
#[derive(Default)]
pub struct Held {
    pub arena: Option<Address>,
    /// The program's memory of the host.
    pub host: Option<Pinned>,
    pub scalars: Option<Address>,
    pub working: [Option<Address>; STREAMS],
    pub streams: Vec<Queue>,
    pub events: Vec<Event>,
    /// One that begins a step, then one that ends each stream's.
    pub edges: Vec<Event>,
    /// Of each action of each segment, launch by launch.
    pub kernels: Vec<Vec<Vec<Kernel>>>,
    /// Of each family of the program; none where this rank is in no group of it.
    pub communicators: Vec<Option<Communicator>>,
    pub pinned: Option<Pinned>,
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
    pub fn new(mut driver: D, graph: &Graph, program: &Program, rank: u64, options: &Options) -> Result<Rank<D>, RuntimeError> {
        let ranks = program.mesh.ranks();
        let code = load(graph, program, (rank / ranks) as usize, rank % ranks, options.decay, driver.target())?;
        let scratch = scratch(program, &code, options)?;
        let mut taken = Vec::new();
        let made = prepare(&mut driver, program, &code, (scratch, options.recording), &mut taken);
        let (failed, calling) = (made.is_err(), Calling::Each);
        let began = Instant::now();
        let mut this = Rank {
            driver,
            code,
            held: Held::default(),
            disk: None,
            timing: None,
            flight: None,
            began,
            taken,
            failed,
            launch: Launch::default(),
            calling,
        };
        match made {
            Ok((held, disk, timing, flight)) => {
                (this.held, this.disk, this.timing, this.flight) = (held, disk, timing, flight);
                Ok(this)
            }
            Err(source) => {
                this.release();
                Err(RuntimeError::Device { rank: rank as usize, source, stalls: Vec::new() })
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
        let done = done.and_then(|()| self.disk.as_ref().map_or(Ok(()), Disk::check));
        let done = done.and_then(|()| self.timing.as_mut().map_or(Ok(()), |timing| timing.end(&mut self.driver)));
        self.noted(done)?;
        let Some(pinned) = self.held.pinned else { return Ok(Results::default()) };
        let bytes = self.driver.pinned(pinned);
        let read = |which: usize| {
            let place = result(program, &self.code, which)?;
            Some(decode(place.dtype, &bytes[RESULTS as usize + which * 8..], 0))
        };
        Ok(Results { loss: read(0), norm_squared: read(1) })
    }

    /// Writes bytes of a memory.
    ///
    /// # Errors
    /// As [`Rank::issue`], and what the disk refuses.
    pub fn write(&mut self, space: Space, offset: u64, bytes: &[u8]) -> Result<(), RuntimeError> {
        match space {
            Space::Device => {
                let wrote =
                    self.copy(offset, bytes.len() as u64, &mut |memory, at| memory.copy_from_slice(&bytes[at..][..memory.len()]), Access::Write);
                self.noted(wrote)
            }
            Space::Host => {
                self.host(offset, bytes.len()).copy_from_slice(bytes);
                Ok(())
            }
            Space::File => self.disk.iter().try_for_each(|disk| disk.file().write(offset, bytes)).map_err(RuntimeError::Scratch),
        }
    }
    /// Reads bytes of a memory.
    ///
    /// # Errors
    /// As [`Rank::write`].
    pub fn read(&mut self, space: Space, offset: u64, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        match space {
            Space::Device => {
                let read = self.copy(offset, bytes.len() as u64, &mut |memory, at| bytes[at..][..memory.len()].copy_from_slice(memory), Access::Read);
                self.noted(read)
            }
            Space::Host => {
                bytes.copy_from_slice(self.host(offset, bytes.len()));
                Ok(())
            }
            Space::File => self.disk.iter().try_for_each(|disk| disk.file().read(offset, bytes)).map_err(RuntimeError::Scratch),
        }
    }
    /// What it has not come behind of the step that failed, together with whom.
    pub fn stalls(&mut self, graph: &Graph, program: &Program) -> Vec<Stall> {
        let ahead = self.flight.as_ref().map(|flight| flight.ahead(&mut self.driver)).unwrap_or_default();
        let (rank, stage) = (self.code.rank as usize, self.code.stage);
        let one = |mark: Mark| Stall {
            rank,
            stage: stage as u32,
            instruction: shown(graph, program, stage, (SegmentId(mark.segment as u32), mark.at), mark.micro_batch),
            peers: self.members(program, mark.family).into_iter().filter(|&peer| peer != rank).collect(),
        };
        ahead.into_iter().map(one).collect()
    }
    /// Takes what it ran since this was last called; empty unless it records.
    pub fn take_spans(&mut self) -> Vec<Span> {
        self.timing.as_mut().map(Timing::take).unwrap_or_default()
    }
    pub fn rank(&self) -> u64 {
        self.code.rank
    }
    /// The ranks of the family that a span names.
    pub fn members(&self, program: &Program, family: usize) -> Vec<usize> {
        self.code.families[family].members(program, self.code.rank).unwrap_or_default().into_iter().map(|r| r as usize).collect()
    }
    /// Why its file goes through the page cache, if it does.
    pub fn cached(&self) -> Option<&str> {
        self.disk.as_ref()?.file().cached()
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
        self.flight.iter_mut().for_each(|flight| flight.begin(&mut self.driver));
        let (driver, held, code) = (&mut self.driver, &self.held, &self.code);
        let launch = if self.disk.is_some() || self.timing.is_some() { Launch::Each } else { self.launch };
        self.calling = match self.calling {
            Calling::Each => {
                let beside = Beside {
                    disk: self.disk.as_mut(),
                    timing: self.timing.as_mut(),
                    flight: self.flight.as_mut(),
                    now: self.began.elapsed().as_nanos() as u64,
                };
                queue(driver, held, beside, code, program)?;
                match launch {
                    Launch::Graph => Calling::Capture,
                    Launch::Each => Calling::Each,
                }
            }
            Calling::Capture => {
                driver.begin_capture(compute)?;
                let queued = queue(driver, held, Beside { flight: self.flight.as_mut(), ..Beside::default() }, code, program);
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

    /// Bytes of the memory of the host, while no step runs.
    fn host(&mut self, offset: u64, bytes: usize) -> &mut [u8] {
        match self.held.host {
            Some(host) => &mut self.driver.pinned(host)[offset as usize..][..bytes],
            None => &mut [],
        }
    }

    fn noted<T>(&mut self, result: Result<T, DriverError>) -> Result<T, RuntimeError> {
        self.failed |= result.is_err();
        let rank = self.code.rank as usize;
        result.map_err(|source| RuntimeError::Device { rank, source, stalls: Vec::new() })
    }

    /// Gives everything back, last first. Communicators of a rank that failed are aborted before anything else but graphs: their peers may be inside, and NCCL ends no
    /// communicator before the graphs that captured its calls.
    fn release(&mut self) {
        let is_hung = self.disk.as_mut().and_then(Disk::close).is_some();
        self.failed |= is_hung;
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
        // The host's part of a stream waits for a disk that does not answer: what is given back would wait for the stream. The process's end gives it back.
        if is_hung {
            self.taken.clear();
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
fn prepare<D: Driver>(
    driver: &mut D,
    program: &Program,
    code: &Code,
    (scratch, recording): (Option<(Scratch, u64)>, Recording),
    taken: &mut Vec<Taken>,
) -> Result<(Held, Option<Disk>, Option<Timing>, Option<Flight>), DriverError> {
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
    let mut pin = |driver: &mut D, bytes: u64| -> Result<Pinned, DriverError> {
        let pinned = driver.pin(bytes)?;
        taken.push(Taken::Pinned(pinned));
        Ok(pinned)
    };
    held.pinned = Some(pin(driver, INPUTS + input_bytes(code, program))?);
    let host = program.stages[code.stage].host_bytes;
    held.host = (host > 0).then(|| pin(driver, host)).transpose()?;
    held.host.iter().for_each(|host| driver.pinned(*host).fill(0));
    let pieces = scratch.as_ref().map(|(_, piece)| pin(driver, Parts::pinned_bytes(*piece))).transpose()?;
    let mut stream = |driver: &mut D| -> Result<Queue, DriverError> {
        let stream = driver.create_stream()?;
        taken.push(Taken::Stream(stream));
        Ok(stream)
    };
    held.streams = (0..STREAMS).map(|_| stream(driver)).collect::<Result<_, _>>()?;
    let of_disk = pieces.map(|_| stream(driver)).transpose()?;
    let mut events = |driver: &mut D, count: usize| -> Result<Vec<Event>, DriverError> {
        let one = |_| {
            let event = driver.create_event()?;
            taken.push(Taken::Event(event));
            Ok(event)
        };
        (0..count).map(one).collect()
    };
    held.edges = events(driver, STREAMS)?;
    held.events = events(driver, program.stages[code.stage].events as usize)?;
    let mut disk = None;
    if let (Some((scratch, piece)), Some(pieces), Some(stream)) = (scratch, pieces, of_disk) {
        let parts = Parts { pieces, piece, stream, events: events(driver, Parts::EVENTS)? };
        disk = Some(Disk::new(driver, scratch, &parts));
    }
    let clock = || {
        let event = driver.create_clock()?;
        taken.push(Taken::Event(event));
        Ok(event)
    };
    let timing = (recording == Recording::On).then(|| Timing::new(program, code, clock)).transpose()?;
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
    let marks = marks(program, code);
    let mut flight = None;
    if !marks.is_empty() {
        let numbers = Flight::numbers(&marks);
        let at = driver.allocate(numbers.len() as u64)?;
        taken.push(Taken::Memory(at));
        let pinned = driver.pin(Flight::REACHED_BYTES.max(numbers.len() as u64))?;
        taken.push(Taken::Pinned(pinned));
        driver.pinned(pinned)[..numbers.len()].copy_from_slice(&numbers);
        driver.copy_in(at, pinned, 0, numbers.len() as u64, held.streams[0])?;
        driver.synchronise()?;
        flight = Some(Flight::new(marks, at, pinned));
    }
    for (number, family) in code.families.iter().enumerate() {
        let communicator = driver.split(number as u64, family.members(program, code.rank).as_deref())?;
        taken.extend(communicator.map(Taken::Communicator));
        held.communicators.push(communicator);
    }
    // All memory is zero before the first step: padding stays so.
    if let (Some(arena), Some(&stream)) = (held.arena, held.streams.first()) {
        driver.zero(arena, program.stages[code.stage].arena_bytes, stream)?;
        driver.synchronise()?;
    }
    Ok((held, disk, timing, flight))
}

/// The rank's file, if it has one, and how much of it goes at once.
fn scratch(program: &Program, code: &Code, options: &Options) -> Result<Option<(Scratch, u64)>, RuntimeError> {
    let bytes = program.stages[code.stage].file_bytes;
    if bytes == 0 {
        return Ok(None);
    }
    let sizes = code.segments.iter().flatten().filter_map(|(_, action)| match action {
        Action::Copy { away: Away::File(place), .. } => Some(place.bytes),
        _ => None,
    });
    let piece = piece_bytes(sizes.max().unwrap_or(0));
    let failed = |why| RuntimeError::NoScratch { rank: code.rank as usize, folder: options.scratch.display().to_string(), bytes, why };
    Ok(Some((Scratch::new(&options.scratch, 0, bytes).map_err(failed)?, piece)))
}
