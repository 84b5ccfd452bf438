//! Trials of kernels: random blocks for an op, and the f64 reference that its kernels must meet, in the shim ([`Prepared::run`]) or on a GPU.
//!
//! A [`Case`] is an op with sizes and types; [`draw`] draws cases of each family. [`make`] gives it operands, what [`dplan_ir::interp`] makes of them in f64, and what each
//! element may be off by: products 8 √K 2⁻²⁴ Σ|a||b|, attention in halves what rounding its probabilities costs, others a tolerance of the caller.

pub mod chains;
pub mod draw;
pub mod flat;
pub mod large;

use crate::cpu::block::{Block, BlockMut};
use crate::cpu::{Kernel, Run, Threads};
use crate::cuda::arch::Arch;
use crate::cuda::epilogue::{Epilogue, Lies, Tail};
use crate::cuda::{self, Alignment, Descriptor, Launch, Routine, Target, prepare};
use crate::shim::{self, Library, Options, Ran};
use dplan_ir::documents::first_positions;
use dplan_ir::dropout::Draws;
use dplan_ir::dtype::DType;
use dplan_ir::entity::NodeId;
use dplan_ir::extent::{Extent, OpContext};
use dplan_ir::graph::Layout;
use dplan_ir::infer::is_index;
use dplan_ir::interp::{Tensor, op::eval};
use dplan_ir::op::{Attention, Documents, Op, Spec};
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::order::Order;
use dplan_ir::program::Write;
use dplan_ir::rule::rule;
use dplan_ir::sharding::LocalType;
use dplan_ir::splitmix;

/// A small generator of numbers that look random (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn word(&mut self) -> u64 {
        splitmix::next(&mut self.0)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.word() % n
    }
    pub fn uniform(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }
    /// An edge size (1, a prime, one beside a tile) or any up to `most`.
    pub fn size(&mut self, most: u64) -> u64 {
        const EDGES: [u64; 12] = [1, 2, 3, 7, 8, 16, 31, 33, 64, 65, 127, 129];
        let edge = EDGES[self.below(EDGES.len() as u64) as usize];
        if self.below(2) == 0 && edge <= most { edge } else { 1 + self.below(most) }
    }
}

/// Of kernels that any GPU has.
pub const TARGET: Target = Target::of(Arch::Sm80);

/// `letters`: label, start, length and logical size of each factor.
#[derive(Clone)]
pub struct Case {
    pub op: Op,
    pub ranks: (Vec<usize>, Vec<usize>),
    pub letters: Vec<(char, u64, u64, u64)>,
    pub dtype: DType,
    /// Of the first result, where it is not what the op gives.
    pub out: Option<DType>,
    pub write: Write,
    pub alignment: Alignment,
    pub top_k: u64,
    /// Of the positions, where the op knows any.
    pub order: Order,
    pub target: Target,
    /// What follows a product.
    pub tails: Vec<Tail>,
}

pub fn spec(left: &str, right: &str, out: &str) -> Spec {
    Spec { left: left.into(), right: right.into(), out: out.into() }
}

pub fn letter(label: char, len: u64) -> (char, u64, u64, u64) {
    (label, 0, len, len)
}

/// A case made ready: its kernels, operands and reference.
pub struct Prepared {
    pub name: String,
    pub routine: Routine,
    pub ins: Vec<Buffer>,
    pub starts: Vec<Buffer>,
    pub want: Vec<Vec<f64>>,
    /// What each element of a result may be off by, besides the rounding of the result itself; `None` for the tolerance of the test.
    pub bounds: Vec<Option<Vec<f64>>>,
    pub write: Write,
}

/// Typed bytes at an address that is aligned to 16 bytes, or deliberately not.
pub struct Buffer {
    words: Vec<u64>,
    skip: usize,
    bytes: usize,
    pub dtype: DType,
}

