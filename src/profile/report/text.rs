//! The report for people.

use std::fmt::Write;

use super::{bytes, grouped, ranks, time};
use crate::profile::analyse::Analysis;
use crate::profile::analyse::exposure::Parts;
use crate::profile::analyse::matching::Basis;
use crate::profile::analyse::parallelism::{ParallelKind, Parallelism};
use crate::profile::analyse::table::Row;
use crate::profile::{Format, Ns, Profile};

/// Rows of the table of collectives that are shown; the rest are summed.
const SHOWN: usize = 20;

pub fn text(profile: &Profile, analysis: &Analysis) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write_all(&mut out, profile, analysis);
    out
}

fn write_all(out: &mut String, profile: &Profile, analysis: &Analysis) -> std::fmt::Result {
    head(out, profile, analysis)?;
    bottleneck(out, analysis)?;
    times(out, profile, analysis)?;
    collectives(out, analysis)?;
    balance(out, profile, analysis)?;
    parallel(out, analysis)?;
    others(out, analysis)?;
    if !analysis.notes.is_empty() {
        writeln!(out, "\nNotes")?;
        for note in &analysis.notes {
            writeln!(out, "  {note}")?;
        }
    }
    Ok(())
}

fn head(out: &mut String, profile: &Profile, analysis: &Analysis) -> std::fmt::Result {
    let numbers: Vec<u32> = profile.ranks.iter().map(|r| r.rank).collect();
    let world = profile.ranks.iter().filter_map(|r| r.world_size).max();
    let of = world.map_or_else(String::new, |w| format!(" of {w}"));
    let mut facts = vec![format!("{} rank{}{of} ({})", numbers.len(), if numbers.len() == 1 { "" } else { "s" }, ranks(&numbers))];
    if let Some(first) = profile.ranks.first() {
        facts.push(
            match first.format {
                Format::Kineto => "PyTorch profiler",
                Format::Chrome => "Chrome trace",
                Format::NsysSqlite => "Nsight Systems",
                Format::NsysCsv => "Nsight Systems, CSV",
            }
            .into(),
        );
        facts.extend(first.device.as_ref().map(|d| d.name.clone()));
        facts.extend(first.backend.clone());
    }
    match (analysis.steps.iter().max(), analysis.step_mean) {
        (Some(steps), Some(mean)) => facts.push(format!("{steps} step{} of {}", if *steps == 1 { "" } else { "s" }, time(mean))),
        _ => facts.push(format!("{} recorded", time(analysis.total.window() / profile.ranks.len().max(1) as Ns))),
    }
    writeln!(out, "{}", facts.join(" · "))
}

fn bottleneck(out: &mut String, analysis: &Analysis) -> std::fmt::Result {
    let Some(finding) = analysis.findings.first() else { return Ok(()) };
    let gain = finding.gain.map_or_else(String::new, |g| format!(" (without it, at most {g:.2}× faster)"));
    writeln!(out, "\nBottleneck: {}{gain}", finding.limit.name())?;
    for line in &finding.evidence {
        writeln!(out, "  {line}")?;
    }
    for line in &finding.change {
        writeln!(out, "  → {line}")?;
    }
    Ok(())
}

