//! What a part of a graph is, up to names: its nodes in the order of the walk from its results, each with op, operands and types.

use crate::dtype::DType;
use crate::entity::{DimId, NodeId, ParamId, Table, ValueId};
use crate::graph::{Def, Graph, Layout, Type};
use crate::op::Op;
use crate::text::op_name;

/// Some forward nodes of a graph.
#[derive(Clone, Default)]
pub struct Part {
    pub nodes: Vec<NodeId>,
    /// Its values that others use.
    pub results: Vec<ValueId>,
}

/// How closely to look.
#[derive(Clone, Copy, PartialEq)]
pub enum Detail {
    /// Ops with all attributes; which parameters other parts use too.
    All,
    /// Kinds of ops, spelling of products, types: what makes blocks of one network look alike, though their windows or scales differ.
    Shape,
}

#[derive(PartialEq)]
pub struct Form<'g>(Vec<Token<'g>>);

/// One fact; entities that only this part has are called by the number of their first occurrence in the walk.
#[derive(PartialEq)]
enum Token<'g> {
    Op(&'g Op),
    Kind(&'static str),
    Operand(Operand),
    Type(DType, Layout),
    Dim(Dim),
    Result(u32, u32),
}

#[derive(PartialEq)]
enum Operand {
    /// A result of the part's n-th node.
    Node(u32, u32),
    /// The n-th value that comes from another part.
    Outside(u32),
    Input(ValueId),
    Param(u32),
    /// A parameter that other parts use too.
    Tied(ParamId),
}

#[derive(PartialEq)]
enum Dim {
    /// Number and size.
    Own(u32, u64),
    /// A dim that other parts have too.
    Shared(DimId),
}

/// Which part an entity belongs to.
#[derive(Clone, Copy, PartialEq)]
enum Owner {
    None,
    One(u32),
    Several,
}

impl Owner {
    fn add(&mut self, part: u32) {
        *self = match *self {
            Owner::None => Owner::One(part),
            Owner::One(p) if p == part => Owner::One(part),
            Owner::One(_) | Owner::Several => Owner::Several,
        }
    }
}

/// Which dims and parameters are used in one part only.
pub struct Facts<'g> {
    graph: &'g Graph,
    part_of: &'g Table<NodeId, Option<u32>>,
    params: Table<ParamId, Owner>,
    dims: Table<DimId, Owner>,
}

impl<'g> Facts<'g> {
    pub fn new(graph: &'g Graph, part_of: &'g Table<NodeId, Option<u32>>) -> Facts<'g> {
        let mut params = graph.params.map(|_, _| Owner::None);
        let mut dims = graph.dims.map(|_, _| Owner::None);
        for (id, node) in graph.nodes.iter() {
            let Some(part) = part_of[id] else { continue };
            for &value in node.inputs.iter().chain(&node.outputs) {
                graph.values[value].ty.dims.iter().for_each(|&d| dims[d].add(part));
                if let Some(param) = graph.param_of(value) {
                    params[param].add(part);
                }
            }
        }
        // The batch and sequence dims are one of their kind.
        for dim in [graph.batch, graph.sequence].into_iter().flatten() {
            dims[dim] = Owner::Several;
        }
        Facts { graph, part_of, params, dims }
    }

    pub fn forms(&self, parts: &[Part], detail: Detail) -> Vec<Form<'g>> {
        let mut walk = Walk {
            facts: self,
            detail,
            seen: Table::filled(self.graph.nodes.len(), false),
            node: Table::filled(self.graph.nodes.len(), 0),
            value: Table::filled(self.graph.values.len(), None),
            dim: Table::filled(self.graph.dims.len(), None),
        };
        parts.iter().zip(0..).map(|(part, number)| walk.form(part, number)).collect()
    }
}

struct Walk<'f, 'g> {
    facts: &'f Facts<'g>,
    detail: Detail,
    seen: Table<NodeId, bool>,
    /// Position of each node in the walk of its part.
    node: Table<NodeId, u32>,
    /// Part, and number there, of values from outside and of parameters.
    value: Table<ValueId, Option<(u32, u32)>>,
    dim: Table<DimId, Option<(u32, u32)>>,
}

/// Numbers of a part's entities so far.
#[derive(Default)]
struct Counts {
    outside: u32,
    params: u32,
    dims: u32,
}

impl<'g> Walk<'_, 'g> {
    fn form(&mut self, part: &Part, number: u32) -> Form<'g> {
        let (graph, part_of) = (self.facts.graph, self.facts.part_of);
        let mut order = super::post_order(graph, &part.results, &mut self.seen, |n| part_of[n] == Some(number));
        // What no result depends on comes last, as it stands.
        order.extend(part.nodes.iter().copied().filter(|&n| !self.seen[n]));
        let mut tokens = Vec::new();
        let mut counts = Counts::default();
        for (at, &id) in order.iter().enumerate() {
            self.node[id] = at as u32;
            let node = &graph.nodes[id];
            tokens.push(match (&node.op, self.detail) {
                (Op::Einsum(_) | Op::ExpertEinsum(_), _) | (_, Detail::All) => Token::Op(&node.op),
                (op, Detail::Shape) => Token::Kind(op_name(op)),
            });
            for &value in &node.inputs {
                self.operand(value, number, &mut counts, &mut tokens);
            }
            for &value in &node.outputs {
                self.ty(&graph.values[value].ty, number, &mut counts, &mut tokens);
            }
        }
        for &result in &part.results {
            if let Def::Node(node, at) = graph.values[result].def {
                tokens.push(Token::Result(self.node[node], at));
            }
        }
        Form(tokens)
    }

    fn operand(&mut self, value: ValueId, part: u32, counts: &mut Counts, tokens: &mut Vec<Token<'g>>) {
        let row = &self.facts.graph.values[value];
        let operand = match row.def {
            Def::Node(node, at) if self.facts.part_of[node] == Some(part) => Operand::Node(self.node[node], at),
            Def::Node(..) => Operand::Outside(local(&mut self.value[value], part, &mut counts.outside)),
            Def::Input => Operand::Input(value),
            Def::Param(param) if self.detail == Detail::All && self.facts.params[param] == Owner::Several => Operand::Tied(param),
            Def::Param(_) => Operand::Param(local(&mut self.value[value], part, &mut counts.params)),
        };
        let made_here = matches!(operand, Operand::Node(..));
        tokens.push(Token::Operand(operand));
        if !made_here {
            self.ty(&row.ty, part, counts, tokens);
        }
    }

    fn ty(&mut self, ty: &Type, part: u32, counts: &mut Counts, tokens: &mut Vec<Token<'g>>) {
        tokens.push(Token::Type(ty.dtype, ty.layout));
        for &dim in &ty.dims {
            tokens.push(Token::Dim(match self.facts.dims[dim] {
                Owner::Several => Dim::Shared(dim),
                Owner::None | Owner::One(_) => Dim::Own(local(&mut self.dim[dim], part, &mut counts.dims), self.facts.graph.size(dim)),
            }));
        }
    }
}

/// The number of an entity in a part: the next, if it has none there yet.
fn local(slot: &mut Option<(u32, u32)>, part: u32, next: &mut u32) -> u32 {
    match *slot {
        Some((p, number)) if p == part => number,
        _ => {
            let number = *next;
            *slot = Some((part, number));
            *next += 1;
            number
        }
    }
}
