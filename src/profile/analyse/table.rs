//! The table of collectives: one row per op, size and group.

use std::collections::BTreeMap;

use super::matching::{Basis, Instance, median};
use super::total;
use crate::profile::{CommOp, Ns, Profile};

#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    pub op: CommOp,
    /// What the library ran instead, if it did.
    pub ran_as: Option<CommOp>,
    /// By the convention of nccl-tests: of a gather the result, of anything else what a rank gives.
    pub bytes: Option<u64>,
    pub elements: Option<u64>,
    pub dtype: Option<String>,
    pub group: Option<Vec<u32>>,
    pub group_size: Option<u32>,
    /// What the program calls the group.
    pub group_name: Option<String>,
    pub algorithm: Option<String>,
    pub protocol: Option<String>,
    /// Collectives, each counted once however many ranks were recorded.
    pub calls: usize,
    pub transfer_least: Ns,
    pub transfer_median: Ns,
    /// Over all calls.
    pub transfer_total: Ns,
    /// Over all calls, mean over the recorded members.
    pub waiting_total: Ns,
    /// Bytes a second over the busiest link, at the median transfer.
    pub bus_bandwidth: Option<f64>,
    pub basis: Basis,
}

/// Sorted by time spent.
pub fn rows(profile: &Profile, instances: &[Instance]) -> Vec<Row> {
    let mut kinds: BTreeMap<(CommOp, Option<u64>, Option<&[u32]>, Option<u32>), Vec<&Instance>> = BTreeMap::new();
    for instance in instances {
        kinds.entry((instance.op, instance.bytes, instance.group.as_deref(), instance.group_size)).or_default().push(instance);
    }
    let mut rows: Vec<Row> = kinds.values().map(|calls| row(profile, calls)).collect();
    rows.sort_by_key(|r| (std::cmp::Reverse(r.transfer_total.saturating_add(r.waiting_total)), r.op, r.bytes));
    rows
}

fn row(profile: &Profile, calls: &[&Instance]) -> Row {
    let first = calls[0];
    let comms = || calls.iter().flat_map(|i| &i.members).map(|m| m.of(profile));
    let mut transfers: Vec<Ns> = calls.iter().map(|i| i.transfer).collect();
    let transfer_total = total(transfers.iter().copied());
    let transfer_median = median(&mut transfers).unwrap_or(0);
    let waiting = |i: &&Instance| {
        let running: Vec<Ns> =
            i.members.iter().map(|m| m.of(profile)).filter(|c| !c.posted || c.op == CommOp::Recv).map(|c| (c.duration - i.transfer).max(0)).collect();
        total(running.iter().copied()) / (running.len().max(1) as Ns)
    };
    let bytes = first.bytes;
    // Of a message posted ahead the end is when somebody asked for it: no measure of a link.
    let timed = transfer_median > 0 && comms().all(|c| !c.posted);
    let bus_bandwidth = bytes.zip(first.group_size.filter(|n| *n > 1)).filter(|_| timed).map(|(bytes, n)| {
        let factor = first.op.bus_factor(n);
        bytes as f64 / (transfer_median as f64 * 1e-9) * factor
    });
    Row {
        op: first.op,
        ran_as: comms().find_map(|c| c.ran_as),
        bytes,
        elements: comms().filter_map(|c| c.elements).max(),
        dtype: comms().find_map(|c| c.dtype.clone()),
        group: first.group.clone(),
        group_size: first.group_size,
        group_name: first
            .group
            .as_ref()
            .and_then(|g| profile.ranks.iter().flat_map(|r| &r.groups).find(|known| known.ranks == *g).map(|known| known.description.clone()))
            .filter(|d| !d.is_empty()),
        algorithm: comms().find_map(|c| c.algorithm.clone()),
        protocol: comms().find_map(|c| c.protocol.clone()),
        calls: calls.len(),
        transfer_least: transfers.first().copied().unwrap_or(0),
        transfer_median,
        transfer_total,
        waiting_total: total(calls.iter().map(waiting)),
        bus_bandwidth,
        basis: calls.iter().map(|i| i.basis).max().unwrap_or(Basis::Alone),
    }
}
