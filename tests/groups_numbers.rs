//! Bug groups of `docs/bugs.md`, the last part: numbers that overflow, sizes beyond 32 bits, what is computed again, and random numbers.

mod common;
mod groups;

use dplan::compile::compile;
use dplan::import::{ImportOptions, model_from_bytes};
use dplan::planfile::PlanFile;
use dplan::runtime::loss_scale::{LossScale, Outcome};
use dplan::runtime::{Order, Rows, Session};
use dplan_ir::dtype::DType;
use dplan_ir::init;
use dplan_ir::optimizer::{Optimizer, StepScalars};
use dplan_ir::plan::Recompute;
use dplan_ir::program::Role;
use dplan_kernels::cuda::flat::{self, Update};
use dplan_kernels::cuda::{Alignment, Arg, Launch, Routine};
use dplan_planner::machine::{DeviceSpec, Machine};
use dplan_planner::units::Bytes;
use groups::{BATCH, HYPER, LLAMA, MIXTRAL, SEQ, batch, changed, divisor, import, import_as, plan, session, train, with};

/// All that training changes, as bits.
fn state(session: &mut Session) -> Vec<u64> {
    let roles = [Role::Param, Role::Master, Role::Moment1, Role::Moment2];
    roles.iter().flat_map(|&role| session.gather(role).unwrap().values().flatten().map(|x| x.to_bits()).collect::<Vec<_>>()).collect()
}

/// Group 30 (DeepSpeed#8035, #1599): one infinite gradient poisons moments and master weights; a loss scale that has fallen to 1 stays there.
#[test]
fn group_30_an_infinite_gradient_leaves_no_trace_and_a_loss_scale_rises_again() {
    for (compute, exponent) in [(DType::Bf16, 200), (DType::F16, 60), (DType::F32, 200)] {
        for (ranks, pins) in [(1, "dp=1"), (4, "dp=4,zero=3"), (4, "dp=2,pp=2,zero=1,micro=1"), (2, "dp=2,zero=2,offload=optimizer")] {
            let file = plan(&import_as(LLAMA, compute), ranks, pins);
            let mut session = session(&file, Order::Eager);
            let data = batch(&file.graph, 0);
            let step = |session: &mut Session, update: u64, exponent: i32| {
                let plain = StepScalars::new(HYPER, update, 1.0 / divisor(&file.graph, &data));
                session.step(&StepScalars { loss_scale: f64::from(exponent).exp2(), ..plain }, &data).unwrap()
            };
            step(&mut session, 1, 0);
            let before = state(&mut session);
            let infinite = step(&mut session, 2, exponent);
            assert!(infinite.grad_norm.is_some_and(|n| !n.is_finite()) && infinite.loss.is_finite(), "{compute} {pins}: {infinite:?}");
            assert!(state(&mut session) == before, "{compute} {pins}: an infinite gradient left a trace");
            let next = step(&mut session, 2, 0);
            assert!(next.grad_norm.is_some_and(f64::is_finite) && state(&mut session) != before, "{compute} {pins}: {next:?}");
        }
    }
    let mut scale = (0..100).fold(LossScale::default(), |scale, _| scale.after(Outcome::Overflow, 10));
    assert_eq!(scale.value(), 1.0);
    for _ in 0..30 {
        scale = scale.after(Outcome::Finite, 10);
    }
    assert_eq!(scale.value(), 8.0);
}

/// What an integer constant of a kernel's text is.
fn constant(launch: &Launch, name: &str) -> u64 {
    let line = launch.text.lines().find_map(|line| line.strip_prefix(&format!("constexpr int {name} = "))?.strip_suffix(';'));
    line.and_then(|value| value.parse().ok()).unwrap_or(1)
}

