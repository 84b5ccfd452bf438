//! Dropout: which elements it keeps, and where in a model it is.
//!
//! An element of a value `x[b,s,…]` is divided by 1 − rate, or becomes zero. Which of the two is a function of the seed, of the forward node, and of the element's place in
//! the data: its sequence (counted over the whole run), its position in it, its index along the other dims. So it does not depend on how a plan cuts batches, sequences or
//! widths; nothing of it is stored, for the backward pass and what is computed again draw the same; and a run that is resumed goes on with what it would have drawn.
//! The function is Philox4x32-10 (Salmon et al., SC 2011): key (seed, node), counter (place in the sequence, sequence), four elements a call.
//!
//! A program has no key of its own that could be wrong: it names nodes and micro-batches, the graph says what a node's backward nodes are. The verifiers
//! check these ([`crate::verify`]).

use std::collections::{BTreeMap, BTreeSet};

use crate::build::Builder;
use crate::entity::{NodeId, ParamId, Table, ValueId};
use crate::graph::{Def, Graph, Layout, Phase, Type};
use crate::op::Op;
use crate::splitmix::mix;

/// What a step draws with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Draws {
    pub seed: u64,
    /// Number of the first sequence, of the step or of the micro-batch.
    pub sequence: u64,
}

impl Draws {
    /// From the sequence that comes so many later on.
    pub fn after(self, sequences: u64) -> Draws {
        Draws { sequence: self.sequence.wrapping_add(sequences), ..self }
    }
    /// The key of node 0; that of node n has n xored to its first word.
    pub fn key(self) -> [u32; 2] {
        let mixed = mix(self.seed);
        [mixed as u32, (mixed >> 32) as u32]
    }
    /// What the elements of one node are drawn with.
    pub fn of_node(self, node: NodeId, rate: f64) -> NodeDraws {
        let [low, high] = self.key();
        NodeDraws { key: [low ^ node.0, high], threshold: threshold(rate), scale: scale(rate), sequence: self.sequence }
    }
}

/// Words below it are dropped.
pub fn threshold(rate: f64) -> u32 {
    (rate * f64::from(32).exp2()) as u32
}

/// What kept elements are multiplied with, so that the mean stays.
pub fn scale(rate: f64) -> f64 {
    1.0 / (1.0 - rate)
}

/// [`Draws`] at one node.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NodeDraws {
    key: [u32; 2],
    threshold: u32,
    scale: f64,
    sequence: u64,
}

impl NodeDraws {
    /// The factors on the four elements, from a multiple of four on, among which `element` of the `nth` sequence is.
    pub fn factors(&self, nth: u64, element: u64) -> [f64; 4] {
        let (place, sequence) = (element / 4, self.sequence.wrapping_add(nth));
        let words = philox([place as u32, (place >> 32) as u32, sequence as u32, (sequence >> 32) as u32], self.key);
        words.map(|word| if word < self.threshold { 0.0 } else { self.scale })
    }
    /// The factor on one element.
    pub fn factor(&self, nth: u64, element: u64) -> f64 {
        self.factors(nth, element)[(element % 4) as usize]
    }
}

/// Philox4x32 with ten rounds.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k, mut l]) = (counter, key);
    for _ in 0..10 {
        let (x, y) = (u64::from(a) * 0xd251_1f53, u64::from(c) * 0xcd9e_8d57);
        (a, b, c, d) = ((y >> 32) as u32 ^ b ^ k, y as u32, (x >> 32) as u32 ^ d ^ l, x as u32);
        (k, l) = (k.wrapping_add(0x9e37_79b9), l.wrapping_add(0xbb67_ae85));
    }
    [a, b, c, d]
}

/// Where a model drops, and how much.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Rates {
    /// Of what an embedding hands to the first block.
    pub embedding: f64,
    /// Of each term that is added to a residual stream.
    pub residual: f64,
}

