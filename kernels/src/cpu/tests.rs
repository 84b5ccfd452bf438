//! Every kernel against the meaning of its op, on random blocks: odd sizes, offsets, padding, both element types, set and add.

use super::*;
use dplan_ir::documents::first_positions;
use dplan_ir::entity::NodeId;
use dplan_ir::extent::Extent;
use dplan_ir::graph::Layout;
use dplan_ir::infer::is_index;
use dplan_ir::interp::{Tensor, op::eval};
use dplan_ir::op::{Activation, Attention, Correction, Documents, GroupScore, Groups, Mask, Pairs, Renormalize, Rope, Rotation, Router, Score, Spec};
use dplan_ir::order::Order;
use dplan_ir::splitmix;

/// An op on one block: `letters` gives (label, start, length, logical size) of each factor.
struct Case {
    op: Op,
    ranks: (&'static [usize], &'static [usize]),
    letters: &'static [(char, u64, u64, u64)],
}

fn case(op: Op, ins: &'static [usize], outs: &'static [usize], letters: &'static [(char, u64, u64, u64)]) -> Case {
    Case { op, ranks: (ins, outs), letters }
}

fn einsum(left: &str, right: &str, out: &str) -> Op {
    Op::Einsum(spec(left, right, out))
}
fn spec(left: &str, right: &str, out: &str) -> Spec {
    Spec { left: left.into(), right: right.into(), out: out.into() }
}

const TOP_K: u64 = 2;

/// Of dropout.
const DRAWS: Draws = Draws { seed: 3, sequence: 11 };

