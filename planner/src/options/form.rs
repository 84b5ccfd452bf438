//! What the forms of one value cost, given where it is made and in which shardings it is read: the equations behind [`crate::lower`]'s statements.
//!
//! The forms of a value are a tree: its root is the form that is made, and a read in another sharding adds the steps from the root that are not there
//! yet. Each form costs its bytes, in the frame if the backward pass reads it and in the workspace otherwise, and each step its time; what is made again
//! costs both again. All of this depends on the root and on the *set* of reads, not on their order.

use super::Pricing;
use super::blueprint::{Kind, Slot};
use crate::capacity::Way;
use crate::cost::comm::{Group, group, group_time};
use crate::cost::compute::{copy_time, op_time};
use crate::cost::round::spent;
use crate::machine::Machine;
use crate::units::Nanos;
use dplan_ir::cost::{OpCost, op_cost};
use dplan_ir::dtype::DType;
use dplan_ir::entity::ValueId;
use dplan_ir::graph::{Graph, Layout};
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::op::Op;
use dplan_ir::program::{Pattern, align};
use dplan_ir::reshard::{Step, steps};
use dplan_ir::rule::{Assignment, Rule};
use dplan_ir::sharding::{LocalType, Padded, Sharding, local_type};

/// Ways of keeping or making again, in the order of [`super::VARIANTS`].
pub(super) const VARIANTS: usize = 4;
pub(super) const GATHER_AGAIN: usize = 1;

/// Ways of running ops again: cheap ones, or all. Whatever depends on the way has an entry for each.
pub(super) const WAYS: usize = 2;
const CHEAP: usize = 0;

/// How ops run again in a variant, if they do.
pub(super) fn way(variant: usize) -> Option<usize> {
    variant.checked_sub(2)
}

/// What a partial decision costs: the coordinates in which options are compared.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(super) struct Cost(pub [u64; 6]);

pub(super) const FORWARD: usize = 0;
pub(super) const BACKWARD: usize = 1;
pub(super) const PARAMS: usize = 2;
pub(super) const PARTIAL: usize = 3;
pub(super) const FRAME: usize = 4;
pub(super) const WORKSPACE: usize = 5;

impl Cost {
    pub fn plus(mut self, other: &Cost) -> Cost {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a += b);
        self
    }
    pub fn add(&mut self, coordinate: usize, amount: u64) {
        self.0[coordinate] += amount;
    }
}

/// The coordinates in which options are compared, each a sum over the layer: if none is larger, no plan gets dearer by the exchange, but for
/// latencies of buckets.
///
/// ```text
/// [ t,  P,  t + γ·p,  F,  F + W ]
/// ```
/// with `t` the time of both passes, `P` and `p` the parameters and those with gradients partial over tensor-parallel ranks, `F` and `W` frame and workspace
/// bytes. A stage holds at least one frame of a layer besides the workspace, so `W` counts no more than `F` does (where frames are offloaded, so do two turns of the ring; but
/// workspace and ring are each of the layer that has most, which may be two, so that an exchange can cost up to a frame there). A partial gradient is summed at most once
/// for each pass: γ is the time to all-reduce an element, so `p` counts no more than γ times what `t` does. What several buckets cost
/// above one is left out: latencies at the end of a step, of a reduction for gradients and one for LAMB's trust ratios.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(super) struct Measure(pub [u64; 5]);

impl Measure {
    pub const MOST: Measure = Measure([u64::MAX >> 1; 5]);

    pub fn plus(&self, other: &Measure) -> Measure {
        Measure(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
    /// Time, frame and workspace, rounded down.
    pub fn way(&self) -> Way {
        let [picos, _, _, frame, both] = self.0;
        Way { time: picos / 1000, frame, workspace: both - frame }
    }
    /// The lesser of each coordinate.
    pub fn least(&self, other: &Measure) -> Measure {
        Measure(std::array::from_fn(|i| self.0[i].min(other.0[i])))
    }
    /// No coordinate is larger.
    pub fn covers(&self, other: &Measure) -> bool {
        // Without a branch per coordinate.
        self.0.iter().zip(&other.0).fold(true, |all, (a, b)| all & (a <= b))
    }
}

/// Which coordinates count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Compare {
    All,
    /// Parameters aside: `[t, 0, t, F, F + W]`.
    Passes,
}

/// Costs under each of the variants.
pub(super) type Costs = [Cost; VARIANTS];

/// Most shardings of one value: the width of the sets below.
pub(super) const MOST_SHARDINGS: usize = 64;

/// What is decided about a slot: where its value is made, and how it is read. Shardings are numbers in the slot's own list; sets are bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct SlotState {
    pub base: u8,
    /// Read by the forward pass.
    pub forward: u64,
    /// Read by the forward pass, by an op that runs again.
    pub again: [u64; WAYS],
    /// Read by the backward pass.
    pub backward: u64,
}