impl Buffer {
    pub fn new(values: &[f64], dtype: DType, alignment: Alignment) -> Buffer {
        let size = dtype.size() as usize;
        let bytes = values.len() * size;
        let words = vec![0u64; bytes / 8 + 8];
        let base = words.as_ptr() as usize;
        let skip = (16 - base % 16) % 16
            + match alignment {
                Alignment::Packs => 0,
                Alignment::Elements => size,
            };
        let mut buffer = Buffer { words, skip, bytes, dtype };
        for (chunk, &v) in buffer.bytes_mut().chunks_exact_mut(size).zip(values) {
            encode(v, dtype, chunk);
        }
        buffer
    }
    /// Other bytes, of the same type and at such an address.
    pub fn with(&self, bytes: &[u8]) -> Buffer {
        let alignment = if self.beyond() == 0 { Alignment::Packs } else { Alignment::Elements };
        let mut other = Buffer::new(&vec![0.0; bytes.len() / self.dtype.size() as usize], self.dtype, alignment);
        other.bytes_mut().copy_from_slice(bytes);
        other
    }
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: inside the words, which are plain bytes.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast::<u8>().add(self.skip), self.bytes) }
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>().add(self.skip), self.bytes) }
    }
    /// Bytes beyond a multiple of 16 at which it begins.
    pub fn beyond(&self) -> usize {
        (self.bytes().as_ptr() as usize) % 16
    }
    pub fn values(&self) -> Vec<f64> {
        self.bytes().chunks_exact(self.dtype.size() as usize).map(|c| decode(c, self.dtype)).collect()
    }
}

fn encode(v: f64, dtype: DType, to: &mut [u8]) {
    match dtype {
        DType::F64 => to.copy_from_slice(&v.to_le_bytes()),
        DType::F32 => to.copy_from_slice(&(v as f32).to_le_bytes()),
        DType::Bf16 => to.copy_from_slice(&half::bf16::from_f64(v).to_le_bytes()),
        DType::F16 => to.copy_from_slice(&half::f16::from_f64(v).to_le_bytes()),
        DType::I32 => to.copy_from_slice(&(v as i32).to_le_bytes()),
    }
}

fn decode(from: &[u8], dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::from_le_bytes(from.try_into().unwrap()),
        DType::F32 => f64::from(f32::from_le_bytes(from.try_into().unwrap())),
        DType::Bf16 => half::bf16::from_le_bytes(from.try_into().unwrap()).to_f64(),
        DType::F16 => half::f16::from_le_bytes(from.try_into().unwrap()).to_f64(),
        DType::I32 => f64::from(i32::from_le_bytes(from.try_into().unwrap())),
    }
}

pub fn round(v: f64, dtype: DType) -> f64 {
    let mut bytes = [0; 8];
    let bytes = &mut bytes[..dtype.size() as usize];
    encode(v, dtype, bytes);
    decode(bytes, dtype)
}

/// Unit in the last place at `v`.
pub fn ulp(v: f64, dtype: DType) -> f64 {
    let (digits, smallest) = match dtype {
        DType::F64 => (52, -1074),
        DType::F32 => (23, -149),
        DType::Bf16 => (7, -133),
        DType::F16 => (10, -24),
        DType::I32 => return 0.0,
    };
    let exponent = if v == 0.0 { smallest } else { (v.abs().log2().floor() as i32 - digits).max(smallest) };
    2f64.powi(exponent)
}

pub const INV_TOKENS: f64 = 0.125;
pub const LOSS_SCALE: f64 = 4.0;
pub const HYPER: Hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };
/// Of dropout; sequences beyond 32 bits.
pub const DRAWS: Draws = Draws { seed: 11, sequence: (3 << 32) - 2 };
/// The micro-batch that shims run.
pub const MICRO_BATCH: u64 = 3;

/// The scalars of a first step.
pub fn step_scalars() -> cuda::Scalars {
    cuda::scalars(&step())
}

pub fn step() -> StepScalars {
    StepScalars { loss_scale: LOSS_SCALE, draws: DRAWS, ..StepScalars::new(HYPER, 1, INV_TOKENS) }
}

/// Types of the operands that are not the compute type.
fn operand(op: &Op, at: usize, dtype: DType) -> DType {
    match (op, at) {
        _ if is_index(op, at) => DType::I32,
        (Op::AttentionGrad(_), 4) | (Op::SinkGrad, 2) | (Op::CeStatsGrad, 2..) => dtype.accumulator(),
        _ => dtype,
    }
}

