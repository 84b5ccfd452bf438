//! What several test binaries share: reference data made by others, the built program, tensor files.
#![allow(dead_code)]

use dplan::compile::Options;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{ParamId, Table};
use dplan_ir::graph::Graph;
use dplan_ir::optimizer::Optimizer;
use dplan_ir::plan::Clip;
use dplan_planner::machine::Cluster;
use dplan_planner::pins::Pins;
use dplan_planner::request::Solver;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder `shared`, found by `DPLAN_SHARED`, or beside this checkout, or beside the main checkout if this is a worktree of it. Where it is
/// absent, the caller's test says so and proves nothing.
pub fn shared() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let main = std::fs::read_to_string(root.join(".git")).ok().and_then(|link| {
        let git = PathBuf::from(link.trim().strip_prefix("gitdir: ")?);
        git.ancestors().nth(3).map(Path::to_path_buf)
    });
    let beside = |checkout: &Path| checkout.parent().map(|p| p.join("shared"));
    let named = std::env::var_os("DPLAN_SHARED").map(PathBuf::from);
    let found = [named, beside(root), main.as_deref().and_then(beside)].into_iter().flatten().find(|p| p.join("oracle").is_dir());
    if found.is_none() {
        eprintln!("SKIPPED: no shared data (set DPLAN_SHARED to the folder that holds oracle/ and models/)");
    }
    found
}

/// One file or folder of the shared data.
pub fn reference(what: &str) -> Option<PathBuf> {
    shared().map(|root| root.join(what))
}

/// A folder of this test's own, empty.
pub fn scratch(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Runs the built `dplan`.
pub fn dplan<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dplan")).args(args).output().expect("the binary was built with the tests")
}

/// Runs the built `dplan`, which must succeed; its standard output.
pub fn dplan_ok<S: AsRef<std::ffi::OsStr> + std::fmt::Debug>(args: &[S]) -> String {
    let output = dplan(args);
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "dplan {args:?} ended with {}\n{stdout}\n{stderr}", output.status);
    stdout.into_owned()
}

/// The tensors of a safetensors file, as f64.
pub fn tensors(path: &Path) -> BTreeMap<String, Vec<f64>> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.tensors()
        .into_iter()
        .map(|(name, view)| {
            let data = match view.dtype() {
                safetensors::Dtype::F32 => view.data().chunks_exact(4).map(|c| f64::from(f32::from_le_bytes(c.try_into().unwrap()))).collect(),
                safetensors::Dtype::F64 => view.data().chunks_exact(8).map(|c| f64::from_le_bytes(c.try_into().unwrap())).collect(),
                other => panic!("{name}: unexpected {other:?}"),
            };
            (name, data)
        })
        .collect()
}

/// Largest tensor error between two files with the same tensors: ‖x−y‖ / max(‖y‖, 1e-6·‖all‖), and the tensor that has it.
/// Some gradients are zero by mathematics, hence the floor.
pub fn worst_tensor_error(ours: &BTreeMap<String, Vec<f64>>, reference: &BTreeMap<String, Vec<f64>>) -> (f64, String) {
    assert_eq!(ours.keys().collect::<Vec<_>>(), reference.keys().collect::<Vec<_>>(), "the files hold different tensors");
    let norm = |x: &[f64]| x.iter().map(|v| v * v).sum::<f64>().sqrt();
    let all = reference.values().map(|v| norm(v).powi(2)).sum::<f64>().sqrt();
    let mut worst = (0.0, String::new());
    for (name, y) in reference {
        let x = &ours[name];
        assert_eq!(x.len(), y.len(), "{name}");
        let difference: Vec<f64> = x.iter().zip(y).map(|(a, b)| a - b).collect();
        let error = norm(&difference) / norm(y).max(1e-6 * all);
        assert!(error.is_finite(), "{name} is not finite");
        if error > worst.0 {
            worst = (error, name.clone());
        }
    }
    worst
}

/// Parameters, or their gradients, whole.
pub type Tensors = Table<ParamId, Vec<f64>>;

/// Largest ‖x − y‖ / max(‖y‖, 1e-6·‖all y‖) of all tensors, and whose it is: some gradients are zero by mathematics, hence the floor.
pub fn distance(graph: &Graph, found: &Tensors, expected: &Tensors) -> (f64, String) {
    let norm = |data: &mut dyn Iterator<Item = f64>| data.map(|x| x * x).sum::<f64>().sqrt();
    let all = norm(&mut expected.values().flatten().copied());
    let one = |(p, y): (ParamId, &Vec<f64>)| {
        assert_eq!(found[p].len(), y.len());
        let error = norm(&mut found[p].iter().zip(y).map(|(a, b)| a - b)) / norm(&mut y.iter().copied()).max(1e-6 * all);
        (error, graph.values[graph.params[p].value].name.clone())
    };
    expected.iter().map(one).fold((0.0, String::new()), |worst, at| if at.0 > worst.0 || at.0.is_nan() { at } else { worst })
}

/// The JSON objects that `run --json` prints, one a line.
pub fn json_lines(text: &str) -> Vec<serde_json::Value> {
    text.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect()
}

