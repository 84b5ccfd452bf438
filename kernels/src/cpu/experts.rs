//! Mixture of experts on packed rows.
//!
//! A value in top-k layout stores one row for each non-zero entry of the gate, sorted by (expert, token), then rows of zeros up to its capacity. Each
//! kernel walks the gate in that order, so rows need no index: the rows of an expert follow those of the expert before.

use dplan_ir::graph::Layout;
use dplan_ir::op::Spec;
use dplan_ir::program::Write;
use dplan_ir::sharding::LocalType;

use super::block::{Block, BlockMut};
use super::float::{Float, clear, dot, fill};
use super::product::{Letter, Product, ROWS};
use super::{PrepareError, Run};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Routing {
    /// (x, gate) → rows.
    Dispatch,
    /// (rows, gate) → Σ rows.
    Undispatch,
    /// (rows, gate) → Σ gate · rows.
    Combine,
    /// (dy, gate) → gate · dy.
    CombineGradRows,
    /// (dy, rows, gate) → ⟨dy, rows⟩.
    CombineGradGate,
    /// (rows, bias, gate) → rows + the bias of their expert.
    AddBias,
    /// (drows, gate) → Σ of each expert's rows, in order of tokens.
    BiasGrad,
}

/// Ops that move rows between tokens and experts.
#[derive(Debug)]
pub struct Routed {
    routing: Routing,
    experts: usize,
    width: usize,
}

impl Routed {
    /// `gate`: its sizes; rows have `width` elements.
    pub fn new(routing: Routing, gate: &[usize], width: usize) -> Routed {
        Routed { routing, experts: gate[2], width }
    }

    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        let (w, out) = (self.width, T::of_mut(&mut outs[0]));
        let at = |i: usize| i * w..(i + 1) * w;
        match self.routing {
            Routing::Dispatch => {
                let (x, gate) = (T::of(ins[0]), T::of(ins[1]));
                let used = self.rows(gate, |row, token, _, _| fill(&mut out[at(row)], write, |i| x[token * w + i]));
                clear(&mut out[used * w..], write);
            }
            Routing::CombineGradRows => {
                let (dy, gate) = (T::of(ins[0]), T::of(ins[1]));
                let used = self.rows(gate, |row, token, _, g| fill(&mut out[at(row)], write, |i| g * dy[token * w + i]));
                clear(&mut out[used * w..], write);
            }
            Routing::Undispatch => {
                let (rows, gate) = (T::of(ins[0]), T::of(ins[1]));
                clear(out, write);
                self.rows(gate, |row, token, _, _| fill(&mut out[at(token)], Write::Add, |i| rows[row * w + i]));
            }
            Routing::Combine => {
                let (rows, gate) = (T::of(ins[0]), T::of(ins[1]));
                clear(out, write);
                self.rows(gate, |row, token, _, g| fill(&mut out[at(token)], Write::Add, |i| g * rows[row * w + i]));
            }
            Routing::AddBias => {
                let (rows, bias, gate) = (T::of(ins[0]), T::of(ins[1]), T::of(ins[2]));
                let used = self.rows(gate, |row, _, expert, _| fill(&mut out[at(row)], write, |i| rows[row * w + i] + bias[expert * w + i]));
                clear(&mut out[used * w..], write);
            }
            Routing::BiasGrad => {
                let (rows, gate) = (T::of(ins[0]), T::of(ins[1]));
                clear(out, write);
                self.rows(gate, |row, _, expert, _| fill(&mut out[at(expert)], Write::Add, |i| rows[row * w + i]));
            }
            Routing::CombineGradGate => {
                let (dy, rows, gate) = (T::of(ins[0]), T::of(ins[1]), T::of(ins[2]));
                clear(out, write);
                self.rows(gate, |row, token, expert, _| out[token * self.experts + expert] += T::from_f64(dot(&dy[at(token)], &rows[at(row)])));
            }
        }
    }

    /// Visits (row, token, expert, gate) in storage order; returns the number of rows.
    fn rows<T: Float>(&self, gate: &[T], mut visit: impl FnMut(usize, usize, usize, T)) -> usize {
        let mut row = 0;
        for expert in 0..self.experts {
            for (token, gates) in gate.chunks_exact(self.experts).enumerate() {
                if gates[expert] != T::ZERO {
                    visit(row, token, expert, gates[expert]);
                    row += 1;
                }
            }
        }
        row
    }
}

