//! JSON in bounded memory: a document is walked value by value, and only one value is ever held.
//!
//! A trace is one object, `{…, "traceEvents": [event, event, …], …}`, or the bare array. [`walk`] frames each member and each event by counting
//! brackets outside strings, hands its text on, and forgets it; what is inside is the business of whoever gets the text. Framing does not validate,
//! so one damaged event does not lose the ones after it, and a file that was cut short still gives every event before the cut: [`Cut`] says where.

use std::io::{self, Read};

/// No member and no event is longer than this; what is, is not a trace.
const LONGEST: usize = 64 << 20;
const CHUNK: usize = 256 << 10;

/// Gets the values of a document.
pub trait Sink {
    /// Whether the value of this member is of interest; others are passed over without being held.
    fn wants(&mut self, member: &str) -> bool;
    fn member(&mut self, name: &str, value: &str);
    /// `at` is where the event begins.
    fn event(&mut self, event: &str, at: u64);
}

/// Why a walk stopped before the end of the document.
#[derive(Debug)]
pub struct Cut {
    pub at: u64,
    pub why: Why,
}

#[derive(Debug)]
pub enum Why {
    /// The input ended inside the document.
    Ended,
    /// The input could not be read on: the archive is damaged, or the file system failed.
    Unreadable(io::Error),
    Syntax(String),
}

impl Cut {
    pub fn describe(&self) -> String {
        match &self.why {
            Why::Ended => "the file ends in the middle: it was cut short".into(),
            Why::Unreadable(error) => format!("cannot be read further: {error}"),
            Why::Syntax(what) => what.clone(),
        }
    }
}

/// Walks a whole document. `Ok(false)` if it is JSON but neither an object with `traceEvents` nor an array.
///
/// # Errors
/// [`Cut`] with the place; everything before it has been handed on.
pub fn walk(input: impl Read, sink: &mut dyn Sink) -> Result<bool, Cut> {
    let mut json = Json::new(input);
    match json.peek()? {
        Some(b'[') => json.events(sink).map(|()| true),
        Some(b'{') => json.object(sink),
        Some(_) => Err(json.syntax("expected `{` or `[`")),
        None => Err(json.cut(Why::Ended)),
    }
}

struct Json<R> {
    input: R,
    buffer: Vec<u8>,
    /// The unread part of `buffer` is `at..filled`.
    at: usize,
    filled: usize,
    /// Bytes that were in `buffer` before its first.
    before: u64,
    ended: bool,
}

impl<R: Read> Json<R> {
    fn new(input: R) -> Json<R> {
        Json { input, buffer: vec![0; CHUNK], at: 0, filled: 0, before: 0, ended: false }
    }

    fn position(&self) -> u64 {
        self.before + self.at as u64
    }

    fn cut(&self, why: Why) -> Cut {
        Cut { at: self.position(), why }
    }

    fn syntax(&self, what: &str) -> Cut {
        let found: String = String::from_utf8_lossy(&self.buffer[self.at..self.filled.min(self.at + 20)]).into_owned();
        self.cut(Why::Syntax(format!("{what}, found `{}`", found.escape_debug())))
    }

    /// Reads more; false at the end of the input.
    fn fill(&mut self) -> Result<bool, Cut> {
        if self.ended {
            return Ok(false);
        }
        if self.at > 0 {
            self.buffer.copy_within(self.at..self.filled, 0);
            self.before += self.at as u64;
            self.filled -= self.at;
            self.at = 0;
        }
        if self.filled == self.buffer.len() {
            self.buffer.resize(self.buffer.len() * 2, 0);
        }
        loop {
            match self.input.read(&mut self.buffer[self.filled..]) {
                Ok(0) => self.ended = true,
                Ok(n) => self.filled += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(self.cut(Why::Ended)),
                Err(error) => return Err(self.cut(Why::Unreadable(error))),
            }
            return Ok(!self.ended);
        }
    }

