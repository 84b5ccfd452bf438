//! Published runs, priced: each row of a table of measurements becomes a model, a machine, a layout and an executor, or a reason why it cannot.
//!
//! Times are compared first. A row that prints FLOP/s only is converted by the formula its source states, where that is one of those known here; memory is
//! compared by the counter the row names. Nothing is taken from a row's measurement to price it, but through the constants that all rows together were fitted with.

mod refit;
mod row;
mod score;

pub use refit::{Refit, refit};
pub use row::read;
pub use score::{BORDERLINE, DIFFERENT, Pairs, Score, Scores, score};

use dplan_planner::executor::{Constant, Constants, Decoder, Executor, Layout, Memory, Step, line_rate, memory, price};
use dplan_planner::machine::{Link, Machine};
use dplan_planner::units::Millionths;

/// A row of the table.
#[derive(Clone, Debug)]
pub struct Row {
    pub id: String,
    pub source: String,
    /// What is run, or why that cannot be told.
    pub run: Result<Run, String>,
    pub measured: Measured,
    /// Model, machine, sequence and precision as printed: rows that agree here differ by their layout.
    pub group: String,
}

/// What a row says happened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    pub seconds: Option<f64>,
    pub memory: Option<(u64, Counter)>,
    pub out_of_memory: bool,
    /// Whether its own source doubts the time.
    pub doubted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Of the allocator.
    Allocated,
    /// Of the driver.
    Device,
    /// What the allocator holds, used or not.
    Reserved,
}

/// A row that can be priced.
#[derive(Clone, Debug)]
pub struct Run {
    pub model: Decoder,
    pub layout: Layout,
    pub executor: Executor,
    pub machine: Machine,
    pub fabric: Fabric,
    /// Whether states are known well enough to price memory.
    pub states_known: bool,
}

/// How messages between nodes leave a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    /// The network reads device memory.
    Direct,
    /// Through host memory.
    OmniPath,
    /// At a rate that nobody stated.
    Unstated,
}

impl Run {
    pub fn step(&self, constants: &Constants) -> Step {
        let price = |machine: &Machine| price(&self.model, &self.layout, self.executor, machine, constants);
        match self.fabric {
            Fabric::Direct => price(&self.machine),
            Fabric::OmniPath => {
                let share = Millionths((constants.get(Constant::OmniPath) * 1e6) as u64);
                let inter = Link { bandwidth: share.of(self.machine.inter.bandwidth), ..self.machine.inter };
                price(&Machine { inter, ..self.machine.clone() })
            }
            Fabric::Unstated => {
                let bits = constants.get(Constant::UnstatedNetwork) * 1e9;
                price(&line_rate(bits, self.machine.per_node).under(self.machine.clone()))
            }
        }
    }
    /// Whether two runs are one layout of one model, run by one executor over one network.
    pub fn is_laid_out_as(&self, other: &Run) -> bool {
        (&self.model, &self.layout, self.executor, self.fabric) == (&other.model, &other.layout, other.executor, other.fabric)
    }
    pub fn memory(&self) -> Option<Memory> {
        if self.states_known { memory(&self.model, &self.layout, self.executor) } else { None }
    }
    /// Tokens of a step.
    pub fn tokens(&self) -> f64 {
        let l = &self.layout;
        [l.dp, l.micro_batch, l.micro_batches, self.model.sequence].into_iter().map(|n| n as f64).product()
    }
}

/// A priced row.
#[derive(Clone, Debug)]
pub struct Priced<'a> {
    pub row: &'a Row,
    pub seconds: Option<f64>,
    pub memory: Option<Memory>,
    pub fits: Option<bool>,
}

impl Priced<'_> {
    /// Predicted over measured, less one.
    pub fn error(&self) -> Option<f64> {
        Some(self.seconds? / self.row.measured.seconds? - 1.0)
    }
    /// The memory that the row's counter would have shown.
    pub fn counted(&self) -> Option<u64> {
        let memory = self.memory?;
        match self.row.measured.memory.map_or(Counter::Device, |m| m.1) {
            Counter::Allocated => Some(memory.allocated.0),
            Counter::Device => Some(memory.device.0),
            Counter::Reserved => None,
        }
    }
    pub fn memory_error(&self) -> Option<f64> {
        Some(self.counted()? as f64 / self.row.measured.memory?.0 as f64 - 1.0)
    }
    /// Demand over capacity, less one.
    pub fn margin(&self) -> Option<f64> {
        let capacity = self.row.run.as_ref().ok()?.machine.device.memory.0;
        Some(self.memory?.device.0 as f64 / capacity as f64 - 1.0)
    }
}

/// Prices every row.
pub fn price_all<'a>(rows: &'a [Row], constants: &Constants) -> Vec<Priced<'a>> {
    let one = |row: &'a Row| {
        let run = row.run.as_ref().ok();
        let memory = run.and_then(Run::memory);
        let fits = run.zip(memory).map(|(run, m)| m.device <= run.machine.device.memory);
        Priced { row, seconds: run.map(|r| r.step(constants).seconds()), memory, fits }
    };
    rows.iter().map(one).collect()
}
