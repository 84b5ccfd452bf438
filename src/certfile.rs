//! `plan.certificate.json`, beside a plan: the question that was asked, and how every tuple of the space was closed. [`dplan_planner::certificate`] checks it.
//!
//! One line a tuple: `pp=4 tp=8 cp=1 ep=1 dp=2 micro=1 of=128 1f1b virtual=1 sp=- pad=0`, and `groups=1.0.2.3` where ranks are not counted in the order of the cluster's
//! groups, `sync=tree` where gradients are not summed by one collective, `map=ep.cp.tp.dp` where degrees are not nested as usual; how it was closed, and the nanoseconds (or the twin's position) that goes with it.

use crate::compile::Compiled;
use dplan_ir::mesh::Keys;
use dplan_ir::nest::Nest;
use dplan_ir::plan::{MOST_GROUPS, Placement, Schedule};
use dplan_ir::sync::Sync;
use dplan_planner::pins::{PerLayer, Pins};
use dplan_planner::search::{Closed, How};
use dplan_planner::space::Tuple;
use dplan_planner::units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Changes when a reader of older files would misread newer ones.
pub const VERSION: u32 = 1;

/// What was claimed, under which question.
#[derive(Clone, Debug)]
pub struct Certificate {
    pub batch: u64,
    /// The space that was searched: [`Certificate::asked`], and ways of offloading where it was widened by them.
    pub pins: Pins,
    /// The pins of the question.
    pub asked: Pins,
    /// Of one device, arena and context together; the device's memory if absent.
    pub memory_limit: Option<Bytes>,
    /// Of the plan, nanoseconds.
    pub objective: u64,
    /// No plan is below this.
    pub lower_bound: u64,
    pub closed: Vec<Closed>,
}

#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("{path}: cannot read; `dplan compile -o` writes a certificate beside the plan")]
    Read { path: String, source: std::io::Error },
    #[error("{path}:{line}:{column}: not a certificate: {what}")]
    Json { path: String, line: usize, column: usize, what: String },
    #[error("{path}: version {found}, this dplan reads version {VERSION}; compile the plan again")]
    Version { path: String, found: u32 },
    #[error("{path}: `{at}`: {what}")]
    Wrong { path: String, at: String, what: String },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Json {
    dplan_certificate: u32,
    batch: u64,
    pins: String,
    /// As `pins` if absent.
    #[serde(default)]
    asked: Option<String>,
    memory_limit_bytes: Option<u64>,
    objective_nanoseconds: u64,
    lower_bound_nanoseconds: u64,
    tuples: Vec<(String, String, u64)>,
}

impl Certificate {
    pub fn new(compiled: &Compiled) -> Certificate {
        let Compiled { file, objective, statistics, closed, pins, asked, memory_limit, .. } = compiled;
        let (pins, asked, closed) = (pins.clone(), asked.clone(), closed.clone());
        Certificate {
            batch: file.plan.batch(),
            pins,
            asked,
            memory_limit: *memory_limit,
            objective: objective.0,
            lower_bound: statistics.lower_bound,
            closed,
        }
    }

    /// The certificate beside a plan, if there is one and it is about a plan that takes so long: what was asked then.
    ///
    /// # Errors
    /// As [`Certificate::read`], of a file that is there.
    pub fn of_plan(plan: &Path, objective: Nanos) -> Result<Option<Certificate>, CertificateError> {
        let path = Certificate::beside(plan);
        if !path.exists() {
            return Ok(None);
        }
        Ok(Some(Certificate::read(&path)?).filter(|c| c.objective == objective.0))
    }

    /// The space that is spoken of, in words: `without offloading, under the pins tp=4, in 40.00 GiB of each device`.
    pub fn space(&self) -> String {
        space(&self.pins, self.memory_limit)
    }

    /// Where the certificate of a plan lies: `plan.certificate.json` beside `plan.json`.
    pub fn beside(plan: &Path) -> PathBuf {
        plan.with_extension("certificate.json")
    }

