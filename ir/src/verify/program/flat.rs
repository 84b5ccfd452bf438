//! What accumulates: gradients in flat buckets, the loss, the norm; and the update that they lead to.
//!
//! Reductions are linear, so they may come before or after the last contribution; a contribution added to a sum that was already reduced is caught because the
//! two wait for different ranks. At the norm and at the update a gradient must be complete: every contribution of this stage, of every micro-batch, reduced
//! over everything.

use super::Class;
use super::content::Fact;
use super::dataflow::{Share, Walk};
use super::memory::NO_GRID;
use super::sums::{Clash, Pending, Spans, Sum, Term};
use crate::entity::{BucketId, BufferId, ValueId};
use crate::mesh::AxisSet;
use crate::program::{Content, Pattern, Role, Scalar, Write};

/// Contents of a buffer, each up to a byte counted from its beginning.
pub(super) type Profile = Vec<(u64, Fact)>;

impl Walk<'_> {
    /// Adds (or writes) a contribution to the gradient of a member.
    pub fn accumulate(&mut self, buffer: BufferId, bucket: BucketId, value: ValueId, write: Write) {
        let new = Sum::one(Term::Value(value), self.micro_batch, self.pending(bucket));
        let flat = self.flat(buffer);
        self.note_write(buffer);
        let mut fault = None;
        let mut memo: Option<(Fact, Fact)> = None;
        for at in self.range(buffer) {
            for own in [true, false] {
                let old = if own { self.cells[at].own } else { self.cells[at].rest };
                let result = match memo {
                    Some((from, to)) if from == old => to,
                    _ => {
                        let sum = match (write, old) {
                            (Write::Set, _) | (Write::Add, Fact::Zero) => Ok(new.clone()),
                            (Write::Add, Fact::Grad { bucket: b, sum, flat: f }) if (b, f) == (bucket, flat) => {
                                self.sums.get(sum).plus(&new).map_err(|clash| (Class::Gradient, self.clash(&clash)))
                            }
                            (Write::Add, other) => Err((Class::Content, format!("adds to a gradient, but its bytes hold {}", self.show(other)))),
                        };
                        let sum = sum.unwrap_or_else(|why| {
                            fault.get_or_insert(why);
                            new.clone()
                        });
                        Fact::Grad { bucket, sum: self.sums.id(sum), flat }
                    }
                };
                memo = Some((old, result));
                let cell = &mut self.cells[at];
                if own { cell.own = result } else { cell.rest = result }
            }
        }
        if let Some((class, message)) = fault {
            self.fault(class, Some(buffer), message);
        }
    }

    /// Adds (or writes) a micro-batch's loss.
    pub fn accumulate_scalar(&mut self, buffer: BufferId, scalar: Scalar, value: ValueId, axes: AxisSet, write: Write) {
        let new = Sum::one(Term::Value(value), self.micro_batch, Pending { axes, stages: false });
        self.add_scalar(buffer, scalar, new, write, Class::Loss);
    }

    fn add_scalar(&mut self, buffer: BufferId, scalar: Scalar, new: Sum, write: Write, class: Class) {
        let old = self.scalar(buffer);
        self.note_write(buffer);
        let sum = match (write, old) {
            (Write::Set, _) | (Write::Add, Fact::Zero) => Ok(new.clone()),
            (Write::Add, Fact::Scalar { scalar: s, sum, .. }) if s == scalar => {
                self.sums.get(sum).plus(&new).map_err(|clash| (class, self.clash(&clash)))
            }
            (Write::Add, other) => Err((Class::Content, format!("adds to {}, but its bytes hold {}", scalar.name(), self.show(other)))),
        };
        let sum = sum.unwrap_or_else(|(class, message)| {
            self.fault(class, Some(buffer), message);
            new
        });
        self.put_scalar(buffer, scalar, sum);
    }

    /// The content of the bytes of a scalar, or of a row of them, if it is one that lies there.
    fn scalar(&self, buffer: BufferId) -> Fact {
        let Some(first) = self.cells[self.range(buffer)].first().map(|cell| cell.own) else { return Fact::Garbage };
        let (begins, is_of) = (self.flat(buffer).base, self.types.stage.buffers[buffer].dtype);
        let lies_here = match first {
            Fact::Scalar { base, dtype, .. } => (base, dtype) == (begins, is_of),
            Fact::Trust { base, .. } => base == begins,
            Fact::Garbage | Fact::Zero | Fact::Value { .. } | Fact::State { .. } | Fact::Grad { .. } | Fact::Wire { .. } | Fact::Frame { .. } => true,
        };
        if lies_here && self.mismatch(buffer, |fact| fact == first).is_none() { first } else { Fact::Garbage }
    }

    fn put_scalar(&mut self, buffer: BufferId, scalar: Scalar, sum: Sum) {
        let (sum, base, dtype) = (self.sums.id(sum), self.flat(buffer).base, self.types.stage.buffers[buffer].dtype);
        self.put_unordered(buffer, Fact::Scalar { scalar, sum, base, dtype });
    }

    pub fn reduce_scalar(&mut self, scalar: Scalar, axes: AxisSet, across: bool, src: BufferId, dst: BufferId) {
        let old = self.scalar(src);
        if self.range(src) != self.range(dst) {
            self.note_read(src);
        }
        self.note_write(dst);
        let class = if scalar == Scalar::Loss { Class::Loss } else { Class::Norm };
        let sum = match old {
            Fact::Scalar { scalar: s, sum, .. } if s == scalar => self.sums.get(sum).clone(),
            // A stage may have nothing of its own to count.
            Fact::Zero if scalar == Scalar::NormSquared => Sum { pending: self.everyone(), ..Sum::default() },
            other => {
                let message = format!("reduces {}, but its bytes hold {}", scalar.name(), self.show(other));
                self.fault(Class::Content, Some(src), message);
                return self.put_unordered(dst, Fact::Garbage);
            }
        };
        let sum = self.reduced(sum, axes, across).unwrap_or_else(|(sum, message)| {
            self.fault(class, Some(src), message);
            sum
        });
        self.put_scalar(dst, scalar, sum);
    }

    pub fn square_sum(&mut self, src: BufferId, dst: BufferId) {
        let Content::Flat { bucket, .. } = self.types.stage.buffers[src].content else { return };
        self.note_read(src);
        self.expect_complete(src);
        let new = Sum::one(Term::Bucket(bucket), 0, self.everyone());
        self.add_scalar(dst, Scalar::NormSquared, new, Write::Add, Class::Norm);
    }

    pub fn clip(&mut self, src: BufferId, dst: BufferId) {
        self.note_read(src);
        let norm = match self.scalar(src) {
            Fact::Scalar { scalar: Scalar::NormSquared, sum, .. } if self.sums.get(sum).pending.is_done() => self.sums.get(sum).clone(),
            other => {
                let message = format!("expected the squared norm over all ranks, its bytes hold {}", self.show(other));
                self.fault(Class::Norm, Some(src), message);
                Sum::default()
            }
        };
        self.note_write(dst);
        self.put_scalar(dst, Scalar::ClipScale, norm);
    }

    /// What an optimizer step reads: a complete gradient, its factor, states from before the update.
    pub fn updated(&mut self, state: BufferId, grad: BufferId, moments: &[BufferId], scale: Option<BufferId>) {
        self.end.updates[usize::from(scale.is_none())] += 1;
        self.note_read(grad);
        self.expect_complete(grad);
        if let Some(scale) = scale {
            self.note_read(scale);
            match self.scalar(scale) {
                Fact::Scalar { scalar: Scalar::ClipScale, sum, .. } => self.end.norms.insert(self.sums.get(sum).norm()),
                found => {
                    let message = format!("expected the clip factor, its bytes hold {}", self.show(found));
                    self.fault(Class::Norm, Some(scale), message);
                    false
                }
            };
        }
        self.note_rounded(grad);
        for &buffer in [state].iter().chain(moments) {
            let Content::Flat { bucket, role, .. } = self.types.stage.buffers[buffer].content else { continue };
            let old = self.state(buffer, bucket, role, self.updates_before());
            if let Some(found) = self.mismatch(buffer, |fact| fact == old) {
                self.wrong(buffer, old, found);
            }
        }
    }

    pub fn trust_sums(&mut self, state: BufferId, grad: BufferId, moments: &[BufferId], scale: Option<BufferId>, dst: BufferId) {
        self.updated(state, grad, moments, scale);
        [state].iter().chain(moments).for_each(|&buffer| self.note_read(buffer));
        let Content::Flat { bucket, pieces, .. } = self.types.stage.buffers[state].content else { return };
        let split = self.types.stage.buckets[bucket].members.first().map_or(AxisSet::EMPTY, |m| m.sharding.used());
        let pending = split.union(pieces).and(self.everyone().axes);
        let base = self.flat(dst).base;
        self.put(dst, Fact::Trust { bucket, version: self.updates_before(), pending, base });
    }

    /// Sums over exactly the axes that cut the parameters up: ranks that hold the same elements have the same sums.
    pub fn reduce_trust(&mut self, bucket: BucketId, axes: AxisSet, src: BufferId, dst: BufferId) {
        let found = self.scalar(src);
        if self.range(src) != self.range(dst) {
            self.note_read(src);
        }
        self.note_write(dst);
        let real = axes.and(self.everyone().axes);
        let result = match found {
            Fact::Trust { bucket: of, version, pending, .. } if of == bucket && pending.includes(real) => {
                Fact::Trust { bucket, version, pending: pending.minus(real), base: self.flat(dst).base }
            }
            other => {
                let message = format!("trust sums of {bucket} are reduced over {}, its bytes hold {}", self.types.axes(axes), self.show(other));
                self.fault(Class::Norm, Some(src), message);
                Fact::Garbage
            }
        };
        self.put_unordered(dst, result);
    }

    /// The sums of trust ratios that an update takes are those of its bucket, over all of its parameters.
    pub fn trusted(&mut self, sums: BufferId) {
        let Content::Trust { bucket } = self.types.stage.buffers[sums].content else { return };
        self.note_read(sums);
        let found = self.scalar(sums);
        if found != (Fact::Trust { bucket, version: self.updates_before(), pending: AxisSet::EMPTY, base: self.flat(sums).base }) {
            let message = format!("expected trust sums of {bucket}, fully reduced, its bytes hold {}", self.show(found));
            self.fault(Class::Norm, Some(sums), message);
        }
    }

    /// What an optimizer step writes.
    pub fn update(&mut self, state: BufferId, moments: &[BufferId], param: Option<BufferId>) {
        for &buffer in [state].iter().chain(moments) {
            let Content::Flat { bucket, role, .. } = self.types.stage.buffers[buffer].content else { continue };
            let new = self.state(buffer, bucket, role, self.updates_before().next());
            self.put(buffer, new);
        }
        if let Some(buffer) = param
            && let Content::Flat { bucket, role, .. } = self.types.stage.buffers[buffer].content
        {
            let new = self.state(buffer, bucket, role, self.updates_before().next());
            self.put(buffer, new);
        }
    }

    /// A collective on flat buffers: gradients are reduced, parameters gathered.
    pub fn collective_flat(&mut self, pattern: Pattern, axes: AxisSet, across: bool, src: BufferId, dst: BufferId) {
        let in_place = self.range(src) == self.range(dst);
        let (from, to) = (self.grid(src), self.grid(dst));
        if !in_place {
            self.note_read(src);
        }
        if !in_place || pattern == Pattern::AllReduce && from == to {
            let moved = match pattern {
                Pattern::AllReduce => Ok(self.profile(src)),
                Pattern::ReduceScatter | Pattern::AllGather | Pattern::AllToAll | Pattern::Shift => {
                    self.collapse(src).map(|fact| vec![(u64::MAX, fact)])
                }
            };
            let moved = moved.and_then(|profile| match pattern {
                Pattern::AllGather | Pattern::AllToAll | Pattern::Shift => {
                    profile.iter().try_for_each(|&(_, fact)| self.is_summed(fact, axes))?;
                    Ok(profile)
                }
                Pattern::AllReduce | Pattern::ReduceScatter => {
                    profile.into_iter().map(|(end, fact)| Ok((end, self.reduced_fact(src, fact, axes, across)?))).collect()
                }
            });
            self.note_write(dst);
            match moved {
                Ok(profile) => self.paste(dst, &profile),
                Err((class, message)) => {
                    self.fault(class, Some(src), message);
                    self.put_unordered(dst, Fact::Garbage);
                }
            }
            return;
        }
        self.note_write(dst);
        let mut fault = None;
        for at in self.range(dst) {
            let (own, rest) = self.cells[at].seen(from);
            let result = match pattern {
                _ if own != rest => Err((Class::Content, "its pieces differ, or are cut otherwise".into())),
                Pattern::AllGather | Pattern::AllToAll | Pattern::Shift => {
                    self.part_of(src, own).and_then(|()| self.is_summed(own, axes)).map(|()| own)
                }
                Pattern::AllReduce | Pattern::ReduceScatter => self.reduced_fact(src, own, axes, across),
            };
            let fact = result.unwrap_or_else(|why| {
                fault.get_or_insert(why);
                Fact::Garbage
            });
            let cell = &mut self.cells[at];
            match pattern {
                // Of what was gathered, the rest of a larger piece that this rank has is still unknown.
                Pattern::AllGather | Pattern::AllToAll | Pattern::Shift => {
                    (cell.own, cell.rest, cell.grid) = (fact, if to == NO_GRID { fact } else { Fact::Garbage }, to);
                }
                Pattern::AllReduce | Pattern::ReduceScatter => (cell.own, cell.rest, cell.grid) = (fact, Fact::Garbage, to),
            }
        }
        if let Some((class, message)) = fault {
            self.fault(class, Some(src), message);
        }
    }

    /// dst ← src, both all of a role or the same piece of it.
    pub fn copy_flat(&mut self, src: BufferId, dst: BufferId) {
        self.note_read(src);
        let moved = self.moved(src, dst);
        self.note_write(dst);
        match moved {
            Ok(profile) => self.paste(dst, &profile),
            Err((class, message)) => {
                self.fault(class, Some(src), message);
                self.put_unordered(dst, Fact::Garbage);
            }
        }
    }

    /// What `dst` would hold of `src`, where one of them may lie in place and the other by itself.
    fn moved(&mut self, src: BufferId, dst: BufferId) -> Result<Profile, (Class, String)> {
        let same_cut = (self.grid(src) == NO_GRID) == (self.grid(dst) == NO_GRID);
        if same_cut {
            let profile = self.profile(src);
            profile.iter().filter(|(_, fact)| *fact != Fact::Garbage).try_for_each(|&(_, fact)| self.part_of(src, fact))?;
            Ok(profile)
        } else {
            self.collapse(src).map(|fact| vec![(u64::MAX, fact)])
        }
    }

    /// dst ← dst + src, of equal pieces of one gradient.
    pub fn add_flat(&mut self, src: BufferId, dst: BufferId) {
        let (Content::Flat { bucket, .. } | Content::Member { bucket, .. }) = self.types.stage.buffers[dst].content else { return };
        self.note_read(src);
        let moved = self.moved(src, dst);
        self.note_write(dst);
        let flat = self.flat(dst);
        let grid = self.grid(dst);
        let mut fault = None;
        let profile = moved.unwrap_or_else(|why| {
            fault = Some((src, why));
            vec![(u64::MAX, Fact::Garbage)]
        });
        let range = self.range(dst);
        let start = self.layout.starts[range.start];
        for at in range {
            let (from, to) = (self.layout.starts[at] - start, self.layout.starts[at + 1] - start);
            let added = only(&profile, from, to);
            let (own, rest) = self.cells[at].seen(grid);
            let sum = |fact: Fact| match fact {
                Fact::Zero => Some(Sum::default()),
                Fact::Grad { bucket: b, sum, .. } if b == bucket => Some(self.sums.get(sum).clone()),
                Fact::Grad { .. }
                | Fact::Garbage
                | Fact::Value { .. }
                | Fact::State { .. }
                | Fact::Scalar { .. }
                | Fact::Trust { .. }
                | Fact::Wire { .. }
                | Fact::Frame { .. } => None,
            };
            let result = match (own, added) {
                _ if own != rest => Err((dst, (Class::Content, "its pieces differ: it is not one gradient".to_string()))),
                (a, b) if sum(b).is_none() => Err((src, (Class::Content, format!("added to {}, but it holds {}", self.show(a), self.show(b))))),
                (a, Fact::Zero) => Ok(a),
                (Fact::Zero, Fact::Grad { sum, .. }) => Ok(Fact::Grad { bucket, sum, flat }),
                (a @ Fact::Grad { flat: f, .. }, b) if f == flat => {
                    let (a, b) = (sum(a).unwrap_or_default(), sum(b).unwrap_or_default());
                    match a.plus(&b) {
                        Ok(total) => Ok(Fact::Grad { bucket, sum: self.sums.id(total), flat }),
                        Err(clash) => Err((dst, (Class::Gradient, self.clash(&clash)))),
                    }
                }
                (a, _) => Err((dst, (Class::Content, format!("adds to a gradient, but its bytes hold {}", self.show(a))))),
            };
            let result = result.unwrap_or_else(|why| {
                fault.get_or_insert(why);
                Fact::Garbage
            });
            self.cells[at].set(grid, result);
        }
        if let Some((buffer, (class, message))) = fault {
            self.fault(class, Some(buffer), message);
        }
    }

    /// Records what this stage brings to an operation across stages.
    pub fn note_across(&mut self, axes: AxisSet, stages: &[u32], src: BufferId) {
        let share = match self.types.stage.buffers[src].content {
            Content::Scalar(scalar) => match self.scalar(src) {
                Fact::Scalar { scalar: held, sum, .. } if held == scalar => {
                    let sum = self.sums.get(sum);
                    Ok(Share { axes: sum.pending.axes, rounded: sum.rounded, norm: (scalar == Scalar::NormSquared).then(|| sum.norm().0) })
                }
                _ => Ok(Share { axes: self.everyone().axes, rounded: false, norm: (scalar == Scalar::NormSquared).then(Vec::new) }),
            },
            Content::Flat { .. } | Content::Member { .. } => self.own_part(src),
            Content::Value { .. } | Content::Trust { .. } | Content::Wire { .. } | Content::Frame | Content::Scratch => Ok(Share::default()),
        };
        match share {
            Ok(share) => self.end.across.entry((axes, stages.to_vec())).or_default().push(share),
            Err((class, message)) => self.fault(class, Some(src), format!("before it is reduced over stages: {message}")),
        }
    }

    /// Records whether what updates parameters with homes on several stages was rounded.
    fn note_rounded(&mut self, grad: BufferId) {
        let Content::Flat { bucket, .. } = self.types.stage.buffers[grad].content else { return };
        let bucket = &self.types.stage.buckets[bucket];
        if bucket.tied.is_empty() {
            return;
        }
        let is_rounded = |fact: Fact| matches!(fact, Fact::Grad { sum, .. } if self.sums.get(sum).rounded);
        let rounded = self.mismatch(grad, |fact| !is_rounded(fact)).is_some();
        for member in &bucket.members {
            *self.end.rounded.entry(member.param).or_default() |= rounded;
        }
    }

    /// Records the state of loss and norm when the step is over: of those that are reported, which must be there, and of all others that there are.
    pub fn scalars_at_end(&mut self) {
        let reported = [Scalar::Loss, Scalar::NormSquared].map(|scalar| self.types.stage.accumulates(scalar));
        for (id, buffer) in self.types.stage.buffers.iter() {
            let Content::Scalar(scalar) = buffer.content else { continue };
            let fact = self.scalar(id);
            let sum = match fact {
                Fact::Scalar { scalar: held, sum, .. } if held == scalar => self.sums.get(sum).clone(),
                _ if !reported.contains(&Some(id)) => continue,
                _ => Sum { pending: self.everyone(), ..Sum::default() },
            };
            match scalar {
                Scalar::Loss => {
                    let whole = |v: ValueId| sum.micro_batches(v) == Spans::all_below(self.micro_batches) && sum.pending.is_done();
                    let whole = self.types.graph.loss.is_some_and(whole);
                    if !whole {
                        let shown = self.show(fact);
                        self.fault(Class::Loss, Some(id), format!("at the end of the step holds {shown}"));
                    }
                    self.end.loss = Some(whole);
                }
                Scalar::NormSquared => {
                    self.end.norms.insert(sum.norm());
                }
                Scalar::ClipScale => {}
            }
        }
    }

    /// The ranks a member's gradient has to be summed over, besides this one.
    pub fn pending(&self, bucket: BucketId) -> Pending {
        let bucket = &self.types.stage.buckets[bucket];
        Pending { axes: bucket.partial, stages: !bucket.tied.is_empty() }
    }

    /// All ranks.
    fn everyone(&self) -> Pending {
        let mesh = &self.types.program.mesh;
        Pending { axes: mesh.ids().filter(|&a| mesh.axis(a).size > 1).collect(), stages: self.types.program.stages.len() > 1 }
    }

    /// A sum after a reduction; or, with why it is wrong, what it was meant to be.
    pub fn reduced(&self, mut sum: Sum, axes: AxisSet, across: bool) -> Result<Sum, (Sum, String)> {
        // Along an axis of one rank there is nothing to sum.
        let real: AxisSet = axes.iter().filter(|&a| self.types.program.mesh.axis(a).size > 1).collect();
        let right = sum.pending.axes.includes(real) && (!across || sum.pending.stages);
        let was = sum.pending;
        sum.pending = Pending { axes: was.axes.minus(axes), stages: was.stages && !across };
        if right {
            return Ok(sum);
        }
        let over = self.show_pending(Pending { axes, stages: across }).replace("still partial ", "");
        Err((sum, format!("is reduced {over}, but it is {}", self.show_pending(was))))
    }

    /// Gradients that wait for a sum over axes are not gathered over them: what all ranks then have is no sum.
    fn is_summed(&self, fact: Fact, axes: AxisSet) -> Result<(), (Class, String)> {
        let Fact::Grad { sum, .. } = fact else { return Ok(()) };
        let pending = self.sums.get(sum).pending;
        if pending.axes.intersects(axes) {
            return Err((Class::Gradient, format!("is gathered over {}, but it is {}", self.types.axes(axes), self.show_pending(pending))));
        }
        Ok(())
    }

    fn reduced_fact(&mut self, src: BufferId, fact: Fact, axes: AxisSet, across: bool) -> Result<Fact, (Class, String)> {
        let (Content::Flat { bucket, .. } | Content::Member { bucket, .. }) = self.types.stage.buffers[src].content else { return Ok(fact) };
        self.part_of(src, fact)?;
        let sum = match fact {
            Fact::Grad { sum, .. } => self.sums.get(sum).clone(),
            Fact::Zero => Sum { pending: self.pending(bucket), ..Sum::default() },
            other => return Err((Class::Content, format!("expected gradients of {bucket}, its bytes hold {}", self.show(other)))),
        };
        let sum = self.reduced(sum, axes, across).map_err(|(_, message)| (Class::Gradient, message))?;
        Ok(Fact::Grad { bucket, sum: self.sums.id(sum), flat: self.flat(src) })
    }

    /// Whether a content is a part of the flat buffer it was read from.
    pub fn part_of(&self, buffer: BufferId, fact: Fact) -> Result<(), (Class, String)> {
        let (Content::Flat { bucket, role, .. } | Content::Member { bucket, role, .. }) = self.types.stage.buffers[buffer].content else {
            return Ok(());
        };
        let right = match fact {
            Fact::Zero => role == Role::Grad,
            Fact::Grad { bucket: b, flat, .. } => role == Role::Grad && (b, flat) == (bucket, self.flat(buffer)),
            Fact::State { bucket: b, role: r, flat, .. } => (b, r, flat) == (bucket, role, self.flat(buffer)),
            Fact::Garbage | Fact::Value { .. } | Fact::Scalar { .. } | Fact::Trust { .. } | Fact::Wire { .. } | Fact::Frame { .. } => false,
        };
        if right { Ok(()) } else { Err((Class::Content, format!("expected {} of {bucket}, its bytes hold {}", role.name(), self.show(fact)))) }
    }

    /// A buffer's contents in order.
    pub fn profile(&self, buffer: BufferId) -> Profile {
        let (range, grid) = (self.range(buffer), self.grid(buffer));
        let start = self.layout.starts[range.start];
        let seen = |at: usize| {
            let (own, rest) = self.cells[at].seen(grid);
            (self.layout.starts[at + 1] - start, if own == rest { own } else { Fact::Garbage })
        };
        range.map(seen).collect()
    }

    /// Writes contents into a flat buffer, as parts of it.
    fn paste(&mut self, buffer: BufferId, profile: &Profile) {
        let (range, grid, flat) = (self.range(buffer), self.grid(buffer), self.flat(buffer));
        let start = self.layout.starts.get(range.start).copied().unwrap_or(0);
        for at in range {
            let fact = match only(profile, self.layout.starts[at] - start, self.layout.starts[at + 1] - start) {
                Fact::State { bucket, role, version, .. } => Fact::State { bucket, role, version, flat },
                Fact::Grad { bucket, sum, .. } => Fact::Grad { bucket, sum, flat },
                Fact::Zero => Fact::Zero,
                Fact::Garbage | Fact::Value { .. } | Fact::Scalar { .. } | Fact::Trust { .. } | Fact::Wire { .. } | Fact::Frame { .. } => {
                    Fact::Garbage
                }
            };
            self.cells[at].set(grid, fact);
        }
    }

    fn clash(&self, clash: &Clash) -> String {
        match clash {
            Clash::Pending(a, b) => format!("adds sums that differ: one is {}, one {}", self.show_pending(*a), self.show_pending(*b)),
            Clash::Twice(Term::All, at) => format!("adds the contributions of micro-batch {at} a second time"),
            Clash::Twice(Term::Value(v), at) => format!("adds `{}` of micro-batch {at} a second time", self.types.graph.values[*v].name),
            Clash::Twice(Term::Bucket(b), _) => format!("counts {b} a second time"),
        }
    }
}

/// The one content of `[from, to)` in a profile.
pub(super) fn only(profile: &Profile, from: u64, to: u64) -> Fact {
    let first = profile.partition_point(|&(end, _)| end <= from);
    let last = profile.partition_point(|&(end, _)| end < to);
    match profile.get(first) {
        Some(&(_, fact)) if profile[first..=last.min(profile.len() - 1)].iter().all(|&(_, f)| f == fact) => fact,
        Some(_) | None => Fact::Garbage,
    }
}
