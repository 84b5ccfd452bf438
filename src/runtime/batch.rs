//! The data of one step.
//!
//! A step's input tensor is that of the graph with `micro_batches` times as many sequences. With B = sequences of a micro-batch over all
//! data-parallel ranks (the size of the graph's batch dim), sequence j of micro-batch m is row m·B + j, and the data-parallel rank at position i has the j in
//! [i·B/dp, (i+1)·B/dp). Any assignment gives the same step, since gradients are summed over all rows.

use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;

use super::RuntimeError;

/// All inputs of a step, in the order of [`dplan_ir::graph::Graph::inputs`].
#[derive(Clone, PartialEq, Debug)]
pub struct Batch {
    pub inputs: Vec<Rows>,
}

impl Batch {
    /// # Errors
    /// If an input has another type, or not the elements that a step of so many micro-batches takes.
    pub fn check(&self, graph: &Graph, micro_batches: u64) -> Result<(), RuntimeError> {
        for (at, expected) in input_elems(graph, micro_batches).enumerate() {
            let value = &graph.values[graph.inputs[at]];
            let found = match (self.inputs.get(at), value.ty.dtype) {
                (Some(Rows::Tokens(t)), DType::I32) => t.len(),
                (Some(Rows::Values(v)), DType::F32 | DType::F64) => v.len(),
                _ => 0,
            };
            if found != expected {
                return Err(RuntimeError::Input { input: value.name.clone(), found, expected });
            }
        }
        Ok(())
    }
}

/// Elements of each input of a step.
pub fn input_elems(graph: &Graph, micro_batches: u64) -> impl Iterator<Item = usize> {
    graph.inputs.iter().map(move |&v| {
        let dims = &graph.values[v].ty.dims;
        let one: u64 = dims.iter().map(|&d| graph.size(d)).product();
        let repeats = if dims.iter().any(|&d| Some(d) == graph.batch) { micro_batches } else { 1 };
        (one * repeats) as usize
    })
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
