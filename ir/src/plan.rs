//! All choices about how to train one model on one cluster. Costs are not here: they are recomputed from the choices.

use crate::dtype::DType;
use crate::mesh::{Degrees, Keys, Mesh};
use crate::nest::Nest;
use crate::optimizer::Optimizer;
use crate::pipeline::Pipeline;
use crate::program::{Space, Updates};
use crate::rule::Assignment;
use crate::sync::Sync;

/// Order of the passes of micro-batches on a stage ([`crate::pipeline`] has the orders).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Schedule {
    /// All forwards, then all backwards: every micro-batch is in flight.
    GPipe,
    /// One forward, one backward: stage s of p keeps at most p − s micro-batches in flight.
    OneFOneB,
    /// The same through several virtual stages on each stage, round and round.
    Interleaved,
    /// One forward, one backward, with weight gradients put off into the bubble.
    ZbH1,
    /// Two virtual stages on each stage, there and back, with weight gradients apart.
    ZbV,
    /// The order of 1f1b, with an update behind every backward pass (arXiv:1806.03377): asynchronous, for passes work with parameters that are behind ([`crate::pipeline`]).
    PipeDream,
}

impl Schedule {
    pub const ALL: [Schedule; 6] = [Schedule::GPipe, Schedule::OneFOneB, Schedule::Interleaved, Schedule::ZbH1, Schedule::ZbV, Schedule::PipeDream];
    pub fn name(self) -> &'static str {
        match self {
            Schedule::GPipe => "gpipe",
            Schedule::OneFOneB => "1f1b",
            Schedule::Interleaved => "interleaved",
            Schedule::ZbH1 => "zb-h1",
            Schedule::ZbV => "zb-v",
            Schedule::PipeDream => "pipedream",
        }
    }
    /// One virtual stage on each stage, and backward passes in one piece.
    pub fn is_plain(self) -> bool {
        match self {
            Schedule::GPipe | Schedule::OneFOneB | Schedule::PipeDream => true,
            Schedule::Interleaved | Schedule::ZbH1 | Schedule::ZbV => false,
        }
    }
    /// When parameters are updated.
    pub fn updates(self) -> Updates {
        match self {
            Schedule::GPipe | Schedule::OneFOneB | Schedule::Interleaved | Schedule::ZbH1 | Schedule::ZbV => Updates::Step,
            Schedule::PipeDream => Updates::MicroBatch,
        }
    }
    pub fn from_name(name: &str) -> Option<Schedule> {
        Schedule::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// What is sharded over the data-parallel ranks (arXiv:1910.02054): 1 optimizer states, 2 also gradients, 3 also parameters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Zero(pub u8);

/// A memory beside the device's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Store {
    /// That of the host.
    Cpu,
    /// A file for each rank, on a disk of its node.
    Nvme,
}

impl Store {
    pub const ALL: [Store; 2] = [Store::Cpu, Store::Nvme];
    pub fn space(self) -> Space {
        match self {
            Store::Cpu => Space::Host,
            Store::Nvme => Space::File,
        }
    }
}

/// Which of a layer's states live in another memory (arXiv:2101.06840, arXiv:2104.07857): as with ZeRO, each way takes along what those before it take.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Offload {
    #[default]
    None,
    /// Master copy and moments: the update copies them in and out.
    Optimizer(Store),
    /// Also gradients: every backward pass copies the sum so far in and out.
    Gradients(Store),
    /// Also parameters: every pass copies them in.
    Parameters(Store),
}

impl Offload {
    pub const ALL: [Offload; 7] = [
        Offload::None,
        Offload::Optimizer(Store::Cpu),
        Offload::Optimizer(Store::Nvme),
        Offload::Gradients(Store::Cpu),
        Offload::Gradients(Store::Nvme),
        Offload::Parameters(Store::Cpu),
        Offload::Parameters(Store::Nvme),
    ];
    pub fn name(self) -> &'static str {
        match self {
            Offload::None => "none",
            Offload::Optimizer(Store::Cpu) => "optimizer",
            Offload::Optimizer(Store::Nvme) => "optimizer:nvme",
            Offload::Gradients(Store::Cpu) => "gradients",
            Offload::Gradients(Store::Nvme) => "gradients:nvme",
            Offload::Parameters(Store::Cpu) => "parameters",
            Offload::Parameters(Store::Nvme) => "parameters:nvme",
        }
    }
    pub fn from_name(name: &str) -> Option<Offload> {
        Offload::ALL.into_iter().find(|o| o.name() == name)
    }
    /// Where it leads to, if anywhere.
    pub fn store(self) -> Option<Store> {
        match self {
            Offload::None => None,
            Offload::Optimizer(store) | Offload::Gradients(store) | Offload::Parameters(store) => Some(store),
        }
    }
    /// Whether forward and backward passes copy, and not the update alone.
    pub fn is_in_passes(self) -> bool {
        matches!(self, Offload::Gradients(_) | Offload::Parameters(_))
    }
}

