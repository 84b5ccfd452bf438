//! What a step is given that is no part of a plan: the optimizer's settings, from step to step.

use super::Args;
use crate::planfile::PlanFile;
use clap::ValueEnum;
use dplan_ir::optimizer::{DecayGroups, Hyper, Optimizer};
use dplan_ir::plan::Clip;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LrSchedule {
    Constant,
    /// Falls to 0 in a straight line.
    Linear,
    /// Falls to 0 along half a cosine.
    Cosine,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Decay {
    All,
    /// All parameters but the weights of norms, biases and sinks.
    Matrices,
}

impl Decay {
    pub fn groups(self) -> DecayGroups {
        match self {
            Decay::All => DecayGroups::All,
            Decay::Matrices => DecayGroups::Matrices,
        }
    }
}

pub fn hyper(args: &Args, file: &PlanFile, step: u64) -> Hyper {
    let lr = if step < args.warmup {
        args.lr * (step + 1) as f64 / args.warmup as f64
    } else {
        let left = (args.steps - args.warmup.min(args.steps)).max(1) as f64;
        let done = (step - args.warmup) as f64 / left;
        args.lr
            * match args.lr_schedule {
                LrSchedule::Constant => 1.0,
                LrSchedule::Linear => 1.0 - done,
                LrSchedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            }
    };
    let clip = match file.plan.clip {
        Clip::None => f64::INFINITY,
        Clip::GlobalNorm => args.clip.unwrap_or(1.0),
    };
    let (beta1, beta2) = match file.plan.optimizer {
        Optimizer::AdamW | Optimizer::Adam | Optimizer::Sgd | Optimizer::Lamb => args.betas,
    };
    Hyper { lr, beta1, beta2, eps: args.eps, weight_decay: args.weight_decay, momentum: args.momentum, clip }
}
