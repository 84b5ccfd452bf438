//! Bad input gets a clear error, exit status 2, and nothing is written.

mod common;

use common::{dplan, dplan_ok, scratch};
use std::fs;
use std::path::{Path, PathBuf};

const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}"#;

/// A folder with `config.json`, a plan of it and some text, and what must not change in it.
struct Bench {
    dir: PathBuf,
}

impl Bench {
    fn new(name: &str) -> Bench {
        let dir = scratch(name);
        fs::write(dir.join("config.json"), LLAMA).unwrap();
        fs::write(dir.join("text.txt"), "abcdefgh".repeat(200).replace(|c: char| c as u32 >= 64, " ")).unwrap();
        let bench = Bench { dir };
        dplan_ok(&["compile", &bench.path("config.json"), "--cluster", "cpu:2", "--batch", "4", "--seq", "16", "-o", &bench.path("plan.json")]);
        bench
    }
    fn path(&self, file: &str) -> String {
        self.dir.join(file).to_str().unwrap().into()
    }
    fn write(&self, file: &str, text: &str) -> String {
        fs::write(self.dir.join(file), text).unwrap();
        self.path(file)
    }
    fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut files: Vec<_> =
            fs::read_dir(&self.dir).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_file()).map(|p| (p.clone(), fs::read(p).unwrap())).collect();
        files.sort();
        files
    }
    /// The command must end with status 2, say all of `says`, and leave every file as it was.
    fn refuse(&self, args: &[&str], says: &[&str]) {
        let before = self.files();
        let output = dplan(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "dplan {args:?}: {stderr}\n{}", String::from_utf8_lossy(&output.stdout));
        assert!(!stderr.contains("panicked"), "dplan {args:?}: {stderr}");
        for part in says {
            assert!(stderr.contains(part), "dplan {args:?} should say `{part}`:\n{stderr}");
        }
        assert_eq!(before, self.files(), "dplan {args:?} wrote something");
    }
    fn refuse_config(&self, config: &str, says: &[&str]) {
        let file = self.write("wrong.json", config);
        self.refuse(&["compile", &file, "--cluster", "cpu:2", "--batch", "4", "-o", &self.path("out.json")], says);
    }
    fn compile(&self, more: &[&str], says: &[&str]) {
        let (config, out) = (self.path("config.json"), self.path("out.json"));
        let args: Vec<&str> = ["compile", &config].into_iter().chain(more.iter().copied()).chain(["-o", &out]).collect();
        self.refuse(&args, says);
    }
    fn run(&self, more: &[&str], says: &[&str]) {
        let plan = self.path("plan.json");
        let args: Vec<&str> = ["run", &plan, "--steps", "1"].into_iter().chain(more.iter().copied()).collect();
        self.refuse(&args, says);
    }
}

#[test]
fn models_that_are_no_models() {
    let bench = Bench::new("bad-models");
    bench.refuse(&["compile", &bench.path("absent.json")], &["absent.json", "cannot be read"]);
    bench.refuse_config(&LLAMA[..80], &["wrong.json:", "JSON"]);
    let set = |key: &str, value: &str| {
        let mut json: serde_json::Value = serde_json::from_str(LLAMA).unwrap();
        json[key] = serde_json::from_str(value).unwrap();
        json.to_string()
    };
    bench.refuse_config(&set("hidden_size", "\"wide\""), &["hidden_size"]);
    bench.refuse_config(&set("hidden_size", "0"), &["hidden_size"]);
    bench.refuse_config(&set("num_hidden_layers", "-1"), &["num_hidden_layers"]);
    bench.refuse_config(&set("vocab_size", "1e300"), &["vocab_size"]);
    bench.refuse_config(&set("hidden_size", "33"), &["hidden_size", "head"]);
    bench.refuse_config(&set("num_key_value_heads", "3"), &["num_key_value_heads"]);
    bench.refuse_config(&set("model_type", "\"lama\""), &["lama", "llama", "mixtral", "--as"]);
    bench.refuse_config("[]", &["wrong.json"]);
    bench.refuse_config("{}", &["model_type"]);
    bench.refuse_config("", &["wrong.json"]);
}

