//! Clusters: `DEVICE:PER_NODExNODES`, `cpu:N`, `local`, or a JSON file that describes the machine in full or names a built-in device.
//!
//! In JSON every quantity has its unit in its name. A file may be as short as `{"device": "h100", "per_node": 8, "nodes": 16}`.

use dplan_planner::machine::curves::{Curve, Op, RANKS};
use dplan_planner::machine::{self, Curves, DeviceSpec, Link, Machine, MachineError, Peak};
use dplan_planner::units::{Bytes, Millionths, Nanos, PerSecond};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum ClusterError {
    #[error(transparent)]
    Spec(#[from] MachineError),
    #[error("{path}: cannot be read: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("{path}:{line}:{column}: not a cluster: {what}")]
    Json { path: String, line: usize, column: usize, what: String },
    #[error("`{at}`: {what}")]
    Value { at: &'static str, what: String },
}

/// A cluster file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Json {
    pub device: DeviceJson,
    pub per_node: u64,
    pub nodes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intra: Option<LinkJson>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inter: Option<LinkJson>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<LinkJson>,
    /// Measured times of collectives inside a node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collectives: Vec<CurveJson>,
}

/// One collective among so many ranks of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CurveJson {
    pub op: String,
    pub ranks: u64,
    /// Pairs, by rising bytes.
    pub bytes_nanoseconds: Vec<(u64, u64)>,
}

