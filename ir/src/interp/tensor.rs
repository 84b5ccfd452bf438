//! Tensors of the reference interpreter.
//!
//! A tensor is one rank's part of a value: local dims, and its stored elements in row-major order. A top-k value stores only the rows that its gate
//! chooses, exactly as [`LocalType`] counts them, sorted by (expert, batch, seq), unused rows at the end being zero.

use crate::graph::Layout;
use crate::sharding::{LocalType, rows};

#[derive(Clone, PartialEq, Debug)]
pub struct Tensor {
    /// Local sizes; for a top-k value the logically dense ones.
    pub dims: Vec<u64>,
    pub layout: Layout,
    /// Stored elements. Token ids are whole numbers.
    pub data: Vec<f64>,
}

impl Tensor {
    pub fn zeros(ty: &LocalType) -> Tensor {
        Tensor { dims: ty.dims.clone(), layout: ty.layout, data: vec![0.0; ty.elems() as usize] }
    }
    /// A dense tensor with the given elements.
    ///
    /// # Panics
    /// If there are not as many elements as the dims say.
    pub fn dense(dims: &[u64], data: Vec<f64>) -> Tensor {
        assert_eq!(dims.iter().product::<u64>(), data.len() as u64, "elements of a tensor of dims {dims:?}");
        Tensor { dims: dims.to_vec(), layout: Layout::Dense, data }
    }
    /// A dense tensor whose element at each multi-index is `f(index)`.
    pub fn from_fn(dims: &[u64], mut f: impl FnMut(&[u64]) -> f64) -> Tensor {
        let mut data = Vec::with_capacity(dims.iter().product::<u64>() as usize);
        let mut index = vec![0; dims.len()];
        for _ in 0..dims.iter().product::<u64>() {
            data.push(f(&index));
            advance(&mut index, dims);
        }
        Tensor::dense(dims, data)
    }
    /// Elementwise function of stored elements.
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Tensor {
        Tensor { dims: self.dims.clone(), layout: self.layout, data: self.data.iter().map(|&x| f(x)).collect() }
    }
    /// Elementwise function of the stored elements of two tensors of one shape and layout.
    pub fn zip(&self, other: &Tensor, f: impl Fn(f64, f64) -> f64) -> Tensor {
        let data = self.data.iter().zip(&other.data).map(|(&x, &y)| f(x, y)).collect();
        Tensor { dims: self.dims.clone(), layout: self.layout, data }
    }
    /// Offset of an element of a dense tensor.
    pub fn at(&self, index: &[u64]) -> usize {
        index.iter().zip(&self.dims).fold(0, |at, (&i, &n)| at * n + i) as usize
    }
    /// Size of a dim, as an index.
    pub fn dim(&self, at: usize) -> usize {
        self.dims[at] as usize
    }

    /// A top-k value with all its rows, zero where the gate chooses none; a dense one as it is.
    pub fn to_dense(&self, gate: &Tensor) -> Tensor {
        if self.layout == Layout::Dense {
            return self.clone();
        }
        let width = self.dims[3..].iter().product::<u64>() as usize;
        let mut data = vec![0.0; self.dims.iter().product::<u64>() as usize];
        for (row, at) in chosen_rows(gate).into_iter().enumerate() {
            data[at * width..][..width].copy_from_slice(&self.data[row * width..][..width]);
        }
        Tensor::dense(&self.dims, data)
    }
    /// The stored form, in layout `layout`, of a value that is dense.
    pub fn to_layout(self, layout: Layout, gate: &Tensor) -> Tensor {
        let Layout::TopK { k, capacity } = layout else { return self };
        let width = self.dims[3..].iter().product::<u64>() as usize;
        let rows = rows(&self.dims, k, capacity);
        let mut data = vec![0.0; rows as usize * width];
        for (row, at) in chosen_rows(gate).into_iter().enumerate() {
            data[row * width..][..width].copy_from_slice(&self.data[at * width..][..width]);
        }
        Tensor { dims: self.dims, layout, data }
    }
}

/// For each stored row of a top-k value with this `gate[b,s,e]`, in order of (expert, batch, seq): its position among the rows of the dense value.
pub fn chosen_rows(gate: &Tensor) -> Vec<usize> {
    let (tokens, experts) = (gate.dim(0) * gate.dim(1), gate.dim(2));
    (0..experts).flat_map(|e| (0..tokens).map(move |t| t * experts + e)).filter(|&at| gate.data[at] != 0.0).collect()
}

/// The next multi-index in row-major order; back to zeros after the last.
pub fn advance(index: &mut [u64], dims: &[u64]) {
    for (i, &n) in index.iter_mut().zip(dims).rev() {
        *i += 1;
        if *i < n {
            return;
        }
        *i = 0;
    }
}
