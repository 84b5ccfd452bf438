//! What the backward pass finds of the forward pass, and where every form lives.
//!
//! A form that the backward pass reads and the forward pass made is either *kept* in the layer's frame or *made again* in the workspace:
//!
//! | plan | made again |
//! |---|---|
//! | `Recompute::Full` | everything that is read, from the layer's input; before the rest of the backward pass, so it need not wait for the cotangent |
//! | `Recompute::Selective` | what cheap ops made, collectives on it included; and what gathers and slices made of anything; just before it is read |
//! | `Gathered::Again` | what an all-gather made, from its source; just before it is read |
//! | `Gathered::Keep` | nothing |
//!
//! A backward pass in halves has first the statements that the cotangent of the layer's input is made from, then the others; what the others read of the first is
//! *held*. A statement that reads that cotangent stays with the first half, for it is handed down right then.
//!
//! Making a form again means making again, as new forms, what it is made from, as far as that is not kept.

use super::LowerError;
use super::fragment::{BackwardPass, Fragment, Storage, makes, reads};
use super::layer::{Layer, Maker};
use dplan_ir::cost::is_cheap;
use dplan_ir::entity::{FormId, Table};
use dplan_ir::mesh::AxisSet;
use dplan_ir::plan::{Gathered, Recompute};
use dplan_ir::reshard::Step;
use dplan_ir::sharded::{Pass, Stmt};
use std::collections::BTreeSet;

/// Decides what is kept, rewrites the backward pass accordingly, and gives every form its storage.
pub(super) fn settle(layer: &mut Layer<'_, '_>) -> Result<(), LowerError> {
    let first_forms = layer.fragment.forms.len();
    let mut keep = Keep { again: Table::filled(first_forms, None), kept: BTreeSet::new() };
    let backward = std::mem::take(&mut layer.fragment.backward);
    layer.set_pass(Pass::Backward);
    let counts = layer.read_counts();
    if layer.plan.recompute == Recompute::Full {
        for &form in backward.iter().flat_map(reads) {
            keep.demand(layer, form, &counts);
        }
    }
    for mut stmt in backward {
        match &mut stmt {
            Stmt::Run { ins, .. } => ins.iter_mut().for_each(|f| *f = keep.demand(layer, *f, &counts)),
            Stmt::Reshard { from, .. } => *from = keep.demand(layer, *from, &counts),
        }
        layer.push(stmt);
    }
    part(&mut layer.fragment);
    copy_output(layer, &keep)?;
    layer.fragment.storage = storage(layer, &keep);
    Ok(())
}

struct Keep {
    /// For each form of the forward pass, the form that holds it again in the backward pass.
    again: Table<FormId, Option<FormId>>,
    kept: BTreeSet<FormId>,
}

impl Keep {
    /// The form in which the backward pass reads `form`.
    fn demand(&mut self, layer: &mut Layer<'_, '_>, form: FormId, counts: &Table<FormId, [u32; 2]>) -> FormId {
        if let Some(again) = self.again.get(form).copied().flatten() {
            return again;
        }
        match layer.maker[form] {
            Maker::Param(_) | Maker::Handed | Maker::Backward(_) => form,
            // Loaded for the backward pass alone, or once for both passes, or again.
            Maker::Load if counts[form][0] == 0 => form,
            Maker::Load if layer.plan.recompute == Recompute::None => {
                self.kept.insert(form);
                form
            }
            Maker::Load => {
                let again = self.copy(layer, form);
                layer.maker[again] = Maker::Load;
                again
            }
            Maker::Forward(at) if is_made_again(layer, at) => {
                self.make_again(layer, at, counts);
                self.again[form].unwrap_or(form)
            }
            Maker::Forward(_) => {
                self.kept.insert(form);
                form
            }
        }
    }

    fn make_again(&mut self, layer: &mut Layer<'_, '_>, at: usize, counts: &Table<FormId, [u32; 2]>) {
        let mut stmt = layer.fragment.forward[at].clone();
        match &mut stmt {
            Stmt::Run { ins, outs, .. } => {
                ins.iter_mut().for_each(|f| *f = self.demand(layer, *f, counts));
                outs.iter_mut().for_each(|f| *f = self.copy(layer, *f));
            }
            Stmt::Reshard { from, to, pass, .. } => {
                *from = self.demand(layer, *from, counts);
                *to = self.copy(layer, *to);
                *pass = Pass::Backward;
            }
        }
        layer.push(stmt);
    }

    fn copy(&mut self, layer: &mut Layer<'_, '_>, form: FormId) -> FormId {
        let original = layer.fragment.forms[form].clone();
        let again = layer.form(original.value, original.sharding);
        self.again[form] = Some(again);
        again
    }
}

