//! The arena: registered blocks, cut into runs of equal slots.
//!
//! A block is never moved. It can be used as soon as it is mapped; a thread of the arena page-locks it
//! beside that, one block after the other, so that nobody waits for the page-locking of a model. Only a copy
//! out of the one block that is being page-locked waits for that block. If page-locking fails, the arena
//! goes on with ordinary memory, grows no further than it must, and says so once.
//!
//! A buffer that is dropped while a copy still reads it goes to a pending list with the copy's fence and is
//! handed out again only when that is passed: no staging memory is reused before the copy that reads it has
//! completed.
//!
//! Locking: one mutex over the lists; fences are queried under it and waited for outside it. The
//! page-locking thread shares the lists and not the arena, whose drop joins it.

#![deny(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::blocks::{Block, Run, State};
use super::buffer::StagingBuffer;
use crate::device::{DeviceError, DeviceKind, Fence, HostBlock, SharedDevice};
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
    shared: Arc<Shared>,
    /// Page-locks the blocks; started with the first one.
    locker: Mutex<Option<JoinHandle<()>>>,
}

/// What the arena and its page-locking thread share.
struct Shared {
    device: SharedDevice,
    slot_bytes: u64,
    run_slots: u32,
    state: Mutex<State>,
    /// A buffer came back, or a block was page-locked.
    changed: Condvar,
    /// There is something to page-lock, or the arena goes away.
    work: Condvar,
}

/// The smallest block that is registered, in bytes: large, since each registration costs a system call,
/// and small enough that a copy which has to wait for one waits for tens of milliseconds at most.
const BLOCK_BYTES: u64 = 64 * MIB;

impl Arena {
    /// An empty arena; blocks come with demand.
    pub fn new(device: &SharedDevice, options: &ArenaOptions) -> Arc<Self> {
        let shared = Shared {
            device: Arc::clone(device),
            slot_bytes: options.slot_bytes,
            run_slots: options.run_slots.max(1),
            state: Mutex::new(State::new(options.limit_bytes)),
            changed: Condvar::new(),
            work: Condvar::new(),
        };
        Arc::new(Self { shared: Arc::new(shared), locker: Mutex::new(None) })
    }

    /// The size of a slot in bytes.
    pub fn slot_bytes(&self) -> u64 {
        self.shared.slot_bytes
    }

    /// The most slots of one buffer.
    pub fn run_slots(&self) -> u32 {
        self.shared.run_slots
    }

    /// The most bytes that the arena may hold.
    pub fn limit_bytes(&self) -> u64 {
        self.shared.state.lock().limit_bytes
    }

    /// What the arena holds.
    pub fn figures(&self) -> ArenaFigures {
        let state = self.shared.state.lock();
        let blocks = state.blocks.iter().flatten();
        ArenaFigures {
            held_bytes: state.held_bytes(),
            page_locked_bytes: blocks.filter(|block| block.is_page_locked()).map(|block| block.bytes).sum(),
            used_bytes: state.used_slots * self.shared.slot_bytes,
            limit_bytes: state.limit_bytes,
        }
    }

    /// Waits until every block is page-locked, or page-locking was refused. For callers that report or
    /// measure; nothing of the pager waits for it.
    pub fn settle(&self) {
        let mut state = self.shared.state.lock();
        while !state.lock_refused && state.blocks.iter().flatten().any(|block| !block.is_page_locked()) {
            self.shared.changed.wait(&mut state);
        }
    }

    /// Sets the limit. What is above it is given back as buffers return; see [`Self::trim`].
    pub fn set_limit(&self, bytes: u64) {
        let mut state = self.shared.state.lock();
        state.limit_bytes = bytes;
        state.lock_refused = false;
        self.shared.work.notify_one();
    }

    /// Takes a run of `slots` (at most [`Self::run_slots`]) if one is free or may be added now.
    pub fn take(self: &Arc<Self>, slots: u32) -> Result<Option<StagingBuffer>, StagingError> {
        let slots = slots.clamp(1, self.run_slots());
        let mut state = self.shared.state.lock();
        state.sweep()?;
        let mut found = state.find(slots);
        if found.is_none() && self.grow(&mut state)? {
            found = state.find(slots);
        }
        let Some((run, start)) = found.and_then(|run| Some((run, self.address(&state, run)?))) else {
            return Ok(None);
        };
        let copies = state.spare.pop().unwrap_or_else(|| Vec::with_capacity(2));
        Ok(Some(StagingBuffer::new(Arc::clone(self), run, start, copies)))
    }

