//! cuBLASLt's real loading path against a C++ stand-in: products of every type, layout and number as its headers have them, and what it refuses.

#[path = "common/by_library.rs"]
mod by_library;
mod common;

use std::path::PathBuf;

use by_library::{ByLibrary, build};
use dplan::runtime::cuda::driver::{Access, Address, Value};
use dplan::runtime::cuda::gpu::AbsentError;
use dplan::runtime::cuda::gpu::cublaslt::CublasLt;
use dplan::safetensors::{decode, encode};
use dplan_ir::dtype::DType;
use dplan_ir::op::Activation;
use dplan_ir::program::Write;
use dplan_ir::splitmix;
use dplan_kernels::cuda::epilogue::Lies;
use dplan_kernels::cuda::library::Matmul;
use dplan_kernels::cuda::product::Shape;
use dplan_kernels::cuda::{Alignment, Tail};
use libloading::Library;

/// Numbers in memory, at an address that is aligned to so many bytes and not to twice as many.
struct Numbers {
    bytes: Vec<u8>,
    skip: usize,
    dtype: DType,
}

impl Numbers {
    fn new(values: impl Iterator<Item = f64>, dtype: DType, aligned: usize) -> Numbers {
        let values: Vec<f64> = values.collect();
        let bytes = vec![0; values.len() * dtype.size() as usize + 512];
        let skip = bytes.as_ptr().align_offset(256) + aligned;
        let mut made = Numbers { bytes, skip, dtype };
        values.iter().enumerate().for_each(|(i, &v)| encode(dtype, v, &mut made.bytes[skip..], i));
        made
    }
    fn get(&self, i: u64) -> f64 {
        decode(self.dtype, &self.bytes[self.skip..], i as usize)
    }
    fn value(&self) -> Value {
        let at = Address(self.bytes.as_ptr() as u64 + self.skip as u64);
        Value::Memory { at, bytes: (self.bytes.len() - 512) as u64, access: Access::Write }
    }
}

/// Strides of a matrix that lies either way, perhaps with a gap between its rows, and the elements from it to the next.
fn lie(r: &mut dyn FnMut(u64) -> u64, [rows, columns]: [u64; 2]) -> ([u64; 2], u64) {
    let gap = if r(2) == 0 { 0 } else { r(9) };
    let (near, far) = if r(2) == 0 { (columns, rows) } else { (rows, columns) };
    let pitch = near + gap;
    let strides = if near == columns { [pitch, 1] } else { [1, pitch] };
    // As everywhere: along a dim of one there is no step.
    ([if rows == 1 { 0 } else { strides[0] }, if columns == 1 { 0 } else { strides[1] }], pitch * far)
}

/// What may follow a product.
const TAILS: [&[Tail]; 7] = [
    &[],
    &[Tail::Bias],
    &[Tail::Add],
    &[Tail::Bias, Tail::Add],
    &[Tail::Add, Tail::Bias, Tail::Act(Activation::Relu)],
    &[Tail::Bias, Tail::Act(Activation::GeluTanh)],
    &[Tail::Act(Activation::Relu)],
];

