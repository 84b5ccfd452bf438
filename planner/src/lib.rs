//! Which program to run: the same input always gives the same plan. No I/O, no clock, no threads.

pub mod cost;
pub mod lower;
pub mod machine;
pub mod memory;
pub mod options;
pub mod padding;
pub mod units;
