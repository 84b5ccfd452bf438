//! Trials of row programs: random chains of ops along rows, beside the same ops one by one.

use dplan_ir::dtype::DType;
use dplan_ir::interp::{Tensor, op::eval};
use dplan_ir::op::{Activation, Op};
use dplan_ir::program::Write;
use dplan_ir::sharding::LocalType;

use super::{Buffer, Case, Prepared, Random, TARGET, context, draw, letter, result, round, step_scalars, ulp};
use crate::cuda::epilogue::Epilogue;
use crate::cuda::rows::{Chain, Held, Link, chain};
use crate::cuda::{Alignment, Descriptor, Launch, Routine, prepare};
use crate::shim::{Library, Options, Ran, ShimError};
use dplan_ir::graph::Layout;

/// A chain by one kernel, and what its ops make one by one.
pub struct Joined {
    pub together: Prepared,
    apart: Vec<(Routine, Vec<usize>, Vec<usize>)>,
    values: Vec<Buffer>,
    stored: Vec<usize>,
}

/// What lies in a value of a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lies {
    Wide,
    Row,
}

/// Ops with their operands and results, by value.
type Ops = Vec<(Op, Vec<usize>, Vec<usize>)>;

/// How many kinds of chains there are.
pub const KINDS: u64 = 8;

/// A chain of one of the kinds that programs have: values (how they lie, where they are), and ops.
fn shape(r: &mut Random, kind: u64) -> (Vec<(Lies, Held)>, Ops) {
    use Held::{Kept, Loaded, Stored};
    let (wide, row) = (|held| (Lies::Wide, held), (Lies::Row, Loaded));
    let eps = 1e-5;
    let f = [Activation::Silu, Activation::Gelu, Activation::Relu][r.below(3) as usize];
    let drop = Op::Dropout { rate: 0.25 };
    // What somebody else reads, too, is stored.
    let between = if r.below(2) == 0 { Kept } else { Stored };
    match kind {
        0 => (
            vec![wide(Loaded), row, wide(Loaded), wide(between), wide(Loaded), wide(Stored)],
            vec![(Op::RmsNormGradInput { eps }, vec![0, 1, 2], vec![3]), (Op::Add, vec![3, 4], vec![5])],
        ),
        1 => (
            vec![wide(Loaded), row, wide(Loaded), wide(between), wide(Stored)],
            // The same operand twice.
            vec![(Op::LayerNormGradInput { eps }, vec![0, 1, 2], vec![3]), (Op::Add, vec![2, 3], vec![4])],
        ),
        2 => (
            vec![wide(Loaded), wide(Loaded), wide(between), row, wide(Stored)],
            vec![(Op::Add, vec![0, 1], vec![2]), (Op::RmsNorm { eps }, vec![2, 3], vec![4])],
        ),
        3 => (
            vec![wide(Loaded), row, wide(Kept), wide(Kept), wide(Loaded), wide(between), row, row, wide(Stored)],
            vec![
                (Op::AddBias, vec![0, 1], vec![2]),
                (drop, vec![2], vec![3]),
                (Op::Add, vec![4, 3], vec![5]),
                (Op::LayerNorm { eps }, vec![5, 6, 7], vec![8]),
            ],
        ),
        4 => (vec![wide(Loaded), wide(between), wide(Loaded), wide(Stored)], vec![(drop, vec![0], vec![1]), (Op::Add, vec![1, 2], vec![3])]),
        5 => (
            vec![wide(Loaded), wide(Loaded), wide(Loaded), wide(between), wide(Kept), wide(Stored)],
            vec![(Op::GatedGrad(f), vec![0, 1, 2], vec![3, 4]), (Op::Sub, vec![3, 4], vec![5])],
        ),
        6 => (
            vec![wide(Loaded), row, wide(between), wide(Kept), wide(Stored)],
            vec![(Op::AddBias, vec![0, 1], vec![2]), (Op::Act(f), vec![2], vec![3]), (drop, vec![3], vec![4])],
        ),
        _ => (vec![wide(between), wide(Stored)], vec![(Op::MeanGrad, vec![], vec![0]), (Op::Neg, vec![0], vec![1])]),
    }
}

/// A random chain, in one of the modes.
pub fn joined(r: &mut Random) -> Joined {
    let letters = vec![letter('a', r.size(4)), letter('b', r.size(9)), letter('c', r.size(700))];
    let Case { dtype, write, alignment, .. } = draw::case(r, Op::Neg, &[3], &[3], letters.clone());
    let kind = r.below(KINDS);
    of_kind(r, kind, &letters, (dtype, write, alignment))
}

