//! Documents that share a sequence do not see each other: packed, they train a model as they would alone, under every plan, on any text.

mod common;

use dplan::import::{ImportOptions, model_from_bytes};
use dplan_ir::documents::{self, DocumentsError, first_positions};
use dplan_ir::dtype::DType;
use dplan_ir::grad::differentiate;
use dplan_ir::graph::Graph;
use dplan_ir::init;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{StepReport, TrainState, train_step};
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};

const LLAMA: &str = r#"{"model_type":"llama","vocab_size":37,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":2,"num_attention_heads":6,"num_key_value_heads":2,"max_position_embeddings":64}"#;
/// Sinks; a window in one layer and not in the next.
const GPT_OSS: &str = r#"{"model_type":"gpt_oss","vocab_size":37,"hidden_size":24,"intermediate_size":16,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"num_local_experts":4,"num_experts_per_tok":2,"sliding_window":3,"max_position_embeddings":64}"#;
const HYPER: Hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, momentum: 0.9, clip: f64::INFINITY };

fn forward(config: &str, seq: u64) -> Graph {
    let options = ImportOptions { seq: Some(seq), compute: DType::F64, family: None };
    model_from_bytes("config.json", config.as_bytes(), &options).unwrap().graph
}

/// One step on sequences, by the interpreter.
fn step(forward: &Graph, inputs: &[Vec<Vec<i32>>]) -> StepReport {
    let mut forward = forward.clone();
    let batch = inputs[0].len() as u64;
    forward.set_batch(batch);
    let graph = differentiate(&forward).unwrap();
    let mut state = TrainState::new(init::params(&graph, 1), Optimizer::Sgd);
    let tensor = |(rows, &v): (&Vec<Vec<i32>>, _)| Tensor::dense(&graph.shape(v), rows.iter().flatten().map(|&t| f64::from(t)).collect());
    let inputs: Vec<Tensor> = inputs.iter().zip(&graph.inputs).map(tensor).collect();
    let tokens = inputs[0].data.len() as f64;
    train_step(&graph, &mut state, &[inputs], &StepScalars::new(HYPER, 1, 1.0 / tokens), Optimizer::Sgd)
}

/// Three documents of five tokens in one sequence, and each in one of its own. Rotations by position are differences of positions, so that it does not matter
/// where a document begins.
#[test]
fn packed_documents_train_as_alone() {
    let (documents, length, end) = (3, 5, 0);
    let token = |d: i32, i: i32| if i + 1 == length { end } else { 1 + (d * 11 + i * 7) % 36 };
    let target = |d: i32, i: i32| (d * 5 + i * 3) % 37;
    let alone = |of: &dyn Fn(i32, i32) -> i32| (0..documents).map(|d| (0..length).map(|i| of(d, i)).collect()).collect::<Vec<Vec<i32>>>();
    let (tokens, targets) = (alone(&token), alone(&target));
    for config in [LLAMA, GPT_OSS] {
        let right = step(&forward(config, length as u64), &[tokens.clone(), targets.clone()]);
        let whole = forward(config, (documents * length) as u64);
        let apart = documents::keep_apart(&whole).unwrap();
        let packed = tokens.concat();
        let first = first_positions(&packed, end);
        let found = step(&apart, &[vec![packed.clone()], vec![targets.concat()], vec![first]]);
        assert!((found.loss / right.loss - 1.0).abs() < 1e-12, "{} is not {}", found.loss, right.loss);
        // Parameters are numbered anew where documents are kept apart.
        let names = |graph: &Graph| graph.params.values().map(|p| graph.values[p.value].name.clone()).collect::<Vec<_>>();
        let (ours, theirs) = (names(&apart), names(&whole));
        assert_eq!(ours.len(), theirs.len());
        for (name, grad) in ours.iter().zip(found.grads.values()) {
            let at = theirs.iter().position(|n| n == name).unwrap();
            let want = right.grads.values().nth(at).unwrap();
            let scale = want.data.iter().fold(1e-9, |m: f64, x| m.max(x.abs()));
            assert!(grad.data.iter().zip(&want.data).all(|(x, y)| (x - y).abs() < 1e-12 * scale.max(1.0)), "gradient of {name}");
        }
        // What is compared depends on it.
        let joined = step(&whole, &[vec![packed], vec![targets.concat()]]);
        assert!((joined.loss / right.loss - 1.0).abs() > 1e-4, "{} is {}", joined.loss, right.loss);
    }
}

