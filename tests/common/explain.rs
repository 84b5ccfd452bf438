//! Which instruction of a program each call of a rank's step is for.

use dplan::runtime::cuda::load::{Action, Code, Primitive, Reduction};
use dplan::runtime::scratch::Way;
use dplan_ir::access::Access;
use dplan_ir::program::{Content, Instr, Issue, Pattern, Program, Space, Stream, Write};
use dplan_ir::sharding::Monoid;
use dplan_kernels::cuda::SCALAR_BYTES;

use super::recording::Call;

/// Streams as ranks make them.
const STREAMS: usize = Stream::ALL.len();

/// Goes through the calls of one step beside the instructions of its schedule: each call belongs to exactly one instruction, in order, on the instruction's stream, with the sizes
/// that the instruction has; before and after them stand the calls that begin and end a step. `code` says how many kernels an instruction has, and which.
pub fn explain(program: &Program, code: &Code, log: &[Call]) -> Result<(), String> {
    let stage = &program.stages[code.stage];
    let mut calls = Calls(log.iter());
    let mut recorded = std::collections::BTreeSet::new();
    let mut handed = Handed { first: STREAMS + stage.events as usize, count: 0 };
    // The step's scalars, then every stream after them.
    let call = calls.next("the scalars")?;
    expect(matches!(call, Call::CopyIn { bytes: SCALAR_BYTES, stream: 0, .. }), call, "the scalars' copy")?;
    let call = calls.next("the first record")?;
    expect(*call == Call::Record { event: 0, stream: 0 }, call, "the record that begins the step")?;
    for stream in 1..STREAMS {
        let call = calls.next("a first wait")?;
        expect(*call == Call::Wait { event: 0, stream }, call, "a stream's first wait")?;
    }
    for issue in &stage.schedule {
        let segment = &stage.segments[issue.segment];
        let actions = &code.segments[issue.segment.0 as usize];
        for (place, (instr, (_, action))) in segment.body.iter().zip(actions).enumerate() {
            let on = instr.stream as usize;
            let bytes = |b: &dplan_ir::entity::BufferId| stage.buffers[*b].bytes;
            let entries: Vec<&str> = action.routines().flat_map(|r| &r.launches).map(|l| l.entry).collect();
            let what = format!("of {:?} in {}", instr.instr, segment.kind.name());
            if let Action::Within(to) = action {
                if *to > place {
                    within(&segment.body, actions, place, *to).map_err(|why| format!("{why} {what}"))?;
                } else {
                    sooner(&segment.body, actions, place, *to).map_err(|why| format!("{why} {what}"))?;
                }
                continue;
            }
            let joined: Vec<usize> = (place + 1..actions.len()).filter(|&at| actions[at].1 == Action::Within(place)).collect();
            if let (false, Action::Run { outs, .. }) = (joined.is_empty(), action) {
                let stored = |b: dplan_ir::entity::BufferId| {
                    let offset = stage.buffers[b].offset_at(0, &program.mesh, code.local_rank) - stage.range(Space::Device).start;
                    outs.iter().any(|p| p.offset == offset && p.bytes == stage.buffers[b].bytes)
                };
                others_find(&segment.body, &[&[place][..], &joined].concat(), stored).map_err(|why| format!("{why} {what}"))?;
            }
            match &instr.instr {
                Instr::Update { state, trust: Some(_), .. } => {
                    // A piece may be all padding: then the rank has nothing of any parameter.
                    let Content::Flat { bucket, pieces, .. } = stage.buffers[*state].content else { return Err(what) };
                    let elems = bytes(state) / stage.buffers[*state].dtype.size();
                    let parts = stage.buckets[bucket].parts(program.mesh.position(code.local_rank, pieces) * elems, elems);
                    if entries.is_empty() != parts.is_empty() {
                        return Err(format!("{} kernels for {} parameters {what}", entries.len(), parts.len()));
                    }
                    calls.launches(&entries, on, &what)?;
                }
                Instr::Run { .. }
                | Instr::AddInto { .. }
                | Instr::Join { .. }
                | Instr::Cast { .. }
                | Instr::Compress { .. }
                | Instr::SumShares { .. }
                | Instr::ClipScale { .. }
                | Instr::TrustSums { .. }
                | Instr::Update { .. } => {
                    if entries.is_empty() {
                        return Err(format!("no kernel {what}"));
                    }
                    calls.launches(&entries, on, &what)?;
                }
                Instr::SquareSum { once, .. } => {
                    let counts = program.mesh.position(code.local_rank, *once) == 0;
                    if counts == entries.is_empty() {
                        return Err(format!("{} kernels {what}", entries.len()));
                    }
                    calls.launches(&entries, on, &what)?;
                }
                Instr::Collective { pattern, axes, stages, monoid, src, dst, .. } => {
                    let Action::Collective(c) = action else { return Err(format!("{action:?} {what}")) };
                    let before = c.before.as_ref().map_or(0, |r| r.launches.len());
                    calls.launches(&entries[..before], on, &what)?;
                    let call = calls.next(&what)?;
                    let Call::Exchange { members, primitive, elems, stream } = call else { return Err(format!("{call:?} {what}")) };
                    let locals = program.mesh.group(code.local_rank, *axes);
                    let stages = if stages.is_empty() { vec![code.stage as u32] } else { stages.clone() };
                    let group: Vec<u64> = stages.iter().flat_map(|s| locals.iter().map(move |r| u64::from(*s) * program.mesh.ranks() + r)).collect();
                    // NCCL counts what each rank has of the smaller side.
                    let counted = match pattern {
                        Pattern::AllReduce | Pattern::AllGather | Pattern::Shift => bytes(src),
                        Pattern::ReduceScatter => bytes(dst),
                        Pattern::AllToAll => bytes(dst) / group.len() as u64,
                    };
                    let wanted = *primitive == self::primitive(*pattern, *monoid)?;
                    let right = wanted && *members == group && *stream == on && elems * stage.buffers[*src].dtype.size() == counted;
                    expect(right, call, &what)?;
                    calls.launches(&entries[before..], on, &what)?;
                    calls.mark(on, &what)?;
                }
                Instr::Input { dst } => {
                    let call = calls.next(&what)?;
                    expect(matches!(call, Call::CopyIn { bytes: n, stream, .. } if *n == bytes(dst) && *stream == on), call, &what)?;
                }
                Instr::Slice { dst, .. } => {
                    let call = calls.next(&what)?;
                    expect(matches!(call, Call::Rows { bytes: n, stream, .. } if *n == bytes(dst) && *stream == on), call, &what)?;
                }
                Instr::Copy { src, dst } => {
                    let pieces = match (stage.space(*src), stage.space(*dst)) {
                        (Space::Device, Space::Host) => {
                            let call = calls.next(&what)?;
                            expect(matches!(call, Call::CopyOut { bytes: n, stream, .. } if *n == bytes(dst) && *stream == on), call, &what)?;
                            continue;
                        }
                        (Space::Host, Space::Device) => {
                            let call = calls.next(&what)?;
                            expect(matches!(call, Call::CopyIn { bytes: n, stream, .. } if *n == bytes(dst) && *stream == on), call, &what)?;
                            continue;
                        }
                        (Space::Device, Space::File) => calls.pieces(Way::Out, bytes(dst), on, &mut handed, &what)?,
                        (Space::File, Space::Device) => calls.pieces(Way::In, bytes(dst), on, &mut handed, &what)?,
                        (from, to) => return Err(format!("{from:?} to {to:?} {what}")),
                    };
                    // In the file, as far into it as the buffer is.
                    let away = if stage.space(*src) == Space::File { src } else { dst };
                    let buffer = &stage.buffers[*away];
                    let offset = buffer.offset_at(issue.micro_batch, &program.mesh, code.local_rank) - stage.range(Space::File).start;
                    if pieces != offset {
                        return Err(format!("at {pieces} of the file, not at {offset} {what}"));
                    }
                }
                Instr::Zero { dst } => {
                    let call = calls.next(&what)?;
                    expect(matches!(call, Call::Zero { bytes: n, stream, .. } if *n == bytes(dst) && *stream == on), call, &what)?;
                }
                Instr::Send { to, src, .. } => {
                    let peer = u64::from(*to) * program.mesh.ranks() + code.local_rank;
                    let call = calls.next(&what)?;
                    expect(*call == Call::Send { to: peer, bytes: bytes(src), stream: on }, call, &what)?;
                    calls.mark(on, &what)?;
                }
                Instr::Recv { from, dst, .. } => {
                    let peer = u64::from(*from) * program.mesh.ranks() + code.local_rank;
                    let call = calls.next(&what)?;
                    expect(*call == Call::Receive { from: peer, bytes: bytes(dst), stream: on }, call, &what)?;
                    calls.mark(on, &what)?;
                }
                Instr::Record(event) => {
                    recorded.insert(event.0);
                    let call = calls.next(&what)?;
                    expect(*call == Call::Record { event: STREAMS + event.0 as usize, stream: on }, call, &what)?;
                }
                // What the step has not recorded yet, the step before has, and has ended.
                Instr::Wait(event) if !recorded.contains(&event.0) => {}
                Instr::Wait(event) => {
                    let call = calls.next(&what)?;
                    expect(*call == Call::Wait { event: STREAMS + event.0 as usize, stream: on }, call, &what)?;
                }
            }
        }
    }
    for stream in 1..STREAMS {
        let call = calls.next("a last record")?;
        expect(*call == Call::Record { event: stream, stream }, call, "a stream's last record")?;
        let call = calls.next("a last wait")?;
        expect(*call == Call::Wait { event: stream, stream: 0 }, call, "the last wait for a stream")?;
    }
    let mut rest: Vec<&Call> = calls.0.collect();
    let end = rest.pop();
    if end != Some(&Call::Synchronise) || rest.len() > 2 || !rest.iter().all(|c| matches!(c, Call::CopyOut { stream: 0, .. })) {
        return Err(format!("after the last instruction: {rest:?}, {end:?}"));
    }
    Ok(())
}

