//! What a stand-in's ranks do when all members of a communicator have come to a call.

use std::collections::HashMap;

use dplan::runtime::cuda::driver::Exchange;
use dplan::runtime::cuda::load::{Primitive, Reduction};
use dplan::safetensors::{decode, encode};
use dplan_ir::dtype::DType;

/// A communicator as its members see it.
pub struct Group {
    pub family: u64,
    pub members: Vec<u64>,
    /// Calls that each member made.
    pub issued: Vec<u64>,
    /// Members that came to the call after `done`.
    pub here: HashMap<u64, Meeting>,
    pub done: u64,
}

#[derive(Clone, Copy, Debug)]
pub enum Meeting {
    Exchange(Exchange),
    Send { peer: u64, from: u64, bytes: u64 },
    Receive { peer: u64, to: u64, bytes: u64 },
}

/// What a group's members came for.
pub fn meet(group: &Group) {
    let n = group.members.len();
    let all: Vec<Meeting> = (0..n as u64).map(|p| group.here[&p]).collect();
    if let [a, b] = all[..] {
        let pair = match (a, b) {
            (Meeting::Send { peer: 1, from, bytes }, Meeting::Receive { peer: 0, to, bytes: n }) if n == bytes => Some((from, to, bytes)),
            (Meeting::Receive { peer: 1, to, bytes }, Meeting::Send { peer: 0, from, bytes: n }) if n == bytes => Some((from, to, bytes)),
            _ => None,
        };
        if let Some((from, to, bytes)) = pair {
            // SAFETY: checked when the calls were made; of two devices.
            return unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes as usize) };
        }
    }
    let exchanges: Vec<Exchange> = all
        .iter()
        .map(|m| match m {
            Meeting::Exchange(e) => *e,
            other => panic!("{:?} meet with {other:?}", group.members),
        })
        .collect();
    let first = exchanges[0];
    let same = |e: &&Exchange| (e.primitive, e.elems, e.dtype) == (first.primitive, first.elems, first.dtype);
    assert!(exchanges.iter().all(|e| same(&e)), "{:?} meet with {exchanges:?}", group.members);
    let (sent, received) = sizes(&first, n as u64);
    // SAFETY: checked when the calls were made.
    let read = |e: &Exchange| unsafe { std::slice::from_raw_parts(e.from.0 as *const u8, sent as usize) }.to_vec();
    let sources: Vec<Vec<u8>> = exchanges.iter().map(read).collect();
    let results: Vec<Vec<u8>> = match first.primitive {
        Primitive::AllGather => vec![sources.concat(); n],
        Primitive::AllToAll => {
            let block = (first.elems * first.dtype.size()) as usize;
            (0..n).map(|me| sources.iter().flat_map(|s| &s[me * block..(me + 1) * block]).copied().collect()).collect()
        }
        Primitive::Shift => (0..n).map(|me| sources[(me + n - 1) % n].clone()).collect(),
        Primitive::AllReduce(how) => vec![reduce(&sources, first.dtype, how); n],
        Primitive::ReduceScatter(how) => reduce(&sources, first.dtype, how).chunks(received as usize).map(<[u8]>::to_vec).collect(),
    };
    for (e, result) in exchanges.iter().zip(results) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), e.to.0 as *mut u8, received as usize) };
    }
}

/// Bytes that each member sends and receives.
pub fn sizes(e: &Exchange, members: u64) -> (u64, u64) {
    let n = e.elems * e.dtype.size();
    match e.primitive {
        Primitive::AllReduce(_) | Primitive::Shift => (n, n),
        Primitive::ReduceScatter(_) => (n * members, n),
        Primitive::AllGather => (n, n * members),
        Primitive::AllToAll => (n * members, n * members),
    }
}

/// In group order, starting from the first, each step rounded to the type.
fn reduce(all: &[Vec<u8>], dtype: DType, how: Reduction) -> Vec<u8> {
    let mut sum = all[0].clone();
    for other in &all[1..] {
        for at in 0..sum.len() / dtype.size() as usize {
            let (x, y) = (decode(dtype, &sum, at), decode(dtype, other, at));
            let z = match how {
                Reduction::Sum => x + y,
                Reduction::Max => x.max(y),
            };
            encode(dtype, z, &mut sum, at);
        }
    }
    sum
}
