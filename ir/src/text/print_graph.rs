//! Printing a graph.

use std::collections::VecDeque;
use std::fmt::Write;

use crate::dtype::DType;
use crate::entity::{NodeId, ParamId, ValueId};
use crate::graph::{Graph, Init, Layout, Param, Phase, Piece, Type};
use crate::op::Op;
use crate::order::Order;
use crate::text::lexer::quote;
use crate::text::op::{TableNames, put_op, put_real};
use crate::text::place::{Place, Printed};
use crate::text::scope::Spelling;

/// The graph as text, each entity with its line.
pub fn graph(graph: &Graph) -> Printed {
    let mut out = Printed::default();
    let mut at = Printer { graph, spelling: Spelling::new(graph), tables: TableNames::default(), next_value: 0, block: None };
    at.header(&mut out);
    at.body(&mut out);
    at.footer(&mut out);
    out
}

struct Printer<'g> {
    graph: &'g Graph,
    spelling: Spelling,
    tables: TableNames,
    /// The id that the next definition has if it does not say.
    next_value: u32,
    /// The layer whose block is open, and whether in the forward pass.
    block: Option<(u32, bool)>,
}

/// What defines values, in an order of its own each.
#[derive(Clone, Copy)]
enum Item {
    Input(ValueId),
    Param(ParamId, ValueId),
    Node(NodeId, ValueId),
}

impl Item {
    fn value(self) -> ValueId {
        match self {
            Item::Input(v) | Item::Param(_, v) | Item::Node(_, v) => v,
        }
    }
}

impl Printer<'_> {
    fn header(&mut self, out: &mut Printed) {
        out.mark(Place::Top);
        out.put("graph ");
        quote(&mut out.text, &self.graph.name);
        out.end_line();
        for (id, dim) in self.graph.dims.iter() {
            out.mark(Place::Dim(id));
            let _ = write!(out.text, "dim {} = {}", self.spelling.dim(id), dim.size);
            for (role, _) in [(" batch", self.graph.batch), (" sequence", self.graph.sequence)].into_iter().filter(|r| r.1 == Some(id)) {
                out.put(role);
            }
            if let (true, Order::Zigzag { blocks }) = (self.graph.sequence == Some(id), self.graph.order) {
                let _ = write!(out.text, " zigzag {blocks}");
            }
            out.end_line();
        }
        for node in self.graph.nodes.values() {
            let Op::Rope(rope) = &node.op else { continue };
            let (number, new) = self.tables.number(&rope.inv_freq);
            if new {
                let _ = write!(out.text, "table t{number} = [");
                put_table(out, &rope.inv_freq);
                out.put("]");
                out.end_line();
            }
        }
    }

    /// Inputs, parameters and nodes, merged so that values come in order of their ids where that can be.
    fn body(&mut self, out: &mut Printed) {
        let graph = self.graph;
        let first = |id: NodeId| graph.nodes[id].outputs.first().copied().unwrap_or(ValueId(u32::MAX));
        let mut queues: [VecDeque<Item>; 3] = [
            graph.inputs.iter().map(|&v| Item::Input(v)).collect(),
            graph.params.iter().map(|(id, p)| Item::Param(id, p.value)).collect(),
            graph.nodes.ids().map(|id| Item::Node(id, first(id))).collect(),
        ];
        while let Some(queue) = (0..3).filter(|&q| !queues[q].is_empty()).min_by_key(|&q| (queues[q].front().map(|i| i.value()), q)) {
            let next_block = queues[2].front().and_then(|item| self.block_of(*item));
            let item = queues[queue].pop_front();
            if self.block != next_block {
                self.close(out);
            }
            match item {
                Some(Item::Input(v)) => self.input(out, v),
                Some(Item::Param(id, v)) => self.param(out, id, v),
                Some(Item::Node(id, _)) => self.node(out, id),
                None => {}
            }
        }
        self.close(out);
    }

    /// The block that a node stands in.
    fn block_of(&self, item: Item) -> Option<(u32, bool)> {
        match item {
            Item::Node(id, _) => Some((self.graph.nodes[id].layer, self.graph.nodes[id].phase == Phase::Forward)),
            Item::Input(_) | Item::Param(..) => None,
        }
    }

    fn close(&mut self, out: &mut Printed) {
        if self.block.take().is_some() {
            out.put("}");
            out.end_line();
        }
    }

    fn indent(&self, out: &mut Printed) {
        if self.block.is_some() {
            out.put("  ");
        }
    }

    /// The name of a value where it is defined, with its id if that is not the next.
    fn define(&mut self, out: &mut Printed, id: ValueId) {
        out.mark(Place::Value(id));
        let name = self.spelling.value(id);
        out.put(name);
        if id.0 != self.next_value && !self.spelling.is_repeated(id) {
            let _ = write!(out.text, "#{}", id.0);
        }
        self.next_value = id.0.wrapping_add(1);
    }

    fn ty(&self, out: &mut Printed, id: ValueId) {
        match self.graph.values.get(id) {
            Some(value) => put_type(out, &value.ty, &self.spelling),
            None => put_type(out, &Type::dense(DType::F32, Vec::new()), &self.spelling),
        }
    }

    fn input(&mut self, out: &mut Printed, id: ValueId) {
        self.indent(out);
        out.put("input ");
        self.define(out, id);
        out.put(": ");
        self.ty(out, id);
        out.end_line();
    }

    fn param(&mut self, out: &mut Printed, id: ParamId, value: ValueId) {
        self.indent(out);
        out.mark(Place::Param(id));
        out.put("param ");
        self.define(out, value);
        out.put(": ");
        self.ty(out, value);
        let Param { init, pieces, .. } = &self.graph.params[id];
        put_init(out, *init);
        for piece in pieces {
            if pieces.len() > 1 {
                out.end_line();
                self.indent(out);
                out.put(" ");
            }
            put_piece(out, piece);
        }
        out.end_line();
    }

    fn node(&mut self, out: &mut Printed, id: NodeId) {
        let node = &self.graph.nodes[id];
        if self.block.is_none() {
            let _ = write!(out.text, "layer {} {{", node.layer);
            out.end_line();
            self.block = self.block_of(Item::Node(id, ValueId(0)));
        }
        self.indent(out);
        out.mark(Place::Node(id));
        for (i, &output) in node.outputs.iter().enumerate() {
            if i > 0 {
                out.put(", ");
            }
            self.define(out, output);
        }
        out.put(" = ");
        put_op(&mut out.text, &node.op, &self.tables);
        out.put(" (");
        for (i, &input) in node.inputs.iter().enumerate() {
            if i > 0 {
                out.put(", ");
            }
            out.put(self.spelling.value(input));
        }
        out.put("): ");
        for (i, &output) in node.outputs.iter().enumerate() {
            if i > 0 {
                out.put(", ");
            }
            self.ty(out, output);
        }
        match node.phase {
            Phase::Forward if node.origin == id => {}
            Phase::Forward => out.put(" forward_of "),
            Phase::InputGrad => out.put(" input_grad_of "),
            Phase::WeightGrad => out.put(" weight_grad_of "),
        }
        if node.phase != Phase::Forward || node.origin != id {
            out.put(self.spelling.node(node.origin));
        }
        out.end_line();
    }

    fn footer(&mut self, out: &mut Printed) {
        let graph = self.graph;
        if let Some(loss) = graph.loss {
            out.put("loss ");
            out.put(self.spelling.value(loss));
            out.end_line();
        }
        if !graph.grads.is_empty() {
            out.put("grads {");
            out.end_line();
            for (param, grads) in graph.grads.iter().filter(|(_, g)| !g.is_empty()) {
                let _ = write!(out.text, "  {}: ", self.spelling.param(param));
                for (i, &grad) in grads.iter().enumerate() {
                    if i > 0 {
                        out.put(", ");
                    }
                    out.put(self.spelling.value(grad));
                }
                out.end_line();
            }
            out.put("}");
            out.end_line();
        }
        if !graph.cotangents.is_empty() {
            out.put("cotangents ");
            if graph.cotangents.len() != graph.values.len() {
                let _ = write!(out.text, "of {} ", graph.cotangents.len());
            }
            out.put("{");
            out.end_line();
            for (value, cotangent) in graph.cotangents.iter() {
                let Some(cotangent) = cotangent else { continue };
                let _ = write!(out.text, "  {}: {}", self.spelling.value(value), self.spelling.value(*cotangent));
                out.end_line();
            }
            out.put("}");
            out.end_line();
        }
    }
}

