//! Rows of the table into runs. A field that a source leaves out is filled only by what follows from the others, or by a convention stated here; otherwise the
//! row is refused with the field's name.

use super::{Counter, Fabric, Measured, Row, Run};
use csv::StringRecord;
use dplan_planner::executor::{Activations, Decoder, Embeddings, Executor, Experts, Latent, Layout, Mlp, Precision, Recompute, line_rate};
use dplan_planner::machine::Machine;
use std::io::Read;

/// A vocabulary that is not stated is taken as GPT-2's, padded as Megatron pads it.
const USUAL_VOCABULARY: u64 = 50_304;

/// Above what any run has of anything; and a product of four such numbers, of which prices are made, is far from overflow.
const MOST: u64 = 1 << 20;

/// What the table's notes say of a time that should not be taken as measured: runs that were bimodal, and columns that may be swapped.
const DOUBTS: [&str; 2] = ["treat timing as unreliable", "the two values may be swapped"];

#[derive(Debug, thiserror::Error)]
pub enum RowsError {
    #[error("{path}: {source}")]
    Csv { path: String, source: csv::Error },
    #[error("{path}: no column `{column}`; expected a table with one published run a row")]
    Column { path: String, column: &'static str },
    #[error("{path}: no rows")]
    Empty { path: String },
}

/// Columns without which a file is another kind of table.
const NEEDED: [&str; 12] =
    ["row_id", "source_id", "framework", "workload", "layers", "hidden", "heads", "seq_len", "gpu", "n_gpus", "recompute", "status"];

/// Reads a table; `path` is what messages call it.
///
/// # Errors
/// Not such a table, or one that is damaged.
pub fn read(path: &str, input: impl Read) -> Result<Vec<Row>, RowsError> {
    let csv_error = |source| RowsError::Csv { path: path.into(), source };
    let mut reader = csv::Reader::from_reader(input);
    let header = reader.headers().map_err(csv_error)?.clone();
    for column in NEEDED {
        if !header.iter().any(|h| h == column) {
            return Err(RowsError::Column { path: path.into(), column });
        }
    }
    let mut rows = Vec::new();
    for record in reader.records() {
        let fields = Fields { header: &header, record: &record.map_err(csv_error)? };
        let text = |column| fields.text(column).to_string();
        let run = run(&fields);
        let measured = Measured {
            seconds: run.as_ref().ok().and_then(|run| seconds(&fields, run)),
            memory: memory(&fields),
            out_of_memory: fields.text("status") == "OOM",
            doubted: DOUBTS.iter().any(|words| fields.text("notes").contains(words)),
        };
        let group = ["model_name", "layers", "hidden", "heads", "gpu", "n_gpus", "seq_len", "precision"].map(text).join(" · ");
        rows.push(Row { id: text("row_id"), source: text("source_id"), run, measured, group });
    }
    if rows.is_empty() { Err(RowsError::Empty { path: path.into() }) } else { Ok(rows) }
}

struct Fields<'a> {
    header: &'a StringRecord,
    record: &'a StringRecord,
}

impl Fields<'_> {
    fn text(&self, column: &str) -> &str {
        self.header.iter().position(|h| h == column).and_then(|i| self.record.get(i)).unwrap_or("").trim()
    }
    fn number(&self, column: &str) -> Option<f64> {
        self.text(column).parse::<f64>().ok().filter(|x| x.is_finite() && *x > 0.0)
    }
    fn whole(&self, column: &str) -> Option<u64> {
        self.number(column).filter(|x| x.fract() == 0.0 && *x <= MOST as f64).map(|x| x as u64)
    }
    /// Nothing if it is not stated.
    fn stated(&self, column: &str) -> Result<Option<u64>, String> {
        if self.text(column).is_empty() { Ok(None) } else { self.need(column).map(Some) }
    }
    fn need(&self, column: &str) -> Result<u64, String> {
        self.whole(column).ok_or_else(|| match self.text(column) {
            "" => format!("{column} is not stated"),
            found => format!("{column} is `{found}`, expected a whole number from 1 to {MOST}"),
        })
    }
}

