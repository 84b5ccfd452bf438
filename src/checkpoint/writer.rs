//! The thread that writes checkpoints while steps run.
//!
//! There is one snapshot's memory. [`Writer::save`] takes it back from the thread (waiting if the checkpoint before is not on disk yet), copies the state
//! into it, and hands it over; from then on the steps and the thread share nothing.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use super::snapshot::{Layout, Snapshot};
use super::store::{About, Stage, Store};
use super::{CheckpointError, Position};
use crate::runtime::Session;

/// Whether steps go on while a checkpoint is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// They do.
    Background,
    /// They wait until it is on disk.
    Waiting,
}

/// Called on the writing thread.
pub type Observer = Box<dyn Fn(Stage) + Send>;

/// A checkpoint that is on disk.
#[derive(Clone, PartialEq, Debug)]
pub struct Saved {
    pub path: PathBuf,
    pub step: u64,
    pub bytes: u64,
    pub seconds: f64,
}

struct Written {
    snapshot: Snapshot,
    result: Result<Saved, CheckpointError>,
}

pub struct Writer {
    layout: Arc<Layout>,
    mode: Mode,
    /// `None` while the thread has it.
    snapshot: Option<Snapshot>,
    to: Option<Sender<Snapshot>>,
    from: Receiver<Written>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the thread for a session's checkpoints.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(session: &Session, store: Arc<Store>, about: About, mode: Mode, observe: Observer) -> Result<Writer, CheckpointError> {
        let layout = Arc::new(Layout::new(session));
        let (to, jobs) = channel::<Snapshot>();
        let (done, from) = channel();
        let files = Arc::clone(&layout);
        let work = move || {
            for snapshot in jobs {
                let begin = Instant::now();
                let result = store.write(&files, &snapshot, &about, &observe).map(|path| Saved {
                    path,
                    step: snapshot.position.step,
                    bytes: files.bytes(),
                    seconds: begin.elapsed().as_secs_f64(),
                });
                if done.send(Written { snapshot, result }).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("checkpoints".into()).spawn(work);
        let thread = thread.map_err(|source| CheckpointError::Io { path: "the thread that writes checkpoints".into(), source })?;
        Ok(Writer { snapshot: Some(layout.blank()), layout, mode, to: Some(to), from, thread: Some(thread) })
    }

    /// Takes a checkpoint of the session that the writer was started for. Gives what came of the one before, or of this one if steps wait for it.
    ///
    /// # Errors
    /// If the checkpoint before (or this one) could not be written, or the session has ended. A later call may succeed.
    pub fn save(&mut self, session: &mut Session, position: Position) -> Result<Option<Saved>, CheckpointError> {
        let before = self.wait();
        let mut snapshot = self.snapshot.take().ok_or(CheckpointError::WriterEnded)?;
        let taken = self.layout.take(session, position, &mut snapshot);
        if let (Ok(()), Some(to)) = (&taken, &self.to) {
            to.send(snapshot).map_err(|_| CheckpointError::WriterEnded)?;
        } else {
            self.snapshot = Some(snapshot);
        }
        taken?;
        match self.mode {
            Mode::Background => before,
            Mode::Waiting => before.and_then(|_| self.wait()),
        }
    }

    /// What came of the checkpoint that was being written, once it is on disk; `None` if there was none.
    ///
    /// # Errors
    /// If it could not be written.
    pub fn wait(&mut self) -> Result<Option<Saved>, CheckpointError> {
        if self.snapshot.is_some() {
            return Ok(None);
        }
        let written = self.from.recv().map_err(|_| CheckpointError::WriterEnded)?;
        self.take_back(written)
    }

    /// As [`Writer::wait`], without waiting.
    ///
    /// # Errors
    /// As [`Writer::wait`].
    pub fn poll(&mut self) -> Result<Option<Saved>, CheckpointError> {
        match self.from.try_recv() {
            Ok(written) => self.take_back(written),
            Err(_) => Ok(None),
        }
    }

    fn take_back(&mut self, written: Written) -> Result<Option<Saved>, CheckpointError> {
        self.snapshot = Some(written.snapshot);
        written.result.map(Some)
    }
}

impl Drop for Writer {
    /// What was handed over is finished.
    fn drop(&mut self) {
        self.to = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
