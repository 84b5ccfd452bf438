//! Generated kernels become machine code for real architectures, with no GPU: no spills, within limits, with the instructions they are meant to have.

mod shim;

use dplan_ir::dtype::DType;
use dplan_ir::op::{Activation, Attention, Correction, Documents, GroupScore, Groups, Mask, Op, Pairs, Renormalize, Rope, Rotation, Router, Score};
use dplan_ir::optimizer::Optimizer;
use dplan_ir::program::Write;
use dplan_kernels::cuda::flat::{self, Trust, TrustSums, Update};
use dplan_kernels::cuda::product::TILES;
use dplan_kernels::cuda::{Alignment, Launch, Tail, Target};
use dplan_kernels::jit::{self, Arch, Cache, Found, JitError, Nvrtc};
use dplan_kernels::trial::chains::{KINDS, of_kind};
use shim::{Case, Random, case, letter, make, spec};
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

/// One of each family at the sizes of real models, but for the number of rows, which is no part of a text.
fn cases(dtype: DType) -> Vec<Case> {
    let rows = || vec![letter('a', 1), letter('b', 3), letter('c', 4096)];
    let mlp = || vec![letter('b', 1), letter('s', 8), letter('h', 64), letter('f', 64)];
    let tokens = || vec![letter('v', 11), letter('b', 1), letter('s', 5), letter('h', 64)];
    let moe = || vec![letter('b', 1), letter('s', 5), letter('e', 8), letter('h', 64), letter('f', 64)];
    let heads = |d| vec![letter('b', 1), letter('s', 5), letter('t', 5), letter('g', 1), letter('r', 2), letter('d', d), letter('e', d)];
    let eps = 1e-5;
    let attention = Attention { mask: Mask::CAUSAL, scale: 0.1 };
    let apart = Attention { mask: Mask { documents: Documents::Apart, ..Mask::CAUSAL }, scale: 0.1 };
    let rope = Rope::whole(Rotation::Forward, (0..64).map(|i| 1e4f64.powf(-f64::from(i) / 64.0)).collect());
    let part = Rope { pairs: Pairs::Neighbours, start: 64, scale: 1.25, ..Rope::whole(Rotation::Inverse, (1..33).map(f64::from).collect()) };
    let renormalize = Renormalize::Yes;
    // As DeepSeek-V3 has them.
    let groups = Some(Groups { count: 8, kept: 4, by: GroupScore::TwoBest });
    let scored = Router { k: 8, score: Score::Sigmoid, renormalize, groups, correction: Correction::Added, scale: 2.5 };
    let many = || vec![letter('b', 1), letter('s', 5), letter('e', 256)];
    let latent = || vec![letter('b', 1), letter('t', 5), letter('g', 8), letter('n', 128), letter('m', 64), letter('d', 192)];
    let over_heads = || vec![letter('a', 1), letter('b', 2), letter('c', 40), letter('d', 128)];
    let mut all = vec![
        case(Op::GatedGrad(Activation::Silu), &[3, 3, 3], &[3, 3], rows(), dtype),
        case(Op::Act(Activation::GeluTanh), &[3], &[3], rows(), dtype),
        case(Op::Dropout { rate: 0.1 }, &[3], &[3], rows(), dtype),
        case(Op::Dropout { rate: 0.1 }, &[2], &[2], vec![letter('a', 1), letter('b', 3)], dtype),
        case(Op::RmsNorm { eps }, &[3, 1], &[3], rows(), dtype),
        case(Op::RmsNormGradInput { eps }, &[3, 1, 3], &[3], rows(), dtype),
        case(Op::RmsNormGradWeight { eps }, &[3, 3], &[1], rows(), dtype),
        case(Op::LayerNormGradInput { eps }, &[3, 1, 3], &[3], rows(), dtype),
        case(Op::LayerNormGradWeight { eps }, &[3, 3], &[1, 1], rows(), dtype),
        case(Op::Rope(rope), &[3], &[3], vec![letter('a', 1), letter('b', 2), letter('c', 128)], dtype),
        case(Op::Rope(part), &[3], &[3], vec![letter('a', 1), letter('b', 2), letter('c', 128)], dtype),
        case(Op::Embed, &[2, 2], &[3], tokens(), dtype),
        case(Op::EmbedGrad, &[2, 3], &[2], tokens(), dtype),
        case(Op::CeStats, &[3, 2], &[2, 2], rows(), dtype),
        case(Op::CeStatsGrad, &[3, 2, 2, 2, 2], &[3], rows(), dtype),
        case(Op::TopKGate(Router::softmax(2, renormalize)), &[3], &[3], moe(), dtype),
        case(Op::TopKGateGrad(Router::softmax(2, renormalize)), &[3, 3, 3], &[3], moe(), dtype),
        case(Op::TopKGate(scored), &[3, 1], &[3], many(), dtype),
        case(Op::TopKGateGrad(scored), &[3, 3, 3], &[3], many(), dtype),
        case(Op::RmsNorm { eps }, &[4, 2], &[4], over_heads(), dtype),
        case(Op::RmsNormGradInput { eps }, &[4, 2, 4], &[4], over_heads(), dtype),
        case(Op::RmsNormGradWeight { eps }, &[4, 4], &[2], over_heads(), dtype),
        case(Op::Append, &[4, 3], &[4], latent(), dtype),
        case(Op::AppendGradHead, &[4], &[4], latent(), dtype),
        case(Op::AppendGradTail, &[4], &[3], latent(), dtype),
        case(Op::Capacity { tokens: 2 }, &[3], &[3], vec![letter('a', 1), letter('b', 5), letter('c', 8)], dtype),
        case(Op::Combine, &[4, 3], &[3], moe(), dtype),
        case(Op::AddExpertBias, &[4, 2, 3], &[4], moe(), dtype),
        case(Op::ExpertBiasGrad, &[4, 3], &[2], moe(), dtype),
        case(Op::CombineGradGate, &[3, 4, 3], &[3], moe(), dtype),
        case(Op::ExpertEinsum(spec("bseh", "efh", "bsef")), &[4, 3, 3], &[4], moe(), dtype),
        case(Op::ExpertEinsum(spec("bsef", "bseh", "efh")), &[4, 4, 3], &[3], moe(), dtype),
        case(Op::Einsum(spec("bsh", "fh", "bsf")), &[3, 2], &[3], mlp(), dtype),
        case(Op::Einsum(spec("bsf", "fh", "bsh")), &[3, 2], &[3], mlp(), dtype),
        case(Op::Einsum(spec("bsf", "bsh", "fh")), &[3, 3], &[2], mlp(), dtype),
    ];
    // Products with what follows them, on whatever units they are computed.
    let follows = [&[Tail::Bias, Tail::Act(Activation::GeluTanh), Tail::Add][..], &[Tail::ActGrad(Activation::Silu), Tail::Bias]];
    all.extend(follows.map(|tails| Case { tails: tails.to_vec(), ..case(Op::Einsum(spec("bsh", "fh", "bsf")), &[3, 2], &[3], mlp(), dtype) }));
    all.push(case(Op::SinkGrad, &[2, 5, 4, 5], &[2], heads(64).into_iter().filter(|l| !"td".contains(l.0)).collect(), dtype));
    for d in [64, 128] {
        all.push(case(Op::Attention(attention), &[5, 4, 4], &[5, 4], heads(d), dtype));
        all.push(case(Op::AttentionGrad(attention), &[5, 4, 4, 5, 4, 5], &[5, 4, 4], heads(d), dtype));
        all.push(case(Op::AttentionSink(attention), &[5, 4, 4, 2], &[5, 4], heads(d), dtype));
        all.push(case(Op::Attention(apart), &[5, 4, 4, 2], &[5, 4], heads(d), dtype));
        all.push(case(Op::AttentionGrad(apart), &[5, 4, 4, 5, 4, 5, 2], &[5, 4, 4], heads(d), dtype));
    }
    all
}

