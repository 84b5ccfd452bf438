//! What a rank keeps in a file, and the thread that carries bytes there and back.
//!
//! The file has no name, so nothing is left of it when the process ends, however that ends. All of its space is taken at once: a disk that is too small is known before
//! the first step. Where the file system allows, bytes go past the page cache (*direct*), which would else hold in memory what was moved out of it; direct transfers are of
//! whole blocks, by way of an aligned buffer, and what a transfer leaves of its first and last block stays as it was.
//!
//! A rank *posts* transfers and looks whether they are done; its [`Porter`] does them one after another on a thread of its own, in the order in which they were posted.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};

/// What disks read and write at once.
pub const BLOCK: usize = 4096;

/// Blocks that a direct transfer moves at once.
const BLOCKS: usize = 256;

/// Memory as direct transfers need it.
#[derive(Clone, Debug)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK]);

/// A rank's file.
#[derive(Debug)]
pub struct Scratch {
    file: File,
    /// Address of its first byte.
    start: u64,
    route: Route,
}

/// How bytes reach the disk.
#[derive(Debug)]
enum Route {
    Direct(Mutex<Vec<Block>>),
    /// Through the page cache, and why.
    Cached(String),
}

impl Scratch {
    /// A file for the addresses from `start` on, all zero.
    ///
    /// # Errors
    /// If the folder cannot be written to, or has no room for so many bytes.
    pub fn new(folder: &Path, start: u64, bytes: u64) -> io::Result<Scratch> {
        let file = tempfile::tempfile_in(folder)?;
        let bytes = bytes.next_multiple_of(BLOCK as u64);
        match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => {}
            Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(bytes)?,
            Err(why) => return Err(why.into()),
        }
        let route = match direct(&file) {
            Ok(buffer) => Route::Direct(Mutex::new(buffer)),
            Err(why) => {
                cached(&file)?;
                Route::Cached(why.to_string())
            }
        };
        Ok(Scratch { file, start, route })
    }

    /// Why its bytes go through the page cache, if they do.
    pub fn cached(&self) -> Option<&str> {
        match &self.route {
            Route::Direct(_) => None,
            Route::Cached(why) => Some(why),
        }
    }

    /// # Errors
    /// Whatever the disk has to say.
    pub fn read(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        let at = address - self.start;
        match &self.route {
            Route::Cached(_) => self.file.read_exact_at(into, at),
            Route::Direct(buffer) => {
                let mut buffer = buffer.lock().unwrap_or_else(|e| e.into_inner());
                let buffer = bytes(&mut buffer);
                pieces(at, into.len(), |first, inside, part| {
                    let blocks = &mut buffer[..inside.end.next_multiple_of(BLOCK)];
                    self.file.read_exact_at(blocks, first)?;
                    into[part].copy_from_slice(&blocks[inside]);
                    Ok(())
                })
            }
        }
    }

    /// # Errors
    /// Whatever the disk has to say.
    pub fn write(&self, address: u64, from: &[u8]) -> io::Result<()> {
        let at = address - self.start;
        match &self.route {
            Route::Cached(_) => self.file.write_all_at(from, at),
            Route::Direct(buffer) => {
                let mut buffer = buffer.lock().unwrap_or_else(|e| e.into_inner());
                let buffer = bytes(&mut buffer);
                pieces(at, from.len(), |first, inside, part| {
                    let end = inside.end.next_multiple_of(BLOCK);
                    // What is not overwritten of the first and the last block stays.
                    if inside.start > 0 {
                        self.file.read_exact_at(&mut buffer[..BLOCK], first)?;
                    }
                    if inside.end < end && (inside.start == 0 || end > BLOCK) {
                        self.file.read_exact_at(&mut buffer[end - BLOCK..end], first + (end - BLOCK) as u64)?;
                    }
                    buffer[inside].copy_from_slice(&from[part]);
                    self.file.write_all_at(&buffer[..end], first)
                })
            }
        }
    }
}

/// What a user should know of files that are not direct.
pub fn by_the_page_cache(why: &str) -> String {
    format!("scratch files go through the page cache, which takes memory: no direct I/O there ({why})")
}

/// Makes transfers direct, if the file system really allows it, and gives them a buffer.
fn direct(file: &File) -> io::Result<Vec<Block>> {
    fcntl_setfl(file, fcntl_getfl(file)? | OFlags::DIRECT)?;
    let mut buffer = vec![Block([0; BLOCK]); BLOCKS];
    file.write_all_at(&bytes(&mut buffer)[..BLOCK], 0)?;
    file.read_exact_at(&mut bytes(&mut buffer)[..BLOCK], 0)?;
    Ok(buffer)
}

fn cached(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? - OFlags::DIRECT)?)
}

fn bytes(blocks: &mut [Block]) -> &mut [u8] {
    // SAFETY: blocks are bytes without padding, one after another.
    unsafe { std::slice::from_raw_parts_mut(blocks.as_mut_ptr().cast(), blocks.len() * BLOCK) }
}

