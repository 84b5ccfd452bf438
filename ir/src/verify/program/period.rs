//! Periods of a walk that need not be walked: what they do to the state ([`super::schedule`] has the argument).
//!
//! One period, which shifts micro-batches by `p`, took state T to S, and S knows what σT knows. What accumulates is in S either what it is in σT (each period begins anew), or that
//! and the period's own micro-batches (the sum goes on), for each term one or the other and not both, as the two have different numbers of micro-batches. So `n` more
//! periods leave, of what T knew, the contents of S with micro-batches `n · p` later, and `n · p` more of them in each sum that goes on.

use super::clock::{Clocks, Point};
use super::content::{Fact, Version};
use super::dataflow::Walk;
use super::memory::{Cell, NO_GRID};
use crate::program::{Scalar, Updates};

/// What the state was after some period.
pub(super) struct Snapshot {
    cells: Vec<Cell>,
    clocks: Clocks,
}

impl Walk<'_> {
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { cells: self.cells.clone(), clocks: self.clocks.clone() }
    }

    /// Whether the state knows and orders at least what the shifted earlier one does. Bytes where it does not are forgotten, so that the next period
    /// may show that the walk does not need them.
    pub fn repeats(&mut self, before: &Snapshot, shift: u64) -> bool {
        let mut points: Vec<(Point, Point)> = Vec::new();
        let mut same = true;
        for at in 0..self.cells.len() {
            let (then, now) = (&before.cells[at], &self.cells[at]);
            points.push(same_stream((then.written, now.written)));
            for stream in 0..then.read.len() {
                let point = |time| Point { stream: stream as u8, time };
                points.push((point(then.read[stream]), point(now.read[stream])));
            }
            let grids = then.own == then.rest || then.grid == now.grid;
            let keeps = |a: Fact, b: Fact| a == Fact::Garbage || self.is_shift(a, b, shift);
            if !(grids && keeps(then.own, now.own) && keeps(then.rest, now.rest)) {
                same = false;
                let cell = &mut self.cells[at];
                (cell.own, cell.rest, cell.grid) = (Fact::Garbage, Fact::Garbage, NO_GRID);
            }
        }
        same && self.clocks.order_as_much_as(&before.clocks, &points)
    }

    /// The state after so many more micro-batches' periods, each of which takes what was before one to what is now.
    pub fn advance(&mut self, before: &Snapshot, shift: u64, more: u64) {
        for at in 0..self.cells.len() {
            let (then, now) = (&before.cells[at], &self.cells[at]);
            let (own, rest) = ((then.own, now.own), (then.rest, now.rest));
            let (own, rest) = (self.advanced(own, shift, more), self.advanced(rest, shift, more));
            let cell = &mut self.cells[at];
            (cell.own, cell.rest) = (own, rest);
        }
    }

    fn advanced(&mut self, (then, now): (Fact, Fact), shift: u64, more: u64) -> Fact {
        if then == Fact::Garbage {
            return Fact::Garbage;
        }
        let mut sums = |a: u32, b: u32| self.sums.advanced(a, b, shift, more);
        match (then, now) {
            (_, Fact::Value { value, sharding, micro_batch, base }) => Fact::Value { value, sharding, micro_batch: micro_batch + more, base },
            (_, Fact::Frame { number, micro_batch, base }) => Fact::Frame { number, micro_batch: micro_batch + more, base },
            (Fact::Grad { sum, .. }, Fact::Grad { bucket, sum: s, flat }) => Fact::Grad { bucket, sum: sums(sum, s), flat },
            (Fact::Wire { sum, .. }, Fact::Wire { bucket, sum: s, from, kept, base }) => Fact::Wire { bucket, sum: sums(sum, s), from, kept, base },
            (Fact::Scalar { sum, .. }, Fact::Scalar { scalar: Scalar::Loss, sum: s, base, dtype }) => {
                Fact::Scalar { scalar: Scalar::Loss, sum: sums(sum, s), base, dtype }
            }
            // Of no micro-batch.
            (_, Fact::State { bucket, role, version, flat }) => Fact::State { bucket, role, version: self.later(version, more), flat },
            (_, Fact::Trust { bucket, version, pending, base }) => Fact::Trust { bucket, version: self.later(version, more), pending, base },
            (_, Fact::Garbage | Fact::Zero | Fact::Scalar { .. }) => now,
            (_, Fact::Grad { .. } | Fact::Wire { .. }) => Fact::Garbage,
        }
    }

    /// The version that stands where another one does so many micro-batches before.
    fn later(&self, version: Version, micro_batches: u64) -> Version {
        match self.updates {
            Updates::Step => version,
            Updates::MicroBatch => Version(version.0 + micro_batches),
        }
    }

    fn is_shift(&self, then: Fact, now: Fact, shift: u64) -> bool {
        let sums = |a: u32, b: u32| self.sums.get(b).is_shift_of(self.sums.get(a), shift);
        match (then, now) {
            (Fact::Value { value, sharding, micro_batch, base }, b) => b == Fact::Value { value, sharding, micro_batch: micro_batch + shift, base },
            (Fact::Frame { number, micro_batch, base }, b) => b == Fact::Frame { number, micro_batch: micro_batch + shift, base },
            (Fact::State { bucket, role, version, flat }, b) => b == Fact::State { bucket, role, version: self.later(version, shift), flat },
            (Fact::Trust { bucket, version, pending, base }, b) => b == Fact::Trust { bucket, version: self.later(version, shift), pending, base },
            (Fact::Grad { bucket, sum, flat }, Fact::Grad { bucket: b, sum: s, flat: f }) => (bucket, flat) == (b, f) && sums(sum, s),
            (Fact::Wire { bucket, sum, from, kept, base }, Fact::Wire { bucket: b, sum: s, from: f, kept: k, base: at }) => {
                (bucket, from, kept, base) == (b, f, k, at) && sums(sum, s)
            }
            (Fact::Scalar { scalar: Scalar::Loss, sum, base, dtype }, Fact::Scalar { scalar: Scalar::Loss, sum: s, base: b, dtype: d }) => {
                (base, dtype) == (b, d) && sums(sum, s)
            }
            (a, b) => a == b,
        }
    }
}

/// A point that moved to another stream counts as one that was not there before.
fn same_stream((then, now): (Point, Point)) -> (Point, Point) {
    if then.stream == now.stream { (then, now) } else { (Point { stream: now.stream, time: 0 }, now) }
}
