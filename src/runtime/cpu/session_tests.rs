//! Sessions on programs written by hand: what the runtime does on its own, whatever lowers programs.

use super::*;
use crate::runtime::{Order, Rows};
use dplan_ir::build::Builder;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{BucketId, BufferId, EventId, SegmentId};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::{Init, Phase};
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, train_step};
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::op::{Activation, Op};
use dplan_ir::optimizer::{DecayGroups, Hyper, Optimizer};
use dplan_ir::program::*;
use dplan_ir::sharding::{Monoid, Padded, Sharding};

const ROWS: u64 = 4;
const SEQ: u64 = 3;
const MICRO_BATCHES: u64 = 2;

/// loss = mean of silu(table[tokens]).
fn graph() -> Graph {
    let mut b = Builder::new("tiny");
    let (rows, seq, v, h) = (b.dim("b", ROWS), b.dim("s", SEQ), b.dim("v", 7), b.dim("h", 5));
    b.graph.batch = Some(rows);
    let table = b.param("table", DType::F64, &[v, h], Init::Normal { std: 1.0 }, Vec::new());
    let tokens = b.input("tokens", DType::I32, &[rows, seq]);
    let x = b.op("x", Op::Embed, &[table, tokens]).expect("types");
    let y = b.op("y", Op::Act(Activation::Silu), &[x]).expect("types");
    let loss = b.op("loss", Op::Mean, &[y]).expect("types");
    b.graph.loss = Some(loss);
    differentiate(&b.graph).expect("differentiable")
}

/// Lays buffers out one after the other.
struct Layout(StageProgram);

impl Layout {
    fn buffer(&mut self, content: Content, dtype: DType, bytes: u64, slots: u64) -> BufferId {
        let (offset, slot_stride) = (self.0.arena_bytes, align(bytes));
        self.0.arena_bytes += slot_stride * slots;
        self.0.buffers.push(Buffer { content, dtype, bytes, offset, slots, slot_stride, piece_axes: AxisSet::EMPTY })
    }
    fn segment(&mut self, kind: SegmentKind, body: Vec<(Stream, Instr)>) -> SegmentId {
        self.0.segments.push(Segment { kind, body: body.into_iter().map(|(stream, instr)| Issue { stream, instr }).collect() })
    }
}

/// Two data-parallel ranks, gradients all-reduced on their own stream. Returns the program and the `wait` that orders the update after the all-reduce.
fn data_parallel(graph: &Graph) -> Program {
    let mesh = Mesh::new(2, 1);
    let dp = mesh.dp();
    let mut l = Layout(StageProgram::default());
    let param = graph.params.ids().next().expect("a parameter");
    let member = Member { param, sharding: Sharding::replicated(2), offset: 0, elems: 35 };
    let bucket: BucketId = l.0.buckets.push(Bucket { members: vec![member], elems: 36, partial: dp, tied: Vec::new() });
    let scalar = |l: &mut Layout, s| l.buffer(Content::Scalar(s), DType::F64, 8, 1);
    let (loss, norm, clip) = (scalar(&mut l, Scalar::Loss), scalar(&mut l, Scalar::NormSquared), scalar(&mut l, Scalar::ClipScale));
    let flats: Vec<(BufferId, BufferId)> = [Role::Param, Role::Grad, Role::Moment1, Role::Moment2]
        .into_iter()
        .map(|role| {
            let flat = l.buffer(Content::Flat { bucket, role, pieces: AxisSet::EMPTY }, DType::F64, 36 * 8, 1);
            let member = Buffer { content: Content::Member { bucket, role, param }, bytes: 35 * 8, ..l.0.buffers[flat].clone() };
            (flat, l.0.buffers.push(member))
        })
        .collect();
    let mut values = std::collections::BTreeMap::new();
    for (id, value) in graph.values.iter().filter(|(id, _)| graph.param_of(*id).is_none() && Some(*id) != graph.loss) {
        let rank = value.ty.dims.len();
        if rank == 2 && value.ty.dtype != DType::I32 {
            values.insert(id, flats[1].1);
            continue;
        }
        let sharding = Sharding::of_dims((0..rank).map(|d| if d == 0 { dp } else { AxisSet::EMPTY }).collect());
        let bytes = graph.shape(id).iter().product::<u64>() / 2 * value.ty.dtype.size();
        values.insert(id, l.buffer(Content::Value { value: id, sharding }, value.ty.dtype, bytes, MICRO_BATCHES));
    }
    values.insert(graph.loss.expect("a loss"), loss);
    values.insert(graph.params[param].value, flats[0].1);
    let run = |phase: &dyn Fn(Phase) -> bool| -> Vec<(Stream, Instr)> {
        let nodes = graph.nodes.iter().filter(|(_, n)| phase(n.phase));
        let buffers = |ids: &[dplan_ir::entity::ValueId]| ids.iter().map(|v| values[v]).collect::<Vec<_>>();
        let instr = |(node, n): (_, &dplan_ir::graph::Node)| {
            let write = if matches!(n.op, Op::Mean | Op::EmbedGrad) { Write::Add } else { Write::Set };
            Instr::Run { node, ins: buffers(&n.inputs), outs: buffers(&n.outputs), scratch: None, write }
        };
        nodes.map(|n| (Stream::Compute, instr(n))).collect()
    };
    let reduce = |buffer| Instr::Collective {
        pattern: Pattern::AllReduce,
        axes: dp,
        stages: Vec::new(),
        dim: 0,
        monoid: Monoid::Sum,
        src: buffer,
        dst: buffer,
    };
    let grad = flats[1].0;
    let begin = l.segment(SegmentKind::Begin, [loss, norm, grad].map(|dst| (Stream::Compute, Instr::Zero { dst })).to_vec());
    let mut forward = run(&|p| p == Phase::Forward);
    forward.insert(0, (Stream::Compute, Instr::Input { dst: values[&graph.inputs[0]] }));
    let forward = l.segment(SegmentKind::Forward, forward);
    let mut backward = run(&|p| p != Phase::Forward);
    let first = l.segment(SegmentKind::Backward, backward.clone());
    backward.push((Stream::Compute, Instr::Record(EventId(0))));
    backward.push((Stream::Comm, Instr::Wait(EventId(0))));
    backward.extend([reduce(grad), reduce(loss), Instr::Record(EventId(1))].map(|i| (Stream::Comm, i)));
    let last = l.segment(SegmentKind::BackwardLast, backward);
    let update = [
        Instr::Wait(EventId(1)),
        Instr::SquareSum { src: grad, dst: norm, once: dp },
        reduce(norm),
        Instr::ClipScale { src: norm, dst: clip },
        Instr::Update { state: flats[0].0, grad, moments: vec![flats[2].0, flats[3].0], param: None, scale: Some(clip), trust: None },
    ];
    let update = l.segment(SegmentKind::Update, update.map(|i| (Stream::Compute, i)).to_vec());
    let calls = [(begin, 0), (forward, 0), (forward, 1), (first, 0), (last, 1), (update, 0)];
    l.0.schedule = calls.map(|(segment, micro_batch)| Call { segment, micro_batch }).to_vec();
    l.0.events = 2;
    let padded = Padded(graph.dims.map(|_, d| d.size));
    Program { mesh, padded, micro_batches: MICRO_BATCHES, optimizer: Some(Optimizer::AdamW), updates: Updates::Step, stages: vec![l.0] }
}

