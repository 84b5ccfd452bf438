//! Measuring this machine as ranks will use it: small plans are run on it, all ranks at once, and the cost model is fitted to what the ranks took.
//!
//! The layouts are chosen so that between them they hold products of several shapes, every kind of sweep, and both kinds of traffic: data parallelism, tensor
//! parallelism and stages, as far as the number of ranks allows.

use crate::calibrate::own;
use crate::compare::observe::{Observation, observe};
use crate::compile::{Options as CompileOptions, compile};
use crate::export::profile::{Recorded, trace};
use crate::feed::Feed;
use crate::import::{ImportOptions, model_from_bytes};
use crate::planfile::PlanFile;
use crate::profile::{CommKernels, parse};
use crate::runtime::{Options, Recording, Session};
use anyhow::{Context, anyhow};
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};
use dplan_ir::plan::Clip;
use dplan_planner::machine::Machine;
use dplan_planner::pins::Pins;
use dplan_planner::request::Solver;
use std::sync::Arc;

/// What is run: 1 M parameters, 8 layers.
const MODEL: &[u8] = include_bytes!("../examples/llama-1m/config.json");

/// Steps of a layout; the first warms up and does not count.
const STEPS: u64 = 4;

/// A measured machine, and how far the cost model is from single instructions before and after: means, weighted by time.
#[derive(Clone, Debug)]
pub struct Measured {
    pub machine: Machine,
    pub before: f64,
    pub after: f64,
    /// Layouts that were run, with the median seconds of a step.
    pub runs: Vec<(String, f64)>,
}

/// Measures `machine`, whose ranks are threads of this process. `progress` is told what is being run.
///
/// # Errors
/// If a layout cannot be compiled or run.
pub fn measure(machine: &Machine, progress: &dyn Fn(&str)) -> anyhow::Result<Measured> {
    let mut seen: Vec<(PlanFile, Vec<Observation>)> = Vec::new();
    let (mut runs, mut steps) = (Vec::new(), Vec::new());
    for pins in layouts(machine.devices()) {
        progress(&pins);
        let (plan, observations, seconds) = run(machine, &pins).with_context(|| format!("measuring under {pins}"))?;
        runs.push((pins, seconds));
        steps.push((plan.clone(), seconds));
        seen.push((plan, observations));
    }
    let (machine, before, after) = own::fit(machine, &seen);
    let machine = own::fit_steps(&machine, &steps);
    Ok(Measured { machine, before, after, runs })
}

fn layouts(ranks: u64) -> Vec<String> {
    if ranks == 1 {
        return vec!["micro=2,recompute=none".into(), "micro=8,recompute=none".into()];
    }
    let mut pins: Vec<String> = [(1, 2), (3, 4)].map(|(zero, micro)| format!("dp={ranks},tp=1,pp=1,zero={zero},micro={micro},recompute=none")).into();
    // The model has 4 heads and 8 layers.
    if ranks.is_power_of_two() && (2..=4).contains(&ranks) {
        pins.push(format!("dp=1,tp={ranks},pp=1,micro=4,recompute=none"));
    }
    if (2..=8).contains(&ranks) {
        pins.push(format!("dp=1,tp=1,pp={ranks},micro=1,recompute=none"));
    }
    pins
}

fn run(machine: &Machine, pins: &str) -> anyhow::Result<(PlanFile, Vec<Observation>, f64)> {
    let model = model_from_bytes("measured.json", MODEL, &ImportOptions { compute: DType::F32, ..ImportOptions::default() })?;
    let options = CompileOptions {
        cluster: machine.clone().into(),
        batch: 8 * machine.devices(),
        compute: DType::F32,
        optimizer: Optimizer::AdamW,
        clip: Clip::GlobalNorm,
        pins: Pins::parse(pins)?,
        memory_limit: None,
        solver: Solver::Exact,
        deadline: None,
    };
    let plan = compile(&model.graph, &options)?.file;
    let feed = Feed::new(&plan.graph, None, plan.plan.batch(), 0)?;
    let options = Options { recording: Recording::On, ..Options::default() };
    let mut session = Session::new(plan.graph.clone(), plan.program.clone(), &options)?;
    session.initialise(0)?;
    let hyper = Hyper { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };
    let (mut recorded, mut seconds) = (Recorded::default(), Vec::new());
    for step in 0..STEPS {
        let batch = Arc::new(feed.batch(step)?);
        let scalars = StepScalars::new(hyper, step + 1, 1.0 / feed.targets() as f64);
        let start = session.clock();
        let result = session.step(&scalars, &batch)?;
        if step == 0 {
            session.take_spans();
        } else {
            recorded.take(session.take_spans(), (start, session.clock()));
            seconds.push(result.seconds);
        }
    }
    seconds.sort_by(f64::total_cmp);
    let seconds = seconds[seconds.len() / 2];
    let trace = trace(&session, plan.plan.pipeline(), &recorded);
    let profile = parse("measured.json", trace.as_bytes(), &CommKernels::default())?;
    let observations = observe(&plan, &profile, &plan.cluster).map_err(|e| anyhow!(e))?;
    Ok((plan, observations, seconds))
}
