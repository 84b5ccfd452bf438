//! Gradients that are rounded for their exchange: what becomes of a program, which damage to that is noticed, and what it costs.

use dplan_ir::layers::classes;
use dplan_ir::mesh::AxisSet;
use dplan_ir::plan::{Plan, Wire};
use dplan_ir::program::{Content, Instr, Pattern, Program, Role};
use dplan_ir::sharding::Monoid;
use dplan_ir::sync::Sync;
use dplan_ir::verify::verify_program;
use dplan_planner::drawn::{Case, Dice};
use dplan_planner::lower::lower;
use dplan_planner::machine::Cluster;
use dplan_planner::predict::predict;
use std::collections::BTreeMap;

/// Instructions of a program, with where they are.
fn all(program: &Program) -> Vec<(usize, &Instr)> {
    let stages = program.stages.iter().enumerate();
    stages.flat_map(|(s, stage)| stage.segments.values().flat_map(move |g| g.body.iter().map(move |i| (s, &i.instr)))).collect()
}

#[test]
fn what_data_parallel_ranks_add_up_is_exchanged_rounded_and_nothing_else_is() {
    let (mut exchanges, mut gathers) = (0, 0);
    for seed in 0..120 {
        let case = Case::drawn(&mut Dice::of(21, seed));
        let graph = case.graph();
        let of = |wire| lower(&graph, &Plan { wire, sync: Sync::Flat, ..case.plan(&graph) }).unwrap_or_else(|e| panic!("{case}: {e}"));
        let (plain, rounded) = (of(Wire::Full), of(Wire::Bf16));
        let data = rounded.mesh.data();
        let mut steps: BTreeMap<&str, usize> = BTreeMap::new();
        for (s, instr) in all(&rounded) {
            let buffers = &rounded.stages[s].buffers;
            match instr {
                Instr::Cast { .. } => *steps.entry("cast").or_default() += 1,
                Instr::SumShares { .. } => *steps.entry("sum").or_default() += 1,
                Instr::Collective { pattern: Pattern::AllToAll, axes, .. } => {
                    assert!(data.includes(*axes), "{case}: {axes:?}");
                    *steps.entry("exchange").or_default() += 1;
                }
                Instr::Collective { pattern, axes, src, .. } => {
                    if let Content::Flat { role: Role::Grad, .. } = buffers[*src].content {
                        gathers += usize::from(*pattern == Pattern::AllGather);
                        assert!(*pattern == Pattern::AllGather || !axes.intersects(data), "{case}: {instr:?}");
                    }
                }
                _ => {}
            }
        }
        // One for each time that gradients went over data-parallel ranks at their full length.
        let full = all(&plain).into_iter().filter(|(s, instr)| match instr {
            Instr::Collective { axes, src, .. } => {
                axes.intersects(data) && matches!(plain.stages[*s].buffers[*src].content, Content::Flat { role: Role::Grad, .. })
            }
            _ => false,
        });
        let full = full.count();
        let counts: Vec<usize> = ["cast", "exchange", "sum"].map(|step| steps.get(step).copied().unwrap_or(0)).to_vec();
        assert_eq!(counts, [full; 3], "{case}");
        exchanges += full;
        if full == 0 {
            assert_eq!(plain, rounded, "{case}");
        }
    }
    assert!(exchanges > 500 && gathers > 100, "{exchanges} exchanges, {gathers} of whole gradients");
}

