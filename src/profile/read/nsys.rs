//! Nsight Systems, as `nsys export --type sqlite` writes it.
//!
//! A table is absent when nothing of its kind was recorded, and columns come and go with versions: [`Table`] asks what there is, and what is not
//! there reads as null. A (process, device) pair is one rank. Sizes of collectives are in NVTX payloads of NCCL's own ranges: `binaryData` is a header
//! of 32 bytes, little-endian (u32 domain, u32, u32 schema, u32, u64 payload size, u64 total size), then fields at the offsets the schema gives.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use rusqlite::{Connection, OpenFlags, Row};

use super::draft::{At, Draft, Ids, Rung};
use super::meta::Meta;
use super::trace::Found;
use crate::profile::classify::{CommKernels, comm_call};
use crate::profile::{CommOp, Device, Direction, Error, Format};

/// Reads an export.
///
/// # Errors
/// If it is no export of Nsight Systems, is damaged, or holds no device activity.
pub fn read(file: &str, path: &Path, rules: &CommKernels) -> Result<Vec<Found>, Error> {
    let sqlite = |source| Error::Sqlite { file: file.into(), source };
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let database = Connection::open_with_flags(path, flags).map_err(sqlite)?;
    let export = Export { database: &database };
    let tables = export.tables().map_err(sqlite)?;
    if !tables.iter().any(|t| t.starts_with("CUPTI_") || t.starts_with("NVTX_") || t == "StringIds") {
        return Err(Error::NotAProfile { file: file.into(), found: "an SQLite file without the tables of Nsight Systems".into() });
    }
    let mut ranks: BTreeMap<(i64, i64), Draft<'_>> = BTreeMap::new();
    export.kernels(rules, &mut ranks).map_err(sqlite)?;
    export.copies(rules, &mut ranks).map_err(sqlite)?;
    if ranks.is_empty() {
        let why = "the export has no kernel and no copy; record with `nsys profile --trace=cuda,nvtx`".into();
        return Err(Error::NoEvents { file: file.into(), why });
    }
    export.calls(&mut ranks).map_err(sqlite)?;
    export.ranges(&mut ranks).map_err(sqlite)?;
    let devices = export.devices().map_err(sqlite)?;
    let finish = |((device, _), draft): ((i64, i64), Draft<'_>)| {
        let mut rank = draft.finish();
        rank.format = Format::NsysSqlite;
        // Ranks of one export have its clock.
        rank.host = Some(file.into());
        rank.device = devices.get(&device).cloned();
        Found { rank, number: None }
    };
    Ok(ranks.into_iter().map(finish).collect())
}

struct Export<'c> {
    database: &'c Connection,
}

/// The columns a table has; none if there is no such table.
struct Table {
    name: &'static str,
    columns: Vec<String>,
}

impl Table {
    fn has(&self, column: &str) -> bool {
        self.columns.iter().any(|c| c == column)
    }

    /// The first of `columns` there is, or null.
    fn pick(&self, columns: &[&str]) -> String {
        columns.iter().find(|c| self.has(c)).map_or_else(|| "NULL".into(), |c| format!("\"{c}\""))
    }

    /// The text behind a column of ids, or null.
    fn text(&self, columns: &[&str]) -> String {
        match columns.iter().find(|c| self.has(c)) {
            Some(id) => format!("(SELECT value FROM StringIds WHERE StringIds.id = \"{}\".\"{id}\")", self.name),
            None => "NULL".into(),
        }
    }
}

type Ranks<'r> = BTreeMap<(i64, i64), Draft<'r>>;

