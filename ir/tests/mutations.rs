//! Damaged programs are rejected without being run; rewritten ones are accepted.
//!
//! Damage can by luck leave a program right. So: whatever the verifier accepts must compute what the undamaged program computes, in every order of streams tried.

mod cases;
mod naive;

use std::collections::BTreeMap;

use dplan_ir::entity::{BufferId, NodeId, SegmentId};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::Graph;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::program::ProgramRun;
use dplan_ir::mesh::AxisSet;
use dplan_ir::op::Op;
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};
use dplan_ir::program::{Call, Content, Instr, Issue, Program, Role, Segment, SegmentKind, Updates};
use dplan_ir::verify::graph::verify_graph;
use dplan_ir::verify::mutate::{Damage, Rewrite};
use dplan_ir::verify::program::verify_program;
use naive::{Shape, lower};

struct Subject {
    what: String,
    graph: Graph,
    program: Program,
    case: cases::Case,
}

fn subjects() -> Vec<Subject> {
    let base =
        Shape { dp: 1, tp: 1, pp: 1, micro_batches: 2, zero: 0, one_f_one_b: true, optimizer: Optimizer::AdamW, updates: Updates::Step, seed: 5 };
    let shapes = [
        (1, Shape { dp: 2, tp: 2, pp: 2, micro_batches: 3, zero: 0, ..base }),
        (0, Shape { dp: 2, tp: 2, zero: 1, ..base }),
        (1, Shape { dp: 2, pp: 2, zero: 2, one_f_one_b: false, ..base }),
        (2, Shape { dp: 2, tp: 2, zero: 3, optimizer: Optimizer::Sgd, ..base }),
        (1, Shape { tp: 2, pp: 3, micro_batches: 4, ..base }),
        (0, Shape { dp: 2, tp: 2, zero: 1, optimizer: Optimizer::Lamb, ..base }),
        // Long enough that the verifier skips periods.
        (0, Shape { pp: 2, micro_batches: 16, ..base }),
        // Each micro-batch with an update of its own.
        (2, Shape { dp: 2, pp: 3, zero: 1, micro_batches: 6, updates: Updates::MicroBatch, optimizer: Optimizer::Lamb, ..base }),
        (2, Shape { pp: 2, micro_batches: 16, updates: Updates::MicroBatch, ..base }),
    ];
    let dropped = cases::all().iter().position(|c| c.graph.name == "dropped").unwrap_or_else(|| panic!("no case"));
    let shapes = [(dropped, Shape { dp: 2, tp: 2, ..base })].into_iter().chain(shapes);
    let subject = |(number, shape): (usize, Shape)| {
        let case = cases::all().remove(number);
        let mut forward = case.graph.clone();
        forward.set_batch(shape.dp);
        let graph = differentiate(&forward).unwrap_or_else(|why| panic!("{why}"));
        let program = lower(&graph, shape);
        Subject { what: format!("{} as {shape:?}", case.graph.name), graph, program, case }
    };
    shapes.map(subject).collect()
}

/// Loss, norm and parameters after two steps; `None` if the ranks get stuck or disagree.
fn trained(subject: &Subject, program: &Program, seed: u64) -> Option<Vec<f64>> {
    let graph = &subject.graph;
    let mut run = ProgramRun::new(graph, program, seed);
    subject.case.params.iter().for_each(|(p, value)| run.set_param(p, value));
    let hyper = Hyper { lr: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-2, weight_decay: 0.01, momentum: 0.8, clip: 0.5 };
    let mut numbers = Vec::new();
    for step in 1..=2 {
        let input = |m: u64, k: u64| {
            let shape = graph.shape(graph.inputs[k as usize]);
            Tensor::from_fn(&shape, |i| ((i[0] * 5 + i[1] * 3 + i[1] * i[1] + m * 3 + k * 2 + step) % 7) as f64)
        };
        let inputs: Vec<Vec<Tensor>> = (0..program.micro_batches).map(|m| vec![input(m, 0), input(m, 1)]).collect();
        let report = run.step(&inputs, &StepScalars::new(hyper, step, 0.03)).ok()?;
        numbers.extend([report.loss, report.grad_norm.unwrap_or(0.0)]);
    }
    for (param, _) in graph.params.iter() {
        numbers.extend(run.state(param, Role::Param).ok()?.data);
    }
    Some(numbers)
}

