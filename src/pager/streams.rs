//! Streams that a runner faults on: registered, so that the pager may record fences on them.
//!
//! A registered stream has one of 64 slots; a span keeps the slots that used it as bits. When a stream
//! is unregistered a last fence is recorded, and the slot is given out again only when that is passed.
//!
//! Nothing is ever recorded on a stream that is being captured into a graph: what it has used cannot be
//! taken meanwhile, and a slot that is given up then is looked at again when the capture is over.

#![expect(unsafe_code, reason = "registers streams that somebody else created")]

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use super::card::Pager;
use super::core::Core;
use super::error::PagerError;
use crate::device::{DeviceError, Fence, Stream};
use crate::transfer::CopyEngine;

/// The most streams that may be registered at once.
pub const MAX_STREAMS: usize = 64;

/// A stream that units can be faulted on. Unregistered on drop.
pub struct PagerStream {
    pub(super) core: Arc<Core>,
    stream: Arc<Stream>,
    slot: u8,
}

impl PagerStream {
    pub(super) fn register(core: &Arc<Core>, stream: Arc<Stream>) -> Result<Self, PagerError> {
        if stream.device().identity() != core.device.identity() {
            return Err(PagerError::OtherDevice {
                stream: stream.device().info().name.clone(),
                model: core.device.info().name.clone(),
            });
        }
        let mut control = core.control.lock();
        let control = &mut *control;
        let slot = control.streams.add(&stream, &control.engine)?;
        let Some(slot) = slot else {
            return Err(PagerError::TooManyStreams { device: core.device.info().name.clone() });
        };
        Ok(Self { core: Arc::clone(core), stream, slot })
    }

    /// The stream itself, to launch kernels on.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    #[inline]
    pub(super) fn slot(&self) -> u8 {
        self.slot
    }

    #[inline]
    pub(super) fn bit(&self) -> u64 {
        1 << self.slot
    }
}

impl Pager {
    /// Registers a stream that somebody else created, by its driver's handle (a `CUstream`), so that units
    /// may be faulted on it. Null stands for the legacy default stream. Dropping the answer records a last
    /// fence and leaves the stream itself alone.
    ///
    /// # Errors
    /// The per-thread default stream, which recorded from another thread means that thread's, and a stream
    /// of another context are refused with [`crate::device::DeviceError::InvalidArgument`]; a device without
    /// foreign streams answers [`crate::device::DeviceError::Unsupported`].
    ///
    /// # Safety
    /// `stream` is null, one of the driver's default streams, or a live stream of this process, and stays
    /// live until the answer and everything that was allocated on it are dropped; if it is dropped while the
    /// stream is being captured, until the capture is over.
    pub unsafe fn register_raw(&self, stream: *mut c_void) -> Result<PagerStream, PagerError> {
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::adopt(self.device(), stream)? };
        self.register(Arc::new(stream))
    }
}

impl std::ops::Deref for PagerStream {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl fmt::Debug for PagerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagerStream").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl Drop for PagerStream {
    fn drop(&mut self) {
        let mut control = self.core.control.lock();
        let control = &mut *control;
        if let Err(error) = control.streams.remove(self.slot, &control.engine, &self.stream) {
            self.core.device.defer(error);
        }
    }
}

#[derive(Debug)]
enum Slot {
    Free,
    Used(Arc<Stream>),
    /// Given up while the stream was being captured: no fence could be recorded yet.
    Captured(Arc<Stream>),
    Retired(Fence),
}

/// The slots.
#[derive(Debug)]
pub(super) struct StreamTable {
    slots: Vec<Slot>,
}

