//! What the members of a communicator do with each other's memory once all of them are there.
//!
//! The work is cut into one *share* per member. Shares touch different elements, so members work at the same time, also where source and
//! destination are the same bytes, or one is the member's piece of the other:
//! - all-reduce: share i is the i-th part of the elements; they are reduced over all members' sources in group order and written to all members' destinations;
//! - reduce-scatter: share i is the i-th block, reduced in group order into member i's destination;
//! - all-gather: share i copies all members' blocks into member i's destination;
//! - all-to-all: share i copies block i of every member's source into member i's destination, which is elsewhere;
//! - shift: share i copies the source of the member before into member i's destination, which is elsewhere;
//! - message: share 1 copies from member 0 to member 1.
//!
//! 16-bit elements are reduced in f32 and rounded once.

use std::sync::atomic::{AtomicPtr, Ordering};

use dplan_ir::dtype::DType;
use dplan_ir::sharding::Monoid;
use half::{bf16, f16};

/// One member's addresses.
#[derive(Debug, Default)]
pub struct Posted {
    pub src: AtomicPtr<u8>,
    pub dst: AtomicPtr<u8>,
}

impl Posted {
    fn src<T>(&self) -> *const T {
        self.src.load(Ordering::Relaxed).cast_const().cast()
    }
    fn dst<T>(&self) -> *mut T {
        self.dst.load(Ordering::Relaxed).cast()
    }
}

/// One meeting's work. Sizes are elements of `dtype`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    AllReduce {
        elems: usize,
        monoid: Monoid,
        dtype: DType,
    },
    /// Sources are `[outer, members × block]`, destinations `[outer, block]`.
    ReduceScatter {
        outer: usize,
        block: usize,
        monoid: Monoid,
        dtype: DType,
    },
    /// Sources are `[outer, block]`, destinations `[outer, members × block]`.
    AllGather {
        outer: usize,
        block: usize,
        dtype: DType,
    },
    /// Sources and destinations are `[members × block]`.
    AllToAll {
        block: usize,
        dtype: DType,
    },
    Shift {
        bytes: usize,
    },
    Message {
        bytes: usize,
    },
}

impl Work {
    /// Bytes that a share reads, about.
    pub fn bytes(&self, members: usize) -> usize {
        match *self {
            Work::AllReduce { elems, dtype, .. } => elems * dtype.size() as usize,
            Work::ReduceScatter { outer, block, dtype, .. } | Work::AllGather { outer, block, dtype } => {
                outer * block * members * dtype.size() as usize
            }
            Work::AllToAll { block, dtype } => block * members * dtype.size() as usize,
            Work::Shift { bytes } => bytes,
            Work::Message { .. } => 0,
        }
    }

    /// Does the share of member `me`.
    ///
    /// # Safety
    /// Every posted address has the elements the work says, aligned, and nobody but the members' shares touches them meanwhile.
    pub unsafe fn share(&self, members: &[Posted], me: usize) {
        // SAFETY: the caller's promise is each function's.
        unsafe {
            match *self {
                Work::AllReduce { dtype, elems, monoid } => match dtype {
                    DType::F64 => all_reduce::<f64>(members, me, elems, monoid),
                    DType::F32 | DType::I32 => all_reduce::<f32>(members, me, elems, monoid),
                    DType::Bf16 => all_reduce::<bf16>(members, me, elems, monoid),
                    DType::F16 => all_reduce::<f16>(members, me, elems, monoid),
                },
                Work::ReduceScatter { dtype, outer, block, monoid } => match dtype {
                    DType::F64 => reduce_scatter::<f64>(members, me, outer, block, monoid),
                    DType::F32 | DType::I32 => reduce_scatter::<f32>(members, me, outer, block, monoid),
                    DType::Bf16 => reduce_scatter::<bf16>(members, me, outer, block, monoid),
                    DType::F16 => reduce_scatter::<f16>(members, me, outer, block, monoid),
                },
                Work::AllGather { outer, block, dtype } => all_gather(members, me, outer, block * dtype.size() as usize),
                Work::AllToAll { block, dtype } => all_to_all(members, me, block * dtype.size() as usize),
                Work::Shift { bytes } => {
                    let before = &members[(me + members.len() - 1) % members.len()];
                    // No destination overlaps a source.
                    std::ptr::copy_nonoverlapping(before.src::<u8>(), members[me].dst::<u8>(), bytes);
                }
                Work::Message { bytes } if me == 1 => {
                    // Destination of the receiver, source of the sender: different arenas.
                    std::ptr::copy_nonoverlapping(members[0].src::<u8>(), members[1].dst::<u8>(), bytes);
                }
                Work::Message { .. } => {}
            }
        }
    }
}

