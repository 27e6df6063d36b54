//! A watchdog for tests that could hang; unit tests of the crate take this file, too.

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Ends the process with a message if it is not dropped within some seconds: a hang is a failure that a
/// person can read, not a test run without end.
pub(crate) struct Watchdog {
    alive: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Waits `seconds` for its drop. `what` is what hangs then: the test's name and its number. Where everything
    /// is slower, `VRAM_PAGER_TEST_PATIENCE` says how many times longer it waits.
    pub(crate) fn new(seconds: u64, what: impl Into<String>) -> Self {
        let what = what.into();
        let times = std::env::var("VRAM_PAGER_TEST_PATIENCE").ok().and_then(|times| times.parse().ok());
        let seconds = seconds * times.unwrap_or(1);
        let (alive, watched) = channel();
        let thread = std::thread::spawn(move || {
            if watched.recv_timeout(Duration::from_secs(seconds)) == Err(RecvTimeoutError::Timeout) {
                // Not by `eprintln`: what a test prints is kept until it ends, and this one never does.
                let _ = writeln!(std::io::stderr(), "hung for {seconds} s: {what}");
                std::process::abort();
            }
        });
        Self { alive: Some(alive), thread: Some(thread) }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.alive.take());
        if let Some(thread) = self.thread.take() {
            // It has no way to panic that would not have ended the process.
            let _ = thread.join();
        }
    }
}
