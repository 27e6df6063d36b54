//! The pager's shared state of one card, and its one lock.
//!
//! [`Core`] is what runners, guards and reader threads share; it owns no thread. [`Control`] is
//! everything that the control lock protects: frames, ring, models, loads, streams. The lock is taken by
//! every fault that is not a hit and by the release of a streamed span; it is not held while a file is
//! read, and never while waiting for a guard.
//!
//! Lock order: control, then staging, then device. Nothing here calls back into a runner.

#![deny(unsafe_code)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

use super::activations::Activations;
use super::choices::Choices;
use super::counters::ModelCounts;
use super::error::PagerError;
use super::frames::{FrameInfo, Frames, NONE, PageKey, Role};
use super::learner::OrderLearner;
use super::loads::Loads;
use super::measure::Measure;
use super::mutations::{Mutated, Mutation};
use super::options::PagerOptions;
use super::order::{PagePlace, PassOrder, PlaceSet};
use super::patches::{DevicePatches, PatchSet};
use super::plain::{self, Plain, PlainModel};
use super::plan::{Choice, Plan};
use super::pool_use::PoolUse;
use super::reclaim;
use super::streams::StreamTable;
use super::word;
use super::words::Words;
use crate::device::{AddressRange, PoolAllocation, SharedDevice, Stream};
use crate::staging::{Arena, StagingBuffer};
use crate::sync::Padded;
use crate::transfer::{CopyEngine, ReaderQueue};
use crate::units::{ModelTime, Rate};
use crate::weights::{MappedFile, PageLayout, Span, TensorIndex};

/// What everybody who works with one card's pager shares.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) device: SharedDevice,
    pub(super) options: PagerOptions,
    pub(super) page_bytes: u64,
    /// Pages of one read and one copy at most.
    pub(super) chunk_pages: u32,
    /// The same for pages that stay.
    pub(super) load_pages: u32,
    pub(super) arena: Arc<Arena>,
    pub(super) readers: ReaderQueue,
    /// Bytes left free, device wide. Read live.
    pub(super) headroom: AtomicU64,
    /// When the device's memory was last looked at, as its clock says; zero for never. On cache lines of its
    /// own: hits read it without the lock, and the lock's word changes all the time.
    pub(super) looked_at: Padded<AtomicU64>,
    pub(super) control: Mutex<Control>,
    /// Signalled when a load ends and when a streamed span is released.
    pub(super) changed: Condvar,
    /// Held by the one who waits to take a unit of several pieces whole. Taken before control, by callers that
    /// hold no guard.
    pub(super) whole_turn: Mutex<()>,
}

/// What the control lock protects.
#[derive(Debug)]
pub(super) struct Control {
    /// The mistake that a unit test built in.
    pub(super) mutated: Mutated,
    pub(super) frames: Frames,
    pub(super) engine: CopyEngine,
    pub(super) streams: StreamTable,
    pub(super) models: Vec<Option<Box<ModelState>>>,
    pub(super) loads: Loads,
    /// The most frames that there may be, from the last look at the device.
    pub(super) budget: u32,
    pub(super) budget_read_at: Option<ModelTime>,
    /// What the activation pool used at most lately.
    pub(super) pool_use: PoolUse,
    pub(super) next_priority: u64,
    /// Which models became active in turn.
    pub(super) activations: Activations,
    /// Page loads asked for so far: the ring's measure of age.
    pub(super) page_loads: u64,
    /// The pages of the copy that is being enqueued, kept for its memory.
    pub(super) wanted: Vec<u32>,
    /// The list of a claim that is done, kept for its memory.
    pub(super) missing: Vec<u32>,
    /// Where the search for another ring frame goes on.
    pub(super) ring_hand: usize,
    pub(super) cached_bytes: u64,
    /// Faults that claim or wait for bytes, and guards of streamed spans.
    pub(super) under_way: u32,
    /// Releases of streamed spans so far: what a fault that waits sees others do.
    pub(super) releases: u64,
    /// Whether a fault waits for ring frames: what comes free is for it, not for prefetch.
    pub(super) refused: bool,
    /// Spans, with their models, whose faults sleep until their bytes were read.
    pub(super) sleepers: Vec<(u32, u32)>,
    /// Whether a fault had to make the ring larger since a pass ended.
    pub(super) ring_grew: bool,
    /// Releases of streamed spans on streams that are being captured: done when the capture is over.
    pub(super) captured: Vec<StreamedRelease>,
    /// Models that are gone, but were used by a stream that is being captured: closed when the capture is over.
    pub(super) closing: Vec<u32>,
    /// The blocks of a card without virtual memory calls, in the place of frames and ring.
    pub(super) plain: Option<Plain>,
    /// One for each copy stream, where what is cast on the card lands.
    pub(super) scratch: Vec<PoolAllocation>,
}