/// The step of each optimizer, and what goes before it, of parameters of this type with masters in its accumulator.
fn optimizers(dtype: DType) -> Vec<Launch> {
    let (state, alignment, n) = (dtype.accumulator(), Alignment::Packs, 4096);
    let (grad, scale, stretches) = (state, Some(state), &[(0..n, true)]);
    let trust = Trust { sums: state, members: &[0] };
    let param = Some(dtype).filter(|&t| t != state);
    let update =
        |optimizer: Optimizer| Update { optimizer, state, grad, param, scale, n, alignment, stretches, trust: optimizer.trusts().then_some(trust) };
    let sums = flat::trust_sums(&TrustSums { state, grad, scale, alignment, stretches, trust, parameters: 1 });
    Optimizer::ALL.into_iter().map(|o| flat::update(&update(o))).chain([sums]).flat_map(|r| r.launches).collect()
}

/// What joins parts that go round a ring, where the left one lies and elsewhere.
fn joins(dtype: DType) -> Vec<Launch> {
    let of = |left| [flat::join_attention(dtype, 4096, 128, left), flat::join_sums(&[(dtype, 4096)], left)];
    [flat::Left::InPlace, flat::Left::Elsewhere].into_iter().flat_map(of).flat_map(|r| r.launches).collect()
}

/// Every kind of chain along rows, of a model's width and of the widest.
fn chains(dtype: DType) -> Vec<Launch> {
    let mut random = Random(6);
    let letters = |width| [letter('a', 1), letter('b', 2), letter('c', width)];
    // Of longer ones in f32 no chain is made: registers would not hold it.
    let widest = if dtype.size() == 2 { 16384 } else { 8192 };
    let kinds = (0..KINDS).flat_map(|kind| [4096, widest].map(|width| (kind, width)));
    let joined = kinds.map(|(kind, width)| of_kind(&mut random, kind, &letters(width), (dtype, Write::Set, Alignment::Packs)));
    joined.flat_map(|j| j.together.routine.launches).collect()
}