fn alike(a: &[f64], b: &[f64]) -> bool {
    a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-9 * y.abs().max(1.0))
}

/// Damage of these kinds always makes a program wrong. (A collective may be dropped where nobody reads its result.)
const FATAL: [Damage; 35] = [
    Damage::DropTrustSums,
    Damage::WithoutTrust,
    Damage::OtherAxis,
    Damage::WrongKey,
    Damage::DropMessage,
    Damage::DropAddInto,
    Damage::DropSquareSum,
    Damage::DropUpdate,
    Damage::RepeatMessage,
    Damage::RepeatAccumulation,
    Damage::RepeatUpdate,
    Damage::WrongPeer,
    Damage::WrongChannel,
    Damage::WrongPattern,
    Damage::WrongDim,
    Damage::WrongMonoid,
    Damage::FewerAxes,
    Damage::MoreAxes,
    Damage::WithoutStages,
    Damage::CountOften,
    Damage::CountRarely,
    Damage::WithoutClip,
    Damage::WrongMoment,
    Damage::ShortenBuffer,
    Damage::ShorterType,
    Damage::WrongPartial,
    Damage::Untie,
    Damage::DropCall,
    Damage::RepeatCall,
    Damage::WrongMicroBatch,
    Damage::AddForSet,
    Damage::OtherVersion,
    Damage::LateStash,
    Damage::LateUpdate,
    Damage::OtherUpdates,
];

/// All but of copies, more than one version put by, rings, gathers over several axes, short types, exchanges in these, pairs and working memory, which these programs have none of: `dplan fuzz --mutate` has them.
fn damages() -> impl Iterator<Item = Damage> {
    let copies = [Damage::DropCopy, Damage::CopyBackwards, Damage::EarlyCopy, Damage::OtherFrame, Damage::LessHost, Damage::LessFile];
    let pairs = [
        Damage::DropCompress,
        Damage::RepeatCompress,
        Damage::OtherResidual,
        Damage::StaleResidual,
        Damage::LoseResidual,
        Damage::ReadResidual,
        Damage::FewerPairs,
    ];
    let rings = [Damage::DropJoin, Damage::OtherTurn, Damage::WrongTurn, Damage::WrongPairs];
    let absent =
        [&copies[..], &pairs, &rings, &[Damage::HalfGather, Damage::FewerVersions, Damage::StaleParam, Damage::WithoutScratch, Damage::DropCast]]
            .concat();
    Damage::ALL.into_iter().filter(move |d| !absent.contains(d))
}

#[test]
fn what_the_verifier_accepts_of_damaged_programs_is_still_right() {
    let mut caught: BTreeMap<Damage, [u32; 2]> = BTreeMap::new();
    for subject in subjects() {
        let want = trained(&subject, &subject.program, 1).unwrap_or_else(|| panic!("{}: does not train", subject.what));
        for damage in damages() {
            let mut random = 1u64;
            for _ in 0..8 {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let Some((program, at)) = damage.apply(&subject.graph, &subject.program, random >> 20) else { break };
                let counts = caught.entry(damage).or_default();
                if verify_program(&subject.graph, &program).is_err() {
                    counts[0] += 1;
                    continue;
                }
                counts[1] += 1;
                let right = trained(&subject, &program, random).is_some_and(|got| alike(&got, &want));
                assert!(right, "{}: {damage:?} at {at} was accepted, but trains wrong (seed {random})", subject.what);
            }
        }
    }
    println!("{caught:?}");
    for damage in damages() {
        let [rejected, accepted] = caught.get(&damage).copied().unwrap_or_default();
        assert!(rejected + accepted > 0, "{damage:?} was never applied");
        assert!(accepted == 0 || !FATAL.contains(&damage), "{damage:?} was accepted {accepted} times");
        assert!(rejected > 0, "{damage:?} was never rejected");
    }
}

#[test]
fn periods_are_skipped() {
    let subject = subjects().pop().unwrap_or_else(|| panic!("no subject"));
    let facts = verify_program(&subject.graph, &subject.program).unwrap_or_else(|v| panic!("{}", v[0]));
    assert!(facts.walked < facts.issued * 2 / 3, "{facts:?}");
}

