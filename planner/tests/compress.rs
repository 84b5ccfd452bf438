//! Gradients of which the largest elements alone travel: what becomes of a program, which damage to that is noticed, and what it costs.

use dplan_ir::dtype::DType;
use dplan_ir::entity::BufferId;
use dplan_ir::layers::classes;
use dplan_ir::mesh::AxisSet;
use dplan_ir::plan::{Plan, Wire, Zero};
use dplan_ir::program::{Content, Instr, Issue, Pattern, Program, Role, align};
use dplan_ir::text::{parse_program, print_program};
use dplan_ir::verify::verify_program;
use dplan_planner::drawn::Case;
use dplan_planner::lower::{LowerError, lower};
use dplan_planner::machine::Cluster;
use dplan_planner::predict::predict;
use std::collections::BTreeMap;

const CASES: [&str; 3] = [
    "dp=2 tp=2 sp=on split=textbook zero=0,1,0 count=2 wire=topk:0.1",
    "dp=2 cp=2 tied=on cuts=1 zero=1 clip=on wire=topk:0.3",
    "dp=4 zero=1,0,1 offload=none,gradients,none wire=topk:0.01",
];

#[test]
fn each_bucket_is_compressed_once_a_step_with_a_residual_of_its_own() {
    for text in CASES {
        let case: Case = text.parse().unwrap();
        let graph = case.graph();
        let plan = case.plan(&graph);
        let program = lower(&graph, &plan).unwrap();
        assert_eq!(parse_program(&print_program(&program, &graph), &graph).unwrap(), program, "{text}");
        let share = case.wire.kept().unwrap();
        for stage in &program.stages {
            let mut residuals: Vec<BufferId> = Vec::new();
            for issue in stage.segments.values().flat_map(|s| &s.body) {
                match &issue.instr {
                    Instr::Compress { src, residual, dst } => {
                        let Content::Flat { bucket, role: Role::Grad, .. } = stage.buffers[*src].content else { panic!("{text}: {src}") };
                        assert_eq!(stage.home(bucket, Role::Residual), Some(*residual), "{text}");
                        let Content::Wire { kept, .. } = stage.buffers[*dst].content else { panic!("{text}: {dst}") };
                        assert_eq!(kept, Some(share.of(stage.buckets[bucket].elems)), "{text}");
                        residuals.push(*residual);
                    }
                    // Nothing else of the gradients goes over data-parallel ranks.
                    Instr::Collective { pattern, axes, src, .. } if axes.intersects(program.mesh.data()) => match stage.buffers[*src].content {
                        Content::Wire { kept, .. } => assert!(kept.is_some() && *pattern == Pattern::AllGather, "{text}"),
                        Content::Flat { role, .. } => assert_ne!(role, Role::Grad, "{text}"),
                        _ => {}
                    },
                    _ => {}
                }
            }
            let compressed = residuals.len();
            residuals.sort_unstable();
            residuals.dedup();
            assert_eq!((residuals.len(), compressed), (stage.buckets.len(), stage.buckets.len()), "{text}");
        }
        // One rank alone has nobody to compress for.
        let alone: Case = "zero=0 wire=topk:0.1".parse().unwrap();
        let graph = alone.graph();
        let full = Plan { wire: Wire::Full, ..alone.plan(&graph) };
        assert_eq!(lower(&graph, &alone.plan(&graph)).unwrap(), lower(&graph, &full).unwrap());
    }
}

