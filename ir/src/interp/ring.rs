//! Results made of one block of keys after another ([`crate::ring`]).

use crate::interp::Tensor;
use crate::interp::sharded::combine;
use crate::sharding::Monoid;

/// Two parts of the same values: by `LogSumExp` the pair (o, lse), else each by itself.
pub fn join(monoid: Monoid, left: &[Tensor], right: &[Tensor]) -> Vec<Tensor> {
    match (monoid, left, right) {
        (Monoid::LogSumExp, [o, lse], [other_o, other_lse]) => {
            let joined = lse.zip(other_lse, |a, b| combine(Monoid::LogSumExp, a, b));
            // A query that has seen no key yet has lse = −∞ and o = 0.
            let weight = |of: &Tensor| of.zip(&joined, |a, whole| if a == f64::NEG_INFINITY { 0.0 } else { (a - whole).exp() });
            let width = o.data.len() / lse.data.len().max(1);
            let weighed = |o: &Tensor, by: &Tensor| {
                let data = o.data.iter().enumerate().map(|(at, x)| x * by.data[at / width]).collect();
                Tensor { dims: o.dims.clone(), layout: o.layout, data }
            };
            let sum = weighed(o, &weight(lse)).zip(&weighed(other_o, &weight(other_lse)), |a, b| a + b);
            vec![sum, joined]
        }
        (Monoid::Sum | Monoid::Max | Monoid::LogSumExp, ..) => left.iter().zip(right).map(|(a, b)| a.zip(b, |a, b| combine(monoid, a, b))).collect(),
    }
}
