//! Reserved ranges, frames, mappings, page-locked blocks, the pool's chunks, and who uses them.
//!
//! Every page of a reserved range has a 16-byte entry: its frame, whether it is accessible, and how many
//! operations in flight use it. An operation is checked and counted when it is enqueued and counted off
//! when it is done, so what a worker touches cannot be unmapped under it. A page here is a piece of
//! granularity size; a mapping of a larger frame is a run of them. Capacity is hard: frames (the pool's
//! too) and what other processes hold never exceed the card.
//!
//! [`Memory`] is a plain value behind the device's memory lock; nothing under it calls out. May import
//! `backing`, `pool`, `stream` (for operations), `units`.

#![deny(unsafe_code)]

use std::collections::{BTreeMap, HashMap};

use super::backing::{self, Backing, MappingBudget, Slots};
use super::pool::Pool;
use super::stream::Work;
use crate::device::{DeviceError, FrameId, MemoryFigures};
use crate::units::{DeviceAddress, DeviceRange, format_size};

/// A run of host memory, as a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct HostSpan {
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// Whether its page-locked block counts it as in use.
    counted: bool,
}

impl HostSpan {
    pub(super) fn new(start: *const u8, bytes: u64) -> Self {
        Self { address: start.expose_provenance() as u64, bytes, counted: false }
    }

    pub(super) fn pointer(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(usize::try_from(self.address).unwrap_or(usize::MAX))
    }

    pub(super) fn as_range(self) -> DeviceRange {
        DeviceRange::new(DeviceAddress(self.address), self.bytes)
    }
}

/// Why memory cannot be given back or opened.
#[derive(Debug)]
pub(super) enum Refusal {
    /// An error that is complete.
    Error(DeviceError),
    /// An operation in flight uses these addresses of the device; the caller names it.
    InUse(DeviceRange),
    /// An operation in flight uses this host memory; the caller names it.
    HostInUse(DeviceRange),
}

impl From<DeviceError> for Refusal {
    fn from(error: DeviceError) -> Self {
        Self::Error(error)
    }
}

impl Refusal {
    /// The error, with the operation (its call, stream and number) if it is still unfinished.
    pub(super) fn name(self, call: &'static str, user: Option<(&'static str, u64, u64)>) -> DeviceError {
        let (what, at) = match self {
            Self::Error(error) => return error,
            Self::InUse(page) => ("the page", page),
            Self::HostInUse(block) => ("the page-locked block", block),
        };
        let by = match user {
            Some((user, stream, sequence)) => format!("{user} enqueued at stream {stream} #{sequence}"),
            None => "an operation that has finished since".to_owned(),
        };
        DeviceError::Misuse { call, why: format!("{what} {at:?} was in use by {by}") }
    }
}

/// No frame.
const UNMAPPED: u32 = u32::MAX;

/// One page of a reserved range.
#[derive(Clone, Copy, Debug)]
struct Page {
    /// The frame's place in the list, or [`UNMAPPED`].
    frame: u32,
    /// The page's number within the frame.
    part: u32,
    /// Operations in flight that use it.
    pending: u32,
    accessible: bool,
}

const CLOSED: Page = Page { frame: UNMAPPED, part: 0, pending: 0, accessible: false };

#[derive(Debug)]
struct Reserved {
    bytes: u64,
    /// Whether it holds a chunk of the pool, which no caller may map, unmap or free.
    pool: bool,
    mapped: usize,
    pages: Vec<Page>,
}

#[derive(Debug)]
struct Frame {
    /// Grows with each use of the place, so that a frame's id is never used again.
    generation: u32,
    pages: u32,
    mappings: u32,
    /// Whether the owner has not released it yet.
    owned: bool,
    slots: Slots,
}

impl Frame {
    fn exists(&self) -> bool {
        self.owned || self.mappings > 0
    }
}

#[derive(Debug)]
struct HostBlock {
    bytes: u64,
    pending: u32,
}

/// All memory of one device.
#[derive(Debug)]
pub(super) struct Memory {
    name: String,
    page_bytes: u64,
    total_bytes: u64,
    used_bytes: u64,
    other_bytes: u64,
    backing: Option<Backing>,
    budget: MappingBudget,
    reserved: BTreeMap<u64, Reserved>,
    frames: Vec<Frame>,
    vacant: Vec<u32>,
    live_frames: u64,
    live_mappings: u64,
    blocks: BTreeMap<u64, HostBlock>,
    page_locked_bytes: u64,
    pub(super) pool: Pool,
    /// The frame behind each chunk of the pool.
    chunk_frames: HashMap<DeviceAddress, FrameId>,
}

