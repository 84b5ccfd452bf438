//! PyTorch's golden training runs, reproduced from the command line under many plans.
//!
//! Tolerances are what float32 noise allows with a margin (correct code was measured at 1e-6 / 8e-6 / 1e-6 / 3e-5; a wrong GELU shows 2.6e-5 in gradients).

mod common;

use common::{PLANS, dplan_ok, json_lines, reference, scratch, tensors, worst_tensor_error};
use std::path::Path;

struct Tolerance {
    loss: f64,
    norm: f64,
    grads: f64,
    last: f64,
}

const EXACT: Tolerance = Tolerance { loss: 1e-5, norm: 5e-5, grads: 1e-5, last: 3e-4 };
/// Gradients that are rounded to bf16 for their exchange and nothing else; what AdamW makes of signs of small ones shows in the weights.
const ROUNDED: Tolerance = Tolerance { loss: 2e-3, norm: 1e-2, grads: 4e-3, last: 5e-2 };

fn check(arch: &str) {
    let plans: Vec<_> = PLANS.iter().filter(|p| arch == "mixtral" || !p.2.contains("ep=")).copied().collect();
    check_under(arch, &plans, &EXACT);
}

/// Under plans, as names, ranks and pins; the largest error of a gradient.
fn check_under(arch: &str, plans: &[(&str, u32, &str)], within: &Tolerance) -> Option<f64> {
    let mut worst: Option<f64> = None;
    let oracle = reference(&format!("oracle/{arch}"))?;
    let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(oracle.join("expected.json")).unwrap()).unwrap();
    let series = |key: &str| expected[key].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect::<Vec<_>>();
    let (losses, norms) = (series("loss_per_step"), series("grad_norm_before_clip_per_step"));
    let (grads, last) = (tensors(&oracle.join("grads_step0.safetensors")), tensors(&oracle.join("final.safetensors")));
    let dir = scratch(&format!("oracle-{arch}-{}", plans.len()));
    let mut wrong = Vec::new();
    for (name, ranks, pins) in plans {
        let (plan, g, f) = (dir.join("plan.json"), dir.join("grads.safetensors"), dir.join("final.safetensors"));
        let path = |p: &Path| p.to_str().unwrap().to_string();
        let cluster = format!("cpu:{ranks}");
        let config = path(&oracle.join("config.json"));
        dplan_ok(&["compile", &config, "--cluster", &cluster, "--batch", "8", "--seq", "32", "--pin", pins, "-o", &path(&plan)]);
        let out = dplan_ok(&[
            "run",
            &path(&plan),
            "--data",
            &path(&oracle.join("tokens.json")),
            "--init",
            &path(&oracle.join("weights.safetensors")),
            "--steps",
            "6",
            "--lr",
            "0.003",
            "--betas",
            "0.9,0.95",
            "--eps",
            "1e-8",
            "--weight-decay",
            "0.1",
            "--clip",
            "1.0",
            "--save-grads",
            &path(&g),
            "--save",
            &path(&f),
            "--json",
        ]);
        let lines = json_lines(&out);
        for (step, line) in lines.iter().filter(|l| l.get("step").is_some()).enumerate() {
            let (loss, norm) = (line["loss"].as_f64().unwrap(), line["grad_norm"].as_f64().unwrap());
            if (loss - losses[step]).abs() > within.loss {
                wrong.push(format!("{name}: loss of step {step} is {loss}, PyTorch has {}", losses[step]));
            }
            if (norm - norms[step]).abs() / norms[step] > within.norm {
                wrong.push(format!("{name}: gradient norm of step {step} is {norm}, PyTorch has {}", norms[step]));
            }
        }
        assert_eq!(lines.iter().filter(|l| l.get("step").is_some()).count(), losses.len());
        for (what, ours, reference, tolerance) in [("gradient", &g, &grads, within.grads), ("final weight", &f, &last, within.last)] {
            let (error, tensor) = worst_tensor_error(&tensors(ours), reference);
            if what == "gradient" {
                println!("{arch}, {name}: gradients within {error:.1e}");
                worst = Some(worst.unwrap_or(0.0).max(error));
            }
            if error > tolerance {
                wrong.push(format!("{name}: {what} {tensor} is off by {error:.1e}, more than {tolerance:.0e}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{arch}:\n{}", wrong.join("\n"));
    worst
}

#[test]
fn gpt2_trains_as_in_pytorch() {
    check("gpt2");
}

#[test]
fn llama_trains_as_in_pytorch() {
    check("llama");
}

#[test]
fn llama_with_tied_embeddings_trains_as_in_pytorch() {
    check("llama-tied");
}

#[test]
fn mixtral_trains_as_in_pytorch() {
    check("mixtral");
}

/// Gradients that get to their sum in several steps or by way of servers, and ranks that are nested otherwise.
#[test]
fn sums_in_steps_and_other_nestings_train_as_in_pytorch() {
    let plans = [
        ("dp4 zero0 hierarchical", 4, "dp=4,tp=1,pp=1,zero=0,sync=hierarchical:2"),
        ("dp4 zero3 hierarchical", 4, "dp=4,tp=1,pp=1,zero=3,sync=hierarchical:2"),
        ("dp8 zero1 tree", 8, "dp=8,tp=1,pp=1,zero=1,sync=tree"),
        ("dp2 cp2 tp2 zero2 tree", 8, "dp=2,cp=2,tp=2,pp=1,zero=2,sync=tree,map=tp.cp.dp"),
        ("dp4 zero1 server", 4, "dp=4,tp=1,pp=1,zero=1,sync=server"),
        ("dp2 tp2 zero0 server", 4, "dp=2,tp=2,pp=1,zero=0,sync=server,map=tp.dp"),
    ];
    check_under("llama-tied", &plans, &EXACT);
}

/// How far rounding for the exchange alone goes: two to three thousandths of a gradient.
#[test]
fn gradients_on_a_wire_in_bf16_come_as_close_as_that_allows() {
    let plans = [("dp4 zero1 bf16 wire", 4, "dp=4,tp=1,pp=1,zero=1,wire=bf16"), ("dp2 tp2 zero0 bf16 wire", 4, "dp=2,tp=2,pp=1,zero=0,wire=bf16")];
    if let Some(worst) = check_under("llama-tied", &plans, &ROUNDED) {
        assert!(worst > 1e-3, "{worst:e}: nothing was rounded");
    }
}
