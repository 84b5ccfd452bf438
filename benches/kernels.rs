//! What the generated kernels of real plans need: `cargo bench --bench kernels` compiles every kernel of every stage for each architecture with NVRTC, twice, and prints spills,
//! the largest launches, and the slowest compilations, the first time and from the cache. Needs no GPU; it measures and does not judge.

#[path = "../tests/common/mod.rs"]
mod common;

use std::process::Command;

/// Model, where it is, cluster, precision, sequences, and the tensor-parallel degrees.
const CASES: [(&str, &str, &str, &str, &str, &[u64]); 8] = [
    ("gpt2", "oracle/gpt2", "h100:8", "bf16", "64", &[1, 2]),
    ("llama", "oracle/llama", "h100:8", "bf16", "64", &[1, 2]),
    ("llama-tied", "oracle/llama-tied", "h100:8", "bf16", "64", &[1, 2]),
    ("mixtral", "oracle/mixtral", "h100:8", "bf16", "64", &[1, 2]),
    ("gpt2 124M", "models/gpt2.json", "h100:8", "bf16", "64", &[1, 2, 8]),
    ("llama-3.1-8b", "models/llama-3.1-8b.json", "h100:8x2", "bf16", "64", &[1, 2, 8]),
    ("qwen3-8b", "models/qwen3-8b.json", "h100:8x2", "bf16", "64", &[1, 2, 8]),
    ("mixtral-8x7b", "models/mixtral-8x7b.json", "h100:8x8", "bf16", "128", &[1, 2, 8]),
];

fn main() {
    // `cargo test --benches` runs this too: then one plan shows that it works.
    let bench = std::env::args().any(|a| a == "--bench");
    let Some(shared) = common::shared() else { return };
    let dir = common::scratch("bench_kernels");
    println!(
        "{:14} {:>3} {:8} {:>7} {:>6} {:>14} {:>10} {:>10} {:>10}  slowest",
        "model", "tp", "arch", "kernels", "spills", "regs x threads", "shared B", "compile s", "cached ms"
    );
    for (name, model, cluster, precision, batch, degrees) in CASES.into_iter().take(if bench { CASES.len() } else { 1 }) {
        for &tp in degrees {
            let plan = dir.join("plan.json");
            let model = shared.join(model).display().to_string();
            let pins = format!("tp={tp}");
            let args = ["compile", &model, "--cluster", cluster, "--batch", batch, "--precision", precision, "--pin", &pins, "-o"];
            let compiled = Command::new(env!("CARGO_BIN_EXE_dplan")).args(args).arg(&plan).output().expect("the binary was built with the bench");
            if !compiled.status.success() {
                println!("{name:14} {tp:3} no plan: {}", String::from_utf8_lossy(&compiled.stderr).lines().next().unwrap_or_default());
                continue;
            }
            for arch in ["sm_80", "sm_90a", "sm_100"] {
                let cache = dir.join(format!("cache {name} {tp} {arch}"));
                let _ = std::fs::remove_dir_all(&cache);
                match [kernels(&plan, arch, &cache), kernels(&plan, arch, &cache)] {
                    [Ok(made), Ok(kept)] => print(name, tp, arch, &made, &kept),
                    [Err(why), _] | [_, Err(why)] => println!("{name:14} {tp:3} {arch:8} {}", why.lines().next().unwrap_or_default()),
                }
            }
        }
    }
}

fn print(name: &str, tp: u64, arch: &str, made: &[serde_json::Value], kept: &[serde_json::Value]) {
    let number = |row: &serde_json::Value, key: &str| row[key].as_f64().unwrap_or(f64::NAN);
    let most = |rows: &[serde_json::Value], of: &dyn Fn(&serde_json::Value) -> f64| rows.iter().map(of).fold(0.0, f64::max);
    let spills = made.iter().filter(|r| number(r, "spill_bytes") > 0.0).count();
    let seconds = |r: &serde_json::Value| number(r, "compile_seconds");
    let slowest = made.iter().max_by(|a, b| seconds(a).total_cmp(&seconds(b))).map_or("", |r| r["name"].as_str().unwrap_or(""));
    println!(
        "{name:14} {tp:3} {arch:8} {:7} {spills:6} {:14} {:10} {:10.3} {:10.3}  {slowest}",
        made.len(),
        most(made, &|r| number(r, "registers") * number(r, "threads")),
        most(made, &|r| number(r, "shared_bytes")),
        most(made, &seconds),
        most(kept, &seconds) * 1e3,
    );
}

/// The rows of `dplan kernels`, or why there are none.
fn kernels(plan: &std::path::Path, arch: &str, cache: &std::path::Path) -> Result<Vec<serde_json::Value>, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dplan"));
    let output = command.arg("kernels").arg(plan).args(["--arch", arch, "--json"]).env("DPLAN_CACHE", cache).output();
    let output = output.map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(common::json_lines(&String::from_utf8_lossy(&output.stdout)))
}
