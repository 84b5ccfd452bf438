//! Scaled dot-product attention, a block of query rows at a time.
//!
//! For each sequence and head, and each block of at most [`ATTENTION_ROWS`] queries, with the keys `[lo, hi)` that any of them sees:
//! - forward: S = scale · Q Kᵀ; P = softmax of each row over what that row sees; O = P V; lse = log Σ exp S;
//! - backward: P = exp(S − lse); dP = dO Vᵀ; dV += Pᵀ dO; dS = P ∘ (dP − rowsum(dO ∘ O)); dQ = scale · dS K; dK += scale · dSᵀ Q.
//!
//! Keys are taken by position: where the order of positions is not that of indices ([`dplan_ir::order`]), a product with K or V is one product for each run.
//!
//! Where documents are apart, what a row sees begins no earlier than its document; as first positions do not decrease, the block's keys begin where its first row's do.
//!
//! A sink is one more score of each head, in the sum of every row and with the value zero; what it gets of the gradient is −Σ exp(sink − lse) · ⟨dO, O⟩.
//!
//! Blocks are visited in order of sequence, key/value head, query head, first query, which fixes the order of the sums in dK and dV.
//! Padding heads give zeros.

use dplan_ir::cost::ATTENTION_ROWS;
use dplan_ir::extent::OpContext;
use dplan_ir::op::{Attention, Documents, Mask};
use dplan_ir::order::{Order, Run as Positions};
use dplan_ir::program::Write;

use super::Run;
use super::block::{Block, BlockMut};
use super::float::{Float, clear, dot, max, put, sum};
use super::product::{Matrix, MatrixMut, multiply};
use super::vector::vectorized;

#[derive(Debug)]
pub struct AttentionKernel {
    mask: Mask,
    scale: f64,
    batch: usize,
    queries: usize,
    keys: usize,
    /// Key/value heads, and query heads of each; and how many of them are no padding.
    groups: usize,
    heads: usize,
    valid_groups: usize,
    valid_heads: usize,
    /// Width of queries and keys, and of values.
    width: usize,
    value_width: usize,
    first_query: usize,
    /// This rank's keys as they stand, by position.
    runs: Vec<Positions>,
    /// The turn of the ring that they are in: sinks count in the first.
    turn: u64,
    order: Order,
    /// Positions in the sequence.
    length: u64,
}

/// A block of queries of one head, and the keys it sees.
struct Tile {
    batch: usize,
    group: usize,
    head: usize,
    /// First query, its position, and their number.
    row: usize,
    position: usize,
    rows: usize,
    /// First key, counted among this rank's by position, and their number.
    key: usize,
    keys: usize,
}

/// Keys of a tile that stand together.
struct Keys {
    /// Column of the first in the tile's scores.
    column: usize,
    /// Index of the first in K and V.
    index: usize,
    len: usize,
}

impl AttentionKernel {
    /// `ins`: sizes of q, k and v.
    pub fn new(op: &Attention, context: &OpContext, ins: &[Vec<usize>]) -> AttentionKernel {
        let (q, k, v) = (&ins[0], &ins[1], &ins[2]);
        let valid = |label: char| context.extent(label).valid() as usize;
        AttentionKernel {
            mask: op.mask,
            scale: op.scale,
            batch: q[0],
            queries: q[1],
            keys: k[1],
            groups: q[2],
            heads: q[3],
            valid_groups: valid('g'),
            valid_heads: valid('r'),
            width: q[4],
            value_width: v[3],
            first_query: context.extent('s').start as usize,
            runs: runs(context.order, context.extent('t').start, k[1] as u64, context.extent('s').logical),
            turn: context.turn,
            order: context.order,
            length: context.extent('s').logical,
        }
    }

