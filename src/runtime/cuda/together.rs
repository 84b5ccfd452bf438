//! All ranks of a program on one device, in one process: for trying plans of several ranks on a single card.
//!
//! A rank's calls are kept, stream by stream, until somebody synchronises. Then they are made, each as soon as it may be: a wait when the record that it is for was made, a record when the
//! waits for the one before were, a collective or message when all who meet are at it. That becomes copies and sums by the device in one member's stream, in group order, which
//! waits for the others by events, as they do for it. So what was queued keeps its order, and nothing blocks that would not on devices of its own. Such steps are not captured.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use dplan_ir::dtype::DType;
use dplan_kernels::cuda::flat::add_into;
use dplan_kernels::cuda::{Alignment, Launch, Routine, Target};

use super::disk::Errand;
use super::driver::{Access, Address, Captured, Communicator, Driver, DriverError, Event, Exchange, Kernel, Pinned, Queue, Rows, Value};
use super::load::{Primitive, Reduction};
use super::step::Operands;

/// Widest row that is copied at once.
const WIDEST: u64 = 1 << 30;

/// A rank's part of a device.
pub struct Seat<D: Driver> {
    card: Rc<RefCell<Card<D>>>,
    rank: u64,
}

/// The device, and what is not asked of it yet.
struct Card<D: Driver> {
    driver: D,
    queues: BTreeMap<u64, VecDeque<Op>>,
    /// Of each event.
    records: HashMap<Event, Records>,
    groups: Vec<Group>,
    sums: HashMap<(DType, u64), (Routine, Vec<Kernel>)>,
}

#[derive(Default)]
struct Records {
    kept: u64,
    made: u64,
    /// Waits that are kept, by the record that they are for.
    waits: BTreeMap<u64, u64>,
}

struct Group {
    family: u64,
    members: Vec<u64>,
    /// Of each member that it has come, and that the last meeting is done.
    here: Vec<Event>,
    done: Event,
    memory: Vec<(Address, u64)>,
}

#[derive(Clone)]
enum Op {
    Record { event: Event, number: u64 },
    Wait { event: Event, number: u64 },
    Launch(Kernel, Box<Launch>, Vec<Value>),
    CopyIn(Address, Pinned, u64, u64),
    CopyOut(Pinned, u64, Address, u64),
    Rows(Rows),
    Call(Arc<Errand>),
    Zero(Address, u64),
    Meet { group: usize, position: usize, what: Meeting },
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Meeting {
    Exchange(Exchange),
    Send { from: Address, bytes: u64 },
    Receive { to: Address, bytes: u64 },
}

/// What adds to a sum, in the place of NCCL.
pub fn sum_of(dtype: DType, elems: u64) -> Routine {
    add_into(dtype, dtype, elems, Alignment::Elements)
}

/// Seats for this many ranks.
pub fn seats<D: Driver>(driver: D, ranks: u64) -> Vec<(u64, Seat<D>)> {
    let card = Card { driver, queues: BTreeMap::new(), records: HashMap::new(), groups: Vec::new(), sums: HashMap::new() };
    let card = Rc::new(RefCell::new(card));
    (0..ranks).map(|rank| (rank, Seat { card: Rc::clone(&card), rank })).collect()
}

impl<D: Driver> Card<D> {
    fn keep(&mut self, stream: Queue, op: Op) {
        self.queues.entry(stream.0).or_default().push_back(op);
    }

