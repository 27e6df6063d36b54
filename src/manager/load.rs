//! Making models resident: `load_models_gpu` and `load_model_gpu`.
//!
//! The executor only: what to ask for and what to give each model is decided in
//! [`admission`](super::admission). One load runs at a time; it holds the `loads` lock throughout, and the
//! entries of the models that it brings in are in its hands ([`Standing::Loading`]).

#![deny(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::admission::{self, BudgetInputs, UNLIMITED};
use super::free::Busy;
use super::ledger::Ledger;
use super::loaded_model::{LoadedModel, Standing, address_of, memory_required};
use super::state::Manager;
use super::{FreeOptions, Knobs, ManagerError};
use crate::patcher::{LoadBudget, ModelPatcher, ModelUuid, PatcherError, Place};

/// The parameters of [`Manager::load_models_gpu`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LoadOptions {
    /// Bytes of working memory that the caller expects on top of the weights. 0 still leaves the floor and
    /// the reserve.
    pub memory_required: u64,
    /// Write patches into the weights, with backups, instead of applying them when a layer is used. Means
    /// nothing for a paged model.
    pub force_patch_weights: bool,
    /// Bytes of working memory for the smallest run that the caller accepts; `None` for no other than the
    /// full one. If room for the full request cannot be made, weights may take what this leaves.
    pub minimum_memory_required: Option<u64>,
    /// Load whole, whatever the budget says. Changes nothing for a paged model, nor where the state is
    /// [`VramState::No`](super::VramState::No).
    pub force_full_load: bool,
}

/// A model that is being brought in.
struct Incoming {
    model: Arc<dyn ModelPatcher>,
    /// What will be listed: its old entry, or a new one.
    entry: LoadedModel,
    /// Its old entry and those of its clones, in the load's hands.
    replaced: Vec<LoadedModel>,
}

