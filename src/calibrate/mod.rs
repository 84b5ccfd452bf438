//! Measured tables into the machine description: a surface of matrix products for each device and type, a curve for each collective and group size, α and β
//! of each network; each with the number of rows it came from and how far it is from them.
//!
//! The fits are functions of the tables alone: the same tables give the same text, byte by byte. Rows of devices that are not built in are counted and left out.

pub mod again;
pub mod fit;
mod minimise;
pub mod own;
mod tables;
mod write;

pub use tables::{Tables, read};
pub use write::rust;

use dplan_planner::machine::curves::Op;

/// Everything that was fitted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fitted {
    pub gemm: Vec<GemmFit>,
    pub collectives: Vec<CollectiveFit>,
    pub networks: Vec<NetworkFit>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct GemmFit {
    pub device: String,
    pub dtype: String,
    /// Millionths.
    pub efficiency: u64,
    pub bandwidth: u64,
    pub grain: u64,
    pub depth_grain: u64,
    pub launch: u64,
    pub rows: usize,
    /// Errors of products whose sizes are all at least 1024.
    pub median: f64,
    pub worst_tenth: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveFit {
    pub device: String,
    pub op: Op,
    pub ranks: u64,
    pub nanos: Vec<u64>,
    pub rows: usize,
    /// Median errors from 1 MiB on, and below.
    pub large: f64,
    pub small: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NetworkFit {
    pub name: String,
    pub latency: u64,
    pub bandwidth: u64,
    pub rows: usize,
    pub large: f64,
    pub small: f64,
}

/// Fits everything the tables hold enough of.
pub fn fit(tables: &Tables) -> Fitted {
    let gemm = tables.gemm.iter().filter_map(|((device, dtype), rows)| fit::gemm(device, dtype, rows)).collect();
    let collectives = fit::collectives(&tables.collectives);
    let networks = tables.networks.iter().filter_map(|(name, rows)| fit::network(name, rows)).collect();
    Fitted { gemm, collectives, networks }
}
