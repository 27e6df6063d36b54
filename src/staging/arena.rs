//! The arena: registered blocks, cut into runs of equal slots.
//!
//! A block is registered once and never moved. A buffer that is dropped while a copy still reads it goes
//! to a pending list with the copy's fence and is handed out again only when that is passed: no staging
//! memory is reused before the copy that reads it has completed. If page-locking fails, the arena goes on
//! with ordinary memory, grows no further than it must, and says so once.
//!
//! Locking: one mutex over the lists; fences are queried under it and waited for outside it.

#![expect(unsafe_code, reason = "a buffer hands out its bytes of the registered block")]

use std::fmt;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::device::{DeviceError, Fence, HostBlock, SharedDevice};
use crate::units::{MIB, format_size};

/// Why no staging memory can be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// The host refused the memory itself, not only its page lock.
    #[error(
        "no staging memory: {} asked for beside {} of {}: {source}",
        format_size(*.asked), format_size(*.held), format_size(*.limit)
    )]
    NoMemory {
        /// Bytes of the block that was refused.
        asked: u64,
        /// Bytes held already.
        held: u64,
        /// The arena's limit in bytes.
        limit: u64,
        /// The host's reason.
        source: DeviceError,
    },
    /// The device failed while a fence was asked.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// How an arena is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaOptions {
    /// The size of a slot in bytes: the pager's page.
    pub slot_bytes: u64,
    /// The most slots of one buffer.
    pub run_slots: u32,
    /// The most bytes that the arena may hold; at least two runs are always allowed.
    pub limit_bytes: u64,
}

/// What an arena holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaFigures {
    /// Bytes of all blocks.
    pub held_bytes: u64,
    /// Bytes of blocks that are page-locked.
    pub page_locked_bytes: u64,
    /// Bytes in buffers that are alive or whose copies are not done.
    pub used_bytes: u64,
    /// The limit in bytes.
    pub limit_bytes: u64,
}

/// Page-locked memory of one device, shared by all its models.
pub struct Arena {
    device: SharedDevice,
    slot_bytes: u64,
    run_slots: u32,
    state: Mutex<State>,
    given_back: Condvar,
}

/// The lists. `M` is a block's memory and `F` what says that a copy is done: those of a device, but for
/// the models of the hand-over.
struct State<M = HostBlock, F = Fence> {
    limit_bytes: u64,
    blocks: Vec<Option<Block<M>>>,
    pending: Vec<Pending<F>>,
    used_slots: u64,
    /// Page-locking failed before: no more of it is tried until the limit is set anew.
    lock_refused: bool,
}

struct Block<M = HostBlock> {
    memory: M,
    slots: u32,
    /// One bit a slot: set while it is free.
    free: Vec<u64>,
    free_slots: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Run {
    block: u32,
    slot: u32,
    slots: u32,
}

struct Pending<F = Fence> {
    run: Run,
    fence: F,
}

/// What says whether a copy is done.
trait CopyDone {
    fn is_done(&self) -> Result<bool, DeviceError>;
}

impl CopyDone for Fence {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Fence::is_done(self)
    }
}

/// The smallest block that is registered, in bytes: large, since each registration costs a system call
/// and a pin of every page.
const BLOCK_BYTES: u64 = 32 * MIB;

impl Arena {
    /// An empty arena; blocks come with demand.
    pub fn new(device: &SharedDevice, options: &ArenaOptions) -> Arc<Self> {
        let run_slots = options.run_slots.max(1);
        Arc::new(Self {
            device: Arc::clone(device),
            slot_bytes: options.slot_bytes,
            run_slots,
            state: Mutex::new(State {
                limit_bytes: options.limit_bytes,
                blocks: Vec::new(),
                pending: Vec::with_capacity(64),
                used_slots: 0,
                lock_refused: false,
            }),
            given_back: Condvar::new(),
        })
    }

    /// The size of a slot in bytes.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// The most slots of one buffer.
    pub fn run_slots(&self) -> u32 {
        self.run_slots
    }

