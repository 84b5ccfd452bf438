//! Sharding of one layer.
//!
//! Walk the layer's nodes in order. An assignment gives a node's operands and results their shardings ([`Rule::place`]); a derivative has the assignment
//! of the node it derives from. A value's *main* form is the one its node makes; an operand that needs another sharding gets it from the main
//! form by reshard steps, and steps that begin alike are shared. Then:
//!
//! - what crosses a layer border is brought into the boundary sharding by the layer that makes it, in both directions;
//! - a sum of cotangents whose terms have the same sharding is done in that sharding, also while they wait for a reduction: one reduction then serves
//!   all terms. Otherwise the terms are first brought into the sharding of the value they are cotangents of;
//! - contributions to one parameter's gradient are reduced over the axes on which they do not all wait, so that they can be added up.

use super::LowerError;
use super::fragment::{BucketMember, Fragment, FragmentBucket, makes, reads};
use super::keep;
use super::shard::Sharder;
use dplan_ir::data::data_split;
use dplan_ir::entity::{FormId, NodeId, ParamId, Table, ValueId};
use dplan_ir::extent::node_rule;
use dplan_ir::graph::{Def, Layout, Node, Phase};
use dplan_ir::mesh::AxisSet;
use dplan_ir::plan::LayerPlan;
use dplan_ir::reshard::{Step, steps};
use dplan_ir::rule::{Assignment, Rule, Split};
use dplan_ir::sharded::{Form, Pass, Stmt};
use dplan_ir::sharding::Sharding;
use std::collections::BTreeMap;

/// Where a form comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Maker {
    Param(ParamId),
    /// A graph input: loaded where it is read.
    Load,
    /// Handed over by a neighbouring layer.
    Handed,
    Forward(usize),
    Backward(usize),
}

/// A layer while it is being sharded.
pub(super) struct Layer<'s, 'g> {
    pub at: &'s Sharder<'g>,
    pub plan: &'s LayerPlan,
    pub fragment: Fragment,
    pub maker: Table<FormId, Maker>,
    pass: Pass,
    /// The form that each value's node makes.
    main: BTreeMap<ValueId, FormId>,
    /// Steps taken from each form, and where they led.
    taken: Table<FormId, Vec<(Step, FormId)>>,
    /// Forms of parameters and graph inputs.
    given: Vec<FormId>,
}

pub(super) fn shard_one(at: &Sharder<'_>, layer: u32, plan: &LayerPlan) -> Result<Fragment, LowerError> {
    let mut this = Layer {
        at,
        plan,
        fragment: Fragment { layer, backward_pass: at.backward_pass, ..Fragment::default() },
        maker: Table::new(),
        pass: Pass::Forward,
        main: BTreeMap::new(),
        taken: Table::new(),
        given: Vec::new(),
    };
    let (nodes, found) = (at.forward(layer).count(), plan.strategy.len());
    if nodes != found {
        return Err(LowerError::Strategy { layer, nodes, found });
    }
    this.forward(layer)?;
    this.pass = Pass::Backward;
    this.backward(layer)?;
    let pending = this.gradients(layer)?;
    this.buckets(&pending);
    keep::settle(&mut this)?;
    Ok(this.fragment)
}

impl Layer<'_, '_> {
    fn forward(&mut self, layer: u32) -> Result<(), LowerError> {
        if let Some(value) = self.at.input(layer) {
            self.fragment.input = Some(self.handed(value)?);
        }
        for (id, node) in self.at.forward(layer) {
            self.node(id, node)?;
        }
        if let Some(value) = self.at.output(layer) {
            self.fragment.output = Some(self.at_boundary(value)?);
        }
        self.fragment.loss = self.at.graph.loss.and_then(|loss| self.main.get(&loss).copied());
        Ok(())
    }

    fn backward(&mut self, layer: u32) -> Result<(), LowerError> {
        let cotangent = |value: Option<ValueId>| value.and_then(|v| self.at.graph.cotangents[v]);
        let (from_next, to_before) = (cotangent(self.at.output(layer)), cotangent(self.at.input(layer)));
        if let Some(value) = from_next {
            self.fragment.cotangent_in = Some(self.handed(value)?);
        }
        for (id, node) in self.at.backward(layer) {
            match self.at.sum_of(id) {
                Some(of) => self.sum(id, node, of)?,
                None => self.node(id, node)?,
            }
        }
        if let Some(value) = to_before {
            self.fragment.cotangent_out = Some(self.at_boundary(value)?);
        }
        Ok(())
    }

    /// Runs a node as its origin's assignment says.
    fn node(&mut self, id: NodeId, node: &Node) -> Result<(), LowerError> {
        let rule = node_rule(self.at.graph, node);
        let assignment = self.assignment(node, &rule)?;
        let placement = rule.place(&assignment);
        let mut ins = Vec::with_capacity(node.inputs.len());
        for (&value, sharding) in node.inputs.iter().zip(&placement.ins) {
            self.at.divides(value, sharding)?;
            ins.push(self.operand(value, sharding)?);
        }
        self.run(id, node, assignment, ins, placement.outs)
    }

