//! dplan's own graph JSON: any model out of the ops of the graph, branching or not.
//!
//! ```json
//! { "dplan": 1, "name": "bigram",
//!   "dims": { "b": "batch", "s": 64, "v": 257, "h": 32 },
//!   "inputs": [ { "name": "tokens", "dims": ["b", "s"] }, { "name": "targets", "dims": ["b", "s"] } ],
//!   "params": { "table": ["v", "h"], "head": { "dims": ["v", "h"], "init": "zeros" } },
//!   "nodes": [
//!     { "name": "x", "op": "embed", "in": ["table", "tokens"] },
//!     { "name": "logits", "op": "einsum", "spec": "bsh,vh->bsv", "in": ["x", "head"] },
//!     { "name": "loss", "op": "cross_entropy", "in": ["logits", "targets"] } ],
//!   "loss": "loss" }
//! ```
//!
//! - A dim is a name of `dims`, or a number; numbers become one dim where an op says so ([`unify`]). One dim may be the `"batch"`.
//! - `inputs` are the token ids and the targets, in this order.
//! - Nodes stand in order of execution; a further result of node `x` is `x.1`. `layer` numbers are given to all nodes or to none, and never
//!   decrease; where there are none, dplan finds the layers.
//! - Names, and the order of independent nodes, matter to nobody but the reader: the graph is brought into an order of its own.

mod op;
mod unify;

use std::collections::BTreeMap;

use dplan_ir::build::Builder;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{DimId, ValueId};
use dplan_ir::graph::{Graph, Init};
use dplan_ir::layers;
use dplan_ir::op::Op;
use dplan_ir::rule::rule;

use super::json::At;
use super::{Dropout, ImportError, ImportOptions, Model, limits};
use op::Written;
use unify::{Classes, Var};

pub use op::{FUNCTIONS, OPS};

/// Most dims of a value.
pub const MAX_RANK: usize = 8;
/// Most rotary frequencies in all nodes together.
const MAX_FREQUENCIES: u64 = 1 << 22;
/// Longest name.
const MAX_NAME: usize = 200;

/// Whether a document is a graph of ours (rather than a Hugging Face config).
pub fn recognises(root: &At<'_>) -> bool {
    root.get_or_null("dplan").is_some() || (root.get("nodes").is_some() && root.get("model_type").is_none())
}

/// A declared input or parameter.
struct Declared<'a> {
    name: &'a str,
    at: At<'a>,
    dims: Vec<Var>,
    init: Init,
}

struct NodeToBuild {
    name: String,
    op: Op,
    /// Ids in the first pass.
    inputs: Vec<ValueId>,
    layer: Option<u64>,
}

/// Everything known of the graph after the first pass, in which all dims are one: it finds the number of dims of each value, and which dims are the same.
struct Reader<'a> {
    classes: Classes,
    names: BTreeMap<String, ValueId>,
    /// Infers layouts, element types and numbers of dims.
    sketch: Builder,
    any_dim: DimId,
    /// For each value of the sketch.
    dims: Vec<Vec<Var>>,
    /// For each value of the sketch that holds routed rows: the gate they are routed by.
    gates: Vec<Option<ValueId>>,
    declared: BTreeMap<ValueId, Declared<'a>>,
    nodes: Vec<NodeToBuild>,
}

/// Imports a graph.
///
/// # Errors
/// What is wrong with it, and where.
pub fn model(root: &At<'_>, file_name: &str, options: &ImportOptions) -> Result<Model, ImportError> {
    root.only(&["dplan", "name", "description", "dims", "inputs", "params", "nodes", "loss"])?;
    root.need("dplan", "1: the version of the format")?.integer(1..=1)?;
    let name = root.get_or_null("name").map_or(Ok(file_name), |at| at.string())?;
    if let Some(at) = root.get_or_null("description") {
        at.string()?;
    }
    let mut sketch = Builder::new(name);
    let any_dim = sketch.dim("any", 1);
    let mut reader = Reader {
        classes: Classes::default(),
        names: BTreeMap::new(),
        sketch,
        any_dim,
        dims: Vec::new(),
        gates: Vec::new(),
        declared: BTreeMap::new(),
        nodes: Vec::new(),
    };
    let (named, batch) = dims(root, &mut reader.classes)?;
    let inputs = reader.inputs(root, &named, batch, options)?;
    reader.params(root, &named, options)?;
    reader.nodes(root)?;
    let loss_at = root.need("loss", "the name of the node that is the loss")?;
    let loss =
        *reader.names.get(loss_at.string()?).ok_or_else(|| loss_at.wrong(&format!("{}, which nothing is called", loss_at.found()), "a node"))?;

    let graph = reader.build(root, name, &inputs, batch, loss, options)?;
    limits::check(root.file(), &graph)?;
    dplan_ir::grad::differentiate(&graph)
        .map_err(|e| loss_at.wrong(&format!("cannot be trained on: {e}"), "the `mean` that all parameters lead to"))?;
    Ok(Model {
        graph,
        name: name.into(),
        family: "graph".into(),
        max_positions: None,
        default_dtype: DType::F32,
        dropout: Dropout::default(),
        notes: Vec::new(),
    })
}

