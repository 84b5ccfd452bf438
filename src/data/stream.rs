//! Files that are one stream of tokens, memory-mapped: text, nanoGPT and llm.c `.bin`, Megatron `.bin` with its `.idx`.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

use super::DataError;

/// First word of an llm.c file, and how wide the tokens after it are.
const LLM_C: [(i32, Width); 2] = [(20_240_520, Width::U16), (20_240_801, Width::U32)];
/// Bytes of an llm.c header.
const LLM_C_HEADER: usize = 1024;

/// First bytes of a Megatron index.
const MEGATRON: &[u8] = b"MMIDIDX\0\0";
/// Bytes of its header: the magic, a version, the code of the type, two counts.
const MEGATRON_HEADER: usize = 9 + 8 + 1 + 8 + 8;

/// How many bytes a token has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Width {
    U8,
    U16,
    U32,
    U64,
}

impl Width {
    fn bytes(self) -> usize {
        match self {
            Width::U8 => 1,
            Width::U16 => 2,
            Width::U32 => 4,
            Width::U64 => 8,
        }
    }
    fn decode(self, word: &[u8]) -> u64 {
        word.iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte))
    }
}

/// What the bytes of a file are.
struct Shape {
    /// Where tokens begin.
    start: usize,
    width: Width,
    /// How many a header promises.
    promised: Option<u64>,
    /// Smallest value that is not a token, by the type alone.
    limit: u64,
}

/// A mapped file.
#[derive(Debug)]
pub struct Stream {
    map: Mmap,
    start: usize,
    width: Width,
    tokens: u64,
}

impl Stream {
    /// Maps a file that is to have at least one sequence of `seq` tokens and its targets, and checks every token against the vocabulary.
    ///
    /// # Errors
    /// If the file cannot be read, is too short, has an id that the vocabulary does not have, or is not what its header says.
    pub fn open(path: &Path, vocab: u64, seq: u64) -> Result<Stream, DataError> {
        let extension = path.extension().and_then(|e| e.to_str());
        let index = path.with_extension("idx");
        let (path, shape) = match extension {
            Some("idx") => (path.with_extension("bin"), Some(megatron(&index)?)),
            Some("bin") if index.exists() => (path.to_path_buf(), Some(megatron(&index)?)),
            _ => (path.to_path_buf(), None),
        };
        let file = path.display().to_string();
        let map = map(&path)?;
        let shape = shape.unwrap_or_else(|| if extension == Some("bin") { binary(&map, vocab) } else { text() });
        let bytes = map.len().saturating_sub(shape.start);
        if bytes % shape.width.bytes() != 0 && shape.promised.is_none() {
            return Err(DataError::Ragged { file, bytes: bytes as u64, width: shape.width.bytes() as u64 });
        }
        let present = (bytes / shape.width.bytes()) as u64;
        let tokens = shape.promised.unwrap_or(present);
        if tokens > present {
            return Err(DataError::Header { file, promised: tokens, present });
        }
        if tokens <= seq {
            return Err(DataError::Short { file, tokens, seq });
        }
        let stream = Stream { map, start: shape.start, width: shape.width, tokens };
        // An index of a token is an i32.
        let bound = vocab.min(shape.limit).min(i32::MAX as u64 + 1);
        let narrow = shape.width.bytes() < 8 && bound >= 1 << (8 * shape.width.bytes());
        let bad = if narrow { None } else { stream.words(0, tokens as usize).position(|t| t >= bound) };
        match bad {
            Some(position) => {
                let token = stream.words(position as u64, 1).next().unwrap_or(0);
                Err(DataError::Vocabulary { file, position: position as u64, token, vocab })
            }
            None => Ok(stream),
        }
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }
    /// The first bytes, for telling files apart.
    pub fn head(&self, bytes: usize) -> &[u8] {
        &self.map[self.start..self.map.len().min(self.start + bytes)]
    }
    /// Copies the tokens from `first` on.
    pub fn read(&self, first: u64, out: &mut [i32]) {
        for (to, token) in out.iter_mut().zip(self.words(first, usize::MAX)) {
            *to = token as i32;
        }
    }

    fn words(&self, first: u64, count: usize) -> impl Iterator<Item = u64> {
        let bytes = self.width.bytes();
        self.map[self.start + first as usize * bytes..].chunks_exact(bytes).take(count).map(|word| self.width.decode(word))
    }
}

