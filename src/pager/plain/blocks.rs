//! Blocks: taking them from the card, giving them up, and how many bytes of them there may be.
//!
//! The budget is what the card has left: free memory, device wide, and what its pool holds, less the
//! headroom and the activations. All under the control lock; giving a block up waits for the fences of
//! what used it, never for a guard.

#![deny(unsafe_code)]

use std::sync::atomic::Ordering;

use super::Block;
use super::plan;
use crate::device::{DeviceError, PoolAllocation};
use crate::pager::core::{Control, Core};
use crate::pager::error::PagerError;
use crate::pager::frames::{FrameInfo, NONE, PageKey, Role};
use crate::pager::reclaim::{BUDGET_AGE, TakeFrom};
use crate::pager::word::SpanState;

/// The slot number under which a block's own allocation is noted among its uses.
const OWN: u8 = u8::MAX;

/// Looks at the device's memory, if the last look is old or `force` says so, and gives back what is over
/// the budget.
pub(in crate::pager) fn refresh_budget(
    core: &Core,
    control: &mut Control,
    force: bool,
) -> Result<(), PagerError> {
    let now = core.device.now();
    if !force && control.budget_read_at.is_some_and(|read| now.since(read) < BUDGET_AGE) {
        return Ok(());
    }
    let figures = core.device.memory()?;
    let pool = core.device.pool_figures()?;
    control.budget_read_at = Some(now);
    core.looked_at.0.store(now.0.max(1), Ordering::Relaxed);
    control.frames.note_pool(pool.reserved);
    let headroom = core.headroom();
    let Some(plain) = &mut control.plain else { return Ok(()) };
    plain.activations[0] = plain.activations[0].max(pool.used.saturating_sub(plain.held));
    let activations = plain.activations[0].max(plain.activations[1]);
    plain.budget = (figures.free + pool.reserved).saturating_sub(activations.saturating_add(headroom));
    let over = plain.held.saturating_sub(plain.budget);
    control.budget = u32::try_from(plain.budget / core.page_bytes).unwrap_or(u32::MAX - 1);
    if over > 0 {
        give_back(core, control, over)?;
    }
    // What was given up may lie in pieces that the pool cannot hand back: go on until the headroom is free.
    let mut free = if over > 0 { core.device.memory()?.free } else { figures.free };
    while free < headroom {
        release_idle(core)?;
        free = core.device.memory()?.free;
        if free >= headroom || give_up_one(control, NONE, None)? == 0 {
            break;
        }
    }
    Ok(())
}

/// Looks at the device's memory for what would be refused otherwise: what activations took and gave back is no reason
/// to refuse anything.
fn look_without_memory(core: &Core, control: &mut Control) -> Result<(), PagerError> {
    if let Some(plain) = &mut control.plain {
        plain.activations = [0; 2];
    }
    refresh_budget(core, control, true)
}

/// A pass ended: what its activations took counts for the next one too.
pub(in crate::pager) fn pass_ended(control: &mut Control) {
    if let Some(plain) = &mut control.plain {
        plain.activations = [0, plain.activations[0]];
    }
}

/// Gives blocks of at least `bytes` back to the device, of the least important model first; answers the
/// bytes that it could.
pub(in crate::pager) fn give_back(core: &Core, control: &mut Control, bytes: u64) -> Result<u64, PagerError> {
    let mut freed = 0;
    while freed < bytes {
        match give_up_one(control, NONE, None)? {
            0 => break,
            more => freed += more,
        }
    }
    release_idle(core)?;
    Ok(freed)
}

/// Gives blocks of model `id` back until `bytes` are free; answers the bytes that it could.
pub(in crate::pager) fn unload(
    core: &Core,
    control: &mut Control,
    id: u32,
    bytes: u64,
) -> Result<u64, PagerError> {
    let mut freed = 0;
    for (_, _, block) in candidates(control, NONE, |model, _| model == id) {
        if freed >= bytes {
            break;
        }
        freed += give_up(control, block)?;
    }
    release_idle(core)?;
    Ok(freed)
}

