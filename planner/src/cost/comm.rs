//! Time of collectives and messages: α–β on two tiers.
//!
//! A group of `n` ranks has `l` members in each node it touches and touches `g = n/l` nodes. A gather or a scatter of `S` bytes (the whole, on one
//! rank) takes
//!
//! ```text
//! (l−1)·α_intra + ⌈log₂ g⌉·α_inter + S·(n−1)/n / β,      β = β_intra if g = 1, else min(β_intra, l·β_inter)
//! ```
//! a ring inside nodes whose `l` network links work side by side, and a logarithmic exchange of latencies between nodes. An all-reduce is a scatter
//! and a gather. An all-to-all adds nothing up on the way, so each link of a node carries what its own rank sends to other nodes, after what stays:
//!
//! ```text
//! (l−1)·α_intra + ⌈log₂ g⌉·α_inter + S·(l−1)/n / β_intra + S·(n−l)/n / min(β_intra, β_inter)
//! ```
//! A shift is a message from each member to the next, all at once, of which a node's links carry one each.
//!
//! Inside a node, measured curves take the place of the formula where the machine has them, and a group of several nodes never takes less
//! than its members in one node alone. Times grow with bytes, and with ranks in either tier.

use crate::machine::curves::Op;
use crate::machine::{Link, Machine};
use crate::units::{Nanos, PerSecond};
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::program::Pattern;

/// Size of a group of ranks, by tier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Group {
    /// Members in one node.
    pub local: u64,
    /// Nodes touched.
    pub nodes: u64,
}

/// How the groups along `axes` lie on the nodes; where groups differ, as the worst of them.
pub fn group(machine: &Machine, mesh: &Mesh, axes: AxisSet) -> Group {
    let ranks = mesh.size(axes);
    // Aligned blocks of this many consecutive ranks lie inside one node, on every stage.
    let block = if machine.nodes == 1 { u64::MAX } else { gcd(machine.per_node, mesh.ranks()) };
    let mut local = 1;
    for axis in axes.iter() {
        let size = mesh.axis(axis).size;
        let stride = mesh.stride(axis);
        local *= if block == u64::MAX || block % (stride * size) == 0 {
            size
        } else if block % stride == 0 && size.is_multiple_of(block / stride) {
            block / stride
        } else {
            1
        };
    }
    Group { local, nodes: ranks / local }
}

/// Time of a collective over `axes` of one stage. `bytes` is the larger of what a rank puts in and gets out: the whole, where the other side is a block.
pub fn collective_time(machine: &Machine, mesh: &Mesh, axes: AxisSet, pattern: Pattern, bytes: u64) -> Nanos {
    group_time(machine, group(machine, mesh, axes), pattern, bytes)
}

/// Time of a collective over a group.
pub fn group_time(machine: &Machine, group: Group, pattern: Pattern, bytes: u64) -> Nanos {
    let ranks = group.local * group.nodes;
    if ranks <= 1 {
        return Nanos::ZERO;
    }
    let inside = Op::of(pattern).and_then(|op| machine.curves.time(op, group.local, bytes, machine.intra.latency));
    match inside {
        Some(time) if group.nodes == 1 => time,
        _ => formula(machine, group, pattern, bytes).max(inside.unwrap_or(Nanos::ZERO)),
    }
}

fn formula(machine: &Machine, group: Group, pattern: Pattern, bytes: u64) -> Nanos {
    let ranks = group.local * group.nodes;
    let steps = u64::from(group.nodes.next_power_of_two().trailing_zeros());
    let latency = machine.intra.latency * (group.local - 1) + machine.inter.latency * steps;
    let beta = if group.nodes == 1 {
        machine.intra.bandwidth
    } else {
        let network = PerSecond(machine.inter.bandwidth.0.saturating_mul(group.local));
        machine.intra.bandwidth.min(network)
    };
    let moved = (u128::from(bytes) * u128::from(ranks - 1)).div_ceil(u128::from(ranks));
    let once = latency + beta.time(moved);
    match pattern {
        Pattern::AllGather | Pattern::ReduceScatter => once,
        Pattern::AllReduce => once * 2,
        Pattern::Shift if group.nodes == 1 => message_time(machine.intra, bytes),
        Pattern::Shift => message_time(machine.intra, bytes).max(message_time(machine.inter, bytes)),
        Pattern::AllToAll if group.nodes == 1 || group.local == 1 => once,
        Pattern::AllToAll => {
            let between = machine.intra.bandwidth.min(machine.inter.bandwidth);
            let part = |members: u64, link: PerSecond| members as f64 / link.0.max(1) as f64;
            let seconds = bytes as f64 / ranks as f64 * (part(group.local - 1, machine.intra.bandwidth) + part(ranks - group.local, between));
            latency + Nanos((seconds * 1e9).ceil() as u64)
        }
    }
}

/// How the same ranks of `stages` stages and `axes` of each lie on the nodes: on different ones, unless whole nodes hold all those stages.
pub fn group_across_stages(machine: &Machine, mesh: &Mesh, axes: AxisSet, stages: u64) -> Group {
    let one = group(machine, mesh, axes);
    let together = machine.nodes == 1 || machine.per_node.is_multiple_of(mesh.ranks() * stages);
    if together { Group { local: one.local * stages, ..one } } else { Group { nodes: one.nodes * stages, ..one } }
}

