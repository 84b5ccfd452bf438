//! Kinds of damage, and their names.

use super::words;

/// Kinds of damage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Damage {
    DropRun,
    DropCollective,
    DropMessage,
    DropZero,
    DropAddInto,
    DropCopy,
    DropSquareSum,
    DropUpdate,
    DropRecord,
    DropWait,
    RepeatCollective,
    RepeatMessage,
    RepeatAccumulation,
    RepeatUpdate,
    SwapNeighbours,
    SwapCollectives,
    WrongPeer,
    WrongChannel,
    WrongPattern,
    WrongDim,
    WrongMonoid,
    FewerAxes,
    MoreAxes,
    WithoutStages,
    SetForAdd,
    AddForSet,
    CountOften,
    CountRarely,
    WithoutClip,
    WrongMoment,
    WrongOperand,
    WrongResult,
    WrongNode,
    OtherStream,
    AliasBuffer,
    MoveBuffer,
    ShortenBuffer,
    FewerSlots,
    NarrowSlots,
    WholeForPiece,
    WrongPartial,
    Untie,
    ShiftMember,
    DropCall,
    RepeatCall,
    SwapCalls,
    WrongMicroBatch,
    SmallerArena,
    /// A copy between device and another memory goes the other way.
    CopyBackwards,
    /// A wait is for another event.
    WrongEvent,
    /// A record comes before what it stands for.
    EarlyRecord,
    /// A wait comes after what it holds.
    LateWait,
    /// The update leaves the parameters in the compute type as they were.
    StaleParam,
    /// The update comes first in its segment.
    EarlyUpdate,
    /// An instruction is anywhere else in its segment.
    OtherPlace,
    /// A flat buffer claims another role.
    WrongRole,
    /// A value claims to be sharded in another dim.
    WrongSharding,
    /// A flat buffer claims to be less cut up.
    WrongPieces,
    /// A buffer is of a shorter type.
    ShorterType,
    /// A kernel has no working memory.
    WithoutScratch,
    /// A call is of another segment.
    WrongSegment,
    /// There is a micro-batch more than calls.
    MoreMicroBatches,
    /// A dim is padded further.
    OtherPadding,
    /// The memory of the host is smaller.
    LessHost,
    /// A collective is over another axis of the same size.
    OtherAxis,
    /// A dropout draws with the key of another one, and says of its operand and result what fits that.
    WrongKey,
    /// The file is shorter.
    LessFile,
    DropTrustSums,
    WithoutTrust,
    /// Gradients on the wire are not rounded, or their shares not added up.
    DropCast,
    /// A copy between memories comes first in its segment: before what it takes along is there, or before its place is free.
    EarlyCopy,
    /// A copy takes another frame along.
    OtherFrame,
    /// Of a piece, a gather in place makes only a larger piece.
    HalfGather,
    /// Gradients are gathered before they are reduced.
    GatherPending,
    /// An operation across stages leaves one out.
    FewerStages,
    /// One stage sums over stages before, not after, its ranks.
    OtherOrderAcross,
    /// A bucket is not counted in the norm, which is gone when the step ends.
    ForgetNorm,
    /// The loss or the norm is zeroed when the step ends.
    LoseScalar,
    /// A copy or a sum takes the bytes of another place, under the old name.
    ShiftedSource,
    /// A size, a place or a stride is near 2⁶².
    HugeNumber,
    /// A home has a slot more.
    MoreSlots,
    /// Parts of a ring are not joined.
    DropJoin,
    /// Keys of another turn, or parts of other pairs of blocks.
    OtherTurn,
    /// A block claims to be of another rank.
    WrongTurn,
    /// A part claims other pairs of blocks.
    WrongPairs,
    /// An axis is nested twice, and another one not at all.
    WrongNesting,
    /// A pass works with parameters of another place: the newest for those that were put by, or the reverse.
    OtherVersion,
    /// Parameters that are put by have a place less, so that a version is overwritten early.
    FewerVersions,
    /// Parameters are put by behind the update that they should be safe from.
    LateStash,
    /// An update comes a call later.
    LateUpdate,
    /// A program says that it updates once a step where it does so behind each micro-batch, or the reverse.
    OtherUpdates,
    /// Gradients are not compressed.
    DropCompress,
    /// Gradients are compressed twice.
    RepeatCompress,
    /// Gradients are compressed with what is left over of others.
    OtherResidual,
    /// What is left over is written elsewhere, and the residual stays as it was.
    StaleResidual,
    /// What is left over is cleared before it counts.
    LoseResidual,
    /// What is left over is read by something else.
    ReadResidual,
    /// Pairs are fewer than are sent.
    FewerPairs,
}

