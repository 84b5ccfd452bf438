//! What a program does with flat buffers and scalars: sums, clipping, the optimizer.

use std::collections::BTreeMap;
use std::ops::Range;

use dplan_ir::cost::{OpCost, Unit};
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::Optimizer;
use dplan_ir::program::Write;

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
    routine(moved(src, dst, dst.accumulator(), n, alignment, Write::Add), 0, n, n * (src.size() + 2 * dst.size()))
}

/// dst ← src, rounded.
pub fn cast(src: DType, dst: DType, n: u64, alignment: Alignment) -> Routine {
    routine(moved(src, dst, src, n, alignment, Write::Set), 0, n, n * (src.size() + dst.size()))
}

/// dst ← src or dst + src, by way of `acc`.
fn moved(src: DType, dst: DType, acc: DType, n: u64, alignment: Alignment, write: Write) -> Vec<Launch> {
    let pack = pack(n, &[src, dst], alignment);
    let config = pointwise::config(src, dst, acc, [1, 1], pack).flag("ADD", write == Write::Add).signed("REPEATS", -1);
    let text = pointwise::text(config, "u = x;", None);
    let args = vec![Arg::In(0), Arg::Scalars, Arg::Scalars, Arg::Out(0), Arg::Out(0), Arg::Scalars, int(n), int(1)];
    one(Family::Pointwise, "dp_pointwise", text, Size::over(n / pack, THREADS), args)
}

/// dst ← Σ over `shares` stretches of `n` elements, in their order, element by element.
pub fn sum_shares(src: DType, dst: DType, shares: u64, n: u64) -> Routine {
    let text = Config::default().ty("in_t", src).ty("out_t", dst).ty("acc", dst.accumulator()).int("THREADS", THREADS);
    let text = text.text(&[include_str!("text/shares.cuh")]);
    let launch = one(Family::Pointwise, "dp_shares", text, Size::over(n, THREADS), vec![Arg::In(0), Arg::Out(0), int(shares), int(n)]);
    routine(launch, 0, n * shares, n * (shares * src.size() + dst.size()))
}

/// dst ← clip factor of √src.
pub fn clip_scale(src: DType, dst: DType) -> Routine {
    let text = Config::default().ty("in_t", src).ty("out_t", dst).int("THREADS", 32).text(&[include_str!("text/clip.cuh")]);
    let launch = one(Family::Scalar, "dp_clip", text, Size::blocks(1, 32, 0), vec![Arg::In(0), Arg::Out(0), Arg::Scalars]);
    routine(launch, 0, 3, src.size() + dst.size())
}

/// One optimizer step on `n` elements. Operands: gradient, then the scale if there is one, then the sums of trust ratios. Results: state, moments, then the
/// parameter in the compute type if it is another buffer.
#[derive(Clone, Debug)]
pub struct Update<'a> {
    pub optimizer: Optimizer,
    pub state: DType,
    pub grad: DType,
    pub param: Option<DType>,
    pub scale: Option<DType>,
    pub n: u64,
    pub alignment: Alignment,
    /// All elements, in stretches that weight decay pulls or does not; by parameter, if there are trust ratios.
    pub stretches: &'a [(Range<u64>, bool)],
    pub trust: Option<Trust<'a>>,
}

/// Sums of trust ratios: their type, and which of them each stretch has, as numbers of parameters.
#[derive(Clone, Copy, Debug)]
pub struct Trust<'a> {
    pub sums: DType,
    pub members: &'a [usize],
}

