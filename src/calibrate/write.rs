//! Fits as the Rust text of `planner/src/machine/fitted/data.rs`.

use super::Fitted;
use dplan_planner::machine::curves::Op;
use std::fmt::Write;

/// The file.
pub fn rust(fitted: &Fitted) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write_all(&mut out, fitted);
    out
}

fn write_all(out: &mut String, fitted: &Fitted) -> std::fmt::Result {
    out.push_str(
        "//! Written by `dplan calibrate`; not edited by hand.\n\nuse super::{Collective, Gemm, Network};\nuse crate::machine::curves::Op;\n\n",
    );
    let millionths = |x: f64| (x * 1e6).round() as u64;
    writeln!(out, "#[rustfmt::skip]\npub(super) const GEMM: &[Gemm] = &[")?;
    for g in &fitted.gemm {
        write!(out, "    Gemm {{ device: {:?}, dtype: {:?}, efficiency: {}, bandwidth: {}, ", g.device, g.dtype, g.efficiency, g.bandwidth)?;
        write!(out, "grain: {}, depth_grain: {}, launch: {}, ", g.grain, g.depth_grain, g.launch)?;
        writeln!(out, "rows: {}, median: {}, worst_tenth: {} }},", g.rows, millionths(g.median), millionths(g.worst_tenth))?;
    }
    writeln!(out, "];\n\n#[rustfmt::skip]\npub(super) const COLLECTIVES: &[Collective] = &[")?;
    for c in &fitted.collectives {
        let op = match c.op {
            Op::AllReduce => "AllReduce",
            Op::AllGather => "AllGather",
            Op::ReduceScatter => "ReduceScatter",
            Op::AllToAll => "AllToAll",
        };
        write!(out, "    Collective {{ device: {:?}, op: Op::{op}, ranks: {}, nanos: &{:?}, ", c.device, c.ranks, c.nanos)?;
        writeln!(out, "rows: {}, large: {}, small: {} }},", c.rows, millionths(c.large), millionths(c.small))?;
    }
    writeln!(out, "];\n\n#[rustfmt::skip]\npub(super) const NETWORKS: &[Network] = &[")?;
    for n in &fitted.networks {
        write!(out, "    Network {{ name: {:?}, latency: {}, bandwidth: {}, ", n.name, n.latency, n.bandwidth)?;
        writeln!(out, "rows: {}, large: {}, small: {} }},", n.rows, millionths(n.large), millionths(n.small))?;
    }
    writeln!(out, "];")
}
