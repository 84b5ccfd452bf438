//! Model files, and seeded damage to them.
#![allow(dead_code)]

use std::path::Path;

/// Sound model files of every kind.
pub fn seeds() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let own = ["examples/two-branch.json", "examples/experts.json", "examples/llama-1m/config.json"]
        .map(|p| std::fs::read_to_string(root.join(p)).unwrap());
    let small = [
        r#"{"model_type": "gpt2", "vocab_size": 11, "n_positions": 4, "n_embd": 6, "n_layer": 2, "n_head": 3, "n_inner": 5}"#,
        r#"{"model_type": "qwen3", "vocab_size": 11, "max_position_embeddings": 64, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "use_sliding_window": true, "max_window_layers": 1,
            "rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16}}"#,
        r#"{"model_type": "mixtral", "vocab_size": 11, "max_position_embeddings": 4, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}"#,
    ];
    own.into_iter().chain(small.map(String::from)).collect()
}

/// Seeded, so that a failure can be run again.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^ (x >> 29)
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// What numbers and strings are replaced by.
const WORDS: [&str; 26] = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "-1",
    "64",
    "257",
    "1e308",
    "-0.0",
    "0.5",
    "18446744073709551615",
    "1099511627776",
    "99999999999999999999",
    "null",
    "true",
    "NaN",
    "-Infinity",
    "\"\"",
    "\"bsh,hf->bsf\"",
    "\"bse,e->bs\"",
    "\"h\"",
    "\"batch\"",
    "[]",
    "{}",
    "[1,[2]]",
];

/// Damages a text in one place.
pub fn damage(text: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(text.len());
    match random.below(8) {
        0 => text.truncate(at),
        1 => {
            if let Some(byte) = text.get_mut(at) {
                *byte = random.next() as u8;
            }
        }
        2 => {
            let end = (at + random.below(40)).min(text.len());
            text.drain(at..end);
        }
        3 => {
            let end = (at + random.below(200)).min(text.len());
            let copy = text[at..end].to_vec();
            let to = random.below(text.len());
            text.splice(to..to, copy);
        }
        // Most damage keeps the JSON whole: a value becomes another.
        _ => {
            let tokens = scalars(text);
            if tokens.is_empty() {
                return;
            }
            let (from, to) = tokens[random.below(tokens.len())];
            let word = if random.below(3) == 0 {
                let (a, b) = tokens[random.below(tokens.len())];
                text[a..b].to_vec()
            } else {
                WORDS[random.below(WORDS.len())].as_bytes().to_vec()
            };
            text.splice(from..to, word);
        }
    }
}

/// Where strings and numbers stand.
fn scalars(text: &[u8]) -> Vec<(usize, usize)> {
    let (mut found, mut at) = (Vec::new(), 0);
    while at < text.len() {
        let start = at;
        if text[at] == b'"' {
            at += 1;
            while at < text.len() && text[at] != b'"' {
                at += 1;
            }
            at = (at + 1).min(text.len());
            found.push((start, at));
        } else if text[at].is_ascii_digit() || text[at] == b'-' {
            while at < text.len() && (text[at].is_ascii_alphanumeric() || b".-+".contains(&text[at])) {
                at += 1;
            }
            found.push((start, at));
        } else {
            at += 1;
        }
    }
    found
}
