//! What a profile says about a run: where the time went, what limits it, and what change of plan would address that.
//!
//! Order of thought: steps and windows; which communication of one rank is which of another ([`matching`]), with groups where they are not recorded
//! ([`groups`]) and clocks ([`clock`]); each rank's window taken apart ([`exposure`]); the table of collectives ([`table`]); load ([`balance`]); how the
//! run is parallel ([`parallelism`], [`schedule`]); and findings ([`findings`]). Everything is a function of the profile: no clock, no randomness.

pub mod balance;
pub mod clock;
pub mod exposure;
pub mod findings;
mod groups;
pub mod matching;
pub mod parallelism;
pub mod schedule;
mod spans;
mod steps;
pub mod table;

use super::{Ns, Profile};
use balance::Balance;
use clock::Clocks;
use exposure::{Exposure, Parts};
use findings::Finding;
use matching::Instance;
use parallelism::Parallelism;
use steps::Steps;
use table::Row;

/// By rank: in the order of the profile.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Analysis {
    /// Steps recorded of each rank; 0 where they are not marked.
    pub steps: Vec<usize>,
    pub step_mean: Option<Ns>,
    /// Of all steps of all ranks: what a busy machine disturbs least.
    pub step_median: Option<Ns>,
    pub exposures: Vec<Exposure>,
    /// Parts of all ranks together.
    pub total: Parts,
    pub clocks: Clocks,
    pub instances: Vec<Instance>,
    pub rows: Vec<Row>,
    pub balance: Balance,
    pub parallelism: Vec<Parallelism>,
    /// The bottleneck first.
    pub findings: Vec<Finding>,
    pub notes: Vec<String>,
}

pub fn analyse(profile: &Profile) -> Analysis {
    let steps: Vec<Steps> = profile.ranks.iter().map(Steps::of).collect();
    let (instances, clocks) = matching::match_ranks(profile, &steps);
    let exposures: Vec<Exposure> = steps.iter().enumerate().map(|(rank, steps)| exposure::of_rank(profile, rank, steps, &instances)).collect();
    let mut total = Parts::default();
    for exposure in &exposures {
        total.add(&exposure.parts);
    }
    let rows = table::rows(profile, &instances);
    let balance = balance::of(profile, &exposures, &instances);
    let parallelism = parallelism::recognise(profile, &steps, &instances);
    let means: Vec<Ns> = steps.iter().filter_map(Steps::mean).collect();
    let mut durations: Vec<Ns> = steps.iter().flat_map(Steps::durations).collect();
    durations.sort_unstable();
    let mut analysis = Analysis {
        steps: steps.iter().map(Steps::len).collect(),
        step_mean: (!means.is_empty()).then(|| total_of(&means) / means.len() as Ns),
        step_median: durations.get(durations.len() / 2).copied(),
        total,
        notes: notes(profile, &clocks, &steps),
        exposures,
        clocks,
        instances,
        rows,
        balance,
        parallelism,
        findings: Vec::new(),
    };
    analysis.findings = findings::of(profile, &analysis);
    analysis
}

fn notes(profile: &Profile, clocks: &Clocks, steps: &[Steps]) -> Vec<String> {
    let mut notes = profile.notes.clone();
    for rank in &profile.ranks {
        notes.extend(rank.notes.iter().map(|n| format!("rank {}: {n}", rank.rank)));
    }
    let adrift: Vec<String> = profile.ranks.iter().zip(&clocks.placed).filter(|(_, placed)| !**placed).map(|(r, _)| r.rank.to_string()).collect();
    if !adrift.is_empty() && profile.ranks.len() > 1 {
        notes.push(format!(
            "the clocks of ranks {} cannot be aligned: they share neither a host nor a collective with rank {}",
            adrift.join(", "),
            profile.ranks[0].rank
        ));
    }
    if steps.iter().all(Steps::is_empty) {
        notes.push("steps are not marked in the profile; times are over all of it".into());
    }
    notes
}

fn total_of(values: &[Ns]) -> Ns {
    total(values.iter().copied())
}

/// A sum that stays where it is when it would overflow: damaged profiles hold any number.
fn total(values: impl Iterator<Item = Ns>) -> Ns {
    values.fold(0, Ns::saturating_add)
}
