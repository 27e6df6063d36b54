//! The pager of one card: its threads, its knobs, and the models that are opened on it.

#![deny(unsafe_code)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

use super::activations::Activations;
use super::choices::Choices;
use super::choose::first_choice;
use super::core::{Control, Core, ModelState, Page};
use super::counters::{HitCounts, ModelCounts};
use super::error::PagerError;
use super::fault;
use super::forecast::{ASSUMED_LINK, headroom_of, layout_options, scratch_bytes, widens};
use super::frames::Frames;
use super::learner::OrderLearner;
use super::load;
use super::loads::Loads;
use super::measure::Measure;
use super::model::{Addresses, PagedModel};
use super::options::{ModelOptions, PagerOptions};
use super::order::{PagePlace, PassOrder, PlaceSet};
use super::plain::{self, Plain, PlainModel};
use super::plan::Plan;
use super::pool_use::PoolUse;
use super::reclaim;
use super::replan;
use super::streams::{PagerStream, StreamTable};
use super::words::Words;
use crate::device::{AddressRange, PoolAllocation, SharedDevice, Stream, StreamPriority, without_panics};
use crate::staging::{Arena, ArenaFigures, ArenaOptions, budget};
use crate::sync::Padded;
use crate::transfer::{CopyEngine, ReaderPool};
use crate::units::{Rate, try_filled, try_table};
use crate::weights::{PageLayout, TensorIndex};

/// Bytes that making an order takes for a page, at most.
const ORDER_BYTES: usize = 48;

/// Bytes that a span's word and its places in orders take.
const SPAN_BYTES: usize = 192;

/// The pager of one card. Models are opened on it; they share its frames, its ring and its staging
/// memory.
pub struct Pager {
    core: Arc<Core>,
    /// Dropped, and so joined, after everything that could still submit to it.
    _readers: ReaderPool,
}

/// What the pager holds of its card and of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PagerFigures {
    /// The page size in bytes.
    pub page_bytes: u64,
    /// Bytes of pages with a frame of their own, all models together.
    pub resident_bytes: u64,
    /// Bytes of the ring's frames.
    pub ring_bytes: u64,
    /// Bytes of frames without a page.
    pub idle_bytes: u64,
    /// The most bytes of frames and activation pool that there were at once.
    pub peak_bytes: u64,
    /// Bytes that frames and ring may take, at the last look.
    pub budget_bytes: u64,
    /// Bytes left free, device wide.
    pub headroom_bytes: u64,
    /// Staging memory.
    pub staging: ArenaFigures,
    /// The rate of the link from the host: as the device tells it, or else the fastest that copies have reached so
    /// far by the device's own clock. `None` until some were made, and where a device tells neither; plans are made
    /// for [`super::ASSUMED_LINK`] then.
    pub link: Option<Rate>,
}

impl Pager {
    /// Opens the pager of a card.
    ///
    /// # Errors
    /// [`PagerError::InvalidArgument`] for a page size that the device cannot have, and for more threads or streams
    /// than there may be; no thread, no stream.
    pub fn new(device: &SharedDevice, options: PagerOptions) -> Result<Arc<Self>, PagerError> {
        let device = &without_panics(device);
        let info = device.info();
        let page_bytes = options.check(info)?;
        let headroom = headroom_of(info.total_bytes, &options);
        let limit = options.page_locked_bytes.unwrap_or_else(budget::this_machines_limit);
        let chunk_pages = options.chunk_pages(page_bytes);
        let load_pages = options.load_bytes / page_bytes;
        let load_pages = u32::try_from(load_pages.clamp(1, u64::from(chunk_pages))).unwrap_or(1);
        let arena = Arena::new(
            device,
            &ArenaOptions { slot_bytes: page_bytes, run_slots: chunk_pages, limit_bytes: limit },
        );
        let readers = ReaderPool::new(options.readers)
            .map_err(|error| PagerError::Reader { model: info.name.clone(), why: error.to_string() })?;
        let control = Control {
            mutated: options.mutated(),
            frames: Frames::new(device, page_bytes),
            engine: CopyEngine::new(device, options.copy_streams)?,
            streams: StreamTable::new(),
            models: Vec::new(),
            loads: Loads::new(),
            budget: 0,
            budget_read_at: None,
            next_priority: 0,
            activations: Activations::default(),
            pool_use: PoolUse::default(),
            page_loads: 0,
            ring_hand: 0,
            wanted: Vec::new(),
            missing: Vec::new(),
            cached_bytes: 0,
            under_way: 0,
            releases: 0,
            refused: false,
            sleepers: Vec::with_capacity(16),
            ring_grew: false,
            captured: Vec::new(),
            closing: Vec::new(),
            plain: if info.virtual_memory { None } else { Some(Plain::new(device)?) },
            scratch: Vec::new(),
        };
        let core = Core {
            device: Arc::clone(device),
            options,
            page_bytes,
            chunk_pages,
            load_pages,
            arena,
            readers: readers.queue(),
            headroom: AtomicU64::new(headroom),
            looked_at: Padded::default(),
            control: Mutex::new(control),
            changed: Condvar::new(),
            whole_turn: Mutex::new(()),
        };
        Ok(Arc::new(Self { core: Arc::new(core), _readers: readers }))
    }

