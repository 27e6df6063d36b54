//! One round of a stress run: a card, its pager, a manager and the models that threads share; and at its end
//! the proof that nothing is broken or left.
//!
//! A round depends on its seed alone: how the pager is set up, what the card does, what each thread does.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vram_pager::device::LiveObjects;
use vram_pager::manager::Manager;
use vram_pager::pager::{
    ModelOptions, OwnedGuard, PagedModel, Pager, PagerError, PagerOptions, PatchSet, RingSize,
};
use vram_pager::patcher::{IdleCache, ModelPatcher, PagedPatcher, Place};

use super::card::Card;
use super::check::{CheckError, Checker, Verdict};
use super::files::Kind;
use super::judge::{self, Judgement};
use super::numbers::Numbers;
use super::resident::Resident;
use super::runner::parts_of;
use super::turns::Digests;
use crate::output::Failure;

/// What all rounds count together.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) operations: AtomicU64,
    pub(super) checked: AtomicU64,
    pub(super) faults: AtomicU64,
    pub(super) evictions: AtomicU64,
    pub(super) streamed: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) injected: AtomicU64,
    pub(super) mismatches: AtomicU64,
    pub(super) leaks: AtomicU64,
    pub(super) rounds: AtomicU64,
    /// Set when every thread should end.
    pub(super) stop: AtomicBool,
    /// What went wrong in this round.
    pub(super) failures: Mutex<Vec<String>>,
    /// Where threads took turns, what they did.
    pub(super) digests: Mutex<Option<Digests>>,
}

impl Counts {
    /// Notes that something went wrong; everything ends.
    pub(super) fn fail(&self, what: String) {
        self.failures.lock().push(what);
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Takes what a comparison found.
    pub(super) fn take(&self, verdict: &Verdict) {
        self.checked.fetch_add(verdict.checked, Ordering::Relaxed);
        for wrong in &verdict.wrong {
            self.mismatches.fetch_add(1, Ordering::Relaxed);
            self.fail(format!("MISMATCH: {wrong}"));
        }
    }

    /// Judges an error of the pager; true if the run expects it.
    pub(super) fn expects(&self, what: &str, error: &PagerError) -> bool {
        self.judged(what, judge::pager(error), error)
    }

    pub(super) fn judged(&self, what: &str, judgement: Judgement, error: &dyn std::fmt::Display) -> bool {
        match judgement {
            Judgement::Shortage => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                true
            }
            Judgement::Injected => true,
            Judgement::Wrong => {
                self.fail(format!("{what}: {error}"));
                false
            }
        }
    }
}

/// A model that is open on the round's card.
pub(super) struct Opened {
    pub(super) kind: usize,
    pub(super) model: Arc<PagedModel>,
    /// None, and the sets of patches.
    pub(super) sets: Vec<Option<Arc<PatchSet>>>,
    /// The set that most threads fault it with now.
    pub(super) current: AtomicUsize,
    pub(super) patcher: Arc<PagedPatcher>,
    counts: Arc<Counts>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        let counts = self.model.counts();
        self.counts.evictions.fetch_add(counts.evicted_pages, Ordering::Relaxed);
        self.counts.streamed.fetch_add(counts.streamed, Ordering::Relaxed);
    }
}

/// How a round is made.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    /// The card, with its size.
    pub(super) device: String,
    pub(super) seed: u64,
    /// Whether calls are made to fail.
    pub(super) inject: bool,
    /// Whether the round must repeat exactly: without prefetch, which goes by how fast readers are.
    pub(super) exact: bool,
    /// Whether a misuse of memory names its calls.
    pub(super) sites: bool,
}

/// A round.
pub(super) struct World<'k> {
    pub(super) kinds: &'k [Kind],
    pub(super) counts: Arc<Counts>,
    pub(super) card: Card,
    pub(super) pager: Arc<Pager>,
    pub(super) manager: Manager,
    pub(super) slots: Vec<Mutex<Arc<Opened>>>,
    /// A model that is kept by modules, in some rounds.
    pub(super) resident: Option<Resident>,
    /// Guards that one thread took and another will release.
    pub(super) parcels: Mutex<Vec<OwnedGuard>>,
    /// Whether single calls are made to fail in this round.
    pub(super) inject: bool,
    /// Whether calls of a kind go on failing now.
    pub(super) lasting: AtomicBool,
    pub(super) page_bytes: u64,
    numbers: Numbers,
    before: Before,
}

/// What there was before the round.
#[derive(Debug)]
struct Before {
    live: LiveObjects,
    free: u64,
    misuses: u64,
    process: ProcessFigures,
}

/// What the process holds of the system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ProcessFigures {
    files: usize,
    threads: usize,
}

