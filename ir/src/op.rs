//! The closed set of graph operations.
//!
//! For each op, four facts, each in its own file and each a `match` without wildcard arms: its factor rule ([`crate::rule`]), the types of its results
//! ([`crate::infer`]), its cost ([`crate::cost`]), its derivative ([`crate::grad`]); and its meaning in [`crate::interp::op`].
//! In the signatures below, letters are dims: `x[b,s,h]` has three.

/// Activation functions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// x · Φ(x), with erf.
    Gelu,
    /// GPT-2's tanh approximation of GELU.
    GeluTanh,
    Relu,
    /// x · sigmoid(1.702 x).
    QuickGelu,
    /// x, but at most `limit`, and at least `−limit`.
    Clamp {
        limit: u32,
    },
    /// x, but at most `limit`.
    ClampAbove {
        limit: u32,
    },
}

/// Scalars that change from step to step, given to every rank when a step starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum StepScalar {
    /// 1 / (target tokens of the whole step, over all ranks and micro-batches): the loss divisor.
    InvTokens,
    /// Factor on the loss's gradient ([`crate::optimizer::StepScalars::loss_scale`]).
    LossScale,
}

/// Rotation direction: the derivative of a rotation is the opposite rotation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rotation {
    Forward,
    Inverse,
}

/// Which elements of the rotated part, of `2n` elements, make a pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pairs {
    /// `i` with `i + n`, the form of Hugging Face.
    Halves,
    /// `2i` with `2i + 1`, the form of the paper.
    Neighbours,
}

/// Rotary position embedding (arXiv:2104.09864) of a part of each vector; the rest stays as it is.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    pub rotation: Rotation,
    pub pairs: Pairs,
    /// First element that is rotated.
    pub start: u64,
    /// Factor on what is rotated: the attention factor of YaRN (arXiv:2309.00071).
    pub scale: f64,
    /// Angle per position of each pair (any scaling already applied).
    pub inv_freq: Vec<f64>,
}

impl Rope {
    /// The rotation of whole vectors, of twice as many elements as there are frequencies, in halves.
    pub fn whole(rotation: Rotation, inv_freq: Vec<f64>) -> Rope {
        Rope { rotation, pairs: Pairs::Halves, start: 0, scale: 1.0, inv_freq }
    }
    /// The element behind the last that is rotated.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(2 * self.inv_freq.len() as u64)
    }
    /// The two elements of pair `i`.
    pub fn pair(&self, i: usize) -> (usize, usize) {
        let start = self.start as usize;
        match self.pairs {
            Pairs::Halves => (start + i, start + i + self.inv_freq.len()),
            Pairs::Neighbours => (start + 2 * i, start + 2 * i + 1),
        }
    }
}

/// Whether tokens see other documents of their sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Documents {
    Joined,
    /// No query sees a key before the first position of its own document, which one more operand has, the last: `first[b,s]`. It is no later than the query's own
    /// position, and never decreases along a sequence.
    Apart,
}

impl Documents {
    pub const ALL: [Documents; 2] = [Documents::Joined, Documents::Apart];
    pub fn name(self) -> &'static str {
        match self {
            Documents::Joined => "joined",
            Documents::Apart => "apart",
        }
    }
    pub fn from_name(name: &str) -> Option<Documents> {
        Documents::ALL.into_iter().find(|d| d.name() == name)
    }
}

/// Which keys a query sees.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Mask {
    pub causal: bool,
    /// With a window of `w`, position `i` sees keys `i-w+1 ..= i`.
    pub window: Option<u64>,
    pub documents: Documents,
}

impl Mask {
    /// Each query sees itself and all before it.
    pub const CAUSAL: Mask = Mask { causal: true, ..Mask::FULL };
    /// Each query sees every key.
    pub const FULL: Mask = Mask { causal: false, window: None, documents: Documents::Joined };

    /// Whether the query at position `query`, whose document begins at position `first`, sees the key at position `key`.
    pub fn sees(&self, query: u64, first: u64, key: u64) -> bool {
        let before = key <= query;
        (!self.causal || before) && self.window.is_none_or(|w| before && query < key + w) && (self.documents == Documents::Joined || first <= key)
    }
    /// Whether no query sees a key behind it.
    pub fn looks_back(&self) -> bool {
        self.causal || self.window.is_some()
    }
    /// Operands of an attention that has this mask, of so many otherwise.
    pub fn operands(&self, others: usize) -> usize {
        others + usize::from(self.documents == Documents::Apart)
    }
}

/// Scaled dot-product attention.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attention {
    pub mask: Mask,
    /// Factor on the scores, usually 1/√d.
    pub scale: f64,
}

