//! The data of one step.
//!
//! A step's input tensor is that of the graph with `micro_batches` times as many sequences. With B = sequences of a micro-batch over all
//! data-parallel ranks (the size of the graph's batch dim), sequence j of micro-batch m is row m·B + j, and the data-parallel rank at position i has the j in
//! [i·B/dp, (i+1)·B/dp). Any assignment gives the same step, since gradients are summed over all rows.

/// All inputs of a step, in the order of [`dplan_ir::graph::Graph::inputs`].
#[derive(Clone, PartialEq, Debug)]
pub struct Batch {
    pub inputs: Vec<Rows>,
}

/// One input tensor, row-major.
#[derive(Clone, PartialEq, Debug)]
pub enum Rows {
    Tokens(Vec<i32>),
    Values(Vec<f64>),
}

impl Rows {
    pub fn len(&self) -> usize {
        match self {
            Rows::Tokens(t) => t.len(),
            Rows::Values(v) => v.len(),
        }
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