/// Every wrong way of compressing, gathering and adding up, at every place.
#[test]
fn what_is_wrong_with_pairs_and_residuals_is_noticed_without_running() {
    let mut tried: BTreeMap<&str, u32> = BTreeMap::new();
    for text in CASES {
        let case: Case = text.parse().unwrap();
        let graph = case.graph();
        let program = lower(&graph, &case.plan(&graph)).unwrap();
        if let Err(violations) = verify_program(&graph, &program) {
            panic!("{case}: {} violations, first {}", violations.len(), violations[0]);
        }
        let every: AxisSet = program.mesh.ids().collect();
        for (stage, at) in program.stages.iter().enumerate().flat_map(|(s, p)| p.segments.ids().map(move |id| (s, id))) {
            let of_stage = &program.stages[stage];
            let body = &of_stage.segments[at].body;
            let others = |id: BufferId| {
                let this = &of_stage.buffers[id];
                of_stage
                    .buffers
                    .iter()
                    .filter(move |(_, b)| b.bytes == this.bytes && b.dtype == this.dtype && b.content != this.content)
                    .map(|(id, _)| id)
                    .take(6)
            };
            for place in 0..body.len() {
                let mut wrong = |kind: &'static str, damage: &dyn Fn(&mut Program)| {
                    let mut damaged = program.clone();
                    damage(&mut damaged);
                    assert!(verify_program(&graph, &damaged).is_err(), "{kind}: {case}, stage {stage} {at}[{place}] {:?}", body[place].instr);
                    *tried.entry(kind).or_default() += 1;
                };
                let becomes = |instr: Instr| move |p: &mut Program| p.stages[stage].segments[at].body[place].instr = instr.clone();
                let missing = |p: &mut Program| drop(p.stages[stage].segments[at].body.remove(place));
                let before = |instr: Instr| {
                    move |p: &mut Program| {
                        let body = &mut p.stages[stage].segments[at].body;
                        let issue = dplan_ir::program::Issue { stream: body[place].stream, instr: instr.clone() };
                        body.insert(place, issue);
                    }
                };
                match body[place].instr.clone() {
                    Instr::Compress { src, residual, dst } => {
                        wrong("not compressed", &missing);
                        wrong("compressed twice", &before(body[place].instr.clone()));
                        wrong("what is left over is cleared", &before(Instr::Zero { dst: residual }));
                        wrong("what is left over is added twice", &before(Instr::AddInto { src: residual, dst: src }));
                        wrong("gradients are left over twice", &before(Instr::AddInto { src, dst: residual }));
                        wrong("gradients take the residual's place", &becomes(Instr::Compress { src: residual, residual: src, dst }));
                        wrong("gradients are cast", &becomes(Instr::Cast { src, dst }));
                        for other in others(residual) {
                            wrong("the residual of others", &becomes(Instr::Compress { src, residual: other, dst }));
                        }
                        for other in others(src) {
                            wrong("other gradients", &becomes(Instr::Compress { src: other, residual, dst }));
                        }
                        wrong("what is left over is written elsewhere", &|p| {
                            let stage = &mut p.stages[stage];
                            let mut copy = stage.buffers[residual].clone();
                            copy.offset = stage.buffers[src].offset;
                            let copy = stage.buffers.push(copy);
                            stage.segments[at].body[place].instr = Instr::Compress { src, residual: copy, dst };
                        });
                        // A copy with room of its own, of which nobody else knows.
                        let apart = |p: &mut Program| {
                            let stage = &mut p.stages[stage];
                            let mut copy = stage.buffers[residual].clone();
                            copy.offset = align(stage.arena_bytes);
                            stage.arena_bytes = copy.offset + align(copy.bytes);
                            if let Some(last) = stage.regions.last_mut() {
                                last.bytes += align(copy.bytes);
                            }
                            stage.buffers.push(copy)
                        };
                        wrong("another residual", &|p| {
                            let copy = apart(p);
                            p.stages[stage].segments[at].body[place].instr = Instr::Compress { src, residual: copy, dst };
                        });
                        wrong("the residual is copied", &|p| {
                            let copy = apart(p);
                            let body = &mut p.stages[stage].segments[at].body;
                            let issue = Issue { instr: Instr::Copy { src: residual, dst: copy }, ..body[place].clone() };
                            body.insert(place, issue);
                        });
                        wrong("a pair less is sent than is expected", &|p| {
                            let buffer = &mut p.stages[stage].buffers[dst];
                            let Content::Wire { kept: Some(kept), .. } = &mut buffer.content else { return };
                            buffer.bytes = buffer.bytes / *kept * (*kept - 1);
                            *kept -= 1;
                        });
                    }
                    Instr::Collective { pattern: Pattern::AllGather, axes, stages, dim, monoid, src, dst }
                        if matches!(of_stage.buffers[src].content, Content::Wire { .. }) =>
                    {
                        wrong("pairs are not gathered", &missing);
                        for pattern in [Pattern::AllReduce, Pattern::ReduceScatter, Pattern::AllToAll, Pattern::Shift] {
                            let stages = stages.clone();
                            wrong("pairs are added up", &becomes(Instr::Collective { pattern, axes, stages, dim, monoid, src, dst }));
                        }
                        for fewer in every.iter().map(AxisSet::one).filter(|&one| one != axes) {
                            let stages = stages.clone();
                            wrong(
                                "pairs of other ranks",
                                &becomes(Instr::Collective { pattern: Pattern::AllGather, axes: fewer, stages, dim, monoid, src, dst }),
                            );
                        }
                    }
                    Instr::SumShares { src, dst } => {
                        wrong("not added up", &missing);
                        for other in others(src) {
                            wrong("others are added up", &becomes(Instr::SumShares { src: other, dst }));
                        }
                        for other in others(dst) {
                            wrong("added up elsewhere", &becomes(Instr::SumShares { src, dst: other }));
                        }
                    }
                    _ => {}
                }
            }
        }
    }
    assert!(tried.len() == 19 && tried.values().all(|&n| n >= 3), "{} {tried:?}", tried.len());
}

