//! What a card can do, as a handful of small object-safe traits, and the handles that own what it gave.
//!
//! [`Device`] is the sum of the traits of this file; a backend has one file a trait ([`emulated`],
//! `cuda`). Calls are page-sized or larger, so dynamic dispatch costs nothing that could be measured.
//! What must be given back is identified by a plain number ([`FrameId`], [`StreamId`], [`EventId`]) and
//! the calls that take one are `unsafe`: only the RAII handles of [`handle`] and [`fence`] make them, and everything
//! else in the crate, and every user, goes through those.
//!
//! A device knows nothing of pages of a model, units or files. Locking is each backend's own and is the
//! innermost of the crate: no backend calls out while it holds a lock. May import `units` and `sync`.

#![expect(unsafe_code, reason = "the raw calls of a device are unsafe to make; the handles make them")]

mod caught;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod emulated;
mod error;
mod fence;
mod handle;
mod kernels;
mod open;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use caught::without_panics;
pub use error::DeviceError;
pub use fence::{Event, Fence, FencePool};
pub use handle::{AddressRange, FrameSet, HostBlock, PoolAllocation, Stream};
pub use kernels::{
    FloatType, HostTwin, KernelArg, KernelArgs, KernelModule, Launch, MAX_KERNEL_ARGS, PatchPart, TwinArg,
    cast, cast_kernel, cast_launch, checksum, checksum_launch, patch, patch_kernel, patch_launch,
};
pub use open::{CudaString, DeviceString, open};

use crate::units::{DeviceRange, ModelTime, Rate};

/// The kind of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum DeviceKind {
    /// A card in host memory.
    Emulated,
    /// A card behind the CUDA driver.
    Cuda,
}

impl DeviceKind {
    /// The word that a device string begins with.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Emulated => "emulated",
            Self::Cuda => "cuda",
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What does not change while a device is open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// What kind of device it is.
    pub kind: DeviceKind,
    /// Its name, as it appears in messages: `cuda:0 (NVIDIA H200)`, `emulated:24MiB`.
    pub name: String,
    /// Its size in bytes, or the cap that it was opened with.
    pub total_bytes: u64,
    /// The smallest frame in bytes, a power of two; frames, mappings and ranges are multiples of it.
    pub granularity: u64,
    /// Whether address ranges, frames and mappings exist. Without them memory comes from
    /// [`ActivationPool`] alone and an address holds only as long as its allocation.
    pub virtual_memory: bool,
    /// Whether the host may read and write mapped device memory at its device address.
    pub host_addressable: bool,
    /// The rate of the link from the host, where the device knows it.
    pub link: Option<Rate>,
    /// Whether bytes are kept at all. A device without them gives addresses, accounts and clock, for
    /// cards larger than this machine.
    pub keeps_bytes: bool,
}

/// A frame: a piece of physical device memory. One frame backs one page or ring slot at a time, or the
/// same frame several addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FrameId(pub u64);

/// A stream of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct StreamId(pub u64);

/// An event of a device: a place that a point of a stream can be recorded in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct EventId(pub u64);

/// A kernel of a device, by its place among those that were looked up.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KernelId(pub u64);

/// How urgent a stream is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum StreamPriority {
    /// The device's ordinary priority.
    #[default]
    Normal,
    /// Ahead of ordinary streams.
    High,
}

/// Free and total bytes, device wide: what other processes hold is not free.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryFigures {
    /// Bytes that nobody holds.
    pub free: u64,
    /// The device's size.
    pub total: u64,
}

/// What the activation pool holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolFigures {
    /// Bytes that the pool took from the device.
    pub reserved: u64,
    /// Bytes of it that allocations use now; `reserved - used` is idle cache.
    pub used: u64,
}

/// Calls made since the device was opened, by kind. They only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct CallCounts {
    /// Frames created.
    pub create_frame: u64,
    /// Frames released.
    pub release_frame: u64,
    /// Mappings made.
    pub map: u64,
    /// Mappings removed.
    pub unmap: u64,
    /// Access set, once a run of pages.
    pub set_access: u64,
    /// Waits of the host for all of the device's work.
    pub device_sync: u64,
    /// Waits of the host for one event or stream.
    pub host_wait: u64,
    /// Events recorded.
    pub record: u64,
    /// Waits of a stream for an event.
    pub stream_wait: u64,
    /// Copies from the host to the device.
    pub copy_to_device: u64,
    /// Bytes of those.
    pub bytes_to_device: u64,
    /// Copies from the device to the host.
    pub copy_to_host: u64,
    /// Bytes of those.
    pub bytes_to_host: u64,
    /// Kernels launched.
    pub launch: u64,
    /// Host memory registered.
    pub page_lock: u64,
}

