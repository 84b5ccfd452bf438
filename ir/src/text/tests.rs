use super::arbitrary::{self, Rng};
use super::*;

fn parsed<T>(text: &str, result: Result<T, ParseError>) -> T {
    result.unwrap_or_else(|e| panic!("{e}\n{text}"))
}

#[test]
fn every_graph_reads_back_as_it_was() {
    for seed in 0..400 {
        let graph = arbitrary::graph(seed as usize % 60, &mut Rng(seed));
        let text = print_graph(&graph);
        let back = parsed(&text, parse_graph(&text));
        assert!(back == graph, "seed {seed}: read back otherwise\n{text}\n{}", print_graph(&back));
    }
}

#[test]
fn each_marked_line_shows_its_entity() {
    let graph = arbitrary::graph(40, &mut Rng(7));
    let printed = graph_printed(&graph);
    let lines: Vec<&str> = printed.text.lines().collect();
    for (place, line) in &printed.lines {
        let line = lines[*line as usize];
        match place {
            Place::Top => assert!(line.starts_with("graph ")),
            Place::Dim(_) => assert!(line.starts_with("dim ")),
            Place::Param(_) => assert!(line.trim_start().starts_with("param ")),
            Place::Node(_) | Place::Value(_) => assert!(line.contains(" = ") || line.contains("input ") || line.contains("param ")),
            _ => panic!("{place:?} in a graph"),
        }
    }
    assert_eq!(printed.lines.len(), 1 + graph.dims.len() + graph.values.len() + graph.params.len() + graph.nodes.len());
}

/// Damages `text` somewhere: bytes lost, doubled, swapped for others, pieces moved.
fn damage(text: &str, rng: &mut Rng) -> String {
    const SPICE: [&str; 20] = [
        "%",
        "#",
        "\"",
        "\\u{",
        "[",
        "}",
        "{",
        "//",
        "99999999999999999999",
        "4294967295",
        "-",
        ">",
        "nan",
        "repeat",
        "é",
        "layer",
        "#0",
        ",",
        "x",
        "\n",
    ];
    let mut chars: Vec<char> = text.chars().collect();
    for _ in 0..=rng.below(3) {
        let at = rng.below(chars.len() as u64 + 1) as usize;
        let end = (at + rng.below(20) as usize).min(chars.len());
        match rng.below(4) {
            0 => drop(chars.drain(at..end)),
            1 => {
                let piece: Vec<char> = chars[at..end].to_vec();
                let to = rng.below(chars.len() as u64 + 1) as usize;
                chars.splice(to..to, piece);
            }
            2 => chars.truncate(at),
            _ => drop(chars.splice(at..at, rng.pick(&SPICE).chars())),
        }
    }
    chars.into_iter().collect()
}

#[test]
fn damaged_graphs_are_refused_or_read_but_never_panic() {
    let mut refused = 0;
    for seed in 0..1500 {
        let mut rng = Rng(seed);
        let text = print_graph(&arbitrary::graph(rng.below(12) as usize, &mut rng));
        let text = damage(&text, &mut rng);
        match parse_graph(&text) {
            Ok(graph) => {
                let again = print_graph(&graph);
                assert!(parse_graph(&again).is_ok_and(|g| print_graph(&g) == again), "seed {seed}\n{text}");
            }
            Err(e) => {
                let lines = text.split('\n').count() as u32;
                assert!(e.line >= 1 && e.line <= lines && e.column >= 1, "seed {seed}: {e}\n{text}");
                refused += 1;
            }
        }
    }
    assert!(refused > 700, "only {refused} of the damaged texts were refused");
}

#[test]
fn errors_say_where_and_what_would_be_right() {
    let head = "graph \"g\"\ndim b = 2\n";
    for (text, error) in [
        ("", "1:1: found the end of the text; expected `graph`"),
        ("graph g", "1:7: found `g`; expected the graph's name, in quotes"),
        ("dim b = -1", "3:9: found `-`; expected the dim's size"),
        ("dim c = 18446744073709551616", "3:9: found `18446744073709551616`; expected the dim's size (a whole number, not too large)"),
        ("input %x: f32[q]", "3:15: found `q`, which is no dim; expected perhaps `b`"),
        ("input %x: f31[b]", "3:11: found `f31`, which is no element type; expected perhaps `f32`"),
        ("layer 0 { %y = einsm bs,sh->bh (%x): f32[b] }", "3:16: found `einsm`, which is no op; expected perhaps `einsum`"),
        ("layer 0 { %y = neg (%z): f32[b] }", "3:21: found `z`, which is no value; expected perhaps `y`"),
        ("layer 0 { %y = rope t0 (%y): f32[b] }", "3:21: found `t0`, which is no table; expected a table that exists: there is none"),
        ("layer 0 { %y, %z = neg (%y): f32[b] }", "3:37: found `}`; expected `,` and the type of result 1"),
        ("%y = neg (%y): f32[b]", "3:1: found `%y`; expected `layer N {` around nodes"),
        ("loss %l loss %l", "3:9: found `loss`; expected only one `loss`"),
        ("input %x: f32[b]\ninput %x: f32[b]\nloss %x", "5:6: found `x`, which several values are called; expected its number too: `x#…`"),
        ("input %x#4000000000: f32[b]", "3:7: found value #4000000000 but no value with the number before; expected each number from 0 once"),
        ("param %\"a\nb\": f32[b] zeros", "3:7: found `%\"a`; expected a `\"` that closes the string on its line"),
        ("dim größe = 1 é", "3:7: found `ö`; expected `=`"),
    ] {
        let text = if text.starts_with("graph") || text.is_empty() { text.to_string() } else { format!("{head}{text}") };
        assert_eq!(parse_graph(&text).map_err(|e| e.to_string()).err().as_deref(), Some(error), "{text}");
    }
}
