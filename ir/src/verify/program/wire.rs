//! Gradients on the wire: rounded or not, exchanged, and added up again.
//!
//! A cast says of a bucket's bytes what is true of all its members (they are cut up otherwise behind it), still pending over what the gradients were pending over.
//! An exchange changes whose they are, and not what is pending; the sum over the shares is a reduction over the axes that they are from.
//!
//! Where they are compressed, gradients and residual become pairs and another residual. What is left of the gradients stands for nothing, so that no contribution is
//! compressed twice, nor added up beside its compressed form; the residual is of the same bucket and takes one exchange in a step, as its new version shows.

use super::Class;
use super::content::Fact;
use super::dataflow::Walk;
use super::sums::Sum;
use crate::entity::{BucketId, BufferId};
use crate::mesh::AxisSet;
use crate::program::Content;

impl Walk<'_> {
    /// Gradients to the wire.
    pub fn cast(&mut self, src: BufferId, dst: BufferId) {
        self.note_read(src);
        self.lossily(src, dst);
    }

    /// Gradients and what is left over, to pairs on the wire and what is left over then.
    pub fn compress(&mut self, src: BufferId, residual: BufferId, dst: BufferId) {
        let Content::Flat { bucket, role, .. } = self.types.stage.buffers[residual].content else { return };
        let version = self.updates_before();
        let old = self.state(residual, bucket, role, version);
        if let Some(found) = self.mismatch(residual, |fact| fact == old) {
            self.wrong(residual, old, found);
        }
        self.lossily(src, dst);
        self.put(src, Fact::Garbage);
        let new = self.state(residual, bucket, role, version.next());
        self.put(residual, new);
    }

    /// What is not all of the gradients, on the wire.
    fn lossily(&mut self, src: BufferId, dst: BufferId) {
        let Content::Wire { bucket, from, kept } = self.types.stage.buffers[dst].content else { return };
        let found = self.gradients(src, bucket);
        let base = self.flat(dst).base;
        let rounded = found.map(|sum| Sum { rounded: true, ..self.sums.get(sum).clone() }).map(|sum| self.sums.id(sum));
        self.put(dst, rounded.map_or(Fact::Garbage, |sum| Fact::Wire { bucket, sum, from, kept, base }));
    }

    /// What is true of all members of a bucket of gradients.
    fn gradients(&mut self, src: BufferId, bucket: BucketId) -> Option<u32> {
        let sum = self.collapse(src).and_then(|fact| match fact {
            Fact::Grad { sum, .. } => Ok(sum),
            Fact::Zero => Ok(self.sums.id(Sum { pending: self.pending(bucket), ..Sum::default() })),
            other => Err((Class::Content, format!("expected gradients of {bucket}, its bytes hold {}", self.show(other)))),
        });
        match sum {
            Ok(sum) => Some(sum),
            Err((class, message)) => {
                self.fault(class, Some(src), message);
                None
            }
        }
    }

    /// This rank's pieces to the members, theirs to this rank.
    pub fn exchange(&mut self, axes: AxisSet, src: BufferId, dst: BufferId) {
        let found = match self.types.stage.buffers[src].content {
            // Not rounded, so not on the wire before.
            Content::Flat { bucket, .. } => {
                self.note_read(src);
                self.gradients(src, bucket).map(|sum| (bucket, sum))
            }
            _ => self.on_the_wire(src),
        };
        let Content::Wire { kept, .. } = self.types.stage.buffers[dst].content else { return };
        let base = self.flat(dst).base;
        let result = found.map_or(Fact::Garbage, |(bucket, sum)| Fact::Wire { bucket, sum, from: axes, kept, base });
        self.put(dst, result);
    }

    /// The members' shares to one sum.
    pub fn sum_shares(&mut self, src: BufferId, dst: BufferId) {
        let Content::Wire { from, .. } = self.types.stage.buffers[src].content else { return };
        let flat = self.flat(dst);
        let found = self.on_the_wire(src);
        let result = found.map_or(Fact::Garbage, |(bucket, sum)| {
            let sum = self.reduced(self.sums.get(sum).clone(), from, false).unwrap_or_else(|(sum, message)| {
                self.fault(Class::Gradient, Some(src), message);
                sum
            });
            Fact::Grad { bucket, sum: self.sums.id(sum), flat }
        });
        self.put(dst, result);
    }

    /// Reads a buffer on the wire: the bucket and what of its gradients is in it.
    fn on_the_wire(&mut self, buffer: BufferId) -> Option<(BucketId, u32)> {
        let Content::Wire { bucket, from, kept } = self.types.stage.buffers[buffer].content else { return None };
        self.note_read(buffer);
        let base = self.flat(buffer).base;
        let is = |fact: Fact| matches!(fact, Fact::Wire { bucket: b, from: f, kept: k, base: at, .. } if (b, f, k, at) == (bucket, from, kept, base));
        let first = self.cells[self.range(buffer)].first().map(|cell| cell.own);
        let wrong = self.mismatch(buffer, |fact| Some(fact) == first && is(fact));
        match (first, wrong) {
            (Some(Fact::Wire { sum, .. }), None) => Some((bucket, sum)),
            (_, found) => {
                let found = self.show(found.unwrap_or(Fact::Garbage));
                self.fault(Class::Content, Some(buffer), format!("expected gradients of {bucket} on the wire, its bytes hold {found}"));
                None
            }
        }
    }
}
