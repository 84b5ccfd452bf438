//! What the search asks of a model on a machine. Everything that knows ops, tensors or links is behind this trait; the search sees layers,
//! their options, and times of transfers. Tests give it drawn prices.

use crate::capacity::Trade;
use crate::cost::comm;
use crate::machine::Cluster;
use crate::memory::{BucketSize, LayerBytes};
use crate::options::{Halves, LayerOption};
use crate::placement::{Groups, Seat, Site};
use crate::space::Tuple;
use crate::units::{Bytes, Nanos};
use dplan_ir::mesh::{AxisSet, Degrees, Keys, Mesh};
use dplan_ir::nest::Nest;
use dplan_ir::plan::{Recompute, Store};
use dplan_ir::program::Pattern;
use dplan_ir::sharding::Sharding;
use dplan_ir::sync::Sync;
use std::rc::Rc;

/// What the local work of a layer depends on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Shape {
    pub tp: u64,
    pub cp: u64,
    pub ep: u64,
    /// Sequences of one micro-batch on one data-parallel rank.
    pub micro_batch: u64,
    /// Dim of every layer boundary that the tensor-parallel axes shard.
    pub boundary: Option<u32>,
    /// Which of the ways of padding.
    pub padding: u32,
    /// How context-parallel ranks get at each other's keys and values.
    pub keys: Keys,
    /// On which devices.
    pub site: Site,
    /// Where degrees are not nested as usual, or data parallelism is cut up: how, and its degree, which else is nothing to a layer.
    pub nested: Option<(Nest, Sync, u64)>,
}

impl Shape {
    /// As far as a layer's local work depends on them.
    pub fn degrees(&self) -> Degrees {
        let &Shape { tp, cp, ep, keys, nested, .. } = self;
        let (nest, sync, dp) = nested.unwrap_or((Nest::default(), Sync::Flat, ep));
        Degrees { dp, ep, cp, tp, keys, sync, nest }
    }
    /// The same where one collective sums gradients: data parallelism cut up for several is no other neighbourhood for what a layer computes.
    pub fn uncut(self) -> Shape {
        let nested = self.nested.filter(|(nest, ..)| *nest != Nest::default());
        Shape { nested: nested.map(|(nest, _, dp)| (nest, Sync::Flat, dp)), ..self }
    }
}

/// An option as the search sees it.
#[derive(Clone, PartialEq, Debug)]
pub struct Offer {
    pub option: LayerOption,
    /// Sharding of the tied parameter, in a layer that has one: the same in all its homes.
    pub tie: Option<Sharding>,
}

/// The shape that bounds others, however gradients get to their sum.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reference {
    /// One rank, whatever boundary, padding and way of keys: there are few of these.
    Rank,
    /// Whole sequences, whatever way keys take, of which there are so many: a multiple of the micro-batch.
    Whole { sequences: u64 },
    /// So many sequences, as much in parts as in the shape.
    Same { sequences: u64 },
}

impl Reference {
    /// The shape itself, which bounds it closest.
    pub fn own(tuple: &Tuple) -> Reference {
        Reference::Same { sequences: tuple.micro_batch }
    }
}

/// What all offers of a class in a shape take at least, as known from another shape, the *reference*. For every offer there is a way among those of the reference that
/// takes, times `part`, no more time, no more frame bytes, and no more frame and workspace bytes together; and every offer has at least the elements of `buckets`.
#[derive(Clone, Debug)]
pub struct Floor {
    pub trades: Rc<[Trade]>,
    /// As a fraction.
    pub part: (u64, u64),
    /// One for each way in which parameters are spread over data axes, tied ones aside.
    pub buckets: Vec<BucketSize>,
    /// As of every offer.
    pub reads_back: bool,
}

impl Floor {
    /// The least that an offer needs, but for what it keeps.
    pub fn bytes(&self) -> LayerBytes {
        LayerBytes { buckets: self.buckets.clone(), reads_back: self.reads_back, ..LayerBytes::default() }
    }
    /// No offer is quicker, forward and backward.
    pub fn time(&self) -> u64 {
        let quickest = self.trades.iter().map(Trade::quickest).min().unwrap_or(0);
        scaled(quickest, self.part)
    }
}

/// `amount` times a fraction, rounded down.
pub fn scaled(amount: u64, (part, of): (u64, u64)) -> u64 {
    // Wide divisions are slow, and rarely needed.
    match amount.checked_mul(part) {
        Some(product) => product / of,
        None => u64::try_from(u128::from(amount) * u128::from(part) / u128::from(of)).unwrap_or(u64::MAX),
    }
}

