//! A rank while it is read, whatever the format: readers push records in any order, [`Draft::finish`] joins them.
//!
//! Joins, each by what the records share:
//! - a device event with the call that launched it: same correlation;
//! - a communication kernel with its metadata: its own arguments, then the record with its external id, then the records whose span on the
//!   launching thread holds the launch (traces of old have no arguments), then its name. A kernel launched before the window has the name alone.
//! - where no communication kernel is on a device (gloo), the back end's ranges are the communication; they run on threads of their own, so
//!   the op that issued one is the last whose record-function id is smaller, and on the same thread the one that holds it.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

use super::meta::Meta;
use crate::profile::classify::{CommKernel, CommKernels, KernelClass, comm_range};
use crate::profile::{Comm, CommOp, Direction, Event, Kind, Lane, LaneId, Memory, NameId, Ns, Rank};

/// No event lasts longer than a day.
const LONGEST: Ns = 86_400_000_000_000;

/// Keeps a stamp where differences of stamps cannot overflow; every real one is.
pub fn within(stamp: Ns) -> Ns {
    stamp.clamp(-4_000_000_000_000_000_000, 4_000_000_000_000_000_000)
}

pub struct Draft<'r> {
    pub rank: Rank,
    rules: &'r CommKernels,
    lanes: HashMap<String, LaneId>,
    /// What a kernel of this name is.
    kernels: HashMap<NameId, Result<KernelClass, CommKernel>>,
    calls: HashMap<u64, Call>,
    /// Device events, and the correlation of their launch.
    launched: Vec<(usize, u64)>,
    device_comms: Vec<DeviceComm>,
    host_comms: Vec<HostComm>,
    hints: Vec<Hint>,
    /// Where autograd functions ran.
    backward: Vec<(LaneId, Ns, Ns)>,
    /// Peaks, by process; [`Draft::split`] gives each rank its own.
    memories: BTreeMap<String, Memory>,
    key: String,
}

#[derive(Clone, Copy)]
struct Call {
    start: Ns,
    lane: LaneId,
}

#[derive(Clone)]
struct DeviceComm {
    event: usize,
    kernel: CommKernel,
    own: Meta,
    external: Option<u64>,
}

#[derive(Clone)]
struct HostComm {
    event: usize,
    op: CommOp,
    own: Meta,
    function: Option<u64>,
}

/// A host record that says something of the communication issued while it lasted.
struct Hint {
    start: Ns,
    end: Ns,
    lane: LaneId,
    external: Option<u64>,
    function: Option<u64>,
    rung: Rung,
    meta: Meta,
}

/// Which of several records knows best.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rung {
    /// `record_param_comms`.
    Parameters,
    /// `c10d::…`.
    Call,
    /// `nccl:…`.
    Range,
}

/// Where and when.
#[derive(Clone, Copy)]
pub struct At {
    pub start: Ns,
    pub duration: Ns,
    pub lane: LaneId,
}

/// What joins a record to others.
#[derive(Clone, Copy, Default)]
pub struct Ids {
    pub correlation: Option<u64>,
    pub external: Option<u64>,
    pub function: Option<u64>,
}

