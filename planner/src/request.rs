//! The question and its answer: which plan, or why there is none.

use crate::baselines;
use crate::counting;
use crate::hosts::{self, Range};
use crate::infeasible::{self, Shortage};
use crate::integer::{self, SolverFault};
use crate::lower::LowerError;
use crate::machine::{Cluster, MOST_DEVICES};
use crate::memory::StateTypes;
use crate::menu::Menus;
use crate::model::Model;
use crate::pins::{Allowed, PerLayer, PinError, Pins};
use crate::placement::Site;
use crate::predict::predict;
use crate::prices::Prices;
use crate::problem::{Problem, device_limit};
use crate::search::{Closed, Found, How, Outcome, Statistics, explore};
use crate::space::{layouts, nearest_batch, needs_of_layouts, needs_of_pipelines};
use crate::units::{Bytes, Nanos};
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::Optimizer;
use dplan_ir::plan::{Away, Clip, LayerPlan, Plan, Schedule, StagePlan, Store};
use dplan_ir::program::Updates;

/// Everything that decides the answer.
pub struct Request<'a> {
    /// Differentiated, its values typed in the compute type.
    pub graph: &'a Graph,
    /// The class of each layer.
    pub classes: &'a [u32],
    pub cluster: &'a Cluster,
    /// Sequences of a step.
    pub batch: u64,
    pub compute: DType,
    pub optimizer: Optimizer,
    pub clip: Clip,
    pub pins: Pins,
    /// Of one device, arena and context together, at most what the largest has; the device's memory if absent.
    pub memory_limit: Option<Bytes>,
    /// Says when time is up; the answer then has an honest gap.
    pub deadline: Option<&'a dyn Fn() -> bool>,
}

/// What solves the tuples that no bound closes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Solver {
    /// Labels and dynamic programs ([`crate::stages`]).
    #[default]
    Exact,
    /// Integer programs ([`crate::integer`]): slower, and other code.
    Ilp,
}

/// How far a space is widened by offloading, where memory asks for it: no further than it does, for with every way the space is larger, and the proof takes longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reach {
    States,
    /// These too.
    Activations,
}

impl Reach {
    const ALL: [Reach; 2] = [Reach::States, Reach::Activations];
}

/// Where what is offloaded goes.
enum Division {
    /// To the memory of hosts, but that of these layers to files.
    Hosts(Vec<Range>),
    Files,
}

/// More ranges of layers than this are no division that anybody would want to read.
const MOST_RANGES: usize = 16;

/// The best plan, and what is known about all others.
#[derive(Clone, Debug)]
pub struct Answer {
    pub plan: Plan,
    pub objective: Nanos,
    pub statistics: Statistics,
    /// How each tuple of the space was closed.
    pub closed: Vec<Closed>,
    /// Those of the request; and ways of offloading where the space was widened: nothing fits without, or a textbook system with it is quicker than all without.
    pub pins: Pins,
}

impl Answer {
    /// Another plan in its place, if that is quicker. What bounds say of the space still holds if it is of the space; if it offloads in a way that the space did not know, nothing
    /// is known of the wider space that it is of.
    pub fn or_quicker(self, other: Option<(Plan, Nanos)>) -> Answer {
        let Some((plan, objective)) = other.filter(|(_, objective)| *objective < self.objective) else { return self };
        let knows = |away: Away| away == Away::default() || self.pins.offload.is_pinned();
        let is_known = (0..).zip(&plan.layers).all(|(layer, &option)| {
            let away = plan.options[option as usize].away();
            knows(away) && self.pins.offload.allows(layer, &away)
        });
        if is_known {
            return Answer { plan, objective, statistics: self.statistics.of_plan(objective.0), ..self };
        }
        let mut pins = self.pins;
        pins.offload.everywhere = Allowed::only(Away::all().collect());
        let closed = self.closed.iter().map(|closed| Closed { how: How::Open(0), ..*closed }).collect();
        let statistics = Statistics { solved: 0, lower_bound: 0, gap: 1.0, proved: false, ..self.statistics };
        Answer { plan, objective, statistics, closed, pins }
    }
}

