//! The backward pass against finite differences of the forward pass, and its form.

mod cases;

use cases::Case;
use dplan_ir::build::Builder;
use dplan_ir::dtype::DType;
use dplan_ir::entity::ParamId;
use dplan_ir::grad::{GradError, differentiate};
use dplan_ir::graph::{Graph, Init, Phase};
use dplan_ir::interp::graph::GraphRun;
use dplan_ir::op::{Activation, Op};

/// Step of the central difference; its error is about STEP² and the rounding error about 1e-16 / STEP.
const STEP: f64 = 1e-5;

#[test]
fn gradients_of_every_parameter_element_are_the_finite_differences() {
    for case in cases::all() {
        let graph = differentiated(&case);
        let run = GraphRun::new(&graph, &case.params, &case.inputs, case.inv_tokens);
        for (p, param) in case.graph.params.iter() {
            let name = &case.graph.values[param.value].name;
            let grad = run.grad(&graph, p);
            for (i, &g) in grad.data.iter().enumerate() {
                let slope = (loss_with(&case, p, i, STEP) - loss_with(&case, p, i, -STEP)) / (2.0 * STEP);
                assert!((g - slope).abs() < 1e-7 * (1.0 + slope.abs()), "{}: d{name}[{i}] = {g}, finite difference {slope}", case.graph.name);
            }
            let says = grad.data.iter().any(|&g| g.abs() > 1e-6) || name == "router.correction";
            assert!(says, "{}: the test says nothing about {name}, whose gradient is zero", case.graph.name);
        }
    }
}

#[test]
fn backward_nodes_go_back_through_the_layers_and_one_cotangent_crosses() {
    for case in cases::all() {
        let graph = differentiated(&case);
        let forward = case.graph.nodes.len();
        assert_eq!(graph.nodes.values().take(forward).collect::<Vec<_>>(), case.graph.nodes.values().collect::<Vec<_>>(), "forward nodes");
        let backward: Vec<_> = graph.nodes.values().skip(forward).collect();
        assert!(backward.windows(2).all(|w| w[0].layer >= w[1].layer), "{}: layers", graph.name);
        for node in &backward {
            assert_ne!(node.phase, Phase::Forward);
            let weights = node.outputs.iter().all(|v| graph.grads.values().flatten().any(|g| g == v));
            assert_eq!(node.phase == Phase::WeightGrad, weights, "{}: phase of {:?}", graph.name, node.op);
        }
        for layer in 1..graph.layer_count() {
            let mut crossing: Vec<_> = backward
                .iter()
                .filter(|n| n.layer < layer)
                .flat_map(|n| &n.inputs)
                .filter(|&&v| graph.producer(v).is_some_and(|p| graph.nodes[p].phase != Phase::Forward && graph.nodes[p].layer >= layer))
                .collect();
            crossing.sort_unstable();
            crossing.dedup();
            let boundary = graph.boundaries()[layer as usize - 1];
            assert_eq!(crossing, [&graph.cotangents[boundary].expect("a boundary has a cotangent")], "{}: into layer {}", graph.name, layer - 1);
        }
    }
}

#[test]
fn names_are_unique_and_cotangents_have_the_type_of_their_value() {
    for case in cases::all() {
        let graph = differentiated(&case);
        let mut names: Vec<&str> = graph.values.values().map(|v| v.name.as_str()).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|w| w[0] != w[1]), "{}: {names:?}", graph.name);
        for (value, cotangent) in graph.cotangents.iter().filter_map(|(v, c)| c.map(|c| (v, c))) {
            assert_eq!(graph.values[value].ty, graph.values[cotangent].ty, "{}: `{}`", graph.name, graph.values[value].name);
        }
        for node in graph.nodes.values() {
            let types = |ids: &[dplan_ir::entity::ValueId]| ids.iter().map(|&v| graph.values[v].ty.clone()).collect::<Vec<_>>();
            let (ins, outs) = (types(&node.inputs), types(&node.outputs));
            let check = dplan_ir::infer::check(&node.op, &ins.iter().collect::<Vec<_>>(), &outs.iter().collect::<Vec<_>>());
            assert_eq!(check, Ok(()), "{}: {:?}", graph.name, node.op);
        }
    }
}

#[test]
fn parameters_the_loss_does_not_depend_on_are_named() {
    let mut case = cases::all().remove(0);
    let dim = case.graph.dims.ids().next().expect("a dim");
    let mut b = Builder::new("more");
    std::mem::swap(&mut b.graph, &mut case.graph);
    for name in ["lost", "gone"] {
        b.param(name, DType::F64, &[dim], Init::Zeros, Vec::new());
    }
    assert_eq!(differentiate(&b.graph), Err(GradError::Unreachable { params: vec!["lost".into(), "gone".into()] }));
}

#[test]
fn what_has_no_derivative_is_an_error() {
    let case = cases::all().remove(0);
    assert_eq!(differentiate(&differentiated(&case)), Err(GradError::AlreadyDifferentiated));
    let mut none = case.graph.clone();
    none.loss = None;
    assert_eq!(differentiate(&none), Err(GradError::NoLoss));
    let mut other = case.graph.clone();
    other.loss = other.nodes.values().next().map(|n| n.outputs[0]);
    assert_eq!(differentiate(&other), Err(GradError::LossNotMean));
}

#[test]
fn ops_that_cannot_be_differentiated_through_are_named() {
    let act = Op::Act(Activation::Relu);
    let check = |layers: &[(u32, &str, Op, &[&str])], loss: &str, expected: GradError| {
        let mut b = Builder::new("tiny");
        let (n, m) = (b.dim("n", 2), b.dim("m", 3));
        let targets = b.input("targets", DType::I32, &[n]);
        let mut names = vec![("targets", targets), ("w", b.param("w", DType::F64, &[n, m], Init::Ones, Vec::new()))];
        for (layer, name, op, ins) in layers {
            b.set_layer(*layer);
            let ins: Vec<_> = ins.iter().map(|i| names.iter().find(|(name, _)| name == i).expect("defined").1).collect();
            let outs = b.node(name, op.clone(), &ins).unwrap_or_else(|why| panic!("{why}"));
            names.push((name, outs[0]));
        }
        b.graph.loss = names.iter().find(|(name, _)| *name == loss).map(|(_, v)| *v);
        assert_eq!(differentiate(&b.graph), Err(expected));
    };
    check(
        &[(0, "y", Op::ActGrad(Activation::Silu), &["w", "w"]), (0, "loss", Op::Mean, &["y"])],
        "loss",
        GradError::NotDifferentiable { result: "y".into() },
    );
    check(&[(0, "lse", Op::CeStats, &["w", "targets"]), (0, "loss", Op::Mean, &["lse"])], "loss", GradError::Results { result: "lse.1".into() });
    check(
        &[
            (0, "x", act.clone(), &["w"]),
            (1, "a", act.clone(), &["w"]),
            (1, "y", Op::Add, &["x", "a"]),
            (2, "z", act, &["y"]),
            (2, "loss", Op::Mean, &["z"]),
        ],
        "loss",
        GradError::PassThrough { layer: 1, value: "x".into() },
    );
}

fn differentiated(case: &Case) -> Graph {
    differentiate(&case.graph).unwrap_or_else(|why| panic!("{}: {why}", case.graph.name))
}

fn loss_with(case: &Case, param: ParamId, at: usize, step: f64) -> f64 {
    let mut params = case.params.clone();
    params[param].data[at] += step;
    let run = GraphRun::new(&case.graph, &params, &case.inputs, case.inv_tokens);
    run.get(case.graph.loss.expect("a loss")).data[0]
}
