//! Printing a program.

use std::fmt::Write;

use crate::entity::{BucketId, BufferId, SegmentId};
use crate::graph::Graph;
use crate::mesh::Mesh;
use crate::program::{
    Bucket, Buffer, Call, Channel, Content, Instr, Issue, Pattern, Program, Segment, SegmentKind, StageProgram, Updates, Write as Writing,
};
use crate::sharding::Monoid;
use crate::text::mesh::{put_axes, put_mesh, put_padded, put_sharding};
use crate::text::place::{Place, Printed};
use crate::text::scope::{Spelling, put_label};

/// The program as text, each entity with its line.
pub fn program(program: &Program, graph: &Graph) -> Printed {
    let mut out = Printed::default();
    out.mark(Place::Top);
    out.put("program");
    out.end_line();
    let spelling = Spelling::new(graph);
    put_mesh(&mut out, &program.mesh);
    put_padded(&mut out, &program.padded, graph, &spelling);
    let _ = write!(out.text, "micro_batches {}", program.micro_batches);
    out.end_line();
    if let Some(optimizer) = program.optimizer {
        let _ = write!(out.text, "optimizer {}", optimizer.name());
        out.end_line();
    }
    if program.updates != Updates::default() {
        let _ = write!(out.text, "updates {}", program.updates.name());
        out.end_line();
    }
    for (number, stage) in program.stages.iter().enumerate() {
        Printer { stage, number: number as u32, mesh: &program.mesh, spelling: &spelling, out: &mut out }.stage();
    }
    out
}

struct Printer<'p> {
    stage: &'p StageProgram,
    number: u32,
    mesh: &'p Mesh,
    spelling: &'p Spelling,
    out: &'p mut Printed,
}

/// How a segment is called: by its kind, with its id if its stage has several of that kind.
fn segment_name(stage: &StageProgram, id: SegmentId) -> String {
    let kind = stage.segments.get(id).map_or(SegmentKind::Begin, |s| s.kind);
    let several = stage.segments.values().filter(|s| s.kind == kind).count() > 1;
    if several { format!("{}#{}", kind.name(), id.0) } else { kind.name().to_string() }
}

