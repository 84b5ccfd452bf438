//! Pins: what the user has decided already, `dp=2,tp=1+2,zero@0-11=3`.
//!
//! `key=value,…`; values of one key joined by `+` are all allowed; `zero`, `offload` and `recompute` may be for a range of layers, and then rule there alone.

use crate::machine::nearest;
use crate::problem::MOST_COMPRESSED;
use dplan_ir::mesh::Keys;
use dplan_ir::nest::Nest;
use dplan_ir::plan::{Away, Plan, Recompute, Schedule, Wire, Zero};
use dplan_ir::program::Updates;
use dplan_ir::sync::Sync;
use std::fmt;

/// What is wrong with a pin.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PinError {
    #[error("pin `{0}`: expected KEY=VALUE, like `tp=4`, `zero=0+1` or `recompute@0-11=full`")]
    Syntax(String),
    #[error("pin `{given}`: unknown key; did you mean `{near}`? Known: {}", KEYS.join(", "))]
    Key { given: String, near: String },
    #[error("pin `{pin}`: `{value}` is not {expected}")]
    Value { pin: String, value: String, expected: &'static str },
    #[error("pin `{0}`: not supported yet")]
    NotYet(String),
    #[error("pin `{pin}`: only `zero`, `offload` and `recompute` may be pinned for a range of layers")]
    Range { pin: String },
    #[error("pins `{first}` and `{second}` contradict each other")]
    Twice { first: String, second: String },
    #[error("pin `{pin}`: layer {last} is out of range; the model has layers 0 to {most}")]
    Layers { pin: String, last: u32, most: u32 },
    #[error(
        "pin `wire={wire}`: what is left over of compressed gradients counts in one exchange a step, so ZeRO 0 or 1, which pins rule out for layer {layer}"
    )]
    Compressed { wire: String, layer: u32 },
}

const KEYS: [&str; 18] = [
    "dp",
    "tp",
    "pp",
    "micro",
    "zero",
    "recompute",
    "schedule",
    "sp",
    "cp",
    "ep",
    "keys",
    "etp",
    "virtual",
    "offload",
    "bucket",
    "wire",
    "sync",
    "map",
];

/// Values that are allowed: all of them, or those of a list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Allowed<T>(Option<Vec<T>>);

impl<T: PartialEq> Allowed<T> {
    pub const ANY: Allowed<T> = Allowed(None);
    pub fn only(values: Vec<T>) -> Allowed<T> {
        Allowed(Some(values))
    }
    pub fn allows(&self, value: &T) -> bool {
        self.0.as_ref().is_none_or(|values| values.contains(value))
    }
    pub fn is_pinned(&self) -> bool {
        self.0.is_some()
    }
    pub fn values(&self) -> Option<&[T]> {
        self.0.as_deref()
    }
}

impl<T> Default for Allowed<T> {
    fn default() -> Self {
        Allowed(None)
    }
}

/// Values of a choice that each layer makes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PerLayer<T> {
    pub everywhere: Allowed<T>,
    /// `(first, last inclusive, values)`: stand in place of `everywhere` there.
    pub ranges: Vec<(u32, u32, Vec<T>)>,
}

impl<T> Default for PerLayer<T> {
    fn default() -> Self {
        PerLayer { everywhere: Allowed(None), ranges: Vec::new() }
    }
}

impl<T: PartialEq> PerLayer<T> {
    pub fn allows(&self, layer: u32, value: &T) -> bool {
        let mut ranges = self.ranges.iter().filter(|(first, last, _)| (*first..=*last).contains(&layer)).peekable();
        if ranges.peek().is_none() { self.everywhere.allows(value) } else { ranges.all(|(_, _, values)| values.contains(value)) }
    }
    pub fn is_pinned(&self) -> bool {
        self.everywhere.is_pinned() || !self.ranges.is_empty()
    }
}

/// A way of exchanging gradients, as a pin asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asked {
    This(Sync),
    /// `hierarchical`: inside the nodes that data-parallel ranks are on, and between them.
    ByNodes,
}

impl Asked {
    fn name(self) -> String {
        match self {
            Asked::This(sync) => sync.name(),
            Asked::ByNodes => "hierarchical".into(),
        }
    }
}

