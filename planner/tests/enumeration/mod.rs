//! Plain enumeration of everything: every tuple, every cut into stages, every option and ZeRO stage of every layer. It shares with the search the prices and the arena
//! formula, and nothing else; the objective, the places of virtual stages, what they keep, and the devices they are on are written out again from their definitions.

mod order;

use super::drawn::Drawn;
use dplan_ir::mesh::{AxisId, AxisSet, Degrees, Keys, Mesh};
use dplan_ir::nest::{self, Nest};
use dplan_ir::optimizer::Optimizer;
use dplan_ir::pipeline::{Pipeline, Slots};
use dplan_ir::plan::{Away, Clip, Offload, Residence, Schedule, States, Wire, Zero};
use dplan_ir::program::{Pattern, Role};
use dplan_ir::sync::Sync;
use dplan_planner::memory::{self, StagePosition, StateTypes, arena};
use dplan_planner::options::Halves;
use dplan_planner::pins::Asked;
use dplan_planner::placement::{Seat, Site};
use dplan_planner::prices::{Links, Offer, Prices, Shape};
use dplan_planner::problem::Problem;
use order::Order;
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
    sync: Sync,
    order: Order,
}

/// Times of a layer: forward, backward (or its input half), weight half, and the end of the step.
struct Times {
    f: u64,
    b: u64,
    w: u64,
    end: u64,
}

