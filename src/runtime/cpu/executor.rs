//! One rank's step on its one thread.
//!
//! Each stream is an in-order queue; the thread looks at the heads of the queues in turn and takes each as far as it gets. A head that waits, for an event
//! or for a peer, holds only its own stream. When no head gets further the thread parks until a peer that completed something wakes it: nothing spins, so
//! there may be more ranks than cores.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use dplan_ir::dtype::DType;
use dplan_ir::infer::{MOST_OPERANDS, MOST_RESULTS};
use dplan_ir::optimizer::{StepScalars, trust_ratio};
use dplan_ir::program::Stream;
use dplan_ir::splitmix;
use dplan_kernels::cpu::block::{Block, BlockMut};
use dplan_kernels::cpu::{Run, Threads, compress, flat, join};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::arena::{Arena, Slot};
use super::load::{Action, Code, Item, Loaded};
use super::meeting::{Part, Phase, Progress};
use crate::runtime::batch::{Batch, Rows};
use crate::runtime::scratch::{Porter, Transfer};
use crate::runtime::{Order, Recording, Rehearsal, Span, block};

const STREAMS: usize = Stream::ALL.len();

/// Streams in the order in which a rank tries them: whom peers may wait for first, long kernels last.
const EAGER: [usize; STREAMS] = [
    Stream::SendForward as usize,
    Stream::SendBackward as usize,
    Stream::SendForwardBack as usize,
    Stream::SendBackwardBack as usize,
    Stream::RecvForward as usize,
    Stream::RecvBackward as usize,
    Stream::RecvForwardBack as usize,
    Stream::RecvBackwardBack as usize,
    Stream::Comm as usize,
    Stream::Copy as usize,
    Stream::Compute as usize,
];

/// What all ranks share.
#[derive(Debug)]
pub struct World {
    pub loaded: Loaded,
    pub arenas: Vec<Arena>,
    /// Of each rank that has a file.
    pub porters: Vec<Option<Porter>>,
    pub ranks: Vec<Seen>,
    /// Somebody failed: everybody stops.
    pub poisoned: AtomicBool,
    pub threads: Threads,
    pub order: Order,
    pub recording: Recording,
    /// Where recorded times count from.
    pub began: Instant,
}

/// What others see of a rank.
#[derive(Debug, Default)]
pub struct Seen {
    pub thread: OnceLock<Thread>,
    /// Items completed of each queue in this step.
    pub heads: [AtomicU64; STREAMS],
    /// Counts whatever the rank completes, over all steps.
    pub progress: AtomicU64,
    /// Counts the rank's looks at its queues, over all steps: a rank that waits looks again and again, one that is stuck does not.
    pub looks: AtomicU64,
    /// That count when all ranks together last got further.
    pub marked: AtomicU64,
    /// The queue whose head the rank is at, for messages about failures.
    pub at: AtomicU64,
    /// What the rank is to rehearse in its next step.
    pub rehearse: Mutex<Option<Rehearsal>>,
    /// What the rank ran, where that is recorded.
    pub spans: Mutex<Vec<Span>>,
}

impl World {
    pub fn wake(&self, rank: usize) {
        if let Some(thread) = self.ranks[rank].thread.get() {
            thread.unpark();
        }
    }
    pub fn poison(&self) {
        self.poisoned.store(true, Ordering::SeqCst);
        (0..self.ranks.len()).for_each(|rank| self.wake(rank));
    }
}

/// A rank's place in the step it runs.
#[derive(Debug)]
pub struct Executor<'w> {
    world: &'w World,
    rank: usize,
    phases: [Phase; STREAMS],
    /// Numbers of the transfers that are under way, of the items at the head of each queue.
    transfers: [Range<u64>; STREAMS],
    /// Which `record`s of the step are complete.
    records: Vec<bool>,
    random: u64,
    /// Steps that were run before.
    steps: u64,
    /// Wide copies of 16-bit operands and results ([`dplan_kernels::cpu::wide`]).
    staging: Vec<f32>,
    /// When the head of each queue was first tried, and what is complete of this step; used if recording.
    tried: [Option<u64>; STREAMS],
    spans: Vec<Span>,
}

