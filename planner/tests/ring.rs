//! Keys that go round: what becomes of a program, which damage to that is noticed, what it needs and what it costs.

use dplan_ir::entity::{BufferId, SegmentId};
use dplan_ir::graph::Graph;
use dplan_ir::layers::classes;
use dplan_ir::mesh::Keys;
use dplan_ir::op::Op;
use dplan_ir::plan::Plan;
use dplan_ir::program::{Content, Instr, Pattern, Program, Stream};
use dplan_ir::ring::Ring;
use dplan_ir::sharding::Monoid;
use dplan_ir::text;
use dplan_ir::verify::verify_program;
use dplan_planner::drawn::Case;
use dplan_planner::lower::lower;
use dplan_planner::machine::Cluster;
use dplan_planner::pins::Pins;
use dplan_planner::predict::predict;
use std::collections::BTreeMap;

fn programs(text: &str) -> (Graph, Program) {
    let case: Case = text.parse().unwrap();
    let graph = case.graph();
    let program = lower(&graph, &case.plan(&graph)).unwrap_or_else(|e| panic!("{case}: {e}"));
    (graph, program)
}

/// Every instruction, with its segment and place.
fn all(program: &Program) -> Vec<(SegmentId, usize, Stream, Instr)> {
    let segments = program.stages[0].segments.iter();
    segments.flat_map(|(id, s)| s.body.iter().enumerate().map(move |(at, issue)| (id, at, issue.stream, issue.instr.clone()))).collect()
}

fn ring_of(program: &Program, buffer: BufferId) -> Option<Ring> {
    match &program.stages[0].buffers[buffer].content {
        Content::Value { sharding, .. } => sharding.ring,
        _ => None,
    }
}

#[test]
fn keys_are_handed_on_beside_the_run_that_has_them_and_nothing_is_gathered() {
    for (cp, seq) in [(2, 8), (3, 12), (4, 16)] {
        let (graph, program) = programs(&format!("blocks=1 seq={seq} cp={cp} keys=ring"));
        assert_eq!(verify_program(&graph, &program).map_err(|v| v[0].to_string()).map(|f| f.programs), Ok(1));
        assert_eq!(text::parse_program(&text::print_program(&program, &graph), &graph).as_ref(), Ok(&program));
        let ring = program.mesh.ring();
        let (mut shifts, mut runs, mut joins) = (0, 0, BTreeMap::new());
        for (_, _, stream, instr) in all(&program) {
            match instr {
                Instr::Collective { pattern: Pattern::Shift, axes, .. } => {
                    assert_eq!((axes, stream), (ring, Stream::Comm));
                    shifts += 1;
                }
                Instr::Collective { pattern, src, .. } => {
                    let is_value = matches!(program.stages[0].buffers[src].content, Content::Value { .. });
                    assert!(pattern != Pattern::AllGather || !is_value, "values are gathered");
                }
                Instr::Run { node, .. } if matches!(graph.nodes[node].op, Op::Attention(_) | Op::AttentionGrad(_)) => runs += 1,
                Instr::Join { monoid, .. } => *joins.entry(monoid).or_insert(0) += 1,
                _ => {}
            }
        }
        // Keys and values there, in both passes; their gradients in each turn but the first, and home.
        assert_eq!((shifts, runs), (2 * 2 * (cp - 1) + 2 * cp, 2 * cp), "{cp}");
        assert_eq!(joins, BTreeMap::from([(Monoid::Sum, cp - 1), (Monoid::LogSumExp, cp - 1)]));
    }
}

