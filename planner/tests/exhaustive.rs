//! The search against plain enumeration of everything: every tuple, every cut into stages, every option and ZeRO stage of every layer. The enumeration shares with the
//! search the prices and the arena formula, and nothing else; the objective is written out again from its definition.

mod drawn;

use dplan_ir::mesh::{AxisSet, Degrees, Mesh};
use dplan_ir::plan::{Clip, Schedule, Zero};
use dplan_ir::program::{Pattern, Role};
use dplan_planner::baselines::baselines;
use dplan_planner::certificate::check;
use dplan_planner::infeasible;
use dplan_planner::integer;
use dplan_planner::memory::{self, LayerBytes, StagePosition, StateTypes, arena};
use dplan_planner::pins::Pins;
use dplan_planner::prices::{Links, Offer, Prices, Shape};
use dplan_planner::problem::Problem;
use dplan_planner::search::{How, explore};
use dplan_planner::space::{Tuple, tuples};
use drawn::{Drawn, Instance, instance};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// `max + a fifth of the smaller`, rounded up.
fn overlapped(compute: u64, traffic: u64) -> u64 {
    compute.max(traffic) + compute.min(traffic).div_ceil(5)
}

struct Setting<'a> {
    prices: &'a Drawn,
    types: StateTypes,
    clip: Clip,
    mesh: Mesh,
    pp: u64,
    m: u64,
}

impl Setting<'_> {
    fn element(&self, role: Role) -> u64 {
        self.types.dtype(role).size()
    }

    /// (per micro-batch, end of step) of a layer. `shared`: its tied bucket was counted by an earlier layer of the stage; `split`: another stage has it too.
    fn layer(&self, offer: &Offer, zero: u8, shared: bool, split: bool) -> (u64, u64) {
        let (f, b) = (offer.option.forward.0, offer.option.backward.0);
        let (mut gather, mut scatter, mut add) = (0, 0, 0);
        let (mut reduce_end, mut rest_end, mut update, mut gather_end, mut late) = (0, 0, 0, 0, 0);
        for bucket in &offer.option.bytes.buckets {
            // Experts are shared out over some of the ranks that see different data; the others hold copies.
            let copies: AxisSet = self.mesh.ids().filter(|&a| !self.mesh.axis(a).name.starts_with("tp") && !bucket.spread.contains(a)).collect();
            let ways = self.mesh.size(copies);
            let whole = memory::bucket_elems(bucket.elems, ways);
            let grad = whole * self.element(Role::Grad);
            let piece = if zero == 0 { whole } else { whole / ways };
            let collective = |axes, pattern, bytes| self.prices.collective(&self.mesh, axes, pattern, bytes).0;
            let gathered = collective(copies, Pattern::AllGather, whole * self.element(Role::Param));
            let scattered = collective(copies, Pattern::ReduceScatter, grad);
            gather += gathered;
            scatter += scattered;
            if zero >= 2 {
                add += self.prices.sweep(3 * piece * self.element(Role::Grad)).0;
            }
            if bucket.tied && shared {
                continue;
            }
            let apart = bucket.tied && split;
            let across = |axes, bytes| self.prices.across_stages(&self.mesh, axes, 2, bytes).0;
            if zero == 0 && apart {
                late += across(copies.union(bucket.partial), grad);
            } else if zero == 0 {
                reduce_end += collective(copies.union(bucket.partial), Pattern::AllReduce, grad);
            } else {
                reduce_end += scattered;
                rest_end += collective(bucket.partial, Pattern::AllReduce, piece * self.element(Role::Grad));
                if apart {
                    late += across(Default::default(), piece * self.element(Role::Grad));
                }
            }
            gather_end += gathered;
            let mut bytes = if zero >= 2 { piece } else { whole } * self.element(Role::Grad);
            bytes += piece * self.element(Role::Grad) * if self.clip == Clip::GlobalNorm { 2 } else { 1 };
            bytes += 2 * piece * self.element(self.types.master()) + 2 * piece * self.element(Role::Moment1) * self.types.optimizer.moments() as u64;
            if self.types.master() != Role::Param {
                bytes += piece * self.element(Role::Param);
            }
            update += self.prices.sweep(bytes).0;
        }
        let (time, end) = match zero {
            0 => (f + b, overlapped(b, reduce_end + rest_end) - b + update),
            1 => (f + b, overlapped(b, reduce_end + rest_end) - b + overlapped(update, gather_end)),
            2 => (f + overlapped(b, scatter) + add, rest_end + overlapped(update, gather_end)),
            _ => (overlapped(f, gather) + overlapped(b, gather + scatter) + add, rest_end + update),
        };
        (time, end + late)
    }
}

