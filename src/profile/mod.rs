//! Profiles: what the ranks of a run did, and when, as other tools recorded it.
//!
//! The model: a [`Profile`] is a list of [`Rank`]s; a rank is a list of [`Event`]s sorted by start, each on a [`Lane`] (a device stream or a host
//! thread), and a list of [`Comm`]s: the communication among them, joined with all that is known of it. Invariants, kept by every reader:
//! - A time is an `i64` of nanoseconds since the Unix epoch, or since whatever the profiler counts from; it is exact, since stamps are read as
//!   decimals and never through a float. Only differences mean anything, and only after [`analyse::clock`] between ranks.
//! - `Event::kind` says what the event occupies: a kernel, a copy or running communication occupies a device; an op or a launch occupies a host
//!   thread; a range occupies nothing, it only names what happens inside it.
//! - A rank has device events, or it is a CPU run whose ops are its computation.
//! - What a file does not hold is `None` and, where an answer suffers, a line in `notes`; nothing is made up.
//!
//! Waiting is inside communication: a collective kernel runs from its own launch to the common end, so its duration is the wait for the last
//! rank plus the transfer. Readers leave that as it is; [`analyse::matching`] takes it apart.

pub mod analyse;
mod classify;
mod error;
mod read;
pub mod report;

pub use classify::{CommKernels, KernelClass};
pub use error::Error;
pub use read::{parse, read};

use std::collections::HashMap;

/// Nanoseconds.
pub type Ns = i64;

/// The ranks of one run, sorted by rank, each at most once.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    pub ranks: Vec<Rank>,
    /// What could not be read, for people.
    pub notes: Vec<String>,
}

/// What one rank did.
#[derive(Clone, Debug, Default)]
pub struct Rank {
    pub rank: u32,
    /// The file it was read from, as it was named.
    pub source: String,
    pub format: Format,
    pub world_size: Option<u32>,
    /// `nccl`, `gloo`.
    pub backend: Option<String>,
    /// Ranks of one host share a clock.
    pub host: Option<String>,
    pub device: Option<Device>,
    /// Process groups this rank is a member of.
    pub groups: Vec<Group>,
    pub lanes: Vec<Lane>,
    pub names: Names,
    /// Sorted by start; of two that start together the longer first, so that a parent precedes its children.
    pub events: Vec<Event>,
    /// Sorted by start.
    pub comms: Vec<Comm>,
    pub memory: Memory,
    /// What is missing from this rank, for people.
    pub notes: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Format {
    /// PyTorch's profiler.
    #[default]
    Kineto,
    /// `dplan trace` and `dplan run --profile`, or any Chrome trace with a process per rank.
    Chrome,
    /// Nsight Systems, its SQLite export.
    NsysSqlite,
    /// Nsight Systems, `nsys stats --report cuda_gpu_trace --format csv`.
    NsysCsv,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Device {
    pub name: String,
    pub memory_bytes: Option<u64>,
}

/// A process group.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Group {
    pub name: String,
    /// What the program calls it: `default_pg`, `mesh_tp`.
    pub description: String,
    /// Sorted.
    pub ranks: Vec<u32>,
}

/// Something that does one thing at a time: a stream of a device, or a host thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lane {
    /// The process or device it belongs to, as written.
    pub process: String,
    /// The thread or stream, as written.
    pub thread: String,
    /// What the file calls it; may be empty.
    pub name: String,
}

/// An index into [`Rank::lanes`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LaneId(pub u32);

/// An index into [`Rank::names`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NameId(pub u32);

/// One thing that happened.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Event {
    pub start: Ns,
    /// Never negative.
    pub duration: Ns,
    /// When the host asked for it: the start of the call that launched a device event.
    pub launched: Option<Ns>,
    pub name: NameId,
    pub lane: LaneId,
    pub kind: Kind,
}

