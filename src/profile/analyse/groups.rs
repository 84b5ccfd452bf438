//! The group of every piece of communication. Profiles of NCCL say it; of others it is one of the groups the ranks are members of, and the
//! right one is that under which all members' calls, paired in order, overlap in time and end together.

use std::collections::{BTreeMap, BTreeSet};

use super::matching::median;
use crate::profile::{Comm, CommOp, Ns, Profile};

/// By rank and comm; `None` where it cannot be told.
pub fn assign(profile: &Profile) -> Vec<Vec<Option<Vec<u32>>>> {
    let mut groups: Vec<Vec<Option<Vec<u32>>>> = profile.ranks.iter().map(|r| r.comms.iter().map(|c| c.group.clone()).collect()).collect();
    let candidates = candidates(profile);
    let mut unknown: BTreeMap<Signature, BTreeMap<usize, Vec<usize>>> = BTreeMap::new();
    for (rank, record) in profile.ranks.iter().enumerate() {
        for (i, comm) in record.comms.iter().enumerate().filter(|(_, c)| c.group.is_none() && c.peer.is_none()) {
            unknown.entry(signature(comm)).or_default().entry(rank).or_default().push(i);
        }
    }
    // With one candidate there is no choice.
    if let [only] = candidates.as_slice() {
        for by_rank in unknown.values() {
            for (rank, comms) in by_rank.iter().filter(|(r, _)| only.contains(&profile.ranks[**r].rank)) {
                for &i in comms.iter().filter(|i| size_fits(&profile.ranks[*rank].comms[**i], only)) {
                    groups[*rank][i] = Some(only.clone());
                }
            }
        }
        return groups;
    }
    for by_rank in unknown.values() {
        let mut fits: Vec<(&Vec<u32>, Ns)> = candidates.iter().filter_map(|g| Some((g, spread(profile, by_rank, g)?))).collect();
        // All members of a larger group are in step too where a smaller one is meant, only less tightly.
        fits.sort_by_key(|(group, _)| std::cmp::Reverse(group.len()));
        let mut taken: BTreeSet<u32> = BTreeSet::new();
        for (group, loose) in &fits {
            let tighter = fits
                .iter()
                .any(|(g, s)| g.len() < group.len() && g.iter().all(|r| group.contains(r)) && s.saturating_mul(4).saturating_add(50_000) < *loose);
            if tighter || group.iter().any(|r| taken.contains(r)) {
                continue;
            }
            taken.extend(group.iter());
            for (rank, comms) in by_rank.iter().filter(|(r, _)| group.contains(&profile.ranks[**r].rank)) {
                for &i in comms {
                    groups[*rank][i] = Some((*group).clone());
                }
            }
        }
    }
    groups
}

/// Groups of more than one rank: those the profile names, and all ranks of the world.
fn candidates(profile: &Profile) -> Vec<Vec<u32>> {
    let mut all: BTreeSet<Vec<u32>> = profile.ranks.iter().flat_map(|r| &r.groups).map(|g| g.ranks.clone()).filter(|g| g.len() > 1).collect();
    if all.is_empty() {
        let world = profile.ranks.iter().filter_map(|r| r.world_size).max().filter(|n| *n <= 1 << 16);
        let ranks: Vec<u32> = world.map_or_else(|| profile.ranks.iter().map(|r| r.rank).collect(), |n| (0..n).collect());
        if ranks.len() > 1 {
            all.insert(ranks);
        }
    }
    all.into_iter().collect()
}

fn size_fits(comm: &Comm, group: &[u32]) -> bool {
    comm.group_size.is_none_or(|n| n as usize == group.len())
}

/// What calls of one collective have in common on all its ranks.
type Signature = (CommOp, Option<u64>);

fn signature(comm: &Comm) -> Signature {
    let sized = !matches!(comm.op, CommOp::AllToAll | CommOp::SendRecv | CommOp::Other);
    (comm.op, comm.sent_bytes.or(comm.received_bytes).filter(|_| sized))
}

/// How far apart calls end that this group would pair, in the middle; `None` if it cannot be the group: calls do not pair up, or do not overlap.
fn spread(profile: &Profile, by_rank: &BTreeMap<usize, Vec<usize>>, group: &[u32]) -> Option<Ns> {
    let members: Vec<(usize, &Vec<usize>)> = by_rank.iter().filter(|(r, _)| group.contains(&profile.ranks[**r].rank)).map(|(r, c)| (*r, c)).collect();
    let present = profile.ranks.iter().filter(|r| group.contains(&r.rank)).count();
    let calls = members.first()?.1.len();
    if members.len() < 2 || members.len() != present || members.iter().any(|(_, c)| c.len() != calls) {
        return None;
    }
    let comm = |rank: usize, i: usize| &profile.ranks[rank].comms[i];
    // Clocks of different hosts differ by a constant.
    let (first, firsts) = members[0];
    let ahead: Vec<Ns> = members
        .iter()
        .map(|(rank, comms)| {
            let host = profile.ranks[*rank].host.as_ref();
            if host.is_some() && host == profile.ranks[first].host.as_ref() {
                return 0;
            }
            median(&mut comms.iter().zip(firsts).map(|(i, j)| comm(*rank, *i).end().saturating_sub(comm(first, *j).end())).collect::<Vec<_>>())
                .unwrap_or(0)
        })
        .collect();
    let mut spreads = Vec::with_capacity(calls);
    for call in 0..calls {
        let times = || members.iter().zip(&ahead).map(|((rank, comms), ahead)| (comm(*rank, comms[call]), *ahead));
        if !times().all(|(c, _)| size_fits(c, group)) {
            return None;
        }
        let last_start = times().map(|(c, a)| c.start.saturating_sub(a)).max()?;
        let first_end = times().map(|(c, a)| c.end().saturating_sub(a)).min()?;
        let last_end = times().map(|(c, a)| c.end().saturating_sub(a)).max()?;
        // A millisecond of grace: an end is stamped by a thread that may wait for its turn.
        if last_start > first_end.saturating_add(1_000_000) {
            return None;
        }
        spreads.push(last_end.saturating_sub(first_end));
    }
    median(&mut spreads)
}
