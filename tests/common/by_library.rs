//! cuBLASLt's stand-in, built and opened as the library is.
#![allow(dead_code)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use dplan::runtime::cuda::driver::{Address, Queue, Value};
use dplan::runtime::cuda::gpu::cublaslt::{CublasLt, Product, WORKSPACE};
use dplan_kernels::cuda::library::Matmul;
use dplan_kernels::shim;

/// Builds a library of these C++ files; `None`, said aloud, without a compiler.
pub fn build(folder: &Path, name: &str, sources: &[&str]) -> Option<PathBuf> {
    let Some(compiler) = shim::compiler() else {
        eprintln!("SKIPPED: no C++ compiler (set CXX, or install g++)");
        return None;
    };
    let library = folder.join(name);
    let sources = sources.iter().map(|s| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common").join(s));
    let built = Command::new(compiler).args(["-shared", "-fPIC", "-O2", "-std=c++17"]).args(sources).arg("-o").arg(&library).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    Some(library)
}

/// A library that computes products on host memory.
pub struct ByLibrary {
    cublaslt: CublasLt,
    described: HashMap<Matmul, Product>,
    workspace: Vec<u8>,
    pub multiplied: u64,
}

impl ByLibrary {
    pub fn open(path: &Path) -> ByLibrary {
        let cublaslt = CublasLt::first(&[path.to_path_buf()]).unwrap_or_else(|e| panic!("{e}"));
        ByLibrary { cublaslt, described: HashMap::new(), workspace: vec![0; WORKSPACE as usize + 256], multiplied: 0 }
    }
    pub fn describe(&mut self, product: &Matmul) {
        if !self.described.contains_key(product) {
            let made = self.cublaslt.describe(product).unwrap_or_else(|e| panic!("{e}")).expect("the stand-in has an algorithm");
            self.described.insert(*product, made);
        }
    }
    /// A product that was described, of a launch's arguments.
    pub fn multiply(&mut self, product: &Matmul, values: &[Value]) {
        let workspace = self.workspace.as_ptr();
        let workspace = Address(workspace as u64 + workspace.align_offset(256) as u64);
        self.cublaslt.multiply(self.described[product], values, workspace, Queue(0)).unwrap_or_else(|e| panic!("{e}"));
        self.multiplied += 1;
    }
}
