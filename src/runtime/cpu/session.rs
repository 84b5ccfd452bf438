//! A session: the threads of all ranks, from load to drop.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dplan_ir::entity::{ParamId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::init;
use dplan_ir::optimizer::StepScalars;
use dplan_ir::program::{Program, Role, Scalar, Space, StageProgram, Stream};
use dplan_kernels::cpu::Threads;

use super::arena::{Arena, Slot};
use super::executor::{Executor, Poisoned, Seen, World, scalar};
use super::load::{Action, Code, Item, Loaded, load};
use super::state::{self, Holding, Which};
use crate::runtime::batch::input_elems;
use crate::runtime::scratch::{Porter, Scratch, by_the_page_cache};
use crate::runtime::{Batch, Options, RankMemory, Rehearsal, RuntimeError, Span, Stall, StepResult, shown};

/// A rank that waits looks at its queues more often than this, also on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(1);

/// Ranks as threads, and their memory.
pub struct Session {
    graph: Graph,
    program: Program,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Of the ranks that have a file.
    porters: Vec<JoinHandle<()>>,
    timeout: Duration,
}

/// What the session's threads share.
#[derive(Debug)]
struct Shared {
    world: World,
    task: Mutex<Task>,
    finished: Condvar,
    quit: AtomicBool,
    /// Steps begun.
    begun: AtomicU64,
}

/// The step that is being run.
#[derive(Debug)]
struct Task {
    scalars: Option<StepScalars>,
    batch: Option<Arc<Batch>>,
    /// Ranks that have not ended it yet; before the first step, those that are ready for it.
    running: usize,
    /// The ranks that panicked: at which item, and what they said.
    panics: Vec<(usize, Option<Item>, String)>,
}

impl Session {
    /// Allocates every rank's arena and starts its thread. All memory is zero: load parameters, or initialise them, before the first step.
    ///
    /// # Errors
    /// If the program has something CPU ranks cannot do, or there is not enough memory.
    pub fn new(graph: Graph, program: Program, options: &Options) -> Result<Session, RuntimeError> {
        let loaded = load(&graph, &program, options.decay)?;
        Session::start(graph, program, loaded, options)
    }

    fn start(graph: Graph, program: Program, loaded: Loaded, options: &Options) -> Result<Session, RuntimeError> {
        let mut arenas = Vec::with_capacity(loaded.codes.len());
        for (rank, code) in loaded.codes.iter().enumerate() {
            let of_stage = &program.stages[code.stage as usize];
            let (bytes, file_bytes) = (of_stage.range(Space::Host).end, of_stage.file_bytes);
            let file = || Scratch::new(&options.scratch, bytes, file_bytes);
            let folder = || options.scratch.display().to_string();
            let file =
                (file_bytes > 0).then(file).transpose().map_err(|why| RuntimeError::NoScratch { rank, folder: folder(), bytes: file_bytes, why })?;
            arenas.push(Arena::new(bytes, file).ok_or(RuntimeError::Memory { rank, bytes })?);
        }
        let count = arenas.len();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let porter = |(arena, code): (&Arena, &Code)| arena.file().map(|_| Porter::new(code.transfers()));
        let world = World {
            porters: arenas.iter().zip(&loaded.codes).map(porter).collect(),
            loaded,
            arenas,
            ranks: (0..count).map(|_| Seen::default()).collect(),
            poisoned: AtomicBool::new(false),
            threads: if count < cores { Threads::All } else { Threads::Caller },
            order: options.order,
            recording: options.recording,
            began: Instant::now(),
        };
        let task = Mutex::new(Task { scalars: None, batch: None, running: 0, panics: Vec::new() });
        let shared = Arc::new(Shared { world, task, finished: Condvar::new(), quit: AtomicBool::new(false), begun: AtomicU64::new(0) });
        let mut session = Session { graph, program, shared, threads: Vec::with_capacity(count), porters: Vec::new(), timeout: options.timeout };
        for rank in 0..count {
            let shared = Arc::clone(&session.shared);
            let thread = std::thread::Builder::new().name(format!("rank {rank}")).spawn(move || shared.rank(rank));
            let thread = thread.map_err(|e| RuntimeError::Thread { rank, why: e.to_string() })?;
            // Threads begin by waiting for a step, so the handle is there before anybody needs it.
            let _ = session.shared.world.ranks[rank].thread.set(thread.thread().clone());
            session.threads.push(thread);
            if session.shared.world.porters[rank].is_some() {
                let shared = Arc::clone(&session.shared);
                let thread = std::thread::Builder::new().name(format!("porter {rank}")).spawn(move || shared.porter(rank));
                session.porters.push(thread.map_err(|e| RuntimeError::Thread { rank, why: e.to_string() })?);
            }
        }
        // What a thread allocates when it begins is no part of a step.
        let mut task = session.shared.lock();
        while task.running < count + session.porters.len() {
            task = session.shared.finished.wait(task).unwrap_or_else(|e| e.into_inner());
        }
        task.running = 0;
        drop(task);
        Ok(session)
    }

