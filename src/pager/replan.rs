//! Plans carried out: which pages stay and which slot of the ring each other one uses.
//!
//! A model's plan is made anew when it may have another number of frames: when a look at the device says so, at
//! the end of a pass, when several faults are under way, when its order was learned. The decisions are `choose`'s
//! and `plan`'s; here their pages are dealt to slots, and what no longer stays is taken. All under the control
//! lock.

#![deny(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::choose::choose;
use super::core::{Control, Core, ModelState};
use super::error::PagerError;
use super::forecast::compute_in_copies;
use super::frames::{NONE, Role};
use super::modelled::Compute;
use super::order::{Keeping, PassOrder, PlaceSet};
use super::plain;
use super::plan::{RingSize, plan};
use super::reclaim::{evict_page, refresh_budget, shrink_ring};
use super::ring;

/// Makes the plan of a model anew if it may have another number of frames now, or `always`.
pub(super) fn replan(core: &Core, control: &mut Control, id: u32, always: bool) -> Result<(), PagerError> {
    if control.plain.is_some() {
        plain::replan(control, id, always);
        return Ok(());
    }
    let frames = frames_for(control, id);
    let others_ring = (0_u32..)
        .zip(&control.models)
        .filter(|(other, _)| *other != id)
        .filter_map(|(_, model)| model.as_ref().map(|model| model.plan.ring))
        .max()
        .unwrap_or(0);
    let Some(model) = control.model_mut(id) else { return Ok(()) };
    if !always && model.planned_frames == frames {
        // What was taken from the ring since then, for a while, belongs to it again.
        let ring = model.plan.ring.max(others_ring);
        open_slots(control, ring);
        return Ok(());
    }
    let pages = u32::try_from(model.order.pages().len()).unwrap_or(u32::MAX);
    let fits_beside = pages.saturating_add(others_ring) <= frames;
    // Where it does not fit, at least the others' ring is there already, and cannot be resident pages.
    let frames_planned = if fits_beside { frames } else { frames.min(pages.saturating_sub(1)) };
    // Not kept: it is 8 bytes a span, and what plans looks at each of its pages anyway.
    let groups = ModelState::make_groups(&model.layout, &model.whole_units);
    if core.options.ring == RingSize::Modelled && !fits_beside {
        choose_anew(core, model, &groups, frames_planned);
    }
    let mut new = plan(&model.order, &groups, frames_planned, model.choice.ring);
    // Each of several faults at once needs its part, and one more part arrives meanwhile.
    let for_all = new.largest_part.saturating_mul(model.together + 1).min(frames_planned);
    if core.options.ring == RingSize::Modelled && model.together > 1 && for_all > new.ring {
        new = plan(&model.order, &groups, frames_planned, RingSize::Pages(for_all));
    }
    if !fits_beside {
        new.resident = new.resident.min(frames.saturating_sub(others_ring));
    }
    if fits_beside {
        new.ring = 0;
    }
    model.plan = new;
    model.planned_frames = frames;
    let ring = new.ring.max(others_ring);
    tracing::debug!(
        model = model.name,
        frames,
        resident = new.resident,
        ring,
        largest_part = new.largest_part,
        "planned"
    );
    deal(control, id, ring);
    demote(control, id, new.resident)?;
    let slots = u32::try_from(control.frames.ring.len()).unwrap_or(u32::MAX);
    if slots > ring {
        shrink_ring(control, ring)?;
    }
    open_slots(control, ring);
    leave_old_slots(control, id);
    Ok(())
}

/// Gives the ring as many slots, to be filled when they are used.
fn open_slots(control: &mut Control, slots: u32) {
    while control.frames.ring.len() < slots as usize {
        control.frames.ring.push(NONE);
    }
}

/// Frames that model `id` may plan for: the budget less what others keep.
fn frames_for(control: &Control, id: u32) -> u32 {
    let Some(model) = control.model(id) else { return 0 };
    let others: u32 = (0_u32..)
        .zip(&control.models)
        .filter_map(|(other, state)| state.as_ref().map(|state| (other, state)))
        .filter(|(other, state)| *other != id && (!model.promoted || state.priority > model.priority))
        .map(|(_, state)| state.resident)
        .sum();
    control.budget.saturating_sub(others)
}