/// Every wrong way of rounding, exchanging and adding up, at every place of programs that have all ZeRO stages.
#[test]
fn what_is_wrong_on_the_wire_is_noticed_without_running() {
    let mut tried: BTreeMap<&str, u32> = BTreeMap::new();
    for text in
        ["dp=2 tp=2 sp=on split=textbook zero=0,1,2 count=2", "dp=2 cp=2 tied=on cuts=1 zero=1", "dp=4 zero=3,0,3 offload=none,gradients,none"]
    {
        let case: Case = format!("{text} wire=bf16 clip=on").parse().unwrap();
        let graph = case.graph();
        let program = lower(&graph, &case.plan(&graph)).unwrap();
        if let Err(violations) = verify_program(&graph, &program) {
            panic!("{case}: {} violations, first {}", violations.len(), violations[0]);
        }
        let every: AxisSet = program.mesh.ids().collect();
        let sets: Vec<AxisSet> = (1..1u32 << every.len()).map(|bits| every.iter().filter(|a| bits >> a.0 & 1 == 1).collect()).collect();
        for (stage, at) in program.stages.iter().enumerate().flat_map(|(s, p)| p.segments.ids().map(move |id| (s, id))) {
            let of_stage = &program.stages[stage];
            let body = &of_stage.segments[at].body;
            // Other buffers of the same size and kind.
            let others = |id: dplan_ir::entity::BufferId| {
                let this = &of_stage.buffers[id];
                let alike = move |b: &dplan_ir::program::Buffer| b.bytes == this.bytes && b.content != this.content;
                of_stage.buffers.iter().filter(move |(_, b)| b.dtype == this.dtype && alike(b)).map(|(id, _)| id).take(6)
            };
            for place in 0..body.len() {
                let mut wrong = |kind: &'static str, damage: Option<Instr>| {
                    let mut damaged = program.clone();
                    let there = &mut damaged.stages[stage].segments[at].body;
                    match damage {
                        Some(instr) => there[place].instr = instr,
                        None => drop(there.remove(place)),
                    }
                    assert!(verify_program(&graph, &damaged).is_err(), "{kind}: {case}, stage {stage} {at}[{place}] {:?}", body[place].instr);
                    *tried.entry(kind).or_default() += 1;
                };
                match body[place].instr.clone() {
                    Instr::Cast { src, dst } => {
                        wrong("not rounded", None);
                        wrong("the shares are rounded", Some(Instr::Cast { src: dst, dst: src }));
                        others(src).for_each(|src| wrong("other gradients are rounded", Some(Instr::Cast { src, dst })));
                        others(dst).for_each(|dst| wrong("rounded to elsewhere", Some(Instr::Cast { src, dst })));
                    }
                    Instr::Collective { pattern: Pattern::AllToAll, axes: right, stages, dim, monoid, src, dst } => {
                        let with = |pattern, axes, src, dst| Some(Instr::Collective { pattern, axes, stages: stages.clone(), dim, monoid, src, dst });
                        wrong("not exchanged", None);
                        wrong("exchanged in place", with(Pattern::AllToAll, right, src, src));
                        wrong("exchanged the other way", with(Pattern::AllToAll, right, dst, src));
                        for pattern in [Pattern::AllReduce, Pattern::ReduceScatter, Pattern::AllGather] {
                            wrong("added up in short", with(pattern, right, src, dst));
                        }
                        for &axes in sets.iter().filter(|&&set| set != right) {
                            wrong("exchanged over other axes", with(Pattern::AllToAll, axes, src, dst));
                        }
                        others(src).for_each(|src| wrong("of another bucket", with(Pattern::AllToAll, right, src, dst)));
                    }
                    Instr::SumShares { src, dst } => {
                        wrong("not added up", None);
                        others(src).for_each(|src| wrong("other shares are added up", Some(Instr::SumShares { src, dst })));
                        others(dst).for_each(|dst| wrong("added up elsewhere", Some(Instr::SumShares { src, dst })));
                        let Content::Wire { from: axes, .. } = of_stage.buffers[src].content else { panic!("{case}: {src}") };
                        let again =
                            Instr::Collective { pattern: Pattern::AllReduce, axes, stages: vec![], dim: 0, monoid: Monoid::Sum, src: dst, dst };
                        wrong("added up by a sum of sums", Some(again.clone()));
                    }
                    _ => {}
                }
            }
        }
    }
    assert!(tried.len() == 14 && tried.values().all(|&n| n >= 10), "{tried:?}");
}

/// Half the bytes where they all go the same way; between nodes of several ranks, each node's shares go out one by one that would have gone out as one sum.
#[test]
fn rounding_pays_inside_nodes_and_between_single_ranks() {
    let step = |text: &str, cluster: &str, wire| {
        let case: Case = text.parse().unwrap();
        let graph = case.graph();
        // Networks as slow as bytes can be told from latencies.
        let mut machine = Cluster::parse(cluster).unwrap().whole().clone();
        machine.curves = Default::default();
        (machine.intra.bandwidth.0, machine.inter.bandwidth.0) = (1_000_000, 20_000);
        (machine.intra.latency, machine.inter.latency) = Default::default();
        predict(&graph, &classes(&graph), &machine.into(), &Plan { wire, ..case.plan(&graph) }).unwrap().step.0 as f64
    };
    let ratio = |text: &str, cluster: &str| step(text, cluster, Wire::Bf16) / step(text, cluster, Wire::Full);
    // Eight bytes an element come down to six, since sums go back at full length, and four to two.
    for (text, cluster, least, most) in [
        ("dp=4 compute=bf16 zero=0", "h100:4", 0.74, 0.77),
        ("dp=4 compute=bf16 zero=1", "h100:4", 0.65, 0.68),
        ("dp=4 compute=bf16 zero=2", "h100:4", 0.65, 0.68),
        ("dp=4 compute=bf16 zero=2", "h100:1x4", 0.65, 0.68),
        ("dp=16 compute=bf16 zero=2", "h100:8x2", 1.6, 1.9),
    ] {
        let found = ratio(text, cluster);
        assert!((least..=most).contains(&found), "{text} on {cluster}: {found}");
    }
}
