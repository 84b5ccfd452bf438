//! The sharded graph means what the graph means, whatever the plan.

use dplan_ir::dtype::DType;
use dplan_ir::entity::FormId;
use dplan_ir::graph::{Graph, Phase};
use dplan_ir::init;
use dplan_ir::interp::graph::GraphRun;
use dplan_ir::interp::sharded::ShardedRun;
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::plan::{Clip, Gathered, LayerPlan, Offload, Recompute, Zero};
use dplan_ir::program::align;
use dplan_ir::reshard::Step;
use dplan_ir::rule::Assignment;
use dplan_ir::sharded::Stmt;
use dplan_ir::sharding::Padded;
use dplan_ir::verify;
use dplan_planner::drawn::{Case, Dice, Ffn, Model, inputs, textbook};
use dplan_planner::lower::{self, Fragment, LowerError, Sharder, Storage};

#[test]
fn every_form_of_random_plans_stands_for_its_value() {
    let mut checked = 0;
    for seed in 0..120 {
        let mut dice = Dice(seed);
        let case = Case::drawn(&mut dice);
        let graph = case.graph();
        let sharded = lower::shard(&graph, &case.plan(&graph)).unwrap_or_else(|e| panic!("{case}: {e}"));
        let errors = verify::sharded::sharded(&graph, &sharded);
        assert!(errors.is_empty(), "{case}: {}", errors.iter().map(|e| format!("\n  {e}")).collect::<String>());

        let params = init::params(&graph, seed);
        let inputs = inputs(&graph, case.model.vocab, &mut dice);
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
                    assert!((x - y).abs() <= 1e-9 * y.abs().max(1.0), "{case}: {id} of `{name}` on rank {rank}: {x} for {y}\n{:?}", form.sharding);
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 1_000_000, "{checked} elements");
}

fn decoder(ffn: Ffn) -> Graph {
    Model { blocks: 2, kv_heads: 2, group: 2, vocab: 8, ffn, ..Model::SMALLEST }.graph(2, DType::F64)
}

fn sharder(graph: &Graph) -> Sharder<'_> {
    Sharder::new(graph, Mesh::new(1, 2), Padded(graph.dims.map(|_, d| d.size)), Some(1)).unwrap()
}

fn plainly(sharder: &Sharder<'_>, layer: u32, recompute: Recompute, gathered: Gathered) -> LayerPlan {
    LayerPlan {
        zero: Zero(0),
        offload: Offload::None,
        activations: None,
        recompute,
        gathered,
        strategy: textbook(sharder.graph, &sharder.mesh, layer),
    }
}

/// Forward nodes that run in the backward pass, and gathers there.
fn again(graph: &Graph, fragment: &Fragment) -> [usize; 2] {
    let runs = |s: &&Stmt| matches!(s, Stmt::Run { node, .. } if graph.nodes[*node].phase == Phase::Forward);
    let gathers = |s: &&Stmt| matches!(s, Stmt::Reshard { step: Step::AllGather { .. }, .. });
    [fragment.backward.iter().filter(runs).count(), fragment.backward.iter().filter(gathers).count()]
}

#[test]
fn full_recompute_keeps_the_input_alone_and_makes_again_only_what_is_read() {
    let graph = decoder(Ffn::Gated);
    let sharder = sharder(&graph);
    for layer in 0..sharder.layers() {
        let plan = plainly(&sharder, layer, Recompute::Full, Gathered::Keep);
        let fragment = sharder.layer(layer, &plan).unwrap();
        assert_eq!(fragment.stored(Storage::Frame).collect::<Vec<_>>(), fragment.input.into_iter().collect::<Vec<FormId>>(), "layer {layer}");
        let local = |f| align(fragment.local(f, &graph, &sharder.mesh, &sharder.padded).bytes());
        assert_eq!(fragment.bytes(&graph, &sharder.mesh, &sharder.padded).frame, fragment.input.map_or(0, local));
        let forward = graph.forward_nodes().filter(|(_, n)| n.layer == layer).count();
        // In a block: not the last product and the residual behind it; in the head: not the loss and the difference before it.
        let unread = [1, 2, 2, 2][layer as usize];
        assert_eq!(again(&graph, &fragment)[0], forward - unread, "layer {layer}");
    }
}

#[test]
fn gathered_forms_are_kept_or_gathered_again() {
    let graph = decoder(Ffn::Gated);
    let sharder = sharder(&graph);
    let fragment = |gathered| sharder.layer(1, &plainly(&sharder, 1, Recompute::None, gathered)).unwrap();
    let (keep, anew) = (fragment(Gathered::Keep), fragment(Gathered::Again));
    // Both norms' results are gathered for the products behind them, and both sums of cotangents before the products' gradients.
    assert_eq!((again(&graph, &keep), again(&graph, &anew)), ([0, 2], [0, 4]));
    let frame = |f: &Fragment| f.bytes(&graph, &sharder.mesh, &sharder.padded).frame;
    assert!(frame(&anew) < frame(&keep), "{} and {}", frame(&anew), frame(&keep));
    let made_by_gather = |f: &Fragment| {
        let gathers = f.forward.iter().filter_map(|s| match s {
            Stmt::Reshard { to, step: Step::AllGather { .. }, .. } => Some(*to),
            Stmt::Reshard { .. } | Stmt::Run { .. } => None,
        });
        gathers.filter(|&to| f.storage[to] == Storage::Frame).count()
    };
    assert_eq!((made_by_gather(&keep), made_by_gather(&anew)), (2, 0));
}

