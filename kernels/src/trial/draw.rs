//! Random cases of each family: every op of it, edge sizes and any others, every element type, writing and adding, aligned and not.

use dplan_ir::dtype::DType;
use dplan_ir::op::{Activation, Attention, Correction, Documents, GroupScore, Groups, Mask, Op, Pairs, Renormalize, Rope, Rotation, Router, Score};
use dplan_ir::order::Order;
use dplan_ir::program::Write;

use super::{Case, Random, TARGET, letter, spec};
use crate::cuda::{Alignment, Tail};

/// Families, each with what draws a case of it.
pub const FAMILIES: [(&str, fn(&mut Random) -> Case); 16] = [
    ("pointwise", pointwise),
    ("norm", norm),
    ("columns", columns),
    ("lookups", lookups),
    ("rotary", rotary),
    ("loss", loss),
    ("router", router),
    ("router_scored", router_scored),
    ("shared_parts", shared_parts),
    ("experts", experts),
    ("products", products),
    ("products_in_eights", products_in_eights),
    ("products_and_more", |r| products_and_more(r, &FOLLOWED, Rows::Any)),
    ("products_and_more_in_eights", |r| products_and_more(r, FOLLOWED.split_at(3).1.split_at(5).0, Rows::Eights)),
    ("attention", attention),
    ("attention_on_matrix_units", attention_on_matrix_units),
];

/// Element type, write and alignment: every value of each, in few combinations, since each is a text to compile.
const MODES: [(DType, Write, Alignment); 6] = [
    (DType::F32, Write::Set, Alignment::Packs),
    (DType::F32, Write::Add, Alignment::Elements),
    (DType::Bf16, Write::Set, Alignment::Packs),
    (DType::Bf16, Write::Add, Alignment::Packs),
    (DType::F16, Write::Set, Alignment::Elements),
    (DType::F64, Write::Add, Alignment::Packs),
];

/// A case of an op, in one of the modes.
pub fn case(random: &mut Random, op: Op, ins: &[usize], outs: &[usize], letters: Vec<(char, u64, u64, u64)>) -> Case {
    let (dtype, write, alignment) = MODES[random.below(MODES.len() as u64) as usize];
    Case {
        op,
        ranks: (ins.to_vec(), outs.to_vec()),
        letters,
        dtype,
        out: None,
        write,
        alignment,
        top_k: 2,
        order: Order::Straight,
        target: TARGET,
        tails: Vec::new(),
    }
}

/// Types, write and alignment of a product, and what follows it.
pub type Followed = (DType, Option<DType>, Write, Alignment, &'static [Tail]);

const SILU: Tail = Tail::Act(Activation::Silu);
/// Every tail, after every other that it may follow, in every type, set and added to, aligned and not: on arithmetic units, then on matrix units, those first that a copy engine
/// can read for.
pub const FOLLOWED: [Followed; 10] = [
    (DType::F32, None, Write::Set, Alignment::Packs, &[Tail::Bias, Tail::Act(Activation::GeluTanh)]),
    (DType::F32, None, Write::Add, Alignment::Elements, &[Tail::Add, Tail::Bias]),
    (DType::F64, None, Write::Set, Alignment::Packs, &[Tail::ActGrad(Activation::Gelu)]),
    (DType::Bf16, None, Write::Set, Alignment::Packs, &[Tail::Bias]),
    (DType::Bf16, None, Write::Set, Alignment::Packs, &[Tail::Add]),
    (DType::Bf16, Some(DType::F32), Write::Set, Alignment::Packs, &[Tail::Bias, Tail::Add]),
    (DType::F16, None, Write::Set, Alignment::Packs, &[Tail::ActGrad(Activation::Relu)]),
    (DType::Bf16, None, Write::Add, Alignment::Packs, &[Tail::Bias, SILU, Tail::Add]),
    (DType::F16, Some(DType::F32), Write::Add, Alignment::Elements, &[SILU, Tail::Add]),
    (DType::Bf16, None, Write::Set, Alignment::Elements, &[Tail::Bias, Tail::ActGrad(Activation::QuickGelu)]),
];

/// How long rows of operands are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rows {
    Any,
    /// Multiples of eight, as a copy engine reads them.
    Eights,
}

