//! Ways around calls that a driver library does not export.
//!
//! NVIDIA's own driver exports them all. Another library that speaks the driver's language may know only
//! some: synchronous copies, no events, one stream. What is missing is made of what is there, at the price
//! of waiting, and the order of a stream's work is kept. Nothing here is used where the call itself exists.
//! Owns nothing, takes no lock; the context is bound.

#![expect(unsafe_code, reason = "calls into the driver library")]

use std::ffi::c_void;

use cudarc::driver::sys;

use super::driver::{Answer, Driver, MISSING, Refusal};

/// Bytes that a fill without a call of its own copies at once.
const FILL_BYTES: usize = 1 << 20;

/// Whether a call was not made because the library lacks it.
fn lacks(answer: Answer) -> bool {
    matches!(answer, Err(Refusal { code: MISSING, .. }))
}

impl Driver {
    /// Waits for a stream.
    ///
    /// # Safety
    /// The stream is live and its context current.
    pub(super) unsafe fn wait_for_stream(&self, stream: sys::CUstream) -> Answer {
        // SAFETY: live, says the caller.
        let answer = unsafe { self.stream_synchronize(stream) };
        // SAFETY: a context is current, says the caller.
        if lacks(answer) { unsafe { self.ctx_synchronize() } } else { answer }
    }

    /// Copies to the card in the order of `stream`.
    ///
    /// # Safety
    /// As for the driver's copies: both sides are valid until it is done.
    pub(super) unsafe fn copy_in(
        &self,
        to: sys::CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Answer {
        // SAFETY: valid, says the caller, here and below.
        let answer = unsafe { self.memcpy_htod_async(to, from, bytes, stream) };
        if !lacks(answer) {
            return answer;
        }
        // SAFETY: as above.
        unsafe {
            self.wait_for_stream(stream)?;
            self.memcpy_htod(to, from, bytes)
        }
    }

    /// Copies to the host in the order of `stream`.
    ///
    /// # Safety
    /// As for [`Self::copy_in`].
    pub(super) unsafe fn copy_out(
        &self,
        to: *mut c_void,
        from: sys::CUdeviceptr,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Answer {
        // SAFETY: valid, says the caller, here and below.
        let answer = unsafe { self.memcpy_dtoh_async(to, from, bytes, stream) };
        if !lacks(answer) {
            return answer;
        }
        // SAFETY: as above.
        unsafe {
            self.wait_for_stream(stream)?;
            self.memcpy_dtoh(to, from, bytes)
        }
    }

    /// Copies on the card in the order of `stream`.
    ///
    /// # Safety
    /// As for [`Self::copy_in`]; the sides do not overlap.
    pub(super) unsafe fn copy_within(
        &self,
        to: sys::CUdeviceptr,
        from: sys::CUdeviceptr,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Answer {
        // SAFETY: valid, says the caller, here and below.
        let answer = unsafe { self.memcpy_dtod_async(to, from, bytes, stream) };
        if !lacks(answer) {
            return answer;
        }
        let mut held = vec![0_u8; bytes];
        // SAFETY: the buffer has that length and lives past the waits.
        unsafe {
            self.copy_out(held.as_mut_ptr().cast(), from, bytes, stream)?;
            self.wait_for_stream(stream)?;
            self.copy_in(to, held.as_ptr().cast(), bytes, stream)?;
            self.wait_for_stream(stream)
        }
    }

    /// Sets bytes in the order of `stream`.
    ///
    /// # Safety
    /// As for [`Self::copy_in`].
    pub(super) unsafe fn set_bytes(
        &self,
        to: sys::CUdeviceptr,
        value: u8,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Answer {
        // SAFETY: valid, says the caller, here and below.
        let answer = unsafe { self.memset_d8_async(to, value, bytes, stream) };
        if !lacks(answer) {
            return answer;
        }
        let pattern = vec![value; bytes.min(FILL_BYTES)];
        for at in (0..bytes).step_by(FILL_BYTES) {
            let length = (bytes - at).min(FILL_BYTES);
            // SAFETY: the part lies in the target, the pattern is as long and lives past the wait below.
            unsafe { self.copy_in(to + at as u64, pattern.as_ptr().cast(), length, stream)? };
        }
        // SAFETY: live, says the caller.
        unsafe { self.wait_for_stream(stream) }
    }
}
