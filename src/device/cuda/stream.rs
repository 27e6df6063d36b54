//! Streams, events and asynchronous copies of a card, and streams of others that are registered with us.
//!
//! Our own streams are non-blocking. A foreign stream is adopted only if it belongs to the primary context;
//! the null stream becomes the legacy stream's handle, which means the same from every thread; the
//! per-thread default stream is refused, since recorded from another thread it means that thread's.
//!
//! Streams and events have numbers of our own, which are never used again: the driver hands out addresses,
//! and uses those again, so that one that is gone would pass for a newer one. One reader-writer lock a
//! table, held only to look up.
//!
//! An event keeps time only if it was created for it.

#![expect(unsafe_code, reason = "calls into the driver library")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::sys;
use parking_lot::RwLock;

use super::card::{CudaDevice, count};
use super::code::{INVALID_HANDLE, NOT_READY};
use super::driver::{Driver, MISSING, Refusal};
use crate::device::{Copies, DeviceError, EventId, StreamId, StreamPriority, Streams};
use crate::units::{DeviceRange, ModelTime};

/// Does not synchronise with the legacy stream.
const NON_BLOCKING: u32 = 1;
/// Events keep no time, which makes them cheaper.
pub(super) const EVENT_FLAGS: u32 = 2;
/// Events keep the time at which they are passed.
const TIMED_EVENT_FLAGS: u32 = 0;
/// The driver's handle of the legacy default stream.
const LEGACY_STREAM: usize = 1;
/// The driver's handle of the per-thread default stream.
const PER_THREAD_STREAM: usize = 2;

/// What is known of the card's streams.
pub(super) struct StreamState {
    /// Priorities of ordinary and of urgent streams; `None` if the driver has none.
    priorities: Option<(i32, i32)>,
    /// Whether the driver has events. Without them a record waits for the stream, and every event has
    /// passed from then on.
    has_events: bool,
    /// Whether events can keep time.
    has_timed_events: bool,
    streams: Numbers<StreamHandle>,
    events: Numbers<EventHandle>,
}

/// An event's driver handle, and whether it keeps time.
#[derive(Clone, Copy)]
struct EventHandle {
    handle: usize,
    timed: bool,
}

/// A stream's driver handle, and whose it is.
#[derive(Clone, Copy)]
struct StreamHandle {
    handle: usize,
    adopted: bool,
}

/// Things by numbers that are never used again.
struct Numbers<T> {
    next: AtomicU64,
    things: RwLock<HashMap<u64, T>>,
}

impl<T: Copy> Numbers<T> {
    fn new() -> Self {
        Self { next: AtomicU64::new(1), things: RwLock::new(HashMap::new()) }
    }

    fn add(&self, thing: T) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.things.write().insert(number, thing);
        number
    }

    fn get(&self, number: u64) -> Option<T> {
        self.things.read().get(&number).copied()
    }

    fn take(&self, number: u64) -> Option<T> {
        self.things.write().remove(&number)
    }
}

impl StreamState {
    /// Asks for the range of priorities. The context is bound.
    pub(super) fn new(driver: &Driver) -> Self {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both pointers are valid for the call.
        let range = unsafe { driver.ctx_get_stream_priority_range(&raw mut least, &raw mut greatest) };
        Self {
            // A lower number is more urgent; 0 is the default and lies in the range.
            priorities: range.ok().map(|()| (0.clamp(greatest.min(least), least), greatest.min(least))),
            has_events: driver.has_events(),
            has_timed_events: driver.has_timed_events(),
            streams: Numbers::new(),
            events: Numbers::new(),
        }
    }

    /// Whether events can keep time.
    pub(super) fn has_timed_events(&self) -> bool {
        self.has_timed_events
    }

    /// Streams that were created here and not destroyed.
    pub(super) fn live_streams(&self) -> u64 {
        self.streams.things.read().values().filter(|stream| !stream.adopted).count() as u64
    }

    /// Events that were created here and not destroyed.
    pub(super) fn live_events(&self) -> u64 {
        self.events.things.read().len() as u64
    }
}

fn gone(call: &'static str, what: &str, number: u64) -> DeviceError {
    DeviceError::Misuse { call, why: format!("{what} {number} does not exist (any more)") }
}

/// What a foreign stream's handle stands for: pure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Foreign {
    /// The legacy default stream of whatever context is current.
    Legacy,
    /// The calling thread's own default stream.
    PerThread,
    /// A stream that someone created.
    Created,
}

fn sort_foreign(handle: usize) -> Foreign {
    match handle {
        0 | LEGACY_STREAM => Foreign::Legacy,
        PER_THREAD_STREAM => Foreign::PerThread,
        _ => Foreign::Created,
    }
}