/// The plans under which every reference run must come out: name, ranks, pins.
pub const PLANS: &[(&str, u32, &str)] = &[
    ("one rank", 1, "dp=1,tp=1,pp=1"),
    ("dp2", 2, "dp=2,zero=0"),
    ("dp4 zero1", 4, "dp=4,zero=1"),
    ("dp4 zero2", 4, "dp=4,zero=2"),
    ("dp4 zero3", 4, "dp=4,zero=3"),
    ("tp2", 2, "tp=2"),
    ("tp4", 4, "tp=4"),
    ("pp2", 2, "pp=2"),
    ("pp4", 4, "pp=4"),
    ("dp2 tp2 pp2 zero1", 8, "dp=2,tp=2,pp=2,zero=1"),
    ("tp2 pp2 recompute micro1", 4, "tp=2,pp=2,recompute=full,micro=1"),
    ("dp2 pp2 zero3", 4, "dp=2,pp=2,zero=3"),
    ("pp4 micro4", 4, "pp=4,micro=4"),
    ("cp2", 2, "cp=2"),
    ("cp2 ring", 2, "cp=2,keys=ring"),
    ("cp4 ring zero3", 4, "cp=4,keys=ring,zero=3"),
    ("cp2 ring tp2 pp2 recompute", 8, "cp=2,keys=ring,tp=2,pp=2,sp=on,recompute=full"),
    ("cp4 zero3", 4, "cp=4,zero=3"),
    ("dp2 cp2 zero2", 4, "dp=2,cp=2,zero=2"),
    ("tp2 pp2 selective", 4, "tp=2,pp=2,recompute=selective,micro=2"),
    ("dp4 ep2", 4, "dp=4,ep=2,zero=1"),
    ("dp4 ep4 zero3", 4, "dp=4,ep=4,zero=3"),
    ("dp2 ep2 tp2 pp2", 8, "dp=2,ep=2,tp=2,pp=2,zero=2,recompute=full"),
    ("dp2 ep2 cp2", 4, "dp=2,ep=2,cp=2"),
    ("cp2 tp2 pp2 recompute", 8, "cp=2,tp=2,pp=2,sp=on,recompute=full"),
    ("pp2 interleaved recompute", 2, "pp=2,schedule=interleaved,virtual=2,recompute=full,micro=2"),
    ("dp2 pp2 interleaved zero3", 4, "dp=2,pp=2,schedule=interleaved,virtual=2,zero=3,micro=1"),
    ("pp4 zb-h1", 4, "pp=4,schedule=zb-h1,micro=1"),
    ("tp2 pp2 zb-v recompute", 4, "tp=2,pp=2,schedule=zb-v,recompute=full,micro=1"),
    ("dp2 pp2 zb-v zero1", 4, "dp=2,pp=2,schedule=zb-v,zero=1,micro=1"),
    ("dp2 pp2 offloaded optimizer and activations", 4, "dp=2,pp=2,zero=1,micro=1,recompute=none,offload=optimizer/activations"),
    ("pp2 interleaved offloaded recompute", 2, "pp=2,schedule=interleaved,virtual=2,recompute=full,micro=2,offload=optimizer:nvme/activations"),
    ("dp2 cp2 zero3 offloaded parameters and activations", 4, "dp=2,cp=2,zero=3,recompute=selective,offload=parameters/activations:nvme"),
];

/// Compiles a small Llama with these pins, a batch of 8 and sequences of 8, into `dir`; gives the plan's path.
pub fn small_plan(dir: &Path, pins: &str, ranks: u32, precision: &str) -> PathBuf {
    let config = dir.join("config.json");
    let text = r#"{"model_type":"llama","vocab_size":256,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":16}"#;
    std::fs::write(&config, text).unwrap();
    let plan = dir.join(format!("plan-{}.json", pins.replace([',', '='], "-")));
    let cluster = format!("cpu:{ranks}");
    let (config, out) = (config.to_str().unwrap(), plan.to_str().unwrap());
    let args = ["compile", config, "--cluster", &cluster, "--batch", "8", "--seq", "8", "--precision", precision, "--pin", pins, "-o", out, "--json"];
    dplan_ok(&args);
    plan
}

/// An embedding, one residual block and a head in dplan's own JSON; the head reads the table `head`, which may be the embedding's, `table`.
pub fn residual_block([s, v, h, f]: [u64; 4], head: &str) -> String {
    let own = if head == "table" { String::new() } else { format!(r#", "{head}": ["v", "h"]"#) };
    format!(
        r#"{{
  "dplan": 1,
  "dims": {{ "b": "batch", "s": {s}, "v": {v}, "h": {h}, "f": {f} }},
  "inputs": [{{ "name": "tokens", "dims": ["b", "s"] }}, {{ "name": "targets", "dims": ["b", "s"] }}],
  "params": {{ "table": ["v", "h"], "w1": ["f", "h"], "w2": ["h", "f"]{own} }},
  "nodes": [
    {{ "name": "x", "op": "embed", "in": ["table", "tokens"] }},
    {{ "name": "up", "op": "einsum", "spec": "bsh,fh->bsf", "in": ["x", "w1"] }},
    {{ "name": "act", "op": "act", "function": "silu", "in": ["up"] }},
    {{ "name": "down", "op": "einsum", "spec": "bsf,hf->bsh", "in": ["act", "w2"] }},
    {{ "name": "y", "op": "add", "in": ["x", "down"] }},
    {{ "name": "logits", "op": "einsum", "spec": "bsh,vh->bsv", "in": ["y", "{head}"] }},
    {{ "name": "loss", "op": "cross_entropy", "in": ["logits", "targets"] }}
  ],
  "loss": "loss"
}}"#
    )
}

/// What a compilation is asked for: AdamW, clipped, without limits.
pub fn options(cluster: &str, batch: u64, compute: DType, pins: &str) -> Options<'static> {
    Options {
        cluster: Cluster::parse(cluster).unwrap(),
        batch,
        compute,
        optimizer: Optimizer::AdamW,
        clip: Clip::GlobalNorm,
        pins: Pins::parse(pins).unwrap(),
        memory_limit: None,
        solver: Solver::Exact,
        deadline: None,
    }
}
