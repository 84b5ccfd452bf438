//! Why each layer runs as it does: what the choice costs, and what the next best one would.
//!
//! Alternatives change one layer alone and leave the rest of the plan as it is. The quickest that fits says how much the choice matters; a quicker one that does not fit
//! says what memory costs.

use crate::memory::{LayerBytes, StagePosition, StateTypes, arena};
use crate::menu::{Choice, Menus};
use crate::objective::{Home, StageTime, total};
use crate::prices::Prices;
use crate::problem::Problem;
use crate::request::layer_plan;
use crate::space::Tuple;
use crate::stages::Stages;
use crate::units::{Bytes, Nanos};
use dplan_ir::pipeline::Slots;
use dplan_ir::plan::{LayerPlan, Plan, Residence};

/// Neighbouring layers that are alike, on one stage, and run alike.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Note {
    pub first: usize,
    /// Inclusive.
    pub last: usize,
    pub stage: usize,
    pub plan: LayerPlan,
    /// Of one layer: each micro-batch, and the end of the step.
    pub time: Nanos,
    pub end: Nanos,
    /// Of one layer: parameters, gradients, optimizer states; and what each micro-batch in flight keeps.
    pub states: Bytes,
    pub frame: Bytes,
    /// Parameters put by for backward passes: so many versions, of so many bytes each.
    pub versions: (u64, Bytes),
    /// Of the whole stage.
    pub arena: Bytes,
    /// The best other way that fits.
    pub next: Option<Alternative>,
    /// The best way that would be quicker and does not fit.
    pub denied: Option<Alternative>,
}

/// Another way of running one layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Alternative {
    pub plan: LayerPlan,
    /// What the step would take.
    pub step: Nanos,
    /// What the arena of its stage would take.
    pub arena: Bytes,
    /// Bytes of it that there are not; 0 if it fits.
    pub short: Bytes,
}

/// Notes on all layers, in order; nothing if the plan is not one of this problem.
pub fn explain(problem: &Problem, prices: &mut dyn Prices, plan: &Plan) -> Option<Vec<Note>> {
    let (menus, choices) = (0..prices.paddings(plan.tp)).find_map(|padding| recognise(problem, prices, plan, padding))?;
    let view = View { problem, menus: &menus, choices: &choices, plan, stages: Stages::new(&menus, &problem.layers, problem.budget) };
    let mut notes: Vec<Note> = Vec::new();
    for (virtual_stage, cut) in plan.stages.iter().enumerate() {
        let stage = plan.pipeline().stage_of(virtual_stage as u64) as usize;
        let mut run: Option<(usize, Home, u32)> = None;
        for layer in cut.first as usize..=cut.last as usize {
            let key = (problem.layers[layer], view.home(layer), choices[layer]);
            match notes.last_mut().filter(|_| run == Some(key)) {
                Some(note) => note.last = layer,
                None => notes.push(view.note(stage, layer)),
            }
            run = Some(key);
        }
    }
    Some(notes)
}

/// The menus in which every layer of the plan is a choice, and these choices.
fn recognise(problem: &Problem, prices: &mut dyn Prices, plan: &Plan, padding: u32) -> Option<(Menus, Vec<u32>)> {
    let &Plan { dp, ep, cp, tp, micro_batch, micro_batches, schedule, virtual_stages, boundary, placement, keys, sync, nest, .. } = plan;
    let pp = plan.pp();
    let tuple = Tuple { pp, tp, cp, ep, dp, micro_batch, micro_batches, schedule, virtual_stages, boundary, padding, placement, keys, sync, nest };
    let menus = Menus::new(problem, prices, tuple)?;
    let choice = |(layer, &kind): (u32, &usize)| {
        let (wanted, row) = (plan.layer(layer), menus.row(plan.stage_of(layer), kind));
        (0..menus.choices[row].len() as u32).find(|&c| layer_plan(&menus, row, c) == *wanted)
    };
    let choices = (0..).zip(&problem.layers).map(choice).collect::<Option<Vec<u32>>>()?;
    Some((menus, choices))
}

struct View<'a> {
    problem: &'a Problem,
    menus: &'a Menus,
    choices: &'a [u32],
    plan: &'a Plan,
    stages: Stages<'a>,
}

