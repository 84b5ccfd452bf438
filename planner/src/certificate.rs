//! The proof, checked by other code: that the tuples that were closed are all there are, and that none that was closed by a bound could hold a better plan.
//!
//! The checker lists the space by trying all numbers instead of divisors, bounds tuples again from prices alone, without menus or stages, and solves those that were
//! solved exactly again by integer programs ([`crate::integer`]).

use crate::integer::{self, SolverFault};
use crate::menu::Menus;
use crate::objective::{Home, StageTime, Terms, border, share};
use crate::pins::{Asked, Pins};
use crate::placement::{Groups, Site, Weighting, weightings};
use crate::prices::{Floor, Links, Prices, Reference, scaled};
use crate::problem::{Kind, Problem};
use crate::search::{Closed, How, trend_batches};
use crate::space::{MOST_TP, Tuple, least_block, searched};
use dplan_ir::mesh::{Degrees, Keys, Mesh};
use dplan_ir::nest::{Nest, Way};
use dplan_ir::plan::{Away, Placement, Schedule, States, Zero};
use dplan_ir::sharding::Sharding;
use dplan_ir::sync::Sync;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// What the checker did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Checked {
    /// Tuples whose bound, impossibility or twin was found again.
    pub recomputed: usize,
    /// Tuples that integer programs solved again.
    pub resolved: usize,
}

/// What is wrong with a certificate.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    #[error("{0:?} is in the space and was not closed")]
    Missing(Tuple),
    #[error("{0:?} was closed and is not in the space, or twice")]
    Foreign(Tuple),
    #[error("{tuple:?} was closed with bound {claimed}, which does not reach {objective}")]
    Low { tuple: Tuple, claimed: u64, objective: u64 },
    #[error("{tuple:?} was closed with bound {claimed}, but only {found} can be shown, and {objective} is needed")]
    Unfounded { tuple: Tuple, claimed: u64, found: u64, objective: u64 },
    #[error("{tuple:?} holds a plan of {value}, better than {objective}")]
    Better { tuple: Tuple, value: u64, objective: u64 },
    #[error("{0:?} was called impossible, but all its layers can run")]
    Possible(Tuple),
    #[error("{0:?} was closed with a tuple that is not its twin")]
    NoTwin(Tuple),
    #[error("no tuple holds a plan of {0}")]
    NoWitness(u64),
    #[error("{tuple:?} could not be solved again: {why}")]
    Unsolved { tuple: Tuple, why: SolverFault },
}

