//! `--what-if` and `--min-devices`: the same question on another machine.
//!
//! A scenario is `key=FACTOR[x]`, several joined by commas: `memory=1.5x`, `link=2x,compute=0.9x`. Each is searched anew; the plan may change.

use super::output::{gib, seconds};
use super::report::degrees;
use crate::compile::{CompileError, Options, best};
use dplan_ir::graph::Graph;
use dplan_ir::plan::Plan;
use dplan_planner::machine::{Machine, Peak};
use dplan_planner::predict::Prediction;
use dplan_planner::request::Refusal;
use dplan_planner::units::{Bytes, Nanos, PerSecond};
use serde_json::{Value, json};

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
    Latency,
    Memory,
    Compute,
    Bandwidth,
    Nodes,
}

const KEYS: [(&str, Key); 9] = [
    ("link", Key::Link),
    ("intra", Key::Intra),
    ("inter", Key::Inter),
    ("host", Key::Host),
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
    /// The question with the machine changed.
    fn apply<'a>(&self, options: &Options<'a>) -> Options<'a> {
        let mut options = options.clone();
        let Machine { device, per_node, nodes, intra, inter, host, curves: _ } = &mut options.cluster;
        for &(key, factor) in &self.changes {
            let times = |n: u64| ((n as f64 * factor).round() as u64).max(1);
            let rate = |r: &mut PerSecond| *r = PerSecond(times(r.0));
            match key {
                Key::Link => [&mut intra.bandwidth, &mut inter.bandwidth].into_iter().for_each(rate),
                Key::Intra => rate(&mut intra.bandwidth),
                Key::Inter => rate(&mut inter.bandwidth),
                Key::Host => rate(&mut host.bandwidth),
                Key::Latency => [&mut intra.latency, &mut inter.latency].into_iter().for_each(|l| *l = Nanos(times(l.0))),
                Key::Memory => {
                    device.memory = Bytes(times(device.memory.0));
                    options.memory_limit = options.memory_limit.map(|b| Bytes(times(b.0)));
                }
                Key::Compute => {
                    let Peak { f64, f32, bf16, f16 } = &mut device.peak;
                    [f64, f32, bf16, f16].into_iter().for_each(rate);
                }
                Key::Bandwidth => rate(&mut device.bandwidth),
                Key::Nodes if *nodes == 1 => *per_node = times(*per_node),
                Key::Nodes => *nodes = times(*nodes),
            }
        }
        options
    }
}

/// The answer on another machine.
pub struct Sensitivity {
    pub what: String,
    pub devices: u64,
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
pub fn min_devices(forward: &Graph, options: &Options<'_>, fewest: Option<u64>) -> Result<Sensitivity, CompileError> {
    let Some(devices) = fewest else {
        return Ok(Sensitivity { what: "fewest devices".into(), devices: 0, answer: Err("no number of such devices was found that fits it".into()) });
    };
    let mut options = options.clone();
    let Machine { per_node, nodes, .. } = &mut options.cluster;
    if *nodes == 1 {
        *per_node = devices;
    } else {
        *nodes = devices / *per_node;
    }
    on("fewest devices".into(), forward, &options)
}

fn on(what: String, forward: &Graph, options: &Options<'_>) -> Result<Sensitivity, CompileError> {
    let answer = match best(forward, options) {
        Ok(found) => Ok(found),
        Err(CompileError::Refused(refusal @ (Refusal::Infeasible(_) | Refusal::Late | Refusal::Batch { .. } | Refusal::Layout { .. }))) => {
            Err(refusal.to_string())
        }
        Err(other) => return Err(other),
    };
    Ok(Sensitivity { what, devices: options.cluster.devices(), answer })
}

/// One line for people.
pub fn line(s: &Sensitivity, own: &Prediction) -> String {
    match &s.answer {
        Ok((plan, p)) => {
            let most = p.memory.iter().map(|m| m.total_bytes()).max().unwrap_or(0);
            format!(
                "{}: {} devices, step {} ({:.2}x), {}, micro-batches of {}, {} a device",
                s.what,
                s.devices,
                seconds(p.step.seconds()),
                p.step.seconds() / own.step.seconds().max(1e-12),
                degrees(plan),
                plan.micro_batch,
                gib(most)
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
            "dp": plan.dp, "ep": plan.ep, "cp": plan.cp, "tp": plan.tp, "pp": plan.pp(), "micro_batch": plan.micro_batch,
        }),
        Err(why) => json!({ "what": s.what, "devices": s.devices, "step_seconds": null, "infeasible": why }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
