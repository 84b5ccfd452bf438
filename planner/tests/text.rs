//! The text of lowered programs is the programs, and that of sharded graphs the sharded graphs.

use dplan_ir::text;
use dplan_planner::drawn::{Case, Dice};
use dplan_planner::lower;

#[test]
fn lowered_programs_read_back_as_they_were() {
    for seed in 0..60 {
        let case = Case::drawn(&mut Dice::of(5000, seed));
        let graph = case.graph();
        let plan = case.plan(&graph);
        let what = case.to_string();
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
