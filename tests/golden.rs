//! Families without reference data beside the repository agree with PyTorch `transformers` on small models: loss, gradient norm, every gradient and
//! every final weight, by the interpreter and by two plans on CPU ranks. `tests/golden/make.py` made the files, and says how.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use dplan::export::weights as export;
use dplan::import::weights::{Weights, pieces};
use dplan::import::{self, ImportOptions, Model};
use dplan::safetensors::{encode, header};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::Graph;
use dplan_ir::init::name_hash;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, train_step};
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};
use dplan_ir::splitmix::mix;

/// Rotations are tables of f32 in the reference; with their rounding nothing agrees to more digits.
const TOLERANCE: f64 = 3e-6;
const FINAL_TOLERANCE: f64 = 3e-6;

#[test]
fn families_agree_with_pytorch() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut files: Vec<_> =
        std::fs::read_dir(&golden).unwrap().map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "json")).collect();
    files.sort();
    assert_eq!(files.len(), 10, "golden files");
    for file in files {
        check(&file);
    }
}

fn check(file: &Path) {
    let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let family = expected["config"]["model_type"].as_str().unwrap().to_string();
    let (batch, seq) = (expected["batch"].as_u64().unwrap(), expected["seq"].as_u64().unwrap());
    let options = ImportOptions { seq: Some(seq), compute: DType::F64, family: None };
    let mut model: Model =
        import::model_from_bytes(&format!("{family}.json"), expected["config"].to_string().as_bytes(), &options).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(Some(model.graph.param_count()), expected["params"].as_u64(), "{family}: parameters");
    model.graph.set_batch(batch);
    let graph = differentiate(&model.graph).unwrap();
    let dir = common::scratch(&format!("golden-{family}"));
    let weights = write_weights(&graph, &dir.join("weights.safetensors"));

    let mut state = TrainState::new(weights, Optimizer::AdamW);
    let hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-4, weight_decay: 0.1, momentum: 0.0, clip: 1.0 };
    for (step, tokens) in expected["tokens"].as_array().unwrap().iter().enumerate() {
        let rows: Vec<Vec<f64>> =
            tokens.as_array().unwrap().iter().map(|r| r.as_array().unwrap().iter().map(|t| t.as_f64().unwrap()).collect()).collect();
        let ids = |from: usize| Tensor::dense(&[batch, seq], rows.iter().flat_map(|r| r[from..from + seq as usize].to_vec()).collect());
        let scalars = StepScalars::new(hyper, step as u64 + 1, 1.0 / (batch * seq) as f64);
        let report = train_step(&graph, &mut state, &[vec![ids(0), ids(1)]], &scalars, Optimizer::AdamW);
        for (what, found) in [("loss", report.loss), ("norm", report.grad_norm)] {
            let want = expected[what][step].as_f64().unwrap();
            assert!((found / want - 1.0).abs() < TOLERANCE, "{family} step {step}: {what} {found}, not {want}");
        }
        if step == 0 {
            compare(&family, &graph, &report.grads, &expected["grads"], &dir.join("grads.safetensors"), TOLERANCE);
        }
    }
    compare(&family, &graph, &state.params, &expected["final"], &dir.join("final.safetensors"), FINAL_TOLERANCE);
    for (ranks, pins) in [(2, "tp=2"), (4, "dp=2,pp=2,zero=2,recompute=full")] {
        on_ranks(&family, &expected, &dir, ranks, pins);
    }
}

