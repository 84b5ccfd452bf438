//! A cursor over tokens, with the pieces of grammar that all levels share.

use std::borrow::Cow;
use std::fmt::Display;
use std::str::FromStr;

use crate::text::ParseError;
use crate::text::lexer::{self, Name, Token};

pub type Parsed<T> = Result<T, ParseError>;

/// Reads one text; `token` is the one in hand.
pub struct Parser<'a> {
    text: &'a str,
    token: Token<'a>,
    start: usize,
    end: usize,
}

/// A name where it stands, to be looked up when all names are known.
#[derive(Clone, Debug)]
pub struct Ref<'a> {
    pub name: Name<'a>,
    pub at: usize,
}

impl<'a> Parser<'a> {
    pub fn new(text: &'a str) -> Parser<'a> {
        let (token, start, end) = lexer::next(text, 0);
        Parser { text, token, start, end }
    }

    /// Byte offset of the token in hand: what errors about it point at.
    pub fn at(&self) -> usize {
        self.start
    }
    pub fn is_end(&self) -> bool {
        self.token == Token::End
    }

    /// Takes the token in hand.
    fn bump(&mut self) -> Token<'a> {
        let (next, start, end) = lexer::next(self.text, self.end);
        (self.start, self.end) = (start, end);
        std::mem::replace(&mut self.token, next)
    }

    /// An error at the token in hand, which is not what was expected.
    pub fn expected(&self, what: impl Display) -> ParseError {
        let found = match &self.token {
            Token::End => "the end of the text".to_string(),
            Token::Bad(right) => return self.wrong(self.start, self.quoted(), right),
            _ => self.quoted(),
        };
        self.wrong(self.start, found, what)
    }

    /// An error at `at`.
    pub fn wrong(&self, at: usize, found: impl Display, right: impl Display) -> ParseError {
        let before = &self.text[..at];
        let line_start = before.rfind('\n').map_or(0, |n| n + 1);
        ParseError {
            line: before.matches('\n').count() as u32 + 1,
            column: before[line_start..].chars().count() as u32 + 1,
            found: found.to_string(),
            expected: right.to_string(),
        }
    }

    /// An error about a word that is none of `known`.
    pub fn unknown<S: AsRef<str>>(&self, at: usize, kind: &str, word: &str, known: &[S]) -> ParseError {
        let right = match nearest(word, known) {
            Some(near) => format!("perhaps `{near}`"),
            None if known.is_empty() => format!("a {kind} that exists: there is none"),
            None => {
                let list: Vec<String> = known.iter().take(40).map(|k| format!("`{}`", k.as_ref())).collect();
                format!("one of {}{}", list.join(", "), if known.len() > 40 { ", …" } else { "" })
            }
        };
        self.wrong(at, format!("`{}`, which is no {kind}", clip(word)), right)
    }

    pub fn is_sign(&self, sign: char) -> bool {
        self.token == Token::Sign(sign)
    }
    pub fn is_word(&self, word: &str) -> bool {
        self.token == Token::Word(word)
    }
    pub fn is_name(&self) -> bool {
        matches!(self.token, Token::Name(_))
    }
    pub fn take_sign(&mut self, sign: char) -> bool {
        let is = self.is_sign(sign);
        if is {
            self.bump();
        }
        is
    }
    pub fn take_word(&mut self, word: &str) -> bool {
        let is = self.is_word(word);
        if is {
            self.bump();
        }
        is
    }
    pub fn sign(&mut self, sign: char) -> Parsed<()> {
        if self.take_sign(sign) { Ok(()) } else { Err(self.expected(format!("`{sign}`"))) }
    }
    pub fn word(&mut self, word: &str) -> Parsed<()> {
        if self.take_word(word) { Ok(()) } else { Err(self.expected(format!("`{word}`"))) }
    }

