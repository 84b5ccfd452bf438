//! The schedule of a pipeline, from what each rank did in which order.
//!
//! `PP:` ranges name stage, action and micro-batch, so the schedule is read off: which stages a rank has, whether backward is split into input (I) and
//! weight (W) parts, whether all forwards come first. Schedules of one stage a rank leave no ranges; there the last stage shows it: under GPipe it
//! receives every micro-batch before it sends the first gradient back, under 1F1B it alternates.

use std::collections::{BTreeMap, BTreeSet};

use crate::profile::classify::pipeline_step;
use crate::profile::{CommOp, Event, Kind, Ns, Profile, Rank};

#[derive(Clone, PartialEq, Debug)]
pub struct Schedule {
    pub name: &'static str,
    /// Ranks of the pipeline.
    pub ranks: u32,
    pub stages: u32,
    pub micro_batches: u32,
    /// Stages by rank, where ranges tell.
    pub stages_of: BTreeMap<u32, Vec<u32>>,
    pub evidence: Vec<String>,
}

impl Schedule {
    /// Stages a rank.
    pub fn virtual_stages(&self) -> u32 {
        self.stages.div_ceil(self.ranks.max(1))
    }
}

/// One action on a stage.
struct Action<'p> {
    start: Ns,
    stage: u32,
    op: &'p str,
    micro_batch: Option<u32>,
}

pub fn by_ranges(profile: &Profile) -> Option<Schedule> {
    let mut stages_of = BTreeMap::new();
    let mut actions_of: BTreeMap<u32, Vec<Action<'_>>> = BTreeMap::new();
    let mut ranges = 0;
    for rank in &profile.ranks {
        // Ranges of PyTorch; dplan's own profiles name what computes so.
        let named = rank.events.iter().filter(|e| matches!(e.kind, Kind::Range | Kind::Kernel(_)));
        let action = |e: &Event| pipeline_step(rank.name(e)).map(|s| Action { start: e.start, stage: s.stage, op: s.op, micro_batch: s.micro_batch });
        let mut actions: Vec<Action<'_>> = named.filter_map(action).collect();
        if actions.is_empty() {
            continue;
        }
        ranges += actions.len();
        actions.sort_by_key(|a| a.start);
        let stages: BTreeSet<u32> = actions.iter().map(|a| a.stage).collect();
        stages_of.insert(rank.rank, stages.into_iter().collect::<Vec<u32>>());
        actions_of.insert(rank.rank, actions);
    }
    let stages = stages_of.values().flatten().max()?.saturating_add(1);
    let all = || actions_of.values().flatten();
    let micro_batches = all().filter_map(|a| a.micro_batch).max().map_or(0, |m| m.saturating_add(1));
    let has = |op: &str| all().any(|a| a.op == op);
    let split = has("I") && has("W");
    // Ranks that hold data-parallel copies of the same stages are one rank of the pipeline.
    let ranks = stages_of.values().collect::<BTreeSet<_>>().len() as u32;
    let several = stages_of.values().any(|s| s.len() > 1);
    let folded = several && stages_of.values().all(|s| s.iter().zip(s.iter().rev()).all(|(a, b)| a.saturating_add(*b) == stages - 1));
    let forward_first = |stage_actions: &Vec<Action<'_>>| {
        let last_forward = stage_actions.iter().filter(|a| a.op == "F").map(|a| a.start).max();
        let first_backward = stage_actions.iter().filter(|a| matches!(a.op, "B" | "I")).map(|a| a.start).min();
        last_forward.zip(first_backward).is_some_and(|(f, b)| f < b)
    };
    let all_forward_first = micro_batches > 1 && actions_of.values().all(forward_first);
    let overlapped = has("OVERLAP_F_B");
    let name = match (several, folded, split) {
        (true, true, _) if overlapped => "DualPipeV",
        (true, true, true) => "ZBV",
        (true, true, false) => "folded (V)",
        (true, false, true) => "interleaved zero-bubble",
        (true, false, false) if all_forward_first => "looped BFS",
        (true, false, false) => "interleaved 1F1B",
        (false, _, true) => "zero-bubble",
        (false, _, false) if all_forward_first => "GPipe",
        (false, _, false) => "1F1B",
    };
    let mut evidence = vec![format!("{ranges} `PP:` ranges: {stages} stages on {ranks} ranks, {micro_batches} micro-batches")];
    if let Some((rank, stages)) = stages_of.iter().next() {
        evidence.push(format!("rank {rank} runs stages {}", stages.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")));
    }
    if split {
        evidence.push("backward is split into input (I) and weight (W) gradients".into());
    }
    Some(Schedule { name, ranks, stages, micro_batches, stages_of, evidence })
}

/// A chain of ranks that send forward and receive back.
pub fn by_messages(profile: &Profile) -> Option<Schedule> {
    let mut links: BTreeMap<(u32, u32), usize> = BTreeMap::new();
    for rank in &profile.ranks {
        for comm in &rank.comms {
            match (comm.op, comm.peer) {
                (CommOp::Send, Some(peer)) => *links.entry((rank.rank, peer)).or_default() += 1,
                // What a rank that was not recorded sent.
                (CommOp::Recv, Some(peer)) if profile.ranks.iter().all(|r| r.rank != peer) => *links.entry((peer, rank.rank)).or_default() += 1,
                _ => {}
            }
        }
    }
    if links.is_empty() {
        return None;
    }
    let next: BTreeMap<u32, u32> = links.keys().filter(|(a, b)| a < b).copied().collect();
    // A chain: each rank sends forward to one rank only, and gets an answer.
    let forward = links.keys().filter(|(a, b)| a < b).count();
    if next.len() != forward || next.iter().any(|(a, b)| !links.contains_key(&(*b, *a))) {
        return None;
    }
    let receivers: BTreeSet<u32> = next.values().copied().collect();
    let heads: Vec<u32> = next.keys().copied().filter(|r| !receivers.contains(r)).collect();
    let chain = |head: u32| std::iter::successors(Some(head), |r| next.get(r).copied()).take(1 << 16).collect::<Vec<u32>>();
    let ranks = chain(*heads.first()?);
    let (first, second, last) = (*ranks.first()?, *ranks.get(1)?, *ranks.last()?);
    let micro_batches = links.get(&(first, second)).copied().unwrap_or(0) as u32;
    let alternates = profile.ranks.iter().find(|r| r.rank == last).and_then(alternates);
    let name = match alternates {
        Some(true) => "1F1B",
        Some(false) if micro_batches > 1 => "GPipe",
        _ => "unknown",
    };
    let mut evidence = vec![format!(
        "messages along the chain {} and back, {micro_batches} each way",
        ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(" → ")
    )];
    match alternates {
        Some(true) => evidence.push(format!("rank {last}, the last stage, sends a gradient back before it has received every micro-batch")),
        Some(false) => evidence.push(format!("rank {last}, the last stage, receives every micro-batch before it sends the first gradient back")),
        None => evidence.push(format!("rank {last}, the last stage, which would show the order, was not recorded")),
    }
    Some(Schedule { name, ranks: ranks.len() as u32, stages: ranks.len() as u32, micro_batches, stages_of: BTreeMap::new(), evidence })
}

/// Whether the last stage sends before it has received everything.
fn alternates(last: &Rank) -> Option<bool> {
    let order: Vec<CommOp> = last.comms.iter().map(|c| c.op).filter(|op| matches!(op, CommOp::Send | CommOp::Recv)).collect();
    let first_send = order.iter().position(|op| *op == CommOp::Send)?;
    let last_receive = order.iter().rposition(|op| *op == CommOp::Recv)?;
    Some(first_send < last_receive)
}
