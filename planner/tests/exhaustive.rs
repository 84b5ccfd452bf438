//! The search against plain enumeration ([`enumeration`]) and integer programs on drawn instances: the best plan, the least shortage, the certificate, the gap of a search
//! that was cut short.

mod drawn;
mod enumeration;

use dplan_ir::mesh::Keys;
use dplan_ir::plan::{Offload, Placement, Residence, Schedule, Store};
use dplan_planner::baselines::{Node, baselines, offloaded_is_quicker};
use dplan_planner::bound::{self, Lives};
use dplan_planner::certificate::check;
use dplan_planner::infeasible;
use dplan_planner::integer;
use dplan_planner::pins::Pins;
use dplan_planner::prices::{Prices, Reference};
use dplan_planner::problem::Problem;
use dplan_planner::search::{Found, How, explore};
use dplan_planner::space::{Tuple, tuples};
use drawn::{Drawn, Instance, instance};
use enumeration::enumerate;
use std::cell::Cell;
use std::collections::BTreeMap;

const DIMENSIONS: [&str; 15] =
    ["dp", "tp", "cp", "ep", "pp", "micro", "schedule", "boundary", "keys", "zero", "offload", "activations", "recompute", "tie", "groups"];

/// The dimensions in which an instance leaves a choice.
fn open_dimensions(problem: &Problem, prices: &mut Drawn) -> Vec<&'static str> {
    let space = tuples(prices, problem.devices, problem.batch, &problem.pins);
    let differs = |of: &dyn Fn(&Tuple) -> u64| space.iter().any(|t| of(t) != of(&space[0]));
    let mut open = Vec::new();
    let global: [(&str, &dyn Fn(&Tuple) -> u64); 9] = [
        ("dp", &|t| t.dp),
        ("tp", &|t| t.tp),
        ("cp", &|t| t.cp),
        ("ep", &|t| t.ep),
        ("pp", &|t| t.pp),
        ("micro", &|t| t.micro_batch),
        ("schedule", &|t| t.schedule as u64),
        ("boundary", &|t| u64::from(t.boundary.is_some())),
        ("keys", &|t| t.keys as u64),
    ];
    open.extend(global.iter().filter(|(_, of)| differs(*of)).map(|(name, _)| *name));
    let shared = space.iter().any(|t| t.dp * t.cp > 1);
    if shared && problem.kinds.iter().any(|k| k.zero.len() > 1) {
        open.push("zero");
    }
    if problem.kinds.iter().any(|k| k.away.iter().any(|a| a.states != k.away[0].states)) {
        open.push("offload");
    }
    if problem.kinds.iter().any(|k| k.away.iter().any(|a| a.activations != k.away[0].activations)) {
        open.push("activations");
    }
    if problem.kinds.iter().any(|k| k.recompute.len() > 1) {
        open.push("recompute");
    }
    if !prices.tied.is_empty() {
        open.push("tie");
    }
    // Stages may be here or there.
    if prices.groups().count() > 1 && space.iter().any(|t| t.pp > 1) {
        open.push("groups");
    }
    open
}

