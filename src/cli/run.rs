//! `dplan run`: train a plan on CPU ranks.

use super::output::{self, gib, seconds};
use super::{Failure, Outcome, Result, args, progress};
use crate::export::{self, weights as export_weights};
use crate::feed::Feed;
use crate::import::weights::Weights;
use crate::planfile::PlanFile;
use crate::runtime::{Options, Session};
use anyhow::{Context, anyhow, ensure};
use clap::ValueEnum;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};
use dplan_ir::plan::Clip;
use dplan_ir::program::Role;
use dplan_ir::verify;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Train a plan: every rank is a thread that executes its verified program.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dplan run plan.json --data text.txt --steps 100 --lr 0.003 --save weights.safetensors")]
pub struct Args {
    plan: PathBuf,
    /// Text (bytes are tokens), `.bin` of u16 or u32 tokens, or JSON with `tokens[step][row][col]`; if absent, random tokens.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
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
    /// Largest global gradient norm.
    #[arg(long, default_value_t = 1.0)]
    clip: f64,
    /// Of the initial weights, and of random tokens.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// End the run if no rank gets any further for so many seconds.
    #[arg(long, default_value_t = 600.0, value_name = "S")]
    timeout: f64,
    /// Initial weights, by their Hugging Face names.
    #[arg(long, value_name = "FILE")]
    init: Option<PathBuf>,
    /// Write the final weights here.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Write the first step's gradients, before clipping, here.
    #[arg(long, value_name = "FILE")]
    save_grads: Option<PathBuf>,
    /// Print one JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LrSchedule {
    Constant,
    /// Falls to 0 in a straight line.
    Linear,
    /// Falls to 0 along half a cosine.
    Cosine,
}

pub fn run(args: Args) -> Result<Outcome> {
    let file = PlanFile::read(&args.plan)?;
    check(&args, &file)?;
    if let Err(violations) = verify::verify_program(&file.graph, &file.program) {
        let first = violations.first().map(ToString::to_string).unwrap_or_default();
        let error =
            anyhow!("{}: its program does not verify ({} violations; `dplan verify` shows them): {first}", args.plan.display(), violations.len());
        return Err(error.into());
    }
    let feed = Feed::new(&file.graph, args.data.as_deref(), file.plan.batch(), args.seed)?;
    let weights = args.init.as_deref().map(Weights::open).transpose()?;
    if let Some(weights) = &weights {
        weights.check(&file.graph)?;
    }
    if args.data.is_none() && !args.json {
        eprintln!("no --data: training on random tokens");
    }
    let options = Options { timeout: Duration::from_secs_f64(args.timeout), ..Options::default() };
    let mut session = Session::new(file.graph.clone(), file.program.clone(), &options).map_err(Failure::fault)?;
    load(&mut session, weights.as_ref(), &file.graph, args.seed)?;
    train(&args, &file, &feed, &mut session)
}

/// All that can be said before anything is allocated.
fn check(args: &Args, file: &PlanFile) -> anyhow::Result<()> {
    let finite = [("--lr", args.lr), ("--eps", args.eps), ("--weight-decay", args.weight_decay), ("--momentum", args.momentum)];
    for (flag, value) in finite {
        ensure!(value.is_finite() && value >= 0.0, "{flag} {value}: expected a number that is not negative");
    }
    ensure!(args.clip > 0.0, "--clip {}: expected a number above 0", args.clip);
    ensure!(args.timeout.is_finite() && args.timeout > 0.0, "--timeout {}: expected seconds above 0", args.timeout);
    let compute = file.plan.compute;
    ensure!(
        compute != DType::F16,
        "{}: f16 gradients vanish without loss scaling, which CPU ranks do not have; compile the plan with --precision bf16, f32 or f64",
        args.plan.display()
    );
    for path in [&args.save, &args.save_grads].into_iter().flatten() {
        export::check_writable(path).with_context(|| format!("{}: cannot write", path.display()))?;
    }
    Ok(())
}

fn load(session: &mut Session, weights: Option<&Weights>, graph: &Graph, seed: u64) -> Result<()> {
    let Some(weights) = weights else {
        return session.initialise(seed).map_err(Failure::fault);
    };
    // Read before the session takes them, so that a bad file is told as such.
    let read: std::result::Result<Table<ParamId, Vec<f64>>, _> =
        graph.params.ids().map(|p| weights.param::<f64>(graph, p)).collect::<std::result::Result<Vec<_>, _>>().map(|v| v.into_iter().collect());
    let mut params = read?;
    session.load(Role::Param, |p| std::mem::take(&mut params[p])).map_err(Failure::fault)
}

