//! bf16 plans on CPU ranks: parameters and activations are rounded, master copies, gradients, moments, norms' statistics and the loss are f32.
//!
//! Rounding a number to bf16 changes it by at most 2⁻⁸ of itself, so losses stay near those of f32, and differ between splits, since partial sums are
//! rounded at other places; the same plan has the same bits.

mod common;

use common::options;
use dplan::compile::compile;
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::runtime::{Options as RunOptions, Session};
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::program::Role;
use std::sync::Arc;

const STEPS: u64 = 8;

const DENSE: &str = r#"{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 16, "tie_word_embeddings": true}"#;
const EXPERTS: &str = r#"{"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": 61, "max_position_embeddings": 16, "num_local_experts": 4, "num_experts_per_tok": 2}"#;

/// Losses of the first steps, and all parameters after them.
fn train(config: &str, ranks: u64, compute: DType, pins: &str) -> (Vec<f64>, Vec<Vec<f64>>) {
    let model = model_from_bytes("config.json", config.as_bytes(), &ImportOptions { seq: Some(16), compute, family: None }).unwrap();
    let options = options(&format!("cpu:{ranks}"), 8, compute, pins);
    let file = compile(&model.graph, &options).unwrap_or_else(|e| panic!("{pins}: {e}")).file;
    let feed = Feed::new(&file.graph, None, file.plan.batch(), 1).unwrap();
    let mut session = Session::new(file.graph.clone(), file.program.clone(), &RunOptions::default()).unwrap();
    session.initialise(1).unwrap();
    let hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };
    // The same rows over and over, so that there is something to learn.
    let batch = Arc::new(feed.batch(0).unwrap());
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let scalars = StepScalars { hyper, step: step + 1, inv_tokens: 1.0 / feed.targets() as f64 };
        losses.push(session.step(&scalars, &batch).unwrap().loss);
    }
    let params = session.gather(Role::Param).unwrap();
    (losses, params.values().cloned().collect())
}

#[test]
fn bf16_plans_train_like_f32() {
    for (config, plans) in [
        (
            DENSE,
            &[(1, "dp=1,tp=1"), (2, "dp=2,zero=2"), (4, "dp=4,zero=3"), (4, "tp=2,pp=2,recompute=selective"), (4, "dp=2,tp=2,zero=1"), (2, "cp=2")][..],
        ),
        (EXPERTS, &[(4, "dp=2,tp=2,recompute=full"), (4, "dp=4,ep=2,zero=1")][..]),
    ] {
        let (exact, _) = train(config, 1, DType::F32, "dp=1,tp=1");
        assert!(exact[STEPS as usize - 1] < exact[0] - 0.5, "{exact:?}");
        for &(ranks, pins) in plans {
            let (losses, params) = train(config, ranks, DType::Bf16, pins);
            for (step, (a, b)) in losses.iter().zip(&exact).enumerate() {
                assert!((a - b).abs() < 0.02 * b, "{pins} step {step}: {losses:?} against {exact:?}");
            }
            assert!(losses.iter().zip(&exact).any(|(a, b)| a != b), "{pins}: nothing was rounded");
            // Masters are finer than bf16.
            let fine = params.iter().flatten().filter(|&&x| (x as f32).to_bits() & 0xffff != 0).count();
            assert!(fine > 1000, "{pins}: {fine} parameters with more bits than bf16 has");
        }
    }
}

#[test]
fn the_same_bf16_plan_has_the_same_bits() {
    let run = || train(DENSE, 4, DType::Bf16, "dp=2,tp=2,zero=3");
    assert_eq!(run(), run());
}
