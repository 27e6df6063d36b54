//! The weights that clones share: what there is of them, and a module's guards.
//!
//! | file | what it does |
//! |---|---|
//! | `copy` | how a module's bytes come: copied, patched, put back, streamed |
//! | `load` | what is on the card: loading, unloading, leaving |

#![deny(unsafe_code)]

mod copy;
mod load;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::buffer::Places;
use super::choose::{Candidate, ranked};
use super::error::ResidentError;
use super::guard::ModuleGuard;
use super::memory::CardMemory;
use crate::device::{DeviceError, Fence, PoolAllocation, SharedDevice, Stream, without_panics};
use crate::pager::{DevicePatches, PatchSet};
use crate::patcher::ModelUuid;
use crate::staging::{Arena, ArenaOptions, StagingBuffer, budget};
use crate::transfer::CopyEngine;
use crate::units::{DeviceAddress, KIB, MIB};
use crate::weights::{Dtype, LayoutOptions, PageLayout, TensorId, TensorIndex, UnitId};

/// What a module begins at a multiple of, in bytes, on the card and in the streaming buffer.
const ALIGNMENT: u64 = 256;

/// The version of a module whose bytes are those of no version, since a step failed half way.
const UNKNOWN: u32 = u32::MAX;

/// A slot of staging memory in bytes: small, since small modules keep whole slots.
const SLOT_BYTES: u64 = 16 * KIB;

/// How a resident model is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidentOptions {
    /// The type that float tensors have on the device; `None` keeps each tensor's own.
    pub compute: Option<Dtype>,
    /// Bytes of host memory that may be page-locked for modules outside and for copies; `None` takes the
    /// machine's share.
    pub page_locked_bytes: Option<u64>,
    /// Bytes of one read and one copy.
    pub chunk_bytes: u64,
}

impl Default for ResidentOptions {
    fn default() -> Self {
        Self { compute: None, page_locked_bytes: None, chunk_bytes: 4 * MIB }
    }
}

/// What a resident model holds. Sizes are bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ResidentFigures {
    /// All modules, as they are on the card.
    pub weights_bytes: u64,
    /// Modules that are on the card.
    pub loaded_bytes: u64,
    /// The streaming buffer.
    pub buffer_bytes: u64,
    /// Patches' factors and room for casts, on the card.
    pub working_bytes: u64,
    /// Host memory with the bytes that baked modules had before.
    pub backup_bytes: u64,
    /// Page-locked host memory.
    pub page_locked_bytes: u64,
    /// Modules that were asked for and were on the card.
    pub hits: u64,
    /// Modules that had to be copied.
    pub misses: u64,
    /// Bytes that crossed the link.
    pub copied_bytes: u64,
    /// Bytes that were read from files.
    pub file_bytes: u64,
}

/// One set of weights.
pub(super) struct Weights {
    pub(super) device: SharedDevice,
    pub(super) index: Arc<TensorIndex>,
    pub(super) layout: Arc<PageLayout>,
    pub(super) uuid: ModelUuid,
    name: String,
    size: u64,
    page_bytes: u64,
    /// Where each module begins in the card memory.
    offsets: Vec<u64>,
    chunk_bytes: u64,
    pub(super) arena: Arc<Arena>,
    loaded: AtomicU64,
    pub(super) counts: Counts,
    state: Mutex<State>,
}

/// What was counted, beside the lock.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) copied_bytes: AtomicU64,
    pub(super) file_bytes: AtomicU64,
}

/// What changes.
pub(super) struct State {
    memory: CardMemory,
    /// One stream: copies and patches run on it, one after the other.
    pub(super) engine: CopyEngine,
    pub(super) modules: Vec<Module>,
    attached: Option<DevicePatches>,
    bake: bool,
    places: Places,
    buffer: Option<PoolAllocation>,
    scratch: Option<PoolAllocation>,
}

