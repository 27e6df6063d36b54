//! Stream-ordered pools. The emulated device has one pool a card; each driver pool keeps its own account
//! of what is used, and they share what is reserved.
//!
//! As the driver does, a pool gives back what exceeds its release threshold whenever the host waits.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::CUmemPoolProps;
use vram_pager::device::ActivationPool;
use vram_pager::units::{DeviceAddress, DeviceRange};

use crate::codes::{INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED};
use crate::state::{Answer, Card, Fail, PoolBlock, PoolEntry, State, state, write};
use crate::streams::{order, refuse_capturing, stream_of};

/// What an allocation is rounded up to in the account.
const ROUNDING: u64 = 512;

fn check_supported(state: &State) -> Answer {
    if state.settings.pools { Ok(()) } else { Err(Fail::plain(NOT_SUPPORTED)) }
}

fn pool_of(card: &mut Card, pool: *mut c_void) -> Result<&mut PoolEntry, Fail> {
    let handle = pool as usize;
    card.pools.get_mut(&handle).ok_or_else(|| Fail::misuse(INVALID_HANDLE, format!("{handle:#x} is no pool")))
}

/// Gives back what exceeds the largest threshold: what the driver does when the host waits.
pub fn trim_to_thresholds(card: &Card) -> Answer {
    let keep = card.pools.values().map(|pool| pool.threshold).max().unwrap_or(0);
    if card.device.pool_figures()?.reserved > keep {
        card.device.pool_trim(keep)?;
    }
    Ok(())
}

fn allocate(card: &mut Card, bytes: usize, pool: usize, stream: *mut c_void) -> Result<u64, Fail> {
    if bytes == 0 {
        return Err(Fail::misuse(INVALID_VALUE, "no bytes were asked for"));
    }
    let stream = stream_of(card, stream)?;
    order(card, stream)?;
    // SAFETY: the stream is live.
    let range = unsafe { card.device.pool_allocate(bytes as u64, stream.id)? };
    let reserved = card.device.pool_figures()?.reserved;
    card.pool_blocks.insert(range.start.0, PoolBlock { bytes: bytes as u64, pool });
    if let Some(pool) = card.pools.get_mut(&pool) {
        pool.used += (bytes as u64).next_multiple_of(ROUNDING);
        pool.used_high = pool.used_high.max(pool.used);
        pool.reserved_high = pool.reserved_high.max(reserved);
    }
    Ok(range.start.0)
}

fn forget(card: &mut Card, address: u64) -> Option<PoolBlock> {
    let block = card.pool_blocks.remove(&address)?;
    if let Some(pool) = card.pools.get_mut(&block.pool) {
        pool.used -= block.bytes.next_multiple_of(ROUNDING);
    }
    Some(block)
}

/// Frees pool memory on an idle card; false if there is none at the address.
pub fn free_now(card: &mut Card, address: u64) -> Result<bool, Fail> {
    let Some(block) = forget(card, address) else { return Ok(false) };
    let range = DeviceRange::new(DeviceAddress(address), block.bytes);
    // SAFETY: a live allocation, used by nobody: the card is idle.
    unsafe { card.device.pool_free(range, card.legacy)? };
    Ok(true)
}

