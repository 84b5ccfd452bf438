//! Profiles that PyTorch recorded, read in place: what is said of them agrees with what is known of them.

mod common;

use dplan::profile::analyse::matching::Basis;
use dplan::profile::analyse::parallelism::ParallelKind;
use dplan::profile::analyse::{Analysis, analyse};
use dplan::profile::{CommKernels, CommOp, Ns, Profile, read, report};
use std::path::PathBuf;

fn traces() -> Option<PathBuf> {
    let traces = common::shared()?.join("traces");
    if !traces.is_dir() {
        eprintln!("SKIPPED: the shared data has no traces");
        return None;
    }
    Some(traces)
}

fn inspect(paths: &[PathBuf]) -> (Profile, Analysis) {
    let profile = read(paths, &CommKernels::default()).unwrap();
    let analysis = analyse(&profile);
    parts_add_up(&analysis);
    let _ = report::text(&profile, &analysis);
    let _ = report::json(&profile, &analysis).to_string();
    (profile, analysis)
}

/// Every nanosecond of a window is in one part, and nothing is hidden that was not there.
fn parts_add_up(analysis: &Analysis) {
    for exposure in &analysis.exposures {
        let (p, h) = (&exposure.parts, &exposure.hidden);
        assert!([p.compute, p.transfer, p.waiting, p.bubble, p.copies, p.input, p.launch, p.idle].iter().all(|t| *t >= 0), "{p:?}");
        assert!(h.transfer + h.waiting <= p.compute, "{h:?} {p:?}");
        assert!(exposure.communication <= p.window());
    }
    for instance in &analysis.instances {
        assert!(instance.transfer >= 0 && !instance.members.is_empty());
    }
}