pub(super) const UNKNOWN: u8 = u8::MAX;

impl SlotState {
    pub const EMPTY: SlotState = SlotState { base: UNKNOWN, forward: 0, again: [0; WAYS], backward: 0 };
}

/// What one rank's block of a value looks like, and times on the machine.
pub(super) struct Rates<'a> {
    graph: &'a Graph,
    machine: &'a Machine,
    mesh: &'a Mesh,
    padded: &'a Padded,
    /// γ.
    picos_per_partial: u64,
}

impl<'a> Rates<'a> {
    pub fn new(pricing: &'a Pricing<'_>) -> Rates<'a> {
        let Pricing { graph, machine, mesh, padded, .. } = pricing;
        let mut rates = Rates { graph, machine, mesh, padded, picos_per_partial: 0 };
        // Of a large block, so that latencies are spread over many elements.
        let (elems, size) = (1 << 20, 8);
        let all = group_time(machine, group(machine, mesh, mesh.tp()), Pattern::AllReduce, elems * size);
        rates.picos_per_partial = (1000 * all.0).div_ceil(elems);
        rates
    }

    pub fn local(&self, value: ValueId, sharding: &Sharding) -> LocalType {
        local_type(&self.graph.values[value].ty, sharding, self.padded, self.mesh)
    }
    pub fn run(&self, op: &Op, ins: &[&LocalType], outs: &[&LocalType]) -> Nanos {
        let dtype = ins.first().or(outs.first()).map_or(DType::F32, |t| t.dtype);
        self.op(dtype, &op_cost(op, ins, outs))
    }
    /// A run of a node of the graph, in as many turns as it has.
    pub fn node(&self, op: &Op, rule: &Rule, assignment: &Assignment, ins: &[&LocalType], outs: &[&LocalType]) -> Nanos {
        spent(self.machine, self.mesh, op, (rule, assignment), ins, outs).time
    }
    fn op(&self, dtype: DType, cost: &OpCost) -> Nanos {
        op_time(&self.machine.device, dtype, cost)
    }
    /// One step between blocks of these sizes, bytes.
    pub fn step(&self, step: &Step, from: u64, to: u64) -> Nanos {
        let collective = |axes: AxisSet, pattern| {
            let group: Group = group(self.machine, self.mesh, axes);
            group_time(self.machine, group, pattern, from.max(to))
        };
        match *step {
            Step::AllReduce { axes, .. } => collective(axes, Pattern::AllReduce),
            Step::ReduceScatter { axes, .. } => collective(axes, Pattern::ReduceScatter),
            Step::AllGather { axes, .. } => collective(axes, Pattern::AllGather),
            Step::Slice { .. } => copy_time(&self.machine.device, to),
        }
    }
    /// See [`Measure`]. Times are in picoseconds, so that γ is not rounded away.
    pub fn measure(&self, cost: &Cost, compare: Compare) -> Measure {
        let [forward, backward, params, partial, frame, workspace] = cost.0;
        let time = 1000 * (forward + backward);
        match compare {
            Compare::All => Measure([time, params, time + partial * self.picos_per_partial, frame, frame + workspace]),
            Compare::Passes => Measure([time, 0, time, frame, frame + workspace]),
        }
    }
    /// Adds a block to a buffer.
    pub fn accumulate(&self, block: &LocalType) -> Nanos {
        self.run(&Op::Add, &[block, block], &[block])
    }
}

/// A form in the tree of a value.
struct Form {
    parent: usize,
    step: Option<Step>,
    sharding: Sharding,
    bytes: u64,
    time: u64,
    /// Made by the forward pass.
    forward: bool,
    /// Read by the backward pass.
    read: bool,
    /// Read by an op that runs again.
    again: [bool; WAYS],
}