impl<'r> Draft<'r> {
    pub fn new(rules: &'r CommKernels) -> Draft<'r> {
        Draft {
            rank: Rank::default(),
            rules,
            lanes: HashMap::new(),
            kernels: HashMap::new(),
            calls: HashMap::new(),
            launched: Vec::new(),
            device_comms: Vec::new(),
            host_comms: Vec::new(),
            hints: Vec::new(),
            backward: Vec::new(),
            memories: BTreeMap::new(),
            key: String::new(),
        }
    }

    pub fn lane(&mut self, process: &str, thread: &str) -> LaneId {
        self.key.clear();
        self.key.push_str(process);
        self.key.push('\0');
        self.key.push_str(thread);
        if let Some(&lane) = self.lanes.get(&self.key) {
            return lane;
        }
        let lane = LaneId(self.rank.lanes.len() as u32);
        self.rank.lanes.push(Lane { process: process.into(), thread: thread.into(), name: String::new() });
        self.lanes.insert(self.key.clone(), lane);
        lane
    }

    pub fn kernel(&mut self, at: At, name: &str, ids: Ids, args: impl FnOnce() -> Map<String, Value>) {
        let (id, _) = self.rank.names.intern(name);
        let rules = self.rules;
        let known = self.kernels.entry(id).or_insert_with(|| rules.of(name).map_or_else(|| Ok(KernelClass::of(name)), Err));
        match known {
            Ok(class) => {
                let kind = Kind::Kernel(*class);
                self.device(at, id, kind, ids);
            }
            Err(kernel) => {
                let kernel = kernel.clone();
                let event = self.device(at, id, Kind::Comm, ids);
                self.device_comms.push(DeviceComm { event, kernel, own: Meta::of_args(&args()), external: ids.external });
            }
        }
    }

    /// Communication that says itself what it is.
    pub fn comm(&mut self, at: At, name: &str, op: CommOp, args: &Map<String, Value>) {
        let (id, _) = self.rank.names.intern(name);
        let event = self.device(at, id, Kind::Comm, Ids::default());
        self.device_comms.push(DeviceComm {
            event,
            kernel: CommKernel { op, algorithm: None, protocol: None },
            own: Meta::of_args(args),
            external: None,
        });
    }

    pub fn copy(&mut self, at: At, name: &str, direction: Direction, ids: Ids) {
        let (id, _) = self.rank.names.intern(name);
        self.device(at, id, Kind::Copy(direction), ids);
    }

    /// A call of the runtime.
    pub fn call(&mut self, at: At, name: &str, correlation: Option<u64>) {
        if let Some(correlation) = correlation {
            self.calls.insert(correlation, Call { start: within(at.start), lane: at.lane });
        }
        self.push(at, name, Kind::Call);
    }

    pub fn op(&mut self, at: At, name: &str) {
        if name.starts_with("autograd::engine::evaluate_function") {
            self.backward.push((at.lane, at.start, at.start.saturating_add(at.duration)));
        }
        self.push(at, name, Kind::Op);
    }

    /// A host op that issues or awaits communication.
    pub fn comm_call(&mut self, at: At, name: &str, ids: Ids, rung: Rung, args: &Map<String, Value>) {
        self.push(at, name, Kind::CommCall);
        self.hint(at, ids, rung, Meta::of_call(name, args));
    }

    /// A named range; of a back end's range also what it says of its collective.
    pub fn range(&mut self, at: At, name: &str, ids: Ids, args: impl FnOnce() -> Map<String, Value>) {
        let event = self.push(at, name, Kind::Range);
        if let Some(op) = comm_range(name) {
            let meta = Meta::of_range(op, name, &args());
            self.hint(at, ids, Rung::Range, meta.clone());
            self.host_comms.push(HostComm { event, op, own: meta, function: ids.function });
        }
    }

    /// What a range of another kind says of the collectives issued in it.
    pub fn hint(&mut self, at: At, ids: Ids, rung: Rung, meta: Meta) {
        let end = at.start.saturating_add(at.duration);
        self.hints.push(Hint { start: at.start, end, lane: at.lane, external: ids.external, function: ids.function, rung, meta });
    }

    fn device(&mut self, at: At, name: NameId, kind: Kind, ids: Ids) -> usize {
        let event = self.add(at, name, kind);
        if let Some(correlation) = ids.correlation {
            self.launched.push((event, correlation));
        }
        event
    }

    fn push(&mut self, at: At, name: &str, kind: Kind) -> usize {
        let (name, _) = self.rank.names.intern(name);
        self.add(at, name, kind)
    }

    fn add(&mut self, at: At, name: NameId, kind: Kind) -> usize {
        self.rank.events.push(Event { start: within(at.start), duration: at.duration.clamp(0, LONGEST), launched: None, name, lane: at.lane, kind });
        self.rank.events.len() - 1
    }

    /// A process holds so much; of all its records the largest count.
    pub fn memory(&mut self, process: &str, allocated: Option<u64>, reserved: Option<u64>) {
        for memory in [&mut self.rank.memory, self.memories.entry(process.into()).or_default()] {
            memory.allocated_bytes = memory.allocated_bytes.max(allocated);
            memory.reserved_bytes = memory.reserved_bytes.max(reserved);
        }
    }

    /// The same records, apart by the process of their lane. Calls and hints join nothing here: such traces say of an event what it is.
    pub fn split(self) -> Vec<(String, Draft<'r>)> {
        let mut parts: BTreeMap<&str, Draft<'r>> = BTreeMap::new();
        let mut moved = Vec::with_capacity(self.rank.events.len());
        for event in &self.rank.events {
            let lane = &self.rank.lanes[event.lane.0 as usize];
            let part = parts.entry(&lane.process).or_insert_with(|| Draft::new(self.rules));
            part.rank.format = self.rank.format;
            let id = part.lane(&lane.process, &lane.thread);
            part.rank.lanes[id.0 as usize].name.clone_from(&lane.name);
            let (name, _) = part.rank.names.intern(self.rank.names.get(event.name));
            moved.push(part.rank.events.len());
            part.rank.events.push(Event { lane: id, name, ..*event });
        }
        let process = |event: usize| self.rank.lanes[self.rank.events[event].lane.0 as usize].process.as_str();
        for comm in &self.device_comms {
            if let Some(part) = parts.get_mut(process(comm.event)) {
                part.device_comms.push(DeviceComm { event: moved[comm.event], ..comm.clone() });
            }
        }
        for comm in &self.host_comms {
            if let Some(part) = parts.get_mut(process(comm.event)) {
                part.host_comms.push(HostComm { event: moved[comm.event], ..comm.clone() });
            }
        }
        let mut memories = self.memories;
        let mut own = |process: &str, mut draft: Draft<'r>| {
            draft.rank.memory = memories.remove(process).unwrap_or_default();
            (process.to_string(), draft)
        };
        parts.into_iter().map(|(process, draft)| own(process, draft)).collect()
    }

