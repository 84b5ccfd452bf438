//! Damage that claims alone do not show: every buffer still says what fits its neighbours, and the numbers are wrong.

use super::{Cut, show};
use crate::entity::{BufferId, Table};
use crate::mesh::AxisSet;
use crate::program::{Buffer, Content, Instr, Issue, Pattern, Role, Scalar, SegmentKind, StageProgram, Stream, align};

impl Cut<'_> {
    /// A gather in place stops half-way: over one axis less, into a larger piece that says so.
    pub fn half_gather(&mut self) -> Option<String> {
        let sized: AxisSet = self.program.mesh.ids().filter(|&a| self.program.mesh.axis(a).size > 1).collect();
        let site = self.site(|i| matches!(i, Instr::Collective { pattern: Pattern::AllGather, axes, .. } if axes.and(sized).iter().count() > 1))?;
        let mesh = self.program.mesh.clone();
        let stage = &mut self.program.stages[site.0];
        let buffers = &mut stage.buffers;
        let Instr::Collective { axes, src, dst, .. } = &mut stage.segments[site.1].body[site.2].instr else { return None };
        let (Content::Flat { bucket, role, .. }, Content::Flat { .. }) = (&buffers[*src].content, &buffers[*dst].content) else { return None };
        let left = AxisSet::one(axes.and(sized).iter().next()?);
        let whole = &buffers[*dst];
        let piece = Buffer {
            content: Content::Flat { bucket: *bucket, role: *role, pieces: left },
            bytes: whole.bytes / mesh.size(left),
            piece_axes: left,
            ..whole.clone()
        };
        if !whole.piece_axes.is_empty() || buffers[*src].piece_axes.is_empty() {
            return None;
        }
        *axes = axes.minus(left);
        *dst = buffers.push(piece);
        Some(show(site))
    }

    /// Gradients are gathered before they are reduced.
    pub fn gather_pending(&mut self) -> Option<String> {
        let site = self.site(|i| matches!(i, Instr::Collective { pattern: Pattern::ReduceScatter, .. }))?;
        let Issue { instr, stream } = self.issue(site).clone();
        let Instr::Collective { axes, stages, dim, monoid, src, dst, .. } = instr else { return None };
        let flat = |id: BufferId| matches!(self.program.stages[site.0].buffers[id].content, Content::Flat { role: Role::Grad, .. });
        if !flat(src) || !flat(dst) {
            return None;
        }
        let gather = Instr::Collective { pattern: Pattern::AllGather, axes, stages, dim, monoid, src: dst, dst: src };
        self.program.stages[site.0].segments[site.1].body.insert(site.2, Issue { instr: gather, stream });
        Some(show(site))
    }

    /// What is left over goes to a copy of the residual's buffer, where the gradients were: the residual stays as it was.
    pub fn stale_residual(&mut self) -> Option<String> {
        let site = self.site(|i| matches!(i, Instr::Compress { .. }))?;
        let Instr::Compress { residual, dst, .. } = self.issue(site).instr.clone() else { return None };
        let stage = &mut self.program.stages[site.0];
        // Behind everything, where there is room of its own.
        let (at, bytes) = (align(stage.arena_bytes), stage.buffers[residual].bytes);
        if stage.host_bytes + stage.file_bytes > 0 {
            return None;
        }
        stage.arena_bytes = at + align(bytes);
        stage.regions.last_mut()?.bytes += stage.arena_bytes - at;
        let copy = stage.buffers.push(Buffer { offset: at, ..stage.buffers[residual].clone() });
        let Instr::Compress { residual, .. } = &mut stage.segments[site.1].body[site.2].instr else { return None };
        *residual = copy;
        Some(format!("{}: {copy} behind {dst}", show(site)))
    }

    /// The residual is cleared before it counts.
    pub fn lose_residual(&mut self) -> Option<String> {
        let site = self.site(|i| matches!(i, Instr::Compress { .. }))?;
        let Issue { instr, stream } = self.issue(site).clone();
        let Instr::Compress { residual, .. } = instr else { return None };
        self.program.stages[site.0].segments[site.1].body.insert(site.2, Issue { instr: Instr::Zero { dst: residual }, stream });
        Some(show(site))
    }

    /// The residual counts in gradients beside its exchange.
    pub fn read_residual(&mut self) -> Option<String> {
        let site = self.site(|i| matches!(i, Instr::Compress { .. }))?;
        let Issue { instr, stream } = self.issue(site).clone();
        let Instr::Compress { src, residual, .. } = instr else { return None };
        let add = Instr::AddInto { src: residual, dst: src };
        self.program.stages[site.0].segments[site.1].body.insert(site.2, Issue { instr: add, stream });
        Some(show(site))
    }

    /// An operation across stages leaves one out, on all others alike.
    pub fn fewer_stages(&mut self) -> Option<String> {
        let site = self.site(|i| matches!(i, Instr::Collective { stages, .. } if stages.len() > 1))?;
        let Instr::Collective { stages, .. } = self.issue(site).instr.clone() else { return None };
        let (kept, dropped) = (stages[..stages.len() - 1].to_vec(), *stages.last()?);
        for (index, stage) in self.program.stages.iter_mut().enumerate() {
            for (_, segment) in stage.segments.iter_mut() {
                segment.body.retain_mut(|issue| match &mut issue.instr {
                    Instr::Collective { stages: others, axes, .. } if *others == stages => {
                        others.clone_from(&kept);
                        if kept.len() < 2 {
                            others.clear();
                        }
                        index as u32 != dropped && !(others.is_empty() && axes.is_empty())
                    }
                    _ => true,
                });
            }
        }
        Some(format!("{}: stage {dropped}", show(site)))
    }

    /// An operation over stages and ranks becomes two, which one stage does in the other order.
    pub fn other_order_across(&mut self) -> Option<String> {
        let site = self.site(|i| matches!(i, Instr::Collective { axes, stages, .. } if !stages.is_empty() && !axes.is_empty()))?;
        let whole = self.issue(site).instr.clone();
        let Instr::Collective { axes: over, stages: across, .. } = &whole else { return None };
        for (index, stage) in self.program.stages.iter_mut().enumerate() {
            for (_, segment) in stage.segments.iter_mut() {
                for at in (0..segment.body.len()).rev() {
                    let Issue { instr, stream } = segment.body[at].clone();
                    let Instr::Collective { pattern, axes, ref stages, dim, monoid, dst, .. } = instr else { continue };
                    if (axes, stages) != (*over, across) {
                        continue;
                    }
                    let then = Instr::Collective { pattern, axes: AxisSet::EMPTY, stages: stages.clone(), dim, monoid, src: dst, dst };
                    if let Instr::Collective { stages, .. } = &mut segment.body[at].instr {
                        stages.clear();
                    }
                    segment.body.insert(at + 1, Issue { instr: then, stream });
                    if index == site.0 {
                        segment.body.swap(at, at + 1);
                    }
                }
            }
        }
        Some(show(site))
    }

    /// The norm forgets a bucket, and that it had a norm.
    pub fn forget_norm(&mut self) -> Option<String> {
        let site = self.site(|i| matches!(i, Instr::SquareSum { .. }))?;
        let stage = &mut self.program.stages[site.0];
        let Instr::SquareSum { dst, .. } = stage.segments[site.1].body[site.2].instr else { return None };
        stage.segments[site.1].body.remove(site.2);
        for (_, segment) in stage.segments.iter_mut() {
            if let Some(at) = segment.body.iter().position(|i| matches!(i.instr, Instr::ClipScale { src, .. } if src == dst)) {
                let stream = segment.body[at].stream;
                segment.body.insert(at + 1, Issue { instr: Instr::Zero { dst }, stream });
            }
        }
        Some(show(site))
    }

    /// The loss, or the norm, is lost when it has been used.
    pub fn lose_scalar(&mut self) -> Option<String> {
        let scalars = |buffers: &Table<BufferId, Buffer>| -> Vec<BufferId> {
            let is = |b: &Buffer| matches!(b.content, Content::Scalar(Scalar::Loss | Scalar::NormSquared));
            buffers.iter().filter(|(_, b)| is(b)).map(|(id, _)| id).collect()
        };
        let all: Vec<(usize, BufferId)> =
            self.program.stages.iter().enumerate().flat_map(|(at, s)| scalars(&s.buffers).into_iter().map(move |id| (at, id))).collect();
        let (stage, dst) = all[self.draw(all.len())?];
        let last = self.program.stages[stage].schedule.last()?.segment;
        let body = &mut self.program.stages[stage].segments[last].body;
        body.push(Issue { instr: Instr::Zero { dst }, stream: Stream::Compute });
        Some(format!("stage {stage} {dst}"))
    }

    /// A copy or a sum takes what lies a member, or a piece, further on.
    pub fn shifted_source(&mut self) -> Option<String> {
        let site = self.site(|i| matches!(i, Instr::Copy { .. } | Instr::AddInto { .. }))?;
        let stage = &self.program.stages[site.0];
        let (Instr::Copy { src, .. } | Instr::AddInto { src, .. }) = stage.segments[site.1].body[site.2].instr else { return None };
        let this = &stage.buffers[src];
        let flat = |b: &Buffer| matches!(b.content, Content::Flat { .. } | Content::Member { .. });
        let others = stage.buffers.iter().filter(|(_, b)| flat(b) && b.offset != this.offset && b.dtype == this.dtype && b.bytes >= this.bytes);
        let offsets: Vec<u64> = others.map(|(_, b)| b.offset).filter(|&o| stage.space_at(o) == stage.space_at(this.offset)).collect();
        if !flat(this) || offsets.is_empty() {
            return None;
        }
        let moved = Buffer { offset: offsets[self.pick as usize % offsets.len()], ..this.clone() };
        let new = self.program.stages[site.0].buffers.push(moved);
        match &mut self.issue(site).instr {
            Instr::Copy { src, .. } | Instr::AddInto { src, .. } => *src = new,
            _ => return None,
        }
        Some(show(site))
    }

    /// A number is so large that its bytes are counted modulo 2⁶⁴.
    pub fn huge_number(&mut self) -> Option<String> {
        const HUGE: u64 = 1 << 62;
        let stage = self.draw(self.program.stages.len())?;
        let pick = self.pick / self.program.stages.len() as u64;
        let program = &mut self.program.stages[stage];
        let (buckets, buffers) = (program.buckets.len() as u64, program.buffers.len() as u64);
        match pick % 4 {
            0 if buckets > 0 => {
                let id = program.buckets.ids().nth((pick / 4 % buckets) as usize)?;
                let bucket = &mut program.buckets[id];
                bucket.elems += HUGE;
                bucket.members.last_mut()?.offset += HUGE;
            }
            1 if buffers > 0 => program.buffers[BufferId((pick / 4 % buffers) as u32)].offset += HUGE,
            2 if buffers > 0 => {
                let buffer = &mut program.buffers[BufferId((pick / 4 % buffers) as u32)];
                (buffer.slots, buffer.slot_stride) = (5, HUGE);
            }
            _ => {
                let dims: Vec<_> = self.program.padded.0.ids().collect();
                let dim = *dims.get((pick / 4) as usize % dims.len().max(1))?;
                self.program.padded.0[dim] += HUGE;
            }
        }
        Some(format!("stage {stage}, {pick}"))
    }

    /// Places of parameters that are put by become one less, those of their blocks too.
    pub fn fewer_versions(&mut self) -> Option<String> {
        let is_put_by =
            |b: &Buffer| b.slots > 1 && matches!(b.content, Content::Flat { role: Role::Param, .. } | Content::Member { role: Role::Param, .. });
        let stages: Vec<usize> = (0..self.program.stages.len()).filter(|&s| self.program.stages[s].buffers.values().any(is_put_by)).collect();
        let stage = stages[self.draw(stages.len())?];
        self.program.stages[stage].buffers.iter_mut().filter(|(_, b)| is_put_by(b)).for_each(|(_, b)| b.slots -= 1);
        Some(format!("stage {stage}"))
    }

    /// A call of a segment of a kind comes one call later: behind one of these kinds.
    pub fn later_call(&mut self, kind: SegmentKind, behind: &[SegmentKind]) -> Option<String> {
        let is_of = |stage: &StageProgram, at: usize, kinds: &[SegmentKind]| {
            stage.segments.get(stage.schedule[at].segment).is_some_and(|s| kinds.contains(&s.kind))
        };
        let calls = |(index, stage): (usize, &StageProgram)| {
            let all = (1..stage.schedule.len()).filter(|&next| is_of(stage, next - 1, &[kind]) && is_of(stage, next, behind));
            all.map(move |next| (index, next - 1)).collect::<Vec<_>>()
        };
        let all: Vec<(usize, usize)> = self.program.stages.iter().enumerate().flat_map(calls).collect();
        let (stage, at) = all[self.draw(all.len())?];
        self.program.stages[stage].schedule.swap(at, at + 1);
        Some(format!("stage {stage} call {at}"))
    }

    /// What is there for a step is another for each micro-batch.
    pub fn more_slots(&mut self) -> Option<String> {
        self.buffer(|buffer, _| {
            let once = matches!(buffer.content, Content::Flat { .. } | Content::Scalar(_));
            (buffer.slots, buffer.slot_stride) = (buffer.slots + 1, 0);
            once
        })
    }
}