/// Types that can be reduced, and what they are reduced in.
trait Reduce: Copy + Default {
    type Sum: Copy + Default;
    fn widen(self) -> Self::Sum;
    fn round(sum: Self::Sum) -> Self;
    fn reduce(sum: Self::Sum, other: Self::Sum, monoid: Monoid) -> Self::Sum;
}

macro_rules! reduce {
    ($t:ident in $sum:ident, $widen:expr, $round:expr) => {
        impl Reduce for $t {
            type Sum = $sum;
            #[inline(always)]
            fn widen(self) -> $sum {
                $widen(self)
            }
            #[inline(always)]
            fn round(sum: $sum) -> $t {
                $round(sum)
            }
            #[inline(always)]
            fn reduce(sum: $sum, other: $sum, monoid: Monoid) -> $sum {
                match monoid {
                    Monoid::Sum => sum + other,
                    Monoid::Max => sum.max(other),
                    Monoid::LogSumExp => {
                        let max = sum.max(other);
                        if max == $sum::NEG_INFINITY { max } else { max + (-(sum - other).abs()).exp().ln_1p() }
                    }
                }
            }
        }
    };
}
reduce!(f32 in f32, std::convert::identity, std::convert::identity);
reduce!(f64 in f64, std::convert::identity, std::convert::identity);
reduce!(bf16 in f32, bf16::to_f32, bf16::from_f32);
reduce!(f16 in f32, f16::to_f32, f16::from_f32);

/// Elements reduced at a time, on the stack.
const CHUNK: usize = 512;

/// Reduces `len` elements at `offset` of all sources, chunk by chunk, and hands each chunk to `put(offset in the range, chunk)`.
unsafe fn reduce<T: Reduce>(members: &[Posted], offset: usize, len: usize, monoid: Monoid, mut put: impl FnMut(usize, &[T])) {
    let (mut sums, mut chunk) = ([T::Sum::default(); CHUNK], [T::default(); CHUNK]);
    for start in (0..len).step_by(CHUNK) {
        let size = CHUNK.min(len - start);
        let (sums, acc) = (&mut sums[..size], &mut chunk[..size]);
        for (i, member) in members.iter().enumerate() {
            // SAFETY: in range by the caller's promise; nobody writes these elements before `put` does.
            let src = unsafe { std::slice::from_raw_parts(member.src::<T>().add(offset + start), size) };
            if i == 0 {
                sums.iter_mut().zip(src).for_each(|(a, s)| *a = s.widen());
            } else {
                sums.iter_mut().zip(src).for_each(|(a, s)| *a = T::reduce(*a, s.widen(), monoid));
            }
        }
        acc.iter_mut().zip(&*sums).for_each(|(a, s)| *a = T::round(*s));
        put(start, acc);
    }
}

unsafe fn all_reduce<T: Reduce>(members: &[Posted], me: usize, elems: usize, monoid: Monoid) {
    let cut = |i: usize| elems * i / members.len();
    let (first, end) = (cut(me), cut(me + 1));
    // SAFETY: the part is inside every source and destination.
    unsafe {
        reduce::<T>(members, first, end - first, monoid, |at, sum| {
            for member in members {
                std::ptr::copy_nonoverlapping(sum.as_ptr(), member.dst::<T>().add(first + at), sum.len());
            }
        });
    }
}

unsafe fn reduce_scatter<T: Reduce>(members: &[Posted], me: usize, outer: usize, block: usize, monoid: Monoid) {
    let dst = members[me].dst::<T>();
    for row in 0..outer {
        // SAFETY: block `me` of every source row, and the row of this member's destination.
        unsafe {
            reduce::<T>(members, (row * members.len() + me) * block, block, monoid, |at, sum| {
                std::ptr::copy_nonoverlapping(sum.as_ptr(), dst.add(row * block + at), sum.len());
            });
        }
    }
}

unsafe fn all_gather(members: &[Posted], me: usize, outer: usize, block: usize) {
    let dst = members[me].dst::<u8>();
    for (i, member) in members.iter().enumerate() {
        for row in 0..outer {
            // SAFETY: block `i` of this member's destination row, and the row of member i's source. In place both are the same bytes.
            unsafe {
                let (from, to) = (member.src::<u8>().add(row * block), dst.add((row * members.len() + i) * block));
                if from != to.cast_const() {
                    std::ptr::copy_nonoverlapping(from, to, block);
                }
            }
        }
    }
}

