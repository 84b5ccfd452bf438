//! Prices of a graph on a cluster.
//!
//! Each class is priced once for a shape, some milliseconds each, so bounds come first, from sketches, of few other shapes and then of its own:
//! - the *floor*: splitting an op over `n = cp · tp` ranks saves at most the factor `n` of time and bytes, since rates do not rise and replicated operands do not shrink
//!   when blocks get smaller ([`crate::cost::compute`]): an option takes at least what one on a single rank does, over `n`.
//!   The same holds for `cp` alone;
//! - the *trend*: a sequence takes least in the largest micro-batch, since launches, latencies and weights are shared by more of them, and blocks are rounded up
//!   to whole lines of memory: one pricing for each degree bounds all micro-batches that divide the one priced;
//! - a shape's own sketch, which leaves out what parameters add.

use crate::capacity::Trade;
use crate::lower::{BackwardPass, LowerError};
use crate::machine::Cluster;
use crate::memory::BucketSize;
use crate::options::{Blueprint, Halves, Key, Pricing};
use crate::padding::candidates;
use crate::placement::{Groups, Seat, Site};
use crate::prices::{Floor, Links, Offer, Prices, Reference, Shape};
use crate::space::{divisors, greatest_common_divisor};
use crate::units::{Bytes, Nanos};
use dplan_ir::entity::ValueId;
use dplan_ir::graph::{Graph, Layout};
use dplan_ir::mesh::{AxisSet, Keys, Mesh};
use dplan_ir::plan::{Recompute, Residence, Store};
use dplan_ir::program::Pattern;
use dplan_ir::sharding::{Padded, local_type};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Trades of a reference shape, and the least of its buckets.
type Sketch = (Rc<[Trade]>, Vec<BucketSize>);

/// A differentiated graph on a cluster.
pub struct Model<'a> {
    graph: &'a Graph,
    cluster: &'a Cluster,
    classes: &'a [u32],
    /// Of the first layer of each class.
    blueprints: BTreeMap<u32, Blueprint>,
    /// The value that each layer but the last hands on.
    crossing: Vec<ValueId>,
    /// The number that all numbers of experts are multiples of, if there are experts.
    experts: Option<u64>,
    /// Ways of padding, by tp.
    padded: BTreeMap<u64, Rc<[Padded]>>,
    offers: BTreeMap<(u32, Shape), Rc<[Offer]>>,
    priced: BTreeMap<(u32, Site, Key), Rc<[Offer]>>,
    halves: BTreeMap<(u32, Site, Key), Rc<[Halves]>>,
    sketches: BTreeMap<(u32, Shape, Vec<Recompute>), Sketch>,
    sketched: BTreeMap<(u32, Site, Key, Vec<Recompute>), Sketch>,
    /// Bytes of each boundary.
    handed_on: BTreeMap<Shape, Rc<[u64]>>,
}

impl<'a> Model<'a> {
    /// # Errors
    /// If the graph cannot be lowered: it has no backward pass, or its layers do not hand over one value each.
    pub fn new(graph: &'a Graph, classes: &'a [u32], cluster: &'a Cluster) -> Result<Model<'a>, LowerError> {
        let mut blueprints = BTreeMap::new();
        for (&class, layer) in classes.iter().zip(0..) {
            if let std::collections::btree_map::Entry::Vacant(e) = blueprints.entry(class) {
                e.insert(Blueprint::new(graph, layer)?);
            }
        }
        Ok(Model {
            graph,
            cluster,
            classes,
            blueprints,
            crossing: graph.boundaries(),
            experts: routed_experts(graph),
            padded: BTreeMap::new(),
            offers: BTreeMap::new(),
            priced: BTreeMap::new(),
            halves: BTreeMap::new(),
            sketches: BTreeMap::new(),
            sketched: BTreeMap::new(),
            handed_on: BTreeMap::new(),
        })
    }

    fn padded(&mut self, tp: u64) -> Rc<[Padded]> {
        Rc::clone(self.padded.entry(tp).or_insert_with(|| candidates(self.graph, &Mesh::new(1, tp)).into()))
    }

    /// What bounds of other shapes ask of this one.
    fn sketch(&mut self, class: u32, shape: Shape, recompute: &[Recompute]) -> Sketch {
        let key = (class, shape, recompute.to_vec());
        if let Some(known) = self.sketches.get(&key) {
            return known.clone();
        }
        let found = match (self.pricing(shape), self.blueprints.get(&class)) {
            (Some(pricing), Some(blueprint)) => {
                // As of offers: padding of a dim that a layer does not have is nothing to it.
                let key = (class, shape.site, blueprint.key(&pricing), recompute.to_vec());
                let sketch = || {
                    let (trades, buckets) = blueprint.sketch(&pricing, recompute);
                    (trades.into(), buckets)
                };
                self.sketched.entry(key).or_insert_with(sketch).clone()
            }
            _ => (Rc::from([]), Vec::new()),
        };
        self.sketches.entry(key).or_insert(found).clone()
    }

    fn pricing(&mut self, shape: Shape) -> Option<Pricing<'a>> {
        let padded = self.padded(shape.tp).get(shape.padding as usize)?.clone();
        Some(Pricing::new(self.graph, self.cluster.site(shape.site), shape.degrees(), shape.micro_batch, shape.boundary, padded))
    }
}

