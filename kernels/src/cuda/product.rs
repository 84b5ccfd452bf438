//! Matrix products: which kernel, and its strides.
//!
//! A product is out[z, m, n] = Σₖ a[z, m, k] · b[z, k, n] with any strides, as `cpu::product` finds them. For experts, z is the expert and its rows take the
//! place of m or k: their number is in device memory.

use dplan_ir::dtype::DType;
use dplan_ir::op::Spec;

use super::arch::Arch;
use super::library::Matmul;
use super::source::{Builder, Config, Size, int};
use super::{Alignment, Arg, Family, PrepareError, Tail, TensorMap, moe};
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
    b.d.epilogue.check(&shape, b.elem)?;
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
    // Along a dim of one there is no step, and nothing that a step could be a multiple of.
    let step = |role: (usize, [usize; 3]), operand: usize| if role.0 == 1 { 0 } else { role.1[operand] as u64 };
    Shape {
        m: m.0 as u64,
        n: n.0 as u64,
        k: k.0 as u64,
        z: z.0 as u64,
        a: [step(m, 0), step(k, 0)],
        b: [step(k, 1), step(n, 1)],
        out: [step(m, 2), step(n, 2)],
        batch: [0, 1, 2].map(|operand| step(z, operand)),
    }
}

fn launch(b: &mut Builder<'_>, shape: Shape, grouped: Grouped) {
    match b.elem {
        DType::Bf16 | DType::F16 => matrix_units(b, shape, grouped),
        DType::F32 | DType::F64 | DType::I32 => plain(b, shape, grouped),
    }
    if let (Grouped::No, Some(launch)) = (grouped, b.launches.last_mut()) {
        let (d, of) = (b.d, [b.elem, b.d.outs[0].dtype]);
        let made = Matmul::new(&shape, of, d.write, d.alignment).and_then(|m| m.followed_by(d.epilogue.tails));
        launch.instead = made.filter(|m| d.target.beside.takes(d.target.arch, m));
    }
}

/// On the arithmetic units: f32 and f64, so that nothing is rounded that the type does not round.
fn plain(b: &mut Builder<'_>, s: Shape, grouped: Grouped) {
    const TILE: u64 = 64;
    let (a_rows, b_rows) = (s.a[0] == 1 && s.m > 1, s.b[0] == 1 && s.k > 1);
    let layout = Layout { a_rows, b_rows, packs: false, pairs: Layout::pairs(b, &s) };
    let text = text(b, config(b, [TILE; 2], &layout, 256), grouped, &[include_str!("text/gemm_plain.cuh")]);
    let blocks = s.z * s.m.div_ceil(TILE) * s.n.div_ceil(TILE);
    let shared = 2 * 16 * (TILE + 4) * b.acc.size();
    b.launch(Family::Gemm, "dp_gemm_plain", text, Size::blocks(blocks, 256, shared), args(b, &s, grouped));
}

/// A way to cut a product for the matrix units.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tiles {
    pub by: By,
    /// What a block has of the result at a time, m x n.
    pub block: [u64; 2],
    /// Depth and number of the ring's tiles.
    pub deep: u64,
    pub stages: u64,
    /// 10^12 operations a second on an H100 whose every multiprocessor has such a tile. Published ones of kernels of this kind, or their like; none was measured here.
    pub rate: f64,
}

/// Who multiplies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    /// Warps, each with a part of the tile (`mma.sync`), on any architecture.
    Warps([u64; 2]),
    /// Warpgroups, each with 64 rows of the tile (`wgmma`), on Hopper.
    Warpgroups,
}

/// All ways.
pub const TILES: [Tiles; 4] = [
    Tiles { by: By::Warpgroups, block: [128, 256], deep: 64, stages: 4, rate: 650.0 },
    Tiles { by: By::Warpgroups, block: [128, 128], deep: 64, stages: 6, rate: 550.0 },
    Tiles { by: By::Warps([64, 32]), block: [128, 128], deep: 32, stages: 4, rate: 400.0 },
    SMALL,
];
/// What any operands allow.
const SMALL: Tiles = Tiles { by: By::Warps([32, 32]), block: [64, 64], deep: 32, stages: 4, rate: 250.0 };

