//! Prices drawn at random: small instances with every feature of real ones (tied layers, several classes, options that trade time for memory).
#![allow(dead_code)]

use dplan_ir::dtype::DType;
use dplan_ir::mesh::{AxisSet, Keys, Mesh};
use dplan_ir::nest::Nest;
use dplan_ir::optimizer::Optimizer;
use dplan_ir::plan::{Clip, Gathered, Recompute, Store};
use dplan_ir::program::Pattern;
use dplan_ir::sharding::Sharding;
use dplan_planner::capacity::{Way, trades};
use dplan_planner::memory::{BucketSize, LayerBytes, StateTypes};
use dplan_planner::options::{Halves, LayerOption};
use dplan_planner::pins::Pins;
use dplan_planner::placement::{Groups, Seat, Site};
use dplan_planner::prices::{Floor, Links, Offer, Prices, Reference, Shape};
use dplan_planner::problem::Problem;
use dplan_planner::units::{Bytes, Nanos};
use std::collections::BTreeMap;
use std::rc::Rc;

/// SplitMix64.
#[derive(Clone)]
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        dplan_ir::splitmix::next(&mut self.0)
    }
    /// `low..=high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }
}

pub struct Drawn {
    seed: u64,
    pub classes: Vec<u32>,
    /// Classes whose layers share a tied parameter.
    pub tied: Vec<u32>,
    most_offers: u64,
    groups: Groups,
    memory: u64,
    latency: u64,
    known: BTreeMap<(u32, Shape), Rc<[Offer]>>,
}

pub struct Instance {
    pub prices: Drawn,
    pub problem: Problem,
}

/// A small instance: up to `most_layers` layers on up to 8 devices.
pub fn instance(seed: u64, most_layers: u64, most_offers: u64) -> Instance {
    let mut dice = Dice(seed);
    let layers = dice.within(1, most_layers);
    let kinds = dice.within(1, 3);
    let mut classes: Vec<u32> = (0..layers).map(|_| dice.within(0, kinds - 1) as u32).collect();
    let mut tied = Vec::new();
    if layers >= 2 && dice.one_in(2) {
        (classes[0], classes[layers as usize - 1]) = (8, 9);
        tied = vec![8, 9];
    }
    let devices = [1, 2, 3, 4, 4, 6, 8][dice.within(0, 6) as usize];
    let batch = [1, 2, 4, 6, 8, 12][dice.within(0, 5) as usize];
    let memory = dice.within(10_000, 45_000 * layers);
    let latency = dice.within(0, 100);
    let groups = groups(&mut Dice(seed ^ 0x6709), devices);
    let prices = Drawn { seed, classes, tied, most_offers, groups, memory, latency, known: BTreeMap::new() };
    let compute = if dice.one_in(2) { DType::F32 } else { DType::Bf16 };
    let optimizer = [Optimizer::Sgd, Optimizer::AdamW, Optimizer::Lamb][dice.within(0, 2) as usize];
    let clip = if dice.one_in(2) { Clip::GlobalNorm } else { Clip::None };
    let pins = [
        "",
        "",
        "",
        "zero@0-0=0+1",
        "recompute=none",
        "schedule=gpipe",
        "pp=1+2",
        "offload=none+optimizer",
        "offload=optimizer+parameters:nvme",
        "offload=none+gradients",
        "offload=none+activations",
        "offload=activations:nvme+optimizer/activations",
        "pp=1+2,offload=none+activations:nvme",
    ][dice.within(0, 12) as usize];
    // Whatever else is pinned.
    let wire = if Dice(seed ^ 0x31fe).one_in(5) { ",wire=bf16" } else { "" };
    let laid = match Dice(seed ^ 0x5c1d).within(0, 11) {
        0 => ",sync=hierarchical",
        1 => ",sync=hierarchical:2+flat",
        2 => ",sync=tree+hierarchical+hierarchical:3",
        3 => ",map=tp.dp+dp.ep.tp.cp+cp.tp.dp",
        5 => ",sync=server",
        6 => ",sync=server+flat",
        4 => ",sync=tree+flat,map=tp.dp+dp.ep.cp.tp",
        _ => "",
    };
    let pins = Pins::parse(&format!("{pins}{wire}{laid}")).unwrap();
    let problem = Problem::new(&prices, devices, batch, StateTypes::new(compute, optimizer), clip, pins, None);
    Instance { prices, problem }
}

