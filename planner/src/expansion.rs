//! The exact search inside a stage, under one bound on workspace and ring.
//!
//! Counts are decided choice by choice, those first that lose most at the price of a byte. A label is (time, end, bytes) of the layers decided so far; it is dropped if
//! another of as many layers is no worse in any, if it cannot fit, or if its plan cannot beat the incumbent.

use crate::objective::StageTime;
use crate::stage::{Group, Item, Load, Outlook, Point, Shelf};
use std::rc::Rc;

/// Most labels that one front may take; beyond it the front is incomplete, and says so.
const MOST_LABELS: usize = 50_000;

/// The exact search under one bound on workspace and ring.
pub(crate) struct Expansion<'a> {
    bag: &'a [Group],
    /// Of each group, the items that can be part of a wanted plan: those that lose most at the price first.
    items: Vec<Vec<Item>>,
    /// Of each group and item, the least and most of it and those after.
    least: Vec<Vec<Load>>,
    most: Vec<Vec<Load>>,
    /// The least priced cost of them.
    cheapest: Vec<Vec<u128>>,
    free: u64,
    price: (u64, u64),
    repeats: u64,
    outlook: &'a Outlook,
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

impl<'a> Expansion<'a> {
    pub fn new(bag: &'a [Group], shelves: &[Rc<Shelf>], free: u64, price: (u64, u64), repeats: u64, outlook: &'a Outlook) -> Expansion<'a> {
        let priced = |l: &Load| u128::from(repeats * l.time + l.end) * u128::from(price.1) + u128::from(l.bytes) * u128::from(price.0);
        let items: Vec<Vec<Item>> = shelves
            .iter()
            .map(|shelf| {
                let mut items = shelf.items.clone();
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
        let least = items.iter().map(|i| from_behind(i, u64::min)).collect();
        let most = items.iter().map(|i| from_behind(i, u64::max)).collect();
        // The last item is the cheapest, so it is the cheapest of all that follow any.
        let cheapest = items.iter().map(|items| items.iter().map(|_| items.last().map_or(0, |i| priced(&i.0))).collect()).collect();
        Expansion { bag, items, least, most, cheapest, free, price, repeats, outlook }
    }

    /// Adds all points; whether none that is wanted was left out.
    pub fn run(&self, border: StageTime, points: &mut Vec<Point>) -> bool {
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
                            next[used + count].push(new);
                        }
                    }
                }
                next.iter_mut().for_each(undominated_labels);
                complete &= self.limit(&mut next);
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
        let (mut time, mut end, mut bytes, mut most) = (label.time, label.end, label.bytes, label.bytes);
        let mut cost =
            u128::from(self.repeats * label.time + label.end) * u128::from(self.price.1) + u128::from(label.bytes) * u128::from(self.price.0);
        let mut add = |group: usize, item: usize, n: u64| {
            let (least, largest) = (&self.least[group][item], &self.most[group][item]);
            (time, end, bytes, most) = (time + n * least.time, end + n * least.end, bytes + n * least.bytes, most + n * largest.bytes);
            cost += u128::from(n) * self.cheapest[group][item];
        };
        if left > 0 {
            add(at, from, left);
        }
        (at + 1..self.bag.len()).for_each(|group| add(group, 0, self.bag[group].count as u64));
        if bytes > self.free {
            return Verdict::Unwanted;
        }
        let worth = u128::from(self.free) * u128::from(self.price.0);
        let joint = u64::try_from(cost.saturating_sub(worth).div_ceil(u128::from(self.price.1))).unwrap_or(u64::MAX);
        let joint = joint.min(u64::MAX / 4);
        if !self.outlook.hopeful(0, 0, joint) {
            return Verdict::Lost;
        }
        if !self.outlook.hopeful(time, end, joint) {
            return Verdict::Unwanted;
        }
        if most <= self.free {
            label.bytes = 0;
        }
        Verdict::Wanted
    }

    /// Keeps the most promising labels if there are too many; whether all were kept.
    fn limit(&self, by_count: &mut [Vec<Label>]) -> bool {
        let all: usize = by_count.iter().map(Vec::len).sum();
        if all <= MOST_LABELS {
            return true;
        }
        let share = MOST_LABELS / by_count.len() / 2;
        let cost = |l: &Label| u128::from(self.repeats * l.time + l.end) * u128::from(self.price.1) + u128::from(l.bytes) * u128::from(self.price.0);
        for labels in by_count.iter_mut().filter(|l| l.len() > share) {
            labels.sort_by_key(|l| (cost(l), *l));
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
    labels.sort_by_key(|l| (l.time, l.end, l.bytes));
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
        let covered = stairs[place..].iter().take_while(|s| s.1 >= bytes).count();
        let from = if place > 0 && stairs[place - 1].0 == end { place - 1 } else { place };
        stairs.splice(from..place + covered, [(end, bytes)]);
        true
    }
}
