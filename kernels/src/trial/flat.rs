//! Random trials of what works on flat buckets, against its scalar equations.

use std::ops::Range;

use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Optimizer, trust_ratio, trust_terms, update};
use dplan_ir::program::Write;

use super::{Buffer, Prepared, Random, round, step};
use crate::cuda::flat::{self, Left, Trust, TrustSums, Update, Way};
use crate::cuda::{Alignment, Routine};

/// Most elements of a bucket.
const MOST: u64 = 3000;

/// A case of any of them: steps of optimizers, the sums of trust ratios, sums of squares, clip factors, sums of gradients, roundings, sums of shares, merged log-sum-exps, and
/// blocks of ranks.
pub fn draw(r: &mut Random) -> Prepared {
    let (n, alignment) = (r.size(MOST), [Alignment::Packs, Alignment::Elements][r.below(2) as usize]);
    let kind = r.below(12);
    let mut t = Trial { r, n, alignment };
    match kind {
        0..=3 => t.step(Optimizer::ALL[kind as usize % Optimizer::ALL.len()]),
        4 => t.trust_sums(),
        5 => t.square_sum(),
        6 => t.clip(),
        7 => t.sum_of_gradients(),
        8 => t.cast(),
        9 => t.shares(),
        10 => t.merge(),
        _ => t.blocks(),
    }
}

/// Two parts of one value, joined: sums of several values, or attention over other keys.
pub fn joins(r: &mut Random) -> Prepared {
    let (n, alignment) = (r.size(MOST), [Alignment::Packs, Alignment::Elements][r.below(2) as usize]);
    let left = [Left::InPlace, Left::Elsewhere][r.below(2) as usize];
    let dtype = [DType::F32, DType::Bf16, DType::F16, DType::F64][r.below(4) as usize];
    let kind = r.below(3);
    let mut t = Trial { r, n, alignment };
    if kind == 0 { t.join_sums(dtype, left) } else { t.join_attention(dtype, left) }
}

struct Trial<'a> {
    r: &'a mut Random,
    n: u64,
    alignment: Alignment,
}

/// A result: its type, what it is before, and what it must be.
type Out = (DType, Vec<f64>, Vec<f64>);

