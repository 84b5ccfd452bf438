//! What a graph means: naive evaluation in f64.
//!
//! This is the reference every executor is tested against, so it is written to be read: no blocking, no reuse of memory, no threads. [`op::eval`] gives the
//! meaning of one op on one rank's blocks; [`graph`] runs a whole graph, and a whole training step, on one device.

pub mod graph;
pub mod op;
pub mod program;
pub mod ring;
pub mod sharded;
pub mod tensor;

pub use tensor::Tensor;
