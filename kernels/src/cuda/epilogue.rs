//! What a product does to its sums before it writes them.
//!
//! Ops that follow a product element by element can be done where its sums still are in registers: what lies between has no bytes then, and is not rounded. Each [`Tail`] makes a
//! new x of the sum x so far; some read an operand more, which follows those of the product: of the type of the product's own, dense, and laid out as the result is.

use dplan_ir::dtype::DType;
use dplan_ir::op::{Activation, Op};
use dplan_ir::sharding::LocalType;

use super::PrepareError;
use super::pointwise::activation;
use super::product::Shape;
use super::source::Config;

/// An op that a product takes over.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Tail {
    /// x + bias[column].
    Bias,
    /// x + y, at the same place.
    Add,
    /// f(x).
    Act(Activation),
    /// x f'(y), y at the same place: x is the cotangent of f(y).
    ActGrad(Activation),
}

/// Where an operand of a tail lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lies {
    /// As the result does.
    Along,
    /// As a row of it.
    Row,
}

impl Tail {
    /// The tail that an op is, and which of its operands the other one is, if what comes from the product is its operand number `at`.
    pub fn of(op: &Op, at: usize) -> Option<(Tail, Option<usize>)> {
        match (op, at) {
            (Op::AddBias, 0) => Some((Tail::Bias, Some(1))),
            (Op::Add, 0 | 1) => Some((Tail::Add, Some(1 - at))),
            (Op::Act(f), 0) => Some((Tail::Act(*f), None)),
            (Op::ActGrad(f), 1) => Some((Tail::ActGrad(*f), Some(0))),
            _ => None,
        }
    }
    pub fn operand(self) -> Option<Lies> {
        match self {
            Tail::Bias => Some(Lies::Row),
            Tail::Add | Tail::ActGrad(_) => Some(Lies::Along),
            Tail::Act(_) => None,
        }
    }
    fn curve(self) -> Option<Activation> {
        match self {
            Tail::Act(f) | Tail::ActGrad(f) => Some(f),
            Tail::Bias | Tail::Add => None,
        }
    }
}

/// What follows a product, in order, and the types of the operands that it reads.
#[derive(Clone, Copy, Default, Debug)]
pub struct Epilogue<'a> {
    pub tails: &'a [Tail],
    pub operands: &'a [LocalType],
}

/// Operands that a text has names for.
pub const MOST_OPERANDS: usize = 2;

impl Epilogue<'_> {
    /// # Errors
    /// If the operands do not fit a product of this shape, or no text says what is asked.
    pub fn check(&self, s: &Shape, elem: DType) -> Result<(), PrepareError> {
        let lies: Vec<Lies> = self.tails.iter().filter_map(|t| t.operand()).collect();
        let curves = self.tails.iter().filter(|t| t.curve().is_some()).count();
        if lies.len() != self.operands.len() || lies.len() > MOST_OPERANDS || curves > 1 {
            return Err(PrepareError::Sizes(format!("no product is followed by {:?} of {} operands", self.tails, self.operands.len())));
        }
        for (lies, ty) in lies.into_iter().zip(self.operands) {
            let (elems, rows) = match lies {
                Lies::Along => (s.m * s.n * s.z, true),
                Lies::Row => (s.n, s.out[1] == 1 || s.n == 1),
            };
            if ty.dtype != elem || ty.elems() != elems || !rows {
                return Err(PrepareError::Sizes(format!(
                    "{} elements of {} do not lie {lies:?} with a result of {} x {}",
                    ty.elems(),
                    ty.dtype,
                    s.m,
                    s.n
                )));
            }
        }
        Ok(())
    }
    /// The text's `tails`, and what it needs. Config: elem, acc.
    pub fn text(&self, config: Config) -> (Config, String) {
        const EACH: &str = "DP_UNROLL for (int e = 0; e < N; e++)";
        let (mut names, mut lines) = (["p", "q"].into_iter(), String::new());
        for tail in self.tails {
            let place = tail.operand().map(|lies| (names.next().unwrap_or_default(), if lies == Lies::Row { "col" } else { "at" }));
            let load = place.map(|(name, at)| format!("Pack<elem, N> y = dp_ld_pack<N>({name}, {at}); ")).unwrap_or_default();
            let step = match tail {
                Tail::Bias | Tail::Add => "x[e] += acc(widen(y.v[e]));",
                Tail::Act(_) => "{ acc slope; activation(x[e], x[e], slope); }",
                Tail::ActGrad(_) => "{ acc value, slope; activation(acc(widen(y.v[e])), value, slope); x[e] *= slope; }",
            };
            lines += &format!("    {{ {load}{EACH} {step} }}\n");
        }
        let (config, curve) = self.tails.iter().find_map(|t| t.curve()).map_or((config.clone(), ""), |f| activation(config, f));
        let head = "template <int N> DP_DEVICE void tails(acc (&x)[N], DP_IN(elem) p, DP_IN(elem) q, i64 col, i64 at)";
        (config, format!("{curve}{head} {{\n{lines}}}\n"))
    }
}