/// Whether the backward pass makes again what a statement of the forward pass made.
fn is_made_again(layer: &Layer<'_, '_>, at: usize) -> bool {
    let graph = layer.at.graph;
    match (&layer.fragment.forward[at], layer.plan.recompute) {
        (_, Recompute::Full) => true,
        (Stmt::Run { node, .. }, Recompute::Selective) => is_cheap(&graph.nodes[*node].op),
        (Stmt::Reshard { from, step, .. }, Recompute::Selective) => {
            let maker = graph.producer(layer.fragment.forms[*from].value).map(|n| &graph.nodes[n]);
            let cheap = maker.is_some_and(|n| n.layer == layer.fragment.layer && is_cheap(&n.op));
            cheap || matches!(step, Step::AllGather { .. } | Step::Slice { .. })
        }
        (Stmt::Run { .. }, Recompute::None) => false,
        (Stmt::Reshard { step, .. }, Recompute::None) => matches!(step, Step::AllGather { .. }) && layer.plan.gathered == Gathered::Again,
    }
}

/// What a layer hands over leaves with the layer's pass; where it has to stay as well, the next layer gets a copy.
fn copy_output(layer: &mut Layer<'_, '_>, keep: &Keep) -> Result<(), LowerError> {
    // A slice over no axes.
    let copy = Step::Slice { axes: AxisSet::EMPTY, dim: 0 };
    if let Some(output) = layer.fragment.output.filter(|f| keep.kept.contains(f)) {
        layer.set_pass(Pass::Forward);
        layer.fragment.output = Some(layer.step(output, copy)?);
    }
    Ok(())
}

/// Brings the input half of the backward pass to its front.
fn part(fragment: &mut Fragment) {
    let handed_down = fragment.cotangent_out;
    let mut needed: BTreeSet<FormId> = handed_down.into_iter().collect();
    let mut in_input_half = vec![fragment.backward_pass == BackwardPass::Whole; fragment.backward.len()];
    for (stmt, first) in fragment.backward.iter().zip(&mut in_input_half).rev() {
        let reads_handed_down = handed_down.is_some_and(|form| reads(stmt).contains(&form));
        if reads_handed_down || makes(stmt).iter().any(|form| needed.contains(form)) {
            *first = true;
            needed.extend(reads(stmt));
        }
    }
    let (input, weight): (Vec<_>, Vec<_>) = std::mem::take(&mut fragment.backward).into_iter().zip(in_input_half).partition(|s| s.1);
    fragment.input_half = input.len();
    fragment.backward = input.into_iter().chain(weight).map(|s| s.0).collect();
}

/// Forms that the input half of the backward pass makes and the weight half reads.
fn held(fragment: &Fragment) -> BTreeSet<FormId> {
    let (input, weight) = fragment.backward.split_at(fragment.input_half);
    let made: BTreeSet<FormId> = input.iter().flat_map(makes).copied().collect();
    weight.iter().flat_map(reads).copied().filter(|form| made.contains(form)).collect()
}

fn storage(layer: &Layer<'_, '_>, keep: &Keep) -> Table<FormId, Storage> {
    let fragment = &layer.fragment;
    let counts = layer.read_counts();
    let direct = direct_gradients(fragment, &counts);
    let held = held(fragment);
    fragment.forms.map(|form, _| {
        let is = |role: Option<FormId>| role == Some(form);
        match layer.maker[form] {
            Maker::Param(param) => Storage::Param(param),
            _ if is(fragment.input) || keep.kept.contains(&form) => Storage::Frame,
            _ if is(fragment.output) => Storage::Output,
            _ if is(fragment.cotangent_in) => Storage::CotangentIn,
            _ if is(fragment.cotangent_out) => Storage::CotangentOut,
            _ if is(fragment.loss) => Storage::Loss,
            _ => match fragment.accumulate.iter().find(|(_, f)| *f == form) {
                Some(&(param, _)) if direct.contains(&form) => Storage::Gradient(param),
                Some(_) | None if held.contains(&form) => Storage::Held,
                Some(_) | None => Storage::Workspace,
            },
        }
    })
}

/// Contributions that can be added to their gradient as they are made: results of an op, all of whose results are contributions that nobody else reads.
fn direct_gradients(fragment: &Fragment, counts: &Table<FormId, [u32; 2]>) -> BTreeSet<FormId> {
    let alone = |form: &FormId| {
        fragment.accumulate.iter().filter(|(_, f)| f == form).count() == 1 && counts[*form] == [0, 0] && fragment.cotangent_out != Some(*form)
    };
    let direct = fragment.backward.iter().filter(|s| matches!(s, Stmt::Run { .. }) && makes(s).iter().all(alone));
    direct.flat_map(makes).copied().collect()
}
