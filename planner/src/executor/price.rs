//! Time of a step.
//!
//! ```text
//! layer  = products + attention + elementwise + experts + collectives        (forward; backward: two products each, attention ×2.5, elementwise ×1.7)
//! stage  = layers · (forward + backward + recompute) [+ head]                (of one micro-batch)
//! step   = m · slowest stage + (others once)/virtual + transfers + synchronisation − what overlaps + optimizer
//! ```

use super::decoder::{Block, Product};
use super::stages::{Stage, stages};
use super::{Activations, Constant, Constants, Decoder, Executor, Experts, Generation, Layout, Precision, Recompute, Step};
use crate::cost::comm::{Group, group_time, message_seconds};
use crate::machine::curves::Op;
use crate::machine::{DeviceSpec, Machine};
use dplan_ir::program::Pattern;

/// Kernels of a layer's elementwise work.
const ELEMENTWISE_KERNELS: f64 = 14.0;

/// The optimizer reads and writes gradient, moments, master copy and parameter.
const OPTIMIZER_BYTES: f64 = 32.0;

/// Bytes moved for each logit by a loss whose kernels are fused: 16-bit logits, a 32-bit copy, its gradient, and that in 16 bits.
const FUSED_LOGITS: f64 = 20.0;

/// Rate of products in eight bits over sixteen, as datasheets have it.
const EIGHT_BIT_GAIN: f64 = 2.0;

/// By Nanotron's (`sharded_cross_entropy`): a 32-bit copy, its maximum, differences, exponentials, their sum and quotients, each a kernel; backward one product
/// and the cast back.
const EAGER_LOGITS: f64 = 54.0;

/// Time of one step, by its parts.
pub fn price(model: &Decoder, layout: &Layout, executor: Executor, machine: &Machine, constants: &Constants) -> Step {
    let pass = Pass { model, layout, executor, machine, device: &machine.device, constants };
    let (dense, routed) = (pass.layer(Block::Dense), pass.layer(Block::Routed));
    let of = |block: Block| match block {
        Block::Dense => dense,
        Block::Routed => routed,
    };
    let stages = stages(model, layout, executor);
    let m = layout.micro_batches as f64;
    let time = |(at, stage): (usize, &Stage)| {
        let head = if at + 1 == stages.len() { pass.head() } else { 0.0 };
        stage.sum(|block| of(block).0.total() + of(block).1.total()) + head
    };
    let slowest = stages.iter().enumerate().map(time).fold(0.0, f64::max);
    // The first micro-batch on its way through all stages, less the one it is counted in.
    let all: f64 = stages.iter().enumerate().map(time).sum();
    let filling = (all - slowest).max(0.0) / layout.virtual_stages as f64;

    let traffic = stages.iter().map(|stage| stage.sum(|block| of(block).0.traffic + of(block).1.traffic)).fold(0.0, f64::max);
    let synchronisation = stages.iter().map(|&stage| pass.synchronisation(stage, of)).fold(0.0, f64::max);
    let update = stages.iter().map(|&stage| pass.updated(stage)).fold(0.0, f64::max);
    Step {
        compute: m * (slowest - traffic.min(slowest)),
        exposed_comm: m * traffic.min(slowest) + synchronisation + pass.transfers(),
        bubble: filling,
        optimizer: pass.sweep(OPTIMIZER_BYTES * update),
    }
}

struct Pass<'a> {
    model: &'a Decoder,
    layout: &'a Layout,
    executor: Executor,
    machine: &'a Machine,
    device: &'a DeviceSpec,
    constants: &'a Constants,
}

/// Time of one pass of a layer.
#[derive(Clone, Copy, Default)]
struct Layer {
    work: f64,
    /// Of tensor and context parallelism, and rows to experts and back; not overlapped.
    traffic: f64,
}

impl Layer {
    fn total(&self) -> f64 {
        self.work + self.traffic
    }
}

