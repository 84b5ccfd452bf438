//! Programs of all stages: the arena, the segments of each virtual stage, the calls in the order of the schedule, and the events between streams.

use super::arena::Arena;
use super::events::order_streams;
use super::fragment::Fragment;
use super::shard::Sharder;
use super::stage::{Stage, VirtualStage};
use super::{LowerError, passes};
use dplan_ir::entity::{SegmentId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::pipeline::{Pass, Pipeline, Turn};
use dplan_ir::plan::{Plan, Schedule};
use dplan_ir::program::{Call, Program, Segment, SegmentKind, StageProgram, Updates};

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
    let stages = (0..plan.pp()).map(|stage| stage_program(&sharder, plan, &fragments, stage)).collect();
    Ok(Program {
        mesh: sharder.mesh.clone(),
        padded: sharder.padded.clone(),
        micro_batches: plan.micro_batches,
        optimizer: Some(plan.optimizer),
        updates: plan.schedule.updates(),
        stages,
    })
}

fn stage_program(sharder: &Sharder<'_>, plan: &Plan, fragments: &[Fragment], index: u64) -> StageProgram {
    let pipeline = plan.pipeline();
    let (mut layers, mut virtual_stages) = (Vec::new(), Vec::new());
    for (of, slots) in pipeline.virtual_stages_of(index).zip(pipeline.slots(index)) {
        let cut = &plan.stages[of as usize];
        let first = layers.len();
        layers.extend(&fragments[cut.first as usize..=cut.last as usize]);
        virtual_stages.push(VirtualStage { index: of, layers: first..layers.len(), slots });
    }
    let stage = Stage { sharder, plan, layers: &layers, virtual_stages: &virtual_stages, index: index as u32 };
    let mut arena = Arena::new(stage);
    let mut segments = Table::new();
    let begin = segments.push(passes::begin(stage, &arena));
    let of_virtual: Vec<Segments> = virtual_stages.iter().map(|v| Segments::new(stage, &arena, v, &mut segments)).collect();
    let update = segments.push(passes::update(stage, &arena));
    let window = match stage.updates() {
        Updates::Step => None,
        Updates::MicroBatch => Some(Window::new(stage, &arena, update, &mut segments)),
    };
    let schedule = |pipeline: Pipeline| -> Vec<Call> {
        let mut calls = vec![Call { segment: begin, micro_batch: 0 }];
        let versions = pipeline.slots(index)[0].versions;
        for Turn { pass, nth, micro_batch } in pipeline.turns(index) {
            let last = micro_batch + 1 == pipeline.micro_batches;
            calls.push(Call { segment: of_virtual[nth as usize].of(pass, last), micro_batch });
            if let Some(window) = &window {
                window.behind(pass, (micro_batch, pipeline.micro_batches), versions, &mut calls);
            }
        }
        let once = window.as_ref().map_or(Some(update), |window| window.end);
        calls.extend(once.map(|segment| Call { segment, micro_batch: 0 }));
        calls
    };
    let mut program = std::mem::take(&mut arena.program);
    program.segments = segments;
    program.schedule = schedule(pipeline);
    order_streams(&mut program, stage.mesh(), &schedule(sample(&pipeline, &virtual_stages)));
    program
}

/// Few micro-batches in which all slots of a stage meet all others that they ever meet.
fn sample(pipeline: &Pipeline, virtual_stages: &[VirtualStage]) -> Pipeline {
    let frames = virtual_stages.iter().map(|v| v.slots.frames).max().unwrap_or(1);
    match pipeline.schedule {
        // Messages have two slots.
        Schedule::GPipe => Pipeline { micro_batches: pipeline.micro_batches.min(6), ..*pipeline },
        Schedule::OneFOneB | Schedule::ZbH1 | Schedule::PipeDream => {
            Pipeline { micro_batches: pipeline.micro_batches.min(2 * frames + 4), ..*pipeline }
        }
        Schedule::Interleaved | Schedule::ZbV => pipeline.shortened(1),
    }
}

/// What a stage does beside its passes where each micro-batch has an update of its own.
struct Window {
    update: SegmentId,
    /// Where parameters are put by, and where there is something to do at the end.
    stash: Option<SegmentId>,
    end: Option<SegmentId>,
}

impl Window {
    fn new(stage: Stage<'_>, arena: &Arena, update: SegmentId, segments: &mut Table<SegmentId, Segment>) -> Window {
        let mut some = |segment: Segment| (!segment.body.is_empty()).then(|| segments.push(segment));
        Window { update, stash: some(passes::stash(stage, arena)), end: some(passes::end(stage, arena)) }
    }

    /// What follows a pass: parameters are put by for a micro-batch's backward pass when its forward pass has begun to work with them, or when they are about to be updated, if
    /// that comes first; of `versions` places, that of the backward pass just over is then free.
    fn behind(&self, pass: Pass, (micro_batch, count): (u64, u64), versions: u64, calls: &mut Vec<Call>) {
        let mut stash = |micro_batch: u64| calls.extend(self.stash.map(|segment| Call { segment, micro_batch }));
        match pass {
            Pass::Forward if micro_batch < versions => stash(micro_batch),
            Pass::Backward => {
                // Before the first update there is nothing new.
                if micro_batch > 0 && micro_batch + versions < count {
                    stash(micro_batch + versions);
                }
                calls.push(Call { segment: self.update, micro_batch });
            }
            Pass::Forward | Pass::Input | Pass::Weight => {}
        }
    }
}

/// The segments of a virtual stage.
struct Segments {
    forward: SegmentId,
    /// Backward, or its input half, of a micro-batch that is not the last, and of the last.
    backward: [SegmentId; 2],
    /// The weight half of the same.
    weight: [SegmentId; 2],
}

impl Segments {
    fn new(stage: Stage<'_>, arena: &Arena, of: &VirtualStage, segments: &mut Table<SegmentId, Segment>) -> Segments {
        let forward = segments.push(passes::forward(stage, arena, of));
        let mut push = |pass: Pass, kind: SegmentKind| segments.push(passes::backward(stage, arena, of, pass, kind));
        // A segment that is never called is not there.
        let mut both = |pass: Pass, kind: SegmentKind, kind_of_last: SegmentKind| {
            let others = match stage.updates() {
                Updates::Step => (stage.plan.micro_batches > 1).then(|| push(pass, kind)),
                // Each is the last before an update.
                Updates::MicroBatch => None,
            };
            let last = push(pass, kind_of_last);
            [others.unwrap_or(last), last]
        };
        if stage.pipeline().parts_backward() {
            let weight = both(Pass::Weight, SegmentKind::BackwardWeight, SegmentKind::BackwardWeightLast);
            let input = push(Pass::Input, SegmentKind::BackwardInput);
            Segments { forward, backward: [input; 2], weight }
        } else {
            let backward = both(Pass::Backward, SegmentKind::Backward, SegmentKind::BackwardLast);
            Segments { forward, backward, weight: backward }
        }
    }

    fn of(&self, pass: Pass, last: bool) -> SegmentId {
        match pass {
            Pass::Forward => self.forward,
            Pass::Backward | Pass::Input => self.backward[usize::from(last)],
            Pass::Weight => self.weight[usize::from(last)],
        }
    }
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
                let [one, other] = [plan.layer(pair[0]), plan.layer(pair[1])];
                if one.zero != other.zero && !self.mesh.data().is_empty() || one.offload != other.offload {
                    return Err(LowerError::TiedStates { param: name() });
                }
            }
        }
        Ok(fragments)
    }
}
