//! Textbook plans, priced under the same model, each at the best of its own degrees, micro-batch and recompute: all but the parameter server are in the space that was
//! searched, and that is ZeRO-1 with a slower exchange ([`dplan_ir::sync`]), so none is better than the plan (pins of the request apart). Those that offload are in it where one of them is better than all that do not ([`OFFLOADED`]).

use crate::infeasible;
use crate::memory::state_bytes;
use crate::menu::{Choice, Menus};
use crate::objective::{Home, Terms};
use crate::options::LayerOption;
use crate::pins::Pins;
use crate::prices::Prices;
use crate::problem::Problem;
use crate::request::plan;
use crate::search::{Found, NEVER, explore_below};
use crate::space::{divisors, tuples};
use crate::units::{Bytes, Nanos};
use dplan_ir::plan::Plan;
use dplan_ir::program::Space;

/// One row of the comparison.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Baseline {
    pub name: &'static str,
    /// Nothing if it does not fit, or cannot cover devices and batch.
    pub step: Option<Nanos>,
    pub fits: bool,
    /// Whether its degrees can share out devices, layers and batch at all.
    pub covers: bool,
    /// Whether it can train such a model, in such a type, at all.
    pub applies: bool,
    /// Trains on stale weights: printed, and does not count.
    pub asynchronous: bool,
}

/// Textbook systems beside each other.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    pub rows: Vec<Baseline>,
    /// The quickest plan of those that share their work as plans of the space do: what is taken where time ran out before anything better was found.
    pub quickest: Option<(Plan, Nanos)>,
}

/// A node, as far as textbook systems ask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Node {
    pub devices: u64,
    /// What each device may take of its host's memory, if there is a limit.
    pub host_memory: Option<Bytes>,
}

/// A textbook system that offloads: plain data parallelism in so many pieces.
struct Offloaded {
    name: &'static str,
    zero: u8,
    /// The quicker first.
    ways: &'static [&'static str],
}

/// ZeRO-Offload (arXiv:2101.06840) keeps parameters; ZeRO-Infinity (arXiv:2104.07857) nothing, and goes to disks where the host has too little.
const OFFLOADED: [Offloaded; 2] = [
    Offloaded { name: "ZeRO-Offload", zero: 2, ways: &["gradients"] },
    Offloaded { name: "ZeRO-Infinity", zero: 3, ways: &["parameters", "parameters:nvme"] },
];

impl Offloaded {
    fn pins(&self, devices: u64, way: &str) -> String {
        // One device has nothing to share out.
        let zero = if devices == 1 { 0 } else { self.zero };
        format!("tp=1,cp=1,ep=1,pp=1,zero={zero},offload={way}")
    }
}

/// Widest tensor parallelism of Megatron-LM's published runs: one node.
const MEGATRON_TP: u64 = 8;

/// The best plan of a system, in the space of that system.
struct Best {
    problem: Problem,
    found: Found,
}

impl Best {
    fn objective(&self) -> u64 {
        self.found.solution.objective
    }
}

/// What became of a system.
enum Tried {
    Found(Box<Best>),
    /// Of memory, or of time.
    Short,
    /// No degrees of it share out devices, layers and batch.
    Uncovered,
    /// It trains no such model.
    Inapplicable,
}

impl Tried {
    fn best(&self) -> Option<&Best> {
        match self {
            Tried::Found(best) => Some(best),
            Tried::Short | Tried::Uncovered | Tried::Inapplicable => None,
        }
    }
    fn row(&self, step: impl FnOnce(&Best) -> u64) -> Row {
        Row { step: self.best().map(step), covers: !matches!(self, Tried::Uncovered), applies: !matches!(self, Tried::Inapplicable) }
    }
}

#[derive(Clone, Copy)]
struct Row {
    step: Option<u64>,
    covers: bool,
    applies: bool,
}

