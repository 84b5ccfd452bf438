//! A decoder under construction: the builder, the dims all families share, and the steps that several of them take.

use dplan_ir::build::Builder;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{DimId, ValueId};
use dplan_ir::graph::{Init, Narrow, Phase, Piece, Type};
use dplan_ir::op::{Op, Spec};

use super::Context;
use crate::import::ImportError;

/// Sizes of the shared dims.
pub struct Sizes {
    pub seq: u64,
    pub hidden: u64,
    pub kv_heads: u64,
    /// Query heads of each key/value head.
    pub group: u64,
    pub head: u64,
    pub ffn: u64,
    pub vocab: u64,
}

/// What a loss is the mean over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Targets {
    PerToken,
    PerSequence,
}

/// The shared dims: batch, sequence, hidden, key/value heads, query heads of each, head elements, feed-forward, vocabulary.
#[derive(Clone, Copy)]
pub struct Dims {
    pub b: DimId,
    pub s: DimId,
    pub h: DimId,
    pub g: DimId,
    pub r: DimId,
    pub d: DimId,
    pub f: DimId,
    pub v: DimId,
}

/// Where a block is: its number, and the start of its tensors' names.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    pub layer: u64,
    pub start: &'a str,
}

impl Place<'_> {
    pub fn name(&self, part: &str) -> String {
        format!("l{}.{part}", self.layer)
    }
    pub fn tensor(&self, part: &str) -> String {
        format!("{}.{part}", self.start)
    }
}

pub struct Net {
    pub builder: Builder,
    pub dims: Dims,
    file: String,
    dtype: DType,
    std: f64,
    tokens: ValueId,
    targets: ValueId,
}

impl Net {
    pub fn new(context: &Context<'_>, sizes: &Sizes, targets: Targets) -> Result<Net, ImportError> {
        let mut builder = Builder::new(context.name);
        let b = builder.dim("b", 1);
        let s = builder.dim("s", sizes.seq);
        let dims = Dims {
            b,
            s,
            h: builder.dim("h", sizes.hidden),
            g: builder.dim("g", sizes.kv_heads),
            r: builder.dim("r", sizes.group),
            d: builder.dim("d", sizes.head),
            f: builder.dim("f", sizes.ffn),
            v: builder.dim("v", sizes.vocab),
        };
        (builder.graph.batch, builder.graph.sequence) = (Some(b), Some(s));
        let tokens = builder.input("tokens", DType::I32, &[b, s]);
        let targets = match targets {
            Targets::PerToken => builder.input("targets", DType::I32, &[b, s]),
            Targets::PerSequence => builder.input("targets", DType::I32, &[b]),
        };
        let (file, dtype, std) = (context.config.file().into(), context.options.compute, context.init_std()?);
        Ok(Net { builder, dims, file, dtype, std, tokens, targets })
    }

    /// A matrix, drawn from the family's normal distribution.
    pub fn matrix(&mut self, name: &str, dims: &[DimId], pieces: Vec<Piece>) -> ValueId {
        self.builder.param(name, self.dtype, dims, Init::Normal { std: self.std }, pieces)
    }
    /// A vector that begins as `init`.
    pub fn vector(&mut self, name: &str, dims: &[DimId], init: Init, pieces: Vec<Piece>) -> ValueId {
        self.builder.param(name, self.dtype, dims, init, pieces)
    }
    /// A matrix that is one whole tensor of the checkpoint, of the given shape there.
    pub fn whole_matrix(&mut self, name: &str, dims: &[DimId], shape: &[u64]) -> ValueId {
        self.matrix(name, dims, vec![whole(name, shape)])
    }
    /// A vector over `dims` that is one whole flat tensor of the checkpoint.
    pub fn whole_vector(&mut self, name: &str, dims: &[DimId], init: Init) -> ValueId {
        let len = dims.iter().map(|&d| self.builder.graph.size(d)).product();
        self.vector(name, dims, init, vec![whole(name, &[len])])
    }

    pub fn op(&mut self, name: &str, op: Op, inputs: &[ValueId]) -> Result<ValueId, ImportError> {
        self.builder.op(name, op, inputs).map_err(|why| ImportError::Graph { file: self.file.clone(), why })
    }
    /// x · w by `spec`, written `bsh,fh->bsf`.
    pub fn product(&mut self, name: &str, spec: &str, x: ValueId, w: ValueId) -> Result<ValueId, ImportError> {
        self.op(name, Op::Einsum(parse_spec(spec)), &[x, w])
    }

