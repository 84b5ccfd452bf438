//! A recorded run laid over its plan, instruction by instruction: what the cost model says of each, and what the ranks took.
//!
//! Only dplan's own profiles name instructions. A collective's transfer is the shortest of its members' spans in each call, since the others wait inside
//! theirs; of calls, the median is taken.

use super::instruction::{Instruction, class_of, label, local_types, moved_bytes};
use crate::planfile::PlanFile;
use crate::profile::{Event, Kind, NameId, Ns, Profile, Rank};
use dplan_ir::cost::{OpCost, op_cost};
use dplan_ir::dtype::DType;
use dplan_ir::entity::BufferId;
use dplan_ir::program::{Instr, Issue, Pattern, SegmentKind, Space};
use dplan_planner::cost::comm::{self, Group};
use dplan_planner::cost::compute::op_time;
use dplan_planner::machine::{Cluster, Machine};
use dplan_planner::prices::Links;
use dplan_planner::units::Nanos;
use std::collections::{BTreeMap, HashMap};

/// Whom a collective is among.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Across {
    /// Ranks of one stage.
    Ranks,
    /// Ranks of several.
    Stages,
}

/// What an instruction is to the cost model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    Op {
        cost: OpCost,
        dtype: DType,
    },
    /// Bytes streamed through memory.
    Sweep {
        bytes: u64,
    },
    Collective {
        group: Group,
        across: Across,
        pattern: Pattern,
        bytes: u64,
    },
    Message {
        from: u64,
        to: u64,
        bytes: u64,
    },
}

impl Work {
    /// On equal devices.
    pub fn predicted(&self, machine: &Machine, plan: &PlanFile) -> Nanos {
        let ranks = plan.program.mesh.ranks();
        match self {
            Work::Op { cost, dtype } => op_time(&machine.device, *dtype, cost),
            Work::Sweep { bytes } => machine.sweep(*bytes),
            Work::Collective { group, pattern, bytes, .. } => comm::group_time(machine, *group, *pattern, *bytes),
            Work::Message { from, to, bytes } => comm::p2p_time(machine, &plan.program.mesh, from * ranks, to * ranks, *bytes),
        }
    }
    /// Where it runs on a stage of the plan.
    fn predicted_on(&self, cluster: &Cluster, plan: &PlanFile, stage: usize) -> Nanos {
        let seat = |stage: u64| cluster.seat(&plan.plan, stage);
        match self {
            Work::Op { .. } | Work::Sweep { .. } => self.predicted(cluster.site(seat(stage as u64).site), plan),
            Work::Collective { across: Across::Ranks, .. } => self.predicted(cluster.site(seat(stage as u64).site), plan),
            Work::Collective { across: Across::Stages, .. } => self.predicted(cluster.whole(), plan),
            Work::Message { from, to, bytes } => cluster.message(&plan.program.mesh, seat(*from), seat(*to), *bytes),
        }
    }
    /// Whether peers take part.
    pub fn shared(&self) -> bool {
        match self {
            Work::Op { .. } | Work::Sweep { .. } => false,
            Work::Collective { .. } | Work::Message { .. } => true,
        }
    }
}

/// One instruction of the program, and what it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Observation {
    /// `gemm`, `attention`, `elementwise`, or the collective's name.
    pub class: String,
    pub work: Work,
    /// In one step of one rank.
    pub calls: u64,
    /// Ranks that were given and ran it.
    pub ran_on: u64,
    pub predicted: Nanos,
    /// Of one call: the median; without waiting, of what peers share.
    pub measured: Ns,
    /// Mean of one call on one rank, waiting included.
    pub whole: Ns,
}

