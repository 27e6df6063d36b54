//! The activation pool: a driver pool of our own, or plain allocations where the driver has none.
//!
//! A driver's pool keeps nothing by default, so ours has a release threshold above everything, and its
//! account is the driver's reserved figure. It is not the device's default pool, which other libraries of
//! the process use and change.
//!
//! Without pools an allocation is a plain one. A plain free waits for the whole device, so a freed block
//! first waits in a list for an event on its stream, and goes back when that has passed.
//!
//! One lock guards the table of live allocations and the list; the driver is called outside it.

#![expect(unsafe_code, reason = "calls into the driver library")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::card::{CudaDevice, location};
use super::code::{Class, NOT_READY, classify};
use super::driver::{Driver, MISSING, Refusal, insist};
use super::stream::EVENT_FLAGS;
use crate::device::{ActivationPool, DeviceError, PoolFigures, StreamId};
use crate::units::{DeviceAddress, DeviceRange};

/// What the driver's pool grows by at least, as far as is known.
const POOL_STEP: u64 = 2 << 20;

/// The pool of one card.
pub(super) struct Pool {
    /// The driver's pool; null without one.
    native: sys::CUmemoryPool,
    state: Mutex<PoolState>,
}

// SAFETY: a pool is used by any thread, says the driver; the handle is only a name.
unsafe impl Send for Pool {}
// SAFETY: as above; the state has its lock.
unsafe impl Sync for Pool {}

#[derive(Default)]
struct PoolState {
    /// Live allocations, address to bytes.
    live: HashMap<u64, u64>,
    live_bytes: u64,
    /// Freed plain allocations whose streams may still use them.
    leaving: Vec<Leaving>,
}

struct Leaving {
    address: u64,
    bytes: u64,
    event: sys::CUevent,
}

impl Pool {
    /// Makes a pool, or one of plain allocations if the driver refuses. The context is bound.
    pub(super) fn new(driver: &Driver, device: sys::CUdevice) -> Self {
        let native = native_pool(driver, device).unwrap_or(null_mut());
        Self { native, state: Mutex::new(PoolState::default()) }
    }

    /// Whether the driver's stream-ordered pool is behind it.
    pub(super) fn is_native(&self) -> bool {
        !self.native.is_null()
    }

    /// Bytes of live allocations, as asked for.
    pub(super) fn live_bytes(&self) -> u64 {
        self.state.lock().live_bytes
    }

