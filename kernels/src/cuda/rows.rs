//! Row programs: a chain of ops as one kernel.
//!
//! A *row* of a chain is what one warp, or one block, has in registers: load → ops one after another, some of which sum along the row → store. What an op makes is rounded to the
//! elements' type as if it had been in memory, so a chain of 16-bit elements computes the same bits as its ops one by one, and a chain of f32 or f64
//! does where no product and sum of two ops are contracted to one operation, as a GPU may and the CPU library does not; what only the chain reads has no bytes. A norm, its gradient or a dropout
//! by itself is a chain of one.
//!
//! *Wide* operands lie as rows do; *row* operands (weights of norms, biases) are the same for every row.

use std::fmt::Write as _;

use dplan_ir::cost::{OpCost, op_cost};
use dplan_ir::dropout::{scale, threshold};
use dplan_ir::extent::{Extent, OpContext};
use dplan_ir::graph::Layout;
use dplan_ir::op::{Activation, Op};
use dplan_ir::program::Write;
use dplan_ir::rule::rule;
use dplan_ir::sharding::LocalType;

use super::embed::order_args_of;
use super::norm::{MOST_PACKS, Which, row_threads};
use super::pointwise::{activation, expression};
use super::source::{Builder, Size, int};
use super::{Alignment, Arg, Descriptor, Epilogue, Family, PrepareError, Routine, Target};

/// Threads of a block where a warp has a row.
const WARPS: u64 = 256;
/// Elements of a row where ops do not say how long it is.
const ROW: u64 = 2048;
/// Registers of a block, and what a thread needs besides a chain's values.
const REGISTERS: u64 = 65_536;
const BESIDES: u64 = 32;
/// Ops of a chain: as many as there are registers for.
pub const MOST_LINKS: usize = 4;

/// An op of a chain; operands and results are values of the chain.
#[derive(Clone, Debug)]
pub struct Link<'a> {
    pub op: &'a Op,
    pub context: &'a OpContext,
    pub ins: Vec<usize>,
    pub outs: Vec<usize>,
}

/// Where a value of a chain is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Held {
    /// In memory before; an operand of the kernel.
    Loaded,
    /// In registers alone.
    Kept,
    /// In memory behind it; a result of the kernel.
    Stored,
}

/// Ops that are done together.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    pub links: &'a [Link<'a>],
    pub values: &'a [(LocalType, Held)],
    /// What the last of them does to its results.
    pub write: Write,
    pub alignment: Alignment,
    pub target: Target,
}

/// Whether an op can be one of a chain.
pub fn links(op: &Op) -> bool {
    expression(op).is_some() || norm_of(op).is_some() || matches!(op, Op::AddBias | Op::Dropout { .. })
}

/// One kernel for a chain; its operands are what is loaded, its results what is stored, each in order of the values.
///
/// # Errors
/// If rows of the chain are too long, or its ops do not go together.
pub fn chain(c: &Chain<'_>) -> Result<Routine, PrepareError> {
    let of = |held: Held| c.values.iter().filter(move |v| v.1 == held).map(|v| v.0.clone()).collect::<Vec<LocalType>>();
    let (ins, outs) = (of(Held::Loaded), of(Held::Stored));
    let first = c.links.first().ok_or_else(|| PrepareError::Sizes("a chain of nothing".into()))?;
    let descriptor = Descriptor {
        op: first.op,
        context: first.context,
        ins: &ins,
        outs: &outs,
        write: c.write,
        alignment: c.alignment,
        target: c.target,
        epilogue: Epilogue::default(),
    };
    let mut b = Builder::new(&descriptor)?;
    emit(&mut b, c.links, c.values)?;
    let types = |ids: &[usize]| ids.iter().map(|&v| &c.values[v].0).collect::<Vec<_>>();
    let costs: Vec<OpCost> = c.links.iter().map(|l| op_cost(l.op, &types(&l.ins), &types(&l.outs))).collect();
    let mut cost = costs[0];
    cost.flops = costs.iter().map(|c| c.flops).sum();
    let added: u64 = if c.write == Write::Add { outs.last().map_or(0, LocalType::bytes) } else { 0 };
    cost.bytes = ins.iter().chain(&outs).map(LocalType::bytes).sum::<u64>() + added;
    Ok(Routine { launches: b.launches, aux: b.aux, cost })
}

