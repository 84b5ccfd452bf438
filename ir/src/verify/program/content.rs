//! What a range of bytes holds, on this step's symbolic rank.

use crate::dtype::DType;
use crate::entity::{BucketId, ValueId};
use crate::mesh::AxisSet;
use crate::program::{Role, Scalar};

/// How many updates of the step a parameter or state has behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Version(pub u64);

impl Version {
    pub fn next(self) -> Version {
        Version(self.0 + 1)
    }
}

/// Content of a range that belongs to something which begins at byte `base`: a range is a part of it by where it lies, so that moved, cut or shifted bytes
/// are not mistaken for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fact {
    /// Unknown bytes; nothing may read them.
    Garbage,
    /// Zero, as the beginning of any sum.
    Zero,
    Value {
        value: ValueId,
        /// Interned sharding.
        sharding: u32,
        micro_batch: u64,
        base: u64,
    },
    State {
        bucket: BucketId,
        role: Role,
        version: Version,
        flat: Flat,
    },
    Grad {
        bucket: BucketId,
        sum: u32,
        flat: Flat,
    },
    Scalar {
        scalar: Scalar,
        sum: u32,
        base: u64,
        dtype: DType,
    },
    /// Gradients on the wire: all of this rank's, or the members' shares; or so many pairs of each.
    Wire {
        bucket: BucketId,
        sum: u32,
        from: AxisSet,
        kept: Option<u64>,
        base: u64,
    },
    /// A frame as it was copied from the device's memory, for a micro-batch: its number in [`super::frame::Frames`].
    Frame {
        number: u32,
        micro_batch: u64,
        base: u64,
    },
    /// The sums of a bucket's trust ratios, for the update of what has so many behind it, still to be added over some axes.
    Trust {
        bucket: BucketId,
        version: Version,
        pending: AxisSet,
        base: u64,
    },
}

/// Where a flat buffer lies, and whether it is only this rank's piece (a piece in place is a part of the whole).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Flat {
    pub base: u64,
    pub pieces: AxisSet,
}
