//! Locks and atomics: the real ones, or loom's when the crate is built with `--cfg loom`.
//!
//! The pager's lock-free words import their atomics from here, so that the model checker sees them.
//! Owns nothing; imports nothing of this crate.
//!
//! The lock order of the crate, outermost first: manager, pager control, staging, device. The hit path
//! takes none of them.

#![deny(unsafe_code)]

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

/// A value that shares its cache lines with nothing else.
///
/// 128 bytes, since x86-64 prefetches lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);