/// The op of a descriptor by itself.
///
/// # Errors
/// As [`chain`].
pub fn alone(b: &mut Builder<'_>) -> Result<(), PrepareError> {
    let d = b.d;
    let values = d.ins.iter().map(|t| (t.clone(), Held::Loaded)).chain(d.outs.iter().map(|t| (t.clone(), Held::Stored)));
    let values: Vec<(LocalType, Held)> = values.collect();
    let (ins, outs) = ((0..d.ins.len()).collect(), (d.ins.len()..values.len()).collect());
    emit(b, &[Link { op: d.op, context: d.context, ins, outs }], &values)
}

fn norm_of(op: &Op) -> Option<(Which, f64)> {
    match op {
        Op::RmsNorm { eps } | Op::RmsNormGradInput { eps } => Some((Which::Rms, *eps)),
        Op::LayerNorm { eps } | Op::LayerNormGradInput { eps } => Some((Which::Layer, *eps)),
        _ => None,
    }
}

/// Whether operand `at` is the same for every row.
fn of_row(op: &Op, at: usize) -> bool {
    match op {
        Op::AddBias | Op::RmsNormGradInput { .. } | Op::LayerNormGradInput { .. } => at == 1,
        Op::RmsNorm { .. } | Op::LayerNorm { .. } => at >= 1,
        _ => false,
    }
}

/// The one value that all of some have; `None` of nothing.
fn only<T: PartialEq + Copy>(mut all: impl Iterator<Item = T>, what: &str) -> Result<Option<T>, PrepareError> {
    let first = all.next();
    if all.any(|x| Some(x) != first) { Err(PrepareError::Sizes(format!("{what} of one chain that differ"))) } else { Ok(first) }
}

/// Wide values that are in registers at once, at most.
fn most_live(links: &[Link<'_>]) -> u64 {
    let wide = |link: &Link<'_>| {
        let ins = link.ins.iter().enumerate().filter(|(at, _)| !of_row(link.op, *at)).map(|(_, &v)| v);
        ins.chain(link.outs.iter().copied()).collect::<Vec<usize>>()
    };
    let all: Vec<Vec<usize>> = links.iter().map(wide).collect();
    let live = |at: usize| {
        let (mut before, after) = (all[..=at].concat(), all[at..].concat());
        before.sort_unstable();
        before.dedup();
        before.iter().filter(|v| after.contains(v)).count() as u64
    };
    (0..links.len()).map(live).max().unwrap_or(0)
}

/// How long rows are: as norms say, else as many of the last dims as make a row of some length, biases repeating along it, and elements that are dropped following each other.
fn row_length(links: &[Link<'_>], values: &[(LocalType, Held)], drops: &[Option<Dropped>]) -> Result<u64, PrepareError> {
    let dims = &values[links[0].outs[0]].0.dims;
    let last = dims.last().copied().unwrap_or(1);
    // Over heads, a norm's weight has several dims, and its rows are as long as all of them.
    if let Some(weight) = only(links.iter().filter(|l| norm_of(l.op).is_some()).map(|l| values[l.ins[1]].0.elems()), "widths of norms")? {
        return Ok(weight);
    }
    let bias = only(links.iter().filter(|l| *l.op == Op::AddBias).map(|l| values[l.ins[1]].0.elems()), "biases")?;
    let mut cols = last;
    for dim in dims.iter().rev().skip(1) {
        let apart = drops.iter().flatten().any(|d| !d.inner.len.is_multiple_of(cols * dim));
        if (cols * dim > ROW || apart) && bias.is_none_or(|b| cols.is_multiple_of(b.max(1))) {
            break;
        }
        cols *= dim;
    }
    Ok(cols)
}

/// Statements, parameters and arguments of a kernel as they are written.
struct Kernel<'a> {
    values: &'a [(LocalType, Held)],
    cols: u64,
    params: Vec<String>,
    args: Vec<Arg>,
    /// Before the body.
    head: String,
    body: String,
    /// Which values are in registers already.
    there: Vec<bool>,
}

const EACH: &str = "DP_UNROLL\n    for (int e = 0; e < E; e++)\n        if (dp_column(e) < cols)";

