//! The arena of a stage, by construction: the regions of [`crate::memory`] in their order, and in each the buffers it sums up.
//!
//! | region | buffers |
//! |---|---|
//! | scalars | loss, squared norm, clip factor |
//! | states | every role of every bucket that is not offloaded, whole or this rank's piece; the sums of trust ratios; parameters that are put by for backward passes, a slot for each version |
//! | frames | of each virtual stage: what its layers keep of a micro-batch, if not offloaded, one slot for each in flight; what they hold between the halves of a backward pass |
//! | boundary | two cotangents handed down layer by layer; two turns of every message |
//! | workspace | of one layer: forms of both passes, and scratch; all layers begin at the same place |
//! | ring | two turns of whole parameters and gradients of layers that keep only pieces, of gradients on the wire, and of offloaded frames; in the update, two turns of offloaded roles |
//!
//! Behind the arena, in the memory of the host and in a file: the offloaded roles of every bucket; the offloaded frames of every layer, one slot for each micro-batch in flight.

use super::fragment::{Fragment, Storage};
use super::ring::{self, Round};
use super::stage::{Neighbour, Stage, VirtualStage};
use crate::memory::{self, LayerBytes, bucket_elems, role_bytes, space, workspace_region};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{BucketId, BufferId, FormId, ParamId, Table};
use dplan_ir::mesh::AxisSet;
use dplan_ir::plan::{Offload, States, Zero};
use dplan_ir::program::{Bucket, Buffer, Content, Member, Region, Role, Scalar, Space, StageProgram, align};
use dplan_ir::sharded::Stmt;
use std::collections::BTreeMap;

/// Buffers of single parameters: the blocks that ops read and add gradients to.
pub(super) type Members = BTreeMap<(Role, ParamId), BufferId>;

/// A bucket and where its roles live between steps.
pub(super) struct Home {
    pub bucket: BucketId,
    pub zero: Zero,
    pub offload: Offload,
    /// Data axes over which its gradients are summed.
    pub data: AxisSet,
    /// The same, in the steps by which sums are scattered.
    pub steps: Vec<AxisSet>,
    /// Layers of this stage that use it, by position; several only for a shared parameter.
    pub layers: Vec<usize>,
    pub roles: BTreeMap<Role, BufferId>,
    /// Where offloaded roles are while the update works on them.
    pub staged: BTreeMap<Role, Part>,
    /// This rank's part of the parameters, which it updates: the home, or a piece of it in place.
    pub own_param: BufferId,
    /// The same of the gradients.
    pub own_grad: BufferId,
    /// Sums that the trust ratios of its parameters are of, where the optimizer has any.
    pub trust: Option<BufferId>,
    /// Where parameters are put by for backward passes, if they are.
    pub stash: Option<BufferId>,
    members: Members,
    /// The blocks of these, which backward passes read.
    stashed: Members,
}

impl Home {
    /// This rank's part of a role, where it lives.
    pub fn own(&self, role: Role) -> BufferId {
        match role {
            Role::Param => self.own_param,
            Role::Grad => self.own_grad,
            Role::Master | Role::Moment1 | Role::Moment2 | Role::Residual => self.roles[&role],
        }
    }
    /// A role, where the update works on it.
    pub fn worked(&self, role: Role) -> Part {
        let home = || Part { whole: self.roles[&role], own: self.own(role) };
        self.staged.get(&role).copied().unwrap_or_else(home)
    }
}

/// A role of a bucket somewhere.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub whole: BufferId,
    /// This rank's piece of it, in place; or all of it.
    pub own: BufferId,
}

/// Gradients of a bucket in a turn of the ring.
#[derive(Clone, Copy)]
pub(super) struct Turned {
    /// Place of its home in [`Arena::homes`].
    pub home: usize,
    pub part: Part,
    /// What the piece is added to once it is scattered; nothing where gradients are added up in place.
    pub sum: Option<BufferId>,
}

