//! One training step's gradients as ranks add them up that round them for their exchange.
//!
//! What a rank has added up by itself depends on the plan, so the reference is the sharded graph (level 2), which has each rank's part of every contribution and
//! knows neither buckets nor programs. Of a parameter with contributions `gᵣ` on rank `r`
//!
//! ```text
//! gradient = Σ over turns, tensor-parallel axes, stages   Σ over data-parallel ranks r, in order   bf16(Σ of a turn gᵣ)
//! ```
//! in f64 but for the rounding. A *turn* is what is added up before it is exchanged: at ZeRO 0 and 1 all contributions of a stage in a step, at ZeRO 2 and 3 those of a
//! layer in a micro-batch.
//!
//! Where gradients are compressed, a rank's elements go together by buckets, of which the program's table says what is in them and where: of `g` and what is left over
//! the largest are sent in place of the rounded, and the others are left over for the next step.

use std::collections::BTreeMap;

use dplan_ir::entity::{BucketId, FormId, ParamId, Table, ValueId};
use dplan_ir::graph::Graph;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::sharded::{ShardedRun, apply};
use dplan_ir::mesh::AxisSet;
use dplan_ir::optimizer::StepScalars;
use dplan_ir::plan::Plan;
use dplan_ir::program::{Bucket, Member};
use dplan_ir::reshard::{Step, steps};
use dplan_ir::sharded::Sharded;
use dplan_ir::sharding::{Monoid, Sharding};
use dplan_planner::lower::{self, LowerError};

/// A plan that rounds gradients, and its sharded graph.
pub struct Rounding<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    sharded: Sharded,
    /// Contributions to each parameter, as they are added up.
    contributions: Table<ParamId, Vec<FormId>>,
    /// Which gradients are compressed together, by stage.
    buckets: Vec<Table<BucketId, Bucket>>,
    /// What each rank has left over of them.
    residuals: BTreeMap<(u32, BucketId), Vec<Vec<f64>>>,
    /// Whether it hung on rounding what was sent: the least that was sent and the most that was not are as large, but for [`TIE`].
    pub tied: bool,
}

/// How much larger what is sent has to be than what is not, relatively: far more than sums in another order differ by.
const TIE: f64 = 1e-9;

/// What is added up before it is exchanged: of a parameter, by the stage or the layer that it comes from.
type Turns = BTreeMap<(ParamId, u32), Vec<Tensor>>;

