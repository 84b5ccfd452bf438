//! The fits. Errors are relative, and judged by the cost model that will use the numbers.

use super::minimise::minimise;
use super::tables::{CollectiveRow, GemmRow, NetworkRow};
use super::{CollectiveFit, GemmFit, NetworkFit};
use dplan_planner::cost::comm::{Group, group_time};
use dplan_planner::machine::curves::{Curve, Curves, Op, RANKS};
use dplan_planner::machine::fitted::SIZES;
use dplan_planner::machine::{Link, Machine, builtin};
use dplan_planner::units::{Nanos, PerSecond};
use std::collections::BTreeMap;

/// Fewer rows are no surface.
const LEAST_ROWS: usize = 100;

/// Rows a fit looks at; the errors are of all rows.
const MOST_ROWS: usize = 800;

/// A product surface; nothing where the device is not built in or rows are few.
pub fn gemm(device: &str, dtype: &str, rows: &[GemmRow]) -> Option<GemmFit> {
    let spec = builtin(device)?.device;
    if rows.len() < LEAST_ROWS {
        return None;
    }
    let peak = spec.peak.bf16.0 as f64;
    let bandwidth = spec.bandwidth.0 as f64;
    let bytes = |r: &GemmRow| {
        let (m, n, k) = (r.m as f64, r.n as f64, r.k as f64);
        2.0 * (m * k + n * k + m * n)
    };
    let time = |p: &[f64], r: &GemmRow| {
        let (m, n, k) = (r.m as f64, r.n as f64, r.k as f64);
        let grown = 2.0 * m * n * k * (1.0 + p[1] / m) * (1.0 + p[1] / n) * (1.0 + p[2] / k);
        1e-9 * p[3] + (grown / (peak * p[0])).max(bytes(r) / (bandwidth * p[4]))
    };
    let large: Vec<&GemmRow> = rows.iter().filter(|r| r.m.min(r.n).min(r.k) >= 1024).collect();
    let sample: Vec<&GemmRow> =
        thinned(&large, MOST_ROWS * 5 / 8).into_iter().chain(thinned(&rows.iter().collect::<Vec<_>>(), MOST_ROWS * 3 / 8)).collect();
    let loss = |p: &[f64]| {
        let inside = p.iter().all(|x| *x >= 0.0) && p[0] > 0.05 && p[0] <= 1.0 && p[4] > 0.05 && p[4] <= 1.0;
        if inside { sample.iter().map(|r| (time(p, r) / r.seconds).ln().abs()).sum::<f64>() } else { f64::INFINITY }
    };
    let p = minimise(loss, &[0.75, 64.0, 64.0, 3_000.0, 0.8], &[0.1, 0.5, 0.5, 0.5, 0.1], 400);
    let mut errors: Vec<f64> = large.iter().map(|r| (time(&p, r) / r.seconds - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    Some(GemmFit {
        device: device.into(),
        dtype: dtype.into(),
        efficiency: (p[0] * 1e6).round() as u64,
        bandwidth: (p[4] * 1e6).round() as u64,
        grain: p[1].round() as u64,
        depth_grain: p[2].round() as u64,
        launch: p[3].round() as u64,
        rows: rows.len(),
        median: *errors.get(errors.len() / 2)?,
        worst_tenth: *errors.get(errors.len() * 9 / 10)?,
    })
}

/// Curves of each device and op that were measured among 2, 4 and 8 ranks.
pub fn collectives(rows: &BTreeMap<(String, Op, u64), Vec<CollectiveRow>>) -> Vec<CollectiveFit> {
    let mut fits = Vec::new();
    let devices: std::collections::BTreeSet<&str> = rows.keys().map(|k| k.0.as_str()).collect();
    for device in devices {
        for op in Op::ALL {
            let of = |ranks: u64| rows.get(&(device.to_string(), op, ranks));
            let measured: Vec<Curve> = RANKS.iter().filter_map(|&ranks| Some(Curve { op, ranks, points: knots(of(ranks)?)? })).collect();
            // The curves as the cost model will keep them.
            let curves = Curves::new(&measured);
            for curve in curves.all() {
                let rows = of(curve.ranks).map_or(&[][..], Vec::as_slice);
                let time = |r: &CollectiveRow| curves.time(op, curve.ranks, r.bytes, Nanos::ZERO).map_or(0.0, Nanos::seconds);
                let (large, small) = medians(rows.iter().map(|r| (r.bytes, time(r) / r.seconds)));
                let nanos = curve.points.iter().map(|p| p.1).collect();
                fits.push(CollectiveFit { device: device.into(), op, ranks: curve.ranks, nanos, rows: rows.len(), large, small });
            }
        }
    }
    fits
}

/// α and β of a network, the links inside the nodes given.
pub fn network(name: &str, rows: &[NetworkRow]) -> Option<NetworkFit> {
    let base = builtin(&rows.first()?.device)?.measured();
    let machine = |p: &[f64]| {
        let inter = Link { latency: Nanos((p[0] * 1e3).max(0.0) as u64), bandwidth: PerSecond((p[1] * 1e9).max(1.0) as u64) };
        Machine { nodes: 1 << 10, inter, ..base.clone() }
    };
    let ratio = |machine: &Machine, r: &NetworkRow| {
        let group = Group { local: (r.ranks / r.nodes).max(1), nodes: r.nodes };
        group_time(machine, group, r.pattern, r.bytes).seconds().max(1e-9) / r.seconds
    };
    let loss = |p: &[f64]| {
        let machine = machine(p);
        if p[0] < 0.0 || p[1] < 0.1 { f64::INFINITY } else { rows.iter().map(|r| ratio(&machine, r).ln().abs()).sum::<f64>() }
    };
    let p = minimise(loss, &[10.0, 20.0], &[1.0, 0.3], 200);
    let fitted = machine(&p);
    let (large, small) = medians(rows.iter().map(|r| (r.bytes, ratio(&fitted, r))));
    Some(NetworkFit { name: name.into(), latency: fitted.inter.latency.0, bandwidth: fitted.inter.bandwidth.0, rows: rows.len(), large, small })
}

/// The median time at each of the sizes kept; nothing if one was not measured.
fn knots(rows: &[CollectiveRow]) -> Option<Vec<(u64, u64)>> {
    let at = |size: u64| {
        let mut times: Vec<f64> = rows.iter().filter(|r| r.bytes == size).map(|r| r.seconds).collect();
        times.sort_by(f64::total_cmp);
        let middle = *times.get(times.len() / 2)?;
        Some((size, (middle * 1e9).round() as u64))
    };
    SIZES.iter().map(|&size| at(size)).collect()
}

/// Median of |ratio − 1| from 1 MiB on, and below.
fn medians(ratios: impl Iterator<Item = (u64, f64)>) -> (f64, f64) {
    let (large, small): (Vec<(u64, f64)>, Vec<(u64, f64)>) = ratios.partition(|r| r.0 >= 1 << 20);
    let median = |ratios: Vec<(u64, f64)>| {
        let mut errors: Vec<f64> = ratios.into_iter().map(|r| (r.1 - 1.0).abs()).collect();
        errors.sort_by(f64::total_cmp);
        errors.get(errors.len() / 2).copied().unwrap_or(0.0)
    };
    (median(large), median(small))
}

/// At most `most` of `all`, evenly spread.
fn thinned<'a>(all: &[&'a GemmRow], most: usize) -> Vec<&'a GemmRow> {
    let step = all.len().div_ceil(most.max(1)).max(1);
    all.iter().step_by(step).copied().collect()
}
