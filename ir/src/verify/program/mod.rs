//! The program verifier: proves, before launch, that a program is free of deadlock, of races and of wrong gradients.
//!
//! It reads the differentiated graph and the program, and nothing else: it does not lower the graph again and knows no layout but the bytes that buffers
//! name. A program is right if every read finds what its buffer claims, whoever wrote it and in whatever order; so commuted instructions, other streams with
//! the events they need and other offsets are as good as what the lowering emits.
//!
//! **Symmetry.** Ranks of a stage run one program and differ in coordinates only, so one symbolic rank stands for all of them: a claim "this rank's
//! block of `v` under sharding S" is true for all coordinates or for none. Only pieces in place (`piece_axes`) put different bytes to use on
//! different ranks: there a range has two contents, of the rank's *own* piece and of the *rest* of it.
//!
//! **Passes**, each on what the ones before have established. First of all the graph is verified ([`crate::verify::graph`]): what is drawn and divided by it is said there.
//! 1. [`structure`]: every id, axis, size and byte range is in bounds; buckets are consistent; the schedule calls every micro-batch once;
//! 2. [`types`]: each instruction alone: shardings of operands and results follow from one factor assignment ([`crate::rule`]) or one reshard step;
//! 3. [`matching`]: the n-th message of a channel is sent and received as the same value; so are operations across stages;
//! 4. [`progress`]: streams of all stages, run with rendezvous, reach their ends; otherwise the cycle of who waits for whom is shown;
//! 5. [`dataflow`]: an abstract interpretation of each stage's step that follows the content of every byte range ([`content`]) and, in the same
//!    walk, the vector clocks that must order every two accesses of which one writes ([`clock`]). Gradients are multisets of (contribution, micro-batch)
//!    with the axes still to be summed over, so a missing, doubled or wrong reduction is a wrong content; what goes round, and what is made of one block after another, claims
//!    whose block it is and which pairs of blocks are in it ([`ring`]);
//! 6. [`totals`]: what the stages together must have done: every contribution accumulated somewhere, the norm counting every parameter once, one loss.
//!
//! **Steps.** The walk starts from: every home ([`crate::program::StageProgram::home`]) but the gradients' holds the parameters and states of the last step, all else
//! is garbage. It ends with every home holding the next version. So the proof of one step is the proof of all, by induction.
//!
//! **Micro-batches.** The schedule of a stage becomes periodic after its warm-up. The walk is the same for shifted micro-batches (slots repeat with
//! them), so once a period maps the state to its own shift, the periods between are skipped: see [`schedule`].
//!
//! Accesses are ordered by the rank's own streams and events alone. An order that exists only through another rank (a message there and back) is not used.

mod clock;
mod complete;
mod content;
mod dataflow;
mod flat;
mod frame;
mod matching;
mod memory;
mod period;
mod progress;
mod ring;
mod schedule;
mod show;
mod structure;
mod sums;
#[cfg(test)]
mod tests;
mod totals;
mod types;
mod wire;

pub(super) use structure::buffers_of;

use std::collections::BTreeSet;
use std::fmt;

use crate::entity::{BucketId, BufferId, SegmentId};
use crate::graph::Graph;
use crate::program::Program;
use crate::text;
use crate::verify::graph::verify_graph;
use crate::verify::report::Located;

/// What kind of fault a violation is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Class {
    /// The graph itself is wrong: its types, its dropout, its divisor.
    Graph,
    /// An id, axis, size or byte range out of bounds, or tables that contradict each other.
    Structure,
    /// An instruction whose operands and results do not fit together.
    Type,
    /// Two stages disagree about a message or about an operation they do together.
    Mismatch,
    /// Ranks that wait for each other for ever.
    Deadlock,
    /// Two accesses of one byte range, one a write, with no order between them.
    Race,
    /// A read of bytes that hold something else than the buffer claims.
    Content,
    /// A parameter or optimizer state that is read after its update, updated twice, or not up to date at the end of the step.
    Version,
    /// A contribution missing or doubled, or a reduction missing, doubled or over the wrong axes.
    Gradient,
    /// The gradient norm does not count every element once.
    Norm,
    /// The loss is not the sum over all micro-batches and ranks.
    Loss,
}

impl Class {
    pub fn name(self) -> &'static str {
        match self {
            Class::Graph => "graph",
            Class::Structure => "structure",
            Class::Type => "type",
            Class::Mismatch => "mismatch",
            Class::Deadlock => "deadlock",
            Class::Race => "race",
            Class::Content => "content",
            Class::Version => "version",
            Class::Gradient => "gradient",
            Class::Norm => "norm",
            Class::Loss => "loss",
        }
    }
}