#[test]
fn products_meet_the_reference() {
    let folder = common::scratch("cuda_library");
    let Some(path) = build(&folder, "libcublasLt.so", &["libcublaslt.cpp"]) else { return };
    // SAFETY: its initialisers are those of C++; the function has this type.
    let stand_in = unsafe { Library::new(&path).unwrap() };
    // SAFETY: as above.
    let live = || unsafe { stand_in.get::<unsafe extern "C" fn() -> i32>(b"stand_in_live_lt").unwrap()() };
    let mut library = ByLibrary::open(&path);
    let mut state = 77;
    let mut r = |n: u64| splitmix::next(&mut state) % n;
    let types = [
        (DType::F32, DType::F32),
        (DType::F64, DType::F64),
        (DType::Bf16, DType::Bf16),
        (DType::Bf16, DType::F32),
        (DType::F16, DType::F16),
        (DType::F16, DType::F32),
    ];
    let (mut ways, mut followed) = (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
    for case in 0..300 {
        let (elem, out) = types[r(6) as usize];
        let mut size = || [1, 2, 3, 7, 8, 17, 40][r(7) as usize];
        let [m, n, k, z] = [size(), size(), size(), size() % 4 + 1];
        let ((a, step_a), (b, step_b), (c, step_c)) = (lie(&mut r, [m, k]), lie(&mut r, [k, n]), lie(&mut r, [m, n]));
        let step_a = if r(4) == 0 { 0 } else { step_a };
        let shape = Shape { m, n, k, z, a, b, out: c, batch: [step_a, step_b, step_c] };
        let (write, alignment) = ([Write::Set, Write::Add][r(2) as usize], [Alignment::Packs, Alignment::Elements][r(2) as usize]);
        let plain = Matmul::new(&shape, [elem, out], write, alignment).unwrap_or_else(|| panic!("{shape:?}"));
        let tails: &[Tail] = TAILS[r(TAILS.len() as u64) as usize];
        let product = plain.followed_by(tails).unwrap_or(plain);
        let tails = if product == plain { &[] } else { tails };
        followed.extend(tails.iter().map(|t| format!("{t:?}")));
        ways.insert((product.left.operand, product.left.turned, product.right.turned));
        let aligned = |dtype: DType| if alignment == Alignment::Packs { 16 } else { dtype.size() as usize };
        let mut numbers = |n: u64, dtype: DType| Numbers::new((0..n + 64).map(|_| r(2000) as f64 / 500.0 - 2.0), dtype, aligned(dtype));
        let (x, y, to) = (numbers(m * k * z * 10, elem), numbers(k * n * z * 10, elem), numbers(m * n * z * 10, out));
        let before: Vec<f64> = (0..m * n * z * 10).map(|i| to.get(i)).collect();
        library.describe(&product);
        // What C is added to lies as the result does; rows of it beside columns, if the result is stored turned.
        let (bias, plus) = (numbers(n, elem), numbers(m * n * z * 10, elem));
        let extras = tails.iter().filter_map(|t| t.operand()).map(|lies| if lies == Lies::Row { bias.value() } else { plus.value() });
        let args: Vec<Value> = [x.value(), y.value(), to.value(), Value::Int(0)].into_iter().chain(extras).collect();
        library.multiply(&product, &args);
        let mut written = std::collections::BTreeSet::new();
        for (w, i, j) in (0..z).flat_map(|w| (0..m).flat_map(move |i| (0..n).map(move |j| (w, i, j)))) {
            let sum: f64 = (0..k).map(|d| x.get(w * step_a + i * a[0] + d * a[1]) * y.get(w * step_b + d * b[0] + j * b[1])).sum();
            let at = w * step_c + i * c[0] + j * c[1];
            let start = if write == Write::Add { before[at as usize] } else { 0.0 };
            let added = bias.get(j).abs() + plus.get(at).abs() + before[at as usize].abs();
            let terms: f64 =
                (0..k).map(|d| (x.get(w * step_a + i * a[0] + d * a[1]) * y.get(w * step_b + d * b[0] + j * b[1])).abs()).sum::<f64>() + added;
            let sum = tails.iter().fold(sum, |x, tail| match tail {
                Tail::Bias => x + bias.get(j),
                Tail::Add => x + plus.get(at),
                Tail::Act(Activation::Relu) => x.max(0.0),
                Tail::Act(_) | Tail::ActGrad(_) => 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh()),
            });
            let mut bytes = [0; 8];
            encode(out, sum + start, &mut bytes, 0);
            let want = decode(out, &bytes, 0);
            let near = (to.get(at) - want).abs() <= last_place(out, want) + terms * 16.0 * (k as f64).sqrt() * 2f64.powi(-53);
            assert!(near, "case {case} {product:?}: [{w}, {i}, {j}] is {}, not {want}", to.get(at));
            written.insert(at);
        }
        assert!(
            (0..before.len() as u64).all(|i| written.contains(&i) || to.get(i) == before[i as usize]),
            "case {case} {product:?} writes beside its result"
        );
    }
    assert!(ways.len() == 8 && followed.len() == 4, "only {ways:?}, {followed:?}");
    assert!(live() > 100);
    drop(library);
    assert_eq!(live(), 0, "something was not given back");
    refuses(&path, &live);
}

/// A unit in the last place of a number: the stand-in sums in double, so one rounding to the result's type is all that may fall to the other side.
fn last_place(dtype: DType, value: f64) -> f64 {
    let (digits, smallest) = match dtype {
        DType::Bf16 => (-7, -133),
        DType::F16 => (-10, -24),
        DType::F32 => (-23, -149),
        DType::F64 | DType::I32 => (-52, -1074),
    };
    (value.abs() * 2f64.powi(digits)).max(2f64.powi(smallest))
}

/// What the library has no algorithm for is said, and given back: its kernel computes it.
fn refuses(path: &std::path::Path, live: &dyn Fn() -> i32) {
    let mut library = CublasLt::first(&[path.to_path_buf()]).unwrap();
    assert_eq!(library.version(), [12, 9, 1]);
    let shape = Shape { m: 3, n: 5, k: 4, z: 1, a: [4, 1], b: [1, 4], out: [5, 1], batch: [0; 3] };
    let product = |out| Matmul::new(&shape, [DType::Bf16, out], Write::Set, Alignment::Packs).unwrap();
    let before = live();
    assert_eq!(library.describe(&product(DType::F16)).unwrap(), None);
    assert_eq!(live(), before, "a product that failed was not given back");
    let made = library.describe(&product(DType::F32)).unwrap().unwrap();
    library.forget(made);
    assert_eq!(live(), before);
    drop(library);
    assert!(matches!(CublasLt::first(&[PathBuf::from("/nowhere/libcublasLt.so")]), Err(AbsentError::Library { what: "cuBLASLt", .. })));
}
