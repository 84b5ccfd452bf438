//! Tables of measurements: CSV, gzipped or not, known by their header.
//!
//! - `device,dtype,m,n,k,latency_ms`: matrix products;
//! - `device,op,dtype,num_gpus,message_elems,latency_ms`: collectives inside a node, elements of the whole buffer;
//! - `source_id,…,hw,op,size_bytes,m,n,k,…`: collected measurements; of these, sources are read whose conditions are known (the networks named below, and the same two tables).

use csv::StringRecord;
use dplan_ir::program::Pattern;
use dplan_planner::machine::curves::Op;
use flate2::read::GzDecoder;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmRow {
    pub m: u64,
    pub n: u64,
    pub k: u64,
    pub seconds: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CollectiveRow {
    pub bytes: u64,
    pub seconds: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NetworkRow {
    /// The built-in device at both ends.
    pub device: String,
    pub pattern: Pattern,
    pub ranks: u64,
    pub nodes: u64,
    pub bytes: u64,
    pub seconds: f64,
}

/// What the tables hold, by what it is a measurement of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tables {
    /// By device and type; no product twice.
    pub gemm: BTreeMap<(String, String), Vec<GemmRow>>,
    pub collectives: BTreeMap<(String, Op, u64), Vec<CollectiveRow>>,
    pub networks: BTreeMap<String, Vec<NetworkRow>>,
    /// Rows of other devices, or of conditions that no fit is made for.
    pub passed_over: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum TableError {
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
    #[error("{path}: {source}")]
    Csv { path: String, source: csv::Error },
    #[error(
        "{path}: not a table of measurements; its columns are {columns}, expected `device,dtype,m,n,k,latency_ms`, `device,op,dtype,num_gpus,message_elems,latency_ms` or those of a collection that begins `source_id` or `row_id`"
    )]
    Columns { path: String, columns: String },
    #[error("{path}: line {line}: `{column}` is `{found}`, expected {expected}")]
    Number { path: String, line: u64, column: &'static str, found: String, expected: &'static str },
    #[error("{path}: no table (.csv, .csv.gz) in this folder")]
    EmptyFolder { path: String },
}

/// Names that tables give to built-in devices.
const DEVICES: [(&str, &str); 9] = [
    ("NVIDIA A100-SXM4-80GB", "a100-80g"),
    ("A100-PCIe-80GB", "a100-pcie"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA B300 SXM6 AC", "b300"),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA GB300", "gb300"),
    ("NVIDIA L40S", "l40s"),
];

/// Sources of collectives between nodes: what the network is called here, and the device at its ends.
const NETWORKS: [(&str, &str, &str); 5] = [
    ("aws_p4de", "efa-p4de", "a100-80g"),
    ("oci_a100", "roce-oci-a100", "a100-40g"),
    ("aws_p5", "efa-p5", "h100"),
    ("gcp_a3mega", "tcpxo-a3-mega", "h100"),
    ("stas_b200_nodes", "efa-p6-b200", "b200"),
];

/// Reads tables, and folders of tables.
///
/// # Errors
/// Names the file and, in it, the line and column.
pub fn read(paths: &[PathBuf]) -> Result<Tables, TableError> {
    let mut tables = Tables::default();
    for path in paths {
        let shown = path.display().to_string();
        if !path.is_dir() {
            read_file(path, &mut tables)?;
            continue;
        }
        let io = |source| TableError::Io { path: shown.clone(), source };
        let entries = std::fs::read_dir(path).map_err(io)?.collect::<Result<Vec<_>, _>>().map_err(io)?;
        let is_table = |p: &PathBuf| [".csv", ".csv.gz"].iter().any(|e| p.to_string_lossy().ends_with(e));
        let mut inside: Vec<PathBuf> = entries.into_iter().map(|e| e.path()).filter(is_table).collect();
        inside.sort();
        if inside.is_empty() {
            return Err(TableError::EmptyFolder { path: shown });
        }
        for file in &inside {
            read_file(file, &mut tables)?;
        }
    }
    for rows in tables.gemm.values_mut() {
        rows.sort_by(|a, b| (a.m, a.n, a.k).cmp(&(b.m, b.n, b.k)).then(a.seconds.total_cmp(&b.seconds)));
        rows.dedup_by_key(|r| (r.m, r.n, r.k));
    }
    Ok(tables)
}

fn read_file(path: &Path, tables: &mut Tables) -> Result<(), TableError> {
    let shown = path.display().to_string();
    let file = File::open(path).map_err(|source| TableError::Io { path: shown.clone(), source })?;
    let zipped = path.extension().is_some_and(|e| e == "gz");
    let input: Box<dyn Read> = if zipped { Box::new(GzDecoder::new(BufReader::new(file))) } else { Box::new(BufReader::new(file)) };
    parse(&shown, input, tables)
}

