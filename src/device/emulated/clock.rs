//! The modelled clock: host threads' times, engines, and the costs of calls.
//!
//! Arithmetic on [`ModelTime`] only; nothing here looks at the machine's clock, so the same script of
//! calls gives the same times everywhere. Owns each thread's time (thread-local) and the latest of them
//! (an atomic); [`Engines`] is a plain value behind its owner's lock. May import `units`.

#![deny(unsafe_code)]

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::units::{MIB, ModelTime};

/// What each call costs the thread that makes it. Calls without a field here cost nothing.
///
/// The defaults are those of an A100: the virtual memory calls as kvcached's bench reports them, the
/// rest as the order of magnitude that driver calls take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallCosts {
    /// Creating 2 MiB of frame; scaled by the frame's size.
    pub create_frame_2mib: Duration,
    /// Mapping a frame.
    pub map: Duration,
    /// Setting access, once a call however long the run.
    pub set_access: Duration,
    /// Removing a mapping.
    pub unmap: Duration,
    /// Recording an event.
    pub record: Duration,
    /// Making a stream wait for an event.
    pub stream_wait: Duration,
    /// Enqueueing a copy or a fill.
    pub copy: Duration,
    /// Launching a kernel.
    pub launch: Duration,
    /// Asking whether an event is done.
    pub query: Duration,
    /// Page-locking one gigabyte (10^9 bytes); scaled by the block's size.
    pub page_lock_gb: Duration,
    /// Copying one gigabyte (10^9 bytes) of host memory that is not page-locked to where the card can read it.
    pub pageable_gb: Duration,
}

impl Default for CallCosts {
    fn default() -> Self {
        Self {
            create_frame_2mib: Duration::from_micros(193),
            map: Duration::from_nanos(1_500),
            set_access: Duration::from_micros(36),
            unmap: Duration::from_micros(36),
            record: Duration::from_micros(1),
            stream_wait: Duration::from_micros(1),
            copy: Duration::from_micros(2),
            launch: Duration::from_micros(3),
            query: Duration::from_nanos(500),
            // 1.5 GB/s, the middle of the 1 to 2 GB/s that registering is reported to reach.
            page_lock_gb: Duration::from_nanos(666_666_667),
            // 10 GB/s: what one core of the machine of `benches/RESULTS.md` copies.
            pageable_gb: Duration::from_millis(100),
        }
    }
}

impl CallCosts {
    /// Calls that cost nothing, for tests that count only engines.
    pub const FREE: Self = Self {
        create_frame_2mib: Duration::ZERO,
        map: Duration::ZERO,
        set_access: Duration::ZERO,
        unmap: Duration::ZERO,
        record: Duration::ZERO,
        stream_wait: Duration::ZERO,
        copy: Duration::ZERO,
        launch: Duration::ZERO,
        query: Duration::ZERO,
        page_lock_gb: Duration::ZERO,
        pageable_gb: Duration::ZERO,
    };

    /// The cost of creating a frame of `bytes`.
    pub(super) fn create_frame(&self, bytes: u64) -> Duration {
        scale(self.create_frame_2mib, bytes, 2 * MIB)
    }

    /// The cost of page-locking `bytes`.
    pub(super) fn page_lock(&self, bytes: u64) -> Duration {
        scale(self.page_lock_gb, bytes, 1_000_000_000)
    }

    /// The cost of bringing `bytes` that are not page-locked to where the card can read them.
    pub(super) fn pageable(&self, bytes: u64) -> Duration {
        scale(self.pageable_gb, bytes, 1_000_000_000)
    }
}

/// `cost` for `unit` bytes, scaled to `bytes` and rounded down to a nanosecond.
fn scale(cost: Duration, bytes: u64, unit: u64) -> Duration {
    let nanos = cost.as_nanos() * u128::from(bytes) / u128::from(unit);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// What serves an operation, in the order of enqueueing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Engine {
    /// The multiprocessors.
    Compute,
    /// Copies to the device.
    ToDevice,
    /// Copies to the host.
    ToHost,
    /// None: the operation takes no time and holds nobody up (verifying kernels, records, waits).
    None,
}

/// When each engine is free again.
#[derive(Default, Debug)]
pub(super) struct Engines {
    compute: ModelTime,
    to_device: ModelTime,
    to_host: ModelTime,
    disk: ModelTime,
    last_end: ModelTime,
}

impl Engines {
    /// Places an operation of `duration` that may begin no earlier than `earliest` (its issuer's time and
    /// what it waits for) behind its stream and its engine; moves both on and answers its end.
    pub(super) fn schedule(
        &mut self,
        engine: Engine,
        stream_end: &mut ModelTime,
        earliest: ModelTime,
        duration: Duration,
    ) -> ModelTime {
        let mut start = earliest.max(*stream_end);
        let engine_end = match engine {
            Engine::Compute => Some(&mut self.compute),
            Engine::ToDevice => Some(&mut self.to_device),
            Engine::ToHost => Some(&mut self.to_host),
            Engine::None => None,
        };
        if let Some(engine_end) = &engine_end {
            start = start.max(**engine_end);
        }
        let end = start.after(duration);
        if let Some(engine_end) = engine_end {
            *engine_end = end;
        }
        *stream_end = end;
        self.last_end = self.last_end.max(end);
        end
    }

