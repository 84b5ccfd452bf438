//! The asynchronous schedule, from the pin to a resumed run.

mod common;

use common::{dplan, dplan_ok, json_lines, scratch, small_plan, tensors};
use serde_json::Value;

/// A plan says how stale it is, wherever it is shown, and its proof says what was proved of that. Nobody is told of it who did not ask.
#[test]
fn staleness_is_said() {
    let dir = scratch("pipedream-said");
    let plan = small_plan(&dir, "pp=2,schedule=pipedream,micro=2", 2, "f32");
    let (config, plan) = (dir.join("config.json"), plan.to_str().unwrap());
    let explained = dplan_ok(&["explain", plan]);
    assert!(
        explained.contains("asynchronous: 4 updates a step") && explained.contains("parameters up to 1, 0 updates old on stages 0 to 1"),
        "{explained}"
    );
    assert!(!explained.contains("other orders of the passes"), "{explained}");
    let proved = dplan_ok(&["verify", plan, "--certificate"]);
    assert!(proved.contains("both passes of a micro-batch work with one version of parameters"), "{proved}");
    let compile = |pins: &str| {
        let args = ["compile", config.to_str().unwrap(), "--cluster", "cpu:2", "--batch", "8", "--seq", "8", "--pin", pins, "--json"];
        serde_json::from_str::<Value>(&dplan_ok(&args)).unwrap()
    };
    assert_eq!(compile("pp=2,schedule=pipedream,micro=2")["chosen"]["staleness"], serde_json::json!([1, 0]));
    // With one micro-batch nothing is in flight beside it.
    assert_eq!(compile("pp=2,schedule=pipedream,micro=8")["chosen"]["staleness"], serde_json::json!([0, 0]));
    let other = compile("pp=2");
    assert!(other["chosen"].get("staleness").is_none() && other["chosen"]["schedule"] != "pipedream");
    let rows = other["baselines"].as_array().unwrap();
    let marked: Vec<&str> = rows.iter().filter(|b| b["asynchronous"] == true).map(|b| b["name"].as_str().unwrap()).collect();
    assert_eq!(marked, ["PipeDream"]);
}