/// A chain of some kind on values of these sizes.
pub fn of_kind(r: &mut Random, kind: u64, letters: &[(char, u64, u64, u64)], (dtype, write, alignment): (DType, Write, Alignment)) -> Joined {
    let (values, ops) = shape(r, kind);
    let dims = |lies| letters.iter().map(|l| l.2).skip(if lies == Lies::Row { 2 } else { 0 }).collect::<Vec<u64>>();
    let types: Vec<LocalType> = values.iter().map(|&(lies, _)| LocalType { dtype, dims: dims(lies), layout: Layout::Dense, experts: 0 }).collect();
    let mut numbers = |ty: &LocalType| Tensor::dense(&ty.dims, (0..ty.elems()).map(|_| round(r.uniform() * 4.0 - 2.0, dtype)).collect());
    let starts: Vec<Tensor> = types.iter().map(&mut numbers).collect();
    let cases: Vec<Case> = ops
        .iter()
        .map(|(op, ins, outs)| {
            let ranks = |ids: &[usize]| ids.iter().map(|&v| types[v].dims.len()).collect::<Vec<_>>();
            let case = Case { op: op.clone(), ranks: (ranks(ins), ranks(outs)), letters: letters.to_vec(), dtype, out: None, ..blank() };
            assert!((0..outs.len()).all(|at| result(op, at, dtype) == dtype), "{op:?} changes the type");
            case
        })
        .collect();
    let contexts: Vec<_> = cases.iter().map(context).collect();
    let of = |ids: &[usize]| ids.iter().map(|&v| types[v].clone()).collect::<Vec<_>>();
    // In f64, each value rounded as it is in memory.
    let mut exact = starts.clone();
    let mut apart = Vec::new();
    for (nth, ((op, ins, outs), context)) in ops.iter().zip(&contexts).enumerate() {
        let adds = nth + 1 == ops.len() && write == Write::Add;
        let made = eval(op, context, &ins.iter().map(|&v| &exact[v]).collect::<Vec<_>>(), &of(outs));
        for (&to, made) in outs.iter().zip(made) {
            let before = &starts[to].data;
            let value = made.data.iter().zip(before).map(|(x, y)| round(if adds { x + y } else { *x }, dtype)).collect();
            exact[to] = Tensor::dense(&types[to].dims, value);
        }
        let descriptor = Descriptor {
            op,
            context,
            ins: &of(ins),
            outs: &of(outs),
            write: if adds { Write::Add } else { Write::Set },
            alignment,
            target: TARGET,
            epilogue: Epilogue::default(),
        };
        apart.push((prepare(&descriptor).unwrap_or_else(|e| panic!("{op:?}: {e}")), ins.clone(), outs.clone()));
    }
    let links: Vec<Link<'_>> =
        ops.iter().zip(&contexts).map(|((op, ins, outs), context)| Link { op, context, ins: ins.clone(), outs: outs.clone() }).collect();
    let held: Vec<(LocalType, Held)> = types.iter().zip(&values).map(|(ty, v)| (ty.clone(), v.1)).collect();
    let routine = chain(&Chain { links: &links, values: &held, write, alignment, target: TARGET }).unwrap_or_else(|e| panic!("{ops:?}: {e}"));
    let which = |held: Held| values.iter().enumerate().filter(move |(_, v)| v.1 == held).map(|(at, _)| at);
    let stored: Vec<usize> = which(Held::Stored).collect();
    let buffer = |v: usize| Buffer::new(&starts[v].data, dtype, alignment);
    // A rounding of each op, of what may be as large as the largest; ops that divide by a row's spread make more of it where that is small.
    let unit = if dtype.size() == 2 { ops.len() as f64 * ulp(1.0, dtype) } else { 0.0 };
    let bounds = stored.iter().map(|&v| {
        let largest = exact.iter().flat_map(|t| &t.data).fold(1.0, |m: f64, x| m.max(x.abs()));
        (unit > 0.0).then(|| vec![unit * largest; exact[v].data.len()])
    });
    let together = Prepared {
        name: format!("{:?} {dtype} {write:?} {alignment:?} {letters:?}", ops.iter().map(|o| &o.0).collect::<Vec<_>>()),
        routine,
        ins: which(Held::Loaded).map(buffer).collect(),
        starts: stored.iter().map(|&v| buffer(v)).collect(),
        want: stored.iter().map(|&v| exact[v].data.clone()).collect(),
        bounds: bounds.collect(),
        write,
    };
    let buffers = (0..values.len()).map(buffer).collect();
    Joined { together, apart, values: buffers, stored }
}

fn blank() -> Case {
    Case {
        op: Op::Neg,
        ranks: (vec![3], vec![3]),
        letters: Vec::new(),
        dtype: DType::F32,
        out: None,
        write: Write::Set,
        alignment: Alignment::Packs,
        top_k: 2,
        order: Default::default(),
        target: TARGET,
        tails: Vec::new(),
    }
}

impl Joined {
    /// All kernels, of the chain and of its ops.
    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        self.together.routine.launches.iter().chain(self.apart.iter().flat_map(|(routine, ..)| &routine.launches))
    }
    /// The stored values as the ops one by one make them, and what moved.
    ///
    /// # Errors
    /// As kernels in the shim.
    pub fn one_by_one(&self, library: &Library, seed: u64) -> Result<(Vec<Vec<u8>>, u64), ShimError> {
        let mut values: Vec<Vec<u8>> = self.values.iter().map(|b| b.bytes().to_vec()).collect();
        let mut moved = 0;
        for (routine, ins, outs) in &self.apart {
            let copies: Vec<Buffer> = ins.iter().map(|&v| self.values[v].with(&values[v])).collect();
            let mut made: Vec<Buffer> = outs.iter().map(|&v| self.values[v].with(&values[v])).collect();
            let ran: Ran = {
                let mut results: Vec<&mut [u8]> = made.iter_mut().map(Buffer::bytes_mut).collect();
                let options = Options { micro_batch: super::MICRO_BATCH as i64, ..Options::seeded(seed) };
                library.run(routine, &copies.iter().map(Buffer::bytes).collect::<Vec<_>>(), &mut results, &step_scalars(), options)?
            };
            moved += ran.moved.read + ran.moved.written;
            outs.iter().zip(&made).for_each(|(&v, b)| values[v] = b.bytes().to_vec());
        }
        Ok((self.stored.iter().map(|&v| values[v].clone()).collect(), moved))
    }
}