/// A product with what follows it, which of the modes goes with which way to lie.
pub fn products_and_more(r: &mut Random, modes: &[Followed], rows: Rows) -> Case {
    // Operands, and the letters that are contiguous in them.
    const PRODUCTS: [(&str, &str, &str, &str); 3] = [("bsh", "fh", "bsf", "h"), ("bsf", "fh", "bsh", "fh"), ("gbd", "gds", "gbs", "ds")];
    let mode = r.below(modes.len() as u64) as usize;
    let ((dtype, out, write, alignment, tails), (a, b, c, contiguous)) = (modes[mode], PRODUCTS[mode % 3]);
    let letters = "bshfgd".chars().map(|l| match l {
        'b' if !c.starts_with('g') => letter(l, r.size(2)),
        'g' => letter(l, r.size(3)),
        _ if rows == Rows::Eights && contiguous.contains(l) => letter(l, 8 * r.size(17)),
        _ => letter(l, r.size(140)),
    });
    let letters = letters.collect();
    let drawn = case(r, Op::Einsum(spec(a, b, c)), &[a.len(), b.len()], &[c.len()], letters);
    Case { dtype, out, write, alignment, tails: tails.to_vec(), ..drawn }
}

fn abc(random: &mut Random, most: u64) -> Vec<(char, u64, u64, u64)> {
    vec![letter('a', random.size(4)), letter('b', random.size(33)), letter('c', random.size(most))]
}

fn pointwise(r: &mut Random) -> Case {
    let letters = abc(r, 300);
    // Operands reach from -2 to 2.
    let all = [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::Relu,
        Activation::QuickGelu,
        Activation::Clamp { limit: 1 },
        Activation::ClampAbove { limit: 1 },
    ];
    let f = all[r.below(all.len() as u64) as usize];
    match r.below(9) {
        0 => case(r, Op::Add, &[3, 3], &[3], letters),
        1 => case(r, Op::Sub, &[3, 3], &[3], letters),
        2 => case(r, Op::Neg, &[3], &[3], letters),
        3 => case(r, Op::Act(f), &[3], &[3], letters),
        4 => case(r, Op::ActGrad(f), &[3, 3], &[3], letters),
        5 => case(r, Op::Gated(f), &[3, 3], &[3], letters),
        6 => case(r, Op::GatedGrad(f), &[3, 3, 3], &[3, 3], letters),
        7 => {
            let bias = 1 + r.below(2) as usize;
            case(r, Op::AddBias, &[3, bias], &[3], letters)
        }
        _ => case(r, Op::MeanGrad, &[], &[3], letters),
    }
}

fn norm(r: &mut Random) -> Case {
    let letters = abc(r, 700);
    let eps = 1e-5;
    // Over heads: the last two dims are one row.
    let heads = vec![letter('a', r.size(4)), letter('b', r.size(9)), letter('c', r.size(9)), letter('d', r.size(70))];
    match r.below(9) {
        6 => case(r, Op::RmsNorm { eps }, &[4, 2], &[4], heads),
        7 => case(r, Op::RmsNormGradInput { eps }, &[4, 2, 4], &[4], heads),
        8 => case(r, Op::RmsNormGradWeight { eps }, &[4, 4], &[2], heads),
        0 => case(r, Op::RmsNorm { eps }, &[3, 1], &[3], letters),
        1 => case(r, Op::RmsNormGradInput { eps }, &[3, 1, 3], &[3], letters),
        2 => case(r, Op::RmsNormGradWeight { eps }, &[3, 3], &[1], letters),
        3 => case(r, Op::LayerNorm { eps }, &[3, 1, 1], &[3], letters),
        4 => case(r, Op::LayerNormGradInput { eps }, &[3, 1, 3], &[3], letters),
        _ => case(r, Op::LayerNormGradWeight { eps }, &[3, 3], &[1, 1], letters),
    }
}

fn columns(r: &mut Random) -> Case {
    let letters = vec![letter('a', r.size(9)), letter('b', r.size(129)), letter('c', r.size(200))];
    let keep = 1 + r.below(2);
    case(r, Op::SumLeading { keep: keep as u32 }, &[3], &[keep as usize], letters)
}

