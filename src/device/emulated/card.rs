//! The emulated device itself: how it is opened, what it owns, what tests may do to it.
//!
//! Owns the control lock (streams, events, engines) and what the workers share (memory, deferred errors).
//! Dropping the device lets queued work run and joins the workers; they hold no device. May import
//! everything of `emulated`.

#![deny(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use super::backing::{Backing, MappingBudget};
use super::clock::{CallCosts, Engine, Engines, HostClock};
use super::fault::{CallKind, Fault, FaultError, Faults};
use super::journal::Journal;
use super::memory::Memory;
use super::pageable::Buffers;
use super::stream::{Hold, HoldState, Point, StreamQueue, Work};
use super::usage::Refusal;
use super::watch::{Before, History, Seen};
use crate::device::handle::host_page_bytes;
use crate::device::kernels::{HostTwin, builtin};
use crate::device::{
    CallCounts, Device, DeviceError, DeviceInfo, DeviceKind, LiveObjects, MemoryFigures, StreamId,
};
use crate::units::{GIB, KIB, MIB, ModelTime, Rate, format_size};

/// The default page of an emulated card in bytes, as on current CUDA cards.
pub const DEFAULT_PAGE_BYTES: u64 = 2 * MIB;

/// The default link, about what sixteen lanes of the fourth PCI Express generation reach.
pub const DEFAULT_LINK: Rate = Rate(25_000_000_000);

/// Errors that are kept for later; more are dropped, the first tell the story.
const MOST_DEFERRED: usize = 64;

/// How an emulated card is opened.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each switch is one of the card's abilities or habits")]
pub struct EmulatedOptions {
    /// The card's size in bytes; rounded down to whole pages.
    pub bytes: u64,
    /// The granularity in bytes: a power of two and a multiple of the host's page.
    pub page_bytes: u64,
    /// The rate of copies in each direction.
    pub link: Rate,
    /// The rate of file reads; `None` is no cost at all.
    pub disk: Option<Rate>,
    /// Whether bytes are kept. Without, there are addresses, accounts and the clock, for cards and tables
    /// larger than this machine; work is done as it is enqueued and moves nothing.
    pub keeps_bytes: bool,
    /// Whether there are virtual memory calls. Without, memory comes from the activation pool alone, as on
    /// some virtual and embedded cards.
    pub virtual_memory: bool,
    /// What calls cost on the modelled clock.
    pub costs: CallCosts,
    /// Whether new and released frames are filled with `0xDB`; on by default in debug builds.
    pub poison: bool,
    /// Whether memory in use is watched: whoever touches the same bytes must be ordered by streams and fences,
    /// and memory is taken away only when the host was told that all work on it is done. What is not so is
    /// refused as misuse, however lucky the threads were. On by default in debug builds.
    pub watch: bool,
    /// The most memory mappings that the process may have, all its emulated cards together; `None` is
    /// three quarters of the system's limit.
    pub max_mappings: Option<u64>,
}

impl EmulatedOptions {
    /// A card of `bytes` with everything else at its default.
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            page_bytes: DEFAULT_PAGE_BYTES,
            link: DEFAULT_LINK,
            disk: None,
            keeps_bytes: true,
            virtual_memory: true,
            costs: CallCosts::default(),
            poison: cfg!(debug_assertions),
            watch: cfg!(debug_assertions),
            max_mappings: None,
        }
    }

    /// The size in whole pages, or why the card cannot be.
    pub(in crate::device) fn whole_pages(&self) -> Result<u64, String> {
        let page = self.page_bytes;
        if !page.is_power_of_two() || !page.is_multiple_of(host_page_bytes()) {
            return Err(format!(
                "its page of {page} bytes is not a power of two that is a multiple of the host's page, {}",
                format_size(host_page_bytes())
            ));
        }
        let pages = self.bytes / page;
        if pages == 0 {
            return Err(format!("its size of {} bytes is less than one page of {page}", self.bytes));
        }
        Ok(pages)
    }

    /// The device string that names such a card, as far as a string can.
    fn name(&self, bytes: u64) -> String {
        let size = exact_size(bytes);
        let bytes = if self.keeps_bytes { "" } else { ",bytes=none" };
        let vmm = if self.virtual_memory { "" } else { ",vmm=none" };
        match self.page_bytes {
            DEFAULT_PAGE_BYTES => format!("emulated:{size}{bytes}{vmm}"),
            page => format!("emulated:{size},page={}{bytes}{vmm}", exact_size(page)),
        }
    }
}

/// A size in the largest unit that divides it.
fn exact_size(bytes: u64) -> String {
    for (unit, name) in [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")] {
        if bytes.is_multiple_of(unit) {
            return format!("{}{name}", bytes / unit);
        }
    }
    bytes.to_string()
}

/// What the workers and the device both need.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) memory: Mutex<Memory>,
    pub(super) delay_seed: AtomicU64,
    deferred: Mutex<Vec<DeviceError>>,
    /// What the watch over memory in use refused.
    caught: Mutex<Vec<DeviceError>>,
    /// The text of the failure that lost the device.
    lost: OnceLock<String>,
}

impl Shared {
    pub(super) fn defer(&self, error: DeviceError) {
        if let DeviceError::Lost { first, .. } = &error {
            let _ = self.lost.set(first.clone());
        }
        let mut deferred = self.deferred.lock();
        if deferred.len() < MOST_DEFERRED {
            deferred.push(error);
        }
    }

    /// Remembers what the watch over memory in use refused.
    pub(super) fn catch(&self, error: &DeviceError) {
        let mut caught = self.caught.lock();
        if caught.len() < MOST_DEFERRED {
            caught.push(error.clone());
        }
    }
}

