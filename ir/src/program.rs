//! The program: what every rank does in one training step, to the byte and in order.
//!
//! Ranks of one pipeline stage differ only in their mesh coordinates and share one [`StageProgram`]: a rank's class is its stage. A stage may hold several virtual
//! stages (runs of layers, [`crate::pipeline`]); each has segments of its own, and slots of its own for what it keeps. A stage program is
//! - an *arena*: one static allocation, in which every *buffer* is a typed byte range. A buffer *claims* its content ([`Content`]); the claims are
//!   not trusted: the verifier proves from the graph that each read finds what its buffer claims;
//! - *segments*: straight-line pieces, each run for one micro-batch at a time. Buffers with `slots > 1` are `slot_stride` bytes apart, one per
//!   micro-batch in flight: micro-batch `m` uses slot `m % slots`;
//! - a *schedule*: the calls of segments, in the order in which the rank's one thread issues them.
//!
//! **Streams.** Every instruction is issued to one stream. A stream runs its instructions in issue order; different streams run concurrently,
//! ordered by events alone: `wait e` holds its stream until the latest `record e` issued before it (in issue order, over all streams) has completed;
//! if none was issued in this step, it does not hold. A step begins when every stream of the rank has finished the step before.
//!
//! **Memory spaces.** Addresses run from the device's arena on through the rank's other memories ([`Space`]): the host's, then a file. Every instruction works in the
//! device's memory; `copy` alone goes between it and another.
//!
//! **Communicators.** A collective is met by the *group* of ranks that share its issuer's coordinates outside `axes`, on its stage or on all of
//! `stages`. Group order: stages in order, then position along `axes`, major axis first; reductions add in that order, starting from the first.
//! Members issue the collectives of one communicator in one order. `Send` and `Recv` pair ranks of two stages with the same local rank; each ordered pair of stages
//! and each [`Channel`] is a first-in-first-out communicator of its own; a send completes when its receive has the bytes (rendezvous).
//!
//! **Updates.** A program updates parameters once a step or behind every micro-batch ([`Updates`]). In the latter case the step is a window of as many updates, and parameters that a
//! backward pass still needs are put by, one slot for each micro-batch in flight but the one that begins.
//!
//! **Flat buckets.** Parameters of one layer that are sharded alike and synchronised alike are laid out one after the other in a *bucket*. Its roles
//! (parameters, master copy, gradients, moments) are flat buffers with the same element offsets, whole or cut into equal pieces over data-parallel axes
//! (ZeRO); piece boundaries need not respect tensors. Padding elements are zero.
//!
//! **Wire.** Gradients that travel in a shorter type than they are added up in, or to one rank that adds them up, do so in four steps, each an instruction (of which the
//! first is left out where nothing is rounded: gradients are then exchanged from where they are):
//!
//! ```text
//! cast           wire ← gradients, rounded                          all pieces of this rank's sum
//! all_to_all     wire from axes ← wire                              this rank's piece of every member's sum
//! sum_shares     gradients piece axes ← Σ wire from axes            in group order, in the type of gradients
//! all_gather     gradients ← gradients piece axes                   only where every rank wants all of it
//! ```
//!
//! Of which only the largest elements travel, in three. What does not travel is not lost: it is in the bucket's *residual*, which a rank has for itself alone and
//! keeps from step to step, and counts in the next exchange. Pairs are so many values and then their places in the bucket, each as long as one element:
//!
//! ```text
//! compress       wire keeping k ← the k largest of gradients + residual, by magnitude, of equal ones the first
//!                residual ← gradients + residual, 0 where it travels        and the gradients are used up
//! all_gather     wire from axes keeping k ← wire keeping k                  every member's pairs
//! sum_shares     gradients, or this rank's piece ← Σ wire from axes         0 where nobody's pairs are
//! ```

pub use crate::bucket::{Bucket, Member};
use crate::dtype::DType;
use crate::entity::{BucketId, BufferId, EventId, NodeId, ParamId, SegmentId, Table, ValueId};
use crate::mesh::{AxisSet, Mesh};
use crate::optimizer::Optimizer;
pub use crate::segment::{Call, Segment, SegmentKind};
use crate::sharding::{Monoid, Padded, Sharding};
pub use crate::updates::Updates;
use std::ops::Range;

