//! The optimizer's kernels against its scalar equations: every optimizer, stretches that weight decay pulls and does not, gradients that are scaled or overflowed.

mod shim;

use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars, update};
use dplan_kernels::cuda::flat::{self, Update};
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
    })
}

#[test]
fn updates_follow_their_equations() {
    let Some(dir) = folder("shim_update") else { return };
    // Those that GPUs have kernels for.
    let ours = || Optimizer::ALL.into_iter().filter(|o| !o.trusts());
    let all = || ours().flat_map(|o| SCALES.into_iter().flat_map(move |s| STRETCHES.map(|t| (o, s, t))));
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
        let ins: Vec<Buffer> = [buffer(&g, DType::F32)].into_iter().chain(scale.map(|s| buffer(&[s], DType::F32))).collect();
        let ins: Vec<&[u8]> = ins.iter().map(Buffer::bytes).collect();
        let mut results: Vec<&mut [u8]> = outs.iter_mut().map(Buffer::bytes_mut).collect();
        library.run(routine, &ins, &mut results, &scalars(&at), Options::seeded(1)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let found: Vec<Vec<f64>> = outs.iter().map(Buffer::values).collect();
        for (stretch, pulled) in stretches {
            let at = if *pulled { at } else { at.without_decay() };
            for i in stretch.start as usize..stretch.end as usize {
                let mut want = vec![p[i], m[i], v[i], before[i]];
                // Gradients that overflowed change nothing.
                if scale.is_none_or(f64::is_finite) {
                    let (p, [m, v]) = update(optimizer, p[i], g[i] * scale.unwrap_or(1.0), [m[i], v[i]], &at, 1.0);
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
