//! From a model and a cluster to a verified plan: the flat list of passes.
//!
//! ```text
//! differentiate · classes · search · baselines · set batch · lower · verify
//! ```
//! With `DPLAN_DUMP=dir` every stage is written there, numbered, as text.

use crate::planfile::PlanFile;
use anyhow::Context;
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::Optimizer;
use dplan_ir::plan::{Clip, Plan};
use dplan_ir::program::Program;
use dplan_ir::verify::{self, program::Violation};
use dplan_ir::{grad, layers, text};
use dplan_planner::baselines::{Baseline, Comparison, baselines};
use dplan_planner::lower::{self, LowerError};
use dplan_planner::machine::Cluster;
use dplan_planner::pins::Pins;
use dplan_planner::predict::{Prediction, predict};
use dplan_planner::request::{Answer, Fewest, Planner, Refusal, Request, Solver};
use dplan_planner::search::{Closed, Statistics};
use dplan_planner::units::{Bytes, Nanos};
use std::path::PathBuf;
use std::thread::{self, ScopedJoinHandle};
use thiserror::Error;

/// The question, but for the model.
#[derive(Clone)]
pub struct Options<'a> {
    pub cluster: Cluster,
    /// Sequences of a step.
    pub batch: u64,
    pub compute: DType,
    pub optimizer: Optimizer,
    pub clip: Clip,
    pub pins: Pins,
    pub memory_limit: Option<Bytes>,
    pub solver: Solver,
    /// Says when time is up.
    pub deadline: Option<&'a (dyn Fn() -> bool + Sync)>,
}

impl Options<'_> {
    /// The question that a plan answered, without pins and limits but those that say what is computed, on another cluster.
    pub fn again(file: &PlanFile, cluster: impl Into<Cluster>) -> Options<'static> {
        let Plan { compute, optimizer, .. } = file.plan;
        Options {
            cluster: cluster.into(),
            batch: file.plan.batch(),
            compute,
            optimizer,
            clip: file.plan.asked_clip(),
            pins: Pins::that_keep(&file.plan),
            memory_limit: None,
            solver: Solver::Exact,
            deadline: None,
        }
    }
}

/// A plan, proved and lowered, and what it costs.
pub struct Compiled {
    pub file: PlanFile,
    pub objective: Nanos,
    pub prediction: Prediction,
    pub statistics: Statistics,
    pub closed: Vec<Closed>,
    /// The space that was searched.
    pub pins: Pins,
    /// The pins and the limit of the question.
    pub asked: Pins,
    pub memory_limit: Option<Bytes>,
    /// Textbook systems under the same model, each at its best.
    pub baselines: Vec<Baseline>,
}

