//! Which program to run: the same input always gives the same plan. No I/O, no clock, no threads.

pub mod baselines;
pub mod bound;
pub mod certificate;
pub mod cost;
pub mod explain;
pub mod infeasible;
pub mod lower;
pub mod machine;
pub mod memory;
pub mod menu;
pub mod model;
pub mod objective;
pub mod options;
pub mod padding;
pub mod pins;
pub mod predict;
pub mod prices;
pub mod problem;
pub mod request;
pub mod search;
pub mod simulate;
pub mod space;
pub mod stage;
pub mod stages;
pub mod strategy;
pub mod units;
