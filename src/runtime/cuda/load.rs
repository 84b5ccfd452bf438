//! From a program to the actions of one rank.
//!
//! NCCL reduces sums and maxima of contiguous ranges and knows only whole ranges of equal parts. So
//! - a scatter or gather of an inner dim is packed into blocks of ranks (or unpacked from them) by a kernel, in working memory;
//! - a log-sum-exp is gathered, then merged by a kernel in group order.

use std::collections::HashMap;
use std::ops::Range;

use dplan_ir::entity::{BufferId, EventId, ParamId, SegmentId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{DecayGroups, decays};
use dplan_ir::program::{Instr, Issue, Pattern, Program, Space, Stream, Updates, Write};
use dplan_ir::sharding::{LocalType, Monoid};
use dplan_kernels::cuda::flat::{self, Way};
use dplan_kernels::cuda::{Alignment, Descriptor, Epilogue, PrepareError, Routine, Tail, Target, prepare, rows};

use super::fuse::{self, Chain, Step};
use super::groups::{Family, families};
use crate::runtime::RuntimeError;
use crate::runtime::block::Block;
use crate::runtime::scratch;
use crate::runtime::view::{Place, View};

/// An instruction made ready for one rank.
#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// Kernels, in order; their operands and results.
    Run {
        routine: Routine,
        ins: Vec<Place>,
        outs: Vec<Place>,
    },
    /// The block of a graph input, from the host; micro-batches are `step` elements apart.
    Input {
        dst: Place,
        input: usize,
        block: Block,
        step: u64,
    },
    /// `dst[outer, len] = src[outer, start..start + len]` of rows of `row` bytes.
    Slice {
        src: Place,
        dst: Place,
        row: u64,
        start: u64,
        len: u64,
    },
    /// Between the device and another of the rank's memories; in is towards the device.
    Copy {
        way: scratch::Way,
        device: Place,
        away: Away,
    },
    Collective(Collective),
    Send(Transfer),
    Recv(Transfer),
    Zero {
        dst: Place,
    },
    Record(EventId),
    Wait(EventId),
    /// Done by the kernel of the instruction at this place of the segment: a later one ([`super::fuse`]), or one before it ([`super::rows`]).
    Within(usize),
    /// Another rank's business.
    Nothing,
}

/// A place that is not on the device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Away {
    Host(Place),
    File(Place),
}

/// One side of a message between stages.
#[derive(Clone, PartialEq, Debug)]
pub struct Transfer {
    /// Which of [`Code::families`] the two meet in.
    pub family: usize,
    /// The other's position: the sender is 0, the receiver 1.
    pub peer: u64,
    pub place: Place,
}

