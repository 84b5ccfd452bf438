//! The loop over steps, and over attempts.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use dplan_ir::dropout::Draws;
use dplan_ir::entity::ParamId;
use dplan_ir::optimizer::StepScalars;
use dplan_ir::program::Role;
use serde_json::json;
use xxhash_rust::xxh3::xxh3_64;

use super::settings::hyper;
use super::summary::Summary;
use super::{Args, OnFailure, faults, line, not_finite, read_weights, save, save_weights};
use crate::checkpoint::read::Expected;
use crate::checkpoint::store::About;
use crate::checkpoint::writer::Saved;
use crate::checkpoint::{self, CheckpointError, Found, Position, Store, Writer};
use crate::cli::output;
use crate::cli::report::degrees;
use crate::cli::{Failure, Outcome, Result, progress};
use crate::export::profile::{Recorded, trace};
use crate::feed::{Batches, Feed};
use crate::import::weights::Weights;
use crate::planfile::PlanFile;
use crate::runtime::loss_scale;
use crate::runtime::watch::{Difference, Image, Replicas};
use crate::runtime::{Batch, Options, Recording, RuntimeError, Session, StepResult};

/// Everything that outlives an attempt.
pub struct Run {
    args: Args,
    file: PlanFile,
    plan: u64,
    feed: Arc<Feed>,
    weights: Option<Weights>,
    seed: u64,
    store: Option<Arc<Store>>,
    restarts: u32,
    /// Positions of data that is left out.
    bad: BTreeSet<u64>,
    begin: Instant,
    steps_run: u64,
    losses: Option<(f64, f64)>,
}

/// One session, and where it stands.
struct Attempt {
    session: Session,
    position: Position,
    batches: Batches,
    writer: Option<Writer>,
    replicas: Option<Replicas>,
    images: Option<[Image; 2]>,
    recorded: Recorded,
}

/// Why an attempt ended early.
enum Stop {
    /// Ranks failed or stalled.
    Ranks(RuntimeError),
    /// The step that took this data has a loss that is not finite.
    Bad { data: u64, what: String },
    /// Nothing to try again.
    End(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::End(failure)
    }
}

impl From<RuntimeError> for Stop {
    fn from(error: RuntimeError) -> Stop {
        if error.is_fault() { Stop::Ranks(error) } else { Stop::End(Failure::fault(error)) }
    }
}

impl Run {
    pub fn new(args: Args, file: PlanFile, plan: u64, feed: Arc<Feed>, weights: Option<Weights>, seed: u64) -> Result<Run> {
        let store = args.checkpoint.as_deref().map(|dir| Store::open(dir, args.keep)).transpose()?.map(Arc::new);
        let (begin, bad) = (Instant::now(), BTreeSet::new());
        Ok(Run { args, file, plan, feed, weights, seed, store, restarts: 0, bad, begin, steps_run: 0, losses: None })
    }

    /// Trains to the last step, through as many attempts as the flags allow.
    pub fn train(mut self, found: Option<Found>) -> Result<Outcome> {
        let mut attempt = self.attempt(found)?;
        loop {
            let stop = match self.steps(&mut attempt) {
                Ok(()) => return self.finish(attempt),
                Err(stop) => stop,
            };
            // What was handed to the writer is on disk before the last checkpoint is looked for.
            drop(attempt);
            self.recover(stop)?;
            attempt = self.attempt(self.last()?)?;
        }
    }

    /// A session at a checkpoint, or at the beginning.
    fn attempt(&self, found: Option<Found>) -> Result<Attempt> {
        let recording = if self.args.profile.is_some() { Recording::On } else { Recording::Off };
        let timeout = Duration::from_secs_f64(self.args.timeout);
        let scratch = self.args.scratch.clone().unwrap_or_else(std::env::temp_dir);
        let options = Options { timeout, decay: self.args.decay.groups(), recording, scratch, ..Options::default() };
        let mut session = Session::new(self.file.graph.clone(), self.file.program.clone(), &options).map_err(Failure::fault)?;
        session.remarks().iter().for_each(|remark| self.say("note", remark));
        let position = match found {
            None => {
                self.initialise(&mut session)?;
                Position { seed: self.seed, loss_scale: self.args.loss_scale, ..Position::default() }
            }
            Some(found) => self.load(&mut session, &found)?,
        };
        let writer = self.store.as_ref().map(|store| self.writer(&session, store)).transpose()?;
        let batches = Batches::start(&self.feed, position.sequences)?;
        let replicas = (self.args.check_replicas > 0).then(|| Replicas::new(&session));
        let images = (self.args.replay > 0).then(|| [Image::new(&session), Image::new(&session)]);
        Ok(Attempt { session, position, batches, writer, replicas, images, recorded: Recorded::default() })
    }

