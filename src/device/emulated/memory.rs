//! Reserved ranges, frames, mappings, page-locked blocks, the pool's chunks, and who uses them.
//!
//! Every page of a reserved range has a 16-byte entry: its frame, whether it is accessible, and how many
//! operations in flight use it. An operation is checked and counted when it is enqueued and counted off
//! when it is done, so what a worker touches cannot be unmapped under it. A page here is a piece of
//! granularity size; a mapping of a larger frame is a run of them. Capacity is hard: frames (the pool's
//! too) and what other processes hold never exceed the card.
//!
//! [`Memory`] is a plain value behind the device's memory lock; nothing under it calls out. May import
//! `backing`, `pool`, `usage`, `units`.

#![deny(unsafe_code)]

use std::collections::{BTreeMap, HashMap};

use super::backing::{self, Backing, MappingBudget, Slots};
use super::pool::Pool;
use super::usage::{HostBlock, Refusal};
use super::watch::History;
use crate::device::{DeviceError, FrameId, MemoryFigures};
use crate::units::{DeviceAddress, DeviceRange, format_size, try_table};

/// No frame.
pub(super) const UNMAPPED: u32 = u32::MAX;

/// One page of a reserved range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    /// The frame's place in the list, or [`UNMAPPED`].
    pub(super) frame: u32,
    /// The page's number within the frame.
    pub(super) part: u32,
    /// Operations in flight that use it.
    pub(super) pending: u32,
    pub(super) accessible: bool,
}

const CLOSED: Page = Page { frame: UNMAPPED, part: 0, pending: 0, accessible: false };

#[derive(Debug)]
pub(super) struct Reserved {
    pub(super) bytes: u64,
    /// Whether it holds a chunk of the pool, which no caller may map, unmap or free.
    pub(super) pool: bool,
    pub(super) mapped: usize,
    pub(super) pages: Vec<Page>,
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

/// All memory of one device.
#[derive(Debug)]
pub(super) struct Memory {
    name: String,
    pub(super) page_bytes: u64,
    total_bytes: u64,
    used_bytes: u64,
    other_bytes: u64,
    pub(super) backing: Option<Backing>,
    budget: MappingBudget,
    pub(super) reserved: BTreeMap<u64, Reserved>,
    frames: Vec<Frame>,
    vacant: Vec<u32>,
    live_frames: u64,
    live_mappings: u64,
    pub(super) blocks: BTreeMap<u64, HostBlock>,
    pub(super) page_locked_bytes: u64,
    pub(super) pool: Pool,
    /// The frame behind each chunk of the pool.
    pub(super) chunk_frames: HashMap<DeviceAddress, FrameId>,
    /// What touched which bytes, where that is watched.
    pub(super) history: Option<History>,
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
            history: None,
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
        // The addresses first: a length that no address space has is refused before it costs memory.
        let mut pages: Vec<Page> = Vec::new();
        let reserved = backing::reserve(bytes, self.page_bytes).and_then(|start| {
            pages = try_table("a range's pages", count).map_err(|error| {
                backing::release(DeviceRange::new(start, bytes));
                refuse(&error.to_string())
            })?;
            Ok(start)
        });
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

    pub(super) fn free_checked(&mut self, range: DeviceRange) -> Result<(), DeviceError> {
        self.reserved.remove(&range.start.0);
        backing::release(range);
        self.budget.change("free", range.bytes, -1)
    }

    /// The reserved range around `range`: its start and the numbers of the first page and the one after
    /// the last.
    pub(super) fn locate(&self, range: DeviceRange) -> Option<(u64, &Reserved, usize, usize)> {
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
        if let Some(history) = &mut self.history {
            history.forget_frame(place, frame.pages);
        }
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
        if self.backing.is_some() {
            let closed = self.closed_runs(run.start, pages);
            self.open_runs(&closed)?;
        }
        if let Some(reserved) = self.reserved.get_mut(&start) {
            reserved.pages[first..end].iter_mut().for_each(|page| page.accessible = true);
        }
        Ok(())
    }

