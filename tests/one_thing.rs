//! The planner that prices clusters and the runtime that trains small models are one thing.
//!
//! *Unpinned*: whatever `compile` chooses runs, and trains like one rank. *Twin*: a headline plan and the same choices with small widths have the same
//! communication, and the small one trains like one rank. *Blind*: a shuffled, renamed model of our own gets the same plan, and trains.

mod common;

use common::options;
use dplan::compile::{CompileError, Compiled, Options, compile};
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::planfile::PlanFile;
use dplan::runtime::{Options as RunOptions, Session};
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::plan::{Placement, Plan};
use dplan_ir::program::{Instr, Program};
use dplan_ir::verify::verify_program;
use dplan_planner::lower;
use dplan_planner::machine::{Cluster, Peak, cpu};
use dplan_planner::request::Refusal;
use dplan_planner::units::{Bytes, PerSecond};
use std::sync::Arc;

const STEPS: u64 = 3;

/// Relative difference of losses that summation order alone explains in f64.
const NOISE: f64 = 1e-12;

fn import(config: &str, seq: Option<u64>, compute: DType) -> Graph {
    model_from_bytes("config.json", config.as_bytes(), &ImportOptions { seq, compute, family: None }).unwrap().graph
}

/// Losses of the first steps on random data.
fn losses(file: &PlanFile) -> Vec<f64> {
    let feed = Feed::new(&file.graph, None, file.plan.batch(), 1).unwrap();
    let mut session = Session::new(file.graph.clone(), file.program.clone(), &RunOptions::default()).unwrap();
    session.initialise(1).unwrap();
    for rank in session.memory() {
        assert_eq!(rank.arena_bytes, file.program.stages[rank.stage as usize].arena_bytes);
    }
    let hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };
    (0..STEPS)
        .map(|step| {
            let scalars = StepScalars::new(hyper, step + 1, 1.0 / feed.targets() as f64);
            session.step(&scalars, &Arc::new(feed.batch(step).unwrap())).unwrap().loss
        })
        .collect()
}

fn alike(name: &str, a: &[f64], b: &[f64]) {
    for (x, y) in a.iter().zip(b) {
        assert!((x - y).abs() <= NOISE * y.abs(), "{name}: losses {a:?}, one rank has {b:?}");
    }
}

