//! Which program to run: the same input always gives the same plan. No I/O, no clock, no threads.

pub mod memory;