fn cases() -> Vec<Case> {
    let rows: &[(char, u64, u64, u64)] = &[('a', 0, 3, 3), ('b', 5, 7, 19), ('c', 0, 37, 37)];
    let wide: &[(char, u64, u64, u64)] = &[('a', 0, 3, 3), ('b', 0, 67, 67), ('c', 0, 131, 131)];
    let mlp: &[(char, u64, u64, u64)] = &[('b', 0, 3, 3), ('s', 0, 13, 13), ('h', 0, 17, 17), ('f', 0, 21, 21)];
    let heads: &[(char, u64, u64, u64)] = &[('b', 0, 2, 2), ('s', 0, 11, 11), ('h', 0, 17, 17), ('g', 0, 2, 2), ('r', 0, 3, 3), ('d', 0, 5, 5)];
    let mut all = vec![
        case(einsum("bsh", "fh", "bsf"), &[3, 2], &[3], mlp),
        case(einsum("bsf", "fh", "bsh"), &[3, 2], &[3], mlp),
        case(einsum("bsf", "bsh", "fh"), &[3, 3], &[2], mlp),
        case(einsum("bsh", "grdh", "bsgrd"), &[3, 4], &[5], heads),
        case(einsum("bsgrd", "grdh", "bsh"), &[5, 4], &[3], heads),
        case(einsum("bsgrd", "bsh", "grdh"), &[5, 3], &[4], heads),
        case(einsum("gbd", "gds", "gbs"), &[3, 3], &[3], heads),
        case(Op::AddBias, &[3, 2], &[3], rows),
        case(Op::AddBias, &[3, 1], &[3], rows),
        case(Op::SumLeading { keep: 1 }, &[3], &[1], wide),
        case(Op::SumLeading { keep: 2 }, &[3], &[2], wide),
        case(Op::Add, &[3, 3], &[3], rows),
        case(Op::Sub, &[3, 3], &[3], rows),
        case(Op::Neg, &[3], &[3], rows),
        case(Op::Dropout { rate: 0.25 }, &[3], &[3], rows),
        case(Op::Dropout { rate: 0.5 }, &[2], &[2], rows),
        case(Op::Dropout { rate: 0.1 }, &[4], &[4], &[('a', 2, 3, 8), ('b', 4, 5, 20), ('c', 6, 3, 9), ('d', 5, 7, 13)]),
        case(Op::RmsNorm { eps: 1e-5 }, &[3, 1], &[3], rows),
        case(Op::RmsNormGradInput { eps: 1e-5 }, &[3, 1, 3], &[3], rows),
        case(Op::RmsNormGradWeight { eps: 1e-5 }, &[3, 3], &[1], wide),
        case(Op::LayerNorm { eps: 1e-5 }, &[3, 1, 1], &[3], rows),
        case(Op::LayerNormGradInput { eps: 1e-5 }, &[3, 1, 3], &[3], rows),
        case(Op::LayerNormGradWeight { eps: 1e-5 }, &[3, 3], &[1, 1], wide),
        case(Op::Embed, &[2, 2], &[3], &[('v', 20, 10, 27), ('h', 0, 6, 6), ('b', 0, 3, 3), ('s', 0, 31, 31)]),
        case(Op::EmbedGrad, &[2, 3], &[2], &[('v', 20, 10, 27), ('h', 0, 6, 6), ('b', 0, 3, 3), ('s', 0, 31, 31)]),
        case(Op::AddPosition, &[3, 2], &[3], &[('b', 0, 3, 3), ('s', 4, 5, 12), ('h', 0, 6, 6), ('p', 0, 20, 20)]),
        case(Op::AddPositionGrad, &[3], &[2], &[('b', 0, 3, 3), ('s', 4, 5, 12), ('h', 0, 6, 6), ('p', 0, 20, 20)]),
        case(Op::Mean, &[2], &[0], rows),
        case(Op::MeanGrad, &[], &[2], rows),
    ];
    let clamps = [Activation::Clamp { limit: 1 }, Activation::ClampAbove { limit: 1 }, Activation::QuickGelu];
    for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu].into_iter().chain(clamps) {
        all.push(case(Op::Act(activation), &[3], &[3], rows));
        all.push(case(Op::ActGrad(activation), &[3, 3], &[3], rows));
        all.push(case(Op::Gated(activation), &[3, 3], &[3], rows));
        all.push(case(Op::GatedGrad(activation), &[3, 3, 3], &[3, 3], rows));
    }
    for rotation in [Rotation::Forward, Rotation::Inverse] {
        let frequencies = |pairs: u32| (0..pairs).map(|i| 100f64.powf(-f64::from(i) / f64::from(pairs))).collect();
        let rope = |pairs: u32| Op::Rope(Rope::whole(rotation, frequencies(pairs)));
        all.push(case(rope(3), &[5], &[5], &[('a', 0, 2, 2), ('b', 7, 5, 20), ('c', 0, 2, 2), ('d', 0, 3, 3), ('e', 0, 6, 6)]));
        all.push(case(rope(70), &[3], &[3], &[('a', 0, 2, 2), ('b', 7, 5, 20), ('c', 0, 140, 140)]));
        for (pairs, start) in [(Pairs::Halves, 3), (Pairs::Neighbours, 0), (Pairs::Neighbours, 5)] {
            let part = Op::Rope(Rope { rotation, pairs, start, scale: 1.3, inv_freq: frequencies(66) });
            all.push(case(part, &[4], &[4], &[('a', 0, 2, 2), ('b', 7, 5, 20), ('c', 0, 2, 2), ('d', 0, 140, 140)]));
        }
    }
    // Whole blocks; queries that begin later; padding heads; more queries than one tile has; keys of other ranks, before and behind.
    let attention: [&'static [(char, u64, u64, u64)]; 5] = [
        &[('b', 0, 2, 2), ('s', 0, 9, 9), ('t', 0, 9, 9), ('g', 0, 2, 2), ('r', 0, 3, 3), ('d', 0, 6, 6), ('e', 0, 5, 5)],
        &[('b', 0, 1, 2), ('s', 70, 70, 140), ('t', 0, 140, 140), ('g', 2, 2, 3), ('r', 0, 2, 1), ('d', 0, 4, 4), ('e', 0, 4, 4)],
        &[('b', 0, 1, 1), ('s', 0, 131, 131), ('t', 0, 131, 131), ('g', 0, 1, 1), ('r', 0, 1, 1), ('d', 0, 8, 8), ('e', 0, 3, 3)],
        &[('b', 0, 1, 1), ('s', 80, 80, 160), ('t', 0, 80, 160), ('g', 0, 2, 2), ('r', 0, 1, 1), ('d', 0, 4, 4), ('e', 0, 5, 5)],
        &[('b', 0, 1, 1), ('s', 16, 16, 160), ('t', 64, 16, 160), ('g', 0, 1, 1), ('r', 0, 2, 2), ('d', 0, 4, 4), ('e', 0, 4, 4)],
    ];
    for letters in attention {
        for mask in [(true, None), (false, None), (true, Some(5)), (false, Some(3))] {
            let op = Attention { mask: Mask { causal: mask.0, window: mask.1, ..Mask::FULL }, scale: 0.4 };
            all.push(case(Op::Attention(op), &[5, 4, 4], &[5, 4], letters));
            all.push(case(Op::AttentionGrad(op), &[5, 4, 4, 5, 4, 5], &[5, 4, 4], letters));
            all.push(case(Op::AttentionSink(op), &[5, 4, 4, 2], &[5, 4], letters));
            if op.mask.looks_back() {
                let op = Attention { mask: Mask { documents: Documents::Apart, ..op.mask }, ..op };
                all.push(case(Op::Attention(op), &[5, 4, 4, 2], &[5, 4], letters));
                all.push(case(Op::AttentionGrad(op), &[5, 4, 4, 5, 4, 5, 2], &[5, 4, 4], letters));
                all.push(case(Op::AttentionSink(op), &[5, 4, 4, 2, 2], &[5, 4], letters));
            }
        }
    }
    for letters in [attention[0], attention[1]] {
        all.push(case(Op::SinkGrad, &[2, 5, 4, 5], &[2], letters));
    }
    let joined: &[(char, u64, u64, u64)] = &[('b', 0, 2, 2), ('t', 0, 7, 7), ('g', 2, 3, 4), ('n', 0, 5, 5), ('m', 0, 3, 3), ('d', 0, 8, 8)];
    all.push(case(Op::Append, &[4, 3], &[4], joined));
    all.push(case(Op::AppendGradHead, &[4], &[4], joined));
    all.push(case(Op::AppendGradTail, &[4], &[3], joined));
    all.push(case(Op::RmsNorm { eps: 1e-5 }, &[3, 2], &[3], rows));
    all.push(case(Op::RmsNormGradInput { eps: 1e-5 }, &[3, 2, 3], &[3], rows));
    all.push(case(Op::RmsNormGradWeight { eps: 1e-5 }, &[3, 3], &[2], wide));
    // All columns; some of them padding; nothing but padding.
    let columns: [&'static [(char, u64, u64, u64)]; 3] = [
        &[('a', 0, 2, 2), ('b', 0, 5, 5), ('c', 0, 37, 37)],
        &[('a', 0, 2, 2), ('b', 0, 5, 5), ('c', 26, 13, 37)],
        &[('a', 0, 2, 2), ('b', 0, 5, 5), ('c', 39, 13, 37)],
    ];
    for letters in columns {
        all.push(case(Op::CeStats, &[3, 2], &[2, 2], letters));
        all.push(case(Op::CeStatsGrad, &[3, 2, 2, 2, 2], &[3], letters));
    }
    let experts: &[(char, u64, u64, u64)] = &[('b', 0, 3, 3), ('s', 0, 7, 7), ('e', 0, 5, 5), ('h', 0, 11, 11), ('f', 0, 6, 6)];
    let grouped: &[(char, u64, u64, u64)] = &[('b', 0, 3, 3), ('s', 0, 7, 7), ('e', 0, 9, 9)];
    let even: &[(char, u64, u64, u64)] = &[('a', 0, 3, 3), ('b', 0, 20, 20), ('c', 0, 5, 5)];
    for tokens in [1, 3, 20] {
        all.push(case(Op::Capacity { tokens }, &[3], &[3], even));
    }
    all.push(case(Op::CorrectionGrad, &[3], &[1], experts));
    for renormalize in [Renormalize::Yes, Renormalize::No] {
        for score in [Score::Softmax, Score::Sigmoid] {
            for (correction, ins) in [(Correction::No, &[3][..]), (Correction::Added, &[3, 1][..])] {
                for groups in [None, Some(GroupScore::Best), Some(GroupScore::TwoBest)] {
                    let groups = groups.map(|by| Groups { count: 3, kept: 2, by });
                    let router = Router { k: TOP_K, score, renormalize, groups, correction, scale: 1.5 };
                    let letters = if groups.is_some() { grouped } else { experts };
                    all.push(case(Op::TopKGate(router), ins, &[3], letters));
                    all.push(case(Op::TopKGateGrad(router), &[3, 3, 3], &[3], letters));
                }
            }
        }
    }
    let expert = |left: &str, right: &str, out: &str| Op::ExpertEinsum(spec(left, right, out));
    all.extend([
        case(Op::Dispatch, &[3, 3], &[4], experts),
        case(Op::Undispatch, &[4, 3], &[3], experts),
        case(Op::Combine, &[4, 3], &[3], experts),
        case(Op::CombineGradRows, &[3, 3], &[4], experts),
        case(Op::CombineGradGate, &[3, 4, 3], &[3], experts),
        case(Op::AddExpertBias, &[4, 2, 3], &[4], experts),
        case(Op::ExpertBiasGrad, &[4, 3], &[2], experts),
        case(expert("bseh", "efh", "bsef"), &[4, 3, 3], &[4], experts),
        case(expert("bsef", "efh", "bseh"), &[4, 3, 3], &[4], experts),
        case(expert("bsef", "bseh", "efh"), &[4, 4, 3], &[3], experts),
    ]);
    all
}