fn times(out: &mut String, profile: &Profile, analysis: &Analysis) -> std::fmt::Result {
    writeln!(out, "\nTime by rank (% of its window; communication is what computation does not hide)")?;
    let header = ["rank", "window", "compute", "transfer", "waiting", "bubble", "copies", "input", "launch", "idle", "comm hidden"];
    let cells = |parts: &Parts| {
        let share = |part: Ns| format!("{:.1}", part as f64 / parts.window().max(1) as f64 * 100.0);
        [parts.compute, parts.transfer, parts.waiting, parts.bubble, parts.copies, parts.input, parts.launch, parts.idle].map(share)
    };
    let hidden = |hidden: Ns, exposed: Ns| {
        let all = hidden.saturating_add(exposed);
        if all == 0 { "-".to_string() } else { format!("{:.0} %", hidden as f64 / all as f64 * 100.0) }
    };
    let mut rows = vec![header.map(String::from).to_vec()];
    let (mut hidden_all, mut exposed_all): (Ns, Ns) = (0, 0);
    for (rank, exposure) in profile.ranks.iter().zip(&analysis.exposures) {
        let mut row = vec![rank.rank.to_string(), time(exposure.parts.window())];
        row.extend(cells(&exposure.parts));
        let covered = exposure.hidden.transfer.saturating_add(exposure.hidden.waiting);
        let exposed = exposure.communication.saturating_sub(covered);
        row.push(hidden(covered, exposed));
        hidden_all = hidden_all.saturating_add(covered);
        exposed_all = exposed_all.saturating_add(exposed);
        rows.push(row);
    }
    if profile.ranks.len() > 1 {
        let mut row = vec!["all".into(), time(analysis.total.window() / profile.ranks.len() as Ns)];
        row.extend(cells(&analysis.total));
        row.push(hidden(hidden_all, exposed_all));
        rows.push(row);
    }
    table(out, &rows)
}

fn collectives(out: &mut String, analysis: &Analysis) -> std::fmt::Result {
    if analysis.rows.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nCommunication (size and bus bandwidth as nccl-tests count; waiting is apart from transfer)")?;
    let header = ["op", "size", "group", "calls", "transfer", "(least)", "waiting", "bus GB/s", ""];
    let mut rows = vec![header.map(String::from).to_vec()];
    for row in analysis.rows.iter().take(SHOWN) {
        rows.push(vec![
            op_name(row),
            row.bytes.map_or_else(|| "?".into(), bytes),
            group_name(row),
            row.calls.to_string(),
            time(row.transfer_median),
            time(row.transfer_least),
            time(row.waiting_total / row.calls.max(1) as Ns),
            row.bus_bandwidth.map_or_else(|| "-".into(), |b| format!("{:.2}", b / 1e9)),
            basis_name(row.basis).into(),
        ]);
    }
    table(out, &rows)?;
    if let Some(rest) = analysis.rows.get(SHOWN..).filter(|r| !r.is_empty()) {
        let spent = rest.iter().fold(0, |sum: Ns, r| sum.saturating_add(r.transfer_total));
        writeln!(
            out,
            "  … and {} more kinds, {} calls, {} in transfer (all with --json)",
            rest.len(),
            rest.iter().map(|r| r.calls).sum::<usize>(),
            time(spent)
        )?;
    }
    Ok(())
}

fn op_name(row: &Row) -> String {
    let mut name = row.op.name().to_string();
    if let Some(other) = row.ran_as {
        name += &format!(" (as {})", other.name());
    }
    if let Some(algorithm) = &row.algorithm {
        name += &format!(" {}", algorithm.to_lowercase());
    }
    if let Some(protocol) = &row.protocol {
        name += &format!("/{}", protocol.to_lowercase());
    }
    name
}

fn group_name(row: &Row) -> String {
    let members = row.group.as_ref().map(|g| ranks(g)).or_else(|| row.group_size.map(|n| format!("{n} ranks"))).unwrap_or_else(|| "?".into());
    match &row.group_name {
        Some(name) if name != "default_pg" => format!("{name} {members}"),
        _ => members,
    }
}

fn basis_name(basis: Basis) -> &'static str {
    match basis {
        Basis::AllMembers => "",
        Basis::SomeMembers => "some members recorded",
        Basis::FastestCall => "one member recorded: transfer ≤ fastest call",
        Basis::Alone => "one member, one call: waiting is inside",
    }
}

