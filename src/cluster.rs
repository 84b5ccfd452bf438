//! Clusters: `DEVICE:PER_NODExNODES`, several of them joined by `+`, `cpu:N`, `local`, or a JSON file that describes the machine in full or names a built-in device.
//!
//! In JSON every quantity has its unit in its name. A file may be as short as `{"device": "h100", "per_node": 8, "nodes": 16}`. Groups of different devices are a list of such
//! objects: `{"groups": [{"device": "a100-80g", "per_node": 8, "nodes": 2}, …], "between": {…}}`.

use dplan_planner::machine::curves::{Curve, Op, RANKS};
use dplan_planner::machine::{self, Cluster, Curves, DeviceSpec, Link, Machine, MachineError, Peak};
use dplan_planner::units::{Bytes, Millionths, Nanos, PerSecond};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
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
    #[error("groups[{at}]: {what}")]
    Group { at: usize, what: Box<ClusterError> },
}

/// A cluster file.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Json {
    Equal(MachineJson),
    Unlike(GroupsJson),
}

/// Groups of different devices.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `groups`")]
pub struct GroupsJson {
    pub groups: Vec<MachineJson>,
    /// Between devices of different groups; the least of the groups' `inter` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between: Option<LinkJson>,
}

/// Which of the two a file is: of groups, if it says anything of them.
#[derive(Deserialize)]
#[serde(expecting = "an object with `device`, `per_node` and `nodes`, or with `groups`")]
struct Peek {
    #[serde(default, deserialize_with = "is_there")]
    groups: bool,
}

fn is_there<'de, D: Deserializer<'de>>(value: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(value).map(|IgnoredAny| true)
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Json, D::Error> {
        let value = serde_json::Value::deserialize(from)?;
        let of = if value.get("groups").is_some() {
            GroupsJson::deserialize(value).map(Json::Unlike)
        } else {
            MachineJson::deserialize(value).map(Json::Equal)
        };
        of.map_err(D::Error::custom)
    }
}

impl Json {
    /// As `Deserialize`, with the place of an error.
    fn read(bytes: &[u8]) -> serde_json::Result<Json> {
        let Peek { groups } = serde_json::from_slice(bytes)?;
        if groups { serde_json::from_slice(bytes).map(Json::Unlike) } else { serde_json::from_slice(bytes).map(Json::Equal) }
    }
}

/// Equal devices in equal nodes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `device`, `per_node` and `nodes`, or with `groups`")]
pub struct MachineJson {
    pub device: DeviceJson,
    pub per_node: u64,
    pub nodes: u64,
    /// Links: those of a built-in device if absent; a device in full needs them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intra: Option<LinkJson>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inter: Option<LinkJson>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<LinkJson>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvme: Option<LinkJson>,
    /// What each device may take of its host's memory for what is offloaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_bytes: Option<u64>,
    /// Measured times of collectives inside a node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collectives: Vec<CurveJson>,
}

/// One collective among so many ranks of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `op`, `ranks` and `bytes_nanoseconds`")]
pub struct CurveJson {
    pub op: String,
    pub ranks: u64,
    /// Pairs, by rising bytes.
    pub bytes_nanoseconds: Vec<(u64, u64)>,
}

/// The name of a built-in device, or a device in full.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum DeviceJson {
    Name(String),
    Full(Box<FullDevice>),
}

