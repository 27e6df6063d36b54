//! A device around another one: a test looks at each call before it is made and may refuse it, or panic in
//! it; page-locking may really lock memory, as a driver does, so that the system's limits count; and the link's rate
//! may be told otherwise, or not at all, as by a driver.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]
#![expect(unsafe_code, reason = "passes a device's calls on")]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vram_pager::device::{
    ActivationPool, CallCounts, Clock, Copies, Device, DeviceError, DeviceInfo, EventId, FrameId, HostMemory,
    KernelId, KernelModule, Kernels, Launch, LiveObjects, MemoryFigures, PoolFigures, SharedDevice, StreamId,
    StreamPriority, Streams, VirtualMemory,
};
use vram_pager::units::{DeviceRange, ModelTime, Rate};

/// What sees each call by its name before it is made.
pub type Before = Box<dyn Fn(&'static str) -> Result<(), DeviceError> + Send + Sync>;

/// The device around another one.
pub struct Wrapped {
    inner: SharedDevice,
    info: DeviceInfo,
    before: Before,
    /// Bytes of the blocks that are locked in memory, by address, if page-locking really locks.
    locked: Option<Mutex<BTreeMap<usize, usize>>>,
}

impl Wrapped {
    /// `inner`, with `before` ahead of each call.
    pub fn watched(inner: &SharedDevice, before: Before) -> Arc<Self> {
        Arc::new(Self { inner: Arc::clone(inner), info: inner.info().clone(), before, locked: None })
    }

    /// `inner`, whose page-locking locks memory.
    pub fn locking(inner: &SharedDevice) -> Arc<Self> {
        let locked = Some(Mutex::new(BTreeMap::new()));
        let info = inner.info().clone();
        Arc::new(Self { inner: Arc::clone(inner), info, before: Box::new(|_| Ok(())), locked })
    }

    /// `inner`, with `before` ahead of each call, that tells another rate of its link, or none.
    pub fn telling(inner: &SharedDevice, link: Option<Rate>, before: Before) -> Arc<Self> {
        let info = DeviceInfo { link, ..inner.info().clone() };
        Arc::new(Self { inner: Arc::clone(inner), info, before, locked: None })
    }
}

impl fmt::Debug for Wrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wrapped").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl HostMemory for Wrapped {
    unsafe fn page_lock(&self, start: *mut u8, bytes: u64) -> Result<(), DeviceError> {
        (self.before)("page_lock")?;
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        if let Some(locked) = &self.locked {
            // SAFETY: the caller owns the mapped block; locking it moves nothing.
            if unsafe { libc::mlock(start.cast(), length) } != 0 {
                let why = std::io::Error::last_os_error().to_string();
                return Err(DeviceError::Host { call: "mlock", bytes, why });
            }
            locked.lock().unwrap_or_else(PoisonError::into_inner).insert(start as usize, length);
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.page_lock(start, bytes) }
    }

    unsafe fn page_unlock(&self, start: *mut u8) -> Result<(), DeviceError> {
        (self.before)("page_unlock")?;
        if let Some(locked) = &self.locked
            && let Some(length) =
                locked.lock().unwrap_or_else(PoisonError::into_inner).remove(&(start as usize))
        {
            // SAFETY: this block was locked with this length, and its owner still has it mapped.
            unsafe { libc::munlock(start.cast(), length) };
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.page_unlock(start) }
    }

    fn begin_host_write(&self, start: *const u8, bytes: u64) -> Result<(), DeviceError> {
        self.inner.begin_host_write(start, bytes)
    }

    fn end_host_write(&self, start: *const u8, bytes: u64) {
        self.inner.end_host_write(start, bytes);
    }
}