/// Hands memory of the pool that no allocation uses back to the device; answers the bytes.
pub(in crate::pager) fn release_idle(core: &Core) -> Result<u64, DeviceError> {
    let before = core.device.pool_figures()?.reserved;
    core.device.pool_trim(0)?;
    Ok(before.saturating_sub(core.device.pool_figures()?.reserved))
}

/// Bytes that model `id` holds.
pub(in crate::pager) fn bytes_of_model(control: &Control, id: u32) -> u64 {
    control.plain.as_ref().map_or(0, |plain| {
        let held = plain.held_by(Some(id));
        held.resident + held.ring
    })
}

/// Bytes that model `id` may plan for: the budget less what others keep.
fn bytes_for(control: &Control, id: u32) -> u64 {
    let (Some(plain), Some(model)) = (&control.plain, control.model(id)) else { return 0 };
    let kept = |other: u32| {
        other != id
            && (!model.promoted || control.model(other).is_some_and(|other| other.priority > model.priority))
    };
    let others: u64 =
        plain.blocks.iter().flatten().filter(|block| kept(block.model)).map(|block| block.bytes).sum();
    plain.budget.saturating_sub(others)
}

/// Makes the plan of a model anew if it may have another number of bytes now, or `always`.
pub(in crate::pager) fn replan(control: &mut Control, id: u32, always: bool) {
    let bytes = bytes_for(control, id);
    let Some(model) = control.model_mut(id) else { return };
    let order = &model.order;
    let Some(own) = &mut model.plain else { return };
    if always || own.planned_for != Some(bytes) {
        own.plan = plan::plan(&own.sizes, |span| order.contains(span), bytes);
        own.planned_for = Some(bytes);
        tracing::debug!(
            model = model.name,
            bytes,
            resident = own.plan.resident_bytes,
            slots = own.plan.slots,
            slot = own.plan.slot_bytes,
            "planned"
        );
    }
}

/// A block for a span: its own if the plan says so, a slot, or any other that can be had.
pub(super) fn obtain(core: &Core, control: &mut Control, id: u32, span: u32) -> Result<u32, PagerError> {
    replan(control, id, false);
    let Some(model) = control.model(id) else { return Ok(NONE) };
    let Some(own) = &model.plain else { return Ok(NONE) };
    let place = own.places[span as usize];
    if place != NONE {
        return Ok(place);
    }
    let (need, stays, promoted) = (own.sizes[span as usize], own.stays(span), model.promoted);
    let (slots, slot_bytes) = (own.plan.slots, own.plan.slot_bytes.max(need));
    let fits = |control: &Control| control.plain.as_ref().is_some_and(|plain| need <= plain.budget);
    if !fits(control) {
        // Refused before anything is given up for it: a try would empty the card and fail all the same.
        look_without_memory(core, control)?;
        if !fits(control) {
            return Err(refusal(core, control, id, span, need));
        }
    }
    if stays {
        let from = if promoted { TakeFrom::Lower } else { TakeFrom::Nobody };
        if let Some(block) = allocate(core, control, id, need, Role::Resident, from)? {
            return Ok(block);
        }
    }
    let have = control.plain.as_ref().map_or(0, |plain| {
        let ring = |block: &&Block| block.model == id && block.info.role == Role::Ring;
        plain.blocks.iter().flatten().filter(ring).filter(|block| block.bytes >= need).count()
    });
    if have < slots as usize
        && let Some(block) = allocate(core, control, id, slot_bytes, Role::Ring, TakeFrom::Anyone)?
    {
        return Ok(block);
    }
    if let Some(block) = take_slot(control, id, need) {
        return Ok(block);
    }
    if let Some(block) = allocate(core, control, id, need, Role::Ring, TakeFrom::Anyone)? {
        return Ok(block);
    }
    Err(refusal(core, control, id, span, need))
}

