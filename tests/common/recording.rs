//! A stand-in for CUDA and NCCL, one device a rank, in one process.
//!
//! Calls do what CUDA's do and no more: work is queued, and runs when somebody synchronises. Then one queued item after the other is done, taken at random from the streams
//! whose head can go on, so what no event orders happens in any order. Kernels run through the CPU shim, with the bounds of each argument checked; a communicator's members
//! must come with the same call, in the same order. Memory is host memory, poisoned when allocated. Every call is logged.

#[path = "by_library.rs"]
pub mod by_library;
#[path = "call.rs"]
mod call;
#[path = "capture.rs"]
mod capture;
#[path = "meeting.rs"]
mod meeting;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use by_library::ByLibrary;
pub use call::Call;
use capture::Capture;
use dplan::runtime::cuda::disk::Errand;
use dplan::runtime::cuda::driver::{
    Access, Address, Captured, Communicator, Driver, DriverError, Event, Exchange, Kernel, Pinned, Queue, Rows, Value,
};
use dplan_ir::splitmix;
use dplan_kernels::cuda::{Launch, Target};
use dplan_kernels::shim::{Library, Operand};
use meeting::{Group, Meeting, meet, sizes};

/// All devices of a job.
pub struct World {
    kernels: Library,
    /// Computes the products that launches say it may.
    pub products: Option<ByLibrary>,
    /// What its devices say that they are.
    target: Target,
    devices: Vec<Device>,
    groups: Vec<Group>,
    random: u64,
    launched: u64,
    done: u64,
    /// Calls made so far, by all ranks, that may fail.
    pub calls: Vec<&'static str>,
    /// A rank that comes to no more meetings.
    pub absent: Option<u64>,
    /// The call that fails.
    pub fails: Option<u64>,
    /// Calls other than giving back that a rank made after one failed.
    pub after_failure: Vec<(u64, Call)>,
}

#[derive(Default)]
struct Device {
    log: Vec<Call>,
    failed: bool,
    memory: BTreeMap<u64, Block>,
    pinned: BTreeMap<u64, u64>,
    streams: Vec<Option<VecDeque<Op>>>,
    /// Records issued and done.
    events: Vec<Option<(u64, u64)>>,
    /// When each was last recorded: how many things were done before.
    times: HashMap<usize, u64>,
    kernels: Vec<Option<Launch>>,
    communicators: Vec<usize>,
    capture: Option<Capture>,
    graphs: Vec<Option<Vec<(usize, Op)>>>,
}

impl Device {
    fn end(&mut self, communicator: Communicator) {
        let held = self.communicators.len();
        self.communicators.retain(|&c| c != communicator.0 as usize);
        assert_eq!(self.communicators.len() + 1, held, "ended twice");
        // NCCL would wait for them.
        assert!(
            self.graphs.iter().flatten().next().is_none() && self.capture.is_none(),
            "a communicator ends before the graphs that may hold its calls"
        );
    }
}

/// Bytes at a multiple of 256.
struct Block {
    _words: Vec<u8>,
    bytes: u64,
}

#[derive(Clone, Debug)]
enum Op {
    Launch(Box<Launch>, Vec<Value>),
    Copy { from: u64, to: u64, bytes: u64 },
    Rows(Rows),
    Zero { at: u64, bytes: u64 },
    Errand(Arc<Errand>),
    Record { event: usize, number: u64 },
    Wait { event: usize, number: u64 },
    Meet { group: usize, position: usize, number: u64, what: Meeting },
}

