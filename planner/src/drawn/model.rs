//! Small decoders: an embedding, blocks, a head, of dims so small that nothing divides by itself.

use super::Dice;
use dplan_ir::build::Builder;
use dplan_ir::capacity;
use dplan_ir::documents;
use dplan_ir::dropout::{self, Rates};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{DimId, ValueId};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::{Graph, Init};
use dplan_ir::interp::Tensor;
use dplan_ir::op::{Activation, Attention, Documents, Mask, Op, Renormalize, Rope, Rotation, Router, Score, Spec};

/// What follows attention in a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ffn {
    Gated,
    /// With biases, and layer norms.
    Plain,
    /// Two of four experts for each token, by a softmax.
    Experts,
    /// The same by sigmoids, and experts with biases.
    Biased,
}

impl Ffn {
    pub const ALL: [Ffn; 4] = [Ffn::Gated, Ffn::Plain, Ffn::Experts, Ffn::Biased];
    pub fn name(self) -> &'static str {
        match self {
            Ffn::Gated => "gated",
            Ffn::Plain => "plain",
            Ffn::Experts => "experts",
            Ffn::Biased => "biased",
        }
    }
    pub fn from_name(name: &str) -> Option<Ffn> {
        Ffn::ALL.into_iter().find(|f| f.name() == name)
    }
    pub fn is_routed(self) -> bool {
        match self {
            Ffn::Gated | Ffn::Plain => false,
            Ffn::Experts | Ffn::Biased => true,
        }
    }
}

/// What a position sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sight {
    Causal,
    /// Two positions back.
    Window,
    /// All before it, and a sink for each head.
    Sinks,
}

impl Sight {
    pub const ALL: [Sight; 3] = [Sight::Causal, Sight::Window, Sight::Sinks];
    pub fn name(self) -> &'static str {
        match self {
            Sight::Causal => "causal",
            Sight::Window => "window",
            Sight::Sinks => "sinks",
        }
    }
    pub fn from_name(name: &str) -> Option<Sight> {
        Sight::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// Experts, where there are any.
pub const EXPERTS: u64 = 4;

/// Shape of a small decoder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Model {
    pub blocks: u32,
    pub seq: u64,
    pub kv_heads: u64,
    /// Queries to each key/value head.
    pub group: u64,
    pub vocab: u64,
    pub ffn: Ffn,
    pub sight: Sight,
    /// Whether the head reads the embedding's table.
    pub tied: bool,
    pub learned_positions: bool,
    /// Percent that is dropped of the embedding and of each term of residual streams.
    pub dropout: u64,
    pub documents: Documents,
    /// Capacity factor of experts, in percent; 0 where nothing is dropped.
    pub capacity: u64,
}

impl Model {
    /// Nothing that can be left out.
    pub const SMALLEST: Model = Model {
        blocks: 1,
        seq: 4,
        kv_heads: 1,
        group: 1,
        vocab: 5,
        ffn: Ffn::Gated,
        sight: Sight::Causal,
        tied: false,
        learned_positions: false,
        dropout: 0,
        documents: Documents::Joined,
        capacity: 0,
    };

    /// Any of them.
    pub fn drawn(dice: &mut Dice) -> Model {
        Model {
            blocks: dice.pick(&[1, 2, 3, 4]),
            seq: dice.pick(&[4, 4, 6, 8]),
            kv_heads: dice.pick(&[1, 2, 3]),
            group: dice.pick(&[1, 2, 3]),
            vocab: dice.pick(&[5, 8, 11]),
            ffn: dice.pick(&Ffn::ALL),
            sight: dice.pick(&Sight::ALL),
            tied: dice.one_in(2),
            learned_positions: dice.one_in(2),
            dropout: dice.pick(&[0, 0, 10, 50]),
            documents: if dice.one_in(4) { Documents::Apart } else { Documents::Joined },
            capacity: dice.pick(&[0, 0, 50, 100]),
        }
    }

    /// Layers, the embedding and the head included.
    pub fn layers(&self) -> u32 {
        self.blocks + 2
    }

    /// The differentiated graph for micro-batches of so many sequences.
    ///
    /// # Panics
    /// Never: every model builds, as tests try.
    pub fn graph(&self, batch: u64, dtype: DType) -> Graph {
        let decoder = Decoder::new(self, batch, dtype).build(self).and_then(|g| match self.capacity {
            0 => Ok(g),
            percent => capacity::limit(&g, percent as f64 / 100.0).map_err(|e| e.to_string()),
        });
        let forward = match self.documents {
            Documents::Joined => decoder,
            Documents::Apart => decoder.and_then(|g| documents::keep_apart(&g).map_err(|e| e.to_string())),
        };
        let rate = self.dropout as f64 / 100.0;
        let dropped = forward.map(|g| dropout::insert(&g, Rates { embedding: rate, residual: rate }));
        let graph = dropped.and_then(|g| differentiate(&g).map_err(|e| e.to_string()));
        graph.unwrap_or_else(|why| panic!("{self:?}: {why}"))
    }
}

