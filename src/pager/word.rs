//! The span's word: state, pins and kind in one 64-bit atomic, and the streams that used it.
//!
//! A span is what is pinned as one thing: a unit, or a run of rows of a unit that is too large. A hit is
//! one addition to its word and a look at the result; a release is one subtraction. Neither takes a lock,
//! calls the driver, or depends on the span's size.
//!
//! ```text
//!  63                    36   35    34  33 32   31              0
//! +------------------------+------+------+-------+---------------+
//! | version                |stale |stream| state |     pins      |
//! +------------------------+------+------+-------+---------------+
//! ```
//!
//! Rules that the callers keep:
//! - Only the holder of the pager's control lock changes state and flags; anybody adds and drops pins.
//! - A span leaves `Ready` for `Leaving` only by a compare-exchange at zero pins, so a pin that saw
//!   `Ready` holds it there. A pin that saw anything else is dropped again or turned into a claim under
//!   the lock.
//! - A release sets its stream's bit before it drops the pin, so whoever took the span sees every stream
//!   that used it.

#![deny(unsafe_code)]

use crate::sync::{AtomicU64, Ordering, Padded};

const PIN: u64 = 1;
const PINS: u64 = 0xFFFF_FFFF;
const STATE_SHIFT: u32 = 32;
const STATE: u64 = 0b11 << STATE_SHIFT;
const STREAMED: u64 = 1 << 34;
const STALE: u64 = 1 << 35;
const VERSION_SHIFT: u32 = 36;
const VERSION: u64 = !0 << VERSION_SHIFT;

/// The largest version that a word can hold.
pub(crate) const MAX_VERSION: u32 = (1 << (64 - VERSION_SHIFT)) - 1;

/// Where a span stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SpanState {
    /// Some of its bytes may be missing.
    Absent,
    /// Its copies are asked for; a fault makes its stream wait for them.
    Arriving,
    /// All bytes are there, and their copies were seen done.
    Ready,
    /// Its pages are being taken.
    Leaving,
}

impl SpanState {
    fn of(word: u64) -> Self {
        match (word & STATE) >> STATE_SHIFT {
            0 => Self::Absent,
            1 => Self::Arriving,
            2 => Self::Ready,
            _ => Self::Leaving,
        }
    }

    fn bits(self) -> u64 {
        let number: u64 = match self {
            Self::Absent => 0,
            Self::Arriving => 1,
            Self::Ready => 2,
            Self::Leaving => 3,
        };
        number << STATE_SHIFT
    }
}

/// What a word said at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WordView(u64);

impl WordView {
    pub(crate) fn state(self) -> SpanState {
        SpanState::of(self.0)
    }

    pub(crate) fn pins(self) -> u64 {
        self.0 & PINS
    }

    pub(crate) fn is_streamed(self) -> bool {
        self.0 & STREAMED != 0
    }

    /// Whether a fault for `version` is a hit.
    fn is_hit(self, version: u32) -> bool {
        self.0 & (STATE | STREAMED | STALE | VERSION)
            == SpanState::Ready.bits() | u64::from(version) << VERSION_SHIFT
    }
}

/// A span's word and the streams that used it since it was last taken.
#[derive(Debug)]
pub(crate) struct SpanWord {
    word: AtomicU64,
    used: AtomicU64,
}

impl SpanWord {
    pub(crate) fn new() -> Self {
        Self { word: AtomicU64::new(0), used: AtomicU64::new(0) }
    }

    pub(crate) fn view(&self) -> WordView {
        WordView(self.word.load(Ordering::Acquire))
    }

    /// The hit: pins the span if it is ready, whole on the card and of this version. Otherwise nothing is
    /// pinned.
    #[inline]
    pub(crate) fn pin_if_resident(&self, version: u32) -> bool {
        // Look first: a span that will not be hit should not be seen pinned, even for a moment.
        if !WordView(self.word.load(Ordering::Relaxed)).is_hit(version) {
            return false;
        }
        if WordView(self.word.fetch_add(PIN, Ordering::Acquire)).is_hit(version) {
            return true;
        }
        self.word.fetch_sub(PIN, Ordering::Release);
        false
    }

    /// Pins whatever the state; the caller holds the control lock.
    pub(crate) fn pin(&self) {
        self.word.fetch_add(PIN, Ordering::Acquire);
    }

    /// The release of a pin: notes the stream first.
    #[inline]
    pub(crate) fn release(&self, stream_bit: u64) {
        if self.used.load(Ordering::Relaxed) & stream_bit == 0 {
            self.used.fetch_or(stream_bit, Ordering::Relaxed);
        }
        self.word.fetch_sub(PIN, Ordering::Release);
    }

    /// Drops a pin under which no work was given to any stream.
    pub(crate) fn unpin(&self) {
        self.word.fetch_sub(PIN, Ordering::Release);
    }

