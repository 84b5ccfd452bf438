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
//! A sharded graph or a program refers to its graph by names:
//!
//! ```text
//! sharded                                                     | program
//! mesh [dp=2, tp0=2]                                          | mesh [dp=2, tp0=2]
//! padded v = 260                                              | micro_batches 4
//! f0: %embed<tp0, _>                                          | optimizer adamw
//! f1: %tokens<dp, _>                                          | stage 0 {
//! body {                                                      |   arena 8192
//!   f2: %x<dp, _, _ +sum{tp0}> = run %x {b={dp}, v={tp0}} …   |   events 2
//!   f3: %x<dp, tp0, _> = reduce_scatter {tp0} dim 1 sum (f2)… |   region states at 0 bytes 4096
//! }                                                           |   bucket0 = 1024 elems partial {dp} {
//!                                                             |     %embed<tp0, _> at 0 len 1024
//!                                                             |   }
//!                                                             |   buf0 = %x<dp, _, _> f32 1024 bytes at 4096 slots 4 stride 1024
//!                                                             |   segment forward {
//!                                                             |     compute run %x (buf1, buf2) -> (buf0)
//!                                                             |   }
//!                                                             |   schedule {
//!                                                             |     repeat 4 { forward 0 }
//!                                                             |   }
//!                                                             | }
//! ```
//!
//! In a sharding `<dp, tp0*tp1, _ +sum{tp2}>` each dim names the axes that cut it, `_` none; `+sum{…}` is a pending reduction. `->` sets its target, `+>`
//! adds to it. Buffers, buckets, forms and events are numbered; a segment is called by its kind (`forward#1` if a stage has several). In a schedule,
//! `repeat 4 { forward 0 }` calls micro-batches 0, 1, 2, 3.
//!
//! Parsers accept any bytes: they never panic, and what they allocate is bounded by the length of the text, up to stated limits.

mod lexer;
mod mesh;
mod op;
mod parse_graph;
mod parse_program;
mod parser;
mod place;
mod print_graph;
mod print_program;
mod scope;
mod sharded;

pub use op::op_name;
pub use place::{Place, Printed};

use crate::graph::Graph;
use crate::mesh::Mesh;
use crate::program::Program;
use crate::sharded::Sharded;
use crate::sharding::Sharding;
use parser::Parser;
use scope::Known;

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

pub fn print_sharded(sharded: &Sharded, graph: &Graph) -> String {
    sharded_printed(sharded, graph).text
}

/// The sharded graph as text that knows on which line each of its entities is.
pub fn sharded_printed(sharded: &Sharded, graph: &Graph) -> Printed {
    sharded::print(sharded, graph)
}

/// Reads a sharded form of `graph`.
///
/// # Errors
/// The first place that is wrong.
pub fn parse_sharded(text: &str, graph: &Graph) -> Result<Sharded, ParseError> {
    let mut p = Parser::new(text);
    let sharded = sharded::parse(&mut p, &Known::new(graph))?;
    end(&p).map(|()| sharded)
}

pub fn print_program(program: &Program, graph: &Graph) -> String {
    program_printed(program, graph).text
}

/// The program as text that knows on which line each of its entities is.
pub fn program_printed(program: &Program, graph: &Graph) -> Printed {
    print_program::program(program, graph)
}

/// Reads a program for `graph`, which is differentiated.
///
/// # Errors
/// The first place that is wrong.
pub fn parse_program(text: &str, graph: &Graph) -> Result<Program, ParseError> {
    let mut p = Parser::new(text);
    let program = parse_program::program(&mut p, &Known::new(graph))?;
    end(&p).map(|()| program)
}

/// A sharding as the text form spells it: `<dp, tp0*tp1, _ +sum{tp2}>`.
pub fn spell_sharding(sharding: &Sharding, mesh: &Mesh) -> String {
    let mut out = String::new();
    mesh::put_sharding(&mut out, sharding, mesh);
    out
}

/// A file: a graph, and what has been made of it.
#[derive(Clone, PartialEq, Debug)]
pub struct Document {
    pub graph: Graph,
    pub sharded: Option<Sharded>,
    pub program: Option<Program>,
}

pub fn print(document: &Document) -> String {
    let Document { graph, sharded, program } = document;
    let parts = [Some(print_graph(graph)), sharded.as_ref().map(|s| print_sharded(s, graph)), program.as_ref().map(|p| print_program(p, graph))];
    parts.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

/// Reads a graph and, if they follow, its sharded form and its program.
///
/// # Errors
/// The first place that is wrong.
pub fn parse(text: &str) -> Result<Document, ParseError> {
    let mut p = Parser::new(text);
    let graph = parse_graph::graph(&mut p)?;
    let known = Known::new(&graph);
    let sharded = if p.is_word("sharded") { Some(sharded::parse(&mut p, &known)?) } else { None };
    let program = if p.is_word("program") { Some(parse_program::program(&mut p, &known)?) } else { None };
    if !p.is_end() {
        return Err(p.expected("`sharded`, `program` or the end of the text, in this order"));
    }
    Ok(Document { graph, sharded, program })
}

fn end(p: &Parser<'_>) -> Result<(), ParseError> {
    if p.is_end() { Ok(()) } else { Err(p.expected("the end of the text")) }
}

#[cfg(test)]
pub(crate) mod arbitrary;
#[cfg(test)]
mod tests;
