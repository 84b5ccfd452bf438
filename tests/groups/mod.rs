//! What the tests of bug groups (`docs/bugs.md`) share: small models whose sizes divide by nothing, and one check, [`check`]: under a plan, in f64, CPU ranks
//! have the losses, gradients, norms and weights of one rank that takes the whole batch at once, and all copies of a weight have the same bits.
#![allow(dead_code)]

use std::sync::Arc;
use std::time::Duration;

use dplan::compile::compile;
use dplan::feed::Feed;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::planfile::PlanFile;
use dplan::runtime::{Batch, Options, Order, Rows, Session, Which};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::program::{Program, Role};
use dplan_ir::verify::verify_program;
use dplan_planner::lower;

use crate::common::{self, Tensors, distance};

pub const BATCH: u64 = 8;
pub const SEQ: u64 = 8;
pub const STEPS: u64 = 3;
pub const SEED: u64 = 5;
pub const HYPER: Hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 0.5 };

/// Four layers, 6 heads of queries and 3 of keys, a vocabulary of 37, a tied head.
pub const LLAMA: &str = r#"{"model_type":"llama","vocab_size":37,"hidden_size":24,"intermediate_size":20,"num_hidden_layers":4,"num_attention_heads":6,"num_key_value_heads":3,"max_position_embeddings":16,"tie_word_embeddings":true}"#;
/// Four experts, of which a token takes two.
pub const MIXTRAL: &str = r#"{"model_type":"mixtral","vocab_size":36,"hidden_size":16,"intermediate_size":12,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"num_local_experts":4,"num_experts_per_tok":2,"max_position_embeddings":16,"sliding_window":null}"#;

/// A config with some of its keys set otherwise: `"vocab_size":36`.
pub fn with(config: &str, keys: &str) -> String {
    let mut json: serde_json::Value = serde_json::from_str(config).unwrap();
    let others: serde_json::Value = serde_json::from_str(&format!("{{{keys}}}")).unwrap();
    others.as_object().unwrap().iter().for_each(|(key, value)| json[key] = value.clone());
    json.to_string()
}

pub fn import(config: &str) -> Graph {
    import_as(config, DType::F64)
}
pub fn import_as(config: &str, compute: DType) -> Graph {
    let options = ImportOptions { seq: Some(SEQ), compute, family: None };
    model_from_bytes("config.json", config.as_bytes(), &options).unwrap_or_else(|e| panic!("{e}")).graph
}

/// The best plan under these pins, verified.
pub fn plan(model: &Graph, ranks: u64, pins: &str) -> PlanFile {
    let compute = model.values[model.params[ParamId(0)].value].ty.dtype;
    compile(model, &common::options(&format!("cpu:{ranks}"), BATCH, compute, pins)).unwrap_or_else(|e| panic!("{pins}: {e}")).file
}

/// The same choices but for those that `change` makes.
pub fn changed(file: &PlanFile, change: impl FnOnce(&mut PlanFile)) -> PlanFile {
    let mut file = file.clone();
    change(&mut file);
    file.program = lower::lower(&file.graph, &file.plan).unwrap_or_else(|e| panic!("{e}"));
    verify_program(&file.graph, &file.program).unwrap_or_else(|v| panic!("{}", v[0]));
    file
}

/// The verifier's reasons to refuse a program; none if it accepts it.
pub fn reasons(graph: &Graph, program: &Program) -> Vec<String> {
    verify_program(graph, program).err().unwrap_or_default().iter().map(ToString::to_string).collect()
}

pub fn session(file: &PlanFile, order: Order) -> Session {
    let options = Options { order, timeout: Duration::from_secs(120), ..Options::default() };
    let mut session = Session::new(file.graph.clone(), file.program.clone(), &options).unwrap_or_else(|e| panic!("{e}"));
    session.initialise(SEED).unwrap();
    session
}

/// Random data: whatever the plan, step `n` has the same sequences.
pub fn batch(graph: &Graph, step: u64) -> Arc<Batch> {
    Arc::new(Feed::new(graph, None, BATCH, SEED).unwrap().batch(step).unwrap())
}

/// What the loss is divided by: its targets, or what they weigh if the model has an input of weights.
pub fn divisor(graph: &Graph, batch: &Batch) -> f64 {
    let weights = batch.inputs.iter().find_map(|rows| match rows {
        Rows::Values(values) => Some(values.iter().map(|x| x.max(0.0)).sum()),
        Rows::Tokens(_) => None,
    });
    weights.unwrap_or_else(|| Feed::new(graph, None, BATCH, SEED).unwrap().targets() as f64)
}

