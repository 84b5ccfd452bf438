//! What dplan writes: files appear whole or not at all.

pub mod layout;
pub mod profile;
pub mod weights;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Writes a file through `fill`: into a temporary file beside it, synced, then renamed over it. A path that is not a regular file (a pipe, a
/// device) is written directly.
///
/// # Errors
/// What the file system says; the old file, if any, is then untouched.
pub fn whole_file(path: &Path, fill: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    // Through a symbolic link it is the linked file that is replaced.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if fs::metadata(&target).is_ok_and(|m| !m.is_file()) {
        return fill(&File::options().write(true).open(&target)?);
    }
    let temporary = temporary_beside(&target)?;
    let written = File::create_new(&temporary).and_then(|file| fill(&file).and_then(|()| file.sync_all()));
    written.and_then(|()| fs::rename(&temporary, &target)).inspect_err(|_| {
        // The first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    })
}

/// Says now, before any work is done, whether [`whole_file`] could write `path`.
///
/// # Errors
/// What the file system says.
pub fn check_writable(path: &Path) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|m| m.is_dir()) {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory, expected the name of a file"));
    }
    let temporary = temporary_beside(&fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf()))?;
    File::create_new(&temporary)?;
    fs::remove_file(&temporary)
}

fn temporary_beside(target: &Path) -> io::Result<PathBuf> {
    let name = target.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    let mut name = name.to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    Ok(target.with_file_name(name))
}