/// All devices alike, or two or three groups of any sizes.
fn groups(dice: &mut Dice, devices: u64) -> Groups {
    match dice.within(0, 5) {
        0..=1 if devices >= 2 => {
            let first = dice.within(1, devices - 1);
            Groups::new(vec![first, devices - first])
        }
        2 if devices >= 3 => {
            let first = dice.within(1, devices - 2);
            let second = dice.within(1, devices - first - 1);
            Groups::new(vec![first, second, devices - first - second])
        }
        _ => Groups::one(),
    }
}

/// An instance of a real model's size: 24 to 96 layers of up to three kinds between two of their own, on 64 to 1024 devices.
pub fn medium(seed: u64) -> Instance {
    let mut dice = Dice(seed ^ 0x3ed1);
    let layers = dice.within(24, 96);
    let kinds = dice.within(1, 3);
    let mut classes: Vec<u32> = (0..layers).map(|l| (l * kinds / layers) as u32).collect();
    (classes[0], classes[layers as usize - 1]) = (8, 9);
    let tied = if dice.one_in(2) { vec![8, 9] } else { vec![] };
    let devices = 64 << dice.within(0, 4);
    let batch = devices * [1, 2, 4][dice.within(0, 2) as usize];
    let memory = dice.within(20_000, 12_000 * layers);
    let latency = dice.within(0, 100);
    // Every third cluster is a quarter of its devices and the rest.
    let groups = if seed.is_multiple_of(3) { Groups::new(vec![devices / 4, devices - devices / 4]) } else { Groups::one() };
    let prices = Drawn { seed, classes, tied, most_offers: 6, groups, memory, latency, known: BTreeMap::new() };
    let types = StateTypes::new(DType::Bf16, Optimizer::AdamW);
    // Drawn prices favour no degree: few are left open, so that the tuples that are solved differ in everything else.
    let pins = ["tp=1+2+4,cp=1,ep=1", "pp=4+8,cp=1", "tp=8,micro=1+2", "pp=2+16,ep=1"][dice.within(0, 3) as usize];
    let problem = Problem::new(&prices, devices, batch, types, Clip::GlobalNorm, Pins::parse(pins).unwrap(), None);
    Instance { prices, problem }
}

/// The least of some offers' buckets, by how they are spread over data axes.
fn least_buckets<'a>(offers: impl Iterator<Item = &'a LayerOption>, tp: AxisSet) -> Vec<BucketSize> {
    let mut least: Option<BTreeMap<AxisSet, u64>> = None;
    for option in offers {
        let mut own: BTreeMap<AxisSet, u64> = BTreeMap::new();
        for bucket in option.bytes.buckets.iter().filter(|b| !b.tied) {
            *own.entry(bucket.axes.minus(tp)).or_default() += bucket.elems;
        }
        // What some offer does not have at all is no part of the least.
        least = Some(match least {
            None => own,
            Some(least) => least.into_iter().filter_map(|(spread, elems)| Some((spread, elems.min(*own.get(&spread)?)))).collect(),
        });
    }
    let bucket = |(spread, elems)| BucketSize { elems, partial: AxisSet::EMPTY, axes: spread, members: 0, tied: false };
    least.unwrap_or_default().into_iter().map(bucket).collect()
}

impl Drawn {
    /// A drawn part of an amount, from a half up to double, by site; on the first group, and so where all devices are alike, the amount.
    fn on(&self, site: Site, what: u64, amount: u64) -> u64 {
        if site == Site::ONLY { amount } else { amount * Dice(self.seed ^ (site.index() as u64) << 8 ^ what).within(50, 200) / 100 }
    }
}

impl Links for Drawn {
    fn collective(&self, site: Site, mesh: &Mesh, axes: AxisSet, pattern: Pattern, bytes: u64) -> Nanos {
        let ranks = mesh.size(axes);
        let times = if pattern == Pattern::AllReduce { 2 } else { 1 };
        // Nodes of two devices, and a network of half their speed.
        let rate = if axes.iter().any(|a| mesh.axis(a).size > 1 && mesh.stride(a) * mesh.axis(a).size > 2) { 50 } else { 100 };
        if ranks == 1 { Nanos(0) } else { Nanos(self.on(site, 1, times * (self.latency + bytes * (ranks - 1) / ranks / rate))) }
    }
    fn nodes(&self, mesh: &Mesh, axes: AxisSet) -> u64 {
        let ranks = mesh.size(axes);
        if axes.iter().any(|a| mesh.stride(a) == 1) && ranks.is_multiple_of(2) { ranks / 2 } else { ranks }
    }
    fn across_stages(&self, mesh: &Mesh, axes: AxisSet, stages: u64, bytes: u64) -> Nanos {
        let ranks = mesh.size(axes) * stages;
        if ranks == 1 { Nanos(0) } else { Nanos(2 * self.latency + bytes / 50) }
    }
    fn message(&self, mesh: &Mesh, from: Seat, to: Seat, bytes: u64) -> Nanos {
        let stage = |seat: Seat| seat.first / mesh.ranks();
        let time = self.latency + (1 + (stage(from) + stage(to) / 2) % 2) * bytes / 100;
        Nanos(self.on(from.site, 2, self.on(to.site, 3, time)))
    }
    fn copy(&self, site: Site, store: Store, bytes: u64) -> Nanos {
        let time = match store {
            Store::Cpu => self.latency / 2 + bytes / 40,
            Store::Nvme => self.latency + bytes / 15,
        };
        Nanos(self.on(site, 4, time))
    }
    fn sweep(&self, site: Site, bytes: u64) -> Nanos {
        Nanos(self.on(site, 5, bytes / 300))
    }
}