    /// What the arena holds.
    pub fn figures(&self) -> ArenaFigures {
        let state = self.state.lock();
        let blocks = state.blocks.iter().flatten();
        ArenaFigures {
            held_bytes: state.held_bytes(),
            page_locked_bytes: blocks
                .filter(|block| block.memory.is_page_locked())
                .map(|block| block.memory.bytes())
                .sum(),
            used_bytes: state.used_slots * self.slot_bytes,
            limit_bytes: state.limit_bytes,
        }
    }

    /// Sets the limit. What is above it is given back as buffers return; see [`Self::trim`].
    pub fn set_limit(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.limit_bytes = bytes;
        state.lock_refused = false;
    }

    /// Takes a run of `slots` (at most [`Self::run_slots`]) if one is free or may be added now.
    pub fn take(self: &Arc<Self>, slots: u32) -> Result<Option<StagingBuffer>, StagingError> {
        let slots = slots.clamp(1, self.run_slots);
        let mut state = self.state.lock();
        state.sweep()?;
        let mut found = state.find(slots);
        if found.is_none() && self.grow(&mut state)? {
            found = state.find(slots);
        }
        let Some(run) = found else { return Ok(None) };
        let Some(block) = state.blocks.get(run.block as usize).and_then(Option::as_ref) else {
            return Ok(None);
        };
        let start = block
            .memory
            .start()
            .wrapping_add(usize::try_from(u64::from(run.slot) * self.slot_bytes).unwrap_or(usize::MAX));
        Ok(Some(StagingBuffer { arena: Arc::clone(self), run, start, copies: Vec::with_capacity(2) }))
    }

    /// Takes a run, waiting for copies in flight to give theirs back. `false` from `keep_waiting` ends the
    /// wait with `None`.
    pub fn take_waiting(
        self: &Arc<Self>,
        slots: u32,
        mut keep_waiting: impl FnMut() -> bool,
    ) -> Result<Option<StagingBuffer>, StagingError> {
        loop {
            if let Some(buffer) = self.take(slots)? {
                return Ok(Some(buffer));
            }
            if !keep_waiting() {
                return Ok(None);
            }
            self.wait_for_room()?;
        }
    }

    /// Waits until a buffer may have come free: for the oldest copy in flight, or for a drop.
    pub fn wait_for_room(&self) -> Result<(), StagingError> {
        let mut state = self.state.lock();
        if let Some(oldest) = state.pending.first() {
            let fence = oldest.fence.clone();
            drop(state);
            fence.wait()?;
        } else {
            // A buffer in use comes back without a word where its holder is slow; look again now and then.
            self.given_back.wait_for(&mut state, std::time::Duration::from_millis(5));
        }
        Ok(())
    }

    /// Gives blocks without any buffer back to the host until at most the limit is held; answers the bytes
    /// given back.
    pub fn trim(&self, keep_bytes: u64) -> Result<u64, StagingError> {
        let mut state = self.state.lock();
        state.sweep()?;
        let mut freed = 0;
        for index in (0..state.blocks.len()).rev() {
            if state.held_bytes() <= keep_bytes {
                break;
            }
            let idle = state.blocks[index].as_ref().is_some_and(|block| block.free_slots == block.slots);
            if idle && let Some(block) = state.blocks[index].take() {
                freed += block.memory.bytes();
            }
        }
        Ok(freed)
    }

    /// Adds a block if the limit permits.
    fn grow(&self, state: &mut State) -> Result<bool, StagingError> {
        // A block is a part of the limit as it is now, so that a small limit is kept too.
        let in_block = BLOCK_BYTES.min(state.limit_bytes / 4) / self.slot_bytes.max(1);
        let block_slots = u32::try_from(in_block).unwrap_or(u32::MAX).max(self.run_slots);
        let bytes = u64::from(block_slots) * self.slot_bytes;
        let held = state.held_bytes();
        let floor = 2 * u64::from(self.run_slots) * self.slot_bytes;
        if held + bytes > state.limit_bytes.max(floor) && held >= floor {
            return Ok(false);
        }
        let mut memory = match HostBlock::map(&self.device, bytes) {
            Ok(memory) => memory,
            Err(_) if held >= floor => {
                // What is held suffices to go on: slower, never fatal.
                state.limit_bytes = held;
                return Ok(false);
            }
            Err(source) => {
                return Err(StagingError::NoMemory { asked: bytes, held, limit: state.limit_bytes, source });
            }
        };
        if !state.lock_refused
            && let Err(error) = memory.page_lock()
        {
            if error.is_lost() {
                return Err(error.into());
            }
            state.lock_refused = true;
            state.limit_bytes = held + bytes;
            tracing::warn!(
                bytes,
                held,
                %error,
                "page-locking was refused: going on with ordinary memory and no more than is held"
            );
        }
        state.add_block(memory, block_slots);
        Ok(true)
    }

