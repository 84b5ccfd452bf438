//! Which devices each stage runs on, where a cluster has groups of different devices.
//!
//! Ranks are counted group by group, in an order of the groups that the search chooses ([`Placement`]). All stages have as many ranks, so an order puts each stage into one
//! group, or across the border of several:
//!
//! ```text
//! groups         a: 6 devices, b: 4 devices
//! order a b      5 stages of 2 ranks: a a a b b        2 stages of 5 ranks: a ab
//! order b a      5 stages of 2 ranks: b b a a a        2 stages of 5 ranks: ab a
//! ```
//! The groups that a stage touches are its *site*. Everything that a stage does by itself costs what it costs on its site; where that is several groups, what it costs on
//! devices and links that are in everything as slow, and in memory as small, as the least of them ([`crate::machine::cluster`]). All data-parallel ranks have equal parts
//! of the batch: it is layers that are shared out unevenly over unlike devices, not samples.
//!
//! **Bounds.** With `a` and `b` of a choice on a site, an objective of the form `Σ_s Σ_layers a + max_s Σ_layers b` is, for any weights `w_s ≥ 0` with `Σ_s w_s = 1`, at least
//!
//! ```text
//! Σ_layers min over sites and choices of (a + w_site · b)
//! ```
//! since the greatest of some numbers is at least any mean of them. Equal weights are best for equal devices; else those under which a pass over all layers costs the
//! same on every site ([`weightings`]), so that nothing is gained by moving a layer.

use dplan_ir::plan::Placement;

/// Some groups of a cluster: a bit for each, at least one of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Site(u8);

impl Site {
    /// The only one, where all devices are alike.
    pub const ONLY: Site = Site(1);

    pub fn of_group(group: usize) -> Site {
        Site(1 << group)
    }
    /// All sites that so many groups make; `index` counts them in this order.
    pub fn all(groups: usize) -> impl Iterator<Item = Site> {
        (1..1u8 << groups).map(Site)
    }
    pub fn index(self) -> usize {
        usize::from(self.0) - 1
    }
    pub fn with(self, other: Site) -> Site {
        Site(self.0 | other.0)
    }
    /// The groups, rising.
    pub fn groups(self) -> impl Iterator<Item = usize> {
        (0..8).filter(move |group| self.0 >> group & 1 == 1)
    }
    /// Whether it is one group.
    pub fn is_pure(self) -> bool {
        self.0.is_power_of_two()
    }
}

/// Where the ranks of a stage are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seat {
    pub site: Site,
    /// The first of them, counted within the group; 0 on several groups.
    pub first: u64,
}

/// The devices of each group of a cluster; of one group any number.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Groups(Vec<u64>);

impl Groups {
    /// All devices alike.
    pub fn one() -> Groups {
        Groups(vec![u64::MAX])
    }

    pub fn new(sizes: Vec<u64>) -> Groups {
        if sizes.len() <= 1 { Groups::one() } else { Groups(sizes) }
    }

    pub fn sizes(&self) -> &[u64] {
        &self.0
    }
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The site of all devices.
    pub fn whole(&self) -> Site {
        Site(((1u16 << self.count()) - 1) as u8)
    }

    /// Where a stage of so many ranks is.
    pub fn seat(&self, placement: Placement, ranks: u64, stage: u64) -> Seat {
        let (first, end) = (stage * ranks, (stage + 1) * ranks);
        let (mut start, mut seat) = (0u64, None);
        for &group in &placement.0[..self.count()] {
            let behind = start.saturating_add(self.0[usize::from(group)]);
            if first < behind && start < end {
                let here = Site::of_group(usize::from(group));
                seat = Some(match seat {
                    None => Seat { site: here, first: first.saturating_sub(start) },
                    Some(Seat { site, .. }) => Seat { site: site.with(here), first: 0 },
                });
            }
            start = behind;
        }
        seat.unwrap_or(Seat { site: self.whole(), first: 0 })
    }

    /// The orders of groups that put stages elsewhere than every order before them.
    pub fn placements(&self, ranks: u64, stages: u64) -> Vec<Placement> {
        let seats = |&placement: &Placement| (0..stages).map(|stage| self.seat(placement, ranks, stage)).collect::<Vec<_>>();
        if self.count() == 1 {
            return vec![Placement::default()];
        }
        let mut kept: Vec<(Vec<Seat>, Placement)> = Vec::new();
        for placement in Placement::all(self.count()) {
            let seats = seats(&placement);
            if kept.iter().all(|(known, _)| *known != seats) {
                kept.push((seats, placement));
            }
        }
        kept.into_iter().map(|(_, placement)| placement).collect()
    }

    /// The sites of a placement, each with the number of stages there, in order of the first of these.
    pub fn sites(&self, placement: Placement, ranks: u64, stages: u64) -> Vec<(Site, u64)> {
        if self.count() == 1 {
            return vec![(Site::ONLY, stages)];
        }
        let mut sites: Vec<(Site, u64)> = Vec::new();
        for stage in 0..stages {
            let site = self.seat(placement, ranks, stage).site;
            match sites.iter_mut().find(|(known, _)| *known == site) {
                Some((_, count)) => *count += 1,
                None => sites.push((site, 1)),
            }
        }
        sites
    }
}