/// Alignment of every buffer and arena region, bytes.
pub const ALIGN: u64 = 256;

/// Rounds a size up to [`ALIGN`].
pub fn align(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGN)
}

/// A memory of a rank, in the order of their addresses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Space {
    /// The arena, in which ops work.
    Device,
    Host,
    File,
}

impl Space {
    pub const ALL: [Space; 3] = [Space::Device, Space::Host, Space::File];
    pub fn name(self) -> &'static str {
        match self {
            Space::Device => "the device's memory",
            Space::Host => "the memory of the host",
            Space::File => "a file",
        }
    }
    /// Rounds a size up, so that what lies behind is aligned: in a file, to what disks read and write at once.
    pub fn align(self, bytes: u64) -> u64 {
        match self {
            Space::Device | Space::Host => align(bytes),
            Space::File => bytes.next_multiple_of(4096),
        }
    }
}

/// The programs of all stages.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Program {
    /// The mesh of each stage. Rank = stage × mesh.ranks() + local rank.
    pub mesh: Mesh,
    pub padded: Padded,
    pub micro_batches: u64,
    pub optimizer: Option<Optimizer>,
    pub updates: Updates,
    pub stages: Vec<StageProgram>,
}

impl Program {
    pub fn ranks(&self) -> u64 {
        self.mesh.ranks() * self.stages.len() as u64
    }

    /// The version of a stage's parameters that the passes of a micro-batch work with ([`Updates::version`]).
    pub fn version(&self, stage: usize, micro_batch: u64) -> u64 {
        self.updates.version((self.stages.len() - 1 - stage) as u64, micro_batch)
    }
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct StageProgram {
    pub arena_bytes: u64,
    /// Behind the arena: bytes in the memory of the host.
    pub host_bytes: u64,
    /// Behind these: bytes in the rank's file.
    pub file_bytes: u64,
    /// Named parts of the arena, for reports: `states`, `frames`, … In order, without gaps, covering the arena.
    pub regions: Vec<Region>,
    pub buckets: Table<BucketId, Bucket>,
    pub buffers: Table<BufferId, Buffer>,
    pub segments: Table<SegmentId, Segment>,
    pub schedule: Vec<Call>,
    pub events: u32,
}

impl StageProgram {
    /// Bytes of a memory.
    pub fn bytes_in(&self, space: Space) -> u64 {
        match space {
            Space::Device => self.arena_bytes,
            Space::Host => self.host_bytes,
            Space::File => self.file_bytes,
        }
    }

    /// Addresses of a memory.
    pub fn range(&self, space: Space) -> Range<u64> {
        let end = |of: Space| Space::ALL[..=of as usize].iter().fold(0u64, |sum, &s| sum.saturating_add(self.bytes_in(s)));
        end(space) - self.bytes_in(space).min(end(space))..end(space)
    }

    /// End of all addresses.
    pub fn end(&self) -> u64 {
        self.range(Space::File).end
    }

    /// The memory that an address is in.
    pub fn space_at(&self, address: u64) -> Space {
        let is = |space: &Space| self.bytes_in(*space) > 0 && address >= self.range(*space).start;
        Space::ALL.into_iter().rev().find(is).unwrap_or(Space::Device)
    }

    /// The memory that a buffer is in.
    pub fn space(&self, buffer: BufferId) -> Space {
        self.space_at(self.buffers[buffer].offset)
    }

    /// Where a role of a bucket lives between steps: the first of its flat buffers, in table order. Other flat buffers of that role hold it for a while
    /// within a step (gathered copies, turns of a ring) or are pieces of the home, in place.
    pub fn home(&self, bucket: BucketId, role: Role) -> Option<BufferId> {
        let of = |content: &Content| matches!(*content, Content::Flat { bucket: b, role: r, .. } if (b, r) == (bucket, role));
        self.buffers.iter().find(|(_, buffer)| of(&buffer.content)).map(|(id, _)| id)
    }

