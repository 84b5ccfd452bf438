//! Why a plan cannot be lowered.

use dplan_ir::dtype::DType;
use dplan_ir::rule::Label;

/// A plan that does not fit its graph, or that no program can carry out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LowerError {
    #[error("the graph has no backward pass: differentiate it first")]
    NotDifferentiated,
    #[error("the schedule {schedule} needs {needs}")]
    Pipeline { schedule: &'static str, needs: &'static str },
    #[error("ZeRO {found} with the schedule {schedule}: gradients of a backward pass in halves stay whole until the end of the step, so ZeRO 0 or 1")]
    PartedZero { schedule: &'static str, found: u8 },
    #[error("the graph has no loss")]
    NoLoss,
    #[error("layer {layer} hands no value to the next, or more than one")]
    Crossing { layer: u32 },
    #[error("`{value}` is handed to the next layer and also used by its own layer {layer}; a boundary is used by the next layer only")]
    BoundaryReused { value: String, layer: u32 },
    #[error("layer {layer} has {nodes} forward nodes, its strategy {found} assignments")]
    Strategy { layer: u32, nodes: usize, found: usize },
    #[error("`{node}` has no factor `{label}`")]
    UnknownFactor { node: String, label: Label },
    #[error("factor `{label}` of `{node}` cannot be split")]
    WholeFactor { node: String, label: Label },
    #[error("the strategy of `{node}` uses an axis twice")]
    AxisTwice { node: String },
    #[error("the strategy of `{node}` uses an axis that is not tensor-parallel")]
    ForeignAxis { node: String },
    #[error("dim `{dim}` of `{value}` has size {size}, which {ways} ranks do not divide")]
    Indivisible { dim: String, value: String, size: u64, ways: u64 },
    #[error("boundary `{value}` has no dim {dim} to shard")]
    BoundaryDim { value: String, dim: u32 },
    #[error("`{value}` is read before anything in its layer makes it")]
    Undefined { value: String },
    #[error("the uses of parameter `{param}` need different shardings")]
    ParamShardings { param: String },
    #[error("{ep} expert-parallel ranks are no divisor of {dp} data-parallel ranks")]
    Experts { dp: u64, ep: u64 },
    #[error("parameter `{param}` is used by no layer")]
    UnusedParam { param: String },
    #[error("the gradient of `{param}` is not a sum over the data-parallel ranks: its use does not depend on the batch")]
    NotOverData { param: String },
    #[error("a gradient of the shared parameter `{param}` is made in a layer that does not use it")]
    StrayGradient { param: String },
    #[error("routed value `{value}` cannot change its sharding, only be reduced")]
    Routed { value: String },
    #[error("the plan names {found} layers, the graph has {layers}")]
    LayerCount { layers: u32, found: usize },
    #[error("layer {layer} uses option {option}, but the plan has {options}")]
    Option { layer: u32, option: u32, options: usize },
    #[error("stage {stage} begins with layer {found}, expected {expected}; stages must follow one another and cover all layers")]
    Stages { stage: usize, expected: u32, found: u32 },
    #[error("the plan's micro-batch is {plan} sequences over all data-parallel ranks, the graph's is {graph}")]
    Batch { plan: u64, graph: u64 },
    #[error("{what} is 0, expected at least 1")]
    Zero { what: &'static str },
    #[error("{what} is {found}, expected at most {most}")]
    TooLarge { what: &'static str, found: u64, most: u64 },
    #[error("ZeRO stage {found}, expected 0 to 3")]
    ZeroStage { found: u8 },
    #[error("the homes of tied parameter `{param}` have different ZeRO stages or ways of offloading")]
    TiedStates { param: String },
    #[error(
        "{schedule} runs backward passes in halves, between which parameters, gradients and activations stay: offload {found}, expected none or optimizer"
    )]
    PartedOffload { schedule: &'static str, found: String },
    #[error(
        "clip none in {compute}: the factor that clips is what scales the loss back and finds overflow, so clip by the global norm (`global_norm`)"
    )]
    Unclipped { compute: DType },
    #[error(
        "clip global_norm with the schedule {schedule}: the norm is over all stages, and none waits for others between its updates, so clip none"
    )]
    StaleNorm { schedule: &'static str },
    #[error(
        "ZeRO {found} with the schedule {schedule}: backward passes work with earlier versions of whole parameters, and each has all of its own gradients, so ZeRO 0 or 1"
    )]
    StaleZero { schedule: &'static str, found: u8 },
    #[error(
        "offload {found} with the schedule {schedule}: every micro-batch has an update of its own, so states stay, and frames with them: expected none"
    )]
    StaleOffload { schedule: &'static str, found: String },
    #[error(
        "`{param}` is used by several layers, and the schedule {schedule} on several stages updates each stage at its own times: expected one stage, or no parameter that layers share"
    )]
    StaleTie { schedule: &'static str, param: String },
    #[error(
        "wire {wire} with ZeRO {found}: what is left over of compressed gradients is kept from step to step, and counts in one exchange a step, so ZeRO 0 or 1"
    )]
    CompressedZero { wire: String, found: u8 },
    #[error("wire {wire} in {compute}: what is left over is in the scale of the loss, which changes, so compute in bf16 or f32")]
    CompressedScale { wire: String, compute: DType },
    #[error("`{first}` and `{second}` are both used by several layers; one such parameter is supported")]
    SeveralTied { first: String, second: String },
}
