//! What a plan costs, recomputed from the plan alone.
//!
//! Every layer is priced by its lowering, under the least padding that the plan needs, and the stages are put together by the objective. The parts are those of
//! the slowest stage, and add up to the step: what it computes, waits for traffic, spends on the optimizer, and waits for other stages (*bubble*).

use crate::cost::comm::collective_time;
use crate::cost::round::spent;
use crate::lower::{BackwardPass, LowerError, plan_padding};
use crate::machine::Cluster;
use crate::memory::{Arena, LayerBytes, StagePosition, StateTypes, arena};
use crate::objective::{Home, StageTime, Terms, border, share, total};
use crate::options::{Halves, LayerOption, Pricing};
use crate::placement::{Seat, Site};
use crate::prices::Links;
use crate::simulate::{StageWork, simulate};
use crate::units::{Bytes, Nanos};
use dplan_ir::cost::{Unit, op_cost};
use dplan_ir::entity::ValueId;
use dplan_ir::extent::node_rule;
use dplan_ir::graph::Graph;
use dplan_ir::mesh::Mesh;
use dplan_ir::pipeline::Slots;
use dplan_ir::plan::{Plan, Residence};
use dplan_ir::program::Pattern;
use dplan_ir::reshard::Step;
use dplan_ir::sharded::Stmt;
use dplan_ir::sharding::{LocalType, Padded, Sharding, local_type};
use std::collections::BTreeMap;

/// Memory of the ranks of one stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StageMemory {
    pub arena: Arena,
    pub context: Bytes,
}

impl StageMemory {
    pub fn arena_bytes(&self) -> u64 {
        self.arena.total()
    }
    pub fn total_bytes(&self) -> u64 {
        self.arena.total() + self.context.0
    }
}

/// Where the time of the slowest stage goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Parts {
    pub compute: Nanos,
    pub exposed_comm: Nanos,
    pub bubble: Nanos,
    pub optimizer: Nanos,
    pub offload: Nanos,
}

/// A plan's costs.
#[derive(Clone, PartialEq, Debug)]
pub struct Prediction {
    /// The objective.
    pub step: Nanos,
    /// By event simulation of the schedule.
    pub simulated: Nanos,
    pub tokens_per_second: f64,
    pub tokens_per_second_per_device: f64,
    /// Matrix products of the model itself, FLOP/s.
    pub model_flops_per_device: f64,
    /// With padding and recomputation, and every other op, FLOP/s.
    pub hardware_flops_per_device: f64,
    /// Of the device's peak in the compute type.
    pub mfu: f64,
    pub memory: Vec<StageMemory>,
    pub parts: Parts,
    /// Of each stage: a micro-batch with its messages, and the end of the step.
    pub stages: Vec<StageTime>,
    /// What the simulation ran: the virtual stages.
    pub works: Vec<StageWork>,
}

/// A priced layer.
struct Layer {
    option: LayerOption,
    /// Where backward passes come in halves.
    halves: Option<Halves>,
    /// Nanoseconds of tensor-parallel collectives and copies, both passes.
    traffic: u64,
    /// Of one rank and micro-batch.
    flops: u128,
}

impl Layer {
    fn bytes(&self) -> &LayerBytes {
        self.halves.as_ref().map_or(&self.option.bytes, |h| &h.bytes)
    }
}

