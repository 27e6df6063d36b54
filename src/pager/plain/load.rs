//! A fault's way to its bytes: a block, reads and copies.
//!
//! The faulting thread reads the file itself, a chunk at a time, without the control lock; the copies run
//! meanwhile. Others that fault the same span wait for that: the reader waits for no guard, and completes
//! or fails also on panic.

#![deny(unsafe_code)]

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;

use super::blocks::obtain;
use super::origin_of;
use crate::device::{DeviceError, Fence, PoolAllocation};
use crate::pager::attach::old_version_held;
use crate::pager::convert::{self, CopySource, CopyTarget};
use crate::pager::core::{CachedRun, Control};
use crate::pager::error::PagerError;
use crate::pager::frames::{NONE, PageKey, Role};
use crate::pager::load::{kept_limit, take_buffer};
use crate::pager::model::PagedModel;
use crate::pager::patches::PatchSet;
use crate::pager::streams::PagerStream;
use crate::pager::word::SpanState;
use crate::staging::StagingBuffer;
use crate::transfer::read_extents;
use crate::units::{DeviceAddress, ModelTime};

/// How a fault found its span.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::pager) enum Brought {
    There,
    Loaded,
    Streamed,
}

/// Makes a span's bytes be in a block of its own or in a slot, or on the way there. The caller pinned the
/// span.
pub(in crate::pager) fn bring(
    model: &PagedModel,
    control: &mut MutexGuard<'_, Control>,
    span: u32,
    set: Option<&Arc<PatchSet>>,
) -> Result<Brought, PagerError> {
    let (core, id) = (model.core(), model.id());
    let key = PageKey { model: id, page: span };
    loop {
        let place = control
            .model(id)
            .and_then(|model| model.plain.as_ref())
            .map_or(NONE, |own| own.places[span as usize]);
        let block = control.plain.as_ref().and_then(|plain| plain.block(place));
        match block {
            Some(block) if block.info.content == key && block.info.loading == 0 => {
                if block.info.role == Role::Ring && !settle(control, id, span, place) {
                    continue;
                }
                return Ok(Brought::There);
            }
            Some(block) if block.info.content == key => {
                core.changed.wait(control);
                continue;
            }
            _ => {}
        }
        let number = obtain(core, control, id, span)?;
        let role = claim(control, id, span, number);
        let loaded = load(model, control, span, number, set);
        if let Some(block) = control.plain.as_mut().and_then(|plain| plain.block_mut(number)) {
            block.info.loading = 0;
            if loaded.is_err() {
                block.info.clear_content();
                if role == Role::Ring
                    && let Some(own) = control.model_mut(id).and_then(|model| model.plain.as_mut())
                {
                    own.places[span as usize] = NONE;
                }
            }
        }
        core.changed.notify_all();
        loaded?;
        return Ok(if role == Role::Ring { Brought::Streamed } else { Brought::Loaded });
    }
}

/// A span whose bytes lie in a slot, and that the plan keeps by now, gets the slot as its own block if it
/// fits. If it is much too large and nobody else has the span, the slot is left instead and `false` answered:
/// the bytes are to be loaded into a block of the span's own.
fn settle(control: &mut Control, id: u32, span: u32, number: u32) -> bool {
    let Control { plain, models, .. } = control;
    let Some(model) = models.get_mut(id as usize).and_then(Option::as_deref_mut) else { return true };
    let (Some(plain), Some(own)) = (plain, &mut model.plain) else { return true };
    if !own.stays(span) {
        return true;
    }
    let (size, room) = (own.sizes[span as usize], plain.budget.saturating_sub(plain.held));
    let Some(block) = plain.block_mut(number) else { return true };
    let word = &model.words[span as usize].0;
    if block.bytes <= size + size / 8 {
        // Guards that were given while it was a slot are still released as such; the fences stay with the block.
        block.info.role = Role::Resident;
        word.set_streamed(false);
    } else if room >= size && word.view().pins() == 1 {
        // The one pin is the asking fault's.
        block.info.clear_content();
        own.places[span as usize] = NONE;
        word.set_state(SpanState::Arriving);
        return false;
    }
    true
}

