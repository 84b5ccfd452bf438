//! Measured times of collectives inside one node.
//!
//! A curve is the time of one collective in a group of 2, 4 or 8 by its size, linear between measured sizes: each stretch is an α–β of its own, so
//! that the changes of algorithm and protocol that a library makes on its way from bytes to gigabytes are in it. Invariants, established by
//! [`Curves::new`] however rough the measurements:
//! - time never falls as bytes or ranks grow;
//! - time per byte never rises as bytes grow, so that one large collective takes at most as long as its parts one after another.

use crate::units::Nanos;
use dplan_ir::program::Pattern;

/// Group sizes that are measured.
pub const RANKS: [u64; 3] = [2, 4, 8];

/// What is measured: every [`Pattern`] but a shift, which is a message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
}

impl Op {
    pub const ALL: [Op; 4] = [Op::AllReduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll];

    pub fn name(self) -> &'static str {
        match self {
            Op::AllReduce => "all_reduce",
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllToAll => "all_to_all",
        }
    }

    pub fn of(pattern: Pattern) -> Option<Op> {
        Some(match pattern {
            Pattern::AllReduce => Op::AllReduce,
            Pattern::AllGather => Op::AllGather,
            Pattern::ReduceScatter => Op::ReduceScatter,
            Pattern::AllToAll => Op::AllToAll,
            Pattern::Shift => return None,
        })
    }
}

/// `(bytes, nanoseconds)` by rising size.
pub type Points = Vec<(u64, u64)>;

/// One measured curve.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Curve {
    pub op: Op,
    /// One of [`RANKS`].
    pub ranks: u64,
    pub points: Points,
}

/// Curves of a node. An op is there for all of [`RANKS`] or for none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Curves {
    by_op: [Option<[Points; 3]>; 4],
}

impl Curves {
    /// Curves that keep the invariants and are nowhere below the measured ones. An op whose curves are not of the same sizes, or not all there, is left out.
    pub fn new(measured: &[Curve]) -> Curves {
        let mut curves = Curves::default();
        for op in Op::ALL {
            let of = |ranks: u64| measured.iter().find(|c| c.op == op && c.ranks == ranks && !c.points.is_empty());
            let [Some(two), Some(four), Some(eight)] = RANKS.map(of) else { continue };
            let sizes = |c: &Curve| c.points.iter().map(|p| p.0).collect::<Vec<_>>();
            let rising = sizes(two).windows(2).all(|w| w[0] < w[1]) && two.points[0].0 > 0;
            if !rising || sizes(two) != sizes(four) || sizes(four) != sizes(eight) {
                continue;
            }
            let mut points = [two.points.clone(), four.points.clone(), eight.points.clone()];
            for ranks in 0..3 {
                settle(&mut points[ranks]);
                if ranks + 1 < 3 {
                    let (below, above) = points.split_at_mut(ranks + 1);
                    for (more, less) in above[0].iter_mut().zip(&below[ranks]) {
                        more.1 = more.1.max(less.1);
                    }
                }
            }
            curves.by_op[op as usize] = Some(points);
        }
        curves
    }

    pub fn is_empty(&self) -> bool {
        self.by_op.iter().all(Option::is_none)
    }

    /// All curves, by op and ranks.
    pub fn all(&self) -> Vec<Curve> {
        let of = |op: Op| self.by_op[op as usize].iter().flat_map(move |p| RANKS.iter().zip(p).map(move |(&ranks, p)| (op, ranks, p.clone())));
        Op::ALL.into_iter().flat_map(of).map(|(op, ranks, points)| Curve { op, ranks, points }).collect()
    }