/// Reads one table from `input`; `path` is what messages call it.
///
/// # Errors
/// Names the line and column.
pub fn parse(path: &str, input: impl Read, tables: &mut Tables) -> Result<(), TableError> {
    let csv_error = |source| TableError::Csv { path: path.into(), source };
    let mut reader = csv::Reader::from_reader(input);
    let header = reader.headers().map_err(csv_error)?.clone();
    let has = |names: &[&str]| names.iter().all(|n| header.iter().any(|h| h == *n));
    let kind = if has(&["device", "dtype", "m", "n", "k", "latency_ms"]) {
        Kind::Products
    } else if has(&["device", "op", "dtype", "num_gpus", "message_elems", "latency_ms"]) {
        Kind::Collectives
    } else if has(&["source_id", "hw", "op", "size_bytes", "time_us", "tflops", "n_gpus", "n_nodes", "busbw_GBps"]) {
        Kind::Collection
    } else {
        return Err(TableError::Columns { path: path.into(), columns: header.iter().collect::<Vec<_>>().join(",") });
    };
    for record in reader.records() {
        let row = Row { path, header: &header, record: &record.map_err(csv_error)? };
        let taken = match kind {
            Kind::Products => product(&row, tables)?,
            Kind::Collectives => collective(&row, tables)?,
            Kind::Collection => collected(&row, tables)?,
        };
        tables.passed_over += usize::from(!taken);
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Kind {
    Products,
    Collectives,
    Collection,
}

/// A line, by the names of its columns.
struct Row<'a> {
    path: &'a str,
    header: &'a StringRecord,
    record: &'a StringRecord,
}

impl Row<'_> {
    fn text(&self, column: &str) -> &str {
        self.header.iter().position(|h| h == column).and_then(|i| self.record.get(i)).unwrap_or("").trim()
    }
    fn number(&self, column: &'static str) -> Result<f64, TableError> {
        let found = self.text(column);
        match found.parse::<f64>() {
            Ok(x) if x > 0.0 && x.is_finite() => Ok(x),
            _ => Err(self.wrong(column, "a positive number")),
        }
    }
    /// A size, rounded: exact as a float, so far below overflow.
    fn whole(&self, column: &'static str) -> Result<u64, TableError> {
        let rounded = self.number(column)?.round();
        if (1.0..9e15).contains(&rounded) { Ok(rounded as u64) } else { Err(self.wrong(column, "a whole number from 1 to 9e15")) }
    }
    fn wrong(&self, column: &'static str, expected: &'static str) -> TableError {
        let line = self.record.position().map_or(0, csv::Position::line);
        TableError::Number { path: self.path.into(), line, column, found: self.text(column).into(), expected }
    }
}

fn device(name: &str) -> Option<&'static str> {
    DEVICES.iter().find(|d| d.0 == name).map(|d| d.1)
}

fn op(name: &str) -> Option<Op> {
    match name {
        "all_reduce" | "all-reduce" => Some(Op::AllReduce),
        "all_gather" | "all-gather" => Some(Op::AllGather),
        "reduce_scatter" | "reduce-scatter" => Some(Op::ReduceScatter),
        "alltoall" | "all-to-all" => Some(Op::AllToAll),
        _ => None,
    }
}

/// Eight-bit products depend on how they are scaled, which tables do not say: one surface fits none of them within a fifth.
fn dtype(name: &str) -> Option<&'static str> {
    match name {
        "bfloat16" | "bf16" => Some("bf16"),
        _ => None,
    }
}

fn product(row: &Row<'_>, tables: &mut Tables) -> Result<bool, TableError> {
    let (Some(device), Some(dtype)) = (device(row.text("device")), dtype(row.text("dtype"))) else { return Ok(false) };
    let seconds = row.number("latency_ms")? * 1e-3;
    let row = GemmRow { m: row.whole("m")?, n: row.whole("n")?, k: row.whole("k")?, seconds };
    tables.gemm.entry((device.into(), dtype.into())).or_default().push(row);
    Ok(true)
}

/// Times do not depend on the element type but on bytes; the table repeats every size in two types, and half precision is what training sends.
fn collective(row: &Row<'_>, tables: &mut Tables) -> Result<bool, TableError> {
    let (Some(device), Some(op), "half") = (device(row.text("device")), op(row.text("op")), row.text("dtype")) else { return Ok(false) };
    let (ranks, bytes, seconds) = (row.whole("num_gpus")?, 2 * row.whole("message_elems")?, row.number("latency_ms")? * 1e-3);
    tables.collectives.entry((device.into(), op, ranks)).or_default().push(CollectiveRow { bytes, seconds });
    Ok(true)
}