    fn initialise(&self, session: &mut Session) -> Result<()> {
        let Some(weights) = &self.weights else {
            return session.initialise(self.seed).map_err(Failure::fault);
        };
        let mut params = read_weights(weights, &self.file.graph)?;
        session.load(Role::Param, |p| std::mem::take(&mut params[p])).map_err(Failure::fault)
    }

    fn load(&self, session: &mut Session, found: &Found) -> Result<Position> {
        let checkpoint = &found.checkpoint;
        let data = self.feed.mark();
        // Where the data begins anew, the checkpoint's is of no interest.
        let data = if self.args.restart_data { checkpoint.manifest().data.as_ref() } else { data.as_ref() };
        checkpoint.agrees(Expected { optimizer: self.file.plan.optimizer.name(), seed: self.args.seed, data })?;
        checkpoint.load(session)?;
        let position = checkpoint.position();
        let position = if self.args.restart_data { Position { sequences: 0, ..position } } else { position };
        let path = checkpoint.folder().display();
        if self.args.json {
            let said = json!({ "path": path.to_string(), "step": position.step, "sequences": position.sequences });
            output::say!("{}", json!({ "resumed": said }));
        } else {
            eprintln!("resumed {path}: step {}, sequence {}", position.step, position.sequences);
        }
        if self.file.plan.compressed().is_some() {
            eprintln!(
                "note: checkpoints are of logical tensors, so they lack what each rank had left over of compressed gradients: it begins at 0 again"
            );
        }
        Ok(position)
    }

    fn writer(&self, session: &Session, store: &Arc<Store>) -> Result<Writer> {
        let about = About {
            model: self.file.graph.name.clone(),
            optimizer: self.file.plan.optimizer.name().into(),
            plan: self.plan,
            ranks: self.file.program.ranks(),
            data: self.feed.mark(),
        };
        Writer::start(session, Arc::clone(store), about, self.args.checkpoint_writes.mode(), Box::new(|_| {})).map_err(Failure::fault)
    }

    fn steps(&mut self, attempt: &mut Attempt) -> std::result::Result<(), Stop> {
        let bar = progress::bar(self.args.steps);
        while attempt.position.step < self.args.steps {
            bar.set_position(attempt.position.step);
            let line = self.step(attempt).inspect_err(|_| bar.finish_and_clear())?;
            bar.suspend(|| output::say!("{line}"));
            self.after(attempt).inspect_err(|_| bar.finish_and_clear())?;
        }
        bar.finish_and_clear();
        if let Some(writer) = &mut attempt.writer {
            let saved = writer.wait();
            self.saved(saved)?;
        }
        Ok(())
    }

    /// One step, with what belongs before it; what to print of it.
    fn step(&mut self, at: &mut Attempt) -> std::result::Result<String, Stop> {
        if let Some(writer) = &mut at.writer {
            let saved = writer.poll();
            self.saved(saved)?;
        }
        let step = at.position.step;
        let (data, batch) = at.batches.take().map_err(Failure::fault)?;
        let line = if self.bad.contains(&data) {
            if self.args.json { json!({ "step": step, "sequences": data, "skipped": true }).to_string() } else { format!("step {step:5}  skipped") }
        } else {
            let due = |planned: &faults::Planned| planned.step == step;
            self.args.rehearse.iter().filter(|p| due(p)).try_for_each(|p| p.prepare(&mut at.session)).map_err(Failure::fault)?;
            self.args.rehearse.retain(|p| !due(p));
            let started = at.session.clock();
            let result = self.update(at, &batch)?;
            at.recorded.take(at.session.take_spans(), (started, at.session.clock()));
            self.losses = Some((self.losses.map_or(result.loss, |l| l.0), result.loss));
            let scale = at.position.loss_scale;
            let scaled = self.file.plan.compute.scales_loss();
            let outcome = match not_finite(Some(result.loss), result.grad_norm) {
                None => loss_scale::Outcome::Finite,
                // The update was left out, and the next is tried with a smaller scale.
                Some(_) if scaled && result.loss.is_finite() && scale.can_fall() => loss_scale::Outcome::Overflow,
                Some(what) => return Err(Stop::Bad { data, what: format!("{what} of step {step}") }),
            };
            if scaled {
                at.position.loss_scale = scale.after(outcome, self.args.loss_scale_window);
            }
            let updates = self.file.program.updates.count(self.file.program.micro_batches);
            at.position.updates += if outcome == loss_scale::Outcome::Finite { updates } else { 0 };
            line(self.args.json, step, data, self.tokens(), &result, scaled.then_some(scale))
        };
        at.position.step += 1;
        at.position.sequences = data + self.feed.sequences();
        self.steps_run += 1;
        Ok(line)
    }

