//! One stage, exactly: for a bag of layers in an arena of a given size, the Pareto set of (time of a micro-batch, time of the end of a step).
//!
//! A multiple-choice knapsack with counts. Layers are added one at a time; a label is (time, end, bytes, largest workspace, largest ring), and one that is no
//! better than another in any of the five is dropped. So is one that cannot fit whatever is chosen for the layers to come, and one whose plan
//! cannot beat the incumbent ([`Outlook`]): for the most numerous layers, which are added last, that bound is the knapsack's linear relaxation.
//! Bytes are counted as they are: no cells, no margin.

use crate::menu::Choice;
use crate::objective::Home;

/// Layers of one kind in the same position towards the tied parameter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Group {
    pub kind: usize,
    pub home: Home,
    pub count: usize,
}

/// What is known about the rest of the plan while a stage is solved.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Outlook {
    /// Only plans below this objective are wanted.
    pub cut: u64,
    pub micro_batches: u64,
    /// The least that the other stages take together, and each of their slowest, and their longest end of step.
    pub others: u64,
    pub slowest: u64,
    pub end: u64,
    pub constant: u64,
}

impl Outlook {
    /// Whether a stage that takes at least this much can be part of a wanted plan. `joint` bounds `m · time + end` from below.
    pub fn hopeful(&self, time: u64, end: u64, joint: u64) -> bool {
        let apart = time + (self.micro_batches - 1) * time.max(self.slowest) + end.max(self.end);
        self.others + self.constant + apart.max(joint) < self.cut
    }
}

/// A solved stage: the rows of its Pareto set, and how each was made.
#[derive(Clone, Debug, Default)]
pub struct Front {
    pub points: Vec<Point>,
    trail: Vec<(u32, u32)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Point {
    pub time: u64,
    pub end: u64,
    trail: u32,
}

const ROOT: u32 = u32::MAX;

impl Front {
    /// The choices of a point, for the layers of the bag in reverse order of its sorted groups.
    pub fn choices(&self, point: &Point) -> Vec<u32> {
        let mut at = point.trail;
        let mut choices = Vec::new();
        while at != ROOT {
            let (before, choice) = self.trail[at as usize];
            choices.push(choice);
            at = before;
        }
        choices
    }
}

/// Times and bytes of a choice, or of all choices so far.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
struct Load {
    time: u64,
    end: u64,
    /// States, and frames of all micro-batches in flight.
    bytes: u64,
    workspace: u64,
    ring: u64,
}

impl Load {
    fn of(choice: &Choice, home: Home, in_flight: u64) -> Load {
        let terms = choice.terms(home);
        let bytes = terms.states + in_flight * choice.frame;
        Load { time: terms.time, end: terms.end, bytes, workspace: choice.workspace, ring: terms.ring }
    }
    fn and(&self, more: &Load) -> Load {
        Load {
            time: self.time + more.time,
            end: self.end + more.end,
            bytes: self.bytes + more.bytes,
            workspace: self.workspace.max(more.workspace),
            ring: self.ring.max(more.ring),
        }
    }
    /// Of so many alike.
    fn times(&self, count: u64) -> Load {
        if count == 0 {
            return Load::default();
        }
        Load { time: self.time * count, end: self.end * count, bytes: self.bytes * count, ..*self }
    }
    fn covers(&self, other: &Load) -> bool {
        self.time <= other.time && self.end <= other.end && self.bytes <= other.bytes && self.workspace <= other.workspace && self.ring <= other.ring
    }
    /// The least (or, with `u64::max`, the most) of each.
    fn fold(loads: impl Iterator<Item = Load>, pick: fn(u64, u64) -> u64) -> Load {
        let both = |a: Load, b: Load| Load {
            time: pick(a.time, b.time),
            end: pick(a.end, b.end),
            bytes: pick(a.bytes, b.bytes),
            workspace: pick(a.workspace, b.workspace),
            ring: pick(a.ring, b.ring),
        };
        loads.reduce(both).unwrap_or_default()
    }
    fn arena(&self) -> u64 {
        self.bytes + self.workspace + self.ring
    }
    /// `m · time + end`: what the load adds if its stage is the slowest.
    fn joint(&self, micro_batches: u64) -> u64 {
        micro_batches * self.time + self.end
    }
}

/// The Pareto set of the ways of running one layer with so many micro-batches in flight: `(load, choice)`.
fn items(menu: &[Choice], home: Home, in_flight: u64) -> Vec<(Load, u32)> {
    let mut all: Vec<(Load, u32)> = menu.iter().zip(0..).map(|(c, index)| (Load::of(c, home, in_flight), index)).collect();
    all.sort_unstable();
    let mut kept: Vec<(Load, u32)> = Vec::new();
    for (load, choice) in all {
        if !kept.iter().any(|(k, _)| k.covers(&load)) {
            kept.push((load, choice));
        }
    }
    kept
}

/// Bounds on what is chosen for the groups from some position on.
#[derive(Clone, Copy, Default)]
struct Rest {
    least: Load,
    most: Load,
    /// Least `m · time + end`, the last group left out.
    joint: u64,
}

/// The linear relaxation of the knapsack of one group: the lower convex hull of (bytes, `m · time + end`).
struct Relaxation(Vec<(u64, u64)>);

impl Relaxation {
    fn new(items: &[(Load, u32)], micro_batches: u64) -> Relaxation {
        let mut points: Vec<(u64, u64)> = items.iter().map(|(l, _)| (l.bytes, l.joint(micro_batches))).collect();
        points.sort_unstable();
        let mut hull: Vec<(u64, u64)> = Vec::new();
        for p in points {
            if hull.last().is_some_and(|last| last.1 <= p.1) {
                continue;
            }
            // Drop points above the line from the one before to the new one.
            while let [.., a, b] = hull[..]
                && u128::from(a.1 - b.1) * u128::from(p.0 - a.0) <= u128::from(a.1 - p.1) * u128::from(b.0 - a.0)
            {
                hull.pop();
            }
            hull.push(p);
        }
        Relaxation(hull)
    }