/// The inputs of a micro-batch: token ids; and where documents begin, of two tokens in the mean.
pub fn inputs(graph: &Graph, vocab: u64, dice: &mut Dice) -> Vec<Tensor> {
    let documents = documents::input(graph);
    let mut one = |value: ValueId| {
        let shape = graph.shape(value);
        if Some(value) != documents {
            return Tensor::from_fn(&shape, |_| dice.roll(vocab) as f64);
        }
        let sequences: Vec<Vec<i32>> = (0..shape[0])
            .map(|_| {
                let ends: Vec<i32> = (0..shape[1]).map(|_| dice.roll(2) as i32).collect();
                documents::first_positions(&ends, 0)
            })
            .collect();
        Tensor::from_fn(&shape, |i| f64::from(sequences[i[0] as usize][graph.order.position(i[1], shape[1]) as usize]))
    };
    graph.inputs.iter().map(|&v| one(v)).collect()
}

/// A decoder being built, with its dims.
struct Decoder {
    b: Builder,
    dtype: DType,
    n: DimId,
    s: DimId,
    h: DimId,
    g: DimId,
    r: DimId,
    d: DimId,
    f: DimId,
    v: DimId,
    p: DimId,
    e: DimId,
}

impl Decoder {
    fn new(m: &Model, batch: u64, dtype: DType) -> Decoder {
        let mut b = Builder::new("drawn");
        let mut dim = |name: &str, size| b.dim(name, size);
        let (n, s, h, g, r, d) = (dim("b", batch), dim("s", m.seq), dim("h", 6), dim("g", m.kv_heads), dim("r", m.group), dim("d", 4));
        let (f, v, p, e) = (dim("f", 10), dim("v", m.vocab), dim("p", m.seq + 1), dim("e", EXPERTS));
        (b.graph.batch, b.graph.sequence) = (Some(n), Some(s));
        Decoder { b, dtype, n, s, h, g, r, d, f, v, p, e }
    }

    fn weight(&mut self, name: &str, dims: &[DimId]) -> ValueId {
        self.b.param(name, self.dtype, dims, Init::Normal { std: 0.4 }, vec![])
    }
    fn product(&mut self, name: &str, text: &str, x: ValueId, w: ValueId) -> Result<ValueId, String> {
        self.b.op(name, Op::Einsum(spec(text)), &[x, w])
    }

    fn build(mut self, m: &Model) -> Result<Graph, String> {
        let tokens = self.b.input("tokens", DType::I32, &[self.n, self.s]);
        let targets = self.b.input("targets", DType::I32, &[self.n, self.s]);
        let table = self.weight("table", &[self.v, self.h]);
        let mut x = self.b.op("embed", Op::Embed, &[table, tokens])?;
        if m.learned_positions {
            let positions = self.weight("positions", &[self.p, self.h]);
            x = self.b.op("embed.pos", Op::AddPosition, &[x, positions])?;
        }
        for layer in 1..=m.blocks {
            self.b.set_layer(layer);
            x = self.block(m, &format!("l{layer}."), x)?;
        }
        self.b.set_layer(m.blocks + 1);
        let w = self.weight("norm.w", &[self.h]);
        let y = self.b.op("norm", Op::RmsNorm { eps: 1e-5 }, &[x, w])?;
        let head = if m.tied { table } else { self.weight("head", &[self.v, self.h]) };
        let logits = self.product("logits", "bsh,vh->bsv", y, head)?;
        let stats = self.b.node("lse", Op::CeStats, &[logits, targets])?;
        let losses = self.b.op("losses", Op::Sub, &stats)?;
        self.b.graph.loss = Some(self.b.op("loss", Op::Mean, &[losses])?);
        Ok(self.b.graph)
    }

    fn block(&mut self, m: &Model, at: &str, x: ValueId) -> Result<ValueId, String> {
        let y = self.norm(m, &format!("{at}norm1"), x)?;
        let attended = self.attention(m, at, y)?;
        let x = self.b.op(&format!("{at}res1"), Op::Add, &[x, attended])?;
        let y = self.norm(m, &format!("{at}norm2"), x)?;
        let out = match m.ffn {
            Ffn::Gated => self.gated(at, y)?,
            Ffn::Plain => self.plain(at, y)?,
            Ffn::Experts | Ffn::Biased => self.experts(m, at, y)?,
        };
        self.b.op(&format!("{at}res2"), Op::Add, &[x, out])
    }

    fn norm(&mut self, m: &Model, name: &str, x: ValueId) -> Result<ValueId, String> {
        let w = self.weight(&format!("{name}.w"), &[self.h]);
        if m.ffn == Ffn::Plain {
            let bias = self.weight(&format!("{name}.b"), &[self.h]);
            self.b.op(name, Op::LayerNorm { eps: 1e-5 }, &[x, w, bias])
        } else {
            self.b.op(name, Op::RmsNorm { eps: 1e-5 }, &[x, w])
        }
    }

