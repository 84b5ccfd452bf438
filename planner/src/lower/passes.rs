//! The segments of a stage, and of each of its virtual stages, as instructions without events ([`super::events`] adds those).
//!
//! Kernels and tensor-parallel collectives go to the compute stream, in the order of the fragments. Around each layer, on the communication stream:
//!
//! ```text
//! forward    gather(0) gather(1) | layer 0 | gather(2) | layer 1 | gather(3) | …
//! backward   … | layer n | scatter(n) | gather(n−2) | layer n−1 | scatter(n−1) | gather(n−3) | …
//! ```
//! A turn of the ring is free as soon as its layer and what follows from it have been issued; the parameters of the next layer but one are gathered into it
//! right then. Layers that have nothing there are passed over. What is offloaded is copied in just before, on the copy stream; gradients out behind a scatter, a frame out
//! behind the layer that left it: the layer behind writes what it hands on into a turn of the ring too, and is then held by that copy at its very end.

use super::arena::{Arena, Gather};
use super::fragment::{Fragment, Storage, makes, reads};
use super::stage::{Neighbour, Stage, VirtualStage};
use super::sync;
use dplan_ir::entity::{BufferId, FormId};
use dplan_ir::graph::Def;
use dplan_ir::mesh::AxisSet;
use dplan_ir::pipeline::Pass;
use dplan_ir::program::{Channel, Instr, Issue, Pattern, Role, Scalar, Segment, SegmentKind, Stream, Updates, Write};
use dplan_ir::reshard::Step;
use dplan_ir::sharded::{self, Stmt};
use dplan_ir::sharding::Monoid;
use std::collections::BTreeSet;

/// The body of a segment under construction.
pub(super) struct Body<'a> {
    pub stage: Stage<'a>,
    pub arena: &'a Arena,
    pub issues: Vec<Issue>,
}

impl<'a> Body<'a> {
    pub fn new(stage: Stage<'a>, arena: &'a Arena) -> Body<'a> {
        Body { stage, arena, issues: Vec::new() }
    }
    pub fn issue(&mut self, stream: Stream, instr: Instr) {
        self.issues.push(Issue { stream, instr });
    }
    /// A collective on flat buffers or scalars of this stage; nothing over no axes.
    pub fn flat(&mut self, pattern: Pattern, axes: AxisSet, src: BufferId, dst: BufferId) {
        self.flat_across(pattern, axes, Vec::new(), src, dst);
    }
    /// The same over several stages. Tensor-parallel ranks talk on the compute stream, as they do between kernels.
    pub fn flat_across(&mut self, pattern: Pattern, axes: AxisSet, stages: Vec<u32>, src: BufferId, dst: BufferId) {
        let stream = if stages.is_empty() && self.stage.mesh().tp().includes(axes) { Stream::Compute } else { Stream::Comm };
        if !axes.is_empty() || !stages.is_empty() {
            self.issue(stream, Instr::Collective { pattern, axes, stages, dim: 0, monoid: Monoid::Sum, src, dst });
        }
    }
    fn segment(self, kind: SegmentKind) -> Segment {
        Segment { kind, body: self.issues }
    }
}

/// Clears what accumulates over a step.
pub(super) fn begin(stage: Stage<'_>, arena: &Arena) -> Segment {
    let mut body = Body::new(stage, arena);
    let mut scalars = Vec::new();
    if stage.layers.iter().any(|l| l.loss.is_some()) {
        scalars.push(Scalar::Loss);
    }
    scalars.extend(sync::norm_scalar(stage));
    for scalar in scalars {
        body.issue(Stream::Compute, Instr::Zero { dst: arena.scalars[&scalar] });
    }
    match stage.updates() {
        Updates::Step => clear(&mut body),
        Updates::MicroBatch => {}
    }
    body.segment(SegmentKind::Begin)
}