/// Where in a program a violation is; what is `None` does not apply.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Place {
    pub stage: Option<u32>,
    pub segment: Option<SegmentId>,
    /// Position in the segment's body.
    pub instr: Option<usize>,
    pub buffer: Option<BufferId>,
    pub bucket: Option<BucketId>,
}

impl Place {
    pub(super) fn stage(stage: usize) -> Place {
        Place { stage: Some(stage as u32), ..Place::default() }
    }
    pub(super) fn instr(self, segment: SegmentId, instr: usize) -> Place {
        Place { segment: Some(segment), instr: Some(instr), ..self }
    }
    pub(super) fn bucket(self, bucket: BucketId) -> Place {
        Place { bucket: Some(bucket), ..self }
    }
    pub(super) fn buffer(self, buffer: BufferId) -> Place {
        Place { buffer: Some(buffer), ..self }
    }
}

/// One thing that is wrong with a program, and what would be right.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    pub class: Class,
    pub place: Place,
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.class.name())?;
        if let Some(stage) = self.place.stage {
            write!(f, ", stage {stage}")?;
        }
        if let (Some(segment), Some(instr)) = (self.place.segment, self.place.instr) {
            write!(f, ", {segment}[{instr}]")?;
        }
        if let Some(bucket) = self.place.bucket {
            write!(f, ", {bucket}")?;
        }
        if let Some(buffer) = self.place.buffer {
            write!(f, ", {buffer}")?;
        }
        write!(f, ": {}", self.message)
    }
}

impl Located for Violation {
    fn place(&self) -> text::Place {
        let Place { stage, segment, instr, buffer, bucket } = self.place;
        let Some(stage) = stage else { return text::Place::Top };
        match (segment, instr, buffer, bucket) {
            (Some(segment), Some(instr), ..) => text::Place::Instr(stage, segment, instr as u32),
            (Some(segment), None, ..) => text::Place::Segment(stage, segment),
            (None, _, Some(buffer), _) => text::Place::Buffer(stage, buffer),
            (None, _, None, Some(bucket)) => text::Place::Bucket(stage, bucket),
            (None, _, None, None) => text::Place::Stage(stage),
        }
    }
}

/// What was proved, in numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Facts {
    /// Stage programs.
    pub programs: u64,
    /// Instructions in their segments.
    pub instructions: u64,
    /// Instructions of one step on one rank of every stage.
    pub issued: u64,
    /// Of those, the ones the walk had to follow; the others are periods like one that it followed.
    pub walked: u64,
}

/// Proves a program right, or lists what is wrong with it: each fault once, at the first place where it shows.
///
/// # Errors
/// All violations found. Faults of structure or type stop the passes that build on them.
pub fn verify_program(graph: &Graph, program: &Program) -> Result<Facts, Vec<Violation>> {
    let mut report = Report::default();
    for error in verify_graph(graph) {
        report.push(Class::Graph, Place::default(), error.to_string());
    }
    if !report.is_clean() {
        return Err(report.violations);
    }
    structure::check(graph, program, &mut report);
    let mut facts = Facts { programs: program.stages.len() as u64, ..Facts::default() };
    if report.is_clean() {
        types::check(graph, program, &mut report);
        matching::check(program, &mut report);
        progress::check(program, &mut report);
    }
    if report.is_clean() {
        let ends: Vec<dataflow::End> = (0..program.stages.len()).map(|stage| dataflow::check(graph, program, stage, &mut report)).collect();
        totals::check(graph, program, &ends, &mut report);
        facts.walked = ends.iter().map(|end| end.walked).sum();
        for stage in &program.stages {
            facts.instructions += stage.segments.values().map(|s| s.body.len() as u64).sum::<u64>();
            facts.issued += stage.schedule.iter().map(|call| stage.segments[call.segment].body.len() as u64).sum::<u64>();
        }
    }
    if report.is_clean() { Ok(facts) } else { Err(report.violations) }
}

/// Violations so far; a fault of an instruction is listed once, however many micro-batches show it.
#[derive(Default)]
struct Report {
    seen: BTreeSet<(Class, Place)>,
    violations: Vec<Violation>,
}

impl Report {
    fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }
    fn push(&mut self, class: Class, place: Place, message: impl Into<String>) {
        if self.seen.insert((class, place)) || place.instr.is_none() {
            self.violations.push(Violation { class, place, message: message.into() });
        }
    }
}