/// Operand and result labels of a product, one letter per dim: `bsh,fh->bsf`.
///
/// A letter in both operands and not in the result is summed over. In each operand the letters of one role (only left, only right, summed, or common
/// to all three) stand together and in the same order, so that the product is a (batched) matrix product without transposition in memory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Spec {
    pub left: String,
    pub right: String,
    pub out: String,
}

impl Spec {
    /// Whether the letters make a product as described.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        let strings = [("left operand", &self.left), ("right operand", &self.right), ("result", &self.out)];
        for (side, letters) in strings {
            if let Some(twice) = letters.chars().find(|&l| letters.matches(l).count() > 1) {
                return Err(format!("`{twice}` stands twice in the {side}"));
            }
        }
        let role = |l: char| [self.left.contains(l), self.right.contains(l), self.out.contains(l)];
        for letter in strings.iter().flat_map(|(_, letters)| letters.chars()) {
            match role(letter) {
                [true, true, _] | [true, false, true] | [false, true, true] => {}
                [true, false, false] | [false, true, false] => return Err(format!("`{letter}` stands in one operand only, and not in the result")),
                [false, false, _] => return Err(format!("`{letter}` of the result is in no operand")),
            }
        }
        let of_role = |letters: &str, wanted: [bool; 3]| letters.chars().filter(|&l| role(l) == wanted).collect::<String>();
        for wanted in [[true, true, true], [true, true, false], [true, false, true], [false, true, true]] {
            let groups =
                strings.iter().zip(wanted).filter(|(_, stands)| *stands).map(|((side, letters), _)| (side, letters, of_role(letters, wanted)));
            let mut first: Option<String> = None;
            for (side, letters, group) in groups {
                if !letters.contains(&group) {
                    return Err(format!("`{group}` should stand together in the {side}"));
                }
                if first.get_or_insert(group.clone()) != &group {
                    return Err(format!("`{group}` of the {side} stands in another order elsewhere"));
                }
            }
        }
        Ok(())
    }
}

/// Router normalisation after the top-k choice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Renormalize {
    /// Chosen scores are divided by their sum.
    Yes,
    /// Chosen scores stand as they are.
    No,
}

/// A router's score of each expert, from its logits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    /// Each expert by itself (DeepSeek-V3, arXiv:2412.19437).
    Sigmoid,
}

/// Experts in equal groups, of which only the best are chosen from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Groups {
    pub count: u64,
    pub kept: u64,
    pub by: GroupScore,
}

/// How good a group is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GroupScore {
    /// As its best expert.
    Best,
    /// As its two best experts together.
    TwoBest,
}

/// Whether a bias of each expert is added to scores when experts are chosen, and only then: it balances the load without a gradient.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Correction {
    No,
    Added,
}

/// How a token chooses its experts, and their weights.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Router {
    /// Experts of a token.
    pub k: u64,
    pub score: Score,
    pub renormalize: Renormalize,
    pub groups: Option<Groups>,
    pub correction: Correction,
    /// Factor on the weights.
    pub scale: f64,
}

impl Router {
    /// A softmax over all experts, and the `k` largest.
    pub fn softmax(k: u64, renormalize: Renormalize) -> Router {
        Router { k, score: Score::Softmax, renormalize, groups: None, correction: Correction::No, scale: 1.0 }
    }
}

