//! Printing and parsing a sharded graph.
//!
//! A form says its value and sharding where it is defined: by the statement that makes it, or on a line of its own if none does (parameters, inputs).

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::entity::{FormId, Table};
use crate::graph::Graph;
use crate::mesh::{AxisSet, Mesh};
use crate::reshard::Step;
use crate::rule::Assignment;
use crate::sharded::{Form, Pass, Sharded, Stmt};
use crate::text::mesh::{axes, mesh, monoid, padded, put_axes, put_mesh, put_padded, put_sharding, sharding};
use crate::text::parser::{Parsed, Parser};
use crate::text::place::{Place, Printed};
use crate::text::scope::{Known, Spelling, put_label};

/// The sharded graph as text, each entity with its line.
pub fn print(sharded: &Sharded, graph: &Graph) -> Printed {
    let mut out = Printed::default();
    out.mark(Place::Top);
    out.put("sharded");
    out.end_line();
    let spelling = Spelling::new(graph);
    put_mesh(&mut out, &sharded.mesh);
    put_padded(&mut out, &sharded.padded, graph, &spelling);
    let mut makers: Table<FormId, u32> = Table::filled(sharded.forms.len(), 0);
    for &form in sharded.body.iter().flat_map(made) {
        if let Some(count) = makers.get_mut(form) {
            *count += 1;
        }
    }
    let mut at = Printer { sharded, spelling: &spelling, defined: Table::filled(sharded.forms.len(), Seen::No), out: &mut out };
    for (form, _) in makers.iter().filter(|(_, count)| **count == 0) {
        at.form(form);
        at.out.end_line();
    }
    at.out.put("body {");
    at.out.end_line();
    for (i, stmt) in sharded.body.iter().enumerate() {
        at.out.mark(Place::Stmt(i as u32));
        at.out.put("  ");
        at.stmt(stmt);
        at.out.end_line();
    }
    at.out.put("}");
    at.out.end_line();
    out
}

fn made(stmt: &Stmt) -> &[FormId] {
    match stmt {
        Stmt::Run { outs, .. } => outs,
        Stmt::Reshard { to, .. } => std::slice::from_ref(to),
    }
}

/// Whether a form has been defined in the text so far.
#[derive(Clone, Copy, PartialEq)]
enum Seen {
    No,
    Yes,
}

struct Printer<'s> {
    sharded: &'s Sharded,
    spelling: &'s Spelling,
    defined: Table<FormId, Seen>,
    out: &'s mut Printed,
}

impl Printer<'_> {
    /// `f3`, the first time with `: %x<dp, _>`.
    fn form(&mut self, id: FormId) {
        let _ = write!(self.out.text, "{id}");
        let (Some(form), Some(seen)) = (self.sharded.forms.get(id), self.defined.get_mut(id)) else { return };
        if *seen == Seen::No {
            *seen = Seen::Yes;
            self.out.mark(Place::Form(id));
            let _ = write!(self.out.text, ": {}", self.spelling.value(form.value));
            put_sharding(&mut self.out.text, &form.sharding, &self.sharded.mesh);
        }
    }

    fn stmt(&mut self, stmt: &Stmt) {
        let mesh = &self.sharded.mesh;
        for (i, &form) in made(stmt).iter().enumerate() {
            if i > 0 {
                self.out.put(", ");
            }
            self.form(form);
        }
        self.out.put(" = ");
        let text = &mut self.out.text;
        match stmt {
            Stmt::Run { node, assignment, ins, outs: _ } => {
                let _ = write!(text, "run {} {{", self.spelling.node(*node));
                for (i, &(label, axes)) in assignment.0.iter().enumerate() {
                    if i > 0 {
                        text.push_str(", ");
                    }
                    put_label(text, label.encode_utf8(&mut [0; 4]));
                    text.push('=');
                    put_axes(text, axes, mesh);
                }
                text.push_str("} (");
                for (i, form) in ins.iter().enumerate() {
                    let _ = write!(text, "{}{form}", if i > 0 { ", " } else { "" });
                }
                text.push(')');
            }
            Stmt::Reshard { from, to: _, step, layer, pass } => {
                let (name, dim, monoid) = match *step {
                    Step::AllReduce { monoid, .. } => ("all_reduce", None, Some(monoid)),
                    Step::ReduceScatter { dim, monoid, .. } => ("reduce_scatter", Some(dim), Some(monoid)),
                    Step::AllGather { dim, .. } => ("all_gather", Some(dim), None),
                    Step::Slice { dim, .. } => ("slice", Some(dim), None),
                };
                text.push_str(name);
                text.push(' ');
                put_axes(text, step.axes(), mesh);
                if let Some(dim) = dim {
                    let _ = write!(text, " dim {dim}");
                }
                if let Some(monoid) = monoid {
                    let _ = write!(text, " {}", monoid.name());
                }
                let pass = match pass {
                    Pass::Forward => "forward",
                    Pass::Backward => "backward",
                };
                let _ = write!(text, " ({from}) in {pass} of layer {layer}");
            }
        }
    }
}

