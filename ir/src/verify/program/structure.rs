//! Ids, axes, sizes and byte ranges in bounds; buckets and schedule consistent. Every later pass indexes freely on the strength of this one.

use std::collections::{BTreeMap, BTreeSet};

use super::{Class, Place, Report};
use crate::bucket::{Bucket, Member};
use crate::entity::{BucketId, BufferId, DimId, Id, ParamId, SegmentId};
use crate::graph::{Def, Graph, Type};
use crate::mesh::{AxisSet, MAX_AXES};
use crate::program::{Buffer, Content, Instr, Program, Role, Scalar, SegmentKind, Space, StageProgram, Updates};
use crate::rule::{Split, rule};
use crate::sharding::{LocalType, Sharding};

/// Elements of a value or a bucket: few enough that no count of bytes overflows.
const MOST_ELEMENTS: u64 = 1 << 56;

/// Elements of a bucket whose places are told: each is a 32-bit number.
const MOST_PLACES: u64 = 1 << 32;

/// Events of a stage: many more than a program has use for, few enough to keep a clock for each.
const MAX_EVENTS: u32 = 1 << 20;

pub(super) fn check(graph: &Graph, program: &Program, report: &mut Report) {
    whole_program(graph, program, report);
    if !report.is_clean() {
        return;
    }
    for (index, stage) in program.stages.iter().enumerate() {
        let mut checker = Checker { graph, program, stage, place: Place::stage(index), index, report };
        checker.regions();
        checker.buckets();
        checker.buffers();
        checker.segments();
        checker.schedule();
    }
    if report.is_clean() {
        homes(graph, program, report);
    }
}

/// Shape of one rank's part, or why there is none.
pub(super) fn local(program: &Program, ty: &Type, sharding: &Sharding) -> Result<LocalType, String> {
    if sharding.dims.len() != ty.dims.len() {
        return Err(format!("the sharding has {} dims, the value has {}", sharding.dims.len(), ty.dims.len()));
    }
    let elements = ty.dims.iter().try_fold(1u64, |n, &dim| n.checked_mul(program.padded.size(dim)));
    if elements.is_none_or(|n| n > MOST_ELEMENTS) {
        return Err(format!("more than {MOST_ELEMENTS} elements"));
    }
    if !program.mesh.all().includes(sharding.used()) {
        return Err("the sharding uses an axis that the mesh does not have".into());
    }
    if !sharding.is_valid() {
        return Err("the sharding uses an axis twice".into());
    }
    if let Some(ring) = sharding.ring {
        if !program.mesh.all().includes(ring.axes) || ring.ranks != program.mesh.size(ring.axes) || !ring.is_valid() {
            return Err(format!("turn {} of a ring of {} is none along {:?}", ring.turn, ring.ranks, ring.axes));
        }
        if !sharding.sharded().includes(ring.axes) {
            return Err("goes round along axes that do not cut it into blocks".into());
        }
    }
    for (at, (&dim, &axes)) in ty.dims.iter().zip(&sharding.dims).enumerate() {
        let (size, ways) = (program.padded.size(dim), program.mesh.size(axes));
        if size % ways != 0 {
            return Err(format!("dim {at} of padded size {size} does not cut into {ways} blocks"));
        }
    }
    Ok(crate::sharding::local_type(ty, sharding, &program.padded, &program.mesh))
}

