//! From a session to the files of a checkpoint, as bytes in memory.
//!
//! A [`Layout`] is made once for a session: which rank writes which part of which tensor, where in its file. Of the ranks that have the same part, one writes it; the
//! parameters' numbers take turns among them, so that replicas share the work. A [`Snapshot`] is the files of one step: taking one copies the state
//! and allocates nothing.

use std::collections::BTreeMap;

use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::program::Role;
use xxhash_rust::xxh3::xxh3_64;

use super::manifest::{PartMark, Position, Shard, TensorMark, hex, key};
use super::{CheckpointError, STATE};
use crate::fingerprint::Digest;
use crate::runtime::{Holding, Session, Which};
use crate::safetensors::header;

/// Where everything goes.
#[derive(Debug)]
pub struct Layout {
    tensors: Vec<Tensor>,
    files: Vec<FileLayout>,
}

#[derive(Debug)]
struct Tensor {
    role: Role,
    name: String,
    shape: Vec<u64>,
    dtype: DType,
}

#[derive(Debug)]
struct FileLayout {
    name: String,
    header: Vec<u8>,
    bytes: usize,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    tensor: usize,
    holding: Holding,
    /// Where it begins in the file.
    begin: usize,
}

/// The state after a step.
#[derive(Debug)]
pub struct Snapshot {
    pub position: Position,
    /// Whole files, in the order of the layout.
    images: Vec<Vec<u8>>,
}

impl Layout {
    pub fn new(session: &Session) -> Layout {
        let graph = session.graph();
        let mut tensors = Vec::new();
        let mut of_rank: BTreeMap<usize, Vec<(usize, Holding)>> = BTreeMap::new();
        for role in STATE {
            for (param, replicas) in by_param(graph, session, role) {
                let Some(first) = replicas.first().and_then(|r| r.first()) else { continue };
                let value = graph.params[param].value;
                tensors.push(Tensor { role, name: graph.values[value].name.clone(), shape: graph.shape(value), dtype: first.dtype });
                for replicas in replicas {
                    let turn = param.0 as usize % replicas.len();
                    if let Some(holding) = replicas.into_iter().nth(turn) {
                        of_rank.entry(holding.rank).or_default().push((tensors.len() - 1, holding));
                    }
                }
            }
        }
        let files = of_rank.into_iter().map(|(rank, parts)| file_layout(rank, parts, &tensors)).collect();
        Layout { tensors, files }
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes as u64).sum()
    }

    /// Memory for a snapshot, its pages touched, so that taking one costs a copy and no more.
    pub fn blank(&self) -> Snapshot {
        let image = |f: &FileLayout| {
            let mut image = f.header.clone();
            image.resize(f.bytes, 0);
            image
        };
        Snapshot { position: Position::default(), images: self.files.iter().map(image).collect() }
    }

    /// Copies the state of the session that the layout was made for.
    ///
    /// # Errors
    /// If the session ended with an error.
    pub fn take(&self, session: &mut Session, position: Position, into: &mut Snapshot) -> Result<(), CheckpointError> {
        into.position = position;
        for (file, image) in self.files.iter().zip(&mut into.images) {
            for part in &file.parts {
                session.copy_out(&part.holding, &mut image[part.begin..part.begin + part.holding.bytes()])?;
            }
        }
        Ok(())
    }

    /// Tensors with their fingerprints and files with their hashes.
    ///
    /// # Errors
    /// If a value is not finite.
    pub fn marks(&self, snapshot: &Snapshot) -> Result<(Vec<TensorMark>, Vec<Shard>), CheckpointError> {
        let mut digests = vec![Digest::default(); self.tensors.len()];
        for (part, bytes) in self.files.iter().zip(&snapshot.images).flat_map(|(f, image)| f.parts.iter().map(move |p| (p, &image[p.begin..]))) {
            digests[part.tensor] = digests[part.tensor].and(part.holding.digest(bytes));
        }
        if let Some(at) = digests.iter().position(|d| d.not_finite > 0) {
            let values = digests.iter().map(|d| d.not_finite).sum();
            let (role, name) = (self.tensors[at].role.name(), self.tensors[at].name.clone());
            return Err(CheckpointError::NotFinite { step: snapshot.position.step, values, role, name });
        }
        let tensors = self.tensors.iter().zip(digests).map(|(t, d)| TensorMark {
            role: t.role.name().into(),
            name: t.name.clone(),
            shape: t.shape.clone(),
            dtype: t.dtype.name().into(),
            fingerprint: hex(d.sum),
        });
        let part = |p: &Part| PartMark {
            tensor: p.tensor,
            start: p.holding.block.iter().map(|b| b.0).collect(),
            shape: p.holding.block.iter().map(|b| b.1).collect(),
            from: p.holding.from,
            count: p.holding.count,
        };
        let shards = self.files.iter().zip(&snapshot.images).map(|(f, image)| Shard {
            file: f.name.clone(),
            bytes: image.len() as u64,
            hash: hex(xxh3_64(image)),
            parts: f.parts.iter().map(part).collect(),
        });
        Ok((tensors.collect(), shards.collect()))
    }

    /// Names and contents of the files.
    pub fn files<'a>(&'a self, snapshot: &'a Snapshot) -> impl Iterator<Item = (&'a str, &'a [u8])> {
        self.files.iter().zip(&snapshot.images).map(|(f, image)| (f.name.as_str(), image.as_slice()))
    }
}

/// For each parameter, its parts, and for each part the ranks that have it. Of a tied parameter the stage that comes first counts.
fn by_param(graph: &Graph, session: &Session, role: Role) -> impl Iterator<Item = (dplan_ir::entity::ParamId, Vec<Vec<Holding>>)> {
    let per_stage = session.program().mesh.ranks() as usize;
    graph.params.ids().map(move |param| {
        let mut parts: BTreeMap<(Vec<(u64, u64)>, u64), Vec<Holding>> = BTreeMap::new();
        let all = session.holdings_of(role, param, Which::Updated);
        let home = all.first().map_or(0, |h| h.rank / per_stage);
        for holding in all.into_iter().filter(|h| h.rank / per_stage == home) {
            parts.entry((holding.block.clone(), holding.from)).or_default().push(holding);
        }
        (param, parts.into_values().collect())
    })
}

fn file_layout(rank: usize, parts: Vec<(usize, Holding)>, tensors: &[Tensor]) -> FileLayout {
    let list: Vec<(String, DType, Vec<u64>)> = parts
        .iter()
        .map(|(tensor, holding)| {
            let block: Vec<u64> = holding.block.iter().map(|b| b.1).collect();
            // A whole block keeps its shape, for those who look into the file with other tools.
            let shape = if block.iter().product::<u64>() == holding.count { block } else { vec![holding.count] };
            (key(tensors[*tensor].role.name(), &tensors[*tensor].name), holding.dtype, shape)
        })
        .collect();
    let (header, begins) = header(&list);
    let bytes = parts.last().zip(begins.last()).map_or(header.len(), |((_, h), begin)| (begin + h.count * h.dtype.size()) as usize);
    let parts = parts.into_iter().zip(begins).map(|((tensor, holding), begin)| Part { tensor, holding, begin: begin as usize }).collect();
    FileLayout { name: format!("rank-{rank:05}.safetensors"), header, bytes, parts }
}
