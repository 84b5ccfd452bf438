//! How quick the slowest stage can be when memory counts, known before a tuple is priced.
//!
//! For `n` layers of one kind on a stage with `f` micro-batches in flight and `R` bytes of room, where layers may be split between ways `i` (time `t`, frame `F`,
//! workspace `W`) and ZeRO stages `z` (states `S`, and the least time `h` that its traffic leaves):
//!
//! ```text
//! g(n, f) = min over w of  min Σ x_iz h_z(t_i)   with  Σ x_iz = n,  Σ x_iz (S_z + f F_i) ≤ R − w,  W_i ≤ w wherever x_iz > 0
//! ```
//! An offloaded frame takes no bytes `f F_i`, but two turns of the ring: with `W_i + 2 F_i` in the place of `W_i` (a way of the reference has no more of that than
//! what it stands for has of workspace and ring, since it has no more `F` and no more `F + W`); and it hides its copies beside `t_i`.
//!
//! No stage with `n` such layers is quicker. `g` rises with `n`, so a stage slower than `τ` is needed unless the stages together have `n` below `τ` often enough:
//! of `N` layers on stages with `f_1 … f_p`, the slowest stage takes at least the `N`-th smallest of all `g(n, f_s)`, n = 1, 2, …

use crate::objective::LayerSync;
use crate::prices::scaled;
use crate::relaxation::corners;
use dplan_ir::plan::Store;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

/// A way of running a layer, as far as these bounds look: one micro-batch on one rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Way {
    /// Nanoseconds, forward and backward.
    pub time: u64,
    /// Bytes.
    pub frame: u64,
    pub workspace: u64,
}

/// Ways whose workspace keeps a bound: bytes and time, the smallest first, of which none is covered by another. Those of a layer's own work are all kept, since what a
/// layer takes beside its traffic bends with its time: one above the line between two others can be below it then. Mixtures are looked at afterwards ([`Ways::trade`]).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trade {
    workspace: u64,
    corners: Vec<(u64, u64)>,
}

impl Trade {
    /// Bound on the workspace.
    pub fn workspace(&self) -> u64 {
        self.workspace
    }
    /// (Frame bytes, time).
    pub fn corners(&self) -> &[(u64, u64)] {
        &self.corners
    }

    /// The least time of its ways.
    pub fn quickest(&self) -> u64 {
        self.corners.last().map_or(0, |c| c.1)
    }

    /// The least time of a layer that has so many bytes, split between two ways of a hull; nothing if the smallest is larger.
    fn time(&self, frame: u64) -> Option<u64> {
        let after = self.corners.partition_point(|c| c.0 <= frame);
        let &(bytes, time) = self.corners.get(after.checked_sub(1)?)?;
        let Some(&(more, less)) = self.corners.get(after) else { return Some(time) };
        let saved = (u128::from(frame - bytes) * u128::from(time - less)).div_ceil(u128::from(more - bytes));
        Some(time - u64::try_from(saved).unwrap_or(time))
    }
}

/// A trade for each bound on the workspace under which ways become possible that are worth something.
pub fn trades(ways: impl Iterator<Item = Way>) -> Vec<Trade> {
    let mut ways: Vec<Way> = ways.collect();
    ways.sort_unstable_by_key(|w| (w.workspace, w.frame, w.time));
    let mut all: Vec<Trade> = Vec::new();
    // Of the ways so far: more bytes, less time.
    let mut corners: Vec<(u64, u64)> = Vec::new();
    for alike in ways.chunk_by(|a, b| a.workspace == b.workspace) {
        let mut is_new = false;
        for way in alike {
            let after = corners.partition_point(|c| c.0 <= way.frame);
            if after > 0 && corners[after - 1].1 <= way.time {
                continue;
            }
            // What takes as many bytes or more, and as long or longer.
            let from = corners.partition_point(|c| c.0 < way.frame);
            let covered = corners[from..].iter().take_while(|c| c.1 >= way.time).count();
            corners.splice(from..from + covered, [(way.frame, way.time)]);
            is_new = true;
        }
        if is_new {
            all.push(Trade { workspace: alike[0].workspace, corners: corners.clone() });
        }
    }
    all
}

/// Layers of one kind on one site: their trades, of which they take a `part` at least, where they may live, with the least of their buckets, and the bytes that a stage
/// has there.
pub struct Layers<'a> {
    pub trades: &'a [Trade],
    pub part: (u64, u64),
    pub lives: &'a [(LayerSync, Option<Store>)],
    /// What synchronises a layer with a frame of so many bytes in another memory.
    pub storing: &'a dyn Fn(LayerSync, u64, Store) -> LayerSync,
    pub room: u64,
}