    /// The file's text, one tuple a line.
    pub fn to_json(&self) -> String {
        let json = Json {
            dplan_certificate: VERSION,
            batch: self.batch,
            pins: self.pins.to_string(),
            asked: Some(self.asked.to_string()),
            memory_limit_bytes: self.memory_limit.map(|b| b.0),
            objective_nanoseconds: self.objective,
            lower_bound_nanoseconds: self.lower_bound,
            tuples: Vec::new(),
        };
        let head = serde_json::to_string_pretty(&json).unwrap_or_default();
        let line = |c: &Closed| {
            let (how, number) = how_text(c.how);
            format!("    [\"{}\", \"{how}\", {number}]", tuple_text(&c.tuple))
        };
        let lines: Vec<String> = self.closed.iter().map(line).collect();
        head.replacen("\"tuples\": []", &format!("\"tuples\": [\n{}\n  ]", lines.join(",\n")), 1) + "\n"
    }

    /// Reads a certificate.
    ///
    /// # Errors
    /// Names the file, the place in it, what was wrong and what would be right.
    pub fn read(path: &Path) -> Result<Certificate, CertificateError> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|source| CertificateError::Read { path: name.clone(), source })?;
        Self::parse(&name, &bytes)
    }

    /// As [`Certificate::read`], from memory; `path` is for messages.
    ///
    /// # Errors
    /// As [`Certificate::read`].
    pub fn parse(path: &str, bytes: &[u8]) -> Result<Certificate, CertificateError> {
        let wrong = |at: String, what: String| CertificateError::Wrong { path: path.into(), at, what };
        let json: Json = serde_json::from_slice(bytes).map_err(|e| CertificateError::Json {
            path: path.into(),
            line: e.line(),
            column: e.column(),
            what: e.to_string(),
        })?;
        if json.dplan_certificate != VERSION {
            return Err(CertificateError::Version { path: path.into(), found: json.dplan_certificate });
        }
        let mut closed = Vec::with_capacity(json.tuples.len());
        for (at, (tuple, how, number)) in json.tuples.iter().enumerate() {
            let tuple =
                tuple_from(tuple).ok_or_else(|| wrong(format!("tuples[{at}]"), format!("`{tuple}`: expected a tuple, such as `{EXAMPLE}`")))?;
            let how = how_from(how, *number).ok_or_else(|| wrong(format!("tuples[{at}]"), format!("`{how}` is no way of closing a tuple")))?;
            closed.push(Closed { tuple, how });
        }
        let pins = |at: &str, text: &str| Pins::parse(text).map_err(|e| wrong(at.into(), e.to_string()));
        Ok(Certificate {
            batch: json.batch,
            pins: pins("pins", &json.pins)?,
            asked: pins("asked", json.asked.as_ref().unwrap_or(&json.pins))?,
            memory_limit: json.memory_limit_bytes.map(Bytes),
            objective: json.objective_nanoseconds,
            lower_bound: json.lower_bound_nanoseconds,
            closed,
        })
    }
}

/// A space of plans, in words: which ways of offloading are in it, if any, and what else is pinned.
pub fn space(pins: &Pins, memory_limit: Option<Bytes>) -> String {
    let mut parts = Vec::new();
    let offload = Pins { offload: pins.offload.clone(), ..Pins::default() };
    parts.push(if offload.offload.is_pinned() { format!("with {offload}") } else { "without offloading".into() });
    let others = Pins { offload: PerLayer::default(), ..pins.clone() }.to_string();
    if !others.is_empty() {
        parts.push(format!("under the pins {others}"));
    }
    parts.extend(memory_limit.map(|limit| format!("in {limit} of each device")));
    parts.join(", ")
}

const EXAMPLE: &str = "pp=4 tp=8 cp=1 ep=1 dp=2 micro=1 of=128 1f1b virtual=1 sp=- pad=0";

