//! What `compile` and `explain` say of a plan, for people and as JSON. The JSON names are stable.

use super::output::{gib, seconds};
use crate::certfile::space;
use crate::cluster;
use crate::compile::Compiled;
use crate::import::Model;
use crate::planfile::PlanFile;
use dplan_ir::dtype::DType;
use dplan_ir::mesh::Keys;
use dplan_ir::nest::Nest;
use dplan_ir::plan::{Away, Plan};
use dplan_ir::program::Updates;
use dplan_ir::sync::Sync;
use dplan_planner::baselines::Baseline;
use dplan_planner::machine::Machine;
use dplan_planner::predict::Prediction;
use dplan_planner::units::{Nanos, PerSecond};
use serde_json::{Value, json};
use std::fmt::Write;

/// What a training run of a given length would take.
#[derive(Clone, Copy, Default)]
pub struct TrainingRun {
    pub tokens: Option<f64>,
    /// USD for one device and hour.
    pub price: Option<f64>,
}

impl TrainingRun {
    fn days(&self, tokens_per_second: f64) -> Option<f64> {
        self.tokens.map(|t| t / tokens_per_second / 86_400.0)
    }
    fn cost(&self, tokens_per_second: f64, devices: u64) -> Option<f64> {
        Some(self.days(tokens_per_second)? * 24.0 * self.price? * devices as f64)
    }
    /// `31.2 days, 1,234,567 USD`; `5.2 hours, 41.67 USD`.
    fn text(&self, tokens_per_second: f64, devices: u64) -> Option<String> {
        let days = self.days(tokens_per_second)?;
        let cost = self.cost(tokens_per_second, devices).map_or(String::new(), |c| format!(", {} USD", money(c)));
        Some(format!("{}{cost}", long(days)))
    }
}

/// A duration in days for people.
fn long(days: f64) -> String {
    match days * 24.0 {
        hours if hours >= 48.0 => format!("{days:.1} days"),
        hours if hours >= 1.0 => format!("{hours:.1} hours"),
        hours if hours >= 1.0 / 30.0 => format!("{:.1} minutes", hours * 60.0),
        hours => seconds(hours * 3600.0),
    }
}

/// An amount of money for people, rounded: cents where they count.
fn money(usd: f64) -> String {
    if usd < 1000.0 { format!("{usd:.2}") } else { grouped(usd.round() as u64) }
}

/// One object: model, cluster, chosen, predicted, search, baselines.
pub fn json(model: &Model, compiled: &Compiled, run: TrainingRun, took: f64) -> Value {
    let (file, s) = (&compiled.file, &compiled.statistics);
    json!({
        "model": { "name": model.name, "params": model.graph.param_count() },
        "cluster": { "name": cluster::name(&file.cluster), "devices": file.cluster.devices() },
        "chosen": chosen(file),
        "predicted": predicted(&compiled.prediction, file, run),
        "search": {
            "seconds": took, "space": s.space, "solved": s.solved,
            "lower_bound_seconds": s.lower_bound as f64 * 1e-9, "gap": s.gap, "proved": s.proved,
            "pins": compiled.pins.to_string(), "offloading": compiled.pins.offload.is_pinned(), "memory_limit_bytes": compiled.memory_limit.map(|b| b.0),
        },
        "baselines": compiled.baselines.iter().map(|b| {
            let rate = b.step.map(|s| tokens_per_second(compiled, s.seconds()));
            json!({
                "name": b.name, "step_seconds": b.step.map(|s| s.seconds()), "fits": b.fits, "covers": b.covers, "applies": b.applies, "asynchronous": b.asynchronous,
                "days": rate.and_then(|r| run.days(r)), "cost_usd": rate.and_then(|r| run.cost(r, file.cluster.devices())),
            })
        }).collect::<Vec<_>>(),
    })
}

/// The numbers of a fitted machine, and the mean errors of single instructions before and after the fit.
pub fn fitted(machine: &Machine, dtype: DType, (before, after): (f64, f64)) -> String {
    let Machine { device, intra, .. } = machine;
    let giga = |rate: PerSecond| rate.0 as f64 * 1e-9;
    let (product, grains) = (giga(device.matrix_efficiency.of(device.peak.of(dtype))), (device.matrix_grain, device.matrix_depth_grain));
    format!(
        "products    {product:.1} GFLOP/s a rank, grains {} and {}\n\
         memory      {:.1} GB/s a rank, {} ns a kernel\n\
         collectives α {:.1} µs, β {:.2} GB/s\n\
         errors      of single instructions, weighted by time: {:.0} % before, {:.0} % after\n",
        grains.0,
        grains.1,
        giga(device.bandwidth),
        device.launch.0,
        intra.latency.0 as f64 * 1e-3,
        giga(intra.bandwidth),
        before * 100.0,
        after * 100.0
    )
}

