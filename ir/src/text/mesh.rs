//! Meshes, sets of axes, shardings, padded sizes: `mesh [dp=2, tp0=2]` (`… nested [tp0, dp]` where that is not their order), `{dp, tp0}`, `<dp, tp0*tp1, _ +sum{tp2}>`, `<_, cp ring{cp} of 4 turn 1 over {0, 1}>`,
//! `padded v = 260`.

use std::fmt::Write;

use crate::graph::Graph;
use crate::mesh::{Axis, AxisId, AxisSet, MAX_AXES, Mesh};
use crate::ring::Ring;
use crate::sharding::{Monoid, Padded, Sharding};
use crate::text::parser::{Parsed, Parser};
use crate::text::place::Printed;
use crate::text::scope::{Known, Spelling, put_label};

pub fn put_mesh(out: &mut Printed, mesh: &Mesh) {
    out.put("mesh [");
    for (i, axis) in mesh.axes.iter().enumerate() {
        if i > 0 {
            out.put(", ");
        }
        put_axis_name(&mut out.text, &axis.name);
        let _ = write!(out.text, "={}", axis.size);
    }
    out.put("]");
    if !mesh.nesting.is_empty() {
        out.put(" nested [");
        for (i, AxisId(at)) in mesh.nesting.iter().enumerate() {
            if i > 0 {
                out.put(", ");
            }
            put_axis(&mut out.text, *at, mesh);
        }
        out.put("]");
    }
    out.end_line();
}

pub fn mesh(p: &mut Parser<'_>) -> Parsed<Mesh> {
    p.word("mesh")?;
    let mut mesh = Mesh::default();
    p.list('[', ']', |p| {
        let at = p.at();
        let name = p.label("an axis, like `dp=2`")?.into_owned();
        if mesh.by_name(&name).is_some() {
            return Err(p.wrong(at, format!("a second axis `{name}`"), "another name"));
        }
        if mesh.axes.len() == MAX_AXES {
            return Err(p.wrong(at, "one axis more", format!("at most {MAX_AXES}")));
        }
        p.sign('=')?;
        mesh.axes.push(Axis { name, size: p.integer("the axis's size")? });
        Ok(())
    })?;
    if p.take_word("nested") {
        let (at, mut nesting) = (p.at(), Vec::new());
        p.list('[', ']', |p| {
            let mut one = AxisSet::EMPTY;
            axis(p, &mesh, &mut one)?;
            nesting.extend(one.iter());
            Ok(())
        })?;
        mesh.nest(nesting);
        if !mesh.is_nested() {
            return Err(p.wrong(at, "another list", "every axis of the mesh once, the outermost first"));
        }
    }
    Ok(mesh)
}

/// Sizes on the machine, of the dims where they are not the logical ones.
pub fn put_padded(out: &mut Printed, padded: &Padded, graph: &Graph, spelling: &Spelling) {
    let mut first = true;
    for (id, &size) in padded.0.iter() {
        if graph.dims.get(id).is_none_or(|d| d.size == size) {
            continue;
        }
        let _ = write!(out.text, "{} {} = {size}", if first { "padded" } else { "," }, spelling.dim(id));
        first = false;
    }
    if !first {
        out.end_line();
    }
}

pub fn padded(p: &mut Parser<'_>, known: &Known<'_>) -> Parsed<Padded> {
    let mut padded = Padded(known.graph.dims.map(|_, d| d.size));
    if p.take_word("padded") {
        loop {
            let dim = known.dim(p)?;
            p.sign('=')?;
            padded.0[dim] = p.integer("the dim's padded size")?;
            if !p.take_sign(',') {
                break;
            }
        }
    }
    Ok(padded)
}

pub fn put_axes(out: &mut String, axes: AxisSet, mesh: &Mesh) {
    out.push('{');
    put_joined(out, axes, mesh, ", ");
    out.push('}');
}

pub fn axes(p: &mut Parser<'_>, mesh: &Mesh) -> Parsed<AxisSet> {
    let mut set = AxisSet::EMPTY;
    p.list('{', '}', |p| axis(p, mesh, &mut set))?;
    Ok(set)
}

