//! The verifier of sharded graphs.
//!
//! It knows the graph, the factor rules and the meaning of reshard steps, nothing of how the sharded graph came about:
//! - a form's sharding fits its value: as many dims, no axis twice, padded sizes that divide; padding only where every op takes it;
//! - every form is made once, by a statement before its readers, but forms of parameters (one each) and graph inputs, which nothing makes;
//! - an op's assignment splits no factor that must be whole, but the keys of an attention by axes that split its queries: they then go round ([`crate::ring`]); operands and results are in the shardings its rule gives, so that no partial value is
//!   read as whole; only a linear op may read terms of sums that all wait for the same reduction, and its result then waits too;
//! - a reshard step leads from its source's sharding to its result's; packed rows of routed values are never cut;
//! - every node of the graph runs, and the contributions to a parameter's gradient have blocks like the parameter's.

use crate::entity::{FormId, NodeId, ParamId, Table, ValueId};
use crate::extent::node_rule;
use crate::graph::{Def, Graph, Layout, Node};
use crate::mesh::AxisSet;
use crate::reshard::Step;
use crate::rule::{Assignment, Label, Linear, Split};
use crate::sharded::{Sharded, Stmt};
use crate::sharding::{Monoid, Sharding};
use crate::text::Place;
use crate::verify::report::Located;

/// What is wrong with a sharded graph.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ShardedError {
    #[error("{form}: `{value}` has {dims} dims, its sharding {found}")]
    Rank { form: FormId, value: String, dims: usize, found: usize },
    #[error("{form}: an axis is used twice")]
    AxisTwice { form: FormId },
    #[error("{form}: goes round; only within an op do blocks go round")]
    InRing { form: FormId },
    #[error("{form}: axis {axis} is not in the mesh")]
    NoAxis { form: FormId, axis: u8 },
    #[error("{form}: dim `{dim}` of size {size} is not divisible by {ways}")]
    Indivisible { form: FormId, dim: String, size: u64, ways: u64 },
    #[error("dim `{dim}` is padded from {logical} to {padded}, but `{node}` cannot take padding there")]
    Padding { dim: String, logical: u64, padded: u64, node: String },
    #[error("{form} is read by statement {stmt} before anything makes it")]
    Unmade { form: FormId, stmt: usize },
    #[error("{form} is made again by statement {stmt}")]
    MadeTwice { form: FormId, stmt: usize },
    #[error("{form}: parameter `{param}` has another form already")]
    ParamForms { form: FormId, param: String },
    #[error("{form}: parameter or input `{value}` is stored partial")]
    GivenPartial { form: FormId, value: String },
    #[error("statement {stmt}: {form} is of `{found}`, the node takes `{expected}` there")]
    Value { stmt: usize, form: FormId, found: String, expected: String },
    #[error("statement {stmt}: takes {expected} forms, has {found}")]
    Arity { stmt: usize, expected: usize, found: usize },
    #[error("statement {stmt}: factor `{label}` of `{node}` must not be split")]
    WholeFactor { stmt: usize, node: String, label: Label },
    #[error("statement {stmt}: the assignment uses an axis for two factors")]
    AssignedTwice { stmt: usize },
    #[error("statement {stmt}: {form} is sharded as {found:?}, the assignment gives {expected:?}")]
    Placement { stmt: usize, form: FormId, found: Box<Sharding>, expected: Box<Sharding> },
    #[error("statement {stmt}: {form} still waits for a reduction and is read as whole")]
    PartialRead { stmt: usize, form: FormId },
    #[error("statement {stmt}: {why}")]
    Step { stmt: usize, why: String },
    #[error("statement {stmt}: {from} and {to} are forms of different values")]
    OtherValue { stmt: usize, from: FormId, to: FormId },
    #[error("statement {stmt}: `{value}` is stored as packed rows, which cannot be cut or joined")]
    Routed { stmt: usize, value: String },
    #[error("`{node}` never runs")]
    NeverRuns { node: String },
    #[error("gradient `{value}` of `{param}` is never made in the sharding of the parameter")]
    Gradient { value: String, param: String },
}

impl Located for ShardedError {
    fn place(&self) -> Place {
        use ShardedError as E;
        match *self {
            E::Rank { form, .. }
            | E::AxisTwice { form }
            | E::InRing { form }
            | E::NoAxis { form, .. }
            | E::Indivisible { form, .. }
            | E::ParamForms { form, .. }
            | E::GivenPartial { form, .. } => Place::Form(form),
            E::Unmade { stmt, .. }
            | E::MadeTwice { stmt, .. }
            | E::Value { stmt, .. }
            | E::Arity { stmt, .. }
            | E::WholeFactor { stmt, .. }
            | E::AssignedTwice { stmt }
            | E::Placement { stmt, .. }
            | E::PartialRead { stmt, .. }
            | E::Step { stmt, .. }
            | E::OtherValue { stmt, .. }
            | E::Routed { stmt, .. } => Place::Stmt(stmt as u32),
            E::Padding { .. } | E::NeverRuns { .. } | E::Gradient { .. } => Place::Top,
        }
    }
}

