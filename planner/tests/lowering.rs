//! Programs of random plans: the arena is the formula, and their instructions are what the plan asks for.

use dplan_ir::entity::{BufferId, Id};
use dplan_ir::graph::{Graph, Node};
use dplan_ir::mesh::AxisSet;
use dplan_ir::optimizer::Optimizer;
use dplan_ir::pipeline::Slots;
use dplan_ir::plan::{Clip, Offload, Plan, Residence, Wire};
use dplan_ir::program::{ALIGN, Channel, Content, Instr, Pattern, Program, Role, SegmentKind, StageProgram, Stream, Updates};
use dplan_ir::sync::Sync;
use dplan_planner::drawn::{self, Dice};
use dplan_planner::lower::{self, Sharder};
use dplan_planner::machine::Cluster;
use dplan_planner::memory::{self, LayerBytes, StagePosition, StateTypes};
use dplan_planner::predict::predict;
use dplan_planner::prices::Links;

struct Case {
    what: String,
    graph: Graph,
    plan: Plan,
    program: Program,
}

fn cases(seeds: std::ops::Range<u64>) -> impl Iterator<Item = Case> {
    seeds.map(|seed| {
        let case = drawn::Case::drawn(&mut Dice::of(1000, seed));
        let graph = case.graph();
        let plan = case.plan(&graph);
        let what = case.to_string();
        let program = lower::lower(&graph, &plan).unwrap_or_else(|e| panic!("{what}: {e}"));
        Case { what, graph, plan, program }
    })
}

#[test]
fn the_arena_is_the_formula_to_the_byte() {
    for Case { what, graph, plan, program } in cases(0..200) {
        let sharder = Sharder::of_plan(&graph, &plan).unwrap();
        let layers: Vec<LayerBytes> =
            (0..sharder.layers()).map(|l| sharder.layer(l, plan.layer(l)).unwrap().bytes(&graph, &sharder.mesh, &sharder.padded)).collect();
        let pipeline = plan.pipeline();
        for (s, program) in program.stages.iter().enumerate() {
            let mut of_stage: Vec<(&LayerBytes, Residence, Slots)> = Vec::new();
            for (c, slots) in pipeline.virtual_stages_of(s as u64).zip(pipeline.slots(s as u64)) {
                let cut = &plan.stages[c as usize];
                of_stage.extend((cut.first..=cut.last).map(|l| (&layers[l as usize], plan.layer(l).residence(), slots)));
            }
            let types = StateTypes::of(&plan);
            let position = StagePosition { pipeline, stage: s as u64, boundary: sharder.boundary_bytes() };
            let formula = memory::arena(&of_stage, &plan.mesh(), types, position);
            let parts = [formula.scalars, formula.states, formula.frames, formula.boundary, formula.workspace, formula.ring];
            assert_eq!(program.regions.iter().map(|r| r.bytes).collect::<Vec<_>>(), parts, "{what} stage {s}");
            assert_eq!(program.host_bytes, formula.host, "{what} stage {s}");
            assert_eq!(program.file_bytes, formula.file, "{what} stage {s}");
            assert_eq!(program.arena_bytes, formula.total(), "{what} stage {s}");
        }
    }
}

#[test]
fn regions_cover_the_arena_and_buffers_stay_inside_one() {
    for Case { what, program, .. } in cases(0..100) {
        for stage in &program.stages {
            let mut end = 0;
            for region in &stage.regions {
                assert_eq!(region.offset, end, "{what} {}", region.name);
                end += region.bytes;
            }
            assert_eq!(end, stage.arena_bytes, "{what}");
            for (id, b) in stage.buffers.iter() {
                let last = b.offset + (b.slots - 1) * b.slot_stride + b.bytes * program.mesh.size(b.piece_axes);
                let on_host = stage.arena_bytes <= b.offset && last <= stage.end();
                let inside = on_host || stage.regions.iter().any(|r| r.offset <= b.offset && last <= r.offset + r.bytes);
                assert!(inside, "{what}: {id} {b:?}");
                let in_bucket = matches!(b.content, Content::Member { .. });
                assert!(in_bucket || b.offset % ALIGN == 0, "{what}: {id} at {}", b.offset);
            }
        }
    }
}