    /// Runs an `Add` of cotangents of the value `of`.
    fn sum(&mut self, id: NodeId, node: &Node, of: ValueId) -> Result<(), LowerError> {
        let terms = node.inputs.iter().map(|&v| self.main(v)).collect::<Result<Vec<_>, _>>()?;
        let shardings: Vec<&Sharding> = terms.iter().map(|&f| &self.fragment.forms[f].sharding).collect();
        let target =
            if shardings.windows(2).all(|w| w[0] == w[1]) { shardings[0].clone() } else { self.fragment.forms[self.main(of)?].sharding.whole() };
        let mut ins = Vec::with_capacity(terms.len());
        for term in terms {
            ins.push(self.reshard(term, &target)?);
        }
        let mut assignment = Assignment::default();
        let rule = node_rule(self.at.graph, node);
        rule.ins[0].iter().zip(&target.dims).for_each(|(&label, &axes)| assignment.assign(label, axes));
        self.run(id, node, assignment, ins, vec![target])
    }

    fn run(&mut self, id: NodeId, node: &Node, assignment: Assignment, ins: Vec<FormId>, shardings: Vec<Sharding>) -> Result<(), LowerError> {
        let mut outs = Vec::with_capacity(node.outputs.len());
        for (&value, sharding) in node.outputs.iter().zip(shardings) {
            self.at.divides(value, &sharding)?;
            let form = self.form(value, sharding);
            self.main.insert(value, form);
            outs.push(form);
        }
        self.push(Stmt::Run { node: id, assignment, ins, outs });
        Ok(())
    }

    /// The axes of each factor: what the strategy says, and what data axes split.
    fn assignment(&self, node: &Node, rule: &Rule) -> Result<Assignment, LowerError> {
        let graph = self.at.graph;
        let origin = &graph.nodes[node.origin];
        let name = || graph.values[origin.outputs[0]].name.clone();
        let assignment = &self.plan.strategy[self.at.strategy_index(node.origin)];
        let mut used = AxisSet::EMPTY;
        for &(label, axes) in &assignment.0 {
            if !self.at.mesh.tp().includes(axes) {
                return Err(LowerError::ForeignAxis { node: name() });
            }
            if used.intersects(axes) {
                return Err(LowerError::AxisTwice { node: name() });
            }
            used = used.union(axes);
            // A derivative may lack a factor of its origin: it then runs alike on all ranks along the axes.
            match rule.factor(label) {
                Some(f) if f.split == Split::Whole => return Err(LowerError::WholeFactor { node: name(), label }),
                None if node.phase == Phase::Forward => return Err(LowerError::UnknownFactor { node: name(), label }),
                Some(_) | None => {}
            }
        }
        Ok(assignment.and(&data_split(graph, node, rule, &self.at.mesh)))
    }

    fn operand(&mut self, value: ValueId, sharding: &Sharding) -> Result<FormId, LowerError> {
        let def = self.at.graph.values[value].def;
        let maker = match def {
            Def::Node(..) => {
                let main = self.main(value)?;
                return self.reshard(main, sharding);
            }
            Def::Param(param) => Maker::Param(param),
            Def::Input => Maker::Load,
        };
        for &form in self.given.iter().filter(|&&f| self.fragment.forms[f].value == value) {
            if self.fragment.forms[form].sharding == *sharding {
                return Ok(form);
            }
            // An input can be loaded in any sharding; a parameter is stored in one.
            if let Maker::Param(_) = maker {
                return Err(LowerError::ParamShardings { param: self.name(value) });
            }
        }
        let form = self.form(value, sharding.clone());
        self.maker[form] = maker;
        self.given.push(form);
        Ok(form)
    }

    fn reshard(&mut self, from: FormId, to: &Sharding) -> Result<FormId, LowerError> {
        let value = self.fragment.forms[from].value;
        self.at.divides(value, to)?;
        let mut at = from;
        for step in steps(&self.fragment.forms[from].sharding, to) {
            let next = self.taken[at].iter().find(|(s, _)| *s == step).map(|&(_, f)| f);
            at = match next {
                Some(next) => next,
                None => self.step(at, step)?,
            };
        }
        Ok(at)
    }

    pub(super) fn step(&mut self, from: FormId, step: Step) -> Result<FormId, LowerError> {
        let Form { value, sharding } = &self.fragment.forms[from];
        let value = *value;
        // The rows of a routed value are packed: blocks of its dims are not blocks of its bytes.
        let routed = self.at.graph.values[value].ty.layout != Layout::Dense && !matches!(step, Step::AllReduce { .. });
        let sharding = step.apply(sharding).ok().filter(|_| !routed).ok_or_else(|| LowerError::Routed { value: self.name(value) })?;
        self.at.divides(value, &sharding)?;
        let to = self.form(value, sharding);
        self.taken[from].push((step, to));
        self.push(Stmt::Reshard { from, to, step, layer: self.fragment.layer, pass: self.pass });
        Ok(to)
    }

