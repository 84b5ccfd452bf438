//! What a run says at its end.

use serde_json::json;

use crate::cli::output::{self, gib, seconds};
use crate::runtime::RankMemory;

pub struct Summary {
    pub steps: u64,
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// Of the first step and the last, where this process knows them.
    pub losses: Option<(f64, f64)>,
    /// Of each rank.
    pub memory: Vec<RankMemory>,
    /// What ranks are.
    pub name: &'static str,
}

impl Summary {
    pub fn print(&self, as_json: bool) {
        let Summary { steps, memory, name, .. } = self;
        if as_json {
            let ranks: Vec<_> = memory
                .iter()
                .map(|m| json!({ "stage": m.stage, "arena_bytes": m.arena_bytes, "host_bytes": m.host_bytes, "file_bytes": m.file_bytes }))
                .collect();
            let summary = json!({
                "steps": steps, "seconds": self.seconds, "tokens_per_second": self.tokens_per_second, "first_loss": self.losses.map(|l| l.0),
                "last_loss": self.losses.map(|l| l.1), "ranks": memory.len(), "memory": ranks,
            });
            output::say!("{}", json!({ "summary": summary }));
        } else if let Some((first, last)) = self.losses {
            let most = |of: fn(&RankMemory) -> u64| memory.iter().map(of).max().unwrap_or(0);
            let elsewhere = [("the memory of the host", most(|m| m.host_bytes)), ("a file", most(|m| m.file_bytes))];
            let elsewhere: Vec<String> =
                elsewhere.into_iter().filter(|(_, bytes)| *bytes > 0).map(|(place, bytes)| format!(", {} in {place}", gib(bytes))).collect();
            output::say!(
                "{steps} steps on {} {name} in {}: loss {first:.4} -> {last:.4}, {:.0} tokens/s, arena {} a rank at most{}",
                memory.len(),
                seconds(self.seconds),
                self.tokens_per_second,
                gib(most(|m| m.arena_bytes)),
                elsewhere.concat()
            );
        }
    }
}
