//! Damaged model files never panic: each is read, or refused with a message.

mod damage;

use damage::{Random, damage, seeds};
use dplan::import::{self, ImportOptions};

#[test]
fn damaged_models_never_panic() {
    let seeds = seeds();
    let (mut read, mut refused) = (0, 0);
    for case in 0..6000u64 {
        let mut random = Random(case);
        let mut text = seeds[random.below(seeds.len())].clone().into_bytes();
        for _ in 0..=random.below(3) {
            damage(&mut text, &mut random);
        }
        let result = std::panic::catch_unwind(|| {
            let model = import::model_from_bytes("damaged.json", &text, &ImportOptions::default())?;
            // Whatever is read can also be trained.
            dplan_ir::grad::differentiate(&model.graph).unwrap_or_else(|e| panic!("{e}"));
            Ok::<_, import::ImportError>(model)
        });
        match result {
            Ok(Ok(_)) => read += 1,
            Ok(Err(e)) => {
                refused += 1;
                assert!(e.to_string().starts_with("damaged.json"), "case {case}: {e}");
            }
            Err(_) => panic!("case {case} panicked on\n{}", String::from_utf8_lossy(&text)),
        }
    }
    // Both happen, or the damage is not worth its name.
    assert!(read > 300 && refused > 300, "{read} read, {refused} refused");
}

#[test]
fn random_bytes_never_panic() {
    for case in 0..2000u64 {
        let mut random = Random(case);
        let text: Vec<u8> = (0..random.below(60)).map(|_| b"{}[]\",:0123456789.eE-+truefalsnNI\\u \n\xff\x00"[random.below(39)]).collect();
        assert!(import::model_from_bytes("random.json", &text, &ImportOptions::default()).is_err());
    }
}