/// Why there is no plan.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Refusal {
    #[error(transparent)]
    Pins(#[from] PinError),
    #[error(transparent)]
    Graph(#[from] LowerError),
    #[error("there is no layout of {devices} devices{}: {why}", under(pins))]
    Layout { devices: u64, why: String, pins: String },
    #[error("a memory limit of {limit} is more than there is: a device has {memory}")]
    Limit { limit: Bytes, memory: Bytes },
    #[error("a step of {batch} sequences is more than can be counted: {what}")]
    TooMuch { batch: u64, what: String },
    #[error("no plan fits: of the {limit} that each device may take, the context alone takes {context}")]
    Context { limit: Bytes, context: Bytes },
    #[error("a batch of {batch} sequences cannot be covered exactly{}{}", under(pins), nearest.map(|n| format!("; the nearest that can is {n}")).unwrap_or_default())]
    Batch { batch: u64, nearest: Option<u64>, pins: String },
    #[error("no layer choice is possible{}: some layer cannot be split this way, or ZeRO is pinned without data parallelism", under(pins))]
    Impossible { pins: String },
    #[error(
        "no plan is possible{}: the schedule pipedream updates every stage at its own times, so it needs ZeRO 0 or 1, nothing offloaded, and one stage where layers share a parameter",
        under(pins)
    )]
    Stale { pins: String },
    #[error(
        "pin `schedule=pipedream` in {compute}: its loss is scaled, and the norm that finds overflow is of all stages, of which none waits for others; expected f32, f64 or bf16"
    )]
    Scaled { compute: DType },
    #[error("no pipeline is possible{}: {needs}", under(pins))]
    Pipeline { needs: String, pins: String },
    #[error("{0}")]
    Infeasible(Box<Infeasible>),
    #[error("time ran out before any plan was found")]
    Late,
    #[error(transparent)]
    Solver(#[from] SolverFault),
}

/// How many devices would do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fewest {
    Are(u64),
    /// No such number was found.
    Unknown,
    /// They are of several groups, so that a number of them says nothing.
    Unlike,
}

/// Nothing fits.
#[derive(Clone, PartialEq, Debug)]
pub struct Infeasible {
    pub shortage: Shortage,
    /// What arena and context may take on one device.
    pub limit: Bytes,
    pub devices: Fewest,
    /// Pins without any one of which a plan would fit.
    pub conflicts: Vec<&'static str>,
    pub pins: String,
}

impl std::fmt::Display for Infeasible {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Shortage { tuple, stage, bytes } = self.shortage;
        write!(f, "no plan fits{}: the nearest (dp={} tp={} pp={} micro={}) ", under(&self.pins), tuple.dp, tuple.tp, tuple.pp, tuple.micro_batch)?;
        write!(f, "is short of {bytes} bytes ({}) on each device of stage {stage}, of {} ({})", Bytes(bytes), self.limit.0, self.limit)?;
        match self.devices {
            Fewest::Are(n) => write!(f, "; the fewest such devices that fit it: {n}")?,
            Fewest::Unknown => write!(f, "; no larger number of such devices was found that fits it")?,
            Fewest::Unlike => {}
        }
        if !self.conflicts.is_empty() {
            write!(f, "; it would fit without the pin {}", self.conflicts.join(", or without "))?;
        }
        Ok(())
    }
}

fn under(pins: &str) -> String {
    if pins.is_empty() { String::new() } else { format!(" under the pins {pins}") }
}

/// A limit is one of the memory there is, and leaves some of it on every device.
fn check_room(prices: &dyn Prices, limit: Option<Bytes>) -> Result<(), Refusal> {
    let groups = || (0..prices.groups().count()).map(Site::of_group);
    let memory = groups().map(|site| prices.device_memory(site)).max().unwrap_or_default();
    if let Some(limit) = limit.filter(|&limit| limit > memory) {
        return Err(Refusal::Limit { limit, memory });
    }
    let of = |site| (Bytes(device_limit(prices, site, limit.map(|b| b.0))), prices.context(site));
    match groups().map(of).find(|(limit, context)| limit <= context) {
        Some((limit, context)) => Err(Refusal::Context { limit, context }),
        None => Ok(()),
    }
}

/// A request and the prices found for it so far.
pub struct Planner<'a> {
    pub request: Request<'a>,
    pub prices: Model<'a>,
    pub problem: Problem,
}

