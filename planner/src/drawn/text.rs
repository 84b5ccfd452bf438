//! A case as text: `dp=2 zero=3 cuts=1`, the choices that are not the smallest case's. It reads back as the same case.

use super::case::MOST;
use super::{Boundary, Case, Ffn, Sight, Split, Way};
use dplan_ir::dtype::DType;
use dplan_ir::mesh::Keys;
use dplan_ir::nest::Nest;
use dplan_ir::op::Documents;
use dplan_ir::optimizer::{DecayGroups, Optimizer};
use dplan_ir::plan::{Away, Clip, Gathered, Recompute, Schedule, Wire};
use dplan_ir::sync::Sync;
use std::fmt;
use std::str::FromStr;

/// What is wrong with the text of a case.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CaseError {
    #[error("`{0}`: expected KEY=VALUE, such as tp=2")]
    Pair(String),
    #[error("`{0}` is no choice of a case; choices are {keys}", keys = KEYS.map(|k| k.0).join(", "))]
    Key(String),
    #[error("{key}={value}: expected {expected}")]
    Value { key: &'static str, value: String, expected: &'static str },
    #[error("no legal case: it needs {0}")]
    Illegal(&'static str),
}

/// Prints a choice, reads it, and says what it may be.
type Key = (&'static str, fn(&Case) -> String, fn(&mut Case, &str) -> Option<()>, &'static str);

const NUMBER: &str = "a number";

