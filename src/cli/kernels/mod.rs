//! `dplan kernels`: the generated kernels of a plan, as text and machine code, and what they use. Needs no GPU; [`check`] and [`time`] do.
//!
//! Every instruction of every rank maps to kernels, to a copy or fill of the driver, or to a collective, under weight decay of all parameters (what `dplan run` does unless told
//! otherwise). Equal texts are one kernel. A row shows the kernel's largest launch: an op's arithmetic and traffic stand at the launch that has the most
//! threads, and are 0 at its helpers.

mod check;
mod time;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, anyhow};
use dplan_ir::init;
use dplan_ir::optimizer::DecayGroups;
use dplan_kernels::cuda::{Launch, Target};
use dplan_kernels::jit::{self, Arch, Cache, Found, Nvrtc};
use serde_json::json;

use super::output;
use super::{Failure, Outcome, Result};
use crate::planfile::PlanFile;
use crate::runtime::cuda::load::load;

/// Write the generated CUDA kernels of a plan: text, PTX, machine code, and a table of what they use. Needs NVRTC, no GPU but for --check and --time.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  pip install nvidia-cuda-nvrtc-cu12\n  dplan kernels plan.json --arch sm_90a -o kernels/\n  dplan kernels --check              # on a machine with a GPU\n  dplan kernels plan.json --time"
)]
pub struct Args {
    #[arg(required_unless_present = "check")]
    plan: Option<PathBuf>,
    /// Run kernels of every family on this machine's GPU, on random shapes and numbers, against references in f64.
    #[arg(long, conflicts_with_all = ["time", "output", "json"])]
    check: bool,
    /// Shapes of a family that --check draws.
    #[arg(long, default_value_t = 40, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    cases: u64,
    /// Time the plan's kernels on this machine's GPU, beside a copy of the device and products of cuBLASLt; what was timed decides from then on who computes products here.
    #[arg(long)]
    time: bool,
    /// `sm_80`, `sm_90a` or `sm_100`.
    #[arg(long, default_value = "sm_90a", value_parser = arch)]
    arch: Arch,
    /// Folder for `NAME.cu`, `NAME.ptx` and `NAME.cubin`; nothing is written if absent.
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Print one JSON object a kernel.
    #[arg(long)]
    json: bool,
}

fn arch(name: &str) -> std::result::Result<Arch, String> {
    Arch::from_name(name).ok_or_else(|| format!("expected one of {}", Arch::ALL.map(Arch::name).join(", ")))
}

/// A kernel and its largest launch.
struct Row {
    launch: Launch,
    flops: u64,
    bytes: u64,
    /// Instructions that launch it, on the rank of each stage that has the most of them.
    uses: u64,
}

