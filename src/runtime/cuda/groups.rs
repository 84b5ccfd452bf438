//! Which communicators a program needs, and in which order all ranks make them.
//!
//! A *family* parts ranks into disjoint groups: one set of axes on every stage, one set of axes over several stages, or the pairs of two stages for one channel. All ranks make
//! families in one order, that of first use, stage by stage; so each rank's order is a part of one order of all, and no rank waits for another that waits for it.

use dplan_ir::mesh::AxisSet;
use dplan_ir::program::{Channel, Instr, Program};

/// Ranks that meet in the same way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Family {
    /// Ranks of one stage that differ on these axes.
    Axes(AxisSet),
    /// The same, on all of these stages.
    Stages(AxisSet, Vec<u32>),
    /// Messages from one stage to another: sender, then receiver.
    Pair { from: u32, to: u32, channel: Channel },
}

impl Family {
    /// The family that an instruction of a stage meets in; `None` if it meets nobody.
    pub fn of(instr: &Instr, stage: u32) -> Option<Family> {
        match instr {
            Instr::Collective { axes, stages, .. } => match &stages[..] {
                [] => Some(Family::Axes(*axes)),
                [one] if *one == stage => Some(Family::Axes(*axes)),
                _ => Some(Family::Stages(*axes, stages.clone())),
            },
            Instr::Send { to, channel, .. } => Some(Family::Pair { from: stage, to: *to, channel: *channel }),
            Instr::Recv { from, channel, .. } => Some(Family::Pair { from: *from, to: stage, channel: *channel }),
            Instr::Run { .. }
            | Instr::Input { .. }
            | Instr::Slice { .. }
            | Instr::Copy { .. }
            | Instr::Zero { .. }
            | Instr::AddInto { .. }
            | Instr::Cast { .. }
            | Instr::Compress { .. }
            | Instr::SumShares { .. }
            | Instr::Join { .. }
            | Instr::SquareSum { .. }
            | Instr::ClipScale { .. }
            | Instr::TrustSums { .. }
            | Instr::Update { .. }
            | Instr::Record(_)
            | Instr::Wait(_) => None,
        }
    }
    /// The group of a rank, in group order; `None` if it has none.
    pub fn members(&self, program: &Program, rank: u64) -> Option<Vec<u64>> {
        let ranks = program.mesh.ranks();
        let (stage, local) = (rank / ranks, rank % ranks);
        let over = |axes: AxisSet, stages: &[u32]| -> Vec<u64> {
            let locals = program.mesh.group(local, axes);
            stages.iter().flat_map(|&s| locals.iter().map(move |&r| u64::from(s) * ranks + r)).collect()
        };
        let here = |stages: &[u32]| stages.iter().any(|&s| u64::from(s) == stage);
        match self {
            Family::Axes(axes) => Some(over(*axes, &[stage as u32])),
            Family::Stages(axes, stages) => here(stages).then(|| over(*axes, stages)),
            Family::Pair { from, to, channel: _ } => here(&[*from, *to]).then(|| [*from, *to].map(|s| u64::from(s) * ranks + local).to_vec()),
        }
    }
}

/// The families of a program, in the order in which every rank makes them.
pub fn families(program: &Program) -> Vec<Family> {
    let mut families: Vec<Family> = Vec::new();
    for (stage, of_stage) in program.stages.iter().enumerate() {
        for issue in of_stage.segments.values().flat_map(|s| &s.body) {
            let Some(family) = Family::of(&issue.instr, stage as u32) else { continue };
            if !families.contains(&family) {
                families.push(family);
            }
        }
    }
    families
}
