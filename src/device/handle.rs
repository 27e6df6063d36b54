//! Handles that own what a device gave, and give it back when they are dropped.
//!
//! These are the only callers of the device's unsafe calls, apart from the copy engine and the launch
//! helper, which prove the same things. A drop never panics: an error there is kept with
//! [`super::Device::defer`] and surfaces at the next call. Handles take no lock of their own.

#![expect(unsafe_code, reason = "the handles are the one place that proves the device's contracts")]

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::fence::{Fence, FencePool};
use super::{DeviceError, FrameId, Launch, SharedDevice, StreamId, StreamPriority};
use crate::units::{DeviceAddress, DeviceRange, ask_host, try_filled};

/// A stream of a device; one that was created here is destroyed on drop, after its work has run.
pub struct Stream {
    device: SharedDevice,
    id: StreamId,
    /// Allocations that were let go of while the stream was being captured: a free would become part of the graph,
    /// which cannot have it.
    late: Mutex<Vec<DeviceRange>>,
}

/// Waits until a wait was made, or the device is lost.
pub(super) fn settle(wait: impl Fn() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
    const TRIES: u32 = 100;
    let mut answer = wait();
    for _ in 1..TRIES {
        match &answer {
            Err(error) if !error.is_lost() => answer = wait(),
            _ => break,
        }
    }
    answer
}

impl Stream {
    /// Creates a stream.
    pub fn new(device: &SharedDevice, priority: StreamPriority) -> Result<Self, DeviceError> {
        let id = device.create_stream(priority)?;
        Ok(Self { device: Arc::clone(device), id, late: Mutex::default() })
    }

    /// Registers a stream that somebody else created, by its driver's handle (a `CUstream` on a card, where
    /// null stands for the legacy default stream). A drop ends the registration and leaves the stream alone.
    ///
    /// # Errors
    /// [`DeviceError::InvalidArgument`] for the per-thread default stream and for a stream of another
    /// context; [`DeviceError::Unsupported`] on a device that has no foreign streams.
    ///
    /// # Safety
    /// `stream` is null, one of the driver's default streams, or a live stream of this process, and stays
    /// live until this handle and everything that holds it are gone.
    pub unsafe fn adopt(device: &SharedDevice, stream: *mut std::ffi::c_void) -> Result<Self, DeviceError> {
        // SAFETY: the caller's promise.
        let id = unsafe { device.adopt_stream(stream)? };
        Ok(Self { device: Arc::clone(device), id, late: Mutex::default() })
    }

    /// Ends the registration and answers a fence on the last point of the stream: whatever was used on it
    /// may be used again when that is done.
    pub fn unregister(self, fences: &FencePool) -> Result<Fence, DeviceError> {
        fences.record(&self)
    }

    /// Whether work given to the stream is being captured into a graph instead of run.
    pub fn is_capturing(&self) -> Result<bool, DeviceError> {
        // SAFETY: `id` is live as long as this handle.
        unsafe { self.device.is_capturing(self.id) }
    }

    /// Frees what was let go of while the stream was being captured, if that is over.
    pub(crate) fn free_late(&self) {
        if !self.late.lock().is_empty() && !self.is_capturing().unwrap_or(false) {
            self.free_rest();
        }
    }

    fn free_rest(&self) {
        for range in std::mem::take(&mut *self.late.lock()) {
            self.free(range);
        }
    }

    fn free(&self, range: DeviceRange) {
        // SAFETY: the allocation was its handle's alone, and that goes away or is gone; other streams' uses were
        // ordered before this point by whoever made them. `id` is live as long as this handle.
        match unsafe { self.device.pool_free(range, self.id) } {
            Ok(()) => {}
            Err(DeviceError::Capturing { .. }) => self.late.lock().push(range),
            Err(error) => self.device.defer(error),
        }
    }

    /// The device's number for it.
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// The device that it belongs to.
    pub fn device(&self) -> &SharedDevice {
        &self.device
    }

