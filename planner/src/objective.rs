//! The objective: one function of a plan, in whole nanoseconds, and how each layer adds to it.
//!
//! ```text
//! T = Σ_s u_s + max_s (m · t_s − u_s) + max_s e_s + c      gpipe, 1f1b, pipedream, where u = t
//! T = Σ_s u_s + max_s (m · t_s − u_s + e_s) + c            interleaved, zb-h1, zb-v
//! t_s = Σ_layers t(option, zero) + messages over the borders behind its virtual stages, both ways
//! e_s = Σ_layers e(option, zero)
//! ```
//! with `m` micro-batches, over all layers of a stage, whichever of its virtual stages they are on. `t` is what a micro-batch costs, `e` what the end of the step costs, `c`
//! the reduction of loss and gradient norm. The *ramp* `u` is what a stage makes the others wait for while the pipeline fills and drains. Of a layer with forward `f`,
//! backward `b` (where it is parted: input half `b`, weight half `w`), and of messages `x` both ways, on `v` virtual stages a stage:
//!
//! ```text
//! gpipe, 1f1b    u = f + b                          u(x) = x; so pipedream
//! interleaved    u = (f + b) / v                    u(x) = x / v
//! zb-h1          u = max(f + b − w, f, b)           u(x) = x
//! zb-v           u = max(f / 2, b / 2, b − w)       u(x) = x / 2
//! ```
//! rounded up. For balanced virtual stages `T` is the makespan of the schedule (zb-v: where `f ≤ b` and `w ≤ b`). For 1f1b it bounds the longest path from above where
//! all stages share one ratio of backward to forward time; where ratios differ, as with recompute on some stages, the path can be a little longer, and so it can where the
//! virtual stages of a stage differ. [`crate::simulate`] has the path itself, as a second number, with its bounds; tests hold the two together.
//!
//! A search adds up two numbers ([`StageTime`]) and does not know which schedule they are of: `T = Σ time + (n − 1) · max time + max end + c`, with `t`, `e` and `n = m` for
//! gpipe and 1f1b, and `u`, `m · t − u + e` and `n = 1` for the others.
//!
//! Of one layer with forward `f` and backward `b`, parameters `P` and gradients `G` (bytes of its buckets on one rank), over the ranks along data axes:
//!
//! ```text
//! t = f + b                                                            ZeRO 0, 1
//! t = f + (b ∥ scatter(G)) + add(G/dp)                                 ZeRO 2
//! t = (f ∥ gather(P)) + (b ∥ gather(P) + scatter(G)) + add(G/dp)       ZeRO 3
//! e = (b ∥ reduce(G)) − b + update                                     ZeRO 0
//! e = (b ∥ scatter(G) + rest(G/dp)) − b + (update ∥ gather(P))         ZeRO 1
//! e = rest(G/dp) + (update ∥ gather(P))                                ZeRO 2
//! e = rest(G/dp) + update                                              ZeRO 3
//! ```
//! Where states are offloaded, they are copied in and out beside the update, one after another, and with the gather if there is one:
//! `update ∥ copy` for `update`, `update ∥ (gather(P) + copy)` for `update ∥ gather(P)`. There masters and moments go both ways; parameters come in where they are
//! masters, and go out; gradients go out cleared when the step begins, come in for the norm and for the update, and both ways where they are summed in between. In passes offloaded
//! parameters come in beside `f` and `b`, or `f` alone if no backward pass reads them (`gather(P)` likewise: an embedding's), and gradients in and out beside `b`, together with what is gathered and scattered there. Pieces are priced as all of a role.
//! An offloaded frame goes out beside `f` and comes in beside `b`.
//!
//! A parted backward pass hides the reduction beside its weight half alone: `w` stands in the place of `b` in `e`. It has ZeRO 0 or 1.
//!
//! Where each micro-batch has an update of its own (pipedream), `e` is a part of `t`, and with it the time of putting parameters by for a backward pass (on every stage of several, as if
//! the last did too): only the loss is left for the end of the step.
//!
//! `rest` sums what tensor parallelism left partial; `update` streams gradients, states and parameters through memory, once more for the norm. LAMB's trust ratios
//! come before it, beside nothing: states and gradients are read once more, and a small reduction follows.
//! `x ∥ y = max(x, y) + 20 % · min(x, y)`: traffic beside compute is never free. A layer hides its own traffic and no more, so terms add up whatever the
//! neighbours do, and a stage is a bag of layers.
//!
//! A parameter tied over several layers is synchronised and updated once in a stage. If its homes are on several stages, its gradient is summed over these
//! when all passes are done, beside nothing (at ZeRO 0 the whole sum is done then).