impl Prices for Drawn {
    fn groups(&self) -> &Groups {
        &self.groups
    }
    fn classes(&self) -> &[u32] {
        &self.classes
    }
    fn boundary_dims(&self, tp: u64) -> Vec<u32> {
        if tp.is_multiple_of(2) { vec![1] } else { vec![] }
    }
    fn paddings(&mut self, tp: u64) -> u32 {
        if tp == 3 { 2 } else { 1 }
    }
    fn offers(&mut self, class: u32, shape: Shape) -> Rc<[Offer]> {
        let (seed, most, tied) = (self.seed, self.most_offers, self.tied.contains(&class));
        let draw = || {
            let code = [
                u64::from(class),
                shape.tp,
                shape.cp,
                shape.ep,
                shape.micro_batch,
                u64::from(shape.boundary.is_some()),
                u64::from(shape.padding) + 1000 * u64::from(shape.keys == Keys::Ring),
            ];
            // What layers compute does not ask how their gradients get to a sum.
            let nested = shape.uncut().nested.map(|(nest, _, dp)| [dp, Nest::all().iter().position(|n| *n == nest).unwrap() as u64]);
            let code = code.iter().chain(nested.iter().flatten());
            let mut dice = Dice(code.fold(seed, |s, c| Dice(s ^ c.wrapping_mul(0x1234_5678_9abc_def1)).next()));
            if dice.one_in(25) {
                return Vec::new();
            }
            let (width, size) = (dice.within(100, 1000), dice.within(1, 3000));
            let mut offers: Vec<Offer> = (0..dice.within(1, most)).map(|_| offer(&mut dice, shape, width, size, tied, reads_back(class))).collect();
            if shape.site != Site::ONLY {
                // Other devices: each way takes its own part of time and frame.
                let mut dice = Dice(dice.0 ^ shape.site.index() as u64);
                for LayerOption { forward, backward, bytes, .. } in offers.iter_mut().map(|o| &mut o.option) {
                    let mut part = |amount: u64| amount * dice.within(40, 200) / 100;
                    (forward.0, backward.0, bytes.frame) = (part(forward.0), part(backward.0), part(bytes.frame));
                }
            }
            offers
        };
        Rc::clone(self.known.entry((class, shape)).or_insert_with(|| draw().into()))
    }
    fn contexts(&self, ranks: u64, _: u64) -> Vec<u64> {
        let most = [1, 1, 2, 4][(Dice(self.seed ^ 0xc0).next() % 4) as usize];
        (1..=most).filter(|cp| ranks.is_multiple_of(*cp)).collect()
    }
    fn experts(&self, ranks: u64) -> Vec<u64> {
        let most = [1, 4, 1, 2, 1][(Dice(self.seed ^ 0xe0).next() % 5) as usize];
        (1..=most).filter(|ep| ranks.is_multiple_of(*ep)).collect()
    }
    /// Halves of every proportion, more to keep, and another workspace.
    fn halves(&mut self, class: u32, shape: Shape) -> Rc<[Halves]> {
        let offers = self.offers(class, shape);
        let part = |(at, offer): (usize, &Offer)| {
            let mut dice = Dice(self.seed ^ (at as u64 + 7 * u64::from(class)).wrapping_mul(0x1234_5678_9abc_def1));
            let (backward, bytes) = (offer.option.backward.0, &offer.option.bytes);
            let weight = backward * dice.within(0, 10) / 10;
            let (held, workspace) = (dice.within(0, 1000) * shape.micro_batch, bytes.workspace * dice.within(5, 10) / 10);
            Halves { input: Nanos(backward - weight), weight: Nanos(weight), bytes: LayerBytes { held, workspace, ..bytes.clone() } }
        };
        offers.iter().enumerate().map(part).collect()
    }
    fn floor(&mut self, class: u32, shape: Shape, from: Reference, recompute: &[Recompute]) -> Floor {
        // Drawn offers have no reference: more and more of what they take is known.
        let part = match from {
            Reference::Rank => (1, 3),
            Reference::Whole { .. } => (3, 4),
            Reference::Same { .. } => (9, 10),
        };
        // One rank knows neither boundary nor padding nor keys, whole sequences have their keys: these are below what is offered under any.
        let both = |shape| Keys::ALL.into_iter().map(move |keys| Shape { keys, ..shape });
        let shapes: Vec<Shape> = match from {
            Reference::Rank => {
                let paddings = self.paddings(shape.tp);
                let boundaries = std::iter::once(None).chain(self.boundary_dims(shape.tp).into_iter().map(Some));
                let shapes = boundaries.flat_map(|boundary| (0..paddings).map(move |padding| Shape { boundary, padding, ..shape }));
                shapes.flat_map(both).collect()
            }
            Reference::Whole { .. } => both(shape).collect(),
            Reference::Same { .. } => vec![shape],
        };
        let offers: Vec<Rc<[Offer]>> = shapes.into_iter().map(|shape| self.offers(class, shape)).collect();
        let allowed = || offers.iter().flat_map(|o| o.iter()).map(|o| &o.option).filter(|o| recompute.contains(&o.recompute));
        let tp = Mesh::of(shape.degrees()).tp();
        let ways = allowed().map(|o| Way { time: o.time().0, frame: o.bytes.frame, workspace: o.bytes.workspace });
        Floor { trades: trades(ways).into(), part, buckets: least_buckets(allowed(), tp), reads_back: reads_back(class) }
    }
    fn boundary_bytes(&mut self, shape: Shape) -> Rc<[u64]> {
        (1..self.classes.len() as u64).map(|layer| (200 + 100 * ((layer - 1) % 2)) * shape.micro_batch).collect()
    }
    fn device_memory(&self, site: Site) -> Bytes {
        Bytes(self.on(site, 6, self.memory))
    }
    fn context(&self, site: Site) -> Bytes {
        Bytes(self.on(site, 7, 1000))
    }
}

