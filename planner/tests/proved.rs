//! Programs of drawn plans are proved by the verifier, large ones in a few periods.

use dplan_ir::plan::{Clip, Recompute, Schedule, Zero};
use dplan_ir::text;
use dplan_ir::verify::program::verify_program;
use dplan_ir::verify::report::annotate;
use dplan_planner::drawn::{Case, Dice, Ffn, Model, Split, Way};
use dplan_planner::lower;

#[test]
fn drawn_plans_lower_to_programs_that_are_proved() {
    for seed in 0..150 {
        let case = Case::drawn(&mut Dice::of(1, seed));
        let graph = case.graph();
        let program = lower::lower(&graph, &case.plan(&graph)).unwrap_or_else(|e| panic!("{case}: {e}"));
        if let Err(violations) = verify_program(&graph, &program) {
            let list: Vec<String> = violations.iter().map(ToString::to_string).collect();
            panic!("{case}\n{}\n\n{}", list.join("\n"), annotate(&text::program_printed(&program, &graph), &violations));
        }
    }
}

/// Every schedule over as many stages as large plans have: messages of two turns each, which a stage that runs ahead soon waits for.
#[test]
fn pipelines_of_many_stages_reach_their_end() {
    let schedules = [(Schedule::ZbH1, 1), (Schedule::ZbV, 2), (Schedule::Interleaved, 2)];
    for ((schedule, virtual_stages), (stages, micro_batches)) in schedules.into_iter().flat_map(|s| [(s, (7, 14)), (s, (32, 160))]) {
        let layers = (stages * virtual_stages) as u32;
        let model = Model { blocks: layers - 2, ffn: Ffn::Plain, ..Model::SMALLEST };
        let mut case = Case { model, micro_batches, schedule, virtual_stages, cuts: (1..layers).collect(), ..Case::smallest() };
        case.settle();
        let what = format!("{} on {stages} stages", schedule.name());
        let graph = case.graph();
        let program = lower::lower(&graph, &case.plan(&graph)).unwrap_or_else(|e| panic!("{what}: {e}"));
        verify_program(&graph, &program).unwrap_or_else(|v| panic!("{what}: {} violations, first {}", v.len(), v[0]));
    }
}

/// 16 stages of 8 layers, 1536 micro-batches: all but a few periods are skipped.
#[test]
fn a_large_program_costs_no_more_than_a_few_periods() {
    let model = Model { blocks: 126, kv_heads: 2, group: 2, tied: true, ..Model::SMALLEST };
    let (cuts, split) = ((1..16).map(|s| 8 * s).collect(), Split::Drawn(7));
    let mut case = Case { model, dp: 2, tp: 2, micro_batches: 1536, cuts, split, clip: Clip::GlobalNorm, ..Case::smallest() };
    case.settle();
    for (layer, way) in case.ways.iter_mut().enumerate() {
        *way = Way { zero: Zero(layer as u8 % 4), recompute: Recompute::ALL[layer % 3], ..Way::PLAIN };
    }
    case.settle();
    let graph = case.graph();
    let program = lower::lower(&graph, &case.plan(&graph)).unwrap_or_else(|e| panic!("{e}"));
    let start = std::time::Instant::now();
    let facts = verify_program(&graph, &program).unwrap_or_else(|v| panic!("{} violations, first {}", v.len(), v[0]));
    println!("{facts:?} in {:?}", start.elapsed());
    assert!(facts.walked * 20 < facts.issued, "{facts:?}");
}