use crate::memory::{
    BucketSize, LOOKS, LayerBytes, StateTypes, Turn, away, bucket_elems, in_pieces, on_wire, role_bytes, state_bytes, trust_bytes, turn,
};
use crate::placement::Site;
use crate::prices::Links;
use crate::units::Nanos;
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::pipeline::Pipeline;
use dplan_ir::plan::{Clip, Schedule, States, Store, Zero};
use dplan_ir::program::{Pattern, Role, Space, Updates};

/// Part of hidden traffic that still costs time: copies and reductions of a collective take memory bandwidth and cores from the compute they overlap.
/// Allowance, in percent: Hetu-Galvatron's profiles of NCCL beside compute have coefficients of 1.1 to 1.3.
pub const INTERFERENCE_PERCENT: u64 = 20;

/// Time of compute and traffic issued side by side.
pub fn beside(compute: u64, traffic: u64) -> u64 {
    compute.max(traffic) + (compute.min(traffic) * INTERFERENCE_PERCENT).div_ceil(100)
}

/// What a stage, or a part of one, adds to the objective.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct StageTime {
    /// Counts once for every stage, and again for the slowest.
    pub time: u64,
    /// Counts for the stage that has most of it.
    pub end: u64,
}

impl std::ops::Add for StageTime {
    type Output = StageTime;
    fn add(self, other: StageTime) -> StageTime {
        StageTime { time: self.time + other.time, end: self.end + other.end }
    }
}

impl std::ops::Sub for StageTime {
    type Output = StageTime;
    fn sub(self, other: StageTime) -> StageTime {
        StageTime { time: self.time - other.time, end: self.end - other.end }
    }
}

impl std::iter::Sum for StageTime {
    fn sum<I: Iterator<Item = StageTime>>(items: I) -> StageTime {
        items.fold(StageTime::default(), |a, b| a + b)
    }
}

/// How often the slowest stage's `time` counts.
pub fn repeats(pipeline: &Pipeline) -> u64 {
    match pipeline.schedule {
        Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => pipeline.micro_batches,
        Schedule::Interleaved | Schedule::ZbH1 | Schedule::ZbV => 1,
    }
}

/// What a layer adds.
pub fn share(pipeline: &Pipeline, layer: &LayerTerms) -> StageTime {
    let &LayerTerms { forward: f, time, weight: w, end, .. } = layer;
    let b = time - f - w;
    let ramp = match pipeline.schedule {
        Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => time,
        Schedule::Interleaved => time.div_ceil(pipeline.virtual_stages),
        Schedule::ZbH1 => (f + b).saturating_sub(w).max(f).max(b),
        Schedule::ZbV => f.max(b).div_ceil(2).max(b.saturating_sub(w)),
    };
    ramped(pipeline, ramp, time, end)
}

/// What messages over a border add, that take so long both ways.
pub fn border(pipeline: &Pipeline, messages: u64) -> StageTime {
    ramped(pipeline, messages.div_ceil(pipeline.virtual_stages), messages, 0)
}

fn ramped(pipeline: &Pipeline, ramp: u64, time: u64, end: u64) -> StageTime {
    match pipeline.schedule {
        Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => StageTime { time, end },
        Schedule::Interleaved | Schedule::ZbH1 | Schedule::ZbV => StageTime { time: ramp, end: pipeline.micro_batches * time - ramp + end },
    }
}

