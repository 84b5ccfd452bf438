//! What a stand-in makes of work that is captured: a graph, or a complaint that CUDA would have.

use super::Op;

/// Work that is being recorded, stream by stream, from one stream on.
#[derive(Debug)]
pub struct Capture {
    pub origin: usize,
    pub work: Vec<(usize, Op)>,
}

impl Capture {
    /// Takes work as CUDA does: of the stream where it began, and of those that wait for events recorded since.
    pub fn take(&mut self, stream: usize, op: Op) {
        let recorded = |event: usize| self.work.iter().any(|(_, op)| matches!(op, Op::Record { event: e, .. } if *e == event));
        if let Op::Wait { event, .. } = op {
            assert!(recorded(event), "stream {stream} waits for event {event}, which was recorded before the capture");
        } else {
            let joined = stream == self.origin || self.work.iter().any(|(s, op)| *s == stream && matches!(op, Op::Wait { .. }));
            assert!(joined, "stream {stream} takes no part in the capture");
        }
        self.work.push((stream, op));
    }
    /// The work, if the first stream waits for the last of every other.
    pub fn end(self) -> Vec<(usize, Op)> {
        for (at, (stream, op)) in self.work.iter().enumerate() {
            let last = *stream != self.origin && self.work[at + 1..].iter().all(|(s, _)| s != stream);
            let waited =
                |event: usize| self.work[at..].iter().any(|(s, op)| *s == self.origin && matches!(op, Op::Wait { event: e, .. } if *e == event));
            let joined = matches!(op, Op::Record { event, .. } if waited(*event));
            assert!(!last || joined, "stream {stream} was not waited for by the end of the capture");
        }
        self.work
    }
}
