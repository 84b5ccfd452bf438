//! Rewrites: other programs that are just as right.

use std::ops::Range;

use super::{Cut, show, words};
use crate::entity::BufferId;
use crate::graph::Graph;
use crate::mesh::AxisId;
use crate::program::{ALIGN, Buffer, Instr, Issue, Program, Region, Space, StageProgram, Stream};

/// Kinds of rewrites that leave a program right.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Rewrite {
    /// Issue two neighbours on different streams the other way round.
    OtherIssueOrder,
    /// Run two neighbours of a stream that touch different bytes the other way round.
    Commute,
    /// Order two streams that need not be ordered.
    ExtraEdge,
    /// Run an instruction on another stream, with edges from and to its own.
    OtherStreamWithEdges,
    /// Lay the groups of overlapping buffers out in the opposite order.
    OtherOffsets,
    /// A segment of its own for one call.
    OwnSegment,
    /// More memory than is used.
    LargerArena,
    /// Events numbered the other way round.
    OtherEvents,
    /// Ranks of a stage numbered the other way round.
    OtherNesting,
}

impl Rewrite {
    pub const ALL: [Rewrite; 9] = [
        Rewrite::OtherIssueOrder,
        Rewrite::Commute,
        Rewrite::ExtraEdge,
        Rewrite::OtherStreamWithEdges,
        Rewrite::OtherOffsets,
        Rewrite::OwnSegment,
        Rewrite::LargerArena,
        Rewrite::OtherEvents,
        Rewrite::OtherNesting,
    ];

    /// In words: `other offsets`.
    pub fn name(self) -> String {
        words(&format!("{self:?}"))
    }

    /// The program rewritten at one place, and where; `None` if the program has no place for it.
    pub fn apply(self, graph: &Graph, program: &Program, pick: u64) -> Option<(Program, String)> {
        let mut program = program.clone();
        let at = Cut { graph, program: &mut program, pick }.rewrite(self)?;
        Some((program, at))
    }
}