    /// Places a file read of `duration` that was asked for at `now` behind the reads before it.
    pub(super) fn schedule_read(&mut self, now: ModelTime, duration: Duration) -> ModelTime {
        self.disk = self.disk.max(now).after(duration);
        self.disk
    }

    /// The end of all work so far.
    pub(super) fn last_end(&self) -> ModelTime {
        self.last_end
    }
}

/// A thread's time on one device.
struct ThreadTime {
    device: u64,
    alive: Weak<()>,
    time: ModelTime,
}

thread_local! {
    static TIMES: RefCell<Vec<ThreadTime>> = const { RefCell::new(Vec::new()) };
}

static NEXT_CLOCK: AtomicU64 = AtomicU64::new(0);

/// The host threads' times on one device.
#[derive(Debug)]
pub(super) struct HostClock {
    id: u64,
    alive: Arc<()>,
    /// The latest time of any thread: where a thread that is new to the device begins.
    latest: AtomicU64,
}

impl HostClock {
    pub(super) fn new() -> Self {
        Self {
            id: NEXT_CLOCK.fetch_add(1, Ordering::Relaxed),
            alive: Arc::new(()),
            latest: AtomicU64::new(0),
        }
    }

    /// The calling thread's time.
    pub(super) fn now(&self) -> ModelTime {
        self.update(|time| time)
    }

    /// Charges `duration` to the calling thread; answers its new time.
    pub(super) fn advance(&self, duration: Duration) -> ModelTime {
        self.update(|time| time.after(duration))
    }

    /// Moves the calling thread on to `time`, if that is later (a wait).
    pub(super) fn reach(&self, time: ModelTime) -> ModelTime {
        self.update(|now| now.max(time))
    }

    /// Sets the calling thread's time, also to an earlier one.
    pub(super) fn set(&self, time: ModelTime) {
        self.update(|_| time);
    }

    fn update(&self, change: impl FnOnce(ModelTime) -> ModelTime) -> ModelTime {
        let latest = || ModelTime(self.latest.load(Ordering::Relaxed));
        let mut change = Some(change);
        let time = TIMES.try_with(|times| {
            let mut times = times.borrow_mut();
            let index = times.iter().position(|entry| entry.device == self.id).unwrap_or_else(|| {
                times.retain(|entry| entry.alive.strong_count() > 0);
                times.push(ThreadTime {
                    device: self.id,
                    alive: Arc::downgrade(&self.alive),
                    time: latest(),
                });
                times.len() - 1
            });
            let entry = &mut times[index];
            if let Some(change) = change.take() {
                entry.time = change(entry.time);
            }
            entry.time
        });
        // A thread that is being torn down has no time of its own any more.
        let time = time.unwrap_or_else(|_| change.take().map_or_else(latest, |change| change(latest())));
        self.latest.fetch_max(time.0, Ordering::Relaxed);
        time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn an_engine_serves_in_the_order_of_enqueueing() {
        let mut engines = Engines::default();
        let (mut a, mut b) = (ModelTime::ZERO, ModelTime::ZERO);
        assert_eq!(engines.schedule(Engine::ToDevice, &mut a, ModelTime(0), US * 10), ModelTime(10_000));
        // The other stream is free, the engine is not.
        assert_eq!(engines.schedule(Engine::ToDevice, &mut b, ModelTime(2_000), US), ModelTime(11_000));
        // The other direction is free, but stream `b` is not.
        assert_eq!(engines.schedule(Engine::ToHost, &mut b, ModelTime(0), US), ModelTime(12_000));
        assert_eq!(engines.schedule(Engine::Compute, &mut a, ModelTime(50_000), US), ModelTime(51_000));
        assert_eq!(engines.last_end(), ModelTime(51_000));
    }

    #[test]
    fn an_operation_without_an_engine_holds_no_other_stream_up() {
        let mut engines = Engines::default();
        let (mut a, mut b) = (ModelTime(90), ModelTime::ZERO);
        engines.schedule(Engine::None, &mut a, ModelTime(0), Duration::ZERO);
        assert_eq!(engines.schedule(Engine::Compute, &mut b, ModelTime(1), Duration::ZERO), ModelTime(1));
    }

    #[test]
    fn reads_queue_at_the_disk() {
        let mut engines = Engines::default();
        assert_eq!(engines.schedule_read(ModelTime(5), US), ModelTime(1_005));
        assert_eq!(engines.schedule_read(ModelTime(6), US), ModelTime(2_005));
        assert_eq!(engines.schedule_read(ModelTime(9_000), Duration::ZERO), ModelTime(9_000));
    }

    #[test]
    fn costs_scale_with_bytes() {
        let costs = CallCosts::default();
        assert_eq!(costs.create_frame(2 * MIB), US * 193);
        assert_eq!(costs.create_frame(6 * MIB), US * 579);
        assert_eq!(costs.page_lock(3_000_000_000), Duration::from_nanos(2_000_000_001));
    }

    #[test]
    fn a_new_thread_starts_at_the_latest_time() {
        let clock = HostClock::new();
        clock.advance(US * 7);
        let other = std::thread::scope(|scope| scope.spawn(|| clock.advance(US)).join().unwrap());
        assert_eq!(other, ModelTime(8_000));
        assert_eq!(clock.now(), ModelTime(7_000));
        assert_eq!(clock.reach(ModelTime(3)), ModelTime(7_000));
        let second = HostClock::new();
        assert_eq!(second.now(), ModelTime::ZERO);
    }
}
