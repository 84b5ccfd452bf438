//! How evenly the ranks are loaded.
//!
//! The work of a rank is its computation. The straggler is the rank the others wait for: the last to arrive at a collective is the one that waits least in
//! it.

use super::exposure::Exposure;
use super::matching::{Basis, Instance};
use super::total;
use crate::profile::{Ns, Profile};

#[derive(Clone, PartialEq, Debug, Default)]
pub struct Balance {
    pub mean_compute: Ns,
    /// Rank and its computation.
    pub most: Option<(u32, Ns)>,
    pub least: Option<(u32, Ns)>,
    /// Most over mean, less one; `None` of one rank.
    pub imbalance: Option<f64>,
    /// Of the collectives whose members were all recorded, how often each rank came last: rank, times, most often first.
    pub last_arrivals: Vec<(u32, usize)>,
    pub collectives: usize,
}

pub fn of(profile: &Profile, exposures: &[Exposure], instances: &[Instance]) -> Balance {
    let work = || profile.ranks.iter().zip(exposures).map(|(r, e)| (r.rank, e.parts.compute));
    let count = exposures.len().max(1) as Ns;
    let mean_compute = total(work().map(|(_, c)| c)) / count;
    let most = work().max_by_key(|(rank, c)| (*c, std::cmp::Reverse(*rank)));
    let imbalance = most.filter(|_| exposures.len() > 1 && mean_compute > 0).map(|(_, c)| c as f64 / mean_compute as f64 - 1.0);
    let mut last = vec![0usize; profile.ranks.len()];
    let mut collectives = 0;
    for instance in instances.iter().filter(|i| i.basis == Basis::AllMembers && !i.op.point_to_point()) {
        if let Some(member) = instance.members.iter().min_by_key(|m| m.of(profile).duration) {
            last[member.rank] += 1;
            collectives += 1;
        }
    }
    let mut last_arrivals: Vec<(u32, usize)> = profile.ranks.iter().zip(last).map(|(r, n)| (r.rank, n)).filter(|(_, n)| *n > 0).collect();
    last_arrivals.sort_by_key(|(rank, n)| (std::cmp::Reverse(*n), *rank));
    Balance { mean_compute, most, least: work().min_by_key(|(rank, c)| (*c, *rank)), imbalance, last_arrivals, collectives }
}
