//! Factor rules tell the truth: under every legal assignment of mesh axes to factors, evaluating an op on each rank's blocks, reducing what is partial
//! and putting the blocks together gives the op's result on whole operands.

mod cases;

use cases::Case;
use dplan_ir::dropout::Draws;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{DimId, NodeId, ValueId};
use dplan_ir::extent::{Seat, context, node_rule};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::{Graph, Layout, Node};
use dplan_ir::interp::graph::GraphRun;
use dplan_ir::interp::{Tensor, op};
use dplan_ir::mesh::{Axis, AxisSet, Mesh};
use dplan_ir::rule::{Assignment, Rule, Split};
use dplan_ir::sharding::{LocalType, Monoid, Padded, Sharding};
use std::collections::BTreeSet;

/// Variants of [`dplan_ir::op::Op`].
const OPS: usize = 45;

/// Of dropout.
const DRAWS: Draws = Draws { seed: 3, sequence: 2 };

#[test]
fn evaluating_blocks_gives_blocks_of_the_whole_for_every_op_and_assignment() {
    let mut seen = BTreeSet::new();
    let mut checked = 0;
    for_each_node(|check, rule| {
        seen.insert(check.op_name());
        for assignment in assignments(rule, check.mesh) {
            match check.run(rule, &assignment) {
                Ok(legal) => checked += usize::from(legal),
                Err(why) => panic!("{}: {} {:?} under {assignment:?}: {why}", check.graph.name, check.id, check.node.op),
            }
        }
    });
    assert_eq!(seen.len(), OPS, "ops that some case has: {seen:?}");
    assert!(checked > 5_000, "only {checked} legal assignments");
}

/// What a wrong rule could claim.
#[derive(Debug)]
enum Lie {
    Split(char, Split),
    Monoid(Monoid),
}

#[test]
fn rules_that_claim_more_are_caught() {
    use Split::{Exact, Free};
    let lies = [
        ("RmsNorm", Lie::Split('c', Exact)),
        ("RmsNormGradInput", Lie::Split('c', Exact)),
        ("RmsNormGradWeight", Lie::Split('c', Exact)),
        ("LayerNorm", Lie::Split('c', Exact)),
        ("LayerNorm", Lie::Split('a', Free)),
        ("LayerNormGradInput", Lie::Split('c', Exact)),
        ("AddBias", Lie::Split('a', Free)),
        ("Rope", Lie::Split('e', Exact)),
        ("Attention", Lie::Split('t', Exact)),
        ("Attention", Lie::Split('d', Exact)),
        ("AttentionGrad", Lie::Split('d', Exact)),
        ("Embed", Lie::Split('b', Free)),
        ("AddPosition", Lie::Split('b', Free)),
        ("CeStats", Lie::Monoid(Monoid::Sum)),
        ("CeStats", Lie::Split('a', Free)),
        ("MeanGrad", Lie::Split('a', Free)),
        ("TopKGate", Lie::Split('e', Exact)),
        ("TopKGateGrad", Lie::Split('e', Exact)),
        ("RmsNorm", Lie::Split('e', Exact)),
        ("AttentionSink", Lie::Split('t', Exact)),
        ("Capacity", Lie::Split('b', Exact)),
    ];
    for (op, lie) in lies {
        let mut caught = false;
        for_each_node(|check, rule| {
            if check.op_name() != op || caught {
                return;
            }
            let mut wrong = rule.clone();
            match lie {
                Lie::Split(label, split) => wrong.factors.iter_mut().filter(|f| f.label == label).for_each(|f| f.split = split),
                Lie::Monoid(monoid) => wrong.outs[0].1 = monoid,
            }
            caught = assignments(&wrong, check.mesh).iter().any(|a| check.run(&wrong, a).is_err());
        });
        assert!(caught, "{op} with {lie:?} passes");
    }
}

/// One choice serves a node and its derivatives, so a letter of both stands for one dim. Sums of cotangents follow what they add.
#[test]
fn derivatives_have_the_letters_of_their_origins() {
    for_each_node(|check, rule| {
        if check.op_name() == "Add" {
            return;
        }
        let origin = &check.graph.nodes[check.node.origin];
        let letters = |node: &Node, rule: &Rule| -> Vec<(char, DimId)> {
            let labels = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l));
            let dims = node.inputs.iter().chain(&node.outputs).map(|&v| &check.graph.values[v].ty.dims);
            labels.zip(dims).flat_map(|(labels, dims)| labels.iter().copied().zip(dims.iter().copied())).collect()
        };
        let forward = letters(origin, &node_rule(check.graph, origin));
        for (letter, dim) in letters(check.node, rule) {
            let other = forward.iter().find(|&&(l, d)| l == letter && d != dim);
            let name = |d: DimId| &check.graph.dims[d].name;
            let is = other.map(|&(_, d)| name(d));
            assert_eq!(is, None, "{}: `{letter}` is `{}` in {:?}, which derives from {:?}", check.graph.name, name(dim), check.node.op, origin.op);
        }
    });
}