impl Export<'_> {
    fn tables(&self) -> rusqlite::Result<Vec<String>> {
        let mut query = self.database.prepare("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")?;

        query.query_map([], |row| row.get(0))?.collect()
    }

    fn table(&self, name: &'static str) -> rusqlite::Result<Table> {
        let mut query = self.database.prepare(&format!("PRAGMA table_info(\"{name}\")"))?;
        let columns = query.query_map([], |row| row.get::<_, String>(1))?.collect::<rusqlite::Result<_>>()?;
        Ok(Table { name, columns })
    }

    /// Calls `visit` on every row of `table` that has a start.
    fn rows(&self, table: &Table, columns: &[String], mut visit: impl FnMut(&Row<'_>) -> rusqlite::Result<()>) -> rusqlite::Result<()> {
        if !table.has("start") {
            return Ok(());
        }
        let mut query =
            self.database.prepare(&format!("SELECT {} FROM \"{}\" WHERE start IS NOT NULL ORDER BY start", columns.join(", "), table.name))?;
        let mut rows = query.query([])?;
        while let Some(row) = rows.next()? {
            visit(row)?;
        }
        Ok(())
    }

    fn kernels<'r>(&self, rules: &'r CommKernels, ranks: &mut Ranks<'r>) -> rusqlite::Result<()> {
        let table = self.table("CUPTI_ACTIVITY_KIND_KERNEL")?;
        let columns = device_columns(&table, table.text(&["demangledName", "shortName", "mangledName"]));
        self.rows(&table, &columns, |row| {
            let device = DeviceRow::read(row)?;
            let draft = device.draft(rules, ranks);
            let at = device.at(draft);
            let name: Option<String> = row.get(6)?;
            draft.kernel(at, name.as_deref().unwrap_or("unnamed kernel"), device.ids(), Default::default);
            Ok(())
        })
    }

    fn copies<'r>(&self, rules: &'r CommKernels, ranks: &mut Ranks<'r>) -> rusqlite::Result<()> {
        let table = self.table("CUPTI_ACTIVITY_KIND_MEMCPY")?;
        self.rows(&table, &device_columns(&table, table.pick(&["copyKind"])), |row| {
            let device = DeviceRow::read(row)?;
            let draft = device.draft(rules, ranks);
            let at = device.at(draft);
            let (direction, name) = match row.get::<_, Option<i64>>(6)? {
                Some(1) => (Direction::ToDevice, "memcpy HtoD"),
                Some(2) => (Direction::FromDevice, "memcpy DtoH"),
                Some(10) => (Direction::BetweenDevices, "memcpy PtoP"),
                _ => (Direction::Within, "memcpy DtoD"),
            };
            draft.copy(at, name, direction, device.ids());
            Ok(())
        })?;
        let table = self.table("CUPTI_ACTIVITY_KIND_MEMSET")?;
        self.rows(&table, &device_columns(&table, "NULL".into()), |row| {
            let device = DeviceRow::read(row)?;
            let draft = device.draft(rules, ranks);
            let at = device.at(draft);
            draft.copy(at, "memset", Direction::Fill, device.ids());
            Ok(())
        })
    }

    fn calls(&self, ranks: &mut Ranks<'_>) -> rusqlite::Result<()> {
        let table = self.table("CUPTI_ACTIVITY_KIND_RUNTIME")?;
        let columns = ["start".into(), table.pick(&["end"]), table.pick(&["globalTid"]), table.pick(&["correlationId"]), table.text(&["nameId"])];
        self.rows(&table, &columns, |row| {
            let host = HostRow::read(row)?;
            let correlation = row.get::<_, Option<i64>>(3)?.and_then(|c| u64::try_from(c).ok());
            let name: Option<String> = row.get(4)?;
            for draft in host.drafts(ranks) {
                let at = host.at(draft);
                draft.call(at, name.as_deref().unwrap_or("call"), correlation);
            }
            Ok(())
        })
    }

    fn ranges(&self, ranks: &mut Ranks<'_>) -> rusqlite::Result<()> {
        let table = self.table("NVTX_EVENTS")?;
        let payloads = self.payloads()?;
        let text = format!("COALESCE({}, {})", table.pick(&["text"]), table.text(&["textId"]));
        let columns = ["start".into(), table.pick(&["end"]), table.pick(&["globalTid"]), text, table.pick(&["binaryData"])];
        self.rows(&table, &columns, |row| {
            let host = HostRow::read(row)?;
            let Some(name) = row.get::<_, Option<String>>(3)? else { return Ok(()) };
            // A mark has no end and spans nothing.
            if row.get::<_, Option<i64>>(1)?.is_none() {
                return Ok(());
            }
            let blob = match row.get_ref(4)? {
                rusqlite::types::ValueRef::Blob(blob) => Some(blob),
                _ => None,
            };
            let op = name.strip_prefix("nccl").and_then(comm_call);
            for draft in host.drafts(ranks) {
                let at = host.at(draft);
                draft.range(at, &name, Ids::default(), Default::default);
                if let Some(op) = op {
                    let fields = blob.map(|b| payloads.fields(b)).unwrap_or_default();
                    draft.hint(at, Ids::default(), Rung::Range, said(op, &fields));
                }
            }
            Ok(())
        })
    }

    fn payloads(&self) -> rusqlite::Result<Payloads> {
        let table = self.table("NVTX_PAYLOAD_SCHEMA_ENTRIES")?;
        let mut payloads = Payloads::default();
        if !["schemaId", "type", "name", "offset"].iter().all(|c| table.has(c)) {
            return Ok(payloads);
        }
        let mut query =
            self.database.prepare(&format!("SELECT {}, schemaId, type, name, offset FROM NVTX_PAYLOAD_SCHEMA_ENTRIES", table.pick(&["domainId"])))?;
        let mut rows = query.query([])?;
        while let Some(row) = rows.next()? {
            let domain: Option<i64> = row.get(0)?;
            let (schema, kind, name, offset): (i64, Option<i64>, Option<String>, Option<i64>) = (row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?);
            if let (Some(kind), Some(name), Some(offset)) = (kind, name, offset.and_then(|o| usize::try_from(o).ok())) {
                payloads.0.entry((domain, schema)).or_default().push(Field { kind, name, offset });
            }
        }
        Ok(payloads)
    }

    fn devices(&self) -> rusqlite::Result<HashMap<i64, Device>> {
        let table = self.table("TARGET_INFO_GPU")?;
        let mut devices = HashMap::new();
        if !table.has("id") || !table.has("name") {
            return Ok(devices);
        }
        let mut query = self.database.prepare(&format!("SELECT id, name, {} FROM TARGET_INFO_GPU", table.pick(&["totalMemory"])))?;
        let mut rows = query.query([])?;
        while let Some(row) = rows.next()? {
            let memory: Option<i64> = row.get(2)?;
            if let Some(name) = row.get::<_, Option<String>>(1)? {
                devices.insert(row.get(0)?, Device { name, memory_bytes: memory.and_then(|m| u64::try_from(m).ok()) });
            }
        }
        Ok(devices)
    }
}

