//! One case: lowered, proved, run, and held against one device.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use dplan_ir::dropout::Draws;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::init;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, Window, train_step_of, train_window, update_step, window_step};
use dplan_ir::interp::program::ProgramRun;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::plan::{Clip, Plan};
use dplan_ir::program::{Program, Role, Updates};
use dplan_ir::verify::verify_program;
use dplan_planner::drawn::{Case, Dice, inputs};
use dplan_planner::lower;

use super::wire::Rounding;
use crate::runtime::{Batch, Options, Order, Rows, Session};

/// Steps of a run.
pub const STEPS: u64 = 3;

/// The largest relative error that is not a difference: each side rounds, in orders of its own.
pub const TOLERANCE: f64 = 1e-10;

/// How near a case came.
#[derive(Clone, PartialEq, Debug)]
pub struct Agreement {
    /// Largest relative error.
    pub error: f64,
    /// Of what.
    pub of: String,
    /// If it is only known for what came before a step in which rounding decides which gradients are the largest, that step.
    pub until: Option<u64>,
}

/// What is wrong with a case, which is to say with dplan.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Fault {
    #[error("a legal plan was refused: {0}")]
    Refused(String),
    #[error("the verifier rejects what was lowered: {0}")]
    Unproved(String),
    #[error("it does not run: {0}")]
    Stopped(String),
    #[error("{}: relative error {:e}", .0.of, .0.error)]
    Differs(Agreement),
    #[error("a panic: {0}")]
    Panicked(String),
}

/// Lowers, proves and runs a case.
///
/// # Errors
/// Whatever is not as it must be; the panics of dplan too.
pub fn check(case: &Case) -> Result<Agreement, Fault> {
    let whole = || {
        let (graph, program) = lowered(case)?;
        if let Err(violations) = verify_program(&graph, &program) {
            return Err(Fault::Unproved(format!("{} violations, first {}", violations.len(), violations[0])));
        }
        check_program(case, &graph, &program)
    };
    catch_unwind(AssertUnwindSafe(whole)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
        Err(Fault::Panicked(said.unwrap_or_default()))
    })
}

/// The graph and the program of a case.
///
/// # Errors
/// [`Fault::Refused`].
pub fn lowered(case: &Case) -> Result<(Graph, Program), Fault> {
    let mut graph = case.graph();
    let plan = case.plan(&graph);
    let refused = |e: lower::LowerError| Fault::Refused(e.to_string());
    graph.order = lower::plan_order(&graph, &plan).map_err(refused)?;
    let program = lower::lower(&graph, &plan).map_err(refused)?;
    Ok((graph, program))
}

/// Runs a program of a case, and one device.
///
/// # Errors
/// If it does not run, or computes something else.
pub fn check_program(case: &Case, graph: &Graph, program: &Program) -> Result<Agreement, Fault> {
    let found = match case.compute {
        DType::F64 => on_ranks(case, graph, program)?,
        DType::F32 | DType::Bf16 | DType::F16 | DType::I32 => interpreted(case, graph, program)?,
    };
    let want = on_one_device(case, graph)?;
    let agreement = found.against(&want, graph);
    // Not a number is no agreement either.
    if agreement.error <= TOLERANCE {
        return Ok(agreement);
    }
    // What is sent of two as large is not for either to know; what is computed from it differs.
    let updates = case.schedule.updates();
    let early = want.tied.map(|step| Agreement { until: Some(step), ..found.before(step, updates).against(&want.before(step, updates), graph) });
    early.filter(|early| early.error <= TOLERANCE).ok_or(Fault::Differs(agreement))
}

/// All that CPU ranks leave of a case, to the bit: losses, norms, gradients, moments and weights.
///
/// # Errors
/// If it does not run.
pub fn bits(case: &Case) -> Result<Vec<u64>, Fault> {
    let (graph, program) = lowered(case)?;
    let trained = on_ranks(case, &graph, &program)?;
    let tensors = trained.tensors.iter().flat_map(|(_, t)| t.values().flatten());
    Ok(trained.losses.iter().chain(trained.norms.iter().flatten()).chain(tensors).map(|x| x.to_bits()).collect())
}

/// How far two cases of one model end up from each other on CPU ranks: what choices that change numbers do to them.
///
/// # Errors
/// If one of them does not run.
pub fn apart(one: &Case, other: &Case) -> Result<Agreement, Fault> {
    let trained = |case: &Case| lowered(case).and_then(|(graph, program)| Ok((on_ranks(case, &graph, &program)?, graph)));
    let ((found, graph), (wanted, _)) = (trained(one)?, trained(other)?);
    Ok(found.against(&wanted, &graph))
}

/// What a run leaves to compare, by name of what it is.
struct Trained {
    losses: Vec<f64>,
    /// Of programs that have them.
    norms: Vec<Option<f64>>,
    tensors: Vec<(Kind, Table<ParamId, Vec<f64>>)>,
    /// The first step in which rounding decides what is sent, if one is known.
    tied: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// After that step.
    Gradient(u64),
    State(Role),
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Gradient(step) => write!(f, "gradient of step {step}, "),
            Kind::State(role) => write!(f, "{}, ", role.name()),
        }
    }
}

