//! Loads: from a claimed run of pages to copies on the way.
//!
//! A load is a run of pages that are read together. Loads get staging buffers in the order in which they
//! were asked for, are read by any reader, and are copied in the order in which they were asked for
//! again, so that the order of copies does not depend on which reader was faster. Pages whose bytes lie
//! in staging memory already are copied at once.
//!
//! A page that was taken away while its load was under way is skipped when the load ends: the frame says
//! which load it waits for.

#![deny(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use super::convert;
use super::core::{CachedRun, Control, Core};
use super::error::PagerError;
use super::frames::{NONE, PageKey};
use super::mutations::Mutation;
use crate::device::{DeviceError, Fence, PoolAllocation};
use crate::staging::StagingBuffer;
use crate::transfer::{ReadJob, cut_extents, read_extents};
use crate::units::ModelTime;
use crate::weights::{PageLayout, TensorIndex};

/// What a read gave: a buffer with the bytes, and how many came from files.
type ReadResult = Result<(StagingBuffer, u64), PagerError>;

/// The loads under way, oldest first. `R` is what a read gives.
#[derive(Debug)]
pub(super) struct Loads<R = ReadResult> {
    queue: VecDeque<Load<R>>,
    /// The number of the next load; zero is no load.
    next: u64,
    reading: usize,
}

#[derive(Debug)]
struct Load<R = ReadResult> {
    id: u64,
    model: u32,
    first: u32,
    count: u32,
    state: LoadState<R>,
    /// The modelled time from which its bytes are in the buffer.
    available: ModelTime,
}

#[derive(Debug)]
enum LoadState<R = ReadResult> {
    /// For a buffer.
    Waiting,
    Reading,
    Read(R),
    /// Its model is gone.
    Cancelled,
}

/// What a fault must wait for whose bytes are on the way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WaitFor {
    /// Nothing is under way.
    Nothing,
    /// The signal that a load went on.
    Signal,
    /// A staging buffer: nobody reads, so nobody will signal.
    Buffer,
}

impl<R> Loads<R> {
    pub(super) fn new() -> Self {
        Self { queue: VecDeque::with_capacity(64), next: 1, reading: 0 }
    }

    /// Loads whose copies are not enqueued yet.
    pub(super) fn outstanding(&self) -> usize {
        self.queue.len()
    }

    /// What a fault must wait for whose bytes are not there yet. The caller has just tried to go on.
    pub(super) fn wait_for(&self) -> WaitFor {
        if self.reading == 0 && self.queue.iter().any(|load| matches!(load.state, LoadState::Waiting)) {
            WaitFor::Buffer
        } else if self.queue.is_empty() {
            WaitFor::Nothing
        } else {
            WaitFor::Signal
        }
    }

    /// Asks for a load; answers its number.
    fn ask(&mut self, model: u32, first: u32, count: u32) -> u64 {
        let id = self.next;
        self.next += 1;
        let (state, available) = (LoadState::Waiting, ModelTime::ZERO);
        self.queue.push_back(Load { id, model, first, count, state, available });
        id
    }

    /// The place of the first load from `place` on that waits for a buffer.
    fn next_waiting(&self, place: usize) -> Option<usize> {
        let mut loads = self.queue.iter().enumerate().skip(place);
        loads.find(|(_, load)| matches!(load.state, LoadState::Waiting)).map(|(place, _)| place)
    }

    /// The load at `place` is being read; its bytes are there from `available` on.
    fn begin(&mut self, place: usize, available: ModelTime) {
        let load = &mut self.queue[place];
        load.state = LoadState::Reading;
        load.available = available;
        self.reading += 1;
    }

    /// The read of load `id` ended, well or not.
    fn finish(&mut self, id: u64, result: R) {
        self.reading -= 1;
        if let Some(load) = self.queue.iter_mut().find(|load| load.id == id) {
            load.state = LoadState::Read(result);
        }
    }

    /// Takes the oldest load out if its read has ended; skips those whose models are gone.
    fn pop_read(&mut self) -> Option<(Load<R>, R)> {
        loop {
            let front = self.queue.front()?;
            if matches!(front.state, LoadState::Waiting | LoadState::Reading) {
                return None;
            }
            let mut load = self.queue.pop_front()?;
            let LoadState::Read(result) = std::mem::replace(&mut load.state, LoadState::Cancelled) else {
                continue;
            };
            if load.model != NONE {
                return Some((load, result));
            }
        }
    }