/// Everything that is pinned.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Pins {
    pub dp: Allowed<u64>,
    pub tp: Allowed<u64>,
    pub pp: Allowed<u64>,
    pub cp: Allowed<u64>,
    pub ep: Allowed<u64>,
    pub micro_batch: Allowed<u64>,
    pub schedule: Allowed<Schedule>,
    /// Virtual stages on each stage (`virtual`).
    pub virtual_stages: Allowed<u64>,
    /// Whether tensor-parallel axes shard the sequences of layer boundaries, dim 1 (`sp`).
    pub boundary: Allowed<bool>,
    pub zero: PerLayer<Zero>,
    pub offload: PerLayer<Away>,
    pub recompute: PerLayer<Recompute>,
    /// How context-parallel ranks get at each other's keys and values.
    pub keys: Allowed<Keys>,
    /// What gradients are exchanged in; it changes numbers, so it is no choice of the planner's, and full where nothing is said.
    pub wire: Option<Wire>,
    /// How gradients get to their sum (`sync`); one collective where nothing is said.
    pub sync: Allowed<Asked>,
    /// Which degrees lie on which links (`map`); the usual order where nothing is said.
    pub nest: Allowed<Nest>,
}

impl Pins {
    /// When parameters are updated under these pins: it changes numbers, so it is no choice of the planner's, and once a step where nothing is said.
    pub fn updates(&self) -> Updates {
        self.schedule.values().and_then(|pinned| pinned.first()).map_or(Updates::Step, |schedule| schedule.updates())
    }

    /// What must be pinned for another plan to compute what this one does, and to have a choice of it that planners do not make unasked.
    pub fn that_keep(plan: &Plan) -> Pins {
        fn kept<T: PartialEq>(this: T, usual: T) -> Allowed<T> {
            if this == usual { Allowed::ANY } else { Allowed::only(vec![this, usual]) }
        }
        Pins {
            wire: plan.wire.is_lossy().then_some(plan.wire),
            sync: kept(Asked::This(plan.sync), Asked::This(Sync::Flat)),
            nest: kept(plan.nest, Nest::default()),
            ..Pins::of_updates(plan)
        }
    }

    /// What must be pinned for another plan to update parameters when this one does: with updates of micro-batches, their number and how old parameters are.
    fn of_updates(plan: &Plan) -> Pins {
        match plan.schedule.updates() {
            Updates::Step => Pins::default(),
            Updates::MicroBatch => Pins {
                schedule: Allowed::only(vec![plan.schedule]),
                pp: Allowed::only(vec![plan.pp()]),
                dp: Allowed::only(vec![plan.dp]),
                micro_batch: Allowed::only(vec![plan.micro_batch]),
                ..Pins::default()
            },
        }
    }

    /// These pins, and what keeps another plan to what this one computes; schedules that update at other times ask for a plan that computes something else.
    pub fn like(self, plan: &Plan) -> Pins {
        let kept = Pins::that_keep(plan);
        let other = self.schedule.is_pinned() && self.updates() != plan.schedule.updates();
        let Pins { wire, sync, nest, .. } = kept.clone();
        self.over(&if other { Pins { wire, sync, nest, ..Pins::default() } } else { kept })
    }

    /// Whether nothing is pinned that a planner would choose.
    pub fn leave_all_choices(&self) -> bool {
        Pins { wire: None, sync: Allowed::ANY, nest: Allowed::ANY, ..self.clone() } == Pins::default()
    }

    /// These, and `others` of what these do not pin.
    pub fn over(self, others: &Pins) -> Pins {
        fn allowed<T: Clone + PartialEq>(own: Allowed<T>, other: &Allowed<T>) -> Allowed<T> {
            if own.is_pinned() { own } else { other.clone() }
        }
        fn layers<T: Clone + PartialEq>(own: PerLayer<T>, other: &PerLayer<T>) -> PerLayer<T> {
            if own.is_pinned() { own } else { other.clone() }
        }
        let Pins { dp, tp, pp, cp, ep, micro_batch, schedule, virtual_stages, boundary, zero, offload, recompute, wire, keys, sync, nest } = self;
        Pins {
            dp: allowed(dp, &others.dp),
            tp: allowed(tp, &others.tp),
            pp: allowed(pp, &others.pp),
            cp: allowed(cp, &others.cp),
            ep: allowed(ep, &others.ep),
            micro_batch: allowed(micro_batch, &others.micro_batch),
            schedule: allowed(schedule, &others.schedule),
            virtual_stages: allowed(virtual_stages, &others.virtual_stages),
            boundary: allowed(boundary, &others.boundary),
            zero: layers(zero, &others.zero),
            offload: layers(offload, &others.offload),
            recompute: layers(recompute, &others.recompute),
            wire: wire.or(others.wire),
            keys: allowed(keys, &others.keys),
            sync: allowed(sync, &others.sync),
            nest: allowed(nest, &others.nest),
        }
    }

