//! The CPU shim: generated kernels compiled by the system's C++ compiler and run, one launch at a time.
//!
//! `shim.h` says how a launch runs and what it checks. Here: any number of texts become one library ([`Library::compile`]), and a [`Routine`] runs on plain
//! byte buffers ([`Library::run`]) with its working memory and its results' unwritten elements poisoned.

mod sparse;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::Library as Dynamic;

use crate::cuda::{Arg, Launch, Routine, TensorMap, source};

pub use sparse::Sparse;

/// Why kernels cannot be compiled or run.
#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    #[error("no C++ compiler: set CXX, or install g++")]
    NoCompiler,
    #[error("{path}: cannot write")]
    Write { path: PathBuf, source: std::io::Error },
    #[error("the compiler refused {path}:\n{log}")]
    Compile { path: PathBuf, log: String },
    #[error("{path}: cannot load")]
    Load { path: PathBuf, source: libloading::Error },
    #[error("no {bytes} addresses in a row")]
    Addresses { bytes: usize, source: std::io::Error },
    #[error("`{entry}` was not compiled into this library")]
    Unknown { entry: &'static str },
    #[error("`{entry}`, {what}")]
    Fault { entry: &'static str, what: String },
}

/// A C++ compiler: `CXX`, else `c++`, `g++` or `clang++`, whichever answers first.
pub fn compiler() -> Option<PathBuf> {
    let named = std::env::var_os("CXX").map(PathBuf::from);
    let candidates = named.into_iter().chain(["g++", "c++", "clang++"].map(PathBuf::from));
    candidates.into_iter().find(|c| Command::new(c).arg("--version").output().is_ok_and(|o| o.status.success()))
}

/// How texts are compiled. Without SRA: g++ 12 has an internal error in that pass on the norm kernels. Numbers that overflow wrap: a wrong offset is then found out, where a compiler
/// that counts on none makes loops without an end of it.
pub const FLAGS: [&str; 8] = ["-std=c++17", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-tree-sra", "-fwrapv"];

/// Compiled kernels, by text and entry.
pub struct Library {
    dynamic: Dynamic,
    symbols: HashMap<(String, &'static str), String>,
}

/// How a routine is run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Of the order of fibers.
    pub seed: u64,
    pub blocks: Blocks,
    /// Micro-batches of the step before this one.
    pub micro_batch: i64,
}

/// Which blocks of each launch run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Blocks {
    All,
    /// So many from the end. Working memory is then zero, not poisoned, and what nobody wrote is not counted: both would touch all of it.
    Last(u64),
}

impl Options {
    pub fn seeded(seed: u64) -> Options {
        Options { seed, blocks: Blocks::All, micro_batch: 0 }
    }
}

/// What a routine moved to and from global memory, in sectors of 32 bytes, each counted once a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moved {
    pub read: u64,
    pub written: u64,
}