impl CudaDevice {
    /// The driver's handle of a stream.
    pub(super) fn raw_stream(
        &self,
        call: &'static str,
        stream: StreamId,
    ) -> Result<sys::CUstream, DeviceError> {
        let known = self.streams.streams.get(stream.0).ok_or_else(|| gone(call, "stream", stream.0))?;
        Ok(without_provenance_mut(known.handle))
    }

    fn known_event(&self, call: &'static str, event: EventId) -> Result<EventHandle, DeviceError> {
        self.streams.events.get(event.0).ok_or_else(|| gone(call, "event", event.0))
    }

    fn raw_event(&self, call: &'static str, event: EventId) -> Result<sys::CUevent, DeviceError> {
        Ok(without_provenance_mut(self.known_event(call, event)?.handle))
    }

    fn create_event_of(&self, flags: u32) -> Result<EventId, DeviceError> {
        let _bound = self.enter()?;
        let mut event = null_mut();
        if !self.streams.has_events {
            return Ok(EventId(self.streams.events.add(EventHandle { handle: 0, timed: false })));
        }
        // SAFETY: the pointer is valid for the call.
        unsafe { self.driver.event_create(&raw mut event, flags) }
            .map_err(|refusal| self.refused(refusal))?;
        let known = EventHandle { handle: event.addr(), timed: flags == TIMED_EVENT_FLAGS };
        Ok(EventId(self.streams.events.add(known)))
    }

    /// Checks that a created stream belongs to our context, which is bound.
    fn check_context(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        let mut context = null_mut();
        // SAFETY: a live stream, says the caller of the adoption; the pointer is valid for the call.
        unsafe { self.driver.stream_get_ctx(stream, &raw mut context) }
            .map_err(|refusal| self.refused(refusal))?;
        if context == self.context.handle() {
            return Ok(());
        }
        Err(DeviceError::InvalidArgument {
            call: "adopt_stream",
            why: format!(
                "the stream {stream:p} belongs to another context than the primary one of {}; create it \
                 there, or register it with its own card",
                self.info.name
            ),
        })
    }
}

impl Streams for CudaDevice {
    fn create_stream(&self, priority: StreamPriority) -> Result<StreamId, DeviceError> {
        let _bound = self.enter()?;
        let mut stream = null_mut();
        let answer = match self.streams.priorities {
            Some((normal, high)) => {
                let priority = if priority == StreamPriority::High { high } else { normal };
                // SAFETY: the pointer is valid for the call.
                unsafe { self.driver.stream_create_with_priority(&raw mut stream, NON_BLOCKING, priority) }
            }
            None => Err(Refusal { call: "cuStreamCreateWithPriority", code: MISSING }),
        };
        let answer = match answer {
            Err(Refusal { code: MISSING, .. }) => {
                // SAFETY: as above.
                unsafe { self.driver.stream_create(&raw mut stream, NON_BLOCKING) }
            }
            answer => answer,
        };
        let known = match answer {
            Ok(()) => StreamHandle { handle: stream.addr(), adopted: false },
            // A driver with no streams but the default one.
            Err(Refusal { code: MISSING, .. }) => StreamHandle { handle: 0, adopted: true },
            Err(refusal) => return Err(self.refused(refusal)),
        };
        Ok(StreamId(self.streams.streams.add(known)))
    }

