//! Every format gives the same sequences, and bad files are refused by place.

use super::*;

fn file(name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("dplan-data-{}-{name}", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    path
}

fn sequence(source: &TokenSource, number: u64) -> (Vec<i32>, Vec<i32>) {
    let (mut tokens, mut targets) = (vec![0; source.seq as usize], vec![0; source.seq as usize]);
    source.sequence(number, &mut tokens, &mut targets);
    (tokens, targets)
}

/// Ten tokens 0 … 9 in each format; sequences of 3: [0 1 2], [3 4 5], [6 7 8] with the targets one further.
#[test]
fn all_formats_give_the_same_sequences_and_wrap_around() {
    let u16s: Vec<u8> = (0..10u16).flat_map(u16::to_le_bytes).collect();
    let u32s: Vec<u8> = (0..10u32).flat_map(u32::to_le_bytes).collect();
    let llm_c = |magic: i32, body: &[u8]| {
        let mut bytes = vec![0u8; 1024];
        bytes[..4].copy_from_slice(&magic.to_le_bytes());
        bytes[8..12].copy_from_slice(&10i32.to_le_bytes());
        [bytes, body.to_vec()].concat()
    };
    let cases = [
        ("t.txt", (0..10).collect::<Vec<u8>>(), 256),
        ("nano.bin", u16s.clone(), 50257),
        ("wide.bin", u32s.clone(), 50257),
        ("wider.bin", u32s.clone(), 128256),
        ("gpt2.bin", llm_c(20_240_520, &u16s), 50257),
        ("llama3.bin", llm_c(20_240_801, &u32s), 128256),
    ];
    for (name, bytes, vocab) in cases {
        let path = file(name, &bytes);
        let source = TokenSource::open(&path, vocab, 3, 2).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(source.sequences(), 3, "{name}");
        assert_eq!(sequence(&source, 1), (vec![3, 4, 5], vec![4, 5, 6]), "{name}");
        assert_eq!(sequence(&source, 2), (vec![6, 7, 8], vec![7, 8, 9]), "{name}");
        assert_eq!(sequence(&source, 3), sequence(&source, 0), "{name}");
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn json_rows_come_as_they_are() {
    let path = file("rows.json", br#"{"tokens": [[[1,2,3],[4,5,6]], [[7,8,9],[10,11,12]]]}"#);
    let source = TokenSource::open(&path, 13, 2, 2).unwrap();
    assert_eq!(sequence(&source, 2), (vec![7, 8], vec![8, 9]));
    assert_eq!(sequence(&source, 5), (vec![4, 5], vec![5, 6]));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn bad_data_is_refused_naming_the_place() {
    let cases: [(&str, &[u8], u64, &str); 8] = [
        ("a.txt", b"abcdz", 122, "position 4 is 122"),
        ("b.txt", b"abc", 256, "has 3 tokens; one sequence of 3 needs 4"),
        ("c.bin", &[1, 0, 2, 0, 3], 256, "not made of whole 2-byte tokens"),
        ("d.bin", &[1, 0, 2, 0, 9, 1, 3, 0, 4, 0], 256, "position 2 is 265"),
        ("e.json", b"{\"tokens\": [[[1,2,3]]]}", 256, "`$.tokens[0]` has 1 rows; it should be as many as the batch: 2"),
        ("f.json", b"{\"tokens\": [[[1,2,3,4],[1,2,3]]]}", 256, "`$.tokens[0][1]` has 3 tokens"),
        ("g.json", b"{\"tokens\": [[[1,2,3,4],[1,2,3,300]]]}", 256, "`$.tokens[0][1][3]` is 300"),
        ("h.json", b"{\"tokens\": [[[1,2,3", 256, "cut short"),
    ];
    for (name, bytes, vocab, message) in cases {
        let path = file(name, bytes);
        let error = TokenSource::open(&path, vocab, 3, 2).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains(name), "{error}");
        std::fs::remove_file(path).unwrap();
    }
    assert!(TokenSource::open(Path::new("/nowhere/x.txt"), 256, 3, 2).unwrap_err().to_string().contains("/nowhere/x.txt: cannot be read"));
}

/// A Megatron pair: documents [0 1 2 3], [4 5 6], [7 8 9] of one sequence each.
fn megatron(name: &str, code: u8, tokens: &[u8], damage: impl Fn(&mut Vec<u8>)) -> std::path::PathBuf {
    let size = tokens.len() as i64 / 10;
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1u64.to_le_bytes());
    index.push(code);
    index.extend(3u64.to_le_bytes());
    index.extend(4u64.to_le_bytes());
    index.extend([4i32, 3, 3].iter().flat_map(|n| n.to_le_bytes()));
    index.extend([0i64, 4 * size, 7 * size].iter().flat_map(|n| n.to_le_bytes()));
    index.extend([0i64, 1, 2, 3].iter().flat_map(|n| n.to_le_bytes()));
    damage(&mut index);
    file(&format!("{name}.idx"), &index);
    file(&format!("{name}.bin"), tokens)
}

#[test]
fn megatron_pairs_are_one_stream_over_their_documents() {
    let types: [(u8, Vec<u8>); 6] = [
        (1, (0..10u8).collect()),
        (2, (0..10u8).collect()),
        (3, (0..10i16).flat_map(i16::to_le_bytes).collect()),
        (4, (0..10i32).flat_map(i32::to_le_bytes).collect()),
        (5, (0..10i64).flat_map(i64::to_le_bytes).collect()),
        (8, (0..10u16).flat_map(u16::to_le_bytes).collect()),
    ];
    for (code, tokens) in types {
        let bin = megatron(&format!("mega{code}"), code, &tokens, |_| {});
        for path in [bin.clone(), bin.with_extension("idx")] {
            let source = TokenSource::open(&path, 50257, 3, 2).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!((source.tokens(), source.sequences()), (10, 3), "type {code}");
            assert_eq!(sequence(&source, 2), (vec![6, 7, 8], vec![7, 8, 9]), "type {code}");
        }
    }
}

#[test]
fn megatron_pairs_that_disagree_are_refused() {
    let sound: Vec<u8> = (0..10u16).flat_map(u16::to_le_bytes).collect();
    let cases: [(&str, &dyn Fn(&mut Vec<u8>), &str); 6] = [
        ("short", &|i| i.truncate(60), "it says that it lists 3 sequences and 4 documents; it has 60 bytes"),
        ("magic", &|i| i[0] = b'X', "not a Megatron index"),
        ("float", &|i| i[17] = 7, "code 7, which is no integer"),
        ("version", &|i| i[9] = 2, "version 2"),
        ("hole", &|i| i[34 + 12 + 8] += 2, "sequence 1 begins at byte 10, the ones before it end at 8"),
        ("long", &|i| i[34 + 8] = 5, "the header promises 12 tokens; the file has room for 10"),
    ];
    for (name, damage, message) in cases {
        let path = megatron(&format!("bad-{name}"), 8, &sound, damage);
        let error = TokenSource::open(&path, 50257, 3, 2).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    // A negative token of a signed type is no token.
    let negative: Vec<u8> = (0..10i16).map(|i| if i == 6 { -1 } else { i }).flat_map(i16::to_le_bytes).collect();
    let path = megatron("negative", 3, &negative, |_| {});
    assert!(TokenSource::open(&path, 100_000, 3, 2).unwrap_err().to_string().contains("position 6 is 65535"));
}

#[test]
fn an_empty_file_is_too_short() {
    let path = file("empty.txt", b"");
    assert!(TokenSource::open(&path, 256, 3, 2).unwrap_err().to_string().contains("has 0 tokens"));
}
