//! The cluster, as data: equal devices in equal nodes, or groups of such ([`cluster`]). `devices` has the data sheets, [`fitted`] what was measured of them.
//!
//! Ranks are laid out node by node: node `i` has ranks `i·per_node .. (i+1)·per_node`. Inside a node devices talk over *intra* links, between nodes over
//! *inter* links. A link is α–β: a latency per message and a bandwidth per device and direction. Every figure has its unit in its type and its source
//! beside it; what is not from a data sheet says "allowance" and is meant to be replaced by a measured profile.

pub mod cluster;
pub mod curves;
mod devices;
pub mod fitted;

use crate::units::{Bytes, Millionths, Nanos, PerSecond};
pub use cluster::Cluster;
pub use curves::Curves;
use devices::{GPUS, Gpu};
use dplan_ir::dtype::DType;
use dplan_ir::plan::MOST_GROUPS;
use std::sync::Arc;

/// Peak arithmetic of one device by element type, FLOP/s (a multiply-add is two).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peak {
    pub f64: PerSecond,
    pub f32: PerSecond,
    pub bf16: PerSecond,
    pub f16: PerSecond,
}

impl Peak {
    pub fn of(&self, dtype: DType) -> PerSecond {
        match dtype {
            DType::F64 => self.f64,
            DType::F32 | DType::I32 => self.f32,
            DType::Bf16 => self.bf16,
            DType::F16 => self.f16,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSpec {
    pub name: String,
    /// Dense peak of the matrix units.
    pub peak: Peak,
    /// Part of the peak that a large matrix product reaches.
    pub matrix_efficiency: Millionths,
    /// A product of `m×n×k` takes as long as one of `(m+g)(n+g)(k+h)` at full rate, `g` this and `h` the next: partial tiles, pipeline fill, launch tails.
    pub matrix_grain: u64,
    pub matrix_depth_grain: u64,
    /// Memory traffic, bytes/s.
    pub bandwidth: PerSecond,
    /// Part of it that streaming kernels reach.
    pub bandwidth_efficiency: Millionths,
    /// What an arena and the context share.
    pub memory: Bytes,
    /// From one kernel to the next on one stream.
    pub launch: Nanos,
    /// Taken by the driver and the communication library before the first tensor.
    pub context: Bytes,
}

/// α and β of one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// One message between two devices, software included.
    pub latency: Nanos,
    /// Bytes/s of one device, one direction, as a collective achieves it.
    pub bandwidth: PerSecond,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Machine {
    pub device: DeviceSpec,
    pub per_node: u64,
    pub nodes: u64,
    pub intra: Link,
    pub inter: Link,
    /// Between the memories of a device and its host.
    pub host: Link,
    /// Between a device and the disks of its node: one device's part, all of them at it.
    pub nvme: Link,
    /// What each device may take of its host's memory; no more than there is anyway if absent.
    pub host_memory: Option<Bytes>,
    /// Measured collectives inside a node; α–β of the links where an op was not measured.
    pub curves: Arc<Curves>,
}

/// What is wrong with a cluster's description.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MachineError {
    #[error("unknown device `{given}`; did you mean `{nearest}`? Known: {}", known.join(", "))]
    UnknownDevice { given: String, nearest: String, known: Vec<String> },
    #[error("cluster `{given}`: expected DEVICE:PER_NODExNODES, like `h100:8x16` or `cpu:4`; {why}")]
    Syntax { given: String, why: String },
    #[error("cluster `{given}` has no devices: {what} is 0, expected at least 1")]
    Empty { given: String, what: &'static str },
    #[error("{given} groups of devices, expected 1 to {MOST_GROUPS}")]
    Groups { given: usize },
}

/// Ranks of `local` and `cpu` where no number is given.
pub const LOCAL_RANKS: u64 = 4;

/// More devices than this are a typing error.
pub const MOST_DEVICES: u64 = 1 << 20;

impl Machine {
    /// The same cluster by what was measured of its built-in device, where that is known: what published runs are priced on. Plans are chosen by the
    /// allowances of the built-in table unless a cluster file says otherwise.
    pub fn measured(self) -> Machine {
        match GPUS.iter().find(|g| g.name == self.device.name) {
            Some(gpu) => Machine { per_node: self.per_node, nodes: self.nodes, ..gpu.measured() },
            None => self,
        }
    }

    pub fn devices(&self) -> u64 {
        self.per_node * self.nodes
    }

    /// Devices of the usual node of the built-in device of this name; ranks of a CPU have none.
    pub fn usual_node(&self) -> Option<u64> {
        GPUS.iter().find(|g| g.name == self.device.name).map(|g| g.per_node)
    }

    /// The same with so many devices: in whole nodes where there are several, or where they are more than a node of such devices has; else in one node. Nothing where they
    /// do not fill whole nodes.
    pub fn resized(&self, devices: u64) -> Option<Machine> {
        let (per_node, nodes) = match self.usual_node().map(|usual| usual.max(self.per_node)) {
            _ if self.nodes > 1 => (self.per_node, devices / self.per_node),
            Some(node) if devices > node => (node, devices / node),
            Some(_) | None => (devices, 1),
        };
        (devices > 0 && per_node * nodes == devices).then(|| Machine { per_node, nodes, ..self.clone() })
    }

    /// Time to stream `bytes` through a device's memory.
    pub fn sweep(&self, bytes: u64) -> Nanos {
        let device = &self.device;
        device.launch + device.bandwidth_efficiency.of(device.bandwidth).time(u128::from(bytes))
    }

    /// Reads `DEVICE:PER_NODExNODES`, `DEVICE:PER_NODE` (one node), or `DEVICE` (one node of the usual size).
    ///
    /// # Errors
    /// An unknown device, a count that is not a positive number, or anything behind the counts.
    pub fn parse(text: &str) -> Result<Machine, MachineError> {
        let syntax = |why: String| MachineError::Syntax { given: text.into(), why };
        let (name, counts) = match text.split_once(':') {
            Some((name, counts)) => (name, Some(counts)),
            None => (text, None),
        };
        let mut machine = builtin(name).ok_or_else(|| {
            let known: Vec<String> = known_devices().map(String::from).collect();
            let nearest = nearest(name, known.iter().map(String::as_str)).unwrap_or_default().to_string();
            MachineError::UnknownDevice { given: name.into(), nearest, known }
        })?;
        if let Some(counts) = counts {
            let (per_node, nodes) = counts.split_once('x').unwrap_or((counts, "1"));
            let count = |digits: &str, what: &'static str| match digits.parse::<u64>() {
                Ok(0) => Err(MachineError::Empty { given: text.into(), what }),
                Ok(n) if n > MOST_DEVICES => Err(syntax(format!("{what} is {n}, expected at most {MOST_DEVICES}"))),
                Ok(n) => Ok(n),
                Err(_) => Err(syntax(format!("{what} is `{digits}`, expected a whole number"))),
            };
            (machine.per_node, machine.nodes) = (count(per_node, "devices per node")?, count(nodes, "number of nodes")?);
            if machine.devices() > MOST_DEVICES {
                return Err(syntax(format!("that is {} devices, expected at most {MOST_DEVICES}", machine.devices())));
            }
        }
        Ok(machine)
    }
}

/// Names that [`builtin`] knows, in the order of the tables.
pub fn known_devices() -> impl Iterator<Item = &'static str> {
    GPUS.iter().map(|g| g.name).chain(["cpu", "local"])
}

/// Where the figures of a built-in device are from.
pub fn source(name: &str) -> Option<&'static str> {
    GPUS.iter().find(|g| g.name == name).map(|g| g.source)
}

