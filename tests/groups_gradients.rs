//! Bug groups of `docs/bugs.md`, the first part: divisors, and what is partial or replicated. Each test sets up what went wrong elsewhere, says that
//! it did set it up, and compares with one rank.

mod common;
mod groups;
#[path = "common/megatron.rs"]
mod megatron;

use dplan::planfile::PlanFile;
use dplan::runtime::Rows;
use dplan_ir::build::Builder;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{DimId, NodeId};
use dplan_ir::grad::differentiate;
use dplan_ir::graph::{Def, Graph, Init, Type};
use dplan_ir::op::{Activation, Op, Renormalize, Router, Spec};
use dplan_ir::plan::Recompute;
use dplan_ir::program::Program;
use dplan_ir::rule::Assignment;
use dplan_ir::verify::mutate::Damage;
use dplan_planner::drawn::{self, Dice};
use dplan_planner::machine::Cluster;
use groups::{BATCH, LLAMA, MIXTRAL, SEQ, alike, batch, changed, check, import, named, one_rank, plan, reasons, with};
use megatron::Shape;

/// Group 1 (torchtitan#2972): gradients of a pipeline are larger by the number of tokens, since a sum is divided after the backward pass, or is not.
#[test]
fn group_01_gradients_of_a_pipeline_have_the_size_of_one_ranks() {
    let ways = [(2, "pp=2,micro=8"), (4, "pp=4,micro=2"), (4, "dp=2,pp=2,micro=1,schedule=gpipe"), (2, "pp=2,micro=1,schedule=zb-v")];
    for (file, _) in check(&import(LLAMA), &ways) {
        assert!(file.program.stages.len() > 1);
    }
}

/// Group 2 (torchtitan#1733): a pipeline's schedule scales gradients at each micro-batch, so that those of the first ones decay.
#[test]
fn group_02_accumulated_gradients_do_not_decay() {
    let ways = [(2, "pp=2,micro=4"), (2, "pp=2,micro=1"), (4, "dp=2,pp=2,micro=2,zero=2"), (2, "pp=2,micro=2,schedule=interleaved,virtual=2")];
    for (file, _) in check(&import(LLAMA), &ways) {
        assert!(file.program.stages.len() == 2 && file.program.micro_batches > 1);
    }
}

/// Group 3 (torchtitan#2318): the norm of replicated gradients is eight times that of sharded ones.
#[test]
fn group_03_eight_replicas_and_eight_shards_have_one_norm() {
    let trained = check(&import(LLAMA), &[(8, "dp=8,zero=0"), (8, "dp=8,zero=1"), (8, "dp=8,zero=2"), (8, "dp=8,zero=3")]);
    let shared = |at: usize| trained[at].1.copies.values().all(|&n| n > 0);
    assert!(shared(0) && !shared(3), "parameters are whole everywhere with zero 0 alone");
}

/// A Llama in which each target has a weight: the loss is Σ wᵢ·lossᵢ / Σ w, so that parts of a batch differ in what they weigh.
fn weighted() -> Graph {
    let mut b = Builder::new("weighted");
    b.graph = import(LLAMA);
    let (mean, node) = b.graph.forward_nodes().find(|(_, n)| n.op == Op::Mean).map(|(id, n)| (id, n.clone())).unwrap();
    let (losses, weighted) = (node.inputs[0], node.outputs[0]);
    let dims = b.graph.values[losses].ty.dims.clone();
    let weights = b.input("weights", DType::F64, &dims);
    // What was the mean is the product, weights below zero counting as none; behind it stands a new mean.
    b.graph.nodes[mean].op = Op::Gated(Activation::Relu);
    b.graph.nodes[mean].inputs = vec![weights, losses];
    b.graph.values[weighted].ty = Type::dense(DType::F64, dims);
    b.set_layer(node.layer);
    b.graph.loss = Some(b.op("weighted_mean", Op::Mean, &[weighted]).unwrap());
    b.graph
}

