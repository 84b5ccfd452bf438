//! A run that is killed at any instant, also while a checkpoint is written, goes on: no step is lost but those since the last checkpoint on disk, no data is
//! skipped or seen twice, and nothing that it left behind is in the way.
//!
//! `DPLAN_KILLS=200` kills more often than the suite has time for.

mod common;
mod damage;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use damage::Random;
use dplan::checkpoint::{find, has_any};

const STEPS: u64 = 40;
const KILLS: usize = 25;

/// What a run said of each step: its loss's bits and the sequences it began at.
type Steps = BTreeMap<u64, (u64, u64)>;

/// What a run said before its end.
struct Told {
    steps: Steps,
    /// The step it began at, if it lived to say so.
    begun: Option<u64>,
    /// The last checkpoint it called saved.
    saved: u64,
    done: bool,
}

/// When a run is killed.
enum Kill {
    Never,
    After(Duration),
    /// After this and its first line, as soon as a checkpoint is being written.
    Writing(Duration),
}

/// Whether a checkpoint is half written.
fn half_written(ckpt: &Path) -> bool {
    std::fs::read_dir(ckpt).is_ok_and(|mut d| d.any(|e| e.is_ok_and(|e| e.file_name().to_string_lossy().ends_with(".tmp"))))
}

struct Killer {
    plan: String,
    data: String,
    dir: std::path::PathBuf,
}

impl Killer {
    fn args(&self, ckpt: &Path) -> Vec<String> {
        let ckpt = ckpt.display().to_string();
        let fixed = format!("--steps {STEPS} --every 2 --keep 2 --seed 3 --lr 0.01 --lr-schedule cosine --shuffle --json");
        let mut args = vec!["run".into(), self.plan.clone(), "--data".into(), self.data.clone()];
        args.extend(["--checkpoint".into(), ckpt.clone(), "--resume".into(), ckpt]);
        args.extend(fixed.split(' ').map(String::from));
        args
    }

    /// Runs until the end, or until it is killed.
    fn run(&self, ckpt: &Path, kill: Kill) -> Told {
        let mut child =
            Command::new(env!("CARGO_BIN_EXE_dplan")).args(self.args(ckpt)).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let begun = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&begun);
        let note = move |line| {
            told.store(true, Ordering::Relaxed);
            line
        };
        let reader = std::thread::spawn(move || out.lines().map_while(Result::ok).map(note).collect::<Vec<_>>());
        match kill {
            Kill::Never => {}
            Kill::After(patience) => {
                std::thread::sleep(patience);
                let _ = child.kill();
            }
            Kill::Writing(patience) => {
                std::thread::sleep(patience);
                // What an earlier kill left is cleared away before the first line.
                while child.try_wait().unwrap().is_none() && !(begun.load(Ordering::Relaxed) && half_written(ckpt)) {
                    std::thread::sleep(Duration::from_micros(200));
                }
                let _ = child.kill();
            }
        }
        let output = child.wait_with_output().unwrap();
        let lines = reader.join().unwrap();
        let mut steps = Steps::new();
        let (mut begun, mut saved) = (None, 0);
        // The last line may be cut off.
        for line in lines.iter().filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok()) {
            if let Some(at) = line.pointer("/resumed/step") {
                begun = at.as_u64();
            }
            if let Some(at) = line.pointer("/checkpoint/step") {
                saved = at.as_u64().unwrap();
            }
            if let Some(step) = line["step"].as_u64() {
                begun.get_or_insert(step);
                let seen = (line["loss"].as_f64().unwrap().to_bits(), line["sequences"].as_u64().unwrap());
                assert!(steps.insert(step, seen).is_none(), "step {step} twice in one run");
            }
        }
        let killed = std::os::unix::process::ExitStatusExt::signal(&output.status) == Some(9);
        assert!(killed || output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Told { steps, begun, saved, done: output.status.success() }
    }
}

#[test]
fn a_run_killed_anywhere_goes_on_as_if_it_had_not_been() {
    let dir = common::scratch("kill");
    let data = dir.join("data.txt");
    let text: Vec<u8> = (0..4000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(&data, text).unwrap();
    let plan = common::small_plan(&dir, "dp=2,zero=1", 2, "f32");
    let killer = Killer { plan: plan.display().to_string(), data: data.display().to_string(), dir };
    let begin = Instant::now();
    let Told { steps: whole, done, .. } = killer.run(&killer.dir.join("whole"), Kill::Never);
    let full = begin.elapsed();
    assert!(done && whole.len() as u64 == STEPS);
    let sequences = |steps: &Steps| steps.values().map(|s| s.1).collect::<Vec<_>>();
    assert_eq!(sequences(&whole), (0..STEPS).map(|s| s * 8).collect::<Vec<_>>());

    let wanted = std::env::var("DPLAN_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(KILLS);
    let mut random = Random(7);
    let (mut kills, mut runs, mut in_writer, mut repeated) = (0, 0, 0, 0);
    while kills < wanted {
        let ckpt = killer.dir.join(format!("run-{runs}"));
        runs += 1;
        let (mut told, mut durable) = (Steps::new(), 0);
        loop {
            let patience = full.mul_f64(random.below(1000) as f64 / 1000.0);
            let kill = match kills {
                _ if kills >= wanted => Kill::Never,
                _ if kills % 2 == 0 => Kill::After(patience),
                _ => Kill::Writing(patience),
            };
            let Told { steps, begun, saved, done } = killer.run(&ckpt, kill);
            // It begins at the last checkpoint on disk, never before one that a run called saved, and repeats what it repeats bit by bit.
            let last = told.keys().next_back().map_or(0, |s| s + 1);
            assert!(begun.is_none_or(|b| (durable..=last).contains(&b)), "resumed at {begun:?}: {durable} was saved, {last} steps were done");
            durable = durable.max(saved).max(begun.unwrap_or(0));
            for (step, seen) in steps {
                assert_eq!(whole[&step], seen, "step {step} of a run resumed at {begun:?}");
                repeated += usize::from(told.insert(step, seen).is_some());
            }
            if done {
                break;
            }
            kills += 1;
            in_writer += usize::from(begun.is_some() && half_written(&ckpt));
            // What is called a checkpoint is one, all the time.
            if has_any(&ckpt) {
                let found = find(&ckpt).unwrap_or_else(|e| panic!("{e}"));
                assert!(found.notes.iter().all(|n| !n.contains("passing over")), "{:?}", found.notes);
            }
        }
        assert_eq!(told.keys().copied().collect::<Vec<_>>(), (0..STEPS).collect::<Vec<_>>());
        assert!(!half_written(&ckpt));
    }
    assert!(
        8 * in_writer >= kills && repeated > 0,
        "{in_writer} of {kills} kills came while a checkpoint was being written, {repeated} steps were repeated"
    );
    println!("{kills} kills in {runs} runs, {in_writer} of them while a checkpoint was being written, {repeated} steps repeated, all bitwise equal");
}
