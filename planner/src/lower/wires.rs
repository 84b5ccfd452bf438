//! Places for gradients on their way to their sum by an exchange ([`super::sync`]).

use super::arena::{Arena, Home, OnWire, Part};
use super::stage::Stage;
use crate::memory;
use dplan_ir::mesh::AxisSet;
use dplan_ir::program::{Content, Role, align};

impl Arena {
    /// Where a layer's gradients are rounded or compressed, and exchanged, from `offset` on in its turn of the ring.
    pub(super) fn wires(&mut self, stage: Stage<'_>, position: usize, mut offset: u64) -> u64 {
        for home in self.layers[position].homes.clone() {
            let Home { bucket, data, .. } = self.homes[home];
            let elems = self.program.buckets[bucket].elems;
            let ways = stage.mesh().size(data);
            let Some(memory::OnWire { dtype, own, shares, kept }) = memory::on_wire(elems, ways, stage.types()) else { continue };
            let mut wire = |arena: &mut Arena, from: AxisSet, bytes: u64| {
                offset += align(bytes);
                arena.buffer(Content::Wire { bucket, from, kept }, dtype, bytes, offset - align(bytes))
            };
            let own = (own > 0).then(|| wire(self, AxisSet::EMPTY, own));
            let shares = wire(self, data, shares);
            let turned = self.layers[position].turned.iter().find(|t| t.home == home).map(|t| t.part);
            let Part { whole, own: piece } = turned.unwrap_or(Part { whole: self.homes[home].roles[&Role::Grad], own: self.homes[home].own_grad });
            // Pairs add up to all of the gradients where all are asked for.
            let sum = match kept {
                None if piece == whole => self.piece_in_place(stage, bucket, Role::Grad, data, self.program.buffers[whole].offset),
                None | Some(_) => piece,
            };
            let residual = self.homes[home].roles.get(&Role::Residual).copied();
            self.layers[position].wires.insert(home, OnWire { own, residual, shares, sum });
        }
        offset
    }
}
