//! Kernels on 16-bit elements: operands are widened to f32, the kernel computes in f32, results are rounded once (to nearest, ties to even).
//!
//! That is what tensor cores and fused GPU kernels do. Wide copies live in *staging*, which the caller has and reuses; results that are f32 already, such as
//! gradients, log-sum-exps and the loss, pass by.

use dplan_ir::dtype::DType;
use dplan_ir::infer::{MOST_OPERANDS, MOST_RESULTS};
use half::slice::HalfFloatSliceExt;

use super::block::{Block, BlockMut};

/// Whether elements are widened.
pub fn is_narrow(dtype: DType) -> bool {
    match dtype {
        DType::Bf16 | DType::F16 => true,
        DType::F32 | DType::F64 | DType::I32 => false,
    }
}

/// The type that elements are computed in.
pub fn widened(dtype: DType) -> DType {
    if is_narrow(dtype) { DType::F32 } else { dtype }
}

/// Calls `compute` on f32 copies of all 16-bit operands and results, and rounds the results. `staging` has room for all of them.
pub fn widen(ins: &[Block<'_>], outs: &mut [BlockMut<'_>], staging: &mut [f32], compute: impl FnOnce(&[Block<'_>], &mut [BlockMut<'_>])) {
    let narrow_outs: usize = outs.iter().filter(|o| is_narrow(o.dtype())).map(BlockMut::len).sum();
    let (made, copies) = staging.split_at_mut(narrow_outs);
    {
        let mut rest = copies;
        let mut operands = [Block::I32(&[]); MOST_OPERANDS];
        for (wide, &narrow) in operands.iter_mut().zip(ins) {
            *wide = match narrow {
                Block::Bf16(x) => Block::F32(filled(&mut rest, x.len(), |copy| x.convert_to_f32_slice(copy))),
                Block::F16(x) => Block::F32(filled(&mut rest, x.len(), |copy| x.convert_to_f32_slice(copy))),
                Block::F32(_) | Block::F64(_) | Block::I32(_) => narrow,
            };
        }
        let mut rest = &mut *made;
        let count = outs.len();
        let mut results: [BlockMut<'_>; MOST_RESULTS] = std::array::from_fn(|_| BlockMut::I32(&mut []));
        for (wide, narrow) in results.iter_mut().zip(&mut *outs) {
            *wide = match narrow {
                BlockMut::Bf16(x) => BlockMut::F32(taken(&mut rest, x.len())),
                BlockMut::F16(x) => BlockMut::F32(taken(&mut rest, x.len())),
                BlockMut::F32(x) => BlockMut::F32(x),
                BlockMut::F64(x) => BlockMut::F64(x),
                BlockMut::I32(x) => BlockMut::I32(x),
            };
        }
        compute(&operands[..ins.len()], &mut results[..count]);
    }
    let mut rest = &mut *made;
    for narrow in outs {
        match narrow {
            BlockMut::Bf16(x) => x.convert_from_f32_slice(taken(&mut rest, x.len())),
            BlockMut::F16(x) => x.convert_from_f32_slice(taken(&mut rest, x.len())),
            BlockMut::F32(_) | BlockMut::F64(_) | BlockMut::I32(_) => {}
        }
    }
}

/// The next elements of what is left.
fn taken<'a>(rest: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (now, later) = std::mem::take(rest).split_at_mut(len);
    *rest = later;
    now
}

fn filled<'a>(rest: &mut &'a mut [f32], len: usize, fill: impl FnOnce(&mut [f32])) -> &'a [f32] {
    let now = taken(rest, len);
    fill(now);
    now
}
