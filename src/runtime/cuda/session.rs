//! The ranks of this process, from load to drop: all ranks of a program on a stand-in, one of them on a GPU.

use std::ops::Range;
use std::time::Instant;

use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::extent::Seat;
use dplan_ir::graph::Graph;
use dplan_ir::init;
use dplan_ir::optimizer::StepScalars;
use dplan_ir::program::{Content, Program, Role, Space};

use super::driver::Driver;
use super::rank::{Launch, Rank};
use crate::runtime::block::{Block, Stretch};
use crate::runtime::scratch::by_the_page_cache;
use crate::runtime::view::View;
use crate::runtime::{Batch, Options, RuntimeError, Span, StepResult};
use crate::safetensors::{decode, encode};

/// Ranks and their devices.
pub struct Session<D: Driver> {
    graph: Graph,
    program: Program,
    ranks: Vec<Rank<D>>,
    began: Instant,
    ended: bool,
}

impl<D: Driver> Session<D> {
    /// Makes ranks ready on their devices. All memory is zero.
    ///
    /// # Errors
    /// What in the program no kernel does, what a device refuses, and a folder that has no room for a file.
    pub fn new(graph: Graph, program: Program, drivers: Vec<(u64, D)>, options: &Options) -> Result<Session<D>, RuntimeError> {
        let one = |(rank, driver)| Rank::new(driver, &graph, &program, rank, options);
        let ranks = drivers.into_iter().map(one).collect::<Result<_, _>>()?;
        Ok(Session { graph, program, ranks, began: Instant::now(), ended: false })
    }

    /// How steps after the first are launched; to be said before the first.
    pub fn launch(&mut self, launch: Launch) {
        self.ranks.iter_mut().for_each(|rank| rank.launch(launch));
    }

