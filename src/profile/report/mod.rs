//! What is told of an analysis: tables for people, one JSON object for programs.

mod json;
mod text;

pub use json::json;
pub use text::text;

use super::Ns;

/// A number of bytes for people, in powers of 1000 as bandwidths are.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut size = n as f64;
    let mut unit = 0;
    while size >= 999.5 && unit + 1 < UNITS.len() {
        size /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{size:.2} {}", UNITS[unit]) }
}

/// A duration for people.
fn time(ns: Ns) -> String {
    match ns as f64 {
        t if t.abs() >= 1e9 => format!("{:.3} s", t / 1e9),
        t if t.abs() >= 1e6 => format!("{:.2} ms", t / 1e6),
        t if t.abs() >= 1e3 => format!("{:.1} µs", t / 1e3),
        t => format!("{t:.0} ns"),
    }
}

/// `1,234,567`.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `0-3, 8`.
fn ranks(all: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &rank in all {
        match parts.last_mut() {
            Some(last) if last.1.checked_add(1) == Some(rank) => last.1 = rank,
            _ => parts.push((rank, rank)),
        }
    }
    let part = |(a, b): &(u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    parts.iter().map(part).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!(
            (bytes(999), bytes(1000), bytes(26_214_400), bytes(u64::MAX)),
            ("999 B".into(), "1.00 kB".into(), "26.21 MB".into(), "18446744.07 TB".into())
        );
        assert_eq!(
            (time(999), time(-1500), time(2_500_000), time(61_000_000_000)),
            ("999 ns".into(), "-1.5 µs".into(), "2.50 ms".into(), "61.000 s".into())
        );
        assert_eq!((grouped(0), grouped(999), grouped(25_557_032)), ("0".into(), "999".into(), "25,557,032".into()));
        assert_eq!((ranks(&[0, 1, 2, 3]), ranks(&[0, 2, 3, 9]), ranks(&[])), ("0-3".into(), "0,2-3,9".into(), String::new()));
    }
}
