//! `compile --dropout`: which dropout the model is trained with. Without the flag there is none, whatever the config says.

use anyhow::{bail, ensure};
use dplan_ir::dropout::{self, Rates};
use dplan_ir::graph::Graph;
use dplan_ir::op::Op;

use crate::import::Model;

/// The flag's value.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Asked {
    /// Of the embedding, and of each term that is added to a residual stream.
    Rate(f64),
    /// What the keys of the config say.
    Config,
}

/// # Errors
/// Says what was found and what would be right.
pub fn asked(text: &str) -> Result<Asked, String> {
    if text == "config" {
        return Ok(Asked::Config);
    }
    let rate = text.parse().ok().filter(|rate| (0.0..1.0).contains(rate));
    rate.map(Asked::Rate).ok_or_else(|| format!("`{text}` is no rate from 0 to less than 1, such as 0.1, and not `config`"))
}

/// Puts the dropout that was asked for into the model's graph; a note says which that is.
///
/// # Errors
/// If there is no place for it, or none of ours does what the config asks for.
pub fn apply(model: &mut Model, asked: Option<Asked>) -> anyhow::Result<Option<String>> {
    let said = model.dropout.keys.join(", ");
    let rates = match asked {
        None => return Ok((!said.is_empty()).then(|| format!("the config asks for dropout ({said}): there is none without --dropout"))),
        Some(Asked::Config) if model.dropout.attention > 0.0 => bail!(
            "--dropout config: {}: the config asks for dropout of attention probabilities ({said}), which dplan cannot; set that key to 0, \
             or give --dropout one rate for embedding and residual streams",
            model.name
        ),
        Some(Asked::Config) => model.dropout.rates,
        Some(Asked::Rate(rate)) => Rates { embedding: rate, residual: rate },
    };
    ensure!(places(&model.graph).is_empty(), "--dropout: {} has dropout of its own, written into its graph", model.name);
    if rates == Rates::default() {
        return Ok(Some("dropout 0: nothing is dropped".into()));
    }
    let dropped = dropout::insert(&model.graph, rates);
    let found = places(&dropped);
    ensure!(!found.is_empty(), "--dropout: {} has neither an embedding nor a residual stream to drop from", model.name);
    model.graph = dropped;
    let Rates { embedding, residual } = rates;
    Ok(Some(format!("dropout {embedding} of the embedding and {residual} of the terms of residual streams, in {} places", found.len())))
}

/// The rates of what drops.
fn places(graph: &Graph) -> Vec<f64> {
    let rate = |op: &Op| if let Op::Dropout { rate } = op { Some(*rate) } else { None };
    graph.nodes.values().filter_map(|n| rate(&n.op)).collect()
}
