//! A global allocator that counts what the calling thread allocates: how often, how much at once, and the
//! largest single request. Tests that hold a parser to a bound make it theirs.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]
#![expect(unsafe_code, reason = "a global allocator is unsafe to write")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Hands every call to the system's allocator, and counts it for its thread.
pub struct Counting;

thread_local! {
    static NOW: Cell<Counts> = const { Cell::new(Counts { calls: 0, live: 0, peak: 0, largest: 0 }) };
}

/// What a thread allocated since the last [`measure`] began. Bytes are those asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Allocations and reallocations.
    pub calls: u64,
    /// Bytes alive now; negative where memory from before was freed.
    pub live: i64,
    /// The most bytes that were alive at once.
    pub peak: i64,
    /// The largest single request in bytes.
    pub largest: i64,
}

fn note(grown: usize, shrunk: usize, asked: usize) {
    // At the end of a thread its counters are gone, and nobody asks any more.
    let _ = NOW.try_with(|now| {
        let mut counts = now.get();
        counts.calls += u64::from(asked > 0);
        counts.live += signed(grown) - signed(shrunk);
        counts.peak = counts.peak.max(counts.live);
        counts.largest = counts.largest.max(signed(asked));
        now.set(counts);
    });
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size(), 0, layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size(), 0, layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        note(0, layout.size(), 0);
        // SAFETY: the block came from the system's allocator.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        note(bytes, layout.size(), bytes);
        // SAFETY: the block came from the system's allocator, and the rest is the caller's contract.
        unsafe { System.realloc(start, layout, bytes) }
    }
}

/// Runs `work` and gives what this thread allocated meanwhile.
pub fn measure<T>(work: impl FnOnce() -> T) -> (T, Counts) {
    NOW.with(|now| now.set(Counts::default()));
    let answer = work();
    (answer, NOW.with(Cell::get))
}
