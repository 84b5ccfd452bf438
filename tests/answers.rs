//! What the command line answers beside the plan: certificates, other machines, other pins, days and money.

mod common;

use common::{dplan, dplan_ok, scratch};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn model() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/llama-1m/config.json").display().to_string()
}

/// Compiles the example for a cluster; the plan's path and what was printed.
fn compiled(dir: &Path, name: &str, args: &[&str]) -> (PathBuf, Value) {
    let plan = dir.join(name);
    let (model, output) = (model(), plan.display().to_string());
    let all: Vec<&str> = ["compile", &model, "--json", "-o", &output].into_iter().chain(args.iter().copied()).collect();
    (plan.clone(), serde_json::from_str(&dplan_ok(&all)).unwrap())
}

fn number(value: &Value, pointer: &str) -> f64 {
    value.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("no number at {pointer}: {value}"))
}

#[test]
fn a_certificate_is_checked_and_damage_to_it_is_found() {
    let dir = scratch("certificate");
    let (plan, _) = compiled(&dir, "plan.json", &["--cluster", "cpu:4", "--batch", "32"]);
    let (other, _) = compiled(&dir, "other.json", &["--cluster", "cpu:4", "--batch", "32", "--pin", "tp=4"]);
    let verify =
        |plan: &Path, certificate: &Path| dplan(&["verify", &plan.display().to_string(), &format!("--certificate={}", certificate.display())]);
    let said: Value = serde_json::from_str(&dplan_ok(&["verify", &plan.display().to_string(), "--certificate", "--json"])).unwrap();
    assert_eq!(said["ok"], true);
    assert_eq!(said["certificate"]["proved"], true);
    assert!(number(&said, "/certificate/resolved") >= 1.0 && number(&said, "/certificate/recomputed") >= 1.0, "{said}");

    let certificate = dir.join("plan.certificate.json");
    let text = std::fs::read_to_string(&certificate).unwrap();
    let objective = text.lines().find(|l| l.contains("objective_nanoseconds")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let tuple = lines.iter().position(|l| l.contains("pp=")).unwrap();
    let best = lines.iter().find(|l| l.contains("\"best\"")).unwrap();
    let without = |at: usize| [&lines[..at], &lines[at + 1..]].concat().join("\n");
    for (what, damaged) in [
        ("a better plan is claimed", text.replace(objective, "  \"objective_nanoseconds\": 1000,")),
        ("a tuple is missing", without(tuple)),
        ("the best tuple is closed by a bound", text.replace(best, &best.replace("\"best\"", "\"floor\""))),
        ("a tuple is called impossible", text.replace(best, &best.replace("\"best\"", "\"impossible\""))),
        ("another batch was asked about", text.replace("\"batch\": 32", "\"batch\": 64")),
        ("it is another plan's", std::fs::read_to_string(dir.join("other.certificate.json")).unwrap()),
    ] {
        let path = dir.join("damaged.json");
        std::fs::write(&path, damaged).unwrap();
        let output = verify(&plan, &path);
        assert_eq!(output.status.code(), Some(1), "{what}: {}", String::from_utf8_lossy(&output.stdout));
    }
    // Pins are part of the question: the pinned plan's own certificate holds, and the unpinned one is not about it.
    assert!(verify(&other, &dir.join("other.certificate.json")).status.success());
    assert_eq!(verify(&other, &certificate).status.code(), Some(1));
    assert_eq!(verify(&plan, &dir.join("absent.json")).status.code(), Some(2));
}

#[test]
fn both_solvers_find_plans_of_one_cost() {
    let dir = scratch("solvers");
    for args in [&["--cluster", "cpu:4", "--batch", "32"][..], &["--cluster", "cpu:8", "--batch", "16", "--memory-limit", "24MiB"]] {
        let of = |solver: &str| compiled(&dir, &format!("{solver}.json"), &[args, &["--solver", solver]].concat()).1;
        let (exact, integer) = (of("exact"), of("ilp"));
        assert_eq!(exact["predicted"]["step_seconds"], integer["predicted"]["step_seconds"], "{args:?}");
        assert!(dplan(&["verify", &dir.join("ilp.json").display().to_string(), "--certificate"]).status.success());
    }
}

#[test]
fn other_machines_are_asked_about() {
    let dir = scratch("what-if");
    let args = ["--cluster", "cpu:4", "--batch", "32", "--memory-limit", "6MiB", "--min-devices"];
    let scenarios = ["memory=2x", "link=2x", "compute=2x,bandwidth=2x", "latency=0.5x", "memory=0.001x"];
    let what_if: Vec<&str> = scenarios.iter().flat_map(|s| ["--what-if", s]).collect();
    let (_, said) = compiled(&dir, "plan.json", &[&args[..], &what_if].concat());
    let rows = said["what_if"].as_array().unwrap();
    let own = number(&said, "/predicted/step_seconds");
    assert_eq!(rows.len(), 1 + scenarios.len());
    let fewest = number(&rows[0], "/devices");
    assert!((2.0..=4.0).contains(&fewest) && number(&rows[0], "/step_seconds") >= own, "{said}");
    for row in &rows[1..scenarios.len()] {
        assert!(number(row, "/step_seconds") <= own, "{row}");
    }
    assert!(rows[scenarios.len()]["infeasible"].as_str().is_some_and(|why| why.contains("short of")), "{said}");
    // One device fewer holds nothing.
    let (model, cluster) = (model(), format!("cpu:{}", fewest - 1.0));
    let output = dplan(&["compile", &model, "--cluster", &cluster, "--batch", "32", "--memory-limit", "6MiB"]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stdout));
}

