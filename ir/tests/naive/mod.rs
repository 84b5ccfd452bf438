//! A lowering for tests, as naive as can be and different from the planner's: every form of a value has a buffer of its own, every node a random strategy,
//! parameters are gathered and gradients reduced where convenient. What it makes is correct, so the verifier must accept it and the interpreter train with it.

use dplan_ir::cost::workspace_bytes;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{BucketId, BufferId, DimId, EventId, NodeId, ParamId, SegmentId, ValueId};
use dplan_ir::extent::node_rule;
use dplan_ir::graph::{Def, Graph, Layout, Phase};
use dplan_ir::mesh::{AxisId, AxisSet, Mesh};
use dplan_ir::optimizer::Optimizer;
use dplan_ir::program::*;
use dplan_ir::reshard::{Step, steps};
use dplan_ir::rule::{Assignment, Placement, Split};
use dplan_ir::sharding::{Monoid, Padded, Sharding, local_type};
use std::collections::{BTreeMap, BTreeSet};

/// What kind of program to make.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub dp: u64,
    pub tp: u64,
    pub pp: u32,
    pub micro_batches: u64,
    pub zero: u8,
    pub one_f_one_b: bool,
    pub optimizer: Optimizer,
    /// Behind each micro-batch: at ZeRO 0 and 1, in the order of 1f1b, of graphs whose stages share no parameter.
    pub updates: Updates,
    pub seed: u64,
}

const FORWARD: usize = 1;
const BACKWARD: usize = 2;

/// The program of a differentiated graph.
pub fn lower(graph: &Graph, shape: Shape) -> Program {
    Lowering::new(graph, shape).program()
}

struct Form {
    sharding: Sharding,
    buffer: BufferId,
}

struct Stage {
    program: StageProgram,
    bodies: [Vec<Issue>; 4],
    forms: BTreeMap<ValueId, Vec<Form>>,
    slots: u64,
    /// What comes once, where each micro-batch has an update of its own.
    end: Vec<Issue>,
    /// Where buckets, and blocks of parameters, are put by.
    stash: BTreeMap<BucketId, BufferId>,
    put_by: BTreeMap<ParamId, BufferId>,
}

struct Lowering<'a> {
    graph: &'a Graph,
    shape: Shape,
    mesh: Mesh,
    padded: Padded,
    placements: Vec<Placement>,
    param_sharding: BTreeMap<ParamId, Sharding>,
    pending: BTreeMap<ParamId, AxisSet>,
    stages: Vec<Stage>,
    random: u64,
}

