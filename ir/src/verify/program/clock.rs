//! Vector clocks over a rank's streams.
//!
//! The n-th instruction of stream t is the point (t, n). A clock is, for each stream, how many of its instructions are known to be complete. An instruction sees
//! its stream's clock; a record stores it; a wait joins what the latest record stored. A point is *covered* by a clock when it is known complete,
//! that is, when it happens before everything that follows under that clock. Point 0 of a stream is the step's beginning, which every clock covers.

use crate::program::Stream;

const STREAMS: usize = Stream::ALL.len();

/// A point on a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Point {
    pub stream: u8,
    pub time: u32,
}

/// How many instructions of each stream are complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Clock(pub [u32; STREAMS]);

impl Clock {
    pub fn covers(&self, point: Point) -> bool {
        point.time <= self.0[point.stream as usize]
    }
    fn join(&mut self, other: &Clock) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine = (*mine).max(theirs);
        }
    }
}

/// The clocks of all streams and events of a rank.
#[derive(Clone, Debug)]
pub(super) struct Clocks {
    pub streams: [Clock; STREAMS],
    pub events: Vec<Option<Clock>>,
    issued: [u32; STREAMS],
}

impl Clocks {
    pub fn new(events: u32) -> Clocks {
        Clocks { streams: [Clock::default(); STREAMS], events: vec![None; events as usize], issued: [0; STREAMS] }
    }
    /// Issues the next instruction of a stream: its point.
    pub fn issue(&mut self, stream: Stream) -> Point {
        let s = stream as usize;
        self.issued[s] += 1;
        self.streams[s].0[s] = self.issued[s];
        Point { stream: s as u8, time: self.issued[s] }
    }
    pub fn record(&mut self, stream: Stream, event: usize) {
        self.events[event] = Some(self.streams[stream as usize]);
    }
    pub fn wait(&mut self, stream: Stream, event: usize) {
        if let Some(clock) = self.events[event] {
            self.streams[stream as usize].join(&clock);
        }
    }

    /// Whether every point that `before` knew complete is, in its later place, known complete here, for all streams and events.
    /// `points` are the same accesses then and now. Later walks that were ordered from `before` are then ordered from here too (order is only ever
    /// added, never taken).
    pub fn order_as_much_as(&self, before: &Clocks, points: &[(Point, Point)]) -> bool {
        // For each stream: accesses by their time then, with the latest time now of all up to there.
        let mut by_stream: Vec<Vec<(u32, u32)>> = vec![Vec::new(); STREAMS];
        for (then, now) in points {
            if then.time > 0 || now.time > 0 {
                by_stream[then.stream as usize].push((then.time, now.time));
            }
        }
        for times in &mut by_stream {
            times.sort_unstable();
            let mut latest = 0;
            for (_, now) in times.iter_mut() {
                latest = latest.max(*now);
                *now = latest;
            }
        }
        let covers = |then: &Clock, now: &Clock| {
            (0..STREAMS).all(|s| {
                let known = by_stream[s].partition_point(|&(time, _)| time <= then.0[s]);
                known == 0 || by_stream[s][known - 1].1 <= now.0[s]
            })
        };
        let events = before.events.iter().zip(&self.events).all(|(then, now)| match (then, now) {
            (Some(then), Some(now)) => covers(then, now),
            (None, _) => true,
            (Some(_), None) => false,
        });
        events && before.streams.iter().zip(&self.streams).all(|(then, now)| covers(then, now))
    }
}