/// Small configs with what breaks splits: odd vocabularies, few key/value heads, tied tables, biases, experts.
const MODELS: [(&str, &str); 5] = [
    (
        "llama",
        r#"{"model_type":"llama","vocab_size":37,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":3,"num_attention_heads":6,"num_key_value_heads":2,"max_position_embeddings":32}"#,
    ),
    (
        "tied",
        r#"{"model_type":"llama","vocab_size":41,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":1,"max_position_embeddings":32,"tie_word_embeddings":true}"#,
    ),
    ("gpt2", r#"{"model_type":"gpt2","vocab_size":35,"n_positions":16,"n_embd":24,"n_layer":3,"n_head":3}"#),
    (
        "qwen2",
        r#"{"model_type":"qwen2","vocab_size":40,"hidden_size":16,"intermediate_size":20,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":32}"#,
    ),
    (
        "mixtral",
        r#"{"model_type":"mixtral","vocab_size":36,"hidden_size":16,"intermediate_size":12,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"num_local_experts":4,"num_experts_per_tok":2,"max_position_embeddings":32,"sliding_window":null}"#,
    ),
];

#[test]
fn unpinned_plans_run_and_train_like_one_rank() {
    let mut kinds = std::collections::BTreeSet::new();
    let mut refused = 0;
    for (name, config) in MODELS {
        let graph = import(config, Some(8), DType::F64);
        let one = losses(&compile(&graph, &options("cpu:1", 8, DType::F64, "")).unwrap().file);
        for ranks in [2, 4, 8] {
            // From roomy to too tight: what the plan gives up for memory differs.
            let roomy = largest(&compile(&graph, &options(&format!("cpu:{ranks}"), 8, DType::F64, "")).unwrap());
            for percent in [100, 80, 60, 45, 30] {
                let limited = Options { memory_limit: Some(Bytes(roomy * percent / 100)), ..options(&format!("cpu:{ranks}"), 8, DType::F64, "") };
                match compile(&graph, &limited) {
                    Ok(compiled) => {
                        assert!(largest(&compiled) <= roomy * percent / 100, "{name}: over its limit");
                        let plan = &compiled.file.plan;
                        kinds.insert((plan.dp > 1, plan.tp > 1, plan.pp() > 1));
                        alike(&format!("{name} on {ranks} at {percent} %"), &losses(&compiled.file), &one);
                    }
                    Err(CompileError::Refused(Refusal::Infeasible(_))) => refused += 1,
                    Err(other) => panic!("{name} on {ranks} at {percent} %: {other}"),
                }
            }
        }
    }
    assert!(kinds.len() >= 3 && refused > 0, "the limits were to force different plans: {kinds:?}, {refused} refused");
}

/// Ranks of one machine that are planned for as devices of different speed: how many, and how many times as fast.
fn unlike(groups: &[(u64, u64)]) -> Cluster {
    let group = |&(ranks, times): &(u64, u64)| {
        let mut machine = cpu(ranks);
        let Peak { f64, f32, .. } = &mut machine.device.peak;
        [f64, f32, &mut machine.device.bandwidth].into_iter().for_each(|r| *r = PerSecond(r.0 * times));
        machine
    };
    Cluster::new(groups.iter().map(group).collect(), None).unwrap()
}

#[test]
fn plans_for_unlike_devices_run_and_train_like_one_rank() {
    let (mut on_several, mut turned) = (0, 0);
    for (name, config) in MODELS {
        let graph = import(config, Some(8), DType::F64);
        let one = losses(&compile(&graph, &options("cpu:1", 8, DType::F64, "")).unwrap().file);
        for (groups, pins) in
            [(&[(2, 1), (2, 4)][..], ""), (&[(1, 4), (3, 1)], "pp=4"), (&[(2, 4), (1, 1), (1, 2)], "pp=2+4"), (&[(2, 1), (6, 3)], "pp=2+4")]
        {
            let options = Options { cluster: unlike(groups), ..options("cpu:1", 8, DType::F64, pins) };
            let Compiled { file, statistics, .. } = compile(&graph, &options).unwrap();
            assert!(statistics.proved, "{name} on {groups:?}");
            let read = PlanFile::parse("plan.json", file.to_json().as_bytes()).unwrap();
            assert_eq!((&read.plan, &read.cluster), (&file.plan, &file.cluster));
            on_several += usize::from(file.plan.pp() > 1);
            turned += usize::from(file.plan.placement != Placement::default());
            alike(&format!("{name} on {groups:?} under {pins}"), &losses(&read), &one);
        }
    }
    assert!(on_several >= 12 && turned >= 3, "{on_several} on several groups, {turned} in another order than given");
}

fn largest(compiled: &Compiled) -> u64 {
    compiled.prediction.memory.iter().map(|m| m.total_bytes()).max().unwrap()
}

/// What every stage's ranks say to others, in order: pattern, axes, stages.
fn communication(program: &Program) -> Vec<Vec<String>> {
    let said = |instr: &Instr| match instr {
        Instr::Collective { pattern, axes, stages, .. } => Some(format!("{} {axes:?} {stages:?}", pattern.name())),
        Instr::Send { to, channel, .. } => Some(format!("send {to} {channel:?}")),
        Instr::Recv { from, channel, .. } => Some(format!("recv {from} {channel:?}")),
        _ => None,
    };
    program.stages.iter().map(|s| s.segments.values().flat_map(|seg| seg.body.iter().filter_map(|i| said(&i.instr))).collect()).collect()
}

#[test]
fn a_headline_plan_and_its_small_twin_communicate_alike() {
    let config = |hidden: u64, mlp: u64, vocab: u64| {
        format!(
            r#"{{"model_type":"llama","vocab_size":{vocab},"hidden_size":{hidden},"intermediate_size":{mlp},"num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":8,"max_position_embeddings":8192}}"#
        )
    };
    for pins in ["dp=2,tp=2,pp=2", "dp=2,tp=4,pp=1,zero=3", "dp=2,tp=2,pp=2,zero=1,recompute=full,sp=1"] {
        let big = compile(&import(&config(4096, 14336, 128256), Some(8192), DType::Bf16), &options("h100:8x1", 16, DType::Bf16, pins)).unwrap();
        let mut small = grad(&import(&config(64, 32, 64), Some(4), DType::F64));
        let plan = Plan { compute: DType::F64, ..big.file.plan.clone() };
        small.set_batch(plan.dp * plan.micro_batch);
        let program = lower::lower(&small, &plan).unwrap();
        verify_program(&small, &program).unwrap();
        assert_eq!(communication(&program), communication(&big.file.program), "{pins}");
        let twin = PlanFile { graph: small, plan, program, ..big.file.clone() };
        let one = compile(&import(&config(64, 32, 64), Some(4), DType::F64), &options("cpu:1", 16, DType::F64, "")).unwrap();
        alike(pins, &losses(&twin), &losses(&one.file));
    }
}

fn grad(forward: &Graph) -> Graph {
    dplan_ir::grad::differentiate(forward).unwrap()
}

#[test]
fn a_shuffled_and_renamed_model_gets_the_same_plan_and_trains() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/two-branch.json")).unwrap();
    let plain: serde_json::Value = serde_json::from_str(&text).unwrap();
    // The right branch before the left, and every value under another name.
    let mut shuffled = plain.clone();
    let nodes = shuffled["nodes"].as_array_mut().expect("the graph lists nodes");
    let at = |nodes: &[serde_json::Value], name: &str| nodes.iter().position(|n| n["name"] == name).unwrap();
    for name in ["r1", "r1.act", "r1.up"] {
        let (from, to) = (at(nodes, name), at(nodes, "n1") + 1);
        nodes[to..=from].rotate_right(1);
    }
    let names: Vec<String> = nodes.iter().map(|n| n["name"].as_str().unwrap().to_string()).collect();
    for node in nodes {
        node["name"] = renamed(node["name"].as_str().unwrap(), &names).into();
        node["in"].as_array_mut().unwrap().iter_mut().for_each(|v| *v = renamed(v.as_str().unwrap(), &names).into());
    }
    shuffled["loss"] = renamed(plain["loss"].as_str().unwrap(), &names).into();
    let load = |json: &serde_json::Value| {
        model_from_bytes("graph.json", json.to_string().as_bytes(), &ImportOptions { compute: DType::F64, ..ImportOptions::default() }).unwrap().graph
    };
    let plans: Vec<Compiled> = [&plain, &shuffled].map(|json| compile(&load(json), &options("cpu:4", 8, DType::F64, "tp=2+4")).unwrap()).into();
    assert_eq!(plans[0].file.plan, plans[1].file.plan);
    assert_eq!(plans[0].file.program, plans[1].file.program);
    let one = losses(&compile(&load(&plain), &options("cpu:1", 8, DType::F64, "")).unwrap().file);
    alike("two branches", &losses(&plans[1].file), &one);
}

