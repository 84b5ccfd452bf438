//! A checkpoint is the logical state: saved under any plan, resumed under any other, it is the same bits, and training goes on as if nothing had happened.

mod common;
#[path = "common/megatron.rs"]
mod megatron;

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use dplan::checkpoint::manifest::Manifest;
use dplan::checkpoint::store::{About, Stage};
use dplan::checkpoint::writer::{Mode, Observer};
use dplan::checkpoint::{CheckpointError, Position, Store, Writer, find};
use dplan::compile::compile;
use dplan::data::SequenceOrder;
use dplan::feed::{Batches, Feed};
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::runtime::{Options, Session};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::grad::differentiate;
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};
use dplan_ir::plan::Recompute;
use dplan_ir::program::Role;
use dplan_planner::lower;
use megatron::Shape;

const BATCH: u64 = 8;
const SEED: u64 = 5;
/// Steps before the checkpoint, and after it.
const BEFORE: u64 = 3;
const AFTER: u64 = 5;

/// Odd sizes, so that everything is padded: 3 heads of keys, a vocabulary of 37, a tied head.
const LLAMA: &str = r#"{"model_type":"llama","vocab_size":37,"hidden_size":24,"intermediate_size":40,"num_hidden_layers":4,"num_attention_heads":6,"num_key_value_heads":3,"max_position_embeddings":16,"tie_word_embeddings":true}"#;
const MIXTRAL: &str = r#"{"model_type":"mixtral","vocab_size":36,"hidden_size":16,"intermediate_size":12,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"num_local_experts":4,"num_experts_per_tok":2,"max_position_embeddings":16,"sliding_window":null}"#;

const SHAPES: [Shape; 14] = [
    Shape::ONE,
    Shape { micro: 2, ..Shape::ONE },
    Shape { dp: 2, micro: 4, ..Shape::ONE },
    Shape { dp: 4, zero: 1, micro: 2, ..Shape::ONE },
    Shape { dp: 4, zero: 2, micro: 1, ..Shape::ONE },
    Shape { dp: 8, zero: 3, micro: 1, ..Shape::ONE },
    Shape { tp: 2, sequence: true, ..Shape::ONE },
    Shape { tp: 4, ..Shape::ONE },
    Shape { pp: 2, micro: 2, ..Shape::ONE },
    Shape { pp: 4, micro: 1, ..Shape::ONE },
    Shape { dp: 2, tp: 2, pp: 2, zero: 1, micro: 2, sequence: true, ..Shape::ONE },
    Shape { tp: 2, pp: 2, micro: 4, recompute: Recompute::Full, ..Shape::ONE },
    Shape { dp: 2, pp: 2, zero: 3, micro: 2, ..Shape::ONE },
    Shape { dp: 2, tp: 3, zero: 2, micro: 4, ..Shape::ONE },
];

/// Plans with dimensions that Megatron's shapes do not have: context and expert parallel. Ranks, pins.
const CONTEXTS: [Way; 4] = [
    Way::Pinned(2, "cp=2"),
    Way::Pinned(4, "cp=4,zero=3"),
    Way::Pinned(4, "dp=2,cp=2,zero=2,recompute=selective"),
    Way::Pinned(8, "cp=2,tp=2,pp=2,sp=on,recompute=full"),
];
/// States that wait in host memory, and virtual stages: a rank's layers are not next to each other.
const PLACES: [Way; 3] = [
    Way::Pinned(2, "dp=2,zero=1,offload=optimizer"),
    Way::Pinned(2, "pp=2,schedule=interleaved,virtual=2,micro=2"),
    Way::Pinned(2, "pp=2,schedule=zb-v,micro=1"),
];
const EXPERTS: [Way; 5] = [
    Way::Pinned(2, "dp=2,ep=2"),
    Way::Pinned(4, "dp=4,ep=2,zero=1"),
    Way::Pinned(4, "dp=4,ep=4,zero=3"),
    Way::Pinned(4, "dp=2,ep=2,cp=2"),
    Way::Pinned(8, "dp=2,ep=2,tp=2,pp=2,zero=2,recompute=full"),
];
const DENSE: [Way; 4] = [Way::Pinned(1, "dp=1,tp=1"), Way::Pinned(4, "dp=2,tp=2,zero=1"), Way::Pinned(4, "dp=4,zero=3"), Way::Pinned(4, "cp=2,pp=2")];

