//! Global tuples: the choices that all layers share.
//!
//! The space of a request is every tuple with `dp · cp · tp · pp` = all devices, `dp · micro_batch · micro_batches` = the batch, at least one layer for each
//! stage, `cp` a divisor of the sequence that leaves blocks of [`LEAST_BLOCK`] (unless it is pinned), `ep` a divisor of `dp` and of the experts, and `tp` at most
//! [`MOST_TP`] (unless a pin asks for more); for every schedule that is searched ([`searched`]) and whose pipeline is legal ([`Pipeline::refusal`]), with 2, 4, 8, …
//! virtual stages on each stage where it has several, unless pinned; for every order of the cluster's groups that puts stages elsewhere ([`crate::placement`]); times
//! both ways of keys between up to 64 context-parallel ranks; times every way in which gradients get to their sum and every nesting of the degrees on ranks that is pinned (one
//! collective, and the usual nesting, if none is); times
//! every cut of the layers into `pp` stages (with several virtual stages, the cuts of [`crate::virtual_stages`]); times every option, ZeRO stage and way of offloading of
//! every layer (ZeRO 0 and 1 where backward passes come in halves).

use crate::memory::StateTypes;
use crate::pins::{Asked, Pins};
use crate::placement::Site;
use crate::prices::{Prices, Shape};
use dplan_ir::mesh::{Degrees, Keys, Mesh};
use dplan_ir::nest::{Nest, Way};
use dplan_ir::pipeline::Pipeline;
use dplan_ir::plan::{Placement, Schedule};
use dplan_ir::program::Updates;
use dplan_ir::ring::Ring;
use dplan_ir::sync::Sync;

/// The widest tensor parallelism that is searched without a pin: the largest node sold has 72 devices on one fabric, and every matrix of a layer cut 64 ways is small.
pub const MOST_TP: u64 = 64;

/// The shortest block of a sequence that context parallelism is searched for without a pin, positions: shorter ones leave products too few rows.
pub const LEAST_BLOCK: u64 = 512;

/// The shortest block of a sequence under these pins.
pub fn least_block(pins: &Pins) -> u64 {
    if pins.cp.is_pinned() { 1 } else { LEAST_BLOCK }
}

/// Choices that all layers share. Ordered: among equal plans the least tuple wins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Tuple {
    pub pp: u64,
    pub tp: u64,
    pub cp: u64,
    pub ep: u64,
    pub dp: u64,
    pub micro_batch: u64,
    pub micro_batches: u64,
    pub schedule: Schedule,
    /// Virtual stages on each stage.
    pub virtual_stages: u64,
    pub boundary: Option<u32>,
    pub padding: u32,
    /// Which group of devices has which stages.
    pub placement: Placement,
    /// Which degrees lie on which links.
    pub nest: Nest,
    /// How context-parallel ranks get at each other's keys and values.
    pub keys: Keys,
    /// How gradients get to their sum.
    pub sync: Sync,
}

impl Tuple {
    /// All of it but how keys and gradients travel: tuples alike in this are a *family*, and lie together in the order of tuples.
    pub fn family(&self) -> Tuple {
        Tuple { keys: Keys::Gathered, sync: Sync::Flat, ..*self }
    }
    /// On stages at a site.
    pub fn shape(&self, site: Site) -> Shape {
        let &Tuple { tp, cp, ep, dp, micro_batch, boundary, padding, keys, sync, nest, .. } = self;
        Shape { tp, cp, ep, micro_batch, boundary, padding, keys, site, nested: self.degrees().is_unusual().then_some((nest, sync, dp)) }
    }
    /// Ranks of a stage.
    pub fn degrees(&self) -> Degrees {
        Degrees { dp: self.dp, ep: self.ep, cp: self.cp, tp: self.tp, keys: self.keys, sync: self.sync, nest: self.nest }
    }
    /// What its exchanges of gradients are like, beside what all tuples share.
    pub fn types(&self, shared: StateTypes) -> StateTypes {
        StateTypes { sync: self.sync, ..shared }
    }
    pub fn mesh(&self) -> Mesh {
        Mesh::of(self.degrees())
    }
    pub fn pipeline(&self) -> Pipeline {
        let &Tuple { pp: stages, schedule, virtual_stages, micro_batches, .. } = self;
        Pipeline { schedule, stages, virtual_stages, micro_batches }
    }
    /// Micro-batches of which every layer of a stage keeps its input, at least.
    pub fn in_flight(&self, stage: u64) -> u64 {
        match self.schedule {
            Schedule::GPipe | Schedule::OneFOneB | Schedule::ZbH1 | Schedule::PipeDream => {
                self.pipeline().slots(stage).iter().map(|s| s.frames).min().unwrap_or(1)
            }
            Schedule::Interleaved | Schedule::ZbV => 1,
        }
    }
}