/// What NCCL is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduction {
    Sum,
    Max,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Primitive {
    AllReduce(Reduction),
    /// Every rank sends `elems` × ranks and receives `elems`.
    ReduceScatter(Reduction),
    /// Every rank sends `elems` and receives `elems` × ranks.
    AllGather,
    /// Every rank sends `elems` to each, and receives as many.
    AllToAll,
    /// Every rank sends `elems` to the next, and receives as many from the one before.
    Shift,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Collective {
    /// Which of [`Code::families`] the ranks meet in.
    pub family: usize,
    pub primitive: Primitive,
    /// As the primitive counts them.
    pub elems: u64,
    pub src: Place,
    pub dst: Place,
    /// From `src` into working memory, which the primitive then reads.
    pub before: Option<Routine>,
    /// From working memory, which the primitive writes, into `dst`.
    pub after: Option<Routine>,
    /// Bytes of working memory that it needs besides that of its kernels.
    pub staging: u64,
}

/// The actions of one rank, segment by segment, each with its stream.
pub struct Code {
    pub rank: u64,
    pub stage: usize,
    pub local_rank: u64,
    /// Of the whole program, in the order in which every rank makes them.
    pub families: Vec<Family>,
    pub segments: Vec<Vec<(Stream, Action)>>,
    /// Working memory that the actions of each stream need at most, bytes.
    pub working: [u64; Stream::ALL.len()],
}

/// Makes the program of one rank ready, with kernels for `target`. `decay`: which parameters weight decay pulls.
///
/// # Errors
/// What in the program no kernel and no collective does.
pub fn load(graph: &Graph, program: &Program, stage: usize, local_rank: u64, decay: DecayGroups, target: Target) -> Result<Code, RuntimeError> {
    let of = Of { view: View { graph, program, stage, local_rank }, decays: decays(graph, decay), families: families(program), target };
    let rank = stage as u64 * program.mesh.ranks() + local_rank;
    match program.updates {
        Updates::Step => {}
        Updates::MicroBatch => {
            let why = "an update behind each micro-batch (schedule pipedream) takes scalars of its own, and a step on a GPU has one set: run it on CPU ranks".into();
            return Err(RuntimeError::Program { stage: stage as u32, at: "schedule".into(), why });
        }
    }
    let (mut segments, mut working) = (Vec::new(), [0; Stream::ALL.len()]);
    let buffers = fuse::Buffers::new(&of.view);
    for (id, segment) in program.stages[stage].segments.iter() {
        let mut fused = HashMap::new();
        for chain in buffers.chains(id) {
            let failed = |why| RuntimeError::Program { stage: stage as u32, at: place_of(program, stage, id, chain.product), why };
            fused.extend(of.fused(&segment.body, &chain).map_err(failed)?);
        }
        let place = |(&at, action): (&usize, &Action)| (at, if let Action::Within(to) = action { *to } else { at });
        let moved = fused.iter().map(place).collect();
        let touched = fuse::touched(&segment.body);
        for chain in buffers.row_chains(id, &moved) {
            let failed = |why| RuntimeError::Program { stage: stage as u32, at: place_of(program, stage, id, chain[0]), why };
            fused.extend(of.joined(&buffers, &touched, &segment.body, &chain).map_err(failed)?);
        }
        let mut actions = Vec::with_capacity(segment.body.len());
        for (at, issue) in segment.body.iter().enumerate() {
            let failed = |why| RuntimeError::Program { stage: stage as u32, at: place_of(program, stage, id, at), why };
            let action = fused.remove(&at).map_or_else(|| action(&of, &issue.instr), Ok).map_err(failed)?;
            let working: &mut u64 = &mut working[issue.stream as usize];
            *working = (*working).max(action.working_bytes());
            actions.push((issue.stream, action));
        }
        segments.push(actions);
    }
    Ok(Code { rank, stage, local_rank, families: of.families, segments, working })
}

/// Whose actions are made, which parameters weight decay pulls, how ranks meet, and what kernels are for.
struct Of<'a> {
    view: View<'a>,
    decays: Table<ParamId, bool>,
    families: Vec<Family>,
    target: Target,
}

fn place_of(program: &Program, stage: usize, segment: SegmentId, at: usize) -> String {
    format!("{} {segment}, instruction {at}", program.stages[stage].segments[segment].kind.name())
}

impl Action {
    /// The kernels it launches.
    pub fn routines(&self) -> impl Iterator<Item = &Routine> {
        let [first, second] = match self {
            Action::Run { routine, .. } => [Some(routine), None],
            Action::Collective(c) => [c.before.as_ref(), c.after.as_ref()],
            Action::Input { .. }
            | Action::Slice { .. }
            | Action::Copy { .. }
            | Action::Send(_)
            | Action::Recv(_)
            | Action::Zero { .. }
            | Action::Record(_)
            | Action::Wait(_)
            | Action::Within(_)
            | Action::Nothing => [None, None],
        };
        first.into_iter().chain(second)
    }
    fn working_bytes(&self) -> u64 {
        let staging = match self {
            Action::Collective(c) => c.staging,
            _ => 0,
        };
        staging.next_multiple_of(256) + self.routines().map(|r| r.aux).max().unwrap_or(0)
    }
}

