//! Whole training steps as ranks on GPUs run them, with no GPU: every call of CUDA and NCCL goes to a stand-in that runs the generated kernels on this CPU.
//!
//! PyTorch's oracle models on eight ranks (dp 2 · tp 2 · pp 2, ZeRO-1, sequence parallel) in f32 must meet PyTorch's losses and gradient norms, and the weights
//! of CPU ranks; in bf16 with f32 master weights they must come close. Each call of a step is for one instruction of the program; what was taken is given back, also by
//! a run in which some call fails; and after that call no other is made.

mod common;
#[path = "common/devices.rs"]
mod devices;
#[path = "common/explain.rs"]
mod explain;
#[path = "common/megatron.rs"]
mod megatron;
#[path = "common/oracle.rs"]
mod oracle;
#[path = "common/recording.rs"]
mod recording;

use std::cell::RefCell;
use std::rc::Rc;

use common::{Tensors, distance};
use devices::{codes, devices, end, kernels};
use dplan::runtime::cuda::load::Code;
use dplan::runtime::cuda::rank::Launch;
use dplan::runtime::cuda::session::Session as Devices;
use dplan::runtime::{Batch, Options, RuntimeError, Session};
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{DecayGroups, Optimizer, StepScalars};
use dplan_ir::plan::{Plan, Wire};
use dplan_ir::program::{Program, Role};
use dplan_kernels::cuda::arch::Arch;
use dplan_kernels::cuda::product::TILES;
use dplan_kernels::cuda::{self, Family, Target};
use dplan_kernels::shim::{self, Library};
use dplan_planner::lower;
use explain::explain;
use megatron::Shape;
use oracle::Oracle;
use recording::by_library::{ByLibrary, build};
use recording::{Call, Recorder, World};

const SHAPE: Shape = Shape { dp: 2, tp: 2, pp: 2, zero: 1, micro: 2, sequence: true, ..Shape::ONE };
/// Kernels that any GPU has.
const ANY: Target = Target::of(Arch::Sm80);
/// Norms and biases are not pulled, so that the optimizer has stretches.
const DECAY: DecayGroups = DecayGroups::Matrices;

/// What may differ from PyTorch's f32 run, where that decays what this does.
struct Tolerance {
    loss: f64,
    norm: f64,
    /// From CPU ranks.
    weights: f64,
    steps: u64,
    decay: DecayGroups,
    /// How many times as much as in PyTorch's run weight decay pulls: it shows in the step's weights, not in its loss.
    pull: f64,
    launch: Launch,
    /// Of PyTorch's steps of AdamW, so many from the first are the same here.
    pytorch: u64,
}

/// An oracle model, lowered.
struct Model {
    name: &'static str,
    oracle: Oracle,
    compute: DType,
    graph: Graph,
    program: Program,
    codes: Vec<Code>,
    target: Target,
}

impl Model {
    /// Under a plan that `change` may make another of.
    fn new(name: &'static str, compute: DType, decay: DecayGroups, target: Target, change: impl Fn(Plan) -> Plan) -> Option<Model> {
        let oracle = Oracle::open(name)?;
        let graph = oracle.graph(compute, SHAPE.dp * SHAPE.micro);
        let plan = change(megatron::plan(&graph, SHAPE, oracle.batch));
        let program = lower::lower(&graph, &plan).unwrap_or_else(|e| panic!("{e}"));
        let codes = codes(&graph, &program, decay, target);
        Some(Model { name, oracle, compute, graph, program, codes, target })
    }
    /// All kernels of some models as one library, in a folder of its own.
    fn compile(models: &[Model], test: &str) -> Library {
        let launches = kernels(models.iter().flat_map(|m| &m.codes));
        Library::compile(&common::scratch(&format!("cuda_ranks_{test}")), "kernels", launches).unwrap_or_else(|e| panic!("{e}"))
    }
    fn scalars(&self, step: u64, pull: f64) -> StepScalars {
        let mut scalars = self.oracle.scalars(step);
        scalars.hyper.weight_decay *= pull;
        scalars
    }
    fn weights(&self) -> Tensors {
        self.oracle.tensors(&self.graph, "weights.safetensors")
    }
    /// The same program on CPU ranks.
    fn session(&self, decay: DecayGroups) -> Session {
        let options = Options { decay, ..Options::default() };
        let mut session = Session::new(self.graph.clone(), self.program.clone(), &options).unwrap_or_else(|e| panic!("{e}"));
        let initial = self.weights();
        session.load(Role::Param, |p| initial[p].clone()).unwrap();
        session
    }
    fn devices(&self, world: &Rc<RefCell<World>>, decay: DecayGroups) -> Result<Devices<Recorder>, RuntimeError> {
        devices(&self.graph, &self.program, world, &Options { decay, ..Options::default() })
    }
}

