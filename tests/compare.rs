//! A run's own profile, read back and laid over its plan.

mod common;

use serde_json::Value;
use std::path::{Path, PathBuf};

/// A plan of the example model under pins, and the profile of a few steps of it.
fn recorded(dir: &Path, ranks: u64, pins: &str) -> (PathBuf, PathBuf) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (plan, profile) = (dir.join("plan.json"), dir.join("out.json"));
    let cluster = format!("cpu:{ranks}");
    let config = root.join("examples/llama-1m/config.json");
    let path = |p: &Path| p.to_str().unwrap().to_string();
    common::dplan_ok(&["compile", &path(&config), "--cluster", &cluster, "--batch", "4", "--seq", "32", "--pin", pins, "-o", &path(&plan)]);
    common::dplan_ok(&["run", &path(&plan), "--steps", "2", "--profile", &path(&profile), "--json"]);
    (plan, profile)
}

fn refused(plan: &Path, profile: &Path, says: &str) {
    let output = common::dplan(&["compare", plan.to_str().unwrap(), profile.to_str().unwrap()]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && error.contains(says), "{}: {error}", profile.display());
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&common::dplan_ok(args)).unwrap()
}

#[test]
fn a_run_is_laid_over_its_plan_instruction_by_instruction() {
    let dir = common::scratch("compare_run");
    let (plan, profile) = recorded(&dir, 4, "dp=2,tp=2,pp=1,zero=1,micro=1,recompute=none");
    let (plan, profile) = (plan.to_str().unwrap(), profile.to_str().unwrap());

    let seen = json(&["inspect", profile, "--json"]);
    assert_eq!((seen["profile"]["ranks"].as_array().unwrap().len(), &seen["profile"]["steps"]), (4, &2.into()));
    let collectives = seen["collectives"].as_array().unwrap();
    assert!(collectives.iter().any(|c| c["group_size"] == 2 && c["basis"] == "all_members" && c["bytes"].as_u64() > Some(0)), "{collectives:?}");

    let compared = json(&["compare", plan, profile, "--json"]);
    let names = |key: &str| compared[key].as_array().unwrap().iter().map(|l| l["name"].as_str().unwrap().to_string()).collect::<Vec<_>>();
    let classes = names("classes");
    assert!(["attention", "elementwise", "gemm", "optimizer"].iter().all(|c| classes.iter().any(|n| n == c)), "{classes:?}");
    assert!(names("collectives").iter().any(|n| n.starts_with("all_reduce") || n.starts_with("all_gather")), "{:?}", names("collectives"));
    for line in ["classes", "collectives"].into_iter().flat_map(|key| compared[key].as_array().unwrap()) {
        assert!(line["predicted_seconds"].as_f64().unwrap() > 0.0 && line["measured_seconds"].as_f64().unwrap() > 0.0, "{line}");
    }
    // What the ranks computed is within the step they were seen to take.
    let measured: f64 = compared["classes"].as_array().unwrap().iter().map(|c| c["measured_seconds"].as_f64().unwrap()).sum();
    assert!(measured <= compared["step"]["measured_seconds"].as_f64().unwrap() * 1.001, "{compared}");
    assert_eq!(compared["memory"]["predicted_bytes"], compared["memory"]["measured_bytes"], "the formula is the arena");

    let text = common::dplan_ok(&["compare", plan, profile]);
    assert!(text.contains("largest differences") && text.contains("by class of op"), "{text}");
}

