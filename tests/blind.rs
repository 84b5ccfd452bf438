//! What a model's nodes, values and dims are called, and in which order its file lists them, decides nothing: the graph is the same.

use std::collections::BTreeMap;
use std::path::Path;

use dplan::import::{self, ImportOptions};
use dplan_ir::graph::Graph;
use dplan_ir::layers::{canonical_names, classes};
use serde_json::{Value, json};

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        (dplan_ir::splitmix::next(&mut self.0) % n as u64) as usize
    }
}

fn example(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("examples/{name}.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn graph(json: &Value) -> Graph {
    import::model_from_bytes("blind.json", json.to_string().as_bytes(), &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}\n{json:#}")).graph
}

/// The same model with other names and its nodes in another order that still defines before it uses.
fn shuffled(json: &Value, dice: &mut Dice) -> Value {
    let mut json = json.clone();
    let nodes = json["nodes"].as_array().unwrap().clone();
    let operands = |node: &Value| -> Vec<String> { node["in"].as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_string()).collect() };
    // A further result of node `x` is called `x.1`.
    let maker = |name: &str| nodes.iter().position(|n| n["name"] == name || name.strip_suffix(".1").is_some_and(|first| n["name"] == first));
    let (mut order, mut left): (Vec<usize>, Vec<usize>) = (Vec::new(), (0..nodes.len()).collect());
    while !left.is_empty() {
        let ready: Vec<usize> =
            left.iter().copied().filter(|&n| operands(&nodes[n]).iter().all(|v| maker(v).is_none_or(|m| order.contains(&m)))).collect();
        let next = ready[dice.below(ready.len())];
        left.retain(|&n| n != next);
        order.push(next);
    }
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    let mut rename = |name: &str, dice: &mut Dice| -> Value {
        let (base, end) = match name.strip_suffix(".1") {
            Some(first) if nodes.iter().any(|n| n["name"] == first) => (first, ".1"),
            _ => (name, ""),
        };
        let next = format!("z{}_{}", dice.below(1 << 30), names.len());
        json!(format!("{}{end}", names.entry(base.to_string()).or_insert(next)))
    };
    let mut moved = Vec::new();
    for at in order {
        let mut node = nodes[at].clone();
        node["name"] = rename(node["name"].as_str().unwrap(), dice);
        node["in"].as_array_mut().unwrap().iter_mut().for_each(|v| *v = rename(v.as_str().unwrap(), dice));
        moved.push(node);
    }
    json["nodes"] = Value::Array(moved);
    json["loss"] = rename(json["loss"].as_str().unwrap(), dice);
    json["inputs"].as_array_mut().unwrap().iter_mut().for_each(|i| i["name"] = rename(i["name"].as_str().unwrap(), dice));
    let params = json["params"].as_object().unwrap().clone();
    json["params"] = params.into_iter().map(|(name, row)| (rename(&name, dice).as_str().unwrap().to_string(), row)).collect();
    json
}

/// Everything but names, those of files' tensors included.
fn nameless(graph: &Graph) -> Graph {
    let mut graph = canonical_names(graph);
    graph.params.iter_mut().for_each(|(_, p)| p.pieces.clear());
    graph
}

#[test]
fn a_shuffled_and_renamed_file_is_the_same_graph() {
    for name in ["two-branch", "experts"] {
        let json = example(name);
        let plain = graph(&json);
        for seed in 0..8 {
            let other = shuffled(&json, &mut Dice(seed));
            assert_ne!(other["nodes"], json["nodes"]);
            let found = graph(&other);
            assert!(nameless(&found) == nameless(&plain), "{name}, seed {seed}");
            assert_eq!(classes(&found), classes(&plain), "{name}, seed {seed}");
        }
    }
}