    /// Any word; `what` says what kind.
    pub fn any_word(&mut self, what: &str) -> Parsed<&'a str> {
        match self.token {
            Token::Word(word) => {
                self.bump();
                Ok(word)
            }
            _ => Err(self.expected(what)),
        }
    }

    /// A word, or any string in quotes.
    pub fn label(&mut self, what: &str) -> Parsed<Cow<'a, str>> {
        match &mut self.token {
            Token::Word(word) => {
                let word = *word;
                self.bump();
                Ok(Cow::Borrowed(word))
            }
            Token::Text(text) => {
                let text = std::mem::take(text);
                self.bump();
                Ok(text)
            }
            _ => Err(self.expected(what)),
        }
    }

    pub fn string(&mut self, what: &str) -> Parsed<Cow<'a, str>> {
        match &self.token {
            Token::Text(_) => self.label(what),
            _ => Err(self.expected(what)),
        }
    }

    /// A `%name`.
    pub fn name(&mut self, what: &str) -> Parsed<Ref<'a>> {
        let at = self.start;
        if !self.is_name() {
            return Err(self.expected(what));
        }
        match self.bump() {
            Token::Name(name) => Ok(Ref { name, at }),
            _ => Err(self.expected(what)),
        }
    }

    /// A whole number that fits `T`.
    pub fn integer<T: FromStr>(&mut self, what: &str) -> Parsed<T> {
        let Token::Number(digits) = self.token else {
            return Err(self.expected(what));
        };
        let number = digits.parse().map_err(|_| self.expected(format!("{what} (a whole number, not too large)")))?;
        self.bump();
        Ok(number)
    }

    /// A real number; `inf` and `nan` are numbers too.
    pub fn real(&mut self, what: &str) -> Parsed<f64> {
        let negative = self.take_sign('-');
        let number: f64 = match self.token {
            Token::Number(digits) => digits.parse().map_err(|_| self.expected(format!("{what} (a number)")))?,
            Token::Word("inf") => f64::INFINITY,
            Token::Word("nan") => f64::NAN,
            _ => return Err(self.expected(what)),
        };
        self.bump();
        Ok(if negative { -number } else { number })
    }

    /// `key=` and a whole number.
    pub fn integer_of<T: FromStr>(&mut self, key: &str) -> Parsed<T> {
        self.word(key)?;
        self.sign('=')?;
        self.integer(&format!("the value of `{key}`"))
    }
    /// `key=` and a real number.
    pub fn real_of(&mut self, key: &str) -> Parsed<f64> {
        self.word(key)?;
        self.sign('=')?;
        self.real(&format!("the value of `{key}`"))
    }

    /// An id spelled with its prefix: `buf12`.
    pub fn id(&mut self, prefix: &str, what: &str) -> Parsed<u32> {
        if let Token::Word(word) = self.token
            && let Some(digits) = word.strip_prefix(prefix)
            && digits.bytes().all(|b| b.is_ascii_digit())
            && let Ok(id) = digits.parse()
        {
            self.bump();
            return Ok(id);
        }
        Err(self.expected(what))
    }

    /// Whether the token in hand is an id with this prefix.
    pub fn is_id(&self, prefix: &str) -> bool {
        matches!(self.token, Token::Word(word) if word.strip_prefix(prefix).is_some_and(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit())))
    }

    /// `#` and a number, if there is one.
    pub fn ordinal(&mut self) -> Parsed<Option<u32>> {
        if self.take_sign('#') { self.integer("a number behind `#`").map(Some) } else { Ok(None) }
    }

    /// `open item, item, … close`.
    pub fn list<T>(&mut self, open: char, close: char, mut item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        self.sign(open)?;
        let mut items = Vec::new();
        if self.take_sign(close) {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.take_sign(close) {
                return Ok(items);
            }
            if !self.take_sign(',') {
                return Err(self.expected(format!("`,` or `{close}`")));
            }
        }
    }

    /// `->`.
    pub fn arrow(&mut self) -> Parsed<()> {
        let at = self.start;
        self.sign('-')?;
        if self.take_sign('>') { Ok(()) } else { Err(self.wrong(at, "`-`", "`->`")) }
    }

    fn quoted(&self) -> String {
        format!("`{}`", clip(&self.text[self.start..self.end.max(self.start)]))
    }
}

/// The first characters of what may be long.
fn clip(s: &str) -> String {
    if s.chars().count() <= 60 { s.to_string() } else { s.chars().take(57).chain("...".chars()).collect() }
}

/// The word of `known` that a slip of the hand turned into `word`.
pub fn nearest<'k, S: AsRef<str>>(word: &str, known: &'k [S]) -> Option<&'k str> {
    if word.len() > 100 {
        return None;
    }
    let allowed = 1 + word.chars().count() / 4;
    known
        .iter()
        .map(AsRef::as_ref)
        .filter(|k| k.len() <= 2 * word.len() + 2)
        .map(|k| (distance(word, k), k))
        .filter(|(d, _)| *d <= allowed)
        .min()
        .map(|(_, k)| k)
}

/// Edits (insert, delete, replace) from one word to the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
