//! Where tokens come from.
//!
//! - A text file: each byte is a token.
//! - A `.bin` file: little-endian `u16` or `u32`, with the 1024-byte header of llm.c or without any. Without a header the tokens are `u32` if the
//!   vocabulary does not fit `u16`, or if every other 16-bit half is zero; else `u16` (nanoGPT's format).
//! - A JSON object with `tokens[step][row][seq + 1]`: exactly these sequences, in this order.
//!
//! Sequence `k` of a stream of tokens is `stream[k·seq ..= k·seq + seq]`: its first `seq` tokens, and the `seq` targets one further. Step `t`, row `r`
//! of a global batch of `n` takes sequence `t·n + r`, modulo the whole sequences there are, so what a step sees does not depend on how the batch is
//! divided over ranks. All tokens are checked against the vocabulary when the source is opened.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::import::ImportError;
use crate::import::json::Doc;

/// First word of an llm.c file, and how wide the tokens after it are.
const MAGIC: [(i32, Width); 2] = [(20_240_520, Width::U16), (20_240_801, Width::U32)];
/// Bytes of an llm.c header.
const HEADER: u64 = 1024;
/// Bytes looked at at once.
const CHUNK: usize = 4096;

/// What is wrong with training data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("{file}: cannot be read: {source}")]
    Read { file: String, source: io::Error },
    #[error(transparent)]
    Json(#[from] ImportError),
    #[error("{file}: the token at position {position} is {token}, but the model's vocabulary has {vocab} tokens: ids go from 0 to {}", vocab.saturating_sub(1))]
    Vocabulary { file: String, position: u64, token: u64, vocab: u64 },
    #[error("{file}: has {tokens} tokens; one sequence of {seq} needs {}", seq + 1)]
    Short { file: String, tokens: u64, seq: u64 },
    #[error("{file}: is not made of whole {width}-byte tokens: {bytes} bytes")]
    Ragged { file: String, bytes: u64, width: u64 },
    #[error("{file}: the header promises {promised} tokens; the file has room for {present}")]
    Header { file: String, promised: u64, present: u64 },
}

/// How many bytes a token has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Width {
    U8,
    U16,
    U32,
}

impl Width {
    fn bytes(self) -> u64 {
        match self {
            Width::U8 => 1,
            Width::U16 => 2,
            Width::U32 => 4,
        }
    }
    fn decode(self, word: &[u8]) -> u32 {
        word.iter().rev().fold(0, |n, &byte| n << 8 | u32::from(byte))
    }
}

/// An opened and checked source of tokens.
#[derive(Debug)]
pub struct TokenSource {
    file: String,
    seq: u64,
    batch: u64,
    tokens: u64,
    from: Origin,
}

#[derive(Debug)]
enum Origin {
    /// Tokens begin at byte `start` of the file.
    Stream { handle: File, start: u64, width: Width },
    /// Rows of `seq + 1` tokens.
    Rows(Vec<i32>),
}

impl TokenSource {
    /// Opens a source for a model of `vocab` tokens, sequences of `seq`, and `batch` sequences a step over all ranks.
    ///
    /// # Errors
    /// If the file cannot be read, has an id that the vocabulary does not have, is shorter than a sequence, or has the wrong shape.
    pub fn open(path: &Path, vocab: u64, seq: u64, batch: u64) -> Result<TokenSource, DataError> {
        let file = path.display().to_string();
        match path.extension().and_then(|e| e.to_str()) {
            Some("json") => TokenSource::rows(&Doc::read(path)?, file, vocab, seq, batch),
            extension => TokenSource::stream(path, extension == Some("bin"), file, vocab, seq, batch),
        }
    }

    /// Tokens in the source.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }
    /// Different sequences in the source; after so many it begins again.
    pub fn sequences(&self) -> u64 {
        match self.from {
            Origin::Stream { .. } => (self.tokens - 1) / self.seq,
            Origin::Rows(_) => self.tokens / (self.seq + 1),
        }
    }

    /// Fills the `seq` tokens and targets of row `row` of the global batch of step `step`.
    ///
    /// # Errors
    /// If the file can no longer be read.
    ///
    /// # Panics
    /// If the slices are not `seq` long.
    pub fn fill(&self, step: u64, row: u64, tokens: &mut [i32], targets: &mut [i32]) -> Result<(), DataError> {
        assert!(tokens.len() as u64 == self.seq && targets.len() as u64 == self.seq, "one sequence at a time");
        let sequence = (step as u128 * self.batch as u128 + row as u128) % self.sequences() as u128;
        let sequence = sequence as u64;
        let (last, firsts) = (tokens.len() - 1, &mut *targets);
        // The targets are tokens 1 ..= seq of the sequence; the inputs are token 0 and all targets but the last.
        match &self.from {
            Origin::Rows(rows) => {
                let row = &rows[(sequence * (self.seq + 1)) as usize..][..self.seq as usize + 1];
                tokens[0] = row[0];
                firsts.copy_from_slice(&row[1..]);
            }
            Origin::Stream { handle, start, width } => {
                let at = start + sequence * self.seq * width.bytes();
                let unreadable = |source| DataError::Read { file: self.file.clone(), source };
                read_tokens(handle, at, *width, &mut tokens[..1]).map_err(unreadable)?;
                read_tokens(handle, at + width.bytes(), *width, firsts).map_err(unreadable)?;
            }
        }
        tokens[1..].copy_from_slice(&targets[..last]);
        Ok(())
    }

