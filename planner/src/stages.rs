//! All stages of one tuple, exactly: which layers go on which stage, and how each layer runs.
//!
//! A dynamic program over (stages done, layers used). A label is (sum of stage times, slowest stage, longest end of step); one that another matches in all three
//! is dropped, and so is one whose completion cannot beat the incumbent. Stages may hold any number of layers; there is no window around an even cut.
//! What a stage contains is a bag of layers, so stages with equal bags, room and messages are solved once.

use crate::menu::{Choice, Menus};
use crate::objective::{Home, StageTime, total};
use crate::stage::{Front, Group, Outlook, Point, front, least_arena, sorted};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The best plan found for a tuple.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Solution {
    pub objective: u64,
    /// First and last layer (inclusive) of each stage.
    pub stages: Vec<(usize, usize)>,
    /// For each layer, which choice of its kind's menu.
    pub choices: Vec<u32>,
}

/// How far the search inside a tuple goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effort {
    /// Everything that could be better than the cut: no result is a proof that there is nothing.
    Exact,
    /// Only the most promising labels.
    Beam(usize),
}

/// A tuple, its layers, and bounds that do not depend on what is chosen.
pub struct Stages<'a> {
    menus: &'a Menus,
    /// Kind of each layer.
    layers: &'a [usize],
    budget: u64,
    /// Least time and end of each kind's layers.
    least: Vec<(u64, u64)>,
    /// Sums of least times over the first layers.
    time_before: Vec<u64>,
    end_before: Vec<u64>,
    /// By kind: layers among the first ones.
    count_before: Vec<Vec<usize>>,
    /// Sums of least messages over the first stages.
    message_before: Vec<u64>,
    /// By bag and micro-batches in flight.
    least_arenas: RefCell<HashMap<(Vec<Group>, u64), u64>>,
}

struct Label {
    sum: u64,
    slowest: u64,
    end: u64,
    /// First layer of this stage, and which label of the stage before this one continues.
    start: usize,
    from: usize,
    front: Rc<Front>,
    point: Point,
}

/// What a front depends on.
type Key = (Vec<Group>, u64, u64, u64, Outlook);