fn balance(out: &mut String, profile: &Profile, analysis: &Analysis) -> std::fmt::Result {
    let balance = &analysis.balance;
    let (Some(imbalance), Some((most, work)), Some((least, little))) = (balance.imbalance, balance.most, balance.least) else { return Ok(()) };
    writeln!(out, "\nBalance")?;
    writeln!(out, "  computation: rank {most} most, {}; rank {least} least, {}; {:.1} % over the mean", time(work), time(little), imbalance * 100.0)?;
    if !balance.last_arrivals.is_empty() {
        let shown: Vec<String> = balance.last_arrivals.iter().take(4).map(|(rank, n)| format!("rank {rank} {n}×")).collect();
        writeln!(out, "  last to arrive at {} collectives: {}", balance.collectives, shown.join(", "))?;
    }
    if let Some(disagreement) = analysis.clocks.disagreement {
        let ahead = analysis.clocks.ahead.iter().zip(&profile.ranks).max_by_key(|(a, _)| a.saturating_abs());
        let corrected =
            ahead.filter(|(a, _)| **a != 0).map_or_else(String::new, |(a, r)| format!(", clocks corrected by up to {} (rank {})", time(*a), r.rank));
        writeln!(out, "  ends of one collective agree within {}{corrected}", time(disagreement))?;
    }
    Ok(())
}

fn parallel(out: &mut String, analysis: &Analysis) -> std::fmt::Result {
    writeln!(out, "\nParallelism")?;
    for found in &analysis.parallelism {
        writeln!(out, "  {}", parallel_name(found))?;
        for line in &found.evidence {
            writeln!(out, "    {line}")?;
        }
    }
    Ok(())
}

fn parallel_name(found: &Parallelism) -> String {
    let n = found.degree;
    match &found.kind {
        ParallelKind::Data { buckets_per_step, gradient_elements } => {
            let buckets = buckets_per_step.map_or_else(String::new, |b| format!(", {b} buckets a step"));
            let elements = gradient_elements.map_or_else(String::new, |e| format!(", {} gradient elements", grouped(e)));
            format!("data parallel (DDP) × {n}{buckets}{elements}")
        }
        ParallelKind::Sharded { zero, modules } => {
            let over = if *modules > 0 { format!(", {modules} modules") } else { String::new() };
            format!("sharded data parallel (FSDP, ZeRO-{zero}) × {n}{over}")
        }
        ParallelKind::Tensor { calls_per_step } => {
            format!("tensor parallel × {n}{}", calls_per_step.map_or_else(String::new, |c| format!(", {c} collectives a step")))
        }
        ParallelKind::Pipeline(s) => {
            format!("pipeline × {n}: {}, {} stages ({} a rank), {} micro-batches", s.name, s.stages, s.virtual_stages(), s.micro_batches)
        }
        ParallelKind::AllToAll { calls_per_step } => {
            format!("sharded embeddings or experts × {n}{}", calls_per_step.map_or_else(String::new, |c| format!(", {c} all-to-alls a step")))
        }
        ParallelKind::Unused { name } => format!("`{name}` × {n}: not used in what was recorded"),
        ParallelKind::None => "none".into(),
    }
}

fn others(out: &mut String, analysis: &Analysis) -> std::fmt::Result {
    let Some(rest) = analysis.findings.get(1..).filter(|r| !r.is_empty()) else { return Ok(()) };
    writeln!(out, "\nAlso")?;
    for finding in rest {
        writeln!(out, "  {}: {}", finding.limit.name(), finding.evidence.join("; "))?;
        for line in &finding.change {
            writeln!(out, "    → {line}")?;
        }
    }
    Ok(())
}

/// Columns as wide as their widest cell; the first to the left, the others to the right, the last as it is.
fn table(out: &mut String, rows: &[Vec<String>]) -> std::fmt::Result {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let fill = " ".repeat(widths[c] - cell.chars().count());
            match c {
                0 => line += &format!("  {cell}{fill}"),
                c if c + 1 == columns && rows[0][c].is_empty() => line += &format!("  {cell}"),
                _ => line += &format!("  {fill}{cell}"),
            }
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}
