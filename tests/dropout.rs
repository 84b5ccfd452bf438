//! Dropout is a function of place: every plan drops the same elements, also backwards, of what it computes again, and of what it resumes.

mod common;

use common::{Tensors, distance, options};
use dplan::compile::compile;
use dplan::feed::Feed;
use dplan::import::{ImportOptions, Model, model_from_bytes};
use dplan::runtime::{Options as RunOptions, Rows, Session};
use dplan_ir::dropout::{self, Draws, Rates};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{NodeId, Table};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::Graph;
use dplan_ir::init;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{GraphRun, TrainState, train_step};
use dplan_ir::op::Op;
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};
use std::path::Path;
use std::sync::Arc;

const BATCH: u64 = 8;
const STEPS: u64 = 3;
const SEED: u64 = 1;
const LLAMA: &str = r#"{"model_type":"llama","vocab_size":37,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":2,"num_attention_heads":6,"num_key_value_heads":2,"max_position_embeddings":16}"#;
const MIXTRAL: &str = r#"{"model_type":"mixtral","vocab_size":37,"hidden_size":24,"intermediate_size":16,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"num_local_experts":4,"num_experts_per_tok":2,"max_position_embeddings":16}"#;
const HYPER: Hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };
const RATES: Rates = Rates { embedding: 0.1, residual: 0.3 };
const DRAWS: Draws = Draws { seed: 3, sequence: 40 };

fn import(config: &str, compute: DType) -> Model {
    let options = ImportOptions { seq: Some(8), compute, family: None };
    model_from_bytes("config.json", config.as_bytes(), &options).unwrap()
}

fn rates(graph: &Graph) -> Vec<f64> {
    graph.forward_nodes().filter_map(|(_, n)| if let Op::Dropout { rate } = n.op { Some(rate) } else { None }).collect()
}

struct Trained {
    losses: Vec<f64>,
    /// Of the first step.
    grads: Tensors,
    params: Tensors,
}

fn scalars(step: u64, targets: u64, draws: Draws) -> StepScalars {
    StepScalars { draws: draws.after(step * BATCH), ..StepScalars::new(HYPER, step + 1, 1.0 / targets as f64) }
}

/// Trains on CPU ranks.
fn ranks(forward: &Graph, ranks: u32, pins: &str, draws: Draws) -> Trained {
    let file = compile(forward, &options(&format!("cpu:{ranks}"), BATCH, DType::F64, pins)).unwrap_or_else(|e| panic!("{pins}: {e}")).file;
    let feed = Feed::new(&file.graph, None, BATCH, SEED).unwrap();
    let mut session = Session::new(file.graph.clone(), file.program.clone(), &RunOptions::default()).unwrap();
    session.initialise(SEED).unwrap();
    let mut trained = Trained { losses: Vec::new(), grads: Table::new(), params: Table::new() };
    for step in 0..STEPS {
        trained.losses.push(session.step(&scalars(step, feed.targets(), draws), &Arc::new(feed.batch(step).unwrap())).unwrap().loss);
        if step == 0 {
            trained.grads = session.grads().unwrap();
        }
    }
    trained.params = session.params().unwrap();
    trained
}

/// Trains as the interpreter does: one device, one micro-batch, positions in their order.
fn interpreted(forward: &Graph, draws: Draws) -> Trained {
    let mut forward = forward.clone();
    forward.set_batch(BATCH);
    let graph = differentiate(&forward).unwrap();
    let feed = Feed::new(&graph, None, BATCH, SEED).unwrap();
    let mut state = TrainState::new(init::params(&graph, SEED), Optimizer::AdamW);
    let mut trained = Trained { losses: Vec::new(), grads: Table::new(), params: Table::new() };
    for step in 0..STEPS {
        let report = train_step(&graph, &mut state, &[inputs(&graph, &feed, step)], &scalars(step, feed.targets(), draws), Optimizer::AdamW);
        trained.losses.push(report.loss);
        if step == 0 {
            trained.grads = report.grads.map(|_, t| t.data.clone());
        }
    }
    trained.params = state.params.map(|_, t| t.data.clone());
    trained
}

fn inputs(graph: &Graph, feed: &Feed, step: u64) -> Vec<Tensor> {
    let batch = feed.batch(step).unwrap();
    let one = |(rows, &v): (&Rows, _)| match rows {
        Rows::Tokens(rows) => Tensor::dense(&graph.shape(v), rows.iter().map(|&t| f64::from(t)).collect()),
        Rows::Values(rows) => Tensor::dense(&graph.shape(v), rows.clone()),
    };
    batch.inputs.iter().zip(&graph.inputs).map(one).collect()
}