impl Memory {
    pub(super) fn new(
        name: String,
        total_bytes: u64,
        page_bytes: u64,
        backing: Option<Backing>,
        budget: MappingBudget,
    ) -> Self {
        Self {
            name,
            page_bytes,
            total_bytes,
            used_bytes: 0,
            other_bytes: 0,
            backing,
            budget,
            reserved: BTreeMap::new(),
            frames: Vec::new(),
            vacant: Vec::new(),
            live_frames: 0,
            live_mappings: 0,
            blocks: BTreeMap::new(),
            page_locked_bytes: 0,
            pool: Pool::default(),
            chunk_frames: HashMap::new(),
        }
    }

    pub(super) fn figures(&self) -> MemoryFigures {
        let held = self.used_bytes.saturating_add(self.other_bytes);
        MemoryFigures { free: self.total_bytes.saturating_sub(held), total: self.total_bytes }
    }

    pub(super) fn set_other_bytes(&mut self, bytes: u64) {
        self.other_bytes = bytes;
    }

    pub(super) fn live_frames(&self) -> u64 {
        self.live_frames - self.pool.chunk_count()
    }

    pub(super) fn live_mappings(&self) -> u64 {
        self.live_mappings - self.pool.chunk_count()
    }

    pub(super) fn live_ranges(&self) -> u64 {
        self.reserved.len() as u64 - self.pool.chunk_count()
    }

    pub(super) fn page_locked_bytes(&self) -> u64 {
        self.page_locked_bytes
    }

    pub(super) fn out_of_memory(&self, call: &'static str, requested: u64) -> DeviceError {
        let MemoryFigures { free, total } = self.figures();
        DeviceError::OutOfMemory { device: self.name.clone(), call, requested, free, total }
    }

    fn whole_pages(&self, call: &'static str, bytes: u64) -> Result<u64, DeviceError> {
        if bytes == 0 || !bytes.is_multiple_of(self.page_bytes) {
            let why = format!("{bytes} bytes are not whole pages of {}", format_size(self.page_bytes));
            return Err(DeviceError::InvalidArgument { call, why });
        }
        Ok(bytes / self.page_bytes)
    }

    // Ranges.

    pub(super) fn reserve(
        &mut self,
        call: &'static str,
        bytes: u64,
        pool: bool,
    ) -> Result<DeviceRange, DeviceError> {
        let count = self.whole_pages(call, bytes)?;
        let refuse = |why: &str| DeviceError::Host { call, bytes, why: why.to_owned() };
        let count = usize::try_from(count).map_err(|_| refuse("more than an address space"))?;
        self.budget.change(call, bytes, 1)?;
        let mut pages = Vec::new();
        let reserved = pages
            .try_reserve_exact(count)
            .map_err(|error| refuse(&error.to_string()))
            .and_then(|()| backing::reserve(bytes, self.page_bytes));
        let start = match reserved {
            Ok(start) => start,
            Err(error) => {
                self.budget.change(call, bytes, -1)?;
                return Err(error);
            }
        };
        pages.resize(count, CLOSED);
        self.reserved.insert(start.0, Reserved { bytes, pool, mapped: 0, pages });
        Ok(DeviceRange::new(start, bytes))
    }

    pub(super) fn free(&mut self, range: DeviceRange) -> Result<(), DeviceError> {
        let refuse = |why| Err(DeviceError::Misuse { call: "free", why });
        match self.reserved.get(&range.start.0) {
            Some(reserved) if reserved.pool => refuse(format!("{range:?} belongs to the activation pool")),
            Some(reserved) if reserved.bytes != range.bytes => {
                refuse(format!("{range:?} is not the whole range, which has {:#x} bytes", reserved.bytes))
            }
            Some(reserved) if reserved.mapped > 0 => {
                let mapped = reserved.mapped;
                refuse(format!("{mapped} pages of {range:?} are still mapped"))
            }
            Some(_) => self.free_checked(range),
            None => refuse(format!("{range:?} is not reserved (any more)")),
        }
    }

    fn free_checked(&mut self, range: DeviceRange) -> Result<(), DeviceError> {
        self.reserved.remove(&range.start.0);
        backing::release(range);
        self.budget.change("free", range.bytes, -1)
    }

