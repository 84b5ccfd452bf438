//! The ways of running one layer: an option per Pareto-optimal choice of op strategies.
//!
//! A [`Pricing`] fixes everything that layers share (machine, tensor-parallel mesh, micro-batch, boundary, padding); nothing here depends on data
//! parallelism, pipeline stages or schedule. Under it every layer is priced alone: what crosses to the next layer has one sharding everywhere.

mod blueprint;
mod form;
mod ilp;
#[cfg(test)]
mod ilp_tests;
mod labels;
mod net;
mod price;
#[cfg(test)]
pub(crate) mod tests;

pub use blueprint::Blueprint;
pub use ilp::{Goal, IlpError};

use crate::capacity::{Trade, trades};
use crate::lower::LowerError;
use crate::machine::Machine;
use crate::memory::{BucketSize, LayerBytes};
use crate::padding;
use crate::prices::Offer;
use crate::units::Nanos;
use dplan_ir::data::data_dims;
use dplan_ir::entity::{DimId, ParamId, ValueId};
use dplan_ir::graph::Graph;
use dplan_ir::mesh::{AxisSet, Degrees, Mesh};
use dplan_ir::plan::{Gathered, LayerPlan, Recompute, Residence, States};
use dplan_ir::rule::Assignment;
use dplan_ir::sharding::{Padded, Sharding, local_type};
use dplan_ir::sync::Sync;
use form::{BACKWARD, Compare, Cost, FORWARD, FRAME, Measure, VARIANTS as COUNT, WORKSPACE};
use labels::Path;
use net::{Keep, Net, Stage};
use std::rc::Rc;

/// What all layers of a plan share, as far as it decides what one micro-batch costs on one rank.
#[derive(Clone, Debug)]
pub struct Pricing<'a> {
    /// Differentiated, its values typed in the compute type.
    pub graph: &'a Graph,
    pub machine: &'a Machine,
    /// `ep × cp × tp`: what else data parallelism does is nothing to a micro-batch. Where they are not nested as usual or data parallelism is cut up, all degrees: they say how tensor-parallel ranks lie.
    pub mesh: Mesh,
    /// Sequences of a micro-batch on one data-parallel rank.
    pub micro_batch: u64,
    /// Dim of every layer boundary that the tensor-parallel axes shard.
    pub boundary: Option<u32>,
    /// Size of every dim on the machine; of the batch, that of a micro-batch on every rank of the mesh that sees different sequences. Strategies are those that these sizes allow.
    pub padded: Padded,
}

impl<'a> Pricing<'a> {
    /// One pricing for each way of padding ([`padding::candidates`]), the least padding first.
    pub fn all(graph: &'a Graph, machine: &'a Machine, tp: u64, micro_batch: u64, boundary: Option<u32>) -> Vec<Pricing<'a>> {
        let degrees = Degrees { tp, ..Degrees::ONE };
        let paddings = padding::candidates(graph, &Mesh::of(degrees));
        paddings.into_iter().map(|padded| Pricing::new(graph, machine, degrees, micro_batch, boundary, padded)).collect()
    }

    /// The pricing under one of the [`padding::candidates`] for these degrees, of which `dp` does not matter unless they are unusual.
    pub fn new(graph: &'a Graph, machine: &'a Machine, degrees: Degrees, micro_batch: u64, boundary: Option<u32>, mut padded: Padded) -> Pricing<'a> {
        let (dp, sync) = if degrees.is_unusual() { (degrees.dp, degrees.sync) } else { (degrees.ep, Sync::Flat) };
        if let Some(batch) = graph.batch {
            padded.0[batch] = micro_batch * dp;
        }
        Pricing { graph, machine, mesh: Mesh::of(Degrees { dp, sync, ..degrees }), micro_batch, boundary, padded }
    }

    /// Padded size of a dim.
    pub fn size(&self, dim: DimId) -> u64 {
        self.padded.size(dim)
    }

    /// How a value crosses from a layer to the next; nothing if it has no such dim, or one that does not divide.
    pub fn boundary_sharding(&self, value: ValueId) -> Option<Sharding> {
        let mut axes = data_dims(self.graph, value, &self.mesh);
        if let Some(at) = self.boundary {
            let dim = axes.get_mut(at as usize)?;
            *dim = dim.union(self.mesh.tp());
        }
        let dims = &self.graph.values[value].ty.dims;
        let divides = dims.iter().zip(&axes).all(|(&dim, &axes)| self.size(dim).is_multiple_of(self.mesh.size(axes)));
        divides.then(|| Sharding::of_dims(axes))
    }
}

