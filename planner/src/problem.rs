//! What is searched, with everything about tensors behind [`Prices`]: layers of a few kinds, and limits.

use crate::memory::StateTypes;
use crate::pins::Pins;
use crate::placement::Site;
use crate::prices::{Floor, Prices, Reference};
use crate::space::Tuple;
use dplan_ir::plan::{Away, Clip, Recompute, Residence, States, Zero};
use dplan_ir::program::Updates;

/// Layers that are alike and are pinned alike.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kind {
    pub class: u32,
    pub zero: Vec<Zero>,
    pub away: Vec<Away>,
    pub recompute: Vec<Recompute>,
}

impl Kind {
    /// Where its layers may live in a tuple: ranks that share nothing have one ZeRO stage, and with backward passes in halves parameters and gradients stay, whole, and
    /// activations; where each micro-batch has an update of its own, everything does.
    pub fn residences(&self, tuple: &Tuple) -> impl Iterator<Item = Residence> {
        let (parted, updates) = (tuple.pipeline().parts_backward(), tuple.schedule.updates());
        let most = match (tuple.dp * tuple.cp, parted, updates) {
            (1, ..) => 0,
            (_, true, _) | (_, _, Updates::MicroBatch) => 1,
            (_, false, Updates::Step) => 3,
        };
        let zeros = self.zero.iter().copied().filter(move |z| z.0 <= most);
        let stays = move |a: &Away| parted && a.is_in_passes() || updates == Updates::MicroBatch && *a != Away::default();
        let ways = move || self.away.iter().filter(move |a| !stays(a));
        zeros.flat_map(move |zero| ways().map(move |a| Residence { states: States { zero, offload: a.states }, activations: a.activations }))
    }
}

/// The highest ZeRO stage at which gradients are exchanged once a step, as compressed ones are.
pub const MOST_COMPRESSED: u8 = 1;

#[derive(Clone, PartialEq, Debug)]
pub struct Problem {
    pub devices: u64,
    /// Sequences of a step.
    pub batch: u64,
    pub types: StateTypes,
    /// What is clipped under the pins.
    pub clip: Clip,
    /// What is asked to be clipped by plans that can.
    pub asked_clip: Clip,
    /// The largest arena that a device with most memory can hold, bytes.
    pub budget: u64,
    /// Bytes that devices have less than that, by [`Site::index`].
    pub less: Vec<u64>,
    pub pins: Pins,
    /// Kind of each layer.
    pub layers: Vec<usize>,
    pub kinds: Vec<Kind>,
}

/// What arena and context may take on a device of a site, under a limit for each device.
pub fn device_limit(prices: &dyn Prices, site: Site, limit: Option<u64>) -> u64 {
    let memory = prices.device_memory(site).0;
    limit.map_or(memory, |limit| limit.min(memory))
}

/// The ways of offloading that are searched: none, and those that are pinned.
fn searched(pins: &Pins) -> Vec<Away> {
    Away::all().filter(|&a| pins.offload.is_pinned() || a == Away::default()).collect()
}

impl Problem {
    /// What gradients are exchanged in is what pins say, and nothing is rounded where they say nothing; stages that do not wait for each other have no norm, so that nothing is clipped. `memory_limit` is
    /// for arena and context of each device together; the device's memory if absent or less.
    pub fn new(prices: &dyn Prices, devices: u64, batch: u64, types: StateTypes, clip: Clip, pins: Pins, memory_limit: Option<u64>) -> Problem {
        let types = StateTypes { wire: pins.wire.unwrap_or_default(), ..types };
        let (asked_clip, clip) = (clip, if pins.updates() == Updates::Step { clip } else { Clip::None });
        let most = if types.wire.kept().is_some() { MOST_COMPRESSED } else { 3 };
        let mut kinds: Vec<Kind> = Vec::new();
        let layers = prices.classes().iter().zip(0..).map(|(&class, layer)| {
            let zero = (0..=3).map(Zero).filter(|z| pins.zero.allows(layer, z) && z.0 <= most).collect();
            let recompute = Recompute::ALL.into_iter().filter(|r| pins.recompute.allows(layer, r)).collect();
            let away = searched(&pins).into_iter().filter(|a| pins.offload.allows(layer, a)).collect();
            let kind = Kind { class, zero, away, recompute };
            kinds.iter().position(|k| *k == kind).unwrap_or_else(|| {
                kinds.push(kind);
                kinds.len() - 1
            })
        });
        let layers = layers.collect();
        let room = |site| device_limit(prices, site, memory_limit).saturating_sub(prices.context(site).0);
        let rooms: Vec<u64> = Site::all(prices.groups().count()).map(room).collect();
        let budget = rooms.iter().copied().max().unwrap_or(0);
        let less = rooms.iter().map(|room| budget - room).collect();
        Problem { devices, batch, types, clip, asked_clip, budget, less, pins, layers, kinds }
    }

    /// The same question under other pins.
    pub fn under(&self, prices: &dyn Prices, pins: Pins) -> Problem {
        let Problem { devices, batch, types, asked_clip, budget, ref less, .. } = *self;
        Problem { budget, less: less.clone(), ..Problem::new(prices, devices, batch, types, asked_clip, pins, None) }
    }

    /// The largest arena that a device of a site can hold.
    pub fn budget_at(&self, site: Site) -> u64 {
        self.budget.saturating_sub(self.less[site.index()])
    }

    /// What layers of each kind take at least on a site in a tuple, as known from a reference.
    pub fn floors(&self, prices: &mut dyn Prices, tuple: &Tuple, site: Site, from: Reference) -> Vec<Floor> {
        self.kinds.iter().map(|kind| prices.floor(kind.class, tuple.shape(site), from, &kind.recompute)).collect()
    }
}
