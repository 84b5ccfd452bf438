//! `nsys stats --report cuda_gpu_trace --format csv`: one line an event of one device timeline, after lines of chat.
//!
//! Columns are found by the beginning of their name, since units (`Start (ns)`, `Start (us)` under `--timeunit`) and columns come and go. The report
//! of sums (`cuda_gpu_kern_sum`) has no times and is refused by name. The CSV knows neither launches nor ranges nor sizes of collectives.

use std::io::BufRead;

use super::draft::{At, Draft, Ids};
use super::text::scaled;
use super::trace::{Found, direction};
use crate::profile::classify::CommKernels;
use crate::profile::{Error, Format};

/// Reads the CSV of one rank; several devices in it are one rank each only in the SQLite export.
///
/// # Errors
/// If there is no header, or a line after it is not of its form.
pub fn read(file: &str, input: impl BufRead, rules: &CommKernels) -> Result<Found, Error> {
    let mut draft = Draft::new(rules);
    draft.rank.format = Format::NsysCsv;
    let mut columns: Option<Columns> = None;
    let mut events = 0u64;
    for (number, line) in input.split(b'\n').enumerate() {
        let line = line.map_err(|source| Error::Io { file: file.into(), source })?;
        let line = String::from_utf8_lossy(&line);
        let fields = fields(line.trim_end_matches('\r'));
        let row = |what: String| Error::Row { file: file.into(), line: number + 1, what };
        let Some(columns) = &columns else {
            if fields.iter().any(|f| f.starts_with("Total Time (")) && fields.iter().any(|f| f.starts_with("Instances")) {
                return Err(row("a report of sums, which has no times; run `nsys stats --report cuda_gpu_trace --format csv`".into()));
            }
            columns = Columns::find(&fields);
            if columns.is_none() && number >= 200 {
                break;
            }
            continue;
        };
        if line.trim().is_empty() {
            continue;
        }
        let get = |i: usize| fields.get(i).map(String::as_str).unwrap_or_default();
        let time = |i: usize, digits: usize| {
            scaled(get(i), digits).ok_or_else(|| row(format!("`{}` is not a time", get(i).chars().take(40).collect::<String>())))
        };
        let (start, duration) = (time(columns.start.0, columns.start.1)?, time(columns.duration.0, columns.duration.1)?);
        let name = get(columns.name);
        let lane = draft.lane(columns.device.map_or("", get), columns.stream.map_or("", get));
        let at = At { start, duration, lane };
        // A copy has no grid, and is named so: `[CUDA memcpy Host-to-Device]`.
        if name.contains("memcpy") || name.contains("memset") {
            draft.copy(at, name, direction(name), Ids::default());
        } else {
            draft.kernel(at, name, Ids::default(), Default::default);
        }
        events += 1;
    }
    if columns.is_none() {
        let found = "text without the header `Start (ns),Duration (ns),…,Name`".into();
        return Err(Error::NotAProfile { file: file.into(), found });
    }
    if events == 0 {
        return Err(Error::NoEvents { file: file.into(), why: "no line after the header".into() });
    }
    let mut rank = draft.finish();
    rank.notes.push("the CSV of nsys has no launches, ranges or sizes of collectives; the .sqlite export has".into());
    Ok(Found { rank, number: None })
}

struct Columns {
    /// Where, and the power of ten that makes nanoseconds.
    start: (usize, usize),
    duration: (usize, usize),
    device: Option<usize>,
    stream: Option<usize>,
    name: usize,
}

impl Columns {
    fn find(header: &[String]) -> Option<Columns> {
        let at = |prefix: &str| header.iter().position(|c| c.trim().starts_with(prefix));
        let time = |prefix: &str| {
            let i = at(prefix)?;
            let unit = header[i].split_once('(')?.1;
            let digits = match unit.trim_end_matches(')').trim() {
                "ns" | "nsec" => 0,
                "us" | "µs" | "usec" => 3,
                "ms" | "msec" => 6,
                "s" | "sec" => 9,
                _ => return None,
            };
            Some((i, digits))
        };
        Some(Columns { start: time("Start (")?, duration: time("Duration (")?, device: at("Device"), stream: at("Strm"), name: at("Name")? })
    }
}

/// The fields of a line; a field in quotes may hold commas, and doubled quotes.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        let Some(field) = fields.last_mut() else { break };
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                field.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            c => field.push(c),
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{CommOp, Kind};

    const TEXT: &str = "Processing [report.sqlite] with [cuda_gpu_trace.py]...\n\n\
        Start (us),Duration (us),CorrId,GrdX,Bytes (MB),Device,Ctx,Strm,Name\n\
        10.5,2.25,1,8,,NVIDIA A100 (0),1,7,\"void gemm<float, 4>(int, \"\"x\"\")\"\n\
        12.75,1,2,,0.5,NVIDIA A100 (0),1,13,[CUDA memcpy Host-to-Device]\n\
        20,5.000,3,8,,NVIDIA A100 (0),1,20,\"ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)\"\n";

    #[test]
    fn lines_after_the_chat_are_events_in_the_units_of_the_header() {
        let rank = read("x.csv", TEXT.as_bytes(), &CommKernels::default()).unwrap().rank;
        assert_eq!(rank.events.iter().map(|e| (e.start, e.duration)).collect::<Vec<_>>(), [(10_500, 2_250), (12_750, 1_000), (20_000, 5_000)]);
        assert_eq!(rank.name(&rank.events[0]), "void gemm<float, 4>(int, \"x\")");
        assert!(matches!(rank.events[1].kind, Kind::Copy(_)));
        assert_eq!((rank.comms.len(), rank.comms[0].op), (1, CommOp::AllReduce));
        assert_eq!(rank.lanes.len(), 3);
    }

    #[test]
    fn wrong_tables_are_refused_with_their_line() {
        let fails = |text: &str| read("x.csv", text.as_bytes(), &CommKernels::default()).map(|_| ()).unwrap_err().to_string();
        assert!(fails("hello\nworld\n").contains("expected a Kineto"), "{}", fails("hello\nworld\n"));
        assert!(fails("Time (%),Total Time (ns),Instances,Avg (ns),Name\n").contains("line 1: a report of sums"));
        let damaged = TEXT.replace("12.75", "soon");
        assert!(fails(&damaged).contains("line 5: `soon` is not a time"), "{}", fails(&damaged));
        let header = TEXT.lines().nth(2).unwrap();
        assert!(fails(header).contains("no line after the header"));
    }
}
