//! The same choice as an integer program, as an independent answer to the same question.
//!
//! One unit flows through the layer's network from its source to a sink. With `y_a` the flow on arc `a` and `x_{s,c}` whether step `s` takes strategy `c`:
//!
//! ```text
//! min  Σ_a w(a) · y_a
//!      flow is conserved at every node, and is 1 at the source
//!      Σ_{a of step s with strategy c} y_a = x_{s,c},   x binary,  y ≥ 0
//!      Σ_a bytes(a) · y_a ≤ limit
//! ```
//! Without the last row every vertex of the relaxation is a path; with it a few strategies may be split between two paths, and branching decides them.
//! Once all `x` are whole there is one path, so `y` needs no bounds of its own. No arc is left out: what labels drop is all here.

use super::blueprint::Blueprint;
use super::form::{Compare, Measure};
use super::labels::{Path, sinks};
use super::net::{Keep, Net, Stage};
use super::{COUNT, LayerOption, Pricing};
use good_lp::{Expression, ProblemVariables, ResolutionError, Solution, SolverModel, Variable, constraint, default_solver, variable};

/// What is minimised: a weighted sum of forward and backward nanoseconds, parameter elements, and frame and workspace bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Goal {
    pub per_nanosecond: f64,
    pub per_param: f64,
    pub per_frame_byte: f64,
    pub per_workspace_byte: f64,
    /// Most bytes of frame and workspace together.
    pub limit: Option<u64>,
}

impl Goal {
    /// Least time.
    pub const QUICKEST: Goal = Goal { per_nanosecond: 1.0, per_param: 0.0, per_frame_byte: 0.0, per_workspace_byte: 0.0, limit: None };

    pub fn value(&self, option: &LayerOption) -> f64 {
        let bytes = [option.bytes.frame as f64 * self.per_frame_byte, option.bytes.workspace as f64 * self.per_workspace_byte];
        option.time().0 as f64 * self.per_nanosecond + option.param_elems() as f64 * self.per_param + bytes[0] + bytes[1]
    }
    fn weigh(&self, measure: &Measure) -> f64 {
        let [picos, params, _, frame, both] = measure.0.map(|n| n as f64);
        picos / 1000.0 * self.per_nanosecond + params * self.per_param + frame * self.per_frame_byte + (both - frame) * self.per_workspace_byte
    }
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IlpError {
    #[error("the integer program's solver gave up: {0}")]
    Solver(String),
}

impl Blueprint {
    /// The best option by an integer program, or nothing if none keeps the limit.
    ///
    /// # Errors
    /// If the solver fails.
    pub fn integer_program(&self, pricing: &Pricing<'_>, goal: &Goal) -> Result<Option<LayerOption>, IlpError> {
        let Some(mut net) = Net::new(pricing, self) else {
            return Ok(None);
        };
        let stages = net.stages(Keep::All);
        let mut best: Option<LayerOption> = None;
        for variant in 0..COUNT {
            let weights: Vec<Vec<Measure>> =
                stages.iter().map(|s| s.outcomes.iter().map(|o| net.rates.measure(&o.costs[variant], Compare::All)).collect()).collect();
            let Some(path) = flow(&stages, &weights, goal)? else { continue };
            let found = self.offer(pricing, &net, &stages, variant, &path).option;
            if best.as_ref().is_none_or(|b| goal.value(&found) < goal.value(b)) {
                best = Some(found);
            }
        }
        Ok(best)
    }
}

/// The best path.
fn flow(stages: &[Stage], weights: &[Vec<Measure>], goal: &Goal) -> Result<Option<Path>, IlpError> {
    let mut variables = ProblemVariables::new();
    let flows: Vec<Vec<Variable>> = stages.iter().map(|s| s.arcs.iter().map(|_| variables.add(variable().min(0.0))).collect()).collect();
    let choices: Vec<usize> = stages.iter().map(|s| s.outcomes.iter().map(|o| usize::from(o.choice) + 1).max().unwrap_or(0)).collect();
    let takes: Vec<Vec<Variable>> = choices.iter().map(|&n| (0..n).map(|_| variables.add(variable().binary())).collect()).collect();
    let arcs = || stages.iter().zip(weights).zip(&flows).flat_map(|((s, w), f)| s.arcs.iter().zip(f).map(|(a, &y)| (&w[a.outcome as usize], y)));
    // Solvers work best with numbers near one.
    let scale = arcs().map(|(m, _)| goal.weigh(m)).fold(1.0, f64::max);
    let objective: Expression = arcs().map(|(m, y)| goal.weigh(m) / scale * y).sum();
    let mut model = variables.minimise(objective).using(default_solver);
    let mut entering: Vec<Expression> = vec![Expression::from(1.0)];
    for (at, stage) in stages.iter().enumerate() {
        let count = stages.get(at + 1).map_or(sinks(stages), |s| s.nodes);
        let mut leaving = vec![Expression::default(); stage.nodes];
        let mut next = vec![Expression::default(); count];
        let mut taken = vec![Expression::default(); choices[at]];
        for (arc, &y) in stage.arcs.iter().zip(&flows[at]) {
            leaving[arc.from as usize] += y;
            next[arc.to as usize] += y;
            taken[usize::from(stage.outcomes[arc.outcome as usize].choice)] += y;
        }
        for (entering, leaving) in entering.into_iter().zip(leaving) {
            model = model.with(constraint!(leaving - entering == 0.0));
        }
        for (taken, &x) in taken.into_iter().zip(&takes[at]) {
            model = model.with(constraint!(taken - x == 0.0));
        }
        entering = next;
    }
    if let Some(limit) = goal.limit {
        let bytes = |m: &Measure| m.0[4] as f64 / limit.max(1) as f64;
        let held: Expression = arcs().map(|(m, y)| bytes(m) * y).sum();
        model = model.with(constraint!(held <= 1.0));
    }
    let solution = match model.solve() {
        Ok(solution) => solution,
        Err(ResolutionError::Infeasible) => return Ok(None),
        Err(why) => return Err(IlpError::Solver(why.to_string())),
    };
    let mut path = Vec::with_capacity(stages.len());
    let mut node = 0;
    for (stage, flows) in stages.iter().zip(&flows) {
        let here = stage.arcs.iter().zip(flows).filter(|(a, _)| a.from == node);
        let most = here.max_by(|(_, a), (_, b)| solution.value(**a).total_cmp(&solution.value(**b)));
        let Some((arc, _)) = most else { return Ok(None) };
        path.push(arc.outcome);
        node = arc.to;
    }
    Ok(Some(path))
}
