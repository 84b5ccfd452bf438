//! `dplan compile`: the main job.

use super::model::{self, ModelArgs};
use super::output::{self, gib, seconds};
use super::sensitivity::{self, Scenario, Sensitivity};
use super::{Failure, Outcome, Result, args, dropout, notes, progress, report};
use crate::certfile::Certificate;
use crate::cluster;
use crate::compile::{CompileError, Compiled, Options, compile, fewest_devices};
use crate::export;
use anyhow::Context;
use clap::ValueEnum;
use dplan_ir::capacity;
use dplan_ir::documents;
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::op::Op;
use dplan_ir::optimizer::Optimizer;
use dplan_ir::plan::Clip;
use dplan_planner::machine::Machine;
use dplan_planner::pins::Pins;
use dplan_planner::request::{Refusal, Solver};
use dplan_planner::units::Bytes;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Sequences a device where no batch is given.
const DEFAULT_BATCH: u64 = 8;

/// Find the fastest plan that fits, prove it, lower it, verify it, write it.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  dplan compile config.json --cluster cpu:4 -o plan.json\n  \
    dplan compile llama-3.1-405b.json --cluster h100:8x2048 --seq 8192 --batch 2048\n  \
    dplan compile config.json --cluster h100:8x16 --pin tp=8,zero=1+3 --tokens 1T --price 2.5\n  \
    dplan compile config.json --cluster h100:8x16 --min-devices --what-if link=2x --what-if memory=1.5x")]
pub struct Args {
    /// A Hugging Face config.json, or a graph in dplan's own JSON.
    model: PathBuf,
    #[command(flatten)]
    options: ModelArgs,
    /// DEVICE:PER_NODExNODES, several of these joined by +, cpu:N, local, or a JSON file.
    #[arg(long, default_value = "local", value_name = "C")]
    cluster: String,
    /// Sequences of one step, over all devices [default: 8 a device].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    batch: Option<u64>,
    #[arg(long, default_value = "adamw")]
    optimizer: OptimizerName,
    /// Train with dropout [default: none, whatever the config says]: one rate for the embedding and for each term that attention and feed-forward add to the residual
    /// stream, or `config` for the rates of the config's keys (resid_pdrop, embd_pdrop, hidden_dropout, hidden_dropout_prob). Attention probabilities are never dropped.
    #[arg(long, value_name = "P|config", value_parser = dropout::asked)]
    dropout: Option<dropout::Asked>,
    /// Whether tokens see other documents of their sequence. Kept apart, `run --document-end` says which token ends one; positions go on counting from the sequence's
    /// beginning.
    #[arg(long, default_value = "joined", value_name = "HOW")]
    documents: Documents,
    /// Experts drop tokens [default: none is ever dropped]: of each sequence an expert takes at most F · tokens · experts of a token / experts, rounded up, the first
    /// that chose it; the others pass it by. The buffers of routed rows shrink to that.
    #[arg(long, value_name = "F")]
    capacity: Option<f64>,
    /// Choices already made: dp tp pp cp keys ep micro virtual zero recompute offload schedule sp wire sync map; values joined by +, zero@0-11=3 for a range of layers.
    #[arg(long, default_value = "", value_name = "k=v,…")]
    pin: String,
    /// Memory that arena and context may take on one device, such as 40GiB; at most what it has.
    #[arg(long, value_name = "BYTES", value_parser = args::bytes)]
    memory_limit: Option<u64>,
    /// Memory of the host that each device may take for what is offloaded, such as 200GiB; what is more goes to files.
    #[arg(long, value_name = "BYTES", value_parser = args::bytes)]
    host_limit: Option<u64>,
    /// Stop searching after so many seconds; the plan then says how far from optimal it may be.
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = args::seconds)]
    time_limit: Option<f64>,
    /// What solves the layouts that no bound closes: labels and dynamic programs, or integer programs (slower, other code, the same answer).
    #[arg(long, default_value = "exact")]
    solver: SolverName,
    /// Also the fewest devices that hold a plan, in whole nodes, and the best plan there.
    #[arg(long)]
    min_devices: bool,
    /// Also the best plan on another machine: link, intra, inter, host, nvme, latency, memory, compute, bandwidth or nodes, by a factor; may be repeated.
    #[arg(long, value_name = "k=FACTORx,…", value_parser = sensitivity::scenario)]
    what_if: Vec<Scenario>,
    /// Length of the training run, such as 1T: gives its days.
    #[arg(long, value_name = "N", value_parser = args::tokens)]
    tokens: Option<f64>,
    /// Price of one device for one hour, USD: with --tokens gives the run's cost.
    #[arg(long, value_name = "USD", requires = "tokens", allow_negative_numbers = true, value_parser = args::price)]
    price: Option<f64>,
    /// Write the plan here, and its certificate beside it.
    #[arg(short, long, value_name = "plan.json")]
    output: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Documents {
    /// A token sees all before it.
    Joined,
    /// A token sees what is before it in its own document.
    Apart,
}

