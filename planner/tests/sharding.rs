//! The sharded graph means what the graph means, whatever the plan.

mod zoo;

use dplan_ir::init;
use dplan_ir::interp::graph::GraphRun;
use dplan_ir::interp::sharded::ShardedRun;
use dplan_ir::verify;
use dplan_planner::lower;
use zoo::{Degrees, Dice};

#[test]
fn every_form_of_random_plans_stands_for_its_value() {
    let mut checked = 0;
    for seed in 0..120 {
        let mut dice = Dice(seed);
        let degrees = Degrees { dp: dice.pick(&[1, 2]), tp: dice.pick(&[1, 2, 3, 4, 6]), pp: 1, micro_batches: 1 };
        let model = zoo::model(&mut dice, 2 * degrees.dp);
        let graph = zoo::graph(&model);
        let plan = zoo::plan(&graph, degrees, &mut dice);
        let sharded = lower::shard(&graph, &plan).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{model:?} {degrees:?}"));
        let errors = verify::sharded::sharded(&graph, &sharded);
        assert!(errors.is_empty(), "seed {seed}: {model:?} {degrees:?}: {}", errors.iter().map(|e| format!("\n  {e}")).collect::<String>());

        let params = init::params(&graph, seed);
        let inputs = zoo::inputs(&graph, model.vocab, &mut dice);
        let expected = GraphRun::new(&graph, &params, &inputs, 0.125);
        let run = ShardedRun::new(&graph, &sharded, &params, &inputs, 0.125);
        for (id, form) in sharded.forms.iter() {
            if run.forms[id].is_empty() {
                continue;
            }
            let expected = expected.get(form.value);
            for (rank, found) in run.whole(&graph, &sharded, id).into_iter().flatten().enumerate() {
                for (x, y) in found.data.iter().zip(&expected.data) {
                    let name = &graph.values[form.value].name;
                    assert!(
                        (x - y).abs() <= 1e-9 * y.abs().max(1.0),
                        "seed {seed} {degrees:?}: {id} of `{name}` on rank {rank}: {x} for {y}\n{:?}",
                        form.sharding
                    );
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 1_000_000, "{checked} elements");
}
