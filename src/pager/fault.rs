//! The slow path of a fault, and the release of a streamed span.
//!
//! A fault that is no hit claims frames for the pages of its span, asks for the missing bytes, waits for
//! reads (not for copies: those its stream waits for), and leaves the span pinned. It never waits for a
//! guard's release: what guards hold is gone around, or the fault fails at once and says what is held.

#![deny(unsafe_code)]

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::ahead;
use super::attach;
use super::claim::{self, Patience, abandon};
use super::core::{Control, Core, StreamedRelease};
use super::costs;
use super::error::PagerError;
use super::frames::{NONE, Role};
use super::learner::Learned;
use super::load;
use super::loads::WaitFor;
use super::model::PagedModel;
use super::mutations::Mutation;
use super::patches::{DevicePatches, PatchSet};
use super::plain;
use super::prefetch;
use super::reclaim;
use super::replan;
use super::streams::PagerStream;
use crate::device::{DeviceError, Fence};

/// Faults one span, made with the patches of `set`, on a stream and leaves it pinned. Answers whether it is streamed, in which case its
/// release goes through [`release_streamed`].
pub(super) fn fault_span(
    model: &PagedModel,
    span: u32,
    stream: &PagerStream,
    set: Option<&Arc<PatchSet>>,
    patience: Patience,
) -> Result<bool, PagerError> {
    let core = model.core();
    let id = model.id();
    if stream.is_capturing()? {
        costs::not_compute(&mut core.control.lock(), id);
        let unit = model.layout().span(span).unit;
        let what = format!("unit {}", model.index().unit_info(unit).name);
        return Err(PagerError::Capturing { model: model.name().to_owned(), what });
    }
    let mut control = core.control.lock();
    settle_captured(core, &mut control);
    while control.model(id).is_some_and(|model| model.exchanges > 0) {
        core.changed.wait(&mut control);
    }
    ensure_attached(model, &mut control, set)?;
    replan::follow_budget(core, &mut control, id)?;
    attach::refresh_span(&mut control, id, span)?;
    costs::ended(&mut control, id, stream);
    note_order(core, &mut control, id, span)?;
    let together = control.under_way + 1;
    replan::note_together(core, &mut control, id, together)?;
    let word = model.word(span);
    word.claim();
    control.under_way += 1;
    note_bringing(core, &mut control, id, true);
    let mut count = Count::Hit;
    let brought = if control.plain.is_some() {
        plain::bring(model, &mut control, span, set).and_then(|brought| {
            count = match brought {
                plain::Brought::There => Count::Hit,
                plain::Brought::Loaded => Count::Loaded,
                plain::Brought::Streamed => Count::Streamed,
            };
            plain::arrive(&mut control, id, span, stream, set).map_err(PagerError::from)
        })
    } else {
        let brought = match bring(core, &mut control, id, span, patience, &mut count) {
            // What the activation pool keeps without using it may be the room that is lacking.
            Err(error) if error.is_shortage() => match replan::trim_pool(core, &mut control, id) {
                Ok(true) => bring(core, &mut control, id, span, patience, &mut count),
                Ok(false) => Err(error),
                Err(other) => Err(other),
            },
            other => other,
        };
        brought.and_then(|()| arrive(&mut control, id, span, stream, set).map_err(PagerError::from))
    };
    note_bringing(core, &mut control, id, false);
    if brought.is_ok() {
        costs::began(&mut control, id, span, stream);
    }
    match brought {
        Ok(()) => {}
        Err(error) => {
            control.under_way -= 1;
            abandon(&control, id, span);
            return Err(error);
        }
    }
    let streamed = word.view().is_streamed();
    if !streamed {
        control.under_way -= 1;
    }
    if let Some(model) = control.model_mut(id) {
        match count {
            Count::Hit => model.counts.hits += 1,
            Count::Loaded => model.counts.loaded += 1,
            Count::Streamed => model.counts.streamed += 1,
        }
    }
    Ok(streamed)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Count {
    Hit,
    Loaded,
    Streamed,
}

/// Claims frames, asks for bytes, and waits until every copy is enqueued.
fn bring(
    core: &Arc<Core>,
    control: &mut MutexGuard<'_, Control>,
    id: u32,
    span: u32,
    patience: Patience,
    count: &mut Count,
) -> Result<(), PagerError> {
    // What this fault asked for in rounds that failed.
    let mut asked = Vec::new();
    loop {
        forget_errors(control, id, span);
        let claimed = claim::claim_span(core, control, id, span, patience)?;
        if !claimed.missing.is_empty() {
            *count = if claimed.streamed { Count::Streamed } else { (*count).max_loaded() };
            for run in claimed.missing.chunk_by(|a, b| a + 1 == *b) {
                if let (Some(&first), Some(&last)) = (run.first(), run.last()) {
                    let gathered = ahead::gather(core, control, id, last);
                    load::submit(core, control, id, first, last + 1 - first + gathered);
                }
            }
            prefetch::demanded(control, id, &claimed.missing);
        }
        ahead::advance(core, control, id, span);
        while span_error(control, id, span).is_none() && is_loading(control, id, span) {
            wait_for_progress(core, control, id, span)?;
        }
        match span_error(control, id, span) {
            // A load that was asked for ahead of this fault may have failed for a reason that is gone: the
            // next round asks anew. What this fault asked for itself is its own failure.
            Some((page, error)) if claimed.missing.contains(&page) || asked.contains(&page) => {
                return Err(error);
            }
            None if is_present(control, id, span) => {
                control.missing = claimed.missing;
                break;
            }
            Some(_) | None => asked.extend_from_slice(&claimed.missing),
        }
    }
    let Some(model) = control.model(id) else { return Ok(()) };
    let pages = model.layout.span(span).pages;
    for page in pages {
        let Some(model) = control.model(id) else { return Ok(()) };
        let frame = model.pages[page as usize].frame;
        if frame == NONE {
            continue;
        }
        let info = control.frames.info_mut(frame);
        if info.fresh {
            info.fresh = false;
            *count = if info.role == Role::Ring { Count::Streamed } else { (*count).max_loaded() };
        }
    }
    Ok(())
}

impl Count {
    fn max_loaded(self) -> Self {
        if self == Self::Streamed { self } else { Self::Loaded }
    }
}

/// Whether a fault of `span` that sleeps until its bytes were read has something to do: they were, or cannot be.
pub(super) fn is_woken(control: &Control, id: u32, span: u32) -> bool {
    span_error(control, id, span).is_some() || !is_loading(control, id, span)
}

/// Lets go of the lock until the loads of a span went on.
fn wait_for_progress(
    core: &Arc<Core>,
    control: &mut MutexGuard<'_, Control>,
    id: u32,
    span: u32,
) -> Result<(), PagerError> {
    load::pump(core, control);
    match control.loads.wait_for() {
        WaitFor::Nothing => return Ok(()),
        WaitFor::Signal if is_woken(control, id, span) => return Ok(()),
        WaitFor::Signal => {
            control.sleepers.push((id, span));
            core.changed.wait(control);
            if let Some(place) = control.sleepers.iter().position(|sleeper| *sleeper == (id, span)) {
                control.sleepers.swap_remove(place);
            }
            return Ok(());
        }
        WaitFor::Buffer => {}
    }
    // No buffer and nobody reading: a copy in flight will give one back, or else a kept page must.
    let arena = Arc::clone(&core.arena);
    let waited = MutexGuard::unlocked(control, || arena.wait_for_room());
    waited?;
    load::pump(core, control);
    if control.loads.wait_for() == WaitFor::Buffer {
        load::drop_one_cached(control);
        load::pump(core, control);
    }
    Ok(())
}

/// Makes the stream wait for copies under way; a span whose copies are all done becomes ready.
fn arrive(
    control: &mut Control,
    id: u32,
    span: u32,
    stream: &PagerStream,
    set: Option<&Arc<PatchSet>>,
) -> Result<(), DeviceError> {
    let Control { frames, models, .. } = control;
    let Some(model) = models.get(id as usize).and_then(Option::as_deref) else { return Ok(()) };
    let mut all_done = true;
    let mut last: Option<Fence> = None;
    for page in model.layout.span(span).pages {
        let frame = model.pages[page as usize].frame;
        if frame == NONE {
            continue;
        }
        let info = frames.info_mut(frame);
        let Some(fence) = &info.arrive else { continue };
        if last.as_ref().is_some_and(|last| last.is_same(fence)) {
            continue;
        }
        if fence.is_done()? {
            info.arrive = None;
            continue;
        }
        all_done = false;
        if !control.mutated.by(Mutation::KernelWithoutArrival) {
            fence.wait_on(stream)?;
        }
        last = Some(fence.clone());
    }
    let all_done = all_done || control.mutated.by(Mutation::ReadyTooEarly);
    model.words[span as usize].0.arrived(PatchSet::version_of(set, span), all_done);
    Ok(())
}

/// Releases a streamed span: the next copy into its ring frames waits for this point of the stream, and
/// frames that the pass is through with are filled ahead.
pub(super) fn release_streamed(core: &Arc<Core>, id: u32, span: u32, stream: &PagerStream) {
    let mut control = core.control.lock();
    let release =
        StreamedRelease { model: id, span, stream: Arc::clone(stream.stream()), slot: stream.slot() };
    if stream.is_capturing().unwrap_or(false) {
        // A record would become part of the graph and tell nothing: the pin stays until the capture is over.
        control.captured.push(release);
        // Nor would the record that is made then tell when the work ended.
        costs::not_compute(&mut control, id);
        return;
    }
    finish_release(core, &mut control, &release);
    if control.plain.is_none() && !std::mem::take(&mut control.refused) {
        prefetch::advance(core, &mut control, id);
    }
    drop(control);
    core.changed.notify_all();
}

/// Does the releases whose streams are no longer captured, and closes the models that waited for that.
pub(super) fn settle_captured(core: &Core, control: &mut Control) {
    if control.captured.is_empty() && control.closing.is_empty() {
        return;
    }
    for release in std::mem::take(&mut control.captured) {
        if release.stream.is_capturing().unwrap_or(false) {
            control.captured.push(release);
        } else {
            finish_release(core, control, &release);
        }
    }
    reclaim::close_captured(core, control);
}

fn finish_release(core: &Core, control: &mut Control, release: &StreamedRelease) {
    let StreamedRelease { model: id, span, ref stream, slot } = *release;
    let bit = 1_u64 << slot;
    let timed = costs::release_point(control, id, stream);
    let fence = match timed.map_or_else(|| control.engine.record(stream), Ok) {
        Ok(fence) => Some(fence),
        Err(error) => {
            // Without a fence only the stream itself can tell; a lost device cannot, and is latched. Told only
            // after the wait, which would answer with it otherwise.
            if let Err(error) = stream.settle() {
                core.device.defer(error);
            }
            core.device.defer(error);
            None
        }
    };
    if control.plain.is_some() {
        plain::release_streamed(control, id, span, slot, fence.as_ref());
        control.under_way -= 1;
        return;
    }
    if let Some(model) = control.model_mut(id) {
        match &fence {
            Some(fence) => model.measure.released(span, slot, fence),
            None => model.measure.give_up(),
        }
    }
    {
        let Control { frames, models, .. } = control;
        let Some(model) = models.get(id as usize).and_then(Option::as_deref) else { return };
        for page in model.layout.span(span).pages {
            let frame = model.pages[page as usize].frame;
            if frame == NONE {
                continue;
            }
            let info = frames.info_mut(frame);
            if info.role != Role::Ring {
                continue;
            }
            if let Some(fence) = &fence
                && !control.mutated.by(Mutation::ReleaseWithoutFence)
            {
                info.used_until(slot, fence);
            }
            if model.is_last_use(page, span) {
                info.consumed = true;
            }
        }
        model.words[span as usize].0.release(bit);
    }
    control.under_way -= 1;
    control.releases += 1;
}

/// Notes the fault in the model's order; at the end of a pass the plan may change.
fn note_order(core: &Core, control: &mut Control, id: u32, span: u32) -> Result<(), PagerError> {
    let Some(model) = control.model_mut(id) else { return Ok(()) };
    let learned = model.learner.note(span, &model.order);
    if matches!(learned, Learned::PassEnded | Learned::NewOrder(_)) {
        model.measure.pass_ended();
        costs::learn(control, id);
    }
    match learned {
        Learned::Nothing => Ok(()),
        Learned::PassEnded => replan::pass_ended(core, control, id),
        Learned::NewOrder(spans) => {
            follow(control, id, spans, "learned another order");
            reclaim::evict_outside(control, id)?;
            replan::pass_ended(core, control, id)?;
            replan::replan(core, control, id, true)
        }
        Learned::Widened(spans) => {
            follow(control, id, spans, "what was never faulted is faulted now");
            replan::replan(core, control, id, true)
        }
    }
}

/// From now on the model's passes go in this order.
fn follow(control: &mut Control, id: u32, spans: Vec<u32>, why: &str) {
    let Some(model) = control.model_mut(id) else { return };
    tracing::debug!(model = model.name, "{why}");
    model.set_order(spans);
    model.choices.forget();
}

fn span_error(control: &Control, id: u32, span: u32) -> Option<(u32, PagerError)> {
    let model = control.model(id)?;
    if model.errors.is_empty() {
        return None;
    }
    let mut pages = model.layout.span(span).pages;
    pages.find_map(|page| model.errors.get(&page).map(|error| (page, error.clone())))
}

fn forget_errors(control: &mut Control, id: u32, span: u32) {
    if let Some(model) = control.model_mut(id)
        && !model.errors.is_empty()
    {
        for page in model.layout.span(span).pages {
            model.errors.remove(&page);
        }
    }
}

fn is_loading(control: &Control, id: u32, span: u32) -> bool {
    let Some(model) = control.model(id) else { return false };
    // From the end: the last come last.
    model.layout.span(span).pages.rev().any(|page| {
        let frame = model.pages[page as usize].frame;
        frame != NONE && control.is_present(id, page) && control.frames.info(frame).loading != 0
    })
}

fn is_present(control: &Control, id: u32, span: u32) -> bool {
    let Some(model) = control.model(id) else { return true };
    model.layout.span(span).pages.all(|page| control.is_present(id, page))
}

/// Notes that a fault begins, or has ended, to bring bytes in.
fn note_bringing(core: &Core, control: &mut Control, id: u32, begins: bool) {
    let Some(model) = control.model_mut(id) else { return };
    if begins {
        model.bringing += 1;
    } else {
        model.bringing -= 1;
        if model.bringing == 0 && model.exchanges > 0 {
            core.changed.notify_all();
        }
    }
}

/// Waits until no fault brings bytes in: they let go of the lock for their reads, and what then arrives must
/// be made with the patches that they asked for. Each of them takes a bounded time and none waits for a
/// guard; new ones wait for this exchange.
fn wait_for_bringing(core: &Core, control: &mut MutexGuard<'_, Control>, id: u32) {
    if let Some(model) = control.model_mut(id) {
        model.exchanges += 1;
    }
    while control.model(id).is_some_and(|model| model.bringing > 0) {
        core.changed.wait(control);
    }
    if let Some(model) = control.model_mut(id) {
        model.exchanges -= 1;
    }
    core.changed.notify_all();
}

/// Attaches a set, or none, if another one is attached. The lock is let go while factors are copied and
/// while other faults of the model bring bytes in.
pub(super) fn ensure_attached(
    model: &PagedModel,
    control: &mut MutexGuard<'_, Control>,
    set: Option<&Arc<PatchSet>>,
) -> Result<(), PagerError> {
    let (core, id) = (model.core(), model.id());
    while !attach::is_attached(control, id, set) {
        let patches = match set {
            None => None,
            Some(set) => {
                let copies = Arc::clone(control.engine.stream(0));
                let uploaded =
                    MutexGuard::unlocked(control, || DevicePatches::upload(core, model, set, &copies));
                Some(uploaded?)
            }
        };
        wait_for_bringing(core, control, id);
        attach::attach(core, control, id, patches)?;
    }
    Ok(())
}
