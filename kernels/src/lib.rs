//! How one op runs. No planning here, no I/O, no clock.
//!
//! [`cpu`] holds a kernel for every op of [`dplan_ir::op`], on local blocks of one rank, in f32 and f64.

pub mod cpu;
