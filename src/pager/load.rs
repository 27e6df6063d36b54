//! Loads: from a claimed run of pages to copies on the way.
//!
//! A load is a run of pages that are read together. Loads get staging buffers in the order in which they
//! were asked for, are read by any reader, and are copied in the order in which they were asked for
//! again, so that the order of copies does not depend on which reader was faster. Pages whose bytes lie
//! in staging memory already are copied at once.
//!
//! A load may also be asked for ahead of its pages' frames, see [`super::ahead`]: it waits, read, until a
//! fault or prefetch claims them. How many bytes are read and not yet copied is bounded by
//! [`super::PagerOptions::read_ahead_bytes`], whoever asked for them. Where copies fall behind, as they do when a
//! model comes to an empty card, a load takes the buffer of the oldest copy under way and its reader waits for
//! that copy: staging memory grows with the ring and this depth, not with the model.
//!
//! A page that was taken away while its load was under way is skipped when the load ends: the frame says
//! which load it waits for.

#![deny(unsafe_code)]

use std::sync::Arc;

use super::ahead;
use super::copies::{PageSource, copy_from_mapping, copy_pages, copy_without_bytes};
use super::core::{Control, Core};
use super::error::PagerError;
use super::fault;
use super::frames::NONE;
use super::keep;
pub(super) use super::keep::{drop_cached, drop_kept_over_limit, drop_one_cached, kept_limit, take_buffer};
use super::loads::{Load, LoadState, WaitFor};
use super::mutations::Mutation;
use super::runs::part_of;
use crate::staging::StagingBuffer;
use crate::transfer::{MAX_JOBS, ReadJob, cut_extents, read_extents, sleeps};
use crate::units::ModelTime;
use crate::weights::{PageLayout, TensorIndex};

/// Where the bytes of a page that has none on the card are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    /// In the kept run that begins at this page.
    Kept(u32),
    /// In this one of the runs that were read ahead.
    Ahead(usize),
    /// On the way, in the load at this place of the queue.
    Load(usize),
    /// Only in the file.
    File,
}

/// Jobs kept for their memory, and reads under way at once at most.
const MOST_READS: usize = MAX_JOBS / 2;

/// Asks for the bytes of `count` pages from `first` on, all claimed by [`Control::claim`] and mapped.
pub(super) fn submit(core: &Arc<Core>, control: &mut Control, id: u32, first: u32, count: u32) {
    let mut page = first;
    let end = first + count;
    if let Some(model) = control.model_mut(id)
        && !model.errors.is_empty()
    {
        for page in first..end {
            model.errors.remove(&page);
        }
    }
    if !core.device.info().keeps_bytes {
        copy_without_bytes(core, control, id, page, count);
        return;
    }
    while page < end {
        let (source, pages) = source_of(control, id, page);
        let mut count = pages.min(end - page);
        match source {
            Source::Kept(run) => keep::copy_cached(core, control, id, run, page, count),
            Source::Ahead(place) => ahead::copy_run(core, control, place, page, count),
            Source::Load(place) => {
                let load = &mut control.loads.queue[place];
                load.wanted = true;
                load.wants.add(page, core.device.now());
                let number = load.id;
                await_load(control, id, page, count, number);
                control.loads.ahead.served = true;
            }
            Source::File => {
                // Two parts ahead is as far as the cut has to see.
                let most = most_of_read(core, control, id, page);
                while count < 2 * most
                    && page + count < end
                    && source_of(control, id, page + count).0 == Source::File
                    && most_of_read(core, control, id, page + count) == most
                {
                    count += 1;
                }
                count = part_of(count, most);
                if !copy_from_mapping(core, control, id, page, count) {
                    let number = control.loads.ask(id, page, count);
                    await_load(control, id, page, count, number);
                }
            }
        }
        page += count;
    }
    pump(core, control);
}

/// Pages of one read, at most, that begins at `page`. What streams is kept in staging memory as it was read, for
/// copies that fill the link; what stays is copied once, soon after it was read.
fn most_of_read(core: &Core, control: &Control, id: u32, page: u32) -> u32 {
    let stays = control.model(id).is_none_or(|model| model.pages[page as usize].slot == NONE);
    if stays { core.load_pages } else { core.chunk_pages }
}

/// Notes on the frames of pages which load will fill them.
fn await_load(control: &mut Control, id: u32, first: u32, count: u32, load: u64) {
    for page in first..first + count {
        if let Some(info) = control.content_mut(id, page) {
            info.loading = load;
        }
    }
}

