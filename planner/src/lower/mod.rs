//! From a plan to programs, in two steps that share their choices.
//!
//! ```text
//! graph + plan ──(layer by layer)──▶ Fragment … ──concatenate──▶ Sharded
//!                                       │
//!                                       └─buffers, segments, events──▶ Program
//! ```
//! A [`Fragment`] is one layer, sharded: its statements for both passes, and where each form's bytes are. What a layer costs and needs follows from its
//! fragment alone, so the planner prices a strategy with the very statements that will run.

mod arena;
mod error;
mod events;
mod fragment;
mod keep;
mod layer;
mod passes;
mod program;
mod ring;
mod shard;
mod stage;
mod stash;
mod sync;
mod wires;

pub use error::LowerError;
pub(crate) use fragment::makes;
pub use fragment::{BackwardPass, BucketMember, Fragment, FragmentBucket, Storage};
pub use program::lower;
pub(crate) use ring::working_bytes;
pub use shard::{Sharder, plan_order, plan_padding, shard, shard_layer};
