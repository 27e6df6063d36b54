//! The rate of the link, by the device's own clock, from copies that are made anyway.
//!
//! A device that does not tell its link's rate may still have events that keep time. Some of the batches of copies
//! then lie between two of them: one behind the batch's waits, one behind its last copy. Eight such batches in a row
//! are a window. All bytes of a window over the time in which at least one of its batches was under way is a rate
//! that the link has reached, also where batches run on several streams and hold each other up. What else slows a
//! copy, such as a source that is not page-locked, can only make that less, so the fastest window counts.
//!
//! Windows begin with batches 0, 16, 64, 256 and so on, eight in all: what is known soon is put right later if the
//! first copies met a link that slept. Beyond them nothing is measured.
//!
//! Owned by the copy engine and under its callers' lock. May import `device` and `units`.

#![deny(unsafe_code)]

use std::time::Duration;

use crate::device::{DeviceError, Fence};
use crate::units::Rate;

/// Batches of a window.
const WINDOW: usize = 8;

/// Windows, at most.
const WINDOWS: u32 = 8;

/// Bytes of a batch's first copy, at least: what a copy costs beside its bytes would count for too much.
const LEAST_BYTES: u64 = 1 << 20;

/// Measures the link.
#[derive(Debug)]
pub(super) struct LinkMeter {
    /// Of the window that is open.
    batches: Vec<TimedBatch>,
    /// Windows that may still be begun; with none nothing is measured (any more).
    windows: u32,
    /// Batches so far, and the one that the next window begins with.
    seen: u64,
    begins: u64,
    fastest: Option<Rate>,
}

/// A batch between two points whose times can be told.
#[derive(Debug)]
pub(super) struct TimedBatch {
    pub(super) began: Fence,
    pub(super) ended: Fence,
    /// Bytes that it copied.
    pub(super) bytes: u64,
}

impl LinkMeter {
    /// One that measures, or one that does not.
    pub(super) fn new(measures: bool) -> Self {
        Self {
            batches: Vec::with_capacity(if measures { WINDOW } else { 0 }),
            windows: if measures { WINDOWS } else { 0 },
            seen: 0,
            begins: 0,
            fastest: None,
        }
    }

    /// The rate, if it was measured.
    pub(super) fn rate(&self) -> Option<Rate> {
        self.fastest
    }

    /// A batch begins.
    pub(super) fn batch_begins(&mut self) {
        if self.windows > 0 {
            self.read();
            self.seen += 1;
        }
    }

    /// Whether the batch that began last, whose first copy is of so many bytes, is to be timed.
    pub(super) fn wants(&self, bytes: u64) -> bool {
        self.windows > 0 && self.batches.len() < WINDOW && self.seen > self.begins && bytes >= LEAST_BYTES
    }

    /// A batch that was timed is enqueued.
    pub(super) fn note(&mut self, batch: TimedBatch) {
        self.batches.push(batch);
    }

    /// Ends the measuring: points of time cannot be recorded or told. What is known stays.
    pub(super) fn give_up(&mut self) {
        self.windows = 0;
        self.batches = Vec::new();
    }

    /// Takes the rate of the window that is open, if it is full and its batches are done.
    pub(super) fn read(&mut self) {
        if self.batches.len() < WINDOW {
            return;
        }
        match times(&self.batches) {
            Ok(Some(mut times)) => {
                let bytes = self.batches.iter().map(|batch| batch.bytes).sum();
                self.fastest = faster(self.fastest, rate(bytes, busy(&mut times)));
                self.batches.clear();
                self.windows -= 1;
                self.begins = (4 * self.begins).max(2 * WINDOW as u64);
            }
            Ok(None) => {}
            Err(_) => self.give_up(),
        }
    }
}

/// When the batches of a window began and ended, counted from the first one's beginning; `None` while one of them is
/// not done.
fn times(batches: &[TimedBatch]) -> Result<Option<[(Duration, Duration); WINDOW]>, DeviceError> {
    let mut times = [(Duration::ZERO, Duration::ZERO); WINDOW];
    // The last one is done last, or nearly.
    for (time, batch) in times.iter_mut().zip(batches).rev() {
        if !batch.ended.is_done()? {
            return Ok(None);
        }
        let first = &batches[0].began;
        let (began, ended) = (batch.began.elapsed_since(first)?, batch.ended.elapsed_since(first)?);
        let (Some(began), Some(ended)) = (began, ended) else { return Ok(None) };
        *time = (began, ended);
    }
    Ok(Some(times))
}

/// How long at least one of several spans of time went on.
fn busy(times: &mut [(Duration, Duration)]) -> Duration {
    times.sort_unstable();
    let (mut busy, mut until) = (Duration::ZERO, Duration::ZERO);
    for &mut (began, ended) in times {
        busy += ended.saturating_sub(began.max(until));
        until = until.max(ended);
    }
    busy
}

/// Bytes in a time as a rate; `None` where nothing took time, as on a clock that is not of copies.
fn rate(bytes: u64, time: Duration) -> Option<Rate> {
    let nanos = time.as_nanos();
    let rate = (u128::from(bytes) * 1_000_000_000).checked_div(nanos)?;
    u64::try_from(rate).ok().filter(|rate| *rate > 0).map(Rate)
}

fn faster(one: Option<Rate>, other: Option<Rate>) -> Option<Rate> {
    [one, other].into_iter().flatten().max_by_key(|rate| rate.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_busy_while_any_batch_is_under_way() {
        let at = |began, ended| (Duration::from_micros(began), Duration::from_micros(ended));
        assert_eq!(busy(&mut []), Duration::ZERO);
        assert_eq!(busy(&mut [at(0, 10), at(12, 20)]), Duration::from_micros(18));
        // On two streams: the second waits for the first; one inside another; in any order.
        assert_eq!(busy(&mut [at(1, 20), at(0, 10)]), Duration::from_micros(20));
        assert_eq!(busy(&mut [at(0, 30), at(5, 10), at(20, 40)]), Duration::from_micros(40));
    }

    #[test]
    fn a_rate_is_bytes_over_time_and_the_fastest_counts() {
        assert_eq!(rate(25_000, Duration::from_micros(1)), Some(Rate(25_000_000_000)));
        assert_eq!(rate(25_000, Duration::ZERO), None);
        assert_eq!(rate(0, Duration::from_micros(1)), None);
        assert_eq!(faster(None, Some(Rate(3))), Some(Rate(3)));
        assert_eq!(faster(Some(Rate(5)), Some(Rate(3))), Some(Rate(5)));
        assert_eq!(faster(Some(Rate(5)), None), Some(Rate(5)));
    }

    #[test]
    fn small_copies_and_the_batches_between_windows_are_not_timed() {
        let mut meter = LinkMeter::new(true);
        assert!(!meter.wants(LEAST_BYTES), "no batch began");
        meter.batch_begins();
        assert!(meter.wants(LEAST_BYTES) && !meter.wants(LEAST_BYTES - 1));
        meter.begins = 3;
        meter.batch_begins();
        assert!(!meter.wants(LEAST_BYTES));
        meter.batch_begins();
        meter.batch_begins();
        assert!(meter.wants(LEAST_BYTES));
        meter.give_up();
        assert!(!meter.wants(LEAST_BYTES) && !LinkMeter::new(false).wants(LEAST_BYTES));
    }
}