/// Whole numbers in proportion to the weights of the stages of each site.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Weighting {
    pub of_site: Vec<u64>,
    /// Over all stages.
    pub sum: u64,
}

impl Weighting {
    fn new(stages: &[u64], of_site: Vec<u64>) -> Weighting {
        let sum = stages.iter().zip(&of_site).map(|(&count, &weight)| count * weight).sum();
        Weighting { of_site, sum }
    }

    /// `sum · a + weight · b`.
    pub fn cost(&self, site: usize, a: u64, b: u64) -> u128 {
        u128::from(self.sum) * u128::from(a) + u128::from(self.of_site[site]) * u128::from(b)
    }
}

/// Parts of a weight: fine enough that rounding them costs nothing that counts.
const PARTS: f64 = 65_536.0;

/// Weights worth trying for sites with so many stages each, where a pass over all layers adds `a` and `b`. Any weights bound the objective; these are only good ones.
pub fn weightings(stages: &[u64], passes: &[(u64, u64)]) -> Vec<Weighting> {
    let equal = Weighting::new(stages, vec![1; stages.len()]);
    if stages.len() == 1 {
        return vec![equal];
    }
    // a + w · b is the same everywhere where w > 0.
    let (a, b): (Vec<f64>, Vec<f64>) = passes.iter().map(|&(a, b)| (a as f64, (b as f64).max(1.0))).unzip();
    let mut level = f64::INFINITY;
    loop {
        let open = || (0..stages.len()).filter(|&site| a[site] < level);
        let sum = |of: &dyn Fn(usize) -> f64| open().map(|site| stages[site] as f64 * of(site)).sum::<f64>();
        let next = (1.0 + sum(&|site| a[site] / b[site])) / sum(&|site| 1.0 / b[site]);
        if next >= level {
            break;
        }
        level = next;
    }
    let weight = |site: usize| ((level - a[site]).max(0.0) / b[site] * PARTS).round() as u64;
    let balanced = Weighting::new(stages, (0..stages.len()).map(weight).collect());
    if balanced.sum == 0 { vec![equal] } else { vec![equal, balanced] }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sites of all stages, as the letters of their groups.
    fn sites(sizes: &[u64], order: &[u8], ranks: u64) -> Vec<String> {
        let groups = Groups::new(sizes.to_vec());
        let stages = sizes.iter().sum::<u64>() / ranks;
        let name = |site: Site| site.groups().map(|g| char::from(b'a' + g as u8)).collect();
        (0..stages).map(|stage| name(groups.seat(Placement::of(order), ranks, stage).site)).collect()
    }

    #[test]
    fn stages_lie_in_groups_or_across_their_borders() {
        assert_eq!(sites(&[6, 4], &[0, 1], 2), ["a", "a", "a", "b", "b"]);
        assert_eq!(sites(&[6, 4], &[1, 0], 2), ["b", "b", "a", "a", "a"]);
        assert_eq!(sites(&[6, 4], &[0, 1], 5), ["a", "ab"]);
        assert_eq!(sites(&[2, 2, 4], &[2, 0, 1], 4), ["c", "ab"]);
        assert_eq!(sites(&[2, 2, 4], &[0, 2, 1], 8), ["abc"]);
        assert_eq!(sites(&[3, 5], &[1, 0], 2), ["b", "b", "ab", "a"]);
    }

    #[test]
    fn seats_count_within_their_group() {
        let groups = Groups::new(vec![6, 4]);
        let first = |stage| groups.seat(Placement::of(&[1, 0]), 2, stage).first;
        assert_eq!([0, 1, 2, 3, 4].map(first), [0, 2, 0, 2, 4]);
        assert_eq!(Groups::one().seat(Placement::default(), 8, 3), Seat { site: Site::ONLY, first: 24 });
    }

    #[test]
    fn placements_differ_in_what_they_do() {
        let count = |sizes: &[u64], ranks| Groups::new(sizes.to_vec()).placements(ranks, sizes.iter().sum::<u64>() / ranks).len();
        assert_eq!((count(&[8], 2), count(&[4, 4], 8), count(&[4, 4], 4), count(&[4, 2, 2], 1)), (1, 1, 2, 6));
        // Two stages of four: the small groups are together whichever comes first.
        assert_eq!(count(&[4, 2, 2], 4), 4);
    }

    /// Three quick stages and one that takes four times as long: with 100 repeats the best fractional sharing out is almost that of the rates.
    #[test]
    fn balanced_weights_bound_unlike_devices_far_better_than_equal_ones() {
        let (stages, passes) = ([3, 1], [(10_000, 990_000), (40_000, 3_960_000)]);
        let bound = |w: &Weighting| (0..2).map(|site| w.cost(site, passes[site].0, passes[site].1).div_ceil(u128::from(w.sum))).min().unwrap();
        let bounds: Vec<u128> = weightings(&stages, &passes).iter().map(bound).collect();
        assert_eq!(bounds[0], 10_000 + 990_000 / 4);
        // Quick stages take 4/13 of the layers each, the slow one 1/13, and all 40 000 / 13 a repeat.
        let shared = 990_000 * 4 / 13;
        assert!(bounds[1] > 10_000 + shared && bounds[1] < 14_000 + shared, "{bounds:?}");
        assert_eq!(weightings(&[4], &[(1, 1)]), [Weighting { of_site: vec![1], sum: 4 }]);
    }
}
