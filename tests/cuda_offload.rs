//! Ranks on GPUs that keep states in the memory of the host or in files, with no GPU: calls go to a stand-in whose streams run in random order.
//!
//! Wherever states and activations lie, losses, norms, weights and moments are the same bits in f32 as on the same ranks without offloading, and as near those of CPU ranks as
//! theirs are; each call of a step is for one instruction of the program; pinned memory and files are given back, also by runs in which some call fails.

mod common;
#[path = "common/devices.rs"]
mod devices;
#[path = "common/explain.rs"]
mod explain;
#[path = "common/recording.rs"]
mod recording;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use common::{options, residual_block, scratch};
use devices::{codes, devices, end, kernels};
use dplan::compile::compile;
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::planfile::PlanFile;
use dplan::runtime::cuda::load::{Away, Code};
use dplan::runtime::cuda::rank::Launch;
use dplan::runtime::cuda::session::Session as Devices;
use dplan::runtime::cuda::together::{seats, sum_of};
use dplan::runtime::{Options, RuntimeError, Session};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{DecayGroups, Hyper, StepScalars};
use dplan_ir::plan::{Away as Elsewhere, Offload, Store};
use dplan_ir::program::{Program, Role, Space};
use dplan_kernels::cuda::Target;
use dplan_kernels::cuda::arch::Arch;
use dplan_kernels::shim::{self, Library};
use dplan_planner::lower;
use explain::explain;
use recording::{Call, Recorder, World};

const TARGET: Target = Target::of(Arch::Sm80);
const STEPS: u64 = 3;
const HYPER: Hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };
/// Buckets of several pieces of a file.
const SIZES: [u64; 4] = [3, 31, 40, 56];

/// A plan and its programs, states kept and moved.
struct Case {
    name: String,
    away: Elsewhere,
    graph: Graph,
    program: Program,
    batch: u64,
}

type Left = (Vec<[u64; 2]>, Vec<Table<ParamId, Vec<f64>>>);

impl Case {
    fn codes(&self) -> Vec<Code> {
        codes(&self.graph, &self.program, DecayGroups::All, TARGET)
    }
    fn devices(&self, world: &Rc<RefCell<World>>, options: &Options) -> Result<Devices<Recorder>, RuntimeError> {
        devices(&self.graph, &self.program, world, options)
    }
    fn feed(&self) -> Feed {
        Feed::new(&self.graph, None, self.batch, 1).unwrap()
    }
    fn roles(&self) -> Vec<Role> {
        let home = |role: &Role| self.program.stages[0].buckets.ids().any(|bucket| self.program.stages[0].home(bucket, *role).is_some());
        [Role::Param, Role::Master, Role::Moment1, Role::Moment2].into_iter().filter(home).collect()
    }

    /// What some steps leave behind, with every call of them explained.
    fn train(&self, library: Library, folder: &std::path::Path) -> (Left, Library) {
        let world = World::new(library, TARGET, self.program.ranks(), 7);
        let mut devices = self.devices(&world, &Options { scratch: folder.to_path_buf(), ..Options::default() }).unwrap_or_else(|e| panic!("{e}"));
        devices.initialise(1).unwrap();
        let (feed, mut results) = (self.feed(), Vec::new());
        let in_files = self.program.stages.iter().any(|stage| stage.file_bytes > 0);
        for step in 0..STEPS {
            (0..self.program.ranks()).for_each(|rank| drop(world.borrow_mut().take_log(rank)));
            let result = devices.step(&StepScalars::new(HYPER, step + 1, 1.0 / feed.targets() as f64), &feed.batch(step).unwrap()).unwrap();
            results.push([result.loss, result.grad_norm.unwrap_or(0.0)].map(f64::to_bits));
            for (rank, code) in self.codes().iter().enumerate() {
                let log = world.borrow_mut().take_log(rank as u64);
                // Steps of ranks with files are never captured, all others are from the second on.
                assert_eq!(
                    step > 0 && self.program.stages[code.stage].file_bytes == 0,
                    log.iter().any(|c| matches!(c, Call::Replay { .. })),
                    "{}",
                    self.name
                );
                let log: Vec<Call> = log.into_iter().filter(|c| !matches!(c, Call::BeginCapture | Call::EndCapture | Call::Replay { .. })).collect();
                if log != [Call::Synchronise] {
                    explain(&self.program, code, &log).unwrap_or_else(|e| panic!("{} rank {rank}: {e}", self.name));
                }
            }
        }
        let state = self.roles().into_iter().map(|role| devices.gather(role).unwrap()).collect();
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0, "a file has a name");
        assert!(devices.remarks().is_empty() || in_files);
        drop(devices);
        let world = Rc::into_inner(world).expect("nobody else has it").into_inner();
        assert_eq!((world.leaks(), &world.after_failure[..]), (Vec::new(), &[][..]), "{}", self.name);
        println!("{}: {} launches", self.name, world.launched());
        ((results, state), world.into_library())
    }

    /// How far from CPU ranks of the same program the weights are.
    fn off_cpu_ranks(&self, found: &Table<ParamId, Vec<f64>>) -> f64 {
        let (feed, mut session) = (self.feed(), Session::new(self.graph.clone(), self.program.clone(), &Options::default()).unwrap());
        session.initialise(1).unwrap();
        for step in 0..STEPS {
            session.step(&StepScalars::new(HYPER, step + 1, 1.0 / feed.targets() as f64), &Arc::new(feed.batch(step).unwrap())).unwrap();
        }
        common::distance(&self.graph, found, &session.params().unwrap()).0
    }
}