/// What the targets of each sequence of the first step weigh.
fn weight_of_sequences(graph: &Graph) -> Vec<f64> {
    let batch = batch(graph, 0);
    let values = batch.inputs.iter().find_map(|rows| match rows {
        Rows::Values(values) => Some(values.clone()),
        Rows::Tokens(_) => None,
    });
    values.unwrap().chunks(SEQ as usize).map(|row| row.iter().map(|x| x.max(0.0)).sum()).collect()
}

/// Group 4 (Megatron-LM#673, #906): with context parallelism the loss is divided once more, or by the wrong part of the tokens.
#[test]
fn group_04_parts_of_a_context_are_weighed_by_their_tokens() {
    let ways = [(2, "cp=2"), (4, "cp=4,zero=3"), (4, "dp=2,cp=2,micro=1"), (4, "cp=2,pp=2,micro=2"), (4, "cp=2,tp=2,sp=on")];
    for (file, _) in check(&weighted(), &ways) {
        assert!(file.plan.cp > 1);
    }
}

/// Group 5 (transformers#34191, verl#5625): the mean of means of micro-batches, or of ranks, that have unequal numbers of tokens.
#[test]
fn group_05_the_mean_is_over_tokens_and_not_over_micro_batches() {
    let model = weighted();
    let weights = weight_of_sequences(&model);
    let (least, most) = weights.iter().fold((f64::MAX, 0.0f64), |(a, b), &w| (a.min(w), b.max(w)));
    assert!(weights.len() as u64 == BATCH && most > 1.5 * least, "micro-batches that differ: {weights:?}");
    let ways = [(1, "micro=1"), (1, "micro=4"), (2, "dp=2,micro=1"), (8, "dp=8,micro=1,zero=2"), (2, "pp=2,micro=1")];
    for (file, _) in check(&model, &ways) {
        assert!(file.plan.dp * file.plan.micro_batches > 1);
    }
}

/// A layer of experts whose router has losses of its own, token by token: lse² (where lse > 0), and a cross entropy that draws tokens to given experts.
fn router_loss() -> Graph {
    let mut b = Builder::new("router-loss");
    let [n, s, h, f, v, e] = [("b", BATCH), ("s", SEQ), ("h", 12), ("f", 10), ("v", 11), ("e", 4)].map(|(name, size)| b.dim(name, size));
    (b.graph.batch, b.graph.sequence) = (Some(n), Some(s));
    let [tokens, targets, experts] = ["tokens", "targets", "experts"].map(|name| b.input(name, DType::I32, &[n, s]));
    let weight = |b: &mut Builder, name: &str, dims: &[DimId]| b.param(name, DType::F64, dims, Init::Normal { std: 0.4 }, vec![]);
    let spec = |text: &str| {
        let (operands, out) = text.split_once("->").unwrap();
        let (left, right) = operands.split_once(',').unwrap();
        Spec { left: left.into(), right: right.into(), out: out.into() }
    };
    let table = weight(&mut b, "in", &[v, h]);
    let x = b.op("x", Op::Embed, &[table, tokens]).unwrap();
    let [router, up, down, head] = [("router", vec![e, h]), ("up", vec![e, f, h]), ("down", vec![e, h, f]), ("head", vec![v, h])]
        .map(|(name, dims)| weight(&mut b, name, &dims));
    let scores = b.op("scores", Op::Einsum(spec("bsh,eh->bse")), &[x, router]).unwrap();
    let gate = b.op("gate", Op::TopKGate(Router::softmax(2, Renormalize::Yes)), &[scores]).unwrap();
    let rows = b.op("rows", Op::Dispatch, &[x, gate]).unwrap();
    let y = b.op("y", Op::ExpertEinsum(spec("bseh,efh->bsef")), &[rows, up, gate]).unwrap();
    let y = b.op("act", Op::Act(Activation::Silu), &[y]).unwrap();
    let y = b.op("z", Op::ExpertEinsum(spec("bsef,ehf->bseh")), &[y, down, gate]).unwrap();
    let y = b.op("combine", Op::Combine, &[y, gate]).unwrap();
    let y = b.op("sum", Op::Add, &[x, y]).unwrap();
    let logits = b.op("logits", Op::Einsum(spec("bsh,vh->bsv")), &[y, head]).unwrap();
    let stats = b.node("stats", Op::CeStats, &[logits, targets]).unwrap();
    let losses = b.op("losses", Op::Sub, &stats).unwrap();
    let of_router = b.node("of_router", Op::CeStats, &[scores, experts]).unwrap();
    let drawn = b.op("drawn", Op::Sub, &of_router).unwrap();
    let squared = b.op("squared", Op::Gated(Activation::Relu), &[of_router[0], of_router[0]]).unwrap();
    let auxiliary = b.op("auxiliary", Op::Add, &[drawn, squared]).unwrap();
    let losses = b.op("all_losses", Op::Add, &[losses, auxiliary]).unwrap();
    b.graph.loss = Some(b.op("loss", Op::Mean, &[losses]).unwrap());
    b.graph
}

