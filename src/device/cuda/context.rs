//! The primary context of a card: retained while the card is open, bound around each call.
//!
//! The primary context is the one that every other library of the process uses too, so addresses and
//! streams are shared with them. A binding is per thread; [`Bound`] puts back what was there.

#![expect(unsafe_code, reason = "calls into the driver library")]

use std::marker::PhantomData;
use std::ptr::null_mut;

use cudarc::driver::sys;

use super::driver::{Driver, MISSING, Refusal, insist};

/// A retained primary context.
pub(super) struct Context {
    driver: &'static Driver,
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

// SAFETY: a context may be made current on, and released by, any thread; the handle itself is only a name.
unsafe impl Send for Context {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of `device`.
    pub(super) fn retain(driver: &'static Driver, device: sys::CUdevice) -> Result<Self, Refusal> {
        let mut handle = null_mut();
        // SAFETY: the driver was initialised, and the pointer is valid for the call.
        unsafe { driver.primary_ctx_retain(&raw mut handle, device)? };
        Ok(Self { driver, device, handle })
    }

    /// The driver's handle.
    pub(super) fn handle(&self) -> sys::CUcontext {
        self.handle
    }

    /// Makes the context current on this thread until the answer is dropped. Costs one read of thread
    /// state where it is current already.
    pub(super) fn bind(&self) -> Result<Bound<'_>, Refusal> {
        let mut current = null_mut();
        // SAFETY: the pointer is valid for the call.
        match unsafe { self.driver.ctx_get_current(&raw mut current) } {
            Ok(()) if current == self.handle => {
                return Ok(Bound { driver: self.driver, undo: Undo::Nothing, thread: PhantomData });
            }
            Ok(()) | Err(Refusal { code: MISSING, .. }) => {}
            Err(refusal) => return Err(refusal),
        }
        // SAFETY: the handle is retained as long as `self`.
        let undo = match unsafe { self.driver.ctx_push_current(self.handle) } {
            // SAFETY: as above.
            Err(Refusal { code: MISSING, .. }) => unsafe {
                self.driver.ctx_set_current(self.handle)?;
                Undo::Set(current)
            },
            answer => answer.map(|()| Undo::Pop)?,
        };
        Ok(Bound { driver: self.driver, undo, thread: PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, released once. A refusal (the driver is shutting down with the process)
        // leaves nothing to do.
        let _ = insist(|| unsafe { self.driver.primary_ctx_release(self.device) });
    }
}

/// How a binding ends.
enum Undo {
    /// It was bound before.
    Nothing,
    Pop,
    /// This one is bound again: the driver has no stack of contexts.
    Set(sys::CUcontext),
}

/// The context is current on this thread. Belongs to the thread that made it.
pub(super) struct Bound<'a> {
    driver: &'static Driver,
    undo: Undo,
    thread: PhantomData<(&'a Context, *mut ())>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        match self.undo {
            Undo::Nothing => {}
            Undo::Pop => {
                let mut popped: sys::CUcontext = null_mut();
                let popped = &raw mut popped;
                // SAFETY: this thread pushed the context, and whatever was pushed in between was popped: no
                // call made under the binding leaves one behind.
                let _ = insist(|| unsafe { self.driver.ctx_pop_current(popped) });
            }
            // SAFETY: it was current on this thread when the binding began.
            Undo::Set(before) => drop(insist(|| unsafe { self.driver.ctx_set_current(before) })),
        }
    }
}