    /// Makes all calls that are kept.
    fn make(&mut self) -> Result<(), DriverError> {
        loop {
            let (mut moved, mut left) = (false, false);
            for stream in self.queues.keys().copied().collect::<Vec<_>>() {
                while let Some(op) = self.queues.get(&stream).and_then(|q| q.front()).cloned() {
                    left = true;
                    if !self.may(&op) {
                        break;
                    }
                    moved = true;
                    self.one(Queue(stream), op)?;
                }
            }
            if !left {
                return Ok(());
            }
            if !moved {
                return Err(DriverError { call: "cuStreamQuery", why: "ranks wait for each other".into() });
            }
        }
    }
    /// Whether a call at the head of a stream may be made.
    fn may(&self, op: &Op) -> bool {
        let records = |event: &Event| self.records.get(event);
        match op {
            Op::Wait { event, number } => records(event).is_none_or(|r| r.made >= *number),
            Op::Record { event, number } => records(event).is_none_or(|r| r.waits.range(..*number).next().is_none()),
            Op::Meet { group, .. } => self.heads(*group).is_some(),
            Op::Launch(..) | Op::CopyIn(..) | Op::CopyOut(..) | Op::Rows(_) | Op::Call(_) | Op::Zero(..) => true,
        }
    }
    /// Makes a call and takes it from its stream; a meeting from all of its streams.
    fn one(&mut self, stream: Queue, op: Op) -> Result<(), DriverError> {
        if let Op::Meet { group, .. } = op {
            return self.meet(group);
        }
        if let Some(queue) = self.queues.get_mut(&stream.0) {
            queue.pop_front();
        }
        match op {
            Op::Record { event, number } => {
                if let Some(records) = self.records.get_mut(&event) {
                    records.made = records.made.max(number);
                }
                self.driver.record(event, stream)
            }
            Op::Wait { event, number } => {
                let Some(records) = self.records.get_mut(&event) else { return Ok(()) };
                if let Some(count) = records.waits.get_mut(&number) {
                    *count -= 1;
                    if *count == 0 {
                        records.waits.remove(&number);
                    }
                }
                if number == 0 { Ok(()) } else { self.driver.wait(stream, event) }
            }
            Op::Launch(kernel, launch, args) => self.driver.launch(kernel, &launch, &args, stream),
            Op::CopyIn(to, from, offset, bytes) => self.driver.copy_in(to, from, offset, bytes, stream),
            Op::CopyOut(to, offset, from, bytes) => self.driver.copy_out(to, offset, from, bytes, stream),
            Op::Rows(rows) => self.driver.copy_rows(rows, stream),
            Op::Call(errand) => self.driver.call(&errand, stream),
            Op::Zero(at, bytes) => self.driver.zero(at, bytes, stream),
            Op::Meet { .. } => Ok(()),
        }
    }

