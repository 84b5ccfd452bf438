//! Order between streams, derived from what instructions touch.
//!
//! Given segments without events and a schedule, the pass finds every pair of instructions on different streams that touch a common byte, one of them
//! writing, and of which the first must therefore be over before the second begins. It plays the schedule call by call with a vector clock per stream: what each
//! stream is known to have seen of the others. Where an instruction needs more than its stream knows, a `record` goes behind the earlier instruction and a
//! `wait` before the later one; what follows from stream order and from earlier waits needs none.
//!
//! Segments run many times, so a wait added for one call stands in all: it can only say more than a call needs. For the same reason a few micro-batches show
//! everything: which slots meet depends on differences of micro-batches alone, and those repeat.
//!
//! Only bytes that two streams touch matter. They are cut into *cells* that every buffer covers whole or not at all; each cell and slot remembers its last
//! write and the reads since. A communicator that two streams use is a cell too, which each of its operations writes: all members then meet them in one order.

use dplan_ir::access::Access;
use dplan_ir::entity::{BufferId, EventId, SegmentId, Table};
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::program::{Call, Instr, Issue, StageProgram, Stream};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

const STREAMS: usize = Stream::ALL.len();

/// An instruction of the program: segment and position.
type At = (SegmentId, usize);

/// How much of each stream a stream knows to be over, in relevant instructions.
type Clock = [u32; STREAMS];

/// Adds the events that order the streams of a stage. `sample` is a schedule that shows every way in which calls meet.
pub(super) fn order_streams(program: &mut StageProgram, mesh: &Mesh, sample: &[Call]) {
    let cells = Cells::new(program, mesh);
    let relevant: Table<SegmentId, Vec<Touch>> = program.segments.map(|_, s| cells.touches(&s.body));
    let mut play = Play::new(&cells);
    for call in sample {
        for touch in &relevant[call.segment] {
            play.run((call.segment, touch.at), touch, call.micro_batch);
        }
    }
    insert(program, &play.waits);
}

/// Bytes that more than one stream touches, cut so that a buffer covers a cell whole or not at all.
struct Cells {
    /// For each buffer, the cells it covers.
    of: Table<BufferId, Range<u32>>,
    slots: Table<BufferId, u64>,
    /// Cells of the communicators that several streams use.
    communicators: BTreeMap<Communicator, u32>,
    count: usize,
}

/// The axes and stages of a collective.
type Communicator = (AxisSet, Vec<u32>);

fn communicator(instr: &Instr) -> Option<Communicator> {
    match instr {
        Instr::Collective { axes, stages, .. } => Some((*axes, stages.clone())),
        _ => None,
    }
}

impl Cells {
    fn new(program: &StageProgram, mesh: &Mesh) -> Cells {
        let mut streams: Table<BufferId, u16> = Table::filled(program.buffers.len(), 0);
        for issue in program.segments.values().flat_map(|s| &s.body) {
            issue.instr.accesses(|b, _| streams[b] |= 1u16 << issue.stream as u16);
        }
        // Slots lie `slot_stride` apart for all buffers of a region, so slot 0 stands for each; a piece stands for all pieces.
        let range = |b: BufferId| {
            let buffer = &program.buffers[b];
            buffer.offset..buffer.offset + buffer.bytes * mesh.size(buffer.piece_axes)
        };
        let mut ends: Vec<(u64, bool, BufferId)> = Vec::with_capacity(2 * program.buffers.len());
        for b in program.buffers.ids().filter(|&b| streams[b] != 0 && !range(b).is_empty()) {
            ends.extend([(range(b).start, true, b), (range(b).end, false, b)]);
        }
        ends.sort_unstable();
        // Sweep over the bytes: how many open buffers each stream touches.
        let mut open = [0u32; STREAMS];
        let mut starts: Vec<u64> = Vec::new();
        let mut bounds: Vec<u64> = Vec::new();
        let mut at = 0;
        while at < ends.len() {
            let offset = ends[at].0;
            while at < ends.len() && ends[at].0 == offset {
                let (_, opens, b) = ends[at];
                for (s, n) in open.iter_mut().enumerate().filter(|(s, _)| streams[b] & (1 << s) != 0) {
                    debug_assert!(opens || *n > 0, "stream {s}");
                    *n = if opens { *n + 1 } else { *n - 1 };
                }
                at += 1;
            }
            bounds.push(offset);
            if open.iter().filter(|&&n| n > 0).count() > 1 {
                starts.push(offset);
            }
        }
        let cell = |offset: u64| starts.partition_point(|&s| s < offset) as u32;
        let of = program.buffers.map(|b, _| if streams[b] == 0 { 0..0 } else { cell(range(b).start)..cell(range(b).end) });
        let mut users: BTreeMap<Communicator, u16> = BTreeMap::new();
        for issue in program.segments.values().flat_map(|s| &s.body) {
            if let Some(communicator) = communicator(&issue.instr) {
                *users.entry(communicator).or_default() |= 1u16 << issue.stream as u16;
            }
        }
        let shared = users.into_iter().filter(|(_, streams)| streams.count_ones() > 1).map(|(c, _)| c);
        let communicators: BTreeMap<Communicator, u32> = shared.zip(starts.len() as u32..).collect();
        let count = starts.len() + communicators.len();
        Cells { of, slots: program.buffers.map(|_, b| b.slots.max(1)), communicators, count }
    }