    /// The next byte that is not white space, left unread.
    fn peek(&mut self) -> Result<Option<u8>, Cut> {
        loop {
            while self.at < self.filled {
                let byte = self.buffer[self.at];
                if !byte.is_ascii_whitespace() {
                    return Ok(Some(byte));
                }
                self.at += 1;
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), Cut> {
        match self.peek()? {
            Some(found) if found == byte => {
                self.at += 1;
                Ok(())
            }
            Some(_) => Err(self.syntax(&format!("expected `{}`", byte as char))),
            None => Err(self.cut(Why::Ended)),
        }
    }

    /// After a value: true if a comma and so another value follows, false if `close` does.
    fn another(&mut self, close: u8) -> Result<bool, Cut> {
        match self.peek()? {
            Some(b',') => {
                self.at += 1;
                Ok(true)
            }
            Some(byte) if byte == close => {
                self.at += 1;
                Ok(false)
            }
            Some(_) => Err(self.syntax(&format!("expected `,` or `{}`", close as char))),
            None => Err(self.cut(Why::Ended)),
        }
    }

    fn object(&mut self, sink: &mut dyn Sink) -> Result<bool, Cut> {
        self.expect(b'{')?;
        let mut found = false;
        if self.peek()? == Some(b'}') {
            return Ok(false);
        }
        loop {
            if self.peek()? != Some(b'"') {
                return Err(if self.at < self.filled { self.syntax("expected a member's name") } else { self.cut(Why::Ended) });
            }
            let length = self.frame(Hold::Whole)?;
            let quoted = self.text(length);
            let name = serde_json::from_str::<String>(&quoted).map_err(|e| self.cut(Why::Syntax(format!("a member's name: {e}"))))?;
            self.at += length;
            self.expect(b':')?;
            if name == "traceEvents" && self.peek()? == Some(b'[') {
                found = true;
                self.events(sink)?;
            } else if sink.wants(&name) {
                self.peek()?;
                let length = self.frame(Hold::Whole)?;
                sink.member(&name, &self.text(length));
                self.at += length;
            } else {
                self.peek()?;
                let length = self.frame(Hold::Nothing)?;
                self.at += length;
            }
            if !self.another(b'}')? {
                return Ok(found);
            }
        }
    }

    fn events(&mut self, sink: &mut dyn Sink) -> Result<(), Cut> {
        self.expect(b'[')?;
        if self.peek()? == Some(b']') {
            self.at += 1;
            return Ok(());
        }
        loop {
            // A comma before the end is what Chrome's own format allows.
            if self.peek()? == Some(b']') {
                self.at += 1;
                return Ok(());
            }
            let length = self.frame(Hold::Whole)?;
            sink.event(&self.text(length), self.position());
            self.at += length;
            if !self.another(b']')? {
                return Ok(());
            }
        }
    }

    /// The next value, whose first byte has been peeked. Names are bytes in some old traces; what is not UTF-8 is replaced.
    fn text(&self, length: usize) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.buffer[self.at..self.at + length])
    }