/// The same by a plan, on CPU ranks.
fn on_ranks(family: &str, expected: &serde_json::Value, dir: &Path, ranks: u32, pins: &str) {
    let path = |name: &str| dir.join(name).to_str().unwrap().to_string();
    std::fs::write(path("config.json"), expected["config"].to_string()).unwrap();
    std::fs::write(path("tokens.json"), serde_json::json!({ "tokens": expected["tokens"] }).to_string()).unwrap();
    let cluster = format!("cpu:{ranks}");
    let (config, plan) = (path("config.json"), path("plan.json"));
    common::dplan_ok(&["compile", &config, "--cluster", &cluster, "--batch", "2", "--seq", "12", "--precision", "f64", "--pin", pins, "-o", &plan]);
    let files = [path("tokens.json"), path("weights.safetensors"), path("ranks-grads.safetensors"), path("ranks-final.safetensors")];
    let [tokens, weights, grads, last] = files.each_ref().map(String::as_str);
    let fixed = "--steps 2 --lr 0.01 --betas 0.9,0.95 --eps 1e-4 --weight-decay 0.1 --clip 1.0 --json";
    let mut args = vec!["run", &plan, "--data", tokens, "--init", weights, "--save-grads", grads, "--save", last];
    args.extend(fixed.split(' '));
    let lines = common::json_lines(&common::dplan_ok(&args));
    for (step, line) in lines.iter().filter(|l| l.get("step").is_some()).enumerate() {
        for (what, found) in [("loss", &line["loss"]), ("norm", &line["grad_norm"])] {
            let (found, want) = (found.as_f64().unwrap(), expected[what][step].as_f64().unwrap());
            assert!((found / want - 1.0).abs() < TOLERANCE, "{family} {pins} step {step}: {what} {found}, not {want}");
        }
    }
    digest(&format!("{family} {pins}"), Path::new(grads), &expected["grads"], TOLERANCE);
    digest(&format!("{family} {pins}"), Path::new(last), &expected["final"], FINAL_TOLERANCE);
}

/// The model's tensors as a weights file, read back as its parameters.
fn write_weights(graph: &Graph, path: &Path) -> Table<ParamId, Tensor> {
    let tensors: BTreeMap<String, Vec<u64>> = graph.params.ids().flat_map(|p| pieces(graph, p)).map(|p| (p.tensor, p.shape)).collect();
    let (mut file, begins) = header(&tensors.iter().map(|(n, s)| (n.clone(), DType::F64, s.clone())).collect::<Vec<_>>());
    for ((name, shape), begin) in tensors.iter().zip(begins) {
        let values = values(name, shape);
        file.resize(file.len().max(begin as usize + 8 * values.len()), 0);
        values.iter().enumerate().for_each(|(i, &v)| encode(DType::F64, v, &mut file[begin as usize..], i));
    }
    std::fs::write(path, file).unwrap();
    let weights = Weights::open(path).unwrap();
    weights.check(graph).unwrap_or_else(|e| panic!("{e}"));
    graph.params.iter().map(|(p, param)| Tensor::dense(&graph.shape(param.value), weights.param::<f64>(graph, p).unwrap())).collect()
}

fn compare(family: &str, graph: &Graph, found: &Table<ParamId, Tensor>, expected: &serde_json::Value, path: &Path, tolerance: f64) {
    export::save(path, graph, DType::F64, |p| Ok(found[p].data.clone())).unwrap();
    digest(family, path, expected, tolerance);
}

/// Norm, and inner product with a vector that looks random, of every tensor of a checkpoint.
fn digest(family: &str, path: &Path, expected: &serde_json::Value, tolerance: f64) {
    let found = common::tensors(path);
    let expected = expected.as_object().unwrap();
    let norm_of = |at: &serde_json::Value| at[0].as_f64().unwrap();
    let all = expected.values().map(|e| norm_of(e).powi(2)).sum::<f64>().sqrt();
    for (name, want) in expected {
        let found = found.get(name).unwrap_or_else(|| panic!("{family}: no {name}"));
        let norm = found.iter().map(|x| x * x).sum::<f64>().sqrt();
        let probe = found.iter().zip(draw(&format!("probe.{name}"), found.len() as u64)).map(|(x, p)| x * p).sum::<f64>();
        let scale = norm_of(want).max(1e-3 * all);
        for (what, found, want) in [("norm", norm, norm_of(want)), ("probe", probe, want[1].as_f64().unwrap())] {
            assert!((found - want).abs() < tolerance * scale, "{family} {name}: {what} {found}, not {want}");
        }
    }
    assert_eq!(found.len(), expected.len(), "{family}: tensors");
}

/// As `value` in make.py.
fn values(name: &str, shape: &[u64]) -> Vec<f64> {
    let base = if name.contains("norm") && name.ends_with("weight") { 1.0 } else { 0.0 };
    let drawn = draw(name, shape.iter().product());
    if shape.len() > 1 { drawn.collect() } else { drawn.map(|x| base + x / 2.0).collect() }
}

/// As `draw` in make.py.
fn draw(name: &str, count: u64) -> impl Iterator<Item = f64> + use<> {
    let hash = name_hash(name);
    (0..count).map(move |i| (mix(hash ^ i) >> 48) as f64 / 65536.0 - 0.5)
}