/// What exists on a device now. All zero after everything was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct LiveObjects {
    /// Frames.
    pub frames: u64,
    /// Address ranges, the pool's own not counted.
    pub ranges: u64,
    /// Mappings.
    pub mappings: u64,
    /// Streams.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Bytes of page-locked host memory.
    pub page_locked_bytes: u64,
    /// Bytes of live pool allocations.
    pub pool_used_bytes: u64,
}

/// A card: everything that the pager needs of one.
pub trait Device:
    VirtualMemory + HostMemory + Streams + Copies + ActivationPool + Kernels + Clock + fmt::Debug + Send + Sync
{
    /// What the device is.
    fn info(&self) -> &DeviceInfo;

    /// Free and total bytes, device wide, from the driver.
    fn memory(&self) -> Result<MemoryFigures, DeviceError>;

    /// Calls made so far.
    fn counts(&self) -> CallCounts;

    /// What exists now.
    fn live(&self) -> LiveObjects;

    /// Waits until all work of the device is done. The pager never calls it; it is for callers.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// Keeps an error that happened where none could be returned (in a drop); the next call that can
    /// return one does.
    fn defer(&self, error: DeviceError);

    /// The same number for every handle of one device, and of no other live one. A device that passes calls on
    /// to another answers that one's.
    fn identity(&self) -> usize {
        std::ptr::from_ref(self).cast::<()>().addr()
    }
}

/// Address ranges, frames and mappings: the driver's virtual memory calls.
///
/// One frame is one mapping's whole: a mapping covers exactly one frame, and an unmap exactly one
/// mapping.
pub trait VirtualMemory {
    /// Reserves `bytes` (a multiple of the granularity, not zero) of addresses, aligned to the
    /// granularity. Costs no memory; every access faults until something is mapped and made accessible.
    fn reserve(&self, bytes: u64) -> Result<DeviceRange, DeviceError>;

    /// Gives a range back.
    ///
    /// # Safety
    /// `range` came from [`Self::reserve`] of this device, nothing is mapped in it, and its addresses
    /// are not used again.
    unsafe fn free(&self, range: DeviceRange) -> Result<(), DeviceError>;

    /// Creates a frame of `bytes`, a multiple of the granularity.
    fn create_frame(&self, bytes: u64) -> Result<FrameId, DeviceError>;

    /// Releases a frame. Its memory lives on until its last mapping is gone.
    ///
    /// # Safety
    /// `frame` is a live frame of this device and is not named again.
    unsafe fn release_frame(&self, frame: FrameId) -> Result<(), DeviceError>;

    /// Maps the whole of `frame` at `at`, whose length is the frame's. The pages stay inaccessible until
    /// [`Self::set_access`]. A frame may be mapped at several addresses.
    ///
    /// # Safety
    /// `at` lies in a live reserved range and holds no mapping; `frame` is live.
    unsafe fn map(&self, at: DeviceRange, frame: FrameId) -> Result<(), DeviceError>;

    /// Lets the device read and write `run`, which consists of whole mappings.
    ///
    /// # Safety
    /// Every byte of `run` is mapped, and no work in flight uses it.
    unsafe fn set_access(&self, run: DeviceRange) -> Result<(), DeviceError>;

    /// Removes the one mapping that covers exactly `at`.
    ///
    /// # Safety
    /// No work in flight uses the addresses.
    unsafe fn unmap(&self, at: DeviceRange) -> Result<(), DeviceError>;
}

/// Page-locking of host memory, so that copies run asynchronously at the link's rate.
pub trait HostMemory {
    /// Page-locks `bytes` of host memory at `start`, both multiples of the host's page size.
    ///
    /// # Safety
    /// The memory is mapped, is not registered yet, and stays mapped until [`Self::page_unlock`].
    unsafe fn page_lock(&self, start: *mut u8, bytes: u64) -> Result<(), DeviceError>;

    /// Undoes [`Self::page_lock`] of the block that begins at `start`.
    ///
    /// # Safety
    /// The block was page-locked by this device and no copy in flight uses it.
    unsafe fn page_unlock(&self, start: *mut u8) -> Result<(), DeviceError>;

    /// Says that the host writes `bytes` of its memory at `start` from here on, until
    /// [`Self::end_host_write`]. A device that watches over memory in use refuses that as misuse while a copy
    /// whose end the host was not told touches them, or while somebody else writes them; and it refuses each
    /// copy that would touch them before the end. Any other device takes no notice. After an error nothing
    /// has begun.
    ///
    /// Both calls have no body of their own, so that a device which passes calls on cannot forget them.
    fn begin_host_write(&self, start: *const u8, bytes: u64) -> Result<(), DeviceError>;

    /// Ends what [`Self::begin_host_write`] began with the same numbers.
    fn end_host_write(&self, start: *const u8, bytes: u64);