/// LAMB's program is Adam's with sums of trust ratios, reduced over exactly the axes along which ranks have other elements of a parameter; its memory is Adam's with
/// these sums; its price is Adam's with them, instruction by instruction, in the objective and in the simulation alike.
#[test]
fn lamb_is_adam_and_its_trust_sums_in_programs_memory_and_prices() {
    let (mut exact, mut over_pieces, mut over_blocks, mut alone) = (0, 0, 0, 0);
    for seed in 0..150 {
        let case = drawn::Case::drawn(&mut Dice::of(1000, seed));
        let (graph, what) = (case.graph(), case.to_string());
        let classes = dplan_ir::layers::classes(&graph);
        let nodes = if case.ranks().is_multiple_of(2) { 2 } else { 1 };
        let cluster = Cluster::parse(&format!("cpu:{}x{nodes}", case.ranks() / nodes)).unwrap();
        let of = |optimizer| {
            let plan = Plan { optimizer, ..case.plan(&graph) };
            (lower::lower(&graph, &plan).unwrap(), predict(&graph, &classes, &cluster, &plan).unwrap())
        };
        let ((adam, cheap), (lamb, dear)) = (of(Optimizer::AdamW), of(Optimizer::Lamb));
        for (s, stage) in lamb.stages.iter().enumerate() {
            let site = cluster.seat(&case.plan(&graph), s as u64).site;
            let size = |b: BufferId| stage.buffers[b].bytes;
            let (mut takes, mut bytes) = (0, 0);
            let updates = instrs(stage, SegmentKind::Update);
            for instr in &updates {
                match instr {
                    Instr::TrustSums { state, grad, moments, dst, .. } => {
                        takes += cluster.sweep(site, moments.iter().chain([state, grad]).map(|&b| size(b)).sum()).0;
                        bytes += size(*dst).next_multiple_of(ALIGN);
                        let Content::Flat { bucket, pieces, .. } = stage.buffers[*state].content else { panic!("{what}: {instr:?}") };
                        let cut = stage.buckets[bucket].members[0].sharding.sharded();
                        let sums: Vec<AxisSet> = updates
                            .iter()
                            .filter_map(|i| match i {
                                Instr::Collective { pattern: Pattern::AllReduce, axes, stages, dst: at, .. } if at == dst && stages.is_empty() => {
                                    Some(*axes)
                                }
                                _ => None,
                            })
                            .collect();
                        let wanted: Vec<AxisSet> = Some(cut.union(pieces)).filter(|&axes| lamb.mesh.size(axes) > 1).into_iter().collect();
                        assert_eq!(sums, wanted, "{what} stage {s} {bucket}");
                        over_pieces += usize::from(!pieces.is_empty());
                        over_blocks += usize::from(!cut.is_empty());
                        alone += usize::from(wanted.is_empty());
                    }
                    Instr::Collective { pattern, axes, dst, .. } if matches!(stage.buffers[*dst].content, Content::Trust { .. }) => {
                        takes += cluster.collective(site, &lamb.mesh, *axes, *pattern, size(*dst)).0;
                    }
                    _ => {}
                }
            }
            assert_eq!(stage.arena_bytes, adam.stages[s].arena_bytes + bytes, "{what} stage {s}");
            assert_eq!(dear.memory[s].arena_bytes(), stage.arena_bytes, "{what} stage {s}");
            // Where each micro-batch has an update of its own, that is what it takes of its time.
            let (each, once) = match case.schedule.updates() {
                Updates::Step => (0, takes),
                Updates::MicroBatch => (takes, 0),
            };
            assert_eq!(dear.stages[s].time - cheap.stages[s].time, each, "{what} stage {s}");
            assert_eq!(dear.stages[s].end - cheap.stages[s].end, once, "{what} stage {s}");
            exact += usize::from(takes > 0);
            let first_gather = updates.iter().position(|i| matches!(i, Instr::Collective { pattern: Pattern::AllGather, .. }));
            let last_sums = updates.iter().rposition(|i| matches!(i, Instr::TrustSums { .. }));
            let resident = case.ways.iter().all(|way| way.offload == Offload::None);
            assert!(!resident || first_gather.is_none_or(|gather| last_sums < Some(gather)), "{what} stage {s}: sums wait for gathered parameters");
        }
        if case.pp() == 1 {
            assert_eq!(dear.simulated, dear.step, "{what}");
            let more = dear.stages[0] - cheap.stages[0];
            assert_eq!(dear.step.0 - cheap.step.0, case.micro_batches * more.time + more.end, "{what}");
        }
    }
    assert!(exact >= 100 && over_pieces >= 100 && over_blocks >= 100 && alone >= 100, "{exact} exact, {over_pieces}, {over_blocks}, {alone}");
}

