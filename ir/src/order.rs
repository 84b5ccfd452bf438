//! How the positions of a sequence lie along its dim.
//!
//! A causal mask lets late positions see more than early ones. Where ranks have a block of the queries each, blocks of consecutive positions would load the last rank
//! most. *Zigzag* cuts the sequence into twice as many chunks as blocks and pairs the first with the last: block `i` of `n` holds chunks `i` and `2n − 1 − i`, so every
//! block, and every run of whole blocks, sees the same number of keys per query (the balance of arXiv:2310.03294 and Megatron-LM). Only what knows
//! positions cares: rotary and learned embeddings, masks, and whoever fills in the tokens. The loss is a sum over positions, so no order changes it.

/// Words: an *index* is a place along the dim, a *position* a place in the sequence.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Order {
    /// Index and position are the same.
    #[default]
    Straight,
    /// So many blocks, at least one; the sequence divides by twice as many.
    Zigzag { blocks: u64 },
}

/// Consecutive positions at consecutive indices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub index: u64,
    pub position: u64,
    pub len: u64,
}

impl Order {
    /// The order for a sequence whose queries are split over `ways` ranks: balanced where the length allows it.
    pub fn balanced(len: u64, ways: u64) -> Order {
        if ways > 1 && len.is_multiple_of(2 * ways) { Order::Zigzag { blocks: ways } } else { Order::Straight }
    }

    /// Whether a sequence of `len` can be laid out so.
    pub fn fits(self, len: u64) -> bool {
        match self {
            Order::Straight => true,
            Order::Zigzag { blocks } => blocks > 0 && len.is_multiple_of(2) && (len / 2).is_multiple_of(blocks),
        }
    }

    /// The position at an index of a sequence of `len`.
    pub fn position(self, index: u64, len: u64) -> u64 {
        match self {
            Order::Straight => index,
            Order::Zigzag { blocks } => {
                let chunk = len / (2 * blocks);
                let (slot, at) = (index / chunk, index % chunk);
                let nth = if slot.is_multiple_of(2) { slot / 2 } else { 2 * blocks - 1 - slot / 2 };
                nth * chunk + at
            }
        }
    }

    /// The index of a position.
    pub fn index(self, position: u64, len: u64) -> u64 {
        match self {
            Order::Straight => position,
            Order::Zigzag { blocks } => {
                let chunk = len / (2 * blocks);
                let (nth, at) = (position / chunk, position % chunk);
                let slot = if nth < blocks { 2 * nth } else { 2 * (2 * blocks - 1 - nth) + 1 };
                slot * chunk + at
            }
        }
    }

    /// Elements from which on neighbours may part: every multiple of it begins a run.
    pub fn chunk(self, len: u64) -> u64 {
        match self {
            Order::Straight => len,
            Order::Zigzag { blocks } => len / (2 * blocks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_holds_an_early_and_a_late_chunk() {
        let order = Order::balanced(8, 2);
        let positions: Vec<u64> = (0..8).map(|i| order.position(i, 8)).collect();
        assert_eq!(positions, [0, 1, 6, 7, 2, 3, 4, 5]);
        assert!((0..8).all(|i| order.index(order.position(i, 8), 8) == i));
    }

    #[test]
    fn every_block_sees_the_same_number_of_keys() {
        for (len, ways) in [(16, 2), (48, 4), (60, 3)] {
            let order = Order::balanced(len, ways);
            let seen = |block: u64| (0..len / ways).map(|i| order.position(block * len / ways + i, len) + 1).sum::<u64>();
            assert!((0..ways).all(|b| seen(b) == seen(0)), "{len} over {ways}");
        }
        assert_eq!(Order::balanced(10, 4), Order::Straight);
    }
}