    fn rows(doc: &Doc, file: String, vocab: u64, seq: u64, batch: u64) -> Result<TokenSource, DataError> {
        let mut rows = Vec::new();
        let steps_at = doc.root().need("tokens", "an array of steps, each an array of rows of tokens")?;
        let steps = steps_at.array()?;
        if steps.is_empty() {
            return Err(steps_at.wrong("has no steps", "at least one step").into());
        }
        for step in steps {
            let step_rows = step.array()?;
            if step_rows.len() as u64 != batch {
                return Err(step.wrong(&format!("has {} rows", step_rows.len()), &format!("as many as the batch: {batch}")).into());
            }
            for row in step_rows {
                let tokens = row.array()?;
                if tokens.len() as u64 != seq + 1 {
                    let right = format!("{} long: a sequence of {seq} and the target after it", seq + 1);
                    return Err(row.wrong(&format!("has {} tokens", tokens.len()), &right).into());
                }
                for token in tokens {
                    let id = token.integer(0..=vocab.min(i32::MAX as u64 + 1) - 1)?;
                    rows.push(id as i32);
                }
            }
        }
        Ok(TokenSource { file, seq, batch, tokens: rows.len() as u64, from: Origin::Rows(rows) })
    }

    fn stream(path: &Path, binary: bool, file: String, vocab: u64, seq: u64, batch: u64) -> Result<TokenSource, DataError> {
        let unreadable = |source| DataError::Read { file: file.clone(), source };
        let handle = File::open(path).map_err(unreadable)?;
        let metadata = handle.metadata().map_err(unreadable)?;
        if metadata.is_dir() {
            return Err(unreadable(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder")));
        }
        let size = metadata.len();
        let (start, width, promised) = if binary { layout(&handle, size, vocab).map_err(unreadable)? } else { (0, Width::U8, None) };
        let bytes = size - start;
        if bytes % width.bytes() != 0 && promised.is_none() {
            return Err(DataError::Ragged { file, bytes, width: width.bytes() });
        }
        let present = bytes / width.bytes();
        let tokens = promised.unwrap_or(present);
        if tokens > present {
            return Err(DataError::Header { file, promised: tokens, present });
        }
        if tokens <= seq {
            return Err(DataError::Short { file, tokens, seq });
        }
        if let Some((position, token)) = first_at_least(&handle, start, width, tokens, vocab).map_err(unreadable)? {
            return Err(DataError::Vocabulary { file, position, token, vocab });
        }
        Ok(TokenSource { file, seq, batch, tokens, from: Origin::Stream { handle, start, width } })
    }
}

/// Where the tokens of a `.bin` file begin, how wide they are, and how many a header promises.
fn layout(handle: &File, size: u64, vocab: u64) -> io::Result<(u64, Width, Option<u64>)> {
    let mut head = [0u8; HEADER as usize];
    let known = size.min(HEADER) as usize;
    handle.read_exact_at(&mut head[..known], 0)?;
    let word = |i: usize| i32::from_le_bytes([head[4 * i], head[4 * i + 1], head[4 * i + 2], head[4 * i + 3]]);
    if size >= HEADER
        && let Some(&(_, width)) = MAGIC.iter().find(|(magic, _)| *magic == word(0))
    {
        return Ok((HEADER, width, Some(u64::from(word(2) as u32))));
    }
    let known = known / 4 * 4;
    let halves = head[..known].chunks_exact(4);
    let upper_zero = known > 0 && halves.clone().all(|w| w[2..] == [0, 0]) && halves.into_iter().any(|w| w[..2] != [0, 0]);
    let wide = size.is_multiple_of(4) && (vocab > 1 << 16 || upper_zero);
    Ok((0, if wide { Width::U32 } else { Width::U16 }, None))
}

/// The first token that is not below `vocab` (or does not fit an index), and its position.
fn first_at_least(handle: &File, start: u64, width: Width, tokens: u64, vocab: u64) -> io::Result<Option<(u64, u64)>> {
    let bound = vocab.min(i32::MAX as u64 + 1);
    if 8 * width.bytes() < 64 && bound >= 1 << (8 * width.bytes()) {
        return Ok(None);
    }
    let mut chunk = [0u8; CHUNK];
    let (mut at, end) = (0, tokens * width.bytes());
    while at < end {
        let n = (end - at).min(CHUNK as u64);
        handle.read_exact_at(&mut chunk[..n as usize], start + at)?;
        for (i, word) in chunk[..n as usize].chunks_exact(width.bytes() as usize).enumerate() {
            let token = u64::from(width.decode(word));
            if token >= bound {
                return Ok(Some((at / width.bytes() + i as u64, token)));
            }
        }
        at += n;
    }
    Ok(None)
}

/// Reads `out.len()` tokens from byte `at` on, without allocating.
fn read_tokens(handle: &File, mut at: u64, width: Width, out: &mut [i32]) -> io::Result<()> {
    let mut chunk = [0u8; CHUNK];
    for part in out.chunks_mut(CHUNK / width.bytes() as usize) {
        let bytes = part.len() * width.bytes() as usize;
        handle.read_exact_at(&mut chunk[..bytes], at)?;
        for (token, word) in part.iter_mut().zip(chunk.chunks_exact(width.bytes() as usize)) {
            *token = width.decode(word) as i32;
        }
        at += bytes as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, bytes: &[u8]) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("dplan-data-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn sequence(source: &TokenSource, step: u64, row: u64) -> (Vec<i32>, Vec<i32>) {
        let (mut tokens, mut targets) = (vec![0; source.seq as usize], vec![0; source.seq as usize]);
        source.fill(step, row, &mut tokens, &mut targets).unwrap();
        (tokens, targets)
    }

    /// Ten tokens 0 … 9 in each format; sequences of 3: [0 1 2], [3 4 5], [6 7 8] with the targets one further.
    #[test]
    fn all_formats_give_the_same_sequences_and_wrap_around() {
        let u16s: Vec<u8> = (0..10u16).flat_map(u16::to_le_bytes).collect();
        let u32s: Vec<u8> = (0..10u32).flat_map(u32::to_le_bytes).collect();
        let llm_c = |magic: i32, body: &[u8]| {
            let mut bytes = vec![0u8; 1024];
            bytes[..4].copy_from_slice(&magic.to_le_bytes());
            bytes[8..12].copy_from_slice(&10i32.to_le_bytes());
            [bytes, body.to_vec()].concat()
        };
        let cases = [
            ("t.txt", (0..10).collect::<Vec<u8>>(), 256),
            ("nano.bin", u16s.clone(), 50257),
            ("wide.bin", u32s.clone(), 50257),
            ("wider.bin", u32s.clone(), 128256),
            ("gpt2.bin", llm_c(20_240_520, &u16s), 50257),
            ("llama3.bin", llm_c(20_240_801, &u32s), 128256),
        ];
        for (name, bytes, vocab) in cases {
            let path = file(name, &bytes);
            let source = TokenSource::open(&path, vocab, 3, 2).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(source.sequences(), 3, "{name}");
            assert_eq!(sequence(&source, 0, 1), (vec![3, 4, 5], vec![4, 5, 6]), "{name}");
            assert_eq!(sequence(&source, 1, 0), (vec![6, 7, 8], vec![7, 8, 9]), "{name}");
            assert_eq!(sequence(&source, 1, 1), sequence(&source, 0, 0), "{name}");
            std::fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn json_rows_come_as_they_are() {
        let path = file("rows.json", br#"{"tokens": [[[1,2,3],[4,5,6]], [[7,8,9],[10,11,12]]]}"#);
        let source = TokenSource::open(&path, 13, 2, 2).unwrap();
        assert_eq!(sequence(&source, 1, 0), (vec![7, 8], vec![8, 9]));
        assert_eq!(sequence(&source, 2, 1), (vec![4, 5], vec![5, 6]));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn bad_data_is_refused_naming_the_place() {
        let cases: [(&str, &[u8], u64, &str); 8] = [
            ("a.txt", b"abcdz", 122, "position 4 is 122"),
            ("b.txt", b"abc", 256, "has 3 tokens; one sequence of 3 needs 4"),
            ("c.bin", &[1, 0, 2, 0, 3], 256, "not made of whole 2-byte tokens"),
            ("d.bin", &[1, 0, 2, 0, 9, 1, 3, 0, 4, 0], 256, "position 2 is 265"),
            ("e.json", b"{\"tokens\": [[[1,2,3]]]}", 256, "`$.tokens[0]` has 1 rows; it should be as many as the batch: 2"),
            ("f.json", b"{\"tokens\": [[[1,2,3,4],[1,2,3]]]}", 256, "`$.tokens[0][1]` has 3 tokens"),
            ("g.json", b"{\"tokens\": [[[1,2,3,4],[1,2,3,300]]]}", 256, "`$.tokens[0][1][3]` is 300"),
            ("h.json", b"{\"tokens\": [[[1,2,3", 256, "cut short"),
        ];
        for (name, bytes, vocab, message) in cases {
            let path = file(name, bytes);
            let error = TokenSource::open(&path, vocab, 3, 2).unwrap_err().to_string();
            assert!(error.contains(message) && error.contains(name), "{error}");
            std::fs::remove_file(path).unwrap();
        }
        assert!(TokenSource::open(Path::new("/nowhere/x.txt"), 256, 3, 2).unwrap_err().to_string().contains("/nowhere/x.txt: cannot be read"));
    }
}
