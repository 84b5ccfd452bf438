//! Traces in JSON: PyTorch's profiler (Kineto), and Chrome traces with a process per rank, as dplan writes them. Gzipped or not.
//!
//! Kineto: the file is one rank, `distributedInfo.rank`; `pid` and `tid` of a device event are the device and the stream, and neither is the rank.
//!
//! | `cat` | read as |
//! |---|---|
//! | `kernel` | computation or communication, by name |
//! | `gpu_memcpy`, `gpu_memset` | copies |
//! | `cuda_runtime`, `cuda_driver` (`hip…`, `xpu…`) | calls |
//! | `cpu_op` | ops; `c10d::…` and `record_param_comms` also tell of collectives |
//! | `user_annotation` | ranges; `nccl:…`, `gloo:…` also tell of collectives |
//! | arrows, `python_function`, `cuda_sync`, `gpu_user_annotation`, … | passed over |
//!
//! Otherwise a process is a rank: the number in its `process_name` (`rank 3`), or its `pid`. `cat` is `compute`, `collective` or `p2p` (arguments
//! `op`, `bytes`, `elements`, `dtype`, `group`, `peer`, `seq`), `copy`, and anything else is a range; `step 3` spans a step.

use std::io::Read;

use serde_json::{Map, Value};

use super::draft::{At, Draft, Ids, Rung, within};
use super::meta::rank_list;
use super::stream::{self, Cut, Sink, Why};
use super::text::{integer, members, nanoseconds, string};
use crate::profile::classify::{CommKernels, comm_call, is_comm_op};
use crate::profile::{CommOp, Device, Direction, Error, Format, Group, Rank};

/// A rank as a file gives it; `number` is `None` where the file does not say which it is.
pub struct Found {
    pub rank: Rank,
    pub number: Option<u32>,
}

/// Reads a trace.
///
/// # Errors
/// If it is no trace, or nothing of it could be read. Of a file that was cut short, what came before is read and a note says so.
pub fn read(file: &str, input: impl Read, rules: &CommKernels) -> Result<Vec<Found>, Error> {
    let mut trace = Trace::new(file, rules);
    let walked = stream::walk(input, &mut trace);
    match walked {
        Ok(true) => {}
        Ok(false) => {
            let names = trace.seen.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
            let of = if trace.seen.is_empty() { String::new() } else { format!(" of {names}") };
            return Err(Error::NotAProfile { file: file.into(), found: format!("a JSON object{of} without `traceEvents`") });
        }
        Err(cut) if trace.events == 0 => return Err(unreadable(file, cut)),
        Err(cut) => trace.notes.push(format!("byte {}: {}; answers cover the {} events before", cut.at, cut.describe(), trace.events)),
    }
    if let Some((first, at, what)) = trace.first_damage.take() {
        if trace.damaged * 10 > trace.events {
            return Err(Error::Syntax { file: file.into(), at, what: format!("event {first}: {what}") });
        }
        trace.notes.push(format!(
            "{} of {} events could not be read and are left out; the first is event {first} at byte {at}: {what}",
            trace.damaged, trace.events
        ));
    }
    if trace.usable == 0 {
        let why = if trace.events == 0 {
            "`traceEvents` is empty".into()
        } else {
            format!("none of its {} events is complete (`\"ph\": \"X\"`) and of a category dplan reads", trace.events)
        };
        return Err(Error::NoEvents { file: file.into(), why });
    }
    Ok(trace.finish())
}

fn unreadable(file: &str, cut: Cut) -> Error {
    match cut.why {
        Why::Unreadable(source) => Error::Io { file: file.into(), source },
        Why::Ended => Error::Syntax { file: file.into(), at: cut.at, what: "the file ends before its first event: it was cut short".into() },
        Why::Syntax(what) => Error::Syntax { file: file.into(), at: cut.at, what },
    }
}

