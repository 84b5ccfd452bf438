//! `tests/gpu.sh`, on a machine without a GPU: with stand-ins for CUDA's libraries and small sizes it ends well, and where something is wrong it says what, and ends with 1.

mod common;
#[path = "common/stand_in.rs"]
mod stand_in;

use std::process::{Command, Output};

use common::{residual_block, scratch};
use stand_in::stand_in;

/// In the place of the bundled models, and of the large one.
const SIZES: [u64; 4] = [6, 31, 24, 40];

/// Runs parts of the script in some environment.
fn script(parts: &str, binary: &str, environment: &[(&str, String)]) -> (Output, String) {
    let mut command = Command::new("sh");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gpu.sh")).arg(binary).env("DPLAN_GPU_PARTS", parts);
    let output = command.envs(environment.iter().map(|(name, value)| (name, value))).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, said)
}

#[test]
fn a_gpu_that_is_none_passes_and_one_that_lacks_something_does_not() {
    let Some(mut environment) = stand_in("8") else { return };
    let dir = scratch("gpu_script");
    let model = dir.join("two-branch.json");
    std::fs::write(&model, residual_block(SIZES, "table")).unwrap();
    environment.extend([
        ("DPLAN_GPU_CASES", "1".to_string()),
        ("DPLAN_GPU_EXAMPLES", dir.display().to_string()),
        ("DPLAN_GPU_MODEL", model.display().to_string()),
        ("DPLAN_GPU_SHAPE", "--batch 4".into()),
        ("DPLAN_CUBLASLT", "/nowhere/libcublasLt.so".into()),
    ]);
    let (output, said) = script("kernels offload time step", env!("CARGO_BIN_EXE_dplan"), &environment);
    println!("{said}");
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    for what in
        ["| attention_on_matrix_units | 1 |", "| flat buckets |", "offload=parameters:nvme | 6 |", "A copy of", "| MFU |", "Every check is right."]
    {
        assert!(said.contains(what), "no `{what}` in\n{said}");
    }
    assert!(!said.contains("WRONG") && !said.contains("FAILED"), "{said}");

    // A binary that computes something else.
    let wrong = dir.join("dplan");
    let text = format!(
        "#!/bin/sh\n\"{}\" \"$@\" | if echo \"$*\" | grep -q cuda; then sed 's/\"loss\":[0-9]/\"loss\":7/'; else cat; fi\n",
        env!("CARGO_BIN_EXE_dplan")
    );
    std::fs::write(&wrong, text).unwrap();
    Command::new("chmod").arg("+x").arg(&wrong).status().unwrap();
    let (output, said) = script("offload", &wrong.display().to_string(), &environment);
    assert_eq!((output.status.code(), said.matches("**WRONG**").count()), (Some(1), 3), "{said}");

    // No GPU at all.
    environment.push(("DPLAN_CUDA", "/nowhere/libcuda.so.1".into()));
    let (output, said) = script("kernels", env!("CARGO_BIN_EXE_dplan"), &environment);
    assert!(
        output.status.code() == Some(1) && said.contains("FAILED: `dplan kernels` ended with 3") && said.contains("CUDA driver was not found"),
        "{said}"
    );
}