/// Every instruction that the profile names; nothing if it names none.
///
/// # Errors
/// What the profile has and the plan has not, or has otherwise: the profile is of another plan.
pub fn observe(plan: &PlanFile, profile: &Profile, cluster: &Cluster) -> Result<Vec<Observation>, String> {
    let mut spans: BTreeMap<Instruction, Vec<Vec<Ns>>> = BTreeMap::new();
    for rank in &profile.ranks {
        for (instruction, durations) in of_rank(plan, rank)? {
            spans.entry(instruction).or_default().push(durations);
        }
    }
    let mut observations = Vec::new();
    for (instruction, ranks) in spans {
        let Some((issue, calls)) = find(plan, &instruction) else { continue };
        let stage = instruction.stage as usize;
        let Some(work) = work(plan, stage, &issue.instr, cluster) else { continue };
        let predicted = work.predicted_on(cluster, plan, stage);
        let ran_on = ranks.len() as u64;
        let total: i128 = ranks.iter().flatten().map(|d| i128::from(*d)).sum();
        let count = ranks.iter().map(Vec::len).sum::<usize>().max(1);
        let mut each: Vec<Ns> = if work.shared() {
            let calls = ranks.iter().map(Vec::len).min().unwrap_or(0);
            (0..calls).filter_map(|call| ranks.iter().map(|r| r[call]).min()).collect()
        } else {
            ranks.into_iter().flatten().collect()
        };
        each.sort_unstable();
        let Some(&measured) = each.get(each.len() / 2) else { continue };
        let class = match &issue.instr {
            Instr::Collective { pattern, .. } => pattern.name().to_string(),
            Instr::Send { .. } => "send".into(),
            Instr::Recv { .. } => "receive".into(),
            _ if matches!(instruction.kind, SegmentKind::Update | SegmentKind::Stash) => "optimizer".into(),
            instr => class_of(&plan.graph, &plan.program, stage, instr).into(),
        };
        observations.push(Observation { class, work, calls, ran_on, predicted, measured, whole: (total / count as i128) as Ns });
    }
    Ok(observations)
}

/// Durations of each instruction that a rank ran, if the plan would have had it run those.
fn of_rank(plan: &PlanFile, rank: &Rank) -> Result<BTreeMap<Instruction, Vec<Ns>>, String> {
    let here = u64::from(rank.rank) / plan.program.mesh.ranks().max(1);
    let mut names: HashMap<NameId, Option<Instruction>> = HashMap::new();
    let mut own: BTreeMap<Instruction, Vec<Ns>> = BTreeMap::new();
    for event in rank.events.iter().filter(|e| matches!(e.kind, Kind::Kernel(_) | Kind::Comm)) {
        let instruction = match names.get(&event.name) {
            Some(known) => known.clone(),
            None => {
                let name = rank.name(event);
                let parsed = Instruction::parse(name);
                if let Some(instruction) = &parsed {
                    let missing = || format!("rank {} ran `{name}`, which the plan does not have", rank.rank);
                    if u64::from(instruction.stage) != here {
                        return Err(format!("rank {} ran `{name}`; in this plan it is of stage {here}", rank.rank));
                    }
                    let (issue, _) = find(plan, instruction).ok_or_else(missing)?;
                    let expected = format!("{} {}", instruction.name(), label(&plan.graph, &plan.program, here as usize, &issue.instr));
                    if name != expected {
                        return Err(format!("rank {} ran `{name}`; in this plan it is `{expected}`", rank.rank));
                    }
                }
                names.insert(event.name, parsed.clone());
                parsed
            }
        };
        if let Some(instruction) = instruction {
            own.entry(instruction).or_default().push(event.duration);
        }
    }
    for (instruction, durations) in &own {
        let calls = find(plan, instruction).map_or(0, |(_, calls)| calls);
        if calls == 0 || !(durations.len() as u64).is_multiple_of(calls) {
            // Of a profile that was cut short the last step is not whole; the notes of the reader say so.
            if rank.notes.is_empty() {
                return Err(format!(
                    "rank {} ran `{}` {} times; this plan has it {calls} times a step",
                    rank.rank,
                    instruction.name(),
                    durations.len()
                ));
            }
        }
    }
    same_bytes(plan, rank)?;
    Ok(own)
}

/// Whether what a rank sent has the plan's sizes.
fn same_bytes(plan: &PlanFile, rank: &Rank) -> Result<(), String> {
    let named = |event: &Event| (event.kind == Kind::Comm).then(|| Instruction::parse(rank.name(event))).flatten();
    let at: HashMap<(Ns, u32), Instruction> = rank.events.iter().filter_map(|e| Some(((e.start, e.lane.0), named(e)?))).collect();
    for comm in &rank.comms {
        let Some(instruction) = at.get(&(comm.start, comm.lane.0)) else { continue };
        let Some((issue, _)) = find(plan, instruction) else { continue };
        let planned = moved_bytes(&plan.program, instruction.stage as usize, &issue.instr);
        let moved = comm.sent_bytes.or(comm.received_bytes);
        if planned.zip(moved).is_some_and(|(p, m)| p != m) {
            let (planned, moved) = (planned.unwrap_or(0), moved.unwrap_or(0));
            return Err(format!("`{}` of rank {} moved {moved} bytes; in this plan it moves {planned}", instruction.name(), rank.rank));
        }
    }
    Ok(())
}

