//! Trials at offsets beyond 2³¹ elements, by arithmetic on addresses: there is no memory for them, and no time.
//!
//! A [`Large`] is a small case, the *part*, that lies at the end of a *whole* which is longer in one dim. Kernels are those of the whole; operands and results are ranges of addresses
//! of which only touched pages take memory ([`Sparse`]), zero but for the part; and of each launch the last blocks run. What these write of the part must meet the part's reference.

use dplan_ir::dtype::DType;
use dplan_ir::graph::Layout;
use dplan_ir::optimizer::{Optimizer, update};
use dplan_ir::program::Write;
use dplan_ir::sharding::LocalType;

use super::{Buffer, Case, MICRO_BATCH, Prepared, Random, make, round, routine, step, step_scalars, typed};
use crate::cuda::flat::{self, Left, Update, Way};
use crate::cuda::{Alignment, Arg, Launch, Routine};
use crate::shim::{Blocks, Library, Options, ShimError, Sparse};

/// No 32-bit number counts so many elements.
const FAR: u64 = 1 << 31;

/// How a part lies in a whole: of each of `outer` stretches of `whole` pieces, the last `len`; a piece is `inner` elements.
#[derive(Clone, Copy, Debug)]
struct Place {
    outer: u64,
    len: u64,
    whole: u64,
    inner: u64,
}

impl Place {
    /// All of it.
    fn all(elems: u64) -> Place {
        Place { outer: 1, len: elems, whole: elems, inner: 1 }
    }
    fn elems(&self) -> u64 {
        self.outer * self.whole * self.inner
    }
    /// Ranges of bytes in the whole and in the part.
    fn pairs(self, size: u64) -> impl Iterator<Item = [std::ops::Range<usize>; 2]> {
        let range = move |from: u64| (from * self.inner * size) as usize..((from + self.len) * self.inner * size) as usize;
        (0..self.outer).map(move |o| [range((o + 1) * self.whole - self.len), range(o * self.len)])
    }
}

/// A part of a whole, and the kernels of the whole.
pub struct Large {
    pub part: Prepared,
    pub routine: Routine,
    ins: Vec<Place>,
    outs: Vec<Place>,
    blocks: u64,
}

/// The case as the end of one that is longer in `letter`: so long that some operand or result has more than 2³¹ elements. Of each launch the last `blocks` run.
pub fn large(case: &Case, letter: char, blocks: u64, random: &mut Random) -> Large {
    let small = typed(case);
    let sides =
        |t: &super::Typed| [&t.labels[0][..], &t.labels[1][..]].concat().into_iter().zip(t.ins.iter().chain(&t.outs).cloned()).collect::<Vec<_>>();
    let len = small.context.extent(letter).len;
    let of_one = sides(&small).iter().filter(|(labels, _)| labels.contains(&letter)).map(|(_, ty)| ty.elems() / len).max().unwrap_or(1);
    // Twice as far, since not all that there is room for is at the end. Whatever packs, tiles and groups of rows there are, the end is the end of one.
    let whole = (2 * FAR / of_one + len).next_multiple_of(264 * 64);
    let within = |start, len| {
        let letters = case.letters.iter().map(|l| if l.0 == letter { (letter, start, len, whole) } else { *l });
        Case { letters: letters.collect(), write: Write::Set, ..case.clone() }
    };
    let (part, whole_case) = (within(whole - len, len), within(0, whole));
    let t = typed(&whole_case);
    let places = |labels: &[Vec<char>], types: &[LocalType]| {
        let place = |(labels, ty): (&Vec<char>, &LocalType)| place(labels, ty, letter, len);
        labels.iter().zip(types).map(place).collect::<Vec<Place>>()
    };
    let (mut ins, outs) = (places(&t.labels[0], &t.ins), places(&t.labels[1], &t.outs));
    let along =
        |ty: &LocalType| if ty.dims.len() == 1 { t.labels[1][0].split_at(t.labels[1][0].len() - 1).1.to_vec() } else { t.labels[1][0].clone() };
    ins.extend(t.extras.iter().map(|ty| place(&along(ty), ty, letter, len)));
    let mut routine = routine(&whole_case, &t);
    routine.launches.iter_mut().for_each(by_tile);
    Large { part: make(&part, random), routine, ins, outs, blocks }
}

/// Of a kernel whose blocks take tiles until there are none, each block takes one.
fn by_tile(launch: &mut Launch) {
    let tiles = launch.args.iter().find_map(|arg| if let Arg::Int(n) = arg { Some(*n) } else { None });
    if let (true, Some(tiles)) = (launch.entry == "dp_gemm_wgmma", tiles) {
        launch.grid = tiles as u32;
    }
}