    unsafe fn destroy_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        let known = self.streams.streams.take(stream.0);
        let known = known.ok_or_else(|| gone("destroy_stream", "stream", stream.0))?;
        if known.adopted {
            return Ok(());
        }
        let Some(_bound) = self.enter_to_release()? else { return Ok(()) };
        // SAFETY: created by us, taken out of the table, and so not named again.
        match self.give_back(|| unsafe { self.driver.stream_destroy(without_provenance_mut(known.handle)) }) {
            // The driver keeps it; there is nothing that could be done about it.
            Err(DeviceError::Unsupported { .. }) => Ok(()),
            answer => answer,
        }
    }

    unsafe fn adopt_stream(&self, stream: *mut c_void) -> Result<StreamId, DeviceError> {
        let _bound = self.enter()?;
        let handle = match sort_foreign(stream.addr()) {
            Foreign::Legacy => LEGACY_STREAM,
            Foreign::PerThread => return Err(DeviceError::InvalidArgument {
                call: "adopt_stream",
                why: "the per-thread default stream means another stream on every thread; create a stream, \
                      or use the legacy default stream"
                    .to_owned(),
            }),
            Foreign::Created => {
                self.check_context(stream.cast())?;
                stream.addr()
            }
        };
        Ok(StreamId(self.streams.streams.add(StreamHandle { handle, adopted: true })))
    }

    unsafe fn is_capturing(&self, stream: StreamId) -> Result<bool, DeviceError> {
        let stream = self.raw_stream("is_capturing", stream)?;
        // Drops ask it, which tell nobody: a kept error is for the next call that does.
        let _bound = self.enter_unheard()?;
        let mut status = 0;
        // SAFETY: a live stream, says the caller; the pointer is valid for the call.
        match unsafe { self.driver.stream_is_capturing(stream, &raw mut status) } {
            Ok(()) => Ok(status != 0),
            // A driver without the call captures nothing.
            Err(Refusal { code: MISSING, .. }) => Ok(false),
            Err(refusal) => Err(self.refused(refusal)),
        }
    }

    fn create_event(&self) -> Result<EventId, DeviceError> {
        self.create_event_of(EVENT_FLAGS)
    }

    fn create_timed_event(&self) -> Result<EventId, DeviceError> {
        // Where nobody could ask for the time none is kept.
        self.create_event_of(if self.streams.has_timed_events { TIMED_EVENT_FLAGS } else { EVENT_FLAGS })
    }

    unsafe fn destroy_event(&self, event: EventId) -> Result<(), DeviceError> {
        let known = self.streams.events.take(event.0);
        let EventHandle { handle, .. } = known.ok_or_else(|| gone("destroy_event", "event", event.0))?;
        if !self.streams.has_events {
            return Ok(());
        }
        let Some(_bound) = self.enter_to_release()? else { return Ok(()) };
        // SAFETY: created by us, taken out of the table, and so not named again.
        self.give_back(|| unsafe { self.driver.event_destroy(without_provenance_mut(handle)) })
    }

    unsafe fn record(&self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        let event = self.raw_event("record", event)?;
        let stream = self.raw_stream("record", stream)?;
        let _bound = self.enter()?;
        count(&self.counters.record, 1);
        if !self.streams.has_events {
            // SAFETY: live, says the caller.
            return unsafe { self.driver.wait_for_stream(stream) }.map_err(|refusal| self.refused(refusal));
        }
        // SAFETY: both live, says the caller.
        unsafe { self.driver.event_record(event, stream) }.map_err(|refusal| self.refused(refusal))
    }

    unsafe fn stream_wait(&self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        let stream = self.raw_stream("stream_wait", stream)?;
        let event = self.raw_event("stream_wait", event)?;
        let _bound = self.enter()?;
        count(&self.counters.stream_wait, 1);
        if !self.streams.has_events {
            return Ok(());
        }
        // SAFETY: both live, says the caller.
        let answer = match unsafe { self.driver.stream_wait_event(stream, event, 0) } {
            // The host waits instead; what is enqueued later comes after.
            // SAFETY: live, says the caller.
            Err(Refusal { code: MISSING, .. }) => unsafe { self.driver.event_synchronize(event) },
            answer => answer,
        };
        answer.map_err(|refusal| self.refused(refusal))
    }

    unsafe fn query(&self, event: EventId) -> Result<bool, DeviceError> {
        let event = self.raw_event("query", event)?;
        let _bound = self.enter()?;
        if !self.streams.has_events {
            return Ok(true);
        }
        // SAFETY: live, says the caller.
        match unsafe { self.driver.event_query(event) } {
            Ok(()) => Ok(true),
            Err(Refusal { code: NOT_READY, .. }) => Ok(false),
            Err(refusal) => Err(self.refused(refusal)),
        }
    }

    unsafe fn elapsed(&self, from: EventId, to: EventId) -> Result<Option<Duration>, DeviceError> {
        let (from, to) = (self.known_event("elapsed", from)?, self.known_event("elapsed", to)?);
        if !from.timed || !to.timed {
            return Ok(None);
        }
        let _bound = self.enter_unheard()?;
        let mut milliseconds = 0.0;
        let (from, to) = (without_provenance_mut(from.handle), without_provenance_mut(to.handle));
        // SAFETY: both live, says the caller; the pointer is valid for the call.
        match unsafe { self.driver.event_elapsed_time(&raw mut milliseconds, from, to) } {
            Ok(()) => Ok(duration(milliseconds)),
            // An invalid handle is one that was never recorded: both exist and keep time, says our table.
            Err(Refusal { code: NOT_READY | INVALID_HANDLE, .. }) => Ok(None),
            Err(refusal) => Err(self.refused(refusal)),
        }
    }

    unsafe fn wait_event(&self, event: EventId) -> Result<(), DeviceError> {
        let event = self.raw_event("wait_event", event)?;
        let _bound = self.enter()?;
        count(&self.counters.host_wait, 1);
        if !self.streams.has_events {
            return Ok(());
        }
        // SAFETY: live, says the caller.
        unsafe { self.driver.event_synchronize(event) }.map_err(|refusal| self.refused(refusal))
    }

    unsafe fn wait_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        let stream = self.raw_stream("wait_stream", stream)?;
        let _bound = self.enter()?;
        count(&self.counters.host_wait, 1);
        // SAFETY: live, says the caller.
        unsafe { self.driver.wait_for_stream(stream) }.map_err(|refusal| self.refused(refusal))
    }
}

