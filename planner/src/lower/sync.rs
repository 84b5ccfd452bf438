//! Gradients to their sum, the sum to the optimizer, parameters back to everybody.
//!
//! | ZeRO | each micro-batch | after the last | update | then |
//! |---|---|---|---|---|
//! | 0 | | all-reduce | all | |
//! | 1 | | reduce-scatter in place | own piece | all-gather in place |
//! | 2 | reduce-scatter in the ring, add to own piece | | own piece | all-gather in place |
//! | 3 | the same | | own piece | |
//!
//! Where each micro-batch has an update of its own, each is the last: its gradients are cleared before its backward pass, summed in it, and updated with behind it.
//!
//! Where the exchange has several steps ([`dplan_ir::sync`]), a reduce-scatter is one for each, a gather the same backwards, and an all-reduce is scattered by all steps but
//! the last, reduced, and gathered back; what lies between is a piece in place.
//!
//! Where gradients are rounded for the exchange, a reduce-scatter is a cast, an all-to-all and a sum of shares (where they are pushed to servers, the same without a cast); an all-reduce is the same, a gather of the sum, and after
//! it what is pending over tensor-parallel axes as for ZeRO 1. Only what goes between data-parallel ranks is rounded, once on its way; sums are of full length.
//! Where they are compressed, everybody gathers everybody's pairs, and adds up what of them is its business: all at ZeRO 0, its piece at ZeRO 1.
//!
//! States that are offloaded come in and go out on the copy stream: those of the first two buckets come in at the start of the update, those of the next but one when
//! their turn of the ring is free. Offloaded gradients are added up in the ring in a backward pass: they come in before it and go out behind it, reduced after the last.
//!
//! LAMB's update comes in two halves: sums over this rank's elements of each parameter and of its direction, which are added over the axes that cut the parameters
//! up and no others (ranks that hold the same elements have the same sums, all homes of a tied parameter too), then the step.
//!
//! Where only pieces are summed, what is still pending over tensor-parallel axes comes at the start of the update: the compute stream, on which those ranks
//! talk, would else wait for the scatter in the midst of the backward pass. A parameter with homes on several stages is summed over them there too: every stage
//! has then done all its passes, so nobody waits in the midst of them. It counts once in the norm, at its first home, and all homes make the same update.

use super::arena::{Arena, Home, OnWire, Part, Turned};
use super::passes::Body;
use super::stage::Stage;
use crate::memory::on_wire;
use dplan_ir::entity::BufferId;
use dplan_ir::mesh::AxisSet;
use dplan_ir::plan::Clip;
use dplan_ir::program::{Bucket, Instr, Pattern, Role, Scalar, Stream, Updates};
use dplan_ir::sharding::Monoid;

/// The scalar that a squared norm accumulates in, if the plan needs one.
pub(super) fn norm_scalar(stage: Stage<'_>) -> Option<Scalar> {
    match stage.plan.clip {
        Clip::None => None,
        Clip::GlobalNorm => Some(Scalar::NormSquared),
    }
}

/// After the backward pass of a layer: gradients of this micro-batch from the ring to where they are added up; after the last, sums that are there.
pub(super) fn turn(body: &mut Body<'_>, layer: usize, is_last: bool) {
    let arena = body.arena;
    for &Turned { home: at, part, sum } in &arena.layers[layer].turned {
        let home = &arena.homes[at];
        let whole = (part.whole, home.roles[&Role::Grad]);
        let (src, dst) = match sum {
            Some(sum) => {
                scatter(body, layer, at, part);
                body.issue(Stream::Comm, Instr::AddInto { src: part.own, dst: sum });
                (sum, home.own_grad)
            }
            None if is_last && home.layers[0] == layer => {
                summed(body, layer, at, part);
                // Of a scattered sum this rank has its own piece alone.
                if home.zero.0 == 1 { (part.own, home.own_grad) } else { whole }
            }
            None => whole,
        };
        if home.staged.contains_key(&Role::Grad) {
            body.issue(Stream::Copy, Instr::Copy { src, dst });
        }
    }
    // What is exchanged through the turn is done with it before the next layer's parameters come.
    if is_last && !arena.layers[layer].wires.is_empty() {
        resident(body, layer);
    }
}

