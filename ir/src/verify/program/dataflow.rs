//! The abstract walk over one step of a stage, in issue order.
//!
//! For each instruction: its clock; for each operand, that its bytes hold what the buffer claims, for the current micro-batch, and that their last write
//! happens before; for each result, that all earlier accesses happen before; then the new content. What accumulates is in [`super::flat`].
//! Issue order is one order of execution that the streams and events allow; where all conflicting accesses are ordered, every other order that they
//! allow reads and writes the same.

use std::collections::{BTreeMap, BTreeSet};

use super::clock::{Clocks, Point};
use super::content::{Fact, Flat, Version};
use super::frame::Frames;
use super::memory::{Cell, Layout};
use super::period::Snapshot;
use super::schedule::{Periodic, periodic};
use super::sums::Sums;
use super::types::Types;
use super::{Class, Place, Report};
use crate::entity::{BucketId, BufferId, Id, ParamId, SegmentId, Table, ValueId};
use crate::graph::Graph;
use crate::mesh::AxisSet;
use crate::program::{Buffer, Call, Content, Instr, Pattern, Program, Role, Stream, Updates, Write};
use crate::sharding::Sharding;

/// What a stage has done by the end of its step.
#[derive(Default)]
pub(super) struct End {
    /// Instructions walked.
    pub walked: u64,
    /// The contributions that this stage accumulates, by parameter.
    pub contributions: BTreeMap<ParamId, BTreeSet<ValueId>>,
    /// Buckets counted in each norm that is reported or clips, and whether it was reduced over all ranks; they should be one.
    pub norms: BTreeSet<(Vec<BucketId>, bool)>,
    /// What the stage brought to the operations of each communicator across stages.
    pub across: BTreeMap<(AxisSet, Vec<u32>), Vec<Share>>,
    /// Of parameters with homes on several stages: whether what updates them was rounded on a wire.
    pub rounded: BTreeMap<ParamId, bool>,
    /// Whether the loss is the whole loss; `None` if the stage has none.
    pub loss: Option<bool>,
    /// Updates with and without a clip factor.
    pub updates: [u64; 2],
}

/// What a stage brings to an operation across stages.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Share {
    /// What it still has to be summed over within the stage.
    pub axes: AxisSet,
    pub rounded: bool,
    /// Of a norm: what it counts.
    pub norm: Option<Vec<BucketId>>,
}

/// Walks a stage's step and reports its faults.
pub(super) fn check(graph: &Graph, program: &Program, stage: usize, report: &mut Report) -> End {
    // Operations across stages are all walked, so that they can be compared.
    let is_across = |call: &Call| {
        let body = &program.stages[stage].segments[call.segment].body;
        body.iter().any(|issue| matches!(&issue.instr, Instr::Collective { stages, .. } if !stages.is_empty()))
    };
    let schedule = &program.stages[stage].schedule;
    let cut = periodic(program, stage).filter(|p| !schedule[p.start..][..p.count as usize * p.calls].iter().any(is_across));
    let mut trial = Report::default();
    let end = Walk::new(graph, program, stage, &mut trial).step(cut);
    if trial.is_clean() {
        return end;
    }
    // Where there are faults, list those of all micro-batches.
    Walk::new(graph, program, stage, report).step(None)
}

pub(super) struct Walk<'a> {
    pub types: Types<'a>,
    pub layout: Layout,
    pub cells: Vec<Cell>,
    pub sums: Sums,
    pub frames: Frames,
    pub contributions: BTreeMap<ParamId, BTreeSet<ValueId>>,
    /// Micro-batches of the step.
    pub micro_batches: u64,
    pub updates: Updates,
    pub micro_batch: u64,
    pub point: Point,
    pub end: End,
    shardings: Table<BufferId, u32>,
    loss_pending: BTreeMap<(SegmentId, usize), AxisSet>,
    pub clocks: Clocks,
    stream: Stream,
    stage: usize,
    segment: SegmentId,
    instr: usize,
    /// By stream: where each of its points is in the program.
    issued: Vec<Vec<(SegmentId, u32)>>,
    report: &'a mut Report,
}

