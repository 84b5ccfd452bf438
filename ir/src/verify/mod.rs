//! Verifiers: one for each level, run after each pass. They list *all* errors; an error in what the compiler made is a fault of the compiler, in a
//! file that a person edited it is that person's.

mod chain;
pub mod graph;
pub mod mutate;
mod node;
pub mod program;
pub mod report;
pub mod sharded;

pub use graph::{GraphError, verify_graph};
pub use program::verify_program;
