//! Numbers in the bytes of a device's memory.

use dplan_ir::dtype::DType;

use crate::runtime::Rows;
use crate::runtime::block::Block;

/// The one number of `from`, which is as long as its type.
pub fn decode(from: &[u8], dtype: DType) -> f64 {
    let mut bytes = [0; 8];
    let n = from.len().min(8);
    bytes[..n].copy_from_slice(&from[..n]);
    let [a, b, c, d, ..] = bytes;
    match dtype {
        DType::F64 => f64::from_le_bytes(bytes),
        DType::F32 => f64::from(f32::from_le_bytes([a, b, c, d])),
        DType::Bf16 => half::bf16::from_le_bytes([a, b]).to_f64(),
        DType::F16 => half::f16::from_le_bytes([a, b]).to_f64(),
        DType::I32 => f64::from(i32::from_le_bytes([a, b, c, d])),
    }
}

/// Writes a number into `to`, which is as long as its type; short ones by way of f32, as a step rounds masters.
pub fn encode(v: f64, dtype: DType, to: &mut [u8]) {
    match dtype {
        DType::F64 => to.copy_from_slice(&v.to_le_bytes()),
        DType::F32 => to.copy_from_slice(&(v as f32).to_le_bytes()),
        DType::Bf16 => to.copy_from_slice(&half::bf16::from_f32(v as f32).to_le_bytes()),
        DType::F16 => to.copy_from_slice(&half::f16::from_f32(v as f32).to_le_bytes()),
        DType::I32 => to.copy_from_slice(&(v as i32).to_le_bytes()),
    }
}

/// Writes the block of an input of the step that begins at element `first`; padding is zero.
pub fn fill(rows: &Rows, block: &Block, first: usize, dtype: DType, to: &mut [u8]) {
    let size = dtype.size() as usize;
    to.fill(0);
    block.each(|s| {
        for (i, to) in to[s.local * size..(s.local + s.len) * size].chunks_exact_mut(size).enumerate() {
            let v = match rows {
                Rows::Tokens(rows) => f64::from(rows[first + s.logical + i]),
                Rows::Values(rows) => rows[first + s.logical + i],
            };
            encode(v, dtype, to);
        }
    });
}