/// Where the bytes of `page` are, and for how many pages from there on that is so; one for the file.
pub(super) fn source_of(control: &Control, id: u32, page: u32) -> (Source, u32) {
    if let Some((run, pages)) = keep::cached_run(control, id, page) {
        return (Source::Kept(run), pages);
    }
    if let Some((place, pages)) = control.loads.ahead.find(id, page) {
        return (Source::Ahead(place), pages);
    }
    let holds = |load: &Load| {
        load.ahead
            && load.model == id
            && (load.first..load.first + load.count).contains(&page)
            && !matches!(load.state, LoadState::Read(Err(_)) | LoadState::Cancelled)
    };
    match control.loads.queue.iter().position(holds) {
        Some(place) => {
            let load = &control.loads.queue[place];
            (Source::Load(place), load.first + load.count - page)
        }
        None => (Source::File, 1),
    }
}

/// Gives buffers to the loads that wait for one, in order and as far as the depth permits, and starts their
/// reads; enqueues the copies of those that were read.
pub(super) fn pump(core: &Arc<Core>, control: &mut Control) {
    // Looking for room asks the device; on a modelled clock that costs nobody's time, since it may be any
    // thread that comes by.
    let own_time = core.device.now();
    let mut from = 0;
    let mut under_way = control.loads.pages_under_way() * core.page_bytes;
    // What lies in staging memory beside: read ahead, and read by copies.
    let mut others = None;
    while let Some(place) = control.loads.next_waiting(from) {
        from = place + 1;
        let Load { count, booked, .. } = control.loads.queue[place];
        let bytes = u64::from(count) * core.page_bytes;
        let after = if booked { under_way } else { under_way + bytes };
        let reading = control.loads.reading;
        if after > read_depth(core) && reading > 0 {
            break;
        }
        // Not more than are read at once: a buffer that waits for its reader is one more that the bytes are spread
        // over, and they leave the processors' caches before they are copied.
        if reading >= core.readers.at_once().min(MOST_READS) {
            if !booked {
                if after + control.cached_bytes > core.arena.limit_bytes() {
                    break;
                }
                book(core, control, place);
                under_way = after;
            }
            continue;
        }
        let others = others.get_or_insert_with(|| {
            control.loads.ahead.pages() * core.page_bytes + core.arena.copying_bytes().unwrap_or(0)
        });
        let full = after + *others > staging_depth(core, control);
        let taken = match full.then(|| core.arena.take_behind(count)).flatten() {
            Some(buffer) => {
                *others = others.saturating_sub(bytes);
                Ok(Some(buffer))
            }
            None => match core.arena.take(count) {
                Ok(None) if reading == 0 => take_part(core, control, place),
                taken => taken.map_err(PagerError::from),
            },
        };
        core.device.set_now(own_time);
        match taken {
            Ok(Some(buffer)) => {
                under_way = after;
                start_read(core, control, place, buffer);
            }
            Ok(None) => break,
            Err(error) => control.loads.queue[place].state = LoadState::Read(Err(error)),
        }
    }
    drain(core, control);
}

/// Bytes that may be in staging memory between file and card.
pub(super) fn read_depth(core: &Core) -> u64 {
    let least = 2 * core.options.readers.max(1) as u64 * u64::from(core.chunk_pages) * core.page_bytes;
    core.options.read_ahead_bytes.max(least)
}

/// Bytes of staging memory that loads go through, with those that copies still read: the depth of reads, one read
/// more, and what may be on its way to the ring while kernels use what is there.
fn staging_depth(core: &Core, control: &Control) -> u64 {
    if control.frames.ring.is_empty() {
        return loading_depth(core, core.readers.at_once());
    }
    let pages = u64::from(core.chunk_pages) + control.frames.ring.len() as u64;
    read_depth(core).saturating_add(pages * core.page_bytes)
}

/// The same where nothing streams, so that no copy waits for a kernel: what is copied for each read, and one more.
fn loading_depth(core: &Core, reads: usize) -> u64 {
    (2 * reads as u64 + 1) * u64::from(core.load_pages) * core.page_bytes
}

/// Pages that may be copied ahead of the runner now, by [`super::PagerOptions::copy_ahead_bytes`]; the ring
/// bounds them in any case.
pub(super) fn room_ahead(core: &Core, control: &Control, id: u32) -> u32 {
    let Some(bytes) = core.options.copy_ahead_bytes else { return u32::MAX };
    let frames = &control.frames;
    let unused = |frame: &&u32| {
        **frame != NONE && {
            let info = frames.info(**frame);
            info.content.model == id && !info.consumed
        }
    };
    let ahead = frames.ring.iter().filter(unused).count() as u64;
    u32::try_from((bytes / core.page_bytes).saturating_sub(ahead)).unwrap_or(u32::MAX)
}

