//! `dplan kernels PLAN --time`: how long a plan's kernels take on a GPU, as tables in Markdown.
//!
//! Each instruction that differs from all others in its kernels or sizes is timed alone, on operands of its sizes, many times in a row, so small operands are in the caches. Beside it
//! stands what a copy by the device itself moves, measured in the same process, and for products cuBLASLt. Products timed both ways are kept as rows of the table that
//! decides who computes them (`dplan_kernels::cuda::library`).

use std::collections::BTreeMap;
use std::time::Duration;

use dplan_ir::optimizer::{DecayGroups, Hyper, StepScalars};
use dplan_kernels::cuda::library::{self, Library, Row};
use dplan_kernels::cuda::{self, Family, Routine, Target};
use dplan_kernels::jit::Cache;

use super::name;
use crate::cli::output;
use crate::cli::{Failure, Outcome, Result};
use crate::planfile::PlanFile;
use crate::runtime::cuda::gpu::Gpu;
use crate::runtime::cuda::load::{Action, Code, load};
use crate::runtime::cuda::solo::Solo;
use crate::runtime::view::Place;

/// What a copy moves each way, where the plan has memory for it.
const COPY: u64 = 1 << 30;

/// An instruction, with the generated kernels and with those that a library takes.
struct Timed<'a> {
    routine: &'a Routine,
    by_library: &'a Routine,
    ins: &'a [Place],
    outs: &'a [Place],
    /// Times a step runs it.
    uses: u64,
}

pub fn run(file: &PlanFile) -> Result<Outcome> {
    let mut gpu = Gpu::open(0, Duration::from_secs(60)).map_err(Failure::fault)?;
    let (arch, lacks) = (gpu.arch(), gpu.lacks().map(ToString::to_string));
    output::say!("Kernels of `{}` on {}, {}, the first rank's, each by itself:\n", file.graph.name, gpu.name(), arch.name());
    gpu.ask_library(Library::Always);
    let code = |beside: Library| load(&file.graph, &file.program, 0, 0, DecayGroups::All, Target { beside, ..Target::of(arch) });
    let (generated, other) = (code(Library::Absent).map_err(Failure::fault)?, code(Library::Always).map_err(Failure::fault)?);
    let timed = instructions(file, &generated, &other);
    let mut solo = Solo::new(gpu).map_err(Failure::fault)?;
    let copied = COPY.min(file.program.stages[0].arena_bytes.max(1 << 16)).next_multiple_of(1 << 16);
    let rate = solo.copy_rate(copied).map_err(Failure::fault)?;
    output::say!("A copy of {} MiB by the device moves {:.0} GB/s, reads and writes together.\n", copied >> 20, rate * 1e-9);
    output::say!("| kernel | family | uses | µs | GB/s | of a copy | TFLOP/s | cuBLASLt, TFLOP/s | generated ÷ cuBLASLt |");
    output::say!("|---|---|---|---|---|---|---|---|---|");
    let hyper = Hyper { lr: 0.0, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, momentum: 0.0, clip: 1.0 };
    let scalars = cuda::scalars(&StepScalars::new(hyper, 1, 1.0));
    let (mut rows, mut skipped) = (Vec::new(), 0);
    for Timed { routine, by_library, ins, outs, uses } in timed {
        let sizes = |places: &[Place]| places.iter().map(|p| (p.bytes, p.dtype)).collect::<Vec<_>>();
        // What experts are given is the data's, and so are the time it takes and the memory that it is looked for in.
        if routine.launches.iter().any(|l| matches!(l.family, Family::Moe | Family::Router)) {
            skipped += 1;
            continue;
        }
        let seconds = solo.time(routine, &sizes(ins), &sizes(outs), &scalars).map_err(Failure::fault)?;
        let product = by_library.launches.iter().find_map(|l| l.instead).filter(|_| lacks.is_none());
        let library = product.map(|_| solo.time(by_library, &sizes(ins), &sizes(outs), &scalars)).transpose().map_err(Failure::fault)?;
        rows.extend(product.zip(library).map(|(m, by)| Row::of(arch, &m, seconds * 1e3, by * 1e3)));
        let (flops, bytes) = (routine.cost.flops as f64, routine.cost.bytes as f64);
        let compute =
            |seconds: f64| if routine.launches[0].family == Family::Gemm { format!("{:.1}", flops / seconds * 1e-12) } else { String::new() };
        let sizes = by_library.launches.iter().find_map(|l| l.instead).map_or_else(String::new, |m| {
            let [p, q, k] = m.sizes;
            let times = if m.batch > 1 { format!("{} × ", m.batch) } else { String::new() };
            format!(", {times}{q} × {p} × {k}")
        });
        let main = routine.launches.iter().max_by_key(|l| u64::from(l.grid) * u64::from(l.threads)).map(name).unwrap_or_default();
        output::say!(
            "| {main}{sizes} | {} | {uses} | {:.1} | {:.0} | {:.0} % | {} | {} | {} |",
            routine.launches[0].family.name(),
            seconds * 1e6,
            bytes / seconds * 1e-9,
            bytes / seconds / rate * 100.0,
            compute(seconds),
            library.map_or_else(String::new, compute),
            library.map_or_else(String::new, |by| format!("{:.2}", seconds / by))
        );
    }
    if skipped > 0 {
        output::say!("\n{skipped} instructions of routed experts were not timed: what they do is the data's.");
    }
    match lacks {
        Some(why) => output::say!("\nNo products of a library: {why}"),
        None => keep(&rows),
    }
    Ok(Outcome::Done)
}

