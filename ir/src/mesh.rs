//! The mesh: an ordered list of small named axes over which one pipeline stage's ranks are laid out.
//!
//! Axes are *atomic*: `tp = 8` is three axes `tp0 tp1 tp2` of size 2, so that 2 key/value heads under `tp = 4` are sharded over `tp0` and
//! replicated over `tp1`. Earlier axes are major where several of them cut one thing into blocks, whichever ranks have the blocks.
//!
//! Which ranks these are is the *nesting*, the outermost axis first: neighbouring ranks differ in the innermost axis first, so that lies on the quickest links. Axes are
//! nested in their own order unless the mesh says otherwise.
//! Pipeline stages are not an axis: every stage is a copy of the mesh, and a value lives on one stage.
//!
//! Words: a *rank* is a process; its *local rank* is its position inside its stage's mesh; its *coordinate* on an axis is a digit of that position.

use crate::nest::{Nest, Way};
use crate::sync::Sync;
use std::fmt;

/// The most axes a mesh can have.
pub const MAX_AXES: usize = 32;

/// One axis of a mesh, by position.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct AxisId(pub u8);

/// A set of axes; where order matters (the axes that shard one dim) it is mesh order, major first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct AxisSet(pub u32);

impl AxisSet {
    pub const EMPTY: AxisSet = AxisSet(0);

    pub fn one(axis: AxisId) -> AxisSet {
        AxisSet(1 << axis.0)
    }
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    pub fn contains(self, axis: AxisId) -> bool {
        self.0 & (1 << axis.0) != 0
    }
    pub fn includes(self, other: AxisSet) -> bool {
        other.0 & !self.0 == 0
    }
    pub fn intersects(self, other: AxisSet) -> bool {
        self.0 & other.0 != 0
    }
    pub fn union(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 | other.0)
    }
    pub fn minus(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 & !other.0)
    }
    pub fn and(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 & other.0)
    }
    pub fn iter(self) -> impl Iterator<Item = AxisId> {
        (0..MAX_AXES as u8).filter(move |i| self.0 & (1 << i) != 0).map(AxisId)
    }
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }
}

impl FromIterator<AxisId> for AxisSet {
    fn from_iter<I: IntoIterator<Item = AxisId>>(iter: I) -> Self {
        iter.into_iter().fold(AxisSet::EMPTY, |s, a| s.union(AxisSet::one(a)))
    }
}
impl fmt::Debug for AxisSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(|a| a.0)).finish()
    }
}

/// One named axis.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Axis {
    pub name: String,
    pub size: u64,
}

/// The ordered axes of one stage.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Mesh {
    pub axes: Vec<Axis>,
    /// All axes, the outermost first; empty where that is their own order.
    pub nesting: Vec<AxisId>,
}

/// How ranks that have a block of a sequence each get at the keys and values of the others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Keys {
    /// Every rank gathers them all before an attention.
    #[default]
    Gathered,
    /// They go round while ranks attend to what they have ([`crate::ring`]).
    Ring,
}

impl Keys {
    pub const ALL: [Keys; 2] = [Keys::Gathered, Keys::Ring];
    pub fn name(self) -> &'static str {
        match self {
            Keys::Gathered => "gather",
            Keys::Ring => "ring",
        }
    }
    pub fn from_name(name: &str) -> Option<Keys> {
        Keys::ALL.into_iter().find(|k| k.name() == name)
    }
    /// The name of the axis along which ranks have blocks of a sequence.
    fn axis(self) -> &'static str {
        match self {
            Keys::Gathered => "cp",
            Keys::Ring => "ring",
        }
    }
}

/// Ranks of a stage, by what they split, and how they lie.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Degrees {
    /// Data parallelism: batches of sequences. Includes `ep`.
    pub dp: u64,
    /// Expert parallelism: a part of the data-parallel ranks that shares out experts. Divides `dp`.
    pub ep: u64,
    /// Context parallelism: every sequence.
    pub cp: u64,
    /// Tensor parallelism: whatever its op strategies say.
    pub tp: u64,
    /// How context-parallel ranks get at each other's keys and values.
    pub keys: Keys,
    /// What data parallelism is cut up for.
    pub sync: Sync,
    pub nest: Nest,
}

impl Degrees {
    pub const ONE: Degrees = Degrees { dp: 1, ep: 1, cp: 1, tp: 1, keys: Keys::Gathered, sync: Sync::Flat, nest: Nest(Way::ALL) };

    pub fn ranks(&self) -> u64 {
        self.dp * self.cp * self.tp
    }
    /// Axes that a mesh of them has at most; more than [`MAX_AXES`] are none.
    pub fn most_axes(&self) -> usize {
        3 + prime_factors(self.tp).len() + self.sync.far(self.dp).len()
    }
    /// Whether axes are not nested in their usual order, or data parallelism is cut up: the degree of data parallelism then says how others lie.
    pub fn is_unusual(&self) -> bool {
        self.nest != Nest::default() || self.ep == 1 && !self.sync.far(self.dp).is_empty()
    }
}