/// A node of a built-in device.
pub fn builtin(name: &str) -> Option<Machine> {
    match name {
        "cpu" | "local" => Some(cpu(LOCAL_RANKS)),
        _ => GPUS.iter().find(|g| g.name == name).map(Gpu::machine),
    }
}

/// `ranks` threads of one machine. Allowances, set low: ranks share cores, caches and memory controllers, and may well be more than the cores.
/// A small core does 16 to 32 f32 multiply-adds a cycle in a tuned product; half a core at 2.5 GHz is taken. Collectives are copies through shared
/// memory between barriers.
pub fn cpu(ranks: u64) -> Machine {
    let peak = Peak { f64: PerSecond::giga(16), f32: PerSecond::giga(32), bf16: PerSecond::giga(8), f16: PerSecond::giga(8) };
    let copy = Link { latency: Nanos(10_000), bandwidth: PerSecond::giga(2) };
    let device = DeviceSpec {
        name: "cpu".into(),
        peak,
        matrix_efficiency: Millionths::percent(70),
        // Packing and loop tails of a blocked product.
        matrix_grain: 8,
        matrix_depth_grain: 8,
        bandwidth: PerSecond::giga(5),
        bandwidth_efficiency: Millionths::percent(80),
        memory: Bytes(4 << 30),
        // A call through the instruction loop.
        launch: Nanos(500),
        // A rank is a thread: nothing but its arena counts.
        context: Bytes::ZERO,
    };
    // Allowance, set low as the others: one disk that all ranks share, such as those of virtual machines.
    let nvme = Link { latency: Nanos(100_000), bandwidth: PerSecond((400_000_000 / ranks.max(1)).max(1_000_000)) };
    // Ranks have the memory of the host already.
    let host_memory = Some(Bytes::ZERO);
    Machine { device, per_node: ranks, nodes: 1, intra: copy, inter: copy, host: copy, nvme, host_memory, curves: Arc::default() }
}

