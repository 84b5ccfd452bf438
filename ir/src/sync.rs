//! How gradients get from data-parallel ranks to their sum, and parameters back.
//!
//! | | gradients | parameters (ZeRO 1 to 3) |
//! |---|---|---|
//! | `flat` | one collective over all data axes, by whatever algorithm the library has for it | the same |
//! | `hierarchical:F` | scattered over the ranks of each of `F` parts (nodes), then what each holds over the parts | gathered the other way round |
//! | `server` | every rank serves an equal piece: all push theirs to it (all-to-all), it adds them up in their order, whatever the ZeRO stage | flat: all pull |
//! | `tree` | scattered over one data axis after the other, in the order of the mesh (`dp`, `cp`, `far0`, …), halves (or thirds, …) of halves: recursive halving | recursive doubling |
//!
//! Steps are ordinary collectives, each over an axis or several: the axis `dp` of the mesh is cut up for them, and what lies outside of the first part are the axes
//! `far0`, `far1`, … ([`crate::mesh::Mesh::of`]). An all-reduce is scattered by all steps but the last, reduced in the last, and gathered back.
//!
//! A rank that serves is a parameter server beside a worker. From ZeRO 1 it differs in the exchange alone: nothing is added up on the way, so that each piece goes from each rank
//! to its server by itself (between nodes `n / (n − 1)` times the nodes' number of copies of it, not one), and the server needs room for a copy of all gradients of a
//! layer. At ZeRO 0 what it has added up is pulled instead of parameters, and every rank updates all.
//!
//! Sums are of the same terms, in another order: the ranks of the first step first. Every rank that holds an element has the same sum of it, to the bit.

use crate::mesh::{AxisSet, Mesh, prime_factors};

/// The way of exchange.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Sync {
    #[default]
    Flat,
    /// In so many parts of consecutive data-parallel ranks, and between them.
    Hierarchical {
        far: u64,
    },
    Tree,
    Server,
}

impl Sync {
    /// `flat`, `hierarchical:2`, `tree`, `server`.
    pub fn name(self) -> String {
        match self {
            Sync::Flat => "flat".into(),
            Sync::Hierarchical { far } => format!("hierarchical:{far}"),
            Sync::Tree => "tree".into(),
            Sync::Server => "server".into(),
        }
    }

    pub fn from_name(name: &str) -> Option<Sync> {
        match name {
            "flat" => Some(Sync::Flat),
            "tree" => Some(Sync::Tree),
            "server" => Some(Sync::Server),
            _ => name.strip_prefix("hierarchical:")?.parse().ok().filter(|far| (2..=1 << 40).contains(far)).map(|far| Sync::Hierarchical { far }),
        }
    }

    /// Ranks along the axes `far0`, `far1`, … into which `dp` data-parallel ranks are cut beside the first, from the inside out; none where it has nothing to cut.
    pub fn far(self, dp: u64) -> Vec<u64> {
        match self {
            Sync::Flat | Sync::Server => Vec::new(),
            Sync::Hierarchical { far } if far > 1 && dp.is_multiple_of(far) => vec![far],
            Sync::Hierarchical { .. } => Vec::new(),
            Sync::Tree => prime_factors(dp).into_iter().skip(1).collect(),
        }
    }

    /// The axes of each step by which a sum over `data` is scattered, in order; a gather takes them backwards. Together they are `data`; there are none where that is empty.
    pub fn steps(self, mesh: &Mesh, data: AxisSet) -> Vec<AxisSet> {
        let far = mesh.far().and(data);
        let steps = match self {
            Sync::Flat | Sync::Server => vec![data],
            Sync::Hierarchical { .. } => vec![data.minus(far), far],
            Sync::Tree => data.iter().map(AxisSet::one).collect(),
        };
        steps.into_iter().filter(|step| !step.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Degrees;

    #[test]
    fn ways_of_exchange_have_names_of_their_own() {
        for sync in [Sync::Flat, Sync::Hierarchical { far: 2 }, Sync::Hierarchical { far: 31 }, Sync::Tree, Sync::Server] {
            assert_eq!(Sync::from_name(&sync.name()), Some(sync));
        }
        for name in ["", "hierarchical", "hierarchical:1", "hierarchical:x", "trees"] {
            assert_eq!(Sync::from_name(name), None, "{name}");
        }
    }

    #[test]
    fn steps_go_over_all_data_axes_once_the_nearest_first() {
        for (sync, dp, cp, sizes) in [
            (Sync::Flat, 12, 1, vec![12]),
            (Sync::Hierarchical { far: 3 }, 12, 1, vec![4, 3]),
            (Sync::Hierarchical { far: 3 }, 12, 2, vec![8, 3]),
            (Sync::Hierarchical { far: 12 }, 12, 2, vec![2, 12]),
            (Sync::Tree, 12, 1, vec![2, 2, 3]),
            (Sync::Tree, 8, 3, vec![2, 3, 2, 2]),
            (Sync::Tree, 7, 1, vec![7]),
        ] {
            let mesh = Mesh::of(Degrees { dp, cp, tp: 2, sync, ..Degrees::ONE });
            let steps = sync.steps(&mesh, mesh.data());
            assert_eq!(steps.iter().map(|&s| mesh.size(s)).collect::<Vec<_>>(), sizes, "{sync:?}");
            assert_eq!(steps.iter().fold(AxisSet::EMPTY, |all, &s| all.union(s)), mesh.data());
            // Each step's ranks are further apart than those of the step before.
            let apart = |&s: &AxisSet| s.iter().map(|a| mesh.stride(a)).min();
            let far: Vec<AxisSet> = steps.iter().copied().filter(|s| mesh.far().includes(*s)).collect();
            assert!(far.windows(2).all(|w| apart(&w[0]) < apart(&w[1])));
            assert!(far.first().is_none_or(|f| apart(f) > steps.first().and_then(apart) || far.len() == steps.len()));
        }
    }
}
