//! Ranks that die, stall, or compute a wrong bit; disks that are full: each is named, and the run goes on or ends as the flags say.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use dplan::checkpoint::find;
use serde_json::Value;

fn dplan(args: &[&str]) -> (Vec<Value>, String, Option<i32>) {
    let output = common::dplan(args);
    let lines = common::json_lines(&String::from_utf8_lossy(&output.stdout));
    (lines, String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
}

/// The last loss of each step; a step that is repeated must repeat its bits.
fn losses(lines: &[Value]) -> Vec<f64> {
    let mut all: Vec<Option<f64>> = Vec::new();
    for line in lines.iter().filter(|l| l["loss"].is_number()) {
        let step = line["step"].as_u64().unwrap() as usize;
        all.resize(all.len().max(step + 1), None);
        all[step] = line["loss"].as_f64();
    }
    all.into_iter().flatten().collect()
}

fn said<'a>(lines: &'a [Value], what: &str) -> Vec<&'a str> {
    lines.iter().filter_map(|l| l[what].as_str()).collect()
}

struct Case {
    plan: PathBuf,
    ckpt: PathBuf,
}

impl Case {
    fn new(name: &str, pins: &str, ranks: u32, precision: &str) -> Case {
        let dir = common::scratch(name);
        Case { plan: common::small_plan(&dir, pins, ranks, precision), ckpt: dir.join("ckpt") }
    }
    fn run(&self, more: &[&str]) -> (Vec<Value>, String, Option<i32>) {
        let fixed = ["run", self.plan.to_str().unwrap(), "--steps", "8", "--lr", "0.01", "--json"];
        dplan(&[&fixed[..], more].concat())
    }
    fn saving(&self, more: &[&str]) -> (Vec<Value>, String, Option<i32>) {
        self.run(&[&["--checkpoint", self.ckpt.to_str().unwrap(), "--every", "3", "--checkpoint-writes", "waiting"], more].concat())
    }
}

#[test]
fn a_rank_that_dies_is_named_and_the_run_restarts_from_the_last_checkpoint() {
    let case = Case::new("dies", "dp=2,tp=2,zero=1", 4, "f32");
    let (whole, ..) = case.run(&[]);
    let (_, stderr, status) = case.run(&["--rehearse", "die:2@4"]);
    assert_eq!(status, Some(3), "{stderr}");
    for part in ["rank 2 (stage 0) failed at `", "begin, instruction 0", "told to die", "would have met it next"] {
        assert!(stderr.contains(part), "{stderr}");
    }
    let (lines, stderr, status) = case.saving(&["--rehearse", "die:2@4,die:1@7", "--restarts", "2"]);
    assert_eq!(status, Some(0), "{stderr}");
    assert_eq!(losses(&lines), losses(&whole));
    let resumed: Vec<u64> = lines.iter().filter_map(|l| l.pointer("/resumed/step")?.as_u64()).collect();
    assert_eq!((resumed, said(&lines, "restart")), (vec![3, 6], vec!["1 of 2", "2 of 2"]));
    // Once more than it may: it ends, and what was saved stays.
    let case = Case::new("dies-often", "dp=2", 2, "f32");
    let (lines, stderr, status) = case.saving(&["--rehearse", "die:0@4,die:1@5", "--restarts", "1"]);
    assert!(status == Some(3) && stderr.contains("rank 1") && said(&lines, "restart").len() == 1, "{stderr}");
    assert_eq!(find(&case.ckpt).unwrap().checkpoint.position().step, 3);
}

#[test]
fn a_rank_that_stalls_is_named_with_those_that_wait_for_it() {
    let case = Case::new("stalls", "tp=2,pp=2", 4, "f32");
    let (whole, ..) = case.run(&[]);
    let (_, stderr, status) = case.run(&["--rehearse", "stall:1@2", "--timeout", "3"]);
    assert_eq!(status, Some(3), "{stderr}");
    for part in ["rank 1 (stage 0) is at `", "rank 0 (stage 0) waits at `", "for rank 1"] {
        assert!(stderr.contains(part), "{stderr}");
    }
    let (lines, stderr, status) = case.saving(&["--rehearse", "stall:1@4", "--timeout", "3", "--restarts", "1"]);
    assert_eq!(status, Some(0), "{stderr}");
    assert_eq!(losses(&lines), losses(&whole));
}

