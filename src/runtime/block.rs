//! Which elements of a logical tensor a rank's block holds.

use dplan_ir::entity::DimId;
use dplan_ir::extent::{Extent, Seat};
use dplan_ir::graph::Graph;
use dplan_ir::sharding::Sharding;

/// A rank's block of a row-major tensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    dims: Vec<Side>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Side {
    extent: Extent,
    /// Of the dim in the logical tensor.
    stride: usize,
}

/// Elements that stand together both in the block and in the tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    pub local: usize,
    pub logical: usize,
    pub len: usize,
}

impl Block {
    /// The block that `seat` has of a tensor of these dims. Sizes of the tensor are logical, but for `longer`, whose size is given.
    pub fn new(graph: &Graph, dims: &[DimId], sharding: &Sharding, seat: Seat<'_>, longer: Option<(DimId, u64)>) -> Block {
        let mut stride = 1;
        let mut sides: Vec<Side> = Vec::with_capacity(dims.len());
        for (&dim, &axes) in dims.iter().zip(&sharding.dims).rev() {
            let len = seat.padded.size(dim) / seat.mesh.size(axes);
            let extent = Extent { start: seat.mesh.position(seat.local_rank, axes) * len, len, logical: graph.size(dim) };
            sides.push(Side { extent, stride });
            stride *= longer.filter(|l| l.0 == dim).map_or(graph.size(dim), |l| l.1) as usize;
        }
        sides.reverse();
        Block { dims: sides }
    }
    /// Elements of the block, padding included.
    pub fn elems(&self) -> usize {
        self.dims.iter().map(|d| d.extent.len as usize).product()
    }
    pub fn has_padding(&self) -> bool {
        self.dims.iter().any(|d| d.extent.valid() < d.extent.len)
    }
    /// First index and number of the elements of each dim that are not padding.
    pub fn valid(&self) -> Vec<(u64, u64)> {
        self.dims.iter().map(|d| (d.extent.start, d.extent.valid())).collect()
    }
    /// Elements of the tensor from one index of a dim to the next.
    pub fn stride(&self, dim: usize) -> usize {
        self.dims[dim].stride
    }

    /// Visits all elements of the block that are not padding, in stretches as long as can be: on disks each costs a wait.
    pub fn each(&self, mut visit: impl FnMut(Stretch)) {
        let mut open: Option<Stretch> = None;
        self.each_row(|row| match &mut open {
            Some(s) if (s.local + s.len, s.logical + s.len) == (row.local, row.logical) => s.len += row.len,
            _ => open.replace(row).into_iter().for_each(&mut visit),
        });
        open.into_iter().for_each(visit);
    }

    fn each_row(&self, mut visit: impl FnMut(Stretch)) {
        let Some((last, outer)) = self.dims.split_last() else { return visit(Stretch { local: 0, logical: 0, len: 1 }) };
        let len = last.extent.valid() as usize;
        let rows: usize = outer.iter().map(|d| d.extent.len as usize).product();
        if len == 0 {
            return;
        }
        for row in 0..rows {
            let (mut rest, mut logical, mut padding) = (row, last.extent.start as usize * last.stride, false);
            for side in outer.iter().rev() {
                let at = rest % side.extent.len as usize;
                rest /= side.extent.len as usize;
                padding |= at as u64 >= side.extent.valid();
                logical += (side.extent.start as usize + at) * side.stride;
            }
            if !padding {
                visit(Stretch { local: row * last.extent.len as usize, logical, len });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dplan_ir::entity::Table;
    use dplan_ir::graph::Dim;
    use dplan_ir::mesh::{AxisId, AxisSet, Mesh};
    use dplan_ir::sharding::Padded;

    /// The blocks of all ranks hold every element of the tensor as often as it is replicated, in place.
    #[test]
    fn blocks_of_all_ranks_cover_the_tensor() {
        let mut graph = Graph::default();
        let dims: Vec<DimId> = [5, 3, 4].map(|size| graph.dims.push(Dim { name: format!("d{size}"), size })).to_vec();
        let padded = Padded([6, 4, 4].into_iter().collect::<Table<DimId, u64>>());
        let mesh = Mesh::new(2, 4);
        let on = |axes: &[u8]| axes.iter().map(|&a| AxisId(a)).collect::<AxisSet>();
        let sharding = Sharding::of_dims(vec![on(&[0]), on(&[2]), on(&[])]);
        let mut seen = vec![0; 60];
        for local_rank in 0..mesh.ranks() {
            let block = Block::new(&graph, &dims, &sharding, Seat { mesh: &mesh, padded: &padded, local_rank }, None);
            // The last block of each cut dim has one element of padding.
            let last = mesh.position(local_rank, on(&[0])) == 1 || mesh.position(local_rank, on(&[2])) == 1;
            assert_eq!((block.elems(), block.has_padding()), (3 * 2 * 4, last));
            let mut end = None;
            block.each(|s| {
                assert_ne!(end, Some((s.local, s.logical)), "a stretch goes on");
                end = Some((s.local + s.len, s.logical + s.len));
                seen[s.logical..s.logical + s.len].iter_mut().for_each(|n| *n += 1);
            });
        }
        assert_eq!(seen, vec![2; 60]);
    }
}
