//! Ranks on GPUs drop what CPU ranks drop: in every micro-batch and step, forwards and backwards. The GPUs are stand-ins that run the generated kernels on this CPU.

mod common;
#[path = "common/recording.rs"]
#[allow(dead_code)]
mod recording;

use std::sync::Arc;

use common::{options, scratch};
use dplan::compile::compile;
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::runtime::cuda::load::load;
use dplan::runtime::cuda::session::Session as Devices;
use dplan::runtime::{Options, Session};
use dplan_ir::dropout::Draws;
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{DecayGroups, Hyper, StepScalars};
use dplan_ir::program::Role;
use dplan_kernels::cuda::Target;
use dplan_kernels::cuda::arch::Arch;
use dplan_kernels::shim::{self, Library};
use recording::{Recorder, World};

const BATCH: u64 = 8;
const SEED: u64 = 5;
const HYPER: Hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };

/// An embedding and a residual block, both with dropout.
const TARGET: Target = Target::of(Arch::Sm80);
const MODEL: &str = r#"{
  "dplan": 1,
  "dims": { "b": "batch", "s": 6, "v": 19, "h": 24, "f": 16 },
  "inputs": [{ "name": "tokens", "dims": ["b", "s"] }, { "name": "targets", "dims": ["b", "s"] }],
  "params": { "table": ["v", "h"], "w1": ["f", "h"], "w2": ["h", "f"] },
  "nodes": [
    { "name": "x", "op": "embed", "in": ["table", "tokens"] },
    { "name": "x.kept", "op": "dropout", "rate": 0.25, "in": ["x"] },
    { "name": "up", "op": "einsum", "spec": "bsh,fh->bsf", "in": ["x.kept", "w1"] },
    { "name": "act", "op": "act", "function": "silu", "in": ["up"] },
    { "name": "down", "op": "einsum", "spec": "bsf,hf->bsh", "in": ["act", "w2"] },
    { "name": "down.kept", "op": "dropout", "rate": 0.5, "in": ["down"] },
    { "name": "y", "op": "add", "in": ["x.kept", "down.kept"] },
    { "name": "logits", "op": "einsum", "spec": "bsh,vh->bsv", "in": ["y", "table"] },
    { "name": "loss", "op": "cross_entropy", "in": ["logits", "targets"] }
  ],
  "loss": "loss"
}"#;

#[test]
fn gpus_drop_what_cpu_ranks_drop() {
    if shim::compiler().is_none() {
        eprintln!("SKIPPED: no C++ compiler (set CXX, or install g++)");
        return;
    }
    let forward = model_from_bytes("model.json", MODEL.as_bytes(), &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}")).graph;
    let plans = ["dp=2,micro=2,zero=1", "tp=2,micro=4"].map(|pins| {
        let file = compile(&forward, &options("cpu:2", BATCH, DType::F32, pins)).unwrap_or_else(|e| panic!("{pins}: {e}")).file;
        assert_eq!(file.program.micro_batches, 2);
        (pins, file.graph, file.program)
    });
    let loaded = plans.iter().flat_map(|(_, graph, program)| (0..2).map(move |rank| load(graph, program, 0, rank, DecayGroups::All, TARGET)));
    let codes: Vec<_> = loaded.collect::<Result<_, _>>().unwrap_or_else(|e| panic!("{e}"));
    let actions = codes.iter().flat_map(|c| c.segments.iter().flatten());
    let launches = actions.flat_map(|(_, action)| action.routines()).flat_map(|r| &r.launches);
    let mut library = Library::compile(&scratch("cuda_dropout"), "kernels", launches).unwrap_or_else(|e| panic!("{e}"));
    for (pins, graph, program) in plans {
        let world = World::new(library, TARGET, program.ranks(), 7);
        let drivers = (0..program.ranks()).map(|r| (r, Recorder::new(&world, r))).collect();
        let mut devices = Devices::new(graph.clone(), program.clone(), drivers, &Options::default()).unwrap_or_else(|e| panic!("{e}"));
        let feed = Feed::new(&graph, None, BATCH, SEED).unwrap();
        let mut session = Session::new(graph.clone(), program, &Options::default()).unwrap();
        devices.initialise(SEED).unwrap();
        session.initialise(SEED).unwrap();
        for step in 0..3 {
            let draws = Draws { seed: SEED, sequence: step * BATCH };
            let scalars = StepScalars { draws, ..StepScalars::new(HYPER, step + 1, 1.0 / feed.targets() as f64) };
            let batch = Arc::new(feed.batch(step).unwrap());
            let (gpu, cpu) = (devices.step(&scalars, &batch).unwrap(), session.step(&scalars, &batch).unwrap());
            assert!((gpu.loss - cpu.loss).abs() < 1e-5, "{pins} step {step}: loss {} and on CPU ranks {}", gpu.loss, cpu.loss);
            let (found, right) = (gpu.grad_norm.unwrap(), cpu.grad_norm.unwrap());
            assert!((found / right - 1.0).abs() < 1e-4, "{pins} step {step}: norm {found} and on CPU ranks {right}");
        }
        let (found, right) = (devices.gather(Role::Param).unwrap(), session.params().unwrap());
        for (p, x) in found.iter() {
            assert!(x.iter().zip(&right[p]).all(|(a, b)| (a - b).abs() < 1e-4), "{pins}: `{}`", graph.values[graph.params[p].value].name);
        }
        drop(devices);
        assert!(world.borrow().leaks().is_empty() && world.borrow().after_failure.is_empty());
        library = std::rc::Rc::into_inner(world).expect("nobody else has it").into_inner().into_library();
    }
}
