//! Virtual memory, plain allocations, page-locked host memory, figures.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationProp};
use vram_pager::device::{Device, HostMemory, VirtualMemory};
use vram_pager::units::{DeviceAddress, DeviceRange};

use crate::codes::{
    ALREADY_REGISTERED, INVALID_DEVICE, INVALID_VALUE, NOT_REGISTERED, NOT_SUPPORTED, OUT_OF_MEMORY,
};
use crate::settings;
use crate::state::{Answer, Card, Fail, FrameEntry, PlainEntry, State, state, write};

pub fn range(address: u64, bytes: usize) -> DeviceRange {
    DeviceRange::new(DeviceAddress(address), bytes as u64)
}

fn check_supported(state: &State) -> Answer {
    match state.settings.virtual_memory {
        settings::VirtualMemory::Yes => Ok(()),
        settings::VirtualMemory::No | settings::VirtualMemory::Refuse => Err(Fail::plain(NOT_SUPPORTED)),
    }
}

/// Sizes and addresses are multiples of the granularity, and not zero.
fn check_whole(state: &State, what: &str, number: u64) -> Answer {
    let page = state.settings.page;
    if number == 0 || !number.is_multiple_of(page) {
        let why = format!("{what} {number:#x} is no multiple of the granularity {page:#x}");
        return Err(Fail::misuse(INVALID_VALUE, why));
    }
    Ok(())
}

fn check_flags(flags: c_ulonglong) -> Answer {
    if flags == 0 { Ok(()) } else { Err(Fail::misuse(INVALID_VALUE, "flags must be 0")) }
}

/// Reads what a caller points to; null is refused.
fn read<T: Copy>(from: *const T) -> Result<T, Fail> {
    if from.is_null() {
        return Err(Fail::misuse(INVALID_VALUE, "a parameter's pointer is null"));
    }
    // SAFETY: not null, and the caller of the driver's call passes a valid pointer.
    Ok(unsafe { from.read() })
}

/// Checks that properties ask for pinned memory of a card that is there. The enums are compared as
/// numbers, since a wrong caller may pass any.
fn check_properties(state: &State, prop: *const CUmemAllocationProp) -> Answer {
    if prop.is_null() {
        return Err(Fail::misuse(INVALID_VALUE, "the properties are null"));
    }
    let numbers = prop.cast::<c_int>();
    // SAFETY: the struct begins with four ints: type, handle types, location type, location id.
    let [kind, handles, place, id] = [0, 1, 2, 3].map(|index| unsafe { numbers.add(index).read() });
    if kind != 1 || handles != 0 || place != 1 {
        let why = format!("type {kind}, handle types {handles}, location type {place} are not offered");
        return Err(Fail::misuse(INVALID_VALUE, why));
    }
    if id < 0 || id >= state.settings.devices {
        return Err(Fail::plain(INVALID_DEVICE));
    }
    Ok(())
}

/// The mappings that make up `address .. address + bytes` exactly.
fn whole_mappings(card: &Card, address: u64, bytes: u64) -> Result<Vec<DeviceRange>, Fail> {
    let end = address.saturating_add(bytes);
    let mut next = address;
    let mut all = Vec::new();
    for (start, length) in card.mappings.range(address..end) {
        if *start != next {
            break;
        }
        all.push(DeviceRange::new(DeviceAddress(*start), *length));
        next += length;
    }
    if next != end || all.is_empty() {
        let why = format!("{address:#x}+{bytes:#x} does not consist of whole mappings");
        return Err(Fail::misuse(INVALID_VALUE, why));
    }
    Ok(all)
}

/// Makes memory for `cuMemAlloc`.
fn allocate_plain(card: &mut Card, bytes: u64) -> Result<u64, Fail> {
    let device = card.device.clone();
    let range = device.reserve(bytes)?;
    let outcome = device.create_frame(bytes).and_then(|frame| {
        // SAFETY: a fresh range and a fresh frame of one length, used by nobody.
        let mapped = unsafe { device.map(range, frame).and_then(|()| device.set_access(range)) };
        mapped.map(|()| frame).inspect_err(|_| {
            // SAFETY: as above; what was not mapped answers an error, which changes nothing.
            let _ = unsafe { (device.unmap(range), device.release_frame(frame)) };
        })
    });
    match outcome {
        Ok(frame) => {
            card.plain.insert(range.start.0, PlainEntry { range, frame });
            Ok(range.start.0)
        }
        Err(error) => {
            // SAFETY: nothing is mapped in it.
            let _ = unsafe { device.free(range) };
            Err(error.into())
        }
    }
}