impl Setting<'_> {
    fn element(&self, role: Role) -> u64 {
        self.types.dtype(role).size()
    }

    /// Times of a layer. `shared`: its tied bucket was counted by an earlier layer of the stage; `split`: another stage has it too.
    fn layer(&self, site: Site, offer: &Offer, halves: Option<&Halves>, residence: Residence, shared: bool, split: bool) -> Times {
        let Residence { states, activations } = residence;
        let zero = states.zero.0;
        // Out behind the forward pass, and in before the backward pass.
        let stored = match (activations, offer.option.bytes.frame) {
            (None, _) | (_, 0) => 0,
            (Some(store), frame) => self.prices.copy(site, store, frame).0,
        };
        let (f, b) = (offer.option.forward.0, offer.option.backward.0);
        let (input, w) = halves.map_or((b, 0), |h| (h.input.0, h.weight.0));
        // What a reduction at the end of the step hides beside.
        let beside = if halves.is_some() { w } else { b };
        let (mut gather, mut scatter, mut add, mut add_end) = (0, 0, 0, 0);
        let (mut comes, mut goes) = (0, 0);
        let (mut reduce_end, mut rest_end, mut update, mut gather_end, mut late, mut moved, mut trust) = (0, 0, 0, 0, 0, 0, 0);
        for bucket in &offer.option.bytes.buckets {
            // Experts are shared out over some of the ranks that see different data; the others hold copies.
            let copies: AxisSet = self.mesh.ids().filter(|&a| !self.mesh.axis(a).name.starts_with("tp") && !bucket.axes.contains(a)).collect();
            let ways = self.mesh.size(copies);
            let whole = memory::bucket_elems(bucket.elems, ways);
            let grad = whole * self.element(Role::Grad);
            let piece = if zero == 0 { whole } else { whole / ways };
            let collective = |axes, pattern, bytes| self.prices.collective(site, &self.mesh, axes, pattern, bytes).0;
            // The axes of the steps, the nearest first.
            let far = |a: &AxisId| self.mesh.axis(*a).name.starts_with("far");
            let several: Vec<AxisId> = copies.iter().filter(|&a| self.mesh.axis(a).size > 1).collect();
            let steps: Vec<AxisSet> = match self.sync {
                Sync::Flat | Sync::Server => vec![copies],
                Sync::Hierarchical { .. } => {
                    vec![several.iter().copied().filter(|a| !far(a)).collect(), several.iter().copied().filter(far).collect()]
                }
                Sync::Tree => several.iter().map(|&a| AxisSet::one(a)).collect(),
            };
            // Each step moves what the steps before it have left of a whole.
            let moved_by = |steps: &[AxisSet], pattern, bytes: u64| {
                let left = |at: usize| bytes / steps[..at].iter().map(|&s| self.mesh.size(s)).product::<u64>();
                (0..steps.len()).map(|at| collective(steps[at], pattern, left(at))).sum::<u64>()
            };
            let gathered = moved_by(&steps, Pattern::AllGather, whole * self.element(Role::Param));
            // Two bytes an element out and in, in a rounding and a sum; a rank alone has nobody to round for.
            let rounds = self.types.wire == Wire::Bf16 && ways > 1;
            // Pairs of value and place, from everybody to everybody.
            let pairs = self.types.wire.kept().filter(|_| ways > 1).map(|share| 2 * share.of(whole) * self.element(Role::Grad));
            // As many bytes as there are, out and in, and a sum.
            let serves = !rounds && pairs.is_none() && self.sync == Sync::Server && ways > 1;
            let scattered = if let Some(own) = pairs {
                collective(copies, Pattern::AllGather, ways * own)
            } else if serves {
                collective(copies, Pattern::AllToAll, grad).max(collective(copies, Pattern::ReduceScatter, grad))
            } else if rounds {
                collective(copies, Pattern::AllToAll, 2 * whole)
            } else {
                moved_by(&steps, Pattern::ReduceScatter, grad)
            };
            let sweep = |bytes| self.prices.sweep(site, bytes).0;
            let rounding = if let Some(own) = pairs {
                // Found: two reads and a write, three looks, a read; added up: all that is wanted is written.
                sweep(7 * grad + own) + sweep(ways * own + if zero == 0 { grad } else { grad / ways })
            } else if serves {
                sweep(grad + grad / ways)
            } else if rounds {
                sweep(grad + 2 * whole) + sweep(2 * whole + grad / ways)
            } else {
                0
            };
            gather += gathered;
            scatter += scattered;
            if zero >= 2 {
                add += rounding;
                add += self.prices.sweep(site, 3 * piece * self.element(Role::Grad)).0;
            }
            // A role is cut at the ZeRO stage of its number, and leaves at the level of the same.
            let number = |role| match role {
                Role::Master | Role::Moment1 | Role::Moment2 => 1,
                Role::Grad => 2,
                Role::Param => 3,
                // Whole, and here.
                Role::Residual => 4,
            };
            let kept = |store, role| {
                let elems = if zero >= number(role) { whole / ways } else { whole };
                self.prices.copy(site, store, elems * self.element(role)).0
            };
            let taken = match states.offload {
                Offload::None => None,
                Offload::Optimizer(store) => Some((store, 1)),
                Offload::Gradients(store) => Some((store, 2)),
                Offload::Parameters(store) => Some((store, 3)),
            };
            if let Some((store, level)) = taken {
                comes += if level >= 3 { kept(store, Role::Param) } else { 0 };
                goes += if level >= 2 { 2 * kept(store, Role::Grad) } else { 0 };
            }
            if bucket.tied && shared {
                continue;
            }
            let apart = bucket.tied && split;
            let across = |axes, bytes| self.prices.across_stages(&self.mesh, axes, 2, bytes).0;
            if zero < 2 {
                add_end += rounding;
            }
            if zero == 0 && pairs.is_some() {
                reduce_end += scattered;
                rest_end += collective(bucket.partial, Pattern::AllReduce, grad);
                late += if apart { across(Default::default(), grad) } else { 0 };
            } else if zero == 0 && (rounds || serves) {
                // As ZeRO 1 has it, and back to everybody.
                reduce_end += scattered + collective(copies, Pattern::AllGather, grad);
                rest_end += collective(bucket.partial, Pattern::AllReduce, grad);
                late += if apart { across(Default::default(), grad) } else { 0 };
            } else if zero == 0 && apart {
                late += across(copies.union(bucket.partial), grad);
            } else if zero == 0 {
                // There and back by all steps but the last, in which all that is missing is added up.
                let (inner, last) = steps.split_at(steps.len().saturating_sub(1));
                let least = grad / inner.iter().map(|&s| self.mesh.size(s)).product::<u64>();
                let last = last.iter().fold(bucket.partial, |all, &s| all.union(s));
                reduce_end += moved_by(inner, Pattern::ReduceScatter, grad)
                    + collective(last, Pattern::AllReduce, least)
                    + moved_by(inner, Pattern::AllGather, grad);
            } else {
                reduce_end += scattered;
                rest_end += collective(bucket.partial, Pattern::AllReduce, piece * self.element(Role::Grad));
                if apart {
                    late += across(Default::default(), piece * self.element(Role::Grad));
                }
            }
            gather_end += gathered;
            if let Some((store, level)) = taken {
                let late = apart || (zero >= 1 || rounds || serves || pairs.is_some()) && bucket.partial.iter().any(|a| self.mesh.axis(a).size > 1);
                for role in self.types.roles() {
                    let times = match role {
                        // Cleared; read by the norm; summed; read by the update.
                        Role::Grad if level >= 2 => 2 + u64::from(self.clip == Clip::GlobalNorm) + if late { 2 } else { 0 },
                        Role::Param if level >= 3 => 1 + u64::from(self.types.master() == Role::Param),
                        Role::Grad | Role::Param | Role::Residual => 0,
                        Role::Master | Role::Moment1 | Role::Moment2 => 2,
                    };
                    moved += times * kept(store, role);
                }
            }
            let mut bytes = if zero >= 2 { piece } else { whole } * self.element(Role::Grad);
            bytes += piece * self.element(Role::Grad) * if self.clip == Clip::GlobalNorm { 2 } else { 1 };
            bytes += 2 * piece * self.element(self.types.master()) + 2 * piece * self.element(Role::Moment1) * self.types.optimizer.moments() as u64;
            if self.types.master() != Role::Param {
                bytes += piece * self.element(Role::Param);
            }
            update += self.prices.sweep(site, bytes).0;
            if self.types.optimizer == Optimizer::Lamb {
                // State, gradient and two moments are read for two sums of each parameter, which are added over all that cuts the parameters up.
                let read = 2 * piece * self.element(Role::Moment1) + piece * (self.element(self.types.master()) + self.element(Role::Grad));
                let cuts = if zero == 0 { bucket.axes } else { bucket.axes.union(copies) };
                let sums = 2 * bucket.members * self.element(self.types.master());
                trust += self.prices.sweep(site, read).0 + collective(cuts, Pattern::AllReduce, sums);
            }
        }
        let (forth, back, end) = match zero {
            0 => (0, 0, overlapped(beside, reduce_end + rest_end) - beside + add_end + overlapped(update, moved)),
            1 => (0, 0, overlapped(beside, reduce_end + rest_end) - beside + add_end + overlapped(update, gather_end + moved)),
            2 => (0, scatter, rest_end + overlapped(update, gather_end + moved)),
            _ => (gather, scatter, rest_end + overlapped(update, moved)),
        };
        // A backward pass that reads no parameters has none brought.
        let again = if offer.option.bytes.reads_back { forth + comes } else { 0 };
        let (f, b) = (overlapped(f, forth + comes + stored), overlapped(input, again + back + goes + stored) + if zero >= 2 { add } else { 0 });
        let end = end + late + trust;
        // Where each micro-batch has an end of its own, parameters that are read again are first copied, on several stages.
        let Order { pp, m, .. } = self.order;
        let read = if pp > 1 && m > 1 { offer.option.bytes.version(&self.mesh, self.types) } else { 0 };
        let (each, end) = if self.order.is_stale() { (end + self.prices.sweep(site, 2 * read).0, 0) } else { (0, end) };
        Times { f, b: b + each, w, end }
    }
}

