//! One stage of a plan, as the parts of its lowering see it: the layers of its virtual stages one after the other, each known by its *position*.
//!
//! Parameters, workspace and ring are the stage's, whichever virtual stage a layer is on; frames, held cotangents and messages are the virtual stage's.

use super::fragment::{Fragment, FragmentBucket};
use super::shard::Sharder;
use crate::memory::{BucketSize, StateTypes, in_pieces};
use dplan_ir::graph::Graph;
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::pipeline::{Pipeline, Slots};
use dplan_ir::plan::{Plan, Residence, Schedule, States, Zero};
use dplan_ir::program::{Role, Stream, Updates};
use std::ops::Range;

/// A virtual stage of the stage.
#[derive(Clone, Debug)]
pub(super) struct VirtualStage {
    /// Among all virtual stages of the plan.
    pub index: u64,
    /// Positions of its layers.
    pub layers: Range<usize>,
    pub slots: Slots,
}

impl VirtualStage {
    pub fn first(&self) -> usize {
        self.layers.start
    }
    pub fn last(&self) -> usize {
        self.layers.end - 1
    }
}

/// Where what a virtual stage is handed comes from, or what it hands on goes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Neighbour {
    /// It is the first, or the last.
    Nobody,
    /// On another stage: by message.
    Stage(u32),
    /// On the same stage: in place. The virtual stage's place in [`Stage::virtual_stages`].
    Here(usize),
}

/// The layers of one stage and the plan they belong to.
#[derive(Clone, Copy)]
pub(super) struct Stage<'a> {
    pub sharder: &'a Sharder<'a>,
    pub plan: &'a Plan,
    pub layers: &'a [&'a Fragment],
    pub virtual_stages: &'a [VirtualStage],
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
        self.plan.pp() as u32
    }
    pub fn pipeline(&self) -> Pipeline {
        self.plan.pipeline()
    }
    /// The virtual stage before one of this stage's.
    pub fn before(&self, of: &VirtualStage) -> Neighbour {
        of.index.checked_sub(1).map_or(Neighbour::Nobody, |c| self.neighbour(c))
    }
    /// The virtual stage behind one of this stage's.
    pub fn behind(&self, of: &VirtualStage) -> Neighbour {
        if of.index + 1 == self.pipeline().all_virtual() { Neighbour::Nobody } else { self.neighbour(of.index + 1) }
    }
    /// The stream for a virtual stage's messages, on the way there or on the way back.
    pub fn stream(&self, of: &VirtualStage, there: Stream, back: Stream) -> Stream {
        let turns_back = matches!(self.plan.schedule, Schedule::ZbV);
        if turns_back && of.index >= u64::from(self.stages()) { back } else { there }
    }
    fn neighbour(&self, index: u64) -> Neighbour {
        match self.virtual_stages.iter().position(|v| v.index == index) {
            Some(at) => Neighbour::Here(at),
            None => Neighbour::Stage(self.pipeline().stage_of(index) as u32),
        }
    }
    pub fn updates(&self) -> Updates {
        self.plan.schedule.updates()
    }
    pub fn types(&self) -> StateTypes {
        StateTypes::of(self.plan)
    }
    /// The ZeRO stage of a layer, by position in this stage. One data rank has nothing to share.
    pub fn zero(&self, at: usize) -> Zero {
        if self.mesh().data().is_empty() { Zero(0) } else { self.plan.layer(self.layers[at].layer).zero }
    }
    /// Where a layer's states live.
    pub fn states(&self, at: usize) -> States {
        States { zero: self.zero(at), ..self.plan.layer(self.layers[at].layer).states() }
    }
    pub fn residence(&self, at: usize) -> Residence {
        Residence { states: self.states(at), ..self.plan.layer(self.layers[at].layer).residence() }
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
        homes.sort_unstable();
        homes.dedup();
        if bucket.tied && homes.len() > 1 { homes } else { Vec::new() }
    }
}