/// The least objective over the whole space, or nothing if no plan fits.
fn enumerate(problem: &Problem, prices: &mut Drawn) -> Option<u64> {
    let n = problem.devices;
    let layers = prices.classes.len();
    let mut best: Option<u64> = None;
    for tp in (1..=n).filter(|t| n.is_multiple_of(*t) && problem.pins.tp.allows(t)) {
        for pp in (1..=n / tp).filter(|p| (n / tp).is_multiple_of(*p) && *p as usize <= layers && problem.pins.pp.allows(p)) {
            let rest = n / tp / pp;
            let cps: Vec<u64> = (1..=rest).filter(|cp| rest.is_multiple_of(*cp) && prices.contexts(rest, 1).contains(cp)).collect();
            let degrees = cps.into_iter().flat_map(|cp| {
                let dp = rest / cp;
                (1..=dp)
                    .filter(|ep| dp.is_multiple_of(*ep) && prices.experts(dp).contains(ep))
                    .map(|ep| Degrees { dp, ep, cp, tp })
                    .collect::<Vec<_>>()
            });
            let cases = degrees.flat_map(|d| (1..=problem.batch).map(move |micro| (d, micro)));
            for (degrees, micro) in cases.filter(|(d, micro)| problem.batch.is_multiple_of(d.dp * micro)).collect::<Vec<_>>() {
                let m = problem.batch / degrees.dp / micro;
                let mut boundaries = vec![None];
                boundaries.extend(prices.boundary_dims(tp).into_iter().map(Some));
                for boundary in boundaries {
                    for padding in 0..prices.paddings(tp) {
                        for schedule in Schedule::ALL.into_iter().filter(|s| problem.pins.schedule.allows(s)) {
                            let shape = Shape { tp, cp: degrees.cp, ep: degrees.ep, micro_batch: micro, boundary, padding };
                            let value = best_of_tuple(problem, prices, shape, pp, degrees, m, schedule);
                            best = [best, value].into_iter().flatten().min();
                        }
                    }
                }
            }
        }
    }
    best
}

fn best_of_tuple(problem: &Problem, prices: &mut Drawn, shape: Shape, pp: u64, degrees: Degrees, m: u64, schedule: Schedule) -> Option<u64> {
    let classes = prices.classes.clone();
    let count = classes.len();
    let offers: Vec<Rc<[Offer]>> = classes.iter().map(|&c| prices.offers(c, shape)).collect();
    let crossing: Vec<u64> = (0..count.saturating_sub(1)).map(|l| prices.boundary_bytes(l as u32, shape)).collect();
    let boundary = crossing.iter().copied().max().unwrap_or(0);
    let zeros = if degrees.dp * degrees.cp == 1 { 0..=0 } else { 0..=3 };
    let ways: Vec<Vec<(usize, u8)>> = (0..count)
        .map(|l| {
            let all = (0..offers[l].len()).flat_map(|o| zeros.clone().map(move |z| (o, z)));
            all.filter(|&(o, z)| {
                problem.pins.zero.allows(l as u32, &Zero(z)) && problem.pins.recompute.allows(l as u32, &offers[l][o].option.recompute)
            })
            .collect()
        })
        .collect();
    if ways.iter().any(Vec::is_empty) {
        return None;
    }
    let setting = Setting { prices, types: problem.types, clip: problem.clip, mesh: Mesh::of(degrees), pp, m };
    let tied: Vec<usize> = (0..count).filter(|&l| offers[l].iter().any(|o| o.tie.is_some())).collect();
    let mut best = None;
    for cuts in cuttings(count, pp as usize) {
        let mut pick = vec![0; count];
        loop {
            let chosen: Vec<(&Offer, u8)> = (0..count).map(|l| (&offers[l][ways[l][pick[l]].0], ways[l][pick[l]].1)).collect();
            if tied.iter().all(|&l| chosen[l].0.tie == chosen[tied[0]].0.tie && chosen[l].1 == chosen[tied[0]].1)
                && let Some(value) = value(problem, &setting, &chosen, &cuts, &tied, &crossing, boundary, schedule)
            {
                best = [best, Some(value)].into_iter().flatten().min();
            }
            // Next combination, as an odometer.
            let Some(at) = (0..count).find(|&l| pick[l] + 1 < ways[l].len()) else { break };
            pick[at] += 1;
            pick[..at].fill(0);
        }
    }
    best
}

/// All ways of cutting `count` layers into `stages`, as first layers and the end.
fn cuttings(count: usize, stages: usize) -> Vec<Vec<usize>> {
    if stages == 1 {
        return vec![vec![0, count]];
    }
    let mut all = Vec::new();
    for last in stages - 1..count {
        for mut cuts in cuttings(last, stages - 1) {
            cuts.push(count);
            all.push(cuts);
        }
    }
    all
}