/// One matrix product for each expert, over its rows.
#[derive(Debug)]
pub struct ExpertProduct {
    product: Product,
    experts: usize,
    sides: [Side; 3],
}

/// Where an expert's part of an operand or of the result begins.
#[derive(Clone, Copy, Debug)]
enum Side {
    /// At the expert's first row; rows have this many elements.
    Rows(usize),
    /// At the expert times this stride.
    Dense(usize),
}

impl Side {
    fn start(self, expert: usize, row: usize) -> usize {
        match self {
            Side::Rows(width) => row * width,
            Side::Dense(stride) => expert * stride,
        }
    }
}

impl ExpertProduct {
    /// # Errors
    /// If operands with the letters `bse` are not in top-k layout, or what is left without them is no matrix product.
    pub fn new(spec: &Spec, ins: &[LocalType], outs: &[LocalType]) -> Result<ExpertProduct, PrepareError> {
        let operands = [(&spec.left, &ins[0]), (&spec.right, &ins[1]), (&spec.out, &outs[0])];
        let (mut letters, mut sides) = ([const { Vec::new() }; 3], [Side::Dense(0); 3]);
        for (o, (labels, ty)) in operands.into_iter().enumerate() {
            (letters[o], sides[o]) = expert_letters(labels, ty).map_err(|why| {
                let spec = format!("{},{}->{}", spec.left, spec.right, spec.out);
                PrepareError::Product { spec, why }
            })?;
        }
        let product = Product::of_letters(spec, [&letters[0], &letters[1], &letters[2]])?;
        Ok(ExpertProduct { product, experts: ins[2].dims[2] as usize, sides })
    }

    /// The product of one expert's rows, and how far apart experts are in left, right and result (0 where an operand is packed rows).
    pub(crate) fn parts(&self) -> (&Product, [usize; 3]) {
        let stride = |side: Side| match side {
            Side::Rows(_) => 0,
            Side::Dense(stride) => stride,
        };
        (&self.product, self.sides.map(stride))
    }

    pub fn run<T: Float>(&self, left: &[T], right: &[T], gate: &[T], out: &mut [T], run: Run) {
        let mut row = 0;
        for expert in 0..self.experts {
            let rows = gate.iter().skip(expert).step_by(self.experts).filter(|&&g| g != T::ZERO).count();
            let [a, b, c] = self.sides.map(|side| side.start(expert, row));
            self.product.run_rows(rows, &left[a..], &right[b..], &mut out[c..], run);
            row += rows;
        }
        if let Side::Rows(width) = self.sides[2] {
            clear(&mut out[row * width..], run.write);
        }
    }
}

/// The letters of one expert's part of an operand: packed rows count as one letter, and the expert is no letter any more.
fn expert_letters(labels: &str, ty: &LocalType) -> Result<(Vec<Letter>, Side), String> {
    let mut letters = Vec::new();
    let mut stride = 1;
    let packed = labels.starts_with("bse");
    for (label, &size) in labels.chars().zip(&ty.dims).skip(if packed { 3 } else { 0 }).collect::<Vec<_>>().into_iter().rev() {
        letters.push(Letter { label, size: size as usize, stride });
        stride *= size as usize;
    }
    letters.reverse();
    if packed {
        if ty.layout == Layout::Dense {
            return Err(format!("`{labels}` is not in top-k layout"));
        }
        letters.insert(0, Letter { label: ROWS, size: 0, stride });
        return Ok((letters, Side::Rows(stride)));
    }
    let expert = letters.iter().position(|l| l.label == 'e').map(|at| letters.remove(at));
    Ok((letters, Side::Dense(expert.map_or(0, |l| l.stride))))
}
