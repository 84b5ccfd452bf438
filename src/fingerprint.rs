//! The fingerprint of a logical tensor: Σᵢ m(i, xᵢ) modulo 2⁶⁴ over its elements, where i is the row-major index and xᵢ the bits of element i.
//!
//! m is the 128-bit product of the two, each with a constant mixed in, folded to 64 bits. Since the sum has no order and the index is in every
//! term, the fingerprints of a tensor's parts add up to that of the whole, however the parts were cut; and an element that changes, moves, is missing or
//! comes twice changes it. So one number compares a tensor across plans, finds a part in the wrong place, and names the rank whose replica differs.

use dplan_ir::dtype::DType;

/// What one pass over elements tells.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Digest {
    pub sum: u64,
    /// Elements that are infinite or not a number.
    pub not_finite: u64,
}

impl Digest {
    pub fn and(self, other: Digest) -> Digest {
        Digest { sum: self.sum.wrapping_add(other.sum), not_finite: self.not_finite + other.not_finite }
    }
}

/// The part of a fingerprint that little-endian elements give, the first of which has index `first`.
pub fn digest(dtype: DType, first: u64, bytes: &[u8]) -> Digest {
    match dtype {
        DType::F64 => fold(first, bytes.as_chunks::<8>().0.iter().map(|&b| u64::from_le_bytes(b)), 0x7ff << 52),
        DType::F32 => fold(first, bytes.as_chunks::<4>().0.iter().map(|&b| u64::from(u32::from_le_bytes(b))), 0xff << 23),
        DType::Bf16 => fold(first, bytes.as_chunks::<2>().0.iter().map(|&b| u64::from(u16::from_le_bytes(b))), 0xff << 7),
        DType::F16 => fold(first, bytes.as_chunks::<2>().0.iter().map(|&b| u64::from(u16::from_le_bytes(b))), 0x1f << 10),
        // No exponent: a mask that no integer of 32 bits has.
        DType::I32 => fold(first, bytes.as_chunks::<4>().0.iter().map(|&b| u64::from(u32::from_le_bytes(b))), 1 << 63),
    }
}

fn fold(first: u64, bits: impl Iterator<Item = u64>, exponent: u64) -> Digest {
    let mut digest = Digest::default();
    for (i, x) in bits.enumerate() {
        let product = u128::from(x ^ 0x9e37_79b9_7f4a_7c15) * u128::from((first + i as u64) ^ 0xd1b5_4a32_d192_ed03);
        digest.sum = digest.sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
        digest.not_finite += u64::from(x & exponent == exponent);
    }
    digest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn parts_add_up_and_every_change_shows() {
        let values: Vec<f32> = (0..40).map(|i| (i as f32 * 0.7).sin()).collect();
        let whole = digest(DType::F32, 0, &bytes(&values));
        let parts = [(25, &values[25..]), (0, &values[..10]), (10, &values[10..25])];
        let sum = parts.iter().fold(Digest::default(), |sum, (first, part)| sum.and(digest(DType::F32, *first, &bytes(part))));
        assert_eq!(sum, whole);
        // Every single bit, every exchange of two elements, every part left out.
        let mut seen = std::collections::BTreeSet::from([whole.sum]);
        for bit in 0..40 * 32 {
            let mut damaged = bytes(&values);
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(digest(DType::F32, 0, &damaged).sum), "bit {bit}");
        }
        for i in 0..40 {
            for j in 0..i {
                let mut swapped = values.clone();
                swapped.swap(i, j);
                assert!(seen.insert(digest(DType::F32, 0, &bytes(&swapped)).sum), "{i} and {j}");
            }
            assert!(seen.insert(digest(DType::F32, i as u64, &bytes(&values)).sum) || i == 0, "moved by {i}");
        }
    }

    #[test]
    fn what_is_not_finite_is_counted_in_every_type() {
        let f32s = bytes(&[1.0, f32::NAN, f32::INFINITY, -0.0, f32::MAX]);
        let f64s: Vec<u8> = [1.0, f64::NAN, f64::NEG_INFINITY, f64::MIN_POSITIVE].iter().flat_map(|v| v.to_le_bytes()).collect();
        let halves = |bits: [u16; 3]| bits.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(digest(DType::F32, 0, &f32s).not_finite, 2);
        assert_eq!(digest(DType::F64, 0, &f64s).not_finite, 2);
        assert_eq!(digest(DType::Bf16, 0, &halves([0x7f80, 0x3f80, 0xff81])).not_finite, 2);
        assert_eq!(digest(DType::F16, 0, &halves([0x7c00, 0x3c00, 0x7bff])).not_finite, 1);
        assert_eq!(digest(DType::I32, 0, &[0xff; 8]).not_finite, 0);
    }
}
