//! Hugging Face `config.json` → forward graph, for the families in [`FAMILIES`].
//!
//! The graph computes what the family's `…ForCausalLM` computes (`bert`: `…ForMaskedLM`, `vit`: `…ForImageClassification`), with parameters declared as they are used (`q` is `[g, r, d, h]`: key/value heads,
//! query heads of each, head elements, hidden) and [`dplan_ir::graph::Piece`]s that say where they are in a checkpoint with Hugging Face names.
//! Keys that are absent have the family's defaults in `transformers`. Layer 0 is the embedding, layers 1 to L are the blocks, layer L + 1 is the
//! final norm, the head and the loss.

mod decoder;
mod encoder;
mod experts;
mod families;
mod gpt2;
mod latent;
mod llama;
mod net;
mod parallel;
mod rope;

use dplan_ir::dtype::DType;
use dplan_ir::op::Activation;

use super::json::At;
use super::{Dropout, ImportError, ImportOptions, Model, limits, nearest};

/// What a key of dropout is about.
#[derive(Clone, Copy)]
enum Dropped {
    /// What the embedding hands to the first block.
    Embedding,
    /// What attention and feed-forward add to the residual stream.
    Residual,
    /// Attention probabilities.
    Attention,
}

/// Families that are understood, as `model_type` spells them.
pub const FAMILIES: [&str; 20] = [
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "gpt_neox",
    "phi",
    "phi3",
    "olmo2",
    "olmo3",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "glm_moe_dsa",
    "minimax_m2",
    "gpt_oss",
    "bert",
    "vit",
];

/// Without a length of the user's choice, a sequence has at most so many tokens.
pub const DEFAULT_SEQ_CAP: u64 = 4096;

/// What the importers of all families are given.
struct Context<'a> {
    config: &'a At<'a>,
    name: &'a str,
    options: &'a ImportOptions,
    dropout: Dropout,
    notes: Vec<String>,
}

/// Imports a config.
///
/// # Errors
/// What is wrong with the config, and where.
pub fn model(config: &At<'_>, name: &str, options: &ImportOptions) -> Result<Model, ImportError> {
    config.object()?;
    // The language model of a larger one stands in an object of its own.
    let text = config.get("text_config").filter(|at| at.value().is_object());
    let (config, notes) = match &text {
        Some(text) => (text, vec!["only the language model, that of `text_config`: towers for images or sound are left out".to_string()]),
        None => (config, Vec::new()),
    };
    let family = family(config, options)?;
    let mut context = Context { config, name, options, dropout: Dropout::default(), notes };
    let (net, positions) = match family {
        "gpt2" => gpt2::build(&mut context)?,
        "gpt_neox" => parallel::build(&mut context, parallel::Family::GptNeoX)?,
        "phi" => parallel::build(&mut context, parallel::Family::Phi)?,
        "bert" => encoder::bert(&mut context)?,
        "vit" => encoder::vit(&mut context)?,
        _ => llama::build(&mut context, family)?,
    };
    let graph = net.builder.graph;
    limits::check(config.file(), &graph)?;
    Ok(Model {
        graph,
        name: name.into(),
        family: family.into(),
        max_positions: Some(positions),
        default_dtype: context.default_dtype()?,
        dropout: context.dropout,
        notes: context.notes,
    })
}

