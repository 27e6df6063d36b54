//! The card of a stress run, and what is done to it behind the pager's back: another process that takes
//! memory, calls that fail, work that completes late.
//!
//! An emulated card has hooks of its own. Behind `cuda:` the driver stand-in of this project's tests exports
//! hooks beside the driver's names, which are looked up by name; a real driver has none, so that nothing is
//! injected there, and another process is played by frames that nobody uses.

#![expect(unsafe_code, reason = "looks up and calls the hooks of a driver stand-in")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vram_pager::device::emulated::{CallKind, EmulatedDevice, Fault, FaultError};
use vram_pager::device::{self, DeviceError, DeviceString, FrameSet, SharedDevice};

use super::numbers::Numbers;
use crate::output::Failure;

/// The code of a failure that was injected. No driver answers it.
pub(super) const INJECTED: i32 = 31_415;

/// The text of the same.
const INJECTED_NAME: &str = "an injected failure";

/// The driver's code for a lack of memory.
const OUT_OF_MEMORY: i32 = 2;

/// Device calls that fail on an emulated card. The rest is not called by a pager.
fn kinds() -> impl Iterator<Item = CallKind> {
    let never =
        [CallKind::AddKernels, CallKind::Synchronize, CallKind::CopyOnDevice, CallKind::ChargeCompute];
    CallKind::ALL.iter().copied().filter(move |kind| !never.contains(kind))
}

/// Calls that take something, and so may go on failing for a while without anything being lost.
const TAKING: &[CallKind] = &[
    CallKind::Memory,
    CallKind::Reserve,
    CallKind::CreateFrame,
    CallKind::Map,
    CallKind::SetAccess,
    CallKind::PageLock,
    CallKind::CreateStream,
    CallKind::CreateEvent,
    CallKind::CopyToDevice,
    CallKind::PoolAllocate,
    CallKind::Launch,
];

/// Driver calls that fail behind the stand-in.
const DRIVER_CALLS: &[&str] = &[
    "cuMemGetInfo_v2",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemHostRegister_v2",
    "cuStreamCreateWithPriority",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemsetD8Async",
    "cuMemAllocFromPoolAsync",
    "cuLaunchKernel",
];

/// Those that may go on failing.
const DRIVER_TAKING: &[&str] = &[
    "cuMemGetInfo_v2",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemHostRegister_v2",
    "cuEventCreate",
    "cuMemcpyHtoDAsync_v2",
    "cuMemAllocFromPoolAsync",
    "cuLaunchKernel",
];

/// A card, opened for one round.
pub(super) struct Card {
    pub(super) device: SharedDevice,
    hooks: Hooks,
    /// Failures that were delivered before this card was opened.
    fired_before: u64,
    /// What others hold, in bytes.
    others: AtomicU64,
}

enum Hooks {
    Emulated(Arc<EmulatedDevice>),
    /// The stand-in, the card's number, and what of it lies beyond its cap.
    Standin(Standin, u32, u64),
    /// Frames that play another process's.
    Frames(Mutex<FrameSet>),
}

impl Card {
    /// Opens the card that `text` names, which says its size.
    pub(super) fn open(text: &str) -> Result<Self, Failure> {
        let bad = |error: DeviceError| Failure::BadInput(error.to_string());
        let (device, hooks): (SharedDevice, Hooks) = match text.parse().map_err(bad)? {
            DeviceString::Emulated(options) => {
                let card = EmulatedDevice::open(options).map_err(bad)?;
                (Arc::clone(&card) as _, Hooks::Emulated(card))
            }
            DeviceString::Cuda(cuda) => {
                let whole = device::open(&format!("cuda:{}", cuda.ordinal)).map_err(bad)?.info().total_bytes;
                let device = device::open(text).map_err(bad)?;
                let hooks = match Standin::find() {
                    Some(standin) => {
                        let rest = whole - device.info().total_bytes.min(whole);
                        Hooks::Standin(standin, cuda.ordinal, rest)
                    }
                    None => Hooks::Frames(Mutex::new(FrameSet::new(&device, device.info().granularity))),
                };
                (device, hooks)
            }
            _ => {
                return Err(Failure::BadInput(format!(
                    "`{text}` is a kind of device that is not known here"
                )));
            }
        };
        let mut card = Self { device, hooks, fired_before: 0, others: AtomicU64::new(0) };
        card.fired_before = card.fired();
        Ok(card)
    }

    /// From now on a misuse of memory names the calls of both sides, where the card can tell.
    pub(super) fn keep_sites(&self) {
        if let Hooks::Emulated(card) = &self.hooks {
            card.keep_sites(true);
        }
    }