#[test]
fn clusters_batches_and_pins_that_cannot_be() {
    let bench = Bench::new("bad-clusters");
    bench.compile(&["--cluster", "cpu:0"], &["cpu:0", "at least 1"]);
    bench.compile(&["--cluster", "h10:8x1"], &["h10", "h100"]);
    bench.compile(&["--cluster", "h100:8xx"], &["8xx"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "0"], &["batch"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "-4"], &["batch"]);
    bench.compile(&["--cluster", "cpu:2", "--seq", "0"], &["seq"]);
    bench.compile(&["--cluster", "cpu:2", "--seq", "33"], &["33", "32"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--pin", "tp=2,tp=1"], &["tp"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--pin", "tp=3"], &["tp=3", "2"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--pin", "dp=2,tp=2"], &["2 devices", "dp could be 1", "tp could be 1"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--pin", "pp=banana"], &["banana"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--pin", "speed=9"], &["speed"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--pin", "zero=5"], &["5"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "5", "--pin", "dp=2"], &["5", "nearest"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--pin", "micro=3"], &["micro", "nearest"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--precision", "f19"], &["f19", "f32"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--pin", "ep=2"], &["ep could be 1"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--pin", "cp=3"], &["cp could be 1"]);
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--memory-limit", "5GiB"], &["5.00 GiB", "4.00 GiB"]);
    for number in ["nan", "-3", "inf", "fast"] {
        bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--time-limit", number], &[number, "seconds, 0 or more"]);
        bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--tokens", "1M", "--price", number], &[number, "USD, 0 or more"]);
    }
    bench.compile(&["--cluster", "cpu:2", "--batch", "4", "--price", "2"], &["--tokens"]);
}

