//! How one tensor is spread over a mesh.
//!
//! `Sharding { dims, partial }`: each dim names the axes that cut it into equal blocks (mesh order, major first); an axis is used at most once in a
//! value; axes not named replicate. `partial` is a pending reduction: the value is the reduction of what the ranks along those axes hold, and it may
//! not be read as if it were whole. `ring` is there while a value goes round among ranks, or is not yet made of all of its blocks ([`crate::ring`]).
//!
//! Sizes that an axis does not divide are *padded*: the graph's dim keeps its logical size, [`Padded`] holds the size used on the machine. Padding is
//! the same for every value that has the dim, so no reshard ever changes it. Padding elements are a fixed point of training (DESIGN: zero weights).

use crate::entity::{DimId, Table};
use crate::graph::{Layout, Type};
use crate::mesh::{AxisSet, Mesh};
use crate::ring::Ring;

/// The reduction a partial value is waiting for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Monoid {
    Sum,
    Max,
    /// log(exp a + exp b), of values that are already logarithms.
    LogSumExp,
}

impl Monoid {
    pub fn name(self) -> &'static str {
        match self {
            Monoid::Sum => "sum",
            Monoid::Max => "max",
            Monoid::LogSumExp => "lse",
        }
    }
    pub fn from_name(name: &str) -> Option<Monoid> {
        [Monoid::Sum, Monoid::Max, Monoid::LogSumExp].into_iter().find(|m| m.name() == name)
    }
}

/// How a value is spread over the mesh.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Sharding {
    /// One entry per dim: the axes that shard it.
    pub dims: Vec<AxisSet>,
    /// Axes of the pending reduction; empty if the value is whole.
    pub partial: AxisSet,
    /// Meaningful only where `partial` is not empty; `Sum` otherwise, so equal shardings compare equal.
    pub monoid: Monoid,
    /// Whose block it is and what is in it, where that is not its own and all.
    pub ring: Option<Ring>,
}

impl Sharding {
    pub fn replicated(rank: usize) -> Sharding {
        Sharding::of_dims(vec![AxisSet::EMPTY; rank])
    }
    pub fn of_dims(dims: Vec<AxisSet>) -> Sharding {
        Sharding { dims, partial: AxisSet::EMPTY, monoid: Monoid::Sum, ring: None }
    }
    pub fn with_partial(mut self, monoid: Monoid, axes: AxisSet) -> Sharding {
        self.partial = axes;
        self.monoid = if axes.is_empty() { Monoid::Sum } else { monoid };
        self
    }
    /// The same in a ring, if it is still in one.
    pub fn in_ring(self, ring: Option<Ring>) -> Sharding {
        Sharding { ring: ring.and_then(Ring::settled), ..self }
    }
    /// The same placement with its pending reduction done.
    pub fn whole(&self) -> Sharding {
        Sharding::of_dims(self.dims.clone())
    }
    /// Every axis the value varies over, by block or by partial term.
    pub fn used(&self) -> AxisSet {
        self.dims.iter().fold(self.partial, |s, &d| s.union(d))
    }
    /// Axes that cut the value into blocks.
    pub fn sharded(&self) -> AxisSet {
        self.dims.iter().fold(AxisSet::EMPTY, |s, &d| s.union(d))
    }
    /// An axis may be used once: by one dim, or by the pending reduction.
    pub fn is_valid(&self) -> bool {
        let uses: usize = self.dims.iter().map(|d| d.len()).sum::<usize>() + self.partial.len();
        uses == self.used().len()
    }
}

/// The size each dim has on the machine: its logical size rounded up so that every sharding divides it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Padded(pub Table<DimId, u64>);

impl Padded {
    pub fn size(&self, dim: DimId) -> u64 {
        self.0[dim]
    }
}

/// Shape and layout of one rank's part of a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LocalType {
    pub dtype: crate::dtype::DType,
    pub dims: Vec<u64>,
    pub layout: Layout,
    /// Of a value in top-k layout: the experts of all ranks together.
    pub experts: u64,
}

impl LocalType {
    /// Elements that are used if every expert gets its share of the rows: there is room for the worst case ([`LocalType::elems`]).
    pub fn used_elems(&self) -> u64 {
        match self.layout {
            Layout::Dense => self.elems(),
            Layout::TopK { k, capacity } => {
                let chosen = product(&[self.dims[0], self.dims[1], k.min(self.experts), self.dims[2]]);
                let kept = chosen.div_ceil(self.experts.max(1)).min(self.rows_of_one(capacity).saturating_mul(self.dims[2]));
                kept.saturating_mul(product(&self.dims[3..]))
            }
        }
    }
    /// Elements stored. A top-k value stores as many rows as a router can choose, sorted by expert.
    pub fn elems(&self) -> u64 {
        match self.layout {
            Layout::Dense => product(&self.dims),
            Layout::TopK { k, capacity } => rows(&self.dims, k, capacity).saturating_mul(product(&self.dims[3..])),
        }
    }
    pub fn bytes(&self) -> u64 {
        self.elems().saturating_mul(self.dtype.size())
    }
    /// The most rows of one expert in a value in top-k layout.
    pub fn rows_of_one(&self, capacity: Option<u64>) -> u64 {
        rows_of_one(&self.dims, capacity)
    }
}

/// The most rows that a block of these dims, in top-k layout, may have.
pub fn rows(dims: &[u64], k: u64, capacity: Option<u64>) -> u64 {
    product(&[dims[0], dims[1], k.min(dims[2])]).min(rows_of_one(dims, capacity).saturating_mul(dims[2]))
}

/// A block of a sequence may have all the tokens that an expert takes of it.
fn rows_of_one(dims: &[u64], capacity: Option<u64>) -> u64 {
    dims[0].saturating_mul(capacity.map_or(dims[1], |most| most.min(dims[1])))
}

/// What is too much for 64 bits is the largest number there is.
fn product(sizes: &[u64]) -> u64 {
    sizes.iter().fold(1, |all, &size| all.saturating_mul(size))
}

/// One rank's part of a value of type `ty`.
///
/// # Panics
/// If the padded size of a dim is not divisible by the axes that shard it: `Padded` and shardings are made together.
pub fn local_type(ty: &Type, sharding: &Sharding, padded: &Padded, mesh: &Mesh) -> LocalType {
    let dims = ty.dims.iter().zip(&sharding.dims).map(|(&dim, &axes)| {
        let (size, ways) = (padded.size(dim), mesh.size(axes));
        assert!(size % ways == 0, "{dim} of size {size} is not divisible by {ways}");
        size / ways
    });
    let experts = if ty.layout == Layout::Dense { 0 } else { padded.size(ty.dims[2]) };
    LocalType { dtype: ty.dtype, dims: dims.collect(), layout: ty.layout, experts }
}
