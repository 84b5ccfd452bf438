//! Machine descriptions from measured tables: the committed fits are those that the tables give, and they predict them.

mod common;

use dplan::calibrate::{self, Tables};
use dplan_ir::program::Pattern;
use dplan_planner::cost::comm::{Group, group_time};
use dplan_planner::machine::{Machine, known_devices};
use serde_json::Value;
use std::path::Path;

fn tables() -> Option<Tables> {
    let shared = common::shared()?;
    let paths = ["validation/comm_and_gemm.csv", "traces/perf_tables"].map(|p| shared.join(p));
    if !paths.iter().all(|p| p.exists()) {
        eprintln!("SKIPPED: the shared data has no tables");
        return None;
    }
    Some(calibrate::read(&paths).unwrap())
}

#[test]
fn the_committed_fits_are_those_of_the_tables() {
    let Some(tables) = tables() else { return };
    let committed = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("planner/src/machine/fitted/data.rs")).unwrap();
    let fitted = calibrate::fit(&tables);
    assert_eq!(calibrate::rust(&fitted), committed, "dplan calibrate comm_and_gemm.csv perf_tables/ -o planner/src/machine/fitted/data.rs");
    for g in &fitted.gemm {
        assert!(g.median <= 0.08, "{} {}: median error {:.3} of sizes from 1024 on", g.device, g.dtype, g.median);
    }
    for c in &fitted.collectives {
        assert!(c.large <= 0.10 && c.small <= 0.20, "{} {} of {}: {:.3} and {:.3}", c.device, c.op.name(), c.ranks, c.large, c.small);
    }
}

#[test]
fn collectives_never_take_less_with_more_bytes_or_ranks() {
    for name in known_devices() {
        let machine = Machine::parse(&format!("{name}:8x64")).unwrap().measured();
        for pattern in [Pattern::AllReduce, Pattern::AllGather, Pattern::ReduceScatter] {
            let time = |local, nodes, bytes| group_time(&machine, Group { local, nodes }, pattern, bytes);
            for shift in 8..34 {
                for bytes in [1u64 << shift, (1 << shift) + (1 << (shift - 1))] {
                    for n in 1..12 {
                        assert!(time(n, 1, bytes) <= time(n + 1, 1, bytes), "{name} {pattern:?} {n} ranks {bytes} bytes");
                        assert!(time(n, 1, bytes) <= time(n, 1, bytes + 4096), "{name} {pattern:?} {n} ranks {bytes} bytes");
                        assert!(time(8, n, bytes) <= time(8, n + 1, bytes), "{name} {pattern:?} {n} nodes {bytes} bytes");
                    }
                }
            }
        }
    }
}

/// A recorded run whose spans all take four times as long is of a machine a quarter as fast; and it is said that another plan is quicker there.
#[test]
fn a_slower_run_is_of_a_slower_machine_and_another_plan_is_found_for_it() {
    let dir = common::scratch("calibrate_run");
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/llama-1m/config.json");
    let path = |name: &str| dir.join(name).to_str().unwrap().to_string();
    let (plan, profile) = (path("plan.json"), path("out.json"));
    let pins = "dp=1,tp=2,pp=1,micro=1,recompute=full";
    common::dplan_ok(&["compile", config.to_str().unwrap(), "--cluster", "cpu:2", "--batch", "4", "--seq", "32", "--pin", pins, "-o", &plan]);
    common::dplan_ok(&["run", &plan, "--steps", "2", "--profile", &profile, "--json"]);
    let mut trace: Value = serde_json::from_str(&std::fs::read_to_string(&profile).unwrap()).unwrap();
    for event in trace["traceEvents"].as_array_mut().unwrap() {
        for key in ["ts", "dur"] {
            if let Some(micros) = event[key].as_f64() {
                event[key] = (4.0 * micros).into();
            }
        }
    }
    let slower = path("slower.json");
    std::fs::write(&slower, trace.to_string()).unwrap();
    let step = |profile: &str, machine: &str| {
        let said = common::dplan_ok(&["calibrate", profile, "--plan", &plan, "-o", &path(machine)]);
        assert!(said.contains(&format!(" under its pins {pins}")), "{said}");
        assert!(said.contains("times as fast here without pins"), "everything is computed twice and split twice: {said}");
        let args = ["compile", config.to_str().unwrap(), "--cluster", &path(machine), "--batch", "4", "--seq", "32", "--pin", pins, "--json"];
        let compiled: Value = serde_json::from_str(&common::dplan_ok(&[&args[..], &["-o", &path("again.json")]].concat())).unwrap();
        compiled["predicted"]["step_seconds"].as_f64().unwrap()
    };
    let times = step(&slower, "slower-machine.json") / step(&profile, "machine.json");
    assert!((3.4..4.6).contains(&times), "{times}");
    // A profile of another plan.
    common::dplan_ok(&["compile", config.to_str().unwrap(), "--cluster", "cpu:2", "--batch", "4", "--seq", "32", "--pin", "dp=2", "-o", &plan]);
    let output = common::dplan(&["calibrate", &profile, "--plan", &plan]);
    assert!(output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("another plan"));
}

#[test]
fn bad_tables_are_refused_with_their_place() {
    let dir = common::scratch("calibrate_errors");
    for (name, content, says) in [
        ("words.csv", "a,b\n1,2\n", "not a table of measurements"),
        ("bad.csv", "device,dtype,m,n,k,latency_ms\nNVIDIA H200,bf16,8,8,many,1\n", "line 2: `k` is `many`"),
        ("empty.csv", "", "not a table of measurements"),
    ] {
        let path = dir.join(name);
        std::fs::write(&path, content).unwrap();
        let output = common::dplan(&["calibrate", path.to_str().unwrap()]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(says), "{name}: {error}");
    }
}
