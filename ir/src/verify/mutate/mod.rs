//! Changes to programs, for tests of the verifier: damage that makes a program wrong (nearly always), and rewrites that leave it right; and flaws of graphs,
//! of what a program takes from its graph.
//!
//! Both are drawn: `pick` chooses among all places where a change of that kind applies. A damage may by luck leave a right program (a wait that another
//! implies, a contribution dropped and never read); then the program still verifies, and must still compute the same.

mod damage;
mod flaw;
mod kind;
mod rewrite;
mod subtle;

pub use flaw::Flaw;
pub use kind::Damage;
pub use rewrite::Rewrite;

use crate::entity::{BufferId, EventId, SegmentId};
use crate::graph::Graph;
use crate::program::{Buffer, Content, Instr, Issue, Program, StageProgram};
use crate::ring::Ring;

/// A program being changed at a drawn place.
struct Cut<'a> {
    graph: &'a Graph,
    program: &'a mut Program,
    pick: u64,
}

/// Stage, segment and position of an instruction.
type Site = (usize, SegmentId, usize);

impl Cut<'_> {
    /// A drawn number below `n`; different kinds of draws share one pick.
    fn draw(&self, n: usize) -> Option<usize> {
        (n > 0).then(|| (self.pick % n as u64) as usize)
    }

    fn sites(&self, of: impl Fn(&StageProgram, &[Issue], usize) -> bool) -> Vec<Site> {
        let mut sites = Vec::new();
        for (stage, program) in self.program.stages.iter().enumerate() {
            for (segment, row) in program.segments.iter() {
                sites.extend((0..row.body.len()).filter(|&at| of(program, &row.body, at)).map(|at| (stage, segment, at)));
            }
        }
        sites
    }
    fn site(&self, of: impl Fn(&Instr) -> bool) -> Option<Site> {
        let sites = self.sites(|_, body, at| of(&body[at].instr));
        self.draw(sites.len()).map(|at| sites[at])
    }
    fn issue(&mut self, (stage, segment, at): Site) -> &mut Issue {
        &mut self.program.stages[stage].segments[segment].body[at]
    }
    fn event(&mut self, stage: usize) -> EventId {
        let events = &mut self.program.stages[stage].events;
        *events += 1;
        EventId(*events - 1)
    }

    fn drop(&mut self, of: impl Fn(&Instr) -> bool) -> Option<String> {
        let site = self.site(of)?;
        self.program.stages[site.0].segments[site.1].body.remove(site.2);
        Some(show(site))
    }
    fn repeat(&mut self, of: impl Fn(&Instr) -> bool) -> Option<String> {
        let site = self.site(of)?;
        let copy = self.issue(site).clone();
        self.program.stages[site.0].segments[site.1].body.insert(site.2, copy);
        Some(show(site))
    }
    /// Swaps two neighbours of one stream.
    fn swap(&mut self, of: impl Fn(&Instr, &Instr) -> bool) -> Option<String> {
        self.pair(|_, a, b| a.stream == b.stream && of(&a.instr, &b.instr))
    }
    fn pair(&mut self, of: impl Fn(&StageProgram, &Issue, &Issue) -> bool) -> Option<String> {
        let sites = self.sites(|stage, body, at| body.get(at + 1).is_some_and(|next| of(stage, &body[at], next)));
        let site = sites[self.draw(sites.len())?];
        self.program.stages[site.0].segments[site.1].body.swap(site.2, site.2 + 1);
        Some(show(site))
    }
    /// Moves an instruction to another position of its segment, which `to` chooses from the length and a drawn number.
    fn carry(&mut self, of: impl Fn(&Instr) -> bool, to: impl Fn(usize, u64) -> usize) -> Option<String> {
        let sites = self.sites(|_, body, at| of(&body[at].instr));
        let site = sites[self.draw(sites.len())?];
        let pick = self.pick / sites.len() as u64;
        let body = &mut self.program.stages[site.0].segments[site.1].body;
        let to = to(body.len(), pick);
        let issue = body.remove(site.2);
        body.insert(to, issue);
        (to != site.2).then(|| format!("{} to {to}", show(site)))
    }
    /// Changes an instruction that `change` can change.
    fn edit(&mut self, change: impl Fn(&mut Instr) -> bool) -> Option<String> {
        let site = self.site(|i| change(&mut i.clone()))?;
        change(&mut self.issue(site).instr);
        Some(show(site))
    }
    /// Lets an instruction name another buffer of the same size.
    fn redirect(&mut self, is_other: fn(&Buffer, &Buffer) -> bool, operand: impl Fn(&mut Instr) -> Option<&mut BufferId>) -> Option<String> {
        let other = |stage: &StageProgram, id: BufferId, pick: u64| {
            let this = &stage.buffers[id];
            let like = |b: &Buffer| b.bytes == this.bytes && b.dtype == this.dtype && is_other(this, b);
            let others: Vec<BufferId> = stage.buffers.iter().filter(|(_, b)| like(b)).map(|(id, _)| id).collect();
            others.get(pick as usize % others.len().max(1)).copied()
        };
        let sites = self.sites(|stage, body, at| operand(&mut body[at].instr.clone()).is_some_and(|b| other(stage, *b, 0).is_some()));
        let site = sites[self.draw(sites.len())?];
        let pick = self.pick / sites.len() as u64;
        let old = *operand(&mut self.issue(site).instr.clone())?;
        let new = other(&self.program.stages[site.0], old, pick)?;
        *operand(&mut self.issue(site).instr)? = new;
        Some(format!("{}: {new} for {old}", show(site)))
    }
    fn buffer(&mut self, change: impl Fn(&mut Buffer, &[Buffer]) -> bool) -> Option<String> {
        let stage = self.draw(self.program.stages.len())?;
        let pick = self.pick / self.program.stages.len() as u64;
        let buffers = &mut self.program.stages[stage].buffers;
        let used = |b: &Buffer| b.content != Content::Scratch && b.bytes > 0;
        let ids: Vec<BufferId> = buffers
            .iter()
            .filter(|&(id, b)| {
                let others: Vec<Buffer> = buffers.iter().filter(|&(other, o)| other != id && used(o)).map(|(_, o)| o.clone()).collect();
                used(b) && change(&mut b.clone(), &others)
            })
            .map(|(id, _)| id)
            .collect();
        let id = *ids.get(pick as usize % ids.len().max(1))?;
        let others: Vec<Buffer> = buffers.iter().filter(|&(other, o)| other != id && used(o)).map(|(_, o)| o.clone()).collect();
        change(&mut buffers[id], &others);
        Some(format!("stage {stage} {id}"))
    }
    fn ring(&mut self, change: impl Fn(&mut Ring)) -> Option<String> {
        self.buffer(|buffer, _| match &mut buffer.content {
            Content::Value { sharding, .. } => match &mut sharding.ring {
                Some(ring) => {
                    let was = *ring;
                    change(ring);
                    was != *ring
                }
                None => false,
            },
            Content::Flat { .. }
            | Content::Member { .. }
            | Content::Scalar(_)
            | Content::Trust { .. }
            | Content::Wire { .. }
            | Content::Frame
            | Content::Scratch => false,
        })
    }
    fn bucket(&mut self, change: impl Fn(&mut crate::program::Bucket, u64) -> bool) -> Option<String> {
        let stage = self.draw(self.program.stages.len())?;
        let pick = self.pick / self.program.stages.len() as u64;
        let buckets = &mut self.program.stages[stage].buckets;
        let ids: Vec<_> = buckets.iter().filter(|(_, b)| change(&mut (*b).clone(), pick)).map(|(id, _)| id).collect();
        let id = *ids.get(pick as usize % ids.len().max(1))?;
        change(&mut buckets[id], pick / ids.len() as u64);
        Some(format!("stage {stage} {id}"))
    }
    /// A call that has `after` more behind it.
    fn call(&self, after: usize) -> Option<(usize, usize)> {
        let stage = self.draw(self.program.stages.len())?;
        let pick = self.pick / self.program.stages.len() as u64;
        let calls = self.program.stages[stage].schedule.len().checked_sub(after).filter(|&n| n > 0)?;
        Some((stage, pick as usize % calls))
    }
}

/// `DropWait` as `drop wait`.
fn words(name: &str) -> String {
    let spaced = name.chars().enumerate().flat_map(|(at, c)| (at > 0 && c.is_uppercase()).then_some(' ').into_iter().chain(c.to_lowercase()));
    spaced.collect()
}

fn show((stage, segment, at): Site) -> String {
    format!("stage {stage} {segment}[{at}]")
}
