//! One tuple as integer programs: another answer to the question of [`crate::stages`], by other code.
//!
//! For a bound `ε` on the end of the step and a `cut` that the whole plan must beat, every stage that could hold some layers takes the least time of
//!
//! ```text
//! min  Σ time(c) · n(g,c)
//!      Σ_c n(g,c) = layers of group g,   n ≥ 0 whole
//!      Σ end(c) · n(g,c) ≤ ε
//!      Σ bytes(c) · n(g,c) ≤ room − w − r
//!      Σ (r · time(c) + end(c)) · n(g,c) ≤ cut − what the other stages take at least
//! ```
//! with time, end and repeats `r` as the objective adds them up,
//! over the choices `c` with workspaces up to `w` and rings up to `r`, for every size `w` and `r` that there is; and the best cut of the layers is a shortest path for
//! each bound on the slowest stage. Of choices that another covers in every term only the other one stands. `ε` comes down from above, each time just below the
//! longest end of the last plan, until no shorter end could pay for the time it costs. With several virtual stages on each stage every even cut is taken in turn.
//!
//! The solver is right to about seven digits; what it finds is counted again in whole nanoseconds and bytes.

use crate::certificate::{is_crowded, quickest, weights};
use crate::menu::Menus;
use crate::objective::{Home, StageTime, repeats};
use crate::prices::{Prices, Reference};
use crate::problem::Problem;
use crate::search::{Closed, Found, How, NEVER, Outcome, Statistics, trend_batches};
use crate::space::tuples;
use crate::stages::Solution;
use crate::virtual_stages::even_cuts;
use dplan_ir::pipeline::Slots;
use good_lp::{
    Expression, ProblemVariables, ResolutionError, Solution as _, SolutionStatus, SolverModel, Variable, WithTimeLimit, constraint, default_solver,
    variable,
};
use std::collections::{BTreeMap, BTreeSet};

/// A tuple was not solved.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SolverFault {
    #[error("the integer program's solver gave up: {0}")]
    GaveUp(String),
    #[error("time was up before the integer programs were solved")]
    Late,
}

/// The terms of a choice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Column {
    time: u64,
    end: u64,
    bytes: u64,
    workspace: u64,
    ring: u64,
    choice: u32,
}

impl Column {
    fn covers(&self, other: &Column) -> bool {
        let terms = |c: &Column| [c.time, c.end, c.bytes, c.workspace, c.ring];
        terms(self).iter().zip(terms(other)).all(|(a, b)| *a <= b)
    }
}

/// Layers of one row ([`crate::menu`]) that lie alike towards the tied parameter, on virtual stages that keep as much: row, home, slots, how many.
type Members = (usize, Home, Slots, usize);

/// A stage that could hold the layers from `start` to before `end`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Span {
    stage: usize,
    start: usize,
    end: usize,
}

/// The layers of a virtual stage, and what it keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    virtual_stage: u64,
    start: usize,
    end: usize,
    slots: Slots,
}

/// How a stage runs at its least time: which choices, how many layers each.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Run {
    time: u64,
    end: u64,
    counts: Vec<(Members, u32, usize)>,
}

struct Tableau<'a> {
    menus: &'a Menus,
    layers: &'a [usize],
    budget: u64,
    repeats: u64,
    late: &'a dyn Fn() -> bool,
    columns: BTreeMap<(usize, Home, Slots), Vec<Column>>,
    /// Answers by what they depend on: members, room, and the limit on the end.
    known: BTreeMap<(Vec<Members>, u64), Vec<(u64, Option<Run>)>>,
}