    /// Reads `key=value,…`; nothing pins nothing.
    ///
    /// # Errors
    /// The first pin that is malformed, unknown, unsupported or contradicts an earlier one.
    pub fn parse(text: &str) -> Result<Pins, PinError> {
        let mut pins = Pins::default();
        let mut seen: Vec<(&str, &str)> = Vec::new();
        for pin in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (head, values) = pin.split_once('=').ok_or_else(|| PinError::Syntax(pin.into()))?;
            let (head, values) = (head.trim(), values.trim());
            let (key, range) = match head.split_once('@') {
                Some((key, range)) => (key, Some(parse_range(pin, range)?)),
                None => (head, None),
            };
            if let Some((_, first)) = seen.iter().find(|(h, p)| *h == head && *p != pin) {
                return Err(PinError::Twice { first: (*first).into(), second: pin.into() });
            }
            seen.push((head, pin));
            if range.is_some() && !matches!(key, "zero" | "offload" | "recompute") {
                return Err(PinError::Range { pin: pin.into() });
            }
            match key {
                "dp" => pins.dp = Allowed::only(list(pin, values, count)?),
                "tp" => pins.tp = Allowed::only(list(pin, values, count)?),
                "pp" => pins.pp = Allowed::only(list(pin, values, count)?),
                "cp" => pins.cp = Allowed::only(list(pin, values, count)?),
                "ep" => pins.ep = Allowed::only(list(pin, values, count)?),
                "micro" => pins.micro_batch = Allowed::only(list(pin, values, count)?),
                "schedule" => {
                    let asked = list(pin, values, schedule)?;
                    if asked.len() > 1 && asked.iter().any(|s| s.updates() == Updates::MicroBatch) {
                        return Err(PinError::Value {
                            pin: pin.into(),
                            value: values.into(),
                            expected: "pipedream alone, or schedules without it: it trains on stale weights, so they differ in what is computed",
                        });
                    }
                    pins.schedule = Allowed::only(asked);
                }
                "virtual" => pins.virtual_stages = Allowed::only(list(pin, values, count)?),
                "sp" => pins.boundary = Allowed::only(list(pin, values, on_off)?),
                "zero" => pins.zero.pin(range, list(pin, values, zero)?),
                "recompute" => pins.recompute.pin(range, list(pin, values, recompute)?),
                "offload" => pins.offload.pin(range, list(pin, values, offload)?),
                "keys" => pins.keys = Allowed::only(list(pin, values, keys)?),
                "wire" => match list(pin, values, wire)?[..] {
                    [one] => pins.wire = Some(one),
                    _ => {
                        return Err(PinError::Value {
                            pin: pin.into(),
                            value: values.into(),
                            expected: "one of `full`, `bf16` and `topk:F`: they differ in what is computed",
                        });
                    }
                },
                "sync" => pins.sync = Allowed::only(list(pin, values, sync)?),
                "map" => pins.nest = Allowed::only(list(pin, values, nest)?),
                "etp" if values == "1" => {}
                _ if KEYS.contains(&key) => return Err(PinError::NotYet(pin.into())),
                _ => {
                    let near = nearest(key, KEYS).unwrap_or_default().into();
                    return Err(PinError::Key { given: key.into(), near });
                }
            }
        }
        pins.disjoint_ranges(&seen)?;
        Ok(pins)
    }

    /// Checks ranges against the number of layers.
    ///
    /// # Errors
    /// The first range that ends behind the last layer; a way of exchange that no ZeRO stage left for a layer goes with.
    pub fn check_layers(&self, layers: u32) -> Result<(), PinError> {
        let zero = self.zero.ranges.iter().map(|(a, b, _)| ("zero", *a, *b));
        let offload = self.offload.ranges.iter().map(|(a, b, _)| ("offload", *a, *b));
        let recompute = self.recompute.ranges.iter().map(|(a, b, _)| ("recompute", *a, *b));
        match zero.chain(offload).chain(recompute).find(|&(_, _, last)| last >= layers) {
            Some((key, first, last)) => Err(PinError::Layers { pin: format!("{key}@{first}-{last}"), last, most: layers.saturating_sub(1) }),
            None => Ok(()),
        }?;
        let is_left = |layer: u32| (0..=MOST_COMPRESSED).any(|z| self.zero.allows(layer, &Zero(z)));
        match (self.wire.filter(|wire| wire.kept().is_some()), (0..layers).find(|&layer| !is_left(layer))) {
            (Some(wire), Some(layer)) => Err(PinError::Compressed { wire: wire.name(), layer }),
            (None, _) | (_, None) => Ok(()),
        }
    }

    /// The keys that are pinned, and these pins without each of them.
    pub fn relaxations(&self) -> Vec<(&'static str, Pins)> {
        type Relax = fn(&mut Pins);
        let keys: [(&'static str, bool, Relax); 16] = [
            ("dp", self.dp.is_pinned(), |p| p.dp = Allowed::ANY),
            ("tp", self.tp.is_pinned(), |p| p.tp = Allowed::ANY),
            ("pp", self.pp.is_pinned(), |p| p.pp = Allowed::ANY),
            ("cp", self.cp.is_pinned(), |p| p.cp = Allowed::ANY),
            ("ep", self.ep.is_pinned(), |p| p.ep = Allowed::ANY),
            ("micro", self.micro_batch.is_pinned(), |p| p.micro_batch = Allowed::ANY),
            ("schedule", self.schedule.is_pinned(), |p| p.schedule = Allowed::ANY),
            ("virtual", self.virtual_stages.is_pinned(), |p| p.virtual_stages = Allowed::ANY),
            ("sp", self.boundary.is_pinned(), |p| p.boundary = Allowed::ANY),
            ("zero", self.zero.is_pinned(), |p| p.zero = PerLayer::default()),
            ("offload", self.offload.is_pinned(), |p| p.offload = PerLayer::default()),
            ("recompute", self.recompute.is_pinned(), |p| p.recompute = PerLayer::default()),
            ("keys", self.keys.is_pinned(), |p| p.keys = Allowed::ANY),
            ("wire", self.wire.is_some(), |p| p.wire = None),
            ("sync", self.sync.is_pinned(), |p| p.sync = Allowed::ANY),
            ("map", self.nest.is_pinned(), |p| p.nest = Allowed::ANY),
        ];
        let relaxed = |relax: Relax| {
            let mut pins = self.clone();
            relax(&mut pins);
            pins
        };
        keys.into_iter().filter(|k| k.1).map(|(key, _, relax)| (key, relaxed(relax))).collect()
    }

    /// Two ranges that overlap must leave something to choose.
    fn disjoint_ranges(&self, seen: &[(&str, &str)]) -> Result<(), PinError> {
        fn clash<T: PartialEq>(ranges: &[(u32, u32, Vec<T>)]) -> Option<(usize, usize)> {
            let pairs = (0..ranges.len()).flat_map(|j| (0..j).map(move |i| (i, j)));
            pairs.into_iter().find(|&(i, j)| {
                let (a, b) = (&ranges[i], &ranges[j]);
                a.0 <= b.1 && b.0 <= a.1 && !a.2.iter().any(|v| b.2.contains(v))
            })
        }
        for (key, found) in
            [("zero@", clash(&self.zero.ranges)), ("offload@", clash(&self.offload.ranges)), ("recompute@", clash(&self.recompute.ranges))]
        {
            if let Some((i, j)) = found {
                let mut pins: Vec<&str> = seen.iter().filter(|(h, _)| h.starts_with(key)).map(|(_, p)| *p).collect();
                pins.dedup();
                let named = |i: usize| pins.get(i).map_or(key, |p| p).to_string();
                return Err(PinError::Twice { first: named(i), second: named(j) });
            }
        }
        Ok(())
    }
}