/// One operation.
#[derive(Clone, PartialEq, Debug)]
pub enum Op {
    /// `(x, y) → x·y by the spec`.
    Einsum(Spec),
    /// `(x[…,n…], b[n…]) → x + b, where b's dims are the last of x's`.
    AddBias,
    /// (x[…,n…]) → sum over all but the last `keep` dims. The derivative of `AddBias` with respect to b.
    SumLeading { keep: u32 },
    /// `(x, y) → x + y`. Linear, so both may be partial over the same axes.
    Add,
    /// `(x, y) → x − y`.
    Sub,
    /// `(x) → −x`.
    Neg,
    /// `(x[b,s,…]) → x`, each element zero or divided by 1 − rate, by its place in model and data ([`crate::dropout`]). Its own derivative.
    Dropout {
        /// Part of the elements that becomes zero: from 0, none, to less than 1.
        rate: f64,
    },
    /// `(x) → f(x)`.
    Act(Activation),
    /// `(x, dy) → dy · f′(x)`.
    ActGrad(Activation),
    /// `(gate, up) → f(gate) · up`.
    Gated(Activation),
    /// `(gate, up, dy) → (dgate, dup)`.
    GatedGrad(Activation),
    /// `(x[…,h…], w[h…]) → x / rms(x) · w, the mean over all of w's dims, which are the last of x's`.
    RmsNorm { eps: f64 },
    /// `(x, w, dy) → dx`.
    RmsNormGradInput { eps: f64 },
    /// `(x, dy) → dw`.
    RmsNormGradWeight { eps: f64 },
    /// `(x[…,h], w[h], bias[h]) → (x − mean) / std · w + bias`.
    LayerNorm { eps: f64 },
    /// `(x, w, dy) → dx`.
    LayerNormGradInput { eps: f64 },
    /// `(x, dy) → (dw, dbias)`.
    LayerNormGradWeight { eps: f64 },
    /// `(x[b,s,…,d]) → x rotated by its position in dim 1`.
    Rope(Rope),
    /// `(q[b,s,g,r,d], k[b,t,g,d], v[b,t,g,e]) → (o[b,s,g,r,e], lse[b,s,g,r])`. `g` are key/value heads, `r` query heads of each. Here and in the next two,
    /// `first[b,s]` comes last where documents are apart ([`Documents`]).
    /// Padding heads (`g` or `r` at or beyond its logical size) give o = 0 and lse = 0: a softmax of zero scores would not be zero.
    Attention(Attention),
    /// `(q, k, v, o, lse, do) → (dq, dk, dv)`. The derivative of `Attention` and, as its lse has the sink in it, of `AttentionSink`.
    AttentionGrad(Attention),
    /// `(q, k, v, sink[g,r]) → (o, lse)`: as `Attention`, with one more key of score `sink` whose value is zero.
    AttentionSink(Attention),
    /// `(sink[g,r], o, lse, do) → dsink = −Σ over b, s of exp(sink − lse) · ⟨do, o⟩`.
    SinkGrad,
    /// `(x[b,t,g,n], y[b,t,m]) → [b,t,g,n+m]: each head's x, then y, the same for all heads`. Padding heads are zero.
    Append,
    /// `(dz[b,t,g,n+m]) → dx[b,t,g,n]`.
    AppendGradHead,
    /// `(dz[b,t,g,n+m]) → dy[b,t,m] = Σ over g`.
    AppendGradTail,
    /// `(table[v,h], tokens[b,s]) → [b,s,h]`. Rows outside a rank's block of the table give zero.
    Embed,
    /// `(tokens[b,s], dy[b,s,h]) → dtable[v,h]`.
    EmbedGrad,
    /// `(x[b,s,h], table[p,h]) → x + table[0..s]`.
    AddPosition,
    /// `(dy[b,s,h]) → dtable[p,h], zero from row s on`.
    AddPositionGrad,
    /// `(logits[…,v], targets[…]) → (lse[…], picked[…]): log Σ exp, and the logit of the target`. Padded columns count as −∞.
    CeStats,
    /// `(logits, targets, lse, dlse, dpicked) → dlogits = dlse · exp(logits − lse) + dpicked · onehot(targets)`.
    CeStatsGrad,
    /// `(x[…]) → Σ x · InvTokens, a scalar`.
    Mean,
    /// () → a value full of InvTokens · LossScale: the derivative of `Mean`, scaled.
    MeanGrad,
    /// `(logits[b,s,e]) → gate[b,s,e]: weights of the k best experts (ties: lowest index), the rest zero`; with a correction, `(logits, bias[e])`.
    TopKGate(Router),
    /// `(logits, gate, dgate) → dlogits`.
    TopKGateGrad(Router),
    /// `(dgate[b,s,e]) → dbias[e] = 0`: the correction of a router changes which experts are chosen and nothing else.
    CorrectionGrad,
    /// `(gate[b,s,e]) → gate, of which each expert keeps the first tokens of each sequence that chose it; the rest of its column is zero` ([`crate::capacity`]).
    /// Entries of a gate are positive where they are not zero, so that the derivative is that of a ReLU, at the result.
    Capacity {
        /// The most tokens of one sequence that an expert takes: at least one.
        tokens: u64,
    },
    /// `(x[b,s,h], gate[b,s,e]) → rows[b,s,e,h] in top-k layout`.
    Dispatch,
    /// `(rows[b,s,e,h], gate) → Σ over e: [b,s,h]`. The derivative of `Dispatch`.
    Undispatch,
    /// (left, right, gate) → product by the spec, where operands or result with the letters `b s e` are in top-k layout.
    ExpertEinsum(Spec),
    /// `(rows[b,s,e,f], bias[e,f], gate) → rows + the bias of their expert`.
    AddExpertBias,
    /// `(drows[b,s,e,f], gate) → dbias[e,f]`.
    ExpertBiasGrad,
    /// `(rows[b,s,e,h], gate[b,s,e]) → Σ over e of gate · rows: [b,s,h]`.
    Combine,
    /// `(dy[b,s,h], gate) → drows[b,s,e,h] = gate · dy`.
    CombineGradRows,
    /// `(dy[b,s,h], rows[b,s,e,h], gate) → dgate[b,s,e] = ⟨dy, rows⟩ where gate is not zero`.
    CombineGradGate,
}