fn scalars(step: u64) -> StepScalars {
    let hyper = Hyper { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01, momentum: 0.0, clip: 0.05 };
    StepScalars::new(hyper, step, 1.0 / (ROWS * MICRO_BATCHES * SEQ) as f64)
}

fn batch(step: u64) -> Arc<Batch> {
    let tokens = (0..ROWS * MICRO_BATCHES * SEQ).map(|i| ((i * i + step) % 7) as i32).collect();
    Arc::new(Batch { inputs: vec![Rows::Tokens(tokens)] })
}

/// Losses, norms and final parameters of three steps.
fn train(program: Program, order: Order) -> (Vec<(f64, f64)>, Vec<f64>) {
    let mut session = Session::new(graph(), program, &Options { order, ..Options::default() }).expect("a session");
    session.initialise(3).expect("initial values");
    let steps = (1..=3).map(|step| session.step(&scalars(step), &batch(step)).expect("a step"));
    let reports = steps.map(|r| (r.loss, r.grad_norm.expect("a norm"))).collect();
    (reports, session.params().expect("parameters")[ParamId(0)].clone())
}

#[test]
fn two_ranks_train_as_the_interpreter_does() {
    let graph = graph();
    let mut state = TrainState::new(init::params(&graph, 3), Optimizer::AdamW);
    let (reports, params) = train(data_parallel(&graph), Order::Eager);
    for (at, &(loss, norm)) in reports.iter().enumerate() {
        let Rows::Tokens(tokens) = &batch(at as u64 + 1).inputs[0] else { unreachable!() };
        let rows = |m: u64| tokens[(m * ROWS * SEQ) as usize..][..(ROWS * SEQ) as usize].iter().map(|&t| f64::from(t)).collect();
        let micro: Vec<Vec<Tensor>> = (0..MICRO_BATCHES).map(|m| vec![Tensor::dense(&[ROWS, SEQ], rows(m))]).collect();
        let want = train_step(&graph, &mut state, &micro, &scalars(at as u64 + 1), Optimizer::AdamW);
        assert!((loss - want.loss).abs() < 1e-14 && (norm - want.grad_norm).abs() < 1e-14, "step {at}: {loss} {norm}, not {want:?}");
    }
    let want = &state.params[ParamId(0)].data;
    assert!(params.iter().zip(want).all(|(x, y)| (x - y).abs() < 1e-13), "{params:?}, not {want:?}");
}

