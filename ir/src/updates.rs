//! When parameters are updated.
//!
//! *Version* `v` of a stage's parameters is what `v` updates of the step have made of them. With one update a step, all passes work with version 0 and the step leaves version 1. With
//! one behind every micro-batch, a stage whose forward passes run `a` ahead of its backward passes works with version `max(0, i − a)` in both passes of micro-batch `i`
//! ([`crate::pipeline`]); update `i` makes version `i + 1`, and the step of `m` micro-batches leaves version `m`.

/// When parameters are updated, and with what.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Updates {
    /// Once a step, with the gradients of all micro-batches.
    #[default]
    Step,
    /// Behind the backward pass of every micro-batch, with that micro-batch's gradient alone ([`crate::pipeline`] says what the others then work with).
    MicroBatch,
}

impl Updates {
    pub const ALL: [Updates; 2] = [Updates::Step, Updates::MicroBatch];
    pub fn name(self) -> &'static str {
        match self {
            Updates::Step => "step",
            Updates::MicroBatch => "micro_batch",
        }
    }
    pub fn from_name(name: &str) -> Option<Updates> {
        Updates::ALL.into_iter().find(|u| u.name() == name)
    }
    /// The version of parameters that the passes of a micro-batch work with, where forward passes run so many micro-batches ahead of backward passes: how many updates of the step have
    /// made it.
    pub fn version(self, ahead: u64, micro_batch: u64) -> u64 {
        match self {
            Updates::Step => 0,
            Updates::MicroBatch => micro_batch.saturating_sub(ahead),
        }
    }
    /// Updates of a step.
    pub fn count(self, micro_batches: u64) -> u64 {
        match self {
            Updates::Step => 1,
            Updates::MicroBatch => micro_batches,
        }
    }
}