/// The objective of a plan whose stages add this.
pub fn total(stages: &[StageTime], pipeline: &Pipeline, constant: u64) -> u64 {
    let slowest = stages.iter().map(|s| s.time).max().unwrap_or(0);
    let end = stages.iter().map(|s| s.end).max().unwrap_or(0);
    stages.iter().map(|s| s.time).sum::<u64>() + (repeats(pipeline) - 1) * slowest + end + constant
}

/// What all layers of a tuple on one site share.
pub struct Terms<'a> {
    pub links: &'a dyn Links,
    /// Where they run.
    pub site: Site,
    /// Of a stage.
    pub mesh: &'a Mesh,
    pub types: StateTypes,
    pub clip: Clip,
    pub pipeline: Pipeline,
}

/// What a layer with these buckets takes at least, however its gradients get to their sum: all of these are alike but for that, and at least one.
pub fn least_sync(ways: &[Terms<'_>], bytes: &LayerBytes, states: States, home: Home) -> LayerSync {
    let (first, others) = ways.split_first().expect("a way of summing gradients");
    others.iter().fold(first.sync(bytes, states, home), |least, terms| least.least(terms.sync(bytes, states, home)))
}

/// How the homes of a tied parameter lie, as seen from one of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Home {
    /// All on this stage, and this is the first; or the layer has no tied parameter.
    Together,
    /// An earlier layer of this stage is one.
    Repeated,
    /// Some are on other stages; this is the first here.
    Apart,
}

impl Home {
    pub const ALL: [Home; 3] = [Home::Together, Home::Repeated, Home::Apart];
}

/// What a layer adds to its stage: times and bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerTerms {
    /// Of `time`: the forward pass.
    pub forward: u64,
    /// Nanoseconds of each micro-batch.
    pub time: u64,
    /// Of `time`: the weight half of a parted backward pass.
    pub weight: u64,
    /// Nanoseconds at the end of a step.
    pub end: u64,
    /// Bytes of parameters, gradients and optimizer states.
    pub states: u64,
    /// Bytes of two turns of the ring.
    pub ring: u64,
}

/// Traffic, streaming and states of a layer's buckets, whatever its compute takes; by default of a layer without parameters.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerSync {
    zero: Zero,
    every: Traffic,
    once: Traffic,
    reads_back: bool,
    states: u64,
    turn: Turn,
    /// An offloaded frame: its bytes, and nanoseconds one way.
    frame: (u64, u64),
    updates: Updates,
    /// Nanoseconds of putting parameters by for a micro-batch's backward pass.
    stash: u64,
}

/// Nanoseconds of a group of buckets.
#[derive(Clone, Copy, Debug, Default)]
struct Traffic {
    /// Gathering parameters once, over data-parallel ranks.
    gather: u64,
    /// Reducing gradients over data-parallel ranks: scatter or all-reduce, by ZeRO stage; where they go piece by piece, exchange and gather.
    reduce: u64,
    /// Reducing what the tensor-parallel axes left partial, after a scatter.
    rest: u64,
    /// Summing a tied parameter over stages, once all passes are done.
    late: u64,
    /// What kernels do about it: rounding, adding up shares, adding a scattered piece to the gradients.
    add: u64,
    update: u64,
    /// Summing up for trust ratios, before the update.
    trust: u64,
    /// Offloaded states to the device and back, in the update.
    copy: u64,
    /// Offloaded parameters to the device, in a pass.
    fetch: u64,
    /// Offloaded gradients to the device and back, in a pass.
    carry: u64,
}

impl Traffic {
    /// Of gathering parameters, scattering gradients and adding them up, what each micro-batch has.
    fn in_passes(&self, zero: Zero) -> (u64, u64, u64) {
        match zero.0 {
            0 | 1 => (0, 0, 0),
            2 => (0, self.reduce, self.add),
            _ => (self.gather, self.reduce, self.add),
        }
    }
}

