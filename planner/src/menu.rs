//! The choices of each kind of layer inside a tuple: an option with a ZeRO stage, as terms of the objective and of the arena.

use crate::memory::workspace_region;
use crate::memory::{boundary_bytes, scalar_bytes};
use crate::objective::{Home, LayerSync, LayerTerms, Terms};
use crate::prices::{Links, Offer, Prices};
use crate::problem::Problem;
use crate::space::Tuple;
use dplan_ir::plan::Zero;
use dplan_ir::sharding::Sharding;
use std::rc::Rc;

/// One way of running a layer in a tuple.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Which offer of the layer's class.
    pub offer: u32,
    pub zero: Zero,
    /// By [`Home`]; all alike in a layer without tied parameters.
    terms: [LayerTerms; 3],
    /// Bytes of each micro-batch in flight.
    pub frame: u64,
    pub workspace: u64,
}

impl Choice {
    pub fn terms(&self, home: Home) -> &LayerTerms {
        &self.terms[home as usize]
    }
}

/// Sharding and ZeRO stage that all homes of the tied parameter share.
pub type Tie = (Sharding, Zero);

/// All choices inside a tuple.
#[derive(Clone, Debug)]
pub struct Menus {
    pub tuple: Tuple,
    pub offers: Vec<Rc<[Offer]>>,
    /// By kind.
    pub choices: Vec<Vec<Choice>>,
    /// By kind: whether its layers are homes of the tied parameter.
    pub tied: Vec<bool>,
    /// Messages to the next stage, both ways: by stage, by size class of what crosses.
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
        let shape = tuple.shape();
        let mut offers = Vec::new();
        for kind in &problem.kinds {
            let all = prices.offers(kind.class, shape);
            if all.is_empty() {
                return None;
            }
            offers.push(all);
        }
        let last = problem.layers.len().saturating_sub(1) as u32;
        let sizes: Vec<u64> = (0..last).map(|layer| prices.boundary_bytes(layer, shape)).collect();
        let mut distinct = sizes.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let crossing = sizes.iter().map(|s| distinct.partition_point(|d| d < s)).collect();

        let mesh = tuple.mesh();
        let links: &dyn Links = prices;
        let terms = Terms { links, mesh: &mesh, types: problem.types, clip: problem.clip, homes: 2.min(tuple.pp) };
        let messages = (0..tuple.pp).map(|stage| distinct.iter().map(|&bytes| 2 * links.message(&mesh, stage, bytes).0).collect()).collect();
        let mut choices = Vec::new();
        for (kind, offers) in problem.kinds.iter().zip(&offers) {
            let zeros: Vec<Zero> = kind.zero.iter().copied().filter(|z| z.0 == 0 || tuple.dp * tuple.cp > 1).collect();
            // Many options have the same buckets.
            let mut syncs: Vec<(&Offer, Vec<[LayerSync; 3]>)> = Vec::new();
            let mut menu = Vec::new();
            for (offer, index) in offers.iter().zip(0..) {
                if !kind.recompute.contains(&offer.option.recompute) {
                    continue;
                }
                let bytes = &offer.option.bytes;
                let known = syncs.iter().position(|(o, _)| o.option.bytes.buckets == bytes.buckets).unwrap_or_else(|| {
                    let by_zero = zeros.iter().map(|&zero| {
                        let together = terms.sync(bytes, zero, Home::Together);
                        let of = |home| if bytes.buckets.iter().any(|b| b.tied) { terms.sync(bytes, zero, home) } else { together };
                        [together, of(Home::Repeated), of(Home::Apart)]
                    });
                    syncs.push((offer, by_zero.collect()));
                    syncs.len() - 1
                });
                for (&zero, sync) in zeros.iter().zip(&syncs[known].1) {
                    let terms = sync.map(|s| s.terms(offer.option.forward, offer.option.backward));
                    menu.push(Choice { offer: index, zero, terms, frame: bytes.frame, workspace: workspace_region(bytes.workspace) });
                }
            }
            if menu.is_empty() {
                return None;
            }
            choices.push(menu);
        }
        let tied = offers.iter().map(|o| o.iter().any(|o| o.tie.is_some())).collect();
        let boundary = distinct.last().copied().unwrap_or(0);
        let constant = terms.constant(tuple.pp);
        Some(Menus { tuple, offers, choices, tied, messages, crossing, boundary, constant })
    }

    /// Time of the messages from `stage` to the next, if `layer` is its last.
    pub fn message(&self, stage: u64, layer: usize) -> u64 {
        if stage + 1 == self.tuple.pp { 0 } else { self.messages[stage as usize][self.crossing[layer]] }
    }

    /// The least that messages of a stage can take.
    pub fn least_message(&self, stage: u64) -> u64 {
        if stage + 1 == self.tuple.pp { 0 } else { self.messages[stage as usize].iter().copied().min().unwrap_or(0) }
    }

    /// Bytes left for layers in the arena of a stage.
    pub fn room(&self, budget: u64, stage: u64) -> Option<u64> {
        budget.checked_sub(scalar_bytes() + boundary_bytes(self.boundary, stage, self.tuple.pp))
    }

    /// Menus for each sharding and ZeRO stage of the tied parameter that all its homes can have; the menus themselves if nothing is tied.
    pub fn by_tie(&self) -> Vec<Menus> {
        let homes: Vec<usize> = (0..self.tied.len()).filter(|&k| self.tied[k]).collect();
        let Some(&first) = homes.first() else { return vec![self.clone()] };
        let tie = |kind: usize, choice: &Choice| self.offers[kind][choice.offer as usize].tie.clone().map(|sharding| (sharding, choice.zero));
        let mut ties: Vec<Tie> = self.choices[first].iter().filter_map(|c| tie(first, c)).collect();
        ties.sort();
        ties.dedup();
        let restrict = |wanted: &Tie| {
            let mut menus = self.clone();
            for &kind in &homes {
                menus.choices[kind].retain(|c| tie(kind, c).as_ref() == Some(wanted));
            }
            menus.choices.iter().all(|m| !m.is_empty()).then_some(menus)
        };
        ties.iter().filter_map(restrict).collect()
    }
}
