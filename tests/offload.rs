//! States and activations in the memory of the host or in a file: the same weights bit by bit, and plans where nothing would fit without.

mod common;

use common::{dplan_ok, json_lines, options, scratch};
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
use dplan_ir::plan::{Away, Offload, Store};
use dplan_ir::program::StageProgram;
use dplan_ir::verify::verify_program;
use dplan_planner::lower;
use dplan_planner::machine::Machine;
use dplan_planner::request::Refusal;
use dplan_planner::units::Bytes;
use serde_json::json;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

const CONFIG: &str = r#"{"model_type":"llama","vocab_size":41,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":32,"tie_word_embeddings":true}"#;

fn model(compute: DType) -> Graph {
    model_from_bytes("config.json", CONFIG.as_bytes(), &ImportOptions { seq: Some(8), compute, family: None }).unwrap().graph
}

/// What a run leaves behind: losses of the first steps on random data, then parameters and moments as a checkpoint would have them, and gradients.
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
    let mut state: Vec<_> = STATE.map(|role| session.gather(role).unwrap()).into();
    state.push(session.grads().unwrap());
    ((losses, state), session.memory())
}

fn offloads(compiled: &Compiled) -> bool {
    compiled.file.plan.options.iter().any(|o| o.away() != Away::default())
}

#[test]
fn what_is_offloaded_trains_bitwise_alike() {
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
        let regions = |file: &PlanFile, name: &str| -> Vec<u64> {
            let of = |stage: &StageProgram| stage.regions.iter().find(|r| r.name == name).unwrap().bytes;
            file.program.stages.iter().map(of).collect()
        };
        let before = ["states", "frames"].map(|name| regions(&file, name));
        assert!(on_device.iter().all(|m| (m.host_bytes, m.file_bytes) == (0, 0)));
        let halves = file.plan.pipeline().parts_backward();
        let of_states = Offload::ALL.map(|states| Away { states, activations: None });
        let (cpu, nvme) = (Some(Store::Cpu), Some(Store::Nvme));
        let of_activations =
            [(Offload::None, cpu), (Offload::None, nvme), (Offload::Optimizer(Store::Nvme), cpu), (Offload::Parameters(Store::Cpu), cpu)];
        let of_activations = of_activations.map(|(states, activations)| Away { states, activations });
        for way in of_states.into_iter().chain(of_activations).filter(|a| *a != Away::default() && !(halves && a.is_in_passes())) {
            file.plan.options.iter_mut().for_each(|o| (o.offload, o.activations) = (way.states, way.activations));
            file.program = lower::lower(&file.graph, &file.plan).unwrap();
            if let Err(faults) = verify_program(&file.graph, &file.program) {
                panic!("{pins}, {}: {:#?}", way.name(), &faults[..faults.len().min(3)]);
            }
            let (moved, elsewhere) = train(&file);
            assert!(kept == moved, "{pins}, {}: losses {:?} and {:?}", way.name(), kept.0, moved.0);
            // What leaves the device is in the other memory, rounded up there.
            let after = ["states", "frames"].map(|name| regions(&file, name));
            for rank in elsewhere {
                let [states, frames] = [0, 1].map(|at: usize| before[at][rank.stage as usize] - after[at][rank.stage as usize]);
                assert_eq!((states > 0, frames > 0), (way.states != Offload::None, way.activations.is_some()), "{pins}, {}: {rank:?}", way.name());
                let gone =
                    |store| [(way.states.store(), states), (way.activations, frames)].iter().filter(|g| g.0 == Some(store)).map(|g| g.1).sum::<u64>();
                let (host, file) = (gone(Store::Cpu), gone(Store::Nvme));
                let is_filed = if file == 0 { rank.file_bytes == 0 } else { (file..2 * file + (1 << 18)).contains(&rank.file_bytes) };
                assert!(
                    rank.host_bytes == host && is_filed,
                    "{pins}, {}: {rank:?}, {host} bytes less of the host's, {file} of the file's",
                    way.name()
                );
            }
        }
    }
}