/// Gradients of a bucket on their way to their sum, in a turn of the ring.
#[derive(Clone, Copy)]
pub(super) struct OnWire {
    /// This rank's, rounded or compressed; nothing where they are sent from where they are.
    pub own: Option<BufferId>,
    /// What is left over of compressed ones.
    pub residual: Option<BufferId>,
    /// Everybody's, of this rank's piece; of compressed ones everybody's.
    pub shares: BufferId,
    /// Where these add up: this rank's piece of the gradients that were sent, in place; of compressed ones at ZeRO 0 all of them.
    pub sum: BufferId,
}

/// Parameters that are gathered.
#[derive(Clone, Copy)]
pub(super) struct Gather {
    /// Place of their home in [`Arena::homes`].
    pub home: usize,
    pub src: BufferId,
    pub whole: BufferId,
}

/// What a layer's two passes work with.
#[derive(Default)]
pub(super) struct LayerBuffers {
    pub homes: Vec<usize>,
    /// Buffers of forms but those of parameters and direct gradients.
    pub forms: Table<FormId, Option<BufferId>>,
    /// Those of an offloaded frame, where the backward pass finds them.
    pub back: BTreeMap<FormId, BufferId>,
    /// An offloaded frame behind the forward pass: from where and where to.
    pub stored: Option<(BufferId, BufferId)>,
    pub forward: Members,
    pub backward: Members,
    /// Scratch of each statement of either pass.
    pub scratch: [Vec<Option<BufferId>>; 2],
    /// Where blocks of its operands and results are while they go round, of each statement of either pass.
    pub rounds: [Vec<Option<Round>>; 2],
    /// Where what goes round begins, of each statement of both passes.
    pub turns_at: Vec<u64>,
    /// What is copied in before each pass: from where and where to.
    pub fetched: [Vec<(BufferId, BufferId)>; 2],
    /// What is gathered then.
    pub gathered: [Vec<Gather>; 2],
    /// Gradients that are in the ring in the backward pass.
    pub turned: Vec<Turned>,
    /// Those that are exchanged piece by piece, by place of their home.
    pub wires: BTreeMap<usize, OnWire>,
}

impl LayerBuffers {
    /// Whether something of the layer is in the ring in a pass.
    pub fn is_in_ring(&self, pass: usize) -> bool {
        let is_made_there = if pass == 0 { self.stored.is_some() } else { !self.turned.is_empty() || !self.wires.is_empty() };
        is_made_there || !self.fetched[pass].is_empty() || !self.gathered[pass].is_empty()
    }
}

pub(super) struct Arena {
    pub program: StageProgram,
    pub homes: Vec<Home>,
    pub layers: Vec<LayerBuffers>,
    /// Of whole flat buffers that are scattered or gathered in several steps: what each step but the last leaves this rank, in place.
    pub between: BTreeMap<BufferId, Vec<BufferId>>,
    pub scalars: BTreeMap<Scalar, BufferId>,
    end: u64,
    /// Buffers in other memories, at offsets from the start of those until the arena is complete.
    away: Vec<(BufferId, Space)>,
}

impl Arena {
    pub fn new(stage: Stage<'_>) -> Arena {
        let layers = stage.layers.iter().map(|l| LayerBuffers { forms: Table::filled(l.forms.len(), None), ..Default::default() }).collect();
        let mut arena = Arena {
            program: StageProgram::default(),
            homes: Vec::new(),
            layers,
            between: BTreeMap::new(),
            scalars: BTreeMap::new(),
            end: 0,
            away: Vec::new(),
        };
        let bytes: Vec<LayerBytes> = stage.layers.iter().map(|l| l.bytes(stage.graph(), stage.mesh(), &stage.sharder.padded)).collect();
        arena.region("scalars", |arena, at| arena.scalars(stage, at));
        arena.region("states", |arena, at| arena.states(stage, at));
        arena.region("frames", |arena, at| arena.frames(stage, at, &bytes));
        arena.region("boundary", |arena, at| arena.boundary(stage, at));
        arena.region("workspace", |arena, at| at + workspace_region(arena.workspace(stage, at) - at));
        arena.region("ring", |arena, at| arena.ring(stage, at, &bytes));
        arena.hand_over(stage);
        arena.rounds(stage);
        arena.program.arena_bytes = arena.end;
        for &(id, space) in &arena.away {
            arena.program.buffers[id].offset += arena.program.range(space).start;
        }
        arena
    }