unsafe fn all_to_all(members: &[Posted], me: usize, block: usize) {
    let dst = members[me].dst::<u8>();
    for (i, member) in members.iter().enumerate() {
        // SAFETY: block `me` of member i's source, and block `i` of this member's destination, which overlaps no source.
        unsafe { std::ptr::copy_nonoverlapping(member.src::<u8>().add(me * block), dst.add(i * block), block) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs all shares on one memory per member, in which sources begin at `src` and destinations at `dst`, in both orders of members.
    fn check(work: Work, memory: &[Vec<f64>], src: impl Fn(usize) -> usize, dst: impl Fn(usize) -> usize, want: &[Vec<f64>]) {
        for reversed in [false, true] {
            let mut memory = memory.to_vec();
            let posted: Vec<Posted> = memory
                .iter_mut()
                .enumerate()
                .map(|(i, m)| {
                    let base = m.as_mut_ptr();
                    Posted { src: AtomicPtr::new(base.wrapping_add(src(i)).cast()), dst: AtomicPtr::new(base.wrapping_add(dst(i)).cast()) }
                })
                .collect();
            for i in 0..posted.len() {
                let me = if reversed { posted.len() - 1 - i } else { i };
                // SAFETY: the tests give memory of the sizes in `work`.
                unsafe { work.share(&posted, me) };
            }
            assert_eq!(memory, want, "{work:?}");
        }
    }

    #[test]
    fn all_reduce_in_place_adds_in_group_order() {
        let work = Work::AllReduce { elems: 3, monoid: Monoid::Sum, dtype: DType::F64 };
        // Whether 1 is lost beside 1e16 tells the order of additions.
        let memory = vec![vec![1e16, 1.0, 1.0], vec![1.0, 1e16, 2.0], vec![-1e16, -1e16, 3.0]];
        check(work, &memory, |_| 0, |_| 0, &vec![vec![0.0, 0.0, 6.0]; 3]);
    }

    #[test]
    fn log_sum_exp_of_nothing_is_neutral() {
        let inf = f64::NEG_INFINITY;
        let work = Work::AllReduce { elems: 2, monoid: Monoid::LogSumExp, dtype: DType::F64 };
        check(work, &[vec![inf, inf], vec![3.0, inf]], |_| 0, |_| 0, &vec![vec![3.0, inf]; 2]);
    }

    #[test]
    fn flat_scatter_and_gather_work_in_place() {
        let work = Work::ReduceScatter { outer: 1, block: 2, monoid: Monoid::Sum, dtype: DType::F64 };
        let memory = vec![vec![1.0, 2.0, 3.0, 4.0], vec![10.0, 20.0, 30.0, 40.0]];
        check(work, &memory, |_| 0, |i| 2 * i, &[vec![11.0, 22.0, 3.0, 4.0], vec![10.0, 20.0, 33.0, 44.0]]);
        let work = Work::AllGather { outer: 1, block: 2, dtype: DType::F64 };
        check(work, &memory, |i| 2 * i, |_| 0, &vec![vec![1.0, 2.0, 30.0, 40.0]; 2]);
    }

    #[test]
    fn an_inner_dim_is_scattered_and_gathered_row_by_row() {
        // Sources are [2, 2 × 1]; the results follow them.
        let work = Work::ReduceScatter { outer: 2, block: 1, monoid: Monoid::Max, dtype: DType::F64 };
        let memory = vec![vec![1.0, 2.0, 3.0, 4.0, 0.0, 0.0], vec![4.0, 3.0, 2.0, 1.0, 0.0, 0.0]];
        check(work, &memory, |_| 0, |_| 4, &[vec![1.0, 2.0, 3.0, 4.0, 4.0, 3.0], vec![4.0, 3.0, 2.0, 1.0, 3.0, 4.0]]);
        let work = Work::AllGather { outer: 2, block: 1, dtype: DType::F64 };
        let memory = vec![vec![1.0, 2.0, 0.0, 0.0, 0.0, 0.0], vec![3.0, 4.0, 0.0, 0.0, 0.0, 0.0]];
        check(work, &memory, |_| 0, |_| 2, &[vec![1.0, 2.0, 1.0, 3.0, 2.0, 4.0], vec![3.0, 4.0, 1.0, 3.0, 2.0, 4.0]]);
    }

    #[test]
    fn blocks_go_round_to_the_next_member() {
        let memory = vec![vec![1.0, 0.0], vec![2.0, 0.0], vec![3.0, 0.0]];
        check(Work::Shift { bytes: 8 }, &memory, |_| 0, |_| 1, &[vec![1.0, 3.0], vec![2.0, 1.0], vec![3.0, 2.0]]);
    }

    #[test]
    fn everybody_sends_each_member_its_block() {
        let work = Work::AllToAll { block: 2, dtype: DType::F64 };
        let memory = vec![vec![1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0], vec![5.0, 6.0, 7.0, 8.0, 0.0, 0.0, 0.0, 0.0]];
        let want = vec![vec![1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 5.0, 6.0], vec![5.0, 6.0, 7.0, 8.0, 3.0, 4.0, 7.0, 8.0]];
        check(work, &memory, |_| 0, |_| 4, &want);
    }
}
