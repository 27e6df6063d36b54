//! Hears passes and steps of a runner's loop, and makes a recording of them.
//!
//! A runner calls [`Recorder::begin`], [`StepStart::faulted`] and [`Recorder::step`] around each fault. What
//! the card itself did comes from the emulated card's journal, which is switched on for as long as the
//! recorder lives. Nothing here takes modelled time, so a run is the same with and without it. One lock,
//! taken once a step; it is held over no call that takes another of the recorder's.

#![deny(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::recording::{
    Compute, LinkCopy, OnCard, PassRecord, Read, Recording, Stall, Step, TimeSource, TimeSpan,
};
use super::residency::ResidencyMap;
use crate::device::StreamId;
use crate::device::emulated::{EmulatedDevice, Journal, Operation, OperationKind};
use crate::pager::{ModelCounts, PageState, PagedModel, PagerStream};
use crate::units::{DeviceRange, ModelTime};
use crate::weights::UnitId;

/// Operations and steps that are kept of each.
const MOST: usize = 1 << 20;

/// Passes whose ends are sampled for the residency map.
const SAMPLED_ENDS: usize = 240;

/// Hears a run.
///
/// A runner calls [`Self::pass_begins`] and [`Self::pass_ends`] around each pass, and around each fault
/// [`Self::begin`], then [`StepStart::faulted`] once it has its guard, then [`Self::step`] after the release.
pub struct Recorder {
    model: Arc<PagedModel>,
    card: Option<Arc<EmulatedDevice>>,
    streams: Vec<StreamId>,
    heard: Mutex<Heard>,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, streams, .. } = self;
        f.debug_struct("Recorder").field("model", model).field("streams", streams).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Heard {
    passes: Vec<PassRecord>,
    steps: Vec<Step>,
    /// Whether compute was charged in a step, as long as `steps`.
    charged: Vec<bool>,
    dropped: u64,
    number: u64,
    residency: ResidencyMap,
    states: Vec<PageState>,
    /// The counts when the last step ended, and when the pass began.
    last: ModelCounts,
    pass_began: ModelCounts,
}

/// A step that has begun.
#[derive(Clone, Copy, Debug)]
pub struct StepStart {
    runner: u32,
    fault: TimeSpan,
}

impl StepStart {
    /// The fault has its guard.
    #[must_use]
    pub fn faulted(mut self, recorder: &Recorder) -> Self {
        self.fault.end = recorder.now().max(self.fault.start);
        self
    }
}

