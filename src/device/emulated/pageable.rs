//! Copies to the card from host memory that is not page-locked.
//!
//! A card cannot read such memory: the CUDA driver copies it, on the caller's thread, into page-locked
//! buffers of its own and from there to the card, and the call returns when the last byte is in a buffer
//! ("API synchronization behavior" in the CUDA driver's reference). So does this one, in pieces of
//! [`PIECE_BYTES`] through [`PIECES`] buffers: bytes are touched twice, on two threads, and a caller whose
//! copies the link cannot keep up with waits for a buffer.
//!
//! Owns the buffers behind one lock, which is held only to take a buffer and to put it back: whoever waits for
//! a buffer's last copy holds none. May import what `work` does.

#![expect(unsafe_code, reason = "the caller's memory is read here, while its call lasts")]

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;

use super::card::EmulatedDevice;
use super::clock::Engine;
use super::stream::{Point, Work};
use super::usage::HostSpan;
use super::work::Cost;
use crate::device::{DeviceError, StreamId};
use crate::units::{DeviceRange, MIB, ModelTime, NoHostMemory, try_filled};

const CALL: &str = "copy_to_device";

/// The most bytes that a buffer holds.
const PIECE_BYTES: u64 = MIB;

/// Buffers that are made before one is waited for.
const PIECES: usize = 16;

/// One buffer, and the newest copy out of it.
#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    read_by: Option<Point>,
}

/// The buffers that nobody fills; the one in front was given to a copy first.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    idle: Mutex<VecDeque<Buffer>>,
}

impl Buffers {
    /// A buffer to fill, whose last copy is done: with it the modelled time of that.
    fn take(&self) -> Result<(Buffer, ModelTime), NoHostMemory> {
        let oldest = {
            let mut idle = self.idle.lock();
            if idle.len() < PIECES { None } else { idle.pop_front() }
        };
        let Some(mut buffer) = oldest else {
            let bytes = usize::try_from(PIECE_BYTES).unwrap_or(usize::MAX);
            let bytes = try_filled("a buffer for copies from memory that is not page-locked", bytes, 0)?;
            return Ok((Buffer { bytes, read_by: None }, ModelTime::ZERO));
        };
        let free = buffer.read_by.take().map_or(ModelTime::ZERO, |point| {
            point.wait();
            point.time
        });
        Ok((buffer, free))
    }

    fn put_back(&self, buffer: Buffer) {
        self.idle.lock().push_back(buffer);
    }
}

impl EmulatedDevice {
    /// Whether a copy from `span` has to go through a buffer.
    pub(super) fn is_pageable(&self, span: HostSpan) -> Result<bool, DeviceError> {
        if !self.options.keeps_bytes || span.bytes == 0 || span.address == 0 {
            return Ok(false);
        }
        Ok(self.shared.memory.lock().block_of(CALL, span)?.is_none())
    }

    /// Copies `span` to the card piece by piece. A failure leaves nothing under way.
    ///
    /// # Safety
    /// As for `copy_to_device`; `to` and `span` are of one length.
    pub(super) unsafe fn copy_pageable(
        &self,
        to: DeviceRange,
        span: HostSpan,
        available: ModelTime,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        // What would refuse any piece refuses the first.
        self.control.lock().stream(CALL, stream)?;
        self.shared.memory.lock().check_range(CALL, to)?;
        self.clock.advance(self.options.costs.copy);
        self.clock.reach(available);
        let mut newest: Option<Point> = None;
        let mut done = 0;
        while done < to.bytes {
            let bytes = (to.bytes - done).min(PIECE_BYTES);
            let piece = DeviceRange::new(to.start.offset(done), bytes);
            // SAFETY: the caller's promise for the whole span holds for its parts.
            match unsafe { self.copy_piece(piece, span.part(done, bytes), stream) } {
                Ok(point) => newest = Some(point),
                Err(error) => {
                    if let Some(point) = newest {
                        point.wait();
                        self.tell(&point);
                    }
                    return Err(error);
                }
            }
            done += bytes;
        }
        Ok(())
    }

