//! Plans that every engineer knows: what is chosen, and the reason. The models have the shapes of published ones.

mod common;

use common::options;
use dplan::compile::{Options, best, compile};
use dplan::import::{ImportOptions, model_from_bytes};
use dplan_ir::dtype::DType;
use dplan_ir::graph::{Graph, Node};
use dplan_ir::op::Op;
use dplan_ir::plan::{Plan, Recompute, Zero};
use dplan_ir::program::{Instr, Program, StageProgram};
use dplan_ir::rule::Assignment;
use dplan_planner::machine::Machine;
use dplan_planner::predict::Prediction;
use dplan_planner::units::{Bytes, PerSecond};

const GPT2: &str = r#"{"model_type":"gpt2","vocab_size":50257,"n_positions":1024,"n_embd":768,"n_layer":12,"n_head":12}"#;
const LLAMA_8B: &str = r#"{"model_type":"llama","vocab_size":128256,"hidden_size":4096,"intermediate_size":14336,"num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":8,"max_position_embeddings":131072}"#;
const LLAMA_70B: &str = r#"{"model_type":"llama","vocab_size":128256,"hidden_size":8192,"intermediate_size":28672,"num_hidden_layers":80,"num_attention_heads":64,"num_key_value_heads":8,"max_position_embeddings":131072}"#;

fn import(config: &str, seq: u64) -> Graph {
    let options = ImportOptions { seq: Some(seq), compute: DType::Bf16, family: None };
    model_from_bytes("config.json", config.as_bytes(), &options).unwrap().graph
}

fn plan_on(graph: &Graph, cluster: Machine, batch: u64, pins: &str) -> (Plan, Prediction) {
    let options = Options { cluster: cluster.into(), ..options("cpu:1", batch, DType::Bf16, pins) };
    best(graph, &options).unwrap()
}

fn cluster(text: &str) -> Machine {
    Machine::parse(text).unwrap()
}

/// ZeRO stage and recomputation of the blocks. Embedding and head are left out: what a lookup keeps costs nothing to make again.
fn blocks(plan: &Plan) -> impl Iterator<Item = (Zero, Recompute)> {
    (1..plan.layers.len() as u32 - 1).map(|l| (plan.layer(l).zero, plan.layer(l).recompute))
}

/// Everything fits on each device, so nothing is worth waiting for but the gradients: data parallelism, no recomputation, and parameters that are not gathered again in
/// each of several micro-batches.
#[test]
fn a_model_that_fits_with_room_is_trained_by_data_parallelism() {
    let (plan, _) = plan_on(&import(GPT2, 1024), cluster("h100:8x1"), 512, "micro=4");
    assert_eq!((plan.dp, plan.tp, plan.cp, plan.pp()), (8, 1, 1, 1));
    assert!(blocks(&plan).all(|(zero, recompute)| zero <= Zero(1) && recompute == Recompute::None), "{:?}", plan.options);
}

/// Gathering parameters in every pass and computing twice cost time, and only memory pays for them.
#[test]
fn parameters_are_sharded_and_layers_recomputed_only_when_memory_asks() {
    let graph = import(LLAMA_8B, 8192);
    let (tight, slow) = plan_on(&graph, cluster("a100-40g:8x4"), 512, "tp=1,cp=1,pp=1,micro=1");
    assert!(blocks(&tight).any(|(zero, recompute)| zero == Zero(3) || recompute != Recompute::None), "{:?}", tight.options);
    let mut roomy = cluster("a100-40g:8x4");
    roomy.device.memory = Bytes(roomy.device.memory.0 * 16);
    let (plan, quick) = plan_on(&graph, roomy, 512, "tp=1,cp=1,pp=1,micro=1");
    assert!(blocks(&plan).all(|(zero, recompute)| zero < Zero(3) && recompute == Recompute::None), "{:?}", plan.options);
    assert!(quick.step < slow.step);
}

