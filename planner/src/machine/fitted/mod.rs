//! What was measured of built-in devices and networks, as fitted by `dplan calibrate` from published tables: `data.rs` is its output and is not edited by
//! hand. Beside each fit are the number of rows it was made from and how far it is from them.

mod data;

use super::curves::{Curve, Curves, Op};
use super::{Link, Machine};
use crate::units::{Nanos, PerSecond};

/// The product surface of a device: `t = launch + max(2mnk·(1+g/m)(1+g/n)(1+h/k) / (peak·e), bytes / (bandwidth·e'))`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gemm {
    pub device: &'static str,
    pub dtype: &'static str,
    /// `e` and `e'`, millionths of the data sheet.
    pub efficiency: u64,
    pub bandwidth: u64,
    /// `g` and `h`.
    pub grain: u64,
    pub depth_grain: u64,
    /// Nanoseconds.
    pub launch: u64,
    pub rows: u64,
    /// Median error, and the error that a tenth of the rows exceed, of products whose sizes are all at least 1024; millionths.
    pub median: u64,
    pub worst_tenth: u64,
}

/// One collective of one group size in a node: nanoseconds at each of [`SIZES`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Collective {
    pub device: &'static str,
    pub op: Op,
    pub ranks: u64,
    pub nanos: &'static [u64],
    pub rows: u64,
    /// Median error from 1 MiB on, and below; millionths.
    pub large: u64,
    pub small: u64,
}

/// A network, as a collective between nodes achieves it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Network {
    pub name: &'static str,
    /// α, nanoseconds.
    pub latency: u64,
    /// β, bytes/s of one device, one direction.
    pub bandwidth: u64,
    /// How many rows it was made from.
    pub rows: u64,
    /// Median error from 1 MiB on, and below; millionths.
    pub large: u64,
    pub small: u64,
}

/// Sizes at which curves are kept, bytes.
pub const SIZES: [u64; 10] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 512 << 20];

/// The bf16 surface of a device.
pub fn gemm(device: &str) -> Option<&'static Gemm> {
    data::GEMM.iter().find(|g| g.device == device && g.dtype == "bf16")
}

/// Curves of collectives in a node of `device`; empty where none were measured.
pub fn curves(device: &str) -> Curves {
    let of = |c: &Collective| Curve { op: c.op, ranks: c.ranks, points: SIZES.iter().copied().zip(c.nanos.iter().copied()).collect() };
    Curves::new(&data::COLLECTIVES.iter().filter(|c| c.device == device).map(of).collect::<Vec<_>>())
}

/// All networks by name.
pub fn networks() -> &'static [Network] {
    data::NETWORKS
}

impl Network {
    /// `machine` with this network between its nodes.
    pub fn under(&self, machine: Machine) -> Machine {
        Machine { inter: Link { latency: Nanos(self.latency), bandwidth: PerSecond(self.bandwidth) }, ..machine }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::known_devices;

    #[test]
    fn fits_are_of_known_devices_and_near_their_tables() {
        for g in data::GEMM {
            assert!(known_devices().any(|d| d == g.device), "{}", g.device);
            assert!(g.rows > 100 && g.median <= 80_000 && g.efficiency <= 1_000_000 && g.bandwidth <= 1_000_000, "{g:?}");
        }
        for c in data::COLLECTIVES {
            assert!(known_devices().any(|d| d == c.device) && c.nanos.len() == SIZES.len(), "{c:?}");
            assert!(
                c.large <= 100_000 && c.small <= 200_000,
                "{} {} of {}: off by {} and {} millionths",
                c.device,
                c.op.name(),
                c.ranks,
                c.large,
                c.small
            );
        }
        assert!(!curves("h100").is_empty() && curves("v100-16g").is_empty());
    }
}