    /// The length of the next value, or of what is left of it where it is not held.
    fn frame(&mut self, hold: Hold) -> Result<usize, Cut> {
        let mut scan = Scan::default();
        let mut length = 0;
        loop {
            if let Some(more) = scan.run(&self.buffer[self.at + length..self.filled]) {
                length += more;
                return if scan.empty { Err(self.syntax("expected a value")) } else { Ok(length) };
            }
            length = self.filled - self.at;
            match hold {
                Hold::Nothing => {
                    self.at = self.filled;
                    length = 0;
                }
                Hold::Whole if length > LONGEST => return Err(self.cut(Why::Syntax("a value of more than 64 MiB".into()))),
                Hold::Whole => {}
            }
            if !self.fill()? {
                return Err(self.cut(Why::Ended));
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Hold {
    Whole,
    Nothing,
}

/// Where a value ends: a container at its matching bracket, a string at its quote, anything else before a delimiter.
struct Scan {
    depth: usize,
    string: bool,
    escaped: bool,
    scalar: bool,
    empty: bool,
}

impl Default for Scan {
    fn default() -> Scan {
        Scan { depth: 0, string: false, escaped: false, scalar: false, empty: true }
    }
}

impl Scan {
    /// Bytes of `window` up to the end of the value, or `None` if the value goes on.
    fn run(&mut self, window: &[u8]) -> Option<usize> {
        for (i, &byte) in window.iter().enumerate() {
            if self.string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => {
                        self.string = false;
                        if self.depth == 0 {
                            return Some(i + 1);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            match byte {
                b',' | b'}' | b']' | b':' if self.depth == 0 => return Some(i),
                b' ' | b'\n' | b'\r' | b'\t' if self.depth == 0 && self.scalar => return Some(i),
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Some(i + 1);
                    }
                }
                b'"' => self.string = true,
                _ if self.depth == 0 => self.scalar = true,
                _ => {}
            }
            self.empty = false;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Seen {
        members: Vec<(String, String)>,
        events: Vec<(String, u64)>,
    }

    impl Sink for Seen {
        fn wants(&mut self, member: &str) -> bool {
            member != "skip"
        }
        fn member(&mut self, name: &str, value: &str) {
            self.members.push((name.into(), value.into()));
        }
        fn event(&mut self, event: &str, at: u64) {
            self.events.push((event.into(), at));
        }
    }

    /// Gives one byte a call, so that every value crosses a boundary.
    struct Drip<'a>(&'a [u8]);

    impl Read for Drip<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            match (self.0.split_first(), into.first_mut()) {
                (Some((&byte, rest)), Some(first)) => {
                    *first = byte;
                    self.0 = rest;
                    Ok(1)
                }
                _ => Ok(0),
            }
        }
    }

    const TEXT: &str = r#" {"a": 1, "skip" : {"x": ["]}", {}]}, "traceEvents": [ {"n":"\"]}"}, 3 ,{}, ], "b\n":"x,}" , "c":[[]]} "#;

    #[test]
    fn values_are_framed_wherever_the_input_is_split() {
        let (mut whole, mut drip) = (Seen::default(), Seen::default());
        assert!(walk(TEXT.as_bytes(), &mut whole).unwrap());
        assert!(walk(Drip(TEXT.as_bytes()), &mut drip).unwrap());
        let members: Vec<(&str, &str)> = whole.members.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        assert_eq!(members, [("a", "1"), ("b\n", "\"x,}\""), ("c", "[[]]")]);
        let events: Vec<&str> = whole.events.iter().map(|(e, _)| e.as_str()).collect();
        assert_eq!(events, [r#"{"n":"\"]}"}"#, "3", "{}"]);
        for (event, at) in &whole.events {
            assert!(TEXT[*at as usize..].starts_with(event.as_str()));
        }
        assert_eq!((whole.members, whole.events), (drip.members, drip.events));
    }

    #[test]
    fn every_cut_says_where_and_keeps_what_came_before() {
        let end = TEXT.rfind('}').unwrap();
        let mut kept = 0;
        for length in 0..=end {
            let mut seen = Seen::default();
            let cut = walk(&TEXT.as_bytes()[..length], &mut seen).expect_err("a part of a document is not a document");
            assert!(matches!(cut.why, Why::Ended), "{length}: {}", cut.describe());
            assert!(cut.at <= length as u64);
            assert!(seen.events.len() >= kept, "cutting later loses nothing");
            kept = seen.events.len();
        }
        assert_eq!(kept, 3);
    }

    #[test]
    fn what_is_no_trace_is_refused_in_its_place() {
        for (text, at) in
            [("x", 0), ("{1:2}", 1), (r#"{"a" 1}"#, 5), (r#"{"a":}"#, 5), (r#"{"traceEvents":[{} {}]}"#, 19), (r#"{"traceEvents":[}"#, 16)]
        {
            let cut = walk(text.as_bytes(), &mut Seen::default()).expect_err(text);
            assert!(matches!(cut.why, Why::Syntax(_)), "{text}: {}", cut.describe());
            assert_eq!(cut.at, at, "{text}");
        }
        assert!(!walk(&b"{}"[..], &mut Seen::default()).unwrap());
        assert!(!walk(&br#"{"nodes":[1]}"#[..], &mut Seen::default()).unwrap());
        assert!(walk(&b"[]"[..], &mut Seen::default()).unwrap());
    }
}
