//! Small profiles whose every number is known, and what becomes of damaged ones.

use dplan::profile::analyse::exposure::{Hidden, Parts};
use dplan::profile::analyse::matching::Basis;
use dplan::profile::analyse::parallelism::ParallelKind;
use dplan::profile::analyse::{Analysis, analyse};
use dplan::profile::{CommKernels, CommOp, Error, Format, Profile, parse, read, report};
use std::path::{Path, PathBuf};

const US: i64 = 1000;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/profiles").join(name)
}

fn inspect(name: &str) -> (Profile, Analysis) {
    let profile = read(&[data(name)], &CommKernels::default()).unwrap();
    let analysis = analyse(&profile);
    (profile, analysis)
}

#[test]
fn two_ranks_on_two_clocks() {
    let (profile, analysis) = inspect("nccl");
    // Rank 0 computes until 400 and has been in the all-reduce since 300; rank 1 comes at 550; both leave at 700 (on rank 1's clock 1 502 later).
    assert_eq!(analysis.clocks.ahead, [0, 1502 * US]);
    assert_eq!(analysis.clocks.disagreement, Some(0));
    let [instance] = analysis.instances.as_slice() else { panic!("{:?}", analysis.instances) };
    assert_eq!((instance.op, instance.bytes, instance.transfer, instance.basis), (CommOp::AllReduce, Some(2_000_000), 152 * US, Basis::AllMembers));
    let parts = |compute, transfer, waiting, input, launch, idle| Parts {
        compute: compute * US,
        transfer: transfer * US,
        waiting: waiting * US,
        input: input * US,
        launch: launch * US,
        idle: idle * US,
        ..Parts::default()
    };
    assert_eq!(analysis.exposures[0].parts, parts(370, 152, 148, 100, 180, 50));
    assert_eq!(analysis.exposures[1].parts, parts(530, 142, 0, 98, 180, 50));
    assert_eq!(analysis.exposures[0].hidden, Hidden { transfer: 0, waiting: 100 * US, copies: 0 });
    assert_eq!(analysis.exposures[1].hidden, Hidden { transfer: 10 * US, waiting: 0, copies: 0 });
    assert_eq!(analysis.rows[0].bus_bandwidth.map(|b| b.round()), Some((2_000_000.0f64 / 152e-6).round()));
    assert_eq!(analysis.balance.last_arrivals, [(1, 1)]);
    assert_eq!(analysis.parallelism[0].kind, ParallelKind::Data { buckets_per_step: Some(1), gradient_elements: Some(1_000_000) });
    let rank = &profile.ranks[0];
    assert_eq!(rank.device.as_ref().map(|d| d.name.as_str()), Some("Tiny GPU"), "rank 0 runs on device 2");
    assert_eq!((rank.memory.allocated_bytes, rank.memory.reserved_bytes), (Some(1024), Some(4096)));
    assert_eq!((rank.comms[0].backward, rank.comms[0].sequence), (Some(true), Some(3)));
    assert_eq!(rank.events[0].launched, None, "launched before the window");
}

#[test]
fn one_of_the_two_ranks_says_that_waiting_is_inside() {
    let (profile, analysis) = inspect("nccl/rank0.json");
    assert_eq!((analysis.instances[0].basis, analysis.instances[0].transfer), (Basis::Alone, 400 * US));
    let text = report::text(&profile, &analysis);
    assert!(text.contains("waiting is inside") && text.contains("1 of 2 ranks given"), "{text}");
}

#[test]
fn a_pipeline_in_our_own_format() {
    let (profile, analysis) = inspect("own.json");
    assert_eq!(profile.ranks.iter().map(|r| (r.rank, r.format)).collect::<Vec<_>>(), [(0, Format::Chrome), (1, Format::Chrome)]);
    let parts = |compute, transfer, bubble, idle| Parts {
        compute: compute * US,
        transfer: transfer * US,
        bubble: bubble * US,
        idle: idle * US,
        ..Parts::default()
    };
    assert_eq!(analysis.exposures[0].parts, parts(678, 32, 290, 0));
    assert_eq!(analysis.exposures[1].parts, parts(678, 32, 200, 90));
    let ParallelKind::Pipeline(schedule) = &analysis.parallelism[0].kind else { panic!("{:?}", analysis.parallelism) };
    assert_eq!((schedule.name, schedule.ranks, schedule.micro_batches), ("1F1B", 2, 2));
    assert_eq!(analysis.findings[0].limit.name(), "bubble");
    let json = report::json(&profile, &analysis);
    assert_eq!(json["bottleneck"]["kind"], "bubble");
    assert_eq!(json["ranks"][0]["parts"]["bubble"], 290e-6);
}

