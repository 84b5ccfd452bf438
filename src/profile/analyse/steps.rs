//! Training steps, and the window that a rank's times are taken over.

use crate::profile::{Kind, Ns, Rank, classify};

/// The steps of one rank, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Steps(Vec<(Ns, Ns)>);

impl Steps {
    pub fn of(rank: &Rank) -> Steps {
        let mut steps: Vec<(Ns, Ns)> = rank.ranges().filter(|(_, name)| classify::is_step(name)).map(|(e, _)| (e.start, e.end())).collect();
        steps.sort_unstable();
        // The same step may be marked on more than one thread.
        steps.dedup_by(|next, kept| next.0 < kept.1);
        Steps(steps)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Mean duration.
    pub fn mean(&self) -> Option<Ns> {
        let total: i128 = self.0.iter().map(|(a, b)| i128::from(*b) - i128::from(*a)).sum();
        Some((total / i128::try_from(self.0.len()).ok().filter(|n| *n > 0)?) as Ns)
    }

    pub fn durations(&self) -> impl Iterator<Item = Ns> {
        self.0.iter().map(|(start, end)| end.saturating_sub(*start))
    }

    /// The step in which something happened.
    pub fn holding(&self, at: Ns) -> Option<usize> {
        let after = self.0.partition_point(|(start, _)| *start <= at);
        let i = after.checked_sub(1)?;
        (at < self.0[i].1).then_some(i)
    }

    /// From the first step to the last, and on to the end of the device work they launched. Without steps, all that computes or communicates.
    pub fn window(&self, rank: &Rank) -> (Ns, Ns) {
        let device = rank.has_device();
        let works = |kind: Kind| match kind {
            Kind::Kernel(_) | Kind::Copy(_) | Kind::Comm => true,
            Kind::Op => !device,
            Kind::CommCall | Kind::Call | Kind::Range => false,
        };
        let work = || rank.events.iter().filter(|e| works(e.kind));
        match (self.0.first(), self.0.last()) {
            (Some(&(start, _)), Some(&(_, end))) => {
                let launched = work().filter(|e| device && e.start >= start && e.launched.unwrap_or(e.start) < end);
                (start, launched.map(crate::profile::Event::end).max().unwrap_or(end).max(end))
            }
            _ => {
                let start = work().map(|e| e.start).min().unwrap_or(0);
                (start, work().map(crate::profile::Event::end).max().unwrap_or(start))
            }
        }
    }
}
