//! Rotary frequencies of a Hugging Face config, old keys (`rope_theta`, `rope_scaling`) and new ones (`rope_parameters`).
//!
//! Of a head's elements the first `d` turn, or all; pair `i` of `d/2` turns by θ^(−2i/d) per position. A scaling changes those angles once, here, and may
//! put a factor on what turns; the graph only ever sees frequencies and that factor.

use std::f64::consts::TAU;

use dplan_ir::op::{Rope, Rotation};

use crate::import::ImportError;
use crate::import::json::At;

/// Scalings that are understood.
const SUPPORTED: &str = "one of default, linear, llama3, yarn, longrope";

/// What a config may leave open.
#[derive(Clone, Copy)]
pub struct Defaults {
    /// Elements of a head.
    pub head: u64,
    pub theta: f64,
    /// The part of a head that turns.
    pub part: f64,
    pub positions: u64,
    /// Tokens of a sequence: a longrope has two sets of factors.
    pub seq: u64,
}

/// The rotation of heads, as layers of one type (`full_attention`, …) have it.
///
/// # Errors
/// What is wrong with the keys.
pub fn rope(config: &At<'_>, defaults: Defaults, layer_type: &str) -> Result<Rope, ImportError> {
    let scaling = scaling(config, layer_type);
    if let Some(at) = &scaling {
        at.object()?;
    }
    let keys = |keys: &[&str]| {
        let holders = [scaling.as_ref(), Some(config)];
        keys.iter().find_map(|key| holders.into_iter().flatten().find_map(|holder| holder.get(key)))
    };
    let theta = keys(&["rope_theta", "rotary_emb_base"]).map_or(Ok(defaults.theta), |at| at.positive_number())?;
    let turned = match keys(&["partial_rotary_factor", "rotary_pct"]) {
        Some(at) => {
            let turned = (defaults.head as f64 * at.positive_number()?) as u64;
            if turned > defaults.head || !turned.is_multiple_of(2) || turned == 0 {
                let right = format!("so that an even number of elements turns, at most {}", defaults.head);
                return Err(at.wrong(&format!("makes {turned} elements of a head turn"), &right));
            }
            turned
        }
        None => match config.get("rotary_dim") {
            Some(at) => {
                let turned = at.integer(2..=defaults.head)?;
                if turned % 2 != 0 {
                    return Err(at.wrong(&at.found(), "an even number"));
                }
                turned
            }
            None => (defaults.head as f64 * defaults.part) as u64 / 2 * 2,
        },
    };
    let base = Base { theta, plain: base(theta, turned) };
    let (inv_freq, scale) = match &scaling {
        Some(at) => scaled(config, at, base, defaults)?,
        None => (base.plain, 1.0),
    };
    Ok(Rope { scale, ..Rope::whole(Rotation::Forward, inv_freq) })
}

/// The rotation without any scaling.
///
/// # Errors
/// What is wrong with the keys.
pub fn plain(config: &At<'_>, defaults: Defaults) -> Result<Rope, ImportError> {
    let own = scaling(config, "sliding_attention").and_then(|at| at.get("rope_theta"));
    let theta = own.or_else(|| config.get("rope_theta")).map_or(Ok(defaults.theta), |at| at.positive_number())?;
    Ok(Rope::whole(Rotation::Forward, base(theta, defaults.head / 2 * 2)))
}

/// The factor on attention scores that DeepSeek's form of YaRN asks for: (0.1 · m · ln factor + 1)², m being `mscale_all_dim`.
///
/// # Errors
/// What is wrong with the keys.
pub fn score_factor(config: &At<'_>) -> Result<f64, ImportError> {
    let Some(scaling) = scaling(config, "full_attention") else { return Ok(1.0) };
    let yarn = scaling.get("rope_type").or_else(|| scaling.get("type")).is_some_and(|at| at.value().as_str() != Some("default"));
    match (scaling.get("mscale_all_dim"), scaling.get("factor")) {
        (Some(all), Some(factor)) if yarn => Ok(mscale(factor.positive_number()?, all.number()?).powi(2)),
        _ => Ok(1.0),
    }
}

/// The object that describes the scaling, if there is one. It may hold an object for each type of layers.
fn scaling<'a>(config: &At<'a>, layer_type: &str) -> Option<At<'a>> {
    let at = config.get("rope_scaling").or_else(|| config.get("rope_parameters"))?;
    at.get(layer_type).or(Some(at))
}

