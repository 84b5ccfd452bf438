//! Models that PyTorch's oracles do not have train on ranks on GPUs as on CPU ranks: with dropout, in every micro-batch and step, forwards and backwards, and other families. The GPUs are
//! stand-ins that run the generated kernels on this CPU.

mod common;
#[path = "common/devices.rs"]
mod devices;
#[path = "common/recording.rs"]
#[allow(dead_code)]
mod recording;

use std::sync::Arc;

use common::{options, scratch};
use devices::{codes, devices, end, kernels};
use dplan::compile::compile;
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::runtime::cuda::load::Code;
use dplan::runtime::{Options, Session};
use dplan_ir::dropout::Draws;
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{DecayGroups, Hyper, StepScalars};
use dplan_ir::program::Role;
use dplan_kernels::cuda::Target;
use dplan_kernels::cuda::arch::Arch;
use dplan_kernels::shim::{self, Library};
use recording::World;

const BATCH: u64 = 8;
const SEED: u64 = 5;
const HYPER: Hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };

const TARGET: Target = Target::of(Arch::Sm80);
/// An embedding and a residual block, both with dropout.
const MODEL: &str = r#"{
  "dplan": 1,
  "dims": { "b": "batch", "s": 6, "v": 19, "h": 24, "f": 16 },
  "inputs": [{ "name": "tokens", "dims": ["b", "s"] }, { "name": "targets", "dims": ["b", "s"] }],
  "params": { "table": ["v", "h"], "w1": ["f", "h"], "w2": ["h", "f"] },
  "nodes": [
    { "name": "x", "op": "embed", "in": ["table", "tokens"] },
    { "name": "x.kept", "op": "dropout", "rate": 0.25, "in": ["x"] },
    { "name": "up", "op": "einsum", "spec": "bsh,fh->bsf", "in": ["x.kept", "w1"] },
    { "name": "act", "op": "act", "function": "silu", "in": ["up"] },
    { "name": "down", "op": "einsum", "spec": "bsf,hf->bsh", "in": ["act", "w2"] },
    { "name": "down.kept", "op": "dropout", "rate": 0.5, "in": ["down"] },
    { "name": "y", "op": "add", "in": ["x.kept", "down.kept"] },
    { "name": "logits", "op": "einsum", "spec": "bsh,vh->bsv", "in": ["y", "table"] },
    { "name": "loss", "op": "cross_entropy", "in": ["logits", "targets"] }
  ],
  "loss": "loss"
}"#;

/// Trains under some plans on two stand-ins of GPUs, beside CPU ranks.
fn as_on_cpu_ranks(name: &str, forward: &Graph, plans: [&str; 2]) {
    on_cluster("cpu:2", name, forward, &plans);
}

/// Trains under some plans on stand-ins of GPUs, as many as a cluster has devices, beside CPU ranks.
fn on_cluster(cluster: &str, name: &str, forward: &Graph, plans: &[&str]) {
    if shim::compiler().is_none() {
        eprintln!("SKIPPED: no C++ compiler (set CXX, or install g++)");
        return;
    }
    let plan = |pins: &&str| {
        let file = compile(forward, &options(cluster, BATCH, DType::F32, pins)).unwrap_or_else(|e| panic!("{pins}: {e}")).file;
        assert_eq!(file.program.micro_batches, 2);
        (pins.to_string(), file.graph, file.program)
    };
    let plans: Vec<_> = plans.iter().map(plan).collect();
    let all: Vec<Code> = plans.iter().flat_map(|(_, graph, program)| codes(graph, program, DecayGroups::All, TARGET)).collect();
    let mut library = Library::compile(&scratch(&format!("cuda_models_{name}")), "kernels", kernels(&all)).unwrap_or_else(|e| panic!("{e}"));
    for (pins, graph, program) in plans {
        let world = World::new(library, TARGET, program.ranks(), 7);
        let mut ranks = devices(&graph, &program, &world, &Options::default()).unwrap_or_else(|e| panic!("{e}"));
        let feed = Feed::new(&graph, None, BATCH, SEED).unwrap();
        let mut session = Session::new(graph.clone(), program, &Options::default()).unwrap();
        ranks.initialise(SEED).unwrap();
        session.initialise(SEED).unwrap();
        for step in 0..3 {
            let draws = Draws { seed: SEED, sequence: step * BATCH };
            let scalars = StepScalars { draws, ..StepScalars::new(HYPER, step + 1, 1.0 / feed.targets() as f64) };
            let batch = Arc::new(feed.batch(step).unwrap());
            let (gpu, cpu) = (ranks.step(&scalars, &batch).unwrap(), session.step(&scalars, &batch).unwrap());
            assert!((gpu.loss - cpu.loss).abs() < 1e-5, "{pins} step {step}: loss {} and on CPU ranks {}", gpu.loss, cpu.loss);
            let (found, right) = (gpu.grad_norm.unwrap(), cpu.grad_norm.unwrap());
            assert!((found / right - 1.0).abs() < 1e-4, "{pins} step {step}: norm {found} and on CPU ranks {right}");
        }
        let (found, right) = (ranks.gather(Role::Param).unwrap(), session.params().unwrap());
        for (p, x) in found.iter() {
            assert!(x.iter().zip(&right[p]).all(|(a, b)| (a - b).abs() < 1e-4), "{pins}: `{}`", graph.values[graph.params[p].value].name);
        }
        drop(ranks);
        library = end(world);
    }
}