impl Tiles {
    fn blocks(&self, s: &Shape) -> u64 {
        s.z * s.m.div_ceil(self.block[0]) * s.n.div_ceil(self.block[1])
    }
    /// What a product costs: rounds of all multiprocessors × a tile's operations ÷ how fast they go. A last round that is not full costs as much as one that is.
    fn score(&self, s: &Shape, multiprocessors: u64) -> f64 {
        let rounds = self.blocks(s).div_ceil(multiprocessors);
        (rounds * self.block[0] * self.block[1] * s.k.next_multiple_of(self.deep)) as f64 / self.rate
    }
}

/// How a product's operands lie.
struct Layout {
    /// Neighbours in memory of a are neighbours in m, of b in k.
    a_rows: bool,
    b_rows: bool,
    /// Sixteen bytes can be copied at a time.
    packs: bool,
    /// The result takes two elements at a time.
    pairs: bool,
}

impl Layout {
    fn of(b: &Builder<'_>, s: &Shape) -> Layout {
        let (a_rows, b_rows) = (s.a[0] == 1 && s.a[1] != 1, s.b[0] == 1 && s.b[1] != 1);
        let contiguous = (a_rows || s.a[1] == 1) && (b_rows || s.b[1] == 1);
        // Every row begins at a multiple of eight elements.
        let pitches = [if a_rows { s.a[1] } else { s.a[0] }, if b_rows { s.b[1] } else { s.b[0] }, s.batch[0], s.batch[1]];
        let packs = contiguous && b.d.alignment == Alignment::Packs && pitches.iter().all(|p| p % 8 == 0);
        Layout { a_rows, b_rows, packs, pairs: Layout::pairs(b, s) }
    }
    fn pairs(b: &Builder<'_>, s: &Shape) -> bool {
        b.d.alignment == Alignment::Packs && s.out[1] == 1 && [s.n, s.out[0], s.batch[2]].iter().all(|x| x % 2 == 0)
    }
    /// Both operands as the copy engine takes them.
    fn tensors(&self, b: &Builder<'_>, s: &Shape, grouped: Grouped) -> Option<[TensorMap; 2]> {
        let of = |turned: bool, [rows, columns]: [u64; 2], [row, column]: [u64; 2], z: u64, batch: u64| {
            if turned { TensorMap::new([rows, columns, z], [column, batch]) } else { TensorMap::new([columns, rows, z], [row, batch]) }
        };
        // An expert's rows begin anywhere in a; where they end among those that are summed over, a copy does not.
        let of_a = match grouped {
            Grouped::No => s.z,
            Grouped::M(_) => 1,
            Grouped::K(_) => return None,
        };
        if !self.packs || b.d.target.arch != Arch::Sm90a {
            return None;
        }
        Some([of(self.a_rows, [s.m, s.k], s.a, of_a, s.batch[0])?, of(!self.b_rows, [s.n, s.k], [s.b[1], s.b[0]], s.z, s.batch[1])?])
    }
}

/// On the matrix units.
fn matrix_units(b: &mut Builder<'_>, s: Shape, grouped: Grouped) {
    let layout = Layout::of(b, &s);
    let tensors = layout.tensors(b, &s, grouped);
    let target = b.d.target;
    let allowed = target.tiles.iter().filter(|t| t.by != By::Warpgroups || tensors.is_some());
    let score = |t: &Tiles| t.score(&s, target.arch.multiprocessors());
    let best = allowed.min_by(|x, y| score(x).total_cmp(&score(y))).unwrap_or(&SMALL);
    match (best.by, tensors) {
        (By::Warpgroups, Some(tensors)) => warpgroups(b, s, grouped, best, &layout, tensors),
        (By::Warps(warp), _) => warps(b, s, grouped, best, warp, &layout),
        (By::Warpgroups, None) => unreachable!("not allowed without tensors"),
    }
}