/// The name in `known` with the fewest edits to `given`.
pub fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known.into_iter().min_by_key(|k| edits(&given.to_lowercase(), k))
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_strings() {
        let size = |text: &str| Machine::parse(text).map(|m| (m.device.name, m.per_node, m.nodes));
        assert_eq!(size("h100:8x2048"), Ok(("h100".into(), 8, 2048)));
        assert_eq!(size("cpu:4"), Ok(("cpu".into(), 4, 1)));
        assert_eq!(size("local"), Ok(("cpu".into(), LOCAL_RANKS, 1)));
        assert_eq!(size("a100-40g:1x1"), Ok(("a100-40g".into(), 1, 1)));
        for device in known_devices() {
            assert!(builtin(device).is_some_and(|m| m.device.memory > m.device.context), "{device}");
        }
    }

    /// More devices than a node has are more nodes, not a larger node.
    #[test]
    fn machines_grow_by_nodes() {
        let resized = |text: &str, devices| Machine::parse(text).unwrap().resized(devices).map(|m| (m.per_node, m.nodes));
        assert_eq!([4, 8, 12, 16].map(|n| resized("h100:4", n)), [Some((4, 1)), Some((8, 1)), None, Some((8, 2))]);
        assert_eq!([8, 16, 24, 32].map(|n| resized("h100:16", n)), [Some((8, 1)), Some((16, 1)), None, Some((16, 2))]);
        assert_eq!([4, 8, 12].map(|n| resized("a100-80g:8x2", n)), [None, Some((8, 1)), None]);
        assert_eq!([72, 144].map(|n| resized("gb200:8", n)), [Some((72, 1)), Some((72, 2))]);
        assert_eq!((resized("cpu:4", 100), resized("cpu:4", 0)), (Some((100, 1)), None));
    }

    #[test]
    fn bad_clusters_say_what_would_be_right() {
        let error = |text: &str| Machine::parse(text).map(|_| ()).unwrap_err().to_string();
        for (text, says) in [
            ("cpu:0", "devices per node is 0"),
            ("h100:8x0", "number of nodes is 0"),
            ("h10:8x1", "did you mean `h100`? Known: v100-16g"),
            ("A100-80G:8", "did you mean `a100-80g`"),
            ("cpu:-3", "`-3`, expected a whole number"),
            ("cpu:4x", "``, expected a whole number"),
            ("cpu:4x2x2", "`2x2`"),
            ("cpu:99999999999", "expected at most"),
            ("", "did you mean"),
        ] {
            assert!(error(text).contains(says), "{text}: {}", error(text));
        }
    }
}