/// All tuples that the pins allow, in order.
pub fn tuples(prices: &mut dyn Prices, devices: u64, batch: u64, pins: &Pins) -> Vec<Tuple> {
    let mut all = Vec::new();
    let layers = prices.classes().len() as u64;
    for (degrees, pp) in layouts(prices, devices, pins) {
        let Degrees { dp, ep, cp, tp, keys, .. } = degrees;
        let laid = laid(prices, degrees, pins);
        if !batch.is_multiple_of(dp) {
            continue;
        }
        let per_rank = batch / dp;
        let paddings = prices.paddings(tp);
        let placements = prices.groups().placements(degrees.ranks(), pp);
        let boundaries: Vec<Option<u32>> = std::iter::once(None)
            .chain(prices.boundary_dims(tp).into_iter().filter(|_| tp > 1).map(Some))
            .filter(|b| match b {
                None => pins.boundary.allows(&false),
                Some(1) => pins.boundary.allows(&true),
                Some(_) => !pins.boundary.is_pinned(),
            })
            .collect();
        for micro_batch in divisors(per_rank).filter(|m| pins.micro_batch.allows(m)) {
            let micro_batches = per_rank / micro_batch;
            for Pipeline { schedule, virtual_stages, .. } in pipelines(layers, pp, micro_batches, pins) {
                for &boundary in &boundaries {
                    for padding in 0..paddings {
                        let tuple = |(&placement, &(sync, nest)): (&Placement, &(Sync, Nest))| Tuple {
                            pp,
                            tp,
                            cp,
                            ep,
                            dp,
                            micro_batch,
                            micro_batches,
                            schedule,
                            virtual_stages,
                            boundary,
                            padding,
                            placement,
                            nest,
                            keys,
                            sync,
                        };
                        all.extend(placements.iter().flat_map(|p| laid.iter().map(move |l| (p, l))).map(tuple));
                    }
                }
            }
        }
    }
    all.sort_unstable();
    all
}

/// How gradients of so many ranks may get to their sum, and how these may be nested: one way, unless pins say otherwise. Of orders that nest the same ranks alike the least
/// is taken.
fn laid(prices: &dyn Prices, degrees: Degrees, pins: &Pins) -> Vec<(Sync, Nest)> {
    let size = |way: &Way| match way {
        Way::Data => degrees.dp / degrees.ep,
        Way::Expert => degrees.ep,
        Way::Context => degrees.cp,
        Way::Tensor => degrees.tp,
    };
    let order = |nest: &Nest| nest.0.into_iter().filter(|way| size(way) > 1).collect::<Vec<_>>();
    let mut nests: Vec<Nest> = match pins.nest.values() {
        None => vec![Nest::default()],
        Some(pinned) => pinned.to_vec(),
    };
    nests.sort_unstable();
    let first = |at: usize| nests[..at].iter().all(|n| order(n) != order(&nests[at]));
    let distinct: Vec<Nest> = (0..nests.len()).filter(|&at| first(at)).map(|at| nests[at]).collect();
    let mut all: Vec<(Sync, Nest)> = Vec::new();
    for nest in distinct {
        let asked = pins.sync.values().unwrap_or(&[Asked::This(Sync::Flat)]);
        all.extend(asked.iter().filter_map(|asked| Some((asked.sync(prices, Degrees { nest, ..degrees })?, nest))));
    }
    all.sort_unstable();
    all.dedup();
    all
}

