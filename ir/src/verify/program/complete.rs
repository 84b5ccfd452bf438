//! Whether a gradient is complete: every contribution of this stage once for each micro-batch of the update, nothing else, and summed over all that it is partial over.

use super::Class;
use super::content::Fact;
use super::dataflow::{Share, Walk};
use super::sums::{Spans, Sum, Term};
use crate::entity::{BufferId, ParamId, ValueId};
use crate::program::{Content, Updates};

impl Walk<'_> {
    /// The one content of a flat buffer, when its bytes are to be cut otherwise than its members are.
    pub fn collapse(&mut self, buffer: BufferId) -> Result<Fact, (Class, String)> {
        let grid = self.grid(buffer);
        let mut found: Option<Fact> = None;
        for at in self.range(buffer) {
            let (own, rest) = self.cells[at].seen(grid);
            for fact in [own, rest] {
                self.part_of(buffer, fact)?;
                let Some(fact) = self.generalised(buffer, at, fact)? else { continue };
                match found {
                    Some(one) if one != fact => {
                        return Err((Class::Content, format!("its members differ: {} and {}", self.show(one), self.show(fact))));
                    }
                    _ => found = Some(fact),
                }
            }
        }
        Ok(found.unwrap_or(Fact::Zero))
    }

    /// A gradient's content said without naming the member; `None` where any statement is true (padding, and members without contributions).
    fn generalised(&mut self, buffer: BufferId, at: usize, fact: Fact) -> Result<Option<Fact>, (Class, String)> {
        let Fact::Grad { bucket, sum, flat } = fact else {
            let nothing = fact == Fact::Zero && self.expected(buffer, at).is_empty();
            return Ok(if nothing { None } else { Some(fact) });
        };
        let sum = self.sums.get(sum).clone();
        self.foreign(buffer, at, &sum)?;
        let values = self.expected(buffer, at);
        let terms = match values.first() {
            _ if sum.of(Term::All).is_some() && sum.terms.len() == 1 => sum.terms,
            None if sum.terms.is_empty() => return Ok(None),
            // Its contributions may come one by one (a shared parameter).
            _ if self.types.stage.buckets[bucket].members.len() == 1 => sum.terms,
            None => return Err((Class::Gradient, "holds a contribution that is not its parameter's".into())),
            Some(&first) => {
                let spans = sum.micro_batches(first);
                if let Some(&other) = values.iter().find(|&&v| sum.micro_batches(v) != spans) {
                    let name = |v: ValueId| self.types.graph.values[v].name.clone();
                    let message = format!(
                        "`{}` of micro-batch {} is in it, `{}` of micro-batch {}",
                        name(first),
                        spans.show(),
                        name(other),
                        sum.micro_batches(other).show()
                    );
                    return Err((Class::Gradient, message));
                }
                if spans == Spans::default() { Vec::new() } else { vec![(Term::All, spans)] }
            }
        };
        let sum = self.sums.id(Sum { terms, ..sum });
        Ok(Some(Fact::Grad { bucket, sum, flat }))
    }

    /// The member whose bytes a cell of a flat buffer is; none for padding, and for a separate piece, whose bytes are no member's in particular.
    fn member_at(&self, buffer: BufferId, at: usize) -> Option<ParamId> {
        let row = &self.types.stage.buffers[buffer];
        let bucket = match row.content {
            Content::Flat { bucket, .. } => bucket,
            Content::Member { param, .. } => return Some(param),
            Content::Value { .. } | Content::Scalar(_) | Content::Trust { .. } | Content::Wire { .. } | Content::Frame | Content::Scratch => {
                return None;
            }
        };
        let elem = (self.layout.starts[at] - self.flat(buffer).base) / row.dtype.size();
        let members = &self.types.stage.buckets[bucket].members;
        members.iter().find(|m| (m.offset..m.offset + m.elems).contains(&elem)).map(|m| m.param)
    }

    /// The contributions that belong into a cell of a gradient buffer.
    fn expected(&self, buffer: BufferId, at: usize) -> Vec<ValueId> {
        let of = |param: ParamId| self.contributions.get(&param).into_iter().flatten().copied();
        let separate = !self.flat(buffer).pieces.is_empty();
        match self.types.stage.buffers[buffer].content {
            Content::Flat { bucket, .. } if separate => self.types.stage.buckets[bucket].members.iter().flat_map(|m| of(m.param)).collect(),
            _ => self.member_at(buffer, at).map(of).into_iter().flatten().collect(),
        }
    }

    /// Reports a gradient that is not complete: each contribution once for each micro-batch, and reduced.
    pub fn expect_complete(&mut self, buffer: BufferId) {
        let grid = self.grid(buffer);
        for at in self.range(buffer) {
            let (own, rest) = self.cells[at].seen(grid);
            for fact in [own, rest] {
                if let Err((class, message)) = self.complete(buffer, at, fact) {
                    return self.fault(class, Some(buffer), message);
                }
            }
        }
    }

    fn complete(&self, buffer: BufferId, at: usize, fact: Fact) -> Result<(), (Class, String)> {
        self.part_of(buffer, fact)?;
        let (Content::Flat { bucket, .. } | Content::Member { bucket, .. }) = self.types.stage.buffers[buffer].content else { return Ok(()) };
        let padding = self.member_at(buffer, at).is_none() && self.flat(buffer).pieces.is_empty();
        let sum = match fact {
            Fact::Grad { sum, .. } => self.sums.get(sum).clone(),
            // Zeros are complete where nothing is ever added, here or on other homes.
            _ if padding || self.types.stage.buckets[bucket].tied.is_empty() => Sum::default(),
            _ => Sum { pending: self.pending(bucket), ..Sum::default() },
        };
        if !sum.pending.is_done() {
            let why = self.show_pending(sum.pending);
            return Err((Class::Gradient, format!("the gradient is used, but it is {why}")));
        }
        self.whole(buffer, at, &sum)
    }

    /// Whether every contribution of this stage is in a sum, for every micro-batch, and nothing else.
    fn whole(&self, buffer: BufferId, at: usize, sum: &Sum) -> Result<(), (Class, String)> {
        self.foreign(buffer, at, sum)?;
        let values = self.expected(buffer, at);
        let wanted = match self.updates {
            Updates::Step => Spans::all_below(self.micro_batches),
            Updates::MicroBatch => Spans::one(self.micro_batch),
        };
        match values.iter().find(|&&v| sum.micro_batches(v) != wanted) {
            None => Ok(()),
            Some(&value) => {
                let name = &self.types.graph.values[value].name;
                let have = sum.micro_batches(value).show();
                let have = if have.is_empty() { "none".into() } else { have };
                let wanted = match self.updates {
                    Updates::Step => format!("micro-batches 0–{}", self.micro_batches - 1),
                    Updates::MicroBatch => format!("micro-batch {} alone", self.micro_batch),
                };
                Err((Class::Gradient, format!("the gradient is used, but of {wanted} of `{name}` it has {have}")))
            }
        }
    }

    /// A contribution in a sum that is not the cell's parameter's. The bytes of a bucket of one member are that member's, however they are cut.
    fn foreign(&self, buffer: BufferId, at: usize, sum: &Sum) -> Result<(), (Class, String)> {
        let (Content::Flat { bucket, .. } | Content::Member { bucket, .. }) = self.types.stage.buffers[buffer].content else { return Ok(()) };
        let values = match &self.types.stage.buckets[bucket].members[..] {
            [one] => self.contributions.get(&one.param).into_iter().flatten().copied().collect(),
            _ => self.expected(buffer, at),
        };
        let is_foreign = |term: &Term| match term {
            Term::All => false,
            Term::Value(value) => !values.contains(value),
            Term::Bucket(_) => true,
        };
        match sum.terms.iter().find(|(term, _)| is_foreign(term)) {
            Some((Term::Value(value), _)) => {
                let name = &self.types.graph.values[*value].name;
                Err((Class::Gradient, format!("holds `{name}`, which is no contribution to its parameter's gradient")))
            }
            Some(_) => Err((Class::Gradient, "holds a contribution that is not its parameter's".into())),
            None => Ok(()),
        }
    }

    /// What this stage has of a gradient that it is about to reduce together with others: all of its own part.
    pub fn own_part(&self, buffer: BufferId) -> Result<Share, (Class, String)> {
        let grid = self.grid(buffer);
        let mut shares: Vec<Share> = Vec::new();
        for at in self.range(buffer) {
            let (own, rest) = self.cells[at].seen(grid);
            for fact in [own, rest] {
                self.part_of(buffer, fact)?;
                let Fact::Grad { sum, .. } = fact else {
                    self.whole(buffer, at, &Sum::default())?;
                    continue;
                };
                let sum = self.sums.get(sum);
                self.whole(buffer, at, sum)?;
                let share = Share { axes: sum.pending.axes, rounded: sum.rounded, norm: None };
                if !shares.contains(&share) {
                    shares.push(share);
                }
            }
        }
        let (Content::Flat { bucket, .. } | Content::Member { bucket, .. }) = self.types.stage.buffers[buffer].content else {
            return Ok(Share::default());
        };
        match &shares[..] {
            [] => Ok(Share { axes: self.pending(bucket).axes, ..Share::default() }),
            [one] => Ok(one.clone()),
            _ => Err((Class::Gradient, "parts of it are reduced, parts are not".into())),
        }
    }
}
