//! The emulated device itself: what it owns, what tests may do to it.
//!
//! Owns the control lock (streams, events, engines) and what the workers share (memory, deferred errors).
//! Dropping the device lets queued work run and joins the workers; they hold no device. May import
//! everything of `emulated`.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use super::backing::{Backing, MappingBudget};
use super::clock::{Engine, HostClock};
use super::control::{Control, Shared};
use super::fault::{CallKind, Fault, FaultError, Faults};
use super::journal::Journal;
use super::memory::Memory;
use super::options::EmulatedOptions;
use super::pageable::Buffers;
use super::stream::{Hold, HoldState, Point, Work};
use super::usage::Refusal;
use super::watch::{Before, History, Seen};
use crate::device::kernels::{HostTwin, builtin};
use crate::device::{
    CallCounts, Device, DeviceError, DeviceInfo, DeviceKind, LiveObjects, MemoryFigures, StreamId,
};

/// A card in host memory; see the module.
#[derive(Debug)]
pub struct EmulatedDevice {
    pub(super) info: DeviceInfo,
    pub(super) options: EmulatedOptions,
    pub(super) shared: Arc<Shared>,
    pub(super) control: Mutex<Control>,
    pub(super) clock: HostClock,
    pub(super) kernels: RwLock<Vec<(&'static str, HostTwin)>>,
    pub(super) buffers: Buffers,
    counts: Mutex<CallCounts>,
    faults: Faults,
}

impl EmulatedDevice {
    /// Opens a card.
    ///
    /// # Errors
    /// A page that is no power of two or no multiple of the host's page, a size below one page
    /// ([`DeviceError::InvalidArgument`]); a host without memory or mappings left ([`DeviceError::Host`]).
    pub fn open(options: EmulatedOptions) -> Result<Arc<Self>, DeviceError> {
        let pages =
            options.whole_pages().map_err(|why| DeviceError::InvalidArgument { call: "open", why })?;
        let page_bytes = options.page_bytes;
        let total_bytes = pages * page_bytes;
        let name = options.name(total_bytes);
        let budget = MappingBudget::new(options.max_mappings);
        let backing = if options.keeps_bytes {
            budget.check_open()?;
            if u32::try_from(pages).is_err() || i64::try_from(total_bytes).is_err() {
                let why = "more pages than a card in host memory can have; add `bytes=none`".to_owned();
                return Err(DeviceError::Host { call: "open", bytes: total_bytes, why });
            }
            Some(Backing::new(pages, page_bytes, options.poison)?)
        } else {
            None
        };
        let mut memory = Memory::new(name.clone(), total_bytes, page_bytes, backing, budget);
        let watches = options.watch && options.keeps_bytes;
        memory.history = watches.then(History::default);
        Ok(Arc::new(Self {
            info: DeviceInfo {
                kind: DeviceKind::Emulated,
                name,
                total_bytes,
                granularity: page_bytes,
                virtual_memory: options.virtual_memory,
                host_addressable: options.keeps_bytes,
                link: Some(options.link),
                keeps_bytes: options.keeps_bytes,
            },
            shared: Arc::new(Shared {
                memory: Mutex::new(memory),
                delay_seed: AtomicU64::new(0),
                deferred: Mutex::new(Vec::new()),
                caught: Mutex::new(Vec::new()),
                lost: OnceLock::new(),
            }),
            control: Mutex::new(Control { told: watches.then(Seen::default), ..Control::default() }),
            clock: HostClock::new(),
            kernels: RwLock::new(builtin().kernels),
            buffers: Buffers::default(),
            counts: Mutex::new(CallCounts::default()),
            faults: Faults::default(),
            options,
        }))
    }

    /// Refuses a virtual memory call on a card without them.
    pub(super) fn need_virtual_memory(&self) -> Result<(), DeviceError> {
        if self.options.virtual_memory {
            return Ok(());
        }
        Err(DeviceError::Unsupported {
            device: self.info.name.clone(),
            what: "map memory".to_owned(),
            advice: "take memory from its pool".to_owned(),
        })
    }

    /// What the card was opened with.
    pub fn options(&self) -> &EmulatedOptions {
        &self.options
    }