fn launches(dtype: DType) -> Vec<Launch> {
    let mut random = Random(3);
    let ops = cases(dtype);
    let made = ops.iter().flat_map(|c| make(c, &mut random).routine.launches);
    let mut all: Vec<Launch> = made.chain(optimizers(dtype)).chain(joins(dtype)).chain(chains(dtype)).collect();
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

/// Products by warpgroups: every transposition, experts' rows, both tiles, sums added to, results that take one element at a time, and what may follow.
fn warpgroups() -> Vec<Launch> {
    let letters = |f| vec![letter('b', 1), letter('s', 64), letter('e', 4), letter('h', 64), letter('f', f)];
    let products = [("bsh", "fh", "bsf"), ("bsf", "fh", "bsh"), ("bsf", "bsh", "fh"), ("hs", "fh", "sf")];
    let plain = products.map(|(a, b, c)| case(Op::Einsum(spec(a, b, c)), &[a.len(), b.len()], &[c.len()], letters(64), DType::Bf16));
    let odd = case(Op::Einsum(spec("bsh", "fh", "bsf")), &[3, 2], &[3], letters(63), DType::F16);
    let sum = Case { out: Some(DType::F32), write: Write::Add, ..case(Op::Einsum(spec("bsf", "bsh", "fh")), &[3, 3], &[2], letters(64), DType::F16) };
    let experts = case(Op::ExpertEinsum(spec("bseh", "efh", "bsef")), &[4, 3, 3], &[4], letters(64), DType::Bf16);
    let follows =
        |tails: &[Tail], f| Case { tails: tails.to_vec(), ..case(Op::Einsum(spec("bsh", "fh", "bsf")), &[3, 2], &[3], letters(f), DType::Bf16) };
    let followed = [
        follows(&[Tail::Bias, Tail::Add], 64),
        follows(&[Tail::Bias, Tail::Act(Activation::GeluTanh)], 63),
        Case { write: Write::Add, out: Some(DType::F32), ..follows(&[Tail::ActGrad(Activation::Gelu), Tail::Add], 64) },
    ];
    let mut random = Random(4);
    let mut all = Vec::new();
    for case in plain.into_iter().chain([odd, sum, experts]).chain(followed) {
        for tiles in [TILES.split_at(1).0, TILES.split_at(2).0.split_at(1).1] {
            let routine = make(&Case { target: Target { tiles, ..Target::of(Arch::Sm90a) }, ..case.clone() }, &mut random).routine;
            all.extend(routine.launches.into_iter().filter(|l| l.entry == "dp_gemm_wgmma"));
        }
    }
    all
}

/// How often the first twelve bits of an instruction are these, in the machine code of a cubin.
fn instructions(cubin: &[u8], opcode: u64) -> usize {
    let word = |at: usize| u64::from_le_bytes(cubin[at..at + 8].try_into().unwrap());
    let half = |at: usize| usize::from(u16::from_le_bytes(cubin[at..at + 2].try_into().unwrap()));
    let (headers, count) = (word(0x28) as usize, half(0x3c));
    let sections = (0..count).map(|i| headers + i * 64);
    // Sections with instructions; one takes sixteen bytes.
    let code = sections.filter(|&at| word(at + 8) & 4 != 0).flat_map(|at| {
        let (from, bytes) = (word(at + 24) as usize, word(at + 32) as usize);
        (from..from + bytes).step_by(16)
    });
    code.filter(|&at| word(at) & 0xfff == opcode).count()
}

#[test]
fn products_by_warpgroups_fit() {
    let Some(nvrtc) = nvrtc() else { return };
    let cache = cache("jit_warpgroups");
    let all = warpgroups();
    assert_eq!(all.len(), 20);
    for launch in all {
        let begin = Instant::now();
        let (made, _) = cache.compile(&nvrtc, &jit::text(&launch), Arch::Sm90a).unwrap_or_else(|e| panic!("{e}"));
        let usage = made.usage(launch.entry).unwrap_or_else(|| panic!("no report in\n{}", made.log));
        println!("{usage:?} {} threads, {} bytes shared, {:?}", launch.threads, launch.shared, begin.elapsed());
        let limits = Arch::Sm90a.limits();
        assert_eq!((usage.spill_bytes, usage.stack_bytes), (0, 0), "{}", launch.text);
        assert!(usage.registers * u64::from(launch.threads) <= limits.registers && u64::from(launch.shared) <= limits.block_shared, "{usage:?}");
        // Where registers of products under way are touched, the assembler waits for each product, and says so.
        assert!(!made.log.to_lowercase().contains("serializ"), "{}", made.log);
        // What the text asks for, in PTX and in machine code: HGMMA and UTMALDG.
        for (name, opcode) in [("wgmma.mma_async.sync.aligned.m64n", 0x9f0), ("cp.async.bulk.tensor.3d", 0x5b4)] {
            let written = made.ptx.matches(name).count();
            assert!(written >= 4, "{written} of {name}");
            assert_eq!(instructions(&made.cubin, opcode), written, "{name}");
        }
    }
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
