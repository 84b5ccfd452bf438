//! A layer's decisions as a layered network: a node is everything that later decisions can see of earlier ones, an arc is a strategy of the next op, and a
//! path from the source to a sink is a strategy of the layer, whose costs are the sum of its arcs'.

use super::Pricing;
use super::blueprint::{Blueprint, Kind, Op, Port, Step, Sum};
use super::form::{
    BACKWARD, Compare, Cost, Costs, FORWARD, MOST_SHARDINGS, Rates, SlotState, UNKNOWN, VARIANTS, WAYS, WORKSPACE, common, push_term, settle, way,
};
use crate::lower::working_bytes;
use crate::strategy::{follow, strategies};
use dplan_ir::data::data_split;
use dplan_ir::entity::{ParamId, ValueId};
use dplan_ir::mesh::AxisSet;
use dplan_ir::op::Op as GraphOp;
use dplan_ir::program::align;
use dplan_ir::rule::Assignment;
use dplan_ir::sharding::{LocalType, Sharding};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

/// What a strategy of an op tells one slot. Shardings are numbers in the slot's list.
#[derive(Clone, Copy, Debug)]
enum Event {
    Made {
        slot: usize,
        sharding: u8,
    },
    Read {
        slot: usize,
        sharding: u8,
        reader: Reader,
    },
    /// A parameter is used: all its uses in the layer must agree.
    Stored {
        slot: usize,
        sharding: u8,
    },
    /// A term of a parameter's gradient is made.
    Term {
        slot: usize,
        sharding: u8,
        alone: bool,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reader {
    Forward { again: [bool; WAYS] },
    Backward,
}

/// A strategy of one op.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    pub assignment: Rc<Assignment>,
    events: Vec<Event>,
    /// Of the op and its derivatives alone.
    costs: Costs,
}

/// Shardings and states seen so far of one slot.
#[derive(Clone, Default)]
struct Seen {
    shardings: Vec<Sharding>,
    ids: HashMap<SlotState, u32, Fast>,
    states: Vec<SlotState>,
    /// What each state costs when the slot closes; nothing if it is impossible.
    closed: Vec<Option<Option<Costs>>>,
    boundary: Option<u8>,
}

impl Seen {
    fn sharding(&mut self, sharding: &Sharding) -> Option<u8> {
        let at = self.shardings.iter().position(|s| s == sharding).unwrap_or_else(|| {
            self.shardings.push(sharding.clone());
            self.shardings.len() - 1
        });
        (at < MOST_SHARDINGS).then_some(at as u8)
    }
    fn state(&mut self, state: SlotState) -> u32 {
        *self.ids.entry(state).or_insert_with(|| {
            self.states.push(state);
            self.closed.push(None);
            self.states.len() as u32 - 1
        })
    }
}

/// How a sum of two cotangents is made: the number of its sharding in the slots of its terms and its result.
#[derive(Clone, Copy, Debug)]
struct Met {
    terms: [u8; 2],
    out: u8,
    time: u64,
}

/// One way on from a node: a strategy of the step's op.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    pub choice: u16,
    pub costs: Costs,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Arc {
    pub from: u32,
    pub to: u32,
    /// In the stage's outcomes.
    pub outcome: u32,
}

/// The arcs of one step, ordered by `from`.
#[derive(Clone, Debug, Default)]
pub(super) struct Stage {
    pub nodes: usize,
    pub outcomes: Vec<Outcome>,
    pub arcs: Vec<Arc>,
}

/// Whether arcs that another arc between the same nodes covers are left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Keep {
    All,
    Undominated(Compare),
}

pub(super) struct Net<'p> {
    pricing: &'p Pricing<'p>,
    blueprint: &'p Blueprint,
    pub rates: Rates<'p>,
    pub choices: Vec<Vec<Choice>>,
    seen: Vec<Seen>,
    /// By result and the shardings of terms and value.
    sums: HashMap<(usize, [u8; 3]), Met, Fast>,
    scratch: Vec<SlotState>,
    /// For each step and sharding of its leader, the choice that follows it, if there is such a choice.
    followers: HashMap<(usize, u8), Option<usize>, Fast>,
}