pub fn put_sharding(out: &mut String, sharding: &Sharding, mesh: &Mesh) {
    out.push('<');
    for (i, &axes) in sharding.dims.iter().enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        if axes.is_empty() { out.push('_') } else { put_joined(out, axes, mesh, "*") }
    }
    if !sharding.partial.is_empty() {
        if !sharding.dims.is_empty() {
            out.push(' ');
        }
        out.push('+');
        out.push_str(sharding.monoid.name());
        put_axes(out, sharding.partial, mesh);
    }
    if let Some(Ring { axes, ranks, turn, over: _ }) = sharding.ring {
        if !sharding.dims.is_empty() || !sharding.partial.is_empty() {
            out.push(' ');
        }
        out.push_str("ring");
        put_axes(out, axes, mesh);
        let _ = write!(out, " of {ranks} turn {turn} over ");
        let differences = sharding.ring.iter().flat_map(Ring::differences).map(|d| d.to_string()).collect::<Vec<_>>();
        let _ = write!(out, "{{{}}}", differences.join(", "));
    }
    out.push('>');
}

pub fn sharding(p: &mut Parser<'_>, mesh: &Mesh) -> Parsed<Sharding> {
    p.sign('<')?;
    let mut dims = Vec::new();
    if !p.is_sign('>') && !p.is_sign('+') && !p.is_word("ring") {
        loop {
            let mut set = AxisSet::EMPTY;
            if !p.take_word("_") {
                axis(p, mesh, &mut set)?;
                while p.take_sign('*') {
                    axis(p, mesh, &mut set)?;
                }
            }
            dims.push(set);
            if !p.take_sign(',') {
                break;
            }
        }
    }
    let mut sharding = Sharding::of_dims(dims);
    if p.take_sign('+') {
        let monoid = monoid(p)?;
        sharding = sharding.with_partial(monoid, axes(p, mesh)?);
    }
    if p.take_word("ring") {
        sharding.ring = Some(ring(p, mesh)?);
    }
    if p.take_sign('>') { Ok(sharding) } else { Err(p.expected("`,`, `*`, `+`, `ring` or `>`")) }
}

fn ring(p: &mut Parser<'_>, mesh: &Mesh) -> Parsed<Ring> {
    let axes = axes(p, mesh)?;
    p.word("of")?;
    let ranks = p.integer("the ring's number of ranks")?;
    p.word("turn")?;
    let turn = p.integer("a turn of the ring")?;
    p.word("over")?;
    let mut over = 0;
    p.list('{', '}', |p| {
        let at = p.at();
        let difference: u64 = p.integer("a difference of blocks")?;
        match Ring::met(difference) {
            0 => Err(p.wrong(at, format!("a difference of {difference}"), "at most 63")),
            bit if over & bit != 0 => Err(p.wrong(at, format!("a difference of {difference} again"), "each difference once")),
            bit => {
                over |= bit;
                Ok(())
            }
        }
    })?;
    Ok(Ring { axes, ranks, turn, over })
}

pub fn monoid(p: &mut Parser<'_>) -> Parsed<Monoid> {
    let at = p.at();
    let word = p.any_word("a reduction (`sum`, `max`, `lse`)")?;
    Monoid::from_name(word).ok_or_else(|| p.unknown(at, "reduction", word, &["sum", "max", "lse"]))
}

fn axis(p: &mut Parser<'_>, mesh: &Mesh, set: &mut AxisSet) -> Parsed<()> {
    let at = p.at();
    let name = p.label("an axis")?;
    let Some(axis) = mesh.by_name(&name) else {
        return Err(p.unknown(at, "axis", &name, &mesh.axes.iter().map(|a| a.name.as_str()).collect::<Vec<_>>()));
    };
    if set.contains(axis) {
        return Err(p.wrong(at, format!("`{name}` again"), "each axis once"));
    }
    *set = set.union(AxisSet::one(axis));
    Ok(())
}

fn put_joined(out: &mut String, axes: AxisSet, mesh: &Mesh, between: &str) {
    for (i, AxisId(at)) in axes.iter().enumerate() {
        if i > 0 {
            out.push_str(between);
        }
        put_axis(out, at, mesh);
    }
}

fn put_axis(out: &mut String, at: u8, mesh: &Mesh) {
    match mesh.axes.get(at as usize) {
        Some(axis) => put_axis_name(out, &axis.name),
        None => put_axis_name(out, &format!("axis {at}")),
    }
}

/// `_` alone means no axis.
fn put_axis_name(out: &mut String, name: &str) {
    if name == "_" { out.push_str("\"_\"") } else { put_label(out, name) }
}
