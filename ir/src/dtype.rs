//! Element types.

use std::fmt;

/// The type of one tensor element.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DType {
    F64,
    F32,
    Bf16,
    F16,
    I32,
}

impl DType {
    pub const ALL: [DType; 5] = [DType::F64, DType::F32, DType::Bf16, DType::F16, DType::I32];

    /// Bytes of one element.
    pub fn size(self) -> u64 {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
        }
    }

    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|t| t.name() == name)
    }

    /// Whether gradients in it vanish or overflow unless the loss is scaled.
    pub fn scales_loss(self) -> bool {
        match self {
            DType::F16 => true,
            DType::F64 | DType::F32 | DType::Bf16 | DType::I32 => false,
        }
    }

    /// The type that sums, statistics, gradients and optimizer states of this compute type are kept in.
    pub fn accumulator(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            DType::F32 | DType::Bf16 | DType::F16 => DType::F32,
            DType::I32 => DType::I32,
        }
    }

    /// The nearest number that it can hold, of two the even one. What is computed in `f64` anyway is not rounded to f32 and f16: nothing here is held against those.
    pub fn round(self, x: f64) -> f64 {
        match self {
            DType::F64 | DType::F32 | DType::F16 | DType::I32 => x,
            DType::Bf16 => round_to_bf16(x),
        }
    }
}

/// Eight binary digits, with the exponents of f32.
fn round_to_bf16(x: f64) -> f64 {
    const SMALLEST: i64 = -126;
    const LARGEST: f64 = 255.0 / 128.0 * (1u128 << 127) as f64;
    if !x.is_finite() || x == 0.0 {
        return x;
    }
    let exponent = ((x.to_bits() >> 52 & 0x7ff) as i64 - 1023).max(SMALLEST);
    // Powers of two, so that nothing but the rounding rounds.
    let unit = f64::from_bits(((exponent - 7 + 1023) as u64) << 52);
    let rounded = (x / unit).round_ties_even() * unit;
    if rounded.abs() > LARGEST { f64::INFINITY.copysign(x) } else { rounded }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_the_nearest_of_eight_digits_and_of_two_the_even_one() {
        let unit = 1.0 / 128.0;
        for (x, nearest) in [
            (1.0, 1.0),
            (1.0 + unit / 2.0, 1.0),
            (1.0 + unit * 1.5, 1.0 + 2.0 * unit),
            // Hardly above the middle, which neither f32 nor the upper half of an f64 would show.
            (1.0 + unit / 2.0 + f64::EPSILON, 1.0 + unit),
            (-1.0 - unit / 2.0 - f64::EPSILON, -1.0 - unit),
            (255.5, 256.0),
            // Of the smallest numbers there are fewer digits.
            (2f64.powi(-133), 2f64.powi(-133)),
            (2f64.powi(-134), 0.0),
            (2f64.powi(-134) * 1.25, 2f64.powi(-133)),
            (1e-300, 0.0),
            (254.3 * 2f64.powi(120), 254.0 * 2f64.powi(120)),
            (255.4 * 2f64.powi(120), 255.0 * 2f64.powi(120)),
            (3.4e38, f64::INFINITY),
            (-1e300, f64::NEG_INFINITY),
            (f64::INFINITY, f64::INFINITY),
            (0.0, 0.0),
        ] {
            assert_eq!(DType::Bf16.round(x), nearest, "{x:e}");
        }
        assert!(DType::Bf16.round(f64::NAN).is_nan() && DType::Bf16.round(-0.0).is_sign_negative());
    }
}