/// Checks that no plan of the space is better than `objective`, those of open tuples aside, of which none is below `lower_bound`.
///
/// # Errors
/// Everything that is wrong.
pub fn check(problem: &Problem, prices: &mut dyn Prices, objective: u64, lower_bound: u64, closed: &[Closed]) -> Result<Checked, Vec<Fault>> {
    let mut faults = Vec::new();
    let mut missing = space(problem, prices);
    let roomy: Vec<Tuple> = missing.iter().filter(|t| !is_crowded(problem, prices, t)).copied().collect();
    let trend_batches = trend_batches(&roomy);
    let mut checked = Checked::default();
    let mut witness = false;
    for &Closed { tuple, how } in closed {
        if !missing.remove(&tuple) {
            faults.push(Fault::Foreign(tuple));
            continue;
        }
        match how {
            How::Best(value) if value < objective => faults.push(Fault::Better { tuple, value, objective }),
            // Nothing below a worse incumbent says nothing about this objective, unless that incumbent was this tuple's own.
            How::Nothing(incumbent) if incumbent < objective => faults.push(Fault::Better { tuple, value: incumbent, objective }),
            How::Best(_) | How::Nothing(_) => {
                witness |= how == How::Best(objective);
                match solve_again(problem, prices, tuple, objective) {
                    Ok(None) => checked.resolved += 1,
                    Ok(Some(value)) => faults.push(Fault::Better { tuple, value, objective }),
                    Err(why) => faults.push(Fault::Unsolved { tuple, why }),
                }
            }
            How::Open(claimed) if claimed < lower_bound => faults.push(Fault::Low { tuple, claimed, objective: lower_bound }),
            How::Open(claimed) => {
                let floor = quickest(problem, prices, &tuple, Reference::Rank);
                let found = if floor < lower_bound { weights(problem, prices, &tuple).unwrap_or(u64::MAX) } else { floor };
                if found >= lower_bound {
                    checked.recomputed += 1;
                } else {
                    match solve_again(problem, prices, tuple, lower_bound) {
                        Ok(None) => checked.resolved += 1,
                        Ok(Some(found)) => faults.push(Fault::Unfounded { tuple, claimed, found, objective: lower_bound }),
                        Err(why) => faults.push(Fault::Unsolved { tuple, why }),
                    }
                }
            }
            How::Impossible if weights(problem, prices, &tuple).is_none() => checked.recomputed += 1,
            How::Crowded if is_crowded(problem, prices, &tuple) => checked.recomputed += 1,
            How::Impossible | How::Crowded => faults.push(Fault::Possible(tuple)),
            How::Twin(at) => {
                let wanted = Tuple { schedule: Schedule::OneFOneB, ..tuple };
                if tuple.schedule == Schedule::GPipe && closed.get(at).is_some_and(|c| c.tuple == wanted) {
                    checked.recomputed += 1;
                } else {
                    faults.push(Fault::NoTwin(tuple));
                }
            }
            How::Floor(claimed) | How::Trend(claimed) | How::Bound(claimed) if claimed < objective => {
                faults.push(Fault::Low { tuple, claimed, objective })
            }
            How::Floor(claimed) => {
                let found = reached(problem, prices, &tuple, Reference::Rank, objective);
                record(&mut checked, &mut faults, tuple, claimed, found, objective);
            }
            How::Trend(claimed) => {
                // Without tuples of its tensor parallelism that are not crowded, a trend is of nothing.
                let Some(&sequences) = trend_batches.get(&tuple.tp) else {
                    faults.push(Fault::Unfounded { tuple, claimed, found: 0, objective });
                    continue;
                };
                let references = [Reference::Whole { sequences }, Reference::Same { sequences }, Reference::own(&tuple)];
                let found = references.into_iter().map(|from| reached(problem, prices, &tuple, from, objective)).find(|&found| found >= objective);
                record(&mut checked, &mut faults, tuple, claimed, found.unwrap_or(0), objective);
            }
            How::Bound(claimed) => {
                let found = weights(problem, prices, &tuple).unwrap_or(u64::MAX);
                record(&mut checked, &mut faults, tuple, claimed, found, objective);
            }
        }
    }
    faults.extend(missing.into_iter().map(Fault::Missing));
    // Where the search gave up, the plan itself is the witness.
    if !witness && lower_bound == objective {
        faults.push(Fault::NoWitness(objective));
    }
    if faults.is_empty() { Ok(checked) } else { Err(faults) }
}

fn record(checked: &mut Checked, faults: &mut Vec<Fault>, tuple: Tuple, claimed: u64, found: u64, objective: u64) {
    if found >= objective {
        checked.recomputed += 1;
    } else {
        faults.push(Fault::Unfounded { tuple, claimed, found, objective });
    }
}

/// Whether some stage would have to keep more layer inputs than it has room for, however the layers are shared out. Layers whose inputs may wait elsewhere do not count.
pub(crate) fn is_crowded(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple) -> bool {
    let inputs = prices.boundary_bytes(tuple.shape(Site::ONLY));
    let smallest = inputs.iter().copied().min().unwrap_or(0);
    let stays = |kind: usize| problem.kinds[kind].away.iter().all(|away| away.activations.is_none());
    let mut left = problem.layers.iter().skip(1).filter(|&&kind| stays(kind)).count() as u64;
    for stage in 0..tuple.pp {
        left =
            left.saturating_sub(problem.budget_at(site_of(prices, tuple, stage)).checked_div(tuple.in_flight(stage) * smallest).unwrap_or(u64::MAX));
    }
    left > 0
}

