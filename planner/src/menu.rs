//! The choices of each kind of layer inside a tuple: an option with a ZeRO stage and a way of offloading, as terms of the objective and of the arena.
//!
//! Choices depend on the devices, so a kind of layer has a menu on every site where the tuple has stages, a *row*: site by site, on each all kinds in order. On a cluster of
//! equal devices rows are kinds.

use crate::bound::by_sync;
use crate::memory::{LayerBytes, StateTypes, boundary_bytes, scalar_bytes, workspace_region};
use crate::objective::{Home, LayerSync, LayerTerms, StageTime, Terms, border, least_sync, share};
use crate::options::Halves;
use crate::placement::{Seat, Site};
use crate::prices::{Links, Offer, Prices};
use crate::problem::{Kind, Problem};
use crate::space::Tuple;
use dplan_ir::mesh::Mesh;
use dplan_ir::pipeline::Slots;
use dplan_ir::plan::{Residence, States};
use dplan_ir::program::Updates;
use dplan_ir::sharding::Sharding;
use std::rc::Rc;

/// One way of running a layer in a tuple.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Which offer of the layer's class.
    pub offer: u32,
    pub residence: Residence,
    /// By [`Home`]; all alike in a layer without tied parameters.
    terms: [LayerTerms; 3],
    /// What they add to the objective.
    shares: [StageTime; 3],
    /// Bytes of each micro-batch in flight, if they are in the device's memory, and of each between the halves of its backward pass.
    pub frame: u64,
    pub held: u64,
    /// Bytes of parameters that are put by for each backward pass, where they are.
    pub version: u64,
    pub workspace: u64,
}

#[cfg(test)]
impl Choice {
    /// One that takes and keeps so much, wherever its layer is.
    pub(crate) fn that_takes(StageTime { time, end }: StageTime, states: u64, workspace: u64, ring: u64) -> Choice {
        let terms = LayerTerms { forward: 0, time, weight: 0, end, states, ring };
        Choice {
            offer: 0,
            residence: Residence::default(),
            terms: [terms; 3],
            shares: [StageTime { time, end }; 3],
            frame: 0,
            held: 0,
            version: 0,
            workspace,
        }
    }
}

impl Choice {
    pub fn terms(&self, home: Home) -> &LayerTerms {
        &self.terms[home as usize]
    }
    pub fn share(&self, home: Home) -> StageTime {
        self.shares[home as usize]
    }
}

/// Sharding, ZeRO stage and way of offloading that all homes of the tied parameter share.
pub type Tie = (Sharding, States);

/// All choices inside a tuple.
#[derive(Clone, Debug)]
pub struct Menus {
    pub tuple: Tuple,
    /// Sites of stages, each with how many it has.
    pub sites: Vec<(Site, u64)>,
    /// By row.
    pub offers: Vec<Rc<[Offer]>>,
    /// By row, as the offers; nothing where backward passes run in one piece.
    halves: Vec<Rc<[Halves]>>,
    /// By row.
    pub choices: Vec<Vec<Choice>>,
    /// By kind: whether its layers are homes of the tied parameter.
    pub tied: Vec<bool>,
    /// By stage, which of the sites it is on.
    site_of: Vec<usize>,
    /// By stage, bytes that its devices have less than those with most.
    less: Vec<u64>,
    /// By stage, what each of its virtual stages keeps.
    pub slots: Vec<Vec<Slots>>,
    /// Nanoseconds of messages to the next virtual stage, both ways: by virtual stage, by size class of what crosses.
    messages: Vec<Vec<u64>>,
    /// For each layer but the last, the size class of what it hands on.
    crossing: Vec<usize>,
    /// Largest layer boundary on one rank, bytes.
    pub boundary: u64,
    pub constant: u64,
}

impl Menus {
    /// The menus of a tuple, or nothing if some layer cannot run in it at all.
    pub fn new(problem: &Problem, prices: &mut dyn Prices, tuple: Tuple) -> Option<Menus> {
        Menus::least(problem, prices, &[tuple])
    }

