//! `dplan kernels --check`: kernels of every family on a GPU, against references in f64, as a table in Markdown.
//!
//! The cases are those of the tests of the shim ([`dplan_kernels::trial`]). On a GPU that has warpgroups, products whose rows they can take are theirs; where there is cuBLASLt,
//! products are tried once more by it.

use std::time::{Duration, Instant};

use dplan_kernels::cuda::library::Library;
use dplan_kernels::cuda::product::TILES;
use dplan_kernels::cuda::{Target, arch::Arch};
use dplan_kernels::trial::chains::joined;
use dplan_kernels::trial::{Case, Prepared, Random, draw, flat, make};

use crate::cli::output;
use crate::cli::{Failure, Outcome, Result};
use crate::runtime::cuda::gpu::Gpu;
use crate::runtime::cuda::solo::Solo;

/// As in the tests of the shim: of the largest element.
const TOLERANCE: f64 = 1e-5;

pub fn run(cases: u64) -> Result<Outcome> {
    let mut gpu = Gpu::open(0, Duration::from_secs(60)).map_err(Failure::fault)?;
    output::say!("Kernels on {}, {}, against references in f64:\n", gpu.name(), gpu.arch().name());
    let (arch, lacks) = (gpu.arch(), gpu.lacks().map(ToString::to_string));
    gpu.ask_library(Library::Absent);
    let mut solo = Solo::new(gpu).map_err(Failure::fault)?;
    output::say!("| family | cases | launches | seconds | result |");
    output::say!("|---|---|---|---|---|");
    let mut wrong = Vec::new();
    for (seed, (family, draw)) in (1..).zip(draw::FAMILIES) {
        let target = match (family, arch) {
            ("products_in_eights" | "products_and_more_in_eights", Arch::Sm90a) => Target { tiles: TILES.split_at(2).0, ..Target::of(arch) },
            _ => Target::of(arch),
        };
        let mut random = Random(seed);
        let trials = (0..cases).map(|_| make(&Case { target, ..draw(&mut random) }, &mut random));
        wrong.extend(family_of(&mut solo, family, trials));
    }
    let mut random = Random(14);
    wrong.extend(family_of(&mut solo, "flat buckets", (0..cases).map(|_| flat::draw(&mut random))));
    wrong.extend(family_of(&mut solo, "joined parts", (0..cases).map(|_| flat::joins(&mut random))));
    wrong.extend(family_of(&mut solo, "chains along rows", (0..cases).map(|_| joined(&mut random).together)));
    match lacks {
        Some(why) => output::say!("\nProducts by a library were not tried: {why}"),
        None => {
            solo.driver().ask_library(Library::Always);
            let (mut random, target) = (Random(9), Target { beside: Library::Always, ..Target::of(arch) });
            let trials = draw::FAMILIES.into_iter().filter(|f| f.0.starts_with("products")).flat_map(|f| std::iter::repeat_n(f.1, cases as usize));
            let drawn: Vec<Prepared> = trials.map(|draw| make(&Case { target, ..draw(&mut random) }, &mut random)).collect();
            wrong.extend(family_of(&mut solo, "products by cuBLASLt", drawn.into_iter()));
        }
    }
    if wrong.is_empty() {
        return Ok(Outcome::Done);
    }
    output::say!("\n{} cases failed:\n", wrong.len());
    wrong.iter().take(20).for_each(|why| output::say!("- {why}"));
    Ok(Outcome::No)
}

/// Tries a family and prints its row; what was wrong. A device that refuses something is asked for no more of the family: what a kernel broke breaks those behind it, too.
fn family_of(solo: &mut Solo<Gpu>, name: &str, trials: impl Iterator<Item = Prepared>) -> Vec<String> {
    let (begin, mut cases, mut launches, mut wrong) = (Instant::now(), 0, 0, Vec::new());
    for trial in trials {
        cases += 1;
        launches += trial.routine.launches.len();
        match solo.run(&trial) {
            Ok(outs) => wrong.extend(trial.compare(&outs, TOLERANCE).err()),
            Err(error) => {
                wrong.push(format!("{}: {error}", trial.name));
                break;
            }
        }
    }
    let result = if wrong.is_empty() { "right".to_string() } else { format!("**{} wrong**", wrong.len()) };
    output::say!("| {name} | {cases} | {launches} | {:.1} | {result} |", begin.elapsed().as_secs_f64());
    wrong
}