    /// The buffer in which the stage adds up a scalar, if it does.
    pub fn accumulates(&self, scalar: Scalar) -> Option<BufferId> {
        let is = |buffer: &BufferId| self.buffers[*buffer].content == Content::Scalar(scalar);
        self.segments.values().flat_map(|s| &s.body).find_map(|issue| match &issue.instr {
            Instr::Run { outs, .. } => outs.iter().copied().find(is),
            Instr::SquareSum { dst, .. } | Instr::AddInto { dst, .. } => Some(*dst).filter(is),
            _ => None,
        })
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region {
    pub name: String,
    pub offset: u64,
    pub bytes: u64,
}

/// What a flat bucket buffer holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Role {
    /// The parameters in the compute type. Where that is f32 or f64 they are their own master copy.
    Param,
    /// f32 copy that the optimizer updates, where the compute type is shorter.
    Master,
    /// Gradients in the accumulator type.
    Grad,
    /// First moment (Adam's m, SGD's momentum).
    Moment1,
    /// Second moment (Adam's v).
    Moment2,
    /// What of this rank's gradients has not travelled yet, in the accumulator type; no other rank's is the same.
    Residual,
}

impl Role {
    pub const ALL: [Role; 6] = [Role::Param, Role::Master, Role::Grad, Role::Moment1, Role::Moment2, Role::Residual];
    pub fn name(self) -> &'static str {
        match self {
            Role::Param => "param",
            Role::Master => "master",
            Role::Grad => "grad",
            Role::Moment1 => "moment1",
            Role::Moment2 => "moment2",
            Role::Residual => "residual",
        }
    }
    pub fn from_name(name: &str) -> Option<Role> {
        Role::ALL.into_iter().find(|r| r.name() == name)
    }
}

/// A step-wide scalar of a rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Scalar {
    /// Sum of the loss value over micro-batches.
    Loss,
    /// Sum of squares of all gradients.
    NormSquared,
    /// Factor that clips gradients.
    ClipScale,
}

impl Scalar {
    pub const ALL: [Scalar; 3] = [Scalar::Loss, Scalar::NormSquared, Scalar::ClipScale];
    pub fn name(self) -> &'static str {
        match self {
            Scalar::Loss => "loss",
            Scalar::NormSquared => "norm_squared",
            Scalar::ClipScale => "clip_scale",
        }
    }
    pub fn from_name(name: &str) -> Option<Scalar> {
        Scalar::ALL.into_iter().find(|r| r.name() == name)
    }
}

/// What a buffer claims to hold when it is read.
#[derive(Clone, PartialEq, Debug)]
pub enum Content {
    /// A graph value of the current micro-batch.
    Value {
        value: ValueId,
        sharding: Sharding,
    },
    /// One role of a bucket: all of it (`pieces` empty), or this rank's piece of `1/size(pieces)`.
    Flat {
        bucket: BucketId,
        role: Role,
        pieces: AxisSet,
    },
    /// One member's block inside a whole flat buffer (its bytes are a part of that buffer's).
    Member {
        bucket: BucketId,
        role: Role,
        param: ParamId,
    },
    Scalar(Scalar),
    /// For each member of a bucket, Σ w² and Σ u² over the elements of the parameter w and of the direction u of its update
    /// ([`crate::optimizer::trust_ratio`]).
    Trust {
        bucket: BucketId,
    },
    /// Gradients of a bucket on the wire, as they are or rounded to a shorter type: those of this rank, or (of every member along `from`, in group order) the piece that is this rank's.
    /// Where only so many are `kept`, pairs of value and place: those of this rank, or of every member along `from`, in group order, for all of the bucket.
    Wire {
        bucket: BucketId,
        from: AxisSet,
        kept: Option<u64>,
    },
    /// What a layer keeps of the current micro-batch: values side by side, of which each has a buffer of its own that says what it is. Copies take the bytes along.
    Frame,
    /// Working memory of one instruction; never read across instructions.
    Scratch,
}

/// A typed byte range of the arena. Buffers may overlap: two claims on one range are never both live.
#[derive(Clone, PartialEq, Debug)]
pub struct Buffer {
    pub content: Content,
    pub dtype: DType,
    /// Bytes of one slot on one rank.
    pub bytes: u64,
    /// Byte offset in the arena of slot 0, on the rank with coordinate 0 on `piece_axes`.
    pub offset: u64,
    pub slots: u64,
    pub slot_stride: u64,
    /// The rank at position `i` along these axes has its range `i × bytes` further on: its own piece of a whole flat buffer, in place.
    pub piece_axes: AxisSet,
}