/// What an instruction does is done by a later one's kernel: nobody else reads its result before it is written again, and whoever does is that one, or on the way to it.
fn within(body: &[Issue], actions: &[(Stream, Action)], place: usize, later: usize) -> Result<(), String> {
    let Instr::Run { outs, write: Write::Set, .. } = &body[place].instr else { return Err("only a result that is set is never there".into()) };
    let mut readers = Vec::new();
    for (at, issue) in body.iter().enumerate().skip(place + 1) {
        let (mut reads, mut writes) = (false, false);
        issue.instr.accesses(|b, access| match access {
            Access::Read => reads |= outs.contains(&b),
            Access::Write => writes |= outs.contains(&b),
        });
        readers.extend(reads.then_some(at));
        if writes {
            break;
        }
    }
    let goes_on = |at: usize| at == later && matches!(actions[at].1, Action::Run { .. }) || actions[at].1 == Action::Within(later);
    match readers[..] {
        [at] if at <= later && goes_on(at) && body[at].stream == body[place].stream => Ok(()),
        _ => Err(format!("instructions {readers:?} read what instruction {later} is to do")),
    }
}

/// What an instruction does is done where an earlier one stands: nothing between them on their stream waits, writes what it reads, or touches what it writes, but for what is done
/// there, too.
fn sooner(body: &[Issue], actions: &[(Stream, Action)], place: usize, first: usize) -> Result<(), String> {
    if body[first].stream != body[place].stream || !matches!(actions[first].1, Action::Run { .. }) {
        return Err(format!("instruction {first} does it on another stream, or nothing"));
    }
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    body[place].instr.accesses(|b, access| if access == Access::Read { reads.push(b) } else { writes.push(b) });
    let together = |at: usize| at == first || actions[at].1 == Action::Within(first);
    for at in (first + 1..place).filter(|&at| body[at].stream == body[place].stream && !together(at)) {
        let mut free = !matches!(body[at].instr, Instr::Wait(_));
        body[at].instr.accesses(|b, access| free &= !writes.contains(&b) && (access == Access::Read || !reads.contains(&b)));
        if !free {
            return Err(format!("instruction {at} stands between it and instruction {first}"));
        }
    }
    Ok(())
}

