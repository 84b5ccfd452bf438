//! One stage: for a bag of layers in an arena of a given size, the Pareto set of the two numbers that the objective adds up ([`crate::objective::StageTime`]): in a
//! plain pipeline the time of a micro-batch and the time of the end of a step. With `n` repeats of the slowest, `n · time + end` bounds a stage's share from below.
//!
//! A multiple-choice knapsack with counts, for each bound on workspace and ring (of which an arena has one, for its largest layer). Three answers:
//! - [`relaxed`](Store::relaxed), and sooner but not as close [`loose`](Store::loose): the linear relaxation: no way of running the bag is better;
//! - [`rounded`](Store::rounded): its rounding, which can be run: at most one layer's worth from the best;
//! - [`front`](Store::front): the exact Pareto set. Counts are decided choice by choice; a label is (time, end, bytes), and is dropped if another with as many layers is
//!   no worse in any, if it cannot fit, or if its plan cannot beat the incumbent ([`Outlook`]). That last bound prices bytes at the relaxation's price (Lagrange): what
//!   a choice costs above the cheapest at this price is lost for good, so only few choices and few of each survive.
//!
//! Bytes are counted as they are: no cells, no margin.

use crate::expansion::{Effort, Expansion};
use crate::menu::Choice;
use crate::objective::{Home, StageTime};
use crate::outlook::{Outlook, Slope, Weights};
use crate::relaxation::{Hull, Lp, lp};
use crate::shelf::{Item, Load, Shelf, Stock};
use dplan_ir::pipeline::Slots;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Layers of one row ([`crate::menu`]), in the same position towards the tied parameter, on virtual stages that keep as many micro-batches.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Group {
    pub row: usize,
    pub home: Home,
    pub slots: Slots,
    pub count: usize,
}

impl Group {
    fn place(&self) -> Place {
        (self.row, self.home, self.slots)
    }
}

/// A way of running a stage.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Point {
    pub time: u64,
    pub end: u64,
    /// How many layers of which group of the bag make which choice.
    pub counts: Rc<[(usize, u32, usize)]>,
}

#[derive(Clone, Debug)]
pub struct Front {
    pub points: Vec<Point>,
    /// Whether every point that could be part of a wanted plan is there.
    pub complete: bool,
}

/// Lower bounds on a stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Relaxed {
    pub time: u64,
    pub end: u64,
    /// On `n · time + end`.
    pub joint: u64,
    /// The ring and the workspace under which it is least.
    pub within: (u64, u64),
}

impl Relaxed {
    pub fn apart(&self) -> StageTime {
        StageTime { time: self.time, end: self.end }
    }
    /// The lesser of each.
    fn least(self, other: Relaxed) -> Relaxed {
        let joint = if other.joint < self.joint { other } else { self };
        Relaxed { time: self.time.min(other.time), end: self.end.min(other.end), ..joint }
    }
}

/// One layer of a row, at a home, on a virtual stage that keeps so much.
type Place = (usize, Home, Slots);

/// The choices of a tuple, arranged for stages.
pub struct Store<'a> {
    menus: &'a [Vec<Choice>],
    repeats: u64,
    stocks: RefCell<HashMap<Place, Rc<Stock>>>,
    /// By place and bounds on ring and workspace; nothing if no way keeps them.
    shelves: RefCell<HashMap<(Place, u64, u64), Option<Rc<Shelf>>>>,
}

