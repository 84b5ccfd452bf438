//! The search on real prices: small Llamas over CPU ranks.

use super::*;
use crate::baselines::baselines;
use crate::capacity::Trade;
use crate::certificate::check;
use crate::explain::explain;
use crate::options::tests::{Sizes, llama};
use crate::placement::Site;
use crate::predict::predict;
use crate::prices::{Offer, Prices, Reference, Shape, scaled};
use dplan_ir::mesh::{Keys, Mesh};
use dplan_ir::nest::Nest;
use dplan_ir::plan::Recompute;
use dplan_ir::sync::Sync;
use std::collections::BTreeSet;

fn request<'a>(graph: &'a Graph, classes: &'a [u32], cluster: &'a Cluster, batch: u64, pins: &str) -> Request<'a> {
    Request {
        graph,
        classes,
        cluster,
        batch,
        compute: DType::F32,
        optimizer: Optimizer::AdamW,
        clip: Clip::GlobalNorm,
        pins: Pins::parse(pins).unwrap(),
        memory_limit: None,
        deadline: None,
    }
}

const SIZES: Sizes =
    Sizes { batch: 1, seq: 32, hidden: 48, kv_heads: 2, queries: 2, head: 12, mlp: 96, vocab: 101, blocks: 4, tied: false, experts: None };

#[test]
fn plans_cost_what_the_search_says_and_fit() {
    for tied in [false, true] {
        let graph = llama(Sizes { tied, ..SIZES }, DType::F32);
        let classes = dplan_ir::layers::classes(&graph);
        for (cluster, batch, pins) in [
            ("cpu:1", 3, ""),
            ("cpu:2", 4, ""),
            ("cpu:4", 8, ""),
            ("cpu:4", 8, "tp=2,zero=1+3"),
            ("cpu:4", 4, "pp=4,micro=1"),
            ("cpu:4", 4, "pp=2,recompute=full,schedule=gpipe"),
            ("h100:2x2", 8, "tp=2"),
        ] {
            let devices = Cluster::parse(cluster).unwrap();
            let mut before = Nanos::ZERO;
            // The unlimited plan, and plans in less memory than it took.
            let mut limit = None;
            for _ in 0..2 {
                let request = Request { memory_limit: limit, ..request(&graph, &classes, &devices, batch, pins) };
                let mut planner = Planner::new(request).unwrap();
                let answer = match planner.search() {
                    Ok(answer) => answer,
                    Err(Refusal::Infeasible(why)) if limit.is_some() => {
                        assert!(why.shortage.bytes > 0, "{why}");
                        break;
                    }
                    Err(why) => panic!("{cluster} {pins}: {why}"),
                };
                let label = format!("{cluster} {pins} {limit:?}");
                assert!(answer.statistics.proved && answer.objective >= before, "{label}");
                assert_eq!(answer.plan.devices(), devices.devices(), "{label}");
                assert_eq!(answer.plan.batch(), batch, "{label}");
                let prediction = predict(&graph, &classes, &devices, &answer.plan).unwrap();
                assert_eq!(prediction.step, answer.objective, "{label}");
                let most = prediction.memory.iter().map(|m| m.total_bytes()).max().unwrap();
                assert!(most <= limit.unwrap_or(devices.whole().device.memory).0, "{label}: {most}");
                let checked = check(&planner.problem, &mut planner.prices, answer.objective.0, answer.statistics.lower_bound, &answer.closed);
                assert!(checked.is_ok(), "{label}: {checked:?}");
                let notes = explain(&planner.problem, &mut planner.prices, &answer.plan).unwrap();
                assert_eq!((notes[0].first, notes[notes.len() - 1].last + 1), (0, classes.len()), "{label}");
                for note in &notes {
                    assert!(note.next.as_ref().is_none_or(|n| n.step >= answer.objective), "{label}: {note:?}");
                    assert!(note.denied.as_ref().is_none_or(|n| n.step < answer.objective && n.short.0 > 0), "{label}: {note:?}");
                    assert_eq!(note.arena.0, prediction.memory[note.stage].arena_bytes(), "{label}: {note:?}");
                }
                if pins.is_empty() {
                    for row in baselines(&planner.problem, &mut planner.prices, devices.node(), &|| false).rows {
                        assert!(row.step.is_none_or(|s| s >= answer.objective), "{label}: {row:?}");
                    }
                }
                before = answer.objective;
                limit = Some(Bytes(most - 1));
            }
        }
    }
}