/// The named dims, and which of them is the batch.
fn dims(root: &At<'_>, classes: &mut Classes) -> Result<(BTreeMap<String, Var>, Option<Var>), ImportError> {
    let (mut named, mut batch) = (BTreeMap::new(), None);
    let Some(at) = root.get_or_null("dims") else { return Ok((named, batch)) };
    for (name, size) in at.object()? {
        check_name(&size, name)?;
        let var = if size.value().is_string() {
            if size.string()? != "batch" {
                return Err(size.wrong(&size.found(), "a size, or \"batch\""));
            }
            let var = classes.named(name, 1);
            if batch.replace(var).is_some() {
                return Err(size.wrong("is a second batch dim", "a size: one dim is the batch"));
            }
            var
        } else {
            classes.named(name, size.integer(1..=limits::MAX_DIM)?)
        };
        named.insert(name.to_string(), var);
    }
    Ok((named, batch))
}

impl<'a> Reader<'a> {
    /// Reads `inputs`: tokens and targets.
    fn inputs(
        &mut self,
        root: &At<'a>,
        named: &BTreeMap<String, Var>,
        batch: Option<Var>,
        options: &ImportOptions,
    ) -> Result<[ValueId; 2], ImportError> {
        let right = "two inputs, the tokens and the targets, like { \"name\": \"tokens\", \"dims\": [\"b\", \"s\"] }";
        let list_at = root.need("inputs", right)?;
        let mut ids = Vec::new();
        for at in list_at.array()? {
            at.only(&["name", "dims"])?;
            let name = at.need("name", "the name of the input")?.string()?;
            let dims_at = at.need("dims", "the dims of the input: batch and sequence")?;
            let dims = self.read_dims(&dims_at, named)?;
            if dims.len() != 2 || (batch.is_some() && batch != dims.first().copied()) {
                return Err(dims_at.wrong(&dims_at.found(), "the batch dim and the dim of the sequence"));
            }
            if let Some(seq) = options.seq
                && self.classes.size(dims[1]) != seq
            {
                let length = format!("is {} tokens long, and --seq asks for {seq}", self.classes.spell(dims[1]));
                return Err(dims_at.wrong(&length, "the length that --seq asks for; a graph has the length that it is written with"));
            }
            let sketched = vec![self.any_dim; 2];
            let id = self.sketch.input(name, DType::I32, &sketched);
            self.declare(at.clone(), name, id, dims.clone(), None)?;
            self.declared.insert(id, Declared { name, at, dims, init: Init::Zeros });
            ids.push(id);
        }
        let Ok(ids): Result<[ValueId; 2], _> = ids.try_into() else { return Err(list_at.wrong(&list_at.found(), right)) };
        Ok(ids)
    }

    /// Reads `params`.
    fn params(&mut self, root: &At<'a>, named: &BTreeMap<String, Var>, options: &ImportOptions) -> Result<(), ImportError> {
        let Some(params) = root.get_or_null("params") else { return Ok(()) };
        for (name, at) in params.object()? {
            let (dims_at, init) = if at.value().is_array() {
                (at.clone(), Init::Normal { std: 0.02 })
            } else {
                at.only(&["dims", "init"])?;
                (at.need("dims", "the dims of the parameter")?, at.get_or_null("init").map_or(Ok(Init::Normal { std: 0.02 }), |at| init(&at))?)
            };
            let dims = self.read_dims(&dims_at, named)?;
            let sketched = vec![self.any_dim; dims.len()];
            let id = self.sketch.param(name, options.compute, &sketched, init, Vec::new());
            self.declare(at.clone(), name, id, dims.clone(), None)?;
            self.declared.insert(id, Declared { name, at, dims, init });
        }
        Ok(())
    }

