//! Imported graphs have exactly the parameters of the models they are read from.

mod common;

use dplan::import::{self, ImportOptions, Model};
use dplan_ir::grad::differentiate;
use dplan_ir::verify::graph::verify_graph;

#[test]
fn parameter_counts_are_those_of_the_reference() {
    let Some(shared) = common::shared() else { return };
    let models = shared.join("models");
    let counts: serde_json::Value = serde_json::from_slice(&std::fs::read(models.join("PARAMETERS.json")).unwrap()).unwrap();
    let counts = counts.as_object().unwrap();
    assert!(counts.len() >= 17);
    for (name, count) in counts {
        let model = import(&models.join(format!("{name}.json")));
        assert_eq!(Some(model.graph.param_count()), count.as_u64(), "{name}");
        assert_eq!(&model.name, name);
        check_shape(&model);
    }
}

/// Against `BertForMaskedLM` and `ViTForImageClassification` with 1000 classes.
#[test]
fn encoders_have_the_parameters_of_the_reference() {
    let Some(shared) = common::shared() else { return };
    for (name, count) in [("bert-base-uncased", 109_514_298), ("vit-base-patch16-224", 86_567_656)] {
        let model = import(&shared.join("models").join(format!("{name}.json")));
        assert_eq!(model.graph.param_count(), count, "{name}");
        check_shape(&model);
        assert_eq!(verify_graph(&differentiate(&model.graph).unwrap()), [], "{name}");
    }
}

#[test]
fn oracle_models_have_the_parameters_of_their_files() {
    let Some(shared) = common::shared() else { return };
    for name in ["gpt2", "llama", "llama-tied", "mixtral"] {
        let dir = shared.join("oracle").join(name);
        let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
        let model = import(&dir);
        assert_eq!(Some(model.graph.param_count()), expected["params"].as_u64(), "{name}");
        check_shape(&model);
    }
}

/// Layers ascend, exactly one value crosses from each to the next, names are unique, pieces cover their parameters.
fn check_shape(model: &Model) {
    let graph = &model.graph;
    let layers: Vec<u32> = graph.nodes.values().map(|n| n.layer).collect();
    assert!(layers.is_sorted() && layers[0] == 0);
    let boundaries = graph.boundaries();
    assert_eq!(boundaries.len() as u32 + 1, graph.layer_count());
    for node in graph.nodes.values() {
        for &v in node.inputs.iter().filter(|&&v| graph.producer(v).is_some_and(|p| graph.nodes[p].layer < node.layer)) {
            assert_eq!(v, boundaries[node.layer as usize - 1], "{} crosses into layer {}", graph.values[v].name, node.layer);
        }
    }
    let mut names: Vec<&str> = graph.values.values().map(|v| v.name.as_str()).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|w| w[0] != w[1]));
    for param in graph.params.values() {
        let held: u64 = param
            .pieces
            .iter()
            .map(|p| p.narrow.map_or(1, |n| n.len) * p.view.iter().product::<u64>() / p.narrow.map_or(1, |n| p.view[n.dim as usize]))
            .sum();
        assert_eq!(held, graph.shape(param.value).iter().product::<u64>());
        for piece in &param.pieces {
            assert_eq!(piece.shape.iter().product::<u64>(), piece.view.iter().product::<u64>());
        }
    }
}

fn import(path: &std::path::Path) -> Model {
    import::model(path, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"))
}