/// Every wrong way of going round, at every place.
#[test]
fn what_is_wrong_in_a_ring_is_noticed_without_running() {
    let mut tried: BTreeMap<&str, u32> = BTreeMap::new();
    for text in ["blocks=1 seq=12 cp=3 keys=ring", "blocks=1 seq=16 dp=2 cp=2 tp=2 split=textbook keys=ring recompute=full zero=2"] {
        let (graph, program) = programs(text);
        let buffers = &program.stages[0].buffers;
        // The same value of another turn, or of other pairs of blocks.
        let others = |id: BufferId| {
            let value = |b: BufferId| match &buffers[b].content {
                Content::Value { value, .. } => Some(*value),
                _ => None,
            };
            buffers
                .ids()
                .filter(|&b| value(b).is_some() && value(b) == value(id) && ring_of(&program, b) != ring_of(&program, id))
                .collect::<Vec<_>>()
        };
        for (segment, at, _, instr) in all(&program) {
            let mut wrong = |kind: &'static str, damage: Option<Instr>| {
                let mut damaged = program.clone();
                let body = &mut damaged.stages[0].segments[segment].body;
                match damage {
                    Some(instr) => body[at].instr = instr,
                    None => drop(body.remove(at)),
                }
                assert!(verify_program(&graph, &damaged).is_err(), "{kind}: {text}, {segment}[{at}] {instr:?}");
                *tried.entry(kind).or_default() += 1;
            };
            match &instr {
                Instr::Collective { pattern: Pattern::Shift, axes, stages, dim, monoid, src, dst } => {
                    let with =
                        |pattern, src, dst| Instr::Collective { pattern, axes: *axes, stages: stages.clone(), dim: *dim, monoid: *monoid, src, dst };
                    wrong("not handed on", None);
                    wrong("handed back", Some(with(Pattern::Shift, *dst, *src)));
                    wrong("in place", Some(with(Pattern::Shift, *src, *src)));
                    wrong("gathered", Some(with(Pattern::AllGather, *src, *dst)));
                    others(*src)
                        .into_iter()
                        .filter(|b| b != dst)
                        .for_each(|b| wrong("another part is handed on", Some(with(Pattern::Shift, b, *dst))));
                    others(*dst)
                        .into_iter()
                        .filter(|b| b != src)
                        .for_each(|b| wrong("handed on as another part", Some(with(Pattern::Shift, *src, b))));
                }
                Instr::Join { monoid, left, right, dst } => {
                    let other = if *monoid == Monoid::Sum { Monoid::LogSumExp } else { Monoid::Sum };
                    let join = |monoid, left: &Vec<BufferId>, right: &Vec<BufferId>| {
                        Some(Instr::Join { monoid, left: left.clone(), right: right.clone(), dst: dst.clone() })
                    };
                    wrong("not joined", None);
                    wrong("joined otherwise", join(other, left, right));
                    wrong("joined with itself", join(*monoid, right, right));
                    for (nth, &part) in right.iter().enumerate() {
                        for b in others(part).into_iter().filter(|b| *b != dst[nth]) {
                            let mut right = right.clone();
                            right[nth] = b;
                            wrong("joined with another part", join(*monoid, left, &right));
                        }
                    }
                }
                Instr::Run { node, ins, outs, scratch, write } if matches!(graph.nodes[*node].op, Op::Attention(_) | Op::AttentionGrad(_)) => {
                    wrong("a turn does not run", None);
                    for (nth, &operand) in ins.iter().enumerate() {
                        for b in others(operand) {
                            let mut ins = ins.clone();
                            ins[nth] = b;
                            wrong(
                                "keys of another turn, or a part read as whole",
                                Some(Instr::Run { node: *node, ins, outs: outs.clone(), scratch: *scratch, write: *write }),
                            );
                        }
                    }
                    for (nth, &result) in outs.iter().enumerate() {
                        for b in others(result) {
                            let mut outs = outs.clone();
                            outs[nth] = b;
                            wrong(
                                "results as those of another turn",
                                Some(Instr::Run { node: *node, ins: ins.clone(), outs, scratch: *scratch, write: *write }),
                            );
                        }
                    }
                }
                _ => {}
            }
        }
        // A buffer that claims more than is in it, or another block.
        for id in buffers.ids().filter(|&b| ring_of(&program, b).is_some()) {
            let ring = ring_of(&program, id).unwrap();
            let mut claims: Vec<Option<Ring>> = (0..ring.ranks).map(|turn| Ring { turn, ..ring }.settled()).collect();
            claims.extend((1..=Ring::all(ring.ranks)).map(|over| Ring { over, ..ring }.settled()));
            for claim in claims.into_iter().filter(|c| *c != Some(ring)) {
                let mut damaged = program.clone();
                if let Content::Value { sharding, .. } = &mut damaged.stages[0].buffers[id].content {
                    sharding.ring = claim;
                }
                assert!(verify_program(&graph, &damaged).is_err(), "{text}: {id} claims {claim:?} for {ring:?}");
                *tried.entry("another claim").or_default() += 1;
            }
        }
    }
    assert!(tried.len() == 14 && tried.values().all(|&n| n >= 4), "{tried:?}");
}

#[test]
fn a_ring_is_searched_where_it_is_asked_for_and_no_ring_is_too_long() {
    assert!(Pins::parse("cp=2,keys=ring+gather").is_ok());
    assert!(Pins::parse("keys=rings").unwrap_err().to_string().contains("`gather` or `ring`"));
    let case: Case = "blocks=1 seq=12 cp=3 keys=ring".parse().unwrap();
    let graph = case.graph();
    let plan = case.plan(&graph);
    let cost = |keys| predict(&graph, &classes(&graph), &Cluster::parse("h100:3x1").unwrap(), &Plan { keys, ..plan.clone() }).unwrap();
    let (gathered, ring) = (cost(Keys::Gathered), cost(Keys::Ring));
    assert!(gathered.step != ring.step, "{:?}", ring.step);
    assert!("cp=1 keys=ring".parse::<Case>().is_err());
}
