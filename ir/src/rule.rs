//! The factor rule of each op: everything a planner, a lowering or a verifier needs to know to split it.
//!
//! Each op is described once, like an einsum: every dim of every operand and result is a *factor* (a letter). Splitting an op over mesh axes means
//! assigning axes to factors; from that follow the sharding each operand must have and the sharding each result has:
//!
//! - an operand's dim is sharded by the axes of its factor;
//! - a result is partial (with a monoid of its own) over the axes of every factor that it does not have.
//!
//! A derivative uses the letters of the op it is derived from, so one assignment serves a forward op and its backward ops.
//! A factor that is `Whole` cannot be split. A factor that is `pad`-able keeps its meaning when its dim grows by zero elements.

use crate::mesh::AxisSet;
use crate::op::{Attention, Correction, Documents, Op};
use crate::sharding::{Monoid, Sharding};

/// A letter.
pub type Label = char;

/// What may happen to a factor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// Each rank computes its block; zero padding at the end of the dim is harmless.
    Free,
    /// Each rank computes its block; the dim cannot be padded.
    Exact,
    /// Must not be split.
    Whole,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Factor {
    pub label: Label,
    pub split: Split,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    pub factors: Vec<Factor>,
    /// One letter per dim, per operand.
    pub ins: Vec<Vec<Label>>,
    /// One letter per dim, per result, and how terms over missing factors are reduced.
    pub outs: Vec<(Vec<Label>, Monoid)>,
    /// `Add`: operands that wait for the same reduction may be added as they are.
    pub linear: Linear,
    /// Factors whose blocks may meet one pair after another.
    pub blockwise: Option<Blockwise>,
}

/// Two factors of which an op sees every pair of elements, and makes the same of all pairs whether it sees them at once or block by block. The keys' factor must be whole; but
/// where both are split by the same axes, blocks of what has it may go round among the ranks along them ([`crate::ring`]): then the op runs once for each turn, and the results
/// of its runs are joined by the monoids of its results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blockwise {
    pub queries: Label,
    pub keys: Label,
}

/// Whether an op commutes with a pending sum of its operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Linear {
    /// Operands must be whole.
    No,
    /// All operands may be partial over the same axes; so is the result then.
    Yes,
}

/// Axes given to each factor of an op. Factors that are not listed are not split.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Assignment(pub Vec<(Label, AxisSet)>);

impl Assignment {
    pub fn axes(&self, label: Label) -> AxisSet {
        self.0.iter().find(|(l, _)| *l == label).map_or(AxisSet::EMPTY, |&(_, a)| a)
    }
    /// Gives `axes` to `label`, on top of what it has. Entries stay sorted by letter, so equal assignments compare equal.
    pub fn assign(&mut self, label: Label, axes: AxisSet) {
        if axes.is_empty() {
            return;
        }
        match self.0.binary_search_by_key(&label, |&(l, _)| l) {
            Ok(at) => self.0[at].1 = self.0[at].1.union(axes),
            Err(at) => self.0.insert(at, (label, axes)),
        }
    }
    pub fn used(&self) -> AxisSet {
        self.0.iter().fold(AxisSet::EMPTY, |s, &(_, a)| s.union(a))
    }
    /// The axes of both.
    pub fn and(&self, other: &Assignment) -> Assignment {
        let mut both = self.clone();
        other.0.iter().for_each(|&(label, axes)| both.assign(label, axes));
        both
    }
}

/// Shardings of an op's operands and results under an assignment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    pub ins: Vec<Sharding>,
    pub outs: Vec<Sharding>,
}

impl Rule {
    pub fn factor(&self, label: Label) -> Option<&Factor> {
        self.factors.iter().find(|f| f.label == label)
    }

    /// The axes along which blocks of keys go round under `assignment`, which gives them to both factors of [`Rule::blockwise`]; none where it does not.
    pub fn goes_round(&self, assignment: &Assignment) -> AxisSet {
        let Some(Blockwise { queries, keys }) = self.blockwise else { return AxisSet::EMPTY };
        let axes = assignment.axes(keys);
        if assignment.axes(queries).includes(axes) { axes } else { AxisSet::EMPTY }
    }

    /// The shardings that `assignment` gives operands and results.
    pub fn place(&self, assignment: &Assignment) -> Placement {
        let dims = |labels: &[Label]| labels.iter().map(|&l| assignment.axes(l)).collect::<Vec<_>>();
        let used = self.factors.iter().fold(AxisSet::EMPTY, |s, f| s.union(assignment.axes(f.label)));
        Placement {
            ins: self.ins.iter().map(|labels| Sharding::of_dims(dims(labels))).collect(),
            outs: self
                .outs
                .iter()
                .map(|(labels, monoid)| {
                    let whole = Sharding::of_dims(dims(labels));
                    let pending = used.minus(whole.sharded());
                    whole.with_partial(*monoid, pending)
                })
                .collect(),
        }
    }
}