fn action(of: &Of<'_>, instr: &Instr) -> Result<Action, String> {
    let view = &of.view;
    let mesh = &view.program.mesh;
    let place = |id: &BufferId| view.place(*id);
    let places = |ids: &[BufferId]| ids.iter().map(place).collect::<Result<Vec<_>, _>>();
    let run = |routine: Routine, ins: Vec<Place>, outs: Vec<Place>| Action::Run { routine, ins, outs };
    Ok(match instr {
        // Kernels take no scratch: their working memory is not the program's.
        Instr::Run { node, ins, outs, scratch: _, write } => {
            let local = view.local(*node, ins, outs)?;
            let (ins, outs) = (places(ins)?, places(outs)?);
            let descriptor = Descriptor {
                op: &local.node.op,
                context: &local.context,
                ins: &local.ins,
                outs: &local.outs,
                write: *write,
                alignment: alignment(&[&ins[..], &outs[..]].concat()),
                target: of.target,
                epilogue: Epilogue::default(),
            };
            run(prepare(&descriptor).map_err(|e| e.to_string())?, ins, outs)
        }
        Instr::Input { dst } => {
            let (input, block, step) = view.input(*dst)?;
            Action::Input { dst: place(dst)?, input, block, step }
        }
        Instr::Slice { src, dst, axes, dim } => {
            let [_, row] = view.shape(*src, *dim)?;
            let (src, dst) = (place(src)?, place(dst)?);
            let (row, ways) = (row * src.dtype.size(), mesh.size(*axes));
            if !row.is_multiple_of(ways) || dst.bytes * ways != src.bytes {
                return Err(format!("{} bytes in {ways} blocks of rows of {row}", src.bytes));
            }
            Action::Slice { src, dst, row, start: mesh.position(view.local_rank, *axes) * (row / ways), len: row / ways }
        }
        Instr::Collective { pattern, axes, stages, dim, monoid, src, dst } => {
            let shape = match pattern {
                Pattern::AllReduce | Pattern::ReduceScatter | Pattern::AllToAll | Pattern::Shift => view.shape(*src, *dim),
                Pattern::AllGather => view.shape(*dst, *dim),
            };
            let ways = view.group(*axes, stages).len() as u64;
            Action::Collective(collective(*pattern, *monoid, (of.family(instr)?, ways), shape, place(src)?, place(dst)?)?)
        }
        Instr::Send { src, .. } => Action::Send(Transfer { family: of.family(instr)?, peer: 1, place: place(src)? }),
        Instr::Recv { dst, .. } => Action::Recv(Transfer { family: of.family(instr)?, peer: 0, place: place(dst)? }),
        Instr::Copy { src, dst } => {
            let (src, dst) = (view.anywhere(*src)?, view.anywhere(*dst)?);
            if src.1.bytes != dst.1.bytes {
                return Err(format!("{} bytes copied to {}", src.1.bytes, dst.1.bytes));
            }
            let (way, device, away) = match (src, dst) {
                ((Space::Device, device), (Space::Host, place)) => (scratch::Way::Out, device, Away::Host(place)),
                ((Space::Device, device), (Space::File, place)) => (scratch::Way::Out, device, Away::File(place)),
                ((Space::Host, place), (Space::Device, device)) => (scratch::Way::In, device, Away::Host(place)),
                ((Space::File, place), (Space::Device, device)) => (scratch::Way::In, device, Away::File(place)),
                ((from @ Space::Device, _), (to @ Space::Device, _))
                | ((from @ (Space::Host | Space::File), _), (to @ (Space::Host | Space::File), _)) => {
                    return Err(format!("a copy from {} to {}", from.name(), to.name()));
                }
            };
            Action::Copy { way, device, away }
        }
        Instr::Zero { dst } => Action::Zero { dst: place(dst)? },
        Instr::AddInto { src, dst } => {
            let (src, dst) = (place(src)?, place(dst)?);
            run(flat::add_into(src.dtype, dst.dtype, same(&[src, dst])?, alignment(&[src, dst])), vec![src], vec![dst])
        }
        Instr::Cast { src, dst } => {
            let (src, dst) = (place(src)?, place(dst)?);
            run(flat::cast(src.dtype, dst.dtype, same(&[src, dst])?, alignment(&[src, dst])), vec![src], vec![dst])
        }
        Instr::Compress { .. } => {
            return Err("gradients are compressed on CPU ranks alone: for GPU ranks, plan with `wire=full` or `wire=bf16`".into());
        }
        Instr::SumShares { src, dst } => {
            let (src, dst) = (place(src)?, place(dst)?);
            if !src.elems().is_multiple_of(dst.elems().max(1)) {
                return Err(format!("{} elements added up to {}", src.elems(), dst.elems()));
            }
            run(flat::sum_shares(src.dtype, dst.dtype, src.elems() / dst.elems().max(1), dst.elems()), vec![src], vec![dst])
        }
        Instr::Join { monoid, left, right, dst } => {
            let (left, right, dst) = (places(left)?, places(right)?, places(dst)?);
            run(join(*monoid, &left, &right, &dst)?, [left, right].concat(), dst)
        }
        Instr::SquareSum { once, .. } if mesh.position(view.local_rank, *once) != 0 => Action::Nothing,
        Instr::SquareSum { src, dst, once: _ } => {
            let (src, dst) = (place(src)?, place(dst)?);
            run(flat::square_sum(src.dtype, dst.dtype, src.elems()), vec![src], vec![dst])
        }
        Instr::ClipScale { src, dst } => {
            let (src, dst) = (place(src)?, place(dst)?);
            run(flat::clip_scale(src.dtype, dst.dtype), vec![src], vec![dst])
        }
        Instr::TrustSums { state: at, grad, moments, scale, dst } => {
            let (members, stretches) = parts(of, *at)?;
            let (state, grad, sums, scale) = (place(at)?, place(grad)?, place(dst)?, scale.as_ref().map(place).transpose()?);
            let flat: Vec<Place> = [state, grad].into_iter().chain(places(moments)?).collect();
            if flat.len() != 4 {
                return Err(format!("{} moments, not 2", moments.len()));
            }
            same(&flat)?;
            let trust = flat::TrustSums {
                state: state.dtype,
                grad: grad.dtype,
                scale: scale.map(|s| s.dtype),
                alignment: alignment(&flat),
                stretches: &stretches,
                trust: trust(sums, &members)?,
                parameters: sums.elems() / 2,
            };
            run(flat::trust_sums(&trust), flat.into_iter().chain(scale).collect(), vec![sums])
        }
        Instr::Update { state: at, grad, moments, param, scale, trust: sums } => {
            let optimizer = view.program.optimizer.ok_or("the program has no optimizer")?;
            if optimizer.trusts() != sums.is_some() {
                return Err(format!("{} with sums of trust ratios, or one that has them without", optimizer.name()));
            }
            let (members, stretches) = match sums {
                Some(_) => parts(of, *at)?,
                None => (Vec::new(), wide(view.stretches(*at, |p| of.decays[p])?)),
            };
            let (state, grad, moments) = (place(at)?, place(grad)?, places(moments)?);
            let (param, scale, sums) =
                (param.as_ref().map(place).transpose()?, scale.as_ref().map(place).transpose()?, sums.as_ref().map(place).transpose()?);
            if moments.len() != optimizer.moments() {
                return Err(format!("{} moments of the {} that {} has", moments.len(), optimizer.moments(), optimizer.name()));
            }
            let flat: Vec<Place> = [state, grad].into_iter().chain(moments.iter().copied()).chain(param).collect();
            let update = flat::Update {
                optimizer,
                state: state.dtype,
                grad: grad.dtype,
                param: param.map(|p| p.dtype),
                scale: scale.map(|s| s.dtype),
                n: same(&flat)?,
                alignment: alignment(&flat),
                stretches: &stretches,
                trust: sums.map(|sums| trust(sums, &members)).transpose()?,
            };
            let ins = [grad].into_iter().chain(scale).chain(sums).collect();
            let outs = [state].into_iter().chain(moments).chain(param).collect();
            run(flat::update(&update), ins, outs)
        }
        Instr::Record(event) | Instr::Wait(event) if event.0 >= view.of_stage().events => return Err(format!("{event} does not exist")),
        Instr::Record(event) => Action::Record(*event),
        Instr::Wait(event) => Action::Wait(*event),
    })
}