/// The stretches of a launch of an optimizer's kernel, and the elements of one of its blocks as a power of two: its last arguments.
fn stretches(launch: &Launch) -> (u32, Vec<(u64, u64)>) {
    let numbers: Vec<u64> = launch.args.iter().filter_map(|arg| if let Arg::Int(n) = arg { Some(*n as u64) } else { None }).collect();
    let Some((shift, table)) = numbers.split_first() else { panic!("{:?}", launch.args) };
    assert!(table.len() == 3 * 16 && launch.args[launch.args.len() - numbers.len()..].iter().all(|arg| matches!(arg, Arg::Int(_))));
    (*shift as u32, table.chunks(3).filter(|s| s[0] < s[1]).map(|s| (s[0], s[1])).collect())
}

/// Group 31 (TransformerEngine#2918, apex#1825): a tensor of more than 2³¹ − 1 elements in a kernel that counts in 32 bits. No test has the memory to train one;
/// sizes and places in the program, arguments and grids of the kernels are those of 64 bits.
#[test]
fn group_31_more_than_two_to_the_31_elements_are_counted_in_64_bits() {
    let config = r#""vocab_size":200000,"hidden_size":16384,"head_dim":64,"num_attention_heads":1,"num_key_value_heads":1,"num_hidden_layers":1,"intermediate_size":64"#;
    let options = ImportOptions { seq: Some(8), compute: DType::Bf16, family: None };
    let model = model_from_bytes("config.json", with(LLAMA, config).as_bytes(), &options).unwrap().graph;
    let mut wide = common::options("h100:2x1", BATCH, DType::Bf16, "dp=2,zero=0,micro=4");
    let roomy = |machine: &Machine| Machine { device: DeviceSpec { memory: Bytes(1 << 42), ..machine.device.clone() }, ..machine.clone() };
    wide.cluster = wide.cluster.map(roomy, |link| link);
    let program = compile(&model, &wide).unwrap_or_else(|e| panic!("{e}")).file.program;
    let stage = &program.stages[0];
    let (id, bucket) = stage.buckets.iter().find(|(_, b)| b.elems > i32::MAX as u64).expect("one of more than 2^31 elements");
    assert!(bucket.elems >= 200_000 * 16_384);
    for (role, size) in [(Role::Param, 2), (Role::Master, 4), (Role::Grad, 4), (Role::Moment1, 4), (Role::Moment2, 4)] {
        let home = &stage.buffers[stage.home(id, role).unwrap()];
        assert!(home.bytes == bucket.elems * size && home.offset + home.bytes <= stage.arena_bytes, "{}: {home:?}", role.name());
    }
    let n = bucket.elems;
    let update = |optimizer: Optimizer| {
        let stretches = [(0..n - 4096, true), (n - 4096..n, false)];
        let (state, grad, scale, alignment) = (DType::F32, DType::F32, Some(DType::F32), Alignment::Packs);
        let trust = flat::Trust { sums: DType::F32, members: &[0, 1] };
        let (ratios, param, stretches) = (Some(trust).filter(|_| optimizer.trusts()), Some(DType::Bf16), &stretches);
        let sums = flat::trust_sums(&flat::TrustSums { state, grad, scale, alignment, stretches, trust, parameters: 2 });
        (flat::update(&Update { optimizer, state, grad, param, scale, n, alignment, stretches, trust: ratios }), sums)
    };
    for optimizer in Optimizer::ALL {
        let (Routine { launches, .. }, sums) = update(optimizer);
        let mut done = 0;
        for launch in &launches {
            let (shift, stretches) = stretches(launch);
            let (threads, vec) = (u64::from(launch.threads), constant(launch, "VEC"));
            assert!(threads * vec >= 1 << shift, "{threads} threads for 2^{shift} elements");
            let mut blocks = 0;
            for (begin, end) in stretches {
                assert_eq!(begin, done);
                (done, blocks) = (end, blocks + (end - begin).div_ceil(1 << shift));
            }
            assert_eq!(u64::from(launch.grid), blocks);
        }
        assert_eq!(done, n);
        for launch in &sums.launches[..2] {
            let (shift, stretches) = stretches(launch);
            let elems: u64 = stretches.iter().map(|(begin, end)| end - begin).sum();
            let blocks: u64 = stretches.iter().map(|(begin, end)| (end - begin).div_ceil(1 << shift)).sum();
            // First the sums of parts, then one block for each parameter.
            assert_eq!(elems, n);
            assert_eq!(u64::from(launch.grid), if launch.entry == "dp_trust" { blocks } else { stretches.len() as u64 });
        }
    }
    let sum = &flat::square_sum(DType::F32, DType::F32, n).launches[0];
    let [.., Arg::Int(elems), Arg::Int(stretch)] = sum.args[..] else { panic!("{:?}", sum.args) };
    assert!(elems as u64 == n && u64::from(sum.grid) * stretch as u64 >= n);
    // No kernel multiplies the number of its block, or adds to it, in 32 bits.
    let texts = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/src/cuda/text");
    let mut blocks = 0;
    for file in std::fs::read_dir(texts).unwrap().map(|e| e.unwrap().path()) {
        for line in std::fs::read_to_string(&file).unwrap().lines().filter(|l| l.contains("blockIdx.x")) {
            let short = line.replace("i64(blockIdx.x)", "");
            let alone = short.contains("i64 ") && short.contains("= blockIdx.x;") || short.contains("(out, blockIdx.x,");
            assert!(!short.contains("blockIdx.x") || alone, "{}: {line}", file.display());
            blocks += 1;
        }
    }
    assert!(blocks > 30);
}

