//! Element types.

use std::fmt;

/// The type of one tensor element.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DType {
    F64,
    F32,
    Bf16,
    F16,
    I32,
}

impl DType {
    pub const ALL: [DType; 5] = [DType::F64, DType::F32, DType::Bf16, DType::F16, DType::I32];

    /// Bytes of one element.
    pub fn size(self) -> u64 {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
        }
    }

    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|t| t.name() == name)
    }

    /// Whether gradients in it vanish or overflow unless the loss is scaled.
    pub fn scales_loss(self) -> bool {
        match self {
            DType::F16 => true,
            DType::F64 | DType::F32 | DType::Bf16 | DType::I32 => false,
        }
    }

    /// The type that sums, statistics, gradients and optimizer states of this compute type are kept in.
    pub fn accumulator(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            DType::F32 | DType::Bf16 | DType::F16 => DType::F32,
            DType::I32 => DType::I32,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
