//! The text of one JSON value, read without building it: members of an object as text, stamps as exact nanoseconds.
//!
//! Microseconds are written as `1694128201435377`, `4458676522690.655`, or with 1.7e15 before the point, where an `f64` keeps a quarter of a
//! microsecond. So a stamp is read as a decimal: ns = whole·1000 + the first three digits after the point, rounded by the fourth.

use serde::de::{Deserialize, DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

use crate::profile::Ns;

/// Calls `visit` with every member of the object `json`: its name, and the text of its value.
///
/// # Errors
/// If `json` is not an object, or not JSON.
pub fn members<'a>(json: &'a str, visit: impl FnMut(&str, &'a str)) -> serde_json::Result<()> {
    let mut reader = serde_json::Deserializer::from_str(json);
    Members(visit).deserialize(&mut reader)?;
    reader.end()
}

struct Members<F>(F);

impl<'de, F: FnMut(&str, &'de str)> DeserializeSeed<'de> for Members<F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<(), D::Error> {
        reader.deserialize_map(self)
    }
}

impl<'de, F: FnMut(&str, &'de str)> Visitor<'de> for Members<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(Name(name)) = map.next_key()? {
            let value: &'de RawValue = map.next_value()?;
            (self.0)(&name, value.get());
        }
        Ok(())
    }
}

/// A member's name, borrowed unless it has an escape in it.
struct Name<'de>(Cow<'de, str>);

impl<'de> Deserialize<'de> for Name<'de> {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct Text;
        impl<'de> Visitor<'de> for Text {
            type Value = Name<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Name<'de>, E> {
                Ok(Name(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Name<'de>, E> {
                Ok(Name(Cow::Owned(text.into())))
            }
        }
        reader.deserialize_str(Text)
    }
}

/// The content of a string; anything else as it is written.
pub fn string(json: &str) -> Cow<'_, str> {
    match json.strip_prefix('"').and_then(|s| s.strip_suffix('"')) {
        Some(plain) if !plain.contains('\\') => Cow::Borrowed(plain),
        Some(_) => serde_json::from_str::<String>(json).map_or(Cow::Borrowed(json), Cow::Owned),
        None => Cow::Borrowed(json),
    }
}

/// A whole number that is not negative, also if it is written as a string.
pub fn integer(json: &str) -> Option<u64> {
    string(json).trim().parse().ok()
}

/// Microseconds as exact nanoseconds; also if they are written as a string.
pub fn nanoseconds(json: &str) -> Option<Ns> {
    scaled(string(json).trim(), 3)
}

/// A decimal times ten to the `digits`, rounded.
pub fn scaled(text: &str, digits: usize) -> Option<i64> {
    if text.contains(['e', 'E']) {
        let value = text.parse::<f64>().ok()? * 10f64.powi(digits as i32);
        return (value.is_finite() && value.abs() < 9e18).then_some(value.round() as i64);
    }
    let (negative, text) = text.strip_prefix('-').map_or((false, text), |t| (true, t));
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let plain = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() && fraction.is_empty() || !plain(whole) || !plain(fraction) {
        return None;
    }
    let mut value: i64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut places = fraction.bytes().map(|b| i64::from(b - b'0')).chain(std::iter::repeat(0));
    for digit in places.by_ref().take(digits) {
        value = value.checked_mul(10)?.checked_add(digit)?;
    }
    if places.next().is_some_and(|next| next >= 5) {
        value = value.checked_add(1)?;
    }
    Some(if negative { -value } else { value })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_exact() {
        for (text, ns) in [
            ("1694128201435377", 1_694_128_201_435_377_000),
            ("4458676522690.655", 4_458_676_522_690_655),
            ("1694128201435377.123", 1_694_128_201_435_377_123),
            ("0.0005", 1),
            ("0.0004", 0),
            ("-12.5", -12_500),
            ("\"48.25\"", 48_250),
            (".5", 500),
            ("7.", 7_000),
            ("1.5e3", 1_500_000),
        ] {
            assert_eq!(nanoseconds(text), Some(ns), "{text}");
        }
        for text in ["", ".", "x", "1.2.3", "--1", "null", "99999999999999999999", "1e400", "NaN", "[1]"] {
            assert_eq!(nanoseconds(text), None, "{text}");
        }
    }

    #[test]
    fn members_are_seen_with_the_text_of_their_values() {
        let mut seen = Vec::new();
        members(r#"{"a": 1.50, "b\"c": {"x": [1, "}"]}, "d": "e"}"#, |name, value| seen.push((name.to_string(), value))).unwrap();
        assert_eq!(seen, [("a".to_string(), "1.50"), ("b\"c".into(), r#"{"x": [1, "}"]}"#), ("d".into(), "\"e\"")]);
        assert!(members("[1]", |_, _| {}).is_err());
        assert!(members("{\"a\": inf}", |_, _| {}).is_err());
    }
}
