//! Typed slices of a rank's memory.

use dplan_ir::dtype::DType;
use half::{bf16, f16};

/// Elements a kernel reads.
#[derive(Clone, Copy, Debug)]
pub enum Block<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
    I32(&'a [i32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

/// Elements a kernel writes.
#[derive(Debug)]
pub enum BlockMut<'a> {
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
    I32(&'a mut [i32]),
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

impl Block<'_> {
    pub fn dtype(&self) -> DType {
        match self {
            Block::F32(_) => DType::F32,
            Block::F64(_) => DType::F64,
            Block::I32(_) => DType::I32,
            Block::Bf16(_) => DType::Bf16,
            Block::F16(_) => DType::F16,
        }
    }
    pub fn len(&self) -> usize {
        match self {
            Block::F32(s) => s.len(),
            Block::F64(s) => s.len(),
            Block::I32(s) => s.len(),
            Block::Bf16(s) => s.len(),
            Block::F16(s) => s.len(),
        }
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> Block<'a> {
    /// # Panics
    /// If the elements are not integers.
    pub fn indices(self) -> &'a [i32] {
        match self {
            Block::I32(s) => s,
            Block::F32(_) | Block::F64(_) | Block::Bf16(_) | Block::F16(_) => panic!("{} where token ids were expected", self.dtype()),
        }
    }
}

impl BlockMut<'_> {
    pub fn dtype(&self) -> DType {
        match self {
            BlockMut::F32(_) => DType::F32,
            BlockMut::F64(_) => DType::F64,
            BlockMut::I32(_) => DType::I32,
            BlockMut::Bf16(_) => DType::Bf16,
            BlockMut::F16(_) => DType::F16,
        }
    }
    pub fn len(&self) -> usize {
        match self {
            BlockMut::F32(s) => s.len(),
            BlockMut::F64(s) => s.len(),
            BlockMut::I32(s) => s.len(),
            BlockMut::Bf16(s) => s.len(),
            BlockMut::F16(s) => s.len(),
        }
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