/// What of a layer lives in other memories.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Away {
    pub states: Offload,
    /// What its backward pass finds of the forward pass of each micro-batch: it goes out behind the one and comes in before the other.
    pub activations: Option<Store>,
}

impl Away {
    /// Every way, what takes less along first.
    pub fn all() -> impl Iterator<Item = Away> {
        let activations = || [None].into_iter().chain(Store::ALL.map(Some));
        activations().flat_map(|activations| Offload::ALL.map(|states| Away { states, activations }))
    }
    /// `none`, `gradients:nvme`, `activations`, `optimizer/activations:nvme`, …
    pub fn name(self) -> String {
        let activations = self.activations.map(|store| match store {
            Store::Cpu => "activations",
            Store::Nvme => "activations:nvme",
        });
        match (self.states, activations) {
            (states, None) => states.name().into(),
            (Offload::None, Some(activations)) => activations.into(),
            (states, Some(activations)) => format!("{}/{activations}", states.name()),
        }
    }
    pub fn from_name(name: &str) -> Option<Away> {
        Away::all().find(|a| a.name() == name)
    }
    /// Where it leads to.
    pub fn stores(self) -> impl Iterator<Item = Store> {
        self.states.store().into_iter().chain(self.activations)
    }
    /// Whether forward and backward passes copy, and not the update alone.
    pub fn is_in_passes(self) -> bool {
        self.states.is_in_passes() || self.activations.is_some()
    }
}

/// Where a layer's parameters, gradients and optimizer states live.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct States {
    pub zero: Zero,
    pub offload: Offload,
}

/// In what data-parallel ranks exchange gradients.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Wire {
    /// The type that they are added up in: nothing is lost on the way.
    #[default]
    Full,
    /// What each rank has added up is rounded to bf16 for each exchange: of a step at ZeRO 0 and 1, of a micro-batch above; the sum over the ranks is of the accumulator's type again. It changes numbers, so
    /// plans have it where it is asked for and nowhere else.
    Bf16,
    /// Of what each rank has added up in a step, and what it has left over from the steps before, the largest elements alone; the rest is left over for the next step
    /// (error feedback, arXiv:1809.07599). Asked for as above, at ZeRO 0 and 1.
    TopK(Share),
}

impl Wire {
    /// `full`, `bf16`, `topk:0.01`.
    pub fn name(self) -> String {
        match self {
            Wire::Full => "full".into(),
            Wire::Bf16 => "bf16".into(),
            Wire::TopK(share) => format!("topk:{share}"),
        }
    }
    pub fn from_name(name: &str) -> Option<Wire> {
        match name {
            "full" => Some(Wire::Full),
            "bf16" => Some(Wire::Bf16),
            _ => name.strip_prefix("topk:").and_then(Share::from_name).map(Wire::TopK),
        }
    }
    /// What gradients are rounded to, if they are.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Wire::Full | Wire::TopK(_) => None,
            Wire::Bf16 => Some(DType::Bf16),
        }
    }
    /// Of which share of the elements ranks hear in each exchange, if not of all.
    pub fn kept(self) -> Option<Share> {
        match self {
            Wire::Full | Wire::Bf16 => None,
            Wire::TopK(share) => Some(share),
        }
    }
    /// Whether a plan computes other numbers for it.
    pub fn is_lossy(self) -> bool {
        self != Wire::Full
    }
}

/// A share of some elements: more than none, at most all, in millionths.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Share(u32);

impl Share {
    const ALL: u32 = 1_000_000;

    /// `0.01`: digits with at most six behind the point, greater than 0, at most 1.
    pub fn from_name(name: &str) -> Option<Share> {
        let (whole, part) = name.split_once('.').unwrap_or((name, "0"));
        let is_number = |digits: &str, most: usize| (1..=most).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
        if !is_number(whole, 1) || !is_number(part, 6) {
            return None;
        }
        let millionths = whole.parse::<u32>().ok()? * Share::ALL + format!("{part:0<6}").parse::<u32>().ok()?;
        (1..=Share::ALL).contains(&millionths).then_some(Share(millionths))
    }

