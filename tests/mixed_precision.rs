//! bf16 and f16 plans on CPU ranks: parameters and activations are rounded, master copies, gradients, moments, norms' statistics and the loss are f32.
//!
//! Rounding a number to bf16 changes it by at most 2⁻⁸ of itself (f16: 2⁻¹¹), so losses stay near those of f32, and differ between splits, since partial sums are
//! rounded at other places; the same plan has the same bits. What is too small or too large for f16 is a matter of the loss scale.

mod common;

use common::options;
use dplan::checkpoint::find;
use dplan::compile::compile;
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::runtime::loss_scale::{LossScale, Outcome};
use dplan::runtime::{Options as RunOptions, Session};
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::program::Role;
use serde_json::Value;
use std::sync::Arc;

const STEPS: u64 = 8;

const DENSE: &str = r#"{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 16, "tie_word_embeddings": true}"#;
const EXPERTS: &str = r#"{"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": 61, "max_position_embeddings": 16, "num_local_experts": 4, "num_experts_per_tok": 2}"#;

/// A session of a plan at its initial weights, and the feed of its data.
fn session(config: &str, ranks: u64, compute: DType, pins: &str) -> (Session, Feed) {
    let model = model_from_bytes("config.json", config.as_bytes(), &ImportOptions { seq: Some(16), compute, family: None }).unwrap();
    let options = options(&format!("cpu:{ranks}"), 8, compute, pins);
    let file = compile(&model.graph, &options).unwrap_or_else(|e| panic!("{pins}: {e}")).file;
    let feed = Feed::new(&file.graph, None, file.plan.batch(), 1).unwrap();
    let mut session = Session::new(file.graph.clone(), file.program.clone(), &RunOptions::default()).unwrap();
    session.initialise(1).unwrap();
    (session, feed)
}

const HYPER: Hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };

/// Losses of the first steps, and all parameters after them.
fn train(config: &str, ranks: u64, compute: DType, pins: &str) -> (Vec<f64>, Vec<Vec<f64>>) {
    let (mut session, feed) = session(config, ranks, compute, pins);
    // The same rows over and over, so that there is something to learn.
    let batch = Arc::new(feed.batch(0).unwrap());
    let loss_scale = if compute.scales_loss() { LossScale::default().value() } else { 1.0 };
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let scalars = StepScalars { loss_scale, ..StepScalars::new(HYPER, step + 1, 1.0 / feed.targets() as f64) };
        let result = session.step(&scalars, &batch).unwrap();
        assert!(result.grad_norm.is_some_and(f64::is_finite), "{pins}: {result:?}");
        losses.push(result.loss);
    }
    let params = session.gather(Role::Param).unwrap();
    (losses, params.values().cloned().collect())
}

#[test]
fn plans_of_sixteen_bits_train_like_f32() {
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
            for compute in [DType::Bf16, DType::F16] {
                let (losses, params) = train(config, ranks, compute, pins);
                for (step, (a, b)) in losses.iter().zip(&exact).enumerate() {
                    let near = if compute == DType::F16 { 0.004 } else { 0.02 };
                    assert!((a - b).abs() < near * b, "{compute} {pins} step {step}: {losses:?} against {exact:?}");
                }
                assert!(losses.iter().zip(&exact).any(|(a, b)| a != b), "{compute} {pins}: nothing was rounded");
                // Masters are finer than either.
                let fine = params.iter().flatten().filter(|&&x| (x as f32).to_bits() & 0x1fff != 0).count();
                assert!(fine > 1000, "{compute} {pins}: {fine} parameters with more bits than 16-bit types have");
            }
        }
    }
}

#[test]
fn the_same_plan_of_sixteen_bits_has_the_same_bits() {
    for compute in [DType::Bf16, DType::F16] {
        let run = || train(DENSE, 4, compute, "dp=2,tp=2,zero=3");
        assert_eq!(run(), run());
    }
}

/// All that training changes, as bits.
fn state(session: &mut Session) -> Vec<u64> {
    let roles = [Role::Param, Role::Master, Role::Moment1, Role::Moment2];
    roles.map(|r| session.gather(r).unwrap()).iter().flat_map(|t| t.values().flatten().map(|x| x.to_bits()).collect::<Vec<_>>()).collect()
}

