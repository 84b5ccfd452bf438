//! Offsets that 32 bits do not count: kernels of operands and results of more than 2³¹ elements, of which nothing but the end is there, against the f64 reference of that end. The same texts
//! with offsets of 32 bits must be found wrong, each of them.

mod shim;

use dplan_ir::dtype::DType;
use dplan_ir::op::{Activation, Attention, Documents, Mask, Op, Pairs, Renormalize, Rope, Rotation, Router};
use dplan_kernels::cuda::arch::Arch;
use dplan_kernels::cuda::product::TILES;
use dplan_kernels::cuda::{Launch, Tail, Target};
use dplan_kernels::shim::{Library, ShimError};
use dplan_kernels::trial::large::{Large, flat_buckets, large};
use shim::{Case, Random, TARGET, folder, letter, spec};

fn case(op: Op, ins: &[usize], outs: &[usize], sizes: &[(char, u64)], dtype: DType) -> Case {
    shim::case(op, ins, outs, sizes.iter().map(|&(label, len)| letter(label, len)).collect(), dtype)
}

/// Cases, the letter that each is longer in than any memory has room for, and how many blocks of a launch from its end run.
fn cases() -> Vec<(Case, char, u64)> {
    let (f32, bf16) = (DType::F32, DType::Bf16);
    let eps = 1e-5;
    let rows: &[_] = &[('a', 2), ('b', 3), ('c', 1024)];
    let one_row: &[_] = &[('a', 1), ('b', 1), ('c', 1024)];
    let mut all = vec![
        (case(Op::Add, &[3, 3], &[3], rows, bf16), 'a', 1),
        (case(Op::AddBias, &[3, 1], &[3], rows, f32), 'a', 1),
        (case(Op::MeanGrad, &[], &[3], rows, f32), 'a', 1),
        (case(Op::GatedGrad(Activation::Silu), &[3, 3, 3], &[3, 3], rows, bf16), 'a', 1),
        (case(Op::RmsNorm { eps }, &[3, 1], &[3], rows, bf16), 'a', 1),
        (case(Op::LayerNormGradInput { eps }, &[3, 1, 3], &[3], rows, f32), 'a', 1),
        (case(Op::RmsNormGradWeight { eps }, &[3, 3], &[1], one_row, bf16), 'a', 1),
        (case(Op::LayerNormGradWeight { eps }, &[3, 3], &[1, 1], one_row, bf16), 'a', 1),
        (case(Op::Dropout { rate: 0.25 }, &[3], &[3], rows, f32), 'a', 1),
        (case(Op::SumLeading { keep: 1 }, &[3], &[1], &[('a', 1), ('b', 2), ('c', 512)], f32), 'a', 1),
        (case(Op::Mean, &[3], &[0], rows, f32), 'a', 1),
        (case(Op::CeStats, &[3, 2], &[2, 2], rows, bf16), 'a', 2),
        (case(Op::CeStatsGrad, &[3, 2, 2, 2, 2], &[3], rows, bf16), 'a', 2),
    ];
    let rope = |pairs, start| Rope { pairs, start, ..Rope::whole(Rotation::Forward, vec![1.0, 0.1, 0.01, 0.001]) };
    let heads: &[_] = &[('a', 2), ('b', 5), ('c', 3), ('d', 8)];
    all.push((case(Op::Rope(rope(Pairs::Halves, 0)), &[4], &[4], heads, bf16), 'a', 1));
    let wider: &[_] = &[('a', 2), ('b', 5), ('c', 3), ('d', 11)];
    all.push((case(Op::Rope(rope(Pairs::Neighbours, 3)), &[4], &[4], wider, f32), 'a', 1));
    // Tables, and what is looked up.
    let tokens: &[_] = &[('v', 30), ('b', 2), ('s', 9), ('h', 64)];
    all.push((case(Op::Embed, &[2, 2], &[3], tokens, bf16), 'h', 1));
    all.push((case(Op::Embed, &[2, 2], &[3], tokens, f32), 'b', 1));
    all.push((case(Op::EmbedGrad, &[2, 3], &[2], tokens, f32), 'h', 8));
    let positions: &[_] = &[('b', 2), ('s', 9), ('h', 64), ('p', 9)];
    all.push((case(Op::AddPosition, &[3, 2], &[3], positions, bf16), 'b', 1));
    all.push((case(Op::AddPosition, &[3, 2], &[3], positions, f32), 'h', 1));
    all.push((case(Op::AddPositionGrad, &[3], &[2], positions, f32), 'h', 1));
    // Routers and rows of experts.
    let gates: &[_] = &[('b', 2), ('s', 9), ('e', 40)];
    let router = Router::softmax(2, Renormalize::Yes);
    all.push((case(Op::TopKGate(router), &[3], &[3], gates, f32), 'b', 1));
    all.push((case(Op::TopKGateGrad(router), &[3, 3, 3], &[3], gates, f32), 'b', 1));
    all.push((case(Op::Capacity { tokens: 3 }, &[3], &[3], &[('a', 2), ('b', 9), ('c', 40)], f32), 'a', 40));
    let experts: &[_] = &[('b', 1), ('s', 300), ('e', 3), ('h', 8), ('f', 8)];
    let of_experts = |op: Op, ins: &[usize], outs: &[usize], dtype| case(op, ins, outs, experts, dtype);
    all.extend([
        (of_experts(Op::Dispatch, &[3, 3], &[4], bf16), 'h', 8),
        (of_experts(Op::Undispatch, &[4, 3], &[3], f32), 'h', 8),
        (of_experts(Op::Combine, &[4, 3], &[3], bf16), 'h', 8),
        (of_experts(Op::CombineGradRows, &[3, 3], &[4], f32), 'h', 8),
        (of_experts(Op::AddExpertBias, &[4, 2, 3], &[4], bf16), 'f', 8),
        (of_experts(Op::ExpertBiasGrad, &[4, 3], &[2], f32), 'f', 8),
        (of_experts(Op::ExpertEinsum(spec("bseh", "efh", "bsef")), &[4, 3, 3], &[4], f32), 'f', 8),
        (of_experts(Op::ExpertEinsum(spec("bseh", "efh", "bsef")), &[4, 3, 3], &[4], bf16), 'f', 8),
        (of_experts(Op::ExpertEinsum(spec("bsef", "bseh", "efh")), &[4, 4, 3], &[3], bf16), 'f', 8),
    ]);
    // Products: rows of the left operand, of the result, of the right one, and batches.
    let hopper = Target { tiles: TILES.split_at(2).0, ..Target::of(Arch::Sm90a) };
    for (dtype, target) in [(f32, TARGET), (bf16, TARGET), (bf16, hopper)] {
        let of = |op: Op, ins: &[usize], outs: &[usize], sizes: &[(char, u64)]| Case { target, ..case(op, ins, outs, sizes, dtype) };
        let along: &[_] = &[('b', 1), ('s', 64), ('h', 128), ('f', 64)];
        let forward = || Op::Einsum(spec("bsh", "fh", "bsf"));
        all.push((of(forward(), &[3, 2], &[3], along), 's', 1));
        all.push((of(forward(), &[3, 2], &[3], &[('b', 1), ('s', 256), ('h', 64), ('f', 64)]), 'f', 1));
        all.push((of(forward(), &[3, 2], &[3], &[('b', 1), ('s', 64), ('h', 128), ('f', 64)]), 'f', 1));
        all.push((of(Op::Einsum(spec("bsf", "bsh", "fh")), &[3, 3], &[2], along), 'f', 1));
        all.push((of(Op::Einsum(spec("gbd", "gds", "gbs")), &[3, 3], &[3], &[('g', 2), ('b', 64), ('d', 64), ('s', 64)]), 'g', 1));
        all.push((
            Case { tails: vec![Tail::Bias, Tail::Add], ..of(forward(), &[3, 2], &[3], &[('b', 1), ('s', 64), ('h', 64), ('f', 256)]) },
            's',
            1,
        ));
    }
    // Attention on arithmetic and on matrix units.
    for (dtype, d, documents) in [(f32, 8, Documents::Apart), (bf16, 16, Documents::Joined)] {
        let op = Attention { mask: Mask { documents, ..Mask::CAUSAL }, scale: 0.4 };
        let with_first = |ranks: &[usize]| ranks.iter().copied().chain((documents == Documents::Apart).then_some(2)).collect::<Vec<_>>();
        let heads: &[_] = &[('b', 2), ('s', 40), ('t', 40), ('g', 1), ('r', 2), ('d', d), ('e', d)];
        all.push((case(Op::Attention(op), &with_first(&[5, 4, 4]), &[5, 4], heads, dtype), 'b', 4));
        all.push((case(Op::AttentionSink(op), &with_first(&[5, 4, 4, 2]), &[5, 4], heads, dtype), 'b', 4));
        all.push((case(Op::AttentionGrad(op), &with_first(&[5, 4, 4, 5, 4, 5]), &[5, 4, 4], heads, dtype), 'b', 32));
    }
    let sinks: &[_] = &[('b', 1), ('s', 4), ('g', 4), ('r', 32), ('e', 64)];
    all.push((case(Op::SinkGrad, &[2, 5, 4, 5], &[2], sinks, f32), 'b', 64));
    all
}