fn run(f: &Fields<'_>) -> Result<Run, String> {
    match (f.text("status"), f.text("workload")) {
        ("ok" | "OOM", "pretrain" | "sft") => {}
        ("ok" | "OOM", workload) => return Err(format!("a {workload}, not a training step")),
        (status, _) => return Err(format!("marked `{status}` in the table")),
    }
    let (hidden, heads) = (f.need("hidden")?, f.need("heads")?);
    let experts = experts(f)?;
    let latent = latent(f)?;
    let model = Decoder {
        layers: f.need("layers")?,
        hidden,
        heads,
        kv_heads: f.whole("kv_heads").unwrap_or(heads),
        head_dim: latent.map_or_else(|| f.whole("head_dim").unwrap_or(hidden / heads).max(1), |l| l.1),
        latent: latent.map(|l| l.0),
        ffn: if experts.is_some_and(|e| e.dense_layers == 0) { f.whole("ffn").unwrap_or(1) } else { f.need("ffn")? },
        mlp: if f.text("gated_mlp") == "true" { Mlp::Gated } else { Mlp::Plain },
        experts,
        vocab: f.whole("vocab").unwrap_or(USUAL_VOCABULARY),
        embeddings: if f.text("tied_embeddings") == "true" { Embeddings::Tied } else { Embeddings::Apart },
        sequence: f.need("seq_len")?,
    };
    let executor = executor(f)?;
    let (ranks, tp, pp, cp) = (f.need("n_gpus")?, f.need("tp")?, f.need("pp")?, f.whole("cp").unwrap_or(1));
    let dp = f.whole("dp").unwrap_or(ranks / (tp * pp * cp)).max(1);
    if [dp, tp, pp].iter().try_fold(cp, |n, x| n.checked_mul(*x)) != Some(ranks) {
        return Err(format!("dp {dp} · tp {tp} · pp {pp} · cp {cp} is not {ranks} devices"));
    }
    // Where nothing is stated, experts are divided by nobody, as Megatron-Core's are without its flags; each of them is divided as everything else is.
    let (ep, etp) = (f.stated("ep")?.unwrap_or(1), f.stated("etp")?.unwrap_or(tp));
    if let Some(experts) = experts {
        match executor {
            Executor::MegatronCore | Executor::Fsdp2 | Executor::Fsdp2Compiled | Executor::MosaicFsdp => {}
            Executor::Megatron2021 | Executor::DeepSpeed | Executor::Nanotron => {
                return Err(format!("routed experts are not priced for {}", executor.name()));
            }
        }
        if !experts.count.is_multiple_of(ep) || etp != tp || !(dp * cp).is_multiple_of(ep) {
            return Err(format!(
                "{} experts over ep {ep} · etp {etp} are not priced: ep divides them and dp {dp} · cp {cp}, etp is tp {tp}",
                experts.count
            ));
        }
    }
    let micro_batch = f.need("mbs")?;
    let micro_batches = match (f.whole("gbs"), f.whole("grad_accum")) {
        (Some(batch), _) if batch % (dp * micro_batch) == 0 => batch / (dp * micro_batch),
        (Some(batch), _) => return Err(format!("a batch of {batch} is no multiple of dp {dp} times {micro_batch}")),
        (None, Some(times)) => times,
        (None, None) => return Err("gbs is not stated".into()),
    };
    let stage = f.text("zero_stage").chars().next().and_then(|c| c.to_digit(10));
    if stage.is_some_and(|stage| stage > 3) {
        return Err(format!("zero_stage is `{}`, expected 0 to 3", f.text("zero_stage")));
    }
    let layout = Layout {
        dp,
        tp,
        pp,
        cp,
        ep,
        virtual_stages: f.whole("vpp").unwrap_or(1),
        micro_batch,
        micro_batches,
        zero: u64::from(stage.unwrap_or(0)),
        recompute: match f.text("recompute") {
            text if text.starts_with("full") => Recompute::Full,
            text if text.starts_with("selective") => Recompute::Selective,
            _ => Recompute::None,
        },
        activations: match executor {
            Executor::Fsdp2 | Executor::Fsdp2Compiled if tp > 1 => Activations::Sharded,
            _ if f.text("sequence_parallel") == "true" && tp > 1 => Activations::Sharded,
            _ => Activations::Replicated,
        },
        precision: precision(f.text("precision"), executor),
    };
    let machine = machine(f, ranks)?;
    // Where nothing is stated: whether DeepSpeed used ZeRO and Megatron-Core its distributed optimizer cannot be known; before them there was neither.
    let without_zero = if executor == Executor::MegatronCore { layout.dp * layout.cp == 1 } else { !f.text("framework").contains("DeepSpeed") };
    Ok(Run { model, layout, executor, machine, fabric: fabric(f), states_known: stage.is_some() || without_zero })
}