/// Degrees, schedule, stages and the ways layers run, as JSON.
pub fn chosen(file: &PlanFile) -> Value {
    let plan = &file.plan;
    let pipeline = plan.pipeline();
    // The layers of a stage with several virtual stages are not next to each other: `layers` then spans the first, `virtual_stages` has all.
    let stage = |stage: u64| {
        let cut = |c: u64| [plan.stages[c as usize].first, plan.stages[c as usize].last];
        let own: Vec<[u32; 2]> = pipeline.virtual_stages_of(stage).map(cut).collect();
        let mut object = json!({ "layers": own[0], "virtual_stages": own, "devices": plan.degrees().ranks() });
        if let Some(on) = devices(file, stage) {
            object["on"] = on.into();
        }
        object
    };
    let stages: Vec<Value> = (0..pipeline.stages).map(stage).collect();
    let mut chosen = json!({
        "dp": plan.dp, "tp": plan.tp, "cp": plan.cp, "keys": plan.keys.name(), "ep": plan.ep, "etp": 1, "pp": plan.pp(), "virtual": plan.virtual_stages, "schedule": plan.schedule.name(),
        "wire": plan.wire.name(), "sync": plan.sync.name(), "map": plan.nest.to_string(),
        "micro_batch": plan.micro_batch, "micro_batches": plan.micro_batches, "sp": plan.boundary.is_some(), "stages": stages,
        "layers": (0..plan.layers.len() as u32).map(|l| {
            let o = plan.layer(l);
            json!({ "zero": o.zero.0, "offload": o.away().name(), "recompute": o.recompute.name() })
        }).collect::<Vec<_>>(),
    });
    match plan.schedule.updates() {
        Updates::Step => {}
        Updates::MicroBatch => chosen["staleness"] = (0..pipeline.stages).map(|stage| pipeline.most_stale(stage)).collect(),
    }
    chosen
}

fn predicted(p: &Prediction, file: &PlanFile, run: TrainingRun) -> Value {
    let memory: Vec<Value> = p
        .memory
        .iter()
        .map(|m| json!({ "arena_bytes": m.arena_bytes(), "host_bytes": m.arena.host, "file_bytes": m.arena.file, "context_bytes": m.context.0, "total_bytes": m.total_bytes() }))
        .collect();
    json!({
        "step_seconds": p.step.seconds(), "simulated_seconds": p.simulated.seconds(),
        "tokens_per_second": p.tokens_per_second, "tokens_per_second_per_device": p.tokens_per_second_per_device,
        "model_tflops_per_device": p.model_flops_per_device * 1e-12, "hardware_tflops_per_device": p.hardware_flops_per_device * 1e-12, "mfu": p.mfu,
        "memory": memory,
        "parts": {
            "compute": p.parts.compute.seconds(), "exposed_comm": p.parts.exposed_comm.seconds(), "bubble": p.parts.bubble.seconds(),
            "optimizer": p.parts.optimizer.seconds(), "offload": p.parts.offload.seconds(),
        },
        "days": run.days(p.tokens_per_second), "cost_usd": run.cost(p.tokens_per_second, file.cluster.devices()),
    })
}

/// The answer for people.
pub fn text(model: &Model, compiled: &Compiled, run: TrainingRun) -> String {
    let (file, p, s) = (&compiled.file, &compiled.prediction, &compiled.statistics);
    let plan = &file.plan;
    let mut out = String::new();
    let devices = file.cluster.devices();
    let _ = writeln!(
        out,
        "model       {} ({} parameters, {} layers, sequence {})",
        model.name,
        grouped(model.graph.param_count()),
        plan.layers.len(),
        file.seq
    );
    let _ = writeln!(out, "cluster     {} ({devices} devices), {} {}", cluster::name(&file.cluster), plan.compute, plan.optimizer.name());
    out += &choice(file);
    let _ = writeln!(
        out,
        "step        {} predicted ({} simulated), {:.0} tokens/s, {:.2} model TFLOP/s a device, MFU {:.1} %",
        seconds(p.step.seconds()),
        seconds(p.simulated.seconds()),
        p.tokens_per_second,
        p.model_flops_per_device * 1e-12,
        p.mfu * 100.0
    );
    let share = |part: f64| part / p.step.seconds().max(1e-12) * 100.0;
    let parts =
        [("compute", p.parts.compute), ("exposed communication", p.parts.exposed_comm), ("bubble", p.parts.bubble), ("optimizer", p.parts.optimizer)];
    let offload = Some(("offload", p.parts.offload)).filter(|(_, part)| *part > Nanos::ZERO);
    let parts: Vec<String> = parts.iter().chain(&offload).map(|(name, part)| format!("{name} {:.1} %", share(part.seconds()))).collect();
    let _ = writeln!(out, "            {}", parts.join(", "));
    out += &memory(p, compiled);
    if let Some(takes) = run.text(p.tokens_per_second, devices) {
        let _ = writeln!(out, "run         {takes}");
    }
    out += &baselines(compiled, run);
    let space = space(&compiled.pins, compiled.memory_limit);
    let proof = if s.proved {
        format!("proved optimal in this space ({space}) and cost model")
    } else {
        format!("not proved: at most {:.2} % from optimal in this space ({space})", s.gap * 100.0)
    };
    let _ = writeln!(out, "search      {} layouts, {} solved exactly; {proof}", s.space, s.solved);
    out
}