    /// Lays out one region; `fill` returns where it ends.
    fn region(&mut self, name: &str, fill: impl FnOnce(&mut Arena, u64) -> u64) {
        let offset = self.end;
        self.end = fill(self, offset);
        self.program.regions.push(Region { name: name.into(), offset, bytes: self.end - offset });
    }

    /// Where so many more bytes of another memory begin, counted from its own beginning; nothing for that of the device.
    fn take(&mut self, space: Space, bytes: u64) -> Option<u64> {
        let end = match space {
            Space::Device => return None,
            Space::Host => &mut self.program.host_bytes,
            Space::File => &mut self.program.file_bytes,
        };
        *end += bytes;
        Some(*end - bytes)
    }

    pub(super) fn buffer(&mut self, content: Content, dtype: DType, bytes: u64, offset: u64) -> BufferId {
        self.program.buffers.push(Buffer { content, dtype, bytes, offset, slots: 1, slot_stride: 0, piece_axes: AxisSet::EMPTY })
    }

    pub(super) fn form(&mut self, stage: Stage<'_>, layer: &Fragment, form: FormId, offset: u64) -> (BufferId, u64) {
        let local = layer.local(form, stage.graph(), stage.mesh(), &stage.sharder.padded);
        let of = &layer.forms[form];
        let content = Content::Value { value: of.value, sharding: of.sharding.clone() };
        (self.buffer(content, local.dtype, local.bytes(), offset), align(local.bytes()))
    }

    pub(super) fn in_slots(&mut self, buffer: BufferId, slots: u64, stride: u64) {
        let buffer = &mut self.program.buffers[buffer];
        (buffer.slots, buffer.slot_stride) = (slots, stride);
    }

    fn scalars(&mut self, stage: Stage<'_>, mut at: u64) -> u64 {
        let dtype = stage.plan.compute.accumulator();
        for scalar in Scalar::ALL {
            let buffer = self.buffer(Content::Scalar(scalar), dtype, dtype.size(), at);
            self.scalars.insert(scalar, buffer);
            at += align(8);
        }
        at
    }

