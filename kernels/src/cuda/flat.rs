//! What a program does with flat buffers and scalars: sums, clipping, the optimizer.

use std::ops::Range;

use dplan_ir::cost::{OpCost, Unit};
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::Optimizer;

use super::source::{Builder, Config, Size, int};
use super::{Alignment, Arg, Family, Launch, Routine, pointwise};

const THREADS: u64 = 256;
/// Elements that one block sums at least.
const STRETCH: u64 = 16 * 1024;
const MOST_BLOCKS: u64 = 1024;

/// Σ x · InvTokens.
pub fn mean(b: &mut Builder<'_>) {
    let n = b.d.ins[0].elems();
    let (elem, out, add) = (b.elem, b.d.outs[0].dtype, b.add());
    let parts = parts(n);
    let aux = b.take(parts.0 * 8);
    let steps = sum(n, parts, Sum { input: elem, output: out, square: false, add, mean: true }, aux);
    b.launches.extend(steps);
}

/// dst ← dst + Σ src².
pub fn square_sum(src: DType, dst: DType, n: u64) -> Routine {
    let parts = parts(n);
    let launches = sum(n, parts, Sum { input: src, output: dst, square: true, add: true, mean: false }, Arg::Aux(0));
    routine(launches, parts.0 * 8, 2 * n, n * src.size())
}

/// dst ← dst + src.
pub fn add_into(src: DType, dst: DType, n: u64, alignment: Alignment) -> Routine {
    let pack = pack(n, &[src, dst], alignment);
    let config = pointwise::config(src, dst, dst.accumulator(), [1, 1], pack).flag("ADD", true).signed("REPEATS", -1);
    let text = pointwise::text(config, "u = x;", None);
    let args = vec![Arg::In(0), Arg::Scalars, Arg::Scalars, Arg::Out(0), Arg::Out(0), Arg::Scalars, int(n), int(1)];
    let launch = one(Family::Pointwise, "dp_pointwise", text, Size::over(n / pack, THREADS), args);
    routine(launch, 0, n, n * (src.size() + 2 * dst.size()))
}

/// dst ← clip factor of √src.
pub fn clip_scale(src: DType, dst: DType) -> Routine {
    let text = Config::default().ty("in_t", src).ty("out_t", dst).int("THREADS", 32).text(&[include_str!("text/clip.cuh")]);
    let launch = one(Family::Scalar, "dp_clip", text, Size::blocks(1, 32, 0), vec![Arg::In(0), Arg::Out(0), Arg::Scalars]);
    routine(launch, 0, 3, src.size() + dst.size())
}

/// One optimizer step on `n` elements. Operands: gradient, then the scale if there is one. Results: state, moments, then the parameter in the compute
/// type if it is another buffer.
#[derive(Clone, Debug)]
pub struct Update<'a> {
    pub optimizer: Optimizer,
    pub state: DType,
    pub grad: DType,
    pub param: Option<DType>,
    pub scale: Option<DType>,
    pub n: u64,
    pub alignment: Alignment,
    /// All elements, in stretches that weight decay pulls or does not.
    pub stretches: &'a [(Range<u64>, bool)],
}

/// One launch for each stretch.
pub fn update(u: &Update<'_>) -> Routine {
    let (adam, coupled) = match u.optimizer {
        Optimizer::AdamW => (true, false),
        Optimizer::Adam => (true, true),
        Optimizer::Sgd => (false, false),
        Optimizer::Lamb => unreachable!("refused when loaded"),
    };
    let param = u.param.unwrap_or(u.state);
    let moments = u.optimizer.moments();
    let cast = if u.param.is_some() { Arg::Out(1 + moments) } else { Arg::Out(0) };
    let scale = if u.scale.is_some() { Arg::In(1) } else { Arg::Scalars };
    let mut launches = Vec::new();
    for (stretch, pulled) in u.stretches {
        let whole = [stretch.start, stretch.end].iter().map(|at| pack(*at, &[u.state, u.grad], u.alignment)).min();
        let pack = whole.unwrap_or(1);
        let text = Config::default()
            .ty("state_t", u.state)
            .ty("grad_t", u.grad)
            .ty("param_t", param)
            .ty("scale_t", u.scale.unwrap_or(u.state))
            .ty("acc", u.state.accumulator())
            .int("THREADS", THREADS)
            .int("VEC", pack)
            .flag("ADAM", adam)
            .flag("COUPLED", coupled)
            .flag("PULLED", *pulled)
            .flag("SCALED", u.scale.is_some())
            .flag("CAST", u.param.is_some())
            .text(&[include_str!("text/update.cuh")]);
        let args = vec![Arg::Out(0), Arg::In(0), Arg::Out(1), Arg::Out(moments), cast, scale, Arg::Scalars, int(stretch.start), int(stretch.end)];
        let size = Size::over((stretch.end - stretch.start) / pack, THREADS);
        launches.extend(one(Family::Optimizer, "dp_update", text, size, args));
    }
    let bytes = u.n * (u.grad.size() + 2 * u.state.size() * (1 + moments as u64) + u.param.map_or(0, DType::size));
    routine(launches, 0, u.n * if adam { 14 } else { 6 }, bytes)
}