    /// The streams at whose heads the members of a group are, and what for, if all are there.
    fn heads(&self, group: usize) -> Option<Vec<(Queue, Meeting)>> {
        let mut heads = vec![None; self.groups[group].members.len()];
        for (stream, queue) in &self.queues {
            if let Some(Op::Meet { group: g, position, what }) = queue.front()
                && *g == group
            {
                heads[*position] = Some((Queue(*stream), *what));
            }
        }
        heads.into_iter().collect()
    }
    /// Does what the members of a group have come for, in the stream of the first.
    fn meet(&mut self, group: usize) -> Result<(), DriverError> {
        let Some(heads) = self.heads(group) else { return Ok(()) };
        for (stream, _) in &heads {
            if let Some(queue) = self.queues.get_mut(&stream.0) {
                queue.pop_front();
            }
        }
        let lead = heads[0].0;
        let (here, done) = (self.groups[group].here.clone(), self.groups[group].done);
        // The meeting before may have been in another stream.
        self.driver.wait(lead, done)?;
        for ((stream, _), event) in heads.iter().zip(&here) {
            self.driver.record(*event, *stream)?;
            self.driver.wait(lead, *event)?;
        }
        let all: Vec<Meeting> = heads.iter().map(|head| head.1).collect();
        match all[..] {
            [Meeting::Send { from, bytes }, Meeting::Receive { to, bytes: n }] if n == bytes => self.copy(from, to, bytes, lead)?,
            _ => self.exchange(group, &all, lead)?,
        }
        self.driver.record(done, lead)?;
        heads.iter().try_for_each(|(stream, _)| self.driver.wait(*stream, done))
    }
    fn exchange(&mut self, group: usize, all: &[Meeting], lead: Queue) -> Result<(), DriverError> {
        let refused = |why: String| DriverError { call: "ncclAllReduce", why };
        let exchanges = all.iter().map(|m| if let Meeting::Exchange(e) = m { Ok(*e) } else { Err(refused(format!("ranks meet with {all:?}"))) });
        let exchanges: Vec<Exchange> = exchanges.collect::<Result<_, _>>()?;
        let Exchange { primitive, elems, dtype, .. } = exchanges[0];
        if exchanges.iter().any(|e| (e.primitive, e.elems, e.dtype) != (primitive, elems, dtype)) {
            return Err(refused(format!("ranks meet with {exchanges:?}")));
        }
        let (ways, bytes) = (exchanges.len() as u64, elems * dtype.size());
        match primitive {
            Primitive::AllReduce(Reduction::Max) | Primitive::ReduceScatter(Reduction::Max) => {
                Err(refused("ranks that share a GPU take no maxima of each other".into()))
            }
            Primitive::AllGather => {
                let whole = self.memory(group, bytes * ways)?;
                for (at, e) in (0..).zip(&exchanges) {
                    self.copy(e.from, whole.plus(at * bytes), bytes, lead)?;
                }
                exchanges.iter().try_for_each(|e| self.copy(whole, e.to, bytes * ways, lead))
            }
            // From a place of its own to another: nothing that is still to be sent is written over.
            Primitive::AllToAll => (0..).zip(&exchanges).try_for_each(|(to, e)| {
                (0..).zip(&exchanges).try_for_each(|(from, other)| self.copy(other.from.plus(to * bytes), e.to.plus(from * bytes), bytes, lead))
            }),
            // The same: a block goes to another place than the one it comes from.
            Primitive::Shift => {
                exchanges.iter().zip(exchanges.iter().cycle().skip(1)).try_for_each(|(e, next)| self.copy(e.from, next.to, bytes, lead))
            }
            Primitive::AllReduce(Reduction::Sum) => {
                let sum = self.sum(group, &exchanges, elems, lead)?;
                exchanges.iter().try_for_each(|e| self.copy(sum, e.to, bytes, lead))
            }
            Primitive::ReduceScatter(Reduction::Sum) => {
                let sum = self.sum(group, &exchanges, elems * ways, lead)?;
                (0..).zip(&exchanges).try_for_each(|(at, e)| self.copy(sum.plus(at * bytes), e.to, bytes, lead))
            }
        }
    }
    /// The sum of what all have, in group order.
    fn sum(&mut self, group: usize, exchanges: &[Exchange], elems: u64, lead: Queue) -> Result<Address, DriverError> {
        let (dtype, bytes) = (exchanges[0].dtype, elems * exchanges[0].dtype.size());
        let sum = self.memory(group, bytes)?;
        self.copy(exchanges[0].from, sum, bytes, lead)?;
        if !self.sums.contains_key(&(dtype, elems)) {
            let routine = sum_of(dtype, elems);
            let kernels = routine.launches.iter().map(|launch| self.driver.load(launch)).collect::<Result<_, _>>()?;
            self.sums.insert((dtype, elems), (routine, kernels));
        }
        let Some((routine, kernels)) = self.sums.get(&(dtype, elems)) else { return Ok(sum) };
        for other in &exchanges[1..] {
            let ins = [Value::Memory { at: other.from, bytes, access: Access::Read }];
            let outs = [Value::Memory { at: sum, bytes, access: Access::Write }];
            // The scalars stand where a sum takes an operand that it does not read.
            let operands = Operands { ins: &ins, outs: &outs, working: (sum, 0), scalars: other.from, micro: 0 };
            for (launch, kernel) in routine.launches.iter().zip(kernels) {
                let args: Vec<Value> = launch.args.iter().map(|arg| operands.value(arg)).map(|v| within(v, bytes)).collect();
                self.driver.launch(*kernel, launch, &args, lead)?;
            }
        }
        Ok(sum)
    }
    fn copy(&mut self, from: Address, to: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        for at in (0..bytes).step_by(WIDEST as usize) {
            let width = WIDEST.min(bytes - at);
            let rows = Rows { from: from.plus(at), from_pitch: width, to: to.plus(at), to_pitch: width, width, rows: 1 };
            self.driver.copy_rows(rows, stream)?;
        }
        Ok(())
    }
    /// Memory of a group. What is too small stays until the end: something may still use it.
    fn memory(&mut self, group: usize, bytes: u64) -> Result<Address, DriverError> {
        if let Some(&(at, _)) = self.groups[group].memory.last().filter(|m| m.1 >= bytes) {
            return Ok(at);
        }
        let at = self.driver.allocate(bytes)?;
        self.groups[group].memory.push((at, bytes));
        Ok(at)
    }
}

/// A range no longer than what it is in.
fn within(value: Value, most: u64) -> Value {
    match value {
        Value::Memory { at, bytes, access } => Value::Memory { at, bytes: bytes.min(most), access },
        other @ (Value::Tensor { .. } | Value::Int(_)) => other,
    }
}

impl<D: Driver> Drop for Card<D> {
    fn drop(&mut self) {
        // There is nobody left to tell of an error.
        for kernel in self.sums.values().flat_map(|(_, kernels)| kernels) {
            let _ = self.driver.unload(*kernel);
        }
        for group in &self.groups {
            let _ = group.memory.iter().try_for_each(|(at, _)| self.driver.free(*at));
            let _ = group.here.iter().chain([&group.done]).try_for_each(|event| self.driver.destroy_event(*event));
        }
    }
}

impl<D: Driver> Seat<D> {
    fn with<T>(&self, call: impl FnOnce(&mut D) -> T) -> T {
        call(&mut self.card.borrow_mut().driver)
    }
    fn keep(&self, stream: Queue, op: Op) -> Result<(), DriverError> {
        self.card.borrow_mut().keep(stream, op);
        Ok(())
    }
    fn meet(&self, communicator: Communicator, what: Meeting, stream: Queue) -> Result<(), DriverError> {
        let group = communicator.0 as usize;
        let position = self.card.borrow().groups[group].members.iter().position(|&m| m == self.rank).unwrap_or(0);
        self.keep(stream, Op::Meet { group, position, what })
    }
}

impl<D: Driver> Driver for Seat<D> {
    fn target(&self) -> Target {
        self.card.borrow().driver.target()
    }