/// A module.
#[derive(Default)]
pub(super) struct Module {
    /// Whether it is on the card.
    loaded: bool,
    /// The version of the patches in it; 0 for none.
    version: u32,
    /// Where it is baked: the patched tensors' bytes before.
    backup: Vec<(TensorId, Vec<u8>)>,
    /// When its bytes are there.
    ready: Option<Fence>,
    /// When the work that used it is done, a fence a stream.
    uses: Vec<(u64, Fence)>,
    pins: u32,
    /// Whether it was ever asked for whole, and whether by rows.
    asked: bool,
    asked_by_rows: bool,
    /// Its bytes in page-locked memory, chunk by chunk, as they cross the link; empty if they are not kept.
    host: Vec<StagingBuffer>,
}

impl Module {
    /// Whether it would pass through the streaming buffer, as far as is known.
    fn streams(&self) -> bool {
        self.asked || !self.asked_by_rows
    }
}

impl Weights {
    pub(super) fn open(
        device: &SharedDevice,
        index: Arc<TensorIndex>,
        options: &ResidentOptions,
    ) -> Result<Self, ResidentError> {
        let device = &without_panics(device);
        let layout = PageLayout::new(
            &index,
            &LayoutOptions { compute: options.compute, ..LayoutOptions::new(4 * KIB) },
        )?;
        let chunk_bytes = options.chunk_bytes.clamp(SLOT_BYTES, 1 << 30).next_multiple_of(SLOT_BYTES);
        let limit = options.page_locked_bytes.unwrap_or_else(budget::this_machines_limit);
        let run_slots = u32::try_from(chunk_bytes / SLOT_BYTES).unwrap_or(u32::MAX);
        let arena =
            Arena::new(device, &ArenaOptions { slot_bytes: SLOT_BYTES, run_slots, limit_bytes: limit });
        // From the dearest to the cheapest, so that what is loaded is nearly one run of pages.
        let candidates: Vec<Candidate> = layout
            .units()
            .map(|unit| {
                let (cost, bytes) = (link_bytes(&layout, &unit.bytes), card_bytes(&unit.bytes));
                Candidate { cost, bytes, pages: 0..0, loaded: false, streams: true }
            })
            .collect();
        let mut offsets = vec![0; candidates.len()];
        let mut end = 0_u64;
        for module in ranked(&candidates) {
            offsets[module] = end;
            end = end.saturating_add(candidates[module].bytes);
        }
        let page_bytes = device.info().granularity;
        let pages = u32::try_from(end.div_ceil(page_bytes)).map_err(|_| DeviceError::InvalidArgument {
            call: "reserve",
            why: format!("{end} bytes of modules are more than 2^32 pages of {page_bytes}"),
        })?;
        let size = u64::from(pages) * page_bytes;
        let modules = layout.units().map(|_| Module::default()).collect();
        let name = index.files().first().map_or_else(String::new, |file| file.path().display().to_string());
        Ok(Self {
            device: Arc::clone(device),
            index,
            layout: Arc::new(layout),
            uuid: ModelUuid::fresh(),
            name,
            size,
            page_bytes,
            offsets,
            chunk_bytes,
            arena,
            loaded: AtomicU64::new(0),
            counts: Counts::default(),
            state: Mutex::new(State {
                memory: CardMemory::reserve(device, pages, page_bytes)?,
                engine: CopyEngine::new(device, 1)?,
                modules,
                attached: None,
                bake: false,
                places: Places::default(),
                buffer: None,
                scratch: None,
            }),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn loaded(&self) -> u64 {
        self.loaded.load(Ordering::Relaxed)
    }

    pub(super) fn figures(&self) -> ResidentFigures {
        let state = self.state.lock();
        let bytes =
            |memory: &Option<PoolAllocation>| memory.as_ref().map_or(0, |memory| memory.range().bytes);
        let factors =
            state.attached.as_ref().map_or(0, |attached| DevicePatches::bytes_on_card(&attached.set));
        let backups = state.modules.iter().flat_map(|module| &module.backup);
        ResidentFigures {
            weights_bytes: self.size,
            loaded_bytes: self.loaded(),
            buffer_bytes: bytes(&state.buffer),
            working_bytes: bytes(&state.scratch) + factors,
            backup_bytes: backups.map(|(_, bytes)| bytes.len() as u64).sum(),
            page_locked_bytes: self.arena.figures().page_locked_bytes,
            hits: self.counts.hits.load(Ordering::Relaxed),
            misses: self.counts.misses.load(Ordering::Relaxed),
            copied_bytes: self.counts.copied_bytes.load(Ordering::Relaxed),
            file_bytes: self.counts.file_bytes.load(Ordering::Relaxed),
        }
    }

    pub(super) fn is_loaded(&self, unit: UnitId) -> bool {
        self.state.lock().modules.get(unit.index()).is_some_and(|module| module.loaded)
    }

    fn not_found(&self, what: String) -> ResidentError {
        ResidentError::NotFound { model: self.name.clone(), what }
    }

    pub(super) fn check_stream(&self, stream: &Stream) -> Result<(), ResidentError> {
        if stream.device().identity() == self.device.identity() {
            return Ok(());
        }
        Err(ResidentError::OtherDevice {
            stream: stream.device().info().name.clone(),
            model: self.device.info().name.clone(),
        })
    }

    /// The model addresses of a module.
    pub(super) fn run_of(&self, unit: usize) -> Range<u64> {
        self.layout.unit(UnitId(u32::try_from(unit).unwrap_or(u32::MAX))).bytes
    }

    pub(super) fn unit_bytes(&self, unit: usize) -> u64 {
        card_bytes(&self.run_of(unit))
    }

    fn unit_name(&self, unit: usize) -> String {
        self.index.units()[unit].name.clone()
    }

    fn held(&self, what: String, bytes: u64, units: impl Iterator<Item = usize>) -> ResidentError {
        let held = units.map(|unit| self.unit_name(unit)).collect();
        ResidentError::Held { model: self.name.clone(), what, bytes, held }
    }

    /// The version that a module has under a set: the set's if it touches any of its tensors.
    pub(super) fn version_of(&self, unit: usize, set: Option<&Arc<PatchSet>>) -> u32 {
        let Some(set) = set else { return 0 };
        let touched = self.index.units()[unit].tensors.iter().any(|&tensor| !set.of(tensor).is_empty());
        if touched { set.version() } else { 0 }
    }

    /// Faults a module: it is on the card, or arriving there ahead of what the stream is given next.
    pub(super) fn module<'w>(
        &'w self,
        unit: UnitId,
        stream: &Arc<Stream>,
        set: Option<&Arc<PatchSet>>,
    ) -> Result<ModuleGuard<'w>, ResidentError> {
        self.check_stream(stream)?;
        let number = unit.index();
        if number >= self.layout.units().len() {
            return Err(self.not_found(format!("module number {}", unit.0)));
        }
        let mut state = self.state.lock();
        let state = &mut *state;
        self.attach(state, set)?;
        let version = self.version_of(number, set);
        state.modules[number].asked = true;
        let (streamed, start) = if state.modules[number].loaded {
            self.refresh(state, number, version)?;
            self.counts.hits.fetch_add(1, Ordering::Relaxed);
            let start = state.memory.address(self.offsets[number]);
            let module = &mut state.modules[number];
            settle(&mut module.ready, stream)?;
            module.pins += 1;
            (None, start)
        } else {
            let (end, start) = self.stream_through(state, number, version)?;
            let place = &mut state.places.ends[end];
            settle(&mut place.ready, stream)?;
            place.pins += 1;
            (Some(end), start)
        };
        Ok(ModuleGuard { weights: self, stream: Arc::clone(stream), unit, streamed, start })
    }

    /// The end of a guard.
    pub(super) fn release(&self, unit: usize, streamed: Option<usize>, stream: &Stream) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let fence = state.engine.record(stream);
        let (pins, uses) = match streamed {
            Some(end) => {
                let place = &mut state.places.ends[end];
                (&mut place.pins, &mut place.uses)
            }
            None => {
                let module = &mut state.modules[unit];
                (&mut module.pins, &mut module.uses)
            }
        };
        *pins -= 1;
        match fence {
            Ok(fence) => note_use(uses, stream, fence),
            Err(error) => {
                // Without a fence nobody could tell when the memory is free again: wait here, once.
                if let Err(error) = stream.settle() {
                    self.device.defer(error);
                }
                self.device.defer(error);
            }
        }
    }