/// The factor rule of `op`, given how many dims each operand and result has.
///
/// # Panics
/// If the ranks are not those the op's type rule accepts; call it on verified graphs.
pub fn rule(op: &Op, in_ranks: &[usize], out_ranks: &[usize]) -> Rule {
    use Split::{Exact, Free, Whole};
    let n = in_ranks.first().or(out_ranks.first()).copied().unwrap_or(0);
    let first = |n: usize| ('a'..='z').take(n).collect::<String>();
    let x = first(n);
    // Pointwise on the first operand's letters, every factor with the same split.
    let pointwise = |split: Split| {
        let ins: Vec<String> = in_ranks.iter().map(|_| x.clone()).collect();
        let outs: Vec<String> = out_ranks.iter().map(|_| x.clone()).collect();
        build(&ins, &outs, |_| split)
    };
    // Operand spellings out of a list of patterns.
    let fixed = |ins: &[&str], outs: &[&str], split: &dyn Fn(Label) -> Split| {
        build(&ins.iter().map(|s| s.to_string()).collect::<Vec<_>>(), &outs.iter().map(|s| s.to_string()).collect::<Vec<_>>(), split)
    };
    match op {
        Op::Einsum(spec) => fixed(&[&spec.left, &spec.right], &[&spec.out], &|_| Free),
        Op::AddBias => {
            // Where only x has a padded dim, the sum would put the bias into its padding.
            let bias = x[n - in_ranks[1]..].to_string();
            build(&[x.clone(), bias.clone()], &[x], |l| if bias.contains(l) { Free } else { Exact })
        }
        Op::SumLeading { keep } => {
            let kept = x[n - *keep as usize..].to_string();
            build(&[x], &[kept], |_| Free)
        }
        Op::Add => Rule { linear: Linear::Yes, ..pointwise(Free) },
        Op::Sub | Op::Neg | Op::Dropout { .. } => pointwise(Free),
        Op::Act(_) | Op::ActGrad(_) | Op::Gated(_) | Op::GatedGrad(_) => pointwise(Free),
        Op::RmsNorm { .. } => norm(&x, in_ranks[1], &["x", "w"], &["x"], Free),
        Op::RmsNormGradInput { .. } => norm(&x, in_ranks[1], &["x", "w", "x"], &["x"], Free),
        Op::RmsNormGradWeight { .. } => norm(&x, out_ranks[0], &["x", "x"], &["w"], Free),
        // The bias of a layer norm would fill the padding of other dims, as in `AddBias`.
        Op::LayerNorm { .. } => norm(&x, 1, &["x", "w", "w"], &["x"], Exact),
        Op::LayerNormGradInput { .. } => norm(&x, 1, &["x", "w", "x"], &["x"], Exact),
        Op::LayerNormGradWeight { .. } => norm(&x, 1, &["x", "x"], &["w", "w"], Exact),
        Op::Rope(_) => {
            let last = x.chars().last();
            build(std::slice::from_ref(&x), std::slice::from_ref(&x), |l| {
                if Some(l) == last {
                    Whole
                } else if l == 'b' {
                    Exact
                } else {
                    Free
                }
            })
        }
        Op::Attention(a) => attended(fixed(&masked(a, &["bsgrd", "btgd", "btge"]), &["bsgre", "bsgr"], &attention_split), Monoid::LogSumExp),
        Op::AttentionSink(a) => {
            attended(fixed(&masked(a, &["bsgrd", "btgd", "btge", "gr"]), &["bsgre", "bsgr"], &attention_split), Monoid::LogSumExp)
        }
        Op::SinkGrad => fixed(&["gr", "bsgre", "bsgr", "bsgre"], &["gr"], &attention_split),
        Op::Append => fixed(&["btgn", "btm"], &["btgd"], &append_split),
        Op::AppendGradHead => fixed(&["btgd"], &["btgn"], &append_split),
        Op::AppendGradTail => fixed(&["btgd"], &["btm"], &append_split),
        Op::AttentionGrad(a) => {
            let rule = fixed(&masked(a, &["bsgrd", "btgd", "btge", "bsgre", "bsgr", "bsgre"]), &["bsgrd", "btgd", "btge"], &attention_split);
            attended(rule, Monoid::Sum)
        }
        Op::Embed => fixed(&["vh", "bs"], &["bsh"], &tokens_exact),
        Op::EmbedGrad => fixed(&["bs", "bsh"], &["vh"], &tokens_exact),
        Op::AddPosition => fixed(&["bsh", "ph"], &["bsh"], &position_split),
        Op::AddPositionGrad => fixed(&["bsh"], &["ph"], &position_split),
        Op::CeStats => {
            let tokens = x[..n - 1].to_string();
            let mut rule = build(&[x, tokens.clone()], &[tokens.clone(), tokens.clone()], |l| if tokens.contains(l) { Exact } else { Free });
            rule.outs[0].1 = Monoid::LogSumExp;
            rule
        }
        Op::CeStatsGrad => {
            let tokens = x[..n - 1].to_string();
            let t = || tokens.clone();
            build(&[x.clone(), t(), t(), t(), t()], std::slice::from_ref(&x), |l| if tokens.contains(l) { Exact } else { Free })
        }
        Op::Mean => build(&[x], &[String::new()], |_| Exact),
        Op::MeanGrad => build(&[], &[x], |_| Exact),
        Op::TopKGate(router) => match router.correction {
            Correction::No => fixed(&["bse"], &["bse"], &|l| if l == 'e' { Whole } else { Exact }),
            Correction::Added => fixed(&["bse", "e"], &["bse"], &|l| if l == 'e' { Whole } else { Exact }),
        },
        Op::CorrectionGrad => fixed(&["bse"], &["e"], &|l| if l == 'e' { Whole } else { Exact }),
        Op::TopKGateGrad(_) => fixed(&["bse", "bse", "bse"], &["bse"], &|l| if l == 'e' { Whole } else { Exact }),
        // Who is first of a sequence can only be told of all of it. Letters as in its derivative, which is pointwise.
        Op::Capacity { .. } => fixed(&["abc"], &["abc"], &|l| match l {
            'a' => Exact,
            'b' => Whole,
            _ => Free,
        }),
        Op::Dispatch | Op::CombineGradRows => fixed(&["bsh", "bse"], &["bseh"], &tokens_exact),
        Op::Undispatch | Op::Combine => fixed(&["bseh", "bse"], &["bsh"], &tokens_exact),
        Op::ExpertEinsum(spec) => fixed(&[&spec.left, &spec.right, "bse"], &[&spec.out], &tokens_exact),
        Op::AddExpertBias => fixed(&["bsef", "ef", "bse"], &["bsef"], &tokens_exact),
        Op::ExpertBiasGrad => fixed(&["bsef", "bse"], &["ef"], &tokens_exact),
        Op::CombineGradGate => fixed(&["bsh", "bseh", "bse"], &["bse"], &tokens_exact),
    }
}