/// An `n_experts` that is not stated is none.
fn experts(f: &Fields<'_>) -> Result<Option<Experts>, String> {
    let Some(count) = f.stated("n_experts")? else { return Ok(None) };
    let (chosen, ffn) = (f.need("top_k")?, f.need("moe_ffn")?);
    if chosen > count {
        return Err(format!("top_k {chosen} of {count} experts"));
    }
    let or_none = |column| if f.text(column) == "0" { Ok(0) } else { f.stated(column).map(|n| n.unwrap_or(0)) };
    Ok(Some(Experts { count, chosen, ffn, shared: or_none("shared_expert_ffn")?, dense_layers: or_none("n_dense_layers")? }))
}

/// Widths of compressed vectors and heads are not in the table; DeepSeek-V2 and V3 have the same (`q_lora_rank`, `kv_lora_rank`, `qk_rope_head_dim`, `v_head_dim`).
fn latent(f: &Fields<'_>) -> Result<Option<(Latent, u64)>, String> {
    if !f.text("arch").contains("mla") {
        return Ok(None);
    }
    let model = f.text("model_name").to_lowercase().replace(['-', ' '], "_");
    let known = ["deepseek_v2", "deepseek_v3"].iter().any(|name| model.starts_with(name)) && !model.contains("lite");
    let widths = (Latent { query: 1536, key_value: 512, rope: 64 }, 128);
    if known { Ok(Some(widths)) } else { Err(format!("widths of the latent attention of `{}` are not known", f.text("model_name"))) }
}

fn executor(f: &Fields<'_>) -> Result<Executor, String> {
    let compiled = f.text("notes").contains("torch.compile");
    Ok(match f.text("framework") {
        name if name.starts_with("llm-foundry") => Executor::MosaicFsdp,
        name if name.contains("FSDP") && compiled => Executor::Fsdp2Compiled,
        name if name.contains("FSDP") => Executor::Fsdp2,
        // Before ZeRO, the wrapper changed little in Megatron.
        "Megatron-DeepSpeed" if f.text("zero_stage").is_empty() => Executor::Megatron2021,
        name if name.contains("DeepSpeed") => Executor::DeepSpeed,
        name if name.starts_with("Megatron-LM") => Executor::Megatron2021,
        "Megatron-Core" => Executor::MegatronCore,
        "nanotron" => Executor::Nanotron,
        name => return Err(format!("no executor for the framework `{name}`")),
    })
}

fn precision(text: &str, executor: Executor) -> Precision {
    let text = text.to_lowercase();
    let eight = ["fp8", "fp4"].iter().any(|e| text.contains(e));
    match executor {
        _ if eight && text.contains("rowwise") => Precision::EightByRow,
        _ if eight => Precision::Eight,
        Executor::MosaicFsdp if text == "bf16" => Precision::Half,
        Executor::DeepSpeed if text != "bf16" => Precision::Half,
        _ => Precision::Mixed,
    }
}

