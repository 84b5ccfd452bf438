//! Every family of generated kernels, from the same text that NVRTC compiles, against an f64 reference on random shapes.

mod shim;

use dplan_ir::op::Op;
use dplan_ir::program::Write;
use dplan_kernels::shim::Library;
use dplan_kernels::trial::draw::{FAMILIES, case};
use dplan_kernels::trial::flat;
use shim::{Prepared, Random, folder, letter, make, same_in_orders};
use std::path::Path;

const CASES: u64 = 200;

/// Draws and runs `CASES` shapes of a family; each result must meet the reference, be written whole, and be the same in other orders of threads.
fn family(name: &str, seed: u64) {
    let (_, draw) = FAMILIES.into_iter().find(|f| f.0 == name).expect("a family");
    let Some(dir) = folder("shim_families") else { return };
    let mut random = Random(seed);
    let cases: Vec<_> = (0..CASES).map(|_| draw(&mut random)).collect();
    let prepared: Vec<_> = cases.iter().map(|c| make(c, &mut random)).collect();
    let library = Library::compile(&dir, name, prepared.iter().flat_map(|p| &p.routine.launches)).unwrap_or_else(|e| panic!("{e}"));
    for (case, p) in cases.iter().zip(&prepared) {
        let (outs, ran) = p.run(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name));
        p.check(&outs, 1e-5);
        // A block of nothing has no launch.
        if case.write == Write::Set {
            assert_eq!(ran.unwritten, vec![0; outs.len()], "{}", p.name);
        }
    }
    same_in_orders(&prepared, &library);
}

#[test]
fn pointwise() {
    family("pointwise", 1);
}

#[test]
fn norm() {
    family("norm", 2);
}

#[test]
fn columns() {
    family("columns", 3);
}

#[test]
fn lookups() {
    family("lookups", 4);
}

#[test]
fn rotary() {
    family("rotary", 5);
}

#[test]
fn loss() {
    family("loss", 6);
}

#[test]
fn router() {
    family("router", 7);
}

#[test]
fn router_scored() {
    family("router_scored", 16);
}

#[test]
fn shared_parts() {
    family("shared_parts", 17);
}

#[test]
fn experts() {
    family("experts", 8);
}

#[test]
fn products() {
    family("products", 9);
}

#[test]
fn products_in_eights() {
    family("products_in_eights", 13);
}

#[test]
fn flat_buckets() {
    let Some(dir) = folder("shim_families") else { return };
    let mut random = Random(14);
    // An optimizer's steps are a family of their own.
    let trials: Vec<_> = (0..4 * CASES).map(|_| flat::draw(&mut random)).collect();
    run(&dir, "flat", &trials);
}

/// What goes round a ring is joined as it comes.
#[test]
fn joins() {
    let Some(dir) = folder("shim_families") else { return };
    let mut random = Random(15);
    let trials: Vec<_> = (0..CASES).map(|_| flat::joins(&mut random)).collect();
    run(&dir, "joins", &trials);
}

fn run(dir: &Path, name: &str, trials: &[Prepared]) {
    let library = Library::compile(dir, name, trials.iter().flat_map(|p| &p.routine.launches)).unwrap_or_else(|e| panic!("{e}"));
    for p in trials {
        let (outs, ran) = p.run(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name));
        p.check(&outs, 1e-5);
        if p.write == Write::Set {
            assert_eq!(ran.unwritten, vec![0; outs.len()], "{}", p.name);
        }
    }
    same_in_orders(trials, &library);
}

#[test]
fn attention() {
    family("attention", 10);
}

#[test]
fn attention_on_matrix_units() {
    family("attention_on_matrix_units", 11);
}

/// The second and third dim of a CUDA grid end at 65,535 blocks.
#[test]
fn more_rows_than_a_grid_dim_has() {
    let Some(dir) = folder("shim_families") else { return };
    let mut random = Random(12);
    let long = || vec![letter('a', 2), letter('b', 33_000), letter('c', 4)];
    let cases = [
        case(&mut random, Op::RmsNorm { eps: 1e-5 }, &[3, 1], &[3], long()),
        case(&mut random, Op::CeStats, &[3, 2], &[2, 2], long()),
        case(&mut random, Op::CeStatsGrad, &[3, 2, 2, 2, 2], &[3], long()),
        case(&mut random, Op::SumLeading { keep: 1 }, &[3], &[1], long()),
    ];
    let prepared: Vec<_> = cases.iter().map(|c| make(c, &mut random)).collect();
    let library = Library::compile(&dir, "rows", prepared.iter().flat_map(|p| &p.routine.launches)).unwrap_or_else(|e| panic!("{e}"));
    for p in &prepared {
        let (outs, _) = p.run(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name));
        p.check(&outs, 1e-5);
    }
}
