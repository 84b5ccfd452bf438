//! A plan's prediction against a recorded run: by parts of the step, by class of op, by collective, by memory; and which differences make up the whole.
//!
//! Where the profile names instructions ([`mod@observe`]), each is compared with its own prediction; any other profile is compared by parts alone.

pub mod instruction;
pub mod observe;

use crate::planfile::PlanFile;
use crate::profile::analyse::Analysis;
use crate::profile::{Ns, Profile};
use dplan_ir::layers;
use dplan_planner::predict::predict;
use observe::{Observation, observe};
use std::collections::BTreeMap;

#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    #[error("the plan cannot be priced: {0}")]
    Plan(String),
    #[error("the profile is of another plan: {0}")]
    OtherPlan(String),
}

/// Predicted and measured seconds of one thing, in one step of a mean rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub name: String,
    pub predicted: f64,
    pub measured: f64,
}

impl Line {
    /// Measured over predicted, less one.
    pub fn error(&self) -> Option<f64> {
        (self.predicted > 0.0).then(|| self.measured / self.predicted - 1.0)
    }
    pub fn difference(&self) -> f64 {
        self.measured - self.predicted
    }
}

#[derive(Clone, Debug)]
pub struct Comparison {
    /// Measured is the mean; the median beside it.
    pub step: Line,
    pub step_median: Option<f64>,
    /// Compute, exposed communication, bubble and the rest.
    pub parts: Vec<Line>,
    /// By class of op; empty unless the profile names instructions.
    pub classes: Vec<Line>,
    /// One call of each collective and message, by kind, bytes and group; waiting left out.
    pub collectives: Vec<Line>,
    /// Bytes of the fullest rank; measured where the profile has it.
    pub memory: (u64, Option<u64>),
    /// Differences in the order of their size.
    pub causes: Vec<Line>,
    pub notes: Vec<String>,
}

/// # Errors
/// A plan that cannot be priced, or a profile of another.
pub fn compare(plan: &PlanFile, profile: &Profile, analysis: &Analysis) -> Result<Comparison, CompareError> {
    let classes = layers::classes(&plan.graph);
    let prediction = predict(&plan.graph, &classes, &plan.cluster, &plan.plan).map_err(|e| CompareError::Plan(e.to_string()))?;
    let (ranks, devices) = (profile.ranks.len() as u64, plan.plan.devices());
    let mut notes = analysis.notes.clone();
    if let Some(beyond) = profile.ranks.iter().find(|r| u64::from(r.rank) >= devices) {
        return Err(CompareError::OtherPlan(format!("it has a rank {}, the plan has {devices} ranks", beyond.rank)));
    }
    if ranks < devices {
        notes.push(format!("{ranks} of {devices} ranks given: means are over those, and waiting may pass for transfer"));
    }
    let observations = observe(plan, profile, &plan.cluster).map_err(CompareError::OtherPlan)?;
    if observations.is_empty() {
        notes.push("the profile names no instructions of the plan: it is compared by parts alone".into());
    }

    let steps = analysis.steps.iter().copied().max().unwrap_or(0).max(1) as f64;
    let mean = |total: Ns| total as f64 * 1e-9 / steps / ranks.max(1) as f64;
    let (p, t) = (&prediction.parts, &analysis.total);
    let measured_step = analysis.step_mean.map_or_else(|| mean(t.window()), |ns| ns as f64 * 1e-9);
    let line = |name: &str, predicted: f64, measured: f64| Line { name: name.into(), predicted, measured };
    let parts = vec![
        // The optimizer is computation to a profile.
        line("computation and optimizer", p.compute.seconds() + p.optimizer.seconds(), mean(t.compute)),
        line("exposed communication", p.exposed_comm.seconds(), mean(t.transfer.saturating_add(t.waiting))),
        line("bubble", p.bubble.seconds(), mean(t.bubble)),
        line(
            "copies, input, launches, idle",
            p.offload.seconds(),
            mean(t.copies.saturating_add(t.input).saturating_add(t.launch).saturating_add(t.idle)),
        ),
    ];
    let classes = by_class(&observations, ranks.max(1));
    let collectives = by_collective(&observations);
    let mut causes: Vec<Line> = if classes.is_empty() { parts.clone() } else { [&classes[..], &parts[1..]].concat() };
    causes.sort_by(|a, b| b.difference().abs().total_cmp(&a.difference().abs()).then_with(|| a.name.cmp(&b.name)));
    let memory = prediction.memory.iter().map(|m| m.total_bytes()).max().unwrap_or(0);
    Ok(Comparison {
        step: line("step", prediction.step.seconds(), measured_step),
        step_median: analysis.step_median.map(|ns| ns as f64 * 1e-9),
        parts,
        classes,
        collectives,
        memory: (memory, profile.ranks.iter().filter_map(|r| r.memory.allocated_bytes).max()),
        causes,
        notes,
    })
}

/// Sums over the instructions of a class, a step of a mean rank of those given.
fn by_class(observations: &[Observation], ranks: u64) -> Vec<Line> {
    let mut sums: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for o in observations.iter().filter(|o| !o.work.shared()) {
        let share = o.ran_on as f64 / ranks as f64;
        let sum = sums.entry(&o.class).or_default();
        sum.0 += o.calls as f64 * o.predicted.seconds() * share;
        sum.1 += o.calls as f64 * o.whole as f64 * 1e-9 * share;
    }
    sums.into_iter().map(|(class, (predicted, measured))| Line { name: class.into(), predicted, measured }).collect()
}

fn by_collective(observations: &[Observation]) -> Vec<Line> {
    let mut kinds: BTreeMap<(String, u64, u64), Vec<&Observation>> = BTreeMap::new();
    for o in observations {
        let key = match o.work {
            observe::Work::Collective { group, bytes, .. } => (o.class.clone(), bytes, group.local * group.nodes),
            observe::Work::Message { bytes, .. } => (o.class.clone(), bytes, 2),
            observe::Work::Op { .. } | observe::Work::Sweep { .. } => continue,
        };
        kinds.entry(key).or_default().push(o);
    }
    let one = |((op, bytes, ranks), all): ((String, u64, u64), Vec<&Observation>)| {
        let n = all.len().max(1) as f64;
        let predicted = all.iter().map(|o| o.predicted.seconds()).sum::<f64>() / n;
        let measured = all.iter().map(|o| o.measured as f64 * 1e-9).sum::<f64>() / n;
        Line { name: format!("{op} of {bytes} bytes among {ranks}"), predicted, measured }
    };
    kinds.into_iter().map(one).collect()
}
