//! A program, on all its ranks at once, in one thread.
//!
//! Every rank has its own arena and executes its stage's streams as [`crate::program`] defines them, one instruction at a time: a stream's next instruction may
//! run when everything that its kind waits for is there (its record, its message, all members of its operation). Which of those that may run comes next is drawn
//! from a seed, with whole streams kept back at times, so an edge that a program lacks shows as a wrong result under some seed.
//!
//! Arenas hold an f64 for every two bytes: an element stands in the cell of its first byte and poisons its other cells, so reading at an offset, or in another
//! element type, gives NaN rather than a lucky number. All arithmetic is f64, whatever the types say; a `cast` alone rounds, since that is what it is for. Bytes that
//! were never written are NaN.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::dtype::DType;
use crate::entity::{BucketId, BufferId, Id, ParamId, SegmentId, Table};
use crate::extent::{Seat, context};
use crate::graph::Graph;
use crate::interp::ring::join;
use crate::interp::sharded::{block, concat, narrow, pad, reduce};
use crate::interp::{Tensor, op};
use crate::mesh::AxisSet;
use crate::optimizer::{self, DecayGroups, StepScalars, skips};
use crate::program::{Buffer, Channel, Content, Instr, Pattern, Program, Role, Scalar, StageProgram, Stream, Write};
use crate::sharding::{LocalType, Sharding, local_type};
use crate::splitmix;

/// What a step reports.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Report {
    pub loss: f64,
    /// Global gradient norm before clipping, of programs that compute it.
    pub grad_norm: Option<f64>,
}

#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Fault {
    #[error("no rank can go on; they wait at: {waiting}")]
    Stuck { waiting: String },
    #[error("ranks disagree about `{name}`: {here} and {there}")]
    Disagree { name: String, here: f64, there: f64 },
}

/// All ranks of a program.
pub struct ProgramRun<'a> {
    graph: &'a Graph,
    program: &'a Program,
    /// By rank: a cell for every two bytes.
    arenas: Vec<Vec<f64>>,
    /// Whether weight decay pulls a parameter.
    decays: Table<ParamId, bool>,
    random: u64,
}

/// An instruction of a stream, with what it depends on.
#[derive(Clone, Copy)]
struct Step {
    segment: SegmentId,
    at: usize,
    micro_batch: u64,
    needs: Needs,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// The instruction at a position of another stream of the rank.
    Done(usize, usize),
    /// The other members' operation of that number.
    Meet(u64),
}

/// How far a step is, and what it is given.
struct Progress<'s> {
    queues: Vec<Queues>,
    /// Instructions done, by rank and stream.
    done: Vec<[usize; Stream::ALL.len()]>,
    inputs: &'s [Vec<Tensor>],
    scalars: &'s StepScalars,
}

/// A stage's streams, in issue order.
type Queues = Vec<Vec<Step>>;