/// What all kernels' configs have, of blocks that take so much of the result at a time.
fn config(b: &Builder<'_>, block: [u64; 2], layout: &Layout, threads: u64) -> Config {
    Config::default()
        .ty("elem", b.elem)
        .ty("acc", b.acc)
        .ty("out_t", b.d.outs[0].dtype)
        .int("THREADS", threads)
        .flag("ADD", b.add())
        .flag("A_ROWS", layout.a_rows)
        .flag("B_ROWS", layout.b_rows)
        .flag("PAIRS", layout.pairs)
        .int("BM", block[0])
        .int("BN", block[1])
}

/// A kernel's text: what follows the product, what all kernels have in common, its own.
fn text(b: &Builder<'_>, config: Config, grouped: Grouped, own: &[&str]) -> String {
    let (config, tails) = b.d.epilogue.text(group(config, grouped));
    config.text(&[&[&tails, include_str!("text/gemm_out.cuh")], own].concat())
}

fn warps(b: &mut Builder<'_>, s: Shape, grouped: Grouped, t: &Tiles, warp: [u64; 2], layout: &Layout) {
    let threads = t.block[0] / warp[0] * (t.block[1] / warp[1]) * 32;
    let config = config(b, t.block, layout, threads).int("STAGES", t.stages);
    let config = config.flag("ASYNC", layout.packs).int("BK", t.deep).int("WM", warp[0]).int("WN", warp[1]);
    let product = include_str!("text/gemm_mma.cuh");
    // With a bias and nothing besides, the assembler for sm_100 would rather have two blocks on a multiprocessor, of 128 registers a thread, and spill.
    let alone = t.block == [128, 128] && b.d.epilogue.tails == [Tail::Bias];
    let product = if alone { product.replace("DP_KERNEL(", "DP_KERNEL_ALONE(") } else { product.to_string() };
    let text = text(b, config, grouped, &[include_str!("text/tiles.cuh"), &product]);
    let tile = |rows: bool, side: u64| if rows { t.deep * (side + 8) } else { side * (t.deep + 8) };
    // Of b, neighbours in k are rows of [n][k]; of a, neighbours in m are rows of [k][m].
    let b_tile = if layout.b_rows { t.block[1] * (t.deep + 8) } else { t.deep * (t.block[1] + 8) };
    let shared = t.stages * (tile(layout.a_rows, t.block[0]) + b_tile) * 2;
    b.launch(Family::Gemm, "dp_gemm_mma", text, Size::blocks(t.blocks(&s), threads, shared), args(b, &s, grouped));
}

/// A block on each multiprocessor takes tiles until there are none.
fn warpgroups(b: &mut Builder<'_>, s: Shape, grouped: Grouped, t: &Tiles, layout: &Layout, [of_a, of_b]: [TensorMap; 2]) {
    let threads = t.block[0] * 2 + 32;
    let text = text(b, config(b, t.block, layout, threads).int("STAGES", t.stages), grouped, &[include_str!("text/gemm_wgmma.cuh")]);
    let tiles = t.blocks(&s);
    let shared = t.stages * ((t.block[0] + t.block[1]) * t.deep * 2 + 2 * 8);
    let sizes = [tiles, s.m, s.n, s.k, s.out[0], s.out[1], s.batch[2]];
    let operands = [Arg::Tensor(0, of_a), Arg::Tensor(1, of_b), Arg::Out(0), starts(grouped), b.extra(0), b.extra(1)];
    let args = operands.into_iter().chain(sizes.map(int)).collect();
    let size = Size::blocks(tiles.min(b.d.target.arch.multiprocessors()), threads, shared);
    b.launch(Family::Gemm, "dp_gemm_wgmma", text, size, args);
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

/// Where the rows of each expert begin.
fn starts(grouped: Grouped) -> Arg {
    match grouped {
        Grouped::No => Arg::Scalars,
        Grouped::M(starts) | Grouped::K(starts) => starts,
    }
}

fn args(b: &Builder<'_>, s: &Shape, grouped: Grouped) -> Vec<Arg> {
    let sizes = [s.m, s.n, s.k, s.a[0], s.a[1], s.b[0], s.b[1], s.out[0], s.out[1], s.batch[0], s.batch[1], s.batch[2]];
    [Arg::In(0), Arg::In(1), Arg::Out(0), starts(grouped), b.extra(0), b.extra(1)].into_iter().chain(sizes.map(int)).collect()
}
