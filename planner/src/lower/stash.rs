//! Parameters that are put by for backward passes, where each micro-batch has an update of its own ([`dplan_ir::pipeline`]).
//!
//! The newest version is where parameters live; forward passes work with it. Of earlier ones a stage keeps as many as there are micro-batches between its forward and its
//! backward passes, one place for each, in the order of micro-batches; a layer whose backward pass reads no parameters keeps none.

use super::arena::{Arena, Members};
use super::stage::Stage;
use dplan_ir::entity::{BucketId, BufferId};
use dplan_ir::mesh::AxisSet;
use dplan_ir::program::{Role, align};

impl Stage<'_> {
    /// Versions of a layer's parameters that are put by, by position in this stage.
    pub fn versions(&self, at: usize) -> u64 {
        let of = self.virtual_stages.iter().find(|v| v.layers.contains(&at));
        let is_read = self.graph().reads_parameters_back(self.layers[at].layer);
        of.filter(|_| is_read).map_or(0, |v| v.slots.versions)
    }
}

impl Arena {
    /// Places for so many versions of a bucket's parameters at `offset`, and the blocks of these; none for none.
    pub(super) fn stash(&mut self, stage: Stage<'_>, bucket: BucketId, versions: u64, offset: u64) -> (Option<BufferId>, Members) {
        let mut blocks = Members::new();
        if versions == 0 {
            return (None, blocks);
        }
        let stash = self.flat(stage, bucket, Role::Param, AxisSet::EMPTY, offset);
        let stride = align(self.program.buffers[stash].bytes);
        self.members(stage, bucket, Role::Param, offset, &mut blocks);
        [stash].iter().chain(blocks.values()).for_each(|&buffer| self.in_slots(buffer, versions, stride));
        (Some(stash), blocks)
    }
}