    /// Time among `ranks` of one node, or none where the op was not measured. Between measured group sizes it is linear; above the largest, the share of
    /// the bytes that crosses links grows as in a ring, and each further rank costs `hop`.
    pub fn time(&self, op: Op, ranks: u64, bytes: u64, hop: Nanos) -> Option<Nanos> {
        let points = self.by_op[op as usize].as_ref()?;
        let at = |i: usize| u128::from(time_at(&points[i], bytes));
        let between =
            |low: u128, high: u128, from: u64, to: u64| low + (high.saturating_sub(low) * u128::from(ranks - from)).div_ceil(u128::from(to - from));
        let nanos = match ranks {
            0 | 1 => 0,
            2 => at(0),
            3 | 4 => between(at(0), at(1), 2, 4),
            5..=8 => between(at(1), at(2), 4, 8),
            _ => (at(2) * 8 * u128::from(ranks - 1)).div_ceil(7 * u128::from(ranks)) + u128::from(hop.0) * u128::from(ranks - 8),
        };
        Some(Nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

/// Raises what is below an earlier time, or below the share of a later one.
fn settle(points: &mut Points) {
    for i in 1..points.len() {
        points[i].1 = points[i].1.max(points[i - 1].1);
    }
    for i in (1..points.len()).rev() {
        let ((small, _), (large, time)) = (points[i - 1], points[i]);
        let share = (u128::from(time) * u128::from(small)).div_ceil(u128::from(large));
        points[i - 1].1 = points[i - 1].1.max(u64::try_from(share).unwrap_or(u64::MAX));
    }
}

/// Linear between the points, level before the first, with the slope of the last stretch after the last.
fn time_at(points: &[(u64, u64)], bytes: u64) -> u64 {
    let after = points.partition_point(|p| p.0 <= bytes);
    let (first, second) = match after {
        0 => return points.first().map_or(0, |p| p.1),
        n if n == points.len() && n == 1 => ((0, 0), points[0]),
        n if n == points.len() => (points[n - 2], points[n - 1]),
        n => (points[n - 1], points[n]),
    };
    let rise = u128::from(second.1.saturating_sub(first.1)) * u128::from(bytes - first.0);
    let nanos = u128::from(first.1) + rise.div_ceil(u128::from((second.0 - first.0).max(1)));
    u64::try_from(nanos).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of rough measurements: a protocol change that halves the speed, and eight ranks faster than four.
    fn rough() -> Curves {
        let points = |times: [u64; 4]| [1 << 10, 1 << 15, 1 << 20, 1 << 25].into_iter().zip(times).collect();
        let curve = |ranks, times| Curve { op: Op::AllReduce, ranks, points: points(times) };
        Curves::new(&[curve(2, [9, 8, 400, 9_000]), curve(4, [14, 15, 900, 12_000]), curve(8, [20, 21, 700, 11_000])])
    }

    #[test]
    fn time_grows_with_bytes_and_ranks_and_never_faster_than_bytes() {
        let curves = rough();
        let time = |ranks, bytes| curves.time(Op::AllReduce, ranks, bytes, Nanos(3)).unwrap().0;
        let sizes: Vec<u64> = (0..60).flat_map(|i| [1 << (i / 2), (1 << (i / 2)) * 3 / 2]).collect();
        for ranks in 1..20 {
            for &bytes in &sizes {
                assert!(time(ranks, bytes) <= time(ranks + 1, bytes), "{ranks} ranks, {bytes} bytes");
                assert!(time(ranks, bytes) <= time(ranks, bytes + 1), "{ranks} ranks, {bytes} bytes");
                assert!(time(ranks, 2 * bytes) <= 2 * time(ranks, bytes) + 1, "{ranks} ranks, {bytes} bytes: a rounded nanosecond is allowed");
            }
        }
        assert_eq!(time(2, 1 << 20), 400, "a measured size is met");
    }

    #[test]
    fn half_a_table_is_no_table() {
        let one = Curve { op: Op::AllGather, ranks: 2, points: vec![(8, 1), (16, 2)] };
        assert!(Curves::new(std::slice::from_ref(&one)).is_empty());
        let other = |ranks| Curve { ranks, points: vec![(8, 1), (17, 2)], ..one.clone() };
        assert!(Curves::new(&[one.clone(), other(4), other(8)]).is_empty(), "curves of different sizes");
        assert_eq!(rough().all().len(), 3);
        assert_eq!(Curves::new(&rough().all()), rough());
    }
}