    pub fn graph(&self) -> &Graph {
        &self.graph
    }
    pub fn program(&self) -> &Program {
        &self.program
    }
    /// What each rank allocated.
    pub fn memory(&self) -> Vec<RankMemory> {
        let codes = &self.shared.world.loaded.codes;
        let of = |code: &Code, arena: &Arena| {
            let StageProgram { host_bytes, file_bytes, .. } = self.program.stages[code.stage as usize];
            RankMemory { stage: code.stage, arena_bytes: arena.bytes() - host_bytes, host_bytes, file_bytes }
        };
        codes.iter().zip(&self.shared.world.arenas).map(|(code, arena)| of(code, arena)).collect()
    }
    /// What a user should know of how it runs.
    pub fn remarks(&self) -> Vec<String> {
        self.shared.world.arenas.iter().find_map(|arena| arena.file()?.cached()).map(by_the_page_cache).into_iter().collect()
    }
    /// Nanoseconds since the session began: the clock of [`Span`]s.
    pub fn clock(&self) -> u64 {
        self.shared.world.began.elapsed().as_nanos() as u64
    }
    /// Takes what each rank ran since this was last called; empty unless the session records.
    pub fn take_spans(&mut self) -> Vec<Vec<Span>> {
        self.shared.world.ranks.iter().map(|seen| std::mem::take(&mut *seen.spans.lock().unwrap_or_else(|e| e.into_inner()))).collect()
    }
    /// The ranks of a communicator.
    pub fn members(&self, communicator: u32) -> &[usize] {
        &self.shared.world.loaded.communicators[communicator as usize].members
    }
    /// Elements that [`Batch::inputs`] holds for each input of the graph.
    pub fn input_elems(&self) -> impl Iterator<Item = usize> {
        input_elems(&self.graph, self.program.micro_batches)
    }

