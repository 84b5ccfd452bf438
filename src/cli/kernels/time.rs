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

/// An instruction, with what is done besides by its kernel. A launch that a library may take says both: the generated kernel does as much.
struct Timed<'a> {
    routine: &'a Routine,
    ins: &'a [Place],
    outs: &'a [Place],
    /// Times a step runs it, on one rank of each stage.
    uses: u64,
}

pub fn run(file: &PlanFile) -> Result<Outcome> {
    let mut gpu = Gpu::open(0, Duration::from_secs(60)).map_err(Failure::fault)?;
    let (arch, lacks) = (gpu.arch(), gpu.lacks().map(ToString::to_string));
    output::say!("Kernels of `{}` on {}, {}, of one rank of each stage, each by itself:\n", file.graph.name, gpu.name(), arch.name());
    gpu.ask_library(Library::Always);
    let beside = if lacks.is_none() { Library::Always } else { Library::Absent };
    let code = |stage: usize| load(&file.graph, &file.program, stage, 0, DecayGroups::All, Target { beside, ..Target::of(arch) });
    let codes = (0..file.program.stages.len()).map(code).collect::<std::result::Result<Vec<Code>, _>>().map_err(Failure::fault)?;
    let timed = instructions(file, &codes);
    let mut solo = Solo::new(gpu).map_err(Failure::fault)?;
    let copied = COPY.min(file.program.stages[0].arena_bytes.max(1 << 16)).next_multiple_of(1 << 16);
    let rate = solo.copy_rate(copied).map_err(Failure::fault)?;
    output::say!("A copy of {} MiB by the device moves {:.0} GB/s, reads and writes together.\n", copied >> 20, rate * 1e-9);
    output::say!("| kernel | family | uses | µs | GB/s | of a copy | TFLOP/s | cuBLASLt, TFLOP/s | generated ÷ cuBLASLt |");
    output::say!("|---|---|---|---|---|---|---|---|---|");
    let hyper = Hyper { lr: 0.0, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, momentum: 0.0, clip: 1.0 };
    let scalars = cuda::scalars(&StepScalars::new(hyper, 1, 1.0));
    let (mut products, mut skipped) = (Vec::new(), 0);
    for Timed { routine, ins, outs, uses } in timed {
        let sizes = |places: &[Place]| places.iter().map(|p| (p.bytes, p.dtype)).collect::<Vec<_>>();
        // What experts are given is the data's, and so are the time it takes and the memory that it is looked for in.
        if routine.launches.iter().any(|l| matches!(l.family, Family::Moe | Family::Router)) {
            skipped += 1;
            continue;
        }
        let seconds = solo.time(&generated(routine), &sizes(ins), &sizes(outs), &scalars).map_err(Failure::fault)?;
        let product = routine.launches.iter().find_map(|l| l.instead);
        let library = product.map(|_| solo.time(routine, &sizes(ins), &sizes(outs), &scalars)).transpose().map_err(Failure::fault)?;
        products.extend(product.zip(library).map(|(m, by)| (uses, Row::of(arch, &m, seconds * 1e3, by * 1e3))));
        let (flops, bytes) = (routine.cost.flops as f64, routine.cost.bytes as f64);
        let compute =
            |seconds: f64| if routine.launches[0].family == Family::Gemm { format!("{:.1}", flops / seconds * 1e-12) } else { String::new() };
        let sizes = product.map_or_else(String::new, |m| {
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
        None => keep(&one_each(products)),
    }
    Ok(Outcome::Done)
}

/// The same by generated kernels alone.
fn generated(routine: &Routine) -> Routine {
    let mut routine = routine.clone();
    routine.launches.iter_mut().for_each(|launch| launch.instead = None);
    routine
}

/// The instructions that differ, by family and then by time as the cost model would have it; `codes` of one rank of each stage.
fn instructions<'a>(file: &PlanFile, codes: &'a [Code]) -> Vec<Timed<'a>> {
    let mut found: BTreeMap<(Family, u64, String), Timed<'a>> = BTreeMap::new();
    for (code, stage) in codes.iter().zip(&file.program.stages) {
        let mut calls: BTreeMap<usize, u64> = BTreeMap::new();
        stage.schedule.iter().for_each(|call| *calls.entry(call.segment.0 as usize).or_default() += 1);
        for (segment, times) in calls {
            for (_, action) in &code.segments[segment] {
                let Action::Run { routine, ins, outs } = action else { continue };
                let Some(first) = routine.launches.first() else { continue };
                let names: Vec<String> = routine.launches.iter().map(name).collect();
                let sizes: Vec<u64> = ins.iter().chain(outs).map(|p| p.bytes).collect();
                let size = u64::MAX - routine.cost.flops.max(routine.cost.bytes);
                let key = (first.family, size, format!("{names:?} {sizes:?} {:?}", first.instead));
                found.entry(key).or_insert(Timed { routine, ins, outs, uses: 0 }).uses += times;
            }
        }
    }
    found.into_values().collect()
}

/// One row of each product: of those that are followed by other things, that which a step runs the most.
fn one_each(mut products: Vec<(u64, Row)>) -> Vec<Row> {
    products.sort_by_key(|(uses, _)| std::cmp::Reverse(*uses));
    let mut rows: Vec<Row> = Vec::new();
    for (_, row) in products {
        if !rows.iter().any(|kept| same(kept, &row)) {
            rows.push(row);
        }
    }
    rows
}

/// Whether rows are of the same product.
fn same(a: &Row, b: &Row) -> bool {
    (a.arch, a.elem, a.turned, a.sizes) == (b.arch, b.elem, b.turned, b.sizes)
}

/// Keeps what was timed where ranks look it up: rows of the same product are replaced.
fn keep(rows: &[Row]) {
    let path = Cache::standard().folder().join(library::FILE);
    let before = std::fs::read_to_string(&path).ok().and_then(|text| library::parse(&text).ok()).unwrap_or_default();
    let kept = before.into_iter().filter(|old| !rows.iter().any(|new| same(old, new)));
    let text: String = rows.iter().copied().chain(kept).map(|row| format!("{row}\n")).collect();
    match output::write(&path, text.as_bytes()) {
        Ok(()) => output::say!("\n{} products are kept in {}.", rows.len(), path.display()),
        Err(why) => output::say!("\nWhat was timed is not kept: {why}"),
    }
}
