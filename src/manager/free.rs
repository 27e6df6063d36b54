//! Making room: `free_memory`, the functions that unload, and `soft_empty_cache`.
//!
//! The executor only: who is asked, in which order and for how much is decided in
//! [`admission`](super::admission). An entry is claimed while its patcher is told to change; a freeing
//! thread waits for nobody else's claim (see [`ledger`](super::ledger)).

#![deny(unsafe_code)]

use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::Arc;

use super::ManagerError;
use super::admission::{self, Candidate, Request, UNLIMITED, Verdict};
use super::loaded_model::{LoadedModel, Standing, address_of};
use super::state::{Card, Manager};
use crate::patcher::{ModelPatcher, ModelUuid, Place};

/// The parameters of [`Manager::free_memory`] beside the bytes and the device.
#[derive(Clone, Debug, Default)]
pub struct FreeOptions {
    /// Entries never to touch.
    pub keep_loaded: Vec<LoadedModel>,
    /// The request is on behalf of paged models only: paged victims are left alone, their bytes count as
    /// free (their pages come on demand), and the page-locked step is skipped.
    pub for_dynamic: bool,
    /// Page-locked host bytes that the incoming load will want; others' page-locked memory makes room for
    /// them.
    pub pins_required: u64,
    /// Accepted and shown in the trace; nothing else reads it.
    pub ram_required: u64,
}

/// The parameters of [`Manager::unload_model_and_clones`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnloadOptions {
    /// Unload the models that belong to it too, and theirs.
    pub unload_additional_models: bool,
    /// On every card, not only on the default device.
    pub all_devices: bool,
}

impl Default for UnloadOptions {
    fn default() -> Self {
        Self { unload_additional_models: true, all_devices: false }
    }
}

/// The parameters of [`Manager::unload_all_except`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeepOptions {
    /// Keep the models that belong to it too, and theirs.
    pub keep_additional_models: bool,
    /// On every card, not only on the default device.
    pub all_devices: bool,
}

impl Default for KeepOptions {
    fn default() -> Self {
        Self { keep_additional_models: true, all_devices: false }
    }
}

/// What to do about an entry that another thread is changing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Busy {
    /// Pass over it. Whoever frees does this, so that nobody waits for a thread that frees.
    Skip,
    /// Wait for it. Only the load does this: what is being freed counts towards what it needs.
    Wait,
}

impl Manager {
    /// Makes `memory_required` bytes free on `device` (on every card in turn for `None`) by unloading
    /// listed models; answers the entries that left the ledger, highest index first.
    ///
    /// 1. Entries whose model died are dropped.
    /// 2. Candidates are the entries on the device that are not in `keep_loaded`; none of them is
    ///    `currently_used` any more. They are asked in this order: most bytes off the card, fewest
    ///    references, smallest, newest.
    /// 3. Before each one the shortfall is computed anew. What it is asked for, it gives in part if that is
    ///    less than it has loaded, and if that falls short it leaves whole
    ///    ([`LoadedModel::model_unload`]). A paged victim of a `for_dynamic` request lowers the request by
    ///    its bytes and is left alone. Without smart memory everyone is asked for everything.
    /// 4. Those that left their card leave the ledger.
    /// 5. Unless `for_dynamic`, others' page-locked memory makes room for `pins_required`.
    /// 6. Idle cache goes back if anything was unloaded, or if it is more than a quarter of what counts as
    ///    free and the state is not HIGH.
    ///
    /// It frees listed models and this process's own idle cache, nothing else. On the CPU it does nothing.
    /// A request of 0 unloads nothing, unless books are overdrawn or smart memory is off; [`UNLIMITED`], or
    /// any more than the card has, unloads everything. Less than was asked may be free afterwards: that is
    /// no error.
    ///
    /// A victim that cannot be detached keeps its entry as long as it still holds bytes of the card; the
    /// failure is traced, and the others are asked.
    ///
    /// Never waits for a load or for another call of this function: an entry that another thread is
    /// changing is passed over. So a worker process may ask its parent for room while the parent is itself
    /// waiting for that worker.
    ///
    /// # Errors
    /// The card is unknown or does not answer. What was unloaded before stays unloaded.
    pub fn free_memory(
        &self,
        memory_required: u64,
        device: Option<Place>,
        options: &FreeOptions,
    ) -> Result<Vec<LoadedModel>, ManagerError> {
        match device {
            Some(device) => self.free_on(device, memory_required, options, Busy::Skip),
            None => self.free_on_every_card(memory_required, options),
        }
    }