/// The greatest common divisor of the sizes of all expert dims.
fn routed_experts(graph: &Graph) -> Option<u64> {
    let routed = graph.values.values().filter(|v| v.ty.layout != Layout::Dense);
    routed.map(|v| graph.size(v.ty.dims[2])).reduce(greatest_common_divisor)
}

impl std::fmt::Debug for Model<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let offers: usize = self.offers.values().map(|o| o.len()).sum();
        write!(f, "{} classes, {} pricings, {offers} options", self.blueprints.len(), self.priced.len())
    }
}

impl Links for Model<'_> {
    fn collective(&self, site: Site, mesh: &Mesh, axes: AxisSet, pattern: Pattern, bytes: u64) -> Nanos {
        self.cluster.collective(site, mesh, axes, pattern, bytes)
    }
    fn nodes(&self, mesh: &Mesh, axes: AxisSet) -> u64 {
        self.cluster.nodes(mesh, axes)
    }
    fn across_stages(&self, mesh: &Mesh, axes: AxisSet, stages: u64, bytes: u64) -> Nanos {
        self.cluster.across_stages(mesh, axes, stages, bytes)
    }
    fn message(&self, mesh: &Mesh, from: Seat, to: Seat, bytes: u64) -> Nanos {
        self.cluster.message(mesh, from, to, bytes)
    }
    fn sweep(&self, site: Site, bytes: u64) -> Nanos {
        self.cluster.sweep(site, bytes)
    }
    fn copy(&self, site: Site, store: Store, bytes: u64) -> Nanos {
        self.cluster.copy(site, store, bytes)
    }
}