/// As many stretches as a text has names for at a time.
pub fn update(u: &Update<'_>) -> Routine {
    let (adam, coupled, lamb) = match u.optimizer {
        Optimizer::AdamW => (true, false, false),
        Optimizer::Adam => (true, true, false),
        Optimizer::Sgd => (false, false, false),
        Optimizer::Lamb => (true, false, true),
    };
    let param = u.param.unwrap_or(u.state);
    let moments = u.optimizer.moments();
    let cast = if u.param.is_some() { Arg::Out(1 + moments) } else { Arg::Out(0) };
    let scale = if u.scale.is_some() { Arg::In(1) } else { Arg::Scalars };
    let trust = if u.trust.is_some() { Arg::In(1 + usize::from(u.scale.is_some())) } else { Arg::Scalars };
    let operands = [Arg::Out(0), Arg::In(0), Arg::Out(1), Arg::Out(moments), cast, scale, trust, Arg::Scalars];
    let member = |at: usize| u.trust.and_then(|t| t.members.get(at)).copied().unwrap_or(0);
    let all = u.stretches.iter().enumerate().map(|(at, (range, pulled))| Stretch { range: range.clone(), member: member(at), pulled: *pulled });
    let mut launches = Vec::new();
    for (pack, some) in together(all, &[u.state, u.grad], u.alignment) {
        let text = stepping(u.state, u.grad, u.scale, pack)
            .ty("param_t", param)
            .ty("trust_t", u.trust.map_or(u.state, |t| t.sums))
            .flag("ADAM", adam)
            .flag("LAMB", lamb)
            .flag("COUPLED", coupled)
            .flag("CAST", u.param.is_some())
            .text(&[include_str!("text/adam.cuh"), STRETCHES, include_str!("text/update.cuh")]);
        // A thread takes one pack.
        let shift = (THREADS * pack).ilog2();
        let args = operands.into_iter().chain(table(&some, shift)).collect();
        launches.extend(one(Family::Optimizer, "dp_update", text, Size::blocks(blocks_of(&some, shift), THREADS, 0), args));
    }
    let bytes = u.n * (u.grad.size() + 2 * u.state.size() * (1 + moments as u64) + u.param.map_or(0, DType::size));
    routine(launches, 0, u.n * if adam { 14 } else { 6 }, bytes)
}

/// The sums that trust ratios of a bucket's parameters are of. Operands: state, gradient, two moments, then the scale if there is one. Result: two sums for each.
#[derive(Clone, Debug)]
pub struct TrustSums<'a> {
    pub state: DType,
    pub grad: DType,
    pub scale: Option<DType>,
    pub alignment: Alignment,
    /// What there is of the parameters, by parameter, and whether weight decay pulls it.
    pub stretches: &'a [(Range<u64>, bool)],
    pub trust: Trust<'a>,
    /// All parameters: of some there may be nothing here.
    pub parameters: u64,
}

/// Two launches for as many parameters as a text has names for: into parts, then of these the sums.
pub fn trust_sums(t: &TrustSums<'_>) -> Routine {
    let lengths = || t.stretches.iter().map(|(range, _)| range.end - range.start);
    // So that the largest parameter has not too many blocks.
    let shift = parts(lengths().max().unwrap_or(0)).1.next_power_of_two().ilog2();
    let scale = if t.scale.is_some() { Arg::In(4) } else { Arg::Scalars };
    let shared = 32 * 8;
    // Of what there is nothing here the sums are of nothing.
    let all = (0..t.parameters as usize).map(|member| {
        let here = t.trust.members.iter().position(|&m| m == member).and_then(|at| t.stretches.get(at));
        let (range, pulled) = here.cloned().unwrap_or((0..0, false));
        Stretch { range, member, pulled }
    });
    let (mut launches, mut aux) = (Vec::new(), 0);
    for (pack, some) in together(all, &[t.state, t.grad], t.alignment) {
        let text = stepping(t.state, t.grad, t.scale, pack).text(&[include_str!("text/adam.cuh"), STRETCHES, include_str!("text/trust.cuh")]);
        let (count, at) = (blocks_of(&some, shift), Arg::Aux(aux));
        let operands = [Arg::In(0), Arg::In(1), Arg::In(2), Arg::In(3), scale, Arg::Scalars, at];
        let args = operands.into_iter().chain(table(&some, shift)).collect();
        launches.extend(one(Family::Optimizer, "dp_trust", text, Size::blocks(count, THREADS, shared), args));
        let config = Config::default().ty("trust_t", t.trust.sums).int("THREADS", THREADS);
        let text = config.text(&[STRETCHES, include_str!("text/trust_total.cuh")]);
        let args = [at, Arg::Out(0)].into_iter().chain(table(&some, shift)).collect();
        launches.extend(one(Family::Optimizer, "dp_trust_total", text, Size::blocks(some.len() as u64, THREADS, shared), args));
        aux += (count * 16).next_multiple_of(256);
    }
    let n: u64 = lengths().sum();
    // What stretches of nothing name is there.
    routine(launches, aux.max(256), 16 * n, n * (3 * t.state.size() + t.grad.size()))
}

