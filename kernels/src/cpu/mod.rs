//! CPU kernels.
//!
//! A kernel is *prepared* once, from an op, where the rank's blocks lie in its dims ([`OpContext`]) and their local types; it then *runs* any number of
//! times on slices of those sizes. Running allocates nothing but the packing buffers that the `gemm` crate makes for itself (see [`in_gemm`]) and has
//! one result for one input: every sum has a fixed order.
//!
//! **Arithmetic.** Elements are computed in the type of the operands. Long sums are kept in f64: eight interleaved lanes along a row ([`float::sum`]),
//! blocks of 64 rows down a column ([`float::column_sums`]). Products are `gemm`'s: blocked in the summed dim.
//!
//! **Write.** `Write::Add` adds the result to what the block holds; every kernel can.

pub mod append;
pub mod attention;
pub mod block;
pub mod capacity;
pub mod compress;
pub mod dropout;
pub mod embed;
pub mod experts;
pub mod flat;
pub mod float;
pub mod join;
pub mod loss;
pub mod norm;
pub mod pointwise;
pub mod product;
pub mod rope;
pub mod router;
pub mod vector;
pub mod wide;

use dplan_ir::cost::workspace_bytes;
use dplan_ir::dropout::Draws;
use dplan_ir::dtype::DType;
use dplan_ir::extent::OpContext;
use dplan_ir::infer::is_index;
use dplan_ir::op::Op;
use dplan_ir::program::Write;
use dplan_ir::rule::rule;
use dplan_ir::sharding::LocalType;

use block::{Block, BlockMut};
use float::Float;
pub use product::{Threads, in_gemm};

/// Why a kernel cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error("no CPU kernel computes in {0}")]
    DType(DType),
    #[error("{side} {at} is {found}, expected {expected}")]
    Operand { side: &'static str, at: usize, found: DType, expected: DType },
    #[error("the product `{spec}` is no batched matrix product: {why}")]
    Product { spec: String, why: String },
    #[error("block sizes do not fit the op: {0}")]
    Sizes(String),
}

/// What a run needs besides its operands.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub write: Write,
    /// [`dplan_ir::op::StepScalar::InvTokens`] of this step.
    pub inv_tokens: f64,
    /// [`dplan_ir::op::StepScalar::LossScale`] of this step.
    pub loss_scale: f64,
    /// What dropout draws with, from the micro-batch's first sequence on.
    pub draws: Draws,
    /// Who computes the products.
    pub threads: Threads,
}

/// An op made ready for blocks of one size and place.
#[derive(Debug)]
pub struct Kernel {
    form: Form,
    dtype: DType,
    ins: Vec<(DType, usize)>,
    outs: Vec<(DType, usize)>,
    scratch: usize,
    /// f32 copies of 16-bit operands and results.
    staging: usize,
}

/// The op with every number its kernel needs.
#[derive(Debug)]
enum Form {
    Product(product::Product),
    ExpertProduct(experts::ExpertProduct),
    Pointwise(pointwise::Pointwise),
    Dropout(dropout::DropoutKernel),
    Norm(norm::Norm),
    Rope(rope::RopeKernel),
    Attention(attention::AttentionKernel),
    AttentionGrad(attention::AttentionKernel),
    SinkGrad(attention::SinkGrad),
    Append(append::Append),
    Embed(embed::Embed),
    Loss(loss::Loss),
    Router(router::Router),
    Routed(experts::Routed),
    Capacity(capacity::Capacity),
}

