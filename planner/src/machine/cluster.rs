//! All devices of a plan: one group of equal nodes, or several groups that differ.
//!
//! Every [`Site`] has one machine. That of a group is its own; that of several groups stands for devices and links that are the least of theirs in everything, so that
//! nothing takes longer on the real ones:
//!
//! ```text
//! rates, memory beside the context      the least            latencies, launches, grains      the greatest
//! ranks sure to share a node            gcd of per_node      between nodes                    the least of all links there, those between groups included
//! ```
//! Costs of a stage take its first rank for the first of a node, in blocks of `per_node` that divide its ranks. Of three groups or more one may be between others, and
//! then that is so only of blocks that divide the devices of the groups beside a site, too: its machine has such nodes.
//!
//! Groups that are equal, with links between them as within, make the machine that they would be as one group. With one group nothing is made up.

use super::curves::{Curve, Curves};
use super::{DeviceSpec, Link, Machine, MachineError, Peak};
use crate::baselines::Node;
use crate::placement::{Groups, Seat, Site};
use crate::space::greatest_common_divisor;
use crate::units::{Bytes, Millionths, PerSecond};
use dplan_ir::dtype::DType;
use dplan_ir::plan::{MOST_GROUPS, Placement, Plan};
use std::sync::Arc;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cluster {
    groups: Vec<Machine>,
    /// Between devices of different groups, which each group's own links to others may narrow; of one group what is between its nodes.
    between: Link,
    sizes: Groups,
    /// By [`Site::index`].
    sites: Vec<Machine>,
}

impl From<Machine> for Cluster {
    fn from(machine: Machine) -> Cluster {
        Cluster { between: machine.inter, sizes: Groups::one(), sites: vec![machine.clone()], groups: vec![machine] }
    }
}

impl Cluster {
    /// Groups and the link between them; if none is given, it is the least of those between their nodes.
    ///
    /// # Errors
    /// No group, or more than [`MOST_GROUPS`].
    pub fn new(groups: Vec<Machine>, between: Option<Link>) -> Result<Cluster, MachineError> {
        if groups.is_empty() || groups.len() > MOST_GROUPS {
            return Err(MachineError::Groups { given: groups.len() });
        }
        if let [machine] = groups.as_slice() {
            return Ok(machine.clone().into());
        }
        let slowest = groups.iter().map(|m| m.inter).reduce(least_link);
        let between = between.or(slowest).unwrap_or(groups[0].inter);
        let site = |site: Site| {
            let members: Vec<&Machine> = site.groups().map(|g| &groups[g]).collect();
            let machine = if site.is_pure() { members[0].clone() } else { least(&members, between) };
            let others = (0..groups.len()).filter(|&g| site.groups().all(|here| here != g)).map(|g| groups[g].devices());
            match groups.len() {
                3.. if machine.nodes > 1 => in_nodes(&machine, others.fold(machine.per_node, greatest_common_divisor)),
                _ => machine,
            }
        };
        let sites = Site::all(groups.len()).map(site).collect();
        let sizes = Groups::new(groups.iter().map(Machine::devices).collect());
        Ok(Cluster { groups, between, sizes, sites })
    }

    /// Reads cluster strings joined by `+`, such as `a100-80g:8x2+h100:8x2`.
    ///
    /// # Errors
    /// As [`Machine::parse`] and [`Cluster::new`].
    pub fn parse(text: &str) -> Result<Cluster, MachineError> {
        let groups = text.split('+').map(Machine::parse).collect::<Result<Vec<_>, _>>()?;
        Cluster::new(groups, None)
    }