/// Whether devices, layers and batch can be shared out under these pins.
fn covers(problem: &Problem, prices: &mut dyn Prices, text: &str) -> bool {
    Pins::parse(text).is_ok_and(|pins| !tuples(prices, problem.devices, problem.batch, &pins).is_empty())
}

/// Whether layers can run under these pins, however much memory they need.
fn runs(problem: &Problem, prices: &mut dyn Prices, text: &str) -> bool {
    Pins::parse(text).is_ok_and(|pins| infeasible::runs(&problem.under(prices, pins), prices))
}

/// All baselines. `late` says that time is up; what was not finished then counts with the best it had.
pub fn baselines(problem: &Problem, prices: &mut dyn Prices, node: Node, late: &dyn Fn() -> bool) -> Comparison {
    let mut best = |texts: &[String]| match best_of(problem, prices, texts, node, NEVER, late) {
        Some(best) => Tried::Found(Box::new(best)),
        None if texts.iter().any(|text| covers(problem, prices, text)) => Tried::Short,
        None => Tried::Uncovered,
    };
    let data = |zero: u8| vec![format!("tp=1,cp=1,ep=1,pp=1,zero={zero}")];
    let stages: Vec<String> = divisors(problem.devices).filter(|&p| p > 1).map(|p| p.to_string()).collect();
    let pipeline = if stages.is_empty() { vec![] } else { vec![format!("tp=1,cp=1,ep=1,zero=0,schedule=gpipe,pp={}", stages.join("+"))] };
    let widths: Vec<String> = divisors(problem.devices).filter(|&t| t <= MEGATRON_TP.min(node.devices)).map(|t| t.to_string()).collect();
    let megatron: Vec<String> = [0, 1].map(|zero| format!("tp={},cp=1,ep=1,zero={zero},schedule=1f1b", widths.join("+"))).into();

    let systems = [("DDP", data(0)), ("ZeRO-1", data(1)), ("ZeRO-2", data(2)), ("ZeRO-3", data(3)), ("GPipe", pipeline), ("Megatron 3-D", megatron)];
    // Every worker serves an equal part of the parameters.
    let served = best(&["tp=1,cp=1,ep=1,pp=1,zero=1,sync=server".into()]).row(Best::objective);
    let found = systems.each_ref().map(|(_, pins)| best(pins));
    let offloaded = OFFLOADED.map(|system| {
        let mut tried = Tried::Short;
        for way in system.ways {
            if tried.best().is_none() {
                tried = best(&[system.pins(problem.devices, way)]);
            }
        }
        (system.name, tried)
    });
    // Stages that do not wait for each other, each replicated as often as all others: not in f16, and not where layers of several stages share a parameter.
    let unwaiting = |schedule: &str| format!("tp=1,cp=1,ep=1,zero=0,schedule={schedule},pp={}", stages.join("+"));
    let stale = match () {
        () if stages.is_empty() => Tried::Uncovered,
        () if problem.types.compute.scales_loss() => Tried::Inapplicable,
        () => match best(&[unwaiting("pipedream")]) {
            Tried::Short if !runs(problem, prices, &unwaiting("pipedream")) && runs(problem, prices, &unwaiting("1f1b")) => Tried::Inapplicable,
            tried => tried,
        },
    };
    let stale = stale.row(Best::objective);
    let mut rows: Vec<(&str, Row)> = systems.iter().zip(&found).map(|((name, _), found)| (*name, found.row(Best::objective))).collect();
    rows.splice(4..4, offloaded.iter().map(|(name, found)| (*name, found.row(Best::objective))));
    let plans = found.iter().chain(offloaded.iter().map(|(_, found)| found)).filter_map(Tried::best);
    let quickest = plans.min_by_key(|best| best.objective());
    let quickest = quickest.map(|best| (plan(&best.problem, &best.found), Nanos(best.objective())));
    let [ddp, ..] = &found;
    // Fully sharded data parallelism is ZeRO-3 under another name.
    rows.insert(1, ("FSDP", rows[3].1));
    rows.push(("parameter server", served));
    rows.insert(0, ("DataParallel", ddp.row(|best| best.objective() + blocking(best, prices))));
    let row = |asynchronous: bool| {
        move |(name, Row { step, covers, applies }): (&'static str, Row)| Baseline {
            name,
            step: step.map(Nanos),
            fits: step.is_some(),
            covers,
            applies,
            asynchronous,
        }
    };
    let rows = rows.into_iter().map(row(false)).chain([("PipeDream", stale)].map(row(true)));
    Comparison { rows: rows.collect(), quickest }
}