/// The name of a built-in device, or a device in full.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DeviceJson {
    Name(String),
    Full(Box<FullDevice>),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FullDevice {
    pub name: String,
    pub peak_flops_per_second: PeakJson,
    pub matrix_efficiency_millionths: u64,
    pub matrix_grain: u64,
    /// As `matrix_grain` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matrix_depth_grain: Option<u64>,
    pub bandwidth_bytes_per_second: u64,
    pub bandwidth_efficiency_millionths: u64,
    pub memory_bytes: u64,
    pub launch_nanoseconds: u64,
    pub context_bytes: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeakJson {
    pub f64: u64,
    pub f32: u64,
    pub bf16: u64,
    pub f16: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkJson {
    pub latency_nanoseconds: u64,
    pub bandwidth_bytes_per_second: u64,
}

/// Reads the `--cluster` argument: a file if it names one, else a cluster string; `local` is the file that `DPLAN_LOCAL` names, if it does.
///
/// # Errors
/// What is wrong, and what would be right.
pub fn parse(text: &str) -> Result<Machine, ClusterError> {
    // A measured description of this machine takes the place of allowances.
    let measured = std::env::var("DPLAN_LOCAL").ok().filter(|path| text == "local" && !path.is_empty());
    let text = measured.as_deref().unwrap_or(text);
    if !text.ends_with(".json") && measured.is_none() {
        return Ok(if text == "local" { unmeasured() } else { Machine::parse(text)? });
    }
    let bytes = std::fs::read(Path::new(text)).map_err(|source| ClusterError::Read { path: text.into(), source })?;
    let json: Json = serde_json::from_slice(&bytes).map_err(|e| ClusterError::Json {
        path: text.into(),
        line: e.line(),
        column: e.column(),
        what: e.to_string(),
    })?;
    from_json(json)
}

/// This machine, by allowances: one CPU rank for each core, at most what divides common batches.
pub fn unmeasured() -> Machine {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    machine::cpu(1 << cores.ilog2())
}

/// What the cluster is called in reports.
pub fn name(machine: &Machine) -> String {
    if machine.nodes == 1 {
        format!("{}:{}", machine.device.name, machine.per_node)
    } else {
        format!("{}:{}x{}", machine.device.name, machine.per_node, machine.nodes)
    }
}

pub fn to_json(machine: &Machine) -> Json {
    let d = &machine.device;
    let link = |l: &Link| Some(LinkJson { latency_nanoseconds: l.latency.0, bandwidth_bytes_per_second: l.bandwidth.0 });
    Json {
        device: DeviceJson::Full(Box::new(FullDevice {
            name: d.name.clone(),
            peak_flops_per_second: PeakJson { f64: d.peak.f64.0, f32: d.peak.f32.0, bf16: d.peak.bf16.0, f16: d.peak.f16.0 },
            matrix_efficiency_millionths: d.matrix_efficiency.0,
            matrix_grain: d.matrix_grain,
            matrix_depth_grain: Some(d.matrix_depth_grain),
            bandwidth_bytes_per_second: d.bandwidth.0,
            bandwidth_efficiency_millionths: d.bandwidth_efficiency.0,
            memory_bytes: d.memory.0,
            launch_nanoseconds: d.launch.0,
            context_bytes: d.context.0,
        })),
        per_node: machine.per_node,
        nodes: machine.nodes,
        intra: link(&machine.intra),
        inter: link(&machine.inter),
        host: link(&machine.host),
        collectives: machine
            .curves
            .all()
            .into_iter()
            .map(|c| CurveJson { op: c.op.name().into(), ranks: c.ranks, bytes_nanoseconds: c.points })
            .collect(),
    }
}

/// The machine a cluster file describes.
///
/// # Errors
/// An unknown device, or a quantity out of range.
pub fn from_json(json: Json) -> Result<Machine, ClusterError> {
    let counts = format!("{}x{}", json.per_node, json.nodes);
    let mut machine = match json.device {
        // The cluster string's checks hold for files too.
        DeviceJson::Name(name) => Machine::parse(&format!("{name}:{counts}"))?,
        DeviceJson::Full(d) => {
            let mut machine = Machine::parse(&format!("cpu:{counts}"))?;
            let p = &d.peak_flops_per_second;
            machine.device = DeviceSpec {
                name: d.name,
                peak: Peak { f64: PerSecond(p.f64), f32: PerSecond(p.f32), bf16: PerSecond(p.bf16), f16: PerSecond(p.f16) },
                matrix_efficiency: Millionths(d.matrix_efficiency_millionths),
                matrix_grain: d.matrix_grain,
                matrix_depth_grain: d.matrix_depth_grain.unwrap_or(d.matrix_grain),
                bandwidth: PerSecond(d.bandwidth_bytes_per_second),
                bandwidth_efficiency: Millionths(d.bandwidth_efficiency_millionths),
                memory: Bytes(d.memory_bytes),
                launch: Nanos(d.launch_nanoseconds),
                context: Bytes(d.context_bytes),
            };
            machine
        }
    };
    let link = |l: LinkJson| Link { latency: Nanos(l.latency_nanoseconds), bandwidth: PerSecond(l.bandwidth_bytes_per_second) };
    machine.intra = json.intra.map_or(machine.intra, link);
    machine.inter = json.inter.map_or(machine.inter, link);
    machine.host = json.host.map_or(machine.host, link);
    if !json.collectives.is_empty() {
        machine.curves = Arc::new(curves(json.collectives)?);
    }
    check(&machine)?;
    Ok(machine)
}

fn curves(json: Vec<CurveJson>) -> Result<Curves, ClusterError> {
    let wrong = |what: String| ClusterError::Value { at: "collectives", what };
    let mut measured = Vec::new();
    for curve in json {
        let known = || Op::ALL.map(Op::name).join(", ");
        let op =
            Op::ALL.into_iter().find(|o| o.name() == curve.op).ok_or_else(|| wrong(format!("op `{}`, expected one of {}", curve.op, known())))?;
        let rising = curve.bytes_nanoseconds.windows(2).all(|w| w[0].0 < w[1].0);
        // Far above any measurement, far below overflow of the cost arithmetic.
        let sane = curve.bytes_nanoseconds.iter().all(|&(bytes, time)| (1..1 << 50).contains(&bytes) && time < 1 << 50);
        if !RANKS.contains(&curve.ranks) || curve.bytes_nanoseconds.is_empty() || !rising || !sane {
            return Err(wrong(format!(
                "{} of {} ranks: expected 2, 4 or 8 ranks and pairs of bytes and nanoseconds by rising bytes",
                curve.op, curve.ranks
            )));
        }
        measured.push(Curve { op, ranks: curve.ranks, points: curve.bytes_nanoseconds });
    }
    let curves = Curves::new(&measured);
    if curves.all().len() != measured.len() {
        return Err(wrong("each op needs the same sizes for 2, 4 and 8 ranks, once each".into()));
    }
    Ok(curves)
}

fn check(machine: &Machine) -> Result<(), ClusterError> {
    // Far above any machine, far below overflow of the cost arithmetic.
    const MOST: u64 = 1 << 60;
    let d = &machine.device;
    let rates = [
        ("device.peak_flops_per_second.f64", d.peak.f64.0),
        ("device.peak_flops_per_second.f32", d.peak.f32.0),
        ("device.peak_flops_per_second.bf16", d.peak.bf16.0),
        ("device.peak_flops_per_second.f16", d.peak.f16.0),
        ("device.bandwidth_bytes_per_second", d.bandwidth.0),
        ("device.matrix_efficiency_millionths", d.matrix_efficiency.0),
        ("device.bandwidth_efficiency_millionths", d.bandwidth_efficiency.0),
        ("device.memory_bytes", d.memory.0),
        ("intra.bandwidth_bytes_per_second", machine.intra.bandwidth.0),
        ("inter.bandwidth_bytes_per_second", machine.inter.bandwidth.0),
        ("host.bandwidth_bytes_per_second", machine.host.bandwidth.0),
    ];
    for (at, value) in rates {
        if value == 0 || value > MOST {
            return Err(ClusterError::Value { at, what: format!("is {value}, expected from 1 to {MOST}") });
        }
    }
    for (at, value) in
        [("device.matrix_efficiency_millionths", d.matrix_efficiency.0), ("device.bandwidth_efficiency_millionths", d.bandwidth_efficiency.0)]
    {
        if value > 1_000_000 {
            return Err(ClusterError::Value { at, what: format!("is {value}, expected at most 1000000 (a part of a whole)") });
        }
    }
    for (at, value) in [
        ("device.launch_nanoseconds", d.launch.0),
        ("intra.latency_nanoseconds", machine.intra.latency.0),
        ("inter.latency_nanoseconds", machine.inter.latency.0),
        ("host.latency_nanoseconds", machine.host.latency.0),
        ("device.matrix_grain", d.matrix_grain),
        ("device.matrix_depth_grain", d.matrix_depth_grain),
    ] {
        if value > 1_000_000_000 {
            return Err(ClusterError::Value { at, what: format!("is {value}, expected at most 1000000000") });
        }
    }
    if d.context.0 >= d.memory.0 {
        return Err(ClusterError::Value { at: "device.context_bytes", what: format!("is {}, all of the memory", d.context.0) });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_survives_its_own_file() {
        for text in ["h100:8x16", "cpu:4", "a100-40g:1x1"] {
            let machine = Machine::parse(text).unwrap();
            assert_eq!(from_json(to_json(&machine)).unwrap(), machine);
        }
    }

    #[test]
    fn a_short_file_names_a_device() {
        let json = serde_json::from_str(r#"{"device": "h100", "per_node": 8, "nodes": 16}"#).unwrap();
        assert_eq!(from_json(json).unwrap(), Machine::parse("h100:8x16").unwrap());
    }

    #[test]
    fn impossible_quantities_are_named() {
        let mut json = to_json(&Machine::parse("cpu:2").unwrap());
        json.intra = Some(LinkJson { latency_nanoseconds: 1, bandwidth_bytes_per_second: 0 });
        assert!(from_json(json).unwrap_err().to_string().contains("intra.bandwidth_bytes_per_second"));
    }
}
