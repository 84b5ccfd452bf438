//! Tests that are text: each file of `tests/filetests` begins with `test COMMAND`, and its body is what the command makes of it.
//!
//! A command is a function from a body to what the body should be: expectations are comments and text in place. `DPLAN_BLESS=1` writes what should be
//! into the files, to be read in the diff. Comments before the first statement say what a file is about and are kept.

use std::fs;
use std::path::{Path, PathBuf};

use dplan::import::vocabulary;
use dplan_ir::dtype::DType;
use dplan_ir::entity::ValueId;
use dplan_ir::graph::Graph;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, train_step};
use dplan_ir::interp::program::ProgramRun;
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};
use dplan_ir::text::{self, ParseError};
use dplan_ir::verify::report::annotate;
use dplan_ir::{grad, init, layers, verify};

/// From a body to what it should be.
type Command = fn(&str) -> Result<String, ParseError>;

const COMMANDS: [(&str, Command); 7] = [
    ("cat", cat),
    ("parse-error", parse_error),
    ("verify", verify),
    ("program-verify", verify_program),
    ("grad", differentiate),
    ("layers", find_layers),
    ("run", run),
];

/// Printing what was read gives the same text.
fn cat(body: &str) -> Result<String, ParseError> {
    text::parse(body).map(|document| text::print(&document))
}

/// The last line says where and how the text is wrong.
fn parse_error(body: &str) -> Result<String, ParseError> {
    let text: String = body.split_inclusive('\n').filter(|line| !line.starts_with("// error: ")).collect();
    let said = text::parse(&text).err().map_or("none".to_string(), |e| e.to_string());
    Ok(format!("{text}// error: {said}\n"))
}

/// Each error of the graph verifier stands below the line it is about.
fn verify(body: &str) -> Result<String, ParseError> {
    let graph = text::parse_graph(body)?;
    Ok(annotate(&text::graph_printed(&graph), &verify::verify_graph(&graph)))
}

/// Each error of the verifiers of the graph, its sharded form and its program stands below the line it is about.
fn verify_program(body: &str) -> Result<String, ParseError> {
    let text::Document { graph, sharded, program } = text::parse(body)?;
    let mut parts = vec![annotate(&text::graph_printed(&graph), &verify::verify_graph(&graph))];
    parts.extend(sharded.map(|s| annotate(&text::sharded_printed(&s, &graph), &verify::sharded::sharded(&graph, &s))));
    parts.extend(
        program.map(|p| annotate(&text::program_printed(&p, &graph), &verify::program::verify_program(&graph, &p).err().unwrap_or_default())),
    );
    Ok(parts.join("\n"))
}

const BECOMES: &str = "// becomes\n";

/// A forward graph, then the same graph with its backward pass, which is right.
fn differentiate(body: &str) -> Result<String, ParseError> {
    let source = body.split(BECOMES).next().unwrap_or_default();
    let graph = text::parse_graph(source)?;
    let after = match grad::differentiate(&graph) {
        Ok(graph) => annotate(&text::graph_printed(&graph), &verify::verify_graph(&graph)),
        Err(e) => format!("// error: {e}\n"),
    };
    Ok(format!("{}{BECOMES}{after}", text::print_graph(&graph)))
}

/// A forward graph, then the same with layers found from its structure, in canonical order, and the class of each layer.
fn find_layers(body: &str) -> Result<String, ParseError> {
    let source = body.split(BECOMES).next().unwrap_or_default();
    let graph = text::parse_graph(source)?;
    let found = layers::canonicalize(&layers::detect(&graph));
    let after = annotate(&text::graph_printed(&found), &verify::verify_graph(&found));
    Ok(format!("{}{BECOMES}{after}// classes: {:?}\n", text::print_graph(&graph), layers::classes(&found)))
}