/// A buffer for the first pages of a load, where staging memory is in pieces and there is none for all of
/// it; the rest becomes a load of its own behind it.
fn take_part(core: &Core, control: &mut Control, place: usize) -> Result<Option<StagingBuffer>, PagerError> {
    let mut part = control.loads.queue[place].count / 2;
    while part > 0 {
        if let Some(buffer) = core.arena.take(part)? {
            let number = control.loads.next;
            control.loads.next += 1;
            let load = &mut control.loads.queue[place];
            let (id, model) = (load.id, load.model);
            let (first, count) = (load.first + part, load.count - part);
            load.count = part;
            let Load { wanted, ahead, booked, available, wants, .. } = *load;
            let wants = wants.behind(first);
            let state = LoadState::Waiting;
            let rest =
                Load { id: number, model, first, count, wanted, ahead, state, booked, available, wants };
            control.loads.queue.insert(place + 1, rest);
            // Those of the rest's pages that wait do so for the new load.
            for page in first..first + count {
                if let Some(info) = control.content_mut(model, page).filter(|info| info.loading == id) {
                    info.loading = number;
                }
            }
            return Ok(Some(buffer));
        }
        part /= 2;
    }
    Ok(None)
}

/// Gives a load its turn at the modelled disk, before there is a reader for it.
fn book(core: &Core, control: &mut Control, place: usize) {
    let Load { model, first, count, .. } = control.loads.queue[place];
    let Some(model) = control.model(model) else { return };
    let bytes = model.layout.content_bytes(page_span(core, first, count));
    let load = &mut control.loads.queue[place];
    load.available = core.device.schedule_read(bytes);
    load.booked = true;
}

/// Hands a load and its buffer to a reader.
fn start_read(core: &Arc<Core>, control: &mut Control, place: usize, buffer: StagingBuffer) {
    let Load { id: number, model: id, first, count, booked, available, .. } = control.loads.queue[place];
    let Some(model) = control.model(id) else {
        control.loads.queue[place].state = LoadState::Cancelled;
        return;
    };
    let files = Some((Arc::clone(&model.index), Arc::clone(&model.layout)));
    let bytes = model.layout.content_bytes(page_span(core, first, count));
    // A reader that has to wait for its buffer says itself when it begins.
    let available = if booked {
        available
    } else if buffer.is_read() {
        core.device.now()
    } else {
        core.device.schedule_read(bytes)
    };
    let mut job = control.loads.spare.pop().unwrap_or_default();
    *job = PageRead {
        core: Some(Arc::clone(core)),
        files,
        load: number,
        first,
        count,
        booked,
        available,
        buffer: Some(buffer),
        read: Ok(0),
        slept: false,
    };
    control.loads.begin(place, available);
    core.readers.submit(job);
}

/// Enqueues the copies of the oldest loads, as far as they were read.
fn drain(core: &Arc<Core>, control: &mut Control) {
    // Whichever thread comes by enqueues the copies, and gives buffers back; on a modelled clock that costs nobody's
    // time, and copies happen when the bytes are there and wanted.
    let own_time = core.device.now();
    while let Some((load, result)) = control.loads.pop_read() {
        let (id, pages) = (load.model, load.first..load.first + load.count);
        let Some(model) = control.model_mut(id) else { continue };
        model.counts.file_bytes += result.as_ref().map_or(0, |(_, bytes)| *bytes);
        let unclaimed = load.ahead.then_some(load.available);
        if !load.wanted {
            // What nobody waits for has nobody to be told that it failed: it is asked for again.
            if let Ok((buffer, _)) = result {
                keep::settle(core, control, id, pages, buffer, unclaimed);
            }
            continue;
        }
        let copied = result.and_then(|(mut buffer, _)| {
            for (run, wanted_at) in load.wants.runs(pages.clone()) {
                core.device.set_now(load.available.max(wanted_at));
                let source = PageSource::Buffer(&buffer, pages.start);
                let fence = copy_pages(control, id, run, load.id, source, load.available, core.page_bytes)?;
                if let Some(fence) = fence
                    && !control.mutated.by(Mutation::StagingWithoutWait)
                {
                    buffer.read_until(fence);
                }
            }
            keep::settle(core, control, id, pages.clone(), buffer, unclaimed);
            Ok(())
        });
        if let Err(error) = copied {
            fail_pages(control, id, pages.clone(), load.id, &error);
            if load.ahead
                && let Some(model) = control.model_mut(id)
            {
                // It was asked for before anybody needed it, and may have failed for a reason that is gone: the
                // fault that waits asks anew, and is told of that read.
                for page in pages {
                    model.errors.remove(&page);
                }
            }
            // Whoever comes by may find that another's load failed, with no reader left to tell of it.
            core.changed.notify_all();
        }
    }
    core.device.set_now(own_time);
}

