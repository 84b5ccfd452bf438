//! Bug groups of `docs/bugs.md`, the second part: streams, buffers, the order of messages. What went wrong elsewhere by luck of timing is here tried under random
//! orders of streams, which must not change a bit, and cut out of programs, which the verifier must refuse, unless what was cut out did nothing.

mod common;
mod groups;

use dplan::compile::compile;
use dplan::planfile::PlanFile;
use dplan::runtime::{Batch, Order, Rows, RuntimeError};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{BufferId, SegmentId};
use dplan_ir::optimizer::StepScalars;
use dplan_ir::plan::Away;
use dplan_ir::program::{Content, Instr, Issue, Pattern, Program, Role, SegmentKind, StageProgram, Stream};
use groups::{BATCH, HYPER, LLAMA, MIXTRAL, batch, changed, check, divisor, import, named, plan, reasons, session, train, train_on, with};

/// Stage, segment, position.
type Site = (usize, SegmentId, usize);

/// The instructions of some kind.
fn sites(program: &Program, of: impl Fn(&StageProgram, SegmentKind, &Issue) -> bool) -> Vec<Site> {
    let mut sites = Vec::new();
    for (stage, of_stage) in program.stages.iter().enumerate() {
        for (id, segment) in of_stage.segments.iter() {
            sites.extend((0..segment.body.len()).filter(|&at| of(of_stage, segment.kind, &segment.body[at])).map(|at| (stage, id, at)));
        }
    }
    sites
}

fn without(program: &Program, (stage, segment, at): Site) -> Program {
    let mut program = program.clone();
    program.stages[stage].segments[segment].body.remove(at);
    program
}

/// The role of the parameters, gradients or moments that a buffer holds.
fn role(stage: &StageProgram, buffer: BufferId) -> Option<Role> {
    match stage.buffers[buffer].content {
        Content::Flat { role, .. } | Content::Member { role, .. } => Some(role),
        Content::Value { .. } | Content::Scalar(_) | Content::Trust { .. } | Content::Wire { .. } | Content::Frame | Content::Scratch => None,
    }
}

/// Programs that the verifier refuses, and of those it does not, proof that they train as before.
fn refused(file: &PlanFile, what: &str, damaged: impl IntoIterator<Item = Program>) -> Vec<String> {
    let want = train(file, Order::Eager);
    let mut all = Vec::new();
    for (seed, program) in damaged.into_iter().enumerate() {
        let reasons = reasons(&file.graph, &program);
        if reasons.is_empty() {
            let other = PlanFile { program, ..file.clone() };
            assert!(train(&other, Order::Seeded(seed as u64)) == want, "{what}: damage {seed} was accepted, and trains otherwise");
        } else {
            all.push(reasons.join("; "));
        }
    }
    assert!(!all.is_empty(), "{what}: nothing was refused");
    all
}

/// Whatever stream goes first, all bits are the same.
fn any_order(file: &PlanFile, seeds: u64) {
    let want = train(file, Order::Eager);
    assert!(want.losses.iter().chain(&want.norms).all(|x| x.is_finite()));
    (0..seeds).for_each(|seed| assert!(train(file, Order::Seeded(seed)) == want, "order {seed}"));
}

/// Group 15 (pytorch#180665): a buffer on its way to the host is freed, and used again, while the copy is still running.
#[test]
fn group_15_what_is_in_host_memory_is_safe_in_any_order_of_streams() {
    let ways = ["optimizer", "gradients/activations", "parameters/activations:nvme", "parameters:nvme"].map(|name| Away::from_name(name).unwrap());
    for (pins, first) in ["dp=4,zero=0", "dp=4,zero=1", "dp=4,zero=3", "dp=2,pp=2,zero=2,micro=2"].into_iter().zip(0..) {
        let kept = plan(&import(LLAMA), 4, pins);
        // Of each layout all ways, half of them in any order.
        for (way, nth) in ways.into_iter().zip(first..) {
            let file = changed(&kept, |file| file.plan.options.iter_mut().for_each(|o| (o.offload, o.activations) = (way.states, way.activations)));
            assert!(file.program.stages.iter().all(|s| s.host_bytes + s.file_bytes > 0));
            any_order(&file, if nth % 2 == 0 { 3 } else { 0 });
            let (here, there) = (train(&kept, Order::Eager), train(&file, Order::Eager));
            assert!(here.losses == there.losses && here.params == there.params, "{pins}, {}: states elsewhere change a bit", way.name());
        }
    }
    let file = plan(&import(LLAMA), 2, "dp=2,zero=1,offload=parameters");
    let waits = sites(&file.program, |_, _, issue| issue.stream == Stream::Copy && matches!(issue.instr, Instr::Wait(_)));
    let reasons = refused(&file, "waits of the copy stream", waits.iter().map(|&site| without(&file.program, site)));
    assert!(reasons.iter().all(|why| why.contains("with no order between them")), "{reasons:?}");
}