/// Every tuple of the space, by trying all numbers.
fn space(problem: &Problem, prices: &mut dyn Prices) -> BTreeSet<Tuple> {
    let (n, pins) = (problem.devices, &problem.pins);
    let most_tp = if pins.tp.is_pinned() { n } else { n.min(MOST_TP) };
    let mut all = BTreeSet::new();
    for tp in (1..=most_tp).filter(|&tp| n % tp == 0 && pins.tp.allows(&tp)) {
        let mut boundaries = vec![None];
        if tp > 1 {
            boundaries.extend(prices.boundary_dims(tp).into_iter().map(Some));
        }
        boundaries.retain(|b| pins.boundary.values().is_none_or(|v| v.iter().any(|&on| *b == on.then_some(1))));
        for pp in (1..=problem.layers.len() as u64).filter(|&pp| n % (tp * pp) == 0 && pins.pp.allows(&pp)) {
            let rest = n / (tp * pp);
            let placements = placements(prices.groups(), rest * tp, pp);
            let contexts: Vec<u64> =
                prices.contexts(rest, least_block(pins)).into_iter().filter(|cp| rest.is_multiple_of(*cp) && pins.cp.allows(cp)).collect();
            for (cp, dp) in contexts.into_iter().map(|cp| (cp, rest / cp)).filter(|(_, dp)| pins.dp.allows(dp)) {
                // A ring is of 2 to 64 ranks; one rank gathers nothing, whatever is asked for.
                let asked = pins.keys.values().unwrap_or(&Keys::ALL);
                let ways: Vec<Keys> = match cp {
                    1 => vec![Keys::Gathered],
                    _ => Keys::ALL.into_iter().filter(|k| asked.contains(k) && (*k == Keys::Gathered || cp <= 64)).collect(),
                };
                let experts: Vec<u64> = prices.experts(dp).into_iter().filter(|ep| dp.is_multiple_of(*ep) && pins.ep.allows(ep)).collect();
                for micro_batch in (1..=problem.batch / dp).filter(|&b| problem.batch.is_multiple_of(dp * b) && pins.micro_batch.allows(&b)) {
                    let micro_batches = problem.batch / dp / micro_batch;
                    for (schedule, virtual_stages) in orders(problem, pp, micro_batches) {
                        for &boundary in &boundaries {
                            for (padding, &placement) in (0..prices.paddings(tp)).flat_map(|padding| placements.iter().map(move |p| (padding, p))) {
                                let tuple = |(ep, keys, sync, nest): (u64, Keys, Sync, Nest)| Tuple {
                                    pp,
                                    tp,
                                    cp,
                                    ep,
                                    dp,
                                    micro_batch,
                                    micro_batches,
                                    schedule,
                                    virtual_stages,
                                    boundary,
                                    padding,
                                    placement,
                                    keys,
                                    sync,
                                    nest,
                                };
                                let each = experts.iter().flat_map(|&ep| ways.iter().map(move |&keys| (ep, keys)));
                                let each =
                                    each.flat_map(|(ep, keys)| laid(prices, pins, [dp, ep, cp, tp]).into_iter().map(move |(s, n)| (ep, keys, s, n)));
                                all.extend(each.map(tuple));
                            }
                        }
                    }
                }
            }
        }
    }
    all
}

