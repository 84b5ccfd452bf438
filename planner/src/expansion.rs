//! The exact search inside a stage, under one bound on workspace and ring.
//!
//! Counts are decided choice by choice, those first that lose most at the price of a byte. A label is (time, end, bytes) of the layers decided so far; it is dropped if
//! another of as many layers is no worse in any, if it cannot fit, or if its plan cannot beat the incumbent.

use crate::objective::StageTime;
use crate::outlook::{Outlook, Slope};
use crate::shelf::{Item, Load, Shelf};
use crate::stage::{Group, Point};
use std::rc::Rc;

/// How far a search may go.
pub struct Effort<'a> {
    /// Labels that it may still make.
    pub labels: usize,
    /// Most labels at once; of more only the most promising are followed, and the front says that it is not complete.
    pub at_once: usize,
    /// Whether time is up.
    pub late: &'a dyn Fn() -> bool,
}

impl Effort<'_> {
    /// Whether one more label may be made.
    fn take(&mut self) -> bool {
        if self.labels.is_multiple_of(4096) && (self.late)() {
            self.labels = 0;
        }
        let some = self.labels > 0;
        self.labels -= usize::from(some);
        some
    }
}

/// The exact search under one bound on workspace and ring.
pub(crate) struct Expansion<'a> {
    bag: &'a [Group],
    /// Of each group, the items that can be part of a wanted plan: those that lose most at the price first.
    items: Vec<Vec<Item>>,
    /// Of each group and item, the least and most of it and those after.
    least: Vec<Vec<Load>>,
    most: Vec<Vec<Load>>,
    /// The least priced cost of a layer of each group.
    cheapest: Vec<u128>,
    /// The same of all layers of the groups behind each.
    behind: Vec<Rest>,
    free: u64,
    slope: Slope,
    /// What bytes are worth, in the slope's cost.
    price: (u64, u64),
    outlook: &'a Outlook,
    /// The priced cost from which no plan is wanted.
    lost: u128,
}

/// The least and most of some layers that have yet to choose, and their least priced cost.
#[derive(Clone, Copy, Default)]
struct Rest {
    least: Load,
    most: Load,
    cost: u128,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Label {
    time: u64,
    end: u64,
    bytes: u64,
    trail: u32,
}

/// One decision: `count` layers of `group` make `choice`, after the decisions at `before`.
struct Decision {
    before: u32,
    group: usize,
    choice: u32,
    count: usize,
}

const ROOT: u32 = u32::MAX;

impl Rest {
    /// With so many layers more that take so much each.
    fn with(&self, n: u64, least: &Load, most: &Load, cost: u128) -> Rest {
        let sum = |a: &Load, b: &Load| Load { time: a.time + n * b.time, end: a.end + n * b.end, bytes: a.bytes + n * b.bytes, ..*a };
        Rest { least: sum(&self.least, least), most: sum(&self.most, most), cost: self.cost + u128::from(n) * cost }
    }
}

impl<'a> Expansion<'a> {
    pub fn new(bag: &'a [Group], shelves: &[Rc<Shelf>], free: u64, slope: Slope, price: (u64, u64), outlook: &'a Outlook) -> Expansion<'a> {
        let priced = |l: &Load| u128::from(slope.cost(l.time, l.end)) * u128::from(price.1) + u128::from(l.bytes) * u128::from(price.0);
        let items: Vec<Vec<Item>> = shelves
            .iter()
            .map(|shelf| {
                let mut items = shelf.items().to_vec();
                items.sort_by_key(|i| (std::cmp::Reverse(priced(&i.0)), *i));
                items
            })
            .collect();
        let from_behind = |items: &Vec<Item>, pick: fn(u64, u64) -> u64| {
            let mut folded: Vec<Load> = items.iter().map(|i| i.0).collect();
            for at in (0..folded.len().saturating_sub(1)).rev() {
                folded[at] = folded[at].pick(folded[at + 1], pick);
            }
            folded
        };
        let least: Vec<Vec<Load>> = items.iter().map(|i| from_behind(i, u64::min)).collect();
        let most: Vec<Vec<Load>> = items.iter().map(|i| from_behind(i, u64::max)).collect();
        // The last item is the cheapest.
        let cheapest: Vec<u128> = items.iter().map(|items| items.last().map_or(0, |i| priced(&i.0))).collect();
        let mut behind = vec![Rest::default(); bag.len()];
        for at in (1..bag.len()).rev() {
            behind[at - 1] = behind[at].with(bag[at].count as u64, &least[at][0], &most[at][0], cheapest[at]);
        }
        // A priced cost of `cost · price + worth` is a cost of `cost`, rounded up.
        let worth = u128::from(free) * u128::from(price.0);
        let lost = slope.limit.checked_sub(1).map_or(0, |last| worth + last * u128::from(price.1) + 1);
        Expansion { bag, items, least, most, cheapest, behind, free, slope, price, outlook, lost }
    }