impl World {
    pub fn new(library: Library, target: Target, ranks: u64, seed: u64) -> Rc<RefCell<World>> {
        let devices = (0..ranks).map(|_| Device::default()).collect();
        let world = World {
            kernels: library,
            products: None,
            target,
            devices,
            groups: Vec::new(),
            random: seed,
            launched: 0,
            done: 0,
            calls: Vec::new(),
            absent: None,
            fails: None,
            after_failure: Vec::new(),
        };
        Rc::new(RefCell::new(world))
    }
    pub fn take_log(&mut self, rank: u64) -> Vec<Call> {
        std::mem::take(&mut self.devices[rank as usize].log)
    }
    /// What ranks took and did not give back.
    pub fn leaks(&self) -> Vec<String> {
        let mut leaks = Vec::new();
        for (rank, d) in self.devices.iter().enumerate() {
            let left = [
                ("memory", d.memory.len()),
                ("pinned memory", d.pinned.len()),
                ("streams", d.streams.iter().flatten().count()),
                ("events", d.events.iter().flatten().count()),
                ("kernels", d.kernels.iter().flatten().count()),
                ("communicators", d.communicators.len()),
                ("graphs", d.graphs.iter().flatten().count()),
                ("open captures", usize::from(d.capture.is_some())),
            ];
            leaks.extend(left.iter().filter(|(_, n)| *n > 0).map(|(what, n)| format!("rank {rank}: {n} {what}")));
        }
        leaks
    }
    pub fn launched(&self) -> u64 {
        self.launched
    }
    pub fn into_library(self) -> Library {
        self.kernels
    }

    fn below(&mut self, n: usize) -> usize {
        (splitmix::next(&mut self.random) % n as u64) as usize
    }

    /// Does everything that is queued anywhere.
    fn drain(&mut self) -> Result<(), DriverError> {
        loop {
            let mut ready = Vec::new();
            let mut left = Vec::new();
            for rank in 0..self.devices.len() {
                for stream in 0..self.devices[rank].streams.len() {
                    let head = self.devices[rank].streams[stream].as_ref().and_then(VecDeque::front).cloned();
                    if let Some(op) = head {
                        if self.is_ready(rank, &op) { ready.push((rank, stream)) } else { left.push((rank, stream, op)) }
                    }
                }
            }
            if ready.is_empty() {
                assert!(left.is_empty() || self.absent.is_some(), "no stream gets further: {left:?}");
                return if left.is_empty() { Ok(()) } else { Err(DriverError { call: "cuStreamQuery", why: "the step did not end".into() }) };
            }
            let (rank, stream) = ready[self.below(ready.len())];
            let op = self.devices[rank].streams[stream].as_mut().and_then(VecDeque::pop_front).expect("a head");
            self.execute(rank, op);
        }
    }

    fn is_ready(&mut self, rank: usize, op: &Op) -> bool {
        match op {
            Op::Wait { event, number } => self.devices[rank].events[*event].is_none_or(|(_, done)| done >= *number),
            Op::Meet { .. } if self.absent == Some(rank as u64) => false,
            Op::Meet { group, position, number, what } => {
                let group = &mut self.groups[*group];
                if group.done == *number {
                    group.here.insert(*position as u64, *what);
                }
                if group.done == *number && group.here.len() == group.members.len() {
                    meet(group);
                    group.here.clear();
                    group.done += 1;
                }
                group.done > *number
            }
            Op::Launch(..) | Op::Copy { .. } | Op::Rows(_) | Op::Zero { .. } | Op::Errand(_) | Op::Record { .. } => true,
        }
    }