impl<'a> Stages<'a> {
    pub fn new(menus: &'a Menus, layers: &'a [usize], budget: u64) -> Stages<'a> {
        let least_of = |menu: &Vec<Choice>| {
            let time = menu.iter().map(|c| c.terms(Home::Together).time).min().unwrap_or(0);
            let end = menu.iter().flat_map(|c| Home::ALL.map(|h| c.terms(h).end)).min().unwrap_or(0);
            (time, end)
        };
        let least: Vec<(u64, u64)> = menus.choices.iter().map(least_of).collect();
        let sums = |of: &dyn Fn(usize) -> u64| {
            let mut sums = vec![0; layers.len() + 1];
            for (at, &kind) in layers.iter().enumerate() {
                sums[at + 1] = sums[at] + of(kind);
            }
            sums
        };
        let time_before = sums(&|kind| least[kind].0);
        let end_before = sums(&|kind| least[kind].1);
        let mut count_before = vec![vec![0; layers.len() + 1]; menus.choices.len()];
        for (kind, counts) in count_before.iter_mut().enumerate() {
            for (at, &of) in layers.iter().enumerate() {
                counts[at + 1] = counts[at] + usize::from(of == kind);
            }
        }
        let mut message_before = vec![0];
        for stage in 0..menus.tuple.pp {
            message_before.push(message_before[stage as usize] + menus.least_message(stage));
        }
        Stages { menus, layers, budget, least, time_before, end_before, count_before, message_before, least_arenas: RefCell::default() }
    }

    /// The best plan below `cut`, if there is one (and, short of exact effort, if it is found).
    pub fn solve(&self, cut: u64, effort: Effort) -> Option<Solution> {
        let (stages, layers) = (self.menus.tuple.pp as usize, self.layers.len());
        let m = self.menus.tuple.micro_batches;
        let width = match effort {
            Effort::Exact => None,
            Effort::Beam(width) => Some(width),
        };
        let earliest = self.earliest_starts()?;
        let mut fronts: HashMap<Key, Rc<Front>> = HashMap::new();
        // labels[s][j]: after stage s, layers before j are placed.
        let mut labels: Vec<Vec<Vec<Label>>> = Vec::with_capacity(stages);
        for stage in 0..stages {
            let mut row: Vec<Vec<Label>> = (0..=layers).map(|_| Vec::new()).collect();
            let room = self.menus.room(self.budget, stage as u64)?;
            let in_flight = self.menus.tuple.in_flight(stage as u64);
            let starts: Vec<usize> = if stage == 0 { vec![0] } else { (0..layers).filter(|&j| !labels[stage - 1][j].is_empty()).collect() };
            for start in starts {
                let last_end = layers - (stages - stage - 1);
                let first_end = earliest[stage + 1].max(start + 1);
                let first_end = if stage + 1 == stages { layers } else { first_end };
                for end in first_end..=last_end {
                    let message = self.menus.message(stage as u64, end - 1);
                    let outlook = self.outlook(stage, start, end, cut);
                    let inside = self.time_before[end] - self.time_before[start];
                    if self.time_before[layers] + (m - 1) * inside >= cut {
                        // More layers only make it slower.
                        break;
                    }
                    if !outlook.hopeful(inside + message, 0, 0) {
                        continue;
                    }
                    let bag = self.bag(start, end);
                    let key = (bag, in_flight, room, message, outlook);
                    let solved = fronts
                        .entry(key)
                        .or_insert_with_key(|(bag, ..)| Rc::new(front(&self.menus.choices, bag, in_flight, room, message, &outlook, width)));
                    if solved.points.is_empty() {
                        continue;
                    }
                    let solved = Rc::clone(solved);
                    let befores: Vec<(usize, u64, u64, u64)> = match stage {
                        0 => vec![(0, 0, 0, 0)],
                        _ => labels[stage - 1][start].iter().enumerate().map(|(i, l)| (i, l.sum, l.slowest, l.end)).collect(),
                    };
                    let (rest_time, rest_slowest, rest_end) = self.rest(stage + 1, end);
                    for (from, sum, slowest, ended) in befores {
                        for &point in &solved.points {
                            let label = Label {
                                sum: sum + point.time,
                                slowest: slowest.max(point.time),
                                end: ended.max(point.end),
                                start,
                                from,
                                front: Rc::clone(&solved),
                                point,
                            };
                            let bound =
                                label.sum + rest_time + (m - 1) * label.slowest.max(rest_slowest) + label.end.max(rest_end) + self.menus.constant;
                            if bound < cut {
                                row[end].push(label);
                            }
                        }
                    }
                }
            }
            for cell in &mut row {
                pareto(cell, m, width);
            }
            labels.push(row);
        }
        let finished = |l: &Label| l.sum + (m - 1) * l.slowest + l.end + self.menus.constant;
        let best = (0..labels[stages - 1][layers].len()).min_by_key(|&i| finished(&labels[stages - 1][layers][i]))?;
        Some(self.trace(&labels, best))
    }

    /// The least number of bytes by which every plan of this tuple misses the budget (0 if one fits), and the stage that misses it by so many; nothing if that
    /// is `bound` or more.
    pub fn shortage(&self, bound: u64) -> Option<(u64, usize)> {
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
        let key = (self.bag(start, end), self.menus.tuple.in_flight(stage as u64));
        if let Some(&known) = self.least_arenas.borrow().get(&key) {
            return known;
        }
        let least = least_arena(&self.menus.choices, &key.0, key.1);
        self.least_arenas.borrow_mut().insert(key, least);
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
            let in_flight = self.menus.tuple.in_flight(stage as u64);
            let of = |kind: usize| {
                let menu = &self.menus.choices[kind];
                let states = |c: &Choice| Home::ALL.map(|h| c.terms(h).states).into_iter().min().unwrap_or(0);
                let bytes = menu.iter().map(|c| states(c) + in_flight * c.frame).min().unwrap_or(0);
                let workspace = menu.iter().map(|c| c.workspace).min().unwrap_or(0);
                let ring = menu.iter().map(|c| c.terms(Home::Together).ring).min().unwrap_or(0);
                (bytes, workspace, ring)
            };
            let kinds: Vec<(u64, u64, u64)> = (0..self.menus.choices.len()).map(of).collect();
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

    /// What is known about the rest of the plan when a stage holds the layers from `start` to before `end`.
    fn outlook(&self, stage: usize, start: usize, end: usize, cut: u64) -> Outlook {
        let (stages, layers) = (self.menus.tuple.pp as usize, self.layers.len());
        let inside = self.time_before[end] - self.time_before[start];
        let messages = self.message_before[stages] - (self.message_before[stage + 1] - self.message_before[stage]);
        let others = self.time_before[layers] - inside + messages;
        let ends = self.end_before[layers] - (self.end_before[end] - self.end_before[start]);
        let count = |kind: usize| self.count_before[kind][layers] - (self.count_before[kind][end] - self.count_before[kind][start]);
        Outlook {
            cut,
            micro_batches: self.menus.tuple.micro_batches,
            others,
            slowest: self.spread(stages - 1, others, &count),
            end: if stages > 1 { ends.div_ceil(stages as u64 - 1) } else { 0 },
            constant: self.menus.constant,
        }
    }

    /// The least sum, slowest stage and longest end of stages from `stage` on, for layers from `start` on.
    fn rest(&self, stage: usize, start: usize) -> (u64, u64, u64) {
        let (stages, layers) = (self.menus.tuple.pp as usize, self.layers.len());
        let over = stages - stage;
        if over == 0 {
            return (0, 0, 0);
        }
        let sum = self.time_before[layers] - self.time_before[start] + self.message_before[stages] - self.message_before[stage];
        let ends = self.end_before[layers] - self.end_before[start];
        let count = |kind: usize| self.count_before[kind][layers] - self.count_before[kind][start];
        (sum, self.spread(over, sum, &count), ends.div_ceil(over as u64))
    }

    /// The slowest of `over` stages that share out a sum of times and layers of each kind: at least the mean, and the stage with most layers of a kind has its
    /// share rounded up.
    fn spread(&self, over: usize, sum: u64, count: &dyn Fn(usize) -> usize) -> u64 {
        if over == 0 {
            return 0;
        }
        let shares = (0..self.least.len()).map(|kind| count(kind).div_ceil(over) as u64 * self.least[kind].0);
        shares.max().unwrap_or(0).max(sum.div_ceil(over as u64))
    }

    /// The layers from `start` to before `end`, as a bag.
    fn bag(&self, start: usize, end: usize) -> Vec<Group> {
        let mut bag: Vec<Group> = Vec::new();
        for layer in start..end {
            let (kind, home) = (self.layers[layer], self.home(layer, start, end));
            match bag.iter_mut().find(|g| g.kind == kind && g.home == home) {
                Some(group) => group.count += 1,
                None => bag.push(Group { kind, home, count: 1 }),
            }
        }
        sorted(bag)
    }

    /// How the homes of the tied parameter lie, seen from a layer on a stage.
    fn home(&self, layer: usize, start: usize, end: usize) -> Home {
        let tied = |l: usize| self.menus.tied[self.layers[l]];
        if !tied(layer) {
            Home::Together
        } else if (start..layer).any(tied) {
            Home::Repeated
        } else if (0..start).chain(end..self.layers.len()).any(tied) {
            Home::Apart
        } else {
            Home::Together
        }
    }

    /// The plan that ends in a label of the last stage.
    fn trace(&self, labels: &[Vec<Vec<Label>>], best: usize) -> Solution {
        let mut stages = Vec::new();
        let mut times = Vec::new();
        let mut choices = vec![0; self.layers.len()];
        let (mut end, mut at) = (self.layers.len(), best);
        for stage in (0..labels.len()).rev() {
            let label = &labels[stage][end][at];
            let start = label.start;
            let mut chosen = label.front.choices(&label.point);
            let bag = self.bag(start, end);
            // Choices come for the last group's last layer first; within a group layers take them in rising order.
            for group in bag.iter().rev() {
                let mut of_group: Vec<u32> = chosen.drain(..group.count).collect();
                of_group.sort_unstable();
                let members = (start..end).filter(|&l| self.layers[l] == group.kind && self.home(l, start, end) == group.home);
                for (layer, choice) in members.zip(of_group) {
                    choices[layer] = choice;
                }
            }
            stages.push((start, end - 1));
            times.push(StageTime { time: label.point.time, end: label.point.end });
            (end, at) = (start, label.from);
        }
        stages.reverse();
        let objective = total(&times, self.menus.tuple.micro_batches, self.menus.constant);
        Solution { objective, stages, choices }
    }
}

/// Labels that no other matches in sum, slowest and end; of equal ones the first. With a width, the most promising of them.
fn pareto(labels: &mut Vec<Label>, micro_batches: u64, width: Option<usize>) {
    labels.sort_by_key(|l| (l.sum, l.slowest, l.end));
    let mut kept: Vec<Label> = Vec::new();
    for label in labels.drain(..) {
        if !kept.iter().any(|k| k.slowest <= label.slowest && k.end <= label.end) {
            kept.push(label);
        }
    }
    if let Some(width) = width
        && kept.len() > width
    {
        kept.sort_by_key(|l| (l.sum + (micro_batches - 1) * l.slowest + l.end, l.sum));
        kept.truncate(width);
    }
    *labels = kept;
}
