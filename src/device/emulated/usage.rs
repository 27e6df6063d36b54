//! Who uses memory: page-locked blocks, operations in flight, the pool's chunks.
//!
//! An operation is checked and counted when it is enqueued and counted off when it is done; between the
//! two, nothing that it touches can be unmapped, closed or unlocked. The second half of [`Memory`]'s
//! methods, behind the same lock. May import what `memory` does.

#![deny(unsafe_code)]

use super::memory::{Memory, UNMAPPED};
use super::stream::Work;
use super::watch::{Before, Operation, within};
use crate::device::DeviceError;
use crate::units::{DeviceAddress, DeviceRange};

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

    /// `bytes` of it, `offset` after its start.
    pub(super) fn part(self, offset: u64, bytes: u64) -> Self {
        Self { address: self.address + offset, bytes, counted: false }
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

#[derive(Debug)]
pub(super) struct HostBlock {
    bytes: u64,
    pending: u32,
}

impl Memory {
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

    pub(super) fn refuse_pending(&self, run: DeviceRange) -> Result<(), Refusal> {
        self.page_in_use(run).map_or(Ok(()), |page| Err(Refusal::InUse(page)))
    }

    /// The first page of `run` that an operation in flight uses.
    fn page_in_use(&self, run: DeviceRange) -> Option<DeviceRange> {
        let (start, reserved, first, end) = self.locate(run)?;
        let index = reserved.pages.get(first..end)?.iter().position(|page| page.pending > 0)?;
        let at = DeviceAddress(start).offset((first + index) as u64 * self.page_bytes);
        Some(DeviceRange::new(at, self.page_bytes))
    }

    pub(super) fn check_range(&self, call: &'static str, range: DeviceRange) -> Result<(), DeviceError> {
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
    pub(super) fn block_of(&self, call: &'static str, span: HostSpan) -> Result<Option<u64>, DeviceError> {
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

    // The watch over memory in use, see `watch`.

    /// Notes what `work` touches; refuses it if it touches bytes that earlier work touches too and nothing
    /// orders the two. Call it after [`Self::begin`].
    pub(super) fn watch(
        &mut self,
        work: &Work,
        (stream, sequence): (u64, u64),
        before: &Before<'_>,
    ) -> Result<(), DeviceError> {
        let Some(history) = &self.history else { return Ok(()) };
        let operation = Operation { stream, sequence, call: work.call(), site: history.site() };
        let (ranges, len) = work.ranges();
        let mut notes = Vec::new();
        for (place, range) in ranges[..len].iter().enumerate().filter(|(_, range)| range.bytes > 0) {
            let Some((start, reserved, first, end)) = self.locate(*range) else { continue };
            for (index, page) in (first..end).zip(&reserved.pages[first..end]) {
                let at = DeviceAddress(start).offset(index as u64 * self.page_bytes);
                let (from, to) = within(*range, at, self.page_bytes);
                let note = operation.note(from, to, at.0, work.writes(place));
                if let Some(earlier) = history.conflict((page.frame, page.part), &note, before) {
                    return Err(operation.unordered(*range, earlier));
                }
                notes.push(((page.frame, page.part), note));
            }
        }
        let host = work.host().filter(|span| span.bytes > 0).map(|span| {
            let writes = matches!(work, Work::ToHost { .. });
            operation.note(span.address, span.address.saturating_add(span.bytes), 0, writes)
        });
        if let (Some(note), Some(span)) = (&host, work.host()) {
            if let Some(earlier) = history.host_conflict(note, before) {
                return Err(operation.unordered(span.as_range(), earlier));
            }
            if let Some(writer) = history.writer(span.address, span.address.saturating_add(span.bytes)) {
                return Err(operation.under_the_host(span.as_range(), writer));
            }
        }
        if let Some(history) = &mut self.history {
            for (page, note) in notes {
                history.add(page, note, before);
            }
            if let Some(note) = host {
                history.add_host(note, before);
            }
        }
        Ok(())
    }

    /// Refuses to take pages away whose uses through `run` the host does not know to be done.
    pub(super) fn watch_unmap(&mut self, run: DeviceRange, before: &Before<'_>) -> Result<(), DeviceError> {
        if self.history.is_none() {
            return Ok(());
        }
        let Some((start, reserved, first, end)) = self.locate(run) else { return Ok(()) };
        let keys: Vec<_> = (first..end)
            .zip(&reserved.pages[first..end])
            .filter(|(_, page)| page.frame != UNMAPPED)
            .map(|(index, page)| (start + index as u64 * self.page_bytes, (page.frame, page.part)))
            .collect();
        let Some(history) = &mut self.history else { return Ok(()) };
        for (at, key) in keys {
            if let Some(user) = history.leave(key, at, before) {
                let page = DeviceRange::new(DeviceAddress(at), self.page_bytes);
                return Err(history.in_use("unmap", "the page", page, &user));
            }
        }
        Ok(())
    }

    /// Refuses to let the host write, or give up, memory whose uses by copies it does not know to be done, or that
    /// somebody writes.
    pub(super) fn watch_host(
        &mut self,
        call: &'static str,
        span: HostSpan,
        before: &Before<'_>,
    ) -> Result<(), DeviceError> {
        let Some(history) = &mut self.history else { return Ok(()) };
        let (from, to) = (span.address, span.address.saturating_add(span.bytes));
        if let Some(user) = history.leave_host(from, to, before) {
            return Err(history.in_use(call, "the host memory", span.as_range(), &user));
        }
        match history.writer(from, to) {
            Some(writer) => Err(history.is_written(call, span.as_range(), writer)),
            None => Ok(()),
        }
    }

    /// The host writes `span` from here on. Call it after [`Self::watch_host`].
    pub(super) fn begin_host_write(&mut self, span: HostSpan) {
        if let Some(history) = &mut self.history {
            history.begin_write(span.address, span.address.saturating_add(span.bytes));
        }
    }

    /// The host is done with what it wrote of `span`.
    pub(super) fn end_host_write(&mut self, span: HostSpan) {
        if let Some(history) = &mut self.history {
            history.end_write(span.address, span.address.saturating_add(span.bytes));
        }
    }

    /// The page-locked block that begins at `address`.
    pub(super) fn block_at(&self, address: u64) -> Option<HostSpan> {
        self.blocks.get(&address).map(|block| HostSpan { address, bytes: block.bytes, counted: false })
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
