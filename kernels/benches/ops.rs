//! Time of each kernel on one core, at the sizes of a small decoder: `cargo bench -p dplan-kernels`.

use std::time::Instant;

use dplan_ir::dropout::Draws;
use dplan_ir::dtype::DType;
use dplan_ir::entity::NodeId;
use dplan_ir::extent::{Extent, OpContext};
use dplan_ir::graph::Layout;
use dplan_ir::infer::is_index;
use dplan_ir::op::{Activation, Attention, Mask, Op, Rope, Rotation, Spec};
use dplan_ir::program::Write;
use dplan_ir::rule::rule;
use dplan_ir::sharding::LocalType;
use dplan_kernels::cpu::block::{Block, BlockMut};
use dplan_kernels::cpu::{Kernel, Run, Threads};

fn main() {
    let sizes = [('b', 4), ('s', 128), ('h', 128), ('f', 288), ('g', 4), ('r', 2), ('d', 16), ('e', 16), ('t', 128), ('v', 257)];
    let rows = [('a', 4), ('b', 128), ('c', 128)];
    let wide = [('a', 4), ('b', 128), ('c', 288)];
    let heads = [('a', 4), ('b', 128), ('c', 4), ('d', 2), ('e', 16)];
    let logits = [('a', 4), ('b', 128), ('c', 257)];
    let product = |l: &str, r: &str, o: &str| Op::Einsum(Spec { left: l.into(), right: r.into(), out: o.into() });
    let attention = Attention { mask: Mask::CAUSAL, scale: 0.25 };
    let rope = Rope::whole(Rotation::Forward, (0..8).map(|i| 1e4f64.powf(-f64::from(i) / 8.0)).collect());
    let cases: [(&str, Op, &[usize], &[usize], &[(char, u64)]); 19] = [
        ("up", product("bsh", "fh", "bsf"), &[3, 2], &[3], &sizes),
        ("up, dx", product("bsf", "fh", "bsh"), &[3, 2], &[3], &sizes),
        ("up, dw", product("bsf", "bsh", "fh"), &[3, 3], &[2], &sizes),
        ("q", product("bsh", "grdh", "bsgrd"), &[3, 4], &[5], &sizes),
        ("logits", product("bsh", "vh", "bsv"), &[3, 2], &[3], &sizes),
        ("attention", Op::Attention(attention), &[5, 4, 4], &[5, 4], &sizes),
        ("attention, grad", Op::AttentionGrad(attention), &[5, 4, 4, 5, 4, 5], &[5, 4, 4], &sizes),
        ("rope", Op::Rope(rope), &[5], &[5], &heads),
        ("rms", Op::RmsNorm { eps: 1e-5 }, &[3, 1], &[3], &rows),
        ("rms, dx", Op::RmsNormGradInput { eps: 1e-5 }, &[3, 1, 3], &[3], &rows),
        ("rms, dw", Op::RmsNormGradWeight { eps: 1e-5 }, &[3, 3], &[1], &rows),
        ("layer norm", Op::LayerNorm { eps: 1e-5 }, &[3, 1, 1], &[3], &rows),
        ("add", Op::Add, &[3, 3], &[3], &rows),
        ("gated", Op::Gated(Activation::Silu), &[3, 3], &[3], &wide),
        ("gated, grad", Op::GatedGrad(Activation::Silu), &[3, 3, 3], &[3, 3], &wide),
        ("gelu", Op::Act(Activation::Gelu), &[3], &[3], &wide),
        ("gelu tanh", Op::Act(Activation::GeluTanh), &[3], &[3], &wide),
        ("loss", Op::CeStats, &[3, 2], &[2, 2], &logits),
        ("loss, grad", Op::CeStatsGrad, &[3, 2, 2, 2, 2], &[3], &logits),
    ];
    println!("{:>16} {:>10} {:>10} {:>8}", "", "µs", "ns/elem", "GFLOP/s");
    for (name, op, ins, outs, sizes) in cases {
        measure(name, &op, ins, outs, sizes);
    }
}

fn measure(name: &str, op: &Op, in_ranks: &[usize], out_ranks: &[usize], sizes: &[(char, u64)]) {
    let rule = rule(op, in_ranks, out_ranks);
    let size = |l: char| sizes.iter().find(|s| s.0 == l).map_or(1, |s| s.1);
    let context = OpContext {
        extents: rule.factors.iter().map(|f| (f.label, Extent::whole(size(f.label)))).collect(),
        inv_tokens: 1.0,
        loss_scale: 1.0,
        node: NodeId(0),
        draws: Draws::default(),
        order: Default::default(),
        turn: 0,
    };
    let index = |at: usize| is_index(op, at);
    let ty = |labels: &[char], dtype| LocalType { dtype, dims: labels.iter().map(|&l| size(l)).collect(), layout: Layout::Dense, experts: 0 };
    let in_types: Vec<LocalType> = rule.ins.iter().enumerate().map(|(i, l)| ty(l, if index(i) { DType::I32 } else { DType::F32 })).collect();
    let out_types: Vec<LocalType> = rule.outs.iter().map(|(l, _)| ty(l, DType::F32)).collect();
    let kernel = Kernel::prepare(op, &context, &in_types, &out_types).expect("prepared");
    let floats: Vec<Vec<f32>> = in_types.iter().map(|t| (0..t.elems()).map(|i| (i % 97) as f32 * 0.01 - 0.5).collect()).collect();
    let ints: Vec<Vec<i32>> = in_types.iter().map(|t| (0..t.elems()).map(|i| (i % 250) as i32).collect()).collect();
    let blocks: Vec<Block<'_>> = (0..in_types.len()).map(|i| if index(i) { Block::I32(&ints[i]) } else { Block::F32(&floats[i]) }).collect();
    let mut outs: Vec<Vec<f32>> = out_types.iter().map(|t| vec![0.0; t.elems() as usize]).collect();
    let mut scratch = vec![0.0f32; kernel.scratch_elems()];
    let run = Run { write: Write::Set, inv_tokens: 1.0, loss_scale: 1.0, draws: Draws::default(), threads: Threads::Caller };
    let mut best = f64::INFINITY;
    for _ in 0..30 {
        let mut views: Vec<BlockMut<'_>> = outs.iter_mut().map(|o| BlockMut::F32(o)).collect();
        let start = Instant::now();
        kernel.run(&blocks, &mut views, BlockMut::F32(&mut scratch), &mut [], run);
        best = best.min(start.elapsed().as_secs_f64());
    }
    let cost = dplan_ir::cost::op_cost(op, &in_types.iter().collect::<Vec<_>>(), &out_types.iter().collect::<Vec<_>>());
    let elems = in_types.iter().chain(&out_types).map(LocalType::elems).max().unwrap_or(1);
    println!("{name:>16} {:10.1} {:10.2} {:8.1}", best * 1e6, best * 1e9 / elems as f64, cost.flops as f64 / best / 1e9);
}