impl<'p> Net<'p> {
    /// Nothing if the layer's border cannot be sharded as the pricing says.
    pub fn new(pricing: &'p Pricing<'p>, blueprint: &'p Blueprint) -> Option<Net<'p>> {
        let slots = blueprint.slots.len();
        let mut net = Net {
            pricing,
            blueprint,
            rates: Rates::new(pricing),
            choices: Vec::new(),
            seen: vec![Seen::default(); slots],
            sums: HashMap::default(),
            scratch: vec![SlotState::EMPTY; slots],
            followers: HashMap::default(),
        };
        for &value in &blueprint.crossing {
            pricing.boundary_sharding(value)?;
        }
        for (at, slot) in blueprint.slots.iter().enumerate() {
            if slot.leaves || matches!(slot.kind, Kind::Input | Kind::CotangentIn) {
                let sharding = pricing.boundary_sharding(slot.value)?;
                net.seen[at].boundary = net.seen[at].sharding(&sharding);
            }
        }
        for step in &blueprint.steps {
            let node = &pricing.graph.nodes[step.forward.node];
            let all = strategies(pricing.graph, node, &pricing.mesh, &pricing.padded);
            let choices = all.into_iter().filter_map(|a| net.choice(step, a)).collect();
            net.choices.push(choices);
        }
        Some(net)
    }

    /// The events and own costs of a strategy of a step's op.
    fn choice(&mut self, step: &Step, assignment: Assignment) -> Option<Choice> {
        let mut choice = Choice { assignment: Rc::new(assignment), events: Vec::new(), costs: [Cost::default(); VARIANTS] };
        let (forward, scratch) = self.op(step, &step.forward, &mut choice)?;
        for (variant, cost) in choice.costs.iter_mut().enumerate() {
            cost.add(FORWARD, forward);
            cost.add(WORKSPACE, scratch);
            if way(variant).is_some_and(|w| step.again[w]) {
                cost.add(BACKWARD, forward);
                cost.add(WORKSPACE, scratch);
            }
        }
        for op in &step.derived {
            let (backward, scratch) = self.op(step, op, &mut choice)?;
            for cost in &mut choice.costs {
                cost.add(BACKWARD, backward);
                cost.add(WORKSPACE, scratch);
            }
        }
        Some(choice)
    }

    /// Adds an op's events; returns its time and scratch bytes.
    fn op(&mut self, step: &Step, op: &Op, choice: &mut Choice) -> Option<(u64, u64)> {
        let graph = self.pricing.graph;
        let node = &graph.nodes[op.node];
        let assignment = choice.assignment.and(&data_split(graph, node, &op.rule, &self.pricing.mesh));
        let place = op.rule.place(&assignment);
        let derived = op.node != step.forward.node;
        for (&slot, sharding) in op.ins.iter().zip(&place.ins) {
            let number = self.seen[slot].sharding(sharding)?;
            choice.events.push(match self.blueprint.slots[slot].kind {
                Kind::Param(_) => Event::Stored { slot, sharding: number },
                Kind::Input | Kind::Load | Kind::Activation | Kind::Loss | Kind::CotangentIn | Kind::Cotangent => {
                    let reader = if derived { Reader::Backward } else { Reader::Forward { again: step.again } };
                    Event::Read { slot, sharding: number, reader }
                }
            });
        }
        for (port, sharding) in op.outs.iter().zip(&place.outs) {
            choice.events.push(match *port {
                Port::Slot(slot) => Event::Made { slot, sharding: self.seen[slot].sharding(sharding)? },
                Port::Term { slot, alone } => Event::Term { slot, sharding: self.seen[slot].sharding(sharding)?, alone },
            });
        }
        let blocks = |values: &[ValueId], shardings: &[Sharding]| -> Vec<LocalType> {
            values.iter().zip(shardings).map(|(&v, s)| self.rates.local(v, s)).collect()
        };
        let (ins, outs) = (blocks(&node.inputs, &place.ins), blocks(&node.outputs, &place.outs));
        let (ins, outs): (Vec<&LocalType>, Vec<&LocalType>) = (ins.iter().collect(), outs.iter().collect());
        let scratch = working_bytes(&node.op, &op.rule, &assignment, &self.pricing.mesh, &ins, &outs);
        Some((self.rates.node(&node.op, &op.rule, &assignment, &ins, &outs).0, align(scratch)))
    }

    fn initial(&self, slot: usize) -> SlotState {
        match self.blueprint.slots[slot].kind {
            Kind::Input | Kind::CotangentIn => SlotState { base: self.seen[slot].boundary.unwrap_or(UNKNOWN), ..SlotState::EMPTY },
            Kind::Load | Kind::Param(_) | Kind::Activation | Kind::Loss | Kind::Cotangent => SlotState::EMPTY,
        }
    }

    /// The choices that a step has: all, or the one that follows its leader.
    fn allowed(&mut self, at: usize, states: &[SlotState]) -> std::ops::Range<usize> {
        let all = 0..self.choices[at].len();
        let Some(slot) = self.blueprint.steps[at].leader.filter(|&s| states[s].base != UNKNOWN) else {
            return all;
        };
        let base = states[slot].base;
        let (choices, made) = (&self.choices[at], &self.seen[slot].shardings[usize::from(base)]);
        let find = || {
            let wanted = follow(&self.blueprint.steps[at].forward.rule, &made.dims, self.pricing.mesh.tp());
            choices.iter().position(|c| *c.assignment == wanted)
        };
        self.followers.entry((at, base)).or_insert_with(find).map_or(all, |c| c..c + 1)
    }

    /// The states of all slots after a step's choice, and what it adds to the costs; nothing if slots disagree.
    fn decide(&mut self, at: usize, choice: usize, states: &mut [SlotState]) -> Option<Costs> {
        let blueprint = self.blueprint;
        let step = &blueprint.steps[at];
        let chosen = &self.choices[at][choice];
        let mut costs = chosen.costs;
        for &event in &chosen.events {
            match event {
                Event::Made { slot, sharding } => states[slot].base = sharding,
                Event::Stored { slot, sharding } => {
                    if states[slot].base != UNKNOWN && states[slot].base != sharding {
                        return None;
                    }
                    states[slot].base = sharding;
                }
                Event::Read { slot, sharding, reader } => {
                    let bit = 1 << sharding;
                    match reader {
                        Reader::Forward { again } => {
                            states[slot].forward |= bit;
                            states[slot].again.iter_mut().zip(again).for_each(|(set, again)| *set |= if again { bit } else { 0 });
                        }
                        Reader::Backward => states[slot].backward |= bit,
                    }
                }
                Event::Term { slot, sharding, alone } => {
                    if !push_term(&mut states[slot], usize::from(sharding), alone) {
                        return None;
                    }
                }
            }
        }
        for sum in &step.sums {
            let bases = [sum.terms[0], sum.terms[1], sum.of].map(|slot| states[slot].base);
            let met = match self.sums.get(&(sum.out, bases)) {
                Some(&met) => met,
                None => self.meet(sum, bases)?,
            };
            sum.terms.iter().zip(met.terms).for_each(|(&slot, number)| states[slot].backward |= 1 << number);
            states[sum.out].base = met.out;
            costs.iter_mut().for_each(|c| c.add(BACKWARD, met.time));
        }
        for &slot in &step.settles {
            let closing = self.close(slot, states[slot])?;
            if self.blueprint.slots[slot].tied {
                // From here on only its sharding matters.
                states[slot] = SlotState { base: states[slot].base, ..SlotState::EMPTY };
            }
            costs.iter_mut().zip(&closing).for_each(|(c, more)| *c = c.plus(more));
        }
        Some(costs)
    }

    /// The sharding in which the terms of a sum meet: their own if they are alike, and otherwise that of the value whose cotangents they are.
    fn meet(&mut self, sum: &Sum, bases: [u8; 3]) -> Option<Met> {
        let sharding = |slot: usize, base: u8| &self.seen[slot].shardings[usize::from(base)];
        let (left, right) = (sharding(sum.terms[0], bases[0]), sharding(sum.terms[1], bases[1]));
        let target = if left == right { left.clone() } else { sharding(sum.of, bases[2]).whole() };
        let block = self.rates.local(self.blueprint.slots[sum.out].value, &target);
        let mut number = |slot: usize| self.seen[slot].sharding(&target);
        let terms = [number(sum.terms[0])?, number(sum.terms[1])?];
        let met = Met { terms, out: number(sum.out)?, time: self.rates.run(&GraphOp::Add, &[&block, &block], &[&block]).0 };
        self.sums.insert((sum.out, bases), met);
        Some(met)
    }

    fn close(&mut self, slot: usize, state: SlotState) -> Option<Costs> {
        let seen = &mut self.seen[slot];
        let id = seen.state(state) as usize;
        if let Some(known) = seen.closed[id] {
            return known;
        }
        let costs = settle(&self.blueprint.slots[slot], &state, &seen.shardings, seen.boundary, &self.rates);
        seen.closed[id] = Some(costs);
        costs
    }

    /// What a strategy of the whole layer costs, if it is possible.
    #[cfg(test)]
    pub fn walk(&mut self, path: &[usize]) -> Option<Costs> {
        let mut states: Vec<SlotState> = (0..self.seen.len()).map(|s| self.initial(s)).collect();
        let mut costs = [Cost::default(); VARIANTS];
        for (at, &choice) in path.iter().enumerate() {
            let more = self.decide(at, choice, &mut states)?;
            costs.iter_mut().zip(&more).for_each(|(c, more)| *c = c.plus(more));
        }
        Some(costs)
    }

    /// Where a possible strategy of the layer stores each parameter: its sharding, and the axes its gradient waits for.
    pub fn stored(&self, path: &[usize]) -> Vec<(ParamId, Sharding, AxisSet)> {
        let mut states: BTreeMap<usize, SlotState> = BTreeMap::new();
        for event in path.iter().zip(&self.choices).flat_map(|(&choice, choices)| &choices[choice].events) {
            match *event {
                Event::Stored { slot, sharding } => states.entry(slot).or_insert(SlotState::EMPTY).base = sharding,
                Event::Term { slot, sharding, alone } => {
                    push_term(states.entry(slot).or_insert(SlotState::EMPTY), usize::from(sharding), alone);
                }
                Event::Made { .. } | Event::Read { .. } => {}
            }
        }
        let mut stored = Vec::with_capacity(states.len());
        for (slot, state) in states {
            if let Kind::Param(param) = self.blueprint.slots[slot].kind {
                let shardings = &self.seen[slot].shardings;
                let waits = common(&state, shardings).minus(if self.blueprint.slots[slot].tied { self.pricing.mesh.tp() } else { AxisSet::EMPTY });
                stored.push((param, shardings[usize::from(state.base)].clone(), waits));
            }
        }
        stored.sort_unstable_by_key(|&(param, ..)| param);
        stored
    }

    /// The least elements of the parameters that are spread over data axes alike, tied ones aside, whatever is decided.
    pub fn least_stored(&self) -> Vec<(AxisSet, u64)> {
        let mut least: BTreeMap<usize, (AxisSet, u64)> = BTreeMap::new();
        for event in self.choices.iter().flatten().flat_map(|choice| &choice.events) {
            let &Event::Stored { slot, sharding } = event else { continue };
            let (of, sharding) = (&self.blueprint.slots[slot], &self.seen[slot].shardings[usize::from(sharding)]);
            if matches!(of.kind, Kind::Param(_)) && !of.tied {
                let elems = self.rates.local(of.value, sharding).elems();
                let known = least.entry(slot).or_insert((sharding.sharded().and(self.pricing.mesh.data()), elems));
                known.1 = known.1.min(elems);
            }
        }
        let mut sums: BTreeMap<AxisSet, u64> = BTreeMap::new();
        least.into_values().for_each(|(spread, elems)| *sums.entry(spread).or_default() += elems);
        sums.into_iter().collect()
    }

    /// The network.
    pub fn stages(&mut self, keep: Keep) -> Vec<Stage> {
        let mut open: Vec<usize> = Vec::new();
        let mut nodes = Interned::default();
        nodes.id(&[]);
        let mut stages = Vec::with_capacity(self.blueprint.steps.len());
        for at in 0..self.blueprint.steps.len() {
            let after = self.blueprint.open_after(at);
            let (stage, next) = self.stage(at, keep, &open, &nodes, &after);
            stages.push(stage);
            (nodes, open) = (next, after);
        }
        stages
    }

    /// The arcs of one step, and the nodes they lead to. A node is the states of the open slots.
    fn stage(&mut self, at: usize, keep: Keep, open: &[usize], nodes: &Interned, after: &[usize]) -> (Stage, Interned) {
        let touched = &self.blueprint.steps[at].touched;
        let place = |slot: &usize| open.iter().position(|o| o == slot);
        // What the step reads of a node, what it leaves of it alone, and what it leaves changed.
        let read: Vec<(usize, usize)> = touched.iter().filter_map(|s| place(s).map(|p| (*s, p))).collect();
        let stay: Vec<usize> = touched.iter().copied().filter(|s| after.contains(s)).collect();
        let alone: Vec<usize> = after.iter().filter(|s| !stay.contains(s)).filter_map(place).collect();

        let mut stage = Stage { nodes: nodes.len(), ..Stage::default() };
        let (mut reads, mut alones, mut reached) = (Interned::default(), Interned::default(), Interned::default());
        let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
        let mut leads: Vec<u32> = Vec::new();
        let mut of_node: Vec<(u32, u32)> = Vec::with_capacity(nodes.len());
        let mut key = Vec::new();
        for node in 0..nodes.len() {
            let old = nodes.row(node);
            key.clear();
            key.extend(alone.iter().map(|&p| old[p]));
            let rest = alones.id(&key);
            key.clear();
            key.extend(read.iter().map(|&(_, p)| old[p]));
            let known = reads.id(&key);
            if known as usize == ranges.len() {
                let first = stage.outcomes.len();
                self.outcomes(at, keep, &read, &key, &stay, &mut reached, &mut stage.outcomes, &mut leads);
                ranges.push(first..stage.outcomes.len());
            }
            of_node.push((known, rest));
        }
        // Where each pair of what is left alone and what is left changed leads.
        let mut next = Interned::default();
        let mut to = vec![u32::MAX; alones.len() * reached.len()];
        for (node, &(known, rest)) in of_node.iter().enumerate() {
            for outcome in ranges[known as usize].clone() {
                let lead = leads[outcome];
                let to = &mut to[rest as usize * reached.len() + lead as usize];
                if *to == u32::MAX {
                    let (mut changed, mut same) = (reached.row(lead as usize).iter(), alones.row(rest as usize).iter());
                    key.clear();
                    key.extend(after.iter().filter_map(|s| if stay.contains(s) { changed.next() } else { same.next() }));
                    *to = next.id(&key);
                }
                stage.arcs.push(Arc { from: node as u32, to: *to, outcome: outcome as u32 });
            }
        }
        (stage, next)
    }

    /// All strategies of a step's op from one state of the slots it touches.
    #[allow(clippy::too_many_arguments)]
    fn outcomes(
        &mut self,
        at: usize,
        keep: Keep,
        read: &[(usize, usize)],
        key: &[u32],
        stay: &[usize],
        reached: &mut Interned,
        outcomes: &mut Vec<Outcome>,
        leads: &mut Vec<u32>,
    ) {
        let first = outcomes.len();
        let mut states = std::mem::take(&mut self.scratch);
        let mut next = Vec::with_capacity(stay.len());
        let restore = |net: &Net<'_>, states: &mut [SlotState]| {
            for &slot in &net.blueprint.steps[at].touched {
                states[slot] = net.initial(slot);
            }
            for (&(slot, _), &id) in read.iter().zip(key) {
                states[slot] = net.seen[slot].states[id as usize];
            }
        };
        restore(self, &mut states);
        for choice in self.allowed(at, &states) {
            restore(self, &mut states);
            let Some(costs) = self.decide(at, choice, &mut states) else { continue };
            next.clear();
            next.extend(stay.iter().map(|&s| self.seen[s].state(states[s])));
            let lead = reached.id(&next);
            let covered = match keep {
                Keep::All => false,
                Keep::Undominated(compare) => {
                    let measure = |cost: &Cost| self.rates.measure(cost, compare);
                    let covers = |old: &Costs| old.iter().zip(&costs).all(|(old, new)| measure(old).covers(&measure(new)));
                    (first..outcomes.len()).any(|o| leads[o] == lead && covers(&outcomes[o].costs))
                }
            };
            if !covered {
                outcomes.push(Outcome { choice: choice as u16, costs });
                leads.push(lead);
            }
        }
        self.scratch = states;
    }

