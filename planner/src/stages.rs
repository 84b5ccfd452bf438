//! All stages of one tuple, exactly: which layers go on which stage, and how each layer runs.
//!
//! Three passes of one dynamic program over (stages done, layers used). Stages may hold any number of layers; there is no window around an even cut.
//! 1. *Relaxed*: with every stage at its linear relaxation, the least sum, slowest stage and longest end of all stages before and behind each stage. A stage that cannot
//!    be part of a plan below the incumbent is left out of what follows; if none is left, that is the proof that the tuple holds nothing better.
//! 2. *Rounded*: with every stage at a plan that can be run and is nearly its best. It only lowers the incumbent.
//! 3. *Exact*: with every stage's Pareto set. A label is (sum of stage times, slowest stage, longest end of step); one that another matches in all three is dropped, and so is
//!    one whose completion cannot beat the incumbent.
//!
//! With several virtual stages on each stage the layers of a stage are not next to each other, and a program over layers in order would have to remember them all:
//! such tuples are cut in fewer ways ([`crate::virtual_stages`]).
//!
//! What a stage contains is a bag of layers, so stages with equal bags, room and outlook are solved once.

use crate::expansion::{Effort, Staircase};
use crate::menu::{Choice, Menus};
use crate::objective::{Home, StageTime, repeats, total};
use crate::outlook::Outlook;
use crate::stage::{Front, Group, Point, Relaxed, Store, least_arena, sorted};
use crate::virtual_stages;
use dplan_ir::pipeline::Slots;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// The best plan found for a tuple.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Solution {
    pub objective: u64,
    /// First and last layer (inclusive) of each virtual stage.
    pub stages: Vec<(usize, usize)>,
    /// For each layer, which choice of its row's menu.
    pub choices: Vec<u32>,
}

/// What solving a tuple showed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Solved {
    /// The best plan below the cut that was found.
    pub best: Option<Solution>,
    /// No plan of the tuple is below this, if that is below the cut: of an exact solution the best plan's objective, or less if the exact pass had to give up.
    pub bound: u64,
    /// Whether it did not.
    pub complete: bool,
}

impl Solved {
    fn nothing(cut: u64) -> Solved {
        Solved { best: None, bound: cut, complete: true }
    }
}

/// A tuple, its layers, and bounds that do not depend on what is chosen.
pub struct Stages<'a> {
    pub(crate) menus: &'a Menus,
    /// Kind of each layer.
    pub(crate) layers: &'a [usize],
    pub(crate) budget: u64,
    /// How often the slowest stage counts.
    pub(crate) repeats: u64,
    /// Least of what a layer of each kind adds, on whichever site.
    least: Vec<StageTime>,
    /// Sums of it over the first layers.
    pub(crate) before: Vec<StageTime>,
    /// By kind: layers among the first ones.
    count_before: Vec<Vec<usize>>,
    /// Sums of least borders over the first virtual stages.
    pub(crate) border_before: Vec<StageTime>,
    pub(crate) store: Store<'a>,
    /// Room of each stage.
    pub(crate) rooms: Vec<u64>,
    bags: RefCell<HashMap<(usize, usize, Slots, usize), Rc<[Group]>>>,
    loose: Relaxations,
    close: Relaxations,
    least_arenas: RefCell<HashMap<Rc<[Group]>, u64>>,
}

/// Of bags in so much room.
type Relaxations = RefCell<HashMap<(Rc<[Group]>, u64), Option<Relaxed>>>;

struct Label {
    sum: u64,
    slowest: u64,
    end: u64,
    /// First layer of this stage, and which label of the stage before this one continues.
    start: usize,
    from: usize,
    point: Point,
}

/// A stage that may be part of a wanted plan, and what is known about all others.
struct Candidate {
    start: usize,
    end: usize,
    bag: Rc<[Group]>,
    border: StageTime,
    /// What it takes at least, its border included.
    relaxed: Relaxed,
    outlook: Outlook,
    /// What the stages behind it take at least.
    rest: Extremes,
    /// No plan with this stage is below this.
    bound: u64,
}

/// The least sum, slowest stage and longest end of some stages.
type Extremes = (u64, u64, u64);

const NOTHING: Extremes = (u64::MAX / 8, u64::MAX / 8, u64::MAX / 8);

