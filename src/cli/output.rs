//! What commands write: files, and numbers for people.

use crate::export::whole_file;
use anyhow::Context;
use std::io::Write;
use std::path::Path;

/// Replaces `path` by `bytes`, or leaves it as it was.
///
/// # Errors
/// Names the path, and what the file system said.
pub fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    whole_file(path, |mut file| file.write_all(bytes)).with_context(|| format!("{}: cannot write", path.display()))
}

/// Writes to standard output; ends the process quietly if nobody reads it any more (`dplan … | head`).
pub fn stdout(text: std::fmt::Arguments<'_>) {
    if std::io::stdout().write_fmt(text).is_err() {
        std::process::exit(0);
    }
}

macro_rules! put {
    ($($arg:tt)*) => { $crate::cli::output::stdout(format_args!($($arg)*)) };
}
macro_rules! say {
    ($($arg:tt)*) => { $crate::cli::output::stdout(format_args!("{}\n", format_args!($($arg)*))) };
}
pub(crate) use {put, say};

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
