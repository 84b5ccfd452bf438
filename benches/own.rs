//! Predictions for this machine against runs on it: `cargo bench --bench own`.
//!
//! For 1, 2 and 4 ranks the machine is measured (`dplan profile`), four plans of the bundled model are compiled for what was measured, run, and their steps compared with the
//! predictions; and pairs of plans whose steps differ by more than 10 % are ranked. Nothing else should run meanwhile: a prediction is of an idle machine.

#[path = "../tests/common/mod.rs"]
mod common;

use std::path::Path;

use serde_json::Value;

const BATCH: &str = "16";
const CASES: [(u32, [&str; 4]); 3] = [
    (1, ["micro=1,recompute=none", "micro=4,recompute=none", "micro=16,recompute=none", "micro=4,recompute=full"]),
    (2, ["dp=2,zero=1,micro=8,recompute=none", "tp=2,micro=16,recompute=none", "pp=2,micro=4,recompute=none", "dp=2,zero=3,micro=1,recompute=full"]),
    (
        4,
        [
            "dp=4,zero=1,micro=4,recompute=none",
            "tp=4,micro=8,recompute=none",
            "dp=2,tp=2,zero=2,micro=4,recompute=full",
            "pp=4,micro=2,recompute=none",
        ],
    ),
];

fn main() {
    let bench = std::env::args().any(|a| a == "--bench");
    let (cases, steps) = if bench { (&CASES[..], 9) } else { (&CASES[..1], 2) };
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/llama-1m/config.json").display().to_string();
    let dir = common::scratch("own");
    let file = |name: &str| dir.join(name).display().to_string();
    let (machine, plan) = (file("machine.json"), file("plan.json"));
    let (mut errors, mut pairs, mut right) = (Vec::new(), 0, 0);
    println!("{:>5}  {:<42} {:>12} {:>12} {:>8}", "ranks", "plan", "predicted ms", "measured ms", "error");
    for &(ranks, plans) in cases {
        common::dplan_ok(&["profile", "--cluster", &format!("cpu:{ranks}"), "-o", &machine]);
        let mut rows: Vec<(f64, f64)> = Vec::new();
        for pins in plans {
            let said = common::dplan_ok(&["compile", &config, "--cluster", &machine, "--batch", BATCH, "--pin", pins, "-o", &plan, "--json"]);
            let said: Value = serde_json::from_str(&said).expect("JSON");
            let predicted = said["predicted"]["step_seconds"].as_f64().expect("a prediction");
            let lines = common::json_lines(&common::dplan_ok(&["run", &plan, "--steps", &steps.to_string(), "--json"]));
            // The first step warms up.
            let mut seconds: Vec<f64> = lines.iter().filter(|l| l["step"].as_u64() > Some(0)).filter_map(|l| l["seconds"].as_f64()).collect();
            seconds.sort_by(f64::total_cmp);
            let measured = seconds[seconds.len() / 2];
            println!("{ranks:>5}  {pins:<42} {:>12.1} {:>12.1} {:>+7.1}%", predicted * 1e3, measured * 1e3, (predicted / measured - 1.0) * 100.0);
            errors.push((predicted / measured - 1.0).abs());
            rows.push((predicted, measured));
        }
        for (at, a) in rows.iter().enumerate() {
            for b in rows[at + 1..].iter().filter(|b| (a.1 / b.1).max(b.1 / a.1) > 1.1) {
                pairs += 1;
                right += u32::from((a.0 < b.0) == (a.1 < b.1));
            }
        }
    }
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    let within = errors.iter().filter(|e| **e <= 0.15).count();
    println!(
        "{within} of {} within 15 %, mean {:.1} %; {right} of {pairs} pairs that differ by more than 10 % in the right order",
        errors.len(),
        mean * 100.0
    );
}
