//! Which instructions ranks on GPUs do in the kernel of a product before them: those of real plans, and not where anything else would see the difference.

mod common;

use dplan::planfile::PlanFile;
use dplan::runtime::cuda::fuse::{Buffers, Chain, touched};
use dplan::runtime::cuda::load::{Action, load};
use dplan::runtime::view::View;
use dplan_ir::entity::{EventId, SegmentId};
use dplan_ir::op::{Activation, Op};
use dplan_ir::optimizer::DecayGroups;
use dplan_ir::program::{Content, Instr, Issue, Program, SegmentKind, Stream, Write};
use dplan_kernels::cuda::arch::Arch;
use dplan_kernels::cuda::rows::Held;
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
        let placed = || code.segments.iter().flat_map(|s| s.iter().enumerate());
        let within = placed().filter(|(at, (_, action))| matches!(action, Action::Within(to) if to > at)).count();
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
        ("streams that the product would wait for", 0, Box::new(|p| insert(p, bias, compute(Instr::Wait(EventId(0)))))),
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
    insert(&mut program, product, compute(Instr::Wait(EventId(0))));
    let (_, found) = chains(&file, &program, SegmentKind::Forward);
    assert_eq!(tails(&found), tails(&sound));
    assert!(matches!(file.program.stages[0].buffers[result].content, Content::Value { .. }));
    assert!(matches!(file.graph.nodes[run(&file.program, product).0].op, Op::Einsum(_)));
}

/// The row chains of a segment, as the names of their ops' kinds; and where they are.
fn rows(file: &PlanFile, program: &Program, kind: SegmentKind) -> (SegmentId, Vec<Vec<usize>>) {
    let view = View { graph: &file.graph, program, stage: 0, local_rank: 0 };
    let (segment, _) = program.stages[0].segments.iter().find(|(_, s)| s.kind == kind).unwrap();
    let buffers = Buffers::new(&view);
    let moved = buffers
        .chains(segment)
        .iter()
        .flat_map(|c| c.steps.iter().map(|s| s.at).chain([c.product]).map(|at| (at, c.steps[c.steps.len() - 1].at)).collect::<Vec<_>>())
        .collect();
    (segment, buffers.row_chains(segment, &moved))
}

fn ops<'a>(file: &'a PlanFile, segment: SegmentId, chain: &[usize]) -> Vec<&'a Op> {
    let body = &file.program.stages[0].segments[segment].body;
    let node = |at: &usize| if let Instr::Run { node, .. } = body[*at].instr { &file.graph.nodes[node].op } else { panic!("no op") };
    chain.iter().map(node).collect()
}

#[test]
fn what_goes_on_along_rows_is_one_kernel() {
    let file = gpt2("fuse_rows", "dp=1,recompute=none", 1);
    let (segment, back) = rows(&file, &file.program, SegmentKind::BackwardLast);
    let found: Vec<Vec<&Op>> = back.iter().map(|c| ops(&file, segment, c)).collect();
    println!("{found:?}");
    // Each block has two norms on the way back, each followed by the sum with the residual stream.
    let sums = found.iter().filter(|c| matches!(c[..], [Op::LayerNormGradInput { .. }, Op::Add])).count();
    assert_eq!(sums, 4, "{found:?}");
    // There is a kernel for each; what the sum alone reads is not stored.
    let code = load(&file.graph, &file.program, 0, 0, DecayGroups::All, Target::of(Arch::Sm80)).unwrap();
    for chain in back.iter().filter(|c| c.len() == 2) {
        let actions = &code.segments[segment.0 as usize];
        assert!(matches!(&actions[chain[0]].1, Action::Run { routine, .. } if routine.launches[0].entry == "dp_rows"));
        assert_eq!(actions[chain[1]].1, Action::Within(chain[0]));
    }
    let norm = back.iter().zip(&found).find(|(_, ops)| matches!(ops[..], [Op::LayerNormGradInput { .. }, Op::Add])).unwrap().0;
    let Action::Run { ins, outs, .. } = &code.segments[segment.0 as usize][norm[0]].1 else { panic!("no kernel") };
    assert!(ins.len() == 4 && (1..=2).contains(&outs.len()), "{} operands, {} results", ins.len(), outs.len());
}

/// Whoever stands between two ops and would see that the second is done sooner, one at a time.
#[test]
fn what_would_be_seen_is_not_done_sooner() {
    let file = gpt2("fuse_sooner", "dp=1,recompute=none", 1);
    let (segment, sound) = rows(&file, &file.program, SegmentKind::BackwardLast);
    let chain = sound.iter().find(|c| matches!(ops(&file, segment, c)[..], [Op::LayerNormGradInput { .. }, Op::Add])).unwrap();
    let (norm, sum) = (chain[0], chain[1]);
    let run = |at: usize| match &file.program.stages[0].segments[segment].body[at].instr {
        Instr::Run { ins, outs, .. } => (ins.clone(), outs[0]),
        other => panic!("{other:?}"),
    };
    let ((_, slope), (read, total)) = (run(norm), run(sum));
    let other = *read.iter().find(|&&b| b != slope).unwrap();
    let compute = |instr| Issue { stream: Stream::Compute, instr };
    let insert = |program: &mut Program, instr: Issue| program.stages[0].segments[segment].body.insert(sum, instr);
    let joins = |program: &Program| {
        let (_, found) = rows(&file, program, SegmentKind::BackwardLast);
        found.iter().any(|c| c[0] == norm && c.len() == 2)
    };
    assert!(joins(&file.program));
    let damages: Vec<(&str, bool, Box<dyn Fn(&mut Program)>)> = vec![
        ("a wait for another stream", false, Box::new(|p| insert(p, compute(Instr::Wait(EventId(0)))))),
        ("its operand is written between", false, Box::new(|p| insert(p, compute(Instr::Zero { dst: other })))),
        ("the norm's result is written between", false, Box::new(|p| insert(p, compute(Instr::Zero { dst: slope })))),
        ("its result's bytes are read between", false, Box::new(|p| insert(p, compute(Instr::AddInto { src: total, dst: slope })))),
        (
            "its result lies over an operand of the norm",
            false,
            Box::new(|p| p.stages[0].buffers[total].offset = p.stages[0].buffers[run(norm).0[0]].offset),
        ),
        ("it is on another stream", false, Box::new(|p| p.stages[0].segments[segment].body[sum].stream = Stream::Comm)),
        ("another stream writes it", true, Box::new(|p| insert(p, Issue { stream: Stream::Comm, instr: Instr::Zero { dst: other } }))),
        ("streams are told that what is between is over", true, Box::new(|p| insert(p, compute(Instr::Record(EventId(0)))))),
    ];
    for (what, still, damage) in damages {
        let mut program = file.program.clone();
        damage(&mut program);
        assert_eq!(joins(&program), still, "{what}");
    }
    // A second reader of what the norm makes finds it.
    let mut program = file.program.clone();
    program.stages[0].segments[segment].body.insert(sum + 1, compute(Instr::AddInto { src: slope, dst: total }));
    let view = View { graph: &file.graph, program: &program, stage: 0, local_rank: 0 };
    let body = &program.stages[0].segments[segment].body;
    let held = |body: &[Issue]| {
        let (values, _) = Buffers::new(&view).row_values(&touched(body), body, &[norm, sum]);
        values.into_iter().find(|v| v.0 == slope).unwrap().1
    };
    assert_eq!(held(body), Held::Stored);
    assert_eq!(held(&file.program.stages[0].segments[segment].body), Held::Kept);
}
