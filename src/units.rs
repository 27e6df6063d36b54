//! Sizes in bytes, device addresses and modelled time as types of their own.
//!
//! Owns nothing but the seam through which tests refuse host memory, takes no lock, and imports nothing of this crate: every other module may use it.
//! A size is a `u64` in bytes everywhere; only text (`"24MiB"`, `"25GB/s"`) has units, and only this
//! file reads or writes it.

#![deny(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// One kibibyte in bytes.
pub const KIB: u64 = 1 << 10;
/// One mebibyte in bytes.
pub const MIB: u64 = 1 << 20;
/// One gibibyte in bytes.
pub const GIB: u64 = 1 << 30;

/// An address in a device's virtual address space.
///
/// It is a number, not a pointer: on a real card the host may not read through it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// The address `bytes` further on. Wraps on overflow, which no reserved range reaches.
    #[must_use]
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A run of device addresses, `start .. start + bytes`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DeviceRange {
    /// The first address.
    pub start: DeviceAddress,
    /// The length in bytes.
    pub bytes: u64,
}

impl DeviceRange {
    /// The run of `bytes` bytes that begins at `start`.
    pub const fn new(start: DeviceAddress, bytes: u64) -> Self {
        Self { start, bytes }
    }

    /// The first address after the run.
    pub fn end(self) -> DeviceAddress {
        self.start.offset(self.bytes)
    }

    /// The part `offset .. offset + bytes` of this run, or `None` if it does not lie inside.
    #[must_use]
    pub fn part(self, offset: u64, bytes: u64) -> Option<Self> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then(|| Self::new(self.start.offset(offset), bytes))
    }

    /// Whether `other` lies wholly inside this run.
    pub fn contains(self, other: Self) -> bool {
        other.start >= self.start
            && other.start.0 - self.start.0 <= self.bytes
            && other.bytes <= self.bytes - (other.start.0 - self.start.0)
    }

    /// Whether the two runs have an address in common.
    pub fn overlaps(self, other: Self) -> bool {
        self.bytes > 0 && other.bytes > 0 && self.start < other.end() && other.start < self.end()
    }
}

impl fmt::Debug for DeviceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{:#x}", self.start, self.bytes)
    }
}

/// A point on a device's clock, in nanoseconds since the device was opened.
///
/// On the emulated device the clock is modelled: it advances by the cost of what was asked of the
/// device, never by how long this machine took. On a real card it is the host's monotonic clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct ModelTime(pub u64);

impl ModelTime {
    /// The moment the device was opened.
    pub const ZERO: Self = Self(0);

    /// The time from `earlier` to this point; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The point `duration` later.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// A link or disk rate in bytes a second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rate(pub u64);

impl Rate {
    /// How long `bytes` take at this rate; a rate of zero stands for no cost at all.
    #[must_use]
    pub fn duration(self, bytes: u64) -> Duration {
        if self.0 == 0 {
            return Duration::ZERO;
        }
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.0);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// Why a size or a rate could not be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{text}` is not {wanted}: {why}; write for example `{example}`")]
pub struct UnitError {
    /// What was given.
    pub text: String,
    /// What was wanted: "a size" or "a rate".
    pub wanted: &'static str,
    /// What is wrong with it.
    pub why: &'static str,
    /// A right spelling.
    pub example: &'static str,
}

/// Reads a size such as `24MiB`, `1.5GiB`, `64KB` or `4096`.
///
/// `KiB MiB GiB TiB` (and `K M G T`) are powers of 1024, `KB MB GB TB` powers of 1000; letter case does
/// not matter and a bare number is bytes.
///
/// # Errors
/// Text that is no number with such a unit, is negative, or exceeds a `u64`.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    parse_scaled(text.trim(), "a size", "24MiB")
}

/// Reads a rate such as `25GB/s` or `500MiB/s`; `/s` may be left out.
///
/// # Errors
/// As [`parse_size`]; a rate of zero is refused too.
pub fn parse_rate(text: &str) -> Result<Rate, UnitError> {
    let trimmed = text.trim();
    let size = trimmed.strip_suffix("/s").unwrap_or(trimmed);
    match parse_scaled(size, "a rate", "25GB/s") {
        Ok(0) => {
            Err(UnitError { text: text.to_owned(), wanted: "a rate", why: "it is zero", example: "25GB/s" })
        }
        Ok(rate) => Ok(Rate(rate)),
        Err(error) => Err(UnitError { text: text.to_owned(), ..error }),
    }
}

fn parse_scaled(text: &str, wanted: &'static str, example: &'static str) -> Result<u64, UnitError> {
    let refuse = |why| UnitError { text: text.to_owned(), wanted, why, example };
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    if number.is_empty() {
        return Err(refuse("it does not begin with a number"));
    }
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => KIB,
        "m" | "mib" => MIB,
        "g" | "gib" => GIB,
        "t" | "tib" => GIB << 10,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(refuse("its unit is unknown")),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
        return Err(refuse("its number cannot be read"));
    }
    if fraction.len() > 9 {
        return Err(refuse("it has more than nine decimals"));
    }
    let whole: u64 =
        if whole.is_empty() { 0 } else { whole.parse().map_err(|_| refuse("it is too large"))? };
    let mut bytes = u128::from(whole) * u128::from(scale);
    if !fraction.is_empty() {
        let digits: u64 = fraction.parse().map_err(|_| refuse("its number cannot be read"))?;
        let divisor = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(9));
        bytes += u128::from(digits) * u128::from(scale) / divisor;
    }
    u64::try_from(bytes).map_err(|_| refuse("it is too large"))
}

