//! Copies of claimed pages: one batch, one fence, whatever their number.
//!
//! A run of neighbouring pages is one copy, whatever frames they have: their addresses follow one another.
//! All under the control lock, which gives copies their order.

#![deny(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::convert::{self, CopySource};
use super::core::{Control, Core};
use super::frames::{NONE, PageKey};
use super::load::{fail_pages, page_span};
use super::mutations::Mutation;
use super::runs::part_of;
use crate::device::{DeviceError, Fence, PoolAllocation};
use crate::staging::StagingBuffer;
use crate::units::ModelTime;

/// On a device without bytes: accounts and clock only.
pub(super) fn copy_without_bytes(core: &Arc<Core>, control: &mut Control, id: u32, first: u32, count: u32) {
    let end = first + count;
    let mut page = first;
    while page < end {
        let count = part_of(end - page, core.chunk_pages);
        let bytes =
            control.model(id).map_or(0, |model| model.layout.content_bytes(page_span(core, page, count)));
        let available = core.device.schedule_read(bytes);
        let copied =
            copy_pages(control, id, page..page + count, 0, PageSource::Nowhere, available, core.page_bytes);
        if let Err(error) = copied {
            fail_pages(control, id, page..page + count, 0, &error.into());
        }
        page += count;
    }
}

/// Copies from the mapped files, if the model is to be copied from there and no reader has to cast any of
/// it; answers whether that was so.
pub(super) fn copy_from_mapping(
    core: &Arc<Core>,
    control: &mut Control,
    id: u32,
    first: u32,
    count: u32,
) -> bool {
    let span = page_span(core, first, count);
    let Some(model) = control.model(id) else { return false };
    if model.mapped.is_none() || !convert::is_mappable(&model.layout, span.clone()) {
        return false;
    }
    let unchanged = model.layout.extents(span.clone()).next().map_or(Ok(()), |extent| {
        let name = &model.index.tensor_info(extent.tensor).name;
        model.index.files().get(extent.file as usize).map_or(Ok(()), |file| file.check_unchanged(name))
    });
    let bytes = model.layout.content_bytes(span);
    let pages = first..first + count;
    let copied = unchanged.map_err(Into::into).and_then(|()| {
        let available = core.device.schedule_read(bytes);
        let source = PageSource::Mapping;
        Ok(copy_pages(control, id, pages.clone(), 0, source, available, core.page_bytes)?)
    });
    match copied {
        Ok(_) => {
            if let Some(model) = control.model_mut(id) {
                model.counts.file_bytes += bytes;
            }
        }
        Err(error) => fail_pages(control, id, pages, 0, &error),
    }
    true
}

/// Where the bytes of pages are copied from.
#[derive(Clone, Copy, Debug)]
pub(super) enum PageSource<'a> {
    /// The kept run that begins at this page.
    Kept(u32),
    /// A buffer that holds the pages from this one on. The caller notes the fence on it.
    Buffer(&'a StagingBuffer, u32),
    /// The mapped files.
    Mapping,
    /// Nowhere: the device keeps no bytes.
    Nowhere,
}

/// Enqueues the copies of those of `pages` that still wait for `load`. Answers their fence, if anything was
/// copied.
pub(super) fn copy_pages(
    control: &mut Control,
    id: u32,
    pages: Range<u32>,
    load: u64,
    source: PageSource<'_>,
    available: ModelTime,
    page_bytes: u64,
) -> Result<Option<Fence>, DeviceError> {
    // The list keeps its memory from one call to the next: a steady pass allocates nothing for it.
    let mut wanted = std::mem::take(&mut control.wanted);
    wanted.clear();
    let copied = copy_wanted(control, &mut wanted, id, pages, load, source, available, page_bytes);
    control.wanted = wanted;
    copied
}

#[expect(clippy::too_many_arguments, reason = "one step of its only caller")]
fn copy_wanted(
    control: &mut Control,
    wanted: &mut Vec<u32>,
    id: u32,
    pages: Range<u32>,
    load: u64,
    source: PageSource<'_>,
    available: ModelTime,
    page_bytes: u64,
) -> Result<Option<Fence>, DeviceError> {
    let skips = control.mutated.by(Mutation::SlotWithoutWait);
    let Control { frames, engine, models, scratch, .. } = control;
    let Some(model) = models.get_mut(id as usize).and_then(Option::as_deref_mut) else { return Ok(None) };
    let waits = |page: u32| {
        let frame = model.pages[page as usize].frame;
        frame != NONE && {
            let info = frames.info(frame);
            info.content == (PageKey { model: id, page }) && info.loading == load && !info.fresh
        }
    };
    wanted.extend(pages.filter(|&page| waits(page)));
    let wanted = &*wanted;
    if wanted.is_empty() {
        return Ok(None);
    }
    let Some(range) = &model.range else { return Ok(None) };
    let base = range.range().start;
    let from = match source {
        PageSource::Kept(run) => match model.cache.get(&run) {
            Some(kept) => CopySource::Staged(&kept.buffer, u64::from(run) * page_bytes),
            None => return Ok(None),
        },
        PageSource::Buffer(buffer, first) => CopySource::Staged(buffer, u64::from(first) * page_bytes),
        PageSource::Mapping => match &model.mapped {
            Some(files) => CopySource::Mapped(files),
            None => return Ok(None),
        },
        PageSource::Nowhere => CopySource::None,
    };
    // On one stream a copy comes after all copies before it: only those who used the frames are waited for.
    let in_order = engine.is_in_order();
    let batch = engine.begin();
    let enqueue = || -> Result<u64, DeviceError> {
        let mut last: Option<&Fence> = None;
        for &page in wanted {
            let info = frames.info(model.pages[page as usize].frame);
            let needed = if in_order { info.uses.iter().len() } else { usize::MAX };
            for fence in info.before_copy().take(needed) {
                if !skips && last.is_none_or(|last| !last.is_same(fence)) {
                    batch.wait(fence)?;
                    last = Some(fence);
                }
            }
        }
        let target = convert::CopyTarget {
            cut: page_bytes,
            layout: &model.layout,
            base,
            scratch: scratch.get(batch.place()).map(PoolAllocation::range),
            patches: model.attached.as_deref(),
        };
        let mut bytes = 0;
        for run in wanted.chunk_by(|a, b| a + 1 == *b) {
            let (Some(&first), Some(&last)) = (run.first(), run.last()) else { continue };
            let addresses = u64::from(first) * page_bytes..u64::from(last + 1) * page_bytes;
            bytes += convert::copy_run(&batch, &target, addresses, from, available)?;
        }
        Ok(bytes)
    };
    let enqueued = enqueue();
    // Also after an error: what was enqueued still reads the buffer and writes the frames.
    let fence = batch.finish()?;
    match enqueued {
        Ok(bytes) => model.counts.copied_bytes += bytes,
        // Nothing that was enqueued is under way any more, so the source is free as well.
        Err(error) => {
            // The frames keep the fences that they had: an older copy, on another stream, may still run.
            fence.settle()?;
            return Err(error);
        }
    }
    if let PageSource::Kept(run) = source
        && let Some(kept) = model.cache.get_mut(&run)
    {
        kept.buffer.read_until(fence.clone());
    }
    for &page in wanted {
        frames.info_mut(model.pages[page as usize].frame).copied(fence.clone());
    }
    Ok(Some(fence))
}
