//! An open card: its handles, its accounts, and the one place where the driver's codes become errors.
//!
//! A code that the card does not recover from is latched: every later call answers
//! [`DeviceError::Lost`] with the first cause, and calls that give something back do nothing, so that
//! everything can still be dropped. An error that a drop could not return is kept and surfaces at the next
//! call that can return one.

#![expect(unsafe_code, reason = "calls into the driver library")]

use std::ffi::CStr;
use std::fmt;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::code::{Class, classify, name};
use super::context::{Bound, Context};
use super::driver::{Driver, MISSING, Refusal};
use super::launch::KernelTable;
use super::memory::{HostTable, MemoryTable};
use super::pool::Pool;
use super::probe::{self, Found};
use super::stream::StreamState;
use crate::device::{
    CallCounts, Clock, Device, DeviceError, DeviceInfo, DeviceKind, LiveObjects, MemoryFigures, StreamId,
};
use crate::units::{ModelTime, Rate};

/// Which card to open, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CudaOptions {
    /// The card's number among those that are visible.
    pub ordinal: u32,
    /// Bytes that this device makes do with, to let a large card act as a small one.
    pub cap: Option<u64>,
    /// The granularity to use, a power of two and a multiple of the card's own.
    pub page: Option<u64>,
    /// The rate of its link from the host, which the driver does not tell; `None` leaves it to be measured.
    pub link: Option<Rate>,
}

/// One card.
pub struct CudaDevice {
    pub(super) driver: &'static Driver,
    pub(super) context: Context,
    pub(super) device: sys::CUdevice,
    pub(super) info: DeviceInfo,
    pub(super) cap: Option<u64>,
    pub(super) memory: MemoryTable,
    pub(super) host: HostTable,
    pub(super) streams: StreamState,
    pub(super) pool: Pool,
    pub(super) kernels: KernelTable,
    pub(super) counters: Counters,
    /// Set while `lost` or `deferred` holds something, so that the ordinary path reads one flag.
    troubled: AtomicBool,
    lost: OnceLock<String>,
    deferred: Mutex<Option<DeviceError>>,
    opened: Instant,
}

/// Calls made, as [`CallCounts`] reports them.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) create_frame: AtomicU64,
    pub(super) release_frame: AtomicU64,
    pub(super) map: AtomicU64,
    pub(super) unmap: AtomicU64,
    pub(super) set_access: AtomicU64,
    pub(super) device_sync: AtomicU64,
    pub(super) host_wait: AtomicU64,
    pub(super) record: AtomicU64,
    pub(super) stream_wait: AtomicU64,
    pub(super) copy_to_device: AtomicU64,
    pub(super) bytes_to_device: AtomicU64,
    pub(super) copy_to_host: AtomicU64,
    pub(super) bytes_to_host: AtomicU64,
    pub(super) launch: AtomicU64,
    pub(super) page_lock: AtomicU64,
}