#[test]
fn where_nothing_fits_or_all_that_fits_is_slow_states_are_offloaded() {
    let graph = model(DType::F32);
    let on = |limit: u64, host: Option<u64>, pins: &str| {
        let mut options = Options { memory_limit: Some(Bytes(limit)), ..options("cpu:2", 8, DType::F32, pins) };
        options.cluster = options.cluster.map(|machine| Machine { host_memory: host.map(Bytes), ..machine.clone() }, |link| link);
        compile(&graph, &options)
    };
    let with = |limit: u64, pins: &str| on(limit, None, pins);
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
    assert!(!offloads(&with(1 << 30, "").unwrap()), "where there is room nothing is offloaded");
    // The least that fits is slow, and a textbook system that offloads is not.
    let (free, kept) = (with(high, "").unwrap(), with(high, "offload=none").unwrap());
    let textbook = kept.baselines.iter().filter(|b| !b.asynchronous).filter_map(|b| b.step).min().unwrap();
    assert!(
        textbook < kept.objective && free.objective <= textbook && offloads(&free),
        "{:?}, {:?} without, {textbook:?}",
        free.objective,
        kept.objective
    );
    let limit = low * 9 / 10;
    let one = train(&compile(&graph, &options("cpu:1", 8, DType::F32, "")).unwrap().file).0.0;
    // As much of the host's memory as there is, as it takes, one byte less, half of it, and none.
    let taken = with(limit, "").unwrap().prediction.memory.iter().map(|m| m.arena.host).max().unwrap();
    let (cpu, nvme) = (Some(Store::Cpu), Some(Store::Nvme));
    for (host, store) in [(None, cpu), (Some(taken), cpu), (Some(taken - 1), None), (Some(taken / 2), None), (Some(0), nvme)] {
        let answer = on(limit, host, "").unwrap();
        // Where hosts have too little, only one division between them and files is looked for, and what textbook systems do.
        let divided = host.is_some_and(|host| 0 < host && host < taken);
        assert!(offloads(&answer) && answer.statistics.proved != divided, "{host:?} {:?}", answer.statistics);
        let goes_to = |to: Store| answer.file.plan.options.iter().any(|o| o.away().stores().any(|store| store == to));
        assert!(host != Some(taken / 2) || goes_to(Store::Cpu) && goes_to(Store::Nvme), "{host:?}: {:?}", answer.file.plan.options);
        assert!(answer.file.plan.options.iter().all(|o| o.away().stores().all(|s| store.is_none_or(|store| s == store))), "{host:?}");
        let textbook = answer.baselines.iter().filter(|b| !b.asynchronous).filter_map(|b| b.step).min();
        assert!(textbook.is_none_or(|textbook| answer.objective <= textbook), "{host:?}: {:?}, {textbook:?}", answer.objective);
        let ((losses, _), memory) = train(&answer.file);
        assert!(memory.iter().all(|m| m.arena_bytes <= limit && m.host_bytes <= host.unwrap_or(u64::MAX)));
        losses.iter().zip(&one).for_each(|(a, b)| assert!((a - b).abs() <= 1e-4 * b.abs(), "{losses:?}, one rank has {one:?}"));
    }
}

/// Address space of a run that is not the ranks': the program itself (19 MiB), five stacks, and mostly what the allocator maps ahead for each thread and size. Measured: 88 MiB are
/// too few, 104 are enough.
const OVERHEAD: u64 = 104 << 20;

/// What the ranks have at least.
const RANKS: u64 = 24 << 20;

