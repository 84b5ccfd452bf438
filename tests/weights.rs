//! Weights survive reading and writing, and files that do not match the model are refused by name.

mod common;
mod damage;

use std::path::{Path, PathBuf};

use damage::Random;
use dplan::export;
use dplan::import::weights::Weights;
use dplan::import::{self, ImportOptions, Model};
use dplan::safetensors::TensorFile;
use dplan_ir::dtype::DType;

/// A tiny model of each kind of piece: fused projections (gpt2), whole tensors (llama), stacked experts (mixtral).
const CONFIGS: [&str; 3] = [
    r#"{"model_type": "gpt2", "vocab_size": 11, "n_positions": 4, "n_embd": 6, "n_layer": 2, "n_head": 3}"#,
    r#"{"model_type": "llama", "vocab_size": 11, "max_position_embeddings": 4, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true}"#,
    r#"{"model_type": "mixtral", "vocab_size": 11, "max_position_embeddings": 4, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}"#,
];

#[test]
fn written_weights_read_back_equal() {
    for (i, config) in CONFIGS.iter().enumerate() {
        let model = model(config);
        let path = scratch(&format!("round-{i}.safetensors"));
        for dtype in [DType::F64, DType::F32, DType::Bf16, DType::F16] {
            save(&model, &path, dtype);
            let weights = Weights::open(&path).unwrap();
            weights.check(&model.graph).unwrap_or_else(|e| panic!("{e}"));
            for param in model.graph.params.ids() {
                // Small integers are exact in every type.
                assert_eq!(weights.param::<f64>(&model.graph, param).unwrap(), elements(&model, param.0));
            }
        }
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn fused_projection_interleaves_query_key_and_value() {
    let model = model(CONFIGS[0]);
    let path = scratch("fused.safetensors");
    save(&model, &path, DType::F32);
    let file = TensorFile::open(&path).unwrap();
    let entry = &file.tensors["transformer.h.0.attn.c_attn.weight"];
    assert_eq!(entry.shape, [6, 18]);
    let bytes = file.bytes(entry).unwrap();
    // Row 0 is q's first 6 elements, then k's, then v's.
    let row: Vec<f64> = (0..18).map(|i| dplan::safetensors::decode(DType::F32, &bytes, i)).collect();
    let part = |label: &str| {
        let graph = &model.graph;
        let param =
            graph.params.ids().find(|&p| graph.values[graph.params[p].value].name.ends_with(&format!("h.0.attn.c_attn.weight.{label}"))).unwrap();
        elements(&model, param.0)[..6].to_vec()
    };
    assert_eq!(row, [part("q"), part("k"), part("v")].concat());
    std::fs::remove_file(path).unwrap();
}

#[test]
fn reference_weights_fit_and_are_written_back_identically() {
    let Some(shared) = common::shared() else { return };
    for name in ["gpt2", "llama", "llama-tied", "mixtral"] {
        let dir = shared.join("oracle").join(name);
        let model = import::model(&dir, &ImportOptions::default()).unwrap();
        let weights = Weights::open(&dir.join("weights.safetensors")).unwrap();
        weights.check(&model.graph).unwrap_or_else(|e| panic!("{e}"));
        let copy = scratch(&format!("copy-{name}.safetensors"));
        export::weights::save(&copy, &model.graph, DType::F32, |p| weights.param::<f32>(&model.graph, p).map_err(std::io::Error::other)).unwrap();
        let (old, new) = (TensorFile::open(&dir.join("weights.safetensors")).unwrap(), TensorFile::open(&copy).unwrap());
        assert_eq!(old.tensors.keys().collect::<Vec<_>>(), new.tensors.keys().collect::<Vec<_>>());
        for (tensor, entry) in &old.tensors {
            assert_eq!(entry.shape, new.tensors[tensor].shape);
            assert!(old.bytes(entry).unwrap() == new.bytes(&new.tensors[tensor]).unwrap(), "{name}: {tensor}");
        }
        std::fs::remove_file(copy).unwrap();
    }
}

/// Hand-made files against the tied llama: what is changed in the list of tensors, and what the refusal says.
#[test]
fn files_that_do_not_match_are_refused_by_name() {
    let model = model(CONFIGS[1]);
    let path = scratch("match.safetensors");
    save(&model, &path, DType::F32);
    let sound: Vec<(String, Vec<u64>, Vec<u8>)> = {
        let file = TensorFile::open(&path).unwrap();
        file.tensors.iter().map(|(n, e)| (n.clone(), e.shape.clone(), file.bytes(e).unwrap())).collect()
    };
    let embedding = sound.iter().find(|t| t.0 == "model.embed_tokens.weight").unwrap().clone();
    let norm = "model.norm.weight";
    let named = |name: &str, t: &(String, Vec<u64>, Vec<u8>)| (name.to_string(), t.1.clone(), t.2.clone());
    let with = |more: Vec<(String, Vec<u64>, Vec<u8>)>| [sound.clone(), more].concat();
    let cases: Vec<(Vec<(String, Vec<u64>, Vec<u8>)>, Option<&str>)> = vec![
        (sound.iter().filter(|t| t.0 != norm).cloned().collect(), Some("tensor `model.norm.weight` is missing")),
        (with(vec![named("model.surplus", &embedding)]), Some("tensor `model.surplus` is not in the model")),
        (
            sound.iter().map(|t| if t.0 == norm { (t.0.clone(), vec![2, 4], t.2.clone()) } else { t.clone() }).collect(),
            Some("tensor `model.norm.weight` has shape [2, 4]; the model has [8]"),
        ),
        (with(vec![named("lm_head.weight", &embedding)]), None),
        (with(vec![(("lm_head.weight").into(), embedding.1.clone(), vec![1; embedding.2.len()])]), Some("tensor `lm_head.weight` is different")),
        (with(vec![("model.layers.0.self_attn.rotary_emb.inv_freq".into(), vec![1], vec![0; 4])]), None),
        (sound.iter().map(|t| named(t.0.trim_start_matches("model."), t)).collect(), None),
    ];
    for (tensors, message) in cases {
        write(&path, &tensors);
        let result = Weights::open(&path).unwrap().check(&model.graph);
        match (result, message) {
            (Ok(()), None) => {}
            (Err(e), Some(m)) => assert!(e.to_string().contains(m), "{e}"),
            (result, message) => panic!("{result:?} where {message:?} was expected"),
        }
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn malformed_files_are_refused() {
    let path = scratch("malformed.safetensors");
    let header = |text: &str, body: usize| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &vec![0; body]].concat();
    let cases = [
        (vec![], "0 bytes"),
        (vec![255; 8], "it says that its header has"),
        (header(r#"{"a": {"dtype": "F32""#, 0), "not valid JSON"),
        (header(r#"{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}"#, 4), "as long as F32 [2]"),
        (header(r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}"#, 4), "`$.a.data_offsets[1]` is 8"),
        (header(r#"{"a": {"dtype": "F32", "shape": [18446744073709551615, 2], "data_offsets": [0, 4]}}"#, 4), "as long as"),
        (
            header(
                r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}"#,
                4,
            ),
            "`a` and `b` overlap",
        ),
    ];
    for (bytes, message) in cases {
        std::fs::write(&path, bytes).unwrap();
        let error = Weights::open(&path).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains("malformed.safetensors"), "{error}");
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn damaged_files_never_panic() {
    let model = model(CONFIGS[1]);
    let path = scratch("damaged.safetensors");
    save(&model, &path, DType::F32);
    let sound = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(sound[..8].try_into().unwrap()) as usize;
    let mut refused = 0;
    for case in 0..300 {
        let mut random = Random(case);
        let mut head = sound[8..header].to_vec();
        damage::damage(&mut head, &mut random);
        head.resize(header - 8, b' ');
        let mut bytes = [&sound[..8], &head, &sound[header..]].concat();
        if random.below(4) == 0 {
            bytes[random.below(8)] = random.next() as u8;
        }
        std::fs::write(&path, bytes).unwrap();
        let read = Weights::open(&path).and_then(|w| {
            w.check(&model.graph)?;
            model.graph.params.ids().try_for_each(|p| w.param::<f32>(&model.graph, p).map(drop))
        });
        refused += usize::from(read.is_err());
    }
    assert!(refused > 100, "{refused} refused");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_failed_save_leaves_the_old_file() {
    let model = model(CONFIGS[1]);
    let path = scratch("kept.safetensors");
    std::fs::write(&path, b"old").unwrap();
    let mut count = 0;
    let failed = export::weights::save::<f32>(&path, &model.graph, DType::F32, |p| {
        count += 1;
        if count > 3 { Err(std::io::Error::other("no more")) } else { Ok(vec![0.0; elements(&model, p.0).len()]) }
    });
    assert_eq!(failed.unwrap_err().to_string(), "no more");
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    std::fs::remove_file(&path).unwrap();
    let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().filter_map(|e| e.ok()).collect();
    assert!(left.iter().all(|e| !e.file_name().to_string_lossy().contains("kept.safetensors")));
}

fn model(config: &str) -> Model {
    import::model_from_bytes("tiny.json", config.as_bytes(), &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"))
}

/// Distinct small integers, different from parameter to parameter.
fn elements(model: &Model, param: u32) -> Vec<f64> {
    let graph = &model.graph;
    let shape = graph.shape(graph.params.values().nth(param as usize).unwrap().value);
    (0..shape.iter().product::<u64>()).map(|i| ((i * 7 + u64::from(param) * 31) % 251) as f64).collect()
}

fn save(model: &Model, path: &Path, dtype: DType) {
    export::weights::save(path, &model.graph, dtype, |p| Ok(elements(model, p.0))).unwrap();
}

fn write(path: &Path, tensors: &[(String, Vec<u64>, Vec<u8>)]) {
    let list: Vec<(String, DType, Vec<u64>)> = tensors.iter().map(|t| (t.0.clone(), DType::F32, t.1.clone())).collect();
    let (mut bytes, begins) = dplan::safetensors::header(&list);
    for (tensor, begin) in tensors.iter().zip(begins) {
        assert_eq!(bytes.len() as u64, begin);
        bytes.extend_from_slice(&tensor.2);
    }
    std::fs::write(path, bytes).unwrap();
}

fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("dplan-weights-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir.join(name)
}