/// The spellings of an attention's operands: first positions of documents come last.
fn masked(attention: &Attention, others: &[&'static str]) -> Vec<&'static str> {
    let first = (attention.mask.documents == Documents::Apart).then_some("bs");
    others.iter().copied().chain(first).collect()
}

/// An attention, whose results of some keys each are joined by `monoid`: as the pair (o, lse), or by sum.
fn attended(mut rule: Rule, monoid: Monoid) -> Rule {
    rule.outs.iter_mut().for_each(|out| out.1 = monoid);
    Rule { blockwise: Some(Blockwise { queries: 's', keys: 't' }), ..rule }
}

/// Query and key sequences are different factors; a softmax needs all its keys.
fn attention_split(label: Label) -> Split {
    match label {
        'g' | 'r' => Split::Free,
        't' | 'd' | 'e' => Split::Whole,
        _ => Split::Exact,
    }
}

/// Heads split; a vector that is put together stays whole.
fn append_split(label: Label) -> Split {
    match label {
        'n' | 'm' | 'd' => Split::Whole,
        _ => Split::Free,
    }
}

/// Token positions cannot be padded: padding would look up, or be routed by, whatever it holds.
fn tokens_exact(label: Label) -> Split {
    match label {
        'b' | 's' => Split::Exact,
        _ => Split::Free,
    }
}

fn position_split(label: Label) -> Split {
    match label {
        'p' => Split::Whole,
        'b' | 's' => Split::Exact,
        _ => Split::Free,
    }
}

/// `x` stands for all letters, `w` for the last `over`, which are normalised over and so must be whole.
fn norm(x: &str, over: usize, ins: &[&str], outs: &[&str], others: Split) -> Rule {
    let last = &x[x.len().saturating_sub(over.max(1))..];
    let spell = |s: &&str| if *s == "x" { x.to_string() } else { last.to_string() };
    build(&ins.iter().map(spell).collect::<Vec<_>>(), &outs.iter().map(spell).collect::<Vec<_>>(), |l| {
        if last.contains(l) { Split::Whole } else { others }
    })
}

fn build(ins: &[String], outs: &[String], split: impl Fn(Label) -> Split) -> Rule {
    let mut factors: Vec<Factor> = Vec::new();
    for label in ins.iter().chain(outs).flat_map(|s| s.chars()) {
        if factors.iter().all(|f| f.label != label) {
            factors.push(Factor { label, split: split(label) });
        }
    }
    let letters = |s: &String| s.chars().collect::<Vec<_>>();
    Rule {
        factors,
        ins: ins.iter().map(letters).collect(),
        outs: outs.iter().map(|s| (letters(s), Monoid::Sum)).collect(),
        linear: Linear::No,
        blockwise: None,
    }
}