impl Mesh {
    /// The mesh `dp × ep × cp × tp`, with `tp` as its prime factors, largest first; the axes `dp` and `ep` together are the degree of data parallelism. `dp` is
    /// always axis 0, also where its size is 1 (nothing is then sharded over it), so that strategies do not depend on it; `ep` and `cp` are there if they have
    /// several ranks, `cp` under the name `ring` where keys go round. What data parallelism is cut up into for its sums comes last, as axes `far0`, `far1`, … that lie outside of `dp` on the ranks: sums are scattered over
    /// near axes first, and blocks nest in the order of axes. No experts are then shared out: rows of the batch would have to be gathered over an axis that is not their last.
    pub fn of(degrees: Degrees) -> Mesh {
        let Degrees { dp, ep, cp, tp, keys, sync, nest } = degrees;
        let axis = |name: &str, size| Axis { name: name.into(), size };
        let far = if ep > 1 { Vec::new() } else { sync.far(dp) };
        let mut axes = vec![axis("dp", dp / ep.max(1) / far.iter().product::<u64>())];
        axes.extend([("ep", ep), (keys.axis(), cp)].into_iter().filter(|a| a.1 > 1).map(|(name, size)| axis(name, size)));
        axes.extend(prime_factors(tp).into_iter().rev().enumerate().map(|(i, size)| axis(&format!("tp{i}"), size)));
        axes.extend(far.iter().enumerate().map(|(i, &size)| axis(&format!("far{i}"), size)));
        let mut mesh = Mesh { axes, nesting: Vec::new() };
        let of = |way: &Way| -> Vec<AxisId> {
            match way {
                Way::Data => mesh.far().iter().collect::<Vec<_>>().into_iter().rev().chain(mesh.by_name("dp")).collect(),
                Way::Expert => mesh.by_name("ep").into_iter().collect(),
                Way::Context => mesh.by_name(keys.axis()).into_iter().collect(),
                Way::Tensor => mesh.tp().iter().collect(),
            }
        };
        let nesting = nest.0.iter().flat_map(of).collect();
        mesh.nest(nesting);
        mesh
    }

    /// Nests the axes in this order, which is of all of them, the outermost first.
    pub fn nest(&mut self, nesting: Vec<AxisId>) {
        self.nesting = if self.ids().eq(nesting.iter().copied()) { Vec::new() } else { nesting };
    }

    /// Whether every axis is nested once.
    pub fn is_nested(&self) -> bool {
        let mut sorted = self.nesting.clone();
        sorted.sort_unstable();
        sorted.is_empty() || self.ids().eq(sorted)
    }

    /// The mesh `dp × tp`.
    pub fn new(dp: u64, tp: u64) -> Mesh {
        Mesh::of(Degrees { dp, tp, ..Degrees::ONE })
    }

    /// The axes that split the batch of everything but experts: `dp` with what it is cut up into, and `ep`, as far as they have more than one rank.
    pub fn dp(&self) -> AxisSet {
        self.named("dp").union(self.named("ep")).union(self.far())
    }
    /// What data parallelism is cut up into beside the axis `dp`.
    pub fn far(&self) -> AxisSet {
        self.ids().filter(|&a| self.axis(a).name.starts_with("far")).collect()
    }
    /// The axis that shares out experts, if it has more than one rank.
    pub fn ep(&self) -> AxisSet {
        self.named("ep")
    }
    /// The axis that splits sequences, if it has more than one rank.
    pub fn cp(&self) -> AxisSet {
        self.named("cp").union(self.ring())
    }
    /// The same axis, if keys go round along it.
    pub fn ring(&self) -> AxisSet {
        self.named("ring")
    }
    /// All axes that split data and not the model: gradients are summed, and ZeRO shares states, over those of them that do not shard the parameter.
    pub fn data(&self) -> AxisSet {
        self.dp().union(self.cp())
    }
    fn named(&self, name: &str) -> AxisSet {
        self.ids().filter(|&a| self.axis(a).name == name && self.axis(a).size > 1).collect()
    }
    /// The tensor-parallel axes.
    pub fn tp(&self) -> AxisSet {
        self.ids().filter(|&a| self.axis(a).name.starts_with("tp")).collect()
    }
    pub fn axis(&self, id: AxisId) -> &Axis {
        &self.axes[id.0 as usize]
    }
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = AxisId> + use<> {
        (0..self.axes.len() as u8).map(AxisId)
    }
    pub fn by_name(&self, name: &str) -> Option<AxisId> {
        self.axes.iter().position(|a| a.name == name).map(|i| AxisId(i as u8))
    }
    pub fn all(&self) -> AxisSet {
        self.ids().collect()
    }
    /// Number of ranks along `axes` (1 for the empty set).
    pub fn size(&self, axes: AxisSet) -> u64 {
        axes.iter().map(|a| self.axis(a).size).product()
    }
    /// Ranks in the mesh.
    pub fn ranks(&self) -> u64 {
        self.axes.iter().map(|a| a.size).product()
    }
    /// From a rank to the one whose coordinate on `axis` is one more: the ranks along all that is nested inside of it.
    pub fn stride(&self, axis: AxisId) -> u64 {
        match self.nesting.iter().position(|&a| a == axis) {
            Some(at) => self.nesting[at + 1..].iter().map(|&a| self.axis(a).size).product(),
            None => self.axes[axis.0 as usize + 1..].iter().map(|a| a.size).product(),
        }
    }
    /// Coordinate of `local_rank` on `axis`.
    pub fn coordinate(&self, local_rank: u64, axis: AxisId) -> u64 {
        local_rank / self.stride(axis) % self.axis(axis).size
    }
    /// Position of `local_rank` among the `size(axes)` positions along `axes`, major axis first: which block of a dim sharded over `axes` it owns.
    pub fn position(&self, local_rank: u64, axes: AxisSet) -> u64 {
        axes.iter().fold(0, |at, a| at * self.axis(a).size + self.coordinate(local_rank, a))
    }
    /// The local rank so many places before `local_rank` along `axes`, cyclically.
    pub fn before(&self, local_rank: u64, axes: AxisSet, places: u64) -> u64 {
        let ranks = self.size(axes);
        let mut at = (self.position(local_rank, axes) + ranks - places % ranks) % ranks;
        // The last axis is the least digit of the position.
        axes.iter().collect::<Vec<_>>().into_iter().rev().fold(local_rank, |rank, axis| {
            let (size, stride, coordinate) = (self.axis(axis).size, self.stride(axis), self.coordinate(rank, axis));
            let digit = at % size;
            at /= size;
            rank - coordinate * stride + digit * stride
        })
    }
    /// The local ranks that share `local_rank`'s coordinates outside `axes`, ordered by position along `axes`.
    pub fn group(&self, local_rank: u64, axes: AxisSet) -> Vec<u64> {
        let mut members: Vec<u64> =
            (0..self.ranks()).filter(|&r| self.ids().all(|a| axes.contains(a) || self.coordinate(r, a) == self.coordinate(local_rank, a))).collect();
        members.sort_by_key(|&r| self.position(r, axes));
        members
    }
}