/// Clears gradients.
fn clear(body: &mut Body<'_>) {
    for home in &body.arena.homes {
        let dst = home.worked(Role::Grad).whole;
        body.issue(Stream::Compute, Instr::Zero { dst });
        if home.staged.contains_key(&Role::Grad) {
            body.issue(Stream::Copy, Instr::Copy { src: dst, dst: home.roles[&Role::Grad] });
        }
    }
}

/// Puts parameters by, as they are, for a micro-batch's backward pass.
pub(super) fn stash(stage: Stage<'_>, arena: &Arena) -> Segment {
    let mut body = Body::new(stage, arena);
    for home in &arena.homes {
        if let Some(dst) = home.stash {
            body.issue(Stream::Compute, Instr::Copy { src: home.roles[&Role::Param], dst });
        }
    }
    body.segment(SegmentKind::Stash)
}

/// What a step of many updates has once, behind all of them.
pub(super) fn end(stage: Stage<'_>, arena: &Arena) -> Segment {
    let mut body = Body::new(stage, arena);
    sync::loss(&mut body);
    body.segment(SegmentKind::End)
}

pub(super) fn forward(stage: Stage<'_>, arena: &Arena, of: &VirtualStage) -> Segment {
    let mut body = Body::new(stage, arena);
    if let (Some(src), Neighbour::Stage(from)) = (stage.layers[of.first()].input, stage.before(of)) {
        let dst = body.buffer(of.first(), sharded::Pass::Forward, src);
        body.issue(stage.stream(of, Stream::RecvForward, Stream::RecvForwardBack), Instr::Recv { from, channel: Channel::Forward, dst });
    }
    let turns: Vec<usize> = of.layers.clone().filter(|&l| arena.layers[l].is_in_ring(0)).collect();
    body.gather(sharded::Pass::Forward, turns.iter().take(2));
    for at in of.layers.clone() {
        body.layer(at, Pass::Forward);
        if let Some((src, dst)) = arena.layers[at].stored {
            body.issue(Stream::Copy, Instr::Copy { src, dst });
        }
        body.gather(sharded::Pass::Forward, next_but_one(&turns, at));
    }
    if let (Some(output), Neighbour::Stage(to)) = (stage.layers[of.last()].output, stage.behind(of)) {
        let src = body.buffer(of.last(), sharded::Pass::Forward, output);
        body.issue(stage.stream(of, Stream::SendForward, Stream::SendForwardBack), Instr::Send { to, channel: Channel::Forward, src });
    }
    body.segment(SegmentKind::Forward)
}

/// `pass` is the whole backward pass or one of its halves; gradients are synchronised where `kind` is that of the last micro-batch.
pub(super) fn backward(stage: Stage<'_>, arena: &Arena, of: &VirtualStage, pass: Pass, kind: SegmentKind) -> Segment {
    let mut body = Body::new(stage, arena);
    let talks = pass != Pass::Weight;
    if let (Some(cotangent), Neighbour::Stage(from), true) = (stage.layers[of.last()].cotangent_in, stage.behind(of), talks) {
        let dst = body.buffer(of.last(), sharded::Pass::Backward, cotangent);
        body.issue(stage.stream(of, Stream::RecvBackward, Stream::RecvBackwardBack), Instr::Recv { from, channel: Channel::Backward, dst });
    }
    match stage.updates() {
        Updates::Step => {}
        Updates::MicroBatch => clear(&mut body),
    }
    let layers: Vec<usize> = of.layers.clone().rev().collect();
    let turns: Vec<usize> = layers.iter().copied().filter(|&l| arena.layers[l].is_in_ring(1)).collect();
    // Gradients that a turn goes on adding to come in behind that turn.
    let goes_on = |at: usize| turns.iter().position(|&l| l == at).is_some_and(|nth| nth > 0 && shares_gradients(arena, turns[nth - 1], at));
    body.gather(sharded::Pass::Backward, turns.iter().take(2).filter(|&&l| !goes_on(l)));
    for at in layers {
        for turned in arena.layers[at].turned.iter().filter(|t| t.sum.is_some()) {
            body.issue(Stream::Compute, Instr::Zero { dst: turned.part.whole });
        }
        let is_last = matches!(kind, SegmentKind::BackwardLast | SegmentKind::BackwardWeightLast);
        body.layer(at, pass);
        sync::turn(&mut body, at, is_last);
        let next = turns.iter().position(|&l| l == at).and_then(|nth| turns.get(nth + 1));
        body.gather(sharded::Pass::Backward, next.filter(|&&l| goes_on(l)));
        body.gather(sharded::Pass::Backward, next_but_one(&turns, at).filter(|&&l| !goes_on(l)));
        if is_last {
            sync::reduce(&mut body, at);
        }
    }
    if let (Some(cotangent), Neighbour::Stage(to), true) = (stage.layers[of.first()].cotangent_out, stage.before(of), talks) {
        let src = body.buffer(of.first(), sharded::Pass::Backward, cotangent);
        body.issue(stage.stream(of, Stream::SendBackward, Stream::SendBackwardBack), Instr::Send { to, channel: Channel::Backward, src });
    }
    body.segment(kind)
}