/// Every offer is matched by some way of each floor, at any price of a byte and with any number of micro-batches in flight, and has at least its elements.
#[test]
fn floors_are_below_all_offers() {
    for (experts, clusters) in [(None, ["cpu:4", "h100:2x2"]), (Some((4, 2)), ["cpu:4", "h100:2x2"])] {
        let graph = llama(Sizes { experts, ..SIZES }, DType::F32);
        let all = dplan_ir::layers::classes(&graph);
        let classes: BTreeSet<u32> = all.iter().copied().collect();
        for cluster in clusters {
            let devices = Cluster::parse(cluster).unwrap();
            let mut model = Model::new(&graph, &all, &devices).unwrap();
            let mut compared = 0;
            for (tp, cp, ep) in [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 4)] {
                for (boundary, micro_batch) in [(None, 1), (None, 3), (Some(1), 2), (Some(1), 6)] {
                    for padding in 0..model.paddings(tp) {
                        for keys in Keys::ALL.into_iter().filter(|&keys| cp > 1 || keys == Keys::Gathered) {
                            let shape = Shape { tp, cp, ep, micro_batch, boundary, padding, keys, site: Site::ONLY, nested: None };
                            for &class in &classes {
                                compared += below_all_offers(&mut model, class, shape, 6);
                            }
                        }
                    }
                }
            }
            assert!(compared > 1000, "{compared}");
            // Where degrees are nested otherwise, or data parallelism is cut up, the same holds; on several nodes, what is nested inside is quick.
            let experts = [(1, 1, 2), (2, 1, 2), (4, 1, 4), (2, 2, 2)]
                .into_iter()
                .flat_map(|(tp, cp, ep)| Nest::all().into_iter().map(move |nest| (tp, cp, ep, (nest, Sync::Flat, ep))));
            let parts = [(2, 1, 1), (4, 2, 1)].map(|(tp, cp, ep)| (tp, cp, ep, (Nest::default(), Sync::Hierarchical { far: 2 }, 4)));
            for (tp, cp, ep, nested) in experts.chain(parts) {
                let shape =
                    Shape { tp, cp, ep, micro_batch: 2, boundary: None, padding: 0, keys: Keys::Gathered, site: Site::ONLY, nested: Some(nested) };
                for (&class, sequences) in classes.iter().flat_map(|class| [(class, 2), (class, 6)]) {
                    compared += below_all_offers(&mut model, class, shape, sequences);
                }
            }
            assert!(compared > 1500, "{compared}");
        }
    }
}

/// How many offers were compared.
fn below_all_offers(model: &mut Model<'_>, class: u32, shape: Shape, sequences: u64) -> usize {
    let offers = model.offers(class, shape);
    // A floor says of buckets over which ranks with other data they are spread, not how they are split.
    let data = Mesh::of(shape.degrees()).data();
    for recompute in [&Recompute::ALL[..], &[Recompute::None], &[Recompute::Full]] {
        let own = shape.micro_batch;
        for from in [Reference::Rank, Reference::Whole { sequences }, Reference::Same { sequences }, Reference::Same { sequences: own }] {
            let floor = model.floor(class, shape, from, recompute);
            let part = |amount: u64| scaled(amount, floor.part);
            for Offer { option, .. } in offers.iter().filter(|o| recompute.contains(&o.option.recompute)) {
                for (picos_per_byte, in_flight) in [(0, 1), (1, 1), (100, 1), (100, 3), (1_000_000, 7)] {
                    let cost = |time: u64, frame: u64, workspace: u64| 1000 * time + picos_per_byte * (in_flight * frame + workspace);
                    let whole = cost(option.time().0, option.bytes.frame, option.bytes.workspace);
                    let of = |trade: &Trade| trade.corners().iter().map(|&(f, t)| cost(part(t), part(f), part(trade.workspace()))).min();
                    let least = floor.trades.iter().filter_map(of).min().unwrap();
                    assert!(least <= whole, "{shape:?} class {class} {from:?}: {least} of {option:?}");
                }
                for bucket in &floor.buckets {
                    let elems: u64 = option.bytes.buckets.iter().filter(|b| !b.tied && b.axes.and(data) == bucket.axes).map(|b| b.elems).sum();
                    assert!(bucket.elems <= elems, "{shape:?} class {class} {from:?}: {bucket:?} of {option:?}");
                }
            }
        }
    }
    offers.len()
}

