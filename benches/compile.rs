//! How long `dplan compile` takes as a whole process: search, lowering, verification and writing the plan. `cargo bench --bench compile` prints, for
//! each case, the median wall time of several runs beside the bound it should keep; it measures and does not judge.

use std::path::Path;
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
        name: "llama 405B on h100:8x2048",
        model: "llama-405b-shaped.json",
        args: &["--cluster", "h100:8x2048", "--seq", "8192", "--batch", "2048"],
        bound: 2.0,
    },
];

const RUNS: usize = 5;

fn main() {
    // `cargo test --benches` runs this too: then one quick run shows that it works.
    let runs = if std::env::args().any(|a| a == "--bench") { RUNS } else { 1 };
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/models");
    let plan = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench-plan.json");
    println!("{:<28} {:>10} {:>10} {:>10} {:>8}", "compile", "median s", "min s", "max s", "bound s");
    for case in CASES {
        let mut times: Vec<f64> = (0..runs)
            .map(|_| {
                let begin = Instant::now();
                let output = Command::new(env!("CARGO_BIN_EXE_dplan"))
                    .arg("compile")
                    .arg(models.join(case.model))
                    .args(case.args)
                    .arg("-o")
                    .arg(&plan)
                    .output()
                    .expect("the binary was built with the bench");
                assert!(output.status.success(), "{}: {}", case.name, String::from_utf8_lossy(&output.stderr));
                begin.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{:<28} {:>10.3} {:>10.3} {:>10.3} {:>8.1}", case.name, times[times.len() / 2], times[0], times[times.len() - 1], case.bound);
    }
}