impl Trained {
    fn new() -> Trained {
        Trained { losses: Vec::new(), norms: Vec::new(), tensors: Vec::new(), tied: None }
    }

    /// What is known before a step is over.
    fn before(&self, step: u64, updates: Updates) -> Trained {
        // The loss of a step comes before its exchange, but for updates within it.
        let steps = (step - 1) as usize;
        let losses = match updates {
            Updates::Step => steps + 1,
            Updates::MicroBatch => steps,
        };
        let is_early = |kind: &Kind| matches!(kind, Kind::Gradient(of) if *of < step);
        Trained {
            losses: self.losses[..losses].to_vec(),
            norms: self.norms[..steps].to_vec(),
            tensors: self.tensors.iter().filter(|(kind, _)| is_early(kind)).cloned().collect(),
            tied: None,
        }
    }

    /// The largest relative error: |x − y| / |y| of a number, ‖x − y‖ / max(‖y‖, 1e-6·‖all y‖) of a tensor, since some gradients are zero by mathematics.
    fn against(&self, want: &Trained, graph: &Graph) -> Agreement {
        let mut worst = Agreement { error: 0.0, of: "nothing".into(), until: None };
        let mut note = |error: f64, of: &dyn Fn() -> String| {
            if error.is_nan() || error > worst.error {
                worst = Agreement { error: if error.is_nan() { f64::INFINITY } else { error }, of: of(), until: None };
            }
        };
        for (at, (x, y)) in self.losses.iter().zip(&want.losses).enumerate() {
            note((x / y - 1.0).abs(), &|| format!("loss of step {}", at + 1));
        }
        for (at, (x, y)) in self.norms.iter().zip(&want.norms).enumerate() {
            if let (Some(x), Some(y)) = (x, y) {
                note((x / y - 1.0).abs(), &|| format!("gradient norm of step {}", at + 1));
            }
        }
        for (kind, found) in &self.tensors {
            let expected = want.tensors.iter().find(|(k, _)| k == kind).map(|(_, t)| t);
            let all = expected.map_or(0.0, |t| norm(t.values().flatten().copied()));
            for (param, x) in found.iter() {
                let name = || format!("{kind}{}", graph.values[graph.params[param].value].name);
                match expected.map(|t| &t[param]).filter(|y| y.len() == x.len()) {
                    Some(y) => {
                        let scale = norm(y.iter().copied()).max(1e-6 * all).max(f64::MIN_POSITIVE);
                        note(norm(x.iter().zip(y).map(|(a, b)| a - b)) / scale, &name);
                    }
                    None => note(f64::NAN, &name),
                }
            }
        }
        worst
    }
}

fn norm(data: impl Iterator<Item = f64>) -> f64 {
    data.map(|x| x * x).sum::<f64>().sqrt()
}

/// Where initial parameters come from.
const INIT: u64 = 7;

/// Factor on the loss of plans that compute in f16.
const LOSS_SCALE: f64 = 256.0;

/// Scalars of a step, of a run that learns fast and clips always.
pub fn scalars(case: &Case, graph: &Graph, step: u64) -> StepScalars {
    let clip = if case.clip == Clip::None { f64::INFINITY } else { 0.02 };
    let hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-3, weight_decay: 0.1, momentum: 0.9, clip };
    let tokens: u64 = graph.shape(graph.inputs[0]).iter().product::<u64>() * case.micro_batches;
    let loss_scale = if case.compute == DType::F16 { LOSS_SCALE } else { 1.0 };
    // As in a run: steps take sequences one after the other.
    let sequences = graph.batch.map_or(0, |d| graph.size(d)) * case.micro_batches;
    let draws = Draws { seed: INIT, sequence: (step - 1) * sequences };
    let updates = case.schedule.updates().count(case.micro_batches);
    StepScalars { loss_scale, draws, ..StepScalars::new(hyper, (step - 1) * updates + 1, 1.0 / tokens as f64) }
}

/// The inputs of each micro-batch of a step.
pub fn batches(case: &Case, graph: &Graph, step: u64) -> Vec<Vec<Tensor>> {
    let mut dice = Dice::of(INIT, step);
    (0..case.micro_batches).map(|_| inputs(graph, case.model.vocab, &mut dice)).collect()
}

