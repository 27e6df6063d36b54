//! Budget and reclaim: how many frames there may be, who has them, and taking them back.
//!
//! The budget is what the card has left for the pager: free memory, device wide, plus the frames that
//! the pager has, less the headroom. Frames are taken back from the least important model first, the
//! pages least worth keeping first. All under the control lock; a reclaim waits for the fences of the
//! work that used the pages it takes, never for a guard.

#![deny(unsafe_code)]

use std::cmp::Reverse;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::claim::unmap;
use super::core::{Control, Core, ModelState};
use super::error::PagerError;
use super::fault;
use super::frames::{NONE, PageKey, Role};
use super::mutations::Mutation;
use super::plain;
use super::plan::Plan;
use crate::device::DeviceError;

/// How old a look at the device's memory may be while faults go on.
pub(super) const BUDGET_AGE: Duration = Duration::from_millis(2);

/// Whose frames may be taken for a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TakeFrom {
    /// Only free ones.
    Nobody,
    /// Models of lower priority.
    Lower,
    /// Any model, the asking one last.
    Anyone,
}

/// Looks at the device's memory, if the last look is old or `force` says so, and gives back what is over
/// the budget, and what the activation pool has not used for a while. Answers whether it looked.
pub(super) fn refresh_budget(core: &Core, control: &mut Control, force: bool) -> Result<bool, PagerError> {
    // What a capture kept may be free by now.
    control.streams.free_late();
    fault::settle_captured(core, control);
    if control.plain.is_some() {
        return plain::refresh_budget(core, control, force).map(|()| false);
    }
    let now = core.device.now();
    if !force && control.budget_read_at.is_some_and(|read| now.since(read) < BUDGET_AGE) {
        return Ok(false);
    }
    let pool = core.device.pool_figures()?;
    let needed = control.pool_use.note(now, pool.used);
    if pool.reserved > needed + core.page_bytes {
        core.device.pool_trim(needed)?;
    }
    control.budget_read_at = Some(now);
    core.looked_at.0.store(now.0.max(1), Ordering::Relaxed);
    control.frames.note_pool(core.device.pool_figures()?.reserved);
    loop {
        let free = core.device.memory()?.free;
        let ours = u64::from(control.frames.count()) * core.page_bytes;
        let bytes = (free + ours).saturating_sub(core.headroom());
        control.budget = u32::try_from(bytes / core.page_bytes).unwrap_or(u32::MAX - 1);
        let over = control.frames.count().saturating_sub(control.budget);
        // Where nothing at all is free others may have taken more than that tells: look again.
        if over == 0 || give_back(core, control, over)? < over || free > 0 {
            return Ok(true);
        }
    }
}

/// Hands `count` frames back to the device: idle ones, then resident pages of the least important model,
/// then the ring's. Answers how many it could.
pub(super) fn give_back(core: &Core, control: &mut Control, count: u32) -> Result<u32, PagerError> {
    let mut released = control.frames.release_idle(count)?;
    while released < count {
        if evict_one(control, None)?.is_none() {
            break;
        }
        released += control.frames.release_idle(1)?;
    }
    if released < count {
        let keep = control.frames.ring_frames().saturating_sub(count - released);
        shrink_ring(control, keep)?;
        released += control.frames.release_idle(count - released)?;
    }
    if released < count {
        tracing::debug!(
            asked = count,
            released,
            held = control.held_names(None).len(),
            "{}: guards hold the rest",
            core.device.info().name
        );
    }
    Ok(released)
}

/// A frame for a page of model `id`.
pub(super) fn obtain(
    core: &Core,
    control: &mut Control,
    id: u32,
    role: Role,
    from: TakeFrom,
) -> Result<Option<u32>, PagerError> {
    // Ring slots that are planned but not filled yet keep their room.
    let unfilled =
        u32::try_from(control.frames.ring.len()).unwrap_or(u32::MAX) - control.frames.ring_frames();
    let reserve = if role == Role::Ring { 0 } else { unfilled };
    if control.frames.idle() > reserve.saturating_sub(control.budget.saturating_sub(control.frames.count()))
        && let Some(frame) = control.frames.take_idle(role)
    {
        return Ok(Some(frame));
    }
    if control.frames.count() + reserve < control.budget {
        match create(core, control, role)? {
            Some(frame) => return Ok(Some(frame)),
            // Somebody took memory since the last look, and there is none.
            None => control.budget = control.budget.min(control.frames.count()),
        }
    }
    let below = match from {
        TakeFrom::Nobody => return Ok(None),
        TakeFrom::Lower => control.model(id).map(|model| model.priority),
        TakeFrom::Anyone => None,
    };
    if evict_one(control, below)?.is_some() {
        return Ok(control.frames.take_idle(role));
    }
    Ok(None)
}