/// Whether a textbook system that offloads is quicker than a plan that takes so long.
pub fn offloaded_is_quicker(problem: &Problem, prices: &mut dyn Prices, node: Node, than: u64, late: &dyn Fn() -> bool) -> bool {
    let pins = OFFLOADED.iter().flat_map(|system| system.ways.iter().map(|way| system.pins(problem.devices, way)));
    best_of(problem, prices, &pins.collect::<Vec<_>>(), node, than, late).is_some()
}

/// The best plan under any of these pins that is below `cut`, and that the hosts of its devices can hold.
fn best_of(problem: &Problem, prices: &mut dyn Prices, texts: &[String], node: Node, cut: u64, late: &dyn Fn() -> bool) -> Option<Best> {
    let mut best: Option<Best> = None;
    // Textbook systems recompute everywhere or nowhere.
    for (text, recompute) in texts.iter().flat_map(|t| ["none", "full"].map(|r| (t, r))) {
        let Ok(pins) = Pins::parse(&format!("{text},recompute={recompute}")) else { continue };
        let pins = Pins { wire: problem.pins.wire, ..pins };
        let below = best.as_ref().map_or(cut, Best::objective);
        let problem = problem.under(prices, pins);
        let found = explore_below(&problem, prices, below, late).best.map(|found| Best { problem, found });
        best = found.filter(|f| node.host_memory.is_none_or(|limit| on_host(f) <= limit.0)).or(best);
    }
    best
}

/// What a plan of one stage keeps in the memory of the host, for each device.
fn on_host(of: &Best) -> u64 {
    let mesh = of.found.menus.tuple.mesh();
    let kept = |Layer { choice, option, home }: Layer<'_>| -> u64 {
        let own = option.bytes.buckets.iter().filter(|b| !b.tied || home != Home::Repeated);
        own.map(|b| state_bytes(b, &mesh, choice.residence.states, of.found.menus.tuple.types(of.problem.types))[Space::Host as usize]).sum()
    };
    layers(of).map(kept).sum()
}

/// What a plan takes longer if gradients are reduced after the backward pass and parameters are sent out from one rank in every step.
fn blocking(of: &Best, prices: &dyn Prices) -> u64 {
    let Best { problem, found } = of;
    let (tuple, site) = (&found.menus.tuple, found.menus.sites[0].0);
    let mesh = tuple.mesh();
    let terms = Terms { links: prices, site, mesh: &mesh, types: tuple.types(problem.types), clip: problem.clip, pipeline: tuple.pipeline() };
    let late = |l: Layer<'_>| terms.sync(&l.option.bytes, l.choice.residence.states, l.home).blocking(l.option.backward);
    layers(of).map(late).sum()
}

/// A layer of a plan of one stage.
struct Layer<'a> {
    choice: &'a Choice,
    option: &'a LayerOption,
    home: Home,
}

/// The layers of a plan of one stage, in order.
fn layers(of: &Best) -> impl Iterator<Item = Layer<'_>> {
    let Menus { choices, offers, tied, .. } = &of.found.menus;
    let mut seen = false;
    of.problem.layers.iter().zip(&of.found.solution.choices).map(move |(&kind, &choice)| {
        let home = if tied[kind] && seen { Home::Repeated } else { Home::Together };
        seen |= tied[kind];
        let choice = &choices[kind][choice as usize];
        Layer { choice, option: &offers[kind][choice.offer as usize].option, home }
    })
}