impl Cut<'_> {
    fn rewrite(&mut self, rewrite: Rewrite) -> Option<String> {
        match rewrite {
            Rewrite::OtherIssueOrder => {
                let event = |i: &Instr| matches!(i, Instr::Record(_) | Instr::Wait(_));
                self.pair(|_, a, b| {
                    let meets = |i: &Instr| matches!(i, Instr::Collective { .. } | Instr::Send { .. } | Instr::Recv { .. });
                    let ordered = event(&a.instr) && event(&b.instr) || meets(&a.instr) && meets(&b.instr);
                    a.stream != b.stream && !ordered && !touch(a, b)
                })
            }
            Rewrite::Commute => self.pair(|stage, a, b| {
                let run = |i: &Issue| matches!(i.instr, Instr::Run { .. } | Instr::Input { .. } | Instr::Slice { .. } | Instr::AddInto { .. });
                run(a) && run(b) && a.stream == b.stream && !overlap(stage, a, b)
            }),
            Rewrite::ExtraEdge => {
                let site = self.site(|_| true)?;
                let own = self.issue(site).stream;
                let other = Stream::ALL[(own as usize + 1) % Stream::ALL.len()];
                let event = self.event(site.0);
                // From the other stream to this one: what is issued is issued, so nothing can wait for itself.
                let body = &mut self.program.stages[site.0].segments[site.1].body;
                body.insert(site.2, Issue { stream: own, instr: Instr::Wait(event) });
                body.insert(site.2, Issue { stream: other, instr: Instr::Record(event) });
                // An edge from a stream of messages could make ranks wait for each other, so only local work is waited for.
                (!other.carries_messages()).then(|| show(site))
            }
            Rewrite::OtherStreamWithEdges => {
                let site = self.site(|i| matches!(i, Instr::Run { .. } | Instr::Zero { .. } | Instr::Slice { .. } | Instr::AddInto { .. }))?;
                let own = self.issue(site).stream;
                let other = if own == Stream::Comm { Stream::Compute } else { Stream::Comm };
                let (before, after) = (self.event(site.0), self.event(site.0));
                self.issue(site).stream = other;
                let body = &mut self.program.stages[site.0].segments[site.1].body;
                let on = |stream, instr| Issue { stream, instr };
                body.splice(site.2 + 1..site.2 + 1, [on(other, Instr::Record(after)), on(own, Instr::Wait(after))]);
                body.splice(site.2..site.2, [on(own, Instr::Record(before)), on(other, Instr::Wait(before))]);
                Some(show(site))
            }
            Rewrite::OtherOffsets => {
                let at = self.draw(self.program.stages.len())?;
                let mesh = self.program.mesh.clone();
                let stage = &mut self.program.stages[at];
                let range = |b: &Buffer| b.offset..b.offset + (b.slots - 1) * b.slot_stride + b.bytes * mesh.size(b.piece_axes);
                let mut groups: Vec<Range<u64>> = stage.buffers.values().map(range).filter(|r| !r.is_empty()).collect();
                groups.sort_by_key(|r| (r.start, r.end));
                groups.dedup_by(|next, last| {
                    let joins = next.start < last.end;
                    if joins {
                        last.end = last.end.max(next.end);
                    }
                    joins
                });
                let mut moved: Vec<(Range<u64>, u64)> = Vec::new();
                let mut pack = |groups: &[Range<u64>], start: u64| {
                    groups.iter().rev().fold(start, |end, group| {
                        moved.push((group.clone(), end));
                        end + (group.end - group.start).next_multiple_of(ALIGN)
                    })
                };
                // Each memory by itself.
                let (device, others) = groups.split_at(groups.partition_point(|g| g.start < stage.range(Space::Device).end));
                let (host, file) = others.split_at(others.partition_point(|g| g.start < stage.range(Space::Host).end));
                let empty = |b: &&Buffer| range(b).is_empty() && b.offset <= stage.arena_bytes;
                let empty = stage.buffers.values().filter(empty).map(|b| b.offset).max().unwrap_or(0);
                let arena_end = pack(device, 0).max(empty);
                let host_end = pack(host, arena_end);
                let file_end = pack(file, host_end);
                for (_, buffer) in stage.buffers.iter_mut() {
                    if let Some((group, to)) = moved.iter().find(|(g, _)| g.contains(&buffer.offset)) {
                        buffer.offset = buffer.offset - group.start + to;
                    }
                }
                (stage.arena_bytes, stage.host_bytes, stage.file_bytes) = (arena_end, host_end - arena_end, file_end - host_end);
                stage.regions = vec![Region { name: "all".into(), offset: 0, bytes: stage.arena_bytes }];
                Some(format!("stage {at}"))
            }
            Rewrite::OwnSegment => {
                let (stage, at) = self.call(0)?;
                let stage_program = &mut self.program.stages[stage];
                let copy = stage_program.segments[stage_program.schedule[at].segment].clone();
                stage_program.schedule[at].segment = stage_program.segments.push(copy);
                Some(format!("stage {stage} call {at}"))
            }
            Rewrite::LargerArena => {
                // Other memories begin where the arena ends, so only a stage without any can grow in place.
                let alone = |stage: &StageProgram| stage.end() == stage.arena_bytes;
                let stages: Vec<usize> = (0..self.program.stages.len()).filter(|&s| alone(&self.program.stages[s])).collect();
                let at = stages[self.draw(stages.len())?];
                let stage = &mut self.program.stages[at];
                stage.regions.push(Region { name: "more".into(), offset: stage.arena_bytes, bytes: ALIGN });
                stage.arena_bytes += ALIGN;
                Some(format!("stage {at}"))
            }
            Rewrite::OtherNesting => {
                let mesh = &mut self.program.mesh;
                let mut nesting: Vec<AxisId> = if mesh.nesting.is_empty() { mesh.ids().collect() } else { mesh.nesting.clone() };
                nesting.reverse();
                mesh.nest(nesting);
                (mesh.axes.iter().filter(|axis| axis.size > 1).count() > 1).then(|| "the mesh".into())
            }
            Rewrite::OtherEvents => {
                let at = self.draw(self.program.stages.len())?;
                let stage = &mut self.program.stages[at];
                let last = stage.events.checked_sub(1)?;
                for issue in stage.segments.iter_mut().flat_map(|(_, s)| &mut s.body) {
                    if let Instr::Record(event) | Instr::Wait(event) = &mut issue.instr {
                        event.0 = last - event.0;
                    }
                }
                Some(format!("stage {at}"))
            }
        }
    }
}

/// Whether two instructions are an event's record and its wait.
fn touch(a: &Issue, b: &Issue) -> bool {
    matches!((&a.instr, &b.instr), (Instr::Record(x), Instr::Wait(y)) | (Instr::Wait(x), Instr::Record(y)) if x == y)
}

/// Whether two instructions have bytes in common in any slot.
fn overlap(stage: &StageProgram, a: &Issue, b: &Issue) -> bool {
    let range = |id: &BufferId| {
        let b = &stage.buffers[*id];
        b.offset..b.offset + (b.slots.max(1) - 1) * b.slot_stride + b.bytes
    };
    let of = |i: &Issue| crate::verify::program::buffers_of(&i.instr).iter().map(range).collect::<Vec<_>>();
    let (of_a, of_b) = (of(a), of(b));
    of_a.iter().any(|x| of_b.iter().any(|y| x.start < y.end && y.start < x.end))
}