fn collected(row: &Row<'_>, tables: &mut Tables) -> Result<bool, TableError> {
    let source = row.text("source_id");
    if let Some(&(_, name, end)) = NETWORKS.iter().find(|n| n.0 == source) {
        let pattern = match op(row.text("op")) {
            Some(Op::AllReduce) => Pattern::AllReduce,
            Some(Op::AllGather) => Pattern::AllGather,
            Some(Op::ReduceScatter) => Pattern::ReduceScatter,
            Some(Op::AllToAll) | None => return Ok(false),
        };
        let (ranks, nodes, bytes) = (row.whole("n_gpus")?, row.whole("n_nodes")?, row.whole("size_bytes")?);
        // Bandwidths are printed to a hundredth; where they are all there is, small ones say nothing of the time.
        let seconds = match row.number("time_us") {
            Ok(time) => time * 1e-6,
            Err(_) => match row.number("busbw_GBps") {
                Ok(busy) if busy >= 0.5 => 2.0 * (ranks - 1) as f64 / ranks as f64 * bytes as f64 / (busy * 1e9),
                _ => return Ok(false),
            },
        };
        // Messages of a few bytes measure the software, not the network.
        if nodes < 2 || bytes < 4096 {
            return Ok(false);
        }
        tables.networks.entry(name.into()).or_default().push(NetworkRow { device: end.into(), pattern, ranks, nodes, bytes, seconds });
        return Ok(true);
    }
    let Some(device) = device(row.text("hw")) else { return Ok(false) };
    match (source, row.text("op")) {
        ("aiconfigurator_gemm" | "simumax_ops", "gemm") => {
            let Some(dtype) = dtype(row.text("dtype")) else { return Ok(false) };
            let (m, n, k) = (row.whole("m")?, row.whole("n")?, row.whole("k")?);
            let seconds = match row.number("time_us") {
                Ok(time) => time * 1e-6,
                Err(_) => 2.0 * m as f64 * n as f64 * k as f64 / (row.number("tflops")? * 1e12),
            };
            tables.gemm.entry((device.into(), dtype.into())).or_default().push(GemmRow { m, n, k, seconds });
            Ok(true)
        }
        ("aiconfigurator_nccl", name) => {
            let Some(op) = op(name) else { return Ok(false) };
            let (ranks, bytes, seconds) = (row.whole("n_gpus")?, row.whole("size_bytes")?, row.number("time_us")? * 1e-6);
            tables.collectives.entry((device.into(), op, ranks)).or_default().push(CollectiveRow { bytes, seconds });
            Ok(true)
        }
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Tables, String> {
        let mut tables = Tables::default();
        parse("t.csv", text.as_bytes(), &mut tables).map_err(|e| e.to_string())?;
        Ok(tables)
    }

    #[test]
    fn tables_are_known_by_their_columns() {
        let gemm = parsed("device,dtype,m,n,k,latency_ms\nNVIDIA H200,bfloat16,8,16,32,0.5\nother,bfloat16,1,1,1,1\n").unwrap();
        assert_eq!(gemm.gemm[&("h200".into(), "bf16".into())], [GemmRow { m: 8, n: 16, k: 32, seconds: 0.0005 }]);
        assert_eq!(gemm.passed_over, 1);
        let comm = parsed("device,op,dtype,num_gpus,message_elems,latency_ms\nNVIDIA B200,alltoall,half,4,512,0.25\n").unwrap();
        assert_eq!(comm.collectives[&("b200".into(), Op::AllToAll, 4)], [CollectiveRow { bytes: 1024, seconds: 0.00025 }]);
    }

    #[test]
    fn damage_is_named_with_its_place() {
        for (text, says) in [
            ("a,b\n1,2\n", "its columns are a,b"),
            ("device,dtype,m,n,k,latency_ms\nNVIDIA H200,bf16,8,x,32,0.5\n", "line 2: `n` is `x`"),
            ("device,dtype,m,n,k,latency_ms\nNVIDIA H200,bf16,8,8,32,-1\n", "`latency_ms` is `-1`"),
            ("device,dtype,m,n,k,latency_ms\nNVIDIA H200,bf16,8\n", "t.csv"),
            ("device,dtype,m,n,k,latency_ms\nNVIDIA H200,bf16,8,1e30,8,1\n", "line 2: `n` is `1e30`, expected a whole number from 1 to 9e15"),
            ("device,op,dtype,num_gpus,message_elems,latency_ms\nNVIDIA B200,alltoall,half,0.2,512,0.25\n", "`num_gpus` is `0.2`"),
            ("device,op,dtype,num_gpus,message_elems,latency_ms\nNVIDIA B200,alltoall,half,4,1e19,0.25\n", "`message_elems` is `1e19`"),
            ("", "its columns are "),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(says), "{text:?}: {error}");
        }
    }
}