/// All errors of a sharded graph.
pub fn sharded(graph: &Graph, sharded: &Sharded) -> Vec<ShardedError> {
    let mut check = Check { graph, sharded, errors: Vec::new(), made: Table::filled(sharded.forms.len(), false) };
    check.forms();
    check.padding();
    if check.errors.is_empty() {
        for (at, stmt) in sharded.body.iter().enumerate() {
            check.stmt(at, stmt);
        }
        check.complete();
    }
    check.errors
}

struct Check<'a> {
    graph: &'a Graph,
    sharded: &'a Sharded,
    errors: Vec<ShardedError>,
    made: Table<FormId, bool>,
}

impl Check<'_> {
    fn forms(&mut self) {
        let (graph, mesh) = (self.graph, &self.sharded.mesh);
        let mut params: Table<ParamId, bool> = Table::filled(graph.params.len(), false);
        for (form, f) in self.sharded.forms.iter() {
            let info = &graph.values[f.value];
            let value = || info.name.clone();
            if f.sharding.dims.len() != info.ty.dims.len() {
                self.errors.push(ShardedError::Rank { form, value: value(), dims: info.ty.dims.len(), found: f.sharding.dims.len() });
                continue;
            }
            if let Some(axis) = f.sharding.used().minus(mesh.all()).iter().next() {
                self.errors.push(ShardedError::NoAxis { form, axis: axis.0 });
                continue;
            }
            if f.sharding.ring.is_some() {
                self.errors.push(ShardedError::InRing { form });
            }
            if !f.sharding.is_valid() {
                self.errors.push(ShardedError::AxisTwice { form });
            }
            for (&dim, &axes) in info.ty.dims.iter().zip(&f.sharding.dims) {
                let (size, ways) = (self.sharded.padded.size(dim), mesh.size(axes));
                if size % ways != 0 {
                    self.errors.push(ShardedError::Indivisible { form, dim: graph.dims[dim].name.clone(), size, ways });
                }
            }
            match info.def {
                Def::Node(..) => continue,
                Def::Param(p) if std::mem::replace(&mut params[p], true) => self.errors.push(ShardedError::ParamForms { form, param: value() }),
                Def::Param(_) | Def::Input => {}
            }
            self.made[form] = true;
            if !f.sharding.partial.is_empty() {
                self.errors.push(ShardedError::GivenPartial { form, value: value() });
            }
        }
    }

    /// Padding is allowed where the factor of every op that has the dim is free.
    fn padding(&mut self) {
        let (graph, padded) = (self.graph, &self.sharded.padded);
        if graph.dims.iter().all(|(d, dim)| padded.size(d) == dim.size) {
            return;
        }
        let mut told = Table::filled(graph.dims.len(), false);
        for node in graph.nodes.values() {
            let rule = node_rule(graph, node);
            for (labels, &value) in rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l)).zip(node.inputs.iter().chain(&node.outputs)) {
                for (&label, &dim) in labels.iter().zip(&graph.values[value].ty.dims) {
                    let (logical, size) = (graph.size(dim), padded.size(dim));
                    let free = rule.factor(label).is_some_and(|f| f.split == Split::Free);
                    if (size < logical || size > logical && !free) && !std::mem::replace(&mut told[dim], true) {
                        let dim = graph.dims[dim].name.clone();
                        self.errors.push(ShardedError::Padding { dim, logical, padded: size, node: node_name(graph, node) });
                    }
                }
            }
        }
    }

    fn stmt(&mut self, at: usize, stmt: &Stmt) {
        let (reads, makes) = match stmt {
            Stmt::Run { ins, outs, .. } => (&ins[..], &outs[..]),
            Stmt::Reshard { from, to, .. } => (std::slice::from_ref(from), std::slice::from_ref(to)),
        };
        for &form in reads.iter().filter(|&&f| !self.made[f]) {
            self.errors.push(ShardedError::Unmade { form, stmt: at });
        }
        match stmt {
            Stmt::Run { node, assignment, ins, outs } => self.run(at, *node, assignment, ins, outs),
            Stmt::Reshard { from, to, step, .. } => self.reshard(at, *from, *to, step),
        }
        for &form in makes {
            if std::mem::replace(&mut self.made[form], true) {
                self.errors.push(ShardedError::MadeTwice { form, stmt: at });
            }
        }
    }

    fn run(&mut self, stmt: usize, id: NodeId, assignment: &Assignment, ins: &[FormId], outs: &[FormId]) {
        let graph = self.graph;
        let node = &graph.nodes[id];
        let (values, forms) = (node.inputs.iter().chain(&node.outputs), ins.iter().chain(outs));
        if (ins.len(), outs.len()) != (node.inputs.len(), node.outputs.len()) {
            let (expected, found) = (node.inputs.len() + node.outputs.len(), ins.len() + outs.len());
            self.errors.push(ShardedError::Arity { stmt, expected, found });
            return;
        }
        for (&value, &form) in values.zip(forms) {
            let found = self.sharded.forms[form].value;
            if found != value {
                let name = |v: ValueId| graph.values[v].name.clone();
                self.errors.push(ShardedError::Value { stmt, form, found: name(found), expected: name(value) });
                return;
            }
        }
        let rule = node_rule(graph, node);
        let mut used = AxisSet::EMPTY;
        let goes_round = rule.goes_round(assignment);
        for &(label, axes) in &assignment.0 {
            // Keys go round along axes that split the queries too.
            if !goes_round.is_empty() && rule.blockwise.is_some_and(|of| of.keys == label) {
                continue;
            }
            if used.intersects(axes) {
                self.errors.push(ShardedError::AssignedTwice { stmt });
            }
            used = used.union(axes);
            if rule.factor(label).is_some_and(|f| f.split == Split::Whole) {
                self.errors.push(ShardedError::WholeFactor { stmt, node: node_name(graph, node), label });
            }
        }
        let placement = rule.place(assignment);
        let sharding = |f: FormId| &self.sharded.forms[f].sharding;
        // Terms of a sum may be added before they are reduced, if all of them wait for it.
        let waiting = match (rule.linear, ins.first()) {
            (Linear::Yes, Some(&first)) if sharding(first).monoid == Monoid::Sum => sharding(first).partial,
            _ => AxisSet::EMPTY,
        };
        for (&form, expected) in ins.iter().zip(&placement.ins).chain(outs.iter().zip(&placement.outs)) {
            let mut expected = expected.clone();
            if !waiting.is_empty() {
                expected = expected.with_partial(Monoid::Sum, waiting);
            }
            let found = sharding(form);
            if *found != expected {
                self.errors.push(if found.whole() == expected.whole() && ins.contains(&form) {
                    ShardedError::PartialRead { stmt, form }
                } else {
                    ShardedError::Placement { stmt, form, found: Box::new(found.clone()), expected: Box::new(expected) }
                });
            }
        }
    }

    fn reshard(&mut self, stmt: usize, from: FormId, to: FormId, step: &Step) {
        let (source, result) = (&self.sharded.forms[from], &self.sharded.forms[to]);
        if source.value != result.value {
            self.errors.push(ShardedError::OtherValue { stmt, from, to });
            return;
        }
        let info = &self.graph.values[source.value];
        if info.ty.layout != Layout::Dense && !matches!(step, Step::AllReduce { .. }) {
            self.errors.push(ShardedError::Routed { stmt, value: info.name.clone() });
        }
        let dim_exists = match *step {
            Step::AllReduce { .. } => true,
            Step::ReduceScatter { dim, .. } | Step::AllGather { dim, .. } | Step::Slice { dim, .. } => (dim as usize) < source.sharding.dims.len(),
        };
        let why = match step.apply(&source.sharding) {
            _ if !dim_exists => "there is no such dim".into(),
            Ok(sharding) if sharding == result.sharding => return,
            Ok(sharding) => format!("the step leads to {sharding:?}, not to {:?}", result.sharding),
            Err(why) => why,
        };
        self.errors.push(ShardedError::Step { stmt, why });
    }

    fn complete(&mut self) {
        let graph = self.graph;
        let mut runs = Table::filled(graph.nodes.len(), false);
        for stmt in &self.sharded.body {
            if let Stmt::Run { node, .. } = stmt {
                runs[*node] = true;
            }
        }
        for (_, node) in graph.nodes.iter().filter(|&(id, _)| !runs[id]) {
            self.errors.push(ShardedError::NeverRuns { node: node_name(graph, node) });
        }
        let mut homes: Table<ValueId, Option<&Sharding>> = Table::filled(graph.values.len(), None);
        for form in self.sharded.forms.values().filter(|f| graph.param_of(f.value).is_some()) {
            homes[form.value] = Some(&form.sharding);
        }
        let mut like_home: Table<ValueId, bool> = Table::filled(graph.values.len(), false);
        let mut home_of: Table<ValueId, Option<ValueId>> = Table::filled(graph.values.len(), None);
        for (param, values) in graph.grads.iter() {
            values.iter().for_each(|&v| home_of[v] = Some(graph.params[param].value));
        }
        for (id, form) in self.sharded.forms.iter() {
            if let Some(home) = home_of[form.value].and_then(|v| homes[v]) {
                like_home[form.value] |= self.made[id] && form.sharding.dims == home.dims;
            }
        }
        for (param, values) in graph.grads.iter() {
            for &value in values.iter().filter(|&&v| !like_home[v]) {
                let name = |v: ValueId| graph.values[v].name.clone();
                self.errors.push(ShardedError::Gradient { value: name(value), param: name(graph.params[param].value) });
            }
        }
    }
}

fn node_name(graph: &Graph, node: &Node) -> String {
    node.outputs.first().map(|&v| graph.values[v].name.clone()).unwrap_or_default()
}