#[test]
fn refusals_say_what_would_do() {
    let graph = llama(SIZES, DType::F32);
    let classes = dplan_ir::layers::classes(&graph);
    let refusal = |cluster: &str, batch, pins: &str, limit: Option<u64>| {
        let devices = Cluster::parse(cluster).unwrap();
        let request = Request { memory_limit: limit.map(Bytes), ..request(&graph, &classes, &devices, batch, pins) };
        Planner::new(request).and_then(|mut p| p.search()).map(|a| a.plan.dp).unwrap_err().to_string()
    };
    for (cluster, batch, pins, limit, says) in [
        ("cpu:4", 6, "dp=4", None, "a batch of 6 sequences cannot be covered exactly under the pins dp=4; the nearest that can is 4"),
        ("cpu:4", 7, "dp=2,micro=2", None, "the nearest that can is 8"),
        ("cpu:4", 8, "dp=3", None, "no layout of 4 devices under the pins dp=3: dp could be 1, 2, 4"),
        ("cpu:4", 8, "tp=3", None, "tp could be 1, 2, 4"),
        ("cpu:4", 8, "ep=2", None, "under the pins ep=2: ep could be 1"),
        ("cpu:4", 8, "dp=2,tp=4", None, "dp could be 1, or tp could be 1, 2"),
        ("cpu:4", 8, "tp=3,dp=3", None, "changing one of them is not enough"),
        ("cpu:4", 8, "", Some((4 << 30) + 1), "a memory limit of 4.00 GiB is more than there is"),
        ("h100:2", 8, "", Some(1 << 30), "no plan fits: of the 1.00 GiB that each device may take, the context alone takes 1.00 GiB"),
        ("cpu:4", 1 << 62, "", None, "more than can be counted"),
        ("cpu:7", 7, "pp=7", None, "each stage needs one of 6 layers"),
        ("cpu:4", 8, "zero@0-9=1", None, "layers 0 to 5"),
        ("cpu:1", 1, "zero=3", None, "ZeRO is pinned without data parallelism"),
        ("cpu:8", 8, "zero=0,tp=1,pp=1", Some(400_000), "no plan fits under the pins tp=1,pp=1,zero=0"),
    ] {
        let found = refusal(cluster, batch, pins, limit);
        assert!(found.contains(says), "{cluster} {batch} {pins}: {found}");
    }
    let found = refusal("cpu:1", 8, "", Some(600_000));
    let fewest: u64 = found.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{found}"));
    for devices in 1..=fewest {
        let cluster = Cluster::parse(&format!("cpu:{devices}")).unwrap();
        let request = Request { memory_limit: Some(Bytes(600_000)), ..request(&graph, &classes, &cluster, 8, "") };
        assert_eq!(Planner::new(request).and_then(|mut p| p.search()).is_ok(), devices == fewest, "{devices} devices: {found}");
    }
}

/// Steps of any size are counted, or refused by name; a wrap would end a test, and make a larger step the quicker.
#[test]
fn no_size_of_a_step_wraps_around() {
    let graph = llama(SIZES, DType::F32);
    let classes = dplan_ir::layers::classes(&graph);
    for (cluster, pins) in [("h100:2x2", "tp=2,pp=1,recompute=none,zero=0"), ("cpu:4", "tp=2,dp=2,recompute=full,zero=1")] {
        let cluster = Cluster::parse(cluster).unwrap();
        let (mut last, mut refused) = (0, 0);
        for shift in (3..63).step_by(3) {
            match Planner::new(request(&graph, &classes, &cluster, 1 << shift, pins)).and_then(|mut p| p.search()) {
                Ok(answer) => {
                    assert!(answer.objective.0 > last && refused == 0, "2^{shift} sequences take {}, fewer {last}", answer.objective);
                    last = answer.objective.0;
                }
                Err(Refusal::TooMuch { .. }) => refused += 1,
                Err(other) => panic!("2^{shift}: {other}"),
            }
        }
        assert!(last > 1_000_000_000_000 && refused > 0, "{last} {refused}");
    }
}

