//! Encoders, in which every position sees every other: BERT (norms behind, words masked and predicted) and ViT (norms before, patches of images, classes).

use dplan_ir::dtype::DType;
use dplan_ir::entity::ValueId;
use dplan_ir::graph::Piece;
use dplan_ir::op::{Activation, Attention, Mask, Op};

use super::net::{Net, Sizes, Targets, whole};
use super::{Context, Dropped};
use crate::import::{ImportError, limits};

/// What all blocks share.
struct Block {
    norms: Norms,
    activation: Activation,
    eps: f64,
    qkv_bias: bool,
    hidden: u64,
    head: u64,
    ffn: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Norms {
    Before,
    After,
}

/// BERT with its masked-language-model head; every position has a target.
pub fn bert(context: &mut Context<'_>) -> Result<(Net, u64), ImportError> {
    let layers = context.layers(&["num_hidden_layers"], 12)?;
    let vocab = context.size("vocab_size", 30522)?;
    let positions = context.size("max_position_embeddings", 512)?;
    let types = context.bounded(&["type_vocab_size"], 2, limits::MAX_DIM)?;
    if let Some(at) = context.config.get("position_embedding_type")
        && at.string()? != "absolute"
    {
        return Err(at.wrong(&at.found(), "absolute"));
    }
    dropout(context, 0.1)?;
    context.notes.push("trained to predict its words: the head is that of a masked language model".into());
    let (block, heads) = block(context, Norms::After)?;
    let seq = context.seq(positions)?;
    let sizes = Sizes { seq, hidden: block.hidden, kv_heads: heads, group: 1, head: block.head, ffn: block.ffn, vocab };
    let mut net = Net::new(context, &sizes, Targets::PerToken)?;

    let d = net.dims;
    let table = net.whole_matrix("bert.embeddings.word_embeddings.weight", &[d.v, d.h], &[vocab, block.hidden]);
    let (p, t) = (net.builder.dim("p", positions), net.builder.dim("types", types));
    let places = net.whole_matrix("bert.embeddings.position_embeddings.weight", &[p, d.h], &[positions, block.hidden]);
    let kinds = net.whole_matrix("bert.embeddings.token_type_embeddings.weight", &[t, d.h], &[types, block.hidden]);
    let token_types = net.builder.input("token_types", DType::I32, &[d.b, d.s]);
    let words = net.embed(table)?;
    let kinds = net.op("embed.types", Op::Embed, &[kinds, token_types])?;
    let x = net.op("embed.sum", Op::Add, &[words, kinds])?;
    let x = net.op("embed.pos", Op::AddPosition, &[x, places])?;
    let mut x = net.layer_norm("embed.norm", "bert.embeddings.LayerNorm", block.eps, x)?;
    for layer in 1..=layers {
        net.builder.set_layer(layer as u32);
        x = self::layer(&mut net, &block, layer, x)?;
    }
    net.builder.set_layer(layers as u32 + 1);
    let weight = net.whole_matrix("cls.predictions.transform.dense.weight", &[d.h, d.h], &[block.hidden, block.hidden]);
    let x = net.product("transform.matmul", "bsh,nh->bsn", x, weight)?;
    let x = net.bias("transform", "cls.predictions.transform.dense.bias", &[d.h], x)?;
    let x = net.op("transform.act", Op::Act(block.activation), &[x])?;
    let x = net.layer_norm("transform.norm", "cls.predictions.transform.LayerNorm", block.eps, x)?;
    let logits = net.product("logits.matmul", "bsh,vh->bsv", x, table)?;
    let logits = net.bias("logits", "cls.predictions.bias", &[d.v], logits)?;
    net.loss(logits)?;
    Ok((net, positions))
}

/// ViT with its classification head. Inputs: `patches[b,s,c]`, of which the first of each image is zero and stands for the class; `tokens[b,s]`, 0 for that
/// one and 1 for the others; `pick[b,s]`, 1 for that one and 0 for the others.
pub fn vit(context: &mut Context<'_>) -> Result<(Net, u64), ImportError> {
    let config = context.config;
    let layers = context.layers(&["num_hidden_layers"], 12)?;
    let image = context.bounded(&["image_size"], 224, 1 << 20)?;
    let patch = context.bounded(&["patch_size"], 16, image)?;
    let channels = context.bounded(&["num_channels"], 3, 1 << 16)?;
    let labels = match (config.get("num_labels"), config.get("id2label")) {
        (Some(at), _) => at.integer(1..=limits::MAX_DIM)?,
        (None, Some(at)) => (at.object()?.len() as u64).max(1),
        (None, None) => {
            context.notes.push("the config does not say how many classes there are: 1000".into());
            1000
        }
    };
    let positions = (image / patch).pow(2) + 1;
    if let Some(seq) = context.options.seq.filter(|&seq| seq != positions) {
        return Err(ImportError::Sequence { file: config.file().into(), seq, positions });
    }
    dropout(context, 0.0)?;
    let (block, heads) = block(context, Norms::Before)?;
    let sizes = Sizes { seq: positions, hidden: block.hidden, kv_heads: heads, group: 1, head: block.head, ffn: block.ffn, vocab: labels };
    let mut net = Net::new(context, &sizes, Targets::PerSequence)?;

    let d = net.dims;
    let pixels = channels * patch * patch;
    let (c, kinds, p) = (net.builder.dim("c", pixels), net.builder.dim("kinds", 2), net.builder.dim("p", positions));
    let (patches, pick) = (net.input("patches", &[d.b, d.s, c]), net.input("pick", &[d.b, d.s]));
    let start = "vit.embeddings.patch_embeddings.projection";
    let piece = Piece { view: vec![block.hidden, pixels], ..whole(&format!("{start}.weight"), &[block.hidden, channels, patch, patch]) };
    let weight = net.matrix(&format!("{start}.weight"), &[d.h, c], vec![piece]);
    // The class has a vector of its own where patches have the bias of their projection.
    let rows = [("vit.embeddings.cls_token".to_string(), vec![1, 1, block.hidden]), (format!("{start}.bias"), vec![block.hidden])];
    let rows = (0..).zip(&rows).map(|(i, (tensor, shape))| Piece { at: Some(i), ..whole(tensor, shape) }).collect();
    let table = net.matrix("vit.embeddings.kinds", &[kinds, d.h], rows);
    let piece = Piece { view: vec![positions, block.hidden], ..whole("vit.embeddings.position_embeddings", &[1, positions, block.hidden]) };
    let places = net.matrix("vit.embeddings.position_embeddings", &[p, d.h], vec![piece]);
    let base = net.embed(table)?;
    let seen = net.product("embed.patches", "bsc,hc->bsh", patches, weight)?;
    let x = net.op("embed.sum", Op::Add, &[base, seen])?;
    let mut x = net.op("embed.pos", Op::AddPosition, &[x, places])?;
    for layer in 1..=layers {
        net.builder.set_layer(layer as u32);
        x = self::layer(&mut net, &block, layer, x)?;
    }
    net.builder.set_layer(layers as u32 + 1);
    let x = net.layer_norm("norm", "vit.layernorm", block.eps, x)?;
    let class = net.product("class", "bs,bsh->bh", pick, x)?;
    let weight = net.whole_matrix("classifier.weight", &[d.v, d.h], &[labels, block.hidden]);
    let logits = net.product("logits.matmul", "bh,vh->bv", class, weight)?;
    let logits = net.bias("logits", "classifier.bias", &[d.v], logits)?;
    net.loss(logits)?;
    Ok((net, positions))
}

/// Dropout, which is `default` where keys are absent.
fn dropout(context: &mut Context<'_>, default: f64) -> Result<(), ImportError> {
    let hidden = &[Dropped::Embedding, Dropped::Residual];
    context.dropout(&[("hidden_dropout_prob", hidden, default), ("attention_probs_dropout_prob", &[Dropped::Attention], default)])
}

/// The block's numbers, and how many heads it has.
fn block(context: &Context<'_>, norms: Norms) -> Result<(Block, u64), ImportError> {
    let hidden = context.size("hidden_size", 768)?;
    let heads = context.bounded(&["num_attention_heads"], 12, 1 << 20)?;
    if hidden % heads != 0 {
        let at = context.config.get("num_attention_heads").unwrap_or_else(|| context.config.clone());
        return Err(at.wrong(&format!("gives {heads} heads, which do not divide hidden_size {hidden}"), "a divisor of hidden_size"));
    }
    let block = Block {
        norms,
        activation: context.activation("hidden_act", Activation::Gelu)?,
        eps: context.positive("layer_norm_eps", 1e-12)?,
        qkv_bias: norms == Norms::After || context.flag("qkv_bias", true)?,
        hidden,
        head: hidden / heads,
        ffn: context.size("intermediate_size", 3072)?,
    };
    Ok((block, heads))
}

fn layer(net: &mut Net, block: &Block, layer: u64, x: ValueId) -> Result<ValueId, ImportError> {
    let name = |part: &str| format!("l{layer}.{part}");
    let (start, inner) = match block.norms {
        Norms::After => (format!("bert.encoder.layer.{}", layer - 1), "self"),
        Norms::Before => (format!("vit.encoder.layer.{}", layer - 1), "attention"),
    };
    let tensor = |part: &str| format!("{start}.{part}");
    let d = net.dims;

    let normed = match block.norms {
        Norms::Before => net.layer_norm(&name("norm1"), &tensor("layernorm_before"), block.eps, x)?,
        Norms::After => x,
    };
    let mut qkv = Vec::with_capacity(3);
    for (label, part) in [("q", "query"), ("k", "key"), ("v", "value")] {
        let (spec, heads) = if label == "q" { ("bsh,grdh->bsgrd", vec![d.g, d.r, d.d]) } else { ("bsh,gdh->bsgd", vec![d.g, d.d]) };
        let dims: Vec<_> = heads.iter().copied().chain([d.h]).collect();
        let linear = tensor(&format!("attention.{inner}.{part}"));
        let weight = net.whole_matrix(&format!("{linear}.weight"), &dims, &[block.hidden, block.hidden]);
        let mut y = net.product(&name(&format!("{label}.matmul")), spec, normed, weight)?;
        if block.qkv_bias {
            y = net.bias(&name(label), &format!("{linear}.bias"), &heads, y)?;
        }
        qkv.push(y);
    }
    let attention = Attention { mask: Mask::FULL, scale: 1.0 / (block.head as f64).sqrt() };
    let o = net.op(&name("attn"), Op::Attention(attention), &qkv)?;
    let weight = net.whole_matrix(&tensor("attention.output.dense.weight"), &[d.h, d.g, d.r, d.d], &[block.hidden, block.hidden]);
    let o = net.product(&name("o.matmul"), "bsgrd,hgrd->bsh", o, weight)?;
    let o = net.bias(&name("o"), &tensor("attention.output.dense.bias"), &[d.h], o)?;
    let x = net.op(&name("res1"), Op::Add, &[x, o])?;

    let (x, normed) = match block.norms {
        Norms::Before => (x, net.layer_norm(&name("norm2"), &tensor("layernorm_after"), block.eps, x)?),
        Norms::After => {
            let x = net.layer_norm(&name("norm1"), &tensor("attention.output.LayerNorm"), block.eps, x)?;
            (x, x)
        }
    };
    let weight = net.whole_matrix(&tensor("intermediate.dense.weight"), &[d.f, d.h], &[block.ffn, block.hidden]);
    let y = net.product(&name("up.matmul"), "bsh,fh->bsf", normed, weight)?;
    let y = net.bias(&name("up"), &tensor("intermediate.dense.bias"), &[d.f], y)?;
    let y = net.op(&name("act"), Op::Act(block.activation), &[y])?;
    let weight = net.whole_matrix(&tensor("output.dense.weight"), &[d.h, d.f], &[block.hidden, block.ffn]);
    let y = net.product(&name("down.matmul"), "bsf,hf->bsh", y, weight)?;
    let y = net.bias(&name("down"), &tensor("output.dense.bias"), &[d.h], y)?;
    let x = net.op(&name("res2"), Op::Add, &[x, y])?;
    match block.norms {
        Norms::Before => Ok(x),
        Norms::After => net.layer_norm(&name("norm2"), &tensor("output.LayerNorm"), block.eps, x),
    }
}