    /// Brings each contribution to a parameter's gradient into the parameter's sharding, and returns what they all still wait for.
    fn gradients(&mut self, layer: u32) -> Result<BTreeMap<ParamId, AxisSet>, LowerError> {
        let graph = self.at.graph;
        let (data, tp) = (self.at.mesh.data(), self.at.mesh.tp());
        let mut pending = BTreeMap::new();
        let params: Vec<(ParamId, FormId)> =
            self.given.iter().filter_map(|&f| graph.param_of(self.fragment.forms[f].value).map(|p| (p, f))).collect();
        for (param, form) in params {
            let home = self.fragment.forms[form].sharding.clone();
            let shared = self.at.homes(param).len() > 1;
            let here = |value: &ValueId| !shared || graph.producer(*value).is_some_and(|n| graph.nodes[n].layer == layer);
            let terms = graph.grads[param].iter().filter(|v| here(v)).map(|&v| self.main(v)).collect::<Result<Vec<_>, _>>()?;
            let wait = |f: &FormId| self.fragment.forms[*f].sharding.partial;
            let common = terms.iter().fold(data.union(tp), |common, f| common.and(wait(f))).minus(home.sharded());
            if !common.includes(data.minus(home.sharded())) && !terms.is_empty() {
                return Err(LowerError::NotOverData { param: self.name(graph.params[param].value) });
            }
            // Homes of a shared parameter are sharded one by one, so each leaves only the sum over data axes.
            let common = if shared { common.and(data) } else { common };
            for term in terms {
                let monoid = self.fragment.forms[term].sharding.monoid;
                let form = self.reshard(term, &home.clone().with_partial(monoid, common))?;
                self.fragment.accumulate.push((param, form));
            }
            pending.insert(param, if graph.grads[param].is_empty() { AxisSet::EMPTY } else { common.and(tp) });
        }
        let order = |f: FormId| match self.maker[f] {
            Maker::Param(_) | Maker::Load | Maker::Handed | Maker::Forward(_) => 0,
            Maker::Backward(at) => at + 1,
        };
        let mut accumulate = std::mem::take(&mut self.fragment.accumulate);
        accumulate.sort_by_key(|&(param, form)| (order(form), param, form));
        self.fragment.accumulate = accumulate;
        Ok(pending)
    }

    /// Groups the layer's parameters by the axes they are sharded over and those their gradients wait for; a shared one stays alone.
    fn buckets(&mut self, pending: &BTreeMap<ParamId, AxisSet>) {
        let mut buckets: Vec<FragmentBucket> = Vec::new();
        for (&param, &partial) in pending {
            let value = self.at.graph.params[param].value;
            let Some(&form) = self.given.iter().find(|&&f| self.fragment.forms[f].value == value) else { continue };
            let sharding = self.fragment.forms[form].sharding.clone();
            let (axes, tied) = (sharding.sharded(), self.at.homes(param).len() > 1);
            let member = BucketMember { param, sharding };
            match buckets.iter_mut().find(|b| !b.tied && !tied && (b.axes, b.partial) == (axes, partial)) {
                Some(bucket) => bucket.members.push(member),
                None => buckets.push(FragmentBucket { members: vec![member], axes, partial, tied }),
            }
        }
        self.fragment.buckets = buckets;
    }

    /// The form in which a value comes from a neighbouring layer.
    fn handed(&mut self, value: ValueId) -> Result<FormId, LowerError> {
        let sharding = self.at.boundary_sharding(value)?;
        let form = self.form(value, sharding);
        self.main.insert(value, form);
        Ok(form)
    }

    fn at_boundary(&mut self, value: ValueId) -> Result<FormId, LowerError> {
        let main = self.main(value)?;
        self.reshard(main, &self.at.boundary_sharding(value)?)
    }

    fn main(&self, value: ValueId) -> Result<FormId, LowerError> {
        self.main.get(&value).copied().ok_or_else(|| LowerError::Undefined { value: self.name(value) })
    }

    /// A new form; its maker is the statement that is pushed next, or none.
    pub(super) fn form(&mut self, value: ValueId, sharding: Sharding) -> FormId {
        self.maker.push(Maker::Handed);
        self.taken.push(Vec::new());
        self.fragment.forms.push(Form { value, sharding })
    }

    pub(super) fn push(&mut self, stmt: Stmt) {
        let (list, maker): (_, fn(usize) -> Maker) = match self.pass {
            Pass::Forward => (&mut self.fragment.forward, Maker::Forward),
            Pass::Backward => (&mut self.fragment.backward, Maker::Backward),
        };
        let maker = maker(list.len());
        makes(&stmt).iter().for_each(|&f| self.maker[f] = maker);
        list.push(stmt);
    }

    pub(super) fn set_pass(&mut self, pass: Pass) {
        self.pass = pass;
    }

    /// How often each form is read by the statements of either pass.
    pub(super) fn read_counts(&self) -> Table<FormId, [u32; 2]> {
        let mut counts = Table::filled(self.fragment.forms.len(), [0; 2]);
        for (pass, list) in [&self.fragment.forward, &self.fragment.backward].into_iter().enumerate() {
            list.iter().flat_map(reads).for_each(|&f| counts[f][pass] += 1);
        }
        counts
    }

    fn name(&self, value: ValueId) -> String {
        self.at.graph.values[value].name.clone()
    }
}