/// Two of eight ranks die; six are left, and the run goes on as one that was planned for them from that checkpoint.
#[test]
fn an_elastic_run_plans_for_the_ranks_that_are_left() {
    let case = Case::new("elastic", "dp=4,tp=2,zero=2", 8, "f64");
    let (whole, ..) = case.run(&[]);
    let (lines, stderr, status) = case.saving(&["--keep", "9", "--rehearse", "die:6@4,die:7@4", "--elastic"]);
    assert_eq!(status, Some(0), "{stderr}");
    assert!(said(&lines, "fault")[0].contains("rank 6") && said(&lines, "fault")[0].contains("rank 7 failed too"), "{lines:?}");
    assert!(said(&lines, "plan")[0].starts_with("6 ranks are left: "), "{lines:?}");
    let ranks = lines.last().unwrap()["summary"]["ranks"].as_u64().unwrap();
    assert!((1..=6).contains(&ranks), "{ranks} ranks");
    let close = |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x / y - 1.0).abs() < 1e-12);
    assert!(close(&losses(&lines), &losses(&whole)), "{:?} against {:?}", losses(&lines), losses(&whole));
    // A plan made for so many ranks beforehand, resumed from the same checkpoint, has the same curve.
    let planned = common::small_plan(case.plan.parent().unwrap(), &pins_of(said(&lines, "plan")[0]), ranks as u32, "f64");
    let from = case.ckpt.join("step-00000003");
    let (other, stderr, status) =
        dplan(&["run", planned.to_str().unwrap(), "--steps", "8", "--lr", "0.01", "--json", "--resume", from.to_str().unwrap()]);
    assert_eq!(status, Some(0), "{stderr}");
    assert!(close(&losses(&other), &losses(&lines)[3..]), "{:?} against {:?}", losses(&other), losses(&lines));
}

/// `… dp 2 · tp 1 · pp 3 on 6` as pins.
fn pins_of(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let after = |what: &str| words[words.iter().position(|w| *w == what).unwrap() + 1];
    format!("dp={},tp={},pp={}", after("dp"), after("tp"), after("pp"))
}

#[test]
fn a_loss_that_is_not_finite_is_never_saved_and_its_data_is_left_out() {
    let case = Case::new("nan", "dp=2,zero=1", 2, "f32");
    let (lines, stderr, status) = case.saving(&["--rehearse", "nan:0@5"]);
    assert!(status == Some(3) && stderr.contains("of step 5") && stderr.contains("not saved"), "{stderr}");
    assert_eq!(losses(&lines).len(), 5);
    assert_eq!(find(&case.ckpt).unwrap().checkpoint.position().step, 3);
    // With leave to skip: back to step 3, without the data of step 5 to the end, whose update does not count.
    let case = Case::new("nan-skip", "dp=2,zero=1", 2, "f32");
    let (lines, stderr, status) = case.saving(&["--rehearse", "nan:0@5", "--skip-bad", "1"]);
    assert_eq!(status, Some(0), "{stderr}");
    assert!(lines.iter().any(|l| l["skipped"] == true && l["step"] == 5 && l["sequences"] == 40), "{lines:?}");
    let position = find(&case.ckpt).unwrap().checkpoint.position();
    assert_eq!((position.step, position.updates, position.sequences), (8, 7, 64));
    // Once more than it may.
    let case = Case::new("nan-often", "dp=2,zero=1", 2, "f32");
    let (_, stderr, status) = case.saving(&["--rehearse", "nan:0@4,nan:1@5", "--skip-bad", "1"]);
    assert!(status == Some(3) && stderr.contains("after 1 steps that were left out"), "{stderr}");
}

#[test]
fn a_flipped_bit_is_traced_to_its_rank_and_tensor() {
    let case = Case::new("flip", "dp=4,zero=0", 4, "f32");
    let (_, stderr, status) = case.run(&["--check-replicas", "2"]);
    assert_eq!(status, Some(0), "{stderr}");
    let (_, stderr, status) = case.run(&["--check-replicas", "2", "--rehearse", "flip:2@5"]);
    assert_eq!(status, Some(3), "{stderr}");
    assert!(stderr.contains("after step 5, param of `") && stderr.contains("on rank 2 differs from its replicas"), "{stderr}");
}

#[test]
fn steps_run_twice_are_bitwise_equal() {
    for pins in ["dp=2,tp=2,zero=3", "dp=4,zero=1,wire=topk:0.1"] {
        repeated(pins);
    }
}

fn repeated(pins: &str) {
    let case = Case::new("replay", pins, 4, "f32");
    let (whole, ..) = case.run(&[]);
    let (twice, stderr, status) = case.run(&["--replay", "2"]);
    assert_eq!(status, Some(0), "{stderr}");
    assert_eq!(losses(&twice), losses(&whole));
}