/// The same plan under so many random strategies: each op split over its factors, whole, or both ways from one op to the next.
fn shuffled(file: &PlanFile, layer: u32, seeds: u64) -> Vec<PlanFile> {
    let mesh = file.plan.mesh();
    let one = |seed| {
        changed(file, |file| {
            let strategy = drawn::shuffled(&file.graph, &mesh, layer, &mut Dice(seed));
            // The layer alone, not others that run like it.
            file.plan.options.push(file.plan.layer(layer).clone());
            let option = file.plan.options.len() - 1;
            file.plan.layers[layer as usize] = option as u32;
            file.plan.options[option].strategy = strategy;
        })
    };
    (0..seeds).map(one).collect()
}

/// Whether the node's results are split over tensor-parallel ranks.
fn is_split(file: &PlanFile, op: &Op) -> bool {
    let (id, node) = file.graph.forward_nodes().find(|(_, n)| n.op == *op).unwrap();
    let first = file.graph.forward_nodes().find(|(_, n)| n.layer == node.layer).unwrap().0;
    !file.plan.layer(node.layer).strategy[(id.0 - first.0) as usize].used().is_empty()
}

/// Group 6 (Megatron-LM#5047, #3672): what a router's own loss weighs changes with the splits.
#[test]
fn group_06_a_loss_of_the_router_weighs_the_same_under_every_split() {
    let model = router_loss();
    let one = one_rank(&model);
    let mut split = [false; 2];
    for (ranks, pins) in [(2, "tp=2,micro=2"), (4, "tp=4"), (4, "tp=2,cp=2,micro=4"), (4, "dp=2,tp=2,zero=2"), (4, "dp=2,ep=2,tp=2,micro=2")] {
        let file = plan(&model, ranks, pins);
        for file in shuffled(&file, 0, 5) {
            split[usize::from(is_split(&file, &Op::CeStats))] = true;
            alike(pins, file, &one);
        }
    }
    assert_eq!(split, [true; 2], "statistics both of whole and of split logits");
}