    pub fn groups(&self) -> &[Machine] {
        &self.groups
    }
    pub fn between(&self) -> Link {
        self.between
    }
    pub fn sizes(&self) -> &Groups {
        &self.sizes
    }
    pub fn devices(&self) -> u64 {
        self.groups.iter().map(Machine::devices).sum()
    }
    pub fn site(&self, site: Site) -> &Machine {
        &self.sites[site.index()]
    }
    /// The machine of everything: what all devices do together costs what it costs there.
    pub fn whole(&self) -> &Machine {
        self.site(self.sizes.whole())
    }
    /// A node, as textbook systems take it: as that of the least of all devices.
    pub fn node(&self) -> Node {
        let &Machine { per_node, host_memory, .. } = self.whole();
        Node { devices: per_node, host_memory }
    }
    /// The machine, if all devices are alike.
    pub fn only(&self) -> Option<&Machine> {
        if let [machine] = self.groups.as_slice() { Some(machine) } else { None }
    }
    /// Where a stage of a plan is.
    pub fn seat(&self, plan: &Plan, stage: u64) -> Seat {
        self.sizes.seat(plan.placement, plan.degrees().ranks(), stage)
    }
    /// The names of the devices of a site, the groups in the order of ranks: `a100-80g`, or `a100-80g and h100`.
    pub fn site_name(&self, site: Site, placement: Placement) -> String {
        let here = placement.0.iter().map(|&g| usize::from(g)).filter(|&g| site.groups().any(|s| s == g));
        here.filter_map(|g| self.groups.get(g)).map(|m| m.device.name.as_str()).collect::<Vec<_>>().join(" and ")
    }
    /// Mean peak of all devices in a type.
    pub fn mean_peak(&self, dtype: DType) -> PerSecond {
        let sum: u128 = self.groups.iter().map(|m| u128::from(m.devices()) * u128::from(m.device.peak.of(dtype).0)).sum();
        PerSecond((sum / u128::from(self.devices().max(1))) as u64)
    }
    /// The same cluster with every group changed.
    pub fn map(&self, change: impl Fn(&Machine) -> Machine, between: impl Fn(Link) -> Link) -> Cluster {
        match self.only() {
            Some(machine) => change(machine).into(),
            None => Cluster::new(self.groups.iter().map(change).collect(), Some(between(self.between))).unwrap_or_else(|_| self.clone()),
        }
    }
}

/// A machine that is no better than any of these.
fn least(members: &[&Machine], between: Link) -> Machine {
    let per_node = members.iter().map(|m| m.per_node).reduce(greatest_common_divisor).unwrap_or(1);
    let devices: u64 = members.iter().map(|m| m.devices()).sum();
    let link = |of: fn(&Machine) -> Link| members.iter().map(|m| of(m)).reduce(least_link).unwrap_or(between);
    let specs: Vec<&DeviceSpec> = members.iter().map(|m| &m.device).collect();
    Machine {
        device: least_device(&specs),
        per_node,
        nodes: devices / per_node,
        intra: link(|m| m.intra),
        inter: least_link(link(|m| m.inter), between),
        host: link(|m| m.host),
        nvme: link(|m| m.nvme),
        host_memory: members.iter().filter_map(|m| m.host_memory).min(),
        curves: least_curves(members),
    }
}

/// The same devices, of which fewer are sure to share a node.
fn in_nodes(machine: &Machine, per_node: u64) -> Machine {
    Machine { per_node, nodes: machine.devices() / per_node, ..machine.clone() }
}

fn least_link(a: Link, b: Link) -> Link {
    Link { latency: a.latency.max(b.latency), bandwidth: a.bandwidth.min(b.bandwidth) }
}

fn least_device(specs: &[&DeviceSpec]) -> DeviceSpec {
    if specs.iter().all(|s| *s == specs[0]) {
        return specs[0].clone();
    }
    let rate = |of: &dyn Fn(&DeviceSpec) -> PerSecond| specs.iter().map(|s| of(s)).min().unwrap_or(PerSecond(1));
    let most = |of: fn(&DeviceSpec) -> u64| specs.iter().map(|s| of(s)).max().unwrap_or(0);
    // Rates as they are reached.
    let peak = |dtype: DType| rate(&|s| s.matrix_efficiency.of(s.peak.of(dtype)));
    let context = specs.iter().map(|s| s.context).max().unwrap_or_default();
    let free = specs.iter().map(|s| s.memory.0.saturating_sub(s.context.0)).min().unwrap_or(0);
    DeviceSpec {
        name: specs.iter().map(|s| s.name.as_str()).collect::<Vec<_>>().join("+"),
        peak: Peak { f64: peak(DType::F64), f32: peak(DType::F32), bf16: peak(DType::Bf16), f16: peak(DType::F16) },
        matrix_efficiency: Millionths::percent(100),
        matrix_grain: most(|s| s.matrix_grain),
        matrix_depth_grain: most(|s| s.matrix_depth_grain),
        bandwidth: rate(&|s| s.bandwidth_efficiency.of(s.bandwidth)),
        bandwidth_efficiency: Millionths::percent(100),
        memory: Bytes(free + context.0),
        launch: specs.iter().map(|s| s.launch).max().unwrap_or_default(),
        context,
    }
}

