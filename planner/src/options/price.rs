//! What a layer costs, read off its lowering: the authority that [`super::options`] must agree with.

use super::form::Rates;
use super::{LayerOption, Pricing};
use crate::lower::{Fragment, LowerError, Sharder, Storage};
use crate::units::Nanos;
use dplan_ir::entity::FormId;
use dplan_ir::plan::LayerPlan;
use dplan_ir::sharded::Stmt;
use dplan_ir::sharding::LocalType;
use std::rc::Rc;

impl Pricing<'_> {
    /// The cost of a layer run as `plan` says: the sum over the statements and forms of its lowering. The ZeRO stage does not matter here.
    ///
    /// # Errors
    /// A strategy that the layer's ops do not allow, or that does not divide under the padding of this pricing.
    pub fn price(&self, layer: u32, plan: &LayerPlan) -> Result<LayerOption, LowerError> {
        let sharder = Sharder::new(self.graph, self.mesh.clone(), self.padded.clone(), self.boundary)?;
        let fragment = sharder.layer(layer, plan)?;
        let mut backward = self.time(&fragment, &fragment.backward);
        for &(_, form) in &fragment.accumulate {
            if !matches!(fragment.storage[form], Storage::Gradient(_)) {
                backward += Rates::new(self).accumulate(&self.block(&fragment, form));
            }
        }
        Ok(LayerOption {
            strategy: plan.strategy.iter().cloned().map(Rc::new).collect(),
            recompute: plan.recompute,
            gathered: plan.gathered,
            forward: self.time(&fragment, &fragment.forward),
            backward,
            bytes: fragment.bytes(self.graph, &self.mesh, &self.padded),
        })
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
                Stmt::Run { node, ins, outs, .. } => {
                    let (ins, outs) = (blocks(ins), blocks(outs));
                    rates.run(&self.graph.nodes[*node].op, &ins.iter().collect::<Vec<_>>(), &outs.iter().collect::<Vec<_>>())
                }
                Stmt::Reshard { from, to, step, .. } => rates.step(step, self.block(fragment, *from).bytes(), self.block(fragment, *to).bytes()),
            })
            .sum()
    }
}
