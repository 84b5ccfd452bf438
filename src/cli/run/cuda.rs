//! `dplan run --device cuda`: this process is one rank, on one GPU.
//!
//! `torchrun`, `srun` or `mpirun` start as many processes as the plan has ranks; a plan of one rank needs nobody. Rank by rank the same flags are given. The first rank of the stage
//! that makes the loss prints the steps.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use clap::ValueEnum;
use dplan_ir::dropout::Draws;
use dplan_ir::dtype::DType;
use dplan_ir::init::name_hash;
use dplan_ir::optimizer::StepScalars;
use dplan_ir::program::{Program, Role, Scalar, StageProgram};
use xxhash_rust::xxh3::xxh3_64;

use super::settings::hyper;
use super::summary::Summary;
use super::{Args, line, not_finite, read_weights, save_weights};
use crate::cli::output;
use crate::cli::{Failure, Outcome, Result};
use crate::export::profile::{Recorded, chrome};
use crate::feed::{Batches, Feed};
use crate::import::weights::Weights;
use crate::planfile::PlanFile;
use crate::runtime::cuda::driver::Driver;
use crate::runtime::cuda::gpu::{Gpu, cuda::Cuda, nccl::UniqueId, unique_id};
use crate::runtime::cuda::rank::Launch;
use crate::runtime::cuda::session::Session;
use crate::runtime::cuda::start::Process;
use crate::runtime::cuda::together::seats;
use crate::runtime::{Options, RankMemory, Recording};

/// What ranks run on.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// Threads of this process, one a rank.
    Cpu,
    /// This process is one rank, on one GPU.
    Cuda,
}

/// How GPUs are given a step.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LaunchBy {
    /// As one CUDA graph.
    Graph,
    /// Call by call.
    Each,
}

/// Trains a verified plan. `plan`: its hash, the same on all ranks.
pub fn run(args: &Args, file: &PlanFile, plan: u64, feed: Feed, weights: Option<&Weights>, seed: u64) -> Result<Outcome> {
    check(args, file)?;
    let timeout = Duration::from_secs_f64(args.timeout);
    // Before anybody is waited for: whether there is a GPU at all.
    Cuda::open().map_err(Failure::fault)?;
    let ranks = file.program.ranks();
    if args.together {
        let gpu = Gpu::open(0, timeout).map_err(Failure::fault)?;
        let session = Session::new(file.graph.clone(), file.program.clone(), seats(gpu, ranks), &options(args));
        return train(
            args,
            file,
            session.map_err(Failure::fault)?,
            Launch::Each,
            &Process { rank: 0, ranks: 1, local: 0, address: String::new() },
            (feed, weights, seed),
        );
    }
    let process = Process::find(|name| std::env::var(name).ok(), ranks)?;
    let mut gpu = Gpu::open(process.local, timeout).map_err(Failure::fault)?;
    if let Some(why) = gpu.lacks().filter(|_| process.rank == 0) {
        eprintln!("note: {why}");
    }
    if ranks > 1 {
        // Ranks with other kernels, or who round their products otherwise, would drift apart as those of another plan.
        let program = std::env::current_exe().and_then(std::fs::read).context("this program cannot read its own file")?;
        let plan = name_hash(&format!("{plan:016x} {:016x} {}", xxh3_64(&program), gpu.products()));
        let made = if process.rank == 0 { unique_id().map_err(Failure::fault)? } else { UniqueId([0; 128]) };
        let id = process.share(plan, timeout, made.0).map_err(Failure::fault)?;
        gpu.join(UniqueId(id), process.rank, ranks).map_err(Failure::fault)?;
    }
    let session = Session::new(file.graph.clone(), file.program.clone(), vec![(process.rank, gpu)], &options(args)).map_err(Failure::fault)?;
    let launch = match args.launch {
        LaunchBy::Graph => Launch::Graph,
        LaunchBy::Each => Launch::Each,
    };
    train(args, file, session, launch, &process, (feed, weights, seed))
}

fn options(args: &Args) -> Options {
    let (timeout, scratch) = (Duration::from_secs_f64(args.timeout), args.scratch.clone().unwrap_or_else(std::env::temp_dir));
    let recording = if args.profile.is_some() { Recording::On } else { Recording::Off };
    Options { timeout, decay: args.decay.groups(), scratch, recording, ..Options::default() }
}