impl<T> PerLayer<T> {
    fn pin(&mut self, range: Option<(u32, u32)>, values: Vec<T>) {
        match range {
            Some((first, last)) => self.ranges.push((first, last, values)),
            None => self.everywhere = Allowed(Some(values)),
        }
    }
}

impl fmt::Display for Pins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |values: Vec<String>| values.join("+");
        let counts = |a: &Allowed<u64>| a.values().map(|v| join(v.iter().map(u64::to_string).collect()));
        let zeros = |v: &[Zero]| join(v.iter().map(|z| z.0.to_string()).collect());
        let recomputes = |v: &[Recompute]| join(v.iter().map(|&r| r.name().to_string()).collect());
        let mut parts = Vec::new();
        let degrees = [("dp", &self.dp), ("tp", &self.tp), ("pp", &self.pp), ("cp", &self.cp), ("ep", &self.ep), ("micro", &self.micro_batch)];
        for (key, values) in degrees.map(|(key, allowed)| (key, counts(allowed))) {
            parts.extend(values.map(|v| format!("{key}={v}")));
        }
        parts.extend(self.schedule.values().map(|v| format!("schedule={}", join(v.iter().map(|s| s.name().to_string()).collect()))));
        parts.extend(counts(&self.virtual_stages).map(|v| format!("virtual={v}")));
        parts.extend(
            self.boundary.values().map(|v| format!("sp={}", join(v.iter().map(|&on| if on { "on".into() } else { "off".to_string() }).collect()))),
        );
        parts.extend(self.zero.everywhere.values().map(|v| format!("zero={}", zeros(v))));
        parts.extend(self.zero.ranges.iter().map(|(a, b, v)| format!("zero@{a}-{b}={}", zeros(v))));
        let offloads = |v: &[Away]| join(v.iter().map(|a| a.name()).collect());
        parts.extend(self.offload.everywhere.values().map(|v| format!("offload={}", offloads(v))));
        parts.extend(self.offload.ranges.iter().map(|(a, b, v)| format!("offload@{a}-{b}={}", offloads(v))));
        parts.extend(self.recompute.everywhere.values().map(|v| format!("recompute={}", recomputes(v))));
        parts.extend(self.recompute.ranges.iter().map(|(a, b, v)| format!("recompute@{a}-{b}={}", recomputes(v))));
        parts.extend(self.keys.values().map(|v| format!("keys={}", join(v.iter().map(|k| k.name().to_string()).collect()))));
        parts.extend(self.wire.map(|w| format!("wire={}", w.name())));
        parts.extend(self.sync.values().map(|v| format!("sync={}", join(v.iter().map(|s| s.name()).collect()))));
        parts.extend(self.nest.values().map(|v| format!("map={}", join(v.iter().map(Nest::to_string).collect()))));
        f.write_str(&parts.join(","))
    }
}