/// Times of transfers on a cluster.
pub trait Links {
    /// Time of a collective on one stage; `bytes` is the larger of what a rank puts in and gets out.
    fn collective(&self, site: Site, mesh: &Mesh, axes: AxisSet, pattern: Pattern, bytes: u64) -> Nanos;
    /// Nodes that ranks along these axes are on.
    fn nodes(&self, mesh: &Mesh, axes: AxisSet) -> u64;
    /// Time of an all-reduce over the same ranks of `stages` stages and `axes` of each, wherever these are.
    fn across_stages(&self, mesh: &Mesh, axes: AxisSet, stages: u64, bytes: u64) -> Nanos;
    /// Time of a message from each rank of a stage to the same rank of another.
    fn message(&self, mesh: &Mesh, from: Seat, to: Seat, bytes: u64) -> Nanos;
    /// Time to stream `bytes` through a device's memory.
    fn sweep(&self, site: Site, bytes: u64) -> Nanos;
    /// Time to copy `bytes` between the memory of a device and another, one way.
    fn copy(&self, site: Site, store: Store, bytes: u64) -> Nanos;
}

/// A model on a cluster. Whether a layer can run in a shape, and in which shardings of a tied parameter, is alike on all sites.
pub trait Prices: Links {
    /// The devices there are.
    fn groups(&self) -> &Groups;
    /// The class of each layer: layers of a class have the same options.
    fn classes(&self) -> &[u32];
    /// Dims of a layer boundary that tensor-parallel axes may shard, for sequence parallelism and the like.
    fn boundary_dims(&self, tp: u64) -> Vec<u32>;
    /// Ways of padding for a degree of tensor parallelism, at least one.
    fn paddings(&mut self, tp: u64) -> u32;
    /// All ways of running a layer worth considering, or none if the shape is impossible for it.
    fn offers(&mut self, class: u32, shape: Shape) -> Rc<[Offer]>;
    /// The same, in the same order, with backward passes in halves.
    fn halves(&mut self, class: u32, shape: Shape) -> Rc<[Halves]>;
    /// Of the offers of the class in a shape that recompute in one of these ways.
    fn floor(&mut self, class: u32, shape: Shape, from: Reference, recompute: &[Recompute]) -> Floor;
    /// Degrees of context parallelism that leave every rank a block of at least so many positions.
    fn contexts(&self, ranks: u64, least_block: u64) -> Vec<u64>;
    /// Degrees of expert parallelism that the model's experts allow.
    fn experts(&self, ranks: u64) -> Vec<u64>;
    /// Bytes on one rank of the value that each layer but the last hands to the next.
    fn boundary_bytes(&mut self, shape: Shape) -> Rc<[u64]>;
    /// What arena and context share on one device.
    fn device_memory(&self, site: Site) -> Bytes;
    /// What is taken before the first tensor.
    fn context(&self, site: Site) -> Bytes;
}

impl Links for Cluster {
    fn collective(&self, site: Site, mesh: &Mesh, axes: AxisSet, pattern: Pattern, bytes: u64) -> Nanos {
        comm::collective_time(self.site(site), mesh, axes, pattern, bytes)
    }
    fn nodes(&self, mesh: &Mesh, axes: AxisSet) -> u64 {
        comm::group(self.whole(), mesh, axes).nodes
    }
    fn across_stages(&self, mesh: &Mesh, axes: AxisSet, stages: u64, bytes: u64) -> Nanos {
        comm::across_stages_time(self.whole(), mesh, axes, stages, Pattern::AllReduce, bytes)
    }
    fn message(&self, mesh: &Mesh, from: Seat, to: Seat, bytes: u64) -> Nanos {
        let both = self.site(from.site.with(to.site));
        if from.site == to.site && from.site.is_pure() {
            comm::p2p_time(both, mesh, from.first, to.first, bytes)
        } else {
            comm::message_time(both.inter, bytes)
        }
    }
    fn sweep(&self, site: Site, bytes: u64) -> Nanos {
        self.site(site).sweep(bytes)
    }
    fn copy(&self, site: Site, store: Store, bytes: u64) -> Nanos {
        let machine = self.site(site);
        let link = match store {
            Store::Cpu => machine.host,
            Store::Nvme => machine.nvme,
        };
        link.latency + link.bandwidth.time(u128::from(bytes))
    }
}
