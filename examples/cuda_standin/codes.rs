//! The driver's codes that the stand-in answers, and their names.

use std::ffi::{CStr, c_char, c_int};

use crate::state::{Fail, write};

pub const INVALID_VALUE: i32 = 1;
pub const OUT_OF_MEMORY: i32 = 2;
pub const NOT_INITIALIZED: i32 = 3;
pub const NO_DEVICE: i32 = 100;
pub const INVALID_DEVICE: i32 = 101;
pub const INVALID_IMAGE: i32 = 200;
pub const INVALID_CONTEXT: i32 = 201;
pub const UNSUPPORTED_PTX_VERSION: i32 = 222;
pub const OPERATING_SYSTEM: i32 = 304;
pub const INVALID_HANDLE: i32 = 400;
pub const NOT_FOUND: i32 = 500;
pub const NOT_READY: i32 = 600;
pub const ILLEGAL_ADDRESS: i32 = 700;
pub const ALREADY_REGISTERED: i32 = 712;
pub const NOT_REGISTERED: i32 = 713;
pub const NOT_SUPPORTED: i32 = 801;
pub const CAPTURE_UNSUPPORTED: i32 = 900;
pub const UNKNOWN: i32 = 999;

fn name(code: i32) -> Option<&'static CStr> {
    Some(match code {
        0 => c"CUDA_SUCCESS",
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        NOT_INITIALIZED => c"CUDA_ERROR_NOT_INITIALIZED",
        NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_IMAGE => c"CUDA_ERROR_INVALID_IMAGE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        UNSUPPORTED_PTX_VERSION => c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        OPERATING_SYSTEM => c"CUDA_ERROR_OPERATING_SYSTEM",
        INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        NOT_READY => c"CUDA_ERROR_NOT_READY",
        ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        ALREADY_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        NOT_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        719 => c"CUDA_ERROR_LAUNCH_FAILED",
        NOT_SUPPORTED => c"CUDA_ERROR_NOT_SUPPORTED",
        CAPTURE_UNSUPPORTED => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        UNKNOWN => c"CUDA_ERROR_UNKNOWN",
        _ => return None,
    })
}

driver_calls! {
    fn cuGetErrorName(code: c_int, text: *mut *const c_char) {
        let name = name(code).ok_or(Fail::plain(INVALID_VALUE))?;
        write(text, name.as_ptr())
    }

    fn cuGetErrorString(code: c_int, text: *mut *const c_char) {
        let name = name(code).ok_or(Fail::plain(INVALID_VALUE))?;
        write(text, name.as_ptr())
    }
}
