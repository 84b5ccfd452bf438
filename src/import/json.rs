//! A JSON document whose every complaint says where: file, line and column while parsing, file and JSON path after.
//!
//! The model: a [`Doc`] is a parsed file; an [`At`] is one value in it together with its path (`$.rope_scaling.factor`). All readers of user files
//! (models, clusters, plans) go through `At`, so a wrong value is always reported as *file, path, what was found, what would be right*.
//! Python writes `NaN`, `Infinity` and `-Infinity` where JSON has no word for them; outside strings they read as `null`.

use std::path::Path;

use serde_json::Value;

use super::ImportError;

/// A parsed JSON file.
#[derive(Clone, Debug)]
pub struct Doc {
    file: String,
    root: Value,
}

impl Doc {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// If it cannot be read or is not JSON.
    pub fn read(path: &Path) -> Result<Doc, ImportError> {
        let file = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|source| ImportError::Read { file: file.clone(), source })?;
        Doc::parse(&file, &bytes)
    }

    /// Parses the content of a file; `file` is what messages call it.
    ///
    /// # Errors
    /// If it is not JSON.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Doc, ImportError> {
        let root = serde_json::from_slice(&without_python_numbers(bytes)).map_err(|e| {
            let why = match e.classify() {
                serde_json::error::Category::Eof => "the file ends in the middle of a value: it is empty or was cut short".to_string(),
                _ => strip_position(&e.to_string()),
            };
            ImportError::Syntax { file: file.into(), line: e.line(), column: e.column(), why }
        })?;
        Ok(Doc { file: file.into(), root })
    }

    pub fn root(&self) -> At<'_> {
        At { file: &self.file, path: "$".into(), value: &self.root }
    }
}

/// A value in a document, and its place.
#[derive(Clone, Debug)]
pub struct At<'a> {
    file: &'a str,
    path: String,
    value: &'a Value,
}