#[test]
fn rewritten_programs_are_accepted_and_train_alike() {
    let mut applied: BTreeMap<Rewrite, u32> = BTreeMap::new();
    for subject in subjects() {
        let want = trained(&subject, &subject.program, 1).unwrap_or_else(|| panic!("{}: does not train", subject.what));
        for rewrite in Rewrite::ALL {
            for pick in 0..12u64 {
                let Some((program, at)) = rewrite.apply(&subject.graph, &subject.program, pick * 7919 + 13) else { continue };
                *applied.entry(rewrite).or_default() += 1;
                if let Err(violations) = verify_program(&subject.graph, &program) {
                    panic!("{}: {rewrite:?} at {at}: {}", subject.what, violations[0]);
                }
                if pick == 0 {
                    assert!(trained(&subject, &program, 2).is_some_and(|got| alike(&got, &want)), "{}: {rewrite:?} at {at}", subject.what);
                }
            }
        }
        // All at once.
        let mut program = subject.program.clone();
        for pick in 0..60u64 {
            program = Rewrite::ALL[pick as usize % Rewrite::ALL.len()].apply(&subject.graph, &program, pick * 104729 + 7).map_or(program, |(p, _)| p);
        }
        if let Err(violations) = verify_program(&subject.graph, &program) {
            panic!("{}: after all rewrites: {}", subject.what, violations[0]);
        }
        assert!(trained(&subject, &program, 3).is_some_and(|got| alike(&got, &want)), "{}: after all rewrites", subject.what);
    }
    assert_eq!(applied.len(), Rewrite::ALL.len(), "{applied:?}");
}

/// What dropout draws with is the node that runs, the node that this derives from, and the micro-batch: each of them wrong, in every way there is, is noticed
/// without running.
#[test]
fn wrong_keys_of_dropout_are_noticed() {
    let case = cases::all().into_iter().find(|c| c.graph.name == "dropped").unwrap_or_else(|| panic!("no case"));
    let mut forward = case.graph.clone();
    forward.set_batch(2);
    let graph = differentiate(&forward).unwrap_or_else(|why| panic!("{why}"));
    let dropouts: Vec<NodeId> = graph.nodes.iter().filter(|(_, n)| matches!(n.op, Op::Dropout { .. })).map(|(id, _)| id).collect();
    let base =
        Shape { dp: 2, tp: 2, pp: 1, micro_batches: 2, zero: 0, one_f_one_b: true, optimizer: Optimizer::AdamW, updates: Updates::Step, seed: 5 };
    let mut tried = 0;
    for shape in [base, Shape { tp: 1, pp: 2, ..base }] {
        let program = lower(&graph, shape);
        assert!(verify_program(&graph, &program).is_ok());
        for (stage, at) in program.stages.iter().enumerate().flat_map(|(s, p)| p.segments.ids().map(move |id| (s, id))) {
            for place in 0..program.stages[stage].segments[at].body.len() {
                for &other in &dropouts {
                    let mut damaged = program.clone();
                    let Instr::Run { node, .. } = &mut damaged.stages[stage].segments[at].body[place].instr else { continue };
                    if dropouts.contains(node) && *node != other {
                        *node = other;
                        tried += 1;
                        assert!(verify_program(&graph, &damaged).is_err(), "stage {stage} {at}[{place}] drops as {other} does");
                    }
                }
            }
        }
        for pick in 0..64 {
            let (damaged, at) = Damage::WrongMicroBatch.apply(&graph, &program, pick).unwrap_or_else(|| panic!("no micro-batches"));
            assert!(verify_program(&graph, &damaged).is_err(), "{at}");
        }
    }
    assert!(tried > 40, "{tried}");
    // The graph says what a backward node derives from.
    let mut wrong = Vec::new();
    for &id in &dropouts {
        let mut damaged = |damage: &dyn Fn(&mut Graph)| {
            let mut graph = graph.clone();
            damage(&mut graph);
            wrong.push((id, verify_graph(&graph)));
        };
        damaged(&|g| g.nodes[id].op = Op::Dropout { rate: 1.0 });
        damaged(&|g| g.nodes[id].op = Op::Dropout { rate: f64::NAN });
        if graph.nodes[id].origin == id {
            continue;
        }
        damaged(&|g| g.nodes[id].op = Op::Dropout { rate: 0.25 });
        for &other in dropouts.iter().filter(|&&o| o != graph.nodes[id].origin && graph.nodes[o].origin == o) {
            damaged(&|g| g.nodes[id].origin = other);
            damaged(&|g| g.nodes[id].inputs = vec![g.cotangents[g.nodes[other].outputs[0]].unwrap_or_else(|| panic!("no cotangent"))]);
        }
    }
    assert!(wrong.len() > 20, "{}", wrong.len());
    wrong.iter().for_each(|(id, errors)| assert!(!errors.is_empty(), "{id}"));
}

