//! Why nothing fits: the attempt that is short of the fewest bytes, the fewest devices that would do, and which pins stand in the way.

use crate::memory::away;
use crate::menu::Menus;
use crate::placement::Site;
use crate::prices::{Prices, Shape};
use crate::problem::Problem;
use crate::search::NEVER;
use crate::space::{Tuple, tuples};
use crate::stages::Stages;
use dplan_ir::mesh::Keys;
use dplan_ir::plan::Schedule;
use dplan_ir::program::Role;

/// Most numbers of devices that are tried.
const MOST_TRIES: usize = 256;

/// The attempt that came nearest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shortage {
    pub tuple: Tuple,
    pub stage: usize,
    /// Bytes missing on each device of that stage, whatever is chosen.
    pub bytes: u64,
}

/// The plan that misses the budget by least, on its worst stage; nothing if no layer can run at all, and 0 bytes if a plan fits.
pub fn shortage(problem: &Problem, prices: &mut dyn Prices) -> Option<Shortage> {
    let mut best: Option<Shortage> = None;
    for tuple in thrifty(problem, prices) {
        let bound = best.map_or(NEVER, |b| b.bytes);
        if bound == 0 {
            break;
        }
        let Some(menus) = Menus::new(problem, prices, tuple) else { continue };
        for menus in menus.by_tie() {
            let bound = best.map_or(NEVER, |b| b.bytes);
            if let Some((bytes, stage)) = Stages::new(&menus, &problem.layers, problem.budget).shortage(bound) {
                best = Some(Shortage { tuple, stage, bytes });
            }
        }
    }
    best
}

/// Whether the layers can run at all, however much memory they need.
pub fn runs(problem: &Problem, prices: &mut dyn Prices) -> bool {
    tuples(prices, problem.devices, problem.batch, &problem.pins).into_iter().any(|tuple| Menus::new(problem, prices, tuple).is_some())
}

/// Whether any plan fits.
pub fn fits(problem: &Problem, prices: &mut dyn Prices) -> bool {
    thrifty(problem, prices).into_iter().any(|tuple| {
        let menus = Menus::new(problem, prices, tuple);
        let ties = menus.iter().flat_map(|m| m.by_tie());
        ties.into_iter().any(|m| Stages::new(&m, &problem.layers, problem.budget).shortage(1).is_some())
    })
}

/// The fewest devices above `problem.devices` on which a plan fits, of the numbers up to `most` that there are machines of.
pub fn fewest_devices(problem: &Problem, prices: &mut dyn Prices, there_is: impl Fn(u64) -> bool, most: u64, late: &dyn Fn() -> bool) -> Option<u64> {
    let least = least_states(problem, prices)?.div_ceil(problem.budget.max(1)).max(problem.devices + 1);
    let counts = (least..=most).filter(|&devices| there_is(devices)).take(MOST_TRIES);
    counts.take_while(|_| !late()).find(|&devices| fits(&Problem { devices, ..problem.clone() }, prices))
}

/// The pins without any one of which a plan would fit.
pub fn conflicts(problem: &Problem, prices: &mut dyn Prices) -> Vec<&'static str> {
    let mut named = Vec::new();
    for (key, pins) in problem.pins.relaxations() {
        if fits(&problem.under(prices, pins), prices) {
            named.push(key);
        }
    }
    named
}

/// Tuples, those that need least memory first; `gpipe`, which holds more than its twin, is left out where that is allowed.
fn thrifty(problem: &Problem, prices: &mut dyn Prices) -> Vec<Tuple> {
    let mut all = tuples(prices, problem.devices, problem.batch, &problem.pins);
    let eager = problem.pins.schedule.allows(&Schedule::OneFOneB);
    all.retain(|t| t.schedule != Schedule::GPipe || !eager);
    all.sort_by_key(|t| (t.micro_batch, t.boundary.is_none(), *t));
    all
}

/// Bytes of parameters, gradients and optimizer states of the whole model on the device, each kept once, what may be offloaded left out: more devices than budgets
/// of it are needed.
fn least_states(problem: &Problem, prices: &mut dyn Prices) -> Option<u64> {
    let shape = Shape { tp: 1, cp: 1, ep: 1, micro_batch: 1, boundary: None, padding: 0, keys: Keys::Gathered, site: Site::ONLY, nested: None };
    let mut total = 0;
    for (at, &kind) in problem.layers.iter().enumerate() {
        let kind = &problem.kinds[kind];
        let stays = |role: &Role| !kind.away.iter().any(|&a| away(*role, a.states).is_some());
        let element: u64 = problem.types.roles().into_iter().filter(stays).map(|role| problem.types.dtype(role).size()).sum();
        let offers = prices.offers(kind.class, shape);
        // A tied parameter counts in the first layer alone; where the homes are elsewhere this is still no more than there is.
        let elems = |o: &crate::prices::Offer| o.option.bytes.buckets.iter().filter(|b| !b.tied || at == 0).map(|b| b.elems).sum::<u64>();
        total += offers.iter().map(elems).min()? * element;
    }
    Some(total)
}