impl Kernel<'_> {
    fn line(&mut self, line: &str) {
        let _ = writeln!(self.body, "    {line}");
    }
    /// The register name of a wide operand.
    fn wide(&mut self, value: usize) -> String {
        if !std::mem::replace(&mut self.there[value], true) {
            self.line(&format!("Part v{value} = dp_load_part(p{value}, at, cols);"));
        }
        format!("v{value}")
    }
    /// Declares a result: what it is added to, if it is.
    fn result(&mut self, value: usize, write: Write) {
        self.there[value] = true;
        let before = if write == Write::Add { format!(" = dp_load_part(p{value}, at, cols)") } else { String::new() };
        self.line(&format!("Part v{value}{before};"));
    }
    fn store(&mut self, value: usize) {
        if self.values[value].1 == Held::Stored {
            self.line(&format!("dp_store_part(p{value}, v{value}, at, cols);"));
        }
    }
    fn param(&mut self, text: String, arg: Arg) {
        self.params.push(text);
        self.args.push(arg);
    }
    fn norm(&mut self, link: &Link<'_>, nth: usize, write: Write) {
        let adds = write == Write::Add;
        let (x, y) = (self.wide(link.ins[0]), link.outs[0]);
        self.line(&format!("Row r{nth} = dp_row({x}, cols, sums);"));
        let w = link.ins[1];
        match link.op {
            Op::RmsNormGradInput { .. } | Op::LayerNormGradInput { .. } => {
                let dy = self.wide(link.ins[2]);
                self.result(y, write);
                self.line(&format!("dp_slopes<{adds}>(v{y}, r{nth}, p{w}, {dy}, cols, sums);"));
            }
            _ => {
                let bias = link.ins.get(2).copied().unwrap_or(w);
                self.result(y, write);
                self.line(&format!("dp_normed<{adds}>(v{y}, r{nth}, p{w}, p{bias}, cols);"));
            }
        }
    }
    /// An op element by element; `before`: what is done for each pack.
    fn elements(&mut self, link: &Link<'_>, write: Write, before: &str, expression: &str) {
        let mut names: Vec<String> = Vec::new();
        for (at, &value) in link.ins.iter().enumerate() {
            names.push(if of_row(link.op, at) { format!("b{value}.v[j]") } else { format!("{}.v[e].v[j]", self.wide(value)) });
        }
        let adds = write == Write::Add;
        link.outs.iter().for_each(|&value| self.result(value, write));
        let rows = link.ins.iter().enumerate().filter(|(at, _)| of_row(link.op, *at)).map(|(_, &value)| {
            let width = self.values[value].0.elems();
            let at = if width == self.cols { "dp_column(e)".into() } else { format!("dp_column(e) % {width}") };
            format!("Pack<elem, VEC> b{value} = dp_ld_pack<VEC>(p{value}, {at}); ")
        });
        let rows: String = rows.collect();
        let operands = ["x", "y", "z"].iter().zip(&names).map(|(to, from)| format!("{to} = acc(widen({from})), "));
        let operands: String = operands.collect();
        let results = ["u", "v"].iter().zip(&link.outs).map(|(from, to)| format!("dp_set<{adds}>(v{to}, e, j, {from}); "));
        let results: String = results.collect();
        self.line(&format!(
            "{EACH} {{\n            {rows}{before}DP_UNROLL\n            for (int j = 0; j < VEC; j++) {{ acc {operands}u, v; {expression} {results}}}\n        }}"
        ));
    }
}