/// Trust ratios of whole parameters, of parameters in blocks, in pieces, in both, and of states that wait in host memory.
const LAMB: [Way; 6] = [
    Way::Lamb(1, "dp=1"),
    Way::Lamb(2, "dp=2,zero=0"),
    Way::Lamb(4, "dp=4,zero=3"),
    Way::Lamb(2, "tp=2"),
    Way::Lamb(8, "dp=2,tp=2,pp=2,zero=2"),
    Way::Lamb(2, "cp=2,zero=1,offload=optimizer"),
];

/// How a plan is made.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Way {
    Shape(Shape),
    /// So many ranks, and pins.
    Pinned(u64, &'static str),
    /// The same, trained by LAMB.
    Lamb(u64, &'static str),
}

struct Case {
    way: Way,
    session: Session,
    feed: Feed,
    position: Position,
}

/// The roles of all parameters, as bits.
type State = Vec<Table<ParamId, Vec<u64>>>;

impl Case {
    fn new(config: &str, shape: Shape, compute: DType) -> Case {
        Case::planned(config, Way::Shape(shape), compute)
    }
    fn planned(config: &str, way: Way, compute: DType) -> Case {
        let options = ImportOptions { seq: Some(8), compute, family: None };
        let mut forward = model_from_bytes("config.json", config.as_bytes(), &options).unwrap().graph;
        let (graph, program) = match way {
            Way::Shape(shape) => {
                forward.set_batch(shape.dp * shape.micro);
                let graph = differentiate(&forward).unwrap();
                let program = lower::lower(&graph, &megatron::plan(&graph, shape, BATCH)).unwrap_or_else(|e| panic!("{shape:?}: {e}"));
                (graph, program)
            }
            Way::Pinned(ranks, pins) | Way::Lamb(ranks, pins) => {
                let mut options = common::options(&format!("cpu:{ranks}"), BATCH, compute, pins);
                if matches!(way, Way::Lamb(..)) {
                    options.optimizer = Optimizer::Lamb;
                }
                let file = compile(&forward, &options).unwrap_or_else(|e| panic!("{pins}: {e}")).file;
                (file.graph, file.program)
            }
        };
        let feed = Feed::new(&graph, None, BATCH, SEED).unwrap();
        let mut session = Session::new(graph, program, &Options::default()).unwrap_or_else(|e| panic!("{way:?}: {e}"));
        session.initialise(SEED).unwrap();
        Case { way, session, feed, position: Position { seed: SEED, ..Position::default() } }
    }

    fn step(&mut self) -> f64 {
        let hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.9, clip: 1.0 };
        let scalars = StepScalars::new(hyper, self.position.updates + 1, 1.0 / self.feed.targets() as f64);
        let loss = self.session.step(&scalars, &Arc::new(self.feed.at(self.position.sequences))).unwrap().loss;
        let Position { step, updates, sequences, .. } = self.position;
        self.position = Position { step: step + 1, updates: updates + 1, sequences: sequences + BATCH, ..self.position };
        loss
    }
    fn steps(&mut self, n: u64) -> Vec<f64> {
        (0..n).map(|_| self.step()).collect()
    }

    fn state(&mut self) -> State {
        let mut bits = |role| self.session.gather(role).unwrap().map(|_, v: &Vec<f64>| v.iter().map(|x| x.to_bits()).collect());
        vec![bits(Role::Param), bits(Role::Moment1), bits(Role::Moment2)]
    }

    fn writer(&self, dir: &Path, mode: Mode, observe: Observer) -> Writer {
        let about = About { model: "test".into(), optimizer: "adamw".into(), plan: 0, ranks: 0, data: None };
        Writer::start(&self.session, Arc::new(Store::open(dir, 3).unwrap()), about, mode, observe).unwrap()
    }
    fn save(&mut self, dir: &Path) {
        let position = self.position;
        self.writer(dir, Mode::Waiting, Box::new(|_| {})).save(&mut self.session, position).unwrap().expect("it waits");
    }
    fn load(&mut self, dir: &Path) -> Result<(), CheckpointError> {
        let found = find(dir)?;
        assert_eq!(found.notes, [""; 0]);
        found.checkpoint.load(&mut self.session)?;
        self.position = found.checkpoint.position();
        Ok(())
    }
}