/// The launches with offsets of 32 bits.
fn short(launches: &[Launch]) -> Vec<Launch> {
    let short = |l: &Launch| Launch { text: l.text.replace("i64", "i32"), ..l.clone() };
    launches.iter().map(short).collect()
}

#[test]
fn what_is_far_is_reached() {
    let Some(dir) = folder("shim_offsets") else { return };
    let mut random = Random(21);
    let mut trials: Vec<Large> = cases().iter().map(|(case, letter, blocks)| large(case, *letter, *blocks, &mut random)).collect();
    trials.extend(flat_buckets(&mut random));
    let damaged: Vec<Vec<Launch>> = trials.iter().map(|t| short(&t.routine.launches)).collect();
    let library = Library::compile(&dir, "offsets", trials.iter().flat_map(|t| &t.routine.launches).chain(damaged.iter().flatten()));
    let library = library.unwrap_or_else(|e| panic!("{e}"));
    let mut missed = Vec::new();
    for (trial, damaged) in trials.iter().zip(&damaged) {
        let name = &trial.part.name;
        let begin = std::time::Instant::now();
        assert!(trial.is_far(), "{name}");
        let (outs, written) = match trial.run(&library, &trial.routine.launches) {
            Err(error @ ShimError::Addresses { .. }) => {
                eprintln!("SKIPPED: {error}: kernels at offsets beyond 2^31 were not tried");
                return;
            }
            ran => ran.unwrap_or_else(|e| panic!("{name}: {e}")),
        };
        assert!(written.iter().all(|&n| n > 0), "{name}: {written:?} elements of the results were written");
        trial.part.check(&outs, 1e-5);
        let noticed = match trial.run(&library, damaged) {
            Err(_) => true,
            Ok((outs, of_short)) => of_short != written || trial.part.compare(&outs, 1e-5).is_err(),
        };
        println!("{written:?} of {name}: {:?}", begin.elapsed());
        if !noticed {
            missed.push(name);
        }
    }
    assert!(missed.is_empty(), "offsets of 32 bits go unnoticed in {missed:#?}");
    println!("{} kernels' routines reach what is farther than 2^31 elements", trials.len());
}
