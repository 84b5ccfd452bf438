//! Clusters of groups of different devices: where layers go, and why; what the command line says of them.

mod common;

use common::options;
use dplan::compile::{Options, best};
use dplan::import::{ImportOptions, model_from_bytes};
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::plan::Plan;
use dplan_planner::machine::{Cluster, Link, Machine, Peak};
use dplan_planner::predict::Prediction;
use dplan_planner::units::{Bytes, Nanos, PerSecond};

const LLAMA_8B: &str = r#"{"model_type":"llama","vocab_size":128256,"hidden_size":4096,"intermediate_size":14336,"num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":8,"max_position_embeddings":8192}"#;
const GPT2: &str = r#"{"model_type":"gpt2","vocab_size":50257,"n_positions":1024,"n_embd":768,"n_layer":12,"n_head":12}"#;

fn import(config: &str) -> Graph {
    let options = ImportOptions { seq: Some(1024), compute: DType::Bf16, family: None };
    model_from_bytes("config.json", config.as_bytes(), &options).unwrap().graph
}

fn plan_on(graph: &Graph, cluster: &Cluster, batch: u64, pins: &str) -> (Plan, Prediction) {
    let options = Options { cluster: cluster.clone(), ..options("cpu:1", batch, DType::Bf16, pins) };
    best(graph, &options).unwrap()
}

fn cluster(text: &str) -> Cluster {
    Cluster::parse(text).unwrap()
}

/// The cluster with one of its groups changed.
fn with(of: &Cluster, group: usize, change: impl Fn(&mut Machine)) -> Cluster {
    let mut groups = of.groups().to_vec();
    change(&mut groups[group]);
    Cluster::new(groups, Some(of.between())).unwrap()
}

/// Layers of the stages that are on each group; nothing on several is counted.
fn layers(plan: &Plan, cluster: &Cluster) -> Vec<u32> {
    let mut layers = vec![0; cluster.groups().len()];
    for (stage, cut) in plan.stages.iter().enumerate() {
        let site = cluster.seat(plan, stage as u64).site;
        assert!(site.is_pure(), "{plan:?}");
        site.groups().for_each(|group| layers[group] += cut.last + 1 - cut.first);
    }
    layers
}

/// An H100 computes about three times as fast as an A100. Layers go where they are quick, so that neither stage waits long for the other.
#[test]
fn faster_devices_have_more_layers() {
    let (graph, unlike) = (import(LLAMA_8B), cluster("a100-80g:8x1+h100:8x1"));
    let (plan, step) = plan_on(&graph, &unlike, 256, "pp=2,cp=1");
    let layers = layers(&plan, &unlike);
    assert!(layers[1] >= 2 * layers[0], "{layers:?}");
    let (slow, fast) = (step.stages.iter().map(|s| s.time).min().unwrap(), step.stages.iter().map(|s| s.time).max().unwrap());
    assert!((fast - slow) as f64 <= 0.1 * fast as f64, "{:?}", step.stages);
    // More of both would be slower and quicker.
    let on = |text: &str| plan_on(&graph, &cluster(text), 256, "pp=2,cp=1").1.step;
    assert!(on("h100:8x2") < step.step && step.step < on("a100-80g:8x2"));
}

/// The same devices, but half of them have less memory: those keep fewer layers than where all have as much, and no stage needs more than its own devices have.
#[test]
fn every_group_keeps_within_its_own_memory() {
    let graph = import(LLAMA_8B);
    let even = cluster("h100:8x1+h100:8x1");
    let small = with(&even, 0, |m| m.device.memory = Bytes(20 << 30));
    let pins = "pp=2,tp=1,cp=1,recompute=none,zero=0+1,micro=1";
    let count = |cluster: &Cluster| {
        let (plan, step) = plan_on(&graph, cluster, 64, pins);
        for (stage, memory) in step.memory.iter().enumerate() {
            let limit = cluster.site(cluster.seat(&plan, stage as u64).site).device.memory.0;
            assert!(memory.total_bytes() <= limit, "stage {stage} needs {} of {limit}", memory.total_bytes());
        }
        layers(&plan, cluster)
    };
    let (all, less) = (count(&even), count(&small));
    assert!(less[0] < all[0].min(all[1]), "{less:?}, {all:?} where memory is alike");
}

/// Two groups of equal devices, linked as within, are one cluster.
#[test]
fn equal_groups_cost_what_one_group_does() {
    for (config, one, two, batch, pins) in [
        (LLAMA_8B, "h100:8x2", "h100:8x1+h100:8x1", 64, ""),
        (LLAMA_8B, "h100:8x4", "h100:8x1+h100:8x3", 128, "pp=2+4"),
        (LLAMA_8B, "a100-40g:8x4", "a100-40g:8x2+a100-40g:8x2", 64, "tp=1+8,cp=1,schedule=1f1b+interleaved"),
        (GPT2, "a100-80g:4x4", "a100-80g:4x1+a100-80g:4x2+a100-80g:4x1", 64, ""),
    ] {
        let graph = import(config);
        let (step, same) = (plan_on(&graph, &cluster(one), batch, pins).1.step, plan_on(&graph, &cluster(two), batch, pins).1.step);
        assert_eq!(step, same, "{one} and {two} under {pins}");
    }
}