fn lookups(r: &mut Random) -> Case {
    let (b, s, h) = (r.size(3), r.size(40), r.size(130));
    let start = r.below(20);
    let tokens = vec![('v', start, 1 + r.below(30), 60), letter('b', b), letter('s', s), letter('h', h)];
    let table = s + start + r.below(5);
    let positions = vec![letter('b', b), ('s', start, s, table), letter('h', h), letter('p', table)];
    let (order, start, s, whole) = zigzag(r);
    let turned = vec![letter('b', b), ('s', start, s, whole), letter('h', h), letter('p', whole + r.below(3))];
    match r.below(6) {
        0 => case(r, Op::Embed, &[2, 2], &[3], tokens),
        1 => case(r, Op::EmbedGrad, &[2, 3], &[2], tokens),
        4 => Case { order, ..case(r, Op::AddPosition, &[3, 2], &[3], turned) },
        5 => Case { order, ..case(r, Op::AddPositionGrad, &[3], &[2], turned) },
        2 => case(r, Op::AddPosition, &[3, 2], &[3], positions),
        _ => case(r, Op::AddPositionGrad, &[3], &[2], positions),
    }
}

fn rotary(r: &mut Random) -> Case {
    let pairs = [1, 3, 8, 32][r.below(4) as usize];
    let rotation = if r.below(2) == 0 { Rotation::Forward } else { Rotation::Inverse };
    let inv_freq = (0..pairs).map(|i| 10000f64.powf(-(i as f64) / pairs as f64)).collect();
    // Whole vectors, or a part of them, in both ways to be paired.
    let parts = [(Pairs::Halves, 0, 0, 1.0), (Pairs::Neighbours, 3, 0, 1.0), (Pairs::Halves, 0, 5, 1.25)];
    let (pairing, first, rest, scale) = parts[r.below(3) as usize];
    let width = first + 2 * pairs + rest;
    let s = r.size(20);
    // Positions up to 131072 lose nothing.
    let letters = vec![letter('a', r.size(3)), ('b', r.below(131_072), s, 1 << 20), letter('c', r.size(5)), letter('d', width)];
    let (order, start, s, whole) = zigzag(r);
    let turned = vec![letter('a', r.size(3)), ('b', start, s, whole), letter('c', r.size(5)), letter('d', width)];
    let op = Op::Rope(Rope { rotation, pairs: pairing, start: first, scale, inv_freq });
    if r.below(2) == 0 { case(r, op, &[4], &[4], letters) } else { Case { order, ..case(r, op, &[4], &[4], turned) } }
}

fn loss(r: &mut Random) -> Case {
    let width = r.size(600);
    let start = r.below(20);
    // All columns, some of them padding, or nothing but padding.
    let logical = start + r.below(width + 10);
    let letters = vec![letter('a', r.size(3)), letter('b', r.size(9)), ('c', start, width, logical)];
    match r.below(3) {
        0 => case(r, Op::CeStats, &[3, 2], &[2, 2], letters),
        1 => case(r, Op::CeStatsGrad, &[3, 2, 2, 2, 2], &[3], letters),
        _ => case(r, Op::Mean, &[3], &[0], letters),
    }
}

fn router(r: &mut Random) -> Case {
    let letters = vec![letter('b', r.size(3)), letter('s', r.size(20)), letter('e', r.size(70))];
    let (k, renormalize) = (1 + r.below(8), if r.below(2) == 0 { Renormalize::Yes } else { Renormalize::No });
    let op = if r.below(2) == 0 { Op::TopKGate(Router::softmax(k, renormalize)) } else { Op::TopKGateGrad(Router::softmax(k, renormalize)) };
    let ins: &[usize] = if matches!(op, Op::TopKGate(_)) { &[3] } else { &[3, 3, 3] };
    if r.below(3) == 0 {
        // Longer than a block of threads now and then, in any order.
        let (order, _, _, s) = zigzag(r);
        let (order, s) = if r.below(2) == 0 { (order, s) } else { (Order::Straight, r.size(700)) };
        let letters = vec![letter('a', r.size(3)), letter('b', s), letter('c', r.size(9))];
        let op = Op::Capacity { tokens: 1 + r.below(s) };
        return Case { top_k: k, order, ..case(r, op, &[3], &[3], letters) };
    }
    Case { top_k: k, ..case(r, op, ins, &[3], letters) }
}

