//! What an accumulator holds: a multiset that may contain each (term, micro-batch) once, and the ranks it must still be summed over.
//!
//! A gradient is Σ over micro-batches of contributions, so its terms are the contributions' graph values, each with the micro-batches added so far; a piece of a
//! bucket, whose bytes belong to different members on different ranks, has the one term `All`: every contribution that this stage makes to the element's
//! parameter. The loss has one term, the loss value; the squared norm has the buckets counted so far (for micro-batch 0, as it were).

use std::collections::HashMap;

use crate::entity::{BucketId, ValueId};
use crate::mesh::AxisSet;

/// A set of micro-batches, as disjoint increasing half-open ranges that do not touch.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Spans(Vec<(u64, u64)>);

impl Spans {
    pub fn one(micro_batch: u64) -> Spans {
        Spans(vec![(micro_batch, micro_batch + 1)])
    }
    /// The micro-batches below `n`.
    pub fn all_below(n: u64) -> Spans {
        Spans(vec![(0, n)])
    }
    /// The union of disjoint sets, or a micro-batch that is in both.
    pub fn union(&self, other: &Spans) -> Result<Spans, u64> {
        let mut all: Vec<(u64, u64)> = self.0.iter().chain(&other.0).copied().collect();
        all.sort_unstable();
        let mut out: Vec<(u64, u64)> = Vec::with_capacity(all.len());
        for (from, to) in all {
            match out.last_mut() {
                Some(last) if from < last.1 => return Err(from),
                Some(last) if from == last.1 => last.1 = to,
                _ => out.push((from, to)),
            }
        }
        Ok(Spans(out))
    }
    fn later(&self, by: u64) -> Spans {
        Spans(self.0.iter().map(|&(from, to)| (from + by, to + by)).collect())
    }
    /// Whether this is `before` with every micro-batch `by` later; or that, with the first `by` added: what a sum over all micro-batches so far becomes.
    pub fn is_shift_of(&self, before: &Spans, by: u64) -> bool {
        let later = before.later(by);
        *self == later || Spans(vec![(0, by)]).union(&later).is_ok_and(|all| all == *self)
    }
    /// This after `more` further micro-batches, of which every `by` took `before` to it: each later, or all of them added.
    fn advanced(&self, before: &Spans, by: u64, more: u64) -> Spans {
        let later = self.later(more);
        if *self == before.later(by) { later } else { Spans(vec![(0, more)]).union(&later).unwrap_or_default() }
    }
    pub fn show(&self) -> String {
        let range = |&(from, to): &(u64, u64)| if from + 1 == to { format!("{from}") } else { format!("{from}–{}", to - 1) };
        self.0.iter().map(range).collect::<Vec<_>>().join(", ")
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Term {
    /// Every contribution of this stage to the element's parameter.
    All,
    Value(ValueId),
    Bucket(BucketId),
}

/// The ranks whose sums still have to be added.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Pending {
    pub axes: AxisSet,
    /// Also the other stages (the other homes of a tied parameter; for the norm, all).
    pub stages: bool,
}

impl Pending {
    pub fn is_done(self) -> bool {
        self == Pending::default()
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Sum {
    /// Sorted by term.
    pub terms: Vec<(Term, Spans)>,
    pub pending: Pending,
    /// Whether any of it was on the wire in a shorter type.
    pub rounded: bool,
}

impl Sum {
    /// The buckets that a norm counts, and whether that is reduced over all ranks.
    pub fn norm(&self) -> (Vec<BucketId>, bool) {
        let bucket = |(term, _): &(Term, Spans)| if let Term::Bucket(b) = term { Some(*b) } else { None };
        (self.terms.iter().filter_map(bucket).collect(), self.pending.is_done())
    }
    pub fn one(term: Term, micro_batch: u64, pending: Pending) -> Sum {
        Sum { terms: vec![(term, Spans::one(micro_batch))], pending, rounded: false }
    }
    pub fn of(&self, term: Term) -> Option<&Spans> {
        self.terms.binary_search_by_key(&term, |(t, _)| *t).ok().map(|at| &self.terms[at].1)
    }
    /// Micro-batches in which a contribution is in the sum, by itself or among all.
    pub fn micro_batches(&self, value: ValueId) -> Spans {
        let none = Spans::default();
        let (alone, among) = (self.of(Term::Value(value)).unwrap_or(&none), self.of(Term::All).unwrap_or(&none));
        alone.union(among).unwrap_or_default()
    }
    /// The sum of two, which must wait for the same reduction and have no term in common.
    pub fn plus(&self, other: &Sum) -> Result<Sum, Clash> {
        if self.pending != other.pending {
            return Err(Clash::Pending(self.pending, other.pending));
        }
        let mut sum = Sum { rounded: self.rounded || other.rounded, ..self.clone() };
        for (term, spans) in &other.terms {
            let clash = |at| Clash::Twice(*term, at);
            for (mine, have) in &self.terms {
                if (*mine == Term::All) != (*term == Term::All) {
                    have.union(spans).map_err(clash)?;
                }
            }
            match sum.terms.binary_search_by_key(term, |(t, _)| *t) {
                Ok(at) => sum.terms[at].1 = sum.terms[at].1.union(spans).map_err(clash)?,
                Err(at) => sum.terms.insert(at, (*term, spans.clone())),
            }
        }
        Ok(sum)
    }
    pub fn is_shift_of(&self, before: &Sum, by: u64) -> bool {
        (self.pending, self.rounded) == (before.pending, before.rounded)
            && self.terms.len() == before.terms.len()
            && self.terms.iter().zip(&before.terms).all(|((a, now), (b, then))| a == b && now.is_shift_of(then, by))
    }
}

impl Sum {
    fn advanced(&self, before: &Sum, by: u64, more: u64) -> Sum {
        let terms = self.terms.iter().zip(&before.terms).map(|((term, now), (_, then))| (*term, now.advanced(then, by, more)));
        Sum { terms: terms.collect(), ..self.clone() }
    }
}

/// Why two sums cannot be added.
pub(super) enum Clash {
    Pending(Pending, Pending),
    /// A term that both have, for a micro-batch.
    Twice(Term, u64),
}

/// Interned sums, so that contents are small and compare quickly.
#[derive(Default)]
pub(super) struct Sums {
    table: Vec<Sum>,
    ids: HashMap<Sum, u32>,
}

impl Sums {
    pub fn id(&mut self, sum: Sum) -> u32 {
        if let Some(&id) = self.ids.get(&sum) {
            return id;
        }
        let id = self.table.len() as u32;
        self.table.push(sum.clone());
        self.ids.insert(sum, id);
        id
    }
    /// What a sum that is a shift of another becomes ([`super::period`]).
    pub fn advanced(&mut self, before: u32, now: u32, by: u64, more: u64) -> u32 {
        let sum = self.get(now).advanced(self.get(before), by, more);
        self.id(sum)
    }
    pub fn get(&self, id: u32) -> &Sum {
        &self.table[id as usize]
    }
}
