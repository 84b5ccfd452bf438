//! Sharding of a graph by a plan: what is known of the whole graph, and the layers one after the other.

use super::LowerError;
use super::fragment::{BackwardPass, Fragment};
use super::layer::shard_one;
use crate::padding;
use dplan_ir::data::{data_dims, data_split};
use dplan_ir::entity::{DimId, FormId, NodeId, ParamId, Table, ValueId};
use dplan_ir::extent::node_rule;
use dplan_ir::graph::{Graph, Node, Phase};
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::op::Op;
use dplan_ir::order::Order;
use dplan_ir::plan::{Away, Clip, LayerPlan, Plan};
use dplan_ir::program::Updates;
use dplan_ir::rule::{Assignment, Label};
use dplan_ir::sharded::{Sharded, Stmt};
use dplan_ir::sharding::{Padded, Sharding, local_type};
use std::collections::BTreeSet;
use std::ops::Range;

/// A differentiated graph and what all layers share, ready to shard any of its layers in any way.
#[derive(Clone, Debug)]
pub struct Sharder<'a> {
    pub graph: &'a Graph,
    pub mesh: Mesh,
    pub padded: Padded,
    /// Dim of every layer boundary that the tensor-parallel axes shard.
    pub boundary: Option<u32>,
    pub backward_pass: BackwardPass,
    /// Forward and backward nodes of each layer; both are runs of consecutive nodes.
    spans: Vec<[Range<u32>; 2]>,
    /// The value that each layer but the last hands to the next.
    crossing: Vec<ValueId>,
    /// Layers that use each parameter, ascending.
    homes: Table<ParamId, Vec<u32>>,
    /// For each `Add` of cotangents, the value whose cotangent it is part of.
    sums: Table<NodeId, Option<ValueId>>,
}

impl<'a> Sharder<'a> {
    /// # Errors
    /// If the graph has no backward pass, or its layers do not hand over one value each.
    pub fn new(graph: &'a Graph, mesh: Mesh, padded: Padded, boundary: Option<u32>) -> Result<Sharder<'a>, LowerError> {
        if !graph.is_differentiated() {
            return Err(LowerError::NotDifferentiated);
        }
        let spans = spans(graph);
        let crossing = crossing(graph, spans.len() as u32)?;
        let backward_pass = BackwardPass::Whole;
        Ok(Sharder { graph, mesh, padded, boundary, backward_pass, spans, crossing, homes: homes(graph)?, sums: sums(graph) })
    }

    /// The same with backward passes as they are.
    pub fn with(self, backward_pass: BackwardPass) -> Sharder<'a> {
        Sharder { backward_pass, ..self }
    }

