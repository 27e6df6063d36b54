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
use super::runs::{ahead_of, most_ahead};

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

/// Asks for the next streamed pages, as far as ring frames are free and depth permits, in copies that are worth it.
pub(super) fn advance(core: &Arc<Core>, control: &mut Control, id: u32) {
    let mut skipped = 0;
    let mut room = load::room_ahead(core, control, id);
    let slots = u32::try_from(control.frames.ring.len()).unwrap_or(u32::MAX);
    let most = most_ahead(core.options.ahead_pages(core.page_bytes), slots);
    // One call never fills more than the ring.
    for _ in 0..=slots + SKIPS {
        let Some(model) = control.model(id) else { return };
        let streamed = model.streamed.len();
        if streamed == 0 || room == 0 || control.loads.outstanding() >= core.options.prefetch_loads {
            break;
        }
        let Some((page, next)) = next_streamed(model, model.cursor) else { break };
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
        let (run, free) = next_run(control, model, id, 2 * most);
        let count = claim_run(control, id, page, ahead_of(run, free.min(room), most));
        if count == 0 {
            break;
        }
        room -= count;
        load::submit(core, control, id, page, count);
        if !control.is_present(id, page) {
            // It failed at once. The fault that needs it will say why; to go on here would go around the whole
            // pass for nothing, and on a card that refuses everything, for ever.
            return;
        }
    }
}

/// The streamed page that prefetch goes on at from a place, and the place behind it; behind the last comes the first.
fn next_streamed(model: &ModelState, at: PagePlace) -> Option<(u32, PagePlace)> {
    let (found, span) = match model.streamed.next(at.page) {
        Some(found) => (found, at.span),
        None => (model.streamed.next(0)?, 0),
    };
    let mut place = PagePlace { page: found, span };
    let page = model.order.page_at(&mut place)?;
    Some((page, PagePlace { page: found + 1, ..place }))
}

/// How many neighbouring pages follow one another from where prefetch goes on, at most `most`, and for how many
/// of them from the first one on there is a frame. Looks no further if there is none for the first.
fn next_run(control: &Control, model: &ModelState, id: u32, most: u32) -> (u32, u32) {
    let (mut run, mut free) = (0, 0);
    let mut place = model.cursor;
    let mut expected = None;
    while run < most
        && let Some((page, next)) = next_streamed(model, place)
        && expected.is_none_or(|expected| expected == page)
        && !control.is_present(id, page)
    {
        if free == run && frame_ahead(control, model, page).is_some() {
            free += 1;
        }
        run += 1;
        if free == 0 {
            break;
        }
        expected = Some(page + 1);
        place = next;
    }
    (run, free)
}

/// Takes frames for up to `count` pages from `first` on, where prefetch goes on; answers for how many it could.
fn claim_run(control: &mut Control, id: u32, first: u32, count: u32) -> u32 {
    for claimed in 0..count {
        if !claim_ahead(control, id, first + claimed) {
            return claimed;
        }
        if let Some(model) = control.model_mut(id)
            && let Some((_, next)) = next_streamed(model, model.cursor)
        {
            model.cursor = next;
        }
    }
    count
}

/// The frame of a page's slot, if the pass is through with what lies there.
fn frame_ahead(control: &Control, model: &ModelState, page: u32) -> Option<u32> {
    let entry = model.pages[page as usize];
    let frame = *control.frames.ring.get(entry.slot as usize)?;
    if frame == NONE || entry.frame != frame && entry.frame != NONE {
        // A change of plan is carried out by the fault itself, not ahead of it.
        return None;
    }
    (claim::is_spare(control, frame) && control.frames.info(frame).loading == 0).then_some(frame)
}

/// Takes the frame of a page's slot for it, if the pass is through with what lies there.
fn claim_ahead(control: &mut Control, id: u32, page: u32) -> bool {
    let Some(model) = control.model(id) else { return false };
    let Some(frame) = frame_ahead(control, model, page) else { return false };
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
