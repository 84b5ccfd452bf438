//! How quick the slowest stage can be when memory counts, known before a tuple is priced.
//!
//! For `n` layers of one kind on a stage with `f` micro-batches in flight and `R` bytes of room, where layers may be split between ways `i` (time `t`, frame `F`,
//! workspace `W`) and ZeRO stages `z` (states `S`, and the least time `h` that its traffic leaves):
//!
//! ```text
//! g(n, f) = min over w of  min Σ x_iz h_z(t_i)   with  Σ x_iz = n,  Σ x_iz (S_z + f F_i) ≤ R − w,  W_i ≤ w wherever x_iz > 0
//! ```
//! No stage with `n` such layers is quicker. `g` rises with `n`, so a stage slower than `τ` is needed unless the stages together have `n` below `τ` often enough:
//! of `N` layers on stages with `f_1 … f_p`, the slowest stage takes at least the `N`-th smallest of all `g(n, f_s)`, n = 1, 2, …

use crate::objective::LayerSync;
use crate::prices::scaled;
use crate::relaxation::corners;
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
    for (at, way) in ways.iter().enumerate() {
        if ways.get(at + 1).is_some_and(|next| next.workspace == way.workspace) {
            continue;
        }
        let mut corners: Vec<(u64, u64)> = ways[..=at].iter().map(|w| (w.frame, w.time)).collect();
        corners.sort_unstable();
        let mut least = u64::MAX;
        corners.retain(|&(_, time)| {
            let is_less = time < least;
            least = least.min(time);
            is_less
        });
        if all.last().is_none_or(|last| last.corners != corners) {
            all.push(Trade { workspace: way.workspace, corners });
        }
    }
    all
}

/// Layers of one kind on one site: their trades, of which they take a `part` at least, the ZeRO stages they may have, with the least of their buckets, and the bytes that
/// a stage has there.
pub struct Layers<'a> {
    pub trades: &'a [Trade],
    pub part: (u64, u64),
    pub syncs: &'a [LayerSync],
    pub room: u64,
}

/// The least time of the slowest stage that has to run its share of so many layers, where each stage is on one of the sites and has so many micro-batches in flight;
/// nothing if the layers never fit.
pub fn slowest(sites: &[Layers<'_>], stages_of: impl Iterator<Item = (usize, u64)>, count: usize) -> Option<u64> {
    let mut stages = Opened { sites, ways: Vec::new(), closed: vec![Vec::new(); sites.len()], stages: Vec::new(), next: BinaryHeap::new() };
    stages.ways.extend(sites.iter().map(|layers| layers.trades.iter().map(|trade| layers.ways(trade)).collect()));
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
    /// The ways of a layer under one bound on the workspace.
    fn ways(&self, trade: &Trade) -> Ways {
        let times = |sync: &LayerSync| trade.corners.iter().map(|&(_, time)| sync.least_time(scaled(time, self.part))).collect();
        let mut rows: Vec<(u64, Vec<u64>)> = self.syncs.iter().map(|sync| (sync.states(), times(sync))).collect();
        rows.sort_unstable();
        let mut all = Vec::new();
        for (at, (states, times)) in rows.iter().enumerate() {
            // ZeRO stages that keep more bytes and save no time are no ways.
            if !rows[..at].iter().any(|(_, less)| less.iter().zip(times).all(|(a, b)| a <= b)) {
                all.extend(trade.corners.iter().zip(times).map(|(&(frame, _), &time)| (*states, frame, time)));
            }
        }
        Ways { workspace: scaled(trade.workspace, self.part), part: self.part, all }
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
    use dplan_ir::dtype::DType;
    use dplan_ir::mesh::{AxisSet, Degrees, Mesh};
    use dplan_ir::optimizer::Optimizer;
    use dplan_ir::plan::{Clip, Offload, States, Zero};

    /// Two ways: 10 ns with a frame of 100 bytes, 16 ns with one of 20; the second needs 30 bytes of workspace.
    fn slowest(count: usize, in_flight: &[u64], room: u64, part: (u64, u64)) -> Option<u64> {
        let quick = Way { time: 10, frame: 100, workspace: 0 };
        let small = Way { time: 16, frame: 20, workspace: 30 };
        let trades = trades([quick, small].into_iter());
        let site = Layers { trades: &trades, part, syncs: &[LayerSync::default()], room };
        super::slowest(&[site], in_flight.iter().map(|&f| (0, f)), count)
    }

    /// Where compute and traffic are about as long, times bend: no stage of any ways is quicker than the bound.
    #[test]
    fn no_stage_of_real_ways_is_quicker_than_the_bound() {
        let mut random = 5;
        let mut draw = |from: u64, to: u64| from + dplan_ir::splitmix::next(&mut random) % (to - from);
        let (cluster, mesh) = (Cluster::parse("h100:8x2").unwrap(), Mesh::of(Degrees { dp: 16, ep: 1, cp: 1, tp: 1 }));
        let types = StateTypes::new(DType::Bf16, Optimizer::AdamW);
        let terms = Terms { links: &cluster, site: Site::ONLY, mesh: &mesh, types, clip: Clip::GlobalNorm, homes: 1 };
        for _ in 0..300 {
            let bucket = BucketSize { elems: draw(1, 1 << 22), partial: AxisSet::EMPTY, axes: AxisSet::EMPTY, members: 1, tied: false };
            let bytes = LayerBytes { buckets: vec![bucket], reads_back: true, ..LayerBytes::default() };
            let syncs = [Zero(2), Zero(3)].map(|zero| terms.sync(&bytes, States { zero, offload: Offload::None }, Home::Together));
            let around = syncs[1].least_time(0).max(10);
            let ways: Vec<Way> = (0..6).map(|_| Way { time: draw(around / 4, around * 2), frame: draw(1 << 20, 1 << 24), workspace: 0 }).collect();
            let (trades, room) = (trades(ways.iter().copied()), draw(4 << 20, 4 << 24));
            let real = syncs.iter().flat_map(|sync| ways.iter().map(|w| (sync.states() + w.frame, sync.least_time(w.time))));
            let real: Vec<(u64, u64)> = real.collect();
            for count in 1..=3 {
                let bound = super::slowest(&[Layers { trades: &trades, part: (1, 1), syncs: &syncs, room }], [(0, 1)].into_iter(), count);
                let mut stages = vec![(0, 0)];
                for _ in 0..count {
                    stages = stages.iter().flat_map(|s| real.iter().map(move |r| (s.0 + r.0, s.1 + r.1))).collect();
                }
                let best = stages.into_iter().filter(|s| s.0 <= room).map(|s| s.1).min();
                assert!(best.is_none_or(|best| bound.is_some_and(|bound| bound <= best)), "{ways:?}: {bound:?}, not {best:?} of {count}");
            }
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
