//! Small models and legal plans, drawn from seeds: what the tests of every layer and `dplan fuzz` try.
//!
//! A [`Case`] is a model and a plan for it as a list of plain choices; its text says those that are not the simplest, and reads back as the same case. The same
//! case is always the same graph and the same plan, and each of its choices can be changed alone, so that a case that fails can be made smaller choice by choice.

mod case;
mod dice;
mod model;
mod plan;
mod text;

pub use case::{Boundary, Case, Split, Way};
pub use dice::Dice;
pub use model::{EXPERTS, Ffn, Model, Sight, inputs};
pub use plan::{shuffled, textbook};
pub use text::CaseError;
