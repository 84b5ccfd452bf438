//! Gradients that get to their sum in several steps, and degrees that are nested otherwise: what becomes of a program, which damage to that is noticed, and what it costs.

use dplan_ir::entity::BufferId;
use dplan_ir::layers::classes;
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::nest::Nest;
use dplan_ir::plan::{Plan, Wire};
use dplan_ir::program::{Content, Instr, Pattern, Program, Role, StageProgram};
use dplan_ir::sync::Sync;
use dplan_ir::verify::verify_program;
use dplan_planner::drawn::{Case, Dice};
use dplan_planner::lower::lower;
use dplan_planner::machine::Cluster;
use dplan_planner::predict::predict;
use std::collections::BTreeMap;

/// Instructions of a program, with where they are.
fn all(program: &Program) -> impl Iterator<Item = (&StageProgram, &Instr)> {
    program.stages.iter().flat_map(|stage| stage.segments.values().flat_map(move |g| g.body.iter().map(move |i| (stage, &i.instr))))
}

fn role(stage: &StageProgram, buffer: BufferId) -> Option<Role> {
    match stage.buffers[buffer].content {
        Content::Flat { role, .. } => Some(role),
        _ => None,
    }
}

/// Collectives over data-parallel ranks of one stage, by role and pattern.
fn exchanges(program: &Program) -> BTreeMap<(Role, Pattern), usize> {
    let data = program.mesh.data();
    let mut counts = BTreeMap::new();
    for (stage, instr) in all(program) {
        if let Instr::Collective { pattern, axes, stages, src, .. } = instr
            && let (Some(role), true, true) = (role(stage, *src), axes.intersects(data), stages.is_empty())
        {
            *counts.entry((role, *pattern)).or_default() += 1;
        }
    }
    counts
}

#[test]
fn every_sum_and_every_gather_goes_by_the_steps_of_its_exchange() {
    let mut tried: BTreeMap<&str, usize> = BTreeMap::new();
    for seed in 0..240 {
        let case = Case { sync: Sync::Flat, wire: Wire::Full, ..Case::drawn(&mut Dice::of(23, seed)) };
        if case.ep > 1 || case.dp * case.cp == 1 {
            continue;
        }
        let graph = case.graph();
        let of = |sync| lower(&graph, &Plan { sync, ..case.plan(&graph) }).unwrap_or_else(|e| panic!("{case} {sync:?}: {e}"));
        let flat = exchanges(&of(Sync::Flat));
        let count = |counts: &BTreeMap<_, usize>, role, pattern| counts.get(&(role, pattern)).copied().unwrap_or(0);
        let parts = (2..=case.dp).filter(|far| case.dp.is_multiple_of(*far)).map(|far| Sync::Hierarchical { far });
        for sync in parts.chain([Sync::Tree]) {
            let program = of(sync);
            if let Err(violations) = verify_program(&graph, &program) {
                panic!("{case} {sync:?}: {} violations, first {}", violations.len(), violations[0]);
            }
            let steps = sync.steps(&program.mesh, program.mesh.data()).len();
            let found = exchanges(&program);
            // There and back by all steps but the last, which sums.
            let sums = count(&flat, Role::Grad, Pattern::AllReduce);
            let expected = [
                (Role::Grad, Pattern::AllReduce, sums),
                (Role::Grad, Pattern::ReduceScatter, steps * count(&flat, Role::Grad, Pattern::ReduceScatter) + (steps - 1) * sums),
                (Role::Grad, Pattern::AllGather, (steps - 1) * sums),
                (Role::Param, Pattern::AllGather, steps * count(&flat, Role::Param, Pattern::AllGather)),
            ];
            for (role, pattern, expected) in expected {
                assert_eq!(count(&found, role, pattern), expected, "{case} {sync:?}: {role:?} {pattern:?}");
            }
            let of_sync = match sync {
                Sync::Flat => "flat",
                Sync::Server => "server",
                Sync::Hierarchical { .. } => "hierarchical",
                Sync::Tree => "tree",
            };
            *tried.entry(of_sync).or_default() += usize::from(steps > 1);
        }
    }
    assert!(tried["hierarchical"] > 30 && tried["tree"] > 30, "{tried:?}");
}

