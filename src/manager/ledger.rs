//! The ledger: the list of loaded models, newest first, and who is changing which of them.
//!
//! # Locking
//! One short lock, a leaf: while it is held no patcher is called, no figure is read, and no strong
//! reference to a patcher is dropped, so nobody else's code can run under it. (In debug builds a thread
//! that calls out with it held panics; see [`assert_not_held`].)
//!
//! What outlives the lock are *claims*. Before a patcher is told to change, its entry is taken: by a thread
//! that frees ([`Standing::Claimed`]) or by the one load that may run at a time ([`Standing::Loading`]). An
//! entry that is taken stays visible to readers as it was, and nobody else changes it. So a reader never
//! sees a half-made ledger: an entry moves, is replaced or leaves in one step, under the lock.
//!
//! Who waits for whom: a load waits for claims; a freeing thread waits for none, it passes over what is
//! taken. Since only a load waits, and one load runs at a time, no two threads of the manager ever wait for
//! each other, also when a freeing thread sits in a patcher that waits for another process whose request
//! arrives here on a third thread.

#![deny(unsafe_code)]

use std::cell::Cell;
use std::collections::BTreeMap;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::loaded_model::{LoadedModel, Standing};

/// The list of loaded models.
#[derive(Default)]
pub(super) struct Ledger {
    state: Mutex<State>,
    /// Signalled when a claim ends.
    settled: Condvar,
}

#[derive(Default)]
struct State {
    /// By position; the front has the smallest. A map, so that an entry enters and leaves in log n.
    entries: BTreeMap<i64, LoadedModel>,
    /// The smallest position given so far.
    front: i64,
}

impl Ledger {
    /// The entries, newest first.
    pub(super) fn snapshot(&self) -> Vec<LoadedModel> {
        self.lock().entries.values().cloned().collect()
    }

    /// Puts `entry` at the front and takes `replaced` out, in one step.
    pub(super) fn list(&self, entry: &LoadedModel, replaced: &[LoadedModel]) {
        // What leaves the map is another handle of an entry that the caller holds, so nothing dies here.
        let mut state = self.lock();
        for old in replaced {
            state.entries.remove(&old.position());
            old.set_standing(Standing::Gone);
        }
        state.front -= 1;
        let front = state.front;
        entry.set_position(front);
        entry.set_standing(Standing::Listed);
        state.entries.insert(front, entry.clone());
        drop(state);
        self.settled.notify_all();
    }

    /// Puts `entry` at the front unless its weights are listed; answers the entry that is listed then.
    pub(super) fn list_unless_listed(&self, entry: LoadedModel) -> LoadedModel {
        let mut state = self.lock();
        let listed = state.entries.values().find(|known| known.weights() == entry.weights()).cloned();
        if let Some(listed) = listed {
            return listed;
        }
        state.front -= 1;
        let front = state.front;
        entry.set_position(front);
        entry.set_standing(Standing::Listed);
        state.entries.insert(front, entry.clone());
        entry
    }

    /// Takes `gone` out.
    pub(super) fn remove(&self, gone: &[LoadedModel]) {
        if gone.is_empty() {
            return;
        }
        let mut state = self.lock();
        for entry in gone {
            if !matches!(entry.standing(), Standing::Unlisted | Standing::Gone) {
                state.entries.remove(&entry.position());
            }
            entry.set_standing(Standing::Gone);
        }
        drop(state);
        self.settled.notify_all();
    }

    /// Takes a listed entry into the calling thread's hands, if nobody has it.
    pub(super) fn try_claim<'a>(&'a self, entry: &'a LoadedModel) -> Option<Claim<'a>> {
        entry.try_take(Standing::Claimed).then_some(Claim { ledger: self, entry })
    }

    /// Takes a listed entry into the hands of the load, waiting for a thread that frees to be done with it.
    /// `None` if it is no longer listed.
    pub(super) fn claim_when_free<'a>(&'a self, entry: &'a LoadedModel, to: Standing) -> Option<Claim<'a>> {
        if self.take_when_free(entry, to) { Some(Claim { ledger: self, entry }) } else { None }
    }

    /// As [`Self::claim_when_free`], without the guard.
    pub(super) fn take_when_free(&self, entry: &LoadedModel, to: Standing) -> bool {
        let mut state = self.lock();
        loop {
            if entry.try_take(to) {
                return true;
            }
            if matches!(entry.standing(), Standing::Gone | Standing::Unlisted) {
                return false;
            }
            self.settled.wait(&mut state.guard);
        }
    }

    /// Ends a claim: the entry stays listed.
    pub(super) fn settle(&self, entry: &LoadedModel) {
        let state = self.lock();
        if matches!(entry.standing(), Standing::Claimed | Standing::Loading) {
            entry.set_standing(Standing::Listed);
        }
        drop(state);
        self.settled.notify_all();
    }

    fn lock(&self) -> Held<'_> {
        HELD.with(|held| held.set(held.get() + 1));
        Held { guard: self.state.lock() }
    }
}

/// A claim that ends when it is dropped, also by a panic of the patcher.
pub(super) struct Claim<'a> {
    ledger: &'a Ledger,
    entry: &'a LoadedModel,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.ledger.settle(self.entry);
    }
}

thread_local! {
    /// How many ledger locks this thread holds.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// Checks the lock order: whoever calls a patcher or a source of figures holds no ledger lock.
pub(super) fn assert_not_held() {
    debug_assert_eq!(HELD.with(Cell::get), 0, "a patcher or a device is called with the ledger's lock held");
}

struct Held<'a> {
    guard: MutexGuard<'a, State>,
}

impl std::ops::Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.guard
    }
}

impl std::ops::DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.guard
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        HELD.with(|held| held.set(held.get() - 1));
    }
}
