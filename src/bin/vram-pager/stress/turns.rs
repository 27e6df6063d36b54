//! Turns: operations of several threads that start one after the other, in an order that the seed decides.
//!
//! A thread that has the turn does one operation and hands the turn on; who is next is drawn among those that
//! have operations left. Guards are held across turns, and the pager's own threads run as they like. Nobody waits
//! for another's guard while it has the turn, since that guard's thread could not let it go.
//!
//! What is done is folded into two numbers: what each operation is, which depends on the seed and the options
//! alone, and how each ends, which an injected failure that meets another call may change.

use parking_lot::{Condvar, Mutex};

use super::numbers::{Numbers, mix};

/// Whose turn it is, and what was done so far.
pub(super) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    numbers: Numbers,
    /// The threads that have operations left.
    present: Vec<u64>,
    /// Whose turn it is; nobody's before all are there and after all have left.
    now: Option<u64>,
    digests: Digests,
}

/// What was done, as numbers to compare.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Digests {
    /// Of each operation: whose it is, its kind, and what it is about.
    pub(super) sequence: u64,
    /// Of how each operation ended.
    pub(super) outcomes: u64,
}

impl Turns {
    /// The turns of the threads `1..=threads`.
    pub(super) fn new(seed: u64, threads: u32) -> Self {
        let mut state = State {
            numbers: Numbers::new(seed, 0x007A_11F0),
            present: (1..=u64::from(threads)).collect(),
            now: None,
            digests: Digests::default(),
        };
        state.draw();
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The place of `thread`, which waits here for its first turn.
    pub(super) fn sit(&self, thread: u64) -> Seat<'_> {
        let seat = Seat { turns: self, thread };
        seat.wait(&mut self.state.lock());
        seat
    }

    /// What was done so far.
    pub(super) fn digests(&self) -> Digests {
        self.state.lock().digests
    }
}

impl State {
    fn draw(&mut self) {
        self.now = (!self.present.is_empty()).then(|| self.present[self.numbers.place(self.present.len())]);
    }
}

/// A thread's place in the turns. It leaves them when it is dropped, also by a panic.
pub(super) struct Seat<'t> {
    turns: &'t Turns,
    thread: u64,
}

impl Seat<'_> {
    fn wait(&self, state: &mut parking_lot::MutexGuard<'_, State>) {
        while state.now != Some(self.thread) {
            self.turns.changed.wait(state);
        }
    }

    /// Hands the turn on, and waits for the next.
    pub(super) fn next(&self) {
        let mut state = self.turns.state.lock();
        state.draw();
        if state.now != Some(self.thread) {
            self.turns.changed.notify_all();
            self.wait(&mut state);
        }
    }

    /// Notes what the operation at hand is.
    pub(super) fn note(&self, what: &[u64]) {
        let digests = &mut self.turns.state.lock().digests;
        digests.sequence = fold(digests.sequence, self.thread, what);
    }

    /// Notes how it ended.
    pub(super) fn note_outcome(&self, how: &[u64]) {
        let digests = &mut self.turns.state.lock().digests;
        digests.outcomes = fold(digests.outcomes, self.thread, how);
    }
}

fn fold(digest: u64, thread: u64, values: &[u64]) -> u64 {
    let all = std::iter::once(&thread).chain(values);
    all.fold(digest, |digest, value| mix(digest.rotate_left(1) ^ mix(value.wrapping_add(1))))
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state.lock();
        state.present.retain(|thread| *thread != self.thread);
        state.draw();
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order in which threads of different speed had their turns.
    fn order(seed: u64) -> (Vec<u64>, Digests) {
        let turns = Turns::new(seed, 3);
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for thread in 1..=3 {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    let seat = turns.sit(thread);
                    for operation in 0..10 * thread {
                        if operation > 0 {
                            seat.next();
                        }
                        order.lock().push(thread);
                        seat.note(&[operation]);
                    }
                });
            }
        });
        (order.into_inner(), turns.digests())
    }

    #[test]
    fn the_seed_decides_whose_turn_it_is() {
        let (first, digests) = order(1);
        assert_eq!(first.len(), 60);
        assert_eq!((first.clone(), digests), order(1));
        let (other, of_other) = order(2);
        assert_ne!(first, other);
        assert_ne!(digests, of_other);
    }

    #[test]
    fn a_thread_that_panics_leaves_its_turn_to_the_others() {
        let turns = Turns::new(1, 2);
        let went_on = std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                let _seat = turns.sit(1);
                panic!("on purpose");
            });
            let second = scope.spawn(|| {
                let seat = turns.sit(2);
                seat.next();
                seat.next();
            });
            assert!(first.join().is_err());
            second.join().is_ok()
        });
        assert!(went_on);
    }
}