    /// Takes the span: moves it to `Leaving` if nobody has it pinned. `true` also for a span that has
    /// nothing to lose (absent).
    pub(crate) fn try_leave(&self) -> bool {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            match SpanState::of(word) {
                // A transient pin of a fault that is about to go the slow way does not hold anything, and a
                // real claim on an absent span is made under the control lock, as arriving.
                SpanState::Absent | SpanState::Leaving => return true,
                SpanState::Ready | SpanState::Arriving if word & PINS != 0 => return false,
                SpanState::Ready | SpanState::Arriving => {}
            }
            let leaving = (word & !STATE) | SpanState::Leaving.bits();
            match self.word.compare_exchange_weak(word, leaving, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }

    /// Sets the state; the caller holds the control lock.
    pub(crate) fn set_state(&self, state: SpanState) {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let next = (word & !STATE) | state.bits();
            match self.word.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Says whether a part of the span passes through the ring; the caller holds the control lock, and the
    /// span is not ready or has no pins.
    pub(crate) fn set_streamed(&self, streamed: bool) {
        if streamed {
            self.word.fetch_or(STREAMED, Ordering::AcqRel);
        } else {
            self.word.fetch_and(!STREAMED, Ordering::AcqRel);
        }
    }

    /// Sets the version that the span's bytes are made from; the caller holds the control lock, and the
    /// span is not ready.
    pub(crate) fn set_version(&self, version: u32) {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let next = (word & !VERSION) | u64::from(version.min(MAX_VERSION)) << VERSION_SHIFT;
            match self.word.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Says whether the span's bytes are of an older version; the caller holds the control lock.
    pub(crate) fn set_stale(&self, stale: bool) {
        if stale {
            self.word.fetch_or(STALE, Ordering::AcqRel);
        } else {
            self.word.fetch_and(!STALE, Ordering::AcqRel);
        }
    }

    /// The streams that used the span, as bits.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// The first step of a fault that is no hit: pins the span, as arriving unless it is ready. Answers
    /// whether it was ready. The caller holds the control lock.
    pub(crate) fn claim(&self) -> bool {
        self.pin();
        let was_ready = self.view().state() == SpanState::Ready;
        if !was_ready {
            self.set_state(SpanState::Arriving);
        }
        was_ready
    }

    /// The last step of such a fault: the bytes are of `version`; the span is ready if all its copies were
    /// seen done. The caller holds the control lock and a pin.
    pub(crate) fn arrived(&self, version: u32, all_done: bool) {
        if self.view().state() != SpanState::Ready {
            self.set_version(version);
        }
        if all_done {
            self.set_state(SpanState::Ready);
        }
    }

    /// A fault that failed takes its pin back: the span is absent then, unless somebody else waits for it
    /// too. The caller holds the control lock.
    pub(crate) fn abandon(&self) {
        self.unpin();
        if self.view().state() != SpanState::Ready && self.view().pins() == 0 {
            self.set_state(SpanState::Absent);
        }
    }
}

impl AsRef<SpanWord> for Padded<SpanWord> {
    fn as_ref(&self) -> &SpanWord {
        &self.0
    }
}

/// Takes the spans that share a page out of use: `None`, and none of them leaves, if one is pinned.
/// Otherwise they are leaving; answers the streams that used them. The caller holds the control lock.
pub(crate) fn leave_all<'w, W>(words: impl IntoIterator<Item = &'w W> + Clone) -> Option<u64>
where
    W: AsRef<SpanWord> + 'w,
{
    let mut used = 0;
    for (place, word) in words.clone().into_iter().map(AsRef::as_ref).enumerate() {
        if !word.try_leave() {
            put_back(words.into_iter().take(place));
            return None;
        }
        used |= word.used();
    }
    Some(used)
}

/// Undoes [`leave_all`]: absent spans stayed so; the others had no pins and are put back as not yet seen
/// done.
pub(crate) fn put_back<'w, W>(words: impl IntoIterator<Item = &'w W>)
where
    W: AsRef<SpanWord> + 'w,
{
    for word in words.into_iter().map(AsRef::as_ref) {
        if word.view().state() == SpanState::Leaving {
            word.set_state(SpanState::Arriving);
        }
    }
}

#[cfg(all(test, loom))]
#[path = "word_models.rs"]
mod models;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_a_ready_resident_span_is_hit() {
        let word = SpanWord::new();
        assert!(!word.pin_if_resident(0));
        word.set_state(SpanState::Arriving);
        assert!(!word.pin_if_resident(0));
        word.set_state(SpanState::Ready);
        assert!(!word.pin_if_resident(3));
        assert!(word.pin_if_resident(0));
        word.set_streamed(true);
        assert!(!word.pin_if_resident(0));
        word.set_streamed(false);
        word.set_stale(true);
        assert!(!word.pin_if_resident(0));
        assert_eq!(word.view().pins(), 1);
    }

    #[test]
    fn a_pinned_span_is_not_taken_and_its_streams_are_known_after() {
        let word = SpanWord::new();
        word.set_state(SpanState::Ready);
        assert!(word.pin_if_resident(0));
        assert!(!word.try_leave());
        word.release(1 << 5);
        assert!(word.try_leave());
        assert!(!word.pin_if_resident(0));
        assert_eq!(word.view().state(), SpanState::Leaving);
        assert_eq!(word.used(), 1 << 5);
    }
}