#[test]
fn the_search_finds_what_enumeration_finds() {
    let (mut infeasible, mut tied, mut staged, mut tight, mut stored, mut context, mut experts) = (0, 0, 0, 0, 0, 0, 0);
    let mut pairs: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    // Of the instances that integer programs solved too, those with contexts, and with experts, shared out, and those on unlike devices.
    let mut by_programs = (0, 0, 0);
    // Best plans whose stages are on several sites; of these, those that have another order of groups than the given one, and those with a stage on several groups.
    let mut unlike = (0, 0, 0);
    for seed in 0..500 {
        let Instance { mut prices, problem } = instance(seed, if seed % 3 == 0 { 4 } else { 3 }, if seed % 4 == 0 { 3 } else { 2 });
        let truth = enumerate(&problem, &mut prices);
        let outcome = explore(&problem, &mut prices, &|| false);
        let found = outcome.best.as_ref().map(|b| b.solution.objective);
        assert_eq!(found, truth, "seed {seed}: {problem:?}");
        if seed % 4 == 0 {
            let integer = integer::explore(&problem, &mut prices, &|| false).unwrap();
            let tuple = integer.best.as_ref().map(|b| b.menus.tuple);
            by_programs.0 += usize::from(tuple.is_some_and(|t| t.cp > 1));
            by_programs.1 += usize::from(tuple.is_some_and(|t| t.ep > 1));
            by_programs.2 += usize::from(integer.best.as_ref().is_some_and(|b| b.menus.sites.len() > 1));
            assert_eq!(integer.best.map(|b| b.solution.objective), truth, "integer programs, seed {seed}: {problem:?}");
        }
        let open = open_dimensions(&problem, &mut prices);
        for a in &open {
            open.iter().filter(|b| a < b).for_each(|b| *pairs.entry((*a, *b)).or_insert(0) += 1);
        }
        assert!(outcome.statistics.proved && outcome.closed.iter().all(|c| !matches!(c.how, How::Open(_))), "seed {seed}");
        infeasible += usize::from(truth.is_none());
        let Some(best) = outcome.best else { continue };
        tied += usize::from(best.menus.tied.contains(&true));
        staged += usize::from(best.menus.tuple.pp > 1);
        context += usize::from(best.menus.tuple.cp > 1);
        experts += usize::from(best.menus.tuple.ep > 1);
        tight += usize::from(residences(&best, &problem).any(|r| r.states.zero.0 > 0));
        stored += usize::from(residences(&best, &problem).any(|r| r.activations.is_some()));
        if best.menus.sites.len() > 1 {
            unlike.0 += 1;
            unlike.1 += usize::from(best.menus.tuple.placement != Placement::default());
            unlike.2 += usize::from(best.menus.sites.iter().any(|(site, _)| !site.is_pure()));
        }
    }
    // Every two dimensions are open together in enough instances.
    for (at, a) in DIMENSIONS.iter().enumerate() {
        for b in &DIMENSIONS[at + 1..] {
            let pair = if a < b { (*a, *b) } else { (*b, *a) };
            assert!(pairs.get(&pair).is_some_and(|&n| n >= 20), "{pair:?}: {:?}", pairs.get(&pair));
        }
    }
    // The instances must be of all sorts, or they prove little.
    assert!(
        infeasible >= 10 && tied >= 20 && staged >= 20 && tight >= 20 && stored >= 20 && context >= 20 && experts >= 20,
        "{infeasible} infeasible, {tied} tied, {staged} staged, {tight} with ZeRO, {stored} with offloaded activations, {context} with contexts, {experts} with experts shared out"
    );
    assert!(
        by_programs.0 >= 5 && by_programs.1 >= 5 && by_programs.2 >= 5,
        "{by_programs:?} of the instances that integer programs solved share out contexts, experts, are on unlike devices"
    );
    assert!(
        unlike.0 >= 20 && unlike.1 >= 10 && unlike.2 >= 5,
        "{unlike:?} best plans on several sites, in another order, with a stage on several groups"
    );
}

/// Where each layer lives.
fn residences<'a>(best: &'a Found, problem: &'a Problem) -> impl Iterator<Item = Residence> + 'a {
    best.choices(&problem.layers).into_iter().map(|(row, choice)| best.menus.choices[row][choice as usize].residence)
}

/// In one byte less than any plan without offloading needs.
#[test]
fn where_only_offloading_fits_too() {
    let (mut compared, mut stored, mut in_halves) = (0, 0, 0);
    for seed in 0..1100 {
        let Instance { mut prices, problem } = instance(seed, 3, 2);
        // Few instances are pipelines long enough for halves.
        let (schedule, way) = match seed {
            0..150 => ("schedule=1f1b", "none+optimizer"),
            150..300 => ("schedule=1f1b", "none+activations"),
            _ => ("schedule=zb-h1", "none+optimizer"),
        };
        let with = |prices: &Drawn, offload: &str, budget: u64| {
            let pins = Pins::parse(&format!("{schedule},offload={offload}")).unwrap();
            Problem { budget, ..problem.under(prices, pins) }
        };
        let mut least = |offload: &str| {
            let nothing = with(&prices, offload, 0);
            infeasible::shortage(&nothing, &mut prices).map(|s| s.bytes)
        };
        let (Some(device), Some(host)) = (least("none"), least(way)) else { continue };
        if host >= device {
            continue;
        }
        let problem = with(&prices, way, device - 1);
        let best = explore(&problem, &mut prices, &|| false).best.unwrap_or_else(|| panic!("seed {seed}: {host} bytes are enough"));
        let truth = enumerate(&problem, &mut prices);
        assert_eq!(Some(best.solution.objective), truth, "seed {seed}: {problem:?}");
        let is_away = |r: Residence| r.states.offload == Offload::Optimizer(Store::Cpu) || r.activations == Some(Store::Cpu);
        assert!(residences(&best, &problem).any(is_away), "seed {seed}");
        if compared % 3 == 0 {
            let integer = integer::explore(&problem, &mut prices, &|| false).unwrap();
            assert_eq!(integer.best.map(|b| b.solution.objective), truth, "integer programs, seed {seed}: {problem:?}");
        }
        compared += 1;
        in_halves += usize::from(best.menus.tuple.schedule == Schedule::ZbH1);
        stored += usize::from(way == "none+activations");
    }
    assert!(compared >= 50 && stored >= 20 && in_halves >= 5, "{compared} compared, {stored} of activations, {in_halves} in halves");
}