/// How gradients get to their sum and how degrees are nested, by trying every number of parts and every order.
fn laid(prices: &dyn Prices, pins: &Pins, [dp, ep, cp, tp]: [u64; 4]) -> BTreeSet<(Sync, Nest)> {
    let mut seen: Vec<Vec<Way>> = Vec::new();
    let mut all = BTreeSet::new();
    for nest in Nest::all().into_iter().filter(|nest| pins.nest.values().map_or(*nest == Nest::default(), |pinned| pinned.contains(nest))) {
        // What has one rank is nowhere.
        let several = [(Way::Data, dp / ep), (Way::Expert, ep), (Way::Context, cp), (Way::Tensor, tp)];
        let order: Vec<Way> = nest.0.into_iter().filter(|way| several.iter().any(|(w, n)| w == way && *n > 1)).collect();
        if seen.contains(&order) {
            continue;
        }
        seen.push(order);
        let flat = Mesh::of(Degrees { dp, ep, cp, tp, nest, ..Degrees::ONE });
        let Some(asked) = pins.sync.values() else {
            all.insert((Sync::Flat, nest));
            continue;
        };
        for &asked in asked {
            let whole = |far: u64| far == 1 || dp == far && cp == 1;
            match asked {
                Asked::This(Sync::Flat) => _ = all.insert((Sync::Flat, nest)),
                Asked::This(Sync::Server) => _ = all.insert((if dp * cp > 1 { Sync::Server } else { Sync::Flat }, nest)),
                _ if ep > 1 => {}
                Asked::This(Sync::Tree) => {
                    let several = dp > 1 && (cp > 1 || (2..dp).any(|n| dp.is_multiple_of(n)));
                    all.insert((if several { Sync::Tree } else { Sync::Flat }, nest));
                }
                Asked::This(Sync::Hierarchical { far }) if !dp.is_multiple_of(far) => {}
                Asked::This(Sync::Hierarchical { far }) => _ = all.insert((if whole(far) { Sync::Flat } else { Sync::Hierarchical { far } }, nest)),
                Asked::ByNodes => {
                    let far = prices.nodes(&flat, flat.dp());
                    let parted = dp.is_multiple_of(far) && !whole(far);
                    all.insert((if parted { Sync::Hierarchical { far } } else { Sync::Flat }, nest));
                }
            }
        }
    }
    all
}

/// The best plan of a tuple by integer programs, if it is below the objective.
fn solve_again(problem: &Problem, prices: &mut dyn Prices, tuple: Tuple, objective: u64) -> Result<Option<u64>, SolverFault> {
    for menus in Menus::new(problem, prices, tuple).iter().flat_map(Menus::by_tie) {
        if let Some(better) = integer::best_below(&menus, &problem.layers, problem.budget, objective, &|| false)? {
            return Ok(Some(better.objective));
        }
    }
    Ok(None)
}

/// Every schedule, with how many virtual stages it has on each stage: powers of two unless pinned.
fn orders(problem: &Problem, pp: u64, micro_batches: u64) -> Vec<(Schedule, u64)> {
    let pins = &problem.pins;
    let mut all = Vec::new();
    for v in (1..=problem.layers.len() as u64 / pp).filter(|v| pins.virtual_stages.values().map_or(v.is_power_of_two(), |pinned| pinned.contains(v)))
    {
        for schedule in searched(pins) {
            let fits = match schedule {
                Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => v == 1,
                Schedule::Interleaved => v > 1 && pp > 1 && micro_batches.is_multiple_of(pp),
                Schedule::ZbH1 => v == 1 && pp > 1 && micro_batches >= pp,
                Schedule::ZbV => v == 2 && pp > 1 && micro_batches >= 2 * pp - 1,
            };
            if fits {
                all.push((schedule, v));
            }
        }
    }
    all
}

/// Every order of the groups of devices, of those that do the same the least.
fn placements(groups: &Groups, ranks: u64, stages: u64) -> Vec<Placement> {
    let count = groups.count();
    let mut least: BTreeMap<Vec<(BTreeSet<u8>, u64)>, Placement> = BTreeMap::new();
    for code in 0..count.pow(count as u32) {
        let order: Vec<u8> = (0..count as u32).rev().map(|digit| (code / count.pow(digit) % count) as u8).collect();
        if order.iter().collect::<BTreeSet<_>>().len() < count {
            continue;
        }
        let mut starts = vec![0];
        starts.extend(order.iter().scan(0u64, |sum, &group| {
            *sum = sum.saturating_add(groups.sizes()[usize::from(group)]);
            Some(*sum)
        }));
        let of_rank = |rank: u64| starts.partition_point(|&start| start <= rank) - 1;
        let stage = |stage: u64| {
            let (first, last) = (of_rank(stage * ranks), of_rank((stage + 1) * ranks - 1));
            (order[first..=last].iter().copied().collect(), if first == last { stage * ranks - starts[first] } else { 0 })
        };
        least.entry((0..stages).map(stage).collect()).or_insert(Placement::of(&order));
    }
    least.into_values().collect()
}