impl<'a> Store<'a> {
    pub fn new(menus: &'a [Vec<Choice>], repeats: u64) -> Store<'a> {
        Store { menus, repeats, stocks: RefCell::default(), shelves: RefCell::default() }
    }

    /// Bounds on every way of running a bag in so much room that are found at once, as if the smallest ring and workspace were enough; nothing if it never fits.
    pub fn loose(&self, bag: &[Group], room: u64) -> Option<Relaxed> {
        let all = self.shelves(bag, u64::MAX, u64::MAX)?;
        let ring = all.iter().map(|s| s.least.ring).max().unwrap_or(0);
        beside(bag, &all, room, (ring, least_workspace(&all)))
    }

    /// Bounds on every way of running a bag in so much room; nothing if there is none.
    pub fn relaxed(&self, bag: &[Group], room: u64) -> Option<Relaxed> {
        let mut best: Option<Relaxed> = None;
        let mut rings_before = 0;
        let all = self.shelves(bag, u64::MAX, u64::MAX)?;
        let workspaces = self.values(bag, |l| l.workspace);
        for ring in self.values(bag, |l| l.ring) {
            if !may_improve(&mut best, beside(bag, &all, room, (ring, least_workspace(&all)))) {
                break;
            }
            let Some(shelves) = self.shelves(bag, ring, u64::MAX) else { continue };
            if !news(&shelves, &mut rings_before) {
                continue;
            }
            let least = least_workspace(&shelves);
            // Of this ring: as many under another may be others.
            let mut before = 0;
            let mut within = |best: &mut Option<Relaxed>, workspace: u64| {
                if let Some(narrow) = self.shelves(bag, ring, workspace)
                    && news(&narrow, &mut before)
                    && let Some(here) = beside(bag, &narrow, room, (ring, workspace))
                {
                    *best = Some(best.map_or(here, |b| b.least(here)));
                }
            };
            // What would be used if it were free is often the best.
            if let Some(loose) = room.checked_sub(ring.saturating_add(least)).and_then(|free| lp(bag, &joint(&shelves), free)) {
                within(&mut best, used_workspace(&shelves, &loose));
            }
            for &workspace in workspaces.iter().filter(|&&w| w >= least) {
                if !may_improve(&mut best, beside(bag, &shelves, room, (ring, workspace))) {
                    break;
                }
                within(&mut best, workspace);
            }
        }
        best
    }

    /// Ways of running a bag that fit and are nearly the best, `border` included in their times. There is one wherever `relaxed` is known.
    pub fn rounded(&self, bag: &[Group], room: u64, border: StageTime, outlook: &Outlook, relaxed: &Relaxed) -> Vec<Point> {
        if let [group @ Group { count: 1, .. }] = bag {
            return self.single(group.place(), room, border, outlook);
        }
        let (ring, workspace) = relaxed.within;
        let Some(shelves) = self.shelves(bag, ring, workspace) else { return Vec::new() };
        let free = room.saturating_sub(ring.saturating_add(workspace));
        let Some(lp) = lp(bag, &joint(&shelves), free) else { return Vec::new() };
        let mut chosen: Vec<(usize, Item, usize)> = Vec::new();
        for (at, (corners, shelf)) in lp.corners.iter().zip(&shelves).enumerate() {
            for &(corner, count) in corners.iter().filter(|c| c.1 > 0) {
                chosen.push((at, shelf.item(shelf.joint[corner].2), count));
            }
        }
        self.fill(&mut chosen, &shelves, free);
        let sum = |of: fn(&Load) -> u64| chosen.iter().map(|(_, (load, _), count)| *count as u64 * of(load)).sum::<u64>();
        let StageTime { time, end } = StageTime { time: sum(|l| l.time), end: sum(|l| l.end) } + border;
        let counts: Vec<(usize, u32, usize)> = chosen.iter().map(|&(at, (_, choice), count)| (at, choice, count)).collect();
        vec![Point { time, end, counts: counts.into() }]
    }

    /// Spends the bytes that rounding left: one layer after another takes the choice that saves most and still fits.
    fn fill(&self, chosen: &mut Vec<(usize, Item, usize)>, shelves: &[Rc<Shelf>], free: u64) {
        let cost = |l: &Load| self.repeats * l.time + l.end;
        let mut used: u64 = chosen.iter().map(|(_, (load, _), count)| *count as u64 * load.bytes).sum();
        loop {
            let mut best: Option<(u64, usize, Item)> = None;
            for (place, (at, (was, _), _)) in chosen.iter().enumerate() {
                for &(load, choice) in shelves[*at].items() {
                    let saved = cost(was).saturating_sub(cost(&load));
                    if saved > best.map_or(0, |b| b.0) && used - was.bytes + load.bytes <= free {
                        best = Some((saved, place, (load, choice)));
                    }
                }
            }
            let Some((_, place, item)) = best else { break };
            let (at, was, _) = chosen[place];
            used = used - was.0.bytes + item.0.bytes;
            chosen[place].2 -= 1;
            match chosen.iter_mut().find(|c| c.0 == at && c.1 == item) {
                Some(same) => same.2 += 1,
                None => chosen.push((at, item, 1)),
            }
            chosen.retain(|c| c.2 > 0);
        }
    }

    /// The Pareto set of a bag, `border` included in every time, as far as it can be part of a wanted plan. It is not complete if the effort is not enough.
    pub fn front(&self, bag: &[Group], room: u64, border: StageTime, outlook: &Outlook, effort: &mut Effort<'_>) -> Front {
        if let [group @ Group { count: 1, .. }] = bag {
            return Front { points: self.single(group.place(), room, border, outlook), complete: true };
        }
        let mut front = Front { points: Vec::new(), complete: true };
        self.each_bound(bag, room, border, outlook, |shelves, free| {
            let Some((slope, price)) = steepest(bag, shelves, free, border, outlook) else { return };
            let expansion = Expansion::new(bag, shelves, free, slope, price, outlook);
            front.complete &= expansion.run(border, &mut front.points, effort);
        });
        front.points = pareto(front.points);
        front
    }

    /// The Pareto set of one layer.
    fn single(&self, place: Place, room: u64, border: StageTime, outlook: &Outlook) -> Vec<Point> {
        let point = |&(load, choice): &Item| {
            let StageTime { time, end } = StageTime { time: load.time, end: load.end } + border;
            let wanted = load.arena() <= room && outlook.hopeful(time, end, self.repeats * time + end);
            wanted.then(|| Point { time, end, counts: [(0, choice, 1)].into() })
        };
        pareto(self.stock(place).items.iter().filter_map(point).collect())
    }

    /// Calls `visit` with every bound on workspace and ring under which the bag could be part of a wanted plan.
    fn each_bound(&self, bag: &[Group], room: u64, border: StageTime, outlook: &Outlook, mut visit: impl FnMut(&[Rc<Shelf>], u64)) {
        let hopeful = |shelves: &[Rc<Shelf>], ring: u64, workspace: u64| {
            let free = room.checked_sub(ring.saturating_add(workspace))?;
            let joint = lp(bag, &joint(shelves), free)?;
            let sum = |of: fn(&Load) -> u64| bag.iter().zip(shelves).map(|(g, s)| g.count as u64 * of(&s.least)).sum::<u64>();
            let StageTime { time, end } = StageTime { time: sum(|l| l.time), end: sum(|l| l.end) } + border;
            outlook.hopeful(time, end, joint.value + self.repeats * border.time + border.end).then_some(free)
        };
        let workspaces = self.values(bag, |l| l.workspace);
        let mut rings_before = 0;
        // Ways of running the layers, and the most bytes that they were given: with fewer they give nothing new.
        let mut visited: Vec<(Vec<Rc<Shelf>>, u64)> = Vec::new();
        let Some(all) = self.shelves(bag, u64::MAX, u64::MAX) else { return };
        for ring in self.values(bag, |l| l.ring) {
            let Some(Relaxed { time, end, joint, .. }) = beside(bag, &all, room, (ring, least_workspace(&all))) else { break };
            if !outlook.hopeful(time + border.time, end + border.end, joint + self.repeats * border.time + border.end) {
                break;
            }
            let Some(shelves) = self.shelves(bag, ring, u64::MAX) else { continue };
            let least = least_workspace(&shelves);
            if !news(&shelves, &mut rings_before) || hopeful(&shelves, ring, least).is_none() {
                continue;
            }
            let mut before = 0;
            for &workspace in workspaces.iter().filter(|&&w| w >= least) {
                if hopeful(&shelves, ring, workspace).is_none() {
                    // Larger ones leave no more.
                    break;
                }
                let Some(shelves) = self.shelves(bag, ring, workspace) else { continue };
                if !news(&shelves, &mut before) {
                    continue;
                }
                if let Some(free) = hopeful(&shelves, ring, workspace) {
                    let same = |a: &[Rc<Shelf>]| a.iter().zip(&shelves).all(|(a, b)| a.items() == b.items());
                    if !visited.iter().any(|(shelves, most)| *most >= free && same(shelves)) {
                        visit(&shelves, free);
                        visited.push((shelves, free));
                    }
                }
            }
        }
    }

    /// The values of one size among all ways of running the bag's layers, from the least that all of them can keep.
    fn values(&self, bag: &[Group], of: fn(&Load) -> u64) -> Vec<u64> {
        let stocks: Vec<Rc<Stock>> = bag.iter().map(|g| self.stock(g.place())).collect();
        let least = stocks.iter().map(|stock| stock.items.iter().map(|i| of(&i.0)).min().unwrap_or(0)).max().unwrap_or(0);
        let mut values: Vec<u64> = stocks.iter().flat_map(|stock| stock.items.iter().map(|i| of(&i.0))).filter(|&v| v >= least).collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    fn stock(&self, place: Place) -> Rc<Stock> {
        let (row, home, slots) = place;
        Rc::clone(self.stocks.borrow_mut().entry(place).or_insert_with(|| Rc::new(Stock::new(&self.menus[row], home, slots))))
    }

    /// The shelves of a bag's groups; nothing if one cannot keep the bounds.
    fn shelves(&self, bag: &[Group], ring: u64, workspace: u64) -> Option<Vec<Rc<Shelf>>> {
        let one = |group: &Group| {
            let place = group.place();
            let mut known = self.shelves.borrow_mut();
            known.entry((place, ring, workspace)).or_insert_with(|| Shelf::new(self.stock(place), ring, workspace, self.repeats).map(Rc::new)).clone()
        };
        bag.iter().map(one).collect()
    }
}

/// What a bag takes at least beside a ring and a workspace of these sizes, if its layers may run in every way of their shelves; nothing if nothing fits. Beside larger ones it
/// takes no less.
fn beside(bag: &[Group], shelves: &[Rc<Shelf>], room: u64, within: (u64, u64)) -> Option<Relaxed> {
    let free = room.checked_sub(within.0.saturating_add(within.1))?;
    let times: Vec<&Hull> = shelves.iter().map(|s| &s.time).collect();
    let (time, joint) = (lp(bag, &times, free)?, lp(bag, &joint(shelves), free)?);
    let end = bag.iter().zip(shelves).map(|(g, s)| g.count as u64 * s.least.end).sum();
    Some(Relaxed { time: time.value, end, joint: joint.value, within })
}

/// The slope under which the relaxation of a bag shows most, and what a byte is worth there; nothing if that leaves no wanted plan.
fn steepest(bag: &[Group], shelves: &[Rc<Shelf>], free: u64, border: StageTime, outlook: &Outlook) -> Option<(Slope, (u64, u64))> {
    let mut best: Option<(u128, Slope, (u64, u64))> = None;
    let mut weights = Weights::MOST;
    for step in Weights::STEPS {
        let slope = outlook.slope(weights);
        let hulls: Vec<Hull> = shelves.iter().map(|s| s.hull(|l| slope.cost(l.time, l.end))).collect();
        let lp = lp(bag, &hulls.iter().collect::<Vec<_>>(), free)?;
        let left = slope.limit.checked_sub(u128::from(lp.value + slope.cost(border.time, border.end))).filter(|&left| left > 0)?;
        if best.is_none_or(|(least, ..)| left < least) {
            best = Some((left, slope, lp.price));
        }
        let at = lp.corners.iter().zip(&hulls).zip(shelves).flat_map(|((corners, hull), shelf)| {
            corners.iter().filter(|c| c.1 > 0).map(|&(corner, count)| {
                let (Load { time, end, .. }, _) = shelf.item(hull[corner].2);
                StageTime { time: count as u64 * time, end: count as u64 * end }
            })
        });
        let StageTime { time, end } = at.sum::<StageTime>() + border;
        let next = weights.toward(outlook, time, end, step);
        if next == weights {
            break;
        }
        weights = next;
    }
    best.map(|(_, slope, price)| (slope, price))
}

fn joint(shelves: &[Rc<Shelf>]) -> Vec<&Hull> {
    shelves.iter().map(|s| &s.joint).collect()
}

/// How near bounds are told apart, as a part of them.
const NEAR: u64 = 256;

/// Whether what takes this at least could be much below the best; if not, it counts as it is.
fn may_improve(best: &mut Option<Relaxed>, widest: Option<Relaxed>) -> bool {
    let (Some(best), Some(widest)) = (best, widest) else { return widest.is_some() };
    let less = |widest: u64, best: u64| widest < best - best / NEAR;
    let improves = less(widest.time, best.time) || less(widest.joint, best.joint);
    if !improves {
        *best = Relaxed { within: best.within, ..best.least(widest) };
    }
    improves
}

/// Whether bounds allow more than those before: wider ones that do not are no other bounds.
fn news(shelves: &[Rc<Shelf>], before: &mut usize) -> bool {
    let allowed = shelves.iter().map(|s| s.allowed).sum();
    allowed != std::mem::replace(before, allowed)
}

/// The least that every layer can keep.
fn least_workspace(shelves: &[Rc<Shelf>]) -> u64 {
    shelves.iter().map(|s| s.least.workspace).max().unwrap_or(0)
}

/// What a relaxation uses if workspace is free.
fn used_workspace(shelves: &[Rc<Shelf>], loose: &Lp) -> u64 {
    let used = |(corners, shelf): (&[(usize, usize); 2], &Rc<Shelf>)| {
        let used = corners.iter().filter(|c| c.1 > 0).map(|c| shelf.item(shelf.joint[c.0].2).0.workspace);
        used.max().unwrap_or(0)
    };
    loose.corners.iter().zip(shelves).map(used).max().unwrap_or(0).max(least_workspace(shelves))
}

/// Points that no other matches in time and end; of equal ones the first.
fn pareto(mut points: Vec<Point>) -> Vec<Point> {
    points.sort_by_key(|p| (p.time, p.end));
    let mut kept: Vec<Point> = Vec::new();
    for point in points {
        if kept.last().is_none_or(|k| point.end < k.end) {
            kept.push(point);
        }
    }
    kept
}

/// Groups in the order in which layers are added: the most numerous last.
pub fn sorted(mut bag: Vec<Group>) -> Vec<Group> {
    bag.sort_unstable_by_key(|g| (g.count, g.row, g.home, g.slots));
    bag
}

/// The least arena that a bag can run in: for each bound on workspace and ring, every layer takes its least bytes.
pub fn least_arena(menus: &[Vec<Choice>], bag: &[Group]) -> u64 {
    let sizes: Vec<Vec<Load>> = bag.iter().map(|g| sizes(&menus[g.row], g.home, g.slots)).collect();
    let values = |of: fn(&Load) -> u64| {
        // No bound below what every layer needs at least is worth trying.
        let floor = sizes.iter().map(|group| group.iter().map(of).min().unwrap_or(0)).max().unwrap_or(0);
        let mut values: Vec<u64> = sizes.iter().flatten().map(of).filter(|&v| v >= floor).collect();
        values.sort_unstable();
        values.dedup();
        values
    };
    let (workspaces, rings) = (values(|l| l.workspace), values(|l| l.ring));
    let mut best = u64::MAX;
    for &workspace in &workspaces {
        for &ring in &rings {
            let mut total = workspace + ring;
            for (group, sizes) in bag.iter().zip(&sizes) {
                let fits = sizes.iter().filter(|l| l.workspace <= workspace && l.ring <= ring);
                total = fits.map(|l| l.bytes).min().map_or(u64::MAX, |b| total.saturating_add(b.saturating_mul(group.count as u64)));
            }
            best = best.min(total);
        }
    }
    best
}

/// The Pareto set of bytes, workspace and ring of one layer.
fn sizes(menu: &[Choice], home: Home, slots: Slots) -> Vec<Load> {
    let mut kept: Vec<Load> = Vec::new();
    for choice in menu {
        let load = Load { time: 0, end: 0, ..Load::of(choice, home, slots) };
        if !kept.iter().any(|k| k.covers(&load)) {
            kept.retain(|k| !load.covers(k));
            kept.push(load);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use dplan_ir::splitmix;

    /// Against all ways of all layers, where each has its own workspace and ring; and with its frame elsewhere two of them in the ring, and more time.
    #[test]
    fn no_way_of_running_a_bag_is_better_than_its_relaxation() {
        let (mut random, mut kept) = (3, 0);
        for round in 0..20_000 {
            let mut draw = |from: u64, to: u64| from + splitmix::next(&mut random) % (to - from);
            let repeats = draw(1, 5);
            let mut menu = |_| -> Vec<Choice> {
                let count = draw(1, 6);
                let mut choices = Vec::new();
                for _ in 0..count {
                    let (StageTime { time, end }, states) = (StageTime { time: draw(1, 100), end: draw(0, 50) }, draw(1, 60));
                    let (workspace, ring, frame) = (draw(0, 4) * 9, draw(0, 4) * 9, if round % 2 == 0 { 0 } else { draw(0, 30) });
                    choices.push(Choice::that_takes(StageTime { time, end }, states + frame, workspace, ring));
                    if frame > 0 {
                        choices.push(Choice::that_takes(StageTime { time: time + frame / 3, end }, states, workspace, ring + 2 * frame));
                    }
                }
                choices
            };
            let menus: Vec<Vec<Choice>> = (0..2).map(&mut menu).collect();
            let room = draw(20, 200);
            let group = |row: usize, count: usize| Group { row, home: Home::Together, slots: Slots { frames: 1, held: 0, versions: 0 }, count };
            let bag = if draw(0, 3) == 0 { vec![group(0, 1)] } else { vec![group(0, draw(1, 3) as usize), group(1, 1)] };
            let layers = bag.iter().flat_map(|group| std::iter::repeat_n(group, group.count));
            let mut ways = vec![Load::default()];
            for group in layers {
                let loads: Vec<Load> = menus[group.row].iter().map(|choice| Load::of(choice, group.home, group.slots)).collect();
                let with = |a: &Load, b: &Load| Load {
                    time: a.time + b.time,
                    end: a.end + b.end,
                    bytes: a.bytes + b.bytes,
                    workspace: a.workspace.max(b.workspace),
                    ring: a.ring.max(b.ring),
                };
                ways = ways.iter().flat_map(|a| loads.iter().map(move |b| with(a, b))).collect();
            }
            ways.retain(|way| way.arena() <= room);
            let store = Store::new(&menus, repeats);
            for found in [store.relaxed(&bag, room), store.loose(&bag, room)] {
                for way in &ways {
                    let bound = found.unwrap_or_else(|| panic!("{bag:?} fits in {room}: {way:?}"));
                    assert!(bound.time <= way.time && bound.end <= way.end, "{bound:?} of {bag:?} in {room}, and {way:?}");
                    assert!(bound.joint <= repeats * way.time + way.end, "{bound:?} of {bag:?} in {room}, and {way:?}");
                    kept += 1;
                }
            }
        }
        assert!(kept > 100_000, "{kept}");
    }
}
