//! From one sharding of a value to another, as a list of collectives.
//!
//! Steps, in order, each linear in the value so that any prefix is a legal sharding:
//! 1. the pending reduction: axes that `to` uses to shard a dim are reduce-scattered onto it, the others all-reduced;
//! 2. axes that shard a dim in `from` and not in `to` are all-gathered, least significant first;
//! 3. axes that shard a dim in `to` and not yet are sliced: each rank keeps its block; no communication.
//!
//! [`Step::apply`] is the meaning of a step on shardings; the verifier uses it alone and accepts any order of steps that type-checks.

use crate::mesh::AxisSet;
use crate::sharding::{Monoid, Sharding};

/// One collective, or one local slice, on a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Step {
    /// Partial over `axes` → whole on each of them.
    AllReduce { axes: AxisSet, monoid: Monoid },
    /// Partial over `axes` → `dim` also sharded by them.
    ReduceScatter { axes: AxisSet, dim: u32, monoid: Monoid },
    /// `dim` sharded by `axes` → replicated over them.
    AllGather { axes: AxisSet, dim: u32 },
    /// Replicated over `axes` → `dim` also sharded by them. Over no axes: a copy.
    Slice { axes: AxisSet, dim: u32 },
}

impl Step {
    pub fn axes(&self) -> AxisSet {
        match *self {
            Step::AllReduce { axes, .. } | Step::ReduceScatter { axes, .. } | Step::AllGather { axes, .. } | Step::Slice { axes, .. } => axes,
        }
    }

    /// The sharding after the step, or why the step makes no sense on `from`.
    ///
    /// # Errors
    /// A sentence that names what was expected of `from`.
    pub fn apply(&self, from: &Sharding) -> Result<Sharding, String> {
        if from.ring.is_some() {
            return Err("a part of a ring is handed on or joined, nothing else".into());
        }
        let mut to = from.clone();
        let reduces = |axes: AxisSet, monoid: Monoid| {
            if !from.partial.includes(axes) {
                Err(format!("the value is partial over {:?}, not over {axes:?}", from.partial))
            } else if from.monoid != monoid {
                Err(format!("the pending reduction is {}, not {}", from.monoid.name(), monoid.name()))
            } else {
                Ok(from.partial.minus(axes))
            }
        };
        // Blocks of a dim nest in mesh order: an axis can be added or removed only behind the ones that stay.
        let minor_to = |axes: AxisSet, dim: u32| {
            let others = from.dims[dim as usize].minus(axes);
            others.is_empty() || axes.is_empty() || others.0 < (axes.0 & axes.0.wrapping_neg())
        };
        match *self {
            Step::AllReduce { axes, monoid } => to = from.whole().with_partial(monoid, reduces(axes, monoid)?),
            Step::ReduceScatter { axes, dim, monoid } => {
                let pending = reduces(axes, monoid)?;
                if !minor_to(axes, dim) {
                    return Err(format!("dim {dim} is already sharded by axes minor to {axes:?}"));
                }
                to = from.whole().with_partial(monoid, pending);
                to.dims[dim as usize] = from.dims[dim as usize].union(axes);
            }
            Step::AllGather { axes, dim } => {
                if !from.dims[dim as usize].includes(axes) || !minor_to(axes, dim) {
                    return Err(format!("dim {dim} is sharded by {:?}; {axes:?} are not its least significant axes", from.dims[dim as usize]));
                }
                to.dims[dim as usize] = from.dims[dim as usize].minus(axes);
            }
            Step::Slice { axes, dim } => {
                if from.used().intersects(axes) {
                    return Err(format!("the value already varies over {axes:?}"));
                }
                if !minor_to(axes, dim) {
                    return Err(format!("dim {dim} is already sharded by axes minor to {axes:?}"));
                }
                to.dims[dim as usize] = from.dims[dim as usize].union(axes);
            }
        }
        Ok(to)
    }
}

/// The steps that turn `from` into `to`.
///
/// # Panics
/// If the two have different numbers of dims, or `to` is partial where `from` is not: nothing makes a whole value partial.
pub fn steps(from: &Sharding, to: &Sharding) -> Vec<Step> {
    assert_eq!(from.dims.len(), to.dims.len(), "reshard between different ranks");
    assert!(from.partial.includes(to.partial), "a reshard cannot make a value partial");
    let mut at = from.clone();
    let mut steps = Vec::new();
    let mut push = |at: &mut Sharding, step: Step| match step.apply(at) {
        Ok(next) => {
            *at = next;
            steps.push(step);
            true
        }
        Err(_) => false,
    };
    let pending = from.partial.minus(to.partial);
    let mut rest = pending;
    for dim in 0..to.dims.len() {
        // Scatter onto a dim only if it then needs no further gather.
        let axes = to.dims[dim].and(pending);
        if !axes.is_empty()
            && to.dims[dim].includes(at.dims[dim])
            && push(&mut at, Step::ReduceScatter { axes, dim: dim as u32, monoid: from.monoid })
        {
            rest = rest.minus(axes);
        }
    }
    if !rest.is_empty() {
        push(&mut at, Step::AllReduce { axes: rest, monoid: from.monoid });
    }
    for dim in 0..to.dims.len() {
        // Gather everything from the most significant unwanted axis down; what is wanted again is sliced back.
        let unwanted = at.dims[dim].minus(to.dims[dim]);
        let missing = to.dims[dim].minus(at.dims[dim]);
        let first = (unwanted.0 | missing.0).trailing_zeros();
        let axes = if unwanted.is_empty() && (missing.is_empty() || at.dims[dim].0 >> first == 0) {
            AxisSet::EMPTY
        } else {
            AxisSet(at.dims[dim].0 & (u32::MAX.checked_shl(first).unwrap_or(0)))
        };
        if !axes.is_empty() {
            push(&mut at, Step::AllGather { axes, dim: dim as u32 });
        }
    }
    for dim in 0..to.dims.len() {
        let axes = to.dims[dim].minus(at.dims[dim]);
        if !axes.is_empty() {
            push(&mut at, Step::Slice { axes, dim: dim as u32 });
        }
    }
    assert_eq!(&at, to, "reshard {from:?} -> {to:?} ended elsewhere");
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shardings() -> Vec<Sharding> {
        // Every valid sharding of a matrix over two axes.
        let mut all = Vec::new();
        for code in 0..16u32 {
            let place = [code % 4, code / 4];
            let on = |which: u32| AxisSet((0..2).filter(|&a| place[a as usize] == which).map(|a| 1 << a).sum());
            all.push(Sharding::of_dims(vec![on(1), on(2)]).with_partial(Monoid::Sum, on(3)));
        }
        all
    }

    #[test]
    fn every_pair_of_shardings_is_reached() {
        for from in shardings() {
            for to in shardings().into_iter().filter(|t| from.partial.includes(t.partial)) {
                let end = steps(&from, &to).iter().try_fold(from.clone(), |at, s| s.apply(&at));
                assert_eq!(end.as_ref(), Ok(&to), "from {from:?}");
            }
        }
    }

    #[test]
    fn partial_to_sharded_is_one_reduce_scatter() {
        let from = Sharding::replicated(2).with_partial(Monoid::Sum, AxisSet(0b10));
        let to = Sharding::of_dims(vec![AxisSet(0), AxisSet(0b10)]);
        assert_eq!(steps(&from, &to), [Step::ReduceScatter { axes: AxisSet(0b10), dim: 1, monoid: Monoid::Sum }]);
    }
}