/// The best plan of a tuple that is below `cut`. `late` says that time is up.
///
/// # Errors
/// If the solver fails, or time is up.
pub fn best_below(menus: &Menus, layers: &[usize], budget: u64, cut: u64, late: &dyn Fn() -> bool) -> Result<Option<Solution>, SolverFault> {
    let m = repeats(&menus.tuple.pipeline());
    let mut tableau = Tableau { menus, layers, budget, repeats: m, late, columns: BTreeMap::new(), known: BTreeMap::new() };
    if menus.tuple.virtual_stages > 1 {
        return tableau.best_even(cut);
    }
    let (mut cut, mut best, mut limit) = (cut, None, u64::MAX);
    let shortest_end = tableau.shortest_end();
    loop {
        let mut runs: BTreeMap<Span, Run> = BTreeMap::new();
        for span in tableau.spans(cut) {
            let parts = tableau.parts(span);
            if let Some(run) = tableau.run(span.stage, &parts, limit, cut)? {
                runs.insert(span, run);
            }
        }
        let Some((path, time)) = shortest(&runs, menus.tuple.pp as usize, layers.len(), m) else { break };
        let longest = path.iter().map(|s| runs[s].end).max().unwrap_or(0);
        let objective = time + longest + menus.constant;
        if objective < cut {
            cut = objective;
            let parts: Vec<Vec<Part>> = path.iter().map(|&span| tableau.parts(span)).collect();
            best = Some(tableau.solution(parts.iter().zip(path.iter().map(|span| &runs[span])), objective));
        }
        if time + menus.constant + shortest_end >= cut || longest <= shortest_end {
            break;
        }
        limit = longest - 1;
    }
    Ok(best)
}

/// Finds the best plan of all tuples that the pins allow, with every tuple that its bounds do not close solved by integer programs. `late` says that time is up.
///
/// # Errors
/// If the solver fails.
pub fn explore(problem: &Problem, prices: &mut dyn Prices, late: &dyn Fn() -> bool) -> Result<Outcome, SolverFault> {
    let space = tuples(prices, problem.devices, problem.batch, &problem.pins);
    let mut closed: Vec<Closed> = space.iter().map(|&tuple| Closed { tuple, how: How::Open(0) }).collect();
    for closed in &mut closed {
        if is_crowded(problem, prices, &closed.tuple) {
            closed.how = How::Crowded;
        }
    }
    let trend_batches = trend_batches(closed.iter().filter(|c| c.how != How::Crowded).map(|c| &c.tuple));
    let mut order: Vec<(u64, usize)> = Vec::new();
    for (at, tuple) in space.iter().enumerate().filter(|&(at, _)| closed[at].how != How::Crowded) {
        order.push((quickest(problem, prices, tuple, Reference::Rank), at));
    }
    order.sort_unstable();
    let (mut best, mut objective, mut solved, mut lower_bound): (Option<Found>, u64, usize, Option<u64>) = (None, NEVER, 0, None);
    for (floor, at) in order {
        let tuple = space[at];
        if floor >= objective {
            closed[at].how = How::Floor(floor);
            continue;
        }
        if best.is_some() && late() {
            // Floors rise, so that of the first one left open is below all others.
            lower_bound = Some(lower_bound.unwrap_or(floor));
            closed[at].how = How::Open(floor);
            continue;
        }
        let sequences = trend_batches[&tuple.tp];
        let trend = quickest(problem, prices, &tuple, Reference::Same { sequences });
        if trend >= objective {
            closed[at].how = How::Trend(trend);
            continue;
        }
        closed[at].how = match weights(problem, prices, &tuple) {
            None => How::Impossible,
            Some(bound) if bound >= objective => How::Bound(bound),
            Some(_) => {
                solved += 1;
                let mut how = How::Nothing(objective);
                for menus in Menus::new(problem, prices, tuple).iter().flat_map(Menus::by_tie) {
                    // An answer needs some plan.
                    let any = best.is_some();
                    match best_below(&menus, &problem.layers, problem.budget, objective, &|| any && late()) {
                        Ok(None) => {}
                        Ok(Some(solution)) => {
                            objective = solution.objective;
                            how = How::Best(objective);
                            best = Some(Found { menus, solution });
                        }
                        Err(SolverFault::Late) => {
                            lower_bound = Some(lower_bound.unwrap_or(floor));
                            how = How::Open(floor);
                        }
                        Err(fault) => return Err(fault),
                    }
                }
                how
            }
        };
    }
    let proved = lower_bound.is_none();
    let lower_bound = lower_bound.unwrap_or(objective);
    let gap = if best.is_some() { (objective - lower_bound) as f64 / objective as f64 } else { 0.0 };
    Ok(Outcome { best, closed, statistics: Statistics { space: space.len(), solved, lower_bound, gap, proved } })
}