fn place(labels: &[char], ty: &LocalType, letter: char, len: u64) -> Place {
    // Of rows of experts there are as many as there is room for.
    let (labels, dims) = match ty.layout {
        Layout::Dense => (labels.to_vec(), ty.dims.clone()),
        _ => ([&['#'], &labels[3..]].concat(), [&[ty.elems() / ty.dims[3..].iter().product::<u64>()], &ty.dims[3..]].concat()),
    };
    match labels.iter().position(|&l| l == letter) {
        None => Place::all(ty.elems()),
        Some(at) => Place { outer: dims[..at].iter().product(), len, whole: dims[at], inner: dims[at + 1..].iter().product() },
    }
}

impl Large {
    /// Whether some operand or result is farther than 32 bits count.
    pub fn is_far(&self) -> bool {
        self.ins.iter().chain(&self.outs).any(|p| p.elems() > FAR)
    }
    /// Runs these launches on the whole; the part's results, and how many elements of each were written.
    ///
    /// # Errors
    /// As kernels in the shim, or if there are not so many addresses.
    pub fn run(&self, library: &Library, launches: &[Launch]) -> Result<(Vec<Buffer>, Vec<usize>), ShimError> {
        let mut wholes = Vec::new();
        let outs = self.part.results();
        for (place, buffer) in self.ins.iter().chain(&self.outs).zip(self.part.ins.iter().chain(&outs)) {
            let size = buffer.dtype.size();
            let mut whole = Sparse::new((place.elems() * size) as usize)?;
            place.pairs(size).for_each(|[to, from]| whole.bytes_mut()[to].copy_from_slice(&buffer.bytes()[from]));
            wholes.push(whole);
        }
        let (ins, results) = wholes.split_at_mut(self.ins.len());
        let ins: Vec<&[u8]> = ins.iter().map(Sparse::bytes).collect();
        let mut bytes: Vec<&mut [u8]> = results.iter_mut().map(Sparse::bytes_mut).collect();
        let routine = Routine { launches: launches.to_vec(), ..self.routine };
        let options = Options { micro_batch: MICRO_BATCH as i64, blocks: Blocks::Last(self.blocks), ..Options::seeded(1) };
        library.run(&routine, &ins, &mut bytes, &step_scalars(), options)?;
        let (mut made, mut written) = (Vec::new(), Vec::new());
        for (((place, before), whole), want) in self.outs.iter().zip(&outs).zip(results).zip(&self.part.want) {
            let mut part = before.bytes().to_vec();
            place.pairs(before.dtype.size()).for_each(|[from, to]| part[to].copy_from_slice(&whole.bytes()[from]));
            // What other blocks write is as it was: no number, of which the reference has none.
            let values = before.with(&part).values();
            written.push(values.iter().filter(|x| !x.is_nan()).count());
            let values: Vec<f64> = values.iter().zip(want).map(|(&x, &w)| if x.is_nan() { round(w, before.dtype) } else { x }).collect();
            made.push(Buffer::new(&values, before.dtype, Alignment::Packs));
        }
        Ok((made, written))
    }
}