/// The forward graph with dropout: on what layer 0 hands on if it looks tokens up, and on `y` wherever `x + y` has a `y` that was computed from `x`; if `y` is a sum of
/// such values itself (attention and feed-forward side by side), on each of them.
///
/// # Panics
/// If the graph has backward nodes, or does not verify.
pub fn insert(graph: &Graph, rates: Rates) -> Graph {
    let mut places: BTreeMap<(NodeId, usize), f64> = BTreeMap::new();
    if rates.residual > 0.0 {
        places.extend(branches(graph).into_iter().map(|place| (place, rates.residual)));
    }
    let embedding = embedding(graph).filter(|_| rates.embedding > 0.0);
    let mut names: BTreeSet<String> = graph.values.values().map(|v| v.name.clone()).collect();
    let mut builder = Builder::new(&graph.name);
    builder.graph.dims = graph.dims.clone();
    let mut new: Table<ValueId, Option<ValueId>> = Table::filled(graph.values.len(), None);
    for (id, value) in graph.values.iter() {
        new[id] = match value.def {
            Def::Param(param) => {
                let of = &graph.params[param];
                Some(builder.param(&value.name, value.ty.dtype, &value.ty.dims, of.init, of.pieces.clone()))
            }
            Def::Input => Some(builder.input(&value.name, value.ty.dtype, &value.ty.dims)),
            Def::Node(..) => None,
        };
    }
    let mut drop = |builder: &mut Builder, name: &str, value: ValueId, rate: f64| {
        let mut name = format!("{name}.dropout");
        while !names.insert(name.clone()) {
            name.push('_');
        }
        let ty = builder.graph.values[value].ty.clone();
        builder.typed_node(&name, Op::Dropout { rate }, &[value], vec![ty], Phase::Forward, None)[0]
    };
    // What blocks see of the embedding.
    let mut embedded = None;
    for (id, node) in graph.nodes.iter() {
        assert_eq!(node.phase, Phase::Forward, "dropout is inserted before the graph is differentiated");
        builder.set_layer(node.layer);
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for (at, &input) in node.inputs.iter().enumerate() {
            let dropped = embedded.filter(|_| node.layer > 0 && Some(input) == embedding);
            let mut value = dropped.or(new[input]).expect("defined before it is used");
            if let Some(&rate) = places.get(&(id, at)) {
                value = drop(&mut builder, &graph.values[input].name, value, rate);
            }
            inputs.push(value);
        }
        let types: Vec<Type> = node.outputs.iter().map(|&v| graph.values[v].ty.clone()).collect();
        let first = node.outputs.first().map_or("", |&v| &graph.values[v].name);
        let outputs = builder.typed_node(first, node.op.clone(), &inputs, types, Phase::Forward, None);
        for (&old, output) in node.outputs.iter().zip(outputs) {
            builder.graph.values[output].name.clone_from(&graph.values[old].name);
            new[old] = Some(output);
            if Some(old) == embedding {
                embedded = Some(drop(&mut builder, &graph.values[old].name, output, rates.embedding));
            }
        }
    }
    let moved = |v: ValueId| new[v].expect("every value has been made again");
    let built = builder.graph;
    Graph {
        inputs: graph.inputs.iter().map(|&v| moved(v)).collect(),
        loss: graph.loss.map(moved),
        grads: Table::<ParamId, Vec<ValueId>>::default(),
        cotangents: Table::default(),
        ..Graph { dims: built.dims, values: built.values, nodes: built.nodes, params: built.params, ..graph.clone() }
    }
}

/// Whether a value has the dims that places are counted along: `x[batch, sequence, …]`.
pub fn has_places(graph: &Graph, value: ValueId) -> bool {
    let Type { dims, layout, .. } = &graph.values[value].ty;
    *layout == Layout::Dense && dims.len() > 1 && graph.batch == Some(dims[0]) && graph.sequence.is_none_or(|s| dims[1] == s)
}

/// What layer 0 hands on, if it looks up what tokens stand for.
fn embedding(graph: &Graph) -> Option<ValueId> {
    let looks_up = graph.forward_nodes().any(|(_, n)| n.layer == 0 && n.op == Op::Embed);
    graph.boundaries().first().copied().filter(|&v| looks_up && has_places(graph, v))
}

/// The operands of sums that are terms of a branch of a residual stream.
fn branches(graph: &Graph) -> Vec<(NodeId, usize)> {
    let mut uses = graph.values.map(|_, _| 0u32);
    graph.nodes.values().flat_map(|n| &n.inputs).for_each(|&v| uses[v] += 1);
    let mut found = Vec::new();
    for (id, node) in graph.nodes.iter().filter(|(_, n)| n.op == Op::Add && n.inputs.iter().all(|&v| has_places(graph, v))) {
        let (x, y) = (node.inputs[0], node.inputs[1]);
        let (stream, at) = match (comes_from(graph, y, x), comes_from(graph, x, y)) {
            _ if x == y => continue,
            (true, _) => (x, 1),
            (false, true) => (y, 0),
            (false, false) => continue,
        };
        let mut open = vec![(id, at)];
        while let Some((sum, at)) = open.pop() {
            let value = graph.nodes[sum].inputs[at];
            let terms = graph.producer(value).filter(|&p| {
                let of = &graph.nodes[p];
                let alone = |(a, b): (ValueId, ValueId)| a != b && !comes_from(graph, a, b) && !comes_from(graph, b, a);
                of.op == Op::Add && uses[value] == 1 && alone((of.inputs[0], of.inputs[1])) && of.inputs.iter().all(|&v| comes_from(graph, v, stream))
            });
            match terms {
                Some(inner) => open.extend([(inner, 1), (inner, 0)]),
                None => found.push((sum, at)),
            }
        }
    }
    found
}

