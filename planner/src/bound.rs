//! Admissible bounds: what no plan of a tuple can beat.
//!
//! Layers are spread perfectly over stages, and every layer runs at its least. Two bounds leave memory out; of these the greater counts:
//!
//! ```text
//! T − c ≥ Σ_layers min_choice (time + w · ((n − 1) · time + end)) + messages of the same     the greatest share of a stage is a mean at least ([`crate::placement`])
//! T − c ≥ Σ min time + messages + (n − 1) · max(mean, ⌈n_kind / p⌉ · min time_kind) + max(mean end, ⌈n_kind / p⌉ · min end_kind)
//! ```
//! with `time`, `end` and `n` as the objective adds them up, whatever the schedule ([`crate::objective`]). Before layers are priced, their least time `t` alone counts:
//! a ramp is at least its part of that ([`spread`]). A third bound, before pricing too, knows memory: layers have to fit, and the slowest stage is then no quicker than
//! [`crate::capacity`] says ([`fitting`]).

use crate::capacity::{self, Layers};
use crate::memory::{BucketSize, LayerBytes, StateTypes};
use crate::menu::{Choice, Menus};
use crate::objective::{Home, LayerSync, StageTime, Terms, least_sync, repeats};
use crate::placement::{Groups, Site, Weighting, weightings};
use crate::prices::{Floor, Links, Prices, Reference};
use crate::problem::Problem;
use crate::search::NEVER;
use crate::space::Tuple;
use dplan_ir::mesh::{Degrees, Mesh};
use dplan_ir::plan::{Schedule, Store};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Whether the inputs of layers alone, which are kept for every micro-batch in flight, are more than all stages can hold. The first layer has no input, and those that may
/// be offloaded are not counted.
pub fn is_crowded(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple) -> bool {
    let stays = |kind: &usize| problem.kinds[*kind].away.iter().all(|away| away.activations.is_none());
    let layers = problem.layers[1..].iter().filter(|kind| stays(kind)).count() as u64;
    let least = prices.boundary_bytes(tuple.shape(Site::ONLY)).iter().copied().min().unwrap_or(0);
    let seat = |stage| prices.groups().seat(tuple.placement, tuple.degrees().ranks(), stage);
    let held = |stage| problem.budget_at(seat(stage).site).checked_div(tuple.in_flight(stage) * least).unwrap_or(u64::MAX);
    (0..tuple.pp).map(held).fold(0, u64::saturating_add) < layers
}

/// What no plan with these menus can beat.
pub fn priced(menus: &Menus, layers: &[usize]) -> u64 {
    let pipeline = menus.tuple.pipeline();
    let (p, n, kinds) = (u128::from(pipeline.stages), repeats(&pipeline), menus.tied.len());
    // Of the objective what is summed over stages, and what counts for the greatest.
    let parts = |of: StageTime| (of.time, (n - 1).saturating_mul(of.time).saturating_add(of.end));
    let shares = |c: &Choice| Home::ALL.map(|h| c.share(h));
    let least = |row: usize, of: &dyn Fn(StageTime) -> u128| menus.choices[row].iter().flat_map(shares).map(of).min().unwrap_or(0);
    let by_row = |of: &dyn Fn(StageTime) -> u128| (0..menus.choices.len()).map(|row| least(row, of)).collect::<Vec<u128>>();
    // Of each kind the least of its rows.
    let anywhere = |rows: &[u128]| (0..kinds).map(|kind| menus.rows(kind).map(|row| rows[row]).min().unwrap_or(0)).collect::<Vec<u128>>();
    let sum = |of: &[u128]| layers.iter().map(|&kind| of[kind]).sum::<u128>();
    let messages = || (0..pipeline.all_virtual()).map(|c| (menus.site_of(pipeline.stage_of(c)), menus.least_border(c)));

    let (time, end) = (by_row(&|s| u128::from(s.time)), by_row(&|s| u128::from(s.end)));
    let pass = |(time, end): (&[u128], &[u128])| parts(StageTime { time: narrow(sum(time)), end: narrow(sum(end)) });
    let passes: Vec<(u64, u64)> = time.chunks(kinds).zip(end.chunks(kinds)).map(pass).collect();
    let stages: Vec<u64> = menus.sites.iter().map(|(_, count)| *count).collect();
    let together = |w: &Weighting| {
        let cost = |site: usize, of: StageTime| w.cost(site, parts(of).0, parts(of).1);
        let rows: Vec<u128> = (0..menus.choices.len()).map(|row| least(row, &|s| cost(row / kinds, s))).collect();
        (sum(&anywhere(&rows)) + messages().map(|(site, of)| cost(site, of)).sum::<u128>()).div_ceil(u128::from(w.sum))
    };
    let together = weightings(&stages, &passes).iter().map(together).max().unwrap_or(0);

    let (time, end, messages) = (anywhere(&time), anywhere(&end), messages().map(|(_, of)| of).sum::<StageTime>());
    let count = |kind: usize| layers.iter().filter(|&&k| k == kind).count() as u128;
    // The stage that has most is at least the mean, and some stage has its share of the layers of a kind, rounded up.
    let most = |of: &[u128], total: u128| (0..of.len()).map(|kind| count(kind).div_ceil(p) * of[kind]).max().unwrap_or(0).max(total.div_ceil(p));
    let total = sum(&time) + u128::from(messages.time);
    let apart = total + u128::from(n - 1) * most(&time, total) + most(&end, sum(&end) + u128::from(messages.end));
    narrow(together.max(apart) + u128::from(menus.constant))
}

