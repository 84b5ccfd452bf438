//! What kernels move to and from memory beside the least that their op must, at sizes of real models: a launch reads a sector of 32 bytes once, as a perfect cache
//! would have it; what counts against a kernel is working memory and whatever a second launch reads again.

mod shim;

use dplan_ir::dtype::DType;
use dplan_ir::op::{Activation, Op};
use dplan_ir::optimizer::Optimizer;
use dplan_kernels::cuda::{Alignment, flat};
use dplan_kernels::shim::{Library, Options};
use shim::{Buffer, Random, folder, letter, make, step_scalars};

#[test]
fn kernels_move_little_more_than_they_must() {
    let Some(dir) = folder("shim_traffic") else { return };
    let rows = || vec![letter('a', 1), letter('b', 512), letter('c', 1024)];
    let case = |op: Op, ins: &[usize], outs: &[usize]| shim::case(op, ins, outs, rows(), DType::Bf16);
    let eps = 1e-5;
    let cases = [
        (1.1, case(Op::RmsNorm { eps }, &[3, 1], &[3])),
        (1.1, case(Op::LayerNorm { eps }, &[3, 1, 1], &[3])),
        (1.1, case(Op::Gated(Activation::Silu), &[3, 3], &[3])),
        (1.1, case(Op::GatedGrad(Activation::Silu), &[3, 3, 3], &[3, 3])),
        (1.1, case(Op::Add, &[3, 3], &[3])),
        (1.1, case(Op::CeStats, &[3, 2], &[2, 2])),
        (1.1, case(Op::CeStatsGrad, &[3, 2, 2, 2, 2], &[3])),
        (1.25, case(Op::RmsNormGradInput { eps }, &[3, 1, 3], &[3])),
        (1.25, case(Op::RmsNormGradWeight { eps }, &[3, 3], &[1])),
        (1.25, case(Op::LayerNormGradWeight { eps }, &[3, 3], &[1, 1])),
    ];
    let mut random = Random(9);
    let prepared: Vec<_> = cases.iter().map(|(most, c)| (*most, make(c, &mut random))).collect();
    let n = 8192;
    let update = flat::Update {
        optimizer: Optimizer::AdamW,
        state: DType::F32,
        grad: DType::F32,
        param: Some(DType::Bf16),
        scale: Some(DType::F32),
        n,
        alignment: Alignment::Packs,
        stretches: &[(0..n, true)],
        trust: None,
    };
    let adamw = flat::update(&update);
    let trust = flat::Trust { sums: DType::F32, members: &[0] };
    let lamb = flat::update(&flat::Update { optimizer: Optimizer::Lamb, trust: Some(trust), ..update.clone() });
    let flat::Update { state, grad, scale, alignment, stretches, .. } = update;
    let sums = flat::trust_sums(&flat::TrustSums { state, grad, scale, alignment, stretches, trust, parameters: 1 });
    let (rows, width) = (256, 128);
    let join = flat::join_attention(DType::Bf16, rows, width, flat::Left::Elsewhere);
    let library = Library::compile(
        &dir,
        "traffic",
        prepared.iter().flat_map(|(_, p)| &p.routine.launches).chain([&adamw, &lamb, &sums, &join].into_iter().flat_map(|r| &r.launches)),
    )
    .unwrap();
    let mut wrong = Vec::new();
    let mut line = |name: &str, most: f64, moved: u64, least: u64| {
        let ratio = moved as f64 / least as f64;
        println!("{ratio:6.3} of at most {most:4.2}  {moved:9} bytes  {name}");
        if ratio > most {
            wrong.push(name.to_string());
        }
    };
    for (most, p) in &prepared {
        let (_, ran) = p.run(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name));
        let least: usize = p.ins.iter().chain(&p.starts).map(|b| b.bytes().len()).sum();
        line(&p.name, *most, ran.moved.read + ran.moved.written, least as u64);
    }
    let buffer = |n: usize, dtype| Buffer::new(&vec![0.5; n], dtype, Alignment::Packs);
    let (grad, scale) = (buffer(n as usize, DType::F32), buffer(1, DType::F32));
    let mut outs: Vec<Buffer> = [DType::F32, DType::F32, DType::F32, DType::Bf16].map(|t| buffer(n as usize, t)).into();
    let mut results: Vec<&mut [u8]> = outs.iter_mut().map(Buffer::bytes_mut).collect();
    let ran = library.run(&adamw, &[grad.bytes(), scale.bytes()], &mut results, &step_scalars(), Options::seeded(1)).unwrap();
    // 30 bytes a parameter: gradient, state and two moments read, the latter three and the parameter written.
    line("AdamW, f32 master weights of bf16 parameters", 1.1, ran.moved.read + ran.moved.written, n * 30);
    let ratio = buffer(2, DType::F32);
    let ran = library.run(&lamb, &[grad.bytes(), scale.bytes(), ratio.bytes()], &mut results, &step_scalars(), Options::seeded(1)).unwrap();
    line("LAMB, the same", 1.1, ran.moved.read + ran.moved.written, n * 30);
    let (ins, mut out) =
        (results.iter().take(1).map(|b| &**b).chain([grad.bytes()]).chain(results[1..3].iter().map(|b| &**b)), buffer(2, DType::F32));
    let ins: Vec<&[u8]> = ins.chain([scale.bytes()]).collect();
    let ran = library.run(&sums, &ins, &mut [out.bytes_mut()], &step_scalars(), Options::seeded(1)).unwrap();
    line("LAMB's trust sums", 1.1, ran.moved.read + ran.moved.written, n * 16);
    // Each part read once, the joined one written.
    let of = |n: u64| [buffer((n * width) as usize, DType::Bf16), buffer(n as usize, DType::F32)];
    let (left, right, mut joined) = (of(rows), of(rows), of(rows));
    let ins: Vec<&[u8]> = left.iter().chain(&right).map(Buffer::bytes).collect();
    let mut outs: Vec<&mut [u8]> = joined.iter_mut().map(Buffer::bytes_mut).collect();
    let ran = library.run(&join, &ins, &mut outs, &step_scalars(), Options::seeded(1)).unwrap();
    line("two parts of attention joined", 1.1, ran.moved.read + ran.moved.written, 3 * rows * (2 * width + 4));
    assert!(wrong.is_empty(), "more traffic than allowed: {wrong:?}");
}
