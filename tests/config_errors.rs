//! Every fault in a config is an error that names the file, the place, what was found and what would be right; none is a panic.

use dplan::import::{self, ImportOptions, Model};
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::op::Op;

/// (config, what its error says). Members are added to a sound llama of the tests below unless the config has braces of its own.
const FAULTS: [(&str, &str); 33] = [
    ("", "m.json:1:0: not valid JSON: the file ends in the middle of a value"),
    (r#"{"model_type": "llama","#, "not valid JSON: the file ends in the middle of a value"),
    ("{\n \"model_type\": llama}", "m.json:2:16: not valid JSON: expected value"),
    ("[1, 2]", "`$` is an array of 2 elements; it should be an object"),
    ("{}", "it has no `model_type`, and is not a dplan graph either; supported are gpt2, llama, mistral, qwen2, qwen3, mixtral"),
    (
        r#"{"model_type": "lama"}"#,
        "\"lama\", which is not a family that dplan knows; supported are gpt2, llama, mistral, qwen2, qwen3, mixtral, gpt_neox, phi, phi3, olmo2, olmo3, qwen3_moe, deepseek_v2, deepseek_v3, kimi_k2, glm_moe_dsa, minimax_m2, gpt_oss, bert, vit; the nearest is `llama`",
    ),
    (r#"{"model_type": "whisper"}"#, "--as FAMILY reads the file as one of them"),
    (r#"{"model_type": 7}"#, "`$.model_type` is 7; it should be a string"),
    (r#"{"model_type": "llava", "text_config": {"model_type": "lama"}}"#, "`$.text_config.model_type` is \"lama\", which is not a family"),
    (r#""hidden_size": "64""#, "`$.hidden_size` is the string \"64\"; it should be an integer from 1"),
    (r#""hidden_size": 64.5"#, "`$.hidden_size` is 64.5"),
    (r#""hidden_size": 0"#, "`$.hidden_size` is 0; it should be an integer from 1"),
    (r#""num_hidden_layers": -2"#, "`$.num_hidden_layers` is -2; it should be an integer from 1 to 10000"),
    (r#""vocab_size": null"#, "`$.vocab_size` is null"),
    (r#""vocab_size": NaN"#, "`$.vocab_size` is null"),
    (r#""num_attention_heads": 7"#, "`$.num_key_value_heads` makes 4 key/value heads, which do not divide the 7 attention heads"),
    (r#""num_attention_heads": 12"#, "`$.num_attention_heads` gives 12 heads, which do not divide hidden_size 64, and there is no head_dim"),
    (r#""num_key_value_heads": 3"#, "`$.num_key_value_heads` makes 3 key/value heads, which do not divide the 8 attention heads"),
    (r#""head_dim": 7"#, "`$.head_dim` makes heads of 7 elements"),
    (r#""hidden_act": "mish""#, "`$.hidden_act` is the string \"mish\"; it should be one of silu"),
    (r#""rms_norm_eps": -1e-5"#, "`$.rms_norm_eps` is -0.00001; it should be a number above 0"),
    (r#""tie_word_embeddings": "yes""#, "`$.tie_word_embeddings` is the string \"yes\"; it should be true or false"),
    (r#""torch_dtype": "int8""#, "`$.torch_dtype` is the string \"int8\"; it should be one of float64"),
    (
        r#""rope_scaling": {"rope_type": "dynamic", "factor": 4}"#,
        "`$.rope_scaling.rope_type` is the rope scaling \"dynamic\"; it should be one of default, linear, llama3",
    ),
    (r#""rope_scaling": {"rope_type": "llama3", "factor": 4}"#, "`$.rope_scaling.low_freq_factor` is missing"),
    (r#""rope_scaling": {"factor": 4}"#, "`$.rope_scaling.rope_type` is missing"),
    (r#""rope_scaling": "linear""#, "`$.rope_scaling` is the string \"linear\"; it should be an object"),
    (r#""hidden_size": 1e30"#, "`$.hidden_size` is 1e+30"),
    (r#""hidden_size": 1099511627776, "head_dim": 8, "vocab_size": 1099511627776"#, "is too large"),
    (r#""max_position_embeddings": 16"#, "a sequence of 32 tokens does not fit the model's 16 positions"),
    (r#"{"model_type": "gpt2", "n_head": 7}"#, "`$.n_head` gives 7 heads, which do not divide n_embd 768"),
    (r#"{"model_type": "gpt2", "add_cross_attention": true}"#, "cross attention is not supported"),
    (r#"{"model_type": "mixtral", "num_experts_per_tok": 9}"#, "`$.num_experts_per_tok` is 9; it should be an integer from 1 to 8"),
];

const LLAMA: &str = r#""model_type": "llama", "vocab_size": 259, "intermediate_size": 160, "num_hidden_layers": 2"#;
const SIZES: [(&str, &str); 4] =
    [("hidden_size", "64"), ("num_attention_heads", "8"), ("num_key_value_heads", "4"), ("max_position_embeddings", "64")];

/// The sound llama with `members` in place of its own.
fn config(members: &str) -> String {
    let sound: Vec<String> = LLAMA
        .split(", ")
        .map(str::to_string)
        .chain(SIZES.iter().map(|(k, v)| format!("\"{k}\": {v}")))
        .filter(|m| !members.contains(m.split(':').next().unwrap_or_default()))
        .collect();
    format!("{{{}{}{members}}}", sound.join(", "), if members.is_empty() { "" } else { ", " })
}

fn import(text: &str, seq: Option<u64>) -> Result<Model, String> {
    let options = ImportOptions { seq, ..ImportOptions::default() };
    import::model_from_bytes("m.json", text.as_bytes(), &options).map_err(|e| e.to_string())
}

fn imported(text: &str) -> Model {
    import(text, None).unwrap_or_else(|e| panic!("{text}: {e}"))
}

#[test]
fn faults_are_named_with_their_place() {
    imported(&config(""));
    for (fault, message) in FAULTS {
        let own = fault.is_empty() || fault.starts_with(['{', '[']);
        let text = if own { fault.to_string() } else { config(fault) };
        let error = import(&text, Some(32)).map(|m| m.graph.param_count()).unwrap_err();
        assert!(error.starts_with("m.json") && error.contains(message), "{fault}\n  said {error}\n  not  {message}");
    }
    let missing = import::model(std::path::Path::new("no/such/config.json"), &ImportOptions::default()).unwrap_err().to_string();
    assert!(missing.starts_with("no/such/config.json: cannot be read"), "{missing}");
    let zero = import(&config(""), Some(0)).map(|m| m.name).unwrap_err();
    assert!(zero.contains("choose --seq from 1 to 64"), "{zero}");
}

#[test]
fn family_can_be_forced() {
    let text = config("").replace("llama", "lamma");
    let options = |family: &str| ImportOptions { family: Some(family.into()), ..ImportOptions::default() };
    let model = import::model_from_bytes("m.json", text.as_bytes(), &options("qwen3")).unwrap();
    assert_eq!(model.family, "qwen3");
    let error = import::model_from_bytes("m.json", text.as_bytes(), &options("quen3")).unwrap_err().to_string();
    assert!(error.contains("--as \"quen3\" is not a family that dplan knows") && error.contains("the nearest is `qwen3`"), "{error}");
}

#[test]
fn the_language_model_of_a_larger_one_is_read() {
    let plain = imported(&config(""));
    let wrapped = imported(&format!(r#"{{"model_type": "llava", "text_config": {}}}"#, config("").replace("\"llama\"", "\"llama_text\"")));
    assert_eq!((wrapped.family.as_str(), wrapped.graph.param_count()), ("llama", plain.graph.param_count()));
    assert!(wrapped.notes.iter().any(|n| n.contains("text_config")) && plain.notes.is_empty());
}

/// What a config says in one key, and what the graph has then.
#[test]
fn keys_change_the_graph_as_the_family_does() {
    let rope = |m: &Model| m.graph.nodes.values().find_map(|n| if let Op::Rope(r) = &n.op { Some(r.inv_freq.clone()) } else { None }).unwrap();
    let plain = imported(&config(""));
    assert!(rope(&plain).iter().zip([1.0, 0.1, 0.01, 0.001]).all(|(f, e)| (f / e - 1.0).abs() < 1e-14) && rope(&plain).len() == 4);
    let theta_in_both_places =
        [imported(&config(r#""rope_theta": 81"#)), imported(&config(r#""rope_parameters": {"rope_type": "default", "rope_theta": 81}"#))];
    for model in &theta_in_both_places {
        assert!((rope(model)[1] - 1.0 / 3.0).abs() < 1e-15);
    }
    let linear = imported(&config(r#""rope_scaling": {"type": "linear", "factor": 4}"#));
    assert_eq!(rope(&linear)[0], 0.25);
    // Wavelength 2π·1000 is longer than 64 positions, 2π is shorter than 64 / 4.
    let llama3 = imported(&config(r#""rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}"#));
    assert_eq!((rope(&llama3)[0], rope(&llama3)[3]), (1.0, rope(&plain)[3] / 8.0));

    let extra = |m: &Model| m.graph.param_count() as i64 - plain.graph.param_count() as i64;
    assert_eq!(extra(&imported(&config(r#""tie_word_embeddings": true"#))), -259 * 64);
    assert_eq!(extra(&imported(&config(r#""attention_bias": true"#))), 2 * (64 + 32 + 32 + 64));
    assert_eq!(extra(&imported(&config(r#""mlp_bias": true"#))), 2 * (160 + 160 + 64));
    assert_eq!(extra(&imported(&config(r#""head_dim": 16"#))), 2 * (64 + 32 + 32 + 64) * 64);
    assert_eq!(extra(&imported(&config(r#""num_key_value_heads": null"#))), 2 * 2 * 32 * 64);
    let qwen2 = imported(&config(r#""model_type": "qwen2""#));
    assert_eq!(extra(&qwen2), 2 * (64 + 32 + 32));
    let qwen3 = imported(&config(r#""model_type": "qwen3", "head_dim": 8"#));
    assert_eq!(extra(&qwen3), 2 * (8 + 8));

    let dtype = |m: &str| imported(&config(m)).default_dtype;
    let found = [dtype(""), dtype(r#""dtype": "bfloat16""#), dtype(r#""torch_dtype": "torch.float16""#)];
    assert_eq!(found, [DType::F32, DType::Bf16, DType::F16]);
    imported(&config(r#""unknown": [Infinity, -Infinity, NaN], "text": "not a \" NaN""#));
}

#[test]
fn attention_windows_are_those_of_the_family() {
    let windows = |text: &str| -> Vec<Option<u64>> { attention_windows(&imported(text).graph) };
    assert_eq!(windows(&config(r#""sliding_window": 8"#)), [None, None]);
    assert_eq!(windows(&config(r#""model_type": "mistral", "sliding_window": 8"#)), [Some(8), Some(8)]);
    assert_eq!(windows(&config(r#""model_type": "mistral", "sliding_window": null"#)), [None, None]);
    assert_eq!(windows(&config(r#""model_type": "mistral", "max_position_embeddings": 9000"#)), [None, None], "4096 is the whole sequence");
    let qwen = |more: &str| windows(&config(&format!(r#""model_type": "qwen2", "sliding_window": 8{more}"#)));
    assert_eq!(qwen(""), [None, None]);
    assert_eq!(qwen(r#", "use_sliding_window": true, "max_window_layers": 1"#), [None, Some(8)]);
    assert_eq!(qwen(r#", "use_sliding_window": true, "layer_types": ["sliding_attention", "full_attention"]"#), [Some(8), None]);
}

#[test]
fn sequence_length_is_the_models_up_to_a_cap_that_is_said() {
    let seq = |text: &str| {
        let model = imported(text);
        (model.graph.shape(model.graph.inputs[0])[1], model.notes.iter().any(|n| n.contains("--seq")))
    };
    assert_eq!(seq(&config("")), (64, false));
    assert_eq!(seq(&config(r#""max_position_embeddings": 131072"#)), (4096, true));
}

fn attention_windows(graph: &Graph) -> Vec<Option<u64>> {
    graph.nodes.values().filter_map(|n| if let Op::Attention(a) = n.op { Some(a.mask.window) } else { None }).collect()
}