impl Asked {
    /// What that is for so many ranks; nothing where it cannot be: experts are shared out, or there are not such parts. What would be one step is one collective.
    fn sync(self, prices: &dyn Prices, degrees: Degrees) -> Option<Sync> {
        let Degrees { dp, ep, .. } = degrees;
        let (sync, is_asked) = match self {
            Asked::This(sync) => (sync, true),
            Asked::ByNodes => {
                let mesh = Mesh::of(Degrees { sync: Sync::Flat, ..degrees });
                (Sync::Hierarchical { far: prices.nodes(&mesh, mesh.dp()) }, false)
            }
        };
        let can_be = match sync {
            Sync::Flat | Sync::Server => true,
            Sync::Hierarchical { far } => ep == 1 && (!is_asked || dp.is_multiple_of(far)),
            Sync::Tree => ep == 1,
        };
        let mesh = Mesh::of(Degrees { sync, ..degrees });
        let is_flat = match sync {
            Sync::Flat | Sync::Server => mesh.data().is_empty(),
            Sync::Hierarchical { .. } | Sync::Tree => sync.steps(&mesh, mesh.data()).len() < 2,
        };
        can_be.then_some(if is_flat { Sync::Flat } else { sync })
    }
}

/// The schedules that are searched: gpipe and 1f1b, and those that are pinned, by name or by their virtual stages; but one that changes numbers by its name alone.
pub fn searched(pins: &Pins) -> Vec<Schedule> {
    let pinned = pins.schedule.is_pinned() || pins.virtual_stages.values().is_some_and(|v| v.iter().any(|&v| v > 1));
    let asked = |s: &Schedule| match s.updates() {
        Updates::Step => pinned || s.is_plain(),
        Updates::MicroBatch => pins.schedule.is_pinned(),
    };
    Schedule::ALL.into_iter().filter(|s| pins.schedule.allows(s) && asked(s)).collect()
}

/// Every pipeline of so many stages and micro-batches that the pins allow, each virtual stage with a layer at least.
fn pipelines(layers: u64, stages: u64, micro_batches: u64, pins: &Pins) -> Vec<Pipeline> {
    pinned_pipelines(layers, stages, micro_batches, pins).into_iter().filter(|p| refusal(p, layers).is_none()).collect()
}

/// The same and those that cannot be.
fn pinned_pipelines(layers: u64, stages: u64, micro_batches: u64, pins: &Pins) -> Vec<Pipeline> {
    let counts: Vec<u64> = match pins.virtual_stages.values() {
        Some(pinned) => pinned.to_vec(),
        None => std::iter::successors(Some(1), |v| Some(2 * v)).take_while(|v| v * stages <= layers).collect(),
    };
    let of = |schedule| counts.iter().map(move |&virtual_stages| Pipeline { schedule, stages, virtual_stages, micro_batches });
    searched(pins).into_iter().flat_map(of).collect()
}

/// What a pipeline lacks, if it cannot be.
fn refusal(pipeline: &Pipeline, layers: u64) -> Option<&'static str> {
    let few_layers = pipeline.virtual_stages > layers / pipeline.stages;
    pipeline.refusal().or(few_layers.then_some("a layer for each virtual stage"))
}

/// What pipelines under these pins would need, if there is none.
pub fn needs_of_pipelines(prices: &dyn Prices, devices: u64, batch: u64, pins: &Pins) -> Option<String> {
    let layers = prices.classes().len() as u64;
    let mut needs: Vec<String> = Vec::new();
    for (Degrees { dp, .. }, pp) in layouts(prices, devices, pins).into_iter().filter(|(d, _)| batch.is_multiple_of(d.dp)) {
        for micro_batch in divisors(batch / dp).filter(|m| pins.micro_batch.allows(m)) {
            for pipeline in pinned_pipelines(layers, pp, batch / dp / micro_batch, pins) {
                let lacks = format!("{} needs {}", pipeline.schedule.name(), refusal(&pipeline, layers)?);
                if !needs.contains(&lacks) {
                    needs.push(lacks);
                }
            }
        }
    }
    (!needs.is_empty()).then(|| needs.join(", "))
}

/// Every way of sharing out all devices that the pins allow: the ranks of a stage, and the number of stages.
pub fn layouts(prices: &dyn Prices, devices: u64, pins: &Pins) -> Vec<(Degrees, u64)> {
    let layers = prices.classes().len() as u64;
    let mut all = Vec::new();
    for tp in divisors(devices).filter(|tp| pins.tp.allows(tp) && (*tp <= MOST_TP || pins.tp.is_pinned())) {
        for pp in divisors(devices / tp).filter(|pp| pins.pp.allows(pp) && *pp <= layers) {
            for cp in prices.contexts(devices / tp / pp, least_block(pins)).into_iter().filter(|cp| pins.cp.allows(cp)) {
                let dp = devices / tp / pp / cp;
                if pins.dp.allows(&dp) {
                    let experts = prices.experts(dp).into_iter().filter(|ep| pins.ep.allows(ep));
                    let each = experts.flat_map(|ep| ways(cp, pins).map(move |keys| (Degrees { dp, ep, cp, tp, keys, ..Degrees::ONE }, pp)));
                    all.extend(each);
                }
            }
        }
    }
    all
}