impl Buffer {
    /// Where the buffer begins for a micro-batch, on a rank.
    pub fn offset_at(&self, micro_batch: u64, mesh: &Mesh, local_rank: u64) -> u64 {
        self.offset + micro_batch % self.slots.max(1) * self.slot_stride + mesh.position(local_rank, self.piece_axes) * self.bytes
    }
}

/// In-order queues of one rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Stream {
    /// Kernels, and the tensor-parallel collectives between them.
    Compute,
    /// Collectives over data-parallel ranks, and across stages.
    Comm,
    /// Copies between the device's memory and others.
    Copy,
    SendForward,
    RecvForward,
    SendBackward,
    RecvBackward,
    /// The same four for virtual stages on the way back, whose neighbours are on the other side: a message to one side never waits for one to the other.
    SendForwardBack,
    RecvForwardBack,
    SendBackwardBack,
    RecvBackwardBack,
}

impl Stream {
    pub const ALL: [Stream; 11] = [
        Stream::Compute,
        Stream::Comm,
        Stream::Copy,
        Stream::SendForward,
        Stream::RecvForward,
        Stream::SendBackward,
        Stream::RecvBackward,
        Stream::SendForwardBack,
        Stream::RecvForwardBack,
        Stream::SendBackwardBack,
        Stream::RecvBackwardBack,
    ];
    pub fn name(self) -> &'static str {
        match self {
            Stream::Compute => "compute",
            Stream::Comm => "comm",
            Stream::Copy => "copy",
            Stream::SendForward => "send_forward",
            Stream::RecvForward => "recv_forward",
            Stream::SendBackward => "send_backward",
            Stream::RecvBackward => "recv_backward",
            Stream::SendForwardBack => "send_forward_back",
            Stream::RecvForwardBack => "recv_forward_back",
            Stream::SendBackwardBack => "send_backward_back",
            Stream::RecvBackwardBack => "recv_backward_back",
        }
    }
    /// Whether it carries messages between stages.
    pub fn carries_messages(self) -> bool {
        !matches!(self, Stream::Compute | Stream::Comm | Stream::Copy)
    }
    pub fn from_name(name: &str) -> Option<Stream> {
        Stream::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// Which way a message between stages goes; each is a communicator of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Channel {
    /// Activations, to the next stage.
    Forward,
    /// Cotangents, to the previous stage.
    Backward,
}

/// Whether a result replaces or adds to what its buffer holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Write {
    Set,
    Add,
}

/// The communication pattern of a collective.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Pattern {
    AllReduce,
    /// The `dim` of the result is this rank's block of the reduction.
    ReduceScatter,
    /// The `dim` of the result is all members' blocks.
    AllGather,
    /// The `dim` of the result is of every member the block that has this rank's number: of gradients on the wire.
    AllToAll,
    /// The result is what the member before has, and that of the first what the last has: blocks go round ([`crate::ring`]).
    Shift,
}

impl Pattern {
    pub const ALL: [Pattern; 5] = [Pattern::AllReduce, Pattern::ReduceScatter, Pattern::AllGather, Pattern::AllToAll, Pattern::Shift];
    pub fn name(self) -> &'static str {
        match self {
            Pattern::AllReduce => "all_reduce",
            Pattern::ReduceScatter => "reduce_scatter",
            Pattern::AllGather => "all_gather",
            Pattern::AllToAll => "all_to_all",
            Pattern::Shift => "shift",
        }
    }
    pub fn from_name(name: &str) -> Option<Pattern> {
        Pattern::ALL.into_iter().find(|p| p.name() == name)
    }
    /// Whether what members have is combined by the monoid, and not only moved.
    pub fn reduces(self) -> bool {
        match self {
            Pattern::AllReduce | Pattern::ReduceScatter => true,
            Pattern::AllGather | Pattern::AllToAll | Pattern::Shift => false,
        }
    }
}

