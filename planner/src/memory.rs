//! The arena formula: what a stage's ranks allocate, as a sum over layers. The lowering lays buffers out by the same rules, so predicted and allocated bytes
//! are equal; a test holds them together.
//!
//! ```text
//! arena = scalars + Σ_buckets state(zero) + Σ_layers (versions · version + frames · frame + held · held) + boundary + max_layers workspace + 2 · max_layers ring(zero)
//! host, file = Σ_buckets offloaded state(zero) + Σ_layers frames · offloaded frame
//! ```
//! over the layers of all virtual stages of the stage; `frames`, `held` and `versions` are those of a layer's virtual stage ([`Slots`]).
//! - *state*: parameters, master copy (16-bit compute types only), gradients, moments, the residual of compressed gradients (whole, on the device), and LAMB's two sums for each parameter; each but those whole or one piece for each rank along data axes that do not shard the parameter, by ZeRO stage;
//!   what is offloaded (master copy and moments; also gradients; also parameters) is in the memory of the host or in a file instead;
//! - *version* of a layer whose backward pass reads its parameters: these, put by for a micro-batch in flight, where each micro-batch has an update of its own; among the states;
//! - *frame* of a layer: its input and everything its backward pass reads (with full recompute: its input alone), one per micro-batch in flight; one that is offloaded
//!   waits in the memory of the host or in a file, and is in the ring while a pass works on it;
//! - *held* by a layer where backward passes come in halves: its cotangent and whatever else the weight half finds of the input half;
//! - *workspace*: all other values of one layer, forward and backward, side by side (and with full recompute, what is computed again), and scratch; rounded up
//!   to one of eight sizes in an octave ([`workspace_region`]), so that a search has few sizes to tell apart;
//! - *ring*: two turns of gathered parameters (ZeRO 3) and of gradients before they are scattered (ZeRO 2 and 3), so that the next layer's gather
//!   and the last layer's scatter overlap this layer's compute; the same of parameters and gradients that are offloaded, and of offloaded frames (in sizes as a
//!   workspace's); where gradients are rounded or compressed for the exchange, what goes out and what comes, where they are pushed to servers, what comes, whatever the ZeRO stage; in the update, two turns of a bucket's offloaded
//!   states, so that copies in and out overlap it;
//! - *boundary*: cotangents handed from layer to layer, and send and receive buffers between stages.
//!
//! Every single item is rounded up as its memory asks ([`Space::align`]).

use dplan_ir::dtype::DType;
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::optimizer::Optimizer;
use dplan_ir::pipeline::{Pipeline, Slots};
use dplan_ir::plan::{Offload, Plan, Residence, States, Store, Wire, Zero};
use dplan_ir::program::{Role, Space, align};
use dplan_ir::sync::Sync;

/// Bucket pieces are a multiple of this many elements, so that each is aligned in every element type.
pub const PIECE_ELEMS: u64 = 128;

/// Parameters of one layer that are sharded over, and partial over, the same tensor-parallel axes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BucketSize {
    /// Elements on one rank, padding of dims included.
    pub elems: u64,
    /// Tensor-parallel axes over which local gradients still have to be summed.
    pub partial: AxisSet,
    /// Axes that shard the parameters: tensor-parallel ones, and data axes as of experts.
    pub axes: AxisSet,
    /// How many parameters.
    pub members: u64,
    /// Belongs to a tied parameter, which another layer uses too: counted once in a stage.
    pub tied: bool,
}

impl BucketSize {
    /// Data axes over which gradients are summed and states may be shared.
    pub fn data(&self, mesh: &Mesh) -> AxisSet {
        mesh.data().minus(self.axes)
    }
    /// Ranks along [`BucketSize::data`].
    pub fn ways(&self, mesh: &Mesh) -> u64 {
        mesh.size(self.data(mesh))
    }
}

/// What one layer needs on one rank, whatever the degree of data parallelism.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LayerBytes {
    pub buckets: Vec<BucketSize>,
    /// Whether its backward pass may read parameters ([`dplan_ir::graph::Graph::reads_parameters_back`]).
    pub reads_back: bool,
    /// Per micro-batch in flight.
    pub frame: u64,
    /// Per micro-batch between the halves of its backward pass.
    pub held: u64,
    pub workspace: u64,
}

