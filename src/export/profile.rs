//! A run's own profile: Chrome trace JSON, as `dplan trace` writes its prediction, so that both lie over each other in Perfetto.
//!
//! One process a rank, one thread a stream. Instructions are named as [`Instruction`] says; collectives and messages carry op, bytes and group; `step N` spans a
//! step, `PP:0F3` the forward pass of micro-batch 3 on virtual stage 0.

use crate::compare::instruction::{Instruction, label, moved_bytes};
use crate::runtime::{Session, Span};
use dplan_ir::graph::Graph;
use dplan_ir::pipeline::{Pass, Pipeline};
use dplan_ir::program::{Instr, Program, SegmentKind, Stream};
use serde_json::{Value, json};

/// Steps that a profile holds. A longer run is like its beginning, and its profile would fill the disk.
const MOST_STEPS: usize = 50;

/// What the ranks of a process ran in the first steps of a session.
#[derive(Debug, Default)]
pub struct Recorded {
    /// Beginning and end of each step, by the clock of spans.
    steps: Vec<(u64, u64)>,
    /// By rank.
    spans: Vec<Vec<Span>>,
}

impl Recorded {
    /// Takes what was recorded of a step.
    pub fn take(&mut self, spans: Vec<Vec<Span>>, (start, end): (u64, u64)) {
        if self.steps.len() < MOST_STEPS {
            self.steps.push((start, end));
            self.spans.resize_with(spans.len(), Vec::new);
            self.spans.iter_mut().zip(spans).for_each(|(all, mut new)| all.append(&mut new));
        }
    }
}

/// The trace of CPU ranks.
pub fn trace(session: &Session, pipeline: Pipeline, recorded: &Recorded) -> String {
    chrome(session.graph(), session.program(), pipeline, recorded, &|_, c| session.members(c).to_vec())
}

/// The trace of what was recorded, of ranks that ran something. `members`: the ranks of a rank's communicator.
pub fn chrome(graph: &Graph, program: &Program, pipeline: Pipeline, recorded: &Recorded, members: &dyn Fn(usize, u32) -> Vec<usize>) -> String {
    let mut events: Vec<Value> = Vec::new();
    let per_stage = program.mesh.ranks() as usize;
    for (rank, spans) in recorded.spans.iter().enumerate().filter(|(_, spans)| !spans.is_empty()) {
        let stage = rank / per_stage.max(1);
        events.push(json!({ "ph": "M", "pid": rank, "name": "process_name", "args": { "name": format!("rank {rank}") } }));
        for stream in Stream::ALL {
            events.push(json!({ "ph": "M", "pid": rank, "tid": stream as usize, "name": "thread_name", "args": { "name": stream.name() } }));
        }
        let bytes = program.stages[stage].arena_bytes;
        let memory = json!({ "Device Type": 1, "Total Allocated": bytes, "Total Reserved": bytes });
        events.push(json!({ "ph": "i", "pid": rank, "tid": 0, "ts": 0, "name": "[memory]", "args": memory }));
        for (step, &(start, end)) in recorded.steps.iter().enumerate() {
            events.push(complete(rank, Stream::ALL.len(), "step", &format!("step {step}"), start, end, json!({})));
        }
        passes(rank, stage, program, pipeline, spans, &mut events);
        for span in spans {
            let group = span.communicator.map(|c| members(rank, c));
            events.push(instruction(graph, program, (rank, stage), span, group));
        }
    }
    json!({ "displayTimeUnit": "ms", "traceEvents": events }).to_string() + "\n"
}

fn instruction(graph: &Graph, program: &Program, (rank, stage): (usize, usize), span: &Span, group: Option<Vec<usize>>) -> Value {
    let segment = &program.stages[stage].segments[span.segment];
    let instr = &segment.body[span.at as usize].instr;
    let place = Instruction { stage: stage as u32, kind: segment.kind, segment: span.segment, at: span.at };
    let name = format!("{} {}", place.name(), label(graph, program, stage, instr));
    let bytes = moved_bytes(program, stage, instr);
    let peer = || group.as_ref().and_then(|g| g.iter().copied().find(|&r| r != rank));
    let (category, args) = match instr {
        Instr::Collective { pattern, .. } => {
            let size = group.as_ref().map(Vec::len);
            ("collective", json!({ "op": pattern.name(), "bytes": bytes, "group": group, "group_size": size }))
        }
        Instr::Send { .. } => ("p2p", json!({ "op": "send", "bytes": bytes, "peer": peer() })),
        Instr::Recv { .. } => ("p2p", json!({ "op": "recv", "bytes": bytes, "peer": peer() })),
        Instr::Record(_) | Instr::Wait(_) => ("range", json!({})),
        Instr::Copy { .. } => ("copy", json!({ "micro_batch": span.micro_batch })),
        Instr::Run { .. }
        | Instr::Input { .. }
        | Instr::Slice { .. }
        | Instr::Zero { .. }
        | Instr::AddInto { .. }
        | Instr::Cast { .. }
        | Instr::Compress { .. }
        | Instr::SumShares { .. }
        | Instr::Join { .. }
        | Instr::SquareSum { .. }
        | Instr::ClipScale { .. }
        | Instr::TrustSums { .. }
        | Instr::Update { .. } => ("compute", json!({ "micro_batch": span.micro_batch })),
    };
    complete(rank, span.stream as usize, category, &name, span.start, span.end, args)
}

/// Passes of micro-batches, named as PyTorch's schedules name them: from the first to the last instruction of consecutive spans of one segment.
fn passes(rank: usize, stage: usize, program: &Program, pipeline: Pipeline, spans: &[Span], events: &mut Vec<Value>) {
    let virtual_stages: Vec<u64> = pipeline.virtual_stages_of(stage as u64).collect();
    let segments = &program.stages[stage].segments;
    let mut compute: Vec<&Span> = spans.iter().filter(|s| s.stream == Stream::Compute).collect();
    compute.sort_by_key(|s| s.start);
    for spans in compute.chunk_by(|a, b| (a.segment, a.micro_batch) == (b.segment, b.micro_batch)) {
        let first = spans[0];
        let pass = match segments[first.segment].kind {
            SegmentKind::Forward => Pass::Forward,
            SegmentKind::Backward | SegmentKind::BackwardLast => Pass::Backward,
            SegmentKind::BackwardInput => Pass::Input,
            SegmentKind::BackwardWeight | SegmentKind::BackwardWeightLast => Pass::Weight,
            SegmentKind::Begin | SegmentKind::Update | SegmentKind::Stash | SegmentKind::End => continue,
        };
        // The segments of a virtual stage follow its forward one.
        let forwards = segments.iter().filter(|(id, s)| s.kind == SegmentKind::Forward && *id <= first.segment).count();
        let Some(virtual_stage) = forwards.checked_sub(1).and_then(|at| virtual_stages.get(at)) else { continue };
        let end = spans.iter().map(|s| s.end).max().unwrap_or(first.end);
        let name = format!("PP:{virtual_stage}{}{}", pass.letter(), first.micro_batch);
        events.push(complete(rank, Stream::ALL.len(), "range", &name, first.start, end, json!({})));
    }
}

fn complete(rank: usize, thread: usize, category: &str, name: &str, start: u64, end: u64, args: Value) -> Value {
    let (ts, dur) = (start as f64 * 1e-3, end.saturating_sub(start) as f64 * 1e-3);
    json!({ "ph": "X", "pid": rank, "tid": thread, "cat": category, "name": name, "ts": ts, "dur": dur, "args": args })
}
