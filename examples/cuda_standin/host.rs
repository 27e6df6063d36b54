//! Page-locked host memory that the driver itself allocates.

use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;

use vram_pager::device::HostMemory;

use crate::codes::{INVALID_VALUE, OUT_OF_MEMORY};
use crate::state::{Answer, Fail, state, write};

fn whole_pages(bytes: usize) -> usize {
    bytes.next_multiple_of(4096)
}

fn allocate(start: *mut *mut c_void, bytes: usize) -> Answer {
    if start.is_null() || bytes == 0 || bytes > isize::MAX as usize {
        return Err(Fail::misuse(INVALID_VALUE, format!("{bytes} bytes, or nowhere to put the address")));
    }
    let length = whole_pages(bytes);
    let mut state = state();
    let card = state.current()?;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing that exists.
    let block = unsafe {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(null_mut(), length, access, kind, -1, 0)
    };
    if block == libc::MAP_FAILED {
        return Err(Fail::plain(OUT_OF_MEMORY));
    }
    // SAFETY: mapped above, and unmapped only after it was unlocked.
    if let Err(error) = unsafe { card.device.page_lock(block.cast(), length as u64) } {
        // SAFETY: ours, and used by nobody.
        unsafe { libc::munmap(block, length) };
        return Err(error.into());
    }
    card.host_blocks.insert(block as usize, bytes);
    write(start, block)
}

driver_calls! {
    fn cuMemAllocHost_v2(start: *mut *mut c_void, bytes: usize) {
        allocate(start, bytes)
    }

    fn cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: c_uint) {
        if flags & !7 != 0 {
            return Err(Fail::misuse(INVALID_VALUE, format!("flags {flags:#x} are not offered")));
        }
        allocate(start, bytes)
    }

    fn cuMemFreeHost(start: *mut c_void) {
        // The driver waits for the card here.
        crate::context::synchronize()?;
        let mut state = state();
        let card = state.current()?;
        let Some(bytes) = card.host_blocks.get(&(start as usize)).copied() else {
            return Err(Fail::misuse(INVALID_VALUE, format!("{start:p} is no host allocation")));
        };
        // SAFETY: the card is idle, and the caller uses the block no more.
        unsafe {
            card.device.page_unlock(start.cast())?;
            libc::munmap(start, whole_pages(bytes));
        }
        card.host_blocks.remove(&(start as usize));
        Ok(())
    }
}