    /// (q, k, v) or (q, k, v, sink), and first positions of documents → (o, lse).
    pub fn forward<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], scratch: &mut [T], run: Run) {
        let (q, k, v) = (T::of(ins[0]), T::of(ins[1]), T::of(ins[2]));
        let (ins, documents) = self.documents(ins);
        let sinks = ins.get(3).filter(|_| self.turn == 0).map(|s| T::of(*s));
        let [o, lse] = outs else { unreachable!("two results by the type rule") };
        let (o, lse) = (T::of_mut(o), T::of_mut(lse));
        clear(o, run.write);
        clear(lse, run.write);
        self.tiles(documents, |tile| {
            if tile.keys == 0 {
                // Of a block of the keys that it sees none of, a query has but its sink.
                let sink = sinks.map_or(f64::NEG_INFINITY, |s| s[tile.group * self.heads + tile.head].to_f64());
                (0..tile.rows).for_each(|i| put(&mut lse[self.query(&tile, i)], T::from_f64(sink), Write::Add));
                return;
            }
            let scores = &mut scratch[..tile.rows * tile.keys];
            self.scores(&tile, q, k, scores, run);
            vectorized(|| {
                for i in 0..tile.rows {
                    let row = &mut scores[i * tile.keys..(i + 1) * tile.keys];
                    let sink = sinks.map(|s| s[tile.group * self.heads + tile.head]);
                    let log_sum = self.softmax(self.seen_in(&tile, i, documents), row, sink);
                    put(&mut lse[self.query(&tile, i)], T::from_f64(log_sum), Write::Add);
                }
            });
            for keys in self.keys(&tile) {
                let shape = [tile.rows, self.value_width, keys.len];
                let probabilities = Matrix { data: &scores[keys.column..], row: tile.keys, col: 1 };
                let out = MatrixMut { data: &mut o[self.query(&tile, 0) * self.value_width..], row: self.query_stride() * self.value_width, col: 1 };
                multiply(shape, T::ONE, probabilities, self.key_rows(&tile, &keys, v, self.value_width), out, Write::Add, run.threads);
            }
        });
    }

    /// (q, k, v, o, lse, do), and first positions of documents → (dq, dk, dv).
    pub fn backward<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], scratch: &mut [T], run: Run) {
        let (ins, documents) = self.documents(ins);
        let operand = |i: usize| T::of(ins[i]);
        let (q, k, v, o, lse, dy) = (operand(0), operand(1), operand(2), operand(3), operand(4), operand(5));
        let [dq, dk, dv] = outs else { unreachable!("three results by the type rule") };
        let (dq, dk, dv) = (T::of_mut(dq), T::of_mut(dk), T::of_mut(dv));
        [&mut *dq, &mut *dk, &mut *dv].into_iter().for_each(|d| clear(d, run.write));
        let scale = T::from_f64(self.scale);
        let (d, e) = (self.width, self.value_width);
        self.tiles(documents, |tile| {
            if tile.keys == 0 {
                return;
            }
            let (n, keys) = (tile.rows, tile.keys);
            let (p, rest) = scratch.split_at_mut(n * keys);
            let dp = &mut rest[..n * keys];
            self.scores(&tile, q, k, p, run);
            vectorized(|| {
                for i in 0..n {
                    let row = &mut p[i * keys..(i + 1) * keys];
                    let log_sum = lse[self.query(&tile, i)];
                    let (lo, hi) = self.seen_in(&tile, i, documents);
                    row[..lo].fill(T::ZERO);
                    row[hi..].fill(T::ZERO);
                    for s in &mut row[lo..hi] {
                        *s = (*s - log_sum).exp();
                    }
                }
            });
            let dy_rows = self.query_rows(&tile, dy, e);
            for part in self.keys(&tile) {
                let values = self.key_rows(&tile, &part, v, e).transposed();
                let out = MatrixMut { data: &mut dp[part.column..], row: keys, col: 1 };
                multiply([n, part.len, e], T::ONE, dy_rows, values, out, Write::Set, run.threads);
                let by_key = Matrix { data: &p[part.column..], row: 1, col: keys };
                multiply([part.len, e, n], T::ONE, by_key, dy_rows, self.key_rows_mut(&tile, &part, dv, e), Write::Add, run.threads);
            }
            vectorized(|| {
                for i in 0..n {
                    let at = self.query(&tile, i) * e;
                    let along = T::from_f64(dot(&dy[at..at + e], &o[at..at + e]));
                    let row = i * keys..(i + 1) * keys;
                    for (p, dp) in p[row.clone()].iter_mut().zip(&dp[row]) {
                        *p = *p * (*dp - along);
                    }
                }
            });
            let ds = &*p;
            for part in self.keys(&tile) {
                let out = MatrixMut { data: &mut dq[self.query(&tile, 0) * d..], row: self.query_stride() * d, col: 1 };
                let by_query = Matrix { data: &ds[part.column..], row: keys, col: 1 };
                multiply([n, d, part.len], scale, by_query, self.key_rows(&tile, &part, k, d), out, Write::Add, run.threads);
                let by_key = Matrix { data: &ds[part.column..], row: 1, col: keys };
                let out = self.key_rows_mut(&tile, &part, dk, d);
                multiply([part.len, d, n], scale, by_key, self.query_rows(&tile, q, d), out, Write::Add, run.threads);
            }
        });
    }

    /// Visits every tile, also where nothing is visible.
    fn tiles(&self, documents: Option<&[i32]>, mut visit: impl FnMut(Tile)) {
        for batch in 0..self.batch {
            for group in 0..self.valid_groups {
                for head in 0..self.valid_heads {
                    let mut row = 0;
                    while row < self.queries {
                        let index = (self.first_query + row) as u64;
                        let position = self.order.position(index, self.length) as usize;
                        let rows = (ATTENTION_ROWS as usize).min(self.queries - row).min(self.together(index));
                        // Both ends of what a query sees grow with its position.
                        let seen = |i: usize| self.seen(position + i, self.first(documents, batch, row + i));
                        let (lo, hi) = (seen(0).0, seen(rows - 1).1);
                        visit(Tile { batch, group, head, row, position, rows, key: lo, keys: hi.saturating_sub(lo) });
                        row += rows;
                    }
                }
            }
        }
    }

    /// Indices from `index` on whose positions are consecutive.
    fn together(&self, index: u64) -> usize {
        match self.order {
            Order::Straight => usize::MAX,
            Order::Zigzag { .. } => {
                let chunk = self.order.chunk(self.length);
                (chunk - index % chunk) as usize
            }
        }
    }

    /// The keys of a tile, as they stand.
    fn keys(&self, tile: &Tile) -> impl Iterator<Item = Keys> + use<'_> {
        let (first, end) = (tile.key, tile.key + tile.keys);
        let mut begin = 0;
        self.runs.iter().filter_map(move |run| {
            let start = begin;
            begin += run.len as usize;
            let (from, to) = (start.max(first), begin.min(end));
            (from < to).then(|| Keys { column: from - first, index: run.index as usize + from - start, len: to - from })
        })
    }

    /// The operands before them, and the first positions of documents where these are apart.
    fn documents<'a, 'b>(&self, ins: &'a [Block<'b>]) -> (&'a [Block<'b>], Option<&'b [i32]>) {
        match (self.mask.documents, ins) {
            (Documents::Apart, [others @ .., first]) => (others, Some(first.indices())),
            (Documents::Apart | Documents::Joined, _) => (ins, None),
        }
    }

    /// The first position of a query's document.
    fn first(&self, documents: Option<&[i32]>, batch: usize, query: usize) -> usize {
        documents.map_or(0, |first| first[batch * self.queries + query].max(0) as usize)
    }

    /// The keys `[lo, hi)` of this rank that a query at a position sees whose document begins at `first`.
    fn seen(&self, position: usize, first: usize) -> (usize, usize) {
        let start = self.mask.window.map_or(0, |w| (position + 1).saturating_sub(w as usize)).max(first);
        let end = if self.mask.looks_back() { self.keys_before(position + 1) } else { self.keys };
        (self.keys_before(start), end.max(self.keys_before(start)))
    }

    /// How many of this rank's keys are before a position.
    fn keys_before(&self, position: usize) -> usize {
        self.runs.iter().map(|run| (position as u64).saturating_sub(run.position).min(run.len) as usize).sum()
    }

    /// The same for query `i` of a tile, relative to the tile's first key.
    fn seen_in(&self, tile: &Tile, i: usize, documents: Option<&[i32]>) -> (usize, usize) {
        let (lo, hi) = self.seen(tile.position + i, self.first(documents, tile.batch, tile.row + i));
        (lo - tile.key, hi - tile.key)
    }

    /// scale · Q Kᵀ, row-major.
    fn scores<T: Float>(&self, tile: &Tile, q: &[T], k: &[T], scores: &mut [T], run: Run) {
        let queries = self.query_rows(tile, q, self.width);
        for keys in self.keys(tile) {
            let out = MatrixMut { data: &mut scores[keys.column..], row: tile.keys, col: 1 };
            let rows = self.key_rows(tile, &keys, k, self.width).transposed();
            multiply([tile.rows, keys.len, self.width], T::from_f64(self.scale), queries, rows, out, Write::Set, run.threads);
        }
    }

    /// Scores of a query, which sees the keys `[lo, hi)` of its tile → probabilities; returns log Σ exp, the sink's included, −∞ if it sees nothing.
    #[inline(always)]
    fn softmax<T: Float>(&self, (lo, hi): (usize, usize), row: &mut [T], sink: Option<T>) -> f64 {
        row[..lo].fill(T::ZERO);
        row[hi..].fill(T::ZERO);
        let seen = &mut row[lo..hi];
        if seen.is_empty() {
            return sink.map_or(f64::NEG_INFINITY, T::to_f64);
        }
        let largest = max(seen);
        let largest = sink.filter(|&s| s > largest).unwrap_or(largest);
        for s in &mut *seen {
            *s = (*s - largest).exp();
        }
        let total = sum(seen.len(), |j| seen[j].to_f64()) + sink.map_or(0.0, |s| (s.to_f64() - largest.to_f64()).exp());
        let factor = T::from_f64(1.0 / total);
        for s in &mut *seen {
            *s = *s * factor;
        }
        largest.to_f64() + total.ln()
    }

    /// Index of query `i` of a tile among all (batch, query, group, head).
    fn query(&self, tile: &Tile, i: usize) -> usize {
        ((tile.batch * self.queries + tile.row + i) * self.groups + tile.group) * self.heads + tile.head
    }
    fn query_stride(&self) -> usize {
        self.groups * self.heads
    }
    /// Index of the first of some keys among all (batch, key, group).
    fn key(&self, tile: &Tile, keys: &Keys) -> usize {
        (tile.batch * self.keys + keys.index) * self.groups + tile.group
    }
    fn query_rows<'a, T>(&self, tile: &Tile, data: &'a [T], width: usize) -> Matrix<'a, T> {
        Matrix { data: &data[self.query(tile, 0) * width..], row: self.query_stride() * width, col: 1 }
    }
    fn key_rows<'a, T>(&self, tile: &Tile, keys: &Keys, data: &'a [T], width: usize) -> Matrix<'a, T> {
        Matrix { data: &data[self.key(tile, keys) * width..], row: self.groups * width, col: 1 }
    }
    fn key_rows_mut<'a, T>(&self, tile: &Tile, keys: &Keys, data: &'a mut [T], width: usize) -> MatrixMut<'a, T> {
        MatrixMut { data: &mut data[self.key(tile, keys) * width..], row: self.groups * width, col: 1 }
    }
}