    /// Reads `nodes`: unifies dims, and infers the number of dims of results.
    fn nodes(&mut self, root: &At<'a>) -> Result<(), ImportError> {
        let list = root.need("nodes", "an array of nodes")?;
        let mut frequencies = 0;
        for at in list.array()? {
            at.object()?;
            let written = op::read(&at)?;
            let composite = matches!(written, Written::CrossEntropy);
            let name = at.need("name", "the name of the node")?.string()?;
            let layer = at.get_or_null("layer").map_or(Ok(None), |l| l.integer(0..=limits::MAX_LAYERS).map(Some))?;
            let inputs = self.operands(&at)?;
            let first: Vec<u64> = inputs.first().map_or(Vec::new(), |v| self.dims[v.0 as usize].iter().map(|&d| self.classes.size(d)).collect());
            if matches!(written, Written::Rope { .. }) {
                frequencies += first.last().map_or(0, |d| d / 2);
                if frequencies > MAX_FREQUENCIES {
                    return Err(at.wrong("makes more rotary frequencies than any model has", "a rotation of smaller heads"));
                }
            }
            let op = written.resolve(&first).map_err(|why| at.wrong(&why, "a node whose sizes fit"))?;
            if !composite {
                self.node(&at, name, op, inputs, layer)?;
                continue;
            }
            let stats = self.node(&at, &format!("{name}.lse"), op, inputs, layer)?;
            let losses = self.node(&at, &format!("{name}.losses"), Op::Sub, stats, layer)?;
            self.node(&at, name, Op::Mean, losses, layer)?;
        }
        let tagged = self.nodes.iter().filter(|n| n.layer.is_some()).count();
        if tagged != 0 && tagged != self.nodes.len() {
            return Err(list.wrong("gives some nodes a layer, and some none", "a list in which all nodes have a layer, or none has"));
        }
        Ok(())
    }

    fn operands(&self, at: &At<'a>) -> Result<Vec<ValueId>, ImportError> {
        let list = at.need("in", "the names of the operands")?.array()?;
        list.iter()
            .map(|operand| {
                let name = operand.string()?;
                self.names.get(name).copied().ok_or_else(|| {
                    let near = super::nearest(name, self.names.keys().map(String::as_str)).map(|n| format!("; did you mean `{n}`?"));
                    let right = format!("an input, a parameter or an earlier node{}", near.unwrap_or_default());
                    operand.wrong(&format!("{}, which nothing so far is called", operand.found()), &right)
                })
            })
            .collect()
    }

    fn node(&mut self, at: &At<'a>, name: &str, op: Op, inputs: Vec<ValueId>, layer: Option<u64>) -> Result<Vec<ValueId>, ImportError> {
        let fits = "operands that the op takes";
        let gate = self.gate(&op, &inputs).map_err(|why| at.wrong(&why, "rows of one `dispatch`, with its gate"))?;
        let outputs = self.sketch.node(name, op.clone(), &inputs).map_err(|why| at.wrong(&format!("does not fit: {why}"), fits))?;
        let ranks = |ids: &[ValueId]| ids.iter().map(|&v| self.sketch.graph.values[v].ty.dims.len()).collect::<Vec<_>>();
        let rule = rule(&op, &ranks(&inputs), &ranks(&outputs));
        let spelled: Vec<(Vec<char>, &[Var])> = rule.ins.iter().cloned().zip(inputs.iter().map(|v| &self.dims[v.0 as usize][..])).collect();
        let letters = self.classes.unify(&spelled).map_err(|why| at.wrong(&why, fits))?;
        if op == Op::AddPosition {
            let size = |label| letters.iter().find(|(l, _)| *l == label).map_or(0, |&(_, var)| self.classes.size(var));
            if size('s') > size('p') {
                return Err(
                    at.wrong(&format!("adds {} positions to a sequence of {}", size('p'), size('s')), "a table with a row for every position")
                );
            }
        }
        for (&id, (labels, _)) in outputs.iter().zip(&rule.outs) {
            let dims: Option<Vec<Var>> = labels.iter().map(|label| letters.iter().find(|(l, _)| l == label).map(|&(_, var)| var)).collect();
            let Some(dims) = dims else { return Err(at.wrong("gives a result whose dims do not follow from its operands", "a forward op")) };
            if dims.len() > MAX_RANK {
                return Err(at.wrong(&format!("gives a result of {} dims", dims.len()), &format!("at most {MAX_RANK}")));
            }
            let name = self.sketch.graph.values[id].name.clone();
            self.declare(at.clone(), &name, id, dims, gate)?;
        }
        self.nodes.push(NodeToBuild { name: name.into(), op, inputs, layer });
        Ok(outputs)
    }

