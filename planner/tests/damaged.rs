//! Damage to lowered programs: what the verifier still accepts trains as before. Rewrites of them are accepted.

mod zoo;

use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::init;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::program::ProgramRun;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::program::{Program, Role};
use dplan_ir::verify::mutate::{Damage, Rewrite};
use dplan_ir::verify::program::verify_program;
use dplan_planner::lower;
use zoo::{Degrees, Dice, Ffn, Model};

struct Subject {
    what: String,
    graph: Graph,
    program: Program,
}

/// Small plans that between them use every ZeRO stage, tied tables, recompute, pipelines and tensor parallelism.
fn subjects() -> Vec<Subject> {
    let degrees = [(2, 2, 2, 3), (2, 1, 3, 4), (1, 4, 2, 2), (3, 2, 1, 2), (1, 2, 3, 7)];
    let subject = |(seed, (dp, tp, pp, micro_batches)): (usize, (u64, u64, u64, u64))| {
        let mut dice = Dice(seed as u64 + 77);
        let ffn = [Ffn::Gated, Ffn::Experts, Ffn::Plain][seed % 3];
        let model = Model {
            blocks: 2,
            batch: dp,
            seq: 4,
            kv_heads: 2,
            group: 2,
            vocab: 8,
            ffn,
            tied: seed % 2 == 0,
            learned_positions: true,
            dtype: DType::F64,
        };
        let graph = zoo::graph(&model);
        let degrees = Degrees { dp, tp, pp, micro_batches };
        let plan = zoo::plan(&graph, degrees, &mut dice);
        let what = format!("{model:?} {degrees:?}");
        let program = lower::lower(&graph, &plan).unwrap_or_else(|e| panic!("{what}: {e}"));
        Subject { what, graph, program }
    };
    degrees.into_iter().enumerate().map(subject).collect()
}

/// Losses, norms and parameters of two steps; `None` if ranks get stuck or disagree.
fn trained(subject: &Subject, program: &Program, seed: u64) -> Option<Vec<f64>> {
    let graph = &subject.graph;
    let mut run = ProgramRun::new(graph, program, seed);
    init::params(graph, 9).iter().for_each(|(p, value)| run.set_param(p, value));
    let hyper = Hyper { lr: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-2, weight_decay: 0.01, momentum: 0.8, clip: 0.5 };
    let mut numbers = Vec::new();
    let mut dice = Dice(5);
    for step in 1..=2 {
        let inputs: Vec<Vec<Tensor>> = (0..program.micro_batches).map(|_| zoo::inputs(graph, 8, &mut dice)).collect();
        let report = run.step(&inputs, &StepScalars::new(hyper, step, 0.03)).ok()?;
        numbers.extend([report.loss, report.grad_norm.unwrap_or(0.0)]);
    }
    for param in graph.params.ids() {
        numbers.extend(run.state(param, Role::Param).ok()?.data);
    }
    Some(numbers)
}

fn alike(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-9 * y.abs().max(1.0))
}

#[test]
fn accepted_damage_is_harmless() {
    let (mut rejected, mut accepted) = (0u64, 0u64);
    for (number, subject) in subjects().into_iter().enumerate() {
        let want = trained(&subject, &subject.program, 1).unwrap_or_else(|| panic!("{}: does not train", subject.what));
        for damage in Damage::ALL {
            let mut dice = Dice(number as u64);
            for _ in 0..4 {
                let Some((program, at)) = damage.apply(&subject.program, dice.roll(1 << 40)) else { break };
                if verify_program(&subject.graph, &program).is_err() {
                    rejected += 1;
                    continue;
                }
                accepted += 1;
                let right = trained(&subject, &program, accepted).is_some_and(|got| alike(&got, &want));
                assert!(right, "{}: {damage:?} at {at} was accepted, but trains wrong (seed {accepted})", subject.what);
            }
        }
    }
    println!("{rejected} rejected, {accepted} accepted and harmless");
    assert!(rejected > 4 * accepted, "{rejected} rejected, {accepted} accepted");
}

#[test]
fn rewrites_are_accepted() {
    for subject in subjects() {
        let want = trained(&subject, &subject.program, 1).unwrap_or_else(|| panic!("{}: does not train", subject.what));
        let mut program = subject.program.clone();
        let mut dice = Dice(3);
        for n in 0..50 {
            let rewrite = Rewrite::ALL[n % Rewrite::ALL.len()];
            let Some((next, at)) = rewrite.apply(&program, dice.roll(1 << 40)) else { continue };
            if let Err(violations) = verify_program(&subject.graph, &next) {
                panic!("{}: {rewrite:?} at {at}: {}", subject.what, violations[0]);
            }
            program = next;
        }
        let right = trained(&subject, &program, 2).is_some_and(|got| alike(&got, &want));
        assert!(right, "{}: rewritten, trains otherwise", subject.what);
    }
}