impl<'a> Lowering<'a> {
    fn new(graph: &'a Graph, shape: Shape) -> Lowering<'a> {
        let mesh = Mesh::new(shape.dp, shape.tp);
        let mut paddable: BTreeSet<DimId> = graph.dims.ids().collect();
        for node in graph.nodes.values() {
            let rule = node_rule(graph, node);
            let labels = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l));
            for (labels, &value) in labels.zip(node.inputs.iter().chain(&node.outputs)) {
                for (&label, dim) in labels.iter().zip(&graph.values[value].ty.dims) {
                    if rule.factor(label).is_some_and(|f| f.split != Split::Free) {
                        paddable.remove(dim);
                    }
                }
            }
        }
        let pad = |id: DimId, size: u64| if paddable.contains(&id) { size.next_multiple_of(shape.tp) } else { size };
        let padded = Padded(graph.dims.map(|id, dim| pad(id, dim.size)));
        let stage = |s: u32| Stage {
            program: StageProgram::default(),
            bodies: Default::default(),
            forms: BTreeMap::new(),
            end: Vec::new(),
            stash: BTreeMap::new(),
            put_by: BTreeMap::new(),
            slots: if shape.one_f_one_b { shape.micro_batches.min(u64::from(shape.pp - s)) } else { shape.micro_batches },
        };
        let stages = (0..shape.pp).map(stage).collect();
        Lowering {
            graph,
            shape,
            mesh,
            padded,
            placements: Vec::new(),
            param_sharding: BTreeMap::new(),
            pending: BTreeMap::new(),
            stages,
            random: shape.seed,
        }
    }

    fn program(mut self) -> Program {
        self.placements = self.graph.nodes.ids().map(|n| self.place(n)).collect();
        self.place_params();
        self.buckets();
        for id in self.graph.nodes.ids() {
            self.node(id);
        }
        for stage in 0..self.shape.pp as usize {
            self.begin_and_update(stage);
        }
        let (p, m) = (u64::from(self.shape.pp), self.shape.micro_batches);
        let Shape { one_f_one_b, updates, .. } = self.shape;
        let stages = self.stages.into_iter().enumerate().map(|(s, mut stage)| {
            let kinds = [SegmentKind::Begin, SegmentKind::Forward, SegmentKind::Backward, SegmentKind::Update];
            for (kind, body) in kinds.into_iter().zip(stage.bodies) {
                stage.program.segments.push(Segment { kind, body });
            }
            let warm = if one_f_one_b { m.min(p - 1 - s as u64) } else { m };
            let call = |segment: usize, micro_batch: u64| Call { segment: SegmentId(segment as u32), micro_batch };
            let copies = stage.stash.iter().map(|(&bucket, &dst)| Instr::Copy { src: stage.program.home(bucket, Role::Param).unwrap(), dst });
            let body: Vec<Issue> = copies.map(|instr| Issue { stream: Stream::Compute, instr }).collect();
            let each = updates == Updates::MicroBatch;
            if each {
                stage.program.segments.push(Segment { kind: SegmentKind::Stash, body });
                stage.program.segments.push(Segment { kind: SegmentKind::End, body: std::mem::take(&mut stage.end) });
            }
            let schedule = &mut stage.program.schedule;
            schedule.extend((!stage.program.segments[SegmentId(0)].body.is_empty()).then(|| call(0, 0)));
            schedule.extend((0..warm).map(|i| call(FORWARD, i)));
            // As many as there are places: the versions of the step's beginning.
            schedule.extend((0..warm).filter(|_| each && !stage.stash.is_empty()).map(|i| call(4, i)));
            for i in 0..m {
                schedule.extend((warm + i < m).then(|| call(FORWARD, warm + i)));
                schedule.push(call(BACKWARD, i));
                if each {
                    schedule.extend((i > 0 && warm + i < m && !stage.stash.is_empty()).then(|| call(4, warm + i)));
                    schedule.push(call(3, i));
                }
            }
            let (once, is_empty) = if each { (5, stage.program.segments[SegmentId(5)].body.is_empty()) } else { (3, false) };
            schedule.extend((!is_empty).then(|| call(once, 0)));
            stage.program.regions.push(Region { name: "all".into(), offset: 0, bytes: stage.program.arena_bytes });
            stage.program
        });
        Program {
            mesh: self.mesh.clone(),
            padded: self.padded.clone(),
            micro_batches: m,
            optimizer: Some(self.shape.optimizer),
            updates,
            stages: stages.collect(),
        }
    }

    fn draw(&mut self, n: usize) -> usize {
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.random >> 33) % n as u64) as usize
    }

    /// A random strategy; the data-parallel axis on the batch dim.
    fn place(&mut self, id: NodeId) -> Placement {
        let node = &self.graph.nodes[id];
        let rule = node_rule(self.graph, node);
        let mut dims: BTreeMap<char, DimId> = BTreeMap::new();
        let labels = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l));
        for (labels, &value) in labels.zip(node.inputs.iter().chain(&node.outputs)) {
            dims.extend(labels.iter().copied().zip(self.graph.values[value].ty.dims.iter().copied()));
        }
        let mut assignment = Assignment::default();
        for (&label, &dim) in &dims {
            if Some(dim) == self.graph.batch {
                assignment.assign(label, self.mesh.dp());
            }
        }
        // Rows in top-k layout cannot be moved between blocks of tokens or experts.
        let types = node.inputs.iter().chain(&node.outputs).map(|&v| &self.graph.values[v].ty);
        let fixed: BTreeSet<DimId> = types.filter(|ty| ty.layout != Layout::Dense).flat_map(|ty| ty.dims[..3].iter().copied()).collect();
        for axis in self.mesh.tp().iter() {
            let fits = |&&label: &&char| {
                let ways = self.mesh.size(assignment.axes(label)) * self.mesh.axis(axis).size;
                let whole = rule.factor(label).is_none_or(|f| f.split == Split::Whole);
                let fixed = fixed.contains(&dims[&label]);
                !whole && !fixed && self.padded.size(dims[&label]).is_multiple_of(ways) && Some(dims[&label]) != self.graph.batch
            };
            let labels: Vec<char> = dims.keys().filter(fits).copied().collect();
            let choice = self.draw(labels.len() + 1);
            if let Some(&label) = labels.get(choice) {
                assignment.assign(label, AxisSet::one(axis));
            }
        }
        rule.place(&assignment)
    }

    fn stage_of(&self, layer: u32) -> usize {
        (layer * self.shape.pp / self.graph.layer_count()) as usize
    }

    /// Parameters are stored as their first use needs them; gradients wait for what all contributions wait for.
    fn place_params(&mut self) {
        for (id, node) in self.graph.nodes.iter() {
            for (&value, sharding) in node.inputs.iter().zip(&self.placements[id.0 as usize].ins) {
                if let Some(param) = self.graph.param_of(value) {
                    self.param_sharding.entry(param).or_insert_with(|| sharding.clone());
                }
            }
        }
        for (param, values) in self.graph.grads.iter() {
            let of = |&value: &ValueId| match self.graph.values[value].def {
                Def::Node(node, k) => self.placements[node.0 as usize].outs[k as usize].partial,
                Def::Input | Def::Param(_) => AxisSet::EMPTY,
            };
            let common = values.iter().map(of).reduce(AxisSet::and).unwrap_or_default();
            self.pending.insert(param, common.minus(self.param_sharding[&param].used()));
        }
    }

    fn buckets(&mut self) {
        let mut homes: BTreeMap<ParamId, BTreeSet<usize>> = BTreeMap::new();
        for node in self.graph.nodes.values() {
            let of = |v: &&ValueId| self.graph.param_of(**v);
            for param in node.inputs.iter().filter_map(|v| of(&v)) {
                homes.entry(param).or_default().insert(self.stage_of(node.layer));
            }
        }
        for (param, values) in self.graph.grads.iter() {
            for &v in values {
                if let Def::Node(node, _) = self.graph.values[v].def {
                    homes.entry(param).or_default().insert(self.stage_of(self.graph.nodes[node].layer));
                }
            }
        }
        for index in 0..self.stages.len() {
            let mut groups: BTreeMap<(AxisSet, AxisSet, Vec<u32>, Option<ParamId>), Vec<ParamId>> = BTreeMap::new();
            for (&param, at) in homes.iter().filter(|(_, at)| at.contains(&index)) {
                let tied = if at.len() > 1 { at.iter().map(|&s| s as u32).collect() } else { Vec::new() };
                let alone = (at.len() > 1).then_some(param);
                groups.entry((self.param_sharding[&param].used(), self.pending[&param], tied, alone)).or_default().push(param);
            }
            for ((_, partial, tied, _), params) in groups {
                self.bucket(index, partial, tied, &params);
            }
            for scalar in Scalar::ALL {
                self.buffer(index, Content::Scalar(scalar), DType::F64, 8, 1);
            }
        }
    }

    fn bucket(&mut self, index: usize, partial: AxisSet, tied: Vec<u32>, params: &[ParamId]) {
        let mut end = 0;
        let mut members = Vec::new();
        for &param in params {
            let sharding = self.param_sharding[&param].clone();
            let elems = local_type(&self.graph.values[self.graph.params[param].value].ty, &sharding, &self.padded, &self.mesh).elems();
            members.push(Member { param, sharding, offset: end, elems });
            end += elems;
        }
        let dp = self.mesh.dp();
        let elems = (end + 3).next_multiple_of(self.mesh.size(dp) * 8);
        let bucket = self.stages[index].program.buckets.push(Bucket { members: members.clone(), elems, partial, tied });
        let compute = self.graph.values[self.graph.params[params[0]].value].ty.dtype;
        if self.shape.optimizer.trusts() {
            let dtype = compute.accumulator();
            self.buffer(index, Content::Trust { bucket }, dtype, 2 * members.len() as u64 * dtype.size(), 1);
        }
        let cut = |zero: u8, this: &Self| if this.zero(partial) >= zero { dp } else { AxisSet::EMPTY };
        let moments = [Role::Moment1, Role::Moment2].into_iter().take(self.shape.optimizer.moments()).map(|r| (r, 1));
        let master = (compute != compute.accumulator()).then_some((Role::Master, 1));
        for (role, zero) in [(Role::Param, 3), (Role::Grad, 2)].into_iter().chain(master).chain(moments) {
            let pieces = cut(zero, self);
            let dtype = if role == Role::Param { compute } else { compute.accumulator() };
            let flat = |pieces| Content::Flat { bucket, role, pieces };
            let bytes = |ways: u64| elems / ways * dtype.size();
            let mut whole = self.buffer(index, flat(pieces), dtype, bytes(self.mesh.size(pieces)), 1);
            if role != Role::Param && role != Role::Grad {
                continue;
            }
            if !pieces.is_empty() {
                whole = self.buffer(index, flat(AxisSet::EMPTY), dtype, bytes(1), 1);
            }
            let offset = self.stages[index].program.buffers[whole].offset;
            let view = |content, offset, bytes, piece_axes| Buffer { content, dtype, bytes, offset, slots: 1, slot_stride: 0, piece_axes };
            let reads_back = (0..self.graph.layer_count()).any(|l| self.stage_of(l) == index && self.graph.reads_parameters_back(l));
            let places = if reads_back { self.stages[index].slots - 1 } else { 0 };
            if role == Role::Param && self.shape.updates == Updates::MicroBatch && places > 0 {
                let stash = self.buffer(index, flat(AxisSet::EMPTY), dtype, bytes(1), places);
                let stage = &mut self.stages[index];
                stage.stash.insert(bucket, stash);
                let Buffer { offset, slots, slot_stride, .. } = stage.program.buffers[stash];
                for m in &members {
                    let content = Content::Member { bucket, role, param: m.param };
                    let (offset, bytes) = (offset + m.offset * dtype.size(), m.elems * dtype.size());
                    let block = Buffer { content, dtype, bytes, offset, slots, slot_stride, piece_axes: AxisSet::EMPTY };
                    stage.put_by.insert(m.param, stage.program.buffers.push(block));
                }
            }
            let buffers = &mut self.stages[index].program.buffers;
            if !dp.is_empty() {
                buffers.push(view(flat(dp), offset, bytes(self.mesh.size(dp)), dp));
            }
            for m in &members {
                let content = Content::Member { bucket, role, param: m.param };
                buffers.push(view(content, offset + m.offset * dtype.size(), m.elems * dtype.size(), AxisSet::EMPTY));
            }
        }
    }

    /// The ZeRO stage of a bucket: without a data-parallel sum there is nothing to scatter.
    fn zero(&self, partial: AxisSet) -> u8 {
        if partial.includes(self.mesh.dp()) && !self.mesh.dp().is_empty() { self.shape.zero } else { 0 }
    }

    fn buffer(&mut self, stage: usize, content: Content, dtype: DType, bytes: u64, slots: u64) -> BufferId {
        let program = &mut self.stages[stage].program;
        let (offset, slot_stride) = (program.arena_bytes, align(bytes));
        program.arena_bytes += slots * slot_stride;
        program.buffers.push(Buffer { content, dtype, bytes, offset, slots, slot_stride, piece_axes: AxisSet::EMPTY })
    }

    fn find(&self, stage: usize, content: &Content, in_place: bool) -> BufferId {
        let found = |b: &Buffer| b.content == *content && b.piece_axes.is_empty() != in_place;
        self.stages[stage].program.buffers.iter().find(|(_, b)| found(b)).map(|(id, _)| id).expect("a buffer with that content")
    }

    /// The one that is no version put by.
    fn home_of(&self, stage: usize, content: &Content) -> BufferId {
        let found = |b: &Buffer, id: &BufferId| b.content == *content && !self.stages[stage].put_by.values().any(|put_by| put_by == id);
        self.stages[stage].program.buffers.iter().find(|(id, b)| found(b, id)).map(|(id, _)| id).expect("a home")
    }

    fn issue(&mut self, stage: usize, part: usize, stream: Stream, instr: Instr) {
        self.stages[stage].bodies[part].push(Issue { stream, instr });
    }

    /// Everything issued to `from` so far happens before everything issued to `to` from now on.
    fn cross(&mut self, stage: usize, part: usize, from: Stream, to: Stream) {
        let event = EventId(self.stages[stage].program.events);
        self.stages[stage].program.events += 1;
        self.issue(stage, part, from, Instr::Record(event));
        self.issue(stage, part, to, Instr::Wait(event));
    }

    fn value(&mut self, stage: usize, value: ValueId, sharding: &Sharding) -> BufferId {
        let ty = local_type(&self.graph.values[value].ty, sharding, &self.padded, &self.mesh);
        let content = Content::Value { value, sharding: sharding.clone() };
        let slots = self.stages[stage].slots;
        let buffer = self.buffer(stage, content, ty.dtype, ty.bytes(), slots);
        self.stages[stage].forms.entry(value).or_default().push(Form { sharding: sharding.clone(), buffer });
        buffer
    }

    /// A buffer of the stage that holds the value in a sharding, made if need be.
    fn form(&mut self, stage: usize, part: usize, value: ValueId, want: &Sharding) -> BufferId {
        if let Some(param) = self.graph.param_of(value) {
            let bucket = self.stages[stage].program.buckets.iter().find(|(_, b)| b.members.iter().any(|m| m.param == param)).map(|(id, _)| id);
            let home = self.home_of(stage, &Content::Member { bucket: bucket.expect("a home"), role: Role::Param, param });
            let buffer = self.stages[stage].put_by.get(&param).copied().filter(|_| part == BACKWARD).unwrap_or(home);
            return self.reshard(stage, part, value, self.param_sharding[&param].clone(), buffer, want);
        }
        if let Some(form) = self.stages[stage].forms.get(&value).and_then(|fs| fs.iter().find(|f| f.sharding == *want)) {
            return form.buffer;
        }
        if self.graph.values[value].def == Def::Input {
            let dst = self.value(stage, value, want);
            self.issue(stage, part, Stream::Compute, Instr::Input { dst });
            return dst;
        }
        if !self.stages[stage].forms.contains_key(&value) {
            self.transfer(stage, value);
        }
        let first = &self.stages[stage].forms[&value][0];
        let (sharding, buffer) = (first.sharding.clone(), first.buffer);
        self.reshard(stage, part, value, sharding, buffer, want)
    }

    fn transfer(&mut self, to: usize, value: ValueId) {
        let Some(node) = self.graph.producer(value) else { unreachable!("inputs and parameters are not sent") };
        let node = &self.graph.nodes[node];
        let (from, part) = (self.stage_of(node.layer), if node.phase == Phase::Forward { FORWARD } else { BACKWARD });
        let (channel, send, recv) = if part == FORWARD {
            (Channel::Forward, Stream::SendForward, Stream::RecvForward)
        } else {
            (Channel::Backward, Stream::SendBackward, Stream::RecvBackward)
        };
        let (sharding, src) = (self.stages[from].forms[&value][0].sharding.clone(), self.stages[from].forms[&value][0].buffer);
        self.cross(from, part, Stream::Compute, send);
        self.issue(from, part, send, Instr::Send { to: to as u32, channel, src });
        // The next micro-batch in this slot overwrites what is sent: it waits, one call later, for all sends before.
        let event = EventId(self.stages[from].program.events);
        self.stages[from].program.events += 1;
        self.issue(from, part, send, Instr::Record(event));
        self.stages[from].bodies[part].insert(0, Issue { stream: Stream::Compute, instr: Instr::Wait(event) });
        let dst = self.value(to, value, &sharding);
        self.cross(to, part, Stream::Compute, recv);
        self.issue(to, part, recv, Instr::Recv { from: from as u32, channel, dst });
        self.cross(to, part, recv, Stream::Compute);
    }

    fn reshard(&mut self, stage: usize, part: usize, value: ValueId, from: Sharding, buffer: BufferId, want: &Sharding) -> BufferId {
        let (mut at, mut src) = (from.clone(), buffer);
        for step in steps(&from, want) {
            at = step.apply(&at).expect("a legal step");
            let dst = self.value(stage, value, &at);
            let stages = Vec::new();
            let sum = Monoid::Sum;
            let instr = match step {
                Step::AllReduce { axes, monoid } => Instr::Collective { pattern: Pattern::AllReduce, axes, stages, dim: 0, monoid, src, dst },
                Step::ReduceScatter { axes, dim, monoid } => {
                    Instr::Collective { pattern: Pattern::ReduceScatter, axes, stages, dim, monoid, src, dst }
                }
                Step::AllGather { axes, dim } => Instr::Collective { pattern: Pattern::AllGather, axes, stages, dim, monoid: sum, src, dst },
                Step::Slice { axes, dim } => Instr::Slice { src, dst, axes, dim },
            };
            self.issue(stage, part, Stream::Compute, instr);
            src = dst;
        }
        src
    }

    fn node(&mut self, id: NodeId) {
        let node = &self.graph.nodes[id];
        let stage = self.stage_of(node.layer);
        let part = if node.phase == Phase::Forward { FORWARD } else { BACKWARD };
        let placement = self.placements[id.0 as usize].clone();
        let ins: Vec<BufferId> = node.inputs.iter().zip(&placement.ins).map(|(&v, s)| self.form(stage, part, v, s)).collect();
        let locals: Vec<_> =
            node.inputs.iter().zip(&placement.ins).map(|(&v, s)| local_type(&self.graph.values[v].ty, s, &self.padded, &self.mesh)).collect();
        let need = workspace_bytes(&node.op, &locals.iter().collect::<Vec<_>>());
        let scratch = (need > 0).then(|| self.buffer(stage, Content::Scratch, DType::F32, need.next_multiple_of(8), 1));
        if let (Some(loss), [out]) = (self.graph.loss, node.outputs.as_slice())
            && loss == *out
        {
            let loss = self.find(stage, &Content::Scalar(Scalar::Loss), false);
            return self.issue(stage, part, Stream::Compute, Instr::Run { node: id, ins, outs: vec![loss], scratch, write: Write::Add });
        }
        let outs: Vec<BufferId> = node.outputs.iter().zip(&placement.outs).map(|(&v, s)| self.value(stage, v, s)).collect();
        self.issue(stage, part, Stream::Compute, Instr::Run { node: id, ins, outs, scratch, write: Write::Set });
        for &value in &node.outputs {
            let of = |(param, values): (ParamId, &Vec<ValueId>)| values.contains(&value).then_some(param);
            let params: Vec<ParamId> = self.graph.grads.iter().filter_map(of).collect();
            for param in params {
                let want = self.param_sharding[&param].clone().with_partial(Monoid::Sum, self.pending[&param]);
                let src = self.form(stage, part, value, &want);
                let bucket = self.stages[stage].program.buckets.iter().find(|(_, b)| b.members.iter().any(|m| m.param == param));
                let bucket = bucket.map(|(id, _)| id).expect("a home");
                let dst = self.find(stage, &Content::Member { bucket, role: Role::Grad, param }, false);
                self.issue(stage, part, Stream::Compute, Instr::AddInto { src, dst });
            }
        }
    }

    fn begin_and_update(&mut self, stage: usize) {
        let dp = self.mesh.dp();
        let none = AxisSet::EMPTY;
        let all: AxisSet = self.mesh.ids().filter(|&a: &AxisId| self.mesh.axis(a).size > 1).collect();
        let everyone: Vec<u32> = if self.shape.pp > 1 { (0..self.shape.pp).collect() } else { Vec::new() };
        let scalar = |this: &Self, s| this.find(stage, &Content::Scalar(s), false);
        let (loss, norm, clip) = (scalar(self, Scalar::Loss), scalar(self, Scalar::NormSquared), scalar(self, Scalar::ClipScale));
        let collective = |pattern, axes, stages: &[u32], src, dst| Instr::Collective {
            pattern,
            axes,
            stages: stages.to_vec(),
            dim: 0,
            monoid: Monoid::Sum,
            src,
            dst,
        };
        let each = self.shape.updates == Updates::MicroBatch;
        // What is counted over a step of many updates is the loss alone.
        let has_loss = self.stages[stage].bodies[FORWARD].iter().any(|i| matches!(&i.instr, Instr::Run { outs, .. } if outs.contains(&loss)));
        for dst in if each { [loss].into_iter().filter(|_| has_loss).collect() } else { vec![loss, norm] } {
            self.issue(stage, 0, Stream::Compute, Instr::Zero { dst });
        }
        let buckets: Vec<(BucketId, Bucket)> = self.stages[stage].program.buckets.iter().map(|(id, b)| (id, b.clone())).collect();
        let loss_pending = self.graph.loss.and_then(|v| self.graph.producer(v)).map_or(none, |n| self.placements[n.0 as usize].outs[0].partial);
        if has_loss && !loss_pending.is_empty() {
            let sum = collective(Pattern::AllReduce, loss_pending, &[], loss, loss);
            if each {
                self.stages[stage].end.push(Issue { stream: Stream::Compute, instr: sum });
            } else {
                self.issue(stage, 3, Stream::Compute, sum);
            }
        }
        // Reductions and gathers on the communication stream, sums and updates on the compute stream.
        self.cross(stage, 3, Stream::Compute, Stream::Comm);
        let mut start: [Vec<Issue>; 2] = Default::default();
        for (bucket, row) in &buckets {
            let zero = self.zero(row.partial);
            let flat = |role, pieces| Content::Flat { bucket: *bucket, role, pieces };
            let grad_home = self.find(stage, &flat(Role::Grad, if zero >= 2 { dp } else { none }), false);
            let clear = Issue { stream: Stream::Compute, instr: Instr::Zero { dst: grad_home } };
            self.stages[stage].bodies[if each { BACKWARD } else { 0 }].insert(0, clear);
            let comm = |instr| Issue { stream: Stream::Comm, instr };
            if zero >= 2 {
                let ring = self.find(stage, &flat(Role::Grad, none), false);
                let own = self.find(stage, &flat(Role::Grad, dp), true);
                start[1].push(Issue { stream: Stream::Compute, instr: Instr::Zero { dst: ring } });
                self.cross(stage, BACKWARD, Stream::Compute, Stream::Comm);
                self.issue(stage, BACKWARD, Stream::Comm, collective(Pattern::ReduceScatter, dp, &[], ring, own));
                self.issue(stage, BACKWARD, Stream::Comm, Instr::AddInto { src: own, dst: grad_home });
                self.cross(stage, BACKWARD, Stream::Comm, Stream::Compute);
            }
            if zero >= 3 {
                let (home, whole) = (self.find(stage, &flat(Role::Param, dp), false), self.find(stage, &flat(Role::Param, none), false));
                for body in &mut start {
                    body.push(comm(collective(Pattern::AllGather, dp, &[], home, whole)));
                }
            }
            let rest = if zero >= 1 { row.partial.minus(dp) } else { row.partial };
            if !rest.is_empty() || !row.tied.is_empty() {
                self.issue(stage, 3, Stream::Comm, collective(Pattern::AllReduce, rest, &row.tied, grad_home, grad_home));
            }
            if zero == 1 {
                let own = self.find(stage, &flat(Role::Grad, dp), true);
                self.issue(stage, 3, Stream::Comm, collective(Pattern::ReduceScatter, dp, &[], grad_home, own));
            }
        }
        for (part, body) in [FORWARD, BACKWARD].into_iter().zip(start) {
            if !body.is_empty() {
                let events = self.stages[stage].program.events;
                self.stages[stage].program.events += 2;
                let issue = |stream, instr| Issue { stream, instr };
                let mut all = vec![issue(Stream::Compute, Instr::Record(EventId(events))), issue(Stream::Comm, Instr::Wait(EventId(events)))];
                all.extend(body);
                all.push(issue(Stream::Comm, Instr::Record(EventId(events + 1))));
                all.push(issue(Stream::Compute, Instr::Wait(EventId(events + 1))));
                self.stages[stage].bodies[part].splice(0..0, all);
            }
        }
        self.cross(stage, 3, Stream::Comm, Stream::Compute);
        for (bucket, row) in buckets.iter().filter(|_| !each) {
            if row.tied.first().is_none_or(|&first| first as usize == stage) {
                let zero = self.zero(row.partial);
                let pieces = if zero >= 1 { dp } else { none };
                let src = self.find(stage, &Content::Flat { bucket: *bucket, role: Role::Grad, pieces }, zero == 1);
                let used = row.members[0].sharding.used().union(pieces);
                self.issue(stage, 3, Stream::Compute, Instr::SquareSum { src, dst: norm, once: all.minus(used) });
            }
        }
        if !each && (!all.is_empty() || !everyone.is_empty()) {
            self.issue(stage, 3, Stream::Compute, collective(Pattern::AllReduce, all, &everyone, norm, norm));
        }
        if !each {
            self.issue(stage, 3, Stream::Compute, Instr::ClipScale { src: norm, dst: clip });
        }
        for (bucket, row) in &buckets {
            let zero = self.zero(row.partial);
            let pieces = if zero >= 1 { dp } else { none };
            let flat = |role| Content::Flat { bucket: *bucket, role, pieces };
            let grad = self.find(stage, &flat(Role::Grad), zero == 1);
            let moments: Vec<BufferId> =
                [Role::Moment1, Role::Moment2].into_iter().take(self.shape.optimizer.moments()).map(|r| self.find(stage, &flat(r), false)).collect();
            let param = self.find(stage, &flat(Role::Param), zero == 1 || zero == 2);
            let compute = self.graph.values[self.graph.params[row.members[0].param].value].ty.dtype;
            let (state, param_too) =
                if compute == compute.accumulator() { (param, None) } else { (self.find(stage, &flat(Role::Master), false), Some(param)) };
            let scale = (!each).then_some(clip);
            let trust = self.shape.optimizer.trusts().then(|| self.find(stage, &Content::Trust { bucket: *bucket }, false));
            if let Some(dst) = trust {
                self.issue(stage, 3, Stream::Compute, Instr::TrustSums { state, grad, moments: moments.clone(), scale, dst });
                let split = row.members[0].sharding.used().union(pieces);
                if !split.is_empty() {
                    self.issue(stage, 3, Stream::Compute, collective(Pattern::AllReduce, split, &[], dst, dst));
                }
            }
            self.issue(stage, 3, Stream::Compute, Instr::Update { state, grad, moments, param: param_too, scale, trust });
            if zero == 1 || zero == 2 {
                let whole = self.find(stage, &Content::Flat { bucket: *bucket, role: Role::Param, pieces: none }, false);
                self.cross(stage, 3, Stream::Compute, Stream::Comm);
                self.issue(stage, 3, Stream::Comm, collective(Pattern::AllGather, dp, &[], param, whole));
            }
        }
        if each {
            self.cross(stage, 3, Stream::Comm, Stream::Compute);
        }
    }
}