#[test]
fn any_order_of_streams_gives_the_same_bits() {
    let want = train(data_parallel(&graph()), Order::Eager);
    for seed in 0..20 {
        assert_eq!(train(data_parallel(&graph()), Order::Seeded(seed)), want, "seed {seed}");
    }
}

#[test]
fn some_order_of_streams_shows_a_missing_edge() {
    let mut program = data_parallel(&graph());
    let want = train(program.clone(), Order::Eager);
    for segment in 0..program.stages[0].segments.len() {
        let body = &mut program.stages[0].segments[SegmentId(segment as u32)].body;
        body.retain(|issue| issue.instr != Instr::Wait(EventId(1)));
    }
    assert!((0..20).any(|seed| train(program.clone(), Order::Seeded(seed)) != want));
}

/// Two stages that both receive before they send.
#[test]
fn a_stall_names_ranks_instructions_and_peers() {
    let stage = |other: u32, kind: Channel, back: Channel| {
        let mut l = Layout(StageProgram::default());
        let x = l.buffer(Content::Scratch, DType::F64, 8, 1);
        let body = [Instr::Recv { from: other, channel: back, dst: x }, Instr::Send { to: other, channel: kind, src: x }];
        let segment = l.segment(SegmentKind::Forward, body.map(|i| (Stream::Compute, i)).to_vec());
        l.0.schedule = vec![Call { segment, micro_batch: 0 }];
        l.0
    };
    let stages = vec![stage(1, Channel::Forward, Channel::Backward), stage(0, Channel::Backward, Channel::Forward)];
    let graph = graph();
    let program = Program {
        mesh: Mesh::new(1, 1),
        padded: Padded(graph.dims.map(|_, d| d.size)),
        micro_batches: MICRO_BATCHES,
        optimizer: None,
        updates: Updates::Step,
        stages,
    };
    let options = Options { timeout: Duration::from_millis(50), ..Options::default() };
    let mut session = Session::new(graph, program, &options).expect("a session");
    let error = session.step(&scalars(1), &batch(1)).expect_err("a stall");
    let text = error.to_string();
    let RuntimeError::Stalled { stalls, .. } = error else { panic!("{text}") };
    assert_eq!(stalls.iter().map(|s| (s.rank, s.stage, s.peers.clone())).collect::<Vec<_>>(), [(0, 0, vec![1]), (1, 1, vec![0])]);
    assert!(text.contains("recv") && text.contains("forward"), "{text}");
    assert!(matches!(session.step(&scalars(1), &batch(1)), Err(RuntimeError::Ended)));
}

#[test]
fn a_rank_that_panics_ends_the_step_for_all() {
    let (graph, options) = (graph(), Options::default());
    let program = data_parallel(&graph);
    let mut loaded = load(&graph, &program, DecayGroups::All).expect("loaded");
    for action in &mut loaded.codes[1].actions {
        if let Action::Input { step, .. } = action {
            *step = 1 << 40;
        }
    }
    let mut session = Session::start(graph, program, loaded, &options).expect("a session");
    session.initialise(3).expect("initial values");
    let error = session.step(&scalars(1), &batch(1)).expect_err("a failure");
    assert!(matches!(&error, RuntimeError::Rank { rank: 1, stage: 0, instruction, .. } if instruction.contains("micro-batch 1")), "{error}");
}

#[test]
fn what_a_rank_cannot_run_is_said_where_it_stands() {
    let graph = graph();
    let refuse = |damage: &dyn Fn(&mut Program), why: &str| {
        let mut program = data_parallel(&graph);
        damage(&mut program);
        let error = Session::new(graph.clone(), program, &Options::default()).expect_err("refused").to_string();
        assert!(error.contains(why), "{error}");
    };
    refuse(&|p| p.stages[0].arena_bytes -= ALIGN, "ends past the arena");
    refuse(&|p| p.stages[0].buffers[BufferId(0)].offset += 4, "is not aligned");
    refuse(&|p| p.optimizer = Some(Optimizer::Sgd), "2 moments of the 1 that sgd has");
    refuse(&|p| p.optimizer = None, "no optimizer");
    let body = |p: &mut Program, at: u32| std::mem::take(&mut p.stages[0].segments[SegmentId(at)].body);
    refuse(
        &|p| {
            let mut b = body(p, 1);
            if let Instr::Run { ins, outs, .. } = &mut b[2].instr {
                outs.clone_from(ins);
            }
            p.stages[0].segments[SegmentId(1)].body = b;
        },
        "forward seg1, instruction 2",
    );
}

#[test]
fn memory_is_what_the_program_says() {
    let graph = graph();
    let program = data_parallel(&graph);
    let arena_bytes = program.stages[0].arena_bytes;
    let session = Session::new(graph, program, &Options::default()).expect("a session");
    assert_eq!(session.memory(), [RankMemory { stage: 0, arena_bytes, host_bytes: 0, file_bytes: 0 }; 2]);
}