/// A pin that the machine at hand can keep and another cannot is an answer about the other, not a reason to fail.
#[test]
fn a_machine_on_which_the_pins_are_impossible_is_answered() {
    let dir = scratch("what-if-impossible");
    let (plan, said) = compiled(&dir, "plan.json", &["--cluster", "cpu:2", "--batch", "16", "--pin", "zero=1", "--what-if", "nodes=0.5x"]);
    assert!(said["what_if"][0]["infeasible"].as_str().is_some_and(|why| why.contains("no layer choice is possible")), "{said}");
    assert!(plan.is_file());
}

#[test]
fn days_and_money_are_those_of_the_steps() {
    let dir = scratch("money");
    let (_, said) = compiled(&dir, "plan.json", &["--cluster", "cpu:4", "--batch", "32", "--tokens", "1B", "--price", "2.5"]);
    let (step, days, cost) = (number(&said, "/predicted/step_seconds"), number(&said, "/predicted/days"), number(&said, "/predicted/cost_usd"));
    let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
    assert!(close(days, 1e9 / (32.0 * 128.0) * step / 86_400.0), "{said}");
    assert!(close(cost, days * 24.0 * 4.0 * 2.5), "{said}");
    let rows = said["baselines"].as_array().unwrap();
    let priced: Vec<&Value> = rows.iter().filter(|b| b["fits"] == true && b["asynchronous"] == false).collect();
    for row in &priced {
        assert!(number(row, "/step_seconds") >= step, "{row}");
        assert!(close(number(row, "/days") / days, number(row, "/step_seconds") / step), "{row}");
        assert!(close(number(row, "/cost_usd") / cost, number(row, "/step_seconds") / step), "{row}");
    }
    assert!(priced.len() >= 5, "{said}");
}

