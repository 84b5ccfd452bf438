//! Reference training steps: what must not matter does not, and what must happen does.

mod cases;

use cases::Case;
use dplan_ir::grad::differentiate;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::{TrainState, train_step};
use dplan_ir::optimizer::{Hyper, Optimizer, StepScalars};

const HYPER: Hyper = Hyper { lr: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.01, momentum: 0.8, clip: 1.0 };

/// Losses of `steps` steps on the case's one batch, cut into `micro_batches`, and the state at the end.
fn train(case: &Case, optimizer: Optimizer, micro_batches: u64, steps: u64) -> (Vec<f64>, TrainState) {
    let mut forward = case.graph.clone();
    let batch = case.inputs[0].dims[0];
    forward.set_batch(batch / micro_batches);
    let graph = differentiate(&forward).unwrap_or_else(|why| panic!("{why}"));
    let mut state = TrainState::new(case.params.clone(), optimizer);
    let slices: Vec<Vec<Tensor>> = (0..micro_batches).map(|m| case.inputs.iter().map(|t| rows(t, m, batch / micro_batches)).collect()).collect();
    let inv_tokens = 1.0 / case.inputs[0].data.len() as f64;
    let losses =
        (1..=steps).map(|step| train_step(&graph, &mut state, &slices, &StepScalars::new(HYPER, step, inv_tokens), optimizer).loss).collect();
    (losses, state)
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    for case in cases::all() {
        let batch = case.inputs[0].dims[0];
        for optimizer in Optimizer::ALL {
            let ((whole, a), (cut, b)) = (train(&case, optimizer, 1, 3), train(&case, optimizer, batch, 3));
            let name = &case.graph.name;
            for (x, y) in whole.iter().zip(&cut) {
                assert!((x - y).abs() < 1e-10, "{name} with {}: losses {whole:?} and {cut:?}", optimizer.name());
            }
            for (x, y) in a.params.values().zip(b.params.values()).flat_map(|(x, y)| x.data.iter().zip(&y.data)) {
                // A step of Adam divides by the root of squared gradients, which enlarges rounding where a gradient is almost zero.
                assert!((x - y).abs() < 1e-6, "{name} with {}: {x} and {y}", optimizer.name());
            }
        }
    }
}

#[test]
fn either_optimizer_learns_one_batch() {
    for (optimizer, steps) in [(Optimizer::AdamW, 40), (Optimizer::Sgd, 60)] {
        for case in cases::all() {
            let (losses, _) = train(&case, optimizer, 1, steps);
            let (first, last) = (losses[0], losses[losses.len() - 1]);
            assert!(last < 0.6 * first, "{} with {}: loss goes from {first} to {last}", case.graph.name, optimizer.name());
        }
    }
}

/// LAMB goes as far as the parameter is long, times the learning rate; as far as its direction is long where the parameter is zero. The direction is Adam's, with
/// the pull of weight decay: computed here by itself, from the gradients alone.
#[test]
fn a_lamb_step_is_as_long_as_the_parameter_in_the_direction_of_adam() {
    for case in cases::all() {
        let graph = differentiate(&case.graph).unwrap_or_else(|why| panic!("{why}"));
        let mut state = TrainState::new(case.params.clone(), Optimizer::Lamb);
        let first = state.params.ids().next().unwrap_or_else(|| panic!("no parameter"));
        state.params[first].data.fill(0.0);
        let hyper = Hyper { clip: f64::INFINITY, weight_decay: 0.1, eps: 1e-3, ..HYPER };
        let mut moments = state.params.map(|_, p| vec![[0.0f64; 2]; p.data.len()]);
        for step in 1..=3 {
            let before = state.params.clone();
            let report =
                train_step(&graph, &mut state, std::slice::from_ref(&case.inputs), &StepScalars::new(hyper, step, case.inv_tokens), Optimizer::Lamb);
            let fixed = graph.fixed_params();
            for (param, old) in before.iter() {
                let decay = if fixed.contains(&param) { 0.0 } else { 0.1 };
                let mut direction = Vec::new();
                for ((w, g), [m, v]) in old.data.iter().zip(&report.grads[param].data).zip(&mut moments[param]) {
                    (*m, *v) = (0.9 * *m + 0.1 * g, 0.95 * *v + 0.05 * g * g);
                    let (corrected, root) = (*m / (1.0 - 0.9f64.powf(step as f64)), (*v / (1.0 - 0.95f64.powf(step as f64))).sqrt());
                    direction.push(corrected / (root + 1e-3) + decay * w);
                }
                let length = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
                let (w, u) = (length(&old.data), length(&direction));
                let ratio = if w > 0.0 && u > 0.0 { w / u } else { 1.0 };
                for ((new, old), u) in state.params[param].data.iter().zip(&old.data).zip(&direction) {
                    let want = old - 0.05 * ratio * u;
                    assert!((new - want).abs() < 1e-12 * want.abs().max(1.0), "{} step {step}: {new}, expected {want}", case.graph.name);
                }
            }
        }
    }
}

#[test]
fn a_clipped_sgd_step_has_length_lr_times_clip() {
    let case = cases::all().remove(1);
    let graph = differentiate(&case.graph).unwrap_or_else(|why| panic!("{why}"));
    let mut state = TrainState::new(case.params.clone(), Optimizer::Sgd);
    let hyper = Hyper { clip: 0.01, weight_decay: 0.0, ..HYPER };
    let scalars = StepScalars::new(hyper, 1, case.inv_tokens);
    let report = train_step(&graph, &mut state, std::slice::from_ref(&case.inputs), &scalars, Optimizer::Sgd);
    assert!(report.grad_norm > 0.1, "the gradient is clipped");
    let moved: f64 =
        case.params.values().zip(state.params.values()).flat_map(|(x, y)| x.data.iter().zip(&y.data)).map(|(x, y)| (x - y).powi(2)).sum();
    // The clip factor has 1e-6 beside the norm, as in PyTorch.
    assert!((moved.sqrt() / (hyper.lr * hyper.clip) - 1.0).abs() < 1e-5, "moved by {}", moved.sqrt());
}

/// Sequences `[at·n, (at+1)·n)` of an input.
fn rows(input: &Tensor, at: u64, n: u64) -> Tensor {
    Tensor::from_fn(&[n, input.dims[1]], |i| input.data[input.at(&[at * n + i[0], i[1]])])
}
