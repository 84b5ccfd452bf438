//! What is known of a layer before it is priced: its ops in the order in which the planner decides on them, and the values that connect them.
//!
//! Deciding on a forward op fixes the shardings of its operands and results and of those of its derivatives. A *slot* is a value through which decisions
//! meet; it is *open* from the first decision that touches it to the last. The order of decisions keeps few slots open at a time (a path decomposition of
//! the layer's decisions, found greedily). Nothing here depends on a machine or a mesh.

use super::form::WAYS;
use crate::lower::{LowerError, Sharder};
use crate::strategy::is_follower;
use dplan_ir::cost::is_cheap;
use dplan_ir::entity::{DimId, NodeId, ParamId, ValueId};
use dplan_ir::extent::node_rule;
use dplan_ir::graph::{Def, Graph, Phase};
use dplan_ir::mesh::Mesh;
use dplan_ir::op::Op as GraphOp;
use dplan_ir::rule::Rule;
use dplan_ir::sharding::Padded;
use std::collections::{BTreeMap, BTreeSet};

/// What kind of value a slot is, which decides what its forms cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Handed over by the layer before.
    Input,
    /// A graph input, loaded in whichever shardings it is read in.
    Load,
    /// A parameter; its decisions also tell the shardings of its gradient's terms.
    Param(ParamId),
    /// Made by the forward pass.
    Activation,
    /// The loss of the micro-batch.
    Loss,
    /// Cotangent handed over by the next layer.
    CotangentIn,
    /// Made by the backward pass.
    Cotangent,
}

#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub value: ValueId,
    pub kind: Kind,
    /// Leaves the layer in the boundary sharding.
    pub leaves: bool,
    /// Made by an op that runs again.
    pub again: [bool; WAYS],
    /// A parameter that other layers use too.
    pub tied: bool,
    /// First and last decision that touches it.
    pub first: usize,
    pub last: usize,
}

/// An operand or result of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Port {
    Slot(usize),
    /// A term of a parameter's gradient. `alone`: nothing else is made by the node that makes it, so it can be added to the gradient as it is made.
    Term {
        slot: usize,
        alone: bool,
    },
}

/// A node as a decision sees it.
#[derive(Clone, Debug)]
pub(super) struct Op {
    pub node: NodeId,
    pub rule: Rule,
    pub ins: Vec<usize>,
    pub outs: Vec<Port>,
}

/// A sum of two cotangents of one value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sum {
    pub terms: [usize; 2],
    pub out: usize,
    /// The value whose cotangents are summed: its place is where terms of different shardings meet.
    pub of: usize,
}

/// One decision.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// Position of the forward node in the layer's strategy.
    pub at: usize,
    pub forward: Op,
    /// The slot whose place the op follows ([`crate::strategy`]).
    pub leader: Option<usize>,
    /// Whether it runs again.
    pub again: [bool; WAYS],
    pub derived: Vec<Op>,
    /// Sums whose operands are all decided with this step.
    pub sums: Vec<Sum>,
    /// Slots that it touches, open before or not, ascending.
    pub touched: Vec<usize>,
    /// Those that no later step touches.
    pub settles: Vec<usize>,
}

/// A layer of a graph, ready to be priced under any [`super::Pricing`] of that graph.
#[derive(Clone, Debug)]
pub struct Blueprint {
    pub(super) slots: Vec<Slot>,
    pub(super) steps: Vec<Step>,
    /// A value that crosses a border of the layer, if one does.
    pub(super) crossing: Vec<ValueId>,
    /// Dims of its values, ascending.
    pub(super) dims: Vec<DimId>,
    pub(super) reads_back: bool,
}

impl Blueprint {
    /// Of the layer `layer` of a differentiated graph.
    ///
    /// # Errors
    /// If the graph is not one that can be lowered.
    pub fn new(graph: &Graph, layer: u32) -> Result<Blueprint, LowerError> {
        let sharder = Sharder::new(graph, Mesh::new(1, 1), Padded(graph.dims.map(|_, d| d.size)), None)?;
        Blueprint::of(&sharder, layer)
    }