fn device_columns(table: &Table, last: String) -> [String; 7] {
    let process = if table.has("globalPid") { "(\"globalPid\" >> 24) & 16777215".into() } else { "NULL".into() };
    ["start".into(), table.pick(&["end"]), table.pick(&["deviceId"]), table.pick(&["streamId"]), table.pick(&["correlationId"]), process, last]
}

struct DeviceRow {
    start: i64,
    end: i64,
    device: i64,
    stream: i64,
    correlation: Option<u64>,
    process: i64,
}

impl DeviceRow {
    fn read(row: &Row<'_>) -> rusqlite::Result<DeviceRow> {
        let start: i64 = row.get(0)?;
        let or = |i: usize, other: i64| row.get::<_, Option<i64>>(i).map(|v| v.unwrap_or(other));
        let correlation = row.get::<_, Option<i64>>(4)?.and_then(|c| u64::try_from(c).ok());
        Ok(DeviceRow { start, end: or(1, start)?, device: or(2, 0)?, stream: or(3, 0)?, correlation, process: or(5, 0)? })
    }

    fn draft<'m, 'r>(&self, rules: &'r CommKernels, ranks: &'m mut Ranks<'r>) -> &'m mut Draft<'r> {
        ranks.entry((self.device, self.process)).or_insert_with(|| Draft::new(rules))
    }