impl View<'_> {
    fn home(&self, layer: usize) -> Home {
        let stage = self.plan.stage_of(layer as u32) as u64;
        let range = |c: u64| (self.plan.stages[c as usize].first as usize, self.plan.stages[c as usize].last as usize + 1);
        self.stages.home(layer, &self.plan.pipeline().virtual_stages_of(stage).map(range).collect::<Vec<_>>())
    }

    fn row(&self, layer: usize) -> usize {
        self.menus.row(self.plan.stage_of(layer as u32), self.problem.layers[layer])
    }

    fn index(&self, layer: usize, instead: Option<(usize, u32)>) -> u32 {
        match instead {
            Some((at, other)) if at == layer => other,
            _ => self.choices[layer],
        }
    }

    fn choice(&self, layer: usize, instead: Option<(usize, u32)>) -> &Choice {
        &self.menus.choices[self.row(layer)][self.index(layer, instead) as usize]
    }

    fn note(&self, stage: usize, layer: usize) -> Note {
        let row = self.row(layer);
        let chosen = self.choice(layer, None);
        let terms = chosen.terms(self.home(layer));
        let tie = |c: &Choice| self.menus.offers[row][c.offer as usize].tie.as_ref().map(|sharding| (sharding, c.residence.states));
        let now = self.step(None);
        let budget = self.problem.budget_at(self.menus.sites[self.menus.site_of(stage as u64)].0);
        let (mut next, mut denied): (Option<Alternative>, Option<Alternative>) = (None, None);
        for (other, at) in self.menus.choices[row].iter().zip(0..) {
            if at == self.choices[layer] || tie(other) != tie(chosen) {
                continue;
            }
            let instead = Some((layer, at));
            let (step, arena) = (self.step(instead), self.arena(stage, instead));
            let short = arena.saturating_sub(budget);
            let place = if short == 0 { &mut next } else { &mut denied };
            let better = place.as_ref().is_none_or(|p| (step, short) < (p.step.0, p.short.0));
            if better && (short == 0 || step < now) {
                *place = Some(Alternative { plan: layer_plan(self.menus, row, at), step: Nanos(step), arena: Bytes(arena), short: Bytes(short) });
            }
        }
        Note {
            first: layer,
            last: layer,
            stage,
            plan: layer_plan(self.menus, row, self.choices[layer]),
            time: Nanos(terms.time),
            end: Nanos(terms.end),
            states: Bytes(terms.states),
            frame: Bytes(chosen.frame),
            versions: (self.versions(stage, layer), Bytes(chosen.version)),
            arena: Bytes(self.arena(stage, None)),
            next,
            denied,
        }
    }

    /// The objective with one layer changed.
    fn step(&self, instead: Option<(usize, u32)>) -> u64 {
        let pipeline = self.plan.pipeline();
        let of_virtual = |c: u64| {
            let cut = &self.plan.stages[c as usize];
            let layers = cut.first as usize..=cut.last as usize;
            layers.map(|layer| self.choice(layer, instead).share(self.home(layer))).sum::<StageTime>() + self.menus.border(c, cut.last as usize)
        };
        let stages: Vec<StageTime> = (0..pipeline.stages).map(|s| pipeline.virtual_stages_of(s).map(of_virtual).sum()).collect();
        total(&stages, &pipeline, self.menus.constant)
    }

    /// How many versions of its parameters a layer's virtual stage puts by.
    fn versions(&self, stage: usize, layer: usize) -> u64 {
        let virtual_stages = self.plan.pipeline().virtual_stages_of(stage as u64);
        let own = virtual_stages.zip(&self.menus.slots[stage]).find(|(c, _)| *c == self.plan.virtual_stage_of(layer as u32) as u64);
        own.map_or(0, |(_, slots)| slots.versions)
    }

    /// Bytes of a stage's arena with one layer changed.
    fn arena(&self, stage: usize, instead: Option<(usize, u32)>) -> u64 {
        let pipeline = self.plan.pipeline();
        let (stage, mut layers): (u64, Vec<(&LayerBytes, Residence, Slots)>) = (stage as u64, Vec::new());
        for (c, &slots) in pipeline.virtual_stages_of(stage).zip(&self.menus.slots[stage as usize]) {
            let cut = &self.plan.stages[c as usize];
            layers.extend((cut.first as usize..=cut.last as usize).map(|layer| {
                let (row, choice) = (self.row(layer), self.index(layer, instead));
                (self.menus.bytes(row, choice), self.menus.choices[row][choice as usize].residence, slots)
            }));
        }
        let at = StagePosition { pipeline, stage, boundary: self.menus.boundary };
        arena(&layers, &self.plan.mesh(), StateTypes::of(self.plan), at).total()
    }
}