impl Library {
    /// Compiles all kernels of these launches in `dir`.
    ///
    /// # Errors
    /// If there is no compiler, or it refuses a text.
    pub fn compile<'a>(dir: &Path, name: &str, launches: impl IntoIterator<Item = &'a Launch>) -> Result<Library, ShimError> {
        let compiler = compiler().ok_or(ShimError::NoCompiler)?;
        let mut text = String::from(source::HOST);
        let mut symbols = HashMap::new();
        let mut namespaces: HashMap<String, usize> = HashMap::new();
        for launch in launches {
            if symbols.contains_key(&(launch.text.clone(), launch.entry)) {
                continue;
            }
            let next = namespaces.len();
            let at = *namespaces.entry(launch.text.clone()).or_insert_with(|| {
                let _ = write!(text, "namespace k{next} {{\n{}}}\n", launch.text);
                next
            });
            let symbol = format!("k{at}_{}", launch.entry);
            let _ = writeln!(text, "DP_ENTRY({symbol}, k{at}::{})", launch.entry);
            symbols.insert((launch.text.clone(), launch.entry), symbol);
        }
        let (input, output) = (dir.join(format!("{name}.cpp")), dir.join(format!("{name}.so")));
        std::fs::write(&input, text).map_err(|source| ShimError::Write { path: input.clone(), source })?;
        let run = Command::new(compiler).args(FLAGS).arg("-shared").arg(&input).arg("-o").arg(&output).output();
        let run = run.map_err(|source| ShimError::Write { path: output.clone(), source })?;
        if !run.status.success() {
            return Err(ShimError::Compile { path: input, log: String::from_utf8_lossy(&run.stderr).into_owned() });
        }
        Library::open(&output, symbols)
    }

    fn open(path: &Path, symbols: HashMap<(String, &'static str), String>) -> Result<Library, ShimError> {
        // SAFETY: the library was compiled from our own text; loading it runs nothing but C++ initialisers of zeroed statics.
        let dynamic = unsafe { Dynamic::new(path) }.map_err(|source| ShimError::Load { path: path.to_path_buf(), source })?;
        Ok(Library { dynamic, symbols })
    }

    /// Runs a routine. `outs` are results as they were before; those that nobody writes stay poisoned (`unwritten` counts their bytes) unless
    /// `keep` says that the routine adds to what is there.
    ///
    /// # Errors
    /// If a kernel touches what it must not, races, or does not end.
    pub fn run(&self, routine: &Routine, ins: &[&[u8]], outs: &mut [&mut [u8]], scalars: &[f64], options: Options) -> Result<Ran, ShimError> {
        let mut memories: Vec<Memory> = Vec::new();
        let (mut writers, mut sectors): (Vec<Sparse>, Vec<Sparse>) = (Vec::new(), Vec::new());
        let step: Vec<u8> = scalars.iter().flat_map(|s| s.to_le_bytes()).collect();
        // An allocation is aligned as a GPU's is, so alignment checks mean something.
        let mut aux = Sparse::new(routine.aux as usize)?;
        if options.blocks == Blocks::All {
            aux.bytes_mut().fill(0xff);
        }
        for bytes in ins.iter().copied().chain([&step[..]]) {
            memories.push(Memory::new(bytes.as_ptr().cast_mut(), bytes.len(), std::ptr::null_mut(), 0));
        }

        for bytes in outs.iter_mut().map(|bytes| &mut **bytes).chain([aux.bytes_mut()]) {
            let mut shadow = Sparse::new(bytes.len().div_ceil(2) * size_of::<u64>())?;
            memories.push(Memory::new(bytes.as_mut_ptr(), bytes.len(), shadow.bytes_mut().as_mut_ptr().cast(), 1));
            writers.push(shadow);
        }
        for memory in &mut memories {
            let mut shadow = Sparse::new((memory.bytes as usize / 32 + 1) * size_of::<[u32; 2]>())?;
            memory.sectors = shadow.bytes_mut().as_mut_ptr().cast();
            sectors.push(shadow);
        }
        for (number, launch) in routine.launches.iter().enumerate() {
            let index = |arg: &Arg| match *arg {
                Arg::In(i) | Arg::Tensor(i, _) => Some((i, 0)),
                Arg::Scalars => Some((ins.len(), 0)),
                Arg::Out(i) => Some((ins.len() + 1 + i, 0)),
                Arg::Aux(at) => Some((ins.len() + 1 + outs.len(), at)),
                Arg::Int(_) | Arg::MicroBatch(_) => None,
            };
            let args: Vec<RawArg> = launch
                .args
                .iter()
                .map(|arg| match (index(arg), arg) {
                    (Some((at, _)), Arg::Tensor(_, map)) => RawArg::tensor(&raw mut memories[at], map),
                    (Some((at, offset)), _) => RawArg::memory(&raw mut memories[at], offset),
                    (None, Arg::Int(i)) => RawArg::integer(*i),
                    (None, Arg::MicroBatch(i)) => RawArg::integer(i * options.micro_batch),
                    (None, _) => unreachable!("only integers have no memory"),
                })
                .collect();
            self.call(launch, &args, number as u64 + 1, options)?;
        }
        let moved = memories.iter().fold(Moved::default(), |m, x| Moved { read: m.read + x.read, written: m.written + x.written });
        let unwritten = |w: &Sparse| w.bytes().chunks_exact(size_of::<u64>()).filter(|w| w.iter().all(|&b| b == 0)).count() as u64 * 2;
        let unwritten = match options.blocks {
            Blocks::All => writers.iter().take(outs.len()).map(unwritten).collect(),
            Blocks::Last(_) => Vec::new(),
        };
        Ok(Ran { moved, unwritten })
    }

    /// Runs one launch on ranges of memory, which the kernel is held to.
    ///
    /// # Errors
    /// As [`Library::run`].
    ///
    /// # Safety
    /// Each range is allocated, and nothing else touches it meanwhile.
    pub unsafe fn launch(&self, launch: &Launch, operands: &[Operand], seed: u64) -> Result<(), ShimError> {
        // A range that is named twice is one memory, so that races between its uses are found.
        let mut memories: Vec<Memory> = Vec::new();
        let mut places: Vec<Option<usize>> = Vec::new();
        for operand in operands {
            let range = match *operand {
                Operand::Int(_) => None,
                Operand::Memory { base, bytes, writable } => Some((base, bytes, writable)),
                Operand::Tensor { base, bytes, .. } => Some((base, bytes, false)),
            };
            places.push(match range {
                None => None,
                Some((base, bytes, writable)) => {
                    let same = |m: &Memory| (m.base, m.bytes, m.writable) == (base, bytes, i32::from(writable));
                    Some(memories.iter().position(same).unwrap_or_else(|| {
                        memories.push(Memory::new(base, bytes as usize, std::ptr::null_mut(), i32::from(writable)));
                        memories.len() - 1
                    }))
                }
            });
        }
        let mut writers: Vec<Vec<u64>> = memories.iter().map(|m| vec![0; if m.writable == 0 { 0 } else { m.bytes.div_ceil(2) as usize }]).collect();
        let mut sectors: Vec<Vec<[u32; 2]>> = memories.iter().map(|m| vec![[0; 2]; m.bytes as usize / 32 + 1]).collect();
        for ((memory, writers), sectors) in memories.iter_mut().zip(&mut writers).zip(&mut sectors) {
            memory.writers = if memory.writable == 0 { std::ptr::null_mut() } else { writers.as_mut_ptr() };
            memory.sectors = sectors.as_mut_ptr();
        }
        let args: Vec<RawArg> = operands
            .iter()
            .zip(places)
            .map(|(operand, place)| match (operand, place) {
                (Operand::Int(integer), _) => RawArg::integer(*integer),
                (Operand::Memory { .. }, place) => RawArg::memory(place.map_or(std::ptr::null_mut(), |at| &raw mut memories[at]), 0),
                (Operand::Tensor { .. }, None) => unreachable!("a tensor has memory"),
                (Operand::Tensor { map, .. }, Some(at)) => RawArg::tensor(&raw mut memories[at], map),
            })
            .collect();
        self.call(launch, &args, 1, Options::seeded(seed))
    }

    /// Runs one launch on memory as the caller describes it.
    fn call(&self, launch: &Launch, args: &[RawArg], number: u64, options: Options) -> Result<(), ShimError> {
        let entry = launch.entry;
        let symbol = self.symbols.get(&(launch.text.clone(), entry)).ok_or(ShimError::Unknown { entry })?;
        let mut error = [0u8; 512];
        let (first_block, blocks) = match options.blocks {
            Blocks::All => (0, u64::MAX),
            Blocks::Last(n) => (u64::from(launch.grid).saturating_sub(n), n),
        };
        let raw = RawLaunch {
            grid: [launch.grid, 1, 1],
            threads: launch.threads,
            shared: launch.shared,
            seed: options.seed,
            number,
            first_block,
            blocks,
            args: args.as_ptr(),
            error: error.as_mut_ptr(),
        };
        // SAFETY: `DP_ENTRY` defines the symbol with this type; the structures are those of `shim.h`, and every pointer in them outlives the call.
        let status = unsafe {
            let f = self.dynamic.get::<unsafe extern "C" fn(*const RawLaunch) -> i32>(symbol.as_bytes()).map_err(|_| ShimError::Unknown { entry })?;
            f(&raw const raw)
        };
        if status == 0 {
            return Ok(());
        }
        let end = error.iter().position(|&b| b == 0).unwrap_or(error.len());
        Err(ShimError::Fault { entry, what: String::from_utf8_lossy(&error[..end]).into_owned() })
    }
}

