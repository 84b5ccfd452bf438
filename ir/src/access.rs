//! Which buffers an instruction touches.

use crate::entity::BufferId;
use crate::program::{Instr, Write};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Read,
    Write,
}

impl Instr {
    /// The buffers that the instruction touches, what it reads first. A result that is added to counts as written.
    pub fn accesses(&self, mut on: impl FnMut(BufferId, Access)) {
        match self {
            Instr::Run { ins, outs, scratch, write: Write::Set | Write::Add, .. } => {
                ins.iter().for_each(|&b| on(b, Access::Read));
                outs.iter().chain(scratch).for_each(|&b| on(b, Access::Write));
            }
            Instr::Input { dst } | Instr::Recv { dst, .. } | Instr::Zero { dst } => on(*dst, Access::Write),
            Instr::Send { src, .. } => on(*src, Access::Read),
            Instr::Slice { src, dst, .. }
            | Instr::Collective { src, dst, .. }
            | Instr::Copy { src, dst }
            | Instr::AddInto { src, dst }
            | Instr::Cast { src, dst }
            | Instr::SumShares { src, dst }
            | Instr::SquareSum { src, dst, .. }
            | Instr::ClipScale { src, dst } => {
                on(*src, Access::Read);
                on(*dst, Access::Write);
            }
            // What is used up may be written by nobody else meanwhile, nor read after it.
            Instr::Compress { src, residual, dst } => [src, residual, dst].into_iter().for_each(|&b| on(b, Access::Write)),
            Instr::Join { left, right, dst, .. } => {
                left.iter().chain(right).for_each(|&b| on(b, Access::Read));
                dst.iter().for_each(|&b| on(b, Access::Write));
            }
            Instr::TrustSums { state, grad, moments, scale, dst } => {
                [state, grad].into_iter().chain(moments).chain(scale).for_each(|&b| on(b, Access::Read));
                on(*dst, Access::Write);
            }
            Instr::Update { state, grad, moments, param, scale, trust } => {
                [grad].into_iter().chain(scale).chain(trust).for_each(|&b| on(b, Access::Read));
                [state].into_iter().chain(moments).chain(param).for_each(|&b| on(b, Access::Write));
            }
            Instr::Record(_) | Instr::Wait(_) => {}
        }
    }
}