    /// The gate by which the results of a node are routed, if they are; all routed operands must be routed by the same one.
    fn gate(&self, op: &Op, inputs: &[ValueId]) -> Result<Option<ValueId>, String> {
        let routed: Vec<Option<ValueId>> = inputs.iter().map(|v| self.gates[v.0 as usize]).collect();
        let is_gate = |v: &ValueId| self.sketch.graph.producer(*v).is_some_and(|p| matches!(self.sketch.graph.nodes[p].op, Op::TopKGate(_)));
        let given = match op {
            Op::Dispatch => inputs.get(1),
            Op::Combine => inputs.get(1),
            Op::ExpertEinsum(_) => inputs.get(2),
            _ => {
                let first = routed.first().copied().flatten();
                let same = routed.iter().all(|r| *r == first);
                return if same { Ok(first) } else { Err("mixes rows that are not routed alike".into()) };
            }
        };
        let Some(gate) = given else { return Ok(None) };
        if !is_gate(gate) {
            return Err("takes as gate what is not the result of `top_k_gate`".into());
        }
        match op {
            Op::Dispatch if routed.iter().any(Option::is_some) => Err("routes rows that are routed already".into()),
            Op::Dispatch => Ok(Some(*gate)),
            _ if routed[0] != Some(*gate) || routed[1..].iter().any(Option::is_some) => Err("takes rows that its gate does not route".into()),
            Op::Combine => Ok(None),
            _ => Ok(Some(*gate)),
        }
    }

    /// Enters a value under its name.
    fn declare(&mut self, at: At<'a>, name: &str, id: ValueId, dims: Vec<Var>, gate: Option<ValueId>) -> Result<(), ImportError> {
        check_name(&at, name)?;
        self.dims.push(dims);
        self.gates.push(gate);
        if self.names.insert(name.into(), id).is_some() {
            return Err(at.wrong(&format!("is called `{name}` like something before it"), "called differently"));
        }
        Ok(())
    }

    fn read_dims(&mut self, at: &At<'a>, named: &BTreeMap<String, Var>) -> Result<Vec<Var>, ImportError> {
        let list = at.array()?;
        if list.len() > MAX_RANK {
            return Err(at.wrong(&format!("has {} dims", list.len()), &format!("at most {MAX_RANK}")));
        }
        list.iter()
            .map(|dim| {
                if dim.value().is_number() {
                    return Ok(self.classes.number(dim.integer(1..=limits::MAX_DIM)?));
                }
                let name = dim.string()?;
                named.get(name).copied().ok_or_else(|| {
                    let known: Vec<&str> = named.keys().map(String::as_str).collect();
                    dim.wrong(&format!("{}, which `dims` does not name", dim.found()), &format!("a size, or one of {}", known.join(", ")))
                })
            })
            .collect()
    }