/// The sums of trust ratios are of the gradient as it is updated with, and are added once over exactly the axes that cut parameters up: each wrong way is noticed
/// without running.
#[test]
fn wrong_sums_of_trust_ratios_are_noticed() {
    let base =
        Shape { dp: 2, tp: 2, pp: 1, micro_batches: 2, zero: 0, one_f_one_b: true, optimizer: Optimizer::Lamb, updates: Updates::Step, seed: 5 };
    let mut tried: BTreeMap<&str, u32> = BTreeMap::new();
    for (number, shape) in (0..3).flat_map(|n| (0..4).map(move |zero| (n, Shape { zero, pp: 1 + u32::from(zero) % 2, ..base }))) {
        let mut forward = cases::all().remove(number).graph;
        forward.set_batch(shape.dp);
        let graph = differentiate(&forward).unwrap_or_else(|why| panic!("{why}"));
        let program = lower(&graph, shape);
        assert!(verify_program(&graph, &program).is_ok());
        let every: AxisSet = program.mesh.ids().collect();
        let sets: Vec<AxisSet> = (0..1u32 << every.len()).map(|bits| every.iter().filter(|a| bits >> a.0 & 1 == 1).collect()).collect();
        for (stage, at) in program.stages.iter().enumerate().flat_map(|(s, p)| p.segments.ids().map(move |id| (s, id))) {
            let of_stage = &program.stages[stage];
            let sums: Vec<BufferId> = of_stage.buffers.iter().filter(|(_, b)| matches!(b.content, Content::Trust { .. })).map(|(id, _)| id).collect();
            let body = &of_stage.segments[at].body;
            for place in 0..body.len() {
                let mut damaged = |kind: &'static str, damage: &dyn Fn(&mut Vec<Issue>)| {
                    let mut damaged = program.clone();
                    damage(&mut damaged.stages[stage].segments[at].body);
                    assert!(verify_program(&graph, &damaged).is_err(), "{kind}: {shape:?} stage {stage} {at}[{place}] {:?}", body[place].instr);
                    *tried.entry(kind).or_default() += 1;
                };
                let same_stream = |other: usize| body.get(other).is_some_and(|issue| issue.stream == body[place].stream);
                match &body[place].instr {
                    Instr::Collective { axes: right, dst, .. } if sums.contains(dst) => {
                        damaged("not reduced", &|body| drop(body.remove(place)));
                        damaged("reduced twice", &|body| body.insert(place, body[place].clone()));
                        if same_stream(place - 1) && same_stream(place + 1) {
                            damaged("reduced before there is anything", &|body| body.swap(place - 1, place));
                            damaged("reduced after the update", &|body| body.swap(place, place + 1));
                        }
                        for &wrong in sets.iter().filter(|&set| set != right) {
                            damaged("reduced over other axes", &|body| {
                                if let Instr::Collective { axes, .. } = &mut body[place].instr {
                                    *axes = wrong;
                                }
                            });
                        }
                    }
                    Instr::TrustSums { dst: right, .. } => {
                        damaged("not summed", &|body| drop(body.remove(place)));
                        damaged("of gradients that are not scaled", &|body| {
                            if let Instr::TrustSums { scale, .. } = &mut body[place].instr {
                                *scale = None;
                            }
                        });
                        for &wrong in sums.iter().filter(|&sums| sums != right) {
                            damaged("of another bucket", &|body| {
                                if let Instr::TrustSums { dst, .. } = &mut body[place].instr {
                                    *dst = wrong;
                                }
                            });
                        }
                    }
                    Instr::Update { trust: right, .. } => {
                        for wrong in sums.iter().map(|&sums| Some(sums)).chain([None]).filter(|wrong| wrong != right) {
                            damaged("with the ratios of another bucket", &|body| {
                                if let Instr::Update { trust, .. } = &mut body[place].instr {
                                    *trust = wrong;
                                }
                            });
                        }
                    }
                    Instr::Collective { .. }
                    | Instr::Run { .. }
                    | Instr::Input { .. }
                    | Instr::Slice { .. }
                    | Instr::Send { .. }
                    | Instr::Recv { .. }
                    | Instr::Copy { .. }
                    | Instr::Zero { .. }
                    | Instr::AddInto { .. }
                    | Instr::Join { .. }
                    | Instr::Cast { .. }
                    | Instr::Compress { .. }
                    | Instr::SumShares { .. }
                    | Instr::SquareSum { .. }
                    | Instr::ClipScale { .. }
                    | Instr::Record(_)
                    | Instr::Wait(_) => {}
                }
            }
        }
    }
    assert!(tried.len() == 9 && tried.values().all(|&n| n >= 10), "{tried:?}");
}