impl Tableau<'_> {
    fn tied(&self, layer: usize) -> bool {
        self.menus.tied[self.layers[layer]]
    }

    /// The best plan below `cut` with several virtual stages on each stage.
    fn best_even(&mut self, mut cut: u64) -> Result<Option<Solution>, SolverFault> {
        let (pipeline, constant) = (self.menus.tuple.pipeline(), self.menus.constant);
        let (shortest_end, mut best) = (self.shortest_end(), None);
        for starts in even_cuts(self.layers.len(), pipeline.all_virtual() as usize) {
            let parts: Vec<Vec<Part>> = (0..pipeline.stages)
                .map(|s| {
                    let part = |(c, &slots): (u64, &Slots)| Part { virtual_stage: c, start: starts[c as usize], end: starts[c as usize + 1], slots };
                    pipeline.virtual_stages_of(s).zip(&self.menus.slots[s as usize]).map(part).collect()
                })
                .collect();
            let mut limit = u64::MAX;
            loop {
                let mut runs = Vec::new();
                for (stage, parts) in parts.iter().enumerate() {
                    match self.run(stage, parts, limit, cut)? {
                        Some(run) => runs.push(run),
                        None => break,
                    }
                }
                if runs.len() < parts.len() {
                    break;
                }
                // Schedules with several virtual stages count the slowest once.
                let time: u64 = runs.iter().map(|r| r.time).sum();
                let longest = runs.iter().map(|r| r.end).max().unwrap_or(0);
                let objective = time + longest + constant;
                if objective < cut {
                    cut = objective;
                    best = Some(self.solution(parts.iter().zip(&runs), objective));
                }
                if time + constant + shortest_end >= cut || longest <= shortest_end {
                    break;
                }
                limit = longest - 1;
            }
        }
        Ok(best)
    }

    /// The row of a layer of a stage of these parts.
    fn row(&self, layer: usize, parts: &[Part]) -> usize {
        let stage = self.menus.tuple.pipeline().stage_of(parts[0].virtual_stage);
        self.menus.row(stage as usize, self.layers[layer])
    }

    /// How the tied parameter's homes lie, seen from a layer of a stage of these parts.
    fn home(&self, layer: usize, parts: &[Part]) -> Home {
        let here = |l: usize| parts.iter().any(|p| (p.start..p.end).contains(&l));
        let tied: Vec<usize> = (0..self.layers.len()).filter(|&l| self.tied(l)).collect();
        match tied.iter().find(|&&l| here(l)) {
            Some(&first) if self.tied(layer) && layer > first => Home::Repeated,
            Some(_) if self.tied(layer) && tied.iter().any(|&l| !here(l)) => Home::Apart,
            _ => Home::Together,
        }
    }

    /// The members of a stage, each row, position towards the tied parameter and slots once.
    fn members(&self, parts: &[Part]) -> Vec<Members> {
        let mut members: Vec<Members> = Vec::new();
        for (layer, slots) in parts.iter().flat_map(|p| (p.start..p.end).map(|l| (l, p.slots))) {
            let key = (self.row(layer, parts), self.home(layer, parts), slots);
            match members.iter_mut().find(|m| (m.0, m.1, m.2) == key) {
                Some(known) => known.3 += 1,
                None => members.push((key.0, key.1, key.2, 1)),
            }
        }
        members
    }

    /// No step ends sooner: one stage has the layer with the longest end.
    fn shortest_end(&self) -> u64 {
        let least = |kind: usize| {
            let ends = self.menus.rows(kind).flat_map(|row| &self.menus.choices[row]).flat_map(|c| Home::ALL.map(|h| c.share(h).end));
            ends.min().unwrap_or(0)
        };
        let sum: u64 = self.layers.iter().map(|&kind| least(kind)).sum();
        self.layers.iter().map(|&kind| least(kind)).max().unwrap_or(0).max(sum.div_ceil(self.menus.tuple.pp))
    }

    /// Spans that lie on a cut of all layers and could be part of a plan below `cut`, by least times alone.
    fn spans(&self, cut: u64) -> Vec<Span> {
        let (stages, layers, m) = (self.menus.tuple.pp as usize, self.layers.len(), self.repeats);
        let least = |kind: usize| self.least_time(kind);
        let mut before = vec![0u64];
        for &kind in self.layers {
            before.push(before[before.len() - 1] + least(kind));
        }
        let messages: u64 = (0..stages).map(|s| self.menus.least_border(s as u64).time).sum();
        let whole = before[layers] + messages + self.menus.constant;
        let mut all: Vec<Span> = Vec::new();
        let mut starts = BTreeSet::from([0]);
        for stage in 0..stages {
            let mut next = BTreeSet::new();
            for &start in &starts {
                let ends = if stage + 1 == stages { layers..=layers } else { start + 1..=layers - (stages - stage - 1) };
                for end in ends.filter(|&end| end > start) {
                    let time = before[end] - before[start] + self.menus.border(stage as u64, end - 1).time;
                    if whole + (m - 1) * time >= cut {
                        continue;
                    }
                    next.insert(end);
                    all.push(Span { stage, start, end });
                }
            }
            starts = next;
        }
        let mut wanted = BTreeSet::from([(stages, layers)]);
        let mut kept: Vec<Span> = Vec::new();
        for span in all.into_iter().rev() {
            if wanted.contains(&(span.stage + 1, span.end)) {
                wanted.insert((span.stage, span.start));
                kept.push(span);
            }
        }
        kept.reverse();
        kept
    }

    /// The parts of a stage that holds one span of layers.
    fn parts(&self, span: Span) -> Vec<Part> {
        let slots = self.menus.slots[span.stage][0];
        vec![Part { virtual_stage: span.stage as u64, start: span.start, end: span.end, slots }]
    }

    /// How a stage of these parts runs at its least time, if its end is at most `limit` and the plan may beat `cut`.
    fn run(&mut self, stage: usize, parts: &[Part], limit: u64, cut: u64) -> Result<Option<Run>, SolverFault> {
        let Some(room) = self.menus.room(self.budget, stage as u64) else { return Ok(None) };
        let border: StageTime = parts.iter().map(|p| self.menus.border(p.virtual_stage, p.end - 1)).sum();
        // Without a limit it is one for all borders, so that spans of the same members share their answer.
        let limit = if limit == u64::MAX { Some(limit) } else { limit.checked_sub(border.end) };
        let Some(limit) = limit else { return Ok(None) };
        let members = self.members(parts);
        let key = (members.clone(), room);
        let run = match self.known.get(&key).and_then(|all| answer(all, limit)) {
            Some(run) => run.clone(),
            None => {
                let run = self.stage(&members, room, limit, cut.saturating_sub(self.others(&members)))?;
                self.known.entry(key).or_default().push((limit, run.clone()));
                run
            }
        };
        Ok(run.map(|run| Run { time: run.time + border.time, end: run.end + border.end, ..run }))
    }

    fn least_time(&self, kind: usize) -> u64 {
        self.menus.rows(kind).flat_map(|row| &self.menus.choices[row]).flat_map(|c| Home::ALL.map(|h| c.share(h).time)).min().unwrap_or(0)
    }

    /// The undominated choices of a row.
    fn columns(&mut self, row: usize, home: Home, slots: Slots) -> Vec<Column> {
        let menu = &self.menus.choices[row];
        let build = || {
            let column = |(choice, at): (&crate::menu::Choice, u32)| {
                let (terms, share) = (choice.terms(home), choice.share(home));
                let bytes = terms.states + slots.frames * choice.frame + slots.held * choice.held + slots.versions * choice.version;
                Column { time: share.time, end: share.end, bytes, workspace: choice.workspace, ring: terms.ring, choice: at }
            };
            let mut all: Vec<Column> = menu.iter().zip(0..).map(column).collect();
            all.sort_unstable();
            let mut kept: Vec<Column> = Vec::new();
            for column in all {
                if !kept.iter().any(|k| k.covers(&column)) {
                    kept.push(column);
                }
            }
            kept
        };
        self.columns.entry((row, home, slots)).or_insert_with(build).clone()
    }

    /// What all layers but these take at least.
    fn others(&self, members: &[Members]) -> u64 {
        let least = |kind: usize| self.least_time(kind);
        let all: u64 = self.layers.iter().map(|&kind| least(kind)).sum();
        all - members.iter().map(|&(row, .., count)| count as u64 * least(self.menus.kind(row))).sum::<u64>() + self.menus.constant
    }

    /// A stage at its least time, whatever its largest workspace and ring; `joint` bounds `repeats · time + end` from above.
    fn stage(&mut self, members: &[Members], room: u64, limit: u64, joint: u64) -> Result<Option<Run>, SolverFault> {
        if (self.late)() {
            return Err(SolverFault::Late);
        }
        let columns: Vec<Vec<Column>> = members.iter().map(|&(row, home, slots, _)| self.columns(row, home, slots)).collect();
        let mut best: Option<Run> = None;
        for ring in sizes(&columns, |c| c.ring) {
            let mut before = 0;
            for workspace in sizes(&columns, |c| c.workspace) {
                let keeps = |c: &&Column| c.ring <= ring && c.workspace <= workspace;
                let allowed: Vec<Vec<Column>> = columns.iter().map(|columns| columns.iter().filter(keeps).copied().collect()).collect();
                let count = allowed.iter().map(Vec::len).sum();
                // Wider bounds that allow nothing new are no other program.
                if allowed.iter().any(Vec::is_empty) || count == std::mem::replace(&mut before, count) {
                    continue;
                }
                let Some(free) = room.checked_sub(ring + workspace) else { break };
                let program = Program { members, columns: &allowed, repeats: self.repeats, free, limit, joint, late: self.late };
                if let Some(run) = program.solve(best.as_ref().map_or(u64::MAX, |b| b.time))? {
                    best = Some(run);
                }
            }
        }
        Ok(best)
    }

    /// The plan whose stages are the spans of a path.
    fn solution<'r>(&self, stages: impl Iterator<Item = (&'r Vec<Part>, &'r Run)>, objective: u64) -> Solution {
        let mut choices = vec![0; self.layers.len()];
        let mut all: Vec<Part> = Vec::new();
        for (parts, run) in stages {
            // Which choices the layers of each row, position and slots have still to make.
            let mut left: BTreeMap<(usize, Home, Slots), Vec<u32>> = BTreeMap::new();
            for &((row, home, slots, _), choice, count) in &run.counts {
                left.entry((row, home, slots)).or_default().extend(std::iter::repeat_n(choice, count));
            }
            left.values_mut().for_each(|choices| choices.sort_unstable_by(|a, b| b.cmp(a)));
            for (layer, slots) in parts.iter().flat_map(|p| (p.start..p.end).map(|l| (l, p.slots))) {
                let place = left.get_mut(&(self.row(layer, parts), self.home(layer, parts), slots));
                if let Some(choice) = place.and_then(|choices| choices.pop()) {
                    choices[layer] = choice;
                }
            }
            all.extend(parts);
        }
        all.sort_unstable_by_key(|p| p.virtual_stage);
        Solution { objective, stages: all.iter().map(|p| (p.start, p.end - 1)).collect(), choices }
    }
}

