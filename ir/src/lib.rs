//! What a program is. No I/O, no clock, no hardware, no search.
//!
//! Three levels, each with text, a verifier and a reference interpreter:
//! 1. [`graph`]: logical shapes, one device, one micro-batch;
//! 2. [`sharded`]: the same values, each use in an explicit sharding over a [`mesh`], with explicit reshards;
//! 3. [`program`]: instructions, streams, events and a static arena for every rank.
//!
//! The facts about an operation ([`op`]) are its factor rule ([`rule`]), its type rule ([`infer`]), its cost ([`cost`]), its derivative ([`grad`]) and its
//! meaning ([`interp`]); nothing else in the project knows an operation by name, but the kernels that run it.

pub mod access;
pub mod bucket;
pub mod build;
pub mod capacity;
pub mod cost;
pub mod data;
pub mod documents;
pub mod dropout;
pub mod dtype;
pub mod entity;
pub mod extent;
pub mod grad;
pub mod graph;
pub mod infer;
pub mod init;
pub mod interp;
pub mod layers;
pub mod mesh;
pub mod nest;
pub mod op;
pub mod optimizer;
pub mod order;
pub mod pipeline;
pub mod plan;
pub mod program;
pub mod reshard;
pub mod ring;
pub mod rule;
pub mod segment;
pub mod sharded;
pub mod sharding;
pub mod splitmix;
pub mod sync;
pub mod text;
pub mod updates;
pub mod verify;
