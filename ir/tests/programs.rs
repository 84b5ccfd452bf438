//! Programs of a naive lowering: the verifier proves them, and on all their ranks at once, in whatever order streams allow, they train as one device does.

mod cases;
mod naive;

use cases::Case;
use dplan_ir::documents;
use dplan_ir::dropout::Draws;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table, ValueId};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::{Def, Graph, Type};
use dplan_ir::infer;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, Window, train_step, train_window};
use dplan_ir::interp::program::ProgramRun;
use dplan_ir::optimizer::{DecayGroups, Hyper, Optimizer, StepScalars};
use dplan_ir::program::{Content, Instr, Program, Role, Updates};
use dplan_ir::text;
use dplan_ir::verify::program::verify_program;
use dplan_ir::verify::report::annotate;
use naive::{Shape, lower};

const HYPER: Hyper = Hyper { lr: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-2, weight_decay: 0.01, momentum: 0.8, clip: 0.5 };

const BASE: Shape =
    Shape { dp: 1, tp: 1, pp: 1, micro_batches: 2, zero: 0, one_f_one_b: true, optimizer: Optimizer::AdamW, updates: Updates::Step, seed: 0 };

/// The differentiated graph of a case, for a batch of `sequences` in a micro-batch.
fn graph_of(case: &Case, sequences: u64) -> Graph {
    let mut forward = case.graph.clone();
    forward.set_batch(sequences);
    differentiate(&forward).unwrap_or_else(|why| panic!("{why}"))
}

fn verified(graph: &Graph, program: &Program, what: &str) {
    if let Err(violations) = verify_program(graph, program) {
        let text = annotate(&text::program_printed(program, graph), &violations);
        let list: Vec<String> = violations.iter().map(|v| v.to_string()).collect();
        panic!("{what}: {} violations\n{}\n\n{text}", violations.len(), list.join("\n"));
    }
}

fn shapes() -> Vec<Shape> {
    let mut all = vec![BASE, Shape { optimizer: Optimizer::Sgd, ..BASE }, Shape { tp: 2, ..BASE }, Shape { tp: 6, ..BASE }];
    for zero in 0..4 {
        all.push(Shape { dp: 2, zero, micro_batches: 3, ..BASE });
        all.push(Shape { dp: 2, tp: 2, pp: 2, zero, micro_batches: 3, one_f_one_b: zero % 2 == 0, ..BASE });
        all.push(Shape { dp: 3, pp: 3, zero, micro_batches: 5, ..BASE });
        all.push(Shape { dp: 2, tp: 2, pp: 2, zero, optimizer: Optimizer::Lamb, ..BASE });
    }
    all.push(Shape { pp: 3, tp: 2, micro_batches: 4, ..BASE });
    all
}

#[test]
fn correct_programs_are_proved_and_train_like_one_device() {
    for (number, case) in cases::all().into_iter().enumerate() {
        for (at, shape) in shapes().into_iter().enumerate() {
            let shape = Shape { seed: (number * 100 + at) as u64, ..shape };
            let what = format!("{} as {shape:?}", case.graph.name);
            let graph = graph_of(&case, shape.dp);
            let program = lower(&graph, shape);
            verified(&graph, &program, &what);
            trains_alike(&case, &graph, &program, shape, &what);
        }
    }
}

/// How many updates the gradient of each parameter is behind it: as many as there are stages behind its own.
fn lag(graph: &Graph, shape: Shape) -> Table<ParamId, u64> {
    let stage = |layer: u32| u64::from(layer * shape.pp / graph.layer_count());
    let user = |value: ValueId| graph.forward_nodes().find(|(_, n)| n.inputs.contains(&value)).map_or(0, |(_, n)| n.layer);
    graph.params.map(|_, p| u64::from(shape.pp) - 1 - stage(user(p.value)))
}

/// Where no stages share a parameter; long enough in one case that the verifier skips periods.
#[test]
fn each_micro_batch_may_have_an_update_of_its_own() {
    let base = Shape { updates: Updates::MicroBatch, micro_batches: 5, ..BASE };
    let shapes = [
        base,
        Shape { pp: 2, micro_batches: 4, optimizer: Optimizer::Sgd, ..base },
        Shape { pp: 3, dp: 2, zero: 1, ..base },
        Shape { pp: 3, tp: 2, optimizer: Optimizer::Lamb, micro_batches: 2, ..base },
        Shape { pp: 3, micro_batches: 32, ..base },
    ];
    let (mut staged, mut skipped) = (0, 0);
    for (number, case) in cases::all().into_iter().enumerate() {
        for (at, shape) in shapes.into_iter().enumerate() {
            let shape = Shape { seed: (number * 100 + at) as u64, ..shape };
            let graph = graph_of(&case, shape.dp);
            let program = lower(&graph, shape);
            if program.stages.iter().any(|s| s.buckets.values().any(|b| !b.tied.is_empty())) {
                continue;
            }
            let what = format!("{} as {shape:?}", case.graph.name);
            verified(&graph, &program, &what);
            trains_alike(&case, &graph, &program, shape, &what);
            staged += u32::from(program.stages.iter().any(|s| s.buffers.values().any(|b| b.slots > 1 && matches!(b.content, Content::Flat { .. }))));
            skipped += u32::from(verify_program(&graph, &program).is_ok_and(|facts| facts.walked < facts.issued));
        }
    }
    assert!(staged >= 3 && skipped >= 1, "{staged} put parameters by, of {skipped} periods were skipped");
}