/// Gives a block to a span.
fn claim(control: &mut Control, id: u32, span: u32, number: u32) -> Role {
    control.page_loads += 1;
    let loads = control.page_loads;
    let Control { plain, models, .. } = control;
    let Some(block) = plain.as_mut().and_then(|plain| plain.block_mut(number)) else { return Role::Idle };
    block.info.content = PageKey { model: id, page: span };
    block.info.loading = 1;
    block.info.uses.set_loaded_at(loads);
    let role = block.info.role;
    if let Some(model) = models.get_mut(id as usize).and_then(Option::as_deref_mut) {
        if let Some(own) = &mut model.plain {
            own.places[span as usize] = number;
            own.addresses[span as usize].store(block.memory.range().start.0, Ordering::Relaxed);
        }
        model.words[span as usize].0.set_streamed(role == Role::Ring);
    }
    role
}

/// Reads a span's bytes and enqueues their copies.
fn load(
    model: &PagedModel,
    control: &mut MutexGuard<'_, Control>,
    span: u32,
    number: u32,
    set: Option<&Arc<PatchSet>>,
) -> Result<(), PagerError> {
    let (core, id) = (model.core(), model.id());
    let bytes = model.layout().span(span).bytes;
    let chunk_bytes = u64::from(core.chunk_pages) * core.page_bytes;
    let mut at = origin_of(bytes.start);
    let mut chunk = control
        .model(id)
        .and_then(|model| model.plain.as_ref())
        .map_or(NONE, |own| own.first_chunk[span as usize]);
    while at < bytes.end {
        let run = at..bytes.end.min(at + chunk_bytes);
        at = run.end;
        load_chunk(model, control, span, number, &run, chunk)?;
        chunk = chunk.saturating_add(1);
        // Somebody may have changed the patches while the file was read.
        let attached = control.model(id).and_then(|model| model.patches());
        if PatchSet::version_of(attached, span) != PatchSet::version_of(set, span) {
            return Err(old_version_held(control, id, model.layout().span(span).unit));
        }
    }
    Ok(())
}

fn load_chunk(
    model: &PagedModel,
    control: &mut MutexGuard<'_, Control>,
    span: u32,
    number: u32,
    run: &Range<u64>,
    chunk: u32,
) -> Result<(), PagerError> {
    let (core, id) = (model.core(), model.id());
    if !core.device.info().keeps_bytes {
        let available = core.device.schedule_read(model.layout().content_bytes(run.clone()));
        copy(control, id, span, number, run, None, available)?;
        return Ok(());
    }
    if let Some(kept) = control.model_mut(id).and_then(|model| model.cache.remove(&chunk)) {
        let CachedRun { mut buffer, pages } = kept;
        let copied = copy(control, id, span, number, run, Some(&buffer), core.device.now());
        if let Ok(fence) = &copied {
            buffer.read_until(fence.clone());
        }
        if let Some(model) = control.model_mut(id) {
            model.cache.insert(chunk, CachedRun { buffer, pages });
        }
        copied?;
        return Ok(());
    }
    let (mut buffer, file_bytes) = MutexGuard::unlocked(control, || read(model, run))?;
    let available = core.device.schedule_read(file_bytes);
    let fence = copy(control, id, span, number, run, Some(&buffer), available)?;
    buffer.read_until(fence);
    let streamed = control
        .plain
        .as_ref()
        .and_then(|plain| plain.block(number))
        .is_some_and(|block| block.info.role == Role::Ring);
    let keep = streamed && control.cached_bytes + buffer.len() <= kept_limit(core);
    let length = buffer.len();
    if let Some(model) = control.model_mut(id) {
        model.counts.file_bytes += file_bytes;
        if keep {
            let pages = u32::try_from(length / core.page_bytes).unwrap_or(u32::MAX);
            model.cache.insert(chunk, CachedRun { buffer, pages });
            control.cached_bytes += length;
        }
    }
    Ok(())
}

