//! Failures on demand: the Nth call of a kind, and completions that come late.
//!
//! Owns the armed faults (one lock, taken only while something is armed) and the seed of the delays.
//! May import `error`.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::DeviceError;

macro_rules! call_kinds {
    ($($kind:ident $name:literal $releases:literal,)*) => {
        /// A kind of device call, for [`Fault`].
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum CallKind {
            /// Every kind: the Nth call of whichever kind fails.
            Any,
            $(#[doc = concat!("`", $name, "`")] $kind,)*
        }

        impl CallKind {
            /// Every kind of its own, without [`CallKind::Any`].
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// The call's name.
            pub fn name(self) -> &'static str {
                match self {
                    Self::Any => "any call",
                    $(Self::$kind => $name,)*
                }
            }

            /// Whether the call gives something back that its owner names only once. Such a call does its
            /// work also when it fails, so that a failure leaks nothing.
            pub fn releases(self) -> bool {
                match self {
                    Self::Any => false,
                    $(Self::$kind => $releases,)*
                }
            }
        }
    };
}

call_kinds! {
    Memory "memory" false,
    Synchronize "synchronize" false,
    Reserve "reserve" false,
    Free "free" true,
    CreateFrame "create_frame" false,
    ReleaseFrame "release_frame" true,
    Map "map" false,
    SetAccess "set_access" false,
    Unmap "unmap" false,
    PageLock "page_lock" false,
    PageUnlock "page_unlock" true,
    CreateStream "create_stream" false,
    DestroyStream "destroy_stream" true,
    CreateEvent "create_event" false,
    DestroyEvent "destroy_event" true,
    Record "record" false,
    StreamWait "stream_wait" false,
    Query "query" false,
    Elapsed "elapsed" false,
    WaitEvent "wait_event" false,
    WaitStream "wait_stream" false,
    CopyToDevice "copy_to_device" false,
    CopyToHost "copy_to_host" false,
    CopyOnDevice "copy_on_device" false,
    Fill "fill" false,
    PoolAllocate "pool_allocate" false,
    PoolFree "pool_free" true,
    PoolFigures "pool_figures" false,
    PoolTrim "pool_trim" false,
    AddKernels "add_kernels" false,
    Kernel "kernel" false,
    Launch "launch" false,
    ChargeCompute "charge_compute" false,
}

/// What an injected failure answers.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FaultError {
    /// The driver refuses with a code that nobody knows.
    Refused,
    /// The device says that it has no memory, with its true figures.
    OutOfMemory,
    /// The device is lost, now and for good.
    Lost,
    /// This error.
    Exactly(DeviceError),
}

/// A failure to inject.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The kind of call that fails.
    pub call: CallKind,
    /// Which call of the kind fails, counted from the injection; 1 is the next.
    pub nth: u64,
    /// Whether all calls of the kind after it fail too.
    pub persistent: bool,
    /// What they answer.
    pub error: FaultError,
}

impl Fault {
    /// The `nth` call of the kind from now on is refused, once.
    pub fn once(call: CallKind, nth: u64) -> Self {
        Self { call, nth, persistent: false, error: FaultError::Refused }
    }

    /// The `nth` call of the kind from now on is refused, and all after it.
    pub fn from_then_on(call: CallKind, nth: u64) -> Self {
        Self { persistent: true, ..Self::once(call, nth) }
    }

    /// The same fault with another answer.
    #[must_use]
    pub fn with(self, error: FaultError) -> Self {
        Self { error, ..self }
    }
}

#[derive(Debug)]
struct Armed {
    fault: Fault,
    seen: u64,
}

/// The armed faults of a device.
#[derive(Debug, Default)]
pub(super) struct Faults {
    armed_count: AtomicUsize,
    armed: Mutex<Vec<Armed>>,
    fired: AtomicU64,
}

impl Faults {
    pub(super) fn inject(&self, fault: Fault) {
        let mut armed = self.armed.lock();
        armed.push(Armed { fault: Fault { nth: fault.nth.max(1), ..fault }, seen: 0 });
        self.armed_count.store(armed.len(), Ordering::Release);
    }