    fn states(&mut self, stage: Stage<'_>, mut at: u64) -> u64 {
        let mut shared: BTreeMap<ParamId, usize> = BTreeMap::new();
        for (position, layer) in stage.layers.iter().enumerate() {
            for bucket in &layer.buckets {
                let first = bucket.members[0].param;
                if let Some(&home) = shared.get(&first) {
                    self.homes[home].layers.push(position);
                    self.layers[position].homes.push(home);
                    continue;
                }
                let (States { zero, offload }, types, size) = (stage.states(position), stage.types(), stage.size(bucket));
                let (data, elems) = (size.data(stage.mesh()), bucket_elems(size.elems, size.ways(stage.mesh())));
                let mut offset = 0;
                let members = bucket.members.iter().map(|m| {
                    let elems = m.elems(stage.graph(), stage.mesh(), &stage.sharder.padded);
                    offset += elems;
                    Member { param: m.param, sharding: m.sharding.clone(), offset: offset - elems, elems }
                });
                let id = self.program.buckets.push(Bucket {
                    members: members.collect(),
                    elems,
                    partial: bucket.partial.union(data),
                    tied: stage.tied(bucket),
                });
                let mut roles = BTreeMap::new();
                for role in types.roles_shared(size.ways(stage.mesh())) {
                    let space = space(role, offload);
                    let bytes = space.align(role_bytes(role, size.elems, size.ways(stage.mesh()), zero, types));
                    let offset = self.take(space, bytes).unwrap_or_else(|| {
                        at += bytes;
                        at - bytes
                    });
                    let buffer = self.flat(stage, id, role, stage.pieces(role, zero, data), offset);
                    roles.insert(role, buffer);
                    if space != Space::Device {
                        self.away.push((buffer, space));
                    }
                }
                let mut own = |role: Role| {
                    let (home, space) = (roles[&role], space(role, offload));
                    let offset = self.program.buffers[home].offset;
                    if zero.0 >= 1 && !data.is_empty() && stage.pieces(role, zero, data).is_empty() {
                        let piece = self.piece_in_place(stage, id, role, data, offset);
                        if space != Space::Device {
                            self.away.push((piece, space));
                        }
                        piece
                    } else {
                        home
                    }
                };
                let (own_param, own_grad) = (own(Role::Param), own(Role::Grad));
                let steps = stage.plan.sync.steps(stage.mesh(), data);
                roles.iter().filter(|(r, _)| space(**r, offload) == Space::Device).for_each(|(_, &whole)| self.steps(stage, whole, &steps));
                let sums = memory::trust_bytes(size.members, types);
                let trust = (sums > 0).then(|| self.buffer(Content::Trust { bucket: id }, types.dtype(Role::Master), sums, at));
                at += align(sums);
                let mut members = Members::new();
                for role in
                    [Role::Param, Role::Grad].into_iter().filter(|&r| stage.pieces(r, zero, data).is_empty() && space(r, offload) == Space::Device)
                {
                    self.members(stage, id, role, self.program.buffers[roles[&role]].offset, &mut members);
                }
                let versions = stage.versions(position);
                let (stash, stashed) = self.stash(stage, id, versions, at);
                at += stash.map_or(0, |stash| versions * self.program.buffers[stash].slot_stride);
                let home = self.homes.len();
                if bucket.tied {
                    shared.insert(first, home);
                }
                self.layers[position].homes.push(home);
                self.homes.push(Home {
                    bucket: id,
                    zero,
                    offload,
                    data,
                    steps,
                    layers: vec![position],
                    roles,
                    staged: BTreeMap::new(),
                    own_param,
                    own_grad,
                    trust,
                    stash,
                    members,
                    stashed,
                });
            }
        }
        for layer in &mut self.layers {
            for &home in &layer.homes {
                let members = &self.homes[home].members;
                layer.forward.extend(members.iter().filter(|((role, _), _)| *role == Role::Param));
                layer.backward.extend(members);
                layer.backward.extend(&self.homes[home].stashed);
            }
        }
        at
    }

    /// A flat buffer that holds all of a role, or this rank's piece.
    pub(super) fn flat(&mut self, stage: Stage<'_>, bucket: BucketId, role: Role, pieces: AxisSet, offset: u64) -> BufferId {
        let dtype = stage.types().dtype(role);
        let bytes = self.program.buckets[bucket].elems / stage.mesh().size(pieces) * dtype.size();
        self.buffer(Content::Flat { bucket, role, pieces }, dtype, bytes, offset)
    }

    /// This rank's piece of the whole flat buffer at `offset`.
    pub(super) fn piece_in_place(&mut self, stage: Stage<'_>, bucket: BucketId, role: Role, data: AxisSet, offset: u64) -> BufferId {
        let piece = self.flat(stage, bucket, role, data, offset);
        self.program.buffers[piece].piece_axes = data;
        piece
    }

    /// What all gradients or parameters of a bucket are in between, where they are scattered or gathered in several steps.
    fn steps(&mut self, stage: Stage<'_>, whole: BufferId, steps: &[AxisSet]) {
        let Buffer { content: Content::Flat { bucket, role: role @ (Role::Param | Role::Grad), pieces: AxisSet::EMPTY }, offset, .. } =
            self.program.buffers[whole]
        else {
            return;
        };
        let mut pieces = AxisSet::EMPTY;
        for &step in steps.iter().take(steps.len().saturating_sub(1)) {
            pieces = pieces.union(step);
            let piece = self.piece_in_place(stage, bucket, role, pieces, offset);
            self.between.entry(whole).or_default().push(piece);
        }
    }

