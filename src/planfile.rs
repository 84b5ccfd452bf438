//! `plan.json`: all that is needed to verify and run a plan, and nothing that depends on how it was found.
//!
//! It holds the model's forward graph and the programs as text (one line an array element, so that plans can be read and compared), the cluster, and
//! the choices. The backward pass is derived again on load; costs are recomputed; search statistics are not in it: equal plans are equal bytes.

use crate::cluster;
use dplan_ir::dtype::DType;
use dplan_ir::entity::BufferId;
use dplan_ir::grad;
use dplan_ir::graph::Graph;
use dplan_ir::mesh::{AxisSet, Degrees, Keys, MAX_AXES, Mesh};
use dplan_ir::nest::Nest;
use dplan_ir::optimizer::Optimizer;
use dplan_ir::plan::{Away, Clip, Gathered, LayerPlan, Placement, Plan, Recompute, Schedule, StagePlan, Wire, Zero};
use dplan_ir::program::{Content, Instr, Pattern, Program, StageProgram};
use dplan_ir::rule::Assignment;
use dplan_ir::sync::Sync;
use dplan_ir::text;
use dplan_planner::machine::Cluster;
use serde::{Deserialize, Serialize};
use std::path::Path;
use thiserror::Error;

/// Changes when a reader of older files would misread newer ones.
pub const VERSION: u32 = 1;

/// A plan with everything it refers to.
#[derive(Clone, Debug)]
pub struct PlanFile {
    /// With its backward pass, and the batch dim set to one micro-batch over all data-parallel ranks.
    pub graph: Graph,
    pub cluster: Cluster,
    pub plan: Plan,
    pub program: Program,
    pub seq: u64,
}

