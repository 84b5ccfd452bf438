//! Machine code on disk.
//!
//! A file holds the log and the PTX, each after its length, then the cubin and a checksum of all of that; its name is the hash of what made it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Arch, Compiled, JitError, Nvrtc, flags};

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// Whether a kernel had to be compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    Kept,
    Made,
}

impl Cache {
    pub fn new(folder: PathBuf) -> Cache {
        Cache { folder }
    }
    /// `DPLAN_CACHE`, else `dplan` in the user's cache folder, else in the system's folder for temporary files.
    pub fn standard() -> Cache {
        let user = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
        let named = std::env::var_os("DPLAN_CACHE").map(PathBuf::from);
        Cache::new(named.unwrap_or_else(|| user.unwrap_or_else(std::env::temp_dir).join("dplan")))
    }
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The machine code of a text: from disk if it was made before.
    ///
    /// # Errors
    /// If the compiler refuses it. That the result cannot be kept is no error: it is made again next time.
    pub fn compile(&self, nvrtc: &Nvrtc, text: &str, arch: Arch) -> Result<(Compiled, Found), JitError> {
        let path = self.folder.join(format!("{}.cubin", key(nvrtc.version, text, arch)));
        if let Some(kept) = std::fs::read(&path).ok().and_then(|bytes| unpack(&bytes)) {
            return Ok((kept, Found::Kept));
        }
        let made = nvrtc.compile(text, arch)?;
        // A reader sees the whole file or none.
        let _ = self.keep(&path, &pack(&made));
        Ok((made, Found::Made))
    }

    fn keep(&self, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        std::fs::create_dir_all(&self.folder)?;
        let beside = path.with_extension(format!("{}-{}.part", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        std::fs::write(&beside, bytes)?;
        std::fs::rename(&beside, path)
    }
}

fn key(version: (i32, i32), text: &str, arch: Arch) -> String {
    let made_by = format!("{version:?} {} {}", arch.name(), flags(arch).join(" "));
    format!("{:016x}{:016x}", hash(&[made_by.as_bytes(), text.as_bytes()], 0), hash(&[text.as_bytes(), made_by.as_bytes()], 1))
}

/// FNV-1a with a final mix; two of them with different starts make a name of 128 bits.
fn hash(parts: &[&[u8]], seed: u64) -> u64 {
    let mut h = 0xcbf2_9ce4_8422_2325 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for byte in parts.iter().copied().flatten() {
        h = (h ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    h = (h ^ (h >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    h ^ (h >> 32)
}

fn pack(made: &Compiled) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(made.log.len() + made.ptx.len() + made.cubin.len() + 24);
    for text in [&made.log, &made.ptx] {
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    }
    bytes.extend_from_slice(&made.cubin);
    let sum = hash(&[&bytes], 2);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

fn unpack(bytes: &[u8]) -> Option<Compiled> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if hash(&[body], 2) != u64::from_le_bytes(*sum) {
        return None;
    }
    let (log, rest) = unpack_text(body)?;
    let (ptx, cubin) = unpack_text(rest)?;
    Some(Compiled { log, ptx, cubin: cubin.to_vec() })
}

/// A text after its length, and what follows.
fn unpack_text(bytes: &[u8]) -> Option<(String, &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let (text, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    Some((String::from_utf8(text.to_vec()).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_not_read() {
        let made = Compiled { cubin: vec![1, 2, 3, 4], ptx: ".version 8.8".into(), log: "ptxas info".into() };
        let bytes = pack(&made);
        assert_eq!(unpack(&bytes), Some(made));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(unpack(&damaged), None, "byte {at}");
            assert_eq!(unpack(&bytes[..at]), None, "cut at {at}");
        }
    }

    #[test]
    fn whatever_made_a_kernel_is_in_its_key() {
        let keys =
            [key((12, 9), "text", Arch::Sm80), key((12, 8), "text", Arch::Sm80), key((12, 9), "Text", Arch::Sm80), key((12, 9), "text", Arch::Sm90a)];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|b| a != b), "{keys:?}");
        }
    }
}