/// One instruction. Operands are buffers of the stage.
#[derive(Clone, PartialEq, Debug)]
pub enum Instr {
    /// Run a graph node on this rank's blocks; the factor assignment follows from the buffers' shardings. A forward node may run again in a backward
    /// segment (recompute). `write: Add` is for weight gradients, whose results are `Member` buffers with role `Grad`, and for the loss (`Scalar`).
    Run {
        node: NodeId,
        ins: Vec<BufferId>,
        outs: Vec<BufferId>,
        scratch: Option<BufferId>,
        write: Write,
    },
    /// Load a graph input of the micro-batch, this rank's block.
    Input {
        dst: BufferId,
    },
    /// Keep this rank's block of `dim` (a [`crate::reshard::Step::Slice`]).
    Slice {
        src: BufferId,
        dst: BufferId,
        axes: AxisSet,
        dim: u32,
    },
    /// A collective over `axes` of this stage and, where `stages` is not empty, over the same ranks of those stages. `src` and `dst` may be the same
    /// bytes (all-reduce), or `src` this rank's piece of `dst` and the reverse (gather, scatter). For flat buffers `dim` is 0.
    Collective {
        pattern: Pattern,
        axes: AxisSet,
        stages: Vec<u32>,
        dim: u32,
        monoid: Monoid,
        src: BufferId,
        dst: BufferId,
    },
    Send {
        to: u32,
        channel: Channel,
        src: BufferId,
    },
    Recv {
        from: u32,
        channel: Channel,
        dst: BufferId,
    },
    Zero {
        dst: BufferId,
    },
    /// dst ← src, of which one is in the device's memory and the other is not: a flat buffer, whole or a piece; or a frame. Of whole parameters both may be in the device's memory:
    /// a version is put by before it is updated.
    Copy {
        src: BufferId,
        dst: BufferId,
    },
    /// dst ← dst + src, elementwise.
    AddInto {
        src: BufferId,
        dst: BufferId,
    },
    /// dst ← left joined with right: parts of the same values that are made of different pairs of blocks ([`crate::ring`]), which may be where `left` is. By
    /// `Sum` any number of values, by `LogSumExp` the results (o, lse) of an attention.
    Join {
        monoid: Monoid,
        left: Vec<BufferId>,
        right: Vec<BufferId>,
        dst: Vec<BufferId>,
    },
    /// dst ← src, rounded: whole gradients to the wire.
    Cast {
        src: BufferId,
        dst: BufferId,
    },
    /// dst ← the largest elements of src + residual, as many as it keeps, as pairs in the order of their places; residual ← src + residual, 0 at these places.
    /// The gradients in `src` are used up by it: its bytes stand for nothing behind it.
    Compress {
        src: BufferId,
        residual: BufferId,
        dst: BufferId,
    },
    /// dst ← Σ over the members that `src` has shares of, in group order, starting from the first, in the type of `dst`: a piece of gradients, or of pairs all of them.
    SumShares {
        src: BufferId,
        dst: BufferId,
    },
    /// dst ← dst + Σ src², on the ranks whose coordinates on `once` are all 0 (elsewhere nothing): each logical element counts once.
    SquareSum {
        src: BufferId,
        dst: BufferId,
        once: AxisSet,
    },
    /// dst ← factor from scaled gradients, of norm √src, to clipped ones ([`crate::optimizer::StepScalars::gradient_scale`]).
    ClipScale {
        src: BufferId,
        dst: BufferId,
    },
    /// dst ← of each member of a bucket, what this rank's elements add to the sums of its trust ratio. The operands are those of the update that follows.
    TrustSums {
        state: BufferId,
        grad: BufferId,
        moments: Vec<BufferId>,
        scale: Option<BufferId>,
        dst: BufferId,
    },
    /// One optimizer step on flat buffers of the same elements: `state` (the master copy), its gradient and its moments; `param` receives the
    /// result in the compute type where that is another buffer. Gradients are scaled by `scale` first;
    /// where that [skips](crate::optimizer::skips), everything stays as it was. `trust` has the sums of an optimizer that [trusts](Optimizer::trusts).
    Update {
        state: BufferId,
        grad: BufferId,
        moments: Vec<BufferId>,
        param: Option<BufferId>,
        scale: Option<BufferId>,
        trust: Option<BufferId>,
    },
    Record(EventId),
    Wait(EventId),
}

#[derive(Clone, PartialEq, Debug)]
pub struct Issue {
    pub stream: Stream,
    pub instr: Instr,
}