/// How so many context-parallel ranks may get at each other's keys.
fn ways(problem: &Problem, cp: u64) -> Vec<Keys> {
    match cp {
        1 => vec![Keys::Gathered],
        _ => Keys::ALL.into_iter().filter(|keys| problem.pins.keys.allows(keys)).collect(),
    }
}

/// The least objective over the whole space, or nothing if no plan fits.
pub fn enumerate(problem: &Problem, prices: &mut Drawn) -> Option<u64> {
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
                    .flat_map(|ep| ways(problem, cp).into_iter().map(move |keys| Degrees { dp, ep, cp, tp, keys, ..Degrees::ONE }))
                    .collect::<Vec<_>>()
            });
            let degrees: Vec<Degrees> = degrees.flat_map(|d| laid(problem, prices, d)).collect();
            let cases = degrees.into_iter().flat_map(|d| (1..=problem.batch).map(move |micro| (d, micro)));
            for (degrees, micro) in cases.filter(|(d, micro)| problem.batch.is_multiple_of(d.dp * micro)).collect::<Vec<_>>() {
                let m = problem.batch / degrees.dp / micro;
                let mut boundaries = vec![None];
                boundaries.extend(prices.boundary_dims(tp).into_iter().map(Some));
                for boundary in boundaries {
                    for padding in 0..prices.paddings(tp) {
                        for order in orders(problem, layers as u64, pp, m) {
                            let cut = Mesh::of(degrees).ids().any(|a| Mesh::of(degrees).axis(a).name.starts_with("far"));
                            let nested = (degrees.nest != Nest::default() || cut).then_some((degrees.nest, degrees.sync, degrees.dp));
                            let shape = Shape {
                                tp,
                                cp: degrees.cp,
                                ep: degrees.ep,
                                micro_batch: micro,
                                boundary,
                                padding,
                                keys: degrees.keys,
                                site: Site::ONLY,
                                nested,
                            };
                            for seats in seatings(prices.groups().sizes(), rest * tp, pp) {
                                let value = best_of_tuple(problem, prices, shape, degrees, order, &seats);
                                best = [best, value].into_iter().flatten().min();
                            }
                        }
                    }
                }
            }
        }
    }
    best
}

