//! `dplan kernels`: every kernel of plans of real models becomes machine code that fits, with no GPU.

mod common;

use std::collections::BTreeSet;
use std::path::Path;
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

/// A model, where it lies, its cluster and batch, and its tensor-parallel degrees.
type Row = (&'static str, &'static str, &'static str, &'static [u64]);
const MODELS: [Row; 8] = [
    ("oracle/gpt2", "h100:8", "64", &[1, 2]),
    ("oracle/llama", "h100:8", "64", &[1, 2]),
    ("oracle/llama-tied", "h100:8", "64", &[1, 2]),
    ("oracle/mixtral", "h100:8", "64", &[1, 2]),
    ("models/gpt2.json", "h100:8", "64", &[1, 2, 8]),
    ("models/llama-3.1-8b.json", "h100:8x2", "64", &[1, 2, 8]),
    ("models/qwen3-8b.json", "h100:8x2", "64", &[1, 2, 8]),
    ("models/mixtral-8x7b.json", "h100:8x8", "128", &[1, 2, 8]),
];

/// One kernel of a plan, as `dplan kernels` describes and writes it.
struct Kernel {
    row: serde_json::Value,
    text: String,
    ptx: String,
}

/// Compiles a plan in bf16, and its kernels for an architecture.
fn kernels((model, cluster, batch, _): Row, tp: u64, arch: Arch, cache: &Path) -> Option<Vec<Kernel>> {
    let path = common::reference(model)?.display().to_string();
    let dir = common::scratch(&format!("kernels_{}_{tp}_{}", model.replace(['/', '.'], "_"), arch.name()));
    let (plan, out) = (dir.join("plan.json").display().to_string(), dir.join("out"));
    common::dplan_ok(&["compile", &path, "--cluster", cluster, "--batch", batch, "--precision", "bf16", "--pin", &format!("tp={tp}"), "-o", &plan]);
    let args = ["kernels", &plan, "--arch", arch.name(), "--json"];
    let run = run(&[&args[..], &["-o", &out.display().to_string()]].concat(), cache);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let kernel = |row: serde_json::Value| {
        let file = |ending: &str| out.join(format!("{}.{ending}", row["name"].as_str().unwrap()));
        assert!(std::fs::metadata(file("cubin")).is_ok_and(|m| m.len() > 0), "{row}");
        let [text, ptx] = ["cu", "ptx"].map(|ending| std::fs::read_to_string(file(ending)).unwrap());
        Kernel { row, text, ptx }
    };
    let made = common::json_lines(&String::from_utf8_lossy(&run.stdout)).into_iter().map(kernel).collect();
    // Once more: nothing is compiled again.
    let again = common::json_lines(&String::from_utf8_lossy(&self::run(&args, cache).stdout));
    assert!(!again.is_empty() && again.iter().all(|row| row["cached"] == true), "{model} tp {tp} {}: kernels that were not kept", arch.name());
    Some(made)
}

fn run(args: &[&str], cache: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dplan")).args(args).env("DPLAN_CACHE", cache).output().expect("the binary was built with the tests")
}

/// What a text asks for is in its PTX: matrix units, asynchronous copies, Hopper's copy engine and warpgroups; and on Hopper alone the last.
fn asks_for(kernel: &Kernel, arch: Arch) {
    let has = |what: &str| kernel.ptx.contains(what);
    let name = kernel.row["name"].as_str().unwrap();
    let asynchronous = kernel.text.contains("constexpr bool ASYNC = true;");
    let by_warps = name.starts_with("gemm_mma") || kernel.text.contains("dp_mma_16816<elem>(");
    assert_eq!(has("mma.sync.aligned.m16n8k16.row.col.f32.bf16"), by_warps, "{name}");
    assert_eq!(has("ldmatrix.sync.aligned.m8n8.x4"), by_warps, "{name}");
    assert_eq!(has("cp.async.cg.shared.global"), by_warps && asynchronous, "{name}");
    let by_warpgroups = name.starts_with("gemm_wgmma");
    assert_eq!(has("wgmma.mma_async.sync.aligned.m64n"), by_warpgroups, "{name}");
    assert_eq!(has("cp.async.bulk.tensor.3d.shared::cluster.global"), by_warpgroups, "{name}");
    assert!(!by_warpgroups || arch == Arch::Sm90a, "{name} for {}", arch.name());
}

/// Checks every kernel of a plan; how many there are.
fn all_fit(row: Row, tp: u64, arch: Arch, cache: &Path) -> usize {
    let Some(all) = kernels(row, tp, arch, cache) else { return 0 };
    let (limits, model, of) = (arch.limits(), row.0, arch.name());
    for kernel in &all {
        let number = |key: &str| kernel.row[key].as_u64().unwrap();
        assert_eq!(number("spill_bytes"), 0, "{model} tp {tp} {of}: {}", kernel.row);
        let fits = number("registers") * number("threads") <= limits.registers && number("shared_bytes") <= limits.block_shared;
        assert!(fits, "{model} tp {tp} {of}: {}", kernel.row);
        asks_for(kernel, arch);
    }
    let families: BTreeSet<&str> = all.iter().map(|k| k.row["family"].as_str().unwrap()).collect();
    for family in ["gemm", "attention", "norm", "loss", "optimizer", "embed", "scalar"] {
        assert!(families.contains(family), "{model} tp {tp} {of}: no {family} among {families:?}");
    }
    // Heads of real models are of widths that matrix units take, and so are all of their products.
    let units = |k: &&Kernel| ["gemm_mma", "gemm_wgmma", "attention_grad"].iter().any(|n| k.row["name"].as_str().unwrap().starts_with(n));
    let plain = all.iter().filter(|k| k.text.contains("dp_gemm_plain)(") || k.text.contains("dp_dot<D>(")).count();
    assert!(
        all.iter().filter(units).count() > 2 && (model.starts_with("oracle") || plain == 0),
        "{model} tp {tp} {of}: {plain} without matrix units"
    );
    let most = |key: &str| all.iter().map(|k| k.row[key].as_f64().unwrap()).fold(0.0, f64::max);
    println!("{model:26} tp {tp} {of:7} {:3} kernels, slowest made or found in {:.3} s", all.len(), most("compile_seconds"));
    all.len()
}

/// Every kernel of plans of all models: each model under one degree for one architecture, all of them in turn; `DPLAN_KERNELS=all` under each degree for each.
#[test]
fn kernels_of_all_plans_fit() {
    if !nvrtc() {
        return;
    }
    let whole = std::env::var_os("DPLAN_KERNELS").is_some_and(|v| v == "all");
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernel_cache");
    let (mut nth, mut checked) = (0, 0);
    for (at, row) in MODELS.into_iter().enumerate() {
        for (degree, &tp) in row.3.iter().enumerate() {
            for (of, arch) in Arch::ALL.into_iter().enumerate() {
                // Degrees of the last four go with their place, so that each comes up, and each architecture with large models, too.
                if whole || (degree == at % row.3.len() && of == (at + at / 4) % Arch::ALL.len()) {
                    nth += 1;
                    checked += all_fit(row, tp, arch, &cache);
                }
            }
        }
    }
    println!("{checked} kernels of {nth} plans and architectures fit");
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