fn site_of(prices: &dyn Prices, tuple: &Tuple, stage: u64) -> Site {
    prices.groups().seat(tuple.placement, tuple.degrees().ranks(), stage).site
}

/// The floors of all kinds on every site of a tuple, and how many stages are there.
struct Floors(Vec<(Site, u64, Vec<Floor>)>);

impl Floors {
    fn new(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple, from: Reference) -> Floors {
        let sites = prices.groups().sites(tuple.placement, tuple.degrees().ranks(), tuple.pp);
        Floors(sites.into_iter().map(|(site, stages)| (site, stages, problem.floors(prices, tuple, site, from))).collect())
    }

    fn of(&self, site: Site, kind: usize) -> Option<&Floor> {
        self.0.iter().find(|(known, ..)| *known == site).map(|(.., floors)| &floors[kind])
    }

    /// One micro-batch through all layers, each at the least time of its kind anywhere.
    fn all_once(&self, problem: &Problem) -> u64 {
        let least = |kind: usize| self.0.iter().map(|(.., floors)| floors[kind].time()).min().unwrap_or(0);
        problem.layers.iter().map(|&kind| least(kind)).sum()
    }

    /// The objective of layers that take the least time of their kinds. A stage runs every micro-batch, with its part of a mean; otherwise it waits for others while the
    /// pipeline fills and drains: for one of `parts` of their times.
    fn quickest(&self, problem: &Problem, tuple: &Tuple) -> u64 {
        let (waits, parts) = match tuple.schedule {
            Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => (1, 1),
            Schedule::Interleaved => (1, tuple.virtual_stages),
            Schedule::ZbH1 | Schedule::ZbV => (0, 1),
        };
        let runs = tuple.micro_batches * parts - waits;
        let pass = |floors: &[Floor]| problem.layers.iter().map(|&kind| floors[kind].time()).fold(0, u64::saturating_add);
        let passes = self.0.iter().map(|(.., floors)| (waits * pass(floors), runs.saturating_mul(pass(floors))));
        let stages: Vec<u64> = self.0.iter().map(|s| s.1).collect();
        let mut best = 0;
        for mean in weightings(&stages, &passes.collect::<Vec<_>>()) {
            let mut sum = 0;
            for &kind in &problem.layers {
                let on = |(at, (.., floors)): (usize, &(Site, u64, Vec<Floor>))| {
                    let times = u128::from(mean.of_site[at]) * u128::from(runs) + u128::from(mean.sum) * u128::from(waits);
                    times * u128::from(floors[kind].time())
                };
                sum += self.0.iter().enumerate().map(on).min().unwrap_or(0);
            }
            best = best.max(sum.div_ceil(u128::from(mean.sum) * u128::from(parts)));
        }
        u64::try_from(best).unwrap_or(u64::MAX)
    }
}

/// The objective of layers that take the least time of their kinds.
pub(crate) fn quickest(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple, from: Reference) -> u64 {
    Floors::new(problem, prices, tuple, from).quickest(problem, tuple)
}

/// A bound by the floors of all kinds: the objective if stages that are quick enough for anything better cannot hold all layers.
fn reached(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple, from: Reference, objective: u64) -> u64 {
    let floors = Floors::new(problem, prices, tuple, from);
    let prices: &dyn Prices = prices;
    let quickest = floors.quickest(problem, tuple);
    if quickest >= objective || !tuple.schedule.is_plain() {
        return quickest;
    }
    // No stage of a better plan takes this long.
    let slow = match tuple.micro_batches {
        1 => u64::MAX,
        m => (objective - floors.all_once(problem)).div_ceil(m - 1),
    };
    let overfull = |kind: usize| {
        let held = |stage: u64| floors.of(site_of(prices, tuple, stage), kind).map(|floor| holds(problem, prices, tuple, (kind, floor), stage, slow));
        let known = floors.0.iter().all(|(.., floors)| !floors[kind].trades.is_empty());
        known && (0..tuple.pp).filter_map(held).sum::<u64>() < problem.layers.iter().filter(|&&k| k == kind).count() as u64
    };
    if (0..problem.kinds.len()).any(overfull) { objective } else { quickest }
}

