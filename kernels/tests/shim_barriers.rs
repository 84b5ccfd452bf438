//! The shim finds what a kernel lacks: each barrier of each family's text is taken out, one at a time, and the run must say so or compute something else.

mod shim;

use dplan_ir::dtype::DType;
use dplan_ir::op::{Attention, Mask, Op};
use dplan_ir::program::Write;
use dplan_kernels::cuda::Launch;
use dplan_kernels::shim::Library;
use dplan_kernels::trial::flat;
use shim::{Case, Prepared, Random, folder, letter, make, spec};

/// Results are added to what is there.
fn case(op: Op, ins: &[usize], outs: &[usize], letters: Vec<(char, u64, u64, u64)>, dtype: DType) -> Case {
    Case { write: Write::Add, ..shim::case(op, ins, outs, letters, dtype) }
}

/// A case for each text that has barriers of its own.
fn cases() -> Vec<Case> {
    let heads = |d| vec![letter('b', 1), letter('s', 100), letter('t', 100), letter('g', 1), letter('r', 2), letter('d', d), letter('e', d)];
    let attention = Attention { mask: Mask::CAUSAL, scale: 0.4 };
    let mlp = || vec![letter('b', 1), letter('s', 70), letter('h', 100), letter('f', 70)];
    let moe = || vec![letter('b', 1), letter('s', 300), letter('e', 3), letter('h', 8), letter('f', 8)];
    let tokens = || vec![('v', 0, 7, 7), letter('b', 2), letter('s', 300), letter('h', 9)];
    vec![
        case(Op::Attention(attention), &[5, 4, 4], &[5, 4], heads(8), DType::F32),
        case(Op::AttentionGrad(attention), &[5, 4, 4, 5, 4, 5], &[5, 4, 4], heads(8), DType::F32),
        case(Op::Attention(attention), &[5, 4, 4], &[5, 4], heads(16), DType::Bf16),
        case(Op::AttentionGrad(attention), &[5, 4, 4, 5, 4, 5], &[5, 4, 4], heads(16), DType::Bf16),
        case(Op::Einsum(spec("bsh", "fh", "bsf")), &[3, 2], &[3], mlp(), DType::F32),
        case(Op::Einsum(spec("bsh", "fh", "bsf")), &[3, 2], &[3], mlp(), DType::Bf16),
        case(Op::EmbedGrad, &[2, 3], &[2], tokens(), DType::F32),
        case(Op::Dispatch, &[3, 3], &[4], moe(), DType::F32),
        case(Op::Capacity { tokens: 120 }, &[3], &[3], vec![letter('a', 1), letter('b', 300), letter('c', 3)], DType::F32),
    ]
}

/// Parts of attention joined where the left one lies: a warp reads what it writes over.
fn join(random: &mut Random) -> Prepared {
    let over = |p: &Prepared| {
        let several = || p.starts[1].values().len() > 8 && p.starts[0].values().len() > 40 * p.starts[1].values().len();
        p.write == Write::Add && p.routine.launches[0].entry == "dp_join_attention" && several()
    };
    (0..1000).map(|_| flat::joins(random)).find(over).expect("among so many there is one")
}

/// The case with the barrier at `at` of one launch's text taken out.
fn without<'a>(p: &'a Prepared, launch: usize, at: usize, barrier: &str) -> Damaged<'a> {
    let mut launches = p.routine.launches.clone();
    launches[launch].text.replace_range(at..at + barrier.len(), ";");
    Damaged { of: p, launches, launch, at }
}

/// A case with a damaged launch.
struct Damaged<'a> {
    of: &'a Prepared,
    launches: Vec<Launch>,
    launch: usize,
    at: usize,
}

/// Of a block, and of a warp.
const BARRIERS: [&str; 2] = ["__syncthreads();", "__syncwarp();"];

#[test]
fn a_barrier_that_is_taken_out_is_missed() {
    let Some(dir) = folder("shim_barriers") else { return };
    let mut random = Random(5);
    let mut prepared: Vec<Prepared> = cases().iter().map(|c| make(c, &mut random)).collect();
    prepared.push(join(&mut random));
    let mut damaged: Vec<Damaged<'_>> = Vec::new();
    for p in &prepared {
        for (launch, l) in p.routine.launches.iter().enumerate() {
            // A barrier inside the other kernel of a text is that kernel's.
            let start = l.text.find(&format!("({})(", l.entry)).expect("its own kernel");
            let end = l.text[start + 1..].find("DP_KERNEL").map_or(l.text.len(), |e| start + 1 + e);
            for barrier in BARRIERS {
                damaged.extend(l.text[start..end].match_indices(barrier).map(|(at, _)| without(p, launch, start + at, barrier)));
            }
        }
    }
    let sound = prepared.iter().flat_map(|p| &p.routine.launches);
    let library = Library::compile(&dir, "barriers", sound.chain(damaged.iter().flat_map(|d| &d.launches))).unwrap_or_else(|e| panic!("{e}"));
    let mut missed = Vec::new();
    for d in &damaged {
        let (want, _) = d.of.run(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", d.of.name));
        let noticed = match d.of.run_launches(&library, &d.launches, 1) {
            Err(_) => true,
            Ok((outs, _)) => outs.iter().zip(&want).any(|(x, y)| x.bytes() != y.bytes()),
        };
        if !noticed {
            let text = &d.of.routine.launches[d.launch].text;
            let line = text[..d.at].lines().count();
            missed.push(format!("{}, line {line} of its text", d.of.routine.launches[d.launch].entry));
        }
    }
    println!("{} of {} missing barriers noticed; not: {missed:?}", damaged.len() - missed.len(), damaged.len());
    assert!(damaged.len() >= 20, "only {} barriers to take out", damaged.len());
    assert!(missed.len() * 20 <= damaged.len(), "{} of {} missing barriers went unnoticed: {missed:?}", missed.len(), damaged.len());
}
