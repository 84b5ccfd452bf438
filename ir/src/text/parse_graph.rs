//! Parsing a graph.
//!
//! Definitions give ids in order of text unless they say `#id`; operands may name values that come later (whether they may *be used* is for the verifier),
//! so names are looked up when the text has been read.

use std::borrow::Cow;

use crate::dtype::DType;
use crate::entity::{NodeId, ParamId, Table, ValueId};
use crate::graph::{Def, Dim, Graph, Init, Layout, Narrow, Node, Param, Phase, Piece, Type, Value};
use crate::op::Op;
use crate::order::Order;
use crate::text::op::{Tables, op};
use crate::text::parser::{Parsed, Parser, Ref};
use crate::text::scope::{Scope, dim};

/// Reads a graph up to what is no part of one.
pub fn graph(p: &mut Parser<'_>) -> Parsed<Graph> {
    p.word("graph")?;
    let mut reader = Reader { graph: Graph { name: p.string("the graph's name, in quotes")?.into_owned(), ..Graph::default() }, ..Reader::default() };
    while reader.statement(p)? {}
    reader.finish(p)
}

/// What has been read and not been looked up yet.
#[derive(Default)]
struct Reader<'a> {
    graph: Graph,
    dims: Scope<'a>,
    tables: Tables,
    values: Vec<Defined<'a>>,
    next_value: u32,
    nodes: Vec<Pending<'a>>,
    loss: Option<Ref<'a>>,
    grads: Option<Vec<(Ref<'a>, Vec<Ref<'a>>)>>,
    cotangents: Option<(Option<usize>, Vec<(Ref<'a>, Ref<'a>)>)>,
}

struct Defined<'a> {
    id: u32,
    at: usize,
    name: Cow<'a, str>,
    ty: Type,
    def: Def,
}

struct Pending<'a> {
    op: Op,
    inputs: Vec<Ref<'a>>,
    outputs: Vec<ValueId>,
    layer: u32,
    phase: Phase,
    origin: Option<Ref<'a>>,
}

const STATEMENTS: &str = "a statement (`dim`, `table`, `input`, `param`, `layer`, `loss`, `grads`, `cotangents`)";

impl<'a> Reader<'a> {
    /// Reads one statement, if the next token begins one.
    fn statement(&mut self, p: &mut Parser<'a>) -> Parsed<bool> {
        if self.declaration(p)? {
            return Ok(true);
        }
        if p.take_word("dim") {
            self.dim(p)?;
        } else if p.take_word("layer") {
            self.layer(p)?;
        } else if p.is_word("loss") {
            self.once(p, self.loss.is_some(), "loss")?;
            self.loss = Some(p.name("the loss value")?);
        } else if p.is_word("grads") {
            self.once(p, self.grads.is_some(), "grads")?;
            self.grads = Some(self.grads(p)?);
        } else if p.is_word("cotangents") {
            self.once(p, self.cotangents.is_some(), "cotangents")?;
            self.cotangents = Some(self.cotangents(p)?);
        } else if p.is_end() || p.is_word("program") || p.is_word("sharded") {
            return Ok(false);
        } else if p.is_name() {
            return Err(p.expected("`layer N {` around nodes"));
        } else {
            return Err(p.expected(STATEMENTS));
        }
        Ok(true)
    }