    /// What belongs after a step that has been told of: checks, then a checkpoint.
    fn after(&self, at: &mut Attempt) -> std::result::Result<(), Stop> {
        let step = at.position.step - 1;
        if let Some(replicas) = at.replicas.as_mut().filter(|_| at.position.step.is_multiple_of(self.args.check_replicas)) {
            let differences = replicas.check(&mut at.session)?;
            if let Some(first) = differences.first() {
                let more = if differences.len() > 1 { format!(" (and {} more tensors)", differences.len() - 1) } else { String::new() };
                return Err(Failure::fault(anyhow!("after step {step}, {} differs from its replicas{more}", whose(first))).into());
            }
        }
        let due = at.position.step.is_multiple_of(self.args.every) || at.position.step == self.args.steps;
        if let Some(writer) = at.writer.as_mut().filter(|_| due) {
            let saved = writer.save(&mut at.session, at.position);
            self.saved(saved)?;
        }
        Ok(())
    }

    /// Runs a step; where it is one to replay, twice.
    fn update(&self, at: &mut Attempt, batch: &Arc<Batch>) -> std::result::Result<StepResult, Stop> {
        let step = at.position.step;
        let hyper = hyper(&self.args, &self.file, step);
        let loss_scale = if self.file.plan.compute.scales_loss() { at.position.loss_scale.value() } else { 1.0 };
        let draws = Draws { seed: at.position.seed, sequence: at.position.sequences };
        let scalars = StepScalars { loss_scale, draws, ..StepScalars::new(hyper, at.position.updates + 1, 1.0 / self.feed.targets() as f64) };
        let twice = self.args.replay > 0 && (step + 1).is_multiple_of(self.args.replay);
        let Some([before, after]) = at.images.as_mut().filter(|_| twice) else {
            let result = at.session.step(&scalars, batch)?;
            if let (0, Some(path)) = (step, &self.args.save_grads) {
                save(path, &self.file, one_by_one(&mut at.session, Role::Grad)).map_err(|e| Stop::End(e.into()))?;
            }
            return Ok(result);
        };
        before.take(&mut at.session)?;
        let first = at.session.step(&scalars, batch)?;
        after.take(&mut at.session)?;
        before.restore(&mut at.session)?;
        let second = at.session.step(&scalars, batch)?;
        before.take(&mut at.session)?;
        if let Some(difference) = after.difference(before, at.session.graph()) {
            let what = whose(&difference);
            return Err(Failure::fault(anyhow!("step {step}, run twice, ended in different bits: {what}")).into());
        }
        if first.loss.to_bits() != second.loss.to_bits() {
            return Err(Failure::fault(anyhow!("step {step}, run twice, had the losses {} and {}", first.loss, second.loss)).into());
        }
        Ok(second)
    }

    /// Tells of a checkpoint that is on disk, or cannot be put there.
    fn saved(&self, saved: std::result::Result<Option<Saved>, CheckpointError>) -> std::result::Result<(), Stop> {
        match saved {
            Ok(None) => Ok(()),
            Ok(Some(saved)) => {
                if self.args.json {
                    let said =
                        json!({ "step": saved.step, "path": saved.path.display().to_string(), "bytes": saved.bytes, "seconds": saved.seconds });
                    output::say!("{}", json!({ "checkpoint": said }));
                }
                Ok(())
            }
            Err(CheckpointError::Runtime(error)) => Err(error.into()),
            // Steps from such a state are worth nothing.
            Err(error @ CheckpointError::NotFinite { .. }) => Err(Failure::fault(error).into()),
            Err(error) => match self.args.checkpoint_failure {
                OnFailure::Continue => {
                    eprintln!("warning: no checkpoint: {error}");
                    Ok(())
                }
                OnFailure::Stop => {
                    let stop = Failure::fault(error);
                    Err(Failure { error: stop.error.context("cannot save a checkpoint; the ones before are untouched"), ..stop }.into())
                }
            },
        }
    }