/// An argument of one launch.
#[derive(Clone, Copy, Debug)]
pub enum Operand {
    Memory {
        base: *mut u8,
        bytes: u64,
        writable: bool,
    },
    /// Memory that the copy engine reads.
    Tensor {
        base: *mut u8,
        bytes: u64,
        map: TensorMap,
    },
    Int(i64),
}

/// What a run found out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ran {
    pub moved: Moved,
    /// Bytes of each result that no thread wrote, if all blocks ran.
    pub unwritten: Vec<u64>,
}

#[repr(C)]
struct Memory {
    base: *mut u8,
    bytes: u64,
    writers: *mut u64,
    sectors: *mut [u32; 2],
    read: u64,
    written: u64,
    writable: i32,
}

impl Memory {
    fn new(base: *mut u8, bytes: usize, writers: *mut u64, writable: i32) -> Memory {
        Memory { base, bytes: bytes as u64, writers, sectors: std::ptr::null_mut(), read: 0, written: 0, writable }
    }
}

#[repr(C)]
struct RawArg {
    kind: i32,
    memory: *mut Memory,
    offset: u64,
    integer: i64,
    tensor: *const TensorMap,
}

impl RawArg {
    fn integer(integer: i64) -> RawArg {
        RawArg { kind: 1, memory: std::ptr::null_mut(), offset: 0, integer, tensor: std::ptr::null() }
    }
    fn memory(memory: *mut Memory, offset: u64) -> RawArg {
        RawArg { kind: 0, memory, offset, integer: 0, tensor: std::ptr::null() }
    }
    /// `map` must outlive the launch.
    fn tensor(memory: *mut Memory, map: &TensorMap) -> RawArg {
        RawArg { kind: 2, memory, offset: 0, integer: 0, tensor: map }
    }
}

#[repr(C)]
struct RawLaunch {
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    seed: u64,
    number: u64,
    first_block: u64,
    blocks: u64,
    args: *const RawArg,
    error: *mut u8,
}
