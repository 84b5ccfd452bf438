//! `dplan inspect` on the command line: what people and programs get for recorded profiles, and for damaged ones.

mod common;

use serde_json::Value;
use std::path::{Path, PathBuf};

fn traces() -> Option<PathBuf> {
    let traces = common::shared()?.join("traces");
    traces.is_dir().then_some(traces).or_else(|| {
        eprintln!("SKIPPED: the shared data has no traces");
        None
    })
}

fn inspect_json(path: &Path) -> Value {
    let text = common::dplan_ok(&["inspect", path.to_str().unwrap(), "--json"]);
    serde_json::from_str(&text).unwrap()
}

fn seconds(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn eight_v100_ranks_wait_more_than_they_transfer() {
    let Some(traces) = traces() else { return };
    let folder = traces.join("param_dlrm_v100_8rank");
    let files: Vec<String> = (0..8).map(|r| folder.join(format!("kineto_rank{r}.json.gz")).display().to_string()).collect();
    let args: Vec<&str> = ["inspect", "--json"].into_iter().chain(files.iter().map(String::as_str)).collect();
    let report: Value = serde_json::from_str(&common::dplan_ok(&args)).unwrap();

    assert_eq!(report["profile"]["ranks"].as_array().unwrap().len(), 8);
    let rows = report["collectives"].as_array().unwrap();
    assert_eq!(rows.iter().map(|r| r["calls"].as_u64().unwrap()).sum::<u64>(), 8);
    assert!(rows.iter().all(|r| r["basis"] == "all_members" && r["group_size"] == 8));
    assert!(seconds(&report["clocks"]["disagreement_seconds"]) <= 7e-6);
    let parts = &report["total"]["parts"];
    assert!(seconds(&parts["waiting"]) > 5.0 * seconds(&parts["transfer"]));
    assert!(!report["bottleneck"]["evidence"].as_array().unwrap().is_empty() && !report["bottleneck"]["change"].as_array().unwrap().is_empty());
}

#[test]
fn a_run_in_data_parallel_on_a100s() {
    let Some(traces) = traces() else { return };
    let file = traces.join("hta_a100_ddp_2rank/rank0.json.gz");
    let report = inspect_json(&file);
    let data = &report["parallelism"][0];
    assert_eq!((&data["degree"], &data["buckets_per_step"], &data["gradient_elements"]), (&2.into(), &5.into(), &25_557_032.into()));
    let largest = report["collectives"].as_array().unwrap().iter().find(|r| r["elements"] == 7_875_584).unwrap();
    let bandwidth = 7_875_584.0 * 4.0 / 2_424_415e-9;
    assert!((seconds(&largest["bus_bandwidth"]) / bandwidth - 1.0).abs() < 1e-9, "2(n−1)/n is 1 of two ranks: {largest}");
    let hidden = seconds(&report["total"]["hidden"]["transfer"]) + seconds(&report["total"]["hidden"]["waiting"]);
    let all = seconds(&report["ranks"][0]["communication_seconds"]);
    assert!((hidden / all - 7_317_025.0 / 46_876_493.0).abs() < 1e-6, "{hidden} of {all}");

    let text = common::dplan_ok(&["inspect", file.to_str().unwrap()]);
    for part in ["Bottleneck: ", "Time by rank", "Communication", "25,557,032", "NVIDIA A100"] {
        assert!(text.contains(part), "no `{part}` in\n{text}");
    }
}

#[test]
fn gloo_runs_are_told_apart() {
    let Some(traces) = traces() else { return };
    let expected =
        [("ddp", "data"), ("fsdp2", "sharded"), ("tp", "tensor"), ("pp_1f1b", "pipeline"), ("pp_interleaved", "pipeline"), ("pp_zbv", "pipeline")];
    let mut schedules = Vec::new();
    for (folder, kind) in expected {
        let report = inspect_json(&traces.join("torch215_gloo_4rank").join(folder));
        assert_eq!(report["parallelism"][0]["kind"], kind, "{folder}");
        schedules.extend(report["parallelism"][0]["schedule"].as_str().map(String::from));
    }
    assert_eq!(schedules, ["1F1B", "interleaved 1F1B", "ZBV"]);
}

#[test]
fn what_is_no_profile_is_refused_with_its_name() {
    let dir = common::scratch("inspect_errors");
    for (name, content, says) in [
        ("empty.json", "", "the file is empty"),
        ("plan.json", "{\"model\": 1}", "expected a Kineto or Chrome trace"),
        ("words.txt", "not a profile at all", "expected a Kineto or Chrome trace"),
        ("quiet.json", "{\"traceEvents\": []}", "nothing happens"),
    ] {
        let path = dir.join(name);
        std::fs::write(&path, content).unwrap();
        let output = common::dplan(&["inspect", path.to_str().unwrap()]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {error}");
        assert!(error.contains(name) && error.contains(says), "{name}: {error}");
    }
    let missing = common::dplan(&["inspect", dir.join("absent.json").to_str().unwrap()]);
    assert_eq!(missing.status.code(), Some(2));
    let rule = common::dplan(&["inspect", dir.join("quiet.json").to_str().unwrap(), "--comm-kernel", "ring"]);
    assert!(String::from_utf8_lossy(&rule.stderr).contains("PART_OF_A_KERNEL_NAME=OP"));
}