impl Prices for Model<'_> {
    fn groups(&self) -> &Groups {
        self.cluster.sizes()
    }

    fn classes(&self) -> &[u32] {
        self.classes
    }

    /// Dim 1: of `[batch, sequence, hidden]` the sequence, of `[batch, hidden]` what there is.
    fn boundary_dims(&self, _tp: u64) -> Vec<u32> {
        let dims = |value: &ValueId| &self.graph.values[*value].ty.dims;
        if self.crossing.iter().all(|v| dims(v).get(1).is_some_and(|&d| Some(d) != self.graph.batch)) { vec![1] } else { vec![] }
    }

    fn paddings(&mut self, tp: u64) -> u32 {
        self.padded(tp).len() as u32
    }

    fn offers(&mut self, class: u32, shape: Shape) -> Rc<[Offer]> {
        if let Some(known) = self.offers.get(&(class, shape)) {
            return Rc::clone(known);
        }
        let pricing = self.pricing(shape);
        let all: Rc<[Offer]> = match (&pricing, self.blueprints.get(&class)) {
            // Padding of a dim that a layer does not have is nothing to it.
            (Some(pricing), Some(blueprint)) => {
                Rc::clone(self.priced.entry((class, shape.site, blueprint.key(pricing))).or_insert_with(|| blueprint.offers(pricing).into()))
            }
            _ => Rc::from([]),
        };
        self.offers.insert((class, shape), Rc::clone(&all));
        all
    }

    /// By lowering every offer: parting needs the statements.
    fn halves(&mut self, class: u32, shape: Shape) -> Rc<[Halves]> {
        let (Some(pricing), Some(blueprint)) = (self.pricing(shape), self.blueprints.get(&class)) else { return Rc::from([]) };
        let key = (class, shape.site, blueprint.key(&pricing));
        if let Some(known) = self.halves.get(&key) {
            return Rc::clone(known);
        }
        let offers = self.offers(class, shape);
        let layer = self.classes.iter().position(|&c| c == class).unwrap_or(0) as u32;
        let lowered = pricing.sharder(BackwardPass::Parted).and_then(|sharder| {
            let halves = |o: &Offer| Ok(pricing.halves(&sharder.layer(layer, &o.option.plan(Residence::default()))?));
            offers.iter().map(halves).collect::<Result<Vec<_>, LowerError>>()
        });
        // What is offered can be lowered; if not, it cannot run in halves.
        let halves: Rc<[Halves]> = lowered.unwrap_or_default().into();
        self.halves.insert(key, Rc::clone(&halves));
        halves
    }

    fn floor(&mut self, class: u32, shape: Shape, from: Reference, recompute: &[Recompute]) -> Floor {
        let shape = shape.uncut();
        let (reference, ways) = match from {
            Reference::Rank => (Shape { tp: 1, cp: 1, boundary: None, padding: 0, keys: Keys::Gathered, nested: None, ..shape }, shape.cp * shape.tp),
            // Experts and tensors lie where they are nested: on quicker links, perhaps, than usual.
            Reference::Whole { sequences } => (Shape { micro_batch: sequences, cp: 1, keys: Keys::Gathered, ..shape }, shape.cp),
            Reference::Same { sequences } => (Shape { micro_batch: sequences, ..shape }, 1),
        };
        let (trades, buckets) = self.sketch(class, reference, recompute);
        let reads_back = self.blueprints.get(&class).is_none_or(Blueprint::reads_back);
        let share = |b: BucketSize| BucketSize { elems: b.elems / (shape.tp / reference.tp), ..b };
        Floor { trades, part: (shape.micro_batch, reference.micro_batch * ways), buckets: buckets.into_iter().map(share).collect(), reads_back }
    }

    fn contexts(&self, ranks: u64, least_block: u64) -> Vec<u64> {
        let size = self.graph.sequence.map_or(1, |dim| self.graph.size(dim));
        divisors(ranks).filter(|&cp| cp == 1 || size.is_multiple_of(cp) && size / cp >= least_block).collect()
    }

    fn experts(&self, ranks: u64) -> Vec<u64> {
        divisors(ranks).filter(|ep| self.experts.is_some_and(|experts| experts.is_multiple_of(*ep)) || *ep == 1).collect()
    }

    fn boundary_bytes(&mut self, shape: Shape) -> Rc<[u64]> {
        // The same on all devices.
        let shape = Shape { site: Site::ONLY, nested: None, ..shape };
        if let Some(known) = self.handed_on.get(&shape) {
            return Rc::clone(known);
        }
        let pricing = self.pricing(shape);
        let block = |value: ValueId| {
            let pricing = pricing.as_ref()?;
            let sharding = pricing.boundary_sharding(value)?;
            Some(local_type(&self.graph.values[value].ty, &sharding, &pricing.padded, &pricing.mesh).bytes())
        };
        // Most layers hand on the same type.
        let mut last = None;
        let bytes = |&value: &ValueId| {
            let ty = &self.graph.values[value].ty;
            match last {
                Some((known, bytes)) if known == ty => bytes,
                _ => last.insert((ty, block(value).unwrap_or(0))).1,
            }
        };
        let all: Rc<[u64]> = self.crossing.iter().map(bytes).collect();
        Rc::clone(self.handed_on.entry(shape).or_insert(all))
    }

    fn device_memory(&self, site: Site) -> Bytes {
        self.cluster.site(site).device.memory
    }
    fn context(&self, site: Site) -> Bytes {
        self.cluster.site(site).device.context
    }
}