    fn execute(&mut self, rank: usize, op: Op) {
        self.done += 1;
        match op {
            Op::Launch(launch, values) => {
                self.launched += 1;
                if let (Some(product), Some(library)) = (&launch.instead, &mut self.products) {
                    return library.multiply(product, &values);
                }
                let operand = |v: &Value| match *v {
                    Value::Int(i) => Operand::Int(i),
                    Value::Memory { at, bytes, access } => Operand::Memory { base: at.0 as *mut u8, bytes, writable: access == Access::Write },
                    Value::Tensor { at, bytes, map } => {
                        assert!(map.bytes() <= bytes, "rank {rank}: {map:?} in {bytes} bytes");
                        Operand::Tensor { base: at.0 as *mut u8, bytes, map }
                    }
                };
                let operands: Vec<Operand> = values.iter().map(operand).collect();
                values.iter().for_each(|v| {
                    if let Value::Memory { at, bytes, .. } | Value::Tensor { at, bytes, .. } = v {
                        self.inside(rank, at.0, *bytes);
                    }
                });
                // SAFETY: each range is inside one allocation, checked above.
                unsafe { self.kernels.launch(&launch, &operands, self.launched) }.unwrap_or_else(|e| panic!("rank {rank}: {e}"));
            }
            // SAFETY: both ranges were checked when the call was made, and are of different allocations.
            Op::Copy { from, to, bytes } => unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes as usize) },
            Op::Rows(r) => {
                for row in 0..r.rows {
                    // SAFETY: as above.
                    unsafe { std::ptr::copy((r.from.0 + row * r.from_pitch) as *const u8, (r.to.0 + row * r.to_pitch) as *mut u8, r.width as usize) }
                }
            }
            // SAFETY: as above.
            Op::Zero { at, bytes } => unsafe { std::ptr::write_bytes(at as *mut u8, 0, bytes as usize) },
            Op::Errand(errand) => errand.run(),
            Op::Record { event, number } => {
                self.devices[rank].times.insert(event, self.done);
                if let Some(event) = &mut self.devices[rank].events[event] {
                    event.1 = event.1.max(number);
                }
            }
            Op::Wait { .. } | Op::Meet { .. } => {}
        }
    }

    /// Panics unless a range is inside one allocation of the rank.
    fn inside(&self, rank: usize, at: u64, bytes: u64) {
        let block = self.devices[rank].memory.range(..=at).next_back();
        let fits = block.is_some_and(|(base, b)| at + bytes <= base + b.bytes);
        assert!(fits, "rank {rank}: {bytes} bytes at {at:#x} are in no allocation");
    }
}

/// One rank's device.
pub struct Recorder {
    world: Rc<RefCell<World>>,
    rank: u64,
    pinned: HashMap<u64, Vec<u8>>,
}

impl Recorder {
    pub fn new(world: &Rc<RefCell<World>>, rank: u64) -> Recorder {
        Recorder { world: Rc::clone(world), rank, pinned: HashMap::new() }
    }

    /// Logs a call, and fails it if it is the one to fail.
    fn log(&self, call: Call, name: &'static str) -> Result<(), DriverError> {
        let world = &mut *self.world.borrow_mut();
        let device = &mut world.devices[self.rank as usize];
        if device.failed {
            world.after_failure.push((self.rank, call.clone()));
        }
        device.log.push(call);
        let number = world.calls.len() as u64;
        world.calls.push(name);
        if world.fails == Some(number) {
            device.failed = true;
            return Err(DriverError { call: name, why: format!("call {number} was told to fail") });
        }
        Ok(())
    }
    fn give_back(&self, what: &'static str, change: impl FnOnce(&mut Device)) -> Result<(), DriverError> {
        let device = &mut self.world.borrow_mut().devices[self.rank as usize];
        device.log.push(Call::GiveBack(what));
        change(device);
        Ok(())
    }
    fn device<T>(&self, change: impl FnOnce(&mut Device) -> T) -> T {
        change(&mut self.world.borrow_mut().devices[self.rank as usize])
    }
    /// Queues work to a stream; records, waits and meetings count from here on. Or records it, while the device captures.
    fn queue(&self, stream: Queue, mut op: Op) {
        let world = &mut *self.world.borrow_mut();
        let device = &mut world.devices[self.rank as usize];
        let stream = stream.0 as usize;
        if let Some(capture) = &mut device.capture {
            return capture.take(stream, op);
        }
        match &mut op {
            Op::Record { event, number } => {
                let (issued, _) = device.events[*event].as_mut().expect("a live event");
                *issued += 1;
                *number = *issued;
            }
            // CUDA waits for the latest record that was issued before; for none if there was none.
            Op::Wait { event, number } => *number = device.events[*event].expect("a live event").0,
            Op::Meet { group, position, number, .. } => {
                let issued = &mut world.groups[*group].issued[*position];
                *number = *issued;
                *issued += 1;
            }
            Op::Launch(..) | Op::Copy { .. } | Op::Rows(_) | Op::Zero { .. } | Op::Errand(_) => {}
        }
        device.streams[stream].as_mut().expect("a live stream").push_back(op);
    }
    fn inside(&self, at: Address, bytes: u64) {
        self.world.borrow().inside(self.rank as usize, at.0, bytes);
    }
    fn meet(&self, communicator: Communicator, stream: Queue, what: Meeting) {
        let group = communicator.0 as usize;
        let position = self.world.borrow().groups[group].members.iter().position(|&m| m == self.rank).expect("a member");
        self.queue(stream, Op::Meet { group, position, number: 0, what });
    }
    fn members(&self, communicator: Communicator) -> Vec<u64> {
        self.world.borrow().groups[communicator.0 as usize].members.clone()
    }
    fn pinned_place(&self, memory: Pinned, offset: u64, bytes: u64) -> u64 {
        assert!(offset + bytes <= self.pinned[&memory.0].len() as u64, "past the pinned memory");
        memory.0 + offset
    }
}