    /// Says that the host writes `bytes` of its memory at `start` now, or gives them up.
    fn host_write(&self, start: *const u8, bytes: u64) -> Result<(), DeviceError> {
        self.begin_host_write(start, bytes)?;
        self.end_host_write(start, bytes);
        Ok(())
    }
}

/// Streams and events. Work of one stream runs in order; streams run beside each other.
pub trait Streams {
    /// Creates a stream that does not synchronise with any default stream.
    fn create_stream(&self, priority: StreamPriority) -> Result<StreamId, DeviceError>;

    /// Destroys a stream. Work already in it still runs.
    ///
    /// # Safety
    /// `stream` was created by this device and is not named again.
    unsafe fn destroy_stream(&self, stream: StreamId) -> Result<(), DeviceError>;

    /// Registers a stream that somebody else created, by its driver's handle, and answers the number that
    /// the other calls take. [`Self::destroy_stream`] ends the registration and leaves the stream alone. On
    /// a card null means the legacy default stream.
    ///
    /// # Safety
    /// `stream` is null, one of the driver's default streams, or a live stream of this process, and stays
    /// live as long as its number is used.
    unsafe fn adopt_stream(&self, stream: *mut std::ffi::c_void) -> Result<StreamId, DeviceError> {
        Err(DeviceError::Unsupported {
            device: "this device".to_owned(),
            what: format!("adopt the foreign stream {stream:p}"),
            advice: "create a stream on it instead".to_owned(),
        })
    }

    /// Whether work given to `stream` is being captured into a graph instead of run.
    ///
    /// # Safety
    /// `stream` is a live handle of this device.
    unsafe fn is_capturing(&self, stream: StreamId) -> Result<bool, DeviceError> {
        let _ = stream;
        Ok(false)
    }

    /// Creates an event, not recorded yet: waiting on it is no wait and a query answers done.
    fn create_event(&self) -> Result<EventId, DeviceError>;

    /// Creates an event, as [`Self::create_event`] does, whose records keep the time at which they are passed:
    /// for [`Self::elapsed`]. A device where ordinary events do so as well, or none can, makes an ordinary one.
    fn create_timed_event(&self) -> Result<EventId, DeviceError> {
        self.create_event()
    }

    /// Destroys an event. Waits that were already enqueued on it hold.
    ///
    /// # Safety
    /// `event` was created by this device and is not named again.
    unsafe fn destroy_event(&self, event: EventId) -> Result<(), DeviceError>;

    /// Records in `event` the point that `stream` has now been given work up to.
    ///
    /// # Safety
    /// Both are live handles of this device.
    unsafe fn record(&self, event: EventId, stream: StreamId) -> Result<(), DeviceError>;

    /// Makes later work of `stream` wait for the newest record of `event`.
    ///
    /// # Safety
    /// Both are live handles of this device.
    unsafe fn stream_wait(&self, stream: StreamId, event: EventId) -> Result<(), DeviceError>;

    /// Whether the newest record of `event` has been passed.
    ///
    /// # Safety
    /// `event` is a live handle of this device.
    unsafe fn query(&self, event: EventId) -> Result<bool, DeviceError>;

    /// How long after the newest record of `from` that of `to` was passed, by the device's own clock, which is
    /// modelled on an emulated device; zero if it was passed before it. `None` if one of them was never recorded
    /// or not passed yet, or keeps no time: see [`Self::create_timed_event`] and [`Clock::tells_elapsed`].
    ///
    /// It is for times alone. Whether memory may be used again is for [`Self::query`] and the waits to say.
    ///
    /// # Errors
    /// One of the events does not exist, or the device refuses. What a drop left behind is not answered here.
    ///
    /// # Safety
    /// Both are live handles of this device.
    unsafe fn elapsed(&self, from: EventId, to: EventId) -> Result<Option<Duration>, DeviceError> {
        let _ = (from, to);
        Ok(None)
    }

    /// Blocks the calling thread until the newest record of `event` has been passed.
    ///
    /// # Safety
    /// `event` is a live handle of this device.
    unsafe fn wait_event(&self, event: EventId) -> Result<(), DeviceError>;

    /// Blocks the calling thread until all work given to `stream` so far is done.
    ///
    /// # Safety
    /// `stream` is a live handle of this device.
    unsafe fn wait_stream(&self, stream: StreamId) -> Result<(), DeviceError>;
}