/// The release of a streamed span at the point that `stream` has reached.
#[derive(Debug)]
pub(super) struct StreamedRelease {
    pub(super) model: u32,
    pub(super) span: u32,
    pub(super) stream: Arc<Stream>,
    pub(super) slot: u8,
}

/// Where a page is and where it belongs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    /// The frame that it is mapped to.
    pub(super) frame: u32,
    /// Its ring slot, or [`NONE`] for a page that stays.
    pub(super) slot: u32,
}

impl Page {
    pub(super) const ABSENT: Self = Self { frame: NONE, slot: NONE };
}

/// A run of pages whose bytes are kept in staging memory.
#[derive(Debug)]
pub(super) struct CachedRun {
    pub(super) buffer: StagingBuffer,
    pub(super) pages: u32,
}

/// One model on the card.
#[derive(Debug)]
pub(super) struct ModelState {
    pub(super) name: String,
    pub(super) index: Arc<TensorIndex>,
    pub(super) layout: Arc<PageLayout>,
    pub(super) words: Words,
    /// Its addresses; none on a card without virtual memory calls.
    pub(super) range: Option<AddressRange>,
    /// Its blocks, on a card without virtual memory calls.
    pub(super) plain: Option<PlainModel>,
    pub(super) pages: Vec<Page>,
    pub(super) order: PassOrder,
    pub(super) learner: OrderLearner,
    /// Units of several spans that the runner faults whole.
    pub(super) whole_units: HashSet<u32>,
    pub(super) plan: Plan,
    /// Which pages are worth keeping, and the ring's size.
    pub(super) choice: Choice,
    /// The compute of a pass per GiB of weights, if the runner told it.
    pub(super) compute_per_gib: Option<std::time::Duration>,
    /// The link's rate that its choices are made for.
    pub(super) link: Rate,
    /// The compute of each span, learned in the first pass.
    pub(super) measure: Measure,
    /// The choices made lately, and for how many frames.
    pub(super) choices: Choices,
    /// The frames that the plan was made for.
    pub(super) planned_frames: u32,
    /// The places in the pass of streamed pages.
    pub(super) streamed: PlaceSet,
    /// Ring slots when the slots were dealt anew, and pages that were edited since.
    pub(super) dealt_ring: u32,
    pub(super) edits: u32,
    /// The place in the pass that prefetch goes on at.
    pub(super) cursor: PagePlace,
    /// Higher is more important.
    pub(super) priority: u64,
    /// Whether it may take frames from models of lower priority.
    pub(super) promoted: bool,
    /// The most faults and guards of streamed spans that were under way at once: the ring is made for them.
    pub(super) together: u32,
    /// The same since the pass began.
    pub(super) together_now: u32,
    /// Its faults when the last pass of another model ended.
    pub(super) faults_then: u64,
    /// Passes that ended since it was activated.
    pub(super) passes: u32,
    /// Whether the last activation that was not all hits had several passes.
    pub(super) several: bool,
    /// Pages with a frame of their own.
    pub(super) resident: u32,
    /// No page at this place of the keep order or later has a frame of its own.
    pub(super) resident_end: u32,
    pub(super) cache: BTreeMap<u32, CachedRun>,
    /// Its files, mapped, if its bytes are to be copied from there.
    pub(super) mapped: Option<Box<[MappedFile]>>,
    /// Why the last load of a page failed, until the next is asked for.
    pub(super) errors: HashMap<u32, PagerError>,
    pub(super) counts: ModelCounts,
    pub(super) said_pieces: bool,
    /// Pages whose mapping was made but not yet made accessible, after a failure.
    pub(super) inaccessible: HashSet<u32>,
    /// The patches that bytes on the card are made with.
    pub(super) attached: Option<Arc<DevicePatches>>,
    /// Faults that bring bytes in with the patches that are attached: an exchange waits for them.
    pub(super) bringing: u32,
    /// Exchanges of patches that wait: no fault begins to bring bytes in before them.
    pub(super) exchanges: u32,
    /// Pages whose bytes are of an older version and could not be given up, since a guard holds them.
    pub(super) stale: HashSet<u32>,
}

