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
