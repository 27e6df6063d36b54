//! A device whose panics are errors.
//!
//! The layers above call a device under their locks and in the middle of their bookkeeping. Each of them
//! puts things right after an error, and that is tested for every call; none of them is written to be
//! unwound through. So a panic in a backend, or in code that a user of the crate wrote behind [`Device`],
//! becomes [`DeviceError::Panicked`] here, at the one border, and takes the tested way.
//!
//! Calls that cannot answer with an error (figures, the clock) are passed on as they are. Owns the device
//! inside; no lock. May import what the traits of [`super`] need.

#![expect(unsafe_code, reason = "passes the raw calls on")]

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::{
    ActivationPool, CallCounts, Clock, Copies, Device, DeviceError, DeviceInfo, EventId, FrameId, HostMemory,
    KernelId, KernelModule, Kernels, Launch, LiveObjects, MemoryFigures, PoolFigures, SharedDevice, StreamId,
    StreamPriority, Streams, VirtualMemory,
};
use crate::units::{DeviceRange, ModelTime};

/// `device`, whose panics are errors from here on.
pub(crate) fn without_panics(device: &SharedDevice) -> SharedDevice {
    Arc::new(Caught { inner: Arc::clone(device) })
}

struct Caught {
    inner: SharedDevice,
}

impl Caught {
    fn call<T>(
        &self,
        call: &'static str,
        work: impl FnOnce(&dyn Device) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        // Nothing of ours is borrowed by the call, and the device answers for its own state.
        catch_unwind(AssertUnwindSafe(|| work(self.inner.as_ref()))).unwrap_or_else(|panic| {
            let device = self.inner.info().name.clone();
            Err(DeviceError::Panicked { device, call, why: text(panic.as_ref()) })
        })
    }
}

/// What a panic said.
fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_owned())
}

impl fmt::Debug for Caught {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Device for Caught {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn memory(&self) -> Result<MemoryFigures, DeviceError> {
        self.call("memory", |device| device.memory())
    }

    fn counts(&self) -> CallCounts {
        self.inner.counts()
    }

    fn live(&self) -> LiveObjects {
        self.inner.live()
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.call("synchronize", |device| device.synchronize())
    }

    fn defer(&self, error: DeviceError) {
        self.inner.defer(error);
    }

    fn identity(&self) -> usize {
        self.inner.identity()
    }
}

impl Clock for Caught {
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
        self.call("charge_compute", |device| unsafe { device.charge_compute(stream, duration) })
    }

    fn charge_host(&self, duration: Duration) {
        self.inner.charge_host(duration);
    }

    fn schedule_read(&self, bytes: u64) -> ModelTime {
        self.inner.schedule_read(bytes)
    }
}

/// Implements a trait of calls that answer with a result.
macro_rules! caught {
    ($trait:ident: $($(#[$kind:ident])? fn $name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        impl $trait for Caught {
            $(caught!(@one $($kind)? fn $name($($argument: $type),*) -> $answer);)*
        }
    };
    (@one safe fn $name:ident($($argument:ident: $type:ty),*) -> $answer:ty) => {
        fn $name(&self, $($argument: $type),*) -> Result<$answer, DeviceError> {
            self.call(stringify!($name), |device| device.$name($($argument),*))
        }
    };
    (@one fn $name:ident($($argument:ident: $type:ty),*) -> $answer:ty) => {
        unsafe fn $name(&self, $($argument: $type),*) -> Result<$answer, DeviceError> {
            // SAFETY: the caller's promise, passed on.
            self.call(stringify!($name), |device| unsafe { device.$name($($argument),*) })
        }
    };
}

caught! { VirtualMemory:
    #[safe] fn reserve(bytes: u64) -> DeviceRange;
    fn free(range: DeviceRange) -> ();
    #[safe] fn create_frame(bytes: u64) -> FrameId;
    fn release_frame(frame: FrameId) -> ();
    fn map(at: DeviceRange, frame: FrameId) -> ();
    fn set_access(run: DeviceRange) -> ();
    fn unmap(at: DeviceRange) -> ();
}

impl HostMemory for Caught {
    caught!(@one fn page_lock(start: *mut u8, bytes: u64) -> ());
    caught!(@one fn page_unlock(start: *mut u8) -> ());
    caught!(@one safe fn begin_host_write(start: *const u8, bytes: u64) -> ());

    fn end_host_write(&self, start: *const u8, bytes: u64) {
        let ended = self.call("end_host_write", |device| {
            device.end_host_write(start, bytes);
            Ok(())
        });
        if let Err(error) = ended {
            self.inner.defer(error);
        }
    }
}

caught! { Streams:
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

caught! { Copies:
    fn copy_to_device(to: DeviceRange, from: *const u8, available: ModelTime, stream: StreamId) -> ();
    fn copy_to_host(to: *mut u8, from: DeviceRange, stream: StreamId) -> ();
    fn copy_on_device(to: DeviceRange, from: DeviceRange, stream: StreamId) -> ();
    fn fill(to: DeviceRange, value: u8, stream: StreamId) -> ();
}

caught! { ActivationPool:
    fn pool_allocate(bytes: u64, stream: StreamId) -> DeviceRange;
    fn pool_free(range: DeviceRange, stream: StreamId) -> ();
    #[safe] fn pool_figures() -> PoolFigures;
    #[safe] fn pool_trim(keep: u64) -> ();
}

caught! { Kernels:
    #[safe] fn add_kernels(module: &KernelModule) -> ();
    #[safe] fn kernel(name: &str) -> KernelId;
    fn launch(launch: &Launch, stream: StreamId) -> ();
}
