//! Flat buckets: parameters of one layer laid out one after the other, for what optimizers and gradients' exchanges do to all elements alike.
//!
//! A bucket may be cut into equal pieces whose borders need not respect parameters, so what is said of elements is said of stretches of them.

use crate::entity::ParamId;
use crate::mesh::AxisSet;
use crate::sharding::Sharding;
use std::ops::Range;

/// Parameters laid out flat, one after the other.
#[derive(Clone, PartialEq, Debug)]
pub struct Bucket {
    pub members: Vec<Member>,
    /// Elements, padding included: a multiple of the number of pieces.
    pub elems: u64,
    /// Axes and stages over which the members' local gradients still have to be summed (beyond this rank's own micro-batches).
    pub partial: AxisSet,
    /// For a tied parameter with homes on several stages: all its homes (this one included), over which its gradient is summed too. Empty otherwise.
    pub tied: Vec<u32>,
}

impl Bucket {
    /// Where the members' elements are among the `len` elements from `start` on, by number of the member. What is between them belongs to no parameter.
    pub fn parts(&self, start: u64, len: u64) -> Vec<(usize, Range<usize>)> {
        let part = |(at, member): (usize, &Member)| {
            let (from, to) = (member.offset.max(start), (member.offset + member.elems).min(start + len));
            (from < to).then(|| (at, (from - start) as usize..(to - start) as usize))
        };
        self.members.iter().enumerate().filter_map(part).collect()
    }

    /// The `len` elements from `start` on, in stretches for whose parameters `of` says the same; what belongs to no parameter goes with what is before it.
    pub fn stretches(&self, start: u64, len: u64, of: impl Fn(ParamId) -> bool) -> Vec<(Range<usize>, bool)> {
        let mut stretches: Vec<(Range<usize>, bool)> = Vec::new();
        for member in &self.members {
            let (from, to) = (member.offset.max(start), (member.offset + member.elems).min(start + len));
            if from < to {
                let (from, pulled) = ((from - start) as usize, of(member.param));
                match stretches.last_mut() {
                    Some((range, last)) if *last == pulled => range.end = (to - start) as usize,
                    Some((range, _)) => {
                        range.end = from;
                        stretches.push((from..(to - start) as usize, pulled));
                    }
                    None => stretches.push((0..(to - start) as usize, pulled)),
                }
            }
        }
        match stretches.last_mut() {
            Some((range, _)) => range.end = len as usize,
            None => stretches.push((0..len as usize, true)),
        }
        stretches
    }
}

/// One parameter's place in a bucket.
#[derive(Clone, PartialEq, Debug)]
pub struct Member {
    pub param: ParamId,
    /// Sharding of the parameter in compute: its local block, row-major, is at `offset`.
    pub sharding: Sharding,
    pub offset: u64,
    pub elems: u64,
}