/// A part of a flat buffer, of one parameter where its number matters.
#[derive(Clone, Debug)]
struct Stretch {
    range: Range<u64>,
    member: usize,
    pulled: bool,
}

const STRETCHES: &str = include_str!("text/stretches.cuh");
/// For which `stretches.cuh` has names.
const MOST_STRETCHES: usize = 16;

/// Stretches that a launch may have together, and elements that its threads take at once.
fn together(all: impl Iterator<Item = Stretch>, types: &[DType], alignment: Alignment) -> Vec<(u64, Vec<Stretch>)> {
    let mut packs: BTreeMap<u64, Vec<Stretch>> = BTreeMap::new();
    all.for_each(|s| packs.entry(pack_of(&s.range, types, alignment)).or_default().push(s));
    packs.into_iter().rev().flat_map(|(pack, some)| some.chunks(MOST_STRETCHES).map(|c| (pack, c.to_vec())).collect::<Vec<_>>()).collect()
}

/// Blocks that take 2^shift elements of a stretch each.
fn blocks_of(some: &[Stretch], shift: u32) -> u64 {
    some.iter().map(|s| (s.range.end - s.range.start).div_ceil(1 << shift)).sum()
}

/// The last arguments of a launch.
fn table(some: &[Stretch], shift: u32) -> impl Iterator<Item = Arg> {
    let words = some.iter().flat_map(|s| [s.range.start, s.range.end, 2 * s.member as u64 + u64::from(s.pulled)]);
    let rest = std::iter::repeat_n(0, 3 * (MOST_STRETCHES - some.len()));
    [u64::from(shift)].into_iter().chain(words).chain(rest).map(int).collect::<Vec<_>>().into_iter()
}

/// What all kernels of optimizers are told.
fn stepping(state: DType, grad: DType, scale: Option<DType>, pack: u64) -> Config {
    Config::default()
        .ty("state_t", state)
        .ty("grad_t", grad)
        .ty("scale_t", scale.unwrap_or(state))
        .ty("acc", state.accumulator())
        .int("THREADS", THREADS)
        .int("VEC", pack)
        .flag("SCALED", scale.is_some())
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

/// Where the left of two parts is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Left {
    /// Where the result goes.
    InPlace,
    Elsewhere,
}

/// dst ← left + right, for each of several values, of these types and sizes. Operands: all of left, then all of right.
pub fn join_sums(values: &[(DType, u64)], left: Left) -> Routine {
    let launches = values.iter().enumerate().flat_map(|(at, &(dtype, n))| {
        let args = vec![Arg::In(at), Arg::In(values.len() + at), Arg::Out(at), int(n)];
        one(Family::Pointwise, "dp_join_sums", joining(dtype, left), Size::over(n, THREADS), args)
    });
    routine(launches.collect(), 0, values.iter().map(|v| v.1).sum(), values.iter().map(|(dtype, n)| 3 * n * dtype.size()).sum())
}

/// dst ← left and right joined, each (o, lse) of an attention over other keys: `rows` of `width` elements of o. Operands: both of left, then both of right.
pub fn join_attention(dtype: DType, rows: u64, width: u64, left: Left) -> Routine {
    let args = [0, 1, 2, 3].map(Arg::In).into_iter().chain([Arg::Out(0), Arg::Out(1), int(rows), int(width)]).collect();
    let launch = one(Family::Attention, "dp_join_attention", joining(dtype, left), Size::blocks(rows.div_ceil(THREADS / 32), THREADS, 0), args);
    routine(launch, 0, rows * (3 * width + 8), 3 * rows * (width * dtype.size() + dtype.accumulator().size()))
}

fn joining(dtype: DType, left: Left) -> String {
    let config = Config::default().ty("elem", dtype).ty("acc", dtype.accumulator()).int("THREADS", THREADS);
    config.flag("IN_PLACE", left == Left::InPlace).text(&[include_str!("text/join.cuh")])
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
    vec![Launch { family, entry, text, grid, threads, shared, args, instead: None }]
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

/// Elements that a thread takes at once of a stretch.
fn pack_of(stretch: &Range<u64>, types: &[DType], alignment: Alignment) -> u64 {
    pack(stretch.start, types, alignment).min(pack(stretch.end, types, alignment))
}
