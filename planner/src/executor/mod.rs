//! Executors: what another framework makes of a layout, so that runs other people published can be priced.
//!
//! The model: a decoder whose layers are alike but for routed experts, cut as a [`Layout`] says, run by an [`Executor`] on a [`Machine`](crate::machine::Machine). Matrix products and
//! collectives take what the machine description says, as everywhere in the planner; the executor says which kernels there are, what overlaps, and which
//! buffers exist for how long. What no table of hardware says is in [`Constants`]: a dozen named numbers for all executors together, fitted to published
//! runs, each with its meaning. Nothing here is used to choose plans of dplan's own runtime.

mod decoder;
#[cfg(test)]
mod fixtures;
mod memory;
mod price;
mod stages;

pub use decoder::{Decoder, Embeddings, Experts, Latent, Mlp};
pub use dplan_ir::plan::Recompute;
pub use memory::memory;
pub use price::price;

use crate::machine::fitted;
use crate::units::Bytes;

/// How a run is cut.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Layout {
    pub dp: u64,
    pub tp: u64,
    pub pp: u64,
    pub cp: u64,
    /// Ranks, of those that see different data, that divide the experts; each expert is divided by tensor parallelism, as everything is.
    pub ep: u64,
    /// Chunks of layers of a stage.
    pub virtual_stages: u64,
    /// Sequences.
    pub micro_batch: u64,
    pub micro_batches: u64,
    pub zero: u64,
    /// Selective: the scores of attention in Megatron; about half the operators in FSDP2.
    pub recompute: Recompute,
    pub activations: Activations,
    pub precision: Precision,
}

impl Layout {
    /// Tokens of one micro-batch on one rank.
    fn tokens(&self, model: &Decoder) -> f64 {
        (model.sequence * self.micro_batch) as f64 / self.cp as f64
    }
    /// Ranks that have the same parameters.
    fn replicas(&self) -> u64 {
        self.dp * self.cp
    }
    /// Ranks that have the same experts.
    fn expert_replicas(&self) -> u64 {
        (self.replicas() / self.ep).max(1)
    }
}

/// Between the parallel parts of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activations {
    Replicated,
    /// Sequence parallelism.
    Sharded,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Precision {
    /// Sixteen bits, gradients kept in sixteen.
    Half,
    /// Sixteen bits, gradients summed in thirty-two.
    Mixed,
    /// Products in eight bits with one scale for a tensor.
    Eight,
    /// With a scale for each row, whose bookkeeping costs what the products gain.
    EightByRow,
}

/// Which framework.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Executor {
    /// Megatron-LM of 2020 to 2022: attention by batched products and a fused softmax.
    Megatron2021,
    /// Megatron-Core: flash attention, transfers between stages behind computation.
    MegatronCore,
    /// DeepSpeed, alone (ZeRO-3 without overlap) or under Megatron with its pipeline.
    DeepSpeed,
    /// PyTorch FSDP2, eager.
    Fsdp2,
    /// The same under `torch.compile`.
    Fsdp2Compiled,
    /// Composer's FSDP of 2023 with Triton attention.
    MosaicFsdp,
    /// Nanotron of 2023: cut as Megatron cuts, eager, nothing overlapped.
    Nanotron,
}

impl Executor {
    pub const ALL: [Executor; 7] = [
        Executor::Megatron2021,
        Executor::MegatronCore,
        Executor::DeepSpeed,
        Executor::Fsdp2,
        Executor::Fsdp2Compiled,
        Executor::MosaicFsdp,
        Executor::Nanotron,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Executor::Megatron2021 => "megatron-2021",
            Executor::MegatronCore => "megatron-core",
            Executor::DeepSpeed => "deepspeed",
            Executor::Fsdp2 => "fsdp2",
            Executor::Fsdp2Compiled => "fsdp2-compiled",
            Executor::MosaicFsdp => "mosaic-fsdp",
            Executor::Nanotron => "nanotron",
        }
    }
    fn flash(self) -> bool {
        match self {
            Executor::Megatron2021 | Executor::DeepSpeed => false,
            Executor::MegatronCore | Executor::Fsdp2 | Executor::Fsdp2Compiled | Executor::MosaicFsdp | Executor::Nanotron => true,
        }
    }
    fn megatron(self) -> bool {
        match self {
            Executor::Megatron2021 | Executor::DeepSpeed | Executor::MegatronCore | Executor::Nanotron => true,
            Executor::Fsdp2 | Executor::Fsdp2Compiled | Executor::MosaicFsdp => false,
        }
    }
}

/// How many constants there are.
pub const CONSTANTS: usize = 12;

/// What no table of hardware says, for all executors together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Constants(pub [f64; CONSTANTS]);