#[test]
fn explain_says_what_the_next_best_costs_and_why_not_where_the_difference_is() {
    let dir = scratch("explain");
    let (plan, said) = compiled(&dir, "plan.json", &["--cluster", "cpu:4", "--batch", "32"]);
    let plan = plan.display().to_string();
    let step = number(&said, "/predicted/step_seconds");
    let told: Value = serde_json::from_str(&dplan_ok(&["explain", &plan, "--json"])).unwrap();
    let layers = told["layers"].as_array().unwrap();
    let covered: usize = layers.iter().map(|l| (number(l, "/layers/1") - number(l, "/layers/0")) as usize + 1).sum();
    assert_eq!(covered, said["chosen"]["layers"].as_array().unwrap().len());
    for layer in layers {
        let next = &layer["next"];
        assert!(number(next, "/step_seconds") >= step && number(next, "/short_bytes") == 0.0, "{layer}");
        assert!(!next["change"].as_str().unwrap().is_empty(), "{layer}");
        let arena = number(next, "/arena_bytes") - number(layer, "/arena_bytes");
        assert_eq!(arena, number(next, "/arena_difference_bytes"), "{layer}");
    }
    assert!(layers.iter().all(|l| l["offload"] == "none"), "{told}");
    let text = dplan_ok(&["explain", &plan]);
    assert!(text.contains("next best") && text.contains("a micro-batch") && !text.contains("offload"), "{text}");
    let (offloaded, _) = compiled(&dir, "offloaded.json", &["--cluster", "cpu:2", "--batch", "16", "--pin", "offload=optimizer,zero=1"]);
    let offloaded = offloaded.display().to_string();
    let told: Value = serde_json::from_str(&dplan_ok(&["explain", &offloaded, "--json"])).unwrap();
    assert!(told["layers"].as_array().unwrap().iter().all(|l| l["offload"] == "optimizer"), "{told}");
    assert!(dplan_ok(&["explain", &offloaded]).contains("zero 1 offload optimizer recompute"));

    let told: Value = serde_json::from_str(&dplan_ok(&["explain", &plan, "--why-not", "tp=4", "--json"])).unwrap();
    let seconds = told["seconds"].as_object().unwrap();
    for side in [0, 1] {
        let parts: f64 = seconds.iter().filter(|(name, _)| *name != "step").map(|(_, v)| v[side].as_f64().unwrap()).sum();
        assert!((parts - seconds["step"][side].as_f64().unwrap()).abs() < 1e-9, "{told}");
    }
    assert!(seconds["step"][1].as_f64() >= seconds["step"][0].as_f64(), "{told}");
    assert_eq!(told["pinned"]["tp"], 4);
    assert!(dplan_ok(&["explain", &plan, "--why-not", "tp=4"]).contains("difference"));

    // A certificate that is there is read, or its damage named: what was asked is not guessed.
    std::fs::write(dir.join("offloaded.certificate.json"), "{\"dplan_certificate\": 1").unwrap();
    let output = dplan(&["explain", &offloaded]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && error.contains("offloaded.certificate.json:1:"), "{error}");
}

/// What explain says of another schedule is what compiling under it says.
#[test]
fn explain_of_a_pipeline_says_what_other_schedules_would_take() {
    let dir = scratch("orders");
    let ranks = "dp=1,ep=1,cp=1,tp=1,pp=4";
    let (plan, said) = compiled(&dir, "plan.json", &["--cluster", "cpu:4", "--batch", "16", "--pin", ranks]);
    assert_eq!(said["chosen"]["schedule"], "1f1b");
    let plan = plan.display().to_string();
    let told: Value = serde_json::from_str(&dplan_ok(&["explain", &plan, "--json"])).unwrap();
    let schedules = told["schedules"].as_array().unwrap();
    assert_eq!(schedules.iter().map(|s| s["schedule"].as_str().unwrap()).collect::<Vec<_>>(), ["interleaved", "zb-h1", "zb-v"]);
    for schedule in schedules {
        let pins = format!("{ranks},schedule={}", schedule["schedule"].as_str().unwrap());
        let (_, other) = compiled(&dir, "other.json", &["--cluster", "cpu:4", "--batch", "16", "--pin", &pins]);
        assert_eq!(schedule.pointer("/best/simulated_seconds"), other.pointer("/predicted/simulated_seconds"), "{pins}");
        assert_eq!(schedule.pointer("/best/virtual"), other.pointer("/chosen/virtual"), "{pins}");
    }
    let text = dplan_ok(&["explain", &plan]);
    assert!(text.contains("other orders of the passes") && text.contains("--pin schedule=zb-v"), "{text}");
}

#[test]
fn the_same_question_has_the_same_answer_byte_for_byte() {
    let dir = scratch("deterministic");
    let bytes = |name: &str| {
        let (plan, _) = compiled(&dir, name, &["--cluster", "h100:4x2", "--batch", "32"]);
        (std::fs::read(&plan).unwrap(), std::fs::read(plan.with_extension("certificate.json")).unwrap())
    };
    let first = bytes("first.json");
    for repeat in 0..10 {
        assert!(bytes("again.json") == first, "repeat {repeat}");
    }
    // Two at once, as two threads of one machine.
    std::thread::scope(|scope| {
        for name in ["left.json", "right.json"] {
            let (bytes, first) = (&bytes, &first);
            scope.spawn(move || (0..5).for_each(|repeat| assert!(bytes(name) == *first, "{name}, repeat {repeat}")));
        }
    });
}

