//! The search and `--solver ilp` on instances of real size: `cargo bench -p dplan-planner --bench integer` prints each, and how many agree.
//!
//! Integer programs are given some time for each instance. Where it was too short, the best that they had found must not be better than the search's answer.

#[path = "../tests/drawn/mod.rs"]
mod drawn;

use dplan_planner::{integer, search};
use drawn::{Instance, medium};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

fn main() {
    // `cargo test --benches` runs this too: then a few instances show that it works.
    let cases = if std::env::args().any(|a| a == "--bench") { 160 } else { 2 };
    let (mut agree, mut infeasible, mut cut_short, mut faults, mut solved) = (0, 0, 0, 0, 0);
    let (mut exact_time, mut integer_time, mut slowest) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    println!("{:>4} {:<22} {:>14} {:>10} {:>14} {:>10}  verdict", "seed", "pins", "search", "s", "programs", "s");
    for seed in 0..cases {
        let Instance { mut prices, problem } = medium(seed);
        let begin = Instant::now();
        let exact = search::explore(&problem, &mut prices, &|| false);
        let middle = Instant::now();
        let integer = integer::explore(&problem, &mut prices, &|| middle.elapsed() > PATIENCE);
        let times = (middle - begin, middle.elapsed());
        (exact_time, integer_time, slowest) = (exact_time + times.0, integer_time + times.1, slowest.max(times.0));
        let objective = |outcome: &search::Outcome| outcome.best.as_ref().map(|b| b.solution.objective);
        let ours = objective(&exact);
        let (theirs, verdict) = match &integer {
            Err(why) => (None, format!("FAULT: {why}")),
            Ok(_) if !exact.statistics.proved => (None, "FAULT: the search has no proof".into()),
            Ok(integer) if integer.statistics.proved && objective(integer) == ours => (ours, "equal".into()),
            Ok(integer) if integer.statistics.proved || objective(integer).is_some_and(|o| ours.is_none_or(|x| o < x)) => {
                (objective(integer), "FAULT: they differ".into())
            }
            Ok(integer) => (objective(integer), "out of time".into()),
        };
        let text = |o: Option<_>| o.map_or("-".to_string(), |o| format!("{o:?}"));
        println!(
            "{seed:>4} {:<22} {:>14} {:>10.3} {:>14} {:>10.3}  {verdict}",
            problem.pins.to_string(),
            text(ours),
            times.0.as_secs_f64(),
            text(theirs),
            times.1.as_secs_f64()
        );
        match verdict.as_str() {
            "equal" => agree += 1,
            "out of time" => cut_short += 1,
            _ => faults += 1,
        }
        infeasible += u32::from(verdict == "equal" && ours.is_none());
        solved += exact.statistics.solved;
    }
    println!(
        "{cases} instances of 24 to 96 layers on 64 to 1024 devices: {agree} equal ({infeasible} of them have no plan), {cut_short} where integer programs ran out of time, {faults} faults"
    );
    println!("{solved} tuples solved; search {exact_time:.1?} in all, {slowest:.1?} at most; integer programs {integer_time:.1?} in all");
}
