//! What a run does about faults: rehearsals of them, and a plan for the ranks that are left.

use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use dplan_planner::machine::Machine;

use crate::compile::{self, CompileError, Compiled};
use crate::planfile::PlanFile;
use crate::runtime::{Rehearsal, Session, watch};

/// A fault to bring about: `die:6@12`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Planned {
    what: What,
    rank: usize,
    pub step: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Die,
    Stall,
    /// A bit of a parameter flips.
    Flip,
    /// A parameter becomes not a number.
    Nan,
}

impl FromStr for Planned {
    type Err = String;
    fn from_str(text: &str) -> Result<Planned, String> {
        let parse = || -> anyhow::Result<Planned> {
            let (what, place) = text.split_once(':').context("no colon")?;
            let (rank, step) = place.split_once('@').context("no @")?;
            let what = match what {
                "die" => What::Die,
                "stall" => What::Stall,
                "flip" => What::Flip,
                "nan" => What::Nan,
                _ => bail!("unknown"),
            };
            Ok(Planned { what, rank: rank.parse()?, step: step.parse()? })
        };
        parse().map_err(|_| format!("`{text}`: expected die, stall, flip or nan, then a rank and a step, such as die:6@12"))
    }
}

impl Planned {
    /// Prepares the session's next step.
    pub fn prepare(&self, session: &mut Session) -> anyhow::Result<()> {
        match self.what {
            What::Die => session.rehearse(self.rank, Rehearsal::Die),
            What::Stall => session.rehearse(self.rank, Rehearsal::Stall),
            What::Flip => watch::flip_bit(session, self.rank)?,
            What::Nan => watch::poison(session, self.rank)?,
        }
        Ok(())
    }
}

/// A plan for the same model and batch on at most `devices` devices: of the most that have one, and of the most that divide the batch, the one with the lesser
/// predicted time of a step.
///
/// # Errors
/// If no number of devices has a plan.
pub fn replan(file: &PlanFile, devices: u64) -> anyhow::Result<PlanFile> {
    ensure!(devices > 0, "no rank is left");
    let machine = file
        .cluster
        .only()
        .context("the cluster has groups of different devices: which of them are left is not known here; compile a plan for those")?;
    let mut forward = file.graph.clone();
    forward.strip_backward();
    forward.set_batch(1);
    let batch = file.plan.batch();
    let even = (1..=devices).rev().find(|&n| batch.is_multiple_of(n));
    let mut best: Option<Compiled> = None;
    for n in (1..=devices).rev() {
        if best.is_some() && Some(n) != even {
            continue;
        }
        let Some(cluster) = shrunk(machine, n) else { continue };
        match compile::compile(&forward, &compile::Options::again(file, cluster)) {
            Ok(compiled) => {
                if best.as_ref().is_none_or(|b| compiled.prediction.step < b.prediction.step) {
                    best = Some(compiled);
                }
            }
            Err(CompileError::Refused(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    best.map(|b| b.file).with_context(|| format!("no plan for {devices} devices or fewer has a batch of {batch}"))
}

/// The same machine with `n` devices, in as few nodes as hold them, where they fill their nodes.
fn shrunk(machine: &Machine, n: u64) -> Option<Machine> {
    let nodes = n.div_ceil(machine.per_node);
    n.is_multiple_of(nodes).then(|| Machine { per_node: n / nodes, nodes, ..machine.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rehearsals_are_read() {
        assert_eq!("die:6@12".parse(), Ok(Planned { what: What::Die, rank: 6, step: 12 }));
        for wrong in ["", "die", "die:6", "die:x@1", "burn:1@2", "die:1@-2"] {
            assert!(wrong.parse::<Planned>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn fewer_devices_are_whole_nodes() {
        let machine = Machine::parse("h100:8x4").unwrap();
        let shape = |n| shrunk(&machine, n).map(|m| (m.per_node, m.nodes));
        assert_eq!([6, 8, 16, 30, 31].map(shape), [Some((6, 1)), Some((8, 1)), Some((8, 2)), None, None]);
        assert_eq!(shape(24), Some((8, 3)));
    }
}