impl ProcessFigures {
    fn now() -> Self {
        let entries = |path: &str| fs::read_dir(path).map_or(0, Iterator::count);
        Self { files: entries("/proc/self/fd"), threads: entries("/proc/self/task") }
    }

    /// Whether there is more than `before`. There may be less: a thread that was joined is listed for a moment.
    fn exceeds(self, before: Self) -> bool {
        self.files > before.files || self.threads > before.threads
    }
}

impl<'k> World<'k> {
    /// Opens a card and everything on it.
    pub(super) fn open(kinds: &'k [Kind], setup: &Setup, counts: &Arc<Counts>) -> Result<Self, Failure> {
        let failed = |error: &dyn std::fmt::Display| Failure::Failed(error.to_string());
        let mut numbers = Numbers::new(setup.seed, 0x0000_B0A2_D000);
        let process = ProcessFigures::now();
        let card = Card::open(&setup.device)?;
        if setup.sites {
            card.keep_sites();
        }
        card.set_others(0);
        let info = card.device.info();
        let (page_bytes, total) = (info.granularity, info.total_bytes);
        let before = Before {
            live: card.device.live(),
            free: card.device.memory().map_err(|error| failed(&error))?.free,
            misuses: card.misuses(),
            process,
        };
        let mut inject = setup.inject && numbers.per_mille(750);
        if setup.inject && numbers.per_mille(80) {
            card.refuse_page_locks();
            inject = false;
        }
        let page_locked = numbers.pick(&[0, 16 * page_bytes, total, 4 * total, 4 * total]);
        let headroom = numbers.pick(&[0, 0, total / 32, total / 16]);
        let options = PagerOptions {
            page_bytes: None,
            headroom_bytes: Some(headroom),
            page_locked_bytes: Some(page_locked),
            ring: numbers.pick(&[
                RingSize::Modelled,
                RingSize::Modelled,
                RingSize::Quarters(4),
                RingSize::Quarters(12),
                RingSize::Pages(12),
            ]),
            readers: numbers.pick(&[1, 2, 3]),
            copy_streams: numbers.pick(&[1, 1, 2]),
            chunk_bytes: (page_bytes * numbers.pick(&[1, 4, 16])).min((total / 16).max(page_bytes)),
            prefetch_loads: if setup.exact { 0 } else { numbers.pick(&[0, 2, 8, 8]) },
            read_ahead_bytes: if setup.exact { 0 } else { numbers.pick(&[0, 4 * page_bytes, total]) },
            copy_ahead_bytes: numbers.pick(&[None, None, Some(4 * page_bytes)]),
            ..PagerOptions::default()
        };
        let pager = Pager::new(&card.device, options)?;
        let manager = Manager::new(std::slice::from_ref(&card.device));
        manager.set_knobs(|knobs| {
            knobs.reserve = total / 64;
            knobs.inference_floor = total / 16;
            knobs.headroom = Some(headroom);
            knobs.page_locked_budget = Some(page_locked);
        });
        if numbers.per_mille(800) {
            let idle: Arc<dyn IdleCache> = Arc::clone(&pager) as _;
            manager.register_idle_cache(Place::Card(0), &idle).map_err(|error| failed(&error))?;
        }
        let mut slots = Vec::new();
        for kind in 0..kinds.len() {
            slots.push(Mutex::new(Arc::new(open(kinds, kind, &pager, counts)?)));
        }
        let kind = numbers.place(kinds.len());
        let resident = if numbers.per_mille(500) && card.device.info().virtual_memory {
            Some(Resident::open(&card, kinds, kind).map_err(|error| failed(&error))?)
        } else {
            None
        };
        Ok(Self {
            kinds,
            counts: Arc::clone(counts),
            card,
            pager,
            manager,
            slots,
            resident,
            parcels: Mutex::default(),
            inject,
            lasting: AtomicBool::new(false),
            page_bytes,
            numbers,
            before,
        })
    }

    /// Opens a model anew, beside the one that is open.
    pub(super) fn reopen(&self, kind: usize) -> Result<Opened, PagerError> {
        open(self.kinds, kind, &self.pager, &self.counts)
    }

