//! A sharded graph, on all ranks of its mesh at once.
//!
//! Every form is a tensor per rank. Ops run on each rank's blocks; reshard steps are the collectives of their definition, members in group order.

use crate::dropout::Draws;
use crate::dtype::DType;
use crate::entity::{FormId, ParamId, Table, ValueId};
use crate::extent::{Seat, context, node_rule};
use crate::graph::{Def, Graph, Layout};
use crate::interp::ring::join;
use crate::interp::{Tensor, op};
use crate::mesh::{AxisSet, Mesh};
use crate::reshard::{Step, steps};
use crate::ring::Ring;
use crate::rule::Label;
use crate::sharded::{Sharded, Stmt};
use crate::sharding::{LocalType, Monoid, Padded, Sharding, local_type};

/// Every form of one run: one tensor per rank.
#[derive(Clone, PartialEq, Debug)]
pub struct ShardedRun {
    pub forms: Table<FormId, Vec<Tensor>>,
}

impl ShardedRun {
    /// Runs a sharded graph for one micro-batch, given whole parameters and inputs.
    ///
    /// # Panics
    /// If the sharded graph does not verify, or parameters and inputs are not of the shapes the graph says.
    pub fn new(graph: &Graph, sharded: &Sharded, params: &Table<ParamId, Tensor>, inputs: &[Tensor], inv_tokens: f64) -> ShardedRun {
        ShardedRun::drawing(graph, sharded, params, inputs, inv_tokens, Draws::default())
    }

    /// As [`ShardedRun::new`], with dropout.
    ///
    /// # Panics
    /// As [`ShardedRun::new`].
    pub fn drawing(
        graph: &Graph,
        sharded: &Sharded,
        params: &Table<ParamId, Tensor>,
        inputs: &[Tensor],
        inv_tokens: f64,
        draws: Draws,
    ) -> ShardedRun {
        let (mesh, padded) = (&sharded.mesh, &sharded.padded);
        let ranks = mesh.ranks();
        let given = |value: ValueId| match graph.values[value].def {
            Def::Param(p) => Some(&params[p]),
            Def::Input => graph.inputs.iter().position(|&v| v == value).map(|at| &inputs[at]),
            Def::Node(..) => None,
        };
        let forms = sharded.forms.map(|_, form| match given(form.value) {
            Some(whole) => (0..ranks).map(|r| block(&pad(whole, graph, form.value, padded), &form.sharding, mesh, r)).collect(),
            None => Vec::new(),
        });
        let mut run = ShardedRun { forms };
        for stmt in &sharded.body {
            match stmt {
                Stmt::Run { node, ins, outs, assignment } => {
                    let node = &graph.nodes[*node];
                    let shardings = |forms: &[FormId]| forms.iter().map(|&f| &sharded.forms[f].sharding).collect::<Vec<_>>();
                    if !node_rule(graph, node).goes_round(assignment).is_empty() {
                        let results = run.round(graph, sharded, stmt, inv_tokens);
                        outs.iter().zip(results).for_each(|(&f, blocks)| run.forms[f] = blocks);
                        continue;
                    }
                    for local_rank in 0..ranks {
                        let seat = Seat { mesh, padded, local_rank };
                        let ctx = context(graph, node, &shardings(ins), &shardings(outs), seat, inv_tokens).drawing(draws);
                        let blocks: Vec<&Tensor> = ins.iter().map(|&f| &run.forms[f][local_rank as usize]).collect();
                        let types: Vec<LocalType> = outs.iter().map(|&f| form_type(graph, sharded, f)).collect();
                        let results = op::eval(&node.op, &ctx, &blocks, &types);
                        outs.iter().zip(results).for_each(|(&f, result)| run.forms[f].push(result));
                    }
                }
                Stmt::Reshard { from, to, step, .. } => run.forms[*to] = apply(step, &run.forms[*from], mesh),
            }
        }
        run
    }

