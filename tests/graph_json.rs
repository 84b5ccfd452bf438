//! dplan's own graph JSON: the examples train, names do not matter, numbers become the right dims, and faults are named with their place.

use std::path::Path;

use dplan::import::{self, ImportOptions, Model};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::{Graph, Layout};
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, train_step};
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};
use serde_json::{Value, json};

#[test]
fn examples_train() {
    for name in ["two-branch", "experts"] {
        let mut model = example(name);
        model.graph.set_batch(1);
        let graph = differentiate(&model.graph).unwrap();
        let mut state = TrainState::new(dplan_ir::init::params(&graph, 1), Optimizer::AdamW);
        let text = std::fs::read(root().join("examples/llama-1m/almanac.txt")).unwrap();
        let ids = |from: usize| Tensor::dense(&[1, 64], text[from..from + 64].iter().map(|&b| f64::from(b)).collect());
        let hyper = Hyper { lr: 3e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, momentum: 0.0, clip: 1.0 };
        let losses: Vec<f64> = (1..=4)
            .map(|step| {
                let scalars = StepScalars::new(hyper, step, 1.0 / 64.0);
                train_step(&graph, &mut state, &[vec![ids(1000), ids(1001)]], &scalars, Optimizer::AdamW).loss
            })
            .collect();
        assert!((losses[0] - 257f64.ln()).abs() < 0.2 && losses[3] < losses[0] - 0.5, "{name}: {losses:?}");
    }
}

#[test]
fn layers_are_found_where_none_are_given() {
    let graph = example("two-branch").graph;
    let layer = |name: &str| graph.nodes.values().find(|n| graph.values[n.outputs[0]].name == name).unwrap_or_else(|| panic!("{name}")).layer;
    // Embedding with its positions, two blocks, the head with the last norm.
    assert_eq!(graph.layer_count(), 4);
    assert_eq!(["x", "x0", "n1", "x1", "n2", "x2", "n3", "scores", "loss"].map(layer), [0, 0, 1, 1, 2, 2, 3, 3, 3]);
}

/// Independent nodes may stand in any order: here the right branch before the left.
#[test]
fn order_of_independent_nodes_does_not_matter() {
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(root().join("examples/two-branch.json")).unwrap()).unwrap();
    let nodes = json["nodes"].as_array_mut().unwrap();
    let at = |nodes: &Vec<Value>, name: &str| nodes.iter().position(|n| n["name"] == name).unwrap();
    for name in ["r1", "r1.act", "r1.up"] {
        let (from, to) = (at(nodes, name), at(nodes, "n1") + 1);
        let node = nodes.remove(from);
        nodes.insert(to, node);
    }
    assert!(at(nodes, "r1") < at(nodes, "l1.up"));
    assert_eq!(graph(&json), example("two-branch").graph);
}

/// The graph of the branching model does not depend on what things are called, but for the names.
#[test]
fn names_do_not_matter() {
    let text = std::fs::read_to_string(root().join("examples/two-branch.json")).unwrap();
    let plain = graph(&serde_json::from_str(&text).unwrap());
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let mut renamed = std::collections::BTreeMap::new();
    for (i, name) in plain.values.values().map(|v| v.name.clone()).chain(plain.dims.values().map(|d| d.name.clone())).enumerate() {
        // Reversed order of names, so that nothing sorted by name stays where it was.
        renamed.entry(name).or_insert(format!("z{:04}", 9999 - i));
    }
    renamed.insert("loss".into(), "loss".into());
    let other = |name: &str| renamed.get(name).cloned().unwrap_or_else(|| name.into());
    let rename_list = |list: &mut Value| list.as_array_mut().unwrap().iter_mut().for_each(|v| *v = other(v.as_str().unwrap()).into());
    for key in ["dims", "params"] {
        let members = std::mem::take(json[key].as_object_mut().unwrap());
        json[key] = members.into_iter().map(|(k, v)| (other(&k), v)).collect::<serde_json::Map<_, _>>().into();
    }
    for input in json["inputs"].as_array_mut().unwrap() {
        input["name"] = other(input["name"].as_str().unwrap()).into();
        rename_list(&mut input["dims"]);
    }
    for param in json["params"].as_object_mut().unwrap().values_mut() {
        rename_list(if param.is_array() { param } else { &mut param["dims"] });
    }
    for node in json["nodes"].as_array_mut().unwrap() {
        node["name"] = other(node["name"].as_str().unwrap()).into();
        rename_list(&mut node["in"]);
    }
    let shuffled = graph(&json);
    assert_ne!(shuffled.values, plain.values);
    let nameless = |mut graph: Graph| {
        graph.values.iter_mut().for_each(|(_, v)| v.name.clear());
        graph.dims.iter_mut().for_each(|(_, d)| d.name.clear());
        graph
    };
    assert_eq!(nameless(shuffled), nameless(plain));
}

#[test]
fn numbers_become_the_dims_that_ops_make_of_them() {
    let graph = example("experts").graph;
    let mut sizes: Vec<u64> = graph.dims.values().map(|d| d.size).collect();
    sizes.sort_unstable();
    // Batch; two key/value heads, two queries of each; four experts; elements of query and key heads, of value heads; sequence, hidden; ffn; vocabulary.
    assert_eq!(sizes, [1, 2, 2, 4, 16, 16, 64, 64, 96, 257]);
    let rows = graph.values.values().find(|v| v.name == "rows").unwrap();
    assert_eq!(rows.ty.layout, Layout::TopK { k: 2, capacity: None });
    assert_eq!(graph.layer_count(), 4);
}