type Parsed<T> = Result<T, &'static str>;

/// `value+value+…`.
fn list<T>(pin: &str, values: &str, parse: impl Fn(&str) -> Option<Parsed<T>>) -> Result<Vec<T>, PinError> {
    let one = |value: &str| match parse(value) {
        Some(Ok(parsed)) => Ok(parsed),
        Some(Err(expected)) => Err(PinError::Value { pin: pin.into(), value: value.into(), expected }),
        None => Err(PinError::NotYet(pin.into())),
    };
    values.split('+').map(|value| one(value.trim())).collect()
}

fn count(value: &str) -> Option<Parsed<u64>> {
    Some(value.parse().ok().filter(|&n: &u64| n > 0 && n <= 1 << 40).ok_or("a positive whole number"))
}

fn zero(value: &str) -> Option<Parsed<Zero>> {
    Some(value.parse().ok().filter(|&z: &u8| z <= 3).map(Zero).ok_or("a ZeRO stage, 0 to 3"))
}

fn schedule(value: &str) -> Option<Parsed<Schedule>> {
    match Schedule::from_name(value) {
        Some(schedule) => Some(Ok(schedule)),
        None => Some(Err("a schedule: gpipe, 1f1b, interleaved, zb-h1, zb-v; or pipedream, alone")),
    }
}

fn recompute(value: &str) -> Option<Parsed<Recompute>> {
    Some(Recompute::from_name(value).ok_or("`none`, `selective` or `full`"))
}

/// Values that are planned for are known, and not supported yet.
fn offload(value: &str) -> Option<Parsed<Away>> {
    let known = "`none`; `optimizer`, `gradients` or `parameters`, `activations`, or both joined by `/`; each also with `:nvme`";
    Some(Away::from_name(value).ok_or(known))
}

fn keys(value: &str) -> Option<Parsed<Keys>> {
    Some(Keys::from_name(value).ok_or("`gather` or `ring`"))
}

fn wire(value: &str) -> Option<Parsed<Wire>> {
    Some(Wire::from_name(value).ok_or("`full`, `bf16`, or `topk:F` with a share F of the elements such as 0.01 (at most 1, at most six digits)"))
}

fn sync(value: &str) -> Option<Parsed<Asked>> {
    let asked = if value == "hierarchical" { Some(Asked::ByNodes) } else { Sync::from_name(value).map(Asked::This) };
    Some(asked.ok_or("`flat`, `hierarchical` (by nodes), `hierarchical:2` (in two parts), `tree` or `server`"))
}

