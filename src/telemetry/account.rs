//! Busy and stalled time of each pass, and the units that cost the most of it: pure.

#![deny(unsafe_code)]

use std::collections::BTreeMap;
use std::time::Duration;

use super::recording::{PassRecord, Recording, TimeSpan};
use crate::units::ModelTime;

/// Where the time of a pass went. The parts overlap: that is what paging is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Account {
    /// The pass's number.
    pub pass: u32,
    /// How long it took.
    pub took: Duration,
    /// How long the link copied to the card.
    pub link: Duration,
    /// How long the card computed.
    pub compute: Duration,
    /// How long a runner stood still for bytes, on average over the runners.
    pub stalled: Duration,
    /// Bytes copied.
    pub copied_bytes: u64,
}

/// A unit that runners stood still for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlowUnit {
    /// The unit.
    pub unit: u32,
    /// How long they stood still for it in a pass, on average.
    pub stalled: Duration,
    /// The longest in one pass.
    pub worst: Duration,
    /// That pass.
    pub worst_pass: u32,
    /// Its compute in a pass, on average.
    pub compute: Duration,
    /// Bytes of copies that begin with it, in a pass, on average.
    pub copied_bytes: u64,
}

/// The account of every pass.
#[must_use]
pub fn accounts(recording: &Recording) -> Vec<Account> {
    let runners = recording.runners.max(1);
    let link = by_pass(recording, recording.copies.iter().map(|copy| copy.time));
    let compute = by_pass(recording, recording.compute.iter().map(|compute| compute.time));
    let stalled = by_pass(recording, recording.stalls.iter().map(|stall| stall.time));
    let parts = link.into_iter().zip(compute).zip(stalled);
    let account =
        |(pass, ((link, compute), stalled)): (&PassRecord, ((Duration, Duration), Duration))| Account {
            pass: pass.number,
            took: pass.time.length(),
            link,
            compute,
            stalled: stalled / runners,
            copied_bytes: pass.copied_bytes,
        };
    recording.passes.iter().zip(parts).map(account).collect()
}

/// How much of the spans lies in each pass. Passes follow one another; there may be very many of both.
fn by_pass(recording: &Recording, spans: impl Iterator<Item = TimeSpan>) -> Vec<Duration> {
    let passes = &recording.passes;
    let mut sums = vec![Duration::ZERO; passes.len()];
    for span in spans {
        let first = passes.partition_point(|pass| pass.time.end <= span.start);
        for (pass, sum) in passes.iter().zip(&mut sums).skip(first) {
            if pass.time.start >= span.end {
                break;
            }
            *sum += span.within(pass.time);
        }
    }
    sums
}

/// The passes that are steady: all but the first, which brings the model in, if there are others.
pub(super) fn is_steady(recording: &Recording, pass: u32) -> bool {
    recording.passes.len() < 2 || recording.passes.first().is_none_or(|first| first.number != pass)
}

/// Up to `most` units that runners stood still for in steady passes, the longest first.
#[must_use]
pub fn slowest_units(recording: &Recording, most: usize) -> Vec<SlowUnit> {
    let passes = recording.passes.iter().filter(|pass| is_steady(recording, pass.number)).count();
    let passes = u32::try_from(passes.max(1)).unwrap_or(u32::MAX);
    let steady = |time: ModelTime| is_steady(recording, recording.pass_at(time));
    let mut by_pass: BTreeMap<(u32, u32), Duration> = BTreeMap::new();
    for step in recording.steps.iter().filter(|step| is_steady(recording, step.pass)) {
        *by_pass.entry((step.unit, step.pass)).or_default() += step.stalled;
    }
    let mut units: BTreeMap<u32, SlowUnit> = BTreeMap::new();
    for ((unit, pass), stalled) in by_pass {
        let entry = units.entry(unit).or_insert(SlowUnit {
            unit,
            stalled: Duration::ZERO,
            worst: Duration::ZERO,
            worst_pass: pass,
            compute: Duration::ZERO,
            copied_bytes: 0,
        });
        entry.stalled += stalled;
        if stalled > entry.worst {
            (entry.worst, entry.worst_pass) = (stalled, pass);
        }
    }
    for compute in recording.compute.iter().filter(|compute| steady(compute.time.start)) {
        if let Some(unit) = units.get_mut(&compute.unit) {
            unit.compute += compute.time.length();
        }
    }
    for copy in recording.copies.iter().filter(|copy| steady(copy.time.start)) {
        if let Some(unit) = copy.units.as_ref().and_then(|range| units.get_mut(&range.start)) {
            unit.copied_bytes += copy.bytes;
        }
    }
    let mut slow: Vec<SlowUnit> = units.into_values().filter(|unit| !unit.stalled.is_zero()).collect();
    slow.sort_by_key(|unit| std::cmp::Reverse(unit.stalled));
    slow.truncate(most);
    for unit in &mut slow {
        unit.stalled /= passes;
        unit.compute /= passes;
        unit.copied_bytes /= u64::from(passes);
    }
    slow
}

/// The share of each of `bins` equal parts of `range` that the spans, sorted and not overlapping each other
/// much, fill: 0 to 1.
#[cfg_attr(not(any(test, feature = "cli")), expect(dead_code, reason = "for pictures"))]
pub(super) fn shares(spans: impl Iterator<Item = TimeSpan>, range: TimeSpan, bins: usize) -> Vec<f64> {
    let mut filled = vec![0.0_f64; bins];
    let total = range.length().as_secs_f64();
    if total <= 0.0 || bins == 0 {
        return filled;
    }
    #[expect(clippy::cast_precision_loss, reason = "a few hundred bins")]
    let width = total / bins as f64;
    for span in spans {
        let from = span.start.max(range.start).since(range.start).as_secs_f64() / width;
        let to = span.end.min(range.end).since(range.start).as_secs_f64() / width;
        if to <= from {
            continue;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and at most the number of bins"
        )]
        let (first, last) = (from as usize, (to.ceil() as usize).min(bins));
        for (bin, share) in filled.iter_mut().enumerate().take(last).skip(first) {
            #[expect(clippy::cast_precision_loss, reason = "a few hundred bins")]
            let at = bin as f64;
            *share += to.min(at + 1.0) - from.max(at);
        }
    }
    for share in &mut filled {
        *share = share.clamp(0.0, 1.0);
    }
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, end: u64) -> TimeSpan {
        TimeSpan { start: ModelTime(start), end: ModelTime(end) }
    }

    #[test]
    fn shares_add_up_to_the_time_that_was_filled() {
        let spans = [span(0, 5), span(12, 13), span(20, 40), span(90, 200)];
        let found = shares(spans.into_iter(), span(10, 110), 10);
        let expected = [0.1, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0];
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }
        assert_eq!(shares([span(0, 5)].into_iter(), span(7, 7), 3), [0.0; 3]);
    }

    #[test]
    fn a_span_counts_only_where_it_meets_the_pass() {
        assert_eq!(span(5, 20).within(span(10, 15)), Duration::from_nanos(5));
        assert_eq!(span(5, 9).within(span(10, 15)), Duration::ZERO);
        assert_eq!(span(0, 99).within(span(10, 15)), Duration::from_nanos(5));
    }
}