/// Every wrong way of scattering, summing and gathering, at every place of programs that have all ZeRO stages.
#[test]
fn what_is_wrong_with_a_step_is_noticed_without_running() {
    let mut tried: BTreeMap<&str, u32> = BTreeMap::new();
    for text in [
        "dp=4 tp=2 sp=on split=textbook zero=0,1,2 count=2 sync=hierarchical:2",
        "dp=4 cp=2 tied=on cuts=1 zero=1 sync=tree",
        "dp=4 zero=3,0,3 offload=none,gradients,none sync=hierarchical:2 map=tp.dp",
    ] {
        let case: Case = format!("{text} clip=on").parse().unwrap();
        let graph = case.graph();
        let program = lower(&graph, &case.plan(&graph)).unwrap();
        if let Err(violations) = verify_program(&graph, &program) {
            panic!("{case}: {} violations, first {}", violations.len(), violations[0]);
        }
        let mesh = &program.mesh;
        let several: Vec<_> = mesh.ids().filter(|&a| mesh.axis(a).size > 1).collect();
        let sets: Vec<AxisSet> = (1..1u32 << several.len())
            .map(|bits| several.iter().enumerate().filter(|(i, _)| bits >> i & 1 == 1).map(|(_, &a)| a).collect())
            .collect();
        for (stage, at) in program.stages.iter().enumerate().flat_map(|(s, p)| p.segments.ids().map(move |id| (s, id))) {
            let of_stage = &program.stages[stage];
            let body = &of_stage.segments[at].body;
            for place in 0..body.len() {
                let Instr::Collective { pattern: right, axes, stages, dim, monoid, src, dst } = body[place].instr.clone() else { continue };
                let (Some(of), true) = (role(of_stage, src), axes.intersects(mesh.data())) else { continue };
                let mut wrong = |kind: &'static str, instr: Option<Instr>| {
                    let mut damaged = program.clone();
                    let there = &mut damaged.stages[stage].segments[at].body;
                    match instr {
                        Some(instr) => there[place].instr = instr,
                        None => drop(there.remove(place)),
                    }
                    assert!(verify_program(&graph, &damaged).is_err(), "{kind}: {case}, stage {stage} {at}[{place}] {:?}", body[place].instr);
                    *tried.entry(kind).or_default() += 1;
                };
                let with = |pattern, axes, src, dst| Some(Instr::Collective { pattern, axes, stages: stages.clone(), dim, monoid, src, dst });
                wrong("left out", None);
                for &other in sets.iter().filter(|&&set| set != axes) {
                    wrong("over other axes", with(right, other, src, dst));
                }
                for pattern in Pattern::ALL.into_iter().filter(|&p| p != right) {
                    wrong("of another kind", with(pattern, axes, src, dst));
                }
                if src != dst {
                    wrong("the other way", with(right, axes, dst, src));
                }
                // Other pieces of the same bytes.
                let pieces = |id: BufferId| matches!(&of_stage.buffers[id].content, Content::Flat { role, .. } if *role == of);
                let others = |not: BufferId| {
                    of_stage.buffers.ids().filter(move |&id| id != not && pieces(id)).filter(move |&id| of_stage.buffers[id] != of_stage.buffers[not])
                };
                others(src).take(12).for_each(|src| wrong("of something else", with(right, axes, src, dst)));
                others(dst).take(12).for_each(|dst| wrong("to something else", with(right, axes, src, dst)));
            }
        }
    }
    assert!(tried.len() == 6 && tried.values().all(|&n| n >= 20), "{tried:?}");
}

/// Time of a step where bytes are all that counts: links inside nodes as quick, and networks as slow, as is said.
fn step(text: &str, cluster: &str, (intra, inter): (u64, u64)) -> f64 {
    let case: Case = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
    let graph = case.graph();
    let mut machine = Cluster::parse(cluster).unwrap().whole().clone();
    machine.curves = Default::default();
    (machine.intra.bandwidth.0, machine.inter.bandwidth.0) = (intra, inter);
    (machine.intra.latency, machine.inter.latency) = Default::default();
    predict(&graph, &classes(&graph), &machine.into(), &case.plan(&graph)).unwrap().step.0 as f64
}

/// One collective sends 15/16 of everything over the network by eight links of a node; two steps send half of an eighth by each.
#[test]
fn two_steps_pay_between_nodes_and_cost_inside_one() {
    let ratio = |text: &str, cluster: &str, links| step(&format!("{text} sync=hierarchical:2"), cluster, links) / step(text, cluster, links);
    let slow = (1_000_000_000, 20_000);
    for (text, cluster, links, least, most) in [
        ("dp=16 zero=0", "h100:8x2", slow, 0.52, 0.55),
        ("dp=16 zero=1", "h100:8x2", slow, 0.52, 0.55),
        ("dp=16 zero=3", "h100:8x2", slow, 0.52, 0.55),
        // Of four nodes instead of two, between which more has to go in any case: 3/4 of an eighth.
        ("dp=32 zero=1", "h100:8x4", slow, 1.0, 1.3),
        // Inside a node nothing is far.
        ("dp=8 zero=1", "h100:8", (1_000_000, 20_000), 0.99, 1.01),
    ] {
        let found = ratio(text, cluster, links);
        assert!((least..=most).contains(&found), "{text} on {cluster}: {found}");
    }
    let four = step("dp=32 zero=1 sync=hierarchical:4", "h100:8x4", slow) / step("dp=32 zero=1", "h100:8x4", slow);
    assert!((0.76..=0.8).contains(&four), "{four}");
}

/// Gradients of a large model and a short sequence are more than what its tensor-parallel ranks tell each other; with longer sequences that turns.
#[test]
fn what_there_is_more_of_belongs_on_the_quick_links() {
    let ratio =
        |text: &str| step(&format!("{text} map=tp.dp"), "h100:2x2", (1_000_000_000, 20_000)) / step(text, "h100:2x2", (1_000_000_000, 20_000));
    let few = ratio("dp=2 tp=2 split=textbook seq=2 vocab=4096");
    let many = ratio("dp=2 tp=2 split=textbook seq=64 count=8");
    assert!(few < 0.9 && many > 1.1, "{few} {many}");
}

/// The same program, but for which ranks are next to each other.
#[test]
fn a_nesting_changes_the_mesh_and_nothing_else() {
    for seed in 0..40 {
        let case = Case::drawn(&mut Dice::of(29, seed));
        let graph = case.graph();
        let usual = lower(&graph, &Plan { nest: Nest::default(), ..case.plan(&graph) }).unwrap();
        for nest in Nest::all().into_iter().skip(seed as usize % 5).step_by(5) {
            let other = lower(&graph, &Plan { nest, ..case.plan(&graph) }).unwrap();
            let again = Program { mesh: Mesh { nesting: usual.mesh.nesting.clone(), ..other.mesh.clone() }, ..other };
            assert_eq!(again, usual, "{case} {nest}");
        }
    }
}
