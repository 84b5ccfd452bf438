//! Einsum as one batched matrix product, without copies.
//!
//! The letters of a spec have four roles: only left (`m`), only right (`n`), summed (`k`), common to all three (`batch`). Where the letters of a role
//! have strides that nest, they are one dim with one size and, in each operand, one stride; the product is then a loop over `batch` of
//! out[m, n] = Σₖ left[m, k] · right[k, n] with arbitrary strides, which the `gemm` crate computes in place.

use std::cell::Cell;

use dplan_ir::op::Spec;
use dplan_ir::program::Write;

use super::float::Float;
use super::{PrepareError, Run};

/// Who computes a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Threads {
    /// The calling thread alone: right where there are as many ranks as cores.
    Caller,
    /// The cores of the machine, by rayon's global pool.
    All,
}

thread_local! {
    static IN_GEMM: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is inside the `gemm` crate, whose packing buffers are the only memory a kernel allocates.
pub fn in_gemm() -> bool {
    IN_GEMM.with(Cell::get)
}

/// A letter of one operand. Sizes may be unknown (0) for the rows of an expert, which only the run knows.
#[derive(Clone, Copy, Debug)]
pub struct Letter {
    pub label: char,
    pub size: usize,
    pub stride: usize,
}

/// The label of a number of rows that only the run knows.
pub const ROWS: char = '*';

/// All letters of one role, as one dim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Role {
    size: usize,
    /// Times the number of rows that the run is given.
    per_row: bool,
    /// In left, right and result, 0 where it does not occur.
    strides: [usize; 3],
}

/// A batched matrix product.
#[derive(Debug)]
pub struct Product {
    m: Role,
    n: Role,
    k: Role,
    batch: Role,
}

impl Product {
    /// # Errors
    /// If the letters of a role do not stand together in the same order in each operand.
    pub fn new(spec: &Spec, left: &[usize], right: &[usize], out: &[usize]) -> Result<Product, PrepareError> {
        Product::of_letters(spec, [&letters(&spec.left, left), &letters(&spec.right, right), &letters(&spec.out, out)])
    }

    /// # Errors
    /// If the strides of a role do not nest.
    pub fn of_letters(spec: &Spec, operands: [&[Letter]; 3]) -> Result<Product, PrepareError> {
        let fail = |why: String| PrepareError::Product { spec: format!("{},{}->{}", spec.left, spec.right, spec.out), why };
        let find = |operand: usize, label: char| operands[operand].iter().find(|l| l.label == label).copied();
        let role = |members: [bool; 3]| -> Result<Role, PrepareError> {
            let main = members.iter().position(|&m| m).unwrap_or(0);
            let mut role = Role { size: 1, per_row: false, strides: [0; 3] };
            // Letters of size 1 take no part; the order is that of the first operand which has the role.
            let labels: Vec<char> =
                operands[main].iter().filter(|l| l.size != 1 && (0..3).all(|o| find(o, l.label).is_some() == members[o])).map(|l| l.label).collect();
            for &label in &labels {
                let size = find(main, label).map_or(1, |l| l.size);
                role.size *= if label == ROWS { 1 } else { size };
                role.per_row |= label == ROWS;
            }
            for operand in (0..3).filter(|&o| members[o]) {
                let chain: Vec<Letter> = labels.iter().filter_map(|&l| find(operand, l)).collect();
                if let Some(pair) = chain.windows(2).find(|w| w[0].stride != w[1].stride * w[1].size) {
                    let side = ["left", "right", "result"][operand];
                    return Err(fail(format!("`{}` and `{}` do not stand together in the {side} operand", pair[0].label, pair[1].label)));
                }
                role.strides[operand] = chain.last().map_or(1, |l| l.stride);
            }
            Ok(role)
        };
        for (at, letter) in operands.iter().enumerate().flat_map(|(o, letters)| letters.iter().map(move |l| (o, l))) {
            let elsewhere = (0..3).filter(|&o| o != at).find_map(|o| find(o, letter.label));
            match elsewhere {
                None if letter.size != 1 => return Err(fail(format!("`{}` stands in one operand only", letter.label))),
                Some(other) if other.size != letter.size => {
                    return Err(fail(format!("`{}` has sizes {} and {}", letter.label, letter.size, other.size)));
                }
                _ => {}
            }
        }
        Ok(Product { m: role([true, false, true])?, n: role([false, true, true])?, k: role([true, true, false])?, batch: role([true, true, true])? })
    }