    /// Another process holds `bytes` from now on.
    pub(super) fn set_others(&self, bytes: u64) {
        self.others.store(bytes, Ordering::Relaxed);
        match &self.hooks {
            Hooks::Emulated(card) => card.set_other_bytes(bytes),
            Hooks::Standin(standin, ordinal, rest) => standin.set_other_bytes(*ordinal, rest + bytes),
            Hooks::Frames(frames) => {
                let mut frames = frames.lock();
                if self.device.info().virtual_memory {
                    *frames = FrameSet::new(&self.device, frames.frame_bytes());
                    for _ in 0..bytes / frames.frame_bytes() {
                        // A card that is full is what was wanted.
                        if frames.create().is_err() {
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Work completes late from here on, as `seed` says.
    pub(super) fn seed_delays(&self, seed: u64) {
        match &self.hooks {
            Hooks::Emulated(card) => card.seed_delays(seed),
            Hooks::Standin(standin, ordinal, _) => standin.seed_delays(*ordinal, seed),
            Hooks::Frames(_) => {}
        }
    }

    /// Makes one of the next calls fail, or for a while (`lasting`) all of one kind that takes something.
    /// Replaces what was injected before and did not strike.
    pub(super) fn inject(&self, numbers: &mut Numbers, lasting: bool) {
        let no_memory = numbers.per_mille(400);
        let nth = 1 + numbers.below(40);
        match &self.hooks {
            Hooks::Emulated(card) => {
                let kind = if lasting {
                    numbers.pick(TAKING)
                } else {
                    let kinds: Vec<_> = kinds().collect();
                    numbers.pick(&kinds)
                };
                let error = if no_memory && takes_memory(kind) {
                    FaultError::OutOfMemory
                } else {
                    FaultError::Exactly(DeviceError::Driver {
                        call: kind.name(),
                        code: INJECTED,
                        name: INJECTED_NAME.to_owned(),
                    })
                };
                card.clear_faults();
                let fault = if lasting { Fault::from_then_on(kind, nth) } else { Fault::once(kind, nth) };
                card.inject(fault.with(error));
            }
            Hooks::Standin(standin, ..) => {
                let call = numbers.pick(if lasting { DRIVER_TAKING } else { DRIVER_CALLS });
                let memory =
                    matches!(call, "cuMemCreate" | "cuMemAllocFromPoolAsync" | "cuMemHostRegister_v2");
                let code = if no_memory && memory { OUT_OF_MEMORY } else { INJECTED };
                standin.fail(&format!("{call}@{nth}{}={code}", if lasting { "+" } else { "" }));
            }
            Hooks::Frames(_) => {}
        }
    }

    /// Page-locking is refused from now on.
    pub(super) fn refuse_page_locks(&self) {
        match &self.hooks {
            Hooks::Emulated(card) => card.inject(Fault::from_then_on(CallKind::PageLock, 1).with(
                FaultError::Exactly(DeviceError::Driver {
                    call: CallKind::PageLock.name(),
                    code: INJECTED,
                    name: INJECTED_NAME.to_owned(),
                }),
            )),
            Hooks::Standin(standin, ..) => standin.fail(&format!("cuMemHostRegister_v2@1+={INJECTED}")),
            Hooks::Frames(_) => {}
        }
    }

    /// Nothing fails from here on.
    pub(super) fn clear(&self) {
        match &self.hooks {
            Hooks::Emulated(card) => card.clear_faults(),
            Hooks::Standin(standin, ..) => standin.fail(""),
            Hooks::Frames(_) => {}
        }
    }

    /// Failures that were delivered so far.
    pub(super) fn injected(&self) -> u64 {
        self.fired() - self.fired_before
    }

    fn fired(&self) -> u64 {
        match &self.hooks {
            Hooks::Emulated(card) => card.faults_fired(),
            Hooks::Standin(standin, ..) => standin.number(c"vram_pager_standin_failed"),
            Hooks::Frames(_) => 0,
        }
    }

    /// Errors that happened where none could be returned; takes them away.
    pub(super) fn take_deferred(&self) -> Vec<DeviceError> {
        if let Hooks::Emulated(card) = &self.hooks {
            return card.take_deferred();
        }
        // Each answers one call.
        let mut errors = Vec::new();
        while errors.len() < 100
            && let Err(error) = self.device.memory()
        {
            errors.push(error);
        }
        errors
    }

    /// How often the driver stand-in told of misuse.
    pub(super) fn misuses(&self) -> u64 {
        match &self.hooks {
            Hooks::Standin(standin, ..) => standin.number(c"vram_pager_standin_misuses"),
            _ => 0,
        }
    }
}

/// Whether a lack of memory is what a call may answer.
fn takes_memory(kind: CallKind) -> bool {
    matches!(kind, CallKind::CreateFrame | CallKind::PoolAllocate | CallKind::PageLock | CallKind::Reserve)
}

/// The driver stand-in in this process.
#[derive(Clone, Copy)]
struct Standin(*mut c_void);

// SAFETY: a handle of the loader, which is never closed; the hooks take the library's own lock.
unsafe impl Send for Standin {}
// SAFETY: as above.
unsafe impl Sync for Standin {}

impl Standin {
    /// The library that is loaded under the driver's name, if it has the hooks.
    fn find() -> Option<Self> {
        // SAFETY: a name, and flags that load nothing.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if library.is_null() {
            return None;
        }
        let standin = Self(library);
        standin.symbol(c"vram_pager_standin_failed").is_some().then_some(standin)
    }

    fn symbol(self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a library that is loaded and never closed.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }

    fn number(self, name: &CStr) -> u64 {
        let Some(symbol) = self.symbol(name) else { return 0 };
        // SAFETY: the hook's signature.
        unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> u64>(symbol)() }
    }

    fn fail(self, text: &str) {
        let (Some(symbol), Ok(text)) = (self.symbol(c"vram_pager_standin_fail"), CString::new(text)) else {
            return;
        };
        // SAFETY: the hook's signature; the text lives over the call.
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_int>(symbol)(
                text.as_ptr(),
            );
        }
    }

    fn set_other_bytes(self, ordinal: u32, bytes: u64) {
        if let Some(symbol) = self.symbol(c"vram_pager_standin_set_other_bytes") {
            // SAFETY: the hook's signature.
            unsafe {
                std::mem::transmute::<*mut c_void, extern "C" fn(u32, u64) -> c_int>(symbol)(ordinal, bytes)
            };
        }
    }

    fn seed_delays(self, ordinal: u32, seed: u64) {
        if let Some(symbol) = self.symbol(c"vram_pager_standin_seed_delays") {
            // SAFETY: the hook's signature.
            unsafe {
                std::mem::transmute::<*mut c_void, extern "C" fn(u32, u64) -> c_int>(symbol)(ordinal, seed)
            };
        }
    }
}
