//! What limits a run, with the numbers that show it and the change of plan that would address it.
//!
//! Each loss is a part of the window that computes nothing. If computation takes four fifths of the time it is the bottleneck itself; otherwise the
//! largest loss is. The gain is bounded by taking the loss away entirely: window / (window − loss).

use super::Analysis;
use super::matching::Basis;
use super::parallelism::ParallelKind;
use crate::profile::{KernelClass, Ns, Profile};

#[derive(Clone, PartialEq, Debug)]
pub struct Finding {
    pub limit: Limit,
    /// Part of all ranks' time.
    pub share: f64,
    /// How many times faster the run would be at best without it; `None` of computation, which cannot go away.
    pub gain: Option<f64>,
    pub evidence: Vec<String>,
    pub change: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Limit {
    Communication,
    Compute,
    Imbalance,
    Bubble,
    Input,
    Launch,
    /// Bandwidth or capacity of device memory.
    Memory,
    Copies,
    /// Nothing runs and nothing recorded says why.
    Idle,
}

impl Limit {
    pub fn name(self) -> &'static str {
        match self {
            Limit::Communication => "communication",
            Limit::Compute => "compute",
            Limit::Imbalance => "imbalance",
            Limit::Bubble => "bubble",
            Limit::Input => "input",
            Limit::Launch => "launch-bound",
            Limit::Memory => "memory",
            Limit::Copies => "copies",
            Limit::Idle => "idle",
        }
    }
}

/// The bottleneck first; then by share, down to one percent.
pub fn of(profile: &Profile, analysis: &Analysis) -> Vec<Finding> {
    let window = analysis.total.window();
    if window <= 0 {
        return Vec::new();
    }
    let look = Look { profile, analysis, window };
    let parts = &analysis.total;
    let mut losses = vec![
        look.finding(Limit::Communication, parts.transfer),
        look.finding(Limit::Imbalance, parts.waiting),
        look.finding(Limit::Bubble, parts.bubble),
        look.finding(Limit::Copies, parts.copies),
        look.finding(Limit::Input, parts.input),
        look.finding(Limit::Launch, parts.launch),
        look.finding(Limit::Idle, parts.idle),
    ];
    losses.retain(|f| f.share >= 0.01);
    losses.sort_by(|a, b| b.share.total_cmp(&a.share));
    let memory_bound = look.class_share(KernelClass::Memory) > 0.5;
    let compute = look.finding(if memory_bound { Limit::Memory } else { Limit::Compute }, parts.compute);
    let at = if compute.share >= 0.8 || losses.is_empty() { 0 } else { 1 };
    losses.insert(at, compute);
    losses.extend(look.capacity());
    losses
}

struct Look<'a> {
    profile: &'a Profile,
    analysis: &'a Analysis,
    window: Ns,
}