/// Reads a run of the model into a staging buffer.
fn read(model: &PagedModel, run: &Range<u64>) -> Result<(StagingBuffer, u64), PagerError> {
    let core = model.core();
    let slots = u32::try_from((run.end - run.start).div_ceil(core.page_bytes)).unwrap_or(u32::MAX);
    let mut buffer = take_buffer(core, slots)?;
    let mut target = buffer.bytes_mut()?;
    let extents = model.layout().extents(run.clone());
    let read =
        catch_unwind(AssertUnwindSafe(|| read_extents(model.index(), extents, run.start, &mut target)));
    drop(target);
    match read {
        Ok(read) => Ok((buffer, read?)),
        Err(_) => {
            Err(PagerError::Reader { model: model.name().to_owned(), why: "its reads panicked".to_owned() })
        }
    }
}

/// Enqueues the copies of a run of a span into its block; answers their fence. After an error nothing of
/// them is under way.
fn copy(
    control: &mut Control,
    id: u32,
    span: u32,
    number: u32,
    run: &Range<u64>,
    source: Option<&StagingBuffer>,
    available: ModelTime,
) -> Result<Fence, DeviceError> {
    let gone =
        |what: &str| DeviceError::Misuse { call: "copy_to_device", why: format!("the {what} is gone") };
    let Control { plain, models, engine, scratch, .. } = control;
    let model = models.get_mut(id as usize).and_then(Option::as_deref_mut).ok_or_else(|| gone("model"))?;
    let block = plain.as_mut().and_then(|plain| plain.block_mut(number)).ok_or_else(|| gone("block"))?;
    let start = model.layout.span(span).bytes.start;
    let batch = engine.begin();
    let target = CopyTarget {
        cut: u64::MAX,
        layout: &model.layout,
        base: DeviceAddress(block.memory.range().start.0.wrapping_sub(origin_of(start))),
        scratch: scratch.get(batch.place()).map(PoolAllocation::range),
        patches: model.attached.as_deref(),
    };
    let waited = block
        .info
        .uses
        .iter()
        .map(|(_, fence)| fence)
        .chain(&block.info.arrive)
        .try_for_each(|fence| batch.wait(fence));
    let source = source.map_or(CopySource::None, |buffer| CopySource::Staged(buffer, run.start));
    let enqueued = waited.and_then(|()| convert::copy_run(&batch, &target, run.clone(), source, available));
    // Also after an error: what was enqueued still reads the buffer and writes the block.
    let fence = batch.finish()?;
    match enqueued {
        Ok(bytes) => {
            block.info.uses.clear();
            block.info.arrive = Some(fence.clone());
            model.counts.copied_bytes += bytes;
            Ok(fence)
        }
        Err(error) => {
            fence.settle()?;
            Err(error)
        }
    }
}

/// Makes the stream wait for copies under way; a span whose copies are all done becomes ready.
pub(in crate::pager) fn arrive(
    control: &mut Control,
    id: u32,
    span: u32,
    stream: &PagerStream,
    set: Option<&Arc<PatchSet>>,
) -> Result<(), DeviceError> {
    let Control { plain, models, .. } = control;
    let Some(model) = models.get(id as usize).and_then(Option::as_deref) else { return Ok(()) };
    let place = model.plain.as_ref().map_or(NONE, |own| own.places[span as usize]);
    let mut done = true;
    if let Some(block) = plain.as_mut().and_then(|plain| plain.block_mut(place))
        && let Some(fence) = &block.info.arrive
    {
        if fence.is_done()? {
            block.info.arrive = None;
        } else {
            done = false;
            fence.wait_on(stream)?;
        }
    }
    model.words[span as usize].0.arrived(PatchSet::version_of(set, span), done);
    Ok(())
}

/// Notes on a slot's block that work up to `fence` uses it, and drops the pin.
pub(in crate::pager) fn release_streamed(
    control: &mut Control,
    id: u32,
    span: u32,
    slot: u8,
    fence: Option<&Fence>,
) {
    let Control { plain, models, .. } = control;
    let Some(model) = models.get(id as usize).and_then(Option::as_deref) else { return };
    let place = model.plain.as_ref().map_or(NONE, |own| own.places[span as usize]);
    if let (Some(block), Some(fence)) = (plain.as_mut().and_then(|plain| plain.block_mut(place)), fence) {
        block.info.used_until(slot, fence);
    }
    model.words[span as usize].0.release(1 << slot);
}