    /// As [`Blueprint::new`], for several layers of one graph.
    ///
    /// # Errors
    /// If the layer reads a value that nothing makes.
    pub fn of(sharder: &Sharder<'_>, layer: u32) -> Result<Blueprint, LowerError> {
        let mut draft = Draft { sharder, layer, slots: Vec::new(), slot_of: BTreeMap::new() };
        let (steps, sums) = draft.steps()?;
        let mut slots = draft.slots;
        let mut steps = order(&steps, &sums, slots.len());
        for (at, step) in steps.iter().enumerate() {
            for &slot in &step.touched {
                slots[slot].first = slots[slot].first.min(at);
                slots[slot].last = slots[slot].last.max(at);
            }
        }
        for (at, step) in steps.iter_mut().enumerate() {
            step.settles = step.touched.iter().copied().filter(|&s| slots[s].last == at).collect();
        }
        // What all homes of a tied parameter must agree on is part of every complete decision.
        slots.iter_mut().filter(|s| s.tied).for_each(|s| s.last = usize::MAX);
        let crossing = [sharder.input(layer), sharder.output(layer)].into_iter().flatten().collect();
        let dims: BTreeSet<DimId> = slots.iter().flat_map(|s| sharder.graph.values[s.value].ty.dims.iter().copied()).collect();
        Ok(Blueprint { slots, steps, crossing, dims: dims.into_iter().collect(), reads_back: sharder.graph.reads_parameters_back(layer) })
    }

    pub(super) fn is_tied(&self, param: ParamId) -> bool {
        self.slots.iter().any(|s| s.tied && s.kind == Kind::Param(param))
    }

    /// Slots open after a step, ascending.
    pub(super) fn open_after(&self, step: usize) -> Vec<usize> {
        (0..self.slots.len()).filter(|&s| self.slots[s].first <= step && self.slots[s].last > step).collect()
    }
}

struct Draft<'d, 'g> {
    sharder: &'d Sharder<'g>,
    layer: u32,
    slots: Vec<Slot>,
    slot_of: BTreeMap<ValueId, usize>,
}

impl Draft<'_, '_> {
    /// The steps in graph order, and the sums in backward order.
    fn steps(&mut self) -> Result<(Vec<Step>, Vec<Sum>), LowerError> {
        let (graph, layer) = (self.sharder.graph, self.layer);
        let border = |value: Option<ValueId>| value.and_then(|v| graph.cotangents[v]);
        let (cotangent_in, cotangent_out) = (border(self.sharder.output(layer)), border(self.sharder.input(layer)));
        if let Some(value) = self.sharder.input(layer) {
            self.slot(value, Kind::Input);
        }
        if let Some(value) = cotangent_in {
            self.slot(value, Kind::CotangentIn);
        }
        let [cheap, all] = [self.made_again(is_cheap), self.made_again(|_| true)];
        let (mut steps, mut sums) = (Vec::new(), Vec::new());
        for (id, _) in self.sharder.forward(layer) {
            let again = [cheap[steps.len()], all[steps.len()]];
            let forward = self.op(id)?;
            for port in &forward.outs {
                if let Port::Slot(slot) = *port {
                    self.slots[slot].again = again;
                }
            }
            let leads = |slot: &usize| matches!(self.slots[*slot].kind, Kind::Input | Kind::Activation);
            let leader = forward.ins.first().copied().filter(leads).filter(|_| is_follower(&graph.nodes[id].op));
            steps.push(Step {
                at: steps.len(),
                forward,
                leader,
                again,
                derived: Vec::new(),
                sums: Vec::new(),
                touched: Vec::new(),
                settles: Vec::new(),
            });
        }
        for (id, node) in self.sharder.backward(layer) {
            if let Some(of) = self.sharder.sum_of(id) {
                let terms = [self.known(node.inputs[0])?, self.known(node.inputs[1])?];
                sums.push(Sum { terms, out: self.slot(node.outputs[0], Kind::Cotangent), of: self.known(of)? });
            } else {
                let op = self.op(id)?;
                let step: &mut Step = &mut steps[self.sharder.strategy_index(node.origin)];
                step.derived.push(op);
            }
        }
        for value in [self.sharder.output(layer), cotangent_out].into_iter().flatten() {
            let slot = self.known(value)?;
            self.slots[slot].leaves = true;
        }
        Ok((steps, sums))
    }

