//! Row programs: chains of ops along rows by one kernel, against the f64 reference and, bit by bit, against the same ops one by one; less is moved.

mod shim;

use std::collections::BTreeSet;

use dplan_ir::program::Write;
use dplan_kernels::shim::Library;
use dplan_kernels::trial::chains::{Joined, joined};
use shim::{Random, folder, same_in_orders};

const CASES: usize = 240;

#[test]
fn chains_are_their_ops_one_by_one() {
    let Some(dir) = folder("shim_rows") else { return };
    let mut random = Random(41);
    let chains: Vec<Joined> = (0..CASES).map(|_| joined(&mut random)).collect();
    let library = Library::compile(&dir, "rows", chains.iter().flat_map(Joined::launches)).unwrap_or_else(|e| panic!("{e}"));
    let (mut less, mut more) = (0, 0);
    for chain in &chains {
        let p = &chain.together;
        assert_eq!(p.routine.launches.len(), 1, "{}", p.name);
        let (outs, ran) = p.run(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name));
        p.check(&outs, 1e-5);
        if p.write == Write::Set {
            assert_eq!(ran.unwritten, vec![0; outs.len()], "{}", p.name);
        }
        let (want, apart) = chain.one_by_one(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name));
        for (at, (out, want)) in outs.iter().zip(&want).enumerate() {
            assert!(out.bytes() == want, "{}: result {at} is another than of its ops one by one", p.name);
        }
        // Each operand is read once, each result written once; what is added to is read, too. Ends of a buffer may be in the middle of a sector.
        let moved = ran.moved.read + ran.moved.written;
        let bytes = |buffers: &[shim::Buffer]| buffers.iter().map(|b| b.bytes().len() as u64 + 64).sum::<u64>();
        let again = if p.write == Write::Add { p.starts.last().map_or(0, |b| b.bytes().len() as u64 + 64) } else { 0 };
        assert!(moved <= bytes(&p.ins) + bytes(&p.starts) + again + 64, "{}: {moved} bytes", p.name);
        assert!(moved <= apart, "{}: {moved} bytes, {apart} one by one", p.name);
        (less, more) = (less + moved, more + apart);
    }
    let prepared: Vec<_> = chains.into_iter().map(|c| c.together).collect();
    same_in_orders(&prepared, &library);
    let texts: BTreeSet<&str> = prepared.iter().flat_map(|p| &p.routine.launches).map(|l| &l.text[..]).collect();
    println!("{CASES} chains by {} texts move {:.3} of the bytes of their ops one by one", texts.len(), less as f64 / more as f64);
}