/// Whether a value was computed from another.
fn comes_from(graph: &Graph, value: ValueId, from: ValueId) -> bool {
    if graph.param_of(from).is_some() {
        return false;
    }
    // Nodes stand in an order in which they can be computed.
    let first = graph.producer(from);
    let (mut seen, mut open) = (BTreeSet::new(), vec![value]);
    while let Some(next) = open.pop() {
        if next == from {
            return true;
        }
        if let Some(node) = graph.producer(next).filter(|&n| Some(n) > first && seen.insert(n)) {
            open.extend(&graph.nodes[node].inputs);
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors of the authors' Random123, file `kat_vectors`.
    #[test]
    fn philox_is_that_of_its_authors() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        assert_eq!(philox(pi.0, pi.1), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    const DRAWS: Draws = Draws { seed: 7, sequence: 5 };
    /// Sequences, and elements of each.
    const SIZE: (u64, u64) = (10, 20_000);

    fn factors(draws: Draws, node: u32, rate: f64) -> Vec<f64> {
        let node = draws.of_node(NodeId(node), rate);
        (0..SIZE.0 * SIZE.1).map(|e| node.factor(e / SIZE.1, e % SIZE.1)).collect()
    }

    /// Of n draws with rate p: kept ones are 1/(1−p), the mean is 1 and the variance p/(1−p), each within five of its standard deviations.
    #[test]
    fn mean_and_variance_are_those_of_the_rate() {
        for rate in [0.1, 0.3, 0.5, 0.9] {
            let all = factors(DRAWS, 3, rate);
            let n = all.len() as f64;
            assert!(all.iter().all(|&f| f == 0.0 || f == 1.0 / (1.0 - rate)));
            let mean = all.iter().sum::<f64>() / n;
            let variance = all.iter().map(|f| (f - mean).powi(2)).sum::<f64>() / n;
            let right = rate / (1.0 - rate);
            assert!((mean - 1.0).abs() < 5.0 * (right / n).sqrt(), "rate {rate}: mean {mean}");
            // A variable of two values has the fourth moment right² · (1 − 3p(1 − p)) / (p(1 − p)).
            let fourth = right * right * ((1.0 - 3.0 * rate * (1.0 - rate)) / (rate * (1.0 - rate)) - 1.0);
            assert!((variance - right).abs() < 5.0 * (fourth / n).sqrt().max(1.0 / n), "rate {rate}: variance {variance}");
        }
        assert!(factors(DRAWS, 3, 0.0).iter().all(|&f| f == 1.0));
    }

    /// Masks of other nodes, seeds and sequences, and neighbours within one, agree as often as independent ones do: in 1 − 2p(1 − p) of the places.
    #[test]
    fn every_coordinate_draws_anew() {
        let (rate, all) = (0.3, factors(DRAWS, 3, 0.3));
        let agree = |what: &str, other: &[f64]| {
            let n = other.len() as f64;
            let found = all.iter().zip(other).filter(|(x, y)| x == y).count() as f64 / n;
            let right = 1.0 - 2.0 * rate * (1.0 - rate);
            assert!((found - right).abs() < 5.0 * (right * (1.0 - right) / n).sqrt(), "{what}: {found}");
        };
        agree("another seed", &factors(Draws { seed: 8, ..DRAWS }, 3, rate));
        agree("another node", &factors(DRAWS, 4, rate));
        agree("a far node", &factors(DRAWS, 3 + (1 << 20), rate));
        agree("other sequences", &factors(DRAWS.after(SIZE.0), 3, rate));
        agree("sequences beyond 32 bits", &factors(DRAWS.after(1 << 32), 3, rate));
        agree("the next element", &all[1..]);
        agree("the next sequence", &all[SIZE.1 as usize..]);
        // What comes a sequence later is what the sequence after has.
        assert_eq!(factors(DRAWS.after(1), 3, rate)[..((SIZE.0 - 1) * SIZE.1) as usize], all[SIZE.1 as usize..]);
        // A higher rate drops what a lower one drops, and more.
        assert!(factors(DRAWS, 3, 0.4).iter().zip(&all).all(|(more, less)| *more == 0.0 || *less != 0.0));
    }
}