impl Manager {
    /// Makes `models` resident, each on its load device, and lists them with the first named in front.
    ///
    /// The models that each one's patches need ([`ModelPatcher::model_patches_models`]) follow it; one that
    /// is named twice is loaded once, and so are two clones (the first named is listed). In order:
    ///
    /// 1. Entries whose model died are dropped.
    /// 2. The working memory is the larger of [`Manager::minimum_inference_memory`] and
    ///    `memory_required` with the reserve.
    /// 3. A model that is listed keeps its entry. Room is made as
    ///    [`FreeOptions::for_dynamic`](crate::manager::FreeOptions::for_dynamic) only if all models are paged.
    /// 4. Listed clones of the models let go of the weights, whose bytes stay.
    /// 5. The bytes still missing are summed per card, and so is the page-locked memory that resident
    ///    models will want.
    /// 6. Each card is asked to free that sum, a tenth of it and the working memory.
    /// 7. Where still less is free than the smallest run needs, once more for that.
    /// 8. Each model is given its budget (see [`LoadBudget`]) and goes to the front of the ledger.
    ///
    /// Models for the CPU are loaded whole, with no admission.
    ///
    /// `force_full_load` does not override [`VramState::No`](super::VramState::No), which always gives
    /// practically nothing. The function reference says that it overrides every state; the system that it
    /// describes does not, and this follows the system.
    ///
    /// # Errors
    /// A model's card is unknown (nothing was done), a card does not answer, or a model fails to load. In
    /// the last case those loaded before it (the ones named *after* it) stay listed, it is not listed and
    /// holds nothing, those that were still to come keep the entries they had, and what was evicted stays
    /// evicted. [`ManagerError::Reentrant`] if called from inside a patcher's method.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use vram_pager::manager::{LinuxHost, LoadOptions, Manager};
    /// use vram_pager::patcher::{ModelPatcher, SizedCard, SizedModel, SizedSpec};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// const GIB: u64 = 1 << 30;
    /// let card = SizedCard::new("a card of 8 GiB", 8 * GIB);
    /// let manager = Manager::over(vec![card.clone()], Arc::new(LinuxHost::default()));
    /// let spec = SizedSpec { size: 12 * GIB, ..SizedSpec::default() };
    /// let model: Arc<dyn ModelPatcher> = SizedModel::new(spec, &card);
    ///
    /// // A sampler asks for a batch of two and accepts one.
    /// let each = 2 * GIB;
    /// let options = LoadOptions {
    ///     memory_required: 2 * each,
    ///     minimum_memory_required: Some(each),
    ///     ..LoadOptions::default()
    /// };
    /// manager.load_model_gpu(&model, options)?;
    /// let batch = (manager.get_free_memory(Some(model.load_device()))? / each).clamp(1, 2);
    /// assert_eq!(batch, 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn load_models_gpu(
        &self,
        models: &[Arc<dyn ModelPatcher>],
        options: LoadOptions,
    ) -> Result<(), ManagerError> {
        self.refuse_nested("load_models_gpu")?;
        let span = tracing::debug_span!(
            "load_models_gpu",
            models = models.len(),
            memory_required = options.memory_required,
            minimum_memory_required = options.minimum_memory_required,
            force_full_load = options.force_full_load,
        );
        let _span = span.enter();
        let _turn = self.loads.lock();
        self.cleanup_models_gc();
        // The machine's share of page-locked memory may have changed without a word.
        self.apply_limits();

        let knobs = self.knobs();
        let minimum_inference = knobs.minimum_inference_memory();
        let extra_mem = admission::working_memory(options.memory_required, knobs.reserve, minimum_inference);
        let smallest = admission::smallest_run(
            options.minimum_memory_required,
            extra_mem,
            knobs.reserve,
            minimum_inference,
        );

        let wanted = with_riders(models);
        for model in &wanted {
            self.card_for(model.load_device(), || format!("{} is to be loaded there", model.label()))?;
        }
        let for_dynamic = wanted.iter().all(|model| model.is_dynamic());
        let in_hand = self.take_incoming(wanted);

        let mut needs = needs_by_device(&in_hand.models);
        needs.retain(|need| !need.device.is_cpu());
        for need in &needs {
            let ask = admission::admission_ask(need.missing, extra_mem).unwrap_or(UNLIMITED);
            tracing::debug!(device = %need.device, missing = need.missing, extra_mem, ask, for_dynamic, "admission");
            let free = FreeOptions { for_dynamic, pins_required: need.pins, ..FreeOptions::default() };
            self.free_on(need.device, ask, &free, Busy::Wait)?;
        }
        for need in &needs {
            let free = self.free_figures(need.device)?.total;
            if i128::from(free) < i128::from(smallest) {
                tracing::debug!(device = %need.device, free, smallest, "asking again for the smallest run");
                let options = FreeOptions { for_dynamic, ..FreeOptions::default() };
                self.free_on(need.device, smallest, &options, Busy::Wait)?;
            }
        }

        for incoming in &in_hand.models {
            self.load_one(incoming, &options, &knobs, smallest)?;
        }
        Ok(())
    }

    /// [`Self::load_models_gpu`] with one model.
    pub fn load_model_gpu(
        &self,
        model: &Arc<dyn ModelPatcher>,
        options: LoadOptions,
    ) -> Result<(), ManagerError> {
        self.load_models_gpu(std::slice::from_ref(model), options)
    }

    /// Lists a model that was loaded elsewhere, in front, with no admission: a [stand-in] for what a worker
    /// process has brought to the card by itself. The manager evicts it like any other. Answers its entry.
    ///
    /// Where its weights are listed already (through this patcher or a clone) that entry is answered, where
    /// it stands, with `currently_used` as given here. A stand-in is listed with `currently_used` false:
    /// this process does not know whether the worker is running it.
    ///
    /// It counts as a load: it waits for its turn.
    ///
    /// # Errors
    /// The model's card is unknown. [`ManagerError::Reentrant`] if called from inside a patcher's method.
    ///
    /// [stand-in]: crate::patcher::StandIn
    pub fn list(
        &self,
        model: &Arc<dyn ModelPatcher>,
        currently_used: bool,
    ) -> Result<LoadedModel, ManagerError> {
        self.refuse_nested("list")?;
        self.card(model.load_device(), &format!("{} is to be listed there", model.label()))?;
        let entry = LoadedModel::new(model);
        let _turn = self.loads.lock();
        self.cleanup_models_gc();
        let entry = self.ledger.list_unless_listed(entry);
        entry.set_currently_used(currently_used);
        tracing::debug!(
            model = model.label(),
            device = %model.load_device(),
            loaded = model.loaded_size(),
            currently_used,
            "listed"
        );
        Ok(entry)
    }

    /// Takes the entries of `wanted` and of their clones into the load's hands, waiting for threads that
    /// are freeing one of them. The models come in the order in which they are loaded: last named first.
    fn take_incoming(&self, wanted: Vec<Arc<dyn ModelPatcher>>) -> InHand<'_> {
        let places: HashMap<ModelUuid, usize> =
            wanted.iter().enumerate().map(|(place, model)| (model.weights_uuid(), place)).collect();
        let mut replaced: Vec<Vec<LoadedModel>> = vec![Vec::new(); wanted.len()];
        for entry in self.ledger.snapshot() {
            if let Some(place) = places.get(&entry.weights()) {
                replaced[*place].push(entry);
            }
        }
        let mut in_hand = InHand { ledger: &self.ledger, models: Vec::with_capacity(wanted.len()) };
        for (model, mut replaced) in wanted.into_iter().zip(replaced).rev() {
            replaced.retain(|entry| self.ledger.take_when_free(entry, Standing::Loading));
            let own = replaced.iter().find(|entry| {
                entry.patcher_address() == address_of(&model) && entry.device() == model.load_device()
            });
            let entry = own.cloned().unwrap_or_else(|| LoadedModel::new(&model));
            in_hand.models.push(Incoming { model, entry, replaced });
        }
        in_hand
    }

    /// Step 8 for one model.
    fn load_one(
        &self,
        incoming: &Incoming,
        options: &LoadOptions,
        knobs: &Knobs,
        smallest: u64,
    ) -> Result<(), ManagerError> {
        let Incoming { model, entry, replaced } = incoming;
        let device = entry.device();
        let loaded = model.loaded_size();
        let free = if device.is_cpu() { 0 } else { self.free_figures(device)?.total };
        let budget = admission::load_budget(&BudgetInputs {
            state: knobs.vram_state,
            on_cpu: device.is_cpu(),
            force_full_load: options.force_full_load,
            free,
            loaded,
            minimum_memory_required: smallest,
            minimum_inference: knobs.minimum_inference_memory(),
            min_weight_ratio: self.min_weight_ratio(device, knobs),
        });
        let added = self.change_hands(model, replaced, budget, options.force_patch_weights);
        match added {
            Ok(added) => {
                entry.set_currently_used(true);
                self.ledger.list(entry, replaced);
                tracing::debug!(model = model.label(), %device, free, loaded, %budget, added, "loaded");
                Ok(())
            }
            Err(source) => {
                let bytes = model.model_size();
                tracing::warn!(model = model.label(), %device, %budget, %source, "load failed");
                let calling = self.calling_out();
                if let Err(error) = model.detach(true) {
                    tracing::warn!(model = model.label(), %error, "detaching after a failed load failed too");
                }
                drop(calling);
                self.ledger.remove(replaced);
                entry.set_standing(Standing::Gone);
                Err(ManagerError::Load { model: model.label(), bytes, place: device, source })
            }
        }
    }

    /// Lets the listed handles of the weights go and loads `model`.
    fn change_hands(
        &self,
        model: &Arc<dyn ModelPatcher>,
        replaced: &[LoadedModel],
        budget: LoadBudget,
        force_patch_weights: bool,
    ) -> Result<u64, PatcherError> {
        let _calling = self.calling_out();
        for old in replaced {
            if let Some(handle) = old.model() {
                handle.detach(false)?;
            }
        }
        model.partially_load(budget, force_patch_weights)
    }
}