impl Of<'_> {
    /// The actions of a product and as much of what follows it as there is a kernel for, by place in the segment; none if there is none. Where a library computes the product,
    /// that is as much as the library does: what it is quicker at is not taken from it.
    fn fused(&self, body: &[Issue], chain: &Chain) -> Result<Vec<(usize, Action)>, String> {
        let by_library = |routine: &Routine| routine.launches.iter().any(|l| l.instead.is_some());
        let (alone, _, _) = self.followed(body, chain.product, &[])?;
        let library = alone.is_ok_and(|r| by_library(&r));
        for steps in (1..=chain.steps.len()).rev().map(|n| &chain.steps[..n]) {
            let (Ok(routine), ins, outs) = self.followed(body, chain.product, steps)? else { continue };
            let Some(last) = steps.last().filter(|_| !library || by_library(&routine)) else { continue };
            let before = [chain.product].into_iter().chain(steps.iter().map(|s| s.at)).filter(|&at| at != last.at);
            let within = before.map(|at| (at, Action::Within(last.at)));
            return Ok(within.chain([(last.at, Action::Run { routine, ins, outs })]).collect());
        }
        Ok(Vec::new())
    }

    /// The actions of a chain along rows, by place in the segment: as much of it as there is a kernel for; none if there is none.
    fn joined(&self, buffers: &fuse::Buffers<'_>, touched: &fuse::Touched, body: &[Issue], chain: &[usize]) -> Result<Vec<(usize, Action)>, String> {
        for chain in (2..=chain.len()).rev().map(|n| &chain[..n]) {
            let (values, sides) = buffers.row_values(touched, body, chain);
            let mut locals = Vec::with_capacity(chain.len());
            let mut last = Write::Set;
            for &at in chain {
                let Instr::Run { node, ins, outs, write, .. } = &body[at].instr else { return Err("a chain of what is no op".into()) };
                locals.push(self.view.local(*node, ins, outs)?);
                last = *write;
            }
            let mut types: Vec<Option<LocalType>> = vec![None; values.len()];
            for (local, [read, written]) in locals.iter().zip(&sides) {
                let all = read.iter().zip(&local.ins).chain(written.iter().zip(&local.outs));
                all.for_each(|(&value, ty)| types[value] = Some(ty.clone()));
            }
            let held: Vec<(LocalType, rows::Held)> = types.into_iter().flatten().zip(&values).map(|(ty, v)| (ty, v.1)).collect();
            let places = |held: rows::Held| {
                let these = values.iter().filter(move |v| v.1 == held);
                these.map(|v| self.view.place(v.0)).collect::<Result<Vec<Place>, String>>()
            };
            let (ins, outs) = (places(rows::Held::Loaded)?, places(rows::Held::Stored)?);
            let link = locals.iter().zip(&sides).map(|(local, [ins, outs])| rows::Link {
                op: &local.node.op,
                context: &local.context,
                ins: ins.clone(),
                outs: outs.clone(),
            });
            let links: Vec<rows::Link<'_>> = link.collect();
            let alignment = alignment(&[&ins[..], &outs[..]].concat());
            let Ok(routine) = rows::chain(&rows::Chain { links: &links, values: &held, write: last, alignment, target: self.target }) else {
                continue;
            };
            let within = chain[1..].iter().map(|&at| (at, Action::Within(chain[0])));
            return Ok([(chain[0], Action::Run { routine, ins, outs })].into_iter().chain(within).collect());
        }
        Ok(Vec::new())
    }

    /// The kernels of a product and the steps that follow it, if there are any, and their operands and results.
    fn followed(&self, body: &[Issue], product: usize, steps: &[Step]) -> Result<(Result<Routine, PrepareError>, Vec<Place>, Vec<Place>), String> {
        let run = |at: usize| match &body[at].instr {
            Instr::Run { node, ins, outs, write, .. } => Ok((self.view.local(*node, ins, outs)?, ins, outs, *write)),
            other => Err(format!("{other:?} in a chain of ops")),
        };
        let (local, ins, _, _) = run(product)?;
        let (last, _, outs, write) = run(steps.last().map_or(product, |s| s.at))?;
        let (mut others, mut operands) = (Vec::new(), Vec::new());
        for step in steps {
            let (of_step, read, _, _) = run(step.at)?;
            let at = read.iter().position(|&b| Some(b) == step.other);
            others.extend(at.map(|at| read[at]));
            operands.extend(at.map(|at| of_step.ins[at].clone()));
        }
        let places = |ids: &mut dyn Iterator<Item = &BufferId>| ids.map(|&id| self.view.place(id)).collect::<Result<Vec<_>, _>>();
        let (ins, outs) = (places(&mut ins.iter().chain(&others))?, places(&mut outs.iter())?);
        let tails: Vec<Tail> = steps.iter().map(|s| s.tail).collect();
        let descriptor = Descriptor {
            op: &local.node.op,
            context: &local.context,
            ins: &local.ins,
            outs: &last.outs,
            write,
            alignment: alignment(&[&ins[..], &outs[..]].concat()),
            target: self.target,
            epilogue: Epilogue { tails: &tails, operands: &operands },
        };
        let same = local.outs.iter().zip(&last.outs).all(|(x, y)| x.dims == y.dims && x.layout == y.layout);
        let routine = if same { prepare(&descriptor) } else { Err(PrepareError::Missing("what changes the shape of a product's result")) };
        Ok((routine, ins, outs))
    }
    /// Which family an instruction meets in.
    fn family(&self, instr: &Instr) -> Result<usize, String> {
        let family = Family::of(instr, self.view.stage as u32);
        self.families.iter().position(|f| Some(f) == family.as_ref()).ok_or_else(|| "it meets nobody".into())
    }
}