fn result(op: &Op, at: usize, dtype: DType) -> DType {
    match (op, at) {
        (Op::SumLeading { .. } | Op::RmsNormGradWeight { .. } | Op::LayerNormGradWeight { .. }, _)
        | (Op::EmbedGrad | Op::AddPositionGrad | Op::CeStats | Op::Mean, _)
        | (Op::Attention(_) | Op::AttentionSink(_), 1)
        | (Op::SinkGrad | Op::ExpertBiasGrad | Op::CorrectionGrad, _) => dtype.accumulator(),
        _ => dtype,
    }
}

/// What a case's op knows besides its operands.
fn context(case: &Case) -> OpContext {
    let extent = |label: char| {
        let of = case.letters.iter().find(|l| l.0 == label);
        of.map(|&(_, start, len, logical)| Extent { start, len, logical }).unwrap_or_else(|| panic!("{:?} has no {label}", case.op))
    };
    let sequences = case.letters.first().map_or(0, |l| l.3);
    OpContext {
        extents: rule(&case.op, &case.ranks.0, &case.ranks.1).factors.iter().map(|f| (f.label, extent(f.label))).collect(),
        inv_tokens: INV_TOKENS,
        loss_scale: LOSS_SCALE,
        node: NodeId(7),
        draws: DRAWS.after(MICRO_BATCH * sequences),
        order: case.order,
        turn: 0,
    }
}

/// The result of a case with one operand on a CPU rank.
pub fn cpu(case: &Case, x: &[f64]) -> Vec<f64> {
    let ty = LocalType { dtype: case.dtype, dims: case.letters.iter().map(|l| l.2).collect(), layout: Layout::Dense, experts: 0 };
    let context = context(case);
    let ty = std::slice::from_ref(&ty);
    let kernel = Kernel::prepare(&case.op, &context, ty, ty).unwrap_or_else(|e| panic!("{e}"));
    let run = Run { write: case.write, inv_tokens: INV_TOKENS, loss_scale: LOSS_SCALE, draws: context.draws, threads: Threads::Caller };
    if case.dtype == DType::F64 {
        let mut y = vec![0.0; x.len()];
        kernel.run(&[Block::F64(x)], &mut [BlockMut::F64(&mut y)], BlockMut::F64(&mut []), &mut [], run);
        return y;
    }
    let x: Vec<f32> = x.iter().map(|&x| x as f32).collect();
    let mut y = vec![0.0f32; x.len()];
    kernel.run(&[Block::F32(&x)], &mut [BlockMut::F32(&mut y)], BlockMut::F32(&mut []), &mut [], run);
    y.into_iter().map(f64::from).collect()
}

/// The blocks of a case, and which factors lie along their dims.
struct Typed {
    context: OpContext,
    labels: [Vec<Vec<char>>; 2],
    ins: Vec<LocalType>,
    outs: Vec<LocalType>,
    /// Operands of what follows a product.
    extras: Vec<LocalType>,
}

fn typed(case: &Case) -> Typed {
    let Case { op, ranks: (in_ranks, out_ranks), dtype, .. } = case;
    let (rule, context) = (rule(op, in_ranks, out_ranks), context(case));
    let labels = [rule.ins, rule.outs.into_iter().map(|(labels, _)| labels).collect()];
    let local = |labels: &Vec<char>, dtype: DType| LocalType {
        dtype,
        dims: labels.iter().map(|&l| context.extent(l).len).collect(),
        layout: if labels.len() > 3 && labels.starts_with(&['b', 's', 'e']) { Layout::TopK { k: case.top_k, capacity: None } } else { Layout::Dense },
        experts: case.letters.iter().find(|l| l.0 == 'e').map_or(0, |l| l.3),
    };
    let ins = labels[0].iter().enumerate().map(|(i, l)| local(l, operand(op, i, *dtype))).collect();
    let mut outs: Vec<LocalType> = labels[1].iter().enumerate().map(|(i, l)| local(l, result(op, i, *dtype))).collect();
    if let Some(out) = case.out {
        outs[0].dtype = out;
    }
    let extras = case.tails.iter().filter_map(|tail| tail.operand()).map(|lies| {
        let dims = if lies == Lies::Row { outs[0].dims[outs[0].dims.len() - 1..].to_vec() } else { outs[0].dims.clone() };
        LocalType { dtype: *dtype, dims, ..outs[0].clone() }
    });
    let extras = extras.collect();
    Typed { context, labels, ins, outs, extras }
}