impl Driver for Recorder {
    fn target(&self) -> Target {
        self.world.borrow().target
    }

    fn allocate(&mut self, bytes: u64) -> Result<Address, DriverError> {
        self.log(Call::Take("memory"), "cuMemAlloc")?;
        let words = vec![0xff; bytes as usize + 256];
        let at = words.as_ptr() as u64 + words.as_ptr().align_offset(256) as u64;
        self.device(|d| d.memory.insert(at, Block { _words: words, bytes }));
        Ok(Address(at))
    }
    fn free(&mut self, at: Address) -> Result<(), DriverError> {
        self.give_back("memory", |d| assert!(d.memory.remove(&at.0).is_some(), "freed twice"))
    }
    fn pin(&mut self, bytes: u64) -> Result<Pinned, DriverError> {
        self.log(Call::Take("pinned memory"), "cuMemHostAlloc")?;
        let memory = vec![0xff; bytes as usize];
        let at = memory.as_ptr() as u64;
        self.pinned.insert(at, memory);
        self.device(|d| d.pinned.insert(at, bytes));
        Ok(Pinned(at))
    }
    fn unpin(&mut self, memory: Pinned) -> Result<(), DriverError> {
        self.pinned.remove(&memory.0);
        self.give_back("pinned memory", |d| assert!(d.pinned.remove(&memory.0).is_some(), "unpinned twice"))
    }
    fn pinned(&mut self, memory: Pinned) -> &mut [u8] {
        self.pinned.get_mut(&memory.0).expect("pinned")
    }

    fn create_stream(&mut self) -> Result<Queue, DriverError> {
        self.log(Call::Take("stream"), "cuStreamCreate")?;
        Ok(Queue(self.device(|d| {
            d.streams.push(Some(VecDeque::new()));
            d.streams.len() as u64 - 1
        })))
    }
    fn destroy_stream(&mut self, stream: Queue) -> Result<(), DriverError> {
        self.give_back("stream", |d| assert!(d.streams[stream.0 as usize].take().is_some(), "destroyed twice"))
    }
    fn create_event(&mut self) -> Result<Event, DriverError> {
        self.log(Call::Take("event"), "cuEventCreate")?;
        Ok(Event(self.device(|d| {
            d.events.push(Some((0, 0)));
            d.events.len() as u64 - 1
        })))
    }
    fn create_clock(&mut self) -> Result<Event, DriverError> {
        self.create_event()
    }
    fn elapsed(&mut self, from: Event, to: Event) -> Result<u64, DriverError> {
        let times = self.device(|d| [from, to].map(|event| d.times[&(event.0 as usize)]));
        Ok(times[1].saturating_sub(times[0]))
    }
    fn destroy_event(&mut self, event: Event) -> Result<(), DriverError> {
        self.give_back("event", |d| assert!(d.events[event.0 as usize].take().is_some(), "destroyed twice"))
    }
    fn record(&mut self, event: Event, stream: Queue) -> Result<(), DriverError> {
        let (e, s) = (event.0 as usize, stream.0 as usize);
        self.log(Call::Record { event: e, stream: s }, "cuEventRecord")?;
        self.queue(stream, Op::Record { event: e, number: 0 });
        Ok(())
    }
    fn wait(&mut self, stream: Queue, event: Event) -> Result<(), DriverError> {
        let (e, s) = (event.0 as usize, stream.0 as usize);
        self.log(Call::Wait { event: e, stream: s }, "cuStreamWaitEvent")?;
        self.queue(stream, Op::Wait { event: e, number: 0 });
        Ok(())
    }

