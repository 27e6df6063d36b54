//! Ctrl-C: a flag that long work looks at, and an end within a second for work that does not.
//!
//! Whoever works checks the flag between steps and returns [`Failure::Interrupted`], so that every guard
//! on the way out cleans up after itself. What is stuck in one long step (a slow disk, a large header) is
//! ended by the handler's own thread after [`PATIENCE`], which first removes the files that are named in
//! [`Scratch`].

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::output::Failure;

/// How long work has to end by itself.
const PATIENCE: Duration = Duration::from_millis(700);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Files that must not stay behind.
static SCRATCH: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Takes over SIGINT, SIGTERM and SIGHUP. To be called once.
pub(crate) fn install() -> Result<(), Failure> {
    let handler = || {
        INTERRUPTED.store(true, Ordering::Relaxed);
        std::thread::sleep(PATIENCE);
        leave(130);
    };
    ctrlc::set_handler(handler).map_err(|error| Failure::Failed(format!("cannot listen for Ctrl-C: {error}")))
}

/// Ends the process now, without the files of [`Scratch`].
pub(crate) fn leave(code: i32) -> ! {
    // Held until the end, so that no new file is named meanwhile.
    let scratch = SCRATCH.lock().unwrap_or_else(PoisonError::into_inner);
    for path in scratch.iter() {
        let _ = fs::remove_file(path);
    }
    std::process::exit(code);
}

/// An error once the user has pressed Ctrl-C.
pub(crate) fn check() -> Result<(), Failure> {
    if INTERRUPTED.load(Ordering::Relaxed) { Err(Failure::Interrupted) } else { Ok(()) }
}

/// A file that is gone again unless it is kept.
#[must_use]
pub(crate) struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Names the file, before it is made.
    pub(crate) fn new(path: PathBuf) -> Self {
        SCRATCH.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
        Self { path }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    /// Removes the file; if it was renamed there is nothing to remove.
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        SCRATCH.lock().unwrap_or_else(PoisonError::into_inner).retain(|path| *path != self.path);
    }
}