/// The last wait before an instruction, on its stream.
fn wait_before(program: &Program, (stage, segment, at): Site) -> Option<Site> {
    let body = &program.stages[stage].segments[segment].body;
    let waits = |&i: &usize| body[i].stream == body[at].stream && matches!(body[i].instr, Instr::Wait(_));
    (0..at).rev().find(waits).map(|i| (stage, segment, i))
}

/// Group 16 (Megatron-LM#6187): gradients that one stream makes are summed by another before they are there, or overwritten before they are summed.
#[test]
fn group_16_gradients_are_complete_when_they_are_reduced_and_reduced_when_they_are_overwritten() {
    for pins in ["dp=4,zero=2,micro=1", "dp=4,zero=3,micro=1"] {
        let file = plan(&import(LLAMA), 4, pins);
        any_order(&file, 3);
        let scatters = sites(&file.program, |stage, _, issue| match issue.instr {
            Instr::Collective { pattern: Pattern::ReduceScatter, src, .. } => issue.stream == Stream::Comm && role(stage, src) == Some(Role::Grad),
            _ => false,
        });
        let mut waits: Vec<Site> = scatters.iter().filter_map(|&site| wait_before(&file.program, site)).collect();
        waits.dedup();
        let count = waits.len();
        let made = refused(&file, pins, waits.into_iter().map(|site| without(&file.program, site)));
        assert!(made.len() == count && made.iter().all(|why| why.contains("with no order between them")), "{pins}: {} of {count}", made.len());
        // The other way round: what clears a gradient for the next micro-batch waits for the sum.
        let clears = sites(&file.program, |stage, kind, issue| match issue.instr {
            Instr::Zero { dst } => kind != SegmentKind::Begin && role(stage, dst) == Some(Role::Grad),
            _ => false,
        });
        let waits = clears.iter().filter_map(|&site| wait_before(&file.program, site));
        let cleared = refused(&file, pins, waits.map(|site| without(&file.program, site)));
        assert!(cleared.iter().any(|why| why.contains("with no order between them")), "{pins}: {cleared:?}");
    }
}

/// Group 17 (pytorch#144535): the optimizer reads gradients before their sum over ranks has ended.
#[test]
fn group_17_updates_wait_for_reduced_gradients() {
    for pins in ["dp=2,pp=2,zero=2,micro=2", "dp=2,pp=2,zero=3,micro=1"] {
        let file = plan(&import(LLAMA), 4, pins);
        any_order(&file, 3);
        let waits = sites(&file.program, |_, kind, issue| kind == SegmentKind::Update && matches!(issue.instr, Instr::Wait(_)));
        let count = waits.len();
        let reasons = refused(&file, pins, waits.into_iter().map(|site| without(&file.program, site)));
        assert!(reasons.len() == count, "{pins}: {} of {count} waits are needed", reasons.len());
        let late = sites(&file.program, |stage, kind, issue| match issue.instr {
            Instr::Collective { src, .. } => kind != SegmentKind::Update && role(stage, src) == Some(Role::Grad),
            _ => false,
        });
        let partial = refused(&file, pins, late.into_iter().map(|site| without(&file.program, site)));
        assert!(partial.iter().any(|why| why.contains("still partial over")), "{pins}: {partial:?}");
    }
}