/// Instructions of a segment kind.
fn instrs(stage: &StageProgram, kind: SegmentKind) -> Vec<&Instr> {
    stage.segments.values().filter(|s| s.kind == kind).flat_map(|s| &s.body).map(|i| &i.instr).collect()
}

#[test]
fn what_one_stage_sends_the_next_receives() {
    for Case { what, program, plan, .. } in cases(0..100) {
        let count = |stage: usize, wanted: &dyn Fn(&Instr) -> bool| -> usize {
            let stage = &program.stages[stage];
            stage.schedule.iter().map(|call| stage.segments[call.segment].body.iter().filter(|i| wanted(&i.instr)).count()).sum()
        };
        for s in 0..program.stages.len() {
            for t in 0..program.stages.len() {
                for channel in [Channel::Forward, Channel::Backward] {
                    let sent = count(s, &|i| matches!(i, Instr::Send { to, channel: c, .. } if (*to as usize, *c) == (t, channel)));
                    let got = count(t, &|i| matches!(i, Instr::Recv { from, channel: c, .. } if (*from as usize, *c) == (s, channel)));
                    assert_eq!(sent, got, "{what} {s} -> {t} {channel:?}");
                    let pipeline = plan.pipeline();
                    let borders = (1..pipeline.all_virtual()).map(|c| (pipeline.stage_of(c - 1) as usize, pipeline.stage_of(c) as usize));
                    let borders = borders.filter(|&(before, behind)| match channel {
                        Channel::Forward => (before, behind) == (s, t),
                        Channel::Backward => (behind, before) == (s, t),
                    });
                    let expected = if s == t { 0 } else { borders.count() as u64 * plan.micro_batches };
                    assert_eq!(sent as u64, expected, "{what} {s} -> {t} {channel:?}");
                }
            }
        }
    }
}

#[test]
fn collectives_have_more_than_one_member() {
    for Case { what, program, .. } in cases(0..100) {
        for stage in &program.stages {
            for issue in stage.segments.values().flat_map(|s| &s.body) {
                if let Instr::Collective { axes, stages, .. } = &issue.instr {
                    assert!(program.mesh.size(*axes) * stages.len().max(1) as u64 > 1, "{what}: {:?}", issue.instr);
                }
            }
        }
    }
}

