//! Damage of every kind to a sharded graph is noticed by its verifier.

use dplan_ir::entity::{FormId, Id};
use dplan_ir::graph::Graph;
use dplan_ir::mesh::AxisSet;
use dplan_ir::reshard::Step;
use dplan_ir::sharded::{Sharded, Stmt};
use dplan_ir::sharding::Monoid;
use dplan_ir::verify;
use dplan_planner::drawn::{Case, Dice};
use dplan_planner::lower;

/// A way to damage one place of a sharded graph; false if that place has nothing to damage.
type Damage = fn(&Graph, &mut Sharded, &mut Dice) -> bool;

const DAMAGES: [(&str, Damage); 8] = [
    ("a statement whose result is read is missing", |_, s, dice| {
        let at = dice.roll(s.body.len() as u64) as usize;
        let made: Vec<FormId> = match &s.body[at] {
            Stmt::Run { outs, .. } => outs.clone(),
            Stmt::Reshard { to, .. } => vec![*to],
        };
        let read = s.body.iter().any(|other| match other {
            Stmt::Run { ins, .. } => ins.iter().any(|f| made.contains(f)),
            Stmt::Reshard { from, .. } => made.contains(from),
        });
        s.body.remove(at);
        read
    }),
    ("a statement is done twice", |_, s, dice| {
        let at = dice.roll(s.body.len() as u64) as usize;
        s.body.push(s.body[at].clone());
        true
    }),
    ("a statement comes too early", |_, s, dice| {
        let at = 1 + dice.roll(s.body.len() as u64 - 1) as usize;
        let ins = match &s.body[at] {
            Stmt::Run { ins, .. } => ins.clone(),
            Stmt::Reshard { from, .. } => vec![*from],
        };
        let depends = match &s.body[at - 1] {
            Stmt::Run { outs, .. } => outs.iter().any(|f| ins.contains(f)),
            Stmt::Reshard { to, .. } => ins.contains(to),
        };
        s.body.swap(at - 1, at);
        depends
    }),
    ("an op reads another form of its operand", |_, s, dice| {
        let at = dice.roll(s.body.len() as u64) as usize;
        let Stmt::Run { ins, .. } = &s.body[at] else { return false };
        let Some(&old) = ins.first() else { return false };
        let other = s.forms.iter().find(|(_, f)| f.value == s.forms[old].value && f.sharding != s.forms[old].sharding).map(|(id, _)| id);
        let Stmt::Run { ins, .. } = &mut s.body[at] else { return false };
        other.map(|f| ins[0] = f).is_some()
    }),
    ("a form claims another sharding", |_, s, dice| {
        let form = FormId::from_index(dice.roll(s.forms.len() as u64) as usize);
        let made = s.body.iter().any(|stmt| match stmt {
            Stmt::Run { outs, .. } => outs.contains(&form),
            Stmt::Reshard { to, .. } => *to == form,
        });
        let sharding = &mut s.forms[form].sharding;
        let first = AxisSet(1);
        if sharding.used().intersects(first) {
            sharding.partial = sharding.partial.minus(first);
            sharding.dims.iter_mut().for_each(|d| *d = d.minus(first));
        } else {
            *sharding = sharding.clone().with_partial(Monoid::Sum, sharding.partial.union(first));
        }
        made
    }),
    ("a reduction is of another kind", |_, s, dice| {
        let mut reductions: Vec<&mut Monoid> = s.body.iter_mut().filter_map(reduction).collect();
        let count = reductions.len() as u64;
        if count == 0 {
            return false;
        }
        let monoid = &mut *reductions[dice.roll(count) as usize];
        *monoid = if *monoid == Monoid::Sum { Monoid::Max } else { Monoid::Sum };
        true
    }),
    ("a step is over other axes", |_, s, dice| {
        let at = dice.roll(s.body.len() as u64) as usize;
        let Stmt::Reshard { step, .. } = &mut s.body[at] else { return false };
        match step {
            Step::AllReduce { axes, .. } | Step::ReduceScatter { axes, .. } | Step::AllGather { axes, .. } | Step::Slice { axes, .. } => axes.0 ^= 1,
        }
        true
    }),
    ("a dim is padded that must not be", |graph, s, _| {
        let dim = graph.dims.ids().find(|&d| graph.dims[d].name == "h").unwrap();
        s.padded.0[dim] += 12;
        true
    }),
];

fn reduction(stmt: &mut Stmt) -> Option<&mut Monoid> {
    match stmt {
        Stmt::Reshard { step: Step::AllReduce { monoid, .. } | Step::ReduceScatter { monoid, .. }, .. } => Some(monoid),
        Stmt::Reshard { step: Step::AllGather { .. } | Step::Slice { .. }, .. } | Stmt::Run { .. } => None,
    }
}

#[test]
fn damage_is_noticed() {
    let mut done = [0; DAMAGES.len()];
    for seed in 0..60 {
        let mut dice = Dice(seed);
        let case = std::iter::repeat_with(|| Case::drawn(&mut dice)).find(|c| c.dp > 1 && c.tp > 1).unwrap();
        let graph = case.graph();
        let sharded = lower::shard(&graph, &case.plan(&graph)).unwrap();
        for (kind, (what, damage)) in DAMAGES.iter().enumerate() {
            let mut damaged = sharded.clone();
            if damage(&graph, &mut damaged, &mut dice) {
                assert!(!verify::sharded::sharded(&graph, &damaged).is_empty(), "seed {seed}: {what}");
                done[kind] += 1;
            }
        }
    }
    assert!(done.iter().all(|&n| n > 2), "{done:?}");
}
