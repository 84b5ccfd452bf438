//! A machine fitted to what its own ranks were seen to do: recorded runs of known plans in, a machine description out.
//!
//! Fitted are the numbers the cost model has for a device and its links, nothing else: rate and grains of products, time between kernels, memory bandwidth, α
//! and β inside a node. Each instruction counts by the time it took, so that the sum over a step, which is what plans are compared by, is met best. A
//! call took the median of all calls, so that what else the machine does disturbs least.
//!
//! A step is more than its instructions: ranks that share a core wait for it between them, and who waits for a peer is woken late. So when instructions are met, whole steps
//! are: by a factor on all that a rank does alone, one on α and one on β ([`fit_steps`]).

use super::minimise::minimise;
use crate::compare::observe::{Observation, Work};
use crate::planfile::PlanFile;
use dplan_ir::dtype::DType;
use dplan_ir::layers;
use dplan_planner::machine::{Curves, DeviceSpec, Link, Machine, Peak};
use dplan_planner::predict::predict;
use dplan_planner::units::{Millionths, Nanos, PerSecond};
use std::sync::Arc;

/// `machine` with the numbers that predict best what ranks did under each of some plans; and the mean error of an instruction, weighted by time, before and
/// after.
pub fn fit(machine: &Machine, seen: &[(PlanFile, Vec<Observation>)]) -> (Machine, f64, f64) {
    let device = fit_device(&machine.device, seen);
    let intra = fit_link(machine, seen);
    // Curves of other conditions would hide what was measured here.
    let fitted = Machine {
        device,
        intra,
        inter: if machine.nodes == 1 { intra } else { machine.inter },
        curves: Arc::new(Curves::default()),
        ..machine.clone()
    };
    let before = error(machine, seen);
    let after = error(&fitted, seen);
    (fitted, before, after)
}

/// `machine` with its rates changed so that the steps of some plans take what they were seen to take, in seconds. Fewer than three plans do not tell rates apart: there is
/// one factor then.
pub fn fit_steps(machine: &Machine, seen: &[(PlanFile, f64)]) -> Machine {
    let classes: Vec<Vec<u32>> = seen.iter().map(|(plan, _)| layers::classes(&plan.graph)).collect();
    let factors = |p: &[f64]| match *p {
        [alone, latency, bytes] => (alone, latency, bytes),
        [all] => (all, all, all),
        _ => (1.0, 1.0, 1.0),
    };
    let miss = |p: &[f64]| {
        if p.iter().any(|f| !(1e-3..=1e3).contains(f)) {
            return f64::INFINITY;
        }
        let machine = slowed(machine, factors(p));
        let of = |((plan, seconds), classes): (&(PlanFile, f64), &Vec<u32>)| match predict(&plan.graph, classes, &machine.clone().into(), &plan.plan)
        {
            Ok(p) if *seconds > 0.0 => (p.step.seconds() / seconds).ln().abs(),
            _ => 0.0,
        };
        // Of answers that are as good, the nearest to what instructions say.
        seen.iter().zip(&classes).map(of).sum::<f64>() + p.iter().map(|f| 0.01 * f.ln().abs()).sum::<f64>()
    };
    let start = vec![1.0; if seen.len() < 3 { 1 } else { 3 }];
    slowed(machine, factors(&minimise(miss, &start, &vec![0.5; start.len()], 120)))
}

/// A machine on which ranks' own work takes `alone` times as long, a collective's first byte `latency` times, its bytes `bytes` times.
fn slowed(machine: &Machine, (alone, latency, bytes): (f64, f64, f64)) -> Machine {
    let rate = |r: PerSecond, by: f64| PerSecond(((r.0 as f64 / by) as u64).max(1));
    let time = |t: Nanos, by: f64| Nanos((t.0 as f64 * by).round() as u64);
    let Peak { f64, f32, bf16, f16 } = machine.device.peak;
    let peak = Peak { f64: rate(f64, alone), f32: rate(f32, alone), bf16: rate(bf16, alone), f16: rate(f16, alone) };
    let (launch, bandwidth) = (time(machine.device.launch, alone), rate(machine.device.bandwidth, alone));
    let link = |link: Link| Link { latency: time(link.latency, latency), bandwidth: rate(link.bandwidth, bytes) };
    Machine {
        device: DeviceSpec { peak, launch, bandwidth, ..machine.device.clone() },
        intra: link(machine.intra),
        inter: link(machine.inter),
        ..machine.clone()
    }
}