impl<'a> Planner<'a> {
    /// # Errors
    /// A graph that cannot be lowered, or pins that fit neither the model, the devices nor the batch.
    pub fn new(request: Request<'a>) -> Result<Planner<'a>, Refusal> {
        let prices = Model::new(request.graph, request.classes, request.cluster)?;
        request.pins.check_layers(request.classes.len() as u32)?;
        if request.compute.scales_loss() && request.pins.updates() == Updates::MicroBatch {
            return Err(Refusal::Scaled { compute: request.compute });
        }
        let types = StateTypes::new(request.compute, request.optimizer);
        let (devices, limit) = (request.cluster.devices(), request.memory_limit.map(|b| b.0));
        let problem = Problem::new(&prices, devices, request.batch, types, request.clip, request.pins.clone(), limit);
        check_room(&prices, request.memory_limit)?;
        if let Some(what) = counting::too_much(request.graph, request.cluster, request.batch) {
            return Err(Refusal::TooMuch { batch: request.batch, what });
        }
        let (batch, pins) = (problem.batch, problem.pins.to_string());
        let sizes = layouts(&prices, devices, &problem.pins);
        if sizes.is_empty() {
            return Err(Refusal::Layout { devices, why: needs_of_layouts(&prices, devices, &problem.pins), pins });
        }
        let covers = |dp: u64| match problem.pins.micro_batch.values() {
            Some(sizes) => sizes.iter().any(|micro| batch % (dp * micro) == 0),
            None => batch % dp == 0,
        };
        if batch == 0 || !sizes.iter().any(|(degrees, _)| covers(degrees.dp)) {
            let nearest = nearest_batch(&sizes, batch, &problem.pins);
            return Err(Refusal::Batch { batch, nearest, pins });
        }
        Ok(Planner { request, prices, problem })
    }

    /// The best plan.
    ///
    /// # Errors
    /// If nothing fits, or no plan was found in time.
    pub fn search(&mut self) -> Result<Answer, Refusal> {
        self.search_by(Solver::Exact)
    }

    /// The best plan, found by one solver or the other.
    ///
    /// # Errors
    /// If nothing fits, no plan was found in time, or the solver of integer programs failed.
    pub fn search_by(&mut self, solver: Solver) -> Result<Answer, Refusal> {
        let deadline = self.request.deadline;
        let late = move || deadline.is_some_and(|late| late());
        let plain = self.plain_first(solver, &late)?;
        let mut outcome = self.explore(solver, &late)?;
        // Memory asks for it: that of the host if there is enough, else files.
        let asks = match &outcome.best {
            None => outcome.statistics.proved && !self.problem.pins.offload.is_pinned(),
            Some(found) => !late() && self.problem.pins.leave_all_choices() && self.offloaded_is_quicker(found.solution.objective, &late),
        };
        // Where nothing fits without, an answer needs some plan, also out of time.
        if asks && (outcome.best.is_none() || !late()) {
            outcome = self.widened(outcome, solver, &late)?;
        }
        match outcome.best {
            Some(found) => {
                let (plan, objective) = (self.plan(&found), Nanos(found.solution.objective));
                let pins = self.problem.pins.clone();
                Ok(Answer { plan, objective, statistics: outcome.statistics, closed: outcome.closed, pins }.or_quicker(plain))
            }
            None if !outcome.statistics.proved => Err(Refusal::Late),
            None => Err(self.refuse(&late)),
        }
    }

    /// Where time is limited, and schedules that take long to search are pinned beside those that do not: the best plan of the latter, so that time that runs out over the
    /// former leaves no worse an answer.
    fn plain_first(&mut self, solver: Solver, late: &dyn Fn() -> bool) -> Result<Option<(Plan, Nanos)>, SolverFault> {
        let plain: Vec<Schedule> = self.problem.pins.schedule.values().unwrap_or_default().iter().copied().filter(|s| s.is_plain()).collect();
        let all = self.problem.pins.schedule.values().map_or(0, <[Schedule]>::len);
        if self.request.deadline.is_none() || plain.is_empty() || plain.len() == all {
            return Ok(None);
        }
        let pins = Pins { schedule: Allowed::only(plain), ..self.problem.pins.clone() };
        let whole = self.problem.clone();
        self.problem = whole.under(&self.prices, pins);
        let outcome = self.explore(solver, late);
        let found = outcome.map(|outcome| outcome.best.map(|found| (self.plan(&found), Nanos(found.solution.objective))));
        self.problem = whole;
        found
    }

    fn explore(&mut self, solver: Solver, late: &dyn Fn() -> bool) -> Result<Outcome, SolverFault> {
        Ok(match solver {
            Solver::Exact => explore(&self.problem, &mut self.prices, late),
            Solver::Ilp => integer::explore(&self.problem, &mut self.prices, late)?,
        })
    }

    /// The best plan if states may be offloaded too (and activations, where nothing fits without), or the one at hand if that is better.
    fn widened(&mut self, without: Outcome, solver: Solver, late: &dyn Fn() -> bool) -> Result<Outcome, SolverFault> {
        let narrow = self.problem.clone();
        let (mut outcome, mut bound) = (without.clone(), 0);
        for reach in Reach::ALL {
            (outcome, bound) = self.offloaded(reach, solver, late)?;
            if outcome.best.is_some() || !outcome.statistics.proved {
                break;
            }
        }
        let objective = |of: &Outcome| of.best.as_ref().map_or(u64::MAX, |found| found.solution.objective);
        if objective(&without) <= objective(&outcome) && without.best.is_some() {
            (outcome, self.problem) = (without, narrow);
        }
        if outcome.best.is_some() {
            outcome.statistics = outcome.statistics.above(bound, objective(&outcome));
        }
        Ok(outcome)
    }

    /// The best plan that offloads so far, and what none is below. Where hosts have too little for it, layers go to files ([`hosts::to_files`]); other divisions between the two
    /// are not looked for, so that what is found is not proved the best.
    fn offloaded(&mut self, reach: Reach, solver: Solver, late: &dyn Fn() -> bool) -> Result<(Outcome, u64), SolverFault> {
        let mut division = if self.has_hosts() { Division::Hosts(Vec::new()) } else { Division::Files };
        let mut bound = None;
        loop {
            self.offload(reach, &division);
            let outcome = self.explore(solver, late)?;
            let bound = *bound.get_or_insert(outcome.statistics.lower_bound);
            division = match (&division, &outcome.best) {
                (Division::Hosts(files), Some(found)) => match self.to_files(found) {
                    more if more.is_empty() => return Ok((outcome, bound)),
                    more if files.len() < MOST_RANGES => Division::Hosts([files.as_slice(), &more].concat()),
                    _ => Division::Files,
                },
                (Division::Hosts(files), None) if !files.is_empty() && !late() => Division::Files,
                (Division::Hosts(_), None) | (Division::Files, _) => return Ok((outcome, bound)),
            };
        }
    }

    fn offloaded_is_quicker(&mut self, than: u64, late: &dyn Fn() -> bool) -> bool {
        baselines::offloaded_is_quicker(&self.problem, &mut self.prices, self.request.cluster.node(), than, late)
    }

    /// Whether any device may take of its host's memory.
    fn has_hosts(&self) -> bool {
        self.request.cluster.groups().iter().any(|machine| machine.host_memory != Some(Bytes::ZERO))
    }

    /// The layers that hosts have no room for.
    fn to_files(&self, found: &Found) -> Vec<Range> {
        let Request { graph, classes, cluster, .. } = self.request;
        let plan = self.plan(found);
        predict(graph, classes, cluster, &plan).map_or(Vec::new(), |prediction| hosts::to_files(&plan, &prediction, cluster))
    }

    /// Widens the space by offloading.
    fn offload(&mut self, reach: Reach, division: &Division) {
        let ways = |to: Store| {
            Away::all().filter(|a| a.stores().all(|store| store == to) && (reach == Reach::Activations || a.activations.is_none())).collect()
        };
        let mut pins = self.problem.pins.clone();
        pins.offload = match division {
            Division::Files => PerLayer { everywhere: Allowed::only(ways(Store::Nvme)), ranges: Vec::new() },
            Division::Hosts(files) => PerLayer {
                everywhere: Allowed::only(ways(Store::Cpu)),
                ranges: files.iter().map(|&(first, last)| (first, last, ways(Store::Nvme))).collect(),
            },
        };
        self.problem = self.problem.under(&self.prices, pins);
    }

    /// The fewest devices on which a plan fits, in whole nodes where there are several ([`crate::machine::Machine::resized`]). As in a search, memory asks for offloading unless pins forbid it.
    pub fn fewest_devices(&mut self) -> Fewest {
        if !self.problem.pins.offload.is_pinned() {
            self.offload(Reach::Activations, &if self.has_hosts() { Division::Hosts(Vec::new()) } else { Division::Files });
        }
        let deadline = self.request.deadline;
        self.fewest_above(0, &move || deadline.is_some_and(|late| late()))
    }

    fn fewest_above(&mut self, devices: u64, late: &dyn Fn() -> bool) -> Fewest {
        let Some(machine) = self.request.cluster.only() else { return Fewest::Unlike };
        let problem = Problem { devices, ..self.problem.clone() };
        let there_is = |devices| machine.resized(devices).is_some();
        infeasible::fewest_devices(&problem, &mut self.prices, there_is, MOST_DEVICES, late).map_or(Fewest::Unknown, Fewest::Are)
    }

    /// Why nothing fits.
    fn refuse(&mut self, late: &dyn Fn() -> bool) -> Refusal {
        let pins = self.request.pins.to_string();
        let Some(shortage) = infeasible::shortage(&self.problem, &mut self.prices) else {
            let Problem { devices, batch, .. } = self.problem;
            return match needs_of_pipelines(&self.prices, devices, batch, &self.problem.pins) {
                Some(needs) => Refusal::Pipeline { needs, pins },
                None if self.is_for_waiting_stages() => Refusal::Stale { pins },
                None => Refusal::Impossible { pins },
            };
        };
        let Shortage { tuple, stage, .. } = shortage;
        let site = self.prices.groups().seat(tuple.placement, tuple.degrees().ranks(), stage as u64).site;
        let devices = self.fewest_above(self.problem.devices, late);
        let conflicts = infeasible::conflicts(&self.problem, &mut self.prices);
        let limit = Bytes(device_limit(&self.prices, site, self.request.memory_limit.map(|b| b.0)));
        Refusal::Infeasible(Box::new(Infeasible { shortage, limit, devices, conflicts, pins }))
    }

    /// Whether it is its updates of micro-batches that no layer can run with.
    fn is_for_waiting_stages(&mut self) -> bool {
        let waiting = Pins { schedule: Allowed::only(vec![Schedule::OneFOneB]), ..self.problem.pins.clone() };
        self.problem.pins.updates() == Updates::MicroBatch && infeasible::runs(&self.problem.under(&self.prices, waiting), &mut self.prices)
    }

    /// What was found, as a plan.
    pub fn plan(&self, found: &Found) -> Plan {
        plan(&self.problem, found)
    }
}

/// What was found for a problem, as a plan.
pub fn plan(problem: &Problem, found: &Found) -> Plan {
    let Found { menus, solution } = found;
    let mut options: Vec<LayerPlan> = Vec::new();
    let layers = found.choices(&problem.layers).into_iter().map(|(row, choice)| {
        let plan = layer_plan(menus, row, choice);
        options.iter().position(|o| *o == plan).unwrap_or_else(|| {
            options.push(plan);
            options.len() - 1
        }) as u32
    });
    let layers = layers.collect();
    let tuple = &menus.tuple;
    Plan {
        dp: tuple.dp,
        ep: tuple.ep,
        cp: tuple.cp,
        tp: tuple.tp,
        micro_batch: tuple.micro_batch,
        micro_batches: tuple.micro_batches,
        schedule: tuple.schedule,
        virtual_stages: tuple.virtual_stages,
        boundary: tuple.boundary,
        stages: solution.stages.iter().map(|&(first, last)| StagePlan { first: first as u32, last: last as u32 }).collect(),
        placement: tuple.placement,
        options,
        layers,
        compute: problem.types.compute,
        optimizer: problem.types.optimizer,
        clip: problem.clip,
        wire: problem.types.wire,
        keys: tuple.keys,
        sync: tuple.sync,
        nest: tuple.nest,
    }
}

/// A choice, as a plan says it.
pub fn layer_plan(menus: &Menus, row: usize, choice: u32) -> LayerPlan {
    let choice = &menus.choices[row][choice as usize];
    menus.offers[row][choice.offer as usize].option.plan(choice.residence)
}

/// The best plan for a request.
///
/// # Errors
/// Whatever keeps it from having one.
pub fn search(request: Request<'_>) -> Result<Answer, Refusal> {
    Planner::new(request)?.search()
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