/// The `len` indices of a sequence of `length` from `start` on as runs of consecutive positions, by position, counted from the first index.
fn runs(order: Order, start: u64, len: u64, length: u64) -> Vec<Positions> {
    let chunk = match order {
        Order::Straight => return vec![Positions { index: 0, position: start, len }],
        Order::Zigzag { .. } => order.chunk(length).max(1),
    };
    let (mut all, mut at) = (Vec::new(), start);
    while at < start + len {
        let end = ((at / chunk + 1) * chunk).min(start + len);
        all.push(Positions { index: at - start, position: order.position(at, length), len: end - at });
        at = end;
    }
    all.sort_unstable_by_key(|run| run.position);
    all
}

/// (sink, o, lse, do) → dsink.
#[derive(Debug)]
pub struct SinkGrad {
    groups: usize,
    heads: usize,
    valid_groups: usize,
    valid_heads: usize,
    width: usize,
}

impl SinkGrad {
    /// `o`: sizes of the attention's result.
    pub fn new(context: &OpContext, o: &[usize]) -> SinkGrad {
        let valid = |label: char| context.extent(label).valid() as usize;
        SinkGrad { groups: o[2], heads: o[3], valid_groups: valid('g'), valid_heads: valid('r'), width: o[4] }
    }

    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        let (sink, o, lse, dy) = (T::of(ins[0]), T::of(ins[1]), T::of(ins[2]), T::of(ins[3]));
        let (all, w) = (self.groups * self.heads, self.width);
        for (head, out) in T::of_mut(&mut outs[0]).iter_mut().enumerate() {
            if head / self.heads >= self.valid_groups || head % self.heads >= self.valid_heads {
                clear(std::slice::from_mut(out), write);
                continue;
            }
            let total = sum(lse.len() / all.max(1), |query| {
                let at = query * all + head;
                let row = at * w..(at + 1) * w;
                (sink[head].to_f64() - lse[at].to_f64()).exp() * dot(&dy[row.clone()], &o[row])
            });
            put(out, T::from_f64(-total), write);
        }
    }
}