fn tuple_text(tuple: &Tuple) -> String {
    let Tuple { pp, tp, cp, ep, dp, micro_batch, micro_batches, schedule, virtual_stages, boundary, padding, placement, keys, sync, nest } = *tuple;
    let boundary = boundary.map_or("-".to_string(), |d| d.to_string());
    let schedule = schedule.name();
    let groups = if placement == Placement::default() { String::new() } else { format!(" groups={}", placement.0.map(|g| g.to_string()).join(".")) };
    let ring = if keys == Keys::Gathered { String::new() } else { format!(" keys={}", keys.name()) };
    let sync = if sync == Sync::Flat { String::new() } else { format!(" sync={}", sync.name()) };
    let map = if nest == Nest::default() { String::new() } else { format!(" map={nest}") };
    format!(
        "pp={pp} tp={tp} cp={cp} ep={ep} dp={dp} micro={micro_batch} of={micro_batches} {schedule} virtual={virtual_stages} sp={boundary} pad={padding}{groups}{ring}{sync}{map}"
    )
}

fn tuple_from(text: &str) -> Option<Tuple> {
    let mut parts = text.split(' ');
    let mut value = |key: &str| parts.next()?.strip_prefix(key)?.strip_prefix('=');
    let [pp, tp, cp, ep, dp, micro_batch, micro_batches] =
        ["pp", "tp", "cp", "ep", "dp", "micro", "of"].map(|key| value(key).and_then(|v| v.parse::<u64>().ok()));
    let schedule = Schedule::from_name(parts.next()?)?;
    let mut value = |key: &str| parts.next()?.strip_prefix(key)?.strip_prefix('=');
    let virtual_stages = value("virtual").and_then(|v| v.parse::<u64>().ok());
    let boundary = match value("sp")? {
        "-" => None,
        dim => Some(dim.parse().ok()?),
    };
    let padding = value("pad")?.parse().ok()?;
    // What is as usual is not said.
    let mut rest = parts.peekable();
    let mut told = |key: &str| rest.next_if(|part| part.starts_with(key)).map(|part| &part[key.len()..]);
    let placement = match told("groups=") {
        None => Placement::default(),
        Some(groups) => {
            let order: Vec<u8> = groups.split('.').map(|g| g.parse().ok()).collect::<Option<_>>()?;
            Placement::all(MOST_GROUPS).into_iter().find(|p| p.0 == *order)?
        }
    };
    let keys = told("keys=").map_or(Some(Keys::Gathered), Keys::from_name)?;
    let sync = told("sync=").map_or(Some(Sync::Flat), Sync::from_name)?;
    let nest = told("map=").map_or(Some(Nest::default()), Nest::from_name)?;
    // What a search never makes would only break the checker's arithmetic.
    let positive = |n: Option<u64>| n.filter(|n| (1..=1 << 40).contains(n));
    let tuple = Tuple {
        pp: positive(pp)?,
        tp: positive(tp)?,
        cp: positive(cp)?,
        ep: positive(ep)?,
        dp: positive(dp)?,
        micro_batch: positive(micro_batch)?,
        micro_batches: positive(micro_batches)?,
        schedule,
        virtual_stages: positive(virtual_stages)?,
        boundary,
        padding,
        placement,
        keys,
        sync,
        nest,
    };
    rest.next().is_none().then_some(tuple)
}

fn how_text(how: How) -> (&'static str, u64) {
    match how {
        How::Floor(bound) => ("floor", bound),
        How::Trend(bound) => ("trend", bound),
        How::Bound(bound) => ("bound", bound),
        How::Nothing(incumbent) => ("nothing-below", incumbent),
        How::Best(value) => ("best", value),
        How::Impossible => ("impossible", 0),
        How::Crowded => ("crowded", 0),
        How::Twin(at) => ("twin", at as u64),
        How::Open(bound) => ("open", bound),
    }
}