    /// Joins, sorts, and gives the rank.
    pub fn finish(mut self) -> Rank {
        let mut launch_lanes = HashMap::new();
        for &(event, correlation) in &self.launched {
            if let Some(call) = self.calls.get(&correlation) {
                self.rank.events[event].launched = Some(call.start);
                launch_lanes.insert(event, call.lane);
            }
        }
        let index = HintIndex::new(std::mem::take(&mut self.hints));
        let backward = Backward::new(std::mem::take(&mut self.backward));
        if self.device_comms.is_empty() {
            for comm in &self.host_comms {
                self.rank.events[comm.event].kind = Kind::Comm;
                let made = host_comm(comm, &self.rank.events[comm.event], &index, &backward);
                self.rank.comms.push(made);
            }
        } else {
            for comm in &self.device_comms {
                let lane = launch_lanes.get(&comm.event).copied();
                let made = device_comm(comm, &self.rank.events[comm.event], lane, &index, &backward);
                self.rank.comms.push(made);
            }
        }
        self.rank.events.sort_by_key(|e| (e.start, std::cmp::Reverse(e.duration), e.lane));
        self.rank.comms.sort_by_key(|c| (c.start, c.lane));
        self.rank
    }
}

fn device_comm(found: &DeviceComm, event: &Event, lane: Option<LaneId>, index: &HintIndex, backward: &Backward) -> Comm {
    let mut comm = blank(event, found.kernel.op);
    let held = event.launched.zip(lane).map_or_else(Meta::default, |(at, lane)| index.holding(lane, at));
    found.own.clone().or(index.external(found.external)).or(held).tell(&mut comm);
    comm.algorithm = found.kernel.algorithm.clone();
    comm.protocol = found.kernel.protocol.clone();
    comm.issued = event.launched;
    comm.backward = event.launched.zip(lane).and_then(|(at, lane)| backward.holds(lane, at));
    comm
}

