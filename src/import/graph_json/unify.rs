//! Dims of a graph whose sizes may be written as plain numbers: every written dim begins as a class of its own, and ops say which are one dim.
//!
//! Named dims with different names are different dims, even of one size; a number becomes whatever its op says it is.

use dplan_ir::rule::Label;

/// A written dim.
pub type Var = usize;

#[derive(Default)]
pub struct Classes {
    vars: Vec<Class>,
}

struct Class {
    parent: Var,
    size: u64,
    name: Option<String>,
}

impl Classes {
    pub fn named(&mut self, name: &str, size: u64) -> Var {
        self.push(size, Some(name.into()))
    }
    pub fn number(&mut self, size: u64) -> Var {
        self.push(size, None)
    }
    pub fn size(&self, var: Var) -> u64 {
        self.vars[self.root(var)].size
    }
    pub fn name(&self, var: Var) -> Option<&str> {
        self.vars[self.root(var)].name.as_deref()
    }
    /// Whether some dim was named so.
    pub fn is_name(&self, name: &str) -> bool {
        self.vars.iter().any(|v| v.name.as_deref() == Some(name))
    }
    /// The one var that stands for all of its class.
    pub fn root(&self, mut var: Var) -> Var {
        while self.vars[var].parent != var {
            var = self.vars[var].parent;
        }
        var
    }
    /// How messages call a dim.
    pub fn spell(&self, var: Var) -> String {
        match self.name(var) {
            Some(name) => format!("`{name}` ({})", self.size(var)),
            None => self.size(var).to_string(),
        }
    }

    /// Makes all dims with one letter one dim. `spelled` holds, for each operand, its letters and its dims.
    ///
    /// # Errors
    /// The two dims that cannot be one, in words.
    pub fn unify(&mut self, spelled: &[(Vec<Label>, &[Var])]) -> Result<Vec<(Label, Var)>, String> {
        let mut of: Vec<(Label, usize, Var)> = Vec::new();
        for (operand, (labels, vars)) in spelled.iter().enumerate() {
            for (&label, &var) in labels.iter().zip(*vars) {
                match of.iter().find(|(l, ..)| *l == label) {
                    None => of.push((label, operand, var)),
                    Some(&(_, first, known)) => self
                        .join(known, var)
                        .map_err(|()| format!("has dim {} in operand {first} where operand {operand} has {}", self.spell(known), self.spell(var)))?,
                }
            }
        }
        Ok(of.into_iter().map(|(label, _, var)| (label, var)).collect())
    }

    fn push(&mut self, size: u64, name: Option<String>) -> Var {
        self.vars.push(Class { parent: self.vars.len(), size, name });
        self.vars.len() - 1
    }

    fn join(&mut self, a: Var, b: Var) -> Result<(), ()> {
        let (a, b) = (self.root(a), self.root(b));
        if a == b {
            return Ok(());
        }
        let both_named = self.vars[a].name.is_some() && self.vars[b].name.is_some();
        if both_named || self.vars[a].size != self.vars[b].size {
            return Err(());
        }
        // The named one stands for both, else the older: which also keeps chains short in practice.
        let (root, leaf) = if self.vars[b].name.is_some() || (b < a && self.vars[a].name.is_none()) { (b, a) } else { (a, b) };
        self.vars[leaf].parent = root;
        Ok(())
    }
}