    /// Whether and how the run goes on after an attempt ended early.
    fn recover(&mut self, stop: Stop) -> Result<()> {
        match stop {
            Stop::End(failure) => Err(failure),
            Stop::Ranks(error) => {
                let lost = error.lost();
                let shrinks = self.args.elastic && !lost.is_empty();
                if !shrinks && self.restarts >= self.args.restarts {
                    return Err(Failure::fault(error));
                }
                self.say("fault", &error.to_string());
                if shrinks {
                    self.shrink(lost.len() as u64)?;
                } else {
                    self.restarts += 1;
                    self.say("restart", &format!("{} of {}", self.restarts, self.args.restarts));
                }
                Ok(())
            }
            Stop::Bad { data, what } => {
                if self.bad.len() >= self.args.skip_bad as usize {
                    let skipped = if self.bad.is_empty() { String::new() } else { format!(", after {} steps that were left out", self.bad.len()) };
                    return Err(Failure::fault(anyhow!("{what}{skipped}; its state was not saved")));
                }
                self.say("fault", &format!("{what}; going back and leaving its data out"));
                self.bad.insert(data);
                Ok(())
            }
        }
    }

    /// Plans for the ranks that are left.
    fn shrink(&mut self, lost: u64) -> Result<()> {
        let left = self.file.program.ranks().saturating_sub(lost);
        let file = faults::replan(&self.file, left).map_err(Failure::fault)?;
        let plan = &file.plan;
        self.say("plan", &format!("{left} ranks are left: {} on {}", degrees(plan), plan.devices()));
        self.plan = xxh3_64(file.to_json().as_bytes());
        self.feed = Arc::new(self.args.feed(&file, self.seed)?);
        self.file = file;
        Ok(())
    }

    /// The checkpoint to go back to; none if none was saved yet.
    fn last(&self) -> Result<Option<Found>> {
        let store = self.store.as_ref().context("there are no checkpoints to go back to")?;
        match checkpoint::find(store.dir()) {
            Ok(found) => {
                found.notes.iter().for_each(|note| eprintln!("note: {note}"));
                Ok(Some(found))
            }
            Err(CheckpointError::Empty { .. }) => Ok(None),
            Err(error) => Err(Failure::fault(error)),
        }
    }

    fn say(&self, what: &str, text: &str) {
        if self.args.json {
            output::say!("{}", json!({ what: text }));
        } else {
            eprintln!("{what}: {text}");
        }
    }

    /// Of a step.
    fn tokens(&self) -> f64 {
        (self.file.plan.batch() * self.file.seq) as f64
    }

    fn finish(self, mut attempt: Attempt) -> Result<Outcome> {
        if let Some(path) = &self.args.profile {
            output::write(path, trace(&attempt.session, self.file.plan.pipeline(), &attempt.recorded).as_bytes())?;
        }
        if let Some(path) = &self.args.save {
            let params = one_by_one(&mut attempt.session, Role::Param);
            save_weights(&self.args, path, &self.file, self.weights.as_ref(), params)?;
        }
        let took = self.begin.elapsed().as_secs_f64();
        let tokens_per_second = self.tokens() * self.steps_run as f64 / took;
        let (steps, losses, memory) = (self.steps_run, self.losses, attempt.session.memory());
        Summary { steps, seconds: took, tokens_per_second, losses, memory, name: "ranks" }.print(self.args.json);
        Ok(Outcome::Done)
    }
}

/// A role of one parameter after another, so that never all of them are in memory.
fn one_by_one(session: &mut Session, role: Role) -> impl FnMut(ParamId) -> io::Result<Vec<f64>> {
    move |param| session.gather_one(role, param).map_err(io::Error::other)
}

fn whose(difference: &Difference) -> String {
    let ranks = difference.ranks.iter().map(|r| format!("rank {r}")).collect::<Vec<_>>().join(", ");
    format!("{} of `{}` on {ranks}", difference.role.name(), difference.tensor)
}
