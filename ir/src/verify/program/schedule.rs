//! The periodic part of a stage's schedule.
//!
//! Let p be a multiple of every buffer's slots, and σ the shift of micro-batches by p. Calls `[start, start + count · calls)` are *periodic* if each call is σ of the
//! one `calls` before it. The abstract walk W is equivariant: slots repeat with p, and instructions know of a micro-batch only which it is, so W over a
//! shifted call takes a shifted state to the shifted result and finds the same faults. (Where every micro-batch has an update of its own, versions of parameters shift too; but those
//! that the first micro-batches work with do not, so no period begins before these are over.)
//! Say S ⊒ T if S knows of every byte at least what T knows, and orders every access that T orders. W is monotone: from ⊒ states it finds no fault that it
//! does not find from the smaller, and ends in ⊒ states. So if walking one period from T gives S ⊒ σT, then walking the next from S gives ⊒ σS, and so on:
//! all further periods are without fault if that one was, and the walk may go on behind the last of them, with its micro-batches shifted back.

use crate::entity::SegmentId;
use crate::program::{Program, Updates};
use std::collections::HashMap;

/// A periodic stretch of calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Periodic {
    pub start: usize,
    /// Calls in a period.
    pub calls: usize,
    /// Micro-batches in a period.
    pub shift: u64,
    pub count: u64,
}

/// Periods that are worth skipping: walking this many is not.
const FEW: u64 = 4;

/// The first long periodic stretch.
pub(super) fn periodic(program: &Program, index: usize) -> Option<Periodic> {
    let stage = &program.stages[index];
    let slots = stage.buffers.values().map(|b| b.slots.min(program.micro_batches));
    let shift = slots.fold(1u64, |n, m| if n > program.micro_batches { n } else { lcm(n, m.max(1)) });
    if shift.checked_mul(FEW).is_none_or(|n| n >= program.micro_batches) {
        return None;
    }
    let calls = &stage.schedule;
    let position: HashMap<(SegmentId, u64), usize> = calls.iter().enumerate().map(|(at, c)| ((c.segment, c.micro_batch), at)).collect();
    let follows = |a: usize, b: usize| calls.get(b).is_some_and(|c| c.segment == calls[a].segment && c.micro_batch == calls[a].micro_batch + shift);
    let mut start = 0;
    while start < calls.len() {
        let next = position.get(&(calls[start].segment, calls[start].micro_batch + shift)).copied().filter(|&n| n > start);
        let Some(next) = next else {
            start += 1;
            continue;
        };
        let period = next - start;
        // What begins with the first version works with the same as others.
        let early = calls[start..next].iter().any(|call| program.version(index, call.micro_batch + 1) == program.version(index, call.micro_batch));
        if early && program.updates == Updates::MicroBatch {
            start += 1;
            continue;
        }
        let run = (start..calls.len()).take_while(|&at| follows(at, at + period)).count();
        let count = ((run + period) / period) as u64;
        if count > FEW {
            return Some(Periodic { start, calls: period, shift, count });
        }
        start += run.max(1);
    }
    None
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