/// Every node of every case, on meshes of two axes.
fn for_each_node(mut f: impl FnMut(&Check<'_>, &Rule)) {
    for case in cases::all() {
        let graph = differentiate(&case.graph).unwrap_or_else(|why| panic!("{}: {why}", case.graph.name));
        let run = GraphRun::drawing(&graph, &case.params, &case.inputs, case.inv_tokens, DRAWS);
        for sizes in [[2, 3], [2, 2]] {
            let mesh = Mesh { axes: sizes.iter().enumerate().map(|(i, &size)| Axis { name: format!("tp{i}"), size }).collect(), nesting: vec![] };
            for (id, node) in graph.nodes.iter() {
                f(&Check { graph: &graph, run: &run, mesh: &mesh, id, node, case: &case }, &node_rule(&graph, node));
            }
        }
    }
}

/// Each axis goes to one factor that may be split, or to none.
fn assignments(rule: &Rule, mesh: &Mesh) -> Vec<Assignment> {
    let labels: Vec<char> = rule.factors.iter().filter(|f| f.split != Split::Whole).map(|f| f.label).collect();
    let mut all = vec![Assignment::default()];
    for axis in mesh.ids() {
        let mut next = all.clone();
        for assignment in &all {
            for &label in &labels {
                let mut more = assignment.clone();
                more.assign(label, AxisSet::one(axis));
                next.push(more);
            }
        }
        all = next;
    }
    all
}

struct Check<'a> {
    graph: &'a Graph,
    run: &'a GraphRun,
    mesh: &'a Mesh,
    id: NodeId,
    node: &'a Node,
    case: &'a Case,
}