/// Where time is up before the search has found anything good, textbook systems may have: what is answered is no slower than any of them, and its bound holds.
#[test]
fn without_time_the_plan_is_no_slower_than_textbook_systems() {
    let dir = scratch("hurried");
    // The last has too little memory for any plan that offloads nothing.
    for (cluster, more) in [("cpu:8", &[][..]), ("h100:8x8", &[]), ("a100-80g:8x128", &[]), ("h100:8x1", &["--memory-limit", "1030MiB"])] {
        let args = [&["--cluster", cluster, "--batch", "2048", "--time-limit", "0"], more].concat();
        let (path, plan) = compiled(&dir, "plan.json", &args);
        assert_eq!(plan["search"]["proved"], false, "{plan}");
        let step = number(&plan, "/predicted/step_seconds");
        let rows = plan["baselines"].as_array().unwrap();
        let waits = |r: &&Value| r["asynchronous"] == false;
        let times: Vec<f64> = rows.iter().filter(waits).filter_map(|r| r["step_seconds"].as_f64()).collect();
        assert!(!times.is_empty() && times.iter().all(|t| step <= *t), "{cluster}: {step} s, but {rows:?}");
        let said: Value = serde_json::from_str(&dplan_ok(&["verify", path.to_str().unwrap(), "--certificate", "--json"])).unwrap();
        assert_eq!((&said["ok"], &said["certificate"]["proved"]), (&Value::Bool(true), &Value::Bool(false)), "{said}");
    }
}

/// The inputs of 120 layers do not fit, but may wait in a file: both solvers find the plan, and the checker of certificates knows as well that layouts are not crowded.
#[test]
fn many_layers_are_not_crowded_where_their_inputs_wait_elsewhere() {
    let dir = scratch("deep");
    let (config, plan) = (dir.join("config.json").display().to_string(), dir.join("plan.json").display().to_string());
    let model = r#"{"model_type":"llama","hidden_size":64,"intermediate_size":64,"num_hidden_layers":120,"num_attention_heads":2,"num_key_value_heads":2,"vocab_size":64,"max_position_embeddings":1024}"#;
    std::fs::write(&config, model).unwrap();
    for (cluster, batch, limit) in [("cpu:2", "8", "14MiB"), ("cpu:1", "2", "16MiB")] {
        let args = ["compile", &config, "--cluster", cluster, "--seq", "1024", "--batch", batch, "--memory-limit", limit, "--json", "-o", &plan];
        let step = |solver: &str| {
            let plan: Value = serde_json::from_str(&dplan_ok(&[&args[..], &["--solver", solver]].concat())).unwrap();
            assert_eq!(plan["search"]["proved"], true, "{plan}");
            number(&plan, "/predicted/step_seconds")
        };
        assert_eq!(step("ilp"), step("exact"), "{cluster}");
        let said: Value = serde_json::from_str(&dplan_ok(&["verify", &plan, "--certificate", "--json"])).unwrap();
        assert_eq!((&said["ok"], &said["certificate"]["proved"]), (&Value::Bool(true), &Value::Bool(true)), "{said}");
    }
}

/// What is proved is said with its space: pins, limit, and whether offloading is in it.
#[test]
fn proofs_say_of_what_they_are() {
    let dir = scratch("spaces");
    let (plan, said) = compiled(&dir, "plan.json", &["--cluster", "cpu:4", "--batch", "32", "--pin", "tp=4", "--memory-limit", "64MiB"]);
    let search = &said["search"];
    assert!(search["pins"] == "tp=4" && search["offloading"] == false && search["memory_limit_bytes"] == 64 << 20, "{search}");
    let plan = plan.display().to_string();
    let space = "(without offloading, under the pins tp=4, in 64.0 MiB of each device)";
    let told = dplan_ok(&["verify", &plan, "--certificate"]);
    assert!(told.contains(&format!("no plan is better {space}")), "{told}");
    let told: Value = serde_json::from_str(&dplan_ok(&["verify", &plan, "--certificate", "--json"])).unwrap();
    let about = &told["certificate"];
    assert!(about["pins"] == "tp=4" && about["offloading"] == false && about["memory_limit_bytes"] == 64 << 20, "{about}");
    let text = dplan_ok(&["compile", &model(), "--cluster", "cpu:4", "--batch", "32", "--pin", "tp=4", "--memory-limit", "64MiB"]);
    assert!(text.contains(&format!("proved optimal in this space {space} and cost model")) && text.contains(" of 64.00 MiB (states"), "{text}");
}

