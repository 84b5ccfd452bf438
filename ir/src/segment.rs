//! Segments: the pieces of a stage's program that its schedule calls, once or for each micro-batch.

use crate::entity::SegmentId;
use crate::program::Issue;

/// What a segment is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum SegmentKind {
    /// Start of a step: clear what accumulates.
    Begin,
    Forward,
    /// Input and weight gradients of a micro-batch.
    Backward,
    /// The same for the last micro-batch, with gradient synchronisation between.
    BackwardLast,
    /// Of a parted backward pass, what makes the cotangent that the virtual stage before waits for.
    BackwardInput,
    /// The rest of it.
    BackwardWeight,
    /// The same for the last micro-batch, with gradient synchronisation between.
    BackwardWeightLast,
    /// Norm, clip, optimizer, parameter gathers.
    Update,
    /// Puts parameters by for the backward pass of a micro-batch.
    Stash,
    /// End of a step of many updates: what comes once.
    End,
}

impl SegmentKind {
    pub const ALL: [SegmentKind; 10] = [
        SegmentKind::Begin,
        SegmentKind::Forward,
        SegmentKind::Backward,
        SegmentKind::BackwardLast,
        SegmentKind::BackwardInput,
        SegmentKind::BackwardWeight,
        SegmentKind::BackwardWeightLast,
        SegmentKind::Update,
        SegmentKind::Stash,
        SegmentKind::End,
    ];
    pub fn name(self) -> &'static str {
        match self {
            SegmentKind::Begin => "begin",
            SegmentKind::Forward => "forward",
            SegmentKind::Backward => "backward",
            SegmentKind::BackwardLast => "backward_last",
            SegmentKind::BackwardInput => "backward_input",
            SegmentKind::BackwardWeight => "backward_weight",
            SegmentKind::BackwardWeightLast => "backward_weight_last",
            SegmentKind::Update => "update",
            SegmentKind::Stash => "stash",
            SegmentKind::End => "end",
        }
    }
    pub fn from_name(name: &str) -> Option<SegmentKind> {
        SegmentKind::ALL.into_iter().find(|s| s.name() == name)
    }
}

#[derive(Clone, PartialEq, Debug)]
pub struct Segment {
    pub kind: SegmentKind,
    pub body: Vec<Issue>,
}

/// Run a segment for a micro-batch (0 for `Begin`, `End`, and an `Update` that is the only one of the step).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    pub segment: SegmentId,
    pub micro_batch: u64,
}
