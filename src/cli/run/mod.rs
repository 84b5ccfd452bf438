//! `dplan run`: train a plan on CPU ranks, or as one of its ranks on a GPU ([`cuda`]).
//!
//! A run is a [`Run`](train::Run) that goes through *attempts*: each has a session, begins at a position, and ends when all steps are done or a fault ends it. Between attempts the
//! run goes back to the last checkpoint (or to its beginning), as often as the flags allow.

mod cuda;
mod faults;
mod settings;
mod summary;
mod train;

use super::output::seconds;
use super::{Outcome, Result, args};
use crate::checkpoint::writer::Mode;
use crate::checkpoint::{self, Found};
use crate::data::SequenceOrder;
use crate::export::{self, layout, weights as export_weights};
use crate::feed::Feed;
use crate::import::weights::Weights;
use crate::planfile::PlanFile;
use crate::runtime::{LossScale, StepResult};
use anyhow::{Context, anyhow, ensure};
use clap::ValueEnum;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::plan::Clip;
use dplan_ir::program::Updates;
use dplan_ir::verify;
use faults::Planned;
use settings::{Decay, LrSchedule};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Train a plan: every rank is a thread that executes its verified program.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dplan run plan.json --data text.txt --steps 100 --lr 0.003 --save weights.safetensors\n  dplan run plan.json --data text.txt --steps 1000 --checkpoint ckpt --every 50 --restarts 3\n  dplan run other-plan.json --data text.txt --steps 1000 --checkpoint ckpt --resume ckpt\n  dplan run plan.json --steps 5 --profile out.json   # then `dplan compare plan.json out.json`"
)]
pub struct Args {
    plan: PathBuf,
    /// `cpu`: every rank is a thread. `cuda`: this process is one rank on one GPU, one of as many as torchrun, srun or mpirun start.
    #[arg(long, default_value = "cpu")]
    device: cuda::Device,
    /// With `--device cuda`, all ranks of the plan on one GPU, in this process, to try a plan of several ranks on a single card.
    #[arg(long)]
    together: bool,
    /// With `--device cuda`, how the GPU is given a step, from the second on: as one captured graph, or call by call.
    #[arg(long, default_value = "graph", value_name = "HOW")]
    launch: cuda::LaunchBy,
    /// Text (bytes are tokens), `.bin` of u16 or u32 tokens, Megatron `.bin` with its `.idx`, or JSON with `tokens[step][row][col]`; if absent, random tokens.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// The token that ends a document, for a plan compiled with `--documents apart`.
    #[arg(long, value_name = "ID")]
    document_end: Option<u64>,
    /// Take the sequences of each epoch in an order of its own.
    #[arg(long)]
    shuffle: bool,
    /// The step to end at, those before a checkpoint that is resumed included.
    #[arg(long, default_value_t = 20, value_name = "N")]
    steps: u64,
    /// Largest learning rate.
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// How the learning rate goes from step to step, after the warm-up.
    #[arg(long, default_value = "constant")]
    lr_schedule: LrSchedule,
    /// Steps over which the learning rate rises from 0.
    #[arg(long, default_value_t = 0, value_name = "N")]
    warmup: u64,
    /// Adam's decay rates.
    #[arg(long, default_value = "0.9,0.95", value_parser = args::betas)]
    betas: (f64, f64),
    /// Momentum of SGD.
    #[arg(long, default_value_t = 0.9)]
    momentum: f64,
    #[arg(long, default_value_t = 1e-8)]
    eps: f64,
    #[arg(long, default_value_t = 0.1)]
    weight_decay: f64,
    /// What weight decay pulls.
    #[arg(long, default_value = "all")]
    decay: Decay,
    /// Largest global gradient norm [default: 1]. Plans that do not clip (schedule pipedream) refuse it.
    #[arg(long)]
    clip: Option<f64>,
    /// First loss scale of f16 plans, a power of two. Steps whose gradients overflow are skipped, and halve it.
    #[arg(long, default_value = "65536", value_name = "S", value_parser = args::loss_scale)]
    loss_scale: LossScale,
    /// Steps in a row without overflow that double it.
    #[arg(long, default_value_t = 2000, value_name = "N")]
    loss_scale_window: u64,
    /// Of the initial weights, of random tokens and of the order of data; 0, or the checkpoint's.
    #[arg(long)]
    seed: Option<u64>,
    /// End the run if no rank gets any further for so many seconds.
    #[arg(long, default_value_t = 600.0, value_name = "S")]
    timeout: f64,
    /// Folder of the files in which each rank keeps what a plan offloads to a disk; they have no names, and are gone when the run ends. The system's temporary folder if absent.
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Initial weights, by their Hugging Face names: a file, an index of several, or the folder of either.
    #[arg(long, value_name = "FILE")]
    init: Option<PathBuf>,
    /// Write the final weights here: a `.safetensors` file, or a folder (`out/`). A folder gets the files, types and index that --init had, or files of --shard-size.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Largest file of a folder that --save writes.
    #[arg(long, default_value = "5GB", value_name = "BYTES", value_parser = args::bytes)]
    shard_size: u64,
    /// Write the first step's gradients, before clipping, here. Plans that update behind every micro-batch (schedule pipedream) have none of a step.
    #[arg(long, value_name = "FILE")]
    save_grads: Option<PathBuf>,
    /// Write when every rank ran what in the first 50 steps (after a restart, in the first 50 since), as Chrome trace JSON, for Perfetto, `dplan inspect` and `dplan compare`.
    #[arg(long, value_name = "out.json")]
    profile: Option<PathBuf>,
    /// Save checkpoints in this folder, which any plan of the model can resume.
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Save one every N steps, and after the last.
    #[arg(long, default_value_t = 100, value_name = "N")]
    every: u64,
    /// Keep the last N.
    #[arg(long, default_value_t = 3, value_name = "N")]
    keep: usize,
    /// Whether steps go on while a checkpoint is written.
    #[arg(long, default_value = "background", value_name = "HOW")]
    checkpoint_writes: Writes,
    /// What to do if a checkpoint cannot be written.
    #[arg(long, default_value = "stop", value_name = "WHAT")]
    checkpoint_failure: OnFailure,
    /// Continue from the last checkpoint of a folder that is whole, or from one checkpoint's folder. With --checkpoint of the same folder, an empty one begins a run.
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    /// Begin the data at its first sequence, whatever the checkpoint says.
    #[arg(long, requires = "resume")]
    restart_data: bool,
    /// When a rank fails or stalls, continue from the last checkpoint, at most so often.
    #[arg(long, default_value_t = 0, value_name = "N", requires = "checkpoint")]
    restarts: u32,
    /// When ranks are lost, plan anew for those that are left, and continue with that plan.
    #[arg(long, requires = "checkpoint")]
    elastic: bool,
    /// When a loss is not finite, go back to the last checkpoint and leave that step's data out, at most so often.
    #[arg(long, default_value_t = 0, value_name = "K", requires = "checkpoint")]
    skip_bad: u32,
    /// Compare what several ranks hold every N steps.
    #[arg(long, default_value_t = 0, value_name = "N")]
    check_replicas: u64,
    /// Run every N-th step twice: both must end in the same bits.
    #[arg(long, default_value_t = 0, value_name = "N")]
    replay: u64,
    /// Bring about faults, such as die:6@12: a rank dies, stalls, has a bit flipped, or gets a NaN (die, stall, flip, nan) in a step.
    #[arg(long, value_name = "FAULT:RANK@STEP", value_delimiter = ',')]
    rehearse: Vec<Planned>,
    /// Print one JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Writes {
    Background,
    Waiting,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum OnFailure {
    /// End the run; the last good checkpoint stays.
    Stop,
    /// Say so, and try again when the next is due.
    Continue,
}

impl Writes {
    fn mode(self) -> Mode {
        match self {
            Writes::Background => Mode::Background,
            Writes::Waiting => Mode::Waiting,
        }
    }
}

impl Args {
    /// The batches of a plan.
    fn feed(&self, file: &PlanFile, seed: u64) -> Result<Feed> {
        let order = if self.shuffle { SequenceOrder::Shuffled { seed } } else { SequenceOrder::File };
        let feed = Feed::new(&file.graph, self.data.as_deref(), file.plan.batch(), seed)?.in_order(order);
        Ok(feed.with_documents(self.document_end)?)
    }
}

pub fn run(args: Args) -> Result<Outcome> {
    let file = PlanFile::read(&args.plan)?;
    check(&args)?;
    if file.plan.clip == Clip::None && args.clip.is_some() {
        return Err(anyhow!("--clip: {} does not clip (schedule {}); expected no --clip", args.plan.display(), file.plan.schedule.name()).into());
    }
    if file.plan.schedule.updates() == Updates::MicroBatch && args.save_grads.is_some() {
        let schedule = file.plan.schedule.name();
        return Err(
            anyhow!("--save-grads: schedule {schedule} has a gradient of every micro-batch and none of a step; expected no --save-grads").into()
        );
    }
    if let Err(violations) = verify::verify_program(&file.graph, &file.program) {
        let first = violations.first().map(ToString::to_string).unwrap_or_default();
        let error =
            anyhow!("{}: its program does not verify ({} violations; `dplan verify` shows them): {first}", args.plan.display(), violations.len());
        return Err(error.into());
    }
    let found = resumed(&args)?;
    let seed = args.seed.or(found.as_ref().map(|f| f.checkpoint.position().seed)).unwrap_or(0);
    let feed = args.feed(&file, seed)?;
    let weights = args.init.as_deref().map(Weights::open).transpose()?;
    if let Some(weights) = &weights {
        weights.check(&file.graph)?;
    }
    if args.data.is_none() && !args.json {
        eprintln!("no --data: training on random tokens");
    }
    let plan = xxh3_64(file.to_json().as_bytes());
    if args.device == cuda::Device::Cuda {
        return cuda::run(&args, &file, plan, feed, weights.as_ref(), seed);
    }
    train::Run::new(args, file, plan, Arc::new(feed), weights, seed)?.train(found)
}

/// All that can be said before anything is allocated.
fn check(args: &Args) -> anyhow::Result<()> {
    let finite = [("--lr", args.lr), ("--eps", args.eps), ("--weight-decay", args.weight_decay), ("--momentum", args.momentum)];
    for (flag, value) in finite {
        ensure!(value.is_finite() && value >= 0.0, "{flag} {value}: expected a number that is not negative");
    }
    if let Some(clip) = args.clip {
        ensure!(clip > 0.0, "--clip {clip}: expected a number above 0");
    }
    ensure!(args.timeout.is_finite() && args.timeout > 0.0, "--timeout {}: expected seconds above 0", args.timeout);
    ensure!(
        !args.together || args.device == cuda::Device::Cuda,
        "--together: CPU ranks share a process anyway; --device cuda puts all ranks on one GPU"
    );
    ensure!(args.every > 0, "--every 0: expected at least 1");
    ensure!(args.keep > 0, "--keep 0: expected at least 1");
    ensure!(args.loss_scale_window > 0, "--loss-scale-window 0: expected at least 1");
    for path in [&args.save, &args.save_grads, &args.profile].into_iter().flatten() {
        if Some(path) != args.save.as_ref() || !is_folder(path) {
            export::check_writable(path).with_context(|| format!("{}: cannot write", path.display()))?;
        }
    }
    Ok(())
}

/// The checkpoint to continue from, if the flags say so and there is one.
fn resumed(args: &Args) -> anyhow::Result<Option<Found>> {
    let begun = args.checkpoint.as_deref().is_some_and(checkpoint::has_any);
    let Some(dir) = &args.resume else {
        if let (true, Some(dir)) = (begun, &args.checkpoint) {
            let dir = dir.display();
            return Err(anyhow!("{dir}: has checkpoints already; --resume {dir} continues from the last, or give another folder"));
        }
        return Ok(None);
    };
    if !begun && args.checkpoint.as_ref() == Some(dir) {
        eprintln!("{}: no checkpoint yet; the run begins", dir.display());
        return Ok(None);
    }
    let found = checkpoint::find(dir)?;
    for note in &found.notes {
        eprintln!("note: {note}");
    }
    Ok(Some(found))
}

/// Whether weights go into a folder: one that is there, or a name with a slash behind it.
fn is_folder(path: &Path) -> bool {
    path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/")
}

/// Writes tensors as the parameters are called; `elements` gives those of one.
fn save(path: &Path, file: &PlanFile, elements: impl FnMut(ParamId) -> io::Result<Vec<f64>>) -> anyhow::Result<()> {
    export_weights::save(path, &file.graph, saved_type(file), elements).with_context(|| format!("{}: cannot write", path.display()))
}

/// Writes the final weights, in the layout that they came in.
fn save_weights(
    args: &Args,
    path: &Path,
    file: &PlanFile,
    from: Option<&Weights>,
    elements: impl FnMut(ParamId) -> io::Result<Vec<f64>>,
) -> anyhow::Result<()> {
    if !is_folder(path) {
        return save(path, file, elements);
    }
    let written = match from {
        Some(weights) => layout::save_like(weights, path, &file.graph, elements),
        None => layout::save_sharded(path, &file.graph, saved_type(file), args.shard_size, elements),
    };
    written.with_context(|| format!("{}: cannot write", path.display()))
}

fn saved_type(file: &PlanFile) -> DType {
    if file.plan.compute == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Initial weights, whole: read before a session takes them, so that a bad file is told as such.
fn read_weights(weights: &Weights, graph: &Graph) -> anyhow::Result<Table<ParamId, Vec<f64>>> {
    let read: std::result::Result<Vec<_>, _> = graph.params.ids().map(|p| weights.param::<f64>(graph, p)).collect();
    Ok(read?.into_iter().collect())
}

/// What is said of a step of so many tokens, whose data begins at sequence `data`, `scaled` by so much.
fn line(json: bool, step: u64, data: u64, tokens: f64, result: &StepResult, scaled: Option<LossScale>) -> String {
    let rate = tokens / result.seconds;
    let overflow = result.grad_norm.is_some_and(|n| !n.is_finite());
    if json {
        let (loss, norm) = (result.loss, result.grad_norm.filter(|_| !overflow));
        let mut line = serde_json::json!({ "step": step, "loss": loss, "grad_norm": norm, "seconds": result.seconds, "tokens_per_second": rate, "sequences": data });
        if let Some(scale) = scaled {
            line["loss_scale"] = serde_json::json!(scale.value());
            line["overflow"] = serde_json::json!(overflow);
        }
        return line.to_string();
    }
    let norm = match (result.grad_norm, scaled) {
        (Some(_), Some(scale)) if overflow => format!("  skipped: gradients overflow at loss scale {}", scale.value()),
        (Some(n), _) => format!("  grad norm {n:8.4}"),
        (None, _) => String::new(),
    };
    format!("step {step:5}  loss {:.5}{norm}  {:>9}  {rate:.0} tokens/s", result.loss, seconds(result.seconds))
}

/// What a step shows that cannot be trained on. A rank that is not at the end of the model has no loss.
fn not_finite(loss: Option<f64>, norm: Option<f64>) -> Option<String> {
    if let Some(loss) = loss.filter(|l| !l.is_finite()) {
        return Some(format!("the loss is {loss}: that"));
    }
    let norm = norm.filter(|n| !n.is_finite())?;
    Some(format!("the gradient norm is {norm}: that"))
}