impl Kernel {
    /// # Errors
    /// If the types are none a CPU kernel takes, or the blocks do not fit the op.
    pub fn prepare(op: &Op, context: &OpContext, ins: &[LocalType], outs: &[LocalType]) -> Result<Kernel, PrepareError> {
        let sizes = |types: &[LocalType]| types.iter().map(|t| (t.dtype, t.elems() as usize)).collect::<Vec<_>>();
        let (in_sizes, out_sizes) = (sizes(ins), sizes(outs));
        let staging = in_sizes.iter().chain(&out_sizes).filter(|s| wide::is_narrow(s.0)).map(|s| s.1).sum();
        let widened = |types: &[LocalType]| types.iter().map(|t| LocalType { dtype: wide::widened(t.dtype), ..t.clone() }).collect::<Vec<_>>();
        let (ins, outs) = (&widened(ins)[..], &widened(outs)[..]);
        let dtype = compute_type(op, ins, outs)?;
        check_types(op, dtype, ins, outs)?;
        let dims = |t: &LocalType| t.dims.iter().map(|&d| d as usize).collect::<Vec<_>>();
        let (i, o) = (ins.iter().map(dims).collect::<Vec<_>>(), outs.iter().map(dims).collect::<Vec<_>>());
        let rule = rule(op, &i.iter().map(Vec::len).collect::<Vec<_>>(), &o.iter().map(Vec::len).collect::<Vec<_>>());
        let extent = |operand: usize, dim: usize| context.extent(rule.ins[operand][dim]);
        let rows = |d: &[usize], last: usize| (d[..d.len() - last].iter().product::<usize>(), d[d.len() - last..].iter().product::<usize>());
        use pointwise::Pointwise;
        let form = match op {
            Op::Einsum(spec) => Form::Product(product::Product::new(spec, &i[0], &i[1], &o[0])?),
            Op::ExpertEinsum(spec) => Form::ExpertProduct(experts::ExpertProduct::new(spec, ins, outs)?),
            Op::AddBias => Form::Pointwise(Pointwise::AddBias { cols: ins[1].elems() as usize }),
            Op::SumLeading { keep } => Form::Pointwise(Pointwise::SumLeading { cols: rows(&i[0], *keep as usize).1 }),
            Op::Add => Form::Pointwise(Pointwise::Add),
            Op::Sub => Form::Pointwise(Pointwise::Sub),
            Op::Neg => Form::Pointwise(Pointwise::Neg),
            Op::Dropout { rate } => Form::Dropout(dropout::DropoutKernel::new(context, &rule.ins[0], *rate)),
            Op::Act(f) => Form::Pointwise(Pointwise::Act(*f)),
            Op::ActGrad(f) => Form::Pointwise(Pointwise::ActGrad(*f)),
            Op::Gated(f) => Form::Pointwise(Pointwise::Gated(*f)),
            Op::GatedGrad(f) => Form::Pointwise(Pointwise::GatedGrad(*f)),
            Op::RmsNorm { eps } => Form::Norm(norm::Norm::new(norm::Which::Rms, norm::Part::Forward, *eps, &i[1])),
            Op::RmsNormGradInput { eps } => Form::Norm(norm::Norm::new(norm::Which::Rms, norm::Part::GradInput, *eps, &i[1])),
            Op::RmsNormGradWeight { eps } => Form::Norm(norm::Norm::new(norm::Which::Rms, norm::Part::GradWeight, *eps, &o[0])),
            Op::LayerNorm { eps } => Form::Norm(norm::Norm::new(norm::Which::Layer, norm::Part::Forward, *eps, &i[1])),
            Op::LayerNormGradInput { eps } => Form::Norm(norm::Norm::new(norm::Which::Layer, norm::Part::GradInput, *eps, &i[1])),
            Op::LayerNormGradWeight { eps } => Form::Norm(norm::Norm::new(norm::Which::Layer, norm::Part::GradWeight, *eps, &o[0])),
            Op::Rope(rope) => Form::Rope(rope::RopeKernel::new(rope, context, rule.ins[0][1], &i[0])?),
            Op::Attention(a) | Op::AttentionSink(a) => Form::Attention(attention::AttentionKernel::new(a, context, &i)),
            Op::SinkGrad => Form::SinkGrad(attention::SinkGrad::new(context, &i[1])),
            Op::Append => Form::Append(append::Append::new(append::Part::Forward, context.extent('g'), i[0][3], o[0][3])),
            Op::AppendGradHead => Form::Append(append::Append::new(append::Part::GradHead, context.extent('g'), o[0][3], i[0][3])),
            Op::AppendGradTail => Form::Append(append::Append::new(append::Part::GradTail, context.extent('g'), i[0][3] - o[0][2], i[0][3])),
            Op::AttentionGrad(a) => Form::AttentionGrad(attention::AttentionKernel::new(a, context, &i)),
            Op::Embed => Form::Embed(embed::Embed::Lookup { table: extent(0, 0), width: i[0][1] }),
            Op::EmbedGrad => Form::Embed(embed::Embed::LookupGrad { table: context.extent(rule.outs[0].0[0]), width: o[0][1] }),
            Op::AddPosition => Form::Embed(embed::Embed::Position(embed::Positions::new(context, rule.ins[0][1], &i[0], i[1][0])?)),
            Op::AddPositionGrad => Form::Embed(embed::Embed::PositionGrad(embed::Positions::new(context, rule.ins[0][1], &i[0], o[0][0])?)),
            Op::CeStats => Form::Loss(loss::Loss::Stats { columns: extent(0, i[0].len() - 1) }),
            Op::CeStatsGrad => Form::Loss(loss::Loss::StatsGrad { columns: extent(0, i[0].len() - 1) }),
            Op::Mean => Form::Loss(loss::Loss::Mean),
            Op::MeanGrad => Form::Loss(loss::Loss::MeanGrad),
            Op::TopKGate(router) => Form::Router(router::Router::gate(router, extent(0, 2))?),
            Op::TopKGateGrad(router) => Form::Router(router::Router::grad(router, extent(0, 2))?),
            Op::Capacity { tokens } => Form::Capacity(capacity::Capacity::new(*tokens, context, &i[0])),
            Op::CorrectionGrad => Form::Pointwise(Pointwise::Zero),
            Op::Dispatch => Form::Routed(experts::Routed::new(experts::Routing::Dispatch, &i[1], i[0][2])),
            Op::CombineGradRows => Form::Routed(experts::Routed::new(experts::Routing::CombineGradRows, &i[1], i[0][2])),
            Op::Undispatch => Form::Routed(experts::Routed::new(experts::Routing::Undispatch, &i[1], i[0][3])),
            Op::Combine => Form::Routed(experts::Routed::new(experts::Routing::Combine, &i[1], i[0][3])),
            Op::AddExpertBias => Form::Routed(experts::Routed::new(experts::Routing::AddBias, &i[2], i[1][1])),
            Op::ExpertBiasGrad => Form::Routed(experts::Routed::new(experts::Routing::BiasGrad, &i[1], i[0][3])),
            Op::CombineGradGate => Form::Routed(experts::Routed::new(experts::Routing::CombineGradGate, &i[2], i[0][2])),
        };
        let scratch = workspace_bytes(op, &ins.iter().collect::<Vec<_>>()) / dtype.size();
        Ok(Kernel { form, dtype, ins: in_sizes, outs: out_sizes, scratch: scratch as usize, staging })
    }

