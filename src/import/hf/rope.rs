//! Rotary frequencies of a Hugging Face config, old keys (`rope_theta`, `rope_scaling`) and new ones (`rope_parameters`).
//!
//! Pair `i` of `d/2` turns by θ^(−2i/d) per position; a scaling changes that angle once, here, so the graph only ever sees frequencies.

use dplan_ir::op::{Rope, Rotation};

use crate::import::ImportError;
use crate::import::json::At;

/// Scalings that are understood.
const SUPPORTED: &str = "one of default, linear, llama3";

/// The rotation of heads of `head_dim` elements.
pub fn rope(config: &At<'_>, head_dim: u64, default_theta: f64, positions: u64) -> Result<Rope, ImportError> {
    let scaling = config.get("rope_scaling").or_else(|| config.get("rope_parameters"));
    if let Some(at) = &scaling {
        at.object()?;
    }
    let theta_at = scaling.as_ref().and_then(|s| s.get("rope_theta")).or_else(|| config.get("rope_theta"));
    let theta = match &theta_at {
        Some(at) => at.positive_number()?,
        None => default_theta,
    };
    for holder in [Some(config), scaling.as_ref()].into_iter().flatten() {
        if let Some(at) = holder.get("partial_rotary_factor")
            && at.number()? != 1.0
        {
            return Err(at.wrong(&at.found(), "1 or absent: rotating a part of a head is not supported"));
        }
    }
    let plain: Vec<f64> = (0..head_dim / 2).map(|i| theta.powf(-(2.0 * i as f64) / head_dim as f64)).collect();
    let inv_freq = match &scaling {
        Some(at) => scaled(at, plain, positions)?,
        None => plain,
    };
    Ok(Rope { rotation: Rotation::Forward, inv_freq })
}

fn scaled(at: &At<'_>, plain: Vec<f64>, positions: u64) -> Result<Vec<f64>, ImportError> {
    let kind_at = at.get("rope_type").or_else(|| at.get("type"));
    let kind = match &kind_at {
        Some(kind) => kind.string()?,
        None if at.get("factor").is_some() => {
            return Err(at.need("rope_type", SUPPORTED).err().unwrap_or_else(|| at.wrong("has no type", SUPPORTED)));
        }
        None => "default",
    };
    let positive = |key: &str| at.need(key, &format!("a number above 0, for rope scaling `{kind}`"))?.positive_number();
    match kind {
        "default" => Ok(plain),
        "linear" => {
            let factor = positive("factor")?;
            Ok(plain.into_iter().map(|f| f / factor).collect())
        }
        "llama3" => {
            let original = match at.get("original_max_position_embeddings") {
                Some(at) => at.positive_number()?,
                None => positions as f64,
            };
            let (factor, low, high) = (positive("factor")?, positive("low_freq_factor")?, positive("high_freq_factor")?);
            if high <= low {
                return Err(
                    at.wrong(&format!("has high_freq_factor {high} and low_freq_factor {low}"), "so that the high factor is above the low one")
                );
            }
            Ok(plain.into_iter().map(|f| llama3(f, original, factor, low, high)).collect())
        }
        other => {
            let place = kind_at.as_ref().unwrap_or(at);
            Err(place.wrong(&format!("is the rope scaling {other:?}"), SUPPORTED))
        }
    }
}

/// Llama 3.1's scaling: long waves are slowed by `factor`, short ones stay, those between are blended:
/// f′ = (1 − m)·f/factor + m·f with m = clamp((original/λ − low) / (high − low), 0, 1) and λ = 2π/f.
fn llama3(f: f64, original: f64, factor: f64, low: f64, high: f64) -> f64 {
    let wavelength = std::f64::consts::TAU / f;
    let m = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
    (1.0 - m) * f / factor + m * f
}