    /// The members of the whole flat buffer at `offset`.
    pub(super) fn members(&mut self, stage: Stage<'_>, bucket: BucketId, role: Role, offset: u64, into: &mut Members) {
        let dtype = stage.types().dtype(role);
        for at in 0..self.program.buckets[bucket].members.len() {
            let member = &self.program.buckets[bucket].members[at];
            let (param, start, bytes) = (member.param, member.offset * dtype.size(), member.elems * dtype.size());
            into.insert((role, param), self.buffer(Content::Member { bucket, role, param }, dtype, bytes, offset + start));
        }
    }

    fn frames(&mut self, stage: Stage<'_>, mut at: u64, bytes: &[LayerBytes]) -> u64 {
        for virtual_stage in stage.virtual_stages {
            let layers = || virtual_stage.layers.clone();
            let here: Vec<usize> = layers().filter(|&l| stage.residence(l).activations.is_none()).collect();
            let frames = (virtual_stage.slots.frames, here.iter().map(|&l| bytes[l].frame).sum());
            at = self.slotted(stage, at, &here, &[Storage::Frame], frames);
            let held = (virtual_stage.slots.held, layers().map(|l| bytes[l].held).sum());
            if held.0 > 0 {
                at = self.slotted(stage, at, &layers().collect::<Vec<_>>(), &[Storage::Held, Storage::CotangentIn], held);
            }
        }
        at
    }

    /// What a layer hands over is made where the next one keeps it; so is what it hands down, where that is held.
    fn hand_over(&mut self, stage: Stage<'_>) {
        for (position, next) in stage.virtual_stages.iter().flat_map(|v| next_layers(stage, v)) {
            let (layer, behind) = (&stage.layers[position], &stage.layers[next]);
            if let Some((output, input)) = layer.output.zip(behind.input) {
                self.layers[position].forms[output] = self.layers[next].forms[input];
            }
            if let Some((out, cotangent)) = behind.cotangent_out.zip(layer.cotangent_in) {
                self.layers[next].forms[out] = self.layers[position].forms[cotangent];
            }
        }
    }

    /// Lays out what layers keep of each of so many micro-batches, so many bytes each.
    fn slotted(&mut self, stage: Stage<'_>, at: u64, layers: &[usize], kinds: &[Storage], (slots, stride): (u64, u64)) -> u64 {
        let mut offset = at;
        for &position in layers {
            let layer = stage.layers[position];
            for form in kinds.iter().flat_map(|&kind| layer.stored(kind)) {
                let (buffer, size) = self.form(stage, layer, form, offset);
                self.in_slots(buffer, slots, stride);
                self.layers[position].forms[form] = Some(buffer);
                offset += size;
            }
        }
        at + stride * slots
    }

    fn boundary(&mut self, stage: Stage<'_>, at: u64) -> u64 {
        let size = align(stage.sharder.boundary_bytes());
        let parted = stage.pipeline().parts_backward();
        let mut offset = at;
        if !parted {
            for position in stage.virtual_stages.iter().flat_map(|v| v.layers.clone().skip(1)) {
                let layer = stage.layers[position];
                if let (Some(out), Some(cotangent)) = (layer.cotangent_out, stage.layers[position - 1].cotangent_in) {
                    let (buffer, _) = self.form(stage, layer, out, at + size * (position as u64 % 2));
                    self.layers[position].forms[out] = Some(buffer);
                    self.layers[position - 1].forms[cotangent] = Some(buffer);
                }
            }
            offset += 2 * size;
        }
        // Two turns of everything that is sent, and of what comes back and is not held; what comes forward goes into the first frame.
        for virtual_stage in stage.virtual_stages {
            let (first, last) = (virtual_stage.first(), virtual_stage.last());
            let mut messages = Vec::new();
            if let Neighbour::Stage(_) = stage.behind(virtual_stage) {
                messages.push((last, stage.layers[last].output));
                messages.extend((!parted).then_some((last, stage.layers[last].cotangent_in)));
            }
            if let Neighbour::Stage(_) = stage.before(virtual_stage) {
                messages.push((first, stage.layers[first].cotangent_out));
            }
            for (position, form) in messages {
                if let Some(form) = form {
                    let (buffer, _) = self.form(stage, stage.layers[position], form, offset);
                    self.in_slots(buffer, 2, size);
                    self.layers[position].forms[form] = Some(buffer);
                }
                offset += 2 * size;
            }
        }
        offset
    }