    /// Takes the oldest run of `slots` (at most [`Self::run_slots`]) that was given back and that a copy still
    /// reads, if there is one: whoever writes to it waits for that copy.
    pub fn take_behind(self: &Arc<Self>, slots: u32) -> Option<StagingBuffer> {
        let mut state = self.shared.state.lock();
        let (run, copy) = state.take_pending(slots.clamp(1, self.run_slots()))?;
        let mut copies = state.spare.pop().unwrap_or_else(|| Vec::with_capacity(2));
        copies.push(copy);
        let start = self.address(&state, run)?;
        Some(StagingBuffer::new(Arc::clone(self), run, start, copies))
    }

    /// Bytes of buffers that were given back and that copies still read.
    pub fn copying_bytes(&self) -> Result<u64, StagingError> {
        let mut state = self.shared.state.lock();
        state.sweep()?;
        Ok(state.pending_slots() * self.shared.slot_bytes)
    }

    fn address(&self, state: &State, run: Run) -> Option<*mut u8> {
        let offset = usize::try_from(u64::from(run.slot) * self.slot_bytes()).unwrap_or(usize::MAX);
        let start = state.block(run.block)?.start.wrapping_add(offset);
        Some(std::ptr::with_exposed_provenance_mut(start))
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

    /// Whether copies read buffers that were dropped: those come back by themselves.
    pub fn has_copies_in_flight(&self) -> bool {
        !self.shared.state.lock().pending.is_empty()
    }

    /// Waits until a buffer may have come free: for the oldest copy in flight, or for a drop.
    pub fn wait_for_room(&self) -> Result<(), StagingError> {
        let mut state = self.shared.state.lock();
        if let Some(oldest) = state.pending.first() {
            let fence = oldest.fence.clone();
            drop(state);
            fence.wait()?;
        } else {
            // A buffer in use comes back without a word where its holder is slow; look again now and then.
            self.shared.changed.wait_for(&mut state, std::time::Duration::from_millis(5));
        }
        Ok(())
    }

    /// Gives blocks without any buffer back to the host until at most `keep_bytes` are held; answers the
    /// bytes given back.
    pub fn trim(&self, keep_bytes: u64) -> Result<u64, StagingError> {
        let mut state = self.shared.state.lock();
        while state.is_locking() {
            self.shared.changed.wait(&mut state);
        }
        state.sweep()?;
        let mut freed = 0;
        for index in (0..state.blocks.len()).rev() {
            if state.held_bytes() <= keep_bytes {
                break;
            }
            let idle = state.blocks[index].as_ref().is_some_and(|block| block.free_slots == block.slots);
            if idle && let Some(block) = state.blocks[index].take() {
                freed += block.bytes;
            }
        }
        Ok(freed)
    }

    /// Adds a block if the limit permits, and has it page-locked in the background.
    fn grow(&self, state: &mut State) -> Result<bool, StagingError> {
        let Shared { device, slot_bytes, run_slots, .. } = &*self.shared;
        // A block is a part of the limit as it is now, so that a small limit is kept too.
        let in_block = BLOCK_BYTES.min(state.limit_bytes / 4) / (*slot_bytes).max(1);
        let mut block_slots = u32::try_from(in_block).unwrap_or(u32::MAX).max(*run_slots);
        let held = state.held_bytes();
        let floor = 2 * u64::from(*run_slots) * slot_bytes;
        let memory = loop {
            let bytes = u64::from(block_slots) * slot_bytes;
            if held + bytes > state.limit_bytes.max(floor) && held >= floor {
                return Ok(false);
            }
            match HostBlock::map(device, bytes) {
                Ok(memory) => break memory,
                Err(_) if held >= floor => {
                    // What is held suffices to go on: slower, never fatal.
                    state.limit_bytes = held;
                    return Ok(false);
                }
                // A smaller block may do, down to one read.
                Err(_) if block_slots > *run_slots => block_slots = (block_slots / 2).max(*run_slots),
                Err(source) => {
                    return Err(StagingError::NoMemory {
                        asked: bytes,
                        held,
                        limit: state.limit_bytes,
                        source,
                    });
                }
            }
        };
        let (start, bytes) = (memory.start().expose_provenance(), memory.bytes());
        state.add_block(memory, start, bytes, block_slots);
        self.start_locker(state);
        self.shared.work.notify_one();
        Ok(true)
    }

    /// Starts the page-locking thread, once. Without one the memory stays ordinary.
    fn start_locker(&self, state: &mut State) {
        let mut locker = self.locker.lock();
        if locker.is_some() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        match std::thread::Builder::new().name("vram-lock".to_owned()).spawn(move || shared.lock_blocks()) {
            Ok(thread) => *locker = Some(thread),
            Err(error) if !state.lock_refused => {
                state.lock_refused = true;
                tracing::warn!(%error, "there is no thread to page-lock: going on with ordinary memory");
            }
            Err(_) => {}
        }
    }

    pub(super) fn is_page_locked(&self, run: Run) -> bool {
        self.shared.state.lock().block(run.block).is_some_and(Block::is_page_locked)
    }

    /// Waits while the block of `run` is being page-locked. On a modelled clock, where that takes no time worth
    /// mentioning and none of the caller's, it also waits for the turn of one that is to be: what a copy costs must
    /// not depend on how fast the page-locking thread is.
    pub(super) fn wait_until_locked(&self, run: Run) {
        let mut state = self.shared.state.lock();
        let modelled = self.shared.device.info().kind == DeviceKind::Emulated && self.locker.lock().is_some();
        while state
            .block(run.block)
            .is_some_and(|block| block.memory.is_none() || modelled && state.is_to_be_locked(block))
        {
            self.shared.changed.wait(&mut state);
        }
    }

    /// Asks the device on nobody's time: what is asked for depends on how fast other threads were.
    pub(super) fn on_nobodys_time<T>(&self, ask: impl FnOnce() -> T) -> T {
        let own_time = self.shared.device.now();
        let answer = ask();
        self.shared.device.set_now(own_time);
        answer
    }

    /// Tells the device that the host writes to this memory from here on.
    pub(super) fn begin_host_write(&self, start: *mut u8, bytes: u64) -> Result<(), DeviceError> {
        self.shared.device.begin_host_write(start, bytes)
    }

    /// Tells the device that the host has written to this memory.
    pub(super) fn end_host_write(&self, start: *mut u8, bytes: u64) {
        self.shared.device.end_host_write(start, bytes);
    }

    /// An empty list of fences.
    pub(super) fn spare_list(&self) -> Vec<Fence> {
        self.shared.state.lock().spare.pop().unwrap_or_else(|| Vec::with_capacity(2))
    }

    pub(super) fn give_back(&self, run: Run, mut copies: Vec<Fence>) {
        let mut state = self.shared.state.lock();
        self.on_nobodys_time(|| state.give_back(run, &mut copies));
        state.spare.push(copies);
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// The page-locking thread: one block after the other, outside of the lock.
    fn lock_blocks(&self) {
        let mut state = self.state.lock();
        while !state.stop {
            let Some((index, mut memory)) = state.take_unlocked() else {
                self.work.wait(&mut state);
                continue;
            };
            let locked = MutexGuard::unlocked(&mut state, || memory.page_lock());
            let bytes = memory.bytes();
            if let Some(block) = state.blocks.get_mut(index).and_then(Option::as_mut) {
                block.memory = Some(memory);
            }
            if let Err(error) = locked {
                let held = state.held_bytes();
                state.lock_refused = true;
                state.limit_bytes = state.limit_bytes.min(held);
                tracing::warn!(
                    bytes,
                    held,
                    %error,
                    "page-locking was refused: going on with ordinary memory and no more than is held"
                );
                if error.is_lost() {
                    self.device.defer(error);
                }
            }
            self.changed.notify_all();
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.work.notify_one();
        if let Some(locker) = self.locker.get_mut().take() {
            // It holds no arena, so this is never its own thread; a panic of it has nothing to add here.
            let _ = locker.join();
        }
        let mut state = self.shared.state.lock();
        for pending in std::mem::take(&mut state.pending) {
            if let Err(error) = pending.fence.settle() {
                self.shared.device.defer(error);
            }
        }
    }
}
