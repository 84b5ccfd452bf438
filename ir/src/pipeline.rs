//! Pipelines: which stage runs which layers, and in which order.
//!
//! A *stage* is a group of ranks that share one program. A *virtual stage* is a run of consecutive layers; a stage holds as many of them as every other.
//! Virtual stages are numbered in the order of layers. Where they lie, by schedule, over three stages:
//!
//! ```text
//! gpipe, 1f1b, zb-h1   0 1 2            one virtual stage on each stage; so pipedream
//! interleaved          0 1 2 · 3 4 5    round and round: virtual stage c on stage c mod p
//! zb-v                 0 1 2 · 5 4 3    there and back: the first and the last virtual stage share a stage
//! ```
//! The zero-bubble schedules part the backward pass: the *input* half makes what the stage before waits for, the *weight* half what only the end of the step
//! waits for, so that it can fill what would be a bubble (arXiv:2401.10241).
//!
//! **Staleness.** `pipedream` (arXiv:1806.03377) has the order of 1f1b, and behind each backward pass the stage updates its parameters with that micro-batch's gradient alone. A
//! step is a window of `m` updates, at whose end nothing is in flight. *Version* `v` of a stage's parameters is what `v` updates of the step have made of them. Stage `s` of `p`
//! runs `p − 1 − s` forward passes ahead, so the forward pass of micro-batch `i` finds version `max(0, i − (p − 1 − s))`, and its backward pass works with the same version, which
//! is put by for it (*weight stashing*): its gradient is one of one set of parameters, `p − 1 − s` updates behind those that it changes. Of two stages and four micro-batches:
//!
//! ```text
//! stage 0   F0(0) F1(0) B0(0) U0→1 F2(1) B1(0) U1→2 F3(2) B2(1) U2→3 B3(2) U3→4
//! stage 1   F0(0) B0(0) U0→1 F1(1) B1(1) U1→2 F2(2) B2(2) U2→3 F3(3) B3(3) U3→4
//! ```
//!
//! A virtual stage keeps a *frame* of every micro-batch from its forward pass until the last pass that reads it, and *holds* cotangents between the halves of a
//! backward pass ([`Slots`]). Micro-batches pass a virtual stage in order, so those that it keeps are consecutive.

use crate::plan::Schedule;
use crate::program::Updates;

/// How micro-batches pass the stages of a plan.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Pipeline {
    pub schedule: Schedule,
    pub stages: u64,
    /// Virtual stages on each stage.
    pub virtual_stages: u64,
    pub micro_batches: u64,
}

/// What a stage does with a micro-batch on one of its virtual stages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Pass {
    Forward,
    /// All of the backward pass.
    Backward,
    /// What the stage before waits for.
    Input,
    /// The rest of the backward pass.
    Weight,
}

impl Pass {
    /// As PyTorch's pipeline schedules call it.
    pub fn letter(self) -> char {
        match self {
            Pass::Forward => 'F',
            Pass::Backward => 'B',
            Pass::Input => 'I',
            Pass::Weight => 'W',
        }
    }
}

/// One pass of one micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    pub pass: Pass,
    /// Which of its stage's virtual stages.
    pub nth: u64,
    pub micro_batch: u64,
}

/// Micro-batches of which a virtual stage keeps something at once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Slots {
    /// From the forward pass to the last pass that reads what it left.
    pub frames: u64,
    /// From the input half of the backward pass to the weight half; 0 where it is not parted.
    pub held: u64,
    /// Parameters that are put by for the backward pass, beside those that are there; 0 where all passes of a step work with the same.
    pub versions: u64,
}