impl Device for Wrapped {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn memory(&self) -> Result<MemoryFigures, DeviceError> {
        (self.before)("memory")?;
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

/// Passes calls on, after `before` has seen their names.
macro_rules! pass_on {
    ($trait:ident: $(
        $(#[$kind:ident])? fn $name:ident($($argument:ident: $type:ty),*) -> $answer:ty;
    )*) => {
        impl $trait for Wrapped {
            $(pass_on!(@one $($kind)? fn $name($($argument: $type),*) -> $answer);)*
        }
    };
    (@one safe fn $name:ident($($argument:ident: $type:ty),*) -> $answer:ty) => {
        fn $name(&self, $($argument: $type),*) -> Result<$answer, DeviceError> {
            (self.before)(stringify!($name))?;
            self.inner.$name($($argument),*)
        }
    };
    (@one fn $name:ident($($argument:ident: $type:ty),*) -> $answer:ty) => {
        unsafe fn $name(&self, $($argument: $type),*) -> Result<$answer, DeviceError> {
            (self.before)(stringify!($name))?;
            // SAFETY: the caller's promise, passed on.
            unsafe { self.inner.$name($($argument),*) }
        }
    };
}

pass_on! { VirtualMemory:
    #[safe] fn reserve(bytes: u64) -> DeviceRange;
    fn free(range: DeviceRange) -> ();
    #[safe] fn create_frame(bytes: u64) -> FrameId;
    fn release_frame(frame: FrameId) -> ();
    fn map(at: DeviceRange, frame: FrameId) -> ();
    fn set_access(run: DeviceRange) -> ();
    fn unmap(at: DeviceRange) -> ();
}

pass_on! { Streams:
    #[safe] fn create_stream(priority: StreamPriority) -> StreamId;
    fn destroy_stream(stream: StreamId) -> ();
    fn adopt_stream(stream: *mut std::ffi::c_void) -> StreamId;
    fn is_capturing(stream: StreamId) -> bool;
    #[safe] fn create_event() -> EventId;
    #[safe] fn create_timed_event() -> EventId;
    fn destroy_event(event: EventId) -> ();
    fn record(event: EventId, stream: StreamId) -> ();
    fn stream_wait(stream: StreamId, event: EventId) -> ();
    fn query(event: EventId) -> bool;
    fn elapsed(from: EventId, to: EventId) -> Option<Duration>;
    fn wait_event(event: EventId) -> ();
    fn wait_stream(stream: StreamId) -> ();
}

pass_on! { Copies:
    fn copy_to_device(to: DeviceRange, from: *const u8, available: ModelTime, stream: StreamId) -> ();
    fn copy_to_host(to: *mut u8, from: DeviceRange, stream: StreamId) -> ();
    fn copy_on_device(to: DeviceRange, from: DeviceRange, stream: StreamId) -> ();
    fn fill(to: DeviceRange, value: u8, stream: StreamId) -> ();
}

pass_on! { ActivationPool:
    fn pool_allocate(bytes: u64, stream: StreamId) -> DeviceRange;
    fn pool_free(range: DeviceRange, stream: StreamId) -> ();
    #[safe] fn pool_figures() -> PoolFigures;
    #[safe] fn pool_trim(keep: u64) -> ();
}

pass_on! { Kernels:
    #[safe] fn add_kernels(module: &KernelModule) -> ();
    #[safe] fn kernel(name: &str) -> KernelId;
    fn launch(launch: &Launch, stream: StreamId) -> ();
}

impl Clock for Wrapped {
    fn now(&self) -> ModelTime {
        self.inner.now()
    }
    fn tells_elapsed(&self) -> bool {
        self.inner.tells_elapsed()
    }
    fn set_now(&self, time: ModelTime) {
        self.inner.set_now(time);
    }
    unsafe fn charge_compute(&self, stream: StreamId, duration: Duration) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.charge_compute(stream, duration) }
    }
    fn charge_host(&self, duration: Duration) {
        self.inner.charge_host(duration);
    }
    fn schedule_read(&self, bytes: u64) -> ModelTime {
        self.inner.schedule_read(bytes)
    }
}
