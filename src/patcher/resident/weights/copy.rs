//! How a module's bytes come: copied from its files or host memory, patched on the way or in place, put back,
//! and streamed through the buffer.

#![expect(unsafe_code, reason = "copies backups out of allocations that it owns")]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::buffer::Places;
use super::super::choose::Largest;
use super::super::error::ResidentError;
use super::{Module, SLOT_BYTES, State, UNKNOWN, Weights, card_bytes, fences_of};
use crate::device::{DeviceError, Fence, PoolAllocation};
use crate::pager::{CopySource, CopyTarget, DevicePatches, PatchSet, copy_in, copy_run, patch_run};
use crate::staging::StagingBuffer;
use crate::transfer::{is_cast_on_card, read_extents};
use crate::units::{DeviceAddress, DeviceRange};

impl Weights {
    /// Makes `set` the patches that are applied from now on.
    pub(super) fn attach(&self, state: &mut State, set: Option<&Arc<PatchSet>>) -> Result<(), ResidentError> {
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
    pub(in crate::patcher::resident) fn take_buffer(
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
    pub(super) fn copy_module(
        &self,
        state: &mut State,
        unit: usize,
        start: DeviceAddress,
        patched: bool,
        keep: bool,
        waits: &[Fence],
    ) -> Result<Fence, ResidentError> {
        let run = self.run_of(unit);
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
    pub(super) fn refresh(&self, state: &mut State, unit: usize, version: u32) -> Result<(), ResidentError> {
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
    pub(super) fn patch_in_place(
        &self,
        state: &mut State,
        unit: usize,
        start: DeviceAddress,
        bake: bool,
    ) -> Result<(), ResidentError> {
        let run = self.run_of(unit);
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
        let base = DeviceAddress(start.0.wrapping_sub(self.run_of(unit).start));
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
    pub(super) fn stream_through(
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
    pub(super) fn drop_buffer(state: &mut State) -> Result<(), ResidentError> {
        let places = std::mem::take(&mut state.places);
        for place in places.ends {
            for fence in place.ready.iter().chain(place.uses.iter().map(|(_, fence)| fence)) {
                fence.settle()?;
            }
        }
        state.buffer = None;
        Ok(())
    }
}