/// What a run leaves.
#[derive(PartialEq)]
pub struct Trained {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    /// Of the first step.
    pub grads: Tensors,
    pub params: Tensors,
    /// For each parameter, the elements that some rank has as well as another.
    pub copies: Table<ParamId, usize>,
}

pub fn train(file: &PlanFile, order: Order) -> Trained {
    train_on(file, &mut session(file, order))
}
pub fn train_on(file: &PlanFile, session: &mut Session) -> Trained {
    let (mut losses, mut norms, mut grads) = (Vec::new(), Vec::new(), Table::new());
    for step in 0..STEPS {
        let batch = batch(&file.graph, step);
        let scalars = StepScalars::new(HYPER, step + 1, 1.0 / divisor(&file.graph, &batch));
        let result = session.step(&scalars, &batch).unwrap_or_else(|e| panic!("{e}"));
        losses.push(result.loss);
        norms.push(result.grad_norm.unwrap());
        if step == 0 {
            grads = session.grads().unwrap();
        }
    }
    let params = session.params().unwrap();
    let copies = params.map(|p, values| copies(session, p, values.len()));
    Trained { losses, norms, grads, params, copies }
}

/// Elements of a parameter that more than one rank has, which must have the same bits everywhere.
fn copies(session: &mut Session, param: ParamId, len: usize) -> usize {
    let mut seen: Vec<Option<[u8; 8]>> = vec![None; len];
    let mut copies = 0;
    for holding in session.holdings_of(Role::Param, param, Which::Home) {
        let mut bytes = vec![0; holding.bytes()];
        session.copy_out(&holding, &mut bytes).unwrap();
        let places = holding.runs.iter().flat_map(|r| r.logical..r.logical + r.len);
        for (at, bits) in places.zip(bytes.chunks_exact(8)) {
            let first = seen[at].get_or_insert_with(|| bits.try_into().unwrap());
            assert!(first[..] == *bits, "{param}: rank {} has other bits than another rank", holding.rank);
            copies += 1;
        }
    }
    assert!(seen.iter().all(Option::is_some), "{param}: some elements are nowhere");
    copies - len
}

/// One rank that takes the whole batch at once.
pub fn one_rank(model: &Graph) -> Trained {
    let file = plan(model, 1, "dp=1,tp=1,pp=1,micro=8,recompute=none");
    assert_eq!((file.plan.micro_batches, file.program.ranks()), (1, 1));
    train(&file, Order::Eager)
}

/// Every plan trains as one rank does. Gives the plans, with what they left, to say that they are what the group is about.
pub fn check(model: &Graph, ways: &[(u64, &str)]) -> Vec<(PlanFile, Trained)> {
    let one = one_rank(model);
    let files = ways.iter().map(|&(ranks, pins)| (pins, plan(model, ranks, pins)));
    files.map(|(pins, file)| alike(pins, file, &one)).collect()
}

/// A plan that trains as one rank did.
pub fn alike(what: &str, file: PlanFile, one: &Trained) -> (PlanFile, Trained) {
    let found = train(&file, Order::Eager);
    let near = |x: f64, y: f64, tolerance: f64| (x / y - 1.0).abs() < tolerance;
    for step in 0..STEPS as usize {
        let (loss, norm) = ((found.losses[step], one.losses[step]), (found.norms[step], one.norms[step]));
        assert!(near(loss.0, loss.1, 1e-12), "{what}: loss {} of step {step}, one rank has {}", loss.0, loss.1);
        assert!(near(norm.0, norm.1, 1e-11), "{what}: norm {} of step {step}, one rank has {}", norm.0, norm.1);
    }
    // The norm is that of the gradients, each logical element once.
    let counted = norm_of(found.grads.values().flatten());
    assert!(near(found.norms[0], counted, 1e-12), "{what}: the norm is {}, the gradients have {counted}", found.norms[0]);
    for (kind, found, one, tolerance) in [("gradient", &found.grads, &one.grads, 1e-11), ("weight", &found.params, &one.params, 1e-9)] {
        let (error, tensor) = distance(&file.graph, found, one);
        assert!(error < tolerance, "{what}: the {kind} of {tensor} is {error:e} from that of one rank");
    }
    (file, found)
}

fn norm_of<'a>(elements: impl Iterator<Item = &'a f64>) -> f64 {
    elements.map(|x| x * x).sum::<f64>().sqrt()
}

pub fn name(graph: &Graph, param: ParamId) -> &str {
    &graph.values[graph.params[param].value].name
}

/// The parameters with this in their name.
pub fn named(graph: &Graph, part: &str) -> Vec<ParamId> {
    let found: Vec<ParamId> = graph.params.ids().filter(|&p| name(graph, p).contains(part)).collect();
    assert!(!found.is_empty(), "no parameter is called {part}");
    found
}