    /// How many of so many elements it is, rounded up.
    pub fn of(self, elems: u64) -> u64 {
        (u128::from(elems) * u128::from(self.0)).div_ceil(u128::from(Share::ALL)) as u64
    }
}

impl std::fmt::Display for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = format!("{}.{:06}", self.0 / Share::ALL, self.0 % Share::ALL);
        f.write_str(digits.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// Where all of a layer lives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Residence {
    pub states: States,
    /// The memory in which frames wait for the backward pass, if not the device's.
    pub activations: Option<Store>,
}

/// What the backward pass of a layer computes again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Recompute {
    /// Nothing: everything the backward pass reads is kept.
    None,
    /// What is cheap ([`crate::cost::is_cheap`]): results of products and attention are kept, norms, activations and embeddings of positions are made again.
    Selective,
    /// All of the layer's forward pass: only its input is kept.
    Full,
}

impl Recompute {
    pub const ALL: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];
    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
        }
    }
    pub fn from_name(name: &str) -> Option<Recompute> {
        Recompute::ALL.into_iter().find(|r| r.name() == name)
    }
}

/// What becomes of a form that an all-gather made and the backward pass reads.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Gathered {
    /// Kept whole.
    Keep,
    /// Dropped, and gathered again from its source, which is kept (sequence parallelism as in arXiv:2205.05198).
    Again,
}

/// How one layer runs.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LayerPlan {
    pub zero: Zero,
    pub offload: Offload,
    /// The memory that what it keeps for its backward pass waits in, if not the device's.
    pub activations: Option<Store>,
    pub recompute: Recompute,
    pub gathered: Gathered,
    /// Tensor-parallel axes for each forward node of the layer, in graph order. Data axes are not in it: they split every op in one way ([`crate::data`]).
    pub strategy: Vec<Assignment>,
}

impl LayerPlan {
    pub fn states(&self) -> States {
        States { zero: self.zero, offload: self.offload }
    }
    pub fn residence(&self) -> Residence {
        Residence { states: self.states(), activations: self.activations }
    }
    pub fn away(&self) -> Away {
        Away { states: self.offload, activations: self.activations }
    }
}

/// A virtual stage: consecutive layers on one group of devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagePlan {
    pub first: u32,
    /// Inclusive.
    pub last: u32,
}

/// Groups of different devices that one cluster may have.
pub const MOST_GROUPS: usize = 4;

/// The groups of a cluster, in the order in which ranks are counted: those of the first group come first. Places behind the last group name themselves.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Placement(pub [u8; MOST_GROUPS]);

impl Default for Placement {
    fn default() -> Placement {
        Placement([0, 1, 2, 3])
    }
}

impl Placement {
    /// These groups first.
    pub fn of(groups: &[u8]) -> Placement {
        let mut placement = Placement::default();
        placement.0.iter_mut().zip(groups).for_each(|(place, &group)| *place = group);
        placement
    }

    /// All orders of so many groups, rising.
    pub fn all(groups: usize) -> Vec<Placement> {
        let mut all: Vec<Vec<u8>> = vec![Vec::new()];
        for _ in 0..groups {
            let longer = |order: &Vec<u8>| (0..groups as u8).filter(|g| !order.contains(g)).map(|g| [order, &[g][..]].concat()).collect::<Vec<_>>();
            all = all.iter().flat_map(longer).collect();
        }
        all.iter().map(|order| Placement::of(order)).collect()
    }
}

#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// Ranks of each stage.
    pub dp: u64,
    pub ep: u64,
    pub cp: u64,
    pub tp: u64,
    /// Sequences of one micro-batch on one data-parallel rank.
    pub micro_batch: u64,
    /// Micro-batches of one step on one data-parallel rank.
    pub micro_batches: u64,
    pub schedule: Schedule,
    /// Virtual stages on each stage.
    pub virtual_stages: u64,
    /// Dim (position) of every layer boundary that the tensor-parallel axes shard; `Some(1)` is sequence parallelism.
    pub boundary: Option<u32>,
    /// The virtual stages, in the order of layers; with one on each stage, the stages.
    pub stages: Vec<StagePlan>,
    /// Which group of the cluster has which ranks.
    pub placement: Placement,
    /// Distinct ways of running a layer.
    pub options: Vec<LayerPlan>,
    /// For each layer, which of `options`.
    pub layers: Vec<u32>,
    /// Type of parameters and activations in compute.
    pub compute: DType,
    pub optimizer: Optimizer,
    /// Whether gradients are clipped by global norm: it costs a reduction, so it is part of the plan.
    pub clip: Clip,
    pub wire: Wire,
    /// How context-parallel ranks get at each other's keys and values.
    pub keys: Keys,
    /// How gradients get to their sum.
    pub sync: Sync,
    /// Which degrees lie on which links.
    pub nest: Nest,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Clip {
    None,
    GlobalNorm,
}

