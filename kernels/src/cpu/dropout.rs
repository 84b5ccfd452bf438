//! Dropout of a block of `x[b,s,…]`, see [`dplan_ir::dropout`].

use dplan_ir::entity::NodeId;
use dplan_ir::extent::{Extent, OpContext};
use dplan_ir::order::Order;
use dplan_ir::rule::Label;

use super::Run;
use super::block::{Block, BlockMut};
use super::float::{Float, put};

#[derive(Debug)]
pub struct DropoutKernel {
    node: NodeId,
    rate: f64,
    order: Order,
    batch: Extent,
    sequence: Extent,
    /// The other dims, outermost first.
    rest: Vec<Extent>,
}

impl DropoutKernel {
    pub fn new(context: &OpContext, labels: &[Label], rate: f64) -> DropoutKernel {
        let extent = |at: usize| labels.get(at).map_or(Extent::whole(1), |&l| context.extent(l));
        let rest = (2..labels.len()).map(extent).collect();
        DropoutKernel { node: context.node, rate, order: context.order, batch: extent(0), sequence: extent(1), rest }
    }

    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], run: Run) {
        let (x, y) = (T::of(ins[0]), T::of_mut(&mut outs[0]));
        let draws = run.draws.of_node(self.node, self.rate);
        let width: u64 = self.rest.iter().map(|e| e.len).product();
        let whole: u64 = self.rest.iter().map(|e| e.logical).product();
        // Elements that stand together in the block and in the whole.
        let together = self.rest.last().map_or(1, |e| e.len);
        if together == 0 {
            return;
        }
        for row in 0..self.batch.len * self.sequence.len {
            let (nth, at) = (self.batch.start + row / self.sequence.len, self.sequence.start + row % self.sequence.len);
            let position = self.order.position(at, self.sequence.logical);
            for stretch in (0..width).step_by(together as usize) {
                let (mut element, mut local) = (position * whole + self.index(stretch), (row * width + stretch) as usize);
                let end = element + together;
                while element < end {
                    let factors = draws.factors(nth, element);
                    let next = end.min(element / 4 * 4 + 4);
                    for factor in &factors[(element % 4) as usize..][..(next - element) as usize] {
                        put(&mut y[local], x[local] * T::from_f64(*factor), run.write);
                        local += 1;
                    }
                    element = next;
                }
            }
        }
    }

    /// The index along all other dims together, in the whole, of the block's element `at`.
    fn index(&self, mut at: u64) -> u64 {
        let (mut index, mut stride) = (0, 1);
        for extent in self.rest.iter().rev() {
            index += (extent.start + at % extent.len) * stride;
            at /= extent.len;
            stride *= extent.logical;
        }
        index
    }
}