impl<'a> ProgramRun<'a> {
    /// All ranks, with zero moments and parameters not yet set. The program must verify.
    pub fn new(graph: &'a Graph, program: &'a Program, seed: u64) -> ProgramRun<'a> {
        let arena = |rank: u64| vec![f64::NAN; (program.stages[(rank / program.mesh.ranks()) as usize].end() / 2) as usize];
        let arenas = (0..program.ranks()).map(arena).collect();
        let mut run = ProgramRun { graph, program, arenas, decays: optimizer::decays(graph, DecayGroups::All), random: seed };
        for rank in 0..program.ranks() {
            let stage = run.stage(rank);
            for (bucket, role) in stage.buckets.ids().flat_map(|b| Role::ALL.map(|role| (b, role))) {
                if let Some(home) = stage.home(bucket, role) {
                    let elems = (stage.buffers[home].bytes / stage.buffers[home].dtype.size()) as usize;
                    run.write(rank, home, 0, &vec![0.0; elems]);
                }
            }
        }
        run
    }

    /// The same, where weight decay pulls only some parameters.
    pub fn decaying(self, decay: DecayGroups) -> ProgramRun<'a> {
        ProgramRun { decays: optimizer::decays(self.graph, decay), ..self }
    }

    /// Sets a parameter (and its master copy) everywhere.
    pub fn set_param(&mut self, param: ParamId, whole: &Tensor) {
        for role in [Role::Param, Role::Master] {
            for (rank, bucket, home) in self.homes(param, role) {
                let Some((offset, sharding)) = self.member(rank, bucket, param) else { continue };
                let padded = pad(whole, self.graph, self.graph.params[param].value, &self.program.padded);
                let data = block(&padded, &sharding, &self.program.mesh, self.local(rank)).data;
                for (i, &x) in data.iter().enumerate() {
                    if let Some(cell) = self.element(rank, home, offset + i as u64) {
                        self.arenas[rank as usize][cell] = x;
                    }
                }
            }
        }
    }

    /// A parameter, or the optimizer's state for it, put together from all ranks.
    ///
    /// # Errors
    /// [`Fault::Disagree`] if two ranks that hold the same element hold different numbers.
    pub fn state(&self, param: ParamId, role: Role) -> Result<Tensor, Fault> {
        let value = self.graph.params[param].value;
        let mut whole: Vec<Option<f64>> = vec![None; self.graph.shape(value).iter().product::<u64>() as usize];
        let shape = self.graph.shape(value);
        for (rank, bucket, home) in self.homes(param, role) {
            let Some((offset, sharding)) = self.member(rank, bucket, param) else { continue };
            let local = local_type(&self.graph.values[value].ty, &sharding, &self.program.padded, &self.program.mesh);
            let start: Vec<u64> =
                local.dims.iter().zip(&sharding.dims).map(|(n, &axes)| n * self.program.mesh.position(self.local(rank), axes)).collect();
            let mut index = vec![0; local.dims.len()];
            for i in 0..local.elems() {
                let global: Vec<u64> = index.iter().zip(&start).map(|(a, b)| a + b).collect();
                if let Some(cell) = self.element(rank, home, offset + i)
                    && global.iter().zip(&shape).all(|(g, n)| g < n)
                {
                    let at = global.iter().zip(&shape).fold(0, |at, (&g, &n)| at * n + g) as usize;
                    let here = self.arenas[rank as usize][cell];
                    match whole[at] {
                        Some(there) if there.to_bits() != here.to_bits() => {
                            return Err(Fault::Disagree { name: self.graph.values[value].name.clone(), here, there });
                        }
                        _ => whole[at] = Some(here),
                    }
                }
                crate::interp::tensor::advance(&mut index, &local.dims);
            }
        }
        Ok(Tensor::dense(&shape, whole.into_iter().map(|x| x.unwrap_or(f64::NAN)).collect()))
    }

    /// One training step; `micro_batches` holds the graph's whole inputs for each micro-batch.
    ///
    /// # Errors
    /// [`Fault::Stuck`] if the ranks wait for each other.
    pub fn step(&mut self, micro_batches: &[Vec<Tensor>], scalars: &StepScalars) -> Result<Report, Fault> {
        let ranks = self.program.ranks() as usize;
        let queues = self.program.stages.iter().map(queues).collect();
        let mut now = Progress { queues, done: vec![[0; Stream::ALL.len()]; ranks], inputs: micro_batches, scalars };
        let mut order: Vec<(usize, usize)> = (0..ranks).flat_map(|r| (0..Stream::ALL.len()).map(move |s| (r, s))).collect();
        for picks in 0.. {
            if picks % 32 == 0 {
                for i in (1..order.len()).rev() {
                    let other = self.draw(i as u64 + 1) as usize;
                    order.swap(i, other);
                }
            }
            let next = order.iter().find_map(|&at| self.ready(at, &now).map(|members| (at, members)));
            let Some(((rank, stream), members)) = next else { break };
            self.execute((rank, stream), &members, &now);
            for (rank, stream) in members {
                now.done[rank][stream] += 1;
            }
        }
        order.sort_unstable();
        let waits = |&(rank, stream): &(usize, usize)| {
            let step = self.head((rank, stream), &now)?;
            Some(format!("rank {rank} {} {}[{}] of micro-batch {}", Stream::ALL[stream].name(), step.segment, step.at, step.micro_batch))
        };
        let waiting: Vec<String> = order.iter().filter_map(waits).collect();
        if !waiting.is_empty() {
            return Err(Fault::Stuck { waiting: waiting.join("; ") });
        }
        Ok(Report {
            loss: self.scalar(Scalar::Loss).unwrap_or(f64::NAN),
            grad_norm: self.scalar(Scalar::NormSquared).map(|s| scalars.norm(s.sqrt())),
        })
    }

    /// The value of a scalar, on the first rank of the last stage that computes it.
    fn scalar(&self, scalar: Scalar) -> Option<f64> {
        self.program.stages.iter().enumerate().rev().find_map(|(index, stage)| {
            let buffer = stage.accumulates(scalar)?;
            Some(self.read(index as u64 * self.program.mesh.ranks(), buffer, 0)[0])
        })
    }

    /// If a stream's next instruction may run: the streams it runs on (of all members, for an operation of several ranks, in group order).
    fn ready(&self, (rank, stream): (usize, usize), now: &Progress) -> Option<Vec<(usize, usize)>> {
        let step = self.head((rank, stream), now)?;
        match step.needs {
            Needs::Nothing => Some(vec![(rank, stream)]),
            Needs::Done(of, position) => (now.done[rank][of] > position).then(|| vec![(rank, stream)]),
            Needs::Meet(number) => {
                let mine = meeting(self.stage_index(rank as u64) as u32, self.instr(rank as u64, step));
                let at = |member: u64| {
                    (0..Stream::ALL.len()).find_map(|s| {
                        let head = self.head((member as usize, s), now).filter(|head| head.needs == Needs::Meet(number))?;
                        let theirs = meeting(self.stage_index(member) as u32, self.instr(member, head));
                        (theirs == mine).then_some((member as usize, s))
                    })
                };
                self.members(rank as u64, step).into_iter().map(at).collect()
            }
        }
    }

    /// The ranks that take part in an operation, in group order.
    fn members(&self, rank: u64, step: Step) -> Vec<u64> {
        let (ranks, local) = (self.program.mesh.ranks(), self.local(rank));
        match self.instr(rank, step) {
            &Instr::Send { to, .. } => vec![rank, u64::from(to) * ranks + local],
            &Instr::Recv { from, .. } => vec![u64::from(from) * ranks + local, rank],
            Instr::Collective { axes, stages, .. } => {
                let stages = if stages.is_empty() { vec![self.stage_index(rank) as u32] } else { stages.clone() };
                let group = self.program.mesh.group(local, *axes);
                stages.iter().flat_map(|&s| group.iter().map(move |&l| u64::from(s) * ranks + l)).collect()
            }
            _ => vec![rank],
        }
    }

    /// The next instruction of a stream of a rank.
    fn head(&self, (rank, stream): (usize, usize), now: &Progress) -> Option<Step> {
        now.queues[self.stage_index(rank as u64)][stream].get(now.done[rank][stream]).copied()
    }

    fn execute(&mut self, at: (usize, usize), members: &[(usize, usize)], now: &Progress) {
        let Some(step) = self.head(at, now) else { return };
        let (rank, m) = (at.0 as u64, step.micro_batch);
        let scalars = &now.scalars.of(self.program.updates, m, self.program.micro_batches);
        match self.instr(rank, step) {
            Instr::Run { node, ins, outs, write, .. } => {
                let node = &self.graph.nodes[*node];
                let shardings = |buffers: &[BufferId]| buffers.iter().map(|&b| self.sharding(rank, b)).collect::<Vec<_>>();
                let (of_ins, of_outs) = (shardings(ins), shardings(outs));
                let seat = Seat { mesh: &self.program.mesh, padded: &self.program.padded, local_rank: self.local(rank) };
                let (i, o) = (of_ins.iter().collect::<Vec<_>>(), of_outs.iter().collect::<Vec<_>>());
                let ctx = context(self.graph, node, &i, &o, seat, scalars.inv_tokens).scaled(scalars.loss_scale);
                let sequences = self.graph.batch.map_or(0, |d| self.graph.size(d));
                let ctx = ctx.drawing(scalars.draws.after(m * sequences));
                let operands: Vec<Tensor> = ins.iter().map(|&b| self.tensor(rank, b, m)).collect();
                let types: Vec<LocalType> = node.outputs.iter().zip(&of_outs).map(|(&v, s)| self.local_type(&self.graph.values[v].ty, s)).collect();
                let results = op::eval(&node.op, &ctx, &operands.iter().collect::<Vec<_>>(), &types);
                for (&buffer, result) in outs.iter().zip(results) {
                    match write {
                        Write::Set => self.write(rank, buffer, m, &result.data),
                        Write::Add => self.add(rank, buffer, m, &result.data),
                    }
                }
            }
            &Instr::Input { dst } => {
                if let Content::Value { value, sharding } = &self.buffer(rank, dst).content {
                    let at = self.graph.inputs.iter().position(|v| v == value).unwrap_or(0);
                    let padded = pad(&now.inputs[m as usize][at], self.graph, *value, &self.program.padded);
                    let data = block(&padded, sharding, &self.program.mesh, self.local(rank)).data;
                    self.write(rank, dst, m, &data);
                }
            }
            &Instr::Slice { src, dst, axes, dim } => {
                let (at, ways) = (self.program.mesh.position(self.local(rank), axes), self.program.mesh.size(axes));
                let part = narrow(&self.tensor(rank, src, m), dim as usize, at, ways);
                self.write(rank, dst, m, &part.data);
            }
            Instr::Collective { pattern, axes, stages, dim, monoid, .. } => {
                let (dim, monoid) = (*dim as usize, *monoid);
                let end = |&at: &(usize, usize)| {
                    let step = self.head(at, now)?;
                    match self.instr(at.0 as u64, step) {
                        Instr::Collective { src, dst, .. } => Some((at.0 as u64, *src, *dst, step.micro_batch)),
                        _ => None,
                    }
                };
                let ends: Vec<_> = members.iter().filter_map(end).collect();
                let blocks: Vec<Tensor> = ends.iter().map(|&(member, src, _, m)| self.tensor(member, src, m)).collect();
                let blocks: Vec<&Tensor> = blocks.iter().collect();
                let ways = self.program.mesh.size(*axes) * stages.len().max(1) as u64;
                let result = |position: u64| match pattern {
                    Pattern::AllReduce => reduce(&blocks, monoid),
                    Pattern::ReduceScatter => narrow(&reduce(&blocks, monoid), dim, position, ways),
                    Pattern::AllGather => concat(&blocks, dim),
                    Pattern::Shift => blocks[((position + ways - 1) % ways) as usize].clone(),
                    Pattern::AllToAll => {
                        let shares: Vec<Tensor> = blocks.iter().map(|block| narrow(block, dim, position, ways)).collect();
                        concat(&shares.iter().collect::<Vec<_>>(), dim)
                    }
                };
                let results: Vec<Tensor> = (0..ends.len() as u64).map(result).collect();
                for (&(member, _, dst, m), result) in ends.iter().zip(results) {
                    self.write(member, dst, m, &result.data);
                }
            }
            Instr::Send { .. } | Instr::Recv { .. } => {
                let (from, to) = (members[0], members[1]);
                if let (Some(send), Some(recv)) = (self.head(from, now), self.head(to, now))
                    && let (&Instr::Send { src, .. }, &Instr::Recv { dst, .. }) = (self.instr(from.0 as u64, send), self.instr(to.0 as u64, recv))
                {
                    let data = self.read(from.0 as u64, src, send.micro_batch);
                    self.write(to.0 as u64, dst, recv.micro_batch, &data);
                }
            }
            &Instr::Zero { dst } => {
                let buffer = self.buffer(rank, dst);
                let zeros = vec![0.0; (buffer.bytes / buffer.dtype.size()) as usize];
                self.write(rank, dst, m, &zeros);
            }
            &Instr::Copy { src, dst } => {
                let [from, to] = [src, dst].map(|b| (self.buffer(rank, b).offset_at(m, &self.program.mesh, self.local(rank)) / 2) as usize);
                let bytes = self.buffer(rank, src).bytes;
                self.arenas[rank as usize].copy_within(from..from + (bytes / 2) as usize, to);
            }
            &Instr::AddInto { src, dst } => {
                let data = self.read(rank, src, m);
                self.add(rank, dst, m, &data);
            }
            Instr::Join { monoid, left, right, dst } => {
                let [left, right] = [left, right].map(|of| of.iter().map(|&b| self.tensor(rank, b, m)).collect::<Vec<_>>());
                for (&buffer, joined) in dst.iter().zip(join(*monoid, &left, &right)) {
                    self.write(rank, buffer, m, &joined.data);
                }
            }
            &Instr::Cast { src, dst } => {
                let dtype = self.buffer(rank, dst).dtype;
                let data: Vec<f64> = self.read(rank, src, m).into_iter().map(|x| dtype.round(x)).collect();
                self.write(rank, dst, m, &data);
            }
            &Instr::Compress { src, residual, dst } => {
                let mut left = self.read(rank, residual, m);
                left.iter_mut().zip(self.read(rank, src, m)).for_each(|(left, grad)| *left += grad);
                let kept = self.cells(rank, dst, m).2 / 2;
                let pairs = largest(&left, kept);
                pairs.iter().for_each(|&(at, _)| left[at] = 0.0);
                let data: Vec<f64> = pairs.iter().map(|p| p.1).chain(pairs.iter().map(|p| p.0 as f64)).collect();
                self.write(rank, dst, m, &data);
                self.write(rank, residual, m, &left);
                self.write(rank, src, m, &vec![f64::NAN; left.len()]);
            }
            &Instr::SumShares { src, dst } if let Content::Wire { kept: Some(kept), .. } = self.buffer(rank, src).content => {
                let (pairs, (_, _, elems)) = (self.read(rank, src, m), self.cells(rank, dst, m));
                let Content::Flat { pieces, .. } = self.buffer(rank, dst).content else { return };
                let start = self.program.mesh.position(self.local(rank), pieces) as usize * elems;
                let mut sum = vec![0.0; elems];
                for (values, places) in pairs.chunks(2 * kept as usize).map(|of| of.split_at(kept as usize)) {
                    for (value, &place) in values.iter().zip(places) {
                        if let Some(at) = (place as usize).checked_sub(start).filter(|&at| at < elems) {
                            sum[at] += value;
                        }
                    }
                }
                self.write(rank, dst, m, &sum);
            }
            &Instr::SumShares { src, dst } => {
                let (shares, (_, _, elems)) = (self.read(rank, src, m), self.cells(rank, dst, m));
                let (first, others) = shares.split_at(elems);
                let add = |sum: Vec<f64>, share: &[f64]| sum.iter().zip(share).map(|(a, b)| a + b).collect();
                let sum = others.chunks(elems).fold(first.to_vec(), add);
                self.write(rank, dst, m, &sum);
            }
            &Instr::SquareSum { src, dst, once } => {
                if self.program.mesh.position(self.local(rank), once) == 0 {
                    let sum = self.read(rank, src, m).iter().map(|x| x * x).sum::<f64>();
                    self.add(rank, dst, m, &[sum]);
                }
            }
            &Instr::ClipScale { src, dst } => {
                let norm = self.read(rank, src, m)[0].sqrt();
                self.write(rank, dst, m, &[scalars.gradient_scale(norm)]);
            }
            Instr::TrustSums { state, grad, moments, scale, dst } => {
                let scale = scale.map_or(1.0, |b| self.read(rank, b, m)[0]);
                let (values, grad) = (self.read(rank, *state, m), self.read(rank, *grad, m));
                let of: Vec<Vec<f64>> = moments.iter().map(|&b| self.read(rank, b, m)).collect();
                let mut sums = vec![0.0; (self.buffer(rank, *dst).bytes / self.buffer(rank, *dst).dtype.size()) as usize];
                for (member, range, pulled) in self.parts(rank, *state) {
                    let scalars = if pulled { *scalars } else { scalars.without_decay() };
                    for i in range {
                        let moment = |at: usize| of.get(at).map_or(0.0, |m| m[i]);
                        let terms = optimizer::trust_terms(values[i], grad[i] * scale, [moment(0), moment(1)], &scalars);
                        terms.iter().enumerate().for_each(|(at, term)| sums[2 * member + at] += term);
                    }
                }
                self.write(rank, *dst, m, &sums);
            }
            Instr::Update { state, grad, moments, param, scale, trust } => {
                let scale = scale.map_or(1.0, |b| self.read(rank, b, m)[0]);
                if skips(scale) {
                    return;
                }
                let trust = trust.map(|b| self.read(rank, b, m));
                let grad = self.read(rank, *grad, m);
                let mut values = self.read(rank, *state, m);
                let mut of: Vec<Vec<f64>> = moments.iter().map(|&b| self.read(rank, b, m)).collect();
                for (member, range, pulled) in self.parts(rank, *state) {
                    let scalars = if pulled { *scalars } else { scalars.without_decay() };
                    let trust = trust.as_ref().map_or(1.0, |sums| optimizer::trust_ratio([sums[2 * member], sums[2 * member + 1]]));
                    for i in range {
                        let moment = |at: usize| of.get(at).map_or(0.0, |m| m[i]);
                        let Some(optimizer) = self.program.optimizer else { continue };
                        let (new, next) = optimizer::update(optimizer, values[i], grad[i] * scale, [moment(0), moment(1)], &scalars, trust);
                        values[i] = new;
                        of.iter_mut().zip(next).for_each(|(m, new)| m[i] = new);
                    }
                }
                moments.iter().zip(&of).for_each(|(&b, data)| self.write(rank, b, m, data));
                [state].into_iter().chain(param).for_each(|&b| self.write(rank, b, m, &values));
            }
            Instr::Record(_) | Instr::Wait(_) => {}
        }
    }

    /// The elements of a rank's flat buffer by member of its bucket, and whether weight decay pulls them.
    fn parts(&self, rank: u64, state: BufferId) -> Vec<(usize, Range<usize>, bool)> {
        let buffer = self.buffer(rank, state);
        let Content::Flat { bucket, pieces, .. } = buffer.content else { return Vec::new() };
        let (len, bucket) = (buffer.bytes / buffer.dtype.size(), &self.stage(rank).buckets[bucket]);
        let start = self.program.mesh.position(self.local(rank), pieces) * len;
        bucket.parts(start, len).into_iter().map(|(at, range)| (at, range, self.decays[bucket.members[at].param])).collect()
    }

    fn stage_index(&self, rank: u64) -> usize {
        (rank / self.program.mesh.ranks()) as usize
    }
    fn stage(&self, rank: u64) -> &'a StageProgram {
        &self.program.stages[self.stage_index(rank)]
    }
    fn local(&self, rank: u64) -> u64 {
        rank % self.program.mesh.ranks()
    }
    fn instr(&self, rank: u64, step: Step) -> &'a Instr {
        &self.stage(rank).segments[step.segment].body[step.at].instr
    }
    fn buffer(&self, rank: u64, id: BufferId) -> &'a Buffer {
        &self.stage(rank).buffers[id]
    }

    /// A number below `n`.
    fn draw(&mut self, n: u64) -> u64 {
        splitmix::next(&mut self.random) % n
    }

    /// Ranks that have a home for a role of a parameter.
    fn homes(&self, param: ParamId, role: Role) -> Vec<(u64, BucketId, BufferId)> {
        let of = |rank: u64| {
            let stage = self.stage(rank);
            let bucket = stage.buckets.iter().find(|(_, b)| b.members.iter().any(|m| m.param == param))?.0;
            stage.home(bucket, role).map(|home| (rank, bucket, home))
        };
        (0..self.program.ranks()).filter_map(of).collect()
    }
    fn member(&self, rank: u64, bucket: BucketId, param: ParamId) -> Option<(u64, Sharding)> {
        let member = self.stage(rank).buckets[bucket].members.iter().find(|m| m.param == param)?;
        Some((member.offset, member.sharding.clone()))
    }
    /// The cell of an element of a flat buffer, if the rank has it.
    fn element(&self, rank: u64, id: BufferId, elem: u64) -> Option<usize> {
        let buffer = self.buffer(rank, id);
        let Content::Flat { pieces, .. } = buffer.content else { return None };
        let elems = buffer.bytes / buffer.dtype.size();
        let at = elem.checked_sub(self.program.mesh.position(self.local(rank), pieces) * elems).filter(|&at| at < elems)?;
        Some(((buffer.offset_at(0, &self.program.mesh, self.local(rank)) + at * buffer.dtype.size()) / 2) as usize)
    }

    fn sharding(&self, rank: u64, id: BufferId) -> Sharding {
        match &self.buffer(rank, id).content {
            Content::Value { sharding, .. } => sharding.clone(),
            &Content::Member { bucket, param, .. } => self.member(rank, bucket, param).map_or_else(|| Sharding::replicated(0), |(_, s)| s),
            Content::Flat { .. } | Content::Trust { .. } | Content::Wire { .. } => Sharding::replicated(1),
            Content::Scalar(_) | Content::Frame | Content::Scratch => Sharding::replicated(0),
        }
    }
    fn local_type(&self, ty: &crate::graph::Type, sharding: &Sharding) -> LocalType {
        LocalType { dtype: DType::F64, ..local_type(ty, sharding, &self.program.padded, &self.program.mesh) }
    }
    /// A buffer's elements, in the shape of what it claims to hold.
    fn tensor(&self, rank: u64, id: BufferId, micro_batch: u64) -> Tensor {
        let data = self.read(rank, id, micro_batch);
        let ty = match &self.buffer(rank, id).content {
            Content::Value { value, .. } => &self.graph.values[*value].ty,
            Content::Member { param, .. } => &self.graph.values[self.graph.params[*param].value].ty,
            Content::Flat { .. } | Content::Trust { .. } | Content::Wire { .. } => return Tensor::dense(&[data.len() as u64], data),
            Content::Scalar(_) | Content::Frame | Content::Scratch => return Tensor::dense(&[], data),
        };
        let local = self.local_type(ty, &self.sharding(rank, id));
        Tensor { dims: local.dims, layout: local.layout, data }
    }

    fn cells(&self, rank: u64, id: BufferId, micro_batch: u64) -> (usize, usize, usize) {
        let buffer = self.buffer(rank, id);
        let start = buffer.offset_at(micro_batch, &self.program.mesh, self.local(rank));
        ((start / 2) as usize, (buffer.dtype.size() / 2) as usize, (buffer.bytes / buffer.dtype.size()) as usize)
    }
    fn read(&self, rank: u64, id: BufferId, micro_batch: u64) -> Vec<f64> {
        let (start, width, elems) = self.cells(rank, id, micro_batch);
        (0..elems).map(|i| self.arenas[rank as usize][start + i * width]).collect()
    }
    fn write(&mut self, rank: u64, id: BufferId, micro_batch: u64, data: &[f64]) {
        let (start, width, _) = self.cells(rank, id, micro_batch);
        for (i, &x) in data.iter().enumerate() {
            let cells = &mut self.arenas[rank as usize][start + i * width..start + (i + 1) * width];
            cells.fill(f64::NAN);
            cells[0] = x;
        }
    }
    fn add(&mut self, rank: u64, id: BufferId, micro_batch: u64, data: &[f64]) {
        let sum: Vec<f64> = self.read(rank, id, micro_batch).iter().zip(data).map(|(a, b)| a + b).collect();
        self.write(rank, id, micro_batch, &sum);
    }
}