impl Traffic {
    /// Of each quantity the less.
    fn least(self, other: Traffic) -> Traffic {
        let Traffic { gather, reduce, rest, late, add, update, trust, copy, fetch, carry } = other;
        Traffic {
            gather: self.gather.min(gather),
            reduce: self.reduce.min(reduce),
            rest: self.rest.min(rest),
            late: self.late.min(late),
            add: self.add.min(add),
            update: self.update.min(update),
            trust: self.trust.min(trust),
            copy: self.copy.min(copy),
            fetch: self.fetch.min(fetch),
            carry: self.carry.min(carry),
        }
    }
}

impl LayerSync {
    /// Of each quantity the less: what two ways of summing the same buckets' gradients both take at least, since times and bytes of a layer rise with every quantity.
    pub fn least(self, other: LayerSync) -> LayerSync {
        let (every, once) = (self.every.least(other.every), self.once.least(other.once));
        LayerSync {
            every,
            once,
            states: self.states.min(other.states),
            turn: self.turn.least(other.turn),
            stash: self.stash.min(other.stash),
            ..self
        }
    }

    /// What a layer with these buckets adds, if its passes take so long.
    pub fn terms(&self, forward: Nanos, backward: Nanos) -> LayerTerms {
        let (f, b, every) = (forward.0, backward.0, &self.every);
        let (gather, reduce, add) = every.in_passes(self.zero);
        let (comes, frame) = (gather + every.fetch, self.frame.1);
        let forward = beside(f, comes + frame);
        let backward = beside(b, if self.reads_back { comes } else { 0 } + reduce + every.carry + frame) + add;
        let (time, end) = match self.updates {
            Updates::Step => (forward + backward, self.end(b)),
            Updates::MicroBatch => (forward + backward + self.end(b) + self.stash, 0),
        };
        LayerTerms { forward, time, weight: 0, end, states: self.states, ring: self.ring() }
    }

    /// The same layer with an offloaded frame of so many bytes, whose copy one way takes so long.
    pub fn storing(self, frame: u64, copy: Nanos) -> LayerSync {
        LayerSync { frame: (frame, copy.0), ..self }
    }

    /// Two turns.
    fn ring(&self) -> u64 {
        2 * self.turn.bytes(self.frame.0)
    }

    /// The same with a backward pass in halves, at ZeRO 0 or 1.
    pub fn parted(&self, forward: Nanos, input: Nanos, weight: Nanos) -> LayerTerms {
        let (forward, time, weight) = (forward.0, forward.0 + input.0 + weight.0, weight.0);
        LayerTerms { forward, time, weight, end: self.end(weight), states: self.states, ring: self.ring() }
    }

    /// The end of a step, reductions hidden beside what the last backward pass computes.
    fn end(&self, b: u64) -> u64 {
        self.end_with(b, self.once.copy)
    }

    fn end_with(&self, b: u64, copy: u64) -> u64 {
        let once = &self.once;
        let end = match self.zero.0 {
            0 => beside(b, once.reduce + once.rest) - b + once.add + beside(once.update, copy),
            1 => beside(b, once.reduce + once.rest) - b + once.add + beside(once.update, once.gather + copy),
            2 => once.rest + beside(once.update, once.gather + copy),
            _ => once.rest + beside(once.update, copy),
        };
        end + once.late + once.trust
    }

    /// Nanoseconds by which offloading makes the end of the step longer.
    pub fn offload(&self) -> u64 {
        self.end_with(0, self.once.copy) - self.end_with(0, 0)
    }