    /// Adds all points that are wanted, if the effort is enough; whether it is.
    pub fn run(&self, border: StageTime, points: &mut Vec<Point>, effort: &mut Effort<'_>) -> bool {
        let mut trail: Vec<Decision> = Vec::new();
        let mut complete = true;
        let mut labels = vec![Label { time: border.time, end: border.end, bytes: 0, trail: ROOT }];
        for (at, group) in self.bag.iter().enumerate() {
            // Labels by how many layers of the group are decided.
            let mut by_count: Vec<Vec<Label>> = vec![Vec::new(); group.count + 1];
            by_count[0] = labels;
            let items = &self.items[at];
            for (item, &(load, choice)) in items.iter().enumerate() {
                let last = item + 1 == items.len();
                let mut next: Vec<Vec<Label>> = vec![Vec::new(); group.count + 1];
                for (used, labels) in by_count.iter().enumerate() {
                    for label in labels {
                        let counts = if last { group.count - used..=group.count - used } else { 0..=group.count - used };
                        for count in counts {
                            let n = count as u64;
                            let (time, end, bytes) = (label.time + n * load.time, label.end + n * load.end, label.bytes + n * load.bytes);
                            let mut new = Label { time, end, bytes, trail: label.trail };
                            let left = (group.count - used - count) as u64;
                            match self.verdict(&mut new, at, item + 1, left) {
                                Verdict::Wanted => {}
                                // One more layer loses no less.
                                Verdict::Lost => break,
                                Verdict::Unwanted => continue,
                            }
                            if count > 0 {
                                trail.push(Decision { before: label.trail, group: at, choice, count });
                                new.trail = trail.len() as u32 - 1;
                            }
                            if !effort.take() {
                                return false;
                            }
                            next[used + count].push(new);
                        }
                    }
                }
                next.iter_mut().for_each(undominated_labels);
                complete &= self.limit(&mut next, effort.at_once);
                by_count = next;
            }
            labels = by_count.pop().unwrap_or_default();
        }
        for label in labels {
            let mut counts = Vec::new();
            let mut at = label.trail;
            while at != ROOT {
                let decision = &trail[at as usize];
                counts.push((decision.group, decision.choice, decision.count));
                at = decision.before;
            }
            points.push(Point { time: label.time, end: label.end, counts: counts.into() });
        }
        complete
    }

    /// What may become of a label with `left` layers of group `at` still to choose from items `from` on, and all later groups. Where everything fits, bytes are
    /// forgotten.
    fn verdict(&self, label: &mut Label, at: usize, from: usize, left: u64) -> Verdict {
        let mut rest = self.behind[at];
        if left > 0 {
            rest = rest.with(left, &self.least[at][from], &self.most[at][from], self.cheapest[at]);
        }
        if label.bytes + rest.least.bytes > self.free {
            return Verdict::Unwanted;
        }
        if self.cost(label) + rest.cost >= self.lost {
            return Verdict::Lost;
        }
        if !self.outlook.hopeful(label.time + rest.least.time, label.end + rest.least.end, 0) {
            return Verdict::Unwanted;
        }
        if label.bytes + rest.most.bytes <= self.free {
            label.bytes = 0;
        }
        Verdict::Wanted
    }

    /// Of the layers decided so far, at the price.
    fn cost(&self, label: &Label) -> u128 {
        u128::from(self.slope.cost(label.time, label.end)) * u128::from(self.price.1) + u128::from(label.bytes) * u128::from(self.price.0)
    }

    /// Keeps the most promising labels if there are too many; whether all were kept.
    fn limit(&self, by_count: &mut [Vec<Label>], most: usize) -> bool {
        let all: usize = by_count.iter().map(Vec::len).sum();
        if all <= most {
            return true;
        }
        let share = most / by_count.len() / 2;
        for labels in by_count.iter_mut().filter(|l| l.len() > share) {
            labels.sort_by_key(|l| (self.cost(l), *l));
            labels.truncate(share.max(1));
        }
        false
    }
}

enum Verdict {
    Wanted,
    /// Too large, or too slow in time and end taken apart.
    Unwanted,
    /// Dearer than wanted at the price, and no less so with more layers of the same choice.
    Lost,
}

/// Drops labels that another is at least as good as; of equal ones the first stays.
fn undominated_labels(labels: &mut Vec<Label>) {
    labels.sort_unstable();
    let mut stairs = Staircase::default();
    labels.retain(|l| stairs.admits(l.end, l.bytes));
}

/// What came before in order of time, as pairs of end and bytes: ends rise, bytes fall.
#[derive(Default)]
pub(crate) struct Staircase(Vec<(u64, u64)>);

impl Staircase {
    /// Whether nothing that came before is as good in both; if so it is remembered.
    pub fn admits(&mut self, end: u64, bytes: u64) -> bool {
        let stairs = &mut self.0;
        let place = stairs.partition_point(|s| s.0 <= end);
        if place > 0 && stairs[place - 1].1 <= bytes {
            return false;
        }
        let to = place + stairs[place..].iter().take_while(|s| s.1 >= bytes).count();
        let from = if place > 0 && stairs[place - 1].0 == end { place - 1 } else { place };
        if from == to {
            stairs.insert(from, (end, bytes));
        } else {
            stairs[from] = (end, bytes);
            stairs.drain(from + 1..to);
        }
        true
    }
}
