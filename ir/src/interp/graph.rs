//! A whole graph, and a whole training step, on one device.

use crate::dropout::Draws;
use crate::dtype::DType;
use crate::entity::{ParamId, Table, ValueId};
use crate::extent::whole_context;
use crate::graph::{Def, Graph, Layout};
use crate::interp::{Tensor, op};
use crate::optimizer::{self, DecayGroups, Optimizer, StepScalars, skips};
use crate::sharding::LocalType;

/// Every value of one run of a graph.
#[derive(Clone, PartialEq, Debug)]
pub struct GraphRun {
    pub values: Table<ValueId, Option<Tensor>>,
}

impl GraphRun {
    /// Runs every node of the graph for one micro-batch.
    ///
    /// # Panics
    /// If parameters or inputs are not of the shapes the graph says, or the graph does not verify.
    pub fn new(graph: &Graph, params: &Table<ParamId, Tensor>, inputs: &[Tensor], inv_tokens: f64) -> GraphRun {
        GraphRun::drawing(graph, params, inputs, inv_tokens, Draws::default())
    }

    /// As [`GraphRun::new`], with dropout.
    ///
    /// # Panics
    /// As [`GraphRun::new`].
    pub fn drawing(graph: &Graph, params: &Table<ParamId, Tensor>, inputs: &[Tensor], inv_tokens: f64, draws: Draws) -> GraphRun {
        assert_eq!((graph.params.len(), graph.inputs.len()), (params.len(), inputs.len()), "parameters and inputs of `{}`", graph.name);
        let mut run = GraphRun { values: Table::filled(graph.values.len(), None) };
        for (id, value) in graph.values.iter() {
            let given = match value.def {
                Def::Param(p) => &params[p],
                Def::Input => match graph.inputs.iter().position(|&v| v == id) {
                    Some(at) => &inputs[at],
                    None => continue,
                },
                Def::Node(..) => continue,
            };
            assert_eq!(given.dims, graph.shape(id), "shape of `{}`", value.name);
            run.values[id] = Some(given.clone());
        }
        for node in graph.nodes.values() {
            let ins: Vec<&Tensor> = node.inputs.iter().map(|&v| run.get(v)).collect();
            let outs: Vec<LocalType> = node.outputs.iter().map(|&v| whole_type(graph, v)).collect();
            let results = op::eval(&node.op, &whole_context(graph, node, inv_tokens).drawing(draws), &ins, &outs);
            for (&v, result) in node.outputs.iter().zip(results) {
                run.values[v] = Some(result);
            }
        }
        run
    }

    /// A value of the run.
    ///
    /// # Panics
    /// If the graph does not define it.
    pub fn get(&self, value: ValueId) -> &Tensor {
        self.values[value].as_ref().expect("defined by an input, a parameter or an earlier node")
    }
    /// The gradient of a parameter: the sum of its contributions.
    pub fn grad(&self, graph: &Graph, param: ParamId) -> Tensor {
        let zero = Tensor::zeros(&whole_type(graph, graph.params[param].value));
        graph.grads[param].iter().fold(zero, |sum, &v| sum.zip(self.get(v), |x, y| x + y))
    }
}

/// What training changes.
#[derive(Clone, PartialEq, Debug)]
pub struct TrainState {
    pub params: Table<ParamId, Tensor>,
    /// As many per parameter as the optimizer has.
    pub moments: Table<ParamId, Vec<Tensor>>,
}

impl TrainState {
    pub fn new(params: Table<ParamId, Tensor>, optimizer: Optimizer) -> TrainState {
        let moments = params.map(|_, p| vec![p.map(|_| 0.0); optimizer.moments()]);
        TrainState { params, moments }
    }
}

/// What a step reports.
#[derive(Clone, PartialEq, Debug)]
pub struct StepReport {
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Gradients before clipping.
    pub grads: Table<ParamId, Tensor>,
}

/// One training step of a differentiated graph: gradients summed over micro-batches, clipped by global norm, one update.
///
/// `micro_batches` holds the graph's inputs for each micro-batch.
pub fn train_step(graph: &Graph, state: &mut TrainState, micro_batches: &[Vec<Tensor>], scalars: &StepScalars, optimizer: Optimizer) -> StepReport {
    train_step_of(graph, state, micro_batches, scalars, optimizer, DecayGroups::All)
}

/// [`train_step`] in which weight decay pulls only some parameters.
pub fn train_step_of(
    graph: &Graph,
    state: &mut TrainState,
    micro_batches: &[Vec<Tensor>],
    scalars: &StepScalars,
    optimizer: Optimizer,
    groups: DecayGroups,
) -> StepReport {
    let mut loss = 0.0;
    let mut grads: Table<ParamId, Tensor> = state.params.map(|_, p| p.map(|_| 0.0));
    let sequences = graph.batch.map_or(0, |d| graph.size(d));
    for (m, inputs) in (0..).zip(micro_batches) {
        let run = GraphRun::drawing(graph, &state.params, inputs, scalars.inv_tokens, scalars.draws.after(m * sequences));
        loss += graph.loss.map_or(0.0, |v| run.get(v).data[0]);
        for (p, sum) in grads.iter_mut() {
            *sum = sum.zip(&run.grad(graph, p), |x, y| x + y);
        }
    }
    update_step(graph, state, (loss, grads), scalars, optimizer, groups)
}

