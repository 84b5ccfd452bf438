//! The ways of running one layer: an option per Pareto-optimal choice of op strategies.
//!
//! A [`Pricing`] fixes everything that layers share (machine, tensor-parallel mesh, micro-batch, boundary, padding); nothing here depends on data
//! parallelism, pipeline stages or schedule. Under it every layer is priced alone: what crosses to the next layer has one sharding everywhere.

use crate::machine::Machine;
use crate::memory::{BucketSize, LayerBytes};
use crate::padding;
use crate::units::Nanos;
use dplan_ir::entity::DimId;
use dplan_ir::graph::Graph;
use dplan_ir::mesh::Mesh;
use dplan_ir::plan::{Gathered, LayerPlan, Recompute, Zero};
use dplan_ir::rule::Assignment;
use dplan_ir::sharding::Padded;

/// What all layers of a plan share, as far as it decides what one micro-batch costs on one rank.
#[derive(Clone, Debug)]
pub struct Pricing<'a> {
    /// Differentiated, its values typed in the compute type.
    pub graph: &'a Graph,
    pub machine: &'a Machine,
    /// `Mesh::new(1, tp)`: a micro-batch of one data-parallel rank.
    pub mesh: Mesh,
    /// Sequences of a micro-batch on one data-parallel rank.
    pub micro_batch: u64,
    /// Dim of every layer boundary that the tensor-parallel axes shard.
    pub boundary: Option<u32>,
    /// Size of every dim on the machine, `batch` = `micro_batch`. Strategies are those that these sizes allow.
    pub padded: Padded,
}

impl<'a> Pricing<'a> {
    /// One pricing for each way of padding ([`padding::candidates`]), the least padding first.
    pub fn all(graph: &'a Graph, machine: &'a Machine, tp: u64, micro_batch: u64, boundary: Option<u32>) -> Vec<Pricing<'a>> {
        let mesh = Mesh::new(1, tp);
        let price = |mut padded: Padded| {
            if let Some(batch) = graph.batch {
                padded.0[batch] = micro_batch;
            }
            Pricing { graph, machine, mesh: mesh.clone(), micro_batch, boundary, padded }
        };
        padding::candidates(graph, &mesh).into_iter().map(price).collect()
    }

    /// Padded size of a dim.
    pub fn size(&self, dim: DimId) -> u64 {
        self.padded.size(dim)
    }
}

/// One way of running a layer, and what it costs for one micro-batch on one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerOption {
    pub strategy: Vec<Assignment>,
    pub recompute: Recompute,
    pub gathered: Gathered,
    /// Ops and tensor-parallel collectives of the forward pass.
    pub forward: Nanos,
    /// The same of the backward pass, recomputation included.
    pub backward: Nanos,
    pub bytes: LayerBytes,
}

impl LayerOption {
    pub fn plan(&self, zero: Zero) -> LayerPlan {
        LayerPlan { zero, recompute: self.recompute, gathered: self.gathered, strategy: self.strategy.clone() }
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