pub(super) fn update(stage: Stage<'_>, arena: &Arena) -> Segment {
    let mut body = Body::new(stage, arena);
    sync::update(&mut body);
    body.segment(SegmentKind::Update)
}

/// Whether two layers have gradients of one parameter that are copied in and out.
fn shares_gradients(arena: &Arena, one: usize, other: usize) -> bool {
    let is_carried = |home: usize| arena.homes[home].staged.contains_key(&Role::Grad);
    let turned = |layer: usize| arena.layers[layer].turned.iter().map(|t| t.home).filter(|&home| is_carried(home));
    turned(one).any(|home| turned(other).any(|of| of == home))
}

/// The layer whose parameters come into the turn of the ring that `at` has left.
fn next_but_one(turns: &[usize], at: usize) -> Option<&usize> {
    turns.iter().position(|&l| l == at).and_then(|nth| turns.get(nth + 2))
}

impl Body<'_> {
    fn gather<'l>(&mut self, pass: sharded::Pass, layers: impl IntoIterator<Item = &'l usize>) {
        for &at in layers {
            for &(src, dst) in &self.arena.layers[at].fetched[index(pass)] {
                self.issue(Stream::Copy, Instr::Copy { src, dst });
            }
            for &Gather { home, src, whole } in &self.arena.layers[at].gathered[index(pass)] {
                sync::gather(self, home, src, whole);
            }
        }
    }

    /// The statements of one layer in a pass, or a half of one.
    fn layer(&mut self, at: usize, of: Pass) {
        let layer = self.stage.layers[at];
        let (pass, stmts, first) = match of {
            Pass::Forward => (sharded::Pass::Forward, &layer.forward[..], 0),
            Pass::Backward => (sharded::Pass::Backward, &layer.backward[..], 0),
            Pass::Input => (sharded::Pass::Backward, &layer.backward[..layer.input_half], 0),
            Pass::Weight => (sharded::Pass::Backward, &layer.backward[layer.input_half..], layer.input_half),
        };
        let mut loaded = BTreeSet::new();
        // Contributions that are not added as they are made, after the statement that makes them.
        let late: Vec<_> = layer.accumulate.iter().filter(|(_, f)| !matches!(layer.storage[*f], Storage::Gradient(_))).collect();
        for (nth, stmt) in stmts.iter().enumerate() {
            for &form in reads(stmt) {
                self.load(at, pass, form, &mut loaded);
            }
            self.stmt(at, pass, first + nth, stmt);
            if pass == sharded::Pass::Backward && !late.is_empty() {
                for &&(param, form) in late.iter().filter(|(_, f)| makes(stmt).contains(f)) {
                    let (src, dst) = (self.buffer(at, pass, form), self.arena.layers[at].backward[&(Role::Grad, param)]);
                    self.issue(Stream::Compute, Instr::AddInto { src, dst });
                }
            }
        }
    }

    /// Loads a graph input before its first use; one that is kept in the frame comes from the forward pass.
    fn load(&mut self, at: usize, pass: sharded::Pass, form: FormId, loaded: &mut BTreeSet<FormId>) {
        let layer = self.stage.layers[at];
        let is_input = self.stage.graph().values[layer.forms[form].value].def == Def::Input;
        let kept = pass == sharded::Pass::Backward && layer.storage[form] == Storage::Frame;
        if is_input && !kept && loaded.insert(form) {
            let dst = self.buffer(at, pass, form);
            self.issue(Stream::Compute, Instr::Input { dst });
        }
    }

    fn stmt(&mut self, at: usize, pass: sharded::Pass, nth: usize, stmt: &Stmt) {
        let layer: &Fragment = self.stage.layers[at];
        let instr = match stmt {
            Stmt::Run { node, ins, outs, .. } => {
                let buffers = |forms: &[FormId]| forms.iter().map(|&f| self.buffer(at, pass, f)).collect::<Vec<_>>();
                let adds = matches!(outs.first().map(|&f| layer.storage[f]), Some(Storage::Gradient(_) | Storage::Loss));
                let write = if adds { Write::Add } else { Write::Set };
                if let Some(round) = &self.arena.layers[at].rounds[index(pass)][nth] {
                    let (ins, outs) = (buffers(ins), buffers(outs));
                    return self.round(round, *node, &ins, &outs, self.arena.layers[at].scratch[index(pass)][nth]);
                }
                Instr::Run { node: *node, ins: buffers(ins), outs: buffers(outs), scratch: self.arena.layers[at].scratch[index(pass)][nth], write }
            }
            Stmt::Reshard { from, to, step, .. } => {
                let (src, dst) = (self.buffer(at, pass, *from), self.buffer(at, pass, *to));
                let stages = Vec::new();
                match *step {
                    Step::AllReduce { axes, monoid } => Instr::Collective { pattern: Pattern::AllReduce, axes, stages, dim: 0, monoid, src, dst },
                    Step::ReduceScatter { axes, dim, monoid } => {
                        Instr::Collective { pattern: Pattern::ReduceScatter, axes, stages, dim, monoid, src, dst }
                    }
                    Step::AllGather { axes, dim } => {
                        Instr::Collective { pattern: Pattern::AllGather, axes, stages, dim, monoid: Monoid::Sum, src, dst }
                    }
                    Step::Slice { axes, dim } => Instr::Slice { src, dst, axes, dim },
                }
            }
        };
        self.issue(Stream::Compute, instr);
    }

    /// Where a form of a layer is in a pass.
    fn buffer(&self, at: usize, pass: sharded::Pass, form: FormId) -> BufferId {
        let buffers = &self.arena.layers[at];
        let members = match pass {
            sharded::Pass::Forward => &buffers.forward,
            sharded::Pass::Backward => &buffers.backward,
        };
        let found = match self.stage.layers[at].storage[form] {
            Storage::Param(param) => members.get(&(Role::Param, param)).copied(),
            Storage::Gradient(param) => members.get(&(Role::Grad, param)).copied(),
            Storage::Loss => self.arena.scalars.get(&Scalar::Loss).copied(),
            Storage::Frame => match pass {
                sharded::Pass::Forward => buffers.forms[form],
                sharded::Pass::Backward => buffers.back.get(&form).copied().or(buffers.forms[form]),
            },
            Storage::Held | Storage::Workspace | Storage::Output | Storage::CotangentIn | Storage::CotangentOut => buffers.forms[form],
        };
        // The arena was laid out from the same fragments.
        found.unwrap_or_else(|| unreachable!("{form} of layer {} has no buffer", self.stage.layers[at].layer))
    }
}

fn index(pass: sharded::Pass) -> usize {
    match pass {
        sharded::Pass::Forward => 0,
        sharded::Pass::Backward => 1,
    }
}