    /// Unloads every model on every card; answers the entries, card by card.
    pub fn unload_all_models(&self) -> Result<Vec<LoadedModel>, ManagerError> {
        self.free_on_every_card(UNLIMITED, &FreeOptions::default())
    }

    /// Unloads `model`, every entry of its family (the same [`ModelPatcher::clone_base_uuid`]) and, unless
    /// told otherwise, the models that belong to it and theirs, on the default device or on all cards.
    /// Every other entry stays.
    ///
    /// The function reference says the opposite of this function: that it frees everything *except* the
    /// model and its family. Its name, its parameter and the system that it describes say what is done
    /// here. What that sentence says is [`Self::unload_all_except`].
    pub fn unload_model_and_clones(
        &self,
        model: &Arc<dyn ModelPatcher>,
        options: UnloadOptions,
    ) -> Result<Vec<LoadedModel>, ManagerError> {
        let family = family_of(model, options.unload_additional_models);
        self.unload_where(options.all_devices, |entry| family.contains(&entry))
    }

    /// Unloads every entry except those of `model`, its family and, unless told otherwise, the models that
    /// belong to it and theirs, on the default device or on all cards.
    ///
    /// This is what the function reference's sentence on `unload_model_and_clones` describes; see there.
    pub fn unload_all_except(
        &self,
        model: &Arc<dyn ModelPatcher>,
        options: KeepOptions,
    ) -> Result<Vec<LoadedModel>, ManagerError> {
        let family = family_of(model, options.keep_additional_models);
        self.unload_where(options.all_devices, |entry| !family.contains(&entry))
    }

    fn unload_where(
        &self,
        all_devices: bool,
        goes: impl Fn(ModelUuid) -> bool,
    ) -> Result<Vec<LoadedModel>, ManagerError> {
        let mut keep_loaded = self.ledger.snapshot();
        // An entry that is dead has no family and is dropped anyway.
        keep_loaded.retain(|entry| entry.model().is_some_and(|model| !goes(model.clone_base_uuid())));
        let options = FreeOptions { keep_loaded, ..FreeOptions::default() };
        if all_devices {
            self.free_on_every_card(UNLIMITED, &options)
        } else {
            self.free_on(self.default_device(), UNLIMITED, &options, Busy::Skip)
        }
    }

    /// Lets each of `entries` on `device` in turn take more of the card, until `extra` bytes are used up;
    /// answers the bytes used. Entries that are no longer listed are passed over. It counts as a load: it
    /// waits for its turn, and makes no room.
    ///
    /// # Errors
    /// A model fails to take more; it and those before it keep what they have.
    /// [`ManagerError::Reentrant`] if called from inside a patcher's method.
    pub fn use_more_memory(
        &self,
        extra: u64,
        entries: &[LoadedModel],
        device: Place,
    ) -> Result<u64, ManagerError> {
        self.refuse_nested("use_more_memory")?;
        let _turn = self.loads.lock();
        let mut left = extra;
        for entry in entries.iter().filter(|entry| entry.device() == device) {
            if left == 0 {
                break;
            }
            let claim = self.ledger.claim_when_free(entry, Standing::Loading);
            let Some(_claim) = claim else { continue };
            let calling = self.calling_out();
            let taken = entry.model_use_more_vram(left);
            drop(calling);
            match taken {
                Ok(taken) => left = left.saturating_sub(taken),
                Err(source) => {
                    let model = entry.model().map_or_else(String::new, |model| model.label());
                    let bytes = entry.model_memory();
                    return Err(ManagerError::Load { model, bytes, place: device, source });
                }
            }
        }
        Ok(extra - left)
    }