/// After the last backward pass of a layer, and after the gathers that follow its turn.
pub(super) fn reduce(body: &mut Body<'_>, layer: usize) {
    if body.arena.layers[layer].wires.is_empty() {
        resident(body, layer);
    }
}

/// The buckets whose gradients are not in the ring and that no other layer of the stage still adds to.
fn resident(body: &mut Body<'_>, layer: usize) {
    let arena = body.arena;
    for &at in arena.layers[layer].homes.iter().filter(|&&h| arena.homes[h].layers[0] == layer) {
        let home = &arena.homes[at];
        if !home.staged.contains_key(&Role::Grad) {
            summed(body, layer, at, home.worked(Role::Grad));
        }
    }
}

/// Gradients that are complete on this rank, to what ZeRO 0 and 1 make of them.
fn summed(body: &mut Body<'_>, layer: usize, at: usize, grad: Part) {
    let home = &body.arena.homes[at];
    let bucket = bucket(body.arena, home);
    match (home.zero.0, body.arena.layers[layer].wires.get(&at)) {
        (0, Some(wire)) => {
            scatter(body, layer, at, grad);
            if wire.sum != grad.whole {
                body.flat(Pattern::AllGather, home.data, wire.sum, grad.whole);
            }
        }
        (0, None) if bucket.tied.is_empty() => reduced(body, at, grad.whole),
        (1, _) => scatter(body, layer, at, grad),
        _ => {}
    }
}

/// The sum over data-parallel ranks, of which each gets its piece; of compressed gradients at ZeRO 0 all of it.
fn scatter(body: &mut Body<'_>, layer: usize, at: usize, grad: Part) {
    let data = body.arena.homes[at].data;
    match body.arena.layers[layer].wires.get(&at) {
        None => through(body, Pattern::ReduceScatter, at, grad.whole, grad.own),
        Some(&OnWire { own: Some(own), residual: Some(residual), shares, sum }) => {
            body.issue(Stream::Comm, Instr::Compress { src: grad.whole, residual, dst: own });
            body.flat(Pattern::AllGather, data, own, shares);
            body.issue(Stream::Comm, Instr::SumShares { src: shares, dst: sum });
        }
        Some(&OnWire { own, shares, sum, .. }) => {
            if let Some(own) = own {
                body.issue(Stream::Comm, Instr::Cast { src: grad.whole, dst: own });
            }
            body.flat(Pattern::AllToAll, data, own.unwrap_or(grad.whole), shares);
            body.issue(Stream::Comm, Instr::SumShares { src: shares, dst: sum });
        }
    }
}

/// The sum over everything that is pending, of which each rank gets all: scattered by all steps but the last, reduced, and gathered back.
fn reduced(body: &mut Body<'_>, at: usize, whole: BufferId) {
    let (arena, home) = (body.arena, &body.arena.homes[at]);
    let before: &[AxisSet] = home.steps.split_last().map_or(&[], |(_, before)| before);
    let between: &[BufferId] = arena.between.get(&whole).map_or(&[], |b| b);
    let scattered = before.iter().fold(AxisSet::EMPTY, |all, &step| all.union(step));
    let stops: Vec<BufferId> = std::iter::once(whole).chain(between.iter().copied()).collect();
    for (pair, &step) in stops.windows(2).zip(before) {
        body.flat(Pattern::ReduceScatter, step, pair[0], pair[1]);
    }
    let last = stops[before.len()];
    body.flat(Pattern::AllReduce, bucket(arena, home).partial.minus(scattered), last, last);
    for (pair, &step) in stops.windows(2).zip(before).rev() {
        body.flat(Pattern::AllGather, step, pair[1], pair[0]);
    }
}