/// The process has a quarter of the states, all that is not the ranks' included; in a small model, where that is not even enough for a process without any, as little as that allows.
/// `DPLAN_WIDTH=384 cargo test --test offload -- --nocapture` tries a larger one.
#[test]
fn a_model_of_several_times_the_memory_trains_within_it() {
    let width: u64 = std::env::var("DPLAN_WIDTH").map_or(192, |width| width.parse().unwrap());
    let dir = scratch("offload_limit");
    let config = dir.join("config.json");
    let text = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": width, "intermediate_size": width * 8 / 3, "num_hidden_layers": 40, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 16, "tie_word_embeddings": false
    });
    std::fs::write(&config, text.to_string()).unwrap();
    let compiled = |name: &str, limit: Option<u64>| {
        let path = dir.join(name);
        let mut args = ["compile", &config.display().to_string(), "--cluster", "cpu:1", "--precision", "f32", "--batch", "1", "--seq", "8"]
            .map(String::from)
            .to_vec();
        args.extend(["-o", &path.display().to_string()].map(String::from));
        args.extend(limit.iter().flat_map(|bytes| ["--memory-limit".to_string(), bytes.to_string()]));
        dplan_ok(&args);
        path
    };
    let whole = compiled("whole.json", None);
    let states = PlanFile::read(&whole).unwrap().program.stages[0].regions.iter().find(|r| r.name == "states").unwrap().bytes;
    let space = (states / 4).max(OVERHEAD + RANKS);
    let limit = space - OVERHEAD;
    let small = compiled("small.json", Some(limit));
    // `space`: of addresses, bytes.
    let run = |plan: &Path, space: Option<u64>, weights: &Path| {
        let limited = space.map_or(String::new(), |bytes| format!("ulimit -v {}; ", bytes / 1024));
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{limited}exec \"$0\" \"$@\"")).arg(env!("CARGO_BIN_EXE_dplan"));
        command.arg("run").arg(plan).args(["--steps", "2", "--json", "--scratch"]).arg(&dir).arg("--save").arg(weights);
        // Allocators would else reserve more than they give out.
        command.env("MALLOC_ARENA_MAX", "1").env("MIMALLOC_ARENA_RESERVE", "0");
        // Each thread that helps with products maps some megabytes: as many as where the allowance was measured.
        command.env("RAYON_NUM_THREADS", "2").output().unwrap()
    };
    let told = |output: &Output| json_lines(&String::from_utf8_lossy(&output.stdout));
    let losses = |output: &Output| -> Vec<[String; 2]> {
        let steps: Vec<_> = told(output).into_iter().filter(|line| line["step"].is_u64()).collect();
        steps.iter().map(|line| [line["loss"].to_string(), line["grad_norm"].to_string()]).collect()
    };
    let [kept, moved] = ["kept.safetensors", "moved.safetensors"].map(|name| dir.join(name));
    let unlimited = run(&whole, None, &kept);
    assert_eq!(losses(&unlimited).len(), 2, "{unlimited:?}");
    let refused = run(&whole, Some(space), &moved);
    assert!(!refused.status.success(), "the states alone are more than is allowed");
    let limited = run(&small, Some(space), &moved);
    assert_eq!(losses(&limited), losses(&unlimited), "{}", String::from_utf8_lossy(&limited.stderr));
    assert!(std::fs::read(&kept).unwrap() == std::fs::read(&moved).unwrap(), "weights differ");
    let summary = told(&limited).into_iter().map(|line| line["summary"].clone()).find(|summary| summary.is_object()).unwrap();
    let memory = &summary["memory"][0];
    let bytes = |key: &str| memory[key].as_u64().unwrap();
    assert!(bytes("arena_bytes") + bytes("host_bytes") <= limit && bytes("file_bytes") > 2 * limit, "{memory} of {limit}");
    assert!(states >= 2 * space, "{states} bytes of states are not much for {space}");
    println!(
        "states of {states} bytes, {:.1} times the {space} bytes of addresses that the process has, {} of them the rank's; {} in a file, {:.1} s for {} steps",
        states as f64 / space as f64,
        bytes("arena_bytes") + bytes("host_bytes"),
        bytes("file_bytes"),
        summary["seconds"].as_f64().unwrap(),
        summary["steps"]
    );
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 7, "a configuration, two plans with their certificates, and weights twice");
}
