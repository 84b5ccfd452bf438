//! The search and `--solver ilp` on instances of real size: `cargo bench -p dplan-planner --bench integer` prints how many agree, and how long each took.

#[path = "../tests/drawn/mod.rs"]
mod drawn;

use dplan_planner::{integer, search};
use drawn::{Instance, medium};
use std::time::{Duration, Instant};

fn main() {
    // `cargo test --benches` runs this too: then a few instances show that it works.
    let cases = if std::env::args().any(|a| a == "--bench") { 120 } else { 2 };
    let (mut agree, mut infeasible, mut solved, mut unproved) = (0, 0, 0, 0);
    let (mut exact_time, mut integer_time, mut slowest) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    for seed in 0..cases {
        let Instance { mut prices, problem } = medium(seed);
        let begin = Instant::now();
        let exact = search::explore(&problem, &mut prices, &|| false);
        let middle = Instant::now();
        let integer = integer::explore(&problem, &mut prices, &|| false);
        let end = Instant::now();
        (exact_time, integer_time) = (exact_time + (middle - begin), integer_time + (end - middle));
        slowest = slowest.max(middle - begin);
        let objective = |outcome: &search::Outcome| outcome.best.as_ref().map(|b| b.solution.objective);
        match integer {
            Ok(integer) if objective(&integer) == objective(&exact) => agree += 1,
            Ok(integer) => println!("seed {seed}: exact {:?}, integer programs {:?}", objective(&exact), objective(&integer)),
            Err(why) => println!("seed {seed}: {why}"),
        }
        infeasible += u32::from(exact.best.is_none());
        unproved += u32::from(!exact.statistics.proved);
        solved += exact.statistics.solved;
    }
    println!("{cases} instances of 24 to 96 layers on 64 to 1024 devices: {agree} agree ({infeasible} of all have no plan), {unproved} not proved");
    println!("{solved} tuples solved; search {exact_time:.1?} in all, {slowest:.1?} at most; integer programs {integer_time:.1?} in all");
}
