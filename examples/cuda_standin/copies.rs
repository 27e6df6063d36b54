//! Copies and fills. A copy from or to host memory that is not registered is complete when the call
//! returns, as the driver's documentation has it for such memory.

use std::ffi::c_void;

use vram_pager::device::{Copies, StreamId, Streams};
use vram_pager::units::ModelTime;

use crate::codes::INVALID_VALUE;
use crate::memory::range;
use crate::state::{Answer, Card, Fail, state};
use crate::streams::{order, stream_of};

/// Whether a span lies in registered memory; one that does in part is refused.
fn is_registered(card: &Card, start: *const c_void, bytes: usize) -> Result<bool, Fail> {
    let (from, to) = (start as usize, start as usize + bytes);
    for (block, length) in card.host.iter().chain(&card.host_blocks) {
        let (block_from, block_to) = (*block, block + length);
        if block_from <= from && to <= block_to {
            return Ok(true);
        }
        if block_from < to && from < block_to {
            let why = format!("{bytes} bytes at {start:p} cross the border of a registered block");
            return Err(Fail::misuse(INVALID_VALUE, why));
        }
    }
    Ok(false)
}

/// Enqueues work of one stream, and waits for it if the host's memory is not registered.
fn enqueue(
    stream: *mut c_void,
    host: Option<(*const c_void, usize)>,
    work: impl FnOnce(&Card, StreamId) -> Answer,
) -> Answer {
    let (device, id) = {
        let mut state = state();
        let card = state.current()?;
        let stream = stream_of(card, stream)?;
        let asynchronous = match host {
            Some((start, _)) if start.is_null() => {
                return Err(Fail::misuse(INVALID_VALUE, "the host's pointer is null"));
            }
            Some((start, bytes)) => is_registered(card, start, bytes)?,
            None => true,
        };
        order(card, stream)?;
        work(card, stream.id)?;
        if asynchronous {
            return Ok(());
        }
        (card.device.clone(), stream.id)
    };
    // SAFETY: live unless another thread destroys it meanwhile, which the device reports.
    unsafe { device.wait_stream(id)? };
    Ok(())
}

/// Work of no bytes is none.
fn some(bytes: usize, body: impl FnOnce() -> Answer) -> Answer {
    if bytes == 0 { state().current().map(|_| ()) } else { body() }
}

driver_calls! {
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void) {
        some(bytes, || enqueue(stream, Some((from, bytes)), |card, id| {
            // SAFETY: the device checks its own side; the caller keeps the host's until it is done.
            unsafe { card.device.copy_to_device(range(to, bytes), from.cast(), ModelTime::ZERO, id) }.map_err(Fail::from)
        }))
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void) {
        some(bytes, || enqueue(stream, Some((to.cast_const(), bytes)), |card, id| {
            // SAFETY: as above.
            unsafe { card.device.copy_to_host(to.cast(), range(from, bytes), id) }.map_err(Fail::from)
        }))
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: *mut c_void) {
        some(bytes, || enqueue(stream, None, |card, id| {
            // SAFETY: the device checks both sides.
            unsafe { card.device.copy_on_device(range(to, bytes), range(from, bytes), id) }.map_err(Fail::from)
        }))
    }

    fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: *mut c_void) {
        some(bytes, || enqueue(stream, None, |card, id| {
            // SAFETY: the device checks the target.
            unsafe { card.device.fill(range(to, bytes), value, id) }.map_err(Fail::from)
        }))
    }

    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        some(bytes, || enqueue(std::ptr::null_mut(), Some((from, bytes)), |card, id| {
            // SAFETY: as above; waited for here.
            unsafe {
                card.device.copy_to_device(range(to, bytes), from.cast(), ModelTime::ZERO, id)?;
                card.device.wait_stream(id)?;
            }
            Ok(())
        }))
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        some(bytes, || enqueue(std::ptr::null_mut(), Some((to.cast_const(), bytes)), |card, id| {
            // SAFETY: as above.
            unsafe {
                card.device.copy_to_host(to.cast(), range(from, bytes), id)?;
                card.device.wait_stream(id)?;
            }
            Ok(())
        }))
    }

    fn cuMemsetD8_v2(to: u64, value: u8, bytes: usize) {
        some(bytes, || enqueue(std::ptr::null_mut(), None, |card, id| {
            // SAFETY: the device checks the target.
            unsafe { card.device.fill(range(to, bytes), value, id) }.map_err(Fail::from)
        }))
    }
}
