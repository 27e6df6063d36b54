//! An emulated card whose calls are seams of the scheduler, and whose streams may be held back by it.
//!
//! It can also be told to break a promise of a card, which stands for a pager that forgot to ask for it:
//! that shows that schedules find such a thing.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use vram_pager::device::emulated::EmulatedDevice;
use vram_pager::device::{
    ActivationPool, CallCounts, Clock, Copies, Device, DeviceError, DeviceInfo, EventId, FrameId, HostMemory,
    KernelId, KernelModule, Kernels, Launch, LiveObjects, MemoryFigures, PoolFigures, StreamId,
    StreamPriority, Streams, VirtualMemory,
};
use vram_pager::units::{DeviceRange, ModelTime};

use super::scheduler::Scheduler;

/// A promise that is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// None.
    Nothing,
    /// A stream does not wait for another's fence.
    StreamWait,
    /// The host does not wait for a fence.
    HostWait,
    /// A fence says that it is passed as soon as it is recorded.
    Query,
}

/// The card.
pub struct Card {
    pub inner: Arc<EmulatedDevice>,
    pub scheduler: Arc<Scheduler>,
    pub broken: Broken,
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Card").field("broken", &self.broken).finish_non_exhaustive()
    }
}

impl Card {
    fn seam(&self, at: &'static str) {
        self.scheduler.seam(at);
    }

    /// Before work is enqueued: the stream may be held back here.
    fn work(&self, at: &'static str, stream: StreamId) -> Result<(), DeviceError> {
        self.seam(at);
        if self.scheduler.holds_back() {
            self.scheduler.hold(stream.0, self.inner.hold(stream, Duration::ZERO)?);
        }
        Ok(())
    }
}

impl Device for Card {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn memory(&self) -> Result<MemoryFigures, DeviceError> {
        self.seam("memory");
        self.inner.memory()
    }

    fn counts(&self) -> CallCounts {
        self.inner.counts()
    }

    fn live(&self) -> LiveObjects {
        self.inner.live()
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.inner.synchronize()
    }

    fn defer(&self, error: DeviceError) {
        self.inner.defer(error);
    }
}

// SAFETY of all that follows: the calls go on to the emulated card as they are, under the same promises.
impl VirtualMemory for Card {
    fn reserve(&self, bytes: u64) -> Result<DeviceRange, DeviceError> {
        self.inner.reserve(bytes)
    }

    unsafe fn free(&self, range: DeviceRange) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.free(range) }
    }

    fn create_frame(&self, bytes: u64) -> Result<FrameId, DeviceError> {
        self.seam("create_frame");
        self.inner.create_frame(bytes)
    }

    unsafe fn release_frame(&self, frame: FrameId) -> Result<(), DeviceError> {
        self.seam("release_frame");
        // SAFETY: the caller's promise.
        unsafe { self.inner.release_frame(frame) }
    }

    unsafe fn map(&self, at: DeviceRange, frame: FrameId) -> Result<(), DeviceError> {
        self.seam("map");
        // SAFETY: the caller's promise.
        unsafe { self.inner.map(at, frame) }
    }

    unsafe fn set_access(&self, run: DeviceRange) -> Result<(), DeviceError> {
        self.seam("set_access");
        // SAFETY: the caller's promise.
        unsafe { self.inner.set_access(run) }
    }

    unsafe fn unmap(&self, at: DeviceRange) -> Result<(), DeviceError> {
        self.seam("unmap");
        // SAFETY: the caller's promise.
        unsafe { self.inner.unmap(at) }
    }
}

impl HostMemory for Card {
    unsafe fn page_lock(&self, start: *mut u8, bytes: u64) -> Result<(), DeviceError> {
        self.seam("page_lock");
        // SAFETY: the caller's promise.
        unsafe { self.inner.page_lock(start, bytes) }
    }

    unsafe fn page_unlock(&self, start: *mut u8) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.page_unlock(start) }
    }

    fn begin_host_write(&self, start: *const u8, bytes: u64) -> Result<(), DeviceError> {
        self.inner.begin_host_write(start, bytes)
    }

    fn end_host_write(&self, start: *const u8, bytes: u64) {
        self.inner.end_host_write(start, bytes);
    }
}

