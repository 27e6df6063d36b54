//! What passes teach of costs: how long the runner computes with each span, and how fast the link is.
//!
//! The decisions are [`super::measure`]'s and the copy engine's; here their points are recorded as faults begin and
//! end, and what they tell goes into the model's choices. All under the control lock.

#![deny(unsafe_code)]

use super::core::Control;
use super::forecast::ASSUMED_LINK;
use super::streams::PagerStream;
use crate::device::{Fence, Stream};
use crate::units::Rate;

/// Notes for the model's measure where its runner's work on the span before ended, if its release did not. A point
/// that cannot be recorded ends the measuring and not the fault.
pub(super) fn ended(control: &mut Control, id: u32, stream: &PagerStream) {
    let alone = control.under_way == 0;
    let Control { engine, models, .. } = control;
    let Some(model) = models.get_mut(id as usize).and_then(Option::as_deref_mut) else { return };
    if !model.measure.is_on() {
        return;
    }
    if !alone {
        model.measure.give_up();
    } else if model.measure.lacks_end() {
        match engine.record_timed(stream.stream()) {
            Ok(point) => model.measure.ended(stream.slot(), point),
            Err(_) => model.measure.give_up(),
        }
    }
}

/// The same for where its work with this span begins, behind the stream's wait for the bytes.
pub(super) fn began(control: &mut Control, id: u32, span: u32, stream: &PagerStream) {
    let Control { engine, models, .. } = control;
    let Some(model) = models.get_mut(id as usize).and_then(Option::as_deref_mut) else { return };
    if !model.measure.is_on() {
        return;
    }
    match engine.record_timed(stream.stream()) {
        Ok(began) => model.measure.began(span, stream.slot(), began),
        Err(_) => model.measure.give_up(),
    }
}

/// The point at which a span is released, if its time is to be told: `None` if not, or if it cannot be recorded.
pub(super) fn release_point(control: &mut Control, id: u32, stream: &Stream) -> Option<Fence> {
    let Control { engine, models, .. } = control;
    let model = models.get_mut(id as usize).and_then(Option::as_deref_mut)?;
    if !model.measure.is_on() {
        return None;
    }
    let point = engine.record_timed(stream).ok();
    if point.is_none() {
        model.measure.give_up();
    }
    point
}

/// The model's runner does what its measure could not tell from compute. A pass that was watched to its end stands.
pub(super) fn not_compute(control: &mut Control, id: u32) {
    if let Some(model) = control.model_mut(id)
        && model.measure.is_on()
    {
        model.measure.give_up();
    }
}

/// Takes what the device has told since of the spans' compute and of the link. Where that is news, the plan is to be
/// made anew, whatever the frames are.
pub(super) fn learn(control: &mut Control, id: u32) {
    let Control { engine, models, .. } = control;
    let Some(model) = models.get_mut(id as usize).and_then(Option::as_deref_mut) else { return };
    engine.read_meter();
    let link = engine.link().unwrap_or(ASSUMED_LINK);
    let other_link = is_other_rate(model.link, link);
    let compute = match model.measure.learn(model.order.spans()) {
        Ok(learned) => learned,
        // What the pass taught of its order is not lost for a time that cannot be read.
        Err(_) => {
            model.measure.give_up();
            false
        }
    };
    if other_link {
        tracing::debug!(model = model.name, bytes_per_second = link.0, "the link has another rate");
        model.link = link;
    }
    if compute {
        tracing::debug!(model = model.name, "learned the compute of each span");
    }
    if other_link || compute {
        model.choices.forget();
        model.planned_frames = u32::MAX;
    }
}

/// Whether a rate is so far from the one that choices are made for that others may be better: a tenth.
fn is_other_rate(used: Rate, now: Rate) -> bool {
    used.0.abs_diff(now.0) > used.0 / 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_is_another_rate() {
        for (now, is_other) in [(100, false), (110, false), (111, true), (90, false), (89, true), (0, true)] {
            assert_eq!(is_other_rate(Rate(100), Rate(now)), is_other, "{now}");
        }
    }
}