    /// Where among `pages`, which begin at `start`, nothing is accessible yet, and the slots to put there.
    fn closed_runs(&self, start: DeviceAddress, pages: &[Page]) -> Vec<(DeviceRange, Vec<u32>)> {
        let mut runs = Vec::new();
        let mut at = start;
        for run in pages.chunk_by(|a, b| a.accessible == b.accessible) {
            let range = DeviceRange::new(at, run.len() as u64 * self.page_bytes);
            if !run[0].accessible {
                let slot =
                    |page: &Page| self.frames[page.frame as usize].slots.as_slice()[page.part as usize];
                runs.push((range, run.iter().map(slot).collect()));
            }
            at = range.end();
        }
        runs
    }

    /// Opens all or none.
    fn open_runs(&mut self, runs: &[(DeviceRange, Vec<u32>)]) -> Result<(), DeviceError> {
        let Some(backing) = &mut self.backing else { return Ok(()) };
        for (number, (range, slots)) in runs.iter().enumerate() {
            if let Err(error) = backing.map(range.start, slots) {
                for (range, slots) in &runs[..number] {
                    backing.unmap(*range, slots)?;
                }
                return Err(error);
            }
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
    pub(super) fn unmap_checked(&mut self, at: DeviceRange) -> Result<(), DeviceError> {
        let Some((start, reserved, first, end)) = self.locate(at) else { return Ok(()) };
        let place = reserved.pages[first].frame;
        if reserved.pages[first].accessible
            && let Some(backing) = &mut self.backing
        {
            backing.unmap(at, self.frames[place as usize].slots.as_slice())?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What the system counts: a mapping a page, and one a run of pages that are not mapped.
    fn count_mappings(pages: &[Page]) -> i64 {
        let hole = |page: &Page| page.frame == UNMAPPED;
        let runs = pages.chunk_by(|a, b| hole(a) && hole(b)).count();
        i64::try_from(runs).unwrap()
    }

    #[test]
    fn mappings_are_counted_as_the_system_counts_them() {
        let mut seed = 0xC0DE_u64;
        println!("seed {seed:#x}");
        let mut random = |below: usize| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            usize::try_from(seed % below as u64).unwrap()
        };
        let mut pages = [CLOSED; 40];
        let mut counted = 1;
        for _ in 0..5_000 {
            let first = random(pages.len());
            let end = (first + 1 + random(3)).min(pages.len());
            let run = &pages[first..end];
            if run.iter().all(|page| page.frame == UNMAPPED) {
                counted += mapping_delta(&pages, first, end);
                pages[first..end].fill(Page { frame: 7, ..CLOSED });
            } else if run.iter().all(|page| page.frame == 7) {
                pages[first..end].fill(CLOSED);
                counted -= mapping_delta(&pages, first, end);
            }
            assert_eq!(counted, count_mappings(&pages));
        }
    }

    #[test]
    fn a_page_entry_takes_sixteen_bytes() {
        assert_eq!(size_of::<Page>(), 16);
    }

    fn accounts_only(pages: u64) -> Memory {
        Memory::new("test".into(), pages * 4096, 4096, None, MappingBudget::new(None))
    }

    #[test]
    fn the_id_of_a_frame_is_never_used_again() {
        let mut memory = accounts_only(2);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..100 {
            let frame = memory.create_frame("create_frame", 4096).unwrap();
            assert!(seen.insert(frame));
            memory.release_frame(frame).unwrap();
            assert!(memory.release_frame(frame).unwrap_err().is_misuse());
        }
        assert_eq!(memory.frames.len(), 1);
    }

    #[test]
    fn a_pool_that_cannot_grow_leaves_the_books_as_they_were() {
        let mut memory = accounts_only(3);
        memory.grow_pool(5_000).unwrap();
        assert_eq!(memory.pool.figures().reserved, 8192);
        assert!(memory.grow_pool(4_097).unwrap_err().is_out_of_memory());
        assert_eq!(memory.figures().free, 4096);
        assert_eq!((memory.live_frames(), memory.live_mappings(), memory.live_ranges()), (0, 0, 0));
        assert!(memory.grow_pool(u64::MAX).unwrap_err().is_out_of_memory());
    }
}