impl Core {
    /// The headroom in bytes.
    pub(super) fn headroom(&self) -> u64 {
        self.headroom.load(Ordering::Relaxed)
    }

    /// Whether the last look at the device's memory is old. Takes no lock.
    pub(super) fn look_is_due(&self) -> bool {
        let looked_at = ModelTime(self.looked_at.0.load(Ordering::Relaxed));
        looked_at == ModelTime::ZERO || self.device.now().since(looked_at) >= reclaim::BUDGET_AGE
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Err(error) = reclaim::close_rest(self.control.get_mut()) {
            self.device.defer(error);
        }
    }
}

impl Control {
    pub(super) fn model(&self, id: u32) -> Option<&ModelState> {
        self.models.get(id as usize).and_then(Option::as_deref)
    }

    pub(super) fn model_mut(&mut self, id: u32) -> Option<&mut ModelState> {
        self.models.get_mut(id as usize).and_then(Option::as_deref_mut)
    }

    /// Whether a page's bytes are in its frame or on the way there.
    pub(super) fn is_present(&self, id: u32, page: u32) -> bool {
        let Some(model) = self.model(id) else { return false };
        let frame = model.pages[page as usize].frame;
        frame != NONE && self.frames.info(frame).content == (PageKey { model: id, page })
    }

    /// The account of the frame that holds a page, or will; none if it has none. A page stays mapped to a ring
    /// frame that was taken for another page: then the frame is not its own.
    pub(super) fn content_mut(&mut self, id: u32, page: u32) -> Option<&mut FrameInfo> {
        let frame = self.model(id)?.pages[page as usize].frame;
        if frame == NONE {
            return None;
        }
        let info = self.frames.info_mut(frame);
        (info.content == PageKey { model: id, page }).then_some(info)
    }

    /// Pages of all models that have a frame of their own.
    pub(super) fn resident_pages(&self) -> u32 {
        self.models.iter().flatten().map(|model| model.resident).sum()
    }

    /// Takes the spans that touch a page out of use: `None`, and nothing changed, if one is pinned, or was
    /// used by a stream that is being captured.
    /// Otherwise they are leaving; answers the streams that used them. The caller sets them absent.
    pub(super) fn leave_page(&self, key: PageKey) -> Option<u64> {
        let Some(model) = self.model(key.model) else { return Some(0) };
        let spans = model.layout.spans_of_page(key.page);
        let words = model.words.of(spans);
        let used = match word::leave_all(words.clone()) {
            Some(used) => used,
            None if self.mutated.by(Mutation::TakePinned) => {
                words.clone().fold(0, |used, word| used | word.0.used())
            }
            None => return None,
        };
        if self.streams.is_capturing(used) {
            word::put_back(words);
            return None;
        }
        Some(used)
    }

    /// Sets the spans that touch a page absent, after [`Self::leave_page`].
    pub(super) fn set_page_absent(&self, key: PageKey) {
        let Some(model) = self.model(key.model) else { return };
        for span in model.layout.spans_of_page(key.page) {
            model.words[span as usize].0.set_state(super::word::SpanState::Absent);
        }
    }

    /// Makes the spans that touch a page what they were, after [`Self::leave_page`].
    pub(super) fn put_page_back(&self, key: PageKey) {
        let Some(model) = self.model(key.model) else { return };
        word::put_back(model.words.of(model.layout.spans_of_page(key.page)));
    }

    /// Whether a guard or another fault holds a span, `except` left out.
    pub(super) fn is_anything_pinned(&self, except: (u32, u32)) -> bool {
        (0_u32..).zip(&self.models).any(|(id, model)| {
            model.as_ref().is_some_and(|model| {
                let mut words = (0_u32..).zip(model.words.iter());
                words.any(|(span, word)| word.0.view().pins() > 0 && (id, span) != except)
            })
        })
    }