fn emit(b: &mut Builder<'_>, links: &[Link<'_>], values: &[(LocalType, Held)]) -> Result<(), PrepareError> {
    let (elem, dims) = (b.elem, &values[links[0].outs[0]].0.dims);
    let norm = only(links.iter().filter_map(|l| norm_of(l.op)), "norms")?;
    let curve: Option<Activation> = only(links.iter().filter_map(|l| expression(l.op).and_then(|(_, f)| f)), "activations")?;
    let rate = only(links.iter().filter_map(|l| if let Op::Dropout { rate } = l.op { Some(*rate) } else { None }), "dropouts")?;
    let drops: Vec<Option<Dropped>> = links.iter().map(Dropped::of).collect::<Result<_, _>>()?;
    let cols = row_length(links, values, &drops)?;
    let n: u64 = dims.iter().product();
    for link in links {
        for (at, &value) in link.ins.iter().enumerate().filter(|(at, _)| of_row(link.op, *at)) {
            let ty = &values[value].0;
            if ty.dtype != elem || values[value].1 != Held::Loaded || norm_of(link.op).is_some() && ty.elems() != cols {
                return Err(PrepareError::Sizes(format!("operand {at} of {:?} is {:?}, not a row of {cols} {elem}", link.op, ty.dims)));
            }
        }
        let wide = link.ins.iter().enumerate().filter(|(at, _)| !of_row(link.op, *at)).map(|(_, v)| v).chain(&link.outs);
        if let Some(other) = wide.map(|&v| &values[v].0).find(|t| t.dtype != elem || t.dims != *dims || t.layout != Layout::Dense) {
            return Err(PrepareError::Sizes(format!("{:?} of {} beside rows of {dims:?} {elem}", other.dims, other.dtype)));
        }
    }
    let narrow: Vec<u64> = links.iter().filter(|l| *l.op == Op::AddBias).map(|l| values[l.ins[1]].0.elems()).collect();
    if let Some(width) = narrow.iter().find(|&&w| w == 0 || !cols.is_multiple_of(w)) {
        return Err(PrepareError::Sizes(format!("a bias of {width} elements along rows of {cols}")));
    }
    let pack = b.pack(&[&[cols][..], &narrow, &drops.iter().flatten().map(|d| d.inner.len).collect::<Vec<_>>()].concat());
    let row = row_threads(cols.div_ceil(pack));
    let packs = cols.div_ceil(pack).div_ceil(row);
    if packs > MOST_PACKS {
        return Err(PrepareError::Sizes(format!("a row of {cols} elements is longer than a block's registers hold")));
    }
    let threads = if row == 32 { WARPS } else { row };
    let needed = most_live(links) * packs * pack * elem.size() / 4 + BESIDES;
    if links.len() > 1 && needed > REGISTERS / threads {
        return Err(PrepareError::Sizes(format!("a chain that has {needed} registers of each of {threads} threads")));
    }
    let mut k =
        Kernel { values, cols, params: Vec::new(), args: Vec::new(), head: String::new(), body: String::new(), there: vec![false; values.len()] };
    let which = |held: Held| values.iter().enumerate().filter(move |(_, v)| v.1 == held).map(|(value, _)| value);
    which(Held::Loaded).enumerate().for_each(|(nth, value)| k.param(format!("DP_IN(elem) p{value}"), Arg::In(nth)));
    which(Held::Stored).enumerate().for_each(|(nth, value)| k.param(format!("DP_OUT(elem) p{value}"), Arg::Out(nth)));
    let scalars = rate.is_some() || links.iter().any(|l| *l.op == Op::MeanGrad);
    if scalars {
        k.param("DP_IN(double) scalars".into(), Arg::Scalars);
    }
    for (nth, (link, drop)) in links.iter().zip(&drops).enumerate() {
        let write = if nth + 1 == links.len() { b.d.write } else { Write::Set };
        match (link.op, drop) {
            (Op::Dropout { .. }, Some(drop)) => {
                let members = drop.args(link.context).into_iter().enumerate().map(|(i, arg)| {
                    k.param(format!("i64 d{nth}_{i}"), arg);
                    format!("d{nth}_{i}")
                });
                let members: Vec<String> = members.collect();
                // Found while nothing else is in registers yet.
                k.head += &format!("    Drops d{nth} = {{{}}};\n    Spot s{nth} = dp_spot(d{nth}, scalars, at * cols);\n", members.join(", "));
                let before = format!("acc factor[VEC]; dp_factors(factor, d{nth}, s{nth}, scalars, at * cols, dp_column(e)); ");
                k.elements(link, write, &before, "u = x * factor[j];");
            }
            (Op::AddBias, _) => k.elements(link, write, "", "u = x + y;"),
            (Op::MeanGrad, _) => k.elements(link, write, "", "u = acc(dp_ld(scalars, 0) * dp_ld(scalars, 10));"),
            (op, _) => match expression(op) {
                Some((expression, _)) => k.elements(link, write, "", expression),
                None => k.norm(link, nth, write),
            },
        }
        link.outs.iter().for_each(|&value| k.store(value));
    }
    let (layer, eps) = norm.map_or((false, 0.0), |(which, eps)| (which == Which::Layer, eps));
    let config = b.config(threads).int("T", row).int("E", packs).int("VEC", pack).flag("LAYER", layer).real("EPS", eps);
    let (config, curve) = curve.map_or((config.clone(), ""), |f| activation(config, f));
    let within = drops.iter().flatten().all(|d| d.inner.len.is_multiple_of(cols));
    let fours = drops.iter().flatten().all(Dropped::fours);
    let zigzag = links.iter().any(|l| l.context.order != dplan_ir::order::Order::Straight);
    let (config, drops) = match rate {
        None => (config, [""; 2]),
        Some(rate) => (
            config.flag("ZIGZAG", zigzag).real("KEEP", scale(rate)).flag("FOURS", fours).flag("WITHIN", within),
            [include_str!("text/positions.cuh"), include_str!("text/dropout.cuh")],
        ),
    };
    let Kernel { mut params, mut args, head, body, .. } = k;
    params.extend(["i64 rows".into(), "i64 cols".into()]);
    args.extend([int(n / cols.max(1)), int(cols)]);
    // Left to itself the assembler holds these to fewer registers than they need, and spills.
    let kernel = format!(
        "DP_KERNEL_ALONE(dp_rows)({}) {{\n    DP_SHARED(acc, sums, 0, 32);\n    i64 at = i64(blockIdx.x) * GROUPS + threadIdx.x / T;\n    if (at >= rows) return;\n{head}{body}}}\n",
        params.join(", ")
    );
    let text = config.text(&[curve, include_str!("text/norm.cuh"), include_str!("text/rows.cuh"), drops[0], drops[1], &kernel]);
    let family = if norm.is_some() { Family::Norm } else { Family::Pointwise };
    b.launch(family, "dp_rows", text, Size::blocks((n / cols.max(1)).div_ceil(threads / row), threads, 32 * b.acc.size()), args);
    Ok(())
}