#[test]
fn every_plan_drops_what_the_interpreter_drops() {
    let mut worst = [0.0f64; 3];
    for (config, places) in [(LLAMA, 5), (MIXTRAL, 5)] {
        let forward = dropout::insert(&import(config, DType::F64).graph, RATES);
        // The embedding, and two branches of each of two blocks.
        assert_eq!(rates(&forward), [vec![RATES.embedding], vec![RATES.residual; places - 1]].concat());
        let right = interpreted(&forward, DRAWS);
        let experts = config == MIXTRAL;
        for &(name, devices, pins) in common::PLANS.iter().filter(|p| p.2.contains("ep=") == experts) {
            let found = ranks(&forward, devices, pins, DRAWS);
            // Of numbers that are none, `max` would say nothing.
            let losses: Vec<f64> = found.losses.iter().zip(&right.losses).map(|(x, y)| (x / y - 1.0).abs()).collect();
            assert!(losses.len() as u64 == STEPS && losses.iter().all(|&e| e < 1e-10), "{name}: losses are off by {losses:?}");
            let loss = losses.into_iter().fold(0.0, f64::max);
            let error = |found, right| distance(&forward, found, right).0;
            let errors = [loss, error(&found.grads, &right.grads), error(&found.params, &right.params)];
            assert!(errors.iter().all(|&e| e < 1e-10), "{name}: loss, gradients, weights are off by {errors:?}");
            worst.iter_mut().zip(errors).for_each(|(w, e)| *w = w.max(e));
        }
        // What is compared depends on what is dropped.
        for other in [Draws { seed: 4, ..DRAWS }, DRAWS.after(BATCH)] {
            let other = interpreted(&forward, other);
            assert!(
                other.losses.iter().zip(&right.losses).all(|(x, y)| (x / y - 1.0).abs() > 1e-6)
                    && distance(&forward, &other.grads, &right.grads).0 > 1e-2
            );
        }
    }
    println!("worst errors of loss, gradients, weights: {worst:?}");
}

#[test]
fn a_rate_of_nothing_is_no_dropout() {
    let plain = import(LLAMA, DType::F64).graph;
    assert!(dropout::insert(&plain, Rates::default()).nodes.len() == plain.nodes.len());
    let mut zero = dropout::insert(&plain, RATES);
    zero.nodes.iter_mut().for_each(|(_, n)| {
        if let Op::Dropout { rate } = &mut n.op {
            *rate = 0.0;
        }
    });
    let pins = "dp=2,zero=1";
    let (with, without) = (ranks(&zero, 2, pins, DRAWS), ranks(&plain, 2, pins, DRAWS));
    assert!(with.losses == without.losses && with.params == without.params);
    assert!(ranks(&dropout::insert(&plain, RATES), 2, pins, DRAWS).losses != without.losses);
}

/// Which elements each dropout keeps, of the same tokens: other ones in other layers, steps and micro-batches, and backwards the same as forwards.
#[test]
fn masks_differ_but_for_forward_and_backward() {
    let mut forward = dropout::insert(&import(LLAMA, DType::F64).graph, RATES);
    forward.set_batch(2);
    let graph = differentiate(&forward).unwrap();
    let feed = Feed::new(&graph, None, 2, SEED).unwrap();
    let mut seen: Vec<Vec<bool>> = Vec::new();
    // Step 0 and 1 of a batch of 4 in micro-batches of 2.
    for draws in [0, 2, 4, 6].map(|sequences| DRAWS.after(sequences)) {
        let run = GraphRun::drawing(&graph, &init::params(&graph, SEED), &inputs(&graph, &feed, 0), 0.1, draws);
        let kept = |node: NodeId| {
            let (x, y) = (run.get(graph.nodes[node].inputs[0]), run.get(graph.nodes[node].outputs[0]));
            assert!(x.data.iter().all(|&x| x != 0.0), "nothing is zero before it is dropped");
            y.data.iter().map(|&y| y != 0.0).collect::<Vec<bool>>()
        };
        for (id, node) in graph.nodes.iter().filter(|(_, n)| matches!(n.op, Op::Dropout { .. })) {
            if node.origin == id {
                seen.push(kept(id));
            } else {
                assert_eq!(kept(id), kept(node.origin));
            }
        }
    }
    assert_eq!(seen.len(), 4 * 5);
    let all = seen.len();
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), all);
}

