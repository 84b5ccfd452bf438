//! The sharded graph: the same values over a mesh, each use in an explicit sharding, with explicit reshards between.
//!
//! A *form* is a value in one sharding. Ops read and write forms; a reshard step turns a form of a value into another form of the same value.
//! Parameters and inputs have forms too: a parameter is stored in exactly one form (its compute sharding), an input can be loaded in any.
//! One sharded graph covers all layers of a micro-batch on one stage's mesh; which stage runs which layer is not said here.

use crate::entity::{FormId, NodeId, Table, ValueId};
use crate::mesh::Mesh;
use crate::reshard::Step;
use crate::rule::Assignment;
use crate::sharding::{Padded, Sharding};

/// A value in one sharding.
#[derive(Clone, PartialEq, Debug)]
pub struct Form {
    pub value: ValueId,
    pub sharding: Sharding,
}

/// One statement. `layer` says whose frame and time it belongs to.
#[derive(Clone, PartialEq, Debug)]
pub enum Stmt {
    /// Run `node` on each rank's blocks.
    Run { node: NodeId, assignment: Assignment, ins: Vec<FormId>, outs: Vec<FormId> },
    /// `to = step(from)`, both forms of one value.
    Reshard { from: FormId, to: FormId, step: Step, layer: u32, pass: Pass },
}

/// Which pass of a micro-batch a reshard is done in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pass {
    Forward,
    Backward,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct Sharded {
    pub mesh: Mesh,
    pub padded: Padded,
    pub forms: Table<FormId, Form>,
    pub body: Vec<Stmt>,
}