/// A constant by its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Constant {
    /// Rate of products inside a training step over that of a benchmark, on A100 and V100.
    SustainedA100,
    /// On H100 with the libraries of 2023.
    SustainedH100,
    /// On H100 and H200 with the libraries of 2024.
    SustainedH100Late,
    SustainedB200,
    /// Speed of the Triton attention kernel over flash attention.
    TritonAttention,
    /// Memory traffic of norms, activations and residual sums over that of fused kernels, eager.
    ElementwiseEager,
    /// In Megatron, and compiled.
    ElementwiseFused,
    /// Bytes moved for each parameter and micro-batch in DeepSpeed's accumulation of gradients.
    DeepSpeedAccumulation,
    /// Line rate of the one network that no source states (Nanotron's old benchmark), gigabits per second of a node.
    UnstatedNetwork,
    /// Time that devices wait for the host at a transfer between stages whose shape it reads first (Nanotron), seconds.
    HostHop,
    /// What Omni-Path without direct access to device memory reaches of a network that has it, at the same line rate.
    OmniPath,
    /// Least time of the host for the forward pass of a layer, seconds; 1.6 times as much backward.
    HostLayer,
}

impl Constant {
    pub const ALL: [(Constant, &'static str); CONSTANTS] = [
        (Constant::SustainedA100, "sustained_a100"),
        (Constant::SustainedH100, "sustained_h100_2023"),
        (Constant::SustainedH100Late, "sustained_h100_2024"),
        (Constant::SustainedB200, "sustained_b200"),
        (Constant::TritonAttention, "triton_attention"),
        (Constant::ElementwiseEager, "elementwise_eager"),
        (Constant::ElementwiseFused, "elementwise_fused"),
        (Constant::DeepSpeedAccumulation, "deepspeed_accumulation_bytes"),
        (Constant::UnstatedNetwork, "unstated_network_gigabits"),
        (Constant::HostHop, "host_hop_seconds"),
        (Constant::OmniPath, "omni_path"),
        (Constant::HostLayer, "host_layer_seconds"),
    ];
}

impl Constants {
    /// As fitted by `dplan replay --refit` to the published runs.
    pub const FITTED: Constants = Constants([0.9436, 0.7778, 0.8785, 0.6678, 0.7115, 2.956, 1.2062, 43.36, 116.6, 0.0116, 0.2967, 0.00203]);

    pub fn get(&self, constant: Constant) -> f64 {
        self.0[constant as usize]
    }
}

/// Where the time of a step goes, seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Step {
    pub compute: f64,
    pub exposed_comm: f64,
    pub bubble: f64,
    pub optimizer: f64,
}

impl Step {
    pub fn seconds(&self) -> f64 {
        self.compute + self.exposed_comm + self.bubble + self.optimizer
    }
}

/// Memory of the fullest rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// What the allocator has given out at the peak.
    pub allocated: Bytes,
    /// What the driver shows: with context, communicators and the allocator's spare blocks.
    pub device: Bytes,
}

/// Devices that executors tell apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Generation {
    Ampere,
    Hopper,
    Blackwell,
    /// V100, and whatever nobody published runs of.
    Other,
}

impl Generation {
    /// By a device's name.
    fn of(device: &str) -> Generation {
        match device {
            d if d.starts_with("a100") || d == "a800" => Generation::Ampere,
            d if d.starts_with('h') || d.starts_with("gh") => Generation::Hopper,
            d if d.starts_with('b') || d.starts_with("gb") => Generation::Blackwell,
            _ => Generation::Other,
        }
    }

    /// Rates of flash attention over the peak of the device, forward and backward, the masked half not counted.
    ///
    /// A100 and B200: medians of the operator benchmarks in SimuMax (causal kernels of 4096 tokens). H100, H200: the FlashAttention-2 kernels that the
    /// frameworks of 2023 and 2024 call (arXiv:2307.08691 §4.1: up to 335 TFLOP/s without Hopper instructions), but Megatron-Core calls cuDNN's (arXiv:2407.08608
    /// figures 5 and 6, heads of 128: near 0.6 and 0.5 of the peak). V100: no such kernel, batched products.
    fn attention_rate(self, executor: Executor) -> (f64, f64) {
        match self {
            Generation::Ampere => (0.55, 0.46),
            Generation::Hopper if executor == Executor::MegatronCore => (0.57, 0.48),
            Generation::Hopper => (0.40, 0.32),
            Generation::Blackwell => (0.40, 0.38),
            Generation::Other => (0.30, 0.25),
        }
    }
}

/// Networks that no table measured, by what sources call them: α in nanoseconds, β in bytes/s of one device and direction, four fifths of the line rate.
pub fn line_rate(bits_per_second_per_node: f64, per_node: u64) -> fitted::Network {
    let bandwidth = (0.8 * bits_per_second_per_node / 8.0 / per_node.max(1) as f64) as u64;
    fitted::Network { name: "line rate", latency: 7_000, bandwidth, rows: 0, large: 0, small: 0 }
}
