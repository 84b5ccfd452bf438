//! Generated CUDA kernels.
//!
//! An op on one rank's blocks becomes a [`Routine`]: a few launches in order, on one stream. What happens to a descriptor (the op, the local types, how the
//! operands are aligned) is the same in each family: it chooses a *config* (tile, threads, packs of a thread), writes the config as constants in front of the
//! family's text (`text/*.cuh`), and lists the arguments. Sizes and offsets are arguments, so layers and ranks that differ only in those share one machine code.
//!
//! **Text.** Headerless. Whatever C++ does not have (barriers, shuffles, asynchronous copies, matrix units) stands behind names of the prelude:
//! `text/device.cuh` for a GPU, `shim/shim.h` for a CPU, `text/common.cuh` for both; `text/device_hopper.cuh` and `shim/hopper.h` for what only Hopper has. So the text that NVRTC compiles is the text that runs in tests.
//!
//! **Invariants.** Offsets are 64 bit. No atomics: each sum has one order. Long sums are kept in the accumulator type (or double). A kernel reads nothing
//! that it was not given and writes every element of its results. Working memory beyond the program's scratch is the routine's `aux`, which the runtime
//! allocates once for all kernels of a stream.

pub mod append;
pub mod arch;
pub mod attention;
pub mod embed;
pub mod epilogue;
pub mod flat;
pub mod library;
pub mod loss;
pub mod moe;
pub mod norm;
pub mod pointwise;
pub mod product;
pub mod rows;
pub mod source;
pub mod tensor;

use dplan_ir::cost::{OpCost, op_cost};
use dplan_ir::dtype::DType;
use dplan_ir::extent::OpContext;
use dplan_ir::op::{Op, Router};
use dplan_ir::program::Write;
use dplan_ir::rule::rule;
use dplan_ir::sharding::LocalType;

pub use arch::Target;
pub use epilogue::{Epilogue, Tail};
pub use tensor::TensorMap;

/// What a kernel is, for tables.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Family {
    Pointwise,
    Norm,
    Columns,
    Rope,
    Embed,
    Loss,
    Gemm,
    Attention,
    Router,
    Moe,
    Optimizer,
    Scalar,
}

impl Family {
    pub fn name(self) -> &'static str {
        match self {
            Family::Pointwise => "pointwise",
            Family::Norm => "norm",
            Family::Columns => "columns",
            Family::Rope => "rope",
            Family::Embed => "embed",
            Family::Loss => "loss",
            Family::Gemm => "gemm",
            Family::Attention => "attention",
            Family::Router => "router",
            Family::Moe => "moe",
            Family::Optimizer => "optimizer",
            Family::Scalar => "scalar",
        }
    }
}

/// An argument of a launch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Arg {
    /// An operand or result of the routine.
    In(usize),
    Out(usize),
    /// An operand as the copy engine takes it.
    Tensor(usize, TensorMap),
    /// The working memory, from this byte on.
    Aux(u64),
    /// The step's scalars ([`scalars`]).
    Scalars,
    Int(i64),
    /// So many for each micro-batch of the step before this one.
    MicroBatch(i64),
}

/// One kernel launch. Grids are one-dimensional: 2³¹ − 1 blocks, where a second dim would end at 65,535.
#[derive(Clone, PartialEq, Debug)]
pub struct Launch {
    pub family: Family,
    /// Name of the kernel in its text.
    pub entry: &'static str,
    /// Config and family text, without the prelude.
    pub text: String,
    pub grid: u32,
    pub threads: u32,
    /// Dynamic shared memory, bytes.
    pub shared: u32,
    pub args: Vec<Arg>,
    /// The same for a library, if it is better at it: its factors are the first two arguments, its result is the third.
    pub instead: Option<library::Matmul>,
}

/// The launches of one op or instruction, in order.
#[derive(Clone, PartialEq, Debug)]
pub struct Routine {
    pub launches: Vec<Launch>,
    /// Bytes of working memory.
    pub aux: u64,
    pub cost: OpCost,
}

/// What is known of the operands' addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Alignment {
    /// All begin at multiples of 16 bytes.
    Packs,
    /// All begin at multiples of their elements.
    Elements,
}

/// Why no kernel can be generated.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error("no CUDA kernel computes in {0}")]
    DType(DType),
    #[error("the product `{spec}` is no batched matrix product: {why}")]
    Product { spec: String, why: String },
    #[error("there is no CUDA kernel for {0} yet")]
    Missing(&'static str),
    #[error("{0}")]
    Sizes(String),
}

pub type Scalars = [f64; 15];
pub const SCALAR_BYTES: u64 = size_of::<Scalars>() as u64;

/// The step scalars as kernels read them, in double: loss divisor, lr, β₁, β₂, ε, weight decay, momentum, clip, 1 − β₁ᵗ, √(1 − β₂ᵗ), loss scale;
/// in words of 32 bits the key that dropout draws with and the step's first sequence, low words first.
pub fn scalars(at: &dplan_ir::optimizer::StepScalars) -> Scalars {
    let (h, t) = (&at.hyper, i32::try_from(at.step).unwrap_or(i32::MAX));
    let clip = if h.clip.is_finite() { h.clip } else { f64::MAX };
    let corrections = [1.0 - h.beta1.powi(t), (1.0 - h.beta2.powi(t)).sqrt()];
    let [key, sequence] = [at.draws.key(), [at.draws.sequence as u32, (at.draws.sequence >> 32) as u32]].map(|words| words.map(f64::from));
    let numbers = [at.inv_tokens, h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.momentum, clip, corrections[0], corrections[1], at.loss_scale];
    let mut all = Scalars::default();
    all.iter_mut().zip(numbers.into_iter().chain(key).chain(sequence)).for_each(|(to, number)| *to = number);
    all
}

