//! What a step may be at most, so that no time and no size leaves 64 bits.
//!
//! Times are counted in nanoseconds, and where options of a layer are compared in picoseconds; sketches of layers are of up to all sequences of a step on one rank. So what is
//! asked of a question is, of every layer with all sequences on the slowest device and every value over the slowest link,
//!
//! ```text
//! operations and bytes of an op < 2⁶⁰,      Σ t < 2⁶³ / 4000 ns (26 days),      Σ over layers, and launches of so many micro-batches < 2⁵⁹ ns (18 years)
//! ```
//! where the 4 is for passes that run again and for what is exchanged more than once. More is refused, by name; nothing wraps around.

use crate::cost::compute::op_time;
use crate::machine::{Cluster, Machine};
use dplan_ir::cost::op_cost;
use dplan_ir::entity::ValueId;
use dplan_ir::graph::{Graph, Node};
use dplan_ir::mesh::Mesh;
use dplan_ir::sharding::{LocalType, Padded, Sharding, local_type};

const MOST_OF_AN_OP: u64 = 1 << 60;
/// Nanoseconds.
const MOST_OF_A_LAYER: u128 = (1 << 63) / 4000;
const MOST_OF_ALL: u128 = 1 << 59;

/// What of a step of so many sequences is more than can be counted, in words.
pub fn too_much(graph: &Graph, cluster: &Cluster, batch: u64) -> Option<String> {
    let mut logical = Padded(graph.dims.map(|_, d| d.size));
    if let Some(dim) = graph.batch {
        logical.0[dim] = batch;
    }
    let mesh = Mesh::new(1, 1);
    let whole = |&value: &ValueId| {
        let ty = &graph.values[value].ty;
        local_type(ty, &Sharding::replicated(ty.dims.len()), &logical, &mesh)
    };
    let layers = graph.nodes.values().map(|node| node.layer as usize + 1).max().unwrap_or(0);
    let mut times = vec![0u128; layers];
    let link = cluster.groups().iter().map(|machine| least_rate(machine, cluster)).min().unwrap_or(1);
    let launches = cluster.groups().iter().map(launches).max().unwrap_or(0) * graph.nodes.len() as u128 * u128::from(batch);
    for node in graph.nodes.values() {
        let (ins, outs): (Vec<LocalType>, Vec<LocalType>) = (node.inputs.iter().map(whole).collect(), node.outputs.iter().map(whole).collect());
        let cost = op_cost(&node.op, &ins.iter().collect::<Vec<_>>(), &outs.iter().collect::<Vec<_>>());
        // Every value may be gathered or summed over ranks, and copied to another memory and back.
        let moved: u128 = ins.iter().chain(&outs).map(|t| u128::from(t.bytes())).sum();
        if cost.flops.max(cost.bytes) >= MOST_OF_AN_OP || moved >= u128::from(MOST_OF_AN_OP) {
            return Some(format!("{} takes more than 2^60 operations or bytes", name(graph, node)));
        }
        let dtype = ins.first().or(outs.first()).map_or(dplan_ir::dtype::DType::F32, |t| t.dtype);
        let slowest = |machine: &Machine| u128::from(op_time(&machine.device, dtype, &cost).0);
        times[node.layer as usize] += cluster.groups().iter().map(slowest).max().unwrap_or(0) + moved * 1_000_000_000 / u128::from(link.max(1));
    }
    let days = |nanos: u128| nanos / 86_400_000_000_000;
    match times.iter().position(|&time| time >= MOST_OF_A_LAYER) {
        Some(layer) => Some(format!(
            "layer {layer} alone is {} days of work for one device and its links, {} are counted",
            days(times[layer]),
            days(MOST_OF_A_LAYER)
        )),
        None => {
            let all = times.iter().sum::<u128>() + launches;
            (all >= MOST_OF_ALL)
                .then(|| format!("the layers are {} days of work for one device and its links, {} are counted", days(all), days(MOST_OF_ALL)))
        }
    }
}

/// Nanoseconds that an op of the smallest micro-batch takes at least, with a collective over many ranks behind it.
fn launches(machine: &Machine) -> u128 {
    let ranks = u128::from(machine.per_node.min(256));
    u128::from(machine.device.launch.0) + ranks * u128::from(machine.intra.latency.0) + 64 * u128::from(machine.inter.latency.0)
}

/// Bytes a second of the slowest link that layers wait for.
fn least_rate(machine: &Machine, cluster: &Cluster) -> u64 {
    let between = if cluster.only().is_some() { machine.inter } else { cluster.between() };
    let network = if cluster.only().is_some() && machine.nodes == 1 { machine.intra } else { machine.inter };
    [machine.intra, network, between].iter().map(|link| link.bandwidth.0).min().unwrap_or(1)
}

fn name<'a>(graph: &'a Graph, node: &Node) -> &'a str {
    node.outputs.first().map_or("an op", |&value| graph.values[value].name.as_str())
}