    /// Size and strides (in left, right and result) of m, n, k and batch; a size that only the run knows is 0.
    pub(crate) fn roles(&self) -> [(usize, [usize; 3]); 4] {
        [self.m, self.n, self.k, self.batch].map(|r| (if r.per_row { 0 } else { r.size }, r.strides))
    }

    pub fn run<T: Float>(&self, left: &[T], right: &[T], out: &mut [T], run: Run) {
        self.run_rows(0, left, right, out, run);
    }

    /// The product with `rows` rows in place of [`ROWS`].
    pub fn run_rows<T: Float>(&self, rows: usize, left: &[T], right: &[T], out: &mut [T], run: Run) {
        let size = |r: &Role| if r.per_row { r.size * rows } else { r.size };
        let shape = [size(&self.m), size(&self.n), size(&self.k)];
        for batch in 0..size(&self.batch) {
            let [a, b, c] = self.batch.strides.map(|s| s * batch);
            multiply(
                shape,
                T::ONE,
                Matrix { data: &left[a.min(left.len())..], row: self.m.strides[0], col: self.k.strides[0] },
                Matrix { data: &right[b.min(right.len())..], row: self.k.strides[1], col: self.n.strides[1] },
                MatrixMut { data: &mut out[c..], row: self.m.strides[2], col: self.n.strides[2] },
                run.write,
                run.threads,
            );
        }
    }
}

/// Row-major letters of an operand.
fn letters(labels: &str, sizes: &[usize]) -> Vec<Letter> {
    let mut letters: Vec<Letter> = labels.chars().zip(sizes).map(|(label, &size)| Letter { label, size, stride: 1 }).collect();
    let mut stride = 1;
    for letter in letters.iter_mut().rev() {
        letter.stride = stride;
        stride *= letter.size;
    }
    letters
}

/// A strided matrix to read.
#[derive(Clone, Copy)]
pub struct Matrix<'a, T> {
    pub data: &'a [T],
    pub row: usize,
    pub col: usize,
}

impl<T> Matrix<'_, T> {
    pub fn transposed(self) -> Self {
        Matrix { row: self.col, col: self.row, ..self }
    }
}

/// A strided matrix to write.
pub struct MatrixMut<'a, T> {
    pub data: &'a mut [T],
    pub row: usize,
    pub col: usize,
}

/// out[m, n] ← (out +) alpha · left[m, k] · right[k, n].
///
/// # Panics
/// If a matrix reaches past its data.
pub fn multiply<T: Float>(
    [m, n, k]: [usize; 3],
    alpha: T,
    left: Matrix<'_, T>,
    right: Matrix<'_, T>,
    out: MatrixMut<'_, T>,
    write: Write,
    threads: Threads,
) {
    if m == 0 || n == 0 {
        return;
    }
    let reach = |rows: usize, cols: usize, row: usize, col: usize| if rows * cols == 0 { 0 } else { (rows - 1) * row + (cols - 1) * col + 1 };
    assert!(reach(m, n, out.row, out.col) <= out.data.len(), "result out of bounds");
    assert!(reach(m, k, left.row, left.col) <= left.data.len(), "left operand out of bounds");
    assert!(reach(k, n, right.row, right.col) <= right.data.len(), "right operand out of bounds");
    let parallelism = match threads {
        Threads::Caller => gemm::Parallelism::None,
        Threads::All => gemm::Parallelism::Rayon(0),
    };
    IN_GEMM.with(|flag| flag.set(true));
    // SAFETY: the three asserts above bound every element that is read or written; `out` is borrowed mutably, so it overlaps neither operand; its elements
    // are distinct, since the letters of a result are.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.data.as_mut_ptr(),
            out.col as isize,
            out.row as isize,
            write == Write::Add,
            left.data.as_ptr(),
            left.col as isize,
            left.row as isize,
            right.data.as_ptr(),
            right.col as isize,
            right.row as isize,
            T::ONE,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
    IN_GEMM.with(|flag| flag.set(false));
}