impl Check<'_> {
    fn op_name(&self) -> String {
        format!("{:?}", self.node.op).split(['(', ' ']).next().unwrap_or_default().to_string()
    }

    /// Whether the assignment is legal for the sizes at hand; if it is and blocks do not give the whole, what differs.
    fn run(&self, rule: &Rule, assignment: &Assignment) -> Result<bool, String> {
        let Some(padded) = self.padded(rule, assignment) else { return Ok(false) };
        let place = rule.place(assignment);
        let (ins, outs) = (place.ins.iter().collect::<Vec<_>>(), place.outs.iter().collect::<Vec<_>>());
        let mut results: Vec<Vec<Tensor>> = Vec::new();
        for local_rank in 0..self.mesh.ranks() {
            let seat = Seat { mesh: self.mesh, padded: &padded, local_rank };
            let ctx = context(self.graph, self.node, &ins, &outs, seat, self.case.inv_tokens).drawing(DRAWS);
            let blocks: Vec<Tensor> = self.node.inputs.iter().zip(&place.ins).map(|(&v, s)| self.block(v, s, &padded, local_rank)).collect();
            let types: Vec<LocalType> = self.node.outputs.iter().zip(&place.outs).map(|(&v, s)| self.local_type(v, s, &padded)).collect();
            let got = op::eval(&self.node.op, &ctx, &blocks.iter().collect::<Vec<_>>(), &types);
            for (tensor, ty) in got.iter().zip(&types) {
                assert_eq!((&tensor.dims, tensor.layout, tensor.data.len() as u64), (&ty.dims, ty.layout, ty.elems()), "type of {:?}", self.node.op);
            }
            results.push(got);
        }
        for (at, (&value, sharding)) in self.node.outputs.iter().zip(&place.outs).enumerate() {
            let parts: Vec<&Tensor> = results.iter().map(|r| &r[at]).collect();
            self.compare(value, sharding, &padded, &parts)?;
        }
        Ok(true)
    }

    /// Dims whose factors are all free are padded, needed or not; all others must divide.
    fn padded(&self, rule: &Rule, assignment: &Assignment) -> Option<Padded> {
        let mut padded = Padded(self.graph.dims.map(|_, d| d.size));
        let labels: Vec<(DimId, char)> = rule
            .ins
            .iter()
            .zip(&self.node.inputs)
            .chain(rule.outs.iter().map(|(l, _)| l).zip(&self.node.outputs))
            .flat_map(|(labels, &v)| self.graph.values[v].ty.dims.iter().copied().zip(labels.iter().copied()))
            .collect();
        for &(dim, _) in &labels {
            let of_dim = || labels.iter().filter(|(d, _)| *d == dim).map(|(_, l)| *l);
            let free = of_dim().all(|l| rule.factor(l).is_some_and(|f| f.split == Split::Free));
            let size = self.graph.size(dim);
            if free {
                padded.0[dim] = size.next_multiple_of(self.mesh.ranks());
            } else if of_dim().any(|l| !size.is_multiple_of(self.mesh.size(assignment.axes(l)))) {
                return None;
            }
        }
        Some(padded)
    }

    fn local_type(&self, value: ValueId, sharding: &Sharding, padded: &Padded) -> LocalType {
        let ty = &self.graph.values[value].ty;
        dplan_ir::sharding::local_type(&dplan_ir::graph::Type { dtype: DType::F64, ..ty.clone() }, sharding, padded, self.mesh)
    }

    /// A rank's block of a whole value of the run.
    fn block(&self, value: ValueId, sharding: &Sharding, padded: &Padded, local_rank: u64) -> Tensor {
        let whole = self.run.get(value);
        let local = self.local_type(value, sharding, padded);
        let start: Vec<u64> = sharding.dims.iter().zip(&local.dims).map(|(&axes, n)| self.mesh.position(local_rank, axes) * n).collect();
        let gate = self.gate(value);
        let dense = gate.map_or_else(|| whole.clone(), |g| whole.to_dense(self.run.get(g)));
        let part = Tensor::from_fn(&local.dims, |i| {
            let at: Vec<u64> = i.iter().zip(&start).map(|(i, s)| i + s).collect();
            let inside = at.iter().zip(&dense.dims).all(|(i, n)| i < n);
            if inside { dense.data[dense.at(&at)] } else { 0.0 }
        });
        match gate {
            Some(gate) => part.to_layout(local.layout, &self.local_gate(gate, sharding, padded, local_rank)),
            None => part,
        }
    }

    /// The block of a gate that belongs to a block of a routed value: its first three dims are the gate's.
    fn local_gate(&self, gate: ValueId, routed: &Sharding, padded: &Padded, local_rank: u64) -> Tensor {
        self.block(gate, &Sharding::of_dims(routed.dims[..3].to_vec()), padded, local_rank)
    }

    /// The gate that says which rows a routed value has.
    fn gate(&self, value: ValueId) -> Option<ValueId> {
        if self.graph.values[value].ty.layout == Layout::Dense {
            return None;
        }
        let producer = &self.graph.nodes[self.graph.producer(value)?];
        let last = *producer.inputs.last()?;
        let is_gate = self.graph.values[last].ty.dims.len() == 3 && self.graph.values[last].ty.layout == Layout::Dense;
        if is_gate { Some(last) } else { self.gate(producer.inputs[0]) }
    }

    fn compare(&self, value: ValueId, sharding: &Sharding, padded: &Padded, parts: &[&Tensor]) -> Result<(), String> {
        let gate = self.gate(value);
        let dense: Vec<Tensor> = (0u64..)
            .zip(parts)
            .map(|(rank, part)| match gate {
                Some(gate) => {
                    let gate = self.local_gate(gate, sharding, padded, rank);
                    let dense = part.to_dense(&gate);
                    assert_eq!(dense.clone().to_layout(part.layout, &gate), **part, "{:?}: rows past the last are zero", self.node.op);
                    dense
                }
                None => (*part).clone(),
            })
            .collect();
        let whole = gate.map_or_else(|| self.run.get(value).clone(), |g| self.run.get(value).to_dense(self.run.get(g)));
        for rank in 0..self.mesh.ranks() {
            let group = self.mesh.group(rank, sharding.partial);
            let terms: Vec<&Tensor> = group.iter().map(|&r| &dense[r as usize]).collect();
            let start: Vec<u64> = sharding.dims.iter().zip(&terms[0].dims).map(|(&axes, n)| self.mesh.position(rank, axes) * n).collect();
            let expected = Tensor::from_fn(&terms[0].dims, |i| {
                let at: Vec<u64> = i.iter().zip(&start).map(|(i, s)| i + s).collect();
                let inside = at.iter().zip(&whole.dims).all(|(i, n)| i < n);
                if inside { whole.data[whole.at(&at)] } else { 0.0 }
            });
            for (i, &y) in expected.data.iter().enumerate() {
                let x = reduce(sharding.monoid, terms.iter().map(|t| t.data[i]));
                if x.is_nan() || (x - y).abs() > 1e-11 * (1.0 + y.abs()) {
                    return Err(format!("`{}` on rank {rank}, element {i}: {x}, whole {y}", self.graph.values[value].name));
                }
            }
        }
        Ok(())
    }
}

fn reduce(monoid: Monoid, terms: impl Iterator<Item = f64> + Clone) -> f64 {
    match monoid {
        Monoid::Sum => terms.sum(),
        Monoid::Max => terms.fold(f64::NEG_INFINITY, f64::max),
        Monoid::LogSumExp => {
            let max = terms.clone().fold(f64::NEG_INFINITY, f64::max);
            max + terms.map(|x| (x - max).exp()).sum::<f64>().ln()
        }
    }
}