impl LayerBytes {
    /// Bytes of one version of the parameters that is put by for backward passes. (No stage that puts any by has parameters that layers share.)
    pub fn version(&self, mesh: &Mesh, types: StateTypes) -> u64 {
        let whole = |bucket: &BucketSize| align(bucket_elems(bucket.elems, bucket.ways(mesh)) * types.dtype(Role::Param).size());
        if self.reads_back { self.buckets.iter().map(whole).sum() } else { 0 }
    }
}

/// Bytes in the order of [`Space::ALL`].
pub type PerSpace = [u64; Space::ALL.len()];

/// Types, optimizer and ways of exchange that all layers share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateTypes {
    pub compute: DType,
    pub optimizer: Optimizer,
    pub wire: Wire,
    /// How gradients get to their sum.
    pub sync: Sync,
}

impl StateTypes {
    /// With nothing rounded on the way, all of which one collective does.
    pub fn new(compute: DType, optimizer: Optimizer) -> StateTypes {
        StateTypes { compute, optimizer, wire: Wire::Full, sync: Sync::Flat }
    }
    pub fn of(plan: &Plan) -> StateTypes {
        StateTypes { compute: plan.compute, optimizer: plan.optimizer, wire: plan.wire, sync: plan.sync }
    }
    pub fn dtype(&self, role: Role) -> DType {
        match role {
            Role::Param => self.compute,
            Role::Master | Role::Grad | Role::Moment1 | Role::Moment2 | Role::Residual => self.compute.accumulator(),
        }
    }
    /// The flat buffers of every bucket.
    pub fn roles(&self) -> Vec<Role> {
        let mut roles = vec![Role::Param];
        if self.compute != self.compute.accumulator() {
            roles.push(Role::Master);
        }
        roles.extend([Role::Grad, Role::Moment1, Role::Moment2].into_iter().take(1 + self.optimizer.moments()));
        roles
    }
    /// These, and of a bucket that so many share what else it has for its exchange.
    pub fn roles_shared(&self, ways: u64) -> Vec<Role> {
        let mut roles = self.roles();
        roles.extend((ways > 1 && self.wire.kept().is_some()).then_some(Role::Residual));
        roles
    }
    /// The buffer the optimizer updates.
    pub fn master(&self) -> Role {
        if self.compute == self.compute.accumulator() { Role::Param } else { Role::Master }
    }
}

/// Whether a role is kept in pieces over data-parallel ranks at a ZeRO stage.
pub fn in_pieces(role: Role, zero: Zero) -> bool {
    match role {
        Role::Master | Role::Moment1 | Role::Moment2 => zero.0 >= 1,
        Role::Grad => zero.0 >= 2,
        Role::Param => zero.0 >= 3,
        Role::Residual => false,
    }
}

/// Where a role lives, if not in the device's memory.
pub fn away(role: Role, offload: Offload) -> Option<Store> {
    match (offload, role) {
        // Exchanges work on it.
        (_, Role::Residual) => None,
        (Offload::None, _) | (Offload::Optimizer(_), Role::Param | Role::Grad) | (Offload::Gradients(_), Role::Param) => None,
        (Offload::Optimizer(store), Role::Master | Role::Moment1 | Role::Moment2) => Some(store),
        (Offload::Gradients(store), Role::Master | Role::Grad | Role::Moment1 | Role::Moment2) | (Offload::Parameters(store), _) => Some(store),
    }
}

/// The memory that a role lives in.
pub fn space(role: Role, offload: Offload) -> Space {
    away(role, offload).map_or(Space::Device, Store::space)
}

/// Elements of a bucket, padded so that it cuts into `ways` equal aligned pieces.
pub fn bucket_elems(elems: u64, ways: u64) -> u64 {
    elems.next_multiple_of(ways * PIECE_ELEMS)
}

/// Persistent bytes of a role of a bucket on one rank, shared by so many.
pub fn role_bytes(role: Role, elems: u64, ways: u64, zero: Zero, types: StateTypes) -> u64 {
    let whole = bucket_elems(elems, ways);
    types.dtype(role).size() * if in_pieces(role, zero) { whole / ways } else { whole }
}

/// Bytes of the sums that the trust ratios of a bucket's parameters are of, where the optimizer has any.
pub fn trust_bytes(members: u64, types: StateTypes) -> u64 {
    if types.optimizer.trusts() { 2 * members * types.dtype(Role::Master).size() } else { 0 }
}

/// Persistent bytes of a bucket on one rank, in each memory.
pub fn state_bytes(bucket: &BucketSize, mesh: &Mesh, states: States, types: StateTypes) -> PerSpace {
    let (elems, ways) = (bucket.elems, bucket.ways(mesh));
    let mut bytes = PerSpace::default();
    for role in types.roles_shared(ways) {
        let space = space(role, states.offload);
        bytes[space as usize] += space.align(role_bytes(role, elems, ways, states.zero, types));
    }
    bytes[Space::Device as usize] += align(trust_bytes(bucket.members, types));
    bytes
}