    /// Blocks until all work given to the stream so far is done.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: `id` is live as long as this handle.
        unsafe { self.device.wait_stream(self.id) }
    }

    /// As [`Self::synchronize`], for who goes on whatever the answer. An answer may be an older error that a
    /// drop left behind, and then nothing was waited for: this asks again.
    ///
    /// # Errors
    /// The device is lost, or it refused very many times; then nobody knows whether the work is done.
    pub(crate) fn settle(&self) -> Result<(), DeviceError> {
        settle(|| self.synchronize())
    }

    /// Charges compute to the stream on a modelled device.
    pub fn charge_compute(&self, duration: Duration) -> Result<(), DeviceError> {
        // SAFETY: `id` is live as long as this handle.
        unsafe { self.device.charge_compute(self.id, duration) }
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, each range among them stays accessible until the launch is
    /// done (a guard that is released on this stream after the launch sees to that), and the kernel
    /// touches nothing else.
    pub unsafe fn launch(&self, launch: &Launch) -> Result<(), DeviceError> {
        // SAFETY: the stream is live as long as this handle; the rest is the caller's promise.
        unsafe { self.device.launch(launch, self.id) }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.id.0).finish()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.free_rest();
        if !self.late.get_mut().is_empty() {
            // Lost: nobody will know when the capture is over.
            self.device.defer(DeviceError::Capturing { call: "pool_free" });
        }
        // SAFETY: this handle is the only owner of `id` and goes away.
        if let Err(error) = unsafe { self.device.destroy_stream(self.id) } {
            self.device.defer(error);
        }
    }
}

/// Frames of one size, named by small numbers that are used again.
///
/// Holds the device's ids so that a table needs four bytes a frame; releases all of them on drop.
pub struct FrameSet {
    device: SharedDevice,
    frame_bytes: u64,
    ids: Vec<Option<FrameId>>,
    vacant: Vec<u32>,
}

impl FrameSet {
    /// An empty set of frames of `frame_bytes` each.
    pub fn new(device: &SharedDevice, frame_bytes: u64) -> Self {
        Self { device: Arc::clone(device), frame_bytes, ids: Vec::new(), vacant: Vec::new() }
    }

    /// Creates a frame and answers its number.
    pub fn create(&mut self) -> Result<u32, DeviceError> {
        let id = self.device.create_frame(self.frame_bytes)?;
        if let Some(number) = self.vacant.pop() {
            self.ids[number as usize] = Some(id);
            return Ok(number);
        }
        self.ids.push(Some(id));
        Ok(u32::try_from(self.ids.len() - 1).unwrap_or(u32::MAX))
    }

    /// Releases a frame; its memory goes back with its last mapping.
    pub fn release(&mut self, number: u32) -> Result<(), DeviceError> {
        let Some(id) = self.ids.get_mut(number as usize).and_then(Option::take) else {
            return Err(DeviceError::Misuse {
                call: "release_frame",
                why: format!("frame {number} was released before"),
            });
        };
        self.vacant.push(number);
        // SAFETY: the id was ours alone and has just been taken out.
        unsafe { self.device.release_frame(id) }
    }

    /// The device's id of a live frame.
    fn id(&self, number: u32) -> Result<FrameId, DeviceError> {
        self.ids
            .get(number as usize)
            .copied()
            .flatten()
            .ok_or_else(|| DeviceError::Misuse { call: "map", why: format!("frame {number} does not exist") })
    }

    /// Live frames.
    pub fn len(&self) -> usize {
        self.ids.len() - self.vacant.len()
    }

    /// Whether there is no live frame.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The size of each frame in bytes.
    pub fn frame_bytes(&self) -> u64 {
        self.frame_bytes
    }
}