/// One stage under bounds on its workspace and ring.
struct Program<'a> {
    members: &'a [Members],
    columns: &'a [Vec<Column>],
    repeats: u64,
    /// Most bytes.
    free: u64,
    /// Longest end.
    limit: u64,
    /// `repeats · time + end` must be below.
    joint: u64,
    late: &'a dyn Fn() -> bool,
}

impl Program<'_> {
    /// The quickest way that takes less than `below`.
    fn solve(&self, below: u64) -> Result<Option<Run>, SolverFault> {
        let m = self.repeats;
        let joint = |c: &Column| m * c.time + c.end;
        let sum = |of: &dyn Fn(&Column) -> u64, pick: fn(u64, u64) -> u64| -> u64 {
            let each = self.members.iter().zip(self.columns).map(|(member, c)| member.3 as u64 * c.iter().map(of).reduce(pick).unwrap_or(0));
            each.sum()
        };
        // What no choice can keep needs no program.
        if sum(&|c| c.bytes, u64::min) > self.free || sum(&joint, u64::min) >= self.joint || sum(&|c| c.time, u64::min) >= below {
            return Ok(None);
        }
        let (mut free, mut limit, mut repairs, mut turn) = (self.free, self.limit, 0, FIRST_TURN);
        while repairs < MOST_REPAIRS {
            let mut variables = ProblemVariables::new();
            let counts: Vec<Vec<Variable>> = self
                .members
                .iter()
                .zip(self.columns)
                .map(|(member, c)| c.iter().map(|_| variables.add(variable().integer().min(0.0).max(member.3 as f64))).collect())
                .collect();
            let all = || counts.iter().zip(self.columns).flat_map(|(n, c)| n.iter().copied().zip(c));
            // Solvers work best with numbers near one.
            let total = |of: &dyn Fn(&Column) -> u64, most: u64| -> Expression { all().map(|(n, c)| of(c) as f64 / most.max(1) as f64 * n).sum() };
            let mut model = variables.minimise(total(&|c| c.time, sum(&|c| c.time, u64::max))).using(default_solver).with_time_limit(turn);
            for (member, counts) in self.members.iter().zip(&counts) {
                let chosen: Expression = counts.iter().sum();
                model = model.with(constraint!(chosen == member.3 as f64));
            }
            // Rows that nothing could break are left out.
            let rows: [(&dyn Fn(&Column) -> u64, u64, u64); 4] =
                [(&|c| c.bytes, free, self.free), (&|c| c.end, limit, limit), (&joint, self.joint, self.joint), (&|c| c.time, below, below)];
            for (of, most, unit) in rows {
                if sum(of, u64::max) > most {
                    model = model.with(constraint!(total(of, unit) <= most as f64 / unit.max(1) as f64));
                }
            }
            let solution = match model.solve() {
                Ok(solution) if !matches!(solution.status(), SolutionStatus::TimeLimit) => solution,
                // The turn was over: with more time, if there is some, the same again.
                Ok(_) | Err(ResolutionError::Other(_)) => {
                    if (self.late)() {
                        return Err(SolverFault::Late);
                    }
                    turn *= 2.0;
                    continue;
                }
                Err(ResolutionError::Infeasible) => return Ok(None),
                Err(why) => return Err(SolverFault::GaveUp(why.to_string())),
            };
            let (mut run, mut bytes) = (Run { time: 0, end: 0, counts: Vec::new() }, 0);
            for ((member, counts), columns) in self.members.iter().zip(&counts).zip(self.columns) {
                for (&n, column) in counts.iter().zip(columns) {
                    let count = solution.value(n).round().max(0.0) as u64;
                    if count > 0 {
                        (run.time, run.end, bytes) = (run.time + count * column.time, run.end + count * column.end, bytes + count * column.bytes);
                        run.counts.push((*member, column.choice, count as usize));
                    }
                }
            }
            if bytes <= self.free {
                if run.time >= below || run.end <= self.limit && m * run.time + run.end < self.joint {
                    return Ok((run.time < below).then_some(run));
                }
                // Nothing is quicker, so whatever is below `joint` ends sooner. (Where the solver let the end pass its limit by rounding, the limit comes in by one.)
                let Some(sooner) = run.end.min(limit).checked_sub(1) else { return Ok(None) };
                limit = sooner;
                continue;
            }
            free = free.saturating_sub(bytes - self.free);
            repairs += 1;
        }
        Err(SolverFault::GaveUp("sizes too near the room".into()))
    }
}