/// Cuts `len` bytes at `at` into runs of blocks that the buffer holds: `visit(first byte of the run, range inside it, range of the bytes)`.
fn pieces(at: u64, len: usize, mut visit: impl FnMut(u64, std::ops::Range<usize>, std::ops::Range<usize>) -> io::Result<()>) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let from = at + done as u64;
        let before = (from % BLOCK as u64) as usize;
        let count = (len - done).min(BLOCKS * BLOCK - before);
        visit(from - before as u64, before..before + count, done..done + count)?;
        done += count;
    }
    Ok(())
}

/// Which way a transfer goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// From the file to memory.
    In,
    Out,
}

/// Bytes to carry.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    pub way: Way,
    pub memory: *mut u8,
    pub bytes: usize,
    /// In the file.
    pub address: u64,
}

// SAFETY: the bytes are plain, and who may touch them when is what the program says.
unsafe impl Send for Transfer {}

/// Carries a rank's transfers.
#[derive(Debug)]
pub struct Porter {
    orders: Mutex<Orders>,
    posted: Condvar,
    /// Transfers done, over all steps.
    done: AtomicU64,
}

#[derive(Debug)]
struct Orders {
    waiting: VecDeque<Transfer>,
    /// Transfers ever posted.
    count: u64,
    failed: Option<String>,
    quit: bool,
}

impl Porter {
    /// `most`: transfers that may wait at once.
    pub fn new(most: usize) -> Porter {
        let orders = Orders { waiting: VecDeque::with_capacity(most), count: 0, failed: None, quit: false };
        Porter { orders: Mutex::new(orders), posted: Condvar::new(), done: AtomicU64::new(0) }
    }

    /// Posts a transfer; returns its number.
    ///
    /// # Safety
    /// Until it is done, nobody else writes its memory, nor reads it where it comes in.
    pub unsafe fn post(&self, transfer: Transfer) -> u64 {
        let mut orders = self.lock();
        orders.waiting.push_back(transfer);
        orders.count += 1;
        self.posted.notify_one();
        orders.count - 1
    }

    /// Whether a transfer is done.
    ///
    /// # Errors
    /// Why it, or one before it, could not be.
    pub fn is_done(&self, number: u64) -> Result<bool, String> {
        if self.done.load(Ordering::Acquire) > number {
            return Ok(true);
        }
        self.lock().failed.clone().map_or(Ok(false), Err)
    }

    /// Lets [`Porter::carry`] return.
    pub fn quit(&self) {
        self.lock().quit = true;
        self.posted.notify_one();
    }

    /// The life of the porter's thread; `notify` is called after each transfer.
    pub fn carry(&self, scratch: &Scratch, notify: impl Fn()) {
        let mut orders = self.lock();
        loop {
            if orders.quit || orders.failed.is_some() {
                return;
            }
            let Some(Transfer { way, memory, bytes, address }) = orders.waiting.pop_front() else {
                orders = self.posted.wait(orders).unwrap_or_else(|e| e.into_inner());
                continue;
            };
            drop(orders);
            // SAFETY: by the promise of `post`.
            let outcome = unsafe {
                match way {
                    Way::In => scratch.read(address, std::slice::from_raw_parts_mut(memory, bytes)),
                    Way::Out => scratch.write(address, std::slice::from_raw_parts(memory, bytes)),
                }
            };
            orders = self.lock();
            match outcome {
                Ok(()) => {
                    self.done.fetch_add(1, Ordering::Release);
                }
                Err(why) => orders.failed = Some(format!("its scratch file: {why}")),
            }
            notify();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dplan_ir::splitmix;

    /// Any ranges, on either route, against plain memory.
    #[test]
    fn a_file_holds_what_was_written() {
        let size = 3 * BLOCKS * BLOCK + 100;
        for cache in [false, true] {
            let mut scratch = Scratch::new(&std::env::temp_dir(), 256, size as u64).unwrap();
            if cache {
                super::cached(&scratch.file).unwrap();
                scratch.route = Route::Cached("asked for".into());
            }
            let mut truth = vec![0u8; size];
            let mut random = 7;
            for round in 0..60 {
                let from = splitmix::next(&mut random) as usize % size;
                let most = if round % 3 == 0 { size } else { 2 * BLOCK };
                let to = from + splitmix::next(&mut random) as usize % (size - from).min(most);
                if round % 2 == 0 {
                    truth[from..to].iter_mut().for_each(|b| *b = splitmix::next(&mut random) as u8);
                    scratch.write(256 + from as u64, &truth[from..to]).unwrap();
                } else {
                    let mut found = vec![1; to - from];
                    scratch.read(256 + from as u64, &mut found).unwrap();
                    assert!(found == truth[from..to], "{from}..{to}");
                }
            }
        }
    }

    #[test]
    fn what_a_disk_cannot_do_is_said() {
        assert!(Scratch::new(Path::new("/nowhere"), 0, 1).is_err());
        let scratch = Scratch::new(&std::env::temp_dir(), 0, 1).unwrap();
        let porter = Porter::new(1);
        let mut byte = [0u8; 1];
        // SAFETY: nobody else has the byte.
        let number = unsafe { porter.post(Transfer { way: Way::In, memory: byte.as_mut_ptr(), bytes: 1, address: 1 << 40 }) };
        porter.carry(&scratch, || {});
        assert!(porter.is_done(number).unwrap_err().contains("scratch file"));
    }
}