#[derive(Debug, Error)]
pub enum PlanFileError {
    #[error("{path}: cannot read")]
    Read { path: String, source: std::io::Error },
    #[error("{path}:{line}:{column}: not a plan: {what}")]
    Json { path: String, line: usize, column: usize, what: String },
    #[error("{path}: version {found}, this dplan reads version {VERSION}; compile the plan again")]
    Version { path: String, found: u32 },
    #[error("{path}: `{at}`: {what}")]
    Wrong { path: String, at: String, what: String },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Json {
    dplan_plan: u32,
    cluster: cluster::Json,
    precision: String,
    optimizer: String,
    clip: String,
    /// Absent where nothing is rounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wire: Option<String>,
    /// Absent where one collective sums gradients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sync: Option<String>,
    /// Absent where degrees are nested as usual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    map: Option<String>,
    seq: u64,
    choices: Choices,
    graph: Vec<String>,
    program: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Choices {
    dp: u64,
    ep: u64,
    cp: u64,
    /// `ring`, where keys and values go round among context-parallel ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keys: Option<String>,
    tp: u64,
    micro_batch: u64,
    micro_batches: u64,
    schedule: String,
    /// Virtual stages on each stage.
    r#virtual: u64,
    /// Dim of layer boundaries that tensor-parallel ranks shard.
    boundary: Option<u32>,
    /// First and last layer of each virtual stage, in the order of layers.
    stages: Vec<[u32; 2]>,
    /// Where the cluster has groups: these in the order in which ranks are counted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    placement: Vec<u8>,
    options: Vec<OptionJson>,
    layers: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OptionJson {
    zero: u8,
    offload: String,
    recompute: String,
    gathered: String,
    /// For each forward node: `f=tp0.tp1 s=tp2`, a factor and the axes that split it; empty if replicated.
    strategy: Vec<String>,
}

impl PlanFile {
    /// The file's text: equal plans give equal bytes.
    pub fn to_json(&self) -> String {
        let plan = &self.plan;
        let mesh = plan.mesh();
        let mut forward = self.graph.clone();
        forward.strip_backward();
        let json = Json {
            dplan_plan: VERSION,
            cluster: cluster::to_json(&self.cluster),
            precision: plan.compute.to_string(),
            optimizer: plan.optimizer.name().into(),
            clip: clip_name(plan.clip).into(),
            wire: plan.wire.is_lossy().then(|| plan.wire.name()),
            sync: (plan.sync != Sync::Flat).then(|| plan.sync.name()),
            map: (plan.nest != Nest::default()).then(|| plan.nest.to_string()),
            seq: self.seq,
            choices: Choices {
                dp: plan.dp,
                ep: plan.ep,
                cp: plan.cp,
                keys: (plan.keys != Keys::Gathered).then(|| plan.keys.name().into()),
                tp: plan.tp,
                micro_batch: plan.micro_batch,
                micro_batches: plan.micro_batches,
                schedule: plan.schedule.name().into(),
                r#virtual: plan.virtual_stages,
                boundary: plan.boundary,
                stages: plan.stages.iter().map(|s| [s.first, s.last]).collect(),
                placement: match self.cluster.groups().len() {
                    1 => Vec::new(),
                    groups => plan.placement.0[..groups].to_vec(),
                },
                options: plan
                    .options
                    .iter()
                    .map(|o| OptionJson {
                        zero: o.zero.0,
                        offload: o.away().name(),
                        recompute: o.recompute.name().into(),
                        gathered: gathered_name(o.gathered).into(),
                        strategy: o.strategy.iter().map(|a| assignment_text(a, &mesh)).collect(),
                    })
                    .collect(),
                layers: plan.layers.clone(),
            },
            graph: lines(&text::print_graph(&forward)),
            program: lines(&text::print_program(&self.program, &self.graph)),
        };
        let mut out = serde_json::to_string_pretty(&json).unwrap_or_default();
        out.push('\n');
        out
    }

    /// Reads and checks a plan file; the program's proof is another matter ([`dplan_ir::verify`]).
    ///
    /// # Errors
    /// Names the file, the place in it, what was wrong and what would be right.
    pub fn read(path: &Path) -> Result<PlanFile, PlanFileError> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|source| PlanFileError::Read { path: name.clone(), source })?;
        Self::parse(&name, &bytes)
    }

    /// As [`PlanFile::read`], from memory; `path` is for messages.
    ///
    /// # Errors
    /// As [`PlanFile::read`].
    pub fn parse(path: &str, bytes: &[u8]) -> Result<PlanFile, PlanFileError> {
        let wrong = |at: &str, what: String| PlanFileError::Wrong { path: path.into(), at: at.into(), what };
        let json: Json = serde_json::from_slice(bytes).map_err(|e| PlanFileError::Json {
            path: path.into(),
            line: e.line(),
            column: e.column(),
            what: e.to_string(),
        })?;
        if json.dplan_plan != VERSION {
            return Err(PlanFileError::Version { path: path.into(), found: json.dplan_plan });
        }
        let compute = DType::from_name(&json.precision).ok_or_else(|| wrong("precision", format!("`{}` is not an element type", json.precision)))?;
        let optimizer = Optimizer::from_name(&json.optimizer)
            .ok_or_else(|| wrong("optimizer", format!("`{}`: expected adamw, adam, sgd or lamb", json.optimizer)))?;
        let clip = match json.clip.as_str() {
            "none" => Clip::None,
            "global_norm" => Clip::GlobalNorm,
            other => return Err(wrong("clip", format!("`{other}`: expected none or global_norm"))),
        };
        let wire = match &json.wire {
            None => Wire::Full,
            Some(name) => Wire::from_name(name).ok_or_else(|| wrong("wire", format!("`{name}`: expected full, bf16 or topk:F")))?,
        };
        let sync = match &json.sync {
            None => Sync::Flat,
            Some(name) => {
                Sync::from_name(name).ok_or_else(|| wrong("sync", format!("`{name}`: expected flat, hierarchical:2 or the like, tree or server")))?
            }
        };
        let nest = match &json.map {
            None => Nest::default(),
            Some(name) => Nest::from_name(name).ok_or_else(|| wrong("map", format!("`{name}`: expected an order, such as dp.ep.cp.tp")))?,
        };
        let choices = &json.choices;
        let degrees = [("dp", choices.dp), ("ep", choices.ep), ("cp", choices.cp), ("tp", choices.tp)];
        for (at, n) in degrees.into_iter().chain([("micro_batch", choices.micro_batch), ("micro_batches", choices.micro_batches)]) {
            if n == 0 || n > 1 << 32 {
                return Err(wrong(&format!("choices.{at}"), format!("{n}: expected 1 to {}", 1u64 << 32)));
            }
        }
        let keys = match &choices.keys {
            None => Keys::Gathered,
            Some(name) => Keys::from_name(name).ok_or_else(|| wrong("choices.keys", format!("`{name}`: expected gather or ring")))?,
        };
        if matches!(sync, Sync::Hierarchical { .. } | Sync::Tree) && choices.ep > 1 {
            return Err(wrong("sync", format!("{} needs an ep of 1, not {}", sync.name(), choices.ep)));
        }
        if let Sync::Hierarchical { far } = sync
            && !choices.dp.is_multiple_of(far)
        {
            return Err(wrong("sync", format!("{far} parts of {} data-parallel ranks: expected a divisor", choices.dp)));
        }
        let degrees = Degrees { dp: choices.dp, ep: choices.ep, cp: choices.cp, tp: choices.tp, keys, sync, nest };
        if degrees.most_axes() > MAX_AXES {
            return Err(wrong("choices", format!("dp, cp and tp have too many factors: a mesh has at most {MAX_AXES} axes")));
        }
        let mesh = Mesh::of(degrees);
        let schedule =
            Schedule::from_name(&choices.schedule).ok_or_else(|| wrong("choices.schedule", format!("`{}` is not a schedule", choices.schedule)))?;
        let mut options = Vec::new();
        for (i, o) in choices.options.iter().enumerate() {
            let at = |field: &str| format!("choices.options[{i}].{field}");
            if o.zero > 3 {
                return Err(wrong(&at("zero"), format!("{}: expected 0 to 3", o.zero)));
            }
            let Some(Away { states: offload, activations }) = Away::from_name(&o.offload) else {
                let known: Vec<String> = Away::all().map(Away::name).collect();
                return Err(wrong(&at("offload"), format!("`{}`: expected one of {}", o.offload, known.join(", "))));
            };
            options.push(LayerPlan {
                zero: Zero(o.zero),
                offload,
                activations,
                recompute: Recompute::from_name(&o.recompute)
                    .ok_or_else(|| wrong(&at("recompute"), format!("`{}`: expected none, selective or full", o.recompute)))?,
                gathered: gathered_from(&o.gathered).ok_or_else(|| wrong(&at("gathered"), format!("`{}`: expected keep or again", o.gathered)))?,
                strategy: o
                    .strategy
                    .iter()
                    .map(|s| assignment_from(s, &mesh))
                    .collect::<Result<_, _>>()
                    .map_err(|what| wrong(&at("strategy"), what))?,
            });
        }
        let forward = text::parse_graph(&json.graph.join("\n")).map_err(|e| wrong("graph", e.to_string()))?;
        if let Some(error) = dplan_ir::verify::verify_graph(&forward).first() {
            return Err(wrong("graph", error.to_string()));
        }
        let graph = grad::differentiate(&forward).map_err(|e| wrong("graph", e.to_string()))?;
        let program = text::parse_program(&json.program.join("\n"), &graph).map_err(|e| wrong("program", e.to_string()))?;
        let plan = Plan {
            dp: choices.dp,
            ep: choices.ep,
            cp: choices.cp,
            tp: choices.tp,
            micro_batch: choices.micro_batch,
            micro_batches: choices.micro_batches,
            schedule,
            virtual_stages: choices.r#virtual,
            boundary: choices.boundary,
            stages: choices.stages.iter().map(|&[first, last]| StagePlan { first, last }).collect(),
            placement: Placement::of(&choices.placement),
            options,
            layers: choices.layers.clone(),
            compute,
            optimizer,
            clip,
            wire,
            keys,
            sync,
            nest,
        };
        check_shape(&plan, &graph).map_err(|(at, what)| wrong(at, what))?;
        check_program(&plan, &program).map_err(|what| wrong("program", what))?;
        let cluster = cluster::from_json(json.cluster).map_err(|e| wrong("cluster", e.to_string()))?;
        let (mut named, groups) = (choices.placement.clone(), cluster.groups().len());
        named.sort_unstable();
        let alike = named.is_empty() && groups == 1;
        if !(alike || named.iter().map(|&g| usize::from(g)).eq(0..groups)) {
            return Err(wrong("choices.placement", format!("{:?}: expected each of the cluster's {groups} groups once", choices.placement)));
        }
        Ok(PlanFile { graph, cluster, plan, program, seq: json.seq })
    }
}

/// Stages cover the layers in order, and every index is in range, so that what is computed from the plan cannot fail.
fn check_shape(plan: &Plan, graph: &Graph) -> Result<(), (&'static str, String)> {
    let layers = graph.layer_count();
    let mut next = 0;
    for stage in &plan.stages {
        if stage.first != next || stage.last < stage.first {
            return Err(("choices.stages", format!("a stage begins at layer {}, expected {next}", stage.first)));
        }
        next = stage.last + 1;
    }
    if next != layers {
        return Err(("choices.stages", format!("stages cover {next} layers, the model has {layers}")));
    }
    if plan.virtual_stages == 0 || !plan.stages.len().is_multiple_of(plan.virtual_stages as usize) {
        return Err(("choices.virtual", format!("{}: expected a divisor of the {} virtual stages in all", plan.virtual_stages, plan.stages.len())));
    }
    if let Some(needs) = plan.pipeline().refusal() {
        return Err(("choices.schedule", format!("{} needs {needs}", plan.schedule.name())));
    }
    if plan.layers.len() != layers as usize {
        return Err(("choices.layers", format!("{} entries, the model has {layers} layers", plan.layers.len())));
    }
    for (layer, &option) in plan.layers.iter().enumerate() {
        let Some(o) = plan.options.get(option as usize) else {
            return Err(("choices.layers", format!("layer {layer} has option {option}, there are {}", plan.options.len())));
        };
        let nodes = graph.forward_nodes().filter(|(_, n)| n.layer as usize == layer).count();
        if o.strategy.len() != nodes {
            return Err(("choices.options", format!("option {option} has {} strategies, layer {layer} has {nodes} nodes", o.strategy.len())));
        }
    }
    Ok(())
}

/// The program does what the choices say that no proof of it alone can: a program with another optimizer, or one that does not clip, is right too, but is another.
fn check_program(plan: &Plan, program: &Program) -> Result<(), String> {
    if program.mesh != plan.mesh() || program.stages.len() as u64 != plan.pp() {
        return Err(format!("its mesh or its {} stages are not those of the choices", program.stages.len()));
    }
    if program.micro_batches != plan.micro_batches {
        return Err(format!("{} micro-batches, the choices say {}", program.micro_batches, plan.micro_batches));
    }
    if program.optimizer.is_some_and(|optimizer| optimizer != plan.optimizer) {
        return Err(format!("its optimizer is {}, the plan's is {}", program.optimizer.map_or("", Optimizer::name), plan.optimizer.name()));
    }
    if program.updates != plan.schedule.updates() {
        return Err(format!("it updates parameters each {}, the plan's schedule is {}", program.updates.name(), plan.schedule.name()));
    }
    let instrs = || program.stages.iter().flat_map(|s| s.segments.values()).flat_map(|s| &s.body).map(|issue| &issue.instr);
    let clips = |instr: &Instr| match instr {
        Instr::Update { scale, .. } => Some(scale.is_some()),
        _ => None,
    };
    let wanted = plan.clip == Clip::GlobalNorm;
    if instrs().filter_map(clips).any(|clips| clips != wanted) {
        return Err(format!("an update is {} a clip factor, the plan's `clip` is {}", if wanted { "without" } else { "with" }, clip_name(plan.clip)));
    }
    let rounds = instrs().any(|instr| matches!(instr, Instr::Cast { .. }));
    let several = plan.dp * plan.cp > 1;
    let wanted = plan.wire.dtype().is_some() && several;
    let compressed = |stage: &StageProgram, instr: &Instr| match (instr, plan.wire.kept()) {
        (Instr::Compress { src, dst, .. }, Some(share)) => match (&stage.buffers[*src], &stage.buffers[*dst].content) {
            (grads, Content::Wire { kept: Some(kept), .. }) => Some(share.of(grads.bytes / grads.dtype.size()) == *kept),
            _ => Some(false),
        },
        (Instr::Compress { .. }, None) => Some(false),
        _ => None,
    };
    let compressed: Vec<bool> = program
        .stages
        .iter()
        .flat_map(|s| s.segments.values().flat_map(|g| &g.body).filter_map(|issue| compressed(s, &issue.instr)).collect::<Vec<_>>())
        .collect();
    let mesh = &program.mesh;
    let exchanged = program.stages.iter().flat_map(|s| s.buckets.values()).filter(|b| mesh.size(b.partial.and(mesh.data())) > 1).count();
    if compressed.contains(&false) || compressed.len() != plan.compressed().map_or(0, |_| exchanged) {
        return Err(format!("gradients are not compressed as the plan's `wire` says: {}", plan.wire.name()));
    }
    if rounds != wanted {
        return Err(format!("gradients are {}rounded for exchanges, the plan's `wire` is {}", if rounds { "" } else { "not " }, plan.wire.name()));
    }
    let is_flat = |stage: &StageProgram, id: BufferId| matches!(stage.buffers[id].content, Content::Flat { .. });
    let serves =
        |stage: &StageProgram, instr: &Instr| matches!(*instr, Instr::Collective { pattern: Pattern::AllToAll, src, .. } if is_flat(stage, src));
    let body = |stage: &StageProgram| stage.segments.values().flat_map(|s| &s.body).any(|issue| serves(stage, &issue.instr));
    if program.stages.iter().any(body) != (plan.sync == Sync::Server && several && !plan.wire.is_lossy()) {
        return Err(format!("gradients do not get to their sum as the plan's `sync` says: {}", plan.sync.name()));
    }
    Ok(())
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_string).collect()
}