/// The instruction in the program, and how often a step calls its segment.
fn find<'a>(plan: &'a PlanFile, instruction: &Instruction) -> Option<(&'a Issue, u64)> {
    let stage = plan.program.stages.get(instruction.stage as usize)?;
    let (id, segment) = stage.segments.iter().find(|(id, s)| *id == instruction.segment && s.kind == instruction.kind)?;
    let issue = segment.body.get(instruction.at as usize)?;
    Some((issue, stage.schedule.iter().filter(|c| c.segment == id).count() as u64))
}

/// What an instruction asks of the machine; nothing of what takes no time.
fn work(plan: &PlanFile, stage: usize, instr: &Instr, cluster: &Cluster) -> Option<Work> {
    let of_stage = &plan.program.stages[stage];
    let bytes = |buffer: &BufferId| of_stage.buffers[*buffer].bytes;
    let sweep = |buffers: &[BufferId]| Some(Work::Sweep { bytes: buffers.iter().map(bytes).sum() });
    match instr {
        Instr::Run { node, ins, outs, .. } => {
            let types = |buffers| local_types(&plan.graph, &plan.program, stage, buffers);
            let (ins, outs) = (types(ins)?, types(outs)?);
            let cost = op_cost(&plan.graph.nodes[*node].op, &ins.iter().collect::<Vec<_>>(), &outs.iter().collect::<Vec<_>>());
            Some(Work::Op { cost, dtype: plan.plan.compute })
        }
        Instr::Input { dst } | Instr::Zero { dst } => sweep(&[*dst]),
        Instr::Slice { src, dst, .. } => sweep(&[*src, *dst]),
        Instr::AddInto { src, dst } => sweep(&[*src, *dst, *dst]),
        Instr::Join { left, right, dst, .. } => sweep(&[&left[..], right, dst].concat()),
        Instr::Cast { src, dst } | Instr::SumShares { src, dst } => sweep(&[*src, *dst]),
        // As it is priced: read and written together, looked through, and read once more.
        Instr::Compress { src, dst, .. } => sweep(&[&[*src; dplan_planner::memory::LOOKS as usize][..], &[*dst]].concat()),
        Instr::SquareSum { src, .. } => sweep(&[*src]),
        Instr::TrustSums { state, grad, moments, .. } => sweep(&moments.iter().chain([state, grad]).copied().collect::<Vec<_>>()),
        Instr::Update { state, grad, moments, param, .. } => {
            let twice = moments.iter().chain([state]).flat_map(|b| [*b, *b]);
            sweep(&twice.chain([*grad]).chain(param.iter().copied()).collect::<Vec<_>>())
        }
        Instr::Collective { pattern, axes, stages, src, dst, .. } => {
            let mesh = &plan.program.mesh;
            let (across, group) = match stages.len() as u64 {
                0 => (Across::Ranks, comm::group(cluster.site(cluster.seat(&plan.plan, stage as u64).site), mesh, *axes)),
                n => (Across::Stages, comm::group_across_stages(cluster.whole(), mesh, *axes, n)),
            };
            Some(Work::Collective { group, across, pattern: *pattern, bytes: bytes(src).max(bytes(dst)) })
        }
        Instr::Send { to, src, .. } => Some(Work::Message { from: stage as u64, to: u64::from(*to), bytes: bytes(src) }),
        Instr::Recv { from, dst, .. } => Some(Work::Message { from: u64::from(*from), to: stage as u64, bytes: bytes(dst) }),
        // Parameters that are put by. The host's link is no part of what is fitted.
        Instr::Copy { src, dst } if [src, dst].iter().all(|&&b| plan.program.stages[stage].space(b) == Space::Device) => sweep(&[*src, *dst]),
        Instr::Copy { .. } | Instr::ClipScale { .. } | Instr::Record(_) | Instr::Wait(_) => None,
    }
}
