//! cuBLASLt: the functions of it that are called, their numbers, and products described to it.
//!
//! A product is described once, when its kernel would be loaded: layouts of its matrices, the algorithm that the library's heuristic puts first; where it has none, the generated kernel is launched after all. Each call then gives addresses alone.
//! Sums of parts are kept in the type that is computed in and added in a fixed order, so that equal calls give equal bits. The working memory is the caller's, one for each stream.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::OnceLock;

use dplan_ir::dtype::DType;
use dplan_ir::program::Write;
use dplan_kernels::cuda::Alignment;
use dplan_kernels::cuda::library::{self, Curve, Factor, Matmul, Row};
use dplan_kernels::jit::{self, Cache};

use super::AbsentError;
use super::cuda::Handle;
use super::library::{Opened, functions};
use crate::runtime::cuda::driver::{Address, DriverError, Queue, Value};

/// Bytes that a product may use besides its operands: what NVIDIA gives its own calls on Hopper.
pub const WORKSPACE: u64 = 32 << 20;

functions! {
    /// The library.
    Functions {
        create = "cublasLtCreate"(*mut Handle),
        destroy = "cublasLtDestroy"(Handle),
        property = "cublasLtGetProperty"(c_int, *mut c_int),
        matmul_create = "cublasLtMatmulDescCreate"(*mut Handle, c_int, c_int),
        matmul_destroy = "cublasLtMatmulDescDestroy"(Handle),
        matmul_set = "cublasLtMatmulDescSetAttribute"(Handle, c_int, *const c_void, usize),
        layout_create = "cublasLtMatrixLayoutCreate"(*mut Handle, c_int, u64, u64, i64),
        layout_destroy = "cublasLtMatrixLayoutDestroy"(Handle),
        layout_set = "cublasLtMatrixLayoutSetAttribute"(Handle, c_int, *const c_void, usize),
        preference_create = "cublasLtMatmulPreferenceCreate"(*mut Handle),
        preference_destroy = "cublasLtMatmulPreferenceDestroy"(Handle),
        preference_set = "cublasLtMatmulPreferenceSetAttribute"(Handle, c_int, *const c_void, usize),
        heuristic = "cublasLtMatmulAlgoGetHeuristic"(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Found, *mut c_int),
        matmul = "cublasLtMatmul"(Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64, Handle, *const Algorithm, u64, usize, Handle),
    }
}

/// `cublasLtMatmulAlgo_t`. Its bits are the library's business.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Found {
    algorithm: Algorithm,
    workspace: usize,
    status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

// Attributes of a product, of a matrix, and of a preference.
const LEFT_TURNED: c_int = 3;
const RIGHT_TURNED: c_int = 4;
const EPILOGUE: c_int = 7;
const BIAS: c_int = 8;
const BATCH: c_int = 5;
const BATCH_STEP: c_int = 6;
const MOST_WORKSPACE: c_int = 1;
const REDUCTIONS: c_int = 3;
/// Of X, Y, C and D.
const ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];