/// One stage waits for nobody and is never behind: a step of m micro-batches is m steps of plain training.
#[test]
fn on_one_stage_that_is_plain_training_on_each_micro_batch() {
    let case = cases::all().remove(0);
    let shape = Shape { updates: Updates::MicroBatch, micro_batches: 3, optimizer: Optimizer::Sgd, ..BASE };
    let graph = graph_of(&case, 1);
    let program = lower(&graph, shape);
    let mut run = ProgramRun::new(&graph, &program, 1);
    case.params.iter().for_each(|(param, value)| run.set_param(param, value));
    let input = |m: u64, k: u64| Tensor::from_fn(&graph.shape(graph.inputs[k as usize]), |i| ((i[0] * 5 + i[1] * 3 + m * 3 + k * 2) % 7) as f64);
    let inputs: Vec<Vec<Tensor>> = (0..3).map(|m| vec![input(m, 0), input(m, 1)]).collect();
    let hyper = Hyper { clip: f64::INFINITY, ..HYPER };
    let got = run.step(&inputs, &StepScalars::new(hyper, 1, 0.01)).unwrap_or_else(|why| panic!("{why}"));
    let mut state = TrainState::new(case.params.clone(), Optimizer::Sgd);
    let plain = |(m, inputs): (u64, &Vec<Tensor>)| {
        train_step(&graph, &mut state, std::slice::from_ref(inputs), &StepScalars::new(hyper, 1 + m, 0.03), Optimizer::Sgd).loss
    };
    let losses: f64 = (0..).zip(&inputs).map(plain).sum();
    close(got.loss, losses / 3.0, "loss");
    for (param, value) in state.params.iter() {
        let got = run.state(param, Role::Param).unwrap_or_else(|why| panic!("{why}"));
        got.data.iter().zip(&value.data).for_each(|(&x, &y)| close(x, y, "a parameter"));
    }
}

/// Two steps on other data each; losses, norms, parameters and states as on one device.
fn trains_alike(case: &Case, graph: &Graph, program: &Program, shape: Shape, what: &str) {
    let mut state = TrainState::new(case.params.clone(), shape.optimizer);
    let mut run = ProgramRun::new(graph, program, shape.seed);
    for (param, value) in case.params.iter() {
        run.set_param(param, value);
    }
    for step in 1..=2 {
        let batch = |m: u64| {
            let row = |k: u64| {
                let shape = graph.shape(graph.inputs[k as usize]);
                Tensor::from_fn(&shape, |i| ((i[0] * 5 + i[1] * 3 + i[1] * i[1] + m * 3 + k * 2 + step) % 7) as f64)
            };
            let first = documents::input(graph).map(|value| {
                let shape = graph.shape(value);
                Tensor::from_fn(&shape, |i| f64::from(cases::FIRST[((i[0] + m) % 2) as usize][graph.order.position(i[1], shape[1]) as usize]))
            });
            [row(0), row(1)].into_iter().chain(first).collect::<Vec<_>>()
        };
        let inputs: Vec<Vec<Tensor>> = (0..shape.micro_batches).map(batch).collect();
        let draws = Draws { seed: 5, sequence: 10 * step };
        let clip = if shape.updates == Updates::Step { HYPER.clip } else { f64::INFINITY };
        let first = (step - 1) * shape.updates.count(shape.micro_batches) + 1;
        let scalars = StepScalars { draws, ..StepScalars::new(Hyper { clip, ..HYPER }, first, 0.03) };
        let want = match shape.updates {
            Updates::Step => train_step(graph, &mut state, &inputs, &scalars, shape.optimizer),
            Updates::MicroBatch => {
                let window = Window { scalars: &scalars, optimizer: shape.optimizer, groups: DecayGroups::All, lag: &lag(graph, shape) };
                train_window(graph, &mut state, &inputs, &window)
            }
        };
        let got = run.step(&inputs, &scalars).unwrap_or_else(|why| panic!("{what}: {why}"));
        close(got.loss, want.loss, &format!("{what}: loss of step {step}"));
        if shape.updates == Updates::Step {
            close(got.grad_norm.unwrap_or(f64::NAN), want.grad_norm, &format!("{what}: gradient norm of step {step}"));
        }
    }
    for (param, value) in state.params.iter() {
        let mut pairs = vec![(Role::Param, value)];
        pairs.extend([Role::Moment1, Role::Moment2].into_iter().zip(&state.moments[param]));
        for (role, want) in pairs {
            let got = run.state(param, role).unwrap_or_else(|why| panic!("{what}: {why}"));
            let name = &graph.values[graph.params[param].value].name;
            for (&x, &y) in got.data.iter().zip(&want.data) {
                close(x, y, &format!("{what}: {} of {name}", role.name()));
            }
        }
    }
}

