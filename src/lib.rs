//! `dplan`, the binary's library: everything that touches files, threads, clocks and the environment. What a program is, which one to run and how
//! an op runs are the crates `dplan-ir`, `dplan-planner` and `dplan-kernels`; they know nothing of this one.

pub mod calibrate;
pub mod certfile;
pub mod checkpoint;
pub mod cli;
pub mod cluster;
pub mod compare;
pub mod compile;
pub mod data;
pub mod export;
pub mod feed;
pub mod fingerprint;
pub mod fuzz;
pub mod import;
pub mod measure;
pub mod planfile;
pub mod profile;
pub mod replay;
pub mod runtime;
pub mod safetensors;
pub mod schema;