/// As of an embedding, no backward pass of every third kind reads parameters.
fn reads_back(class: u32) -> bool {
    !class.is_multiple_of(3)
}

fn offer(dice: &mut Dice, shape: Shape, width: u64, size: u64, tied: bool, reads_back: bool) -> Offer {
    let mesh = Mesh::of(shape.degrees());
    let first: AxisSet = mesh.tp().iter().take(1).collect();
    let partial = if dice.one_in(3) { first } else { AxisSet::EMPTY };
    let axes = if dice.one_in(2) { mesh.tp() } else { AxisSet::EMPTY };
    let split = shape.cp * mesh.size(axes);
    let mut buckets = vec![BucketSize { elems: size.div_ceil(split), partial: partial.minus(axes), axes, members: 1 + size % 5, tied: false }];
    if !mesh.ep().is_empty() && dice.one_in(2) {
        buckets.push(BucketSize { elems: dice.within(1, 2000) / shape.ep, partial, axes: mesh.ep(), members: 1, tied: false });
    }
    let cut = if dice.one_in(2) { first } else { AxisSet::EMPTY };
    if tied {
        let elems = 2000 / if cut.is_empty() { 1 } else { shape.tp };
        buckets.push(BucketSize { elems, partial: AxisSet::EMPTY, axes: cut, members: 1, tied: true });
    }
    let talk = if shape.tp * shape.cp > 1 { dice.within(0, width * shape.micro_batch) } else { 0 };
    let forward = width * shape.micro_batch / split + talk + dice.within(20, 100);
    let recompute = if dice.one_in(2) { Recompute::Full } else { Recompute::None };
    let backward = 2 * forward + if recompute == Recompute::Full { forward } else { 0 };
    // Every layer keeps its input at least.
    let frame = (300 + dice.within(0, 3000) / if recompute == Recompute::Full { 4 } else { 1 }) * shape.micro_batch;
    let option = LayerOption {
        strategy: Vec::new(),
        recompute,
        gathered: Gathered::Keep,
        forward: Nanos(forward),
        backward: Nanos(backward),
        bytes: LayerBytes { buckets, reads_back, frame, held: 0, workspace: dice.within(0, 3000) * shape.micro_batch },
    };
    Offer { option, tie: tied.then(|| Sharding::of_dims(vec![cut])) }
}