/// `dp 8 · cp 16 · tp 2 with sequence parallelism · pp 64`; expert and context parallelism where there are any.
pub fn degrees(plan: &Plan) -> String {
    let sp = match plan.boundary {
        Some(1) => " with sequence parallelism".to_string(),
        Some(d) => format!(" with dim {d} of layer boundaries sharded"),
        None => String::new(),
    };
    let degree = |name: &str, n: u64| if n > 1 { format!(" · {name} {n}") } else { String::new() };
    let ring = if plan.keys == Keys::Ring { " in a ring" } else { "" };
    let chunks = if plan.virtual_stages > 1 { format!(" of {} virtual stages each", plan.virtual_stages) } else { String::new() };
    format!("dp {}{}{} · tp {}{sp} · pp {}{chunks}", plan.dp, degree("ep", plan.ep), degree("cp", plan.cp) + ring, plan.tp, plan.pp())
}

/// Degrees, schedule, stages and the ways layers run.
pub fn choice(file: &PlanFile) -> String {
    let plan = &file.plan;
    let mut out = String::new();
    let _ = writeln!(out, "plan        {}, {} of {} micro-batches of {}", degrees(plan), plan.schedule.name(), plan.micro_batches, plan.micro_batch);
    if let Some(stale) = staleness(file) {
        let _ = writeln!(out, "stale       {stale}");
    }
    if let Some(ranks) = ranks(file) {
        let _ = writeln!(out, "ranks       {ranks}");
    }
    if let Some(dtype) = plan.wire.dtype() {
        let _ = writeln!(out, "wire        gradients are rounded to {dtype} for their exchange");
    }
    if let Some(share) = plan.compressed() {
        let _ = writeln!(out, "wire        the largest {share} of the gradients' elements are exchanged, the rest is left over for the next step");
    }
    // What is rounded or compressed goes to everybody at once, and only parameters come back by steps.
    let (mesh, is_lossy) = (plan.mesh(), plan.wire.is_lossy());
    let steps = plan.sync.steps(&mesh, mesh.data());
    if steps.len() > 1 {
        let sizes: Vec<String> = steps.iter().map(|&step| mesh.size(step).to_string()).collect();
        let _ = writeln!(
            out,
            "sync        {}: {} over {} ranks, one after the other",
            plan.sync.name(),
            if is_lossy { "parameters are gathered" } else { "gradients are summed" },
            sizes.join(", ")
        );
    }
    if plan.sync == Sync::Server && !is_lossy {
        let _ = writeln!(out, "sync        server: every rank adds up an equal piece of the gradients, which all others send it");
    }
    if plan.nest != Nest::default() {
        let _ = writeln!(out, "map         {}, the last on the quickest links", plan.nest);
    }
    for (at, stage) in plan.stages.iter().enumerate() {
        // Runs of layers with equal options.
        let mut runs: Vec<(u32, u32, u32)> = Vec::new();
        for layer in stage.first..=stage.last {
            let option = plan.layers[layer as usize];
            match runs.last_mut() {
                Some((_, last, o)) if *o == option => *last = layer,
                _ => runs.push((layer, layer, option)),
            }
        }
        let runs: Vec<String> = runs
            .iter()
            .map(|&(first, last, option)| {
                let o = &plan.options[option as usize];
                let span = if first == last { format!("{first}") } else { format!("{first}-{last}") };
                let offload = if o.away() == Away::default() { String::new() } else { format!(" offload {}", o.away().name()) };
                format!("{span} zero {}{offload} recompute {}", o.zero.0, o.recompute.name())
            })
            .collect();
        let place = if plan.virtual_stages > 1 {
            format!("virtual stage {at:<3} on stage {}", plan.pipeline().stage_of(at as u64))
        } else {
            format!("stage {at:<4}")
        };
        let on = devices(file, plan.pipeline().stage_of(at as u64)).map_or(String::new(), |on| format!(" on {on},"));
        let _ = writeln!(out, "  {place}{on} layers {}", runs.join("; "));
    }
    out
}

