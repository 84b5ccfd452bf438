//! Matrix products: which kernel, and its strides.
//!
//! A product is out[z, m, n] = Σₖ a[z, m, k] · b[z, k, n] with any strides, as `cpu::product` finds them. For experts, z is the expert and its rows take the
//! place of m or k: their number is in device memory.

use dplan_ir::dtype::DType;
use dplan_ir::op::Spec;

use super::source::{Builder, Config, Size, int};
use super::{Alignment, Arg, Family, PrepareError, moe};
use crate::cpu;

/// Sizes and strides of a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    pub m: u64,
    pub n: u64,
    pub k: u64,
    pub z: u64,
    /// Of m and k in a, of k and n in b, of m and n in the result.
    pub a: [u64; 2],
    pub b: [u64; 2],
    pub out: [u64; 2],
    /// Of z in all three.
    pub batch: [u64; 3],
}

/// Whose rows are an expert's.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Grouped {
    No,
    /// Those of a and the result.
    M(Arg),
    /// Those that are summed over.
    K(Arg),
}

/// # Errors
/// If the letters make no matrix product.
pub fn einsum(b: &mut Builder<'_>, spec: &Spec) -> Result<(), PrepareError> {
    let dims = |d: &[u64]| d.iter().map(|&d| d as usize).collect::<Vec<_>>();
    let (left, right, out) = (dims(&b.d.ins[0].dims), dims(&b.d.ins[1].dims), dims(&b.d.outs[0].dims));
    let product = cpu::product::Product::new(spec, &left, &right, &out).map_err(refused)?;
    let shape = shape(product.roles());
    launch(b, shape, Grouped::No);
    Ok(())
}

/// # Errors
/// As [`einsum`].
pub fn experts(b: &mut Builder<'_>, spec: &Spec) -> Result<(), PrepareError> {
    let product = cpu::experts::ExpertProduct::new(spec, b.d.ins, b.d.outs).map_err(refused)?;
    let (one, experts) = product.parts();
    let mut shape = shape(one.roles());
    (shape.z, shape.batch) = (b.d.ins[2].dims[2], experts.map(|s| s as u64));
    let packed = |labels: &str| labels.starts_with("bse");
    let rows = |t: &dplan_ir::sharding::LocalType| moe::capacity(t.elems(), t.dims[3..].iter().product());
    let capacity = if packed(&spec.left) { rows(&b.d.ins[0]) } else { rows(&b.d.ins[1]) };
    if !packed(&spec.out) && packed(&spec.left) && packed(&spec.right) {
        let map = moe::map(b, 2, capacity);
        launch(b, Shape { k: capacity, ..shape }, Grouped::K(map.starts));
    } else if packed(&spec.out) && packed(&spec.left) && !packed(&spec.right) {
        let map = moe::map(b, 2, capacity);
        launch(b, Shape { m: capacity, ..shape }, Grouped::M(map.starts));
        if !b.add() {
            let width = b.d.outs[0].dims[3..].iter().product();
            moe::tail(b, &map, width);
        }
    } else {
        let why = "the left operand and either the result or the right one must be packed rows".into();
        return Err(PrepareError::Product { spec: format!("{},{}->{}", spec.left, spec.right, spec.out), why });
    }
    Ok(())
}

fn refused(error: cpu::PrepareError) -> PrepareError {
    match error {
        cpu::PrepareError::Product { spec, why } => PrepareError::Product { spec, why },
        other => PrepareError::Sizes(other.to_string()),
    }
}

fn shape([m, n, k, z]: [(usize, [usize; 3]); 4]) -> Shape {
    let u = |x: usize| x as u64;
    Shape {
        m: u(m.0),
        n: u(n.0),
        k: u(k.0),
        z: u(z.0),
        a: [u(m.1[0]), u(k.1[0])],
        b: [u(k.1[1]), u(n.1[1])],
        out: [u(m.1[2]), u(n.1[2])],
        batch: z.1.map(u),
    }
}

fn launch(b: &mut Builder<'_>, shape: Shape, grouped: Grouped) {
    match b.elem {
        DType::Bf16 | DType::F16 => matrix_units(b, shape, grouped),
        DType::F32 | DType::F64 | DType::I32 => plain(b, shape, grouped),
    }
}

