//! Global tuples: the choices that all layers share.
//!
//! The space of a request is every tuple with `dp · tp · pp` = all devices, `dp · micro_batch · micro_batches` = the batch, at least one layer for each stage,
//! and `tp` at most [`MOST_TP`] unless a pin asks for more; times every cut of the layers into `pp` stages; times every option and ZeRO stage of every layer.

use crate::pins::Pins;
use crate::prices::{Prices, Shape};
use dplan_ir::mesh::Mesh;
use dplan_ir::plan::Schedule;

/// The widest tensor parallelism that is searched without a pin: the largest node sold has 72 devices on one fabric, and every matrix of a layer cut 64 ways is small.
pub const MOST_TP: u64 = 64;

/// Choices that all layers share. Ordered: among equal plans the least tuple wins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Tuple {
    pub pp: u64,
    pub tp: u64,
    pub dp: u64,
    pub micro_batch: u64,
    pub micro_batches: u64,
    pub schedule: Schedule,
    pub boundary: Option<u32>,
    pub padding: u32,
}

impl Tuple {
    pub fn shape(&self) -> Shape {
        Shape { tp: self.tp, micro_batch: self.micro_batch, boundary: self.boundary, padding: self.padding }
    }
    pub fn mesh(&self) -> Mesh {
        Mesh::new(self.dp, self.tp)
    }
    /// Micro-batches whose activations a stage holds.
    pub fn in_flight(&self, stage: u64) -> u64 {
        self.schedule.in_flight(stage, self.pp, self.micro_batches)
    }
}

/// All tuples that the pins allow, in order.
pub fn tuples(prices: &mut dyn Prices, devices: u64, batch: u64, pins: &Pins) -> Vec<Tuple> {
    let mut all = Vec::new();
    for (tp, pp, dp) in layouts(prices.classes().len() as u64, devices, pins) {
        if !batch.is_multiple_of(dp) {
            continue;
        }
        let per_rank = batch / dp;
        let paddings = prices.paddings(tp);
        let boundaries: Vec<Option<u32>> = std::iter::once(None)
            .chain(prices.boundary_dims(tp).into_iter().filter(|_| tp > 1).map(Some))
            .filter(|b| match b {
                None => pins.boundary.allows(&false),
                Some(1) => pins.boundary.allows(&true),
                Some(_) => !pins.boundary.is_pinned(),
            })
            .collect();
        for micro_batch in divisors(per_rank).filter(|m| pins.micro_batch.allows(m)) {
            for schedule in Schedule::ALL.into_iter().filter(|s| pins.schedule.allows(s)) {
                for &boundary in &boundaries {
                    for padding in 0..paddings {
                        let micro_batches = per_rank / micro_batch;
                        all.push(Tuple { pp, tp, dp, micro_batch, micro_batches, schedule, boundary, padding });
                    }
                }
            }
        }
    }
    all.sort_unstable();
    all
}

/// Every `(tp, pp, dp)` that the pins allow and that uses all devices.
pub fn layouts(layers: u64, devices: u64, pins: &Pins) -> Vec<(u64, u64, u64)> {
    let mut all = Vec::new();
    for tp in divisors(devices).filter(|tp| pins.tp.allows(tp) && (*tp <= MOST_TP || pins.tp.is_pinned())) {
        for pp in divisors(devices / tp).filter(|pp| pins.pp.allows(pp) && *pp <= layers) {
            let dp = devices / tp / pp;
            if pins.dp.allows(&dp) {
                all.push((tp, pp, dp));
            }
        }
    }
    all
}

/// The batch nearest to `batch` that some layout and micro-batch cover exactly (the smaller of two equally near), if any layout exists.
pub fn nearest_batch(layers: u64, devices: u64, batch: u64, pins: &Pins) -> Option<u64> {
    let units = layouts(layers, devices, pins).into_iter().flat_map(|(_, _, dp)| match pins.micro_batch.values() {
        Some(sizes) => sizes.iter().map(|micro| dp * micro).collect::<Vec<_>>(),
        None => vec![dp],
    });
    let nearest = units.flat_map(|unit| {
        let below = batch / unit * unit;
        [below, below + unit].into_iter().filter(|&b| b > 0)
    });
    nearest.min_by_key(|&b| (b.abs_diff(batch), b))
}

/// Divisors, rising.
pub fn divisors(n: u64) -> impl Iterator<Item = u64> {
    let low: Vec<u64> = (1..).take_while(move |d| d * d <= n).filter(|&d| n.is_multiple_of(d)).collect();
    let high: Vec<u64> = low.iter().rev().map(|d| n / d).filter(|h| !low.contains(h)).collect();
    low.into_iter().chain(high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_rise_and_are_complete() {
        assert_eq!(divisors(36).collect::<Vec<_>>(), [1, 2, 3, 4, 6, 9, 12, 18, 36]);
        assert_eq!(divisors(1).collect::<Vec<_>>(), [1]);
        assert_eq!(divisors(7).collect::<Vec<_>>(), [1, 7]);
    }

    #[test]
    fn the_nearest_batch_is_one_that_the_pins_cover() {
        let pins = Pins::parse("dp=4,micro=3").unwrap();
        assert_eq!(nearest_batch(6, 8, 30, &pins), Some(24));
        assert_eq!(nearest_batch(6, 8, 31, &pins), Some(36));
        assert_eq!(nearest_batch(6, 8, 5, &pins), Some(12));
        assert_eq!(nearest_batch(6, 9, 5, &pins), None);
    }
}