/// The least time of the slowest stage that has to run its share of so many layers, where each stage is on one of the sites and has so many micro-batches in flight;
/// nothing if the layers never fit.
pub fn slowest(sites: &[Layers<'_>], stages_of: impl Iterator<Item = (usize, u64)>, count: usize) -> Option<u64> {
    let mut stages = Opened { sites, ways: Vec::new(), closed: vec![Vec::new(); sites.len()], stages: Vec::new(), next: BinaryHeap::new() };
    stages.ways.extend(sites.iter().map(Layers::ways));
    stages_of.for_each(|(site, f)| stages.closed[site].push(f));
    for site in 0..sites.len() {
        stages.closed[site].sort_unstable_by_key(|&f| Reverse(f));
        stages.open(site);
    }
    for layer in 1.. {
        let Reverse((time, at, n)) = stages.next.pop()?;
        if layer == count {
            return Some(time);
        }
        if n == 1 {
            stages.open(stages.stages[at].0);
        }
        stages.offer(at, n + 1);
    }
    None
}

/// Stages that may take layers. `g` rises with `f` too: a stage is not looked at before the one of its site with fewer in flight has a layer.
struct Opened<'a> {
    sites: &'a [Layers<'a>],
    /// By site.
    ways: Vec<Vec<Ways>>,
    /// By site, in flight on each stage that is not looked at yet, the least last.
    closed: Vec<Vec<u64>>,
    /// Site, in flight, and trades of whole layers.
    stages: Vec<(usize, u64, Rc<[Trade]>)>,
    /// What each stage takes with one layer more, and how many it then has.
    next: BinaryHeap<Reverse<(u64, usize, u64)>>,
}

impl Opened<'_> {
    fn open(&mut self, site: usize) {
        let Some(f) = self.closed[site].pop() else { return };
        let same = self.stages.iter().rev().find(|s| (s.0, s.1) == (site, f));
        let trades = same.map_or_else(|| self.ways[site].iter().map(|ways| ways.trade(f)).collect(), |s| Rc::clone(&s.2));
        self.stages.push((site, f, trades));
        self.offer(self.stages.len() - 1, 1);
    }

    fn offer(&mut self, at: usize, n: u64) {
        let (site, _, trades) = &self.stages[at];
        self.next.extend(least(trades, n, self.sites[*site].room).map(|time| Reverse((time, at, n))));
    }
}

impl Layers<'_> {
    /// The ways of a layer under each bound on the workspace.
    fn ways(&self) -> Vec<Ways> {
        let away = self.away();
        let mut all: Vec<Ways> = Vec::new();
        let mut bounds: Vec<u64> = self.trades.iter().map(|t| scaled(t.workspace, self.part)).chain(away.iter().map(|a| a.0)).collect();
        bounds.sort_unstable();
        bounds.dedup();
        for workspace in bounds {
            let here = self.trades.iter().rfind(|t| scaled(t.workspace, self.part) <= workspace).map_or(Vec::new(), |trade| self.here(trade));
            let there = away.iter().filter(|a| a.0 <= workspace).map(|&(_, states, time)| (states, 0, time));
            all.push(Ways { workspace, part: self.part, all: here.into_iter().chain(there).collect() });
        }
        all
    }

    /// Those with frames in the device's memory, under one bound: states, frame, time.
    fn here(&self, trade: &Trade) -> Vec<(u64, u64, u64)> {
        let times = |sync: &LayerSync| trade.corners.iter().map(|&(_, time)| sync.least_time(scaled(time, self.part))).collect();
        let here = self.lives.iter().filter(|(_, activations)| activations.is_none());
        let mut rows: Vec<(u64, Vec<u64>)> = here.map(|(sync, _)| (sync.states(), times(sync))).collect();
        rows.sort_unstable();
        let mut all = Vec::new();
        for (at, (states, times)) in rows.iter().enumerate() {
            // ZeRO stages that keep more bytes and save no time are no ways.
            if !rows[..at].iter().any(|(_, less)| less.iter().zip(times).all(|(a, b)| a <= b)) {
                all.extend(trade.corners.iter().zip(times).map(|(&(frame, _), &time)| (*states, frame, time)));
            }
        }
        all
    }

    /// Those with frames elsewhere: what they take of workspace and ring, states, time.
    fn away(&self) -> Vec<(u64, u64, u64)> {
        let mut all = Vec::new();
        for &(sync, activations) in self.lives {
            let Some(store) = activations else { continue };
            for (at, trade) in self.trades.iter().enumerate() {
                // A way is in its own trade first.
                let before: &[(u64, u64)] = if at == 0 { &[] } else { &self.trades[at - 1].corners };
                for &(frame, time) in trade.corners.iter().filter(|corner| !before.contains(corner)) {
                    let (frame, time) = (scaled(frame, self.part), scaled(time, self.part));
                    let least = (self.storing)(sync, frame, store).least_time(time);
                    all.push((scaled(trade.workspace, self.part) + 2 * frame, sync.states(), least));
                }
            }
        }
        all.sort_unstable();
        let mut kept: Vec<(u64, u64, u64)> = Vec::new();
        for way in all {
            if !kept.iter().any(|k| k.1 <= way.1 && k.2 <= way.2) {
                kept.push(way);
            }
        }
        kept
    }
}