/// The kernels of a case.
fn routine(case: &Case, t: &Typed) -> Routine {
    let d = Descriptor {
        op: &case.op,
        context: &t.context,
        ins: &t.ins,
        outs: &t.outs,
        write: case.write,
        alignment: case.alignment,
        target: case.target,
        epilogue: Epilogue { tails: &case.tails, operands: &t.extras },
    };
    prepare(&d).unwrap_or_else(|e| panic!("{:?}: {e}", case.op))
}

pub fn make(case: &Case, random: &mut Random) -> Prepared {
    let Case { op, letters, dtype, .. } = case;
    let typed = typed(case);
    let Typed { context, ins: in_types, outs: out_types, extras: extra_types, .. } = &typed;
    let gate_at = match op {
        Op::Capacity { .. } => Some(0),
        Op::TopKGateGrad(_) | Op::Dispatch | Op::Undispatch | Op::Combine | Op::CombineGradRows | Op::ExpertBiasGrad => Some(1),
        Op::CombineGradGate | Op::ExpertEinsum(_) | Op::AddExpertBias => Some(2),
        _ => None,
    };
    let gate = gate_at.map(|at| {
        let mut gate = Tensor::zeros(&in_types[at]);
        let experts = gate.dim(2);
        for row in gate.data.chunks_exact_mut(experts) {
            for _ in 0..case.top_k {
                row[random.below(experts as u64) as usize] = round(random.uniform() * 0.9 + 0.1, *dtype);
            }
        }
        gate
    });
    // Tokens are in the logical vocabulary, which here may be the dim that is cut.
    let vocabulary = match op {
        Op::CeStats | Op::CeStatsGrad => letters.last().map_or(1, |l| l.3.max(1)),
        _ => letters.iter().map(|l| l.3).max().unwrap_or(1).min(41),
    };
    let number = |random: &mut Random, dtype: DType| round(random.uniform() * 4.0 - 2.0, dtype);
    let mut ins: Vec<Tensor> = in_types
        .iter()
        .enumerate()
        .map(|(at, ty)| {
            if gate_at == Some(at) {
                return gate.clone().expect("made above");
            }
            let elems = ty.dims.iter().product::<u64>();
            let values = match op {
                Op::Attention(_) | Op::AttentionGrad(_) | Op::AttentionSink(_) if ty.dtype == DType::I32 => begins(context, ty.dims[0], random),
                _ => (0..elems).map(|_| if ty.dtype == DType::I32 { random.below(vocabulary) as f64 } else { number(random, ty.dtype) }).collect(),
            };
            let dense = Tensor::dense(&ty.dims, values);
            match &gate {
                Some(gate) => dense.to_layout(ty.layout, gate),
                None => dense,
            }
        })
        .collect();
    // Probabilities that the way back computes again are none if o and lse are not of these operands.
    if let Op::AttentionGrad(a) = op {
        let forward: Vec<&Tensor> = ins.iter().take(3).chain(ins.iter().skip(6)).collect();
        let made = eval(&Op::Attention(*a), context, &forward, &in_types[3..5]);
        for (at, made) in (3..5).zip(made) {
            ins[at] = Tensor::dense(&in_types[at].dims, made.data.iter().map(|&x| round(x, in_types[at].dtype)).collect());
        }
    }
    let starts: Vec<Vec<f64>> = out_types.iter().map(|t| (0..t.elems()).map(|_| number(random, t.dtype)).collect()).collect();
    let refs: Vec<&Tensor> = ins.iter().collect();
    let add = |tensors: Vec<Tensor>| -> Vec<Vec<f64>> {
        let with = tensors.into_iter().zip(&starts).map(|(t, s)| {
            let start = |i: usize| if case.write == Write::Add { s[i] } else { 0.0 };
            t.data.iter().enumerate().map(|(i, x)| x + start(i)).collect()
        });
        with.collect()
    };
    let evaluated = eval(op, context, &refs, out_types);
    let product = evaluated.first().cloned();
    let extras: Vec<Tensor> =
        extra_types.iter().map(|ty| Tensor::dense(&ty.dims, (0..ty.elems()).map(|_| number(random, ty.dtype)).collect())).collect();
    let made = follow(case, context, evaluated, out_types, &extras);
    let want = add(made);
    let mut bounds: Vec<Option<Vec<f64>>> = vec![None; out_types.len()];
    match op {
        // 8 √K 2⁻²⁴ Σ|a||b|: the same product of absolute values.
        Op::Einsum(spec) | Op::ExpertEinsum(spec) => {
            let mut positive: Vec<Tensor> = ins.iter().map(|t| t.map(f64::abs)).collect();
            if let Some(gate) = &gate {
                positive[2] = gate.clone();
            }
            let terms: f64 = spec.left.chars().filter(|l| !spec.out.contains(*l)).map(|l| context.extent(l).len as f64).product();
            let sums = eval(op, context, &positive.iter().collect::<Vec<_>>(), out_types).swap_remove(0).data;
            let unit = 8.0 * terms.sqrt().max(1.0) * UNIT;
            let follows = of_tails(case, context, product, &extras, out_types, sums.iter().map(|s| unit * s).collect());
            bounds[0] = Some(follows.iter().zip(&want[0]).map(|(e, w)| e + unit * w.abs()).collect());
        }
        Op::Attention(a) | Op::AttentionGrad(a) | Op::AttentionSink(a) if dtype.size() == 2 => {
            bounds = attention_bounds(op, a, context, &ins, *dtype)
        }
        _ => {}
    }
    let buffer = |values: &[f64], dtype: DType| Buffer::new(values, dtype, case.alignment);
    Prepared {
        name: format!("{op:?} {:?} {dtype} {:?} {:?} {letters:?}", case.tails, case.write, case.alignment),
        ins: ins.iter().zip(in_types).chain(extras.iter().zip(extra_types)).map(|(t, ty)| buffer(&t.data, ty.dtype)).collect(),
        starts: starts.iter().zip(out_types).map(|(s, ty)| buffer(s, ty.dtype)).collect(),
        routine: routine(case, &typed),
        want,
        bounds,
        write: case.write,
    }
}

