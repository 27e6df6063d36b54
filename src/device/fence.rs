//! Events, and the fences that stand for points of a stream.
//!
//! Handles as those of [`super::handle`]: they own their event, and a drop never panics. The pool's two lists of idle
//! events are the only locks, held to take or put one.

#![expect(unsafe_code, reason = "the handles are the one place that proves the device's contracts")]

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::handle::{Stream, settle};
use super::{DeviceError, EventId, SharedDevice, StreamId};
use crate::sync::Owners;

/// An event of a device; destroyed on drop.
pub struct Event {
    device: SharedDevice,
    id: EventId,
}

impl Event {
    /// Creates an event that nothing was recorded in.
    pub fn new(device: &SharedDevice) -> Result<Self, DeviceError> {
        let id = device.create_event()?;
        Ok(Self { device: Arc::clone(device), id })
    }

    /// The same, of an event that keeps the time at which its record is passed, where the device has such events.
    pub fn timed(device: &SharedDevice) -> Result<Self, DeviceError> {
        let id = device.create_timed_event()?;
        Ok(Self { device: Arc::clone(device), id })
    }

    fn record(&self, stream: StreamId) -> Result<(), DeviceError> {
        // SAFETY: `id` is live as long as this handle; callers pass the id of a live stream.
        unsafe { self.device.record(self.id, stream) }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Event").field(&self.id.0).finish()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: this handle is the only owner of `id` and goes away.
        if let Err(error) = unsafe { self.device.destroy_event(self.id) } {
            self.device.defer(error);
        }
    }
}

/// A point on a stream that can be waited for.
///
/// Counted: the event returns to its pool with the last clone, so it never answers for newer work.
pub struct Fence {
    slot: Arc<FenceSlot>,
}

struct FenceSlot {
    event: Event,
    /// Clones of the fence that this event stands for now; zero while it lies in the pool.
    owners: Owners,
    /// Whether the event keeps time, and so in which list it lies while it is idle.
    timed: bool,
    pool: std::sync::Weak<FencePoolInner>,
}

/// Idle events that keep time, at most: a model's first pass may use two for each of its units at once, and no pass
/// after it any.
const IDLE_TIMED: usize = 64;

struct FencePoolInner {
    /// Ordinary events.
    idle: Mutex<Vec<Arc<FenceSlot>>>,
    /// Events that keep time, which costs a card a little at each record.
    idle_timed: Mutex<Vec<Arc<FenceSlot>>>,
}

impl FencePoolInner {
    fn idle(&self, timed: bool) -> &Mutex<Vec<Arc<FenceSlot>>> {
        if timed { &self.idle_timed } else { &self.idle }
    }
}

/// Events kept for fences, so that a fence in steady state allocates nothing and creates no event.
pub struct FencePool {
    device: SharedDevice,
    inner: Arc<FencePoolInner>,
}

impl FencePool {
    /// An empty pool of `device`.
    pub fn new(device: &SharedDevice) -> Self {
        Self {
            device: Arc::clone(device),
            inner: Arc::new(FencePoolInner {
                idle: Mutex::new(Vec::with_capacity(64)),
                idle_timed: Mutex::new(Vec::new()),
            }),
        }
    }

    /// Records a fence at the point that `stream` has been given work up to.
    pub fn record(&self, stream: &Stream) -> Result<Fence, DeviceError> {
        self.record_in(stream, false)
    }

    /// The same, with an event that keeps the time at which the point is passed, where the device has such events:
    /// see [`Fence::elapsed_since`].
    pub fn record_timed(&self, stream: &Stream) -> Result<Fence, DeviceError> {
        self.record_in(stream, true)
    }

    fn record_in(&self, stream: &Stream, timed: bool) -> Result<Fence, DeviceError> {
        let idle = self.inner.idle(timed).lock().pop();
        let slot = match idle {
            Some(slot) => slot,
            None => Arc::new(FenceSlot {
                event: if timed { Event::timed(&self.device)? } else { Event::new(&self.device)? },
                owners: Owners::none(),
                timed,
                pool: Arc::downgrade(&self.inner),
            }),
        };
        slot.owners.first();
        let fence = Fence { slot };
        fence.slot.event.record(stream.id())?;
        Ok(fence)
    }
}

impl fmt::Debug for FencePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencePool").field("idle", &self.inner.idle.lock().len()).finish_non_exhaustive()
    }
}

impl Fence {
    /// Whether the point has been passed.
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        let event = &self.slot.event;
        // SAFETY: the slot keeps the event alive.
        unsafe { event.device.query(event.id) }
    }

    /// How long after the point of `from` this one was passed, by the device's own clock, which is modelled on an
    /// emulated device; zero if it was passed before it. `None` if one of them was not passed yet or keeps no time:
    /// both must be of [`FencePool::record_timed`], on a device whose events can ([`super::Clock::tells_elapsed`]).
    ///
    /// # Errors
    /// [`DeviceError::InvalidArgument`] if the fences are of two devices; else what the device refuses with.
    pub fn elapsed_since(&self, from: &Self) -> Result<Option<Duration>, DeviceError> {
        let (from, to) = (&from.slot.event, &self.slot.event);
        if from.device.identity() != to.device.identity() {
            let why = "the two fences are of different devices".to_owned();
            return Err(DeviceError::InvalidArgument { call: "elapsed", why });
        }
        // SAFETY: the slots keep both events alive, and both are this device's.
        unsafe { to.device.elapsed(from.id, to.id) }
    }

    /// Blocks the calling thread until the point has been passed.
    pub fn wait(&self) -> Result<(), DeviceError> {
        let event = &self.slot.event;
        // SAFETY: the slot keeps the event alive.
        unsafe { event.device.wait_event(event.id) }
    }

    /// As [`Self::wait`], for who goes on whatever the answer: see [`Stream::settle`].
    pub(crate) fn settle(&self) -> Result<(), DeviceError> {
        settle(|| self.wait())
    }

    /// Makes later work of `stream` wait for the point.
    pub fn wait_on(&self, stream: &Stream) -> Result<(), DeviceError> {
        let event = &self.slot.event;
        // SAFETY: the slot keeps the event alive, the handle the stream.
        unsafe { event.device.stream_wait(stream.id(), event.id) }
    }
}

impl Fence {
    /// Whether both stand for the same recorded point.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.slot, &other.slot)
    }
}

impl Clone for Fence {
    fn clone(&self) -> Self {
        self.slot.owners.add();
        Self { slot: Arc::clone(&self.slot) }
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fence").field(&self.slot.event.id.0).finish()
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // All owners' uses of the event come before its next record.
        if self.slot.owners.leave()
            && let Some(pool) = self.slot.pool.upgrade()
        {
            let mut idle = pool.idle(self.slot.timed).lock();
            // Beyond that many it goes with this handle, its last one.
            if !self.slot.timed || idle.len() < IDLE_TIMED {
                idle.push(Arc::clone(&self.slot));
            }
        }
    }
}