    pub(super) fn clear(&self) {
        let mut armed = self.armed.lock();
        armed.clear();
        self.armed_count.store(0, Ordering::Release);
    }

    /// Failures delivered so far.
    pub(super) fn fired(&self) -> u64 {
        self.fired.load(Ordering::Relaxed)
    }

    /// Counts a call of `kind`; answers what it must fail with, if anything.
    pub(super) fn strike(&self, kind: CallKind) -> Option<FaultError> {
        if self.armed_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut armed = self.armed.lock();
        let mut answer = None;
        armed.retain_mut(|entry| {
            if entry.fault.call != kind && entry.fault.call != CallKind::Any {
                return true;
            }
            entry.seen += 1;
            let due =
                entry.seen == entry.fault.nth || (entry.fault.persistent && entry.seen > entry.fault.nth);
            if due && answer.is_none() {
                answer = Some(entry.fault.error.clone());
            }
            !due || entry.fault.persistent
        });
        self.armed_count.store(armed.len(), Ordering::Release);
        if answer.is_some() {
            self.fired.fetch_add(1, Ordering::Relaxed);
        }
        answer
    }
}

/// When in an operation's run it is held back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Delay {
    /// Before the bytes move.
    pub(super) before: Duration,
    /// Between the bytes and the completion.
    pub(super) after: Duration,
}

/// The longest that one operation is held back on either side.
const LONGEST_DELAY_US: u64 = 400;

/// How long operation `sequence` of `stream` is held back under `seed`; zero seeds hold nothing back.
///
/// Pure, so that a seed that found a bug finds it again as far as the machine's scheduler allows.
pub(super) fn delay(seed: u64, stream: u64, sequence: u64) -> Delay {
    if seed == 0 {
        return Delay { before: Duration::ZERO, after: Duration::ZERO };
    }
    let mixed = mix(mix(mix(seed) ^ stream) ^ sequence);
    // A third of the operations move late, a third complete late, a third are prompt.
    let (before, after) = match mixed % 3 {
        0 => ((mixed >> 8) % LONGEST_DELAY_US, 0),
        1 => (0, (mixed >> 8) % LONGEST_DELAY_US),
        _ => (0, 0),
    };
    Delay { before: Duration::from_micros(before), after: Duration::from_micros(after) }
}

/// One round of splitmix64.
fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_the_nth_call_of_its_kind_once() {
        let faults = Faults::default();
        faults.inject(Fault::once(CallKind::Map, 2));
        let map = |_| faults.strike(CallKind::Map).is_some();
        assert!(faults.strike(CallKind::Unmap).is_none());
        assert_eq!((0..4).map(map).collect::<Vec<_>>(), [false, true, false, false]);
        assert_eq!(faults.fired(), 1);
    }

    #[test]
    fn a_persistent_fault_strikes_until_it_is_cleared() {
        let faults = Faults::default();
        faults.inject(Fault::from_then_on(CallKind::Any, 2).with(FaultError::OutOfMemory));
        assert!(faults.strike(CallKind::Map).is_none());
        assert_eq!(faults.strike(CallKind::Unmap), Some(FaultError::OutOfMemory));
        assert!(faults.strike(CallKind::Launch).is_some());
        faults.clear();
        assert!(faults.strike(CallKind::Launch).is_none());
    }

    #[test]
    fn delays_depend_on_the_seed_alone_and_differ() {
        let all = |seed| (0..64).map(|n| delay(seed, 3, n)).collect::<Vec<_>>();
        assert_eq!(all(7), all(7));
        assert_ne!(all(7), all(8));
        assert!(all(7).iter().any(|d| !d.before.is_zero()) && all(7).iter().any(|d| !d.after.is_zero()));
        assert!(all(0).iter().all(|d| d.before.is_zero() && d.after.is_zero()));
    }
}