/// Where a layer of a kind may live: one rank shares nothing, halves of a backward pass keep parameters, gradients and frames, and so does, with all else, what is updated behind every
/// micro-batch.
fn lives(kind: &Kind, tuple: &Tuple) -> Vec<(Zero, Away)> {
    let (most, stays): (u8, fn(&Away) -> bool) = match tuple.schedule {
        Schedule::GPipe | Schedule::OneFOneB | Schedule::Interleaved => (3, |_| false),
        Schedule::ZbH1 | Schedule::ZbV => (1, |away| away.is_in_passes()),
        Schedule::PipeDream => (1, |away| *away != Away::default()),
    };
    let most = if tuple.dp * tuple.cp > 1 { most } else { 0 };
    let zeros = kind.zero.iter().filter(|z| z.0 <= most);
    zeros.flat_map(|&zero| kind.away.iter().filter(|away| !stays(away)).map(move |&away| (zero, away))).collect()
}

/// The most layers of a kind, split between any two ways, that a stage can hold and run in less than `slow`; all layers at most.
fn holds(problem: &Problem, prices: &dyn Prices, tuple: &Tuple, (kind, floor): (usize, &Floor), stage: u64, slow: u64) -> u64 {
    let (mesh, links, in_flight): (_, &dyn Links, _) = (tuple.mesh(), prices, tuple.in_flight(stage));
    let (site, kind) = (site_of(prices, tuple, stage), &problem.kinds[kind]);
    let terms = Terms { links, site, mesh: &mesh, types: tuple.types(problem.types), clip: problem.clip, pipeline: tuple.pipeline() };
    let bytes = floor.bytes();
    let sync = |(zero, away): (Zero, Away)| (terms.sync(&bytes, States { zero, offload: away.states }, Home::Together), away.activations);
    let syncs: Vec<_> = lives(kind, tuple).into_iter().map(sync).collect();
    // Of each way of living and each corner of each trade: what it takes of workspace and ring, its own bytes, and time. A frame elsewhere is in the ring alone, twice; a corner
    // that stays in later trades has the workspace of the first, so that there it is only repeated.
    let mut ways: Vec<(u64, u64, u64)> = Vec::new();
    for ((sync, activations), trade) in syncs.iter().flat_map(|sync| floor.trades.iter().map(move |trade| (*sync, trade))) {
        for &(frame, time) in trade.corners() {
            let part = |amount: u64| scaled(amount, floor.part);
            let (shared, kept) = match activations {
                None => (part(trade.workspace()), scaled(frame, (in_flight * floor.part.0, floor.part.1))),
                Some(_) => (part(trade.workspace()) + 2 * part(frame), 0),
            };
            ways.push((shared, sync.states() + kept, terms.storing(sync, part(frame), activations).least_time(part(time))));
        }
    }
    let mut bounds: Vec<u64> = ways.iter().map(|w| w.0).collect();
    bounds.sort_unstable();
    bounds.dedup();
    // Room beside these, and the ways of a layer that no mixture of others covers.
    let rooms = bounds.into_iter().filter_map(|shared| {
        let free = problem.budget_at(site).checked_sub(shared)?;
        Some((free, lower_hull(ways.iter().filter(|w| w.0 <= shared).map(|w| (w.1, w.2)).collect())))
    });
    let rooms: Vec<(u64, Vec<(u64, u64)>)> = rooms.collect();
    let fits = |n: u64, (free, hull): &(u64, Vec<(u64, u64)>)| {
        let Some(at) = hull.iter().rposition(|w| n * w.0 <= *free) else { return false };
        let (small, slower) = (n * hull[at].0, n * hull[at].1);
        // As many layers as fit are the larger way.
        hull.get(at + 1).map_or(slower < slow, |&(large, quicker)| {
            let (more, saved) = (u128::from(n * large - small), u128::from(free - small) * u128::from(slower - n * quicker));
            u128::from(slower) * more < u128::from(slow) * more + saved
        })
    };
    (1..=problem.layers.len() as u64).take_while(|&n| rooms.iter().any(|room| fits(n, room))).last().unwrap_or(0)
}

