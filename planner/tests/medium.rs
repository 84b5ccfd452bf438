//! The search against integer programs on instances of real size. A few here; `cargo bench -p dplan-planner --bench integer` compares 160.

mod drawn;

use dplan_planner::{integer, search};
use drawn::{Instance, medium};

#[test]
fn the_search_and_integer_programs_agree_on_large_instances() {
    let (mut solved, mut shared) = (0, (false, false));
    // In 134 some plan ties with an incumbent, and a slower one is better.
    for seed in [2, 5, 29, 43, 55, 115, 134] {
        let Instance { mut prices, problem } = medium(seed);
        let exact = search::explore(&problem, &mut prices, &|| false);
        let integer = integer::explore(&problem, &mut prices, &|| false).unwrap();
        let objective = |outcome: &search::Outcome| outcome.best.as_ref().map(|b| b.solution.objective);
        assert!(exact.statistics.proved, "seed {seed}: {:?}", exact.statistics);
        assert_eq!(objective(&exact), objective(&integer), "seed {seed}: {problem:?}");
        assert!(exact.best.is_some(), "seed {seed}: nothing fits, so nothing is compared");
        solved += exact.statistics.solved;
        shared.0 |= exact.closed.iter().any(|c| c.tuple.cp > 1);
        shared.1 |= exact.closed.iter().any(|c| c.tuple.ep > 1);
    }
    assert!(solved >= 3, "{solved} tuples solved");
    assert!(shared.0 && shared.1, "contexts and experts may be shared out in none: {shared:?}");
}