driver_calls! {
    fn cuMemPoolCreate(pool: *mut *mut c_void, props: *const CUmemPoolProps) {
        let mut state = state();
        check_supported(&state)?;
        if props.is_null() {
            return Err(Fail::misuse(INVALID_VALUE, "the properties are null"));
        }
        let numbers = props.cast::<c_int>();
        // SAFETY: the struct begins with four ints: type, handle types, location type, location id.
        let [kind, handles, place, id] = [0, 1, 2, 3].map(|index| unsafe { numbers.add(index).read() });
        if kind != 1 || handles != 0 || place != 1 {
            let why = format!("type {kind}, handle types {handles}, location type {place} are not offered");
            return Err(Fail::misuse(INVALID_VALUE, why));
        }
        if id < 0 || id >= state.settings.devices {
            return Err(Fail::plain(INVALID_DEVICE));
        }
        let handle = state.handle();
        state.current()?.pools.insert(handle, PoolEntry::default());
        write(pool, handle as *mut c_void)
    }

    fn cuMemPoolDestroy(pool: *mut c_void) {
        let mut state = state();
        check_supported(&state)?;
        let card = state.current()?;
        pool_of(card, pool)?;
        if pool as usize == card.default_pool {
            return Err(Fail::misuse(INVALID_VALUE, "the default pool cannot be destroyed"));
        }
        card.pools.remove(&(pool as usize));
        trim_to_thresholds(card)
    }

    fn cuDeviceGetDefaultMemPool(pool: *mut *mut c_void, _device: c_int) {
        let mut state = state();
        check_supported(&state)?;
        let handle = state.current()?.default_pool;
        write(pool, handle as *mut c_void)
    }

    fn cuMemPoolSetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void) {
        let mut state = state();
        check_supported(&state)?;
        if value.is_null() {
            return Err(Fail::misuse(INVALID_VALUE, "the value's pointer is null"));
        }
        let pool = pool_of(state.current()?, pool)?;
        match attribute {
            // SAFETY: these three are ints.
            1..=3 => pool.reuse[usize::try_from(attribute).unwrap_or(1) - 1] = unsafe { value.cast::<c_int>().read() },
            // SAFETY: the threshold and the marks are 64-bit numbers.
            4 => pool.threshold = unsafe { value.cast::<u64>().read() },
            6 => pool.reserved_high = 0,
            8 => pool.used_high = pool.used,
            _ => return Err(Fail::misuse(INVALID_VALUE, format!("attribute {attribute} cannot be set"))),
        }
        Ok(())
    }

    fn cuMemPoolGetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void) {
        let mut state = state();
        check_supported(&state)?;
        let card = state.current()?;
        let reserved = card.device.pool_figures()?.reserved;
        let pool = pool_of(card, pool)?;
        let number = match attribute {
            1..=3 => return write(value.cast::<c_int>(), pool.reuse[usize::try_from(attribute).unwrap_or(1) - 1]),
            4 => pool.threshold,
            5 => reserved,
            6 => pool.reserved_high.max(reserved),
            7 => pool.used,
            8 => pool.used_high,
            _ => return Err(Fail::misuse(INVALID_VALUE, format!("{attribute} is no attribute"))),
        };
        write(value.cast::<u64>(), number)
    }

    fn cuMemPoolTrimTo(pool: *mut c_void, keep: usize) {
        let mut state = state();
        check_supported(&state)?;
        let card = state.current()?;
        pool_of(card, pool)?;
        card.device.pool_trim(keep as u64)?;
        Ok(())
    }

    fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: *mut c_void, stream: *mut c_void) {
        let mut state = state();
        check_supported(&state)?;
        if address.is_null() {
            return Err(Fail::misuse(INVALID_VALUE, "nowhere to put the address"));
        }
        refuse_capturing(&state, stream)?;
        let card = state.current()?;
        pool_of(card, pool)?;
        let allocated = allocate(card, bytes, pool as usize, stream)?;
        write(address, allocated)
    }

    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: *mut c_void) {
        let mut state = state();
        check_supported(&state)?;
        if address.is_null() {
            return Err(Fail::misuse(INVALID_VALUE, "nowhere to put the address"));
        }
        let card = state.current()?;
        let pool = card.default_pool;
        let allocated = allocate(card, bytes, pool, stream)?;
        write(address, allocated)
    }

    fn cuMemFreeAsync(address: u64, stream: *mut c_void) {
        let mut state = state();
        check_supported(&state)?;
        // A graph frees only what a graph allocated.
        refuse_capturing(&state, stream)?;
        let card = state.current()?;
        let stream = stream_of(card, stream)?;
        let Some(bytes) = card.pool_blocks.get(&address).map(|block| block.bytes) else {
            return Err(Fail::misuse(INVALID_VALUE, format!("{address:#x} is no allocation of a pool")));
        };
        order(card, stream)?;
        let range = DeviceRange::new(DeviceAddress(address), bytes);
        // SAFETY: a live allocation; the caller has ordered other streams' uses before this one.
        unsafe { card.device.pool_free(range, stream.id)? };
        forget(card, address);
        Ok(())
    }
}
