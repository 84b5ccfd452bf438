//! The integer program against the labels, and what it finds by itself.

use super::tests::{Draw, SMALL, Sizes, branching, llama};
use super::*;
use crate::machine::Machine;
use dplan_ir::dtype::DType;

fn best<'o>(offers: &'o [Offer], goal: &Goal) -> Option<&'o LayerOption> {
    let fits = |o: &&LayerOption| goal.limit.is_none_or(|limit| o.bytes.frame + o.bytes.workspace <= limit);
    offers.iter().map(|o| &o.option).filter(fits).min_by(|a, b| goal.value(a).total_cmp(&goal.value(b)))
}

#[test]
fn the_integer_program_agrees_with_the_labels_on_random_layers() {
    let machine = Machine::parse("cpu:8").unwrap();
    let (mut compared, mut impossible) = (0, 0);
    for seed in 0.. {
        if compared == 110 {
            break;
        }
        let mut draw = Draw(seed);
        let ops = 1 + draw.below(3);
        let graph = branching(&mut draw, ops);
        let (tp, boundary) = ([2, 4][draw.below(2) as usize], [None, Some(1), Some(2)][draw.below(3) as usize]);
        let pricings = Pricing::all(&graph, &machine, tp, 4, boundary);
        let pricing = &pricings[draw.below(pricings.len() as u64) as usize];
        let layer = draw.below(3) as u32;
        let blueprint = Blueprint::new(&graph, layer).unwrap();
        let offers = blueprint.offers(pricing);
        // The solver is dense in places: small programs keep the test quick.
        let arcs = |mut net: Net<'_>| net.stages(Keep::All).iter().map(|s| s.arcs.len()).sum::<usize>();
        if Net::new(pricing, &blueprint).is_none_or(|net| arcs(net) > 400) {
            continue;
        }
        let bytes: Vec<u64> = offers.iter().map(|o| o.option.bytes.frame + o.option.bytes.workspace).collect();
        let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
        let weight = |draw: &mut Draw| [0.0, 0.1, 1.0, 10.0][draw.below(4) as usize];
        let goal = Goal {
            per_nanosecond: 1.0,
            per_param: weight(&mut draw),
            per_frame_byte: weight(&mut draw),
            per_workspace_byte: weight(&mut draw),
            limit: [None, Some(least + draw.below(most - least + 1)), Some(least - 1)][draw.below(3) as usize],
        };
        let found = blueprint.integer_program(pricing, &goal).unwrap();
        let expected = best(&offers, &goal);
        match (&found, expected) {
            (None, None) => impossible += 1,
            (Some(found), Some(expected)) => assert_eq!(goal.value(found), goal.value(expected), "seed {seed}, {goal:?}"),
            _ => panic!("seed {seed}, {goal:?}: {found:?} and {expected:?}"),
        }
        compared += 1;
    }
    assert!(impossible > 10, "{compared} layers, {impossible} of them impossible");
}

/// The letters split in each forward op of an option, in graph order.
fn spelled(option: &LayerOption) -> Vec<String> {
    option.strategy.iter().map(|a| a.0.iter().map(|(l, _)| *l).collect()).collect()
}

/// Odd sizes of sequence, residual stream and heads leave the number of heads and the inner width of the feed-forward part to split.
const DENSE: Sizes = Sizes { batch: 1, seq: 1023, hidden: 4095, kv_heads: 8, queries: 1, head: 125, mlp: 14336, vocab: 32000, ..SMALL };

#[test]
fn it_finds_megatrons_columns_and_rows_by_itself() {
    let machine = Machine::parse("h100:8").unwrap();
    let graph = llama(DENSE, DType::Bf16);
    let pricing = &Pricing::all(&graph, &machine, 2, 1, None)[0];
    let blueprint = Blueprint::new(&graph, 1).unwrap();
    let goal = Goal { per_param: 1e-3, ..Goal::QUICKEST };
    let found = blueprint.integer_program(pricing, &goal).unwrap().unwrap();
    // Norms alike on all ranks; query, key and value by heads (columns), the projection behind them over heads (rows); likewise the inner width.
    assert_eq!(spelled(&found), ["", "g", "g", "g", "c", "c", "g", "g", "", "", "f", "f", "c", "f", ""]);
    assert_eq!(best(&blueprint.offers(pricing), &goal).map(spelled), Some(spelled(&found)));
}

#[test]
fn it_shards_the_table_of_a_wide_embedding() {
    let machine = Machine::parse("a100-80g:8").unwrap();
    let graph = llama(Sizes { seq: 127, hidden: 1021, vocab: 1 << 20, batch: 1, ..SMALL }, DType::F32);
    let pricing = &Pricing::all(&graph, &machine, 8, 1, None)[0];
    let blueprint = Blueprint::new(&graph, 0).unwrap();
    // A parameter and its optimizer states, read and written once in a step.
    let goal = Goal { per_param: 16.0 / 1600.0, ..Goal::QUICKEST };
    let found = blueprint.integer_program(pricing, &goal).unwrap().unwrap();
    assert_eq!(found.strategy[0].axes('v'), pricing.mesh.tp());
    assert_eq!(found.param_elems(), (1 << 20) / 8 * 1021);
}