/// Group 7 (Megatron-LM#7452): logits that are gathered are counted once for each rank (a loss off by log TP); sinks are left out of the norm.
#[test]
fn group_07_gathered_logits_count_once_and_sinks_are_in_the_norm() {
    let model = import(&with(LLAMA, r#""num_hidden_layers":1,"tie_word_embeddings":false"#));
    let one = one_rank(&model);
    let file = plan(&model, 4, "tp=4");
    let last = model.layer_count() - 1;
    let mut seen = std::collections::BTreeSet::new();
    for file in shuffled(&file, last, 16) {
        let strategy = &file.plan.layer(last).strategy;
        seen.insert(format!("{:?}", &strategy[strategy.len() - 4..]));
        alike("logits over 4 ranks", file, &one);
    }
    assert!(seen.len() > 5, "{seen:?}");
    let golden: serde_json::Value = serde_json::from_str(include_str!("golden/gpt_oss.json")).unwrap();
    let model = import(&golden["config"].to_string());
    let one = one_rank(&model);
    for shape in [Shape { tp: 2, ..Shape::ONE }, Shape { tp: 4, micro: 4, ..Shape::ONE }, Shape { dp: 2, tp: 2, zero: 2, micro: 4, ..Shape::ONE }] {
        let (file, trained) = alike(&format!("{shape:?}"), textbook(&model, shape), &one);
        let sinks = named(&file.graph, "sink");
        assert!(sinks.iter().any(|&p| trained.grads[p].iter().any(|&g| g != 0.0)));
    }
}

/// Group 8 (Megatron-LM#1446): with sequence parallelism each rank has the gradient of its part of the sequence only, and norms' weights drift apart.
#[test]
fn group_08_weights_of_norms_are_the_same_on_all_ranks_of_a_split_sequence() {
    for (file, trained) in check(&import(LLAMA), &[(2, "tp=2,sp=on"), (4, "tp=4,sp=on"), (4, "tp=2,pp=2,sp=on,micro=2")]) {
        assert_eq!(file.plan.boundary, Some(1));
        assert!(named(&file.graph, "norm").iter().all(|&p| trained.copies[p] > 0), "norms are on several ranks");
    }
    // A program that says otherwise of which ranks its gradients are partial over is refused.
    let file = plan(&import(LLAMA), 2, "tp=2,sp=on");
    let damaged: Vec<Program> = (0..20).filter_map(|pick| Damage::WrongPartial.apply(&file.graph, &file.program, pick)).map(|(p, _)| p).collect();
    assert!(!damaged.is_empty() && damaged.iter().all(|p| !reasons(&file.graph, p).is_empty()));
}

/// Group 9 (Megatron-LM#1464): with context parallelism, gradients of projections are partial over parts of the sequence.
#[test]
fn group_09_projections_have_the_gradient_of_the_whole_context() {
    for (file, trained) in
        check(&import(LLAMA), &[(2, "cp=2"), (4, "cp=4"), (8, "cp=2,tp=2,pp=2,micro=2,sp=on"), (4, "dp=2,cp=2,zero=3,recompute=full")])
    {
        assert!(file.plan.cp > 1);
        let projections = ["q_proj", "k_proj", "v_proj"].map(|part| named(&file.graph, part));
        assert!(projections.iter().flatten().all(|&p| trained.grads[p].iter().any(|&g| g != 0.0)));
    }
}

/// A plan as in the Megatron papers, whatever a search would choose.
fn textbook(model: &Graph, shape: Shape) -> PlanFile {
    let mut graph = model.clone();
    graph.set_batch(shape.dp * shape.micro);
    let graph = differentiate(&graph).unwrap();
    let cluster = Cluster::parse(&format!("cpu:{}", shape.dp * shape.tp * shape.pp)).unwrap();
    let plan = megatron::plan(&graph, shape, BATCH);
    changed(&PlanFile { graph, cluster, plan, program: Program::default(), seq: SEQ }, |_| {})
}

/// Group 10 (Megatron-LM#1754): a vocabulary that ranks do not divide; padding takes part in the loss.
#[test]
fn group_10_a_vocabulary_that_ranks_do_not_divide_trains_alike() {
    for config in [LLAMA.to_string(), with(LLAMA, r#""tie_word_embeddings":false"#)] {
        let model = import(&config);
        let one = one_rank(&model);
        for shape in [Shape { tp: 2, ..Shape::ONE }, Shape { tp: 4, micro: 4, ..Shape::ONE }, Shape { tp: 2, pp: 2, micro: 2, ..Shape::ONE }] {
            let file = textbook(&model, shape);
            let vocabulary = file.graph.dims.iter().find(|(_, d)| d.size == 37).unwrap().0;
            assert!(file.program.padded.0[vocabulary] > 37, "it is split, and so it is padded");
            alike(&format!("{shape:?}"), file, &one);
        }
    }
}

/// Whether a node works on one of these parameters.
fn reads(graph: &Graph, node: NodeId, parts: &[&str]) -> bool {
    let of = |v| graph.param_of(v).is_some() && parts.iter().any(|part| graph.values[v].name.contains(part));
    graph.nodes[node].inputs.iter().any(|&v| of(v))
}

/// The plan with some nodes left whole on every tensor-parallel rank.
fn whole(file: &PlanFile, is_whole: impl Fn(&Graph, NodeId) -> bool) -> PlanFile {
    changed(file, |file| {
        for layer in 0..file.graph.layer_count() {
            let option = file.plan.layers[layer as usize] as usize;
            let nodes = file.graph.forward_nodes().filter(|(_, n)| n.layer == layer);
            for (assignment, (id, _)) in file.plan.options[option].strategy.iter_mut().zip(nodes) {
                if is_whole(&file.graph, id) {
                    *assignment = Assignment::default();
                }
            }
        }
    })
}

/// Group 11 (bigcode Megatron-LM#35): one head of keys and values for all ranks: their copies get the gradients of some queries only, and drift apart.
#[test]
fn group_11_one_head_of_keys_does_not_drift_between_ranks() {
    let model = import(&with(LLAMA, r#""num_key_value_heads":1"#));
    let one = one_rank(&model);
    for shape in [Shape { tp: 2, ..Shape::ONE }, Shape { tp: 6, micro: 4, ..Shape::ONE }, Shape { dp: 2, tp: 2, zero: 1, micro: 2, ..Shape::ONE }] {
        let file = textbook(&model, shape);
        let rotated_keys = |graph: &Graph, id: NodeId| matches!(graph.nodes[id].op, Op::Rope(_)) && reads_result(graph, id, &["k_proj"]);
        let file = whole(&file, |graph, id| reads(graph, id, &["k_proj", "v_proj"]) || rotated_keys(graph, id));
        let (file, trained) = alike(&format!("{shape:?}"), file, &one);
        let heads = ["k_proj", "v_proj"].map(|part| named(&file.graph, part));
        assert!(heads.iter().flatten().all(|&p| trained.copies[p] > 0), "keys and values are on several ranks");
        let everywhere = |p| trained.params[p].len() * (shape.dp * shape.tp - 1) as usize;
        assert!(named(&file.graph, "q_proj").iter().all(|&p| trained.copies[p] < everywhere(p)), "queries are split");
    }
}

/// Whether a node reads what a node on one of these parameters makes.
fn reads_result(graph: &Graph, node: NodeId, parts: &[&str]) -> bool {
    graph.nodes[node].inputs.iter().any(|&v| matches!(graph.values[v].def, Def::Node(from, _) if reads(graph, from, parts)))
}

/// Group 12 (Megatron-LM#5916): experts are left out of the norm, or their gradients are summed over ranks that have other experts; or experts are split over
/// other ranks than the rest.
#[test]
fn group_12_experts_are_in_the_norm_and_summed_over_their_own_ranks() {
    let model = import(MIXTRAL);
    let ways = [(4, "dp=2,ep=2,tp=2"), (4, "dp=4,ep=2,zero=2"), (8, "dp=4,ep=4,tp=2,zero=1"), (4, "dp=2,ep=2,pp=2,micro=2,zero=3")];
    for (file, trained) in check(&model, &ways) {
        let experts = named(&file.graph, "experts");
        assert!(file.plan.ep > 1 && experts.iter().all(|&p| trained.grads[p].iter().any(|&g| g != 0.0)));
    }
    // Experts over data ranks and over tensor-parallel ranks at once.
    let routed_alone = router_loss();
    let one = one_rank(&routed_alone);
    for file in shuffled(&plan(&routed_alone, 8, "dp=4,ep=2,tp=2,micro=2,zero=1"), 0, 5) {
        alike("experts over two axes", file, &one);
    }
    // Attention split and experts whole, and the other way round.
    let (one, file) = (one_rank(&model), textbook(&model, Shape { dp: 2, tp: 2, micro: 4, zero: 1, ..Shape::ONE }));
    let routed = |graph: &Graph, id: NodeId| {
        let node = &graph.nodes[id];
        node.inputs.iter().chain(&node.outputs).any(|&v| graph.values[v].ty.layout != dplan_ir::graph::Layout::Dense)
    };
    let attention = |graph: &Graph, id: NodeId| !routed(graph, id);
    let (experts_whole, experts_alone) = (whole(&file, routed), whole(&file, attention));
    assert!(experts_whole.program != experts_alone.program && experts_whole.program != file.program);
    alike("experts whole", experts_whole, &one);
    alike("experts alone split", experts_alone, &one);
}

/// Group 13 (TransformerEngine#715, VeOmni#184): weights that every rank has are counted once for each in the norm: the latent projections of MLA, and replicas.
#[test]
fn group_13_what_every_rank_has_counts_once_in_the_norm() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("golden/deepseek_v2.json")).unwrap();
    let config = with(&golden["config"].to_string(), r#""num_attention_heads":8,"num_key_value_heads":8"#);
    let model = import(&config);
    let (one, two) = (one_rank(&model), Shape { dp: 2, tp: 4, zero: 1, micro: 4, ..Shape::ONE });
    for shape in [Shape { tp: 8, ..Shape::ONE }, two] {
        let (file, trained) = alike(&format!("{shape:?}"), textbook(&model, shape), &one);
        assert!(named(&file.graph, "kv_a_proj").iter().all(|&p| trained.copies[p] > 0), "every rank has the latent projections");
    }
    let file = textbook(&model, two);
    let counted: Vec<Vec<String>> =
        (0..20).filter_map(|pick| Damage::CountOften.apply(&file.graph, &file.program, pick)).map(|(p, _)| reasons(&file.graph, &p)).collect();
    assert!(!counted.is_empty() && counted.iter().all(|r| r.iter().any(|why| why.contains("but it is replicated over"))), "{counted:?}");
}

/// Group 14 (Megatron-LM#656, piper#13): the copies of a tied embedding on the first and on the last stage drift apart.
#[test]
fn group_14_both_ends_of_a_tied_embedding_stay_the_same() {
    let ways = [
        (2, "pp=2,micro=2"),
        (4, "pp=4,micro=1"),
        (4, "dp=2,pp=2,zero=0,micro=1"),
        (8, "dp=2,tp=2,pp=2,zero=1,micro=2,sp=on"),
        (4, "dp=2,pp=2,zero=3,micro=2"),
    ];
    for (file, trained) in check(&import(LLAMA), &ways) {
        let table = named(&file.graph, "embed_tokens")[0];
        let ends = file.program.stages.iter().filter(|s| s.buckets.values().any(|b| b.members.iter().any(|m| m.param == table))).count();
        assert!(ends == 2 && trained.copies[table] > 0, "{ends}");
        let (untied, _) = Damage::Untie.apply(&file.graph, &file.program, 0).unwrap();
        assert!(!reasons(&file.graph, &untied).is_empty());
    }
}

/// Group 34 (torchtitan#2574, transformers#48307): more tensor-parallel ranks than heads of keys and values.
#[test]
fn group_34_more_ranks_than_heads_of_keys_is_no_error() {
    let shapes = [
        Shape { tp: 4, ..Shape::ONE },
        Shape { tp: 6, micro: 4, ..Shape::ONE },
        Shape { dp: 2, tp: 4, zero: 1, micro: 2, ..Shape::ONE },
        Shape { tp: 4, sequence: true, recompute: Recompute::Full, ..Shape::ONE },
    ];
    for heads in [1, 2, 3] {
        let model = import(&with(LLAMA, &format!(r#""num_hidden_layers":2,"num_key_value_heads":{heads}"#)));
        let one = one_rank(&model);
        for shape in shapes {
            assert!(shape.tp > heads);
            alike(&format!("{heads} heads, {shape:?}"), textbook(&model, shape), &one);
        }
    }
}