    /// The least that `count` layers can cost together in so many bytes.
    fn least(&self, count: u64, bytes: u64) -> u64 {
        let Some(&(_, cheapest)) = self.0.last() else { return 0 };
        let after = self.0.partition_point(|p| p.0.saturating_mul(count) <= bytes);
        if count == 0 || after == self.0.len() {
            return count * cheapest;
        }
        let Some(before) = after.checked_sub(1) else { return u64::MAX / 4 };
        let ((low, dear), (high, cheap)) = (self.0[before], self.0[after]);
        let saved = u128::from(dear - cheap) * u128::from(bytes - low * count) / u128::from(high - low);
        count * dear - u64::try_from(saved).unwrap_or(u64::MAX).min(count * dear)
    }
}

/// Groups in the order in which layers are added: the most numerous last.
pub fn sorted(mut bag: Vec<Group>) -> Vec<Group> {
    bag.sort_unstable_by_key(|g| (g.count, g.kind, g.home));
    bag
}

struct Label {
    load: Load,
    /// Lower bound on `m · time + end` of the finished stage.
    joint: u64,
    trail: u32,
}

/// The Pareto set of a bag (in [`sorted`] order), `message` nanoseconds included in every time. With a `width`, at most that many labels are kept
/// after each layer, the most promising ones: every point is then achievable, but points may be missing.
pub fn front(menus: &[Vec<Choice>], bag: &[Group], in_flight: u64, room: u64, message: u64, outlook: &Outlook, width: Option<usize>) -> Front {
    let m = outlook.micro_batches;
    let items: Vec<Vec<(Load, u32)>> = bag.iter().map(|g| items(&menus[g.kind], g.home, in_flight)).collect();
    let least: Vec<Load> = items.iter().map(|i| Load::fold(i.iter().map(|i| i.0), u64::min)).collect();
    let most: Vec<Load> = items.iter().map(|i| Load::fold(i.iter().map(|i| i.0), u64::max)).collect();
    let joint: Vec<u64> = items.iter().map(|i| i.iter().map(|i| i.0.joint(m)).min().unwrap_or(0)).collect();
    let Some(tail) = bag.len().checked_sub(1) else { return Front::default() };
    let relaxed = Relaxation::new(&items[tail], m);

    let mut trail: Vec<(u32, u32)> = Vec::new();
    let mut labels = vec![Label { load: Load { time: message, ..Load::default() }, joint: 0, trail: ROOT }];
    for (at, group) in bag.iter().enumerate() {
        let later = (at + 1..bag.len()).fold(Rest::default(), |rest, g| Rest {
            least: rest.least.and(&least[g].times(bag[g].count as u64)),
            most: rest.most.and(&most[g].times(bag[g].count as u64)),
            joint: rest.joint + if g == tail { 0 } else { joint[g] * bag[g].count as u64 },
        });
        for left in (0..group.count as u64).rev() {
            let rest = Rest {
                least: later.least.and(&least[at].times(left)),
                most: later.most.and(&most[at].times(left)),
                joint: later.joint + if at == tail { 0 } else { joint[at] * left },
            };
            let in_tail = if at == tail { left } else { bag[tail].count as u64 };
            let mut next: Vec<(Label, u32)> = Vec::new();
            for label in &labels {
                for &(item, choice) in &items[at] {
                    let mut load = label.load.and(&item);
                    let end = load.and(&rest.least);
                    let Some(free) = room.checked_sub(end.arena()) else { continue };
                    if load.and(&rest.most).arena() <= room {
                        // Whatever follows fits: bytes no longer matter.
                        load = Load { time: load.time, end: load.end, ..Load::default() };
                    }
                    let joint = load.joint(m) + rest.joint + relaxed.least(in_tail, free + in_tail * least[tail].bytes);
                    if outlook.hopeful(end.time, end.end, joint) {
                        next.push((Label { load, joint, trail: label.trail }, choice));
                    }
                }
            }
            labels = pareto(next, width)
                .into_iter()
                .map(|(label, choice)| {
                    trail.push((label.trail, choice));
                    Label { trail: trail.len() as u32 - 1, ..label }
                })
                .collect();
        }
    }
    let mut points: Vec<Point> = Vec::new();
    labels.sort_by_key(|l| (l.load.time, l.load.end));
    for label in labels {
        if points.last().is_none_or(|p| label.load.end < p.end) {
            points.push(Point { time: label.load.time, end: label.load.end, trail: label.trail });
        }
    }
    Front { points, trail }
}

/// Labels that no other is at least as good as; of equal ones the first. With a width, the most promising of them.
fn pareto(mut labels: Vec<(Label, u32)>, width: Option<usize>) -> Vec<(Label, u32)> {
    labels.sort_by_key(|(l, _)| l.load);
    let mut kept: Vec<(Label, u32)> = Vec::new();
    for label in labels {
        if !kept.iter().any(|(k, _)| k.load.covers(&label.0.load)) {
            kept.push(label);
        }
    }
    if let Some(width) = width
        && kept.len() > width
    {
        kept.sort_by_key(|(l, _)| (l.joint, l.load));
        kept.truncate(width);
    }
    kept
}

/// The least arena that a bag can run in: for each bound on workspace and ring, every layer takes its least bytes.
pub fn least_arena(menus: &[Vec<Choice>], bag: &[Group], in_flight: u64) -> u64 {
    let sizes: Vec<Vec<Load>> = bag.iter().map(|g| sizes(&menus[g.kind], g.home, in_flight)).collect();
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
fn sizes(menu: &[Choice], home: Home, in_flight: u64) -> Vec<Load> {
    let mut kept: Vec<Load> = Vec::new();
    for choice in menu {
        let load = Load { time: 0, end: 0, ..Load::of(choice, home, in_flight) };
        if !kept.iter().any(|k| k.covers(&load)) {
            kept.retain(|k| !load.covers(k));
            kept.push(load);
        }
    }
    kept
}