#[derive(Clone, Copy, ValueEnum)]
enum OptimizerName {
    Adamw,
    Adam,
    Sgd,
    Lamb,
}

#[derive(Clone, Copy, ValueEnum)]
enum SolverName {
    Exact,
    Ilp,
}

/// What a capacity factor comes to.
fn capacity_note(graph: &Graph, factor: f64) -> String {
    let most = |op: &Op| if let Op::Capacity { tokens } = op { Some(*tokens) } else { None };
    let all: BTreeSet<u64> = graph.nodes.values().filter_map(|n| most(&n.op)).collect();
    match all.iter().map(u64::to_string).reduce(|all, next| format!("{all} or {next}")) {
        Some(tokens) => format!("an expert takes at most {tokens} tokens of a sequence, the first that choose it; others pass it by"),
        None => format!("capacity factor {factor}: experts have room for a whole sequence, so nothing is dropped"),
    }
}

pub fn run(args: Args) -> Result<Outcome> {
    let begin = Instant::now();
    if let Some(path) = &args.output {
        export::check_writable(path).with_context(|| format!("{}: cannot write", path.display()))?;
    }
    let pins = Pins::parse(&args.pin)?;
    let mut cluster = cluster::parse(&args.cluster)?;
    if let Some(limit) = args.host_limit.map(Bytes) {
        cluster = cluster.map(|machine| Machine { host_memory: Some(limit), ..machine.clone() }, |link| link);
    }
    let (precision, why) = notes::default_precision(&cluster);
    let mut model = model::load_for(&args.model, &args.options, precision)?;
    let mut notes: Vec<String> = notes::of_prices(&cluster).into_iter().chain(notes::of_nodes(&cluster)).collect();
    notes.extend(why.filter(|_| args.options.precision.is_none()));
    notes.extend(model.notes.iter().cloned());
    if let Some(factor) = args.capacity {
        model.graph = capacity::limit(&model.graph, factor).with_context(|| format!("--capacity {factor}: {}", model.name))?;
        notes.push(capacity_note(&model.graph, factor));
    }
    notes.extend(dropout::apply(&mut model, args.dropout)?);
    if args.documents == Documents::Apart {
        model.graph = documents::keep_apart(&model.graph).with_context(|| format!("--documents apart: {}", model.name))?;
        notes.push("no token sees another document of its sequence; the cost is counted as if each saw all before it".into());
    }
    let batch = args.batch.unwrap_or_else(|| {
        let batch = DEFAULT_BATCH * cluster.devices();
        notes.push(format!("batch {batch}: {DEFAULT_BATCH} sequences a device; --batch says otherwise"));
        batch
    });
    let compute = compute_type(&model.graph);
    let late = args.time_limit.map(|s| {
        let end = Duration::try_from_secs_f64(s).ok().and_then(|limit| begin.checked_add(limit));
        move || end.is_some_and(|end| Instant::now() >= end)
    });
    let options = Options {
        cluster,
        batch,
        compute,
        optimizer: match args.optimizer {
            OptimizerName::Adamw => Optimizer::AdamW,
            OptimizerName::Adam => Optimizer::Adam,
            OptimizerName::Sgd => Optimizer::Sgd,
            OptimizerName::Lamb => Optimizer::Lamb,
        },
        clip: Clip::GlobalNorm,
        pins,
        memory_limit: args.memory_limit.map(Bytes),
        solver: match args.solver {
            SolverName::Exact => Solver::Exact,
            SolverName::Ilp => Solver::Ilp,
        },
        deadline: late.as_ref().map(|l| l as &(dyn Fn() -> bool + Sync)),
    };
    let spinner = progress::spinner("planning");
    let compiled = compile(&model.graph, &options);
    spinner.finish_and_clear();
    let compiled = match compiled {
        Ok(compiled) => compiled,
        Err(error) => return failed(&args, error),
    };
    let took = begin.elapsed().as_secs_f64();
    notes.extend(notes::of_ranks(&compiled));
    notes.extend(notes::of_hosts(&compiled, args.host_limit.map(Bytes)));
    // Before anything is written: a command that fails leaves no plan.
    let elsewhere = match elsewhere(&args, &model.graph, &options) {
        Ok(elsewhere) => elsewhere,
        Err(error) => return failed(&args, error),
    };
    if let Some(path) = &args.output {
        output::write(path, compiled.file.to_json().as_bytes())?;
        // A pipe or a device has nothing beside it.
        if path.metadata().is_ok_and(|m| m.is_file()) {
            let certificate = Certificate::new(&compiled);
            output::write(&Certificate::beside(path), certificate.to_json().as_bytes())?;
        }
    }
    let run = report::TrainingRun { tokens: args.tokens, price: args.price };
    if args.json {
        let mut object = report::json(&model, &compiled, run, took);
        object["notes"] = notes.into();
        if args.min_devices || !args.what_if.is_empty() {
            object["what_if"] = elsewhere.iter().map(sensitivity::json).collect();
        }
        output::say!("{object}");
    } else {
        for note in &notes {
            eprintln!("note: {note}");
        }
        output::put!("{}", report::text(&model, &compiled, run));
        for (at, other) in elsewhere.iter().enumerate() {
            output::say!("{}{}", if at == 0 { "what if     " } else { "            " }, sensitivity::line(other, &compiled.prediction));
        }
        footer(&args, &compiled, took);
    }
    Ok(Outcome::Done)
}