/// What works on flat buckets of more than 2³¹ elements, on their last.
pub fn flat_buckets(random: &mut Random) -> Vec<Large> {
    // What the last block of a launch covers, so that all that is added to is written.
    const N: u64 = 250;
    let whole = FAR + 264 * 64;
    let end = |outer| Place { outer, len: N, whole: whole / outer, inner: 1 };
    let mut numbers =
        |n: u64, [low, high]: [f64; 2], dtype: DType| (0..n).map(|_| round(low + (high - low) * random.uniform(), dtype)).collect::<Vec<f64>>();
    let (f32, bf16) = (DType::F32, DType::Bf16);
    let wide = [-2.0, 2.0];
    let [p, g, m] = [wide, wide, [-0.5, 0.5]].map(|range| numbers(N, range, f32));
    let v = numbers(N, [0.0, 0.5], f32);
    let halves = numbers(4 * N, wide, bf16);
    let of = |name: &str, routine: Routine, ins: Vec<(DType, &[f64], Place)>, outs: Vec<(DType, Vec<f64>, Place, Option<&[f64]>)>| Large {
        part: Prepared {
            name: name.to_string(),
            routine: routine.clone(),
            ins: ins.iter().map(|(dtype, x, _)| Buffer::new(x, *dtype, Alignment::Packs)).collect(),
            starts: outs
                .iter()
                .map(|(dtype, want, _, before)| Buffer::new(before.unwrap_or(&vec![f64::NAN; want.len()]), *dtype, Alignment::Packs))
                .collect(),
            bounds: vec![None; outs.len()],
            want: outs.iter().map(|out| out.1.clone()).collect(),
            write: Write::Add,
        },
        routine,
        ins: ins.iter().map(|i| i.2).collect(),
        outs: outs.iter().map(|o| o.2).collect(),
        blocks: 1,
    };
    let mut all = Vec::new();
    for optimizer in [Optimizer::AdamW, Optimizer::Sgd] {
        let after: Vec<_> = (0..N as usize).map(|i| update(optimizer, p[i], g[i], [m[i], v[i]], &step(), 1.0)).collect();
        let moments = [after.iter().map(|x| x.1[0]).collect::<Vec<f64>>(), after.iter().map(|x| x.1[1]).collect()];
        let mut outs = vec![(f32, after.iter().map(|x| x.0).collect(), end(1), Some(&p[..]))];
        outs.extend(moments.into_iter().zip([&m[..], &v]).take(optimizer.moments()).map(|(want, before)| (f32, want, end(1), Some(before))));
        let of_step = flat::update(&Update {
            optimizer,
            state: f32,
            grad: f32,
            param: None,
            scale: None,
            n: whole,
            alignment: Alignment::Packs,
            stretches: &[(0..whole, true)],
            trust: None,
        });
        all.push(of(&format!("a step of {}", optimizer.name()), of_step, vec![(f32, &g, end(1))], outs));
    }
    let square = vec![g.iter().map(|x| x * x).sum::<f64>()];
    all.push(of("a sum of squares", flat::square_sum(f32, f32, whole), vec![(f32, &g, end(1))], vec![(f32, square, Place::all(1), Some(&[0.0]))]));
    let sums = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x + y).collect::<Vec<f64>>();
    let some = &halves[..N as usize];
    let into = flat::add_into(bf16, f32, whole, Alignment::Packs);
    all.push(of("a sum of gradients", into, vec![(bf16, some, end(1))], vec![(f32, sums(some, &p), end(1), Some(&p))]));
    let cast = flat::cast(f32, bf16, whole, Alignment::Packs);
    all.push(of("a rounding", cast, vec![(f32, &g, end(1))], vec![(bf16, g.clone(), end(1), None)]));
    let piece = Place { whole: whole / 4, ..end(1) };
    let columns = |i: usize| halves.iter().skip(i).step_by(N as usize);
    let shares: Vec<f64> = (0..N as usize).map(|i| columns(i).sum()).collect();
    all.push(of("a sum of shares", flat::sum_shares(bf16, f32, 4, whole / 4), vec![(bf16, &halves, end(4))], vec![(f32, shares, piece, None)]));
    let merged: Vec<f64> = (0..N as usize).map(|i| columns(i).map(|x| x.exp()).sum::<f64>().ln()).collect();
    all.push(of("a log-sum-exp", flat::log_sum_exp(f32, 4, whole / 4), vec![(f32, &halves, end(4))], vec![(f32, merged, piece, None)]));
    for way in [Way::Pack, Way::Unpack] {
        // Two rows of two parts each, reordered.
        let moved = [0, 2, 1, 3].map(|at| &halves[at * N as usize..][..N as usize]).concat();
        let blocks = flat::blocks(bf16, 2, 2, whole / 4, way);
        all.push(of(&format!("{way:?} of blocks"), blocks, vec![(bf16, &halves, end(4))], vec![(bf16, moved, end(4), None)]));
    }
    let join = flat::join_sums(&[(f32, whole)], Left::Elsewhere);
    all.push(of("joined sums", join, vec![(f32, &p, end(1)), (f32, &g, end(1))], vec![(f32, sums(&p, &g), end(1), None)]));
    // Equal parts are halved.
    let (width, rows) = (10, N / 10);
    let [o, lse] = [Place { len: rows, whole: whole / 64, inner: width, ..end(1) }, Place { len: rows, whole: whole / 64, ..end(1) }];
    let (o, lse) = (Place { whole: whole / width, ..o }, Place { whole: whole / width, ..lse });
    let means: Vec<f64> = p.iter().zip(&g).map(|(x, y)| (x + y) / 2.0).collect();
    let (of_rows, twice) = (vec![1.0; rows as usize], vec![1.0 + 2f64.ln(); rows as usize]);
    let ins = vec![(f32, &p[..], o), (f32, &of_rows, lse), (f32, &g, o), (f32, &of_rows, lse)];
    let join = flat::join_attention(f32, whole / width, width, Left::Elsewhere);
    all.push(of("joined attention", join, ins, vec![(f32, means, o, None), (f32, twice, lse, None)]));
    all
}