#[test]
fn what_it_cannot_have_is_refused_by_name() {
    let dir = scratch("pipedream-refused");
    let plan = small_plan(&dir, "pp=2,schedule=pipedream", 2, "f32");
    let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
    std::fs::write(dir.join("tied.json"), config.replacen('{', r#"{"tie_word_embeddings":true,"#, 1)).unwrap();
    let refused = |config: &str, pins: &str, precision: &str, says: &str| {
        let config = dir.join(config);
        let args = ["compile", config.to_str().unwrap(), "--cluster", "cpu:2", "--batch", "8", "--seq", "8", "--precision", precision, "--pin", pins];
        let output = dplan(&args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(says), "{pins}: {said}");
    };
    refused("config.json", "schedule=pipedream+1f1b", "f32", "they differ in what is computed");
    refused("config.json", "schedule=pipedream", "f16", "the norm that finds overflow is of all stages");
    refused("config.json", "dp=2,schedule=pipedream,zero=3", "f32", "it needs ZeRO 0 or 1");
    refused("config.json", "schedule=pipedream,offload=optimizer", "f32", "nothing offloaded");
    refused("config.json", "schedule=pipedream,virtual=2", "f32", "one virtual stage on each stage");
    refused("tied.json", "pp=2,schedule=pipedream", "f32", "one stage where layers share a parameter");
    let clipped = dplan(&["run", plan.to_str().unwrap(), "--steps", "1", "--clip", "1"]);
    assert!(String::from_utf8_lossy(&clipped.stderr).contains("does not clip (schedule pipedream)"));
    let grads = dir.join("grads.safetensors");
    let saved = dplan(&["run", plan.to_str().unwrap(), "--steps", "1", "--save-grads", grads.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&saved.stderr).contains("none of a step"));
    // GPU ranks do not run it: said when it is priced for them, and before anything is opened.
    let on_gpus = |args: &[&str]| String::from_utf8_lossy(&dplan(args).stderr).into_owned();
    let config = dir.join("config.json");
    for (pins, says) in [("pp=2,schedule=pipedream", "schedule pipedream"), ("dp=2,wire=topk:0.1", "wire topk:0.1")] {
        let priced =
            on_gpus(&["compile", config.to_str().unwrap(), "--cluster", "h100:2", "--batch", "8", "--seq", "8", "--precision", "f32", "--pin", pins]);
        assert!(priced.contains("not run on GPUs") && priced.contains(says), "{priced}");
        let plan = small_plan(&dir, pins, 2, "f32");
        let run = on_gpus(&["run", plan.to_str().unwrap(), "--device", "cuda", "--steps", "1"]);
        assert!(run.contains("--device cuda") && run.contains(says), "{run}");
    }
    // It is not memory that other models and types lack.
    for (config, precision) in [("tied.json", "f32"), ("config.json", "f16")] {
        let config = dir.join(config);
        let args = ["compile", config.to_str().unwrap(), "--cluster", "cpu:2", "--batch", "8", "--seq", "8", "--precision", precision];
        let said = dplan_ok(&args);
        assert!(said.contains("PipeDream (stale weights) does not apply"), "{precision}: {said}");
    }
    refused("config.json", "pp=2,schedule=pipedream,zero=1", "f32", "ZeRO is pinned without data parallelism");
}

/// On one stage nothing is stale: a step is so many steps of one micro-batch, which shows in Adam's bias correction if updates are counted otherwise.
#[test]
fn one_stage_takes_a_step_for_every_micro_batch() {
    let dir = scratch("pipedream-steps");
    let small = |name: &str, pins: &str, batch: &str| {
        let path = dir.join(name).to_str().unwrap().to_owned();
        let config = dir.join("config.json");
        let args = ["compile", config.to_str().unwrap(), "--cluster", "cpu:1", "--batch", batch, "--seq", "8", "--pin", pins, "-o", &path];
        dplan_ok(&args);
        path
    };
    small_plan(&dir, "pp=2", 2, "f32");
    let (windows, steps) = (small("windows.json", "schedule=pipedream,micro=1", "4"), small("steps.json", "micro=1", "1"));
    let run = |plan: &str, steps: &str, more: &[&str]| {
        let args = [&["run", plan, "--seed", "3", "--lr", "0.01", "--steps", steps, "--json"][..], more].concat();
        json_lines(&dplan_ok(&args)).into_iter().filter_map(|line| line.get("loss").and_then(Value::as_f64)).collect::<Vec<f64>>()
    };
    let (of_windows, of_steps) = (run(&windows, "3", &[]), run(&steps, "12", &["--clip", "1e30"]));
    let means: Vec<f64> = of_steps[..12].chunks(4).map(|c| c.iter().sum::<f64>() / 4.0).collect();
    assert!(of_windows[0] > of_windows[2] + 0.01, "{of_windows:?}");
    for (window, mean) in of_windows.iter().zip(&means) {
        assert!((window - mean).abs() < 2e-5 * mean, "{of_windows:?} {means:?}");
    }
}

/// Another plan for the same run makes as many updates as old, or is refused.
#[test]
fn plans_for_fewer_ranks_keep_the_updates() {
    let dir = scratch("pipedream-elastic");
    let run = |pins: &str| {
        let plan = small_plan(&dir, pins, 2, "f32");
        let args = [
            "run",
            plan.to_str().unwrap(),
            "--steps",
            "4",
            "--elastic",
            "--rehearse",
            "die:1@2",
            "--checkpoint",
            dir.to_str().unwrap(),
            "--every",
            "1",
        ];
        let output = dplan(&args);
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout))
    };
    let (went_on, said) = run("pp=2,schedule=pipedream,micro=1");
    assert!(!went_on && said.contains("no plan for 1 devices"), "{said}");
}

/// Nothing is in flight between steps, and updates are counted one by one: a resumed run goes on as if it had not been interrupted, to the bit.
#[test]
fn a_resumed_run_goes_on_to_the_bit() {
    let dir = scratch("pipedream-resumed");
    let plan = small_plan(&dir, "pp=2,schedule=pipedream,micro=1", 2, "f32");
    let run = |more: &[&str]| {
        let args = [&["run", plan.to_str().unwrap(), "--seed", "3", "--lr", "0.01", "--json"][..], more].concat();
        json_lines(&dplan_ok(&args)).into_iter().filter_map(|line| line.get("loss").and_then(Value::as_f64)).collect::<Vec<f64>>()
    };
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let (whole, resumed, checkpoints) = (path("whole.safetensors"), path("resumed.safetensors"), path("checkpoints"));
    let uninterrupted = run(&["--steps", "6", "--save", &whole]);
    let first = run(&["--steps", "3", "--checkpoint", &checkpoints, "--every", "3"]);
    let then = run(&["--steps", "6", "--resume", &checkpoints, "--save", &resumed]);
    let bits = |losses: &[f64]| losses.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
    assert!(uninterrupted.len() >= 6 && uninterrupted[0] != uninterrupted[5]);
    assert_eq!(bits(&uninterrupted[..3]), bits(&first[..3]));
    assert_eq!(bits(&uninterrupted[3..6]), bits(&then[..3]));
    assert_eq!(tensors(std::path::Path::new(&whole)), tensors(std::path::Path::new(&resumed)));
}