/// Why a span cannot be had.
fn refusal(core: &Core, control: &Control, id: u32, span: u32, need: u64) -> PagerError {
    let limit = control.plain.as_ref().map_or(0, |plain| plain.budget);
    let Some(model) = control.model(id) else {
        return PagerError::InvalidArgument { what: "fault", why: "the model is gone".to_owned() };
    };
    let (name, what) = (model.name.clone(), crate::pager::claim::what_of(model, span));
    let device = core.device.info().name.clone();
    if need > limit {
        let holders = control.holders(core, id);
        return PagerError::NeverFits { model: name, what, device, need, limit, holders };
    }
    if control.under_way <= 1 && !control.is_anything_pinned((id, span)) {
        // Nobody has a guard to wait for: the card has the bytes by its figures and gives none in one piece.
        let figures = core.device.memory().unwrap_or_default();
        let (requested, free, total) = (need, figures.free, figures.total);
        return DeviceError::OutOfMemory { device, call: "pool_allocate", requested, free, total }.into();
    }
    PagerError::Held { model: name, what, device, need, held: control.held_names(Some((id, span))) }
}

/// Takes a new block from the card. `None` if there is no room and nobody who may be asked gives any.
fn allocate(
    core: &Core,
    control: &mut Control,
    id: u32,
    bytes: u64,
    role: Role,
    from: TakeFrom,
) -> Result<Option<u32>, PagerError> {
    let below = match from {
        TakeFrom::Lower => control.model(id).map(|model| model.priority),
        TakeFrom::Nobody | TakeFrom::Anyone => None,
    };
    let mut looked = false;
    loop {
        let Some(plain) = &mut control.plain else { return Ok(None) };
        if plain.held.saturating_add(bytes) <= plain.budget {
            let before = core.device.pool_figures()?.reserved;
            let mut taken = PoolAllocation::new(&plain.home, bytes);
            if taken.as_ref().is_err_and(DeviceError::is_out_of_memory) {
                // The pool's free memory may lie in pieces that are too small: let the device join them.
                core.device.pool_trim(0)?;
                taken = PoolAllocation::new(&plain.home, bytes);
            }
            match taken {
                Ok(memory) if grew_into_headroom(core, before)? => {
                    // There was room by the bytes, but not in one piece.
                    drop(memory);
                    release_idle(core)?;
                    plain.budget = plain.budget.min(plain.held);
                }
                Ok(memory) => {
                    let block = add(core, control, id, memory, bytes, role)?;
                    return Ok(Some(block));
                }
                Err(error) if error.is_out_of_memory() => {
                    // Somebody took memory since the last look: the budget was wrong.
                    refresh_budget(core, control, true)?;
                    if let Some(plain) = &mut control.plain {
                        plain.budget = plain.budget.min(plain.held.max(bytes));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        if from == TakeFrom::Nobody {
            return Ok(None);
        }
        if give_up_one(control, id, below)? == 0 {
            if from != TakeFrom::Anyone || std::mem::replace(&mut looked, true) {
                return Ok(None);
            }
            // All that may be given up was. If the budget was lowered for what lay in pieces, these are one now.
            look_without_memory(core, control)?;
        }
    }
}

/// Whether the pool, which had `before` bytes, grew into what is to be left free.
fn grew_into_headroom(core: &Core, before: u64) -> Result<bool, DeviceError> {
    Ok(core.device.pool_figures()?.reserved > before && core.device.memory()?.free < core.headroom())
}

/// Enters a new block.
fn add(
    core: &Core,
    control: &mut Control,
    id: u32,
    memory: PoolAllocation,
    bytes: u64,
    role: Role,
) -> Result<u32, PagerError> {
    let Control { plain, engine, frames, .. } = control;
    let Some(plain) = plain else { return Ok(NONE) };
    let mut info = FrameInfo::new();
    info.role = role;
    // Other streams may use it from here on only.
    info.used_until(OWN, &engine.record(&plain.home)?);
    plain.held += bytes;
    let block = Some(Block { memory, bytes, model: id, info });
    let place = if let Some(place) = plain.blocks.iter().position(Option::is_none) {
        plain.blocks[place] = block;
        place
    } else {
        plain.blocks.push(block);
        plain.blocks.len() - 1
    };
    frames.note_pool(core.device.pool_figures()?.reserved);
    Ok(u32::try_from(place).unwrap_or(u32::MAX))
}

/// A slot of model `id` of at least `need` bytes whose span no guard holds; the one filled longest ago.
fn take_slot(control: &mut Control, id: u32, need: u64) -> Option<u32> {
    let plain = control.plain.as_ref()?;
    let mut slots: Vec<(u64, u32)> = (0_u32..)
        .zip(&plain.blocks)
        .filter_map(|(number, block)| block.as_ref().map(|block| (number, block)))
        .filter(|(_, block)| block.model == id && block.info.role == Role::Ring && block.bytes >= need)
        .map(|(number, block)| {
            (if block.info.content.is_none() { 0 } else { block.info.uses.loaded_at() }, number)
        })
        .collect();
    slots.sort_unstable();
    for (_, number) in slots {
        let Some(block) = control.plain.as_ref().and_then(|plain| plain.block(number)) else { continue };
        let key = block.info.content;
        if !key.is_none() && !empty(control, key) {
            continue;
        }
        if let Some(block) = control.plain.as_mut().and_then(|plain| plain.block_mut(number)) {
            block.info.clear_content();
        }
        return Some(number);
    }
    None
}

/// Takes a span out of use; `false`, and nothing changed, if a guard holds it. Its block stays.
fn empty(control: &mut Control, key: PageKey) -> bool {
    let Some(model) = control.model_mut(key.model) else { return true };
    let word = &model.words[key.page as usize].0;
    if !word.try_leave() {
        return false;
    }
    word.set_state(SpanState::Absent);
    model.counts.evicted_pages += 1;
    if let Some(own) = &mut model.plain {
        own.places[key.page as usize] = NONE;
    }
    true
}

/// Blocks that may be given up, in the order in which they should: the least important model first; within
/// one what its plan does not keep, the ring, what it keeps. The asking model's ring goes last.
fn candidates(control: &Control, asking: u32, may: impl Fn(u32, u64) -> bool) -> Vec<(u64, u8, u32)> {
    let Some(plain) = &control.plain else { return Vec::new() };
    let mut all: Vec<(u64, u8, u32)> = (0_u32..)
        .zip(&plain.blocks)
        .filter_map(|(number, block)| {
            let block = block.as_ref()?;
            let model = control.model(block.model)?;
            if !may(block.model, model.priority) {
                return None;
            }
            let span = block.info.content;
            let kept = !span.is_none() && model.plain.as_ref().is_some_and(|own| own.stays(span.page));
            let class = match (block.info.role, kept) {
                (Role::Ring, _) if block.model == asking => 3,
                (Role::Ring, _) => 1,
                (_, true) => 2,
                (_, false) => 0,
            };
            Some((model.priority, class, number))
        })
        .collect();
    all.sort_unstable();
    all
}

/// Gives one block up, of a model of a priority below `below`; answers its bytes, 0 if guards hold all.
fn give_up_one(control: &mut Control, asking: u32, below: Option<u64>) -> Result<u64, PagerError> {
    for (_, _, block) in candidates(control, asking, |_, priority| below.is_none_or(|below| priority < below))
    {
        let freed = give_up(control, block)?;
        if freed > 0 {
            return Ok(freed);
        }
    }
    Ok(0)
}

/// Frees a block, after everything that used it is done; answers its bytes, 0 if a guard holds it.
fn give_up(control: &mut Control, number: u32) -> Result<u64, PagerError> {
    let Some(block) = control.plain.as_ref().and_then(|plain| plain.block(number)) else { return Ok(0) };
    let key = block.info.content;
    let owner = block.model;
    let Control { plain, models, engine, streams, .. } = control;
    let Some(plain) = plain else { return Ok(0) };
    let Some(model) = models.get_mut(owner as usize).and_then(Option::as_deref_mut) else { return Ok(0) };
    let Some(own) = &mut model.plain else { return Ok(0) };
    if !key.is_none() {
        let word = &model.words[key.page as usize].0;
        if !word.try_leave() {
            return Ok(0);
        }
        if streams.is_capturing(word.used()) {
            word.set_state(SpanState::Arriving);
            return Ok(0);
        }
        let quiet = streams.fences(word.used(), engine).and_then(|fences| {
            fences.iter().try_for_each(crate::device::Fence::wait)?;
            plain.block_mut(number).map_or(Ok(()), |block| block.info.wait_quiet())
        });
        if let Err(error) = quiet {
            // As it was, but for its copies, which the next fault looks at again.
            word.set_state(SpanState::Arriving);
            return Err(error.into());
        }
        word.set_state(SpanState::Absent);
        model.counts.evicted_pages += 1;
    } else if let Some(block) = plain.block_mut(number) {
        block.info.wait_quiet()?;
    }
    own.places.iter_mut().filter(|place| **place == number).for_each(|place| *place = NONE);
    let freed = plain.blocks.get_mut(number as usize).and_then(Option::take);
    let bytes = freed.as_ref().map_or(0, |block| block.bytes);
    plain.held -= bytes;
    drop(freed);
    Ok(bytes)
}

/// Makes a span's bytes be loaded anew; marks it stale if a guard holds it.
pub(in crate::pager) fn forget_span(control: &mut Control, id: u32, span: u32) -> Result<bool, PagerError> {
    let Control { plain, models, engine, streams, .. } = control;
    let Some(model) = models.get_mut(id as usize).and_then(Option::as_deref_mut) else { return Ok(true) };
    let (Some(plain), Some(own)) = (plain, &mut model.plain) else { return Ok(true) };
    let number = own.places[span as usize];
    let word = &model.words[span as usize].0;
    let Some(block) = plain.block_mut(number).filter(|block| !block.info.content.is_none()) else {
        model.stale.remove(&span);
        word.set_stale(false);
        return Ok(true);
    };
    let left = word.try_leave();
    if left && streams.is_capturing(word.used()) {
        word.set_state(SpanState::Arriving);
    }
    if !left || word.view().state() == SpanState::Arriving {
        model.stale.insert(span);
        word.set_stale(true);
        return Ok(false);
    }
    // The next copy into the block must wait for the work that read the old bytes.
    let fences = match streams.slot_fences_or_wait(word.used(), engine) {
        Ok(fences) => fences,
        Err(error) => {
            word.set_state(SpanState::Arriving);
            return Err(error.into());
        }
    };
    word.set_state(SpanState::Absent);
    word.set_stale(false);
    model.stale.remove(&span);
    block.info.clear_content();
    if block.info.role == Role::Ring {
        own.places[span as usize] = NONE;
    }
    for (slot, fence) in fences {
        block.info.used_until(slot, &fence);
    }
    Ok(true)
}

/// Waits for everything that uses a model's blocks and frees them. Nobody faults the model any more.
pub(in crate::pager) fn close_model(control: &mut Control, id: u32) -> Result<(), DeviceError> {
    let Control { plain, models, streams, .. } = control;
    let Some(plain) = plain else { return Ok(()) };
    let Some(model) = models.get_mut(id as usize).and_then(Option::take) else { return Ok(()) };
    let used = model.words.iter().fold(0, |used, word| used | word.0.used());
    let mut result = streams.settle(used);
    for place in &mut plain.blocks {
        if place.as_ref().is_some_and(|block| block.model == id)
            && let Some(mut block) = place.take()
        {
            result = result.and(block.info.settle());
            plain.held -= block.bytes;
        }
    }
    for run in model.cache.values() {
        control.cached_bytes -= run.buffer.len();
    }
    result
}
