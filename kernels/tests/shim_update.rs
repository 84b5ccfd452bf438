//! The optimizer's kernels against its scalar equations: every optimizer, stretches that weight decay pulls and does not, gradients that are scaled or overflowed.

mod shim;

use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars, trust_ratio, trust_terms, update};
use dplan_kernels::cuda::flat::{self, Trust, TrustSums, Update};
use dplan_kernels::cuda::{Alignment, Routine, scalars};
use dplan_kernels::shim::{Library, Options};
use shim::{Buffer, Random, folder, round, ulp};

const N: u64 = 700;
/// A multiple of what a thread takes at once, and none.
const STRETCHES: [&[(std::ops::Range<u64>, bool)]; 2] = [&[(0..512, true), (512..N, false)], &[(0..333, false), (333..N, true)]];
const SCALES: [Option<f64>; 3] = [None, Some(0.5), Some(f64::NAN)];

fn step(clip: f64, loss_scale: f64) -> StepScalars {
    let hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.3, momentum: 0.8, clip };
    StepScalars { loss_scale, ..StepScalars::new(hyper, 3, 0.125) }
}

/// Of the two stretches: a ratio of 2/3, and one of a parameter that is zero.
const SUMS: [f64; 4] = [4.0, 9.0, 0.0, 9.0];
const RATIOS: [f64; 2] = [2.0 / 3.0, 1.0];

fn routine(optimizer: Optimizer, scale: Option<f64>, stretches: &[(std::ops::Range<u64>, bool)]) -> Routine {
    flat::update(&Update {
        optimizer,
        state: DType::F32,
        grad: DType::F32,
        param: Some(DType::Bf16),
        scale: scale.map(|_| DType::F32),
        n: N,
        alignment: Alignment::Packs,
        stretches,
        trust: optimizer.trusts().then_some(Trust { sums: DType::F32, members: &[0, 1] }),
    })
}