/// Files may not grow beyond 8 KiB: what a full disk is to a run, where no small disk can be had.
fn limited(args: &[&str]) -> Output {
    let command = r#"trap '' XFSZ; ulimit -f 8; exec "$0" "$@""#;
    Command::new("bash").args(["-c", command, env!("CARGO_BIN_EXE_dplan")]).args(args).output().unwrap()
}

fn leftovers(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|n| n.ends_with(".tmp")).collect()
}

#[test]
fn a_full_disk_leaves_the_checkpoints_before_and_no_half_one() {
    let case = Case::new("full", "dp=2,zero=1", 2, "f32");
    let (_, stderr, status) = case.saving(&[]);
    assert_eq!(status, Some(0), "{stderr}");
    let (plan, ckpt) = (case.plan.to_str().unwrap(), case.ckpt.to_str().unwrap());
    let args = ["run", plan, "--steps", "12", "--lr", "0.01", "--json", "--checkpoint", ckpt, "--resume", ckpt, "--every", "2"];
    let output = limited(&args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("cannot save a checkpoint") && stderr.contains("File too large"), "{stderr}");
    assert_eq!((find(&case.ckpt).unwrap().checkpoint.position().step, leftovers(&case.ckpt)), (8, vec![]));
    // Told to go on, it goes on to the end, and says what it could not save.
    let output = limited(&[&args[..], &["--checkpoint-failure", "continue"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert_eq!(stderr.matches("warning: no checkpoint").count(), 2, "{stderr}");
    let lines = common::json_lines(&String::from_utf8_lossy(&output.stdout));
    assert_eq!(losses(&lines).len(), 4);
    let found = find(&case.ckpt).unwrap();
    assert_eq!((found.checkpoint.position().step, found.notes.len(), leftovers(&case.ckpt)), (8, 0, vec![]));
    // With room again, nothing is in the way.
    let (_, stderr, status) = dplan(&args);
    assert_eq!((status, find(&case.ckpt).unwrap().checkpoint.position().step), (Some(0), 12), "{stderr}");
}

#[test]
fn a_folder_that_cannot_be_written_is_refused_before_anything_is_run() {
    let case = Case::new("refused", "dp=2", 2, "f32");
    std::fs::write(&case.ckpt, "a file").unwrap();
    let (lines, stderr, status) = case.saving(&[]);
    assert!(status == Some(2) && lines.is_empty() && stderr.contains("ckpt"), "{stderr}");
    std::fs::remove_file(&case.ckpt).unwrap();
    // Two runs at once.
    let store = dplan::checkpoint::Store::open(&case.ckpt, 1).unwrap();
    let (lines, stderr, status) = case.saving(&[]);
    assert!(status == Some(2) && lines.is_empty() && stderr.contains("another run writes checkpoints here"), "{stderr}");
    drop(store);
    let (_, stderr, status) = case.saving(&[]);
    assert_eq!(status, Some(0), "{stderr}");
    // A run that does not say that it continues.
    let (_, stderr, status) = case.saving(&[]);
    assert!(status == Some(2) && stderr.contains("has checkpoints already"), "{stderr}");
}

/// A disk of its own, half a mebibyte, on which a file takes the room of the next checkpoint.
const SMALL_DISK: &str = r#"
set -e
disk=$1; out=$2; dplan=$3; plan=$4
mkdir -p "$disk" "$out"
mount -t tmpfs -o size=512k none "$disk" || { echo "no mount"; exit 0; }
run() { set +e; "$dplan" run "$plan" --lr 0.01 --json --checkpoint "$disk/ckpt" --keep 1 --every 2 "$@" >"$out/stdout" 2>"$out/stderr"; echo "status $?"; set -e; cat "$out/stderr"; }
run --steps 4
head -c 300k /dev/zero >"$disk/filler" 2>/dev/null
run --steps 8 --resume "$disk/ckpt"
run --steps 8 --resume "$disk/ckpt" --checkpoint-failure continue
cp -a "$disk/ckpt" "$out/full"
rm "$disk/filler"
mount -o remount,ro "$disk"
run --steps 8 --resume "$disk/ckpt"
mount -o remount,rw "$disk"
run --steps 8 --resume "$disk/ckpt"
cp -a "$disk/ckpt" "$out/after"
"#;

#[test]
fn a_small_disk_that_is_full_or_read_only_leaves_the_checkpoint_before_and_no_half_one() {
    let case = Case::new("small-disk", "dp=2,zero=1", 2, "f32");
    let dir = case.plan.parent().unwrap();
    let (disk, out) = (dir.join("disk"), dir.join("out"));
    let script = ["-rm", "bash", "-c", SMALL_DISK, "bash", disk.to_str().unwrap(), out.to_str().unwrap()];
    let plan = [env!("CARGO_BIN_EXE_dplan"), case.plan.to_str().unwrap()];
    let output = match Command::new("unshare").args(script).args(plan).output() {
        Ok(output) => output,
        Err(error) => return eprintln!("SKIPPED: no small disk without `unshare` ({error}); a limit on files stands for it"),
    };
    let (told, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !told.starts_with("status") {
        return eprintln!("SKIPPED: no small disk may be mounted here ({told}{stderr}); a limit on files stands for it");
    }
    let runs: Vec<&str> = told.split("status ").skip(1).collect();
    let [before, full, told_to_go_on, read_only, after] = runs[..] else { panic!("{told}{stderr}") };
    assert!(before.starts_with('0') && after.starts_with('0'), "{told}");
    assert!(full.starts_with('3') && full.contains("cannot save a checkpoint") && full.contains("No space left on device"), "{told}");
    assert!(told_to_go_on.starts_with('0') && told_to_go_on.matches("warning: no checkpoint").count() == 2, "{told}");
    assert!(read_only.starts_with('2') && read_only.contains("Read-only file system"), "{told}");
    let step = |what: &str| find(&out.join(what)).map(|f| (f.checkpoint.position().step, f.notes.len(), leftovers(&out.join(what)).len()));
    assert_eq!((step("full").unwrap(), step("after").unwrap()), ((4, 0, 0), (8, 0, 0)));
}

/// The built `dplan`, bound by permissions: a superuser is freed of the right to ignore them. `None`, said aloud, where that cannot be.
fn bound_by_permissions(dir: &Path) -> Option<Command> {
    let superuser = std::fs::write(dir.join("probe"), "").is_ok();
    let prefix: &[&str] = if superuser { &["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--"] } else { &[] };
    let command = |program: &str| {
        let words: Vec<&str> = prefix.iter().copied().chain([program]).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        command
    };
    let refused = |o: &Output| !o.status.success() && String::from_utf8_lossy(&o.stderr).contains("Permission");
    if superuser && !command("touch").arg(dir.join("probe")).output().is_ok_and(|o| refused(&o)) {
        eprintln!("SKIPPED: permissions do not bind this user, and `setpriv` does not help");
        return None;
    }
    Some(command(env!("CARGO_BIN_EXE_dplan")))
}

#[test]
fn a_folder_without_permission_is_refused_or_ends_the_run_as_the_flag_says() {
    let may = |dir: &Path, mode: u32| std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
    for (failure, status) in [("stop", 3), ("continue", 0)] {
        let case = Case::new(&format!("permission-{failure}"), "dp=2,zero=1", 2, "f32");
        std::fs::create_dir(&case.ckpt).unwrap();
        may(&case.ckpt, 0o555);
        let Some(mut command) = bound_by_permissions(&case.ckpt) else { return may(&case.ckpt, 0o755) };
        let (plan, ckpt) = (case.plan.to_str().unwrap(), case.ckpt.to_str().unwrap());
        command.args([
            "run",
            plan,
            "--steps",
            "2000",
            "--json",
            "--checkpoint",
            ckpt,
            "--resume",
            ckpt,
            "--every",
            "2",
            "--checkpoint-failure",
            failure,
        ]);
        // From the start: nothing is run.
        let refused = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(2) && refused.stdout.is_empty() && stderr.contains("Permission denied"), "{stderr}");
        // Taken away while the run goes on, wherever the writer is.
        may(&case.ckpt, 0o755);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let begin = Instant::now();
        while !case.ckpt.join("latest").exists() {
            assert!(begin.elapsed() < Duration::from_secs(60), "no checkpoint");
            std::thread::sleep(Duration::from_millis(2));
        }
        may(&case.ckpt, 0o555);
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{stderr}");
        assert!(
            stderr.contains("Permission denied") && stderr.contains(if status == 3 { "cannot save a checkpoint" } else { "warning: no checkpoint" }),
            "{stderr}"
        );
        let whole = find(&case.ckpt).unwrap().checkpoint.position().step;
        assert!((2..2000).contains(&whole), "{whole}");
        // With permission again, what was left is cleared away, and the run goes on.
        may(&case.ckpt, 0o755);
        let (_, stderr, status) = dplan(&["run", plan, "--steps", &(whole + 1).to_string(), "--json", "--checkpoint", ckpt, "--resume", ckpt]);
        assert_eq!((status, find(&case.ckpt).unwrap().checkpoint.position().step, leftovers(&case.ckpt)), (Some(0), whole + 1, vec![]), "{stderr}");
    }
}