/// A plan that offloads without being told to keeps to what hosts have, and its certificate is checked for that.
#[test]
fn what_offloads_says_so_and_is_held_to_the_hosts() {
    let dir = scratch("hosts");
    let args = ["--cluster", "h100:1", "--batch", "8", "--memory-limit", "1042MiB", "--min-devices"];
    let (plan, said) = compiled(&dir, "plan.json", &args);
    assert!(number(&said, "/predicted/memory/0/host_bytes") > 0.0 && said["search"]["offloading"] == true, "{said}");
    assert!(number(&said, "/what_if/0/host_bytes") > 0.0 && number(&said, "/what_if/0/file_bytes") == 0.0, "{said}");
    let text = dplan_ok(&[&["compile", &model()][..], &args].concat());
    assert!(text.contains("a device to hosts, 0 B to files"), "{text}");
    let shares =
        |line: &str| line.split(", ").map(|part| part.trim().trim_end_matches(" %").rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>();
    let parts = text.lines().find(|line| line.contains("exposed communication")).unwrap();
    assert!(parts.contains("offload") && (shares(parts) - 100.0).abs() < 0.5, "{parts}");
    let path = plan.display().to_string();
    dplan_ok(&["verify", &path, "--certificate"]);
    let held = std::fs::read_to_string(&plan).unwrap();
    let line = held.lines().find(|line| line.contains("\"host_memory_bytes\"")).unwrap();
    std::fs::write(&plan, held.replacen(line.trim().trim_end_matches(','), "\"host_memory_bytes\": 1000", 1)).unwrap();
    let output = dplan(&["verify", &path, "--certificate"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && stderr.contains("bytes of the host for each device, 1000 are there"), "{stderr}");
}

/// `explain` reads the question from the certificate: its limit, its pins.
#[test]
fn explain_remembers_the_question() {
    let dir = scratch("remembered");
    let (plan, _) = compiled(&dir, "plan.json", &["--cluster", "cpu:4", "--batch", "32", "--memory-limit", "24MiB", "--pin", "zero=1+3,pp=1,cp=1"]);
    let plan = plan.display().to_string();
    let told = |more: &[&str]| -> Value { serde_json::from_str(&dplan_ok(&[&["explain", &plan, "--json"], more].concat())).unwrap() };
    let remembered = told(&[]);
    assert_eq!(remembered, told(&["--memory-limit", "24MiB"]));
    let layers = remembered["layers"].as_array().unwrap();
    assert!(layers.iter().all(|layer| layer["next"].is_null() || number(layer, "/next/arena_bytes") <= f64::from(24 << 20)), "{remembered}");
    let changes: Vec<&str> =
        layers.iter().flat_map(|layer| [&layer["next"]["change"], &layer["denied"]["change"]]).filter_map(Value::as_str).collect();
    assert!(!changes.is_empty() && !changes.iter().any(|change| change.contains("zero 1 -> 0") || change.contains("-> 2")), "{changes:?}");
    // Pins that `--why-not` says nothing of are kept.
    let other = told(&["--why-not", "tp=2"]);
    let zeros: Vec<f64> = other["pinned"]["layers"].as_array().unwrap().iter().map(|layer| number(layer, "/zero")).collect();
    assert!(zeros.iter().all(|&zero| zero == 1.0 || zero == 3.0) && number(&other, "/largest_total_bytes/1") <= f64::from(24 << 20), "{other}");
    let said = dplan_ok(&["explain", &plan, "--why-not", "tp=2"]);
    assert!(said.contains("the best plan under the pins tp=2,pp=1,cp=1,zero=1+3, in 24.0 MiB of each device:"), "{said}");
    // Without the certificate nobody knows.
    std::fs::remove_file(dir.join("plan.certificate.json")).unwrap();
    assert_ne!(told(&[]), remembered);
}

/// More devices than a node has are more nodes.
#[test]
fn larger_machines_have_more_nodes() {
    let dir = scratch("nodes");
    let (_, said) = compiled(&dir, "plan.json", &["--cluster", "h100:8", "--batch", "64", "--what-if", "nodes=2x", "--pin", "tp=1,cp=1,pp=1"]);
    assert_eq!((number(&said, "/what_if/0/devices"), number(&said, "/what_if/0/nodes")), (16.0, 2.0), "{said}");
    assert!(said["notes"].as_array().unwrap().iter().all(|note| !note.as_str().unwrap().contains("usual nodes")), "{said}");
    let (_, said) = compiled(&dir, "island.json", &["--cluster", "h100:16", "--batch", "64", "--pin", "tp=1,cp=1,pp=1"]);
    assert!(said["notes"].as_array().unwrap().iter().any(|note| note.as_str().unwrap().contains("h100:8x2 has as many")), "{said}");
}

/// What the text says beside the answer, JSON has too; a V100 is not asked for bf16; a batch that ranks cannot share out is no lack of memory.
#[test]
fn notes_and_reasons_are_in_both_reports() {
    let dir = scratch("notes");
    let (_, said) = compiled(&dir, "plan.json", &["--cluster", "v100-16g:2", "--pin", "dp=2"]);
    let notes: Vec<&str> = said["notes"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(
        notes.iter().any(|note| note.starts_with("batch 16")) && notes.iter().any(|note| note.starts_with("f16 with dynamic loss scaling")),
        "{notes:?}"
    );
    let text = dplan(&["compile", &model(), "--cluster", "v100-16g:2", "--pin", "dp=2"]);
    let (stdout, stderr) = (String::from_utf8_lossy(&text.stdout), String::from_utf8_lossy(&text.stderr));
    assert!(stdout.contains(" f16 adamw") && notes.iter().all(|note| stderr.contains(&format!("note: {note}"))), "{stdout}{stderr}");
    let (_, said) = compiled(&dir, "six.json", &["--cluster", "cpu:4", "--batch", "6"]);
    let row = |name: &str| said["baselines"].as_array().unwrap().iter().find(|b| b["name"] == name).cloned().unwrap();
    assert!(row("DDP")["covers"] == false && row("DDP")["fits"] == false && row("Megatron 3-D")["covers"] == true, "{said}");
    let text = dplan_ok(&["compile", &model(), "--cluster", "cpu:4", "--batch", "6"]);
    assert!(text.contains("DDP cannot share out the batch"), "{text}");
}

/// Images have patches where sentences have tokens: these are counted, not their pixels.
#[test]
fn patches_are_counted_as_tokens_are() {
    let dir = scratch("patches");
    let config = dir.join("config.json");
    std::fs::write(&config, r#"{"model_type":"vit","image_size":8,"patch_size":4,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":3,"num_attention_heads":6,"num_labels":4}"#).unwrap();
    let said: Value =
        serde_json::from_str(&dplan_ok(&["compile", config.to_str().unwrap(), "--cluster", "cpu:2", "--batch", "8", "--json"])).unwrap();
    let tokens = number(&said, "/predicted/tokens_per_second") * number(&said, "/predicted/step_seconds");
    assert!((tokens / (8.0 * 5.0) - 1.0).abs() < 1e-9, "{said}");
    assert!(dplan_ok(&["compile", config.to_str().unwrap(), "--cluster", "cpu:2", "--batch", "8"]).contains("sequence 5)"));
}

/// What a plan file says of exchanges is what its program does, so that it can be read again, and its certificate checked.
#[test]
fn plans_of_every_exchange_are_read_again() {
    let dir = scratch("exchanges");
    for (at, pins) in [
        "dp=1,cp=2,tp=2,wire=bf16",
        "dp=4,wire=bf16,sync=server",
        "dp=4,sync=server",
        "dp=4,sync=tree",
        "dp=2,tp=2,map=tp.dp",
        "dp=1,cp=4,keys=ring",
        "dp=2,cp=2,keys=ring,sync=server,zero=3",
    ]
    .into_iter()
    .enumerate()
    {
        let (plan, _) = compiled(&dir, &format!("{at}.json"), &["--cluster", "cpu:4", "--batch", "16", "--pin", pins]);
        dplan_ok(&["verify", &plan.display().to_string(), "--certificate"]);
    }
}
