//! Random models under random plans: CPU ranks train as the interpreter does on one device, whatever the plan, and in whatever order streams run.

#[path = "../planner/tests/zoo/mod.rs"]
mod zoo;

use std::sync::Arc;
use std::time::Duration;

use dplan::runtime::{Batch, Options, Order, Rows, RuntimeError, Session, StepResult};
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::init;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, train_step_of};
use dplan_ir::optimizer::{DecayGroups, Hyper, StepScalars};
use dplan_ir::plan::{Clip, Plan};
use dplan_ir::program::Program;
use dplan_planner::lower;
use zoo::{Degrees, Dice};

const STEPS: u64 = 3;

struct Case {
    what: String,
    graph: Graph,
    plan: Plan,
    program: Program,
    vocab: u64,
    decay: DecayGroups,
}

fn case(seed: u64) -> Case {
    let mut dice = Dice(seed + 1000);
    let degrees = Degrees { dp: dice.pick(&[1, 2, 3]), tp: dice.pick(&[1, 2, 4]), pp: dice.pick(&[1, 2, 3]), micro_batches: dice.pick(&[1, 2, 5]) };
    let model = zoo::model(&mut dice, 2 * degrees.dp);
    let mut graph = zoo::graph(&model);
    let plan = zoo::plan(&graph, degrees, &mut dice);
    graph.order = lower::plan_order(&graph, &plan).unwrap();
    let program = lower::lower(&graph, &plan).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    let zero = plan.options.iter().map(|o| o.zero.0).collect::<Vec<_>>();
    let what = format!("seed {seed}: {model:?} {degrees:?} {:?} zero {zero:?} boundary {:?} {:?}", plan.schedule, plan.boundary, plan.optimizer);
    let decay = if seed.is_multiple_of(2) { DecayGroups::Matrices } else { DecayGroups::All };
    Case { what, graph, plan, program, vocab: model.vocab, decay }
}

fn scalars(case: &Case, step: u64) -> StepScalars {
    let hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-3, weight_decay: 0.1, momentum: 0.9, clip: 0.5 };
    let tokens: u64 = case.graph.shape(case.graph.inputs[0]).iter().product::<u64>() * case.plan.micro_batches;
    StepScalars::new(hyper, step, 1.0 / tokens as f64)
}

/// Tokens and targets of a step.
fn batch(case: &Case, step: u64) -> Arc<Batch> {
    let mut dice = Dice(step);
    let elems = |v| case.graph.shape(v).iter().product::<u64>() * case.plan.micro_batches;
    let rows = |n: u64, dice: &mut Dice| Rows::Tokens((0..n).map(|_| dice.roll(case.vocab) as i32).collect());
    Arc::new(Batch { inputs: case.graph.inputs.iter().map(|&v| rows(elems(v), &mut dice)).collect() })
}

/// The inputs of each micro-batch, as the interpreter takes them.
fn micro_batches(case: &Case, batch: &Batch) -> Vec<Vec<Tensor>> {
    let of = |m: u64| {
        let one = |(rows, &v): (&Rows, _)| {
            let (Rows::Tokens(tokens), shape) = (rows, case.graph.shape(v)) else { unreachable!() };
            let n = shape.iter().product::<u64>() as usize;
            Tensor::dense(&shape, tokens[m as usize * n..][..n].iter().map(|&t| f64::from(t)).collect())
        };
        batch.inputs.iter().zip(&case.graph.inputs).map(one).collect()
    };
    (0..case.plan.micro_batches).map(of).collect()
}

struct Trained {
    steps: Vec<StepResult>,
    grads: Table<ParamId, Vec<f64>>,
    params: Table<ParamId, Vec<f64>>,
}

fn run(case: &Case, order: Order) -> Result<Trained, RuntimeError> {
    let mut session = Session::new(
        case.graph.clone(),
        case.program.clone(),
        &Options { timeout: Duration::from_secs(10), order, decay: case.decay, ..Options::default() },
    )?;
    session.initialise(7)?;
    let mut steps = Vec::new();
    let mut grads = Table::new();
    for step in 1..=STEPS {
        steps.push(session.step(&scalars(case, step), &batch(case, step))?);
        if step == 1 {
            grads = session.grads()?;
        }
    }
    Ok(Trained { steps, grads, params: session.params()? })
}

fn check(seed: u64, order: Order) {
    let case = case(seed);
    let trained = run(&case, order).unwrap_or_else(|e| panic!("{}: {e}", case.what));
    let mut state = TrainState::new(init::params(&case.graph, 7), case.plan.optimizer);
    for (at, found) in trained.steps.iter().enumerate() {
        let step = at as u64 + 1;
        let clip = if case.plan.clip == Clip::None { f64::INFINITY } else { scalars(&case, step).hyper.clip };
        let mut at_step = scalars(&case, step);
        at_step.hyper.clip = clip;
        let inputs = micro_batches(&case, &batch(&case, step));
        let want = train_step_of(&case.graph, &mut state, &inputs, &at_step, case.plan.optimizer, case.decay);
        if step == 1 {
            compare(&case, "gradient", &trained.grads, &want.grads, 1e-11);
        }
        assert!((found.loss / want.loss - 1.0).abs() < 1e-12, "{} step {step}: loss {} against {}", case.what, found.loss, want.loss);
        if let Some(norm) = found.grad_norm.filter(|_| case.plan.clip == Clip::GlobalNorm) {
            assert!((norm / want.grad_norm - 1.0).abs() < 1e-11, "{} step {step}: norm {norm} against {}", case.what, want.grad_norm);
        }
    }
    compare(&case, "parameter", &trained.params, &state.params, 1e-10);
}

/// ‖x − y‖ ≤ tolerance · max(‖y‖, 1e-6·‖all y‖), for each tensor.
fn compare(case: &Case, what: &str, found: &Table<ParamId, Vec<f64>>, expected: &Table<ParamId, Tensor>, tolerance: f64) {
    let norm = |data: &mut dyn Iterator<Item = f64>| data.map(|x| x * x).sum::<f64>().sqrt();
    let all = norm(&mut expected.values().flat_map(|t| t.data.iter().copied()));
    for (p, y) in expected.iter() {
        let error = norm(&mut found[p].iter().zip(&y.data).map(|(a, b)| a - b)) / norm(&mut y.data.iter().copied()).max(1e-6 * all);
        let name = &case.graph.values[case.graph.params[p].value].name;
        assert!(error < tolerance, "{}: {what} {name}: error {error:e}", case.what);
    }
}

#[test]
fn random_plans_train_as_one_device_does() {
    (0..60).for_each(|seed| check(seed, Order::Eager));
}

#[test]
fn random_plans_need_no_luck_with_the_order_of_streams() {
    (60..100).for_each(|seed| check(seed, Order::Seeded(seed)));
}

#[test]
fn the_same_plan_run_twice_is_bitwise_equal() {
    for seed in 0..10 {
        let case = case(seed);
        let bits = |order| {
            let trained = run(&case, order).unwrap_or_else(|e| panic!("{}: {e}", case.what));
            let losses = trained.steps.iter().map(|s| s.loss.to_bits()).collect::<Vec<_>>();
            (losses, trained.params.values().flatten().map(|x| x.to_bits()).collect::<Vec<_>>())
        };
        let first = bits(Order::Eager);
        assert!(first == bits(Order::Eager) && first == bits(Order::Seeded(seed)), "{}", case.what);
    }
}