/// Plans of several ranks, with every kind of meeting that a model without attention has.
fn sharing() -> Vec<Case> {
    let forward =
        model_from_bytes("model.json", residual_block(SIZES, "head").as_bytes(), &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}")).graph;
    let one = |(cluster, pins): (&str, &str)| {
        let PlanFile { graph, program, plan, .. } =
            compile(&forward, &options(cluster, 4, DType::F32, pins)).unwrap_or_else(|e| panic!("{pins}: {e}")).file;
        Case { name: pins.into(), away: Elsewhere::default(), graph, program, batch: plan.batch() }
    };
    [("cpu:2", "dp=2,zero=3,micro=1"), ("cpu:4", "dp=2,tp=2,zero=1,micro=1"), ("cpu:2", "pp=2,micro=1"), ("cpu:2", "dp=2,zero=1,micro=1,wire=bf16")]
        .map(one)
        .into()
}

/// Of each plan, the cases without offloading and with every kind of it.
fn cases() -> Vec<Vec<Case>> {
    let plans = [("cpu:1", DType::F32, "micro=2"), ("cpu:2", DType::F32, "dp=2,micro=1,zero=2"), ("cpu:2", DType::Bf16, "dp=2,micro=1,zero=3")];
    let one = |(cluster, dtype, pins): (&str, DType, &str)| {
        let of_type = ImportOptions { compute: dtype, ..ImportOptions::default() };
        let forward = model_from_bytes("model.json", residual_block(SIZES, "head").as_bytes(), &of_type).unwrap_or_else(|e| panic!("{e}")).graph;
        let file = compile(&forward, &options(cluster, 4, dtype, &format!("{pins},offload=none"))).unwrap_or_else(|e| panic!("{pins}: {e}")).file;
        let with = |away: Elsewhere| {
            let mut plan = file.plan.clone();
            plan.options.iter_mut().for_each(|o| (o.offload, o.activations) = (away.states, away.activations));
            let PlanFile { graph, .. } = &file;
            let program = lower::lower(graph, &plan).unwrap_or_else(|e| panic!("{e}"));
            Case { name: format!("{pins}, {}", away.name()), away, graph: graph.clone(), program, batch: plan.batch() }
        };
        let states = Offload::ALL.map(|o| o.name());
        let others = ["activations", "activations:nvme", "parameters/activations:nvme", "gradients:nvme/activations"];
        states.into_iter().chain(others).map(|name| with(Elsewhere::from_name(name).unwrap())).collect()
    };
    plans.map(one).into()
}

fn compiled<'a>(cases: impl IntoIterator<Item = &'a Case>, test: &str) -> Option<Library> {
    if shim::compiler().is_none() {
        eprintln!("SKIPPED: no C++ compiler (set CXX, or install g++)");
        return None;
    }
    let codes: Vec<Code> = cases.into_iter().flat_map(Case::codes).collect();
    let sum = sum_of(DType::F32, 1);
    let launches = kernels(&codes).chain(&sum.launches);
    Some(Library::compile(&scratch(&format!("cuda_offload_{test}")), "kernels", launches).unwrap_or_else(|e| panic!("{e}")))
}

#[test]
fn states_elsewhere_train_bitwise_alike() {
    let cases = cases();
    let Some(mut library) = compiled(cases.iter().flatten(), "alike") else { return };
    let folder = scratch("cuda_offload_files");
    for cases in &cases {
        let (kept, next) = cases[0].train(library, &folder);
        library = next;
        for case in &cases[1..] {
            let (moved, next) = case.train(library, &folder);
            library = next;
            // A copy that is told between a product and what follows it keeps them apart, and what is between them is then rounded, if it is short.
            let is_short = kept.1.len() == 4;
            let is_near =
                || kept.0.iter().flatten().zip(moved.0.iter().flatten()).all(|(x, y)| (f64::from_bits(*x) / f64::from_bits(*y) - 1.0).abs() < 1e-3);
            assert!(kept == moved || is_short && is_near(), "{}: {:?} and {:?}", case.name, kept.0, moved.0);
            // Where the states are is where the plan says.
            let bytes = |space: Space| case.program.stages[0].bytes_in(space);
            assert_eq!(
                (bytes(Space::Host) > 0, bytes(Space::File) > 0),
                (case.away.stores().any(|s| s == Store::Cpu), case.away.stores().any(|s| s == Store::Nvme))
            );
        }
        let error = cases[0].off_cpu_ranks(&kept.1[0]);
        println!("{}: as every kind of offloading, and {error:e} from CPU ranks", cases[0].name);
        assert!(error < if kept.1.len() == 4 { 2e-2 } else { 3e-4 }, "{}: {error:e} from CPU ranks", cases[0].name);
    }
    let files = cases.iter().flatten().flat_map(Case::codes).flat_map(|c| c.segments).flatten();
    let several =
        files.filter(|(_, a)| matches!(a, dplan::runtime::cuda::load::Action::Copy { away: Away::File(place), .. } if place.bytes > 2 * 4096));
    assert!(several.count() > 0, "no transfer has pieces enough to reuse one");
}

