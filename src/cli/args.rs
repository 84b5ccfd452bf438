//! Values of command-line arguments.

use crate::runtime::LossScale;
use anyhow::{Context, bail};
use dplan_ir::dtype::DType;

/// A number of bytes: `80GiB`, `40GB`, `512MiB`, `1000000`.
///
/// # Errors
/// Says what was found and what would be right.
pub fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "ki" | "kib" => 1024.0,
        "mi" | "mib" => 1024.0 * 1024.0,
        "gi" | "gib" => 1024.0 * 1024.0 * 1024.0,
        "ti" | "tib" => 1024.0f64.powi(4),
        _ => return Err(format!("`{text}` is not a number of bytes; try `80GiB`, `40GB` or `1000000`")),
    };
    let value = number.parse::<f64>().map_err(|_| format!("`{text}` is not a number of bytes; try `80GiB`"))? * scale;
    if value >= 1.0 && value < u64::MAX as f64 { Ok(value as u64) } else { Err(format!("`{text}`: expected at least one byte")) }
}

/// A count of tokens: `1T`, `15B`, `300M`, `1000000`.
///
/// # Errors
/// Says what was found and what would be right.
pub fn tokens(text: &str) -> Result<f64, String> {
    let (number, scale) = match text.char_indices().last() {
        Some((at, c)) if c.is_ascii_alphabetic() => {
            let scale = match c.to_ascii_uppercase() {
                'K' => 1e3,
                'M' => 1e6,
                'B' | 'G' => 1e9,
                'T' => 1e12,
                _ => return Err(format!("`{text}` is not a count of tokens; try `1T`, `15B` or `1000000`")),
            };
            (&text[..at], scale)
        }
        _ => (text, 1.0),
    };
    let value = number.parse::<f64>().map_err(|_| format!("`{text}` is not a count of tokens; try `1T`"))? * scale;
    if value > 0.0 && value.is_finite() { Ok(value) } else { Err(format!("`{text}`: expected more than 0 tokens")) }
}

/// A duration in seconds: `10`, `0.5`.
///
/// # Errors
/// Says what was found and what would be right.
pub fn seconds(text: &str) -> Result<f64, String> {
    not_negative(text).ok_or_else(|| format!("`{text}`: expected a number of seconds, 0 or more, such as 60"))
}

/// A price in USD: `2.5`.
///
/// # Errors
/// Says what was found and what would be right.
pub fn price(text: &str) -> Result<f64, String> {
    not_negative(text).ok_or_else(|| format!("`{text}`: expected a price in USD, 0 or more, such as 2.5"))
}

fn not_negative(text: &str) -> Option<f64> {
    text.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0)
}

/// A power of two: `65536`.
///
/// # Errors
/// Says what would be right.
pub fn loss_scale(text: &str) -> Result<LossScale, String> {
    let value = text.parse().ok().and_then(LossScale::from_value);
    value.ok_or_else(|| format!("`{text}` is not a loss scale; expected a power of two, such as 65536, from 1 to 2^64"))
}

/// Compute type.
///
/// # Errors
/// Lists the types there are.
pub fn precision(text: &str) -> Result<DType, String> {
    match DType::from_name(text) {
        Some(dtype @ (DType::F64 | DType::F32 | DType::Bf16 | DType::F16)) => Ok(dtype),
        _ => Err(format!("`{text}` is not a precision; expected f32, f64, bf16 or f16")),
    }
}

/// Two numbers with a comma between: `0.9,0.95`.
///
/// # Errors
/// Says what was found and what would be right.
pub fn betas(text: &str) -> Result<(f64, f64), String> {
    let parse = || -> anyhow::Result<(f64, f64)> {
        let (a, b) = text.split_once(',').context("no comma")?;
        let (a, b) = (a.trim().parse()?, b.trim().parse()?);
        if !(0.0..1.0).contains(&a) || !(0.0..1.0).contains(&b) {
            bail!("outside [0, 1)");
        }
        Ok((a, b))
    };
    parse().map_err(|_| format!("`{text}`: expected two numbers in [0, 1) with a comma between, such as 0.9,0.95"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_both_systems() {
        assert_eq!(bytes("1GiB"), Ok(1 << 30));
        assert_eq!(bytes("40GB"), Ok(40_000_000_000));
        assert_eq!(bytes("512"), Ok(512));
        assert_eq!(tokens("1.5T"), Ok(1.5e12));
        assert_eq!(betas("0.9,0.95"), Ok((0.9, 0.95)));
        for wrong in ["", "GiB", "-1", "12XB", "0"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "T", "0", "1Q", "-3"] {
            assert!(tokens(wrong).is_err(), "{wrong}");
        }
        assert_eq!((seconds("0.5"), price("2")), (Ok(0.5), Ok(2.0)));
        for wrong in ["nan", "-3", "inf", "-0.1", "", "1s"] {
            assert!(seconds(wrong).is_err() && price(wrong).is_err(), "{wrong}");
        }
        for wrong in ["0.9", "1.0,0.9", "a,b"] {
            assert!(betas(wrong).is_err(), "{wrong}");
        }
    }
}