impl Plan {
    /// Stages: groups of devices that share a program.
    pub fn pp(&self) -> u64 {
        self.stages.len() as u64 / self.virtual_stages.max(1)
    }
    pub fn pipeline(&self) -> Pipeline {
        Pipeline { schedule: self.schedule, stages: self.pp(), virtual_stages: self.virtual_stages, micro_batches: self.micro_batches }
    }
    pub fn degrees(&self) -> Degrees {
        Degrees { dp: self.dp, ep: self.ep, cp: self.cp, tp: self.tp, keys: self.keys, sync: self.sync, nest: self.nest }
    }
    /// The ranks of one stage.
    pub fn mesh(&self) -> Mesh {
        Mesh::of(self.degrees())
    }
    pub fn devices(&self) -> u64 {
        self.degrees().ranks() * self.pp()
    }
    pub fn layer(&self, layer: u32) -> &LayerPlan {
        &self.options[self.layers[layer as usize] as usize]
    }
    /// The virtual stage that a layer is on.
    pub fn virtual_stage_of(&self, layer: u32) -> usize {
        self.stages.iter().position(|s| (s.first..=s.last).contains(&layer)).unwrap_or(0)
    }
    /// The stage that a layer is on.
    pub fn stage_of(&self, layer: u32) -> usize {
        self.pipeline().stage_of(self.virtual_stage_of(layer) as u64) as usize
    }
    /// What a plan for the same question clips where it can: stages that do not wait for each other have no norm to clip by.
    pub fn asked_clip(&self) -> Clip {
        match self.schedule.updates() {
            Updates::Step => self.clip,
            Updates::MicroBatch => Clip::GlobalNorm,
        }
    }
    /// The share of gradients' elements that ranks hear of in each exchange, if that is not all and there is anyone to hear of them.
    pub fn compressed(&self) -> Option<Share> {
        self.wire.kept().filter(|_| self.dp * self.cp > 1)
    }
    /// Sequences of one step over all ranks.
    pub fn batch(&self) -> u64 {
        self.dp * self.micro_batch * self.micro_batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_of_offloading_have_names_of_their_own() {
        let names: Vec<String> = Away::all().map(Away::name).collect();
        assert_eq!(names.len(), 21);
        assert_eq!((&names[0][..], &names[7][..], &names[16][..]), ("none", "activations", "optimizer:nvme/activations:nvme"));
        assert!(Away::all().eq(names.iter().filter_map(|name| Away::from_name(name))));
    }

    #[test]
    fn shares_print_as_they_are_read_and_are_more_than_none_and_at_most_all() {
        for (text, elems, kept) in [("0.1", 1000, 100), ("0.01", 128, 2), ("1", 77, 77), ("0.000001", 1, 1), ("0.25", 1 << 56, 1 << 54)] {
            let wire = Wire::from_name(&format!("topk:{text}")).unwrap();
            assert_eq!(wire.name(), format!("topk:{text}"));
            assert_eq!(wire.kept().map(|share| share.of(elems)), Some(kept));
        }
        assert_eq!(Wire::from_name("topk:0.50").map(Wire::name).as_deref(), Some("topk:0.5"));
        for wrong in ["topk", "topk:", "topk:0", "topk:0.0", "topk:1.1", "topk:2", "topk:-0.1", "topk:.5", "topk:0.", "topk:0.0000001", "topk:1e-3"] {
            assert_eq!(Wire::from_name(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn placements_are_all_orders_of_the_groups_and_no_other() {
        let counts: Vec<usize> = (1..=MOST_GROUPS).map(|groups| Placement::all(groups).len()).collect();
        assert_eq!(counts, [1, 2, 6, 24]);
        assert_eq!(Placement::all(1), [Placement::default()]);
        assert_eq!(Placement::all(3)[3], Placement([1, 2, 0, 3]));
        assert!(Placement::all(4).windows(2).all(|w| w[0] < w[1]));
    }
}