    /// Another input, of the type that activations have.
    pub fn input(&mut self, name: &str, dims: &[DimId]) -> ValueId {
        self.builder.input(name, self.dtype, dims)
    }
    /// x + bias, the bias being one whole flat tensor.
    pub fn bias(&mut self, name: &str, tensor: &str, dims: &[DimId], x: ValueId) -> Result<ValueId, ImportError> {
        let bias = self.whole_vector(tensor, dims, Init::Zeros);
        self.op(name, Op::AddBias, &[x, bias])
    }
    /// A layer norm over the hidden dim, with the tensors `….weight` and `….bias`.
    pub fn layer_norm(&mut self, name: &str, tensor: &str, eps: f64, x: ValueId) -> Result<ValueId, ImportError> {
        self.layer_norm_over(self.dims.h, name, tensor, eps, x)
    }
    /// A layer norm over another dim.
    pub fn layer_norm_over(&mut self, dim: DimId, name: &str, tensor: &str, eps: f64, x: ValueId) -> Result<ValueId, ImportError> {
        let weight = self.whole_vector(&format!("{tensor}.weight"), &[dim], Init::Ones);
        let bias = self.whole_vector(&format!("{tensor}.bias"), &[dim], Init::Zeros);
        self.op(name, Op::LayerNorm { eps }, &[x, weight, bias])
    }
    /// An RMS norm over `dims`.
    pub fn rms_norm(&mut self, name: &str, tensor: &str, dims: &[DimId], eps: f64, x: ValueId) -> Result<ValueId, ImportError> {
        let weight = self.whole_vector(tensor, dims, Init::Ones);
        self.op(name, Op::RmsNorm { eps }, &[x, weight])
    }
    /// Heads `x[b,s,g,n]`, each followed by `y[b,s,m]`, which makes vectors over `d`.
    pub fn append(&mut self, name: &str, x: ValueId, y: ValueId, d: DimId) -> ValueId {
        let ty = Type::dense(self.dtype, vec![self.dims.b, self.dims.s, self.dims.g, d]);
        self.builder.typed_node(name, Op::Append, &[x, y], vec![ty], Phase::Forward, None)[0]
    }

    /// Rows of `table[v,h]` for the tokens.
    pub fn embed(&mut self, table: ValueId) -> Result<ValueId, ImportError> {
        self.op("embed", Op::Embed, &[table, self.tokens])
    }
    /// Logits of `x` by `table[v,h]`, then the mean cross entropy, which becomes the graph's loss.
    pub fn head(&mut self, x: ValueId, table: ValueId) -> Result<(), ImportError> {
        let logits = self.product("logits", "bsh,vh->bsv", x, table)?;
        self.loss(logits)
    }
    /// The mean cross entropy of logits, which becomes the graph's loss.
    pub fn loss(&mut self, logits: ValueId) -> Result<(), ImportError> {
        let stats =
            self.builder.node("lse", Op::CeStats, &[logits, self.targets]).map_err(|why| ImportError::Graph { file: self.file.clone(), why })?;
        let losses = self.op("losses", Op::Sub, &stats)?;
        let loss = self.op("loss", Op::Mean, &[losses])?;
        self.builder.graph.loss = Some(loss);
        Ok(())
    }
}

/// The whole of a tensor.
pub fn whole(tensor: &str, shape: &[u64]) -> Piece {
    Piece { tensor: tensor.into(), shape: shape.to_vec(), view: shape.to_vec(), narrow: None, at: None }
}

/// Part `index` of the `parts` equal parts that dim `dim` of a tensor consists of.
pub fn part(tensor: &str, shape: &[u64], dim: usize, index: u64, parts: u64) -> Piece {
    let mut view = shape.to_vec();
    view.splice(dim..=dim, [parts, shape[dim] / parts]);
    Piece { narrow: Some(Narrow { dim: dim as u32, start: index, len: 1 }), view, ..whole(tensor, shape) }
}

/// Elements `[start, start + len)` of dim `dim` of a tensor seen with the sizes `view`.
pub fn slice(tensor: &str, shape: &[u64], view: &[u64], dim: usize, start: u64, len: u64) -> Piece {
    Piece { view: view.to_vec(), narrow: Some(Narrow { dim: dim as u32, start, len }), ..whole(tensor, shape) }
}

pub fn parse_spec(spec: &str) -> Spec {
    let (operands, out) = spec.split_once("->").unwrap_or((spec, ""));
    let (left, right) = operands.split_once(',').unwrap_or((operands, ""));
    Spec { left: left.into(), right: right.into(), out: out.into() }
}