    /// Forgets the loads of a model that goes away.
    pub(super) fn cancel(&mut self, model: u32) {
        for load in self.queue.iter_mut().filter(|load| load.model == model) {
            load.state = match load.state {
                LoadState::Reading => {
                    // The reader still owns the buffer; its result is dropped.
                    load.model = NONE;
                    LoadState::Reading
                }
                _ => LoadState::Cancelled,
            };
        }
    }
}

/// Asks for the bytes of `count` pages from `first` on, all claimed by [`Control::claim`] and mapped.
pub(super) fn submit(core: &Arc<Core>, control: &mut Control, id: u32, first: u32, count: u32) {
    let mut page = first;
    let end = first + count;
    while page < end {
        if let Some(model) = control.model_mut(id) {
            model.errors.remove(&page);
        }
        if !core.device.info().keeps_bytes {
            copy_without_bytes(core, control, id, page, end - page);
            return;
        }
        if let Some((run, pages)) = cached_run(control, id, page) {
            let count = pages.min(end - page);
            copy_cached(core, control, id, run, page, count);
            page += count;
            continue;
        }
        let mut count = 1;
        while count < core.chunk_pages
            && page + count < end
            && cached_run(control, id, page + count).is_none()
        {
            count += 1;
        }
        let load = control.loads.ask(id, page, count);
        for claimed in page..page + count {
            if let Some(model) = control.model_mut(id) {
                model.errors.remove(&claimed);
                let frame = model.pages[claimed as usize].frame;
                control.frames.info_mut(frame).loading = load;
            }
        }
        page += count;
    }
    pump(core, control);
}

/// The cached run that holds `page`, and how many of its pages come from there on.
fn cached_run(control: &Control, id: u32, page: u32) -> Option<(u32, u32)> {
    let (first, run) = control.model(id)?.cache.range(..=page).next_back()?;
    let end = first + run.pages;
    (page < end).then(|| (*first, end - page))
}

/// Gives buffers to the loads that wait for one, in order, and starts their reads.
pub(super) fn pump(core: &Arc<Core>, control: &mut Control) {
    let mut from = 0;
    while let Some(place) = control.loads.next_waiting(from) {
        from = place + 1;
        let load = &control.loads.queue[place];
        let (number, id, first, count) = (load.id, load.model, load.first, load.count);
        let taken = core.arena.take(count);
        match taken {
            Ok(Some(buffer)) => match control.model(id) {
                Some(model) => {
                    let bytes = model.layout.content_bytes(page_span(core, first, count));
                    let available = core.device.schedule_read(bytes);
                    let job = PageRead {
                        core: Arc::clone(core),
                        index: Arc::clone(&model.index),
                        layout: Arc::clone(&model.layout),
                        load: number,
                        first,
                        count,
                        buffer: Some(buffer),
                        read: Ok(0),
                    };
                    control.loads.begin(place, available);
                    core.readers.submit(Box::new(job));
                }
                None => control.loads.queue[place].state = LoadState::Cancelled,
            },
            Ok(None) => break,
            Err(error) => control.loads.queue[place].state = LoadState::Read(Err(error.into())),
        }
    }
    drain(core, control);
}

/// Enqueues the copies of the oldest loads, as far as they were read.
fn drain(core: &Arc<Core>, control: &mut Control) {
    while let Some((load, result)) = control.loads.pop_read() {
        if control.model(load.model).is_none() {
            continue;
        }
        // Whichever thread comes by enqueues the copy; on a modelled clock it happens when the bytes are there.
        let own_time = core.device.now();
        core.device.set_now(load.available);
        let copied = result.and_then(|(mut buffer, file_bytes)| {
            let range = load.first..load.first + load.count;
            let fence = copy_pages(
                control,
                load.model,
                range.clone(),
                load.id,
                Some((&buffer, range.start)),
                load.available,
                core.page_bytes,
            );
            if let Some(model) = control.model_mut(load.model) {
                model.counts.file_bytes += file_bytes;
            }
            if let Some(fence) = fence?
                && !control.mutated.by(Mutation::StagingWithoutWait)
            {
                buffer.read_until(fence);
            }
            keep_streamed(core, control, load.model, range, buffer);
            Ok(())
        });
        core.device.set_now(own_time);
        if let Err(error) = copied {
            fail_pages(control, load.model, load.first..load.first + load.count, load.id, &error);
            // Whoever comes by may find that another's load failed, with no reader left to tell of it.
            core.changed.notify_all();
        }
    }
}

