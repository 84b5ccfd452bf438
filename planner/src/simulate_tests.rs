//! The event simulation against its bounds and against the objective, for random pipelines of every schedule.

use super::*;
use crate::objective::{LayerTerms, StageTime, border, share, total};
use dplan_ir::plan::Schedule;

struct Dice(u64);
impl Dice {
    fn within(&mut self, low: u64, high: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        low + (self.0 >> 33) % (high - low + 1)
    }
}

/// A legal pipeline of a schedule.
fn pipeline(dice: &mut Dice, schedule: Schedule) -> Pipeline {
    loop {
        let (stages, micro_batches) = (dice.within(1, 9), dice.within(1, 24));
        let virtual_stages = match schedule {
            Schedule::GPipe | Schedule::OneFOneB | Schedule::ZbH1 | Schedule::PipeDream => 1,
            Schedule::Interleaved => dice.within(2, 4),
            Schedule::ZbV => 2,
        };
        let drawn = Pipeline { schedule, stages, virtual_stages, micro_batches };
        if drawn.refusal().is_none() {
            return drawn;
        }
    }
}

fn works(pipeline: &Pipeline, mut one: impl FnMut() -> StageWork) -> Vec<StageWork> {
    (0..pipeline.all_virtual())
        .map(|c| {
            let mut work = one();
            if !pipeline.parts_backward() {
                work.weight = 0;
            }
            if c + 1 == pipeline.all_virtual() || pipeline.stage_of(c) == pipeline.stage_of(c + 1) {
                work.message = 0;
            }
            work
        })
        .collect()
}

/// The objective of virtual stages of one layer each.
fn objective(works: &[StageWork], pipeline: &Pipeline) -> u64 {
    let of = |c: u64| {
        let w = &works[c as usize];
        let terms = LayerTerms { forward: w.forward, time: w.forward + w.backward + w.weight, weight: w.weight, end: 0, states: 0, ring: 0 };
        share(pipeline, &terms) + border(pipeline, 2 * w.message)
    };
    let stages: Vec<StageTime> = (0..pipeline.stages).map(|s| pipeline.virtual_stages_of(s).map(of).sum()).collect();
    total(&stages, pipeline, 0)
}

fn makespan(works: &[StageWork], pipeline: &Pipeline) -> u64 {
    simulate(works, &vec![0; pipeline.stages as usize], pipeline)
}

/// Bounds on the longest path, as the module states them.
fn bounds(works: &[StageWork], pipeline: &Pipeline) -> (u64, u64) {
    let (p, m, v) = (pipeline.stages, pipeline.micro_batches, pipeline.virtual_stages);
    let most = |of: fn(&StageWork) -> u64| works.iter().map(of).max().unwrap();
    let (f, b, w) = (most(|s| s.forward + s.message), most(|s| s.backward + s.message), most(|s| s.weight));
    let upper = match pipeline.schedule {
        Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => {
            works.iter().map(|s| s.forward + s.backward + 2 * s.message).sum::<u64>() + (m - 1) * (f + b)
        }
        Schedule::Interleaved => (v * m + p - 1) * (f + b),
        Schedule::ZbH1 => m * (f + b + w) + (p - 1) * (f + b).saturating_sub(w).max(f).max(b),
        Schedule::ZbV => 2 * m * (f + b + w) + (p - 1) * f.max(b).max(2 * b.saturating_sub(w)),
    };
    let lower = |s: u64| {
        let own: u64 = pipeline.virtual_stages_of(s).map(|c| &works[c as usize]).map(|w| w.forward + w.backward + w.weight).sum();
        let before = works[..s as usize].iter().map(|w| w.forward + w.message + if pipeline.parts_backward() { 0 } else { w.backward + w.message });
        before.sum::<u64>() + m * own
    };
    ((0..p).map(lower).max().unwrap(), upper)
}

#[test]
fn the_longest_path_lies_between_its_bounds() {
    let mut dice = Dice(1);
    for _ in 0..3000 {
        for schedule in Schedule::ALL {
            let pipeline = pipeline(&mut dice, schedule);
            let most = [5, 1000][dice.within(0, 1) as usize];
            let works = works(&pipeline, || {
                let forward = dice.within(1, most);
                let (backward, weight) = match schedule {
                    Schedule::GPipe | Schedule::OneFOneB | Schedule::Interleaved | Schedule::ZbH1 | Schedule::PipeDream => {
                        (dice.within(1, 3 * forward), dice.within(0, most))
                    }
                    // Its upper bound holds where input halves are longest.
                    Schedule::ZbV => (dice.within(most, 2 * most), dice.within(0, most)),
                };
                StageWork { forward, backward, weight, message: dice.within(0, most * 3 / 10) }
            });
            let (found, (lower, upper)) = (makespan(&works, &pipeline), bounds(&works, &pipeline));
            assert!((lower..=upper).contains(&found), "{pipeline:?}: {lower} <= {found} <= {upper}");
        }
    }
}

#[test]
fn the_objective_is_an_upper_bound_where_all_stages_share_one_ratio_of_passes() {
    let mut dice = Dice(2);
    let (mut met, mut worst) = (0, 0.0f64);
    for _ in 0..3000 {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::PipeDream] {
            let pipeline = pipeline(&mut dice, schedule);
            let most = [5, 1000][dice.within(0, 1) as usize];
            let even = works(&pipeline, || {
                let forward = dice.within(1, most);
                StageWork { forward, backward: 2 * forward, weight: 0, message: 0 }
            });
            let (found, objective_of_even) = (makespan(&even, &pipeline), objective(&even, &pipeline));
            assert!(found <= objective_of_even, "{pipeline:?}: {found} <= {objective_of_even}");
            met += u64::from(found == objective_of_even);
            // Backward passes between twice and three times the forward pass, as with recompute here and there.
            let mixed = works(&pipeline, || {
                let forward = dice.within(1, most);
                StageWork { forward, backward: dice.within(2 * forward, 3 * forward), weight: 0, message: dice.within(0, most / 10) }
            });
            worst = worst.max(makespan(&mixed, &pipeline) as f64 / objective(&mixed, &pipeline) as f64);
        }
    }
    assert!(met > 100, "the bound is met {met} times only");
    assert!(worst < 1.1, "mixed ratios take {worst} of the objective");
}

#[test]
fn it_is_exact_for_balanced_stages() {
    let mut dice = Dice(3);
    for _ in 0..500 {
        for schedule in Schedule::ALL {
            let pipeline = pipeline(&mut dice, schedule);
            // Divisible by every number of virtual stages.
            let backward = 12 * dice.within(1, 10);
            let (forward, weight) = (12 * dice.within(1, backward / 12), 12 * dice.within(0, backward / 12));
            let works = works(&pipeline, || StageWork { forward, backward, weight, message: 0 });
            let found = simulate(&works, &vec![7; pipeline.stages as usize], &pipeline);
            assert_eq!(found, objective(&works, &pipeline) + 7, "{pipeline:?}: {forward} {backward} {weight}");
        }
    }
}

#[test]
fn it_stays_near_for_stages_that_differ_little() {
    let mut dice = Dice(4);
    for _ in 0..1000 {
        for schedule in Schedule::ALL {
            let pipeline = pipeline(&mut dice, schedule);
            let works = works(&pipeline, || StageWork {
                forward: dice.within(950, 1050),
                backward: dice.within(1150, 1250),
                weight: dice.within(850, 950),
                message: 5,
            });
            let ratio = makespan(&works, &pipeline) as f64 / objective(&works, &pipeline) as f64;
            assert!((0.93..1.05).contains(&ratio), "{pipeline:?}: {ratio}");
        }
    }
}