/// `f32[b, s, h]`, `f32[b, s, e, h; top 2]`, `f32[b, s, e, h; top 2 of 16]` where experts take 16 tokens of a sequence at most.
pub fn put_type(out: &mut Printed, ty: &Type, spelling: &Spelling) {
    out.put(ty.dtype.name());
    out.put("[");
    for (i, &dim) in ty.dims.iter().enumerate() {
        if i > 0 {
            out.put(", ");
        }
        out.put(spelling.dim(dim));
    }
    if let Layout::TopK { k, capacity } = ty.layout {
        let _ = write!(out.text, "; top {k}");
        if let Some(capacity) = capacity {
            let _ = write!(out.text, " of {capacity}");
        }
    }
    out.put("]");
}

fn put_init(out: &mut Printed, init: Init) {
    match init {
        Init::Normal { std } => {
            out.put(" normal(");
            put_real(&mut out.text, std);
            out.put(")");
        }
        Init::Zeros => out.put(" zeros"),
        Init::Ones => out.put(" ones"),
    }
}

/// ` from "tensor"[259, 64] view [259, 8, 8] narrow 1 at 0 len 4 into 3`.
fn put_piece(out: &mut Printed, piece: &Piece) {
    out.put(" from ");
    quote(&mut out.text, &piece.tensor);
    let _ = write!(out.text, "{:?}", piece.shape);
    if piece.view != piece.shape {
        let _ = write!(out.text, " view {:?}", piece.view);
    }
    if let Some(narrow) = piece.narrow {
        let _ = write!(out.text, " narrow {} at {} len {}", narrow.dim, narrow.start, narrow.len);
    }
    if let Some(at) = piece.at {
        let _ = write!(out.text, " into {at}");
    }
}

fn put_table(out: &mut Printed, table: &[f64]) {
    const PER_LINE: usize = 8;
    for (i, &x) in table.iter().enumerate() {
        if i > 0 {
            out.put(",");
        }
        if table.len() > PER_LINE && i % PER_LINE == 0 {
            out.end_line();
            out.put("  ");
        } else if i > 0 {
            out.put(" ");
        }
        put_real(&mut out.text, x);
    }
    if table.len() > PER_LINE {
        out.end_line();
    }
}