    /// Drops the entries whose model died. An entry whose patcher died while one that it was cloned from
    /// lives goes to that one.
    pub fn cleanup_models_gc(&self) {
        let entries = self.ledger.snapshot();
        // Nearly always nobody died, which costs one look at each entry.
        if !entries.iter().any(LoadedModel::patcher_died) {
            return;
        }
        let mut listed = HashSet::new();
        let mut gone = Vec::new();
        for entry in entries {
            let alive = entry.model().is_some();
            // A parent that was listed itself when it inherited an entry keeps only the newer one.
            if !(alive && listed.insert(entry.patcher_address())) {
                gone.push(entry);
            }
        }
        // An entry in another thread's hands is that thread's to drop.
        gone.retain(|entry| entry.try_take(Standing::Claimed));
        tracing::debug!(entries = gone.len(), "dropped entries whose model died");
        self.ledger.remove(&gone);
    }

    /// Hands idle cache of every card back to its driver: the pool's, and frames that back no page. `force`
    /// is accepted and ignored, as in the reference. It does not stop the device.
    ///
    /// Mapped pages, the streaming ring, cast buffers, memory of captured graphs, what others allocated and
    /// what a worker process holds stay as they are; on the CPU there is nothing to do.
    ///
    /// # Errors
    /// A card does not answer; the others were served.
    pub fn soft_empty_cache(&self, force: bool) -> Result<(), ManagerError> {
        let _ = force;
        let mut first_error = None;
        for (place, card) in self.devices().zip(&self.cards) {
            if let Err(source) = empty_cache(card) {
                tracing::warn!(device = %place, %source, "idle cache could not be handed back");
                first_error.get_or_insert(ManagerError::Device { place, source });
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn free_on_every_card(
        &self,
        memory_required: u64,
        options: &FreeOptions,
    ) -> Result<Vec<LoadedModel>, ManagerError> {
        let mut unloaded = Vec::new();
        let mut first_error = None;
        for place in self.devices() {
            match self.free_on(place, memory_required, options, Busy::Skip) {
                Ok(entries) => unloaded.extend(entries),
                // One card that is gone must not keep the others from being freed.
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        first_error.map_or(Ok(unloaded), Err)
    }

    /// `free_memory` for one device.
    pub(super) fn free_on(
        &self,
        device: Place,
        memory_required: u64,
        options: &FreeOptions,
        busy: Busy,
    ) -> Result<Vec<LoadedModel>, ManagerError> {
        let span = tracing::debug_span!(
            "free_memory",
            %device,
            memory_required,
            for_dynamic = options.for_dynamic,
            keep_loaded = options.keep_loaded.len(),
            pins_required = options.pins_required,
            ram_required = options.ram_required,
        );
        let _span = span.enter();
        self.cleanup_models_gc();
        let Some(card) = self.card(device, "memory was to be freed there")? else {
            return Ok(Vec::new());
        };
        if !options.for_dynamic {
            card.release_idle_frames();
        }

        let knobs = self.knobs();
        let (entries, order) = self.candidates(device, &options.keep_loaded, busy);
        let mut request = Request::new(memory_required, options.for_dynamic, knobs.smart_memory);
        let mut unloaded = Vec::new();
        for (candidate, dynamic) in order {
            let Some(entry) = entries.get(candidate.index) else { continue };
            if self.ask(entry, dynamic, device, &mut request, busy)? {
                unloaded.push((candidate.index, entry.clone()));
            }
        }
        unloaded.sort_unstable_by_key(|(index, _)| Reverse(*index));

        if !options.for_dynamic && options.pins_required > 0 {
            self.make_room_for_pins(options.pins_required);
        }
        if unloaded.is_empty() {
            let free = self.free_figures(device)?;
            if admission::should_empty_cache(false, knobs.vram_state, free.total, free.cache) {
                tracing::debug!(free = free.total, cache = free.cache, "handing idle cache back");
                self.empty_caches_quietly();
            }
        } else {
            self.empty_caches_quietly();
        }
        Ok(unloaded.into_iter().map(|(_, entry)| entry).collect())
    }

    /// A failure to hand cache back was traced, and changes nothing of what was freed.
    fn empty_caches_quietly(&self) {
        drop(self.soft_empty_cache(false));
    }

    /// The entries that may be asked, and the order to ask them in; a candidate's index is its place in the
    /// list. Clears `currently_used` on each.
    fn candidates(
        &self,
        device: Place,
        keep_loaded: &[LoadedModel],
        busy: Busy,
    ) -> (Vec<LoadedModel>, Vec<(Candidate, bool)>) {
        let keep: HashSet<usize> = keep_loaded.iter().map(LoadedModel::patcher_address).collect();
        let entries = self.ledger.snapshot();
        let mut order = Vec::with_capacity(entries.len());
        for (index, entry) in entries.iter().enumerate() {
            let free = match entry.standing() {
                Standing::Listed => true,
                Standing::Claimed => busy == Busy::Wait,
                _ => false,
            };
            if !free || entry.device() != device {
                continue;
            }
            if !keep.is_empty() && keep.contains(&entry.patcher_address()) {
                continue;
            }
            // Counted before our own reference is taken.
            let references = entry.references();
            let Some(model) = entry.model() else { continue };
            let size = model.model_size();
            let offloaded = Reverse(size.saturating_sub(model.loaded_size()));
            entry.set_currently_used(false);
            order.push((Candidate { offloaded, references, size, index }, model.is_dynamic()));
        }
        admission::sort_victims(&mut order);
        (entries, order)
    }

    /// Asks one victim for what is still missing; answers whether it left the ledger.
    fn ask(
        &self,
        entry: &LoadedModel,
        dynamic: bool,
        device: Place,
        request: &mut Request,
        busy: Busy,
    ) -> Result<bool, ManagerError> {
        // Only what a paged victim holds can matter before the figure is read.
        let loaded = if dynamic { entry.model_loaded_memory() } else { 0 };
        let mut verdict = request.verdict(dynamic, loaded, None);
        if verdict == Verdict::NeedsFigure {
            let free = self.free_figures(device)?.total;
            verdict = request.verdict(dynamic, loaded, Some(free));
        }
        let Verdict::Unload(bytes) = verdict else {
            tracing::trace!(model = ?entry, %device, dynamic, ?request, "spared a victim");
            return Ok(false);
        };
        let claim = match busy {
            Busy::Skip => self.ledger.try_claim(entry),
            Busy::Wait => self.ledger.claim_when_free(entry, Standing::Claimed),
        };
        let Some(_claim) = claim else { return Ok(false) };
        let Some(model) = entry.model() else { return Ok(false) };
        let before = model.loaded_size();
        let calling = self.calling_out();
        let left = entry.model_unload(Some(bytes), true);
        drop(calling);
        let left = match left {
            Ok(left) => left,
            Err(error) => {
                let still_loaded = model.loaded_size();
                tracing::warn!(model = model.label(), bytes, still_loaded, %error, "unloading failed");
                still_loaded == 0
            }
        };
        tracing::debug!(
            model = model.label(),
            %device,
            asked = bytes,
            loaded_before = before,
            loaded_after = model.loaded_size(),
            left,
            ?request,
            "asked a victim"
        );
        if left {
            self.ledger.remove(std::slice::from_ref(entry));
        }
        Ok(left)
    }
}

fn empty_cache(card: &Card) -> Result<(), crate::device::DeviceError> {
    if !card.has_idle_cache() {
        return Ok(());
    }
    card.release_idle_frames();
    card.figures.empty_cache()
}

/// The family identities of `model` and, if wanted, of all models that belong to it, at any depth.
fn family_of(model: &Arc<dyn ModelPatcher>, with_additional: bool) -> HashSet<ModelUuid> {
    let mut family = HashSet::from([model.clone_base_uuid()]);
    if with_additional {
        let mut seen = HashSet::from([address_of(model)]);
        let mut next = model.additional_models();
        while let Some(model) = next.pop() {
            if seen.insert(address_of(&model)) {
                family.insert(model.clone_base_uuid());
                next.extend(model.additional_models());
            }
        }
    }
    family
}