fn host_comm(found: &HostComm, event: &Event, index: &HintIndex, backward: &Backward) -> Comm {
    let mut comm = blank(event, found.op);
    let issuer = index.before(found.function);
    let issued = issuer.map_or((event.lane, event.start), |hint| (hint.lane, hint.start));
    let said = issuer.map_or_else(|| index.holding(event.lane, event.start), |hint| hint.meta.clone());
    said.or(found.own.clone()).tell(&mut comm);
    comm.issued = Some(issued.1);
    comm.backward = backward.holds(issued.0, issued.1);
    // The event of a send or receive lasts from posting to awaiting.
    comm.posted = found.op.point_to_point();
    comm.ran_as = Some(found.op).filter(|op| *op != comm.op);
    comm
}

fn blank(event: &Event, op: CommOp) -> Comm {
    Comm {
        start: event.start,
        duration: event.duration,
        lane: event.lane,
        op,
        sent_bytes: None,
        received_bytes: None,
        elements: None,
        dtype: None,
        group: None,
        group_size: None,
        peer: None,
        sequence: None,
        algorithm: None,
        protocol: None,
        issued: None,
        backward: None,
        posted: false,
        ran_as: None,
    }
}

/// Hints by lane and start, by external id, and calls by record-function id.
struct HintIndex {
    all: Vec<Hint>,
    external: HashMap<u64, usize>,
    functions: Vec<(u64, usize)>,
}

impl HintIndex {
    fn new(mut all: Vec<Hint>) -> HintIndex {
        all.sort_by_key(|h| (h.lane, h.start, std::cmp::Reverse(h.end)));
        let mut external = HashMap::new();
        let mut functions = Vec::new();
        for (i, hint) in all.iter().enumerate() {
            if let Some(id) = hint.external {
                external.entry(id).or_insert(i);
            }
            if let (Some(id), Rung::Call, true) = (hint.function, hint.rung, hint.meta.op.is_some()) {
                functions.push((id, i));
            }
        }
        functions.sort_unstable();
        HintIndex { all, external, functions }
    }

    fn external(&self, id: Option<u64>) -> Meta {
        id.and_then(|id| self.external.get(&id)).map_or_else(Meta::default, |&i| self.all[i].meta.clone())
    }

    /// All that the records say whose span holds `at` on `lane`, the best first.
    fn holding(&self, lane: LaneId, at: Ns) -> Meta {
        let after = self.all.partition_point(|h| (h.lane, h.start) <= (lane, at));
        // Records of one collective nest three or four deep; what is further back is another's.
        let mut found: Vec<&Hint> = self.all[..after].iter().rev().take(8).filter(|h| h.lane == lane && h.end >= at).collect();
        found.sort_by_key(|h| h.rung);
        found.into_iter().fold(Meta::default(), |meta, h| meta.or(h.meta.clone()))
    }

    /// The call whose record-function id is the last before `id`.
    fn before(&self, id: Option<u64>) -> Option<&Hint> {
        let id = id?;
        let after = self.functions.partition_point(|(f, _)| *f < id);
        let (_, i) = self.functions.get(after.checked_sub(1)?)?;
        self.all.get(*i)
    }
}

/// Where autograd functions ran: disjoint spans by lane.
struct Backward(Vec<(LaneId, Ns, Ns)>);

impl Backward {
    fn new(mut spans: Vec<(LaneId, Ns, Ns)>) -> Backward {
        spans.sort_unstable();
        // One inside another says nothing more.
        spans.dedup_by(|next, kept| next.0 == kept.0 && next.2 <= kept.2);
        Backward(spans)
    }

    fn holds(&self, lane: LaneId, at: Ns) -> Option<bool> {
        if self.0.is_empty() {
            return None;
        }
        let after = self.0.partition_point(|s| (s.0, s.1) <= (lane, at));
        Some(after.checked_sub(1).is_some_and(|i| self.0[i].0 == lane && self.0[i].2 >= at))
    }
}