fn collective(
    pattern: Pattern,
    monoid: Monoid,
    (family, ways): (usize, u64),
    shape: Result<[u64; 2], String>,
    src: Place,
    dst: Place,
) -> Result<Collective, String> {
    let plain = |primitive, elems| Collective { family, primitive, elems, src, dst, before: None, after: None, staging: 0 };
    let reduction = match monoid {
        Monoid::Sum => Some(Reduction::Sum),
        Monoid::Max => Some(Reduction::Max),
        Monoid::LogSumExp => None,
    };
    let parts = |whole: Place, part: Place| {
        if part.bytes * ways == whole.bytes { Ok(()) } else { Err(format!("{} of {} bytes in {ways} blocks", whole.bytes, part.bytes)) }
    };
    match (pattern, reduction) {
        (Pattern::AllReduce, _) if src.bytes != dst.bytes => Err(format!("{} bytes reduced to {}", src.bytes, dst.bytes)),
        (Pattern::AllReduce, Some(r)) => Ok(plain(Primitive::AllReduce(r), src.elems())),
        (Pattern::AllReduce, None) => {
            let after = Some(flat::log_sum_exp(src.dtype, ways, src.elems()));
            Ok(Collective { after, staging: ways * src.bytes, ..plain(Primitive::AllGather, src.elems()) })
        }
        (Pattern::ReduceScatter, None) => Err("no log-sum-exp is scattered".into()),
        (Pattern::ReduceScatter, Some(r)) => {
            parts(src, dst)?;
            let [outer, row] = shape?;
            let before = (outer > 1).then(|| flat::blocks(src.dtype, outer, ways, row / ways, Way::Pack));
            let staging = if before.is_some() { src.bytes } else { 0 };
            Ok(Collective { before, staging, ..plain(Primitive::ReduceScatter(r), dst.elems()) })
        }
        (Pattern::AllToAll, _) if src.bytes != dst.bytes || !src.elems().is_multiple_of(ways) => {
            Err(format!("{} bytes exchanged for {} between {ways}", src.bytes, dst.bytes))
        }
        (Pattern::Shift, _) if src.bytes != dst.bytes => Err(format!("{} bytes handed on for {}", src.bytes, dst.bytes)),
        (Pattern::Shift, _) => Ok(plain(Primitive::Shift, src.elems())),
        (Pattern::AllToAll, _) => Ok(plain(Primitive::AllToAll, src.elems() / ways)),
        (Pattern::AllGather, _) => {
            parts(dst, src)?;
            let [outer, row] = shape?;
            let after = (outer > 1).then(|| flat::blocks(src.dtype, outer, ways, row / ways, Way::Unpack));
            let staging = if after.is_some() { dst.bytes } else { 0 };
            Ok(Collective { after, staging, ..plain(Primitive::AllGather, src.elems()) })
        }
    }
}