    /// Second pass: the graph, with dims and parameters in order of first use.
    fn build(
        &self,
        root: &At<'_>,
        name: &str,
        inputs: &[ValueId; 2],
        batch: Option<Var>,
        loss: ValueId,
        options: &ImportOptions,
    ) -> Result<Graph, ImportError> {
        let mut second = Second { reader: self, builder: Builder::new(name), dim_of: BTreeMap::new(), value_of: BTreeMap::new() };
        for &input in inputs {
            second.declared(input, DType::I32);
        }
        let mut last_layer = 0;
        for node in &self.nodes {
            let layer = node.layer.unwrap_or(0);
            if layer < last_layer {
                return Err(
                    root.wrong(&format!("puts `{}` into layer {layer} after a node of layer {last_layer}", node.name), "a graph in order of layers")
                );
            }
            last_layer = layer;
            second.builder.set_layer(layer as u32);
            let operands: Vec<ValueId> = node.inputs.iter().map(|&v| second.value(v, options.compute)).collect();
            let made = second.builder.node(&node.name, node.op.clone(), &operands);
            let made = made.map_err(|why| ImportError::Graph { file: root.file().into(), why })?;
            for (i, id) in made.into_iter().enumerate() {
                let sketched = if i == 0 { node.name.clone() } else { format!("{}.{i}", node.name) };
                second.value_of.insert(self.names[&sketched], id);
            }
        }
        let unused = self.declared.iter().find(|(id, _)| !second.value_of.contains_key(id));
        if let Some((_, declared)) = unused {
            return Err(declared.at.wrong(&format!("declares `{}`, which no node uses", declared.name), "used, or left out"));
        }
        let batch = batch.and_then(|var| second.dim_of.get(&self.classes.root(var)).copied());
        let loss = second.value_of.get(&loss).copied();
        let mut graph = second.builder.graph;
        (graph.batch, graph.loss) = (batch, loss);
        // Tokens are batches of sequences.
        let second = graph.inputs.first().and_then(|&tokens| graph.values[tokens].ty.dims.get(1).copied());
        graph.sequence = second.filter(|&dim| graph.batch != Some(dim));
        // The order in which nodes were written matters no more than names do.
        let tagged = self.nodes.iter().any(|n| n.layer.is_some());
        Ok(layers::canonicalize(&if tagged { graph } else { layers::detect(&graph) }))
    }
}

/// The second pass, under construction.
struct Second<'r, 'a> {
    reader: &'r Reader<'a>,
    builder: Builder,
    /// Class → dim.
    dim_of: BTreeMap<Var, DimId>,
    /// Value of the sketch → value of the graph.
    value_of: BTreeMap<ValueId, ValueId>,
}

impl Second<'_, '_> {
    fn value(&mut self, sketched: ValueId, compute: DType) -> ValueId {
        match self.value_of.get(&sketched) {
            Some(&id) => id,
            None => self.declared(sketched, compute),
        }
    }
    /// An input or a parameter, at its first use.
    fn declared(&mut self, sketched: ValueId, dtype: DType) -> ValueId {
        let declared = &self.reader.declared[&sketched];
        let dims: Vec<DimId> = declared.dims.iter().map(|&var| self.dim(var)).collect();
        let id = match self.reader.sketch.graph.param_of(sketched) {
            Some(_) => self.builder.param(declared.name, dtype, &dims, declared.init, Vec::new()),
            None => self.builder.input(declared.name, dtype, &dims),
        };
        self.value_of.insert(sketched, id);
        id
    }
    fn dim(&mut self, var: Var) -> DimId {
        let classes = &self.reader.classes;
        let root = classes.root(var);
        if let Some(&id) = self.dim_of.get(&root) {
            return id;
        }
        let number = self.dim_of.len();
        let mut name = classes.name(root).map_or_else(|| format!("dim{number}"), str::to_string);
        while classes.name(root).is_none() && classes.is_name(&name) {
            name.push('_');
        }
        let id = self.builder.dim(&name, classes.size(root));
        self.dim_of.insert(root, id);
        id
    }
}

fn init(at: &At<'_>) -> Result<Init, ImportError> {
    let right = "\"zeros\", \"ones\" or { \"normal\": 0.02 }";
    match at.value().as_str() {
        Some("zeros") => return Ok(Init::Zeros),
        Some("ones") => return Ok(Init::Ones),
        Some(_) => return Err(at.wrong(&at.found(), right)),
        None => {}
    }
    at.only(&["normal"])?;
    let std = at.need("normal", right)?;
    match std.number()? {
        s if s >= 0.0 => Ok(Init::Normal { std: s }),
        _ => Err(std.wrong(&std.found(), "a standard deviation of at least 0")),
    }
}

fn check_name(at: &At<'_>, name: &str) -> Result<(), ImportError> {
    let sound = !name.is_empty() && name.len() <= MAX_NAME && !name.chars().any(char::is_control);
    if sound { Ok(()) } else { Err(at.wrong(&format!("has the name {name:?}"), &format!("named with 1 to {MAX_NAME} bytes, no control characters"))) }
}
