//! Trials of what works on flat buckets, against its scalar equations.

use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Optimizer, trust_ratio, update};
use dplan_ir::program::Write;

use super::{Buffer, Prepared, Random, round, step, ulp};
use crate::cuda::flat::{self, Trust, Update};
use crate::cuda::{Alignment, Routine};

const N: u64 = 3000;
/// What weight decay pulls, and what it does not; of a multiple of what a thread takes at once, and of none.
const STRETCHES: [(std::ops::Range<u64>, bool); 2] = [(0..1024, true), (1024..N, false)];
/// Of LAMB: a ratio of 2/3, and one of a parameter that is zero.
const SUMS: [f64; 4] = [4.0, 9.0, 0.0, 9.0];

/// Steps of every optimizer with copies in halves, sums of squares, a clip factor, and sums of gradients in two types.
pub fn all(random: &mut Random) -> Vec<Prepared> {
    let mut trials: Vec<Prepared> = Optimizer::ALL.into_iter().map(|optimizer| steps(optimizer, random)).collect();
    let g = drawn(random, -2.0, 2.0);
    let square: f64 = g.iter().map(|x| x * x).sum();
    trials.push(trial("a sum of squares", flat::square_sum(DType::F32, DType::F32, N), &[&g], vec![(vec![1.0], DType::F32, vec![square + 1.0])]));
    let factor = step().gradient_scale(square.sqrt());
    trials.push(trial("a clip factor", flat::clip_scale(DType::F32, DType::F32), &[&[square]], vec![(vec![0.0], DType::F32, vec![factor])]));
    let before = drawn(random, -2.0, 2.0);
    let sums = g.iter().zip(&before).map(|(x, y)| x + y).collect();
    trials.push(trial("a sum of gradients", flat::add_into(DType::F32, DType::F32, N, Alignment::Packs), &[&g], vec![(before, DType::F32, sums)]));
    trials
}

fn drawn(random: &mut Random, low: f64, high: f64) -> Vec<f64> {
    (0..N).map(|_| round(low + (high - low) * random.uniform(), DType::F32)).collect()
}

/// Operands in f32, and results: what they are before, their type, and what they must be.
fn trial(name: &str, routine: Routine, ins: &[&[f64]], outs: Vec<(Vec<f64>, DType, Vec<f64>)>) -> Prepared {
    let buffer = |values: &[f64], dtype: DType| Buffer::new(values, dtype, Alignment::Packs);
    let short = |(_, dtype, want): &(Vec<f64>, DType, Vec<f64>)| (*dtype != DType::F32).then(|| want.iter().map(|w| ulp(*w, *dtype)).collect());
    Prepared {
        name: name.into(),
        routine,
        ins: ins.iter().map(|values| buffer(values, DType::F32)).collect(),
        starts: outs.iter().map(|(before, dtype, _)| buffer(before, *dtype)).collect(),
        bounds: outs.iter().map(short).collect(),
        want: outs.into_iter().map(|(_, _, want)| want).collect(),
        write: Write::Add,
    }
}

fn steps(optimizer: Optimizer, random: &mut Random) -> Prepared {
    let routine = flat::update(&Update {
        optimizer,
        state: DType::F32,
        grad: DType::F32,
        param: Some(DType::Bf16),
        scale: Some(DType::F32),
        n: N,
        alignment: Alignment::Packs,
        stretches: &STRETCHES,
        trust: optimizer.trusts().then_some(Trust { sums: DType::F32, members: &[0, 1] }),
    });
    let (p, g, m, v) = (drawn(random, -2.0, 2.0), drawn(random, -2.0, 2.0), drawn(random, -0.5, 0.5), drawn(random, 0.0, 0.5));
    let scale = [0.5];
    let mut after: Vec<[f64; 3]> = Vec::with_capacity(N as usize);
    for (which, (stretch, pulled)) in STRETCHES.iter().enumerate() {
        let at = if *pulled { step() } else { step().without_decay() };
        let trust = if optimizer.trusts() { trust_ratio([SUMS[2 * which], SUMS[2 * which + 1]]) } else { 1.0 };
        for i in stretch.start as usize..stretch.end as usize {
            let (p, [m, v]) = update(optimizer, p[i], g[i] * scale[0], [m[i], v[i]], &at, trust);
            after.push([p, m, v]);
        }
    }
    let column = |which: usize| after.iter().map(|x| x[which]).collect::<Vec<f64>>();
    let mut outs = vec![(p, DType::F32, column(0)), (m, DType::F32, column(1))];
    outs.extend((optimizer.moments() == 2).then(|| (v, DType::F32, column(2))));
    outs.push((vec![7.0; N as usize], DType::Bf16, column(0)));
    let ins: Vec<&[f64]> = [&g[..], &scale].into_iter().chain(optimizer.trusts().then_some(&SUMS[..])).collect();
    trial(&format!("steps of {}", optimizer.name()), routine, &ins, outs)
}
