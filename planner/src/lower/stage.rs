//! One stage of a plan, as the parts of its lowering see it.

use super::fragment::{Fragment, FragmentBucket};
use super::shard::Sharder;
use crate::memory::{BucketSize, StateTypes, in_pieces};
use dplan_ir::graph::Graph;
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::plan::{Plan, Zero};
use dplan_ir::program::Role;

/// The layers of one stage and the plan they belong to.
#[derive(Clone, Copy)]
pub(super) struct Stage<'a> {
    pub sharder: &'a Sharder<'a>,
    pub plan: &'a Plan,
    pub layers: &'a [Fragment],
    pub index: u32,
}

impl<'a> Stage<'a> {
    pub fn graph(&self) -> &'a Graph {
        self.sharder.graph
    }
    pub fn mesh(&self) -> &'a Mesh {
        &self.sharder.mesh
    }
    pub fn stages(&self) -> u32 {
        self.plan.stages.len() as u32
    }
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.stages()
    }
    pub fn in_flight(&self) -> u64 {
        self.plan.schedule.in_flight(u64::from(self.index), self.plan.pp(), self.plan.micro_batches)
    }
    pub fn types(&self) -> StateTypes {
        StateTypes { compute: self.plan.compute, optimizer: self.plan.optimizer }
    }
    /// The ZeRO stage of a layer, by position in this stage. One data rank has nothing to share.
    pub fn zero(&self, at: usize) -> Zero {
        if self.mesh().data().is_empty() { Zero(0) } else { self.plan.layer(self.layers[at].layer).zero }
    }
    /// Axes of the mesh that have more than one rank.
    pub fn axes(&self) -> AxisSet {
        self.mesh().data().union(self.mesh().tp())
    }
    /// Axes over which a role of a bucket, whose gradients are summed over `data`, is kept in pieces.
    pub fn pieces(&self, role: Role, zero: Zero, data: AxisSet) -> AxisSet {
        if in_pieces(role, zero) { data } else { AxisSet::EMPTY }
    }
    /// Size of a bucket on one rank.
    pub fn size(&self, bucket: &FragmentBucket) -> BucketSize {
        bucket.size(self.graph(), self.mesh(), &self.sharder.padded)
    }
    /// Stages on which the bucket's parameter lives, if there are several.
    pub fn tied(&self, bucket: &FragmentBucket) -> Vec<u32> {
        let mut homes: Vec<u32> = self.sharder.homes(bucket.members[0].param).iter().map(|&l| self.plan.stage_of(l) as u32).collect();
        homes.dedup();
        if bucket.tied && homes.len() > 1 { homes } else { Vec::new() }
    }
}
