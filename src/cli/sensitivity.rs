//! `--what-if` and `--min-devices`: the same question on another machine.
//!
//! A scenario is `key=FACTOR[x]`, several joined by commas: `memory=1.5x`, `link=2x,compute=0.9x`. Each is searched anew; the plan may change.

use super::output::{gib, seconds};
use super::report::degrees;
use crate::compile::{CompileError, Options, best};
use dplan_ir::graph::Graph;
use dplan_ir::plan::Plan;
use dplan_planner::machine::curves::Curve;
use dplan_planner::machine::{Curves, Link, Machine, Peak};
use dplan_planner::memory::Arena;
use dplan_planner::predict::Prediction;
use dplan_planner::request::{Fewest, Refusal};
use dplan_planner::units::{Bytes, Nanos, PerSecond};
use serde_json::{Value, json};
use std::sync::Arc;

/// What of the machine is otherwise, and by which factor.
#[derive(Clone, PartialEq, Debug)]
pub struct Scenario {
    text: String,
    changes: Vec<(Key, f64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Key {
    Link,
    Intra,
    Inter,
    Host,
    Nvme,
    Latency,
    Memory,
    Compute,
    Bandwidth,
    Nodes,
}

const KEYS: [(&str, Key); 10] = [
    ("link", Key::Link),
    ("intra", Key::Intra),
    ("inter", Key::Inter),
    ("host", Key::Host),
    ("nvme", Key::Nvme),
    ("latency", Key::Latency),
    ("memory", Key::Memory),
    ("compute", Key::Compute),
    ("bandwidth", Key::Bandwidth),
    ("nodes", Key::Nodes),
];

/// Reads `--what-if`.
///
/// # Errors
/// Says what was found and what would be right.
pub fn scenario(text: &str) -> Result<Scenario, String> {
    let known = || KEYS.map(|k| k.0).join(", ");
    let mut changes = Vec::new();
    for change in text.split(',').map(str::trim) {
        let Some((key, factor)) = change.split_once('=') else {
            return Err(format!("`{change}`: expected KEY=FACTOR, such as link=2x; keys are {}", known()));
        };
        let Some(&(_, key)) = KEYS.iter().find(|k| k.0 == key.trim()) else {
            return Err(format!("`{}` is not something to change; keys are {}", key.trim(), known()));
        };
        let factor = factor.trim();
        match factor.strip_suffix('x').unwrap_or(factor).parse::<f64>() {
            Ok(factor) if (1e-3..=1e3).contains(&factor) => changes.push((key, factor)),
            _ => return Err(format!("`{change}`: expected a factor from 0.001x to 1000x, such as 1.5x")),
        }
    }
    Ok(Scenario { text: text.into(), changes })
}

impl Scenario {
    /// The question with the cluster changed.
    fn apply<'a>(&self, options: &Options<'a>) -> Options<'a> {
        let mut options = options.clone();
        options.cluster = options.cluster.map(|machine| self.machine(machine), |link| self.between(link));
        for &(_, factor) in self.changes.iter().filter(|(key, _)| *key == Key::Memory) {
            options.memory_limit = options.memory_limit.map(|b| Bytes(times(b.0, factor)));
        }
        options
    }

    /// What is between groups of devices is a link between nodes.
    fn between(&self, mut link: Link) -> Link {
        for &(key, factor) in &self.changes {
            match key {
                Key::Link | Key::Inter => link.bandwidth = PerSecond(times(link.bandwidth.0, factor)),
                Key::Latency => link.latency = Nanos(times(link.latency.0, factor)),
                Key::Intra | Key::Host | Key::Nvme | Key::Memory | Key::Compute | Key::Bandwidth | Key::Nodes => {}
            }
        }
        link
    }

    fn machine(&self, machine: &Machine) -> Machine {
        let mut machine = machine.clone();
        let is_sold = machine.usual_node().is_some();
        let Machine { device, per_node, nodes, intra, inter, host, nvme, curves, .. } = &mut machine;
        for &(key, factor) in &self.changes {
            let times = |n: u64| times(n, factor);
            let rate = |r: &mut PerSecond| *r = PerSecond(times(r.0));
            // Inside a node, measured curves stand in the place of α and β.
            let mut curve = |latency, per_byte| *curves = Arc::new(rescaled(curves, latency, per_byte));
            match key {
                Key::Link => {
                    [&mut intra.bandwidth, &mut inter.bandwidth].into_iter().for_each(rate);
                    curve(1.0, 1.0 / factor);
                }
                Key::Intra => {
                    rate(&mut intra.bandwidth);
                    curve(1.0, 1.0 / factor);
                }
                Key::Inter => rate(&mut inter.bandwidth),
                Key::Host => rate(&mut host.bandwidth),
                Key::Nvme => rate(&mut nvme.bandwidth),
                Key::Latency => {
                    [&mut intra.latency, &mut inter.latency].into_iter().for_each(|l| *l = Nanos(times(l.0)));
                    curve(factor, 1.0);
                }
                Key::Memory => device.memory = Bytes(times(device.memory.0)),
                Key::Compute => {
                    let Peak { f64, f32, bf16, f16 } = &mut device.peak;
                    [f64, f32, bf16, f16].into_iter().for_each(rate);
                }
                Key::Bandwidth => rate(&mut device.bandwidth),
                // A node of built-in devices does not grow; one of others is all there is known of.
                Key::Nodes if *nodes == 1 && (factor < 1.0 || !is_sold) => *per_node = times(*per_node),
                Key::Nodes => *nodes = times(*nodes),
            }
        }
        machine
    }
}

