//! Which instructions are done by the kernel of a product that comes before them.
//!
//! A product P writes b, and C makes of b, element by element, its own result. If nobody else reads b, one kernel can do both where C stands; of b no byte is written or read then.
//! C's result may go on in the same way: a *chain*. It is legal where
//! - all are on one stream, P's result is set and not added to, and each result but the last holds a value whose bytes nothing but the next one reads: in every segment the
//!   buffer is written before it is read; in this call the next one is its only reader; no other buffer of the same value lies over it; and it is in no frame that is copied
//!   away, for what a frame takes along is read under the frame's name;
//! - P may wait until the last of the chain: meanwhile nothing on the stream writes to what the chain reads, tells other streams that P is over (`record`), or waits for them, so
//!   that P still runs while they do;
//! - nothing that the chain reads lies under what it writes.
//!
//! What stood before P in its stream is over when the chain runs, so whatever P waited for still holds; what stands behind the chain finds what it found. Whether there is a kernel
//! for a chain, kernels say.

use std::collections::HashMap;
use std::ops::Range;

use dplan_ir::access::Access;
use dplan_ir::entity::{BufferId, SegmentId, Table, ValueId};
use dplan_ir::op::Op;
use dplan_ir::program::{Content, Instr, Issue, Space, Write};
use dplan_kernels::cuda::Tail;

use crate::runtime::view::View;

/// A product and what follows it, by place in the segment.
#[derive(Clone, PartialEq, Debug)]
pub struct Chain {
    pub product: usize,
    pub steps: Vec<Step>,
}

/// One more op of a chain.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Step {
    pub at: usize,
    pub tail: Tail,
    /// What it reads besides the result so far.
    pub other: Option<BufferId>,
}

/// Which instructions of a segment touch a buffer, in order.
pub type Touched = HashMap<BufferId, Vec<(usize, Access)>>;

/// What is known of a stage's buffers, on one rank.
pub struct Buffers<'a> {
    pub(super) view: &'a View<'a>,
    /// Whether some segment reads it before writing it: it carries a value from call to call.
    carries: Table<BufferId, bool>,
    of_value: HashMap<ValueId, Vec<BufferId>>,
    /// Frames in the device's memory.
    frames: Vec<BufferId>,
}

