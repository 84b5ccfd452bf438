//! The memory of hosts: a second budget, which a search does not keep.
//!
//! A stage whose layers keep `h` bytes in memory of which its host has `l < h` for each device sends the last `⌈n · (h − l) / h⌉` of the `n` layers that are there to files
//! instead. What that costs is for another search to say, in which those layers may be nowhere but in files or on the device, and all others not in files.

use crate::machine::Cluster;
use crate::predict::Prediction;
use dplan_ir::plan::{Plan, Store};

/// Layers, first and last inclusive.
pub type Range = (u32, u32);

/// The layers that are to go to files, as few of each stage as its host asks for if they are alike; none where every host has enough.
pub fn to_files(plan: &Plan, prediction: &Prediction, cluster: &Cluster) -> Vec<Range> {
    let mut layers: Vec<u32> = (0..plan.pp()).flat_map(|stage| of_stage(plan, prediction, cluster, stage)).collect();
    layers.sort_unstable();
    let mut ranges: Vec<Range> = Vec::new();
    for layer in layers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == layer => *last = layer,
            _ => ranges.push((layer, layer)),
        }
    }
    ranges
}

fn of_stage(plan: &Plan, prediction: &Prediction, cluster: &Cluster, stage: u64) -> Vec<u32> {
    let taken = prediction.memory[stage as usize].arena.host;
    let Some(over) = cluster.site(cluster.seat(plan, stage).site).host_memory.and_then(|limit| taken.checked_sub(limit.0)).filter(|&over| over > 0)
    else {
        return Vec::new();
    };
    let pipeline = plan.pipeline();
    let spans = plan.stages.iter().zip(0..).filter(|&(_, v)| pipeline.stage_of(v) == stage).map(|(span, _)| span.first..=span.last);
    let on_host = |&layer: &u32| plan.options[plan.layers[layer as usize] as usize].away().stores().any(|store| store == Store::Cpu);
    let mut layers: Vec<u32> = spans.flatten().filter(on_host).collect();
    let some = (layers.len() as u128 * u128::from(over)).div_ceil(u128::from(taken)) as usize;
    layers.split_off(layers.len() - some)
}