/// The greatest times at all sizes that any of them has, of ops that all have.
fn least_curves(members: &[&Machine]) -> Arc<Curves> {
    let first = &members[0].curves;
    if members.iter().all(|m| m.curves == *first) {
        return Arc::clone(first);
    }
    let mut all: Vec<Curve> = Vec::new();
    for Curve { op, ranks, .. } in first.all() {
        let of = |m: &&Machine| m.curves.all().into_iter().find(|c| (c.op, c.ranks) == (op, ranks));
        let Some(curves) = members.iter().map(of).collect::<Option<Vec<Curve>>>() else { continue };
        let mut sizes: Vec<u64> = curves.iter().flat_map(|c| c.points.iter().map(|p| p.0)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let slowest = |bytes: u64| members.iter().filter_map(|m| m.curves.time(op, ranks, bytes, m.intra.latency)).max().unwrap_or_default().0;
        all.push(Curve { op, ranks, points: sizes.into_iter().map(|bytes| (bytes, slowest(bytes))).collect() });
    }
    Arc::new(Curves::new(&all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::comm::{Group, collective_time, group_time};
    use crate::cost::compute::op_time;
    use dplan_ir::cost::{OpCost, Unit};
    use dplan_ir::mesh::{Degrees, Mesh};
    use dplan_ir::program::Pattern;

    #[test]
    fn equal_groups_make_the_machine_that_they_would_be_as_one() {
        let one = Machine::parse("h100:8x6").unwrap();
        for text in ["h100:8x2+h100:8x4", "h100:8x1+h100:8x2+h100:8x3"] {
            assert_eq!(*Cluster::parse(text).unwrap().whole(), one, "{text}");
        }
        assert_eq!(Cluster::parse("h100:8x6").unwrap(), one.into());
    }

    #[test]
    fn nothing_is_quicker_on_several_groups_than_on_any_of_them() {
        let cluster = Cluster::parse("a100-40g:8x2+h100:4x4").unwrap();
        let (whole, cost) = (cluster.whole(), OpCost { flops: 2 << 30, bytes: 6 << 20, unit: Unit::Matrix { m: 1024, n: 1024, k: 1024 } });
        assert_eq!((whole.per_node, whole.nodes), (4, 8));
        let measured = Cluster::new(cluster.groups().iter().map(|m| m.clone().measured()).collect(), None).unwrap();
        assert!(!measured.groups()[0].curves.is_empty());
        for cluster in [&cluster, &measured] {
            let whole = cluster.whole();
            for group in cluster.groups() {
                for dtype in [DType::F32, DType::Bf16] {
                    assert!(op_time(&whole.device, dtype, &cost) >= op_time(&group.device, dtype, &cost), "{}", group.device.name);
                }
                for (local, bytes) in [(2, 1 << 10), (4, 1 << 20), (4, 1 << 28)] {
                    let time = |m: &Machine| group_time(m, Group { local, nodes: 1 }, Pattern::AllReduce, bytes);
                    assert!(time(whole) >= time(group), "{}: {bytes} bytes", group.device.name);
                }
                assert!(whole.device.memory.0 - whole.device.context.0 <= group.device.memory.0 - group.device.context.0);
            }
        }
    }

    /// Stages of eight, with four devices before the nodes of eight: the second stage is on halves of two of these.
    #[test]
    fn a_stage_in_the_middle_may_cross_nodes() {
        let (middle, ranks) = (Site::of_group(1), 8);
        let cluster = Cluster::parse("h100:4x1+h100:8x2+h100:4x1").unwrap();
        assert_eq!(cluster.sizes().seat(Placement::default(), ranks, 1), Seat { site: middle, first: 4 });
        let mesh = Mesh::of(Degrees { dp: ranks, ..Degrees::ONE });
        let over = |machine: &Machine| collective_time(machine, &mesh, mesh.all(), Pattern::AllReduce, 1 << 28);
        let (inside, across) = (over(&Machine::parse("h100:8x2").unwrap()), over(&Machine::parse("h100:4x4").unwrap()));
        assert!(inside < across && over(cluster.site(middle)) == across);
        // Where the others are whole nodes, it is as it is alone.
        let whole = Cluster::parse("h100:8x1+h100:8x2+a100-80g:8x1").unwrap();
        assert_eq!(*whole.site(middle), whole.groups()[1]);
    }

    #[test]
    fn what_crosses_groups_takes_the_least_link() {
        let slow = Link { latency: crate::units::Nanos(50_000), bandwidth: PerSecond::giga(1) };
        let groups = || vec![Machine::parse("a100-80g:8x2").unwrap(), Machine::parse("h100:8x2").unwrap()];
        assert_eq!(Cluster::new(groups(), Some(slow)).unwrap().whole().inter, slow);
        assert_eq!(Cluster::new(groups(), None).unwrap().whole().inter, least_link(groups()[0].inter, groups()[1].inter));
        assert!(Cluster::parse("cpu:1+cpu:1+cpu:1+cpu:1+cpu:1").unwrap_err().to_string().contains("5 groups"));
        assert!(Cluster::parse("cpu:1+h10:8").unwrap_err().to_string().contains("did you mean `h100`"));
    }
}
