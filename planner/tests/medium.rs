//! The search against integer programs on instances of real size. A few here; `cargo bench -p dplan-planner --bench integer` compares 120.

mod drawn;

use dplan_planner::{integer, search};
use drawn::{Instance, medium};

#[test]
fn the_search_and_integer_programs_agree_on_large_instances() {
    let mut solved = 0;
    for seed in [0, 2, 5] {
        let Instance { mut prices, problem } = medium(seed);
        let exact = search::explore(&problem, &mut prices, &|| false);
        let integer = integer::explore(&problem, &mut prices, &|| false).unwrap();
        let objective = |outcome: &search::Outcome| outcome.best.as_ref().map(|b| b.solution.objective);
        assert!(exact.statistics.proved, "seed {seed}: {:?}", exact.statistics);
        assert_eq!(objective(&exact), objective(&integer), "seed {seed}: {problem:?}");
        solved += exact.statistics.solved;
    }
    assert!(solved >= 3, "{solved} tuples solved");
}