/// Mean error of an instruction, weighted by the time it took.
fn error(machine: &Machine, seen: &[(PlanFile, Vec<Observation>)]) -> f64 {
    let (mut sum, mut weight) = (0.0, 0.0);
    for (plan, o) in observations(seen) {
        let time = o.calls as f64 * o.measured as f64;
        sum += time * (o.work.predicted(machine, plan).0 as f64 / o.measured as f64 - 1.0).abs();
        weight += time;
    }
    if weight > 0.0 { sum / weight } else { 0.0 }
}

fn fit_device(device: &DeviceSpec, seen: &[(PlanFile, Vec<Observation>)]) -> DeviceSpec {
    let local = || observations(seen).filter(|(_, o)| !o.work.shared());
    let Some(dtype) = local().find_map(|(_, o)| if let Work::Op { dtype, .. } = o.work { Some(dtype) } else { None }) else { return device.clone() };
    let spec = |p: &[f64]| with(device, dtype, p);
    let loss = |p: &[f64]| {
        if p.iter().any(|x| *x <= 0.0 || *x > 1e6) {
            return f64::INFINITY;
        }
        let machine = Machine { device: spec(p), ..dplan_planner::machine::cpu(1) };
        local().map(|(plan, o)| miss(&machine, plan, o)).sum::<f64>()
    };
    // Giga-operations a second, grains, nanoseconds, gigabytes a second.
    let start = [device.matrix_efficiency.of(device.peak.of(dtype)).0 as f64 * 1e-9, 8.0, 8.0, device.launch.0.max(100) as f64, 4.0];
    spec(&minimise(loss, &start, &[0.5, 1.0, 1.0, 1.0, 0.5], 400))
}

/// The device with a product rate in Gop/s, two grains, a launch in ns and a bandwidth in GB/s.
fn with(device: &DeviceSpec, dtype: DType, p: &[f64]) -> DeviceSpec {
    let rate = PerSecond((p[0] * 1e9) as u64);
    let mut peak = device.peak;
    // What is reached is the peak of a machine without a data sheet; the other types keep their proportion.
    let scale = rate.0 as f64 / device.peak.of(dtype).0.max(1) as f64;
    let scaled = |r: PerSecond| PerSecond(((r.0 as f64 * scale) as u64).max(1));
    peak = Peak { f64: scaled(peak.f64), f32: scaled(peak.f32), bf16: scaled(peak.bf16), f16: scaled(peak.f16) };
    DeviceSpec {
        peak,
        matrix_efficiency: Millionths(1_000_000),
        matrix_grain: p[1].round() as u64,
        matrix_depth_grain: p[2].round() as u64,
        launch: Nanos(p[3].round() as u64),
        bandwidth: PerSecond((p[4] * 1e9) as u64),
        bandwidth_efficiency: Millionths(1_000_000),
        ..device.clone()
    }
}

fn fit_link(machine: &Machine, seen: &[(PlanFile, Vec<Observation>)]) -> Link {
    let shared: Vec<_> = observations(seen).filter(|(_, o)| o.work.shared()).collect();
    if shared.is_empty() {
        return machine.intra;
    }
    let link = |p: &[f64]| Link { latency: Nanos((p[0] * 1e3) as u64), bandwidth: PerSecond(((p[1] * 1e9) as u64).max(1)) };
    let loss = |p: &[f64]| {
        if p[0] < 0.0 || p[1] <= 0.001 || p[0] > 1e5 {
            return f64::INFINITY;
        }
        let link = link(p);
        let machine = Machine { intra: link, inter: link, curves: Arc::default(), ..machine.clone() };
        shared.iter().map(|(plan, o)| miss(&machine, plan, o)).sum::<f64>()
    };
    link(&minimise(loss, &[10.0, 2.0], &[1.0, 0.5], 200))
}

/// What took any time, with the plan it was seen under. Messages are left out: a receive waits for its sender and a send for its receiver, and no third span says how
/// long either waited, while a collective's shortest span is that of the member that came last.
fn observations(seen: &[(PlanFile, Vec<Observation>)]) -> impl Iterator<Item = (&PlanFile, &Observation)> {
    seen.iter().flat_map(|(plan, all)| all.iter().map(move |o| (plan, o))).filter(|(_, o)| o.measured > 0 && !matches!(o.work, Work::Message { .. }))
}

/// How far off a prediction is, as a logarithm, weighted by the time that the instruction took.
fn miss(machine: &Machine, plan: &PlanFile, o: &Observation) -> f64 {
    let predicted = o.work.predicted(machine, plan).0.max(1) as f64;
    o.calls as f64 * o.measured as f64 * (predicted / o.measured as f64).ln().abs()
}
