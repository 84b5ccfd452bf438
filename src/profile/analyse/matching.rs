//! Which communication of one rank is the same as which of another, and what part of it is transfer.
//!
//! A collective starts on each rank when that rank arrives and ends everywhere when the last has arrived and the data is through. So of one collective
//!
//! ```text
//! transfer = min over ranks of duration        wait of a rank = its duration − transfer
//! ```
//!
//! which needs no common clock. A send or receive that was posted ahead (gloo) lasts from posting to awaiting instead; there the transfer is from
//! the later of the two postings to the end of the receive, on corrected clocks.
//!
//! Members of a group issue its collectives in one order, so the k-th of one rank is the k-th of another; where ranks were recorded over different
//! windows, a shift under which op and size agree and ends differ by the steadiest amount. Where a rank's peers are not given, the fastest call of the same
//! kind stands for the transfer: then what is said is a bound ([`Basis`]).

use std::collections::BTreeMap;

use super::clock::Clocks;
use super::groups;
use super::steps::Steps;
use crate::profile::{Comm, CommOp, Ns, Profile};

/// A piece of communication: which rank (by position in the profile), which of its comms.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CommRef {
    pub rank: usize,
    pub comm: usize,
}

impl CommRef {
    pub fn of<'p>(&self, profile: &'p Profile) -> &'p Comm {
        &profile.ranks[self.rank].comms[self.comm]
    }
}

/// One collective, or one message.
#[derive(Clone, PartialEq, Debug)]
pub struct Instance {
    pub op: CommOp,
    /// Members, where they are known.
    pub group: Option<Vec<u32>>,
    pub group_size: Option<u32>,
    pub bytes: Option<u64>,
    pub members: Vec<CommRef>,
    pub transfer: Ns,
    pub basis: Basis,
}

/// How far a transfer time is to be trusted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Basis {
    /// All members were recorded: waiting is separate from transfer.
    AllMembers,
    /// Some members were: the transfer may still hold waiting for the others.
    SomeMembers,
    /// One member was: the transfer is that of the fastest call of the same kind.
    FastestCall,
    /// One member and one call of its kind: transfer and waiting cannot be told apart.
    Alone,
}

/// All communication of a run, each piece in exactly one instance; and how far each rank's clock is ahead.
pub fn match_ranks(profile: &Profile, steps: &[Steps]) -> (Vec<Instance>, Clocks) {
    let mut streams: BTreeMap<Stream, BTreeMap<usize, Vec<CommRef>>> = BTreeMap::new();
    let group_of = groups::assign(profile);
    for (rank, record) in profile.ranks.iter().enumerate() {
        for (i, comm) in record.comms.iter().enumerate() {
            let stream = match (comm.op, comm.peer) {
                (CommOp::Send, Some(peer)) => Stream::Messages { from: record.rank, to: peer },
                (CommOp::Recv, Some(peer)) => Stream::Messages { from: peer, to: record.rank },
                _ => match &group_of[rank][i] {
                    Some(group) => Stream::Group(group.clone()),
                    None => Stream::Unknown(rank),
                },
            };
            streams.entry(stream).or_default().entry(rank).or_default().push(CommRef { rank, comm: i });
        }
    }
    let mut instances = Vec::new();
    for (stream, by_rank) in streams {
        let mut sequences: Vec<Vec<CommRef>> = by_rank.into_values().collect();
        // The order of issue is common to all ranks; on several threads or streams, the order of starts need not be.
        for sequence in &mut sequences {
            sequence.sort_by_key(|r| (r.of(profile).issued.unwrap_or(r.of(profile).start), r.comm));
        }
        for members in align(profile, &sequences) {
            instances.push(instance(profile, &stream, members));
        }
    }
    let clocks = Clocks::estimate(profile, &instances);
    for instance in &mut instances {
        separate_posted(profile, instance, &clocks);
    }
    bound_by_fastest(profile, steps, &mut instances);
    instances.sort_by_key(|i| i.members.first().map(|m| (m.of(profile).start, *m)));
    (instances, clocks)
}