#[derive(Debug, Error)]
pub enum CompileError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The two below are dplan's own faults.
    #[error("the plan found cannot be lowered: {0}")]
    Lower(#[from] LowerError),
    #[error("the programs lowered do not verify; the first of {} violations: {}", .0.len(), .0.first().map(ToString::to_string).unwrap_or_default())]
    Violated(Vec<Violation>),
    #[error("the model cannot be differentiated: {0}")]
    Grad(#[from] grad::GradError),
    #[error("{0:#}")]
    Dump(anyhow::Error),
}

/// Plans, lowers and verifies.
///
/// # Errors
/// If there is no such plan, or one of dplan's own passes is wrong.
pub fn compile(forward: &Graph, options: &Options<'_>) -> Result<Compiled, CompileError> {
    let dump = Dump::from_environment();
    dump.write("graph", || text::print_graph(forward))?;
    let graph = grad::differentiate(forward)?;
    dump.write("differentiated", || text::print_graph(&graph))?;
    let classes = layers::classes(&graph);
    let request = || options.request(&graph, &classes);
    // The comparison with textbook systems takes about as long as everything else, and neither needs the other.
    let (planned, baselines) = thread::scope(|scope| {
        let textbook = scope.spawn(|| {
            let late = || options.deadline.is_some_and(|late| late());
            let planner = Planner::new(request());
            planner.map_or_else(|_| Comparison::default(), |mut p| baselines(&p.problem, &mut p.prices, options.cluster.node(), &late))
        });
        let joined = |textbook: ScopedJoinHandle<'_, Comparison>| textbook.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let answer = Planner::new(request()).and_then(|mut planner| planner.search_by(options.solver));
        match answer {
            // Time ran out: what textbook systems found meanwhile counts too.
            Ok(answer) if !answer.statistics.proved && options.pins.leave_all_choices() => {
                let Comparison { rows, quickest } = joined(textbook);
                (lowered(&graph, &classes, &options.cluster, answer.or_quicker(quickest), &dump), rows)
            }
            answer => {
                let planned = answer.map_err(CompileError::from).and_then(|answer| lowered(&graph, &classes, &options.cluster, answer, &dump));
                (planned, joined(textbook).rows)
            }
        }
    });
    let (answer, prediction, graph, program) = planned?;
    let seq = forward.positions();
    let file = PlanFile { graph, cluster: options.cluster.clone(), plan: answer.plan, program, seq };
    let Answer { objective, statistics, closed, pins, .. } = answer;
    let (asked, memory_limit) = (options.pins.clone(), options.memory_limit);
    Ok(Compiled { file, objective, prediction, statistics, closed, pins, asked, memory_limit, baselines })
}

/// The best plan and its costs, not lowered.
///
/// # Errors
/// As [`compile`].
pub fn best(forward: &Graph, options: &Options<'_>) -> Result<(Plan, Prediction), CompileError> {
    let graph = grad::differentiate(forward)?;
    let classes = layers::classes(&graph);
    let answer = Planner::new(options.request(&graph, &classes))?.search_by(options.solver)?;
    let prediction = predict(&graph, &classes, &options.cluster, &answer.plan)?;
    Ok((answer.plan, prediction))
}

/// Textbook systems alone.
///
/// # Errors
/// If the model cannot be differentiated, or pins, devices and batch do not go together.
pub fn textbook(forward: &Graph, options: &Options<'_>) -> Result<Vec<Baseline>, CompileError> {
    let graph = grad::differentiate(forward)?;
    let classes = layers::classes(&graph);
    let mut planner = Planner::new(options.request(&graph, &classes))?;
    Ok(baselines(&planner.problem, &mut planner.prices, options.cluster.node(), &|| false).rows)
}

/// The fewest devices on which a plan fits, in whole nodes where there are several.
///
/// # Errors
/// If pins, devices and batch do not go together.
pub fn fewest_devices(forward: &Graph, options: &Options<'_>) -> Result<Fewest, CompileError> {
    let graph = grad::differentiate(forward)?;
    let classes = layers::classes(&graph);
    Ok(Planner::new(options.request(&graph, &classes))?.fewest_devices())
}

impl Options<'_> {
    fn request<'g>(&'g self, graph: &'g Graph, classes: &'g [u32]) -> Request<'g> {
        Request {
            graph,
            classes,
            cluster: &self.cluster,
            batch: self.batch,
            compute: self.compute,
            optimizer: self.optimizer,
            clip: self.clip,
            pins: self.pins.clone(),
            memory_limit: self.memory_limit,
            deadline: self.deadline.map(|late| late as &dyn Fn() -> bool),
        }
    }
}

type Planned = (Answer, Prediction, Graph, Program);

/// An answer with its costs, its graph at its micro-batch, and its verified program.
fn lowered(graph: &Graph, classes: &[u32], cluster: &Cluster, answer: Answer, dump: &Dump) -> Result<Planned, CompileError> {
    let prediction = predict(graph, classes, cluster, &answer.plan)?;
    let mut graph = graph.clone();
    graph.set_batch(answer.plan.dp * answer.plan.micro_batch);
    graph.order = lower::plan_order(&graph, &answer.plan)?;
    if dump.is_on() {
        let sharded = lower::shard(&graph, &answer.plan)?;
        dump.write("sharded", || text::print_sharded(&sharded, &graph))?;
    }
    let program = lower::lower(&graph, &answer.plan)?;
    dump.write("program", || text::print_program(&program, &graph))?;
    verify::verify_program(&graph, &program).map_err(CompileError::Violated)?;
    Ok((answer, prediction, graph, program))
}

/// Numbered dumps of the stages.
struct Dump {
    dir: Option<PathBuf>,
}

/// Their order of writing.
const STAGES: [&str; 4] = ["graph", "differentiated", "sharded", "program"];

impl Dump {
    fn from_environment() -> Dump {
        Dump { dir: std::env::var_os("DPLAN_DUMP").map(PathBuf::from) }
    }
    fn is_on(&self) -> bool {
        self.dir.is_some()
    }
    fn write(&self, stage: &str, text: impl FnOnce() -> String) -> Result<(), CompileError> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let number = STAGES.iter().position(|s| *s == stage).unwrap_or(STAGES.len());
        let path = dir.join(format!("{number}-{stage}.dp"));
        std::fs::create_dir_all(dir)
            .and_then(|()| std::fs::write(&path, text()))
            .with_context(|| format!("DPLAN_DUMP: {}: cannot write", path.display()))
            .map_err(CompileError::Dump)
    }
}