driver_calls! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let figures = state().current()?.device.memory()?;
        write(free, usize::try_from(figures.free).unwrap_or(usize::MAX))?;
        write(total, usize::try_from(figures.total).unwrap_or(usize::MAX))
    }

    fn cuMemGetAllocationGranularity(bytes: *mut usize, prop: *const CUmemAllocationProp, option: c_int) {
        let state = state();
        check_supported(&state)?;
        check_properties(&state, prop)?;
        if !(0..=1).contains(&option) {
            return Err(Fail::misuse(INVALID_VALUE, format!("{option} is no granularity")));
        }
        write(bytes, usize::try_from(state.settings.page).unwrap_or(0))
    }

    fn cuMemAddressReserve(
        address: *mut u64, bytes: usize, alignment: usize, _wish: u64, flags: c_ulonglong,
    ) {
        let mut state = state();
        check_supported(&state)?;
        check_whole(&state, "the size", bytes as u64)?;
        check_flags(flags)?;
        if alignment != 0 && !alignment.is_power_of_two() {
            let why = format!("an alignment of {alignment:#x} is not offered");
            return Err(Fail::misuse(INVALID_VALUE, why));
        }
        // A range begins at a multiple of the granularity; for more, a longer one is reserved.
        let more = if alignment as u64 > state.settings.page { alignment as u64 } else { 0 };
        let card = state.current()?;
        let whole = card.device.reserve(bytes as u64 + more)?;
        let start = whole.start.0.next_multiple_of(more.max(1));
        card.whole_ranges.insert(start, whole);
        card.ranges.insert(start, bytes as u64);
        write(address, start)
    }

    fn cuMemAddressFree(address: u64, bytes: usize) {
        let mut state = state();
        check_supported(&state)?;
        let card = state.current()?;
        if card.ranges.get(&address) != Some(&(bytes as u64)) {
            let why = format!("{address:#x}+{bytes:#x} is no reserved range");
            return Err(Fail::misuse(INVALID_VALUE, why));
        }
        if let Some((mapping, _)) = card.mappings.range(address..address + bytes as u64).next() {
            return Err(Fail::misuse(INVALID_VALUE, format!("{mapping:#x} in the range is still mapped")));
        }
        let whole = card.whole_ranges.get(&address).copied().unwrap_or(range(address, bytes));
        // SAFETY: a reserved range in which nothing is mapped.
        unsafe { card.device.free(whole)? };
        card.whole_ranges.remove(&address);
        card.ranges.remove(&address);
        Ok(())
    }

    fn cuMemCreate(handle: *mut u64, bytes: usize, prop: *const CUmemAllocationProp, flags: c_ulonglong) {
        let mut state = state();
        check_supported(&state)?;
        check_properties(&state, prop)?;
        check_whole(&state, "the size", bytes as u64)?;
        check_flags(flags)?;
        let number = state.handle() as u64;
        let card = state.current()?;
        let id = card.device.create_frame(bytes as u64)?;
        card.frames.insert(number, FrameEntry { id, bytes: bytes as u64 });
        write(handle, number)
    }

    fn cuMemRelease(handle: u64) {
        let mut state = state();
        check_supported(&state)?;
        let card = state.current()?;
        let Some(frame) = card.frames.remove(&handle) else {
            return Err(Fail::misuse(INVALID_VALUE, format!("{handle:#x} is no allocation handle")));
        };
        // SAFETY: live until now, and not named again; its mappings keep the memory.
        unsafe { card.device.release_frame(frame.id)? };
        Ok(())
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        let mut state = state();
        check_supported(&state)?;
        check_whole(&state, "the address", address)?;
        check_whole(&state, "the size", bytes as u64)?;
        check_flags(flags)?;
        if offset != 0 {
            return Err(Fail::misuse(INVALID_VALUE, "the offset must be 0"));
        }
        let card = state.current()?;
        let Some(frame) = card.frames.get(&handle) else {
            return Err(Fail::misuse(INVALID_VALUE, format!("{handle:#x} is no allocation handle")));
        };
        if frame.bytes != bytes as u64 {
            let why = format!("the handle has {:#x} bytes, the mapping {bytes:#x}", frame.bytes);
            return Err(Fail::misuse(INVALID_VALUE, why));
        }
        // SAFETY: the device itself checks the place and the frame.
        unsafe { card.device.map(range(address, bytes), frame.id)? };
        card.mappings.insert(address, bytes as u64);
        Ok(())
    }

    fn cuMemSetAccess(address: u64, bytes: usize, access: *const CUmemAccessDesc, count: usize) {
        let mut state = state();
        check_supported(&state)?;
        if access.is_null() || count != 1 {
            return Err(Fail::misuse(INVALID_VALUE, "access is set for one card at a time"));
        }
        let numbers = access.cast::<c_int>();
        // SAFETY: the struct is three ints: location type, location id, flags.
        let [place, id, flags] = [0, 1, 2].map(|index| unsafe { numbers.add(index).read() });
        if place != 1 || id < 0 || id >= state.settings.devices || flags != 3 {
            let why = format!("location type {place}, id {id}, flags {flags} are not offered");
            return Err(Fail::misuse(INVALID_VALUE, why));
        }
        let card = state.current()?;
        whole_mappings(card, address, bytes as u64)?;
        // SAFETY: the device itself checks that nothing in flight uses the run.
        unsafe { card.device.set_access(range(address, bytes))? };
        Ok(())
    }

    fn cuMemUnmap(address: u64, bytes: usize) {
        let mut state = state();
        check_supported(&state)?;
        let card = state.current()?;
        for mapping in whole_mappings(card, address, bytes as u64)? {
            // SAFETY: the device itself checks that nothing in flight uses it.
            unsafe { card.device.unmap(mapping)? };
            card.mappings.remove(&mapping.start.0);
        }
        Ok(())
    }

    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        let mut state = state();
        if bytes == 0 || address.is_null() {
            return Err(Fail::misuse(INVALID_VALUE, "no bytes, or nowhere to put the address"));
        }
        let whole = (bytes as u64).checked_next_multiple_of(state.settings.page);
        let whole = whole.ok_or(Fail::plain(OUT_OF_MEMORY))?;
        let allocated = allocate_plain(state.current()?, whole)?;
        write(address, allocated)
    }

    fn cuMemFree_v2(address: u64) {
        if address == 0 {
            return Ok(());
        }
        // The driver waits for the card here.
        crate::context::synchronize()?;
        let mut state = state();
        let card = state.current()?;
        if crate::pool::free_now(card, address)? {
            return Ok(());
        }
        let Some(block) = card.plain.remove(&address) else {
            return Err(Fail::misuse(INVALID_VALUE, format!("{address:#x} is no allocation")));
        };
        // SAFETY: the card is idle, and the caller uses the memory no more.
        unsafe {
            card.device.unmap(block.range)?;
            card.device.release_frame(block.frame)?;
            card.device.free(block.range)?;
        }
        Ok(())
    }

    fn cuMemHostRegister_v2(start: *mut c_void, bytes: usize, flags: c_uint) {
        let mut state = state();
        if start.is_null() || bytes == 0 || flags & !0xF != 0 {
            return Err(Fail::misuse(INVALID_VALUE, format!("{bytes} bytes at {start:p}, flags {flags:#x}")));
        }
        let card = state.current()?;
        let (from, to) = pages(start as usize, bytes);
        let overlap = card.host.iter().any(|(other, length)| {
            let (other_from, other_to) = pages(*other, *length);
            other_from < to && from < other_to
        });
        if overlap {
            let why = format!("{bytes} bytes at {start:p} overlap a registered block");
            return Err(Fail::misuse(ALREADY_REGISTERED, why));
        }
        // SAFETY: the caller keeps the memory mapped; whole pages around it are registered.
        unsafe { card.device.page_lock(from as *mut u8, (to - from) as u64)? };
        card.host.insert(start as usize, bytes);
        Ok(())
    }

    fn cuMemHostUnregister(start: *mut c_void) {
        let mut state = state();
        let card = state.current()?;
        let Some(bytes) = card.host.get(&(start as usize)).copied() else {
            return Err(Fail::misuse(NOT_REGISTERED, format!("no registered block begins at {start:p}")));
        };
        let (from, _) = pages(start as usize, bytes);
        // SAFETY: registered by us; the device checks that no copy in flight uses it.
        unsafe { card.device.page_unlock(from as *mut u8)? };
        card.host.remove(&(start as usize));
        Ok(())
    }

    fn cuMemGetAccess(flags: *mut c_ulonglong, location: *const [c_int; 2], address: u64) {
        let mut state = state();
        check_supported(&state)?;
        read(location)?;
        let card = state.current()?;
        let mapped = card.mappings.range(..=address).next_back();
        let inside = mapped.is_some_and(|(start, bytes)| address - start < *bytes);
        write(flags, if inside { 3 } else { 0 })
    }
}

/// The whole host pages around a block.
fn pages(start: usize, bytes: usize) -> (usize, usize) {
    let page = 4096;
    (start / page * page, (start + bytes).div_ceil(page) * page)
}