impl Pass<'_> {
    fn get(&self, constant: Constant) -> f64 {
        self.constants.get(constant)
    }

    fn generation(&self) -> Generation {
        Generation::of(&self.device.name)
    }

    /// A part with less power reaches less in proportion: products run at the power limit.
    fn sustained(&self) -> f64 {
        let power = if self.device.name == "h100-96g" { 500.0 / 700.0 } else { 1.0 };
        let rate = self.get(match self.generation() {
            Generation::Hopper => match self.executor {
                Executor::MosaicFsdp | Executor::Megatron2021 | Executor::DeepSpeed | Executor::Nanotron => Constant::SustainedH100,
                Executor::MegatronCore | Executor::Fsdp2 | Executor::Fsdp2Compiled => Constant::SustainedH100Late,
            },
            Generation::Blackwell => Constant::SustainedB200,
            Generation::Ampere | Generation::Other => Constant::SustainedA100,
        });
        rate * power
    }

    fn launch(&self) -> f64 {
        self.device.launch.seconds()
    }

    fn bandwidth(&self) -> f64 {
        self.device.bandwidth_efficiency.of(self.device.bandwidth).0 as f64
    }

    fn peak(&self) -> f64 {
        self.device.peak.f16.0 as f64
    }

    /// A kernel that moves so many bytes.
    fn sweep(&self, bytes: f64) -> f64 {
        self.launch() + bytes / self.bandwidth()
    }

    /// `count` products of `m × n × k` in one kernel.
    fn product(&self, count: f64, m: f64, n: f64, k: f64, gain: f64) -> f64 {
        let (g, h) = (self.device.matrix_grain as f64, self.device.matrix_depth_grain as f64);
        let grown = 2.0 * count * m * n * k * (1.0 + g / m) * (1.0 + g / n) * (1.0 + h / k);
        let rate = self.peak() * self.device.matrix_efficiency.0 as f64 * 1e-6 * self.sustained() * gain;
        let bytes = 2.0 * count * (m * k + n * k + m * n);
        self.launch() + (grown / rate).max(bytes / self.bandwidth())
    }

    /// Products of `tokens` rows in one layer, and those of its gradients.
    fn products(&self, count: f64, tokens: f64, products: &[Product], gain: f64) -> (f64, f64) {
        let forward = products.iter().map(|p| self.product(count, tokens, p.width, p.depth, gain)).sum();
        let backward =
            products.iter().map(|p| self.product(count, tokens, p.depth, p.width, gain) + self.product(count, p.width, p.depth, tokens, gain));
        (forward, backward.sum())
    }

    /// Forward, and backward with what is computed again.
    fn layer(&self, block: Block) -> (Layer, Layer) {
        let (model, layout) = (self.model, self.layout);
        let (t, tokens, hidden) = (layout.tp as f64, self.layout.tokens(self.model), model.hidden as f64);
        let gain = match layout.precision {
            Precision::Half | Precision::Mixed | Precision::EightByRow => 1.0,
            Precision::Eight => EIGHT_BIT_GAIN,
        };
        let common = [model.attention_products(t), model.mlp_products(block, t)].concat();
        let (forward_products, backward_products) = self.products(1.0, tokens, &common, gain);
        let (attention, attention_back) = self.attention();

        // Norms, residual sums, dropout and their gradients read and write a dozen 16-bit tensors of the hidden width, activations one or two of the MLP's.
        let sharded = if layout.activations == Activations::Sharded { t } else { 1.0 };
        let factor = match self.executor {
            Executor::Megatron2021 | Executor::MegatronCore | Executor::DeepSpeed | Executor::Fsdp2Compiled => Constant::ElementwiseFused,
            Executor::Fsdp2 | Executor::MosaicFsdp | Executor::Nanotron => Constant::ElementwiseEager,
        };
        let narrow = model.common_ffn(block) as f64 / t;
        // Queries, keys and values of latent attention are put together from their parts.
        let joined = if model.latent.is_some() { 4.0 * (2.0 * model.query_width() + (model.heads * model.head_dim) as f64) / t } else { 0.0 };
        let traffic = (24.0 * self.get(factor) * hidden / sharded + 2.0 * (model.wide(narrow) + narrow) + joined) * tokens;
        let kernels = ELEMENTWISE_KERNELS * self.launch();
        let (elementwise, elementwise_back) = (traffic / self.bandwidth() + kernels, 1.7 * traffic / self.bandwidth() + kernels);
        let (experts, experts_back) = model.experts_of(block).map_or_else(Default::default, |experts| self.experts(experts, gain));

        // Megatron-Core passes keys and values around a ring, beside the attention to those at hand.
        let beside = if self.executor == Executor::MegatronCore { attention } else { 0.0 };
        let collectives = self.tensor_collectives() + (self.context_collectives() - beside).max(0.0);
        // The gathered input of a product is gathered again for its weight gradient.
        let again = if layout.activations == Activations::Sharded { 1.25 } else { 1.0 };
        let mut forward = Layer { work: forward_products + attention + elementwise + experts.work, traffic: collectives + experts.traffic };
        let mut backward = Layer {
            work: backward_products + attention_back + elementwise_back + experts_back.work,
            traffic: collectives * again + experts_back.traffic,
        };
        if matches!(self.executor, Executor::MegatronCore | Executor::Nanotron) {
            let host = self.get(Constant::HostLayer);
            forward.work = forward.work.max(host - forward.traffic);
            backward.work = backward.work.max(1.6 * host - backward.traffic);
        }
        match layout.recompute {
            Recompute::None => {}
            Recompute::Selective if self.executor.megatron() => backward.work += attention,
            Recompute::Selective => backward.work += elementwise + 0.5 * forward_products,
            Recompute::Full => {
                backward.work += forward.work;
                backward.traffic += forward.traffic;
            }
        }
        if self.executor.megatron() {
            let bytes = match self.executor {
                Executor::DeepSpeed => self.get(Constant::DeepSpeedAccumulation),
                // A 16-bit gradient is added to a 32-bit one.
                _ => 6.0,
            };
            let own = model.common_parameters(block, t) + if block == Block::Routed { self.own_experts() } else { 0.0 };
            backward.work += self.sweep(bytes * own);
        }
        (forward, backward)
    }

    /// Routed experts, forward and backward: rows are put in the order of experts and sent to their ranks, pass two products, come back, and are summed.
    fn experts(&self, experts: Experts, gain: f64) -> (Layer, Layer) {
        let (model, layout) = (self.model, self.layout);
        let t = layout.tp as f64;
        // Tokens are spread evenly over experts.
        let rows = self.layout.tokens(self.model) * experts.chosen as f64;
        let here = (experts.count as f64 / layout.ep as f64).max(1.0);
        let (forward, backward) = self.products(here, rows / here, &model.expert_products(experts, t), gain);
        let (hidden, narrow) = (model.hidden as f64, experts.ffn as f64 / t);
        // Five times a row is read and written: into the order of ranks, of experts, back again twice, and scaled by its weight; the activation reads and writes
        // what is between products.
        let moved = self.sweep(20.0 * hidden * rows) + self.sweep(2.0 * (model.wide(narrow) + narrow) * rows);
        // Tensor-parallel ranks send what each of them has, and put together what they need.
        let bytes = 2.0 * hidden * rows;
        let together =
            if layout.tp > 1 { self.tensor_time(Pattern::AllGather, bytes) + self.tensor_time(Pattern::ReduceScatter, bytes) } else { 0.0 };
        let traffic = 2.0 * self.all_to_all(bytes / t) + together;
        (Layer { work: forward + moved, traffic }, Layer { work: backward + 1.7 * moved, traffic })
    }

    /// Rows to the ranks of their experts.
    fn all_to_all(&self, bytes: f64) -> f64 {
        let ranks = self.layout.ep;
        if ranks == 1 {
            return 0.0;
        }
        let group = self.spread(ranks);
        let part = |members: u64| bytes * members as f64 / ranks as f64;
        let inside = self.machine.curves.time(Op::AllToAll, group.local, part(group.local) as u64, self.machine.intra.latency);
        let near = inside.map_or_else(|| message_seconds(self.machine.intra, part(group.local - 1)), |time| time.seconds());
        let far = if group.nodes > 1 { message_seconds(self.machine.inter, part(ranks - group.local)) } else { 0.0 };
        near.max(far)
    }

    /// Forward and backward.
    fn attention(&self) -> (f64, f64) {
        let (model, layout) = (self.model, self.layout);
        let (heads, s, d) = ((model.heads as f64 / layout.tp as f64).max(1.0), model.sequence as f64, model.head_dim as f64);
        let count = layout.micro_batch as f64 * heads;
        if self.executor.flash() {
            let (rate, rate_back) = self.generation().attention_rate(self.executor);
            let mut speed = self.peak() * self.sustained();
            if self.executor == Executor::MosaicFsdp {
                speed *= self.get(Constant::TritonAttention);
            }
            if model.head_dim < 128 {
                speed *= 0.8;
            }
            // Both products over the unmasked half.
            let flops = count * s * s * (d + model.query_width() / model.heads as f64) / layout.cp as f64;
            return (self.launch() + flops / (speed * rate), self.launch() + 2.5 * flops / (speed * rate_back));
        }
        // Heads that do not divide into eights do not reach the matrix units: half the peak of the others.
        let aligned = model.head_dim.is_multiple_of(8) && (model.heads * model.head_dim / layout.tp).is_multiple_of(8);
        let products = if aligned {
            self.product(count, s, s, d, 1.0) + self.product(count, s, d, s, 1.0)
        } else {
            2.0 * (self.launch() + 2.0 * count * s * s * d / (0.5 * self.device.peak.f32.0 as f64))
        };
        let scores = count * s * s;
        // Softmax reads and writes scores; dropout writes a mask too; ALiBi is one more sum.
        let (pass, back) = if self.executor == Executor::DeepSpeed { (8.0, 6.0) } else { (9.0, 11.0) };
        (products + self.sweep(pass * scores) + self.launch(), 2.0 * products + self.sweep(back * scores) + self.launch())
    }

    /// Both collectives of a layer and pass.
    fn tensor_collectives(&self) -> f64 {
        if self.layout.tp == 1 {
            return 0.0;
        }
        let bytes = 2.0 * self.layout.tokens(self.model) * self.model.hidden as f64;
        let one = match self.layout.activations {
            Activations::Replicated => self.tensor_time(Pattern::AllReduce, bytes),
            Activations::Sharded => self.tensor_time(Pattern::AllGather, bytes) + self.tensor_time(Pattern::ReduceScatter, bytes),
        };
        // Where it runs beside products (asynchronous tensor parallelism), they take as much longer.
        2.0 * one
    }

    /// Over the ranks of a tensor-parallel group.
    fn tensor_time(&self, pattern: Pattern, bytes: f64) -> f64 {
        let local = self.layout.tp.min(self.machine.per_node);
        let group = Group { local, nodes: self.layout.tp.div_ceil(local) };
        group_time(self.machine, group, pattern, bytes as u64).seconds()
    }

    /// Keys and values of the whole sequence, gathered over context-parallel ranks; their gradients go back the same way.
    fn context_collectives(&self) -> f64 {
        let layout = self.layout;
        if layout.cp == 1 {
            return 0.0;
        }
        let keys = if self.model.latent.is_some() { self.model.query_width() } else { (self.model.kv_heads * self.model.head_dim) as f64 };
        let width = (keys + (self.model.kv_heads * self.model.head_dim) as f64) / layout.tp as f64;
        let bytes = 2.0 * (self.model.sequence * layout.micro_batch) as f64 * width;
        group_time(self.machine, self.spread(layout.cp), Pattern::AllGather, bytes as u64).seconds()
    }

    /// Logits, loss and their gradients.
    fn head(&self) -> f64 {
        let vocab = self.model.vocab as f64 / self.layout.tp as f64;
        let bytes = if self.executor == Executor::Nanotron { EAGER_LOGITS } else { FUSED_LOGITS };
        3.0 * self.product(1.0, self.layout.tokens(self.model), vocab, self.model.hidden as f64, 1.0)
            + self.sweep(bytes * self.layout.tokens(self.model) * vocab)
    }

    /// Parameters of a stage on one rank that all ranks with other data have too, and its experts'.
    fn parameters(&self, stage: Stage) -> (f64, f64) {
        let t = self.layout.tp as f64;
        let common = stage.sum(|block| self.model.common_parameters(block, t)) + (self.model.vocab * self.model.hidden) as f64 / t;
        (common, stage.routed * self.own_experts())
    }

    /// Weights of one layer's experts on one rank.
    fn own_experts(&self) -> f64 {
        self.model.expert_parameters() / (self.layout.ep * self.layout.tp) as f64
    }

    /// Parameters that a rank updates.
    fn updated(&self, stage: Stage) -> f64 {
        let (common, experts) = self.parameters(stage);
        let shards = |replicas: u64| if self.layout.zero >= 1 { replicas as f64 } else { 1.0 };
        common / shards(self.layout.replicas()) + experts / shards(self.layout.expert_replicas())
    }

    /// Tensor-parallel groups of a node; a part of one counts as one.
    fn groups_of_node(&self) -> u64 {
        (self.machine.per_node / self.layout.tp.min(self.machine.per_node)).max(1)
    }

    /// So many ranks of different tensor-parallel groups, as they lie on the nodes.
    fn spread(&self, ranks: u64) -> Group {
        let local = ranks.min(self.groups_of_node());
        Group { local, nodes: ranks.div_ceil(local) }
    }

    /// Gradients and gathered parameters of a step, as far as they are not hidden.
    fn synchronisation(&self, stage: Stage, of: impl Fn(Block) -> (Layer, Layer)) -> f64 {
        let (common, experts) = self.parameters(stage);
        if self.executor.megatron() && self.layout.zero < 3 {
            return self.once(common, self.layout.replicas()) + self.once(experts, self.layout.expert_replicas());
        }
        self.layout.micro_batches as f64 * stage.sum(|block| self.every_time(block, of(block)))
    }

    fn gradient_bytes(&self) -> f64 {
        match (self.executor, self.layout.precision) {
            (Executor::DeepSpeed | Executor::Megatron2021, _) | (_, Precision::Half) => 2.0,
            (_, Precision::Mixed | Precision::Eight | Precision::EightByRow) => 4.0,
        }
    }

    /// Gradients reduced, and parameters gathered, once a step.
    fn once(&self, parameters: f64, replicas: u64) -> f64 {
        if replicas == 1 || parameters == 0.0 {
            return 0.0;
        }
        let time = |pattern, bytes: f64| group_time(self.machine, self.spread(replicas), pattern, (bytes * parameters) as u64).seconds();
        if self.layout.zero == 0 {
            return time(Pattern::AllReduce, self.gradient_bytes());
        }
        // DeepSpeed's pipeline reduces whole gradients everywhere, whatever part of the states a rank holds.
        let reduction = if self.executor == Executor::DeepSpeed { Pattern::AllReduce } else { Pattern::ReduceScatter };
        time(reduction, self.gradient_bytes()) + time(Pattern::AllGather, 2.0)
    }

    /// One layer's parameters gathered and its gradients scattered for each micro-batch.
    fn every_time(&self, block: Block, (ahead, back): (Layer, Layer)) -> f64 {
        let routed = if block == Block::Routed { self.own_experts() } else { 0.0 };
        let parts = [(self.model.common_parameters(block, self.layout.tp as f64), self.layout.replicas()), (routed, self.layout.expert_replicas())];
        let transfers = |near: bool| {
            let mut both = (0.0, 0.0);
            for (parameters, replicas) in parts.into_iter().filter(|&(parameters, replicas)| replicas > 1 && parameters > 0.0) {
                let group = self.spread(replicas);
                let group = if near { Group { nodes: 1, ..group } } else { group };
                let time = |pattern, bytes: f64| group_time(self.machine, group, pattern, (bytes * parameters) as u64).seconds();
                let gather = if self.layout.zero == 3 { time(Pattern::AllGather, 2.0) + self.one_by_one(block, replicas) } else { 0.0 };
                both = (both.0 + gather, both.1 + gather + time(Pattern::ReduceScatter, self.gradient_bytes()));
            }
            both
        };
        // What runs on this device's links and units takes as long from its computation; what the network does beside it costs nothing.
        let (whole, near) = (transfers(false), transfers(true));
        let exposed = |transfer: f64, near: f64, work: f64| match self.executor {
            Executor::DeepSpeed => transfer,
            _ => (transfer - work).max(0.0) + near.min(work),
        };
        exposed(whole.0, near.0, ahead.total()) + exposed(whole.1, near.1, back.total())
    }

    /// What it takes beside the transfer that DeepSpeed's stage 3 of 2021 gathers one parameter at a time, weights and biases of products and norms, and waits for each
    /// (`partition_parameters.py`, `_allgather_param`): the steps of a ring, which is how NCCL gathers, and, since it gathers into a list with a tensor for each rank,
    /// a kernel that copies every rank's part there from where it arrived (`ProcessGroupNCCL::allgather`).
    fn one_by_one(&self, block: Block, replicas: u64) -> f64 {
        if self.executor != Executor::DeepSpeed {
            return 0.0;
        }
        let products = self.model.attention_products(1.0).len() + self.model.mlp_products(block, 1.0).len();
        let Group { local, nodes } = self.spread(replicas);
        let ring = ((local - 1) * nodes) as f64 * self.machine.intra.latency.seconds() + (nodes - 1) as f64 * self.machine.inter.latency.seconds();
        (2 * products + 4) as f64 * (ring + replicas as f64 * self.launch())
    }

    /// Activations and their gradients between stages.
    fn transfers(&self) -> f64 {
        let layout = self.layout;
        if layout.pp == 1 {
            return 0.0;
        }
        let whole = 2.0 * self.layout.tokens(self.model) * self.model.hidden as f64;
        let one_node = layout.dp * layout.tp * layout.pp * layout.cp <= self.machine.per_node;
        let (m, fill) = (layout.micro_batches as f64, 2.0 * (layout.pp as f64 - 1.0));
        let inside = |bytes: f64| message_seconds(self.machine.intra, bytes);
        let between = |bytes: f64| message_seconds(self.machine.inter, bytes);
        match self.executor {
            // Each rank sends its part, and the whole is gathered inside the node; only ranks of the last stage of a node use the network.
            Executor::DeepSpeed => {
                let part = whole / layout.tp as f64;
                let hop = if one_node { inside(part) } else { between(part / self.groups_of_node() as f64) };
                (2.0 * m + fill) * (hop + if layout.tp > 1 { inside(whole) } else { 0.0 })
            }
            // One tensor at a time, after its shape and strides, which the host reads before it goes on: never while anything computes.
            Executor::Nanotron => {
                let part = whole / layout.tp as f64;
                (2.0 * m + fill) * (self.get(Constant::HostHop) + if one_node { inside(part) } else { between(part) })
            }
            // The same as DeepSpeed, over the network that all ranks share.
            Executor::Megatron2021 => {
                let part = whole / layout.tp as f64;
                let gathered = if layout.activations == Activations::Sharded { 0.0 } else { inside(whole) };
                let hop = if one_node { inside(part) } else { between(part) + gathered };
                (2.0 * m * layout.virtual_stages as f64 + fill) * hop
            }
            Executor::MegatronCore | Executor::Fsdp2 | Executor::Fsdp2Compiled | Executor::MosaicFsdp => {
                let part = whole / layout.tp as f64;
                fill * if one_node { inside(part) } else { between(part) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{Mlp, fixtures};
    use crate::units::Nanos;

    /// A GPT's layer has twelve parameters: four weights, four biases, two norms. On 16 ranks of two nodes a ring has 14 steps inside nodes and one between, and
    /// each parameter is copied by 16 kernels.
    #[test]
    fn deepspeed_gathers_the_parameters_of_a_layer_one_by_one() {
        let model = Decoder { mlp: Mlp::Plain, ..fixtures::decoder() };
        let layout = Layout { dp: 16, zero: 3, precision: Precision::Half, ..fixtures::layout() };
        let mut machine = Machine::parse("a100-80g:8x2").unwrap();
        machine.device.launch = Nanos(4_000);
        machine.intra.latency = Nanos(1_000);
        machine.inter.latency = Nanos(7_000);
        let of =
            |executor| Pass { model: &model, layout: &layout, executor, machine: &machine, device: &machine.device, constants: &Constants::FITTED };
        let found = of(Executor::DeepSpeed).one_by_one(Block::Dense, 16);
        assert!((found - 12.0 * (14e-6 + 7e-6 + 64e-6)).abs() < 1e-12, "{found}");
        assert_eq!(of(Executor::MosaicFsdp).one_by_one(Block::Dense, 16), 0.0);
    }
}