/// How so many context-parallel ranks may get at each other's keys under these pins: a ring has a bit for each rank.
fn ways(cp: u64, pins: &Pins) -> impl Iterator<Item = Keys> + use<> {
    let pinned = pins.keys.clone();
    Keys::ALL.into_iter().filter(move |keys| match keys {
        Keys::Gathered => pinned.allows(&Keys::Gathered) || cp == 1,
        Keys::Ring => (2..=Ring::MOST).contains(&cp) && pinned.allows(&Keys::Ring),
    })
}

/// Most values of a pin that are named.
const MOST_NAMED: usize = 16;

/// Which pins keep devices from being shared out, and what each could be beside the others.
pub fn needs_of_layouts(prices: &dyn Prices, devices: u64, pins: &Pins) -> String {
    let could_be = |(key, relaxed): (&'static str, Pins)| {
        let value = |&(Degrees { dp, ep, cp, tp, .. }, pp): &(Degrees, u64)| match key {
            "dp" => Some(dp),
            "ep" => Some(ep),
            "cp" => Some(cp),
            "tp" => Some(tp),
            "pp" => Some(pp),
            _ => None,
        };
        let mut values: Vec<u64> = layouts(prices, devices, &relaxed).iter().filter_map(value).collect();
        values.sort_unstable();
        values.dedup();
        let more = if values.len() > MOST_NAMED { ", …" } else { "" };
        let named: Vec<String> = values.iter().take(MOST_NAMED).map(u64::to_string).collect();
        let why = if key == "pp" { format!(": each stage needs one of {} layers", prices.classes().len()) } else { String::new() };
        (!values.is_empty()).then(|| format!("{key} could be {}{more}{why}", named.join(", ")))
    };
    let single: Vec<String> = pins.relaxations().into_iter().filter_map(could_be).collect();
    if single.is_empty() {
        format!("changing one of them is not enough; stages have one of {} layers at least", prices.classes().len())
    } else {
        single.join(", or ")
    }
}

/// The batch nearest to `batch` that some layout and micro-batch cover exactly (the smaller of two equally near), if there is any layout.
pub fn nearest_batch(layouts: &[(Degrees, u64)], batch: u64, pins: &Pins) -> Option<u64> {
    let units = layouts.iter().flat_map(|&(Degrees { dp, .. }, _)| match pins.micro_batch.values() {
        Some(sizes) => sizes.iter().map(|micro| dp * micro).collect::<Vec<_>>(),
        None => vec![dp],
    });
    let nearest = units.flat_map(|unit| {
        let below = batch / unit * unit;
        [below, below + unit].into_iter().filter(|&b| b > 0)
    });
    nearest.min_by_key(|&b| (b.abs_diff(batch), b))
}

/// The largest number that divides both; of 0 and a number, that number.
pub fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// The smallest number that both divide. They are not both 0.
pub fn least_common_multiple(a: u64, b: u64) -> u64 {
    a / greatest_common_divisor(a, b) * b
}

/// Divisors, rising.
pub fn divisors(n: u64) -> impl Iterator<Item = u64> {
    let low: Vec<u64> = (1..).take_while(move |d| d * d <= n).filter(|&d| n.is_multiple_of(d)).collect();
    let high: Vec<u64> = low.iter().rev().map(|d| n / d).filter(|h| !low.contains(h)).collect();
    low.into_iter().chain(high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_rise_and_are_complete() {
        assert_eq!(divisors(36).collect::<Vec<_>>(), [1, 2, 3, 4, 6, 9, 12, 18, 36]);
        assert_eq!(divisors(1).collect::<Vec<_>>(), [1]);
        assert_eq!(divisors(7).collect::<Vec<_>>(), [1, 7]);
    }

    #[test]
    fn the_nearest_batch_is_one_that_the_pins_cover() {
        let pins = Pins::parse("dp=4,micro=3").unwrap();
        let nearest = |batch| nearest_batch(&[(Degrees { dp: 4, ..Degrees::ONE }, 2)], batch, &pins);
        assert_eq!((nearest(30), nearest(31), nearest(5)), (Some(24), Some(36), Some(12)));
        assert_eq!(nearest_batch(&[], 5, &pins), None);
    }
}
