//! The one table of everything, how a call enters it, and how it answers.
//!
//! A call counts, may be told to fail, finds the card of the context that is current on its thread, and
//! answers a code. What a card does not recover from is latched: every later call of its context answers
//! the same code.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::ThreadId;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use vram_pager::device::emulated::EmulatedDevice;
use vram_pager::device::{DeviceError, EventId, FrameId, StreamId};
use vram_pager::units::DeviceRange;

use crate::codes::{
    ILLEGAL_ADDRESS, INVALID_CONTEXT, INVALID_VALUE, NOT_FOUND, NOT_INITIALIZED, NOT_SUPPORTED,
    OPERATING_SYSTEM, OUT_OF_MEMORY, UNKNOWN,
};
use crate::settings::{Failure, Settings};

/// Why a call is refused: a code, and what to tell if it was misuse.
#[derive(Debug)]
pub struct Fail {
    pub code: i32,
    pub why: Option<String>,
}

impl Fail {
    /// A refusal that a right program can meet.
    pub fn plain(code: i32) -> Self {
        Self { code, why: None }
    }

    /// A refusal that only a wrong program meets.
    pub fn misuse(code: i32, why: impl Into<String>) -> Self {
        Self { code, why: Some(why.into()) }
    }
}

impl From<DeviceError> for Fail {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::OutOfMemory { .. } => Self::plain(OUT_OF_MEMORY),
            DeviceError::InvalidArgument { .. } | DeviceError::Misuse { .. } => {
                Self::misuse(INVALID_VALUE, error.to_string())
            }
            DeviceError::Unsupported { .. } => Self::plain(NOT_SUPPORTED),
            DeviceError::UnknownKernel { .. } => Self::plain(NOT_FOUND),
            DeviceError::Driver { code, .. } => Self::plain(code),
            DeviceError::Host { .. } => Self::plain(OPERATING_SYSTEM),
            other => Self::misuse(UNKNOWN, other.to_string()),
        }
    }
}

/// The answer of a call's body.
pub type Answer = Result<(), Fail>;

/// A stream that somebody created.
#[derive(Clone, Copy)]
pub struct StreamEntry {
    pub id: StreamId,
    /// Its place in the order of creation on its card, from 1.
    pub number: u64,
    /// Whether it synchronises with the legacy stream.
    pub blocking: bool,
    pub priority: c_int,
    pub flags: u32,
}

/// An event that somebody created.
#[derive(Clone, Copy)]
pub struct EventEntry {
    pub id: EventId,
    /// Whether it keeps time.
    pub timed: bool,
    pub recorded: bool,
}

/// A frame by its handle.
pub struct FrameEntry {
    pub id: FrameId,
    pub bytes: u64,
}

/// Memory of `cuMemAlloc`.
pub struct PlainEntry {
    pub range: DeviceRange,
    pub frame: FrameId,
}

/// A pool of `cuMemPoolCreate`, or the default one.
#[derive(Default)]
pub struct PoolEntry {
    pub threshold: u64,
    pub used: u64,
    pub used_high: u64,
    pub reserved_high: u64,
    pub reuse: [c_int; 3],
}

/// Memory of a pool.
pub struct PoolBlock {
    pub bytes: u64,
    pub pool: usize,
}

/// A context and everything in it: what one retained card has.
pub struct Card {
    pub device: Arc<EmulatedDevice>,
    pub context: usize,
    pub retained: u32,
    pub lost: Option<i32>,
    pub legacy: StreamId,
    pub per_thread: HashMap<ThreadId, StreamId>,
    pub streams: HashMap<usize, StreamEntry>,
    pub streams_created: u64,
    pub events: HashMap<usize, EventEntry>,
    pub frames: HashMap<u64, FrameEntry>,
    pub ranges: BTreeMap<u64, u64>,
    /// What was reserved for each range, which is more where it is aligned to more than a page.
    pub whole_ranges: HashMap<u64, DeviceRange>,
    /// Mappings by address: bytes.
    pub mappings: BTreeMap<u64, u64>,
    pub plain: BTreeMap<u64, PlainEntry>,
    pub pools: HashMap<usize, PoolEntry>,
    pub default_pool: usize,
    pub pool_blocks: HashMap<u64, PoolBlock>,
    /// Page-locked host memory: start to bytes, as registered.
    pub host: BTreeMap<usize, usize>,
    /// Blocks of `cuMemAllocHost`, which are page-locked: start to bytes.
    pub host_blocks: BTreeMap<usize, usize>,
    /// Modules by handle: the entries in their text.
    pub modules: HashMap<usize, Vec<String>>,
    /// Functions by handle: module and name.
    pub functions: HashMap<usize, (usize, String)>,
}

