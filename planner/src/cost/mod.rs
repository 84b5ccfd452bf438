//! How long things take on a machine: integer nanoseconds, the same on every run.

pub mod comm;
pub mod compute;
pub mod round;