/// Asynchronous copies. Each is ordered by its stream.
pub trait Copies {
    /// Copies `to.bytes` bytes from host memory at `from`. It starts no earlier than `available`, the
    /// modelled time from which the source holds its bytes (a backend with a real clock ignores it; the
    /// bytes must be there when the call is made). From memory that is not page-locked the caller's thread
    /// copies the bytes to where the card can read them, which may make it wait for earlier copies.
    ///
    /// # Safety
    /// The source stays valid and unchanged until the copy is done; `to` is mapped and accessible, or in
    /// a live pool allocation, until then; the source does not cross the end of a page-locked block.
    unsafe fn copy_to_device(
        &self,
        to: DeviceRange,
        from: *const u8,
        available: ModelTime,
        stream: StreamId,
    ) -> Result<(), DeviceError>;

    /// Copies `from.bytes` bytes into host memory at `to`.
    ///
    /// # Safety
    /// As for [`Self::copy_to_device`], with the roles exchanged; nobody reads the target before the copy
    /// is done.
    unsafe fn copy_to_host(
        &self,
        to: *mut u8,
        from: DeviceRange,
        stream: StreamId,
    ) -> Result<(), DeviceError>;

    /// Copies between two ranges of the device that do not overlap and are of one length.
    ///
    /// # Safety
    /// Both are mapped and accessible, or in live pool allocations, until the copy is done.
    unsafe fn copy_on_device(
        &self,
        to: DeviceRange,
        from: DeviceRange,
        stream: StreamId,
    ) -> Result<(), DeviceError>;

    /// Sets every byte of `to` to `value`.
    ///
    /// # Safety
    /// As the target of [`Self::copy_on_device`].
    unsafe fn fill(&self, to: DeviceRange, value: u8, stream: StreamId) -> Result<(), DeviceError>;
}

/// A stream-ordered pool for activations and other short-lived memory.
pub trait ActivationPool {
    /// Takes `bytes` (not zero), usable by work on `stream` from this point, aligned to 256 bytes.
    ///
    /// # Safety
    /// `stream` is a live handle of this device.
    unsafe fn pool_allocate(&self, bytes: u64, stream: StreamId) -> Result<DeviceRange, DeviceError>;

    /// Gives an allocation back once `stream` has reached this point.
    ///
    /// # Errors
    /// [`DeviceError::Capturing`], and nothing was given back, where `stream` is being captured into a graph: a graph
    /// frees only what a graph allocated. After any other error the allocation is gone all the same.
    ///
    /// # Safety
    /// `range` is a live allocation of this pool, no other stream uses it, and it is not used after.
    unsafe fn pool_free(&self, range: DeviceRange, stream: StreamId) -> Result<(), DeviceError>;

    /// What the pool holds.
    fn pool_figures(&self) -> Result<PoolFigures, DeviceError>;

    /// Hands idle pool memory back to the device until at most `keep` bytes are reserved, as far as
    /// allocations in use permit.
    fn pool_trim(&self, keep: u64) -> Result<(), DeviceError>;
}

/// Kernels, launched by name. On the emulated device each is a host twin: the same arithmetic as a
/// function over slices.
pub trait Kernels {
    /// Adds a module: its kernels' code for a card and their host twins. Names must be new.
    fn add_kernels(&self, module: &KernelModule) -> Result<(), DeviceError>;

    /// Looks a kernel up by name. The crate's own kernels are always there.
    fn kernel(&self, name: &str) -> Result<KernelId, DeviceError>;

    /// Launches a kernel on a stream.
    ///
    /// # Safety
    /// The arguments are those of the kernel; each range among them is accessible until the launch is
    /// done; the kernel touches nothing else.
    unsafe fn launch(&self, launch: &Launch, stream: StreamId) -> Result<(), DeviceError>;
}

/// The device's clock. Whatever decides by time asks it, so that a modelled device is repeatable.
pub trait Clock {
    /// The calling thread's time on this device.
    fn now(&self) -> ModelTime;

    /// Whether [`Streams::elapsed`] tells the time between events of [`Streams::create_timed_event`]. Where it
    /// does not, nothing is measured.
    fn tells_elapsed(&self) -> bool {
        false
    }

    /// Sets the calling thread's time on a modelled device, for a thread that carries on what another
    /// began; does nothing on a real one.
    fn set_now(&self, time: ModelTime);

    /// Charges `duration` of compute to `stream` on a modelled device; does nothing on a real one.
    ///
    /// # Safety
    /// `stream` is a live handle of this device.
    unsafe fn charge_compute(&self, stream: StreamId, duration: Duration) -> Result<(), DeviceError>;

    /// Charges `duration` to the calling thread on a modelled device; does nothing on a real one.
    fn charge_host(&self, duration: Duration);

    /// The time at which a file read of `bytes`, asked for now by this thread, would have its bytes in
    /// memory; advances the modelled disk. A real device answers [`Clock::now`].
    fn schedule_read(&self, bytes: u64) -> ModelTime;
}

/// A shared device.
pub type SharedDevice = Arc<dyn Device>;