impl<'a> Walk<'a> {
    fn new(graph: &'a Graph, program: &'a Program, index: usize, report: &'a mut Report) -> Walk<'a> {
        let stage = &program.stages[index];
        let types = Types { graph, program, stage };
        let layout = Layout::new(program, stage);
        let mut known: BTreeMap<&Sharding, u32> = BTreeMap::new();
        let number = |buffer: &'a Buffer| match &buffer.content {
            Content::Value { sharding, .. } => {
                let next = known.len() as u32;
                *known.entry(sharding).or_insert(next)
            }
            Content::Flat { .. }
            | Content::Member { .. }
            | Content::Scalar(_)
            | Content::Trust { .. }
            | Content::Wire { .. }
            | Content::Frame
            | Content::Scratch => 0,
        };
        let shardings = stage.buffers.values().map(number).collect();
        let cells = layout.cells();
        let mut walk = Walk {
            types,
            layout,
            cells,
            sums: Sums::default(),
            frames: Frames::default(),
            contributions: BTreeMap::new(),
            micro_batches: program.micro_batches,
            updates: program.updates,
            micro_batch: 0,
            point: Point::default(),
            end: End::default(),
            shardings,
            loss_pending: BTreeMap::new(),
            clocks: Clocks::new(stage.events),
            stream: Stream::Compute,
            stage: index,
            segment: SegmentId(0),
            instr: 0,
            issued: vec![Vec::new(); Stream::ALL.len()],
            report,
        };
        walk.collect();
        walk
    }