/// What keeps an order that members share.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Stream {
    Group(Vec<u32>),
    Messages {
        from: u32,
        to: u32,
    },
    /// Of one rank, whose peers cannot be told.
    Unknown(usize),
}

fn instance(profile: &Profile, stream: &Stream, members: Vec<CommRef>) -> Instance {
    let comms = || members.iter().map(|m| m.of(profile));
    let group = match stream {
        Stream::Group(group) => Some(group.clone()),
        Stream::Messages { from, to } => Some(vec![*from.min(to), *from.max(to)]),
        Stream::Unknown(_) => None,
    };
    let group_size = group.as_ref().map(|g| g.len() as u32).or_else(|| comms().find_map(|c| c.group_size));
    let op = comms().map(|c| c.op).find(|op| *op != CommOp::Other).unwrap_or(CommOp::Other);
    let complete = group.as_ref().is_some_and(|g| g.len() == members.len());
    Instance {
        op: if matches!(stream, Stream::Messages { .. }) { CommOp::Send } else { op },
        bytes: comms().filter_map(|c| c.bytes(group_size)).max(),
        transfer: comms().map(|c| c.duration).min().unwrap_or(0),
        basis: match members.len() {
            _ if complete => Basis::AllMembers,
            0 | 1 => Basis::Alone,
            _ => Basis::SomeMembers,
        },
        group,
        group_size,
        members,
    }
}

/// Pairs up sequences of one stream: one list of members per position.
fn align(profile: &Profile, sequences: &[Vec<CommRef>]) -> Vec<Vec<CommRef>> {
    let numbered = |s: &Vec<CommRef>| s.iter().all(|r| r.of(profile).sequence.is_some());
    let mut positions: BTreeMap<i64, Vec<CommRef>> = BTreeMap::new();
    if sequences.len() > 1 && sequences.iter().all(numbered) {
        for sequence in sequences {
            let mut last = (0, i64::MIN);
            for member in sequence {
                // A coalesced call gives one number to several kernels: they keep their order.
                let number = member.of(profile).sequence.unwrap_or_default().min(1 << 40) as i64;
                let within = if last.1 == number { last.0 + 1 } else { 0 };
                last = (within, number);
                positions.entry((number << 16) | within.min(0xffff)).or_default().push(*member);
            }
        }
        return positions.into_values().collect();
    }
    let Some((reference, others)) = sequences.split_first() else { return Vec::new() };
    for (i, member) in reference.iter().enumerate() {
        positions.entry(i as i64).or_default().push(*member);
    }
    for sequence in others {
        match shift(profile, reference, sequence) {
            Some(shift) => {
                for (i, member) in sequence.iter().enumerate() {
                    positions.entry(i as i64 + shift).or_default().push(*member);
                }
            }
            // Nothing agrees: they stand alone, far from the others.
            None => {
                let free = positions.keys().next_back().map_or(0, |k| k + 1) + reference.len() as i64;
                for (i, member) in sequence.iter().enumerate() {
                    positions.entry(free + i as i64).or_default().push(*member);
                }
            }
        }
    }
    positions.into_values().collect()
}

/// By how many positions `sequence` is behind `reference`.
fn shift(profile: &Profile, reference: &[CommRef], sequence: &[CommRef]) -> Option<i64> {
    let pairs = |shift: i64| {
        let skip = usize::try_from(shift).unwrap_or(0);
        let ahead = usize::try_from(-shift).unwrap_or(0);
        reference.iter().skip(skip).zip(sequence.iter().skip(ahead)).map(|(a, b)| (a.of(profile), b.of(profile)))
    };
    let agree = |shift: i64| {
        let mut count = 0usize;
        for (a, b) in pairs(shift) {
            if !same(a, b) {
                return None;
            }
            count += 1;
        }
        Some(count)
    };
    let shorter = reference.len().min(sequence.len());
    if reference.len() == sequence.len() && agree(0).is_some() {
        return Some(0);
    }
    // Windows that were cut a little differently; a long search would pair by accident.
    let reach = reference.len().abs_diff(sequence.len()).clamp(8, 512) as i64;
    let steadiness = |shift: i64| {
        let mut differences: Vec<Ns> = pairs(shift).map(|(a, b)| b.end().saturating_sub(a.end())).collect();
        let middle = median(&mut differences)?;
        let mut around: Vec<Ns> = differences.iter().map(|d| d.saturating_sub(middle).saturating_abs()).collect();
        median(&mut around)
    };
    (-reach..=reach).filter(|s| agree(*s).is_some_and(|n| n * 2 >= shorter && n > 0)).min_by_key(|s| (steadiness(*s), s.abs()))
}