/// The instructions that differ, by family and then by time as the cost model would have it.
fn instructions<'a>(file: &PlanFile, generated: &'a Code, other: &'a Code) -> Vec<Timed<'a>> {
    let mut calls: BTreeMap<usize, u64> = BTreeMap::new();
    file.program.stages[0].schedule.iter().for_each(|call| *calls.entry(call.segment.0 as usize).or_default() += 1);
    let mut found: BTreeMap<(Family, u64, String), Timed<'a>> = BTreeMap::new();
    for (segment, times) in calls {
        for ((_, action), (_, by_library)) in generated.segments[segment].iter().zip(&other.segments[segment]) {
            let (Action::Run { routine, ins, outs }, Action::Run { routine: by_library, .. }) = (action, by_library) else { continue };
            let Some(first) = routine.launches.first() else { continue };
            let names: Vec<String> = routine.launches.iter().map(name).collect();
            let sizes: Vec<u64> = ins.iter().chain(outs).map(|p| p.bytes).collect();
            let key = (
                first.family,
                u64::MAX - routine.cost.flops.max(routine.cost.bytes),
                format!("{names:?} {sizes:?} {:?}", by_library.launches[0].instead),
            );
            found.entry(key).or_insert(Timed { routine, by_library, ins, outs, uses: 0 }).uses += times;
        }
    }
    found.into_values().collect()
}

/// Keeps what was timed where ranks look it up: rows of the same product are replaced.
fn keep(rows: &[Row]) {
    let path = Cache::standard().folder().join(library::FILE);
    let before = std::fs::read_to_string(&path).ok().and_then(|text| library::parse(&text).ok()).unwrap_or_default();
    let same = |a: &Row, b: &Row| (a.arch, a.elem, a.turned, a.sizes) == (b.arch, b.elem, b.turned, b.sizes);
    let kept = before.into_iter().filter(|old| !rows.iter().any(|new| same(old, new)));
    let text: String = rows.iter().copied().chain(kept).map(|row| format!("{row}\n")).collect();
    match output::write(&path, text.as_bytes()) {
        Ok(()) => output::say!("\n{} products are kept in {}.", rows.len(), path.display()),
        Err(why) => output::say!("\nWhat was timed is not kept: {why}"),
    }
}