/// Every pinned way of exchanging gradients among so many ranks, and of nesting them; the usual ones if none is.
fn laid(problem: &Problem, prices: &Drawn, degrees: Degrees) -> Vec<Degrees> {
    let mut nests = problem.pins.nest.values().map_or(vec![Nest::default()], <[Nest]>::to_vec);
    nests.sort_unstable();
    // Of orders that differ in what has one rank only, the first.
    let several = |way: &nest::Way| match way {
        nest::Way::Data => degrees.dp > degrees.ep,
        nest::Way::Expert => degrees.ep > 1,
        nest::Way::Context => degrees.cp > 1,
        nest::Way::Tensor => degrees.tp > 1,
    };
    let order = |nest: &Nest| nest.0.into_iter().filter(several).collect::<Vec<_>>();
    let mut all: Vec<Degrees> = Vec::new();
    for nest in nests {
        if all.iter().any(|d| order(&d.nest) == order(&nest)) {
            continue;
        }
        let with = |sync| Degrees { sync, nest, ..degrees };
        // What is one step is one collective.
        let whole = |far: u64| degrees.dp == far && degrees.cp == 1;
        let parts =
            |far: u64| (far > 1 && degrees.dp.is_multiple_of(far)).then(|| with(if whole(far) { Sync::Flat } else { Sync::Hierarchical { far } }));
        let Some(asked) = problem.pins.sync.values() else {
            all.push(with(Sync::Flat));
            continue;
        };
        for asked in asked {
            let mesh = Mesh::of(with(Sync::Flat));
            all.extend(match asked {
                Asked::This(sync @ (Sync::Flat | Sync::Server)) => Some(with(*sync)),
                _ if degrees.ep > 1 => None,
                Asked::This(Sync::Tree) => Some(with(Sync::Tree)),
                Asked::This(Sync::Hierarchical { far }) => parts(*far),
                Asked::ByNodes => Some(parts(prices.nodes(&mesh, mesh.dp())).unwrap_or(with(Sync::Flat))),
            });
        }
    }
    all
}

fn orders(problem: &Problem, layers: u64, pp: u64, m: u64) -> Vec<Order> {
    let mut all: Vec<(Schedule, u64)> = vec![(Schedule::GPipe, 1), (Schedule::OneFOneB, 1)];
    if pp > 1 {
        if m.is_multiple_of(pp) {
            all.extend([2, 4, 8, 16].map(|v| (Schedule::Interleaved, v)));
        }
        all.extend((m >= pp).then_some((Schedule::ZbH1, 1)));
        all.extend((m + 1 >= 2 * pp).then_some((Schedule::ZbV, 2)));
    }
    all.extend(problem.pins.schedule.is_pinned().then_some((Schedule::PipeDream, 1)));
    // Others than these two are searched where a pin asks for them.
    if !problem.pins.schedule.is_pinned() && problem.pins.virtual_stages.values().is_none_or(|v| v.iter().all(|&v| v == 1)) {
        all.truncate(2);
    }
    all.retain(|(schedule, v)| problem.pins.schedule.allows(schedule) && problem.pins.virtual_stages.allows(v) && v * pp <= layers);
    all.into_iter().map(|(schedule, v)| Order { schedule, pp, v, m }).collect()
}

/// Where the stages are, for every order of the groups of devices.
fn seatings(sizes: &[u64], ranks: u64, stages: u64) -> Vec<Vec<Seat>> {
    if sizes.len() == 1 {
        return vec![(0..stages).map(|s| Seat { site: Site::ONLY, first: s * ranks }).collect()];
    }
    let mut orders: Vec<Vec<usize>> = vec![vec![]];
    for group in 0..sizes.len() {
        let longer = |order: &Vec<usize>| (0..=order.len()).map(|at| [&order[..at], &[group], &order[at..]].concat()).collect::<Vec<_>>();
        orders = orders.iter().flat_map(longer).collect();
    }
    let seats = |order: Vec<usize>| {
        // Every rank as its group, and which device of it.
        let devices: Vec<(usize, u64)> = order.into_iter().flat_map(|group| (0..sizes[group]).map(move |device| (group, device))).collect();
        let of_stage = |ranks: &[(usize, u64)]| {
            let site = ranks.iter().map(|r| Site::of_group(r.0)).reduce(Site::with).unwrap();
            Seat { site, first: if ranks.iter().all(|r| r.0 == ranks[0].0) { ranks[0].1 } else { 0 } }
        };
        devices.chunks(ranks as usize).map(of_stage).collect()
    };
    orders.into_iter().map(seats).collect()
}