    fn at(&self, draft: &mut Draft<'_>) -> At {
        At { start: self.start, duration: self.end.saturating_sub(self.start), lane: draft.lane(&self.device.to_string(), &self.stream.to_string()) }
    }

    fn ids(&self) -> Ids {
        Ids { correlation: self.correlation, ..Ids::default() }
    }
}

struct HostRow {
    start: i64,
    end: i64,
    /// Process and thread, where they are recorded.
    thread: Option<(i64, i64)>,
}

impl HostRow {
    fn read(row: &Row<'_>) -> rusqlite::Result<HostRow> {
        let start: i64 = row.get(0)?;
        let thread = row.get::<_, Option<i64>>(2)?.map(|t| ((t >> 24) & 0xff_ffff, t & 0xff_ffff));
        Ok(HostRow { start, end: row.get::<_, Option<i64>>(1)?.unwrap_or(start), thread })
    }

    /// The ranks of its process; all, where processes are not recorded.
    fn drafts<'m, 'r>(&self, ranks: &'m mut Ranks<'r>) -> impl Iterator<Item = &'m mut Draft<'r>> {
        let process = self.thread.map(|(process, _)| process);
        ranks.iter_mut().filter(move |((_, of), _)| *of == 0 || process.is_none_or(|p| p == *of)).map(|(_, draft)| draft)
    }

    fn at(&self, draft: &mut Draft<'_>) -> At {
        let (process, thread) = self.thread.unwrap_or_default();
        // A device has a small number and a process may have the same.
        At { start: self.start, duration: self.end.saturating_sub(self.start), lane: draft.lane(&format!("process {process}"), &thread.to_string()) }
    }
}

/// Fields of payload schemas by (domain, schema).
#[derive(Default)]
struct Payloads(HashMap<(Option<i64>, i64), Vec<Field>>);

struct Field {
    kind: i64,
    name: String,
    offset: usize,
}

impl Payloads {
    /// The integer fields of a payload, by name; none where the payload or its schema is not of the known form.
    fn fields(&self, blob: &[u8]) -> Vec<(&str, u64)> {
        const HEADER: usize = 32;
        let word = |at: usize| blob.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
        let (Some(domain), Some(schema)) = (word(0), word(8)) else { return Vec::new() };
        let by_domain = self.0.get(&(Some(i64::from(domain)), i64::from(schema))).or_else(|| self.0.get(&(None, i64::from(schema))));
        let value = |field: &Field| {
            let at = HEADER.checked_add(field.offset)?;
            match field.kind {
                // Signed and unsigned words of 32 bits.
                4 | 5 => word(at).map(u64::from),
                // Words of 64 bits, and sizes.
                6 | 7 | 18 | 22 => blob.get(at..at.checked_add(8)?)?.try_into().ok().map(u64::from_le_bytes),
                _ => None,
            }
        };
        by_domain.into_iter().flatten().filter_map(|f| Some((f.name.as_str(), value(f)?))).collect()
    }
}