fn times(n: u64, factor: f64) -> u64 {
    ((n as f64 * factor).round() as u64).max(1)
}

/// Curves as α + bytes·β with both parts changed by a factor: α is the time of the smallest measured size.
fn rescaled(curves: &Curves, latency: f64, per_byte: f64) -> Curves {
    let all = curves.all().into_iter().map(|Curve { op, ranks, mut points }| {
        let least = points.first().map_or(0, |p| p.1);
        points.iter_mut().for_each(|(_, time)| *time = (least as f64 * latency + time.saturating_sub(least) as f64 * per_byte).round() as u64);
        Curve { op, ranks, points }
    });
    Curves::new(&all.collect::<Vec<_>>())
}

/// The answer on another machine.
pub struct Sensitivity {
    pub what: String,
    pub devices: u64,
    /// Where they are in several.
    pub nodes: Option<u64>,
    /// The best plan there, or why there is none.
    pub answer: Result<(Plan, Prediction), String>,
}

/// The best plan in each scenario.
///
/// # Errors
/// Of dplan's own passes; that nothing fits is an answer.
pub fn what_if(forward: &Graph, options: &Options<'_>, scenarios: &[Scenario]) -> Result<Vec<Sensitivity>, CompileError> {
    scenarios.iter().map(|scenario| on(scenario.text.clone(), forward, &scenario.apply(options))).collect()
}

/// The best plan on the fewest devices that hold one, nodes as they are.
///
/// # Errors
/// As [`what_if`].
pub fn min_devices(forward: &Graph, options: &Options<'_>, fewest: Fewest) -> Result<Sensitivity, CompileError> {
    let none = |why: &str| Ok(Sensitivity { what: "fewest devices".into(), devices: 0, nodes: None, answer: Err(why.into()) });
    let devices = match fewest {
        Fewest::Are(devices) => devices,
        Fewest::Unknown => return none("no number of such devices was found that fits it"),
        Fewest::Unlike => return none("the cluster has groups of different devices: ask for a cluster of one of them"),
    };
    let mut options = options.clone();
    options.cluster = options.cluster.map(|machine| machine.resized(devices).unwrap_or_else(|| machine.clone()), |link| link);
    on("fewest devices".into(), forward, &options)
}

fn on(what: String, forward: &Graph, options: &Options<'_>) -> Result<Sensitivity, CompileError> {
    let answer = match best(forward, options) {
        Ok(found) => Ok(found),
        // Pins and batch that fit the machine at hand need not fit this one.
        Err(CompileError::Refused(
            refusal @ (Refusal::Infeasible(_)
            | Refusal::Context { .. }
            | Refusal::Late
            | Refusal::Batch { .. }
            | Refusal::Layout { .. }
            | Refusal::Pipeline { .. }
            | Refusal::Impossible { .. }),
        )) => Err(refusal.to_string()),
        Err(other) => return Err(other),
    };
    let nodes = options.cluster.only().map(|machine| machine.nodes).filter(|&nodes| nodes > 1);
    Ok(Sensitivity { what, devices: options.cluster.devices(), nodes, answer })
}

/// The most that a device has elsewhere, in the memory of its host and in files; nothing if nothing is offloaded.
fn offloaded(p: &Prediction) -> Option<(u64, u64)> {
    let most = |of: fn(&Arena) -> u64| p.memory.iter().map(|m| of(&m.arena)).max().unwrap_or(0);
    Some((most(|a| a.host), most(|a| a.file))).filter(|&(host, file)| host + file > 0)
}

