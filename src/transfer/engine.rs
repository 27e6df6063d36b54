//! The copy engine: host to device, on the pager's own streams.
//!
//! A copy waits on its stream for whoever used the target before, and the buffer that it reads stays
//! owned until the copy is done. Locking: none of its own; callers hold the pager's control lock, which
//! is what gives copies their order.

#![expect(unsafe_code, reason = "enqueues copies whose source and target it keeps alive")]

use std::cell::{Cell, OnceCell};
use std::sync::Arc;

use super::meter::{LinkMeter, TimedBatch};
use crate::device::{
    DeviceError, Fence, FencePool, KernelId, Launch, SharedDevice, Stream, StreamId, StreamPriority,
};
use crate::staging::StagingBuffer;
use crate::units::{DeviceRange, ModelTime, Rate};

/// The streams that copies to one device run on, and the fences of that device.
#[derive(Debug)]
pub struct CopyEngine {
    device: SharedDevice,
    fences: FencePool,
    streams: Vec<Arc<Stream>>,
    next: usize,
    meter: LinkMeter,
}

impl CopyEngine {
    /// Opens `streams` (at least one) non-blocking streams for copies.
    pub fn new(device: &SharedDevice, streams: usize) -> Result<Self, DeviceError> {
        let streams = (0..streams.max(1))
            .map(|_| Stream::new(device, StreamPriority::High).map(Arc::new))
            .collect::<Result<Vec<_>, _>>()?;
        // What a device tells needs no measuring.
        let meter = LinkMeter::new(device.info().link.is_none() && device.tells_elapsed());
        Ok(Self { device: Arc::clone(device), fences: FencePool::new(device), streams, next: 0, meter })
    }

    /// Records a fence on any stream of the device.
    pub fn record(&self, stream: &Stream) -> Result<Fence, DeviceError> {
        self.fences.record(stream)
    }

    /// The same, of a point whose time is to be told: see [`FencePool::record_timed`].
    pub fn record_timed(&self, stream: &Stream) -> Result<Fence, DeviceError> {
        self.fences.record_timed(stream)
    }

    /// Begins a batch: the stream that its copies will run on, in order.
    pub fn begin(&mut self) -> Batch<'_> {
        self.next = (self.next + 1) % self.streams.len();
        self.meter.batch_begins();
        Batch { engine: self, bytes: Cell::new(0), began: OnceCell::new() }
    }

    /// The rate of the link: as the device tells it, or else the fastest that was measured so far.
    pub fn link(&self) -> Option<Rate> {
        self.device.info().link.or_else(|| self.meter.rate())
    }

    /// Reads what was measured since, if the device has got that far.
    pub fn read_meter(&mut self) {
        self.meter.read();
    }

    /// The stream that the copies of batch number `place` run on, counted round.
    pub fn stream(&self, place: usize) -> &Arc<Stream> {
        &self.streams[place % self.streams.len()]
    }

    /// Streams that copies run on.
    pub fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Whether one copy always comes after those enqueued before it: they all run on one stream.
    pub fn is_in_order(&self) -> bool {
        self.streams.len() == 1
    }

    /// Waits for all copies so far, for who goes on whatever the answer.
    pub fn drain(&self) -> Result<(), DeviceError> {
        let mut result = Ok(());
        for stream in &self.streams {
            result = result.and(stream.settle());
        }
        result
    }
}

/// Copies that run one after the other on one stream.
#[derive(Debug)]
pub struct Batch<'e> {
    engine: &'e mut CopyEngine,
    /// Bytes copied so far.
    bytes: Cell<u64>,
    /// Set by the first copy: the point before it, if the link is measured by this batch and it could be recorded.
    began: OnceCell<Option<Fence>>,
}