    fn op(&mut self, id: NodeId) -> Result<Op, LowerError> {
        let (sharder, graph) = (self.sharder, self.sharder.graph);
        let node = &graph.nodes[id];
        let mut ins = Vec::with_capacity(node.inputs.len());
        for &value in &node.inputs {
            ins.push(match graph.values[value].def {
                Def::Input => self.slot(value, Kind::Load),
                Def::Param(param) => self.slot(value, Kind::Param(param)),
                Def::Node(..) => self.known(value)?,
            });
        }
        let params: Vec<Option<usize>> = node.outputs.iter().map(|&v| self.gradient_of(id, v)).collect();
        let alone = params.iter().all(Option::is_some);
        let outs = node.outputs.iter().zip(params).map(|(&value, param)| match param {
            Some(slot) => Port::Term { slot, alone },
            None => Port::Slot(self.slot(value, made_kind(sharder, id, value))),
        });
        let outs = outs.collect();
        Ok(Op { node: id, rule: node_rule(graph, node), ins, outs })
    }

    /// The slot of the parameter whose gradient `value` is a term of: one that `node`'s origin reads.
    fn gradient_of(&self, node: NodeId, value: ValueId) -> Option<usize> {
        let graph = self.sharder.graph;
        let node = &graph.nodes[node];
        if node.phase == Phase::Forward {
            return None;
        }
        let param = graph.nodes[node.origin].inputs.iter().find(|&&v| graph.param_of(v).is_some_and(|p| graph.grads[p].contains(&value)))?;
        self.slot_of.get(param).copied()
    }

    fn slot(&mut self, value: ValueId, kind: Kind) -> usize {
        let tied = matches!(kind, Kind::Param(p) if self.sharder.homes(p).len() > 1);
        let slots = &mut self.slots;
        *self.slot_of.entry(value).or_insert_with(|| {
            slots.push(Slot { value, kind, leaves: false, again: [false; WAYS], tied, first: usize::MAX, last: 0 });
            slots.len() - 1
        })
    }

    fn known(&self, value: ValueId) -> Result<usize, LowerError> {
        self.slot_of.get(&value).copied().ok_or_else(|| LowerError::Undefined { value: self.sharder.graph.values[value].name.clone() })
    }

    /// For each forward node, whether it may run again and the backward pass needs a result of it, directly or to make another one again.
    fn made_again(&self, may: impl Fn(&GraphOp) -> bool) -> Vec<bool> {
        let mut needed: Vec<ValueId> = Vec::new();
        for (id, node) in self.sharder.backward(self.layer) {
            if self.sharder.sum_of(id).is_none() {
                needed.extend(&node.inputs);
            }
        }
        let nodes: Vec<_> = self.sharder.forward(self.layer).collect();
        let mut again = vec![false; nodes.len()];
        for (at, (_, node)) in nodes.iter().enumerate().rev() {
            if may(&node.op) && node.outputs.iter().any(|v| needed.contains(v)) {
                again[at] = true;
                needed.extend(&node.inputs);
            }
        }
        again
    }
}

fn made_kind(sharder: &Sharder<'_>, node: NodeId, value: ValueId) -> Kind {
    if sharder.graph.nodes[node].phase != Phase::Forward {
        Kind::Cotangent
    } else if sharder.graph.loss == Some(value) {
        Kind::Loss
    } else {
        Kind::Activation
    }
}