    /// Records what is done when, from now on, up to `most` operations; zero turns that off.
    pub fn record_operations(&self, most: usize) {
        self.control.lock().journal = (most > 0).then(|| Journal::new(most));
    }

    /// What was recorded since [`Self::record_operations`] or the last call of this; empty if that is off.
    pub fn take_operations(&self) -> Journal {
        self.control.lock().journal.as_mut().map(Journal::take).unwrap_or_default()
    }

    // Test hooks.

    /// Test hook: another process holds `bytes` of the card from now on.
    pub fn set_other_bytes(&self, bytes: u64) {
        self.shared.memory.lock().set_other_bytes(bytes);
    }

    /// Test hook: makes a call fail. A call that acquires or enqueues fails before it does anything; one
    /// that gives something back ([`CallKind::releases`]) does its work and then reports the failure, so
    /// that nothing leaks.
    pub fn inject(&self, fault: Fault) {
        self.faults.inject(fault);
    }

    /// Test hook: takes all injected faults away.
    pub fn clear_faults(&self) {
        self.faults.clear();
    }

    /// Test hook: how many injected failures were delivered.
    pub fn faults_fired(&self) -> u64 {
        self.faults.fired()
    }

    /// Test hook: from now on operations move their bytes or complete late, by up to 0.4 ms, as `seed`
    /// says for each stream and number; zero turns that off. Modelled times do not change.
    pub fn seed_delays(&self, seed: u64) {
        self.shared.delay_seed.store(seed, Ordering::Relaxed);
    }

    /// Test hook: holds `stream` back from here on, until the answer is dropped (or the device is). On the
    /// modelled clock it lasts for `modelled`, without occupying an engine.
    ///
    /// A wait for later work of the stream blocks as long as the hold lasts, and so does a query that
    /// answers *done* by modelled time: choose a `modelled` that the host's time does not reach.
    ///
    /// # Errors
    /// An unknown stream is misuse; a device without bytes has no work in flight to hold.
    pub fn hold(&self, stream: StreamId, modelled: Duration) -> Result<Hold, DeviceError> {
        if !self.options.keeps_bytes {
            return Err(DeviceError::Unsupported {
                device: self.info.name.clone(),
                what: "hold a stream".to_owned(),
                advice: "open it without `bytes=none`".to_owned(),
            });
        }
        let mut control = self.control.lock();
        let state = Arc::new(HoldState::default());
        let entry = control.schedule("hold", stream, Engine::None, self.clock.now(), modelled)?;
        entry.queue.push(Work::Hold(Arc::clone(&state)));
        control.holds.push(Arc::downgrade(&state));
        Ok(Hold { state })
    }

    /// Test hook: the deferred errors that no call has answered with yet; takes them away.
    pub fn take_deferred(&self) -> Vec<DeviceError> {
        std::mem::take(&mut *self.shared.deferred.lock())
    }

    /// Test hook: from now on each operation keeps the calls that led to it, and a refusal by the watch over
    /// memory in use (see [`EmulatedOptions::watch`]) names both sides by file and line. Dear.
    pub fn keep_sites(&self, keep: bool) {
        if let Some(history) = &mut self.shared.memory.lock().history {
            history.keep_sites(keep);
        }
    }

    /// Test hook: what the watch over memory in use refused so far, whoever got the error; takes it away.
    pub fn take_caught(&self) -> Vec<DeviceError> {
        std::mem::take(&mut *self.shared.caught.lock())
    }

    // The watch over memory in use.