#[test]
fn each_bucket_is_synchronised_as_its_zero_stage_says() {
    let mut left_out = 0;
    for Case { what, program, plan, graph } in cases(0..150) {
        for (s, stage) in program.stages.iter().enumerate() {
            for (id, bucket) in stage.buckets.iter() {
                let layer = graph.nodes.values().find(|n| n.inputs.contains(&graph.params[bucket.members[0].param].value)).unwrap().layer;
                let shared = program.mesh.data().minus(bucket.members[0].sharding.sharded());
                let zero = if shared.is_empty() { 0 } else { plan.layer(layer).zero.0 };
                let is = |b, role| matches!(stage.buffers[b].content, Content::Flat { bucket, role: r, .. } if (bucket, r) == (id, role));
                let count = |kind, pattern, role| {
                    let of = |i: &&&Instr| matches!(i, Instr::Collective { pattern: p, dst, .. } if *p == pattern && is(*dst, role));
                    instrs(stage, kind).iter().filter(of).count()
                };
                let homes = (0..graph.layer_count()).filter(|&l| {
                    let reads = |n: &Node| n.layer == l && n.inputs.contains(&graph.params[bucket.members[0].param].value);
                    plan.stage_of(l) == s && graph.forward_nodes().any(|(_, n)| reads(n))
                });
                let homes: Vec<u32> = homes.collect();
                // No backward pass reads an embedding's table.
                let (uses, read_back) = (homes.len(), homes.iter().filter(|&&l| graph.reads_parameters_back(l)).count());
                left_out += if zero == 3 { uses - read_back } else { 0 };
                let rounds = (plan.wire == Wire::Bf16 || plan.sync == Sync::Server) && !shared.is_empty();
                // A sum for everybody is scattered and gathered by all steps but the last.
                let steps = plan.sync.steps(&program.mesh, shared).len();
                let compressed = plan.wire.kept().is_some() && !shared.is_empty();
                let scattered = match (zero, rounds || compressed) {
                    (0, false) if bucket.tied.is_empty() => [0, steps.saturating_sub(1)],
                    (0, false) => [0, 0],
                    (0 | 1, true) => [0, 1],
                    (1, false) => [0, steps],
                    (_, true) => [uses, uses],
                    (_, false) => [uses * steps, uses * steps],
                };
                let scatters = |kind| {
                    let shares = instrs(stage, kind).iter().filter(|i| matches!(i, Instr::SumShares { dst, .. } if is(*dst, Role::Grad))).count();
                    let (whole, none) = (count(kind, Pattern::ReduceScatter, Role::Grad), if rounds || compressed { 0 } else { shares });
                    assert_eq!(none, 0, "{what} stage {s} {id}");
                    whole + shares
                };
                let (kind, last) = match plan.pipeline().parts_backward() {
                    true => (SegmentKind::BackwardWeight, SegmentKind::BackwardWeightLast),
                    false => (SegmentKind::Backward, SegmentKind::BackwardLast),
                };
                for (kind, expected) in [kind, last].into_iter().zip(scattered).filter(|(k, _)| *k == last || plan.micro_batches > 1) {
                    assert_eq!(scatters(kind), expected, "{what} stage {s} {id} zero {zero} {kind:?}");
                }
                let gathers = |kind| count(kind, Pattern::AllGather, Role::Param);
                assert_eq!(gathers(SegmentKind::Forward), if zero == 3 { uses * steps } else { 0 }, "{what} stage {s} {id}");
                assert_eq!(gathers(SegmentKind::BackwardLast), if zero == 3 { read_back * steps } else { 0 }, "{what} stage {s} {id}");
                assert_eq!(gathers(SegmentKind::Update), if zero == 1 || zero == 2 { steps } else { 0 }, "{what} stage {s} {id}");
                let updates = instrs(stage, SegmentKind::Update);
                assert_eq!(updates.iter().filter(|i| matches!(i, Instr::Update { grad, .. } if is(*grad, Role::Grad))).count(), 1, "{what}");
                let squares = updates.iter().filter(|i| matches!(i, Instr::SquareSum { src, .. } if is(*src, Role::Grad))).count();
                let counted = plan.clip == Clip::GlobalNorm && bucket.tied.first().is_none_or(|&f| f as usize == s);
                assert_eq!(squares, usize::from(counted), "{what} stage {s} {id}");
                let across = |i: &&&Instr| matches!(i, Instr::Collective { stages, dst, .. } if !stages.is_empty() && is(*dst, Role::Grad));
                assert_eq!(updates.iter().filter(across).count(), usize::from(!bucket.tied.is_empty()), "{what} stage {s} {id}");
            }
        }
    }
    assert!(left_out >= 5, "{left_out} uses of tables that are not gathered for a backward pass");
}

#[test]
fn every_param_has_one_home_on_each_stage_that_uses_it() {
    for Case { what, program, plan, graph } in cases(0..100) {
        for (param, info) in graph.params.iter() {
            for (s, stage) in program.stages.iter().enumerate() {
                let used = graph.forward_nodes().any(|(_, n)| n.inputs.contains(&info.value) && plan.stage_of(n.layer) == s);
                let homes = stage.buckets.values().flat_map(|b| &b.members).filter(|m| m.param == param).count();
                assert_eq!(homes, usize::from(used), "{what} {param} stage {s}");
            }
        }
    }
}

#[test]
fn waits_follow_records_and_each_record_is_waited_for() {
    let mut events = 0;
    for Case { what, program, .. } in cases(0..100) {
        for stage in &program.stages {
            let body = || stage.segments.values().flat_map(|s| &s.body);
            for event in 0..stage.events {
                let recorded: Vec<Stream> =
                    body().filter(|i| matches!(i.instr, Instr::Record(e) if e.index() == event as usize)).map(|i| i.stream).collect();
                let waited: Vec<Stream> =
                    body().filter(|i| matches!(i.instr, Instr::Wait(e) if e.index() == event as usize)).map(|i| i.stream).collect();
                assert!(recorded.len() == 1 && !waited.is_empty() && !waited.contains(&recorded[0]), "{what}: event {event}");
            }
            events += stage.events;
        }
    }
    assert!(events > 100);
}
