//! Tokens of the text form.
//!
//! Spaces, line ends and `// comments` separate tokens and mean nothing else. A token borrows from the text but where a string has escapes.

use std::borrow::Cow;

#[derive(Clone, PartialEq, Debug)]
pub enum Token<'a> {
    /// `[A-Za-z_][A-Za-z0-9_.]*`
    Word(&'a str),
    /// Begins with a digit; whether it is a good number is for its reader to say.
    Number(&'a str),
    /// `"…"`, unescaped.
    Text(Cow<'a, str>),
    /// `%name`, `%"any name"`, either with `#7`.
    Name(Name<'a>),
    /// Any other single character.
    Sign(char),
    /// A token that cannot be, and what would be right.
    Bad(&'static str),
    End,
}

/// A value's name, and its id where the name alone does not say which value is meant.
#[derive(Clone, PartialEq, Debug)]
pub struct Name<'a> {
    pub text: Cow<'a, str>,
    pub id: Option<u32>,
}

/// Whether `s` can be written without quotes behind a `%`.
pub fn is_bare_name(s: &str) -> bool {
    !s.is_empty() && s.bytes().all(is_name_byte)
}

/// Whether `s` can be written without quotes as a word.
pub fn is_word(s: &str) -> bool {
    is_bare_name(s) && s.bytes().next().is_some_and(is_word_start)
}

/// Appends `s` in quotes.
pub fn quote(out: &mut String, s: &str) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c.is_control() => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out.push('"');
}

/// The token that begins at or behind `from`, where it begins, and where it ends.
pub fn next(text: &str, from: usize) -> (Token<'_>, usize, usize) {
    let start = skip_space(text, from);
    let Some(first) = text[start..].chars().next() else {
        return (Token::End, start, start);
    };
    let (token, end) = match first {
        '%' => name(text, start + 1),
        '"' => string(text, start),
        c if c.is_ascii() && is_word_start(c as u8) => {
            let end = run(text, start, is_name_byte);
            (Token::Word(&text[start..end]), end)
        }
        c if c.is_ascii_digit() => {
            let end = number_end(text, start);
            (Token::Number(&text[start..end]), end)
        }
        c => (Token::Sign(c), start + c.len_utf8()),
    };
    (token, start, end)
}

fn is_word_start(b: u8) -> bool {
    b.is_ascii_alphabetic() || b == b'_'
}

fn is_name_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b == b'.'
}

fn run(text: &str, from: usize, of: impl Fn(u8) -> bool) -> usize {
    text.as_bytes()[from..].iter().position(|&b| !of(b)).map_or(text.len(), |n| from + n)
}

fn skip_space(text: &str, mut at: usize) -> usize {
    loop {
        at = run(text, at, |b| b.is_ascii_whitespace());
        if !text[at..].starts_with("//") {
            return at;
        }
        at = run(text, at, |b| b != b'\n');
    }
}

/// Digits, letters and dots, and a sign directly behind an exponent's `e`.
fn number_end(text: &str, start: usize) -> usize {
    let bytes = text.as_bytes();
    let mut end = run(text, start, is_name_byte);
    while end < bytes.len() && matches!(bytes[end], b'+' | b'-') && matches!(bytes[end - 1], b'e' | b'E') {
        end = run(text, end + 1, is_name_byte);
    }
    end
}

fn name(text: &str, at: usize) -> (Token<'_>, usize) {
    let (label, end) = if text[at..].starts_with('"') {
        match string(text, at) {
            (Token::Text(label), end) => (label, end),
            bad => return bad,
        }
    } else {
        let end = run(text, at, is_name_byte);
        if end == at {
            return (Token::Bad("a name behind `%`"), at);
        }
        (Cow::Borrowed(&text[at..end]), end)
    };
    if !text[end..].starts_with('#') {
        return (Token::Name(Name { text: label, id: None }), end);
    }
    let digits = run(text, end + 1, |b| b.is_ascii_digit());
    match text[end + 1..digits].parse() {
        Ok(id) => (Token::Name(Name { text: label, id: Some(id) }), digits),
        Err(_) => (Token::Bad("the number of a value behind `#`"), digits),
    }
}

fn string(text: &str, start: usize) -> (Token<'_>, usize) {
    let body = start + 1;
    let mut owned: Option<String> = None;
    let mut chars = text[body..].char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => {
                let label = owned.map_or(Cow::Borrowed(&text[body..body + at]), Cow::Owned);
                return (Token::Text(label), body + at + 1);
            }
            '\\' => {
                let plain = owned.get_or_insert_with(|| text[body..body + at].to_string());
                match chars.next().map(|(_, c)| c) {
                    Some('n') => plain.push('\n'),
                    Some(c @ ('"' | '\\')) => plain.push(c),
                    Some('u') => match unicode(&mut chars) {
                        Some(c) => plain.push(c),
                        None => return (Token::Bad("an escape like `\\u{1f}`"), body + at),
                    },
                    _ => return (Token::Bad("one of the escapes `\\\"`, `\\\\`, `\\n`, `\\u{…}`"), body + at),
                }
            }
            '\n' => return (Token::Bad("a `\"` that closes the string on its line"), body + at),
            c => {
                if let Some(plain) = &mut owned {
                    plain.push(c);
                }
            }
        }
    }
    (Token::Bad("a `\"` that closes the string on its line"), text.len())
}

/// `{1f}`, behind `\u`.
fn unicode(chars: &mut std::str::CharIndices<'_>) -> Option<char> {
    if chars.next()?.1 != '{' {
        return None;
    }
    let mut code: u32 = 0;
    loop {
        match chars.next()?.1 {
            '}' => return char::from_u32(code),
            c => code = code.checked_mul(16)?.checked_add(c.to_digit(16)?)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<Token<'_>> {
        let mut at = 0;
        let mut all = Vec::new();
        loop {
            let (token, _, end) = next(text, at);
            if token == Token::End {
                return all;
            }
            all.push(token);
            at = end;
        }
    }

    #[test]
    fn tokens_are_cut_where_they_end() {
        let name = |s: &'static str, id| Token::Name(Name { text: s.into(), id });
        assert_eq!(
            tokens("a.b%x.1 // gone %y\n%\"q \\\"\\u{41}\"#7 1e-5,-3 b->c"),
            [
                Token::Word("a.b"),
                name("x.1", None),
                name("q \"A", Some(7)),
                Token::Number("1e-5"),
                Token::Sign(','),
                Token::Sign('-'),
                Token::Number("3"),
                Token::Word("b"),
                Token::Sign('-'),
                Token::Sign('>'),
                Token::Word("c"),
            ]
        );
    }

    #[test]
    fn any_string_survives_quoting() {
        for s in ["", "plain", "\"", "\\", "a\nb\r\t\u{0}\u{7f}", "größe %x#3 // no", "日本"] {
            let mut quoted = String::new();
            quote(&mut quoted, s);
            assert_eq!(tokens(&quoted), [Token::Text(s.into())], "{quoted}");
        }
    }

    #[test]
    fn what_cannot_be_a_token_is_bad() {
        for s in ["% x", "\"open", "\"a\nb\"", "%x#", "%x#99999999999", "\"\\q\"", "\"\\u{110000}\"", "\"\\u{fffffffffff}\""] {
            assert!(tokens(s).iter().any(|t| matches!(t, Token::Bad(_))), "{s}");
        }
    }
}