/// Where each micro-batch has an update of its own: with how old parameters each stage works.
pub fn staleness(file: &PlanFile) -> Option<String> {
    let pipeline = file.plan.pipeline();
    match file.plan.schedule.updates() {
        Updates::Step => None,
        Updates::MicroBatch => {
            let of: Vec<String> = (0..pipeline.stages).map(|stage| pipeline.most_stale(stage).to_string()).collect();
            let count = pipeline.micro_batches;
            let window = format!("asynchronous: {count} updates a step, each with one micro-batch's gradient, which is not clipped");
            let staleness = format!("up to {} updates old on stages 0 to {}", of.join(", "), pipeline.stages - 1);
            Some(if pipeline.stages == 1 { window } else { format!("{window}; gradients are of parameters {staleness}") })
        }
    }
}

/// Where the cluster has groups of devices: those that a stage is on.
pub fn devices(file: &PlanFile, stage: u64) -> Option<String> {
    let PlanFile { cluster, plan, .. } = file;
    cluster.only().is_none().then(|| cluster.site_name(cluster.seat(plan, stage).site, plan.placement))
}

/// Where the cluster has groups of devices: which have which ranks.
fn ranks(file: &PlanFile) -> Option<String> {
    let groups = file.cluster.groups();
    let mut first = 0;
    let one = |&group: &u8| {
        let machine = &groups[usize::from(group)];
        first += machine.devices();
        format!("{}-{} on {}", first - machine.devices(), first - 1, machine.device.name)
    };
    (groups.len() > 1).then(|| file.plan.placement.0[..groups.len()].iter().map(one).collect::<Vec<_>>().join(", "))
}

/// Tokens a second of a step of this length.
fn tokens_per_second(compiled: &Compiled, step: f64) -> f64 {
    compiled.prediction.tokens_per_second * compiled.prediction.step.seconds() / step.max(1e-12)
}

/// Textbook systems beside the plan: how many times longer their step takes, and what the run would.
fn baselines(compiled: &Compiled, run: TrainingRun) -> String {
    let own = compiled.prediction.step.seconds().max(1e-12);
    let one = |b: &Baseline| {
        let stale = if b.asynchronous { " (stale weights)" } else { "" };
        let Some(step) = b.step else {
            let why = match (b.applies, b.covers) {
                (false, _) => "does not apply",
                (true, true) => "does not fit",
                (true, false) => "cannot share out the batch",
            };
            return format!("{}{stale} {why}", b.name);
        };
        let takes = run.text(tokens_per_second(compiled, step.seconds()), compiled.file.cluster.devices());
        format!("{}{stale} {:.2}x{}", b.name, step.seconds() / own, takes.map_or(String::new(), |t| format!(" ({t})")))
    };
    let mut out = String::new();
    let across = if run.tokens.is_some() { 2 } else { 4 };
    for (at, row) in compiled.baselines.chunks(across).enumerate() {
        let row: Vec<String> = row.iter().map(one).collect();
        let _ = writeln!(out, "{}{}", if at == 0 { "baselines   " } else { "            " }, row.join(", "));
    }
    out
}

fn memory(p: &Prediction, compiled: &Compiled) -> String {
    let (file, limit) = (&compiled.file, compiled.memory_limit);
    let mut out = String::new();
    for (stage, m) in p.memory.iter().enumerate() {
        let a = &m.arena;
        let memory = file.cluster.site(file.cluster.seat(&file.plan, stage as u64).site).device.memory;
        let allowed = limit.map_or(memory, |limit| limit.min(memory));
        let _ = writeln!(
            out,
            "{}stage {stage}: {} of {} (states {}, activations {}, workspace {}, buffers {}, context {})",
            if stage == 0 { "memory      " } else { "            " },
            gib(m.total_bytes()),
            gib(allowed.0),
            gib(a.states),
            gib(a.frames),
            gib(a.workspace),
            gib(a.boundary + a.ring + a.scalars),
            gib(m.context.0)
        );
        if a.host + a.file > 0 {
            let _ = writeln!(out, "            offloaded: {} in the memory of the host, {} in a file, for each device", gib(a.host), gib(a.file));
        }
    }
    out
}

/// `8,030,261,248`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_and_small_sums_keep_their_digits() {
        let run = TrainingRun { tokens: Some(1e9), price: Some(2.5) };
        assert_eq!(run.text(1e4, 8).unwrap(), "27.8 hours, 555.56 USD");
        assert_eq!(run.text(1e3, 8).unwrap(), "11.6 days, 5,556 USD");
        assert_eq!(run.text(1e6, 1).unwrap(), "16.7 minutes, 0.69 USD");
        assert_eq!(TrainingRun { tokens: Some(1e3), price: None }.text(1e3, 1).unwrap(), "1.00 s");
    }
}