impl Printer<'_> {
    fn stage(&mut self) {
        let (stage, number) = (self.stage, self.number);
        self.out.mark(Place::Stage(number));
        self.line(format_args!("stage {number} {{"));
        self.line(format_args!("  arena {}", stage.arena_bytes));
        if stage.host_bytes > 0 {
            self.line(format_args!("  host {}", stage.host_bytes));
        }
        if stage.file_bytes > 0 {
            self.line(format_args!("  file {}", stage.file_bytes));
        }
        self.line(format_args!("  events {}", stage.events));
        for (i, region) in stage.regions.iter().enumerate() {
            self.out.mark(Place::Region(self.number, i as u32));
            self.out.put("  region ");
            put_label(&mut self.out.text, &region.name);
            self.line(format_args!(" at {} bytes {}", region.offset, region.bytes));
        }
        for (id, bucket) in stage.buckets.iter() {
            self.bucket(id, bucket);
        }
        for (id, buffer) in stage.buffers.iter() {
            self.buffer(id, buffer);
        }
        let names: Vec<String> = stage.segments.ids().map(|id| segment_name(stage, id)).collect();
        for ((id, segment), name) in stage.segments.iter().zip(&names) {
            self.segment(id, segment, name);
        }
        self.schedule(&names);
        self.line(format_args!("}}"));
    }

    /// Puts the last piece of a line.
    fn line(&mut self, piece: std::fmt::Arguments<'_>) {
        self.write(piece);
        self.out.end_line();
    }
    fn write(&mut self, piece: std::fmt::Arguments<'_>) {
        let _ = self.out.text.write_fmt(piece);
    }

    fn bucket(&mut self, id: BucketId, bucket: &Bucket) {
        self.out.mark(Place::Bucket(self.number, id));
        self.write(format_args!("  {id} = {} elems partial ", bucket.elems));
        put_axes(&mut self.out.text, bucket.partial, self.mesh);
        if !bucket.tied.is_empty() {
            self.write(format_args!(" tied {:?}", bucket.tied));
        }
        self.line(format_args!(" {{"));
        for member in &bucket.members {
            self.out.put("    ");
            self.out.put(self.spelling.param(member.param));
            put_sharding(&mut self.out.text, &member.sharding, self.mesh);
            self.line(format_args!(" at {} len {}", member.offset, member.elems));
        }
        self.line(format_args!("  }}"));
    }

    fn buffer(&mut self, id: BufferId, buffer: &Buffer) {
        self.out.mark(Place::Buffer(self.number, id));
        self.write(format_args!("  {id} = "));
        match &buffer.content {
            Content::Value { value, sharding } => {
                self.out.put(self.spelling.value(*value));
                put_sharding(&mut self.out.text, sharding, self.mesh);
            }
            Content::Flat { bucket, role, pieces } => {
                self.write(format_args!("{} {bucket}", role.name()));
                if !pieces.is_empty() {
                    self.out.put(" piece ");
                    put_axes(&mut self.out.text, *pieces, self.mesh);
                }
            }
            Content::Member { bucket, role, param } => {
                self.write(format_args!("{} {bucket} {}", role.name(), self.spelling.param(*param)));
            }
            Content::Scalar(scalar) => self.write(format_args!("scalar {}", scalar.name())),
            Content::Trust { bucket } => self.write(format_args!("trust {bucket}")),
            Content::Wire { bucket, from, kept } => {
                self.write(format_args!("wire {bucket}"));
                if !from.is_empty() {
                    self.out.put(" from ");
                    put_axes(&mut self.out.text, *from, self.mesh);
                }
                kept.iter().for_each(|kept| self.write(format_args!(" keeping {kept}")));
            }
            Content::Frame => self.out.put("frame"),
            Content::Scratch => self.out.put("scratch"),
        }
        self.write(format_args!(" {} {} bytes at {}", buffer.dtype.name(), buffer.bytes, buffer.offset));
        if buffer.slots != 1 || buffer.slot_stride != 0 {
            self.write(format_args!(" slots {} stride {}", buffer.slots, buffer.slot_stride));
        }
        if !buffer.piece_axes.is_empty() {
            self.out.put(" own ");
            put_axes(&mut self.out.text, buffer.piece_axes, self.mesh);
        }
        self.out.end_line();
    }

    fn segment(&mut self, id: SegmentId, segment: &Segment, name: &str) {
        self.out.mark(Place::Segment(self.number, id));
        self.line(format_args!("  segment {name} {{"));
        for (i, issue) in segment.body.iter().enumerate() {
            self.out.mark(Place::Instr(self.number, id, i as u32));
            self.issue(issue);
            self.out.end_line();
        }
        self.line(format_args!("  }}"));
    }

    fn issue(&mut self, issue: &Issue) {
        self.write(format_args!("    {} ", issue.stream.name()));
        match &issue.instr {
            Instr::Run { node, ins, outs, scratch, write } => {
                let arrow = match write {
                    Writing::Set => "->",
                    Writing::Add => "+>",
                };
                self.write(format_args!("run {} ", self.spelling.node(*node)));
                self.buffers(ins);
                self.write(format_args!(" {arrow} "));
                self.buffers(outs);
                if let Some(scratch) = scratch {
                    self.write(format_args!(" scratch {scratch}"));
                }
            }
            Instr::Input { dst } => self.write(format_args!("input {dst}")),
            Instr::Slice { src, dst, axes, dim } => {
                self.out.put("slice ");
                put_axes(&mut self.out.text, *axes, self.mesh);
                self.write(format_args!(" dim {dim} {src} -> {dst}"));
            }
            Instr::Collective { pattern, axes, stages, dim, monoid, src, dst } => {
                self.write(format_args!("{} ", pattern.name()));
                put_axes(&mut self.out.text, *axes, self.mesh);
                if !stages.is_empty() {
                    self.write(format_args!(" stages {stages:?}"));
                }
                if *dim != 0 || *pattern != Pattern::AllReduce {
                    self.write(format_args!(" dim {dim}"));
                }
                if *monoid != Monoid::Sum || pattern.reduces() {
                    self.write(format_args!(" {}", monoid.name()));
                }
                self.write(format_args!(" {src} -> {dst}"));
            }
            Instr::Send { to, channel, src } => self.write(format_args!("send {} to {to} {src}", channel_name(*channel))),
            Instr::Recv { from, channel, dst } => self.write(format_args!("recv {} from {from} {dst}", channel_name(*channel))),
            Instr::Zero { dst } => self.write(format_args!("zero {dst}")),
            Instr::Copy { src, dst } => self.write(format_args!("copy {src} -> {dst}")),
            Instr::AddInto { src, dst } => self.write(format_args!("add_into {src} -> {dst}")),
            Instr::Join { monoid, left, right, dst } => {
                self.write(format_args!("join {} ", monoid.name()));
                self.buffers(left);
                self.out.put(" with ");
                self.buffers(right);
                self.out.put(" -> ");
                self.buffers(dst);
            }
            Instr::Cast { src, dst } => self.write(format_args!("cast {src} -> {dst}")),
            Instr::Compress { src, residual, dst } => self.write(format_args!("compress {src} with {residual} -> {dst}")),
            Instr::SumShares { src, dst } => self.write(format_args!("sum_shares {src} -> {dst}")),
            Instr::SquareSum { src, dst, once } => {
                self.out.put("square_sum once ");
                put_axes(&mut self.out.text, *once, self.mesh);
                self.write(format_args!(" {src} -> {dst}"));
            }
            Instr::ClipScale { src, dst } => self.write(format_args!("clip_scale {src} -> {dst}")),
            Instr::TrustSums { state, grad, moments, scale, dst } => {
                self.write(format_args!("trust_sums {state} grad {grad} moments "));
                self.buffers(moments);
                if let Some(scale) = scale {
                    self.write(format_args!(" scale {scale}"));
                }
                self.write(format_args!(" -> {dst}"));
            }
            Instr::Update { state, grad, moments, param, scale, trust } => {
                self.write(format_args!("update {state} grad {grad} moments "));
                self.buffers(moments);
                if let Some(param) = param {
                    self.write(format_args!(" param {param}"));
                }
                if let Some(scale) = scale {
                    self.write(format_args!(" scale {scale}"));
                }
                if let Some(trust) = trust {
                    self.write(format_args!(" trust {trust}"));
                }
            }
            Instr::Record(event) => self.write(format_args!("record {event}")),
            Instr::Wait(event) => self.write(format_args!("wait {event}")),
        }
    }

    fn buffers(&mut self, buffers: &[BufferId]) {
        self.out.put("(");
        for (i, buffer) in buffers.iter().enumerate() {
            self.write(format_args!("{}{buffer}", if i > 0 { ", " } else { "" }));
        }
        self.out.put(")");
    }

    fn schedule(&mut self, names: &[String]) {
        let name = |call: &Call| names.get(call.segment.0 as usize).map_or("none", String::as_str);
        let calls = &self.stage.schedule;
        self.line(format_args!("  schedule {{"));
        let mut at = 0;
        while at < calls.len() {
            let (period, times) = repetition(&calls[at..]);
            (at..at + period * times).for_each(|i| self.out.mark(Place::Call(self.number, i as u32)));
            self.out.put("    ");
            if times > 1 {
                self.write(format_args!("repeat {times} {{ "));
            }
            for (i, call) in calls[at..at + period].iter().enumerate() {
                self.write(format_args!("{}{} {}", if i > 0 { ", " } else { "" }, name(call), call.micro_batch));
            }
            self.line(format_args!("{}", if times > 1 { " }" } else { "" }));
            at += period * times;
        }
        self.line(format_args!("  }}"));
    }
}

/// The period, and how often it occurs, that covers most of the first calls: each time with every micro-batch one further on.
fn repetition(calls: &[Call]) -> (usize, usize) {
    const LONGEST: usize = 4;
    let mut best = (1, 1);
    for period in 1..=LONGEST {
        let follows = |i: usize| {
            let (before, call) = (calls[i - period], calls[i]);
            call.segment == before.segment && before.micro_batch.checked_add(1) == Some(call.micro_batch)
        };
        let same = (period..calls.len()).take_while(|&i| follows(i)).count();
        let times = 1 + same / period;
        if times > 1 && times * period > best.0 * best.1 {
            best = (period, times);
        }
    }
    best
}

fn channel_name(channel: Channel) -> &'static str {
    match channel {
        Channel::Forward => "forward",
        Channel::Backward => "backward",
    }
}