/// The step was given up because another rank failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Poisoned;

impl<'w> Executor<'w> {
    pub fn new(world: &'w World, rank: usize) -> Executor<'w> {
        let seed = match world.order {
            Order::Eager => 0,
            Order::Seeded(seed) => seed.wrapping_add(rank as u64 * 0x9e37_79b9),
        };
        let code = &world.loaded.codes[rank];
        Executor {
            world,
            rank,
            phases: Default::default(),
            transfers: [const { 0..0 }; STREAMS],
            records: vec![false; code.records],
            random: seed,
            steps: 0,
            staging: vec![0.0; code.staging_elems()],
            tried: [None; STREAMS],
            spans: Vec::new(),
        }
    }

    /// Runs one step.
    ///
    /// # Errors
    /// If another rank failed meanwhile.
    pub fn step(&mut self, scalars: &StepScalars, batch: &Batch) -> Result<(), Poisoned> {
        let code = &self.world.loaded.codes[self.rank];
        let seen = &self.world.ranks[self.rank];
        seen.heads.iter().for_each(|h| h.store(0, Ordering::Relaxed));
        self.records.fill(false);
        self.rehearse()?;
        let mut left: usize = code.queues.iter().map(Vec::len).sum();
        while left > 0 {
            seen.looks.fetch_add(1, Ordering::Relaxed);
            let mut moved = false;
            for stream in self.turns() {
                while let Some(&item) = code.queues[stream].get(seen.heads[stream].load(Ordering::Relaxed) as usize) {
                    if self.world.poisoned.load(Ordering::SeqCst) {
                        return Err(Poisoned);
                    }
                    seen.at.store(stream as u64, Ordering::Relaxed);
                    self.note_try(stream);
                    if self.advance(code, stream, item, scalars, batch) == Progress::Blocked {
                        break;
                    }
                    self.note_done(code, stream, item);
                    seen.heads[stream].fetch_add(1, Ordering::Relaxed);
                    seen.progress.fetch_add(1, Ordering::Relaxed);
                    (left, moved) = (left - 1, true);
                    // After each kernel the other streams get a look.
                    if stream == Stream::Compute as usize || self.world.order != Order::Eager {
                        break;
                    }
                }
                if moved && self.world.order != Order::Eager {
                    break;
                }
            }
            if !moved && left > 0 {
                // A wake-up since the heads were looked at makes this return at once; the limit is only a second line of defence.
                std::thread::park_timeout(Duration::from_millis(200));
            }
            if self.world.poisoned.load(Ordering::SeqCst) {
                return Err(Poisoned);
            }
        }
        self.steps += 1;
        if self.world.recording == Recording::On {
            seen.spans.lock().unwrap_or_else(|e| e.into_inner()).append(&mut self.spans);
        }
        Ok(())
    }

    /// Keeps when the head of a queue was first tried.
    fn note_try(&mut self, stream: usize) {
        if self.world.recording == Recording::On && self.tried[stream].is_none() {
            self.tried[stream] = Some(self.world.began.elapsed().as_nanos() as u64);
        }
    }

    /// Keeps what was completed; events take no time.
    fn note_done(&mut self, code: &Code, stream: usize, item: Item) {
        let Some(start) = self.tried[stream].take() else { return };
        let communicator = match code.actions[item.action as usize] {
            Action::Record | Action::Wait | Action::Nothing => return,
            Action::Meet { communicator, .. } => Some(communicator as u32),
            Action::Run { .. }
            | Action::Input { .. }
            | Action::Slice { .. }
            | Action::Copy { .. }
            | Action::Transfer { .. }
            | Action::Zero { .. }
            | Action::AddInto { .. }
            | Action::Cast { .. }
            | Action::SumShares { .. }
            | Action::Compress { .. }
            | Action::SumPairs { .. }
            | Action::JoinSums { .. }
            | Action::JoinAttention { .. }
            | Action::SquareSum { .. }
            | Action::ClipScale { .. }
            | Action::TrustSums { .. }
            | Action::Update { .. } => None,
        };
        let (segment, at) = code.origins[item.action as usize];
        let end = self.world.began.elapsed().as_nanos() as u64;
        self.spans.push(Span { segment, at: at as u32, micro_batch: item.micro_batch, stream: Stream::ALL[stream], communicator, start, end });
    }

    /// Does what the rank was told to rehearse, before its first instruction.
    fn rehearse(&self) -> Result<(), Poisoned> {
        let seen = &self.world.ranks[self.rank];
        let told = seen.rehearse.lock().unwrap_or_else(|e| e.into_inner()).take();
        seen.at.store(Stream::Compute as u64, Ordering::Relaxed);
        match told {
            None => Ok(()),
            Some(Rehearsal::Die) => panic!("it was told to die"),
            Some(Rehearsal::Stall) => {
                while !self.world.poisoned.load(Ordering::SeqCst) {
                    std::thread::park_timeout(Duration::from_millis(20));
                }
                Err(Poisoned)
            }
        }
    }

    /// The order in which streams are tried now.
    fn turns(&mut self) -> [usize; STREAMS] {
        let mut turns = EAGER;
        if self.world.order != Order::Eager {
            for i in (1..STREAMS).rev() {
                turns.swap(i, (splitmix::next(&mut self.random) >> 32) as usize % (i + 1));
            }
        }
        turns
    }

    /// The transfer at the head of a stream: it is posted together with those right behind it, so that the disk need not wait for this thread in between.
    fn transfer(&mut self, code: &Code, stream: usize) -> Progress {
        let (world, under_way) = (self.world, &mut self.transfers[stream]);
        let Some(porter) = &world.porters[self.rank] else { unreachable!("a rank with transfers has a file") };
        if under_way.is_empty() {
            let head = world.ranks[self.rank].heads[stream].load(Ordering::Relaxed) as usize;
            let all = code.queues[stream][head..].iter().map_while(|&item| transfer_of(code, &world.arenas[self.rank], item));
            for transfer in all {
                // SAFETY: instructions between these and what waits for them leave the bytes alone: the verifier proved it of the program.
                let number = unsafe { porter.post(transfer) };
                *under_way = if under_way.is_empty() { number..number + 1 } else { under_way.start..number + 1 };
            }
        }
        match porter.is_done(under_way.start) {
            Ok(true) => {
                under_way.start += 1;
                Progress::Complete
            }
            Ok(false) => Progress::Blocked,
            Err(why) => panic!("{why}"),
        }
    }

    /// Takes the head of a stream as far as it gets.
    fn advance(&mut self, code: &Code, stream: usize, item: Item, scalars: &StepScalars, batch: &Batch) -> Progress {
        let arena = &self.world.arenas[self.rank];
        let micro = u64::from(item.micro_batch);
        let scalars = &scalars.of(self.world.loaded.updates, micro, self.world.loaded.micro_batches);
        // SAFETY: here and below, slots of one instruction are this rank's until the instruction is complete: the verifier proved it of the program.
        let read = |slot: &Slot| unsafe { arena.read(slot, micro) };
        let write = |slot: &Slot| unsafe { arena.write(slot, micro) };
        match &code.actions[item.action as usize] {
            Action::Run { kernel, ins, outs, scratch, write: mode } => {
                let mut operands = [Block::I32(&[]); MOST_OPERANDS];
                operands.iter_mut().zip(ins).for_each(|(o, slot)| *o = read(slot));
                let mut results = [const { None }; MOST_RESULTS];
                results.iter_mut().zip(outs).for_each(|(r, slot)| *r = Some(write(slot)));
                let mut results = results.map(|r| r.unwrap_or(BlockMut::I32(&mut [])));
                let scratch = match scratch {
                    Some(slot) => write(slot),
                    None if kernel.dtype() == DType::F64 => BlockMut::F64(&mut []),
                    None => BlockMut::F32(&mut []),
                };
                let run = Run {
                    write: *mode,
                    inv_tokens: scalars.inv_tokens,
                    loss_scale: scalars.loss_scale,
                    draws: scalars.draws.after(micro * self.world.loaded.sequences),
                    threads: self.world.threads,
                };
                kernel.run(&operands[..ins.len()], &mut results[..outs.len()], scratch, &mut self.staging, run);
            }
            Action::Input { dst, input, block, step } => load(&batch.inputs[*input], block, micro as usize * step, write(dst)),
            Action::Slice { src, dst, row, start, len } => {
                for at in 0..dst.bytes / len.max(&1) {
                    // SAFETY: `load` checked that blocks of `len` bytes in rows of `row` bytes fill both slots.
                    unsafe {
                        let from = arena.at(src, micro).add(at * row + start);
                        std::ptr::copy_nonoverlapping(from.cast_const(), arena.at(dst, micro).add(at * len), *len);
                    }
                }
            }
            Action::Meet { communicator, member, work, src, dst } => {
                let meetings = self.world.loaded.meetings[*communicator];
                let at = |slot: &Option<Slot>| slot.as_ref().map_or(std::ptr::null_mut(), |s| arena.at(s, micro));
                let part = Part { work, member: *member, number: self.steps * meetings + u64::from(item.number), src: at(src), dst: at(dst) };
                // SAFETY: as above; `load` checked the sizes.
                return unsafe {
                    self.world.loaded.communicators[*communicator].advance(&mut self.phases[stream], part, |rank| self.world.wake(rank))
                };
            }
            Action::Zero { dst } => {
                // SAFETY: inside the slot.
                unsafe { std::ptr::write_bytes(arena.at(dst, micro), 0, dst.bytes) }
            }
            Action::Copy { src, dst } => {
                // SAFETY: `load` checked that the slots are of one size and do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(arena.at(src, micro).cast_const(), arena.at(dst, micro), dst.bytes) }
            }
            Action::Transfer { .. } => return self.transfer(code, stream),
            Action::AddInto { src, dst } => match (read(src), write(dst)) {
                (Block::F32(src), BlockMut::F32(dst)) => flat::add_into(src, dst),
                (Block::F64(src), BlockMut::F64(dst)) => flat::add_into(src, dst),
                _ => unreachable!("refused when loaded"),
            },
            Action::Cast { src, dst } => match (read(src), write(dst)) {
                (Block::F32(src), BlockMut::Bf16(dst)) => flat::cast(src, dst),
                (Block::F64(src), BlockMut::Bf16(dst)) => flat::cast(src, dst),
                _ => unreachable!("refused when loaded"),
            },
            Action::SumShares { src, dst } => match (read(src), write(dst)) {
                (Block::Bf16(src), BlockMut::F32(dst)) => flat::sum_shares(src, dst),
                (Block::Bf16(src), BlockMut::F64(dst)) => flat::sum_shares(src, dst),
                (Block::F32(src), BlockMut::F32(dst)) => flat::sum_shares(src, dst),
                (Block::F64(src), BlockMut::F64(dst)) => flat::sum_shares(src, dst),
                _ => unreachable!("refused when loaded"),
            },
            Action::Compress { grads, residual, pairs } => match (read(grads), write(residual), write(pairs)) {
                (Block::F32(grads), BlockMut::F32(residual), BlockMut::F32(pairs)) => compress::compress(grads, residual, pairs),
                (Block::F64(grads), BlockMut::F64(residual), BlockMut::F64(pairs)) => compress::compress(grads, residual, pairs),
                _ => unreachable!("refused when loaded"),
            },
            Action::SumPairs { src, kept, start, dst } => match (read(src), write(dst)) {
                (Block::F32(src), BlockMut::F32(dst)) => compress::sum_pairs(src, *kept, *start, dst),
                (Block::F64(src), BlockMut::F64(dst)) => compress::sum_pairs(src, *kept, *start, dst),
                _ => unreachable!("refused when loaded"),
            },
            Action::JoinSums { left, right, dst } => {
                for ((one, other), to) in left.iter().zip(right).zip(dst) {
                    settle(arena, one, to, micro);
                    join::sums(read(other), write(to));
                }
            }
            Action::JoinAttention { left, right, dst } => {
                left.iter().zip(dst).for_each(|(one, to)| settle(arena, one, to, micro));
                join::attention([read(&right[0]), read(&right[1])], [write(&dst[0]), write(&dst[1])]);
            }
            Action::SquareSum { src, dst } => {
                let sum = match read(src) {
                    Block::F32(x) => flat::square_sum(x),
                    Block::F64(x) => flat::square_sum(x),
                    Block::I32(_) | Block::Bf16(_) | Block::F16(_) => unreachable!("refused when loaded"),
                };
                put_scalar(write(dst), scalar(read(dst)) + sum);
            }
            Action::ClipScale { src, dst } => put_scalar(write(dst), scalars.gradient_scale(scalar(read(src)).sqrt())),
            Action::TrustSums { state, grad, moments: [m, v], scale, stretches, trust } => {
                let scale = scale.as_ref().map_or(1.0, |s| scalar(read(s)));
                let sums = write(&trust.sums);
                match (read(state), read(grad), read(m), read(v), sums) {
                    (Block::F32(p), Block::F32(g), Block::F32(m), Block::F32(v), BlockMut::F32(sums)) => {
                        sums.fill(0.0);
                        flat::trust_sums(stretches, p, g, [m, v], scale, scalars, |at, terms| {
                            let at = 2 * trust.members[at];
                            sums[at..at + 2].iter_mut().zip(terms).for_each(|(sum, term)| *sum = term as f32);
                        });
                    }
                    (Block::F64(p), Block::F64(g), Block::F64(m), Block::F64(v), BlockMut::F64(sums)) => {
                        sums.fill(0.0);
                        flat::trust_sums(stretches, p, g, [m, v], scale, scalars, |at, terms| {
                            let at = 2 * trust.members[at];
                            sums[at..at + 2].copy_from_slice(&terms);
                        });
                    }
                    _ => unreachable!("refused when loaded"),
                }
            }
            Action::Update { optimizer, state, grad, moments, param, scale, stretches, trust } => {
                let scale = scale.as_ref().map_or(1.0, |s| scalar(read(s)));
                let ratio = |stretch: usize| {
                    let Some(trust) = trust else { return 1.0 };
                    let at = 2 * trust.members[stretch];
                    trust_ratio(match read(&trust.sums) {
                        Block::F32(sums) => [f64::from(sums[at]), f64::from(sums[at + 1])],
                        Block::F64(sums) => [sums[at], sums[at + 1]],
                        Block::I32(_) | Block::Bf16(_) | Block::F16(_) => unreachable!("refused when loaded"),
                    })
                };
                match (write(state), read(grad)) {
                    (BlockMut::F32(state), Block::F32(grad)) => {
                        let moment = |i: usize| match moments.get(i).map(write) {
                            Some(BlockMut::F32(m)) => m,
                            None => Default::default(),
                            Some(BlockMut::F64(_) | BlockMut::I32(_) | BlockMut::Bf16(_) | BlockMut::F16(_)) => unreachable!("refused when loaded"),
                        };
                        flat::update(*optimizer, stretches, state, grad, [moment(0), moment(1)], scale, scalars, ratio);
                        match param.as_ref().map(write) {
                            Some(BlockMut::Bf16(param)) => param.convert_from_f32_slice(state),
                            Some(BlockMut::F16(param)) => param.convert_from_f32_slice(state),
                            Some(BlockMut::F32(param)) => param.copy_from_slice(state),
                            Some(BlockMut::F64(_) | BlockMut::I32(_)) | None => {}
                        }
                    }
                    (BlockMut::F64(state), Block::F64(grad)) => {
                        let moment = |i: usize| match moments.get(i).map(write) {
                            Some(BlockMut::F64(m)) => m,
                            None => Default::default(),
                            Some(BlockMut::F32(_) | BlockMut::I32(_) | BlockMut::Bf16(_) | BlockMut::F16(_)) => unreachable!("refused when loaded"),
                        };
                        flat::update(*optimizer, stretches, state, grad, [moment(0), moment(1)], scale, scalars, ratio);
                    }
                    _ => unreachable!("refused when loaded"),
                }
            }
            Action::Record => self.records[item.number as usize] = true,
            Action::Wait if item.number > 0 && !self.records[item.number as usize - 1] => return Progress::Blocked,
            Action::Wait | Action::Nothing => {}
        }
        Progress::Complete
    }
}

/// The first of two parts to where they are joined, if it is not there.
fn settle(arena: &Arena, from: &Slot, to: &Slot, micro: u64) {
    if from != to {
        // SAFETY: `load` checked that the slots are of one size, and do not overlap unless they are one.
        unsafe { std::ptr::copy_nonoverlapping(arena.at(from, micro).cast_const(), arena.at(to, micro), to.bytes) }
    }
}

/// What a transfer is, if the item is one.
fn transfer_of(code: &Code, arena: &Arena, item: Item) -> Option<Transfer> {
    let micro = u64::from(item.micro_batch);
    match &code.actions[item.action as usize] {
        Action::Transfer { way, memory, file } => {
            Some(Transfer { way: *way, memory: arena.at(memory, micro), bytes: memory.bytes, address: file.address(micro) })
        }
        Action::Run { .. }
        | Action::Input { .. }
        | Action::Slice { .. }
        | Action::Meet { .. }
        | Action::Zero { .. }
        | Action::Copy { .. }
        | Action::AddInto { .. }
        | Action::Cast { .. }
        | Action::SumShares { .. }
        | Action::Compress { .. }
        | Action::SumPairs { .. }
        | Action::JoinSums { .. }
        | Action::JoinAttention { .. }
        | Action::SquareSum { .. }
        | Action::ClipScale { .. }
        | Action::TrustSums { .. }
        | Action::Update { .. }
        | Action::Record
        | Action::Wait
        | Action::Nothing => None,
    }
}

/// Copies a block of an input of the step; padding is zero.
fn load(rows: &Rows, block: &block::Block, first: usize, dst: BlockMut<'_>) {
    let clear = block.has_padding();
    match (rows, dst) {
        (Rows::Tokens(rows), BlockMut::I32(dst)) => {
            if clear {
                dst.fill(0);
            }
            block.each(|s| dst[s.local..s.local + s.len].copy_from_slice(&rows[first + s.logical..first + s.logical + s.len]));
        }
        (Rows::Values(rows), BlockMut::F32(dst)) => {
            if clear {
                dst.fill(0.0);
            }
            block.each(|s| dst[s.local..s.local + s.len].iter_mut().zip(&rows[first + s.logical..]).for_each(|(d, r)| *d = *r as f32));
        }
        (Rows::Values(rows), BlockMut::F64(dst)) => {
            if clear {
                dst.fill(0.0);
            }
            block.each(|s| dst[s.local..s.local + s.len].copy_from_slice(&rows[first + s.logical..first + s.logical + s.len]));
        }
        (Rows::Values(rows), BlockMut::Bf16(dst)) => {
            dst.fill(bf16::ZERO);
            block
                .each(|s| dst[s.local..s.local + s.len].iter_mut().zip(&rows[first + s.logical..]).for_each(|(d, r)| *d = bf16::from_f32(*r as f32)));
        }
        (Rows::Values(rows), BlockMut::F16(dst)) => {
            dst.fill(f16::ZERO);
            block.each(|s| dst[s.local..s.local + s.len].iter_mut().zip(&rows[first + s.logical..]).for_each(|(d, r)| *d = f16::from_f32(*r as f32)));
        }
        (Rows::Tokens(_), BlockMut::F32(_) | BlockMut::F64(_) | BlockMut::Bf16(_) | BlockMut::F16(_)) | (Rows::Values(_), BlockMut::I32(_)) => {
            unreachable!("the session checks the kinds of its inputs")
        }
    }
}

/// The value of a step-wide scalar.
pub fn scalar(block: Block<'_>) -> f64 {
    match block {
        Block::F32(x) => f64::from(x[0]),
        Block::F64(x) => x[0],
        Block::I32(_) | Block::Bf16(_) | Block::F16(_) => unreachable!("refused when loaded"),
    }
}

fn put_scalar(block: BlockMut<'_>, value: f64) {
    match block {
        BlockMut::F32(x) => x[0] = value as f32,
        BlockMut::F64(x) => x[0] = value,
        BlockMut::I32(_) | BlockMut::Bf16(_) | BlockMut::F16(_) => unreachable!("refused when loaded"),
    }
}
