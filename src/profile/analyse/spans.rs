//! Sets of times: sorted, disjoint, non-empty half-open intervals. All of overlap and exposure is algebra on them.

use crate::profile::Ns;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Spans(Vec<(Ns, Ns)>);

impl Spans {
    /// The union of `intervals`, in any order.
    pub fn union_of(intervals: impl IntoIterator<Item = (Ns, Ns)>) -> Spans {
        let mut all: Vec<(Ns, Ns)> = intervals.into_iter().filter(|(start, end)| start < end).collect();
        all.sort_unstable();
        let mut union: Vec<(Ns, Ns)> = Vec::new();
        for (start, end) in all {
            match union.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => union.push((start, end)),
            }
        }
        Spans(union)
    }

    pub fn intervals(&self) -> &[(Ns, Ns)] {
        &self.0
    }

    /// Total time.
    pub fn length(&self) -> Ns {
        self.0.iter().fold(0, |sum: Ns, (start, end)| sum.saturating_add(end.saturating_sub(*start)))
    }

    pub fn or(&self, other: &Spans) -> Spans {
        Spans::union_of(self.0.iter().chain(&other.0).copied())
    }

    pub fn and(&self, other: &Spans) -> Spans {
        let (mut i, mut j) = (0, 0);
        let mut both = Vec::new();
        while let (Some(a), Some(b)) = (self.0.get(i), other.0.get(j)) {
            let (start, end) = (a.0.max(b.0), a.1.min(b.1));
            if start < end {
                both.push((start, end));
            }
            if a.1 <= b.1 { i += 1 } else { j += 1 }
        }
        Spans(both)
    }

    pub fn minus(&self, other: &Spans) -> Spans {
        let mut left = Vec::new();
        let mut j = 0;
        for &(mut start, end) in &self.0 {
            // Both are sorted, so what ends before this interval cannot cut a later one.
            while other.0.get(j).is_some_and(|b| b.1 <= start) {
                j += 1;
            }
            let mut k = j;
            while let Some(&(cut, resume)) = other.0.get(k).filter(|b| b.0 < end) {
                if start < cut {
                    left.push((start, cut));
                }
                start = start.max(resume);
                k += 1;
            }
            if start < end {
                left.push((start, end));
            }
        }
        Spans(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets as bits, which need no algebra.
    fn bits(spans: &Spans) -> u64 {
        spans.0.iter().flat_map(|&(a, b)| a..b).fold(0, |bits, t| bits | 1 << t)
    }

    #[test]
    fn algebra_of_spans_is_algebra_of_sets() {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % n
        };
        for _ in 0..3000 {
            let mut set = || {
                let count = random(7);
                let intervals: Vec<(Ns, Ns)> = (0..count).map(|_| (random(60) as Ns, random(60) as Ns)).collect();
                let expected = intervals.iter().filter(|(a, b)| a < b).flat_map(|&(a, b)| a..b).fold(0u64, |bits, t| bits | 1 << t);
                let spans = Spans::union_of(intervals);
                assert_eq!(bits(&spans), expected);
                spans
            };
            let (a, b) = (set(), set());
            for (result, expected) in [(a.or(&b), bits(&a) | bits(&b)), (a.and(&b), bits(&a) & bits(&b)), (a.minus(&b), bits(&a) & !bits(&b))] {
                assert_eq!(bits(&result), expected, "{a:?} {b:?}");
                assert_eq!(result.length(), Ns::from(expected.count_ones()));
                assert!(result.0.iter().all(|(s, e)| s < e) && result.0.windows(2).all(|w| w[0].1 <= w[1].0), "{result:?}");
            }
        }
    }
}