/// Half a unit in the last place of 1, of the sums.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;
/// Of all activations: the largest slope (of gelu, 1.1290), and what computing a value or a slope may be off by, in [`UNIT`]s of |x| and of 1 + |x|: exp, erf and tanh are good to
/// two units in the last place, and no activation has more than six roundings besides.
const STEEPEST: f64 = 1.13;
const OF_VALUE: f64 = 8.0;
const OF_SLOPE: f64 = 16.0;

/// What a product's sums may be off by, `error`, once all that follows is done: e' = |T'| e + what T itself rounds.
fn of_tails(case: &Case, context: &OpContext, product: Option<Tensor>, extras: &[Tensor], out_types: &[LocalType], mut error: Vec<f64>) -> Vec<f64> {
    let (Some(mut x), mut others) = (product, extras.iter()) else { return error };
    for tail in &case.tails {
        let y = tail.operand().and_then(|_| others.next());
        let next = apply(*tail, context, &x, y, out_types);
        // f'(y), as the cotangent 1 has it.
        let slopes = match (tail, y) {
            (Tail::ActGrad(_), Some(_)) => Some(apply(*tail, context, &x.map(|_| 1.0), y, out_types)),
            _ => None,
        };
        for (i, e) in error.iter_mut().enumerate() {
            *e = match (tail, y, &slopes) {
                (Tail::ActGrad(_), Some(y), Some(slopes)) => {
                    (slopes.data[i].abs() + OF_SLOPE * UNIT * (1.0 + y.data[i].abs())) * *e
                        + UNIT * (OF_SLOPE * (1.0 + y.data[i].abs()) * x.data[i].abs() + next.data[i].abs())
                }
                (Tail::Act(_), ..) => STEEPEST * *e + OF_VALUE * UNIT * x.data[i].abs(),
                (Tail::Bias | Tail::Add | Tail::ActGrad(_), ..) => *e + UNIT * next.data[i].abs(),
            };
        }
        x = next;
    }
    error
}