#[test]
fn cotangents_of_several_products_share_one_reduction() {
    let graph = decoder(Ffn::Gated);
    let sharder = sharder(&graph);
    let fragment = sharder.layer(1, &plainly(&sharder, 1, Recompute::None, Gathered::Keep)).unwrap();
    let reductions = |stmts: &[Stmt]| {
        stmts.iter().filter(|s| matches!(s, Stmt::Reshard { step: Step::ReduceScatter { .. } | Step::AllReduce { .. }, .. })).count()
    };
    // As arXiv:2205.05198 counts them: one reduce-scatter after attention and one after the feed-forward, in each pass.
    assert_eq!((reductions(&fragment.forward), reductions(&fragment.backward)), (2, 2));
}

#[test]
fn strategies_that_an_op_does_not_allow_are_refused() {
    let graph = decoder(Ffn::Plain);
    let sharder = sharder(&graph);
    let tp = sharder.mesh.tp();
    let with = |at: usize, label: char, axes: AxisSet| {
        let mut plan = plainly(&sharder, 1, Recompute::None, Gathered::Keep);
        let mut assignment = Assignment::default();
        assignment.assign(label, axes);
        plan.strategy[at] = assignment;
        sharder.layer(1, &plan).map(|_| ()).unwrap_err()
    };
    // The block begins with norm1, q, k, v, rq, rk, attn.
    assert_eq!(with(0, 'c', tp), LowerError::WholeFactor { node: "l1.norm1".into(), label: 'c' });
    assert_eq!(with(6, 't', tp), LowerError::WholeFactor { node: "l1.attn".into(), label: 't' });
    assert_eq!(with(1, 'x', tp), LowerError::UnknownFactor { node: "l1.q".into(), label: 'x' });
    assert_eq!(with(1, 's', sharder.mesh.all()), LowerError::ForeignAxis { node: "l1.q".into() });
    let mut twice = plainly(&sharder, 1, Recompute::None, Gathered::Keep);
    twice.strategy[1] = Assignment(vec![('g', tp), ('s', tp)]);
    assert_eq!(sharder.layer(1, &twice).unwrap_err(), LowerError::AxisTwice { node: "l1.q".into() });
    twice.strategy.pop();
    assert!(matches!(sharder.layer(1, &twice), Err(LowerError::Strategy { layer: 1, .. })));
    let odd = Sharder::new(&graph, Mesh::new(1, 3), Padded(graph.dims.map(|_, d| d.size)), None).unwrap();
    let error = odd.layer(1, &LayerPlan { strategy: textbook(&graph, &odd.mesh, 1), ..twice }).unwrap_err();
    assert!(matches!(&error, LowerError::Indivisible { size: 4, ways: 3, .. }), "{error}");
}

#[test]
fn plans_that_do_not_fit_the_graph_are_refused() {
    let graph = decoder(Ffn::Gated);
    let case: Case = "blocks=2 kv=2 group=2 vocab=8 dp=2 tp=2 cuts=2 count=2 split=1".parse().unwrap();
    let good = case.plan(&graph);
    lower::lower(&graph, &good).unwrap();
    type Damage = fn(&mut dplan_ir::plan::Plan);
    let cases: [(Damage, &str); 10] = [
        (|p| p.dp = 0, "dp is 0"),
        (|p| p.tp = 1 << 40, "tp is 1099511627776, expected at most"),
        (|p| p.micro_batches = 0, "micro_batches is 0"),
        (|p| p.micro_batch = 7, "the plan's micro-batch is 14 sequences"),
        (|p| p.stages[1].first += 1, "stage 1 begins with layer"),
        (|p| p.stages.truncate(1), "expected"),
        (|p| p.layers.push(0), "the plan names 5 layers, the graph has 4"),
        (|p| p.layers[2] = 99, "layer 2 uses option 99"),
        (|p| p.options[0].zero = Zero(4), "ZeRO stage 4"),
        (|p| (p.compute, p.clip) = (DType::F16, Clip::None), "clip none in f16"),
    ];
    for (damage, says) in cases {
        let mut plan = good.clone();
        damage(&mut plan);
        let error = lower::lower(&graph, &plan).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    assert_eq!(lower::lower(&Graph { grads: Default::default(), ..graph }, &good).unwrap_err(), LowerError::NotDifferentiated);
}