    /// Asks the watch whether the host may do something; true where nothing is watched.
    pub(super) fn watched(
        &self,
        ask: impl FnOnce(&mut Memory, &Before<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        if !self.watches() {
            return Ok(());
        }
        let control = self.control.lock();
        let Some(told) = &control.told else { return Ok(()) };
        let exists = |stream| control.exists(stream);
        let before = Before { stream: None, host: told, exists: &exists };
        let answer = ask(&mut self.shared.memory.lock(), &before);
        drop(control);
        answer.inspect_err(|error| self.shared.catch(error))
    }

    pub(super) fn watches(&self) -> bool {
        self.options.watch && self.options.keeps_bytes
    }

    /// The host was told that the work up to `point` is done.
    pub(super) fn tell(&self, point: &Point) {
        if self.watches() {
            self.control.lock().tell(point);
        }
    }

    // What every call goes through.

    /// Begins a call that may fail before it does anything.
    pub(super) fn enter(&self, kind: CallKind, bytes: u64) -> Result<(), DeviceError> {
        if let Some(first) = self.shared.lost.get() {
            return Err(self.lost(first.clone()));
        }
        {
            let mut deferred = self.shared.deferred.lock();
            if !deferred.is_empty() {
                return Err(deferred.remove(0));
            }
        }
        self.strike(kind, bytes).map_or(Ok(()), Err)
    }

    /// The injected failure of a call, if it has one.
    pub(super) fn strike(&self, kind: CallKind, bytes: u64) -> Option<DeviceError> {
        let call = kind.name();
        Some(match self.faults.strike(kind)? {
            FaultError::Refused => DeviceError::Driver { call, code: 999, name: "unknown".to_owned() },
            FaultError::OutOfMemory => self.shared.memory.lock().out_of_memory(call, bytes),
            FaultError::Exactly(error) => error,
            FaultError::Lost => {
                let first = format!("an injected failure of {call}");
                let _ = self.shared.lost.set(first.clone());
                self.lost(first)
            }
        })
    }

    fn lost(&self, first: String) -> DeviceError {
        DeviceError::Lost { device: self.info.name.clone(), first }
    }

    /// Counts a call that succeeded.
    pub(super) fn count(&self, change: impl FnOnce(&mut CallCounts)) {
        change(&mut self.counts.lock());
    }

    /// Names the operation that a refusal is about. Call it without the memory lock.
    pub(super) fn named(&self, call: &'static str, refusal: Refusal) -> DeviceError {
        let user = match &refusal {
            Refusal::Error(_) => None,
            Refusal::InUse(page) => self.find_user(|work| {
                let (ranges, len) = work.ranges();
                ranges[..len].iter().any(|range| range.overlaps(*page))
            }),
            Refusal::HostInUse(block) => {
                self.find_user(|work| work.host().is_some_and(|span| span.as_range().overlaps(*block)))
            }
        };
        refusal.name(call, user)
    }

    fn find_user(&self, concerns: impl Fn(&Work) -> bool) -> Option<(&'static str, u64, u64)> {
        let control = self.control.lock();
        control.queues().find_map(|queue| {
            let (call, sequence) = queue.find(&concerns)?;
            Some((call, queue.id().0, sequence))
        })
    }
}

impl Device for EmulatedDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryFigures, DeviceError> {
        self.enter(CallKind::Memory, 0)?;
        Ok(self.shared.memory.lock().figures())
    }

    fn counts(&self) -> CallCounts {
        *self.counts.lock()
    }

    fn live(&self) -> LiveObjects {
        let control = self.control.lock();
        let memory = self.shared.memory.lock();
        LiveObjects {
            frames: memory.live_frames(),
            ranges: memory.live_ranges(),
            mappings: memory.live_mappings(),
            streams: control.streams.len() as u64,
            events: control.events.len() as u64,
            page_locked_bytes: memory.page_locked_bytes(),
            pool_used_bytes: memory.pool.figures().used,
        }
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let answer = self.enter(CallKind::Synchronize, 0);
        // Also a lost device's work ends before its memory may go.
        let (points, end) = {
            let control = self.control.lock();
            (control.all_points(), control.engines.last_end())
        };
        points.iter().for_each(Point::wait);
        for point in &points {
            self.tell(point);
        }
        answer?;
        self.clock.reach(end);
        self.count(|counts| counts.device_sync += 1);
        Ok(())
    }

    fn defer(&self, error: DeviceError) {
        self.shared.defer(error);
    }
}

impl Drop for EmulatedDevice {
    fn drop(&mut self) {
        let control = self.control.get_mut();
        for hold in control.holds.drain(..).filter_map(|hold| hold.upgrade()) {
            hold.release();
        }
        for (_, entry) in control.streams.drain() {
            entry.queue.close();
            if let Some(thread) = entry.thread {
                control.closing.push((entry.queue, thread));
            }
        }
        for (_, thread) in control.closing.drain(..) {
            // A twin that dropped the last handle would be this thread itself; it ends on its own.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
