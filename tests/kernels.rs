//! `dplan kernels`: every kernel of plans of real models becomes machine code that fits, with no GPU.

mod common;

use std::process::{Command, Output};

use dplan_kernels::jit::{Arch, JitError, Nvrtc};

/// Whether NVRTC is there; said aloud if not.
fn nvrtc() -> bool {
    match Nvrtc::open() {
        Ok(_) => true,
        Err(error @ JitError::Absent { .. }) => {
            eprintln!("SKIPPED: {error}");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// Compiles a plan in bf16 and its kernels; the JSON line of each.
fn kernels(model: &std::path::Path, cluster: &str, pins: &str, arch: &str) -> Vec<serde_json::Value> {
    let dir = common::scratch(&format!("kernels_{}_{arch}", pins.replace([',', '='], "_")));
    let plan = dir.join("plan.json").display().to_string();
    let model = model.display().to_string();
    common::dplan_ok(&["compile", &model, "--cluster", cluster, "--batch", "64", "--precision", "bf16", "--pin", pins, "-o", &plan]);
    let (out, cache) = (dir.join("out"), std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernel_cache"));
    let run = run(&["kernels", &plan, "--arch", arch, "-o", &out.display().to_string(), "--json"], &cache);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let rows = common::json_lines(&String::from_utf8_lossy(&run.stdout));
    for row in &rows {
        let file = |ending: &str| std::fs::metadata(out.join(format!("{}.{ending}", row["name"].as_str().unwrap()))).is_ok_and(|m| m.len() > 0);
        assert!(["cu", "ptx", "cubin"].into_iter().all(file), "{row}");
    }
    // What the matrix units are for is computed on them.
    let ptx: String = rows.iter().map(|r| std::fs::read_to_string(out.join(format!("{}.ptx", r["name"].as_str().unwrap()))).unwrap()).collect();
    for instruction in ["mma.sync.aligned.m16n8k16.row.col.f32.bf16", "cp.async.cg.shared.global", "ldmatrix.sync.aligned.m8n8.x4.trans"] {
        assert!(ptx.contains(instruction), "no {instruction}");
    }
    // Hopper's are on Hopper alone.
    for instruction in ["wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16", "cp.async.bulk.tensor.3d.shared::cluster.global"] {
        assert_eq!(ptx.contains(instruction), arch == "sm_90a", "{instruction} for {arch}");
    }
    rows
}

fn run(args: &[&str], cache: &std::path::Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dplan")).args(args).env("DPLAN_CACHE", cache).output().expect("the binary was built with the tests")
}

fn all_fit(model: &str, cluster: &str, pins: &str, arch: Arch) {
    if !nvrtc() {
        return;
    }
    let Some(path) = common::reference(&format!("models/{model}.json")) else { return };
    let (rows, limits, arch) = (kernels(&path, cluster, pins, arch.name()), arch.limits(), arch.name());
    for row in &rows {
        let number = |key: &str| row[key].as_u64().unwrap();
        assert_eq!(number("spill_bytes"), 0, "{model} {pins}: {row}");
        assert!(
            number("registers") * number("threads") <= limits.registers && number("shared_bytes") <= limits.block_shared,
            "{model} {pins}: {row}"
        );
    }
    let families: std::collections::BTreeSet<&str> = rows.iter().map(|r| r["family"].as_str().unwrap()).collect();
    for family in ["gemm", "attention", "norm", "loss", "optimizer", "embed", "scalar"] {
        assert!(families.contains(family), "{model} {pins}: no {family} among {families:?}");
    }
    println!("{model} {pins} {arch}: {} kernels", rows.len());
}

#[test]
fn kernels_of_llama_fit() {
    all_fit("llama-3.1-8b", "h100:8", "tp=2", Arch::Sm90a);
}

#[test]
fn kernels_of_gpt2_fit() {
    all_fit("gpt2", "h100:8", "tp=1", Arch::Sm80);
}

#[test]
fn kernels_of_mixtral_fit() {
    all_fit("mixtral-8x7b", "h100:8x8", "tp=8", Arch::Sm100);
}

#[test]
fn a_machine_without_nvrtc_is_told_what_to_install() {
    let plan = common::scratch("kernels_absent").join("plan.json").display().to_string();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/llama-1m/config.json");
    common::dplan_ok(&["compile", model, "--cluster", "cpu:1", "--batch", "8", "-o", &plan]);
    let output = Command::new(env!("CARGO_BIN_EXE_dplan")).args(["kernels", &plan]).env("DPLAN_NVRTC", "/nowhere/libnvrtc.so").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("pip install nvidia-cuda-nvrtc-cu12") && stderr.contains("/nowhere/libnvrtc.so"), "{stderr}");
}
