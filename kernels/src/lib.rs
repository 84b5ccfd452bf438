//! How one op runs. No planning here, no clock; I/O only where machine code is made.
//!
//! [`cpu`] holds a kernel for every op of [`dplan_ir::op`], on local blocks of one rank, in f32 and f64. [`cuda`] generates CUDA text for the same ops.
//! [`jit`] makes machine code of the text; [`shim`] compiles it for this CPU and runs it, with every access checked; [`trial`] draws cases that kernels are tried on.

pub mod cpu;
pub mod cuda;
pub mod jit;
pub mod shim;
pub mod trial;
