//! Time and memory of inspecting a profile: `cargo bench --bench inspect [PATH…]`; without a path, the largest trace of the shared data.
//!
//! Aim: the trace of 216 thousand events within 2 s and 300 MB.

use dplan::profile::{CommKernels, analyse::analyse, read, report};
use std::path::PathBuf;
use std::time::Instant;

#[path = "../tests/common/mod.rs"]
mod common;

fn main() {
    let mut paths: Vec<PathBuf> = std::env::args_os().skip(1).filter(|a| a != "--bench").map(PathBuf::from).collect();
    if paths.is_empty() {
        let Some(shared) = common::shared() else { return };
        paths.push(shared.join("traces/hta_v100_ddp_rank1of2/rank1.json.gz"));
    }
    let started = Instant::now();
    let profile = match read(&paths, &CommKernels::default()) {
        Ok(profile) => profile,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(2);
        }
    };
    let reading = started.elapsed();
    let analysis = analyse(&profile);
    let text = report::text(&profile, &analysis);
    let all = started.elapsed();
    println!("{text}");
    let events: usize = profile.ranks.iter().map(|r| r.events.len()).sum();
    println!("{events} events kept: read in {:.3} s, analysed in {:.3} s{}", reading.as_secs_f64(), (all - reading).as_secs_f64(), peak_memory());
}

/// What the system says of the most memory this process held.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).map(str::trim);
    peak.map_or_else(String::new, |p| format!(", peak {p}"))
}
