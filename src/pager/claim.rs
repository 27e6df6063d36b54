//! Claiming: giving each page of a span a frame that will hold its bytes.
//!
//! A resident page gets a frame of its own. A streamed page is mapped, once, to the frame of its ring
//! slot; in steady state a claim only takes that frame from the page before, and makes no mapping call.
//! If a guard holds the slot's frame, the page is mapped to another one; if there is none, the claim
//! fails at once and says what is held. All under the control lock.

#![expect(unsafe_code, reason = "unmaps pages after it waited for everything that used them")]

use super::core::{Control, Core, ModelState, Page};
use super::error::PagerError;
use super::frames::{NONE, PageKey, Role};
use super::mutations::Mutation;
use super::reclaim::{self, TakeFrom};
use crate::device::DeviceError;

/// Whether a fault would rather wait for another's guard than take memory that is still of use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Patience {
    /// It goes on if there is any way.
    None,
    /// It is asked again when a guard was released.
    MayWait,
}

/// What a claim did.
#[derive(Debug, Default)]
pub(super) struct Claimed {
    /// Pages whose bytes must be loaded, ascending.
    pub(super) missing: Vec<u32>,
    /// Whether one of them lies in the ring.
    pub(super) streamed: bool,
}

/// Gives every page of `span` a frame. The caller pinned the span as arriving, so that none of its pages
/// is taken for another one meanwhile. After an error nothing is claimed.
pub(super) fn claim_span(
    core: &Core,
    control: &mut Control,
    id: u32,
    span: u32,
    patience: Patience,
) -> Result<Claimed, PagerError> {
    // The list keeps its memory from one claim to the next.
    let mut claimed = Claimed { missing: std::mem::take(&mut control.missing), streamed: false };
    claimed.missing.clear();
    let Some(model) = control.model(id) else { return Ok(claimed) };
    let pages = model.layout.span(span).pages;
    if pages.end - pages.start > control.budget {
        // Refused before anything is taken for it: a try would empty the card and fail all the same.
        reclaim::refresh_budget(core, control, true)?;
        if pages.end - pages.start > control.budget {
            return Err(never_fits(core, control, id, span));
        }
    }
    // While nobody else has a fault under way or a guard in the ring there is nobody to wait for.
    let waiting = patience == Patience::MayWait && control.under_way > 1;
    let mut mapped = Vec::new();
    let mut result = Ok(());
    for page in pages.clone() {
        if control.is_present(id, page) {
            continue;
        }
        match place(core, control, id, page, waiting, &mut mapped) {
            Ok(role) => {
                occupy(control, id, page);
                claimed.streamed |= role == Role::Ring;
                claimed.missing.push(page);
            }
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    if let Err(error) = set_access(control, id, &mapped) {
        // Without access the new mappings are of no use; take them back so that a later claim maps again.
        drop_mappings(control, id, &mapped);
        result = Err(error.into());
    }
    if let Err(error) = result {
        for &page in &claimed.missing {
            release_claim(control, id, page);
        }
        return Err(describe(core, control, id, span, error));
    }
    if let Some(model) = control.model(id) {
        let streamed = model.is_streamed(span, &control.frames);
        model.words[span as usize].0.set_streamed(streamed);
    }
    Ok(claimed)
}

/// Marks a page's frame as holding, soon, its bytes.
pub(super) fn occupy(control: &mut Control, id: u32, page: u32) {
    control.page_loads += 1;
    let loads = control.page_loads;
    let Some(model) = control.model(id) else { return };
    let frame = model.pages[page as usize].frame;
    if frame == NONE {
        return;
    }
    control.frames.info_mut(frame).occupy(PageKey { model: id, page }, loads);
}

/// Undoes [`occupy`] for a page whose load was never asked for.
fn release_claim(control: &mut Control, id: u32, page: u32) {
    let Some(model) = control.model(id) else { return };
    let frame = model.pages[page as usize].frame;
    if frame != NONE && control.frames.info(frame).content == (PageKey { model: id, page }) {
        control.frames.info_mut(frame).clear_content();
    }
}

/// Makes new mappings accessible, one call a run.
pub(super) fn set_access(control: &mut Control, id: u32, mapped: &[u32]) -> Result<(), DeviceError> {
    if mapped.is_empty() {
        return Ok(());
    }
    let mut pages = mapped.to_vec();
    pages.sort_unstable();
    let Some(model) = control.model_mut(id) else { return Ok(()) };
    for run in pages.chunk_by(|a, b| a + 1 == *b) {
        if let Some(&first) = run.first() {
            let count = u32::try_from(run.len()).unwrap_or(u32::MAX);
            model.range.as_mut().map_or(Ok(()), |range| range.set_access(first, count))?;
        }
    }
    Ok(())
}

/// Takes new mappings back that could not be made accessible. One that stays is remembered, so that access
/// to it is set before it is used.
pub(super) fn drop_mappings(control: &mut Control, id: u32, mapped: &[u32]) {
    for &page in mapped {
        if unmap(control, id, page).is_err()
            && let Some(model) = control.model_mut(id)
        {
            model.inaccessible.insert(page);
        }
    }
}

/// Maps `page` to a frame that nobody needs any more. New mappings are added to `mapped`.
fn place(
    core: &Core,
    control: &mut Control,
    id: u32,
    page: u32,
    waiting: bool,
    mapped: &mut Vec<u32>,
) -> Result<Role, PagerError> {
    let Some(&Page { frame, slot, .. }) = control.model(id).and_then(|model| model.pages.get(page as usize))
    else {
        return Ok(Role::Idle);
    };
    if frame != NONE
        && let Some(model) = control.model_mut(id)
        && !model.inaccessible.is_empty()
        && model.inaccessible.remove(&page)
    {
        // Mapped by a claim that failed: it has no bytes yet, and no access.
        mapped.push(page);
    }
    if frame != NONE && control.frames.info(frame).role == Role::Resident {
        return Ok(Role::Resident);
    }
    if slot == NONE {
        let promoted = control.model(id).is_some_and(|model| model.promoted);
        let from = if promoted { TakeFrom::Lower } else { TakeFrom::Nobody };
        if let Some(own) = reclaim::obtain(core, control, id, Role::Resident, from)? {
            remap(control, id, page, own, mapped)?;
            return Ok(Role::Resident);
        }
    }
    let wanted = control.frames.ring.get(slot as usize).copied().unwrap_or(NONE);
    let wanted = if wanted == NONE && (slot as usize) < control.frames.ring.len() {
        match reclaim::obtain(core, control, id, Role::Ring, TakeFrom::Anyone)? {
            Some(filled) => {
                fill_slot(control, slot, filled);
                filled
            }
            None => NONE,
        }
    } else {
        wanted
    };
    // A page that was moved to another slot's frame before is still fine where it is, if that is free. Where it is
    // now: obtaining a frame may have looked at the card anew and given up the one that it was in.
    let frame = control.model(id).map_or(NONE, |model| model.pages[page as usize].frame);
    for candidate in [wanted, frame] {
        let may_take = candidate != NONE && (!waiting || is_spare(control, candidate));
        if may_take && take(control, candidate) {
            remap(control, id, page, candidate, mapped)?;
            return Ok(Role::Ring);
        }
    }
    let other = divert(core, control, id, waiting)?;
    remap(control, id, page, other, mapped)?;
    Ok(Role::Ring)
}

/// Puts a new ring frame into `slot`, or where there is room: obtaining it may have looked at the card anew
/// and shrunk the ring meanwhile.
fn fill_slot(control: &mut Control, slot: u32, frame: u32) {
    let ring = &mut control.frames.ring;
    let empty = match ring.get(slot as usize) {
        Some(&NONE) => Some(slot as usize),
        _ => ring.iter().position(|&there| there == NONE),
    };
    match empty.and_then(|slot| ring.get_mut(slot)) {
        Some(place) => *place = frame,
        None => ring.push(frame),
    }
}

/// Takes a ring frame from the page whose bytes it holds. `false`, and nothing changed, if a guard holds
/// that page.
pub(super) fn take(control: &mut Control, frame: u32) -> bool {
    let key = control.frames.info(frame).content;
    if !key.is_none() {
        if control.leave_page(key).is_none() {
            return false;
        }
        control.set_page_absent(key);
        if let Some(model) = control.model_mut(key.model) {
            model.counts.evicted_pages += 1;
        }
        control.frames.info_mut(frame).clear_content();
    }
    true
}

/// Whether the pass is through with what a ring frame holds, or will not come back for it.
pub(super) fn is_spare(control: &Control, frame: u32) -> bool {
    let info = control.frames.info(frame);
    let laps = 2 * control.frames.ring.len() as u64;
    info.consumed || info.content.is_none() || control.page_loads - info.uses.loaded_at() > laps
}

/// Another frame for a streamed page whose own is held: one of the ring that was used already, any other
/// of the ring, a new one, or one that a resident page gives up.
///
/// A fault that is `waiting` is refused before it takes what another still needs: a detour costs bytes
/// every time, a wait does not.
fn divert(core: &Core, control: &mut Control, id: u32, waiting: bool) -> Result<u32, PagerError> {
    let slots = control.frames.ring.len();
    for only_spare in [true, false] {
        for step in 0..slots {
            let place = (control.ring_hand + step) % slots;
            let frame = control.frames.ring[place];
            if frame == NONE || (only_spare && !is_spare(control, frame)) {
                continue;
            }
            if take(control, frame) {
                control.ring_hand = (place + 1) % slots;
                return Ok(frame);
            }
        }
        if waiting && slots > 0 {
            control.refused = true;
            return Err(held(core));
        }
    }
    if let Some(frame) = reclaim::obtain(core, control, id, Role::Ring, TakeFrom::Anyone)? {
        fill_slot(control, NONE, frame);
        control.ring_grew = true;
        return Ok(frame);
    }
    Err(held(core))
}

/// A refusal, to be completed by [`describe`].
fn held(core: &Core) -> PagerError {
    PagerError::Held {
        model: String::new(),
        what: String::new(),
        device: core.device.info().name.clone(),
        need: core.page_bytes,
        held: Vec::new(),
    }
}

/// Maps a page to `frame`, which nobody needs; does nothing if it is mapped there already.
pub(super) fn remap(
    control: &mut Control,
    id: u32,
    page: u32,
    frame: u32,
    mapped: &mut Vec<u32>,
) -> Result<(), DeviceError> {
    let Some(model) = control.model_mut(id) else { return Ok(()) };
    let old = model.pages[page as usize].frame;
    if old == frame {
        if frame != NONE && model.inaccessible.remove(&page) {
            // Mapped by a claim that failed.
            mapped.push(page);
        }
        return Ok(());
    }
    let role = control.frames.info(frame).role;
    let undo = |control: &mut Control| {
        if role == Role::Resident {
            control.frames.make_idle(frame);
        }
    };
    if old != NONE
        && let Err(error) = unmap(control, id, page)
    {
        undo(control);
        return Err(error);
    }
    let Control { frames, models, .. } = control;
    let Some(model) = models.get_mut(id as usize).and_then(Option::as_deref_mut) else { return Ok(()) };
    let Some(range) = &mut model.range else { return Ok(()) };
    if let Err(error) = range.map(page, &frames.set, frame) {
        undo(control);
        return Err(error);
    }
    frames.info_mut(frame).mapped += 1;
    model.pages[page as usize].frame = frame;
    if role == Role::Resident {
        model.resident += 1;
        model.resident_end = model.resident_end.max(model.order.rank(page).saturating_add(1));
    }
    mapped.push(page);
    Ok(())
}

/// Removes a page's mapping, after everything that may have used its address is done. Its spans are not
/// ready and not pinned; a frame of its own becomes idle.
pub(super) fn unmap(control: &mut Control, id: u32, page: u32) -> Result<(), DeviceError> {
    let Control { frames, models, engine, streams, .. } = control;
    let Some(model) = models.get_mut(id as usize).and_then(Option::as_deref_mut) else { return Ok(()) };
    let frame = model.pages[page as usize].frame;
    if frame == NONE {
        return Ok(());
    }
    // Earlier uses of this address: those of its own spans are on the streams that used them; copies into
    // it, and uses that a newer copy into the frame waited for, are behind the frame's own fences.
    let used =
        model.layout.spans_of_page(page).fold(0, |used, span| used | model.words[span as usize].0.used());
    let key = PageKey { model: id, page };
    let info = frames.info_mut(frame);
    let skips = control.mutated.by(Mutation::UnmapWithoutWait);
    if !skips && (info.role == Role::Resident || info.content == key) {
        for fence in streams.fences(used, engine)? {
            fence.wait()?;
        }
    }
    if !skips {
        info.wait_quiet()?;
    }
    let Some(range) = &mut model.range else { return Ok(()) };
    // SAFETY: no span of the page is pinned or ready (the caller took them), so no new work names its
    // address; work given before was waited for above.
    unsafe { range.unmap(page)? };
    model.pages[page as usize].frame = NONE;
    if !model.inaccessible.is_empty() {
        model.inaccessible.remove(&page);
    }
    info.mapped -= 1;
    if info.content == key {
        info.clear_content();
    }
    if info.role == Role::Resident {
        model.resident -= 1;
        frames.make_idle(frame);
    }
    Ok(())
}

/// Completes a refusal with what was asked for, and tells what can never fit from what is held now.
fn describe(core: &Core, control: &Control, id: u32, span: u32, error: PagerError) -> PagerError {
    if !matches!(error, PagerError::Held { .. }) {
        return error;
    }
    let Some(model) = control.model(id) else { return error };
    let place = model.layout.span(span);
    let pages = place.pages.end - place.pages.start;
    // The span itself is pinned by the fault that asks; it is not one that holds.
    let held = control.held_names(Some((id, span)));
    if pages > control.budget {
        return never_fits(core, control, id, span);
    }
    let what = what_of(model, span);
    let need = u64::from(pages) * core.page_bytes;
    let device = core.device.info().name.clone();
    let present = place.pages.clone().filter(|&page| control.is_present(id, page)).count() as u64;
    PagerError::Held {
        model: model.name.clone(),
        what,
        device,
        need: need.saturating_sub(present * core.page_bytes),
        held,
    }
}

/// A span as messages name it.
pub(super) fn what_of(model: &ModelState, span: u32) -> String {
    let unit = model.layout.span(span).unit;
    let name = &model.index.unit_info(unit).name;
    let spans = model.layout.unit(unit).spans;
    if spans.end - spans.start == 1 {
        format!("unit {name}")
    } else {
        format!("piece {} of unit {name}", span - spans.start)
    }
}

/// The refusal of a span that is larger than the card can give.
fn never_fits(core: &Core, control: &Control, id: u32, span: u32) -> PagerError {
    let (model, what, pages) = control.model(id).map_or_else(Default::default, |model| {
        let pages = model.layout.span(span).pages;
        (model.name.clone(), what_of(model, span), pages.end - pages.start)
    });
    PagerError::NeverFits {
        model,
        what,
        device: core.device.info().name.clone(),
        need: u64::from(pages) * core.page_bytes,
        limit: u64::from(control.budget) * core.page_bytes,
        holders: control.holders(core, id),
    }
}

/// The state of a span after a claim failed: absent, unless somebody else waits for it too.
pub(super) fn abandon(control: &Control, id: u32, span: u32) {
    if let Some(model) = control.model(id) {
        model.words[span as usize].0.abandon();
    }
}

#[cfg(all(test, not(loom)))]
#[path = "claim_tests.rs"]
mod tests;