/// Rows of `src[outer, row]` reordered into `dst`: element (o, part, i) of `src` goes to (part, o, i), for parts of `len` elements.
/// Collectives of NCCL want the blocks of ranks one after the other.
pub fn blocks(dtype: DType, outer: u64, parts: u64, len: u64, way: Way) -> Routine {
    let text = Config::default().ty("elem", dtype).int("THREADS", THREADS).flag("PACK", way == Way::Pack).text(&[include_str!("text/blocks.cuh")]);
    let n = outer * parts * len;
    let args = vec![Arg::In(0), Arg::Out(0), int(outer), int(parts), int(len)];
    routine(one(Family::Pointwise, "dp_blocks", text, Size::over(n, THREADS), args), 0, 0, 2 * n * dtype.size())
}

/// Into blocks of ranks, or out of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    Pack,
    Unpack,
}

/// dst ← log Σ exp over `parts` stretches of `n` elements, element by element.
pub fn log_sum_exp(dtype: DType, parts: u64, n: u64) -> Routine {
    let text = Config::default().ty("elem", dtype).ty("acc", dtype.accumulator()).int("THREADS", THREADS).text(&[include_str!("text/merge.cuh")]);
    let launch = one(Family::Loss, "dp_merge", text, Size::over(n, THREADS), vec![Arg::In(0), Arg::Out(0), int(parts), int(n)]);
    routine(launch, 0, 4 * n * parts, n * (parts + 1) * dtype.size())
}

#[derive(Clone, Copy)]
struct Sum {
    input: DType,
    output: DType,
    square: bool,
    add: bool,
    mean: bool,
}

/// Blocks, and elements of each.
fn parts(n: u64) -> (u64, u64) {
    let stretch = n.div_ceil(MOST_BLOCKS).max(STRETCH);
    (n.div_ceil(stretch).max(1), stretch)
}

fn sum(n: u64, (parts, stretch): (u64, u64), s: Sum, aux: Arg) -> Vec<Launch> {
    let text = |input: DType, output: DType, square: bool, add: bool, mean: bool| {
        let config = Config::default().ty("in_t", input).ty("out_t", output).ty("acc", input.accumulator()).int("THREADS", THREADS);
        let config = config.flag("SQUARE", square).flag("ADD", add).flag("MEAN", mean);
        config.text(&[include_str!("text/scalar.cuh")])
    };
    let shared = 32 * 8;
    let first = text(s.input, DType::F64, s.square, false, false);
    let last = text(DType::F64, s.output, false, s.add, s.mean);
    let first_args = vec![Arg::In(0), aux, Arg::Scalars, int(n), int(stretch)];
    let last_args = vec![aux, Arg::Out(0), Arg::Scalars, int(parts), int(parts)];
    let mut launches = one(Family::Scalar, "dp_sum", first, Size::blocks(parts, THREADS, shared), first_args);
    launches.extend(one(Family::Scalar, "dp_sum", last, Size::blocks(1, THREADS, shared), last_args));
    launches
}

fn one(family: Family, entry: &'static str, text: String, size: Size, args: Vec<Arg>) -> Vec<Launch> {
    if size.blocks == 0 {
        return Vec::new();
    }
    let (grid, threads, shared) = (size.blocks as u32, size.threads as u32, size.shared as u32);
    vec![Launch { family, entry, text, grid, threads, shared, args }]
}

fn routine(launches: Vec<Launch>, aux: u64, flops: u64, bytes: u64) -> Routine {
    Routine { launches, aux, cost: OpCost { flops, bytes, unit: Unit::Vector } }
}

fn pack(n: u64, types: &[DType], alignment: Alignment) -> u64 {
    let widest = types.iter().map(|t| t.size()).max().unwrap_or(4);
    match alignment {
        Alignment::Packs if n.is_multiple_of(16 / widest) => 16 / widest,
        Alignment::Packs | Alignment::Elements => 1,
    }
}