/// Group 18 (Megatron-LM#950): a gather that overlaps with the forward pass comes too late, and the pass uses the weights of the step before.
#[test]
fn group_18_forward_passes_use_the_weights_of_the_last_update() {
    // Under ZeRO-3 forward passes wait for gathers; else these are done before a step ends.
    for (pins, why, waited) in [
        ("dp=4,zero=1", "not its new version", 0),
        ("dp=4,zero=3,micro=1", "nothing known", 1),
        ("dp=2,tp=2,zero=3,micro=2,sp=on", "nothing known", 1),
    ] {
        let file = plan(&import(LLAMA), 4, pins);
        any_order(&file, 3);
        let gathers = sites(&file.program, |stage, _, issue| match issue.instr {
            Instr::Collective { pattern: Pattern::AllGather, dst, .. } => role(stage, dst) == Some(Role::Param),
            _ => false,
        });
        let stale = refused(&file, pins, gathers.iter().map(|&site| without(&file.program, site)));
        assert!(stale.iter().any(|reason| reason.contains(why)), "{pins}: {stale:?}");
        // And without the wait for the gather.
        let waits = sites(&file.program, |_, kind, issue| {
            kind == SegmentKind::Forward && issue.stream == Stream::Compute && matches!(issue.instr, Instr::Wait(_))
        });
        assert!(waits.len() >= waited, "{pins}: {} waits", waits.len());
        if !waits.is_empty() {
            let early = refused(&file, pins, waits.iter().map(|&site| without(&file.program, site)));
            assert!(early.iter().all(|reason| reason.contains("with no order between them")), "{pins}: {early:?}");
        }
    }
}

/// Group 19 (Megatron-LM#4609): what a gather receives shares its bytes with gradients, to which they are added.
#[test]
fn group_19_gathered_weights_and_gradients_share_no_bytes() {
    let file = plan(&import(LLAMA), 4, "dp=4,zero=3,micro=1");
    let stage = &file.program.stages[0];
    let flat = |of: Role| stage.buffers.iter().filter(move |(_, b)| matches!(b.content, Content::Flat { role, .. } if role == of)).map(|(id, _)| id);
    let mut damaged = Vec::new();
    for (gathered, into) in flat(Role::Param).flat_map(|p| flat(Role::Grad).map(move |g| (p, g))) {
        let [from, to] = [gathered, into].map(|id| &stage.buffers[id]);
        if from.bytes <= to.bytes && from.offset != to.offset && from.piece_axes == to.piece_axes {
            let mut program = file.program.clone();
            program.stages[0].buffers[gathered].offset = to.offset;
            damaged.push(program);
        }
    }
    let all = damaged.len();
    let reasons = refused(&file, "aliases", damaged);
    assert!(reasons.len() > 10 && 2 * reasons.len() > all, "{} of {all} were refused", reasons.len());
}