impl Batch<'_> {
    fn stream(&self) -> &Arc<Stream> {
        &self.engine.streams[self.engine.next]
    }

    /// Which of the engine's streams the batch runs on.
    pub fn place(&self) -> usize {
        self.engine.next
    }

    /// Enqueues a copy of so many bytes, by `copy`, which is given the stream.
    fn enqueue(
        &self,
        bytes: u64,
        copy: impl FnOnce(StreamId) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.began.get_or_init(|| {
            let wanted = self.engine.meter.wants(bytes);
            wanted.then(|| self.engine.fences.record_timed(self.stream()).ok()).flatten()
        });
        copy(self.stream().id())?;
        self.bytes.set(self.bytes.get() + bytes);
        Ok(())
    }

    /// Looks a kernel of the device up.
    pub fn kernel(&self, name: &str) -> Result<KernelId, DeviceError> {
        self.engine.device.kernel(name)
    }

    /// Launches a kernel after what the batch has enqueued so far.
    ///
    /// # Safety
    /// As [`Stream::launch`].
    pub(crate) unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.stream().launch(launch) }
    }

    /// Makes the rest of the batch wait for `fence`.
    pub fn wait(&self, fence: &Fence) -> Result<(), DeviceError> {
        fence.wait_on(self.stream())
    }

    /// Enqueues a copy of `to.bytes` bytes from `buffer`, beginning at `offset`; the bytes are there from
    /// the modelled time `available` on.
    ///
    /// The copy is not safe from the buffer's reuse until [`Self::finish`] gave its fence to the buffer:
    /// the caller calls it before it lets go of the buffer, also after an error.
    pub(crate) fn copy(
        &self,
        to: DeviceRange,
        buffer: &StagingBuffer,
        offset: u64,
        available: ModelTime,
    ) -> Result<(), DeviceError> {
        if offset.checked_add(to.bytes).is_none_or(|end| end > buffer.len()) {
            return Err(DeviceError::InvalidArgument {
                call: "copy_to_device",
                why: format!("{} bytes at {offset} exceed a buffer of {}", to.bytes, buffer.len()),
            });
        }
        // SAFETY: the source lies inside the buffer, which keeps its memory until the fence of `finish`; a
        // buffer is one run of one block, so no copy crosses a block's end. The target is mapped and pinned
        // or claimed by the pager, which waits for this copy's fence before it unmaps or rewrites it.
        self.enqueue(to.bytes, |stream| unsafe {
            self.engine.device.copy_to_device(to, buffer.at(offset), available, stream)
        })
    }

    /// Enqueues a copy of `to.bytes` bytes from memory that is no staging buffer.
    ///
    /// # Safety
    /// `from` is valid for reads of `to.bytes` bytes until the fence of [`Self::finish`], does not cross the
    /// end of a page-locked block, and nobody writes there meanwhile.
    pub(crate) unsafe fn copy_from(
        &self,
        to: DeviceRange,
        from: *const u8,
        available: ModelTime,
    ) -> Result<(), DeviceError> {
        // SAFETY: the source is the caller's promise, the target is as in `copy`.
        self.enqueue(to.bytes, |stream| unsafe {
            self.engine.device.copy_to_device(to, from, available, stream)
        })
    }

    /// Enqueues a copy on a device that keeps no bytes: accounts and clock only.
    pub(crate) fn copy_without_bytes(
        &self,
        to: DeviceRange,
        available: ModelTime,
    ) -> Result<(), DeviceError> {
        if self.engine.device.info().keeps_bytes {
            return Err(DeviceError::InvalidArgument {
                call: "copy_to_device",
                why: "this device keeps bytes, so a copy needs a source".to_owned(),
            });
        }
        // SAFETY: a device without bytes reads no source; the target is as in `copy`.
        self.enqueue(to.bytes, |stream| unsafe {
            self.engine.device.copy_to_device(to, std::ptr::null(), available, stream)
        })
    }

    /// Ends the batch: the fence that its copies are done at.
    pub fn finish(self) -> Result<Fence, DeviceError> {
        let stream = Arc::clone(self.stream());
        let Self { engine, bytes, began } = self;
        if let Some(began) = began.into_inner().flatten() {
            // What cannot be timed is a fence all the same.
            match engine.fences.record_timed(&stream) {
                Ok(ended) => {
                    let bytes = bytes.get();
                    engine.meter.note(TimedBatch { began, ended: ended.clone(), bytes });
                    return Ok(ended);
                }
                Err(_) => engine.meter.give_up(),
            }
        }
        match engine.fences.record(&stream) {
            Ok(fence) => Ok(fence),
            Err(error) => {
                // Without a fence nobody could tell when the buffer is free: wait here.
                stream.settle()?;
                Err(error)
            }
        }
    }
}
