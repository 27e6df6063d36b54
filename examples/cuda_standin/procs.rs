//! Look-up of the driver's functions by the driver itself, as runtimes do it: names come without their
//! version, and the newest that the library exports is meant.

use std::ffi::{CStr, CString, c_char, c_int, c_ulonglong, c_void};
use std::ptr::null_mut;

use crate::codes::{INVALID_VALUE, NOT_FOUND};
use crate::context::check_known_device;
use crate::state::{Answer, Fail, write};

/// The symbol was found.
const FOUND: c_int = 0;
/// The library exports no such symbol.
const NO_SUCH_SYMBOL: c_int = 1;

/// This library's own handle.
fn own_library() -> *mut c_void {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: null_mut(),
    };
    let inside = (own_library as *const ()).cast::<c_void>();
    // SAFETY: an address inside this library, and room for the answer.
    if unsafe { libc::dladdr(inside, &raw mut info) } == 0 {
        return null_mut();
    }
    // SAFETY: the loader's own name of a library that is loaded.
    unsafe { libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD) }
}

fn find(name: &str) -> Option<*mut c_void> {
    let library = own_library();
    if library.is_null() {
        return None;
    }
    [format!("{name}_v2"), name.to_owned()].iter().find_map(|name| {
        let name = CString::new(name.as_str()).ok()?;
        // SAFETY: a loaded library and a string that ends in a NUL.
        let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    })
}

fn look_up(name: *const c_char, function: *mut *mut c_void, status: *mut c_int) -> Answer {
    if name.is_null() {
        return Err(Fail::misuse(INVALID_VALUE, "the name is null"));
    }
    // SAFETY: a string that ends in a NUL, says the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let found = find(&name);
    write(function, found.unwrap_or(null_mut()))?;
    if !status.is_null() {
        write(status, if found.is_some() { FOUND } else { NO_SUCH_SYMBOL })?;
    }
    found.map(|_| ()).ok_or(Fail::plain(NOT_FOUND))
}

driver_calls! {
    fn cuGetProcAddress(
        name: *const c_char, function: *mut *mut c_void, _version: c_int, _flags: c_ulonglong,
    ) {
        look_up(name, function, null_mut())
    }

    fn cuGetProcAddress_v2(
        name: *const c_char, function: *mut *mut c_void, _version: c_int, _flags: c_ulonglong,
        status: *mut c_int,
    ) {
        look_up(name, function, status)
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        check_known_device(device)?;
        let mut bytes = *b"vram-pager card0";
        bytes[15] = bytes[15].wrapping_add(u8::try_from(device).unwrap_or(0));
        write(uuid, bytes)
    }
}