/// `f=tp0.tp1 s=tp2`.
pub fn assignment_text(assignment: &Assignment, mesh: &Mesh) -> String {
    let axes = |set: AxisSet| set.iter().map(|a| mesh.axis(a).name.as_str()).collect::<Vec<_>>().join(".");
    assignment.0.iter().map(|&(label, set)| format!("{label}={}", axes(set))).collect::<Vec<_>>().join(" ")
}

fn assignment_from(text: &str, mesh: &Mesh) -> Result<Assignment, String> {
    let mut assignment = Assignment::default();
    for part in text.split_whitespace() {
        let (label, axes) = part.split_once('=').ok_or_else(|| format!("`{part}`: expected a factor and its axes, such as f=tp0"))?;
        let mut chars = label.chars();
        let (Some(label), None) = (chars.next(), chars.next()) else {
            return Err(format!("`{part}`: a factor is one letter"));
        };
        for axis in axes.split('.') {
            let id = mesh.by_name(axis).ok_or_else(|| format!("`{part}`: the mesh has no axis `{axis}`"))?;
            assignment.assign(label, AxisSet::one(id));
        }
    }
    Ok(assignment)
}

fn clip_name(clip: Clip) -> &'static str {
    match clip {
        Clip::None => "none",
        Clip::GlobalNorm => "global_norm",
    }
}

fn gathered_name(gathered: Gathered) -> &'static str {
    match gathered {
        Gathered::Keep => "keep",
        Gathered::Again => "again",
    }
}

fn gathered_from(name: &str) -> Option<Gathered> {
    [Gathered::Keep, Gathered::Again].into_iter().find(|&g| gathered_name(g) == name)
}
