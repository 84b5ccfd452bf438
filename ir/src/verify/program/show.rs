//! Contents in words.

use super::content::{Fact, Version};
use super::dataflow::Walk;
use super::sums::{Pending, Spans, Term};
use crate::program::{Content, Updates};

impl Walk<'_> {
    pub fn show(&self, fact: Fact) -> String {
        let graph = self.types.graph;
        match fact {
            Fact::Garbage => "nothing known".into(),
            Fact::Zero => "zeros".into(),
            Fact::Value { value, micro_batch, base, .. } => {
                let wanted = self.types.stage.buffers.iter().find(|(id, _)| self.claim(*id) == fact).map(|(_, b)| &b.content);
                let sharding = match wanted {
                    Some(Content::Value { sharding, .. }) => format!(" {:?}", sharding.dims),
                    _ => String::new(),
                };
                format!("`{}`{sharding} of micro-batch {micro_batch} (beginning at byte {base})", graph.values[value].name)
            }
            Fact::State { bucket, role, version, flat } => {
                let version = match (self.updates, version) {
                    (Updates::Step, Version(0)) => "before the update".into(),
                    (Updates::Step, Version(_)) => "after the update".into(),
                    (Updates::MicroBatch, Version(count)) => format!("after {count} updates"),
                };
                format!("{} of {bucket} {version} (beginning at byte {})", role.name(), flat.base)
            }
            Fact::Grad { bucket, sum, flat } => {
                format!("gradients of {bucket} (beginning at byte {}): {}", flat.base, self.show_sum(sum))
            }
            Fact::Scalar { scalar, sum, .. } => format!("{}: {}", scalar.name(), self.show_sum(sum)),
            Fact::Wire { bucket, sum, from, kept, base } => {
                let what = kept.map_or_else(|| "shares".into(), |kept| format!("{kept} pairs each"));
                let whose = match (from.is_empty(), kept) {
                    (true, None) => "this rank's".into(),
                    (true, Some(kept)) => format!("{kept} pairs of this rank's"),
                    (false, _) => format!("{what} from {} of the", self.types.axes(from)),
                };
                format!("on the wire {whose} gradients of {bucket} (beginning at byte {base}): {}", self.show_sum(sum))
            }
            Fact::Frame { micro_batch, base, .. } => format!("a frame of micro-batch {micro_batch} (beginning at byte {base})"),
            Fact::Trust { bucket, pending, version, .. } => {
                let pending = self.show_pending(Pending { axes: pending, stages: false });
                match self.updates {
                    Updates::Step => format!("trust sums of {bucket}, {pending}"),
                    Updates::MicroBatch => format!("trust sums of {bucket} after {} updates, {pending}", version.0),
                }
            }
        }
    }

    pub fn show_sum(&self, sum: u32) -> String {
        let sum = self.sums.get(sum);
        let term = |(term, spans): &(Term, Spans)| match term {
            Term::All => format!("all contributions of micro-batch {}", spans.show()),
            Term::Value(v) => format!("`{}` of micro-batch {}", self.types.graph.values[*v].name, spans.show()),
            Term::Bucket(b) => b.to_string(),
        };
        let terms = sum.terms.iter().map(term).collect::<Vec<_>>().join(" + ");
        format!("{}, {}", if terms.is_empty() { "nothing".into() } else { terms }, self.show_pending(sum.pending))
    }

    pub fn show_pending(&self, pending: Pending) -> String {
        match (pending.axes.is_empty(), pending.stages) {
            (true, false) => "fully reduced".into(),
            (false, false) => format!("still partial over {}", self.types.axes(pending.axes)),
            (true, true) => "still partial over stages".into(),
            (false, true) => format!("still partial over {} and stages", self.types.axes(pending.axes)),
        }
    }
}