/// What no plan of a tuple can beat, before its layers are priced ([`Prices::floor`]), memory aside.
pub fn floor(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple) -> u64 {
    let sites = sites(prices, tuple);
    let least: Vec<Vec<u64>> = sites.iter().map(|&(site, _)| times(&problem.floors(prices, tuple, site, Reference::Rank))).collect();
    spread(problem, tuple, &sites, &least, 0)
}

/// The same where layers have to fit, as known from a reference: of tuples of one family, alike in what the reference knows of them, of which each layer is summed as is
/// least for each quantity.
pub fn fitting(problem: &Problem, prices: &mut dyn Prices, lives: &mut Lives, members: &[Tuple], from: Reference) -> u64 {
    let sites = sites(prices, &members[0]);
    let floors: Vec<Vec<Floor>> = sites.iter().map(|&(site, _)| problem.floors(prices, &members[0], site, from)).collect();
    held(problem, prices, lives, members, &sites, &floors)
}

/// One tuple for each way of summing gradients.
pub fn by_sync(members: &[Tuple]) -> impl Iterator<Item = &Tuple> {
    members.iter().enumerate().filter(|(at, tuple)| members[..*at].iter().all(|t| t.sync != tuple.sync)).map(|(_, tuple)| tuple)
}

/// Where the layers of a kind may live, with what that adds: alike for all micro-batches, boundaries and pipelines of some degrees, and for as many ways of summing gradients
/// from those of the degrees on.
#[derive(Default)]
pub struct Lives(BTreeMap<(usize, Site, Degrees, usize), Vec<Known>>);

/// Of a floor with these buckets.
struct Known {
    buckets: Vec<BucketSize>,
    lives: Rc<[(LayerSync, Option<Store>)]>,
}

impl Lives {
    fn of(
        &mut self,
        key: (usize, Site, Degrees, usize),
        floor: &Floor,
        make: impl FnOnce(&LayerBytes) -> Rc<[(LayerSync, Option<Store>)]>,
    ) -> Rc<[(LayerSync, Option<Store>)]> {
        let known = self.0.entry(key).or_default();
        if let Some(same) = known.iter().find(|known| known.buckets == floor.buckets) {
            return Rc::clone(&same.lives);
        }
        let lives = make(&floor.bytes());
        known.push(Known { buckets: floor.buckets.clone(), lives: Rc::clone(&lives) });
        lives
    }
}

fn sites(prices: &dyn Prices, tuple: &Tuple) -> Vec<(Site, u64)> {
    prices.groups().sites(tuple.placement, tuple.degrees().ranks(), tuple.pp)
}

fn times(floors: &[Floor]) -> Vec<u64> {
    floors.iter().map(Floor::time).collect()
}

