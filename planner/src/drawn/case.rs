//! The choices of a case, which of them are legal, and how they are drawn.

use super::{Dice, EXPERTS, Model};
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::mesh::{Degrees, Keys};
use dplan_ir::nest::Nest;
use dplan_ir::optimizer::{DecayGroups, Optimizer};
use dplan_ir::pipeline::Pipeline;
use dplan_ir::plan::{Away, Clip, Gathered, Offload, Recompute, Schedule, Store, Wire, Zero};
use dplan_ir::program::Updates;
use dplan_ir::sync::Sync;

/// A model, a plan for it, and what of a run is no part of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Case {
    pub model: Model,
    pub dp: u64,
    pub ep: u64,
    pub cp: u64,
    pub tp: u64,
    /// Sequences of a micro-batch on one rank.
    pub micro_batch: u64,
    pub micro_batches: u64,
    pub schedule: Schedule,
    pub virtual_stages: u64,
    /// First layers of all virtual stages but the first.
    pub cuts: Vec<u32>,
    pub boundary: Boundary,
    pub split: Split,
    /// By layer.
    pub ways: Vec<Way>,
    pub compute: DType,
    pub optimizer: Optimizer,
    pub clip: Clip,
    pub wire: Wire,
    /// How context-parallel ranks get at each other's keys and values.
    pub keys: Keys,
    pub sync: Sync,
    pub nest: Nest,
    pub decay: DecayGroups,
    /// Seed of the order in which ranks try their streams; communication first if absent.
    pub streams: Option<u64>,
}

/// What hands on activations from layer to layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Boundary {
    /// Whole on every tensor-parallel rank.
    Whole,
    /// Split along the sequence.
    Sequence,
}

impl Boundary {
    /// The dim that tensor-parallel axes shard.
    pub fn dim(self) -> Option<u32> {
        match self {
            Boundary::Whole => None,
            Boundary::Sequence => Some(1),
        }
    }
}

/// What tensor-parallel axes do in a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// Every rank computes the same.
    None,
    /// [`super::textbook`].
    Textbook,
    /// Any legal strategy.
    Drawn(u64),
}

/// How a layer runs, but for its strategy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Way {
    pub zero: Zero,
    pub offload: Offload,
    pub activations: Option<Store>,
    pub recompute: Recompute,
    pub gathered: Gathered,
}

impl Way {
    pub const PLAIN: Way = Way { zero: Zero(0), offload: Offload::None, activations: None, recompute: Recompute::None, gathered: Gathered::Keep };

    pub fn away(&self) -> Away {
        Away { states: self.offload, activations: self.activations }
    }

    /// Of each layer its own, or all alike; optimizer states at home in half of all cases, activations in two of three.
    fn drawn(dice: &mut Dice, layers: u32) -> Vec<Way> {
        let offloads = dice.pick(&[&Offload::ALL[..], &[Offload::None]]);
        let stores = dice.pick(&[&[None, Some(Store::Cpu), Some(Store::Nvme)][..], &[None], &[None]]);
        let mut draw = || Way {
            zero: Zero(dice.roll(4) as u8),
            offload: dice.pick(offloads),
            activations: dice.pick(stores),
            recompute: dice.pick(&Recompute::ALL),
            gathered: dice.pick(&[Gathered::Keep, Gathered::Again]),
        };
        let ways: Vec<Way> = (0..layers).map(|_| draw()).collect();
        if dice.one_in(3) { vec![ways[0]; ways.len()] } else { ways }
    }
}

/// The most ranks of a drawn case.
const MOST_RANKS: u64 = 24;

/// The largest number in a case.
pub(super) const MOST: u64 = 4096;

impl Case {
    /// One rank, and nothing that can be left out.
    pub fn smallest() -> Case {
        let model = Model::SMALLEST;
        Case {
            model,
            dp: 1,
            ep: 1,
            cp: 1,
            tp: 1,
            micro_batch: 1,
            micro_batches: 1,
            schedule: Schedule::OneFOneB,
            virtual_stages: 1,
            cuts: Vec::new(),
            boundary: Boundary::Whole,
            split: Split::None,
            ways: vec![Way::PLAIN; model.layers() as usize],
            compute: DType::F64,
            optimizer: Optimizer::Sgd,
            clip: Clip::None,
            wire: Wire::Full,
            keys: Keys::Gathered,
            sync: Sync::Flat,
            nest: Nest::default(),
            decay: DecayGroups::All,
            streams: None,
        }
    }

    /// Any legal case.
    pub fn drawn(dice: &mut Dice) -> Case {
        loop {
            let case = Case::any(dice);
            if case.refusal().is_none() && case.ranks() <= MOST_RANKS {
                return case;
            }
        }
    }