#[test]
fn gpus_drop_what_cpu_ranks_drop() {
    let forward = model_from_bytes("model.json", MODEL.as_bytes(), &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}")).graph;
    as_on_cpu_ranks("dropout", &forward, ["dp=2,micro=2,zero=1", "tp=2,micro=4"]);
}

/// Sinks, a window in one layer and not in the next, biases of experts, scaled rotations.
const GPT_OSS: &str = r#"{"model_type":"gpt_oss","vocab_size":37,"hidden_size":24,"intermediate_size":16,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,
"num_local_experts":4,"num_experts_per_tok":2,"sliding_window":3,"layer_types":["sliding_attention","full_attention"],"max_position_embeddings":64,"rope_theta":100.0,
"rope_scaling":{"rope_type":"yarn","truncate":false,"factor":4.0,"original_max_position_embeddings":8,"beta_fast":2,"beta_slow":1}}"#;
/// A rotation of a quarter of each vector, and biases everywhere.
const GPT_NEOX: &str = r#"{"model_type":"gpt_neox","vocab_size":37,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,"num_attention_heads":4,"rotary_pct":0.25,
"max_position_embeddings":64}"#;

#[test]
fn families_without_an_oracle_train_as_on_cpu_ranks() {
    for (name, config) in [("gpt_oss", GPT_OSS), ("gpt_neox", GPT_NEOX)] {
        let options = ImportOptions { seq: Some(12), compute: DType::F32, family: None };
        let forward = model_from_bytes("config.json", config.as_bytes(), &options).unwrap_or_else(|e| panic!("{e}")).graph;
        as_on_cpu_ranks(name, &forward, ["dp=2,micro=2,zero=1", "tp=2,micro=4"]);
        // A sink counts in one turn of a ring.
        as_on_cpu_ranks(&format!("{name}_ring"), &forward, ["cp=2,keys=ring,micro=4", "cp=2,micro=4"]);
    }
}

/// Collectives of one step after the other, servers, and other links than the usual ones.
#[test]
fn gradients_add_up_in_every_way() {
    let forward = model_from_bytes("model.json", MODEL.as_bytes(), &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}")).graph;
    let plans = [
        "dp=4,micro=1,zero=0,sync=hierarchical:2",
        "dp=4,micro=1,zero=3,sync=hierarchical:2",
        "dp=4,micro=1,zero=1,sync=tree",
        "dp=4,micro=1,zero=2,sync=server",
        "dp=2,tp=2,micro=2,zero=1,sync=server,map=tp.dp",
    ];
    on_cluster("cpu:4", "sync", &forward, &plans);
}

/// Of two ranks of a ring each hands on to the only other one; of three it shows which way keys go.
#[test]
fn keys_go_round_the_right_way() {
    let options = ImportOptions { seq: Some(12), compute: DType::F32, family: None };
    let forward = model_from_bytes("config.json", GPT_NEOX.as_bytes(), &options).unwrap_or_else(|e| panic!("{e}")).graph;
    on_cluster("cpu:3", "ring_of_three", &forward, &["cp=3,keys=ring,micro=4"]);
}