/// Reorders steps so that few decisions are remembered at a time, gives each sum to the first step after which its operands are known, and says what each touches.
fn order(steps: &[Step], sums: &[Sum], slots: usize) -> Vec<Step> {
    let ports = |op: &Op| -> Vec<usize> {
        let made = |p: &Port| match *p {
            Port::Slot(slot) | Port::Term { slot, .. } => slot,
        };
        op.ins.iter().copied().chain(op.outs.iter().map(made)).collect()
    };
    let own: Vec<Vec<usize>> = steps.iter().map(|s| std::iter::once(&s.forward).chain(&s.derived).flat_map(ports).collect()).collect();
    // Which steps each slot waits for: those that touch it themselves, and those that make the operands of its sums known.
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); slots];
    for (step, own) in own.iter().enumerate() {
        own.iter().for_each(|&slot| users[slot].push(step));
    }
    let mut makers: Vec<Vec<usize>> = vec![Vec::new(); slots];
    for (step, s) in steps.iter().enumerate() {
        for port in std::iter::once(&s.forward).chain(&s.derived).flat_map(|op| &op.outs) {
            if let Port::Slot(slot) = *port {
                makers[slot] = vec![step];
            }
        }
    }
    let leaders: Vec<Option<usize>> = steps.iter().map(|s| s.leader.and_then(|slot| makers[slot].first().copied())).collect();
    // In backward order, so terms come before sums of sums.
    let mut needs: Vec<Vec<usize>> = Vec::new();
    for sum in sums {
        let need: Vec<usize> = [sum.terms[0], sum.terms[1], sum.of].iter().flat_map(|&s| makers[s].clone()).collect();
        for slot in [sum.terms[0], sum.terms[1], sum.of, sum.out] {
            users[slot].extend(&need);
        }
        makers[sum.out] = need.clone();
        needs.push(need);
    }
    let sequence = sequence(&users, &leaders);
    let mut place = vec![0; steps.len()];
    sequence.iter().enumerate().for_each(|(at, &step)| place[step] = at);
    let mut ordered: Vec<Step> = sequence.iter().map(|&s| Step { sums: Vec::new(), touched: own[s].clone(), ..steps[s].clone() }).collect();
    for (sum, need) in sums.iter().zip(&needs) {
        let at = need.iter().map(|&s| place[s]).max().unwrap_or(0);
        ordered[at].sums.push(*sum);
        ordered[at].touched.extend([sum.terms[0], sum.terms[1], sum.of, sum.out]);
    }
    for step in &mut ordered {
        step.touched.sort_unstable();
        step.touched.dedup();
    }
    ordered
}

/// Steps up to which every beginning is tried; longer layers are decided in graph order.
const MOST_STEPS: usize = 128;

/// An order of steps in which each that follows another comes behind it. What has to be remembered after a step are the decisions, not those that follow,
/// of the steps that touch an open slot: the order is the best of those that begin somewhere and go on with the step that leaves the fewest.
fn sequence(users: &[Vec<usize>], leaders: &[Option<usize>]) -> Vec<usize> {
    let steps = leaders.len();
    if steps > MOST_STEPS {
        return (0..steps).collect();
    }
    let free = (0..steps).filter(|&s| leaders[s].is_none()).fold(0u128, |set, s| set | 1 << s);
    let users: Vec<u128> = users.iter().map(|u| u.iter().fold(0u128, |set, &s| set | 1 << s)).filter(|u| u.count_ones() > 1).collect();
    let remembered = |done: u128| {
        let open = users.iter().filter(|&&u| u & done != 0 && u & !done != 0);
        open.fold(0, |set, u| set | u & done & free).count_ones()
    };
    let from = |start: usize| {
        let (mut order, mut done, mut weight) = (vec![start], 1u128 << start, 0u64);
        loop {
            weight = weight.saturating_add(1 << (2 * remembered(done)).min(60));
            let ready = |s: &usize| done & 1 << s == 0 && leaders[*s].is_none_or(|l| done & 1 << l != 0);
            // There is one until all are done: the first in graph order follows none but those before it.
            let Some(next) = (0..steps).filter(ready).min_by_key(|&s| remembered(done | 1 << s)) else { return (weight, order) };
            done |= 1 << next;
            order.push(next);
        }
    };
    let starts = (0..steps).filter(|&s| leaders[s].is_none());
    starts.map(from).min_by_key(|(weight, _)| *weight).map(|(_, order)| order).unwrap_or_default()
}