impl Recorder {
    /// Begins to hear passes over `model` by runners that use `streams`, one each, of about `passes` passes.
    /// `card` is the model's device, if it is an emulated one: without, times are the host's. A card that
    /// [`device::open`](crate::device::open) gave is not known to be one any more; read the string as a
    /// [`DeviceString`](crate::device::DeviceString), and open its options with [`EmulatedDevice::open`].
    pub fn new<'s>(
        model: &Arc<PagedModel>,
        card: Option<Arc<EmulatedDevice>>,
        streams: impl IntoIterator<Item = &'s PagerStream>,
        passes: u32,
    ) -> Self {
        if let Some(card) = &card {
            card.record_operations(MOST);
        }
        let layout = model.layout();
        let steps = u64::from(layout.span_count()) * u64::from(passes);
        let counts = model.counts();
        let heard = Heard {
            residency: ResidencyMap::new(layout.page_count(), steps),
            last: counts,
            pass_began: counts,
            ..Heard::default()
        };
        Self {
            model: Arc::clone(model),
            card,
            streams: streams.into_iter().map(|stream| stream.stream().id()).collect(),
            heard: Mutex::new(heard),
        }
    }

    fn now(&self) -> ModelTime {
        self.model.pager().device().now()
    }

    /// A pass begins, with these counts: those that the one before ended with.
    pub fn pass_begins(&self, number: u32, counts: &ModelCounts) {
        let start = self.now();
        let mut heard = self.heard.lock();
        heard.pass_began = *counts;
        heard.passes.push(PassRecord {
            number,
            time: TimeSpan { start, end: start },
            copied_bytes: 0,
            file_bytes: 0,
        });
    }

    /// The pass has ended at `end`, with these counts.
    pub fn pass_ends(&self, end: ModelTime, counts: &ModelCounts) {
        let mut heard = self.heard.lock();
        let heard = &mut *heard;
        let Some(pass) = heard.passes.last_mut() else { return };
        pass.time.end = end.max(pass.time.start);
        pass.copied_bytes = counts.copied_bytes.saturating_sub(heard.pass_began.copied_bytes);
        pass.file_bytes = counts.file_bytes.saturating_sub(heard.pass_began.file_bytes);
        let number = pass.number;
        // Beside the samples that are spread over the steps: of very many passes the first ones.
        if heard.passes.len() <= SAMPLED_ENDS {
            self.model.residency(&mut heard.states);
            heard.residency.add(number, &heard.states);
        }
    }

    /// A runner, by its place among the streams, is about to fault.
    #[must_use]
    pub fn begin(&self, runner: u32) -> StepStart {
        let start = self.now();
        StepStart { runner, fault: TimeSpan { start, end: start } }
    }

    /// The step has ended: its guard was released. `charged` tells whether compute was charged for it.
    pub fn step(&self, begun: StepStart, unit: UnitId, piece: u32, charged: bool) {
        let released = self.now();
        let (counts, figures) = (self.model.counts(), self.model.pager().figures());
        let page = figures.page_bytes.max(1);
        let taken = figures.resident_bytes + figures.ring_bytes;
        let card = OnCard {
            resident_bytes: figures.resident_bytes,
            ring_bytes: figures.ring_bytes,
            free_frames: figures.budget_bytes.saturating_sub(taken) / page,
        };
        let mut heard = self.heard.lock();
        let heard = &mut *heard;
        let pass = heard.passes.last().map_or(1, |pass| pass.number);
        // Another runner's later counts may have been noted first: what is its own is then counted there.
        let last = heard.last;
        let copied_bytes = counts.copied_bytes.saturating_sub(last.copied_bytes);
        let evicted_pages = counts.evicted_pages.saturating_sub(last.evicted_pages);
        if counts.copied_bytes >= last.copied_bytes {
            heard.last = counts;
        }
        let number = heard.number;
        heard.number += 1;
        if heard.residency.is_due(number) {
            self.model.residency(&mut heard.states);
            heard.residency.add(pass, &heard.states);
        }
        if heard.steps.len() >= MOST {
            heard.dropped += 1;
            return;
        }
        heard.steps.push(Step {
            pass,
            runner: begun.runner,
            unit: unit.0,
            piece,
            fault: begun.fault,
            released,
            stalled: Duration::ZERO,
            copied_bytes,
            evicted_pages,
            card,
        });
        heard.charged.push(charged);
    }

    /// What was heard. Copies that were asked for after the last pass had ended are left out.
    pub fn finish(self) -> Recording {
        let journal = self.card.as_ref().map(|card| card.take_operations());
        if let Some(card) = &self.card {
            card.record_operations(0);
        }
        let heard = self.heard.into_inner();
        let pager = self.model.pager();
        let (figures, info) = (pager.figures(), pager.device().info());
        let index = self.model.index();
        let copied = heard.passes.iter().map(|pass| pass.copied_bytes).sum();
        let mut recording = Recording {
            model: self.model.name().to_owned(),
            device: info.name.clone(),
            source: if journal.is_some() { TimeSource::Modelled } else { TimeSource::Wall },
            total_bytes: info.total_bytes,
            budget_bytes: figures.budget_bytes,
            headroom_bytes: figures.headroom_bytes,
            page_bytes: figures.page_bytes,
            weights_bytes: self.model.figures().weights_bytes,
            at_end: heard.steps.last().map(|step| step.card).unwrap_or_default(),
            units: index.units().iter().map(|unit| unit.name.clone()).collect(),
            runners: u32::try_from(self.streams.len()).unwrap_or(u32::MAX),
            passes: heard.passes,
            steps: heard.steps,
            copies: Vec::new(),
            compute: Vec::new(),
            stalls: Vec::new(),
            reads: Vec::new(),
            residency: heard.residency,
            dropped: heard.dropped,
        };
        match journal {
            Some(journal) => {
                let unit_at = |range: DeviceRange| units_of(&self.model, range);
                sort_out(&mut recording, journal, &self.streams, &heard.charged, copied, unit_at);
            }
            None => recording.wall_stalls(),
        }
        recording
    }
}