/// A small generator of numbers that look random (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        splitmix::next(&mut self.0)
    }
    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
    /// In [−2, 2), and an f32, so that both element types compute from the same numbers.
    fn number(&mut self) -> f64 {
        f64::from((self.uniform() * 4.0 - 2.0) as f32)
    }
}

fn check(case: &Case, dtype: DType, write: Write, tolerance: f64) {
    // Which letter counts positions.
    let sequence = match case.op {
        Op::Attention(_) | Op::AttentionGrad(_) | Op::AddPosition | Op::AddPositionGrad => Some('s'),
        Op::Rope(_) | Op::Capacity { .. } => Some('b'),
        _ => None,
    };
    let length = sequence.map_or(0, |l| case.letters.iter().find(|x| x.0 == l).expect("letter").3);
    let orders = [2, 10].map(|blocks| Order::Zigzag { blocks }).into_iter().filter(|o| length > 0 && o.fits(length));
    for order in std::iter::once(Order::Straight).chain(orders) {
        check_in(case, order, dtype, write, tolerance);
    }
}

fn check_in(case: &Case, order: Order, dtype: DType, write: Write, tolerance: f64) {
    let Case { op, ranks: (in_ranks, out_ranks), letters } = case;
    let mut random = Random(in_ranks.len() as u64 * 17 + letters.len() as u64);
    let rule = rule(op, in_ranks, out_ranks);
    let extent = |label: char| letters.iter().find(|l| l.0 == label).map(|&(_, start, len, logical)| Extent { start, len, logical }).expect("letter");
    let context = OpContext {
        extents: rule.factors.iter().map(|f| (f.label, extent(f.label))).collect(),
        inv_tokens: 0.125,
        loss_scale: 8.0,
        node: NodeId(9),
        draws: DRAWS,
        order,
        turn: u64::from(letters.iter().any(|l| l.0 == 't' && l.2 < l.3)),
    };
    let local = |labels: &Vec<char>, dtype: DType| LocalType {
        dtype,
        dims: labels.iter().map(|&l| extent(l).len).collect(),
        layout: if labels.len() > 3 && labels.starts_with(&['b', 's', 'e']) { Layout::TopK { k: TOP_K, capacity: None } } else { Layout::Dense },
        experts: if labels.len() > 2 { extent(labels[2]).logical } else { 0 },
    };
    let in_types: Vec<LocalType> = rule.ins.iter().enumerate().map(|(i, l)| local(l, if is_index(op, i) { DType::I32 } else { dtype })).collect();
    let out_types: Vec<LocalType> = rule.outs.iter().map(|(l, _)| local(l, dtype)).collect();
    let gate_at = match op {
        Op::Capacity { .. } => Some(0),
        Op::TopKGateGrad(_) | Op::ExpertBiasGrad => Some(1),
        Op::Dispatch | Op::Undispatch | Op::Combine | Op::CombineGradRows => Some(1),
        Op::CombineGradGate | Op::ExpertEinsum(_) | Op::AddExpertBias => Some(2),
        _ => None,
    };
    let gate = gate_at.map(|at| {
        let mut gate = Tensor::zeros(&in_types[at]);
        let experts = gate.dim(2);
        for row in gate.data.chunks_exact_mut(experts) {
            for _ in 0..TOP_K {
                row[(random.next() % experts as u64) as usize] = f64::from((random.uniform() * 0.9 + 0.1) as f32);
            }
        }
        gate
    });
    let vocabulary = letters.iter().map(|l| l.3).max().unwrap_or(1).min(37);
    let ins: Vec<Tensor> = in_types
        .iter()
        .enumerate()
        .map(|(at, ty)| {
            if gate_at == Some(at) {
                return gate.clone().expect("made above");
            }
            let elems = ty.dims.iter().product::<u64>();
            let values = match op {
                Op::Attention(_) | Op::AttentionSink(_) | Op::AttentionGrad(_) if is_index(op, at) => begins(&context, ty.dims[0], &mut random),
                _ => (0..elems).map(|_| if is_index(op, at) { (random.next() % vocabulary) as f64 } else { random.number() }).collect(),
            };
            let dense = Tensor::dense(&ty.dims, values);
            match &gate {
                Some(gate) => dense.to_layout(ty.layout, gate),
                None => dense,
            }
        })
        .collect();
    let start: Vec<Vec<f64>> = out_types.iter().map(|t| (0..t.elems()).map(|_| random.number()).collect()).collect();
    let mut want = eval(op, &context, &ins.iter().collect::<Vec<_>>(), &out_types);
    if write == Write::Add {
        want.iter_mut().zip(&start).for_each(|(w, s)| w.data.iter_mut().zip(s).for_each(|(w, s)| *w += s));
    }
    let kernel = Kernel::prepare(op, &context, &in_types, &out_types).unwrap_or_else(|e| panic!("{op:?}: {e}"));
    let got = run(&kernel, dtype, &ins, &in_types, start, write);
    for (at, (got, want)) in got.iter().zip(&want).enumerate() {
        let scale = want.data.iter().filter(|w| w.is_finite()).fold(1e-3, |m: f64, w| m.max(w.abs()));
        for (i, (&g, &w)) in got.iter().zip(&want.data).enumerate() {
            assert!((g - w).abs() <= tolerance * scale || g == w, "{op:?} {dtype} {write:?} {letters:?}: result {at}[{i}] is {g}, expected {w}");
        }
    }
}