/// A new frame within the budget; `None` if the device has no memory after all. Asked twice, since what
/// somebody took for a moment must not count as gone.
fn create(core: &Core, control: &mut Control, role: Role) -> Result<Option<u32>, PagerError> {
    for _ in 0..2 {
        match control.frames.create(role) {
            Ok(frame) => return Ok(Some(frame)),
            Err(error) if error.is_out_of_memory() => {
                refresh_budget(core, control, true)?;
            }
            Err(error) => return Err(error.into()),
        }
        if control.frames.count() >= control.budget {
            break;
        }
    }
    Ok(None)
}

/// Takes one resident page from the model that is needed again last (of a priority below `below`), the page
/// least worth keeping that no guard holds. Its frame is idle then.
fn evict_one(control: &mut Control, below: Option<u64>) -> Result<Option<PageKey>, PagerError> {
    let mut after = None;
    loop {
        let highest = control.models.iter().flatten().map(|model| model.priority).max();
        // The model with resident pages that is needed again last and was not tried yet.
        let next = (0_u32..)
            .zip(&control.models)
            .filter_map(|(id, model)| model.as_ref().map(|model| (id, model)))
            .filter(|(_, model)| model.resident > 0 && below.is_none_or(|below| model.priority < below))
            .map(|(id, model)| {
                let turns = control.activations.turns_until(id);
                (keeping(turns, model.priority, highest == Some(model.priority)), id)
            })
            .filter(|&(worth, _)| after.is_none_or(|after| worth > after))
            .min();
        let Some((worth, id)) = next else { return Ok(None) };
        if let Some(page) = evict_from(control, id)? {
            return Ok(Some(PageKey { model: id, page }));
        }
        after = Some(worth);
    }
}

/// How much a model's pages are worth keeping, beside those of others: the active one's most, then by the
/// turn in which it is expected again, the sooner the more; what nobody expects by how lately it was active.
fn keeping(turns: Option<usize>, priority: u64, active: bool) -> (bool, Option<Reverse<usize>>, u64) {
    (active, turns.map(Reverse), priority)
}

/// Takes the page least worth keeping from a model; `None` if guards hold all of them.
pub(super) fn evict_from(control: &mut Control, id: u32) -> Result<Option<u32>, PagerError> {
    let Some(model) = control.model(id) else { return Ok(None) };
    let mut place = model.resident_end;
    let mut seen_resident = false;
    while place > 0 {
        place -= 1;
        let Some(model) = control.model(id) else { return Ok(None) };
        let page = model.order.keep()[place as usize];
        let frame = model.pages[page as usize].frame;
        if frame == NONE || control.frames.info(frame).role != Role::Resident {
            continue;
        }
        if !seen_resident {
            seen_resident = true;
            if let Some(model) = control.model_mut(id) {
                model.resident_end = place + 1;
            }
        }
        if evict_page(control, id, page)? {
            return Ok(Some(page));
        }
    }
    Ok(None)
}

/// Takes a resident page's frame, which becomes idle; `false` if a guard holds the page.
pub(super) fn evict_page(control: &mut Control, id: u32, page: u32) -> Result<bool, PagerError> {
    let key = PageKey { model: id, page };
    if control.leave_page(key).is_none() {
        return Ok(false);
    }
    let unmapped = unmap(control, id, page);
    control.set_page_absent(key);
    unmapped?;
    if let Some(model) = control.model_mut(id) {
        model.counts.evicted_pages += 1;
    }
    Ok(true)
}

/// Takes the frames of pages that have no place in the pass any more. Such a page came ahead of a fault that
/// never followed; without a rank nobody would find it again who needs a frame.
pub(super) fn evict_outside(control: &mut Control, id: u32) -> Result<(), PagerError> {
    let pages = control.model(id).map_or(0, |model| model.layout.page_count());
    for page in 0..pages {
        let Some(model) = control.model(id) else { return Ok(()) };
        let frame = model.pages[page as usize].frame;
        if frame != NONE && !model.order.has_page(page) && control.frames.info(frame).role == Role::Resident {
            evict_page(control, id, page)?;
        }
    }
    Ok(())
}

/// Takes frames out of the ring until it has `keep` slots; frames that guards hold stay in, and move to the places
/// of those that leave.
pub(super) fn shrink_ring(control: &mut Control, keep: u32) -> Result<(), PagerError> {
    let mut slot = control.frames.ring.len();
    while slot > 0 && control.frames.ring.len() > keep as usize {
        slot -= 1;
        let frame = control.frames.ring[slot];
        if frame != NONE && !empty_ring_frame(control, frame)? {
            continue;
        }
        control.frames.ring.swap_remove(slot);
        if frame != NONE {
            control.frames.make_idle(frame);
        }
    }
    Ok(())
}

/// Removes every mapping to a ring frame; `false` if a guard holds its content.
fn empty_ring_frame(control: &mut Control, frame: u32) -> Result<bool, PagerError> {
    if !super::claim::take(control, frame) {
        return Ok(false);
    }
    for id in 0..u32::try_from(control.models.len()).unwrap_or(u32::MAX) {
        if control.frames.info(frame).mapped == 0 {
            break;
        }
        let Some(model) = control.model(id) else { continue };
        let mapped: Vec<u32> = (0..)
            .zip(&model.pages)
            .filter(|(_, page)| page.frame == frame)
            .map(|(number, _)| number)
            .collect();
        for page in mapped {
            unmap(control, id, page)?;
        }
    }
    control.frames.info_mut(frame).wait_quiet()?;
    Ok(true)
}

