//! Operands as Hopper's copy engine (TMA) takes them.

/// Matrices of one shape, of elements of two bytes. Neighbours along the first dim are neighbours in memory.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorMap {
    pub dims: [u64; 3],
    /// Bytes from neighbour to neighbour along the second and third dim.
    pub pitches: [u64; 2],
}

impl TensorMap {
    /// What one copy brings: elements along each dim. Its rows of 128 bytes are swizzled in shared memory; what is outside of the tensor comes as zeros.
    pub const BOX: [u32; 3] = [64, 64, 1];

    /// `matrices` of `rows` by `columns`, whose elements lie `row` elements from row to row and `batch` from matrix to matrix. `None` if the copy engine does not take such a
    /// tensor: it counts to 2^31, and in steps of 16 bytes.
    pub fn new([columns, rows, matrices]: [u64; 3], [row, batch]: [u64; 2]) -> Option<TensorMap> {
        // There is no step where there is no second row or matrix, but one is asked for.
        let pitch = |n: u64, elements: u64| if n > 1 { elements.checked_mul(2) } else { Some(16) };
        let (dims, pitches) = ([columns, rows, matrices], [pitch(rows, row)?, pitch(matrices, batch)?]);
        let fits = dims.iter().all(|&d| d > 0 && d < 1 << 31) && pitches.iter().all(|&p| p > 0 && p % 16 == 0 && p < 1 << 40);
        fits.then_some(TensorMap { dims, pitches })
    }
    /// Bytes from the first element to the end of the last.
    pub fn bytes(&self) -> u64 {
        self.dims[0] * 2 + (self.dims[1] - 1) * self.pitches[0] + (self.dims[2] - 1) * self.pitches[1]
    }
}
