//! Writing files so that nothing is lost: to a temporary beside the target, synced, renamed.

use anyhow::Context;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Replaces `path` by `bytes`, or leaves it as it was.
///
/// # Errors
/// Names the path, and what the file system said.
pub fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let temporary = temporary(path);
    let written = (|| {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    written.inspect_err(|_| drop(fs::remove_file(&temporary))).with_context(|| format!("{}: cannot write", path.display()))
}

/// Says now, before any work is done, whether `path` can be written.
///
/// # Errors
/// Names the path, and what the file system said.
pub fn check_writable(path: &Path) -> anyhow::Result<()> {
    let temporary = temporary(path);
    anyhow::ensure!(!path.is_dir(), "{}: is a directory, expected the name of a file", path.display());
    File::create(&temporary).with_context(|| format!("{}: cannot write", path.display()))?;
    fs::remove_file(&temporary).with_context(|| format!("{}: cannot remove", temporary.display()))
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    path.with_file_name(name)
}

/// A number of bytes for people: `1.50 GiB`.
pub fn gib(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = bytes as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{size:.2} {}", UNITS[unit]) }
}

/// A duration for people: `12.3 ms`.
pub fn seconds(s: f64) -> String {
    match s {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}