/// Takes the choice of ring and of pages kept first that is for about this many frames.
fn choose_anew(core: &Core, model: &mut ModelState, groups: &[Range<u32>], frames: u32) {
    let layout = Arc::clone(&model.layout);
    let pages_of = |span: u32| layout.span(span).pages;
    let choice = model.choices.for_about(frames, |frames| {
        let spans = model.order.spans();
        let order_with =
            |keeping: &Keeping| PassOrder::new(spans.to_vec(), layout.page_count(), pages_of, keeping);
        let span = |span: u32| {
            let bytes = layout.span(span).bytes;
            (pages_of(span), bytes.end - bytes.start)
        };
        let copy = model.link.duration(core.page_bytes).as_secs_f64();
        let total =
            model.compute_per_gib.map(|per_gib| compute_in_copies(layout.page_count(), per_gib, model.link));
        let compute = Compute { total, spans: model.measure.seconds(), copy };
        let most = core.options.ahead_pages(core.page_bytes);
        choose(order_with, groups, span, frames, most, &compute)
    });
    let Some(choice) = choice else { return };
    let other_order = choice.keeping != model.choice.keeping;
    model.choice = choice;
    if other_order {
        let spans = model.order.spans().to_vec();
        model.set_order(spans);
    }
}

/// Says for every page whether it stays, and which ring slot it uses if not.
///
/// While the ring keeps its size, pages that go on streaming keep their slots and new ones get a slot
/// half a lap away from their neighbour's; after many such edits all slots are dealt anew.
fn deal(control: &mut Control, id: u32, ring: u32) {
    let Some(model) = control.model_mut(id) else { return };
    let stays = model.plan.resident;
    let (mut streamed, mut new_pages) = (0_u32, 0_u32);
    for page in model.order.pages().filter(|&page| model.order.rank(page) >= stays) {
        streamed += 1;
        new_pages += u32::from(model.pages[page as usize].slot == NONE);
    }
    let gone = (model.streamed.len() + new_pages).saturating_sub(streamed);
    let edits = model.edits.saturating_add(new_pages + gone);
    let anew = ring != model.dealt_ring || edits > streamed / 16;
    for (number, page) in (0..).zip(&mut model.pages) {
        if !model.order.has_page(number) || model.order.rank(number) < stays {
            page.slot = NONE;
        }
    }
    let mut places = PlaceSet::new(u32::try_from(model.order.pages().len()).unwrap_or(u32::MAX));
    let (mut place, mut last_slot) = (0, 0);
    for (in_pass, number) in (0..).zip(model.order.pages()) {
        if model.order.rank(number) < stays {
            continue;
        }
        places.insert(in_pass);
        let page = &mut model.pages[number as usize];
        if anew {
            page.slot = ring::slot(place, streamed, ring);
        } else if page.slot == NONE {
            page.slot = (last_slot + ring / 2) % ring.max(1);
        }
        last_slot = page.slot;
        place += 1;
    }
    model.edits = if anew { 0 } else { edits };
    model.dealt_ring = ring;
    model.streamed = places;
}

/// Takes the frames of pages that no longer stay; those that guards hold keep theirs for now.
fn demote(control: &mut Control, id: u32, stays: u32) -> Result<(), PagerError> {
    let Some(model) = control.model(id) else { return Ok(()) };
    for place in (stays..model.resident_end).rev() {
        let Some(model) = control.model(id) else { return Ok(()) };
        let page = model.order.keep()[place as usize];
        let frame = model.pages[page as usize].frame;
        if frame != NONE && control.frames.info(frame).role == Role::Resident {
            evict_page(control, id, page)?;
        }
    }
    Ok(())
}

/// Takes a model's pages out of ring frames that are no longer their slots', at most a ring of them: so the
/// next pass maps every page where it belongs, and the one after it maps nothing.
fn leave_old_slots(control: &mut Control, id: u32) {
    for slot in 0..control.frames.ring.len() {
        let frame = control.frames.ring[slot];
        if frame == NONE {
            continue;
        }
        let key = control.frames.info(frame).content;
        let Some(model) = control.model(id).filter(|_| key.model == id) else { continue };
        if model.pages[key.page as usize].slot as usize != slot {
            // A page that a guard holds stays where it is until it is loaded anew.
            super::claim::take(control, frame);
        }
    }
}

