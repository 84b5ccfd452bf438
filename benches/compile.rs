//! How long `dplan compile` takes as a whole process: search, lowering, verification and writing the plan. `cargo bench --bench compile` prints, for
//! each case, the median wall time of several runs beside the bound it should keep, and how the time grows with devices and with layers; it measures and does not judge.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

struct Case {
    name: &'static str,
    model: &'static str,
    args: &'static [&'static str],
    bound: f64,
}

const CASES: &[Case] = &[
    Case { name: "gpt2 on cpu:4", model: "gpt2-shaped.json", args: &["--cluster", "cpu:4"], bound: 0.3 },
    Case {
        name: "gpt3 175B on a100-80g:8x128",
        model: "gpt3-175b-shaped.json",
        args: &["--cluster", "a100-80g:8x128", "--seq", "2048", "--batch", "1536"],
        bound: 0.5,
    },
    Case {
        name: "mixtral 8x7B on h100:8x32",
        model: "mixtral-8x7b-shaped.json",
        args: &["--cluster", "h100:8x32", "--seq", "4096", "--batch", "1024"],
        bound: 2.0,
    },
    Case {
        name: "llama 405B on h100:8x2048",
        model: "llama-405b-shaped.json",
        args: &["--cluster", "h100:8x2048", "--seq", "8192", "--batch", "2048"],
        bound: 2.0,
    },
    Case {
        name: "qwen3 235B on h100:8x64",
        model: "qwen3-235b-shaped.json",
        args: &["--cluster", "h100:8x64", "--seq", "32768", "--batch", "512"],
        bound: 3.0,
    },
    Case {
        name: "deepseek v3 on h800:8x256",
        model: "deepseek-v3-shaped.json",
        args: &["--cluster", "h800:8x256", "--seq", "4096", "--batch", "15360"],
        bound: 3.0,
    },
];

const RUNS: usize = 5;

fn main() {
    // `cargo test --benches` runs this too: then one quick run shows that it works.
    let bench = std::env::args().any(|a| a == "--bench");
    println!("{:<28} {:>10} {:>10} {:>10} {:>8}", "compile", "median s", "min s", "max s", "bound s");
    for case in CASES.iter().take(if bench { CASES.len() } else { 1 }) {
        let mut times: Vec<f64> = (0..if bench { RUNS } else { 1 }).map(|_| compile(case.model, case.args)).collect();
        times.sort_by(f64::total_cmp);
        println!("{:<28} {:>10.3} {:>10.3} {:>10.3} {:>8.1}", case.name, times[times.len() / 2], times[0], times[times.len() - 1], case.bound);
    }
    if bench {
        println!("\n{:<28} {:>10}", "llama 8B, 4 sequences each", "seconds");
        for nodes in [1, 4, 16, 64, 256, 1024, 8192] {
            let (cluster, batch) = (format!("h100:8x{nodes}"), (32 * nodes).to_string());
            let seconds = compile("llama-8b-shaped.json", &["--cluster", &cluster, "--seq", "4096", "--batch", &batch]);
            println!("{:<28} {seconds:>10.3}", format!("{} devices", 8 * nodes));
        }
        println!("\n{:<28} {:>10}", "llama 8B-wide, 64 devices", "seconds");
        for layers in [8, 32, 128, 512] {
            let seconds = compile(&with_layers("llama-8b-shaped.json", layers), &["--cluster", "h100:8x8", "--seq", "4096", "--batch", "256"]);
            println!("{:<28} {seconds:>10.3}", format!("{layers} layers"));
        }
    }
}

/// The path of a model with so many layers.
fn with_layers(model: &str, layers: u64) -> String {
    let text = std::fs::read_to_string(models().join(model)).expect("a model");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config["num_hidden_layers"] = layers.into();
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench-config.json");
    std::fs::write(&path, config.to_string()).expect("a writable folder");
    path.display().to_string()
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/models")
}

/// Seconds of one `dplan compile`.
fn compile(model: &str, args: &[&str]) -> f64 {
    let plan = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench-plan.json");
    let begin = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_dplan"));
    let output =
        command.arg("compile").arg(models().join(model)).args(args).arg("-o").arg(&plan).output().expect("the binary was built with the bench");
    assert!(output.status.success(), "{model} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    begin.elapsed().as_secs_f64()
}