/// Parts of what is made block by block, joined: operands are those of `left`, then those of `right`.
fn join(monoid: Monoid, left: &[Place], right: &[Place], dst: &[Place]) -> Result<Routine, String> {
    for ((one, other), to) in left.iter().zip(right).zip(dst) {
        if (one.dtype, one.bytes) != (other.dtype, other.bytes) || (one.dtype, one.bytes) != (to.dtype, to.bytes) {
            return Err(format!("{} bytes of {} joined with {} of {}", one.bytes, one.dtype, other.bytes, other.dtype));
        }
    }
    let is_there = if left == dst { flat::Left::InPlace } else { flat::Left::Elsewhere };
    match (monoid, left) {
        (Monoid::Sum, _) => Ok(flat::join_sums(&left.iter().map(|p| (p.dtype, p.elems())).collect::<Vec<_>>(), is_there)),
        (Monoid::LogSumExp, [o, lse]) if lse.elems() > 0 && lse.dtype == o.dtype.accumulator() => {
            Ok(flat::join_attention(o.dtype, lse.elems(), o.elems() / lse.elems(), is_there))
        }
        (Monoid::LogSumExp | Monoid::Max, _) => Err(format!("{} parts joined by {}", left.len(), monoid.name())),
    }
}

/// A flat buffer's elements by parameter, and whether weight decay pulls them; and the parameters' numbers in the bucket.
fn parts(of: &Of<'_>, id: BufferId) -> Result<(Vec<usize>, Vec<(Range<u64>, bool)>), String> {
    let (members, stretches) = of.view.parts(id, |p| of.decays[p])?;
    Ok((members, wide(stretches)))
}

fn wide(stretches: Vec<(Range<usize>, bool)>) -> Vec<(Range<u64>, bool)> {
    stretches.into_iter().map(|(range, pulled)| (range.start as u64..range.end as u64, pulled)).collect()
}

/// Sums of trust ratios, of these members.
fn trust(sums: Place, members: &[usize]) -> Result<flat::Trust<'_>, String> {
    match members.iter().find(|&&at| 2 * at as u64 + 2 > sums.elems()) {
        Some(at) => Err(format!("no sums of trust ratios for member {at}")),
        None => Ok(flat::Trust { sums: sums.dtype, members }),
    }
}

/// The elements that flat buffers have in common.
fn same(places: &[Place]) -> Result<u64, String> {
    match places.iter().find(|p| p.elems() != places[0].elems()) {
        None => Ok(places[0].elems()),
        Some(other) => Err(format!("{} elements beside {}", places[0].elems(), other.elems())),
    }
}

fn alignment(places: &[Place]) -> Alignment {
    if places.iter().all(Place::aligned) { Alignment::Packs } else { Alignment::Elements }
}