/// One line for people.
pub fn line(s: &Sensitivity, own: &Prediction) -> String {
    match &s.answer {
        Ok((plan, p)) => {
            let most = p.memory.iter().map(|m| m.total_bytes()).max().unwrap_or(0);
            format!(
                "{}: {} devices{}, step {} ({:.2}x), {}, micro-batches of {}, {} a device{}",
                s.what,
                s.devices,
                s.nodes.map_or(String::new(), |nodes| format!(" in {nodes} nodes")),
                seconds(p.step.seconds()),
                p.step.seconds() / own.step.seconds().max(1e-12),
                degrees(plan),
                plan.micro_batch,
                gib(most),
                offloaded(p).map_or(String::new(), |(host, file)| format!(", offloads {} a device to hosts, {} to files", gib(host), gib(file)))
            )
        }
        Err(why) => format!("{}: {why}", s.what),
    }
}

/// One object.
pub fn json(s: &Sensitivity) -> Value {
    match &s.answer {
        Ok((plan, p)) => json!({
            "what": s.what, "devices": s.devices, "step_seconds": p.step.seconds(),
            "nodes": s.nodes, "host_bytes": offloaded(p).map_or(0, |(host, _)| host), "file_bytes": offloaded(p).map_or(0, |(_, file)| file),
            "dp": plan.dp, "ep": plan.ep, "cp": plan.cp, "tp": plan.tp, "pp": plan.pp(), "micro_batch": plan.micro_batch,
        }),
        Err(why) => json!({ "what": s.what, "devices": s.devices, "step_seconds": null, "infeasible": why }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dplan_ir::dtype::DType;
    use dplan_ir::optimizer::Optimizer;
    use dplan_ir::plan::Clip;
    use dplan_ir::program::Pattern;
    use dplan_planner::cost::comm::{Group, group_time};
    use dplan_planner::machine::curves::Op;
    use dplan_planner::pins::Pins;
    use dplan_planner::request::Solver;

    /// Curves of 2 µs, and a quarter of a nanosecond a byte and rank.
    #[test]
    fn measured_links_change_too() {
        let points = |ranks: u64| [4u64, 1 << 10, 1 << 20].map(|bytes| (bytes, 2_000 + (bytes - 4) * ranks / 4)).to_vec();
        let curve = |op| [2, 4, 8].map(|ranks| Curve { op, ranks, points: points(ranks) });
        let measured: Vec<Curve> = Op::ALL.into_iter().flat_map(curve).collect();
        let cluster = Machine { curves: Arc::new(Curves::new(&measured)), ..Machine::parse("h100:8").unwrap() }.into();
        let options = Options {
            cluster,
            batch: 8,
            compute: DType::Bf16,
            optimizer: Optimizer::AdamW,
            clip: Clip::GlobalNorm,
            pins: Pins::default(),
            memory_limit: None,
            solver: Solver::Exact,
            deadline: None,
        };
        let time = |text: &str, ranks: u64, bytes: u64| {
            let machine = scenario(text).unwrap().apply(&options).cluster;
            group_time(machine.whole(), Group { local: ranks, nodes: 1 }, Pattern::AllGather, bytes).0
        };
        for ranks in [2, 4, 8] {
            let large = ((1 << 20) - 4) * ranks / 4;
            assert_eq!((time("memory=2x", ranks, 4), time("memory=2x", ranks, 1 << 20)), (2_000, 2_000 + large));
            for key in ["link", "intra"] {
                assert_eq!((time(&format!("{key}=2x"), ranks, 4), time(&format!("{key}=2x"), ranks, 1 << 20)), (2_000, 2_000 + large / 2));
            }
            assert_eq!((time("latency=3x", ranks, 4), time("latency=3x", ranks, 1 << 20)), (6_000, 6_000 + large));
            assert_eq!(time("inter=2x", ranks, 1 << 20), 2_000 + large);
        }
    }

    #[test]
    fn twice_the_nodes_are_no_larger_node() {
        let grown = |cluster: &str, text: &str| {
            let machine = scenario(text).unwrap().machine(&Machine::parse(cluster).unwrap());
            (machine.per_node, machine.nodes)
        };
        assert_eq!(grown("h100:8", "nodes=2x"), (8, 2));
        assert_eq!(grown("h100:4x4", "nodes=0.5x"), (4, 2));
        assert_eq!(grown("h100:8", "nodes=0.5x"), (4, 1));
        assert_eq!(grown("cpu:4", "nodes=2x"), (8, 1));
    }

    #[test]
    fn scenarios_are_read_and_bad_ones_say_what_would_be_right() {
        assert_eq!(scenario("link=2x").unwrap().changes, [(Key::Link, 2.0)]);
        assert_eq!(scenario("memory=1.5, nodes=4x").unwrap().changes, [(Key::Memory, 1.5), (Key::Nodes, 4.0)]);
        for (text, says) in [("link", "KEY=FACTOR"), ("lnk=2x", "keys are link, intra"), ("link=fast", "factor from"), ("link=0x", "factor from")] {
            let error = scenario(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
