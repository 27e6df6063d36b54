//! A run of staging memory: written by its holder, read by copies, given back after both.

#![expect(unsafe_code, reason = "a buffer hands out its bytes of the registered block")]

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::arena::Arena;
use super::blocks::Run;
use crate::device::{DeviceError, Fence};

/// A run of staging memory that its holder alone writes, and that copies read.
pub struct StagingBuffer {
    arena: Arc<Arena>,
    run: Run,
    start: *mut u8,
    copies: Vec<Fence>,
}

impl StagingBuffer {
    /// A run that the arena's lists hold as taken, whose first byte is `start`.
    pub(super) fn new(arena: Arc<Arena>, run: Run, start: *mut u8, copies: Vec<Fence>) -> Self {
        Self { arena, run, start, copies }
    }
}

// SAFETY: the buffer owns its run of the block alone; moving it to another thread moves that ownership.
unsafe impl Send for StagingBuffer {}
// SAFETY: a shared buffer gives out only its address and shared bytes; writing needs `&mut`.
unsafe impl Sync for StagingBuffer {}

impl StagingBuffer {
    /// The length in bytes.
    pub fn len(&self) -> u64 {
        u64::from(self.run.slots) * self.arena.slot_bytes()
    }

    /// Whether its memory is page-locked; it is not where the host refused that.
    pub fn is_page_locked(&self) -> bool {
        self.arena.is_page_locked(self.run)
    }

    /// Whether copies may still read it: who writes to it waits for them.
    pub(crate) fn is_read(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Whether the buffer has no bytes; never so.
    pub fn is_empty(&self) -> bool {
        self.run.slots == 0
    }

    /// Cuts the buffer after its first `slots` slots; `None` where nothing would be left on one side.
    pub fn split_off(&mut self, slots: u32) -> Option<Self> {
        if slots == 0 || slots >= self.run.slots {
            return None;
        }
        let rest = Run { slot: self.run.slot + slots, slots: self.run.slots - slots, ..self.run };
        self.run.slots = slots;
        let mut copies = self.arena.spare_list();
        copies.extend(self.copies.iter().cloned());
        Some(Self {
            arena: Arc::clone(&self.arena),
            run: rest,
            start: self.start.wrapping_add(usize::try_from(self.len()).unwrap_or(usize::MAX)),
            copies,
        })
    }

    /// The bytes, for a reader to fill. No copy may be in flight: one reads the same memory.
    ///
    /// The device is told that the host writes them until the answer is dropped: one that watches over memory in
    /// use refuses every copy of them meanwhile.
    ///
    /// # Errors
    /// The device fails while the copies in flight are waited for.
    pub fn bytes_mut(&mut self) -> Result<Filling<'_>, DeviceError> {
        // One that cannot be waited for stays noted: the buffer is not handed out again before it is done.
        while let Some(copy) = self.copies.last() {
            copy.wait()?;
            self.copies.pop();
        }
        self.arena.begin_host_write(self.start, self.len())?;
        Ok(Filling { buffer: self })
    }

    /// The bytes, to read on the host.
    pub fn bytes(&self) -> &[u8] {
        let len = usize::try_from(self.len()).unwrap_or(usize::MAX);
        // SAFETY: as in `Filling`; writing needs `&mut self`, and copies only read.
        unsafe { std::slice::from_raw_parts(self.start, len) }
    }

    /// The address of the byte at `offset`, to copy from. Waits while the block is being page-locked, which
    /// takes as long as one piece: what a copy makes of memory that is half registered is not known.
    pub(crate) fn at(&self, offset: u64) -> *const u8 {
        self.arena.wait_until_locked(self.run);
        self.start.wrapping_add(usize::try_from(offset).unwrap_or(usize::MAX)).cast_const()
    }

    /// Notes that a copy reads the buffer until `fence`: it is not handed out again before.
    pub(crate) fn read_until(&mut self, fence: Fence) {
        if self.copies.len() >= 2 {
            let Self { arena, copies, .. } = self;
            arena.on_nobodys_time(|| copies.retain(|copy| !copy.is_done().unwrap_or(false)));
        }
        self.copies.push(fence);
    }
}

/// A buffer's bytes while the host fills them.
#[derive(Debug)]
pub struct Filling<'b> {
    buffer: &'b mut StagingBuffer,
}

impl Deref for Filling<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.bytes()
    }
}

impl DerefMut for Filling<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = usize::try_from(self.buffer.len()).unwrap_or(usize::MAX);
        // SAFETY: the run belongs to the buffer alone until it is dropped, lies inside its block, which the
        // arena keeps mapped, and no copy reads it (`bytes_mut` waited for those; a new one needs the buffer,
        // which is borrowed here).
        unsafe { std::slice::from_raw_parts_mut(self.buffer.start, len) }
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.buffer.arena.end_host_write(self.buffer.start, self.buffer.len());
    }
}

impl fmt::Debug for StagingBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagingBuffer").field("run", &self.run).finish_non_exhaustive()
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        self.arena.give_back(self.run, std::mem::take(&mut self.copies));
    }
}