/// A size as a person reads it: `24.0 MiB`, `1.50 GiB`, `512 B`.
pub fn format_size(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let scaled = |unit: u64| bytes as f64 / unit as f64;
    match bytes {
        0..KIB => format!("{bytes} B"),
        KIB..MIB => format!("{:.1} KiB", scaled(KIB)),
        MIB..GIB => format!("{:.1} MiB", scaled(MIB)),
        _ => format!("{:.2} GiB", scaled(GIB)),
    }
}

/// A rate as a person reads it: `25.0 GB/s`, of 10^9 bytes.
pub fn format_rate(rate: Rate) -> String {
    #[expect(clippy::cast_precision_loss, reason = "shown with one place")]
    let gigabytes = rate.0 as f64 / 1e9;
    format!("{gigabytes:.1} GB/s")
}

/// The host would not give memory for one of the crate's own large tables.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the host gives no memory for {what}: {} were asked for ({bytes} bytes)", format_size(*.bytes))]
pub struct NoHostMemory {
    /// What it was for.
    pub what: &'static str,
    /// The bytes that were asked for.
    pub bytes: u64,
}

/// Asks for host memory on behalf of `what`: the seam through which tests refuse it. Otherwise always fine.
pub(crate) fn ask_host(what: &'static str, bytes: u64) -> Result<(), NoHostMemory> {
    let asked = ASKED.fetch_add(1, Ordering::Relaxed) + 1;
    let (nth, for_good) = (REFUSED.load(Ordering::Relaxed), FOR_GOOD.load(Ordering::Relaxed));
    if nth != 0 && (asked == nth || for_good && asked > nth) {
        return Err(NoHostMemory { what, bytes });
    }
    Ok(())
}

/// An empty table with room for `count` values. Large tables are made by this, so that a host without memory is
/// an error and not the end of the process.
///
/// # Errors
/// The host's refusal, with the bytes.
pub(crate) fn try_table<T>(what: &'static str, count: usize) -> Result<Vec<T>, NoHostMemory> {
    let bytes = (count as u64).saturating_mul(size_of::<T>() as u64);
    ask_host(what, bytes)?;
    let mut table = Vec::new();
    table.try_reserve_exact(count).map_err(|_| NoHostMemory { what, bytes })?;
    Ok(table)
}

/// As [`try_table`], filled with `value`.
pub(crate) fn try_filled<T: Clone>(
    what: &'static str,
    count: usize,
    value: T,
) -> Result<Vec<T>, NoHostMemory> {
    let mut table = try_table(what, count)?;
    table.resize(count, value);
    Ok(table)
}

static ASKED: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);
static FOR_GOOD: AtomicBool = AtomicBool::new(false);

/// Test hook: the `nth` request of the whole process for a large table or block of host memory from here on is
/// refused, and with `for_good` all after it; zero refuses none. Answers the requests since the last call.
#[doc(hidden)]
pub fn refuse_host_memory(nth: u64, for_good: bool) -> u64 {
    FOR_GOOD.store(for_good, Ordering::Relaxed);
    REFUSED.store(nth, Ordering::Relaxed);
    ASKED.swap(0, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_binary_and_decimal_units() {
        assert_eq!(parse_size("24MiB").unwrap(), 24 * MIB);
        assert_eq!(parse_size("1.5GiB").unwrap(), GIB + GIB / 2);
        assert_eq!(parse_size("8g").unwrap(), 8 * GIB);
        assert_eq!(parse_size("2MB").unwrap(), 2_000_000);
        assert_eq!(parse_size(" 4096 ").unwrap(), 4096);
        assert_eq!(parse_size("0").unwrap(), 0);
        assert_eq!(parse_rate("25GB/s").unwrap(), Rate(25_000_000_000));
        assert_eq!(parse_rate("1GiB").unwrap(), Rate(GIB));
    }

    #[test]
    fn a_size_that_cannot_be_read_says_why() {
        for text in ["", "MiB", "-1", "1.2.3", "12XB", "99999999999TiB", "1.0000000001GiB", "."] {
            let error = parse_size(text).unwrap_err().to_string();
            assert!(error.contains("24MiB"), "{text}: {error}");
        }
        assert!(parse_rate("0GB/s").is_err());
    }

    #[test]
    fn ranges_know_what_they_contain() {
        let range = DeviceRange::new(DeviceAddress(100), 50);
        assert!(range.contains(DeviceRange::new(DeviceAddress(100), 50)));
        assert!(!range.contains(DeviceRange::new(DeviceAddress(101), 50)));
        assert!(!range.contains(DeviceRange::new(DeviceAddress(99), 1)));
        assert!(range.overlaps(DeviceRange::new(DeviceAddress(149), 9)));
        assert!(!range.overlaps(DeviceRange::new(DeviceAddress(150), 9)));
        assert_eq!(range.part(10, 41), None);
        assert_eq!(range.part(u64::MAX, 2), None);
    }

    #[test]
    fn a_rate_gives_durations() {
        assert_eq!(Rate(1_000_000_000).duration(1_000), Duration::from_micros(1));
        assert_eq!(Rate(0).duration(1_000), Duration::ZERO);
    }
}