    /// A case that may lack what its schedule or its model needs.
    fn any(dice: &mut Dice) -> Case {
        let model = Model::drawn(dice);
        let layers = model.layers();
        // Few of all others are.
        let alone = dice.one_in(16);
        let schedule = if alone { dice.pick(&[Schedule::GPipe, Schedule::OneFOneB]) } else { dice.pick(&Schedule::ALL) };
        let (stages, virtual_stages): (u64, u64) = match schedule {
            Schedule::GPipe | Schedule::OneFOneB if alone => (1, 1),
            Schedule::GPipe | Schedule::OneFOneB => (dice.pick(&[1, 1, 2, 3, 4]), 1),
            Schedule::PipeDream => (dice.pick(&[1, 2, 2, 3, 4]), 1),
            Schedule::ZbH1 => (dice.pick(&[2, 3, 4]), 1),
            Schedule::Interleaved => (dice.pick(&[2, 3]), dice.pick(&[2, 3])),
            Schedule::ZbV => (dice.pick(&[2, 3]), 2),
        };
        let wanted = (stages * virtual_stages).min(u64::from(layers)) as usize;
        let mut cuts: Vec<u32> = Vec::new();
        while cuts.len() + 1 < wanted {
            let cut = 1 + dice.roll(u64::from(layers) - 1) as u32;
            if !cuts.contains(&cut) {
                cuts.push(cut);
            }
        }
        cuts.sort_unstable();
        let mut case = Case {
            model,
            dp: dice.pick(&[1, 2, 3, 4]),
            ep: dice.pick(&[1, 1, 2, 4]),
            cp: dice.pick(&[1, 1, 2, 3]),
            tp: dice.pick(&[1, 2, 3, 4]),
            micro_batch: dice.pick(&[1, 2]),
            micro_batches: dice.pick(&[1, 2, 3, 4, 5, 6, 8]),
            schedule,
            virtual_stages,
            cuts,
            boundary: dice.pick(&[Boundary::Whole, Boundary::Sequence]),
            split: match dice.roll(4) {
                0 => Split::Textbook,
                _ => Split::Drawn(dice.roll(1000)),
            },
            ways: Way::drawn(dice, layers),
            compute: dice.pick(&[DType::F64, DType::F64, DType::F64, DType::F64, DType::F64, DType::F64, DType::Bf16, DType::F16]),
            optimizer: dice.pick(&Optimizer::ALL),
            clip: dice.pick(&[Clip::None, Clip::GlobalNorm]),
            wire: match dice.roll(9) {
                0..=4 => Wire::Full,
                5..=6 => Wire::Bf16,
                _ => Wire::from_name(dice.pick(&["topk:0.01", "topk:0.1", "topk:0.3"])).unwrap_or_default(),
            },
            keys: dice.pick(&Keys::ALL),
            decay: dice.pick(&[DecayGroups::All, DecayGroups::Matrices]),
            sync: Sync::Flat,
            nest: Nest::default(),
            streams: if dice.one_in(3) { Some(dice.roll(1000)) } else { None },
        };
        if alone {
            (case.dp, case.ep, case.cp, case.tp) = (1, 1, 1, 1);
        }
        if case.ep > 1 {
            case.sync = dice.pick(&[Sync::Flat, Sync::Flat, Sync::Server]);
        } else if case.dp * case.cp > 1 {
            let parts: Vec<u64> = (2..=case.dp).filter(|far| case.dp.is_multiple_of(*far)).collect();
            let parted = if parts.is_empty() { Sync::Flat } else { Sync::Hierarchical { far: dice.pick(&parts) } };
            case.sync = dice.pick(&[Sync::Flat, Sync::Flat, parted, Sync::Tree, Sync::Server]);
        }
        if dice.one_in(3) {
            case.nest = dice.pick(&Nest::all());
        }
        case.settle();
        case
    }

    /// Makes choices agree that are none of their own: homes of a tied table have one ZeRO stage and way of offloading, a backward pass in halves keeps parameters, gradients and activations, a loss
    /// that is scaled takes the factor that clips, only experts have a capacity, and one rank alone is no ring.
    pub fn settle(&mut self) {
        self.ways.resize(self.model.layers() as usize, Way::PLAIN);
        if self.compute == DType::F16 && self.wire.kept().is_some() {
            self.wire = Wire::Full;
        }
        let (parted, updates) = (self.pipeline().parts_backward(), self.schedule.updates());
        let most = if parted || updates == Updates::MicroBatch || self.wire.kept().is_some() { 1 } else { 3 };
        for way in &mut self.ways {
            way.zero.0 = way.zero.0.min(most);
            if let (true, Offload::Gradients(store) | Offload::Parameters(store)) = (parted, way.offload) {
                way.offload = Offload::Optimizer(store);
            }
            way.activations = way.activations.filter(|_| !parted);
            if updates == Updates::MicroBatch {
                (way.offload, way.activations) = (Offload::None, None);
            }
        }
        if updates == Updates::MicroBatch {
            self.clip = Clip::None;
            self.model.tied &= self.cuts.is_empty();
            self.compute = if self.compute == DType::F16 { DType::Bf16 } else { self.compute };
        }
        if let ([first, .., last], true) = (self.ways.as_mut_slice(), self.model.tied) {
            (last.zero, last.offload) = (first.zero, first.offload);
        }
        if !self.model.ffn.is_routed() {
            self.model.capacity = 0;
        }
        if self.compute == DType::F16 {
            self.clip = Clip::GlobalNorm;
        }
        if self.cp == 1 {
            self.keys = Keys::Gathered;
        }
    }

