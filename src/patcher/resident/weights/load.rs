//! What is on the card: modules are loaded within a budget, and leave when memory is asked for.

#![deny(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::choose::{Candidate, Room, to_load, to_unload};
use super::super::error::ResidentError;
use super::{Module, State, UNKNOWN, Weights, fences_of, link_bytes};
use crate::pager::{DevicePatches, PatchSet};
use crate::patcher::LoadBudget;
use crate::transfer::is_cast_on_card;

impl Weights {
    /// The modules, as the choice sees them.
    fn candidates(&self, state: &State) -> Vec<Candidate> {
        let attached = state.attached.as_ref().map(|attached| &attached.set);
        let candidate = |(unit, module): (usize, &Module)| {
            let bytes = self.unit_bytes(unit);
            let streams = module.streams();
            let link = if streams { link_bytes(&self.layout, &self.run_of(unit)) } else { 0 };
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
    pub(in crate::patcher::resident) fn load(
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
    pub(in crate::patcher::resident) fn unload(&self, bytes: u64) -> Result<u64, ResidentError> {
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
    pub(in crate::patcher::resident) fn detach(&self) -> Result<(), ResidentError> {
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

    pub(in crate::patcher::resident) fn page_locked(&self) -> u64 {
        self.arena.figures().page_locked_bytes
    }

    /// Gives back page-locked copies and unused staging memory; answers the bytes that are no longer
    /// page-locked.
    pub(in crate::patcher::resident) fn unload_ram(&self, bytes: u64) -> Result<u64, ResidentError> {
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
}