impl Pipeline {
    /// What a schedule needs that this pipeline has not, in words.
    pub fn refusal(&self) -> Option<&'static str> {
        let (p, v, m) = (self.stages, self.virtual_stages, self.micro_batches);
        match self.schedule {
            _ if p == 0 || v == 0 || m == 0 => Some("at least one stage and one micro-batch"),
            Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream if v > 1 => Some("one virtual stage on each stage"),
            Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => None,
            _ if p < 2 => Some("at least two stages"),
            Schedule::Interleaved if v < 2 => Some("at least two virtual stages on each stage"),
            Schedule::Interleaved if !m.is_multiple_of(p) => Some("micro-batches in a multiple of the stages"),
            Schedule::ZbH1 if v > 1 => Some("one virtual stage on each stage"),
            Schedule::ZbH1 if m < p => Some("at least as many micro-batches as stages"),
            Schedule::ZbV if v != 2 => Some("two virtual stages on each stage"),
            Schedule::ZbV if m < 2 * p - 1 => Some("nearly twice as many micro-batches as stages, 2·pp − 1"),
            Schedule::Interleaved | Schedule::ZbH1 | Schedule::ZbV => None,
        }
    }

    /// Virtual stages of all stages.
    pub fn all_virtual(&self) -> u64 {
        self.stages * self.virtual_stages
    }

    /// The stage that a virtual stage lies on.
    pub fn stage_of(&self, virtual_stage: u64) -> u64 {
        match self.schedule {
            Schedule::ZbV if virtual_stage >= self.stages => 2 * self.stages - 1 - virtual_stage,
            Schedule::GPipe | Schedule::OneFOneB | Schedule::Interleaved | Schedule::ZbH1 | Schedule::ZbV | Schedule::PipeDream => {
                virtual_stage % self.stages
            }
        }
    }

    /// The virtual stages of a stage, in order.
    pub fn virtual_stages_of(&self, stage: u64) -> impl Iterator<Item = u64> + use<> {
        let this = *self;
        (0..this.virtual_stages).map(move |nth| match this.schedule {
            Schedule::ZbV if nth == 1 => 2 * this.stages - 1 - stage,
            Schedule::GPipe | Schedule::OneFOneB | Schedule::Interleaved | Schedule::ZbH1 | Schedule::ZbV | Schedule::PipeDream => {
                nth * this.stages + stage
            }
        })
    }

    /// Whether backward passes come in halves.
    pub fn parts_backward(&self) -> bool {
        match self.schedule {
            Schedule::GPipe | Schedule::OneFOneB | Schedule::Interleaved | Schedule::PipeDream => false,
            Schedule::ZbH1 | Schedule::ZbV => true,
        }
    }

    /// The same pipeline with fewer micro-batches, if there are more than show its steady state at least `times`.
    pub fn shortened(&self, times: u64) -> Pipeline {
        let round = match self.schedule {
            Schedule::GPipe => 2,
            Schedule::OneFOneB | Schedule::Interleaved | Schedule::ZbH1 | Schedule::ZbV | Schedule::PipeDream => 2 * self.stages,
        };
        Pipeline { micro_batches: self.micro_batches.min(round * (times + 1)), ..*self }
    }

    /// Updates between a forward pass of a stage and its backward pass, so that the gradient is of parameters so far behind: 0 where a step has one update, at its end.
    pub fn staleness(&self, stage: u64) -> u64 {
        match self.schedule.updates() {
            Updates::Step => 0,
            Updates::MicroBatch => self.stages - 1 - stage,
        }
    }

    /// The most updates that a gradient of a stage is behind: a step begins with nothing in flight, and may have fewer micro-batches than the stage runs ahead.
    pub fn most_stale(&self, stage: u64) -> u64 {
        self.staleness(stage).min(self.micro_batches.saturating_sub(1))
    }

    /// The passes of a stage, in order. Charts of them are in the tests.
    pub fn turns(&self, stage: u64) -> Vec<Turn> {
        match self.schedule {
            Schedule::GPipe => self.one_after_the_other(),
            Schedule::OneFOneB | Schedule::Interleaved | Schedule::ZbH1 | Schedule::PipeDream => self.round_and_round(stage),
            Schedule::ZbV => self.there_and_back(stage),
        }
    }

    /// What each virtual stage of a stage keeps.
    pub fn slots(&self, stage: u64) -> Vec<Slots> {
        match self.schedule {
            Schedule::GPipe => vec![Slots { frames: self.micro_batches, held: 0, versions: 0 }],
            Schedule::OneFOneB => vec![Slots { frames: self.micro_batches.min(self.stages - stage), held: 0, versions: 0 }],
            Schedule::ZbH1 => vec![Slots { frames: self.stages, held: stage + 1, versions: 0 }],
            Schedule::PipeDream => {
                let frames = self.micro_batches.min(self.stages - stage);
                vec![Slots { frames, held: 0, versions: frames - 1 }]
            }
            // The most that are kept is reached in the first rounds.
            Schedule::Interleaved | Schedule::ZbV => kept(&self.shortened(2), stage),
        }
    }

    fn one_after_the_other(&self) -> Vec<Turn> {
        let turn = |pass| move |micro_batch| Turn { pass, nth: 0, micro_batch };
        (0..self.micro_batches).map(turn(Pass::Forward)).chain((0..self.micro_batches).map(turn(Pass::Backward))).collect()
    }

    /// Rounds of as many micro-batches as stages through one virtual stage after the other (arXiv:2104.04473). A stage runs ahead by so many forward passes that
    /// the first cotangent arrives just then; the weight half of zb-h1 comes as many micro-batches late as a stage has before it.
    fn round_and_round(&self, stage: u64) -> Vec<Turn> {
        let (p, v, m) = (self.stages, self.virtual_stages, self.micro_batches);
        let passes = v * m;
        let hops = p - 1 - stage;
        let ahead = ((v - 1) * p + if v > 1 { 2 * hops } else { hops }).min(passes);
        // With one virtual stage the rounds do not show, and micro-batches need not fill the last one.
        let micro_batch = |k: u64| k / (p * v) * p + k % p;
        let forward = |k: u64| Turn { pass: Pass::Forward, nth: k / p % v, micro_batch: micro_batch(k) };
        let parts = self.parts_backward();
        let backward = |pass: Pass, k: u64| Turn { pass, nth: v - 1 - k / p % v, micro_batch: micro_batch(k) };
        let mut turns: Vec<Turn> = (0..ahead).map(forward).collect();
        for k in 0..passes {
            turns.extend((ahead + k < passes).then(|| forward(ahead + k)));
            turns.push(backward(if parts { Pass::Input } else { Pass::Backward }, k));
            turns.extend(k.checked_sub(stage).filter(|_| parts).map(|k| backward(Pass::Weight, k)));
        }
        let late = passes.saturating_sub(stage);
        turns.extend((late..passes).filter(|_| parts).map(|k| backward(Pass::Weight, k)));
        turns
    }

    /// The V of arXiv:2401.10241, §6: forward passes fill the way there and back, then each stage alternates between its two virtual stages, and weight halves
    /// that were put off fill the end.
    fn there_and_back(&self, stage: u64) -> Vec<Turn> {
        let (p, m) = (self.stages, self.micro_batches);
        let mut turns = Vec::new();
        let mut done = [[0; 2]; 3];
        let mut turn = |pass: Pass, nth: u64| {
            let of = match pass {
                Pass::Forward => 0,
                Pass::Backward | Pass::Input => 1,
                Pass::Weight => 2,
            };
            let micro_batch = &mut done[of][nth as usize];
            turns.push(Turn { pass, nth, micro_batch: *micro_batch });
            *micro_batch += 1;
        };
        let (f, i, w) = (Pass::Forward, Pass::Input, Pass::Weight);
        let hops = p - stage;
        (0..2 * hops - 1).for_each(|_| turn(f, 0));
        (0..stage).flat_map(|_| [1, 0]).for_each(|nth| turn(f, nth));
        (0..hops).flat_map(|_| [f, i, w]).for_each(|pass| turn(pass, 1));
        // So far 2p − 1 − stage forward passes of the first virtual stage, p of the second.
        for k in p..m {
            if k + hops - 1 < m {
                turn(f, 0);
            }
            [(i, 0), (w, 0), (f, 1), (i, 1), (w, 1)].into_iter().for_each(|(pass, nth)| turn(pass, nth));
        }
        (0..stage).flat_map(|_| [0, 1]).for_each(|nth| turn(i, nth));
        (0..hops).flat_map(|_| [i, w]).for_each(|pass| turn(pass, 0));
        (0..stage).for_each(|_| turn(w, 1));
        (0..stage).for_each(|_| turn(w, 0));
        turns
    }
}