    /// What a legal case would have that this one has not, in words.
    pub fn refusal(&self) -> Option<&'static str> {
        let layers = self.model.layers();
        let degrees = [self.dp, self.ep, self.cp, self.tp, self.micro_batch, self.micro_batches, self.virtual_stages];
        let sizes = [self.model.seq, self.model.kv_heads, self.model.group, self.model.vocab];
        let starts: Vec<u32> = std::iter::once(0).chain(self.cuts.iter().copied()).chain([layers]).collect();
        let cuts_rise = starts.windows(2).all(|w| w[0] < w[1]);
        let mut settled = self.clone();
        settled.settle();
        match () {
            () if degrees.iter().chain(&sizes).any(|&n| n == 0 || n > MOST) => Some("degrees and sizes from 1 to 4096"),
            () if !(1..=MOST).contains(&u64::from(self.model.blocks)) => Some("1 to 4096 blocks"),
            () if self.model.dropout >= 100 => Some("dropout of less than 100 percent"),
            () if self.model.capacity > MOST => Some("a capacity of at most 4096 percent"),
            () if !cuts_rise => Some("cuts that rise, each the first layer of a virtual stage"),
            () if !(self.cuts.len() as u64 + 1).is_multiple_of(self.virtual_stages) => Some("cuts for a multiple of the virtual stages"),
            () if self.ep > 1 && !(self.model.ffn.is_routed() && EXPERTS.is_multiple_of(self.ep)) => Some("experts that ep divides"),
            () if !self.dp.is_multiple_of(self.ep) => Some("a dp that ep divides"),
            () if matches!(self.sync, Sync::Hierarchical { .. } | Sync::Tree) && self.ep > 1 => {
                Some("one sum over data-parallel ranks where experts are shared out")
            }
            () if matches!(self.sync, Sync::Hierarchical { far } if !self.dp.is_multiple_of(far)) => Some("a dp of so many parts"),
            () if !self.model.seq.is_multiple_of(self.cp) => Some("a sequence that cp divides"),
            () if self.splits_sequence() && !self.model.seq.is_multiple_of(self.cp * self.tp) => Some("a sequence that cp and tp divide"),
            () if self.split == Split::Textbook && self.model.ffn.is_routed() && !EXPERTS.is_multiple_of(self.ep * self.tp) => {
                Some("experts that ep and tp divide")
            }
            () if !matches!(self.compute, DType::F64 | DType::Bf16 | DType::F16) => Some("f64, bf16 or f16"),
            () if settled != *self => Some(
                "experts where there is a capacity, one way for each layer, ZeRO 0 or 1 in halves of backward passes, one ZeRO stage and way of offloading for a tied table, clipping with f16, with updates of micro-batches ZeRO 0 or 1, nothing offloaded, no clipping and no table that stages share, and a ring with context parallelism",
            ),
            () => self.pipeline().refusal(),
        }
    }

    /// Whether tensor-parallel axes split positions.
    fn splits_sequence(&self) -> bool {
        self.boundary == Boundary::Sequence || self.split == Split::Textbook
    }

    pub fn pp(&self) -> u64 {
        (self.cuts.len() as u64 + 1) / self.virtual_stages.max(1)
    }
    pub fn ranks(&self) -> u64 {
        self.degrees().ranks() * self.pp()
    }
    pub fn pipeline(&self) -> Pipeline {
        Pipeline { schedule: self.schedule, stages: self.pp(), virtual_stages: self.virtual_stages, micro_batches: self.micro_batches }
    }
    pub fn degrees(&self) -> Degrees {
        Degrees { dp: self.dp, ep: self.ep, cp: self.cp, tp: self.tp, keys: self.keys, sync: self.sync, nest: self.nest }
    }
    /// The model's graph for the case's micro-batches, its positions in sequence.
    pub fn graph(&self) -> Graph {
        self.model.graph(self.dp * self.micro_batch, self.compute)
    }
}
