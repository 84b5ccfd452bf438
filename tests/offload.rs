//! Optimizer states in the memory of the host: the same weights bit by bit, and plans where nothing would fit without.

mod common;

use common::options;
use dplan::checkpoint::STATE;
use dplan::compile::{CompileError, Compiled, Options, compile};
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::planfile::PlanFile;
use dplan::runtime::{Options as RunOptions, RankMemory, Session};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::plan::Offload;
use dplan_ir::program::StageProgram;
use dplan_ir::verify::verify_program;
use dplan_planner::lower;
use dplan_planner::request::Refusal;
use dplan_planner::units::Bytes;
use std::sync::Arc;

const CONFIG: &str = r#"{"model_type":"llama","vocab_size":41,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":32,"tie_word_embeddings":true}"#;

fn model(compute: DType) -> Graph {
    model_from_bytes("config.json", CONFIG.as_bytes(), &ImportOptions { seq: Some(8), compute, family: None }).unwrap().graph
}

/// What a run leaves behind: losses of the first steps on random data, then parameters and moments as a checkpoint would have them.
type Left = (Vec<f64>, Vec<Table<ParamId, Vec<f64>>>);

/// What the first steps leave behind, and what the ranks allocated.
fn train(file: &PlanFile) -> (Left, Vec<RankMemory>) {
    let feed = Feed::new(&file.graph, None, file.plan.batch(), 1).unwrap();
    let mut session = Session::new(file.graph.clone(), file.program.clone(), &RunOptions::default()).unwrap();
    session.initialise(1).unwrap();
    let hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };
    let step = |step: u64| {
        let scalars = StepScalars::new(hyper, step + 1, 1.0 / feed.targets() as f64);
        session.step(&scalars, &Arc::new(feed.batch(step).unwrap())).unwrap().loss
    };
    let losses = (0..4).map(step).collect();
    let state = STATE.map(|role| session.gather(role).unwrap());
    ((losses, state.into()), session.memory())
}

fn offloads(compiled: &Compiled) -> bool {
    compiled.file.plan.options.iter().any(|o| o.offload == Offload::Optimizer)
}

#[test]
fn offloaded_states_train_bitwise_alike() {
    for (cluster, dtype, pins) in [
        ("cpu:1", DType::F32, "recompute=none"),
        ("cpu:2", DType::F32, "dp=2,zero=0,recompute=none"),
        ("cpu:2", DType::Bf16, "dp=2,zero=1,recompute=none"),
        ("cpu:4", DType::F32, "dp=2,pp=2,tp=1,micro=1,zero=2,recompute=full"),
        ("cpu:4", DType::F64, "dp=2,pp=1,tp=2,zero=3,recompute=none"),
        ("cpu:2", DType::F32, "dp=1,pp=2,tp=1,micro=1,schedule=zb-h1,recompute=none"),
    ] {
        let graph = model(dtype);
        let compiled = compile(&graph, &options(cluster, 8, dtype, &format!("{pins},offload=none"))).unwrap();
        assert!(!offloads(&compiled));
        let mut file = compiled.file;
        let (kept, on_device) = train(&file);
        let states = |file: &PlanFile| -> Vec<u64> {
            let of = |stage: &StageProgram| stage.regions.iter().find(|r| r.name == "states").unwrap().bytes;
            file.program.stages.iter().map(of).collect()
        };
        let before = states(&file);
        file.plan.options.iter_mut().for_each(|o| o.offload = Offload::Optimizer);
        file.program = lower::lower(&file.graph, &file.plan).unwrap();
        verify_program(&file.graph, &file.program).unwrap();
        let (moved, on_host) = train(&file);
        assert!(kept == moved, "{pins}: losses {:?} and {:?}", kept.0, moved.0);
        assert!(on_device.iter().all(|m| m.host_bytes == 0));
        // What leaves the device's states is on the host.
        let after = states(&file);
        for rank in on_host {
            let at = rank.stage as usize;
            assert!(rank.host_bytes > 0 && after[at] + rank.host_bytes == before[at], "{pins}: {rank:?}, states of {before:?} became {after:?}");
        }
    }
}

#[test]
fn where_nothing_fits_the_optimizer_is_offloaded() {
    let graph = model(DType::F32);
    let with = |limit: u64, pins: &str| compile(&graph, &Options { memory_limit: Some(Bytes(limit)), ..options("cpu:2", 8, DType::F32, pins) });
    let fits = |limit: u64, pins: &str| match with(limit, pins) {
        Ok(_) => true,
        Err(CompileError::Refused(Refusal::Infeasible(_))) => false,
        Err(other) => panic!("{other}"),
    };
    // The least memory that plans without offloading fit in, to 256 bytes.
    let (mut low, mut high) = (0, 1 << 22);
    while high - low > 256 {
        let middle = (low + high) / 2;
        if fits(middle, "offload=none") { high = middle } else { low = middle }
    }
    assert!(!offloads(&with(high, "").unwrap()), "what fits is searched without offloading");
    let limit = low * 9 / 10;
    let answer = with(limit, "").unwrap();
    assert!(offloads(&answer) && answer.statistics.proved);
    let one = train(&compile(&graph, &options("cpu:1", 8, DType::F32, "")).unwrap().file).0.0;
    let ((losses, _), memory) = train(&answer.file);
    assert!(memory.iter().all(|m| m.arena_bytes <= limit));
    losses.iter().zip(&one).for_each(|(a, b)| assert!((a - b).abs() <= 1e-4 * b.abs(), "{losses:?}, one rank has {one:?}"));
}