#[test]
fn cluster_files_that_are_none() {
    let bench = Bench::new("bad-cluster-files");
    let full = |device: &str, rest: &str| format!(r#"{{"device": {{{device}}}, "per_node": 2, "nodes": 2{rest}}}"#);
    let device = r#""name": "x", "peak_flops_per_second": {"f64": 1000000000, "f32": 1000000000, "bf16": 1000000000, "f16": 1000000000}, "matrix_efficiency_millionths": 700000,
        "matrix_grain": 64, "bandwidth_bytes_per_second": 1000000000, "bandwidth_efficiency_millionths": 800000, "memory_bytes": 8000000000, "launch_nanoseconds": 100"#;
    let whole = format!("{device}, \"context_bytes\": 0");
    let link = |name: &str, rate: u64| format!(r#", "{name}": {{"latency_nanoseconds": 1000, "bandwidth_bytes_per_second": {rate}}}"#);
    let links: Vec<String> = ["intra", "inter", "host", "nvme"].map(|name| link(name, 1_000_000_000)).into();
    let without =
        |left: usize| full(&whole, &links.iter().enumerate().filter(|(at, _)| *at != left).map(|(_, link)| link.as_str()).collect::<String>());
    for (text, says) in [
        ("[]".to_string(), "an object with `device`"),
        ("3".into(), "an object with `device`"),
        (r#"{"device": "h100", "per_node": 8, "nodes": 1, "intra": []}"#.into(), "an object with `latency_nanoseconds`"),
        (full(device, &links.concat()), "missing field `context_bytes`"),
        (r#"{"device": 3, "per_node": 8, "nodes": 1}"#.into(), "the name of a built-in device, or an object"),
        (r#"{"device": "h100", "per_node": 8, "nodes": 1, "groups": null}"#.into(), "expected `groups` or `between`"),
        (without(0), "`intra`: is missing"),
        (without(1), "`inter`: is missing"),
        (without(2), "`host`: is missing"),
        (without(3), "`nvme`: is missing"),
        (full(&whole, &[&links[1..], &[link("intra", 300)]].concat().concat()), "`intra.bandwidth_bytes_per_second`: is 300, expected from 1000000"),
    ] {
        bench.compile(&["--cluster", &bench.write("cluster.json", &text), "--batch", "4"], &[says]);
    }
    let sound = bench.write("cluster.json", &full(&whole, &links.concat()));
    dplan_ok(&["compile", &bench.path("config.json"), "--cluster", &sound, "--batch", "4", "--seq", "16", "--precision", "f32"]);
}

#[test]
fn data_and_weights_that_do_not_fit_the_model() {
    let bench = Bench::new("bad-data");
    bench.run(&["--data", &bench.path("absent.txt")], &["absent.txt"]);
    bench.run(&["--data", &bench.write("short.txt", "abc")], &["short.txt", "16"]);
    bench.run(&["--data", &bench.write("big.txt", &format!("{}~{}", " ".repeat(40), " ".repeat(40)))], &["big.txt", "126", "40"]);
    bench.run(&["--data", &bench.write("rows.json", r#"{"tokens": [[[1, 2, 3]]]}"#)], &["rows.json"]);
    bench.run(&["--data", &bench.write("rows.json", r#"{"tokens": "none"}"#)], &["rows.json", "tokens"]);
    bench.run(&["--data", &bench.path("text.txt"), "--init", &bench.path("absent.safetensors")], &["absent.safetensors"]);
    bench.run(&["--data", &bench.path("text.txt"), "--init", &bench.write("w.safetensors", "no tensors here")], &["w.safetensors"]);
    let weights = |change: fn(&mut Vec<(String, Vec<usize>)>)| {
        dplan_ok(&["run", &bench.path("plan.json"), "--data", &bench.path("text.txt"), "--steps", "1", "--save", &bench.path("good.safetensors")]);
        let bytes = fs::read(bench.path("good.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: Vec<(String, Vec<usize>)> = file.tensors().into_iter().map(|(n, v)| (n, v.shape().to_vec())).collect();
        tensors.sort();
        change(&mut tensors);
        let zeros: Vec<Vec<u8>> = tensors.iter().map(|(_, s)| vec![0; 4 * s.iter().product::<usize>()]).collect();
        let views = tensors
            .iter()
            .zip(&zeros)
            .map(|((n, s), z)| (n.clone(), safetensors::tensor::TensorView::new(safetensors::Dtype::F32, s.clone(), z).unwrap()));
        fs::write(bench.path("weights.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
        bench.path("weights.safetensors")
    };
    let init = |file: &str, says: &[&str]| bench.run(&["--data", &bench.path("text.txt"), "--init", file], says);
    init(&weights(|t| drop(t.remove(0))), &["lm_head.weight", "missing"]);
    init(&weights(|t| t.push(("surplus.weight".into(), vec![2]))), &["surplus.weight"]);
    init(&weights(|t| t[0].1 = vec![3, 3]), &["lm_head.weight", "[3, 3]"]);
}

#[test]
fn places_that_cannot_be_written() {
    let bench = Bench::new("bad-output");
    let config = bench.path("config.json");
    bench.refuse(&["compile", &config, "--cluster", "cpu:2", "-o", &bench.path("no/such/folder/plan.json")], &["no/such/folder/plan.json"]);
    bench.refuse(&["compile", &config, "--cluster", "cpu:2", "-o", bench.dir.to_str().unwrap()], &["directory"]);
    bench.run(&["--data", &bench.path("text.txt"), "--save", &bench.path("no/such/w.safetensors")], &["no/such/w.safetensors"]);
}

#[test]
fn plans_that_were_edited() {
    let bench = Bench::new("bad-plans");
    let plan = fs::read_to_string(bench.path("plan.json")).unwrap();
    for command in ["verify", "run", "explain", "trace"] {
        bench.refuse(&[command, &bench.write("cut.json", &plan[..plan.len() / 2])], &["cut.json"]);
        bench.refuse(&[command, &bench.write("empty.json", "{}")], &["empty.json"]);
    }
    let later = plan.replacen("\"dplan_plan\": 1", "\"dplan_plan\": 99", 1);
    bench.refuse(&["run", &bench.write("later.json", &later)], &["version 99"]);
    // A right program, which is not what the choices say.
    for (said, instead, says) in
        [("\"clip\": \"global_norm\"", "\"clip\": \"none\"", "clip"), ("\"optimizer\": \"adamw\"", "\"optimizer\": \"adam\"", "optimizer")]
    {
        assert!(plan.contains(said), "{said}");
        bench.refuse(&["verify", &bench.write("other.json", &plan.replacen(said, instead, 1))], &["other.json", "program", says]);
    }
    // A program that no longer verifies: `run` refuses it, `verify` answers no.
    let line = plan.lines().find(|l| l.contains("all_reduce") || l.contains("reduce_scatter")).expect("two ranks communicate");
    let broken = plan.replacen(&format!("{line}\n"), "", 1);
    assert_ne!(broken, plan);
    let file = bench.write("broken.json", &broken);
    bench.refuse(&["run", &file, "--data", &bench.path("text.txt"), "--steps", "1"], &["broken.json", "verif"]);
    let output = dplan(&["verify", &file]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn what_does_not_fit_says_by_how_much_and_what_would() {
    let dir = scratch("infeasible");
    let config = LLAMA
        .replace("\"hidden_size\": 32", "\"hidden_size\": 8192")
        .replace("\"intermediate_size\": 48", "\"intermediate_size\": 28672")
        .replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 80");
    fs::write(dir.join("config.json"), config).unwrap();
    let out = dir.join("plan.json");
    let args =
        ["compile", dir.join("config.json").to_str().unwrap(), "--cluster", "a100-40g:1x1", "--pin", "offload=none", "-o", out.to_str().unwrap()]
            .map(String::from);
    let output = dplan(&args);
    assert_eq!(output.status.code(), Some(1));
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    for part in ["short", "stage", "a100-40g"] {
        assert!(said.contains(part), "should say `{part}`:\n{said}");
    }
    assert!(!Path::new(&out).exists());
    // A limit that the context takes alone is an answer at once, not a search.
    let model = fs::write(dir.join("small.json"), LLAMA).map(|()| dir.join("small.json").display().to_string()).unwrap();
    let output = dplan(&["compile", &model, "--cluster", "h100:4", "--memory-limit", "1GiB", "--json"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(1) && said.contains("context alone takes 1.00 GiB"), "{said}");
}
