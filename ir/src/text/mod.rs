//! The text form of all levels: printing, and parsing back to the same thing.
//!
//! ```text
//! graph "tiny"
//! dim b = 2 batch
//! dim h = 8
//! table t0 = [1.0, 0.1]                                       // rotary angles, each table once
//! input %tokens: i32[b, s]
//! param %embed: f32[v, h] normal(0.02) from "wte.weight"[259, 8]
//! layer 0 {
//!   %x = embed (%embed, %tokens): f32[b, s, h]
//! }
//! …
//! layer 0 {
//!   %embed.d = embed_grad (%tokens, %x.d): f32[v, h] weight_grad_of %x
//! }
//! loss %loss
//! grads {
//!   %embed: %embed.d
//! }
//! cotangents {
//!   %x: %x.d
//! }
//! ```
//!
//! - One statement a line, but line ends mean nothing; `//` begins a comment.
//! - A value is `%name` (`%"any name"` if need be), a dim its bare name. Where a name is not unique, `#` and the id follow each use of it. Definitions
//!   are numbered in order; one that is out of order says its number in the same way.
//! - A node is called like its first result.
//! - Numbers are exact: reals are printed with the fewest digits that read back to the same bits.
//!
//! Parsers accept any bytes: they never panic, and what they allocate is bounded by the length of the text, up to stated limits.

mod lexer;
mod op;
mod parse_graph;
mod parser;
mod place;
mod print_graph;
mod scope;

pub use op::op_name;
pub use place::{Place, Printed};

use crate::graph::Graph;
use parser::Parser;

/// A place in a text that is wrong.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{line}:{column}: found {found}; expected {expected}")]
pub struct ParseError {
    /// From 1.
    pub line: u32,
    /// In characters, from 1.
    pub column: u32,
    pub found: String,
    pub expected: String,
}

pub fn print_graph(graph: &Graph) -> String {
    graph_printed(graph).text
}

/// The graph as text that knows on which line each of its entities is.
pub fn graph_printed(graph: &Graph) -> Printed {
    print_graph::graph(graph)
}

/// # Errors
/// The first place that is wrong.
pub fn parse_graph(text: &str) -> Result<Graph, ParseError> {
    let mut p = Parser::new(text);
    let graph = parse_graph::graph(&mut p)?;
    end(&p).map(|()| graph)
}

fn end(p: &Parser<'_>) -> Result<(), ParseError> {
    if p.is_end() { Ok(()) } else { Err(p.expected("the end of the text")) }
}

#[cfg(test)]
mod arbitrary;
#[cfg(test)]
mod tests;