#[test]
fn v100_all_ranks_waiting_is_apart_from_transfer() {
    let Some(traces) = traces() else { return };
    let files: Vec<PathBuf> = (0..8).map(|r| traces.join(format!("param_dlrm_v100_8rank/kineto_rank{r}.json.gz"))).collect();
    let (profile, analysis) = inspect(&files);
    assert_eq!(profile.ranks.iter().map(|r| r.rank).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
    assert_eq!(profile.ranks[3].device.as_ref().map(|d| d.name.as_str()), Some("Tesla V100-SXM2-32GB"));

    // Durations are from the recording: each collective by its least duration, op and size.
    let expected: [(CommOp, u64, Ns); 8] = [
        (CommOp::AllToAll, 24_576, 10_000),
        (CommOp::AllToAll, 192, 8_000),
        (CommOp::AllToAll, 1_536, 7_000),
        (CommOp::AllToAll, 13_568, 7_000),
        (CommOp::AllReduce, 394_241 * 4, 86_000),
        (CommOp::AllToAll, 24_576, 10_000),
        (CommOp::AllReduce, 112 * 4, 20_000),
        (CommOp::AllReduce, 226_960 * 4, 69_000),
    ];
    assert_eq!(analysis.instances.len(), 8);
    for (instance, (op, bytes, transfer)) in analysis.instances.iter().zip(expected) {
        assert_eq!((instance.op, instance.transfer), (op, transfer));
        assert!(instance.bytes >= Some(bytes), "ranks give different amounts to an all-to-all: {instance:?}");
        assert_eq!((instance.basis, instance.members.len(), instance.group_size), (Basis::AllMembers, 8, Some(8)));
    }
    let waits =
        |i: usize| analysis.instances[i].members.iter().map(|m| m.of(&profile).duration - analysis.instances[i].transfer).collect::<Vec<Ns>>();
    assert_eq!(waits(0).iter().max(), Some(&7_625_000), "7 635 µs of the first all-to-all on rank 1 are 10 µs of transfer");
    assert_eq!(waits(0).iter().min(), Some(&0));

    let disagreement = analysis.clocks.disagreement.unwrap();
    assert!(disagreement <= 7_000, "ends agree within 7 µs after correction: {disagreement} ns");
    assert!(analysis.clocks.placed.iter().all(|p| *p));
    assert!(analysis.exposures.iter().all(|e| e.parts.waiting > 10 * e.parts.transfer / 2), "most of the communication is waiting");

    let data = analysis.parallelism.iter().find(|p| matches!(p.kind, ParallelKind::Data { .. })).unwrap();
    assert_eq!((data.degree, &data.kind), (8, &ParallelKind::Data { buckets_per_step: Some(3), gradient_elements: Some(394_241 + 112 + 226_960) }));
    assert!(analysis.parallelism.iter().any(|p| p.kind == ParallelKind::AllToAll { calls_per_step: Some(5) }));
}

#[test]
fn v100_some_ranks_give_a_bound() {
    let Some(traces) = traces() else { return };
    let files: Vec<PathBuf> = [1, 3].map(|r| traces.join(format!("param_dlrm_v100_8rank/kineto_rank{r}.json.gz"))).to_vec();
    let (profile, analysis) = inspect(&files);
    assert_eq!(analysis.instances.len(), 8);
    assert!(analysis.instances.iter().all(|i| i.basis == Basis::SomeMembers && i.group_size == Some(8)));
    assert_eq!(analysis.instances[0].transfer, 6_132_000, "with ranks 1 and 3 alone, most waiting cannot be told from transfer");
    assert!(profile.notes.iter().any(|n| n.contains("2 of 8 ranks given")), "{:?}", profile.notes);
}

#[test]
fn a100_buckets_gradients_bandwidth_and_overlap() {
    let Some(traces) = traces() else { return };
    let (profile, analysis) = inspect(&[traces.join("hta_a100_ddp_2rank/rank0.json.gz")]);
    assert_eq!(analysis.steps, [3]);
    let data = &analysis.parallelism[0];
    assert_eq!((data.degree, &data.kind), (2, &ParallelKind::Data { buckets_per_step: Some(5), gradient_elements: Some(25_557_032) }));

    let bucket = |elements: u64| analysis.rows.iter().find(|r| r.op == CommOp::AllReduce && r.elements == Some(elements)).unwrap();
    for (elements, fastest) in
        [(2_049_000, 2_520_607), (7_875_584, 2_424_415), (6_563_840, 2_368_513), (6_637_568, 2_160_803), (2_431_040, 1_689_577)]
    {
        let row = bucket(elements);
        assert_eq!((row.calls, row.transfer_least, row.bytes), (3, fastest, Some(elements * 4)));
        assert_eq!((row.algorithm.as_deref(), row.protocol.as_deref(), row.group_size), (Some("RING"), Some("LL"), Some(2)));
        assert_eq!(row.basis, Basis::FastestCall, "rank 1 was not recorded");
    }
    let bandwidth = bucket(7_875_584).bus_bandwidth.unwrap();
    assert!((bandwidth - 7_875_584.0 * 4.0 / 2_424_415e-9).abs() < 1.0, "2(n−1)/n is 1 of two ranks: {bandwidth}");

    // Exact, by an independent count over the recording.
    let exposure = &analysis.exposures[0];
    assert_eq!((exposure.parts.window(), exposure.parts.compute, exposure.communication), (667_225_958, 115_655_847, 46_876_493));
    assert_eq!(exposure.hidden.transfer + exposure.hidden.waiting, 7_317_025, "15.6 % of the communication is overlapped");
    assert_eq!(profile.ranks[0].comms.len(), 21);
}

#[test]
fn v100_ddp_of_old_without_sizes() {
    let Some(traces) = traces() else { return };
    let (profile, analysis) = inspect(&[traces.join("hta_v100_ddp_rank1of2/rank1.json.gz")]);
    let exposure = &analysis.exposures[0];
    assert_eq!((analysis.steps[0], profile.ranks[0].comms.len()), (5, 2020));
    assert_eq!((exposure.parts.window(), exposure.parts.compute, exposure.communication), (1_737_902_000, 620_516_000, 357_343_000));
    assert_eq!(exposure.hidden.transfer + exposure.hidden.waiting, 0, "nothing is overlapped");
    assert_eq!(analysis.parallelism[0].kind, ParallelKind::Data { buckets_per_step: Some(404), gradient_elements: None });
    assert!(profile.ranks[0].memory.reserved_bytes.is_some());
}

#[test]
fn gloo_runs_are_attributed_to_their_parallelism() {
    let Some(traces) = traces() else { return };
    let run = |name: &str| inspect(&[traces.join("torch215_gloo_4rank").join(name)]);

    let (profile, ddp) = run("ddp");
    assert_eq!(ddp.parallelism.len(), 1);
    assert_eq!(
        (ddp.parallelism[0].degree, &ddp.parallelism[0].kind),
        (4, &ParallelKind::Data { buckets_per_step: Some(3), gradient_elements: Some(3 * 262_528) })
    );
    assert_eq!(
        ddp.instances.iter().map(|i| (i.op, i.bytes, i.basis)).collect::<Vec<_>>(),
        [(CommOp::AllReduce, Some(262_528 * 4), Basis::AllMembers); 3]
    );
    assert!(profile.ranks.iter().all(|r| r.backend.as_deref() == Some("gloo")));

    let (_, fsdp) = run("fsdp2");
    assert_eq!(fsdp.parallelism.len(), 1);
    assert_eq!((fsdp.parallelism[0].degree, &fsdp.parallelism[0].kind), (4, &ParallelKind::Sharded { zero: 3, modules: 5 }));
    let scatters: Vec<_> = fsdp.rows.iter().filter(|r| r.op == CommOp::ReduceScatter).collect();
    assert_eq!(scatters.iter().map(|r| r.calls).sum::<usize>(), 5);
    assert!(scatters.iter().all(|r| r.ran_as == Some(CommOp::AllReduce)), "gloo reduces everything where it should scatter");
    assert_eq!(
        fsdp.rows.iter().filter(|r| r.op == CommOp::AllGather).map(|r| (r.bytes, r.calls)).collect::<Vec<_>>(),
        [(Some(164_096 * 4), 8), (Some(131_200 * 4), 1)]
    );

    let (_, tp) = run("tp");
    assert_eq!((tp.parallelism[0].degree, &tp.parallelism[0].kind), (2, &ParallelKind::Tensor { calls_per_step: Some(28) }));
    assert_eq!(tp.parallelism[1].kind, ParallelKind::Unused { name: "mesh_dp".into() }, "this run never synchronises its replicas");
    assert_eq!(tp.parallelism.len(), 2);
    let groups: Vec<_> = tp.rows.iter().map(|r| (r.group.clone().unwrap(), r.group_name.clone().unwrap(), r.calls)).collect();
    assert_eq!(groups.len(), 2);
    assert!(groups.contains(&(vec![0, 1], "mesh_tp".into(), 28)) && groups.contains(&(vec![2, 3], "mesh_tp".into(), 28)), "{groups:?}");

    for (name, schedule, stages, of_rank_1) in
        [("pp_1f1b", "1F1B", 4, None), ("pp_interleaved", "interleaved 1F1B", 8, Some(vec![1, 5])), ("pp_zbv", "ZBV", 8, Some(vec![1, 6]))]
    {
        let (_, pp) = run(name);
        assert_eq!(pp.parallelism.len(), 1, "{name}");
        let ParallelKind::Pipeline(found) = &pp.parallelism[0].kind else { panic!("{name}: {:?}", pp.parallelism) };
        assert_eq!((found.name, found.ranks, found.stages, found.micro_batches), (schedule, 4, stages, 4), "{name}");
        assert_eq!(found.stages_of.get(&1).cloned(), of_rank_1, "{name}");
        assert!(pp.instances.iter().all(|i| i.op == CommOp::Send && i.basis == Basis::AllMembers), "{name}: every message has both its sides");
        assert!(pp.total.bubble > pp.total.waiting + pp.total.transfer, "{name}: what stages wait for is each other");
        assert_eq!(pp.findings[0].limit.name(), "bubble", "{name}");
    }
}

#[test]
fn damage_to_recorded_profiles_is_an_error_or_said() {
    let Some(traces) = traces() else { return };
    let file = traces.join("torch215_gloo_4rank/pp_zbv/rank1.json.gz");
    let gz = std::fs::read(file).unwrap();
    let mut whole = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&gz[..]), &mut whole).unwrap();
    // The compressed file cut short, and its text cut short.
    for (content, kept) in [(&gz[..gz.len() / 2], true), (&whole[..whole.len() / 3], true), (&gz[..30], false), (&whole[..400], false)] {
        match dplan::profile::parse("rank1.json", content, &CommKernels::default()) {
            Ok(profile) => {
                assert!(kept);
                let notes = &profile.ranks[0].notes;
                assert!(notes.iter().any(|n| n.contains("cut short") && n.contains("byte ")), "{notes:?}");
                assert!(profile.ranks[0].events.len() > 1000);
                assert_eq!(profile.ranks[0].rank, 1);
            }
            Err(error) => assert!(!kept && error.to_string().contains("cut short"), "{error}"),
        }
    }
}