/// How a step of as many updates as micro-batches makes them.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    /// Of the step: those of its first update.
    pub scalars: &'a StepScalars,
    pub optimizer: Optimizer,
    pub groups: DecayGroups,
    /// How many updates a gradient is behind the parameter that it changes.
    pub lag: &'a Table<ParamId, u64>,
}

/// A step of as many updates as micro-batches, each with the gradient of one ([`crate::program::Updates::MicroBatch`]), which is of every parameter as it was its lag of updates before (or at the step's
/// beginning): what stages of a pipeline do that do not wait for each other. The loss is the step's, the gradients are the last micro-batch's.
pub fn train_window(graph: &Graph, state: &mut TrainState, micro_batches: &[Vec<Tensor>], window: &Window<'_>) -> StepReport {
    window_step(graph, state, micro_batches, window, |params, inputs, scalars| {
        let run = GraphRun::drawing(graph, params, inputs, scalars.inv_tokens, scalars.draws);
        (graph.loss.map_or(0.0, |v| run.get(v).data[0]), params.map(|p, _| run.grad(graph, p)))
    })
}

/// [`train_window`] where something else says what loss and gradients a micro-batch has at some parameters, by the scalars of a step of its own.
pub fn window_step(
    graph: &Graph,
    state: &mut TrainState,
    micro_batches: &[Vec<Tensor>],
    window: &Window<'_>,
    mut gradients: impl FnMut(&Table<ParamId, Tensor>, &[Tensor], &StepScalars) -> (f64, Table<ParamId, Tensor>),
) -> StepReport {
    let &Window { scalars, optimizer, groups, lag } = window;
    let sequences = graph.batch.map_or(0, |d| graph.size(d));
    let mut versions = vec![state.params.clone()];
    let mut last = StepReport { loss: 0.0, grad_norm: 0.0, grads: state.params.map(|_, p| p.map(|_| 0.0)) };
    for (at, inputs) in (0u64..).zip(micro_batches) {
        let seen = state.params.map(|p, _| versions[at.saturating_sub(lag[p]) as usize][p].clone());
        // A gradient is the mean over the micro-batch's own tokens, the loss is the step's.
        let count = micro_batches.len() as f64;
        let (inv_tokens, draws) = (scalars.inv_tokens * count, scalars.draws.after(at * sequences));
        let own = StepScalars { step: scalars.step + at, inv_tokens, draws, ..*scalars };
        let (loss, grads) = gradients(&seen, inputs, &own);
        last = StepReport { loss: last.loss + loss / count, ..update_step(graph, state, (0.0, grads), &own, optimizer, groups) };
        versions.push(state.params.clone());
    }
    last
}

/// What a training step does with its loss and gradients.
pub fn update_step(
    graph: &Graph,
    state: &mut TrainState,
    (loss, grads): (f64, Table<ParamId, Tensor>),
    scalars: &StepScalars,
    optimizer: Optimizer,
    groups: DecayGroups,
) -> StepReport {
    let grad_norm = grads.values().flat_map(|g| &g.data).map(|x| x * x).sum::<f64>().sqrt();
    // Gradients are not scaled here, where nothing is short; what that would do to their size still counts.
    let scale = scalars.gradient_scale(grad_norm * scalars.loss_scale) * scalars.loss_scale;
    if skips(scale) {
        return StepReport { loss, grad_norm, grads };
    }
    let decays = optimizer::decays(graph, groups);
    for (p, grad) in grads.iter() {
        let scalars = if decays[p] { *scalars } else { scalars.without_decay() };
        update(&mut state.params[p], grad, scale, &mut state.moments[p], &scalars, optimizer);
    }
    StepReport { loss, grad_norm, grads }
}

fn update(param: &mut Tensor, grad: &Tensor, scale: f64, moments: &mut [Tensor], scalars: &StepScalars, optimizer: Optimizer) {
    let moment = |moments: &[Tensor], i: usize| [0, 1].map(|at| moments.get(at).map_or(0.0, |m| m.data[i]));
    let trust = if optimizer.trusts() {
        let terms = param.data.iter().enumerate().map(|(i, &p)| optimizer::trust_terms(p, grad.data[i] * scale, moment(moments, i), scalars));
        optimizer::trust_ratio(terms.fold([0.0; 2], |[a, b], [x, y]| [a + x, b + y]))
    } else {
        1.0
    };
    for (i, p) in param.data.iter_mut().enumerate() {
        let (new, of) = optimizer::update(optimizer, *p, grad.data[i] * scale, moment(moments, i), scalars, trust);
        *p = new;
        moments.iter_mut().zip(of).for_each(|(m, new)| m.data[i] = new);
    }
}

/// The type of a whole value on one device, in the interpreter's arithmetic.
fn whole_type(graph: &Graph, value: ValueId) -> LocalType {
    let (dims, layout) = (graph.shape(value), graph.values[value].ty.layout);
    let experts = if layout == Layout::Dense { 0 } else { dims[2] };
    LocalType { dtype: DType::F64, dims, layout, experts }
}