    /// Menus that bound those of some tuples that differ only in how gradients get to their sum: each choice takes of everything the least of any of them. Named by the first, whose
    /// layers compute as those of all do.
    pub fn least(problem: &Problem, prices: &mut dyn Prices, members: &[Tuple]) -> Option<Menus> {
        let tuple = members[0];
        let (pipeline, mesh) = (tuple.pipeline(), tuple.mesh());
        let ways: Vec<(Mesh, StateTypes)> = by_sync(members).map(|t| (t.mesh(), t.types(problem.types))).collect();
        let groups = prices.groups();
        let seats: Vec<Seat> = (0..tuple.pp).map(|stage| groups.seat(tuple.placement, mesh.ranks(), stage)).collect();
        let sites = groups.sites(tuple.placement, mesh.ranks(), tuple.pp);
        let mut rows = Rows::default();
        for &(site, _) in &sites {
            rows.add(problem, prices, &tuple, site, &ways)?;
        }
        let shape = tuple.shape(sites[0].0);
        let sizes = prices.boundary_bytes(shape);
        let mut distinct = sizes.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let crossing = sizes.iter().map(|s| distinct.partition_point(|d| d < s)).collect();

        let links: &dyn Links = prices;
        let message = |virtual_stage: u64| {
            let (from, to) = (pipeline.stage_of(virtual_stage), pipeline.stage_of(virtual_stage + 1));
            let time = |&bytes: &u64| if from == to { 0 } else { 2 * links.message(&mesh, seats[from as usize], seats[to as usize], bytes).0 };
            distinct.iter().map(time).collect()
        };
        let messages = (0..pipeline.all_virtual() - 1).map(message).collect();
        let Rows { offers, halves, choices } = rows;
        let terms = |(mesh, types): &(Mesh, StateTypes)| {
            Terms { links, site: sites[0].0, mesh, types: *types, clip: problem.clip, pipeline }.constant(tuple.pp)
        };
        Some(Menus {
            tied: offers[..problem.kinds.len()].iter().map(|o| o.iter().any(|o| o.tie.is_some())).collect(),
            site_of: seats.iter().map(|seat| sites.iter().position(|(site, _)| *site == seat.site).unwrap_or(0)).collect(),
            less: seats.iter().map(|seat| problem.less[seat.site.index()]).collect(),
            slots: (0..tuple.pp).map(|stage| pipeline.slots(stage)).collect(),
            boundary: distinct.last().copied().unwrap_or(0),
            constant: ways.iter().map(terms).min().unwrap_or(0),
            tuple,
            sites,
            offers,
            halves,
            choices,
            messages,
            crossing,
        })
    }

    /// The row of a kind of layer on a stage.
    pub fn row(&self, stage: usize, kind: usize) -> usize {
        self.site_of[stage] * self.tied.len() + kind
    }
    /// The rows of a kind on all sites.
    pub fn rows(&self, kind: usize) -> impl Iterator<Item = usize> {
        let kinds = self.tied.len();
        (0..self.sites.len()).map(move |site| site * kinds + kind)
    }
    /// The kind of a row.
    pub fn kind(&self, row: usize) -> usize {
        row % self.tied.len()
    }
    /// Which of the sites a stage is on.
    pub fn site_of(&self, stage: u64) -> usize {
        self.site_of[stage as usize]
    }

    /// What an option needs in this tuple.
    pub fn bytes(&self, row: usize, choice: u32) -> &LayerBytes {
        let offer = self.choices[row][choice as usize].offer as usize;
        self.halves[row].get(offer).map_or(&self.offers[row][offer].option.bytes, |h| &h.bytes)
    }

    /// What the messages from a virtual stage to the next add, if `layer` is its last.
    pub fn border(&self, virtual_stage: u64, layer: usize) -> StageTime {
        let messages = self.messages.get(virtual_stage as usize).map_or(0, |by_size| by_size[self.crossing[layer]]);
        border(&self.tuple.pipeline(), messages)
    }

    /// The least that the messages from a virtual stage can add.
    pub fn least_border(&self, virtual_stage: u64) -> StageTime {
        let messages = self.messages.get(virtual_stage as usize).and_then(|by_size| by_size.iter().copied().min());
        border(&self.tuple.pipeline(), messages.unwrap_or(0))
    }

    /// Bytes left for layers in the arena of a stage, where devices with most memory have this budget.
    pub fn room(&self, budget: u64, stage: u64) -> Option<u64> {
        budget.checked_sub(self.less[stage as usize])?.checked_sub(scalar_bytes() + boundary_bytes(self.boundary, &self.tuple.pipeline(), stage))
    }

    /// Menus for each sharding of the tied parameter and way of keeping it that all its homes can have; the menus themselves if nothing is tied.
    pub fn by_tie(&self) -> Vec<Menus> {
        let homes: Vec<usize> = (0..self.choices.len()).filter(|&row| self.tied[self.kind(row)]).collect();
        let Some(&first) = homes.first() else { return vec![self.clone()] };
        let tie =
            |row: usize, choice: &Choice| self.offers[row][choice.offer as usize].tie.clone().map(|sharding| (sharding, choice.residence.states));
        let mut ties: Vec<Tie> = self.choices[first].iter().filter_map(|c| tie(first, c)).collect();
        ties.sort();
        ties.dedup();
        let restrict = |wanted: &Tie| {
            let mut menus = self.clone();
            for &row in &homes {
                menus.choices[row].retain(|c| tie(row, c).as_ref() == Some(wanted));
            }
            menus.choices.iter().all(|m| !m.is_empty()).then_some(menus)
        };
        ties.iter().filter_map(restrict).collect()
    }
}

