//! Locks and atomics: the real ones, or loom's when the crate is built with `--cfg loom`.
//!
//! The pager's lock-free words import their atomics from here, so that the model checker sees them.
//! Owns nothing; imports nothing of this crate.
//!
//! The lock order of the crate, outermost first: manager, pager control, staging, device. The hit path
//! takes none of them.

#![deny(unsafe_code)]

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, fence};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(all(test, loom))]
pub(crate) mod model;

/// A value that shares its cache lines with nothing else.
///
/// 128 bytes, since x86-64 prefetches lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

/// A count of owners of something that is used again when the last of them is gone.
#[derive(Debug)]
pub(crate) struct Owners(AtomicU32);

impl Owners {
    /// Nobody owns it.
    pub(crate) fn none() -> Self {
        Self(AtomicU32::new(0))
    }

    /// The first owner of a new life; only who took it out of the pool calls this.
    pub(crate) fn first(&self) {
        self.0.store(1, Ordering::Relaxed);
    }

    /// One more owner, made by one that there is.
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// One owner less; `true` for the last. What all owners did with the thing then comes before whatever
    /// the caller does with it.
    pub(crate) fn leave(&self) -> bool {
        // Release pairs with the acquire: every owner's uses come before the next life's.
        let last = self.0.fetch_sub(1, Ordering::Release) == 1;
        if last {
            fence(Ordering::Acquire);
        }
        last
    }
}