/// A dropout of a block of `x[b,s,…]`, see [`dplan_ir::dropout`].
struct Dropped {
    rate: f64,
    batch: Extent,
    positions: Extent,
    outer: Extent,
    inner: Extent,
}

impl Dropped {
    /// # Errors
    /// If the block is split in more dims than the kernel can tell apart.
    fn of(link: &Link<'_>) -> Result<Option<Dropped>, PrepareError> {
        let Op::Dropout { rate } = link.op else { return Ok(None) };
        let labels = link.context.extents.len();
        let rule = rule(link.op, &[labels], &[labels]);
        let dims: Vec<Extent> = rule.ins[0].iter().map(|&label| link.context.extent(label)).collect();
        let &[batch, positions, ref rest @ ..] = &dims[..] else {
            return Err(PrepareError::Sizes(format!("dropout of a value of {} dims", dims.len())));
        };
        let (outer, inner) = match merged(rest)[..] {
            [] => (Extent::whole(1), Extent::whole(1)),
            [inner] => (Extent::whole(1), inner),
            [outer, inner] => (outer, inner),
            ref more => return Err(PrepareError::Sizes(format!("dropout of a value that is split or padded in {} of its inner dims", more.len()))),
        };
        Ok(Some(Dropped { rate: *rate, batch, positions, outer, inner }))
    }
    /// Whether the block begins and ends with the four elements that one call of the generator decides on.
    fn fours(&self) -> bool {
        [self.inner.start, self.inner.len, self.inner.logical].iter().all(|e| e.is_multiple_of(4))
    }
    /// As the members of `Drops`.
    fn args(&self, context: &OpContext) -> Vec<Arg> {
        let Dropped { rate, batch, positions, outer, inner } = self;
        let first = [int(u64::from(context.node.0)), int(u64::from(threshold(*rate))), Arg::MicroBatch(batch.logical as i64)];
        let block = [outer.len, outer.start, inner.len, inner.start, inner.logical, outer.logical * inner.logical].map(int);
        let places = [int(batch.start), int(positions.len), int(positions.start)];
        first.into_iter().chain(places).chain(order_args_of(context, positions.logical)).chain(block).collect()
    }
}

/// The same elements in the fewest dims: one that is whole goes with the one before it.
fn merged(dims: &[Extent]) -> Vec<Extent> {
    let mut all: Vec<Extent> = Vec::new();
    for &dim in dims {
        match all.last_mut() {
            Some(outer) if dim == Extent::whole(dim.logical) => {
                *outer = Extent { start: outer.start * dim.len, len: outer.len * dim.len, logical: outer.logical * dim.len };
            }
            _ => all.push(dim),
        }
    }
    all
}
