//! What all stages together must have done.

use std::collections::BTreeMap;

use super::dataflow::End;
use super::{Class, Place, Report};
use crate::entity::ParamId;
use crate::graph::Graph;
use crate::program::Program;

pub(super) fn check(graph: &Graph, program: &Program, ends: &[End], report: &mut Report) {
    contributions(graph, ends, report);
    across(program, ends, report);
    norm(graph, program, ends, report);
    if graph.loss.is_some() && !graph.params.is_empty() && ends.iter().all(|end| end.loss.is_none()) {
        report.push(Class::Loss, Place::default(), "no stage has the loss at the end of the step");
    }
    let updates = |clipped: usize| ends.iter().position(|end| end.updates[clipped] > 0);
    if let (Some(_), Some(stage)) = (updates(0), updates(1)) {
        report.push(Class::Norm, Place::stage(stage), "some parameters are updated with a clip factor, these without");
    }
}

/// Every contribution to every parameter is accumulated by exactly one stage.
fn contributions(graph: &Graph, ends: &[End], report: &mut Report) {
    for (param, values) in graph.grads.iter() {
        let name = &graph.values[graph.params[param].value].name;
        if ends.iter().all(|end| !end.contributions.contains_key(&param)) {
            report.push(Class::Gradient, Place::default(), format!("`{name}` is in no bucket of any stage"));
            continue;
        }
        for &value in values {
            let by = |end: &&End| end.contributions.get(&param).is_some_and(|c| c.contains(&value));
            let count = ends.iter().filter(by).count();
            if count != 1 {
                let what = &graph.values[value].name;
                report.push(
                    Class::Gradient,
                    Place::default(),
                    format!("`{what}` is added to the gradient of `{name}` on {count} stages, expected one"),
                );
            }
        }
    }
}

/// Operations across stages: what each brings is its whole part, to be summed over the same ranks afterwards, and rounded alike.
fn across(program: &Program, ends: &[End], report: &mut Report) {
    for (stage, end) in ends.iter().enumerate() {
        for (key @ (_, members), shares) in &end.across {
            let first = members.first().and_then(|&m| ends.get(m as usize)).and_then(|end| end.across.get(key));
            for (n, share) in shares.iter().enumerate() {
                let theirs = first.and_then(|shares| shares.get(n));
                if theirs.is_none_or(|theirs| (theirs.axes, theirs.rounded) != (share.axes, share.rounded)) {
                    let message =
                        format!("operation {n} across stages {members:?} adds sums that are reduced, or rounded, otherwise on stage {}", members[0]);
                    report.push(Class::Gradient, Place::stage(stage), message);
                }
                if let Some(counted) = &share.norm
                    && end.norms.iter().any(|(all, _)| all != counted)
                {
                    report.push(
                        Class::Norm,
                        Place::stage(stage),
                        format!("operation {n} across stages {members:?} adds a norm that does not count all gradients"),
                    );
                }
            }
        }
    }
    let mut first: BTreeMap<ParamId, bool> = BTreeMap::new();
    for (stage, end) in ends.iter().enumerate() {
        for (&param, &rounded) in &end.rounded {
            if *first.entry(param).or_insert(rounded) != rounded {
                let bucket = program.stages[stage].buckets.iter().find(|(_, b)| b.members.iter().any(|m| m.param == param));
                let place = bucket.map_or(Place::stage(stage), |(id, _)| Place::stage(stage).bucket(id));
                report.push(Class::Gradient, place, "its gradient is rounded on some of its homes, not on all");
            }
        }
    }
}

/// If there is a norm, every stage has it, and every parameter is counted in it on exactly one.
fn norm(graph: &Graph, program: &Program, ends: &[End], report: &mut Report) {
    if ends.iter().all(|end| end.norms.is_empty()) {
        return;
    }
    let mut counted: BTreeMap<ParamId, usize> =
        program.stages.iter().flat_map(|stage| stage.buckets.values().flat_map(|b| b.members.iter().map(|m| (m.param, 0)))).collect();
    for (index, (end, stage)) in ends.iter().zip(&program.stages).enumerate() {
        let place = Place::stage(index);
        match end.norms.iter().collect::<Vec<_>>()[..] {
            [(buckets, true)] => {
                for member in buckets.iter().flat_map(|&b| &stage.buckets[b].members) {
                    *counted.entry(member.param).or_default() += 1;
                }
            }
            [(_, false)] => report.push(Class::Norm, place, "at the end of the step the squared norm is not reduced over all ranks"),
            [] => report.push(Class::Norm, place, "other stages have the squared norm of the gradients, this one has not"),
            _ => report.push(Class::Norm, place, "has more than one squared norm: what clips, and what is reported, count other gradients"),
        }
    }
    for (param, count) in counted.into_iter().filter(|&(_, count)| count != 1) {
        let name = &graph.values[graph.params[param].value].name;
        report.push(Class::Norm, Place::default(), format!("`{name}` is counted {count} times in the norm, expected once"));
    }
}