#[test]
fn with_keys_that_go_round_too() {
    let mut rings = 0;
    for seed in 0..60 {
        let Instance { mut prices, problem } = instance(seed, 4, 2);
        let problem = problem.under(&prices, Pins::parse(["keys=ring", "keys=gather+ring"][seed as usize % 2]).unwrap());
        let truth = enumerate(&problem, &mut prices);
        let outcome = explore(&problem, &mut prices, &|| false);
        assert_eq!(outcome.best.as_ref().map(|b| b.solution.objective), truth, "seed {seed}: {problem:?}");
        assert!(outcome.statistics.proved, "seed {seed}");
        let Some(best) = outcome.best else { continue };
        let objective = best.solution.objective;
        check(&problem, &mut prices, objective, objective, &outcome.closed).unwrap_or_else(|faults| panic!("seed {seed}: {faults:?}"));
        rings += usize::from(best.menus.tuple.keys == Keys::Ring);
    }
    assert!(rings >= 5, "{rings} rings are best");
}

#[test]
fn with_virtual_stages_and_backward_passes_in_halves_too() {
    let mut best_with = std::collections::BTreeMap::new();
    for seed in 0..250 {
        let Instance { mut prices, problem } = instance(seed, 6, 2);
        let pins = [
            "schedule=interleaved+zb-v,zero=0",
            "schedule=zb-h1,zero=0+1,recompute=none",
            "schedule=interleaved+zb-h1+zb-v+1f1b,zero=0,recompute=full",
            "virtual=2,zero=1",
            "schedule=zb-h1+interleaved,zero=0,offload=none+optimizer",
        ];
        let pins = Pins::parse(pins[seed as usize % pins.len()]).unwrap();
        let problem = problem.under(&prices, pins);
        let truth = enumerate(&problem, &mut prices);
        let outcome = explore(&problem, &mut prices, &|| false);
        let found = outcome.best.as_ref().map(|b| b.solution.objective);
        assert_eq!(found, truth, "seed {seed}: {problem:?}");
        assert!(outcome.statistics.proved, "seed {seed}");
        if seed % 7 == 0 {
            let by_programs = integer::explore(&problem, &mut prices, &|| false).unwrap().best;
            assert_eq!(by_programs.map(|b| b.solution.objective), truth, "seed {seed}: integer programs");
        }
        let Some(best) = outcome.best else { continue };
        let objective = best.solution.objective;
        check(&problem, &mut prices, objective, objective, &outcome.closed).unwrap_or_else(|faults| panic!("seed {seed}: {faults:?}"));
        *best_with.entry(best.menus.tuple.schedule).or_insert(0) += 1;
    }
    // Each schedule must be the best at times, or the instances prove little about it.
    let often = [Schedule::Interleaved, Schedule::ZbH1, Schedule::ZbV].map(|s| best_with.get(&s).copied().unwrap_or(0));
    assert!(often.iter().all(|&n| n >= 8), "{best_with:?}");
}