/// The reference: one device, or where gradients are rounded or compressed for their exchange, one that does that to each rank's part of them.
fn on_one_device(case: &Case, graph: &Graph) -> Result<Trained, Fault> {
    let plan = case.plan(graph);
    let mut rounding = match case.wire.is_lossy() {
        true => Some(Rounding::new(graph, &plan).map_err(|e| Fault::Refused(e.to_string()))?),
        false => None,
    };
    let lag = lag(graph, &plan);
    let mut state = TrainState::new(init::params(graph, INIT), case.optimizer);
    let mut trained = Trained::new();
    let plain = |t: &Table<ParamId, Tensor>| t.map(|_, t| t.data.clone());
    for step in 1..=STEPS {
        let at = StepScalars { loss_scale: 1.0, ..scalars(case, graph, step) };
        let batches = batches(case, graph, step);
        let window = Window { scalars: &at, optimizer: case.optimizer, groups: case.decay, lag: &lag };
        let report = match (&mut rounding, case.schedule.updates()) {
            (None, Updates::MicroBatch) => train_window(graph, &mut state, &batches, &window),
            (Some(rounding), Updates::MicroBatch) => {
                window_step(graph, &mut state, &batches, &window, |params, inputs, own| rounding.step(params, &[inputs.to_vec()], own))
            }
            (None, Updates::Step) => train_step_of(graph, &mut state, &batches, &at, case.optimizer, case.decay),
            (Some(rounding), Updates::Step) => {
                let summed = rounding.step(&state.params, &batches, &at);
                update_step(graph, &mut state, summed, &at, case.optimizer, case.decay)
            }
        };
        if rounding.as_ref().is_some_and(|r| r.tied) {
            trained.tied.get_or_insert(step);
        }
        trained.losses.push(report.loss);
        trained.norms.push(Some(report.grad_norm));
        trained.tensors.push((Kind::Gradient(step), plain(&report.grads)));
    }
    for (at, &role) in moments(case).iter().enumerate() {
        trained.tensors.push((Kind::State(role), state.moments.map(|_, m| m[at].data.clone())));
    }
    trained.tensors.push((Kind::State(Role::Param), plain(&state.params)));
    Ok(trained)
}

/// How many updates the gradient of each parameter is behind it: of where its first layer is.
fn lag(graph: &Graph, plan: &Plan) -> Table<ParamId, u64> {
    let stage = |param: ParamId| {
        let user = graph.forward_nodes().find(|(_, n)| n.inputs.contains(&graph.params[param].value));
        user.map_or(0, |(_, n)| plan.stage_of(n.layer) as u64)
    };
    graph.params.map(|param, _| plan.pipeline().staleness(stage(param)))
}

fn moments(case: &Case) -> &'static [Role] {
    &[Role::Moment1, Role::Moment2][..case.optimizer.moments()]
}

fn on_ranks(case: &Case, graph: &Graph, program: &Program) -> Result<Trained, Fault> {
    let stopped = |e: crate::runtime::RuntimeError| Fault::Stopped(e.to_string());
    let order = case.streams.map_or(Order::Eager, Order::Seeded);
    let options = Options { timeout: Duration::from_secs(60), order, decay: case.decay, ..Options::default() };
    let mut session = Session::new(graph.clone(), program.clone(), &options).map_err(stopped)?;
    session.initialise(INIT).map_err(stopped)?;
    let mut trained = Trained::new();
    for step in 1..=STEPS {
        let result = session.step(&scalars(case, graph, step), &rows(&batches(case, graph, step))).map_err(stopped)?;
        trained.losses.push(result.loss);
        trained.norms.push(result.grad_norm.filter(|_| case.clip == Clip::GlobalNorm));
        trained.tensors.push((Kind::Gradient(step), session.grads().map_err(stopped)?));
    }
    for &role in moments(case).iter().chain(&[Role::Param]) {
        trained.tensors.push((Kind::State(role), session.gather(role).map_err(stopped)?));
    }
    Ok(trained)
}

/// Inputs as CPU ranks take them: of each, all micro-batches.
fn rows(batches: &[Vec<Tensor>]) -> Arc<Batch> {
    let inputs = batches.first().map_or(0, Vec::len);
    let of = |input: usize| Rows::Tokens(batches.iter().flat_map(|b| b[input].data.iter().map(|&t| t as i32)).collect());
    Arc::new(Batch { inputs: (0..inputs).map(of).collect() })
}

fn interpreted(case: &Case, graph: &Graph, program: &Program) -> Result<Trained, Fault> {
    let stopped = |e: dplan_ir::interp::program::Fault| Fault::Stopped(e.to_string());
    let mut run = ProgramRun::new(graph, program, case.streams.unwrap_or(1)).decaying(case.decay);
    init::params(graph, INIT).iter().for_each(|(p, value)| run.set_param(p, value));
    let mut trained = Trained::new();
    for step in 1..=STEPS {
        let report = run.step(&batches(case, graph, step), &scalars(case, graph, step)).map_err(stopped)?;
        trained.losses.push(report.loss);
        trained.norms.push(report.grad_norm);
    }
    for &role in moments(case).iter().chain(&[Role::Param]) {
        let mut table = Table::new();
        for param in graph.params.ids() {
            table.push(run.state(param, role).map_err(stopped)?.data);
        }
        trained.tensors.push((Kind::State(role), table));
    }
    Ok(trained)
}
