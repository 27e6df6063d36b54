//! How long the runner computes with each span, by the device's own clock: learned in a model's first pass.
//!
//! In a first pass no fault is a hit, so each comes by here. It records a point on the runner's stream behind the
//! wait for its bytes, where the work with its span begins. The work ends at the point that the release of a
//! streamed span records anyway; the release of a resident span records none, and there the next fault does,
//! before anything else. What lies between the two points is compute; stalls, and what the pager's own calls cost
//! the host, are not in it. Once the pass has ended and the device has passed its last point, the times are read,
//! and the points go back to their pool. Only these points are recorded in events that keep time.
//!
//! It learns nothing where a device's events keep no time, where several faults or guards are under way at once,
//! where faults come on several streams, where the stream is captured between, where the first pass leaves out
//! units, and in models of more than 8192 spans. The pager then goes by the sum of compute alone.
//!
//! Owned by the pager's control state and only touched under its lock. May import `device`.

#![deny(unsafe_code)]

use std::time::Duration;

use crate::device::{DeviceError, Fence};

/// Spans of a model that is measured, at most: its points are two events each, until its second pass.
const MOST_SPANS: usize = 8192;

/// The compute of each span, in the making or made.
#[derive(Debug, Default)]
pub(super) struct Measure {
    state: State,
    /// Seconds by span; empty for not known.
    seconds: Box<[f32]>,
}

#[derive(Debug, Default)]
enum State {
    /// Nothing is measured (any more).
    #[default]
    Off,
    /// The pass goes on.
    Watching(Vec<Sample>),
    /// The pass is over; its last point was not seen passed yet.
    Ended(Vec<Sample>),
}

/// One fault.
#[derive(Debug)]
struct Sample {
    span: u32,
    stream: u8,
    /// Where the work with its span begins.
    began: Fence,
    /// Where it ended, once that is recorded.
    ended: Option<Fence>,
}

impl Measure {
    /// Begins with the next fault of a model of so many spans, unless they are too many.
    pub(super) fn new(spans: usize) -> Self {
        let state = if spans <= MOST_SPANS { State::Watching(Vec::new()) } else { State::Off };
        Self { state, seconds: Box::default() }
    }

    /// Whether faults are to record their points.
    pub(super) fn is_on(&self) -> bool {
        matches!(self.state, State::Watching(_))
    }

    /// Seconds of compute by span, if they were learned.
    pub(super) fn seconds(&self) -> Option<&[f32]> {
        (!self.seconds.is_empty()).then_some(&self.seconds)
    }

    /// The compute of a pass, if it was learned: the sum over all spans.
    pub(super) fn sum(&self) -> Option<Duration> {
        let sum = |seconds: &[f32]| seconds.iter().copied().map(f64::from).sum();
        self.seconds().and_then(|seconds| Duration::try_from_secs_f64(sum(seconds)).ok())
    }

    /// What comes next would tell something wrong.
    pub(super) fn give_up(&mut self) {
        self.state = State::Off;
    }

    /// Whether the next fault is to record where the work before it ended.
    pub(super) fn lacks_end(&self) -> bool {
        let State::Watching(samples) = &self.state else { return false };
        samples.last().is_some_and(|last| last.ended.is_none())
    }

    /// The work before a fault on the stream of this slot ended at a point.
    pub(super) fn ended(&mut self, stream: u8, point: Fence) {
        if let State::Watching(samples) = &mut self.state
            && let Some(last) = samples.last_mut()
        {
            if last.stream == stream {
                last.ended = Some(point);
            } else {
                self.state = State::Off;
            }
        }
    }

    /// A fault of `span` on the stream of this slot is done, and its stream waits for its bytes up to `began`.
    pub(super) fn began(&mut self, span: u32, stream: u8, began: Fence) {
        if let State::Watching(samples) = &mut self.state {
            if samples.last().is_some_and(|last| last.stream != stream || last.ended.is_none()) {
                self.state = State::Off;
                return;
            }
            samples.push(Sample { span, stream, began, ended: None });
        }
    }