fn close(got: f64, want: f64, what: &str) {
    assert!((got - want).abs() <= 1e-9 * want.abs().max(1.0), "{what}: {got}, expected {want}");
}

/// A differentiated graph that computes in a short type; what ops give in a longer one stays so.
fn in_short(dtype: DType) -> Graph {
    let mut forward = cases::all().remove(1).graph;
    forward.set_batch(2);
    let given = forward.values.iter_mut().map(|(_, v)| v).filter(|v| !matches!(v.def, Def::Node(..)) && v.ty.dtype == DType::F64);
    given.for_each(|v| v.ty.dtype = dtype);
    for node in forward.nodes.values() {
        let ins: Vec<&Type> = node.inputs.iter().map(|&v| &forward.values[v].ty).collect();
        let results = infer::results(&node.op, &ins).unwrap_or_else(|why| panic!("{why}"));
        node.outputs.iter().zip(results).for_each(|(&v, ty)| forward.values[v].ty.dtype = ty.dtype);
    }
    differentiate(&forward).unwrap_or_else(|why| panic!("{why}"))
}

#[test]
fn sixteen_bit_parameters_have_a_master_copy() {
    let graph = in_short(DType::Bf16);
    for zero in 0..4 {
        let shape = Shape { dp: 2, zero, pp: 2, ..BASE };
        verified(&graph, &lower(&graph, shape), &format!("{shape:?}"));
    }
}

/// Every state of every parameter, as bits.
fn bits(graph: &Graph, run: &ProgramRun<'_>) -> Vec<u64> {
    let roles = [Role::Param, Role::Moment1, Role::Moment2];
    let of = |(param, role)| run.state(param, role).unwrap_or_else(|why| panic!("{why}")).data;
    graph.params.ids().flat_map(|p| roles.map(|r| (p, r))).flat_map(of).map(f64::to_bits).collect()
}

#[test]
fn a_scaled_loss_changes_no_bit_and_an_overflow_leaves_everything_as_it_was() {
    let case = cases::all().remove(0);
    for shape in [BASE, Shape { dp: 2, tp: 2, pp: 2, zero: 2, micro_batches: 3, ..BASE }] {
        let graph = graph_of(&case, shape.dp);
        let program = lower(&graph, shape);
        let inputs: Vec<Vec<Tensor>> = (0..shape.micro_batches)
            .map(|m| graph.inputs.iter().map(|&v| Tensor::from_fn(&graph.shape(v), |i| ((i[0] * 5 + i[1] * 3 + m) % 7) as f64)).collect())
            .collect();
        let train = |scales: &[f64]| {
            let mut run = ProgramRun::new(&graph, &program, 1);
            let mut state = TrainState::new(case.params.clone(), shape.optimizer);
            case.params.iter().for_each(|(param, value)| run.set_param(param, value));
            let mut updates = 0;
            for &loss_scale in scales {
                let scalars = StepScalars { loss_scale, ..StepScalars::new(HYPER, updates + 1, 0.03) };
                let report = run.step(&inputs, &scalars).unwrap_or_else(|why| panic!("{why}"));
                let reference = train_step(&graph, &mut state, &inputs, &scalars, shape.optimizer);
                assert_eq!(report.grad_norm.is_some_and(f64::is_finite), loss_scale.is_finite());
                assert!(reference.grad_norm.is_finite() && report.loss.is_finite());
                updates += u64::from(loss_scale.is_finite());
            }
            let reference: Vec<u64> =
                state.params.values().chain(state.moments.values().flatten()).flat_map(|t| &t.data).map(|x| x.to_bits()).collect();
            (bits(&graph, &run), reference)
        };
        let plain = train(&[1.0, 1.0]);
        assert!(train(&[65536.0, 1024.0]) == plain, "{shape:?}");
        assert!(train(&[f64::INFINITY, 1.0, f64::INFINITY, 2.0, f64::INFINITY]) == plain, "{shape:?}");
        assert!(train(&[1.0]).0 != plain.0);
    }
}

#[test]
fn f16_programs_that_leave_the_loss_scale_in_the_gradients_are_refused() {
    let graph = in_short(DType::F16);
    let mut program = lower(&graph, Shape { dp: 2, zero: 1, ..BASE });
    verified(&graph, &program, "f16");
    for issue in program.stages.iter_mut().flat_map(|s| s.segments.iter_mut().map(|(_, s)| s)).flat_map(|s| &mut s.body) {
        if let Instr::Update { scale, .. } = &mut issue.instr {
            *scale = None;
        }
    }
    let violations = verify_program(&graph, &program).expect_err("gradients are used with the scale of the loss");
    assert!(violations.iter().any(|v| v.to_string().contains("the loss is scaled")), "{violations:?}");
}