impl Damage {
    pub const ALL: [Damage; 98] = [
        Damage::DropRun,
        Damage::DropCollective,
        Damage::DropMessage,
        Damage::DropZero,
        Damage::DropAddInto,
        Damage::DropCopy,
        Damage::DropSquareSum,
        Damage::DropUpdate,
        Damage::DropRecord,
        Damage::DropWait,
        Damage::RepeatCollective,
        Damage::RepeatMessage,
        Damage::RepeatAccumulation,
        Damage::RepeatUpdate,
        Damage::SwapNeighbours,
        Damage::SwapCollectives,
        Damage::WrongPeer,
        Damage::WrongChannel,
        Damage::WrongPattern,
        Damage::WrongDim,
        Damage::WrongMonoid,
        Damage::FewerAxes,
        Damage::MoreAxes,
        Damage::WithoutStages,
        Damage::SetForAdd,
        Damage::AddForSet,
        Damage::CountOften,
        Damage::CountRarely,
        Damage::WithoutClip,
        Damage::WrongMoment,
        Damage::WrongOperand,
        Damage::WrongResult,
        Damage::WrongNode,
        Damage::OtherStream,
        Damage::AliasBuffer,
        Damage::MoveBuffer,
        Damage::ShortenBuffer,
        Damage::FewerSlots,
        Damage::NarrowSlots,
        Damage::WholeForPiece,
        Damage::WrongPartial,
        Damage::Untie,
        Damage::ShiftMember,
        Damage::DropCall,
        Damage::RepeatCall,
        Damage::SwapCalls,
        Damage::WrongMicroBatch,
        Damage::SmallerArena,
        Damage::CopyBackwards,
        Damage::WrongEvent,
        Damage::EarlyRecord,
        Damage::LateWait,
        Damage::StaleParam,
        Damage::EarlyUpdate,
        Damage::OtherPlace,
        Damage::WrongRole,
        Damage::WrongSharding,
        Damage::WrongPieces,
        Damage::ShorterType,
        Damage::WithoutScratch,
        Damage::WrongSegment,
        Damage::MoreMicroBatches,
        Damage::OtherPadding,
        Damage::LessHost,
        Damage::OtherAxis,
        Damage::WrongKey,
        Damage::LessFile,
        Damage::DropTrustSums,
        Damage::WithoutTrust,
        Damage::DropCast,
        Damage::EarlyCopy,
        Damage::OtherFrame,
        Damage::HalfGather,
        Damage::GatherPending,
        Damage::FewerStages,
        Damage::OtherOrderAcross,
        Damage::ForgetNorm,
        Damage::LoseScalar,
        Damage::ShiftedSource,
        Damage::HugeNumber,
        Damage::MoreSlots,
        Damage::DropJoin,
        Damage::OtherTurn,
        Damage::WrongTurn,
        Damage::WrongPairs,
        Damage::WrongNesting,
        Damage::OtherVersion,
        Damage::FewerVersions,
        Damage::LateStash,
        Damage::LateUpdate,
        Damage::OtherUpdates,
        Damage::DropCompress,
        Damage::RepeatCompress,
        Damage::OtherResidual,
        Damage::StaleResidual,
        Damage::LoseResidual,
        Damage::ReadResidual,
        Damage::FewerPairs,
    ];

    /// In words: `drop wait`.
    pub fn name(self) -> String {
        words(&format!("{self:?}"))
    }
}
