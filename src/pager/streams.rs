//! Streams that a runner faults on: registered, so that the pager may record fences on them.
//!
//! A registered stream has one of 64 slots; a span keeps the slots that used it as bits. When a stream
//! is unregistered a last fence is recorded, and the slot is given out again only when that is passed.

#![deny(unsafe_code)]

use std::fmt;
use std::sync::Arc;

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
        let slot = core.control.lock().streams.add(&stream)?;
        let Some(slot) = slot else {
            return Err(PagerError::TooManyStreams { device: core.device.info().name.clone() });
        };
        Ok(Self { core: Arc::clone(core), stream, slot })
    }

    /// The stream itself, to launch kernels on.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    pub(super) fn slot(&self) -> u8 {
        self.slot
    }

    pub(super) fn bit(&self) -> u64 {
        1 << self.slot
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

    fn add(&mut self, stream: &Arc<Stream>) -> Result<Option<u8>, DeviceError> {
        for (number, slot) in (0..).zip(&mut self.slots) {
            let free = match slot {
                Slot::Free => true,
                Slot::Used(_) => false,
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

    fn remove(&mut self, slot: u8, engine: &CopyEngine, stream: &Stream) -> Result<(), DeviceError> {
        let Some(place) = self.slots.get_mut(usize::from(slot)) else { return Ok(()) };
        *place = match engine.record(stream) {
            Ok(fence) => Slot::Retired(fence),
            Err(error) => {
                *place = Slot::Free;
                stream.synchronize()?;
                return Err(error);
            }
        };
        Ok(())
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
                Slot::Used(stream) => fences.push((number, engine.record(stream)?)),
                Slot::Retired(fence) => fences.push((number, fence.clone())),
            }
        }
        Ok(fences)
    }
}