/// What the forms of a slot cost once all its decisions are made, or nothing if they are impossible.
pub(super) fn settle(slot: &Slot, state: &SlotState, shardings: &[Sharding], boundary: Option<u8>, rates: &Rates<'_>) -> Option<Costs> {
    match slot.kind {
        Kind::Param(_) => parameter(slot, state, shardings, rates),
        Kind::Load => Some(loads(slot, state, shardings, rates)),
        Kind::Input | Kind::Activation | Kind::Loss | Kind::CotangentIn | Kind::Cotangent => tree(slot, state, shardings, boundary, rates),
    }
}

fn tree(slot: &Slot, state: &SlotState, shardings: &[Sharding], boundary: Option<u8>, rates: &Rates<'_>) -> Option<Costs> {
    let routed = rates.graph.values[slot.value].ty.layout != Layout::Dense;
    let mut forms: Vec<Form> = Vec::new();
    let bytes = |sharding: &Sharding| rates.local(slot.value, sharding).bytes();
    let root = shardings[usize::from(state.base)].clone();
    let in_forward = matches!(slot.kind, Kind::Input | Kind::Activation | Kind::Loss);
    let size = bytes(&root);
    forms.push(Form { parent: 0, step: None, sharding: root, bytes: size, time: 0, forward: in_forward, read: false, again: [false; WAYS] });
    // Adds the steps to a sharding and returns its form.
    let reach = |forms: &mut Vec<Form>, to: usize, forward: bool| -> Option<usize> {
        let mut at = 0;
        for step in steps(&forms[0].sharding, &shardings[to]) {
            at = match forms.iter().position(|f| f.parent == at && f.step == Some(step)) {
                Some(next) => next,
                None => {
                    // The rows of a routed value are packed: blocks of its dims are not blocks of its bytes.
                    if routed && !matches!(step, Step::AllReduce { .. }) {
                        return None;
                    }
                    let sharding = step.apply(&forms[at].sharding).ok()?;
                    let size = bytes(&sharding);
                    let time = rates.step(&step, forms[at].bytes, size).0;
                    forms[at].read |= !forward;
                    forms.push(Form { parent: at, step: Some(step), sharding, bytes: size, time, forward, read: false, again: [false; WAYS] });
                    forms.len() - 1
                }
            };
        }
        Some(at)
    };
    let mut output = None;
    for to in bits(state.forward) {
        let form = reach(&mut forms, to, true)?;
        for (again, set) in forms[form].again.iter_mut().zip(state.again) {
            *again |= set & (1 << to) != 0;
        }
    }
    if slot.leaves
        && let Some(boundary) = boundary
    {
        output = Some(reach(&mut forms, usize::from(boundary), in_forward)?);
    }
    for to in bits(state.backward) {
        let form = reach(&mut forms, to, false)?;
        forms[form].read = true;
    }
    let copy = |form: &Form| copy_time(&rates.machine.device, form.bytes).0;
    let mut costs = [Cost::default(); VARIANTS];
    for (variant, cost) in costs.iter_mut().enumerate() {
        let way = way(variant);
        // Whether the value itself is made again; then so is everything made from it.
        let remade = way.is_some_and(|w| w != CHEAP || slot.again[w]);
        // Whether the backward pass needs each form, on behalf of what is made from it as well.
        let mut needed: Vec<bool> = forms.iter().map(|f| f.read || way.is_some_and(|w| f.again[w])).collect();
        for at in (0..forms.len()).rev() {
            let form = &forms[at];
            let (root, gather) = (form.step.is_none(), matches!(form.step, Some(Step::AllGather { .. })));
            let moved = gather || matches!(form.step, Some(Step::Slice { .. }));
            let space = align(form.bytes);
            cost.add(if form.forward { FORWARD } else { BACKWARD }, form.time);
            if root && slot.kind == Kind::Input {
                cost.add(FRAME, space);
                continue;
            }
            let anew = form.forward && needed[at] && (remade || way.is_some() && moved || variant == GATHER_AGAIN && gather);
            let kept = form.forward && needed[at] && !anew;
            let leaves = output == Some(at);
            if kept {
                cost.add(FRAME, space);
                // The neighbour gets a copy.
                cost.add(FORWARD, if leaves { copy(form) } else { 0 });
            } else if !(leaves || root && matches!(slot.kind, Kind::CotangentIn | Kind::Loss)) {
                cost.add(WORKSPACE, space);
            }
            // All results of an op that runs again are made again, needed or not.
            if anew || root && way.is_some_and(|w| slot.again[w]) {
                cost.add(WORKSPACE, space);
                cost.add(BACKWARD, form.time);
                needed[form.parent] |= !root;
            }
        }
    }
    Some(costs)
}