struct Trace<'r> {
    file: String,
    draft: Draft<'r>,
    /// Whether anything marks the file as PyTorch's.
    kineto: bool,
    distributed: Option<Value>,
    devices: Option<Value>,
    base: i64,
    host: Option<String>,
    seen: Vec<String>,
    events: u64,
    usable: u64,
    damaged: u64,
    /// Event number, place and what is wrong.
    first_damage: Option<(u64, u64, String)>,
    /// Names of processes and threads: process, thread if it is one, name.
    labels: Vec<(String, Option<String>, String)>,
    notes: Vec<String>,
}

/// The members of an event that matter, as they are written.
#[derive(Default)]
struct Raw<'a> {
    phase: &'a str,
    category: &'a str,
    name: &'a str,
    process: &'a str,
    thread: &'a str,
    start: &'a str,
    duration: &'a str,
    args: &'a str,
}

impl<'r> Trace<'r> {
    fn new(file: &str, rules: &'r CommKernels) -> Trace<'r> {
        Trace {
            file: file.into(),
            draft: Draft::new(rules),
            kineto: false,
            distributed: None,
            devices: None,
            base: 0,
            host: None,
            seen: Vec::new(),
            events: 0,
            usable: 0,
            damaged: 0,
            first_damage: None,
            labels: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn complete(&mut self, raw: &Raw<'_>) -> Result<(), String> {
        let category = string(raw.category).to_ascii_lowercase();
        let ours = match category.as_str() {
            "kernel" | "gpu_memcpy" | "gpu_memset" | "memcpy" | "memset" | "cpu_op" | "operator" | "user_annotation" => true,
            "compute" | "collective" | "comm" | "p2p" | "copy" | "step" | "range" | "input" => true,
            other if other.ends_with("_runtime") || other.ends_with("_driver") || other == "runtime" => true,
            "ac2g"
            | "async_cpu_to_gpu"
            | "fwdbwd"
            | "python_function"
            | "cuda_sync"
            | "gpu_user_annotation"
            | "overhead"
            | "trace"
            | "cpu_instant_event" => return Ok(()),
            _ => !self.kineto,
        };
        if !ours {
            return Ok(());
        }
        let start = nanoseconds(raw.start).ok_or_else(|| format!("`ts` is {}; expected microseconds", shown(raw.start)))?;
        let duration = if raw.duration.is_empty() {
            0
        } else {
            nanoseconds(raw.duration).ok_or_else(|| format!("`dur` is {}; expected microseconds", shown(raw.duration)))?
        };
        let name = string(raw.name);
        let lane = self.draft.lane(&string(raw.process), &string(raw.thread));
        let at = At { start, duration, lane };
        let args = || serde_json::from_str::<Map<String, Value>>(raw.args).unwrap_or_default();
        self.usable += 1;
        match category.as_str() {
            "kernel" => self.draft.kernel(at, &name, ids(raw.args), args),
            "gpu_memcpy" | "memcpy" => self.draft.copy(at, &name, direction(&name), ids(raw.args)),
            "gpu_memset" | "memset" => self.draft.copy(at, &name, Direction::Fill, ids(raw.args)),
            "cpu_op" | "operator" => {
                self.kineto = true;
                if is_comm_op(&name) {
                    let rung = if name == "record_param_comms" { Rung::Parameters } else { Rung::Call };
                    self.draft.comm_call(at, &name, ids(raw.args), rung, &args());
                } else {
                    self.draft.op(at, &name);
                }
            }
            "user_annotation" => self.draft.range(at, &name, ids(raw.args), args),
            "compute" => self.draft.kernel(at, &name, Ids::default(), args),
            "collective" | "comm" | "p2p" => {
                let args = args();
                let op = args.get("op").and_then(Value::as_str).and_then(comm_call).or_else(|| comm_call(&name)).unwrap_or(CommOp::Other);
                self.draft.comm(at, &name, op, &args);
            }
            "copy" => self.draft.copy(at, &name, direction(&name), Ids::default()),
            other if other.ends_with("_runtime") || other.ends_with("_driver") || other == "runtime" => {
                self.kineto = true;
                self.draft.call(at, &name, ids(raw.args).correlation);
            }
            _ => self.draft.range(at, &name, Ids::default(), args),
        }
        Ok(())
    }

    fn instant(&mut self, raw: &Raw<'_>) {
        if raw.name != "\"[memory]\"" {
            return;
        }
        let (mut device, mut allocated, mut reserved) = (None, None, None);
        // What cannot be read is no memory record.
        let _ = members(raw.args, |name, value| match name {
            "Device Type" => device = integer(value),
            "Total Allocated" => allocated = integer(value),
            "Total Reserved" => reserved = integer(value),
            _ => {}
        });
        // Type 0 is the host.
        if device != Some(0) {
            self.draft.memory(&string(raw.process), allocated, reserved);
        }
    }

    fn label(&mut self, raw: &Raw<'_>) {
        let kind = string(raw.name);
        if kind != "process_name" && kind != "thread_name" {
            return;
        }
        let mut label = None;
        let _ = members(raw.args, |name, value| {
            if name == "name" {
                label = Some(string(value).into_owned());
            }
        });
        if let Some(label) = label {
            let thread = (kind == "thread_name").then(|| string(raw.thread).into_owned());
            self.labels.push((string(raw.process).into_owned(), thread, label));
        }
    }

    fn finish(mut self) -> Vec<Found> {
        for (process, thread, label) in &self.labels {
            for lane in self.draft.rank.lanes.iter_mut().filter(|l| l.process == *process && thread.as_ref().is_some_and(|t| *t == l.thread)) {
                lane.name.clone_from(label);
            }
        }
        if !self.kineto {
            self.draft.rank.format = Format::Chrome;
            let labels = self.labels;
            let number = |process: &str| {
                let named = labels.iter().find(|(p, thread, _)| p == process && thread.is_none()).and_then(|(_, _, label)| last_number(label));
                named.or_else(|| process.parse().ok())
            };
            let mut found: Vec<Found> =
                self.draft.split().into_iter().map(|(process, draft)| Found { number: number(&process), rank: draft.finish() }).collect();
            // A process in which nothing runs is no rank: the lanes of a counter, of arrows.
            if found.iter().any(|f| f.rank.has_device() || !f.rank.comms.is_empty()) {
                found.retain(|f| f.rank.has_device() || !f.rank.comms.is_empty());
            }
            for rank in &mut found {
                rank.rank.notes.clone_from(&self.notes);
                // Ranks of one file have its clock.
                rank.rank.host = Some(self.file.clone());
            }
            return found;
        }
        let device = self.device();
        let mut rank = self.draft.finish();
        let based = |stamp: i64| within(stamp.saturating_add(self.base));
        for event in &mut rank.events {
            event.start = based(event.start);
            event.launched = event.launched.map(based);
        }
        for comm in &mut rank.comms {
            comm.start = based(comm.start);
            comm.issued = comm.issued.map(based);
        }
        let info = self.distributed.unwrap_or_default();
        let whole = |key: &str| info.get(key).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
        let groups = info.get("pg_config").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        rank.format = Format::Kineto;
        rank.world_size = whole("world_size");
        rank.backend = info.get("backend").and_then(Value::as_str).map(str::to_string);
        rank.groups = groups.iter().filter_map(group).collect();
        rank.host = self.host;
        rank.device = device;
        rank.notes = self.notes;
        vec![Found { rank, number: whole("rank") }]
    }

    /// The device that ran kernels; its number need not be the rank.
    fn device(&self) -> Option<Device> {
        let devices = self.devices.as_ref()?.as_array()?;
        let used = self.draft.rank.events.iter().find(|e| e.kind.on_device()).map(|e| self.draft.rank.lanes[e.lane.0 as usize].process.as_str());
        let id = |d: &Value| d.get("id").and_then(Value::as_u64).map(|id| id.to_string());
        let device = devices.iter().find(|d| id(d).as_deref() == used && used.is_some())?;
        let memory_bytes = device.get("totalGlobalMem").and_then(Value::as_u64);
        Some(Device { name: device.get("name").and_then(Value::as_str)?.to_string(), memory_bytes })
    }
}

impl Sink for Trace<'_> {
    fn wants(&mut self, member: &str) -> bool {
        if self.seen.len() < 6 {
            self.seen.push(member.chars().take(40).collect());
        }
        match member {
            "schemaVersion" | "distributedInfo" | "deviceProperties" | "baseTimeNanoseconds" | "host_name" => {
                self.kineto = true;
                true
            }
            _ => false,
        }
    }

    fn member(&mut self, name: &str, value: &str) {
        // Of a member that is damaged nothing is known, as if it were absent.
        match name {
            "distributedInfo" => self.distributed = serde_json::from_str(value).ok(),
            "deviceProperties" => self.devices = serde_json::from_str(value).ok(),
            "baseTimeNanoseconds" => self.base = value.parse().unwrap_or(0),
            "host_name" => self.host = Some(string(value).into_owned()),
            _ => {}
        }
    }

    fn event(&mut self, event: &str, at: u64) {
        self.events += 1;
        let mut raw = Raw::default();
        let read = members(event, |name, value| match name {
            "ph" => raw.phase = value,
            "cat" => raw.category = value,
            "name" => raw.name = value,
            "pid" => raw.process = value,
            "tid" => raw.thread = value,
            "ts" => raw.start = value,
            "dur" => raw.duration = value,
            "args" => raw.args = value,
            _ => {}
        });
        let done = match read {
            Err(error) => Err(error.to_string()),
            Ok(()) => match raw.phase {
                "\"X\"" => self.complete(&raw),
                "\"i\"" | "\"I\"" => {
                    self.instant(&raw);
                    Ok(())
                }
                "\"M\"" => {
                    self.label(&raw);
                    Ok(())
                }
                _ => Ok(()),
            },
        };
        if let Err(what) = done {
            self.damaged += 1;
            self.first_damage.get_or_insert((self.events, at, what));
        }
    }
}

/// What joins a device event or call to others. The external id of old traces repeats the correlation and joins to nothing.
fn ids(args: &str) -> Ids {
    let mut ids = Ids::default();
    let _ = members(args, |name, value| match name {
        "correlation" => ids.correlation = integer(value),
        "External id" | "external id" => ids.external = integer(value),
        "Record function id" => ids.function = integer(value).filter(|id| *id != 0),
        _ => {}
    });
    if ids.external == ids.correlation {
        ids.external = None;
    }
    ids
}

/// `Memcpy HtoD (Pinned -> Device)`.
pub fn direction(name: &str) -> Direction {
    let has = |part: &str| name.contains(part);
    match () {
        () if has("HtoD") || has("Host-to-Device") || has("to_device") => Direction::ToDevice,
        () if has("DtoH") || has("Device-to-Host") || has("from_device") => Direction::FromDevice,
        () if has("PtoP") || has("Peer-to-Peer") => Direction::BetweenDevices,
        () if has("memset") || has("Memset") => Direction::Fill,
        () => Direction::Within,
    }
}

fn group(value: &Value) -> Option<Group> {
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_string();
    Some(Group { name: text("pg_name"), description: text("pg_desc"), ranks: rank_list(value.get("ranks")?)? })
}

/// `rank 3` is 3.
pub fn last_number(text: &str) -> Option<u32> {
    let end = text.rfind(|c: char| c.is_ascii_digit())? + 1;
    let start = text[..end].rfind(|c: char| !c.is_ascii_digit()).map_or(0, |i| i + text[i..].chars().next().map_or(1, char::len_utf8));
    text[start..end].parse().ok()
}

fn shown(raw: &str) -> String {
    if raw.is_empty() { "absent".into() } else { format!("`{}`", raw.chars().take(40).collect::<String>()) }
}
