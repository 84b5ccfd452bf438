//! What kernels are for.

use super::library::Library;
use super::product::{TILES, Tiles};

/// A GPU architecture that kernels are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Arch {
    Sm80,
    Sm90a,
    Sm100,
}

impl Arch {
    pub const ALL: [Arch; 3] = [Arch::Sm80, Arch::Sm90a, Arch::Sm100];
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100 => "sm_100",
        }
    }
    pub fn from_name(name: &str) -> Option<Arch> {
        Arch::ALL.into_iter().find(|a| a.name() == name)
    }
    /// The architecture for a device of this compute capability.
    pub fn of_device(major: i32, minor: i32) -> Option<Arch> {
        match (major, minor) {
            (8, _) => Some(Arch::Sm80),
            (9, 0) => Some(Arch::Sm90a),
            (10, _) => Some(Arch::Sm100),
            _ => None,
        }
    }
    /// Of A100, H100, B200.
    pub fn multiprocessors(self) -> u64 {
        match self {
            Arch::Sm80 => 108,
            Arch::Sm90a => 132,
            Arch::Sm100 => 148,
        }
    }
    /// Per multiprocessor: registers, shared memory in bytes, threads, blocks. CUDA C Programming Guide, table of compute capabilities.
    pub fn limits(self) -> Limits {
        match self {
            Arch::Sm80 => Limits { registers: 65_536, shared: 164 * 1024, block_shared: 163 * 1024, threads: 2048, blocks: 32 },
            Arch::Sm90a | Arch::Sm100 => Limits { registers: 65_536, shared: 228 * 1024, block_shared: 227 * 1024, threads: 2048, blocks: 32 },
        }
    }
}

/// What a multiprocessor has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    pub registers: u64,
    pub shared: u64,
    /// Most that one block may use.
    pub block_shared: u64,
    pub threads: u64,
    pub blocks: u64,
}

/// An architecture, the ways in which products may be cut there, and what may compute them instead.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Target {
    pub arch: Arch,
    /// One of those that the operands allow is taken, by its score.
    pub tiles: &'static [Tiles],
    pub beside: Library,
}

impl Target {
    /// All ways that the architecture has, and no library.
    pub const fn of(arch: Arch) -> Target {
        Target { arch, tiles: &TILES, beside: Library::Absent }
    }
}