/// Whether two ranks' records can be of one collective. Ranks may give different sizes to an all-to-all.
fn same(a: &Comm, b: &Comm) -> bool {
    let pair = |x: CommOp, y: CommOp| x == y || x == CommOp::Other || y == CommOp::Other || x.point_to_point() && y.point_to_point();
    let sized = |c: &Comm| if matches!(c.op, CommOp::AllToAll | CommOp::Other | CommOp::SendRecv) { None } else { c.bytes(c.group_size.or(Some(1))) };
    pair(a.op, b.op) && sized(a).zip(sized(b)).is_none_or(|(x, y)| x == y)
}

/// Of a message whose two sides were posted ahead: from the later posting to the end of the receive.
fn separate_posted(profile: &Profile, instance: &mut Instance, clocks: &Clocks) {
    if !instance.members.iter().any(|m| m.of(profile).posted) {
        return;
    }
    let time = |m: &CommRef, t: Ns| t.saturating_sub(clocks.ahead[m.rank]);
    let receive = instance.members.iter().find(|m| m.of(profile).op == CommOp::Recv);
    match (instance.members.len(), receive) {
        (2, Some(receive)) => {
            let later = instance.members.iter().map(|m| time(m, m.of(profile).start)).max().unwrap_or(0);
            instance.transfer = time(receive, receive.of(profile).end()).saturating_sub(later).max(0);
        }
        // From one side alone nothing is known of the transfer.
        _ => instance.transfer = 0,
    }
}

/// Gives instances with one member the transfer of the fastest of their kind: same op, size and group; of unknown size, same place in the step.
fn bound_by_fastest(profile: &Profile, steps: &[Steps], instances: &mut [Instance]) {
    let mut kinds: BTreeMap<Kind, Vec<usize>> = BTreeMap::new();
    let mut places: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let mut alone: Vec<(usize, CommRef)> = Vec::new();
    for (i, instance) in instances.iter().enumerate() {
        if let ([member], Basis::Alone) = (instance.members.as_slice(), instance.basis)
            && !member.of(profile).posted
        {
            alone.push((i, *member));
        }
    }
    alone.sort_by_key(|(_, m)| (m.rank, m.of(profile).issued.unwrap_or(m.of(profile).start), m.comm));
    for (i, member) in alone {
        let comm = member.of(profile);
        let place = match instances[i].bytes {
            Some(_) => 0,
            None => {
                let step = steps[member.rank].holding(comm.issued.unwrap_or(comm.start)).unwrap_or(usize::MAX);
                let next = places.entry((member.rank, step)).or_default();
                *next += 1;
                *next
            }
        };
        let kind = Kind { rank: member.rank, op: instances[i].op, bytes: instances[i].bytes, group: instances[i].group.clone(), place };
        kinds.entry(kind).or_default().push(i);
    }
    for calls in kinds.into_values().filter(|c| c.len() > 1) {
        let fastest = calls.iter().map(|&i| instances[i].transfer).min().unwrap_or(0);
        for i in calls {
            instances[i].transfer = fastest;
            instances[i].basis = Basis::FastestCall;
        }
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    rank: usize,
    op: CommOp,
    bytes: Option<u64>,
    group: Option<Vec<u32>>,
    place: usize,
}

/// The middle one; the lower of two. Sorts.
pub fn median(values: &mut [Ns]) -> Option<Ns> {
    values.sort_unstable();
    values.get(values.len().checked_sub(1)? / 2).copied()
}