    fn load(&mut self, launch: &Launch) -> Result<Kernel, DriverError> {
        self.log(Call::Take("kernel"), "cuModuleLoadData")?;
        if let (Some(product), Some(library)) = (&launch.instead, &mut self.world.borrow_mut().products) {
            library.describe(product);
        }
        Ok(Kernel(self.device(|d| {
            d.kernels.push(Some(launch.clone()));
            d.kernels.len() as u64 - 1
        })))
    }
    fn unload(&mut self, kernel: Kernel) -> Result<(), DriverError> {
        self.give_back("kernel", |d| assert!(d.kernels[kernel.0 as usize].take().is_some(), "unloaded twice"))
    }
    fn launch(&mut self, kernel: Kernel, launch: &Launch, args: &[Value], stream: Queue) -> Result<(), DriverError> {
        self.log(Call::Launch { entry: launch.entry, stream: stream.0 as usize }, "cuLaunchKernel")?;
        let as_loaded = |k: &Launch| (&k.text, k.entry, k.shared, k.instead) == (&launch.text, launch.entry, launch.shared, launch.instead);
        let same = self.device(|d| d.kernels[kernel.0 as usize].as_ref().is_some_and(as_loaded));
        assert!(same, "{} is launched as another kernel", launch.entry);
        self.queue(stream, Op::Launch(Box::new(launch.clone()), args.to_vec()));
        Ok(())
    }

    fn copy_in(&mut self, to: Address, from: Pinned, offset: u64, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        self.log(Call::CopyIn { to: to.0, bytes, stream: stream.0 as usize }, "cuMemcpyHtoDAsync")?;
        self.inside(to, bytes);
        self.queue(stream, Op::Copy { from: self.pinned_place(from, offset, bytes), to: to.0, bytes });
        Ok(())
    }
    fn copy_out(&mut self, to: Pinned, offset: u64, from: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        self.log(Call::CopyOut { from: from.0, bytes, stream: stream.0 as usize }, "cuMemcpyDtoHAsync")?;
        self.inside(from, bytes);
        self.queue(stream, Op::Copy { from: from.0, to: self.pinned_place(to, offset, bytes), bytes });
        Ok(())
    }
    fn copy_rows(&mut self, rows: Rows, stream: Queue) -> Result<(), DriverError> {
        self.log(Call::Rows { to: rows.to.0, bytes: rows.width * rows.rows, stream: stream.0 as usize }, "cuMemcpy2DAsync")?;
        let last = rows.rows.saturating_sub(1);
        self.inside(rows.from, last * rows.from_pitch + rows.width);
        self.inside(rows.to, last * rows.to_pitch + rows.width);
        self.queue(stream, Op::Rows(rows));
        Ok(())
    }
    fn call(&mut self, errand: &Arc<Errand>, stream: Queue) -> Result<(), DriverError> {
        let Errand { way, address, bytes, .. } = **errand;
        self.log(Call::Errand { way, address, bytes, stream: stream.0 as usize }, "cuLaunchHostFunc")?;
        self.queue(stream, Op::Errand(Arc::clone(errand)));
        Ok(())
    }
    fn zero(&mut self, at: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        self.log(Call::Zero { at: at.0, bytes, stream: stream.0 as usize }, "cuMemsetD8Async")?;
        self.inside(at, bytes);
        self.queue(stream, Op::Zero { at: at.0, bytes });
        Ok(())
    }