    /// The instructions of a body that touch cells.
    fn touches(&self, body: &[Issue]) -> Vec<Touch> {
        let mut touches = Vec::new();
        for (at, issue) in body.iter().enumerate() {
            let mut cells = Vec::new();
            issue.instr.accesses(|b, access| {
                if !self.of[b].is_empty() {
                    cells.push((self.of[b].clone(), self.slots[b], access));
                }
            });
            if let Some(&cell) = communicator(&issue.instr).and_then(|c| self.communicators.get(&c)) {
                cells.push((cell..cell + 1, 1, Access::Write));
            }
            if !cells.is_empty() {
                touches.push(Touch { at, stream: issue.stream as usize, cells });
            }
        }
        touches
    }
}

/// An instruction and the cells it touches.
struct Touch {
    at: usize,
    stream: usize,
    /// Cells, how many slots their buffer has, and what is done to them.
    cells: Vec<(Range<u32>, u64, Access)>,
}

/// The last accesses of one slot of a cell: for each stream, when and by what.
#[derive(Clone, Copy, Default)]
struct Last {
    write: Option<(usize, u32, At)>,
    reads: [Option<(u32, At)>; STREAMS],
}

struct Play {
    cells: Vec<BTreeMap<u64, Last>>,
    clocks: [Clock; STREAMS],
    /// What was known when each instruction was last over.
    over: BTreeMap<At, Clock>,
    /// For each instruction, those it waits for.
    waits: BTreeMap<At, BTreeSet<At>>,
}

impl Play {
    fn new(cells: &Cells) -> Play {
        Play { cells: vec![BTreeMap::new(); cells.count], clocks: [[0; STREAMS]; STREAMS], over: BTreeMap::new(), waits: BTreeMap::new() }
    }

    fn run(&mut self, at: At, touch: &Touch, micro_batch: u64) {
        let mine = touch.stream;
        for before in self.waits.get(&at).into_iter().flatten() {
            if let Some(clock) = self.over.get(before) {
                join(&mut self.clocks[mine], clock);
            }
        }
        // A stream runs in order, so only the last needed instruction of each matters.
        let mut needs: [Option<(u32, At)>; STREAMS] = [None; STREAMS];
        let mut need = |stream: usize, when: u32, what: At| needs[stream] = needs[stream].max(Some((when, what)));
        for (range, slots, access) in &touch.cells {
            for cell in range.clone() {
                let Some(last) = self.cells[cell as usize].get(&(micro_batch % slots)) else { continue };
                if let Some((stream, when, what)) = last.write {
                    need(stream, when, what);
                }
                if *access == Access::Write {
                    last.reads.iter().enumerate().for_each(|(stream, read)| {
                        if let Some((when, what)) = *read {
                            need(stream, when, what);
                        }
                    });
                }
            }
        }
        for (stream, need) in needs.into_iter().enumerate().filter(|&(stream, _)| stream != mine) {
            if let Some((when, what)) = need
                && self.clocks[mine][stream] < when
            {
                self.waits.entry(at).or_default().insert(what);
                join(&mut self.clocks[mine], &self.over[&what]);
            }
        }
        self.clocks[mine][mine] += 1;
        let now = self.clocks[mine][mine];
        self.over.insert(at, self.clocks[mine]);
        for (range, slots, access) in &touch.cells {
            for cell in range.clone() {
                let last = self.cells[cell as usize].entry(micro_batch % slots).or_default();
                match access {
                    Access::Write => *last = Last { write: Some((mine, now, at)), ..Last::default() },
                    Access::Read => last.reads[mine] = Some((now, at)),
                }
            }
        }
    }
}

fn join(clock: &mut Clock, with: &Clock) {
    clock.iter_mut().zip(with).for_each(|(a, b)| *a = (*a).max(*b));
}

/// One event for each instruction that is waited for.
fn insert(program: &mut StageProgram, waits: &BTreeMap<At, BTreeSet<At>>) {
    let sources: BTreeSet<At> = waits.values().flatten().copied().collect();
    let events: BTreeMap<At, EventId> = sources.into_iter().enumerate().map(|(i, at)| (at, EventId(i as u32))).collect();
    program.events = events.len() as u32;
    for (id, segment) in program.segments.iter_mut() {
        let body = std::mem::take(&mut segment.body);
        for (at, issue) in body.into_iter().enumerate() {
            let stream = issue.stream;
            for before in waits.get(&(id, at)).into_iter().flatten() {
                segment.body.push(Issue { stream, instr: Instr::Wait(events[before]) });
            }
            segment.body.push(issue);
            if let Some(&event) = events.get(&(id, at)) {
                segment.body.push(Issue { stream, instr: Instr::Record(event) });
            }
        }
    }
}