    fn give_back(&self, run: Run, copies: &mut Vec<Fence>) {
        self.state.lock().give_back(run, copies);
        self.given_back.notify_all();
    }
}

impl State {
    fn held_bytes(&self) -> u64 {
        self.blocks.iter().flatten().map(|block| block.memory.bytes()).sum()
    }
}

impl<M, F: CopyDone> State<M, F> {
    /// Adds a block of `slots` free slots.
    fn add_block(&mut self, memory: M, slots: u32) {
        let mut free = vec![u64::MAX; slots.div_ceil(64) as usize];
        let tail = slots % 64;
        if tail > 0
            && let Some(last) = free.last_mut()
        {
            *last = (1 << tail) - 1;
        }
        let block = Block { memory, slots, free, free_slots: slots };
        match self.blocks.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(block),
            None => self.blocks.push(Some(block)),
        }
    }

    /// Takes a run back that copies may still read: it is free once the last of them is done.
    fn give_back(&mut self, run: Run, copies: &mut Vec<F>) {
        copies.retain(|fence| !fence.is_done().unwrap_or(false));
        match copies.pop() {
            // The newest copy is enough only if it is the only one; others wait in line behind it.
            Some(fence) => {
                for other in copies.drain(..) {
                    self.pending.push(Pending { run: Run { slots: 0, ..run }, fence: other });
                }
                self.pending.push(Pending { run, fence });
            }
            None => self.release(run),
        }
    }

    /// Frees the runs whose copies are done. Those of a run stand together, oldest first, so a run is freed
    /// only after all of its fences.
    fn sweep(&mut self) -> Result<(), DeviceError> {
        let mut index = 0;
        let mut blocked: Option<(u32, u32)> = None;
        while index < self.pending.len() {
            let Pending { run, fence } = &self.pending[index];
            let place = (run.block, run.slot);
            if blocked == Some(place) || !fence.is_done()? {
                blocked = Some(place);
                index += 1;
                continue;
            }
            let run = *run;
            self.pending.remove(index);
            if run.slots > 0 {
                self.release(run);
            }
        }
        Ok(())
    }

    fn release(&mut self, run: Run) {
        self.used_slots -= u64::from(run.slots);
        if let Some(block) = self.blocks.get_mut(run.block as usize).and_then(Option::as_mut) {
            for slot in run.slot..run.slot + run.slots {
                block.free[slot as usize / 64] |= 1 << (slot % 64);
            }
            block.free_slots += run.slots;
        }
    }

    /// The first run of free slots, taken and counted as used.
    fn find(&mut self, slots: u32) -> Option<Run> {
        for (index, block) in self.blocks.iter_mut().enumerate() {
            let Some(block) = block else { continue };
            if block.free_slots < slots {
                continue;
            }
            if let Some(slot) = first_run(&block.free, block.slots, slots) {
                for taken in slot..slot + slots {
                    block.free[taken as usize / 64] &= !(1 << (taken % 64));
                }
                block.free_slots -= slots;
                self.used_slots += u64::from(slots);
                return Some(Run { block: u32::try_from(index).unwrap_or(u32::MAX), slot, slots });
            }
        }
        None
    }
}