/// Trains the ranks of this process; `process` says which they are, or that they are all.
fn train<D: Driver>(
    args: &Args,
    file: &PlanFile,
    mut session: Session<D>,
    launch: Launch,
    process: &Process,
    (feed, weights, seed): (Feed, Option<&Weights>, u64),
) -> Result<Outcome> {
    session.remarks().iter().for_each(|remark| eprintln!("note: {remark}"));
    session.launch(launch);
    let alone = process.ranks == 1;
    match weights {
        None => session.initialise(seed).map_err(Failure::fault)?,
        Some(weights) => {
            let mut params = read_weights(weights, &file.graph)?;
            session.load(Role::Param, |p| std::mem::take(&mut params[p])).map_err(Failure::fault)?;
        }
    }
    let stage = file.program.stages.iter().position(|s| s.accumulates(Scalar::Loss).is_some()).map(|s| s as u64);
    let has_loss = alone || stage == Some(process.rank / file.program.mesh.ranks());
    let tells = has_loss && process.rank.is_multiple_of(file.program.mesh.ranks());
    let tokens = (file.plan.batch() * file.seq) as f64;
    let targets = feed.targets() as f64;
    let mut batches = Batches::start(&Arc::new(feed), 0)?;
    let (mut took, mut losses, mut recorded) = (0.0, None, Recorded::default());
    for step in 0..args.steps {
        let (sequences, batch) = batches.take().map_err(Failure::fault)?;
        let scalars =
            StepScalars { draws: Draws { seed, sequence: sequences }, ..StepScalars::new(hyper(args, file, step), step + 1, 1.0 / targets) };
        let started = session.clock();
        let result = session.step(&scalars, &batch).map_err(Failure::fault)?;
        if args.profile.is_some() {
            recorded.take(session.take_spans(), (started, session.clock()));
        }
        took += result.seconds;
        losses = Some((losses.map_or(result.loss, |(first, _)| first), result.loss));
        if let Some(what) = not_finite(has_loss.then_some(result.loss), result.grad_norm) {
            return Err(Failure::fault(anyhow!("{what} of step {step}; its state was not saved")));
        }
        if tells {
            output::say!("{}", line(args.json, step, sequences, tokens, &result, None));
        }
    }
    if let Some(path) = &args.save {
        let role = if file.plan.compute == DType::Bf16 { Role::Master } else { Role::Param };
        let params = session.gather(role).map_err(Failure::fault)?;
        save_weights(args, path, file, weights, |p| Ok(params[p].clone()))?;
    }
    if let Some(path) = &args.profile {
        let trace = chrome(&file.graph, &file.program, file.plan.pipeline(), &recorded, &|rank, c| session.members(rank, c));
        output::write(&of_rank(path, process.rank, process.ranks), trace.as_bytes())?;
    }
    if tells {
        let tokens_per_second = tokens * args.steps as f64 / took;
        Summary { steps: args.steps, seconds: took, tokens_per_second, losses, memory: memory(&file.program), name: "GPUs" }.print(args.json);
    }
    Ok(Outcome::Done)
}

/// What each rank of a program has.
fn memory(program: &Program) -> Vec<RankMemory> {
    let one = |rank: u64| {
        let stage = rank / program.mesh.ranks();
        let StageProgram { arena_bytes, host_bytes, file_bytes, .. } = program.stages[stage as usize];
        RankMemory { stage: stage as u32, arena_bytes, host_bytes, file_bytes }
    };
    (0..program.ranks()).map(one).collect()
}

/// A file of a rank, where there are several: `out.json` is `out.rank3.json` of rank 3.
fn of_rank(path: &Path, rank: u64, ranks: u64) -> PathBuf {
    let ending = path.extension().map_or_else(String::new, |e| format!(".{}", e.to_string_lossy()));
    if ranks == 1 { path.to_path_buf() } else { path.with_extension(format!("rank{rank}{ending}")) }
}

/// What ranks on GPUs do not do.
fn check(args: &Args, file: &PlanFile) -> anyhow::Result<()> {
    let alone = file.program.ranks() == 1 || args.together;
    let refused = [
        ("--checkpoint", args.checkpoint.is_some()),
        ("--resume", args.resume.is_some()),
        ("--check-replicas", args.check_replicas > 0),
        ("--replay", args.replay > 0),
        ("--rehearse", !args.rehearse.is_empty()),
        ("--save-grads", args.save_grads.is_some()),
    ];
    for (flag, given) in refused {
        ensure!(!given, "{flag}: not with --device cuda; CPU ranks have it");
    }
    ensure!(alone || args.save.is_none(), "--save: with --device cuda, only plans of one rank can save weights");
    match crate::runtime::cuda::refusal(&file.plan) {
        None => Ok(()),
        Some(why) => Err(anyhow!("--device cuda: {why}")),
    }
}