#[test]
fn updates_follow_their_equations() {
    let Some(dir) = folder("shim_update") else { return };
    let all = || Optimizer::ALL.into_iter().flat_map(|o| SCALES.into_iter().flat_map(move |s| STRETCHES.map(|t| (o, s, t))));
    let routines: Vec<Routine> = all().map(|(o, s, t)| routine(o, s, t)).collect();
    let library = Library::compile(&dir, "update", routines.iter().flat_map(|r| &r.launches)).unwrap_or_else(|e| panic!("{e}"));
    let at = step(1.0, 1.0);
    let mut random = Random(21);
    for ((optimizer, scale, stretches), routine) in all().zip(&routines) {
        let name = format!("{} scaled by {scale:?}, {stretches:?}", optimizer.name());
        let mut draw = |low: f64, high: f64| -> Vec<f64> { (0..N).map(|_| round(low + (high - low) * random.uniform(), DType::F32)).collect() };
        let (p, g, m, v, before) = (draw(-2.0, 2.0), draw(-2.0, 2.0), draw(-0.5, 0.5), draw(0.0, 0.5), vec![7.0; N as usize]);
        let buffer = |values: &[f64], dtype: DType| Buffer::new(values, dtype, Alignment::Packs);
        let mut outs = vec![buffer(&p, DType::F32), buffer(&m, DType::F32)];
        outs.extend((optimizer.moments() == 2).then(|| buffer(&v, DType::F32)));
        outs.push(buffer(&before, DType::Bf16));
        let ins = [buffer(&g, DType::F32)].into_iter().chain(scale.map(|s| buffer(&[s], DType::F32)));
        let ins: Vec<Buffer> = ins.chain(optimizer.trusts().then(|| buffer(&SUMS, DType::F32))).collect();
        let ins: Vec<&[u8]> = ins.iter().map(Buffer::bytes).collect();
        let mut results: Vec<&mut [u8]> = outs.iter_mut().map(Buffer::bytes_mut).collect();
        library.run(routine, &ins, &mut results, &scalars(&at), Options::seeded(1)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let found: Vec<Vec<f64>> = outs.iter().map(Buffer::values).collect();
        for ((stretch, pulled), ratio) in stretches.iter().zip(RATIOS) {
            let trust = if optimizer.trusts() { ratio } else { 1.0 };
            let at = if *pulled { at } else { at.without_decay() };
            for i in stretch.start as usize..stretch.end as usize {
                let mut want = vec![p[i], m[i], v[i], before[i]];
                // Gradients that overflowed change nothing.
                if scale.is_none_or(f64::is_finite) {
                    let (p, [m, v]) = update(optimizer, p[i], g[i] * scale.unwrap_or(1.0), [m[i], v[i]], &at, trust);
                    want = vec![p, m, v, p];
                }
                if optimizer.moments() == 1 {
                    want.remove(2);
                }
                for (which, (found, want)) in found.iter().zip(&want).enumerate() {
                    let short = if which + 1 == outs.len() { ulp(*want, DType::Bf16) } else { 0.0 };
                    let (found, allowed) = (found[i], 1e-6 + short);
                    assert!((found - want).abs() <= allowed, "{name}: result {which}[{i}] is {found}, expected {want} within {allowed:e}");
                }
            }
        }
    }
}

/// Gradients are rounded to the nearest, of two to the even one, and shares are added up in their order, to the bit.
#[test]
fn gradients_are_rounded_and_shares_added_up_as_they_stand() {
    let Some(dir) = folder("shim_update") else { return };
    let mut random = Random(5);
    let draws: Vec<(u64, u64, Alignment)> = [(1, 1), (2, 128), (3, 384), (8, 1000), (5, 77)]
        .map(|(shares, n)| (shares, n, if n % 8 == 0 { Alignment::Packs } else { Alignment::Elements }))
        .to_vec();
    let routine = |&(shares, n, alignment): &(u64, u64, Alignment)| {
        [flat::cast(DType::F32, DType::Bf16, shares * n, alignment), flat::sum_shares(DType::Bf16, DType::F32, shares, n)]
    };
    let routines: Vec<[Routine; 2]> = draws.iter().map(routine).collect();
    let launches = routines.iter().flatten().flat_map(|r| &r.launches);
    let library = Library::compile(&dir, "wire", launches).unwrap_or_else(|e| panic!("{e}"));
    for ((shares, n, alignment), [cast, sum]) in draws.into_iter().zip(&routines) {
        // Every other number is in the middle of two.
        let middle = |x: f64| f64::from(f32::from_bits((x as f32).to_bits() & 0xffff_0000 | 0x8000));
        let draw = |i: u64| if i.is_multiple_of(2) { middle(random.uniform() - 0.5) } else { round(random.uniform() - 0.5, DType::F32) };
        let gradients: Vec<f64> = (0..shares * n).map(draw).collect();
        let source = Buffer::new(&gradients, DType::F32, alignment);
        let mut wire = Buffer::new(&vec![0.0; gradients.len()], DType::Bf16, alignment);
        library
            .run(cast, &[source.bytes()], &mut [wire.bytes_mut()], &scalars(&step(1.0, 1.0)), Options::seeded(3))
            .unwrap_or_else(|e| panic!("{e}"));
        let rounded: Vec<f64> = gradients.iter().map(|&x| DType::Bf16.round(x)).collect();
        assert_eq!(wire.values(), rounded, "{shares} of {n}");
        let mut total = Buffer::new(&vec![7.0; n as usize], DType::F32, alignment);
        library.run(sum, &[wire.bytes()], &mut [total.bytes_mut()], &scalars(&step(1.0, 1.0)), Options::seeded(4)).unwrap_or_else(|e| panic!("{e}"));
        let added = |i: usize| (1..shares as usize).fold(rounded[i] as f32, |sum, s| sum + rounded[s * n as usize + i] as f32);
        let wanted: Vec<f64> = (0..n as usize).map(|i| f64::from(added(i))).collect();
        assert_eq!(total.values(), wanted, "{shares} of {n}");
    }
}

/// A bucket of parameters of all sizes with gaps between them, of some of which this rank has nothing; how they are typed and scaled is one of few, since each is a
/// text to compile.
struct Bucket {
    n: u64,
    stretches: Vec<(std::ops::Range<u64>, bool)>,
    members: Vec<usize>,
    parameters: u64,
    state: DType,
    param: Option<DType>,
    scale: Option<f64>,
    alignment: Alignment,
}

impl Bucket {
    fn drawn(random: &mut Random, most: u64) -> Bucket {
        let modes = [
            (DType::F32, Some(DType::Bf16), Some(0.5), Alignment::Packs),
            (DType::F32, None, None, Alignment::Elements),
            (DType::F64, None, Some(0.25), Alignment::Packs),
        ];
        let (state, param, scale, alignment) = modes[random.below(3) as usize];
        let (mut n, mut stretches, mut members) = (random.below(3) * 8, Vec::new(), Vec::new());
        // More than a launch has, now and then: small ones.
        let (parameters, most) = if random.below(4) == 0 { (10 + random.below(30), most.min(100)) } else { (1 + random.below(6), most) };
        for member in (0..parameters as usize).filter(|_| random.below(5) > 0).collect::<Vec<_>>() {
            let size = random.size(most);
            stretches.push((n..n + size, random.below(2) == 0));
            members.push(member);
            n = (n + size).next_multiple_of(1 + 7 * random.below(2));
        }
        Bucket { n, stretches, members, parameters, state, param, scale, alignment }
    }
    fn routines(&self) -> [Routine; 2] {
        let Bucket { n, state, param, alignment, parameters, .. } = *self;
        let (grad, scale, stretches) = (state, self.scale.map(|_| state), &self.stretches[..]);
        let trust = Trust { sums: state, members: &self.members };
        let sums = flat::trust_sums(&TrustSums { state, grad, scale, alignment, stretches, trust, parameters });
        [sums, flat::update(&Update { optimizer: Optimizer::Lamb, state, grad, param, scale, n, alignment, stretches, trust: Some(trust) })]
    }
}

/// Trust sums of random buckets, and the steps that take them, against f64; the same bits under twenty orders of threads.
#[test]
fn lamb_sums_and_steps_follow_their_equations() {
    let Some(dir) = folder("shim_update") else { return };
    let mut random = Random(33);
    // Some parameters are of several blocks of the sum.
    let buckets: Vec<Bucket> = (0..200).map(|i| Bucket::drawn(&mut random, if i % 20 == 0 { 40_000 } else { 900 })).collect();
    let routines: Vec<[Routine; 2]> = buckets.iter().map(Bucket::routines).collect();
    let library = Library::compile(&dir, "lamb", routines.iter().flatten().flat_map(|r| &r.launches)).unwrap_or_else(|e| panic!("{e}"));
    let at = step(1.0, 1.0);
    let (mut elems, mut blocks) = (0, 0);
    for (number, (bucket, [sums, update_all])) in buckets.iter().zip(&routines).enumerate() {
        let dtype = bucket.state;
        let mut draw = |low: f64, high: f64| -> Vec<f64> { (0..bucket.n).map(|_| round(low + (high - low) * random.uniform(), dtype)).collect() };
        let (p, g, m, v, before) = (draw(-2.0, 2.0), draw(-2.0, 2.0), draw(-0.5, 0.5), draw(0.0, 0.5), vec![7.0; bucket.n as usize]);
        let buffer = |values: &[f64], dtype: DType| Buffer::new(values, dtype, bucket.alignment);
        let scale = bucket.scale.map(|s| buffer(&[s], dtype));
        let run = |order: u64| -> (Buffer, Vec<Buffer>) {
            let flat = [&p, &g, &m, &v].map(|values| buffer(values, dtype));
            let mut total = buffer(&vec![0.0; 2 * bucket.parameters as usize], dtype);
            let ins: Vec<&[u8]> = flat.iter().chain(&scale).map(Buffer::bytes).collect();
            let ran =
                library.run(sums, &ins, &mut [total.bytes_mut()], &scalars(&at), Options::seeded(order)).unwrap_or_else(|e| panic!("{number}: {e}"));
            assert_eq!(ran.unwritten, [0], "{number}");
            let [p, g, m, v] = flat;
            let mut outs: Vec<Buffer> = [p, m, v].into_iter().chain(bucket.param.map(|t| buffer(&before, t))).collect();
            let ins: Vec<&[u8]> = [&g].into_iter().chain(&scale).chain([&total]).map(Buffer::bytes).collect();
            let mut results: Vec<&mut [u8]> = outs.iter_mut().map(Buffer::bytes_mut).collect();
            library.run(update_all, &ins, &mut results, &scalars(&at), Options::seeded(order)).unwrap_or_else(|e| panic!("{number}: {e}"));
            (total, outs)
        };
        // As many as fit together, those that threads take in packs and others.
        let launches = |n: usize| if n == 0 { 0 } else { 1 + n / 16 + usize::from(n > 1) };
        assert!(update_all.launches.len() <= launches(bucket.stretches.len()), "{number}: {} launches", update_all.launches.len());
        assert!(sums.launches.len() <= 2 * launches(bucket.parameters as usize), "{number}: {} launches", sums.launches.len());
        let (total, outs) = run(1);
        for order in 2..=if number % 10 == 0 { 20 } else { 2 } {
            let (other, others) = run(order);
            let same = total.bytes() == other.bytes() && outs.iter().zip(&others).all(|(x, y)| x.bytes() == y.bytes());
            assert!(same, "bucket {number}: another result under order {order}");
        }
        let (exact, found, factor) = (if dtype == DType::F64 { 1e-12 } else { 1e-5 }, total.values(), bucket.scale.unwrap_or(1.0));
        let mut want: Vec<Vec<f64>> = [&p, &m, &v].into_iter().chain(bucket.param.map(|_| &before)).cloned().collect();
        let mut sums_of = vec![[0.0; 2]; bucket.parameters as usize];
        for (&member, (range, pulled)) in bucket.members.iter().zip(&bucket.stretches) {
            let at = if *pulled { at } else { at.without_decay() };
            let range = range.start as usize..range.end as usize;
            blocks += usize::from(range.len() > 16 * 1024);
            elems += range.len();
            let sums = &mut sums_of[member];
            range
                .clone()
                .for_each(|i| trust_terms(p[i], g[i] * factor, [m[i], v[i]], &at).iter().zip(sums.iter_mut()).for_each(|(x, sum)| *sum += x));
            for i in range {
                let (p, [m, v]) = update(Optimizer::Lamb, p[i], g[i] * factor, [m[i], v[i]], &at, trust_ratio(*sums));
                want.iter_mut().zip([p, m, v, p]).for_each(|(of, value)| of[i] = value);
            }
        }
        for (found, want) in found.iter().zip(sums_of.iter().flatten()) {
            assert!((found - want).abs() <= exact * want, "bucket {number}: a sum of {found}, expected {want}");
        }
        for (which, (found, want)) in outs.iter().zip(&want).enumerate() {
            for (i, (found, want)) in found.values().iter().zip(want).enumerate() {
                let short = if which == 3 { ulp(*want, DType::Bf16) } else { 0.0 };
                assert!(
                    (found - want).abs() <= exact * want.abs().max(1.0) + short,
                    "bucket {number}: result {which}[{i}] is {found}, expected {want}"
                );
            }
        }
    }
    assert!(elems > 50_000 && blocks >= 5, "{elems} elements, {blocks} sums of several blocks");
}

#[test]
fn the_clip_factor_is_that_of_the_equations() {
    let Some(dir) = folder("shim_update") else { return };
    let routine = flat::clip_scale(DType::F32, DType::F32);
    let library = Library::compile(&dir, "clip", &routine.launches).unwrap_or_else(|e| panic!("{e}"));
    for (clip, loss_scale) in [(1.0, 1.0), (1.0, 1024.0), (f64::INFINITY, 1.0), (f64::INFINITY, 1024.0)] {
        let at = step(clip, loss_scale);
        for square in [0.0, 0.25, 16.0, 1e10, f64::INFINITY, f64::NAN] {
            let (square_bytes, mut out) = ((square as f32).to_le_bytes(), [0u8; 4]);
            library.run(&routine, &[&square_bytes], &mut [&mut out], &scalars(&at), Options::seeded(1)).unwrap_or_else(|e| panic!("{e}"));
            let (found, want) = (f32::from_le_bytes(out), at.gradient_scale(f64::from(square as f32).sqrt()) as f32);
            assert!(found == want || found.is_nan() && want.is_nan(), "clip {clip}, scale {loss_scale}, Σg² {square}: {found}, expected {want}");
        }
    }
}
