//! Products as a library takes them (cuBLASLt), and for which of them it is asked.
//!
//! The library's matrices have contiguous columns: D = X Y, where D is p × q, and X (p × k) and Y (k × q) are each stored so or turned. Of a product whose result has
//! contiguous rows, D is the result turned: X is b turned, Y is a turned.
//!
//! What follows a product it does too, if it is D = f(X Y + C + bias) with one number of the bias for each row of D.
//!
//! **Who multiplies** is looked up in a table, never found out while ranks run: all ranks must round alike. A row is a product that was timed both ways; it speaks for the
//! products of its kind whose sizes are each within a factor of four, the nearest row first. Where no row speaks, the generated kernel is taken. Rows that this machine has
//! measured are kept beside its cubins, and come before those that are known from publications ([`PUBLISHED`]).

use std::fmt;

use dplan_ir::dtype::DType;
use dplan_ir::op::Activation;
use dplan_ir::program::Write;

use super::arch::Arch;
use super::product::Shape;
use super::{Alignment, Tail};

/// What rows stand in without a measurement. `dplan` has none of its own.
pub const PUBLISHED: &str = include_str!("products.txt");
/// The file of measured rows, beside cubins.
pub const FILE: &str = "products.txt";

/// A product, for the library.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Matmul {
    pub elem: DType,
    pub out: DType,
    /// p, q, k.
    pub sizes: [u64; 3],
    pub batch: u64,
    pub left: Factor,
    pub right: Factor,
    /// Elements from column to column of the result, and from matrix to matrix.
    pub pitch: u64,
    pub step: u64,
    pub write: Write,
    pub alignment: Alignment,
    /// Which arguments of the launch are the bias and C, unless C is D ([`Write::Add`]).
    pub bias: Option<usize>,
    pub plus: Option<usize>,
    pub curve: Option<Curve>,
}

/// Where a launch's arguments have the operands of what follows its product.
const FIRST_EXTRA: usize = 4;

/// What the library can make of a sum.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Curve {
    Relu,
    /// By the hyperbolic tangent.
    Gelu,
}

/// One of the two that are multiplied.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Factor {
    /// Which operand of the product it is.
    pub operand: usize,
    /// Whether it is stored with rows and columns changed.
    pub turned: bool,
    pub pitch: u64,
    pub step: u64,
}

impl Matmul {
    /// `None` if some operand has neither contiguous rows nor contiguous columns, or is larger than the library counts.
    pub fn new(s: &Shape, [elem, out]: [DType; 2], write: Write, alignment: Alignment) -> Option<Matmul> {
        // Strides of two dims, the first of which is to be contiguous: whether they are changed, and the pitch.
        let stored = |[first, second]: [u64; 2], [near, far]: [u64; 2]| {
            if near == 1 || first == 1 { Some((false, far.max(first))) } else { (far == 1 || second == 1).then(|| (true, near.max(second))) }
        };
        let turned = s.out[1] == 1 || s.n == 1 && s.out[0] != 1;
        let ([p, q], near, far) = if turned { ([s.n, s.m], s.out[1], s.out[0]) } else { ([s.m, s.n], s.out[0], s.out[1]) };
        let (changed, pitch) = stored([p, q], [near, far])?;
        let (a, b) = (([s.m, s.k], s.a, s.batch[0]), ([s.k, s.n], s.b, s.batch[1]));
        // Of a factor as (rows, columns); turned, its dims and strides change places.
        let factor = |operand: usize, (dims, strides, step): ([u64; 2], [u64; 2], u64)| {
            let order = |[x, y]: [u64; 2]| if turned { [y, x] } else { [x, y] };
            let (turned, pitch) = stored(order(dims), order(strides))?;
            Some(Factor { operand, turned, pitch, step })
        };
        let (left, right) = if turned { (factor(1, b)?, factor(0, a)?) } else { (factor(0, a)?, factor(1, b)?) };
        let most = [p, q, s.k, s.z, pitch, left.pitch, right.pitch].into_iter().max()?;
        let fits = !changed && most < 1 << 31 && [p, q, s.k, s.z].iter().all(|&n| n > 0);
        let (sizes, batch, step) = ([p, q, s.k], s.z, s.batch[2]);
        let made = Matmul { elem, out, sizes, batch, left, right, pitch, step, write, alignment, bias: None, plus: None, curve: None };
        fits.then_some(made)
    }
    /// The product and what follows it; `None` if the library does not do that.
    pub fn followed_by(self, tails: &[Tail]) -> Option<Matmul> {
        let (mut made, mut extras) = (self, FIRST_EXTRA..);
        for tail in tails {
            let at = tail.operand().and_then(|_| extras.next());
            let plain = made.curve.is_none();
            match *tail {
                // A row of the result is a column of D, unless D is turned.
                Tail::Bias if plain && made.bias.is_none() && self.left.operand == 1 && self.out == self.elem => made.bias = at,
                Tail::Add if plain && made.plus.is_none() && self.write == Write::Set && self.out == self.elem => made.plus = at,
                Tail::Act(Activation::Relu) if plain && self.write == Write::Set => made.curve = Some(Curve::Relu),
                Tail::Act(Activation::GeluTanh) if plain && self.write == Write::Set => made.curve = Some(Curve::Gelu),
                Tail::Bias | Tail::Add | Tail::Act(_) | Tail::ActGrad(_) => return None,
            }
        }
        Some(made)
    }
}