fn page_span(core: &Core, first: u32, count: u32) -> std::ops::Range<u64> {
    u64::from(first) * core.page_bytes..u64::from(first + count) * core.page_bytes
}

/// Notes why pages that still waited for this load have no bytes.
fn fail_pages(control: &mut Control, id: u32, pages: std::ops::Range<u32>, load: u64, error: &PagerError) {
    for page in pages {
        let Some(model) = control.models.get_mut(id as usize).and_then(Option::as_deref_mut) else { return };
        let frame = model.pages[page as usize].frame;
        if frame == NONE {
            continue;
        }
        let info = control.frames.info_mut(frame);
        if info.content == (PageKey { model: id, page }) && info.loading == load {
            info.clear_content();
            model.errors.insert(page, error.clone());
        }
    }
}

/// Copies from a cached run.
fn copy_cached(core: &Arc<Core>, control: &mut Control, id: u32, run: u32, first: u32, count: u32) {
    let Some(cached) = control.model_mut(id).and_then(|model| model.cache.remove(&run)) else { return };
    let CachedRun { mut buffer, pages } = cached;
    let now = core.device.now();
    let copied = copy_pages(control, id, first..first + count, 0, Some((&buffer, run)), now, core.page_bytes);
    match copied {
        Ok(Some(fence)) => buffer.read_until(fence),
        Ok(None) => {}
        Err(error) => fail_pages(control, id, first..first + count, 0, &error.into()),
    }
    if let Some(model) = control.model_mut(id) {
        model.cache.insert(run, CachedRun { buffer, pages });
    }
}

/// On a device without bytes: accounts and clock only.
fn copy_without_bytes(core: &Arc<Core>, control: &mut Control, id: u32, first: u32, count: u32) {
    let end = first + count;
    let mut page = first;
    while page < end {
        let count = core.chunk_pages.min(end - page);
        let bytes =
            control.model(id).map_or(0, |model| model.layout.content_bytes(page_span(core, page, count)));
        let available = core.device.schedule_read(bytes);
        let copied = copy_pages(control, id, page..page + count, 0, None, available, core.page_bytes);
        if let Err(error) = copied {
            fail_pages(control, id, page..page + count, 0, &error.into());
        }
        page += count;
    }
}