impl<'a> Rounding<'a> {
    /// # Errors
    /// A plan that is not one of this graph.
    pub fn new(graph: &'a Graph, plan: &'a Plan) -> Result<Rounding<'a>, LowerError> {
        let sharded = lower::shard(graph, plan)?;
        let last = |value: ValueId, like: &dyn Fn(&Sharding) -> bool| {
            let forms = sharded.forms.iter().filter(|(_, f)| f.value == value && like(&f.sharding));
            forms.map(|(id, _)| id).last()
        };
        let contributions = graph.grads.map(|param, values| {
            let stored = last(graph.params[param].value, &|_| true).map(|f| sharded.forms[f].sharding.dims.clone());
            values.iter().filter_map(|&v| last(v, &|s| Some(&s.dims) == stored.as_ref())).collect()
        });
        let buckets = match plan.wire.kept() {
            Some(_) => lower::lower(graph, plan)?.stages.into_iter().map(|stage| stage.buckets).collect(),
            None => Vec::new(),
        };
        Ok(Rounding { graph, plan, sharded, contributions, buckets, residuals: BTreeMap::new(), tied: false })
    }

    /// Loss and gradients of a step.
    pub fn step(&mut self, params: &Table<ParamId, Tensor>, batches: &[Vec<Tensor>], scalars: &StepScalars) -> (f64, Table<ParamId, Tensor>) {
        let graph = self.graph;
        let mut loss = 0.0;
        let mut grads = params.map(|_, p| p.map(|_| 0.0));
        let mut turns = Turns::new();
        let sequences = graph.batch.map_or(0, |d| graph.size(d));
        for (m, inputs) in (0..).zip(batches) {
            let draws = scalars.draws.after(m * sequences);
            let sharded = &self.sharded;
            let run = ShardedRun::drawing(graph, sharded, params, inputs, scalars.inv_tokens, draws);
            let of_loss = sharded.forms.iter().find(|(_, f)| Some(f.value) == graph.loss).map(|(id, _)| id);
            loss += of_loss.and_then(|f| run.whole(graph, sharded, f)).map_or(0.0, |ranks| ranks[0].data[0]);
            for (param, forms) in self.contributions.iter() {
                for &form in forms {
                    let turn = turns.entry((param, self.turn_of(form))).or_default();
                    for (rank, part) in run.forms[form].iter().enumerate() {
                        match turn.get_mut(rank) {
                            Some(sum) => *sum = sum.zip(part, |a, b| a + b),
                            None => turn.push(part.clone()),
                        }
                    }
                }
            }
            let is_last = m as usize + 1 == batches.len();
            let (done, goes_on): (Turns, Turns) = turns.into_iter().partition(|((param, _), _)| is_last || self.scatters_always(*param));
            turns = goes_on;
            let done = self.compressed(done);
            for ((param, _), parts) in done {
                grads[param] = grads[param].zip(&self.summed(param, parts), |a, b| a + b);
            }
        }
        (loss, grads)
    }

    /// What ranks send of what they have added up, if that is not all: with what each had left over, the largest elements of each bucket.
    fn compressed(&mut self, mut done: Turns) -> Turns {
        let Some(share) = self.plan.wire.kept().filter(|_| !done.is_empty()) else { return done };
        let mesh = &self.sharded.mesh;
        for (stage, table) in (0..).zip(&self.buckets) {
            for (id, bucket) in table.iter().filter(|(_, b)| mesh.size(b.partial.and(mesh.data())) > 1) {
                let nothing = || vec![vec![0.0; bucket.elems as usize]; mesh.ranks() as usize];
                let residuals = self.residuals.entry((stage, id)).or_insert_with(nothing);
                for (rank, left) in residuals.iter_mut().enumerate() {
                    let range = |member: &Member| member.offset as usize..(member.offset + member.elems) as usize;
                    for member in &bucket.members {
                        if let Some(parts) = done.get(&(member.param, stage)) {
                            left[range(member)].iter_mut().zip(&parts[rank].data).for_each(|(left, grad)| *left += grad);
                        }
                    }
                    // The last that is sent, and how many of its size are.
                    let mut sizes: Vec<f64> = left.iter().map(|x| x.abs()).collect();
                    sizes.sort_by(|a, b| b.total_cmp(a));
                    let kept = share.of(bucket.elems) as usize;
                    let least = sizes[kept - 1];
                    // Where both are nothing, nothing is sent or left over.
                    self.tied |= least > TIE * sizes[0] && sizes.get(kept).is_some_and(|next| least - next <= TIE * least);
                    let mut equal = kept - sizes.iter().filter(|&&size| size > least).count();
                    let mut sent = vec![0.0; left.len()];
                    for (sent, left) in sent.iter_mut().zip(left.iter_mut()) {
                        let is_last = left.abs() == least;
                        if left.abs() > least || is_last && equal > 0 {
                            equal -= usize::from(is_last);
                            *sent = std::mem::take(left);
                        }
                    }
                    for member in &bucket.members {
                        if let Some(parts) = done.get_mut(&(member.param, stage)) {
                            parts[rank].data.copy_from_slice(&sent[range(member)]);
                        }
                    }
                }
            }
        }
        done
    }

    /// The layer or the stage that exchanges a contribution.
    fn turn_of(&self, form: FormId) -> u32 {
        let value = self.sharded.forms[form].value;
        let layer = self.graph.producer(value).map_or(0, |n| self.graph.nodes[n].layer);
        if self.plan.layer(layer).zero.0 >= 2 { layer } else { self.plan.stage_of(layer) as u32 }
    }

    /// Whether each micro-batch scatters the gradient of a parameter.
    fn scatters_always(&self, param: ParamId) -> bool {
        let producer = self.graph.grads[param].first().and_then(|&v| self.graph.producer(v));
        producer.is_some_and(|n| self.plan.layer(self.graph.nodes[n].layer).zero.0 >= 2)
    }

    /// The whole gradient that ranks make of their parts, of one turn.
    fn summed(&self, param: ParamId, parts: Vec<Tensor>) -> Tensor {
        let mesh = &self.sharded.mesh;
        let Some(sharding) = self.contributions[param].first().map(|&f| &self.sharded.forms[f].sharding) else { return parts[0].clone() };
        let data = mesh.data().and(sharding.partial);
        let sum = |axes: AxisSet, parts: Vec<Tensor>| apply(&Step::AllReduce { axes, monoid: Monoid::Sum }, &parts, mesh);
        let sent: Vec<Tensor> = match self.plan.wire.dtype().filter(|_| mesh.size(data) > 1) {
            Some(dtype) => parts.iter().map(|part| part.map(|x| dtype.round(x))).collect(),
            None => parts,
        };
        let reduced = sum(sharding.partial.minus(data), sum(data, sent));
        let (local, whole) = (Sharding::of_dims(sharding.dims.clone()), Sharding::replicated(sharding.dims.len()));
        let gathered = steps(&local, &whole).iter().fold(reduced, |blocks, step| apply(step, &blocks, mesh));
        let shape = self.graph.shape(self.graph.params[param].value);
        Tensor::from_fn(&shape, |index| gathered[0].data[gathered[0].at(index)])
    }
}