/// All choices; what others depend on comes first.
const KEYS: [Key; 36] = [
    ("blocks", |c| c.model.blocks.to_string(), |c, t| number(&mut c.model.blocks, t), NUMBER),
    ("ffn", |c| c.model.ffn.name().into(), |c, t| name(&mut c.model.ffn, Ffn::from_name(t)), "gated, plain, experts or biased"),
    ("sight", |c| c.model.sight.name().into(), |c, t| name(&mut c.model.sight, Sight::from_name(t)), "causal, window or sinks"),
    ("seq", |c| c.model.seq.to_string(), |c, t| number(&mut c.model.seq, t), NUMBER),
    ("kv", |c| c.model.kv_heads.to_string(), |c, t| number(&mut c.model.kv_heads, t), NUMBER),
    ("group", |c| c.model.group.to_string(), |c, t| number(&mut c.model.group, t), NUMBER),
    ("vocab", |c| c.model.vocab.to_string(), |c, t| number(&mut c.model.vocab, t), NUMBER),
    ("tied", |c| switch_name(c.model.tied), |c, t| name(&mut c.model.tied, switch(t)), "on or off"),
    ("positions", |c| switch_name(c.model.learned_positions), |c, t| name(&mut c.model.learned_positions, switch(t)), "on or off"),
    ("dropout", |c| c.model.dropout.to_string(), |c, t| number(&mut c.model.dropout, t), "a number of percent"),
    ("documents", |c| c.model.documents.name().into(), |c, t| name(&mut c.model.documents, Documents::from_name(t)), "joined or apart"),
    ("capacity", |c| c.model.capacity.to_string(), |c, t| number(&mut c.model.capacity, t), "a number of percent"),
    ("dp", |c| c.dp.to_string(), |c, t| number(&mut c.dp, t), NUMBER),
    ("ep", |c| c.ep.to_string(), |c, t| number(&mut c.ep, t), NUMBER),
    ("cp", |c| c.cp.to_string(), |c, t| number(&mut c.cp, t), NUMBER),
    ("tp", |c| c.tp.to_string(), |c, t| number(&mut c.tp, t), NUMBER),
    (
        "sp",
        |c| switch_name(c.boundary == Boundary::Sequence),
        |c, t| name(&mut c.boundary, switch(t).map(|on| if on { Boundary::Sequence } else { Boundary::Whole })),
        "on or off",
    ),
    ("split", |c| split_name(c.split), |c, t| name(&mut c.split, split(t)), "none, textbook or the number of a drawn one"),
    ("micro", |c| c.micro_batch.to_string(), |c, t| number(&mut c.micro_batch, t), NUMBER),
    ("count", |c| c.micro_batches.to_string(), |c, t| number(&mut c.micro_batches, t), NUMBER),
    (
        "schedule",
        |c| c.schedule.name().into(),
        |c, t| name(&mut c.schedule, Schedule::from_name(t)),
        "gpipe, 1f1b, interleaved, zb-h1, zb-v or pipedream",
    ),
    ("virtual", |c| c.virtual_stages.to_string(), |c, t| number(&mut c.virtual_stages, t), NUMBER),
    ("cuts", |c| c.cuts.iter().map(u32::to_string).collect::<Vec<_>>().join(","), cuts, "layers, such as 1,3"),
    ("zero", |c| list(c, |w| w.zero.0.to_string()), |c, t| each(c, t, |w, t| number(&mut w.zero.0, t)), "0 to 3, one for all layers or for each"),
    (
        "offload",
        |c| list(c, |w| w.away().name()),
        |c, t| each(c, t, |w, t| Away::from_name(t).map(|a| (w.offload, w.activations) = (a.states, a.activations))),
        "none, optimizer, activations or the like, one for all layers or for each",
    ),
    (
        "recompute",
        |c| list(c, |w| w.recompute.name().into()),
        |c, t| each(c, t, |w, t| name(&mut w.recompute, Recompute::from_name(t))),
        "none, selective or full, one for all layers or for each",
    ),
    (
        "gathered",
        |c| list(c, gathered_name),
        |c, t| each(c, t, |w, t| name(&mut w.gathered, gathered(t))),
        "keep or again, one for all layers or for each",
    ),
    ("compute", |c| c.compute.name().into(), |c, t| name(&mut c.compute, DType::from_name(t)), "f64, bf16 or f16"),
    ("optimizer", |c| c.optimizer.name().into(), |c, t| name(&mut c.optimizer, Optimizer::from_name(t)), "adamw, adam, sgd or lamb"),
    (
        "clip",
        |c| switch_name(c.clip == Clip::GlobalNorm),
        |c, t| name(&mut c.clip, switch(t).map(|on| if on { Clip::GlobalNorm } else { Clip::None })),
        "on or off",
    ),
    ("keys", |c| c.keys.name().into(), |c, t| name(&mut c.keys, Keys::from_name(t)), "gather or ring"),
    ("sync", |c| c.sync.name(), |c, t| name(&mut c.sync, Sync::from_name(t)), "flat, hierarchical:2 or the like, tree or server"),
    ("map", |c| c.nest.to_string(), |c, t| name(&mut c.nest, Nest::from_name(t)), "an order of dp, ep, cp and tp, such as tp.dp"),
    ("wire", |c| c.wire.name(), |c, t| name(&mut c.wire, Wire::from_name(t)), "full, bf16 or topk:F"),
    (
        "decay",
        |c| decay_name(c.decay).into(),
        |c, t| name(&mut c.decay, [DecayGroups::All, DecayGroups::Matrices].into_iter().find(|&d| decay_name(d) == t)),
        "all or matrices",
    ),
    (
        "streams",
        |c| c.streams.map_or("eager".into(), |s| s.to_string()),
        |c, t| name(&mut c.streams, if t == "eager" { Some(None) } else { t.parse().ok().map(Some) }),
        "eager or a seed",
    ),
];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let smallest = Case::smallest();
        let told = KEYS.iter().map(|(key, print, ..)| (key, print(self), print(&smallest)));
        let told: Vec<String> = told.filter(|(_, own, other)| own != other).map(|(key, own, _)| format!("{key}={own}")).collect();
        write!(f, "{}", told.join(" "))
    }
}

impl FromStr for Case {
    type Err = CaseError;
    fn from_str(text: &str) -> Result<Case, CaseError> {
        let mut given = Vec::new();
        for pair in text.split_whitespace() {
            let (key, value) = pair.split_once('=').ok_or_else(|| CaseError::Pair(pair.into()))?;
            let at = KEYS.iter().position(|k| k.0 == key).ok_or_else(|| CaseError::Key(key.into()))?;
            given.push((at, value));
        }
        // In the order of the table: what there is for each layer comes after their number.
        given.sort_by_key(|&(at, _)| at);
        let mut case = Case::smallest();
        for (at, value) in given {
            let (key, _, set, expected) = KEYS[at];
            set(&mut case, value).ok_or_else(|| CaseError::Value { key, value: value.into(), expected })?;
            if u64::from(case.model.blocks) <= MOST {
                case.ways.resize(case.model.layers() as usize, Way::PLAIN);
            }
        }
        match case.refusal() {
            Some(needs) => Err(CaseError::Illegal(needs)),
            None => Ok(case),
        }
    }
}

