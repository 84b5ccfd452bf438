//! Deterministic initial values.
//!
//! Element `i` of a parameter is a function of (seed, parameter name, i) alone, `i` being its row-major index in the logical tensor: however the tensor is cut,
//! padded or ordered, every rank computes the same numbers, and nobody has to send them.

use crate::entity::{ParamId, Table};
use crate::graph::{Graph, Init};
use crate::interp::Tensor;
use crate::splitmix::mix;
use std::f64::consts::TAU;

/// The initial value of one element.
pub fn element(init: Init, seed: u64, name_hash: u64, index: u64) -> f64 {
    match init {
        Init::Zeros => 0.0,
        Init::Ones => 1.0,
        Init::Normal { std } => std * normal(mix(mix(seed ^ name_hash.rotate_left(32)) ^ index)),
    }
}

/// FNV-1a of a name: the key of a parameter, independent of its place in the graph.
pub fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A parameter of a graph, whole, row-major.
pub fn param(graph: &Graph, param: ParamId, seed: u64) -> Vec<f64> {
    let param = &graph.params[param];
    let hash = name_hash(&graph.values[param.value].name);
    (0..graph.shape(param.value).iter().product()).map(|i| element(param.init, seed, hash, i)).collect()
}

/// All parameters of a graph.
pub fn params(graph: &Graph, seed: u64) -> Table<ParamId, Tensor> {
    graph.params.ids().map(|id| Tensor::dense(&graph.shape(graph.params[id].value), param(graph, id, seed))).collect()
}

/// Box and Muller: √(−2 ln u) · cos(2πv) is standard normal for uniform u, v.
fn normal(key: u64) -> f64 {
    // 53 bits each; u is in (0, 1], so that its logarithm is finite.
    let uniform = |bits: u64| (bits >> 11) as f64 / (1u64 << 53) as f64;
    let (u, v) = (1.0 - uniform(mix(key)), uniform(mix(key ^ 0xd1b5_4a32_d192_ed03)));
    (-2.0 * u.ln()).sqrt() * (TAU * v).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_elements_have_the_moments_of_a_normal_distribution() {
        let n = 40_000;
        let draw: Vec<f64> = (0..n).map(|i| element(Init::Normal { std: 0.5 }, 7, name_hash("w"), i)).collect();
        let moment = |p: i32| draw.iter().map(|x| (x / 0.5).powi(p)).sum::<f64>() / n as f64;
        // Standard errors of these means are 0.005, 0.007, 0.019 and 0.049.
        for (p, expected, tolerance) in [(1, 0.0, 0.02), (2, 1.0, 0.03), (3, 0.0, 0.08), (4, 3.0, 0.2)] {
            assert!((moment(p) - expected).abs() < tolerance, "moment {p} is {}", moment(p));
        }
    }

    #[test]
    fn seed_name_and_index_each_matter() {
        let at = |seed, name, index| element(Init::Normal { std: 1.0 }, seed, name_hash(name), index);
        let all = [at(0, "a", 0), at(1, "a", 0), at(0, "b", 0), at(0, "a", 1)];
        for i in 0..all.len() {
            for j in 0..i {
                assert_ne!(all[i], all[j], "{i} and {j}");
            }
        }
    }
}