#[test]
fn what_is_no_profile_is_refused_by_name_and_place() {
    let rules = CommKernels::default();
    let fails = |name: &str, content: &[u8]| parse(name, content, &rules).expect_err(name).to_string();
    assert_eq!(fails("a.json", b""), "a.json: the file is empty; expected a profile");
    assert_eq!(fails("a.json", b" \n"), "a.json: the file is empty; expected a profile");
    assert!(
        fails("a.json", b"{\"schema\": \"1.1.1\", \"nodes\": []}")
            .contains("a JSON object of `schema`, `nodes` without `traceEvents`; expected a Kineto")
    );
    assert_eq!(fails("a.json", b"{\"traceEvents\": ["), "a.json: byte 17: the file ends before its first event: it was cut short");
    assert!(fails("a.json", b"{\"traceEvents\": []}").contains("`traceEvents` is empty"));
    assert!(fails("a.json", b"{\"traceEvents\": [{\"ph\":\"M\",\"name\":\"x\"}]}").contains("none of its 1 events is complete"));
    assert!(
        fails("a.json", b"{\"traceEvents\": [{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"x\",\"ts\":true,\"dur\":1}]}")
            .contains("byte 17: event 1: `ts` is `true`; expected microseconds")
    );
    assert!(
        fails("a.json", b"{\"traceEvents\": [{\"ph\":\"X\",\"cat\":\"range\",\"name\":\"x\",\"pid\":0,\"ts\":1,\"dur\":1}]}")
            .contains("none of its events is a kernel")
    );
    assert!(fails("a.txt", b"hello").contains("expected a Kineto"));
    assert!(fails("a.json", b"{]").contains("byte 1: expected a member's name, found `]`"));
    let twice = [data("nccl/rank0.json"), data("nccl/rank0.json")];
    assert!(matches!(read(&twice, &rules), Err(Error::TwiceTheRank { rank: 0, .. })));
    assert!(matches!(read(&[], &rules), Err(Error::Nothing)));
    assert!(read(&[data("absent.json")], &rules).unwrap_err().to_string().contains("absent.json"));
}

#[test]
fn a_few_damaged_events_are_left_out_and_counted() {
    let text = std::fs::read_to_string(data("nccl/rank0.json")).unwrap();
    let damaged = text.replacen("\"correlation\": 503", "\"correlation\": inf", 1);
    let profile = parse("rank0.json", damaged.as_bytes(), &CommKernels::default()).unwrap();
    assert!(profile.ranks[0].notes[0].contains("1 of 17 events could not be read"), "{:?}", profile.ranks[0].notes);
}

#[test]
fn a_rank_not_said_is_taken_from_the_name_or_the_order() {
    let text = std::fs::read_to_string(data("nccl/rank0.json")).unwrap().replace("\"rank\": 0,", "");
    let rules = CommKernels::default();
    assert_eq!(parse("worker5.json", text.as_bytes(), &rules).unwrap().ranks[0].rank, 5);
    let unnamed = parse("trace.json", text.as_bytes(), &rules).unwrap();
    assert_eq!(unnamed.ranks[0].rank, 0);
    assert!(unnamed.notes[0].contains("does not say its rank"), "{:?}", unnamed.notes);
}

/// Whatever the bytes are, there is an answer or an error, and never a panic: in reading, analysing or telling.
#[test]
fn no_bytes_cause_a_panic() {
    let rules = CommKernels::default();
    let csv = b"x\nStart (ns),Duration (ns),Device,Strm,Name\n1,2,0,7,gemm\n3,4,0,20,ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)\n".to_vec();
    let seeds = [std::fs::read(data("nccl/rank1.json")).unwrap(), std::fs::read(data("own.json")).unwrap(), csv];
    let mut random = Random(0x5eed);
    let (mut answers, mut errors) = (0, 0);
    for case in 0..6000 {
        let mut bytes = seeds[case % seeds.len()].clone();
        for _ in 0..=random.below(4) {
            damage(&mut bytes, &mut random);
        }
        match parse("x.json", &bytes, &rules) {
            Ok(profile) => {
                let analysis = analyse(&profile);
                let _ = report::text(&profile, &analysis);
                let _ = report::json(&profile, &analysis).to_string();
                answers += 1;
            }
            Err(error) => {
                assert!(error.to_string().contains("x.json"), "case {case}: {error}");
                errors += 1;
            }
        }
    }
    assert!(answers > 500 && errors > 500, "{answers} answers, {errors} errors: the damage is too light or too heavy");
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n.max(1)
    }
}

fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    if bytes.is_empty() {
        return;
    }
    let at = random.below(bytes.len());
    let to = (at + random.below(40)).min(bytes.len());
    match random.below(8) {
        0 => bytes.truncate(at),
        1 => bytes[at] = random.below(256) as u8,
        2 => drop(bytes.drain(at..to)),
        3 => {
            let part = bytes[at..to].to_vec();
            let into = random.below(bytes.len());
            bytes.splice(into..into, part);
        }
        4 => bytes.insert(at, b"{}[]\",:\\-.e9"[random.below(12)]),
        // Numbers at the edges of what can be counted.
        _ => {
            let digits: Vec<usize> =
                (0..bytes.len()).filter(|i| bytes[*i].is_ascii_digit() && (*i == 0 || !bytes[*i - 1].is_ascii_digit())).collect();
            let Some(&start) = digits.get(random.below(digits.len())) else { return };
            let end = (start..bytes.len()).find(|i| !bytes[*i].is_ascii_digit()).unwrap_or(bytes.len());
            let edge: &[u8] = [
                &b"0"[..],
                b"1",
                b"-1",
                b"9223372036854775807",
                b"18446744073709551615",
                b"4294967295",
                b"1e300",
                b"9223372036854775.807",
                b"null",
                b"99999999999999999999999",
            ][random.below(10)];
            bytes.splice(start..end, edge.iter().copied());
        }
    }
}
