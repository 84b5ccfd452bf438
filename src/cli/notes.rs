//! What is to be said beside an answer: what was assumed where the question left something open, and what of it may not be meant so.

use crate::compile::Compiled;
use crate::runtime::cuda;
use dplan_ir::dtype::DType;
use dplan_planner::machine::{Cluster, Machine, builtin};
use dplan_planner::units::{Bytes, PerSecond};

/// The type that devices compute in where nothing is said: CPU ranks f32, other devices 16 bits; f16 where some device has no matrix units for
/// bf16, which shows in less than half the rate (a fitted machine's rates of the two differ by what was measured), with the reason.
pub fn default_precision(cluster: &Cluster) -> (DType, Option<String>) {
    if cluster.groups().iter().any(is_cpu) {
        return (DType::F32, None);
    }
    let Some(machine) = cluster.groups().iter().find(|machine| has_f16_alone(machine)) else {
        return (DType::Bf16, None);
    };
    let Machine { device, .. } = machine;
    let tera = |PerSecond(rate)| rate as f64 * 1e-12;
    let note = format!(
        "f16 with dynamic loss scaling: {} does {:.0} TFLOP/s in f16, {:.0} in bf16; --precision says otherwise",
        device.name,
        tera(device.peak.f16),
        tera(device.peak.bf16)
    );
    (DType::F16, Some(note))
}

/// Nodes that are larger than those which are sold.
pub fn of_nodes(cluster: &Cluster) -> Vec<String> {
    let larger = |machine: &&Machine| machine.usual_node().is_some_and(|usual| machine.per_node > usual);
    let note = |machine: &Machine| {
        let Machine { device, per_node, nodes, .. } = machine;
        let usual = machine.usual_node().unwrap_or(*per_node);
        let devices = machine.devices();
        let instead = if devices.is_multiple_of(usual) {
            format!("; {}:{usual}x{} has as many in such nodes", device.name, devices / usual)
        } else {
            String::new()
        };
        let nodes = if *nodes == 1 { "one node".into() } else { format!("{nodes} nodes") };
        format!("{nodes} of {per_node} {} on the links inside a node, where usual nodes have {usual}{instead}", device.name)
    };
    cluster.groups().iter().filter(larger).map(note).collect()
}

/// What prices of built-in devices are: allowances ([`dplan_planner::machine`]), which no run was held against. How much longer published runs took is of two that have no pipeline: Llama 3.1
/// 8B on eight H100 (torchtitan, December 2024), 2.46 s beside 1.51 s, and 12 layers of Llama 3 70B on eight B200 (Megatron-Core, April 2026), 0.726 s beside 0.425 s.
pub fn of_prices(cluster: &Cluster) -> Option<String> {
    let by_allowances = |machine: &&Machine| !is_cpu(machine) && builtin(&machine.device.name).is_some_and(|known| known.device == machine.device);
    let mut names: Vec<&str> = cluster.groups().iter().filter(by_allowances).map(|machine| machine.device.name.as_str()).collect();
    names.dedup();
    let names = (!names.is_empty()).then(|| names.join(" and "))?;
    Some(format!(
        "{names}: priced by allowances of the data sheet, nothing was measured; published runs of other frameworks took 1.6 (H100) and 1.7 times (B200) as long as so priced; `dplan calibrate` fits \
         a cluster file to a run"
    ))
}

/// Where a plan for GPUs is of a kind that GPU ranks do not run.
pub fn of_ranks(compiled: &Compiled) -> Option<String> {
    let is_for_gpus = !compiled.file.cluster.groups().iter().any(is_cpu);
    let why = cuda::refusal(&compiled.file.plan).filter(|_| is_for_gpus)?;
    Some(format!("priced, and not run on GPUs: {why}"))
}

/// Where layers were pinned into more memory of the host than there is.
pub fn of_hosts(compiled: &Compiled, limit: Option<Bytes>) -> Option<String> {
    let limit =
        limit.or_else(|| compiled.file.cluster.groups().iter().filter(|machine| !is_cpu(machine)).filter_map(|machine| machine.host_memory).min());
    let taken = Bytes(compiled.prediction.memory.iter().map(|m| m.arena.host).max().unwrap_or(0));
    let limit = limit.filter(|limit| taken > *limit)?;
    Some(format!("offloading is pinned, and {taken} a device are in the host's memory, of which there is to be {limit}"))
}

fn has_f16_alone(machine: &Machine) -> bool {
    machine.device.peak.bf16.0.saturating_mul(2) <= machine.device.peak.f16.0
}

/// CPU ranks have the memory of the host already.
pub fn is_cpu(machine: &Machine) -> bool {
    machine.device.name == "cpu"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_without_units_for_bf16_compute_in_f16() {
        let of = |text: &str| default_precision(&Cluster::parse(text).unwrap());
        assert_eq!(
            [of("cpu:2"), of("cpu:1+v100-16g:1"), of("h100:8")].map(|(dtype, note)| (dtype, note.is_some())),
            [(DType::F32, false), (DType::F32, false), (DType::Bf16, false)]
        );
        for text in ["v100-32g:8", "h100:8+v100-16g:8"] {
            let (dtype, note) = of(text);
            assert!(dtype == DType::F16 && note.is_some_and(|note| note.contains("125 TFLOP/s in f16, 16 in bf16")), "{text}");
        }
    }

    #[test]
    fn a_device_that_was_measured_a_little_slower_in_bf16_computes_in_it() {
        let mut h100 = Machine::parse("h100:8").unwrap();
        let PerSecond(rate) = h100.device.peak.f16;
        for (bf16, dtype) in [(rate / 20 * 19, DType::Bf16), (rate / 2 + 1, DType::Bf16), (rate / 2, DType::F16)] {
            h100.device.peak.bf16 = PerSecond(bf16);
            assert_eq!(default_precision(&h100.clone().into()).0, dtype, "{bf16}");
        }
    }

    #[test]
    fn prices_that_nobody_measured_are_called_so() {
        let of = |cluster: Cluster| of_prices(&cluster);
        let h100 = Machine::parse("h100:8x2").unwrap();
        assert!(of(h100.clone().into()).is_some_and(|note| note.starts_with("h100: priced by allowances")));
        assert!(of(Cluster::parse("a100-80g:8+h100:8").unwrap()).is_some_and(|note| note.starts_with("a100-80g and h100:")));
        assert_eq!([of(h100.measured().into()), of(Cluster::parse("cpu:4").unwrap())], [None, None]);
    }

    #[test]
    fn nodes_that_nobody_sells_are_named() {
        let of = |text: &str| of_nodes(&Cluster::parse(text).unwrap());
        assert!(of("h100:8x64").is_empty() && of("cpu:64").is_empty() && of("gb200:72").is_empty());
        assert!(of("h100:64")[0].contains("one node of 64 h100") && of("h100:64")[0].contains("h100:8x8 has as many"), "{:?}", of("h100:64"));
        assert!(of("h100:8+a100-80g:12x2")[0].contains("2 nodes of 12 a100-80g") && of("h100:8+a100-80g:12x2")[0].contains("8x3"));
        assert!(!of("h100:9")[0].contains("as many"));
    }
}