/// A differentiated graph, perhaps with a program of it, then what two training steps report: of the reference interpreter on one device, and of all
/// ranks of the program.
fn run(body: &str) -> Result<String, ParseError> {
    let document = text::parse(body)?;
    let text::Document { graph, program, .. } = &document;
    let optimizer = program.as_ref().and_then(|p| p.optimizer).unwrap_or(Optimizer::Sgd);
    let params = init::params(graph, 1);
    let mut state = TrainState::new(params.clone(), optimizer);
    let mut ranks = program.as_ref().map(|p| ProgramRun::new(graph, p, 1));
    if let Some(ranks) = &mut ranks {
        params.iter().for_each(|(id, whole)| ranks.set_param(id, whole));
    }
    let micro_batches = program.as_ref().map_or(1, |p| p.micro_batches) as usize;
    let tokens = graph.inputs.last().map_or(1, |&v| graph.shape(v).iter().product::<u64>());
    let hyper = Hyper { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 0.5 };
    let mut lines = String::new();
    for step in 1..=2 {
        let scalars = StepScalars::new(hyper, step, 1.0 / (tokens * micro_batches as u64) as f64);
        let inputs: Vec<Vec<Tensor>> = (0..micro_batches).map(|m| inputs(graph, m + step as usize * micro_batches)).collect();
        let one = train_step(graph, &mut state, &inputs, &scalars, optimizer);
        lines += &format!("// step {step}: loss {:.9}, gradient norm {:.9}\n", one.loss, one.grad_norm);
        match ranks.as_mut().map(|r| r.step(&inputs, &scalars)) {
            Some(Ok(all)) => {
                lines += &format!(
                    "// on {} ranks: loss {:.9}, gradient norm {:.9}\n",
                    program.iter().map(|p| p.ranks()).sum::<u64>(),
                    all.loss,
                    all.grad_norm.unwrap_or(f64::NAN)
                )
            }
            Some(Err(fault)) => lines += &format!("// error: {fault}\n"),
            None => {}
        }
    }
    Ok(format!("{}{lines}", text::print(&document)))
}

/// Token ids, or small numbers, that differ from micro-batch to micro-batch.
fn inputs(graph: &Graph, micro_batch: usize) -> Vec<Tensor> {
    let vocabulary = vocabulary(graph).unwrap_or(2);
    let input = |(at, &value): (usize, &ValueId)| {
        let number = |index: &[u64]| index.iter().fold(0, |n, i| 7 * n + i) + (5 * at + 3 * micro_batch) as u64;
        match graph.values[value].ty.dtype {
            DType::I32 => Tensor::from_fn(&graph.shape(value), |i| (number(i) % vocabulary) as f64),
            _ => Tensor::from_fn(&graph.shape(value), |i| (number(i) % 11) as f64 / 5.5 - 1.0),
        }
    };
    graph.inputs.iter().enumerate().map(input).collect()
}

#[test]
fn every_file_is_what_its_command_makes_of_it() {
    let bless = std::env::var_os("DPLAN_BLESS").is_some_and(|v| v == "1");
    let mut files = Vec::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filetests"), &mut files);
    assert!(files.len() >= COMMANDS.len(), "no filetests found");
    let failures: Vec<String> = files.iter().filter_map(|file| check(file, bless).err().map(|why| format!("{}: {why}", file.display()))).collect();
    assert!(failures.is_empty(), "{}\nDPLAN_BLESS=1 rewrites the files.", failures.join("\n"));
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "dp") {
            files.push(path);
        }
    }
}

fn check(file: &Path, bless: bool) -> Result<(), String> {
    let whole = fs::read_to_string(file).map_err(|e| e.to_string())?;
    let (header, rest) = whole.split_once('\n').ok_or("is empty")?;
    let name = header.strip_prefix("test ").ok_or("should begin with `test COMMAND`")?;
    let command = COMMANDS.iter().find(|(n, _)| *n == name).ok_or(format!("`{name}` is no command"))?.1;
    let about: usize = rest.split_inclusive('\n').take_while(|line| line.starts_with("//") || line.trim().is_empty()).map(str::len).sum();
    let (about, body) = rest.split_at(about);
    let skipped = 1 + about.matches('\n').count() as u32;
    let right = command(body).map_err(|e| ParseError { line: e.line + skipped, ..e }.to_string())?;
    if right == body {
        return Ok(());
    }
    if bless {
        return fs::write(file, format!("{header}\n{about}{right}")).map_err(|e| e.to_string());
    }
    let line = body.lines().zip(right.lines()).take_while(|(a, b)| a == b).count();
    let of = |text: &str| text.lines().nth(line).unwrap_or("the end").to_string();
    Err(format!("line {}:\n  is        {}\n  should be {}", line as u32 + 1 + skipped, of(body), of(&right)))
}