/// An op on blocks of one size and place.
#[derive(Clone, Copy)]
pub struct Descriptor<'a> {
    pub op: &'a Op,
    pub context: &'a OpContext,
    pub ins: &'a [LocalType],
    pub outs: &'a [LocalType],
    pub write: Write,
    pub alignment: Alignment,
    pub target: Target,
    /// Ops that a product does besides, whose operands follow those of `op`; the results are then theirs.
    pub epilogue: Epilogue<'a>,
}

/// The kernels of an op.
///
/// # Errors
/// If there is none for its types or sizes.
pub fn prepare(d: &Descriptor<'_>) -> Result<Routine, PrepareError> {
    if !d.epilogue.tails.is_empty() && !matches!(d.op, Op::Einsum(_)) {
        return Err(PrepareError::Missing("what follows an op that is no product"));
    }
    let mut b = source::Builder::new(d)?;
    let ranks = |types: &[LocalType]| types.iter().map(|t| t.dims.len()).collect::<Vec<_>>();
    let rule = rule(d.op, &ranks(d.ins), &ranks(d.outs));
    let extent = |operand: usize, dim: usize| d.context.extent(rule.ins[operand][dim]);
    match d.op {
        Op::Einsum(spec) => product::einsum(&mut b, spec)?,
        Op::ExpertEinsum(spec) => product::experts(&mut b, spec)?,
        Op::Add | Op::Sub | Op::Neg | Op::MeanGrad | Op::Act(_) | Op::ActGrad(_) | Op::Gated(_) | Op::GatedGrad(_) => {
            let expression = pointwise::expression(d.op).ok_or(PrepareError::Missing("an op that is no expression"))?;
            pointwise::elementwise(&mut b, expression);
        }
        Op::AddBias => pointwise::repeated(&mut b, d.ins[1].elems()),
        Op::AddPosition => embed::positions_add(&mut b, extent(0, 1)),
        Op::SumLeading { keep } => {
            let dims = &d.ins[0].dims;
            pointwise::sum_leading(&mut b, dims[dims.len() - *keep as usize..].iter().product());
        }
        Op::AddPositionGrad => embed::positions_grad(&mut b, extent(0, 1)),
        Op::RmsNorm { .. } | Op::RmsNormGradInput { .. } | Op::LayerNorm { .. } | Op::LayerNormGradInput { .. } | Op::Dropout { .. } => {
            rows::alone(&mut b)?;
        }
        Op::RmsNormGradWeight { eps } => norm::grad_weight(&mut b, norm::Which::Rms, *eps)?,
        Op::LayerNormGradWeight { eps } => norm::grad_weight(&mut b, norm::Which::Layer, *eps)?,
        Op::Rope(rope) => embed::rope(&mut b, rope, extent(0, 1))?,
        Op::Embed => embed::lookup(&mut b, extent(0, 0)),
        Op::EmbedGrad => embed::lookup_grad(&mut b, d.context.extent(rule.outs[0].0[0])),
        Op::CeStats => loss::stats(&mut b, extent(0, d.ins[0].dims.len() - 1)),
        Op::CeStatsGrad => loss::grad(&mut b, extent(0, d.ins[0].dims.len() - 1)),
        Op::Mean => flat::mean(&mut b),
        Op::TopKGate(router) if *router == Router::softmax(router.k, router.renormalize) => {
            moe::router(&mut b, router.k, router.renormalize, extent(0, 2))?;
        }
        Op::TopKGateGrad(router) if *router == Router::softmax(router.k, router.renormalize) => {
            moe::router_grad(&mut b, router.k, router.renormalize, extent(0, 2))?;
        }
        Op::TopKGate(router) => moe::scored(&mut b, router, extent(0, 2), moe::Pass::Forward)?,
        Op::TopKGateGrad(router) => moe::scored(&mut b, router, extent(0, 2), moe::Pass::Backward)?,
        Op::Capacity { tokens } => moe::first_tokens(&mut b, *tokens),
        // What corrects a choice is moved by no gradient.
        Op::CorrectionGrad => pointwise::elementwise(&mut b, ("u = acc(0);", None)),
        Op::Append => append::forward(&mut b, extent(0, 2)),
        Op::AppendGradHead => append::grad_head(&mut b),
        Op::AppendGradTail => append::grad_tail(&mut b),
        Op::AddExpertBias => moe::bias(&mut b),
        Op::ExpertBiasGrad => moe::bias_grad(&mut b),
        Op::Dispatch => moe::rows(&mut b, moe::Gated::No),
        Op::CombineGradRows => moe::rows(&mut b, moe::Gated::Yes),
        Op::Undispatch => moe::tokens(&mut b, moe::Gated::No),
        Op::Combine => moe::tokens(&mut b, moe::Gated::Yes),
        Op::CombineGradGate => moe::dot(&mut b),
        Op::Attention(a) => attention::forward(&mut b, a, attention::Begins::Empty)?,
        // Of the turns of a ring, the first counts the sink.
        Op::AttentionSink(a) if d.context.turn > 0 => attention::forward(&mut b, a, attention::Begins::Empty)?,
        Op::AttentionSink(a) => attention::forward(&mut b, a, attention::Begins::Sink)?,
        Op::SinkGrad => attention::sink_grad(&mut b),
        Op::AttentionGrad(a) => attention::backward(&mut b, a)?,
    }
    let mut cost = op_cost(d.op, &d.ins.iter().collect::<Vec<_>>(), &d.outs.iter().collect::<Vec<_>>());
    cost.flops += d.epilogue.tails.len() as u64 * d.outs[0].elems();
    cost.bytes += d.epilogue.operands.iter().map(LocalType::bytes).sum::<u64>();
    Ok(Routine { launches: b.launches, aux: b.aux, cost })
}