impl Look<'_> {
    fn finding(&self, limit: Limit, part: Ns) -> Finding {
        let share = part as f64 / self.window as f64;
        let computes = matches!(limit, Limit::Compute | Limit::Memory);
        let gain = (!computes && share < 1.0).then(|| 1.0 / (1.0 - share));
        let (mut evidence, change) = match limit {
            Limit::Communication => self.communication(),
            Limit::Compute | Limit::Memory => self.compute(limit),
            Limit::Imbalance => self.imbalance(),
            Limit::Bubble => self.bubble(),
            Limit::Input => (
                vec!["nothing runs while the host is in a range that prepares input".into()],
                vec!["load input ahead of the step: more loader workers, pinned memory, prefetch of the next batch".into()],
            ),
            Limit::Launch => self.launch(),
            Limit::Copies => {
                (self.copies(), vec!["offload less (`--pin offload=none`), or overlap copies with computation from pinned memory".into()])
            }
            Limit::Idle => (
                vec!["no kernel, copy or communication runs, and no late launch or input range explains it".into()],
                vec!["record with CUDA activities and launches (`cuda_runtime`) to see what the device waits for".into()],
            ),
        };
        evidence.insert(
            0,
            format!("{:.1} % of the time of all ranks ({:.2} ms of {:.2} ms a rank)", share * 100.0, self.per_rank(part), self.per_rank(self.window)),
        );
        Finding { limit, share, gain, evidence, change }
    }

    /// Milliseconds.
    fn per_rank(&self, total: Ns) -> f64 {
        total as f64 / self.profile.ranks.len().max(1) as f64 / 1e6
    }

    fn has(&self, test: impl Fn(&ParallelKind) -> bool) -> bool {
        self.analysis.parallelism.iter().any(|p| test(&p.kind))
    }

    fn class_share(&self, class: KernelClass) -> f64 {
        let of = |class: KernelClass| super::total(self.analysis.exposures.iter().map(|e| e.classes[class as usize])) as f64;
        let all: f64 = KernelClass::ALL.into_iter().map(of).sum();
        if all > 0.0 { of(class) / all } else { 0.0 }
    }

    fn communication(&self) -> (Vec<String>, Vec<String>) {
        let mut evidence = Vec::new();
        let hidden = super::total(self.analysis.exposures.iter().map(|e| e.hidden.transfer));
        let exposed = self.analysis.total.transfer;
        if hidden.saturating_add(exposed) > 0 {
            evidence.push(format!("{:.0} % of the transfer is hidden behind computation", hidden as f64 / (hidden as f64 + exposed as f64) * 100.0));
        }
        let mut rows: Vec<_> = self.analysis.rows.iter().collect();
        rows.sort_by_key(|r| std::cmp::Reverse(r.transfer_total));
        for row in rows.iter().take(2) {
            let size = row.bytes.map_or_else(|| "of unknown size".into(), |b| format!("of {}", crate::profile::report::bytes(b)));
            let bandwidth = row.bus_bandwidth.map_or_else(String::new, |b| format!(", bus bandwidth {:.2} GB/s", b / 1e9));
            evidence.push(format!("{} × {} {size}: {:.2} ms in transfer{bandwidth}", row.calls, row.op.name(), row.transfer_total as f64 / 1e6));
        }
        if rows.iter().any(|r| r.basis >= Basis::SomeMembers) {
            evidence.push("not all members were recorded, so part of the transfer may be waiting".into());
        }
        let mut change = Vec::new();
        if self.has(|k| matches!(k, ParallelKind::Data { .. })) {
            change.push("reduce gradients less often (more micro-batches a step), in bf16 (`--pin wire=bf16`), or in buckets that start earlier (`--pin bucket=…`)".into());
        }
        if self.has(|k| matches!(k, ParallelKind::Sharded { zero: 3, .. })) {
            change.push("keep parameters between forward and backward if they fit (`--pin zero=2`), shard inside a host only (`--pin shard=…`), or gather one layer ahead".into());
        }
        if self.has(|k| matches!(k, ParallelKind::Sharded { zero: 2, .. })) {
            change.push("more micro-batches a step, or a larger batch for each rank, so that reduce-scatters are fewer".into());
        }
        if self.has(|k| matches!(k, ParallelKind::Tensor { .. })) {
            change.push("a smaller tensor-parallel degree (`--pin tp=…`), within one host, and sequence parallelism (`--pin sp=on`)".into());
        }
        if self.has(|k| matches!(k, ParallelKind::AllToAll { .. })) {
            change.push("a smaller group for the all-to-alls (`--pin ep=…`), within one host if it fits".into());
        }
        if self.has(|k| matches!(k, ParallelKind::Pipeline(_))) {
            change.push("fewer stages (`--pin pp=…`), or stages cut where activations are small".into());
        }
        (evidence, change)
    }

    fn compute(&self, limit: Limit) -> (Vec<String>, Vec<String>) {
        let mut evidence = Vec::new();
        let shares: Vec<String> = KernelClass::ALL
            .into_iter()
            .map(|c| (c.name(), self.class_share(c) * 100.0))
            .filter(|(_, s)| *s >= 0.5)
            .map(|(name, s)| format!("{name} {s:.0} %"))
            .collect();
        if !shares.is_empty() {
            evidence.push(format!("kernel time: {}", shares.join(", ")));
        }
        let change = if limit == Limit::Memory {
            vec!["most kernel time reads and writes memory: fuse elementwise ops, norms and the optimizer; a lower precision of activations".into()]
        } else {
            vec!["recompute less (`--pin recompute=none` or `selective`), a lower precision, a larger micro-batch for fuller matrix products, or more devices".into()]
        };
        (evidence, change)
    }

    fn imbalance(&self) -> (Vec<String>, Vec<String>) {
        let balance = &self.analysis.balance;
        let mut evidence = Vec::new();
        if let (Some(imbalance), Some((rank, most))) = (balance.imbalance, balance.most) {
            evidence.push(format!("rank {rank} computes most: {:.2} ms, {:.1} % over the mean", most as f64 / 1e6, imbalance * 100.0));
        }
        if let Some((rank, times)) = balance.last_arrivals.first() {
            evidence.push(format!("rank {rank} comes last to {times} of {} collectives; the others wait in them", balance.collectives));
        }
        let bounds = self.analysis.rows.iter().any(|r| r.basis == Basis::FastestCall);
        if bounds {
            evidence.push("only one member was recorded: waiting is what a call takes longer than the fastest of its kind".into());
        }
        let mut change = vec!["give every rank the same work: equal batches and sequence lengths, layers per stage by their measured time".into()];
        if self.has(|k| matches!(k, ParallelKind::AllToAll { .. })) {
            change.push("spread embeddings or experts by their load".into());
        }
        if balance.imbalance.is_some_and(|i| i < 0.02) {
            change.push("computation is even, so ranks come late for another reason: input, launches, another job on the host".into());
        }
        (evidence, change)
    }

    fn bubble(&self) -> (Vec<String>, Vec<String>) {
        let schedule = self.analysis.parallelism.iter().find_map(|p| match &p.kind {
            ParallelKind::Pipeline(schedule) => Some(schedule),
            _ => None,
        });
        let Some(schedule) = schedule else {
            return (vec!["ranks wait for messages".into()], vec!["send earlier, or give the receiver other work first".into()]);
        };
        let (p, m, v) = (f64::from(schedule.ranks), f64::from(schedule.micro_batches.max(1)), f64::from(schedule.virtual_stages().max(1)));
        let ideal = (p - 1.0) / (m * v + p - 1.0);
        let evidence = vec![format!(
            "{} of {} stages, {} micro-batches: with even stages a bubble of {:.0} % is inherent without splitting backward",
            schedule.name,
            schedule.stages,
            schedule.micro_batches,
            ideal * 100.0
        )];
        let mut change = vec![format!(
            "more micro-batches (`--pin micro=…`): {:.0} would bring the inherent bubble under 10 %",
            (9.0 * (p - 1.0) / v).ceil().max(m + 1.0)
        )];
        if schedule.virtual_stages() <= 1 {
            change.push("several stages a rank (`--pin schedule=interleaved,virtual=2`) or a zero-bubble schedule (`--pin schedule=zb-h1`)".into());
        }
        change.push("fewer stages (`--pin pp=…`) if the model fits".into());
        (evidence, change)
    }

    fn launch(&self) -> (Vec<String>, Vec<String>) {
        let device = self.profile.ranks.iter().any(crate::profile::Rank::has_device);
        let kernels: usize = self.analysis.exposures.iter().map(|e| e.kernels).sum();
        if !device {
            return (
                vec!["gaps between operators on the host: the interpreter, and threads waiting for a core".into()],
                vec!["larger micro-batches, so that operators are fewer and longer; fewer threads than cores".into()],
            );
        }
        let late: usize = self.analysis.exposures.iter().map(|e| e.late_launches).sum();
        let mean = super::total(self.analysis.exposures.iter().flat_map(|e| e.classes)) as f64 / kernels.max(1) as f64 / 1e3;
        let evidence = vec![
            format!("{late} gaps were ended by a kernel launched only after the gap had begun"),
            format!("{kernels} kernels of {mean:.0} µs on average"),
        ];
        let change = vec![
            "capture the step as a CUDA graph, or fuse small kernels".into(),
            "a larger micro-batch (`--pin micro=…`), so that kernels last longer than their launches".into(),
        ];
        (evidence, change)
    }

    fn copies(&self) -> Vec<String> {
        let hidden = super::total(self.analysis.exposures.iter().map(|e| e.hidden.copies));
        vec![format!("{:.2} ms of copies a rank are hidden, {:.2} ms are not", self.per_rank(hidden), self.per_rank(self.analysis.total.copies))]
    }

    /// Memory that is nearly full explains other choices; it is a finding of its own.
    fn capacity(&self) -> Option<Finding> {
        let full = |rank: &crate::profile::Rank| {
            let (used, size) = (rank.memory.reserved_bytes?, rank.device.as_ref()?.memory_bytes.filter(|b| *b > 0)?);
            Some((rank.rank, used, size, used as f64 / size as f64))
        };
        let (rank, used, size, share) = self.profile.ranks.iter().filter_map(full).max_by(|a, b| a.3.total_cmp(&b.3)).filter(|f| f.3 >= 0.95)?;
        Some(Finding {
            limit: Limit::Memory,
            share: 0.0,
            gain: None,
            evidence: vec![format!(
                "rank {rank} reserves {} of {} ({:.0} %)",
                crate::profile::report::bytes(used),
                crate::profile::report::bytes(size),
                share * 100.0
            )],
            change: vec!["shard more state (`--pin zero=…`), recompute more (`--pin recompute=selective`), or a smaller micro-batch".into()],
        })
    }
}