    /// Ends the round: with nobody in the way every model's every byte must be right once more, and then
    /// nothing may be left. Whatever is wrong is noted.
    pub(super) fn close(self) {
        let counts = Arc::clone(&self.counts);
        self.card.clear();
        self.card.seed_delays(0);
        self.card.set_others(0);
        self.parcels.lock().clear();
        self.note_deferred("after the threads' work");
        if !counts.stopped()
            && let Err(error) = self.last_pass()
        {
            counts.fail(format!("a pass with nobody in the way: {error}"));
        }
        let Self { card, pager, manager, slots, resident, parcels, inject, before, mut numbers, .. } = self;
        if inject && numbers.per_mille(500) {
            card.inject(&mut numbers, false);
        }
        drop((parcels, resident, slots, manager, pager));
        card.clear();
        for error in card.take_deferred() {
            counts.judged("deferred by a drop", judge::device(&error), &error);
        }
        let mut left = Vec::new();
        let live = card.device.live();
        if live != before.live {
            left.push(format!("{live:?} on the card, {:?} before", before.live));
        }
        // What was freed in a stream's order is free once the stream is there.
        if let Err(error) = card.device.synchronize() {
            counts.fail(format!("waiting for the card at the end: {error}"));
        }
        if let Err(error) = card.device.pool_trim(0) {
            counts.fail(format!("trimming the pool at the end: {error}"));
        }
        match card.device.memory() {
            Ok(memory) if memory.free == before.free => {}
            Ok(memory) => left.push(format!("{} bytes free, {} before", memory.free, before.free)),
            Err(error) => counts.fail(format!("the card's figures at the end: {error}")),
        }
        let misuses = card.misuses() - before.misuses;
        if misuses > 0 {
            counts.fail(format!("the driver was misused {misuses} times, see above"));
        }
        counts.injected.fetch_add(card.injected(), Ordering::Relaxed);
        drop(card);
        // A thread that was joined is still listed for a moment.
        let patience = Instant::now() + Duration::from_secs(2);
        let mut process = ProcessFigures::now();
        while process.exceeds(before.process) && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(1));
            process = ProcessFigures::now();
        }
        if process.exceeds(before.process) {
            left.push(format!("{process:?}, before {:?}", before.process));
        }
        counts.leaks.fetch_add(left.len() as u64, Ordering::Relaxed);
        for what in left {
            counts.fail(format!("LEAK: {what}"));
        }
        counts.rounds.fetch_add(1, Ordering::Relaxed);
    }

    fn note_deferred(&self, when: &str) {
        for error in self.card.take_deferred() {
            self.counts.judged(when, judge::device(&error), &error);
        }
    }

    /// Faults every piece of every model, patched and not, with every byte checked.
    fn last_pass(&self) -> Result<(), String> {
        let text = |error: PagerError| error.to_string();
        self.manager.set_knobs(|knobs| knobs.headroom = Some(0));
        self.pager.set_headroom(0).map_err(text)?;
        if let Some(resident) = &self.resident {
            resident.patcher.detach(true).map_err(|error| error.to_string())?;
        }
        let stream = Arc::new(self.pager.stream().map_err(text)?);
        let mut checker = Checker::new(&self.pager, &stream).map_err(text)?;
        for slot in &self.slots {
            let opened = Arc::clone(&slot.lock());
            for set in [opened.sets.len() - 1, 0] {
                let patches = opened.sets[set].as_ref();
                for unit in 0..opened.model.index().units().len() {
                    let unit = vram_pager::weights::UnitId(u32::try_from(unit).unwrap_or(u32::MAX));
                    for piece in 0..opened.model.pieces(unit).map_err(text)? {
                        let guard =
                            opened.model.fault_piece_with(patches, unit, piece, &stream).map_err(text)?;
                        self.counts.faults.fetch_add(1, Ordering::Relaxed);
                        let parts = parts_of(&opened, set, &guard.tensors());
                        if !checker.has_room(parts.len()) {
                            self.compare(&mut checker)?;
                        }
                        checker.ask(&parts).map_err(text)?;
                    }
                }
            }
        }
        self.compare(&mut checker)
    }

    fn compare(&self, checker: &mut Checker) -> Result<(), String> {
        match checker.compare(self.kinds) {
            Ok(verdict) => {
                self.counts.take(&verdict);
                Ok(())
            }
            Err(CheckError::Device(error)) => Err(error.to_string()),
            Err(CheckError::Expected(failure)) => Err(format!("{failure:?}")),
        }
    }
}

fn open(kinds: &[Kind], kind: usize, pager: &Arc<Pager>, counts: &Arc<Counts>) -> Result<Opened, PagerError> {
    let of = &kinds[kind];
    let options = ModelOptions { compute: of.compute, piece_bytes: of.piece_bytes, compute_per_gib: None };
    let model = pager.open_model(Arc::clone(&of.index), &options)?;
    let mut sets = vec![None];
    for patches in &of.patches {
        sets.push(Some(PatchSet::new(&model, patches.clone())?));
    }
    let patcher = PagedPatcher::new(&model, Place::Card(0));
    Ok(Opened { kind, model, sets, current: AtomicUsize::new(0), patcher, counts: Arc::clone(counts) })
}