/// A bucket's gradients as ranks exchange them, where each sends every other its piece or its pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OnWire {
    pub dtype: DType,
    /// Of what goes out; 0 where it is sent from where it is added up.
    pub own: u64,
    /// Of what comes, this rank's own included.
    pub shares: u64,
    /// How many elements travel, of those that are not all.
    pub kept: Option<u64>,
}

/// How often the bytes of gradients are read or written to find the largest: gradients and what is left over are read, their sum is written, looked through three
/// times (in f32, for its 31 bits), and read once more.
pub const LOOKS: u64 = 7;

/// How gradients are exchanged where they are rounded or compressed for it or pushed to servers, and go anywhere.
pub fn on_wire(elems: u64, ways: u64, types: StateTypes) -> Option<OnWire> {
    let elems = bucket_elems(elems, ways);
    let wire = match (types.wire, types.sync) {
        (Wire::Bf16, _) => {
            let bytes = elems * DType::Bf16.size();
            OnWire { dtype: DType::Bf16, own: bytes, shares: bytes, kept: None }
        }
        (Wire::TopK(share), _) => {
            let (dtype, kept) = (types.dtype(Role::Grad), share.of(elems));
            // A value and its place.
            let own = 2 * kept * dtype.size();
            OnWire { dtype, own, shares: ways * own, kept: Some(kept) }
        }
        (Wire::Full, Sync::Server) => {
            let dtype = types.dtype(Role::Grad);
            OnWire { dtype, own: 0, shares: elems * dtype.size(), kept: None }
        }
        (Wire::Full, Sync::Flat | Sync::Hierarchical { .. } | Sync::Tree) => return None,
    };
    (ways > 1).then_some(wire)
}

/// Bytes of one turn of the ring that the update has a bucket's offloaded states in.
fn staged_bytes(elems: u64, ways: u64, states: States, types: StateTypes) -> u64 {
    let staged = types.roles().into_iter().filter(|&role| away(role, states.offload).is_some());
    staged.map(|role| align(role_bytes(role, elems, ways, states.zero, types))).sum()
}

/// One turn of the ring for a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Turn {
    /// Whole parameters and gradients of which the arena has only pieces or nothing, gradients that pieces are added to, and gradients on the wire.
    passes: u64,
    /// One bucket's offloaded states.
    update: u64,
}

impl Turn {
    /// Of each part the less.
    pub fn least(self, other: Turn) -> Turn {
        Turn { passes: self.passes.min(other.passes), update: self.update.min(other.update) }
    }
    /// Bytes, with so large an offloaded frame beside what else the passes have there.
    pub fn bytes(&self, frame: u64) -> u64 {
        (self.passes + workspace_region(frame)).max(self.update)
    }
}

/// What states ask of a turn of the ring.
pub fn turn(layer: &LayerBytes, mesh: &Mesh, states: States, types: StateTypes) -> Turn {
    let in_passes = |bucket: &BucketSize| -> u64 {
        let (elems, ways) = (bucket.elems, bucket.ways(mesh));
        let is_away = |role| away(role, states.offload).is_some();
        // One rank holds everything anyway.
        let is_shared = |role| ways > 1 && in_pieces(role, states.zero);
        let whole = |role| align(bucket_elems(elems, ways) * types.dtype(role).size());
        let added = if is_away(Role::Grad) && is_shared(Role::Grad) { align(role_bytes(Role::Grad, elems, ways, states.zero, types)) } else { 0 };
        let wire = on_wire(elems, ways, types).map_or(0, |wire| align(wire.own) + align(wire.shares));
        [Role::Param, Role::Grad].into_iter().filter(|&r| is_away(r) || is_shared(r)).map(whole).sum::<u64>() + added + wire
    };
    let staged = layer.buckets.iter().map(|b| staged_bytes(b.elems, b.ways(mesh), states, types)).max();
    Turn { passes: layer.buckets.iter().map(in_passes).sum(), update: staged.unwrap_or(0) }
}

/// Bytes of a turn for a layer that lives there.
pub fn turn_bytes(layer: &LayerBytes, mesh: &Mesh, residence: Residence, types: StateTypes) -> u64 {
    turn(layer, mesh, residence.states, types).bytes(if residence.activations.is_some() { layer.frame } else { 0 })
}

