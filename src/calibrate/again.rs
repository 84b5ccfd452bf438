//! What a recorded run of a plan teaches: the machine that it was run on, and whether another plan would be quicker there.

use super::own;
use crate::compare::observe::observe;
use crate::compile::{CompileError, Options, best};
use crate::planfile::PlanFile;
use crate::profile::Profile;
use crate::profile::analyse::Analysis;
use dplan_ir::layers;
use dplan_ir::plan::Plan;
use dplan_planner::lower::LowerError;
use dplan_planner::machine::Machine;
use dplan_planner::pins::Pins;
use dplan_planner::predict::{Prediction, predict};
use dplan_planner::request::Refusal;
use dplan_planner::units::Bytes;

#[derive(Debug, thiserror::Error)]
pub enum AgainError {
    #[error("the profile is of another plan: {0}")]
    OtherPlan(String),
    #[error("the profile names no instructions of the plan; `dplan run --profile` records one that does")]
    Nameless,
    #[error("the plan's cluster has groups of different devices; a run of a plan for equal devices is what a machine is fitted to")]
    Unlike,
    #[error("the plan cannot be priced: {0}")]
    Plan(#[from] LowerError),
    #[error("planning again: {0}")]
    Again(#[from] CompileError),
}

/// A plan and its run, on the machine it was made for and on the one that was seen.
#[derive(Clone, Debug)]
pub struct Again {
    /// The plan's cluster, with the numbers that predict best what its ranks did.
    pub machine: Machine,
    /// Mean errors of single instructions, weighted by time, on the plan's cluster and on `machine`.
    pub errors: (f64, f64),
    /// The plan's step as it was predicted, and as it is on `machine`.
    pub step: (Prediction, Prediction),
    /// Seconds; the median where the profile marks steps.
    pub measured: Option<f64>,
    /// The best plan for `machine` under the pins and limits that the plan was asked for with, and its step; nothing if none fits.
    pub best: Option<(Plan, Prediction)>,
    /// The same without pins, if there were any.
    pub free: Option<(Plan, Prediction)>,
}

/// What a plan was asked for with, besides its model, its cluster and its batch: its certificate has it.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    pub pins: Pins,
    pub memory_limit: Option<Bytes>,
}

/// Fits the machine of a plan to a run of it, and plans again.
///
/// # Errors
/// A profile of another plan, or one that does not name instructions.
pub fn again(file: &PlanFile, asked: &Asked, profile: &Profile, analysis: &Analysis) -> Result<Again, AgainError> {
    let own = file.cluster.only().ok_or(AgainError::Unlike)?;
    let observations = observe(file, profile, &file.cluster).map_err(AgainError::OtherPlan)?;
    if observations.is_empty() {
        return Err(AgainError::Nameless);
    }
    let measured = analysis.step_median.or(analysis.step_mean).map(|ns| ns as f64 * 1e-9);
    let (machine, before, after) = own::fit(own, &[(file.clone(), observations)]);
    let machine = measured.map_or_else(|| machine.clone(), |seconds| own::fit_steps(&machine, &[(file.clone(), seconds)]));
    let classes = layers::classes(&file.graph);
    let on = |machine: &Machine| predict(&file.graph, &classes, &machine.clone().into(), &file.plan);
    let step = (on(own)?, on(&machine)?);
    let mut forward = file.graph.clone();
    forward.strip_backward();
    forward.set_batch(1);
    let planned = |pins: &Pins| {
        // What is computed stays.
        let kept = Pins::that_keep(&file.plan);
        let pins = Pins { wire: kept.wire, ..pins.clone() }.over(&kept);
        let options = Options { pins, memory_limit: asked.memory_limit, ..Options::again(file, machine.clone()) };
        match best(&forward, &options) {
            Ok(found) => Ok(Some(found)),
            Err(CompileError::Refused(Refusal::Infeasible(_))) => Ok(None),
            Err(error) => Err(error),
        }
    };
    let best = planned(&asked.pins)?;
    let free = if asked.pins.leave_all_choices() { None } else { planned(&Pins::default())? };
    Ok(Again { machine, errors: (before, after), step, measured, best, free })
}