impl Trial<'_> {
    fn numbers(&mut self, n: u64, [low, high]: [f64; 2], dtype: DType) -> Vec<f64> {
        (0..n).map(|_| round(low + (high - low) * self.r.uniform(), dtype)).collect()
    }
    /// Parameters of all sizes, one after another, and whether weight decay pulls each.
    fn stretches(&mut self) -> Vec<(Range<u64>, bool)> {
        let (mut all, mut at) = (Vec::new(), 0);
        while at < self.n {
            let end = self.n.min(at + self.r.size(self.n));
            all.push((at..end, self.r.below(2) == 0));
            at = end;
        }
        all
    }
    fn prepared(&self, name: &str, routine: Routine, ins: &[(DType, &[f64])], outs: Vec<Out>, write: Write) -> Prepared {
        let buffer = |values: &[f64], dtype: DType| Buffer::new(values, dtype, self.alignment);
        Prepared {
            name: format!("{name} of {} {:?}", self.n, self.alignment),
            routine,
            ins: ins.iter().map(|(dtype, values)| buffer(values, *dtype)).collect(),
            starts: outs.iter().map(|(dtype, before, _)| buffer(before, *dtype)).collect(),
            bounds: vec![None; outs.len()],
            want: outs.into_iter().map(|(.., want)| want).collect(),
            write,
        }
    }
    /// What stands in a result that is set.
    fn before(&self, n: usize) -> Vec<f64> {
        vec![7.0; n]
    }

    fn step(&mut self, optimizer: Optimizer) -> Prepared {
        let (n, stretches) = (self.n, self.stretches());
        let members: Vec<usize> = (0..stretches.len()).collect();
        let (param, scaled) = ((self.r.below(2) == 0).then_some(DType::Bf16), self.r.below(2) == 0);
        let routine = flat::update(&Update {
            optimizer,
            state: DType::F32,
            grad: DType::F32,
            param,
            scale: scaled.then_some(DType::F32),
            n,
            alignment: self.alignment,
            stretches: &stretches,
            trust: optimizer.trusts().then_some(Trust { sums: DType::F32, members: &members }),
        });
        let [p, g, m] = [[-2.0, 2.0], [-2.0, 2.0], [-0.5, 0.5]].map(|range| self.numbers(n, range, DType::F32));
        let v = self.numbers(n, [0.0, 0.5], DType::F32);
        // Of LAMB: some of a parameter that is zero.
        let mut sums = self.numbers(2 * stretches.len() as u64, [1.0, 9.0], DType::F32);
        sums.iter_mut().step_by(2).for_each(|x| *x = if self.r.below(4) == 0 { 0.0 } else { *x });
        let scale = [if scaled { 0.5 } else { 1.0 }];
        let mut after: Vec<[f64; 3]> = Vec::with_capacity(n as usize);
        for (which, (stretch, pulled)) in stretches.iter().enumerate() {
            let at = if *pulled { step() } else { step().without_decay() };
            let trust = if optimizer.trusts() { trust_ratio([sums[2 * which], sums[2 * which + 1]]) } else { 1.0 };
            for i in stretch.start as usize..stretch.end as usize {
                let (p, [m, v]) = update(optimizer, p[i], g[i] * scale[0], [m[i], v[i]], &at, trust);
                after.push([p, m, v]);
            }
        }
        let column = |which: usize| after.iter().map(|x| x[which]).collect::<Vec<f64>>();
        let mut outs = vec![(DType::F32, p, column(0)), (DType::F32, m, column(1))];
        outs.extend((optimizer.moments() == 2).then(|| (DType::F32, v, column(2))));
        outs.extend(param.map(|dtype| (dtype, self.before(n as usize), column(0))));
        let mut ins: Vec<(DType, &[f64])> = vec![(DType::F32, &g)];
        ins.extend(scaled.then_some((DType::F32, &scale[..])));
        ins.extend(optimizer.trusts().then_some((DType::F32, &sums[..])));
        self.prepared(&format!("a step of {}", optimizer.name()), routine, &ins, outs, Write::Add)
    }

    fn trust_sums(&mut self) -> Prepared {
        let (n, stretches) = (self.n, self.stretches());
        // Of some parameters there is nothing here.
        let parameters = stretches.len() as u64 + self.r.below(3);
        let members: Vec<usize> = (0..stretches.len()).map(|at| parameters as usize - stretches.len() + at).collect();
        let routine = flat::trust_sums(&TrustSums {
            state: DType::F32,
            grad: DType::F32,
            scale: Some(DType::F32),
            alignment: self.alignment,
            stretches: &stretches,
            trust: Trust { sums: DType::F32, members: &members },
            parameters,
        });
        let [p, g, m] = [[-2.0, 2.0], [-2.0, 2.0], [-0.5, 0.5]].map(|range| self.numbers(n, range, DType::F32));
        let (v, scale) = (self.numbers(n, [0.01, 0.5], DType::F32), [0.5]);
        let mut want = vec![0.0; 2 * parameters as usize];
        for (&member, (range, pulled)) in members.iter().zip(&stretches) {
            let at = if *pulled { step() } else { step().without_decay() };
            for i in range.start as usize..range.end as usize {
                let terms = trust_terms(p[i], g[i] * scale[0], [m[i], v[i]], &at);
                terms.iter().zip(&mut want[2 * member..]).for_each(|(x, sum)| *sum += x);
            }
        }
        let ins = [&p[..], &g, &m, &v, &scale].map(|x| (DType::F32, x));
        let outs = vec![(DType::F32, self.before(want.len()), want)];
        self.prepared("sums of trust ratios", routine, &ins, outs, Write::Set)
    }

    fn square_sum(&mut self) -> Prepared {
        let g = self.numbers(self.n, [-2.0, 2.0], DType::F32);
        let square: f64 = g.iter().map(|x| x * x).sum();
        let outs = vec![(DType::F32, vec![1.0], vec![square + 1.0])];
        self.prepared("a sum of squares", flat::square_sum(DType::F32, DType::F32, self.n), &[(DType::F32, &g)], outs, Write::Add)
    }

    fn clip(&mut self) -> Prepared {
        let square = self.numbers(1, [0.0, 64.0], DType::F32);
        let outs = vec![(DType::F32, self.before(1), vec![step().gradient_scale(square[0].sqrt())])];
        self.prepared("a clip factor", flat::clip_scale(DType::F32, DType::F32), &[(DType::F32, &square)], outs, Write::Set)
    }

    fn sum_of_gradients(&mut self) -> Prepared {
        let from = [DType::F32, DType::Bf16, DType::F16][self.r.below(3) as usize];
        let (g, before) = (self.numbers(self.n, [-2.0, 2.0], from), self.numbers(self.n, [-2.0, 2.0], DType::F32));
        let sums = g.iter().zip(&before).map(|(x, y)| x + y).collect();
        let routine = flat::add_into(from, DType::F32, self.n, self.alignment);
        self.prepared("a sum of gradients", routine, &[(from, &g)], vec![(DType::F32, before, sums)], Write::Add)
    }

    fn cast(&mut self) -> Prepared {
        let to = [DType::Bf16, DType::F16][self.r.below(2) as usize];
        let g = self.numbers(self.n, [-2.0, 2.0], DType::F32);
        let routine = flat::cast(DType::F32, to, self.n, self.alignment);
        self.prepared("a rounding", routine, &[(DType::F32, &g)], vec![(to, self.before(g.len()), g.clone())], Write::Set)
    }

    fn shares(&mut self) -> Prepared {
        let shares = 1 + self.r.below(5);
        let g = self.numbers(shares * self.n, [-2.0, 2.0], DType::Bf16);
        let want: Vec<f64> = (0..self.n as usize).map(|i| g.iter().skip(i).step_by(self.n as usize).sum()).collect();
        let routine = flat::sum_shares(DType::Bf16, DType::F32, shares, self.n);
        self.prepared(
            &format!("a sum of {shares} shares"),
            routine,
            &[(DType::Bf16, &g)],
            vec![(DType::F32, self.before(want.len()), want)],
            Write::Set,
        )
    }

    fn merge(&mut self) -> Prepared {
        let parts = 1 + self.r.below(5);
        let mut x = self.numbers(parts * self.n, [-9.0, 9.0], DType::F32);
        // Parts that see nothing, and places that no part sees.
        x.iter_mut().for_each(|x| *x = if self.r.below(4) == 0 { f64::NEG_INFINITY } else { *x });
        let of = |i: usize| x.iter().skip(i).step_by(self.n as usize).map(|x| x.exp()).sum::<f64>().ln();
        let want: Vec<f64> = (0..self.n as usize).map(of).collect();
        let routine = flat::log_sum_exp(DType::F32, parts, self.n);
        let outs = vec![(DType::F32, self.before(want.len()), want)];
        self.prepared(&format!("a log-sum-exp of {parts}"), routine, &[(DType::F32, &x)], outs, Write::Set)
    }

    fn blocks(&mut self) -> Prepared {
        let dtype = [DType::F32, DType::Bf16][self.r.below(2) as usize];
        let (outer, parts, way) = (self.r.size(33), 1 + self.r.below(8), [Way::Pack, Way::Unpack][self.r.below(2) as usize]);
        let len = self.n.div_ceil(outer * parts);
        let x = self.numbers(outer * parts * len, [-2.0, 2.0], dtype);
        let mut want = x.clone();
        for (at, &value) in x.iter().enumerate() {
            let (i, part, o) = (at as u64 % len, at as u64 / len % parts, at as u64 / len / parts);
            let other = ((part * outer + o) * len + i) as usize;
            match way {
                Way::Pack => want[other] = value,
                Way::Unpack => want[at] = x[other],
            }
        }
        let outs = vec![(dtype, self.before(x.len()), want)];
        self.prepared(&format!("{way:?} {outer} x {parts} x {len}"), flat::blocks(dtype, outer, parts, len, way), &[(dtype, &x)], outs, Write::Set)
    }

    /// What a kernel finds where the left part is, and where the result goes: the part, and what nobody may read.
    fn sides(left: Left, part: Vec<f64>) -> [Vec<f64>; 2] {
        let nothing = vec![f64::NAN; part.len()];
        match left {
            Left::InPlace => [nothing, part],
            Left::Elsewhere => [part, nothing],
        }
    }
    fn write(left: Left) -> Write {
        match left {
            Left::InPlace => Write::Add,
            Left::Elsewhere => Write::Set,
        }
    }

    fn join_sums(&mut self, dtype: DType, left: Left) -> Prepared {
        let sizes: Vec<u64> = (0..1 + self.r.below(3)).map(|_| self.r.size(self.n)).collect();
        let types: Vec<(DType, u64)> = sizes.iter().map(|&n| (dtype, n)).collect();
        let mut parts = || sizes.iter().map(|&n| self.numbers(n, [-2.0, 2.0], dtype)).collect::<Vec<_>>();
        let (x, y) = (parts(), parts());
        let (mut ins, mut outs) = (Vec::new(), Vec::new());
        for (x, y) in x.into_iter().zip(&y) {
            let sums = x.iter().zip(y).map(|(a, b)| a + b).collect();
            let [elsewhere, before] = Trial::sides(left, x);
            ins.push(elsewhere);
            outs.push((dtype, before, sums));
        }
        let ins: Vec<(DType, &[f64])> = ins.iter().chain(&y).map(|values| (dtype, &values[..])).collect();
        self.prepared(&format!("joined sums of {types:?}, {left:?}"), flat::join_sums(&types, left), &ins, outs, Trial::write(left))
    }

    fn join_attention(&mut self, dtype: DType, left: Left) -> Prepared {
        let (width, acc) = (self.r.size(140), dtype.accumulator());
        let rows = self.n.div_ceil(width);
        let [of_left, of_right] = [0; 2].map(|_| self.numbers(rows * width, [-2.0, 2.0], dtype));
        // Of rows that see nothing, o is zero and lse is minus infinity.
        let [(of_left, l), (of_right, r)] = [of_left, of_right].map(|mut o| {
            let mut lse = self.numbers(rows, [-9.0, 9.0], acc);
            for (lse, o) in lse.iter_mut().zip(o.chunks_exact_mut(width as usize)) {
                if self.r.below(4) == 0 {
                    *lse = f64::NEG_INFINITY;
                    o.fill(0.0);
                }
            }
            (o, lse)
        });
        let lse: Vec<f64> = l.iter().zip(&r).map(|(l, r)| (l.exp() + r.exp()).ln()).collect();
        let joined = |at: usize| {
            let row = at / width as usize;
            let share = |lse_of: f64| if lse[row] == f64::NEG_INFINITY { 0.0 } else { (lse_of - lse[row]).exp() };
            of_left[at] * share(l[row]) + of_right[at] * share(r[row])
        };
        let o: Vec<f64> = (0..of_left.len()).map(joined).collect();
        let ([o_left, o_before], [l, lse_before]) = (Trial::sides(left, of_left), Trial::sides(left, l));
        let ins = [(dtype, &o_left[..]), (acc, &l), (dtype, &of_right), (acc, &r)];
        let outs = vec![(dtype, o_before, o), (acc, lse_before, lse)];
        let name = format!("joined attention of {rows} x {width} {dtype}, {left:?}");
        self.prepared(&name, flat::join_attention(dtype, rows, width, left), &ins, outs, Trial::write(left))
    }
}