    /// Names of the units, or pieces, that guards hold now, at most a few; `except` is left out.
    pub(super) fn held_names(&self, except: Option<(u32, u32)>) -> Vec<String> {
        const SHOWN: usize = 8;
        let mut names = Vec::new();
        let mut more = 0_usize;
        for (id, model) in (0_u32..).zip(&self.models) {
            let Some(model) = model else { continue };
            for (number, (span, word)) in (0_u32..).zip(model.layout.spans().zip(model.words.iter())) {
                if word.0.view().pins() == 0 || except == Some((id, number)) {
                    continue;
                }
                if names.len() == SHOWN {
                    more += 1;
                    continue;
                }
                let name = &model.index.unit_info(span.unit).name;
                let spans = model.layout.unit(span.unit).spans;
                names.push(if spans.end - spans.start == 1 {
                    name.clone()
                } else {
                    format!("{name} (piece {})", number - spans.start)
                });
            }
        }
        if more > 0 {
            names.push(format!("{more} more"));
        }
        if names.is_empty() {
            // Its pins were given back since the claim met them.
            names.push("another fault".to_owned());
        }
        names
    }

    /// Who holds memory of the card, in bytes, the asking model left out.
    pub(super) fn holders(&self, core: &Core, asking: u32) -> Vec<(String, u64)> {
        let mut holders = Vec::new();
        for (id, model) in (0..).zip(&self.models) {
            if let Some(model) = model
                && id != asking
            {
                let bytes = u64::from(model.resident) * core.page_bytes + plain::bytes_of_model(self, id);
                if bytes > 0 {
                    holders.push((model.name.clone(), bytes));
                }
            }
        }
        let blocks = self.plain.as_ref().map_or(0, Plain::held);
        if let Ok(pool) = core.device.pool_figures()
            && pool.reserved > blocks
        {
            holders.push(("activations".to_owned(), pool.reserved - blocks));
        }
        let total = core.device.info().total_bytes;
        if let Ok(figures) = core.device.memory() {
            let ours = u64::from(self.frames.count()) * core.page_bytes
                + core.device.pool_figures().map_or(0, |pool| pool.reserved);
            let others = total.saturating_sub(figures.free).saturating_sub(ours);
            if others > 0 {
                holders.push(("others".to_owned(), others));
            }
        }
        if core.headroom() > 0 {
            holders.push(("headroom".to_owned(), core.headroom()));
        }
        holders
    }
}

impl ModelState {
    /// Pages of the spans or units that are faulted at once.
    pub(super) fn make_groups(layout: &PageLayout, whole: &HashSet<u32>) -> Vec<Range<u32>> {
        let mut groups: Vec<Range<u32>> = Vec::with_capacity(layout.span_count() as usize);
        let mut before = None;
        for Span { unit, pages, .. } in layout.spans() {
            match groups.last_mut() {
                Some(group) if before == Some(unit) && whole.contains(&unit.0) => group.end = pages.end,
                _ => groups.push(pages),
            }
            before = Some(unit);
        }
        groups
    }

    /// Takes another order of spans, or makes the order of pages anew for what is kept whole.
    pub(super) fn set_order(&mut self, spans: Vec<u32>) {
        let layout = &self.layout;
        let next = self.order.page_at(&mut self.cursor);
        let pages_of = |span: u32| layout.span(span).pages;
        self.order = PassOrder::new(spans, layout.page_count(), pages_of, &self.choice.keeping);
        self.resident_end = u32::try_from(self.order.keep().len()).unwrap_or(u32::MAX);
        self.dealt_ring = u32::MAX;
        // Prefetch goes on at the same page. Which places are streamed is not known before slots are dealt.
        let place = next.and_then(|page| self.order.place_of(page, layout.spans_of_page(page)));
        self.cursor = place.unwrap_or_default();
        self.streamed = PlaceSet::default();
    }

    /// The patches that are attached.
    pub(super) fn patches(&self) -> Option<&Arc<PatchSet>> {
        self.attached.as_ref().map(|attached| &attached.set)
    }

    /// Whether `span` is the last of a pass that touches `page`.
    pub(super) fn is_last_use(&self, page: u32, span: u32) -> bool {
        let position = self.order.position(span);
        // Mostly the next one in address is the next one of the pass, and no page's spans are looked for.
        let next = span + 1;
        if next < self.layout.span_count()
            && self.order.position(next) > position
            && self.layout.span(next).pages.contains(&page)
        {
            return false;
        }
        self.layout.spans_of_page(page).all(|other| self.order.position(other) <= position)
    }

    /// Whether a part of the span passes through the ring.
    pub(super) fn is_streamed(&self, span: u32, frames: &Frames) -> bool {
        self.layout.span(span).pages.any(|page| {
            let frame = self.pages[page as usize].frame;
            frame != NONE && frames.info(frame).role == Role::Ring
        })
    }
}