    /// The reserved range around `range`: its start and the numbers of the first page and the one after
    /// the last.
    fn locate(&self, range: DeviceRange) -> Option<(u64, &Reserved, usize, usize)> {
        let (start, reserved) = self.reserved.range(..=range.start.0).next_back()?;
        let whole = DeviceRange::new(DeviceAddress(*start), reserved.bytes);
        if !whole.contains(range) {
            return None;
        }
        let offset = range.start.0 - start;
        let first = usize::try_from(offset / self.page_bytes).ok()?;
        let end = usize::try_from((offset + range.bytes).div_ceil(self.page_bytes)).ok()?;
        Some((*start, reserved, first, end))
    }

    /// As [`Self::locate`], for whole pages that a caller may map and unmap.
    fn locate_pages(
        &self,
        call: &'static str,
        range: DeviceRange,
    ) -> Result<(u64, &Reserved, usize, usize), DeviceError> {
        self.whole_pages(call, range.bytes)?;
        let misuse = |why| DeviceError::Misuse { call, why };
        let located = self
            .locate(range)
            .ok_or_else(|| misuse(format!("{range:?} does not lie in one reserved range")))?;
        if located.1.pool {
            return Err(misuse(format!("{range:?} belongs to the activation pool")));
        }
        if !range.start.0.is_multiple_of(self.page_bytes) {
            let why = format!("{range:?} does not begin on a page of {}", format_size(self.page_bytes));
            return Err(DeviceError::InvalidArgument { call, why });
        }
        Ok(located)
    }

    // Frames.

    pub(super) fn create_frame(&mut self, call: &'static str, bytes: u64) -> Result<FrameId, DeviceError> {
        let pages = self.whole_pages(call, bytes)?;
        if bytes > self.figures().free {
            return Err(self.out_of_memory(call, bytes));
        }
        let Ok(pages) = u32::try_from(pages) else { return Err(self.out_of_memory(call, bytes)) };
        let slots = match &mut self.backing {
            Some(backing) => backing.take(pages)?,
            None => Slots::None,
        };
        let place = if let Some(place) = self.vacant.pop() {
            let frame = &mut self.frames[place as usize];
            *frame = Frame { generation: frame.generation + 1, pages, mappings: 0, owned: true, slots };
            place
        } else {
            self.frames.push(Frame { generation: 1, pages, mappings: 0, owned: true, slots });
            u32::try_from(self.frames.len() - 1).unwrap_or(UNMAPPED)
        };
        self.used_bytes += bytes;
        self.live_frames += 1;
        Ok(FrameId(u64::from(self.frames[place as usize].generation) << 32 | u64::from(place)))
    }

    pub(super) fn release_frame(&mut self, id: FrameId) -> Result<(), DeviceError> {
        let place = self.frame_place("release_frame", id)?;
        self.frames[place as usize].owned = false;
        self.drop_if_unused(place);
        Ok(())
    }

    fn frame_place(&self, call: &'static str, id: FrameId) -> Result<u32, DeviceError> {
        let place = u32::try_from(id.0 & u64::from(u32::MAX)).unwrap_or(UNMAPPED);
        let frame = self.frames.get(place as usize);
        if frame.is_some_and(|frame| frame.owned && u64::from(frame.generation) == id.0 >> 32) {
            return Ok(place);
        }
        Err(DeviceError::Misuse { call, why: format!("frame {:#x} does not exist (any more)", id.0) })
    }

    fn drop_if_unused(&mut self, place: u32) {
        let frame = &mut self.frames[place as usize];
        if frame.exists() {
            return;
        }
        let slots = std::mem::replace(&mut frame.slots, Slots::None);
        if let Some(backing) = &mut self.backing {
            backing.give_back(&slots);
        }
        self.used_bytes -= u64::from(frame.pages) * self.page_bytes;
        self.live_frames -= 1;
        // A place whose generations are used up is not used again, so that no id ever is.
        if frame.generation < u32::MAX {
            self.vacant.push(place);
        }
    }

    // Mappings.