fn base(theta: f64, turned: u64) -> Vec<f64> {
    (0..turned / 2).map(|i| theta.powf(-(2.0 * i as f64) / turned as f64)).collect()
}

struct Base {
    theta: f64,
    plain: Vec<f64>,
}

/// Frequencies, and the factor on what turns.
fn scaled(config: &At<'_>, at: &At<'_>, base: Base, defaults: Defaults) -> Result<(Vec<f64>, f64), ImportError> {
    let Base { theta, plain } = base;
    let kind_at = at.get("rope_type").or_else(|| at.get("type"));
    let kind = match &kind_at {
        Some(kind) => kind.string()?,
        None if at.get("factor").is_some() => {
            return Err(at.need("rope_type", SUPPORTED).err().unwrap_or_else(|| at.wrong("has no type", SUPPORTED)));
        }
        None => "default",
    };
    let positive = |key: &str| at.need(key, &format!("a number above 0, for rope scaling `{kind}`"))?.positive_number();
    let optional = |key: &str, default: f64| at.get(key).map_or(Ok(default), |at| at.positive_number());
    let original_at = at.get("original_max_position_embeddings").or_else(|| config.get("original_max_position_embeddings"));
    let original = original_at.map_or(Ok(defaults.positions as f64), |at| at.positive_number())?;
    match kind {
        "default" => Ok((plain, 1.0)),
        "linear" => {
            let factor = positive("factor")?;
            Ok((plain.into_iter().map(|f| f / factor).collect(), 1.0))
        }
        "llama3" => {
            let (factor, low, high) = (positive("factor")?, positive("low_freq_factor")?, positive("high_freq_factor")?);
            if high <= low {
                return Err(
                    at.wrong(&format!("has high_freq_factor {high} and low_freq_factor {low}"), "so that the high factor is above the low one")
                );
            }
            Ok((plain.into_iter().map(|f| llama3(f, original, factor, low, high)).collect(), 1.0))
        }
        "yarn" => {
            let factor = optional("factor", defaults.positions as f64 / original)?;
            let (fast, slow) = (optional("beta_fast", 32.0)?, optional("beta_slow", 1.0)?);
            let range = Ramp::new(&plain, theta, original, [fast, slow], at.get("truncate").map_or(Ok(true), |at| at.boolean())?);
            let scale = match (at.get("attention_factor"), at.get("mscale"), at.get("mscale_all_dim")) {
                (Some(at), _, _) => at.positive_number()?,
                (None, Some(m), Some(all)) if m.number()? != 0.0 && all.number()? != 0.0 => {
                    mscale(factor, m.number()?) / mscale(factor, all.number()?)
                }
                _ => mscale(factor, 1.0),
            };
            let blend = |(i, f): (usize, f64)| f / factor * range.at(i) + f * (1.0 - range.at(i));
            Ok((plain.into_iter().enumerate().map(blend).collect(), scale))
        }
        "longrope" | "su" => {
            let factor = optional("factor", defaults.positions as f64 / original)?;
            let default = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
            let key = if defaults.seq as f64 > original { "long_factor" } else { "short_factor" };
            let list_at = at.need(key, "a list of factors, one for each pair")?;
            let factors = list_at.array()?.iter().map(At::positive_number).collect::<Result<Vec<f64>, _>>()?;
            if factors.len() != plain.len() {
                return Err(list_at.wrong(&list_at.found(), &format!("a list of {} factors", plain.len())));
            }
            Ok((plain.iter().zip(factors).map(|(f, by)| f / by).collect(), optional("attention_factor", default)?))
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
    let wavelength = TAU / f;
    let m = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
    (1.0 - m) * f / factor + m * f
}

/// YaRN's attention factor, 0.1 · m · ln factor + 1 (arXiv:2309.00071).
fn mscale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// YaRN slows pairs behind `high` by the factor, leaves those before `low`, and blends between. The pair that turns r times in the original length is
/// i = d · ln(original / 2πr) / (2 ln θ).
struct Ramp {
    low: f64,
    high: f64,
}

impl Ramp {
    fn new(plain: &[f64], theta: f64, original: f64, turns: [f64; 2], truncate: bool) -> Ramp {
        let d = 2.0 * plain.len() as f64;
        let [low, high] = turns.map(|r| d * (original / (r * TAU)).ln() / (2.0 * theta.ln()));
        let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(d - 1.0));
        Ramp { low, high: if high == low { high + 0.001 } else { high } }
    }
    fn at(&self, i: usize) -> f64 {
        ((i as f64 - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }
}
