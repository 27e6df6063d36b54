//! What the pager counts, laid out so that threads do not meet.
//!
//! Hits are counted by thread, each on cache lines of its own; everything else happens under the control
//! lock.

#![deny(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::Padded;

/// Counts of one model since it was opened. They only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ModelCounts {
    /// Faults that found everything on the card.
    pub hits: u64,
    /// Faults that brought pages in to stay.
    pub loaded: u64,
    /// Faults for which at least one page came through the ring.
    pub streamed: u64,
    /// Bytes copied from the host to the card.
    pub copied_bytes: u64,
    /// Bytes read from the files.
    pub file_bytes: u64,
    /// Pages whose bytes were given up while another page needed the memory.
    pub evicted_pages: u64,
}

/// A model that is all hits looks at its card's memory once in so many: otherwise it would never notice that
/// another process needs some.
const LOOK_EVERY: u64 = 64;

/// Threads that count alone at any one time; those beyond share one counter. Each costs a model 128 bytes.
const THREADS: usize = 32;

/// No place was asked for yet.
const UNASKED: u8 = u8::MAX;

/// All places were taken: this thread counts with others.
const SHARED: u8 = u8::MAX - 1;

thread_local! {
    /// The thread's place among the counters of every model. Plain and without a destructor, so that reading
    /// it is one load.
    static PLACE: Cell<u8> = const { Cell::new(UNASKED) };
    /// Gives the place back when the thread ends.
    static GIVER: GiveBack = const { GiveBack };
}

/// The places that threads have now, as bits.
static TAKEN: AtomicU64 = AtomicU64::new(0);

struct GiveBack;

impl Drop for GiveBack {
    fn drop(&mut self) {
        // What this thread still faults while it ends is counted with others.
        let place = PLACE.replace(SHARED);
        if usize::from(place) < THREADS {
            // Release pairs with the acquire of whoever takes the place: it goes on from this thread's counts.
            TAKEN.fetch_and(!(1 << place), Ordering::Release);
        }
    }
}

/// Finds the calling thread a place, once in its life.
fn ask_for_place() -> u8 {
    let found = TAKEN.fetch_update(Ordering::Acquire, Ordering::Relaxed, |taken| {
        let free = taken.trailing_ones();
        ((free as usize) < THREADS).then(|| taken | 1 << free)
    });
    let place = found.ok().and_then(|taken| u8::try_from(taken.trailing_ones()).ok()).unwrap_or(SHARED);
    PLACE.set(place);
    // Touched so that its drop runs at the thread's end; in a thread that is past that the place is lost.
    let _ = GIVER.try_with(|_| ());
    place
}

/// The hits of one model, by thread.
///
/// A thread adds to a counter that only it writes, with a plain load and store: an atomic addition would be a
/// third of a hit. The counter lies on cache lines of its own.
#[derive(Debug)]
pub(super) struct HitCounts {
    by_thread: Box<[Padded<AtomicU64>; THREADS]>,
    shared: Padded<AtomicU64>,
}

impl HitCounts {
    pub(super) fn new() -> Self {
        Self { by_thread: Box::new(std::array::from_fn(|_| Padded::default())), shared: Padded::default() }
    }

    /// Counts a hit; `true` once in [`LOOK_EVERY`], when it is time to look at the card.
    #[inline]
    pub(super) fn add(&self) -> bool {
        match self.by_thread.get(usize::from(PLACE.get())) {
            Some(count) => Self::add_alone(&count.0),
            None => self.add_first_or_shared(),
        }
    }

    /// Adds to a counter that no other thread writes.
    #[inline]
    fn add_alone(count: &AtomicU64) -> bool {
        let hits = count.load(Ordering::Relaxed) + 1;
        count.store(hits, Ordering::Relaxed);
        hits.is_multiple_of(LOOK_EVERY)
    }

    #[cold]
    fn add_first_or_shared(&self) -> bool {
        let place = if PLACE.get() == UNASKED { ask_for_place() } else { PLACE.get() };
        match self.by_thread.get(usize::from(place)) {
            Some(count) => Self::add_alone(&count.0),
            None => self.shared.0.fetch_add(1, Ordering::Relaxed) % LOOK_EVERY == LOOK_EVERY - 1,
        }
    }

    pub(super) fn sum(&self) -> u64 {
        let alone: u64 = self.by_thread.iter().map(|count| count.0.load(Ordering::Relaxed)).sum();
        alone + self.shared.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_of_any_number_of_threads_are_all_counted() {
        let counts = HitCounts::new();
        for _ in 0..3 {
            // More at once than there are places.
            std::thread::scope(|scope| {
                for _ in 0..100 {
                    scope.spawn(|| (0..1000).filter(|_| counts.add()).count());
                }
            });
        }
        assert_eq!(counts.sum(), 300_000);
    }

    #[test]
    fn one_hit_in_so_many_says_that_it_is_time_to_look() {
        let counts = HitCounts::new();
        assert_eq!((0..10 * LOOK_EVERY).filter(|_| counts.add()).count(), 10);
    }
}