    fn allocate(&mut self, bytes: u64) -> Result<Address, DriverError> {
        self.with(|d| d.allocate(bytes))
    }
    fn free(&mut self, at: Address) -> Result<(), DriverError> {
        self.with(|d| d.free(at))
    }
    fn pin(&mut self, bytes: u64) -> Result<Pinned, DriverError> {
        self.with(|d| d.pin(bytes))
    }
    fn unpin(&mut self, memory: Pinned) -> Result<(), DriverError> {
        self.with(|d| d.unpin(memory))
    }
    fn pinned(&mut self, memory: Pinned) -> &mut [u8] {
        let (at, bytes) = self.with(|d| {
            let bytes = d.pinned(memory);
            (bytes.as_mut_ptr(), bytes.len())
        });
        // SAFETY: pinned memory stays where it is until this rank, whose it is, gives it back; that takes this borrow's end.
        unsafe { std::slice::from_raw_parts_mut(at, bytes) }
    }

    fn create_stream(&mut self) -> Result<Queue, DriverError> {
        self.with(Driver::create_stream)
    }
    fn destroy_stream(&mut self, stream: Queue) -> Result<(), DriverError> {
        self.card.borrow_mut().queues.remove(&stream.0);
        self.with(|d| d.destroy_stream(stream))
    }
    fn create_event(&mut self) -> Result<Event, DriverError> {
        self.with(Driver::create_event)
    }
    fn create_clock(&mut self) -> Result<Event, DriverError> {
        self.with(Driver::create_clock)
    }
    fn elapsed(&mut self, from: Event, to: Event) -> Result<u64, DriverError> {
        self.with(|d| d.elapsed(from, to))
    }
    fn destroy_event(&mut self, event: Event) -> Result<(), DriverError> {
        self.card.borrow_mut().records.remove(&event);
        self.with(|d| d.destroy_event(event))
    }
    fn record(&mut self, event: Event, stream: Queue) -> Result<(), DriverError> {
        let card = &mut *self.card.borrow_mut();
        let records = card.records.entry(event).or_default();
        records.kept += 1;
        let number = records.kept;
        card.keep(stream, Op::Record { event, number });
        Ok(())
    }
    fn wait(&mut self, stream: Queue, event: Event) -> Result<(), DriverError> {
        let card = &mut *self.card.borrow_mut();
        let records = card.records.entry(event).or_default();
        let number = records.kept;
        *records.waits.entry(number).or_default() += 1;
        card.keep(stream, Op::Wait { event, number });
        Ok(())
    }

