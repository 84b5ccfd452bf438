//! What can be wrong with a profile, each with its file.

use super::CommOp;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{file}: {source}")]
    Io {
        file: String,
        #[source]
        source: std::io::Error,
    },
    #[error("{file}: the file is empty; expected a profile")]
    Empty { file: String },
    #[error(
        "{file}: {found}; expected a Kineto or Chrome trace (.json, .json.gz), an Nsight Systems export (.sqlite) or the CSV of `nsys stats --report cuda_gpu_trace`"
    )]
    NotAProfile { file: String, found: String },
    /// `at` counts bytes of the text, after decompression.
    #[error("{file}: byte {at}: {what}")]
    Syntax { file: String, at: u64, what: String },
    #[error("{file}: line {line}: {what}")]
    Row { file: String, line: usize, what: String },
    #[error("{file}: {source}")]
    Sqlite {
        file: String,
        #[source]
        source: rusqlite::Error,
    },
    #[error("{file}: a profile in which nothing happens: {why}")]
    NoEvents { file: String, why: String },
    #[error("rank {rank} is in {first} and again in {second}; give the profiles of one run, each rank once")]
    TwiceTheRank { rank: u32, first: String, second: String },
    #[error("no profile given")]
    Nothing,
    #[error("{folder}: no profile in this folder")]
    EmptyFolder { folder: String },
    #[error("`{text}`: expected PART_OF_A_KERNEL_NAME=OP, with OP one of {}", ops())]
    Rule { text: String },
}

fn ops() -> String {
    CommOp::ALL.map(CommOp::name).join(", ")
}