    /// Facts about instructions that do not depend on the micro-batch: contributions, and the axes the loss is partial over.
    fn collect(&mut self) {
        let (graph, stage) = (self.types.graph, self.types.stage);
        for (segment, body) in stage.segments.iter().map(|(id, s)| (id, &s.body)) {
            for (at, issue) in body.iter().enumerate() {
                let mut gives = |value: ValueId, dst: BufferId| {
                    if let Content::Member { role: Role::Grad, param, .. } = stage.buffers[dst].content {
                        self.contributions.entry(param).or_default().insert(value);
                    }
                };
                match &issue.instr {
                    Instr::Run { node, ins, outs, .. } => {
                        let node = &graph.nodes[*node];
                        node.outputs.iter().zip(outs).for_each(|(&value, &dst)| gives(value, dst));
                        if let Some(k) = outs.iter().position(|&b| matches!(stage.buffers[b].content, Content::Scalar(_)))
                            && let Ok(results) = self.types.results(node, ins, outs)
                        {
                            self.loss_pending.insert((segment, at), results[k].partial);
                        }
                    }
                    Instr::AddInto { src, dst } => {
                        if let Content::Value { value, sharding } = &stage.buffers[*src].content {
                            gives(*value, *dst);
                            self.loss_pending.insert((segment, at), sharding.partial);
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    fn step(mut self, cut: Option<Periodic>) -> End {
        self.begin();
        let schedule = &self.types.stage.schedule;
        match cut {
            None => self.calls(schedule),
            Some(Periodic { start, calls, shift, count }) => {
                let period = |n: u64| &schedule[start + n as usize * calls..][..calls];
                self.calls(&schedule[..start]);
                let mut before: Option<Snapshot> = None;
                for walked in 1..=count {
                    self.calls(period(walked - 1));
                    if let Some(before) = before.take()
                        && self.repeats(&before, shift)
                    {
                        self.advance(&before, shift, (count - walked) * shift);
                        break;
                    }
                    before = (walked < count).then(|| self.snapshot());
                }
                self.calls(&schedule[start + count as usize * calls..]);
            }
        }
        self.finish();
        self.end.contributions = std::mem::take(&mut self.contributions);
        self.end
    }

    /// The state of a step's beginning.
    fn begin(&mut self) {
        for (buffer, bucket, role) in self.homes() {
            if role != Role::Grad {
                self.put_unordered(buffer, self.state(buffer, bucket, role, Version(0)));
            }
        }
    }

    /// Every home holds the new version; the loss is whole.
    fn finish(&mut self) {
        self.segment = SegmentId(u32::MAX);
        for (buffer, bucket, role) in self.homes() {
            if role == Role::Grad {
                continue;
            }
            let new = self.state(buffer, bucket, role, Version(self.updates.count(self.micro_batches)));
            if let Some(found) = self.mismatch(buffer, |fact| fact == new) {
                let message =
                    format!("at the end of the step the home of {} of {bucket} holds {}, not its new version", role.name(), self.show(found));
                self.fault(Class::Version, Some(buffer), message);
            }
        }
        for (bucket, row) in self.types.stage.buckets.iter() {
            for role in self.roles(bucket) {
                if self.types.stage.home(bucket, role).is_none() {
                    self.fault(Class::Structure, None, format!("{bucket} has no buffer for {}", role.name()));
                }
            }
            for member in &row.members {
                self.contributions.entry(member.param).or_default();
            }
        }
        self.scalars_at_end();
    }

    /// Buffers that keep something from step to step.
    fn homes(&self) -> Vec<(BufferId, BucketId, Role)> {
        let stage = self.types.stage;
        let of = |bucket: BucketId| Role::ALL.into_iter().filter_map(move |role| stage.home(bucket, role).map(|b| (b, bucket, role)));
        stage.buckets.ids().flat_map(of).collect()
    }

    /// Roles that a bucket must have.
    fn roles(&self, bucket: BucketId) -> Vec<Role> {
        let param = self.types.stage.buckets[bucket].members.first().map(|m| self.types.graph.params[m.param].value);
        let compute = param.map(|v| self.types.graph.values[v].ty.dtype);
        let moments = self.types.program.optimizer.map_or(0, |o| o.moments());
        let master = compute.is_some_and(|t| t != t.accumulator()).then_some(Role::Master);
        [Role::Param, Role::Grad].into_iter().chain(master).chain([Role::Moment1, Role::Moment2].into_iter().take(moments)).collect()
    }

    fn calls(&mut self, calls: &[Call]) {
        let stage = self.types.stage;
        for call in calls {
            self.segment = call.segment;
            self.micro_batch = call.micro_batch;
            let body = &stage.segments[call.segment].body;
            for (at, issue) in body.iter().enumerate() {
                self.instr = at;
                self.stream = issue.stream;
                self.point = self.clocks.issue(issue.stream);
                self.issued[issue.stream as usize].push((call.segment, at as u32));
                self.instr(&issue.instr);
            }
            self.end.walked += body.len() as u64;
        }
    }

    fn instr(&mut self, instr: &Instr) {
        match instr {
            Instr::Run { node, ins, outs, scratch, write } => {
                for &buffer in ins {
                    self.read(buffer);
                }
                if let &Some(buffer) = scratch {
                    self.put(buffer, Fact::Garbage);
                }
                let graph = self.types.graph;
                for (&buffer, &value) in outs.iter().zip(&graph.nodes[*node].outputs) {
                    self.result(buffer, value, *write);
                }
            }
            &Instr::Input { dst } | &Instr::Recv { dst, .. } => {
                let claim = self.claim(dst);
                self.put(dst, claim);
            }
            &Instr::Send { src, .. } => self.read(src),
            &Instr::Slice { src, dst, .. } => {
                self.read(src);
                let claim = self.claim(dst);
                self.put(dst, claim);
            }
            Instr::Collective { pattern, axes, stages, src, dst, .. } => {
                if !stages.is_empty() {
                    self.note_across(*axes, stages, *src);
                }
                self.collective(*pattern, *axes, !stages.is_empty(), *src, *dst);
            }
            &Instr::Zero { dst } => self.put(dst, Fact::Zero),
            &Instr::Copy { src, dst } => match self.types.stage.buffers[dst].content {
                Content::Frame => self.copy_frame(src, dst),
                Content::Value { .. }
                | Content::Flat { .. }
                | Content::Member { .. }
                | Content::Scalar(_)
                | Content::Trust { .. }
                | Content::Wire { .. }
                | Content::Scratch => self.copy_flat(src, dst),
            },
            &Instr::AddInto { src, dst } => match &self.types.stage.buffers[src].content {
                &Content::Value { value, .. } => {
                    self.read(src);
                    self.result(dst, value, Write::Add);
                }
                Content::Flat { .. }
                | Content::Member { .. }
                | Content::Scalar(_)
                | Content::Trust { .. }
                | Content::Wire { .. }
                | Content::Frame
                | Content::Scratch => self.add_flat(src, dst),
            },
            Instr::Join { left, right, dst, .. } => self.join(left, right, dst),
            &Instr::Cast { src, dst } => self.cast(src, dst),
            &Instr::Compress { src, residual, dst } => self.compress(src, residual, dst),
            &Instr::SumShares { src, dst } => self.sum_shares(src, dst),
            &Instr::SquareSum { src, dst, .. } => self.square_sum(src, dst),
            &Instr::ClipScale { src, dst } => self.clip(src, dst),
            Instr::TrustSums { state, grad, moments, scale, dst } => self.trust_sums(*state, *grad, moments, *scale, *dst),
            Instr::Update { state, grad, moments, param, scale, trust } => {
                self.updated(*state, *grad, moments, *scale);
                trust.iter().for_each(|&sums| self.trusted(sums));
                self.update(*state, moments, *param);
            }
            Instr::Record(event) => self.clocks.record(self.stream, event.index()),
            Instr::Wait(event) => self.clocks.wait(self.stream, event.index()),
        }
    }

    fn result(&mut self, buffer: BufferId, value: ValueId, write: Write) {
        match self.types.stage.buffers[buffer].content {
            Content::Member { bucket, .. } => self.accumulate(buffer, bucket, value, write),
            Content::Scalar(scalar) => {
                let axes = self.loss_pending.get(&(self.segment, self.instr)).copied().unwrap_or_default();
                self.accumulate_scalar(buffer, scalar, value, axes, write);
            }
            Content::Value { .. } | Content::Flat { .. } | Content::Trust { .. } | Content::Wire { .. } | Content::Frame | Content::Scratch => {
                let claim = self.claim(buffer);
                self.put(buffer, claim);
            }
        }
    }

    fn collective(&mut self, pattern: Pattern, axes: AxisSet, across: bool, src: BufferId, dst: BufferId) {
        match self.types.stage.buffers[dst].content {
            Content::Value { .. } => {
                let in_place = pattern == Pattern::AllReduce && self.range(src) == self.range(dst);
                if in_place {
                    self.check(src)
                } else {
                    self.read(src)
                }
                let claim = self.claim(dst);
                self.put(dst, claim);
            }
            Content::Scalar(scalar) => self.reduce_scalar(scalar, axes, across, src, dst),
            Content::Trust { bucket } => self.reduce_trust(bucket, axes, src, dst),
            Content::Wire { .. } => self.exchange(axes, src, dst),
            Content::Flat { .. } | Content::Member { .. } | Content::Frame | Content::Scratch => {
                self.collective_flat(pattern, axes, across, src, dst)
            }
        }
    }

    /// Checks that an operand holds what it claims and that its writes happen before.
    pub fn read(&mut self, buffer: BufferId) {
        self.check(buffer);
        self.note_read(buffer);
    }

    pub(super) fn check(&mut self, buffer: BufferId) {
        let claim = self.claim(buffer);
        if let Some(found) = self.mismatch(buffer, |fact| fact == claim) {
            self.wrong(buffer, claim, found);
        }
    }

    /// Reports that a buffer should hold one thing and holds another.
    pub fn wrong(&mut self, buffer: BufferId, expected: Fact, found: Fact) {
        let class = match found {
            Fact::State { version, .. } if version != Version(0) || is_other_version(expected, found) => Class::Version,
            Fact::Garbage
            | Fact::Zero
            | Fact::Value { .. }
            | Fact::State { .. }
            | Fact::Grad { .. }
            | Fact::Scalar { .. }
            | Fact::Trust { .. }
            | Fact::Wire { .. }
            | Fact::Frame { .. } => Class::Content,
        };
        let message = format!("reads {}, but its bytes hold {}", self.show(expected), self.show(found));
        self.fault(class, Some(buffer), message);
    }

    /// What a buffer claims to hold now, for claims that are one content.
    pub fn claim(&self, buffer: BufferId) -> Fact {
        let (_, base) = self.slot(buffer);
        match self.types.stage.buffers[buffer].content {
            Content::Value { value, .. } => Fact::Value { value, sharding: self.shardings[buffer], micro_batch: self.micro_batch, base: *base },
            Content::Member { bucket, role, .. } | Content::Flat { bucket, role, .. } => self.state(buffer, bucket, role, self.worked_with()),
            Content::Scalar(_) | Content::Trust { .. } | Content::Wire { .. } | Content::Frame | Content::Scratch => Fact::Garbage,
        }
    }

    /// The version of parameters that the passes of this micro-batch work with.
    fn worked_with(&self) -> Version {
        Version(self.types.program.version(self.stage, self.micro_batch))
    }

    /// What the update of this micro-batch, or of the step, finds.
    pub fn updates_before(&self) -> Version {
        match self.updates {
            Updates::Step => Version(0),
            Updates::MicroBatch => Version(self.micro_batch),
        }
    }

    pub fn state(&self, buffer: BufferId, bucket: BucketId, role: Role, version: Version) -> Fact {
        Fact::State { bucket, role, version, flat: self.flat(buffer) }
    }

    /// Where the flat buffer that a buffer is, or is a part of, lies.
    pub fn flat(&self, buffer: BufferId) -> Flat {
        let row = &self.types.stage.buffers[buffer];
        let pieces = match row.content {
            Content::Flat { pieces, .. } if row.piece_axes.is_empty() => pieces,
            Content::Flat { .. }
            | Content::Value { .. }
            | Content::Member { .. }
            | Content::Scalar(_)
            | Content::Trust { .. }
            | Content::Wire { .. }
            | Content::Frame
            | Content::Scratch => AxisSet::EMPTY,
        };
        Flat { base: self.slot(buffer).1, pieces }
    }

    fn slot(&self, buffer: BufferId) -> &(std::ops::Range<usize>, u64) {
        let slots = &self.layout.view(buffer).slots;
        let count = self.types.stage.buffers[buffer].slots;
        &slots[(self.micro_batch % count) as usize % slots.len()]
    }
    pub fn range(&self, buffer: BufferId) -> std::ops::Range<usize> {
        self.slot(buffer).0.clone()
    }
    pub fn grid(&self, buffer: BufferId) -> u32 {
        self.layout.view(buffer).grid
    }

    /// The first content in a buffer's bytes that is not as it should be.
    pub fn mismatch(&self, buffer: BufferId, right: impl Fn(Fact) -> bool) -> Option<Fact> {
        let grid = self.grid(buffer);
        self.cells[self.range(buffer)].iter().find_map(|cell| {
            let (own, rest) = cell.seen(grid);
            [own, rest].into_iter().find(|&f| !right(f))
        })
    }

    /// Notes that the current instruction reads a buffer.
    pub fn note_read(&mut self, buffer: BufferId) {
        let clock = self.clocks.streams[self.stream as usize];
        let (mut race, range) = (None, self.range(buffer));
        for cell in &mut self.cells[range] {
            race = race.or(cell.reads(&clock, self.point));
        }
        if let Some(other) = race {
            let other = self.locate(other);
            self.fault(Class::Race, Some(buffer), format!("reads bytes that {other} writes, with no order between them"));
        }
    }

    /// Notes that the current instruction writes a buffer, which it may also read if it is meant to: then the read is not noted.
    pub fn note_write(&mut self, buffer: BufferId) {
        let clock = self.clocks.streams[self.stream as usize];
        let point = self.point;
        let (mut race, mut twice, range) = (None, false, self.range(buffer));
        for cell in &mut self.cells[range] {
            twice |= cell.written == point || cell.read[point.stream as usize] == point.time;
            race = race.or(cell.writes(&clock, point));
        }
        if twice {
            self.fault(Class::Content, Some(buffer), "overlaps another operand or result of the same instruction");
        }
        if let Some(other) = race {
            let other = self.locate(other);
            self.fault(Class::Race, Some(buffer), format!("writes bytes that {other} accesses, with no order between them"));
        }
    }

    /// Writes one content all over a buffer.
    pub fn put(&mut self, buffer: BufferId, fact: Fact) {
        self.note_write(buffer);
        self.put_unordered(buffer, fact);
    }

    pub fn put_unordered(&mut self, buffer: BufferId, fact: Fact) {
        let grid = self.grid(buffer);
        let range = self.range(buffer);
        for cell in &mut self.cells[range] {
            cell.set(grid, fact);
        }
    }

    pub fn fault(&mut self, class: Class, buffer: Option<BufferId>, message: impl Into<String>) {
        let place = Place::stage(self.stage);
        let ended = self.segment == SegmentId(u32::MAX);
        let place = if ended { place } else { place.instr(self.segment, self.instr) };
        let message = message.into();
        let message = if ended { message } else { format!("micro-batch {}: {message}", self.micro_batch) };
        self.report.push(class, Place { buffer, ..place }, message);
    }

    fn locate(&self, point: Point) -> String {
        let name = Stream::ALL[point.stream as usize].name();
        match self.issued[point.stream as usize].get((point.time as usize).wrapping_sub(1)) {
            Some((segment, instr)) => format!("{segment}[{instr}] on {name}"),
            None => "the step's beginning".into(),
        }
    }
}

/// Whether both are one role of one bucket, as different numbers of updates have made it.
fn is_other_version(a: Fact, b: Fact) -> bool {
    match (a, b) {
        (Fact::State { bucket, role, version, .. }, Fact::State { bucket: other, role: r, version: v, .. }) => {
            (bucket, role) == (other, r) && version != v
        }
        _ => false,
    }
}
