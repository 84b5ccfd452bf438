//! Units as types. Times and sizes are integers, so that sums do not depend on their order and equal inputs give equal plans; a quotient is rounded up.
//! What is too large for 64 bits is the largest number there is: worse than all else, never better by wrapping around.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul};

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub u64);
        impl $name {
            pub const ZERO: $name = $name(0);
        }
        impl Add for $name {
            type Output = $name;
            fn add(self, other: $name) -> $name {
                $name(self.0.saturating_add(other.0))
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: $name) {
                self.0 = self.0.saturating_add(other.0);
            }
        }
        impl Mul<u64> for $name {
            type Output = $name;
            fn mul(self, times: u64) -> $name {
                $name(self.0.saturating_mul(times))
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = $name>>(terms: I) -> $name {
                terms.fold($name(0), |a, b| a + b)
            }
        }
    };
}

quantity!(/// Time, nanoseconds.
    Nanos);
quantity!(/// Size, bytes.
    Bytes);

impl Nanos {
    /// For reports only: plans are compared in integer nanoseconds.
    pub fn seconds(self) -> f64 {
        self.0 as f64 * 1e-9
    }
}

/// A rate, things per second: FLOP/s or bytes/s.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PerSecond(pub u64);

impl PerSecond {
    /// `n` · 10⁹ things per second.
    pub const fn giga(n: u64) -> PerSecond {
        PerSecond(n * 1_000_000_000)
    }
    /// Time for `amount` things, rounded up.
    pub fn time(self, amount: u128) -> Nanos {
        let nanos = (amount * 1_000_000_000).div_ceil(u128::from(self.0.max(1)));
        Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// A part of a whole, in millionths.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Millionths(pub u64);

impl Millionths {
    pub const fn percent(n: u64) -> Millionths {
        Millionths(n * 10_000)
    }
    /// This part of a rate.
    pub fn of(self, rate: PerSecond) -> PerSecond {
        PerSecond((u128::from(rate.0) * u128::from(self.0) / 1_000_000) as u64)
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0 as f64;
        match self.0 {
            0..1_000 => write!(f, "{} ns", self.0),
            1_000..1_000_000 => write!(f, "{:.2} µs", ns / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.2} ms", ns / 1e6),
            _ => write!(f, "{:.3} s", ns / 1e9),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = self.0 as f64;
        match self.0 {
            0..0x400 => write!(f, "{} B", self.0),
            0x400..0x10_0000 => write!(f, "{:.1} KiB", b / 1024.0),
            0x10_0000..0x4000_0000 => write!(f, "{:.1} MiB", b / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", b / 1_073_741_824.0),
        }
    }
}
