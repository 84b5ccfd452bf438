//! Damage: what a compiler, or a person with an editor, can get wrong.

use super::{Cut, Damage, show};
use crate::dtype::DType;
use crate::entity::{BufferId, DimId, NodeId, ValueId};
use crate::graph::{Graph, Node};
use crate::mesh::{AxisId, AxisSet};
use crate::op::Op;
use crate::program::{ALIGN, Buffer, Channel, Content, Instr, Pattern, Program, Role, SegmentKind, Space, Stream, Updates, Write};
use crate::ring::Ring;
use crate::sharding::Monoid;

impl Damage {
    /// The program with one such damage, and where it is; `None` if the program has no place for it.
    pub fn apply(self, graph: &Graph, program: &Program, pick: u64) -> Option<(Program, String)> {
        let mut program = program.clone();
        let at = Cut { graph, program: &mut program, pick }.damage(self)?;
        Some((program, at))
    }
}

impl Cut<'_> {
    fn damage(&mut self, damage: Damage) -> Option<String> {
        let ranked = self.program.mesh.ids().filter(|&a| self.program.mesh.axis(a).size > 1).collect::<AxisSet>();
        let stages = self.program.stages.len() as u32;
        let accumulates =
            |i: &Instr| matches!(i, Instr::AddInto { .. } | Instr::Join { .. } | Instr::SquareSum { .. } | Instr::Run { write: Write::Add, .. });
        match damage {
            Damage::DropRun => self.drop(|i| matches!(i, Instr::Run { .. } | Instr::Input { .. } | Instr::Slice { .. })),
            Damage::DropCollective => self.drop(|i| matches!(i, Instr::Collective { .. })),
            Damage::DropMessage => self.drop(|i| matches!(i, Instr::Send { .. } | Instr::Recv { .. })),
            Damage::DropZero => self.drop(|i| matches!(i, Instr::Zero { .. })),
            Damage::DropCopy => self.drop(|i| matches!(i, Instr::Copy { .. })),
            Damage::DropAddInto => self.drop(|i| matches!(i, Instr::AddInto { .. })),
            Damage::DropSquareSum => self.drop(|i| matches!(i, Instr::SquareSum { .. } | Instr::ClipScale { .. })),
            Damage::DropCast => self.drop(|i| matches!(i, Instr::Cast { .. } | Instr::SumShares { .. })),
            Damage::DropTrustSums => self.drop(|i| matches!(i, Instr::TrustSums { .. })),
            Damage::WithoutTrust => self.edit(|i| match i {
                Instr::Update { trust, .. } => trust.take().is_some(),
                _ => false,
            }),
            Damage::DropUpdate => self.drop(|i| matches!(i, Instr::Update { .. })),
            Damage::DropRecord => self.drop(|i| matches!(i, Instr::Record(_))),
            Damage::DropWait => self.drop(|i| matches!(i, Instr::Wait(_))),
            Damage::RepeatCollective => self.repeat(|i| matches!(i, Instr::Collective { .. })),
            Damage::RepeatMessage => self.repeat(|i| matches!(i, Instr::Send { .. } | Instr::Recv { .. })),
            Damage::RepeatAccumulation => self.repeat(accumulates),
            Damage::RepeatUpdate => self.repeat(|i| matches!(i, Instr::Update { .. })),
            Damage::SwapNeighbours => self.swap(|_, _| true),
            Damage::SwapCollectives => self.swap(|a, b| matches!((a, b), (Instr::Collective { .. }, Instr::Collective { .. }))),
            Damage::WrongPeer => self.edit(|i| match i {
                Instr::Send { to: peer, .. } | Instr::Recv { from: peer, .. } if stages > 2 => {
                    *peer = (*peer + 1) % stages;
                    true
                }
                _ => false,
            }),
            Damage::WrongChannel => self.edit(|i| match i {
                Instr::Send { channel, .. } | Instr::Recv { channel, .. } => {
                    *channel = if *channel == Channel::Forward { Channel::Backward } else { Channel::Forward };
                    true
                }
                _ => false,
            }),
            Damage::WrongPattern => self.edit(|i| match i {
                Instr::Collective { pattern, .. } => {
                    *pattern = if *pattern == Pattern::AllGather { Pattern::AllReduce } else { Pattern::AllGather };
                    true
                }
                _ => false,
            }),
            Damage::WrongDim => self.edit(|i| match i {
                Instr::Collective { dim, pattern: Pattern::ReduceScatter | Pattern::AllGather, .. } | Instr::Slice { dim, .. } => {
                    *dim = if *dim == 0 { 1 } else { *dim - 1 };
                    true
                }
                _ => false,
            }),
            Damage::WrongMonoid => self.edit(|i| match i {
                Instr::Collective { monoid, pattern: Pattern::AllReduce | Pattern::ReduceScatter, .. } | Instr::Join { monoid, .. } => {
                    *monoid = if *monoid == Monoid::Sum { Monoid::Max } else { Monoid::Sum };
                    true
                }
                _ => false,
            }),
            Damage::FewerAxes => self.edit(|i| match i {
                Instr::Collective { axes, .. } | Instr::Slice { axes, .. } => match axes.iter().next() {
                    Some(first) => {
                        *axes = axes.minus(AxisSet::one(first));
                        true
                    }
                    None => false,
                },
                _ => false,
            }),
            Damage::MoreAxes => self.edit(|i| match i {
                Instr::Collective { axes, .. } | Instr::Slice { axes, .. } => match ranked.minus(*axes).iter().next() {
                    Some(first) => {
                        *axes = axes.union(AxisSet::one(first));
                        true
                    }
                    None => false,
                },
                _ => false,
            }),
            Damage::WithoutStages => self.edit(|i| match i {
                Instr::Collective { stages, axes, .. } if !stages.is_empty() && !axes.is_empty() => {
                    stages.clear();
                    true
                }
                _ => false,
            }),
            Damage::SetForAdd => self.edit(|i| match i {
                Instr::Run { write, .. } if *write == Write::Add => {
                    *write = Write::Set;
                    true
                }
                _ => false,
            }),
            Damage::AddForSet => self.edit(|i| match i {
                Instr::Run { write, .. } if *write == Write::Set => {
                    *write = Write::Add;
                    true
                }
                _ => false,
            }),
            Damage::CountOften => self.edit(|i| match i {
                Instr::SquareSum { once, .. } => match once.and(ranked).iter().next() {
                    Some(axis) => {
                        *once = once.minus(AxisSet::one(axis));
                        true
                    }
                    None => false,
                },
                _ => false,
            }),
            Damage::CountRarely => self.edit(|i| match i {
                Instr::SquareSum { once, .. } => match ranked.minus(*once).iter().next() {
                    Some(axis) => {
                        *once = once.union(AxisSet::one(axis));
                        true
                    }
                    None => false,
                },
                _ => false,
            }),
            Damage::WithoutClip => self.edit(|i| match i {
                Instr::Update { scale, .. } => scale.take().is_some(),
                _ => false,
            }),
            Damage::WrongMoment => self.edit(|i| match i {
                Instr::Update { moments, .. } if moments.len() > 1 => {
                    moments.reverse();
                    true
                }
                _ => false,
            }),
            Damage::WrongOperand => self.redirect(other_content, |i| match i {
                Instr::Run { ins, .. } => ins.first_mut(),
                Instr::Send { src, .. }
                | Instr::Slice { src, .. }
                | Instr::Collective { src, .. }
                | Instr::Copy { src, .. }
                | Instr::AddInto { src, .. }
                | Instr::Cast { src, .. }
                | Instr::Compress { src, .. }
                | Instr::SumShares { src, .. }
                | Instr::SquareSum { src, .. }
                | Instr::ClipScale { src, .. } => Some(src),
                Instr::Join { left, .. } => left.first_mut(),
                Instr::Update { grad, .. } => Some(grad),
                _ => None,
            }),
            Damage::WrongResult => self.redirect(other_content, |i| match i {
                Instr::Run { outs, .. } => outs.first_mut(),
                Instr::Input { dst }
                | Instr::Recv { dst, .. }
                | Instr::Zero { dst }
                | Instr::Slice { dst, .. }
                | Instr::Collective { dst, .. }
                | Instr::Copy { dst, .. }
                | Instr::AddInto { dst, .. }
                | Instr::Cast { dst, .. }
                | Instr::Compress { dst, .. }
                | Instr::SumShares { dst, .. }
                | Instr::SquareSum { dst, .. } => Some(dst),
                Instr::Join { dst, .. } => dst.first_mut(),
                Instr::Update { state, .. } => Some(state),
                _ => None,
            }),
            Damage::WrongNode => self.edit(|i| match i {
                Instr::Run { node, .. } if node.0 > 0 => {
                    node.0 -= 1;
                    true
                }
                _ => false,
            }),
            Damage::OtherStream => {
                let site = self.site(|i| !matches!(i, Instr::Wait(_) | Instr::Record(_)))?;
                let issue = self.issue(site);
                issue.stream = if issue.stream == Stream::Compute { Stream::Comm } else { Stream::Compute };
                Some(show(site))
            }
            Damage::AliasBuffer => self.buffer(|buffer, others| {
                let same = others.iter().filter(|b| b.bytes >= buffer.bytes && b.offset != buffer.offset);
                let target = same.min_by_key(|b| b.offset.abs_diff(buffer.offset)).map(|b| b.offset);
                target.is_some_and(|offset| {
                    buffer.offset = offset;
                    true
                })
            }),
            Damage::MoveBuffer => self.buffer(|buffer, _| {
                buffer.offset += ALIGN;
                true
            }),
            Damage::ShortenBuffer => self.buffer(|buffer, _| {
                buffer.bytes = buffer.bytes.saturating_sub(buffer.dtype.size());
                true
            }),
            Damage::FewerSlots => self.buffer(|buffer, _| {
                buffer.slots -= 1;
                buffer.slots > 0
            }),
            Damage::NarrowSlots => self.buffer(|buffer, _| {
                buffer.slot_stride = buffer.slot_stride.saturating_sub(ALIGN);
                buffer.slots > 1
            }),
            Damage::WholeForPiece => self.buffer(|buffer, _| {
                let was = buffer.piece_axes;
                buffer.piece_axes = AxisSet::EMPTY;
                !was.is_empty()
            }),
            Damage::WrongPartial => self.bucket(|bucket, _| {
                let axis = ranked.iter().next();
                axis.is_some_and(|axis| {
                    bucket.partial = AxisSet(bucket.partial.0 ^ AxisSet::one(axis).0);
                    true
                })
            }),
            Damage::Untie => self.bucket(|bucket, _| !std::mem::take(&mut bucket.tied).is_empty()),
            Damage::ShiftMember => self.bucket(|bucket, pick| {
                let at = pick as usize % bucket.members.len().max(1);
                bucket.members.get_mut(at).is_some_and(|member| {
                    member.offset += 1;
                    true
                })
            }),
            Damage::DropCall => {
                let (stage, at) = self.call(0)?;
                self.program.stages[stage].schedule.remove(at);
                Some(format!("stage {stage} call {at}"))
            }
            Damage::RepeatCall => {
                let (stage, at) = self.call(0)?;
                let call = self.program.stages[stage].schedule[at];
                self.program.stages[stage].schedule.insert(at, call);
                Some(format!("stage {stage} call {at}"))
            }
            Damage::SwapCalls => {
                let (stage, at) = self.call(1)?;
                self.program.stages[stage].schedule.swap(at, at + 1);
                Some(format!("stage {stage} calls {at} and {}", at + 1))
            }
            Damage::WrongMicroBatch => {
                let (stage, at) = self.call(0)?;
                let count = self.program.micro_batches;
                let call = &mut self.program.stages[stage].schedule[at];
                call.micro_batch = (call.micro_batch + 1) % count;
                (count > 1).then(|| format!("stage {stage} call {at}"))
            }
            Damage::SmallerArena => {
                let stage = self.draw(self.program.stages.len())?;
                let stage_program = &mut self.program.stages[stage];
                stage_program.arena_bytes -= ALIGN;
                if let Some(last) = stage_program.regions.iter_mut().rev().find(|r| r.bytes >= ALIGN) {
                    last.bytes -= ALIGN;
                }
                Some(format!("stage {stage}"))
            }
            Damage::CopyBackwards => self.edit(|i| match i {
                Instr::Copy { src, dst } => {
                    std::mem::swap(src, dst);
                    true
                }
                _ => false,
            }),
            Damage::WrongEvent => self.edit(|i| match i {
                Instr::Wait(event) if event.0 > 0 => {
                    event.0 -= 1;
                    true
                }
                _ => false,
            }),
            Damage::EarlyRecord => self.swap(|a, b| !matches!(a, Instr::Record(_) | Instr::Wait(_)) && matches!(b, Instr::Record(_))),
            Damage::LateWait => self.swap(|a, b| matches!(a, Instr::Wait(_)) && !matches!(b, Instr::Record(_) | Instr::Wait(_))),
            Damage::StaleParam => self.edit(|i| match i {
                Instr::Update { param, .. } => param.take().is_some(),
                _ => false,
            }),
            Damage::EarlyCopy => self.carry(|i| matches!(i, Instr::Copy { .. }), |_, _| 0),
            Damage::OtherFrame => {
                let is_other = |this: &Buffer, b: &Buffer| [this, b].iter().all(|b| b.content == Content::Frame) && b.offset != this.offset;
                self.redirect(is_other, |i| match i {
                    Instr::Copy { src, .. } => Some(src),
                    _ => None,
                })
            }
            Damage::DropJoin => self.drop(|i| matches!(i, Instr::Join { .. })),
            Damage::OtherTurn => self.redirect(other_turn, |i| match i {
                // Keys come behind queries.
                Instr::Run { ins, .. } => ins.get_mut(1),
                Instr::Join { right, .. } => right.first_mut(),
                Instr::Collective { pattern: Pattern::Shift, src, .. } => Some(src),
                _ => None,
            }),
            Damage::WrongTurn => self.ring(|ring| ring.turn = (ring.turn + 1) % ring.ranks),
            Damage::WrongPairs => self.ring(|ring| ring.over = (ring.over & (ring.over - 1) | ring.over << 1) & Ring::all(ring.ranks)),
            Damage::EarlyUpdate => self.carry(|i| matches!(i, Instr::Update { .. }), |_, _| 0),
            Damage::OtherPlace => self.carry(|_| true, |len, pick| pick as usize % len),
            Damage::WrongRole => self.buffer(|buffer, _| match &mut buffer.content {
                Content::Flat { role, .. } | Content::Member { role, .. } => {
                    *role = match role {
                        Role::Param => Role::Master,
                        Role::Master => Role::Param,
                        Role::Grad | Role::Moment2 | Role::Residual => Role::Moment1,
                        Role::Moment1 => Role::Moment2,
                    };
                    true
                }
                Content::Value { .. } | Content::Scalar(_) | Content::Trust { .. } | Content::Wire { .. } | Content::Frame | Content::Scratch => {
                    false
                }
            }),
            Damage::WrongSharding => self.buffer(|buffer, _| match &mut buffer.content {
                Content::Value { sharding, .. } => {
                    let at = sharding.dims.iter().position(|axes| !axes.is_empty());
                    let others = sharding.dims.len();
                    at.filter(|_| others > 1).is_some_and(|at| {
                        sharding.dims.swap(at, (at + 1) % others);
                        sharding.dims[at] != sharding.dims[(at + 1) % others]
                    })
                }
                Content::Flat { .. }
                | Content::Member { .. }
                | Content::Scalar(_)
                | Content::Trust { .. }
                | Content::Wire { .. }
                | Content::Frame
                | Content::Scratch => false,
            }),
            Damage::WrongPieces => self.buffer(|buffer, _| match &mut buffer.content {
                Content::Flat { pieces, .. } | Content::Wire { from: pieces, .. } => match pieces.and(ranked).iter().next() {
                    Some(axis) => {
                        *pieces = pieces.minus(AxisSet::one(axis));
                        true
                    }
                    None => false,
                },
                Content::Value { .. } | Content::Member { .. } | Content::Scalar(_) | Content::Trust { .. } | Content::Frame | Content::Scratch => {
                    false
                }
            }),
            Damage::ShorterType => self.buffer(|buffer, _| {
                let was = buffer.dtype;
                buffer.dtype = match was {
                    DType::F64 => DType::F32,
                    DType::F32 => DType::Bf16,
                    DType::Bf16 | DType::F16 | DType::I32 => was,
                };
                buffer.bytes = buffer.bytes / was.size() * buffer.dtype.size();
                buffer.dtype != was
            }),
            Damage::WithoutScratch => self.edit(|i| match i {
                Instr::Run { scratch, .. } => scratch.take().is_some(),
                _ => false,
            }),
            Damage::WrongSegment => {
                let (stage, at) = self.call(0)?;
                let count = self.program.stages[stage].segments.len() as u32;
                let call = &mut self.program.stages[stage].schedule[at];
                call.segment.0 = (call.segment.0 + 1) % count;
                Some(format!("stage {stage} call {at}"))
            }
            Damage::WrongNesting => {
                let mesh = &mut self.program.mesh;
                let mut nesting: Vec<AxisId> = if mesh.nesting.is_empty() { mesh.ids().collect() } else { mesh.nesting.clone() };
                let (first, last) = (nesting.first().copied()?, nesting.last_mut()?);
                let is_other = *last != first;
                *last = first;
                mesh.nesting = nesting;
                is_other.then(|| "the mesh".into())
            }
            Damage::MoreMicroBatches => {
                self.program.micro_batches += 1;
                Some("the program".into())
            }
            Damage::OtherPadding => {
                let dims: Vec<DimId> = self.program.padded.0.ids().collect();
                let dim = *dims.get(self.draw(dims.len())?)?;
                self.program.padded.0[dim] *= 2;
                Some(format!("{dim}"))
            }
            Damage::LessHost => {
                let stages: Vec<usize> = (0..self.program.stages.len()).filter(|&s| self.program.stages[s].host_bytes > 0).collect();
                let stage = stages[self.draw(stages.len())?];
                self.program.stages[stage].host_bytes -= ALIGN;
                Some(format!("stage {stage}"))
            }
            Damage::OtherAxis => {
                let mesh = self.program.mesh.clone();
                self.edit(|i| match i {
                    Instr::Collective { axes, .. } | Instr::Slice { axes, .. } => {
                        let alike = |a| ranked.minus(*axes).iter().find(|&b| mesh.axis(b).size == mesh.axis(a).size);
                        match axes.iter().find_map(|a| Some((a, alike(a)?))) {
                            Some((one, other)) => {
                                *axes = axes.minus(AxisSet::one(one)).union(AxisSet::one(other));
                                true
                            }
                            None => false,
                        }
                    }
                    _ => false,
                })
            }
            Damage::WrongKey => {
                let graph = self.graph;
                let drops = |id: NodeId| matches!(graph.nodes[id].op, Op::Dropout { .. });
                let site = self.site(|i| matches!(i, Instr::Run { node, .. } if drops(*node)))?;
                let Instr::Run { node, ins, outs, scratch, write } = self.issue(site).instr.clone() else { return None };
                let dropouts: Vec<NodeId> = graph.nodes.ids().filter(|&id| id != node && drops(id)).collect();
                let other = *dropouts.get(self.draw(dropouts.len())?)?;
                let of: &Node = &graph.nodes[other];
                // The same bytes under other names: by itself the instruction is sound.
                let buffers = &mut self.program.stages[site.0].buffers;
                let mut renamed = |old: BufferId, to: ValueId| {
                    let mut buffer = buffers[old].clone();
                    if let Content::Value { value, .. } = &mut buffer.content {
                        *value = to;
                    }
                    buffers.push(buffer)
                };
                let (ins, outs) = (vec![renamed(ins[0], of.inputs[0])], vec![renamed(outs[0], of.outputs[0])]);
                self.issue(site).instr = Instr::Run { node: other, ins, outs, scratch, write };
                Some(format!("{}: {other} for {node}", show(site)))
            }
            Damage::OtherVersion => self.redirect(other_version, |i| match i {
                // Parameters come behind what they are applied to.
                Instr::Run { ins, .. } => ins.get_mut(1),
                _ => None,
            }),
            Damage::FewerVersions => self.fewer_versions(),
            Damage::LateStash => self.later_call(SegmentKind::Stash, &[SegmentKind::Update]),
            Damage::LateUpdate => self.later_call(SegmentKind::Update, &[SegmentKind::Forward, SegmentKind::Backward, SegmentKind::BackwardLast]),
            Damage::OtherUpdates => {
                self.program.updates = match self.program.updates {
                    Updates::Step => Updates::MicroBatch,
                    Updates::MicroBatch => Updates::Step,
                };
                Some("the program".into())
            }
            Damage::DropCompress => self.drop(|i| matches!(i, Instr::Compress { .. })),
            Damage::RepeatCompress => self.repeat(|i| matches!(i, Instr::Compress { .. })),
            Damage::OtherResidual => self.redirect(other_content, |i| match i {
                Instr::Compress { residual, .. } => Some(residual),
                _ => None,
            }),
            Damage::StaleResidual => self.stale_residual(),
            Damage::LoseResidual => self.lose_residual(),
            Damage::ReadResidual => self.read_residual(),
            Damage::FewerPairs => self.buffer(|buffer, _| match &mut buffer.content {
                Content::Wire { kept: Some(kept), .. } if *kept > 1 => {
                    buffer.bytes = buffer.bytes / *kept * (*kept - 1);
                    *kept -= 1;
                    true
                }
                Content::Wire { .. }
                | Content::Value { .. }
                | Content::Flat { .. }
                | Content::Member { .. }
                | Content::Scalar(_)
                | Content::Trust { .. }
                | Content::Frame
                | Content::Scratch => false,
            }),
            Damage::HalfGather => self.half_gather(),
            Damage::GatherPending => self.gather_pending(),
            Damage::FewerStages => self.fewer_stages(),
            Damage::OtherOrderAcross => self.other_order_across(),
            Damage::ForgetNorm => self.forget_norm(),
            Damage::LoseScalar => self.lose_scalar(),
            Damage::ShiftedSource => self.shifted_source(),
            Damage::HugeNumber => self.huge_number(),
            Damage::MoreSlots => self.more_slots(),
            Damage::LessFile => {
                let stages: Vec<usize> = (0..self.program.stages.len()).filter(|&s| self.program.stages[s].file_bytes > 0).collect();
                let stage = stages[self.draw(stages.len())?];
                let bytes = &mut self.program.stages[stage].file_bytes;
                *bytes = bytes.saturating_sub(Space::File.align(1));
                Some(format!("stage {stage}"))
            }
        }
    }
}

/// Whether two buffers claim the same value, of another block or of other pairs of blocks.
fn other_turn(this: &Buffer, b: &Buffer) -> bool {
    match (&this.content, &b.content) {
        (Content::Value { value, sharding }, Content::Value { value: v, sharding: s }) => value == v && sharding.ring != s.ring,
        _ => false,
    }
}

/// Whether two buffers are places of one block of parameters.
fn other_version(this: &Buffer, b: &Buffer) -> bool {
    matches!(this.content, Content::Member { role: Role::Param, .. }) && b.content == this.content && b.offset != this.offset
}

/// Whether two buffers claim different things that can be read.
fn other_content(this: &Buffer, b: &Buffer) -> bool {
    b.content != this.content && b.content != Content::Scratch
}
