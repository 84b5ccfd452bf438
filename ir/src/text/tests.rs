//! Print-then-parse is identity, for every level; damaged text never panics.

use super::arbitrary::{self, Rng};
use super::*;
use crate::infer::{MOST_OPERANDS, MOST_RESULTS, arity};

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
fn every_sharded_graph_and_program_reads_back_as_it_was() {
    for seed in 0..300 {
        let rng = &mut Rng(seed);
        let size = seed as usize % 30;
        let graph = arbitrary::graph(1 + size, rng);
        let document =
            Document { sharded: rng.some(|r| arbitrary::sharded(&graph, size, r)), program: Some(arbitrary::program(&graph, size, rng)), graph };
        let text = print(&document);
        assert!(parsed(&text, parse(&text)) == document, "seed {seed}: read back otherwise\n{text}");
        let Document { graph, sharded, program } = &document;
        if let Some(program) = program {
            let text = print_program(program, graph);
            assert!(parsed(&text, parse_program(&text, graph)) == *program);
        }
        if let Some(sharded) = sharded {
            let text = print_sharded(sharded, graph);
            assert!(parsed(&text, parse_sharded(&text, graph)) == *sharded);
        }
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
fn damaged_texts_are_refused_or_read_but_never_panic() {
    let mut refused = 0;
    for seed in 0..1500 {
        let mut rng = Rng(seed);
        let graph = arbitrary::graph(1 + rng.below(6) as usize, &mut rng);
        let program = rng.some(|r| arbitrary::program(&graph, 3, r));
        let sharded = rng.some(|r| arbitrary::sharded(&graph, 3, r));
        let text = damage(&print(&Document { graph, sharded, program }), &mut rng);
        match parse(&text) {
            Ok(document) => {
                let again = print(&document);
                assert!(parse(&again).is_ok_and(|d| print(&d) == again), "seed {seed}\n{text}\n{again}");
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

#[test]
fn schedules_are_printed_as_repetitions() {
    let graph = parsed("", parse_graph("graph \"g\""));
    let text = "program
mesh []
micro_batches 8
stage 0 {
  arena 0
  events 0
  segment begin {
  }
  segment forward {
  }
  segment backward {
  }
  segment backward_last {
  }
  schedule {
    begin 0
    repeat 4 { forward 0 }
    repeat 4 { backward 0, forward 4 }
    repeat 3 { backward 4 }
    backward_last 7
  }
}
";
    let program = parsed(text, parse_program(text, &graph));
    assert_eq!(program.stages[0].schedule.len(), 1 + 4 + 8 + 3 + 1);
    assert_eq!(print_program(&program, &graph), text);
}

#[test]
fn a_short_text_cannot_make_a_large_program() {
    let graph = parsed("", parse_graph("graph \"g\""));
    let text = |calls: &str| format!("program mesh [] micro_batches 1 stage 0 {{ arena 0 events 0 segment forward {{ }} schedule {{ {calls} }} }}");
    for (calls, right) in [
        ("repeat 18446744073709551615 { forward 0, forward 1 }", "at most 4194304 in all stages"),
        ("repeat 99999999999999999999 { forward 0 }", "how often (a whole number, not too large)"),
        ("repeat 4000000 { forward 0 } repeat 4000000 { forward 0 }", "at most 4194304 in all stages"),
        ("forward 18446744073709551615 repeat 2 { forward 18446744073709551615 }", "a smaller one"),
        ("repeat 4 { backward 0 }", "a segment of the stage"),
    ] {
        assert_eq!(parse_program(&text(calls), &graph).map_err(|e| e.expected).err().as_deref(), Some(right), "{calls}");
    }
    let table = format!("graph \"g\" table t = [{}0] layer 0 {{ {} }}", "0,".repeat(100_000), "%x = rope t (): f32[] ".repeat(100));
    assert_eq!(parse_graph(&table).map_err(|e| e.expected).err().as_deref(), Some("at most 4194304"));
}

#[test]
fn no_op_has_more_operands_and_results_than_the_most() {
    let mut rng = Rng(5);
    let arities = (0..20 * arbitrary::OPS).map(|n| arity(&arbitrary::op(n % arbitrary::OPS, &mut rng)));
    let most = arities.fold((0, 0), |most, (ins, outs)| (most.0.max(ins), most.1.max(outs)));
    assert_eq!(most, (MOST_OPERANDS, MOST_RESULTS));
}
