//! What a rank on a GPU keeps in a file.
//!
//! Bytes go by way of pinned memory, a *piece* at a time, on two streams: the program's, which copies between the device and pinned memory, and the disk's, on which the host
//! reads and writes the file. Events hand the pieces over, so that the disk reads ahead of what is copied in, and writes while the program's stream goes on:
//!
//! ```text
//! out:  program  [device -> 0]  [device -> 1]  ...          in:  disk     [file -> 0]  [file -> 1]  ...
//!       disk                    [0 -> file]    [1 -> file]       program               [0 -> device]  [1 -> device]
//! ```
//!
//! A copy is complete for the program when the device has the bytes, or pinned memory has. The file is touched on the disk's stream alone, in issue order, which is an order in
//! which everything can be done: what is read was written before, and nobody waits for somebody who waits for him.
//!
//! The host's part is an [`Errand`] that the stream calls in its turn (`cuLaunchHostFunc`): so the thread that queues a step never waits for a disk, and CUDA's own thread carries
//! the bytes. On that thread NCCL, too, posts what goes over a network, but only inside CUDA graphs; there it would wait behind the disk. So steps that touch files are launched
//! call by call: beside a disk, launching costs nothing.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use super::driver::{Address, Driver, DriverError, Event, Pinned, Queue};
use crate::runtime::scratch::{BLOCK, Scratch, Way};

const PIECES: usize = 2;
const LARGEST_PIECE: u64 = 8 << 20;

/// Bytes of a piece where no transfer has more than `largest`: also that one is in several, so that disk and device take turns.
pub fn piece_bytes(largest: u64) -> u64 {
    (largest / 4).next_multiple_of(BLOCK as u64).clamp(BLOCK as u64, LARGEST_PIECE)
}

/// A piece that the host carries between pinned memory and the file.
#[derive(Debug)]
pub struct Errand {
    desk: Arc<Desk>,
    pub way: Way,
    memory: *mut u8,
    pub bytes: u64,
    /// In the file.
    pub address: u64,
}

// SAFETY: the memory is plain bytes, that pass from one owner to the next by events; what else is in here is shared safely.
unsafe impl Send for Errand {}
// SAFETY: as above.
unsafe impl Sync for Errand {}

impl Errand {
    /// Does it. Once one has failed, or the desk is closed, nothing more is done.
    pub fn run(&self) {
        let mut state = self.desk.lock();
        if *state != State::Open {
            return;
        }
        // SAFETY: the memory is pinned while the desk is open, and this errand's until its stream goes on.
        let outcome = unsafe {
            match self.way {
                Way::In => self.desk.scratch.read(self.address, std::slice::from_raw_parts_mut(self.memory, self.bytes as usize)),
                Way::Out => self.desk.scratch.write(self.address, std::slice::from_raw_parts(self.memory, self.bytes as usize)),
            }
        };
        if let Err(why) = outcome {
            *state = State::Failed { way: self.way, why: why.to_string() };
        }
    }
}

/// The file, and whether it is still worked on.
#[derive(Debug)]
struct Desk {
    scratch: Scratch,
    state: Mutex<State>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum State {
    Open,
    Failed { way: Way, why: String },
    Closed,
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A rank's file, and the way to it.
pub struct Disk {
    desk: Arc<Desk>,
    pieces: Pinned,
    /// Where the pieces are.
    memory: *mut u8,
    piece: u64,
    stream: Queue,
    /// Of each piece: its bytes are there, and were taken from there.
    full: [Event; PIECES],
    empty: [Event; PIECES],
    /// Pieces handed over in this step.
    count: usize,
    /// Those that may still be called.
    errands: Vec<Arc<Errand>>,
}

/// What [`Disk`] is made of, besides its file.
pub struct Parts {
    pub pieces: Pinned,
    pub piece: u64,
    pub stream: Queue,
    pub events: Vec<Event>,
}

impl Parts {
    pub const EVENTS: usize = 2 * PIECES;
    pub fn pinned_bytes(piece: u64) -> u64 {
        piece * PIECES as u64
    }
}

impl Disk {
    pub fn new<D: Driver>(driver: &mut D, scratch: Scratch, parts: &Parts) -> Disk {
        Disk {
            desk: Arc::new(Desk { scratch, state: Mutex::new(State::Open) }),
            pieces: parts.pieces,
            memory: driver.pinned(parts.pieces).as_mut_ptr(),
            piece: parts.piece,
            stream: parts.stream,
            full: std::array::from_fn(|at| parts.events[at]),
            empty: std::array::from_fn(|at| parts.events[PIECES + at]),
            count: 0,
            errands: Vec::new(),
        }
    }
    /// The file itself, while nothing is under way.
    pub fn file(&self) -> &Scratch {
        &self.desk.scratch
    }
    /// Begins a step: the one before has ended.
    pub fn begin(&mut self) {
        self.count = 0;
        self.errands.clear();
    }
    /// Queues a copy between the device and the file, for `stream`.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn carry<D: Driver>(
        &mut self,
        driver: &mut D,
        way: Way,
        device: Address,
        address: u64,
        bytes: u64,
        stream: Queue,
    ) -> Result<(), DriverError> {
        let mut done = 0;
        while done < bytes {
            let (at, n) = (self.count % PIECES, (bytes - done).min(self.piece));
            let offset = at as u64 * self.piece;
            // SAFETY: inside the pieces.
            let memory = unsafe { self.memory.add(offset as usize) };
            let errand = Arc::new(Errand { desk: Arc::clone(&self.desk), way, memory, bytes: n, address: address + done });
            let (first, second) = match way {
                Way::In => (self.stream, stream),
                Way::Out => (stream, self.stream),
            };
            if self.count >= PIECES {
                driver.wait(first, self.empty[at])?;
            }
            match way {
                Way::In => driver.call(&errand, first)?,
                Way::Out => driver.copy_out(self.pieces, offset, device.plus(done), n, first)?,
            }
            driver.record(self.full[at], first)?;
            driver.wait(second, self.full[at])?;
            match way {
                Way::In => driver.copy_in(device.plus(done), self.pieces, offset, n, second)?,
                Way::Out => driver.call(&errand, second)?,
            }
            driver.record(self.empty[at], second)?;
            self.errands.push(errand);
            self.count += 1;
            done += n;
        }
        Ok(())
    }
    /// # Errors
    /// What the disk had to say, if it could not do something.
    pub fn check(&self) -> Result<(), DriverError> {
        match &*self.desk.lock() {
            State::Failed { way, why } => {
                let call = match way {
                    Way::In => "pread",
                    Way::Out => "pwrite",
                };
                Err(DriverError { call, why: format!("its scratch file: {why}") })
            }
            State::Open | State::Closed => Ok(()),
        }
    }
    /// Ends all work: what is still called does nothing. Returns the pinned memory of pieces if a disk does not answer: it must be left behind.
    pub fn close(&mut self) -> Option<Pinned> {
        let busy = match self.desk.state.try_lock() {
            Ok(mut state) => {
                *state = State::Closed;
                false
            }
            Err(TryLockError::Poisoned(state)) => {
                *state.into_inner() = State::Closed;
                false
            }
            Err(TryLockError::WouldBlock) => true,
        };
        // A stream may still call them.
        std::mem::forget(std::mem::take(&mut self.errands));
        busy.then_some(self.pieces)
    }
}
