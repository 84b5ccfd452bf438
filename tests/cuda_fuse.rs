//! Which instructions ranks on GPUs do in the kernel of a product before them: those of real plans, and not where anything else would see the difference.

mod common;

use dplan::planfile::PlanFile;
use dplan::runtime::cuda::fuse::{Buffers, Chain};
use dplan::runtime::cuda::load::{Action, load};
use dplan::runtime::view::View;
use dplan_ir::entity::{EventId, SegmentId};
use dplan_ir::op::{Activation, Op};
use dplan_ir::optimizer::DecayGroups;
use dplan_ir::program::{Content, Instr, Issue, Program, SegmentKind, Stream, Write};
use dplan_kernels::cuda::arch::Arch;
use dplan_kernels::cuda::{Tail, Target};

/// A model with biases and an activation that is not gated, which is computed again on the way back.
fn gpt2(name: &str, pins: &str, ranks: u32) -> PlanFile {
    let dir = common::scratch(name);
    let config = dir.join("config.json");
    let text = r#"{"model_type":"gpt2","vocab_size":96,"n_embd":16,"n_layer":2,"n_head":4,"n_positions":16}"#;
    std::fs::write(&config, text).unwrap();
    let plan = dir.join("plan.json");
    let (config, cluster, out) = (config.display().to_string(), format!("cpu:{ranks}"), plan.display().to_string());
    common::dplan_ok(&["compile", &config, "--cluster", &cluster, "--batch", "8", "--seq", "8", "--pin", pins, "-o", &out]);
    PlanFile::read(&plan).unwrap()
}

fn chains(file: &PlanFile, program: &Program, kind: SegmentKind) -> (SegmentId, Vec<Chain>) {
    let view = View { graph: &file.graph, program, stage: 0, local_rank: 0 };
    let (segment, _) = program.stages[0].segments.iter().find(|(_, s)| s.kind == kind).unwrap();
    (segment, Buffers::new(&view).chains(segment))
}

fn tails(chains: &[Chain]) -> Vec<Vec<Tail>> {
    chains.iter().map(|c| c.steps.iter().map(|s| s.tail).collect()).collect()
}

#[test]
fn biases_activations_and_sums_follow_their_products() {
    let f = Activation::GeluTanh;
    // How many of an activation's product, or of its bias where it is kept for the way back, and of sums behind a bias.
    let cases = [
        ("dp=1,recompute=full", vec![Tail::Bias, Tail::Act(f)], 2, 4),
        ("dp=1,recompute=none", vec![Tail::Bias], 8, 4),
        // Where ranks sum a product before its bias, nothing follows it.
        ("tp=2,sp=off", vec![Tail::Bias], 10, 2),
    ];
    for (pins, up, ups, sums) in cases {
        let ranks = if pins.starts_with("tp") { 2 } else { 1 };
        let file = gpt2(&format!("fuse_{}", pins.replace([',', '='], "_")), pins, ranks);
        let (_, forward) = chains(&file, &file.program, SegmentKind::Forward);
        let (_, back) = chains(&file, &file.program, SegmentKind::BackwardLast);
        let (forward, back) = (tails(&forward), tails(&back));
        println!("{pins}: {forward:?}, {back:?}");
        let count = |of: &[Vec<Tail>], tails: &[Tail]| of.iter().filter(|t| t[..] == *tails).count();
        assert_eq!((count(&forward, &up), count(&forward, &[Tail::Bias, Tail::Add])), (ups, sums), "{forward:?}");
        assert_eq!(count(&back, &[Tail::ActGrad(f)]), 2, "{back:?}");
        assert!(back.iter().any(|t| t.contains(&Tail::Add)), "{back:?}");
        // There is a kernel for each of them.
        let code = load(&file.graph, &file.program, 0, 0, DecayGroups::All, Target::of(Arch::Sm80)).unwrap();
        let within = code.segments.iter().flatten().filter(|(_, action)| matches!(action, Action::Within(_))).count();
        let all: usize = file.program.stages[0]
            .segments
            .ids()
            .map(|id| {
                let view = View { graph: &file.graph, program: &file.program, stage: 0, local_rank: 0 };
                Buffers::new(&view).chains(id).iter().map(|c| c.steps.len()).sum::<usize>()
            })
            .sum();
        assert!(within == all && within > 0, "{within} of {all}");
    }
}