    /// A path's strategy, in graph order.
    pub fn strategy(&self, path: &[usize]) -> Vec<Rc<Assignment>> {
        let mut placed: Vec<(usize, Rc<Assignment>)> =
            path.iter().enumerate().map(|(at, &c)| (self.blueprint.steps[at].at, Rc::clone(&self.choices[at][c].assignment))).collect();
        placed.sort_by_key(|&(at, _)| at);
        placed.into_iter().map(|(_, a)| a).collect()
    }
}

/// Rows of numbers, each once, in the order in which they came.
#[derive(Default)]
struct Interned {
    ids: HashMap<Vec<u32>, u32, Fast>,
    rows: Vec<u32>,
    ends: Vec<usize>,
}

impl Interned {
    fn id(&mut self, row: &[u32]) -> u32 {
        if let Some(&id) = self.ids.get(row) {
            return id;
        }
        let id = self.ends.len() as u32;
        self.ids.insert(row.to_vec(), id);
        self.rows.extend(row);
        self.ends.push(self.rows.len());
        id
    }
    fn len(&self) -> usize {
        self.ends.len()
    }
    fn row(&self, id: usize) -> &[u32] {
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.rows[start..self.ends[id]]
    }
}

/// A multiplicative hash: keys here are short and not chosen by anybody. Nothing depends on the order of a map.
#[derive(Clone, Copy, Default)]
pub(super) struct Multiply(u64);

pub(super) type Fast = BuildHasherDefault<Multiply>;

impl Hasher for Multiply {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u8(&mut self, n: u8) {
        self.write_u64(u64::from(n));
    }
    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }
    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.0 ^= self.0 >> 29;
    }
}