/// Whatever gets better about one group, no plan gets slower.
#[test]
fn a_better_group_is_never_slower() {
    let graph = import(GPT2);
    let base = with(&cluster("a100-40g:4x1+h100:4x1"), 0, |m| m.device.memory = Bytes(8 << 30));
    for pins in ["", "pp=2+4,cp=1"] {
        let before = plan_on(&graph, &base, 128, pins).1.step;
        let mut gained = 0;
        let faster = |r: &mut PerSecond| *r = PerSecond(2 * r.0);
        let changes: [(&str, &dyn Fn(&mut Machine)); 4] = [
            ("memory", &|m| m.device.memory = Bytes(2 * m.device.memory.0)),
            ("compute", &|m| {
                let Peak { f64, f32, bf16, f16 } = &mut m.device.peak;
                [f64, f32, bf16, f16].into_iter().for_each(faster);
            }),
            ("bandwidth", &|m| faster(&mut m.device.bandwidth)),
            ("links", &|m| [&mut m.intra, &mut m.inter].into_iter().for_each(|l| faster(&mut l.bandwidth))),
        ];
        for (group, (what, change)) in (0..2).flat_map(|g| changes.iter().map(move |c| (g, c))) {
            let after = plan_on(&graph, &with(&base, group, change), 128, pins).1.step;
            assert!(after <= before, "{what} of group {group} under {pins}: {after} after {before}");
            gained += usize::from(after < before);
        }
        assert!(gained >= 3, "{gained} of 8 changes count for anything under {pins}");
        let linked = |bandwidth| {
            let between = Link { latency: Nanos(10_000), bandwidth: PerSecond(bandwidth) };
            plan_on(&graph, &Cluster::new(base.groups().to_vec(), Some(between)).unwrap(), 128, pins).1.step
        };
        let (slow, quick) = (linked(100_000_000), linked(10_000_000_000));
        assert!(quick < slow, "between groups under {pins}: {quick} after {slow}");
    }
}

#[test]
fn the_command_line_names_the_devices_of_stages() {
    let dir = common::scratch("unlike");
    let path = |name: &str| dir.join(name).to_str().unwrap().to_string();
    std::fs::write(path("gpt2.json"), GPT2).unwrap();
    let slow = r#"{"latency_nanoseconds": 20000, "bandwidth_bytes_per_second": 5000000000}"#;
    let groups = r#"[{"device": "a100-80g", "per_node": 4, "nodes": 1}, {"device": "h100", "per_node": 4, "nodes": 1}]"#;
    std::fs::write(path("unlike.json"), format!(r#"{{"groups": {groups}, "between": {slow}}}"#)).unwrap();
    let (model, plan, on) = (path("gpt2.json"), path("plan.json"), path("unlike.json"));
    let compile = |more: &[&str]| {
        let args = ["compile", &model, "--cluster", &on, "--batch", "128", "--pin", "pp=2,cp=1", "-o", &plan];
        common::dplan_ok(&[&args, more].concat())
    };
    let said = compile(&["--what-if", "link=2x", "--what-if", "nodes=2x", "--min-devices"]);
    for says in
        ["a100-80g:4+h100:4 (8 devices)", "ranks       0-3 on ", " on a100-80g, layers", " on h100, layers", "proved optimal", "nodes=2x: 16 devices"]
    {
        assert!(said.contains(says), "{says}: {said}");
    }
    assert!(said.contains("groups of different devices: ask for a cluster of one of them"), "{said}");
    let json: serde_json::Value = serde_json::from_str(&compile(&["--json"])).unwrap();
    let mut names: Vec<&str> = json["chosen"]["stages"].as_array().unwrap().iter().map(|s| s["on"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["a100-80g", "h100"]);
    assert!(common::dplan_ok(&["verify", &plan, "--certificate"]).contains("no plan is better"));
    assert!(common::dplan_ok(&["explain", &plan]).contains("(h100): zero"));
    assert!(common::dplan_ok(&["explain", &plan, "--why-not", "tp=4"]).contains("a100-80g"));
    assert!(common::dplan_ok(&["trace", &plan]).contains(" on h100: layers"));

    // Each group once, and groups that are there.
    let text = std::fs::read_to_string(&plan).unwrap();
    let damaged = [
        ("\"placement\": [\n      0,\n      1\n    ]", "\"placement\": [0, 0]"),
        ("\"placement\": [\n      1,\n      0\n    ]", "\"placement\": [0, 0]"),
    ];
    let damaged = damaged.iter().fold(text.clone(), |text, (from, to)| text.replacen(from, to, 1));
    assert_ne!(damaged, text);
    std::fs::write(&plan, damaged).unwrap();
    let refused = common::dplan(&["verify", &plan]);
    let says = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && says.contains("`choices.placement`: [0, 0]: expected each of the cluster's 2 groups once"), "{says}");
}

/// What does not fit says by how much; how many more of unlike devices would do, nobody can say.
#[test]
fn a_shortage_is_of_the_devices_of_a_stage() {
    let dir = common::scratch("unlike-shortage");
    let config = dir.join("config.json");
    std::fs::write(&config, LLAMA_8B).unwrap();
    let args = ["compile", config.to_str().unwrap(), "--cluster", "v100-16g:1+v100-32g:1", "--batch", "8", "--pin", "pp=2,offload=none"];
    let refused = common::dplan(&args);
    let says = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1) && says.contains("no plan fits") && !says.contains("such devices"), "{says}");
}
