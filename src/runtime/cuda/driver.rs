//! What a rank asks of CUDA and NCCL, so that a GPU and a stand-in for one take the same calls.
//!
//! The model is CUDA's. Work is queued to streams; a stream runs what it has in order, streams run beside each other; `wait` holds a stream until the event's latest
//! `record` before it has completed. Calls that queue return at once; [`Driver::synchronise`] waits for everything. A communicator is met by all its members with the same
//! calls in the same order. Between `begin_capture` and `end_capture` nothing is done: what is queued to the stream, and to those that wait for it, becomes a graph, that can be
//! queued as often as one likes; by its end the stream has waited for all of them. After a call has failed, only calls that give something back are made.

use std::sync::Arc;

use dplan_ir::dtype::DType;
use dplan_kernels::cuda::{Launch, Target, TensorMap};

use super::disk::Errand;
use super::load::Primitive;

/// A call that failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{call}: {why}")]
pub struct DriverError {
    /// The function of CUDA or NCCL.
    pub call: &'static str,
    pub why: String,
}

/// A byte of device memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Address(pub u64);

impl Address {
    pub fn plus(self, bytes: u64) -> Address {
        Address(self.0 + bytes)
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),*) => {
        $($(#[$doc])* #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)] pub struct $name(pub u64);)*
    };
}

handles! {
    /// A stream of the device.
    Queue,
    Event,
    /// A loaded kernel.
    Kernel,
    /// Memory of the host that the device reads and writes itself.
    Pinned,
    Communicator,
    /// Queued work, recorded.
    Captured
}

/// An argument of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Value {
    /// Memory from here on. A device takes the address alone; a stand-in holds the kernel to the rest.
    Memory {
        at: Address,
        bytes: u64,
        access: Access,
    },
    /// Memory from here on that the device's copy engine reads, described to it.
    Tensor {
        at: Address,
        bytes: u64,
        map: TensorMap,
    },
    Int(i64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Read,
    Write,
}

/// Rows of `width` bytes, `from_pitch` apart in the source and `to_pitch` in the destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    pub from: Address,
    pub from_pitch: u64,
    pub to: Address,
    pub to_pitch: u64,
    pub width: u64,
    pub rows: u64,
}

/// What a communicator is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exchange {
    pub primitive: Primitive,
    /// As the primitive counts them.
    pub elems: u64,
    pub dtype: DType,
    pub from: Address,
    pub to: Address,
}

/// One rank's device. Implementations give everything back that was not, when they are dropped.
pub trait Driver {
    /// What kernels must be for.
    fn target(&self) -> Target;

    /// Device memory whose first byte is at a multiple of 256.
    ///
    /// # Errors
    /// Here and below: if the call fails.
    fn allocate(&mut self, bytes: u64) -> Result<Address, DriverError>;
    fn free(&mut self, at: Address) -> Result<(), DriverError>;
    /// Memory of the host; what is in it is not said.
    fn pin(&mut self, bytes: u64) -> Result<Pinned, DriverError>;
    fn unpin(&mut self, memory: Pinned) -> Result<(), DriverError>;
    /// The bytes of pinned memory. Nothing that is queued may touch them meanwhile.
    fn pinned(&mut self, memory: Pinned) -> &mut [u8];

    fn create_stream(&mut self) -> Result<Queue, DriverError>;
    fn destroy_stream(&mut self, stream: Queue) -> Result<(), DriverError>;
    fn create_event(&mut self) -> Result<Event, DriverError>;
    /// An event that takes the time when it is recorded.
    fn create_clock(&mut self) -> Result<Event, DriverError>;
    /// Nanoseconds from the record of one clock to that of another, both of which have completed; none if the other was first.
    fn elapsed(&mut self, from: Event, to: Event) -> Result<u64, DriverError>;
    fn destroy_event(&mut self, event: Event) -> Result<(), DriverError>;
    fn record(&mut self, event: Event, stream: Queue) -> Result<(), DriverError>;
    fn wait(&mut self, stream: Queue, event: Event) -> Result<(), DriverError>;

    /// Compiles a launch's text and loads its kernel.
    fn load(&mut self, launch: &Launch) -> Result<Kernel, DriverError>;
    fn unload(&mut self, kernel: Kernel) -> Result<(), DriverError>;
    /// Queues a launch of the sizes that `launch` has.
    fn launch(&mut self, kernel: Kernel, launch: &Launch, args: &[Value], stream: Queue) -> Result<(), DriverError>;

    /// From pinned memory to the device.
    fn copy_in(&mut self, to: Address, from: Pinned, offset: u64, bytes: u64, stream: Queue) -> Result<(), DriverError>;
    /// From the device to pinned memory.
    fn copy_out(&mut self, to: Pinned, offset: u64, from: Address, bytes: u64, stream: Queue) -> Result<(), DriverError>;
    fn copy_rows(&mut self, rows: Rows, stream: Queue) -> Result<(), DriverError>;
    /// Queues what the host does. The caller keeps it until it was done.
    fn call(&mut self, errand: &Arc<Errand>, stream: Queue) -> Result<(), DriverError>;
    fn zero(&mut self, at: Address, bytes: u64, stream: Queue) -> Result<(), DriverError>;

    /// Parts all ranks into groups; every rank makes this call, those in no group with no members. `family` numbers these calls. Members are ranks, in group order.
    fn split(&mut self, family: u64, members: Option<&[u64]>) -> Result<Option<Communicator>, DriverError>;
    /// Gives a communicator back whose work is done.
    fn leave(&mut self, communicator: Communicator) -> Result<(), DriverError>;
    /// Ends whatever a communicator does, and gives it back.
    fn abort(&mut self, communicator: Communicator) -> Result<(), DriverError>;
    fn exchange(&mut self, communicator: Communicator, what: Exchange, stream: Queue) -> Result<(), DriverError>;
    /// `peer` is a position in the communicator.
    fn send(&mut self, communicator: Communicator, peer: u64, from: Address, bytes: u64, stream: Queue) -> Result<(), DriverError>;
    fn receive(&mut self, communicator: Communicator, peer: u64, to: Address, bytes: u64, stream: Queue) -> Result<(), DriverError>;

    fn begin_capture(&mut self, stream: Queue) -> Result<(), DriverError>;
    /// Ends it also where it fails.
    fn end_capture(&mut self, stream: Queue) -> Result<Captured, DriverError>;
    /// Queues what was captured, with the addresses and numbers that it had then.
    fn replay(&mut self, graph: Captured, stream: Queue) -> Result<(), DriverError>;
    fn discard(&mut self, graph: Captured) -> Result<(), DriverError>;

    /// Waits until all streams have done all they were given.
    fn synchronise(&mut self) -> Result<(), DriverError>;
}
