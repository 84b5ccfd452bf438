//! The safetensors file format: a length, a JSON header, raw little-endian tensors.
//!
//! Invariants of an opened file (a file that breaks one is refused, naming the tensor): every range lies in the file, its length is that of the
//! shape and type, ranges do not overlap. Tensors are read one at a time, by position, so a file may be larger than memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use dplan_ir::dtype::DType;
use half::{bf16, f16};

use crate::import::ImportError;
use crate::import::json::{At, Doc};

/// Largest header: the format's own bound.
const MAX_HEADER: u64 = 100_000_000;

/// Element types that are not weights but may stand in a file, and their sizes.
const OTHER_TYPES: [(&str, u64); 11] =
    [("BOOL", 1), ("U8", 1), ("I8", 1), ("F8_E4M3", 1), ("F8_E5M2", 1), ("I16", 2), ("U16", 2), ("I32", 4), ("U32", 4), ("I64", 8), ("U64", 8)];

/// One tensor of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// `None`: not a floating-point type that dplan reads.
    pub dtype: Option<DType>,
    /// As the file spells it.
    pub type_name: String,
    pub shape: Vec<u64>,
    /// Bytes from the end of the header.
    begin: u64,
    end: u64,
}

/// A file of tensors, open for reading.
#[derive(Debug)]
pub struct TensorFile {
    pub name: String,
    pub tensors: BTreeMap<String, Entry>,
    file: File,
    /// Where the header ends.
    data: u64,
}

impl TensorFile {
    /// Reads the header.
    ///
    /// # Errors
    /// If the file cannot be read or is not a sound safetensors file.
    pub fn open(path: &Path) -> Result<TensorFile, ImportError> {
        let name = path.display().to_string();
        let unreadable = |source| ImportError::Read { file: name.clone(), source };
        let malformed = |why: String| ImportError::Graph { file: name.clone(), why: format!("not a safetensors file: {why}") };
        let file = File::open(path).map_err(unreadable)?;
        let size = file.metadata().map_err(unreadable)?.len();
        let mut length = [0u8; 8];
        if size < 8 {
            return Err(malformed(format!("it has {size} bytes, fewer than the 8 of the header's length")));
        }
        file.read_exact_at(&mut length, 0).map_err(unreadable)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length > size - 8 {
            return Err(malformed(format!("it says that its header has {length} bytes; the file has {size}")));
        }
        let mut header = vec![0u8; length as usize];
        file.read_exact_at(&mut header, 8).map_err(unreadable)?;
        let doc = Doc::parse(&format!("{name} (header)"), &header)?;
        let data = size - 8 - length;
        let mut tensors = BTreeMap::new();
        for (tensor, at) in doc.root().object()? {
            if tensor != "__metadata__" {
                tensors.insert(tensor.to_string(), entry(&at, data)?);
            }
        }
        check_ranges(&tensors).map_err(malformed)?;
        Ok(TensorFile { name, tensors, file, data: 8 + length })
    }

    /// Where a tensor begins in the file.
    pub fn offset(&self, entry: &Entry) -> u64 {
        self.data + entry.begin
    }

    /// The raw bytes of a tensor.
    ///
    /// # Errors
    /// If the file can no longer be read.
    pub fn bytes(&self, entry: &Entry) -> Result<Vec<u8>, ImportError> {
        let mut bytes = vec![0; (entry.end - entry.begin) as usize];
        let read = self.file.read_exact_at(&mut bytes, self.data + entry.begin);
        read.map_err(|source| ImportError::Read { file: self.name.clone(), source })?;
        Ok(bytes)
    }
}

/// How the format spells a type of weights.
pub fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
        DType::F16 => "F16",
        DType::I32 => "I32",
    }
}

/// Element `index` of little-endian `bytes`.
pub fn decode(dtype: DType, bytes: &[u8], index: usize) -> f64 {
    let at = index * dtype.size() as usize;
    let word = |n: usize| &bytes[at..at + n];
    match dtype {
        DType::F64 => f64::from_le_bytes(word(8).try_into().unwrap_or_default()),
        DType::F32 => f32::from_le_bytes(word(4).try_into().unwrap_or_default()).into(),
        DType::Bf16 => bf16::from_le_bytes(word(2).try_into().unwrap_or_default()).into(),
        DType::F16 => f16::from_le_bytes(word(2).try_into().unwrap_or_default()).into(),
        DType::I32 => i32::from_le_bytes(word(4).try_into().unwrap_or_default()).into(),
    }
}