/// What a plan saved: how it was made, the folder, the state, and the losses of the steps that followed.
type SavedBy = (Way, PathBuf, State, Vec<f64>);

fn saved_by_all(config: &str, name: &str, compute: DType, ways: &[Way]) -> Vec<SavedBy> {
    let dir = common::scratch(name);
    let one = |(i, &way): (usize, &Way)| {
        let mut case = Case::planned(config, way, compute);
        case.steps(BEFORE);
        let path = dir.join(i.to_string());
        case.save(&path);
        let state = case.state();
        (way, path, state, case.steps(AFTER))
    };
    ways.iter().enumerate().map(one).collect()
}

/// Resumes what others saved, bit by bit; then losses differ from those of the run that saved by at most `noise`, and by nothing if the plan is the same.
fn resume_all(config: &str, compute: DType, way: Way, all: &[SavedBy], noise: f64) {
    let mut case = Case::planned(config, way, compute);
    for (saved_by, path, state, losses) in all {
        case.load(path).unwrap_or_else(|e| panic!("{saved_by:?} to {way:?}: {e}"));
        assert_eq!(case.position, Position { step: BEFORE, updates: BEFORE, sequences: BEFORE * BATCH, seed: SEED, ..Position::default() });
        assert!(case.state() == *state, "the state of {saved_by:?} is another under {way:?}");
        let next = case.steps(AFTER);
        for (at, (x, y)) in next.iter().zip(losses).enumerate() {
            assert!((x / y - 1.0).abs() < noise, "{saved_by:?} to {way:?}, step {at}: {x} against {y}");
        }
        if case.way == *saved_by {
            assert_eq!(next, *losses, "{way:?}, resumed under itself");
        }
    }
}

/// Every plan resumes what every plan saved.
#[test]
fn any_plan_resumes_what_any_plan_saved() {
    let ways: Vec<Way> = SHAPES.into_iter().map(Way::Shape).collect();
    let all = saved_by_all(LLAMA, "resume-matrix", DType::F64, &ways);
    for &way in &ways {
        resume_all(LLAMA, DType::F64, way, &all, 1e-12);
    }
    // None went another way than one rank did.
    for (way, _, _, losses) in &all {
        assert!(losses.iter().zip(&all[0].3).all(|(x, y)| (x / y - 1.0).abs() < 1e-12), "{way:?}");
    }
}

/// Splits of contexts and of experts, other places and other orders, among each other and with some of the shapes above.
#[test]
fn contexts_experts_offloaded_states_and_virtual_stages_resume_under_other_plans() {
    for (config, name, ways, shapes) in [
        (LLAMA, "resume-contexts", [&CONTEXTS[..], &PLACES].concat(), &[0, 5, 10][..]),
        (MIXTRAL, "resume-experts", EXPERTS.to_vec(), &[0, 3, 6, 10, 12]),
    ] {
        let ways: Vec<Way> = ways.into_iter().chain(shapes.iter().map(|&i| Way::Shape(SHAPES[i]))).collect();
        let all = saved_by_all(config, name, DType::F64, &ways);
        for &way in &ways {
            resume_all(config, DType::F64, way, &all, 1e-12);
        }
    }
}

