//! The card memory of a set of weights: one address range, and frames under what is loaded.
//!
//! Modules follow one another in the range from the dearest to the cheapest, so what is loaded is nearly
//! one run, and no more than the pages at its ends are shared with what is not. A page has a frame as
//! long as a loaded module touches it; a frame that no module needs goes back to the device at once, so
//! the free figure moves by exactly what is claimed. No lock: the weights' own is held.

#![expect(unsafe_code, reason = "unmaps pages that nothing uses any more")]

use std::ops::Range;

use crate::device::{AddressRange, DeviceError, FrameSet, SharedDevice};
use crate::units::DeviceAddress;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Page {
    /// Loaded modules that touch it.
    users: u32,
    frame: u32,
}

/// A range of pages, some with a frame.
#[derive(Debug)]
pub(super) struct CardMemory {
    /// Dropped, and so unmapped, before the frames.
    range: AddressRange,
    frames: FrameSet,
    pages: Vec<Page>,
    page_bytes: u64,
}

impl CardMemory {
    /// Reserves addresses for `pages` pages; costs no memory.
    pub(super) fn reserve(device: &SharedDevice, pages: u32, page_bytes: u64) -> Result<Self, DeviceError> {
        Ok(Self {
            range: AddressRange::reserve(device, (pages as usize).max(1), page_bytes)?,
            frames: FrameSet::new(device, page_bytes),
            pages: vec![Page { users: 0, frame: NONE }; pages as usize],
            page_bytes,
        })
    }

    /// The address of the range's byte `offset`.
    pub(super) fn address(&self, offset: u64) -> DeviceAddress {
        self.range.range().start.offset(offset)
    }

    /// Bytes of the pages that have a frame.
    pub(super) fn bytes(&self) -> u64 {
        self.frames.len() as u64 * self.page_bytes
    }

    /// Which pages have a frame.
    pub(super) fn mapped(&self) -> Vec<bool> {
        self.pages.iter().map(|page| page.frame != NONE).collect()
    }

    /// Puts frames under the pages of a module that is to be loaded. All or nothing.
    pub(super) fn take(&mut self, pages: Range<u32>) -> Result<(), DeviceError> {
        for page in pages.clone() {
            let taken = self.back(page);
            self.pages[page as usize].users += 1;
            if let Err(error) = taken {
                return Err(self.give(pages.start..page + 1).err().unwrap_or(error));
            }
        }
        Ok(())
    }

    fn back(&mut self, page: u32) -> Result<(), DeviceError> {
        if self.pages[page as usize].frame != NONE {
            return Ok(());
        }
        let frame = self.frames.create()?;
        if let Err(error) = self.range.map(page, &self.frames, frame) {
            self.frames.release(frame)?;
            return Err(error);
        }
        self.pages[page as usize].frame = frame;
        self.range.set_access(page, 1)
    }

    /// Takes the frames from the pages that only this module touched; the caller has waited for all work
    /// that used it. Answers the bytes given back.
    pub(super) fn give(&mut self, pages: Range<u32>) -> Result<u64, DeviceError> {
        let (mut freed, mut result) = (0, Ok(()));
        for page in pages {
            let entry = &mut self.pages[page as usize];
            entry.users = entry.users.saturating_sub(1);
            if entry.users > 0 || entry.frame == NONE {
                continue;
            }
            let frame = entry.frame;
            // SAFETY: no loaded module touches the page, and the caller has waited for the work of each that
            // did before it gave it back.
            let gone = unsafe { self.range.unmap(page) };
            if gone.is_ok() {
                self.pages[page as usize].frame = NONE;
                freed += self.page_bytes;
            }
            result = result.and(gone.and_then(|()| self.frames.release(frame)));
        }
        result.map(|()| freed)
    }
}