fn machine(f: &Fields<'_>, ranks: u64) -> Result<Machine, String> {
    let gpu = f.text("gpu");
    if gpu.contains("power limited") {
        return Err("the power limit of the devices is not stated".into());
    }
    let name = match gpu {
        g if g.contains("V100") && g.contains("16") => "v100-16g",
        g if g.contains("V100") => "v100-32g",
        g if g.contains("A100") && g.contains("40") => "a100-40g",
        g if g.contains("A100") => "a100-80g",
        g if g.contains("H100") && (g.contains("96GB") || g.contains("94GB")) => "h100-96g",
        g if g.contains("H100") => "h100",
        g if g.contains("H200") => "h200",
        g if g.contains("GB200") => "gb200",
        g if g.contains("B200") || g.contains("Blackwell") => "b200",
        g => return Err(format!("no device for `{g}`")),
    };
    let per_node = f.whole("gpus_per_node").unwrap_or(8).min(ranks);
    let machine = Machine::parse(&format!("{name}:{per_node}x{}", ranks.div_ceil(per_node))).map_err(|e| e.to_string())?.measured();
    Ok(match network(f, per_node) {
        Some(bits) => line_rate(bits, per_node).under(machine),
        None => machine,
    })
}

/// Jean Zay's A100 partition, in the project's own description, has four Omni-Path links of 100 Gb/s a node. Of Nanotron's old benchmark no network is stated, and
/// none that such nodes come with explains its times: its rate is one of the fitted constants.
fn fabric(f: &Fields<'_>) -> Fabric {
    match f.text("source_id") {
        source if source.starts_with("bloom_") => Fabric::OmniPath,
        "nanotron_old_bench" => Fabric::Unstated,
        _ => Fabric::Direct,
    }
}

/// Bits per second of a node, where it is known.
fn network(f: &Fields<'_>, per_node: u64) -> Option<f64> {
    let text = f.text("inter_node");
    if fabric(f) == Fabric::OmniPath {
        return Some(400e9);
    }
    if let Some(before) = text.split(" Gb/s per node").next().filter(|b| b.len() < text.len()) {
        return before.rsplit(' ').next()?.parse::<f64>().ok().map(|gigabits| gigabits * 1e9);
    }
    text.contains("HDR").then_some(200e9 * per_node as f64)
}

/// Measured seconds of a step.
fn seconds(f: &Fields<'_>, run: &Run) -> Option<f64> {
    if let Some(printed) = f.number("iter_time_s").or_else(|| f.number("iter_time_derived_s")) {
        return Some(printed);
    }
    let devices = f.number("n_gpus")?;
    if let Some(rate) = f.number("tokens_per_s_per_gpu") {
        return Some(run.tokens() / rate / devices);
    }
    // Four passes, by the formula of arXiv:2104.04473 §5.1.
    if f.text("tflops_kind").starts_with("hardware incl. full-recompute fwd: F=96") {
        let m = &run.model;
        let (s, l, h, v) = (m.sequence as f64, m.layers as f64, m.hidden as f64, m.vocab as f64);
        let flops = 96.0 * run.tokens() * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
        return Some(flops / (f.number("tflops_per_gpu")? * 1e12 * devices));
    }
    None
}

fn memory(f: &Fields<'_>) -> Option<(u64, Counter)> {
    let scale = match f.text("peak_mem_unit") {
        "MiB" => 1_048_576.0,
        // Figures of nvidia-smi printed as GB are GiB.
        "GiB" | "GB" => 1_073_741_824.0,
        "bytes" => 1.0,
        _ => return None,
    };
    let counter = match f.text("peak_mem_kind") {
        kind if kind.contains("allocated") => Counter::Allocated,
        kind if kind.contains("reserved") => Counter::Reserved,
        kind if kind.contains("nvidia-smi") => Counter::Device,
        _ => return None,
    };
    Some(((f.number("peak_mem")? * scale) as u64, counter))
}
