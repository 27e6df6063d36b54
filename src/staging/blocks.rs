//! The lists behind an arena: its blocks, their free slots, and the runs that copies still read.
//!
//! Plain values behind the arena's one lock. Only asks fences, never waits for one. `M` is a block's memory
//! and `F` what says that a copy is done: those of a device, but for the models of the hand-over.

#![deny(unsafe_code)]

use crate::device::{DeviceError, Fence, HostBlock};

/// What the arena's lock protects.
pub(super) struct State<M = HostBlock, F = Fence> {
    pub(super) limit_bytes: u64,
    pub(super) blocks: Vec<Option<Block<M>>>,
    pub(super) pending: Vec<Pending<F>>,
    pub(super) used_slots: u64,
    /// Page-locking failed before: no more of it is tried until the limit is set anew.
    pub(super) lock_refused: bool,
    /// The arena goes away.
    pub(super) stop: bool,
    /// Lists of fences that buffers gave back, kept for their memory.
    pub(super) spare: Vec<Vec<F>>,
}

pub(super) struct Block<M = HostBlock> {
    /// `None` while it is being page-locked.
    pub(super) memory: Option<M>,
    /// The address of the first byte, which stays while the memory is away.
    pub(super) start: usize,
    pub(super) bytes: u64,
    pub(super) slots: u32,
    /// One bit a slot: set while it is free.
    free: Vec<u64>,
    pub(super) free_slots: u32,
}

/// Slots that belong together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    pub(super) block: u32,
    pub(super) slot: u32,
    pub(super) slots: u32,
}

/// A run that was given back while a copy read it. Other fences of the same run stand before it, without
/// slots.
pub(super) struct Pending<F = Fence> {
    pub(super) run: Run,
    pub(super) fence: F,
}

/// What says whether a copy is done.
pub(super) trait CopyDone {
    fn is_done(&self) -> Result<bool, DeviceError>;
}

impl CopyDone for Fence {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Fence::is_done(self)
    }
}

impl Block {
    pub(super) fn is_page_locked(&self) -> bool {
        self.memory.as_ref().is_some_and(HostBlock::is_page_locked)
    }
}

impl State {
    /// Whether a block waits for the page-locking thread.
    pub(super) fn is_to_be_locked(&self, block: &Block) -> bool {
        !self.lock_refused && !self.stop && !block.is_page_locked()
    }

    /// Takes the memory of a block that is to be page-locked next, with the block's place.
    pub(super) fn take_unlocked(&mut self) -> Option<(usize, HostBlock)> {
        if self.lock_refused {
            return None;
        }
        self.blocks.iter_mut().enumerate().find_map(|(index, block)| {
            let memory = &mut block.as_mut()?.memory;
            memory.take_if(|memory| !memory.is_page_locked()).map(|memory| (index, memory))
        })
    }
}

impl<M, F: CopyDone> State<M, F> {
    pub(super) fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            blocks: Vec::new(),
            pending: Vec::with_capacity(64),
            used_slots: 0,
            lock_refused: false,
            stop: false,
            spare: Vec::with_capacity(64),
        }
    }

    pub(super) fn block(&self, index: u32) -> Option<&Block<M>> {
        self.blocks.get(index as usize).and_then(Option::as_ref)
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.blocks.iter().flatten().map(|block| block.bytes).sum()
    }

    /// Whether a block is being page-locked now.
    pub(super) fn is_locking(&self) -> bool {
        self.blocks.iter().flatten().any(|block| block.memory.is_none())
    }

    /// Adds a block of `slots` free slots: `bytes` of memory that begins at `start`.
    pub(super) fn add_block(&mut self, memory: M, start: usize, bytes: u64, slots: u32) {
        let mut free = vec![u64::MAX; slots.div_ceil(64) as usize];
        let tail = slots % 64;
        if tail > 0
            && let Some(last) = free.last_mut()
        {
            *last = (1 << tail) - 1;
        }
        let block = Block { memory: Some(memory), start, bytes, slots, free, free_slots: slots };
        match self.blocks.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(block),
            None => self.blocks.push(Some(block)),
        }
    }

    /// Takes a run back that copies may still read: it is free once the last of them is done.
    pub(super) fn give_back(&mut self, run: Run, copies: &mut Vec<F>) {
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
    pub(super) fn sweep(&mut self) -> Result<(), DeviceError> {
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

    /// Slots of runs that were given back and that copies still read.
    pub(super) fn pending_slots(&self) -> u64 {
        self.pending.iter().map(|pending| u64::from(pending.run.slots)).sum()
    }

    /// Takes the oldest run of `slots` that one copy still reads, with what says that it is done. It stays
    /// counted as used. The rest of a longer run goes on waiting.
    pub(super) fn take_pending(&mut self, slots: u32) -> Option<(Run, F)>
    where
        F: Clone,
    {
        // A run that several copies read has entries without slots before its own.
        let alone = |place: usize| {
            let run = self.pending[place].run;
            let same = |other: &Pending<F>| (other.run.block, other.run.slot) == (run.block, run.slot);
            run.slots >= slots && !place.checked_sub(1).is_some_and(|before| same(&self.pending[before]))
        };
        let place = (0..self.pending.len()).find(|place| alone(*place))?;
        let pending = &mut self.pending[place];
        let taken = Run { slots, ..pending.run };
        if pending.run.slots > slots {
            pending.run.slot += slots;
            pending.run.slots -= slots;
            return Some((taken, pending.fence.clone()));
        }
        Some((taken, self.pending.remove(place).fence))
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
    pub(super) fn find(&mut self, slots: u32) -> Option<Run> {
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

#[cfg(all(test, loom))]
#[path = "arena_models.rs"]
mod models;

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, PartialEq, Debug)]
    struct Copy(u32);

    impl CopyDone for Copy {
        fn is_done(&self) -> Result<bool, DeviceError> {
            Ok(false)
        }
    }

    #[test]
    fn the_oldest_run_that_one_copy_reads_is_taken_behind_it() {
        let mut state: State<(), Copy> = State::new(1 << 20);
        state.add_block((), 0, 16, 16);
        let runs: Vec<Run> = (0..4).map(|_| state.find(4).unwrap()).collect();
        // The first is read by two copies, so it is left alone.
        for (run, copies) in runs.iter().zip([vec![1, 2], vec![3], vec![4]]) {
            state.give_back(*run, &mut copies.into_iter().map(Copy).collect());
        }
        assert_eq!((state.pending_slots(), state.used_slots), (12, 16));
        assert_eq!(state.take_pending(5), None);
        let (run, copy) = state.take_pending(3).unwrap();
        assert_eq!((run, copy), (Run { slots: 3, ..runs[1] }, Copy(3)));
        assert_eq!(state.take_pending(4).unwrap(), (runs[2], Copy(4)));
        let rest = Run { slot: runs[1].slot + 3, slots: 1, ..runs[1] };
        assert_eq!(state.take_pending(1).unwrap(), (rest, Copy(3)));
        assert_eq!(state.take_pending(1), None);
        assert_eq!((state.pending_slots(), state.used_slots), (4, 16));
    }

    #[test]
    fn a_run_is_found_where_enough_slots_are_free_in_a_row() {
        assert_eq!(first_run(&[0b0110_1110], 8, 3), Some(1));
        assert_eq!(first_run(&[0b0110_1110], 8, 4), None);
        assert_eq!(first_run(&[u64::MAX << 62, 0b11], 66, 4), Some(62));
        assert_eq!(first_run(&[0, u64::MAX], 128, 64), Some(64));
        assert_eq!(first_run(&[u64::MAX], 3, 4), None);
    }
}