fn nest(value: &str) -> Option<Parsed<Nest>> {
    Some(Nest::from_name(value).ok_or("an order of `dp`, `ep`, `cp` and `tp`, the outermost first, such as `tp.dp`"))
}

fn on_off(value: &str) -> Option<Parsed<bool>> {
    match value {
        "on" | "1" => Some(Ok(true)),
        "off" | "0" => Some(Ok(false)),
        _ => Some(Err("`on` or `off`")),
    }
}

/// `first-last` or one layer.
fn parse_range(pin: &str, range: &str) -> Result<(u32, u32), PinError> {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if first <= last => Ok((first, last)),
        _ => Err(PinError::Value { pin: pin.into(), value: range.into(), expected: "a range of layers, like 0-11" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_print_as_they_are_read() {
        for text in [
            "",
            "dp=2,tp=1+2,pp=4,cp=1+2,ep=2,micro=1",
            "cp=2+4,keys=gather+ring",
            "schedule=gpipe+1f1b+zb-v,virtual=1+2,sp=off",
            "schedule=pipedream",
            "zero=0+1,zero@0-11=3,offload=none+optimizer:nvme/activations,offload@2-3=optimizer+activations:nvme,recompute=none,recompute@4-4=selective+full",
            "micro=2,wire=bf16",
            "zero=0+1,wire=topk:0.01",
            "sync=flat+hierarchical+hierarchical:2+tree+server,map=dp.ep.cp.tp+ep.cp.tp.dp",
        ] {
            assert_eq!(Pins::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Pins::parse(" tp=2 , etp=1, virtual=1").unwrap().to_string(), "tp=2,virtual=1");
    }

    #[test]
    fn a_range_rules_its_layers_alone() {
        let pins = Pins::parse("zero=0,zero@2-3=1+3,zero@3-5=3").unwrap();
        let allowed = |layer| (0..4).filter(|&z| pins.zero.allows(layer, &Zero(z))).collect::<Vec<_>>();
        assert_eq!((1..7).map(allowed).collect::<Vec<_>>(), [vec![0], vec![1, 3], vec![3], vec![3], vec![3], vec![0]]);
    }

    #[test]
    fn bad_pins_say_what_would_be_right() {
        for (text, says) in [
            ("tp", "expected KEY=VALUE"),
            ("tpp=2", "did you mean `tp`"),
            ("tp=0", "`0` is not a positive whole number"),
            ("tp=two", "`two` is not a positive whole number"),
            ("zero=4", "ZeRO stage, 0 to 3"),
            ("zero@5-2=1", "`5-2` is not a range of layers"),
            ("tp@0-3=2", "only `zero`, `offload` and `recompute`"),
            ("tp=2,tp=4", "pins `tp=2` and `tp=4` contradict"),
            ("zero@0-3=1,zero@2-5=3", "pins `zero@0-3=1` and `zero@2-5=3` contradict"),
            ("cp=0", "`0` is not a positive whole number"),
            ("offload=activations/optimizer", "`activations`, or both joined by `/`"),
            ("offload=everything", "`none`; `optimizer`, `gradients`"),
            ("schedule=pipedream+1f1b", "differ in what is computed"),
            ("schedule=fast", "gpipe, 1f1b, interleaved, zb-h1, zb-v"),
            ("recompute=some", "`none`, `selective` or `full`"),
            ("sp=maybe", "`on` or `off`"),
            ("wire=fp8", "`full`, `bf16`, or `topk:F`"),
            ("wire=topk:0", "such as 0.01"),
            ("wire=full+bf16", "differ in what is computed"),
            ("sync=star", "`hierarchical` (by nodes)"),
            ("sync=hierarchical:1", "`hierarchical:2` (in two parts)"),
            ("map=tp.pp", "an order of `dp`, `ep`, `cp` and `tp`"),
        ] {
            let error = Pins::parse(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
        let error = Pins::parse("zero@0-12=3").unwrap().check_layers(12).unwrap_err().to_string();
        assert!(error.contains("layers 0 to 11"), "{error}");
        let error = Pins::parse("zero@2-3=2+3,wire=topk:0.1").unwrap().check_layers(12).unwrap_err().to_string();
        assert!(error.contains("ZeRO 0 or 1") && error.contains("layer 2"), "{error}");
        assert!(Pins::parse("zero=1+3,wire=topk:0.1").unwrap().check_layers(12).is_ok());
    }
}