pub fn parse(p: &mut Parser<'_>, known: &Known<'_>) -> Parsed<Sharded> {
    p.word("sharded")?;
    let mesh = mesh(p)?;
    let padded = padded(p, known)?;
    let mut reader = Reader { known, mesh, forms: BTreeMap::new() };
    while p.is_id("f") {
        let at = p.at();
        let id = reader.form(p)?;
        if reader.forms[&id].form.is_none() {
            return Err(p.wrong(at, format!("`{id}` alone"), format!("its value and sharding: `{id}: %x<…>`")));
        }
    }
    if !p.take_word("body") {
        return Err(p.expected("a form (`f0: %x<…>`) or `body {`"));
    }
    p.sign('{')?;
    let mut body = Vec::new();
    while !p.take_sign('}') {
        body.push(reader.stmt(p)?);
    }
    let mut forms = Table::new();
    for (expected, (id, mention)) in reader.forms.into_iter().enumerate() {
        let Some(form) = mention.form else {
            return Err(p.wrong(mention.at, format!("`{id}`, which is not defined anywhere"), format!("`{id}: %x<…>` where it is made")));
        };
        if id.0 as usize != expected {
            return Err(p.wrong(mention.at, format!("`{id}` but no `f{expected}`"), "each number from 0"));
        }
        forms.push(form);
    }
    Ok(Sharded { mesh: reader.mesh, padded, forms, body })
}

/// Where a form is first mentioned, and what it is once that is known.
struct Mention {
    at: usize,
    form: Option<Form>,
}

struct Reader<'g> {
    known: &'g Known<'g>,
    mesh: Mesh,
    forms: BTreeMap<FormId, Mention>,
}

impl Reader<'_> {
    /// `f3`, or `f3: %x<dp, _>`, which defines it.
    fn form(&mut self, p: &mut Parser<'_>) -> Parsed<FormId> {
        let at = p.at();
        let id = FormId(p.id("f", "a form (`f0`)")?);
        let form = if p.take_sign(':') {
            let value = self.known.value(p)?;
            Some(Form { value, sharding: sharding(p, &self.mesh)? })
        } else {
            None
        };
        let mention = self.forms.entry(id).or_insert(Mention { at, form: None });
        if form.is_some() {
            if mention.form.is_some() {
                return Err(p.wrong(at, format!("`{id}` defined again"), "one definition"));
            }
            mention.form = form;
        }
        Ok(id)
    }

    fn stmt(&mut self, p: &mut Parser<'_>) -> Parsed<Stmt> {
        let mut made = vec![self.form(p)?];
        while p.take_sign(',') {
            made.push(self.form(p)?);
        }
        p.sign('=')?;
        if p.take_word("run") {
            let node = self.known.node(p)?;
            let assignment = Assignment(p.list('{', '}', |p| self.split(p))?);
            let ins = p.list('(', ')', |p| self.form(p))?;
            return Ok(Stmt::Run { node, assignment, ins, outs: made });
        }
        let at = p.at();
        let word = p.any_word("`run` or a step of a reshard")?;
        let mesh = &self.mesh;
        let dim = |p: &mut Parser<'_>| p.word("dim").and_then(|()| p.integer::<u32>("the dim's position"));
        let step = match word {
            "all_reduce" => Step::AllReduce { axes: axes(p, mesh)?, monoid: monoid(p)? },
            "reduce_scatter" => Step::ReduceScatter { axes: axes(p, mesh)?, dim: dim(p)?, monoid: monoid(p)? },
            "all_gather" => Step::AllGather { axes: axes(p, mesh)?, dim: dim(p)? },
            "slice" => Step::Slice { axes: axes(p, mesh)?, dim: dim(p)? },
            _ => return Err(p.unknown(at, "statement", word, &["run", "all_reduce", "reduce_scatter", "all_gather", "slice"])),
        };
        let &[to] = made.as_slice() else {
            return Err(p.wrong(at, format!("`{word}` with {} results", made.len()), "one"));
        };
        p.sign('(')?;
        let from = self.form(p)?;
        p.sign(')')?;
        p.word("in")?;
        let pass = if p.take_word("forward") {
            Pass::Forward
        } else if p.take_word("backward") {
            Pass::Backward
        } else {
            return Err(p.expected("`forward` or `backward`"));
        };
        p.word("of")?;
        p.word("layer")?;
        Ok(Stmt::Reshard { from, to, step, layer: p.integer("the layer's number")?, pass })
    }

    /// `b={dp}`.
    fn split(&self, p: &mut Parser<'_>) -> Parsed<(char, AxisSet)> {
        let at = p.at();
        let label = p.label("a factor's letter, like `b={dp}`")?;
        let mut letters = label.chars();
        let (Some(letter), None) = (letters.next(), letters.next()) else {
            return Err(p.wrong(at, format!("`{label}`"), "one letter"));
        };
        p.sign('=')?;
        Ok((letter, axes(p, &self.mesh)?))
    }
}
