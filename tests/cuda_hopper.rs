//! Steps of Hopper's kernels as one CUDA graph, with no GPU: tensors described to the copy engine and products by warpgroups are captured once and replayed, with the addresses that they
//! had, and train as they do call by call.

mod common;
#[path = "common/recording.rs"]
mod recording;

use std::rc::Rc;

use common::{options, residual_block, scratch};
use dplan::compile::compile;
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::runtime::Options;
use dplan::runtime::cuda::load::load;
use dplan::runtime::cuda::rank::Launch;
use dplan::runtime::cuda::session::Session;
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{DecayGroups, Hyper, StepScalars};
use dplan_ir::program::Role;
use dplan_kernels::cuda::Target;
use dplan_kernels::cuda::arch::Arch;
use dplan_kernels::cuda::product::TILES;
use dplan_kernels::shim::{self, Library};
use recording::{Call, Recorder, World};

/// With the smallest tiles of warpgroups alone.
const TARGET: Target = Target { tiles: TILES.split_at(2).0, ..Target::of(Arch::Sm90a) };
const HYPER: Hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };
const SIZES: [u64; 4] = [24, 48, 64, 96];

#[test]
fn hoppers_kernels_are_captured() {
    if shim::compiler().is_none() {
        eprintln!("SKIPPED: no C++ compiler (set CXX, or install g++)");
        return;
    }
    let of_type = ImportOptions { compute: DType::Bf16, ..ImportOptions::default() };
    let forward = model_from_bytes("model.json", residual_block(SIZES, "table").as_bytes(), &of_type).unwrap_or_else(|e| panic!("{e}")).graph;
    let file = compile(&forward, &options("cpu:1", 4, DType::Bf16, "micro=2")).unwrap_or_else(|e| panic!("{e}")).file;
    let code = load(&file.graph, &file.program, 0, 0, DecayGroups::All, TARGET).unwrap_or_else(|e| panic!("{e}"));
    let actions = code.segments.iter().flatten();
    let launches = actions.flat_map(|(_, action)| action.routines()).flat_map(|r| &r.launches);
    let mut library = Library::compile(&scratch("cuda_hopper"), "kernels", launches).unwrap_or_else(|e| panic!("{e}"));
    let mut left = Vec::new();
    for launch in [Launch::Each, Launch::Graph] {
        let world = World::new(library, TARGET, 1, 7);
        let devices = Session::new(file.graph.clone(), file.program.clone(), vec![(0, Recorder::new(&world, 0))], &Options::default());
        let mut devices = devices.unwrap_or_else(|e| panic!("{e}"));
        devices.launch(launch);
        devices.initialise(1).unwrap();
        let feed = Feed::new(&file.graph, None, 4, 1).unwrap();
        let step = |step: u64| {
            world.borrow_mut().take_log(0);
            let result = devices.step(&StepScalars::new(HYPER, step + 1, 1.0 / feed.targets() as f64), &feed.batch(step).unwrap()).unwrap();
            let log = world.borrow_mut().take_log(0);
            let capture = log.iter().position(|c| *c == Call::BeginCapture).zip(log.iter().position(|c| *c == Call::EndCapture));
            assert_eq!(capture.is_some(), launch == Launch::Graph && step == 1);
            if let Some((begin, end)) = capture {
                let of_warpgroups = |c: &&Call| matches!(c, Call::Launch { entry: "dp_gemm_wgmma", .. });
                let products = log[begin..end].iter().filter(of_warpgroups).count();
                println!("{products} products by warpgroups captured");
                // Of two micro-batches: three products, and two for the slopes of each.
                assert_eq!(products, 2 * 9);
            }
            (result.loss.to_bits(), result.grad_norm.map(f64::to_bits))
        };
        let results: Vec<_> = (0..4).map(step).collect();
        left.push((results, devices.gather(Role::Master).unwrap()));
        drop(devices);
        let world = Rc::into_inner(world).expect("nobody else has it").into_inner();
        assert!(world.launched() > 0 && world.leaks().is_empty() && world.after_failure.is_empty());
        library = world.into_library();
    }
    assert!(left[0] == left[1], "{:?} and {:?}", left[0].0, left[1].0);
}