    fn attention(&mut self, m: &Model, at: &str, y: ValueId) -> Result<ValueId, String> {
        let name = |what: &str| format!("{at}{what}");
        let (h, g, r, d) = (self.h, self.g, self.r, self.d);
        let wq = self.weight(&name("wq"), &[g, r, d, h]);
        let (wk, wv) = (self.weight(&name("wk"), &[g, d, h]), self.weight(&name("wv"), &[g, d, h]));
        let q = self.product(&name("q"), "bsh,grdh->bsgrd", y, wq)?;
        let k = self.product(&name("k"), "bsh,gdh->bsgd", y, wk)?;
        let v = self.product(&name("v"), "bsh,gdh->bsgd", y, wv)?;
        let rope = Op::Rope(Rope::whole(Rotation::Forward, vec![1.0, 0.1]));
        let (q, k) = (self.b.op(&name("rq"), rope.clone(), &[q])?, self.b.op(&name("rk"), rope, &[k])?);
        let window = if m.sight == Sight::Window { Some(2) } else { None };
        let attention = Attention { mask: Mask { window, ..Mask::CAUSAL }, scale: 0.5 };
        let o = match m.sight {
            Sight::Causal | Sight::Window => self.b.op(&name("attn"), Op::Attention(attention), &[q, k, v])?,
            Sight::Sinks => {
                let sink = self.weight(&name("sink"), &[g, r]);
                self.b.op(&name("attn"), Op::AttentionSink(attention), &[q, k, v, sink])?
            }
        };
        let wo = self.weight(&name("wo"), &[h, g, r, d]);
        self.product(&name("o"), "bsgrd,hgrd->bsh", o, wo)
    }

    fn gated(&mut self, at: &str, y: ValueId) -> Result<ValueId, String> {
        let name = |what: &str| format!("{at}{what}");
        let (f, h) = (self.f, self.h);
        let (w1, w2, w3) = (self.weight(&name("w1"), &[f, h]), self.weight(&name("w2"), &[h, f]), self.weight(&name("w3"), &[f, h]));
        let gate = self.product(&name("gate"), "bsh,fh->bsf", y, w1)?;
        let up = self.product(&name("up"), "bsh,fh->bsf", y, w3)?;
        let z = self.b.op(&name("gated"), Op::Gated(Activation::Silu), &[gate, up])?;
        self.product(&name("down"), "bsf,hf->bsh", z, w2)
    }

    fn plain(&mut self, at: &str, y: ValueId) -> Result<ValueId, String> {
        let name = |what: &str| format!("{at}{what}");
        let (f, h) = (self.f, self.h);
        let (w1, w2) = (self.weight(&name("w1"), &[f, h]), self.weight(&name("w2"), &[h, f]));
        let (b1, b2) = (self.weight(&name("b1"), &[f]), self.weight(&name("b2"), &[h]));
        let z = self.product(&name("up"), "bsh,fh->bsf", y, w1)?;
        let z = self.b.op(&name("up.b"), Op::AddBias, &[z, b1])?;
        let z = self.b.op(&name("act"), Op::Act(Activation::GeluTanh), &[z])?;
        let z = self.product(&name("down"), "bsf,hf->bsh", z, w2)?;
        self.b.op(&name("down.b"), Op::AddBias, &[z, b2])
    }

    fn experts(&mut self, m: &Model, at: &str, y: ValueId) -> Result<ValueId, String> {
        let name = |what: &str| format!("{at}{what}");
        let (e, f, h) = (self.e, self.f, self.h);
        let router = self.weight(&name("router"), &[e, h]);
        let (w1, w2) = (self.weight(&name("w1"), &[e, f, h]), self.weight(&name("w2"), &[e, h, f]));
        let scores = self.product(&name("scores"), "bsh,eh->bse", y, router)?;
        let by = Router::softmax(2, Renormalize::Yes);
        let by = if m.ffn == Ffn::Biased { Router { score: Score::Sigmoid, scale: 1.5, ..by } } else { by };
        let gate = self.b.op(&name("topk"), Op::TopKGate(by), &[scores])?;
        let rows = self.b.op(&name("dispatch"), Op::Dispatch, &[y, gate])?;
        let biased = |this: &mut Decoder, what: &str, dim: DimId, z: ValueId| match m.ffn {
            Ffn::Biased => {
                let bias = this.weight(&name(&format!("{what}.b")), &[e, dim]);
                this.b.op(&name(&format!("{what}.bias")), Op::AddExpertBias, &[z, bias, gate])
            }
            Ffn::Gated | Ffn::Plain | Ffn::Experts => Ok(z),
        };
        let z = self.b.op(&name("up"), Op::ExpertEinsum(spec("bseh,efh->bsef")), &[rows, w1, gate])?;
        let z = biased(self, "up", f, z)?;
        let z = self.b.op(&name("act"), Op::Act(Activation::Silu), &[z])?;
        let z = self.b.op(&name("down"), Op::ExpertEinsum(spec("bsef,ehf->bseh")), &[z, w2, gate])?;
        let z = biased(self, "down", h, z)?;
        self.b.op(&name("combine"), Op::Combine, &[z, gate])
    }
}

fn spec(text: &str) -> Spec {
    let (operands, out) = text.split_once("->").unwrap_or((text, ""));
    let (left, right) = operands.split_once(',').unwrap_or((operands, ""));
    Spec { left: left.into(), right: right.into(), out: out.into() }
}