#[derive(Debug)]
pub(super) struct StreamEntry {
    pub(super) queue: Arc<StreamQueue>,
    /// The modelled end of the stream's work.
    pub(super) end: ModelTime,
    /// What its next work comes after, where that is watched.
    pub(super) seen: Option<Seen>,
    thread: Option<JoinHandle<()>>,
}

impl StreamEntry {
    /// The point that the stream has been given work up to.
    pub(super) fn point(&self) -> Point {
        Point {
            stream: Arc::clone(&self.queue),
            sequence: self.queue.enqueued(),
            time: self.end,
            seen: self.seen.as_ref().map(|seen| Arc::new(seen.clone())),
        }
    }

    /// The stream waits for a point of another one.
    pub(super) fn follow(&mut self, point: &Point) {
        if let Some(seen) = &mut self.seen {
            point.add_to(seen);
        }
    }
}

fn no_stream(call: &'static str, stream: StreamId) -> DeviceError {
    DeviceError::Misuse { call, why: format!("stream {} does not exist (any more)", stream.0) }
}

/// Streams, events and engines.
#[derive(Debug, Default)]
pub(super) struct Control {
    pub(super) streams: HashMap<u64, StreamEntry>,
    /// Each event's newest record.
    pub(super) events: HashMap<u64, Option<Point>>,
    pub(super) engines: Engines,
    /// Destroyed streams whose work may still run.
    closing: Vec<(Arc<StreamQueue>, JoinHandle<()>)>,
    next_stream: u64,
    pub(super) next_event: u64,
    /// What was done when, while somebody wants to know.
    pub(super) journal: Option<Journal>,
    holds: Vec<Weak<HoldState>>,
    /// What the host was told is done, where memory in use is watched.
    pub(super) told: Option<Seen>,
}

impl Control {
    pub(super) fn stream(
        &mut self,
        call: &'static str,
        stream: StreamId,
    ) -> Result<&mut StreamEntry, DeviceError> {
        self.streams.get_mut(&stream.0).ok_or_else(|| no_stream(call, stream))
    }

    /// Places something on `stream` and an engine; answers the stream's entry.
    pub(super) fn schedule(
        &mut self,
        call: &'static str,
        stream: StreamId,
        engine: Engine,
        earliest: ModelTime,
        duration: Duration,
    ) -> Result<&mut StreamEntry, DeviceError> {
        let Self { streams, engines, .. } = self;
        let entry = streams.get_mut(&stream.0).ok_or_else(|| no_stream(call, stream))?;
        engines.schedule(engine, &mut entry.end, earliest, duration);
        Ok(entry)
    }

    /// Starts a stream with its worker.
    pub(super) fn start_stream(
        &mut self,
        shared: &Arc<Shared>,
        inline: bool,
    ) -> Result<StreamId, DeviceError> {
        self.reap();
        let id = StreamId(self.next_stream);
        let queue = Arc::new(StreamQueue::new(id, inline));
        let thread = if inline {
            None
        } else {
            let (queue, shared) = (Arc::clone(&queue), Arc::clone(shared));
            let builder = std::thread::Builder::new().name(format!("emulated-{}", id.0));
            let spawned = builder.spawn(move || super::stream::run_worker(&queue, &shared));
            Some(spawned.map_err(|error| DeviceError::Host {
                call: "create_stream",
                bytes: 0,
                why: error.to_string(),
            })?)
        };
        self.next_stream += 1;
        let seen = self.told.as_ref().map(|_| Seen::default());
        self.streams.insert(id.0, StreamEntry { queue, end: ModelTime::ZERO, seen, thread });
        Ok(id)
    }

    /// Takes a stream's name away; its work still runs.
    pub(super) fn end_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.stream("destroy_stream", stream)?;
        if let Some(StreamEntry { queue, thread: Some(thread), .. }) = self.streams.remove(&stream.0) {
            queue.close();
            self.closing.push((queue, thread));
        }
        self.reap();
        Ok(())
    }

    /// Joins workers that have ended.
    fn reap(&mut self) {
        let (ended, running): (Vec<_>, Vec<_>) =
            self.closing.drain(..).partition(|(_, thread)| thread.is_finished());
        self.closing = running;
        for (_, thread) in ended {
            let _ = thread.join();
        }
        self.holds.retain(|hold| hold.strong_count() > 0);
        if self.told.is_some() {
            let Self { streams, closing, told, .. } = self;
            let mut live: Vec<u64> = streams.keys().copied().collect();
            live.extend(closing.iter().map(|(queue, _)| queue.id().0));
            let all = streams.values_mut().filter_map(|entry| entry.seen.as_mut()).chain(told);
            all.for_each(|seen| seen.forget(|stream| live.contains(&stream)));
        }
    }

    /// Whether a stream's work may still run.
    pub(super) fn exists(&self, stream: u64) -> bool {
        self.streams.contains_key(&stream) || self.closing.iter().any(|(queue, _)| queue.id().0 == stream)
    }

    /// The host was told that the work up to `point` is done.
    pub(super) fn tell(&mut self, point: &Point) {
        if let Some(told) = &mut self.told {
            point.add_to(told);
        }
    }

    /// All queues, of destroyed streams too.
    fn queues(&self) -> impl Iterator<Item = &Arc<StreamQueue>> {
        let streams = self.streams.values().map(|entry| &entry.queue);
        streams.chain(self.closing.iter().map(|(queue, _)| queue))
    }

    /// The end of everything that was enqueued so far.
    pub(super) fn all_points(&self) -> Vec<Point> {
        let time = self.engines.last_end();
        let point = |stream: &Arc<StreamQueue>| Point {
            stream: Arc::clone(stream),
            sequence: stream.enqueued(),
            time,
            seen: None,
        };
        self.queues().map(point).collect()
    }
}

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
