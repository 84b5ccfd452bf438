//! Ops whose keys go round ([`dplan_ir::ring`]), turn by turn.
//!
//! One statement of a fragment becomes, for `n` ranks,
//!
//! ```text
//! compute   run 0        run 1    join 1     run 2    join 2   …
//! comm      keys → 1     keys → 2  grads → 1  keys → 3  grads → 2  …            grads → home
//! ```
//! Each turn's keys come while the turn before is computed; they alternate between two places, so the keys of turn t + 1 come as soon as turn t − 1 is over. Results that stay
//! with the queries are joined where they end up. Gradients that go along with keys are joined at the rank that adds to them, in a third place beside the part that it adds and
//! the sum that came, so that one turn's can leave while the next turn's are made; the sum comes where the whole ends up.
//!
//! Nothing here asks whether a turn's keys are masked: kernels skip tiles that nobody sees, and the exchange is made all the same.

use super::arena::Arena;
use super::fragment::Fragment;
use super::passes::Body;
use super::stage::Stage;
use dplan_ir::cost::workspace_bytes;
use dplan_ir::entity::{BufferId, FormId, NodeId};
use dplan_ir::extent::node_rule;
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::op::Op;
use dplan_ir::program::{Content, Instr, Pattern, Stream, Write, align};
use dplan_ir::ring::Ring;
use dplan_ir::rule::{Assignment, Label, Rule};
use dplan_ir::sharded::Stmt;
use dplan_ir::sharding::{LocalType, Monoid};

/// Places of keys that go round: where a turn's are, and where the next turn's come. Of two ranks nothing comes after turn 1.
fn places(ranks: u64) -> u64 {
    ranks.saturating_sub(1).min(2)
}

/// Whether an operand or result has keys, and so goes round with them.
fn moves(rule: &Rule, labels: &[Label]) -> bool {
    rule.blockwise.is_some_and(|of| labels.contains(&of.keys))
}

/// Working memory of a run on one rank, bytes: the op's own, and of an op whose keys go round what is under way.
pub fn working_bytes(op: &Op, rule: &Rule, assignment: &Assignment, mesh: &Mesh, ins: &[&LocalType], outs: &[&LocalType]) -> u64 {
    let (own, axes) = (workspace_bytes(op, ins), rule.goes_round(assignment));
    if axes.is_empty() {
        return own;
    }
    let keys = rule.ins.iter().zip(ins).filter(|(labels, _)| moves(rule, labels)).map(|(_, ty)| places(mesh.size(axes)) * align(ty.bytes()));
    let results = rule.outs.iter().zip(outs).map(|((labels, _), ty)| if moves(rule, labels) { 2 } else { 1 } * align(ty.bytes()));
    align(own) + keys.sum::<u64>() + results.sum::<u64>()
}

/// Of a statement whose keys go round, the scratch of one run.
pub(super) fn own_bytes(stage: Stage<'_>, layer: &Fragment, stmt: &Stmt) -> Option<u64> {
    let Stmt::Run { node, ins, assignment, .. } = stmt else { return None };
    let (graph, node) = (stage.graph(), &stage.graph().nodes[*node]);
    let types: Vec<LocalType> = ins.iter().map(|&f| layer.local(f, graph, stage.mesh(), &stage.sharder.padded)).collect();
    let goes_round = !node_rule(graph, node).goes_round(assignment).is_empty();
    goes_round.then(|| workspace_bytes(&node.op, &types.iter().collect::<Vec<_>>()))
}

/// Where what a statement needs in its turns is.
pub(super) struct Round {
    axes: AxisSet,
    ranks: u64,
    monoid: Monoid,
    /// Of operands that go round: which operand, and where it is in turns 1, 2, …
    keys: Vec<(usize, Vec<BufferId>)>,
    results: Vec<Parts>,
}

/// A result in the making. Those of turns from 1 on are listed from there.
struct Parts {
    /// What each turn adds.
    parts: Vec<BufferId>,
    /// What has been joined by the end of each turn, the first included.
    joined: Vec<BufferId>,
    /// What came from the rank before, of a result that goes along with the keys.
    came: Option<Vec<BufferId>>,
}

impl Arena {
    /// Buffers of the turns of every statement whose keys go round; where everything else is, is known.
    pub(super) fn rounds(&mut self, stage: Stage<'_>) {
        for (position, layer) in stage.layers.iter().enumerate() {
            let mut starts = std::mem::take(&mut self.layers[position].turns_at).into_iter();
            for (pass, stmts) in [&layer.forward, &layer.backward].into_iter().enumerate() {
                let rounds = stmts.iter().zip(starts.by_ref()).map(|(stmt, at)| self.round(stage, position, stmt, at)).collect();
                self.layers[position].rounds[pass] = rounds;
            }
        }
    }