    /// # Safety
    /// `from` is valid and unchanged while the call lasts.
    unsafe fn copy_piece(
        &self,
        to: DeviceRange,
        from: HostSpan,
        stream: StreamId,
    ) -> Result<Point, DeviceError> {
        let refused =
            |error: NoHostMemory| DeviceError::Host { call: CALL, bytes: to.bytes, why: error.to_string() };
        let (mut buffer, free) = self.buffers.take().map_err(refused)?;
        self.clock.reach(free);
        self.clock.advance(self.options.costs.pageable(to.bytes));
        let length = buffer.bytes.len().min(usize::try_from(to.bytes).unwrap_or(usize::MAX));
        // SAFETY: the caller promises the source; the buffer is nobody else's, and long enough.
        unsafe { std::ptr::copy_nonoverlapping(from.pointer(), buffer.bytes.as_mut_ptr(), length) };
        let work = Work::ToDevice { to, from, through: Some(HostSpan::new(buffer.bytes.as_ptr(), to.bytes)) };
        let duration = self.options.link.duration(to.bytes);
        let enqueued = self
            .enqueue(stream, work, &Cost::of(Duration::ZERO, Engine::ToDevice, duration))
            .and_then(|()| Ok(self.control.lock().stream(CALL, stream)?.point()));
        buffer.read_by = enqueued.as_ref().ok().cloned();
        self.buffers.put_back(buffer);
        enqueued
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::emulated::{CallCosts, EmulatedOptions};
    use crate::device::{AddressRange, Copies as _, FrameSet, SharedDevice, Stream, StreamPriority};
    use crate::units::Rate;
    use std::sync::Arc;

    const PAGE: u64 = 2 * MIB;

    fn card() -> (Arc<EmulatedDevice>, SharedDevice) {
        let mut options = EmulatedOptions::new(64 * MIB);
        options.link = Rate(10_000_000_000);
        options.costs = CallCosts { pageable_gb: Duration::from_millis(200), ..CallCosts::FREE };
        let device = EmulatedDevice::open(options).unwrap();
        (Arc::clone(&device), device)
    }

    #[test]
    fn the_caller_may_change_the_bytes_as_soon_as_the_call_is_over() {
        let (card, device) = card();
        let mut frames = FrameSet::new(&device, PAGE);
        let mut range = AddressRange::reserve(&device, 8, PAGE).unwrap();
        for page in 0..8 {
            let frame = frames.create().unwrap();
            range.map(page, &frames, frame).unwrap();
        }
        range.set_access(0, 8).unwrap();
        let stream = Stream::new(&device, StreamPriority::Normal).unwrap();
        // Fewer pieces than buffers, so that none is waited for while the stream is held back.
        let bytes = 7 * PAGE + 12_345;
        let mut source: Vec<u8> = (0..bytes).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let to = DeviceRange::new(range.range().start.offset(3), bytes);
        let hold = card.hold(stream.id(), Duration::ZERO).unwrap();
        let began = device.now();
        // SAFETY: the source lives to the end, and the pages are mapped until the stream is waited for.
        unsafe { card.copy_to_device(to, source.as_ptr(), ModelTime::ZERO, stream.id()).unwrap() };
        let issued = Duration::from_nanos(device.now().0 - began.0);
        assert_eq!(issued.as_micros(), u128::from(bytes) * 200 / 1_000_000, "the caller copies at 5 GB/s");
        source.fill(0xEE);
        drop(hold);
        stream.synchronize().unwrap();
        let took = Duration::from_nanos(device.now().0 - began.0);
        // The link works beside the caller, and has the last two pieces left when the caller fills the last.
        let whole = Duration::from_nanos((bytes - 12_345) / 5);
        let link = Rate(10_000_000_000).duration(PIECE_BYTES + 12_345);
        assert_eq!(took.as_micros(), (whole + link).as_micros());
        let mut back = vec![0; usize::try_from(bytes).unwrap()];
        // SAFETY: nobody reads `back` before the wait.
        unsafe { card.copy_to_host(back.as_mut_ptr(), to, stream.id()).unwrap() };
        stream.synchronize().unwrap();
        assert!((0..bytes).zip(&back).all(|(at, byte)| u64::from(*byte) == at % 251));
        assert_eq!(device.counts().copy_to_device, 1);
        assert_eq!(device.counts().bytes_to_device, bytes);
    }

    #[test]
    fn a_copy_that_is_refused_begins_nothing() {
        let (card, device) = card();
        let mut frames = FrameSet::new(&device, PAGE);
        let mut range = AddressRange::reserve(&device, 4, PAGE).unwrap();
        let frame = frames.create().unwrap();
        range.map(0, &frames, frame).unwrap();
        range.set_access(0, 1).unwrap();
        let stream = Stream::new(&device, StreamPriority::Normal).unwrap();
        let source = vec![7_u8; usize::try_from(2 * PAGE).unwrap()];
        // The second page is not mapped, so nothing goes to the first.
        // SAFETY: the source lives to the end; the call is refused.
        let refused = unsafe {
            card.copy_to_device(
                DeviceRange::new(range.range().start, 2 * PAGE),
                source.as_ptr(),
                ModelTime::ZERO,
                stream.id(),
            )
        };
        assert!(refused.unwrap_err().is_misuse());
        assert_eq!(card.buffers.idle.lock().len(), 0);
        // SAFETY: nothing uses the page.
        unsafe { range.unmap(0).unwrap() };
    }
}