/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`.
const IN_COMPUTE_TYPE: u32 = 2;

/// The library, opened, and what was described to it.
pub struct CublasLt {
    functions: Functions,
    handle: Handle,
    version: [c_int; 3],
    products: Vec<Option<Described>>,
}

/// A product that was described, by its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Product(usize);

/// What the library has for a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Algorithms {
    None,
    One,
}

/// `CUBLAS_STATUS_NOT_SUPPORTED`.
const NOT_SUPPORTED: c_int = 15;

/// A product's parts; those that could not be made are null.
struct Described {
    of: Matmul,
    matmul: Handle,
    /// Of X, Y and D.
    layouts: [Handle; 3],
    algorithm: Algorithm,
    workspace: usize,
}

impl CublasLt {
    /// Opens the library. The calling thread has a device's context.
    ///
    /// # Errors
    /// If it is not installed, or refuses.
    pub fn open() -> Result<CublasLt, AbsentError> {
        CublasLt::first(&jit::search("DPLAN_CUBLASLT", &["libcublasLt.so.12", "libcublasLt.so.13", "libcublasLt.so"]))
    }
    /// The same, from the first of `places` that there is.
    ///
    /// # Errors
    /// As [`CublasLt::open`].
    pub fn first(places: &[PathBuf]) -> Result<CublasLt, AbsentError> {
        let hint =
            "all products are computed by generated kernels (`pip install nvidia-cublas-cu12`, or DPLAN_CUBLASLT, the path of libcublasLt.so.12)";
        let functions = Functions::of(Opened::first("cuBLASLt", hint, places)?)?;
        let (mut handle, mut version) = (null_mut(), [0; 3]);
        // SAFETY: places to write to.
        unsafe {
            check("cublasLtCreate", (functions.create)(&raw mut handle))?;
            for (which, number) in (0..).zip(&mut version) {
                (functions.property)(which, number);
            }
        }
        Ok(CublasLt { functions, handle, version, products: Vec::new() })
    }
    /// Major, minor, patch: another one may round otherwise.
    pub fn version(&self) -> [c_int; 3] {
        self.version
    }

    /// Describes a product; `None` if the library has no algorithm for it, which then its kernel computes.
    ///
    /// # Errors
    /// If the library refuses something else.
    pub fn describe(&mut self, of: &Matmul) -> Result<Option<Product>, DriverError> {
        let mut made = Described { of: *of, matmul: null_mut(), layouts: [null_mut(); 3], algorithm: Algorithm::default(), workspace: 0 };
        match self.make(&mut made) {
            Ok(Algorithms::One) => {
                self.products.push(Some(made));
                Ok(Some(Product(self.products.len() - 1)))
            }
            Ok(Algorithms::None) => {
                self.give_back(&made);
                Ok(None)
            }
            Err(error) => {
                self.give_back(&made);
                Err(DriverError { why: format!("{} ({of:?})", error.why), ..error })
            }
        }
    }
    pub fn forget(&mut self, product: Product) {
        if let Some(made) = self.products[product.0].take() {
            self.give_back(&made);
        }
    }

    /// Queues a product of a launch's arguments to a stream, with [`WORKSPACE`] bytes that nothing else uses there.
    ///
    /// # Errors
    /// If the library refuses.
    pub fn multiply(&self, product: Product, args: &[Value], workspace: Address, stream: Queue) -> Result<(), DriverError> {
        let Some(made) = &self.products[product.0] else {
            return Err(DriverError { call: "cublasLtMatmul", why: "a product that was given back".into() });
        };
        let (f, [x, y, d]) = (&self.functions, made.layouts);
        let at = |arg: usize| match args.get(arg) {
            Some(Value::Memory { at, .. } | Value::Tensor { at, .. }) => Ok(at.0),
            Some(Value::Int(_)) | None => Err(DriverError { call: "cublasLtMatmul", why: format!("argument {arg} is no matrix") }),
        };
        let (of_x, of_y, out) = (at(made.of.left.operand)?, at(made.of.right.operand)?, at(2)?);
        let plus = made.of.plus.map_or(Ok(out), at)?;
        if let Some(bias) = made.of.bias {
            // SAFETY: read before the call returns.
            check("cublasLtMatmulDescSetAttribute", unsafe { set(f.matmul_set, made.matmul, BIAS, &at(bias)?) })?;
        }
        let adds = made.of.write == Write::Add || made.of.plus.is_some();
        let (one, add) = (1.0, if adds { 1.0 } else { 0.0 });
        let factors = [Factors::new(scale(made.of.elem), one), Factors::new(scale(made.of.elem), add)];
        let [alpha, beta] = factors.each_ref().map(|f| (&raw const *f).cast::<c_void>());
        // SAFETY: the addresses are those of matrices as they were described, and the numbers outlive the call.
        check("cublasLtMatmul", unsafe {
            (f.matmul)(
                self.handle,
                made.matmul,
                alpha,
                of_x,
                x,
                of_y,
                y,
                beta,
                plus,
                d,
                out,
                d,
                &raw const made.algorithm,
                workspace.0,
                made.workspace,
                stream.0 as Handle,
            )
        })
    }

    fn make(&self, made: &mut Described) -> Result<Algorithms, DriverError> {
        let (f, of) = (&self.functions, made.of);
        let [p, q, k] = of.sizes;
        let stored = |of: &Factor, rows: u64, columns: u64| if of.turned { [columns, rows] } else { [rows, columns] };
        let matrices = [
            (of.elem, stored(&of.left, p, k), of.left.pitch, of.left.step),
            (of.elem, stored(&of.right, k, q), of.right.pitch, of.right.step),
            (of.out, [p, q], of.pitch, of.step),
        ];
        let turned = |factor: &Factor| c_int::from(factor.turned);
        // SAFETY: handles to write to; attributes are read before the calls return.
        unsafe {
            check("cublasLtMatmulDescCreate", (f.matmul_create)(&raw mut made.matmul, compute(of.elem), scale(of.elem)))?;
            for (attribute, value) in [(LEFT_TURNED, turned(&of.left)), (RIGHT_TURNED, turned(&of.right))] {
                check("cublasLtMatmulDescSetAttribute", set(f.matmul_set, made.matmul, attribute, &value))?;
            }
            check("cublasLtMatmulDescSetAttribute", set(f.matmul_set, made.matmul, EPILOGUE, &epilogue(&of)))?;
            if of.bias.is_some() {
                // An address is asked for before there is one: any that is aligned as each will be.
                check("cublasLtMatmulDescSetAttribute", set(f.matmul_set, made.matmul, BIAS, &u64::from(aligned(&of, of.out))))?;
            }
            for (layout, (dtype, [rows, columns], pitch, step)) in made.layouts.iter_mut().zip(matrices) {
                check("cublasLtMatrixLayoutCreate", (f.layout_create)(layout, type_of(dtype), rows, columns, pitch as i64))?;
                check("cublasLtMatrixLayoutSetAttribute", set(f.layout_set, *layout, BATCH, &(of.batch as i32)))?;
                check("cublasLtMatrixLayoutSetAttribute", set(f.layout_set, *layout, BATCH_STEP, &(step as i64)))?;
            }
            let mut preference = null_mut();
            check("cublasLtMatmulPreferenceCreate", (f.preference_create)(&raw mut preference))?;
            let found = self.search(made, preference);
            let gone = check("cublasLtMatmulPreferenceDestroy", (f.preference_destroy)(preference));
            let found = found?;
            gone?;
            let Some(found) = found else { return Ok(Algorithms::None) };
            (made.algorithm, made.workspace) = (found.algorithm, found.workspace);
            Ok(Algorithms::One)
        }
    }

    /// # Safety
    /// The parts are made, but for the algorithm.
    unsafe fn search(&self, made: &Described, preference: Handle) -> Result<Option<Found>, DriverError> {
        let (f, [x, y, d]) = (&self.functions, made.layouts);
        let (call, mut found, mut count) = ("cublasLtMatmulAlgoGetHeuristic", Found::default(), 0);
        // SAFETY: a result to write to; attributes are read before the calls return.
        unsafe {
            let prefer = |status| check("cublasLtMatmulPreferenceSetAttribute", status);
            prefer(set(f.preference_set, preference, MOST_WORKSPACE, &WORKSPACE))?;
            prefer(set(f.preference_set, preference, REDUCTIONS, &IN_COMPUTE_TYPE))?;
            for (attribute, dtype) in ALIGNMENTS.into_iter().zip([made.of.elem, made.of.elem, made.of.out, made.of.out]) {
                prefer(set(f.preference_set, preference, attribute, &aligned(&made.of, dtype)))?;
            }
            match (f.heuristic)(self.handle, made.matmul, x, y, d, d, preference, 1, &raw mut found, &raw mut count) {
                NOT_SUPPORTED => return Ok(None),
                status => check(call, status)?,
            }
        }
        if count == 0 || found.status == NOT_SUPPORTED {
            return Ok(None);
        }
        check(call, found.status)?;
        Ok((found.workspace as u64 <= WORKSPACE).then_some(found))
    }

    fn give_back(&self, made: &Described) {
        // SAFETY: made once and given back once. There is nobody to tell of a failure.
        unsafe {
            for layout in made.layouts.into_iter().filter(|l| !l.is_null()) {
                (self.functions.layout_destroy)(layout);
            }
            if !made.matmul.is_null() {
                (self.functions.matmul_destroy)(made.matmul);
            }
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        for made in std::mem::take(&mut self.products).iter().flatten() {
            self.give_back(made);
        }
        // SAFETY: created and destroyed once.
        unsafe { (self.functions.destroy)(self.handle) };
    }
}

/// Bytes that all addresses of elements of a type are multiples of.
fn aligned(of: &Matmul, dtype: DType) -> u32 {
    match of.alignment {
        Alignment::Packs => 16,
        Alignment::Elements => dtype.size() as u32,
    }
}

/// `cublasLtEpilogue_t`.
fn epilogue(of: &Matmul) -> c_int {
    let bias = if of.bias.is_some() { 4 } else { 0 };
    match of.curve {
        None if bias == 0 => 1,
        None => bias,
        Some(Curve::Relu) => 2 | bias,
        Some(Curve::Gelu) => 32 | bias,
    }
}

/// The table of products: what was measured on this machine, then what others published. Read once a process.
pub(super) fn rows(cache: &Cache) -> Result<&'static [Row], AbsentError> {
    static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
    if let Some(rows) = ROWS.get() {
        return Ok(rows);
    }
    let path = cache.folder().join(library::FILE);
    let measured = std::fs::read_to_string(&path).unwrap_or_default();
    let parsed = |text: &str| library::parse(text).map_err(|why| AbsentError::Products { path: path.display().to_string(), why });
    let rows = [parsed(&measured)?, parsed(library::PUBLISHED)?].concat();
    Ok(ROWS.get_or_init(|| rows))
}

/// A number in the type that results are scaled in.
#[repr(C)]
union Factors {
    float: f32,
    double: f64,
}

impl Factors {
    fn new(scale: c_int, value: f64) -> Factors {
        if scale == type_of(DType::F64) { Factors { double: value } } else { Factors { float: value as f32 } }
    }
}

/// # Safety
/// `of` is what the function is for.
unsafe fn set<T>(function: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int, of: Handle, attribute: c_int, value: &T) -> c_int {
    // SAFETY: by the caller's promise; the value is as long as is said.
    unsafe { function(of, attribute, (&raw const *value).cast(), size_of::<T>()) }
}

/// `cudaDataType_t`.
fn type_of(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 0,
        DType::F64 => 1,
        DType::F16 => 2,
        DType::I32 => 10,
        DType::Bf16 => 14,
    }
}

/// The type that results are scaled in.
fn scale(elem: DType) -> c_int {
    type_of(elem.accumulator())
}

/// `cublasComputeType_t`: f32 stays f32.
fn compute(elem: DType) -> c_int {
    match elem {
        DType::F64 => 70,
        DType::F32 | DType::F16 | DType::Bf16 => 68,
        DType::I32 => 72,
    }
}

fn check(call: &'static str, status: c_int) -> Result<(), DriverError> {
    if status == 0 { Ok(()) } else { Err(DriverError { call, why: name(status) }) }
}

/// `cublasStatus_t`.
fn name(status: c_int) -> String {
    let name = match status {
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        7 => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        NOT_SUPPORTED => "CUBLAS_STATUS_NOT_SUPPORTED",
        other => return format!("error {other}"),
    };
    name.into()
}