    fn workspace(&mut self, stage: Stage<'_>, at: u64) -> u64 {
        let mut end = at;
        for (position, layer) in stage.layers.iter().enumerate() {
            let mut offset = at;
            for form in layer.stored(Storage::Workspace) {
                let (buffer, size) = self.form(stage, layer, form, offset);
                self.layers[position].forms[form] = Some(buffer);
                offset += size;
            }
            let mut scratch = |arena: &mut Arena, stmts: &[Stmt]| -> Vec<Option<BufferId>> {
                let of = |stmt: &Stmt| {
                    let bytes = layer.scratch(stmt, stage.graph(), stage.mesh(), &stage.sharder.padded);
                    let own = ring::own_bytes(stage, layer, stmt).unwrap_or(bytes);
                    let buffer = (own > 0).then(|| arena.buffer(Content::Scratch, stage.plan.compute.accumulator(), own, offset));
                    arena.layers[position].turns_at.push(offset + align(own));
                    offset += align(bytes);
                    buffer
                };
                stmts.iter().map(of).collect()
            };
            self.layers[position].scratch = [scratch(self, &layer.forward), scratch(self, &layer.backward)];
            end = end.max(offset);
        }
        end
    }

    /// Turns alternate from one layer to the next that uses the ring in a pass; the backward pass goes on where the forward pass ended.
    fn ring(&mut self, stage: Stage<'_>, at: u64, bytes: &[LayerBytes]) -> u64 {
        let (mesh, types) = (stage.mesh(), stage.types());
        let turn = bytes.iter().enumerate().map(|(i, b)| memory::turn_bytes(b, mesh, stage.residence(i), types)).max().unwrap_or(0);
        let mut nth = 0;
        let forward = 0..stage.layers.len();
        for (pass, position) in forward.clone().map(|p| (0, p)).chain(forward.rev().map(|p| (1, p))) {
            let mut offset = at + turn * (nth % 2);
            let start = offset;
            let roles: &[Role] = match pass {
                0 => &[Role::Param],
                _ if bytes[position].reads_back => &[Role::Param, Role::Grad],
                _ => &[Role::Grad],
            };
            for &role in roles {
                for home in self.layers[position].homes.clone() {
                    let Home { bucket, zero, offload, data, own_param, own_grad, .. } = self.homes[home];
                    let (kept, pieces) = (self.homes[home].roles[&role], stage.pieces(role, zero, data));
                    let is_away = space(role, offload) != Space::Device;
                    if pieces.is_empty() && !is_away {
                        continue;
                    }
                    let whole = self.flat(stage, bucket, role, AxisSet::EMPTY, offset);
                    let cut = if role == Role::Grad { zero.0 >= 1 && !data.is_empty() } else { is_away && !pieces.is_empty() };
                    let own = if cut { self.piece_in_place(stage, bucket, role, data, offset) } else { whole };
                    let steps = self.homes[home].steps.clone();
                    self.steps(stage, whole, &steps);
                    let whole_end = offset + align(self.program.buffers[whole].bytes);
                    let mut end = whole_end;
                    // What comes in: the role as it is kept.
                    let mut comes = if pieces.is_empty() { whole } else { own };
                    if role == Role::Param {
                        let src = if is_away { own } else { own_param };
                        self.layers[position].gathered[pass].extend((!pieces.is_empty()).then_some(Gather { home, src, whole }));
                    } else {
                        let mut sum = (!pieces.is_empty()).then_some(own_grad);
                        if let (Some(sum), true) = (&mut sum, is_away) {
                            *sum = self.flat(stage, bucket, role, pieces, whole_end);
                            comes = *sum;
                            end += align(self.program.buffers[comes].bytes);
                        }
                        self.layers[position].turned.push(Turned { home, part: Part { whole, own }, sum });
                    }
                    self.layers[position].fetched[pass].extend(is_away.then_some((kept, comes)));
                    let mut members = Members::new();
                    self.members(stage, bucket, role, offset, &mut members);
                    offset = end;
                    let layer = &mut self.layers[position];
                    if pass == 0 { layer.forward.extend(members) } else { layer.backward.extend(members) }
                }
            }
            if pass == 1 {
                offset = self.wires(stage, position, offset);
            }
            offset = self.window(stage, pass, position, offset);
            nth += u64::from(offset > start);
        }
        let mut turns = (0..2).cycle();
        for home in 0..self.homes.len() {
            let of = &self.homes[home];
            let offloaded: Vec<(Role, BufferId)> =
                of.roles.iter().filter(|(r, _)| space(**r, of.offload) != Space::Device).map(|(&r, &b)| (r, b)).collect();
            let (bucket, mut offset) = (of.bucket, at + if offloaded.is_empty() { 0 } else { turn * turns.next().unwrap_or(0) });
            for (role, kept) in offloaded {
                let Content::Flat { pieces, .. } = self.program.buffers[kept].content else { continue };
                let whole = self.flat(stage, bucket, role, pieces, offset);
                let own = match self.homes[home].own(role) {
                    own if own == kept => whole,
                    _ => self.piece_in_place(stage, bucket, role, self.homes[home].data, offset),
                };
                let steps = self.homes[home].steps.clone();
                self.steps(stage, whole, &steps);
                offset += align(self.program.buffers[whole].bytes);
                self.homes[home].staged.insert(role, Part { whole, own });
            }
        }
        at + 2 * turn
    }

