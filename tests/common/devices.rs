//! Programs on stand-ins of GPUs: what each rank does, all kernels of it, and the ranks themselves.
#![allow(dead_code)]

use std::cell::RefCell;
use std::rc::Rc;

use dplan::runtime::cuda::load::{Code, load};
use dplan::runtime::cuda::session::Session;
use dplan::runtime::{Options, RuntimeError};
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::DecayGroups;
use dplan_ir::program::Program;
use dplan_kernels::cuda::{Launch, Target};
use dplan_kernels::shim::Library;

use super::recording::{Recorder, World};

/// What every rank does.
pub fn codes(graph: &Graph, program: &Program, decay: DecayGroups, target: Target) -> Vec<Code> {
    let ranks = program.mesh.ranks();
    let code = |r: u64| load(graph, program, (r / ranks) as usize, r % ranks, decay, target).unwrap_or_else(|e| panic!("{e}"));
    (0..program.ranks()).map(code).collect()
}

/// All kernels of some ranks.
pub fn kernels<'a>(codes: impl IntoIterator<Item = &'a Code>) -> impl Iterator<Item = &'a Launch> {
    let actions = codes.into_iter().flat_map(|c| c.segments.iter().flatten());
    actions.flat_map(|(_, action)| action.routines()).flat_map(|r| &r.launches)
}

/// All ranks of a program, in one world.
pub fn devices(graph: &Graph, program: &Program, world: &Rc<RefCell<World>>, options: &Options) -> Result<Session<Recorder>, RuntimeError> {
    let drivers = (0..program.ranks()).map(|r| (r, Recorder::new(world, r))).collect();
    Session::new(graph.clone(), program.clone(), drivers, options)
}

/// The end of a world that nobody else has: everything was given back, and nobody called anything after a call that failed.
pub fn end(world: Rc<RefCell<World>>) -> Library {
    let world = Rc::into_inner(world).expect("nobody else has it").into_inner();
    assert_eq!((world.leaks(), &world.after_failure[..]), (Vec::new(), &[][..]));
    world.into_library()
}