/// Whether a fault that sleeps has something to do. A fault of many loads is not woken for each of them: the
/// processor that it would take for that is the one that reads.
fn wakes_anybody(control: &Control) -> bool {
    let mut sleepers = control.sleepers.iter();
    !control.sleepers.is_empty()
        && (control.loads.wait_for() != WaitFor::Signal
            || sleepers.any(|&(id, span)| fault::is_woken(control, id, span)))
}

/// The model addresses of a run of pages.
pub(super) fn page_span(core: &Core, first: u32, count: u32) -> std::ops::Range<u64> {
    u64::from(first) * core.page_bytes..u64::from(first + count) * core.page_bytes
}

/// Notes why pages that still waited for this load have no bytes.
pub(super) fn fail_pages(
    control: &mut Control,
    id: u32,
    pages: std::ops::Range<u32>,
    load: u64,
    error: &PagerError,
) {
    for page in pages {
        let Some(info) = control.content_mut(id, page).filter(|info| info.loading == load) else { continue };
        info.clear_content();
        if let Some(model) = control.model_mut(id) {
            model.errors.insert(page, error.clone());
        }
    }
}

/// A read of a run of pages into its buffer.
#[derive(Debug)]
pub(super) struct PageRead {
    /// The pager's, and what is read; `None` in a job that is only kept for its memory.
    core: Option<Arc<Core>>,
    files: Option<(Arc<TensorIndex>, Arc<PageLayout>)>,
    load: u64,
    first: u32,
    count: u32,
    booked: bool,
    available: ModelTime,
    buffer: Option<StagingBuffer>,
    read: Result<u64, PagerError>,
    slept: bool,
}

impl Default for PageRead {
    fn default() -> Self {
        Self {
            core: None,
            files: None,
            load: 0,
            first: 0,
            count: 0,
            booked: false,
            available: ModelTime::ZERO,
            buffer: None,
            read: Ok(0),
            slept: false,
        }
    }
}

impl ReadJob for PageRead {
    fn read(&mut self) {
        let (Some(core), Some((index, layout))) = (&self.core, &self.files) else { return };
        let Some(buffer) = &mut self.buffer else { return };
        let range = page_span(core, self.first, self.count);
        let base = range.start;
        let waits = buffer.is_read();
        if waits {
            core.device.set_now(self.available);
        }
        self.read = match buffer.bytes_mut() {
            Ok(mut bytes) => {
                if waits {
                    self.available = if self.booked {
                        core.device.now()
                    } else {
                        core.device.schedule_read(layout.content_bytes(range.clone()))
                    };
                }
                let extents = cut_extents(layout, range, core.page_bytes);
                let (read, slept) = sleeps(|| read_extents(index, extents, base, &mut bytes));
                self.slept = slept;
                if core.options.mutated().by(Mutation::CopyWhileRead) {
                    // It goes on writing, as far as anybody was told.
                    std::mem::forget(bytes);
                }
                read.map_err(PagerError::from)
            }
            Err(error) => Err(error.into()),
        };
    }

    fn slept(&self) -> bool {
        self.slept
    }

    fn complete(mut self: Box<Self>, panic: Option<String>) {
        let Some(core) = self.core.take() else { return };
        let files = self.files.take();
        let result = match (panic, self.buffer.take(), std::mem::replace(&mut self.read, Ok(0))) {
            (None, Some(buffer), Ok(bytes)) => Ok((buffer, bytes)),
            (None, _, Err(error)) => Err(error),
            (panic, ..) => Err(PagerError::Reader {
                model: files
                    .and_then(|(index, _)| {
                        index.files().first().map(|file| file.path().display().to_string())
                    })
                    .unwrap_or_default(),
                why: panic.unwrap_or_else(|| "its buffer is gone".to_owned()),
            }),
        };
        let mut control = core.control.lock();
        // On a modelled clock this thread is free again when its bytes have come.
        core.device.set_now(self.available);
        let (load, available) = (self.load, self.available);
        if control.loads.spare.len() < MOST_READS {
            control.loads.spare.push(self);
        }
        control.loads.finish(load, available, result);
        pump(&core, &mut control);
        let wakes = wakes_anybody(&control);
        drop(control);
        if wakes {
            core.changed.notify_all();
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "load_tests.rs"]
mod tests;
