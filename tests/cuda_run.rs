//! `dplan run --device cuda` as a user starts it, on stand-ins for CUDA's libraries: the binary opens them, compiles kernels, captures, trains, and gives back.

mod common;
#[path = "common/stand_in.rs"]
mod stand_in;

use std::path::Path;
use std::process::{Command, Output};

use common::{dplan_ok, json_lines, residual_block, scratch};
use dplan::planfile::PlanFile;
use dplan::runtime::cuda::load::{Action, load};
use dplan_ir::optimizer::DecayGroups;
use dplan_ir::program::{Call, Instr, Issue, Stream};
use dplan_kernels::cuda::Target;
use dplan_kernels::cuda::arch::Arch;
use stand_in::stand_in;

const SIZES: [u64; 4] = [6, 31, 24, 40];

fn run(args: &[&str], environment: &[(&str, String)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dplan"));
    command.args(args).envs(environment.iter().map(|(name, value)| (name, value))).output().unwrap()
}

/// The steps that a run printed: loss and norm.
fn steps(output: &Output) -> Vec<[f64; 2]> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = json_lines(&String::from_utf8_lossy(&output.stdout));
    lines.iter().filter(|line| line["step"].is_u64()).map(|line| ["loss", "grad_norm"].map(|key| line[key].as_f64().unwrap())).collect()
}

/// The profile has every instruction that does something by itself, and lies over the plan.
fn is_compared(plan: &str, profile: &str, offload: &str) {
    let file = PlanFile::read(Path::new(plan)).unwrap();
    let stage = &file.program.stages[0];
    let code = load(&file.graph, &file.program, 0, 0, DecayGroups::All, Target::of(Arch::Sm80)).unwrap();
    let within = |actions: &[(Stream, Action)]| actions.iter().filter(|(_, action)| matches!(action, Action::Within(_))).count();
    let followed = |call: &Call| within(&code.segments[call.segment.0 as usize]);
    let followed: usize = stage.schedule.iter().map(followed).sum();
    assert!(followed > 0);
    let does = |issue: &&Issue| !matches!(issue.instr, Instr::Record(_) | Instr::Wait(_));
    let of_step: usize = stage.schedule.iter().map(|call| stage.segments[call.segment].body.iter().filter(does).count()).sum();
    let trace: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(profile).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |category: &str| events.iter().filter(|e| e["cat"] == category).count();
    assert_eq!(of("compute") + of("copy"), 3 * (of_step - followed));
    assert_eq!(of("copy") > 0, offload != "none");
    assert!(events.iter().all(|e| e["dur"].as_f64().is_none_or(|d| d >= 0.0)));
    let said = dplan_ok(&["compare", plan, profile]);
    assert!(said.contains("step"), "{said}");
}

/// A plan of several ranks, all on one GPU.
#[test]
fn ranks_share_a_gpu() {
    let Some(environment) = stand_in("8") else { return };
    let dir = scratch("cuda_run_together");
    let (model, plan) = (dir.join("model.json"), dir.join("plan.json").display().to_string());
    std::fs::write(&model, residual_block(SIZES, "table")).unwrap();
    dplan_ok(&[
        "compile",
        &model.display().to_string(),
        "--cluster",
        "cpu:2",
        "--batch",
        "4",
        "--precision",
        "f32",
        "--pin",
        "dp=2,micro=2",
        "-o",
        &plan,
    ]);
    let cpu = steps(&run(&["run", &plan, "--steps", "3", "--json"], &environment));
    let cuda = steps(&run(&["run", &plan, "--steps", "3", "--json", "--device", "cuda", "--together"], &environment));
    assert!(
        cuda.len() == 3 && cuda.iter().flatten().zip(cpu.iter().flatten()).all(|(a, b)| (a / b - 1.0).abs() < 1e-5),
        "{cuda:?}, on CPU ranks {cpu:?}"
    );
    let alone = run(&["run", &plan, "--steps", "1", "--device", "cuda"], &environment);
    assert!(!alone.status.success() && String::from_utf8_lossy(&alone.stderr).contains("--together"), "{}", String::from_utf8_lossy(&alone.stderr));
}

#[test]
fn one_rank_trains_on_a_gpu_as_on_the_cpu() {
    let Some(environment) = stand_in("8") else { return };
    let dir = scratch("cuda_run");
    let (model, plan) = (dir.join("model.json"), dir.join("plan.json").display().to_string());
    std::fs::write(&model, residual_block(SIZES, "table")).unwrap();
    for offload in ["none", "parameters", "parameters:nvme"] {
        let pins = format!("micro=2,offload={offload}");
        dplan_ok(&["compile", &model.display().to_string(), "--cluster", "cpu:1", "--batch", "4", "--precision", "f32", "--pin", &pins, "-o", &plan]);
        let weights = ["cpu", "cuda"].map(|device| dir.join(format!("{device}.safetensors")));
        let of = |device: usize| {
            let save = weights[device].display().to_string();
            let scratch = dir.display().to_string();
            run(&["run", &plan, "--device", ["cpu", "cuda"][device], "--steps", "4", "--json", "--scratch", &scratch, "--save", &save], &environment)
        };
        let [cpu, cuda] = [0, 1].map(|device| steps(&of(device)));
        assert_eq!((cpu.len(), cuda.len()), (4, 4));
        for (found, right) in cuda.iter().flatten().zip(cpu.iter().flatten()) {
            assert!((found / right - 1.0).abs() < 1e-5, "{offload}: {cuda:?}, on CPU ranks {cpu:?}");
        }
        let [cpu, cuda] = weights.map(|path| std::fs::read(path).unwrap());
        assert_eq!(cpu.len(), cuda.len());
        let out = dir.join("out.json").display().to_string();
        steps(&run(&["run", &plan, "--device", "cuda", "--steps", "3", "--json", "--profile", &out], &environment));
        is_compared(&plan, &out, offload);
        println!("{offload}: losses and norms of 4 steps as on CPU ranks");
    }
}