    /// As a plan has it.
    ///
    /// # Errors
    /// As [`Sharder::new`], or a plan whose layers or strategies are not the graph's.
    pub fn of_plan(graph: &'a Graph, plan: &Plan) -> Result<Sharder<'a>, LowerError> {
        check(graph, plan)?;
        let mesh = plan.mesh();
        let padded = plan_padding(graph, &mesh, plan)?;
        Ok(Sharder::new(graph, mesh, padded, plan.boundary)?.with(BackwardPass::of(&plan.pipeline())))
    }

    pub fn layers(&self) -> u32 {
        self.spans.len() as u32
    }
    /// The value that `layer` hands to the next.
    pub fn output(&self, layer: u32) -> Option<ValueId> {
        self.crossing.get(layer as usize).copied()
    }
    /// The value that `layer` is handed by the one before.
    pub fn input(&self, layer: u32) -> Option<ValueId> {
        layer.checked_sub(1).and_then(|before| self.output(before))
    }
    /// Layers that use a parameter, ascending.
    pub fn homes(&self, param: ParamId) -> &[u32] {
        &self.homes[param]
    }
    pub(crate) fn forward(&self, layer: u32) -> impl Iterator<Item = (NodeId, &'a Node)> + use<'a> {
        self.nodes(self.spans[layer as usize][0].clone())
    }
    pub(crate) fn backward(&self, layer: u32) -> impl Iterator<Item = (NodeId, &'a Node)> + use<'a> {
        self.nodes(self.spans[layer as usize][1].clone())
    }
    /// Place of a forward node in its layer's strategy.
    pub(crate) fn strategy_index(&self, node: NodeId) -> usize {
        let layer = self.graph.nodes[node].layer;
        (node.0 - self.spans[layer as usize][0].start) as usize
    }
    pub(crate) fn sum_of(&self, node: NodeId) -> Option<ValueId> {
        self.sums[node]
    }
    fn nodes(&self, span: Range<u32>) -> impl Iterator<Item = (NodeId, &'a Node)> + use<'a> {
        let graph = self.graph;
        span.map(move |n| (NodeId(n), &graph.nodes[NodeId(n)]))
    }

    /// How a value crosses from one layer to another: batch and sequence split over data axes, one dim over all tensor-parallel ranks or none.
    ///
    /// # Errors
    /// If the value has no such dim, or its size does not divide.
    pub fn boundary_sharding(&self, value: ValueId) -> Result<Sharding, LowerError> {
        let info = &self.graph.values[value];
        let mut dims = data_dims(self.graph, value, &self.mesh);
        if let Some(at) = self.boundary.or(info.ty.dims.is_empty().then_some(0)) {
            let dim = dims.get_mut(at as usize).ok_or_else(|| LowerError::BoundaryDim { value: info.name.clone(), dim: at })?;
            *dim = dim.union(self.mesh.tp());
        }
        let sharding = Sharding::of_dims(dims);
        self.divides(value, &sharding)?;
        Ok(sharding)
    }

    /// Bytes of the largest boundary on one rank.
    pub fn boundary_bytes(&self) -> u64 {
        let bytes = |&value: &ValueId| {
            let sharding = self.boundary_sharding(value).ok()?;
            Some(local_type(&self.graph.values[value].ty, &sharding, &self.padded, &self.mesh).bytes())
        };
        self.crossing.iter().filter_map(bytes).max().unwrap_or(0)
    }

    /// Whether every dim of `value` divides under `sharding`.
    pub(super) fn divides(&self, value: ValueId, sharding: &Sharding) -> Result<(), LowerError> {
        let info = &self.graph.values[value];
        for (&dim, &axes) in info.ty.dims.iter().zip(&sharding.dims) {
            let (size, ways) = (self.padded.size(dim), self.mesh.size(axes));
            if size % ways != 0 {
                let dim = self.graph.dims[dim].name.clone();
                return Err(LowerError::Indivisible { dim, value: info.name.clone(), size, ways });
            }
        }
        Ok(())
    }

    /// One layer, sharded.
    ///
    /// # Errors
    /// A strategy that the layer's ops do not allow.
    pub fn layer(&self, layer: u32, plan: &LayerPlan) -> Result<Fragment, LowerError> {
        shard_one(self, layer, plan)
    }
}

/// One layer of a differentiated graph, sharded. Use a [`Sharder`] for more than one.
///
/// # Errors
/// As [`Sharder::new`] and [`Sharder::layer`].
pub fn shard_layer(graph: &Graph, layer: u32, plan: &LayerPlan, boundary: Option<u32>, mesh: &Mesh, padded: &Padded) -> Result<Fragment, LowerError> {
    Sharder::new(graph, mesh.clone(), padded.clone(), boundary)?.layer(layer, plan)
}

/// The whole graph, sharded as the plan says: forward passes of all layers, then backward passes from the last layer to the first.
///
/// # Errors
/// A plan that does not fit the graph, or a strategy that an op does not allow.
pub fn shard(graph: &Graph, plan: &Plan) -> Result<Sharded, LowerError> {
    let sharder = Sharder::of_plan(graph, plan)?;
    let fragments = sharder.fragments(plan)?;
    Ok(concatenate(&sharder, &fragments))
}

/// Sizes under which every sharding of the plan divides.
///
/// # Errors
/// If a layer's strategy does not have one assignment per forward node.
pub fn plan_padding(graph: &Graph, mesh: &Mesh, plan: &Plan) -> Result<Padded, LowerError> {
    let mut uses: Vec<(DimId, AxisSet)> = Vec::new();
    let mut seen = Vec::new();
    // Batches are never padded.
    let shared = mesh.ep().union(mesh.cp());
    for layer in strategies(graph, plan)? {
        for (node, assignment) in layer {
            if assignment.0.is_empty() && shared.is_empty() {
                continue;
            }
            let rule = node_rule(graph, node);
            let assignment = if shared.is_empty() { assignment.clone() } else { assignment.and(&data_split(graph, node, &rule, mesh)) };
            let sides = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l)).zip(node.inputs.iter().chain(&node.outputs));
            for (labels, &value) in sides {
                uses.extend(labels.iter().zip(&graph.values[value].ty.dims).map(|(&l, &d)| (d, assignment.axes(l))).filter(|(_, a)| !a.is_empty()));
            }
        }
        // Few distinct uses, many layers.
        seen.append(&mut uses);
        seen.sort_unstable();
        seen.dedup();
    }
    if let Some(at) = plan.boundary {
        seen.extend(graph.boundaries().iter().filter_map(|&v| graph.values[v].ty.dims.get(at as usize)).map(|&d| (d, mesh.tp())));
    }
    Ok(padding::padded(graph, mesh, seen))
}

/// The order of positions under which the plan's attention is balanced: for as many blocks as the plan splits the queries into.
///
/// # Errors
/// As [`plan_padding`].
pub fn plan_order(graph: &Graph, plan: &Plan) -> Result<Order, LowerError> {
    let (Some(sequence), mesh) = (graph.sequence, plan.mesh()) else { return Ok(Order::Straight) };
    let mut ways = 1;
    for layer in strategies(graph, plan)? {
        for (node, assignment) in layer {
            let rule = node_rule(graph, node);
            let sides = rule.ins.iter().zip(&node.inputs);
            let mut labels: Vec<Label> = sides
                .flat_map(|(labels, &v)| labels.iter().zip(&graph.values[v].ty.dims).filter(|(_, d)| **d == sequence).map(|(&l, _)| l))
                .collect();
            labels.sort_unstable();
            labels.dedup();
            // Queries and keys are two factors of one dim.
            if labels.len() > 1 {
                let split = assignment.and(&data_split(graph, node, &rule, &mesh));
                ways = labels.iter().map(|&l| mesh.size(split.axes(l))).fold(ways, u64::max);
            }
        }
    }
    Ok(Order::balanced(graph.size(sequence), ways))
}

/// The forward nodes of each layer, with what the plan assigns to their factors.
fn strategies<'a>(graph: &'a Graph, plan: &'a Plan) -> Result<Vec<Vec<(&'a Node, &'a Assignment)>>, LowerError> {
    let of_layer = |([forward, _], layer): ([Range<u32>; 2], u32)| {
        let strategy = &plan.layer(layer).strategy;
        if strategy.len() != forward.len() {
            return Err(LowerError::Strategy { layer, nodes: forward.len(), found: strategy.len() });
        }
        Ok(forward.map(|n| &graph.nodes[NodeId(n)]).zip(strategy).collect())
    };
    spans(graph).into_iter().zip(0..).map(of_layer).collect()
}

/// No degree of a plan is larger; a mesh then has fewer than 32 axes, since each is a prime factor.
const MOST: u64 = 1 << 24;

/// Whether the plan's numbers fit together and fit the graph.
fn check(graph: &Graph, plan: &Plan) -> Result<(), LowerError> {
    for (what, found) in
        [("dp", plan.dp), ("ep", plan.ep), ("cp", plan.cp), ("tp", plan.tp), ("micro_batch", plan.micro_batch), ("micro_batches", plan.micro_batches)]
    {
        match found {
            0 => return Err(LowerError::Zero { what }),
            1..=MOST => {}
            _ => return Err(LowerError::TooLarge { what, found, most: MOST }),
        }
    }
    if !plan.dp.is_multiple_of(plan.ep) {
        return Err(LowerError::Experts { dp: plan.dp, ep: plan.ep });
    }
    if plan.compute.scales_loss() && plan.clip == Clip::None {
        return Err(LowerError::Unclipped { compute: plan.compute });
    }
    if plan.compressed().is_some() && plan.compute.scales_loss() {
        return Err(LowerError::CompressedScale { wire: plan.wire.name(), compute: plan.compute });
    }
    let layers = graph.layer_count();
    if plan.layers.len() != layers as usize {
        return Err(LowerError::LayerCount { layers, found: plan.layers.len() });
    }
    for (layer, &option) in plan.layers.iter().enumerate() {
        match plan.options.get(option as usize) {
            None => return Err(LowerError::Option { layer: layer as u32, option, options: plan.options.len() }),
            Some(o) if o.zero.0 > 3 => return Err(LowerError::ZeroStage { found: o.zero.0 }),
            Some(_) => {}
        }
    }
    let mut expected = 0;
    for (stage, s) in plan.stages.iter().enumerate() {
        if s.first != expected || s.last < s.first {
            return Err(LowerError::Stages { stage, expected, found: s.first });
        }
        expected = s.last + 1;
    }
    if expected != layers {
        return Err(LowerError::Stages { stage: plan.stages.len(), expected, found: layers });
    }
    if plan.virtual_stages == 0 || !plan.stages.len().is_multiple_of(plan.virtual_stages as usize) {
        return Err(LowerError::Pipeline { schedule: plan.schedule.name(), needs: "as many virtual stages on each stage" });
    }
    let pipeline = plan.pipeline();
    if let Some(needs) = pipeline.refusal() {
        return Err(LowerError::Pipeline { schedule: plan.schedule.name(), needs });
    }
    let zero = |layer: &u32| plan.options[*layer as usize].zero.0;
    if let Some(found) = plan.layers.iter().map(zero).find(|&z| z > 1 && plan.dp * plan.cp > 1 && pipeline.parts_backward()) {
        return Err(LowerError::PartedZero { schedule: plan.schedule.name(), found });
    }
    let most = crate::problem::MOST_COMPRESSED;
    if let Some(found) = plan.layers.iter().map(zero).find(|&z| z > most && plan.compressed().is_some()) {
        return Err(LowerError::CompressedZero { wire: plan.wire.name(), found });
    }
    let away = |layer: &u32| plan.options[*layer as usize].away();
    if let Some(found) = plan.layers.iter().map(away).find(|a| a.is_in_passes() && pipeline.parts_backward()) {
        return Err(LowerError::PartedOffload { schedule: plan.schedule.name(), found: found.name() });
    }
    match plan.schedule.updates() {
        Updates::Step => {}
        Updates::MicroBatch => check_window(graph, plan)?,
    }
    match graph.batch.map(|b| graph.size(b)) {
        Some(size) if size != plan.dp * plan.micro_batch => Err(LowerError::Batch { plan: plan.dp * plan.micro_batch, graph: size }),
        _ => Ok(()),
    }
}

/// Whether stages can update parameters behind every micro-batch, without waiting for each other.
fn check_window(graph: &Graph, plan: &Plan) -> Result<(), LowerError> {
    let schedule = plan.schedule.name();
    if plan.clip != Clip::None {
        return Err(LowerError::StaleNorm { schedule });
    }
    let of_layers = || plan.layers.iter().map(|&option| &plan.options[option as usize]);
    if let Some(found) = of_layers().map(|o| o.zero.0).find(|&z| z > 1 && plan.dp * plan.cp > 1) {
        return Err(LowerError::StaleZero { schedule, found });
    }
    if let Some(found) = of_layers().map(|o| o.away()).find(|a| *a != Away::default()) {
        return Err(LowerError::StaleOffload { schedule, found: found.name() });
    }
    let used_by = |value: ValueId| graph.forward_nodes().filter(|(_, n)| n.inputs.contains(&value)).map(|(_, n)| n.layer).collect::<BTreeSet<u32>>();
    match graph.params.values().find(|p| plan.pp() > 1 && used_by(p.value).len() > 1) {
        Some(param) => Err(LowerError::StaleTie { schedule, param: graph.values[param.value].name.clone() }),
        None => Ok(()),
    }
}

/// Nodes of each layer: forward nodes come first and go up through the layers, backward nodes come down.
fn spans(graph: &Graph) -> Vec<[Range<u32>; 2]> {
    let mut spans = vec![[0..0, 0..0]; graph.layer_count() as usize];
    for (id, node) in graph.nodes.iter() {
        let span = &mut spans[node.layer as usize][usize::from(node.phase != Phase::Forward)];
        if span.start == span.end {
            span.start = id.0;
        }
        span.end = id.0 + 1;
    }
    spans
}

fn crossing(graph: &Graph, layers: u32) -> Result<Vec<ValueId>, LowerError> {
    let mut crossing: Vec<Option<ValueId>> = vec![None; layers.saturating_sub(1) as usize];
    for node in graph.nodes.values().filter(|n| n.phase == Phase::Forward) {
        for &input in &node.inputs {
            let Some(from) = graph.producer(input).map(|p| graph.nodes[p].layer) else { continue };
            if from < node.layer {
                let slot = &mut crossing[from as usize];
                if from + 1 != node.layer || slot.is_some_and(|v| v != input) {
                    return Err(LowerError::Crossing { layer: from });
                }
                *slot = Some(input);
            }
        }
    }
    let crossing: Vec<ValueId> =
        crossing.into_iter().enumerate().map(|(l, v)| v.ok_or(LowerError::Crossing { layer: l as u32 })).collect::<Result<_, _>>()?;
    for node in graph.nodes.values().filter(|n| n.phase == Phase::Forward) {
        if let Some(value) = crossing.get(node.layer as usize)
            && node.inputs.contains(value)
        {
            return Err(LowerError::BoundaryReused { value: graph.values[*value].name.clone(), layer: node.layer });
        }
    }
    Ok(crossing)
}

fn homes(graph: &Graph) -> Result<Table<ParamId, Vec<u32>>, LowerError> {
    let mut homes: Table<ParamId, Vec<u32>> = Table::filled(graph.params.len(), Vec::new());
    for node in graph.nodes.values().filter(|n| n.phase == Phase::Forward) {
        for param in node.inputs.iter().filter_map(|&v| graph.param_of(v)) {
            if homes[param].last() != Some(&node.layer) {
                homes[param].push(node.layer);
            }
        }
    }
    let name = |p: ParamId| graph.values[graph.params[p].value].name.clone();
    if let Some((param, _)) = homes.iter().find(|(_, h)| h.is_empty()) {
        return Err(LowerError::UnusedParam { param: name(param) });
    }
    let tied: Vec<ParamId> = homes.iter().filter(|(_, h)| h.len() > 1).map(|(p, _)| p).collect();
    if let [first, second, ..] = tied[..] {
        return Err(LowerError::SeveralTied { first: name(first), second: name(second) });
    }
    Ok(homes)
}

/// The `Add` chains that sum cotangents, found from their ends: the cotangent of a value, and on through first operands of the same origin.
fn sums(graph: &Graph) -> Table<NodeId, Option<ValueId>> {
    let mut sums = Table::filled(graph.nodes.len(), None);
    let adder = |value: ValueId| {
        let node = graph.producer(value)?;
        (graph.nodes[node].op == Op::Add && graph.nodes[node].phase != Phase::Forward).then_some(node)
    };
    // A value that passes its cotangent on unchanged shares its chain with others: the chain is of the value that its origin defines, or, summed for an
    // earlier layer, uses.
    for defined in [true, false] {
        for (value, cotangent) in graph.cotangents.iter() {
            let mut next = cotangent.and_then(adder);
            while let Some(node) = next.filter(|&n| sums[n].is_none()) {
                let origin = graph.nodes[node].origin;
                let belongs = if defined { graph.producer(value) == Some(origin) } else { graph.nodes[origin].inputs.contains(&value) };
                if !belongs {
                    break;
                }
                sums[node] = Some(value);
                next = adder(graph.nodes[node].inputs[0]).filter(|&n| graph.nodes[n].origin == origin);
            }
        }
    }
    sums
}

/// Puts fragments together: forms that two layers share, and parameters, become one.
fn concatenate(sharder: &Sharder<'_>, fragments: &[Fragment]) -> Sharded {
    let mut sharded = Sharded { mesh: sharder.mesh.clone(), padded: sharder.padded.clone(), ..Sharded::default() };
    let mut params: Table<ParamId, Option<FormId>> = Table::filled(sharder.graph.params.len(), None);
    let mut names: Vec<Table<FormId, Option<FormId>>> = fragments.iter().map(|f| Table::filled(f.forms.len(), None)).collect();
    let rename = |stmts: &[Stmt], names: &Table<FormId, Option<FormId>>| -> Vec<Stmt> {
        let new = |f: &FormId| names[*f].unwrap_or(*f);
        let all = |fs: &[FormId]| fs.iter().map(new).collect::<Vec<_>>();
        stmts
            .iter()
            .map(|stmt| match stmt {
                Stmt::Run { node, assignment, ins, outs } => {
                    Stmt::Run { node: *node, assignment: assignment.clone(), ins: all(ins), outs: all(outs) }
                }
                Stmt::Reshard { from, to, step, layer, pass } => {
                    Stmt::Reshard { from: new(from), to: new(to), step: *step, layer: *layer, pass: *pass }
                }
            })
            .collect()
    };
    for (at, fragment) in fragments.iter().enumerate() {
        // The cotangent that a layer is handed is the one that the next layer makes.
        for (id, form) in fragment.forms.iter().filter(|&(id, _)| fragment.cotangent_in != Some(id)) {
            let shared = match fragment.input {
                Some(input) if input == id && at > 0 => fragments[at - 1].output.and_then(|o| names[at - 1][o]),
                _ => sharder.graph.param_of(form.value).and_then(|p| params[p]),
            };
            let new = shared.unwrap_or_else(|| sharded.forms.push(form.clone()));
            names[at][id] = Some(new);
            if let Some(param) = sharder.graph.param_of(form.value) {
                params[param] = Some(new);
            }
        }
    }
    for at in 0..fragments.len().saturating_sub(1) {
        if let (Some(to), Some(from)) = (fragments[at].cotangent_in, fragments[at + 1].cotangent_out) {
            names[at][to] = names[at + 1][from];
        }
    }
    for (fragment, names) in fragments.iter().zip(&names) {
        sharded.body.extend(rename(&fragment.forward, names));
    }
    for (fragment, names) in fragments.iter().zip(&names).rev() {
        sharded.body.extend(rename(&fragment.backward, names));
    }
    sharded
}
