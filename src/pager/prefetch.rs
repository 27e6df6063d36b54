//! Prefetch: filling ring frames ahead of the faults, in pass order.
//!
//! It runs where ring space comes free: at the release of a streamed span, on the runner's thread. It
//! only ever writes frames whose bytes the pass is through with, so that a wrong guess costs time and at
//! most one ring of bytes, never correctness.

#![deny(unsafe_code)]

use std::sync::Arc;

use super::claim;
use super::core::{Control, Core, ModelState};
use super::frames::NONE;
use super::load;
use super::order::PagePlace;

/// Pages present already that one call may skip.
const SKIPS: u32 = 64;

/// A fault had to load `pages` itself: prefetch goes on behind the last of them.
pub(super) fn demanded(control: &mut Control, id: u32, pages: &[u32]) {
    let Some(model) = control.model_mut(id) else { return };
    let last = pages.iter().rev().find(|&&page| model.pages[page as usize].slot != NONE);
    if let Some(&last) = last
        && let Some(place) = model.order.place_of(last, model.layout.spans_of_page(last))
    {
        model.cursor = PagePlace { page: place.page + 1, ..place };
    }
}

/// Asks for the next streamed pages, as far as ring frames are free and depth permits.
pub(super) fn advance(core: &Arc<Core>, control: &mut Control, id: u32) {
    let mut run: Option<(u32, u32)> = None;
    let mut skipped = 0;
    let mut room = load::room_ahead(core, control, id);
    // One call never fills more than the ring.
    for _ in 0..=control.frames.ring.len() + SKIPS as usize {
        let Some(model) = control.model(id) else { return };
        let streamed = model.streamed.len();
        if streamed == 0 || room == 0 || control.loads.outstanding() >= core.options.prefetch_loads {
            break;
        }
        let Some((page, next)) = next_streamed(model) else { break };
        if control.is_present(id, page) {
            skipped += 1;
            if skipped > SKIPS.min(streamed) {
                break;
            }
            if let Some(model) = control.model_mut(id) {
                model.cursor = next;
            }
            continue;
        }
        if !claim_ahead(control, id, page) {
            break;
        }
        room -= 1;
        if let Some(model) = control.model_mut(id) {
            model.cursor = next;
        }
        run = match run {
            Some((first, count)) if first + count == page => Some((first, count + 1)),
            Some((first, count)) => {
                load::submit(core, control, id, first, count);
                if !control.is_present(id, first) {
                    // It failed at once. The fault that needs it will say why; to go on here would go around
                    // the whole pass for nothing, and on a card that refuses everything, for ever.
                    load::submit(core, control, id, page, 1);
                    return;
                }
                Some((page, 1))
            }
            None => Some((page, 1)),
        };
    }
    if let Some((first, count)) = run {
        load::submit(core, control, id, first, count);
    }
}

/// The streamed page that prefetch goes on at, and the place behind it; behind the last comes the first.
fn next_streamed(model: &ModelState) -> Option<(u32, PagePlace)> {
    let at = model.cursor;
    let (found, span) = match model.streamed.next(at.page) {
        Some(found) => (found, at.span),
        None => (model.streamed.next(0)?, 0),
    };
    let mut place = PagePlace { page: found, span };
    let page = model.order.page_at(&mut place)?;
    Some((page, PagePlace { page: found + 1, ..place }))
}

/// Takes the frame of a page's slot for it, if the pass is through with what lies there.
fn claim_ahead(control: &mut Control, id: u32, page: u32) -> bool {
    let Some(model) = control.model(id) else { return false };
    let entry = model.pages[page as usize];
    let Some(&frame) = control.frames.ring.get(entry.slot as usize) else { return false };
    if frame == NONE || entry.frame != frame && entry.frame != NONE {
        // A change of plan is carried out by the fault itself, not ahead of it.
        return false;
    }
    if !claim::is_spare(control, frame) || control.frames.info(frame).loading != 0 {
        return false;
    }
    // The spans of the page itself must not be under way: their fault claims for itself.
    let busy = model.layout.spans_of_page(page).any(|span| model.words[span as usize].0.view().pins() > 0);
    if busy || !claim::take(control, frame) {
        return false;
    }
    let mut mapped = Vec::new();
    if claim::remap(control, id, page, frame, &mut mapped).is_err()
        || claim::set_access(control, id, &mapped).is_err()
    {
        claim::drop_mappings(control, id, &mapped);
        return false;
    }
    claim::occupy(control, id, page);
    true
}