/// The models of one load; what was not listed anew by the end keeps the entry it had.
struct InHand<'a> {
    ledger: &'a Ledger,
    models: Vec<Incoming>,
}

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        for entry in self.models.iter().flat_map(|incoming| &incoming.replaced) {
            if entry.standing() == Standing::Loading {
                self.ledger.settle(entry);
            }
        }
    }
}

/// The models and those that ride along with each, without duplicates and without second clones.
fn with_riders(models: &[Arc<dyn ModelPatcher>]) -> Vec<Arc<dyn ModelPatcher>> {
    let mut seen = HashSet::with_capacity(models.len());
    let mut wanted = Vec::with_capacity(models.len());
    for model in models {
        let riders = model.model_patches_models();
        for model in std::iter::once(model).chain(&riders) {
            // The same weights are the same model or a clone of it: either way they are loaded once.
            if seen.insert(model.weights_uuid()) {
                wanted.push(Arc::clone(model));
            }
        }
    }
    wanted
}

/// What the models of a load need on one device.
struct Need {
    device: Place,
    missing: u64,
    pins: u64,
}

/// The needs of each device, in the order in which the devices first come up.
fn needs_by_device(incoming: &[Incoming]) -> Vec<Need> {
    let mut needs: Vec<Need> = Vec::new();
    for Incoming { model, entry, .. } in incoming {
        let device = entry.device();
        let place = needs.iter().position(|need| need.device == device).unwrap_or_else(|| {
            needs.push(Need { device, missing: 0, pins: 0 });
            needs.len() - 1
        });
        let need = &mut needs[place];
        need.missing = need.missing.saturating_add(memory_required(&**model, device));
        if !model.is_dynamic() {
            need.pins = need.pins.saturating_add(model.model_size());
        }
    }
    needs
}