/// One way of running a layer, and what it costs for one micro-batch on one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerOption {
    /// Shared with all options that make the same choice for an op: there are many options, and few choices.
    pub strategy: Vec<Rc<Assignment>>,
    pub recompute: Recompute,
    pub gathered: Gathered,
    /// Ops and tensor-parallel collectives of the forward pass.
    pub forward: Nanos,
    /// The same of the backward pass, recomputation included.
    pub backward: Nanos,
    pub bytes: LayerBytes,
}

/// What a backward pass in halves costs and needs, for one way of running a layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Halves {
    /// Of the backward pass: what the layer before waits for, recomputation included.
    pub input: Nanos,
    /// The rest of it.
    pub weight: Nanos,
    pub bytes: LayerBytes,
}

/// Ways of keeping what the backward pass reads.
const VARIANTS: [(Recompute, Gathered); COUNT] = [
    (Recompute::None, Gathered::Keep),
    (Recompute::None, Gathered::Again),
    (Recompute::Selective, Gathered::Again),
    (Recompute::Full, Gathered::Keep),
];

/// The options of a layer that no other of the same recomputation covers in forward and backward time, parameter elements (all, and those with gradients partial over tensor-parallel
/// axes), frame and workspace bytes; quickest first. Of options that are alike in all of them the first in the order of strategies stands. Options that
/// store a tied parameter differently do not cover each other. Empty if the layer's border cannot be sharded as the pricing says.
///
/// # Errors
/// If the graph cannot be lowered.
pub fn options(pricing: &Pricing<'_>, layer: u32) -> Result<Vec<LayerOption>, LowerError> {
    Ok(Blueprint::new(pricing.graph, layer)?.offers(pricing).into_iter().map(|offer| offer.option).collect())
}

impl Blueprint {
    /// The [`options`] of the layer, each with the sharding of the tied parameter. `pricing` must be of the blueprint's graph.
    pub fn offers(&self, pricing: &Pricing<'_>) -> Vec<Offer> {
        let Some(mut net) = Net::new(pricing, self) else {
            return Vec::new();
        };
        let stages = net.stages(Keep::Undominated(Compare::All));
        let mut all: Vec<(u32, Measure, usize, Path)> = Vec::new();
        for variant in 0..COUNT {
            let found = labels::pareto(&stages, variant, |cost| net.rates.measure(cost, Compare::All));
            all.extend(found.into_iter().map(|(sink, measure, path)| (sink, measure, variant, path)));
        }
        // What covers comes before what it covers.
        all.sort_unstable();
        let mut kept: Vec<(u32, Measure, usize, Path)> = Vec::new();
        for option in all {
            // Pins choose between ways to recompute, so none of these covers another.
            let alike = |k: &(u32, Measure, usize, Path)| k.0 == option.0 && VARIANTS[k.2].0 == VARIANTS[option.2].0;
            if !kept.iter().any(|k| alike(k) && k.1.covers(&option.1)) {
                kept.push(option);
            }
        }
        kept.sort_by_key(|k| k.1);
        kept.iter().map(|(_, _, variant, path)| self.offer(pricing, &net, &stages, *variant, path)).collect()
    }

    /// What every offer that recomputes in one of these ways takes at least: trades of time, frame and workspace among the undominated, and the least buckets.
    pub fn sketch(&self, pricing: &Pricing<'_>, recompute: &[Recompute]) -> (Vec<Trade>, Vec<BucketSize>) {
        let Some(mut net) = Net::new(pricing, self) else {
            return (Vec::new(), Vec::new());
        };
        let stages = net.stages(Keep::Undominated(Compare::Passes));
        let variants = (0..COUNT).filter(|&v| recompute.contains(&VARIANTS[v].0));
        let found = variants.flat_map(|variant| labels::pareto(&stages, variant, |cost| net.rates.measure(cost, Compare::Passes)));
        let trades = trades(found.map(|(_, measure, _)| measure.way()));
        let bucket = |(spread, elems)| BucketSize { elems, partial: AxisSet::EMPTY, axes: spread, members: 0, tied: false };
        (trades, net.least_stored().into_iter().map(bucket).collect())
    }

