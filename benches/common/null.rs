//! A card whose calls do nothing, so that what is left of a timed step is the pager's own cost.
//!
//! It hands out addresses and numbers and counts bytes copied. All work is done as soon as it is asked for.

#![expect(unsafe_code, reason = "a device's calls are unsafe to make, so also to write")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vram_pager::device::{
    ActivationPool, CallCounts, Clock, Copies, Device, DeviceError, DeviceInfo, DeviceKind, EventId, FrameId,
    HostMemory, KernelId, KernelModule, Kernels, Launch, LiveObjects, MemoryFigures, PoolFigures,
    SharedDevice, StreamId, StreamPriority, Streams, VirtualMemory,
};
use vram_pager::units::{DeviceAddress, DeviceRange, ModelTime};

/// See the module.
#[derive(Debug)]
pub struct NullDevice {
    info: DeviceInfo,
    next: AtomicU64,
    next_address: AtomicU64,
    frames: AtomicU64,
    copies: AtomicU64,
    bytes_to_device: AtomicU64,
}

impl NullDevice {
    /// A card of `bytes` with frames of `granularity`.
    pub fn open(bytes: u64, granularity: u64) -> SharedDevice {
        Arc::new(Self {
            info: DeviceInfo {
                kind: DeviceKind::Emulated,
                name: "null".to_owned(),
                total_bytes: bytes,
                granularity,
                virtual_memory: true,
                host_addressable: false,
                link: None,
                keeps_bytes: false,
            },
            next: AtomicU64::new(1),
            next_address: AtomicU64::new(1 << 40),
            frames: AtomicU64::new(0),
            copies: AtomicU64::new(0),
            bytes_to_device: AtomicU64::new(0),
        })
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn unsupported<T>(&self, what: &str) -> Result<T, DeviceError> {
        Err(DeviceError::Unsupported {
            device: self.info.name.clone(),
            what: what.to_owned(),
            advice: "use an emulated card".to_owned(),
        })
    }
}

impl Device for NullDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryFigures, DeviceError> {
        let used = self.frames.load(Ordering::Relaxed) * self.info.granularity;
        let total = self.info.total_bytes;
        Ok(MemoryFigures { free: total.saturating_sub(used), total })
    }

    fn counts(&self) -> CallCounts {
        let mut counts = CallCounts::default();
        counts.copy_to_device = self.copies.load(Ordering::Relaxed);
        counts.bytes_to_device = self.bytes_to_device.load(Ordering::Relaxed);
        counts
    }

    fn live(&self) -> LiveObjects {
        LiveObjects::default()
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn defer(&self, error: DeviceError) {
        eprintln!("{error}");
    }
}

impl VirtualMemory for NullDevice {
    fn reserve(&self, bytes: u64) -> Result<DeviceRange, DeviceError> {
        let start = self.next_address.fetch_add(bytes, Ordering::Relaxed);
        Ok(DeviceRange::new(DeviceAddress(start), bytes))
    }

    unsafe fn free(&self, _: DeviceRange) -> Result<(), DeviceError> {
        Ok(())
    }

    fn create_frame(&self, _: u64) -> Result<FrameId, DeviceError> {
        self.frames.fetch_add(1, Ordering::Relaxed);
        Ok(FrameId(self.number()))
    }

    unsafe fn release_frame(&self, _: FrameId) -> Result<(), DeviceError> {
        self.frames.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn map(&self, _: DeviceRange, _: FrameId) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn set_access(&self, _: DeviceRange) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn unmap(&self, _: DeviceRange) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl HostMemory for NullDevice {
    unsafe fn page_lock(&self, _: *mut u8, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn page_unlock(&self, _: *mut u8) -> Result<(), DeviceError> {
        Ok(())
    }

    fn begin_host_write(&self, _: *const u8, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn end_host_write(&self, _: *const u8, _: u64) {}
}

impl Streams for NullDevice {
    fn create_stream(&self, _: StreamPriority) -> Result<StreamId, DeviceError> {
        Ok(StreamId(self.number()))
    }

    unsafe fn destroy_stream(&self, _: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }

    fn create_event(&self) -> Result<EventId, DeviceError> {
        Ok(EventId(self.number()))
    }

    unsafe fn destroy_event(&self, _: EventId) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn record(&self, _: EventId, _: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn stream_wait(&self, _: StreamId, _: EventId) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn query(&self, _: EventId) -> Result<bool, DeviceError> {
        Ok(true)
    }

    unsafe fn wait_event(&self, _: EventId) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn wait_stream(&self, _: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl Copies for NullDevice {
    unsafe fn copy_to_device(
        &self,
        to: DeviceRange,
        _: *const u8,
        _: ModelTime,
        _: StreamId,
    ) -> Result<(), DeviceError> {
        self.copies.fetch_add(1, Ordering::Relaxed);
        self.bytes_to_device.fetch_add(to.bytes, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn copy_to_host(&self, _: *mut u8, _: DeviceRange, _: StreamId) -> Result<(), DeviceError> {
        self.unsupported("copy to the host")
    }

    unsafe fn copy_on_device(&self, _: DeviceRange, _: DeviceRange, _: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn fill(&self, _: DeviceRange, _: u8, _: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl ActivationPool for NullDevice {
    unsafe fn pool_allocate(&self, _: u64, _: StreamId) -> Result<DeviceRange, DeviceError> {
        self.unsupported("allocate from a pool")
    }

    unsafe fn pool_free(&self, _: DeviceRange, _: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }

    fn pool_figures(&self) -> Result<PoolFigures, DeviceError> {
        Ok(PoolFigures::default())
    }

    fn pool_trim(&self, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl Kernels for NullDevice {
    fn add_kernels(&self, _: &KernelModule) -> Result<(), DeviceError> {
        Ok(())
    }

    fn kernel(&self, _: &str) -> Result<KernelId, DeviceError> {
        Ok(KernelId(self.number()))
    }

    unsafe fn launch(&self, _: &Launch, _: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl Clock for NullDevice {
    fn now(&self) -> ModelTime {
        ModelTime::ZERO
    }

    fn set_now(&self, _: ModelTime) {}

    unsafe fn charge_compute(&self, _: StreamId, _: Duration) -> Result<(), DeviceError> {
        Ok(())
    }

    fn charge_host(&self, _: Duration) {}

    fn schedule_read(&self, _: u64) -> ModelTime {
        ModelTime::ZERO
    }
}