/// # Errors
/// A plan that is not one of this graph.
pub fn predict(graph: &Graph, classes: &[u32], cluster: &Cluster, plan: &Plan) -> Result<Prediction, LowerError> {
    let mesh = plan.mesh();
    let padded = plan_padding(graph, &mesh, plan)?;
    let pricing = |site| Pricing::new(graph, cluster.site(site), plan.degrees(), plan.micro_batch, plan.boundary, padded.clone());
    let seats: Vec<Seat> = (0..plan.pp()).map(|stage| cluster.seat(plan, stage)).collect();
    let pricings: BTreeMap<Site, Pricing<'_>> = seats.iter().map(|seat| (seat.site, pricing(seat.site))).collect();
    let stage_of: Vec<u64> = (0..classes.len() as u32).map(|l| plan.stage_of(l) as u64).collect();
    let layers = priced(&pricings, classes, plan, |layer| seats[stage_of[layer] as usize].site)?;
    let types = StateTypes::of(plan);
    let pipeline = plan.pipeline();
    let (p, m) = (pipeline.stages, pipeline.micro_batches);
    let terms = |site| Terms { links: cluster, site, mesh: &mesh, types, clip: plan.clip, pipeline };
    let constant = terms(seats[0].site).constant(p);
    let crossing: Vec<u64> = boundaries(&pricings[&seats[0].site]);
    let boundary = crossing.iter().copied().max().unwrap_or(0);

    let tied: Vec<bool> = layers.iter().map(|l| l.bytes().buckets.iter().any(|b| b.tied)).collect();
    let mut stages = Vec::new();
    let mut shares = Vec::new();
    let mut works = vec![StageWork::default(); plan.stages.len()];
    let mut memory = Vec::new();
    let mut parts = Vec::new();
    for stage in 0..p {
        let terms = terms(seats[stage as usize].site);
        let (mut time, mut sum, mut part) = (StageTime::default(), StageTime::default(), Parts::default());
        let mut bytes: Vec<(&LayerBytes, Residence, Slots)> = Vec::new();
        for (c, slots) in pipeline.virtual_stages_of(stage).zip(pipeline.slots(stage)) {
            let (cut, work) = (&plan.stages[c as usize], &mut works[c as usize]);
            for at in cut.first as usize..=cut.last as usize {
                let (layer, residence) = (&layers[at], plan.layer(at as u32).residence());
                let home = match tied[at] {
                    false => Home::Together,
                    true if (0..at).any(|l| tied[l] && stage_of[l] == stage) => Home::Repeated,
                    true if (0..tied.len()).any(|l| tied[l] && stage_of[l] != stage) => Home::Apart,
                    true => Home::Together,
                };
                let sync = terms.sync(layer.bytes(), residence.states, home);
                let sync = terms.storing(sync, layer.bytes().frame, residence.activations);
                let terms = match &layer.halves {
                    Some(halves) => sync.parted(layer.option.forward, halves.input, halves.weight),
                    None => sync.terms(layer.option.forward, layer.option.backward),
                };
                time = time + StageTime { time: terms.time, end: terms.end };
                sum = sum + share(&pipeline, &terms);
                work.forward += terms.forward;
                work.backward += terms.time - terms.forward - terms.weight;
                work.weight += terms.weight;
                let compute = layer.option.time().0 - layer.traffic;
                part.compute += Nanos(m * compute);
                let updates = plan.schedule.updates().count(m) * sync.update();
                part.optimizer += Nanos(updates);
                part.offload += Nanos(sync.offload());
                part.exposed_comm += Nanos(m * (terms.time - compute) + terms.end - updates - sync.offload());
                bytes.push((layer.bytes(), residence, slots));
            }
            let next = Some(c + 1).filter(|&n| n < pipeline.all_virtual()).map(|n| pipeline.stage_of(n)).filter(|&n| n != stage);
            if let Some(next) = next {
                work.message = cluster.message(&mesh, seats[stage as usize], seats[next as usize], crossing[cut.last as usize]).0;
                time.time += 2 * work.message;
                sum = sum + border(&pipeline, 2 * work.message);
                part.exposed_comm += Nanos(2 * m * work.message);
            }
        }
        let arena = arena(&bytes, &mesh, types, StagePosition { pipeline, stage, boundary });
        memory.push(StageMemory { arena, context: cluster.site(seats[stage as usize].site).device.context });
        stages.push(time);
        shares.push(sum);
        parts.push(part);
    }

    let step = total(&shares, &pipeline, constant);
    let ends: Vec<u64> = stages.iter().map(|s| s.end).collect();
    let slowest = (0..stages.len()).rev().max_by_key(|&s| (stages[s].time, stages[s].end)).unwrap_or(0);
    let mut parts = parts[slowest];
    parts.exposed_comm += Nanos(constant);
    let own = parts.compute.0 + parts.exposed_comm.0 + parts.optimizer.0 + parts.offload.0;
    parts.bubble = Nanos(step.saturating_sub(own));

    let seconds = Nanos(step).seconds().max(1e-12);
    let devices = plan.devices() as f64;
    let tokens_per_second = (plan.batch() * graph.positions()) as f64 / seconds;
    let model = model_flops(graph, plan.micro_batch) as f64 * (plan.dp * m) as f64 / seconds / devices;
    let hardware = layers.iter().map(|l| l.flops as f64).sum::<f64>() * m as f64 / seconds / p as f64;
    Ok(Prediction {
        step: Nanos(step),
        simulated: Nanos(simulate(&works, &ends, &pipeline) + constant),
        tokens_per_second,
        tokens_per_second_per_device: tokens_per_second / devices,
        model_flops_per_device: model,
        hardware_flops_per_device: hardware,
        mfu: model / cluster.mean_peak(plan.compute).0.max(1) as f64,
        memory,
        parts,
        stages,
        works,
    })
}