    pub(super) fn map(&mut self, at: DeviceRange, id: FrameId) -> Result<(), DeviceError> {
        let place = self.frame_place("map", id)?;
        let (start, reserved, first, end) = self.locate_pages("map", at)?;
        let frame_bytes = u64::from(self.frames[place as usize].pages) * self.page_bytes;
        if frame_bytes != at.bytes {
            let why = format!("{at:?} has not the length of the frame, {}", format_size(frame_bytes));
            return Err(DeviceError::InvalidArgument { call: "map", why });
        }
        if let Some(page) = reserved.pages[first..end].iter().position(|page| page.frame != UNMAPPED) {
            let address = at.start.offset(page as u64 * self.page_bytes);
            let why = format!("{at:?} holds a mapping already, at {address}");
            return Err(DeviceError::Misuse { call: "map", why });
        }
        if self.backing.is_some() {
            let delta = mapping_delta(&reserved.pages, first, end);
            self.budget.change("map", at.bytes, delta)?;
        }
        self.frames[place as usize].mappings += 1;
        self.live_mappings += 1;
        if let Some(reserved) = self.reserved.get_mut(&start) {
            reserved.mapped += end - first;
            for (part, page) in reserved.pages[first..end].iter_mut().enumerate() {
                let part = u32::try_from(part).unwrap_or(u32::MAX);
                *page = Page { frame: place, part, pending: 0, accessible: false };
            }
        }
        Ok(())
    }

    pub(super) fn set_access(&mut self, run: DeviceRange) -> Result<(), Refusal> {
        let (start, reserved, first, end) = self.locate_pages("set_access", run)?;
        let pages = &reserved.pages[first..end];
        let misuse = |why| Err(DeviceError::Misuse { call: "set_access", why }.into());
        if let Some(index) = pages.iter().position(|page| page.frame == UNMAPPED) {
            let address = run.start.offset(index as u64 * self.page_bytes);
            return misuse(format!("{run:?} is not mapped at {address}"));
        }
        let (Some(head), Some(tail)) = (pages.first(), pages.last()) else { return Ok(()) };
        let is_end = tail.part + 1 == self.frames[tail.frame as usize].pages;
        if head.part != 0 || !is_end {
            return misuse(format!("{run:?} cuts a mapping in two"));
        }
        self.refuse_pending(run)?;
        let mut opened = Vec::new();
        let mut failure = None;
        if let Some(backing) = &self.backing {
            // Pages whose slots follow each other are opened together.
            let mut slots = Vec::with_capacity(pages.len());
            let mut begin = 0;
            for index in 0..=pages.len() {
                let closed = pages.get(index).filter(|page| !page.accessible);
                if let Some(page) = closed {
                    if slots.is_empty() {
                        begin = index;
                    }
                    slots.push(self.frames[page.frame as usize].slots.as_slice()[page.part as usize]);
                } else if !slots.is_empty() {
                    let at = run.start.offset(begin as u64 * self.page_bytes);
                    if let Err(error) = backing.map(at, &slots) {
                        failure = Some(error);
                        break;
                    }
                    opened.push(DeviceRange::new(at, slots.len() as u64 * self.page_bytes));
                    slots.clear();
                }
            }
        }
        if let Some(error) = failure {
            for range in opened {
                backing::close(range)?;
            }
            return Err(error.into());
        }
        if let Some(reserved) = self.reserved.get_mut(&start) {
            reserved.pages[first..end].iter_mut().for_each(|page| page.accessible = true);
        }
        Ok(())
    }

    pub(super) fn unmap(&mut self, at: DeviceRange) -> Result<(), Refusal> {
        let (_, reserved, first, end) = self.locate_pages("unmap", at)?;
        let head = reserved.pages[first];
        let mapped = head.frame != UNMAPPED;
        let whole = mapped
            && head.part == 0
            && self.frames[head.frame as usize].pages as usize == end - first
            && reserved.pages[first..end].iter().all(|page| page.frame == head.frame);
        if !whole {
            let what = if mapped { "is not one whole mapping" } else { "is not mapped" };
            return Err(DeviceError::Misuse { call: "unmap", why: format!("{at:?} {what}") }.into());
        }
        self.refuse_pending(at)?;
        Ok(self.unmap_checked(at)?)
    }

    /// Unmaps whole mappings that nothing uses.
    fn unmap_checked(&mut self, at: DeviceRange) -> Result<(), DeviceError> {
        let Some((start, reserved, first, end)) = self.locate(at) else { return Ok(()) };
        let place = reserved.pages[first].frame;
        if self.backing.is_some() && reserved.pages[first].accessible {
            backing::close(at)?;
        }
        let mut delta = 0;
        if let Some(reserved) = self.reserved.get_mut(&start) {
            reserved.mapped -= end - first;
            reserved.pages[first..end].fill(CLOSED);
            delta = mapping_delta(&reserved.pages, first, end);
        }
        if self.backing.is_some() {
            self.budget.change("unmap", at.bytes, -delta)?;
        }
        self.live_mappings -= 1;
        self.frames[place as usize].mappings -= 1;
        self.drop_if_unused(place);
        Ok(())
    }