/// What a tail makes of x, and y.
fn apply(tail: Tail, context: &OpContext, x: &Tensor, y: Option<&Tensor>, out_types: &[LocalType]) -> Tensor {
    let (op, operands) = match (tail, y) {
        (Tail::Bias, Some(y)) => (Op::AddBias, vec![x, y]),
        (Tail::Add, Some(y)) => (Op::Add, vec![x, y]),
        (Tail::ActGrad(f), Some(y)) => (Op::ActGrad(f), vec![y, x]),
        (Tail::Act(f), _) => (Op::Act(f), vec![x]),
        (Tail::Bias | Tail::Add | Tail::ActGrad(_), None) => unreachable!("{tail:?} has an operand"),
    };
    eval(&op, context, &operands, out_types).swap_remove(0)
}

/// What the ops that follow a product make of its result.
fn follow(case: &Case, context: &OpContext, mut made: Vec<Tensor>, out_types: &[LocalType], extras: &[Tensor]) -> Vec<Tensor> {
    let mut others = extras.iter();
    for tail in &case.tails {
        let y = tail.operand().and_then(|_| others.next());
        made = vec![apply(*tail, context, &made[0], y, out_types)];
    }
    made
}

impl Prepared {
    /// Runs the kernels; results, and what the shim found out.
    pub fn run(&self, library: &Library, seed: u64) -> Result<(Vec<Buffer>, Ran), shim::ShimError> {
        self.run_launches(library, &self.routine.launches, seed)
    }
    /// Results as kernels find them: what they add to, or nothing that counts.
    pub fn results(&self) -> Vec<Buffer> {
        let again = |b: &Buffer| Buffer::new(&b.values(), b.dtype, if b.beyond() == 0 { Alignment::Packs } else { Alignment::Elements });
        let mut outs: Vec<Buffer> = self.starts.iter().map(again).collect();
        if self.write == Write::Set {
            outs.iter_mut().for_each(|b| b.bytes_mut().fill(0xff));
        }
        outs
    }
    /// Runs other launches on the same operands.
    pub fn run_launches(&self, library: &Library, launches: &[Launch], seed: u64) -> Result<(Vec<Buffer>, Ran), shim::ShimError> {
        let routine = Routine { launches: launches.to_vec(), ..self.routine };
        let mut outs = self.results();
        let ins: Vec<&[u8]> = self.ins.iter().map(Buffer::bytes).collect();
        let ran = {
            let mut results: Vec<&mut [u8]> = outs.iter_mut().map(Buffer::bytes_mut).collect();
            let options = Options { micro_batch: MICRO_BATCH as i64, ..Options::seeded(seed) };
            library.run(&routine, &ins, &mut results, &step_scalars(), options)?
        };
        Ok((outs, ran))
    }

    fn is_product(&self) -> bool {
        self.routine.launches.iter().any(|l| l.entry.starts_with("dp_gemm"))
    }

    /// Checks results against the reference: products per element by their bound, others by 1 ulp of the result and `tolerance` of the largest (of 1 at
    /// least: operands are up to 2, and results that nearly cancel are no more exact than what they cancel from).
    ///
    /// # Panics
    /// If one is too far from it.
    pub fn check(&self, outs: &[Buffer], tolerance: f64) {
        self.compare(outs, tolerance).unwrap_or_else(|why| panic!("{why}"));
    }

    /// As [`Prepared::check`].
    ///
    /// # Errors
    /// The first element that is too far from the reference.
    pub fn compare(&self, outs: &[Buffer], tolerance: f64) -> Result<(), String> {
        for (at, (out, want)) in outs.iter().zip(&self.want).enumerate() {
            let scale = want.iter().filter(|w| w.is_finite()).fold(1.0, |m: f64, w| m.max(w.abs()));
            for (i, (&g, &w)) in out.values().iter().zip(want).enumerate() {
                let rest = self.bounds[at].as_ref().map_or(0.0, |b| b[i]) + if self.is_product() { 0.0 } else { tolerance * scale };
                let allowed = if out.dtype == DType::F32 { rest } else { ulp(w, out.dtype) + rest };
                let meets = (g - w).abs() <= allowed || g == w;
                if !meets {
                    return Err(format!("{}: result {at}[{i}] is {g}, expected {w} within {allowed:e}", self.name));
                }
            }
        }
        Ok(())
    }
}