/// Time that runs out over schedules that take long to search leaves no worse an answer than the others have.
#[test]
fn plain_schedules_are_there_when_time_runs_out() {
    let graph = llama(SIZES, DType::F32);
    let classes = dplan_ir::layers::classes(&graph);
    let cluster = Cluster::parse("cpu:4").unwrap();
    let asked = std::cell::Cell::new(0);
    let search = |pins: &str, most: usize| {
        asked.set(0);
        let late = || {
            asked.set(asked.get() + 1);
            asked.get() > most
        };
        let deadline = Some(&late as &dyn Fn() -> bool);
        Planner::new(Request { deadline, ..request(&graph, &classes, &cluster, 8, pins) }).and_then(|mut p| p.search()).unwrap()
    };
    let (plain, all) = ("schedule=1f1b", "schedule=1f1b+interleaved+zb-h1+zb-v");
    let best = search(plain, usize::MAX);
    let needs = asked.get();
    assert!(search(all, usize::MAX).objective <= best.objective);
    let mut ran_out = 0;
    for most in (0..needs + 100).step_by(1 + needs / 20) {
        let (alone, beside) = (search(plain, most), search(all, most));
        assert!(beside.objective <= alone.objective, "{most} of {needs}: {} beside {}", beside.objective, alone.objective);
        ran_out += usize::from(!beside.statistics.proved);
    }
    assert!(ran_out > 1, "{ran_out} of {needs}");
}

/// Where states elsewhere leave too little room still, activations go too, and no sooner.
#[test]
fn activations_are_offloaded_where_states_are_not_enough() {
    let graph = llama(SIZES, DType::F32);
    let classes = dplan_ir::layers::classes(&graph);
    let cluster = Cluster::parse("cpu:1").unwrap();
    let answer = |limit: u64, pins: &str| {
        let request = Request { memory_limit: Some(Bytes(limit)), ..request(&graph, &classes, &cluster, 8, pins) };
        Planner::new(request).and_then(|mut p| p.search())
    };
    let states = "offload=none+optimizer:nvme+gradients:nvme+parameters:nvme";
    let mut seen = [0; 3];
    for limit in (500_000..4_000_000).step_by(250_000) {
        let answers = [answer(limit, "offload=none"), answer(limit, states), answer(limit, "")];
        assert!(answers.iter().all(|a| matches!(a, Ok(_) | Err(Refusal::Infeasible(_)))), "{limit}");
        let [none, states, free] = answers.map(Result::ok);
        let stored = free.as_ref().is_some_and(|a| a.plan.options.iter().any(|o| o.activations.is_some()));
        assert_eq!(stored, free.is_some() && states.is_none(), "{limit}");
        assert!(free.is_some() || states.is_none() && none.is_none(), "{limit}");
        if none.is_none() && states.is_some() {
            assert_eq!(free.map(|a| a.objective), states.map(|a| a.objective), "{limit}");
            seen[1] += 1;
        }
        (seen[0], seen[2]) = (seen[0] + usize::from(none.is_some()), seen[2] + usize::from(stored));
    }
    assert!(seen.iter().all(|&n| n > 0), "{seen:?} fit without, with states and with activations elsewhere");
}

/// Where memory asks for offloading, the fewest devices are those that do with it.
#[test]
fn the_fewest_devices_may_offload() {
    let graph = llama(SIZES, DType::Bf16);
    let classes = dplan_ir::layers::classes(&graph);
    let machines: Vec<Cluster> = (1..=8).map(|devices| Cluster::parse(&format!("cpu:{devices}")).unwrap()).collect();
    for (limit, fewest, whole) in [(400_000, 2, 8), (700_000, 2, 4)] {
        let planner = |machine, pins: &str| {
            let request = Request { memory_limit: Some(Bytes(limit)), compute: DType::Bf16, ..request(&graph, &classes, machine, 8, pins) };
            Planner::new(request).unwrap()
        };
        let first = |pins: &str| machines.iter().find(|m| planner(m, pins).search().is_ok()).map(Cluster::devices);
        assert_eq!((first(""), first("offload=none")), (Some(fewest), Some(whole)), "{limit}");
        assert_eq!(planner(&machines[0], "").fewest_devices(), Fewest::Are(fewest), "{limit}");
        assert_eq!(planner(&machines[0], "offload=none").fewest_devices(), Fewest::Are(whole), "{limit}");
        match planner(&machines[0], "").search() {
            Err(Refusal::Infeasible(why)) => assert_eq!(why.devices, Fewest::Are(fewest), "{why}"),
            other => panic!("{other:?}"),
        }
    }
}