    fn split(&mut self, family: u64, members: Option<&[u64]>) -> Result<Option<Communicator>, DriverError> {
        self.log(Call::Take("communicator"), "ncclCommSplit")?;
        let Some(members) = members else { return Ok(None) };
        let world = &mut *self.world.borrow_mut();
        let found = world.groups.iter().position(|g| g.family == family && g.members == members);
        let at = found.unwrap_or_else(|| {
            let (members, issued) = (members.to_vec(), vec![0; members.len()]);
            world.groups.push(Group { family, members, issued, here: HashMap::new(), done: 0 });
            world.groups.len() - 1
        });
        world.devices[self.rank as usize].communicators.push(at);
        Ok(Some(Communicator(at as u64)))
    }
    fn leave(&mut self, communicator: Communicator) -> Result<(), DriverError> {
        {
            let world = self.world.borrow();
            let group = &world.groups[communicator.0 as usize];
            let position = group.members.iter().position(|&m| m == self.rank).expect("a member");
            assert_eq!(group.issued[position], group.done, "{:?} is left by rank {} in the middle of a call", group.members, self.rank);
            assert!(!world.devices[self.rank as usize].failed, "rank {} failed, and waits for its peers to leave", self.rank);
        }
        self.give_back("communicator", |d| d.end(communicator))
    }
    fn abort(&mut self, communicator: Communicator) -> Result<(), DriverError> {
        self.give_back("communicator, aborted", |d| d.end(communicator))
    }
    fn exchange(&mut self, communicator: Communicator, what: Exchange, stream: Queue) -> Result<(), DriverError> {
        let members = self.members(communicator);
        let (sent, received) = sizes(&what, members.len() as u64);
        let call = Call::Exchange { members, primitive: what.primitive, elems: what.elems, stream: stream.0 as usize };
        self.log(call, "ncclAllReduce")?;
        self.inside(what.from, sent);
        self.inside(what.to, received);
        self.meet(communicator, stream, Meeting::Exchange(what));
        Ok(())
    }
    fn send(&mut self, communicator: Communicator, peer: u64, from: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        let to = self.members(communicator)[peer as usize];
        self.log(Call::Send { to, bytes, stream: stream.0 as usize }, "ncclSend")?;
        self.inside(from, bytes);
        self.meet(communicator, stream, Meeting::Send { peer, from: from.0, bytes });
        Ok(())
    }
    fn receive(&mut self, communicator: Communicator, peer: u64, to: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        let from = self.members(communicator)[peer as usize];
        self.log(Call::Receive { from, bytes, stream: stream.0 as usize }, "ncclRecv")?;
        self.inside(to, bytes);
        self.meet(communicator, stream, Meeting::Receive { peer, to: to.0, bytes });
        Ok(())
    }

    fn begin_capture(&mut self, stream: Queue) -> Result<(), DriverError> {
        self.log(Call::BeginCapture, "cuStreamBeginCapture")?;
        let before = self.device(|d| d.capture.replace(Capture { origin: stream.0 as usize, work: Vec::new() }));
        assert!(before.is_none(), "a capture in a capture");
        Ok(())
    }
    fn end_capture(&mut self, stream: Queue) -> Result<Captured, DriverError> {
        let (failed, capture) = self.device(|d| (d.failed, d.capture.take()));
        let capture = capture.expect("a capture");
        if failed {
            // Ending it gives it back.
            return Err(DriverError { call: "cuStreamEndCapture", why: "a captured call failed".into() });
        }
        self.log(Call::EndCapture, "cuStreamEndCapture")?;
        assert_eq!(capture.origin, stream.0 as usize, "a capture ends where it began");
        let work = capture.end();
        Ok(Captured(self.device(|d| {
            d.graphs.push(Some(work));
            d.graphs.len() as u64 - 1
        })))
    }
    fn replay(&mut self, graph: Captured, stream: Queue) -> Result<(), DriverError> {
        self.log(Call::Replay { stream: stream.0 as usize }, "cuGraphLaunch")?;
        let work = self.device(|d| d.graphs[graph.0 as usize].clone().expect("a live graph"));
        work.into_iter().for_each(|(stream, op)| self.queue(Queue(stream as u64), op));
        Ok(())
    }
    fn discard(&mut self, graph: Captured) -> Result<(), DriverError> {
        self.give_back("graph", |d| assert!(d.graphs[graph.0 as usize].take().is_some(), "discarded twice"))
    }

    fn synchronise(&mut self) -> Result<(), DriverError> {
        self.log(Call::Synchronise, "cuStreamQuery")?;
        let done = self.world.borrow_mut().drain();
        self.device(|d| d.failed |= done.is_err());
        done
    }
}
