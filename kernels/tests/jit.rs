//! Generated kernels become machine code for real architectures, with no GPU: no spills, within limits, with the instructions they are meant to have.

mod shim;

use dplan_ir::dtype::DType;
use dplan_ir::op::{Attention, Mask, Op, Renormalize, Rope, Rotation, Router};
use dplan_ir::order::Order;
use dplan_ir::program::Write;
use dplan_kernels::cuda::{Alignment, Launch};
use dplan_kernels::jit::{self, Arch, Cache, Found, JitError, Nvrtc};
use shim::{Case, Random, TARGET, letter, make, spec};
use std::path::Path;
use std::time::Instant;

/// NVRTC, or `None`, said aloud.
fn nvrtc() -> Option<Nvrtc> {
    match Nvrtc::open() {
        Ok(found) => Some(found),
        Err(error @ JitError::Absent { .. }) => {
            eprintln!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn case(op: Op, ins: &[usize], outs: &[usize], letters: Vec<(char, u64, u64, u64)>, dtype: DType) -> Case {
    let ranks = (ins.to_vec(), outs.to_vec());
    Case { op, ranks, letters, dtype, out: None, write: Write::Set, alignment: Alignment::Packs, top_k: 2, order: Order::Straight, target: TARGET }
}

/// One of each family at the sizes of real models, but for the number of rows, which is no part of a text.
fn cases(dtype: DType) -> Vec<Case> {
    let rows = || vec![letter('a', 1), letter('b', 3), letter('c', 4096)];
    let mlp = || vec![letter('b', 1), letter('s', 8), letter('h', 64), letter('f', 64)];
    let tokens = || vec![letter('v', 11), letter('b', 1), letter('s', 5), letter('h', 64)];
    let moe = || vec![letter('b', 1), letter('s', 5), letter('e', 8), letter('h', 64), letter('f', 64)];
    let heads = |d| vec![letter('b', 1), letter('s', 5), letter('t', 5), letter('g', 1), letter('r', 2), letter('d', d), letter('e', d)];
    let eps = 1e-5;
    let attention = Attention { mask: Mask { causal: true, window: None }, scale: 0.1 };
    let rope = Rope::whole(Rotation::Forward, (0..64).map(|i| 1e4f64.powf(-f64::from(i) / 64.0)).collect());
    let renormalize = Renormalize::Yes;
    let mut all = vec![
        case(Op::GatedGrad(dplan_ir::op::Activation::Silu), &[3, 3, 3], &[3, 3], rows(), dtype),
        case(Op::Act(dplan_ir::op::Activation::GeluTanh), &[3], &[3], rows(), dtype),
        case(Op::Dropout { rate: 0.1 }, &[3], &[3], rows(), dtype),
        case(Op::Dropout { rate: 0.1 }, &[2], &[2], vec![letter('a', 1), letter('b', 3)], dtype),
        case(Op::RmsNorm { eps }, &[3, 1], &[3], rows(), dtype),
        case(Op::RmsNormGradInput { eps }, &[3, 1, 3], &[3], rows(), dtype),
        case(Op::RmsNormGradWeight { eps }, &[3, 3], &[1], rows(), dtype),
        case(Op::LayerNormGradInput { eps }, &[3, 1, 3], &[3], rows(), dtype),
        case(Op::LayerNormGradWeight { eps }, &[3, 3], &[1, 1], rows(), dtype),
        case(Op::Rope(rope), &[3], &[3], vec![letter('a', 1), letter('b', 2), letter('c', 128)], dtype),
        case(Op::Embed, &[2, 2], &[3], tokens(), dtype),
        case(Op::EmbedGrad, &[2, 3], &[2], tokens(), dtype),
        case(Op::CeStats, &[3, 2], &[2, 2], rows(), dtype),
        case(Op::CeStatsGrad, &[3, 2, 2, 2, 2], &[3], rows(), dtype),
        case(Op::TopKGate(Router::softmax(2, renormalize)), &[3], &[3], moe(), dtype),
        case(Op::TopKGateGrad(Router::softmax(2, renormalize)), &[3, 3, 3], &[3], moe(), dtype),
        case(Op::Combine, &[4, 3], &[3], moe(), dtype),
        case(Op::CombineGradGate, &[3, 4, 3], &[3], moe(), dtype),
        case(Op::ExpertEinsum(spec("bseh", "efh", "bsef")), &[4, 3, 3], &[4], moe(), dtype),
        case(Op::ExpertEinsum(spec("bsef", "bseh", "efh")), &[4, 4, 3], &[3], moe(), dtype),
        case(Op::Einsum(spec("bsh", "fh", "bsf")), &[3, 2], &[3], mlp(), dtype),
        case(Op::Einsum(spec("bsf", "fh", "bsh")), &[3, 2], &[3], mlp(), dtype),
        case(Op::Einsum(spec("bsf", "bsh", "fh")), &[3, 3], &[2], mlp(), dtype),
    ];
    for d in [64, 128] {
        all.push(case(Op::Attention(attention), &[5, 4, 4], &[5, 4], heads(d), dtype));
        all.push(case(Op::AttentionGrad(attention), &[5, 4, 4, 5, 4, 5], &[5, 4, 4], heads(d), dtype));
    }
    all
}

fn launches(dtype: DType) -> Vec<Launch> {
    let mut random = Random(3);
    let mut all: Vec<Launch> = cases(dtype).iter().flat_map(|c| make(c, &mut random).routine.launches).collect();
    all.sort_by(|a, b| (&a.text, a.entry).cmp(&(&b.text, b.entry)));
    all.dedup_by(|a, b| (&a.text, a.entry) == (&b.text, b.entry));
    all
}

/// A cache of this test's own, empty.
fn cache(name: &str) -> Cache {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    Cache::new(folder)
}

/// Compiles all for one architecture and checks what they use; prints a line for each kernel.
fn all_fit(arch: Arch, dtype: DType) {
    let Some(nvrtc) = nvrtc() else { return };
    let cache = cache(&format!("jit_{}_{dtype}", arch.name()));
    let mut wrong = Vec::new();
    for launch in launches(dtype) {
        let begin = Instant::now();
        let (made, _) = cache.compile(&nvrtc, &jit::text(&launch), arch).unwrap_or_else(|e| panic!("{}: {e}", launch.entry));
        let usage = made.usage(launch.entry).unwrap_or_else(|| panic!("{}: no report in\n{}", launch.entry, made.log));
        let (threads, limits) = (u64::from(launch.threads), arch.limits());
        println!(
            "{dtype} {} {:26} {usage:?} {threads} threads, {} bytes shared, occupancy {:.2}, {:?}",
            arch.name(),
            launch.entry,
            launch.shared,
            jit::occupancy(arch, threads, usage.registers, u64::from(launch.shared)),
            begin.elapsed()
        );
        let fits = usage.spill_bytes == 0 && usage.stack_bytes == 0 && usage.registers * threads <= limits.registers;
        if !fits || u64::from(launch.shared) > limits.block_shared {
            wrong.push(format!("{} {usage:?}\n{}", launch.entry, launch.text.lines().take(24).collect::<Vec<_>>().join("\n")));
        }
    }
    assert!(wrong.is_empty(), "{} kernels do not fit:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn kernels_fit_sm_80() {
    all_fit(Arch::Sm80, DType::Bf16);
}

#[test]
fn kernels_fit_sm_90a() {
    all_fit(Arch::Sm90a, DType::Bf16);
}

#[test]
fn kernels_fit_sm_100() {
    all_fit(Arch::Sm100, DType::Bf16);
}

#[test]
fn kernels_in_f32_fit() {
    all_fit(Arch::Sm80, DType::F32);
}

#[test]
fn a_kernel_is_made_once() {
    let Some(nvrtc) = nvrtc() else { return };
    let cache = cache("jit_once");
    let text = jit::text(&launches(DType::Bf16)[0]);
    let (made, first) = cache.compile(&nvrtc, &text, Arch::Sm80).unwrap();
    let begin = Instant::now();
    let (kept, second) = cache.compile(&nvrtc, &text, Arch::Sm80).unwrap();
    println!("read back in {:?}", begin.elapsed());
    assert_eq!((first, second), (Found::Made, Found::Kept));
    assert_eq!(made, kept);
}

#[test]
fn what_the_compiler_refuses_is_told() {
    let Some(nvrtc) = nvrtc() else { return };
    let error = cache("jit_refused").compile(&nvrtc, "extern \"C\" __global__ void f() { unknown(); }", Arch::Sm80).unwrap_err();
    assert!(error.to_string().contains("unknown"), "{error}");
}
