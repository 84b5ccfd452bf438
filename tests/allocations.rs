//! During steps nothing is allocated but the packing buffers of matrix products.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dplan::runtime::{Batch, Options, Rows, Session};
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};
use dplan_kernels::cpu::in_gemm;
use dplan_planner::drawn::{Case, Dice, Ffn};
use dplan_planner::lower;

/// Counts what is allocated while it is armed.
struct Counting;

static ARMED: AtomicBool = AtomicBool::new(false);
static IN_GEMM: AtomicU64 = AtomicU64::new(0);
static ELSEWHERE: AtomicU64 = AtomicU64::new(0);

// SAFETY: all calls go to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if ARMED.load(Ordering::Relaxed) {
            let count = if in_gemm() { &IN_GEMM } else { &ELSEWHERE };
            count.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The only test of this file, since it counts what the whole process allocates.
#[test]
fn steps_allocate_nothing_but_packing_buffers() {
    let mut checked = 0;
    for (seed, ffn) in [Ffn::Gated, Ffn::Plain, Ffn::Experts].into_iter().cycle().take(12).enumerate() {
        let mut dice = Dice(seed as u64);
        // At least as many ranks as cores, so that ranks compute on their own threads.
        let is_small = |c: &Case| c.model.ffn == ffn && c.dp == 2 && c.ranks() <= 8 && c.compute == DType::F64;
        let mut case = std::iter::repeat_with(|| Case::drawn(&mut dice)).find(is_small).unwrap();
        case.optimizer = Optimizer::ALL[seed % Optimizer::ALL.len()];
        let graph = case.graph();
        let program = lower::lower(&graph, &case.plan(&graph)).unwrap();
        let elems = |v| graph.shape(v).iter().product::<u64>() * case.micro_batches;
        let batch = Arc::new(Batch { inputs: graph.inputs.iter().map(|&v| Rows::Tokens(vec![1; elems(v) as usize])).collect() });
        let arenas: Vec<u64> = program.stages.iter().map(|s| s.arena_bytes).collect();
        let mut session = Session::new(graph, program, &Options::default()).unwrap();
        for memory in session.memory() {
            assert_eq!(memory.arena_bytes, arenas[memory.stage as usize]);
        }
        session.initialise(1).unwrap();
        let hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };
        ELSEWHERE.store(0, Ordering::SeqCst);
        ARMED.store(true, Ordering::SeqCst);
        let results = [1, 2, 3].map(|step| session.step(&StepScalars::new(hyper, step, 0.01), &batch));
        ARMED.store(false, Ordering::SeqCst);
        assert!(results.iter().all(Result::is_ok));
        assert_eq!(ELSEWHERE.load(Ordering::SeqCst), 0, "allocations outside of matrix products, seed {seed}");
        checked += IN_GEMM.swap(0, Ordering::SeqCst);
    }
    assert!(checked > 0, "the counter saw no packing buffer: it counts nothing");
}
