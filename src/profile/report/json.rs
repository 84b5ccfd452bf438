//! The report for programs: one object, times in seconds, sizes in bytes, bandwidths in bytes a second.
//!
//! ```text
//! profile{ranks, world_size, format, device, backend, steps, step_seconds}
//! bottleneck{kind, share, gain, evidence, change} findings[…]
//! total{window_seconds, parts{compute, transfer, waiting, bubble, copies, input, launch, idle}, hidden{transfer, waiting, copies}}
//! ranks[{rank, source, …as total, communication_seconds, kernels, clock_ahead_seconds, …}]
//! collectives[{op, bytes, elements, group, group_size, calls, transfer_seconds, waiting_seconds, bus_bandwidth, basis, …}]
//! balance{…} clocks{…} parallelism[{kind, degree, …, evidence}] notes[…]
//! ```

use serde_json::{Value, json};

use crate::profile::analyse::Analysis;
use crate::profile::analyse::exposure::{Exposure, Hidden, Parts};
use crate::profile::analyse::findings::Finding;
use crate::profile::analyse::matching::Basis;
use crate::profile::analyse::parallelism::{ParallelKind, Parallelism};
use crate::profile::analyse::table::Row;
use crate::profile::{Format, KernelClass, Ns, Profile, Rank};

/// The whole report.
pub fn json(profile: &Profile, analysis: &Analysis) -> Value {
    let first = profile.ranks.first();
    let hidden = analysis.exposures.iter().fold(Hidden::default(), |sum, e| Hidden {
        transfer: sum.transfer.saturating_add(e.hidden.transfer),
        waiting: sum.waiting.saturating_add(e.hidden.waiting),
        copies: sum.copies.saturating_add(e.hidden.copies),
    });
    json!({
        "profile": {
            "ranks": profile.ranks.iter().map(|r| r.rank).collect::<Vec<_>>(),
            "world_size": profile.ranks.iter().filter_map(|r| r.world_size).max(),
            "format": first.map(|r| format_name(r.format)),
            "device": first.and_then(|r| r.device.as_ref()).map(|d| d.name.as_str()),
            "backend": first.and_then(|r| r.backend.as_deref()),
            "steps": analysis.steps.iter().max(),
            "step_seconds": analysis.step_mean.map(seconds),
        },
        "bottleneck": analysis.findings.first().map(finding),
        "findings": analysis.findings.iter().map(finding).collect::<Vec<_>>(),
        "total": { "window_seconds": seconds(analysis.total.window()), "parts": parts(&analysis.total), "hidden": hidden_parts(&hidden) },
        "ranks": profile.ranks.iter().zip(&analysis.exposures).enumerate().map(|(i, (r, e))| rank(r, e, analysis.clocks.ahead[i], analysis.steps[i])).collect::<Vec<_>>(),
        "collectives": analysis.rows.iter().map(row).collect::<Vec<_>>(),
        "balance": {
            "mean_compute_seconds": seconds(analysis.balance.mean_compute),
            "most": analysis.balance.most.map(|(r, t)| json!({ "rank": r, "compute_seconds": seconds(t) })),
            "least": analysis.balance.least.map(|(r, t)| json!({ "rank": r, "compute_seconds": seconds(t) })),
            "imbalance": analysis.balance.imbalance,
            "last_arrivals": analysis.balance.last_arrivals.iter().map(|(r, n)| json!({ "rank": r, "collectives": n })).collect::<Vec<_>>(),
            "collectives": analysis.balance.collectives,
        },
        "clocks": { "disagreement_seconds": analysis.clocks.disagreement.map(seconds) },
        "parallelism": analysis.parallelism.iter().map(parallelism).collect::<Vec<_>>(),
        "notes": analysis.notes,
    })
}

fn seconds(ns: Ns) -> f64 {
    ns as f64 / 1e9
}

