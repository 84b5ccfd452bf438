//! A folder of checkpoints: how one is written so that it is whole or absent, and which one a run resumes from.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::manifest::{self, DataMark, Manifest, hex};
use super::snapshot::{Layout, Snapshot};
use super::{Checkpoint, CheckpointError};
use crate::export::whole_file;

/// The file that names the checkpoint written last.
pub const LATEST: &str = "latest";
/// Held by the one run that writes here.
const LOCK: &str = ".lock";
const PREFIX: &str = "step-";
const HIDDEN: &str = ".tmp";

/// What a checkpoint says about its run, besides state and position.
#[derive(Clone, Debug)]
pub struct About {
    pub model: String,
    pub optimizer: String,
    /// Hash of the plan file.
    pub plan: u64,
    pub ranks: u64,
    pub data: Option<DataMark>,
}

/// How far a checkpoint is: what an observer is told, in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Nothing is written yet.
    Begun,
    /// All files are on disk, in a hidden folder.
    Synced,
    /// The folder has its name.
    Renamed,
    /// `latest` names it.
    Latest,
    /// Older ones are gone.
    Pruned,
}

/// A folder of checkpoints that this run alone writes to.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    keep: usize,
    serial: AtomicU64,
    _lock: File,
}

/// The checkpoint to resume from, and what was noticed on the way to it.
#[derive(Debug)]
pub struct Found {
    pub checkpoint: Checkpoint,
    pub notes: Vec<String>,
}