/// What instructions that are done together make is stored, unless only they read it.
fn others_find(body: &[Issue], together: &[usize], stored: impl Fn(dplan_ir::entity::BufferId) -> bool) -> Result<(), String> {
    for &place in together {
        let Instr::Run { outs, .. } = &body[place].instr else { return Err("what is no op is done with others".into()) };
        for &out in outs.iter().filter(|&&out| !stored(out)) {
            let mut readers = Vec::new();
            for (at, issue) in body.iter().enumerate() {
                issue.instr.accesses(|b, access| readers.extend((b == out && access == Access::Read).then_some(at)));
            }
            if readers.is_empty() || readers.iter().any(|at| !together.contains(at) || *at < place) {
                return Err(format!("instructions {readers:?} read {out}, which is not stored"));
            }
        }
    }
    Ok(())
}

/// What NCCL is asked for. It knows no log-sum-exp: kernels do that with what all gathered.
fn primitive(pattern: Pattern, monoid: Monoid) -> Result<Primitive, String> {
    Ok(match (pattern, monoid) {
        (Pattern::AllGather, _) | (Pattern::AllReduce, Monoid::LogSumExp) => Primitive::AllGather,
        (Pattern::AllToAll, _) => Primitive::AllToAll,
        (Pattern::Shift, _) => Primitive::Shift,
        (Pattern::AllReduce, Monoid::Sum) => Primitive::AllReduce(Reduction::Sum),
        (Pattern::AllReduce, Monoid::Max) => Primitive::AllReduce(Reduction::Max),
        (Pattern::ReduceScatter, Monoid::Sum) => Primitive::ReduceScatter(Reduction::Sum),
        (Pattern::ReduceScatter, Monoid::Max) => Primitive::ReduceScatter(Reduction::Max),
        (Pattern::ReduceScatter, Monoid::LogSumExp) => return Err("a log-sum-exp is scattered".into()),
    })
}