/// Fails one call after the other.
#[test]
fn calls_that_fail_leave_nothing_behind() {
    let cases: Vec<Case> = cases().remove(1).into_iter().filter(|c| matches!(c.away.states, Offload::Parameters(_))).collect();
    let Some(library) = compiled(&cases, "fail") else { return };
    let (mut library, mut failed) = (Some(library), std::collections::BTreeSet::<&str>::new());
    for case in &cases {
        let (feed, mut fails) = (case.feed(), 0);
        loop {
            let world = World::new(library.take().expect("a library"), TARGET, case.program.ranks(), 11);
            world.borrow_mut().fails = Some(fails);
            let run = case.devices(&world, &Options::default()).and_then(|mut devices| {
                devices.initialise(1)?;
                devices.step(&StepScalars::new(HYPER, 1, 1.0 / feed.targets() as f64), &feed.batch(0).unwrap())
            });
            let world = Rc::into_inner(world).expect("nobody else has it").into_inner();
            assert_eq!((world.leaks(), &world.after_failure[..]), (Vec::new(), &[][..]), "{}: call {fails} failed", case.name);
            failed.extend(world.calls.get(fails as usize));
            library = Some(world.into_library());
            match run {
                Ok(_) => break,
                Err(error) => assert!(matches!(error, RuntimeError::Device { .. }), "{error}"),
            }
            fails += 1 + fails / 12;
        }
    }
    for call in ["cuMemHostAlloc", "cuStreamCreate", "cuEventCreate", "cuLaunchHostFunc", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"] {
        assert!(failed.contains(call), "{call} never failed: {failed:?}");
    }
}

/// A rank that comes to no meeting any more is named, with what others wait at, also where a graph was launched.
#[test]
fn a_step_that_does_not_end_says_who_waits_where() {
    let case = cases().remove(1).remove(0);
    let Some(mut library) = compiled([&case], "hang") else { return };
    for steps in [0, 2] {
        let world = World::new(library, TARGET, case.program.ranks(), 3);
        let mut devices = case.devices(&world, &Options::default()).unwrap_or_else(|e| panic!("{e}"));
        let feed = case.feed();
        devices.initialise(1).unwrap();
        let mut step = |at: u64| devices.step(&StepScalars::new(HYPER, at + 1, 1.0 / feed.targets() as f64), &feed.batch(at).unwrap());
        (0..steps).for_each(|at| assert!(step(at).unwrap().loss.is_finite()));
        world.borrow_mut().absent = Some(1);
        let error = step(steps).unwrap_err();
        let RuntimeError::Device { rank: 0, stalls, .. } = &error else { panic!("{error}") };
        println!("{error}");
        assert!(!stalls.is_empty() && stalls.iter().all(|s| s.rank == 0 && s.peers == [1]), "{error}");
        assert!(stalls[0].instruction.contains("reduce"), "{error}");
        drop(devices);
        let world = Rc::into_inner(world).expect("nobody else has it").into_inner();
        assert_eq!((world.leaks(), &world.after_failure[..]), (Vec::new(), &[][..]));
        library = world.into_library();
    }
}

/// All ranks of a plan on one device: what NCCL would do is done by copies and sums of the device.
#[test]
fn ranks_that_share_a_device_train_alike() {
    let cases = sharing();
    let Some(mut library) = compiled(&cases, "together") else { return };
    for case in &cases {
        let world = World::new(library, TARGET, 1, 5);
        let seats = seats(Recorder::new(&world, 0), case.program.ranks());
        let mut devices = Devices::new(case.graph.clone(), case.program.clone(), seats, &Options::default()).unwrap_or_else(|e| panic!("{e}"));
        devices.launch(Launch::Each);
        devices.initialise(1).unwrap();
        let feed = case.feed();
        for step in 0..STEPS {
            devices
                .step(&StepScalars::new(HYPER, step + 1, 1.0 / feed.targets() as f64), &feed.batch(step).unwrap())
                .unwrap_or_else(|e| panic!("{e}"));
        }
        let error = case.off_cpu_ranks(&devices.gather(Role::Param).unwrap());
        println!("{}: {} ranks on one device, {error:e} from CPU ranks", case.name, case.program.ranks());
        assert!(error < 3e-4, "{}: {error:e} from CPU ranks", case.name);
        drop(devices);
        library = end(world);
    }
}