    /// Sets every parameter to its deterministic initial value.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn initialise(&mut self, seed: u64) -> Result<(), RuntimeError> {
        let graph = self.graph.clone();
        self.load(Role::Param, |param| init::param(&graph, param, seed))
    }

    /// Sets a role of every parameter to the logical tensor that `provide` gives, one after the other; parameters also set their master copies.
    ///
    /// # Errors
    /// If a tensor has not as many elements as its parameter; what a device refuses, after which the session has ended.
    pub fn load(&mut self, role: Role, mut provide: impl FnMut(ParamId) -> Vec<f64>) -> Result<(), RuntimeError> {
        self.idle()?;
        let roles: &[Role] = if role == Role::Param { &[Role::Param, Role::Master] } else { &[role] };
        let mut homes: Table<ParamId, Vec<(usize, Home)>> = self.graph.params.map(|_, _| Vec::new());
        for at in 0..self.ranks.len() {
            for &role in roles {
                self.homes(at, role)?.into_iter().for_each(|home| homes[home.param].push((at, home)));
            }
        }
        for (param, homes) in homes.iter() {
            let (values, value) = (provide(param), self.graph.params[param].value);
            let expected = self.graph.shape(value).iter().product::<u64>() as usize;
            if values.len() != expected {
                return Err(RuntimeError::Param { param: self.graph.values[value].name.clone(), found: values.len(), expected });
            }
            for (at, home) in homes {
                let mut bytes = vec![0; home.held.len() * home.dtype.size() as usize];
                home.each(|s| (0..s.len).for_each(|i| encode(home.dtype, values[s.logical + i], &mut bytes, s.local + i)));
                let wrote = self.ranks[*at].write(home.space, home.offset, &bytes);
                self.noted(wrote)?;
            }
        }
        Ok(())
    }

    /// A role of every parameter as logical tensors; what no rank of this process has is not a number.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn gather(&mut self, role: Role) -> Result<Table<ParamId, Vec<f64>>, RuntimeError> {
        self.idle()?;
        let elems = |p: ParamId| self.graph.shape(self.graph.params[p].value).iter().product::<u64>() as usize;
        let mut values: Table<ParamId, Vec<f64>> = self.graph.params.ids().map(|p| vec![f64::NAN; elems(p)]).collect();
        for at in 0..self.ranks.len() {
            for home in self.homes(at, role)? {
                let mut bytes = vec![0; home.held.len() * home.dtype.size() as usize];
                let read = self.ranks[at].read(home.space, home.offset, &mut bytes);
                self.noted(read)?;
                let values = &mut values[home.param];
                home.each(|s| (0..s.len).for_each(|i| values[s.logical + i] = decode(home.dtype, &bytes, s.local + i)));
            }
        }
        Ok(values)
    }

    /// Runs a step on all ranks of this process. Loss and norm are those of its last rank that has them; without one, the loss is not a number.
    ///
    /// # Errors
    /// If the batch is not what a step takes; what a device refuses, after which the session has ended.
    pub fn step(&mut self, scalars: &StepScalars, batch: &Batch) -> Result<StepResult, RuntimeError> {
        self.idle()?;
        batch.check(&self.graph, self.program.micro_batches)?;
        let begin = Instant::now();
        for at in 0..self.ranks.len() {
            let queued = self.ranks[at].issue(&self.program, scalars, batch);
            self.noted(queued)?;
        }
        let (mut loss, mut grad_norm) = (f64::NAN, None);
        for at in 0..self.ranks.len() {
            let done = self.ranks[at].finish(&self.program);
            let done = done.map_err(|error| self.placed(at, error));
            let results = self.noted(done)?;
            loss = results.loss.unwrap_or(loss);
            grad_norm = results.norm_squared.map(|s| scalars.norm(s.sqrt())).or(grad_norm);
        }
        Ok(StepResult { loss, grad_norm, seconds: begin.elapsed().as_secs_f64() })
    }

    /// Nanoseconds since the session began.
    pub fn clock(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
    /// Takes what each rank of the program ran since this was last called; of ranks elsewhere nothing.
    pub fn take_spans(&mut self) -> Vec<Vec<Span>> {
        let mut spans = vec![Vec::new(); self.program.ranks() as usize];
        self.ranks.iter_mut().for_each(|rank| spans[rank.rank() as usize] = rank.take_spans());
        spans
    }
    /// The ranks that a span of a rank of this process met.
    pub fn members(&self, rank: usize, communicator: u32) -> Vec<usize> {
        let of = self.ranks.iter().find(|r| r.rank() == rank as u64);
        of.map(|r| r.members(&self.program, communicator as usize)).unwrap_or_default()
    }
    /// What a user should know of how it runs.
    pub fn remarks(&self) -> Vec<String> {
        self.ranks.iter().find_map(Rank::cached).map(by_the_page_cache).into_iter().collect()
    }

    pub fn ranks(&self) -> &[Rank<D>] {
        &self.ranks
    }

    /// What a device says of a step, with where its rank stands.
    fn placed(&mut self, at: usize, error: RuntimeError) -> RuntimeError {
        match error {
            RuntimeError::Device { rank, source, .. } => {
                RuntimeError::Device { rank, source, stalls: self.ranks[at].stalls(&self.graph, &self.program) }
            }
            other => other,
        }
    }
    fn idle(&self) -> Result<(), RuntimeError> {
        if self.ended { Err(RuntimeError::Ended) } else { Ok(()) }
    }
    /// After a failure no rank waits for another: what peers still do never ends.
    fn noted<T>(&mut self, result: Result<T, RuntimeError>) -> Result<T, RuntimeError> {
        if result.is_err() {
            self.ended = true;
            self.ranks.iter_mut().for_each(Rank::give_up);
        }
        result
    }

    /// Where a rank holds a role between steps.
    fn homes(&self, at: usize, role: Role) -> Result<Vec<Home>, RuntimeError> {
        let (stage, local_rank) = (self.ranks[at].stage(), self.ranks[at].local_rank());
        let view = View { graph: &self.graph, program: &self.program, stage, local_rank };
        let (mesh, padded) = (&self.program.mesh, &self.program.padded);
        let of_stage = view.of_stage();
        let mut homes = Vec::new();
        for (id, bucket) in of_stage.buckets.iter() {
            let Some(home) = of_stage.home(id, role) else { continue };
            let Content::Flat { pieces, .. } = of_stage.buffers[home].content else { continue };
            let (space, place) = view.anywhere(home).map_err(|why| RuntimeError::Program { stage: stage as u32, at: role.name().into(), why })?;
            let first = (mesh.position(local_rank, pieces) * (bucket.elems / mesh.size(pieces))) as usize;
            let end = first + place.elems() as usize;
            for member in &bucket.members {
                let dims = &self.graph.values[self.graph.params[member.param].value].ty.dims;
                let block = Block::new(&self.graph, dims, &member.sharding, Seat { mesh, padded, local_rank }, None);
                let begin = member.offset as usize;
                let (from, to) = (begin.max(first), (begin + block.elems()).min(end));
                if from < to {
                    let offset = place.offset + (from - first) as u64 * place.dtype.size();
                    homes.push(Home { param: member.param, space, offset, dtype: place.dtype, held: from - begin..to - begin, block });
                }
            }
        }
        Ok(homes)
    }
}

/// What a rank's memory holds of a parameter, in one piece.
struct Home {
    param: ParamId,
    space: Space,
    offset: u64,
    dtype: DType,
    /// Elements of the block that lie there, padding included.
    held: Range<usize>,
    block: Block,
}

impl Home {
    /// Visits what is held and no padding; `local` counts from the first that is held.
    fn each(&self, mut visit: impl FnMut(Stretch)) {
        self.block.each(|s| {
            let (from, to) = (s.local.max(self.held.start), (s.local + s.len).min(self.held.end));
            if from < to {
                visit(Stretch { local: from - self.held.start, logical: s.logical + from - s.local, len: to - from });
            }
        });
    }
}