/// Adds to a counter that only statistics read.
pub(super) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl CudaDevice {
    /// Opens a card.
    ///
    /// A card that refuses virtual memory calls still opens, with
    /// [`DeviceInfo::virtual_memory`] false.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] if there is no driver, it is too old or incomplete, or there is no such
    /// card; [`DeviceError::BadDeviceString`] if `page` does not fit the card.
    pub fn open(options: CudaOptions) -> Result<Arc<Self>, DeviceError> {
        let Found { driver, device, device_string, card_name } = probe::find(options.ordinal)?;
        let unavailable = |refusal: Refusal| probe::unavailable(driver, &device_string, refusal);
        let context = Context::retain(driver, device).map_err(unavailable)?;
        let bound = context.bind().map_err(unavailable)?;

        let figures = driver_figures(driver).map_err(unavailable)?;
        let virtual_memory = probe::virtual_memory(driver, device);
        let granularity = granularity(&virtual_memory, options.page, &device_string)?;
        let streams = StreamState::new(driver);
        let pool = Pool::new(driver, device);
        drop(bound);

        let info = DeviceInfo {
            kind: DeviceKind::Cuda,
            name: format!("{device_string} ({card_name})"),
            total_bytes: options.cap.map_or(figures.total, |cap| cap.min(figures.total)),
            granularity,
            virtual_memory: virtual_memory.is_ok(),
            host_addressable: false,
            link: options.link,
            keeps_bytes: true,
        };
        Ok(Arc::new(Self {
            driver,
            context,
            device,
            info,
            cap: options.cap,
            memory: MemoryTable::default(),
            host: HostTable::default(),
            streams,
            pool,
            kernels: KernelTable::new(),
            counters: Counters::default(),
            troubled: AtomicBool::new(false),
            lost: OnceLock::new(),
            deferred: Mutex::new(None),
            opened: Instant::now(),
        }))
    }

    /// Begins an ordinary call: says what went wrong before, if anything did, and binds the context.
    pub(super) fn enter(&self) -> Result<Bound<'_>, DeviceError> {
        if self.troubled.load(Ordering::Acquire) {
            if let Some(lost) = self.lost() {
                return Err(lost);
            }
            let mut deferred = self.deferred.lock();
            if let Some(error) = deferred.take() {
                // A latched loss keeps the flag up; it is looked at again under this lock.
                self.troubled.store(self.lost.get().is_some(), Ordering::Release);
                return Err(error);
            }
        }
        self.context.bind().map_err(|refusal| self.unbound(refusal))
    }

    /// Begins a call that gives something back: `None` if the card is lost and there is nobody to give it
    /// to. Does not deliver a kept error, since then nothing would be given back.
    pub(super) fn enter_to_release(&self) -> Result<Option<Bound<'_>>, DeviceError> {
        if self.lost.get().is_some() {
            return Ok(None);
        }
        let bound = self.context.bind().or_else(|_| self.context.bind());
        bound.map(Some).map_err(|refusal| self.unbound(refusal))
    }

    /// Begins a call whose errors may stay untold. Does not deliver a kept error, which a later call tells.
    pub(super) fn enter_unheard(&self) -> Result<Bound<'_>, DeviceError> {
        self.lost().map_or(Ok(()), Err)?;
        self.context.bind().map_err(|refusal| self.unbound(refusal))
    }

    /// The error of a context that could not be bound, made without another call that needs it.
    fn unbound(&self, refusal: Refusal) -> DeviceError {
        let Refusal { call, code } = refusal;
        match classify(code) {
            Class::Sticky => self.refused(refusal),
            _ => DeviceError::Driver { call, code, name: code_name(self.driver, code) },
        }
    }

    /// The latched loss, if there is one.
    fn lost(&self) -> Option<DeviceError> {
        let first = self.lost.get()?;
        Some(DeviceError::Lost { device: self.info.name.clone(), first: first.clone() })
    }

    /// Turns a refusal into an error, and latches it if the card does not recover from it.
    pub(super) fn refused(&self, refusal: Refusal) -> DeviceError {
        self.refused_bytes(refusal, 0)
    }

    /// As [`Self::refused`], for a call that asked for `requested` bytes of device memory. The context is
    /// bound.
    pub(super) fn refused_bytes(&self, refusal: Refusal, requested: u64) -> DeviceError {
        let Refusal { call, code } = refusal;
        match classify(code) {
            Class::OutOfMemory => self.out_of_memory(call, requested),
            Class::Sticky => {
                let text = format!("{call}: {} ({code})", code_name(self.driver, code));
                let first = self.lost.get_or_init(|| text).clone();
                let _deferred = self.deferred.lock();
                self.troubled.store(true, Ordering::Release);
                DeviceError::Lost { device: self.info.name.clone(), first }
            }
            Class::Unsupported => DeviceError::Unsupported {
                device: self.info.name.clone(),
                what: format!("do {call} ({})", code_name(self.driver, code)),
                advice: if code == MISSING {
                    "the driver library does not export it: update the driver".to_owned()
                } else {
                    "the driver or the card does not offer it; do without what needs it".to_owned()
                },
            },
            Class::Refused => DeviceError::Driver { call, code, name: code_name(self.driver, code) },
        }
    }

    /// The error of a call for which there is no memory, with the figures of this moment.
    pub(super) fn out_of_memory(&self, call: &'static str, requested: u64) -> DeviceError {
        let figures = self.figures().unwrap_or_default();
        DeviceError::OutOfMemory {
            device: self.info.name.clone(),
            call,
            requested,
            free: figures.free,
            total: self.info.total_bytes,
        }
    }

    /// Bytes of the card that this device holds: frames, and what its pool took.
    pub(super) fn held(&self) -> u64 {
        let pool = self.pool.figures(self.driver).unwrap_or_default();
        self.memory.frame_bytes().saturating_add(pool.reserved)
    }

    /// The memory figures, within the cap. The context is bound.
    fn figures(&self) -> Result<MemoryFigures, Refusal> {
        let figures = driver_figures(self.driver)?;
        Ok(match self.cap {
            Some(cap) => capped(figures, cap, self.held()),
            None => figures,
        })
    }
}

/// What a capped device says of a larger card: pure.
fn capped(driver: MemoryFigures, cap: u64, held: u64) -> MemoryFigures {
    MemoryFigures { free: driver.free.min(cap.saturating_sub(held)), total: cap.min(driver.total) }
}

/// The granularity to use: the card's, or the wished one if it fits. Pure.
fn granularity(
    found: &Result<u64, Refusal>,
    wish: Option<u64>,
    device_string: &str,
) -> Result<u64, DeviceError> {
    let own = match found {
        Ok(bytes) => *bytes,
        // Without virtual memory it is only the unit that accounts are kept in.
        Err(_) => probe::USUAL_GRANULARITY,
    };
    match wish {
        None => Ok(own),
        Some(page) if page.is_power_of_two() && page % own == 0 => Ok(page),
        Some(page) => Err(DeviceError::BadDeviceString {
            text: format!("{device_string},page={page}"),
            why: format!("a page is a power of two and a multiple of the card's {own} bytes"),
            example: "cuda:0,page=2MiB",
        }),
    }
}