#[test]
fn the_wrong_plan_and_missing_ranks_are_told() {
    let dir = common::scratch("compare_wrong");
    for name in ["data", "stages"] {
        std::fs::create_dir_all(dir.join(name)).unwrap();
    }
    let (data, of_data) = recorded(&dir.join("data"), 2, "dp=2,tp=1,pp=1,zero=1,micro=1,recompute=none");
    let (stages, of_stages) = recorded(&dir.join("stages"), 2, "dp=1,tp=1,pp=2,virtual=2,schedule=interleaved,micro=1,recompute=none");
    // Each of two virtual stages of a stage has its own passes; a step of four micro-batches.
    let trace = std::fs::read_to_string(&of_stages).unwrap();
    for pass in ["PP:0F0", "PP:1B3", "PP:2F1", "PP:3B3"] {
        assert!(trace.contains(&format!("\"{pass}\"")), "{pass}");
    }
    let own = json(&["compare", stages.to_str().unwrap(), of_stages.to_str().unwrap(), "--json"]);
    let sent = |l: &Value| l["name"].as_str().unwrap().starts_with("send") && l["measured_seconds"].as_f64() > Some(0.0);
    assert!(own["collectives"].as_array().unwrap().iter().any(sent), "{own}");
    refused(&data, &of_stages, "another plan");
    // Other states of the same layers.
    std::fs::create_dir_all(dir.join("whole")).unwrap();
    let (whole, _) = recorded(&dir.join("whole"), 2, "dp=2,tp=1,pp=1,zero=3,micro=1,recompute=none");
    refused(&whole, &of_data, "another plan");
    // A plan is no profile.
    refused(&data, &data, "without `traceEvents`");
    // Without rank 1.
    let mut trace: Value = serde_json::from_str(&std::fs::read_to_string(&of_data).unwrap()).unwrap();
    trace["traceEvents"].as_array_mut().unwrap().retain(|e| e["pid"] == 0);
    let half = dir.join("half.json");
    std::fs::write(&half, trace.to_string()).unwrap();
    let lines = |profile: &Path| json(&["compare", data.to_str().unwrap(), profile.to_str().unwrap(), "--json"]);
    let (compared, both) = (lines(&half), lines(&of_data));
    let predicted =
        |of: &Value| of["classes"].as_array().unwrap().iter().map(|l| (l["name"].clone(), l["predicted_seconds"].clone())).collect::<Vec<_>>();
    assert_eq!(predicted(&compared), predicted(&both), "each rank of data parallelism does the same");
    let measured: f64 = compared["classes"].as_array().unwrap().iter().map(|c| c["measured_seconds"].as_f64().unwrap()).sum();
    assert!(measured <= compared["step"]["measured_seconds"].as_f64().unwrap() * 1.001, "{compared}");
    assert!(compared["notes"].as_array().unwrap().iter().any(|n| n.as_str().unwrap().contains("1 of 2 ranks given")), "{}", compared["notes"]);
}

#[test]
fn attention_with_a_sink_is_attention() {
    let dir = common::scratch("compare_sink");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string("tests/golden/gpt_oss.json").unwrap()).unwrap();
    let (config, plan, profile) = (dir.join("config.json"), dir.join("plan.json"), dir.join("out.json"));
    std::fs::write(&config, golden["config"].to_string()).unwrap();
    let path = |p: &Path| p.to_str().unwrap().to_string();
    common::dplan_ok(&[
        "compile",
        &path(&config),
        "--cluster",
        "cpu:1",
        "--batch",
        "2",
        "--seq",
        "12",
        "--pin",
        "recompute=none",
        "-o",
        &path(&plan),
    ]);
    common::dplan_ok(&["run", &path(&plan), "--steps", "1", "--profile", &path(&profile), "--json"]);
    let trace = std::fs::read_to_string(&profile).unwrap();
    assert!(trace.contains(" attention_sink attention\"") && trace.contains(" attention_grad attention\""));
    assert!(!trace.contains(" attention_sink elementwise\""));
}

#[test]
fn damaged_profiles_are_refused_or_answered_in_part() {
    let dir = common::scratch("compare_damaged");
    let (plan, profile) = recorded(&dir, 1, "micro=2,recompute=none");
    let text = std::fs::read_to_string(&profile).unwrap();
    let write = |name: &str, content: &str| {
        let path = dir.join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    refused(&plan, &write("empty.json", ""), "the file is empty");
    refused(&plan, &write("nothing.json", "{\"traceEvents\":[]}"), "nothing happens");
    refused(&plan, &write("words.json", "step 1 took long"), "expected a Kineto or Chrome trace");
    refused(&plan, &write("wrong.json", &text.replace("0.forward@", "7.forward@")), "another plan");
    refused(&plan, &dir.join("absent.json"), "absent.json");
    // Cut short: an answer about what is there, which says so.
    let cut = write("cut.json", &text[..text.len() * 2 / 3]);
    let compared = json(&["compare", plan.to_str().unwrap(), cut.to_str().unwrap(), "--json"]);
    assert!(compared["notes"].as_array().unwrap().iter().any(|n| n.as_str().unwrap().contains("events before")), "{}", compared["notes"]);
    assert!(compared["classes"].as_array().is_some_and(|c| !c.is_empty()), "{compared}");
}

#[test]
fn a_measured_machine_is_a_cluster() {
    let dir = common::scratch("compare_profile");
    let machine = dir.join("machine.json");
    let machine = machine.to_str().unwrap();
    let text = common::dplan_ok(&["profile", "--cluster", "cpu:1", "-o", machine]);
    assert!(text.contains("GFLOP/s a rank"), "{text}");
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/llama-1m/config.json");
    let plan = json(&["compile", config.to_str().unwrap(), "--cluster", machine, "--json"]);
    assert!(plan["predicted"]["step_seconds"].as_f64().unwrap() > 0.0);
    let refused = common::dplan(&["profile", "--cluster", "h100:8", "-o", machine]);
    assert!(
        refused.status.code() == Some(2) && String::from_utf8_lossy(&refused.stderr).contains("only this machine"),
        "a GPU is not measured from here"
    );
}
