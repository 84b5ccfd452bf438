//! Just-in-time compilation: CUDA text to machine code by NVRTC, kept on disk. Needs no GPU and no driver.
//!
//! NVRTC contains the assembler, so one call takes a text to a cubin for a real architecture, and the assembler's report says what the machine code uses
//! (registers, spills, shared memory). A cubin is kept under the hash of everything that made it: text, flags, architecture, version of NVRTC. Files are
//! written beside their place and renamed into it, so that many ranks may compile the same kernel at once; a file that does not read back whole is made again.

mod cache;
mod nvrtc;
mod report;
mod search;

pub use cache::{Cache, Found};
pub use nvrtc::Nvrtc;
pub use report::Usage;
pub use search::search;

pub use crate::cuda::arch::{Arch, Limits};
use crate::cuda::{Launch, source};

#[derive(Debug, thiserror::Error)]
pub enum JitError {
    #[error(
        "NVRTC was not found: set DPLAN_NVRTC to libnvrtc.so.12, or install it with `pip install nvidia-cuda-nvrtc-cu12` (no GPU needed); looked for {looked}"
    )]
    Absent { looked: String },
    #[error("{path}: {why}")]
    Library { path: String, why: String },
    #[error("NVRTC refused a kernel for {arch}:\n{log}")]
    Compile { arch: &'static str, log: String },
    #[error("{path}: cannot write")]
    Write { path: std::path::PathBuf, source: std::io::Error },
}

/// Machine code of one text, with the assembler's report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Compiled {
    pub cubin: Vec<u8>,
    pub ptx: String,
    pub log: String,
}

impl Compiled {
    /// What one of its kernels uses.
    pub fn usage(&self, entry: &str) -> Option<Usage> {
        report::usage(&self.log, entry)
    }
}

/// The whole text of a launch's kernel, as NVRTC gets it.
pub fn text(launch: &Launch) -> String {
    [source::DEVICE, &launch.text].concat()
}

/// The flags of every compilation. Products and sums may contract to one rounding.
pub fn flags(arch: Arch) -> Vec<String> {
    [&format!("--gpu-architecture={}", arch.name()), "--std=c++17", "--fmad=true", "--ptxas-options=-v", "-default-device"]
        .map(str::to_string)
        .to_vec()
}

/// Blocks of this size that one multiprocessor holds, as a share of the threads it could hold.
pub fn occupancy(arch: Arch, threads: u64, registers: u64, shared: u64) -> f64 {
    let limits = arch.limits();
    // Registers are given out to warps in units of 256; a block takes 1 KiB of shared memory besides its own.
    let of_warp = (registers.max(1) * 32).next_multiple_of(256);
    let by_registers = limits.registers / of_warp / (threads / 32).max(1);
    let by_shared = limits.shared / (shared + 1024);
    let blocks = by_registers.min(by_shared).min(limits.threads / threads.max(1)).min(limits.blocks);
    (blocks * threads) as f64 / limits.threads as f64
}