fn parts(parts: &Parts) -> Value {
    json!({
        "compute": seconds(parts.compute), "transfer": seconds(parts.transfer), "waiting": seconds(parts.waiting), "bubble": seconds(parts.bubble),
        "copies": seconds(parts.copies), "input": seconds(parts.input), "launch": seconds(parts.launch), "idle": seconds(parts.idle),
    })
}

fn hidden_parts(hidden: &Hidden) -> Value {
    json!({ "transfer": seconds(hidden.transfer), "waiting": seconds(hidden.waiting), "copies": seconds(hidden.copies) })
}

fn rank(rank: &Rank, exposure: &Exposure, ahead: Ns, steps: usize) -> Value {
    let classes: serde_json::Map<String, Value> =
        KernelClass::ALL.iter().map(|c| (c.name().into(), json!(seconds(exposure.classes[*c as usize])))).collect();
    json!({
        "rank": rank.rank,
        "source": rank.source,
        "steps": steps,
        "window_seconds": seconds(exposure.parts.window()),
        "parts": parts(&exposure.parts),
        "hidden": hidden_parts(&exposure.hidden),
        "communication_seconds": seconds(exposure.communication),
        "kernels": exposure.kernels,
        "kernel_seconds": classes,
        "late_launches": exposure.late_launches,
        "clock_ahead_seconds": seconds(ahead),
        "memory": { "allocated_bytes": rank.memory.allocated_bytes, "reserved_bytes": rank.memory.reserved_bytes },
    })
}

fn row(row: &Row) -> Value {
    json!({
        "op": row.op.name(),
        "ran_as": row.ran_as.map(|o| o.name()),
        "bytes": row.bytes,
        "elements": row.elements,
        "dtype": row.dtype,
        "group": row.group,
        "group_size": row.group_size,
        "group_name": row.group_name,
        "algorithm": row.algorithm,
        "protocol": row.protocol,
        "calls": row.calls,
        "transfer_seconds": { "least": seconds(row.transfer_least), "median": seconds(row.transfer_median), "total": seconds(row.transfer_total) },
        "waiting_seconds": seconds(row.waiting_total),
        "bus_bandwidth": row.bus_bandwidth,
        "basis": match row.basis {
            Basis::AllMembers => "all_members",
            Basis::SomeMembers => "some_members",
            Basis::FastestCall => "fastest_call",
            Basis::Alone => "alone",
        },
    })
}

fn finding(finding: &Finding) -> Value {
    json!({ "kind": finding.limit.name(), "share": finding.share, "gain": finding.gain, "evidence": finding.evidence, "change": finding.change })
}

fn parallelism(found: &Parallelism) -> Value {
    let mut object = json!({ "kind": found.kind.name(), "degree": found.degree, "evidence": found.evidence });
    let more = match &found.kind {
        ParallelKind::Data { buckets_per_step, gradient_elements } => {
            json!({ "buckets_per_step": buckets_per_step, "gradient_elements": gradient_elements })
        }
        ParallelKind::Sharded { zero, modules } => json!({ "zero": zero, "modules": modules }),
        ParallelKind::Tensor { calls_per_step } | ParallelKind::AllToAll { calls_per_step } => json!({ "calls_per_step": calls_per_step }),
        ParallelKind::Pipeline(s) => json!({
            "schedule": s.name, "stages": s.stages, "virtual": s.virtual_stages(), "micro_batches": s.micro_batches,
            "stages_of": s.stages_of.iter().map(|(rank, stages)| json!({ "rank": rank, "stages": stages })).collect::<Vec<_>>(),
        }),
        ParallelKind::Unused { name } => json!({ "group_name": name }),
        ParallelKind::None => json!({}),
    };
    if let (Some(object), Some(more)) = (object.as_object_mut(), more.as_object()) {
        object.extend(more.clone());
    }
    object
}

fn format_name(format: Format) -> &'static str {
    match format {
        Format::Kineto => "kineto",
        Format::Chrome => "chrome",
        Format::NsysSqlite => "nsys_sqlite",
        Format::NsysCsv => "nsys_csv",
    }
}
