//! Bounds of several tuples at once against those of each: what closes a family closes every tuple of it.

mod drawn;

use dplan_ir::layers::classes;
use dplan_ir::optimizer::Optimizer;
use dplan_ir::plan::Clip;
use dplan_ir::splitmix;
use dplan_ir::sync::Sync;
use dplan_planner::bound::{Lives, fitting, floor, priced};
use dplan_planner::drawn::{Case, Dice};
use dplan_planner::machine::{Cluster, Link, Machine};
use dplan_planner::memory::StateTypes;
use dplan_planner::menu::Menus;
use dplan_planner::model::Model;
use dplan_planner::pins::Pins;
use dplan_planner::prices::{Prices, Reference};
use dplan_planner::problem::Problem;
use dplan_planner::search::trend_batches;
use dplan_planner::space::{Tuple, tuples};
use dplan_planner::units::{Nanos, PerSecond};
use drawn::{Instance, instance};

/// What was compared: bounds of several tuples, those of them that are below a tuple's own, and the same of menus.
#[derive(Default, Debug)]
struct Compared {
    bounds: usize,
    lower: usize,
    menus: usize,
    lower_menus: usize,
    families: usize,
}

impl Compared {
    fn check(&mut self, problem: &Problem, prices: &mut dyn Prices, most: usize, what: &dyn std::fmt::Display) {
        let space = tuples(prices, problem.devices, problem.batch, &problem.pins);
        let batches = trend_batches(&space);
        let several: Vec<&[Tuple]> = space.chunk_by(|a, b| a.family() == b.family()).filter(|family| family.len() > 1).collect();
        for family in several.iter().step_by(several.len().div_ceil(most).max(1)) {
            self.families += 1;
            let sequences = batches[&family[0].tp];
            let least = floor(problem, prices, &family[0]);
            assert!(family.iter().all(|t| floor(problem, prices, t) >= least), "{what}: {family:?}");
            for from in [Reference::Rank, Reference::Whole { sequences }] {
                self.below(problem, prices, family, from, what);
            }
            for keys in family.chunk_by(|a, b| a.keys == b.keys) {
                for from in [Reference::Same { sequences }, Reference::own(&family[0])] {
                    self.below(problem, prices, keys, from, what);
                }
                let together = Menus::least(problem, prices, keys);
                let bound = |menus: Option<Menus>| menus.and_then(|m| m.by_tie().iter().map(|m| priced(m, &problem.layers)).min());
                let together = bound(together);
                for tuple in keys {
                    let own = bound(Menus::new(problem, prices, *tuple));
                    assert!(own.is_none() || together.is_some_and(|least| Some(least) <= own), "{what}: {together:?} is above {own:?} of {tuple:?}");
                    self.menus += usize::from(own.is_some());
                    self.lower_menus += usize::from(own > together);
                }
            }
        }
    }

    fn below(&mut self, problem: &Problem, prices: &mut dyn Prices, members: &[Tuple], from: Reference, what: &dyn std::fmt::Display) {
        let together = fitting(problem, prices, &mut Lives::default(), members, from);
        for tuple in members {
            let own = fitting(problem, prices, &mut Lives::default(), &[*tuple], from);
            assert!(together <= own, "{what}: {together} is above {own} of {tuple:?} by {from:?}");
            self.bounds += 1;
            self.lower += usize::from(together < own);
        }
    }
}

/// Every way of exchanging keys and gradients.
fn all_ways(pins: &Pins) -> Pins {
    Pins::parse("keys=gather+ring,sync=flat+hierarchical+hierarchical:2+tree+server").unwrap().over(pins)
}

#[test]
fn no_bound_of_a_family_of_drawn_layers_is_above_one_of_its_tuples() {
    let mut compared = Compared::default();
    for seed in 0..300 {
        let Instance { mut prices, problem } = instance(seed, 4, 3);
        let problem = problem.under(&prices, all_ways(&problem.pins));
        compared.check(&problem, &mut prices, 6, &format!("seed {seed}"));
    }
    assert!(
        compared.families > 300 && compared.bounds > 3000 && compared.lower > 100 && compared.menus > 1000 && compared.lower_menus > 100,
        "{compared:?}"
    );
}

/// A cluster of nodes of any size and links of any speed.
fn cluster(random: &mut u64) -> Cluster {
    let mut draw = |most: u64| splitmix::next(random) % most;
    let (per_node, nodes) = [(2, 4), (4, 2), (8, 1), (3, 2), (1, 8), (6, 2), (4, 4)][draw(7) as usize];
    let link = |latency: u64, rate: u64| Link { latency: Nanos(latency), bandwidth: PerSecond(rate) };
    let intra = link(draw(20_000), 1_000_000 << draw(18));
    let inter = link(draw(50_000), 1_000_000 << draw(16));
    Cluster::from(Machine { per_node, nodes, intra, inter, ..Machine::parse("a100-80g:1").unwrap() })
}

#[test]
fn no_bound_of_a_family_on_any_cluster_is_above_one_of_its_tuples() {
    let mut compared = Compared::default();
    for seed in 0..60 {
        let case = Case::drawn(&mut Dice::of(31, seed));
        let graph = case.graph();
        let classes = classes(&graph);
        let mut random = seed;
        let cluster = cluster(&mut random);
        let mut prices = Model::new(&graph, &classes, &cluster).unwrap();
        let types = StateTypes { sync: Sync::Flat, ..StateTypes::new(case.compute, Optimizer::AdamW) };
        let pins = all_ways(&Pins::default());
        let problem = Problem::new(&prices, cluster.devices(), 2 * cluster.devices(), types, Clip::GlobalNorm, pins, None);
        compared.check(&problem, &mut prices, 8, &format!("{case}, cluster {seed}"));
    }
    assert!(compared.families > 200 && compared.bounds > 2000 && compared.menus > 300 && compared.lower_menus > 50, "{compared:?}");
}