/// Group 20 (DeepSpeed#6351, #4321): results depend on the size of buckets, and a parameter exactly as large as one is never reduced. Here a bucket is the
/// parameters of a layer; the embedding is one by itself, without padding.
#[test]
fn group_20_a_parameter_that_is_its_whole_bucket_is_reduced() {
    let model = import(&with(LLAMA, r#""vocab_size":64,"hidden_size":24"#));
    for (file, _) in
        check(&model, &[(4, "dp=4,zero=0"), (4, "dp=4,zero=1"), (4, "dp=4,zero=2,micro=1"), (4, "dp=4,zero=3"), (4, "dp=2,pp=2,zero=2,micro=1")])
    {
        let buckets = || file.program.stages.iter().flat_map(|s| s.buckets.values());
        assert!(buckets().any(|b| b.members.len() == 1 && b.members[0].elems == b.elems), "a bucket of one parameter without padding");
        assert!(buckets().any(|b| b.members.len() > 5), "and one whose pieces end inside of parameters");
    }
}

/// Group 21 (Automodel#3530): a batch of another sequence length wipes the gradients that a pipeline has accumulated. Here it is refused, and leaves no trace.
#[test]
fn group_21_a_batch_of_another_length_is_refused_and_leaves_no_trace() {
    let file = plan(&import(LLAMA), 2, "pp=2,micro=2");
    assert!(file.program.micro_batches > 1);
    let mut disturbed = session(&file, Order::Eager);
    let scalars = StepScalars::new(HYPER, 1, 1.0 / divisor(&file.graph, &batch(&file.graph, 0)));
    let mut shorter = Batch::clone(&batch(&file.graph, 0));
    shorter.inputs.iter_mut().for_each(|rows| match rows {
        Rows::Tokens(tokens) => tokens.truncate(tokens.len() / 2),
        Rows::Values(values) => values.truncate(values.len() / 2),
    });
    let refused = disturbed.step(&scalars, &std::sync::Arc::new(shorter));
    assert!(matches!(&refused, Err(RuntimeError::Input { found: 32, expected: 64, .. })), "{refused:?}");
    assert!(train_on(&file, &mut disturbed) == train(&file, Order::Eager));
}

/// Group 22 (torchtitan#775): fewer micro-batches than stages hang. Here they train, or the schedule says what it needs.
#[test]
fn group_22_fewer_micro_batches_than_stages_train_or_are_refused() {
    let ways =
        [(4, "pp=4,micro=8"), (4, "pp=4,micro=4"), (4, "pp=4,micro=8,schedule=gpipe"), (2, "pp=2,micro=8"), (4, "pp=4,micro=2,schedule=zb-h1")];
    for (file, _) in check(&import(LLAMA), &ways) {
        assert!(file.program.micro_batches <= file.program.stages.len() as u64);
    }
    for (ranks, pins, needs) in [
        (4, "pp=4,micro=4,schedule=zb-h1", "zb-h1 needs at least as many micro-batches as stages"),
        (2, "pp=2,micro=8,schedule=interleaved,virtual=2", "interleaved needs micro-batches in a multiple of the stages"),
        (2, "pp=2,micro=4,schedule=zb-v", "zb-v needs nearly twice as many micro-batches as stages"),
        (4, "pp=4,micro=1,schedule=interleaved,virtual=2", "interleaved needs a layer for each virtual stage"),
    ] {
        let answer = compile(&import(LLAMA), &common::options(&format!("cpu:{ranks}"), BATCH, DType::F64, pins)).map(|_| ());
        assert!(matches!(&answer, Err(why) if why.to_string().contains(needs)), "{pins}: {answer:?}");
    }
}

/// Group 23 (DeepSpeed#8262, #7998): ranks that have nothing to do in a layer leave out its gather, and the others wait for ever. Here two of four experts get
/// no token on any rank.
#[test]
fn group_23_idle_experts_keep_nobody_waiting() {
    let model = import(MIXTRAL);
    let idle = |file: &PlanFile| {
        let mut session = session(file, Order::Eager);
        // All scores are equal, so that the first two experts are chosen.
        for param in named(&file.graph, "gate.weight") {
            let elems = file.graph.shape(file.graph.params[param].value).iter().product::<u64>() as usize;
            session.load_one(Role::Param, param, &vec![0.0; elems]).unwrap();
        }
        train_on(file, &mut session)
    };
    let one = idle(&plan(&model, 1, "dp=1,tp=1,pp=1,micro=8"));
    for (ranks, pins) in [(4, "dp=4,zero=3"), (4, "dp=4,ep=2,zero=3"), (4, "dp=4,ep=4,zero=1"), (4, "dp=2,ep=2,pp=2,micro=1,zero=3")] {
        let file = plan(&model, ranks, pins);
        let many = idle(&file);
        for param in named(&file.graph, "experts") {
            let (used, unused) = many.grads[param].split_at(many.grads[param].len() / 2);
            assert!(used.iter().any(|&g| g != 0.0) && unused.iter().all(|&g| g == 0.0), "{pins}: two experts are idle in the first step");
        }
        let near = |x: &[f64], y: &[f64]| x.iter().zip(y).all(|(a, b)| (a / b - 1.0).abs() < 1e-11);
        assert!(near(&many.losses, &one.losses) && near(&many.norms, &one.norms), "{pins}: {:?}, one rank has {:?}", many.losses, one.losses);
    }
}

/// Group 24 (nccl#195, #522, rccl#2191, Megatron-LM#107): collectives of several communicators start in an order that depends on timing, and hang.
#[test]
fn group_24_collectives_of_several_communicators_need_no_luck() {
    for pins in ["dp=2,tp=2,pp=2,zero=3,micro=2,sp=on", "dp=2,cp=2,tp=2,zero=2,micro=1", "dp=2,tp=2,pp=2,zero=0,micro=1,sp=on"] {
        let file = plan(&import(LLAMA), 8, pins);
        let collectives =
            |stream| !sites(&file.program, |_, _, issue| issue.stream == stream && matches!(issue.instr, Instr::Collective { .. })).is_empty();
        assert!(collectives(Stream::Compute) && collectives(Stream::Comm), "{pins}: collectives on two streams");
        any_order(&file, 5);
    }
    // One that a stage leaves out is missed before anything runs.
    let file = plan(&import(LLAMA), 8, "dp=2,tp=2,pp=2,zero=0,micro=1,sp=on");
    let across = sites(&file.program, |_, _, issue| matches!(&issue.instr, Instr::Collective { stages, .. } if !stages.is_empty()));
    assert!(across.len() >= 4, "sums over both stages: a tied table and the norm");
    let mut missing = across.iter().map(|&site| reasons(&file.graph, &without(&file.program, site)).join("; "));
    assert!(missing.all(|why| why.contains("never takes part in") || why.contains("operations of the communicator")));
}
