//! The weights that clones share: what is loaded, with which patches, and how bytes come and go.

#![expect(unsafe_code, reason = "copies backups out of allocations that it owns")]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::buffer::Places;
use super::choose::{Candidate, Largest, Room, ranked, to_load, to_unload};
use super::error::ResidentError;
use super::guard::ModuleGuard;
use super::memory::CardMemory;
use crate::device::{DeviceError, Fence, PoolAllocation, SharedDevice, Stream, without_panics};
use crate::pager::{CopySource, CopyTarget, DevicePatches, PatchSet, copy_in, copy_run, patch_run};
use crate::patcher::{LoadBudget, ModelUuid};
use crate::staging::{Arena, ArenaOptions, StagingBuffer, budget};
use crate::transfer::{CopyEngine, is_cast_on_card, read_extents};
use crate::units::{DeviceAddress, DeviceRange, KIB, MIB};
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
            .iter()
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
        let modules = layout.units().iter().map(|_| Module::default()).collect();
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

    pub(super) fn unit_bytes(&self, unit: usize) -> u64 {
        card_bytes(&self.layout.units()[unit].bytes)
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

    /// Makes `set` the patches that are applied from now on.
    fn attach(&self, state: &mut State, set: Option<&Arc<PatchSet>>) -> Result<(), ResidentError> {
        let attached = state.attached.as_ref().map(|attached| attached.set.version());
        if attached == set.map(|set| set.version()) {
            return Ok(());
        }
        // The old factors are freed in the order of the stream that patches run on.
        state.attached = None;
        let Some(set) = set else { return Ok(()) };
        let stream = Arc::clone(state.engine.stream(0));
        let factors = match DevicePatches::bytes_on_card(set) {
            0 => None,
            bytes => Some(PoolAllocation::new(&stream, bytes)?),
        };
        let modules = &mut state.modules;
        let filled =
            DevicePatches::fill(&self.device, &self.arena, &self.layout, set, factors, &stream, |slots| {
                self.take_buffer(modules, slots)
            });
        state.attached = Some(filled?);
        Ok(())
    }

    /// Takes a staging buffer; page-locked copies of modules give way if nothing else does.
    pub(super) fn take_buffer(
        &self,
        modules: &mut [Module],
        slots: u32,
    ) -> Result<StagingBuffer, ResidentError> {
        const PATIENT_WAITS: u32 = 20;
        const WAITS: u32 = 5000;
        let mut waits = 0_u32;
        let buffer = self.arena.take_waiting(slots, || {
            waits += 1;
            if waits > PATIENT_WAITS
                && let Some(module) = modules.iter_mut().rev().find(|module| !module.host.is_empty())
            {
                module.host.clear();
            }
            waits < WAITS
        })?;
        buffer.ok_or_else(|| {
            DeviceError::Host {
                call: "stage",
                bytes: u64::from(slots) * SLOT_BYTES,
                why: "no staging buffer came free".to_owned(),
            }
            .into()
        })
    }

    /// Brings a module's bytes to `start`, patched or as they are in the file, after `waits`. With `keep`
    /// its page-locked bytes are kept, if there is room. Answers when they are there.
    fn copy_module(
        &self,
        state: &mut State,
        unit: usize,
        start: DeviceAddress,
        patched: bool,
        keep: bool,
        waits: &[Fence],
    ) -> Result<Fence, ResidentError> {
        let run = self.layout.units()[unit].bytes.clone();
        if state.scratch.is_none() && self.layout.extents(run.clone()).any(|extent| is_cast_on_card(&extent))
        {
            let stream = Arc::clone(state.engine.stream(0));
            state.scratch = Some(PoolAllocation::new(&stream, self.chunk_bytes)?);
        }
        let mut host = std::mem::take(&mut state.modules[unit].host);
        let mut kept = Vec::new();
        let keep =
            keep && self.device.info().keeps_bytes && host.is_empty() && self.may_keep(card_bytes(&run));
        let mut last = None;
        let mut place = 0;
        let mut at = run.start;
        let mut result = Ok(());
        while at < run.end && result.is_ok() {
            let part = at..run.end.min(at + self.chunk_bytes);
            at = part.end;
            let mut copied = || -> Result<Fence, ResidentError> {
                let mut fresh = None;
                let mut available = self.device.now();
                let mut file_bytes = 0;
                let mut buffer = None;
                if self.device.info().keeps_bytes {
                    buffer = Some(match host.get_mut(place) {
                        Some(buffer) => buffer,
                        None => {
                            let slots = u32::try_from((part.end - part.start).div_ceil(SLOT_BYTES));
                            let mut taken =
                                self.take_buffer(&mut state.modules, slots.unwrap_or(u32::MAX))?;
                            let extents = self.layout.extents(part.clone());
                            file_bytes =
                                read_extents(&self.index, extents, part.start, &mut taken.bytes_mut()?)?;
                            available = self.device.schedule_read(file_bytes);
                            fresh.insert(taken)
                        }
                    });
                }
                let target = CopyTarget {
                    cut: u64::MAX,
                    layout: &self.layout,
                    base: DeviceAddress(start.0.wrapping_sub(run.start)),
                    scratch: state.scratch.as_ref().map(PoolAllocation::range),
                    patches: state.attached.as_ref().filter(|_| patched),
                };
                let batch = state.engine.begin();
                let enqueued = waits.iter().try_for_each(|fence| batch.wait(fence)).and_then(|()| {
                    let source = buffer
                        .as_deref()
                        .map_or(CopySource::None, |buffer| CopySource::Staged(buffer, part.start));
                    copy_run(&batch, &target, part.clone(), source, available)
                });
                // Also after an error: what was enqueued still reads the buffer.
                let fence = batch.finish()?;
                if let Some(buffer) = buffer {
                    buffer.read_until(fence.clone());
                }
                self.counts.copied_bytes.fetch_add(enqueued?, Ordering::Relaxed);
                self.counts.file_bytes.fetch_add(file_bytes, Ordering::Relaxed);
                kept.extend(fresh.filter(|_| keep));
                Ok(fence)
            };
            match copied() {
                Ok(fence) => last = Some(fence),
                Err(error) => result = Err(error),
            }
            place += 1;
        }
        match result {
            Ok(()) => {
                state.modules[unit].host = if keep { kept } else { host };
                match last {
                    Some(fence) => Ok(fence),
                    None => Ok(state.engine.begin().finish()?),
                }
            }
            Err(error) => {
                state.modules[unit].host = host;
                // The caller frees the target: nothing may be on its way there.
                state.engine.drain()?;
                Err(error)
            }
        }
    }

    /// Whether `bytes` more may be kept page-locked beside the buffers that copies need.
    fn may_keep(&self, bytes: u64) -> bool {
        let figures = self.arena.figures();
        figures.used_bytes.saturating_add(bytes).saturating_add(2 * self.chunk_bytes) <= figures.limit_bytes
    }

    /// Brings a loaded module to a version, baked if that is asked for.
    fn refresh(&self, state: &mut State, unit: usize, version: u32) -> Result<(), ResidentError> {
        let module = &state.modules[unit];
        let bake = state.bake && version != 0;
        if module.version == version && (!bake || !module.backup.is_empty()) {
            return Ok(());
        }
        if module.pins > 0 {
            let what = format!("another version of module {}", self.unit_name(unit));
            return Err(self.held(what, self.unit_bytes(unit), std::iter::once(unit)));
        }
        let start = state.memory.address(self.offsets[unit]);
        let restores = !module.backup.is_empty();
        // Forgotten only once something that came after them is noted: a failure on the way must not lose them.
        let waits = fences_of(&state.modules[unit]);
        if restores {
            waits.iter().try_for_each(Fence::wait)?;
            self.restore(state, unit, start)?;
            state.modules[unit].ready = None;
        }
        let raw = state.modules[unit].version == 0;
        if raw || restores {
            waits.iter().try_for_each(|fence| state.engine.begin().wait(fence))?;
            if version != 0 {
                self.patch_in_place(state, unit, start, bake)?;
            }
        } else {
            // What is there cannot be undone: load it anew.
            state.modules[unit].version = UNKNOWN;
            let ready = self.copy_module(state, unit, start, version != 0 && !bake, false, &waits)?;
            state.modules[unit].ready = Some(ready);
            if bake {
                self.patch_in_place(state, unit, start, true)?;
            }
        }
        state.modules[unit].version = version;
        state.modules[unit].uses.clear();
        Ok(())
    }

    /// Patches a loaded module whose bytes are the file's; with `bake` they are kept first.
    fn patch_in_place(
        &self,
        state: &mut State,
        unit: usize,
        start: DeviceAddress,
        bake: bool,
    ) -> Result<(), ResidentError> {
        let run = self.layout.units()[unit].bytes.clone();
        let origin = DeviceAddress(start.0.wrapping_sub(run.start));
        let Some(attached) = &state.attached else { return Ok(()) };
        // Until the end of a success, which the caller notes.
        state.modules[unit].version = UNKNOWN;
        if bake && self.device.info().keeps_bytes {
            let stream = state.engine.stream(0);
            let mut backup = Vec::new();
            for &tensor in &self.index.units()[unit].tensors {
                if attached.set.of(tensor).is_empty() {
                    continue;
                }
                let place = self.layout.tensor_at(tensor);
                let mut bytes = vec![0; usize::try_from(place.bytes).unwrap_or(usize::MAX)];
                let from = DeviceRange::new(origin.offset(place.at), place.bytes);
                // SAFETY: the source lies in the module's allocation; the target lives past the wait below.
                let copied = unsafe { self.device.copy_to_host(bytes.as_mut_ptr(), from, stream.id()) };
                let waited = stream.settle();
                copied?;
                waited?;
                backup.push((tensor, bytes));
            }
            state.modules[unit].backup = backup;
        }
        let target = CopyTarget {
            cut: u64::MAX,
            layout: &self.layout,
            base: origin,
            scratch: None,
            patches: state.attached.as_ref(),
        };
        let batch = state.engine.begin();
        let enqueued = patch_run(&batch, &target, run);
        let ready = batch.finish()?;
        if enqueued.is_err() {
            ready.settle()?;
        }
        state.modules[unit].ready = Some(ready);
        Ok(enqueued?)
    }

    /// Puts a baked module's bytes back. Nothing uses it.
    fn restore(&self, state: &mut State, unit: usize, start: DeviceAddress) -> Result<(), ResidentError> {
        let base = DeviceAddress(start.0.wrapping_sub(self.layout.units()[unit].bytes.start));
        let stream = Arc::clone(state.engine.stream(0));
        let backup = std::mem::take(&mut state.modules[unit].backup);
        let modules = &mut state.modules;
        for (tensor, bytes) in &backup {
            let to = DeviceRange::new(base.offset(self.layout.tensor_at(*tensor).at), bytes.len() as u64);
            let restored = copy_in(&self.device, &self.arena, to, bytes, &stream, |slots| {
                self.take_buffer(modules, slots)
            });
            if let Err(error) = restored {
                // Half of it is back: the next refresh loads it anew.
                modules[unit].version = UNKNOWN;
                return Err(error);
            }
        }
        modules[unit].version = 0;
        Ok(())
    }

    /// Copies a module outside through the streaming buffer, unless it lies there; answers its place.
    fn stream_through(
        &self,
        state: &mut State,
        unit: usize,
        version: u32,
    ) -> Result<(usize, DeviceAddress), ResidentError> {
        let bytes = self.unit_bytes(unit);
        // What is larger than the card passes through no buffer.
        let total = self.device.info().total_bytes;
        let mut largest = Largest::default();
        for (other, module) in state.modules.iter().enumerate() {
            if !module.loaded && module.streams() && self.unit_bytes(other) <= total {
                largest.add(self.unit_bytes(other));
            }
        }
        let wanted = largest.buffer_bytes();
        let found = state.places.find(unit, version);
        let start_of = |buffer: &PoolAllocation, places: &Places, end: usize| {
            let capacity = buffer.range().bytes;
            let offset = if end == 0 { 0 } else { capacity - places.ends[end].bytes };
            buffer.range().start.offset(offset)
        };
        if let (Some(end), Some(buffer)) = (found, &state.buffer) {
            self.counts.hits.fetch_add(1, Ordering::Relaxed);
            return Ok((end, start_of(buffer, &state.places, end)));
        }
        self.counts.misses.fetch_add(1, Ordering::Relaxed);
        let capacity = state.buffer.as_ref().map_or(0, |buffer| buffer.range().bytes);
        if capacity < wanted && !state.places.is_pinned() {
            Self::drop_buffer(state)?;
            let stream = Arc::clone(state.engine.stream(0));
            state.buffer = Some(PoolAllocation::new(&stream, wanted)?);
        }
        let capacity = state.buffer.as_ref().map_or(0, |buffer| buffer.range().bytes);
        let Some(slot) = state.places.choose(bytes, capacity) else {
            let what = format!("module {}", self.unit_name(unit));
            return Err(self.held(what, bytes, state.places.pinned()));
        };
        let waits = state.places.take(slot, unit, version, bytes);
        let Some(buffer) = &state.buffer else { return Err(self.not_found("streaming buffer".to_owned())) };
        let start = start_of(buffer, &state.places, slot.end);
        match self.copy_module(state, unit, start, version != 0, true, &waits) {
            Ok(ready) => {
                state.places.ends[slot.end].ready = Some(ready);
                Ok((slot.end, start))
            }
            Err(error) => {
                state.places.ends[slot.end].give_up(waits);
                Err(error)
            }
        }
    }

    /// Gives the streaming buffer back; no guard holds a place.
    fn drop_buffer(state: &mut State) -> Result<(), ResidentError> {
        let places = std::mem::take(&mut state.places);
        for place in places.ends {
            for fence in place.ready.iter().chain(place.uses.iter().map(|(_, fence)| fence)) {
                fence.settle()?;
            }
        }
        state.buffer = None;
        Ok(())
    }

    /// The modules, as the choice sees them.
    fn candidates(&self, state: &State) -> Vec<Candidate> {
        let attached = state.attached.as_ref().map(|attached| &attached.set);
        let candidate = |(unit, module): (usize, &Module)| {
            let bytes = self.unit_bytes(unit);
            let streams = module.streams();
            let link = if streams { link_bytes(&self.layout, &self.layout.units()[unit].bytes) } else { 0 };
            let patched = if !streams || self.version_of(unit, attached) == 0 { 0 } else { bytes };
            Candidate {
                cost: link.saturating_add(patched),
                bytes,
                pages: self.pages_of(unit),
                loaded: module.loaded,
                streams,
            }
        };
        state.modules.iter().enumerate().map(candidate).collect()
    }

    /// Loads modules within a budget and attaches patches; answers the bytes added.
    pub(super) fn load(
        &self,
        budget: LoadBudget,
        bake: bool,
        set: Option<&Arc<PatchSet>>,
    ) -> Result<u64, ResidentError> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let factors = |state: &State| {
            let set = state.attached.as_ref().map(|attached| &attached.set);
            set.map_or(0, |set| DevicePatches::bytes_on_card(set))
        };
        let before = factors(state);
        self.attach(state, set)?;
        state.bake = bake;
        // What the budget does not know of: the factors, and room for casts if that is yet to be taken.
        let casts = state.scratch.is_none()
            && self.layout.extents(0..u64::MAX).any(|extent| is_cast_on_card(&extent));
        let rounded = |bytes: u64| bytes.next_multiple_of(self.page_bytes);
        let spent = rounded(factors(state).saturating_sub(before))
            + if casts { rounded(self.chunk_bytes) } else { 0 };
        for unit in 0..state.modules.len() {
            if state.modules[unit].loaded && state.modules[unit].pins == 0 {
                let version = self.version_of(unit, set);
                self.refresh(state, unit, version)?;
            }
        }
        let limit = match budget {
            LoadBudget::Everything => u64::MAX,
            LoadBudget::Nothing => return Ok(0),
            LoadBudget::Bytes(extra) => match u64::try_from(extra) {
                Ok(extra) => {
                    let buffer = state.buffer.as_ref().map_or(0, |buffer| buffer.range().bytes);
                    self.loaded().saturating_add(extra).saturating_add(buffer).saturating_sub(spent)
                }
                Err(_) => {
                    self.unload_locked(state, extra.unsigned_abs())?;
                    return Ok(0);
                }
            },
        };
        let room = Room { mapped: state.memory.mapped(), page_bytes: self.page_bytes, limit };
        let before = self.loaded();
        for unit in to_load(&self.candidates(state), &room) {
            self.load_module(state, unit, self.version_of(unit, set))?;
        }
        let outside = state.modules.iter().any(|module| !module.loaded);
        if !outside && !state.places.is_pinned() {
            Self::drop_buffer(state)?;
        }
        Ok(self.loaded().saturating_sub(before))
    }

    fn load_module(&self, state: &mut State, unit: usize, version: u32) -> Result<(), ResidentError> {
        state.memory.take(self.pages_of(unit))?;
        self.note_loaded(state);
        let start = state.memory.address(self.offsets[unit]);
        let bake = state.bake && version != 0;
        self.counts.misses.fetch_add(1, Ordering::Relaxed);
        let ready = match self.copy_module(state, unit, start, version != 0 && !bake, false, &[]) {
            Ok(ready) => ready,
            Err(error) => {
                state.memory.give(self.pages_of(unit))?;
                self.note_loaded(state);
                return Err(error);
            }
        };
        let module = &mut state.modules[unit];
        module.ready = Some(ready);
        module.loaded = true;
        module.version = if bake { 0 } else { version };
        module.uses.clear();
        module.backup.clear();
        // Its bytes are on the card: the host's copy goes back.
        module.host.clear();
        if bake {
            state.modules[unit].version = UNKNOWN;
            self.patch_in_place(state, unit, start, true)?;
            state.modules[unit].version = version;
        }
        Ok(())
    }

    /// Gives back at least `bytes` if guards permit; answers the bytes given back.
    pub(super) fn unload(&self, bytes: u64) -> Result<u64, ResidentError> {
        self.unload_locked(&mut self.state.lock(), bytes)
    }

    fn unload_locked(&self, state: &mut State, bytes: u64) -> Result<u64, ResidentError> {
        let mut freed = 0;
        for unit in to_unload(&self.candidates(state)) {
            if freed >= bytes {
                break;
            }
            if state.modules[unit].pins > 0 {
                continue;
            }
            for fence in fences_of(&state.modules[unit]) {
                fence.wait()?;
            }
            let module = &mut state.modules[unit];
            module.ready = None;
            module.uses.clear();
            module.loaded = false;
            module.version = 0;
            module.backup.clear();
            let given = state.memory.give(self.pages_of(unit));
            self.note_loaded(state);
            freed += given?;
        }
        Ok(freed)
    }

    fn pages_of(&self, unit: usize) -> Range<u32> {
        let start = self.offsets[unit];
        let end = start + self.unit_bytes(unit);
        // All fit: the number of pages was checked when the weights were opened.
        let page = |page: u64| u32::try_from(page).unwrap_or(u32::MAX);
        page(start / self.page_bytes)..page(end.div_ceil(self.page_bytes))
    }

    fn note_loaded(&self, state: &State) {
        self.loaded.store(state.memory.bytes(), Ordering::Relaxed);
    }

    /// Takes everything off the card that no guard holds.
    pub(super) fn detach(&self) -> Result<(), ResidentError> {
        let mut state = self.state.lock();
        let state = &mut *state;
        self.unload_locked(state, u64::MAX)?;
        let pinned = (0..).zip(&state.modules).filter(|(_, module)| module.pins > 0).map(|(unit, _)| unit);
        let pinned: Vec<usize> = pinned.chain(state.places.pinned()).collect();
        if !state.places.is_pinned() {
            Self::drop_buffer(state)?;
        }
        if pinned.is_empty() {
            (state.attached, state.scratch, state.bake) = (None, None, false);
        }
        if pinned.is_empty() {
            return Ok(());
        }
        Err(self.held("leaving the card".to_owned(), self.loaded(), pinned.into_iter()))
    }

    pub(super) fn page_locked(&self) -> u64 {
        self.arena.figures().page_locked_bytes
    }

    /// Gives back page-locked copies and unused staging memory; answers the bytes that are no longer
    /// page-locked.
    pub(super) fn unload_ram(&self, bytes: u64) -> Result<u64, ResidentError> {
        let mut state = self.state.lock();
        let before = self.arena.figures();
        let aim = before.held_bytes.saturating_sub(bytes);
        self.arena.trim(aim)?;
        for unit in (0..state.modules.len()).rev() {
            if self.arena.figures().held_bytes <= aim {
                break;
            }
            if !state.modules[unit].host.is_empty() {
                state.modules[unit].host.clear();
                state.engine.drain()?;
                self.arena.trim(aim)?;
            }
        }
        Ok(before.page_locked_bytes.saturating_sub(self.arena.figures().page_locked_bytes))
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
