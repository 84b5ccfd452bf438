//! Communicators: where ranks meet.
//!
//! The n-th collective (or message) of a communicator, counted in each member's issue order, is one *meeting* of all its members. A member goes through
//! four phases, none of which blocks its thread:
//! 1. *arrive*: it posts its addresses;
//! 2. *work*: when all have arrived, it does its share ([`super::collective`]); of a small meeting, the last to arrive does all shares;
//! 3. *leave*: when all shares are done, its instruction is complete;
//! 4. the last to leave opens the place for a later meeting.
//!
//! Whoever completes a phase wakes the other members.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::collective::{Posted, Work};

/// Meetings of one communicator that may be open at once: more than a rank has streams, so that no stream ever waits for a place.
const PLACES: u64 = 64;

/// Below this a meeting is not worth a second round of wake-ups.
const SMALL_BYTES: usize = 1 << 15;

#[derive(Debug)]
pub struct Communicator {
    /// Ranks, in group order.
    pub members: Vec<usize>,
    places: Vec<Place>,
}

#[derive(Debug, Default)]
struct Place {
    /// How many meetings were held here.
    held: AtomicU64,
    /// Somebody waits for the place.
    crowded: AtomicBool,
    arrived: AtomicUsize,
    done: AtomicUsize,
    left: AtomicUsize,
    posted: Vec<Posted>,
}

/// How far a member is in a meeting.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Phase {
    #[default]
    Arriving,
    Waiting,
    Leaving,
}

/// What trying an instruction led to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// It is complete.
    Complete,
    /// It waits for somebody else.
    Blocked,
}

/// One member's part in one meeting.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    pub work: &'a Work,
    pub member: usize,
    /// Number of the meeting since the session began.
    pub number: u64,
    pub src: *mut u8,
    pub dst: *mut u8,
}

impl Communicator {
    pub fn new(members: Vec<usize>) -> Communicator {
        let place = || Place { posted: members.iter().map(|_| Posted::default()).collect(), ..Place::default() };
        Communicator { places: (0..PLACES).map(|_| place()).collect(), members }
    }

    /// Takes a member as far as it gets; calls `wake(rank)` for those who may get further then.
    ///
    /// # Safety
    /// The addresses have the elements that the work says, and nobody else touches them until the instruction is complete.
    pub unsafe fn advance(&self, phase: &mut Phase, part: Part<'_>, wake: impl Fn(usize)) -> Progress {
        let all = self.members.len();
        let place = &self.places[(part.number % PLACES) as usize];
        let wake_others = || self.members.iter().enumerate().filter(|&(m, _)| m != part.member).for_each(|(_, &rank)| wake(rank));
        if *phase == Phase::Arriving {
            if place.held.load(Ordering::Acquire) != part.number / PLACES {
                // Looked at again after asking to be woken, so that the wake-up cannot fall between.
                place.crowded.store(true, Ordering::SeqCst);
                if place.held.load(Ordering::SeqCst) != part.number / PLACES {
                    return Progress::Blocked;
                }
            }
            place.posted[part.member].src.store(part.src, Ordering::Relaxed);
            place.posted[part.member].dst.store(part.dst, Ordering::Relaxed);
            let last = place.arrived.fetch_add(1, Ordering::AcqRel) + 1 == all;
            *phase = Phase::Waiting;
            if last && part.work.bytes(all) <= SMALL_BYTES {
                // SAFETY: all have arrived, and those who wait do nothing until `done` says so.
                (0..all).for_each(|member| unsafe { part.work.share(&place.posted, member) });
                *phase = Phase::Leaving;
                place.done.store(all, Ordering::Release);
            }
            if last {
                wake_others();
            }
        }
        if *phase == Phase::Waiting {
            if place.done.load(Ordering::Acquire) == all {
                *phase = Phase::Leaving;
            } else if place.arrived.load(Ordering::Acquire) < all || part.work.bytes(all) <= SMALL_BYTES {
                return Progress::Blocked;
            } else {
                // SAFETY: all have arrived, so all addresses are posted and stay valid until everybody is done.
                unsafe { part.work.share(&place.posted, part.member) };
                *phase = Phase::Leaving;
                if place.done.fetch_add(1, Ordering::AcqRel) + 1 == all {
                    wake_others();
                }
            }
        }
        if place.done.load(Ordering::Acquire) < all {
            return Progress::Blocked;
        }
        if place.left.fetch_add(1, Ordering::AcqRel) + 1 == all {
            place.arrived.store(0, Ordering::Relaxed);
            place.done.store(0, Ordering::Relaxed);
            place.left.store(0, Ordering::Relaxed);
            place.held.fetch_add(1, Ordering::SeqCst);
            if place.crowded.swap(false, Ordering::SeqCst) {
                wake_others();
            }
        }
        *phase = Phase::Arriving;
        Progress::Complete
    }
}