/// The oracles that there are to train; none, said aloud, without their files or a C++ compiler.
fn models(of: &[(&'static str, DType)], decay: DecayGroups, target: Target) -> Vec<Model> {
    planned(|plan| plan, of, decay, target)
}

/// The same, under other plans.
fn planned(change: impl Fn(Plan) -> Plan, of: &[(&'static str, DType)], decay: DecayGroups, target: Target) -> Vec<Model> {
    if shim::compiler().is_none() {
        eprintln!("SKIPPED: no C++ compiler (set CXX, or install g++)");
        return Vec::new();
    }
    of.iter().filter_map(|(name, compute)| Model::new(name, *compute, decay, target, &change)).collect()
}

/// Trains a model on stand-ins, beside CPU ranks.
fn train(model: &Model, library: Library, within: &Tolerance) -> Library {
    train_by(model, library, None, within)
}

/// The same, with a library of products.
fn train_by(model: &Model, library: Library, products: Option<ByLibrary>, within: &Tolerance) -> Library {
    let name = model.name;
    let world = World::new(library, model.target, model.program.ranks(), 7);
    world.borrow_mut().products = products;
    let mut devices = model.devices(&world, within.decay).unwrap_or_else(|e| panic!("{e}"));
    devices.launch(within.launch);
    let initial = model.weights();
    devices.load(Role::Param, |p| initial[p].clone()).unwrap();
    refuses_what_does_not_fit(&mut devices, model);
    let mut session = model.session(within.decay);
    for step in 0..within.steps {
        let (scalars, batch) = (model.scalars(step, within.pull), model.oracle.inputs(&model.graph, step));
        (0..model.program.ranks()).for_each(|rank| drop(world.borrow_mut().take_log(rank)));
        let result = devices.step(&scalars, &batch).unwrap_or_else(|e| panic!("{e}"));
        let mut calls = 0;
        for (rank, code) in model.codes.iter().enumerate() {
            let log = world.borrow_mut().take_log(rank as u64);
            calls += log.len();
            if let Some(log) = as_issued(log, step, within.launch) {
                explain(&model.program, code, &log).unwrap_or_else(|e| panic!("{name} rank {rank}: {e}"));
            }
        }
        let (want, want_norm) = model.oracle.step(step);
        let (loss, norm) = (result.loss, result.grad_norm.unwrap_or(f64::NAN));
        println!("{name} {} step {step}: loss {loss} ({want}), norm {norm} ({want_norm}), {calls} calls explained", model.compute);
        let cpu = session.step(&scalars, &batch).unwrap_or_else(|e| panic!("{e}"));
        let cpu = ("CPU ranks", cpu.loss, cpu.grad_norm.unwrap_or(f64::NAN));
        for (whose, want, want_norm) in [cpu].into_iter().chain((step < within.pytorch).then_some(("PyTorch", want, want_norm))) {
            assert!((loss - want).abs() < within.loss, "{name} step {step}: loss {loss}, of {whose} {want}");
            assert!((norm / want_norm - 1.0).abs() < within.norm, "{name} step {step}: norm {norm}, of {whose} {want_norm}");
        }
    }
    // Where there is a master copy, it is what the optimizer updates.
    let updated = if model.compute == DType::F32 { Role::Param } else { Role::Master };
    let (error, tensor) = distance(&model.graph, &devices.gather(updated).unwrap(), &session.params().unwrap());
    println!("{name} {}: weights within {error:e} of CPU ranks, {} launches", model.compute, world.borrow().launched());
    assert!(error < within.weights, "{name}: {tensor} is {error:e} from that of CPU ranks");
    if let Some(products) = &world.borrow().products {
        let (mine, all) = kernels(&model.codes)
            .filter(|l| l.family == Family::Gemm)
            .fold((0, 0), |(mine, all), l| (mine + u64::from(l.instead.is_some()), all + 1));
        println!("{name}: {mine} of {all} products are for the library, which computed {}", products.multiplied);
        assert!(mine == all && products.multiplied >= within.steps * mine);
    }
    drop(devices);
    end(world)
}

/// A step's calls as they are made one by one: with a graph the second step captures them, and replays them as all later ones do.
fn as_issued(log: Vec<Call>, step: u64, launch: Launch) -> Option<Vec<Call>> {
    const REPLAYED: [Call; 2] = [Call::Replay { stream: 0 }, Call::Synchronise];
    match (step, &log[..]) {
        (0, _) => Some(log),
        _ if launch == Launch::Each => Some(log),
        (1, [Call::BeginCapture, calls @ .., Call::EndCapture, Call::Replay { stream: 0 }, Call::Synchronise]) => {
            Some([calls, &[Call::Synchronise]].concat())
        }
        (2.., calls) if calls == REPLAYED => None,
        _ => panic!("step {step}: {log:?}"),
    }
}

/// Tensors and batches of the wrong size are told, and change nothing.
fn refuses_what_does_not_fit(devices: &mut Devices<Recorder>, model: &Model) {
    let mut short = model.weights();
    short.iter_mut().for_each(|(_, values)| values.truncate(values.len() - 1));
    let loaded = devices.load(Role::Param, |p| std::mem::take(&mut short[p]));
    assert!(matches!(&loaded, Err(RuntimeError::Param { found, expected, .. }) if found + 1 == *expected), "{loaded:?}");
    let (scalars, whole) = (model.scalars(0, 1.0), model.oracle.inputs(&model.graph, 0));
    let first = Batch { inputs: whole.inputs[..1].to_vec() };
    let stepped = devices.step(&scalars, &first);
    assert!(matches!(&stepped, Err(RuntimeError::Input { found: 0, .. })), "{stepped:?}");
}

/// As CPU ranks must, two steps of them.
const EXACT: Tolerance =
    Tolerance { loss: 1e-5, norm: 5e-5, weights: 3e-4, steps: 2, decay: DecayGroups::All, pull: 1.0, launch: Launch::Graph, pytorch: u64::MAX };
const CLOSE: Tolerance = Tolerance { loss: 2e-2, norm: 5e-2, weights: 2e-2, steps: 3, ..EXACT };

#[test]
fn oracles_meet_pytorch() {
    let models = models(&[("gpt2", DType::F32), ("llama", DType::F32), ("llama-tied", DType::F32), ("mixtral", DType::F32)], DecayGroups::All, ANY);
    if !models.is_empty() {
        let library = Model::compile(&models, "oracles");
        // One of them call by call.
        let launch = |model: &Model| if model.name == "gpt2" { Launch::Each } else { Launch::Graph };
        models.iter().fold(library, |library, model| train(model, library, &Tolerance { launch: launch(model), ..EXACT }));
    }
}

#[test]
fn llama_in_halves_comes_close_to_pytorch() {
    let models = models(&[("llama", DType::Bf16)], DecayGroups::All, ANY);
    if let [model] = &models[..] {
        train(model, Model::compile(&models, "halves"), &CLOSE);
    }
}

/// As CPU ranks train by LAMB, its parameters in blocks and pieces, one of them with homes on both stages. PyTorch's first step begins with the same weights.
#[test]
fn lamb_meets_cpu_ranks() {
    let models = planned(|plan| Plan { optimizer: Optimizer::Lamb, ..plan }, &[("llama-tied", DType::F32)], DECAY, ANY);
    if let [model] = &models[..] {
        train(model, Model::compile(&models, "lamb"), &Tolerance { decay: DECAY, pytorch: 1, ..EXACT });
    }
}

/// As CPU ranks round gradients for their exchange. Where f32 comes out otherwise by a bit, a rounding may fall to the other side, and AdamW makes much of it where
/// gradients are small.
#[test]
fn rounded_gradients_meet_those_of_cpu_ranks() {
    let models = planned(|plan| Plan { wire: Wire::Bf16, ..plan }, &[("llama-tied", DType::F32)], DecayGroups::All, ANY);
    if let [model] = &models[..] {
        train(model, Model::compile(&models, "wire"), &Tolerance { pytorch: 0, weights: 5e-3, ..EXACT });
    }
}

/// As by generated kernels, with every product that may be computed by cuBLASLt's stand-in, loaded as the library is.
#[test]
fn products_by_a_library_meet_pytorch() {
    const BY_LIBRARY: Target = Target { beside: cuda::library::Library::Always, ..ANY };
    let models = models(&[("llama", DType::F32)], DecayGroups::All, BY_LIBRARY);
    let [model] = &models[..] else { return };
    let Some(path) = build(&common::scratch("cuda_ranks_products"), "libcublasLt.so", &["libcublaslt.cpp"]) else { return };
    train_by(model, Model::compile(&models, "library"), Some(ByLibrary::open(&path)), &EXACT);
}

/// Every product that may be is one of warpgroups, however small.
#[test]
fn llama_on_hopper_comes_close_to_pytorch() {
    const HOPPER: Target = Target { tiles: TILES.split_at(2).0, ..Target::of(Arch::Sm90a) };
    let models = models(&[("llama", DType::Bf16)], DecayGroups::All, HOPPER);
    if let [model] = &models[..] {
        let products: Vec<&str> = kernels(&model.codes).filter(|l| l.family == Family::Gemm).map(|l| l.entry).collect();
        let of_warpgroups = products.iter().filter(|e| **e == "dp_gemm_wgmma").count();
        println!("{of_warpgroups} of {} products by warpgroups", products.len());
        assert!(of_warpgroups * 10 >= products.len() * 9);
        train(model, Model::compile(&models, "hopper"), &Tolerance { steps: 1, ..CLOSE });
    }
}

/// Norms and biases are left alone where all else shrinks by 0.3 of itself.
#[test]
fn what_decay_does_not_pull_is_left_alone_and_failing_calls_end_a_run() {
    const PULL: f64 = 1e3;
    let models = models(&[("gpt2", DType::F32)], DECAY, ANY);
    let [model] = &models[..] else { return };
    let stepped = |decay| {
        let mut session = model.session(decay);
        session.step(&model.scalars(0, PULL), &model.oracle.inputs(&model.graph, 0)).unwrap_or_else(|e| panic!("{e}"));
        session.params().unwrap()
    };
    let (signal, tensor) = distance(&model.graph, &stepped(DecayGroups::All), &stepped(DECAY));
    assert!(signal > 100.0 * EXACT.weights, "{tensor} is only {signal:e} from where all decays");
    let library = train(model, Model::compile(&models, "decay"), &Tolerance { decay: DECAY, steps: 1, pull: PULL, ..EXACT });
    failures(model, library);
}

/// Fails one call after the other: some of those that make ranks ready and of three steps, and those that make and use graphs.
fn failures(model: &Model, library: Library) {
    let mut library = Some(library);
    let (initial, batch, scalars) = (model.weights(), model.oracle.inputs(&model.graph, 0), model.scalars(0, 1.0));
    let mut failing = |fails: u64| {
        let world = World::new(library.take().expect("a library"), model.target, model.program.ranks(), 11);
        world.borrow_mut().fails = Some(fails);
        let run = model.devices(&world, DECAY).and_then(|mut devices| {
            let loaded = devices.load(Role::Param, |p| initial[p].clone());
            let all = loaded.and_then(|()| (0..3).try_for_each(|_| devices.step(&scalars, &batch).map(drop)));
            assert!(all.is_ok() || matches!(devices.step(&scalars, &batch), Err(RuntimeError::Ended)), "a session that failed goes on");
            all
        });
        let world = Rc::into_inner(world).expect("nobody else has it").into_inner();
        assert_eq!(world.leaks(), Vec::<String>::new(), "call {fails} failed");
        assert_eq!(world.after_failure, Vec::new(), "call {fails} failed");
        let calls = world.calls.clone();
        library = Some(world.into_library());
        assert!(run.is_ok() || matches!(run, Err(RuntimeError::Device { .. })), "call {fails}: {run:?}");
        (run.is_ok(), calls)
    };
    let (mut fails, mut ended) = (0, 0);
    let calls = loop {
        let (done, calls) = failing(fails);
        if done {
            break calls;
        }
        ended += 1;
        // Closer together among the calls that make ranks ready.
        fails += 1 + fails / 3;
    };
    println!("{ended} of {} calls failed one at a time: nothing leaked, no call after", calls.len());
    assert!(ended >= 15, "only {ended} calls failed");
    let first = |name: &str| calls.iter().position(|&c| c == name).unwrap_or_else(|| panic!("nobody calls {name}")) as u64;
    let begin = first("cuStreamBeginCapture");
    for at in [begin, begin + 2, first("cuStreamEndCapture"), first("cuGraphLaunch"), first("cuGraphLaunch") + 1] {
        assert!(!failing(at).0, "call {at}, {}, did not fail", calls[at as usize]);
    }
}

#[test]
fn a_machine_without_cuda_is_told_so() {
    let dir = common::scratch("no_cuda");
    let plan = common::small_plan(&dir, "dp=1", 1, "f32");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_dplan"));
    let output =
        command.arg("run").arg(&plan).args(["--device", "cuda", "--steps", "1"]).env("DPLAN_CUDA", "/nowhere/libcuda.so.1").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(
        stderr.contains("CUDA driver was not found") && stderr.contains("/nowhere/libcuda.so.1") && stderr.contains("run on the CPU"),
        "{stderr}"
    );
}