impl Card {
    /// What a program left behind, in words; empty if nothing.
    pub fn leftovers(&self) -> Vec<String> {
        let counts = [
            ("streams", self.streams.len()),
            ("events", self.events.len()),
            ("frames", self.frames.len()),
            ("address ranges", self.ranges.len()),
            ("mappings", self.mappings.len()),
            ("allocations", self.plain.len()),
            ("pool allocations", self.pool_blocks.len()),
            ("pools", self.pools.len() - 1),
            ("page-locked blocks", self.host.len()),
            ("host allocations", self.host_blocks.len()),
            ("modules", self.modules.len()),
        ];
        counts.iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{count} {what}")).collect()
    }
}

/// Everything.
pub struct State {
    pub settings: Settings,
    pub initialised: bool,
    /// Each card while its primary context is retained.
    pub cards: Vec<Option<Card>>,
    /// Handles of streams that pass for ones that are being captured.
    pub capturing: HashSet<usize>,
    next_handle: usize,
    failures: Vec<Failure>,
    calls: u64,
    calls_by_name: HashMap<&'static str, u64>,
    failed: u64,
}

impl State {
    /// A handle that was never given out before. Looks like a pointer, is none.
    pub fn handle(&mut self) -> usize {
        self.next_handle += 0x40;
        self.next_handle
    }

    /// Counts a call, and answers the code that it was told to fail with.
    fn strike(&mut self, call: &'static str) -> Option<i32> {
        self.calls += 1;
        let named = self.calls_by_name.entry(call).or_insert(0);
        *named += 1;
        let (any, named) = (self.calls, *named);
        let code = self
            .failures
            .iter()
            .find(|failure| {
                let number = match failure.call.as_str() {
                    "*" => any,
                    name if name == call => named,
                    _ => return false,
                };
                number == failure.nth || (failure.forever && number > failure.nth)
            })
            .map(|failure| failure.code);
        self.failed += u64::from(code.is_some());
        code
    }

    /// Calls that failed because they were told to, since the library was loaded.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// Sets the failures anew and counts calls from here on.
    pub fn set_failures(&mut self, failures: Vec<Failure>) {
        self.failures = failures;
        self.calls = 0;
        self.calls_by_name.clear();
    }

    /// Calls of one name since the failures were set.
    pub fn calls_of(&self, call: &str) -> u64 {
        self.calls_by_name.get(call).copied().unwrap_or(0)
    }

    /// Calls since the failures were set.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// The same by name.
    pub fn calls_by_name(&self) -> String {
        let mut lines: Vec<String> =
            self.calls_by_name.iter().map(|(name, calls)| format!("{name}={calls}\n")).collect();
        lines.sort();
        lines.concat()
    }

    /// The card of a context.
    pub fn card_of(&mut self, context: usize) -> Option<&mut Card> {
        self.cards.iter_mut().flatten().find(|card| card.context == context)
    }

    /// The card of the context that is current on this thread, and whether it still answers.
    pub fn current(&mut self) -> Result<&mut Card, Fail> {
        if !self.initialised {
            return Err(Fail::misuse(NOT_INITIALIZED, "cuInit was not called"));
        }
        let context = current_context()
            .ok_or_else(|| Fail::misuse(INVALID_CONTEXT, "no context is current on this thread"))?;
        let card = self
            .card_of(context)
            .ok_or_else(|| Fail::misuse(INVALID_CONTEXT, "the current context was destroyed"))?;
        let late: Vec<String> = card.device.take_deferred().iter().map(ToString::to_string).collect();
        if !late.is_empty() {
            card.lost.get_or_insert(ILLEGAL_ADDRESS);
            return Err(Fail::misuse(ILLEGAL_ADDRESS, late.join("; ")));
        }
        card.lost.map_or(Ok(()), |code| Err(Fail::plain(code)))?;
        Ok(card)
    }
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
    let settings = Settings::from_environment();
    Mutex::new(State {
        cards: (0..settings.devices).map(|_| None).collect(),
        failures: settings.failures.clone(),
        settings,
        initialised: false,
        capturing: HashSet::new(),
        next_handle: 0x0057_0000_0000,
        calls: 0,
        calls_by_name: HashMap::new(),
        failed: 0,
    })
});

