//! Names: how a value is spelled, and which value a spelling means.
//!
//! A name stands for the entity that has it; where several have it, `#` and the id follow.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use crate::entity::{DimId, Id, NodeId, ParamId, ValueId};
use crate::graph::{Def, Graph};
use crate::text::lexer::{is_bare_name, is_word, quote};
use crate::text::parser::{Parsed, Parser, Ref};

/// Spellings of a graph's values and dims, made once.
pub struct Spelling {
    values: Pool,
    dims: Pool,
    /// Spelling of each node: of its first result.
    nodes: Vec<ValueId>,
    params: Vec<ValueId>,
    /// Values that share their name with another.
    repeated: Vec<bool>,
}

/// Many short strings in one.
#[derive(Default)]
struct Pool {
    text: String,
    ends: Vec<usize>,
}

impl Pool {
    fn push(&mut self, write: impl FnOnce(&mut String)) {
        write(&mut self.text);
        self.ends.push(self.text.len());
    }
    fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.text[start..end])
    }
}

impl Spelling {
    pub fn new(graph: &Graph) -> Spelling {
        let repeated = shared_names(graph.values.values().map(|v| v.name.as_str()));
        let mut values = Pool::default();
        let shared: Vec<bool> = graph.values.values().map(|v| repeated.contains(v.name.as_str())).collect();
        for (id, value) in graph.values.iter() {
            values.push(|out| {
                out.push('%');
                if is_bare_name(&value.name) {
                    out.push_str(&value.name)
                } else {
                    quote(out, &value.name)
                }
                if shared[id.index()] {
                    out.push_str(&format!("#{}", id.0));
                }
            });
        }
        let repeated = shared_names(graph.dims.values().map(|d| d.name.as_str()));
        let mut dims = Pool::default();
        for (id, dim) in graph.dims.iter() {
            dims.push(|out| {
                put_label(out, &dim.name);
                if repeated.contains(dim.name.as_str()) {
                    out.push_str(&format!("#{}", id.0));
                }
            });
        }
        let params = graph.params.values().map(|p| p.value).collect();
        let nodes = graph.nodes.values().map(|n| n.outputs.first().copied().unwrap_or(ValueId(u32::MAX))).collect();
        Spelling { values, dims, nodes, params, repeated: shared }
    }

    pub fn value(&self, id: ValueId) -> &str {
        self.values.get(id.index()).unwrap_or("%\"\"")
    }
    pub fn dim(&self, id: DimId) -> &str {
        self.dims.get(id.index()).unwrap_or("\"\"")
    }
    pub fn param(&self, id: ParamId) -> &str {
        self.params.get(id.index()).map_or("%\"\"", |&v| self.value(v))
    }
    pub fn is_repeated(&self, id: ValueId) -> bool {
        self.repeated.get(id.index()).copied().unwrap_or(false)
    }
    /// A node is called like its first result.
    pub fn node(&self, id: NodeId) -> &str {
        self.nodes.get(id.index()).map_or("%\"\"", |&v| self.value(v))
    }
}

/// Appends a word, in quotes if it is not one.
pub fn put_label(out: &mut String, label: &str) {
    if is_word(label) { out.push_str(label) } else { quote(out, label) }
}

fn shared_names<'n>(names: impl Iterator<Item = &'n str>) -> HashSet<&'n str> {
    let mut seen = HashSet::new();
    names.filter(|n| !seen.insert(*n)).collect()
}

/// Entities of one kind, by name.
#[derive(Default)]
pub struct Scope<'a> {
    names: Vec<Cow<'a, str>>,
    first: HashMap<Cow<'a, str>, u32>,
    repeated: HashSet<Cow<'a, str>>,
}

impl<'a> Scope<'a> {
    /// Gives the next id to `name`.
    pub fn push(&mut self, name: Cow<'a, str>) {
        let id = self.names.len() as u32;
        if *self.first.entry(name.clone()).or_insert(id) != id {
            self.repeated.insert(name.clone());
        }
        self.names.push(name);
    }

    /// The entity that `name`, with or without an id, means.
    pub fn find(&self, p: &Parser<'_>, kind: &str, at: usize, name: &str, id: Option<u32>) -> Parsed<u32> {
        match (self.first.get(name), id) {
            (None, _) => Err(p.unknown(at, kind, name, &self.sorted())),
            (Some(_), Some(id)) if self.names.get(id as usize).is_some_and(|n| n == name) => Ok(id),
            (Some(_), Some(id)) => {
                Err(p.wrong(at, format!("`{name}#{id}`, but {kind} {id} has another name"), format!("the number of a {kind} called so")))
            }
            (Some(_), None) if self.repeated.contains(name) => {
                Err(p.wrong(at, format!("`{name}`, which several {kind}s are called"), format!("its number too: `{name}#…`")))
            }
            (Some(&id), None) => Ok(id),
        }
    }

    fn sorted(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.names.iter().map(AsRef::as_ref).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// A graph's names, for a text that refers to them.
pub struct Known<'g> {
    pub graph: &'g Graph,
    values: Scope<'g>,
    dims: Scope<'g>,
}

impl<'g> Known<'g> {
    pub fn new(graph: &'g Graph) -> Known<'g> {
        let mut known = Known { graph, values: Scope::default(), dims: Scope::default() };
        graph.values.values().for_each(|v| known.values.push(Cow::Borrowed(&v.name)));
        graph.dims.values().for_each(|d| known.dims.push(Cow::Borrowed(&d.name)));
        known
    }

    pub fn value(&self, p: &mut Parser<'_>) -> Parsed<ValueId> {
        let name = p.name("a value (`%name`)")?;
        self.resolve(p, &name)
    }
    pub fn resolve(&self, p: &Parser<'_>, name: &Ref<'_>) -> Parsed<ValueId> {
        self.values.find(p, "value", name.at, &name.name.text, name.name.id).map(ValueId)
    }
    /// The node that defines a value.
    pub fn node(&self, p: &mut Parser<'_>) -> Parsed<NodeId> {
        let name = p.name("a node (`%name` of its first result)")?;
        let value = self.resolve(p, &name)?;
        match self.graph.values[value].def {
            Def::Node(node, _) => Ok(node),
            Def::Input | Def::Param(_) => Err(p.wrong(name.at, format!("`{}` is no node's result", name.name.text), "the first result of a node")),
        }
    }
    pub fn dim(&self, p: &mut Parser<'_>) -> Parsed<DimId> {
        dim(p, &self.dims)
    }
}

/// A dim by name.
pub fn dim(p: &mut Parser<'_>, dims: &Scope<'_>) -> Parsed<DimId> {
    let at = p.at();
    let name = p.label("a dim")?;
    let id = p.ordinal()?;
    dims.find(p, "dim", at, &name, id).map(DimId)
}
