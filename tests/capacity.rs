//! `compile --capacity`: experts drop the same tokens under every plan, and their rows take less memory for it.

mod common;

const CONFIG: &str = r#"{"model_type":"qwen3_moe","vocab_size":256,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"max_position_embeddings":64,"num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":16,"norm_topk_prob":true,"decoder_sparse_step":1,"mlp_only_layers":[]}"#;

struct Files {
    config: String,
    text: String,
    plan: String,
}

impl Files {
    fn new(name: &str) -> Files {
        let dir = common::scratch(name);
        let [config, text, plan] = ["config.json", "text.txt", "plan.json"].map(|p| dir.join(p).to_str().unwrap().to_string());
        std::fs::write(&config, CONFIG).unwrap();
        std::fs::write(&text, "one line. another one!\nand. a third; which is longer\nend.\n".repeat(40)).unwrap();
        Files { config, text, plan }
    }
    /// What `compile --json` says of a plan.
    fn compile(&self, ranks: u32, pins: &str, capacity: Option<&str>) -> serde_json::Value {
        let cluster = format!("cpu:{ranks}");
        let mut args = vec!["compile", &self.config, "--cluster", &cluster, "--batch", "8", "--seq", "32", "--precision", "f64"];
        args.extend(["--pin", pins, "-o", &self.plan, "--json"]);
        args.extend(capacity.into_iter().flat_map(|factor| ["--capacity", factor]));
        let object = common::dplan_ok(&args);
        common::dplan_ok(&["verify", &self.plan]);
        common::dplan_ok(&["verify", &self.plan, "--certificate"]);
        serde_json::from_str(&object).unwrap()
    }
    fn losses(&self) -> Vec<f64> {
        let text = common::dplan_ok(&["run", &self.plan, "--data", &self.text, "--steps", "3", "--json"]);
        common::json_lines(&text).iter().filter_map(|l| l["loss"].as_f64()).collect()
    }
}

/// Micro-batches, data, sequences, tensors, experts and layers cut up: the losses of one rank, of which each that drops has its own.
#[test]
fn every_plan_drops_the_same_tokens() {
    let files = Files::new("capacity");
    let losses = |ranks: u32, pins: &str, capacity: Option<&str>| {
        files.compile(ranks, pins, capacity);
        files.losses()
    };
    let right = losses(1, "micro=8", Some("0.5"));
    assert_eq!(right.len(), 3);
    for (ranks, pins) in [
        (1, "micro=1"),
        (4, "dp=4,ep=4,zero=1"),
        (2, "cp=2"),
        (4, "cp=2,tp=2,recompute=full"),
        (4, "pp=2,dp=2,ep=2,zero=2,micro=1"),
        (4, "tp=2,dp=2,zero=3,recompute=selective"),
    ] {
        let found = losses(ranks, pins, Some("0.5"));
        assert!(found.iter().zip(&right).all(|(x, y)| (x / y - 1.0).abs() < 1e-10), "{pins}: {found:?}, not {right:?}");
    }
    let whole = losses(1, "micro=8", None);
    assert!(whole.iter().zip(&right).any(|(x, y)| (x / y - 1.0).abs() > 1e-5), "{whole:?} without dropping");
    // Experts with room for whole sequences are experts without a capacity.
    let ample = files.compile(1, "micro=8", Some("2"));
    assert_eq!(files.losses(), whole);
    assert_eq!(ample["predicted"], files.compile(1, "micro=8", None)["predicted"]);
}

/// Planner and arena have one size of rows, which falls with the capacity; so does the time, once experts take less than their share.
#[test]
fn rows_take_less_memory_and_experts_less_time() {
    let files = Files::new("capacity_sizes");
    let of = |pins: &str, capacity: Option<&str>| {
        let said = files.compile(4, pins, capacity);
        let bytes = said["predicted"]["memory"][0]["arena_bytes"].as_u64().unwrap();
        (bytes, said["predicted"]["step_seconds"].as_f64().unwrap())
    };
    for pins in ["dp=4,ep=4,zero=1,micro=2", "dp=4,zero=1,micro=2", "tp=2,dp=2,micro=4"] {
        let all = [None, Some("0.5"), Some("0.25")].map(|capacity| of(pins, capacity));
        assert!(all.windows(2).all(|w| w[1].0 < w[0].0 && w[1].1 < w[0].1), "{pins}: {all:?}");
    }
    // Ranks that share experts out have had room for every token that may come to each; those that have all experts, for what tokens choose and no more.
    let [with, without] = [Some("1"), None].map(|capacity| of("dp=4,ep=4,zero=1,micro=2", capacity).0);
    assert!(with * 10 < without * 9, "{with}, {without} without a capacity");
}

#[test]
fn what_has_no_experts_or_no_factor_says_so() {
    let files = Files::new("capacity_errors");
    let refused = |config: &str, factor: &str| {
        let output = common::dplan(&["compile", config, "--cluster", "cpu:1", "--capacity", factor]);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).to_string()
    };
    assert!(refused(&files.config, "0").contains("a capacity factor of 0 should be above 0"));
    let plain = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/llama-1m/config.json");
    assert!(refused(plain, "1").contains("no router chooses experts"));
}