/// The driver's own figures. The context is bound.
fn driver_figures(driver: &Driver) -> Result<MemoryFigures, Refusal> {
    let (mut free, mut total) = (0_usize, 0_usize);
    // SAFETY: both pointers are valid for the call.
    unsafe { driver.mem_get_info(&raw mut free, &raw mut total)? };
    Ok(MemoryFigures { free: free as u64, total: total as u64 })
}

/// A code's name: the driver's, ours, or `unknown`.
pub(super) fn code_name(driver: &Driver, code: i32) -> String {
    if code != MISSING {
        let mut text = null();
        // SAFETY: the pointer is valid for the call; the driver answers null or a constant string.
        let answer = unsafe { driver.get_error_name(code, &raw mut text) };
        if answer.is_ok() && !text.is_null() {
            // SAFETY: not null, so a constant string of the driver, which ends in a NUL.
            return unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        }
    }
    name(code).unwrap_or("unknown").to_owned()
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryFigures, DeviceError> {
        let _bound = self.enter()?;
        self.figures().map_err(|refusal| self.refused(refusal))
    }

    fn counts(&self) -> CallCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let from = &self.counters;
        CallCounts {
            create_frame: read(&from.create_frame),
            release_frame: read(&from.release_frame),
            map: read(&from.map),
            unmap: read(&from.unmap),
            set_access: read(&from.set_access),
            device_sync: read(&from.device_sync),
            host_wait: read(&from.host_wait),
            record: read(&from.record),
            stream_wait: read(&from.stream_wait),
            copy_to_device: read(&from.copy_to_device),
            bytes_to_device: read(&from.bytes_to_device),
            copy_to_host: read(&from.copy_to_host),
            bytes_to_host: read(&from.bytes_to_host),
            launch: read(&from.launch),
            page_lock: read(&from.page_lock),
        }
    }

    fn live(&self) -> LiveObjects {
        let memory = self.memory.live();
        LiveObjects {
            frames: memory.frames,
            ranges: memory.ranges,
            mappings: memory.mappings,
            streams: self.streams.live_streams(),
            events: self.streams.live_events(),
            page_locked_bytes: self.host.locked_bytes(),
            pool_used_bytes: self.pool.live_bytes(),
        }
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let _bound = self.enter()?;
        count(&self.counters.device_sync, 1);
        // SAFETY: our context is current.
        unsafe { self.driver.ctx_synchronize() }.map_err(|refusal| self.refused(refusal))
    }

    fn defer(&self, error: DeviceError) {
        // A loss is latched already, and every call says so.
        if error.is_lost() {
            return;
        }
        let mut deferred = self.deferred.lock();
        deferred.get_or_insert(error);
        self.troubled.store(true, Ordering::Release);
    }
}

impl Clock for CudaDevice {
    fn now(&self) -> ModelTime {
        ModelTime(u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn tells_elapsed(&self) -> bool {
        self.streams.has_timed_events()
    }

    fn set_now(&self, _time: ModelTime) {}

    unsafe fn charge_compute(&self, stream: StreamId, _duration: Duration) -> Result<(), DeviceError> {
        self.raw_stream("charge_compute", stream).map(|_| ())
    }

    fn charge_host(&self, _duration: Duration) {}

    fn schedule_read(&self, _bytes: u64) -> ModelTime {
        self.now()
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("name", &self.info.name).finish_non_exhaustive()
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Every handle holds the device, so streams, frames and allocations are gone; what remains is the
        // device's own. A lost context takes it along.
        if let Ok(Some(_bound)) = self.enter_to_release() {
            self.kernels.unload(self.driver);
            self.pool.close(self.driver);
        }
    }
}

/// Properties of a frame on `device`.
pub(super) fn frame_properties(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    // SAFETY: all zeros is a valid value: null pointers, no flags, and enums whose zero is a variant.
    let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = location(device);
    prop.win32HandleMetaData = null_mut();
    prop
}

/// The place `device`.
pub(super) fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{GIB, MIB};

    #[test]
    fn a_cap_makes_a_large_card_a_small_one() {
        let card = MemoryFigures { free: 70 * GIB, total: 80 * GIB };
        assert_eq!(capped(card, 8 * GIB, 0), MemoryFigures { free: 8 * GIB, total: 8 * GIB });
        assert_eq!(capped(card, 8 * GIB, 3 * GIB).free, 5 * GIB);
        assert_eq!(capped(card, 8 * GIB, 9 * GIB).free, 0);
        let full = MemoryFigures { free: GIB, total: 80 * GIB };
        assert_eq!(capped(full, 8 * GIB, 0).free, GIB, "what others hold is not free");
    }

    #[test]
    fn a_page_that_does_not_fit_the_card_is_refused() {
        assert_eq!(granularity(&Ok(2 * MIB), None, "cuda:0").unwrap(), 2 * MIB);
        assert_eq!(granularity(&Ok(2 * MIB), Some(8 * MIB), "cuda:0").unwrap(), 8 * MIB);
        for page in [MIB, 3 * MIB, 0] {
            let error = granularity(&Ok(2 * MIB), Some(page), "cuda:0").unwrap_err();
            assert!(error.to_string().contains("multiple of the card's"), "{error}");
        }
    }
}