fn map(path: &Path) -> Result<Mmap, DataError> {
    let unreadable = |source| DataError::Read { file: path.display().to_string(), source };
    let file = File::open(path).map_err(unreadable)?;
    if file.metadata().map_err(unreadable)?.is_dir() {
        return Err(unreadable(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder")));
    }
    // SAFETY: the map is only ever read. A file that somebody else shortens meanwhile ends the process, as a lost disk would.
    unsafe { Mmap::map(&file) }.map_err(unreadable)
}

/// Each byte is a token.
fn text() -> Shape {
    Shape { start: 0, width: Width::U8, promised: None, limit: u64::MAX }
}

/// llm.c's format if the header says so; else nanoGPT's, of the width that the vocabulary or the zeros of the upper halves tell.
fn binary(bytes: &[u8], vocab: u64) -> Shape {
    let head = &bytes[..bytes.len().min(LLM_C_HEADER)];
    let word = |i: usize| i32::from_le_bytes([head[4 * i], head[4 * i + 1], head[4 * i + 2], head[4 * i + 3]]);
    if head.len() == LLM_C_HEADER
        && let Some(&(_, width)) = LLM_C.iter().find(|(magic, _)| *magic == word(0))
    {
        return Shape { start: LLM_C_HEADER, width, promised: Some(u64::from(word(2) as u32)), limit: u64::MAX };
    }
    let halves = || head.chunks_exact(4);
    let upper_zero = halves().all(|w| w[2..] == [0, 0]) && halves().any(|w| w[..2] != [0, 0]);
    let wide = bytes.len().is_multiple_of(4) && (vocab > 1 << 16 || upper_zero);
    Shape { start: 0, width: if wide { Width::U32 } else { Width::U16 }, promised: None, limit: u64::MAX }
}

/// What Megatron's index says of its `.bin`: `i32 length[sequences]`, `i64 byte offset[sequences]`, `i64 document end[documents]` follow the header. The
/// sequences must follow each other without gaps, as its own tools write them: they are then one stream.
fn megatron(path: &Path) -> Result<Shape, DataError> {
    let index = map(path)?;
    let wrong = |why: String| DataError::Index { file: path.display().to_string(), why };
    if index.len() < MEGATRON_HEADER || !index.starts_with(MEGATRON) {
        return Err(wrong("it is not a Megatron index (MMIDIDX)".into()));
    }
    let long = |at: usize| u64::from_le_bytes(index[at..at + 8].try_into().unwrap_or_default());
    if long(9) != 1 {
        return Err(wrong(format!("version {}, expected 1", long(9))));
    }
    let (width, limit) = match index[17] {
        1 => (Width::U8, u64::MAX),
        2 => (Width::U8, 1 << 7),
        3 => (Width::U16, 1 << 15),
        4 => (Width::U32, 1 << 31),
        5 => (Width::U64, 1 << 63),
        8 => (Width::U16, u64::MAX),
        other => return Err(wrong(format!("its elements have the type of code {other}, which is no integer"))),
    };
    let sequences = usize::try_from(long(18)).unwrap_or(usize::MAX);
    let documents = usize::try_from(long(26)).unwrap_or(usize::MAX);
    let needs = sequences.checked_mul(12).and_then(|n| n.checked_add(documents.checked_mul(8)?)?.checked_add(MEGATRON_HEADER));
    if needs.is_none_or(|n| n > index.len()) {
        return Err(wrong(format!("it says that it lists {sequences} sequences and {documents} documents; it has {} bytes", index.len())));
    }
    let offsets = MEGATRON_HEADER + 4 * sequences;
    let mut tokens = 0;
    for i in 0..sequences {
        let at = MEGATRON_HEADER + 4 * i;
        let length = u32::from_le_bytes(index[at..at + 4].try_into().unwrap_or_default());
        let (found, expected) = (long(offsets + 8 * i), tokens * width.bytes() as u64);
        if found != expected {
            return Err(wrong(format!("sequence {i} begins at byte {found}, the ones before it end at {expected}")));
        }
        tokens += u64::from(length);
    }
    Ok(Shape { start: 0, width, promised: Some(tokens), limit })
}
