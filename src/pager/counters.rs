//! What the pager counts, laid out so that threads do not meet.
//!
//! Hits are counted by stream slot, each on cache lines of its own; everything else happens under the
//! control lock.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::streams::MAX_STREAMS;
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

/// The hits of one model.
#[derive(Debug)]
pub(super) struct HitCounts {
    by_slot: Box<[Padded<AtomicU64>]>,
}

impl HitCounts {
    pub(super) fn new() -> Self {
        Self { by_slot: (0..MAX_STREAMS).map(|_| Padded::default()).collect() }
    }

    /// Counts a hit; `true` once in [`LOOK_EVERY`], when it is time to look at the card.
    #[inline]
    pub(super) fn add(&self, slot: u8) -> bool {
        // Only the threads that share a stream share a counter; an addition is still needed for those.
        self.by_slot
            .get(usize::from(slot))
            .is_some_and(|count| count.0.fetch_add(1, Ordering::Relaxed) % LOOK_EVERY == LOOK_EVERY - 1)
    }

    pub(super) fn sum(&self) -> u64 {
        self.by_slot.iter().map(|count| count.0.load(Ordering::Relaxed)).sum()
    }
}