/// Bytes of a layer's frames, so many of them, in each memory.
pub fn frame_bytes(frame: u64, frames: u64, activations: Option<Store>) -> PerSpace {
    let mut bytes = PerSpace::default();
    // A frame is a sum of what the device's memory has aligned.
    let (space, each) = activations.map_or((Space::Device, frame), |store| (store.space(), store.space().align(frame)));
    bytes[space as usize] = frames * each;
    bytes
}

/// Buffers between layers and stages: two cotangents handed down layer by layer, and two turns of each message a virtual stage sends or receives (what it receives
/// forward goes straight into its first layer's frame). Where backward passes come in halves, cotangents that come in are held by the layers instead. Between
/// virtual stages that share a stage nothing is sent.
pub fn boundary_bytes(boundary: u64, pipeline: &Pipeline, stage: u64) -> u64 {
    let parted = pipeline.parts_backward();
    let cotangents = if parted { 0 } else { 2 };
    let of = |c: u64| {
        let elsewhere = |neighbour: u64| pipeline.stage_of(neighbour) != stage;
        let (before, behind) = (c.checked_sub(1), Some(c + 1).filter(|&n| n < pipeline.all_virtual()));
        let sent_forward = if behind.is_some_and(elsewhere) { 2 } else { 0 };
        let received_backward = if behind.is_some_and(elsewhere) && !parted { 2 } else { 0 };
        let sent_backward = if before.is_some_and(elsewhere) { 2 } else { 0 };
        sent_forward + received_backward + sent_backward
    };
    (cotangents + pipeline.virtual_stages_of(stage).map(of).sum::<u64>()) * align(boundary)
}

/// Bytes of the workspace region where the layer with the largest workspace needs `bytes`: at most an eighth more. Monotone, so the largest of several
/// regions is the region of the largest.
pub fn workspace_region(bytes: u64) -> u64 {
    bytes.next_multiple_of(1 << bytes.max(8).ilog2().saturating_sub(3))
}

/// Loss, squared norm, clip factor.
pub fn scalar_bytes() -> u64 {
    3 * align(8)
}

/// The parts of one stage's arena, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Arena {
    pub scalars: u64,
    pub states: u64,
    pub frames: u64,
    pub boundary: u64,
    pub workspace: u64,
    pub ring: u64,
    /// Not in the arena: in the memory of the host, and in the rank's file.
    pub host: u64,
    pub file: u64,
}

impl Arena {
    pub fn total(&self) -> u64 {
        self.scalars + self.states + self.frames + self.boundary + self.workspace + self.ring
    }
}

/// Where a stage stands and what crosses its borders.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagePosition {
    pub pipeline: Pipeline,
    pub stage: u64,
    /// Largest layer boundary on one rank, bytes.
    pub boundary: u64,
}

/// The arena of a stage that runs `layers`, each with where it lives and what its virtual stage keeps.
pub fn arena(layers: &[(&LayerBytes, Residence, Slots)], mesh: &Mesh, types: StateTypes, at: StagePosition) -> Arena {
    let mut tied_seen = false;
    let (mut states, mut frames) = (PerSpace::default(), PerSpace::default());
    let add = |to: &mut PerSpace, bytes: PerSpace| to.iter_mut().zip(bytes).for_each(|(sum, bytes)| *sum += bytes);
    for (layer, of, slots) in layers {
        for bucket in &layer.buckets {
            if !(bucket.tied && tied_seen) {
                add(&mut states, state_bytes(bucket, mesh, of.states, types));
            }
            tied_seen |= bucket.tied;
        }
        states[Space::Device as usize] += slots.versions * layer.version(mesh, types);
        add(&mut frames, frame_bytes(layer.frame, slots.frames, of.activations));
    }
    let elsewhere = |space: Space| states[space as usize] + frames[space as usize];
    Arena {
        scalars: scalar_bytes(),
        states: states[Space::Device as usize],
        frames: frames[Space::Device as usize] + layers.iter().map(|(l, _, slots)| slots.held * l.held).sum::<u64>(),
        boundary: boundary_bytes(at.boundary, &at.pipeline, at.stage),
        workspace: workspace_region(layers.iter().map(|(l, ..)| l.workspace).max().unwrap_or(0)),
        ring: 2 * layers.iter().map(|&(l, of, _)| turn_bytes(l, mesh, of, types)).max().unwrap_or(0),
        host: elsewhere(Space::Host),
        file: elsewhere(Space::File),
    }
}
