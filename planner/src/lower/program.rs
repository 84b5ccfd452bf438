//! Programs of all stages.

use super::arena::Arena;
use super::events::order_streams;
use super::fragment::Fragment;
use super::schedule::{Turn, order};
use super::shard::Sharder;
use super::stage::Stage;
use super::{LowerError, passes};
use dplan_ir::entity::{SegmentId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::plan::{Plan, Schedule};
use dplan_ir::program::{Call, Program, SegmentKind, StageProgram};

/// Lowers a plan. The graph is differentiated, and its batch is `dp · micro_batch`.
///
/// # Errors
/// A plan that does not fit the graph, a strategy that an op does not allow, or homes of a shared parameter that do not agree.
pub fn lower(graph: &Graph, plan: &Plan) -> Result<Program, LowerError> {
    if graph.loss.is_none() {
        return Err(LowerError::NoLoss);
    }
    let sharder = Sharder::of_plan(graph, plan)?;
    let fragments = sharder.fragments(plan)?;
    let stages = plan.stages.iter().enumerate().map(|(index, s)| {
        let layers = &fragments[s.first as usize..=s.last as usize];
        stage_program(Stage { sharder: &sharder, plan, layers, index: index as u32 })
    });
    let stages = stages.collect();
    Ok(Program {
        mesh: sharder.mesh.clone(),
        padded: sharder.padded.clone(),
        micro_batches: plan.micro_batches,
        optimizer: Some(plan.optimizer),
        stages,
    })
}

fn stage_program(stage: Stage<'_>) -> StageProgram {
    let mut arena = Arena::new(stage);
    let mut segments = Table::new();
    let begin = segments.push(passes::begin(stage, &arena));
    let forward = segments.push(passes::forward(stage, &arena));
    let backward = (stage.plan.micro_batches > 1).then(|| segments.push(passes::backward(stage, &arena, SegmentKind::Backward)));
    let last = segments.push(passes::backward(stage, &arena, SegmentKind::BackwardLast));
    let update = segments.push(passes::update(stage, &arena));
    let schedule = |micro_batches: u64| -> Vec<Call> {
        let call = |segment: SegmentId, micro_batch: u64| Call { segment, micro_batch };
        let turns = order(stage.plan.schedule, u64::from(stage.index), u64::from(stage.stages()), micro_batches);
        let calls = turns.into_iter().map(|turn| match turn {
            Turn::Forward(m) => call(forward, m),
            Turn::Backward(m) => call(if m + 1 == micro_batches { last } else { backward.unwrap_or(last) }, m),
        });
        [call(begin, 0)].into_iter().chain(calls).chain([call(update, 0)]).collect()
    };
    let mut program = std::mem::take(&mut arena.program);
    program.segments = segments;
    program.schedule = schedule(stage.plan.micro_batches);
    // A steady state shows all slots of a stage meeting all others; messages have two.
    let enough = match stage.plan.schedule {
        Schedule::GPipe => 6,
        Schedule::OneFOneB => 2 * stage.in_flight() + 4,
    };
    order_streams(&mut program, stage.mesh(), &schedule(stage.plan.micro_batches.min(enough)));
    program
}

impl Sharder<'_> {
    /// All layers, sharded as the plan says. Homes of a shared parameter agree on its sharding and its ZeRO stage.
    ///
    /// # Errors
    /// As [`Sharder::layer`], or homes that do not agree.
    pub fn fragments(&self, plan: &Plan) -> Result<Vec<Fragment>, LowerError> {
        let fragments = (0..self.layers()).map(|l| self.layer(l, plan.layer(l))).collect::<Result<Vec<_>, _>>()?;
        for param in self.graph.params.ids().filter(|&p| self.homes(p).len() > 1) {
            let name = || self.graph.values[self.graph.params[param].value].name.clone();
            let member = |layer: u32| fragments[layer as usize].buckets.iter().flat_map(|b| &b.members).find(|m| m.param == param);
            for pair in self.homes(param).windows(2) {
                if member(pair[0]).map(|m| &m.sharding) != member(pair[1]).map(|m| &m.sharding) {
                    return Err(LowerError::ParamShardings { param: name() });
                }
                if plan.layer(pair[0]).zero != plan.layer(pair[1]).zero && !self.mesh.data().is_empty() {
                    return Err(LowerError::TiedZero { param: name() });
                }
            }
        }
        Ok(fragments)
    }
}
