//! Models of the hand-over of staging memory: a run is handed out again only when the copies that read it
//! are done, and the books balance whoever takes and gives back at once.
//!
//! The lists and their methods are the arena's own; the lock around them and the slots' bytes are loom's.

use loom::sync::{Arc, Mutex};
use loom::thread;

use super::{CopyDone, Run, State};
use crate::device::DeviceError;
use crate::sync::model::{Bytes, Mark, check};

impl CopyDone for Mark {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Ok(self.is_passed())
    }
}

struct Arena {
    state: Mutex<State<(), Mark>>,
    slots: Vec<Bytes>,
}

impl Arena {
    fn new(slots: u32) -> Self {
        let mut state = State::new(0);
        state.add_block((), 0, 0, slots);
        Self { state: Mutex::new(state), slots: (0..slots).map(|_| Bytes::new(0)).collect() }
    }

    /// `Arena::take`, without growth.
    fn take(&self) -> Option<Run> {
        let mut state = self.state.lock().unwrap();
        state.sweep().unwrap();
        let run = state.find(1);
        self.balance(&state);
        run
    }

    fn give_back(&self, run: Run, mut copies: Vec<Mark>) {
        let mut state = self.state.lock().unwrap();
        state.give_back(run, &mut copies);
        self.balance(&state);
    }

    /// What is used and what is free make the whole.
    fn balance(&self, state: &State<(), Mark>) {
        let free: u32 = state.blocks.iter().flatten().map(|block| block.free_slots).sum();
        let bits: u32 =
            state.blocks.iter().flatten().flat_map(|block| &block.free).map(|word| word.count_ones()).sum();
        assert_eq!(free, bits);
        assert_eq!(state.used_slots + u64::from(free), self.slots.len() as u64, "the books do not balance");
    }
}

/// A reader fills a run, gives copies to the device, and lets go of the run at once; `kept` of the copies'
/// fences are left with it. `false` if none was free.
fn fill_and_copy(arena: &Arc<Arena>, value: u64, copies: usize, kept: usize) -> bool {
    let Some(run) = arena.take() else { return false };
    arena.slots[run.slot as usize].write(value);
    let marks: Vec<Mark> = (0..copies).map(|_| Mark::new()).collect();
    let device = {
        let (arena, marks) = (Arc::clone(arena), marks.clone());
        thread::spawn(move || {
            for mark in marks {
                assert_eq!(arena.slots[run.slot as usize].read(), value, "a copy of another's bytes");
                mark.pass();
            }
        })
    };
    arena.give_back(run, marks.into_iter().take(kept).collect());
    device.join().unwrap();
    true
}

fn two_readers(slots: u32, copies: usize, kept: usize) {
    check(move || {
        let arena = Arc::new(Arena::new(slots));
        let other = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || fill_and_copy(&arena, 2, copies, kept))
        };
        let one = fill_and_copy(&arena, 1, copies, kept);
        let other = other.join().unwrap();
        assert!(one || other, "nobody got a free run");
        assert!(slots == 1 || (one && other), "refused though one was free");
        // All copies are done: everything comes back.
        let mut state = arena.state.lock().unwrap();
        state.sweep().unwrap();
        assert_eq!((state.used_slots, state.pending.len()), (0, 0), "a run that never comes back");
    });
}

#[test]
fn loom_a_run_is_handed_out_again_only_after_its_copy() {
    two_readers(1, 1, 1);
}

#[test]
fn loom_a_run_that_two_copies_read_waits_for_both() {
    two_readers(1, 2, 2);
}

#[test]
fn loom_two_takers_never_get_the_same_run() {
    two_readers(2, 1, 1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_run_that_comes_back_before_its_copy() {
    two_readers(1, 1, 0);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_run_that_waits_for_the_first_copy_alone() {
    two_readers(1, 2, 1);
}