    /// Elements of scratch a run needs, in the compute type.
    pub fn scratch_elems(&self) -> usize {
        self.scratch
    }

    /// The type it computes in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Elements of staging a run needs, see [`wide`].
    pub fn staging_elems(&self) -> usize {
        self.staging
    }

    /// Runs the op.
    ///
    /// # Panics
    /// If the blocks are not of the types and sizes the kernel was prepared for: a caller checks them once, when it prepares.
    pub fn run(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], scratch: BlockMut<'_>, staging: &mut [f32], run: Run) {
        debug_assert!(ins.iter().map(|b| (b.dtype(), b.len())).eq(self.ins.iter().copied()), "operands are not as prepared");
        debug_assert!(outs.iter().map(|b| (b.dtype(), b.len())).eq(self.outs.iter().copied()), "results are not as prepared");
        match self.dtype {
            DType::F32 if self.staging > 0 => wide::widen(ins, outs, staging, |ins, outs| self.run_in::<f32>(ins, outs, scratch, run)),
            DType::F32 => self.run_in::<f32>(ins, outs, scratch, run),
            DType::F64 => self.run_in::<f64>(ins, outs, scratch, run),
            DType::Bf16 | DType::F16 | DType::I32 => unreachable!("refused when prepared"),
        }
    }

    fn run_in<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], mut scratch: BlockMut<'_>, run: Run) {
        match &self.form {
            Form::Product(p) => p.run(T::of(ins[0]), T::of(ins[1]), T::of_mut(&mut outs[0]), run),
            Form::ExpertProduct(p) => p.run(T::of(ins[0]), T::of(ins[1]), T::of(ins[2]), T::of_mut(&mut outs[0]), run),
            Form::Pointwise(p) => p.run::<T>(ins, outs, run.write),
            Form::Dropout(d) => d.run::<T>(ins, outs, run),
            Form::Norm(n) => n.run::<T>(ins, outs, run.write),
            Form::Rope(r) => r.run(T::of(ins[0]), T::of_mut(&mut outs[0]), run.write),
            Form::Attention(a) => a.forward::<T>(ins, outs, &mut T::of_mut(&mut scratch)[..self.scratch], run),
            Form::AttentionGrad(a) => a.backward::<T>(ins, outs, &mut T::of_mut(&mut scratch)[..self.scratch], run),
            Form::SinkGrad(s) => s.run::<T>(ins, outs, run.write),
            Form::Append(a) => a.run::<T>(ins, outs, run.write),
            Form::Embed(e) => e.run::<T>(ins, outs, run.write),
            Form::Loss(l) => l.run::<T>(ins, outs, run),
            Form::Router(r) => r.run::<T>(ins, outs, run.write),
            Form::Routed(r) => r.run::<T>(ins, outs, run.write),
            Form::Capacity(c) => c.run::<T>(ins, outs, run.write),
        }
    }
}

/// The type the kernel computes in: that of its first operand or result that is no index.
fn compute_type(op: &Op, ins: &[LocalType], outs: &[LocalType]) -> Result<DType, PrepareError> {
    let found = if *op == Op::Mean { ins.first() } else { ins.iter().chain(outs).find(|t| t.dtype != DType::I32) };
    match found.map(|t| t.dtype) {
        Some(t @ (DType::F32 | DType::F64)) => Ok(t),
        Some(t) => Err(PrepareError::DType(t)),
        None => Err(PrepareError::Sizes("no operand".into())),
    }
}

/// Everything has the compute type, but token ids and positions; a loss may be summed in f64.
fn check_types(op: &Op, dtype: DType, ins: &[LocalType], outs: &[LocalType]) -> Result<(), PrepareError> {
    for (at, ty) in ins.iter().enumerate() {
        let expected = if is_index(op, at) { DType::I32 } else { dtype };
        if ty.dtype != expected {
            return Err(PrepareError::Operand { side: "operand", at, found: ty.dtype, expected });
        }
    }
    for (at, ty) in outs.iter().enumerate() {
        if ty.dtype != dtype && !(*op == Op::Mean && ty.dtype == DType::F64) {
            return Err(PrepareError::Operand { side: "result", at, found: ty.dtype, expected: dtype });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
