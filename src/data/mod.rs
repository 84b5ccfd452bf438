//! Where tokens come from.
//!
//! - A text file: each byte is a token.
//! - A `.bin` file: little-endian `u16` or `u32`, with the 1024-byte header of llm.c or without any. Without a header the tokens are `u32` if the
//!   vocabulary does not fit `u16`, or if every other 16-bit half is zero; else `u16` (nanoGPT's format).
//! - A `.bin` file with an `.idx` of the same name beside it (or that `.idx`): Megatron's format, read as one stream over its documents.
//! - A JSON object with `tokens[step][row][seq + 1]`: exactly these sequences, in this order.
//!
//! Sequence `k` of a stream of tokens is `stream[k·seq ..= k·seq + seq]`: its first `seq` tokens, and the `seq` targets one further. A run takes
//! sequences number 0, 1, 2, … of an [`SequenceOrder`], over and over; row `r` of a step that begins at position `p` is number `p + r`. So what a step sees depends on
//! nothing but its position: not on how the batch is divided over ranks, nor on how large the batches before it were. All tokens are checked against the
//! vocabulary when the source is opened.

mod shuffle;
mod stream;

use std::io;
use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use crate::checkpoint::DataMark;
use crate::checkpoint::manifest::hex;
use crate::import::ImportError;
use crate::import::json::Doc;

pub use shuffle::SequenceOrder;
use stream::Stream;

/// Bytes by which files are told apart.
const HEAD: usize = 1 << 20;

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
    #[error("{file}: {why}")]
    Index { file: String, why: String },
    #[error("there are no more batches")]
    Ended,
}

/// An opened and checked source of tokens.
#[derive(Debug)]
pub struct TokenSource {
    file: String,
    seq: u64,
    batch: u64,
    order: SequenceOrder,
    from: Origin,
}

#[derive(Debug)]
enum Origin {
    Stream(Stream),
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
        if path.extension().is_some_and(|e| e == "json") {
            let rows = rows(&Doc::read(path)?, vocab, seq, batch)?;
            return Ok(TokenSource { file, seq, batch, order: SequenceOrder::File, from: Origin::Rows(rows) });
        }
        let stream = Stream::open(path, vocab, seq)?;
        Ok(TokenSource { file, seq, batch, order: SequenceOrder::File, from: Origin::Stream(stream) })
    }

    /// The same source, its sequences taken in another order than the file's.
    pub fn in_order(self, order: SequenceOrder) -> TokenSource {
        TokenSource { order, ..self }
    }

    /// Tokens in the source.
    pub fn tokens(&self) -> u64 {
        match &self.from {
            Origin::Stream(stream) => stream.tokens(),
            Origin::Rows(rows) => rows.len() as u64,
        }
    }
    /// Different sequences in the source; after so many it begins again.
    pub fn sequences(&self) -> u64 {
        match &self.from {
            Origin::Stream(stream) => (stream.tokens() - 1) / self.seq,
            Origin::Rows(rows) => rows.len() as u64 / (self.seq + 1),
        }
    }
    /// What tells this source from others, wherever its file is.
    pub fn mark(&self) -> DataMark {
        let hash = match &self.from {
            Origin::Stream(stream) => xxh3_64(stream.head(HEAD)),
            Origin::Rows(rows) => xxh3_64(&rows.iter().flat_map(|t| t.to_le_bytes()).take(HEAD).collect::<Vec<u8>>()),
        };
        DataMark {
            file: self.file.clone(),
            tokens: self.tokens(),
            seq: self.seq,
            order: self.order.name().into(),
            hash: hex(hash),
            document_end: None,
        }
    }

    /// Fills the `seq` tokens and targets of row `row` of step `step`, of a run whose steps all have the source's batch.
    ///
    /// # Errors
    /// If there is no such row.
    ///
    /// # Panics
    /// If the slices are not `seq` long.
    pub fn fill(&self, step: u64, row: u64, tokens: &mut [i32], targets: &mut [i32]) -> Result<(), DataError> {
        let number = step.checked_mul(self.batch).and_then(|n| n.checked_add(row)).ok_or(DataError::Ended)?;
        self.sequence(number, tokens, targets);
        Ok(())
    }

    /// Fills the `seq` tokens and targets of the sequence that a run takes as number `number`.
    ///
    /// # Panics
    /// If the slices are not `seq` long.
    pub fn sequence(&self, number: u64, tokens: &mut [i32], targets: &mut [i32]) {
        assert!(tokens.len() as u64 == self.seq && targets.len() as u64 == self.seq, "one sequence at a time");
        let sequence = self.order.sequence(number, self.sequences());
        // The targets are tokens 1 ..= seq of the sequence; the inputs are token 0 and all targets but the last.
        match &self.from {
            Origin::Rows(rows) => {
                let row = &rows[(sequence * (self.seq + 1)) as usize..][..self.seq as usize + 1];
                tokens[0] = row[0];
                targets.copy_from_slice(&row[1..]);
            }
            Origin::Stream(stream) => {
                stream.read(sequence * self.seq, &mut tokens[..1]);
                stream.read(sequence * self.seq + 1, targets);
            }
        }
        let last = tokens.len() - 1;
        tokens[1..].copy_from_slice(&targets[..last]);
    }
}

/// All rows of a JSON source, one after the other.
fn rows(doc: &Doc, vocab: u64, seq: u64, batch: u64) -> Result<Vec<i32>, DataError> {
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
    Ok(rows)
}

#[cfg(test)]
mod tests;