    /// What the pool holds. The context is bound.
    pub(super) fn figures(&self, driver: &Driver) -> Result<PoolFigures, Refusal> {
        use sys::CUmemPool_attribute as Attribute;
        if self.is_native() {
            return Ok(PoolFigures {
                reserved: self.figure(driver, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
                used: self.figure(driver, Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            });
        }
        let state = self.state.lock();
        let leaving: u64 = state.leaving.iter().map(|block| block.bytes).sum();
        Ok(PoolFigures { reserved: state.live_bytes + leaving, used: state.live_bytes })
    }

    fn figure(&self, driver: &Driver, attribute: sys::CUmemPool_attribute) -> Result<u64, Refusal> {
        let mut value = 0_u64;
        // SAFETY: the pool is live; these attributes are 64-bit numbers.
        unsafe { driver.mem_pool_get_attribute(self.native, attribute, (&raw mut value).cast::<c_void>())? };
        Ok(value)
    }

    /// Gives freed plain allocations back: those whose streams have passed them, or all, waiting for them.
    fn reap(&self, driver: &Driver, wait: bool) -> Result<(), Refusal> {
        if self.is_native() {
            return Ok(());
        }
        let leaving = std::mem::take(&mut self.state.lock().leaving);
        let mut outcome = Ok(());
        let mut kept = Vec::new();
        for block in leaving {
            // SAFETY: the list owns the event alone.
            let query = || unsafe { driver.event_query(block.event) };
            // SAFETY: as above.
            let synchronize = || unsafe { driver.event_synchronize(block.event) };
            let passed = if wait { insist(synchronize) } else { query() };
            match passed {
                Ok(()) => {
                    // SAFETY: the stream has passed the point where the block was freed.
                    let freed = insist(|| unsafe { driver.mem_free(block.address) });
                    // SAFETY: the event is ours and not named again.
                    let destroyed = insist(|| unsafe { driver.event_destroy(block.event) });
                    outcome = outcome.and(freed).and(destroyed);
                }
                Err(Refusal { code: NOT_READY, .. }) => kept.push(block),
                Err(refusal) => {
                    outcome = outcome.and(Err(refusal));
                    kept.push(block);
                }
            }
        }
        self.state.lock().leaving.append(&mut kept);
        outcome
    }

    /// Gives everything back when the card is closed. The context is bound.
    pub(super) fn close(&self, driver: &Driver) {
        // The device is going away and nobody is left to tell of a refusal.
        let _ = self.reap(driver, true);
        if self.is_native() {
            // SAFETY: the pool is ours; allocations still in it keep it until they are freed.
            let _ = insist(|| unsafe { driver.mem_pool_destroy(self.native) });
        }
    }

    fn note(&self, address: u64, bytes: u64) {
        let mut state = self.state.lock();
        state.live.insert(address, bytes);
        state.live_bytes += bytes;
    }

    fn forget(&self, range: DeviceRange) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        match state.live.remove(&range.start.0) {
            Some(bytes) if bytes == range.bytes => {
                state.live_bytes -= bytes;
                Ok(())
            }
            other => {
                if let Some(bytes) = other {
                    state.live.insert(range.start.0, bytes);
                }
                Err(DeviceError::Misuse {
                    call: "pool_free",
                    why: format!("{range:?} is no live allocation of the pool"),
                })
            }
        }
    }
}

/// Makes the driver's pool. The context is bound.
fn native_pool(driver: &Driver, device: sys::CUdevice) -> Result<sys::CUmemoryPool, Refusal> {
    if !driver.has_pools() {
        return Err(Refusal { call: "cuMemPoolCreate", code: MISSING });
    }
    // SAFETY: all zeros is a valid value: no flags, no pointers, and enums whose zero is a variant.
    let mut props: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = location(device);
    let mut pool = null_mut();
    // SAFETY: both pointers are valid for the call.
    unsafe { driver.mem_pool_create(&raw mut pool, &raw const props)? };
    let mut keep_all = u64::MAX;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the pool is live; the attribute is a 64-bit number.
    let set = unsafe { driver.mem_pool_set_attribute(pool, attribute, (&raw mut keep_all).cast::<c_void>()) };
    if let Err(refusal) = set {
        // SAFETY: nothing was taken from the pool.
        let _ = insist(|| unsafe { driver.mem_pool_destroy(pool) });
        return Err(refusal);
    }
    Ok(pool)
}

/// What a capped device lets its pool do for `bytes` more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Growth {
    /// Take them: idle memory of the pool may serve, and growth would fit.
    Fits,
    /// Hand idle memory back first; then growth fits.
    TrimFirst,
    /// There is no room, whatever is trimmed.
    Never,
}

/// Decides about growth under a cap: pure. `frames` are the bytes of live frames.
fn growth(cap: u64, frames: u64, pool: PoolFigures, bytes: u64) -> Growth {
    let step = bytes.checked_next_multiple_of(POOL_STEP).unwrap_or(u64::MAX);
    let with = |held: u64| frames.saturating_add(held).saturating_add(step);
    if frames.saturating_add(pool.used).saturating_add(bytes) > cap {
        Growth::Never
    } else if with(pool.reserved) <= cap || pool.reserved.saturating_sub(pool.used) >= bytes {
        // Idle memory that may serve is not handed back for somebody else to take.
        Growth::Fits
    } else {
        Growth::TrimFirst
    }
}

impl CudaDevice {
    /// Refuses an allocation that the cap has no room for, and makes room by trimming where that helps.
    fn make_pool_room(&self, bytes: u64) -> Result<(), DeviceError> {
        let Some(cap) = self.cap else { return Ok(()) };
        let figures = self.pool.figures(self.driver).map_err(|refusal| self.refused(refusal))?;
        match growth(cap, self.memory.frame_bytes(), figures, bytes) {
            Growth::Fits => Ok(()),
            Growth::TrimFirst => self.trim(0),
            Growth::Never => Err(self.out_of_memory("pool_allocate", bytes)),
        }
    }

    /// Whether a stream is known to be captured. The context is bound.
    fn is_captured(&self, stream: sys::CUstream) -> bool {
        let mut status = 0;
        // SAFETY: a live stream, says the caller; the pointer is valid for the call.
        let answer = unsafe { self.driver.stream_is_capturing(stream, &raw mut status) };
        answer.is_ok() && status != 0
    }

    fn trim(&self, keep: u64) -> Result<(), DeviceError> {
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        let answer = if self.pool.is_native() {
            // SAFETY: the pool is live.
            unsafe { self.driver.mem_pool_trim_to(self.pool.native, keep) }
        } else {
            self.pool.reap(self.driver, false)
        };
        answer.map_err(|refusal| self.refused(refusal))
    }