/// Time of a collective over such a group: the gradients of tied parameters.
pub fn across_stages_time(machine: &Machine, mesh: &Mesh, axes: AxisSet, stages: u64, pattern: Pattern, bytes: u64) -> Nanos {
    group_time(machine, group_across_stages(machine, mesh, axes, stages), pattern, bytes)
}

/// Time of a message of `bytes` from each rank of a stage to the same rank of another; of both stages the first ranks.
pub fn p2p_time(machine: &Machine, mesh: &Mesh, from: u64, to: u64, bytes: u64) -> Nanos {
    let node = |rank: u64| rank / machine.per_node.max(1);
    let inside = machine.nodes == 1 || node(from.min(to)) == node(from.max(to) + mesh.ranks() - 1);
    message_time(if inside { machine.intra } else { machine.inter }, bytes)
}

/// Seconds of a message over a link, of a size that need not be a whole number of bytes.
pub fn message_seconds(link: Link, bytes: f64) -> f64 {
    link.latency.seconds() + bytes / link.bandwidth.0.max(1) as f64
}

/// Time of a message over a link.
pub fn message_time(link: Link, bytes: u64) -> Nanos {
    link.latency + link.bandwidth.time(u128::from(bytes))
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::known_devices;

    fn machine(name: &str, per_node: u64, nodes: u64) -> Machine {
        Machine::parse(&format!("{name}:{per_node}x{nodes}")).unwrap()
    }

    #[test]
    fn time_grows_with_bytes_and_ranks() {
        for name in known_devices() {
            let machine = machine(name, 8, 64);
            for pattern in Pattern::ALL {
                let time = |local, nodes, bytes| group_time(&machine, Group { local, nodes }, pattern, bytes);
                for bytes in [1, 1000, 1 << 20, 1 << 33] {
                    for n in 1..64 {
                        assert!(time(n, 1, bytes) <= time(n + 1, 1, bytes), "{name} {n} ranks in a node");
                        assert!(time(8, n, bytes) <= time(8, n + 1, bytes), "{name} {n} nodes");
                        assert!(time(n, 2, bytes) <= time(n, 2, 2 * bytes), "{name} {bytes} bytes");
                    }
                }
            }
        }
    }

    #[test]
    fn all_to_all_is_a_scatter_inside_nodes_and_between_single_ranks_and_slower_between_full_nodes() {
        let machine = Machine { curves: Default::default(), ..machine("h100", 8, 4) };
        let ratio = |local, nodes| {
            let time = |pattern| group_time(&machine, Group { local, nodes }, pattern, 1 << 30).0 as f64;
            time(Pattern::AllToAll) / time(Pattern::ReduceScatter)
        };
        assert_eq!((ratio(8, 1), ratio(1, 4)), (1.0, 1.0));
        // Sums over a node leave it once; shares of all its ranks leave it all.
        assert!(ratio(2, 2) > 1.3 && ratio(8, 4) > 5.0, "{} {}", ratio(2, 2), ratio(8, 4));
    }

    #[test]
    fn inner_axes_lie_inside_nodes() {
        let h100 = machine("h100", 8, 4);
        let mesh = Mesh::new(4, 4);
        assert_eq!(group(&h100, &mesh, mesh.tp()), Group { local: 4, nodes: 1 });
        assert_eq!(group(&h100, &mesh, mesh.dp()), Group { local: 2, nodes: 2 });
        assert_eq!(group(&h100, &mesh, mesh.all()), Group { local: 8, nodes: 2 });
        let wide = Mesh::new(1, 16);
        assert_eq!(group(&h100, &wide, wide.tp()), Group { local: 8, nodes: 2 });
        // A mesh of 6 never lies evenly on nodes of 8: only pairs are sure to be neighbours.
        let odd = Mesh::new(2, 3);
        assert_eq!(group(&h100, &odd, odd.tp()), Group { local: 1, nodes: 3 });
        assert_eq!(group(&machine("cpu", 6, 1), &odd, odd.all()), Group { local: 6, nodes: 1 });
    }

    #[test]
    fn ranks_of_several_stages_are_on_different_nodes_unless_one_holds_them_all() {
        let (h100, mesh) = (machine("h100", 8, 4), Mesh::new(2, 2));
        assert_eq!(group_across_stages(&h100, &mesh, mesh.dp(), 2), Group { local: 4, nodes: 1 });
        assert_eq!(group_across_stages(&h100, &mesh, mesh.dp(), 3), Group { local: 2, nodes: 3 });
    }

    #[test]
    fn neighbouring_stages_in_a_node_use_its_links() {
        let h100 = machine("h100", 8, 4);
        let mesh = Mesh::new(1, 4);
        let times: Vec<Nanos> = (0..3).map(|s| p2p_time(&h100, &mesh, 4 * s, 4 * s + 4, 1 << 20)).collect();
        assert!(times[0] < times[1] && times[0] == times[2]);
    }
}
