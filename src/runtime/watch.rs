//! Checks on a running session: replicas that should be equal, and steps that should repeat.
//!
//! What several ranks hold in full is, after every step, the same bits on all of them, since reductions have one order. A bit that memory or a processor
//! flipped on one of them is silent, and spreads. [`Replicas`] compares fingerprints and names the rank that is alone with its value. What only one rank holds is
//! compared with itself: [`Image`] puts the state of before a step back, so that the step can be run again and must end in the same bits.

use std::collections::BTreeMap;

use dplan_ir::graph::Graph;
use dplan_ir::program::Role;

use super::{Holding, RuntimeError, Session, Which};

/// The roles of parameters that live from step to step.
const LIVING: [Role; 4] = [Role::Param, Role::Master, Role::Moment1, Role::Moment2];

/// That of which no rank has what another has.
const OWN: Role = Role::Residual;

/// A tensor that differs where it should not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// The ranks that are alone with their value; all that hold it, where no value has more ranks than the others.
    pub ranks: Vec<usize>,
    pub role: Role,
    pub tensor: String,
}

/// The parts of tensors that several ranks hold.
pub struct Replicas {
    groups: Vec<Vec<Holding>>,
    buffer: Vec<u8>,
}

impl Replicas {
    pub fn new(session: &Session) -> Replicas {
        let mut groups = Vec::new();
        for role in LIVING {
            for param in session.graph().params.ids() {
                let mut parts: BTreeMap<(Vec<(u64, u64)>, u64), Vec<Holding>> = BTreeMap::new();
                for holding in session.holdings_of(role, param, Which::Home) {
                    parts.entry((holding.block.clone(), holding.from)).or_default().push(holding);
                }
                groups.extend(parts.into_values().filter(|g| g.len() > 1));
            }
        }
        let buffer = vec![0; groups.iter().flatten().map(Holding::bytes).max().unwrap_or(0)];
        Replicas { groups, buffer }
    }

    /// Parts that are compared.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Compares all replicas.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn check(&mut self, session: &mut Session) -> Result<Vec<Difference>, RuntimeError> {
        let mut differences = Vec::new();
        for group in &self.groups {
            let mut of_value: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
            for holding in group {
                let copy = &mut self.buffer[..holding.bytes()];
                session.copy_out(holding, copy)?;
                of_value.entry(holding.digest(copy).sum).or_default().push(holding.rank);
            }
            if of_value.len() > 1 {
                let ranks = minority(of_value.into_values().collect());
                differences.push(Difference { ranks, role: group[0].role, tensor: name(session.graph(), &group[0]) });
            }
        }
        Ok(differences)
    }
}

/// All that lives from step to step, of every rank.
pub struct Image {
    parts: Vec<(Holding, Vec<u8>)>,
}

impl Image {
    pub fn new(session: &Session) -> Image {
        let all = LIVING
            .into_iter()
            .chain([OWN])
            .flat_map(|role| session.graph().params.ids().flat_map(move |p| session.holdings_of(role, p, Which::Home)));
        Image { parts: all.map(|h| (h.clone(), vec![0; h.bytes()])).collect() }
    }
    /// Copies the state.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn take(&mut self, session: &mut Session) -> Result<(), RuntimeError> {
        self.parts.iter_mut().try_for_each(|(holding, copy)| session.copy_out(holding, copy))
    }
    /// Makes the state what it was.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn restore(&self, session: &mut Session) -> Result<(), RuntimeError> {
        self.parts.iter().try_for_each(|(holding, copy)| session.copy_in(holding, copy))
    }
    /// The first tensor in which another image of the same session differs, and the ranks that hold it so.
    pub fn difference(&self, other: &Image, graph: &Graph) -> Option<Difference> {
        let differs = |((a, x), (_, y)): (&(Holding, Vec<u8>), &(Holding, Vec<u8>))| (x != y).then(|| (a.role, name(graph, a), a.rank));
        let mut all = self.parts.iter().zip(&other.parts).filter_map(differs);
        let (role, tensor, rank) = all.next()?;
        let same = all.take_while(|(r, t, _)| (*r, t) == (role, &tensor)).map(|(_, _, rank)| rank);
        Some(Difference { ranks: std::iter::once(rank).chain(same).collect(), role, tensor })
    }
}

/// Flips a bit of what a rank holds of the first tensor it has a part of, as a cosmic ray would.
///
/// # Errors
/// If the session has ended.
pub fn flip_bit(session: &mut Session, rank: usize) -> Result<(), RuntimeError> {
    with_first(session, rank, |copy| copy[1] ^= 0x80)
}

/// Makes what a rank holds of the first tensor it has a part of not a number.
///
/// # Errors
/// If the session has ended.
pub fn poison(session: &mut Session, rank: usize) -> Result<(), RuntimeError> {
    with_first(session, rank, |copy| copy.fill(0xff))
}

fn with_first(session: &mut Session, rank: usize, change: impl FnOnce(&mut [u8])) -> Result<(), RuntimeError> {
    let mut all = session.graph().params.ids().flat_map(|p| session.holdings_of(Role::Param, p, Which::Home));
    let Some(holding) = all.find(|h| h.rank == rank) else { return Ok(()) };
    drop(all);
    let mut copy = vec![0; holding.bytes()];
    session.copy_out(&holding, &mut copy)?;
    change(&mut copy);
    session.copy_in(&holding, &copy)
}

fn name(graph: &Graph, holding: &Holding) -> String {
    graph.values[graph.params[holding.param].value].name.clone()
}

/// Of ranks grouped by value, those that are not in the one largest group.
fn minority(mut groups: Vec<Vec<usize>>) -> Vec<usize> {
    groups.sort_by_key(|g| std::cmp::Reverse(g.len()));
    let clear = groups.len() > 1 && groups[0].len() > groups[1].len();
    let mut ranks: Vec<usize> = groups.into_iter().skip(usize::from(clear)).flatten().collect();
    ranks.sort_unstable();
    ranks
}
