//! The ranks of this process, from load to drop: all ranks of a program on a stand-in, one of them on a GPU.

use std::time::Instant;

use dplan_ir::entity::{ParamId, Table};
use dplan_ir::extent::Seat;
use dplan_ir::graph::Graph;
use dplan_ir::init;
use dplan_ir::optimizer::{DecayGroups, StepScalars};
use dplan_ir::program::{Content, Program, Role};

use super::driver::Driver;
use super::numbers::{decode, encode};
use super::rank::Rank;
use crate::runtime::block::Block;
use crate::runtime::view::{Place, View};
use crate::runtime::{Batch, RuntimeError, StepResult};

/// Ranks and their devices.
pub struct Session<D: Driver> {
    graph: Graph,
    program: Program,
    ranks: Vec<Rank<D>>,
    ended: bool,
}

impl<D: Driver> Session<D> {
    /// Makes ranks ready on their devices. All memory is zero.
    ///
    /// # Errors
    /// What in the program no kernel does, and what a device refuses.
    pub fn new(graph: Graph, program: Program, drivers: Vec<(u64, D)>, decay: DecayGroups) -> Result<Session<D>, RuntimeError> {
        let one = |(rank, driver)| Rank::new(driver, &graph, &program, rank, decay);
        let ranks = drivers.into_iter().map(one).collect::<Result<_, _>>()?;
        Ok(Session { graph, program, ranks, ended: false })
    }

    /// Sets every parameter to its deterministic initial value.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn initialise(&mut self, seed: u64) -> Result<(), RuntimeError> {
        let graph = self.graph.clone();
        self.load(Role::Param, |param| init::param(&graph, param, seed))
    }

    /// Sets a role of every parameter to the logical tensor that `provide` gives; parameters also set their master copies.
    ///
    /// # Errors
    /// What a device refuses; after that the session has ended.
    pub fn load(&mut self, role: Role, mut provide: impl FnMut(ParamId) -> Vec<f64>) -> Result<(), RuntimeError> {
        self.idle()?;
        let values: Table<ParamId, Vec<f64>> = self.graph.params.ids().map(&mut provide).collect();
        let roles: &[Role] = if role == Role::Param { &[Role::Param, Role::Master] } else { &[role] };
        for at in 0..self.ranks.len() {
            for &role in roles {
                for home in self.homes(at, role)? {
                    let size = home.place.dtype.size() as usize;
                    let mut bytes = vec![0; home.place.bytes as usize];
                    for s in &home.stretches {
                        let to = bytes[s.local * size..(s.local + s.len) * size].chunks_exact_mut(size);
                        to.zip(&values[s.param][s.logical..]).for_each(|(to, v)| encode(*v, home.place.dtype, to));
                    }
                    let wrote = self.ranks[at].write(home.place.offset, &bytes);
                    self.noted(wrote)?;
                }
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
                let size = home.place.dtype.size() as usize;
                let mut bytes = vec![0; home.place.bytes as usize];
                let read = self.ranks[at].read(home.place.offset, &mut bytes);
                self.noted(read)?;
                for s in &home.stretches {
                    let from = bytes[s.local * size..(s.local + s.len) * size].chunks_exact(size);
                    values[s.param][s.logical..].iter_mut().zip(from).for_each(|(v, from)| *v = decode(from, home.place.dtype));
                }
            }
        }
        Ok(values)
    }

    /// Runs a step on all ranks of this process. Loss and norm are those of its last rank that has them.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn step(&mut self, scalars: &StepScalars, batch: &Batch) -> Result<StepResult, RuntimeError> {
        self.idle()?;
        let begin = Instant::now();
        for at in 0..self.ranks.len() {
            let queued = self.ranks[at].issue(&self.program, scalars, batch);
            self.noted(queued)?;
        }
        let (mut loss, mut grad_norm) = (f64::NAN, None);
        for at in 0..self.ranks.len() {
            let done = self.ranks[at].finish(&self.program);
            let results = self.noted(done)?;
            loss = results.loss.unwrap_or(loss);
            grad_norm = results.norm_squared.map(|s| scalars.norm(s.sqrt())).or(grad_norm);
        }
        Ok(StepResult { loss, grad_norm, seconds: begin.elapsed().as_secs_f64() })
    }

    pub fn ranks(&self) -> &[Rank<D>] {
        &self.ranks
    }

    fn idle(&self) -> Result<(), RuntimeError> {
        if self.ended { Err(RuntimeError::Ended) } else { Ok(()) }
    }
    fn noted<T>(&mut self, result: Result<T, RuntimeError>) -> Result<T, RuntimeError> {
        self.ended |= result.is_err();
        result
    }

    /// Where a rank holds a role between steps, and which elements of which tensors lie there.
    fn homes(&self, at: usize, role: Role) -> Result<Vec<Home>, RuntimeError> {
        let (stage, local_rank) = (self.ranks[at].stage(), self.ranks[at].local_rank());
        let view = View { graph: &self.graph, program: &self.program, stage, local_rank };
        let (mesh, padded) = (&self.program.mesh, &self.program.padded);
        let of_stage = view.of_stage();
        let mut homes = Vec::new();
        for (id, bucket) in of_stage.buckets.iter() {
            let Some(home) = of_stage.home(id, role) else { continue };
            let Content::Flat { pieces, .. } = of_stage.buffers[home].content else { continue };
            let place = view.place(home).map_err(|why| RuntimeError::Program { stage: stage as u32, at: role.name().into(), why })?;
            let first = (mesh.position(local_rank, pieces) * (bucket.elems / mesh.size(pieces))) as usize;
            let held = first..first + place.elems() as usize;
            let mut stretches = Vec::new();
            for member in &bucket.members {
                let dims = &self.graph.values[self.graph.params[member.param].value].ty.dims;
                let block = Block::new(&self.graph, dims, &member.sharding, Seat { mesh, padded, local_rank }, None);
                block.each(|s| {
                    let at = member.offset as usize + s.local;
                    let (from, to) = (at.max(held.start), (at + s.len).min(held.end));
                    if from < to {
                        stretches.push(Stretch { param: member.param, local: from - held.start, logical: s.logical + from - at, len: to - from });
                    }
                });
            }
            homes.push(Home { place, stretches });
        }
        Ok(homes)
    }
}

/// A flat buffer of one role.
struct Home {
    place: Place,
    stretches: Vec<Stretch>,
}

/// Elements that stand together both in a home and in a tensor.
struct Stretch {
    param: ParamId,
    local: usize,
    logical: usize,
    len: usize,
}
