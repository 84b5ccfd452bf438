//! Random compositions: any legal plan trains as one device does, and the verifier tells right programs from damaged ones.
//!
//! A [`Case`] is drawn, lowered, proved, and run for three steps ([`run`]): on CPU ranks in f64, or, where its plan computes in 16 bits beside master copies, by
//! the program's interpreter, whose arithmetic is f64 whatever types say, so that masters, copies and loss scaling are there and roundings are not. Losses,
//! norms, gradients, moments and weights must be those of the graph's interpreter on one device; where gradients are rounded for their exchange, of one that rounds in the
//! same places ([`wire`]). [`space`] says which dimensions the space has and draws so
//! that each of them, and each pair of them that can be together, comes up. What fails is made smaller as long as it fails ([`shrink`]), and its text is
//! the argument that runs it again.
//!
//! [`mutate`] damages proved programs and their graphs in every way of the catalogue ([`dplan_ir::verify::mutate`]). The verifier must reject each, or the program must still
//! compute what it did; programs rewritten without harm it must accept.

pub mod mutate;
pub mod run;
pub mod shrink;
pub mod space;
mod wire;

pub use dplan_planner::drawn::Case;