impl<'a> Buffers<'a> {
    pub fn new(view: &'a View<'a>) -> Buffers<'a> {
        let stage = view.of_stage();
        let mut carries = Table::filled(stage.buffers.len(), false);
        for segment in stage.segments.values() {
            let mut written = Table::filled(stage.buffers.len(), false);
            for issue in &segment.body {
                let adds = matches!(issue.instr, Instr::Run { write: Write::Add, .. } | Instr::AddInto { .. } | Instr::SquareSum { .. });
                issue.instr.accesses(|b, access| match access {
                    Access::Read => carries[b] |= !written[b],
                    Access::Write => {
                        carries[b] |= adds && !written[b];
                        written[b] = true;
                    }
                });
            }
        }
        let (mut of_value, mut frames) = (HashMap::<ValueId, Vec<BufferId>>::new(), Vec::new());
        for (id, buffer) in stage.buffers.iter() {
            match &buffer.content {
                Content::Value { value, .. } => of_value.entry(*value).or_default().push(id),
                Content::Frame if stage.space(id) == Space::Device => frames.push(id),
                Content::Frame
                | Content::Flat { .. }
                | Content::Member { .. }
                | Content::Scalar(_)
                | Content::Trust { .. }
                | Content::Wire { .. }
                | Content::Scratch => {}
            }
        }
        Buffers { view, carries, of_value, frames }
    }

    /// The chains of a segment, in order of their ends; none has an instruction of another.
    pub fn chains(&self, segment: SegmentId) -> Vec<Chain> {
        let body = &self.view.of_stage().segments[segment].body;
        let touched = touched(body);
        let mut taken = vec![false; body.len()];
        let mut chains = Vec::new();
        // Of two products that are added the later one waits less.
        for product in (0..body.len()).rev() {
            let chain = self.chain(body, &touched, &taken, product);
            if let Some(chain) = chain {
                [product].into_iter().chain(chain.steps.iter().map(|s| s.at)).for_each(|at| taken[at] = true);
                chains.push(chain);
            }
        }
        chains.sort_by_key(|c| c.steps.last().map(|s| s.at));
        chains
    }

    fn chain(&self, body: &[Issue], touched: &Touched, taken: &[bool], product: usize) -> Option<Chain> {
        let Instr::Run { node, ins, outs, write: Write::Set, .. } = &body[product].instr else { return None };
        let (Op::Einsum(_), [result]) = (&self.view.graph.nodes.get(*node)?.op, &outs[..]) else { return None };
        let (mut reads, mut result, mut end) = (ins.clone(), *result, product);
        let mut steps: Vec<Step> = Vec::new();
        while let Some((step, next)) = self.step(body, touched, end, result) {
            let free = !taken[step.at] && body[step.at].stream == body[product].stream;
            if !free || !self.waits(body, product, step.at, &reads) {
                break;
            }
            reads.extend(step.other);
            if reads.iter().any(|&read| self.overlap(read, next)) {
                break;
            }
            (end, result) = (step.at, next);
            steps.push(step);
            // What is added to is read where it is written: nothing can go on from there.
            if !matches!(body[end].instr, Instr::Run { write: Write::Set, .. }) {
                break;
            }
        }
        (!steps.is_empty()).then_some(Chain { product, steps })
    }

    /// The one instruction that reads what `from` writes to `result`, if it is one that can follow a product; and what it writes.
    fn step(&self, body: &[Issue], touched: &Touched, from: usize, result: BufferId) -> Option<(Step, BufferId)> {
        if !self.nobody_else(result) {
            return None;
        }
        let mut later = touched.get(&result)?.iter().filter(|(at, _)| *at > from);
        let (at, Access::Read) = *later.next()? else { return None };
        if later.next().is_some_and(|(_, access)| *access == Access::Read) {
            return None;
        }
        let Instr::Run { node, ins, outs, .. } = &body[at].instr else { return None };
        let [out] = outs[..] else { return None };
        let (tail, other) = Tail::of(&self.view.graph.nodes.get(*node)?.op, ins.iter().position(|&b| b == result)?)?;
        Some((Step { at, tail, other: other.and_then(|i| ins.get(i).copied()) }, out))
    }

    /// Whether the bytes of a result are seen under no other name and by no other call.
    pub(super) fn nobody_else(&self, result: BufferId) -> bool {
        let Ok(Content::Value { value, .. }) = self.view.buffer(result).map(|b| &b.content) else { return false };
        let alone = self.of_value.get(value).is_some_and(|all| all.iter().all(|&other| other == result || !self.overlap(result, other)));
        !self.carries[result] && alone && !self.frames.iter().any(|&frame| self.overlap(result, frame))
    }

    /// Whether what reads these may do so at `to` instead of at `from`.
    fn waits(&self, body: &[Issue], from: usize, to: usize, reads: &[BufferId]) -> bool {
        let stream = body[from].stream;
        body[from + 1..to].iter().filter(|issue| issue.stream == stream).all(|issue| {
            let mut leaves = !matches!(issue.instr, Instr::Record(_) | Instr::Wait(_));
            issue.instr.accesses(|b, access| leaves &= access == Access::Read || !reads.iter().any(|&read| self.overlap(read, b)));
            leaves
        })
    }

    /// Whether two buffers have bytes in common, whatever slots they use.
    pub(super) fn overlap(&self, x: BufferId, y: BufferId) -> bool {
        let bytes = |b: BufferId| -> Option<Range<u64>> {
            let place = self.view.place(b).ok()?;
            Some(place.offset..place.offset + (place.slots - 1) * place.stride + place.bytes)
        };
        // What lies nowhere is refused when it is loaded.
        bytes(x).zip(bytes(y)).is_none_or(|(x, y)| x.start < y.end && y.start < x.end)
    }
}

/// Which instructions touch each buffer.
pub fn touched(body: &[Issue]) -> Touched {
    let mut touched = Touched::new();
    for (at, issue) in body.iter().enumerate() {
        issue.instr.accesses(|b, access| touched.entry(b).or_default().push((at, access)));
    }
    touched
}
