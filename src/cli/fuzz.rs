//! `dplan fuzz`: random plans against one device, and with `--mutate` damaged programs against the verifier.

use super::output;
use super::progress;
use super::{Outcome, Result};
use crate::fuzz::mutate::{self, Hole, Tally};
use crate::fuzz::run::{Agreement, Fault, TOLERANCE, check};
use crate::fuzz::shrink::shrink;
use crate::fuzz::space::{DIMENSIONS, Seen, nth, small};
use dplan_planner::drawn::{Case, Dice};
use serde_json::json;

/// Try dplan on random compositions: small models under legal plans of the whole space, each held against one device in f64.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  dplan fuzz --cases 2000 --seed 1            # any legal plan trains as one device does
  dplan fuzz --mutate --cases 100             # damaged programs are rejected without being run, rewritten ones are accepted
  dplan fuzz --case 'dp=2 tp=2 cuts=1 zero=3' # one case; a failure prints such a line")]
pub struct Args {
    /// How many cases.
    #[arg(long, value_name = "N", default_value_t = 200)]
    cases: u64,
    /// Other cases for another seed.
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Run this case alone; choices that are left out are the smallest.
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["cases", "seed"])]
    case: Option<Case>,
    /// Damage and rewrite the programs of the cases, and see what the verifier says.
    #[arg(long)]
    mutate: bool,
    /// With --mutate: at how many drawn places of each program, for each kind of change.
    #[arg(long, value_name = "N", default_value_t = 2, requires = "mutate")]
    places: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<Outcome> {
    let cases: Vec<Case> = match &args.case {
        Some(case) => vec![case.clone()],
        None if args.mutate => (0..args.cases).map(|number| small(args.seed, number)).collect(),
        None => (0..args.cases).map(|number| nth(args.seed, number)).collect(),
    };
    if args.mutate { mutated(&args, &cases) } else { composed(&args, &cases) }
}

/// A case that is not as it must be.
struct Failure {
    case: Case,
    fault: Fault,
    /// The smallest case that fails, and how.
    smallest: Case,
    left: Fault,
}

impl Failure {
    fn command(&self) -> String {
        format!("dplan fuzz --case '{}'", self.smallest)
    }
}

fn composed(args: &Args, cases: &[Case]) -> Result<Outcome> {
    let mut seen = Seen::default();
    let mut worst: Option<(Agreement, &Case)> = None;
    let mut failures: Vec<Failure> = Vec::new();
    let mut tied = 0;
    let bar = progress::bar(cases.len() as u64);
    // What a panic says is in the report.
    std::panic::set_hook(Box::new(|_| {}));
    for case in cases {
        seen.add(case);
        let found = check(case);
        tied += u64::from(found.as_ref().is_ok_and(|found| found.until.is_some()));
        match found {
            Ok(found) if worst.as_ref().is_none_or(|(w, _)| found.error > w.error) => worst = Some((found, case)),
            Ok(_) => {}
            Err(fault) => {
                // Of a single case nothing smaller is looked for: it may be one that was.
                let smallest = if args.case.is_some() { case.clone() } else { shrink(case, |c| check(c).is_err()) };
                let left = check(&smallest).err().unwrap_or_else(|| fault.clone());
                failures.push(Failure { case: case.clone(), fault, smallest, left });
                bar.set_message(format!("{} failed", failures.len()));
            }
        }
        bar.inc(1);
    }
    let _ = std::panic::take_hook();
    bar.finish_and_clear();
    let (rarest, least) = seen.rarest();
    if args.json {
        let listed: Vec<_> = failures
            .iter()
            .map(|f| json!({ "case": f.case.to_string(), "fault": f.fault.to_string(), "smallest": f.smallest.to_string(), "left": f.left.to_string(), "command": f.command() }))
            .collect();
        let dimensions: serde_json::Map<_, _> = DIMENSIONS.iter().zip(&seen.dimensions).map(|(d, &n)| (d.0.to_string(), n.into())).collect();
        let worst = worst.as_ref().map(|(w, case)| json!({ "error": w.error, "of": w.of, "case": case.to_string() }));
        output::say!(
            "{}",
            json!({
                "ok": failures.is_empty(), "cases": seen.cases, "tied": tied, "seed": args.seed, "tolerance": TOLERANCE, "worst": worst, "dimensions": dimensions,
                "pairs": seen.pairs(), "failures": listed,
            })
        );
    } else {
        if args.case.is_none() {
            for line in DIMENSIONS.iter().zip(&seen.dimensions).collect::<Vec<_>>().chunks(3) {
                let shown: Vec<String> = line.iter().map(|(d, n)| format!("{:<24}{n:>6}", d.0)).collect();
                output::say!("  {}", shown.join("    "));
            }
            output::say!("  each dimension in {least} cases at least ({rarest}), {} pairs of dimensions together", seen.pairs());
        }
        for f in &failures {
            output::say!("FAILED {}\n       {}\n       smallest: {}\n       {}", f.case, f.fault, f.left, f.command());
        }
        let passed = seen.cases - failures.len() as u64;
        let worst = worst.map_or(String::new(), |(w, case)| format!("; worst relative error {:.1e} ({}, in `{case}`)", w.error, w.of));
        output::say!("{passed} of {} cases train as one device does{worst}", seen.cases);
        if tied > 0 {
            output::say!("{tied} of them up to a step in which rounding decides which gradients are the largest (wire topk)");
        }
    }
    Ok(if failures.is_empty() { Outcome::Done } else { Outcome::No })
}