/// Enqueues the copies of those of `pages` that still wait for `load`; the source holds the pages from
/// the given one on. Answers their fence, if anything was copied.
fn copy_pages(
    control: &mut Control,
    id: u32,
    pages: std::ops::Range<u32>,
    load: u64,
    source: Option<(&StagingBuffer, u32)>,
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
    pages: std::ops::Range<u32>,
    load: u64,
    source: Option<(&StagingBuffer, u32)>,
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
    let batch = engine.begin();
    let enqueue = || -> Result<u64, DeviceError> {
        let mut last: Option<&Fence> = None;
        for &page in wanted {
            let info = frames.info(model.pages[page as usize].frame);
            for fence in info.before_copy() {
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
        let source = source.map(|(buffer, first)| (buffer, u64::from(first) * page_bytes));
        let mut bytes = 0;
        for run in wanted.chunk_by(|a, b| a + 1 == *b) {
            let (Some(&first), Some(&last)) = (run.first(), run.last()) else { continue };
            let addresses = u64::from(first) * page_bytes..u64::from(last + 1) * page_bytes;
            bytes += convert::copy_run(&batch, &target, addresses, source, available)?;
        }
        Ok(bytes)
    };
    let enqueued = enqueue();
    // Also after an error: what was enqueued still reads the buffer and writes the frames.
    let fence = batch.finish()?;
    for &page in wanted {
        let info = frames.info_mut(model.pages[page as usize].frame);
        match enqueued {
            Ok(_) => info.copied(fence.clone()),
            Err(_) => info.arrive = Some(fence.clone()),
        }
    }
    match enqueued {
        Ok(bytes) => model.counts.copied_bytes += bytes,
        Err(error) => {
            fence.wait()?;
            return Err(error);
        }
    }
    Ok(Some(fence))
}

/// Keeps those pages of a read buffer that will be streamed again, if the budget permits.
fn keep_streamed(
    core: &Core,
    control: &mut Control,
    id: u32,
    pages: std::ops::Range<u32>,
    buffer: StagingBuffer,
) {
    let kept_limit = kept_limit(core);
    let mut rest = Some(buffer);
    let mut page = pages.start;
    while let Some(mut buffer) = rest.take() {
        let Some(model) = control.model(id) else { return };
        let streamed = model.pages[page as usize].slot != NONE;
        let mut count = 1;
        while page + count < pages.end && (model.pages[(page + count) as usize].slot != NONE) == streamed {
            count += 1;
        }
        rest = buffer.split_off(count);
        if streamed && control.cached_bytes + buffer.len() <= kept_limit {
            control.cached_bytes += buffer.len();
            // A page that was asked for, taken away and asked for again is read twice.
            let replaced = control
                .model_mut(id)
                .and_then(|model| model.cache.insert(page, CachedRun { buffer, pages: count }));
            control.cached_bytes -= replaced.map_or(0, |run| run.buffer.len());
        }
        page += count;
    }
}

/// Bytes of staging memory that may hold kept pages: the ring of buffers that reads go through stays free of
/// them.
pub(super) fn kept_limit(core: &Core) -> u64 {
    let limit = core.arena.figures().limit_bytes;
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

/// Gives one kept run of any model back, of the least important first.
pub(super) fn drop_one_cached(control: &mut Control) -> bool {
    let mut models: Vec<(u64, u32)> = (0..)
        .zip(&control.models)
        .filter_map(|(id, model)| model.as_ref().map(|model| (model.priority, id)))
        .collect();
    models.sort_unstable();
    models.into_iter().any(|(_, id)| drop_cached(control, id, 1) > 0)
}

/// Takes a staging buffer for a caller that holds no lock, waiting for copies in flight; kept pages give
/// way if nothing else does.
pub(super) fn take_buffer(core: &Arc<Core>, slots: u32) -> Result<StagingBuffer, PagerError> {
    const PATIENT_WAITS: u32 = 20;
    const WAITS: u32 = 5000;
    let mut waits = 0_u32;
    let buffer = core.arena.take_waiting(slots, || {
        waits += 1;
        if waits > PATIENT_WAITS {
            drop_one_cached(&mut core.control.lock());
        }
        waits < WAITS
    })?;
    buffer.ok_or_else(|| PagerError::InvalidArgument {
        what: "staging",
        why: format!("no buffer of {slots} pages came free"),
    })
}

/// A read of a run of pages into its buffer.
struct PageRead {
    core: Arc<Core>,
    index: Arc<TensorIndex>,
    layout: Arc<PageLayout>,
    load: u64,
    first: u32,
    count: u32,
    buffer: Option<StagingBuffer>,
    read: Result<u64, PagerError>,
}

impl ReadJob for PageRead {
    fn read(&mut self) {
        let Some(buffer) = &mut self.buffer else { return };
        let range = page_span(&self.core, self.first, self.count);
        let base = range.start;
        self.read = match buffer.bytes_mut() {
            Ok(bytes) => {
                read_extents(&self.index, cut_extents(&self.layout, range, self.core.page_bytes), base, bytes)
                    .map_err(PagerError::from)
            }
            Err(error) => Err(error.into()),
        };
    }

    fn complete(mut self: Box<Self>, panic: Option<String>) {
        let core = Arc::clone(&self.core);
        let mut control = core.control.lock();
        let result = match (panic, self.buffer.take(), self.read) {
            (None, Some(buffer), Ok(bytes)) => Ok((buffer, bytes)),
            (None, _, Err(error)) => Err(error),
            (panic, ..) => Err(PagerError::Reader {
                model: self
                    .index
                    .files()
                    .first()
                    .map_or_else(String::new, |file| file.path().display().to_string()),
                why: panic.unwrap_or_else(|| "its buffer is gone".to_owned()),
            }),
        };
        control.loads.finish(self.load, result);
        pump(&core, &mut control);
        drop(control);
        core.changed.notify_all();
    }
}

#[cfg(all(test, loom))]
#[path = "load_models.rs"]
mod models;
