//! What goes round among ranks, and what is made of one block after another ([`crate::ring`]).
//!
//! A buffer claims whose block it holds and the pairs of blocks in it as a part of its sharding, so that the data flow tells parts apart as it does any two values, and nothing but
//! the three instructions here takes a part: everything else wants whole values.
//!
//! ```text
//! run      q whole, keys in turn t, whole    → results of differences {t}: of queries at home, of keys in turn t
//! shift    any part in turn t                → the same in turn t + 1
//! join     S and T, disjoint, of one block   → S ∪ T; all differences at home are the whole value
//! ```
//! So what is read as whole has each pair of blocks once: a run gives one difference, a shift adds none, a join has none twice. The pair (o, lse) is joined by log-sum-exp, both of the
//! same differences; gradients by sum. An attention's derivative wants o and lse whole, so it sees the softmax over all keys whichever block it has.

use super::dataflow::Walk;
use super::types::{Fault, Types, fault};
use crate::entity::BufferId;
use crate::extent::node_rule;
use crate::graph::Def;
use crate::mesh::AxisSet;
use crate::program::Content;
use crate::ring::Ring;
use crate::rule::{Label, Rule};
use crate::sharding::{Monoid, Sharding};

/// Results of a run in a turn.
pub(super) fn in_turn(rule: &Rule, outs: Vec<Sharding>, turn: Option<Ring>) -> Vec<Sharding> {
    let (Some(ring), Some(of)) = (turn, rule.blockwise) else { return outs };
    let met = Ring { over: Ring::met(ring.turn), ..ring };
    let part = |(sharding, (labels, _)): (Sharding, &(Vec<Label>, Monoid))| {
        let own = Ring { turn: 0, ..met };
        sharding.in_ring(Some(if labels.contains(&of.keys) { met } else { own }))
    };
    outs.into_iter().zip(&rule.outs).map(part).collect()
}

