//! Typed slices of a rank's memory.

use dplan_ir::dtype::DType;

/// Elements a kernel reads.
#[derive(Clone, Copy, Debug)]
pub enum Block<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
    I32(&'a [i32]),
}

/// Elements a kernel writes.
#[derive(Debug)]
pub enum BlockMut<'a> {
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
    I32(&'a mut [i32]),
}

impl Block<'_> {
    pub fn dtype(&self) -> DType {
        match self {
            Block::F32(_) => DType::F32,
            Block::F64(_) => DType::F64,
            Block::I32(_) => DType::I32,
        }
    }
    pub fn len(&self) -> usize {
        match self {
            Block::F32(s) => s.len(),
            Block::F64(s) => s.len(),
            Block::I32(s) => s.len(),
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
            Block::F32(_) | Block::F64(_) => panic!("{} where token ids were expected", self.dtype()),
        }
    }
}

impl BlockMut<'_> {
    pub fn dtype(&self) -> DType {
        match self {
            BlockMut::F32(_) => DType::F32,
            BlockMut::F64(_) => DType::F64,
            BlockMut::I32(_) => DType::I32,
        }
    }
    pub fn len(&self) -> usize {
        match self {
            BlockMut::F32(s) => s.len(),
            BlockMut::F64(s) => s.len(),
            BlockMut::I32(s) => s.len(),
        }
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