    /// The results of a node whose keys go round, by rank: in each turn of what its own queries and the keys of a rank before make.
    fn round(&self, graph: &Graph, sharded: &Sharded, stmt: &Stmt, inv_tokens: f64) -> Vec<Vec<Tensor>> {
        let (Stmt::Run { node, ins, outs, assignment }, mesh) = (stmt, &sharded.mesh) else { return Vec::new() };
        let node = &graph.nodes[*node];
        let rule = node_rule(graph, node);
        let (axes, ranks) = (rule.goes_round(assignment), mesh.ranks());
        let keys = rule.blockwise.map(|of| of.keys);
        let has_keys = |labels: &[Label]| labels.iter().any(|&l| Some(l) == keys);
        let types: Vec<LocalType> = outs.iter().map(|&f| form_type(graph, sharded, f)).collect();
        let mut parts: Vec<Vec<Option<Tensor>>> = vec![vec![None; ranks as usize]; outs.len()];
        for turn in 0..mesh.size(axes) {
            let ring = Ring { turn, ..Ring::home(axes, mesh.size(axes)) };
            for local_rank in 0..ranks {
                let owner = mesh.before(local_rank, axes, turn);
                let placed = |labels: &[Label], form: FormId| {
                    let (sharding, rank) = (sharded.forms[form].sharding.clone(), if has_keys(labels) { owner } else { local_rank });
                    (if has_keys(labels) { sharding.in_ring(Some(ring)) } else { sharding }, rank as usize)
                };
                let of_ins: Vec<(Sharding, usize)> = rule.ins.iter().zip(ins).map(|(l, &f)| placed(l, f)).collect();
                let of_outs: Vec<(Sharding, usize)> = rule.outs.iter().zip(outs).map(|((l, _), &f)| placed(l, f)).collect();
                let shardings = |of: &'_ [(Sharding, usize)]| of.iter().map(|(s, _)| s.clone()).collect::<Vec<_>>();
                let (i, o) = (shardings(&of_ins), shardings(&of_outs));
                let seat = Seat { mesh, padded: &sharded.padded, local_rank };
                let ctx = context(graph, node, &i.iter().collect::<Vec<_>>(), &o.iter().collect::<Vec<_>>(), seat, inv_tokens);
                let blocks: Vec<&Tensor> = ins.iter().zip(&of_ins).map(|(&f, &(_, rank))| &self.forms[f][rank]).collect();
                let results = op::eval(&node.op, &ctx, &blocks, &types);
                let known: Option<Vec<Tensor>> = parts.iter().zip(&of_outs).map(|(part, &(_, rank))| part[rank].clone()).collect();
                let joined = match known {
                    Some(known) => join(rule.outs[0].1, &known, &results),
                    None => results,
                };
                parts.iter_mut().zip(&of_outs).zip(joined).for_each(|((part, &(_, rank)), result)| part[rank] = Some(result));
            }
        }
        parts.into_iter().map(|blocks| blocks.into_iter().flatten().collect()).collect()
    }

    /// The value that a form stands for, put together from all ranks' blocks, without padding; on every rank. The reference for tests: all are equal to
    /// the value itself. None for routed values, whose rows are packed.
    pub fn whole(&self, graph: &Graph, sharded: &Sharded, form: FormId) -> Option<Vec<Tensor>> {
        let of = &sharded.forms[form];
        if graph.values[of.value].ty.layout != Layout::Dense {
            return None;
        }
        let whole = Sharding::replicated(of.sharding.dims.len());
        let blocks = steps(&of.sharding, &whole).iter().fold(self.forms[form].clone(), |blocks, step| apply(step, &blocks, &sharded.mesh));
        let shape = graph.shape(of.value);
        Some(blocks.iter().map(|t| Tensor::from_fn(&shape, |index| t.data[t.at(index)])).collect())
    }
}

/// A reshard step on the blocks of all ranks.
pub fn apply(step: &Step, blocks: &[Tensor], mesh: &Mesh) -> Vec<Tensor> {
    let members = |rank: usize, axes: AxisSet| mesh.group(rank as u64, axes).into_iter().map(|m| &blocks[m as usize]).collect::<Vec<_>>();
    let position = |rank: usize, axes: AxisSet| mesh.position(rank as u64, axes);
    let on_rank = |rank: usize| match *step {
        Step::AllReduce { axes, monoid } => reduce(&members(rank, axes), monoid),
        Step::ReduceScatter { axes, dim, monoid } => {
            narrow(&reduce(&members(rank, axes), monoid), dim as usize, position(rank, axes), mesh.size(axes))
        }
        Step::AllGather { axes, dim } => concat(&members(rank, axes), dim as usize),
        Step::Slice { axes, .. } if axes.is_empty() => blocks[rank].clone(),
        Step::Slice { axes, dim } => narrow(&blocks[rank], dim as usize, position(rank, axes), mesh.size(axes)),
    };
    (0..blocks.len()).map(on_rank).collect()
}