    /// The streamed `span` is released at a point of the stream of this slot.
    pub(super) fn released(&mut self, span: u32, stream: u8, point: &Fence) {
        if let State::Watching(samples) = &mut self.state
            && let Some(last) = samples.last_mut()
            && last.ended.is_none()
        {
            if (last.span, last.stream) == (span, stream) {
                last.ended = Some(point.clone());
            } else {
                self.state = State::Off;
            }
        }
    }

    /// The pass is over.
    pub(super) fn pass_ended(&mut self) {
        if let State::Watching(samples) = &mut self.state {
            self.state = State::Ended(std::mem::take(samples));
        }
    }

    /// The runner went on to another model: what comes next is another pass. One whose last work has no end is watched
    /// anew.
    pub(super) fn left(&mut self) {
        match &mut self.state {
            State::Watching(samples) if samples.last().is_some_and(|last| last.ended.is_none()) => {
                samples.clear();
            }
            _ => self.pass_ended(),
        }
    }

    /// Reads the times, if a pass is over and the device has passed its last point; answers whether the compute
    /// of all of `spans` is known now and was not before.
    pub(super) fn learn(&mut self, spans: &[u32]) -> Result<bool, DeviceError> {
        let State::Ended(samples) = &self.state else { return Ok(false) };
        let Some(last) = samples.last() else { return Ok(false) };
        if !last.ended.as_ref().unwrap_or(&last.began).is_done()? {
            return Ok(false);
        }
        let mut times = Vec::with_capacity(samples.len());
        for Sample { span, began, ended, .. } in samples {
            let time = ended.as_ref().map_or(Ok(None), |ended| ended.elapsed_since(began))?;
            times.push((*span, time));
        }
        self.state = State::Off;
        self.seconds = seconds(&times, spans).unwrap_or_default().into();
        Ok(!self.seconds.is_empty())
    }
}

/// Seconds of compute by span. `times` are the faults of a pass: the span, and how long the work with it took.
/// `None` if a time is not known or one of `spans` was not faulted.
fn seconds(times: &[(u32, Option<Duration>)], spans: &[u32]) -> Option<Vec<f32>> {
    let end = spans.iter().max().map_or(0, |last| *last as usize + 1);
    let mut seconds = vec![f32::NAN; end];
    for &(span, time) in times {
        let time = time?;
        if let Some(seconds) = seconds.get_mut(span as usize) {
            let before = if seconds.is_nan() { 0.0 } else { *seconds };
            *seconds = before + time.as_secs_f32();
        }
    }
    let known = spans.iter().all(|&span| !seconds[span as usize].is_nan());
    for seconds in &mut seconds {
        if seconds.is_nan() {
            *seconds = 0.0;
        }
    }
    known.then_some(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn nanos(nanos: u64) -> Duration {
        Duration::from_nanos(nanos)
    }

    #[test]
    fn what_the_faults_of_a_span_take_is_its_compute() {
        // Span 1 is faulted twice.
        let times = [(0, 100), (2, 10), (1, 85), (1, 100)].map(|(span, time)| (span, Some(nanos(time))));
        let seconds = seconds(&times, &[0, 2, 1]).unwrap();
        let rounded: Vec<f32> = seconds.iter().map(|seconds| (seconds * 1e9).round()).collect();
        assert_eq!(rounded, [100.0, 185.0, 10.0]);
        let measure = Measure { state: State::Off, seconds: seconds.into() };
        assert_eq!(measure.sum(), Some(nanos(295)));
        assert_eq!(Measure::new(3).sum(), None);
        assert!(Measure::new(MOST_SPANS).is_on() && !Measure::new(MOST_SPANS + 1).is_on());
    }

    #[test]
    fn what_no_time_is_told_of_or_the_pass_left_out_is_not_known() {
        let told = [(0, Some(nanos(20))), (1, Some(nanos(10)))];
        assert!(seconds(&told, &[0, 1]).is_some());
        assert_eq!(seconds(&told, &[0, 1, 2]), None);
        for untold in 0..2 {
            let mut times = told;
            times[untold].1 = None;
            assert_eq!(seconds(&times, &[0, 1]), None);
        }
    }
}