    fn round(&mut self, stage: Stage<'_>, position: usize, stmt: &Stmt, mut at: u64) -> Option<Round> {
        let Stmt::Run { node, ins, outs, assignment } = stmt else { return None };
        let layer = stage.layers[position];
        let rule = node_rule(stage.graph(), &stage.graph().nodes[*node]);
        let axes = rule.goes_round(assignment);
        if axes.is_empty() {
            return None;
        }
        let ranks = stage.mesh().size(axes);
        let mut place = |form: FormId| {
            let bytes = align(layer.local(form, stage.graph(), stage.mesh(), &stage.sharder.padded).bytes());
            at += bytes;
            at - bytes
        };
        let home = Ring::home(axes, ranks);
        let in_turn = |turn: u64| Ring { turn, ..home };
        let upto = |turn: u64| Ring::all(turn + 1);
        let mut keys = Vec::new();
        for (nth, (_, &form)) in rule.ins.iter().zip(ins).enumerate().filter(|(_, (labels, _))| moves(&rule, labels)) {
            let places: Vec<u64> = (0..places(ranks)).map(|_| place(form)).collect();
            let turns = (1..ranks).map(|t| self.in_ring(stage, layer, form, in_turn(t), places[(t as usize - 1) % places.len()]));
            keys.push((nth, turns.collect()));
        }
        let mut results = Vec::new();
        for ((labels, _), &form) in rule.outs.iter().zip(outs) {
            let whole = self.layers[position].forms[form];
            let part = place(form);
            if moves(&rule, labels) {
                let sum = place(form);
                let parts = (1..ranks).map(|t| self.in_ring(stage, layer, form, Ring { over: Ring::met(t), ..in_turn(t) }, part)).collect();
                let joined = (0..ranks).map(|t| self.in_ring(stage, layer, form, Ring { over: upto(t), ..in_turn(t) }, sum)).collect();
                let came = (1..ranks).map(|t| self.beside(whole?, Ring { over: upto(t - 1), ..in_turn(t) })).collect::<Option<Vec<_>>>()?;
                results.push(Parts { parts, joined, came: Some(came) });
            } else {
                let parts = (1..ranks).map(|t| self.in_ring(stage, layer, form, Ring { over: Ring::met(t), ..home }, part)).collect();
                let joined = (0..ranks).map(|t| self.beside(whole?, Ring { over: upto(t), ..home })).collect::<Option<Vec<_>>>()?;
                results.push(Parts { parts, joined, came: None });
            }
        }
        Some(Round { axes, ranks, monoid: rule.outs[0].1, keys, results })
    }

    /// A block of a form in a ring, at a place of the workspace.
    fn in_ring(&mut self, stage: Stage<'_>, layer: &Fragment, form: FormId, ring: Ring, offset: u64) -> BufferId {
        let (buffer, _) = self.form(stage, layer, form, offset);
        self.set_ring(buffer, ring);
        buffer
    }
    /// The same where the whole form will be.
    fn beside(&mut self, whole: BufferId, ring: Ring) -> Option<BufferId> {
        if ring.settled().is_none() {
            return Some(whole);
        }
        let copy = self.program.buffers[whole].clone();
        let buffer = self.program.buffers.push(copy);
        self.set_ring(buffer, ring);
        Some(buffer)
    }
    fn set_ring(&mut self, buffer: BufferId, ring: Ring) {
        if let Content::Value { sharding, .. } = &mut self.program.buffers[buffer].content {
            *sharding = sharding.clone().in_ring(Some(ring));
        }
    }
}

impl Body<'_> {
    /// A node whose keys go round: every turn of it.
    pub(super) fn round(&mut self, round: &Round, node: NodeId, ins: &[BufferId], outs: &[BufferId], scratch: Option<BufferId>) {
        for turn in 0..round.ranks as usize {
            if turn + 1 < round.ranks as usize {
                for (nth, turns) in &round.keys {
                    let src = if turn == 0 { ins[*nth] } else { turns[turn - 1] };
                    self.shift(round.axes, src, turns[turn]);
                }
            }
            if turn > 0 {
                for (parts, came) in round.results.iter().filter_map(|r| Some((r, r.came.as_ref()?))) {
                    self.shift(round.axes, parts.joined[turn - 1], came[turn - 1]);
                }
            }
            let mut operands = ins.to_vec();
            if turn > 0 {
                round.keys.iter().for_each(|(nth, turns)| operands[*nth] = turns[turn - 1]);
            }
            let made: Vec<BufferId> = round.results.iter().map(|r| if turn == 0 { r.joined[0] } else { r.parts[turn - 1] }).collect();
            self.issue(Stream::Compute, Instr::Run { node, ins: operands, outs: made.clone(), scratch, write: Write::Set });
            if turn > 0 {
                let left = round.results.iter().map(|r| r.came.as_ref().map_or(r.joined[turn - 1], |came| came[turn - 1])).collect();
                let dst = round.results.iter().map(|r| r.joined[turn]).collect();
                self.issue(Stream::Compute, Instr::Join { monoid: round.monoid, left, right: made, dst });
            }
        }
        for (parts, &home) in round.results.iter().zip(outs).filter(|(r, _)| r.came.is_some()) {
            if let Some(&last) = parts.joined.last() {
                self.shift(round.axes, last, home);
            }
        }
    }

    fn shift(&mut self, axes: AxisSet, src: BufferId, dst: BufferId) {
        let shift = Instr::Collective { pattern: Pattern::Shift, axes, stages: Vec::new(), dim: 0, monoid: Monoid::Sum, src, dst };
        self.issue(Stream::Comm, shift);
    }
}