    fn offer(&self, pricing: &Pricing<'_>, net: &Net<'_>, stages: &[Stage], variant: usize, path: &Path) -> Offer {
        let outcomes = || path.iter().zip(stages).map(|(&outcome, stage)| &stage.outcomes[outcome as usize]);
        let choices: Vec<usize> = outcomes().map(|o| usize::from(o.choice)).collect();
        let cost = outcomes().fold(Cost::default(), |sum, o| sum.plus(&o.costs[variant])).0;
        let stored = net.stored(&choices);
        let tied = |param: ParamId| self.is_tied(param);
        let (recompute, gathered) = VARIANTS[variant];
        let option = LayerOption {
            strategy: net.strategy(&choices),
            recompute,
            gathered,
            forward: Nanos(cost[FORWARD]),
            backward: Nanos(cost[BACKWARD]),
            bytes: LayerBytes {
                buckets: buckets(pricing, &stored, tied),
                reads_back: self.reads_back,
                frame: cost[FRAME],
                held: 0,
                workspace: cost[WORKSPACE],
            },
        };
        Offer { option, tie: stored.iter().find(|(param, ..)| tied(*param)).map(|(_, sharding, _)| sharding.clone()) }
    }

    /// Whether the layer's backward pass may read parameters.
    pub fn reads_back(&self) -> bool {
        self.reads_back
    }

    /// All of a pricing that this layer's options depend on, machine and graph aside: pricings alike in it have the same options.
    pub fn key(&self, pricing: &Pricing<'_>) -> Key {
        (pricing.mesh.clone(), pricing.boundary, self.dims.iter().map(|&d| pricing.size(d)).collect())
    }
}

/// Mesh, boundary, and the size of each dim of a layer.
pub type Key = (Mesh, Option<u32>, Vec<u64>);

/// Parameters sharded over the same axes, whose gradients wait for the same axes, share a bucket; a tied one stays alone.
fn buckets(pricing: &Pricing<'_>, stored: &[(ParamId, Sharding, AxisSet)], tied: impl Fn(ParamId) -> bool) -> Vec<BucketSize> {
    let mut found: Vec<(AxisSet, BucketSize)> = Vec::new();
    for (param, sharding, partial) in stored {
        let ty = &pricing.graph.values[pricing.graph.params[*param].value].ty;
        let elems = local_type(ty, sharding, &pricing.padded, &pricing.mesh).elems();
        let (axes, tied, partial) = (sharding.sharded(), tied(*param), partial.and(pricing.mesh.tp()));
        match found.iter_mut().find(|(a, b)| !b.tied && !tied && (*a, b.partial) == (axes, partial)) {
            Some((_, bucket)) => {
                bucket.elems += elems;
                bucket.members += 1;
            }
            None => found.push((axes, BucketSize { elems, partial, axes, members: 1, tied })),
        }
    }
    found.into_iter().map(|(_, bucket)| bucket).collect()
}

impl LayerOption {
    pub fn plan(&self, residence: Residence) -> LayerPlan {
        let Residence { states: States { zero, offload }, activations } = residence;
        let strategy = self.strategy.iter().map(|a| Assignment::clone(a)).collect();
        LayerPlan { zero, offload, activations, recompute: self.recompute, gathered: self.gathered, strategy }
    }
    /// Forward and backward.
    pub fn time(&self) -> Nanos {
        self.forward + self.backward
    }
    /// Parameter elements on one rank.
    pub fn param_elems(&self) -> u64 {
        self.bytes.buckets.iter().map(|b| b.elems).sum()
    }
    /// Those whose gradients still have to be summed over tensor-parallel axes.
    pub fn partial_elems(&self) -> u64 {
        self.bytes.buckets.iter().filter(|b: &&BucketSize| !b.partial.is_empty()).map(|b| b.elems).sum()
    }
}
