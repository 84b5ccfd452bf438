//! The update rules, as scalar equations, and which parameters weight decay pulls. Every executor (interpreter, CPU and CUDA kernels) computes these.

use crate::dropout::Draws;
use crate::entity::{ParamId, Table};
use crate::graph::Graph;
use crate::op::Op;
use crate::program::Updates;

/// Which update rule; part of a plan, since it decides which states exist.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Optimizer {
    AdamW,
    Adam,
    Sgd,
    Lamb,
}

impl Optimizer {
    pub const ALL: [Optimizer; 4] = [Optimizer::AdamW, Optimizer::Adam, Optimizer::Sgd, Optimizer::Lamb];

    /// State tensors per parameter besides the parameter itself.
    pub fn moments(self) -> usize {
        match self {
            Optimizer::AdamW | Optimizer::Adam | Optimizer::Lamb => 2,
            Optimizer::Sgd => 1,
        }
    }
    pub fn name(self) -> &'static str {
        match self {
            Optimizer::AdamW => "adamw",
            Optimizer::Adam => "adam",
            Optimizer::Sgd => "sgd",
            Optimizer::Lamb => "lamb",
        }
    }
    /// Whether a step's size depends on the norms of whole parameters and of what would be taken from them ([`trust_ratio`]).
    pub fn trusts(self) -> bool {
        match self {
            Optimizer::AdamW | Optimizer::Adam | Optimizer::Sgd => false,
            Optimizer::Lamb => true,
        }
    }
    pub fn from_name(name: &str) -> Option<Optimizer> {
        Optimizer::ALL.into_iter().find(|o| o.name() == name)
    }
}

/// Settings that may change from step to step and are no part of a plan.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Hyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// SGD only: v ← momentum·v + g.
    pub momentum: f64,
    /// Largest global gradient norm; infinite for none.
    pub clip: f64,
}

/// Which parameters weight decay pulls: a choice of the run, not of the plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DecayGroups {
    #[default]
    All,
    /// All but the weights of norms, biases and sinks.
    Matrices,
}

/// For each parameter, whether weight decay pulls it. Never one that is fixed: its gradient is zero, so that nothing else changes it either.
pub fn decays(graph: &Graph, groups: DecayGroups) -> Table<ParamId, bool> {
    let fixed = graph.fixed_params();
    let mut pulled = graph.params.map(|p, _| !fixed.contains(&p));
    if groups == DecayGroups::Matrices {
        let mut elsewhere = graph.params.map(|_, _| false);
        for (_, node) in graph.forward_nodes() {
            for (at, &value) in node.inputs.iter().enumerate() {
                if let Some(param) = graph.param_of(value) {
                    elsewhere[param] |= !is_vector(&node.op, at);
                }
            }
        }
        pulled.iter_mut().for_each(|(p, pulled)| *pulled &= elsewhere[p]);
    }
    pulled
}

/// Whether operand `at` is a norm's weight, a bias or a sink.
fn is_vector(op: &Op, at: usize) -> bool {
    match op {
        Op::RmsNorm { .. } | Op::LayerNorm { .. } | Op::AddBias => at > 0,
        Op::AddExpertBias => at == 1,
        Op::AttentionSink(_) => at == 3,
        _ => false,
    }
}

/// What one step gives every rank: the update's scalars and the loss divisor.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepScalars {
    pub hyper: Hyper,
    /// 1 for the first step: Adam's bias correction is 1 − βᵗ.
    pub step: u64,
    pub inv_tokens: f64,
    /// Factor on the loss's gradient, so that short types do not lose the small ones (arXiv:1710.03740): a power of two, 1 where nothing is short. The
    /// norm's and the update's gradients are divided by it.
    pub loss_scale: f64,
    /// Dropout, from the step's first sequence on.
    pub draws: Draws,
}

impl StepScalars {
    /// A step without loss scaling and dropout.
    pub fn new(hyper: Hyper, step: u64, inv_tokens: f64) -> StepScalars {
        StepScalars { hyper, step, inv_tokens, loss_scale: 1.0, draws: Draws::default() }
    }
    /// The norm of the gradients, from that of the scaled ones.
    pub fn norm(&self, scaled: f64) -> f64 {
        scaled / self.loss_scale
    }
    /// Factor from scaled gradients, whose norm is `scaled`, to those of the update; NaN, which [`skips`], where they overflowed.
    pub fn gradient_scale(&self, scaled: f64) -> f64 {
        if scaled.is_finite() { clip_scale(self.norm(scaled), self.hyper.clip) / self.loss_scale } else { f64::NAN }
    }
    /// Those of a micro-batch's passes, and of the update behind them where each has its own: there updates are counted one by one, and a micro-batch's gradient is the mean over its
    /// own tokens, not its part of the step's.
    pub fn of(&self, updates: Updates, micro_batch: u64, micro_batches: u64) -> StepScalars {
        match updates {
            Updates::Step => *self,
            Updates::MicroBatch => StepScalars { step: self.step + micro_batch, loss_scale: self.loss_scale * micro_batches as f64, ..*self },
        }
    }
    /// The same step for parameters that weight decay does not pull.
    pub fn without_decay(&self) -> StepScalars {
        StepScalars { hyper: Hyper { weight_decay: 0.0, ..self.hyper }, ..*self }
    }
}

