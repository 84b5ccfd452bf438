//! Gradients to their sum, the sum to the optimizer, parameters back to everybody.
//!
//! | ZeRO | each micro-batch | after the last | update | then |
//! |---|---|---|---|---|
//! | 0 | | all-reduce | all | |
//! | 1 | | reduce-scatter in place | own piece | all-gather in place |
//! | 2 | reduce-scatter in the ring, add to own piece | | own piece | all-gather in place |
//! | 3 | the same | | own piece | |
//!
//! States that are offloaded come in and go out on the copy stream: those of the first two buckets come in at the start of the update, those of the next but one when
//! their turn of the ring is free.
//!
//! LAMB's update comes in two halves: sums over this rank's elements of each parameter and of its direction, which are added over the axes that cut the parameters
//! up and no others (ranks that hold the same elements have the same sums, all homes of a tied parameter too), then the step.
//!
//! Where only pieces are summed, what is still pending over tensor-parallel axes comes at the start of the update: the compute stream, on which those ranks
//! talk, would else wait for the scatter in the midst of the backward pass. A parameter with homes on several stages is summed over them there too: every stage
//! has then done all its passes, so nobody waits in the midst of them. It counts once in the norm, at its first home, and all homes make the same update.

use super::arena::{Arena, Home};
use super::passes::Body;
use super::stage::Stage;
use dplan_ir::entity::BufferId;
use dplan_ir::mesh::AxisSet;
use dplan_ir::plan::Clip;
use dplan_ir::program::{Bucket, Instr, Pattern, Role, Scalar, Stream};

/// The scalar that a squared norm accumulates in, if the plan needs one.
pub(super) fn norm_scalar(stage: Stage<'_>) -> Option<Scalar> {
    match stage.plan.clip {
        Clip::None => None,
        Clip::GlobalNorm => Some(Scalar::NormSquared),
    }
}

/// After the backward pass of a layer: gradients of this micro-batch from the ring into this rank's piece.
pub(super) fn scatter(body: &mut Body<'_>, layer: usize) {
    let arena = body.arena;
    for turned in &arena.layers[layer].scattered {
        let home = &arena.homes[turned.home];
        body.flat(Pattern::ReduceScatter, home.data, turned.whole, turned.piece);
        body.issue(Stream::Comm, Instr::AddInto { src: turned.piece, dst: home.own_grad });
    }
}

/// After the last backward pass of a layer: the buckets that no other layer of the stage still adds to.
pub(super) fn reduce(body: &mut Body<'_>, layer: usize) {
    let arena = body.arena;
    for home in arena.layers[layer].homes.iter().map(|&h| &arena.homes[h]).filter(|h| h.layers[0] == layer) {
        let bucket = bucket(arena, home);
        let grad = home.roles[&Role::Grad];
        match home.zero.0 {
            0 if bucket.tied.is_empty() => body.flat(Pattern::AllReduce, bucket.partial, grad, grad),
            1 => body.flat(Pattern::ReduceScatter, home.data, grad, home.own_grad),
            _ => {}
        }
    }
}

/// What follows the last backward pass.
pub(super) fn update(body: &mut Body<'_>) {
    let arena = body.arena;
    let mut offloaded = arena.homes.iter().filter(|h| !h.staged.is_empty());
    offloaded.by_ref().take(2).for_each(|home| copy_in(body, home));
    loss(body);
    pending(body);
    let scale = norm(body);
    for home in &arena.homes {
        let types = body.stage.types();
        let at = |role: Role| home.staged.get(&role).or(home.roles.get(&role)).copied();
        let state = if types.master() == Role::Param { Some(home.own_param) } else { at(types.master()) };
        let param = (types.master() != Role::Param).then_some(home.own_param);
        let moments: Vec<BufferId> = [Role::Moment1, Role::Moment2].into_iter().filter_map(at).collect();
        let (state, grad, trust) = (state.unwrap_or(home.own_param), home.own_grad, home.trust);
        if let Some(dst) = trust {
            body.issue(Stream::Compute, Instr::TrustSums { state, grad, moments: moments.clone(), scale, dst });
            body.flat(Pattern::AllReduce, split(arena, home), dst, dst);
        }
        body.issue(Stream::Compute, Instr::Update { state, grad, moments, param, scale, trust });
        if !home.staged.is_empty() {
            home.staged.iter().for_each(|(role, &src)| body.issue(Stream::Copy, Instr::Copy { src, dst: home.roles[role] }));
            offloaded.next().into_iter().for_each(|next| copy_in(body, next));
        }
        let whole = home.roles[&Role::Param];
        if whole != home.own_param {
            body.flat(Pattern::AllGather, home.data, home.own_param, whole);
        }
    }
}

/// Offloaded states to where the update finds them.
fn copy_in(body: &mut Body<'_>, home: &Home) {
    home.staged.iter().for_each(|(role, &dst)| body.issue(Stream::Copy, Instr::Copy { src: home.roles[role], dst }));
}

/// The loss is a sum over the ranks of the last stage.
fn loss(body: &mut Body<'_>) {
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
        // At ZeRO 0 a shared parameter has not been summed at all, others have completely.
        let axes = match home.zero.0 {
            0 if bucket.tied.is_empty() => continue,
            0 => bucket.partial,
            _ => bucket.partial.minus(home.data),
        };
        body.flat_across(Pattern::AllReduce, axes, bucket.tied.clone(), home.own_grad, home.own_grad);
    }
}

/// The clip factor: each gradient element counts once, on one of the ranks that hold it.
fn norm(body: &mut Body<'_>) -> Option<BufferId> {
    let (arena, stage) = (body.arena, body.stage);
    let (norm, scale) = (arena.scalars[&norm_scalar(stage)?], arena.scalars[&Scalar::ClipScale]);
    for home in &arena.homes {
        let bucket = bucket(arena, home);
        if bucket.tied.first().is_none_or(|&first| first == stage.index) {
            body.issue(Stream::Compute, Instr::SquareSum { src: home.own_grad, dst: norm, once: stage.axes().minus(split(arena, home)) });
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

fn bucket<'a>(arena: &'a Arena, home: &Home) -> &'a Bucket {
    &arena.program.buckets[home.bucket]
}
