//! A gate of which each expert keeps the first tokens of each sequence ([`dplan_ir::capacity`]).

use dplan_ir::extent::OpContext;
use dplan_ir::order::Order;
use dplan_ir::program::Write;

use super::block::{Block, BlockMut};
use super::float::{Float, clear};

#[derive(Debug)]
pub struct Capacity {
    tokens: usize,
    sequence: usize,
    experts: usize,
    order: Order,
}

impl Capacity {
    /// `gate`: its sizes, of whole sequences.
    pub fn new(tokens: u64, context: &OpContext, gate: &[usize]) -> Capacity {
        let tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
        Capacity { tokens, sequence: gate[1], experts: gate[2], order: context.order }
    }

    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        let (gate, out) = (T::of(ins[0]), T::of_mut(&mut outs[0]));
        clear(out, write);
        let (experts, whole) = (self.experts, self.sequence * self.experts);
        for (from, to) in gate.chunks_exact(whole).zip(out.chunks_exact_mut(whole)) {
            for expert in 0..experts {
                let row = |position: usize| self.order.index(position as u64, self.sequence as u64) as usize;
                let chosen = (0..self.sequence).map(|p| row(p) * experts + expert).filter(|&at| from[at] != T::ZERO);
                chosen.take(self.tokens).for_each(|at| to[at] += from[at]);
            }
        }
    }
}
