//! Published runs priced: how many, how near, in which order. The bounds are what the committed constants reach on the shared table.

mod common;

use serde_json::Value;
use std::collections::BTreeMap;

fn replay() -> Option<(Vec<Value>, Value)> {
    let table = common::reference("validation/throughput.csv")?;
    if !table.is_file() {
        eprintln!("SKIPPED: the shared data has no published runs");
        return None;
    }
    let text = common::dplan_ok(&["replay", table.to_str().unwrap(), "--json"]);
    let mut rows: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let summary = rows.pop().unwrap()["summary"].clone();
    Some((rows, summary))
}

#[test]
fn published_runs_are_predicted() {
    let Some((rows, summary)) = replay() else { return };
    assert_eq!(rows.len(), 595);
    assert!(rows.iter().all(|r| r["predicted_seconds"].is_number() != r["reason"].is_string()), "a row is priced, or says why not");
    let priced = rows.iter().filter(|r| r["predicted_seconds"].is_number() && r["measured_seconds"].is_number()).count();
    assert!(priced >= 496, "{priced} rows priced");
    assert!(summary["constants"].as_object().unwrap().len() <= 12);

    let mut errors: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for row in &rows {
        if let (Some(p), Some(m)) = (row["predicted_seconds"].as_f64(), row["measured_seconds"].as_f64()) {
            errors.entry(row["source_id"].as_str().unwrap()).or_default().push((p / m - 1.0).abs());
        }
    }
    for (source, bound) in BOUNDS {
        let e = &errors[source];
        let mean = e.iter().sum::<f64>() / e.len() as f64;
        assert!(mean <= bound, "{source}: mean error {mean:.4} of {} rows", e.len());
        assert!((summary["sources"][source]["mape"].as_f64().unwrap() - mean).abs() < 1e-9);
    }
    for (source, bound) in MEMORY_BOUNDS {
        let mean = summary["sources"][source]["memory_mape"].as_f64().unwrap();
        assert!(mean <= bound, "{source}: mean error of memory {mean:.4}");
    }
    assert!(summary["fits"]["wrong"].as_u64().unwrap() <= 2 && summary["fits"]["right"].as_u64().unwrap() >= 212, "{}", summary["fits"]);
    assert!(summary["all"]["median"].as_f64().unwrap() <= MEDIAN);
    let pairs = &summary["pairs"];
    assert!(pairs["right_order"].as_f64().unwrap() >= ORDERED * pairs["different"].as_f64().unwrap(), "{pairs}");
    // Nothing is left out of the count: pairs of which a source doubts a time are counted apart.
    let all = |name: &str| pairs[name].as_u64().unwrap();
    assert_eq!(all("different") + all("doubted"), 647, "{pairs}");
    assert!(all("right_order") + all("doubted_right_order") >= 600, "{pairs}");
}

/// Mean error of each source.
const BOUNDS: [(&str, f64); 7] = [
    ("megatron_recompute22", 0.03),
    ("megatron_sc21", 0.08),
    ("llmfoundry", 0.08),
    ("bloom_tr11", 0.06),
    ("bloom_final", 0.05),
    ("torchtitan", 0.08),
    ("simumax_b200", 0.08),
];

/// Mean error of memory, of sources that say how they counted.
const MEMORY_BOUNDS: [(&str, f64); 3] = [("simumax_b200", 0.03), ("bloom_tr11", 0.045), ("nanotron_old_bench", 0.015)];
const MEDIAN: f64 = 0.05;
const ORDERED: f64 = 0.94;

#[test]
fn what_is_no_table_of_runs_is_refused() {
    let dir = common::scratch("replay_errors");
    for (name, content, says) in [("words.csv", "a,b\n1,2\n", "no column `row_id`"), ("empty.csv", "", "no column `row_id`")] {
        let path = dir.join(name);
        std::fs::write(&path, content).unwrap();
        let output = common::dplan(&["replay", path.to_str().unwrap()]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(says), "{name}: {error}");
    }
}

/// Sizes beyond any run are refused by name; the largest that are taken are priced without a panic.
#[test]
fn sizes_beyond_any_run_do_not_overflow() {
    let path = common::scratch("replay_sizes").join("sizes.csv");
    let header = "row_id,source_id,framework,workload,layers,hidden,heads,head_dim,ffn,vocab,seq_len,gpu,n_gpus,gpus_per_node,tp,pp,cp,mbs,grad_accum,recompute,status,inter_node";
    let row = |id: &str, hidden: u64, n: u64, tp: u64, pp: u64| {
        format!("{id},s,Megatron-LM,pretrain,{n},{hidden},{n},{n},{n},{n},{n},H100,{n},8,{tp},{pp},{n},{n},{n},full,ok,1e-12 Gb/s per node")
    };
    let most = 1 << 20;
    let rows = [row("vast", 1 << 62, most, 1, 1), row("many", most, most, most, most), row("most", most, most, 1, 1)];
    std::fs::write(&path, format!("{header}\n{}\n", rows.join("\n"))).unwrap();
    let text = common::dplan_ok(&["replay", path.to_str().unwrap(), "--json"]);
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines[0]["reason"], "hidden is `4611686018427387904`, expected a whole number from 1 to 1048576");
    assert!(lines[1]["reason"].as_str().unwrap().ends_with("is not 1048576 devices"), "{}", lines[1]);
    assert!(lines[2]["predicted_seconds"].as_f64().unwrap() > 1e9, "{}", lines[2]);
}
