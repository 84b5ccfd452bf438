//! Programs of random plans are proved by the verifier, and train like one device on all their ranks.

mod zoo;

use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::init;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, train_step};
use dplan_ir::interp::program::ProgramRun;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::plan::{Clip, Plan, Schedule, StagePlan};
use dplan_ir::program::{Program, Role};
use dplan_ir::text;
use dplan_ir::verify::program::verify_program;
use dplan_ir::verify::report::annotate;
use dplan_planner::lower;
use zoo::{Degrees, Dice};

struct Case {
    what: String,
    graph: Graph,
    plan: Plan,
    program: Program,
    dice: Dice,
    vocab: u64,
}

fn case(seed: u64, dtype: DType) -> Case {
    let mut dice = Dice(seed + 1000);
    let degrees =
        Degrees { dp: dice.pick(&[1, 2, 3]), tp: dice.pick(&[1, 2, 4]), pp: dice.pick(&[1, 2, 3, 4]), micro_batches: dice.pick(&[1, 2, 5]) };
    let model = zoo::Model { dtype, ..zoo::model(&mut dice, 2 * degrees.dp) };
    let mut graph = zoo::graph(&model);
    let plan = Plan { compute: dtype, ..zoo::plan(&graph, degrees, &mut dice) };
    graph.order = lower::plan_order(&graph, &plan).unwrap();
    let what = format!("seed {seed}: {model:?} {degrees:?}");
    let program = lower::lower(&graph, &plan).unwrap_or_else(|e| panic!("{what}: {e}"));
    Case { what, graph, plan, program, dice, vocab: model.vocab }
}

/// The violations of a case, with the program they are in.
fn violations(case: &Case) -> Option<String> {
    let violations = verify_program(&case.graph, &case.program).err()?;
    let list: Vec<String> = violations.iter().map(|v| v.to_string()).collect();
    let text = annotate(&text::program_printed(&case.program, &case.graph), &violations);
    Some(format!("{}: {} violations\n{}\n\n{text}", case.what, violations.len(), list.join("\n")))
}

#[test]
fn random_plans_lower_to_programs_that_are_proved() {
    for dtype in [DType::F64, DType::Bf16] {
        for seed in 0..150 {
            if let Some(message) = violations(&case(seed, dtype)) {
                panic!("{message}");
            }
        }
    }
}

#[test]
fn proved_programs_train_like_one_device() {
    let hyper = Hyper { lr: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-2, weight_decay: 0.01, momentum: 0.8, clip: 0.5 };
    for seed in 0..40 {
        let Case { what, graph, plan, program, mut dice, vocab } = case(seed, DType::F64);
        let hyper = Hyper { clip: if plan.clip == Clip::None { f64::INFINITY } else { hyper.clip }, ..hyper };
        let params = init::params(&graph, seed);
        let mut state = TrainState::new(params.clone(), plan.optimizer);
        let mut run = ProgramRun::new(&graph, &program, seed);
        params.iter().for_each(|(p, value)| run.set_param(p, value));
        for step in 1..=2 {
            let inputs: Vec<Vec<Tensor>> = (0..plan.micro_batches).map(|_| zoo::inputs(&graph, vocab, &mut dice)).collect();
            let scalars = StepScalars::new(hyper, step, 0.03);
            let want = train_step(&graph, &mut state, &inputs, &scalars, plan.optimizer);
            let got = run.step(&inputs, &scalars).unwrap_or_else(|why| panic!("{what}: {why}"));
            close(got.loss, want.loss, &format!("{what}: loss of step {step}"));
            if let Some(norm) = got.grad_norm {
                close(norm, want.grad_norm, &format!("{what}: gradient norm of step {step}"));
            }
        }
        for (param, want) in state.params.iter() {
            let got = run.state(param, Role::Param).unwrap_or_else(|why| panic!("{what}: {why}"));
            let name = &graph.values[graph.params[param].value].name;
            got.data.iter().zip(&want.data).for_each(|(&x, &y)| close(x, y, &format!("{what}: {name}")));
        }
    }
}

fn close(got: f64, want: f64, what: &str) {
    assert!((got - want).abs() <= 1e-9 * want.abs().max(1.0), "{what}: {got}, expected {want}");
}

/// Every schedule over as many stages as large plans have: messages of two turns each, which a stage that runs ahead soon waits for.
#[test]
fn pipelines_of_many_stages_reach_their_end() {
    let schedules = [(Schedule::ZbH1, 1), (Schedule::ZbV, 2), (Schedule::Interleaved, 2)];
    for ((schedule, virtual_stages), (stages, micro_batches)) in schedules.into_iter().flat_map(|s| [(s, (7, 14)), (s, (32, 160))]) {
        let layers = (stages * virtual_stages) as u32;
        let mut dice = Dice(7);
        let model = zoo::Model { blocks: layers - 2, batch: 1, ffn: zoo::Ffn::Plain, tied: false, ..zoo::model(&mut dice, 1) };
        let graph = zoo::graph(&model);
        let degrees = Degrees { dp: 1, tp: 1, pp: 1, micro_batches };
        let mut plan = Plan { cp: 1, schedule, virtual_stages, ..zoo::plan(&graph, degrees, &mut dice) };
        plan.stages = (0..layers).map(|l| StagePlan { first: l, last: l }).collect();
        let what = format!("{} on {stages} stages", schedule.name());
        let program = lower::lower(&graph, &plan).unwrap_or_else(|e| panic!("{what}: {e}"));
        verify_program(&graph, &program).unwrap_or_else(|v| panic!("{what}: {} violations, first {}", v.len(), v[0]));
    }
}

/// 16 stages of 8 layers, 1536 micro-batches: all but a few periods are skipped.
#[test]
fn a_large_program_costs_no_more_than_a_few_periods() {
    let mut dice = Dice(7);
    let model = zoo::Model { blocks: 126, batch: 2, kv_heads: 2, group: 2, ffn: zoo::Ffn::Gated, tied: true, ..zoo::model(&mut dice, 2) };
    let graph = zoo::graph(&model);
    let degrees = Degrees { dp: 2, tp: 2, pp: 16, micro_batches: 1536 };
    let mut plan = zoo::plan(&graph, degrees, &mut dice);
    plan.schedule = Schedule::OneFOneB;
    plan.stages = (0..16).map(|s| StagePlan { first: 8 * s, last: 8 * s + 7 }).collect();
    let program = lower::lower(&graph, &plan).unwrap_or_else(|e| panic!("{e}"));
    let start = std::time::Instant::now();
    let facts = verify_program(&graph, &program).unwrap_or_else(|v| panic!("{} violations, first {}", v.len(), v[0]));
    println!("{facts:?} in {:?}", start.elapsed());
    assert!(facts.walked * 20 < facts.issued, "{facts:?}");
}
