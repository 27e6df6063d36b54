//! Faults for the sanitizers to find: `planted use-after-free`, `planted race`, or `planted nothing`.
//!
//! `tests/sanitizers.sh` runs each before anything else: a sanitizer that does not report these reports
//! nothing, and its silence about the crate would be worth nothing.

use std::cell::UnsafeCell;
use std::sync::Arc;

/// A number that threads write without any order.
struct Shared(UnsafeCell<u64>);

// SAFETY: none. This is the fault.
unsafe impl Sync for Shared {}

fn use_after_free() -> u8 {
    let bytes = vec![7_u8; 64];
    let start = std::hint::black_box(bytes.as_ptr());
    drop(bytes);
    // SAFETY: none. This is the fault.
    unsafe { std::hint::black_box(start.add(5)).read_volatile() }
}

fn race() -> u64 {
    let shared = Arc::new(Shared(UnsafeCell::new(0)));
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                for _ in 0..10_000 {
                    // SAFETY: none. This is the fault.
                    unsafe { *std::hint::black_box(shared.0.get()) += 1 };
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("it does not panic");
    }
    // SAFETY: the threads have ended.
    unsafe { *shared.0.get() }
}

fn main() {
    let answer = match std::env::args().nth(1).as_deref() {
        Some("use-after-free") => u64::from(use_after_free()),
        Some("race") => race(),
        Some("nothing") => 0,
        other => panic!("planted use-after-free | race | nothing, not {other:?}"),
    };
    println!("planted: {answer}");
}