/// Ways of a layer whose workspace keeps a bound: bytes of states, bytes of a frame of which they take a `part`, and time.
struct Ways {
    workspace: u64,
    part: (u64, u64),
    all: Vec<(u64, u64, u64)>,
}

impl Ways {
    /// A trade between all bytes of a layer and its time, with so many micro-batches in flight.
    fn trade(&self, f: u64) -> Trade {
        let bytes = |&(states, frame, time): &(u64, u64, u64)| (states + scaled(frame, (f * self.part.0, self.part.1)), time, 0);
        let hull = corners(self.all.iter().map(bytes).collect());
        Trade { workspace: self.workspace, corners: hull.into_iter().map(|(bytes, time, _)| (bytes, time)).collect() }
    }
}

/// `g(n, f)`, of trades for this `f`.
fn least(trades: &[Trade], n: u64, room: u64) -> Option<u64> {
    let each = |trade: &Trade| trade.time(room.checked_sub(trade.workspace)?.div_ceil(n));
    trades.iter().filter_map(each).min().map(|time| n * time)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Cluster;
    use crate::memory::{BucketSize, LayerBytes, StateTypes};
    use crate::objective::{Home, Terms};
    use crate::placement::Site;
    use crate::units::Nanos;
    use dplan_ir::dtype::DType;
    use dplan_ir::mesh::{AxisSet, Degrees, Mesh};
    use dplan_ir::optimizer::Optimizer;
    use dplan_ir::pipeline::Pipeline;
    use dplan_ir::plan::Schedule;
    use dplan_ir::plan::{Clip, Offload, States, Zero};

    /// Two ways: 10 ns with a frame of 100 bytes, 16 ns with one of 20; the second needs 30 bytes of workspace.
    fn slowest(count: usize, in_flight: &[u64], room: u64, part: (u64, u64)) -> Option<u64> {
        let quick = Way { time: 10, frame: 100, workspace: 0 };
        let small = Way { time: 16, frame: 20, workspace: 30 };
        let trades = trades([quick, small].into_iter());
        let site = Layers { trades: &trades, part, lives: &[(LayerSync::default(), None)], storing: &|sync, _, _| sync, room };
        super::slowest(&[site], in_flight.iter().map(|&f| (0, f)), count)
    }

    /// Where compute and traffic are about as long, times bend: no stage of any ways is quicker than the bound.
    #[test]
    fn no_stage_of_real_ways_is_quicker_than_the_bound() {
        let mut random = 5;
        let mut draw = |from: u64, to: u64| from + dplan_ir::splitmix::next(&mut random) % (to - from);
        let (cluster, mesh) = (Cluster::parse("h100:8x2").unwrap(), Mesh::of(Degrees { dp: 16, ..Degrees::ONE }));
        let types = StateTypes::new(DType::Bf16, Optimizer::AdamW);
        let pipeline = Pipeline { schedule: Schedule::OneFOneB, stages: 1, virtual_stages: 1, micro_batches: 1 };
        let terms = Terms { links: &cluster, site: Site::ONLY, mesh: &mesh, types, clip: Clip::GlobalNorm, pipeline };
        for round in 0..300 {
            let bucket = BucketSize { elems: draw(1, 1 << 22), partial: AxisSet::EMPTY, axes: AxisSet::EMPTY, members: 1, tied: false };
            let bytes = LayerBytes { buckets: vec![bucket], reads_back: true, ..LayerBytes::default() };
            let syncs = [Zero(2), Zero(3)].map(|zero| terms.sync(&bytes, States { zero, offload: Offload::None }, Home::Together));
            let around = syncs[1].least_time(0).max(10);
            let ways: Vec<Way> =
                (0..6).map(|_| Way { time: draw(around / 4, around * 2), frame: draw(1 << 20, 1 << 24), workspace: draw(0, 4) << 20 }).collect();
            let (trades, room) = (trades(ways.iter().copied()), draw(4 << 20, 4 << 24));
            let copy = |sync: LayerSync, frame: u64, store: Store| terms.storing(sync, frame, Some(store));
            // What is offloaded leaves the bytes of its frame and takes longer.
            let lives: Vec<(LayerSync, Option<Store>)> =
                [None, Some(Store::Cpu), Some(Store::Nvme)].into_iter().flat_map(|store| syncs.map(|s| (s, store))).collect();
            let lives = &lives[..2 * (1 + round % 3)];
            // Bytes of its own, of the largest workspace and ring, and time.
            let real = lives.iter().flat_map(|&(sync, store)| {
                ways.iter().map(move |w| match store {
                    None => ([sync.states() + w.frame, w.workspace, 0], sync.least_time(w.time)),
                    Some(store) => {
                        let time = copy(sync, w.frame, store).terms(Nanos(w.time / 3), Nanos(w.time - w.time / 3)).time;
                        ([sync.states(), w.workspace, 2 * w.frame], time)
                    }
                })
            });
            let real: Vec<([u64; 3], u64)> = real.collect();
            for count in 1..=if round % 3 == 2 { 2 } else { 3 } {
                let layers = Layers { trades: &trades, part: (1, 1), lives, storing: &copy, room };
                let bound = super::slowest(&[layers], [(0, 1)].into_iter(), count);
                let mut stages = vec![([0; 3], 0)];
                for _ in 0..count {
                    let with = |a: [u64; 3], b: [u64; 3]| [a[0] + b[0], a[1].max(b[1]), a[2].max(b[2])];
                    stages = stages.iter().flat_map(|s| real.iter().map(move |r| (with(s.0, r.0), s.1 + r.1))).collect();
                }
                let best = stages.into_iter().filter(|s| s.0.iter().sum::<u64>() <= room).map(|s| s.1).min();
                assert!(best.is_none_or(|best| bound.is_some_and(|bound| bound <= best)), "{ways:?}: {bound:?}, not {best:?} of {count}");
            }
        }
    }

    /// By their definition: for each bound on the workspace, the ways under it of which none takes as few bytes and as little time as another.
    #[test]
    fn trades_are_the_uncovered_ways_under_each_bound() {
        let mut random = 11;
        let mut draw = |to: u64| dplan_ir::splitmix::next(&mut random) % to;
        for _ in 0..500 {
            let ways: Vec<Way> = (0..=draw(12)).map(|_| Way { time: draw(8), frame: draw(8), workspace: draw(4) }).collect();
            let mut want: Vec<Trade> = Vec::new();
            for workspace in 0..4 {
                let under = || ways.iter().filter(|w| w.workspace <= workspace).map(|w| (w.frame, w.time));
                let mut corners: Vec<(u64, u64)> = under().filter(|w| under().all(|o| o == *w || o.0 > w.0 || o.1 > w.1)).collect();
                corners.sort_unstable();
                corners.dedup();
                if want.last().map_or(!corners.is_empty(), |last| last.corners != corners) {
                    want.push(Trade { workspace, corners });
                }
            }
            assert_eq!(trades(ways.iter().copied()), want, "{ways:?}");
        }
    }

    #[test]
    fn with_room_the_slowest_stage_has_its_share_of_the_layers() {
        assert_eq!(slowest(4, &[2, 1], 10_000, (1, 1)), Some(20));
        assert_eq!(slowest(5, &[2, 1], 10_000, (1, 1)), Some(30));
    }

    #[test]
    fn without_room_layers_are_split_between_ways_or_move_to_stages_with_fewer_in_flight() {
        assert_eq!(slowest(1, &[1], 100, (1, 1)), Some(10));
        // Two micro-batches in flight: the small way takes 30 bytes of workspace and 40 of frames.
        assert_eq!(slowest(1, &[2], 70, (1, 1)), Some(16));
        assert_eq!(slowest(1, &[2], 69, (1, 1)), None);
        // Half way between them: frames of 60 bytes, 13 ns.
        assert_eq!(slowest(1, &[2], 150, (1, 1)), Some(13));
        // Two layers rather share the last stage than be one on each.
        assert_eq!(slowest(2, &[100, 1], 200, (1, 1)), Some(20));
    }

    #[test]
    fn a_part_takes_part_of_time_and_bytes() {
        // 15 bytes are workspace, and frames are 30 bytes: half way between those of 10 and 50, which take 8 and 5 ns.
        assert_eq!(slowest(3, &[1], 15 + 3 * 30, (1, 2)), Some(3 * 6));
    }
}