#[test]
fn what_compression_does_not_go_with_is_refused_by_name() {
    let plan = |text: &str, change: &dyn Fn(&mut Plan)| {
        let case: Case = text.parse().unwrap();
        let graph = case.graph();
        let mut plan = case.plan(&graph);
        plan.wire = Wire::from_name("topk:0.1").unwrap();
        change(&mut plan);
        lower(&graph, &plan)
    };
    let scattered = plan("dp=2", &|p| p.options.iter_mut().for_each(|o| o.zero = Zero(2))).unwrap_err();
    assert_eq!(scattered, LowerError::CompressedZero { wire: "topk:0.1".into(), found: 2 });
    let scaled = plan("dp=2 compute=f16 clip=on", &|_| {}).unwrap_err();
    assert_eq!(scaled, LowerError::CompressedScale { wire: "topk:0.1".into(), compute: DType::F16 });
}

/// Bytes decide where networks are slow: `2 F n` elements' worth of pairs for two at ZeRO 0, and for one at ZeRO 1.
#[test]
fn compression_pays_where_few_ranks_send_little() {
    let step = |text: &str, ranks: u64, wire: &str| {
        let case: Case = format!("{text} dp={ranks}").parse().unwrap();
        let graph = case.graph();
        let mut machine = Cluster::parse(&format!("h100:{ranks}")).unwrap().whole().clone();
        machine.curves = Default::default();
        machine.intra.bandwidth.0 = 1_000_000;
        machine.intra.latency = Default::default();
        let plan = Plan { wire: Wire::from_name(wire).unwrap(), ..case.plan(&graph) };
        predict(&graph, &classes(&graph), &machine.into(), &plan).unwrap().step.0 as f64
    };
    for (text, ranks, share, least, most) in [
        ("compute=f64 zero=0", 2, "topk:0.1", 0.15, 0.30),
        ("compute=f64 zero=0", 4, "topk:0.25", 0.9, 1.1),
        ("compute=f64 zero=0", 4, "topk:0.5", 1.8, 2.2),
    ] {
        let found = step(text, ranks, share) / step(text, ranks, "full");
        println!("{text} {ranks} {share}: {found}");
        assert!((least..=most).contains(&found), "{text} on {ranks} with {share}: {found}");
    }
}