/// What a range of NCCL says: its size is what a rank gives, of a reduce-scatter and a receive what it gets.
fn said(op: CommOp, fields: &[(&str, u64)]) -> Meta {
    let find = |part: &str| fields.iter().find(|(name, _)| name.to_ascii_lowercase().contains(part)).map(|(_, value)| *value);
    let small = |n: u64| u32::try_from(n).ok();
    let mut meta =
        Meta { op: Some(op), group_size: find("no. of ranks").and_then(small), peer: find("peer rank").and_then(small), ..Meta::default() };
    let size = find("message size");
    match op {
        CommOp::ReduceScatter | CommOp::Recv => meta.received_bytes = size,
        _ => meta.sent_bytes = size,
    }
    meta
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Kind;

    fn temporary(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("dplan-nsys-{}-{name}.sqlite", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    fn payload(domain: u32, schema: u32, bytes: u64, ranks: u32) -> Vec<u8> {
        let mut blob = Vec::new();
        for word in [domain, 0, schema, 0] {
            blob.extend(word.to_le_bytes());
        }
        for long in [16u64, 48, bytes] {
            blob.extend(long.to_le_bytes());
        }
        blob.extend(ranks.to_le_bytes());
        blob
    }

    #[test]
    fn kernels_launches_and_nccl_sizes_are_joined_per_device() {
        let path = temporary("joined");
        let database = Connection::open(&path).unwrap();
        database
            .execute_batch(
                "CREATE TABLE StringIds (id INTEGER, value TEXT);
                 INSERT INTO StringIds VALUES (1, 'void gemm()'), (2, 'ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)'), (3, 'cudaLaunchKernel_v7000');
                 CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER);
                 INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (100, 200, 0, 7, 1, 77<<24, 1), (150, 400, 0, 20, 2, 77<<24, 2), (110, 210, 1, 7, 1, 78<<24, 1);
                 CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER);
                 INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (90, 95, (77<<24)|5, 1, 3), (96, 99, (77<<24)|5, 2, 3), (50, 60, (78<<24)|9, 1, 3);
                 CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER, globalTid INTEGER, eventType INTEGER, domainId INTEGER, binaryData BLOB);
                 CREATE TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES (domainId INTEGER, schemaId INTEGER, idx INTEGER, type INTEGER, name TEXT, offset INTEGER);
                 INSERT INTO NVTX_PAYLOAD_SCHEMA_ENTRIES VALUES (1, 3, 0, 18, 'Message size [bytes]', 0), (1, 3, 1, 5, 'No. of ranks', 8);
                 CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, totalMemory INTEGER);
                 INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H100', 85899345920), (1, 'NVIDIA H100', 85899345920);",
            )
            .unwrap();
        database.execute("INSERT INTO NVTX_EVENTS VALUES (95, 100, 'ncclAllGather', NULL, (77<<24)|5, 59, 1, ?1)", [payload(1, 3, 4096, 2)]).unwrap();
        drop(database);
        let found = read("x.sqlite", &path, &CommKernels::default()).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(found.len(), 2, "a device is a rank");
        let rank = &found[0].rank;
        let kernel = rank.events.iter().find(|e| matches!(e.kind, Kind::Kernel(_))).unwrap();
        assert_eq!((kernel.start, kernel.duration, kernel.launched), (100, 100, Some(90)));
        let comm = &rank.comms[0];
        assert_eq!((comm.op, comm.sent_bytes, comm.group_size, comm.bytes(Some(2))), (CommOp::AllGather, Some(4096), Some(2), Some(8192)));
        let other = found[1].rank.events.iter().find(|e| matches!(e.kind, Kind::Kernel(_))).unwrap();
        assert_eq!(other.launched, Some(50), "a launch belongs to the process that made it");
        assert_eq!(rank.device.as_ref().unwrap().name, "NVIDIA H100");
    }

    #[test]
    fn absent_tables_and_columns_are_no_error_and_other_databases_are() {
        let path = temporary("sparse");
        Connection::open(&path).unwrap().execute_batch("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER); INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 3), (5, NULL), (NULL, 7);").unwrap();
        let found = read("x", &path, &CommKernels::default()).unwrap();
        assert_eq!(found[0].rank.events.iter().map(|e| (e.start, e.duration)).collect::<Vec<_>>(), [(1, 2), (5, 0)]);
        std::fs::remove_file(&path).unwrap();
        Connection::open(&path).unwrap().execute_batch("CREATE TABLE NVTX_EVENTS (start INTEGER);").unwrap();
        assert!(matches!(read("x", &path, &CommKernels::default()), Err(Error::NoEvents { .. })));
        std::fs::remove_file(&path).unwrap();
        Connection::open(&path).unwrap().execute_batch("CREATE TABLE books (title TEXT);").unwrap();
        assert!(matches!(read("x", &path, &CommKernels::default()), Err(Error::NotAProfile { .. })));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..100]).unwrap();
        assert!(read("x", &path, &CommKernels::default()).is_err());
        std::fs::remove_file(&path).unwrap();
    }
}