/// Who computes a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Winner {
    Generated,
    Library,
}

/// A product that was timed both ways.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Row {
    pub arch: Arch,
    pub elem: DType,
    /// Whether X and Y are stored turned; any way if `None`.
    pub turned: Option<[bool; 2]>,
    /// p, q, k, and how many.
    pub sizes: [u64; 4],
    pub generated_milliseconds: f64,
    pub cublaslt_milliseconds: f64,
}

/// What stands beside the generated products.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Library {
    Absent,
    /// Asked for every product that it takes: to be timed or tested.
    Always,
    Table(&'static [Row]),
}

impl Library {
    /// Whether the library is asked for a product.
    pub fn takes(self, arch: Arch, m: &Matmul) -> bool {
        match self {
            Library::Absent => false,
            Library::Always => true,
            Library::Table(rows) => winner(rows, arch, m) == Winner::Library,
        }
    }
}

/// A row does not speak for products further away than this, in powers of two.
const REACH: f64 = 2.0;

fn winner(rows: &[Row], arch: Arch, m: &Matmul) -> Winner {
    let [p, q, k] = m.sizes;
    let away = |row: &Row| {
        let steps = row.sizes.iter().zip([p, q, k, m.batch]).map(|(&x, y)| ((x as f64).log2() - (y as f64).log2()).abs());
        let (far, sum) = steps.fold((0.0f64, 0.0), |(far, sum), step| (far.max(step), sum + step));
        (far <= REACH).then_some(sum)
    };
    let kind = |row: &&Row| row.arch == arch && row.elem == m.elem && row.turned.is_none_or(|t| t == [m.left.turned, m.right.turned]);
    // The first of equals: what was measured here stands before what others published.
    let speaks = rows.iter().filter(kind).filter_map(|row| Some((away(row)?, row))).min_by(|x, y| x.0.total_cmp(&y.0));
    speaks.map_or(Winner::Generated, |(_, row)| row.winner())
}

impl Row {
    pub fn winner(&self) -> Winner {
        if self.cublaslt_milliseconds < self.generated_milliseconds { Winner::Library } else { Winner::Generated }
    }
    pub fn of(arch: Arch, m: &Matmul, generated_milliseconds: f64, cublaslt_milliseconds: f64) -> Row {
        let [p, q, k] = m.sizes;
        let turned = Some([m.left.turned, m.right.turned]);
        Row { arch, elem: m.elem, turned, sizes: [p, q, k, m.batch], generated_milliseconds, cublaslt_milliseconds }
    }
}

/// As a table has it, and [`parse`] reads it.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |turned: bool| if turned { 't' } else { 'n' };
        let turned = self.turned.map_or_else(|| "any".to_string(), |t| t.map(letter).iter().collect());
        let [p, q, k, z] = self.sizes;
        let times = (self.generated_milliseconds, self.cublaslt_milliseconds);
        write!(f, "{} {} {turned} {p} {q} {k} {z} {} {}", self.arch.name(), self.elem, times.0, times.1)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("line {line}: expected `arch type nn|nt|tn|tt|any p q k batch generated-ms library-ms`, found `{found}`")]
pub struct RowError {
    pub line: usize,
    pub found: String,
}

/// The rows of a table; what follows a `#` is a remark.
///
/// # Errors
/// The first line that is none.
pub fn parse(text: &str) -> Result<Vec<Row>, RowError> {
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.split('#').next().unwrap_or_default().trim()));
    let rows = lines.filter(|(_, line)| !line.is_empty());
    rows.map(|(line, text)| row(text).ok_or_else(|| RowError { line, found: text.into() })).collect()
}