/// Rising.
pub(crate) fn prime_factors(mut n: u64) -> Vec<u64> {
    let mut factors = Vec::new();
    let mut p = 2;
    while p * p <= n {
        while n.is_multiple_of(p) {
            factors.push(p);
            n /= p;
        }
        p += 1;
    }
    if n > 1 {
        factors.push(n);
    }
    factors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_before_is_the_one_before_in_its_group_however_axes_are_nested() {
        for nest in Nest::all() {
            for sync in [Sync::Flat, Sync::Hierarchical { far: 2 }, Sync::Tree] {
                let mesh = Mesh::of(Degrees { dp: 4, cp: 6, tp: 2, keys: Keys::Ring, sync, nest, ..Degrees::ONE });
                for (rank, axes) in (0..mesh.ranks()).flat_map(|rank| [mesh.cp(), mesh.data(), mesh.all()].map(|axes| (rank, axes))) {
                    let (group, at) = (mesh.group(rank, axes), mesh.position(rank, axes) as usize);
                    for places in 0..group.len() + 2 {
                        let there = group[(at + 2 * group.len() - places) % group.len()];
                        assert_eq!(mesh.before(rank, axes, places as u64), there, "{nest}, {sync:?}: {rank} along {axes:?}, {places} places");
                    }
                }
            }
        }
    }

    #[test]
    fn every_rank_has_coordinates_of_its_own_however_axes_are_nested() {
        for nest in Nest::all() {
            for sync in [Sync::Flat, Sync::Hierarchical { far: 2 }, Sync::Tree] {
                let mesh = Mesh::of(Degrees { dp: 4, cp: 3, tp: 2, sync, nest, ..Degrees::ONE });
                assert!(mesh.is_nested() && mesh.ranks() == 24);
                let mut seen: Vec<u64> = (0..24).map(|rank| mesh.position(rank, mesh.all())).collect();
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..24), "{nest} {sync:?}");
                // Neighbours differ in what comes last.
                let last = match nest.0.iter().rev().find(|w| **w != Way::Expert) {
                    Some(Way::Data) => mesh.dp(),
                    Some(Way::Context) => mesh.cp(),
                    Some(Way::Tensor) => mesh.tp(),
                    Some(Way::Expert) | None => panic!("{nest}"),
                };
                let mut neighbours = mesh.group(0, last);
                neighbours.sort_unstable();
                assert_eq!(neighbours, (0..mesh.size(last)).collect::<Vec<_>>(), "{nest} {sync:?}");
            }
        }
    }

    #[test]
    fn the_usual_order_is_said_by_nothing() {
        assert_eq!(Mesh::of(Degrees { dp: 4, ep: 2, cp: 3, tp: 2, ..Degrees::ONE }).nesting, []);
        let far = Mesh::of(Degrees { dp: 4, tp: 2, sync: Sync::Hierarchical { far: 2 }, ..Degrees::ONE });
        assert_eq!(far.nesting, [AxisId(2), AxisId(0), AxisId(1)]);
        assert_eq!(far.ids().map(|a| far.stride(a)).collect::<Vec<_>>(), [2, 1, 4]);
    }
}