fn number<N: FromStr>(to: &mut N, text: &str) -> Option<()> {
    *to = text.parse().ok()?;
    Some(())
}
fn name<T>(to: &mut T, found: Option<T>) -> Option<()> {
    *to = found?;
    Some(())
}
fn switch(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}
fn switch_name(on: bool) -> String {
    if on { "on".into() } else { "off".into() }
}
fn split(text: &str) -> Option<Split> {
    match text {
        "none" => Some(Split::None),
        "textbook" => Some(Split::Textbook),
        seed => seed.parse().ok().map(Split::Drawn),
    }
}
fn split_name(split: Split) -> String {
    match split {
        Split::None => "none".into(),
        Split::Textbook => "textbook".into(),
        Split::Drawn(seed) => seed.to_string(),
    }
}
fn decay_name(decay: DecayGroups) -> &'static str {
    match decay {
        DecayGroups::All => "all",
        DecayGroups::Matrices => "matrices",
    }
}
fn gathered(text: &str) -> Option<Gathered> {
    match text {
        "keep" => Some(Gathered::Keep),
        "again" => Some(Gathered::Again),
        _ => None,
    }
}
fn gathered_name(way: &Way) -> String {
    match way.gathered {
        Gathered::Keep => "keep".into(),
        Gathered::Again => "again".into(),
    }
}
fn cuts(case: &mut Case, text: &str) -> Option<()> {
    case.cuts = text.split(',').filter(|t| !t.is_empty()).map(|t| t.parse().ok()).collect::<Option<_>>()?;
    Some(())
}

/// One word if all layers are alike.
fn list(case: &Case, print: impl Fn(&Way) -> String) -> String {
    let mut words: Vec<String> = case.ways.iter().map(print).collect();
    if words.windows(2).all(|w| w[0] == w[1]) {
        words.truncate(1);
    }
    words.join(",")
}
fn each(case: &mut Case, text: &str, set: impl Fn(&mut Way, &str) -> Option<()>) -> Option<()> {
    let words: Vec<&str> = text.split(',').collect();
    let fits = words.len() == 1 || words.len() == case.ways.len();
    let mut all = case.ways.iter_mut().enumerate();
    fits.then(|| all.try_for_each(|(at, way)| set(way, words[if words.len() == 1 { 0 } else { at }])))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drawn::Dice;

    #[test]
    fn cases_read_back_as_they_were() {
        for number in 0..2000 {
            let case = Case::drawn(&mut Dice::of(6, number));
            let text = case.to_string();
            assert_eq!(text.parse(), Ok(case), "{text}");
        }
        assert_eq!("".parse(), Ok(Case::smallest()));
        assert_eq!(Case::smallest().to_string(), "");
    }

    #[test]
    fn bad_text_says_what_would_be_right() {
        let wrong = [
            ("tp", "expected KEY=VALUE"),
            ("tq=2", "choices are blocks, ffn"),
            ("tp=two", "tp=two: expected a number"),
            ("zero=1,2", "one for all layers or for each"),
            ("schedule=zb-v", "at least two stages"),
            ("blocks=0", "1 to 4096 blocks"),
            ("blocks=99999999999", "expected a number"),
            ("cp=3", "a sequence that cp divides"),
            ("ep=2 dp=2", "experts that ep divides"),
            ("cuts=9", "cuts that rise"),
            ("dropout=100", "less than 100 percent"),
            ("zero=7", "one way for each layer"),
            ("tied=on zero=1,0,0", "one ZeRO stage and way of offloading for a tied table"),
        ];
        for (text, says) in wrong {
            let error = text.parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
