//! Whatever happens to files on disk is detected, named, and the last checkpoint that is whole is used.

mod common;
mod damage;

use std::fs;
use std::path::{Path, PathBuf};

use damage::Random;
use dplan::checkpoint::find;
use dplan::checkpoint::manifest::Manifest;

/// Three checkpoints of a small run: after steps 2, 4 and 6.
fn saved(name: &str) -> PathBuf {
    let dir = common::scratch(name);
    let plan = common::small_plan(&dir, "dp=2,tp=2,zero=1", 4, "f32");
    let ckpt = dir.join("ckpt");
    let args = ["run", plan.to_str().unwrap(), "--steps", "6", "--every", "2", "--checkpoint", ckpt.to_str().unwrap(), "--json"];
    common::dplan_ok(&args);
    ckpt
}

fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() { copy(&path, &target) } else { fs::copy(&path, &target).map(drop).unwrap() }
    }
}

fn shards(checkpoint: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        fs::read_dir(checkpoint).unwrap().map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    all.sort();
    all
}

#[test]
fn all_damage_is_named_and_the_checkpoint_before_is_used() {
    let sound = saved("damage");
    let broken = sound.with_file_name("broken");
    assert_eq!(shards(&sound.join("step-00000006")).len(), 4, "every rank writes its part");
    let cases: [(&str, &dyn Fn(&Path), &[&str]); 12] = [
        (
            "a truncated shard",
            &|c| fs::File::options().write(true).open(&shards(c)[1]).unwrap().set_len(1000).unwrap(),
            &["rank-00001.safetensors", "has 1000 bytes"],
        ),
        ("a missing shard", &|c| fs::remove_file(&shards(c)[2]).unwrap(), &["rank-00002.safetensors", "is missing"]),
        ("a flipped bit", &|c| flip(&shards(c)[3], 5000), &["rank-00003.safetensors", "changed since it was written"]),
        ("swapped shards", &|c| swap(&shards(c)[0], &shards(c)[1]), &["rank-00000.safetensors", "has 27640 bytes, the manifest says 52024"]),
        ("an extra tensor", &|c| extra_tensor(&shards(c)[0]), &["rank-00000.safetensors", ", the manifest says 52024"]),
        (
            "a shard of an older step",
            &|c| fs::copy(c.with_file_name("step-00000004").join("rank-00000.safetensors"), &shards(c)[0]).map(drop).unwrap(),
            &["rank-00000.safetensors", "changed since it was written"],
        ),
        ("a flipped bit of the manifest", &|c| flip(&c.join("manifest.json"), 300), &["manifest.json", "damaged"]),
        (
            "a manifest cut short",
            &|c| fs::File::options().write(true).open(c.join("manifest.json")).unwrap().set_len(500).unwrap(),
            &["manifest.json", "damaged"],
        ),
        ("an empty manifest", &|c| fs::write(c.join("manifest.json"), "").unwrap(), &["manifest.json", "damaged"]),
        ("a missing manifest", &|c| fs::remove_file(c.join("manifest.json")).unwrap(), &["manifest.json"]),
        ("a missing checkpoint", &|c| fs::remove_dir_all(c).unwrap(), &["`latest` names step-00000006", "step-00000004"]),
        (
            "a folder of nothing",
            &|c| {
                fs::remove_dir_all(c).unwrap();
                fs::create_dir(c).unwrap()
            },
            &["step-00000006", "manifest.json"],
        ),
    ];
    for (what, damage, said) in cases {
        copy(&sound, &broken);
        damage(&broken.join("step-00000006"));
        let found = find(&broken).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(found.checkpoint.position().step, 4, "{what}");
        let notes = found.notes.join("\n");
        assert!(said.iter().all(|s| notes.contains(s)), "{what}: {notes}");
    }
    // Where all are damaged, all are named, and nothing is loaded.
    copy(&sound, &broken);
    for step in ["step-00000002", "step-00000004", "step-00000006"] {
        flip(&shards(&broken.join(step))[0], 4000);
    }
    let error = find(&broken).unwrap_err().to_string();
    assert!(error.contains("step-00000002") && error.contains("step-00000004") && error.contains("step-00000006"), "{error}");
}

#[test]
fn a_stale_pointer_is_noticed() {
    let sound = saved("stale");
    let stale = sound.with_file_name("stale");
    for (text, said) in
        [("step-00000002\n", "`latest` names step-00000002"), ("step-00000099\n", "`latest` names step-00000099"), ("", "`latest` names ")]
    {
        copy(&sound, &stale);
        fs::write(stale.join("latest"), text).unwrap();
        let found = find(&stale).unwrap();
        assert_eq!(found.checkpoint.position().step, 6);
        assert!(found.notes.join("\n").contains(said) && found.notes.join("\n").contains("step-00000006"), "{:?}", found.notes);
    }
    fs::remove_file(stale.join("latest")).unwrap();
    let found = find(&stale).unwrap();
    assert!(found.checkpoint.position().step == 6 && found.notes[0].contains("`latest` cannot be read"));
}

/// Any one bit of any file.
#[test]
fn no_flipped_bit_is_loaded() {
    let sound = saved("bits");
    let broken = sound.with_file_name("broken");
    copy(&sound, &broken);
    let checkpoint = broken.join("step-00000006");
    let mut files = shards(&checkpoint);
    files.push(checkpoint.join("manifest.json"));
    let manifest = Manifest::read(&checkpoint).unwrap();
    let mut random = Random(1);
    for case in 0..400 {
        let file = &files[case % files.len()];
        let size = fs::metadata(file).unwrap().len() as usize;
        let at = random.below(size * 8);
        flip(file, at);
        match find(&broken) {
            Ok(found) => {
                // White space of the manifest outside of its sealed body may change without a change of meaning.
                let unchanged = || file.ends_with("manifest.json") && Manifest::read(&checkpoint).unwrap() == manifest;
                assert!(found.checkpoint.position().step == 4 || unchanged(), "bit {at} of {}", file.display());
            }
            Err(error) => panic!("bit {at} of {}: {error}", file.display()),
        }
        flip(file, at);
    }
    assert_eq!(find(&broken).unwrap().checkpoint.position().step, 6);
}

fn flip(file: &Path, bit: usize) {
    let mut bytes = fs::read(file).unwrap();
    bytes[bit / 8] ^= 1 << (bit % 8);
    fs::write(file, bytes).unwrap();
}

fn swap(a: &Path, b: &Path) {
    let aside = a.with_extension("aside");
    fs::rename(a, &aside).and_then(|()| fs::rename(b, a)).and_then(|()| fs::rename(&aside, b)).unwrap();
}

/// The same file with a tensor more, sound in itself.
fn extra_tensor(file: &Path) {
    let bytes = fs::read(file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<(String, safetensors::tensor::TensorView<'_>)> = tensors.tensors();
    all.push(("param:surplus".into(), safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &[0; 4]).unwrap()));
    let written = safetensors::serialize(all, None).unwrap();
    fs::write(file, written).unwrap();
}
