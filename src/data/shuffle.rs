//! The order in which sequences are taken.
//!
//! Sequence number k of a run, counted over all epochs, is sequence π(k mod n) of the n that there are, where π is a permutation keyed by seed and epoch ⌊k/n⌋. π is a
//! Feistel network over the smallest 2²ᵇ ≥ n, walked until the result is below n: a bijection whose every value costs the same, with nothing stored. So a
//! position in the data is one number, and to continue from it needs no more.

use dplan_ir::splitmix::mix;

/// How sequences are ordered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SequenceOrder {
    /// As in the file.
    File,
    /// Each epoch in another pseudo-random order.
    Shuffled { seed: u64 },
}

impl SequenceOrder {
    pub fn name(self) -> &'static str {
        match self {
            SequenceOrder::File => "as in the file",
            SequenceOrder::Shuffled { .. } => "shuffled",
        }
    }

    /// Which of `n` sequences number `k` of a run is.
    pub fn sequence(self, k: u64, n: u64) -> u64 {
        match self {
            SequenceOrder::File => k % n,
            SequenceOrder::Shuffled { seed } => permute(mix(seed ^ mix(k / n)), k % n, n),
        }
    }
}

/// π(i) for a permutation of `0..n`.
fn permute(key: u64, i: u64, n: u64) -> u64 {
    let half = (64 - (n - 1).leading_zeros()).div_ceil(2).max(1);
    let low = (1u64 << half) - 1;
    let mut x = i;
    // The domain is less than 4n, so this takes a few turns, and ends: π walks on the cycle that i itself is on.
    loop {
        let (mut left, mut right) = (x >> half, x & low);
        for round in 0..4 {
            (left, right) = (right, left ^ (mix(key ^ right.wrapping_mul(4) ^ round) & low));
        }
        x = left << half | right;
        if x < n {
            return x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_takes_each_sequence_once_in_an_order_of_its_own() {
        for n in [1u64, 2, 3, 5, 16, 17, 64, 100, 1023] {
            let epoch = |seed, e: u64| (0..n).map(|i| SequenceOrder::Shuffled { seed }.sequence(e * n + i, n)).collect::<Vec<_>>();
            let orders = [epoch(1, 0), epoch(1, 1), epoch(2, 0)];
            for order in &orders {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..n).collect::<Vec<_>>(), "{n}");
            }
            if n > 10 {
                assert!(orders[0] != orders[1] && orders[0] != orders[2] && orders[0] != (0..n).collect::<Vec<_>>(), "{n}");
            }
        }
    }

    /// Where sequence 0 lands is about uniform: a Pearson statistic of 16 cells, of 15 degrees of freedom, is above 38 once in a thousand times.
    #[test]
    fn places_are_about_uniform() {
        let mut cells = [0f64; 16];
        for seed in 0..4000 {
            cells[SequenceOrder::Shuffled { seed }.sequence(0, 160) as usize / 10] += 1.0;
        }
        let statistic: f64 = cells.iter().map(|c| (c - 250.0).powi(2) / 250.0).sum();
        assert!(statistic < 38.0, "{statistic}: {cells:?}");
    }
}