/// On the arithmetic units: f32 and f64, so that nothing is rounded that the type does not round.
fn plain(b: &mut Builder<'_>, s: Shape, grouped: Grouped) {
    const TILE: u64 = 64;
    let config = Config::default()
        .ty("in_t", b.elem)
        .ty("out_t", b.d.outs[0].dtype)
        .ty("acc", b.acc)
        .int("THREADS", 256)
        .flag("ADD", b.add())
        .flag("A_ROWS", s.a[0] == 1 && s.m > 1)
        .flag("B_ROWS", s.b[0] == 1 && s.k > 1);
    let text = group(config, grouped).text(&[include_str!("text/gemm_plain.cuh")]);
    let blocks = s.z * s.m.div_ceil(TILE) * s.n.div_ceil(TILE);
    let shared = 2 * 16 * (TILE + 4) * b.acc.size();
    b.launch(Family::Gemm, "dp_gemm_plain", text, Size::blocks(blocks, 256, shared), args(&s, grouped));
}

/// Tile of a block, tile of a warp, both m × n; depth and number of the ring's tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Tiles {
    block: [u64; 2],
    warp: [u64; 2],
    deep: u64,
    stages: u64,
}

/// Best first: large tiles read least. A smaller one is taken where the larger would leave most of a GPU's ~132 multiprocessors without work.
const TILES: [Tiles; 2] =
    [Tiles { block: [128, 128], warp: [64, 32], deep: 32, stages: 4 }, Tiles { block: [64, 64], warp: [32, 32], deep: 32, stages: 4 }];
const ENOUGH_BLOCKS: u64 = 96;

/// On the matrix units.
fn matrix_units(b: &mut Builder<'_>, s: Shape, grouped: Grouped) {
    let blocks = |t: &Tiles| s.z * s.m.div_ceil(t.block[0]) * s.n.div_ceil(t.block[1]);
    let t = TILES.into_iter().find(|t| blocks(t) >= ENOUGH_BLOCKS).unwrap_or(TILES[TILES.len() - 1]);
    let (a_rows, b_rows) = (s.a[0] == 1 && s.a[1] != 1, s.b[0] == 1 && s.b[1] != 1);
    let contiguous = (a_rows || s.a[1] == 1) && (b_rows || s.b[1] == 1);
    // Sixteen bytes at a time: every row begins at a multiple of eight elements.
    let pitches = [if a_rows { s.a[1] } else { s.a[0] }, if b_rows { s.b[1] } else { s.b[0] }, s.batch[0], s.batch[1]];
    let asynchronous = contiguous && b.d.alignment == Alignment::Packs && pitches.iter().all(|p| p % 8 == 0);
    let pairs = b.d.alignment == Alignment::Packs && s.out[1] == 1 && [s.n, s.out[0], s.batch[2]].iter().all(|x| x % 2 == 0);
    let threads = t.block[0] / t.warp[0] * (t.block[1] / t.warp[1]) * 32;
    let config = Config::default()
        .ty("elem", b.elem)
        .ty("out_t", b.d.outs[0].dtype)
        .int("THREADS", threads)
        .flag("ADD", b.add())
        .flag("ASYNC", asynchronous)
        .flag("A_ROWS", a_rows)
        .flag("B_ROWS", b_rows)
        .flag("PAIRS", pairs)
        .int("BM", t.block[0])
        .int("BN", t.block[1])
        .int("BK", t.deep)
        .int("WM", t.warp[0])
        .int("WN", t.warp[1])
        .int("STAGES", t.stages);
    let text = group(config, grouped).text(&[include_str!("text/tiles.cuh"), include_str!("text/gemm_mma.cuh")]);
    let tile = |rows: bool, side: u64| if rows { t.deep * (side + 8) } else { side * (t.deep + 8) };
    // Of b, neighbours in k are rows of [n][k]; of a, neighbours in m are rows of [k][m].
    let b_tile = if b_rows { t.block[1] * (t.deep + 8) } else { t.deep * (t.block[1] + 8) };
    let shared = t.stages * (tile(a_rows, t.block[0]) + b_tile) * 2;
    b.launch(Family::Gemm, "dp_gemm_mma", text, Size::blocks(blocks(&t), threads, shared), args(&s, grouped));
}

fn group(config: Config, grouped: Grouped) -> Config {
    config.int(
        "GROUPED",
        match grouped {
            Grouped::No => 0,
            Grouped::M(_) => 1,
            Grouped::K(_) => 2,
        },
    )
}

fn args(s: &Shape, grouped: Grouped) -> Vec<Arg> {
    let starts = match grouped {
        Grouped::No => Arg::Scalars,
        Grouped::M(starts) | Grouped::K(starts) => starts,
    };
    let sizes = [s.m, s.n, s.k, s.a[0], s.a[1], s.b[0], s.b[1], s.out[0], s.out[1], s.batch[0], s.batch[1], s.batch[2]];
    [Arg::In(0), Arg::In(1), Arg::Out(0), starts].into_iter().chain(sizes.map(int)).collect()
}