fn compile_cli(dir: &Path, config: &str, pins: &str, more: &[&str]) -> String {
    let (model, plan) = (dir.join("config.json"), dir.join("plan.json"));
    std::fs::write(&model, config).unwrap();
    let (model, plan) = (model.to_str().unwrap(), plan.to_str().unwrap());
    let args = ["compile", model, "--cluster", "cpu:2", "--batch", "8", "--seq", "8", "--precision", "f64", "--pin", pins, "-o", plan];
    let output = common::dplan(&[&args[..], more].concat());
    format!("{:?} {}", output.status.code(), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn a_run_with_dropout_is_resumed_as_if_nothing_had_happened() {
    let dir = common::scratch("dropout-run");
    let (plan, ckpt) = (dir.join("plan.json"), dir.join("ckpt"));
    let (plan, ckpt) = (plan.to_str().unwrap(), ckpt.to_str().unwrap());
    let run = |steps: &str, more: &[&str]| {
        let text = common::dplan_ok(&[&["run", plan, "--steps", steps, "--json"][..], more].concat());
        common::json_lines(&text).iter().filter_map(|l| l["loss"].as_f64()).collect::<Vec<f64>>()
    };
    let compiled = |pins: &str, more: &[&str]| {
        let said = compile_cli(&dir, LLAMA, pins, more);
        assert!(said.starts_with("Some(0)"), "{pins}: {said}");
    };
    compiled("dp=2,zero=1", &["--dropout", "0.1"]);
    let whole = run("6", &["--seed", "5"]);
    run("3", &["--seed", "5", "--checkpoint", ckpt]);
    assert_eq!(run("6", &["--resume", ckpt]), whole[3..]);
    // Under other plans, the dropout of which is that of the model.
    for pins in ["tp=2,recompute=full", "pp=2,micro=1", "cp=2"] {
        compiled(pins, &["--dropout", "0.1"]);
        let again = run("6", &["--resume", ckpt]);
        assert!(again.len() == 3 && again.iter().zip(&whole[3..]).all(|(x, y)| (x / y - 1.0).abs() < 1e-12), "{pins}: {again:?} is not {whole:?}");
    }
    compiled("dp=2,zero=1", &[]);
    assert!(run("3", &["--seed", "5"]).iter().zip(&whole).all(|(x, y)| x != y));
}

/// What configs of the families ask for, and what `compile` then says: nothing is dropped unless the flag says so.
#[test]
fn dropout_is_asked_for_by_a_flag() {
    let gpt2 = r#"{"model_type":"gpt2","vocab_size":37,"n_embd":24,"n_layer":2,"n_head":4,"n_positions":16"#;
    let dir = common::scratch("dropout-flag");
    for (config, flags, said) in [
        (
            format!("{gpt2}}}"),
            &[][..],
            "Some(0) note: the config asks for dropout (resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1): there is none without --dropout",
        ),
        (format!("{gpt2}}}"), &["--dropout", "config"], "attn_pdrop 0.1), which dplan cannot"),
        (
            format!(r#"{gpt2},"attn_pdrop":0,"embd_pdrop":0.2}}"#),
            &["--dropout", "config"],
            "Some(0) note: dropout 0.2 of the embedding and 0.1 of the terms of residual streams, in 5 places",
        ),
        (format!("{gpt2}}}"), &["--dropout", "0.3"], "Some(0) note: dropout 0.3 of the embedding and 0.3 of the terms"),
        (format!("{gpt2}}}"), &["--dropout", "1"], "`1` is no rate from 0 to less than 1"),
        (LLAMA.into(), &["--dropout", "config"], "Some(0) note: dropout 0: nothing is dropped"),
        (format!(r#"{gpt2},"resid_pdrop":1.5}}"#), &[], "`$.resid_pdrop` is 1.5; it should be a rate of dropout, from 0 to less than 1"),
    ] {
        let found = compile_cli(&dir, &config, "dp=2", flags);
        assert!(found.contains(said) && found.starts_with("Some(2)") != said.starts_with("Some(0)"), "{config} {flags:?}\n{found}");
    }
}

/// Attention and feed-forward side by side are dropped each for itself, as in the families' own training.
#[test]
fn each_term_of_a_residual_stream_is_dropped() {
    let neox = r#"{"model_type":"gpt_neox","vocab_size":37,"hidden_size":32,"intermediate_size":40,"num_hidden_layers":3,"num_attention_heads":2,"max_position_embeddings":16,"hidden_dropout":0.2,"attention_dropout":0.1}"#;
    let bert = r#"{"model_type":"bert","vocab_size":37,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":3,"num_attention_heads":6,"max_position_embeddings":16}"#;
    let vit = r#"{"model_type":"vit","image_size":8,"patch_size":4,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":3,"num_attention_heads":6,"num_labels":4}"#;
    for (config, asked, attention) in [(neox, 0.2, 0.1), (bert, 0.1, 0.1), (vit, 0.0, 0.0)] {
        let seq = (config != vit).then_some(8);
        let options = ImportOptions { seq, compute: DType::F64, family: None };
        let model = model_from_bytes("config.json", config.as_bytes(), &options).unwrap();
        assert_eq!((model.dropout.rates, model.dropout.attention), (Rates { embedding: asked, residual: asked }, attention));
        let dropped = dropout::insert(&model.graph, RATES);
        assert_eq!(rates(&dropped), [vec![RATES.embedding], vec![RATES.residual; 6]].concat(), "{config}");
        assert_eq!(dplan_ir::verify::verify_graph(&dropped), []);
        assert_eq!(dropped.param_count(), model.graph.param_count());
    }
}
