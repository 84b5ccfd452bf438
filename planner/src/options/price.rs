//! What a layer costs, read off its lowering: the authority that [`super::options`] must agree with.

use super::form::Rates;
use super::{Halves, LayerOption, Pricing};
use crate::lower::{BackwardPass, Fragment, LowerError, Sharder, Storage, makes};
use crate::units::Nanos;
use dplan_ir::entity::FormId;
use dplan_ir::extent::node_rule;
use dplan_ir::plan::LayerPlan;
use dplan_ir::sharded::Stmt;
use dplan_ir::sharding::LocalType;
use std::ops::Range;
use std::rc::Rc;

impl Pricing<'_> {
    /// The cost of a layer run as `plan` says: the sum over the statements and forms of its lowering. The ZeRO stage does not matter here.
    ///
    /// # Errors
    /// A strategy that the layer's ops do not allow, or that does not divide under the padding of this pricing.
    pub fn price(&self, layer: u32, plan: &LayerPlan) -> Result<LayerOption, LowerError> {
        Ok(self.option(&self.sharder(BackwardPass::Whole)?.layer(layer, plan)?, plan))
    }

    /// The cost of a layer that `plan` lowers to `fragment`.
    pub fn option(&self, fragment: &Fragment, plan: &LayerPlan) -> LayerOption {
        LayerOption {
            strategy: plan.strategy.iter().cloned().map(Rc::new).collect(),
            recompute: plan.recompute,
            gathered: plan.gathered,
            forward: self.time(fragment, &fragment.forward),
            backward: self.backward(fragment, 0..fragment.backward.len()),
            bytes: fragment.bytes(self.graph, &self.mesh, &self.padded),
        }
    }

    /// The backward pass of a layer that was lowered with [`BackwardPass::Parted`].
    pub fn halves(&self, fragment: &Fragment) -> Halves {
        Halves {
            input: self.backward(fragment, 0..fragment.input_half),
            weight: self.backward(fragment, fragment.input_half..fragment.backward.len()),
            bytes: fragment.bytes(self.graph, &self.mesh, &self.padded),
        }
    }

    /// What layers are lowered with under this pricing.
    ///
    /// # Errors
    /// If the graph cannot be lowered.
    pub fn sharder(&self, backward_pass: BackwardPass) -> Result<Sharder<'_>, LowerError> {
        Ok(Sharder::new(self.graph, self.mesh.clone(), self.padded.clone(), self.boundary)?.with(backward_pass))
    }

    /// Statements of the backward pass, and the additions of contributions that they make.
    fn backward(&self, fragment: &Fragment, half: Range<usize>) -> Nanos {
        let stmts = &fragment.backward[half];
        let mut time = self.time(fragment, stmts);
        for form in stmts.iter().flat_map(makes) {
            let late = fragment.accumulate.iter().filter(|(_, f)| f == form && !matches!(fragment.storage[*f], Storage::Gradient(_)));
            late.for_each(|_| time += Rates::new(self).accumulate(&self.block(fragment, *form)));
        }
        time
    }

    fn block(&self, fragment: &Fragment, form: FormId) -> LocalType {
        fragment.local(form, self.graph, &self.mesh, &self.padded)
    }

    fn time(&self, fragment: &Fragment, stmts: &[Stmt]) -> Nanos {
        let rates = Rates::new(self);
        let blocks = |forms: &[FormId]| forms.iter().map(|&f| self.block(fragment, f)).collect::<Vec<LocalType>>();
        stmts
            .iter()
            .map(|stmt| match stmt {
                Stmt::Run { node, ins, outs, assignment } => {
                    let (ins, outs, node) = (blocks(ins), blocks(outs), &self.graph.nodes[*node]);
                    let rule = node_rule(self.graph, node);
                    rates.node(&node.op, &rule, assignment, &ins.iter().collect::<Vec<_>>(), &outs.iter().collect::<Vec<_>>())
                }
                Stmt::Reshard { from, to, step, .. } => rates.step(step, self.block(fragment, *from).bytes(), self.block(fragment, *to).bytes()),
            })
            .sum()
    }
}