#[allow(clippy::too_many_arguments)]
fn value(
    problem: &Problem,
    setting: &Setting,
    chosen: &[(&Offer, u8)],
    cuts: &[usize],
    tied: &[usize],
    crossing: &[u64],
    boundary: u64,
    schedule: Schedule,
) -> Option<u64> {
    let (mut sum, mut slowest, mut longest) = (0, 0, 0);
    for stage in 0..setting.pp {
        let (start, end) = (cuts[stage as usize], cuts[stage as usize + 1]);
        let in_flight = if schedule == Schedule::GPipe { setting.m } else { setting.m.min(setting.pp - stage) };
        let bytes: Vec<(&LayerBytes, Zero)> = chosen[start..end].iter().map(|(o, z)| (&o.option.bytes, Zero(*z))).collect();
        let at = StagePosition { stage, stages: setting.pp, in_flight, boundary };
        if arena(&bytes, &setting.mesh, problem.types, at).total() > problem.budget {
            return None;
        }
        let (mut time, mut ends) = (0, 0);
        for l in start..end {
            let shared = tied.contains(&l) && tied.iter().any(|&t| (start..l).contains(&t));
            let split = tied.iter().any(|t| !(start..end).contains(t));
            let (t, e) = setting.layer(chosen[l].0, chosen[l].1, shared, split);
            (time, ends) = (time + t, ends + e);
        }
        if stage + 1 < setting.pp {
            time += 2 * setting.prices.message(&setting.mesh, stage, crossing[end - 1]).0;
        }
        (sum, slowest, longest) = (sum + time, slowest.max(time), longest.max(ends));
    }
    let scalar = setting.prices.across_stages(&setting.mesh, setting.mesh.all(), setting.pp, 8).0;
    let scalars = if setting.clip == Clip::GlobalNorm { 2 } else { 1 };
    Some(sum + (setting.m - 1) * slowest + longest + scalars * scalar)
}

const DIMENSIONS: [&str; 11] = ["dp", "tp", "cp", "ep", "pp", "micro", "schedule", "boundary", "zero", "recompute", "tie"];

/// The dimensions in which an instance leaves a choice.
fn open_dimensions(problem: &Problem, prices: &mut Drawn) -> Vec<&'static str> {
    let space = tuples(prices, problem.devices, problem.batch, &problem.pins);
    let differs = |of: &dyn Fn(&Tuple) -> u64| space.iter().any(|t| of(t) != of(&space[0]));
    let mut open = Vec::new();
    let global: [(&str, &dyn Fn(&Tuple) -> u64); 8] = [
        ("dp", &|t| t.dp),
        ("tp", &|t| t.tp),
        ("cp", &|t| t.cp),
        ("ep", &|t| t.ep),
        ("pp", &|t| t.pp),
        ("micro", &|t| t.micro_batch),
        ("schedule", &|t| t.schedule as u64),
        ("boundary", &|t| u64::from(t.boundary.is_some())),
    ];
    open.extend(global.iter().filter(|(_, of)| differs(*of)).map(|(name, _)| *name));
    let shared = space.iter().any(|t| t.dp * t.cp > 1);
    if shared && problem.kinds.iter().any(|k| k.zero.len() > 1) {
        open.push("zero");
    }
    if problem.kinds.iter().any(|k| k.recompute.len() > 1) {
        open.push("recompute");
    }
    if !prices.tied.is_empty() {
        open.push("tie");
    }
    open
}

#[test]
fn the_search_finds_what_enumeration_finds() {
    let (mut infeasible, mut tied, mut staged, mut tight, mut context, mut experts) = (0, 0, 0, 0, 0, 0);
    let mut pairs: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for seed in 0..500 {
        let Instance { mut prices, problem } = instance(seed, if seed % 3 == 0 { 4 } else { 3 }, if seed % 4 == 0 { 3 } else { 2 });
        let truth = enumerate(&problem, &mut prices);
        let outcome = explore(&problem, &mut prices, &|| false);
        let found = outcome.best.as_ref().map(|b| b.solution.objective);
        assert_eq!(found, truth, "seed {seed}: {problem:?}");
        if seed % 4 == 0 {
            let integer = integer::explore(&problem, &mut prices, &|| false).unwrap();
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
        tight += usize::from(best.solution.choices.iter().zip(&problem.layers).any(|(&c, &k)| best.menus.choices[k][c as usize].zero.0 > 0));
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
        infeasible >= 10 && tied >= 20 && staged >= 20 && tight >= 20 && context >= 20 && experts >= 20,
        "{infeasible} infeasible, {tied} tied, {staged} staged, {tight} with ZeRO, {context} with contexts, {experts} with experts shared out"
    );
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
            let honest = matches!(closed[at].how, How::Floor(_));
            closed[at].how = How::Floor(objective);
            let caught = check(&problem, &mut prices, objective, objective, &closed).is_err();
            assert!(caught || honest, "seed {seed}: {:?}", outcome.closed[at]);
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
    let mut priced = 0;
    for seed in 0..150 {
        let Instance { mut prices, problem } = instance(seed, 5, 3);
        let problem = Problem::new(&prices, problem.devices, problem.batch, problem.types, problem.clip, Pins::default(), None);
        let best = explore(&problem, &mut prices, &|| false).best.map(|b| b.solution.objective);
        for baseline in baselines(&problem, &mut prices, 8, &|| false) {
            let Some(step) = baseline.step else { continue };
            assert!(best.is_some_and(|b| b <= step.0), "seed {seed}: {best:?} against {baseline:?}");
            priced += 1;
        }
    }
    assert!(priced > 200, "{priced}");
}