impl Types<'_> {
    /// The turn that an op's keys are in, if they go round; all operands in it, and all others whole.
    pub(super) fn turn(&self, rule: &Rule, ins: &[BufferId], operands: &[Sharding]) -> Result<Option<Ring>, Fault> {
        let mut turn: Option<Ring> = None;
        let (mut queries, mut keys) = (AxisSet::EMPTY, AxisSet::EMPTY);
        for ((labels, sharding), &buffer) in rule.ins.iter().zip(operands).zip(ins) {
            let at = |label: Label| labels.iter().position(|&l| l == label).and_then(|at| sharding.dims.get(at)).copied();
            let of_keys = rule.blockwise.and_then(|of| at(of.keys));
            queries = queries.union(rule.blockwise.and_then(|of| at(of.queries)).unwrap_or_default());
            match (sharding.ring, of_keys) {
                (None, None) => {}
                (Some(_), None) => return fault(buffer, format!("the operand is {}: it must be whole before it is read", self.show(sharding))),
                (ring, Some(axes)) => {
                    keys = keys.union(axes);
                    let ring = ring.unwrap_or(Ring::home(axes, self.program.mesh.size(axes)));
                    if ring.axes != axes || ring.over != Ring::all(ring.ranks) {
                        return fault(buffer, format!("the operand is {}: keys go round whole, along the axes that split them", self.show(sharding)));
                    }
                    if turn.is_some_and(|other| other != ring) {
                        return fault(buffer, "keys and values are in different turns");
                    }
                    turn = Some(ring);
                }
            }
        }
        if keys.is_empty() {
            return Ok(None);
        }
        if !queries.includes(keys) {
            return fault(None, format!("keys go round along {}, which does not split the queries", self.axes(keys)));
        }
        match turn {
            Some(ring) if ring.ranks > Ring::MOST => fault(None, format!("{} ranks in a ring, at most {}", ring.ranks, Ring::MOST)),
            // Along axes of one rank each nothing goes round.
            Some(ring) if ring.ranks > 1 => Ok(Some(ring)),
            Some(_) | None => Ok(None),
        }
    }

    /// dst ← what the member before has in src.
    pub(super) fn shift(&self, axes: AxisSet, src: BufferId, dst: BufferId) -> Result<(), Fault> {
        let (Content::Value { value, sharding: from }, Content::Value { value: v, sharding: to }) = (self.content(src), self.content(dst)) else {
            return fault(src, "blocks of graph values go round");
        };
        if value != v {
            return fault(dst, format!("holds `{}`, the source `{}`", self.graph.values[*v].name, self.graph.values[*value].name));
        }
        let ranks = self.program.mesh.size(axes);
        if !(2..=Ring::MOST).contains(&ranks) || !from.sharded().includes(axes) {
            return fault(src, format!("blocks go round along axes that cut them, of 2 to {} ranks; not along {}", Ring::MOST, self.axes(axes)));
        }
        let ring = from.ring.unwrap_or(Ring::home(axes, ranks));
        if ring.axes != axes {
            return fault(src, format!("goes round along {}, not along {}", self.axes(ring.axes), self.axes(axes)));
        }
        let result = from.clone().in_ring(Some(ring.shifted()));
        if result == *to { Ok(()) } else { fault(dst, format!("comes out as {}, the buffer claims {}", self.show(&result), self.show(to))) }
    }

    /// dst ← left and right, of different pairs of blocks.
    pub(super) fn join(&self, monoid: Monoid, left: &[BufferId], right: &[BufferId], dst: &[BufferId]) -> Result<(), Fault> {
        let mut pair: Vec<(crate::entity::NodeId, u32, [Option<Ring>; 2])> = Vec::new();
        for ((&one, &other), &to) in left.iter().zip(right).zip(dst) {
            let part = |buffer: BufferId| match self.content(buffer) {
                Content::Value { value, sharding } => Ok((*value, sharding)),
                _ => fault(buffer, "parts of graph values are joined"),
            };
            let ((value, a), (of_other, b), (of_result, claim)) = (part(one)?, part(other)?, part(to)?);
            if value != of_other || value != of_result {
                return fault(to, "the parts and what they make are different values");
            }
            let (Some(ring), Some(with)) = (a.ring, b.ring) else { return fault(one, "is whole: there is nothing to join it with") };
            let result = match ring.joined(with) {
                Err(why) => return fault(other, why),
                Ok(ring) => a.clone().in_ring(Some(ring)),
            };
            if b.clone().in_ring(Some(ring)) != *a {
                return fault(other, format!("is {}, to be joined with {}", self.show(b), self.show(a)));
            }
            if result != *claim {
                return fault(to, format!("comes out as {}, the buffer claims {}", self.show(&result), self.show(claim)));
            }
            let Def::Node(node, nth) = self.graph.values[value].def else { return fault(one, "nothing makes it in parts") };
            let rule = node_rule(self.graph, &self.graph.nodes[node]);
            let joins = rule.blockwise.and_then(|_| rule.outs.get(nth as usize)).map(|out| out.1);
            if joins != Some(monoid) || !a.partial.is_empty() && (monoid, a.monoid) != (Monoid::Sum, Monoid::Sum) {
                return fault(one, format!("its parts are not joined by {}", monoid.name()));
            }
            pair.push((node, nth, [a.ring, b.ring]));
        }
        match (monoid, &pair[..]) {
            (Monoid::Sum, _) => Ok(()),
            (Monoid::LogSumExp, [(node, 0, rings), (other, 1, with)]) if (node, rings) == (other, with) => Ok(()),
            (Monoid::LogSumExp | Monoid::Max, _) => fault(left[0], "expected the pair (o, lse) of one attention, both of the same pairs of blocks"),
        }
    }
}

impl Walk<'_> {
    /// Left may be where the result goes.
    pub(super) fn join(&mut self, left: &[BufferId], right: &[BufferId], dst: &[BufferId]) {
        for (&one, &to) in left.iter().zip(dst) {
            if self.range(one) == self.range(to) { self.check(one) } else { self.read(one) }
        }
        right.iter().for_each(|&other| self.read(other));
        for &to in dst {
            let claim = self.claim(to);
            self.put(to, claim);
        }
    }
}