/// Each layer's price on its site; layers of one class and plan on one site have one.
fn priced(
    pricings: &BTreeMap<Site, Pricing<'_>>,
    classes: &[u32],
    plan: &Plan,
    site_of: impl Fn(usize) -> Site,
) -> Result<Vec<std::rc::Rc<Layer>>, LowerError> {
    let backward_pass = BackwardPass::of(&plan.pipeline());
    let sharders =
        pricings.iter().map(|(&site, pricing)| Ok((site, pricing.sharder(backward_pass)?))).collect::<Result<BTreeMap<_, _>, LowerError>>()?;
    let mut known: BTreeMap<(Site, u32, u32), std::rc::Rc<Layer>> = BTreeMap::new();
    let mut layers = Vec::new();
    for (&class, at) in classes.iter().zip(0..) {
        let site = site_of(at as usize);
        let (pricing, sharder) = (&pricings[&site], &sharders[&site]);
        let key = (site, class, plan.layers[at as usize]);
        if let Some(layer) = known.get(&key) {
            layers.push(std::rc::Rc::clone(layer));
            continue;
        }
        let fragment = sharder.layer(at, plan.layer(at))?;
        let option = pricing.option(&fragment, plan.layer(at));
        let block = |&form: &_| fragment.local(form, pricing.graph, &pricing.mesh, &pricing.padded);
        let (mut traffic, mut flops) = (0, 0u128);
        for stmt in fragment.forward.iter().chain(&fragment.backward) {
            match stmt {
                Stmt::Run { node, ins, outs, assignment } => {
                    let (ins, outs): (Vec<LocalType>, Vec<LocalType>) = (ins.iter().map(block).collect(), outs.iter().map(block).collect());
                    let node = &pricing.graph.nodes[*node];
                    let split = (&node_rule(pricing.graph, node), assignment);
                    let (ins, outs) = (ins.iter().collect::<Vec<_>>(), outs.iter().collect::<Vec<_>>());
                    let spent = spent(pricing.machine, &pricing.mesh, &node.op, split, &ins, &outs);
                    flops += u128::from(spent.flops);
                    traffic += spent.exposed.0;
                }
                Stmt::Reshard { from, to, step, .. } => {
                    let pattern = match step {
                        Step::AllReduce { .. } => Pattern::AllReduce,
                        Step::ReduceScatter { .. } => Pattern::ReduceScatter,
                        Step::AllGather { .. } => Pattern::AllGather,
                        Step::Slice { .. } => continue,
                    };
                    let bytes = block(from).bytes().max(block(to).bytes());
                    traffic += collective_time(pricing.machine, &pricing.mesh, step.axes(), pattern, bytes).0;
                }
            }
        }
        let halves = match backward_pass {
            BackwardPass::Whole => None,
            BackwardPass::Parted => Some(pricing.halves(&fragment)),
        };
        let layer = std::rc::Rc::new(Layer { halves, traffic: traffic.min(option.time().0), option, flops });
        known.insert(key, std::rc::Rc::clone(&layer));
        layers.push(layer);
    }
    Ok(layers)
}

/// Bytes on one rank of what each layer but the last hands on.
fn boundaries(pricing: &Pricing<'_>) -> Vec<u64> {
    let block = |value: ValueId| {
        let sharding = pricing.boundary_sharding(value)?;
        Some(local_type(&pricing.graph.values[value].ty, &sharding, &pricing.padded, &pricing.mesh).bytes())
    };
    pricing.graph.boundaries().into_iter().map(|v| block(v).unwrap_or(0)).collect()
}

/// Multiplications and additions of matrix products, forward and backward, of one micro-batch.
fn model_flops(graph: &Graph, micro_batch: u64) -> u128 {
    let mut logical = Padded(graph.dims.map(|_, d| d.size));
    if let Some(batch) = graph.batch {
        logical.0[batch] = micro_batch;
    }
    let mesh = Mesh::new(1, 1);
    let whole = |&value: &ValueId| {
        let ty = &graph.values[value].ty;
        local_type(ty, &Sharding::replicated(ty.dims.len()), &logical, &mesh)
    };
    let flops = |node: &dplan_ir::graph::Node| {
        let (ins, outs): (Vec<LocalType>, Vec<LocalType>) = (node.inputs.iter().map(whole).collect(), node.outputs.iter().map(whole).collect());
        let cost = op_cost(&node.op, &ins.iter().collect::<Vec<_>>(), &outs.iter().collect::<Vec<_>>());
        match cost.unit {
            Unit::Matrix { .. } => u128::from(cost.flops),
            Unit::Vector => 0,
        }
    };
    graph.nodes.values().map(flops).sum()
}
