//! CPU ranks: threads of this process that execute programs.
//!
//! - [`arena`]: a rank's memory, allocated once, exactly `arena_bytes`;
//! - [`load`]: from instructions to actions, when a session begins;
//! - [`meeting`], [`collective`]: how ranks meet and what they do with each other's memory, in a fixed order of additions;
//! - [`executor`]: one rank's streams on one thread;
//! - [`super::scratch`]: what a rank keeps in a file;
//! - [`state`]: logical tensors in and out.
//!
//! A step allocates nothing but the packing buffers of matrix products.

pub mod arena;
pub mod collective;
pub mod executor;
pub mod load;
pub mod meeting;
pub mod session;
pub mod state;

pub use session::Session;