    /// The least time of a micro-batch whose passes take so long together, however it is shared out between them: what is hidden beside one pass counts as if it could
    /// hide beside both.
    ///
    /// ```text
    /// x ∥ y + x' ∥ y' ≥ (x + x') ∥ (y + y')
    /// ```
    /// for `x ∥ y = ⌈g(x, y)⌉` with `g = max(x + y / 5, x / 5 + y)`: of two linear functions the greater is subadditive, and `⌈a⌉ + ⌈b⌉ ≥ ⌈a + b⌉`. Where only one pass
    /// has traffic, as at ZeRO 2, `x ∥ 0 + x' ∥ y` is as little as this when all of the time is that pass's, so no greater bound holds.
    pub fn least_time(&self, passes: u64) -> u64 {
        let (gather, reduce, add) = self.every.in_passes(self.zero);
        let comes = (1 + u64::from(self.reads_back)) * (gather + self.every.fetch);
        beside(passes, comes + reduce + self.every.carry + 2 * self.frame.1) + add
    }

    /// Bytes of parameters, gradients and optimizer states that are not offloaded.
    pub fn states(&self) -> u64 {
        self.states
    }

    /// Nanoseconds more if gradients wait for the end of the backward pass and parameters are sent to all ranks at the start of the step.
    pub fn blocking(&self, backward: Nanos) -> u64 {
        let hidden = backward.0 + self.once.reduce - beside(backward.0, self.once.reduce);
        hidden + self.once.gather
    }

    /// Nanoseconds of the optimizer's own work in one update, sums for trust ratios and parameters put by included.
    pub fn update(&self) -> u64 {
        self.once.update + self.once.trust + self.stash
    }
}