/// Looks at the device's memory now and then, and follows what it says: gives back what is over the budget,
/// and plans for more as soon as there is clearly more.
pub(super) fn follow_budget(core: &Core, control: &mut Control, id: u32) -> Result<(), PagerError> {
    if !refresh_budget(core, control, false)? || control.plain.is_some() {
        return Ok(());
    }
    let frames = frames_for(control, id);
    let Some(model) = control.model(id) else { return Ok(()) };
    let planned = model.planned_frames;
    if frames < planned || frames - planned > planned / 128 {
        replan(core, control, id, false)?;
    }
    Ok(())
}

/// Notes that `together` faults and guards are under way at once; the ring is made for as many.
pub(super) fn note_together(
    core: &Core,
    control: &mut Control,
    id: u32,
    together: u32,
) -> Result<(), PagerError> {
    // Beyond this many they are taken to wait for each other.
    const MOST: u32 = 8;
    let together = together.min(MOST);
    let Some(model) = control.model_mut(id) else { return Ok(()) };
    model.together_now = model.together_now.max(together);
    if together <= model.together {
        return Ok(());
    }
    model.together = together;
    if control.plain.is_some() { Ok(()) } else { replan(core, control, id, true) }
}

/// A pass of a model ended: it may grow, and it has shown that it runs more than one pass.
pub(super) fn pass_ended(core: &Core, control: &mut Control, id: u32) -> Result<(), PagerError> {
    plain::pass_ended(control);
    refresh_budget(core, control, true)?;
    let mut alone_again = false;
    if let Some(model) = control.model_mut(id) {
        // A pass of one fault after the other needs no ring for several.
        alone_again = model.together > 1 && model.together_now <= 1;
        if alone_again {
            model.together = 1;
        }
        model.together_now = 1;
        model.promoted = true;
        model.passes = model.passes.saturating_add(1);
    }
    let others_rest = let_idle_rings_go(control, id);
    // A ring that grew around guards, and then went a pass without growing, goes back to its planned size;
    // the pages that gave up their frames for it come back.
    let planned = control.models.iter().flatten().map(|model| model.plan.ring).max().unwrap_or(0);
    if !std::mem::take(&mut control.ring_grew) && control.frames.ring.len() > planned as usize {
        shrink_ring(control, planned)?;
    }
    replan(core, control, id, alone_again || others_rest)
}

/// A model that had no fault in a whole pass of model `id` needs no ring that was made for several of them at once: the
/// ring is shared, and would be kept from `id`'s pages for as long as the other lives. Answers whether there was one.
fn let_idle_rings_go(control: &mut Control, id: u32) -> bool {
    let mut any = false;
    for other in (0..u32::try_from(control.models.len()).unwrap_or(u32::MAX)).filter(|other| *other != id) {
        let Some(model) = control.model_mut(other) else { continue };
        let faults = model.counts.hits + model.counts.loaded + model.counts.streamed;
        let rests = std::mem::replace(&mut model.faults_then, faults) == faults;
        if rests && model.together > 1 {
            model.together = 1;
            model.together_now = 1;
            // It plans anew, for the frames that it then has, when it comes back.
            model.plan.ring = 0;
            model.planned_frames = u32::MAX;
            any = true;
        }
    }
    any
}

/// Takes back what the activation pool keeps without using it, if that is a page or more, and plans with
/// it; answers whether there was anything.
pub(super) fn trim_pool(core: &Core, control: &mut Control, id: u32) -> Result<bool, PagerError> {
    let before = core.device.pool_figures()?;
    if before.reserved.saturating_sub(before.used) < core.page_bytes {
        return Ok(false);
    }
    core.device.pool_trim(before.used)?;
    if core.device.pool_figures()?.reserved >= before.reserved {
        return Ok(false);
    }
    refresh_budget(core, control, true)?;
    replan(core, control, id, false)?;
    Ok(true)
}