/// Pieces handed over between streams and the disk's, and the first of the events that do it.
struct Handed {
    first: usize,
    count: usize,
}

/// What is left of a log.
struct Calls<'a>(std::slice::Iter<'a, Call>);

impl<'a> Calls<'a> {
    /// The note that a meeting is done.
    fn mark(&mut self, on: usize, what: &str) -> Result<(), String> {
        let call = self.next(what)?;
        expect(matches!(call, Call::CopyOut { bytes: 4, stream, .. } if *stream == on), call, &format!("the mark {what}"))
    }
    /// The pieces of a transfer, one after another; where in the file they begin.
    fn pieces(&mut self, way: Way, bytes: u64, on: usize, handed: &mut Handed, what: &str) -> Result<u64, String> {
        const DISK: usize = STREAMS;
        let (mut done, mut begin) = (0, None);
        while done < bytes {
            let (full, empty) = (handed.first + handed.count % 2, handed.first + 2 + handed.count % 2);
            let (first, second) = if way == Way::In { (DISK, on) } else { (on, DISK) };
            // The first two pieces of a step are free.
            let mut wanted = vec![Call::Record { event: full, stream: first }, Call::Wait { event: full, stream: second }];
            if handed.count >= 2 {
                let call = self.next(what)?;
                expect(*call == Call::Wait { event: empty, stream: first }, call, what)?;
            }
            let mut moved = Vec::new();
            for side in 0..2 {
                let call = self.next(what)?;
                moved.push(match (call, way, side) {
                    (Call::Errand { way: w, address, bytes, stream: DISK }, Way::In, 0)
                    | (Call::Errand { way: w, address, bytes, stream: DISK }, Way::Out, 1)
                        if *w == way =>
                    {
                        let begin = *begin.get_or_insert(*address);
                        expect(*address == begin + done, call, what)?;
                        *bytes
                    }
                    (Call::CopyIn { bytes, stream, .. }, Way::In, 1) | (Call::CopyOut { bytes, stream, .. }, Way::Out, 0) if *stream == on => *bytes,
                    _ => return Err(format!("{call:?} is not {what}")),
                });
                for wanted in std::mem::take(&mut wanted) {
                    let call = self.next(what)?;
                    expect(*call == wanted, call, what)?;
                }
            }
            let call = self.next(what)?;
            expect(*call == Call::Record { event: empty, stream: second } && moved[0] == moved[1], call, what)?;
            (done, handed.count) = (done + moved[0], handed.count + 1);
        }
        begin.filter(|_| done == bytes).ok_or_else(|| format!("{done} bytes {what}"))
    }

    fn next(&mut self, what: &str) -> Result<&'a Call, String> {
        self.0.next().ok_or_else(|| format!("the log ends before {what}"))
    }
    /// The launches of these kernels on a stream.
    fn launches(&mut self, entries: &[&str], on: usize, what: &str) -> Result<(), String> {
        for entry in entries {
            let call = self.next(what)?;
            expect(matches!(call, Call::Launch { entry: e, stream } if e == entry && *stream == on), call, &format!("`{entry}` {what}"))?;
        }
        Ok(())
    }
}

fn expect(is: bool, call: &Call, what: &str) -> Result<(), String> {
    if is { Ok(()) } else { Err(format!("{call:?} is not {what}")) }
}