/// The first of `wanted` set bits in a row among the first `len`.
fn first_run(free: &[u64], len: u32, wanted: u32) -> Option<u32> {
    let mut start = 0;
    let mut run = 0;
    let mut bit = 0;
    while bit < len {
        let word = free[bit as usize / 64];
        if word == 0 && bit % 64 == 0 {
            run = 0;
            bit += 64;
            continue;
        }
        if word >> (bit % 64) & 1 == 1 {
            if run == 0 {
                start = bit;
            }
            run += 1;
            if run == wanted {
                return Some(start);
            }
        } else {
            run = 0;
        }
        bit += 1;
    }
    None
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for pending in self.state.get_mut().pending.drain(..) {
            if let Err(error) = pending.fence.wait() {
                self.device.defer(error);
            }
        }
    }
}

/// A run of staging memory that its holder alone writes, and that copies read.
pub struct StagingBuffer {
    arena: Arc<Arena>,
    run: Run,
    start: *mut u8,
    copies: Vec<Fence>,
}

// SAFETY: the buffer owns its run of the block alone; moving it to another thread moves that ownership.
unsafe impl Send for StagingBuffer {}
// SAFETY: a shared buffer gives out only its address and shared bytes; writing needs `&mut`.
unsafe impl Sync for StagingBuffer {}

impl StagingBuffer {
    /// The length in bytes.
    pub fn len(&self) -> u64 {
        u64::from(self.run.slots) * self.arena.slot_bytes
    }

    /// Whether its memory is page-locked; it is not where the host refused that.
    pub fn is_page_locked(&self) -> bool {
        let state = self.arena.state.lock();
        let block = state.blocks.get(self.run.block as usize).and_then(Option::as_ref);
        block.is_some_and(|block| block.memory.is_page_locked())
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
        Some(Self {
            arena: Arc::clone(&self.arena),
            run: rest,
            start: self.start.wrapping_add(usize::try_from(self.len()).unwrap_or(usize::MAX)),
            copies: self.copies.clone(),
        })
    }

    /// The bytes, for a reader to fill. No copy may be in flight: one reads the same memory.
    ///
    /// # Errors
    /// The device fails while the copies in flight are waited for.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], DeviceError> {
        for copy in self.copies.drain(..) {
            copy.wait()?;
        }
        self.arena.device.host_write(self.start, self.len())?;
        let len = usize::try_from(self.len()).unwrap_or(usize::MAX);
        // SAFETY: the run belongs to this buffer alone until it is dropped, lies inside its block, which the
        // arena keeps mapped, and no copy reads it (waited for above; a new one needs `&mut self`).
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start, len) })
    }

    /// The bytes, to read on the host.
    pub fn bytes(&self) -> &[u8] {
        let len = usize::try_from(self.len()).unwrap_or(usize::MAX);
        // SAFETY: as in `bytes_mut`; writing needs `&mut self`, and copies only read.
        unsafe { std::slice::from_raw_parts(self.start, len) }
    }

    /// The address of the byte at `offset`, to copy from.
    pub(crate) fn at(&self, offset: u64) -> *const u8 {
        self.start.wrapping_add(usize::try_from(offset).unwrap_or(usize::MAX)).cast_const()
    }

    /// Notes that a copy reads the buffer until `fence`: it is not handed out again before.
    pub(crate) fn read_until(&mut self, fence: Fence) {
        if self.copies.len() >= 2 {
            self.copies.retain(|copy| !copy.is_done().unwrap_or(false));
        }
        self.copies.push(fence);
    }
}

impl fmt::Debug for StagingBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagingBuffer").field("run", &self.run).finish_non_exhaustive()
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        let mut copies = std::mem::take(&mut self.copies);
        self.arena.give_back(self.run, &mut copies);
    }
}

#[cfg(all(test, loom))]
#[path = "arena_models.rs"]
mod models;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_found_where_enough_slots_are_free_in_a_row() {
        assert_eq!(first_run(&[0b0110_1110], 8, 3), Some(1));
        assert_eq!(first_run(&[0b0110_1110], 8, 4), None);
        assert_eq!(first_run(&[u64::MAX << 62, 0b11], 66, 4), Some(62));
        assert_eq!(first_run(&[0, u64::MAX], 128, 64), Some(64));
        assert_eq!(first_run(&[u64::MAX], 3, 4), None);
    }
}