/// The so many largest by magnitude, of equal ones the first, with their places and in the order of these. What is no number is larger than all numbers.
pub fn largest(of: &[f64], count: usize) -> Vec<(usize, f64)> {
    let mut places: Vec<usize> = (0..of.len()).collect();
    places.sort_by(|&a, &b| of[b].abs().total_cmp(&of[a].abs()).then(a.cmp(&b)));
    places.truncate(count);
    places.sort_unstable();
    places.into_iter().map(|at| (at, of[at])).collect()
}

/// What names the communicator of an operation of several ranks, the same for all of them.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Meeting {
    Channel(u32, u32, Channel),
    /// Axes and stages.
    Group(AxisSet, Vec<u32>),
}

fn meeting(stage: u32, instr: &Instr) -> Option<Meeting> {
    match instr {
        &Instr::Send { to, channel, .. } => Some(Meeting::Channel(stage, to, channel)),
        &Instr::Recv { from, channel, .. } => Some(Meeting::Channel(from, stage, channel)),
        Instr::Collective { axes, stages, .. } => Some(Meeting::Group(*axes, stages.clone())),
        _ => None,
    }
}

fn queues(stage: &StageProgram) -> Queues {
    let mut queues: Queues = vec![Vec::new(); Stream::ALL.len()];
    let mut latest: Vec<Option<(usize, usize)>> = vec![None; stage.events as usize];
    let mut numbers: BTreeMap<Meeting, u64> = BTreeMap::new();
    for call in &stage.schedule {
        for (at, issue) in stage.segments[call.segment].body.iter().enumerate() {
            let stream = issue.stream as usize;
            let needs = match &issue.instr {
                Instr::Record(event) => {
                    latest[event.index()] = Some((stream, queues[stream].len()));
                    Needs::Nothing
                }
                Instr::Wait(event) => latest[event.index()].map_or(Needs::Nothing, |(of, position)| Needs::Done(of, position)),
                // Stage numbers only tell messages to and from this stage apart.
                other => match meeting(u32::MAX, other) {
                    Some(meeting) => {
                        let number = numbers.entry(meeting).or_insert(0);
                        *number += 1;
                        Needs::Meet(*number)
                    }
                    None => Needs::Nothing,
                },
            };
            queues[stream].push(Step { segment: call.segment, at, micro_batch: call.micro_batch, needs });
        }
    }
    queues
}
