//! Vectors of heads put together from a part of each head's own and a part that all heads share: z = (x, y). Padding heads are zero.

use dplan_ir::extent::Extent;
use dplan_ir::program::Write;

use super::block::{Block, BlockMut};
use super::float::{Float, clear, fill};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// (x, y) → z.
    Forward,
    /// dz → dx.
    GradHead,
    /// dz → dy = Σ over heads, in order of heads.
    GradTail,
}

#[derive(Debug)]
pub struct Append {
    part: Part,
    heads: usize,
    valid: usize,
    /// Elements of x, and of z.
    head: usize,
    whole: usize,
}

impl Append {
    pub fn new(part: Part, heads: Extent, head: usize, whole: usize) -> Append {
        Append { part, heads: heads.len as usize, valid: heads.valid() as usize, head, whole }
    }

    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        let (n, d, out) = (self.head, self.whole, T::of_mut(&mut outs[0]));
        let m = d - n;
        match self.part {
            Part::Forward => {
                let (x, y) = (T::of(ins[0]), T::of(ins[1]));
                for (i, z) in out.chunks_exact_mut(d).enumerate() {
                    if i % self.heads >= self.valid {
                        clear(z, write);
                        continue;
                    }
                    let (head, tail) = z.split_at_mut(n);
                    fill(head, write, |j| x[i * n + j]);
                    fill(tail, write, |j| y[i / self.heads * m + j]);
                }
            }
            Part::GradHead => {
                let dz = T::of(ins[0]);
                for (i, dx) in out.chunks_exact_mut(n).enumerate() {
                    fill(dx, write, |j| dz[i * d + j]);
                }
            }
            Part::GradTail => {
                let dz = T::of(ins[0]);
                clear(out, write);
                for (i, dz) in dz.chunks_exact(d).enumerate() {
                    fill(&mut out[i / self.heads * m..][..m], Write::Add, |j| dz[n + j]);
                }
            }
        }
    }
}
