//! Which instructions along rows are done by one kernel.
//!
//! An op H and ops behind it that go on from what it makes, row by row, can be one row program ([`dplan_kernels::cuda::rows`]), which runs where H stands: what comes later is done
//! sooner. That is legal where, of all on the stream between H and an op C that joins it,
//! - none waits for another stream (C may need what it waits for); who is told that something is over is told later, which harms nobody;
//! - none writes what C reads, or touches what C writes;
//!
//! and within the program what C writes lies over nothing that it reads or writes besides. A result that only the program reads has no bytes; one that others read, too, is stored.
//!
//! Products take what follows them first ([`super::fuse`]): what they do is done at another place, which counts as between if it reaches over there.

use std::collections::HashMap;

use dplan_ir::access::Access;
use dplan_ir::entity::{BufferId, SegmentId};
use dplan_ir::program::{Instr, Issue, Write};
use dplan_kernels::cuda::rows::{self, Held};

use super::fuse::{Buffers, Touched};

/// How far behind the first op of a chain others are looked for, in instructions.
const FAR: usize = 64;

/// The values of a chain, and where they are: as [`rows::Chain`] has them.
pub type Values = Vec<(BufferId, Held)>;

impl Buffers<'_> {
    /// The chains of a segment, each by the places of its instructions, the first where it runs. `moved`: where instructions are done that are part of something else.
    pub fn row_chains(&self, segment: SegmentId, moved: &HashMap<usize, usize>) -> Vec<Vec<usize>> {
        let body = &self.view.of_stage().segments[segment].body;
        let mut taken: Vec<bool> = (0..body.len()).map(|at| moved.contains_key(&at)).collect();
        let mut chains = Vec::new();
        for head in 0..body.len() {
            if taken[head] || !self.joins(&body[head]) || !sets(&body[head]) {
                continue;
            }
            let chain = self.row_chain(body, &taken, moved, head);
            if chain.len() > 1 {
                chain.iter().for_each(|&at| taken[at] = true);
                chains.push(chain);
            }
        }
        chains
    }

    fn joins(&self, issue: &Issue) -> bool {
        let Instr::Run { node, .. } = &issue.instr else { return false };
        self.view.graph.nodes.get(*node).is_some_and(|n| rows::links(&n.op))
    }

    fn row_chain(&self, body: &[Issue], taken: &[bool], moved: &HashMap<usize, usize>, head: usize) -> Vec<usize> {
        let mut chain = vec![head];
        let stream = body[head].stream;
        for at in head + 1..body.len().min(head + FAR) {
            if body[at].stream != stream {
                continue;
            }
            if matches!(body[at].instr, Instr::Wait(_)) || chain.len() == rows::MOST_LINKS {
                break;
            }
            if taken[at] || !self.joins(&body[at]) || !self.goes_on(body, &chain, at) || !self.comes_sooner(body, moved, &chain, at) {
                continue;
            }
            chain.push(at);
            if !sets(&body[at]) {
                break;
            }
        }
        chain
    }

    /// Whether an instruction reads what the chain makes, and what it writes lies over nothing of the chain's and of its own.
    fn goes_on(&self, body: &[Issue], chain: &[usize], at: usize) -> bool {
        let ([made, read], [written, needed]) = (sides(chain.iter().map(|&at| &body[at])), sides([&body[at]]));
        let apart = |x: &[BufferId], y: &[BufferId]| !x.iter().any(|&x| y.iter().any(|&y| x != y && self.overlap(x, y)));
        let again = written.iter().any(|b| made.contains(b) || read.contains(b) || needed.contains(b));
        needed.iter().any(|b| made.contains(b)) && !again && apart(&written, &[&made[..], &read, &needed].concat()) && apart(&made, &needed)
    }

    /// Whether an instruction may be done where the chain is.
    fn comes_sooner(&self, body: &[Issue], moved: &HashMap<usize, usize>, chain: &[usize], at: usize) -> bool {
        let (head, [written, needed]) = (chain[0], sides([&body[at]]));
        let between =
            |&x: &usize| !chain.contains(&x) && body[x].stream == body[at].stream && (x > head || moved.get(&x).is_some_and(|&to| to > head));
        (0..at).filter(between).all(|x| {
            let mut free = true;
            body[x].instr.accesses(|b, access| {
                let over = |mine: &[BufferId]| mine.iter().any(|&m| self.overlap(m, b));
                free &= !over(&written) && (access == Access::Read || !over(&needed));
            });
            free
        })
    }

    /// The values of these instructions as one chain, and of each the values that it reads and writes.
    pub fn row_values(&self, touched: &Touched, body: &[Issue], chain: &[usize]) -> (Values, Vec<[Vec<usize>; 2]>) {
        let (mut values, mut links) = (Values::new(), Vec::new());
        for &at in chain {
            let Instr::Run { ins, outs, .. } = &body[at].instr else { continue };
            let mut number = |b: BufferId, held: Held| {
                let known = values.iter().position(|v| v.0 == b);
                known.unwrap_or_else(|| {
                    values.push((b, held));
                    values.len() - 1
                })
            };
            let read = ins.iter().map(|&b| number(b, Held::Loaded)).collect();
            let written = outs.iter().map(|&b| number(b, if self.only_within(touched, chain, b) { Held::Kept } else { Held::Stored })).collect();
            links.push([read, written]);
        }
        (values, links)
    }

    /// Whether nobody but a chain reads what it writes to a buffer.
    fn only_within(&self, touched: &Touched, chain: &[usize], result: BufferId) -> bool {
        let mut reads = touched.get(&result).into_iter().flatten().filter(|(_, access)| *access == Access::Read).peekable();
        self.nobody_else(result) && reads.peek().is_some() && reads.all(|(at, _)| chain.contains(at))
    }
}

fn sets(issue: &Issue) -> bool {
    matches!(issue.instr, Instr::Run { write: Write::Set, .. })
}

/// What instructions write, and what they read of others.
fn sides<'a>(issues: impl IntoIterator<Item = &'a Issue>) -> [Vec<BufferId>; 2] {
    let (mut written, mut read) = (Vec::new(), Vec::new());
    for issue in issues {
        issue.instr.accesses(|b, access| match access {
            Access::Read if written.contains(&b) => {}
            Access::Read => read.push(b),
            Access::Write => written.push(b),
        });
    }
    [written, read]
}