/// Somebody who would see the difference, one at a time.
#[test]
fn what_somebody_else_would_see_is_left_alone() {
    let file = gpt2("fuse_seen", "dp=1,recompute=none", 1);
    let (segment, sound) = chains(&file, &file.program, SegmentKind::Forward);
    let chain = sound.iter().find(|c| tails(std::slice::from_ref(c)) == [[Tail::Bias, Tail::Add]]).unwrap();
    let (product, bias, sum) = (chain.product, chain.steps[0].at, chain.steps[1].at);
    let run = |program: &Program, at: usize| match &program.stages[0].segments[segment].body[at].instr {
        Instr::Run { node, ins, outs, .. } => (*node, ins.clone(), outs[0]),
        other => panic!("{other:?}"),
    };
    let (_, operands, result) = run(&file.program, product);
    let (biased, total) = (run(&file.program, bias).2, run(&file.program, sum).2);
    let issue = |stream, instr| Issue { stream, instr };
    let compute = |instr| issue(Stream::Compute, instr);
    let insert = |program: &mut Program, at: usize, instr: Issue| program.stages[0].segments[segment].body.insert(at, instr);
    let damages: Vec<(&str, usize, Box<dyn Fn(&mut Program)>)> = vec![
        ("a second reader of what is between", 0, Box::new(|p| insert(p, sum + 1, compute(Instr::AddInto { src: result, dst: total })))),
        ("a second reader of what is behind the bias", 1, Box::new(|p| insert(p, sum + 1, compute(Instr::AddInto { src: biased, dst: total })))),
        (
            "a message that sends it",
            0,
            Box::new(|p| {
                insert(p, bias, issue(Stream::SendForward, Instr::Send { to: 1, channel: dplan_ir::program::Channel::Forward, src: result }))
            }),
        ),
        ("another call that finds it", 0, Box::new(|p| insert(p, 0, compute(Instr::AddInto { src: result, dst: total })))),
        (
            "another segment that finds it",
            0,
            Box::new(|p| {
                let (other, _) = p.stages[0].segments.iter().find(|(_, s)| s.kind == SegmentKind::Update).unwrap();
                p.stages[0].segments[other].body.insert(0, compute(Instr::AddInto { src: result, dst: total }));
            }),
        ),
        ("an operand that is written between", 0, Box::new(|p| insert(p, bias, compute(Instr::Zero { dst: operands[0] })))),
        ("streams that are told that the product is over", 0, Box::new(|p| insert(p, bias, compute(Instr::Record(EventId(0)))))),
        ("streams that are told before the sum", 1, Box::new(|p| insert(p, sum, compute(Instr::Record(EventId(0)))))),
        (
            "a product that is added to what was there",
            0,
            Box::new(|p| match &mut p.stages[0].segments[segment].body[product].instr {
                Instr::Run { write, .. } => *write = Write::Add,
                other => panic!("{other:?}"),
            }),
        ),
        ("a sum on another stream", 1, Box::new(|p| p.stages[0].segments[segment].body[sum].stream = Stream::Comm)),
        ("a result over an operand", 1, Box::new(|p| p.stages[0].buffers[total].offset = p.stages[0].buffers[operands[0]].offset)),
        (
            "another name for what is between",
            0,
            Box::new(|p| {
                let copy = p.stages[0].buffers[result].clone();
                p.stages[0].buffers.push(copy);
            }),
        ),
    ];
    for (what, left, damage) in damages {
        let mut program = file.program.clone();
        damage(&mut program);
        let (_, found) = chains(&file, &program, SegmentKind::Forward);
        // The product, by what it writes: places have moved.
        let steps = found.iter().find(|c| run(&program, c.product).2 == result).map_or(0, |c| c.steps.len());
        assert_eq!(steps, left, "{what}");
    }
    // What changes nothing for the chain changes nothing.
    let mut program = file.program.clone();
    insert(&mut program, bias, issue(Stream::Comm, Instr::Record(EventId(0))));
    insert(&mut program, bias, compute(Instr::Wait(EventId(0))));
    let (_, found) = chains(&file, &program, SegmentKind::Forward);
    assert_eq!(tails(&found), tails(&sound));
    assert!(matches!(file.program.stages[0].buffers[result].content, Content::Value { .. }));
    assert!(matches!(file.graph.nodes[run(&file.program, product).0].op, Op::Einsum(_)));
}
