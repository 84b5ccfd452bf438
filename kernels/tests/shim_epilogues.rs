//! Products with what follows them: biases, sums with what was there before, activations and their gradients, written in the same kernel, in every text that multiplies, against the
//! f64 reference of the ops one after the other.

mod shim;

use std::collections::BTreeSet;

use dplan_ir::program::Write;
use dplan_kernels::cuda::Target;
use dplan_kernels::cuda::arch::Arch;
use dplan_kernels::cuda::product::{TILES, Tiles};
use dplan_kernels::shim::Library;
use dplan_kernels::trial::draw::{FOLLOWED, Rows, products_and_more};
use shim::{Case, Random, folder, make, same_in_orders};

const CASES: usize = 200;

/// Runs the cases; every kernel is called `entry`.
fn run(name: &str, entry: &[&str], cases: &[Case], random: &mut Random) {
    let Some(dir) = folder("shim_epilogues") else { return };
    let prepared: Vec<_> = cases.iter().map(|c| make(c, random)).collect();
    let library = Library::compile(&dir, name, prepared.iter().flat_map(|p| &p.routine.launches)).unwrap_or_else(|e| panic!("{e}"));
    for (case, p) in cases.iter().zip(&prepared) {
        assert!(p.routine.launches.iter().all(|l| entry.contains(&l.entry)), "{}", p.name);
        let (outs, ran) = p.run(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name));
        p.check(&outs, 1e-5);
        if case.write == Write::Set {
            assert_eq!(ran.unwritten, vec![0], "{}", p.name);
        }
        // What is read and written besides the product's own operands is the other operand, and nothing else.
        let most: usize = p.ins.iter().chain(&p.starts).map(|b| b.bytes().len() + 64).sum();
        let again = if case.write == Write::Add { p.starts[0].bytes().len() + 32 } else { 0 };
        assert!(ran.moved.read + ran.moved.written <= (most + again) as u64, "{}: {:?} of {most}", p.name, ran.moved);
    }
    same_in_orders(&prepared, &library);
    let texts: BTreeSet<&str> = prepared.iter().flat_map(|p| &p.routine.launches).map(|l| &l.text[..]).collect();
    println!("{name}: {} products by {} texts", cases.len(), texts.len());
}

#[test]
fn on_arithmetic_units() {
    let mut random = Random(31);
    let cases: Vec<Case> = (0..CASES).map(|_| products_and_more(&mut random, &FOLLOWED[..3], Rows::Any)).collect();
    run("arithmetic", &["dp_gemm_plain"], &cases, &mut random);
}

#[test]
fn by_warps() {
    let mut random = Random(32);
    let rows = |i: usize| if i.is_multiple_of(2) { Rows::Eights } else { Rows::Any };
    let cases: Vec<Case> = (0..CASES).map(|i| products_and_more(&mut random, &FOLLOWED[3..], rows(i))).collect();
    run("warps", &["dp_gemm_mma"], &cases, &mut random);
}

#[test]
fn by_warpgroups() {
    let mut random = Random(33);
    let tiles: [&[Tiles]; 2] = [TILES.split_at(1).0, TILES.split_at(1).1.split_at(1).0];
    let target = |i: usize| Target { tiles: tiles[i % 2], ..Target::of(Arch::Sm90a) };
    let cases = (0..CASES).map(|i| Case { target: target(i), ..products_and_more(&mut random, &FOLLOWED[3..8], Rows::Eights) });
    let cases: Vec<Case> = cases.collect();
    run("warpgroups", &["dp_gemm_wgmma"], &cases, &mut random);
}