    // Page-locked memory.

    pub(super) fn page_lock(&mut self, span: HostSpan, host_page: u64) -> Result<(), DeviceError> {
        let call = "page_lock";
        let aligned = span.address.is_multiple_of(host_page) && span.bytes.is_multiple_of(host_page);
        if span.bytes == 0 || !aligned || span.address.checked_add(span.bytes).is_none() {
            let why = format!("{:?} is not whole host pages of {host_page} bytes", span.as_range());
            return Err(DeviceError::InvalidArgument { call, why });
        }
        let before = self.blocks.range(..span.address + span.bytes).next_back();
        if let Some((start, block)) = before
            && start + block.bytes > span.address
        {
            let why = format!("{:?} overlaps the block at {start:#x}, page-locked before", span.as_range());
            return Err(DeviceError::Misuse { call, why });
        }
        self.blocks.insert(span.address, HostBlock { bytes: span.bytes, pending: 0 });
        self.page_locked_bytes += span.bytes;
        Ok(())
    }

    /// Undoes a page lock.
    pub(super) fn page_unlock(&mut self, address: u64) -> Result<(), Refusal> {
        let Some(block) = self.blocks.get(&address) else {
            let why = format!("no page-locked block begins at {address:#x}");
            return Err(DeviceError::Misuse { call: "page_unlock", why }.into());
        };
        if block.pending > 0 {
            return Err(Refusal::HostInUse(DeviceRange::new(DeviceAddress(address), block.bytes)));
        }
        self.page_locked_bytes -= block.bytes;
        self.blocks.remove(&address);
        Ok(())
    }

    // Operations in flight.

    fn refuse_pending(&self, run: DeviceRange) -> Result<(), Refusal> {
        self.page_in_use(run).map_or(Ok(()), |page| Err(Refusal::InUse(page)))
    }

    /// The first page of `run` that an operation in flight uses.
    fn page_in_use(&self, run: DeviceRange) -> Option<DeviceRange> {
        let (start, reserved, first, end) = self.locate(run)?;
        let index = reserved.pages.get(first..end)?.iter().position(|page| page.pending > 0)?;
        let at = DeviceAddress(start).offset((first + index) as u64 * self.page_bytes);
        Some(DeviceRange::new(at, self.page_bytes))
    }

    fn check_range(&self, call: &'static str, range: DeviceRange) -> Result<(), DeviceError> {
        let misuse = |why| Err(DeviceError::Misuse { call, why });
        if range.bytes == 0 {
            return Ok(());
        }
        let Some((start, reserved, first, end)) = self.locate(range) else {
            return misuse(format!("{range:?} does not lie in one reserved range"));
        };
        if reserved.pool {
            if self.pool.holds(range) {
                return Ok(());
            }
            return misuse(format!("{range:?} does not lie in one live allocation of the pool"));
        }
        if let Some(index) = reserved.pages[first..end].iter().position(|page| !page.accessible) {
            let at = DeviceAddress(start).offset((first + index) as u64 * self.page_bytes);
            let mapped = reserved.pages[first + index].frame != UNMAPPED;
            let what = if mapped { "mapped but not accessible" } else { "not mapped" };
            return misuse(format!("{range:?} is {what} at {at}"));
        }
        Ok(())
    }

    /// The page-locked block that `span` lies in; refuses one that crosses a block's end.
    fn block_of(&self, call: &'static str, span: HostSpan) -> Result<Option<u64>, DeviceError> {
        if span.bytes == 0 {
            return Ok(None);
        }
        let Some(end) = span.address.checked_add(span.bytes) else {
            let why = format!("host memory {:?} wraps around the address space", span.as_range());
            return Err(DeviceError::InvalidArgument { call, why });
        };
        let Some((start, block)) = self.blocks.range(..end).next_back() else { return Ok(None) };
        let whole = DeviceRange::new(DeviceAddress(*start), block.bytes);
        if whole.contains(span.as_range()) {
            return Ok(Some(*start));
        }
        if whole.overlaps(span.as_range()) {
            let why = format!("host memory {:?} crosses the page-locked block {whole:?}", span.as_range());
            return Err(DeviceError::Misuse { call, why });
        }
        Ok(None)
    }

