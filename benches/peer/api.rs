//! The peer's C calls, and the stand-in's, opened by name.
//!
//! The prototypes were not read from the peer's sources, which are under the GPL: its Python package tells
//! them to whoever loads it (`ctypes` functions carry their `argtypes` and `restype`), and what each argument
//! means was tried out against its documentation on PyPI. `init`, then `vbar_*`, is all that is used.

#![expect(unsafe_code, reason = "a C interface, opened by name")]

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use crate::common::Outcome;

/// A loaded library.
struct Library(*mut c_void);

impl Library {
    fn open(path: &str) -> Outcome<Self> {
        let text = CString::new(path)?;
        // SAFETY: a library that the caller of the bench named; it is never closed.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            // SAFETY: after a failed `dlopen` the text is there until the next call.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned();
            return Err(why.into());
        }
        Ok(Self(handle))
    }

    /// A function by name.
    ///
    /// # Safety
    /// `F` is the function's type.
    unsafe fn get<F: Copy>(&self, name: &CStr) -> Outcome<F> {
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>(), "a function's address");
        // SAFETY: the library is open.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if symbol.is_null() {
            return Err(format!("there is no `{}`", name.to_string_lossy()).into());
        }
        // SAFETY: an address of a function of that type, says the caller.
        Ok(unsafe { std::mem::transmute_copy(&symbol) })
    }
}

/// The driver stand-in, with the first card's context current on this thread.
pub(crate) struct Standin {
    calls_of: unsafe extern "C" fn(*const std::ffi::c_char) -> u64,
    nanoseconds: extern "C" fn() -> u64,
    misuses: extern "C" fn() -> u64,
    set_other_bytes: extern "C" fn(u32, u64) -> c_int,
}

impl Standin {
    pub(crate) fn open() -> Outcome<Self> {
        let library = Library::open("libcuda.so.1")?;
        // SAFETY: the driver's documented prototypes, and the stand-in's own.
        unsafe {
            let init: unsafe extern "C" fn(c_uint) -> c_int = library.get(c"cuInit")?;
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
                library.get(c"cuDevicePrimaryCtxRetain")?;
            let set: unsafe extern "C" fn(*mut c_void) -> c_int = library.get(c"cuCtxSetCurrent")?;
            let standin = Self {
                calls_of: library
                    .get(c"vram_pager_standin_calls_of")
                    .map_err(|why| format!("the driver found is not the stand-in of this project: {why}"))?,
                nanoseconds: library.get(c"vram_pager_standin_nanoseconds")?,
                misuses: library.get(c"vram_pager_standin_misuses")?,
                set_other_bytes: library.get(c"vram_pager_standin_set_other_bytes")?,
            };
            let mut context = null_mut();
            let code = (init(0), retain(&raw mut context, 0), set(context));
            if code == (0, 0, 0) { Ok(standin) } else { Err(format!("the stand-in answers {code:?}").into()) }
        }
    }

    /// Calls of one driver function so far.
    pub(crate) fn calls_of(&self, name: &CStr) -> u64 {
        // SAFETY: a string that ends in a NUL.
        unsafe { (self.calls_of)(name.as_ptr()) }
    }

    /// Nanoseconds that this process spent inside driver calls so far, all threads together.
    pub(crate) fn nanoseconds(&self) -> u64 {
        (self.nanoseconds)()
    }

    /// How often somebody misused the driver.
    pub(crate) fn misuses(&self) -> u64 {
        (self.misuses)()
    }

    /// Another process holds so many bytes of the card.
    pub(crate) fn set_other_bytes(&self, bytes: u64) -> Outcome {
        if (self.set_other_bytes)(0, bytes) == 0 { Ok(()) } else { Err("the card is not open".into()) }
    }
}

type Allocate = unsafe extern "C" fn(*mut c_void, u64, c_int, *const c_void) -> *mut c_void;
type Fault = unsafe extern "C" fn(*mut c_void, *mut c_void, u64, u64, *mut u32) -> c_int;
type Unpin = unsafe extern "C" fn(*mut c_void, *mut c_void, u64, u64) -> bool;
type Free = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type Prioritize = unsafe extern "C" fn(*mut c_void, *mut c_void, u64) -> c_int;

/// The peer, for the first card.
pub(crate) struct Peer {
    device: *mut c_void,
    allocate: Allocate,
    fault: Fault,
    unpin: Unpin,
    free: Free,
    prioritize: Prioritize,
}

impl Peer {
    /// Loads `path` and sets it up for the first card, with no headroom beyond its own default.
    pub(crate) fn open(path: &str) -> Outcome<Self> {
        let library = Library::open(path)?;
        // SAFETY: prototypes as the module says.
        unsafe {
            let quiet: extern "C" fn() = library.get(c"set_log_level_none")?;
            let platform: extern "C" fn() -> c_int = library.get(c"plat_init")?;
            let init: unsafe extern "C" fn(*const c_int, *const u64, u64) -> bool = library.get(c"init")?;
            let device: unsafe extern "C" fn(c_int) -> *mut c_void = library.get(c"get_devctx")?;
            quiet();
            platform();
            if !init(&raw const FIRST, &raw const NONE, 1) {
                return Err("the peer's init fails".into());
            }
            let device = device(0);
            if device.is_null() {
                return Err("the peer knows no first card".into());
            }
            Ok(Self {
                device,
                allocate: library.get(c"vbar_allocate")?,
                fault: library.get(c"vbar_fault")?,
                unpin: library.get(c"vbar_unpin")?,
                free: library.get(c"vbar_free")?,
                prioritize: library.get(c"vbar_prioritize")?,
            })
        }
    }

    /// Reserves addresses for a model.
    pub(crate) fn model(&self, bytes: u64) -> Outcome<PeerModel<'_>> {
        // SAFETY: the peer is set up; null is no callback.
        let range = unsafe { (self.allocate)(self.device, bytes, 0, null()) };
        if range.is_null() {
            return Err(format!("the peer reserves no {bytes} bytes").into());
        }
        Ok(PeerModel { peer: self, range })
    }
}

static FIRST: c_int = 0;
static NONE: u64 = 0;

/// A model's range on the peer's side.
pub(crate) struct PeerModel<'p> {
    peer: &'p Peer,
    range: *mut c_void,
}

impl PeerModel<'_> {
    /// The code of a fault; `signature` has a place for each page of the unit, and one more.
    pub(crate) fn fault(&self, offset: u64, bytes: u64, signature: &mut [u32]) -> c_int {
        // SAFETY: inside the range; the caller gave a signature of enough places.
        unsafe { (self.peer.fault)(self.peer.device, self.range, offset, bytes, signature.as_mut_ptr()) }
    }

    pub(crate) fn unpin(&self, offset: u64, bytes: u64) {
        // SAFETY: what was faulted.
        unsafe { (self.peer.unpin)(self.peer.device, self.range, offset, bytes) };
    }

    /// Makes it the most important, without a clamp.
    pub(crate) fn prioritize(&self) {
        // SAFETY: a range that lives.
        unsafe { (self.peer.prioritize)(self.peer.device, self.range, 0) };
    }
}

impl Drop for PeerModel<'_> {
    fn drop(&mut self) {
        // SAFETY: given back once.
        unsafe { (self.peer.free)(self.peer.device, self.range) };
    }
}