    fn load(&mut self, launch: &Launch) -> Result<Kernel, DriverError> {
        self.with(|d| d.load(launch))
    }
    fn unload(&mut self, kernel: Kernel) -> Result<(), DriverError> {
        self.with(|d| d.unload(kernel))
    }
    fn launch(&mut self, kernel: Kernel, launch: &Launch, args: &[Value], stream: Queue) -> Result<(), DriverError> {
        self.keep(stream, Op::Launch(kernel, Box::new(launch.clone()), args.to_vec()))
    }

    fn copy_in(&mut self, to: Address, from: Pinned, offset: u64, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        self.keep(stream, Op::CopyIn(to, from, offset, bytes))
    }
    fn copy_out(&mut self, to: Pinned, offset: u64, from: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        self.keep(stream, Op::CopyOut(to, offset, from, bytes))
    }
    fn copy_rows(&mut self, rows: Rows, stream: Queue) -> Result<(), DriverError> {
        self.keep(stream, Op::Rows(rows))
    }
    fn call(&mut self, errand: &Arc<Errand>, stream: Queue) -> Result<(), DriverError> {
        self.keep(stream, Op::Call(Arc::clone(errand)))
    }
    fn zero(&mut self, at: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        self.keep(stream, Op::Zero(at, bytes))
    }

    fn split(&mut self, family: u64, members: Option<&[u64]>) -> Result<Option<Communicator>, DriverError> {
        let Some(members) = members else { return Ok(None) };
        let card = &mut *self.card.borrow_mut();
        let found = card.groups.iter().position(|g| g.family == family && g.members == members);
        let at = match found {
            Some(at) => at,
            None => {
                let here = members.iter().map(|_| card.driver.create_event()).collect::<Result<_, _>>()?;
                let done = card.driver.create_event()?;
                card.groups.push(Group { family, members: members.to_vec(), here, done, memory: Vec::new() });
                card.groups.len() - 1
            }
        };
        Ok(Some(Communicator(at as u64)))
    }
    /// Groups end with the device.
    fn leave(&mut self, _: Communicator) -> Result<(), DriverError> {
        Ok(())
    }
    fn abort(&mut self, _: Communicator) -> Result<(), DriverError> {
        Ok(())
    }
    fn exchange(&mut self, communicator: Communicator, what: Exchange, stream: Queue) -> Result<(), DriverError> {
        self.meet(communicator, Meeting::Exchange(what), stream)
    }
    fn send(&mut self, communicator: Communicator, _: u64, from: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        self.meet(communicator, Meeting::Send { from, bytes }, stream)
    }
    fn receive(&mut self, communicator: Communicator, _: u64, to: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        self.meet(communicator, Meeting::Receive { to, bytes }, stream)
    }

    fn begin_capture(&mut self, _: Queue) -> Result<(), DriverError> {
        Err(DriverError { call: "cuStreamBeginCapture", why: "ranks that share a GPU are launched call by call".into() })
    }
    fn end_capture(&mut self, stream: Queue) -> Result<Captured, DriverError> {
        self.with(|d| d.end_capture(stream))
    }
    fn replay(&mut self, graph: Captured, stream: Queue) -> Result<(), DriverError> {
        self.with(|d| d.replay(graph, stream))
    }
    fn discard(&mut self, graph: Captured) -> Result<(), DriverError> {
        self.with(|d| d.discard(graph))
    }

    fn synchronise(&mut self) -> Result<(), DriverError> {
        let card = &mut *self.card.borrow_mut();
        card.make()?;
        card.driver.synchronise()
    }
}
