//! Imported graphs and their derivatives are right, and their text is them.

mod common;

use dplan::import::{self, ImportOptions};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::Graph;
use dplan_ir::layers;
use dplan_ir::text;
use dplan_ir::verify::report::annotate;
use dplan_ir::verify::verify_graph;

fn check(graph: &Graph) {
    let errors = verify_graph(graph);
    assert!(errors.is_empty(), "{}", annotate(&text::graph_printed(graph), &errors));
    let printed = text::print_graph(graph);
    let back = text::parse_graph(&printed).unwrap_or_else(|e| panic!("{e}"));
    assert!(back == *graph, "{} reads back otherwise", graph.name);
}

/// With its tags taken away, the graph falls into the same layers.
fn check_layers(graph: &Graph) {
    let mut plain = graph.clone();
    plain.nodes.iter_mut().for_each(|(_, n)| n.layer = 0);
    let (found, expected) = (layers::canonicalize(&layers::detect(&plain)), layers::canonicalize(graph));
    assert!(found == expected, "{}: found {} layers, not {}", graph.name, found.layer_count(), expected.layer_count());
    assert_eq!(layers::classes(&found), layers::classes(graph));
    assert_eq!(verify_graph(&expected), []);
}

#[test]
fn imported_graphs_and_their_derivatives_are_right_and_read_back() {
    let Some(shared) = common::shared() else { return };
    let models = ["gpt2", "llama-3.1-8b", "llama-3.1-405b", "mistral-7b-instruct-v0.3", "qwen2.5-7b-instruct", "qwen3-0.6b", "mixtral-8x7b"];
    let files = models.iter().map(|m| shared.join(format!("models/{m}.json")));
    let oracles = ["gpt2", "llama", "llama-tied", "mixtral"].into_iter().map(|m| shared.join("oracle").join(m));
    for path in files.chain(oracles) {
        let graph = import::model(&path, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}")).graph;
        check(&graph);
        check_layers(&graph);
        check(&differentiate(&graph).unwrap_or_else(|e| panic!("{}: {e}", path.display())));
    }
}