fn how_from(name: &str, number: u64) -> Option<How> {
    Some(match name {
        "floor" => How::Floor(number),
        "trend" => How::Trend(number),
        "bound" => How::Bound(number),
        "nothing-below" => How::Nothing(number),
        "best" => How::Best(number),
        "impossible" => How::Impossible,
        "crowded" => How::Crowded,
        "twin" => How::Twin(usize::try_from(number).ok()?),
        "open" => How::Open(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_of_the_plan_beside_it_or_says_nothing_and_damage_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let plan = dir.path().join("plan.json");
        let of = |objective| Certificate::of_plan(&plan, Nanos(objective));
        assert!(of(7).unwrap().is_none());
        let text = Certificate {
            batch: 8,
            pins: Pins::default(),
            asked: Pins::parse("tp=2").unwrap(),
            memory_limit: None,
            objective: 7,
            lower_bound: 7,
            closed: vec![],
        }
        .to_json();
        std::fs::write(Certificate::beside(&plan), &text).unwrap();
        assert_eq!(of(7).unwrap().unwrap().asked.to_string(), "tp=2");
        assert!(of(8).unwrap().is_none());
        std::fs::write(Certificate::beside(&plan), &text[..text.len() / 2]).unwrap();
        assert!(matches!(of(7), Err(CertificateError::Json { .. })));
    }

    #[test]
    fn certificates_read_back() {
        let tuple = |padding| Tuple {
            pp: 4,
            tp: 8,
            cp: 1,
            ep: 1,
            dp: 2,
            micro_batch: 1,
            micro_batches: 128,
            schedule: Schedule::OneFOneB,
            virtual_stages: 1,
            boundary: (padding > 0).then_some(1),
            padding,
            placement: if padding == 2 { Placement::of(&[1, 0]) } else { Placement::default() },
            keys: if padding > 1 && padding < 4 { Keys::Ring } else { Keys::Gathered },
            sync: [Sync::Flat, Sync::Tree, Sync::Hierarchical { far: 2 }][padding as usize % 3],
            nest: if padding % 4 < 2 { Nest::default() } else { Nest::all()[7] },
        };
        assert_eq!(tuple_text(&tuple(0)), EXAMPLE);
        let hows =
            [How::Floor(1), How::Trend(2), How::Bound(3), How::Nothing(4), How::Best(5), How::Impossible, How::Crowded, How::Twin(1), How::Open(6)];
        let closed: Vec<Closed> = hows.iter().zip(0..).map(|(&how, padding)| Closed { tuple: tuple(padding), how }).collect();
        let pins = Pins::parse("tp=1+2,zero=3").unwrap();
        let asked = Pins::parse("tp=1+2").unwrap();
        let certificate = Certificate { batch: 8, pins, asked, memory_limit: Some(Bytes(7)), objective: 5, lower_bound: 5, closed };
        assert_eq!(certificate.space(), "without offloading, under the pins tp=1+2,zero=3, in 7 B of each device");
        assert_eq!(space(&Pins::parse("tp=2,offload=none+optimizer").unwrap(), None), "with offload=none+optimizer, under the pins tp=2");
        let text = certificate.to_json();
        let back = Certificate::parse("c.json", text.as_bytes()).unwrap();
        assert_eq!((&back.closed, &back.pins, &back.asked, &back.to_json()), (&certificate.closed, &certificate.pins, &certificate.asked, &text));
        // Those of before said one thing for both.
        let before = Certificate::parse("c.json", text.replacen("  \"asked\": \"tp=1+2\",\n", "", 1).as_bytes()).unwrap();
        assert_eq!((&before.asked, &before.pins), (&certificate.pins, &certificate.pins));
        for (from, to, says) in [
            ("pp=4", "pp=x", "tuples[0]"),
            ("floor", "guess", "no way of closing"),
            ("\"dplan_certificate\": 1", "\"dplan_certificate\": 9", "version 9"),
            ("tp=1+2", "tp=none", "pins"),
        ] {
            let error = Certificate::parse("c.json", text.replacen(from, to, 1).as_bytes()).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