    /// Sets every parameter to its deterministic initial value.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn initialise(&mut self, seed: u64) -> Result<(), RuntimeError> {
        let graph = self.graph.clone();
        self.load(Role::Param, |param| init::param(&graph, param, seed))
    }

    /// Sets every parameter (or another role of it, such as a moment) to the logical tensor that `provide` gives, row-major.
    ///
    /// # Errors
    /// If a tensor has the wrong number of elements, or the session ended.
    pub fn load(&mut self, role: Role, mut provide: impl FnMut(ParamId) -> Vec<f64>) -> Result<(), RuntimeError> {
        self.idle()?;
        let params: Vec<ParamId> = self.graph.params.ids().collect();
        params.into_iter().try_for_each(|param| self.load_one(role, param, &provide(param)))
    }
    /// As [`Session::load`], for one parameter. Where the program has no such role, nothing happens.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn load_one(&mut self, role: Role, param: ParamId, values: &[f64]) -> Result<(), RuntimeError> {
        self.idle()?;
        let value = self.graph.params[param].value;
        let expected = self.graph.shape(value).iter().product::<u64>() as usize;
        if values.len() != expected {
            return Err(RuntimeError::Param { param: self.graph.values[value].name.clone(), found: values.len(), expected });
        }
        // Parameters of a 16-bit plan are rounded copies of their masters.
        let roles: &[Role] = if role == Role::Param { &[Role::Param, Role::Master] } else { &[role] };
        for &role in roles {
            // SAFETY: no step runs: this has the only reference to the session.
            unsafe { state::scatter(&self.graph, &self.program, &self.shared.world.arenas, role, param, values) }.map_err(RuntimeError::Scratch)?;
        }
        Ok(())
    }
    /// All parameters as logical tensors, row-major.
    ///
    /// # Errors
    /// If the session ended with an error.
    pub fn params(&mut self) -> Result<Table<ParamId, Vec<f64>>, RuntimeError> {
        self.gather(Role::Param)
    }
    /// The last step's gradients, reduced and before clipping.
    ///
    /// # Errors
    /// As [`Session::params`].
    pub fn grads(&mut self) -> Result<Table<ParamId, Vec<f64>>, RuntimeError> {
        self.gather(Role::Grad)
    }
    /// One role of all parameters.
    ///
    /// # Errors
    /// As [`Session::params`].
    pub fn gather(&mut self, role: Role) -> Result<Table<ParamId, Vec<f64>>, RuntimeError> {
        let params: Vec<ParamId> = self.graph.params.ids().collect();
        params.into_iter().map(|param| self.gather_one(role, param)).collect()
    }
    /// One role of one parameter.
    ///
    /// # Errors
    /// As [`Session::params`].
    pub fn gather_one(&mut self, role: Role, param: ParamId) -> Result<Vec<f64>, RuntimeError> {
        self.idle()?;
        // SAFETY: no step runs: this has the only reference to the session.
        unsafe { state::gather(&self.graph, &self.program, &self.shared.world.arenas, role, param) }.map_err(RuntimeError::Scratch)
    }

    /// What every rank has of a role of a parameter, replicas included.
    pub fn holdings_of(&self, role: Role, param: ParamId, which: Which) -> Vec<Holding> {
        state::holdings(&self.graph, &self.program, role, param, which)
    }
    /// Copies the elements of a holding of this session out of its rank's memory.
    ///
    /// # Errors
    /// If the session ended with an error.
    pub fn copy_out(&mut self, holding: &Holding, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        self.idle()?;
        // SAFETY: no step runs: this has the only reference to the session.
        unsafe { state::copy_out(&self.shared.world.arenas, holding, bytes) }.map_err(RuntimeError::Scratch)
    }
    /// Overwrites the elements of a holding of this session.
    ///
    /// # Errors
    /// If the session ended with an error.
    pub fn copy_in(&mut self, holding: &Holding, bytes: &[u8]) -> Result<(), RuntimeError> {
        self.idle()?;
        // SAFETY: as above.
        unsafe { state::copy_in(&self.shared.world.arenas, holding, bytes) }.map_err(RuntimeError::Scratch)
    }

    /// Runs one step on all ranks.
    ///
    /// # Errors
    /// If the inputs have the wrong size, a rank fails, or nobody gets further. After the latter two the session has ended.
    pub fn step(&mut self, scalars: &StepScalars, batch: &Arc<Batch>) -> Result<StepResult, RuntimeError> {
        self.idle()?;
        batch.check(&self.graph, self.program.micro_batches)?;
        let started = Instant::now();
        let shared = &*self.shared;
        let ranks = shared.world.ranks.len();
        {
            let mut task = shared.lock();
            (task.scalars, task.batch, task.running) = (Some(*scalars), Some(Arc::clone(batch)), ranks);
            shared.begun.fetch_add(1, Ordering::SeqCst);
        }
        (0..ranks).for_each(|rank| shared.world.wake(rank));
        self.wait()?;
        let read = |stage: usize, which: Scalar| {
            let id = self.program.stages[stage].accumulates(which)?;
            let buffer = &self.program.stages[stage].buffers[id];
            let slot = Slot::new(buffer, self.program.stages[stage].end(), &self.program.mesh, 0).ok()?;
            debug_assert_eq!(self.program.stages[stage].buffers[id].slots.max(1), 1);
            // SAFETY: the step is over.
            Some(scalar(unsafe { shared.world.arenas[stage * self.program.mesh.ranks() as usize].read(&slot, 0) }))
        };
        // The loss is made where the last layers are: on the last stage, or on the first if virtual stages go there and back.
        let last_that = |which: Scalar| (0..self.program.stages.len()).rev().find_map(|stage| read(stage, which));
        Ok(StepResult {
            loss: last_that(Scalar::Loss).unwrap_or(f64::NAN),
            grad_norm: last_that(Scalar::NormSquared).map(|s| scalars.norm(s.sqrt())),
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// Has a rank do something in the next step, to see how a run takes it. A rank that there is not does nothing.
    pub fn rehearse(&mut self, rank: usize, what: Rehearsal) {
        if let Some(seen) = self.shared.world.ranks.get(rank) {
            *seen.rehearse.lock().unwrap_or_else(|e| e.into_inner()) = Some(what);
        }
    }

    /// Waits until every rank has ended the step.
    fn wait(&self) -> Result<(), RuntimeError> {
        let shared = &*self.shared;
        let tick = (self.timeout / 4).clamp(Duration::from_millis(1), Duration::from_secs(1));
        let progress = || shared.world.ranks.iter().map(|r| r.progress.load(Ordering::Relaxed)).sum::<u64>();
        // Marks how often each rank has looked so far; nothing is allocated while a step goes on.
        let mark = || shared.world.ranks.iter().for_each(|r| r.marked.store(r.looks.load(Ordering::Relaxed), Ordering::Relaxed));
        mark();
        let (mut seen, mut since) = (progress(), Instant::now());
        let mut stalled = None;
        let mut task = shared.lock();
        while task.running > 0 {
            task = shared.finished.wait_timeout(task, tick).map_or_else(|e| e.into_inner().0, |(task, _)| task);
            let now = progress();
            if now != seen {
                mark();
                (seen, since) = (now, Instant::now());
            } else if stalled.is_none() && since.elapsed() >= self.timeout && task.running > 0 {
                let idle = |r: &Seen| r.marked.load(Ordering::Relaxed) == r.looks.load(Ordering::Relaxed);
                let same: Vec<bool> = shared.world.ranks.iter().map(|r| idle(r) && since.elapsed() >= PATIENCE).collect();
                stalled = Some(RuntimeError::Stalled { seconds: since.elapsed().as_secs_f64(), stalls: self.stalls(&same) });
                shared.world.poison();
            }
            // A rank inside an endless kernel cannot be stopped; its thread is left behind with the memory that it may touch.
            if stalled.is_some() && since.elapsed() >= self.timeout + Duration::from_secs(1) {
                break;
            }
        }
        task.panics.sort_by_key(|p| p.0);
        let mut panics = std::mem::take(&mut task.panics).into_iter();
        match (panics.next(), stalled) {
            (Some((rank, item, why)), _) => {
                let stage = shared.world.loaded.codes[rank].stage;
                let instruction = item.map_or_else(String::new, |item| self.describe(rank, item));
                Err(RuntimeError::Rank { rank, stage, instruction, why, peers: self.next_peers(rank), others: panics.map(|p| p.0).collect() })
            }
            (None, Some(stalled)) => Err(stalled),
            (None, None) => Ok(()),
        }
    }

    /// The other ranks of the first meeting that a rank did not come to.
    fn next_peers(&self, rank: usize) -> Vec<usize> {
        let world = &self.shared.world;
        let code = &world.loaded.codes[rank];
        let heads = code.queues.iter().zip(&world.ranks[rank].heads);
        let ahead = heads.flat_map(|(queue, head)| queue.iter().skip(head.load(Ordering::Relaxed) as usize));
        let meeting = ahead.filter_map(|item| match &code.actions[item.action as usize] {
            Action::Meet { communicator, .. } => Some(*communicator),
            _ => None,
        });
        let members = meeting.map(|c| &world.loaded.communicators[c].members).next();
        members.into_iter().flatten().copied().filter(|&m| m != rank).collect()
    }

    /// Whose fault it may be that nobody gets further: the ranks that wait for a peer, else all that wait; and those that are stuck in an instruction.
    fn stalls(&self, stuck: &[bool]) -> Vec<Stall> {
        let world = &self.shared.world;
        let mut stalls = Vec::new();
        for (rank, code) in world.loaded.codes.iter().enumerate() {
            let head = |stream: usize| code.queues[stream].get(world.ranks[rank].heads[stream].load(Ordering::Relaxed) as usize);
            if let Some(item) = head(world.ranks[rank].at.load(Ordering::Relaxed) as usize).filter(|_| stuck[rank]) {
                stalls.push(Stall { rank, stage: code.stage, instruction: self.describe(rank, *item), peers: Vec::new() });
                continue;
            }
            for (stream, queue) in Stream::ALL.iter().zip(&code.queues) {
                let Some(item) = queue.get(world.ranks[rank].heads[*stream as usize].load(Ordering::Relaxed) as usize) else { continue };
                let peers = match &code.actions[item.action as usize] {
                    Action::Meet { communicator, .. } => {
                        let present = |other: usize| !stuck[other] && self.is_at(other, *communicator, item.number);
                        world.loaded.communicators[*communicator].members.iter().copied().filter(|&m| m != rank && !present(m)).collect()
                    }
                    _ => Vec::new(),
                };
                stalls.push(Stall { rank, stage: code.stage, instruction: self.describe(rank, *item), peers });
            }
        }
        if stalls.iter().any(|s| !s.peers.is_empty()) {
            stalls.retain(|s| !s.peers.is_empty() || stuck[s.rank]);
        }
        stalls
    }

    /// Whether the head of some queue of `rank` is meeting `number` of a communicator.
    fn is_at(&self, rank: usize, communicator: usize, number: u32) -> bool {
        let (code, seen) = (&self.shared.world.loaded.codes[rank], &self.shared.world.ranks[rank]);
        code.queues.iter().zip(&seen.heads).any(|(queue, head)| {
            queue.get(head.load(Ordering::Relaxed) as usize).is_some_and(|item| {
                item.number == number && matches!(code.actions[item.action as usize], Action::Meet { communicator: c, .. } if c == communicator)
            })
        })
    }

    /// An instruction as the program's text shows it, and where it stands.
    fn describe(&self, rank: usize, item: Item) -> String {
        let code = &self.shared.world.loaded.codes[rank];
        let (segment, at) = code.origins[item.action as usize];
        shown(&self.graph, &self.program, code.stage as usize, (segment, at), u64::from(item.micro_batch))
    }

    fn idle(&self) -> Result<(), RuntimeError> {
        if self.shared.world.poisoned.load(Ordering::SeqCst) { Err(RuntimeError::Ended) } else { Ok(()) }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session of `{}` on {} ranks", self.graph.name, self.threads.len())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        self.shared.world.poison();
        for thread in self.threads.drain(..) {
            // A thread that is still in a kernel after a stall is left behind.
            if thread.is_finished() || self.shared.lock().running == 0 {
                let _ = thread.join();
            }
        }
        self.shared.world.porters.iter().flatten().for_each(Porter::quit);
        for porter in self.porters.drain(..) {
            // Nor is a disk that does not answer waited for.
            if porter.is_finished() || self.shared.lock().running == 0 {
                let _ = porter.join();
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Task> {
        // A panic while the lock is held leaves the task whole: it is only ever assigned to.
        self.task.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The life of a rank's thread.
    fn rank(&self, rank: usize) {
        let mut executor = Executor::new(&self.world, rank);
        let mut done = 0;
        self.lock().running += 1;
        self.finished.notify_all();
        loop {
            while self.begun.load(Ordering::SeqCst) == done {
                if self.quit.load(Ordering::SeqCst) {
                    return;
                }
                std::thread::park();
            }
            done += 1;
            let (scalars, batch) = {
                let task = self.lock();
                (task.scalars, task.batch.clone())
            };
            let (Some(scalars), Some(batch)) = (scalars, batch) else { return };
            let outcome = catch_unwind(AssertUnwindSafe(|| executor.step(&scalars, &batch)));
            drop(batch);
            let mut task = self.lock();
            match outcome {
                Ok(Ok(()) | Err(Poisoned)) => {}
                Err(panic) => {
                    task.panics.push(self.failure(rank, &*panic));
                    self.world.poison();
                }
            }
            task.running -= 1;
            if task.running == 0 {
                task.batch = None;
                self.finished.notify_all();
            }
            if self.world.poisoned.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    /// The life of the thread that carries a rank's bytes to its file and back.
    fn porter(&self, rank: usize) {
        self.lock().running += 1;
        self.finished.notify_all();
        if let (Some(porter), Some(file)) = (&self.world.porters[rank], self.world.arenas[rank].file()) {
            porter.carry(file, || self.world.wake(rank));
        }
    }

    fn failure(&self, rank: usize, panic: &(dyn Any + Send)) -> (usize, Option<Item>, String) {
        let why = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
        let seen = &self.world.ranks[rank];
        let stream = seen.at.load(Ordering::Relaxed) as usize;
        let item = self.world.loaded.codes[rank].queues[stream].get(seen.heads[stream].load(Ordering::Relaxed) as usize).copied();
        (rank, item, why.unwrap_or_else(|| "a panic".into()))
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