/// Routers of any score, in groups or not, corrected or not.
fn router_scored(r: &mut Random) -> Case {
    let score = [Score::Softmax, Score::Sigmoid][r.below(2) as usize];
    let by = [GroupScore::Best, GroupScore::TwoBest][r.below(2) as usize];
    let groups = [None, Some(Groups { count: 4, kept: 2, by }), Some(Groups { count: 8, kept: 3, by })][r.below(3) as usize];
    let correction = [Correction::No, Correction::Added][r.below(2) as usize];
    let renormalize = [Renormalize::No, Renormalize::Yes][r.below(2) as usize];
    let experts = groups.map_or(1, |g| g.count) * r.size(9);
    let letters = vec![letter('b', r.size(3)), letter('s', r.size(20)), letter('e', experts)];
    // As many as there are to choose from, at most.
    let router = Router { k: 1 + r.below(experts.min(6)), score, renormalize, groups, correction, scale: [1.0, 2.5][r.below(2) as usize] };
    let ins: &[usize] = if correction == Correction::Added { &[3, 1] } else { &[3] };
    let drawn = match r.below(5) {
        0..=2 => case(r, Op::TopKGate(router), ins, &[3], letters),
        3 => case(r, Op::TopKGateGrad(router), &[3, 3, 3], &[3], letters),
        _ => case(r, Op::CorrectionGrad, &[3], &[1], letters),
    };
    Case { top_k: router.k, ..drawn }
}

/// Keys of heads with a part that all share, and what goes back to both.
fn shared_parts(r: &mut Random) -> Case {
    let (own, shared, heads) = (r.size(40), r.size(40), r.size(9));
    let valid = 1 + r.below(heads);
    let letters = vec![
        letter('b', r.size(3)),
        letter('t', r.size(20)),
        ('g', 0, heads, valid),
        letter('n', own),
        letter('m', shared),
        letter('d', own + shared),
    ];
    match r.below(3) {
        0 => case(r, Op::Append, &[4, 3], &[4], letters),
        1 => case(r, Op::AppendGradHead, &[4], &[4], letters),
        _ => case(r, Op::AppendGradTail, &[4], &[3], letters),
    }
}

fn experts(r: &mut Random) -> Case {
    let letters = vec![letter('b', r.size(3)), letter('s', r.size(70)), letter('e', r.size(9)), letter('h', r.size(40)), letter('f', r.size(70))];
    let expert = |a: &str, b: &str, c: &str| Op::ExpertEinsum(spec(a, b, c));
    let drawn = match r.below(10) {
        0 => case(r, Op::Dispatch, &[3, 3], &[4], letters),
        1 => case(r, Op::Undispatch, &[4, 3], &[3], letters),
        2 => case(r, Op::Combine, &[4, 3], &[3], letters),
        3 => case(r, Op::CombineGradRows, &[3, 3], &[4], letters),
        4 => case(r, Op::CombineGradGate, &[3, 4, 3], &[3], letters),
        5 => case(r, expert("bseh", "efh", "bsef"), &[4, 3, 3], &[4], letters),
        7 => case(r, Op::AddExpertBias, &[4, 2, 3], &[4], letters),
        8 => case(r, Op::ExpertBiasGrad, &[4, 3], &[2], letters),
        6 => case(r, expert("bsef", "efh", "bseh"), &[4, 3, 3], &[4], letters),
        _ => case(r, expert("bsef", "bseh", "efh"), &[4, 4, 3], &[3], letters),
    };
    Case { top_k: 1 + r.below(3), ..drawn }
}

fn products(r: &mut Random) -> Case {
    let size = |r: &mut Random| r.size(140);
    let letters =
        vec![letter('b', r.size(2)), letter('s', size(r)), letter('h', size(r)), letter('f', size(r)), letter('g', r.size(3)), letter('d', size(r))];
    let specs = [("bsh", "fh", "bsf"), ("bsf", "fh", "bsh"), ("bsf", "bsh", "fh"), ("gbd", "gds", "gbs"), ("bsh", "hf", "bsf")];
    let (a, b, c) = specs[r.below(5) as usize];
    let drawn = case(r, Op::Einsum(spec(a, b, c)), &[a.len(), b.len()], &[c.len()], letters);
    let out = (r.below(2) == 0).then(|| drawn.dtype.accumulator());
    Case { out, ..drawn }
}