/// A node's new name; a further result `x.1` goes with its node, everything else stays.
fn renamed(name: &str, nodes: &[String]) -> String {
    let (base, end) = match name.strip_suffix(".1") {
        Some(first) if nodes.iter().any(|n| n == first) => (first, ".1"),
        _ => (name, ""),
    };
    match nodes.iter().position(|n| n == base) {
        // Falling numbers, so that the order of names is another one too.
        Some(at) => format!("z{}{end}", nodes.len() - at),
        None => name.to_string(),
    }
}

#[test]
fn equal_questions_get_equal_bytes() {
    let graph = import(MODELS[0].1, Some(8), DType::F32);
    let first = compile(&graph, &options("cpu:4", 8, DType::F32, "")).unwrap().file.to_json();
    for _ in 0..3 {
        assert_eq!(compile(&graph, &options("cpu:4", 8, DType::F32, "")).unwrap().file.to_json(), first);
    }
    let read = PlanFile::parse("plan.json", first.as_bytes()).unwrap();
    assert_eq!(read.to_json(), first);
}

#[test]
fn the_same_plan_run_twice_is_bitwise_equal() {
    let graph = import(MODELS[4].1, Some(8), DType::F32);
    let file = compile(&graph, &options("cpu:4", 8, DType::F32, "tp=2,dp=2,zero=2")).unwrap().file;
    let bits = |l: Vec<f64>| l.into_iter().map(f64::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(losses(&file)), bits(losses(&file)));
}