/// First positions of documents, which end at one token in twenty.
fn begins(context: &OpContext, batch: u64, random: &mut Random) -> Vec<f64> {
    let queries = context.extent('s');
    let mut sequence = |_| {
        let tokens: Vec<i32> = (0..queries.logical).map(|_| random.below(20) as i32).collect();
        let first = first_positions(&tokens, 0);
        (0..queries.len).map(|i| f64::from(first[context.position('s', i) as usize])).collect::<Vec<_>>()
    };
    (0..batch).flat_map(&mut sequence).collect()
}

/// What rounding probabilities and their slopes to halves may cost: half a unit of the type for each term of the sums that they weigh,
/// Σ p|v| for o, Σ p|do| for dv, scale Σ |ds||k| for dq and scale Σ |ds||q| for dk. Twice that is allowed, for the products' own rounding.
fn attention_bounds(op: &Op, a: &Attention, context: &OpContext, ins: &[Tensor], dtype: DType) -> Vec<Option<Vec<f64>>> {
    let unit = if dtype == DType::Bf16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
    let (q, k, v) = (&ins[0], &ins[1], &ins[2]);
    let [batch, queries, groups, heads, d] = [0, 1, 2, 3, 4].map(|i| q.dims[i]);
    let (keys, e) = (k.dims[1], v.dims[3]);
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(a, b)| a * b).sum::<f64>();
    let backward = matches!(op, Op::AttentionGrad(_));
    let sinks = matches!(op, Op::AttentionSink(_)).then(|| &ins[3].data);
    let mut o = vec![0.0; (batch * queries * groups * heads * e) as usize];
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.data.len()], vec![0.0; k.data.len()], vec![0.0; v.data.len()]);
    for row in 0..batch * queries * groups * heads {
        let (g, s, b) = (row / heads % groups, row / heads / groups % queries, row / heads / groups / queries);
        if g >= context.extent('g').valid() || row % heads >= context.extent('r').valid() {
            continue;
        }
        let at = |t: u64, width: u64| ((b * keys + t) * groups + g) as usize * width as usize;
        let (qr, or) = ((row * d) as usize, (row * e) as usize);
        let first = if a.mask.documents == Documents::Apart { ins[ins.len() - 1].data[(b * queries + s) as usize] as u64 } else { 0 };
        let seen: Vec<u64> = (0..keys).filter(|&t| a.mask.sees(context.position('s', s), first, context.position('t', t))).collect();
        let score = |t: u64| a.scale * dot(&q.data[qr..][..d as usize], &k.data[at(t, d)..][..d as usize]);
        let sink = sinks.map_or(f64::NEG_INFINITY, |s| s[(row % (groups * heads)) as usize]);
        let top = seen.iter().fold(sink, |m, &t| m.max(score(t)));
        let total: f64 = seen.iter().map(|&t| (score(t) - top).exp()).sum::<f64>() + (sink - top).exp();
        for &t in &seen {
            let p = if backward { (score(t) - ins[4].data[row as usize]).exp() } else { (score(t) - top).exp() / total };
            let (vr, kr) = (at(t, e), at(t, d));
            if !backward {
                (0..e as usize).for_each(|c| o[or + c] += p * v.data[vr + c].abs());
                continue;
            }
            let dout = &ins[5].data[or..][..e as usize];
            let slopes = p * (dot(dout, &v.data[vr..][..e as usize]) - dot(dout, &ins[3].data[or..][..e as usize])).abs();
            (0..e as usize).for_each(|c| dv[vr + c] += p * dout[c].abs());
            for c in 0..d as usize {
                dq[qr + c] += a.scale * slopes * k.data[kr + c].abs();
                dk[kr + c] += a.scale * slopes * q.data[qr + c].abs();
            }
        }
    }
    let bound = |sums: Vec<f64>| Some(sums.into_iter().map(|s| unit * s).collect());
    if backward { vec![bound(dq), bound(dk), bound(dv)] } else { vec![bound(o), None] }
}