#[test]
fn a_step_that_overflows_changes_nothing() {
    for (ranks, pins) in [(1, "dp=1,tp=1"), (4, "dp=4,zero=3"), (4, "dp=2,pp=2,zero=1"), (4, "tp=2,cp=2")] {
        let (mut session, feed) = session(DENSE, ranks, DType::F16, pins);
        let batch = Arc::new(feed.batch(0).unwrap());
        let step = |session: &mut Session, update: u64, exponent: i32| {
            let scalars = StepScalars { loss_scale: f64::from(exponent).exp2(), ..StepScalars::new(HYPER, update, 1.0 / feed.targets() as f64) };
            session.step(&scalars, &batch).unwrap()
        };
        step(&mut session, 1, 16);
        let before = state(&mut session);
        let overflowed = step(&mut session, 2, 60);
        assert!(overflowed.loss.is_finite() && overflowed.grad_norm.is_some_and(|n| !n.is_finite()), "{pins}: {overflowed:?}");
        assert!(state(&mut session) == before, "{pins}: a skipped step left a trace");
        // The next step is as if there had been none.
        let next = step(&mut session, 2, 15);
        assert!(next.grad_norm.is_some_and(f64::is_finite) && state(&mut session) != before, "{pins}: {next:?}");
        assert_eq!(next.loss, overflowed.loss, "{pins}");
    }
}

#[test]
fn without_a_loss_scale_small_gradients_are_lost() {
    // Gradients of so many tokens' mean, as a large batch has them, in a type whose least number is 6e-8.
    let norm = |compute, loss_scale| {
        let (mut session, feed) = session(DENSE, 1, compute, "dp=1,tp=1");
        let scalars = StepScalars { loss_scale, ..StepScalars::new(HYPER, 1, 1e-9) };
        session.step(&scalars, &Arc::new(feed.batch(0).unwrap())).unwrap().grad_norm.unwrap()
    };
    let exact = norm(DType::F32, 1.0);
    assert_eq!(norm(DType::F16, 1.0), 0.0);
    assert!((norm(DType::F16, f64::from(30).exp2()) / exact - 1.0).abs() < 0.02);
}

#[test]
fn an_f16_run_finds_its_loss_scale_and_a_checkpoint_keeps_it() {
    let dir = common::scratch("f16-run");
    let (plan, ckpt) = (common::small_plan(&dir, "dp=2,zero=1", 2, "f16"), dir.join("ckpt"));
    let (plan, ckpt) = (plan.to_str().unwrap(), ckpt.to_str().unwrap());
    let run = |steps: &str, more: &[&str]| {
        let fixed = [
            "run",
            plan,
            "--steps",
            steps,
            "--lr",
            "0.01",
            "--json",
            "--loss-scale-window",
            "4",
            "--checkpoint",
            ckpt,
            "--keep",
            "99",
            "--every",
            "7",
        ];
        common::json_lines(&common::dplan_ok(&[&fixed[..], more].concat())).into_iter().filter(|l| l["loss"].is_number()).collect::<Vec<Value>>()
    };
    let scales = |lines: &[Value]| lines.iter().map(|l| (l["loss_scale"].as_f64().unwrap(), l["overflow"] == true)).collect::<Vec<_>>();
    let whole = run("24", &["--loss-scale", "1073741824"]);
    // It falls until nothing overflows, and rises when that has lasted.
    let mut scale = LossScale::from_value(1073741824.0).unwrap();
    for &(found, overflow) in &scales(&whole) {
        assert_eq!(found, scale.value(), "{:?}", scales(&whole));
        scale = scale.after(if overflow { Outcome::Overflow } else { Outcome::Finite }, 4);
    }
    let skipped = whole.iter().filter(|l| l["overflow"] == true).count();
    assert!((3..20).contains(&skipped) && whole[0]["overflow"] == true, "{:?}", scales(&whole));
    // While steps are skipped, nothing is learned, nor forgotten.
    let position = find(std::path::Path::new(ckpt)).unwrap().checkpoint.position();
    assert_eq!((position.step, position.updates, position.loss_scale), (24, 24 - skipped as u64, scale));
    let from = format!("{ckpt}/step-00000007");
    let other = dir.join("other");
    let resumed = common::dplan_ok(&[
        "run",
        plan,
        "--steps",
        "24",
        "--lr",
        "0.01",
        "--json",
        "--loss-scale-window",
        "4",
        "--resume",
        &from,
        "--checkpoint",
        other.to_str().unwrap(),
    ]);
    let resumed: Vec<Value> = common::json_lines(&resumed).into_iter().filter(|l| l["loss"].is_number()).collect();
    let said = |lines: &[Value]| lines.iter().map(|l| (l["loss"].as_f64().unwrap(), l["loss_scale"].as_f64())).collect::<Vec<_>>();
    assert_eq!(said(&resumed), said(&whole[7..]));
}
