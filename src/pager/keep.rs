//! What stays in staging memory for later: pages that are streamed again, and pages that were read ahead.
//!
//! Pages that will be streamed again are kept as long as the page-locked budget permits; the next pass then
//! reads no file. All under the control lock.

#![deny(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::ahead::ReadRun;
use super::copies::{PageSource, copy_pages};
use super::core::{CachedRun, Control, Core};
use super::error::PagerError;
use super::frames::NONE;
use super::load::fail_pages;
use crate::staging::StagingBuffer;
use crate::units::ModelTime;

/// The kept run that holds `page`, and how many of its pages come from there on.
pub(super) fn cached_run(control: &Control, id: u32, page: u32) -> Option<(u32, u32)> {
    let (first, run) = control.model(id)?.cache.range(..=page).next_back()?;
    let end = first + run.pages;
    (page < end).then(|| (*first, end - page))
}

/// Copies from a kept run.
pub(super) fn copy_cached(
    core: &Arc<Core>,
    control: &mut Control,
    id: u32,
    run: u32,
    first: u32,
    count: u32,
) {
    let pages = first..first + count;
    let available = core.device.now();
    let copied = copy_pages(control, id, pages.clone(), 0, PageSource::Kept(run), available, core.page_bytes);
    if let Err(error) = copied {
        fail_pages(control, id, pages, 0, &error.into());
    }
}

/// What becomes of a part of a buffer that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// It will be streamed again.
    Keep,
    /// No frame was claimed for it yet.
    Ahead,
    GiveBack,
}

/// Says what becomes of a buffer that holds `pages`, page by page: with `unclaimed`, the time from which its
/// bytes are there, what has no frame yet waits for one; what will be streamed again is kept if the budget
/// permits; the rest goes back.
pub(super) fn settle(
    core: &Core,
    control: &mut Control,
    id: u32,
    pages: Range<u32>,
    buffer: StagingBuffer,
    unclaimed: Option<ModelTime>,
) {
    let kept_limit = kept_limit(core);
    let fate = |control: &Control, page: u32| {
        let streamed = control.model(id).is_some_and(|model| model.pages[page as usize].slot != NONE);
        if unclaimed.is_some() && !control.is_present(id, page) {
            Fate::Ahead
        } else if streamed && control.cached_bytes + core.page_bytes <= kept_limit {
            Fate::Keep
        } else {
            Fate::GiveBack
        }
    };
    let available = unclaimed.unwrap_or(ModelTime::ZERO);
    let mut rest = Some(buffer);
    let mut page = pages.start;
    while let Some(mut buffer) = rest.take() {
        let now = fate(control, page);
        let mut count = 1;
        let mut kept = control.cached_bytes + core.page_bytes;
        while page + count < pages.end && fate(control, page + count) == now {
            if now == Fate::Keep {
                if kept + core.page_bytes > kept_limit {
                    break;
                }
                kept += core.page_bytes;
            }
            count += 1;
        }
        rest = if page + count < pages.end { buffer.split_off(count) } else { None };
        match now {
            Fate::Keep => {
                control.cached_bytes += buffer.len();
                let run = CachedRun { buffer, pages: count };
                // A page that was asked for, taken away and asked for again is read twice.
                let replaced = control.model_mut(id).and_then(|model| model.cache.insert(page, run));
                control.cached_bytes -= replaced.map_or(0, |run| run.buffer.len());
            }
            Fate::Ahead => {
                control.loads.ahead.push(ReadRun { model: id, first: page, pages: count, buffer, available });
            }
            Fate::GiveBack => {}
        }
        page += count;
    }
}

/// Bytes of staging memory that may hold kept pages: the ring of buffers that reads go through stays free of
/// them.
pub(super) fn kept_limit(core: &Core) -> u64 {
    let limit = core.arena.limit_bytes();
    limit.saturating_sub(4 * u64::from(core.chunk_pages) * core.page_bytes)
}

/// Gives kept pages back that are more than may be kept now.
pub(super) fn drop_kept_over_limit(core: &Core, control: &mut Control) {
    let limit = kept_limit(core);
    while control.cached_bytes > limit && drop_one_cached(control) {}
}

/// Gives kept pages of `model` back until `bytes` are free or none is left; answers the bytes.
pub(super) fn drop_cached(control: &mut Control, id: u32, bytes: u64) -> u64 {
    let mut freed = 0;
    while freed < bytes {
        let Some((_, run)) = control.model_mut(id).and_then(|model| model.cache.pop_last()) else { break };
        freed += run.buffer.len();
        control.cached_bytes -= run.buffer.len();
    }
    freed
}

/// Gives staging memory back that holds bytes for later: what was read ahead, or else one kept run of any
/// model, of the least important first.
pub(super) fn drop_one_cached(control: &mut Control) -> bool {
    if control.loads.ahead.holds_any() {
        control.loads.cancel_ahead(None);
        return true;
    }
    control.loads.cancel_ahead(None);
    let least = (0..)
        .zip(&control.models)
        .filter_map(|(id, model)| model.as_ref().map(|model| (model, id)))
        .filter(|(model, _)| !model.cache.is_empty())
        .min_by_key(|(model, _)| model.priority)
        .map(|(_, id)| id);
    least.is_some_and(|id| drop_cached(control, id, 1) > 0)
}

/// Takes a staging buffer for a caller that holds no lock, waiting for copies in flight. Kept pages give way
/// where no copy is under way, or too many were waited for: they may lie so that no run of slots is free.
pub(super) fn take_buffer(core: &Arc<Core>, slots: u32) -> Result<StagingBuffer, PagerError> {
    const PATIENT_WAITS: u32 = 20;
    const WAITS: u32 = 5000;
    for waits in 0..WAITS {
        if let Some(buffer) = core.arena.take(slots)? {
            return Ok(buffer);
        }
        // Others may be reading into buffers that come back at once.
        let patient = waits == 0 || waits < PATIENT_WAITS && core.arena.has_copies_in_flight();
        if patient || !drop_one_cached(&mut core.control.lock()) {
            core.arena.wait_for_room()?;
        }
    }
    Err(PagerError::InvalidArgument { what: "staging", why: format!("no buffer of {slots} pages came free") })
}