impl<'a> At<'a> {
    pub fn file(&self) -> &'a str {
        self.file
    }
    pub fn path(&self) -> &str {
        &self.path
    }
    pub fn value(&self) -> &'a Value {
        self.value
    }
    /// The member `key`, if it is there and not null.
    pub fn get(&self, key: &str) -> Option<At<'a>> {
        self.get_or_null(key).filter(|at| !at.value.is_null())
    }
    /// The member `key`, if it is there.
    pub fn get_or_null(&self, key: &str) -> Option<At<'a>> {
        self.value.get(key).map(|value| At { file: self.file, path: member(&self.path, key), value })
    }
    /// The member `key`.
    ///
    /// # Errors
    /// If it is absent or null.
    pub fn need(&self, key: &str, right: &str) -> Result<At<'a>, ImportError> {
        self.get(key).ok_or_else(|| self.wrong_at(&member(&self.path, key), "is missing", right))
    }
    /// The complaint that this value is wrong.
    pub fn wrong(&self, found: &str, right: &str) -> ImportError {
        self.wrong_at(&self.path, found, right)
    }
    /// # Errors
    /// If it is not an integer in `range`.
    pub fn integer(&self, range: std::ops::RangeInclusive<u64>) -> Result<u64, ImportError> {
        let right = if *range.end() == u64::MAX {
            format!("an integer of at least {}", range.start())
        } else {
            format!("an integer from {} to {}", range.start(), range.end())
        };
        match self.value.as_u64() {
            Some(n) if range.contains(&n) => Ok(n),
            _ => Err(self.wrong(&self.found(), &right)),
        }
    }
    /// # Errors
    /// If it is not a number.
    pub fn number(&self) -> Result<f64, ImportError> {
        self.value.as_f64().filter(|n| n.is_finite()).ok_or_else(|| self.wrong(&self.found(), "a number"))
    }
    /// # Errors
    /// If it is not a number from 0 to less than 1; `right` says what it should be.
    pub fn rate(&self, right: &str) -> Result<f64, ImportError> {
        self.number().ok().filter(|n| (0.0..1.0).contains(n)).ok_or_else(|| self.wrong(&self.found(), right))
    }
    /// # Errors
    /// If it is not a number above zero.
    pub fn positive_number(&self) -> Result<f64, ImportError> {
        self.number().ok().filter(|n| *n > 0.0).ok_or_else(|| self.wrong(&self.found(), "a number above 0"))
    }
    /// # Errors
    /// If it is not `true` or `false`.
    pub fn boolean(&self) -> Result<bool, ImportError> {
        self.value.as_bool().ok_or_else(|| self.wrong(&self.found(), "true or false"))
    }
    /// # Errors
    /// If it is not a string.
    pub fn string(&self) -> Result<&'a str, ImportError> {
        self.value.as_str().ok_or_else(|| self.wrong(&self.found(), "a string"))
    }
    /// The elements of an array.
    ///
    /// # Errors
    /// If it is not an array.
    pub fn array(&self) -> Result<Vec<At<'a>>, ImportError> {
        let elements = self.value.as_array().ok_or_else(|| self.wrong(&self.found(), "an array"))?;
        Ok(elements.iter().enumerate().map(|(i, value)| At { file: self.file, path: format!("{}[{i}]", self.path), value }).collect())
    }
    /// The members of an object, sorted by key.
    ///
    /// # Errors
    /// If it is not an object.
    pub fn object(&self) -> Result<Vec<(&'a str, At<'a>)>, ImportError> {
        let members = self.value.as_object().ok_or_else(|| self.wrong(&self.found(), "an object"))?;
        Ok(members.iter().map(|(key, value)| (key.as_str(), At { file: self.file, path: member(&self.path, key), value })).collect())
    }
    /// # Errors
    /// If the object has a key that is not in `known`, or is not an object.
    pub fn only(&self, known: &[&str]) -> Result<(), ImportError> {
        for (key, at) in self.object()? {
            if !known.contains(&key) {
                let near = super::nearest(key, known.iter().copied()).map(|n| format!("; did you mean `{n}`?")).unwrap_or_default();
                return Err(at.wrong("is not a key that dplan knows", &format!("one of {}{near}", known.join(", "))));
            }
        }
        Ok(())
    }
    /// What stands here, in words.
    pub fn found(&self) -> String {
        match self.value {
            Value::Null => "is null".into(),
            Value::Bool(b) => format!("is {b}"),
            Value::Number(n) => format!("is {n}"),
            Value::String(s) => format!("is the string {:?}", shorten(s)),
            Value::Array(a) => format!("is an array of {} elements", a.len()),
            Value::Object(_) => "is an object".into(),
        }
    }

    fn wrong_at(&self, path: &str, found: &str, right: &str) -> ImportError {
        ImportError::Value { file: self.file.into(), path: path.into(), found: found.into(), right: right.into() }
    }
}

fn member(path: &str, key: &str) -> String {
    let plain = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if plain { format!("{path}.{key}") } else { format!("{path}[{:?}]", shorten(key)) }
}

fn shorten(s: &str) -> String {
    if s.chars().count() <= 60 { s.into() } else { s.chars().take(57).chain("...".chars()).collect() }
}

/// `serde_json` says the position inside the message; it is said in front already.
fn strip_position(message: &str) -> String {
    message.rfind(" at line ").map_or(message, |at| &message[..at]).into()
}

/// `NaN`, `Infinity` and `-Infinity` outside strings become `null`; line numbers stay, and columns but for `NaN`, which is a byte shorter.
fn without_python_numbers(bytes: &[u8]) -> Vec<u8> {
    let words: [(&[u8], &[u8]); 3] = [(b"-Infinity", b"null     "), (b"Infinity", b"null    "), (b"NaN", b"null")];
    let mut out = Vec::with_capacity(bytes.len());
    let (mut at, mut in_string) = (0, false);
    while at < bytes.len() {
        let byte = bytes[at];
        if in_string {
            in_string = byte != b'"';
            out.push(byte);
            if byte == b'\\'
                && let Some(&escaped) = bytes.get(at + 1)
            {
                out.push(escaped);
                at += 1;
            }
            at += 1;
        } else if let Some((word, null)) = words.iter().find(|(word, _)| bytes[at..].starts_with(word)) {
            out.extend_from_slice(null);
            at += word.len();
        } else {
            in_string = byte == b'"';
            out.push(byte);
            at += 1;
        }
    }
    out
}