    pub(super) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Whether a unit has one device address for its model's whole life. On a device without virtual memory
    /// calls it has not: units are then whole, in an allocation of their own or in a ring slot, and an
    /// address holds for its guard only.
    pub fn stable_addresses(&self) -> bool {
        self.core.device.info().virtual_memory
    }

    /// The card.
    pub fn device(&self) -> &SharedDevice {
        &self.core.device
    }

    /// A new stream of the card, registered.
    pub fn stream(&self) -> Result<PagerStream, PagerError> {
        self.register(Arc::new(Stream::new(&self.core.device, StreamPriority::Normal)?))
    }

    /// Registers a stream that exists, so that units may be faulted on it.
    pub fn register(&self, stream: Arc<Stream>) -> Result<PagerStream, PagerError> {
        PagerStream::register(&self.core, stream)
    }

    /// Opens a model: reserves its addresses, which costs no memory, and plans. Nothing is read yet.
    pub fn open_model(
        self: &Arc<Self>,
        index: Arc<TensorIndex>,
        options: &ModelOptions,
    ) -> Result<Arc<PagedModel>, PagerError> {
        let core = &self.core;
        let total = core.device.info().total_bytes;
        let layout_options = layout_options(total, core.headroom(), core.page_bytes, options);
        let layout = Arc::new(PageLayout::new(&index, &layout_options)?);
        let table = try_filled("a model's page table", layout.page_count() as usize, Page::ABSENT)?;
        // What its orders need beside, looked for ahead: they are made again and again, where no error can be told.
        let beside = layout.page_count() as usize * ORDER_BYTES + layout.span_count() as usize * SPAN_BYTES;
        drop(try_table::<u8>("a model's order", beside)?);
        let name = index.files().first().map_or_else(String::new, |file| file.path().display().to_string());
        let pages = layout.page_count();
        let words = Words::new(layout.span_count() as usize);
        let hits = Arc::new(HitCounts::new());
        let (range, own) = if self.stable_addresses() {
            let range = AddressRange::reserve(&core.device, (pages as usize).max(1), core.page_bytes)?;
            (Some(range), None)
        } else {
            (None, Some(PlainModel::new(&layout, u64::from(core.chunk_pages) * core.page_bytes)))
        };
        let addresses = match (&range, &own) {
            (Some(range), _) => Addresses::Stable(range.range()),
            (None, own) => Addresses::OfGuards(
                own.as_ref().map_or_else(|| Vec::new().into(), |own| Arc::clone(&own.addresses)),
            ),
        };
        let spans = layout.span_count();
        let choice = first_choice(core.options.ring);
        let order =
            PassOrder::new((0..spans).collect(), pages, |span| layout.span(span).pages, &choice.keeping);
        let whole_units = HashSet::new();
        if widens(&layout) {
            self.ensure_scratch()?;
        }
        let mapped = core.options.source.map(&index)?;
        let measures = range.is_some() && core.device.tells_elapsed();
        let mut control = core.control.lock();
        control.next_priority += 1;
        let state = ModelState {
            name: name.clone(),
            index: Arc::clone(&index),
            layout: Arc::clone(&layout),
            words: words.clone(),
            range,
            plain: own,
            pages: table,
            order,
            learner: OrderLearner::new(spans as usize),
            whole_units,
            plan: Plan::default(),
            choice,
            measure: if measures { Measure::new(spans as usize) } else { Measure::default() },
            choices: Choices::default(),
            compute_per_gib: options.compute_per_gib,
            link: control.engine.link().unwrap_or(ASSUMED_LINK),
            planned_frames: u32::MAX,
            streamed: PlaceSet::default(),
            dealt_ring: u32::MAX,
            edits: 0,
            cursor: PagePlace::default(),
            priority: control.next_priority,
            promoted: false,
            together: 1,
            together_now: 1,
            faults_then: 0,
            passes: 0,
            several: false,
            resident: 0,
            resident_end: 0,
            cache: BTreeMap::new(),
            mapped,
            errors: HashMap::new(),
            counts: ModelCounts::default(),
            said_pieces: false,
            inaccessible: HashSet::new(),
            attached: None,
            bringing: 0,
            exchanges: 0,
            stale: HashSet::new(),
        };
        let id = if let Some(place) = control.models.iter().position(Option::is_none) {
            control.models[place] = Some(Box::new(state));
            place
        } else {
            control.models.push(Some(Box::new(state)));
            control.models.len() - 1
        };
        let id = u32::try_from(id).unwrap_or(u32::MAX);
        let planned = reclaim::refresh_budget(core, &mut control, true)
            .and_then(|_| replan::replan(core, &mut control, id, true));
        drop(control);
        // From here on the model's drop takes everything back.
        let model =
            Arc::new(PagedModel { pager: Arc::clone(self), id, name, index, layout, words, hits, addresses });
        planned?;
        Ok(model)
    }

