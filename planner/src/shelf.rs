//! The ways of running one layer of a stage, under bounds on ring and workspace (of which an arena has one, for its largest layer). A [`Stock`] has all that can be of use;
//! a [`Shelf`] those that keep the bounds. Of shelves there are very many, of which most are asked only for what a layer takes at least in so many bytes: a stock is kept in
//! order of bytes too, so that this lower convex hull is built in one pass; which of the ways are undominated is found out where it is asked for.

use crate::expansion::Staircase;
use crate::menu::Choice;
use crate::objective::{Home, StageTime};
use crate::relaxation::{Hull, extend, hull};
use dplan_ir::pipeline::Slots;
use std::cell::OnceCell;
use std::rc::Rc;

/// Times and bytes of a choice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Load {
    pub time: u64,
    pub end: u64,
    /// States, and what is kept of micro-batches.
    pub bytes: u64,
    pub workspace: u64,
    pub ring: u64,
}

impl Load {
    pub fn of(choice: &Choice, home: Home, slots: Slots) -> Load {
        let (terms, StageTime { time, end }) = (choice.terms(home), choice.share(home));
        let bytes = terms.states + slots.frames * choice.frame + slots.held * choice.held + slots.versions * choice.version;
        Load { time, end, bytes, workspace: choice.workspace, ring: terms.ring }
    }
    pub fn arena(&self) -> u64 {
        self.bytes + self.workspace + self.ring
    }
    pub fn covers(&self, other: &Load) -> bool {
        self.time <= other.time && self.end <= other.end && self.bytes <= other.bytes && self.workspace <= other.workspace && self.ring <= other.ring
    }
    /// The smaller (or, with `u64::max`, the larger) of each.
    pub fn pick(self, other: Load, pick: fn(u64, u64) -> u64) -> Load {
        Load {
            time: pick(self.time, other.time),
            end: pick(self.end, other.end),
            bytes: pick(self.bytes, other.bytes),
            workspace: pick(self.workspace, other.workspace),
            ring: pick(self.ring, other.ring),
        }
    }
}

/// A choice, by its index in its menu.
pub(crate) type Item = (Load, u32);

/// The ways of running one layer that no other matches in all of time, end, bytes, workspace, and ring.
pub(crate) struct Stock {
    /// In rising order.
    pub items: Vec<Item>,
    /// By rising bytes, with their positions among the items.
    by_bytes: Vec<(Load, u32)>,
}

impl Stock {
    pub fn new(menu: &[Choice], home: Home, slots: Slots) -> Stock {
        let items = undominated(menu, home, slots);
        let mut by_bytes: Vec<(Load, u32)> = items.iter().zip(0..).map(|(item, position)| (item.0, position)).collect();
        by_bytes.sort_by_key(|(load, _)| load.bytes);
        Stock { items, by_bytes }
    }
}

/// What of a stock keeps bounds on ring and workspace.
pub(crate) struct Shelf {
    stock: Rc<Stock>,
    ring: u64,
    workspace: u64,
    /// How many do: more of them under wider bounds, or the same.
    pub allowed: usize,
    pub least: Load,
    /// The hulls of time, and of `n · time + end`, with positions in the stock.
    pub time: Hull,
    pub joint: Hull,
    items: OnceCell<Vec<Item>>,
}

impl Shelf {
    /// Nothing if no way keeps the bounds.
    pub fn new(stock: Rc<Stock>, ring: u64, workspace: u64, repeats: u64) -> Option<Shelf> {
        let (mut time, mut joint) = (Hull::new(), Hull::new());
        let (mut least, mut allowed) = (None, 0);
        for (load, position) in stock.by_bytes.iter().filter(|(l, _)| l.ring <= ring && l.workspace <= workspace) {
            extend(&mut time, (load.bytes, load.time, *position));
            extend(&mut joint, (load.bytes, repeats * load.time + load.end, *position));
            least = Some(least.map_or(*load, |least: Load| least.pick(*load, u64::min)));
            allowed += 1;
        }
        Some(Shelf { stock, ring, workspace, allowed, least: least?, time, joint, items: OnceCell::new() })
    }

    /// The hull of a cost.
    pub fn hull(&self, cost: impl Fn(&Load) -> u64) -> Hull {
        let kept = self.stock.by_bytes.iter().filter(|(load, _)| self.keeps(load));
        hull(kept.map(|(load, position)| (load.bytes, cost(load), *position)))
    }

    /// What is at a position of the stock.
    pub fn item(&self, position: u32) -> Item {
        self.stock.items[position as usize]
    }

    /// Those that no other matches in time, end and bytes, in rising order.
    pub fn items(&self) -> &[Item] {
        self.items.get_or_init(|| {
            let mut stairs = Staircase::default();
            let kept = self.stock.items.iter().filter(|(load, _)| self.keeps(load));
            kept.filter(|(load, _)| stairs.admits(load.end, load.bytes)).copied().collect()
        })
    }

    fn keeps(&self, load: &Load) -> bool {
        load.ring <= self.ring && load.workspace <= self.workspace
    }
}

/// The Pareto set of the ways of running one layer on a virtual stage that keeps so much.
fn undominated(menu: &[Choice], home: Home, slots: Slots) -> Vec<Item> {
    let mut all: Vec<Item> = menu.iter().zip(0..).map(|(c, index)| (Load::of(c, home, slots), index)).collect();
    all.sort_unstable();
    let mut kept: Vec<Item> = Vec::new();
    for (load, choice) in all {
        if !kept.iter().any(|(k, _)| k.covers(&load)) {
            kept.push((load, choice));
        }
    }
    kept
}