/// A scatter and a gather move what an all-reduce does, and what is between them is done on a share of the sequence: norms are quicker and activations smaller.
#[test]
fn sequences_are_sharded_where_tensor_parallelism_makes_it_free() {
    let (plan, _) = plan_on(&import(LLAMA_70B, 4096), cluster("h100:8x4"), 64, "tp=8,cp=1");
    assert_eq!(plan.boundary, Some(1));
}

/// More memory, and quicker links, allow every plan that was there before.
#[test]
fn more_memory_and_quicker_links_are_never_slower() {
    let graph = import(LLAMA_8B, 4096);
    let step = |machine: &Machine| plan_on(&graph, machine.clone(), 64, "cp=1").1.step;
    let base = cluster("a100-40g:8x2");
    let own = step(&base);
    let percent = 150;
    let scale = |rate: PerSecond| PerSecond(rate.0 * percent / 100);
    let mut memory = base.clone();
    memory.device.memory = Bytes(base.device.memory.0 * percent / 100);
    let mut inside = base.clone();
    inside.intra.bandwidth = scale(base.intra.bandwidth);
    let mut between = base.clone();
    between.inter.bandwidth = scale(base.inter.bandwidth);
    for (what, machine) in [("memory", memory), ("links in nodes", inside), ("links between nodes", between)] {
        let other = step(&machine);
        assert!(other <= own, "{percent} % {what}: {other} after {own}");
    }
}

/// A sequence of 128 K positions is more activation than a device holds next to a model, and attention over it is most of the work: positions are shared out.
#[test]
fn long_sequences_are_split_by_context_parallelism() {
    let (plan, _) = plan_on(&import(LLAMA_8B, 131_072), cluster("h100:8x2"), 16, "tp=1,pp=1");
    assert!(plan.cp > 1, "dp {} cp {}", plan.dp, plan.cp);
}

/// Experts are most of the parameters and every token visits few: a rank that keeps some of them for many ranks' tokens reads fewer weights for each token, and keeps fewer states.
#[test]
fn many_experts_are_shared_out_by_expert_parallelism() {
    let config = r#"{"model_type":"qwen3_moe","vocab_size":32000,"hidden_size":2048,"intermediate_size":6144,"moe_intermediate_size":768,"num_hidden_layers":4,"num_attention_heads":32,"num_key_value_heads":4,"head_dim":128,"num_experts":128,"num_experts_per_tok":8,"decoder_sparse_step":1,"norm_topk_prob":true,"max_position_embeddings":32768}"#;
    let (plan, _) = plan_on(&import(config, 4096), cluster("h100:8x1"), 64, "tp=1,cp=1,pp=1,micro=1");
    assert!(plan.ep > 1, "dp {} ep {}", plan.dp, plan.ep);
}

/// Tensor parallelism moves activations several times in every layer: over a slow network it would wait for them, so it stays where links are fast.
#[test]
fn tensor_parallelism_stays_inside_nodes_on_slow_networks() {
    let graph = import(LLAMA_70B, 4096);
    let mut slow = cluster("a100-80g:4x8");
    slow.inter.bandwidth = PerSecond(slow.inter.bandwidth.0 / 8);
    let (plan, _) = plan_on(&graph, slow, 64, "cp=1,micro=1");
    assert!((2..=4).contains(&plan.tp), "tp {} pp {} dp {}", plan.tp, plan.pp(), plan.dp);
}