/// From a text, by the command line: plans that cut sequences, heads, layers and batches give the losses of one rank, and another end of documents other ones.
#[test]
fn every_plan_keeps_them_apart() {
    let dir = common::scratch("documents");
    let (config, text, plan) = (dir.join("config.json"), dir.join("text.txt"), dir.join("plan.json"));
    let paths = [&config, &text, &plan].map(|p| p.to_str().unwrap().to_string());
    let [config, text, plan] = &paths;
    std::fs::write(config, LLAMA.replace("37", "256")).unwrap();
    std::fs::write(text, "one line. another one!\nand. a third; which is longer\nend.\n".repeat(40)).unwrap();
    let losses = |ranks: u32, pins: &str, end: u8| {
        let cluster = format!("cpu:{ranks}");
        let args = ["compile", config, "--cluster", &cluster, "--batch", "4", "--seq", "32", "--precision", "f64", "--documents", "apart"];
        common::dplan_ok(&[&args[..], &["--pin", pins, "-o", plan]].concat());
        common::dplan_ok(&["verify", plan]);
        let end = end.to_string();
        let text = common::dplan_ok(&["run", plan, "--data", text, "--document-end", &end, "--steps", "3", "--json"]);
        common::json_lines(&text).iter().filter_map(|l| l["loss"].as_f64()).collect::<Vec<f64>>()
    };
    let right = losses(1, "", b'\n');
    assert_eq!(right.len(), 3);
    for (ranks, pins) in [
        (2, "cp=2"),
        (2, "cp=2,keys=ring"),
        (4, "cp=4,keys=ring"),
        (4, "cp=2,tp=2,recompute=full"),
        (4, "pp=2,dp=2,zero=2,micro=1"),
        (4, "tp=2,dp=2,zero=3,recompute=selective"),
    ] {
        let found = losses(ranks, pins, b'\n');
        assert!(found.iter().zip(&right).all(|(x, y)| (x / y - 1.0).abs() < 1e-10), "{pins}: {found:?}, not {right:?}");
    }
    assert!(losses(1, "", b'.').iter().zip(&right).all(|(x, y)| (x / y - 1.0).abs() > 1e-6));

    let refused = |more: &[&str]| {
        let output = common::dplan(&[&["run", plan, "--data", text, "--steps", "1"], more].concat());
        format!("{:?} {}", output.status.code(), String::from_utf8_lossy(&output.stderr))
    };
    assert!(refused(&[]).contains("the model keeps documents apart: --document-end says which token ends one"), "{}", refused(&[]));
    assert!(refused(&["--document-end", "256"]).contains("no token 256 ends a document: ids go from 0 to 255"));
    common::dplan_ok(&["compile", config, "--cluster", "cpu:1", "--batch", "4", "--seq", "32", "-o", plan]);
    assert!(refused(&["--document-end", "10"]).contains("no attention of the model keeps documents apart"));
}

#[test]
fn what_cannot_be_kept_apart_says_so() {
    let bert = r#"{"model_type":"bert","vocab_size":37,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":1,"num_attention_heads":6,"max_position_embeddings":16}"#;
    assert!(matches!(documents::keep_apart(&forward(bert, 8)), Err(DocumentsError::LooksAhead(_))));
    let apart = documents::keep_apart(&forward(LLAMA, 8)).unwrap();
    assert!(matches!(documents::keep_apart(&apart), Err(DocumentsError::Name(_))));
    let examples = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/two-branch.json");
    let model = model_from_bytes("two-branch.json", &std::fs::read(examples).unwrap(), &ImportOptions::default()).unwrap();
    assert_eq!(documents::keep_apart(&model.graph), Err(DocumentsError::NoAttention));
}