impl fmt::Debug for FrameSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameSet")
            .field("frames", &self.len())
            .field("frame_bytes", &self.frame_bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for FrameSet {
    fn drop(&mut self) {
        for id in self.ids.iter().copied().flatten() {
            // SAFETY: the set owns each id alone and goes away.
            if let Err(error) = unsafe { self.device.release_frame(id) } {
                self.device.defer(error);
            }
        }
    }
}

/// A reserved address range, divided into pages, each unmapped or mapped to one frame.
///
/// Keeps one bit a page, so that a drop removes every mapping before it frees the range.
pub struct AddressRange {
    device: SharedDevice,
    range: DeviceRange,
    page_bytes: u64,
    mapped: Vec<u64>,
}

impl AddressRange {
    /// Reserves `pages` pages of `page_bytes` each (a multiple of the granularity).
    pub fn reserve(device: &SharedDevice, pages: usize, page_bytes: u64) -> Result<Self, DeviceError> {
        let bytes = (pages as u64).checked_mul(page_bytes).filter(|bytes| *bytes > 0);
        let Some(bytes) = bytes else {
            return Err(DeviceError::InvalidArgument {
                call: "reserve",
                why: format!("{pages} pages of {page_bytes} bytes are no range"),
            });
        };
        let mapped = try_filled("an address range", pages.div_ceil(64), 0).map_err(|error| {
            DeviceError::Host { call: "reserve", bytes: error.bytes, why: error.to_string() }
        })?;
        let range = device.reserve(bytes)?;
        Ok(Self { device: Arc::clone(device), range, page_bytes, mapped })
    }

    /// The whole range.
    pub fn range(&self) -> DeviceRange {
        self.range
    }

    /// The address of a page.
    pub fn address(&self, page: u32) -> DeviceAddress {
        self.range.start.offset(u64::from(page) * self.page_bytes)
    }

    /// Whether a page is mapped.
    pub fn is_mapped(&self, page: u32) -> bool {
        self.mapped.get(page as usize / 64).is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    /// Maps a page to a frame. It stays inaccessible until [`Self::set_access`].
    pub fn map(&mut self, page: u32, frames: &FrameSet, frame: u32) -> Result<(), DeviceError> {
        let at = self.page(page, "map")?;
        if self.is_mapped(page) {
            return Err(DeviceError::Misuse {
                call: "map",
                why: format!("page {page} at {} is mapped already", at.start),
            });
        }
        let id = frames.id(frame)?;
        // SAFETY: the page lies in our live range, the bit says that nothing is mapped there, and `frames`
        // keeps the frame alive.
        unsafe { self.device.map(at, id)? };
        self.mapped[page as usize / 64] |= 1 << (page % 64);
        Ok(())
    }

    /// Makes `count` pages from `first` on accessible; all must have been mapped since they were last
    /// inaccessible, so that none is in use.
    pub fn set_access(&mut self, first: u32, count: u32) -> Result<(), DeviceError> {
        let start = self.page(first, "set_access")?.start;
        let all_mapped = (first..first.saturating_add(count)).all(|page| self.is_mapped(page));
        if count == 0 || !all_mapped {
            return Err(DeviceError::Misuse {
                call: "set_access",
                why: format!("pages {first}+{count} are not all mapped"),
            });
        }
        let run = DeviceRange::new(start, u64::from(count) * self.page_bytes);
        // SAFETY: every page is mapped; that none is in use is the caller's rule: pages are made accessible
        // right after they were mapped, before any address of theirs is handed out.
        unsafe { self.device.set_access(run) }
    }

    /// Removes a page's mapping.
    ///
    /// # Safety
    /// No work in flight uses the page.
    pub unsafe fn unmap(&mut self, page: u32) -> Result<(), DeviceError> {
        let at = self.page(page, "unmap")?;
        if !self.is_mapped(page) {
            return Err(DeviceError::Misuse {
                call: "unmap",
                why: format!("page {page} at {} is not mapped", at.start),
            });
        }
        // SAFETY: the bit says that the page is mapped; that nothing uses it is the caller's promise.
        unsafe { self.device.unmap(at)? };
        self.mapped[page as usize / 64] &= !(1 << (page % 64));
        Ok(())
    }

    fn page(&self, page: u32, call: &'static str) -> Result<DeviceRange, DeviceError> {
        self.range.part(u64::from(page) * self.page_bytes, self.page_bytes).ok_or_else(|| {
            DeviceError::InvalidArgument {
                call,
                why: format!("page {page} lies outside the range {:?}", self.range),
            }
        })
    }
}

impl fmt::Debug for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressRange")
            .field("range", &self.range)
            .field("page_bytes", &self.page_bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let words = std::mem::take(&mut self.mapped);
        let mut stays_mapped = false;
        for (index, mut word) in words.into_iter().enumerate() {
            while word != 0 {
                let page = index as u64 * 64 + u64::from(word.trailing_zeros());
                word &= word - 1;
                let at = DeviceRange::new(self.range.start.offset(page * self.page_bytes), self.page_bytes);
                // SAFETY: the bit says that the page is mapped. The owner of the range waits for the fences
                // of all work that used it before it drops the range.
                let unmap = || unsafe { self.device.unmap(at) };
                // An unmap that failed did nothing, and this is the last chance: one more try.
                if let Err(error) = unmap().or_else(|_| unmap()) {
                    self.device.defer(error);
                    stays_mapped = true;
                }
            }
        }
        if stays_mapped {
            // Freeing addresses under a mapping would be misuse.
            return;
        }
        // SAFETY: the range is ours alone, every mapping was removed above, and it goes away.
        if let Err(error) = unsafe { self.device.free(self.range) } {
            self.device.defer(error);
        }
    }
}

/// Host memory in one block, page-locked where the device permits.
///
/// The memory is an anonymous mapping of its own, so that registering it never touches a neighbour.
pub struct HostBlock {
    device: SharedDevice,
    start: *mut u8,
    bytes: u64,
    page_locked: bool,
}

// SAFETY: the block is plain memory that this handle owns; access goes through raw pointers whose users
// prove that they do not race.
unsafe impl Send for HostBlock {}
// SAFETY: as above; the handle itself has no interior mutability.
unsafe impl Sync for HostBlock {}

/// The size of a huge page of the host.
const HUGE_PAGE: usize = 2 << 20;

impl HostBlock {
    /// Maps `bytes` of host memory (rounded up to the host's page size) without page-locking it; in huge
    /// pages where the host gives them. Nothing of it is touched yet.
    pub fn map(device: &SharedDevice, bytes: u64) -> Result<Self, DeviceError> {
        let refuse = |why: String| DeviceError::Host { call: "mmap", bytes, why };
        let length = bytes
            .max(1)
            .checked_next_multiple_of(host_page_bytes())
            .and_then(|length| usize::try_from(length).ok())
            .ok_or_else(|| refuse("more than an address space".to_owned()))?;
        ask_host("a block", bytes).map_err(|error| refuse(error.to_string()))?;
        // Large blocks lie on a border of huge pages, so that the advice below takes effect.
        let spare = if length >= HUGE_PAGE { HUGE_PAGE } else { 0 };
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length + spare,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(refuse(std::io::Error::last_os_error().to_string()));
        }
        let before = if spare > 0 { mapped.addr().next_multiple_of(HUGE_PAGE) - mapped.addr() } else { 0 };
        let start = mapped.wrapping_byte_add(before);
        // SAFETY: what lies before and after the block is of the mapping made above, which nobody knows yet.
        // The advice only asks for huge pages when the block is first touched; a system without them says
        // no, which costs speed alone.
        unsafe {
            if before > 0 {
                libc::munmap(mapped, before);
            }
            if before < spare {
                libc::munmap(start.wrapping_byte_add(length), spare - before);
            }
            if spare > 0 {
                libc::madvise(start, length, libc::MADV_HUGEPAGE);
            }
        }
        Ok(Self { device: Arc::clone(device), start: start.cast(), bytes: length as u64, page_locked: false })
    }

    /// Page-locks the whole block.
    pub fn page_lock(&mut self) -> Result<(), DeviceError> {
        if !self.page_locked {
            // SAFETY: the block is mapped, is not registered (the flag), and lives until the drop, which
            // unregisters it first.
            unsafe { self.device.page_lock(self.start, self.bytes)? };
            self.page_locked = true;
        }
        Ok(())
    }

    /// Gives the page lock back and keeps the memory.
    ///
    /// # Safety
    /// No copy in flight uses the block.
    pub unsafe fn page_unlock(&mut self) -> Result<(), DeviceError> {
        if self.page_locked {
            self.page_locked = false;
            // SAFETY: the block was registered by this device (the flag); the rest is the caller's promise.
            unsafe { self.device.page_unlock(self.start)? };
        }
        Ok(())
    }

    /// Whether the block is page-locked.
    pub fn is_page_locked(&self) -> bool {
        self.page_locked
    }

    /// The first byte. Valid for [`Self::bytes`] bytes as long as the block lives.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// The length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl fmt::Debug for HostBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBlock")
            .field("bytes", &self.bytes)
            .field("page_locked", &self.page_locked)
            .finish_non_exhaustive()
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        let written = self.device.host_write(self.start, self.bytes);
        // SAFETY: the owner of the block waits for the copies that use it before it drops the block.
        let unlocked = unsafe { self.page_unlock() };
        let mut in_use = false;
        for error in [written, unlocked].into_iter().filter_map(Result::err) {
            in_use |= error.is_misuse() || error.is_lost();
            self.device.defer(error);
        }
        // An owner that did not wait, or could not because the device is lost: memory that a copy may still
        // touch stays the process's for good.
        if in_use {
            return;
        }
        // SAFETY: the mapping is ours alone, `bytes` long, and goes away.
        unsafe { libc::munmap(self.start.cast(), usize::try_from(self.bytes).unwrap_or(usize::MAX)) };
    }
}

/// The host's page size in bytes.
pub(crate) fn host_page_bytes() -> u64 {
    // SAFETY: `sysconf` only reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

/// An allocation of the activation pool; freed on drop, in the order of its stream. While that is being captured
/// into a graph nothing is freed on it: then it goes when the capture is over.
pub struct PoolAllocation {
    range: DeviceRange,
    stream: Arc<Stream>,
}

impl PoolAllocation {
    /// Takes `bytes` from the pool, usable by work on `stream` from here on.
    pub fn new(stream: &Arc<Stream>, bytes: u64) -> Result<Self, DeviceError> {
        stream.free_late();
        // SAFETY: the stream is live as long as its handle.
        let range = unsafe { stream.device().pool_allocate(bytes, stream.id())? };
        Ok(Self { range, stream: Arc::clone(stream) })
    }

    /// The allocation's addresses.
    pub fn range(&self) -> DeviceRange {
        self.range
    }

    /// The stream that it was taken on and is freed on.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }
}

impl fmt::Debug for PoolAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PoolAllocation").field(&self.range).finish()
    }
}

impl Drop for PoolAllocation {
    fn drop(&mut self) {
        self.stream.free(self.range);
    }
}
