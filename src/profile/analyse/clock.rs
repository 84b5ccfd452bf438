//! Clocks of ranks against each other.
//!
//! A collective ends on all its ranks at one moment, up to microseconds, so of two ranks' clocks
//!
//! ```text
//! ahead(b) − ahead(a) = median over their common collectives of end(b) − end(a)
//! ```
//!
//! Ranks of one host share a clock and need no correction. From the first rank on, each rank is placed by those already placed that it has collectives
//! in common with.

use std::collections::BTreeMap;

use super::matching::{Basis, Instance, median};
use crate::profile::{Ns, Profile};

/// By position in the profile.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Clocks {
    /// How much a rank's stamps are to be lowered.
    pub ahead: Vec<Ns>,
    /// Whether the rank is placed at all: by a common host or common collectives.
    pub placed: Vec<bool>,
    /// The largest difference, after correction, between ends of one collective.
    pub disagreement: Option<Ns>,
}

impl Clocks {
    pub fn estimate(profile: &Profile, instances: &[Instance]) -> Clocks {
        let ranks = profile.ranks.len();
        let mut clocks = Clocks { ahead: vec![0; ranks], placed: vec![false; ranks], disagreement: None };
        let collectives: Vec<&Instance> = instances.iter().filter(|i| !i.op.point_to_point() && i.basis <= Basis::SomeMembers).collect();
        let Some(first) = clocks.placed.first_mut() else { return clocks };
        *first = true;
        loop {
            let by_host = (0..ranks).filter(|r| !clocks.placed[*r]).find_map(|r| {
                let host = profile.ranks[r].host.as_ref()?;
                let same = (0..ranks).find(|q| clocks.placed[*q] && profile.ranks[*q].host.as_ref() == Some(host))?;
                Some((r, clocks.ahead[same]))
            });
            let Some((rank, ahead)) = by_host.or_else(|| clocks.nearest(profile, &collectives)) else { break };
            clocks.placed[rank] = true;
            clocks.ahead[rank] = ahead;
        }
        let spread = |instance: &&Instance| {
            let ends = || instance.members.iter().map(|m| m.of(profile).end().saturating_sub(clocks.ahead[m.rank]));
            Some(ends().max()?.saturating_sub(ends().min()?))
        };
        clocks.disagreement = collectives.iter().filter_map(spread).max();
        clocks
    }

    /// The rank not yet placed that has the most ends in common with those that are, and its place.
    fn nearest(&self, profile: &Profile, collectives: &[&Instance]) -> Option<(usize, Ns)> {
        let mut differences: BTreeMap<usize, Vec<Ns>> = BTreeMap::new();
        for instance in collectives {
            for member in instance.members.iter().filter(|m| !self.placed[m.rank]) {
                for other in instance.members.iter().filter(|m| self.placed[m.rank]) {
                    let end = other.of(profile).end().saturating_sub(self.ahead[other.rank]);
                    differences.entry(member.rank).or_default().push(member.of(profile).end().saturating_sub(end));
                }
            }
        }
        let (rank, mut ends) = differences.into_iter().max_by_key(|(rank, ends)| (ends.len(), std::cmp::Reverse(*rank)))?;
        Some((rank, median(&mut ends)?))
    }
}