/// First positions of documents, which end at one token in four.
fn begins(context: &OpContext, batch: u64, random: &mut Random) -> Vec<f64> {
    let queries = context.extent('s');
    let sequence = |_| {
        let tokens: Vec<i32> = (0..queries.logical).map(|_| (random.next() % 4) as i32).collect();
        let first = first_positions(&tokens, 0);
        (0..queries.len).map(|i| f64::from(first[context.position('s', i) as usize])).collect::<Vec<_>>()
    };
    (0..batch).flat_map(sequence).collect()
}

/// Runs a kernel on data given, and returned, as f64.
fn run(kernel: &Kernel, dtype: DType, ins: &[Tensor], types: &[LocalType], outs: Vec<Vec<f64>>, write: Write) -> Vec<Vec<f64>> {
    let run = Run { write, inv_tokens: 0.125, loss_scale: 8.0, draws: DRAWS, threads: Threads::Caller };
    let ints: Vec<Vec<i32>> = ins.iter().map(|t| t.data.iter().map(|&x| x as i32).collect()).collect();
    if dtype == DType::F64 {
        let blocks: Vec<Block<'_>> =
            ins.iter().zip(types).zip(&ints).map(|((t, ty), i)| if ty.dtype == DType::I32 { Block::I32(i) } else { Block::F64(&t.data) }).collect();
        let mut outs = outs;
        let mut scratch = vec![f64::NAN; kernel.scratch_elems()];
        kernel.run(&blocks, &mut outs.iter_mut().map(|o| BlockMut::F64(o)).collect::<Vec<_>>(), BlockMut::F64(&mut scratch), &mut [], run);
        return outs;
    }
    let floats: Vec<Vec<f32>> = ins.iter().map(|t| t.data.iter().map(|&x| x as f32).collect()).collect();
    let blocks: Vec<Block<'_>> =
        floats.iter().zip(types).zip(&ints).map(|((t, ty), i)| if ty.dtype == DType::I32 { Block::I32(i) } else { Block::F32(t) }).collect();
    let mut outs: Vec<Vec<f32>> = outs.iter().map(|o| o.iter().map(|&x| x as f32).collect()).collect();
    let mut scratch = vec![f32::NAN; kernel.scratch_elems()];
    kernel.run(&blocks, &mut outs.iter_mut().map(|o| BlockMut::F32(o)).collect::<Vec<_>>(), BlockMut::F32(&mut scratch), &mut [], run);
    outs.iter().map(|o| o.iter().map(|&x| f64::from(x)).collect()).collect()
}