fn train(args: &Args, file: &PlanFile, feed: &Feed, session: &mut Session) -> Result<Outcome> {
    let tokens = (file.plan.batch() * file.seq) as f64;
    let bar = progress::bar(args.steps);
    let begin = Instant::now();
    let (mut first, mut last) = (None, None);
    for step in 0..args.steps {
        let batch = Arc::new(feed.batch(step)?);
        let scalars = StepScalars { hyper: hyper(args, file, step), step: step + 1, inv_tokens: 1.0 / feed.targets() as f64 };
        let result = session.step(&scalars, &batch).map_err(Failure::fault)?;
        if step == 0
            && let Some(path) = &args.save_grads
        {
            save(path, file, &session.grads().map_err(Failure::fault)?)?;
        }
        let rate = tokens / result.seconds;
        let line = if args.json {
            json!({ "step": step, "loss": result.loss, "grad_norm": result.grad_norm, "seconds": result.seconds, "tokens_per_second": rate })
                .to_string()
        } else {
            let norm = result.grad_norm.map_or(String::new(), |n| format!("  grad norm {n:8.4}"));
            format!("step {step:5}  loss {:.5}{norm}  {:>9}  {rate:.0} tokens/s", result.loss, seconds(result.seconds))
        };
        bar.suspend(|| output::say!("{line}"));
        bar.set_message(format!("loss {:.4}", result.loss));
        bar.inc(1);
        first = first.or(Some(result.loss));
        last = Some(result.loss);
        if !result.loss.is_finite() {
            bar.finish_and_clear();
            return Err(Failure::fault(anyhow!("the loss of step {step} is {}; nothing was saved", result.loss)));
        }
    }
    bar.finish_and_clear();
    if let Some(path) = &args.save {
        save(path, file, &session.params().map_err(Failure::fault)?)?;
    }
    let took = begin.elapsed().as_secs_f64();
    let memory = session.memory();
    if args.json {
        let ranks: Vec<_> = memory.iter().map(|m| json!({ "stage": m.stage, "arena_bytes": m.arena_bytes, "host_bytes": 0 })).collect();
        let summary = json!({
            "steps": args.steps, "seconds": took, "tokens_per_second": tokens * args.steps as f64 / took,
            "first_loss": first, "last_loss": last, "ranks": memory.len(), "memory": ranks,
        });
        output::say!("{}", json!({ "summary": summary }));
    } else if let (Some(first), Some(last)) = (first, last) {
        let largest = memory.iter().map(|m| m.arena_bytes).max().unwrap_or(0);
        output::say!(
            "{} steps on {} ranks in {}: loss {first:.4} -> {last:.4}, {:.0} tokens/s, arena {} a rank at most",
            args.steps,
            memory.len(),
            seconds(took),
            tokens * args.steps as f64 / took,
            gib(largest)
        );
    }
    Ok(Outcome::Done)
}

fn hyper(args: &Args, file: &PlanFile, step: u64) -> Hyper {
    let lr = if step < args.warmup {
        args.lr * (step + 1) as f64 / args.warmup as f64
    } else {
        let left = (args.steps - args.warmup.min(args.steps)).max(1) as f64;
        let done = (step - args.warmup) as f64 / left;
        args.lr
            * match args.lr_schedule {
                LrSchedule::Constant => 1.0,
                LrSchedule::Linear => 1.0 - done,
                LrSchedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            }
    };
    let clip = match file.plan.clip {
        Clip::None => f64::INFINITY,
        Clip::GlobalNorm => args.clip,
    };
    let (beta1, beta2) = match file.plan.optimizer {
        Optimizer::AdamW | Optimizer::Sgd => args.betas,
    };
    Hyper { lr, beta1, beta2, eps: args.eps, weight_decay: args.weight_decay, momentum: args.momentum, clip }
}

fn save(path: &Path, file: &PlanFile, tensors: &Table<ParamId, Vec<f64>>) -> anyhow::Result<()> {
    let written = match file.plan.compute {
        DType::F64 => export_weights::save(path, &file.graph, DType::F64, |p| Ok(tensors[p].clone())),
        _ => export_weights::save(path, &file.graph, DType::F32, |p| Ok(tensors[p].iter().map(|&v| v as f32).collect::<Vec<f32>>())),
    };
    written.with_context(|| format!("{}: cannot write", path.display()))
}