    /// Frees an allocation that is not in the table. The context is bound.
    fn free_in_order(&self, address: u64, bytes: u64, stream: sys::CUstream) -> Result<(), Refusal> {
        if self.pool.is_native() {
            // SAFETY: a live allocation of the pool, whose other uses are ordered before this point of the
            // stream; both are the caller's promise.
            return unsafe { self.driver.mem_free_async(address, stream) };
        }
        if !self.driver.has_events() {
            // SAFETY: the stream is live; nothing uses the block once it is done.
            return unsafe {
                self.driver.wait_for_stream(stream).and_then(|()| self.driver.mem_free(address))
            };
        }
        let mut event = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe { self.driver.event_create(&raw mut event, EVENT_FLAGS)? };
        // SAFETY: the event was made above, the stream is live.
        if let Err(refusal) = unsafe { self.driver.event_record(event, stream) } {
            // SAFETY: ours, not named again.
            let _ = insist(|| unsafe { self.driver.event_destroy(event) });
            return Err(refusal);
        }
        self.pool.state.lock().leaving.push(Leaving { address, bytes, event });
        Ok(())
    }
}

impl ActivationPool for CudaDevice {
    unsafe fn pool_allocate(&self, bytes: u64, stream: StreamId) -> Result<DeviceRange, DeviceError> {
        let length = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0);
        let Some(length) = length else {
            return Err(DeviceError::InvalidArgument {
                call: "pool_allocate",
                why: format!("{bytes} bytes are no allocation"),
            });
        };
        let stream = self.raw_stream("pool_allocate", stream)?;
        let _bound = self.enter()?;
        self.pool.reap(self.driver, false).map_err(|refusal| self.refused(refusal))?;
        self.make_pool_room(bytes)?;
        let mut address = 0;
        let answer = if self.pool.is_native() {
            // SAFETY: the pool is live, and so is the stream, says the caller.
            unsafe {
                self.driver.mem_alloc_from_pool_async(&raw mut address, length, self.pool.native, stream)
            }
        } else {
            // SAFETY: the pointer is valid for the call.
            unsafe { self.driver.mem_alloc(&raw mut address, length) }
        };
        answer.map_err(|refusal| self.refused_bytes(refusal, bytes))?;
        if self.cap.is_some_and(|cap| self.held() > cap) {
            // The pool grew past the cap (it grows in steps of its own): undo it.
            let error = self.out_of_memory("pool_allocate", bytes);
            self.free_in_order(address, bytes, stream).map_err(|refusal| self.refused(refusal))?;
            self.trim(0)?;
            return Err(error);
        }
        self.pool.note(address, bytes);
        Ok(DeviceRange::new(DeviceAddress(address), bytes))
    }

    unsafe fn pool_free(&self, range: DeviceRange, stream: StreamId) -> Result<(), DeviceError> {
        let stream = self.raw_stream("pool_free", stream)?;
        let bound = self.enter_to_release();
        if matches!(bound, Ok(Some(_))) && self.is_captured(stream) {
            return Err(DeviceError::Capturing { call: "pool_free" });
        }
        self.pool.forget(range)?;
        let Some(_bound) = bound? else { return Ok(()) };
        match self.free_in_order(range.start.0, range.bytes, stream) {
            Ok(()) => Ok(()),
            // Rather wait for the stream, once, than lose the memory.
            Err(refusal) if classify(refusal.code) != Class::Sticky => self.give_back(|| {
                // SAFETY: the stream is live; a plain free takes pool memory too, and nothing uses it once
                // the stream is done.
                unsafe {
                    self.driver.wait_for_stream(stream)?;
                    self.driver.mem_free(range.start.0)
                }
            }),
            Err(refusal) => Err(self.refused(refusal)),
        }
    }

    fn pool_figures(&self) -> Result<PoolFigures, DeviceError> {
        let _bound = self.enter()?;
        self.pool.reap(self.driver, false).map_err(|refusal| self.refused(refusal))?;
        self.pool.figures(self.driver).map_err(|refusal| self.refused(refusal))
    }

    fn pool_trim(&self, keep: u64) -> Result<(), DeviceError> {
        let _bound = self.enter()?;
        self.trim(keep)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MIB;

    #[test]
    fn a_capped_pool_grows_only_inside_the_cap() {
        let pool = |reserved, used| PoolFigures { reserved: reserved * MIB, used: used * MIB };
        let ask = |frames, pool, bytes| growth(100 * MIB, frames * MIB, pool, bytes * MIB);
        assert_eq!(ask(0, pool(0, 0), 100), Growth::Fits);
        assert_eq!(ask(0, pool(0, 0), 101), Growth::Never);
        assert_eq!(ask(60, pool(40, 0), 30), Growth::Fits, "idle memory serves");
        assert_eq!(ask(60, pool(39, 20), 20), Growth::TrimFirst);
        assert_eq!(ask(60, pool(40, 20), 30), Growth::Never);
        assert_eq!(growth(MIB, 0, pool(0, 0), u64::MAX), Growth::Never);
    }
}