/// Where every micro-batch has an update of its own: pinned alone, at every number of stages, with tied tables and without, in little memory too.
#[test]
fn with_stale_weights_too() {
    let (mut staged, mut full, mut none) = (0, 0, 0);
    for seed in 0..240 {
        let Instance { mut prices, problem } = instance(seed, 5, 2);
        let pins = ["schedule=pipedream", "schedule=pipedream,pp=2+3+4", "schedule=pipedream,recompute=none", "schedule=pipedream,zero=0+1,pp=2"];
        let problem = problem.under(&prices, Pins::parse(pins[seed as usize % pins.len()]).unwrap());
        let problem = Problem { budget: problem.budget * [100, 60, 35][seed as usize % 3] / 100, ..problem };
        let truth = enumerate(&problem, &mut prices);
        let outcome = explore(&problem, &mut prices, &|| false);
        assert_eq!(outcome.best.as_ref().map(|b| b.solution.objective), truth, "seed {seed}: {problem:?}");
        assert!(outcome.statistics.proved, "seed {seed}");
        if seed % 5 == 0 {
            let by_programs = integer::explore(&problem, &mut prices, &|| false).unwrap().best;
            assert_eq!(by_programs.map(|b| b.solution.objective), truth, "seed {seed}: integer programs");
        }
        none += usize::from(truth.is_none());
        let Some(best) = outcome.best else { continue };
        let objective = best.solution.objective;
        check(&problem, &mut prices, objective, objective, &outcome.closed).unwrap_or_else(|faults| panic!("seed {seed}: {faults:?}"));
        staged += usize::from(best.menus.tuple.pp > 1);
        // One version less would leave room for something quicker.
        let roomy = explore(&Problem { budget: problem.budget * 2, ..problem.clone() }, &mut prices, &|| false).best;
        full += usize::from(roomy.is_some_and(|r| r.solution.objective < objective));
    }
    assert!(staged >= 30 && full >= 10 && none >= 10, "{staged} of several stages, {full} short of memory, {none} that cannot be");
}

#[test]
fn the_shortage_is_the_least_extra_memory_with_which_a_plan_fits() {
    let mut short = 0;
    for seed in 0..300 {
        let Instance { mut prices, problem } = instance(seed, 4, 3);
        let outcome = explore(&problem, &mut prices, &|| false);
        let shortage = infeasible::shortage(&problem, &mut prices);
        assert_eq!(infeasible::fits(&problem, &mut prices), outcome.best.is_some(), "seed {seed}");
        let Some(shortage) = shortage else { continue };
        assert_eq!(shortage.bytes == 0, outcome.best.is_some(), "seed {seed}");
        if shortage.bytes > 0 {
            short += 1;
            let with = |bytes: u64| Problem { budget: problem.budget + bytes, ..problem.clone() };
            assert!(explore(&with(shortage.bytes), &mut prices, &|| false).best.is_some(), "seed {seed}: {shortage:?}");
            assert!(explore(&with(shortage.bytes - 1), &mut prices, &|| false).best.is_none(), "seed {seed}: {shortage:?}");
        }
    }
    assert!(short > 20, "{short} short");
}

#[test]
fn more_memory_is_never_worse_and_the_same_question_has_the_same_answer() {
    for seed in 0..80 {
        let Instance { mut prices, problem } = instance(seed, 6, 3);
        let mut before = u64::MAX;
        for budget in [0, 1, 2, 3, 5, 8, 100].map(|n| n * problem.budget / 4) {
            let problem = Problem { budget, ..problem.clone() };
            let solve = |prices: &mut Drawn| explore(&problem, prices, &|| false).best.map(|b| (b.menus.tuple, b.solution));
            let (once, again) = (solve(&mut prices), solve(&mut instance(seed, 6, 3).prices));
            assert_eq!(once, again, "seed {seed}");
            let objective = once.map_or(u64::MAX, |(_, s)| s.objective);
            assert!(objective <= before, "seed {seed}: {budget} bytes take {objective}, fewer take {before}");
            before = objective;
        }
    }
}