#[test]
fn faults_are_named_with_their_place() {
    let cases: [(&str, Value, &str); 23] = [
        ("/dplan", json!(2), "`$.dplan` is 2; it should be an integer from 1 to 1"),
        ("/dims/h", json!(0), "`$.dims.h` is 0"),
        ("/dims/h", json!("hidden"), "`$.dims.h` is the string \"hidden\"; it should be a size, or \"batch\""),
        ("/dims/s", json!("batch"), "is a second batch dim"),
        ("/inputs/1", json!({"name": "targets", "dims": ["b"]}), "`$.inputs[1].dims` is an array of 1 elements"),
        ("/inputs", json!([]), "`$.inputs` is an array of 0 elements; it should be two inputs"),
        ("/params/left1", json!(["h", "g"]), "`$.params.left1[1]` is the string \"g\", which `dims` does not name"),
        ("/params/left1", json!({"dims": ["h", "f"], "init": "one"}), "it should be \"zeros\", \"ones\" or"),
        ("/params/left1", json!({"dims": ["h", "f"], "initial": "ones"}), "did you mean `init`?"),
        ("/params/tokens", json!(["h"]), "is called `tokens` like something before it"),
        ("/params/spare", json!(["h"]), "declares `spare`, which no node uses"),
        ("/params/left1", json!(["f", "h"]), "has dim `f` (192) in operand 0 where operand 1 has `h` (96)"),
        ("/nodes/0/op", json!("embedd"), "did you mean `embed`?"),
        (
            "/nodes/0/in/0",
            json!("embeding"),
            "which nothing so far is called; it should be an input, a parameter or an earlier node; did you mean `embedding`?",
        ),
        ("/nodes/3/spec", json!("bsh,fh"), "`$.nodes[3].spec`"),
        ("/nodes/3/spec", json!("bsh,fh->bsq"), "`f` is in one operand only"),
        ("/nodes/3/spec", json!("bsh,fh->bfs"), "letters of one role do not stand together"),
        ("/nodes/3/spec", json!("bsh,fh->sbf"), "`bs` and `sb` are in different order"),
        ("/nodes/2/eps", json!(-1), "`$.nodes[2].eps` is -1; it should be a number above 0"),
        ("/nodes/4/layer", json!(3), "gives some nodes a layer, and some none"),
        ("/params/places", json!([32, "h"]), "adds 32 positions to a sequence of 64"),
        ("/loss", json!("logits"), "cannot be trained on"),
        ("/nodes/1/name", json!("x"), "is called `x` like something before it"),
    ];
    let sound: Value = serde_json::from_str(&std::fs::read_to_string(root().join("examples/two-branch.json")).unwrap()).unwrap();
    for (pointer, value, message) in cases {
        let mut json = sound.clone();
        match json.pointer_mut(pointer) {
            Some(place) => *place = value,
            None => {
                let (parent, key) = pointer.rsplit_once('/').unwrap();
                json.pointer_mut(parent).unwrap()[key] = value;
            }
        }
        let error = import::model_from_bytes("m.json", json.to_string().as_bytes(), &ImportOptions::default()).unwrap_err().to_string();
        assert!(error.starts_with("m.json: ") && error.contains(message), "{pointer}: {error}");
    }
}

#[test]
fn one_value_crosses_from_a_layer_to_the_next() {
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(root().join("examples/experts.json")).unwrap()).unwrap();
    let nodes = json["nodes"].as_array_mut().unwrap();
    let at = nodes.iter().position(|n| n["name"] == "x1").unwrap();
    nodes[at]["layer"] = json!(2);
    let error = import::model_from_bytes("m.json", json.to_string().as_bytes(), &ImportOptions::default()).unwrap_err().to_string();
    assert!(error.contains("layer"), "{error}");
    json["nodes"][0]["layer"] = json!(3);
    let error = import::model_from_bytes("m.json", json.to_string().as_bytes(), &ImportOptions::default()).unwrap_err().to_string();
    assert!(error.contains("puts `n1` into layer 1 after a node of layer 3"), "{error}");
}

#[test]
fn rows_must_be_routed_by_the_gate_they_are_used_with() {
    let sound: Value = serde_json::from_str(&std::fs::read_to_string(root().join("examples/experts.json")).unwrap()).unwrap();
    let at = |name: &str| sound["nodes"].as_array().unwrap().iter().position(|n| n["name"] == name).unwrap();
    for (node, operands, message) in [
        ("rows", json!(["n2", "scores"]), "takes as gate what is not the result of `top_k_gate`"),
        ("up", json!(["n2", "w3", "gate"]), "takes rows that its gate does not route"),
        ("chosen", json!(["x1", "gate"]), "takes rows that its gate does not route"),
        ("x2", json!(["x1", "down"]), "mixes rows that are not routed alike"),
    ] {
        let mut json = sound.clone();
        json["nodes"][at(node)]["in"] = operands;
        let error = import::model_from_bytes("m.json", json.to_string().as_bytes(), &ImportOptions::default()).unwrap_err().to_string();
        assert!(error.contains(message), "{node}: {error}");
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn example(name: &str) -> Model {
    import::model(&root().join(format!("examples/{name}.json")), &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"))
}

fn graph(json: &Value) -> Graph {
    import::model_from_bytes("m.json", json.to_string().as_bytes(), &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}")).graph
}