/// Gradients that begin anew with every micro-batch look, period for period, as shifted as those that go on; what one more pass adds to them at the end is not what is missing.
#[test]
fn a_sum_that_begins_anew_in_every_period_is_never_whole() {
    let shape =
        Shape { dp: 1, tp: 1, pp: 1, micro_batches: 16, zero: 0, one_f_one_b: true, optimizer: Optimizer::AdamW, updates: Updates::Step, seed: 5 };
    let case = cases::all().remove(0);
    let graph = differentiate(&case.graph).unwrap();
    let whole = lower(&graph, shape);
    verify_program(&graph, &whole).unwrap();
    let stage = &whole.stages[0];
    let only = |kind: SegmentKind| stage.segments.iter().find(|(_, s)| s.kind == kind).map(|(id, _)| id).unwrap();
    let (begin, forward, backward, update) =
        (only(SegmentKind::Begin), only(SegmentKind::Forward), only(SegmentKind::Backward), only(SegmentKind::Update));
    let body = |id: SegmentId| stage.segments[id].body.clone();
    let is_scalar = |b: &BufferId| matches!(stage.buffers[*b].content, Content::Scalar(_));
    let counts_loss = |issue: &Issue| match &issue.instr {
        Instr::Run { outs, .. } => outs.iter().any(is_scalar),
        Instr::AddInto { dst, .. } => is_scalar(dst),
        _ => false,
    };
    // What else has zeros may have them again.
    let clears = |issue: &Issue| matches!(issue.instr, Instr::Zero { dst } if !is_scalar(&dst));
    let anew: Vec<Issue> = body(begin).into_iter().filter(clears).chain(body(backward)).collect();
    let again: Vec<Issue> = body(forward).into_iter().chain(body(backward)).filter(|issue| !counts_loss(issue)).collect();
    for micro_batch in 0..16 {
        let mut program = whole.clone();
        let stage = &mut program.stages[0];
        stage.segments[backward].body.clone_from(&anew);
        let extra = stage.segments.push(Segment { kind: SegmentKind::Backward, body: again.clone() });
        let empty = stage.segments.push(Segment { kind: SegmentKind::Backward, body: Vec::new() });
        let call = |segment, micro_batch| Call { segment, micro_batch };
        let others = (0..16).filter(|m| *m != micro_batch).map(|m| call(empty, m));
        stage.schedule = (0..16).flat_map(|m| [call(forward, m), call(backward, m)]).chain([call(extra, micro_batch)]).chain(others).collect();
        stage.schedule.insert(0, call(begin, 0));
        stage.schedule.push(call(update, 0));
        let faults = verify_program(&graph, &program).unwrap_err();
        assert!(faults.iter().any(|f| f.message.contains("micro-batches 0–15")), "{micro_batch}: {faults:?}");
    }
}