    /// Where a module lies while it is on the card.
    pub(super) fn address_of(&self, state: &State, unit: usize) -> DeviceAddress {
        state.memory.address(self.offsets[unit])
    }

    pub(super) fn lock(&self) -> parking_lot::MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// Notes that some rows of a module are asked for. Whether this version of it is on the card; work given to `stream` next finds it there.
    pub(super) fn has(&mut self, unit: usize, version: u32, stream: &Stream) -> Result<bool, DeviceError> {
        let module = &mut self.modules[unit];
        module.asked_by_rows = true;
        let has = module.loaded && module.version == version;
        if has {
            settle(&mut module.ready, stream)?;
        }
        Ok(has)
    }

    /// Notes that work on `stream` so far uses a module.
    pub(super) fn note(&mut self, unit: usize, stream: &Stream) -> Result<(), DeviceError> {
        match self.engine.record(stream) {
            Ok(fence) => note_use(&mut self.modules[unit].uses, stream, fence),
            Err(error) => {
                // Without a fence nobody could tell when the memory is free again: wait here, once.
                stream.settle()?;
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Drop for Weights {
    fn drop(&mut self) {
        // Guards borrow the weights, so none is left; the work that they were for may be. It is waited for first,
        // since everything goes, whatever fails on the way.
        let state = self.state.get_mut();
        let places = state.places.ends.iter().flat_map(|place| {
            place.uses.iter().map(|(_, fence)| fence).chain(&place.ready).cloned().collect::<Vec<_>>()
        });
        let fences = state.modules.iter().flat_map(fences_of).chain(places);
        for fence in fences {
            if let Err(error) = fence.settle() {
                self.device.defer(error);
            }
        }
        if let Err(error) = state.engine.drain() {
            self.device.defer(error);
        }
        if let Err(error) = self.detach() {
            self.device.defer(match error {
                ResidentError::Device(error) => error,
                error => DeviceError::InvalidArgument { call: "detach", why: error.to_string() },
            });
        }
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Weights")
            .field("name", &self.name)
            .field("loaded", &self.loaded())
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

/// What a module of these model addresses takes of the card.
fn card_bytes(run: &Range<u64>) -> u64 {
    (run.end - run.start).max(1).next_multiple_of(ALIGNMENT)
}

/// What crosses the link to stream a module of these model addresses.
fn link_bytes(layout: &PageLayout, run: &Range<u64>) -> u64 {
    layout.extents(run.clone()).map(|extent| extent.file_bytes.min(extent.device_bytes)).sum()
}

/// Makes a stream wait for bytes to arrive, and forgets the fence once they are there.
fn settle(ready: &mut Option<Fence>, stream: &Stream) -> Result<(), DeviceError> {
    if let Some(fence) = ready {
        if fence.is_done()? {
            *ready = None;
        } else {
            fence.wait_on(stream)?;
        }
    }
    Ok(())
}

fn note_use(uses: &mut Vec<(u64, Fence)>, stream: &Stream, fence: Fence) {
    let id = stream.id().0;
    match uses.iter_mut().find(|(known, _)| *known == id) {
        Some((_, last)) => *last = fence,
        None => {
            if uses.len() >= 8 {
                uses.retain(|(_, fence)| !fence.is_done().unwrap_or(false));
            }
            uses.push((id, fence));
        }
    }
}

/// What must have passed before a module's bytes may change or go.
fn fences_of(module: &Module) -> Vec<Fence> {
    module.uses.iter().map(|(_, fence)| fence).chain(&module.ready).cloned().collect()
}