/// Stores `value`, rounded to `dtype`, as element `index` of little-endian `bytes`.
pub fn encode(dtype: DType, value: f64, bytes: &mut [u8], index: usize) {
    let at = index * dtype.size() as usize;
    // Short types by way of f32, as a step rounds masters: `half` leaves out the last bits of an f64, and so rounds some the other way.
    match dtype {
        DType::F64 => bytes[at..at + 8].copy_from_slice(&value.to_le_bytes()),
        DType::F32 => bytes[at..at + 4].copy_from_slice(&(value as f32).to_le_bytes()),
        DType::Bf16 => bytes[at..at + 2].copy_from_slice(&bf16::from_f32(value as f32).to_le_bytes()),
        DType::F16 => bytes[at..at + 2].copy_from_slice(&f16::from_f32(value as f32).to_le_bytes()),
        DType::I32 => bytes[at..at + 4].copy_from_slice(&(value as i32).to_le_bytes()),
    }
}

/// The header of a file that holds `tensors` (name, type, shape) in this order, without gaps, and where each begins.
pub fn header(tensors: &[(String, DType, Vec<u64>)]) -> (Vec<u8>, Vec<u64>) {
    let mut members = serde_json::Map::new();
    members.insert("__metadata__".into(), serde_json::json!({ "format": "pt" }));
    let (mut begins, mut at) = (Vec::with_capacity(tensors.len()), 0);
    for (name, dtype, shape) in tensors {
        let end = at + shape.iter().product::<u64>() * dtype.size();
        members.insert(name.clone(), serde_json::json!({ "dtype": type_name(*dtype), "shape": shape, "data_offsets": [at, end] }));
        begins.push(at);
        at = end;
    }
    let mut text = serde_json::Value::Object(members).to_string().into_bytes();
    // Tensors begin at a multiple of 8 bytes.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(&text);
    let start = bytes.len() as u64;
    (bytes, begins.into_iter().map(|b| b + start).collect())
}

fn entry(at: &At<'_>, data: u64) -> Result<Entry, ImportError> {
    let spelled = at.need("dtype", "an element type")?.string()?;
    let dtype = [DType::F64, DType::F32, DType::Bf16, DType::F16].into_iter().find(|&t| type_name(t) == spelled);
    let shape_at = at.need("shape", "an array of sizes")?;
    let shape = shape_at.array()?.iter().map(|n| n.integer(0..=u64::MAX)).collect::<Result<Vec<u64>, _>>()?;
    let offsets = at.need("data_offsets", "an array of two byte positions")?;
    let [begin, end] = offsets.array()?.iter().map(|n| n.integer(0..=data)).collect::<Result<Vec<u64>, _>>()?[..] else {
        return Err(offsets.wrong(&offsets.found(), "an array of two byte positions"));
    };
    let size = dtype.map(DType::size).or_else(|| OTHER_TYPES.iter().find(|(name, _)| *name == spelled).map(|&(_, size)| size));
    let bytes = size.and_then(|size| shape.iter().try_fold(size, |n, &d| n.checked_mul(d)));
    let consistent = begin <= end && (size.is_none() || bytes == Some(end - begin));
    if !consistent {
        return Err(offsets.wrong(&format!("is {begin} to {end}"), &format!("as long as {spelled} {shape:?}")));
    }
    Ok(Entry { dtype, type_name: spelled.into(), shape, begin, end })
}

fn check_ranges(tensors: &BTreeMap<String, Entry>) -> Result<(), String> {
    let mut ranges: Vec<(u64, u64, &str)> = tensors.iter().map(|(name, e)| (e.begin, e.end, name.as_str())).collect();
    ranges.sort_unstable();
    match ranges.windows(2).find(|w| w[1].0 < w[0].1) {
        Some(w) => Err(format!("`{}` and `{}` overlap", w[0].2, w[1].2)),
        None => Ok(()),
    }
}