    /// An offloaded frame in a turn of the ring, from `at` on, and behind the forward pass elsewhere; returns where it ends.
    fn window(&mut self, stage: Stage<'_>, pass: usize, position: usize, at: u64) -> u64 {
        let layer = stage.layers[position];
        let (Some(store), Some(of)) = (stage.residence(position).activations, stage.virtual_stages.iter().find(|v| v.layers.contains(&position)))
        else {
            return at;
        };
        let mut end = at;
        for form in layer.stored(Storage::Frame) {
            let (buffer, size) = self.form(stage, layer, form, end);
            end += size;
            match pass {
                0 => self.layers[position].forms[form] = Some(buffer),
                _ => _ = self.layers[position].back.insert(form, buffer),
            }
        }
        let (bytes, slots, space) = (end - at, of.slots.frames, store.space());
        if bytes == 0 {
            return at;
        }
        let here = self.buffer(Content::Frame, stage.plan.compute, bytes, at);
        match self.layers[position].stored {
            Some((_, there)) => self.layers[position].fetched[pass].push((there, here)),
            None => {
                let stride = space.align(bytes);
                let offset = self.take(space, slots * stride).unwrap_or(at);
                let there = self.buffer(Content::Frame, stage.plan.compute, bytes, offset);
                self.in_slots(there, slots, stride);
                self.away.push((there, space));
                self.layers[position].stored = Some((here, there));
            }
        }
        end
    }
}

/// Each layer of a virtual stage with the one behind it, by position, where that is on the same stage.
fn next_layers(stage: Stage<'_>, of: &VirtualStage) -> Vec<(usize, usize)> {
    let mut pairs: Vec<(usize, usize)> = of.layers.clone().skip(1).map(|position| (position - 1, position)).collect();
    if let Neighbour::Here(at) = stage.behind(of) {
        pairs.push((of.last(), stage.virtual_stages[at].first()));
    }
    pairs
}