impl CudaDevice {
    /// Refuses host memory that lies on both sides of a page-locked block's border: the driver's copies
    /// may not.
    fn check_host(&self, call: &'static str, start: *const u8, bytes: u64) -> Result<usize, DeviceError> {
        match self.host.crossed(start, bytes) {
            Some(border) => Err(DeviceError::Misuse {
                call,
                why: format!(
                    "{bytes} bytes at {start:p} cross the border {border:#x} of a page-locked block"
                ),
            }),
            None => length(call, bytes),
        }
    }
}

/// A time as the driver tells it; `None` if that is none. Pure.
fn duration(milliseconds: f32) -> Option<Duration> {
    let seconds = f64::from(milliseconds) / 1e3;
    Duration::try_from_secs_f64(if seconds < 0.0 { 0.0 } else { seconds }).ok()
}

/// A length as the driver takes it.
fn length(call: &'static str, bytes: u64) -> Result<usize, DeviceError> {
    usize::try_from(bytes)
        .map_err(|_| DeviceError::InvalidArgument { call, why: format!("{bytes} bytes are too many") })
}

impl Copies for CudaDevice {
    unsafe fn copy_to_device(
        &self,
        to: DeviceRange,
        from: *const u8,
        _available: ModelTime,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        let bytes = self.check_host("copy_to_device", from, to.bytes)?;
        let stream = self.raw_stream("copy_to_device", stream)?;
        let _bound = self.enter()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: source and target are valid until the copy is done, says the caller.
        unsafe { self.driver.copy_in(to.start.0, from.cast::<c_void>(), bytes, stream) }
            .map_err(|refusal| self.refused(refusal))?;
        count(&self.counters.copy_to_device, 1);
        count(&self.counters.bytes_to_device, to.bytes);
        Ok(())
    }

    unsafe fn copy_to_host(
        &self,
        to: *mut u8,
        from: DeviceRange,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        let bytes = self.check_host("copy_to_host", to, from.bytes)?;
        let stream = self.raw_stream("copy_to_host", stream)?;
        let _bound = self.enter()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: source and target are valid until the copy is done, says the caller.
        unsafe { self.driver.copy_out(to.cast::<c_void>(), from.start.0, bytes, stream) }
            .map_err(|refusal| self.refused(refusal))?;
        count(&self.counters.copy_to_host, 1);
        count(&self.counters.bytes_to_host, from.bytes);
        Ok(())
    }

    unsafe fn copy_on_device(
        &self,
        to: DeviceRange,
        from: DeviceRange,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if to.bytes != from.bytes || to.overlaps(from) {
            return Err(DeviceError::InvalidArgument {
                call: "copy_on_device",
                why: format!("{from:?} and {to:?} differ in length or overlap"),
            });
        }
        let bytes = length("copy_on_device", to.bytes)?;
        let stream = self.raw_stream("copy_on_device", stream)?;
        let _bound = self.enter()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both are accessible until the copy is done, says the caller; they do not overlap.
        unsafe { self.driver.copy_within(to.start.0, from.start.0, bytes, stream) }
            .map_err(|refusal| self.refused(refusal))
    }

    unsafe fn fill(&self, to: DeviceRange, value: u8, stream: StreamId) -> Result<(), DeviceError> {
        let bytes = length("fill", to.bytes)?;
        let stream = self.raw_stream("fill", stream)?;
        let _bound = self.enter()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: accessible until the fill is done, says the caller.
        unsafe { self.driver.set_bytes(to.start.0, value, bytes, stream) }
            .map_err(|refusal| self.refused(refusal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_is_none_is_not_told() {
        assert_eq!(duration(1.5), Some(Duration::from_micros(1500)));
        assert_eq!(duration(0.0), Some(Duration::ZERO));
        assert_eq!(duration(-0.25), Some(Duration::ZERO), "passed the other way round");
        for none in [f32::NAN, f32::INFINITY, f32::MAX] {
            assert_eq!(duration(none), None, "{none}");
        }
    }

    #[test]
    fn default_streams_are_told_apart() {
        assert_eq!(sort_foreign(0), Foreign::Legacy);
        assert_eq!(sort_foreign(1), Foreign::Legacy);
        assert_eq!(sort_foreign(2), Foreign::PerThread);
        assert_eq!(sort_foreign(0x7f00_1234_5678), Foreign::Created);
    }
}