/// By what stands there, so that what a device in full lacks is named.
impl<'de> Deserialize<'de> for DeviceJson {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<DeviceJson, D::Error> {
        struct OneOrOther;
        impl<'de> Visitor<'de> for OneOrOther {
            type Value = DeviceJson;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("the name of a built-in device, or an object that describes one")
            }
            fn visit_str<E>(self, name: &str) -> Result<DeviceJson, E> {
                Ok(DeviceJson::Name(name.into()))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DeviceJson, A::Error> {
                FullDevice::deserialize(MapAccessDeserializer::new(map)).map(|device| DeviceJson::Full(Box::new(device)))
            }
        }
        from.deserialize_any(OneOrOther)
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object that describes a device")]
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
#[serde(deny_unknown_fields, expecting = "an object with `f64`, `f32`, `bf16` and `f16`")]
pub struct PeakJson {
    pub f64: u64,
    pub f32: u64,
    pub bf16: u64,
    pub f16: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `latency_nanoseconds` and `bandwidth_bytes_per_second`")]
pub struct LinkJson {
    pub latency_nanoseconds: u64,
    pub bandwidth_bytes_per_second: u64,
}

/// Reads the `--cluster` argument: a file if it names one, else a cluster string; `local` is the file that `DPLAN_LOCAL` names, if it does.
///
/// # Errors
/// What is wrong, and what would be right.
pub fn parse(text: &str) -> Result<Cluster, ClusterError> {
    // A measured description of this machine takes the place of allowances.
    let measured = std::env::var("DPLAN_LOCAL").ok().filter(|path| text == "local" && !path.is_empty());
    let text = measured.as_deref().unwrap_or(text);
    if !text.ends_with(".json") && measured.is_none() {
        return Ok(if text == "local" { unmeasured().into() } else { Cluster::parse(text)? });
    }
    let bytes = std::fs::read(Path::new(text)).map_err(|source| ClusterError::Read { path: text.into(), source })?;
    let json = Json::read(&bytes).map_err(|e| ClusterError::Json { path: text.into(), line: e.line(), column: e.column(), what: e.to_string() })?;
    from_json(json)
}

/// This machine, by allowances: one CPU rank for each core, at most what divides common batches.
pub fn unmeasured() -> Machine {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    machine::cpu(1 << cores.ilog2())
}

/// What the cluster is called in reports.
pub fn name(cluster: &Cluster) -> String {
    cluster.groups().iter().map(group_name).collect::<Vec<_>>().join("+")
}

fn group_name(machine: &Machine) -> String {
    if machine.nodes == 1 {
        format!("{}:{}", machine.device.name, machine.per_node)
    } else {
        format!("{}:{}x{}", machine.device.name, machine.per_node, machine.nodes)
    }
}

pub fn to_json(cluster: &Cluster) -> Json {
    match cluster.only() {
        Some(machine) => Json::Equal(machine_json(machine)),
        None => Json::Unlike(GroupsJson { groups: cluster.groups().iter().map(machine_json).collect(), between: link_json(&cluster.between()) }),
    }
}

fn link_json(link: &Link) -> Option<LinkJson> {
    Some(LinkJson { latency_nanoseconds: link.latency.0, bandwidth_bytes_per_second: link.bandwidth.0 })
}

pub fn machine_json(machine: &Machine) -> MachineJson {
    let (d, link) = (&machine.device, link_json);
    MachineJson {
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
        nvme: link(&machine.nvme),
        host_memory_bytes: machine.host_memory.map(|b| b.0),
        collectives: machine
            .curves
            .all()
            .into_iter()
            .map(|c| CurveJson { op: c.op.name().into(), ranks: c.ranks, bytes_nanoseconds: c.points })
            .collect(),
    }
}

/// The cluster a file describes.
///
/// # Errors
/// An unknown device, a quantity out of range, or too many groups.
pub fn from_json(json: Json) -> Result<Cluster, ClusterError> {
    let GroupsJson { groups, between } = match json {
        Json::Equal(machine) => return Ok(machine_from(machine)?.into()),
        Json::Unlike(groups) => groups,
    };
    let of = |(at, group)| machine_from(group).map_err(|what| ClusterError::Group { at, what: Box::new(what) });
    let groups = groups.into_iter().enumerate().map(of).collect::<Result<Vec<_>, _>>()?;
    let between = between.map(link_from);
    if let Some(link) = &between {
        check_link(["between.bandwidth_bytes_per_second", "between.latency_nanoseconds"], link)?;
    }
    Ok(Cluster::new(groups, between)?)
}

fn link_from(json: LinkJson) -> Link {
    Link { latency: Nanos(json.latency_nanoseconds), bandwidth: PerSecond(json.bandwidth_bytes_per_second) }
}

fn machine_from(json: MachineJson) -> Result<Machine, ClusterError> {
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
            machine.host_memory = None;
            // Those of a built-in device are known; of another, nobody else says.
            let lacks = |at: &'static str, what: &str| ClusterError::Value {
                at,
                what: format!(
                    "is missing, and a device that is described in full needs it: {what}, such as {{\"latency_nanoseconds\": 10000, \"bandwidth_bytes_per_second\": 50000000000}}"
                ),
            };
            let needed = |link: &Option<LinkJson>, at, what| link.clone().map(link_from).ok_or_else(|| lacks(at, what));
            machine.intra = needed(&json.intra, "intra", "the links between devices of a node")?;
            machine.host = needed(&json.host, "host", "the link to the memory of the host")?;
            machine.nvme = needed(&json.nvme, "nvme", "one device's part of the disks of its node")?;
            // A node alone has no other to talk to; what leaves it would go through its host.
            machine.inter = if machine.nodes > 1 { needed(&json.inter, "inter", "the links between nodes")? } else { machine.host };
            machine
        }
    };
    machine.intra = json.intra.map_or(machine.intra, link_from);
    machine.inter = json.inter.map_or(machine.inter, link_from);
    machine.host = json.host.map_or(machine.host, link_from);
    machine.nvme = json.nvme.map_or(machine.nvme, link_from);
    machine.host_memory = json.host_memory_bytes.map(Bytes).or(machine.host_memory);
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

/// Far above any machine, far below overflow of the cost arithmetic.
const MOST: u64 = 1 << 60;
/// Below any link or device; times of less would be beyond what is counted in nanoseconds.
const LEAST_RATE: u64 = 1_000_000;
const MOST_NANOSECONDS: u64 = 1_000_000_000;

fn check_rate(at: &'static str, rate: u64) -> Result<(), ClusterError> {
    if !(LEAST_RATE..=MOST).contains(&rate) {
        return Err(ClusterError::Value { at, what: format!("is {rate}, expected from {LEAST_RATE} to {MOST}") });
    }
    Ok(())
}

fn check_link([rate, latency]: [&'static str; 2], link: &Link) -> Result<(), ClusterError> {
    let Link { bandwidth: PerSecond(bandwidth), latency: Nanos(nanos) } = *link;
    check_rate(rate, bandwidth)?;
    if nanos > MOST_NANOSECONDS {
        return Err(ClusterError::Value { at: latency, what: format!("is {nanos}, expected at most {MOST_NANOSECONDS}") });
    }
    Ok(())
}

fn check(machine: &Machine) -> Result<(), ClusterError> {
    let d = &machine.device;
    let rates = [
        ("device.peak_flops_per_second.f64", d.peak.f64.0),
        ("device.peak_flops_per_second.f32", d.peak.f32.0),
        ("device.peak_flops_per_second.bf16", d.peak.bf16.0),
        ("device.peak_flops_per_second.f16", d.peak.f16.0),
        ("device.bandwidth_bytes_per_second", d.bandwidth.0),
    ];
    for (at, rate) in rates {
        check_rate(at, rate)?;
    }
    let parts = [
        ("device.matrix_efficiency_millionths", d.matrix_efficiency.0),
        ("device.bandwidth_efficiency_millionths", d.bandwidth_efficiency.0),
        ("device.memory_bytes", d.memory.0),
    ];
    for (at, value) in parts {
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
    for (at, value) in
        [("device.launch_nanoseconds", d.launch.0), ("device.matrix_grain", d.matrix_grain), ("device.matrix_depth_grain", d.matrix_depth_grain)]
    {
        if value > MOST_NANOSECONDS {
            return Err(ClusterError::Value { at, what: format!("is {value}, expected at most {MOST_NANOSECONDS}") });
        }
    }
    check_link(["intra.bandwidth_bytes_per_second", "intra.latency_nanoseconds"], &machine.intra)?;
    check_link(["inter.bandwidth_bytes_per_second", "inter.latency_nanoseconds"], &machine.inter)?;
    check_link(["host.bandwidth_bytes_per_second", "host.latency_nanoseconds"], &machine.host)?;
    check_link(["nvme.bandwidth_bytes_per_second", "nvme.latency_nanoseconds"], &machine.nvme)?;
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
        for text in ["h100:8x16", "cpu:4", "a100-40g:1x1", "a100-80g:8x2+h100:8x2", "cpu:1+cpu:2+cpu:4"] {
            let cluster = Cluster::parse(text).unwrap();
            assert_eq!(from_json(to_json(&cluster)).unwrap(), cluster);
            let text = serde_json::to_string(&to_json(&cluster)).unwrap();
            assert_eq!(from_json(Json::read(text.as_bytes()).unwrap()).unwrap(), cluster);
            assert_eq!(from_json(serde_json::from_str(&text).unwrap()).unwrap(), cluster);
        }
    }

    #[test]
    fn a_short_file_names_a_device() {
        let json = serde_json::from_str(r#"{"device": "h100", "per_node": 8, "nodes": 16}"#).unwrap();
        assert_eq!(from_json(json).unwrap(), Cluster::parse("h100:8x16").unwrap());
    }

    #[test]
    fn impossible_quantities_are_named() {
        let mut json = machine_json(&Machine::parse("cpu:2").unwrap());
        let none = || LinkJson { latency_nanoseconds: 1, bandwidth_bytes_per_second: 0 };
        json.intra = Some(none());
        assert!(from_json(Json::Equal(json.clone())).unwrap_err().to_string().contains("intra.bandwidth_bytes_per_second"));
        let groups = |groups, between| from_json(Json::Unlike(GroupsJson { groups, between })).unwrap_err().to_string();
        let sound = machine_json(&Machine::parse("cpu:2").unwrap());
        assert!(groups(vec![sound.clone(), json], None).contains("groups[1]: `intra.bandwidth_bytes_per_second`"));
        assert!(groups(vec![sound.clone(), sound.clone()], Some(none())).contains("`between.bandwidth_bytes_per_second`: is 0"));
        assert!(groups(vec![], None).contains("0 groups"));
        let error = Json::read(b"{\"groups\": [\n{\"device\": \"h100\", \"nodes\": 1}]}").unwrap_err();
        assert!(error.line() == 2 && error.to_string().contains("per_node"), "{error}");
    }
}