impl Event {
    pub fn end(&self) -> Ns {
        self.start.saturating_add(self.duration)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Computation on a device.
    Kernel(KernelClass),
    /// Communication; also in [`Rank::comms`].
    Comm,
    /// A copy, or a fill.
    Copy(Direction),
    /// An operator on a host thread. Of a CPU run it is the computation; of a device run it is what launches.
    Op,
    /// A host op that only issues or awaits communication: it computes nothing, and its duration is no transfer.
    CommCall,
    /// A call of the device's runtime or driver.
    Call,
    /// A named range.
    Range,
}

impl Kind {
    /// Whether it occupies a device.
    pub fn on_device(self) -> bool {
        match self {
            Kind::Kernel(_) | Kind::Copy(_) => true,
            // Where it runs, device or host, is the reader's to know; a run with communication alone has no device events.
            Kind::Comm | Kind::Op | Kind::CommCall | Kind::Call | Kind::Range => false,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    ToDevice,
    FromDevice,
    Within,
    BetweenDevices,
    Fill,
}

/// One piece of communication, as one rank saw it.
#[derive(Clone, PartialEq, Debug)]
pub struct Comm {
    pub start: Ns,
    pub duration: Ns,
    pub lane: LaneId,
    pub op: CommOp,
    /// What the rank gives, and what it gets, in bytes of payload.
    pub sent_bytes: Option<u64>,
    pub received_bytes: Option<u64>,
    /// Number of elements given.
    pub elements: Option<u64>,
    /// As the profile names it.
    pub dtype: Option<String>,
    /// Members; `None` where the profile does not say.
    pub group: Option<Vec<u32>>,
    pub group_size: Option<u32>,
    /// The other side of a send or receive.
    pub peer: Option<u32>,
    /// Position among the collectives of its group.
    pub sequence: Option<u64>,
    /// `RING`, `TREE`, and `LL`, `LL128`, `SIMPLE`, from the kernel's name.
    pub algorithm: Option<String>,
    pub protocol: Option<String>,
    /// When the host issued it.
    pub issued: Option<Ns>,
    /// Whether backward (an autograd function) issued it; `None` where that is not recorded.
    pub backward: Option<bool>,
    /// A send or receive whose event spans from posting to awaiting and not the transfer (gloo).
    pub posted: bool,
    /// What the library ran instead of `op`, if that differs (gloo reduces where it should reduce-scatter).
    pub ran_as: Option<CommOp>,
}

impl Comm {
    pub fn end(&self) -> Ns {
        self.start.saturating_add(self.duration)
    }

    /// Size by the convention of nccl-tests: the whole result of a gather, the whole input of everything else.
    pub fn bytes(&self, group_size: Option<u32>) -> Option<u64> {
        let times = |n: Option<u64>| n.zip(group_size).map(|(n, g)| n.saturating_mul(u64::from(g)));
        match self.op {
            CommOp::AllGather | CommOp::Gather => self.received_bytes.or_else(|| times(self.sent_bytes)),
            CommOp::ReduceScatter | CommOp::Scatter => self.sent_bytes.or_else(|| times(self.received_bytes)),
            CommOp::AllReduce
            | CommOp::AllToAll
            | CommOp::Broadcast
            | CommOp::Reduce
            | CommOp::Send
            | CommOp::Recv
            | CommOp::SendRecv
            | CommOp::Barrier
            | CommOp::Other => self.sent_bytes.or(self.received_bytes),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum CommOp {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    Send,
    Recv,
    /// A NCCL kernel of sends and receives whose direction is not recorded.
    SendRecv,
    Barrier,
    /// Communication of an unknown kind.
    Other,
}

impl CommOp {
    pub const ALL: [CommOp; 13] = [
        CommOp::AllReduce,
        CommOp::AllGather,
        CommOp::ReduceScatter,
        CommOp::AllToAll,
        CommOp::Broadcast,
        CommOp::Reduce,
        CommOp::Gather,
        CommOp::Scatter,
        CommOp::Send,
        CommOp::Recv,
        CommOp::SendRecv,
        CommOp::Barrier,
        CommOp::Other,
    ];

    pub fn name(self) -> &'static str {
        match self {
            CommOp::AllReduce => "all_reduce",
            CommOp::AllGather => "all_gather",
            CommOp::ReduceScatter => "reduce_scatter",
            CommOp::AllToAll => "all_to_all",
            CommOp::Broadcast => "broadcast",
            CommOp::Reduce => "reduce",
            CommOp::Gather => "gather",
            CommOp::Scatter => "scatter",
            CommOp::Send => "send",
            CommOp::Recv => "recv",
            CommOp::SendRecv => "send_recv",
            CommOp::Barrier => "barrier",
            CommOp::Other => "other",
        }
    }

    /// Whether it is between two ranks only.
    pub fn point_to_point(self) -> bool {
        matches!(self, CommOp::Send | CommOp::Recv | CommOp::SendRecv)
    }

    /// Bus bandwidth over size/time, by the convention of nccl-tests, in a group of `n`: the share of the size that must cross the busiest link.
    pub fn bus_factor(self, n: u32) -> f64 {
        let n = f64::from(n.max(1));
        match self {
            CommOp::AllReduce => 2.0 * (n - 1.0) / n,
            CommOp::AllGather | CommOp::ReduceScatter | CommOp::AllToAll | CommOp::Gather | CommOp::Scatter => (n - 1.0) / n,
            CommOp::Broadcast | CommOp::Reduce | CommOp::Send | CommOp::Recv | CommOp::SendRecv | CommOp::Barrier | CommOp::Other => 1.0,
        }
    }
}

/// Peaks, where the profile recorded memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Memory {
    pub allocated_bytes: Option<u64>,
    pub reserved_bytes: Option<u64>,
}

/// Every distinct name once.
#[derive(Clone, Debug, Default)]
pub struct Names {
    all: Vec<Box<str>>,
    ids: HashMap<Box<str>, NameId>,
}

impl Names {
    /// The id of `name`, and whether it is new.
    pub fn intern(&mut self, name: &str) -> (NameId, bool) {
        if let Some(&id) = self.ids.get(name) {
            return (id, false);
        }
        let id = NameId(self.all.len() as u32);
        self.all.push(name.into());
        self.ids.insert(name.into(), id);
        (id, true)
    }

    pub fn get(&self, id: NameId) -> &str {
        &self.all[id.0 as usize]
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

impl Rank {
    pub fn name(&self, event: &Event) -> &str {
        self.names.get(event.name)
    }

    /// Whether anything ran on a device: otherwise ops are the computation.
    pub fn has_device(&self) -> bool {
        self.events.iter().any(|e| e.kind.on_device())
    }

    pub fn ranges(&self) -> impl Iterator<Item = (&Event, &str)> {
        self.events.iter().filter(|e| e.kind == Kind::Range).map(|e| (e, self.name(e)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        assert_eq!(CommOp::AllReduce.bus_factor(8), 1.75);
        assert_eq!(CommOp::AllGather.bus_factor(4), 0.75);
        assert_eq!(CommOp::ReduceScatter.bus_factor(4), 0.75);
        assert_eq!(CommOp::AllToAll.bus_factor(2), 0.5);
        assert_eq!(CommOp::Broadcast.bus_factor(8), 1.0);
        assert_eq!(CommOp::AllReduce.bus_factor(1), 0.0);
        assert_eq!(CommOp::AllReduce.bus_factor(0), 0.0, "a damaged group size divides by nothing");
    }

    #[test]
    fn an_event_stays_small() {
        assert!(size_of::<Event>() <= 48, "{} bytes an event", size_of::<Event>());
    }
}