    /// Makes sure that every copy stream has memory where what is cast on the card lands: one chunk.
    fn ensure_scratch(&self) -> Result<(), PagerError> {
        let core = &self.core;
        loop {
            let stream = {
                let control = core.control.lock();
                if control.scratch.len() >= control.engine.streams() {
                    return Ok(());
                }
                Arc::clone(control.engine.stream(control.scratch.len()))
            };
            let scratch = allocate_on(core, &stream, scratch_bytes(&core.options, core.page_bytes))?;
            core.control.lock().scratch.push(scratch);
        }
    }

    /// Takes memory for activations from the card's pool; if the card is full, pages are reclaimed and it
    /// is tried again, as long as there is something to reclaim.
    ///
    /// # Errors
    /// [`PagerError::AllocateWhileCapturing`] on a stream that is being captured into a graph; the device's
    /// error if the memory is not there, or could never be.
    pub fn allocate(&self, stream: &PagerStream, bytes: u64) -> Result<PoolAllocation, PagerError> {
        if stream.is_capturing()? {
            let device = self.core.device.info().name.clone();
            return Err(PagerError::AllocateWhileCapturing { device, bytes });
        }
        allocate_on(&self.core, stream.stream(), bytes)
    }

    /// Sets the bytes left free, device wide. Takes effect at once.
    pub fn set_headroom(&self, bytes: u64) -> Result<(), PagerError> {
        self.core.headroom.store(bytes, Ordering::Relaxed);
        reclaim::refresh_budget(&self.core, &mut self.core.control.lock(), true).map(|_| ())
    }

    /// Looks at the card's memory now and gives back what is over the budget.
    pub fn refresh(&self) -> Result<(), PagerError> {
        reclaim::refresh_budget(&self.core, &mut self.core.control.lock(), true).map(|_| ())
    }

    /// Hands frames without a page back to the driver; answers the bytes.
    pub fn release_idle(&self) -> Result<u64, PagerError> {
        let mut control = self.core.control.lock();
        fault::settle_captured(&self.core, &mut control);
        if control.plain.is_some() {
            return Ok(plain::release_idle(&self.core)?);
        }
        let released = control.frames.release_idle(u32::MAX)?;
        Ok(u64::from(released) * self.core.page_bytes)
    }