#[test]
fn the_certificate_is_checked_by_other_code_and_damage_is_found() {
    let (mut recomputed, mut damaged) = (0, 0);
    for seed in 0..60 {
        let Instance { mut prices, problem } = instance(seed, 6, 3);
        let outcome = explore(&problem, &mut prices, &|| false);
        let Some(best) = outcome.best else { continue };
        let objective = best.solution.objective;
        let checked = check(&problem, &mut prices, objective, objective, &outcome.closed);
        let checked = checked.unwrap_or_else(|faults| panic!("seed {seed}: {faults:?}"));
        assert_eq!(checked.recomputed + checked.resolved, outcome.statistics.space);
        recomputed += checked.recomputed;
        // A better plan is claimed, a tuple is left out, and each tuple in turn is closed with what is just enough.
        assert!(check(&problem, &mut prices, objective - 1, objective - 1, &outcome.closed).is_err(), "seed {seed}");
        assert!(check(&problem, &mut prices, objective, objective, &outcome.closed[1..]).is_err(), "seed {seed}");
        for at in 0..outcome.closed.len().min(12) {
            let mut closed = outcome.closed.clone();
            let tuple = closed[at].tuple;
            let floor = bound::floor(&problem, &mut prices, &tuple).max(bound::fitting(
                &problem,
                &mut prices,
                &mut Lives::default(),
                &[tuple],
                Reference::Rank,
            ));
            closed[at].how = How::Floor(objective);
            let caught = check(&problem, &mut prices, objective, objective, &closed).is_err();
            assert!(caught || floor >= objective, "seed {seed}: {:?}", outcome.closed[at]);
            damaged += usize::from(caught);
        }
    }
    assert!(recomputed > 200 && damaged > 200, "{recomputed} recomputed, {damaged} damaged");
}

#[test]
fn a_search_that_is_cut_short_knows_how_far_it_may_be_from_the_best() {
    let (mut short, mut found) = (0, 0);
    for seed in 0..60 {
        let Instance { mut prices, problem } = instance(seed, 5, 3);
        let Some(best) = explore(&problem, &mut prices, &|| false).best else { continue };
        let best = best.solution.objective;
        for asked in [0u32, 1, 2, 5, 10, 20, 50] {
            let left = Cell::new(asked);
            let late = || left.replace(left.get().saturating_sub(1)) == 0;
            let outcome = explore(&problem, &mut prices, &late);
            let statistics = outcome.statistics;
            assert!(statistics.lower_bound <= best, "seed {seed}: nothing below {}, but {best} is the best", statistics.lower_bound);
            short += usize::from(!statistics.proved);
            let Some(incumbent) = outcome.best.map(|b| b.solution.objective) else { continue };
            assert!(incumbent >= best && (statistics.proved || statistics.gap > 0.0), "seed {seed}: {statistics:?}");
            assert!(statistics.gap >= (incumbent - best) as f64 / incumbent as f64, "seed {seed}: {statistics:?}, the best is {best}");
            found += usize::from(!statistics.proved);
            let checked = check(&problem, &mut prices, incumbent, statistics.lower_bound, &outcome.closed);
            assert!(checked.is_ok(), "seed {seed}: {checked:?}");
        }
    }
    assert!(short > 50 && found > 20, "{short} cut short, {found} of them with a plan");
}

#[test]
fn no_textbook_plan_is_better() {
    let (mut priced, mut widened) = (0, 0);
    // Memory as it is drawn, and less of it.
    for (seed, percent) in (0..150).flat_map(|seed| [100, 60].map(|percent| (seed, percent))) {
        let Instance { mut prices, problem } = instance(seed, 5, 3);
        let problem = Problem::new(&prices, problem.devices, problem.batch, problem.types, problem.clip, Pins::default(), None);
        let problem = Problem { budget: problem.budget / 100 * percent, ..problem };
        let all = problem.under(&prices, Pins::parse("offload=none+gradients+parameters").unwrap());
        let [best, offloading] = [&problem, &all].map(|p| explore(p, &mut prices, &|| false).best.map(|b| b.solution.objective));
        let node = Node { devices: 8, host_memory: None };
        let rows = baselines(&problem, &mut prices, node, &|| false).rows;
        // What trains on stale weights computes something else.
        for baseline in rows.iter().filter(|row| !row.asynchronous) {
            let Some(step) = baseline.step else { continue };
            let best = if ["ZeRO-Offload", "ZeRO-Infinity"].contains(&baseline.name) { offloading } else { best };
            assert!(best.is_some_and(|b| b <= step.0), "seed {seed}: {best:?} against {baseline:?}");
            priced += 1;
        }
        // The space is widened where the plan would else be slower than one of them, and only there.
        if let Some(best) = best {
            let slower = rows.iter().filter(|row| !row.asynchronous).filter_map(|row| row.step).any(|step| step.0 < best);
            assert_eq!(offloaded_is_quicker(&problem, &mut prices, node, best, &|| false), slower, "seed {seed}: {best}, {rows:?}");
            widened += usize::from(slower);
        }
    }
    assert!(priced > 400 && widened > 0, "{priced} priced, {widened} widened");
}