/// From all of a bucket to this rank's piece, by the steps of its exchange; or back.
fn through(body: &mut Body<'_>, pattern: Pattern, at: usize, whole: BufferId, own: BufferId) {
    let (arena, home) = (body.arena, &body.arena.homes[at]);
    let between: &[BufferId] = arena.between.get(&whole).map_or(&[], |b| b);
    let stops: Vec<BufferId> = std::iter::once(whole).chain(between.iter().copied()).chain([own]).collect();
    let steps = stops.windows(2).zip(&home.steps);
    match pattern {
        Pattern::AllGather => steps.rev().for_each(|(pair, &step)| body.flat(pattern, step, pair[1], pair[0])),
        Pattern::ReduceScatter | Pattern::AllReduce | Pattern::AllToAll | Pattern::Shift => {
            steps.for_each(|(pair, &step)| body.flat(pattern, step, pair[0], pair[1]));
        }
    }
}

/// Parameters from everybody's pieces.
pub(super) fn gather(body: &mut Body<'_>, at: usize, own: BufferId, whole: BufferId) {
    through(body, Pattern::AllGather, at, whole, own);
}

/// What follows the last backward pass, or each where each micro-batch has an update of its own.
pub(super) fn update(body: &mut Body<'_>) {
    let (arena, master) = (body.arena, body.stage.types().master());
    let mut offloaded = arena.homes.iter().filter(|h| !h.staged.is_empty());
    // Where gradients come in before the update, the ring is theirs until they are done.
    let is_early = arena.homes.iter().all(|h| !h.staged.contains_key(&Role::Grad));
    if is_early {
        offloaded.by_ref().take(2).for_each(|home| copy_in(body, home));
    }
    match body.stage.updates() {
        Updates::Step => loss(body),
        Updates::MicroBatch => {}
    }
    pending(body);
    let scale = norm(body);
    if !is_early {
        offloaded.by_ref().take(2).for_each(|home| copy_in(body, home));
    }
    // Before any parameters are gathered, which later sums would have to wait for; offloaded states come one after another.
    arena.homes.iter().filter(|h| h.staged.is_empty()).for_each(|home| trust_sums(body, home, scale));
    for (at, home) in arena.homes.iter().enumerate() {
        if !home.staged.is_empty() {
            trust_sums(body, home, scale);
        }
        let param = (master != Role::Param).then(|| home.worked(Role::Param).own);
        let (state, grad, trust) = (home.worked(master).own, home.worked(Role::Grad).own, home.trust);
        body.issue(Stream::Compute, Instr::Update { state, grad, moments: moments(home), param, scale, trust });
        let Part { whole, own } = home.worked(Role::Param);
        if !home.staged.contains_key(&Role::Param) {
            copy_out(body, home);
        }
        if whole != own {
            gather(body, at, own, whole);
        }
        if home.staged.contains_key(&Role::Param) {
            copy_out(body, home);
        }
        if !home.staged.is_empty() {
            offloaded.next().into_iter().for_each(|next| copy_in(body, next));
        }
    }
}

fn moments(home: &Home) -> Vec<BufferId> {
    [Role::Moment1, Role::Moment2].into_iter().filter(|r| home.roles.contains_key(r)).map(|role| home.worked(role).own).collect()
}

/// What trust ratios are of, over all that a parameter is cut up over: for the next kernel, so it is met on the stream of kernels.
fn trust_sums(body: &mut Body<'_>, home: &Home, scale: Option<BufferId>) {
    let master = body.stage.types().master();
    let Some(dst) = home.trust else { return };
    let (state, grad) = (home.worked(master).own, home.worked(Role::Grad).own);
    body.issue(Stream::Compute, Instr::TrustSums { state, grad, moments: moments(home), scale, dst });
    let axes = split(body.arena, home);
    if !axes.is_empty() {
        let sum = Instr::Collective { pattern: Pattern::AllReduce, axes, stages: Vec::new(), dim: 0, monoid: Monoid::Sum, src: dst, dst };
        body.issue(Stream::Compute, sum);
    }
}

