//! What the activation pool needed lately: a peak over a window of time.
//!
//! Pure. A pool keeps what it once took; after a spike that would be lost to weights for good. What was not
//! used for a window goes back; what every step uses stays.

#![deny(unsafe_code)]

use std::time::Duration;

use crate::units::ModelTime;

/// How long memory that the pool does not use is left to it.
const WINDOW: Duration = Duration::from_millis(20);

/// The most bytes in use during this window and the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PoolUse {
    began: ModelTime,
    now: u64,
    before: u64,
}

impl PoolUse {
    /// Notes the bytes in use at a time; answers the most that were in use lately.
    pub(crate) fn note(&mut self, at: ModelTime, used: u64) -> u64 {
        if at.since(self.began) >= WINDOW {
            let quiet = at.since(self.began) >= 2 * WINDOW;
            self.before = if quiet { used } else { self.now };
            self.now = used;
            self.began = at;
        }
        self.now = self.now.max(used);
        self.now.max(self.before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> ModelTime {
        ModelTime(ms * 1_000_000)
    }

    #[test]
    fn a_spike_is_forgotten_after_two_windows_and_regular_use_is_not() {
        let mut pool = PoolUse::default();
        assert_eq!(pool.note(at(0), 10), 10);
        assert_eq!(pool.note(at(5), 100), 100);
        assert_eq!(pool.note(at(21), 10), 100);
        assert_eq!(pool.note(at(42), 10), 10);
        for step in 5..20 {
            pool.note(at(step * 10), 30);
            assert_eq!(pool.note(at(step * 10 + 5), 0), 30);
        }
        assert_eq!(pool.note(at(1000), 0), 0);
    }
}