impl StreamTable {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new() }
    }

    fn add(&mut self, stream: &Arc<Stream>, engine: &CopyEngine) -> Result<Option<u8>, DeviceError> {
        for (number, slot) in (0..).zip(&mut self.slots) {
            if let Slot::Captured(captured) = slot
                && !captured.is_capturing()?
            {
                *slot = Slot::Retired(engine.record(captured)?);
            }
            let free = match slot {
                Slot::Free => true,
                Slot::Used(_) | Slot::Captured(_) => false,
                Slot::Retired(fence) => fence.is_done()?,
            };
            if free {
                *slot = Slot::Used(Arc::clone(stream));
                return Ok(Some(number));
            }
        }
        if self.slots.len() >= MAX_STREAMS {
            return Ok(None);
        }
        self.slots.push(Slot::Used(Arc::clone(stream)));
        Ok(u8::try_from(self.slots.len() - 1).ok())
    }

    fn remove(&mut self, slot: u8, engine: &CopyEngine, stream: &Arc<Stream>) -> Result<(), DeviceError> {
        let Some(place) = self.slots.get_mut(usize::from(slot)) else { return Ok(()) };
        if stream.is_capturing().unwrap_or(false) {
            *place = Slot::Captured(Arc::clone(stream));
            return Ok(());
        }
        *place = match engine.record(stream) {
            Ok(fence) => Slot::Retired(fence),
            Err(error) => {
                *place = Slot::Free;
                stream.settle()?;
                return Err(error);
            }
        };
        Ok(())
    }

    /// Frees what was let go of on streams while they were being captured, where that is over.
    pub(super) fn free_late(&self) {
        for slot in &self.slots {
            if let Slot::Used(stream) | Slot::Captured(stream) = slot {
                stream.free_late();
            }
        }
    }

    /// Whether one of the streams of `bits` is being captured, so that nothing may be recorded on it.
    pub(super) fn is_capturing(&self, bits: u64) -> bool {
        (0_u8..).zip(&self.slots).any(|(number, slot)| match slot {
            // An error shows at the record that follows.
            Slot::Used(stream) | Slot::Captured(stream) => {
                bits >> number & 1 == 1 && stream.is_capturing().unwrap_or(false)
            }
            Slot::Free | Slot::Retired(_) => false,
        })
    }

    /// Waits for all that the streams of `bits` have been given, for who goes on whatever the answer: it takes
    /// no event, so that it also serves where none could be recorded.
    pub(super) fn settle(&self, bits: u64) -> Result<(), DeviceError> {
        let mut result = Ok(());
        for (number, slot) in (0_u8..).zip(&self.slots) {
            if bits >> number & 1 == 0 {
                continue;
            }
            result = result.and(match slot {
                Slot::Free => Ok(()),
                Slot::Used(stream) | Slot::Captured(stream) => stream.settle(),
                Slot::Retired(fence) => fence.settle(),
            });
        }
        result
    }

    /// As [`Self::slot_fences`]; where none could be recorded, the work is waited for here, and nothing is left
    /// to wait for.
    pub(super) fn slot_fences_or_wait(
        &self,
        bits: u64,
        engine: &CopyEngine,
    ) -> Result<Vec<(u8, Fence)>, DeviceError> {
        self.slot_fences(bits, engine).or_else(|_| self.settle(bits).map(|()| Vec::new()))
    }

    /// Fences at the points that the streams of `bits` have been given work up to.
    pub(super) fn fences(&self, bits: u64, engine: &CopyEngine) -> Result<Vec<Fence>, DeviceError> {
        Ok(self.slot_fences(bits, engine)?.into_iter().map(|(_, fence)| fence).collect())
    }

    /// As [`Self::fences`], with the slot of each.
    pub(super) fn slot_fences(
        &self,
        bits: u64,
        engine: &CopyEngine,
    ) -> Result<Vec<(u8, Fence)>, DeviceError> {
        let mut fences = Vec::new();
        for (number, slot) in (0_u8..).zip(&self.slots) {
            if bits >> number & 1 == 0 {
                continue;
            }
            match slot {
                Slot::Free => {}
                Slot::Used(stream) | Slot::Captured(stream) => fences.push((number, engine.record(stream)?)),
                Slot::Retired(fence) => fences.push((number, fence.clone())),
            }
        }
        Ok(fences)
    }
}