    /// Checks everything that `work` touches and counts it as in use until [`Self::end`].
    pub(super) fn begin(&mut self, work: &mut Work) -> Result<(), DeviceError> {
        let keeps = self.backing.is_some();
        let call = work.call();
        let (ranges, len) = work.ranges();
        for range in &ranges[..len] {
            self.check_range(call, *range)?;
        }
        if let Some(span) = work.host_mut() {
            if keeps && span.address == 0 && span.bytes > 0 {
                return Err(DeviceError::InvalidArgument {
                    call,
                    why: "the host pointer is null".to_owned(),
                });
            }
            if let Some(block) = self.block_of(call, *span)?
                && let Some(block) = self.blocks.get_mut(&block)
                && keeps
            {
                block.pending += 1;
                span.counted = true;
            }
        }
        // Without bytes the work is done as soon as it is enqueued.
        if keeps {
            self.count(&ranges[..len], |pending| *pending += 1);
        }
        Ok(())
    }

    /// Counts `work` off.
    pub(super) fn end(&mut self, work: &Work) {
        let (ranges, len) = work.ranges();
        self.count(&ranges[..len], |pending| *pending = pending.saturating_sub(1));
        if let Some(span) = work.host().filter(|span| span.counted)
            && let Ok(Some(block)) = self.block_of(work.call(), span)
            && let Some(block) = self.blocks.get_mut(&block)
        {
            block.pending = block.pending.saturating_sub(1);
        }
    }

    fn count(&mut self, ranges: &[DeviceRange], change: impl Fn(&mut u32)) {
        for range in ranges.iter().filter(|range| range.bytes > 0) {
            let Some((start, _, first, end)) = self.locate(*range) else { continue };
            if let Some(reserved) = self.reserved.get_mut(&start) {
                reserved.pages[first..end].iter_mut().for_each(|page| change(&mut page.pending));
            }
        }
    }

    // The pool's chunks.

    /// Adds a chunk of at least `bytes` to the pool.
    pub(super) fn grow_pool(&mut self, bytes: u64) -> Result<(), DeviceError> {
        let call = "pool_allocate";
        let Some(chunk_bytes) = bytes.checked_next_multiple_of(self.page_bytes) else {
            return Err(self.out_of_memory(call, bytes));
        };
        let frame = self.create_frame(call, chunk_bytes)?;
        let range = match self.reserve(call, chunk_bytes, false) {
            Ok(range) => range,
            Err(error) => {
                self.release_frame(frame)?;
                return Err(error);
            }
        };
        let opened = self.map(range, frame).and_then(|()| {
            self.set_access(range).map_err(|refusal| {
                // Nothing was opened, so this only takes the mapping back from the books.
                let _ = self.unmap_checked(range);
                refusal.name(call, None)
            })
        });
        if let Err(error) = opened {
            self.free_checked(range)?;
            self.release_frame(frame)?;
            return Err(error);
        }
        if let Some(reserved) = self.reserved.get_mut(&range.start.0) {
            reserved.pool = true;
        }
        self.chunk_frames.insert(range.start, frame);
        self.pool.add_chunk(range);
        Ok(())
    }

    /// Hands an idle chunk back, unless it is in use.
    pub(super) fn shrink_pool(&mut self, chunk: DeviceRange) -> Result<(), DeviceError> {
        if self.page_in_use(chunk).is_some() || !self.pool.remove_chunk(chunk) {
            return Ok(());
        }
        self.unmap_checked(chunk)?;
        self.free_checked(chunk)?;
        if let Some(frame) = self.chunk_frames.remove(&chunk.start) {
            self.release_frame(frame)?;
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for (start, reserved) in &self.reserved {
            backing::release(DeviceRange::new(DeviceAddress(*start), reserved.bytes));
        }
    }
}

/// How many mappings the process has more when the pages `first .. end`, of which none is mapped in
/// `pages` (or none was), become mapped: one a page, and the unmapped run around them is split.
fn mapping_delta(pages: &[Page], first: usize, end: usize) -> i64 {
    let hole = |index: Option<usize>| {
        i64::from(index.and_then(|index| pages.get(index)).is_some_and(|page| page.frame == UNMAPPED))
    };
    i64::try_from(end - first).unwrap_or(i64::MAX) + hole(first.checked_sub(1)) + hole(Some(end)) - 1
}