/// The family to read the config as: `--as`, or its `model_type`.
fn family(config: &At<'_>, options: &ImportOptions) -> Result<&'static str, ImportError> {
    let known = |name: &str| FAMILIES.into_iter().find(|f| *f == name);
    let unknown = |found: String, word: &str| ImportError::Family {
        file: config.file().into(),
        found,
        supported: FAMILIES.map(String::from).to_vec(),
        nearest: nearest(word, FAMILIES).map(String::from),
    };
    if let Some(name) = &options.family {
        return known(name).ok_or_else(|| unknown(format!("--as {name:?} is not a family that dplan knows"), name));
    }
    let Some(at) = config.get("model_type") else {
        return Err(unknown("it has no `model_type`, and is not a dplan graph either".into(), ""));
    };
    let name = at.string()?;
    known(name.strip_suffix("_text").unwrap_or(name))
        .ok_or_else(|| unknown(format!("`{}` is {name:?}, which is not a family that dplan knows", at.path()), name))
}

impl Context<'_> {
    /// The size `key`, or the family's default.
    fn size(&self, key: &str, default: u64) -> Result<u64, ImportError> {
        self.bounded(&[key], default, limits::MAX_DIM)
    }
    /// The size under the first of `keys` that is there, at most `most`.
    fn bounded(&self, keys: &[&str], default: u64, most: u64) -> Result<u64, ImportError> {
        match keys.iter().find_map(|key| self.config.get_or_null(key)) {
            Some(at) => at.integer(1..=most),
            None => Ok(default),
        }
    }
    /// The number `key`, which may be 0, at most `most`.
    fn count(&self, key: &str, default: u64, most: u64) -> Result<u64, ImportError> {
        self.config.get(key).map_or(Ok(default), |at| at.integer(0..=most))
    }
    fn layers(&self, keys: &[&str], default: u64) -> Result<u64, ImportError> {
        self.bounded(keys, default, limits::MAX_LAYERS)
    }
    fn positive(&self, key: &str, default: f64) -> Result<f64, ImportError> {
        self.config.get_or_null(key).map_or(Ok(default), |at| at.positive_number())
    }
    fn flag(&self, key: &str, default: bool) -> Result<bool, ImportError> {
        self.config.get(key).map_or(Ok(default), |at| at.boolean())
    }
    fn init_std(&self) -> Result<f64, ImportError> {
        let at = self.config.get("initializer_range");
        let std = at.as_ref().map_or(Ok(0.02), At::number)?;
        if std < 0.0
            && let Some(at) = at
        {
            return Err(at.wrong(&at.found(), "a number of at least 0"));
        }
        Ok(std)
    }
    fn activation(&self, key: &str, default: Activation) -> Result<Activation, ImportError> {
        let Some(at) = self.config.get(key) else { return Ok(default) };
        match at.string()? {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu" => Ok(Activation::Gelu),
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh),
            "relu" => Ok(Activation::Relu),
            "quick_gelu" => Ok(Activation::QuickGelu),
            _ => Err(at.wrong(&at.found(), "one of silu, gelu, gelu_new, gelu_pytorch_tanh, relu, quick_gelu")),
        }
    }
    /// The sequence length: the user's, or the model's own up to [`DEFAULT_SEQ_CAP`].
    fn seq(&mut self, positions: u64) -> Result<u64, ImportError> {
        match self.options.seq {
            Some(seq) if seq == 0 || seq > positions => Err(ImportError::Sequence { file: self.config.file().into(), seq, positions }),
            Some(seq) => Ok(seq),
            None if positions > DEFAULT_SEQ_CAP => {
                self.notes
                    .push(format!("sequences of {DEFAULT_SEQ_CAP} tokens, though the model has {positions} positions; --seq chooses another length"));
                Ok(DEFAULT_SEQ_CAP)
            }
            None => Ok(positions),
        }
    }
    /// The dropout of these keys: each with what it drops, and the family's rate where it is absent.
    fn dropout(&mut self, keys: &[(&str, &[Dropped], f64)]) -> Result<(), ImportError> {
        for (key, places, default) in keys {
            let rate = self.config.get_or_null(key).map_or(Ok(*default), |at| at.rate("a rate of dropout, from 0 to less than 1"))?;
            for place in *places {
                match place {
                    Dropped::Embedding => self.dropout.rates.embedding = rate,
                    Dropped::Residual => self.dropout.rates.residual = rate,
                    Dropped::Attention => self.dropout.attention = rate,
                }
            }
            if rate > 0.0 {
                self.dropout.keys.push(format!("{key} {rate}"));
            }
        }
        Ok(())
    }
    fn default_dtype(&self) -> Result<DType, ImportError> {
        let Some(at) = self.config.get("dtype").or_else(|| self.config.get("torch_dtype")) else { return Ok(DType::F32) };
        match at.string()?.trim_start_matches("torch.") {
            "float64" | "double" => Ok(DType::F64),
            "float32" | "float" | "auto" => Ok(DType::F32),
            "bfloat16" => Ok(DType::Bf16),
            "float16" | "half" => Ok(DType::F16),
            _ => Err(at.wrong(&at.found(), "one of float64, float32, bfloat16, float16")),
        }
    }
}