/// Offloaded states to where the update finds them; parameters only where it reads them.
fn copy_in(body: &mut Body<'_>, home: &Home) {
    let master = body.stage.types().master();
    for (&role, part) in home.staged.iter().filter(|(role, _)| **role != Role::Param || master == Role::Param) {
        body.issue(Stream::Copy, Instr::Copy { src: home.own(role), dst: part.own });
    }
}

/// What the update changed, back to where it lives.
fn copy_out(body: &mut Body<'_>, home: &Home) {
    for (role, part) in home.staged.iter().filter(|(role, _)| **role != Role::Grad) {
        body.issue(Stream::Copy, Instr::Copy { src: part.whole, dst: home.roles[role] });
    }
}

/// This rank's part of the gradients, copied in if it is elsewhere.
fn own_grad(body: &mut Body<'_>, home: &Home) -> BufferId {
    let grad = home.worked(Role::Grad).own;
    if grad != home.own_grad {
        body.issue(Stream::Copy, Instr::Copy { src: home.own_grad, dst: grad });
    }
    grad
}

/// The loss is a sum over the ranks of the last stage.
pub(super) fn loss(body: &mut Body<'_>) {
    let form = body.stage.layers.iter().find_map(|l| l.loss.map(|f| &l.forms[f]));
    if let Some(form) = form {
        let buffer = body.arena.scalars[&Scalar::Loss];
        body.flat(Pattern::AllReduce, form.sharding.partial, buffer, buffer);
    }
}

/// What the backward pass left pending.
fn pending(body: &mut Body<'_>) {
    let arena = body.arena;
    for home in &arena.homes {
        let bucket = bucket(arena, home);
        // At ZeRO 0 a shared parameter has not been summed at all, others have completely; what was rounded for it has been over data-parallel ranks alone.
        let axes = match home.zero.0 {
            0 if goes_by_wire(body, home) => bucket.partial.minus(home.data),
            0 if bucket.tied.is_empty() => continue,
            0 => bucket.partial,
            _ => bucket.partial.minus(home.data),
        };
        if axes.is_empty() && bucket.tied.is_empty() {
            continue;
        }
        let grad = own_grad(body, home);
        body.flat_across(Pattern::AllReduce, axes, bucket.tied.clone(), grad, grad);
        if grad != home.own_grad {
            body.issue(Stream::Copy, Instr::Copy { src: grad, dst: home.own_grad });
        }
    }
}

/// The clip factor: each gradient element counts once, on one of the ranks that hold it.
fn norm(body: &mut Body<'_>) -> Option<BufferId> {
    let (arena, stage) = (body.arena, body.stage);
    let (norm, scale) = (arena.scalars[&norm_scalar(stage)?], arena.scalars[&Scalar::ClipScale]);
    for home in &arena.homes {
        let bucket = bucket(arena, home);
        if bucket.tied.first().is_none_or(|&first| first == stage.index) {
            let src = own_grad(body, home);
            body.issue(Stream::Compute, Instr::SquareSum { src, dst: norm, once: stage.axes().minus(split(arena, home)) });
        }
    }
    let stages = if stage.stages() > 1 { (0..stage.stages()).collect() } else { Vec::new() };
    body.flat_across(Pattern::AllReduce, stage.axes(), stages, norm, norm);
    body.issue(Stream::Compute, Instr::ClipScale { src: norm, dst: scale });
    Some(scale)
}

/// The axes over which ranks update different elements of a home's parameters.
fn split(arena: &Arena, home: &Home) -> AxisSet {
    let pieces = if home.zero.0 == 0 { AxisSet::EMPTY } else { home.data };
    bucket(arena, home).members[0].sharding.sharded().union(pieces)
}

/// Whether each rank sends every other its piece of the gradients.
fn goes_by_wire(body: &Body<'_>, home: &Home) -> bool {
    on_wire(bucket(body.arena, home).elems, body.stage.mesh().size(home.data), body.stage.types()).is_some()
}

fn bucket<'a>(arena: &'a Arena, home: &Home) -> &'a Bucket {
    &arena.program.buckets[home.bucket]
}
