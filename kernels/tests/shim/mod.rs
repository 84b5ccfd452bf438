//! Trials of kernels in the shim.
#![allow(dead_code)]

pub use dplan_kernels::trial::*;

use dplan_ir::dtype::DType;
use dplan_ir::op::Op;
use dplan_ir::order::Order;
use dplan_ir::program::Write;
use dplan_kernels::cuda::Alignment;
use dplan_kernels::shim::{self, Library};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// An op of operands and results of so many dims, set where it comes out, of packed operands, alone.
pub fn case(op: Op, ins: &[usize], outs: &[usize], letters: Vec<(char, u64, u64, u64)>, dtype: DType) -> Case {
    Case {
        op,
        ranks: (ins.to_vec(), outs.to_vec()),
        letters,
        dtype,
        out: None,
        write: Write::Set,
        alignment: Alignment::Packs,
        top_k: 2,
        order: Order::Straight,
        target: TARGET,
        tails: Vec::new(),
    }
}

/// The folder for this test's compiled kernels, or `None` (said aloud) if there is no C++ compiler.
pub fn folder(name: &str) -> Option<PathBuf> {
    if shim::compiler().is_none() {
        eprintln!("SKIPPED: no C++ compiler (set CXX, or install g++)");
        return None;
    }
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&dir).unwrap();
    Some(dir)
}

/// Orders of threads that each text is run in.
const ORDERS: u64 = 20;

/// Results must be the same bits in whatever order threads run: two orders of each case, all [`ORDERS`] of the smallest of each text; of kernels whose blocks take tiles until there
/// are none, also with one block.
pub fn same_in_orders(prepared: &[Prepared], library: &Library) {
    let threads = |at: usize| prepared[at].routine.launches.iter().map(|l| u64::from(l.grid) * u64::from(l.threads)).sum::<u64>();
    let mut smallest: HashMap<(&str, &str), usize> = HashMap::new();
    for (at, launch) in prepared.iter().enumerate().flat_map(|(at, p)| p.routine.launches.iter().map(move |l| (at, l))) {
        let least = smallest.entry((&launch.text, launch.entry)).or_insert(at);
        if threads(at) < threads(*least) {
            *least = at;
        }
    }
    let texts = smallest.len();
    let all: BTreeSet<usize> = smallest.into_values().collect();
    for (at, p) in prepared.iter().enumerate() {
        let (want, _) = p.run(library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name));
        for order in 2..=if all.contains(&at) { ORDERS } else { 2 } {
            let mut launches = p.routine.launches.clone();
            launches.iter_mut().filter(|l| l.entry == "dp_gemm_wgmma" && order % 2 == 0).for_each(|l| l.grid = 1);
            let (outs, _) = p.run_launches(library, &launches, order).unwrap_or_else(|e| panic!("{}: {e}", p.name));
            assert!(outs.iter().zip(&want).all(|(x, y)| x.bytes() == y.bytes()), "{}: another result in order {order}", p.name);
        }
    }
    println!("{texts} texts in {ORDERS} orders of threads, {} cases in two", prepared.len());
}