/// The answer under a limit on the end, if it is known from one that was no tighter: that there is none, or one that keeps this limit too. The cut only comes down,
/// so it is no matter under which of them an answer was found; limits do not, as what messages add is taken off them.
fn answer(known: &[(u64, Option<Run>)], limit: u64) -> Option<&Option<Run>> {
    known.iter().find(|(under, run)| *under >= limit && run.as_ref().is_none_or(|r| r.end <= limit)).map(|(_, run)| run)
}

/// Times a program is solved again because its rounded answer missed the room by a few bytes.
const MOST_REPAIRS: usize = 4;

/// Seconds for which a program is first left to the solver, which asks nobody whether time is up.
const FIRST_TURN: f64 = 1.0;

/// Distinct sizes, rising.
fn sizes(columns: &[Vec<Column>], of: fn(&Column) -> u64) -> Vec<u64> {
    let all: BTreeSet<u64> = columns.iter().flatten().map(of).collect();
    all.into_iter().collect()
}

/// The path over all stages with the least `Σ time + (m − 1) · slowest`, and that value.
fn shortest(runs: &BTreeMap<Span, Run>, stages: usize, layers: usize, m: u64) -> Option<(Vec<Span>, u64)> {
    let thresholds: BTreeSet<u64> = runs.values().map(|r| r.time).collect();
    let mut best: Option<(Vec<Span>, u64)> = None;
    for slowest in thresholds {
        // Least sum up to (stage, layer), and the span it ends with.
        let mut reached: BTreeMap<(usize, usize), (u64, Option<Span>)> = BTreeMap::from([((0, 0), (0, None))]);
        for (&span, run) in runs.iter().filter(|(_, r)| r.time <= slowest) {
            let Some(&(so_far, _)) = reached.get(&(span.stage, span.start)) else { continue };
            let sum = so_far + run.time;
            let place = reached.entry((span.stage + 1, span.end)).or_insert((sum, Some(span)));
            if sum < place.0 {
                *place = (sum, Some(span));
            }
        }
        let Some(&(sum, last)) = reached.get(&(stages, layers)) else { continue };
        let (mut path, mut at) = (Vec::new(), last);
        while let Some(span) = at {
            path.push(span);
            at = reached.get(&(span.stage, span.start)).and_then(|r| r.1);
        }
        path.reverse();
        let found = path.iter().map(|s| runs[s].time).max().unwrap_or(0);
        let value = sum + (m - 1) * found;
        if best.as_ref().is_none_or(|b| value < b.1) {
            best = Some((path, value));
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_hold_for_tighter_limits_that_they_keep_and_for_no_looser_one() {
        let run = |time, end| Some(Run { time, end, counts: Vec::new() });
        let known = [(u64::MAX, run(10, 60)), (50, run(12, 40)), (30, None)];
        let found = |limit| answer(&known, limit).map(|run| run.as_ref().map(|r| r.time));
        assert_eq!([found(u64::MAX), found(70), found(60)], [Some(Some(10)); 3]);
        // Between them, something quicker than the second may be found.
        assert_eq!([found(59), found(51)], [None; 2]);
        assert_eq!([found(50), found(40)], [Some(Some(12)); 2]);
        assert_eq!([found(39), found(30), found(7)], [None, Some(None), Some(None)]);
    }
}
