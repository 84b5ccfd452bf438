//! Plans that every engineer knows: what is chosen, and the reason. The models have the shapes of published ones.

mod common;

use common::options;
use dplan::compile::{Options, best};
use dplan::import::{ImportOptions, model_from_bytes};
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::plan::{Plan, Recompute, Zero};
use dplan_planner::machine::Machine;
use dplan_planner::predict::Prediction;
use dplan_planner::units::{Bytes, PerSecond};

const GPT2: &str = r#"{"model_type":"gpt2","vocab_size":50257,"n_positions":1024,"n_embd":768,"n_layer":12,"n_head":12}"#;
const LLAMA_8B: &str = r#"{"model_type":"llama","vocab_size":128256,"hidden_size":4096,"intermediate_size":14336,"num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":8,"max_position_embeddings":131072}"#;
const LLAMA_70B: &str = r#"{"model_type":"llama","vocab_size":128256,"hidden_size":8192,"intermediate_size":28672,"num_hidden_layers":80,"num_attention_heads":64,"num_key_value_heads":8,"max_position_embeddings":131072}"#;

fn import(config: &str, seq: u64) -> Graph {
    let options = ImportOptions { seq: Some(seq), compute: DType::Bf16, family: None };
    model_from_bytes("config.json", config.as_bytes(), &options).unwrap().graph
}

fn plan_on(graph: &Graph, cluster: Machine, batch: u64, pins: &str) -> (Plan, Prediction) {
    let options = Options { cluster, ..options("cpu:1", batch, DType::Bf16, pins) };
    best(graph, &options).unwrap()
}

fn cluster(text: &str) -> Machine {
    Machine::parse(text).unwrap()
}

/// ZeRO stage and recomputation of the blocks. Embedding and head are left out: what a lookup keeps costs nothing to make again.
fn blocks(plan: &Plan) -> impl Iterator<Item = (Zero, Recompute)> {
    (1..plan.layers.len() as u32 - 1).map(|l| (plan.layer(l).zero, plan.layer(l).recompute))
}

/// Everything fits on each device, so nothing is worth waiting for but the gradients: data parallelism, no recomputation, and parameters that are not gathered again in
/// each of several micro-batches.
#[test]
fn a_model_that_fits_with_room_is_trained_by_data_parallelism() {
    let (plan, _) = plan_on(&import(GPT2, 1024), cluster("h100:8x1"), 512, "micro=4");
    assert_eq!((plan.dp, plan.tp, plan.cp, plan.pp()), (8, 1, 1, 1));
    assert!(blocks(&plan).all(|(zero, recompute)| zero <= Zero(1) && recompute == Recompute::None), "{:?}", plan.options);
}

/// Gathering parameters in every pass and computing twice cost time, and only memory pays for them.
#[test]
fn parameters_are_sharded_and_layers_recomputed_only_when_memory_asks() {
    let graph = import(LLAMA_8B, 8192);
    let (tight, slow) = plan_on(&graph, cluster("a100-40g:8x4"), 512, "tp=1,cp=1,pp=1,micro=1");
    assert!(blocks(&tight).any(|(zero, recompute)| zero == Zero(3) || recompute != Recompute::None), "{:?}", tight.options);
    let mut roomy = cluster("a100-40g:8x4");
    roomy.device.memory = Bytes(roomy.device.memory.0 * 16);
    let (plan, quick) = plan_on(&graph, roomy, 512, "tp=1,cp=1,pp=1,micro=1");
    assert!(blocks(&plan).all(|(zero, recompute)| zero < Zero(3) && recompute == Recompute::None), "{:?}", plan.options);
    assert!(quick.step < slow.step);
}

/// A scatter and a gather move what an all-reduce does, and what is between them is done on a share of the sequence: norms are quicker and activations smaller.
#[test]
fn sequences_are_sharded_where_tensor_parallelism_makes_it_free() {
    let (plan, _) = plan_on(&import(LLAMA_70B, 4096), cluster("h100:8x4"), 64, "tp=8,cp=1");
    assert_eq!(plan.boundary, Some(1));
}

/// More memory, and quicker links, allow every plan that was there before.
#[test]
fn more_memory_and_quicker_links_are_never_slower() {
    let graph = import(LLAMA_8B, 4096);
    let step = |machine: &Machine| plan_on(&graph, machine.clone(), 64, "cp=1").1.step;
    let base = cluster("a100-40g:8x2");
    let own = step(&base);
    for percent in [150] {
        let scale = |rate: PerSecond| PerSecond(rate.0 * percent / 100);
        let mut memory = base.clone();
        memory.device.memory = Bytes(base.device.memory.0 * percent / 100);
        let mut inside = base.clone();
        inside.intra.bandwidth = scale(base.intra.bandwidth);
        let mut between = base.clone();
        between.inter.bandwidth = scale(base.inter.bandwidth);
        for (what, machine) in [("memory", memory), ("links in nodes", inside), ("links between nodes", between)] {
            let other = step(&machine);
            assert!(other <= own, "{percent} % {what}: {other} after {own}");
        }
    }
}