fn best_of_tuple(problem: &Problem, prices: &mut Drawn, shape: Shape, degrees: Degrees, order: Order, seats: &[Seat]) -> Option<u64> {
    let classes = prices.classes.clone();
    let count = classes.len();
    let crossing = prices.boundary_bytes(shape);
    let boundary = crossing.iter().copied().max().unwrap_or(0);
    let zeros = match degrees.dp * degrees.cp {
        1 => 0..=0,
        _ if order.halves() || order.is_stale() || problem.types.wire.kept().is_some() => 0..=1,
        _ => 0..=3,
    };
    let offloads: Vec<Away> = if problem.pins.offload.is_pinned() { Away::all().collect() } else { vec![Away::default()] };
    let keeps = problem.types.roles().into_iter().any(|r| !matches!(r, Role::Param | Role::Grad));
    let offloads = || {
        offloads
            .iter()
            .copied()
            .filter(|o| keeps || !matches!(o.states, Offload::Optimizer(_)))
            .filter(|o| !order.is_stale() || *o == Away::default())
            .filter(|o| !order.halves() || matches!(o.states, Offload::None | Offload::Optimizer(_)) && o.activations.is_none())
    };
    // All ways of running a layer on a site.
    let mut known: BTreeMap<(Site, usize), Ways> = BTreeMap::new();
    for (seat, l) in seats.iter().flat_map(|seat| (0..count).map(move |l| (seat, l))) {
        let shape = Shape { site: seat.site, ..shape };
        let offers = prices.offers(classes[l], shape);
        let halves = if order.halves() { prices.halves(classes[l], shape) } else { Rc::from([]) };
        let of = |z, away: Away| Residence { states: States { zero: Zero(z), offload: away.states }, activations: away.activations };
        let residences = || zeros.clone().flat_map(|z| offloads().map(move |away| of(z, away)));
        let all = (0..offers.len()).flat_map(|o| residences().map(move |r| (o, r)).collect::<Vec<_>>());
        let allowed = |&(o, Residence { states, activations }): &(usize, Residence)| {
            let away = Away { states: states.offload, activations };
            let allowed = problem.pins.zero.allows(l as u32, &states.zero) && problem.pins.offload.allows(l as u32, &away);
            allowed && problem.pins.recompute.allows(l as u32, &offers[o].option.recompute)
        };
        let ways = all.filter(allowed).collect();
        known.insert((seat.site, l), Ways { ways, offers, halves });
    }
    let setting = Setting { prices, types: problem.types, clip: problem.clip, mesh: Mesh::of(degrees), sync: degrees.sync, order };
    let tied: Vec<usize> = (0..count).filter(|&l| known[&(seats[0].site, l)].offers.iter().any(|o| o.tie.is_some())).collect();
    // Homes on stages that update at different times would differ.
    if order.is_stale() && order.pp > 1 && !tied.is_empty() {
        return None;
    }
    let mut best = None;
    for cuts in cuttings(count, (order.pp * order.v) as usize).into_iter().filter(|cuts| order.v == 1 || is_even(cuts)) {
        let stage = |l: usize| order.place((0..order.pp * order.v).find(|&c| cuts[c as usize + 1] > l).unwrap());
        let ways: Vec<&Ways> = (0..count).map(|l| &known[&(seats[stage(l) as usize].site, l)]).collect();
        if ways.iter().any(|w| w.ways.is_empty()) {
            continue;
        }
        let mut pick = vec![0; count];
        loop {
            let way = |l: usize| {
                let (offer, residence) = ways[l].ways[pick[l]];
                (&ways[l].offers[offer], ways[l].halves.get(offer), residence)
            };
            let chosen: Vec<Way> = (0..count).map(way).collect();
            if tied.iter().all(|&l| chosen[l].0.tie == chosen[tied[0]].0.tie && chosen[l].2.states == chosen[tied[0]].2.states)
                && let Some(value) = value(problem, &setting, &chosen, &cuts, &tied, &crossing, boundary, seats)
            {
                best = [best, Some(value)].into_iter().flatten().min();
            }
            // Next combination, as an odometer.
            let Some(at) = (0..count).find(|&l| pick[l] + 1 < ways[l].ways.len()) else { break };
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

/// Whether all parts but the first and the last share their layers evenly, the i-th with ⌊(i + 1) r / n⌋ − ⌊i r / n⌋ of them.
fn is_even(cuts: &[usize]) -> bool {
    let parts = cuts.len() - 1;
    let (n, r) = (parts - 2, cuts[parts - 1] - cuts[1]);
    (0..n).all(|i| cuts[i + 2] - cuts[i + 1] == (i + 1) * r / n - i * r / n)
}

/// What pins allow of a layer's offers, and the offers.
struct Ways {
    ways: Vec<(usize, Residence)>,
    offers: Rc<[Offer]>,
    halves: Rc<[Halves]>,
}

/// An offer, what it is in halves, and where its layer lives.
type Way<'a> = (&'a Offer, Option<&'a Halves>, Residence);

#[allow(clippy::too_many_arguments)]
fn value(
    problem: &Problem,
    setting: &Setting,
    chosen: &[Way],
    cuts: &[usize],
    tied: &[usize],
    crossing: &[u64],
    boundary: u64,
    seats: &[Seat],
) -> Option<u64> {
    let Order { schedule, pp, v, m } = setting.order;
    let order = setting.order;
    let pipeline = Pipeline { schedule, stages: pp, virtual_stages: v, micro_batches: m };
    let place: Vec<u64> = (0..chosen.len()).map(|l| order.place((0..pp * v).find(|&c| cuts[c as usize + 1] > l).unwrap())).collect();
    let (mut sum, mut slowest, mut longest, mut latest) = (0, 0, 0, 0);
    for stage in 0..pp {
        let (kept, seat) = (order.kept(stage), seats[stage as usize]);
        let (mut layers, mut time, mut ramp, mut ends) = (Vec::new(), 0, 0, 0);
        for (c, &(frames, held)) in (0..pp * v).filter(|&c| order.place(c) == stage).zip(&kept) {
            let (start, end) = (cuts[c as usize], cuts[c as usize + 1]);
            for l in start..end {
                let (offer, halves, residence) = chosen[l];
                let versions = if order.is_stale() { frames - 1 } else { 0 };
                layers.push((halves.map_or(&offer.option.bytes, |h| &h.bytes), residence, Slots { frames, held, versions }));
                let shared = tied.contains(&l) && tied.iter().any(|&t| t < l && place[t] == stage);
                let split = tied.iter().any(|&t| place[t] != stage);
                let Times { f, b, w, end } = setting.layer(seat.site, offer, halves, residence, shared, split);
                (time, ends) = (time + f + b + w, ends + end);
                ramp += match schedule {
                    Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => f + b,
                    Schedule::Interleaved => (f + b).div_ceil(v),
                    Schedule::ZbH1 => [f + b - w.min(f + b), f, b].into_iter().max().unwrap(),
                    Schedule::ZbV => [f.div_ceil(2), b.div_ceil(2), b - w.min(b)].into_iter().max().unwrap(),
                };
            }
            if c + 1 < pp * v && order.place(c + 1) != stage {
                let messages = 2 * setting.prices.message(&setting.mesh, seat, seats[order.place(c + 1) as usize], crossing[end - 1]).0;
                (time, ramp) = (time + messages, ramp + messages.div_ceil(v));
            }
        }
        if arena(&layers, &setting.mesh, StateTypes { sync: setting.sync, ..problem.types }, StagePosition { pipeline, stage, boundary }).total()
            > problem.budget_at(seat.site)
        {
            return None;
        }
        (sum, slowest, longest) = (sum + ramp, slowest.max(m * time - ramp), longest.max(ends));
        latest = latest.max(m * time - ramp + ends);
    }
    let scalar = setting.prices.across_stages(&setting.mesh, setting.mesh.all(), pp, 8).0;
    let scalars = if setting.clip == Clip::GlobalNorm { 2 } else { 1 };
    let rest = match schedule {
        Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => slowest + longest,
        Schedule::Interleaved | Schedule::ZbH1 | Schedule::ZbV => latest,
    };
    Some(sum + rest + scalars * scalar)
}