/// `a ⊕ b` of a monoid.
pub fn combine(monoid: Monoid, a: f64, b: f64) -> f64 {
    match monoid {
        Monoid::Sum => a + b,
        Monoid::Max => a.max(b),
        Monoid::LogSumExp => {
            let max = a.max(b);
            if max == f64::NEG_INFINITY { max } else { max + ((a - max).exp() + (b - max).exp()).ln() }
        }
    }
}

/// A whole tensor with the dims of `value` filled up with zeros to their padded sizes.
pub fn pad(whole: &Tensor, graph: &Graph, value: ValueId, padded: &Padded) -> Tensor {
    let dims: Vec<u64> = graph.values[value].ty.dims.iter().map(|&d| padded.size(d)).collect();
    let inside = |index: &[u64]| index.iter().zip(&whole.dims).all(|(i, n)| i < n);
    Tensor::from_fn(&dims, |index| if inside(index) { whole.data[whole.at(index)] } else { 0.0 })
}

/// One rank's block of a padded tensor.
pub fn block(padded: &Tensor, sharding: &Sharding, mesh: &Mesh, rank: u64) -> Tensor {
    let cut = |tensor: Tensor, (dim, &axes): (usize, &AxisSet)| match axes.is_empty() {
        true => tensor,
        false => narrow(&tensor, dim, mesh.position(rank, axes), mesh.size(axes)),
    };
    sharding.dims.iter().enumerate().fold(padded.clone(), cut)
}

fn form_type(graph: &Graph, sharded: &Sharded, form: FormId) -> LocalType {
    let of = &sharded.forms[form];
    LocalType { dtype: DType::F64, ..local_type(&graph.values[of.value].ty, &of.sharding, &sharded.padded, &sharded.mesh) }
}

pub(crate) fn reduce(members: &[&Tensor], monoid: Monoid) -> Tensor {
    members[1..].iter().fold(members[0].clone(), |sum, next| sum.zip(next, |a, b| combine(monoid, a, b)))
}

/// Block `at` of `ways` equal ones of a dim.
pub(crate) fn narrow(tensor: &Tensor, dim: usize, at: u64, ways: u64) -> Tensor {
    let (rows, first) = stored(tensor);
    let mut block = rows.dims.clone();
    block[dim - first] /= ways;
    let start = at * block[dim - first];
    let data = Tensor::from_fn(&block, |index| {
        let mut index = index.to_vec();
        index[dim - first] += start;
        rows.data[rows.at(&index)]
    });
    let mut dims = tensor.dims.clone();
    dims[dim] /= ways;
    Tensor { dims, layout: tensor.layout, data: data.data }
}

pub(crate) fn concat(members: &[&Tensor], dim: usize) -> Tensor {
    let parts: Vec<(Tensor, usize)> = members.iter().map(|t| stored(t)).collect();
    let (rows, first) = &parts[0];
    let each = rows.dims[dim - first];
    let mut whole = rows.dims.clone();
    whole[dim - first] *= members.len() as u64;
    let data = Tensor::from_fn(&whole, |index| {
        let mut index = index.to_vec();
        let (member, _) = &parts[(index[dim - first] / each) as usize];
        index[dim - first] %= each;
        member.data[member.at(&index)]
    });
    let mut dims = members[0].dims.clone();
    dims[dim] *= members.len() as u64;
    Tensor { dims, layout: members[0].layout, data: data.data }
}

/// The elements as they are stored, as a dense tensor, and by how much its dims are numbered lower: rows in top-k layout stand for the first three dims.
fn stored(tensor: &Tensor) -> (Tensor, usize) {
    match tensor.layout {
        Layout::Dense => (tensor.clone(), 0),
        Layout::TopK { .. } => {
            let width: u64 = tensor.dims[3..].iter().product();
            let rows = tensor.data.len() as u64 / width.max(1);
            let dims: Vec<u64> = [rows].into_iter().chain(tensor.dims[3..].iter().copied()).collect();
            (Tensor::dense(&dims, tensor.data.clone()), 2)
        }
    }
}