/// Menus as they are made, site by site.
#[derive(Default)]
struct Rows {
    offers: Vec<Rc<[Offer]>>,
    halves: Vec<Rc<[Halves]>>,
    choices: Vec<Vec<Choice>>,
}

impl Rows {
    /// Adds the menus of all kinds on a site, where gradients get to their sum in any of these ways; nothing if some layer cannot run there.
    fn add(&mut self, problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple, site: Site, ways: &[(Mesh, StateTypes)]) -> Option<()> {
        let (shape, pipeline) = (tuple.shape(site), tuple.pipeline());
        let parted = pipeline.parts_backward();
        let mut offers = Vec::new();
        for kind in &problem.kinds {
            let all = prices.offers(kind.class, shape);
            if all.is_empty() {
                return None;
            }
            offers.push(all);
        }
        // Its homes would be updated at different times.
        let is_apart = tuple.pp > 1 && offers.iter().any(|of| of.iter().any(|o| o.tie.is_some()));
        if is_apart && tuple.schedule.updates() == Updates::MicroBatch {
            return None;
        }
        let in_halves = |kind: &Kind, prices: &mut dyn Prices| if parted { prices.halves(kind.class, shape) } else { Rc::from([]) };
        let halves: Vec<Rc<[Halves]>> = problem.kinds.iter().map(|kind| in_halves(kind, prices)).collect();
        if parted && halves.iter().zip(&offers).any(|(h, o)| h.len() != o.len()) {
            return None;
        }
        let links: &dyn Links = prices;
        let terms: Vec<Terms<'_>> =
            ways.iter().map(|(mesh, types)| Terms { links, site, mesh, types: *types, clip: problem.clip, pipeline }).collect();
        for ((kind, offers), halves) in problem.kinds.iter().zip(&offers).zip(&halves) {
            let menu = menu(kind, tuple, &terms, offers, halves);
            if menu.is_empty() {
                return None;
            }
            self.choices.push(menu);
        }
        self.offers.extend(offers);
        self.halves.extend(halves);
        Some(())
    }
}

/// The choices of a kind of layer.
fn menu(kind: &Kind, tuple: &Tuple, ways: &[Terms<'_>], offers: &[Offer], halves: &[Halves]) -> Vec<Choice> {
    let terms = &ways[0];
    let (pipeline, mesh, types) = (tuple.pipeline(), terms.mesh, terms.types);
    let all: Vec<Residence> = kind.residences(tuple).collect();
    // Many options have the same buckets.
    let mut syncs: Vec<(&Offer, Vec<[LayerSync; 3]>)> = Vec::new();
    let mut menu = Vec::new();
    for (offer, index) in offers.iter().zip(0..) {
        if !kind.recompute.contains(&offer.option.recompute) {
            continue;
        }
        let bytes = &offer.option.bytes;
        let known = syncs.iter().position(|(o, _)| o.option.bytes.buckets == bytes.buckets).unwrap_or_else(|| {
            let by_states = all.iter().map(|&Residence { states, .. }| {
                let together = least_sync(ways, bytes, states, Home::Together);
                let of = |home| if bytes.buckets.iter().any(|b| b.tied) { least_sync(ways, bytes, states, home) } else { together };
                [together, of(Home::Repeated), of(Home::Apart)]
            });
            syncs.push((offer, by_states.collect()));
            syncs.len() - 1
        });
        for (&residence, sync) in all.iter().zip(&syncs[known].1) {
            let halves = halves.get(index as usize);
            let terms = sync.map(|s| match halves {
                Some(halves) => s.parted(offer.option.forward, halves.input, halves.weight),
                None => terms.storing(s, bytes.frame, residence.activations).terms(offer.option.forward, offer.option.backward),
            });
            let shares = terms.map(|t| share(&pipeline, &t));
            let bytes = halves.map_or(bytes, |h| &h.bytes);
            let frame = if residence.activations.is_some() { 0 } else { bytes.frame };
            let workspace = workspace_region(bytes.workspace);
            let version = bytes.version(mesh, types);
            menu.push(Choice { offer: index, residence, terms, shares, frame, held: bytes.held, version, workspace });
        }
    }
    menu
}