/// Makes `bytes` free on the device for somebody else: idle frames first, then pages.
pub(super) fn make_room(core: &Core, control: &mut Control, bytes: u64) -> Result<u64, PagerError> {
    if control.plain.is_some() {
        return plain::give_back(core, control, bytes);
    }
    let wanted = u32::try_from(bytes.div_ceil(core.page_bytes)).unwrap_or(u32::MAX);
    let released = give_back(core, control, wanted)?;
    Ok(u64::from(released) * core.page_bytes)
}

/// Gives back up to `bytes` of a model's resident pages, in whole pages, to the device; answers the bytes.
pub(super) fn unload_pages(
    control: &mut Control,
    id: u32,
    bytes: u64,
    page_bytes: u64,
) -> Result<u64, PagerError> {
    let mut freed = 0;
    while freed < bytes {
        if evict_from(control, id)?.is_none() {
            break;
        }
        if control.frames.release_idle(1)? == 0 {
            break;
        }
        freed += page_bytes;
    }
    Ok(freed)
}

/// Waits for everything that uses a model's pages and gives all of its memory back to the card's idle
/// frames. Nobody faults the model any more.
///
/// A stream that is being captured cannot be waited for: what it used stays until the capture is over.
pub(super) fn close_model(control: &mut Control, id: u32) -> Result<(), DeviceError> {
    control.activations.forget(id);
    if !is_captured(control, id) {
        return close(control, id);
    }
    control.loads.cancel(id);
    if let Some(model) = control.model_mut(id) {
        // It is worth nothing, and needs no ring.
        (model.priority, model.promoted, model.plan) = (0, false, Plan::default());
    }
    control.closing.push(id);
    Ok(())
}

/// Closes the models that waited for captures which are over.
pub(super) fn close_captured(core: &Core, control: &mut Control) {
    for id in std::mem::take(&mut control.closing) {
        if is_captured(control, id) {
            control.closing.push(id);
        } else if let Err(error) = close(control, id) {
            core.device.defer(error);
        }
    }
}

/// Closes the models that still wait for a capture, when the last one who knows the card's pager lets go of it.
pub(super) fn close_rest(control: &mut Control) -> Result<(), DeviceError> {
    control.captured.clear();
    let mut result = Ok(());
    for id in std::mem::take(&mut control.closing) {
        result = result.and(close(control, id));
    }
    result
}

/// Whether a stream that is being captured used a model, or holds a guard of it.
fn is_captured(control: &Control, id: u32) -> bool {
    let used = |model: &ModelState| model.words.iter().fold(0, |used, word| used | word.0.used());
    control.captured.iter().any(|release| release.model == id)
        || control.model(id).is_some_and(|model| control.streams.is_capturing(used(model)))
}

fn close(control: &mut Control, id: u32) -> Result<(), DeviceError> {
    if control.plain.is_some() {
        return plain::close_model(control, id);
    }
    control.loads.cancel(id);
    let Control { frames, models, streams, .. } = control;
    let Some(model) = models.get_mut(id as usize).and_then(Option::take) else { return Ok(()) };
    let used = model.words.iter().fold(0, |used, word| used | word.0.used());
    // What is not waited for here could not be unmapped, and would be lost for good.
    let skips = control.mutated.by(Mutation::CloseWithoutWait);
    let mut result = streams.settle(if skips { 0 } else { used });
    for (page, entry) in (0..).zip(&model.pages) {
        if entry.frame == NONE {
            continue;
        }
        let info = frames.info_mut(entry.frame);
        if !skips {
            result = result.and(info.settle());
        }
        info.mapped -= 1;
        if info.content == (PageKey { model: id, page }) {
            info.clear_content();
        }
    }
    for run in model.cache.values() {
        control.cached_bytes -= run.buffer.len();
    }
    let own: Vec<u32> = model
        .pages
        .iter()
        .map(|page| page.frame)
        .filter(|&frame| frame != NONE && frames.info(frame).role == Role::Resident)
        .collect();
    // Unmaps everything, then frees the range.
    drop(model);
    // The last first, so that the next model's pages take them in the order in which they lie: neighbours are one call.
    for frame in own.into_iter().rev() {
        frames.make_idle(frame);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_needed_again_last_is_worth_the_least() {
        // By turns, priority, and whether it is active; least worth first.
        let models = [
            (None, 1, false),
            (None, 7, false),
            (Some(5), 2, false),
            (Some(1), 6, false),
            (Some(0), 3, false),
            (None, 9, true),
        ];
        let worth = models.map(|(turns, priority, active)| keeping(turns, priority, active));
        assert!(worth.is_sorted(), "{worth:?}");
    }
}