/// Of (bytes, time) those on the lower hull, from least bytes to least time.
fn lower_hull(mut ways: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ways.sort_unstable();
    let mut hull: Vec<(u64, u64)> = Vec::new();
    for way in ways {
        if hull.last().is_some_and(|last| last.1 <= way.1) {
            continue;
        }
        let above = |a: (u64, u64), b: (u64, u64)| {
            let fall = |x: (u64, u64), y: (u64, u64)| (u128::from(x.1 - y.1), u128::from(y.0 - x.0));
            let ((first, run), (whole, all)) = (fall(a, b), fall(a, way));
            first * all <= whole * run
        };
        while hull.len() >= 2 && above(hull[hull.len() - 2], hull[hull.len() - 1]) {
            hull.pop();
        }
        // Of equal bytes the quicker comes first.
        hull.push(way);
    }
    hull
}

/// The least objective that the priced layers allow; nothing if some layer cannot run.
pub(crate) fn weights(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple) -> Option<u64> {
    let (mesh, pipeline, p) = (tuple.mesh(), tuple.pipeline(), tuple.pp);
    let parted = matches!(tuple.schedule, Schedule::ZbH1 | Schedule::ZbV);
    // How often the slowest stage counts.
    let n = match tuple.schedule {
        Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => tuple.micro_batches,
        Schedule::Interleaved | Schedule::ZbH1 | Schedule::ZbV => 1,
    };
    let sites = prices.groups().sites(tuple.placement, mesh.ranks(), p);
    // Ways of each kind: (site, least time, least end, what the tied parameter is like).
    type Way = (usize, u64, u64, Option<(Sharding, States)>);
    let mut kinds: Vec<Vec<Way>> = vec![Vec::new(); problem.kinds.len()];
    for ((at_site, &(site, _)), kind) in sites.iter().enumerate().flat_map(|s| (0..problem.kinds.len()).map(move |kind| (s, kind))) {
        let (ways, kind) = (&mut kinds[kind], &problem.kinds[kind]);
        let (offers, before) = (prices.offers(kind.class, tuple.shape(site)), ways.len());
        let halves = if parted { prices.halves(kind.class, tuple.shape(site)) } else { Rc::from([]) };
        let terms = Terms { links: &*prices, site, mesh: &mesh, types: tuple.types(problem.types), clip: problem.clip, pipeline };
        for (offer, at) in offers.iter().zip(0..).filter(|(o, _)| kind.recompute.contains(&o.option.recompute)) {
            let half = halves.get(at);
            if parted && half.is_none() {
                continue;
            }
            // Stages that do not wait for each other share no parameter.
            if tuple.schedule == Schedule::PipeDream && p > 1 && offer.tie.is_some() {
                return None;
            }
            for (zero, Away { states: offload, activations }) in lives(kind, tuple) {
                let shares = Home::ALL.map(|home| {
                    let sync = terms.sync(&offer.option.bytes, States { zero, offload }, home);
                    let of = match half {
                        Some(half) => sync.parted(offer.option.forward, half.input, half.weight),
                        None => terms.storing(sync, offer.option.bytes.frame, activations).terms(offer.option.forward, offer.option.backward),
                    };
                    share(&pipeline, &of)
                });
                let least = |of: fn(&StageTime) -> u64| shares.iter().map(of).min().unwrap_or(0);
                ways.push((at_site, least(|s| s.time), least(|s| s.end), offer.tie.clone().map(|sharding| (sharding, States { zero, offload }))));
            }
        }
        // Sites are alike in what can run.
        if ways.len() == before {
            return None;
        }
    }
    let crossing = prices.boundary_bytes(tuple.shape(Site::ONLY));
    let seat = |stage: u64| prices.groups().seat(tuple.placement, mesh.ranks(), stage);
    // Of each border: the site of the stage before it, and what it adds.
    let message = |c: u64| {
        let (from, to) = (pipeline.stage_of(c), pipeline.stage_of(c + 1));
        let quickest = crossing.iter().map(|&bytes| 2 * prices.message(&mesh, seat(from), seat(to), bytes).0).min().unwrap_or(0);
        (sites.iter().position(|s| s.0 == seat(from).site).unwrap_or(0), border(&pipeline, if from == to { 0 } else { quickest }))
    };
    let borders: Vec<(usize, StageTime)> = (0..pipeline.all_virtual() - 1).map(message).collect();
    let messages: StageTime = borders.iter().map(|b| b.1).sum();
    let terms = Terms { links: &*prices, site: sites[0].0, mesh: &mesh, types: tuple.types(problem.types), clip: problem.clip, pipeline };
    let constant = terms.constant(p);

    let mut ties: Vec<Option<(Sharding, States)>> = kinds.iter().flatten().map(|w| w.3.clone()).filter(Option::is_some).collect();
    ties.sort();
    ties.dedup();
    if ties.is_empty() {
        ties.push(None);
    }
    let mut best: Option<u128> = None;
    for tie in ties {
        let ways = |kind: usize| kinds[kind].iter().filter(|w| w.3.is_none() || w.3 == tie);
        if (0..kinds.len()).any(|k| ways(k).next().is_none()) {
            continue;
        }
        let least = |of: &dyn Fn(&Way) -> u128| (0..kinds.len()).map(|k| ways(k).map(of).min().unwrap_or(0)).collect::<Vec<u128>>();
        let sum = |of: &[u128]| problem.layers.iter().map(|&k| of[k]).sum::<u128>();
        let (time, end) = (least(&|w| u128::from(w.1)), least(&|w| u128::from(w.2)));
        // The slowest stage and the longest end are at least any mean of all, of one choice for both.
        let on_site = |at: usize, of: fn(&Way) -> u64| {
            let least = |kind: usize| ways(kind).filter(|w| w.0 == at).map(of).min().unwrap_or(0);
            problem.layers.iter().map(|&kind| least(kind)).sum::<u64>()
        };
        let pass = |at: usize| (on_site(at, |w| w.1), (n - 1).saturating_mul(on_site(at, |w| w.1)).saturating_add(on_site(at, |w| w.2)));
        let stages: Vec<u64> = sites.iter().map(|s| s.1).collect();
        let mean = |weights: Weighting| {
            let (all, of_site) = (u128::from(weights.sum), |at: usize| u128::from(weights.of_site[at]));
            let counted = |at: usize, time: u64, end: u64| (all + u128::from(n - 1) * of_site(at)) * u128::from(time) + of_site(at) * u128::from(end);
            let messages: u128 = borders.iter().map(|&(at, StageTime { time, end })| counted(at, time, end)).sum();
            (sum(&least(&|w| counted(w.0, w.1, w.2))) + messages).div_ceil(all)
        };
        let mean = weightings(&stages, &(0..sites.len()).map(pass).collect::<Vec<_>>()).into_iter().map(mean).max().unwrap_or(0);
        let (p, n) = (u128::from(p), u128::from(n));
        // Or each by itself, where some stage also holds its share of the layers of a kind, rounded up.
        let share = |kind: usize| (problem.layers.iter().filter(|&&k| k == kind).count() as u128).div_ceil(p);
        let total = sum(&time) + u128::from(messages.time);
        let (mut slowest, mut longest) = (total.div_ceil(p), (sum(&end) + u128::from(messages.end)).div_ceil(p));
        for kind in 0..time.len() {
            slowest = slowest.max(share(kind) * time[kind]);
            longest = longest.max(share(kind) * end[kind]);
        }
        let bound = mean.max(total + (n - 1) * slowest + longest);
        best = Some(best.map_or(bound, |b| b.min(bound)));
    }
    best.map(|b| u64::try_from(b + u128::from(constant)).unwrap_or(u64::MAX))
}