fn mutated(args: &Args, cases: &[Case]) -> Result<Outcome> {
    let mut outcome = mutate::Outcome::default();
    let bar = progress::bar(cases.len() as u64);
    for (number, case) in cases.iter().enumerate() {
        outcome
            .mutate(case, args.places, &mut Dice::of(args.seed, number as u64))
            .map_err(|fault| super::Failure::fault(anyhow::anyhow!("{case}: {fault}")))?;
        bar.set_message(format!("{} holes", outcome.holes.len() + outcome.alarms.len()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let (damaged, rewritten) = (outcome.damaged(), outcome.rewritten());
    if args.json {
        let tally = |t: &Tally| json!({ "rejected": t.rejected, "same_bits": t.same, "reordered_sums": t.reordered, "wrong": t.wrong });
        let hole = |h: &Hole| json!({ "case": h.case, "change": h.change, "place": h.place, "why": h.why });
        let damages: serde_json::Map<_, _> = outcome.damages.iter().map(|(d, t)| (d.name(), tally(t))).collect();
        let flaws: serde_json::Map<_, _> = outcome.flaws.iter().map(|(f, t)| (f.name(), tally(t))).collect();
        let rewrites: serde_json::Map<_, _> = outcome.rewrites.iter().map(|(r, t)| (r.name(), tally(t))).collect();
        output::say!(
            "{}",
            json!({
                "ok": outcome.is_sound(), "programs": outcome.programs, "seed": args.seed, "damages": damages, "flaws": flaws, "rewrites": rewrites,
                "damaged": tally(&damaged), "rewritten": tally(&rewritten),
                "holes": outcome.holes.iter().map(hole).collect::<Vec<_>>(), "alarms": outcome.alarms.iter().map(hole).collect::<Vec<_>>(),
            })
        );
    } else {
        output::say!("  {:<24}{:>9}{:>11}{:>11}{:>7}", "damage", "rejected", "same bits", "same sums", "wrong");
        let line = |name: &str, t: &Tally| output::say!("  {name:<24}{:>9}{:>11}{:>11}{:>7}", t.rejected, t.same, t.reordered, t.wrong);
        outcome.damages.iter().for_each(|(d, t)| line(&d.name(), t));
        output::say!("  {:<24}{:>9}{:>11}{:>11}{:>7}", "flaw of the graph", "rejected", "same bits", "same sums", "wrong");
        outcome.flaws.iter().for_each(|(f, t)| line(&f.name(), t));
        output::say!("  {:<24}{:>9}{:>11}{:>11}{:>7}", "rewrite", "rejected", "same bits", "same sums", "wrong");
        outcome.rewrites.iter().for_each(|(r, t)| line(&r.name(), t));
        for (what, holes) in [("ACCEPTED, BUT WRONG", &outcome.holes), ("FALSE ALARM", &outcome.alarms)] {
            for h in holes {
                output::say!("{what}: {} at {} of `{}`: {}", h.change, h.place, h.case, h.why);
            }
        }
        output::say!("{} programs, proved as they are", outcome.programs);
        output::say!(
            "{} damaged: {} rejected without being run, {} accepted that compute the same, {} accepted and wrong",
            damaged.all(),
            damaged.rejected,
            damaged.equivalent(),
            damaged.wrong
        );
        output::say!(
            "{} rewritten: {} accepted that compute the same, {} false alarms",
            rewritten.all(),
            rewritten.equivalent(),
            outcome.alarms.len()
        );
    }
    Ok(if outcome.is_sound() { Outcome::Done } else { Outcome::No })
}