/// Group 32 (OLMo-core#828, pytorch#190758): what is computed again in the backward pass is not what it was. (There with another dropout mask.)
#[test]
fn group_32_what_is_computed_again_has_the_same_bits() {
    for (config, ranks, pins) in
        [(LLAMA, 1, "micro=4"), (LLAMA, 4, "tp=2,pp=2,micro=2,sp=on"), (MIXTRAL, 4, "dp=2,ep=2,tp=2,micro=2"), (LLAMA, 4, "dp=2,cp=2,zero=3")]
    {
        let kept = plan(&import(config), ranks, &format!("{pins},recompute=none"));
        let want = train(&kept, Order::Eager);
        for recompute in [Recompute::Selective, Recompute::Full] {
            let again = changed(&kept, |file| file.plan.options.iter_mut().for_each(|o| o.recompute = recompute));
            assert!(again.program != kept.program && train(&again, Order::Eager) == want, "{pins}: {recompute:?}");
        }
    }
}

/// The tokens of a step, each sequence in its logical order.
fn in_order(file: &PlanFile) -> Vec<Vec<i32>> {
    let tokens = |rows: &Rows| match rows {
        Rows::Tokens(tokens) => {
            let mut logical = tokens.clone();
            for (row, sequence) in logical.chunks_mut(SEQ as usize).zip(tokens.chunks(SEQ as usize)) {
                (0..SEQ).for_each(|at| row[file.graph.order.position(at, SEQ) as usize] = sequence[at as usize]);
            }
            logical
        }
        Rows::Values(_) => unreachable!("tokens and targets"),
    };
    batch(&file.graph, 1).inputs.iter().map(tokens).collect()
}

/// Group 33 (Megatron-LM#1256): random numbers depend on how the sequence, or the weights, are split.
#[test]
fn group_33_random_numbers_belong_to_logical_elements() {
    for (config, ways) in [
        (LLAMA, &[(1, "dp=1"), (4, "tp=4,sp=on"), (4, "dp=2,pp=2,zero=3,micro=1"), (2, "cp=2"), (2, "pp=2,schedule=zb-v,micro=1")][..]),
        (MIXTRAL, &[(4, "dp=4,ep=4"), (4, "dp=2,ep=2,tp=2,zero=1")]),
    ] {
        let one = plan(&import(config), 1, "dp=1,micro=8");
        for &(ranks, pins) in ways {
            let file = plan(&import(config), ranks, pins);
            let mut session = session(&file, Order::Eager);
            let drawn = session.params().unwrap();
            for (param, values) in init::params(&file.graph, groups::SEED).iter() {
                assert!(values.data == drawn[param], "{pins}: {}", groups::name(&file.graph, param));
            }
            // And so does random data: put back in logical order it is the same in every plan.
            assert!(in_order(&file) == in_order(&one), "{pins}");
        }
    }
}