/// How far LAMB goes follows from what is saved: ratios are no state.
#[test]
fn lamb_resumes_under_other_plans() {
    let all = saved_by_all(LLAMA, "resume-lamb", DType::F64, &LAMB);
    for way in LAMB {
        resume_all(LLAMA, DType::F64, way, &all, 1e-12);
    }
    let adam = saved_by_all(LLAMA, "resume-adam", DType::F64, &[Way::Pinned(1, "dp=1")]);
    for (way, _, _, losses) in &all {
        assert!(losses.iter().zip(&all[0].3).all(|(x, y)| (x / y - 1.0).abs() < 1e-12), "{way:?}");
        assert!(losses.iter().zip(&adam[0].3).all(|(x, y)| (x / y - 1.0).abs() > 1e-6), "{way:?} trains as AdamW does");
    }
}

/// The state of a 16-bit plan is its masters, to which no plan adds a rounding: also plans of other precisions resume it bit by bit, and the losses that follow are near.
#[test]
fn plans_of_sixteen_bits_resume_under_other_splits_and_precisions() {
    let saved = |compute: DType| saved_by_all(LLAMA, &format!("resume-{compute}"), compute, &DENSE);
    let (short, long) = (saved(DType::Bf16), saved(DType::F32));
    for way in DENSE {
        resume_all(LLAMA, DType::Bf16, way, &short, 0.02);
    }
    let near = |compute, all: &[SavedBy], way| {
        all.iter().filter(|s| s.0 != way).for_each(|s| resume_all(LLAMA, compute, way, std::slice::from_ref(s), 0.02))
    };
    near(DType::F32, &short, DENSE[1]);
    near(DType::Bf16, &long, DENSE[2]);
}

/// Group 25 (pytorch/torchtitan#3065, microsoft/PyMarlin#80): saving or loading hangs when ranks have unequal parts, or none; an epoch's end leaves ranks
/// with unequal numbers of batches. Here more ranks than a bucket has elements to give them, save and load, and the data ends in mid-step.
#[test]
fn group_25_unequal_parts_and_the_end_of_an_epoch_hang_nobody() {
    let (done, wait) = mpsc::channel();
    std::thread::spawn(move || {
        let dir = common::scratch("group-25");
        let shape = Shape { dp: 8, tp: 3, zero: 3, micro: 1, ..Shape::ONE };
        let mut case = Case::new(LLAMA, shape, DType::F64);
        case.steps(1);
        let before = case.state();
        case.save(&dir);
        case.steps(2);
        case.load(&dir).unwrap();
        assert!(case.state() == before);
        // 3 whole sequences and some tokens, in steps of 8.
        let text = dir.join("text");
        std::fs::write(&text, (0..30u8).collect::<Vec<_>>()).unwrap();
        case.feed = Feed::new(case.session.graph(), Some(&text), BATCH, SEED).unwrap();
        case.steps(3);
        done.send(()).unwrap();
    });
    wait.recv_timeout(std::time::Duration::from_secs(120)).expect("it hangs, or failed above");
}

