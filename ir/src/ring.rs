//! Blocks that go round among ranks, and results that are made of one block after another.
//!
//! `n` ranks along some axes have a block of the keys each, and as many blocks of the queries. In every *turn* each rank hands the keys it has to the next rank, cyclically:
//!
//! ```text
//! in turn t, rank r has the keys of rank (r − t) mod n
//! turn      rank 0   rank 1   rank 2        what rank 1 attends to then
//!  0          k0       k1       k2          its own block
//!  1          k2       k0       k1          the block of one rank before
//!  2          k1       k2       k0          the block of two ranks before
//! ```
//! Every pair of a block of queries and a block of keys has a *difference*, (query block − key block) mod `n`, and those with difference `t` meet in turn `t`, whichever ranks they are
//! on. So what is computed from pairs of blocks is known by the set of differences in it, the same on all ranks: `over`. It stays with a query's results on their own rank (`turn`
//! 0) and goes along with a block of keys (gradients of keys and values: `turn` that of the block).
//!
//! Two parts are *joined* if they are of the same block and have no difference in common: by sum, or, of an attention's results, as the pair (o, lse) with
//! lse = log(exp lse₁ + exp lse₂), o = o₁ · exp(lse₁ − lse) + o₂ · exp(lse₂ − lse). What has every difference and is at home is whole, and is no part of a ring any more: [`Ring::settled`].

use crate::mesh::AxisSet;

/// Whose block a rank has, and of which pairs of blocks it is made.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ring {
    /// The axes along which blocks go round.
    pub axes: AxisSet,
    /// Ranks along them.
    pub ranks: u64,
    /// The block is that of the rank so many places before.
    pub turn: u64,
    /// Differences of the pairs of blocks that are in it, a bit each. What is no sum over pairs has them all.
    pub over: u64,
}

impl Ring {
    /// Most ranks of a ring: a bit each, and an instruction or two of every program.
    pub const MOST: u64 = 64;

    /// A rank's own block, of all pairs.
    pub fn home(axes: AxisSet, ranks: u64) -> Ring {
        Ring { axes, ranks, turn: 0, over: Ring::all(ranks) }
    }
    /// Every difference among so many ranks, at most [`Ring::MOST`].
    pub fn all(ranks: u64) -> u64 {
        u64::MAX.checked_shr(Ring::MOST.saturating_sub(ranks) as u32).unwrap_or(0)
    }
    /// The difference of the pairs that meet in a turn.
    pub fn met(turn: u64) -> u64 {
        1u64.checked_shl(turn as u32).unwrap_or(0)
    }
    /// Whether the numbers are those of a ring that is still going round or not yet whole.
    pub fn is_valid(&self) -> bool {
        (2..=Ring::MOST).contains(&self.ranks)
            && self.turn < self.ranks
            && self.over != 0
            && self.over & !Ring::all(self.ranks) == 0
            && self.settled().is_some()
    }
    /// Handed on by one rank.
    pub fn shifted(self) -> Ring {
        Ring { turn: (self.turn + 1) % self.ranks.max(1), ..self }
    }
    /// Nothing of a block that is at home and whole: then it is like any other.
    pub fn settled(self) -> Option<Ring> {
        (self.turn != 0 || self.over != Ring::all(self.ranks)).then_some(self)
    }
    /// Two parts of one block together.
    ///
    /// # Errors
    /// Why they are not that, in words.
    pub fn joined(self, other: Ring) -> Result<Ring, String> {
        if (self.axes, self.ranks, self.turn) != (other.axes, other.ranks, other.turn) {
            return Err("the parts are of blocks of different ranks".into());
        }
        match self.over & other.over {
            0 => Ok(Ring { over: self.over | other.over, ..self }),
            both => Err(format!("pairs of blocks of difference {} are in both parts", both.trailing_zeros())),
        }
    }
    /// The differences, rising.
    pub fn differences(&self) -> impl Iterator<Item = u64> + use<> {
        let over = self.over;
        (0..Ring::MOST).filter(move |&d| over & Ring::met(d) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AXES: AxisSet = AxisSet(1);

    #[test]
    fn a_block_is_home_again_after_as_many_turns_as_ranks() {
        for ranks in [2, 3, 64] {
            let turns: Vec<Ring> = std::iter::successors(Some(Ring::home(AXES, ranks)), |r| Some(r.shifted())).take(ranks as usize + 1).collect();
            assert_eq!(turns[0], turns[ranks as usize]);
            assert_eq!((turns[0].settled(), turns[1].settled().is_some()), (None, true));
            assert!(turns[1..ranks as usize].iter().all(Ring::is_valid));
        }
    }

    #[test]
    fn parts_make_a_whole_when_each_difference_is_in_one_of_them() {
        let part = |over| Ring { over, ..Ring::home(AXES, 3) };
        let two = part(0b001).joined(part(0b100)).unwrap();
        assert_eq!(two.settled().map(|r| r.differences().collect::<Vec<_>>()), Some(vec![0, 2]));
        assert_eq!(two.joined(part(0b010)).unwrap().settled(), None);
        assert!(two.joined(part(0b100)).unwrap_err().contains("difference 2"));
        assert!(two.joined(part(0b010).shifted()).is_err());
    }
}