fn row(text: &str) -> Option<Row> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [arch, elem, turned, p, q, k, z, generated, library] = words[..] else { return None };
    let turned = match turned {
        "any" => None,
        "nn" => Some([false, false]),
        "nt" => Some([false, true]),
        "tn" => Some([true, false]),
        "tt" => Some([true, true]),
        _ => return None,
    };
    let size = |word: &str| word.parse::<u64>().ok().filter(|&n| n > 0);
    let time = |word: &str| word.parse::<f64>().ok().filter(|t| t.is_finite() && *t > 0.0);
    Some(Row {
        arch: Arch::from_name(arch)?,
        elem: DType::from_name(elem)?,
        turned,
        sizes: [size(p)?, size(q)?, size(k)?, size(z)?],
        generated_milliseconds: time(generated)?,
        cublaslt_milliseconds: time(library)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(m: u64, n: u64, k: u64) -> Matmul {
        let shape = Shape { m, n, k, z: 1, a: [k, 1], b: [1, k], out: [n, 1], batch: [0; 3] };
        Matmul::new(&shape, [DType::Bf16; 2], Write::Set, Alignment::Packs).unwrap()
    }

    #[test]
    fn published_rows_are_read_and_print_as_they_were() {
        let rows = parse(PUBLISHED).unwrap();
        assert!(!rows.is_empty());
        let printed: Vec<String> = rows.iter().map(Row::to_string).collect();
        assert_eq!(parse(&printed.join("\n")).unwrap(), rows);
    }

    #[test]
    fn what_is_no_row_is_named() {
        let wrong = [
            "sm_90a bf16 nn 1 1 1 1 2",
            "sm_70 bf16 nn 1 1 1 1 2 3",
            "sm_90a bf16 xn 1 1 1 1 2 3",
            "sm_90a bf16 nn 0 1 1 1 2 3",
            "sm_80 f32 tt 1 1 1 1 nan 3",
        ];
        for line in wrong {
            let error = parse(&format!("# nothing\n{line} # but this")).unwrap_err();
            assert_eq!((error.line, &error.found[..]), (2, line));
        }
    }

    #[test]
    fn the_nearest_row_of_the_kind_speaks_and_none_from_afar() {
        let text = "sm_90a bf16 tn 1024 1024 1024 1 2 1\nsm_90a bf16 tn 256 1024 1024 1 1 2\nsm_90a bf16 nn 300 1024 1024 1 2 1\nsm_80 bf16 any 300 1024 1024 1 2 1\nsm_90a bf16 any 256 1024 1024 1 2 1";
        let rows = parse(text).unwrap();
        let takes = |arch, m, n, k| winner(&rows, arch, &product(m, n, k)) == Winner::Library;
        assert!(takes(Arch::Sm90a, 1024, 1024, 1024) && takes(Arch::Sm90a, 1024, 600, 1000));
        // p is n. Of two as near the first speaks.
        assert!(!takes(Arch::Sm90a, 1024, 256, 1024) && !takes(Arch::Sm90a, 1024, 300, 1000));
        assert!(takes(Arch::Sm80, 1024, 300, 1000) && !takes(Arch::Sm100, 1024, 1024, 1024));
        assert!(!takes(Arch::Sm90a, 1024, 5000, 1024) && !takes(Arch::Sm90a, 200, 1024, 1024));
    }

    /// Every way in which operands and results lie, by what the library would read.
    #[test]
    fn the_library_reads_what_the_product_reads() {
        let (m, n, k, z) = (3, 5, 4, 2);
        for ways in 0..8u32 {
            let turned = |bit: u32| ways >> bit & 1 == 1;
            let strides = |turned: bool, [rows, columns]: [u64; 2]| if turned { [1, rows + 2] } else { [columns + 1, 1] };
            let (a, b, out) = (strides(turned(0), [m, k]), strides(turned(1), [k, n]), strides(turned(2), [m, n]));
            let shape = Shape { m, n, k, z, a, b, out, batch: [100, 0, 200] };
            let of = Matmul::new(&shape, [DType::F32; 2], Write::Add, Alignment::Elements).unwrap();
            let [p, q, _] = of.sizes;
            // Where the library finds row i and column j of a factor that has `rows` and is turned or not.
            let at = |f: &Factor, i: u64, j: u64| if f.turned { i * f.pitch + j } else { i + j * f.pitch };
            for (x, y) in (0..p).flat_map(|x| (0..q).map(move |y| (x, y))) {
                let (i, j) = if of.left.operand == 0 { (x, y) } else { (y, x) };
                assert_eq!(x + y * of.pitch, i * out[0] + j * out[1], "{of:?}");
                for d in 0..k {
                    let places = [(of.left.operand, at(&of.left, x, d)), (of.right.operand, at(&of.right, d, y))];
                    for (operand, place) in places {
                        let wanted = if operand == 0 { i * a[0] + d * a[1] } else { d * b[0] + j * b[1] };
                        assert_eq!(place, wanted, "operand {operand} of {of:?}");
                    }
                }
            }
            let steps = [of.left, of.right].map(|f| (f.operand, f.step));
            assert!(steps.contains(&(0, 100)) && steps.contains(&(1, 0)) && of.step == 200);
        }
    }

    #[test]
    fn what_is_contiguous_nowhere_is_not_for_the_library() {
        let shape = Shape { m: 3, n: 5, k: 4, z: 1, a: [4, 1], b: [1, 4], out: [5, 1], batch: [0; 3] };
        let made = |s: Shape| Matmul::new(&s, [DType::Bf16; 2], Write::Set, Alignment::Packs);
        assert!(made(shape).is_some());
        for wrong in [Shape { a: [8, 2], ..shape }, Shape { b: [2, 8], ..shape }, Shape { out: [10, 2], ..shape }, Shape { k: 0, ..shape }] {
            assert_eq!(made(wrong), None, "{wrong:?}");
        }
        // Sizes of one have no step.
        for one in [
            Shape { m: 1, a: [0, 1], out: [0, 1], ..shape },
            Shape { n: 1, b: [1, 0], out: [1, 0], ..shape },
            Shape { k: 1, a: [1, 0], b: [0, 1], ..shape },
        ] {
            let of = made(one).unwrap();
            assert!(of.pitch >= of.sizes[0] && [of.left, of.right].iter().all(|f| f.pitch > 0), "{of:?}");
        }
    }
}