/// Versions of parameters that are put by when they are about to be updated, with so many micro-batches between their passes.
fn put_by(pipeline: &Pipeline, between: u64) -> u64 {
    match pipeline.schedule.updates() {
        Updates::Step => 0,
        Updates::MicroBatch => between,
    }
}

/// What each virtual stage keeps, counted along the order of passes. Where a virtual stage's neighbour lies on the same stage, the neighbour writes into its place.
fn kept(pipeline: &Pipeline, stage: u64) -> Vec<Slots> {
    let own: Vec<u64> = pipeline.virtual_stages_of(stage).collect();
    let beside = |of: Option<u64>| own.iter().position(|&c| Some(c) == of);
    let mut most = vec![Slots::default(); own.len()];
    let mut begun = vec![[0u64; 2]; own.len()];
    let mut over = vec![[0u64; 2]; own.len()];
    for turn in pipeline.turns(stage) {
        let nth = turn.nth as usize;
        let next = turn.micro_batch + 1;
        let mut begin = |at: usize, what: usize| begun[at][what] = begun[at][what].max(next);
        match turn.pass {
            Pass::Forward => [Some(nth), beside(Some(own[nth] + 1))].into_iter().flatten().for_each(|at| begin(at, 0)),
            Pass::Input => [Some(nth), beside(own[nth].checked_sub(1))].into_iter().flatten().for_each(|at| begin(at, 1)),
            Pass::Backward | Pass::Weight => {}
        }
        for at in 0..own.len() {
            most[at].frames = most[at].frames.max(begun[at][0] - over[at][0]);
            most[at].held = most[at].held.max(begun[at][1] - over[at][1]);
        }
        match turn.pass {
            Pass::Backward => {
                over[nth][0] = next;
                most[nth].versions = most[nth].versions.max(put_by(pipeline, begun[nth][0] - next));
            }
            Pass::Weight => over[nth] = [next; 2],
            Pass::Forward | Pass::Input => {}
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every legal pipeline of so many stages, virtual stages and micro-batches.
    fn legal(stages: u64, most_virtual: u64, most_micro_batches: u64) -> impl Iterator<Item = Pipeline> {
        let all = (1..=stages).flat_map(move |p| (1..=most_virtual).flat_map(move |v| (1..=most_micro_batches).map(move |m| (p, v, m))));
        all.flat_map(|(stages, virtual_stages, micro_batches)| {
            Schedule::ALL.map(|schedule| Pipeline { schedule, stages, virtual_stages, micro_batches })
        })
        .filter(|p| p.refusal().is_none())
    }

    fn chart(pipeline: &Pipeline) -> Vec<String> {
        let line = |stage: u64| {
            let own: Vec<u64> = pipeline.virtual_stages_of(stage).collect();
            let shown = pipeline.turns(stage).into_iter().map(|t| format!("{}{}{}", own[t.nth as usize], t.pass.letter(), t.micro_batch));
            shown.collect::<Vec<_>>().join(" ")
        };
        (0..pipeline.stages).map(line).collect()
    }

    #[test]
    fn the_order_of_passes_is_that_of_the_charts() {
        let pipeline = |schedule, stages, virtual_stages, micro_batches| Pipeline { schedule, stages, virtual_stages, micro_batches };
        assert_eq!(chart(&pipeline(Schedule::GPipe, 2, 1, 3)), ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]);
        assert_eq!(
            chart(&pipeline(Schedule::OneFOneB, 3, 1, 4)),
            ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3", "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"]
        );
        assert_eq!(
            chart(&pipeline(Schedule::Interleaved, 2, 2, 4)),
            ["0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3", "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"]
        );
        assert_eq!(chart(&pipeline(Schedule::ZbH1, 2, 1, 3)), ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]);
        assert_eq!(
            chart(&pipeline(Schedule::ZbV, 2, 2, 3)),
            [
                "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
                "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"
            ]
        );
    }

    /// Versions as counted along the order: a forward pass finds as many updates as there are backward passes before it.
    #[test]
    fn pipedream_is_as_stale_as_it_says() {
        let found = |pipeline: &Pipeline, stage: u64| {
            let mut updates = 0;
            let mut found = Vec::new();
            for turn in pipeline.turns(stage) {
                match turn.pass {
                    Pass::Forward => found.push(updates),
                    Pass::Backward | Pass::Input | Pass::Weight => updates += 1,
                }
            }
            found
        };
        let two = Pipeline { schedule: Schedule::PipeDream, stages: 2, virtual_stages: 1, micro_batches: 4 };
        assert_eq!([0, 1].map(|stage| found(&two, stage)), [[0, 0, 1, 2], [0, 1, 2, 3]]);
        assert_eq!([0, 1].map(|stage| (two.staleness(stage), two.slots(stage)[0].versions)), [(1, 1), (0, 0)]);
        for pipeline in legal(6, 1, 20).filter(|p| p.schedule == Schedule::PipeDream) {
            for stage in 0..pipeline.stages {
                let stale = |i: u64| i.saturating_sub(pipeline.staleness(stage));
                assert_eq!(found(&pipeline, stage), (0..pipeline.micro_batches).map(stale).collect::<Vec<_>>(), "{pipeline:?} {stage}");
            }
        }
    }

    #[test]
    fn every_pass_runs_once_in_order_and_halves_follow_each_other() {
        for pipeline in legal(5, 4, 20) {
            for stage in 0..pipeline.stages {
                let count = pipeline.virtual_stages as usize;
                let mut done = vec![[0; 3]; count];
                for turn in pipeline.turns(stage) {
                    let of = &mut done[turn.nth as usize];
                    let at = match turn.pass {
                        Pass::Forward => 0,
                        Pass::Backward | Pass::Input => 1,
                        Pass::Weight => 2,
                    };
                    assert_eq!(of[at], turn.micro_batch, "{pipeline:?} {stage}");
                    assert!(at == 0 || of[at] < of[at - 1], "{pipeline:?} {stage}: {turn:?}");
                    assert_eq!(turn.pass == Pass::Backward, at == 1 && !pipeline.parts_backward());
                    of[at] += 1;
                }
                let m = pipeline.micro_batches;
                assert_eq!(done, vec![[m, m, if pipeline.parts_backward() { m } else { 0 }]; count], "{pipeline:?} {stage}");
            }
        }
    }

    #[test]
    fn slots_are_the_most_that_the_order_keeps() {
        for pipeline in legal(6, 3, 40) {
            for stage in 0..pipeline.stages {
                assert_eq!(pipeline.slots(stage), kept(&pipeline, stage), "{pipeline:?} {stage}");
            }
        }
    }

    #[test]
    fn each_virtual_stage_lies_on_one_stage() {
        for pipeline in legal(5, 4, 12) {
            for stage in 0..pipeline.stages {
                assert!(pipeline.virtual_stages_of(stage).all(|c| pipeline.stage_of(c) == stage), "{pipeline:?}");
            }
            let mut all: Vec<u64> = (0..pipeline.stages).flat_map(|s| pipeline.virtual_stages_of(s)).collect();
            all.sort_unstable();
            assert_eq!(all, (0..pipeline.all_virtual()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_shortened_pipeline_is_legal_and_begins_alike() {
        for pipeline in legal(4, 3, 60) {
            let short = pipeline.shortened(1);
            assert_eq!(short.refusal(), None, "{pipeline:?}");
            assert_eq!(short.turns(0)[..2], pipeline.turns(0)[..2]);
        }
    }
}