/// The objective of layers that take the least of their kinds, the slowest stage no quicker than those of each kind allow that have to fit.
fn held(problem: &Problem, prices: &dyn Prices, known_lives: &mut Lives, members: &[Tuple], sites: &[(Site, u64)], floors: &[Vec<Floor>]) -> u64 {
    let tuple = &members[0];
    let (mesh, groups): (_, &Groups) = (tuple.mesh(), prices.groups());
    let ways: Vec<(Mesh, StateTypes)> = by_sync(members).map(|t| (t.mesh(), t.types(problem.types))).collect();
    let links: &dyn Links = prices;
    let site_of = |stage: u64| {
        let seat = groups.seat(tuple.placement, mesh.ranks(), stage);
        sites.iter().position(|(site, _)| *site == seat.site).unwrap_or(0)
    };
    let mut slowest = 0;
    // Halves of a backward pass and virtual stages keep other frames. A kind without ways is for its pricing to find.
    let known = |at: usize| floors.iter().all(|floors| !floors[at].trades.is_empty());
    for (at, kind) in problem.kinds.iter().enumerate().filter(|&(at, _)| tuple.schedule.is_plain() && known(at)) {
        let terms = |site| Terms { links, site, mesh: &mesh, types: tuple.types(problem.types), clip: problem.clip, pipeline: tuple.pipeline() };
        let lives = sites.iter().zip(floors).map(|(&(site, _), floors)| {
            // With whole backward passes, what residences there are depends on the degrees.
            known_lives.of((at, site, tuple.degrees(), ways.len()), &floors[at], |bytes| {
                let ways: Vec<Terms<'_>> = ways.iter().map(|(mesh, types)| Terms { mesh, types: *types, ..terms(site) }).collect();
                kind.residences(tuple).map(|of| (least_sync(&ways, bytes, of.states, Home::Together), of.activations)).collect()
            })
        });
        let lives: Vec<Rc<[(LayerSync, Option<Store>)]>> = lives.collect();
        let storing = |site: Site| move |sync: LayerSync, frame, store| terms(site).storing(sync, frame, Some(store));
        let storing: Vec<_> = sites.iter().map(|&(site, _)| storing(site)).collect();
        let layers = sites.iter().zip(floors).zip(lives.iter().zip(&storing)).map(|((&(site, _), floors), (lives, storing))| {
            let Floor { trades, part, .. } = &floors[at];
            Layers { trades, part: *part, lives, storing, room: problem.budget_at(site) }
        });
        let count = problem.layers.iter().filter(|&&k| k == at).count();
        match capacity::slowest(&layers.collect::<Vec<_>>(), (0..tuple.pp).map(|s| (site_of(s), tuple.in_flight(s))), count) {
            Some(time) => slowest = slowest.max(time),
            None => return NEVER,
        }
    }
    let least: Vec<Vec<u64>> = floors.iter().map(|floors| times(floors)).collect();
    spread(problem, tuple, sites, &least, slowest)
}

/// The objective of layers that take the least time of their kinds (by site), spread over stages as well as can be, of which the slowest takes so much at least. With times
/// `t` of stages, the objective is `Σ t + (m − 1) · max t` where the ramp is all of it, `(Σ t + (v · m − 1) · max t) / v` where it is one of `v` parts, `m · max t` where
/// weight gradients may fill it.
fn spread(problem: &Problem, tuple: &Tuple, sites: &[(Site, u64)], least: &[Vec<u64>], slowest: u64) -> u64 {
    let (m, v) = (tuple.micro_batches, tuple.virtual_stages);
    let (summed, most, parts) = match tuple.schedule {
        Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => (1, m - 1, 1),
        Schedule::Interleaved => (1, v * m - 1, v),
        Schedule::ZbH1 | Schedule::ZbV => (0, m, 1),
    };
    let pass = |least: &Vec<u64>| {
        let time = problem.layers.iter().map(|&kind| least[kind]).fold(0, u64::saturating_add);
        (summed * time, most.saturating_mul(time))
    };
    let (stages, passes): (Vec<u64>, Vec<(u64, u64)>) = sites.iter().zip(least).map(|((_, count), least)| (*count, pass(least))).unzip();
    let bound = |w: &Weighting| {
        let cost = |site: usize, time: u64| w.cost(site, summed * time, most.saturating_mul(time));
        let of: Vec<u128> =
            (0..problem.kinds.len()).map(|kind| least.iter().enumerate().map(|(site, least)| cost(site, least[kind])).min().unwrap_or(0)).collect();
        problem.layers.iter().map(|&kind| of[kind]).sum::<u128>().div_ceil(u128::from(w.sum) * u128::from(parts))
    };
    let even = weightings(&stages, &passes).iter().map(bound).max().unwrap_or(0);
    let quickest = |kind: usize| least.iter().map(|least| u128::from(least[kind])).min().unwrap_or(0);
    let total = || problem.layers.iter().map(|&kind| quickest(kind)).sum::<u128>();
    let uneven = if slowest > 0 { total() + u128::from(m - 1) * u128::from(slowest) } else { 0 };
    narrow(even.max(uneven))
}

fn narrow(bound: u128) -> u64 {
    u64::try_from(bound).unwrap_or(u64::MAX)
}