/// Group 26 (Megatron-LM#6920, #761, #1842): a resumed run silently trains another model, because something was not loaded. Here what is missing, of another
/// shape, or left over is an error that names it; moments and the count of updates come back, without which the next losses differ.
#[test]
fn group_26_nothing_is_silently_left_out() {
    let dir = common::scratch("group-26");
    let mut case = Case::new(LLAMA, SHAPES[3], DType::F64);
    case.steps(BEFORE);
    case.save(&dir);
    let expected = case.steps(AFTER);
    let refused = |config: &str, said: &[&str]| {
        let error = Case::new(config, Shape::ONE, DType::F64).load(&dir).unwrap_err().to_string();
        assert!(said.iter().all(|s| error.contains(s)), "{error}");
    };
    let layers = |n: u64| LLAMA.replace(r#""num_hidden_layers":4"#, &format!(r#""num_hidden_layers":{n}"#));
    refused(&layers(5), &["param of `model.layers.4.", "is in the model, but not in the checkpoint"]);
    refused(&layers(3), &["param of `model.layers.3.", "is in the checkpoint, but not in the model (and "]);
    refused(&LLAMA.replace(r#""intermediate_size":40"#, r#""intermediate_size":48"#), &["has shape [40, 24]; the model has [48, 24]"]);
    refused(&LLAMA.replace(r#","tie_word_embeddings":true"#, ""), &["param of `lm_head.weight`", "not in the checkpoint"]);
    // Each part of the state matters: to forget it would show.
    for forgotten in [Role::Moment1, Role::Moment2, Role::Param] {
        let mut other = Case::new(LLAMA, SHAPES[8], DType::F64);
        other.load(&dir).unwrap();
        let sizes: Vec<usize> = case.session.params().unwrap().values().map(Vec::len).collect();
        other.session.load(forgotten, |p| vec![0.5; sizes[p.0 as usize]]).unwrap();
        assert!(other.steps(AFTER) != expected, "{forgotten:?}");
    }
    let mut other = Case::new(LLAMA, SHAPES[8], DType::F64);
    other.load(&dir).unwrap();
    other.position.updates = 0;
    let forgot = other.steps(AFTER);
    assert!(forgot.iter().zip(&expected).any(|(x, y)| (x / y - 1.0).abs() > 1e-6), "the count of updates");
}

/// Group 27 (DeepSpeed#7601): parts come back in each other's places. Here a manifest that says so, sealed and with sound files, is refused by the
/// tensor's fingerprint.
#[test]
fn group_27_a_part_in_the_wrong_place_is_refused() {
    let dir = common::scratch("group-27");
    let mut case = Case::new(LLAMA, Shape { tp: 4, ..Shape::ONE }, DType::F64);
    case.steps(1);
    case.save(&dir);
    let folder = find(&dir).unwrap().checkpoint.folder().to_path_buf();
    let sound = Manifest::read(&folder).unwrap();
    let mut swapped = 0;
    for tensor in 0..sound.tensors.len() {
        let mut manifest = sound.clone();
        let mut parts: Vec<&mut Vec<u64>> = manifest
            .shards
            .iter_mut()
            .flat_map(|s| &mut s.parts)
            .filter(|p| p.tensor == tensor && p.shape.iter().product::<u64>() == p.count)
            .map(|p| &mut p.start)
            .collect();
        let [first, second, ..] = &mut parts[..] else { continue };
        std::mem::swap(*first, *second);
        std::fs::write(folder.join("manifest.json"), manifest.seal()).unwrap();
        let mark = &sound.tensors[tensor];
        match find(&dir).and_then(|found| found.checkpoint.load(&mut case.session)) {
            Ok(()) => panic!("{} of `{}` with its parts swapped was loaded", mark.role, mark.name),
            Err(error) => {
                let error = error.to_string();
                // Where the blocks differ in size, the files themselves do not fit.
                assert!(error.contains(&mark.name) && error.contains("fingerprint") || error.contains("expected"), "{error}");
                swapped += 1;
            }
        }
    }
    assert!(swapped > 40, "{swapped} tensors had parts to swap");
    std::fs::write(folder.join("manifest.json"), sound.seal()).unwrap();
    case.load(&dir).unwrap();
}

/// Group 28 (pytorch/pytorch#144657, KempnerForge#102): an asynchronous save stores later values; `latest` moves before the data is durable. Here the writer is
/// held while steps go on, and each stage is looked at from outside.
#[test]
fn group_28_a_saved_value_never_belongs_to_a_later_step_and_latest_moves_last() {
    let dir = common::scratch("group-28");
    let mut case = Case::new(LLAMA, SHAPES[3], DType::F64);
    case.steps(1);
    case.save(&dir);
    let (reached, stages) = mpsc::channel();
    let (go, may) = mpsc::channel::<()>();
    let hold = move |stage: Stage| {
        reached.send(stage).unwrap();
        may.recv().unwrap();
    };
    case.steps(1);
    let mut writer = case.writer(&dir, Mode::Background, Box::new(hold));
    let (saved, at) = (case.state(), case.position);
    assert_eq!(writer.save(&mut case.session, at).unwrap(), None);
    // The writer has the snapshot and has not written a byte; the steps change every value.
    assert_eq!(stages.recv().unwrap(), Stage::Begun);
    case.steps(2);
    let later = case.state();
    assert!(later.iter().zip(&saved).all(|(l, s)| l.values().zip(s.values()).all(|(x, y)| x != y)));
    let (new, latest) = (dir.join("step-00000002"), dir.join("latest"));
    let names = |what: &str| std::fs::read_to_string(&latest).unwrap().trim() == what;
    for (stage, there, moved) in [(Stage::Synced, false, false), (Stage::Renamed, true, false), (Stage::Latest, true, true)] {
        go.send(()).unwrap();
        assert_eq!(stages.recv().unwrap(), stage);
        assert_eq!((new.exists(), names("step-00000002")), (there, moved), "{stage:?}");
        assert!(dir.join("step-00000001").exists() && (moved || names("step-00000001")), "{stage:?}");
        // At any of these instants, a run that begins finds a whole checkpoint.
        let expected = if there { 2 } else { 1 };
        assert_eq!(find(&dir).unwrap().checkpoint.position().step, expected, "{stage:?}");
    }
    go.send(()).unwrap();
    assert_eq!(stages.recv().unwrap(), Stage::Pruned);
    go.send(()).unwrap();
    assert_eq!(writer.wait().unwrap().map(|s| s.step), Some(2));
    drop(writer);
    case.load(&dir).unwrap();
    assert!(case.position == at && case.state() == saved, "what was saved is not what was there");
}

/// Group 29 (Megatron-Bridge#5637, verl#7401, accelerate#2016): samples are skipped or repeated when dp changes, or at the end of an epoch. Here the
/// sequences that a run takes are the same ones however often it is resumed and whatever its batch is then.
#[test]
fn group_29_no_sequence_is_skipped_or_repeated() {
    let dir = common::scratch("group-29");
    let text = dir.join("text");
    // 37 sequences of 8, all different.
    std::fs::write(&text, (0..37 * 8 + 1u32).map(|i| (i * i % 31 + i / 60) as u8).collect::<Vec<_>>()).unwrap();
    let feed = |batch: u64, order: SequenceOrder| {
        let options = ImportOptions { seq: Some(8), compute: DType::F64, family: None };
        let graph = differentiate(&model_from_bytes("config.json", LLAMA.as_bytes(), &options).unwrap().graph).unwrap();
        Feed::new(&graph, Some(&text), batch, SEED).unwrap().in_order(order)
    };
    let sequences = |batch: &dplan::runtime::Batch| match &batch.inputs[0] {
        dplan::runtime::Rows::Tokens(t) => t.chunks(8).map(<[i32]>::to_vec).collect::<Vec<_>>(),
        dplan::runtime::Rows::Values(_) => unreachable!(),
    };
    for order in [SequenceOrder::File, SequenceOrder::Shuffled { seed: SEED }] {
        let one = Arc::new(feed(1, order));
        let mut all = Batches::start(&one, 0).unwrap();
        let whole: Vec<Vec<i32>> = (0..120).flat_map(|_| sequences(&all.take().unwrap().1)).collect();
        // Each epoch has each sequence once.
        for epoch in whole.chunks_exact(37) {
            let mut sorted = epoch.to_vec();
            sorted.sort();
            sorted.dedup();
            assert_eq!(sorted.len(), 37);
        }
        // Resumed with other batches, some of which straddle the ends of epochs.
        let mut taken = Vec::new();
        for (batch, steps) in [(8, 2), (6, 3), (4, 1), (16, 3), (1, 5)] {
            let mut batches = Batches::start(&Arc::new(feed(batch, order)), taken.len() as u64).unwrap();
            for _ in 0..steps {
                let (begins, next) = batches.take().unwrap();
                assert_eq!(begins, taken.len() as u64);
                taken.extend(sequences(&next));
            }
        }
        assert!(taken == whole[..taken.len()], "{order:?}");
    }
}