pub fn run(args: Args) -> Result<Outcome> {
    let Some(plan) = args.plan.as_ref().filter(|_| !args.check) else { return check::run(args.cases) };
    let file = PlanFile::read(plan)?;
    if args.time {
        return time::run(&file);
    }
    let rows = rows(&file, args.arch).map_err(|e| anyhow!("{}: {e}", plan.display()))?;
    let nvrtc = Nvrtc::open().map_err(Failure::fault)?;
    let cache = Cache::standard();
    if let Some(folder) = &args.output {
        std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot create", folder.display()))?;
    }
    if !args.json {
        output::say!(
            "{:34} {:10} {:>5} {:>5} {:>7} {:>6} {:>5} {:>10} {:>10}  seconds",
            "kernel",
            "family",
            "uses",
            "regs",
            "shared",
            "spills",
            "occup",
            "FLOPs",
            "bytes"
        );
    }
    let (mut spilled, mut slowest) = (Vec::new(), 0.0f64);
    for (name, row) in &rows {
        let text = jit::text(&row.launch);
        let begin = Instant::now();
        let (made, found) = cache.compile(&nvrtc, &text, args.arch).map_err(Failure::fault)?;
        let seconds = begin.elapsed().as_secs_f64();
        let usage = made.usage(row.launch.entry).ok_or_else(|| Failure::fault(anyhow!("{name}: the assembler reported nothing:\n{}", made.log)))?;
        let shared = usage.shared_bytes + u64::from(row.launch.shared);
        let occupancy = jit::occupancy(args.arch, u64::from(row.launch.threads), usage.registers, shared);
        if let Some(folder) = &args.output {
            for (ending, bytes) in [("cu", text.as_bytes()), ("ptx", made.ptx.as_bytes()), ("cubin", &made.cubin)] {
                output::write(&folder.join(format!("{name}.{ending}")), bytes)?;
            }
        }
        if usage.spill_bytes > 0 {
            spilled.push(name.clone());
        }
        slowest = slowest.max(seconds);
        if args.json {
            let line = json!({
                "name": name, "family": row.launch.family.name(), "registers": usage.registers, "spill_bytes": usage.spill_bytes,
                "shared_bytes": shared, "flops": row.flops, "bytes": row.bytes, "threads": row.launch.threads, "occupancy": occupancy,
                "uses": row.uses, "compile_seconds": seconds, "cached": found == Found::Kept,
            });
            output::say!("{line}");
        } else {
            output::say!(
                "{name:34} {:10} {:5} {:5} {shared:7} {:6} {occupancy:5.2} {:10.3e} {:10.3e}  {seconds:.3}{}",
                row.launch.family.name(),
                row.uses,
                usage.registers,
                usage.spill_bytes,
                row.flops as f64,
                row.bytes as f64,
                if found == Found::Kept { " (cached)" } else { "" }
            );
        }
    }
    if !args.json {
        let spills = if spilled.is_empty() { "no spills".into() } else { format!("spills in {}", spilled.join(", ")) };
        let (major, minor) = nvrtc.version;
        output::say!("{} kernels for {} by NVRTC {major}.{minor}, {spills}, slowest compiled in {slowest:.3} s", rows.len(), args.arch.name());
    }
    Ok(Outcome::Done)
}

/// The kernels of a plan by name.
fn rows(file: &PlanFile, arch: Arch) -> std::result::Result<BTreeMap<String, Row>, crate::runtime::RuntimeError> {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for stage in 0..file.program.stages.len() {
        let mut uses: BTreeMap<String, u64> = BTreeMap::new();
        for local_rank in 0..file.program.mesh.ranks() {
            let code = load(&file.graph, &file.program, stage, local_rank, DecayGroups::All, Target::of(arch))?;
            let mut of_rank: BTreeMap<String, u64> = BTreeMap::new();
            for routine in code.segments.iter().flatten().flat_map(|(_, a)| a.routines()) {
                let threads = |l: &Launch| u64::from(l.grid) * u64::from(l.threads);
                let main = routine.launches.iter().enumerate().max_by_key(|(at, l)| (threads(l), std::cmp::Reverse(*at))).map(|(at, _)| at);
                for (at, launch) in routine.launches.iter().enumerate() {
                    let (flops, bytes) = if Some(at) == main { (routine.cost.flops, routine.cost.bytes) } else { (0, 0) };
                    *of_rank.entry(name(launch)).or_default() += 1;
                    let row = rows.entry(name(launch)).or_insert_with(|| Row { launch: launch.clone(), flops, bytes, uses: 0 });
                    if (flops, bytes) > (row.flops, row.bytes) {
                        (row.launch, row.flops, row.bytes) = (launch.clone(), flops, bytes);
                    }
                }
            }
            for (name, n) in of_rank {
                let most = uses.entry(name).or_default();
                *most = n.max(*most);
            }
        }
        for (name, n) in uses {
            if let Some(row) = rows.get_mut(&name) {
                row.uses += n;
            }
        }
    }
    Ok(rows)
}

/// The kernel's entry and eight digits of its text's hash.
fn name(launch: &Launch) -> String {
    let hash = init::name_hash(&launch.text);
    format!("{}_{:08x}", launch.entry.trim_start_matches("dp_"), (hash ^ (hash >> 32)) as u32)
}