impl Recording {
    /// On the host's clock a stall is what a fault made the runner's thread wait.
    fn wall_stalls(&mut self) {
        for step in &mut self.steps {
            step.stalled = step.fault.length();
            let unit = Some(step.unit);
            self.stalls.push(Stall { time: step.fault, unit, runner: step.runner });
        }
        self.stalls.sort_by_key(|stall| stall.time.start);
    }
}

/// The units whose bytes lie at an address; none where addresses do not tell.
fn units_of(model: &PagedModel, range: DeviceRange) -> Option<std::ops::Range<u32>> {
    let layout = model.layout();
    // The first unit begins where the model does.
    let start = range.start.0.checked_sub(model.unit_address(UnitId(0))?.0)?;
    if start >= layout.address_bytes() {
        return None;
    }
    let spans = layout.spans_in(start..start.saturating_add(range.bytes));
    let last = layout.span_count().checked_sub(1)?;
    let unit = |span: u32| layout.span(span.min(last)).unit.0;
    let first = unit(spans.start);
    Some(first..unit(spans.end.saturating_sub(1)).max(first) + 1)
}

/// Gives each operation of the journal its unit. `copied` are the bytes that the passes copied: what comes
/// after them in the journal was asked for later.
fn sort_out(
    recording: &mut Recording,
    journal: Journal,
    streams: &[StreamId],
    charged: &[bool],
    copied: u64,
    units_at: impl Fn(DeviceRange) -> Option<std::ops::Range<u32>>,
) {
    let runners: HashMap<StreamId, usize> =
        streams.iter().enumerate().map(|(runner, &stream)| (stream, runner)).collect();
    // Each runner's steps, and those of them that were charged compute, in order.
    let mut steps_of: Vec<Vec<usize>> = vec![Vec::new(); streams.len()];
    let mut charged_of: Vec<Vec<usize>> = vec![Vec::new(); streams.len()];
    for (number, step) in recording.steps.iter().enumerate() {
        let runner = step.runner as usize;
        if let (Some(steps), Some(with)) = (steps_of.get_mut(runner), charged_of.get_mut(runner)) {
            steps.push(number);
            if charged.get(number).is_some_and(|charged| *charged) {
                with.push(number);
            }
        }
    }
    let mut next_step = vec![0_usize; streams.len()];
    let mut next_charged = vec![0_usize; streams.len()];
    let mut seen_bytes = 0_u64;
    recording.dropped += journal.dropped;
    for operation in journal.operations {
        let Operation { kind, stream, issued, start, end, range, bytes } = operation;
        let time = TimeSpan { start, end };
        let runner = stream.and_then(|stream| runners.get(&stream).copied());
        match (kind, runner) {
            (OperationKind::ToDevice, _) => {
                seen_bytes += bytes;
                if seen_bytes <= copied {
                    recording.copies.push(LinkCopy { time, bytes, units: units_at(range) });
                }
            }
            (OperationKind::Compute, Some(runner)) => {
                let step = charged_of[runner].get(next_charged[runner]);
                next_charged[runner] += 1;
                if let Some(step) = step.and_then(|&step| recording.steps.get(step)) {
                    recording.compute.push(Compute { time, unit: step.unit, runner: step.runner });
                }
            }
            (OperationKind::Wait, Some(runner)) => {
                // A wait costs its thread time, so its fault has begun before and not ended after.
                let steps = &steps_of[runner];
                let at = &mut next_step[runner];
                while steps.get(*at).is_some_and(|&step| recording.steps[step].fault.end < issued) {
                    *at += 1;
                }
                let step = steps
                    .get(*at)
                    .and_then(|&step| recording.steps.get_mut(step))
                    .filter(|step| step.fault.start <= issued);
                let unit = step.map(|step| {
                    step.stalled += time.length();
                    step.unit
                });
                let runner = u32::try_from(runner).unwrap_or(u32::MAX);
                recording.stalls.push(Stall { time, unit, runner });
            }
            (OperationKind::Read, _) => recording.reads.push(Read { time, bytes }),
            (OperationKind::ToHost | OperationKind::Compute | OperationKind::Wait, _) => {}
        }
    }
    // Engines serve in the order of enqueueing; streams and threads interleave.
    recording.copies.sort_by_key(|copy| copy.time.start);
    recording.compute.sort_by_key(|compute| compute.time.start);
    recording.stalls.sort_by_key(|stall| stall.time.start);
    recording.reads.sort_by_key(|read| read.time.start);
}
