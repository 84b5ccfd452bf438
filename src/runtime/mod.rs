//! Running programs. The runtime makes no decision that the program did not make.
//!
//! [`cpu`] runs every rank of a program as a thread of this process. A [`Session`] holds the ranks' memory from step to step:
//! load parameters, run steps, read parameters and gradients back as logical tensors. [`cuda`] runs the ranks on GPUs.

pub mod batch;
pub mod block;
pub mod cpu;
pub mod cuda;
pub mod loss_scale;
pub mod scratch;
pub mod view;
pub mod watch;

pub use batch::{Batch, Rows};
pub use cpu::Session;
pub use cpu::state::{Holding, Run, Which};
pub use loss_scale::LossScale;

use dplan_ir::entity::SegmentId;
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::DecayGroups;
use dplan_ir::program::{Program, Stream};
use dplan_ir::text::{self, Place};
use std::path::PathBuf;
use std::time::Duration;

/// Choices about running that are no part of a program. Only `decay` changes a result.
#[derive(Clone, Debug)]
pub struct Options {
    /// A step in which no rank gets any further for this long is ended, and the ranks that wait are named.
    pub timeout: Duration,
    pub order: Order,
    /// Which parameters weight decay pulls.
    pub decay: DecayGroups,
    pub recording: Recording,
    /// The folder of scratch files.
    pub scratch: PathBuf,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timeout: Duration::from_secs(600),
            order: Order::Eager,
            decay: DecayGroups::All,
            recording: Recording::Off,
            scratch: std::env::temp_dir(),
        }
    }
}

/// In which order a rank's thread tries its streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Communication first, so that peers wait least.
    Eager,
    /// A pseudo-random stream each time: finds edges that a program lacks.
    Seeded(u64),
}

/// Whether ranks keep when they ran what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recording {
    Off,
    On,
}

/// One instruction that a rank ran, from when it first tried to when it was complete: a collective's span holds the wait for its peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    pub segment: SegmentId,
    /// Position in the segment.
    pub at: u32,
    pub micro_batch: u32,
    pub stream: Stream,
    /// Whom it met, for [`Session::members`].
    pub communicator: Option<u32>,
    /// Nanoseconds since the session began.
    pub start: u64,
    pub end: u64,
}

/// What one step reports.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepResult {
    /// Mean over all target tokens of the step.
    pub loss: f64,
    /// Global norm of the gradients before clipping, where the program computes it.
    pub grad_norm: Option<f64>,
    pub seconds: f64,
}

/// What one rank allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RankMemory {
    pub stage: u32,
    pub arena_bytes: u64,
    /// What stands for the memory of the host.
    pub host_bytes: u64,
    /// Of its scratch file.
    pub file_bytes: u64,
}

/// What a rank can be made to do in the next step, to see how a run takes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rehearsal {
    /// Its thread ends.
    Die,
    /// It stops, and says nothing.
    Stall,
}

/// A rank that does not get further, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stall {
    pub rank: usize,
    pub stage: u32,
    pub instruction: String,
    /// Ranks it waits for.
    pub peers: Vec<usize>,
}

#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("stage {stage}, {at}: {why}")]
    Program { stage: u32, at: String, why: String },
    #[error("rank {rank} cannot allocate its arena of {bytes} bytes")]
    Memory { rank: usize, bytes: u64 },
    #[error("rank {rank} cannot have a scratch file of {bytes} bytes in {folder} (--scratch says where): {why}")]
    NoScratch { rank: usize, folder: String, bytes: u64, why: std::io::Error },
    #[error("a scratch file: {0}")]
    Scratch(std::io::Error),
    #[error("cannot start the thread of rank {rank}: {why}")]
    Thread { rank: usize, why: String },
    #[error("input `{input}` has {found} elements, a step takes {expected}")]
    Input { input: String, found: usize, expected: usize },
    #[error("parameter `{param}` has {found} elements, expected {expected}")]
    Param { param: String, found: usize, expected: usize },
    #[error("rank {rank} (stage {stage}) failed at {instruction}: {why}{}{}", those(peers, "would have met it next"), those(others, "failed too"))]
    Rank {
        rank: usize,
        stage: u32,
        instruction: String,
        why: String,
        /// Whom it was to meet next.
        peers: Vec<usize>,
        /// More ranks that failed in the same step.
        others: Vec<usize>,
    },
    #[error("no rank got further for {seconds} s: {}", describe(stalls))]
    Stalled { seconds: f64, stalls: Vec<Stall> },
    #[error("rank {rank}, {source}{}", at(stalls))]
    Device {
        rank: usize,
        source: cuda::driver::DriverError,
        /// What it was at together with others, as far as that is known.
        stalls: Vec<Stall>,
    },
    #[error("the session ended with an earlier error")]
    Ended,
}

impl RuntimeError {
    /// The ranks that are to blame: those that failed; of a stall, those that are waited for and wait for nobody.
    pub fn lost(&self) -> Vec<usize> {
        match self {
            RuntimeError::Rank { rank, others, .. } => std::iter::once(*rank).chain(others.iter().copied()).collect(),
            RuntimeError::Stalled { stalls, .. } => {
                let waited = |rank: usize| stalls.iter().any(|s| s.peers.contains(&rank));
                stalls.iter().filter(|s| s.peers.is_empty() && waited(s.rank)).map(|s| s.rank).collect()
            }
            RuntimeError::Program { .. }
            | RuntimeError::Memory { .. }
            | RuntimeError::NoScratch { .. }
            | RuntimeError::Scratch(_)
            | RuntimeError::Thread { .. }
            | RuntimeError::Input { .. }
            | RuntimeError::Param { .. }
            | RuntimeError::Device { .. }
            | RuntimeError::Ended => Vec::new(),
        }
    }
    /// Whether ranks failed while they ran, so that the same run may succeed when it is begun again.
    pub fn is_fault(&self) -> bool {
        matches!(self, RuntimeError::Rank { .. } | RuntimeError::Stalled { .. })
    }
}

fn ranks(ranks: &[usize]) -> String {
    ranks.iter().map(|p| format!("rank {p}")).collect::<Vec<_>>().join(", ")
}

fn those(of: &[usize], did: &str) -> String {
    if of.is_empty() { String::new() } else { format!("; {} {did}", ranks(of)) }
}

fn at(stalls: &[Stall]) -> String {
    if stalls.is_empty() { String::new() } else { format!("; {}", describe(stalls)) }
}

/// An instruction as the program's text shows it, and where it stands.
pub fn shown(graph: &Graph, program: &Program, stage: usize, (segment, at): (SegmentId, usize), micro_batch: u64) -> String {
    let printed = text::program_printed(program, graph);
    let line = printed.lines.iter().find(|(place, _)| *place == Place::Instr(stage as u32, segment, at as u32)).map(|&(_, line)| line);
    let shown = line.and_then(|line| printed.text.lines().nth(line as usize)).unwrap_or_default().trim();
    let kind = program.stages[stage].segments[segment].kind.name();
    format!("`{shown}` ({kind}, instruction {at}, micro-batch {micro_batch})")
}

fn describe(stalls: &[Stall]) -> String {
    let one = |s: &Stall| match s.peers.is_empty() {
        true => format!("rank {} (stage {}) is at {}", s.rank, s.stage, s.instruction),
        false => format!("rank {} (stage {}) waits at {} for {}", s.rank, s.stage, s.instruction, ranks(&s.peers)),
    };
    stalls.iter().map(one).collect::<Vec<_>>().join("; ")
}