impl Terms<'_> {
    /// What does not depend on how long a layer computes.
    pub fn sync(&self, bytes: &LayerBytes, states: States, home: Home) -> LayerSync {
        // Every use of a tied parameter has its per-micro-batch traffic; the end of the step and the states come once in a stage.
        let counted = |bucket: &&BucketSize| home != Home::Repeated || !bucket.tied;
        let every = bytes.buckets.iter().fold(Traffic::default(), |sum, bucket| self.bucket(sum, bucket, states, home));
        let once = match bytes.buckets.iter().all(|b| counted(&b)) {
            true => every,
            false => bytes.buckets.iter().filter(counted).fold(Traffic::default(), |sum, bucket| self.bucket(sum, bucket, states, home)),
        };
        LayerSync {
            zero: states.zero,
            every,
            once,
            reads_back: bytes.reads_back,
            states: bytes.buckets.iter().filter(counted).map(|b| state_bytes(b, self.mesh, states, self.types)[Space::Device as usize]).sum(),
            turn: turn(bytes, self.mesh, states, self.types),
            frame: (0, 0),
            updates: self.pipeline.schedule.updates(),
            // Read and written; the last stage puts nothing by, but layers are priced alike on all.
            stash: match self.pipeline.slots(0)[0].versions {
                0 => 0,
                _ => self.links.sweep(self.site, 2 * bytes.version(self.mesh, self.types)).0,
            },
        }
    }

    /// Time of an offloaded frame one way; none has nothing to copy.
    pub fn frame(&self, bytes: u64, store: Store) -> Nanos {
        if bytes == 0 { Nanos(0) } else { self.links.copy(self.site, store, bytes) }
    }

    /// A layer's synchronisation, with its frame where it lives.
    pub fn storing(&self, sync: LayerSync, frame: u64, activations: Option<Store>) -> LayerSync {
        activations.map_or(sync, |store| sync.storing(frame, self.frame(frame, store)))
    }

    /// Adds a bucket's traffic to a sum.
    fn bucket(&self, sum: Traffic, bucket: &BucketSize, states: States, home: Home) -> Traffic {
        let zero = states.zero;
        let data = bucket.data(self.mesh);
        let ways = self.mesh.size(data);
        let whole = bucket_elems(bucket.elems, ways);
        let bytes = |role: Role| whole * self.types.dtype(role).size();
        let grads = bytes(Role::Grad);
        let kept = if zero.0 >= 1 { grads / ways } else { grads };
        let over = |axes, pattern, bytes| self.links.collective(self.site, self.mesh, axes, pattern, bytes).0;
        let steps = self.types.sync.steps(self.mesh, data);
        let apart = bucket.tied && home == Home::Apart;
        // Where the homes of a tied parameter are not on one stage, they are on two.
        let homes = 2.min(self.pipeline.stages);
        let over_stages = |axes, bytes| if apart { self.links.across_stages(self.mesh, axes, homes, bytes).0 } else { 0 };
        let wire = on_wire(bucket.elems, ways, self.types);
        let (reduce, rest, late) = match (zero.0, wire) {
            (0, None) if apart => (0, 0, over_stages(data.union(bucket.partial), grads)),
            // Without pieces, one all-reduce sums over everything that is pending.
            (0, None) => (self.reduced(&steps, bucket.partial, grads), 0, 0),
            _ => {
                let rest = over(bucket.partial, Pattern::AllReduce, kept);
                let scatter = match wire {
                    None => self.stepped(&steps, Pattern::ReduceScatter, grads),
                    Some(wire) if wire.kept.is_some() => over(data, Pattern::AllGather, wire.shares),
                    Some(wire) if wire.own > 0 => over(data, Pattern::AllToAll, wire.shares),
                    // Nothing is added up on the way, so it is no quicker than where something is.
                    Some(wire) => over(data, Pattern::AllToAll, wire.shares).max(over(data, Pattern::ReduceScatter, wire.shares)),
                };
                let back = if zero.0 == 0 && wire.is_some_and(|wire| wire.kept.is_none()) { over(data, Pattern::AllGather, grads) } else { 0 };
                (scatter + back, rest, over_stages(AxisSet::EMPTY, kept))
            }
        };
        let sweep = |bytes| self.links.sweep(self.site, bytes).0;
        let (add, clear) = if zero.0 >= 2 { (sweep(3 * kept), kept) } else { (0, grads) };
        // Gradients are read and rounded, if they are; shares are read and a piece is written, or of pairs at ZeRO 0 all.
        let rounding = wire.map_or(0, |wire| match wire.kept {
            Some(_) => sweep(LOOKS * grads + wire.own) + sweep(wire.shares + if zero.0 == 0 { grads } else { grads / ways }),
            None if wire.own > 0 => sweep(grads + wire.own) + sweep(wire.shares + grads / ways),
            None => sweep(wire.shares + grads / ways),
        });
        Traffic {
            gather: sum.gather + self.stepped(&steps, Pattern::AllGather, bytes(Role::Param)),
            reduce: sum.reduce + reduce,
            rest: sum.rest + rest,
            late: sum.late + late,
            add: sum.add + add + rounding,
            copy: sum.copy + self.copies(bucket, states, apart || (zero.0 >= 1 || wire.is_some()) && self.mesh.size(bucket.partial) > 1),
            fetch: sum.fetch + self.carried(bucket, states, Role::Param),
            carry: sum.carry + 2 * self.carried(bucket, states, Role::Grad),
            update: sum.update + self.links.sweep(self.site, self.update_bytes(bucket, zero) + clear).0,
            trust: sum.trust + self.trust(bucket, zero),
        }
    }

    /// Time of scattering so many bytes by these steps, or of gathering them backwards: each is over what those before it have left.
    fn stepped(&self, steps: &[AxisSet], pattern: Pattern, bytes: u64) -> u64 {
        let mut left = bytes;
        let step = |&axes: &AxisSet| {
            let time = self.links.collective(self.site, self.mesh, axes, pattern, left).0;
            left /= self.mesh.size(axes);
            time
        };
        steps.iter().map(step).sum()
    }

    /// Time of an all-reduce of so many bytes: scattered by all steps but the last, reduced in that and over what else they wait for, gathered back.
    fn reduced(&self, steps: &[AxisSet], besides: AxisSet, bytes: u64) -> u64 {
        let (last, before) = steps.split_last().map_or((AxisSet::EMPTY, steps), |(last, before)| (*last, before));
        let left = bytes / before.iter().map(|&axes| self.mesh.size(axes)).product::<u64>();
        let reduce = self.links.collective(self.site, self.mesh, last.union(besides), Pattern::AllReduce, left).0;
        self.stepped(before, Pattern::ReduceScatter, bytes) + reduce + self.stepped(before, Pattern::AllGather, bytes)
    }

    /// Time of the trust ratios of a bucket: its states and gradients are read once more, and a few sums go over the axes that cut the parameters up.
    fn trust(&self, bucket: &BucketSize, zero: Zero) -> u64 {
        if !self.types.optimizer.trusts() {
            return 0;
        }
        let (data, ways) = (bucket.data(self.mesh), bucket.ways(self.mesh));
        let whole = bucket_elems(bucket.elems, ways);
        let (elems, pieces) = if in_pieces(Role::Master, zero) { (whole / ways, data) } else { (whole, AxisSet::EMPTY) };
        let read = (2 + self.types.optimizer.moments() as u64) * elems * self.types.dtype(Role::Master).size();
        let sums = trust_bytes(bucket.members, self.types);
        let talk = self.links.collective(self.site, self.mesh, bucket.axes.union(pieces), Pattern::AllReduce, sums);
        self.links.sweep(self.site, read).0 + talk.0
    }

    /// Time of copying a bucket's offloaded states in and out around the update; `is_late`: gradients are summed there.
    fn copies(&self, bucket: &BucketSize, states: States, is_late: bool) -> u64 {
        let times = |role: Role| match role {
            Role::Param if self.types.master() != Role::Param => 1,
            Role::Param | Role::Master | Role::Moment1 | Role::Moment2 => 2,
            Role::Residual => 0,
            Role::Grad => 2 + u64::from(self.clip == Clip::GlobalNorm) + if is_late { 2 } else { 0 },
        };
        self.types.roles().into_iter().map(|role| times(role) * self.carried(bucket, states, role)).sum()
    }

    /// Time of copying a role of a bucket one way, if it is offloaded.
    fn carried(&self, bucket: &BucketSize, states: States, role: Role) -> u64 {
        let bytes = || role_bytes(role, bucket.elems, bucket.ways(self.mesh), states.zero, self.types);
        away(role, states.offload).map_or(0, |store| self.links.copy(self.site, store, bytes()).0)
    }

    /// Bytes read and written by the update of a bucket on one rank: gradients once (twice with a norm), every state read and written, and the
    /// parameters written where they are another buffer.
    fn update_bytes(&self, bucket: &BucketSize, zero: Zero) -> u64 {
        let ways = bucket.ways(self.mesh);
        let whole = bucket_elems(bucket.elems, ways);
        let elems = if in_pieces(Role::Master, zero) { whole / ways } else { whole };
        let size = |role: Role| elems * self.types.dtype(role).size();
        let reads = match self.clip {
            Clip::None => 1,
            Clip::GlobalNorm => 2,
        };
        self.types
            .roles()
            .into_iter()
            .map(|role| match role {
                Role::Grad => reads * size(role),
                Role::Param if self.types.master() != Role::Param => size(role),
                Role::Param | Role::Master | Role::Moment1 | Role::Moment2 => 2 * size(role),
                Role::Residual => 0,
            })
            .sum()
    }

    /// Time of the step's scalars: the loss, and the norm over all devices of all stages.
    pub fn constant(&self, stages: u64) -> u64 {
        let all = || self.links.across_stages(self.mesh, self.mesh.all(), stages, 8).0;
        all() + if self.clip == Clip::GlobalNorm { all() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Cluster;
    use dplan_ir::dtype::DType;
    use dplan_ir::mesh::Degrees;
    use dplan_ir::optimizer::Optimizer;
    use dplan_ir::plan::{Offload, Share, Wire};
    use dplan_ir::splitmix;
    use dplan_ir::sync::Sync;

    /// All ways of keeping states, layers of any size and any shares of the two passes.
    #[test]
    fn no_layer_is_quicker_than_its_least_time_and_where_one_pass_has_traffic_one_is_as_quick() {
        let (mut random, mut tight) = (11, 0);
        let tenth = Share::from_name("0.1").unwrap();
        for (text, degrees) in [("h100:8x2", (4, 2)), ("cpu:4", (4, 1)), ("a100-80g:8x4", (16, 2)), ("h100:8x1", (1, 8))] {
            let cluster = Cluster::parse(text).unwrap();
            for round in 0..40 {
                let sync = [Sync::Flat, Sync::Server, Sync::Hierarchical { far: 2 }, Sync::Tree][round as usize % 4];
                let mesh = Mesh::of(Degrees { dp: degrees.0, tp: degrees.1, sync, ..Degrees::ONE });
                let mut draw = |most: u64| splitmix::next(&mut random) % most;
                let bucket = |elems: u64, tied: bool| BucketSize { elems, partial: AxisSet::EMPTY, axes: AxisSet::EMPTY, members: 1, tied };
                let buckets = vec![bucket(1 + draw(1 << (8 + round % 20)), false), bucket(1 + draw(1 << 16), round % 2 == 0)];
                let layer = LayerBytes { buckets, reads_back: round % 5 > 0, ..LayerBytes::default() };
                let types = StateTypes {
                    compute: if round % 3 == 0 { DType::F32 } else { DType::Bf16 },
                    optimizer: Optimizer::AdamW,
                    wire: [Wire::Full, Wire::Full, Wire::Full, Wire::Full, Wire::Full, Wire::TopK(tenth), Wire::Bf16][round as usize % 7],
                    sync,
                };
                let pipeline = Pipeline { schedule: Schedule::OneFOneB, stages: 2, virtual_stages: 1, micro_batches: 4 };
                let terms = Terms { links: &cluster, site: Site::ONLY, mesh: &mesh, types, clip: Clip::GlobalNorm, pipeline };
                for (zero, offload, home) in
                    (0..4).flat_map(|z| Offload::ALL.map(|o| (z, o))).flat_map(|(z, o)| Home::ALL.map(|home| (Zero(z), o, home)))
                {
                    let sync = terms.sync(&layer, States { zero, offload }, home);
                    let activations = [None, Some(Store::Cpu), Some(Store::Nvme)][round as usize % 3];
                    let sync = terms.storing(sync, draw(1 << 22), activations);
                    let (gather, reduce, _) = sync.every.in_passes(zero);
                    let traffic = (1 + u64::from(layer.reads_back)) * (gather + sync.every.fetch) + reduce + sync.every.carry + 2 * sync.frame.1;
                    // Where the greater of compute and traffic changes, and where roundings show.
                    let passes = [draw(30), traffic / 2 + draw(9), traffic + draw(9), traffic * 3 + draw(1000)][round as usize % 4];
                    let least = sync.least_time(passes);
                    for forward in [0, passes, passes / 2, passes / 3, draw(passes + 1)] {
                        let time = sync.terms(Nanos(forward), Nanos(passes - forward)).time;
                        assert!(time >= least, "{text}, {zero:?} {offload:?} {home:?}: {forward} of {passes} takes {time}, at least {least}");
                    }
                    assert!(sync.least_time(passes + 1) >= least, "more compute takes no less");
                    if gather + sync.every.fetch + sync.frame.1 == 0 {
                        assert_eq!(sync.terms(Nanos(0), Nanos(passes)).time, least, "{text}, {zero:?} {offload:?} {home:?}");
                        tight += u64::from(traffic > 0);
                    }
                    if zero.0 <= 1 && !offload.is_in_passes() && activations.is_none() {
                        let third = passes / 3;
                        assert_eq!(sync.parted(Nanos(third), Nanos(third), Nanos(passes - 2 * third)).time, least);
                    }
                }
            }
        }
        assert!(tight > 1000, "{tight} layers with traffic beside one pass alone");
    }
}