fn whole_program(graph: &Graph, program: &Program, report: &mut Report) {
    let mut fault = |message: String| report.push(Class::Structure, Place::default(), message);
    let ranks = program.mesh.axes.iter().try_fold(1u64, |n, axis| n.checked_mul(axis.size).filter(|&n| n > 0 && n <= 1 << 32));
    if program.mesh.axes.len() > MAX_AXES || ranks.is_none() {
        fault(format!("the mesh must have 1 to {MAX_AXES} axes of positive size and at most 2^32 ranks"));
    }
    if !program.mesh.is_nested() {
        fault("the mesh must nest every axis once".into());
    }
    if program.stages.is_empty() || program.micro_batches == 0 {
        fault("a program has at least one stage and one micro-batch".into());
    }
    if !graph.is_differentiated() {
        fault("the graph is not differentiated".into());
    }
    if program.optimizer.is_none() && !graph.params.is_empty() {
        fault("the program names no optimizer for the graph's parameters".into());
    }
    if program.padded.0.len() != graph.dims.len() {
        return fault(format!("padded sizes of {} dims, the graph has {}", program.padded.0.len(), graph.dims.len()));
    }
    let is_padded = |id: DimId, size: u64| (size.max(1)..=MOST_ELEMENTS).contains(&program.padded.size(id));
    if let Some((id, dim)) = graph.dims.iter().find(|&(id, dim)| dim.size == 0 || !is_padded(id, dim.size)) {
        let at_most = format!("expected its size or more, up to {MOST_ELEMENTS}");
        return fault(format!("dim {id} `{}` of size {} is padded to {}: {at_most}", dim.name, dim.size, program.padded.size(id)));
    }
    if graph.dims.ids().all(|d| program.padded.size(d) == graph.size(d)) {
        return;
    }
    for (id, node) in graph.nodes.iter() {
        let dims = |values: &[crate::entity::ValueId]| values.iter().map(|&v| graph.values[v].ty.dims.clone()).collect::<Vec<_>>();
        let (ins, outs) = (dims(&node.inputs), dims(&node.outputs));
        let ranks = |dims: &[Vec<_>]| dims.iter().map(Vec::len).collect::<Vec<_>>();
        let rule = rule(&node.op, &ranks(&ins), &ranks(&outs));
        let labels = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l));
        for (labels, dims) in labels.zip(ins.iter().chain(&outs)) {
            for (&label, &dim) in labels.iter().zip(dims) {
                let split = rule.factor(label).map(|f| f.split);
                if program.padded.size(dim) != graph.size(dim) && split != Some(Split::Free) {
                    fault(format!("dim {dim} `{}` is padded, but it is factor `{label}` of {id}, which cannot be", graph.dims[dim].name));
                }
            }
        }
    }
}

/// A parameter with homes on several stages is tied over exactly them, with the same bucket on each.
fn homes(graph: &Graph, program: &Program, report: &mut Report) {
    let mut homes: BTreeMap<ParamId, Vec<(u32, BucketId)>> = BTreeMap::new();
    for (index, stage) in program.stages.iter().enumerate() {
        for (id, bucket) in stage.buckets.iter() {
            for member in &bucket.members {
                homes.entry(member.param).or_default().push((index as u32, id));
            }
        }
    }
    for (param, homes) in homes {
        let bucket = |&(stage, id): &(u32, BucketId)| &program.stages[stage as usize].buckets[id];
        let stages: Vec<u32> = homes.iter().map(|h| h.0).collect();
        let tied = if stages.len() > 1 { stages } else { Vec::new() };
        for home in &homes {
            let (this, first) = (bucket(home), bucket(&homes[0]));
            let name = &graph.values[graph.params[param].value].name;
            let at = Place::stage(home.0 as usize).bucket(home.1);
            if this.tied != tied {
                report.push(Class::Structure, at, format!("`{name}` is tied over stages {:?}, but its homes are on {tied:?}", this.tied));
            } else if (&this.members, this.elems, this.partial) != (&first.members, first.elems, first.partial) {
                report.push(Class::Structure, at, format!("`{name}` has another layout here than on stage {}", homes[0].0));
            }
        }
    }
}

struct Checker<'a> {
    graph: &'a Graph,
    program: &'a Program,
    stage: &'a StageProgram,
    index: usize,
    place: Place,
    report: &'a mut Report,
}

