//! A run begins from a checkpoint in the layout in which models are published, and ends in one.
//!
//! The files in `tests/data/published` are written by Python's `safetensors` (`make.py` beside them): bf16 tensors in three files with an index, and buffers that are no weights.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const FILES: [&str; 4] =
    ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors", "model.safetensors.index.json"];

fn published() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/published")
}

/// Trains the published model for a step; gives the loss.
fn train(dir: &Path, pins: &str, more: &[&str]) -> f64 {
    let plan = dir.join("plan.json");
    let (config, out) = (published().join("config.json"), plan.to_str().unwrap());
    let compile = ["compile", config.to_str().unwrap(), "--cluster", "cpu:4", "--batch", "4", "--seq", "8", "--precision", "f32"];
    common::dplan_ok(&[&compile[..], &["--pin", pins, "-o", out, "--json"]].concat());
    let run = ["run", out, "--steps", "1", "--json", "--init", published().to_str().unwrap()].map(String::from);
    let args: Vec<String> = run.into_iter().chain(more.iter().map(|s| s.to_string())).collect();
    common::json_lines(&common::dplan_ok(&args))[0]["loss"].as_f64().unwrap()
}

/// Name → type and bytes, over all files.
fn tensors(dir: &Path, files: &[String]) -> BTreeMap<String, (String, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for file in files {
        let bytes = fs::read(dir.join(file)).unwrap();
        for (name, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
            all.insert(name, (format!("{:?}", view.dtype()), view.data().to_vec()));
        }
    }
    all
}

#[test]
fn what_training_did_not_change_is_written_back_byte_by_byte() {
    let dir = common::scratch("published-same");
    let out = dir.join("out");
    train(&dir, "dp=2,tp=2,zero=1", &["--lr", "0", "--save", &format!("{}/", out.display())]);
    for file in FILES.iter().chain(&["config.json"]) {
        assert!(fs::read(out.join(file)).unwrap() == fs::read(published().join(file)).unwrap(), "{file} is not what it was");
    }
    assert_eq!(fs::read_dir(&out).unwrap().count(), 5);
}

#[test]
fn a_trained_step_changes_weights_and_nothing_else() {
    let dir = common::scratch("published-trained");
    let out = dir.join("out");
    let first = train(&dir, "tp=4", &["--lr", "0.1", "--save", &format!("{}/", out.display())]);
    let files: Vec<String> = FILES[..3].iter().map(|f| f.to_string()).collect();
    let (old, new) = (tensors(&published(), &files), tensors(&out, &files));
    assert_eq!(old.keys().collect::<Vec<_>>(), new.keys().collect::<Vec<_>>());
    for (name, (dtype, bytes)) in &new {
        assert_eq!(*dtype, old[name].0, "{name}");
        let buffer = name.ends_with("inv_freq");
        assert_eq!(*bytes == old[name].1, buffer, "{name}");
    }
    // The headers, and so all places, are the same.
    for file in &files {
        let header = |dir: &Path| {
            let bytes = fs::read(dir.join(file)).unwrap();
            bytes[..8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize].to_vec()
        };
        assert!(header(&out) == header(&published()), "{file}");
    }
    // What was written is read again, by its folder and by its index.
    let again = |from: PathBuf| {
        let plan = dir.join("plan.json");
        let args = ["run", plan.to_str().unwrap(), "--steps", "1", "--json", "--init", from.to_str().unwrap()];
        common::json_lines(&common::dplan_ok(&args))[0]["loss"].as_f64().unwrap()
    };
    let second = again(out.clone());
    assert!(second < first, "{first}, then {second}");
    assert_eq!(second, again(out.join("model.safetensors.index.json")));
}

#[test]
fn weights_without_a_layout_are_cut_into_files_of_the_size_asked_for() {
    let dir = common::scratch("published-cut");
    let whole = dir.join("whole.safetensors");
    let cut = dir.join("cut");
    let plan = common::small_plan(&dir, "dp=2,zero=3", 2, "f32");
    for (save, more) in [(whole.display().to_string(), vec![]), (format!("{}/", cut.display()), vec!["--shard-size", "8KiB"])] {
        let args = ["run", plan.to_str().unwrap(), "--steps", "2", "--json", "--save", &save];
        common::dplan_ok(&[&args[..], &more].concat());
    }
    let index: serde_json::Value = serde_json::from_slice(&fs::read(cut.join("model.safetensors.index.json")).unwrap()).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    let mut files: Vec<String> = map.values().map(|f| f.as_str().unwrap().to_string()).collect();
    files.sort();
    files.dedup();
    assert!(files.len() > 3, "{files:?}");
    let (one, many) = (tensors(&dir, &["whole.safetensors".into()]), tensors(&cut, &files));
    assert_eq!(map.keys().collect::<Vec<_>>(), many.keys().collect::<Vec<_>>());
    assert!(one == many);
    let total: usize = many.values().map(|t| t.1.len()).sum();
    assert_eq!(index["metadata"]["total_size"].as_u64(), Some(total as u64));
}