/// A graph input is loaded in every sharding in which it is read. Loading takes no time.
fn loads(slot: &Slot, state: &SlotState, shardings: &[Sharding], rates: &Rates<'_>) -> Costs {
    let mut costs = [Cost::default(); VARIANTS];
    for at in bits(state.forward | state.backward) {
        let space = align(rates.local(slot.value, &shardings[at]).bytes());
        let in_set = |set: u64| set & (1 << at) != 0;
        for (variant, cost) in costs.iter_mut().enumerate() {
            let way = way(variant);
            let (forward, backward) = (in_set(state.forward), in_set(state.backward) || way.is_some_and(|w| in_set(state.again[w])));
            let kept = forward && backward && way.is_none();
            cost.add(if kept { FRAME } else { WORKSPACE }, space);
            if forward && backward && way.is_some() {
                cost.add(WORKSPACE, space);
            }
        }
    }
    costs
}

/// A parameter is stored in one sharding, and its gradient's terms are brought into it.
fn parameter(slot: &Slot, state: &SlotState, shardings: &[Sharding], rates: &Rates<'_>) -> Option<Costs> {
    let home = &shardings[usize::from(state.base)];
    let mut cost = Cost::default();
    let elems = rates.local(slot.value, home).elems();
    cost.add(PARAMS, elems);
    let (data, tp) = (rates.mesh.data(), rates.mesh.tp());
    let mut common = common(state, shardings);
    if !common.includes(data.minus(home.sharded())) && state.forward != 0 {
        // Ranks that see other data would not train it alike.
        return None;
    }
    if slot.tied {
        common = common.and(data);
    }
    if common.intersects(tp) {
        cost.add(PARTIAL, elems);
    }
    let accumulator = rates.graph.values[slot.value].ty.dtype.accumulator();
    for (at, alone) in terms(state) {
        let term = &shardings[at];
        let to = home.clone().with_partial(term.monoid, common);
        let mut block = LocalType { dtype: accumulator, ..rates.local(slot.value, term) };
        let mut sharding = term.clone();
        let steps = steps(term, &to);
        if !alone || !steps.is_empty() {
            cost.add(WORKSPACE, align(block.bytes()));
        }
        for step in &steps {
            sharding = step.apply(&sharding).ok()?;
            let next = LocalType { dtype: accumulator, ..rates.local(slot.value, &sharding) };
            cost.add(BACKWARD, rates.step(step, block.bytes(), next.bytes()).0);
            cost.add(WORKSPACE, align(next.bytes()));
            block = next;
        }
        if !alone || !steps.is_empty() {
            cost.add(BACKWARD, rates.accumulate(&block).0);
        }
    }
    Some([cost; VARIANTS])
}

/// Axes over which all terms of a parameter's gradient wait.
pub(super) fn common(state: &SlotState, shardings: &[Sharding]) -> AxisSet {
    let home = &shardings[usize::from(state.base)];
    let all = terms(state).map(|(at, _)| shardings[at].partial).reduce(AxisSet::and);
    all.unwrap_or(AxisSet::EMPTY).minus(home.sharded())
}

/// A parameter's state has no reads but a list of terms, sorted: eight bits each, the number of the sharding and one bit for "not alone", plus one.
/// There is room for eight.
pub(super) fn push_term(state: &mut SlotState, sharding: usize, alone: bool) -> bool {
    let code = (sharding as u64) << 1 | u64::from(!alone);
    let mut codes = [0; 8];
    let mut count = 0;
    for known in self::codes(state.forward) {
        codes[count] = known;
        count += 1;
    }
    if count == codes.len() {
        return false;
    }
    codes[count] = code;
    codes[..=count].sort_unstable();
    state.forward = codes[..=count].iter().rev().fold(0, |packed, code| packed << 8 | (code + 1));
    true
}

fn codes(packed: u64) -> impl Iterator<Item = u64> {
    (0..8).map(move |i| packed >> (8 * i) & 0xff).take_while(|&c| c != 0).map(|c| c - 1)
}

fn terms(state: &SlotState) -> impl Iterator<Item = (usize, bool)> {
    codes(state.forward).map(|c| ((c >> 1) as usize, c & 1 == 0))
}

/// Members of a set, ascending.
pub(super) fn bits(set: u64) -> impl Iterator<Item = usize> {
    let mut left = set;
    std::iter::from_fn(move || {
        let at = left.trailing_zeros();
        (at < 64).then(|| {
            left &= left - 1;
            at as usize
        })
    })
}
