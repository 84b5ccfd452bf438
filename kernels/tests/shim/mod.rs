//! Trials of kernels in the shim.
#![allow(dead_code)]

pub use dplan_kernels::trial::*;

use dplan_kernels::shim;
use std::path::{Path, PathBuf};

/// The folder for this test's compiled kernels, or `None` (said aloud) if there is no C++ compiler.
pub fn folder(name: &str) -> Option<PathBuf> {
    if shim::compiler().is_none() {
        eprintln!("SKIPPED: no C++ compiler (set CXX, or install g++)");
        return None;
    }
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&dir).unwrap();
    Some(dir)
}