/// Products whose rows copy engines take: all sizes are multiples of eight.
fn products_in_eights(r: &mut Random) -> Case {
    let drawn = products(r);
    let letters =
        drawn.letters.iter().map(|&(label, ..)| if "bg".contains(label) { letter(label, r.size(3)) } else { letter(label, 8 * r.size(24)) });
    let (letters, (dtype, out, write)) = (
        letters.collect(),
        [(DType::Bf16, None, Write::Set), (DType::F16, None, Write::Add), (DType::Bf16, Some(DType::F32), Write::Add)][r.below(3) as usize],
    );
    Case { letters, dtype, out, write, alignment: Alignment::Packs, ..drawn }
}

/// A sequence in zigzag order, and this rank's block of it: (order, start, length, whole length).
fn zigzag(r: &mut Random) -> (Order, u64, u64, u64) {
    let (blocks, chunk) = (1 + r.below(3), 1 + r.below(20));
    let whole = 2 * blocks * chunk;
    (Order::Zigzag { blocks }, r.below(blocks) * 2 * chunk, 2 * chunk, whole)
}

/// Widths of heads and their modes; a mask that bounds what is seen is another text.
fn attention_case(r: &mut Random, widths: &[(u64, u64, usize, bool)], most: u64) -> Case {
    let (d, e, mode, bound) = widths[r.below(widths.len() as u64) as usize];
    let s = r.size(most);
    let start = if r.below(2) == 0 { 0 } else { r.below(40) };
    let heads = r.size(2);
    let (groups, valid) = (r.size(2), 1 + r.below(heads));
    let letters = vec![
        letter('b', r.size(2)),
        ('s', start, s, s + start),
        letter('t', s + start),
        letter('g', groups),
        ('r', 0, heads, valid),
        letter('d', d),
        letter('e', e),
    ];
    let (order, start, s, whole) = if bound && mode % 2 == 0 { zigzag(r) } else { (Order::Straight, start, s, s + start) };
    // All keys, or a block of another rank as long as that of the queries.
    let keys = if order != Order::Straight && r.below(2) == 0 { (r.below(whole / s) * s, s) } else { (0, whole) };
    let letters = letters.into_iter().map(|l| match l.0 {
        's' => ('s', start, s, whole),
        't' => ('t', keys.0, keys.1, whole),
        _ => l,
    });
    let letters = letters.collect();
    let (causal, window) = if bound { [(true, None), (true, Some(5)), (false, Some(40))][r.below(3) as usize] } else { (false, None) };
    let documents = if bound && r.below(3) == 0 { Documents::Apart } else { Documents::Joined };
    let op = Attention { mask: Mask { causal, window, documents }, scale: 0.4 };
    let with_first = |ranks: &[usize]| ranks.iter().copied().chain((documents == Documents::Apart).then_some(2)).collect::<Vec<_>>();
    let drawn = match r.below(5) {
        0 => case(r, Op::Attention(op), &with_first(&[5, 4, 4]), &[5, 4], letters),
        1 => case(r, Op::AttentionSink(op), &with_first(&[5, 4, 4, 2]), &[5, 4], letters),
        2 => case(r, Op::SinkGrad, &[2, 5, 4, 5], &[2], letters.into_iter().filter(|l| !"td".contains(l.0)).collect()),
        _ => case(r, Op::AttentionGrad(op), &with_first(&[5, 4, 4, 5, 4, 5]), &[5, 4, 4], letters),
    };
    let (dtype, write, alignment) = MODES[mode];
    Case { dtype, write, alignment, order, ..drawn }
}

fn attention(r: &mut Random) -> Case {
    attention_case(r, &[(4, 4, 0, true), (8, 12, 1, true), (17, 5, 0, false), (5, 3, 2, true), (4, 6, 5, true)], 70)
}

fn attention_on_matrix_units(r: &mut Random) -> Case {
    attention_case(r, &[(16, 16, 2, true), (32, 16, 3, true), (16, 32, 2, false), (16, 16, 4, true)], 130)
}