/// Whether an update with this factor on its gradients changes nothing: neither parameters nor moments. It is decided element by element, not by a branch of
/// the program.
pub fn skips(gradient_scale: f64) -> bool {
    !gradient_scale.is_finite()
}

/// Clip factor for a global norm, as `torch.nn.utils.clip_grad_norm_` defines it: min(1, clip / (norm + 1e-6)).
pub fn clip_scale(norm: f64, clip: f64) -> f64 {
    if clip.is_finite() { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

/// AdamW (arXiv:1711.05101, in PyTorch's form): p ← p − lr·wd·p; m, v updated; p ← p − lr · (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε).
/// `g` is already scaled by the clip factor. Returns the new (p, m, v).
pub fn adamw(p: f64, g: f64, m: f64, v: f64, at: &StepScalars) -> (f64, f64, f64) {
    let h = &at.hyper;
    let t = i32::try_from(at.step).unwrap_or(i32::MAX);
    let p = p * (1.0 - h.lr * h.weight_decay);
    let m = h.beta1 * m + (1.0 - h.beta1) * g;
    let v = h.beta2 * v + (1.0 - h.beta2) * g * g;
    let step = h.lr / (1.0 - h.beta1.powi(t));
    let denom = v.sqrt() / (1.0 - h.beta2.powi(t)).sqrt() + h.eps;
    (p - step * m / denom, m, v)
}

/// Adam (arXiv:1412.6980) with L2 decay, in PyTorch's form: g ← g + wd·p, then as AdamW without decay. Returns the new (p, m, v).
pub fn adam(p: f64, g: f64, m: f64, v: f64, at: &StepScalars) -> (f64, f64, f64) {
    adamw(p, g + at.hyper.weight_decay * p, m, v, &at.without_decay())
}

/// SGD with momentum and L2 decay, in PyTorch's form: g ← g + wd·p; v ← momentum·v + g; p ← p − lr·v. Returns the new (p, v).
pub fn sgd(p: f64, g: f64, v: f64, at: &StepScalars) -> (f64, f64) {
    let h = &at.hyper;
    let g = g + h.weight_decay * p;
    let v = h.momentum * v + g;
    (p - h.lr * v, v)
}

/// LAMB's direction (arXiv:1904.00962, algorithm 2): m, v updated; u = (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε) + wd·p. Returns (u, m, v).
pub fn lamb_direction(p: f64, g: f64, m: f64, v: f64, at: &StepScalars) -> (f64, f64, f64) {
    let h = &at.hyper;
    let t = i32::try_from(at.step).unwrap_or(i32::MAX);
    let m = h.beta1 * m + (1.0 - h.beta1) * g;
    let v = h.beta2 * v + (1.0 - h.beta2) * g * g;
    let denom = v.sqrt() / (1.0 - h.beta2.powi(t)).sqrt() + h.eps;
    (m / (1.0 - h.beta1.powi(t)) / denom + h.weight_decay * p, m, v)
}

/// How far LAMB goes in the direction u of a parameter w, from Σ w² and Σ u² over all its elements: ‖w‖/‖u‖ (the paper's φ is the identity); 1 where either is zero. It is taken of every parameter,
/// as in the paper, of those that weight decay does not pull too.
pub fn trust_ratio([weight, direction]: [f64; 2]) -> f64 {
    if weight > 0.0 && direction > 0.0 { (weight / direction).sqrt() } else { 1.0 }
}

/// What one element adds to the sums that [`trust_ratio`] takes.
pub fn trust_terms(p: f64, g: f64, [m, v]: [f64; 2], at: &StepScalars) -> [f64; 2] {
    let (u, ..) = lamb_direction(p, g, m, v, at);
    [p * p, u * u]
}

/// The new (p, first moment, second moment); a moment the optimizer does not have stays. `trust` is the parameter's ratio, for an optimizer that
/// [trusts](Optimizer::trusts).
pub fn update(optimizer: Optimizer, p: f64, g: f64, [m, v]: [f64; 2], at: &StepScalars, trust: f64) -> (f64, [f64; 2]) {
    match optimizer {
        Optimizer::AdamW => {
            let (p, m, v) = adamw(p, g, m, v, at);
            (p, [m, v])
        }
        Optimizer::Adam => {
            let (p, m, v) = adam(p, g, m, v, at);
            (p, [m, v])
        }
        Optimizer::Sgd => {
            let (p, m) = sgd(p, g, m, at);
            (p, [m, v])
        }
        Optimizer::Lamb => {
            let (u, m, v) = lamb_direction(p, g, m, v, at);
            (p - at.hyper.lr * trust * u, [m, v])
        }
    }
}