impl Streams for Card {
    fn create_stream(&self, priority: StreamPriority) -> Result<StreamId, DeviceError> {
        self.inner.create_stream(priority)
    }

    unsafe fn destroy_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.destroy_stream(stream) }
    }

    unsafe fn adopt_stream(&self, stream: *mut c_void) -> Result<StreamId, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.adopt_stream(stream) }
    }

    unsafe fn is_capturing(&self, stream: StreamId) -> Result<bool, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.is_capturing(stream) }
    }

    fn create_event(&self) -> Result<EventId, DeviceError> {
        self.inner.create_event()
    }

    unsafe fn destroy_event(&self, event: EventId) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.destroy_event(event) }
    }

    unsafe fn record(&self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        self.seam("record");
        // SAFETY: the caller's promise.
        unsafe { self.inner.record(event, stream) }
    }

    unsafe fn stream_wait(&self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        self.seam("stream_wait");
        if self.broken == Broken::StreamWait {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.stream_wait(stream, event) }
    }

    unsafe fn query(&self, event: EventId) -> Result<bool, DeviceError> {
        self.seam("query");
        if self.broken == Broken::Query {
            return Ok(true);
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.query(event) }
    }

    unsafe fn wait_event(&self, event: EventId) -> Result<(), DeviceError> {
        self.seam("wait_event");
        if self.broken == Broken::HostWait {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.wait_event(event) }
    }

    unsafe fn wait_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        self.seam("wait_stream");
        // SAFETY: the caller's promise.
        unsafe { self.inner.wait_stream(stream) }
    }
}

impl Copies for Card {
    unsafe fn copy_to_device(
        &self,
        to: DeviceRange,
        from: *const u8,
        available: ModelTime,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.work("copy_to_device", stream)?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_to_device(to, from, available, stream) }
    }

    unsafe fn copy_to_host(
        &self,
        to: *mut u8,
        from: DeviceRange,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.work("copy_to_host", stream)?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_to_host(to, from, stream) }
    }

    unsafe fn copy_on_device(
        &self,
        to: DeviceRange,
        from: DeviceRange,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.work("copy_on_device", stream)?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_on_device(to, from, stream) }
    }

    unsafe fn fill(&self, to: DeviceRange, value: u8, stream: StreamId) -> Result<(), DeviceError> {
        self.work("fill", stream)?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.fill(to, value, stream) }
    }
}

impl ActivationPool for Card {
    unsafe fn pool_allocate(&self, bytes: u64, stream: StreamId) -> Result<DeviceRange, DeviceError> {
        self.seam("pool_allocate");
        // SAFETY: the caller's promise.
        unsafe { self.inner.pool_allocate(bytes, stream) }
    }

    unsafe fn pool_free(&self, range: DeviceRange, stream: StreamId) -> Result<(), DeviceError> {
        self.seam("pool_free");
        // SAFETY: the caller's promise.
        unsafe { self.inner.pool_free(range, stream) }
    }

    fn pool_figures(&self) -> Result<PoolFigures, DeviceError> {
        self.seam("pool_figures");
        self.inner.pool_figures()
    }

    fn pool_trim(&self, keep: u64) -> Result<(), DeviceError> {
        self.seam("pool_trim");
        self.inner.pool_trim(keep)
    }
}

impl Kernels for Card {
    fn add_kernels(&self, module: &KernelModule) -> Result<(), DeviceError> {
        self.inner.add_kernels(module)
    }

    fn kernel(&self, name: &str) -> Result<KernelId, DeviceError> {
        self.inner.kernel(name)
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamId) -> Result<(), DeviceError> {
        self.work("launch", stream)?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.launch(launch, stream) }
    }
}

impl Clock for Card {
    fn now(&self) -> ModelTime {
        self.inner.now()
    }

    fn set_now(&self, time: ModelTime) {
        self.inner.set_now(time);
    }

    unsafe fn charge_compute(&self, stream: StreamId, duration: Duration) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.charge_compute(stream, duration) }
    }

    fn charge_host(&self, duration: Duration) {
        self.inner.charge_host(duration);
    }

    fn schedule_read(&self, bytes: u64) -> ModelTime {
        self.inner.schedule_read(bytes)
    }
}
