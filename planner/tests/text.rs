//! The text of lowered programs is the programs, and that of sharded graphs the sharded graphs.

mod zoo;

use dplan_ir::text;
use dplan_planner::lower;
use zoo::{Degrees, Dice};

#[test]
fn lowered_programs_read_back_as_they_were() {
    for seed in 0..60 {
        let mut dice = Dice(seed + 5000);
        let degrees = Degrees { dp: dice.pick(&[1, 2]), tp: dice.pick(&[1, 2, 4]), pp: dice.pick(&[1, 2, 3]), micro_batches: dice.pick(&[1, 2, 9]) };
        let model = zoo::model(&mut dice, 2 * degrees.dp);
        let graph = zoo::graph(&model);
        let plan = zoo::plan(&graph, degrees, &mut dice);
        let what = format!("seed {seed}: {model:?} {degrees:?}");
        let program = lower::lower(&graph, &plan).unwrap_or_else(|e| panic!("{what}: {e}"));
        let printed = text::print_program(&program, &graph);
        let back = text::parse_program(&printed, &graph).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(back == program, "{what} reads back otherwise");
        let sharded = lower::shard(&graph, &plan).unwrap_or_else(|e| panic!("{what}: {e}"));
        let document = text::Document { graph, sharded: Some(sharded), program: Some(program) };
        let printed = text::print(&document);
        assert!(text::parse(&printed).unwrap_or_else(|e| panic!("{what}: {e}")) == document, "{what} reads back otherwise");
    }
}