/// The best plans on the other machines that were asked about.
fn elsewhere(args: &Args, forward: &Graph, options: &Options<'_>) -> std::result::Result<Vec<Sensitivity>, CompileError> {
    let mut all = Vec::new();
    if args.min_devices {
        all.push(sensitivity::min_devices(forward, options, fewest_devices(forward, options)?)?);
    }
    all.extend(sensitivity::what_if(forward, options, &args.what_if)?);
    Ok(all)
}

/// Why there is no plan: an answer, a wrong question, or a fault of dplan's own.
fn failed(args: &Args, error: CompileError) -> Result<Outcome> {
    match error {
        CompileError::Refused(refusal) => refused(args, &refusal),
        error @ (CompileError::Lower(_) | CompileError::Violated(_)) => Err(Failure::fault(error)),
        error => Err(error.into()),
    }
}

fn footer(args: &Args, compiled: &Compiled, took: f64) {
    let largest = compiled.prediction.memory.iter().map(|m| m.arena_bytes()).max().unwrap_or(0);
    output::say!("programs    {} stages lowered and verified, arena {} a device at most", compiled.file.program.stages.len(), gib(largest));
    match &args.output {
        Some(path) => output::say!("written     {} in {}", path.display(), seconds(took)),
        None => output::say!("not written (no -o); took {}", seconds(took)),
    }
}

/// The answer is no where nothing fits; the question was wrong where pins, batch and devices do not go together.
fn refused(args: &Args, refusal: &Refusal) -> Result<Outcome> {
    match refusal {
        Refusal::Infeasible(_) | Refusal::Context { .. } | Refusal::Late => {
            if args.json {
                output::say!("{}", serde_json::json!({ "infeasible": refusal.to_string() }));
            }
            eprintln!("{}: {refusal}", args.cluster);
            Ok(Outcome::No)
        }
        Refusal::Solver(fault) => Err(Failure::fault(fault.clone())),
        Refusal::Pins(_)
        | Refusal::Graph(_)
        | Refusal::Layout { .. }
        | Refusal::Limit { .. }
        | Refusal::TooMuch { .. }
        | Refusal::Batch { .. }
        | Refusal::Pipeline { .. }
        | Refusal::Stale { .. }
        | Refusal::Scaled { .. }
        | Refusal::Impossible { .. } => Err(anyhow::anyhow!("{refusal}").into()),
    }
}

/// The type the importer gave the parameters.
fn compute_type(graph: &Graph) -> DType {
    graph.params.values().next().map_or(DType::F32, |p| graph.values[p.value].ty.dtype)
}