#[test]
fn every_kernel_computes_its_op_in_f64() {
    for case in cases() {
        check(&case, DType::F64, Write::Set, 1e-12);
        check(&case, DType::F64, Write::Add, 1e-12);
    }
}

#[test]
fn every_kernel_computes_its_op_in_f32() {
    for case in cases() {
        check(&case, DType::F32, Write::Set, 1e-5);
        check(&case, DType::F32, Write::Add, 1e-5);
    }
}

#[test]
fn products_with_nothing_to_sum_are_zero() {
    let mut out = [7.0f64; 6];
    let empty = product::Matrix { data: &[][..], row: 1, col: 1 };
    product::multiply([2, 3, 0], 1.0, empty, empty, product::MatrixMut { data: &mut out, row: 3, col: 1 }, Write::Set, Threads::Caller);
    assert_eq!(out, [0.0; 6]);
}

#[test]
fn a_spec_that_is_no_matrix_product_is_refused() {
    let ty = |dims: &[u64]| LocalType { dtype: DType::F32, dims: dims.to_vec(), layout: Layout::Dense, experts: 0 };
    let refuse = |op: &Op, l: &[u64], r: &[u64], o: &[u64], why: &str| {
        let error = Kernel::prepare(
            op,
            &OpContext { extents: Vec::new(), inv_tokens: 1.0, loss_scale: 1.0, node: NodeId(0), draws: DRAWS, order: Order::Straight, turn: 0 },
            &[ty(l), ty(r)],
            &[ty(o)],
        )
        .expect_err("refused")
        .to_string();
        assert!(error.contains(why), "{error}");
    };
    refuse(&einsum("abc", "bd", "acd"), &[2, 3, 4], &[3, 5], &[2, 4, 5], "do not stand together");
    refuse(&einsum("ab", "cd", "ad"), &[2, 3], &[4, 5], &[2, 5], "stands in one operand only");
    refuse(&einsum("ab", "bc", "ac"), &[2, 3], &[4, 5], &[2, 5], "has sizes 3 and 4");
}