impl Store {
    /// Takes a folder over: makes it where it is not there, locks it, removes what a run that was killed left behind. At most `keep` checkpoints (at least one)
    /// stay in it.
    ///
    /// # Errors
    /// If it cannot be written to, or another run does.
    pub fn open(dir: &Path, keep: usize) -> Result<Store, CheckpointError> {
        fs::create_dir_all(dir).map_err(CheckpointError::io(dir))?;
        let path = dir.join(LOCK);
        let lock = File::options().create(true).append(true).open(&path).map_err(CheckpointError::io(&path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(CheckpointError::Locked { path: dir.display().to_string() }),
            Err(fs::TryLockError::Error(source)) => return Err(CheckpointError::io(&path)(source)),
        }
        let mut serial = 0;
        for name in names(dir)? {
            let path = dir.join(&name);
            if name.ends_with(HIDDEN) {
                remove(&path).map_err(CheckpointError::io(&path))?;
            } else if let (true, Ok(manifest)) = (name.starts_with(PREFIX), Manifest::read(&path)) {
                serial = serial.max(manifest.serial);
            }
        }
        Ok(Store { dir: dir.to_path_buf(), keep: keep.max(1), serial: AtomicU64::new(serial + 1), _lock: lock })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes a checkpoint: when this returns, it survives a loss of power.
    ///
    /// # Errors
    /// What the file system says, or that the state is not finite. What was written is removed as far as possible; older checkpoints are untouched.
    pub fn write(&self, layout: &Layout, snapshot: &Snapshot, about: &About, observe: &dyn Fn(Stage)) -> Result<PathBuf, CheckpointError> {
        observe(Stage::Begun);
        let name = format!("{PREFIX}{:08}", snapshot.position.step);
        let (hidden, folder) = (self.dir.join(format!(".{name}{HIDDEN}")), self.dir.join(&name));
        let (tensors, shards) = layout.marks(snapshot)?;
        let manifest = Manifest {
            serial: self.serial.fetch_add(1, Ordering::Relaxed),
            position: snapshot.position,
            model: about.model.clone(),
            optimizer: about.optimizer.clone(),
            plan: hex(about.plan),
            ranks: about.ranks,
            data: about.data.clone(),
            tensors,
            shards,
        };
        let sealed = manifest.seal();
        let files = layout.files(snapshot).chain([(manifest::FILE, sealed.as_bytes())]);
        fill(&hidden, files).inspect_err(|_| {
            // The first error is the one to tell.
            let _ = remove(&hidden);
        })?;
        observe(Stage::Synced);
        if folder.exists() {
            // Of the same step, by a run that began further back, or damaged.
            self.discard(&name)?;
        }
        fs::rename(&hidden, &folder).map_err(CheckpointError::io(&folder))?;
        sync(&self.dir)?;
        observe(Stage::Renamed);
        let latest = self.dir.join(LATEST);
        whole_file(&latest, |mut file| file.write_all(format!("{name}\n").as_bytes())).map_err(CheckpointError::io(&latest))?;
        sync(&self.dir)?;
        observe(Stage::Latest);
        self.prune()?;
        observe(Stage::Pruned);
        Ok(folder)
    }

    /// Removes the checkpoints that were written first. Those whose manifest cannot be read count as written before all others.
    fn prune(&self) -> Result<(), CheckpointError> {
        let mut all: Vec<(u64, String)> = Vec::new();
        for name in names(&self.dir)?.into_iter().filter(|n| n.starts_with(PREFIX)) {
            all.push((Manifest::read(&self.dir.join(&name)).map_or(0, |m| m.serial), name));
        }
        all.sort();
        let surplus = all.len().saturating_sub(self.keep);
        all[..surplus].iter().try_for_each(|(_, name)| self.discard(name))
    }

    /// A checkpoint that is half removed must not look like one.
    fn discard(&self, name: &str) -> Result<(), CheckpointError> {
        let (path, hidden) = (self.dir.join(name), self.dir.join(format!(".{name}.old{HIDDEN}")));
        fs::rename(&path, &hidden).and_then(|()| remove(&hidden)).map_err(CheckpointError::io(&path))
    }
}

/// The checkpoint written last that is whole, in a folder of checkpoints; or the folder itself, if it is one.
///
/// # Errors
/// If there is none, or none is whole.
pub fn find(dir: &Path) -> Result<Found, CheckpointError> {
    if dir.join(manifest::FILE).exists() {
        return Ok(Found { checkpoint: Checkpoint::open(dir)?, notes: Vec::new() });
    }
    let mut notes = Vec::new();
    let mut all: Vec<(u64, String)> = Vec::new();
    for name in names(dir)?.into_iter().filter(|n| n.starts_with(PREFIX)) {
        match Manifest::read(&dir.join(&name)) {
            Ok(manifest) => all.push((manifest.serial, name)),
            Err(error) => notes.push(format!("passing over {name}: {error}")),
        }
    }
    all.sort();
    let pointed = fs::read_to_string(dir.join(LATEST)).ok().map(|text| text.trim().to_string());
    while let Some((_, name)) = all.pop() {
        match Checkpoint::open(&dir.join(&name)) {
            Ok(checkpoint) => {
                match pointed {
                    Some(pointed) if pointed == name => {}
                    Some(pointed) => notes.push(format!("`latest` names {pointed}; the last that is whole is {name}")),
                    None => notes.push(format!("`latest` cannot be read; the last that is whole is {name}")),
                }
                return Ok(Found { checkpoint, notes });
            }
            Err(error) => notes.push(format!("passing over {name}: {error}")),
        }
    }
    let path = dir.display().to_string();
    Err(if notes.is_empty() { CheckpointError::Empty { path } } else { CheckpointError::NoneWhole { path, why: notes } })
}

/// Whether a folder has anything that claims to be a checkpoint.
pub fn has_any(dir: &Path) -> bool {
    dir.join(manifest::FILE).exists() || names(dir).is_ok_and(|names| names.iter().any(|n| n.starts_with(PREFIX)))
}

/// A new folder with these files, all on disk.
fn fill<'a>(folder: &Path, files: impl Iterator<Item = (&'a str, &'a [u8])>) -> Result<(), CheckpointError> {
    if folder.exists() {
        remove(folder).map_err(CheckpointError::io(folder))?;
    }
    fs::create_dir(folder).map_err(CheckpointError::io(folder))?;
    for (name, bytes) in files {
        let path = folder.join(name);
        File::create_new(&path).and_then(|mut f| f.write_all(bytes).and_then(|()| f.sync_all())).map_err(CheckpointError::io(&path))?;
    }
    sync(folder)
}

/// Makes the names in a folder durable.
fn sync(folder: &Path) -> Result<(), CheckpointError> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(CheckpointError::io(folder))
}

fn remove(path: &Path) -> io::Result<()> {
    if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

fn names(dir: &Path) -> Result<Vec<String>, CheckpointError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(CheckpointError::io(dir))? {
        names.push(entry.map_err(CheckpointError::io(dir))?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}