/// Everything, locked.
pub fn state() -> MutexGuard<'static, State> {
    STATE.lock()
}

thread_local! {
    /// The contexts that this thread pushed, the current one last.
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The context that is current on this thread.
pub fn current_context() -> Option<usize> {
    CONTEXTS.with_borrow(|contexts| contexts.last().copied())
}

/// Changes the contexts of this thread.
pub fn with_contexts<T>(change: impl FnOnce(&mut Vec<usize>) -> T) -> T {
    CONTEXTS.with_borrow_mut(change)
}

static MISUSES: AtomicU64 = AtomicU64::new(0);

/// How often misuse was told.
pub fn misuses() -> u64 {
    MISUSES.load(Ordering::Relaxed)
}

static NANOSECONDS: AtomicU64 = AtomicU64::new(0);

/// The time that was spent inside driver calls, all threads together.
pub fn nanoseconds() -> u64 {
    NANOSECONDS.load(Ordering::Relaxed)
}

/// Texts of misuse that are kept for a test to ask for.
const MOST_TOLD: usize = 64;

static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// What was told of misuse since this was asked last.
pub fn take_told() -> Vec<String> {
    std::mem::take(&mut *TOLD.lock())
}

/// Tells of misuse.
pub fn shout(call: &str, why: &str) {
    MISUSES.fetch_add(1, Ordering::Relaxed);
    {
        let mut told = TOLD.lock();
        if told.len() < MOST_TOLD {
            told.push(format!("{call}: {why}"));
        }
    }
    eprintln!("cuda stand-in: MISUSE in {call}: {why}");
    if state().settings.abort_on_misuse {
        std::process::abort();
    }
}

/// Codes that break a context, as the driver's documentation has them.
fn is_sticky(code: i32) -> bool {
    matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719)
}

/// Runs a call's body and answers its code.
pub fn answer(call: &'static str, body: impl FnOnce() -> Answer) -> c_int {
    let began = Instant::now();
    let code = answer_untimed(call, body);
    let spent = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    NANOSECONDS.fetch_add(spent, Ordering::Relaxed);
    code
}

fn answer_untimed(call: &'static str, body: impl FnOnce() -> Answer) -> c_int {
    let told = state().strike(call);
    let outcome = match told {
        Some(code) => Err(Fail::plain(code)),
        None => catch_unwind(AssertUnwindSafe(body))
            .unwrap_or_else(|_| Err(Fail::misuse(UNKNOWN, "the stand-in itself panicked"))),
    };
    let Err(fail) = outcome else { return 0 };
    if is_sticky(fail.code)
        && let Some(context) = current_context()
        && let Some(card) = state().card_of(context)
    {
        card.lost.get_or_insert(fail.code);
    }
    if let Some(why) = &fail.why {
        shout(call, why);
    }
    fail.code
}

/// Writes a result through a caller's pointer; null is refused.
pub fn write<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(Fail::misuse(INVALID_VALUE, "a result's pointer is null"));
    }
    // SAFETY: not null, and the caller of the driver's call passes a valid pointer.
    unsafe { to.write(value) };
    Ok(())
}

/// Exports functions under the driver's names. Each body answers like a closure; a sticky failure and an
/// injected one are handled around it.
macro_rules! driver_calls {
    ($( fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $body:block )*) => { $(
        // SAFETY: the driver's name, exported once from this library.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $kind),*) -> std::ffi::c_int {
            $crate::state::answer(stringify!($name), move || $body)
        }
    )* };
}