impl Checker<'_> {
    fn fault(&mut self, message: String) {
        self.report.push(Class::Structure, self.place, message);
    }

    fn regions(&mut self) {
        let mut end = 0u64;
        for region in &self.stage.regions {
            if region.offset != end {
                self.fault(format!("region `{}` begins at {}, the one before ends at {end}", region.name, region.offset));
            }
            end = region.offset.saturating_add(region.bytes);
        }
        if Space::ALL.iter().try_fold(0u64, |sum, &space| sum.checked_add(self.stage.bytes_in(space))).is_none() {
            self.fault("its memories together are too large".into());
        }
        if end != self.stage.arena_bytes {
            self.fault(format!("the regions end at {end}, the arena at {}", self.stage.arena_bytes));
        }
    }

    fn buckets(&mut self) {
        let mut seen = BTreeSet::new();
        for (id, bucket) in self.stage.buckets.iter() {
            let mut fault = |message: String| self.report.push(Class::Structure, self.place.bucket(id), message);
            if !self.program.mesh.all().includes(bucket.partial) {
                fault("partial over an axis that the mesh does not have".into());
            }
            if !bucket.tied.is_empty() && self.program.updates == Updates::MicroBatch {
                fault(format!("tied over stages {:?}, which update at different times: each micro-batch has an update of its own", bucket.tied));
            }
            if bucket.elems > MOST_ELEMENTS {
                fault(format!("{} elements, at most {MOST_ELEMENTS} are allowed", bucket.elems));
            }
            let sorted = bucket.tied.windows(2).all(|w| w[0] < w[1]);
            let homes = bucket.tied.is_empty() || bucket.tied.len() > 1 && bucket.tied.contains(&(self.index as u32));
            if !sorted || !homes || bucket.tied.iter().any(|&s| s as usize >= self.program.stages.len()) {
                fault(format!("tied over {:?}: expected this stage and others, in order", bucket.tied));
            }
            let dtype = bucket.members.first().and_then(|m| self.graph.params.get(m.param)).map(|p| self.graph.values[p.value].ty.dtype);
            let mut ranges = Vec::new();
            for member in &bucket.members {
                let Some(param) = self.graph.params.get(member.param) else {
                    fault(format!("{} is not a parameter of the graph", member.param));
                    continue;
                };
                let value = &self.graph.values[param.value];
                if !seen.insert(member.param) {
                    fault(format!("`{}` is a member twice on this stage", value.name));
                }
                match local(self.program, &value.ty, &member.sharding) {
                    Err(why) => fault(format!("`{}`: {why}", value.name)),
                    Ok(ty) if ty.elems() != member.elems => fault(format!("`{}` has {} elements, not {}", value.name, ty.elems(), member.elems)),
                    Ok(_) => {}
                }
                if member.sharding.used().intersects(bucket.partial) || !member.sharding.partial.is_empty() {
                    fault(format!("`{}` is sharded by an axis that its gradient is partial over", value.name));
                }
                match member.offset.checked_add(member.elems).filter(|&end| end <= bucket.elems) {
                    None => fault(format!("`{}` ends behind the bucket", value.name)),
                    Some(end) => ranges.push((member.offset, end)),
                }
                if Some(value.ty.dtype) != dtype {
                    fault(format!("`{}` has another element type than the first member", value.name));
                }
            }
            ranges.sort_unstable();
            if ranges.windows(2).any(|w| w[0].1 > w[1].0) {
                fault("members overlap".into());
            }
        }
    }

    fn buffers(&mut self) {
        for (id, buffer) in self.stage.buffers.iter() {
            if let Err(why) = self.buffer(id, buffer) {
                self.report.push(Class::Structure, self.place.buffer(id), why);
            }
        }
    }

    fn buffer(&self, id: BufferId, buffer: &Buffer) -> Result<(), String> {
        let (mesh, size) = (&self.program.mesh, buffer.dtype.size());
        let expect = |bytes: u64, dtype| match () {
            () if buffer.dtype != dtype => Err(format!("element type {}, expected {dtype}", buffer.dtype)),
            () if buffer.bytes != bytes => Err(format!("{} bytes, expected {bytes}", buffer.bytes)),
            () => Ok(()),
        };
        if !self.is_countable(&buffer.content) {
            return Ok(());
        }
        if !mesh.all().includes(buffer.piece_axes) {
            return Err("pieces over an axis that the mesh does not have".into());
        }
        match &buffer.content {
            Content::Value { value, sharding } => {
                let value = self.graph.values.get(*value).ok_or_else(|| format!("{value} is not a value of the graph"))?;
                let ty = local(self.program, &value.ty, sharding).map_err(|why| format!("`{}`: {why}", value.name))?;
                expect(ty.bytes(), ty.dtype)?;
            }
            &Content::Flat { bucket: id, role, pieces } => {
                let bucket = self.bucket(id)?;
                if !mesh.all().includes(pieces) || bucket.members.iter().any(|m| m.sharding.used().intersects(pieces)) {
                    return Err(format!("pieces over {pieces:?}: expected axes of the mesh over which every member is replicated"));
                }
                if bucket.elems % mesh.size(pieces) != 0 {
                    return Err(format!("{} elements do not cut into {} pieces", bucket.elems, mesh.size(pieces)));
                }
                if role == Role::Residual && !pieces.is_empty() {
                    return Err("a residual is of one rank, which has all of it".into());
                }
                expect(bucket.elems / mesh.size(pieces) * size, self.role_dtype(id, role))?;
            }
            &Content::Member { bucket: id, role, param } => {
                let bucket = self.bucket(id)?;
                if role == Role::Residual {
                    return Err("a residual has no members of its own".into());
                }
                let member = bucket.members.iter().find(|m| m.param == param).ok_or_else(|| format!("{param} is not in {id}"))?;
                expect(member.elems * size, self.role_dtype(id, role))?;
                if buffer.offset < member.offset * size {
                    return Err("its flat buffer would begin before the arena".into());
                }
            }
            // Sums over a whole step: in a shorter type than gradients have, small terms would be lost.
            Content::Scalar(_) => {
                let least = self.graph.loss.map_or(crate::dtype::DType::F32, |v| self.graph.values[v].ty.dtype.accumulator());
                if buffer.bytes != size || buffer.dtype == crate::dtype::DType::I32 || size < least.size() {
                    return Err(format!("a scalar is one floating-point element, of {least} at least"));
                }
            }
            &Content::Trust { bucket: id } => {
                let bucket = self.bucket(id)?;
                if bucket.members.is_empty() {
                    return Err(format!("{id} has no members"));
                }
                expect(2 * bucket.members.len() as u64 * size, self.role_dtype(id, Role::Master))?;
            }
            &Content::Wire { bucket: id, from, kept } => {
                let bucket = self.bucket(id)?;
                if !mesh.all().includes(from) || bucket.members.iter().any(|m| m.sharding.used().intersects(from)) {
                    return Err(format!("shares from {from:?}: expected axes of the mesh over which every member is replicated"));
                }
                if bucket.elems % mesh.size(from) != 0 {
                    return Err(format!("{} elements do not cut into {} shares", bucket.elems, mesh.size(from)));
                }
                let full = self.role_dtype(id, Role::Grad);
                match kept {
                    Some(kept) if !(1..=bucket.elems).contains(&kept) || bucket.elems > MOST_PLACES => {
                        return Err(format!("keeps {kept} of {} elements: expected some of them, of at most {MOST_PLACES}", bucket.elems));
                    }
                    Some(kept) => expect(2 * kept * mesh.size(from) * size, full)?,
                    None => expect(bucket.elems * size, if buffer.dtype == full { full } else { crate::dtype::DType::Bf16 })?,
                }
            }
            Content::Frame | Content::Scratch => {}
        }
        self.place(id, buffer)
    }

    /// Whether a buffer lies as a whole in one memory.
    fn place(&self, id: BufferId, buffer: &Buffer) -> Result<(), String> {
        let (mesh, size) = (&self.program.mesh, buffer.dtype.size());
        match &buffer.content {
            Content::Flat { pieces, .. } if *pieces == buffer.piece_axes => {}
            _ if buffer.piece_axes.is_empty() => {}
            _ => return Err("only a piece of a flat buffer lies in place, over the axes of its pieces".into()),
        }
        if !buffer.offset.is_multiple_of(size) || !buffer.slot_stride.is_multiple_of(size) {
            return Err(format!("not aligned to its elements of {size} bytes"));
        }
        if buffer.slots == 0 {
            return Err("no slots".into());
        }
        // What is there for a whole step is not another for each micro-batch.
        let of_micro_batches = matches!(buffer.content, Content::Value { .. } | Content::Frame | Content::Scratch) || self.is_put_by(id, buffer);
        if buffer.slots > 1 && !of_micro_batches {
            return Err(format!("{} slots, expected one: it is of no micro-batch", buffer.slots));
        }
        let footprint = buffer.bytes.checked_mul(mesh.size(buffer.piece_axes)).ok_or("too large")?;
        if buffer.slots > 1 && buffer.slot_stride < footprint {
            return Err(format!("slots of {footprint} bytes are only {} apart", buffer.slot_stride));
        }
        let end =
            (buffer.slots - 1).checked_mul(buffer.slot_stride).and_then(|n| n.checked_add(footprint)).and_then(|n| n.checked_add(buffer.offset));
        match end {
            Some(end) if end <= self.stage.range(self.stage.space_at(buffer.offset)).end => Ok(()),
            Some(end) if end <= self.stage.end() => Err("lies in two memories".into()),
            _ => Err(format!("ends behind the arena of {} bytes", self.stage.end())),
        }
    }

    /// Whether it may hold parameters that were put by for backward passes, beside those that live from step to step.
    fn is_put_by(&self, id: BufferId, buffer: &Buffer) -> bool {
        match (self.program.updates, &buffer.content) {
            (Updates::MicroBatch, Content::Member { role: Role::Param, .. }) => true,
            (Updates::MicroBatch, &Content::Flat { bucket, role: Role::Param, .. }) => self.stage.home(bucket, Role::Param) != Some(id),
            (Updates::Step | Updates::MicroBatch, _) => false,
        }
    }

    fn bucket(&self, id: BucketId) -> Result<&Bucket, String> {
        self.stage.buckets.get(id).ok_or_else(|| format!("{id} is not a bucket of this stage"))
    }

    /// Whether a buffer's bytes can be counted; if not, its bucket has the fault.
    fn is_countable(&self, content: &Content) -> bool {
        let bucket = match *content {
            Content::Flat { bucket, .. } | Content::Member { bucket, .. } | Content::Trust { bucket } | Content::Wire { bucket, .. } => bucket,
            Content::Value { .. } | Content::Scalar(_) | Content::Frame | Content::Scratch => return true,
        };
        self.stage.buckets.get(bucket).is_none_or(|bucket| {
            let is_inside = |m: &Member| m.offset.checked_add(m.elems).is_some_and(|end| end <= bucket.elems);
            bucket.elems <= MOST_ELEMENTS && bucket.members.iter().all(is_inside)
        })
    }

    fn role_dtype(&self, bucket: BucketId, role: Role) -> crate::dtype::DType {
        let first = self.stage.buckets[bucket].members.first();
        let compute = first.and_then(|m| self.graph.params.get(m.param)).map_or(crate::dtype::DType::F32, |p| self.graph.values[p.value].ty.dtype);
        match role {
            Role::Param => compute,
            Role::Master | Role::Grad | Role::Moment1 | Role::Moment2 | Role::Residual => compute.accumulator(),
        }
    }

    fn segments(&mut self) {
        for (segment, body) in self.stage.segments.iter().map(|(id, s)| (id, &s.body)) {
            for (at, issue) in body.iter().enumerate() {
                if let Err((buffer, why)) = self.instr(&issue.instr) {
                    let place = Place { buffer, ..self.place.instr(segment, at) };
                    self.report.push(Class::Structure, place, why);
                }
            }
        }
    }

    fn instr(&self, instr: &Instr) -> Result<(), (Option<BufferId>, String)> {
        if let Some(bad) = buffers_of(instr).into_iter().find(|&b| b.index() >= self.stage.buffers.len()) {
            return Err((None, format!("{bad} is not a buffer of this stage")));
        }
        let elsewhere = buffers_of(instr).into_iter().filter(|&b| self.stage.space(b) != Space::Device);
        match (instr, elsewhere.collect::<Vec<_>>()[..].split_first()) {
            (Instr::Copy { .. }, Some((_, []))) => {}
            (&Instr::Copy { src, dst }, None) if self.is_stash(src, dst) => {}
            (Instr::Copy { dst, .. }, _) => return Err((Some(*dst), "a copy goes between the device's memory and another".into())),
            (_, Some((&first, _))) => return Err((Some(first), format!("only copies reach {}", self.stage.space(first).name()))),
            (_, None) => {}
        }
        let err = |why: String| Err((None, why));
        let stages = self.program.stages.len() as u32;
        let dims = |buffer: BufferId| match &self.stage.buffers[buffer].content {
            Content::Value { sharding, .. } => sharding.dims.len() as u32,
            Content::Member { .. }
            | Content::Flat { .. }
            | Content::Scalar(_)
            | Content::Trust { .. }
            | Content::Wire { .. }
            | Content::Frame
            | Content::Scratch => u32::MAX,
        };
        let axes_in_mesh = |axes: AxisSet| self.program.mesh.all().includes(axes);
        match instr {
            Instr::Run { node, ins, outs, .. } => {
                let Some(node) = self.graph.nodes.get(*node) else { return err(format!("{node} is not a node of the graph")) };
                if (ins.len(), outs.len()) != (node.inputs.len(), node.outputs.len()) {
                    return err(format!("expected {} operands and {} results", node.inputs.len(), node.outputs.len()));
                }
            }
            &Instr::Slice { src, dst, axes, dim } => {
                if !axes_in_mesh(axes) || axes.is_empty() || dim >= dims(src) || dim >= dims(dst) {
                    return err(format!("slice of dim {dim} over {axes:?}"));
                }
            }
            Instr::Collective { axes, stages: across, dim, src, dst, .. } => {
                if !axes_in_mesh(*axes) || axes.is_empty() && across.is_empty() {
                    return err(format!("collective over {axes:?}"));
                }
                if *dim != 0 && (*dim >= dims(*src) || *dim >= dims(*dst)) {
                    return err(format!("there is no dim {dim}"));
                }
                let sorted = across.windows(2).all(|w| w[0] < w[1]) && across.iter().all(|&s| s < stages);
                if !across.is_empty() && (!sorted || across.len() < 2 || !across.contains(&(self.index as u32))) {
                    return err(format!("across stages {across:?}: expected this stage and others, in order"));
                }
                if !across.is_empty() {
                    self.across(across, *dst).or_else(err)?;
                }
            }
            Instr::Join { left, right, dst, .. } => {
                if left.is_empty() || (left.len(), left.len()) != (right.len(), dst.len()) {
                    return err(format!("{} parts with {} make {}: expected as many of each", left.len(), right.len(), dst.len()));
                }
            }
            Instr::Send { to: other, .. } | Instr::Recv { from: other, .. } => {
                if *other >= stages || *other as usize == self.index {
                    return err(format!("there is no other stage {other}"));
                }
            }
            Instr::SquareSum { .. } | Instr::ClipScale { .. } | Instr::Update { scale: Some(_), .. } | Instr::TrustSums { scale: Some(_), .. }
                if self.program.updates == Updates::MicroBatch =>
            {
                return err(
                    "a norm is of all stages, and where each micro-batch has an update of its own no stage waits for others: nothing is clipped"
                        .into(),
                );
            }
            Instr::SquareSum { once, .. } => {
                if !axes_in_mesh(*once) {
                    return err(format!("once over {once:?}"));
                }
            }
            Instr::Record(event) | Instr::Wait(event) => {
                if event.0 >= self.stage.events {
                    return err(format!("{event} of {} events", self.stage.events));
                }
            }
            Instr::Input { dst } => match &self.stage.buffers[*dst].content {
                Content::Value { value, .. } if self.graph.values.get(*value).is_some_and(|v| v.def == Def::Input) => {}
                _ => return Err((Some(*dst), "expected the buffer of a graph input".into())),
            },
            Instr::Zero { .. }
            | Instr::Copy { .. }
            | Instr::AddInto { .. }
            | Instr::Cast { .. }
            | Instr::Compress { .. }
            | Instr::SumShares { .. }
            | Instr::ClipScale { .. }
            | Instr::TrustSums { .. }
            | Instr::Update { .. } => {}
        }
        Ok(())
    }

    /// Whether a copy within the device's memory puts parameters by.
    fn is_stash(&self, src: BufferId, dst: BufferId) -> bool {
        let [from, to] = [src, dst].map(|b| &self.stage.buffers[b].content);
        let is_param = matches!(from, Content::Flat { role: Role::Param, pieces: AxisSet::EMPTY, .. });
        self.program.updates == Updates::MicroBatch && is_param && from == to && src != dst
    }

    /// Across stages go gradients of parameters with homes on exactly them, and the norm of all.
    fn across(&self, stages: &[u32], dst: BufferId) -> Result<(), String> {
        let expected = match self.stage.buffers[dst].content {
            Content::Flat { bucket, role: Role::Grad, .. } | Content::Member { bucket, role: Role::Grad, .. } => {
                self.stage.buckets.get(bucket).map(|b| b.tied.clone()).unwrap_or_default()
            }
            Content::Scalar(Scalar::NormSquared) => (0..self.program.stages.len() as u32).collect(),
            Content::Value { .. }
            | Content::Flat { .. }
            | Content::Member { .. }
            | Content::Scalar(_)
            | Content::Trust { .. }
            | Content::Wire { .. }
            | Content::Frame
            | Content::Scratch => return Err("only gradients of tied parameters and the norm are reduced across stages".into()),
        };
        if stages == expected { Ok(()) } else { Err(format!("across stages {stages:?}, expected {expected:?}")) }
    }

    /// Every micro-batch has a forward and a backward call, as many as every other; no segment is called twice for one micro-batch. That the passes of all virtual
    /// stages and the halves of a backward pass are there, later passes show: what they make is missing.
    fn schedule(&mut self) {
        let micro_batches = self.program.micro_batches;
        if micro_batches > self.stage.schedule.len() as u64 {
            return self.fault(format!("{} calls for {micro_batches} micro-batches", self.stage.schedule.len()));
        }
        if self.stage.events > MAX_EVENTS {
            self.fault(format!("{} events, at most {MAX_EVENTS} are allowed", self.stage.events));
        }
        let mut called: BTreeSet<(SegmentId, u64)> = BTreeSet::new();
        let mut passes = vec![[0u32; 3]; micro_batches as usize];
        for (at, call) in self.stage.schedule.iter().enumerate() {
            let Some(segment) = self.stage.segments.get(call.segment) else {
                return self.fault(format!("call {at}: {} is not a segment of this stage", call.segment));
            };
            if call.micro_batch >= micro_batches {
                return self.fault(format!("call {at}: micro-batch {} of {micro_batches}", call.micro_batch));
            }
            if !called.insert((call.segment, call.micro_batch)) {
                self.report.push(
                    Class::Structure,
                    Place { segment: Some(call.segment), ..self.place },
                    format!("call {at}: {} is called again for micro-batch {}", call.segment, call.micro_batch),
                );
            }
            match segment.kind {
                SegmentKind::Begin | SegmentKind::End if call.micro_batch != 0 => {
                    self.fault(format!("call {at}: {} is called for micro-batch {}, expected 0", call.segment, call.micro_batch));
                }
                SegmentKind::Update if self.program.updates == Updates::Step && call.micro_batch != 0 => {
                    self.fault(format!(
                        "call {at}: {} is called for micro-batch {}, expected 0: a step has one update",
                        call.segment, call.micro_batch
                    ));
                }
                SegmentKind::Begin | SegmentKind::Update | SegmentKind::Stash | SegmentKind::End => {}
                SegmentKind::Forward => passes[call.micro_batch as usize][0] += 1,
                SegmentKind::Backward | SegmentKind::BackwardLast | SegmentKind::BackwardInput => passes[call.micro_batch as usize][1] += 1,
                SegmentKind::BackwardWeight | SegmentKind::BackwardWeightLast => passes[call.micro_batch as usize][2] += 1,
            }
        }
        for (name, pass) in [("forward", 0), ("backward", 1), ("weight", 2)] {
            let counts: BTreeSet<u32> = passes.iter().map(|p| p[pass]).collect();
            if let Some(micro_batch) = passes.iter().position(|p| p[pass] == 0).filter(|_| pass < 2) {
                self.fault(format!("micro-batch {micro_batch} has no {name} call"));
            } else if counts.len() > 1 {
                self.fault(format!("micro-batches have different numbers of {name} calls"));
            }
        }
    }
}

/// Every buffer an instruction names.
pub fn buffers_of(instr: &Instr) -> Vec<BufferId> {
    let mut named = Vec::new();
    instr.accesses(|buffer, _| named.push(buffer));
    named
}