    /// Bytes that could be reclaimed from the models on the card other than `except`, without waiting for
    /// guards.
    pub fn reclaimable_bytes(&self, except: Option<&PagedModel>) -> u64 {
        let control = self.core.control.lock();
        if let Some(plain) = &control.plain {
            return plain.held() - except.map_or(0, |model| plain::bytes_of_model(&control, model.id));
        }
        let own = except.and_then(|model| control.model(model.id)).map_or(0, |model| model.resident);
        u64::from(control.resident_pages() - own + control.frames.idle()) * self.core.page_bytes
    }

    /// Sets the bytes of host memory that may be page-locked. Takes effect at once: pages kept beyond it are
    /// given up, and blocks without a buffer go back to the host. What reads go through stays, if it is more.
    pub fn set_page_locked_limit(&self, bytes: u64) -> Result<(), PagerError> {
        self.core.arena.set_limit(bytes);
        load::drop_kept_over_limit(&self.core, &mut self.core.control.lock());
        self.core.arena.trim(bytes)?;
        Ok(())
    }

    /// What the pager holds.
    pub fn figures(&self) -> PagerFigures {
        let control = self.core.control.lock();
        let page = self.core.page_bytes;
        let blocks = control.plain.as_ref();
        let held = blocks.map_or_else(Default::default, |plain| plain.held_by(None));
        PagerFigures {
            page_bytes: page,
            resident_bytes: u64::from(control.resident_pages()) * page + held.resident,
            ring_bytes: u64::from(control.frames.ring_frames()) * page + held.ring,
            idle_bytes: u64::from(control.frames.idle()) * page,
            peak_bytes: control.frames.peak_bytes(),
            budget_bytes: blocks.map_or(u64::from(control.budget) * page, Plain::budget),
            headroom_bytes: self.core.headroom(),
            staging: self.core.arena.figures(),
            link: control.engine.link(),
        }
    }
}

/// Takes pool memory for work on `stream`; if the card is full, pages are reclaimed and it is tried again, as
/// long as there is something to reclaim: what comes free may lie in pieces, or another process may take it.
/// The caller holds no lock.
pub(super) fn allocate_on(
    core: &Arc<Core>,
    stream: &Arc<Stream>,
    bytes: u64,
) -> Result<PoolAllocation, PagerError> {
    match PoolAllocation::new(stream, bytes) {
        Err(mut error) if error.is_out_of_memory() => {
            // Held throughout, so that no fault takes what is made free.
            let mut control = core.control.lock();
            // What could never be had must not empty the card first.
            reclaim::refresh_budget(core, &mut control, true)?;
            let pool = core.device.pool_figures()?;
            let idle = pool.reserved.saturating_sub(pool.used);
            if bytes > u64::from(control.budget) * core.page_bytes + idle {
                return Err(error.into());
            }
            loop {
                // The pool grows in whole pages, and may need one more than the bytes say.
                let made = reclaim::make_room(core, &mut control, bytes.saturating_add(core.page_bytes))?;
                control.budget_read_at = None;
                core.looked_at.0.store(0, Ordering::Relaxed);
                match PoolAllocation::new(stream, bytes) {
                    Ok(allocation) => {
                        reclaim::refresh_budget(core, &mut control, true)?;
                        return Ok(allocation);
                    }
                    Err(again) if again.is_out_of_memory() && made > 0 => error = again,
                    Err(other) => return Err(other.into()),
                }
                tracing::debug!(bytes, made, %error, "no activation yet");
            }
        }
        Ok(allocation) => {
            // The pool may have grown into what the pager meant to use.
            let mut control = core.control.lock();
            control.budget_read_at = None;
            core.looked_at.0.store(0, Ordering::Relaxed);
            let pool = core.device.pool_figures()?;
            control.frames.note_pool(pool.reserved);
            control.pool_use.note(core.device.now(), pool.used);
            drop(control);
            Ok(allocation)
        }
        Err(error) => Err(error.into()),
    }
}

impl fmt::Debug for Pager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pager").field("figures", &self.figures()).finish_non_exhaustive()
    }
}