fn least(a: Extremes, b: Extremes) -> Extremes {
    (a.0.min(b.0), a.1.min(b.1), a.2.min(b.2))
}
fn most(a: Extremes, b: Extremes) -> Extremes {
    (a.0.max(b.0), a.1.max(b.1), a.2.max(b.2))
}
fn extremes(of: StageTime) -> Extremes {
    (of.time, of.time, of.end)
}
fn joined(a: Extremes, b: Extremes) -> Extremes {
    (a.0 + b.0, a.1.max(b.1), a.2.max(b.2))
}

impl<'a> Stages<'a> {
    pub fn new(menus: &'a Menus, layers: &'a [usize], budget: u64) -> Stages<'a> {
        let kinds = menus.tied.len();
        let least_of = |kind: usize| {
            let shares = || menus.rows(kind).flat_map(|row| &menus.choices[row]).flat_map(|c| Home::ALL.map(|h| c.share(h)));
            StageTime { time: shares().map(|s| s.time).min().unwrap_or(0), end: shares().map(|s| s.end).min().unwrap_or(0) }
        };
        let least: Vec<StageTime> = (0..kinds).map(least_of).collect();
        let mut before = vec![StageTime::default()];
        before.extend(layers.iter().scan(StageTime::default(), |sum, &kind| {
            *sum = *sum + least[kind];
            Some(*sum)
        }));
        let mut count_before = vec![vec![0; layers.len() + 1]; kinds];
        for (kind, counts) in count_before.iter_mut().enumerate() {
            for (at, &of) in layers.iter().enumerate() {
                counts[at + 1] = counts[at] + usize::from(of == kind);
            }
        }
        let pipeline = menus.tuple.pipeline();
        let mut border_before = vec![StageTime::default()];
        for virtual_stage in 0..pipeline.all_virtual() {
            border_before.push(border_before[virtual_stage as usize] + menus.least_border(virtual_stage));
        }
        let repeats = repeats(&pipeline);
        Stages {
            menus,
            layers,
            budget,
            repeats,
            least,
            before,
            count_before,
            border_before,
            store: Store::new(&menus.choices, repeats),
            rooms: (0..menus.tuple.pp).map(|s| menus.room(budget, s).unwrap_or(0)).collect(),
            bags: RefCell::default(),
            loose: Relaxations::default(),
            close: Relaxations::default(),
            least_arenas: RefCell::default(),
        }
    }

    /// The best plan below `cut`, if there is one, and the effort is enough.
    pub fn solve(&self, cut: u64, effort: &mut Effort<'_>) -> Solved {
        if self.menus.tuple.virtual_stages > 1 {
            return virtual_stages::solve(self, cut, effort);
        }
        let Some(candidates) = self.relaxed(cut) else { return Solved::nothing(cut) };
        let mut known: HashMap<(Rc<[Group]>, u64, StageTime, Outlook), Rc<Front>> = HashMap::new();
        let mut complete = true;
        let best = self.combine(&candidates, cut, |store, stage, c| {
            let room = self.rooms[stage];
            let key = (Rc::clone(&c.bag), room, c.border, c.outlook);
            let front = known.entry(key).or_insert_with(|| Rc::new(store.front(&c.bag, room, c.border, &c.outlook, effort)));
            complete &= front.complete;
            Rc::clone(front)
        });
        let found = best.as_ref().map_or(cut, |s| s.objective);
        let bound = if complete { found } else { floor(&candidates, cut).min(found) };
        Solved { best, bound, complete }
    }

    /// A plan below `cut` that is nearly the best, if relaxation and rounding find one; `bound` is what the relaxation shows.
    pub fn rounded(&self, cut: u64) -> Solved {
        if self.menus.tuple.virtual_stages > 1 {
            return virtual_stages::solve(self, cut, &mut virtual_stages::little());
        }
        let Some(candidates) = self.relaxed(cut) else { return Solved::nothing(cut) };
        let best = self.combine(&candidates, cut, |store, stage, c| {
            let relaxed = self.relax(stage, &c.bag);
            let points = relaxed.map(|relaxed| store.rounded(&c.bag, self.rooms[stage], c.border, &c.outlook, &relaxed));
            Rc::new(Front { points: points.unwrap_or_default(), complete: true })
        });
        Solved { best, bound: floor(&candidates, cut), complete: true }
    }

    /// For each stage, the layers it may hold in a plan below the cut; nothing if there is no such plan.
    fn relaxed(&self, cut: u64) -> Option<Vec<Vec<Candidate>>> {
        let mut table = self.wanted(self.reachable(cut)?, cut)?;
        for (stage, row) in table.iter_mut().enumerate() {
            row.retain_mut(|c| {
                let relaxed = self.relax(stage, &c.bag);
                c.relaxed = relaxed.map_or(c.relaxed, |relaxed| self.with_border(relaxed, c.border));
                relaxed.is_some()
            });
        }
        self.wanted(table, cut)
    }

    /// All stages that could be reached, with what they take at least.
    fn reachable(&self, cut: u64) -> Option<Vec<Vec<Candidate>>> {
        let (stages, layers) = (self.menus.tuple.pp as usize, self.layers.len());
        let (n, constant) = (self.repeats, self.menus.constant);
        let earliest = self.earliest_starts()?;
        let mut table: Vec<Vec<Candidate>> = Vec::with_capacity(stages);
        let mut before: BTreeMap<usize, Extremes> = BTreeMap::from([(0, (0, 0, 0))]);
        for stage in 0..stages {
            let mut row = Vec::new();
            let mut next: BTreeMap<usize, Extremes> = BTreeMap::new();
            let last_end = layers - (stages - stage - 1);
            for (&start, &so_far) in &before {
                let first_end = if stage + 1 == stages { layers } else { earliest[stage + 1].max(start + 1) };
                for end in first_end..=last_end {
                    let inside = self.before[end] - self.before[start];
                    if constant + self.before[layers].time + (n - 1) * inside.time + inside.end >= cut {
                        // More layers only make it slower.
                        break;
                    }
                    let border = self.menus.border(stage as u64, end - 1);
                    let rest = self.rest(stage + 1, end);
                    if self.reach(joined(so_far, extremes(inside + border)), rest) >= cut {
                        continue;
                    }
                    let bag = self.bag(stage, start, end);
                    let Some(relaxed) = self.relax_loosely(stage, &bag) else { break };
                    let relaxed = self.with_border(relaxed, border);
                    let here = joined(so_far, extremes(relaxed.apart()));
                    if self.reach(here, rest) >= cut {
                        continue;
                    }
                    let place = next.entry(end).or_insert(NOTHING);
                    *place = least(*place, here);
                    let outlook = Outlook { cut, repeats: n, others: 0, slowest: 0, end: 0, constant };
                    row.push(Candidate { start, end, bag, border, relaxed, outlook, rest, bound: 0 });
                }
            }
            table.push(row);
            before = next;
        }
        Some(table)
    }

    /// Those stages that may be part of a plan below the cut by what the others take at least, with that; nothing if some stage cannot.
    fn wanted(&self, table: Vec<Vec<Candidate>>, cut: u64) -> Option<Vec<Vec<Candidate>>> {
        let stages = table.len();
        let mut before: Vec<BTreeMap<usize, Extremes>> = vec![BTreeMap::from([(0, (0, 0, 0))])];
        for row in &table {
            let mut next: BTreeMap<usize, Extremes> = BTreeMap::new();
            for c in row {
                let Some(&so_far) = before[before.len() - 1].get(&c.start) else { continue };
                let here = joined(so_far, extremes(c.relaxed.apart()));
                if self.reach(here, c.rest) < cut {
                    let place = next.entry(c.end).or_insert(NOTHING);
                    *place = least(*place, here);
                }
            }
            before.push(next);
        }
        // From behind: what the stages from here on take at least, if they start at a layer.
        let mut behind: Vec<BTreeMap<usize, Extremes>> = vec![BTreeMap::new(); stages + 1];
        behind[stages].insert(self.layers.len(), (0, 0, 0));
        for stage in (0..stages).rev() {
            let mut here: BTreeMap<usize, Extremes> = BTreeMap::new();
            for c in &table[stage] {
                if let Some(&rest) = behind[stage + 1].get(&c.end) {
                    let place = here.entry(c.start).or_insert(NOTHING);
                    *place = least(*place, joined(extremes(c.relaxed.apart()), rest));
                }
            }
            behind[stage] = here;
        }
        let mut candidates = Vec::with_capacity(stages);
        for (stage, row) in table.into_iter().enumerate() {
            let wanted = row.into_iter().filter_map(|c| {
                let rest = *behind[stage + 1].get(&c.end)?;
                let (others, slowest, end) = joined(*before[stage].get(&c.start)?, rest);
                let outlook = Outlook { others, slowest, end, ..c.outlook };
                let bound = outlook.bound(c.relaxed.time, c.relaxed.end, c.relaxed.joint);
                (bound < cut).then_some(Candidate { outlook, rest: most(rest, c.rest), bound, ..c })
            });
            let wanted: Vec<Candidate> = wanted.collect();
            if wanted.is_empty() {
                return None;
            }
            candidates.push(wanted);
        }
        Some(candidates)
    }

    /// What a plan takes at least whose first stages take this at least, and the others that.
    fn reach(&self, so_far: Extremes, rest: Extremes) -> u64 {
        let (sum, slowest, ends) = joined(so_far, rest);
        sum + (self.repeats - 1) * slowest + ends + self.menus.constant
    }

    /// The best plan below the cut whose stages are candidates run at a point of their fronts.
    fn combine(
        &self,
        candidates: &[Vec<Candidate>],
        cut: u64,
        mut solve: impl FnMut(&Store<'a>, usize, &Candidate) -> Rc<Front>,
    ) -> Option<Solution> {
        let (stages, layers) = (candidates.len(), self.layers.len());
        let (n, constant) = (self.repeats, self.menus.constant);
        let mut done: Vec<BTreeMap<usize, Vec<Label>>> = Vec::with_capacity(stages);
        for (stage, row) in candidates.iter().enumerate() {
            let mut next: BTreeMap<usize, Vec<Label>> = BTreeMap::new();
            for candidate in row {
                let (start, end) = (candidate.start, candidate.end);
                let befores: Vec<(usize, Extremes)> = match stage {
                    0 => vec![(0, (0, 0, 0))],
                    _ => match done[stage - 1].get(&start) {
                        Some(labels) => labels.iter().map(|l| (l.sum, l.slowest, l.end)).enumerate().collect(),
                        None => continue,
                    },
                };
                let front = solve(&self.store, stage, candidate);
                for (from, so_far) in befores {
                    for point in &front.points {
                        let (sum, slowest, ended) = joined(so_far, extremes(StageTime { time: point.time, end: point.end }));
                        let (whole, most, longest) = joined((sum, slowest, ended), candidate.rest);
                        if whole + (n - 1) * most + longest + constant < cut {
                            let label = Label { sum, slowest, end: ended, start, from, point: point.clone() };
                            next.entry(end).or_default().push(label);
                        }
                    }
                }
            }
            next.values_mut().for_each(pareto);
            done.push(next);
        }
        let last = done[stages - 1].get(&layers)?;
        let finished = |l: &Label| l.sum + (n - 1) * l.slowest + l.end;
        let best = (0..last.len()).min_by_key(|&i| finished(&last[i]))?;
        Some(self.trace(&done, best))
    }

    /// What a stage with these layers takes at least.
    pub(crate) fn relax(&self, stage: usize, bag: &Rc<[Group]>) -> Option<Relaxed> {
        let key = (Rc::clone(bag), self.rooms[stage]);
        *self.close.borrow_mut().entry(key).or_insert_with(|| self.store.relaxed(bag, self.rooms[stage]))
    }

    /// The same at once, and not as close.
    fn relax_loosely(&self, stage: usize, bag: &Rc<[Group]>) -> Option<Relaxed> {
        let key = (Rc::clone(bag), self.rooms[stage]);
        *self.loose.borrow_mut().entry(key).or_insert_with(|| self.store.loose(bag, self.rooms[stage]))
    }

    /// The same with messages.
    pub(crate) fn with_border(&self, of: Relaxed, border: StageTime) -> Relaxed {
        let StageTime { time, end } = border;
        Relaxed { time: of.time + time, end: of.end + end, joint: of.joint + self.repeats * time + end, ..of }
    }

    /// The least number of bytes by which every plan of this tuple misses the budget (0 if one fits), and the stage that misses it by so many; nothing if that
    /// is `bound` or more.
    pub fn shortage(&self, bound: u64) -> Option<(u64, usize)> {
        if self.menus.tuple.virtual_stages > 1 {
            return virtual_stages::shortage(self, bound);
        }
        let fits = |extra: u64| self.greedy_cut(self.budget.saturating_add(extra));
        let mut cuts = fits(bound.checked_sub(1)?)?;
        // The smallest number of extra bytes with which the greedy cut succeeds: exact, because a stage's least arena grows with its layers.
        let (mut low, mut high) = (0, bound - 1);
        while low < high {
            let extra = low + (high - low) / 2;
            match fits(extra) {
                Some(found) => (cuts, high) = (found, extra),
                None => low = extra + 1,
            }
        }
        let excess = |s: usize| match self.menus.room(self.budget, s as u64) {
            Some(room) => self.least_stage_arena(s, cuts[s], cuts[s + 1]).saturating_sub(room),
            None => u64::MAX,
        };
        let worst = (0..cuts.len() - 1).rev().max_by_key(|&s| excess(s))?;
        Some((high, worst))
    }

    /// Bytes that a stage with these layers needs at least.
    fn least_stage_arena(&self, stage: usize, start: usize, end: usize) -> u64 {
        self.least_arena(&self.bag(stage, start, end))
    }

    /// Bytes that a bag needs at least.
    pub(crate) fn least_arena(&self, bag: &Rc<[Group]>) -> u64 {
        if let Some(&known) = self.least_arenas.borrow().get(bag) {
            return known;
        }
        let least = least_arena(&self.menus.choices, bag);
        self.least_arenas.borrow_mut().insert(Rc::clone(bag), least);
        least
    }

    /// Cuts of the layers into stages that fit a budget, the later stages as full as they can be.
    fn greedy_cut(&self, budget: u64) -> Option<Vec<usize>> {
        let mut cuts = vec![self.layers.len()];
        for stage in (0..self.menus.tuple.pp as usize).rev() {
            let end = cuts[cuts.len() - 1];
            let room = self.menus.room(budget, stage as u64)?;
            // Every stage before this one keeps a layer.
            let mut start = end;
            while start > stage && self.least_stage_arena(stage, start - 1, end) <= room {
                start -= 1;
            }
            if start == end || stage == 0 && start > 0 {
                return None;
            }
            cuts.push(start);
        }
        cuts.reverse();
        Some(cuts)
    }

    /// For each stage (and one past the last), the earliest layer that it can start with so that it and all later ones may fit; nothing if no cut may fit.
    fn earliest_starts(&self) -> Option<Vec<usize>> {
        let (stages, layers) = (self.menus.tuple.pp as usize, self.layers.len());
        let mut earliest = vec![layers; stages + 1];
        for stage in (0..stages).rev() {
            let room = self.menus.room(self.budget, stage as u64)?;
            let slots = self.menus.slots[stage][0];
            let of = |kind: usize| {
                let menu = &self.menus.choices[self.menus.row(stage, kind)];
                let states = |c: &Choice| Home::ALL.map(|h| c.terms(h).states).into_iter().min().unwrap_or(0);
                let bytes =
                    menu.iter().map(|c| states(c) + slots.frames * c.frame + slots.held * c.held + slots.versions * c.version).min().unwrap_or(0);
                let workspace = menu.iter().map(|c| c.workspace).min().unwrap_or(0);
                let ring = menu.iter().map(|c| c.terms(Home::Together).ring).min().unwrap_or(0);
                (bytes, workspace, ring)
            };
            let kinds: Vec<(u64, u64, u64)> = (0..self.least.len()).map(of).collect();
            let (mut start, mut bytes, mut workspace, mut ring) = (earliest[stage + 1], 0, 0, 0);
            while start > 0 {
                let least = kinds[self.layers[start - 1]];
                (bytes, workspace, ring) = (bytes + least.0, workspace.max(least.1), ring.max(least.2));
                if bytes + workspace + ring > room {
                    break;
                }
                start -= 1;
            }
            earliest[stage] = start;
        }
        (earliest[0] == 0).then_some(earliest)
    }

    /// The least sum, slowest stage and longest end of stages from `stage` on, for layers from `start` on.
    fn rest(&self, stage: usize, start: usize) -> (u64, u64, u64) {
        let (stages, layers) = (self.menus.tuple.pp as usize, self.layers.len());
        let over = stages - stage;
        if over == 0 {
            return (0, 0, 0);
        }
        let left = self.before[layers] - self.before[start] + (self.border_before[stages] - self.border_before[stage]);
        let count = |kind: usize| self.count_before[kind][layers] - self.count_before[kind][start];
        (left.time, self.spread(over, left.time, |least| least.time, &count), self.spread(over, left.end, |least| least.end, &count))
    }

    /// The most of any of `over` stages that share out a sum and layers of each kind: at least the mean, and the stage with most layers of a kind has its share rounded up.
    fn spread(&self, over: usize, sum: u64, of: fn(&StageTime) -> u64, count: &dyn Fn(usize) -> usize) -> u64 {
        let shares = (0..self.least.len()).map(|kind| count(kind).div_ceil(over) as u64 * of(&self.least[kind]));
        shares.max().unwrap_or(0).max(sum.div_ceil(over as u64))
    }

    /// The layers from `start` to before `end`, as a bag.
    fn bag(&self, stage: usize, start: usize, end: usize) -> Rc<[Group]> {
        let slots = self.menus.slots[stage][0];
        let key = (start, end, slots, self.menus.row(stage, 0));
        if let Some(known) = self.bags.borrow().get(&key) {
            return Rc::clone(known);
        }
        let row = |layer: usize| self.menus.row(stage, self.layers[layer]);
        let bag: Rc<[Group]> = bag((start..end).map(|layer| (row(layer), self.home(layer, &[(start, end)]), slots))).into();
        self.bags.borrow_mut().insert(key, Rc::clone(&bag));
        bag
    }

    /// How the homes of the tied parameter lie, seen from a layer on a stage of these ranges of layers (ends exclusive), in order.
    pub fn home(&self, layer: usize, stage: &[(usize, usize)]) -> Home {
        let tied = |l: usize| self.menus.tied[self.layers[l]];
        let here = |l: usize| stage.iter().any(|&(start, end)| (start..end).contains(&l));
        if !tied(layer) {
            Home::Together
        } else if (0..layer).any(|l| here(l) && tied(l)) {
            Home::Repeated
        } else if (0..self.layers.len()).any(|l| !here(l) && tied(l)) {
            Home::Apart
        } else {
            Home::Together
        }
    }

    /// The plan that ends in a label of the last stage.
    fn trace(&self, done: &[BTreeMap<usize, Vec<Label>>], best: usize) -> Solution {
        let mut stages = Vec::new();
        let mut times = Vec::new();
        let mut choices = vec![0; self.layers.len()];
        let (mut end, mut at) = (self.layers.len(), best);
        for (stage, row) in done.iter().enumerate().rev() {
            let label = &row[&end][at];
            let start = label.start;
            for (group, Group { row, home, .. }) in self.bag(stage, start, end).iter().enumerate() {
                let mut chosen: Vec<(u32, usize)> = label.point.counts.iter().filter(|c| c.0 == group).map(|c| (c.1, c.2)).collect();
                chosen.sort_unstable();
                let of_group = chosen.into_iter().flat_map(|(choice, count)| std::iter::repeat_n(choice, count));
                let members = (start..end).filter(|&l| self.menus.row(stage, self.layers[l]) == *row && self.home(l, &[(start, end)]) == *home);
                for (layer, choice) in members.zip(of_group) {
                    choices[layer] = choice;
                }
            }
            stages.push((start, end - 1));
            times.push(StageTime { time: label.point.time, end: label.point.end });
            (end, at) = (start, label.from);
        }
        stages.reverse();
        let objective = total(&times, &self.menus.tuple.pipeline(), self.menus.constant);
        Solution { objective, stages, choices }
    }
}

/// No plan below the cut is below this: it has one candidate of each stage.
fn floor(candidates: &[Vec<Candidate>], cut: u64) -> u64 {
    candidates.iter().filter_map(|row| row.iter().map(|c| c.bound).min()).max().unwrap_or(cut).min(cut)
}

/// Labels that no other matches in sum, slowest and end; of equal ones the first.
fn pareto(labels: &mut Vec<Label>) {
    labels.sort_by_key(|l| (l.sum, l.slowest, l.end));
    let mut stairs = Staircase::default();
    labels.retain(|l| stairs.admits(l.slowest, l.end));
}

/// Layers as a bag: how many there are of each row, home and slots.
pub(crate) fn bag(layers: impl Iterator<Item = (usize, Home, Slots)>) -> Vec<Group> {
    let mut bag: Vec<Group> = Vec::new();
    for (row, home, slots) in layers {
        match bag.iter_mut().find(|g| (g.row, g.home, g.slots) == (row, home, slots)) {
            Some(group) => group.count += 1,
            None => bag.push(Group { row, home, slots, count: 1 }),
        }
    }
    sorted(bag)
}