    /// What may stand inside a layer's block too.
    fn declaration(&mut self, p: &mut Parser<'a>) -> Parsed<bool> {
        if p.take_word("table") {
            self.table(p)?;
        } else if p.take_word("input") {
            let value = self.define(p, Def::Input)?;
            p.sign(':')?;
            self.values[value].ty = self.ty(p)?;
            self.graph.inputs.push(ValueId(self.values[value].id));
        } else if p.take_word("param") {
            self.param(p)?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn once(&self, p: &mut Parser<'a>, again: bool, word: &str) -> Parsed<()> {
        if again {
            return Err(p.expected(format!("only one `{word}`")));
        }
        p.word(word)
    }

    fn dim(&mut self, p: &mut Parser<'a>) -> Parsed<()> {
        let name = p.label("the dim's name")?;
        let at = p.at();
        if let Some(id) = p.ordinal()?
            && id as usize != self.graph.dims.len()
        {
            return Err(p.wrong(at, format!("#{id}"), format!("#{}, as dims are numbered in order", self.graph.dims.len())));
        }
        p.sign('=')?;
        let size = p.integer("the dim's size")?;
        let id = self.graph.dims.push(Dim { name: name.clone().into_owned(), size });
        self.dims.push(name);
        for (word, role) in [("batch", &mut self.graph.batch), ("sequence", &mut self.graph.sequence)] {
            let at = p.at();
            if p.take_word(word) && role.replace(id).is_some() {
                return Err(p.wrong(at, format!("a second {word} dim"), "one"));
            }
        }
        if self.graph.sequence == Some(id) && p.take_word("zigzag") {
            self.graph.order = Order::Zigzag { blocks: p.integer("the number of blocks")? };
        }
        Ok(())
    }

    fn table(&mut self, p: &mut Parser<'a>) -> Parsed<()> {
        let at = p.at();
        let name = p.any_word("the table's name")?;
        p.sign('=')?;
        let table = p.list('[', ']', |p| p.real("a number"))?;
        if !self.tables.insert(name, table) {
            return Err(p.wrong(at, format!("a second table `{name}`"), "another name"));
        }
        Ok(())
    }

    /// A name being defined; its type is filled in when it has been read. Returns its place in `values`.
    fn define(&mut self, p: &mut Parser<'a>, def: Def) -> Parsed<usize> {
        let Ref { name, at } = p.name("the name of a value (`%name`)")?;
        let id = name.id.unwrap_or(self.next_value);
        self.next_value = id.wrapping_add(1);
        self.values.push(Defined { id, at, name: name.text, ty: Type::dense(DType::F32, Vec::new()), def });
        Ok(self.values.len() - 1)
    }

    fn ty(&self, p: &mut Parser<'a>) -> Parsed<Type> {
        let at = p.at();
        let word = p.any_word("an element type")?;
        let dtype = DType::from_name(word).ok_or_else(|| p.unknown(at, "element type", word, &DType::ALL.map(DType::name)))?;
        let mut ty = Type::dense(dtype, Vec::new());
        p.sign('[')?;
        while !p.is_sign(']') && !p.is_sign(';') {
            ty.dims.push(dim(p, &self.dims)?);
            if !p.take_sign(',') {
                break;
            }
        }
        if p.take_sign(';') {
            p.word("top")?;
            let k = p.integer("experts of each token")?;
            let capacity = if p.take_word("of") { Some(p.integer("tokens of a sequence that an expert takes")?) } else { None };
            ty.layout = Layout::TopK { k, capacity };
        }
        if !p.take_sign(']') {
            return Err(p.expected("`,` or `]`"));
        }
        Ok(ty)
    }

    fn param(&mut self, p: &mut Parser<'a>) -> Parsed<()> {
        let id = ParamId(self.graph.params.len() as u32);
        let value = self.define(p, Def::Param(id))?;
        p.sign(':')?;
        self.values[value].ty = self.ty(p)?;
        let init = if p.take_word("zeros") {
            Init::Zeros
        } else if p.take_word("ones") {
            Init::Ones
        } else if p.take_word("normal") {
            p.sign('(')?;
            let std = p.real("a standard deviation")?;
            p.sign(')')?;
            Init::Normal { std }
        } else {
            return Err(p.expected("`normal(…)`, `zeros` or `ones`"));
        };
        let mut pieces = Vec::new();
        while p.take_word("from") {
            pieces.push(piece(p)?);
        }
        self.graph.params.push(Param { value: ValueId(self.values[value].id), init, pieces });
        Ok(())
    }

    fn layer(&mut self, p: &mut Parser<'a>) -> Parsed<()> {
        let layer = p.integer("the layer's number")?;
        p.sign('{')?;
        while !p.take_sign('}') {
            if p.is_name() {
                self.node(p, layer)?;
            } else if !self.declaration(p)? {
                return Err(p.expected("a node (`%result = op (%operand): type`), `param`, `input`, `table` or `}`"));
            }
        }
        Ok(())
    }

    fn node(&mut self, p: &mut Parser<'a>, layer: u32) -> Parsed<()> {
        let id = NodeId(self.nodes.len() as u32);
        let first = self.define(p, Def::Node(id, 0))?;
        let mut count = 1;
        while p.take_sign(',') {
            self.define(p, Def::Node(id, count))?;
            count += 1;
        }
        p.sign('=')?;
        let op = op(p, &mut self.tables)?;
        let inputs = p.list('(', ')', |p| p.name("an operand (`%name`)"))?;
        p.sign(':')?;
        for result in 0..count as usize {
            if result > 0 && !p.take_sign(',') {
                return Err(p.expected(format!("`,` and the type of result {result}")));
            }
            self.values[first + result].ty = self.ty(p)?;
        }
        let phase = if p.take_word("input_grad_of") {
            Some(Phase::InputGrad)
        } else if p.take_word("weight_grad_of") {
            Some(Phase::WeightGrad)
        } else if p.take_word("forward_of") {
            Some(Phase::Forward)
        } else {
            None
        };
        let origin = if phase.is_some() { Some(p.name("the forward node (`%name` of its first result)")?) } else { None };
        let outputs = self.values[first..].iter().map(|v| ValueId(v.id)).collect();
        self.nodes.push(Pending { op, inputs, outputs, layer, phase: phase.unwrap_or(Phase::Forward), origin });
        Ok(())
    }

    fn grads(&mut self, p: &mut Parser<'a>) -> Parsed<Vec<(Ref<'a>, Vec<Ref<'a>>)>> {
        let mut all = Vec::new();
        p.sign('{')?;
        while !p.take_sign('}') {
            let param = p.name("a parameter or `}`")?;
            p.sign(':')?;
            let mut grads = vec![p.name("a gradient")?];
            while p.take_sign(',') {
                grads.push(p.name("a gradient")?);
            }
            all.push((param, grads));
        }
        Ok(all)
    }

    fn cotangents(&mut self, p: &mut Parser<'a>) -> Parsed<(Option<usize>, Vec<(Ref<'a>, Ref<'a>)>)> {
        let at = p.at();
        let len = if p.take_word("of") { Some(p.integer("the number of values that may have cotangents")?) } else { None };
        if len.is_some_and(|n| n > self.values.len()) {
            return Err(p.wrong(at, "more than there are values", format!("at most {}", self.values.len())));
        }
        let mut all = Vec::new();
        p.sign('{')?;
        while !p.take_sign('}') {
            let value = p.name("a value or `}`")?;
            p.sign(':')?;
            all.push((value, p.name("its cotangent")?));
        }
        Ok((len, all))
    }

    /// Looks up every name.
    fn finish(mut self, p: &Parser<'a>) -> Parsed<Graph> {
        self.values.sort_by_key(|v| v.id);
        let mut names = Scope::default();
        let mut graph = self.graph;
        for (expected, value) in self.values.into_iter().enumerate() {
            if value.id as usize != expected {
                let what = if (value.id as usize) < expected { "a second time" } else { "but no value with the number before" };
                return Err(p.wrong(value.at, format!("value #{} {what}", value.id), "each number from 0 once"));
            }
            names.push(value.name.clone());
            graph.values.push(Value { name: value.name.into_owned(), ty: value.ty, def: value.def });
        }
        let find = |name: &Ref<'a>| names.find(p, "value", name.at, &name.name.text, name.name.id).map(ValueId);
        for (at, node) in self.nodes.into_iter().enumerate() {
            let inputs = node.inputs.iter().map(find).collect::<Parsed<_>>()?;
            let origin = match &node.origin {
                None => NodeId(at as u32),
                Some(name) => match graph.values[find(name)?].def {
                    Def::Node(origin, _) => origin,
                    Def::Input | Def::Param(_) => return Err(p.wrong(name.at, format!("`{}`", name.name.text), "the result of a node")),
                },
            };
            graph.nodes.push(Node { op: node.op, inputs, outputs: node.outputs, layer: node.layer, phase: node.phase, origin });
        }
        graph.loss = self.loss.as_ref().map(find).transpose()?;
        if let Some(grads) = self.grads {
            graph.grads = Table::filled(graph.params.len(), Vec::new());
            for (name, values) in grads {
                let Def::Param(param) = graph.values[find(&name)?].def else {
                    return Err(p.wrong(name.at, format!("`{}`", name.name.text), "a parameter"));
                };
                if !graph.grads[param].is_empty() {
                    return Err(p.wrong(name.at, format!("`{}` again", name.name.text), "each parameter once"));
                }
                graph.grads[param] = values.iter().map(find).collect::<Parsed<_>>()?;
            }
        }
        if let Some((len, pairs)) = self.cotangents {
            graph.cotangents = Table::filled(len.unwrap_or(graph.values.len()), None);
            for (value, cotangent) in pairs {
                let Some(of) = graph.cotangents.get_mut(find(&value)?) else {
                    return Err(p.wrong(value.at, format!("`{}`", value.name.text), "a value among those that may have cotangents"));
                };
                if of.replace(find(&cotangent)?).is_some() {
                    return Err(p.wrong(value.at, format!("`{}` again", value.name.text), "each value once"));
                }
            }
        }
        Ok(graph)
    }
}

/// What follows `from`.
fn piece(p: &mut Parser<'_>) -> Parsed<Piece> {
    let sizes = |p: &mut Parser<'_>| p.list('[', ']', |p| p.integer::<u64>("a size"));
    let tensor = p.string("the tensor's name in a weights file, in quotes")?.into_owned();
    let shape = sizes(p)?;
    let view = if p.take_word("view") { sizes(p)? } else { shape.clone() };
    let narrow = if p.take_word("narrow") {
        let dim = p.integer::<u32>("a dim's position")?;
        p.word("at")?;
        let start = p.integer("where the part begins")?;
        p.word("len")?;
        Some(Narrow { dim, start, len: p.integer("the part's length")? })
    } else {
        None
    };
    let at = if p.take_word("into") { Some(p.integer("which slice")?) } else { None };
    Ok(Piece { tensor, shape, view, narrow, at })
}