/// On a Llama block without sequence parallelism the split that Megatron-LM wrote by hand (arXiv:1909.08053) is found from the factor rules: queries, keys, values, gate and up by
/// their results, output and down by their operands, so that a block has two all-reduces forward and two backward.
#[test]
fn megatrons_pairing_of_columns_and_rows_is_found() {
    let compiled = |blocks: u64| {
        let config = format!(
            r#"{{"model_type":"llama","vocab_size":32000,"hidden_size":4096,"intermediate_size":11008,"num_hidden_layers":{blocks},"num_attention_heads":32,"num_key_value_heads":8,"max_position_embeddings":4096}}"#
        );
        compile(&import(&config, 4096), &options("h100:2x1", 2, DType::Bf16, "tp=2,sp=0,recompute=none")).unwrap().file
    };
    let (two, three) = (compiled(2), compiled(3));
    assert_eq!(collectives(&three.program) - collectives(&two.program), 4);
    for layer in 1..3 {
        let nodes = two.graph.forward_nodes().filter(|(_, n)| n.layer == layer);
        let products: Vec<_> = nodes.zip(&two.plan.layer(layer).strategy).filter(|((_, n), _)| matches!(n.op, Op::Einsum(_))).collect();
        assert_eq!(products.len(), 7);
        // The spec's letters that tensor parallelism splits: of the results of queries, keys, values, gate and up; of what output and down sum.
        let tensor = two.plan.mesh().tp();
        let split = |((_, node), assignment): &((_, &Node), &Assignment)| {
            let letters = assignment.0.iter().filter(|(_, axes)| axes.intersects(tensor)).map(|(l, _)| l.to_string());
            let Op::Einsum(spec) = &node.op else { unreachable!() };
            format!("{},{}->{}: {}", spec.left, spec.right, spec.out, letters.collect::<String>())
        };
        let expected = [
            "bsh,grdh->bsgrd: g",
            "bsh,gdh->bsgd: g",
            "bsh,gdh->bsgd: g",
            "bsgrd,hgrd->bsh: g",
            "bsh,fh->bsf: f",
            "bsh,fh->bsf: f",
            "bsf,hf->bsh: f",
        ];
        assert_eq!(products.iter().map(split).collect::<Vec<_>>(), expected);
    }
}

fn collectives(program: &Program) -> usize {
    let body = |stage: &StageProgram| stage.segments.values().flat_map(|s| &s.body).filter(|i| matches!(i.instr, Instr::Collective { .. })).count();
    program.stages.iter().map(body).sum()
}

/// A table of 200 million rows is nearly all of the model: no device holds its states, gathering it costs more than the step, and a rank needs few of its rows.
#[test]
fn a_wide_embedding_is_sharded_by_rows() {
    let text = r#"{"dplan":1,"name":"wide","dims":{"b":"batch","s":32,"v":200000000,"h":64,"f":256,"c":1000},
        "inputs":[{"name":"tokens","dims":["b","s"]},{"name":"targets","dims":["b","s"]}],
        "params":{"table":["v","h"],"norm":{"dims":["h"],"init":"ones"},"up":["f","h"],"down":["h","f"],"head":["c","h"]},
        "nodes":[{"name":"x","op":"embed","in":["table","tokens"]},{"name":"y","op":"rms_norm","eps":1e-5,"in":["x","norm"]},
            {"name":"u","op":"einsum","spec":"bsh,fh->bsf","in":["y","up"]},{"name":"a","op":"act","function":"relu","in":["u"]},
            {"name":"d","op":"einsum","spec":"bsf,hf->bsh","in":["a","down"]},{"name":"z","op":"add","in":["x","d"]},
            {"name":"scores","op":"einsum","spec":"bsh,ch->bsc","in":["z","head"]},{"name":"loss","op":"cross_entropy","in":["scores","targets"]}],
        "loss":"loss"}"#;
    let import = ImportOptions { compute: DType::Bf16, ..ImportOptions::default() };
    let graph = model_from_bytes("wide.json", text.as_bytes(), &import).unwrap().graph;
    let (plan, prediction) = plan_on(&graph, cluster("h100:8x1"), 4096, "");
    assert_eq!((plan.tp, plan.pp()), (8, 1), "dp {}", plan.dp);
    // Parameter, master copy, gradient and two moments of an eighth of the table: 18 bytes an element.
    let eighth = 200_000_000 * 64 / 8 * 18;
    let states = prediction.memory[0].arena.states;
    assert!((eighth..eighth + eighth / 100).contains(&states), "{states} bytes of states");
}
